"""AdaClip and AdaGN around any optimizer.

A step clips ``p.grad`` in place, as ``torch.nn.utils.clip_grad_norm_`` does, and then runs the wrapped optimizer.
Groups and state are those of the wrapped optimizer, with a few more entries, so that schedulers, checkpoints and
strategies see one optimizer.

Source: the Stable-SPAM thesis, section 4.2 and table 4.5 (Lion and Adam-mini with AdaGN and AdaClip).
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD

from lightning_lowbit._torch import unscales_in_step
from lightning_lowbit.checks import is_number, some
from lightning_lowbit.distributed import Sharding, local, sharded_like
from lightning_lowbit.kernels.memory import described
from lightning_lowbit.optim.adam import ClippedAdam
from lightning_lowbit.optim.moments import DenseMoments, statistics_dtype
from lightning_lowbit.optim.optimizer import ClippedOptimizer
from lightning_lowbit.optim.passes import Batch
from lightning_lowbit.optim.rules import MUON, GroupRules, check_options, options_among, rules_of

# Options that wrapped optimizers may have, too; only this package knows the others in OPTIONS.
_USUAL = {"lr", "betas", "eps", "weight_decay", "maximize", *MUON}

# Entries of torch's optimizers: they have the shape of the parameter, but for the step.
_ENTRIES = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum", "variance", "step"}


class Adaptive(ClippedOptimizer):
    """Clips gradients, in place, before each step of another optimizer.

    A step is skipped if a gradient holds a NaN or Inf, or, without ``norm_clip``, an element beyond 8e12. torch's fused
    Adam, AdamW and Adagrad skip on the device; for other optimizers the host waits for one bit.

    Args:
        optimizer: a `torch.optim.Optimizer` that steps without a closure; use it through the wrapper only. Or
            parameters, for which ``base`` makes it.
        base: makes the optimizer from the parameters; in YAML a ``class_path`` with ``init_args``, for a model with an
            ``OptimizerCallable``. (The key ``optimizer`` of LightningCLI itself needs an argument ``params``.)
        element_clip: ``"ada_clip"``; ``"spike_clip"``, SPAM's rule, for optimizers with ``exp_avg_sq``; or None.
        norm_clip: ``"ada_gn"``; ``"grad_clip"``, a bound on the norm of all gradients together; or None.
        gamma1: γ1 of AdaGN, average of the gradient norm; table A.2: .7.
        gamma2: γ2 of AdaGN, average of its square; table A.2: .9.
        gamma3: γ3 of AdaClip, average of the largest element; table A.2: .999.
        norm_eps: ε of AdaGN.
        spike_threshold: θ of SpikeClip; 5000.
        max_norm: of GradClip; 1.
        matrices_only: leaves gradients of parameters below two dimensions alone.

    Raises:
        ValueError: an option out of range; ``optimizer`` is no optimizer, clips gradients itself, or is given together
            with ``base``; or, in `step`, as for `StableSPAM`.

    Examples:
        >>> Adaptive(torch.optim.AdamW(model.parameters(), lr=1e-3), norm_clip=None)
    """

    _has_foreign_state = True

    optimizer: torch.optim.Optimizer
    options: dict[str, Any]
    set_aside: dict[Tensor, dict[str, Tensor]]  # scalars of the rules while the wrapped optimizer has no state

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
        if not isinstance(wrapped, torch.optim.Optimizer) or isinstance(wrapped, ClippedOptimizer):
            advice = " StableSPAM and Muon have these rules themselves." if isinstance(wrapped, ClippedAdam) else ""
            raise ValueError(
                "Adaptive wraps a torch.optim.Optimizer whose gradients nothing else guards, such as "
                f"torch.optim.AdamW(parameters), or takes parameters and base=torch.optim.AdamW; got "
                f"{type(wrapped).__name__}.{advice}"
            )
        closure = inspect.signature(type(wrapped).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ValueError(f"Adaptive steps without a closure, which {type(wrapped).__name__} needs: use it alone.")
        options = options_among(locals())
        self.defaults = {**wrapped.defaults, **options}
        for group in wrapped.param_groups:
            self._check_new_names(group)
            check_options("Adaptive", {**options, **{name: group[name] for name in options if name in group}})
        # Not `super().__init__`, which would make new groups and a new state.
        self.__setstate__({"optimizer": wrapped, "options": options, "defaults": self.defaults})

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("optimizer", "options", "defaults", "set_aside")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        loaded: dict[str, Any] = {name: state[name] for name in ("state", "param_groups") if name in state}
        states = loaded.get("state", {})
        bare = [parameter for parameter, entries in states.items() if self._is_bare(entries)]
        self.set_aside = {parameter: states.pop(parameter) for parameter in bare}
        if loaded:
            self._set_wrapped(loaded)
        super().__setstate__({name: value for name, value in state.items() if name not in loaded})

    def _is_bare(self, entries: Any) -> bool:
        """Returns whether a state has scalars of the rules alone, which torch's optimizers would take for theirs."""
        return isinstance(entries, dict) and bool(entries) and {*entries} <= {*self.SCALARS}

    def _set_wrapped(self, loaded: dict[str, Any]) -> None:
        """Gives the wrapped optimizer a loaded state, or leaves it as it is."""
        owner, before = type(self.optimizer).__name__, dict(self.optimizer.__dict__)
        try:
            self.optimizer.__setstate__(loaded)
            # It has completed options that its earlier versions did not have. `differentiable` is torch's own, which
            # adds it to the defaults alone.
            needed, why = self.optimizer.defaults.keys() - {"differentiable"}, ""
            missing = [some(needed - group.keys()) for group in self.param_groups if needed - group.keys()]
            if missing:
                why = f"its groups have no {missing[0]}"
        except Exception as error:  # its class depends on the optimizer
            why = f"{type(error).__name__}: {error}"
        if why:
            self.optimizer.__dict__.clear()
            self.optimizer.__dict__.update(before)
            raise ValueError(
                f"{owner} cannot go on with the saved state, which is damaged, or that of another optimizer ({why}). "
                "Load it into the optimizer that it is of, or start without it."
            )

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the wrapped optimizer, with the options of the rules."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:  # as Lightning's BaseFinetuning does in a resumed run
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        """The state of the wrapped optimizer, with the scalars of the rules."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    def state_dict(self) -> dict[str, Any]:
        """Returns that of the wrapped optimizer, with the scalars of the rules, also of parameters without a state."""
        bare = {parameter: scalars for parameter, scalars in self.set_aside.items() if not self.state.get(parameter)}
        self.state.update(bare)
        try:
            return super().state_dict()
        finally:
            for parameter in bare:
                del self.state[parameter]

    def _loaded_state(self, parameter: Tensor) -> dict[str, Any]:
        return self.set_aside.get(parameter) or super()._loaded_state(parameter)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the wrapped optimizer, also in mid-training; an option out of range is a ValueError."""
        self._check_new_names(param_group)
        merged = {**self.options, **param_group}
        self._check_options({name: merged[name] for name in self.options})
        self.optimizer.add_param_group(merged)
        self._remember_parameters()

    def reset_moments(self) -> None:
        """Empties the wrapped optimizer's state, which it builds again in the next step."""
        for parameter, state in self.state.items():
            if scalars := {name: state[name] for name in self.SCALARS if name in state}:
                self.set_aside[parameter] = scalars
        self.state.clear()

    def _check_names(self, param_group: Mapping[str, Any]) -> None:
        # Some optimizers have usual options in their groups but not in their defaults, as Adam-mini its weight_decay.
        super()._check_names({name: value for name, value in param_group.items() if name not in _USUAL})

    def _fault(self, saved: Any, parameter: Tensor, group: Mapping[str, Any]) -> str:
        if fault := super()._fault(saved, parameter, group):
            return fault
        # torch's fused steps are kernels, too, which compare nothing.
        names = _ENTRIES & saved.keys() if type(self.optimizer).__module__.startswith("torch.optim") else set()
        for name in sorted(names):
            value, shape = saved[name], () if name == "step" else local(parameter).shape
            is_whole = isinstance(value, Tensor) and local(value).shape == shape
            if not (is_whole or value is None or (name == "step" and is_number(value))):
                return f"{name} is {described(value)}, and {tuple(shape)} is needed"
        return ""

    @property
    def _options(self) -> Set[str]:
        return self.options.keys()

    def _rules(self, group: Mapping[str, Any]) -> GroupRules:
        # beta2 is 0 because exp_avg_sq is not bias-corrected. Adafactor, for one, sums the squares of rows and columns.
        rules = rules_of(group, total_steps=None, beta2=0.0)
        return GroupRules(*rules, squares_summed=2**40, sums_in_update=False)

    def _member_state(
        self, parameter: Tensor, group: Mapping[str, Any], sharding: Sharding
    ) -> tuple[dict[str, Tensor], DenseMoments, dict[str, Tensor]]:
        state = self.state[parameter]
        scalars = {name: state[name] for name in self.SCALARS if name in state}
        is_spike_clip, has_mean_square = group["element_clip"] == "spike_clip", "exp_avg_sq" in state
        if is_spike_clip and scalars and not has_mean_square:
            raise ValueError(
                f"SpikeClip compares gradients with the second moment, and {type(self.optimizer).__name__} keeps no "
                "'exp_avg_sq': use element_clip='ada_clip'."
            )
        shard = local(parameter)
        if not scalars:
            scalars = self.set_aside.get(parameter) or self.new_scalars(shard.device, statistics_dtype(parameter))
        if not (is_spike_clip and has_mean_square):
            return scalars, DenseMoments(), {}
        mean_square = state["exp_avg_sq"]
        if not isinstance(mean_square, Tensor) or local(mean_square).shape != shard.shape:
            raise ValueError(
                f"SpikeClip compares the elements of gradients with those of 'exp_avg_sq', which is "
                f"{described(mean_square)} at a parameter that is {described(shard)}: use element_clip='ada_clip', or "
                "put back the state of this parameter."
            )
        return scalars, DenseMoments(), {"mean_square": local(mean_square)}

    def _match_layouts(self) -> None:
        """Gives moments the strides of their parameter: torch's fused steps walk through both in memory order, and
        compare nothing. A ``ValueError`` if they have another shape, or the parameter overlaps."""
        fused = [parameter for group in self.param_groups if group.get("fused") for parameter in group["params"]]
        for parameter in fused:
            shard, state = local(parameter), self.state.get(parameter, {})
            if not shard.is_contiguous() and torch.empty_like(shard, device="meta").stride() != shard.stride():
                raise ValueError(f"A fused step needs parameters without overlaps or holes, got {described(shard)}.")
            for name in _ENTRIES & state.keys() - {"step"}:
                value = local(state[name]) if isinstance(state[name], Tensor) else None
                if value is None or (value.shape == shard.shape and value.stride() == shard.stride()):
                    continue
                if value.shape != shard.shape or value is not state[name]:  # a shard's strides cannot be changed
                    raise ValueError(
                        f"{name} is {described(value)} at a parameter that is {described(shard)}: put back one of "
                        "them, or make a new optimizer."
                    )
                state[name] = torch.empty_like(shard, dtype=value.dtype).copy_(value)

    def _apply(self, batches: Sequence[Batch]) -> None:
        finite = batches[0].finite
        # Not SGD: after a skipped first step, the momentum of its fused form is uninitialized memory.
        skips = unscales_in_step(self.optimizer) and not isinstance(self.optimizer, SGD)
        skips = skips and all(group.get("fused", True) for group in self.param_groups)  # a loaded group may not be
        if not skips and not bool(finite):
            return
        self._match_layouts()
        with _clipped_gradients(batches):
            if skips:
                self.optimizer.grad_scale, self.optimizer.found_inf = None, (~finite).float()  # type: ignore[attr-defined]
            self.optimizer.step()
            if skips:
                del self.optimizer.grad_scale, self.optimizer.found_inf  # type: ignore[attr-defined]
        for batch in batches:
            batch.store_scalars()
            for member in batch.members:
                parameter, state = member.parameter, self.state[member.parameter]
                # Only now, and not before the first gradient: most optimizers expect an empty state at first. An empty
                # shard of FSDP1 never has a gradient; its statistics are stored nevertheless.
                if state or parameter.grad is not None or not parameter.numel():
                    state.update(member.state)
                    self.set_aside.pop(parameter, None)


