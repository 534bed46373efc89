"""Adam's rule, for some rows of a parameter.

    μ ← μ + w₁·(g − μ);   ν ← ν + w₂·(g² − ν);   p ← p·(1 − decay) − rate·μ/(√ν + ε)

μ and ν are bias-corrected averages: with w = (1 − β)/(1 − βᵏ) they are what textbooks write m̂ and v̂.
"""

import torch
from torch import Tensor

from lightning_lowbit.optim.clipping import Scalar


# fmt: off
def adam_(
    parameter: Tensor, gradient: Tensor, mean: Tensor, mean_square: Tensor,   # any one shape, dtype of the statistics
    weight1: Scalar, weight2: Scalar, rate: Scalar, decay: Scalar,            # 0-d tensors or numbers
    eps: float,
) -> None:  # fmt: on
    """Apply one piece of a gradient, in place, itself too; with weights, rate and decay of 0 nothing moves, NaN or not.

    ``rate`` is the learning rate of this step; ``decay``, the share that the parameter loses first.
    """
    gradient.nan_to_num_(0.0, 0.0, 0.0)  # of a skipped step: 0·NaN is NaN
    mean.lerp_(gradient, weight1)
    mean_square.lerp_(gradient.square_(), weight2)
    direction = torch.div(mean, torch.sqrt(mean_square, out=gradient).add_(eps), out=gradient)
    if isinstance(decay, Tensor) or decay:
        parameter.mul_(1 - decay)
    parameter.sub_(direction.mul_(rate))


# fmt: off
def fused_adam_(
    parameter: Tensor, gradient: Tensor, mean: Tensor, mean_square: Tensor,   # all contiguous but the gradient
    weight1: float, weight2: float, rate: float, decay: float,
    eps: float,
) -> None:  # fmt: on
    """`adam_` in one pass, where scalars are numbers."""
    torch._fused_adamw_(
        [parameter], [gradient.contiguous()], [mean], [mean_square], [], [_LATE],
        lr=rate, beta1=1 - weight1, beta2=1 - weight2, weight_decay=decay / rate if rate else 0.0, eps=eps,
        amsgrad=False, maximize=False,
    )  # fmt: skip


# A count of steps at which 1 − βᵗ is 1, so that the fused kernel corrects no bias: the moments are corrected already.
_LATE = torch.tensor(1e9, device="cpu")
