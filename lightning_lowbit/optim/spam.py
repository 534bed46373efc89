"""SPAM: Adam with a clip by its own second moment, resets of the moments, and a warm-up after each.

    SpikeClip    where g² > θ·v:  g ← sign(g)·√(θ·v),    from 20 steps after the start or a reset on
    MoRet        every ΔT steps both moments start anew; the learning rate then rises from a hundredth along a cosine

As in the authors' code, v is Adam's second moment without bias correction. Their bias correction counts the steps since
the start, which makes the first steps after a reset up to 6.6 times too long; here it restarts with the moments.

Source: SPAM (arXiv 2501.06842), algorithm 1 and section 4.1 for the values.
"""

from torch import Tensor
from torch.optim.optimizer import ParamsT

from lightning_lowbit.optim.guarded_adam import GuardedAdam


class SPAM(GuardedAdam):
    """SPAM, for parameters of any real floating dtype on any device, whole or sharded.

    Args:
        params: parameters, groups, or named parameters, as for every `torch.optim.Optimizer`.
        lr: learning rate; a float or a 0-d tensor.
        betas: β1, β2 of Adam's moments.
        eps: ε of Adam's denominator; the authors' code: 1e-6.
        weight_decay: λ, decoupled.
        spike_threshold: θ; 5000.
        reset_interval: ΔT, steps between resets of the moments; 500. None for no resets.
        warmup_steps: steps of warm-up after each reset; 150.
        density: share of a matrix's elements that have moments and move, 1/n: one of n neighbors, drawn anew at each
            reset; parameters below two dimensions move whole. 1 for all.
        maximize: ascend.

    Raises:
        ValueError: an option out of range, or, in `step`, a sparse or complex gradient, or an unknown sharding.

    Examples:
        >>> optimizer = SPAM(model.parameters(), lr=1e-3, reset_interval=500)
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        spike_threshold: float = 5000.0,
        reset_interval: int | None = 500,
        warmup_steps: int = 150,
        density: float = 1.0,
        maximize: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            element_clip="spike_clip",
            spike_threshold=spike_threshold,
            reset_interval=reset_interval,
            warmup_steps=warmup_steps,
            density=density,
            maximize=maximize,
        )
