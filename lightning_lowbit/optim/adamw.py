"""AdamW that skips steps with NaN or Inf, and can keep its state in FP8."""

from torch import Tensor
from torch.optim.optimizer import ParamsT

from lightning_lowbit.optim.guarded_adam import GuardedAdam


class LowBitAdamW(GuardedAdam):
    """AdamW, for parameters of any real floating dtype on any device, whole or sharded.

    With fp32 moments it differs from `torch.optim.AdamW` in two points: the moments of bf16 parameters are fp32, and a
    step is skipped if a gradient holds a NaN, an Inf, or an element beyond 9e18, whose square does not fit fp32.

    Args:
        params: parameters, groups, or named parameters, as for every `torch.optim.Optimizer`.
        lr: learning rate; a float or a 0-d tensor.
        betas: β1, β2 of the moments.
        eps: ε of the denominator.
        weight_decay: λ, decoupled.
        maximize: ascend.
        moments: ``"fp8"`` or ``"fp32"``, 2.06 or 8 bytes per parameter; parameters below two dimensions keep fp32.
        master_weights: ``"fp16"`` keeps a second, three bits longer copy of bfloat16 parameters, with one scale per
            tensor. Other code's writes into the parameters are then overwritten at the next step.

    Raises:
        ValueError: an option out of range, or, in `step`, a sparse or complex gradient, or an unknown sharding.

    Examples:
        >>> optimizer = LowBitAdamW(model.parameters(), lr=1e-3, moments="fp8")
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
