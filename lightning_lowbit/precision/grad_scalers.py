"""Loss scalers for fp16. torch's scale doubles every 2000 steps without limit, and may fall to 0; these have bounds.

    step without infinities      tracker ← tracker + 1; at growth_interval: scale ← scale · growth_factor, tracker ← 0
    step with infinities         tracker ← -cooldown; the hysteresis-th and later: scale ← scale · backoff_factor
    always                       scale ← clamp(scale, floor, cap)

Only `update` and the state differ from torch's. Everything is computed on the device.
"""

from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import Optimizer

from lightning_lowbit._torch import current_scale, overflow_flags
from lightning_lowbit.checks import choose, integer, number, positive
from lightning_lowbit.distributed import all_reduce_, local, local_norms, sharding_of

_SMALLEST, _LARGEST = 2.0**-149, torch.finfo(torch.float32).max  # the range of a float32 scale

#: ``"tiny-loss"`` is for losses with small gradients, such as DPO's. ``"quantized-fine-tuning"`` is for runs of
#: hundreds of steps, which an interval of 2000 would outlast; its numbers are this package's choice.
PRESETS = MappingProxyType(
    {
        "default": {"init_scale": 2.0**16, "growth_interval": 2000, "hysteresis": 1},
        "tiny-loss": {"init_scale": 2.0**18, "growth_interval": 2000, "hysteresis": 1},
        "quantized-fine-tuning": {"init_scale": 2.0**17, "growth_interval": 200, "hysteresis": 2},
    }
)


def overflow(scaler: GradScaler, optimizer: Optimizer | None = None) -> Tensor | None:
    """Returns whether a gradient (of an optimizer, or of all) was not finite: 0-d bool; None if none was unscaled."""
    if not scaler.is_enabled():
        return None
    flags = [flag.reshape(()) for flags in overflow_flags(scaler, optimizer) for flag in flags.values()]
    scale = current_scale(scaler)
    if not flags or scale is None:
        return None
    return torch.stack([flag.to(scale.device, non_blocking=True) for flag in flags]).sum() > 0


