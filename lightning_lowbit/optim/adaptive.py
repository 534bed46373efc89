"""AdaClip and AdaGN around any optimizer.

    optimizer = Adaptive(torch.optim.AdamW(model.parameters(), lr=1e-3))

In a step the wrapped optimizer finds guarded copies of the gradients in ``p.grad``; afterwards they are gone again.
Groups and state are the wrapped optimizer's own, with a few entries more, so that schedulers, checkpoints and
strategies see one optimizer.

Source: the Stable-SPAM thesis, section 4.2 and table 4.5 (Lion and Adam-mini with AdaGN and AdaClip).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import SGD

from lightning_lowbit.distributed import local
from lightning_lowbit.optim import clipping
from lightning_lowbit.optim.guarded_adam import GuardedAdam
from lightning_lowbit.optim.guarded_optimizer import GuardedOptimizer, Seen
from lightning_lowbit.optim.guards import Guards
from lightning_lowbit.optim.options import check_options

# Options that wrapped optimizers may have, too; what else is in OPTIONS means this package's.
_USUAL = {"lr", "betas", "eps", "weight_decay", "maximize"}


class Adaptive(GuardedOptimizer):
    """Guards the gradients that another optimizer sees.

    A step with a NaN or Inf in a gradient is skipped whole; without ``norm_clip`` also one with an element beyond 8e12,
    since optimizers may add up squares. Those that can be told so on the device (torch's fused Adam, AdamW and Adagrad)
    are; for any other one the host waits for that one answer, as it does under a `GradScaler`.

    State of a parameter: what the wrapped optimizer keeps, and ``steps`` (int64, 0-d), ``threshold``, ``norm_mean``,
    ``norm_mean_weight``, ``norm_mean_square`` (0-d, fp32; float64 for float64 parameters).

    Args:
        optimizer: any `torch.optim.Optimizer` that steps without a closure; from then on use it through the wrapper. Or
            parameters, for which ``base`` makes it.
        base: makes the optimizer from the parameters; in YAML a ``class_path`` with ``init_args``.
        element_clip: ``"ada_clip"``; ``"spike_clip"``, SPAM's rule, for optimizers that keep ``exp_avg_sq``; or None.
        norm_clip: ``"ada_gn"``; ``"grad_clip"``, a bound on the norm of all gradients together; or None.
        gamma1: γ1 of AdaGN, average of the gradient norm; table A.2: .7.
        gamma2: γ2 of AdaGN, average of its square; table A.2: .9.
        gamma3: γ3 of AdaClip, average of the largest element; table A.2: .999.
        norm_eps: ε of AdaGN.
        spike_threshold: θ of SpikeClip; 5000.
        max_norm: of GradClip; 1.
        matrices_only: gradients of parameters of fewer than two dimensions are left as they are.

    Raises:
        ValueError: an option out of range; ``optimizer`` is none, or one that guards gradients itself, or is given
            together with a ``base``; or, in `step`, what `StableSPAM` raises.
    """

    optimizer: torch.optim.Optimizer
    options: dict[str, Any]
    _set_aside: dict[Tensor, dict[str, Tensor]]  # scalars of the guards while the wrapped optimizer has no state

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | Iterable[Any],
        base: Callable[[Iterable[Any]], torch.optim.Optimizer] | None = None,
        *,
        element_clip: str | None = "ada_clip",
        norm_clip: str | None = "ada_gn",
        gamma1: float = 0.7,
        gamma2: float = 0.9,
        gamma3: float = 0.999,
        norm_eps: float = 1e-8,
        spike_threshold: float = 5000.0,
        max_norm: float = 1.0,
        matrices_only: bool = False,
    ) -> None:
        wrapped: Any = optimizer
        if base is not None:
            if isinstance(optimizer, torch.optim.Optimizer):
                raise ValueError(
                    f"Adaptive got {type(optimizer).__name__} and a base that makes another: leave one of them out."
                )
            wrapped = base(optimizer)
        if not isinstance(wrapped, torch.optim.Optimizer) or isinstance(wrapped, GuardedOptimizer):
            has_own = " StableSPAM has element_clip and norm_clip itself." if isinstance(wrapped, GuardedAdam) else ""
            raise ValueError(
                "Adaptive wraps a torch.optim.Optimizer whose gradients nothing else guards, such as "
                f"torch.optim.AdamW(parameters), or takes parameters and base=torch.optim.AdamW; got "
                f"{type(wrapped).__name__}.{has_own}"
            )
        options = {
            "element_clip": element_clip,
            "norm_clip": norm_clip,
            "gamma1": gamma1,
            "gamma2": gamma2,
            "gamma3": gamma3,
            "norm_eps": norm_eps,
            "spike_threshold": spike_threshold,
            "max_norm": max_norm,
            "matrices_only": matrices_only,
        }
        self.defaults = {**wrapped.defaults, **options}
        for group in wrapped.param_groups:
            self._check_names(group)
            check_options("Adaptive", {**options, **{name: group[name] for name in options if name in group}})
        # Not `super().__init__`, which would make groups and a state of its own.
        self.__setstate__({"optimizer": wrapped, "options": options, "defaults": self.defaults})

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("optimizer", "options", "defaults")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        loaded: dict[str, Any] = {name: state[name] for name in ("state", "param_groups") if name in state}
        if loaded:
            self.optimizer.__setstate__(loaded)
        self._set_aside = {}
        super().__setstate__({name: value for name, value in state.items() if name not in loaded})

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of the wrapped optimizer, with the options of the guards."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """That of the wrapped optimizer, with the scalars of the guards."""
        return self.optimizer.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer, also in mid-training; an option out of range is a ValueError."""
        self._check_names(param_group)
        merged = {**self.options, **param_group}
        check_options("Adaptive", {name: merged[name] for name in self.options})
        self.optimizer.add_param_group(merged)
        self._remember_parameters()

    def reset_moments(self) -> None:
        """Empties the state of the wrapped optimizer, which builds it again in the next step."""
        for parameter, kept in self.state.items():
            if own := {name: kept[name] for name in Guards.SCALARS if name in kept}:
                self._set_aside[parameter] = own
        self.state.clear()

    def _check_names(self, param_group: Mapping[str, Any]) -> None:
        # Some optimizers keep usual options in their groups, and no default of them: Adam-mini its weight_decay.
        super()._check_names({name: value for name, value in param_group.items() if name not in _USUAL})

    def _is_own(self, name: str) -> bool:
        return name in Guards.SCALARS

    def _new_batch(self, *args: Any) -> Guards:
        return _AdaptiveBatch(*args)

    def _add(self, batch: Guards, seen: Seen, group: Mapping[str, Any]) -> None:
        assert isinstance(batch, _AdaptiveBatch)
        kept = self.state[seen.parameter]
        own = {name: kept[name] for name in Guards.SCALARS if name in kept}
        known = own or self._set_aside.get(seen.parameter) or Guards.new_scalars(seen.part.device, batch.dtype)
        batch.add(seen.parameter, seen.part, seen.gradient, known)
        if group["element_clip"] == "spike_clip" and own and "exp_avg_sq" not in kept:
            raise ValueError(
                f"SpikeClip compares gradients with the second moment, and {type(self.optimizer).__name__} keeps no "
                "'exp_avg_sq': use element_clip='ada_clip'."
            )
        batch.second_moments.append(local(kept["exp_avg_sq"]) if "exp_avg_sq" in kept else None)

    def _apply(self, batches: Sequence[Guards], factors: Sequence[Tensor]) -> None:
        taken = torch.stack([batch.finite.to(batches[0].device) for batch in batches]).all()
        with _guarded(batches, factors):
            # Not SGD: the momentum with which its fused form leaves a skipped first step is whatever was in memory.
            if getattr(self.optimizer, "_step_supports_amp_scaling", False) and not isinstance(self.optimizer, SGD):
                self.optimizer.grad_scale, self.optimizer.found_inf = None, (~taken).float()  # type: ignore[attr-defined]
                self.optimizer.step()
                del self.optimizer.grad_scale, self.optimizer.found_inf  # type: ignore[attr-defined]
            elif bool(taken):
                self.optimizer.step()
            else:
                return
        for batch in batches:
            batch.finish()
            for parameter, state in zip(batch.parameters, batch.states, strict=True):
                # Only now, and not before the first gradient: most optimizers begin with an empty state. Under FSDP1 a
                # part that is empty never has one, and the statistics are kept nevertheless.
                if parameter.grad is not None or not parameter.numel():
                    self.state[parameter].update(state)
                    self._set_aside.pop(parameter, None)


class _AdaptiveBatch(Guards):
    """Guards, and what SpikeClip compares with."""

    SUMMED: ClassVar[int] = 2**40  # Adafactor, for one, adds up those of rows and columns

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.second_moments: list[Tensor | None] = []

    def measured_pieces(self, index: int, gradient: Tensor) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Pieces of a gradient, each with v of SpikeClip or None."""
        v = self.second_moments[index]
        if v is None or self.options["element_clip"] != "spike_clip":
            return super().measured_pieces(index, gradient)
        return ((piece, second.to(self.dtype)) for piece, second in clipping.pieces(gradient, v))

    def may_clip(self, parameter: int, piece: int) -> bool:
        """Not before there is a second moment."""
        waits = self.options["element_clip"] == "spike_clip" and self.second_moments[parameter] is None
        return not waits and super().may_clip(parameter, piece)

    def forget_gradients(self) -> None:
        """Lets go of the second moments, too."""
        super().forget_gradients()
        self.second_moments = []

    def guarded(self, index: int, factor: Any) -> Tensor:
        """A copy of a gradient as the wrapped optimizer shall see it."""
        gradient = self.gradients[index]
        # Laid out as the parameter is: torch's fused optimizers walk through both as they lie in memory.
        copy = torch.empty_like(local(self.parameters[index]), dtype=gradient.dtype)
        written = clipping.pieces(copy)
        for number, (piece, v) in enumerate(self.measured_pieces(index, gradient)):
            next(written)[0].copy_(self.adapted(piece, index, number, factor, v))
        return copy


@contextmanager
def _guarded(batches: Sequence[Guards], factors: Sequence[Tensor]) -> Iterator[None]:
    """Within this context ``p.grad`` is the guarded copy."""
    before: list[tuple[Tensor, Tensor | None]] = []
    try:
        for batch, factor in zip(batches, factors, strict=True):
            assert isinstance(batch, _AdaptiveBatch)
            for index, (parameter, scalar) in enumerate(zip(batch.parameters, batch.scalars(factor), strict=True)):
                if parameter.grad is not None:
                    before.append((parameter, parameter.grad))
                    parameter.grad = _like(parameter, batch.guarded(index, scalar))
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


def _like(parameter: Tensor, part: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return part
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride())
