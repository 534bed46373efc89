"""AdamW that skips what is not finite, and whose state may be in FP8."""

from torch import Tensor
from torch.optim.optimizer import ParamsT

from lightning_lowbit.optim.guarded_adam import GuardedAdam


class LowBitAdamW(GuardedAdam):
    """AdamW, for parameters of any real floating dtype on any device, whole or sharded.

    With moments in fp32 it differs from `torch.optim.AdamW` in two points: it keeps the moments of bf16 parameters in
    fp32, and skips a step with a NaN or Inf in a gradient, or an element beyond 9e18, whose square no fp32 holds.

    Args:
        params: parameters, groups, or named parameters, as for every `torch.optim.Optimizer`.
        lr: learning rate; a float or a 0-d tensor.
        betas: β1, β2 of the moments.
        eps: ε of the denominator.
        weight_decay: λ, decoupled.
        maximize: ascend.
        moments: ``"fp8"`` or ``"fp32"``, 2.06 or 8 bytes per parameter; what has fewer than two dimensions keeps fp32.
        master_weights: ``"fp16"`` for parameters in bfloat16: keeps them once more, three digits longer, with one scale
            per tensor. Writes into the parameters by other code are then overwritten at the next step.

    Raises:
        ValueError: an option out of range, or, in `step`, a sparse or complex gradient, or a parameter whose
            sharding is not known.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        maximize: bool = False,
        moments: str = "fp8",
        master_weights: str | None = None,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            maximize=maximize,
            moments=moments,
            master_weights=master_weights,
        )