class ConservativeGradScaler(GradScaler):
    """torch's ``GradScaler`` with a floor, a cap, a cool-down and hysteresis, for training in fp16.

    With ``growth_factor=2, floor=0, cap=inf, cooldown=0`` it equals torch's bit for bit. A checkpoint restores the
    scale and the counters, not the settings.

    Args:
        preset: ``"default"``, ``"tiny-loss"`` or ``"quantized-fine-tuning"``: the values of arguments that are None.
        init_scale: the first scale. By preset: 2^16, 2^18, 2^17.
        growth_factor: factor by which the scale grows, above 1. torch: 2.
        backoff_factor: factor by which the scale falls, between 0 and 1.
        growth_interval: steps without overflow before the scale grows. By preset: 2000, 2000, 200.
        floor: the smallest scale; 0 for none, as in torch, where a scale may fall to 0 and stay there.
        cap: the largest scale; infinity for none.
        cooldown: steps after an overflow that do not count toward growth; None for ``growth_interval``.
        hysteresis: overflows since the scale last grew before it falls; each further one lowers it again. By preset: 1,
            1, 2. torch: 1.
        device: device type, such as ``"cuda"``; None for the accelerator if there is one, else the CPU.
        **kwargs: ``enabled``, as in torch; sharded classes also take ``process_group``.

    Raises:
        ValueError: an argument is invalid.

    Examples:
        >>> Trainer(plugins=[FP4Precision(compute_dtype="fp16", scaler=ConservativeGradScaler(preset="tiny-loss"))])
        >>> Trainer(plugins=[MixedPrecision("16-mixed", "cuda", scaler=ConservativeGradScaler())])
    """

    def __init__(
        self,
        *,
        preset: str = "default",
        init_scale: float | None = None,
        growth_factor: float = 1.5,
        backoff_factor: float = 0.5,
        growth_interval: int | None = None,
        floor: float = 1.0,
        cap: float = 2.0**24,
        cooldown: int | None = None,
        hysteresis: int | None = None,
        device: str | None = None,
        **kwargs: Any,
    ) -> None:
        arguments = {"init_scale": init_scale, "growth_interval": growth_interval, "hysteresis": hysteresis}
        settings: dict[str, Any] = dict(PRESETS[choose("preset", preset, PRESETS)])
        settings |= {name: value for name, value in arguments.items() if value is not None}
        integer("growth_interval", settings["growth_interval"], 1)
        integer("hysteresis", settings["hysteresis"], 1)
        integer("cooldown", cooldown, 0, or_none=True)
        number("growth_factor", growth_factor, "what the scale grows by", above=1)
        number("backoff_factor", backoff_factor, "what remains of a scale that falls", above=0, below=1)
        number("floor", floor, "the lower bound of the scale", at_least=0, finite=False)
        number("cap", cap, "the upper bound of the scale", at_least=0, finite=False)
        if floor > cap:
            raise ValueError(f"floor is the lower bound of the scale and cap the upper one; got {floor=}, {cap=}.")
        scale = number("init_scale", settings["init_scale"], "where it begins", at_least=_SMALLEST, at_most=_LARGEST)
        if not floor <= scale <= cap:
            raise ValueError(
                f"The scale begins between {floor=} and {cap=}; got init_scale={scale}. Change it, or them."
            )
        super().__init__(
            _device_type(device),
            init_scale=float(scale),
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=settings["growth_interval"],
            **kwargs,
        )
        self.floor, self.cap = float(floor), float(cap)
        self.cooldown, self.hysteresis = cooldown, settings["hysteresis"]
        # Overflows left before the scale falls.
        self._tolerated = torch.tensor(self.hysteresis, dtype=torch.int32, device="cpu")

    @torch.no_grad()
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Updates the scale after the optimizer's step. A given scale is clamped to the bounds."""
        if not self.is_enabled():
            return
        overflowed = overflow(self)  # torch's update clears this
        scale, tracker = self._check_scale_growth_tracker("update")
        before, grows = scale.clone(), tracker + 1 == self.get_growth_interval()
        super().update(new_scale)
        scale, tracker = self._check_scale_growth_tracker("update")
        if new_scale is None and overflowed is not None:
            tolerated = (self._tolerated.to(scale.device, non_blocking=True) - overflowed.int()).clamp(min=0)
            scale.copy_(torch.where(overflowed & (tolerated > 0), before, scale))
            self._tolerated = torch.where(grows & ~overflowed, self.hysteresis, tolerated).int()
            tracker.copy_(torch.where(overflowed, -self._wait, tracker))
        scale.clamp_(self.floor, self.cap)

    @property
    def _wait(self) -> int:
        return self.get_growth_interval() if self.cooldown is None else self.cooldown

    def state_dict(self) -> dict[str, Any]:
        """Adds the overflows left before the scale falls to torch's state."""
        state = super().state_dict()
        return state | {"_tolerated": int(self._tolerated)} if state else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads scale and counters, also of torch's class; the settings stay."""
        if not self.is_enabled():
            return
        interval, state = self.get_growth_interval(), dict(state_dict)
        if state:
            state |= {
                "scale": min(max(state["scale"], self.floor), self.cap),
                "growth_factor": self.get_growth_factor(),
                "backoff_factor": self.get_backoff_factor(),
                "growth_interval": interval,
                # A tracker above this run's interval would never equal it; a cool-down may not exceed this run's.
                "_growth_tracker": min(max(state["_growth_tracker"], -self._wait), interval - 1),
            }
        super().load_state_dict(state)
        tolerated = min(state_dict.get("_tolerated", self.hysteresis), self.hysteresis)
        self._tolerated = torch.full_like(self._tolerated, tolerated)


class StaticGradScaler(ConservativeGradScaler):
    """A constant loss scale. Steps with a non-finite gradient are still skipped.

    Args:
        scale: above 0; a power of two keeps gradients exact. Another value raises ``ValueError``.
        device: device type, such as ``"cuda"``; None for the accelerator if there is one, else the CPU.
        enabled: as in torch.

    Examples:
        >>> Trainer(plugins=[FP4Precision(compute_dtype="fp16", scaler=StaticGradScaler(1024.0))])
    """

    def __init__(self, scale: float = 2.0**16, *, device: str | None = None, enabled: bool = True) -> None:
        number("scale", scale, "what the loss is multiplied by", at_least=_SMALLEST, at_most=_LARGEST)
        super().__init__(init_scale=scale, floor=scale, cap=scale, device=device, enabled=enabled)


