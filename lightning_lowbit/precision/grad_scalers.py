"""Loss scaling: whether a run needs it, and scalers that adapt within bounds.

**Which precision needs one.** fp16 does. Its smallest number above 0 is 2^-24 (6.0e-8), below 2^-14 (6.1e-5) it loses
digits, and above 65504 it is infinite; gradients of activations are often smaller than that. Multiplying the loss by a
scale multiplies every gradient, the optimizer gets them divided again, and only what lies between is shifted into the
range of fp16. bf16 has the exponents of float32, and needs none. Nor do casts with a scale per tensor, row or block:
their scales follow the tensor, so that a power of two on the loss comes out again to the bit. Through a growth factor
of 2 a scale stays a power of two; 1.5, the cautious one, adds a rounding of the gradients in fp16, and another one in
block-scaled casts, where mantissas move against the grid.

**The size of a loss does not tell.** DPO begins at ln 2 with gradients that may be a thousandth of those of a language
model at the same loss; what counts is what the scaler finds. Nor does a large scale allow a large learning rate: the
optimizer never sees it.

**The order** is unscale, then clip, then step. A bound on gradients is meant for gradients, not for what a scale, which
changes while training, makes of them; callbacks that watch them want the same; and where one is infinite, that has to
be found before clipping turns it into a NaN everywhere. A step that finds one is skipped, and the scale falls.

    loss · scale  ->  backward  ->  sum over ranks  ->  gradients / scale, is one not finite?  ->  hooks, clipping
                  ->  optimizer step, unless one was  ->  update of the scale

**Sharded gradients** (FSDP) are summed over ranks while they are scaled, and an infinity then lies in one part, on one
rank: all ranks have to learn of it, or some step and some do not. `LowBitPrecision` sees to that for every class of
scaler. Elsewhere FSDP1 needs the class whose name begins with ``Sharded``; under FSDP2 torch's unscaling does it, and
under DDP all ranks have the same gradients anyway.

torch grows the scale by 2 every 2000 steps for ever, and lets it fall without end. The classes here bound it:

    a step without infinities    tracker ← tracker + 1; at growth_interval: scale ← scale · growth_factor, tracker ← 0
    a step with one              tracker ← -cooldown; the hysteresis-th since the scale grew, and each after that:
                                 scale ← scale · backoff_factor
    always                       scale ← clamp(scale, floor, cap)

In this only `update` (and the state) differs from torch's, and all of it happens on the device.
"""

import math
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import Optimizer

from lightning_lowbit.checks import choose, is_number
from lightning_lowbit.distributed import all_reduce_, local, local_norms, sharding_of

_SMALLEST, _LARGEST = 2.0**-149, torch.finfo(torch.float32).max  # what a scale, which is float32, can be

#: Where the scale starts and how it moves. ``"tiny-loss"``: losses such as DPO's, whose gradients are small (start at
#: 2^18). ``"quantized-fine-tuning"``: runs of hundreds of steps, in which an interval of 2000 would never end, and in
#: which single steps with an outlier should not cost the scale. The numbers of the last are this package's choice.
PRESETS = MappingProxyType(
    {
        "default": {"init_scale": 2.0**16, "growth_interval": 2000, "hysteresis": 1},
        "tiny-loss": {"init_scale": 2.0**18, "growth_interval": 2000, "hysteresis": 1},
        "quantized-fine-tuning": {"init_scale": 2.0**17, "growth_interval": 200, "hysteresis": 2},
    }
)


def overflow(scaler: GradScaler, optimizer: Optimizer | None = None) -> Tensor | None:
    """Whether a gradient was not finite when it was unscaled.

    Args:
        scaler: of any class.
        optimizer: whose gradients; None for those of all.

    Returns:
        Bool, 0-d, on the device of the scale; None where nothing has been unscaled since the last update.
    """
    if not scaler.is_enabled():
        return None
    states = scaler._per_optimizer_states
    wanted = [state for key, state in states.items() if optimizer is None or key == id(optimizer)]
    found = [flag.reshape(()) for state in wanted for flag in state["found_inf_per_device"].values()]
    scale = scaler._get_scale_async()
    if not found or scale is None:
        return None
    return torch.stack([flag.to(scale.device, non_blocking=True) for flag in found]).sum() > 0


