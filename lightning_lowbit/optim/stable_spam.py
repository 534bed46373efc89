"""Stable-SPAM: Adam that survives the spikes of low-bit training.

    AdaClip       M = max|g|;  T ← avg(M; γ3, t);  where |g| > T:  g ← g·T/M
    AdaGN         n = ‖g‖₂;  m ← avg(n; γ1, t);  v ← avg(n²; γ2, t);   g ← g/n · m/(√v + ε)
    MoRet, Adam   see `guarded_adam`

Source: the Stable-SPAM thesis, chapter 3 and algorithm A.1. As in the authors' code, ε stands outside the roots. Unlike
there, the rules and the moments have separate counters: one counter inflates the threshold after each reset.
"""

from types import MappingProxyType
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from lightning_lowbit.checks import choose
from lightning_lowbit.optim.guarded_adam import GuardedAdam

#: γ1, γ2 of table A.2 (training in 4 bits) and table A.3 (BF16).
PRESETS = MappingProxyType(
    {
        "4-bit": {"gamma1": 0.7, "gamma2": 0.9, "gamma3": 0.999},
        "bf16": {"gamma1": 0.85, "gamma2": 0.99999, "gamma3": 0.999},
    }
)


class StableSPAM(GuardedAdam):
    """Stable-SPAM, for parameters of any real floating dtype on any device, whole or sharded.

    Each rule can be chosen alone and per parameter group. Do not clip gradients elsewhere
    (``Trainer(gradient_clip_val=None)``): the rules must see them unclipped.

    Args:
        params: parameters, groups, or named parameters, as for every `torch.optim.Optimizer`.
        lr: learning rate; a float or a 0-d tensor. Table A.2: 1e-3 for LLaMA-130M, 4e-4 for 350M, 2e-4 for 1B.
        betas: β1, β2 of Adam's moments; algorithm A.1: .9, .999.
        eps: ε, in the norm's and in Adam's denominator; the authors' code: 1e-8.
        weight_decay: λ, decoupled; the authors' configurations: 0.
        preset: ``"4-bit"`` or ``"bf16"``: γ1, γ2 and γ3 where they are None.
        gamma1: γ1, average of the gradient norm; table A.2: .7 for 4 bits, table A.3: .85 for BF16.
        gamma2: γ2, average of its square; table A.2: .9 for 4 bits, table A.3: .99999 for BF16.
        gamma3: γ3 (θ in places), average of the largest element; tables A.2 and A.3: .999.
        reset_interval: ΔT, steps between resets of the moments; tables A.2 and A.3: 1000 (4-bit scripts: 500); or None.
        warmup_steps: steps after each reset in which the learning rate rises from a hundredth along a cosine; or 0.
        total_steps: steps over which β1 and γ1 halve along a cosine, as in the authors' scripts; None for no change.
        element_clip: ``"ada_clip"``; ``"spike_clip"``, SPAM's rule; or None.
        spike_threshold: θ of SpikeClip; section 4.1: 5000.
        norm_clip: ``"ada_gn"``; ``"grad_clip"``, a bound on the norm of all gradients together; or None.
        max_norm: that bound; section 4.1: 1.
        matrices_only: parameters below two dimensions get plain Adam.
        maximize: ascend.
        moments: ``"fp32"`` or ``"fp8"``, 8 or 2.06 bytes per parameter; parameters below two dimensions keep fp32.
        master_weights: ``"fp16"`` keeps a second, three bits longer copy of bfloat16 parameters, with one scale per
            tensor. Other code's writes into the parameters are then overwritten at the next step.

    Raises:
        ValueError: an option out of range, or, in `step`, a sparse or complex gradient, or an unknown sharding.

    Examples:
        >>> optimizer = StableSPAM(model.parameters(), lr=1e-3, moments="fp8")
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        preset: str = "4-bit",
        gamma1: float | None = None,
        gamma2: float | None = None,
        gamma3: float | None = None,
        reset_interval: int | None = 1000,
        warmup_steps: int = 0,
        total_steps: int | None = None,
        element_clip: str | None = "ada_clip",
        spike_threshold: float = 5000.0,
        norm_clip: str | None = "ada_gn",
        max_norm: float = 1.0,
        matrices_only: bool = False,
        maximize: bool = False,
        moments: str = "fp32",
        master_weights: str | None = None,
    ) -> None:
        given = {"gamma1": gamma1, "gamma2": gamma2, "gamma3": gamma3}
        gammas = _gammas(preset, {name: value for name, value in given.items() if value is not None})
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            **gammas,
            reset_interval=reset_interval,
            warmup_steps=warmup_steps,
            total_steps=total_steps,
            element_clip=element_clip,
            spike_threshold=spike_threshold,
            norm_clip=norm_clip,
            max_norm=max_norm,
            matrices_only=matrices_only,
            maximize=maximize,
            moments=moments,
            master_weights=master_weights,
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, also in mid-training, also with its own ``preset``; an option out of range is a ValueError."""
        group = dict(param_group)
        if "preset" in group:
            group = _gammas(group.pop("preset"), group)
        super().add_param_group(group)


def _gammas(preset: str, given: dict[str, Any]) -> dict[str, Any]:
    return PRESETS[choose("preset", preset, PRESETS)] | given