class GradientNormGradScaler(ConservativeGradScaler):
    """A :class:`ConservativeGradScaler` that also multiplies the loss by α while gradients are small.

        α = clamp(1 + (1 - ‖g‖ / threshold), 1, 2)

    ‖g‖ is the norm of all unscaled gradients of an optimizer, over all shards. Unlike the loss scale, α is not divided
    out again. Gradients are linear in the loss, so α multiplies them once their norm is known. Adam ignores a constant
    factor; see ``docs/guides/loss_scaling.md``.

    Args:
        threshold: from this norm on α is 1; above 0. The rule's source uses 1e-2.
        **kwargs: arguments of :class:`ConservativeGradScaler`.

    Examples:
        >>> Trainer(plugins=[FP4Precision(compute_dtype="fp16", scaler=GradientNormGradScaler())])
    """

    def __init__(self, threshold: float = 1e-2, **kwargs: Any) -> None:
        positive("threshold", threshold, "a norm of gradients")
        super().__init__(**kwargs)
        self.threshold = threshold

    @torch.no_grad()
    def unscale_(self, optimizer: Optimizer) -> None:
        super().unscale_(optimizer)
        if self.is_enabled():
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            scale, _ = self._check_scale_growth_tracker("unscale_")
            factor = (2 - _norm(parameters, scale.device) / self.threshold).clamp(1, 2)
            for parameter in parameters:
                if parameter.grad is not None:
                    gradient = local(parameter.grad)
                    gradient.mul_(factor.to(gradient.device, non_blocking=True))

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Steps. torch's fused optimizers, which would unscale by themselves, get unscaled gradients."""
        if self.is_enabled() and overflow(self, optimizer) is None:
            self.unscale_(optimizer)
        return super().step(optimizer, *args, **kwargs)


class _Sharded(ShardedGradScaler):
    def unscale_(self, optimizer: Optimizer) -> None:
        super().unscale_(optimizer)
        if self.is_enabled():
            _drop_dimensions(self, optimizer)


class ShardedConservativeGradScaler(ConservativeGradScaler, _Sharded):
    """:class:`ConservativeGradScaler` for FSDP without a ``LowBitPrecision``; takes ``process_group`` as well.

    Examples:
        >>> scaler = ShardedConservativeGradScaler()  # then scaler.scale(loss).backward(), as with torch
    """


class ShardedStaticGradScaler(StaticGradScaler, _Sharded):
    """:class:`StaticGradScaler` for FSDP without a ``LowBitPrecision``; ranks share overflows.

    Examples:
        >>> scaler = ShardedStaticGradScaler(1024.0)  # then scaler.scale(loss).backward(), as with torch
    """


class ShardedGradientNormGradScaler(GradientNormGradScaler, _Sharded):
    """:class:`GradientNormGradScaler` for FSDP without a ``LowBitPrecision``; ranks share overflows.

    Under FSDP1, call ``lightning_lowbit.optim.connect(fsdp_module)`` once.

    Examples:
        >>> scaler = ShardedGradientNormGradScaler()  # then scaler.scale(loss).backward(), as with torch
    """


def share_overflow(scaler: GradScaler, optimizer: Optimizer, device: torch.device, over_ranks: bool) -> None:
    """Shares among ranks, after ``unscale_``, whether a gradient was non-finite on any of them. Without ``over_ranks``,
    which says that all call this, flags only get one shape; ``device`` has the flag if there are no gradients here."""
    (flags,) = overflow_flags(scaler, optimizer)
    if not flags:  # torch's class would raise an error
        flags[device] = torch.zeros((), device=device)
    _drop_dimensions(scaler, optimizer)
    if over_ranks and not isinstance(scaler, ShardedGradScaler):
        here = overflow(scaler, optimizer)
        assert here is not None
        flag = here.to(torch.float32)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        for other in flags.values():
            other.copy_(flag)


def _drop_dimensions(scaler: GradScaler, optimizer: Optimizer) -> None:
    """Makes flags 0-d: torch's sharded class has vectors of one element, and fused optimizers need scalars."""
    (flags,) = overflow_flags(scaler, optimizer)
    flags.update({device: flag.reshape(()) for device, flag in flags.items()})


def _norm(parameters: list[Tensor], device: torch.device) -> Tensor:
    squares = local_norms(parameters, device).square()
    groups = [sharding_of(parameter).groups for parameter in parameters]
    return torch.stack([squares.new_zeros(()), *all_reduce_(squares.unbind(), groups, dist.ReduceOp.SUM)]).sum().sqrt()


def _device_type(device: str | None) -> str:
    if device is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return "cpu" if accelerator is None else accelerator.type
    try:
        return torch.device(device).type  # torch's class accepts "cuda", but not "cuda:0"
    except RuntimeError:
        raise ValueError(f"device is where it trains, such as 'cuda' or 'cpu'; got {device!r}.") from None