def scale_of(scaler: GradScaler) -> Tensor:
    """The scale, float32, 0-d, on the device; that of a scaler which has scaled something."""
    scale = scaler._get_scale_async()
    assert scale is not None
    return scale


def loss_factor(norm: Tensor, threshold: float) -> Tensor:
    """α = clamp(1 + (1 - ‖g‖ / threshold), 1, 2): up to twice the loss while gradients are small.

    Args:
        norm: ‖g‖, any shape, 0 or more.
        threshold: the norm from which on the loss is left as it is, above 0.
    """
    return (2 - norm / threshold).clamp(1, 2)


class ConservativeGradScaler(GradScaler):
    """torch's ``GradScaler`` with a floor, a cap, a cool-down and hysteresis, for training in fp16.

    With ``growth_factor=2, floor=0, cap=inf, cooldown=0`` it is torch's, to the bit. Settings are those given here,
    also after a checkpoint was loaded, which brings the scale and the counters.

    Args:
        preset: ``"default"``, ``"tiny-loss"`` or ``"quantized-fine-tuning"``: what the arguments are that are None.
        init_scale: the first scale; 2^16, 2^18 and 2^17.
        growth_factor: what the scale is multiplied with as it grows, above 1. torch: 2.
        backoff_factor: and as it falls, between 0 and 1.
        growth_interval: steps without an overflow before the scale grows; 2000, 2000 and 200.
        floor: the scale never falls below; 0 for none, as in torch, where a scale may fall to 0 and stay there.
        cap: nor rises above; infinity for none.
        cooldown: steps after an overflow that do not count towards growth; None for as many as ``growth_interval``.
        hysteresis: how many overflows since the scale grew it takes until it falls; each further one lets it fall
            again. 1, 1 and 2; torch: 1.
        device: where it trains, a type such as ``"cuda"``; None for an accelerator where there is one, or the CPU.
        **kwargs: those of torch's class: ``enabled``; and ``process_group`` of sharded ones.

    Raises:
        ValueError: an argument is not one of these.

    Example:
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
        given = {"init_scale": init_scale, "growth_interval": growth_interval, "hysteresis": hysteresis}
        chosen: dict[str, Any] = dict(PRESETS[choose("preset", preset, PRESETS)])
        chosen |= {name: value for name, value in given.items() if value is not None}
        for name, least in (("growth_interval", 1), ("hysteresis", 1)):
            _check_count(name, chosen[name], least)
        if cooldown is not None:
            _check_count("cooldown", cooldown, 0)
        _check_factors(growth_factor, backoff_factor)
        _check_bounds(chosen["init_scale"], floor, cap)
        super().__init__(
            _device_type(device),
            init_scale=float(chosen["init_scale"]),
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=chosen["growth_interval"],
            **kwargs,
        )
        self.floor, self.cap = float(floor), float(cap)
        self.cooldown, self.hysteresis = cooldown, chosen["hysteresis"]
        self._tolerated = torch.tensor(self.hysteresis, dtype=torch.int32, device="cpu")  # until the scale falls

    @torch.no_grad()
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Updates the scale, after the optimizer's step; one that is given by hand has the same bounds."""
        if not self.is_enabled():
            return
        found = overflow(self)  # which torch's update forgets
        scale, tracker = self._check_scale_growth_tracker("update")
        before, grows = scale.clone(), tracker + 1 == self.get_growth_interval()
        super().update(new_scale)
        scale, tracker = self._check_scale_growth_tracker("update")
        if new_scale is None and found is not None:
            tolerated = (self._tolerated.to(scale.device, non_blocking=True) - found.int()).clamp(min=0)
            scale.copy_(torch.where(found & (tolerated > 0), before, scale))
            self._tolerated = torch.where(grows & ~found, self.hysteresis, tolerated).int()
            tracker.copy_(torch.where(found, -self._wait, tracker))
        scale.clamp_(self.floor, self.cap)

    @property
    def _wait(self) -> int:
        return self.get_growth_interval() if self.cooldown is None else self.cooldown

    def state_dict(self) -> dict[str, Any]:
        """torch's, and how many overflows are left before the scale falls; to be taken after `update`."""
        state = super().state_dict()
        return state | {"_tolerated": int(self._tolerated)} if state else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes scale and counters, also of torch's own class; the settings stay, and so do the bounds."""
        if not self.is_enabled():
            return
        interval = self.get_growth_interval()
        super().load_state_dict(
            state_dict
            and {
                "scale": min(max(state_dict["scale"], self.floor), self.cap),
                "growth_factor": self.get_growth_factor(),
                "backoff_factor": self.get_backoff_factor(),
                "growth_interval": interval,
                # Beyond the interval of this run it would never meet it; nor is a cool-down longer than this run's.
                "_growth_tracker": min(max(state_dict["_growth_tracker"], -self._wait), interval - 1),
            }
        )
        tolerated = min(state_dict.get("_tolerated", self.hysteresis), self.hysteresis)
        self._tolerated = torch.full_like(self._tolerated, tolerated)