@contextmanager
def _clipped_gradients(batches: Sequence[Batch]) -> Iterator[None]:
    """Clips the gradients of the parameters that take the step; within this context ``p.grad`` has the result."""
    replaced = []
    try:
        for batch in batches:
            targets: list[Tensor | None] = []
            for member in batch.members:
                gradient = target = member.gradient
                # torch's fused optimizers walk through gradient and parameter in memory order.
                if gradient is not None and (gradient.stride() != member.shard.stride() or gradient.is_neg()):
                    target = torch.empty_like(member.shard, dtype=gradient.dtype)
                targets.append(target)
                # Also the local part of a DTensor, or a redistributed one.
                if target is not None and target is not member.parameter.grad:
                    replaced.append((member.parameter, member.parameter.grad))
                    member.parameter.grad = sharded_like(member.parameter, target)
            # A parameter that takes no step keeps its gradient.
            idle = {"limit": torch.inf, "ratio": 1.0, "factor": 1.0}
            numbers = {name: batch.numbers[name].where(batch.numbers["taken"], value) for name, value in idle.items()}
            decision = batch.decision()._replace(numbers=batch.numbers | numbers)
            batch.passes.write_clipped(decision, targets)
        yield
    finally:
        for parameter, previous in replaced:
            parameter.grad = previous