class StaticGradScaler(ConservativeGradScaler):
    """A loss scale that stays what it is; a step with a gradient that is not finite is skipped nonetheless.

    Args:
        scale: above 0; a power of two changes no digit of a gradient.
        device: where it trains, a type such as ``"cuda"``; None for an accelerator where there is one, or the CPU.
        enabled: as in torch's class.

    Raises:
        ValueError: the scale is no finite number above 0.
    """

    def __init__(self, scale: float = 2.0**16, *, device: str | None = None, enabled: bool = True) -> None:
        if not is_number(scale) or not _SMALLEST <= scale <= _LARGEST:
            raise ValueError(f"scale is what the loss is multiplied with, a finite number above 0; got {scale!r}.")
        super().__init__(init_scale=scale, floor=scale, cap=scale, device=device, enabled=enabled)


class GradientNormGradScaler(ConservativeGradScaler):
    """A conservative scaler that also lets small gradients count for more: the loss is multiplied by α.

        α = clamp(1 + (1 - ‖g‖ / threshold), 1, 2)

    ‖g‖ is the norm of all gradients of an optimizer, unscaled, whole also where they are sharded. Unlike the loss
    scale, α is not divided out again. Gradients are linear in the loss, so it multiplies them, once their norm is
    known: there is nothing to remember, and nothing that lags a step behind.

    Low-bit training literature has the rule without the bounds, where it turns negative, and training climbs, beyond
    twice the threshold. Know what to expect of it: **Adam ignores a constant factor** on the loss, as does every
    optimizer that divides by the size of its gradients (Stable-SPAM) or takes their signs (Lion). What is left is that
    α changes: steps with small gradients gain weight in Adam's averages.

    Args:
        threshold: the norm from which on the loss is left as it is, above 0; the rule's source: 1e-2.
        **kwargs: those of :class:`ConservativeGradScaler`.

    Raises:
        ValueError: an argument is not one of these.
    """

    def __init__(self, threshold: float = 1e-2, **kwargs: Any) -> None:
        if not is_number(threshold) or not 0 < threshold < math.inf:
            raise ValueError(f"threshold is a norm of gradients, a finite number above 0; got {threshold!r}.")
        super().__init__(**kwargs)
        self.threshold = threshold

    @torch.no_grad()
    def unscale_(self, optimizer: Optimizer) -> None:
        """Unscales the gradients, and multiplies them by α."""
        super().unscale_(optimizer)
        if self.is_enabled():
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            factor = loss_factor(_norm(parameters, scale_of(self).device), self.threshold)
            for parameter in parameters:
                if parameter.grad is not None:
                    gradient = local(parameter.grad)
                    gradient.mul_(factor.to(gradient.device, non_blocking=True))

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Steps; optimizers that would unscale by themselves (torch's fused ones) get gradients that are."""
        if self.is_enabled() and overflow(self, optimizer) is None:
            self.unscale_(optimizer)
        return super().step(optimizer, *args, **kwargs)


class _Sharded(ShardedGradScaler):
    """torch's, whose gradients fused optimizers can take, too."""

    def unscale_(self, optimizer: Optimizer) -> None:
        super().unscale_(optimizer)
        if self.is_enabled():
            _drop_dimensions(self, optimizer)


class ShardedConservativeGradScaler(ConservativeGradScaler, _Sharded):
    """:class:`ConservativeGradScaler` for FSDP without a :class:`LowBitPrecision`: all ranks learn of an overflow.

    Takes ``process_group`` besides, as torch's ``ShardedGradScaler`` does.
    """


class ShardedStaticGradScaler(StaticGradScaler, _Sharded):
    """:class:`StaticGradScaler` for FSDP without a :class:`LowBitPrecision`: all ranks learn of an overflow."""


class ShardedGradientNormGradScaler(GradientNormGradScaler, _Sharded):
    """:class:`GradientNormGradScaler` for FSDP without a :class:`LowBitPrecision`: all ranks learn of an overflow.

    FSDP1 has to be shown to it once: ``lightning_lowbit.optim.connect(fsdp_module)``.
    """


def share_overflow(scaler: GradScaler, optimizer: Optimizer, device: torch.device, over_ranks: bool) -> None:
    """Makes what a scaler found in an optimizer's gradients what all ranks found, whatever the class of the scaler.

    Args:
        scaler: has just unscaled the gradients.
        optimizer: of which.
        device: where a rank says so that holds no gradient.
        over_ranks: whether each rank holds other gradients; all ranks must then take part.
    """
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    if not found:  # torch's class takes that for a mistake
        found[device] = torch.zeros((), device=device)
    _drop_dimensions(scaler, optimizer)
    if over_ranks and not isinstance(scaler, ShardedGradScaler):
        here = overflow(scaler, optimizer)
        assert here is not None
        flag = here.to(torch.float32)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        for other in found.values():
            other.copy_(flag)


def _drop_dimensions(scaler: GradScaler, optimizer: Optimizer) -> None:
    """Makes what was found 0-d: torch's sharded class has vectors of one element, and fused optimizers take scalars."""
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    found.update({device: flag.reshape(()) for device, flag in found.items()})


def _norm(parameters: list[Tensor], device: torch.device) -> Tensor:
    """Norm of all gradients together, float32, 0-d, the same on all ranks of a group over which they are spread."""
    squares = local_norms(parameters, device).square()
    groups = [sharding_of(parameter).groups for parameter in parameters]
    return torch.stack([squares.new_zeros(()), *all_reduce_(squares.unbind(), groups, dist.ReduceOp.SUM)]).sum().sqrt()


def _device_type(given: str | None) -> str:
    if given is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return "cpu" if accelerator is None else accelerator.type
    try:
        return torch.device(given).type  # torch's own class asks for "cuda", and does not know "cuda:0"
    except RuntimeError:
        raise ValueError(f"device is where it trains, such as 'cuda' or 'cpu'; got {given!r}.") from None


def _check_count(name: str, value: Any, least: int) -> None:
    if type(value) is not int or value < least:
        raise ValueError(f"{name} is a whole number, {least} or more; got {value!r}.")


def _check_factors(growth_factor: Any, backoff_factor: Any) -> None:
    if not is_number(growth_factor) or not 1 < growth_factor < math.inf:
        raise ValueError(f"growth_factor is what the scale grows by, a number above 1; got {growth_factor!r}.")
    if not is_number(backoff_factor) or not 0 < backoff_factor < 1:
        raise ValueError(
            f"backoff_factor is what remains of a scale that falls, between 0 and 1; got {backoff_factor!r}."
        )


def _check_bounds(init_scale: Any, floor: Any, cap: Any) -> None:
    for name, value in (("floor", floor), ("cap", cap)):
        if not is_number(value) or not value >= 0:
            raise ValueError(f"{name} is a bound of the scale, 0 or more; got {value!r}.")
    if floor > cap:
        raise ValueError(f"floor is the lower bound of the scale and cap the upper one; got floor={floor}, cap={cap}.")
    if not is_number(init_scale) or not _SMALLEST <= init_scale <= _LARGEST:
        raise ValueError(f"init_scale is where the scale begins, a finite number above 0; got {init_scale!r}.")
    if not floor <= init_scale <= cap:
        raise ValueError(
            f"The scale begins between floor={floor} and cap={cap}; got init_scale={init_scale}. Change it, or them."
        )
