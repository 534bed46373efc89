"""The converted layers of a run, and their state from step to step. Layer names are without wrapper prefixes."""

import weakref
from collections.abc import Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_lowbit._lightning import MisconfigurationException, rank_zero_info, rank_zero_warn
from lightning_lowbit._torch import NormBase
from lightning_lowbit._torch.devices import with_index
from lightning_lowbit.checks import choose
from lightning_lowbit.distributed import all_reduce_world_, parameter_amaxes
from lightning_lowbit.nn.casts.linear_casts import PHASES, LinearCasts
from lightning_lowbit.nn.conversion.convert import CastsLike, check_backend, check_blend, convert_layers, set_phase
from lightning_lowbit.nn.conversion.shared_amax import SharedAmaxes, groups
from lightning_lowbit.nn.conversion.smooth_swiglu import watch_up_projections
from lightning_lowbit.nn.core.saving import check_save
from lightning_lowbit.nn.layers.classes import Inventory, described
from lightning_lowbit.nn.layers.layer import QuantizedLayer
from lightning_lowbit.nn.state.amax import AmaxHistories
from lightning_lowbit.nn.state.keys import LayerKeys, unchanged
from lightning_lowbit.patterns import clean_name
from lightning_lowbit.precision.changed_casts import changed_casts, check_changes, matches, smoothed
from lightning_lowbit.precision.checkpoints.trained import primitive
from lightning_lowbit.units import float32_products

if TYPE_CHECKING:
    from lightning_lowbit.nn.sharded.gather import WeightGathers


@dataclass(eq=False)
class RunLayers:
    """The converted layers of a run. They need no Trainer.

    Their phase says which GEMMs are quantized: one for all layers, with a stack of temporary ones above it.

    Attributes:
        seed: of stochastic rounding; as the next ones, an argument of ``LowBitPrecision``.
        device: where the layers are; state follows it before a forward pass.
        blend: λ, from 0 (high precision) to 1 (quantized); a 0-d tensor that layers share.
        is_blending: True if λ is below 1.
        histories: amaxes of previous steps; None before conversion. A layer's are reset when its casts change.
        step: number of optimizer steps taken.
        micro_batch: number of training steps since the last optimizer step.
        planned: by layer, the casts at conversion.
        changed: by layer, other casts that have been set since.
    """

    #: Attributes that are otherwise in another run, besides λ. Loading a state replaces them and leaves their values.
    OF_A_RUN = ("changed", "histories", "_phase", "_temporary", "step", "micro_batch", "_model")

    seed: int
    exact: bool = False
    backend: str = "auto"
    save: str = "inputs"
    smooth_swiglu: str | None = None
    shared_amax: Iterable[str] = ()
    quantize_before_gather: bool = False
    grouped: str = "auto"

    def __post_init__(self) -> None:
        self.device = torch.device("cpu")
        self.blend, self.is_blending = torch.ones(()), False
        self.histories: AmaxHistories | None = None
        self.step = self.micro_batch = 0
        self._phase = "fqt"
        self._temporary: dict[str, str | None] = {}  # by owner; the last one counts
        self._model: weakref.ref[nn.Module] | None = None
        self._dtypes: set[torch.dtype] = set()  # of parameters and of what is not quantized
        self._keys: LayerKeys | None = None
        self.planned: dict[str, LinearCasts] = {}
        self.changed: dict[str, LinearCasts] = {}
        self._shared: SharedAmaxes | None = None
        self._inventory: Inventory | None = None
        self._gathers: WeightGathers | None = None
        self._is_copy = False  # unpickled: layers hold copies of keys and amaxes

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the model: a weak reference cannot be pickled. Converting the model again restores it."""
        return {**vars(self), "_model": None, "_inventory": None, "_is_copy": True}

    @property
    def model(self) -> nn.Module | None:
        """The converted model, if it still exists."""
        return None if self._model is None else self._model()

    @property
    def has_state(self) -> bool:
        """True if evaluation depends on more than weights and constructor: on phase, λ, changed casts or amaxes."""
        is_changed = self.phase != "fqt" or bool(self._temporary or self.changed)
        return is_changed or float(self.blend) != 1.0 or bool(self.histories)

    @property
    def _layers(self) -> dict[str, QuantizedLayer]:
        return {} if self._keys is None else self._keys.layers

    @property
    def present(self) -> dict[str, QuantizedLayer]:
        """The layers that are still in the model; others were removed or replaced since conversion."""
        model, layers = self.model, self._layers
        modules = {*layers.values()} if model is None else {*model.modules()}
        return {name: layer for name, layer in layers.items() if layer in modules}

    @property
    def _plan(self) -> dict[str, LinearCasts]:
        return {name: self.planned[name] for name in self.present if name in self.planned}

    def restart(self) -> None:
        """Begins another run, with the state of the constructor."""
        self.changed, self.histories = {}, None
        self._phase, self._temporary = "fqt", {}
        self.step = self.micro_batch = 0
        self.set_blend(1.0)

    def expect(self, model: nn.Module) -> None:
        """Notes the model that is converted next; amaxes of another model are dropped."""
        if self._model is not None and self.model is not model:
            self.histories = None
        self._model = weakref.ref(model)

    def convert(self, model: nn.Module, planned: Mapping[str, LinearCasts], dtype: torch.dtype) -> None:
        """Converts layers in place, and keeps the state of a run that continues; ``dtype`` is that of all else."""
        check_backend(planned, self.backend, self.exact, self.device)
        autocast_dtype = None if dtype == torch.float32 else dtype
        self._dtypes = {dtype, *(parameter.dtype for parameter in model.parameters())}
        if self.quantize_before_gather:
            from lightning_lowbit.nn.sharded.gather import WeightGathers, check_gathers  # imports parts of FSDP2

            check_gathers(model, planned, autocast_dtype)
        convert_layers(model, planned, self.exact, self.backend, self.save, self.grouped)
        self._keys = LayerKeys(model, self.seed)
        self.planned = {clean_name(name): casts for name, casts in planned.items()}
        self._change_casts(self.planned | {n: c for n, c in self.changed.items() if n in self.planned}, model)
        set_phase(model, self.phase)
        before, self.histories = self.histories, AmaxHistories(model)
        self.record(False)
        if before is not None:  # the same run continues, maybe with other layers
            self.histories.renewed = self.histories.names ^ before.names
            self.histories.load_state_dict(before.state_dict())
            self.histories.renewed.clear()
        self.set_blend(float(self.blend))
        self._shared = SharedAmaxes(model, self.shared_amax) if self.shared_amax else None
        self._inventory = Inventory(model)
        if self.quantize_before_gather:
            self._gathers = WeightGathers(model, autocast_dtype, planned)

    def report_changes(self) -> None:
        """Logs once which layers have been added and removed."""
        model = self.model
        if model is None or self._inventory is None:
            return
        added, removed = self._inventory.take(model)
        if removed and self.histories is not None:
            before, self.histories = self.histories, AmaxHistories(self.present)
            self.histories.go_on(before, ())
        if message := described(added, removed):
            rank_zero_info(f"lightning_lowbit: layers have changed since the model was converted: {message}.")

    @property
    def phase(self) -> str:
        """The phase in force: the latest temporary one, or else that of :meth:`set_phase`."""
        return next((phase for phase in reversed(self._temporary.values()) if phase is not None), self._phase)

    def set_phase(self, phase: str) -> None:
        self._phase = choose("phase", phase, PHASES)
        self._temporary = {}
        self._apply_phase()

    def push_phase(self, owner: str, phase: str | None) -> None:
        if phase is not None:
            choose("phase", phase, PHASES)
        self._temporary.pop(owner, None)
        self._temporary[owner] = phase
        self._apply_phase()

    def pop_phase(self, owner: str) -> None:
        if self.has_pushed(owner):
            del self._temporary[owner]
            self._apply_phase()

    def has_pushed(self, owner: str) -> bool:
        return owner in self._temporary

    def _apply_phase(self) -> None:
        phase = self.phase
        for layer in self._layers.values():
            layer.casts = layer.full_casts.phase(phase)

    def set_blend(self, value: float) -> None:
        self.blend.fill_(check_blend(value))
        self.is_blending = value < 1
        self._share_blend()

    def _share_blend(self) -> None:
        for layer in self._layers.values():
            layer.lowbit.blend = self.blend if self.is_blending else None

    def set_casts(self, casts: Mapping[str, CastsLike]) -> None:
        changes = self.resolve_casts(casts)
        self.changed = {n: c for n, c in {**self.changed, **changes}.items() if c != self.planned.get(n)}
        self._renew_casts(changes)

    def resolve_casts(self, casts: Mapping[str, CastsLike]) -> dict[str, LinearCasts]:
        model = self.model
        if self._keys is None or model is None:
            raise MisconfigurationException(
                "set_casts needs a converted model, and none has been converted yet. Give the plugin overrides=..., or "
                "change casts once training has started."
            )
        changes = changed_casts(casts, self._plan, model)
        full = {name: layer.full_casts for name, layer in self.present.items()}
        if self.smooth_swiglu is not None:
            changes = smoothed(changes, full, model, self.smooth_swiglu)
        check_changes(self._layers, changes)
        check_backend(changes, self.backend, self.exact, self.device)
        check_save({name: casts for name, casts in changes.items() if casts.surrogate}, self.save)
        if self.shared_amax:
            groups({**self.casts_of(".*"), **changes}, self.shared_amax)  # raises if they could not share an amax
        return changes

    def casts_of(self, pattern: str) -> dict[str, LinearCasts]:
        if self._keys is None or self.model is None:
            return {}
        return {name: self._layers[name].full_casts for name in sorted(matches(pattern, self._plan, self.model))}

    def _change_casts(self, casts: Mapping[str, LinearCasts], model: nn.Module) -> set[str]:
        changed = {name for name, new in casts.items() if self._layers[name].full_casts != new}
        for name in changed:
            self._layers[name].set_casts(casts[name])
            self._layers[name].casts = casts[name].phase(self.phase)
        if changed:
            watch_up_projections(model)
        return changed

    def _renew_casts(self, casts: Mapping[str, LinearCasts], keep: bool = True) -> None:
        """Changes casts; with ``keep``, the amaxes of unchanged layers stay valid, else a checkpoint brings all."""
        model, before, layers = self.model, self.histories, self._layers
        if model is None or before is None:
            return
        had_amaxes = {name for name, layer in layers.items() if layer.lowbit.amaxes is not None}
        changed = self._change_casts(casts, model)
        needs_amaxes = [layers[n].full_casts.is_delayed or layers[n].full_casts.smooth == "channel" for n in changed]
        if changed & had_amaxes or any(needs_amaxes):
            self.histories = AmaxHistories(self.present)
            self.histories.go_on(before, changed)
            if not keep:  # loading matches names strictly
                self.histories.renewed.clear()

    @contextmanager
    def forward_context(self, dtype: torch.dtype, rank: int = 0, in_use: bool = True) -> Generator[None, None, None]:
        """Context of a forward pass that is not recorded; ``in_use``: histories scale operands."""
        self._prepare(rank, in_use)
        if self._gathers is not None:
            self._gathers.prepare()
        self._share_amaxes()
        autocast = nullcontext() if dtype == torch.float32 else torch.autocast(self.device.type, dtype=dtype)
        with self.products(), autocast:
            yield
        if self._gathers is not None and not torch.is_grad_enabled():
            self._gathers.reshard()

    def products(self) -> AbstractContextManager[Any]:
        """Context of a backward pass: products of dtypes that this device has no units for are float32's."""
        return float32_products(self._dtypes, self.device)

    def _prepare(self, rank: int, in_use: bool) -> None:
        if self._keys is None or self.histories is None:
            return
        if self._is_copy:
            self._keys.relink()
            self.histories.relink()
            self._is_copy = False
        self._keys.fill_(self.step, self.micro_batch, rank, self.device)
        self.histories.to_(self.device)
        self.histories.in_use = in_use
        self.record(False)
        if self.blend.device != with_index(self.device):
            with torch.inference_mode(False):  # not an inference tensor: training writes to it
                self.blend = self.blend.to(self.device)
            self._share_blend()

    def record(self, on: bool) -> None:
        if self.histories is not None:
            self.histories.recording = on

    def _share_amaxes(self) -> None:
        if self._shared is not None:
            self._shared.measure(partial(parameter_amaxes, device=self.device))

    def expect_draws(self, on: bool) -> None:
        if self._keys is not None:
            self._keys.expect_draws(on)

    @contextmanager
    def another_draw(self, number: int) -> Generator[None, None, None]:
        """Context for a backward pass with other random bits; restores all state afterwards."""
        model = self.model
        assert self._keys is not None and self.histories is not None and model is not None
        keys, layers = self._keys.in_use(), self._layers.values()
        states = [layer.lowbit for layer in layers]
        rows = [row for state in states for row in (state.operand_sums, state.gradient_sums) if row is not None]
        # Activation checkpointing runs the forward pass again, which updates running statistics.
        norms = [m for m in model.modules() if isinstance(m, NormBase)]
        buffers = [buffer for norm in norms for buffer in norm.buffers(recurse=False)]
        with unchanged([*keys, *rows, *self.histories.staged, *buffers]), self.products():
            self._keys.draw_again_(number)
            yield
        if len(self._keys.in_use()) == 1 and any(layer.casts.traits.draws for layer in layers):
            raise MisconfigurationException(
                "Another draw of a gradient needs the random bits of layers, and none asked for any, as in a replayed "
                "CUDA graph: compile without CUDA graphs (no mode='reduce-overhead'), or measure with "
                "GradientNoiseMonitor(kind='layers')."
            )

    def advance(self) -> None:
        """Counts an optimizer step. One collective for all layers moves staged amaxes into the histories."""
        self.step += 1
        self.micro_batch = 0
        if self.histories is not None:
            self.histories.advance_(partial(all_reduce_world_, op=dist.ReduceOp.MAX))
        if self._gathers is not None:
            self._gathers.forget()
        self._share_amaxes()

    def release(self, in_use: bool) -> None:
        """Leaves the layers as they are until the model is converted again; ``in_use`` as in `forward_context`."""
        for layer in self._layers.values():
            layer.lowbit.plugin_is_gone = True
        if self.histories is not None:
            self.histories.in_use = in_use
            self.histories.release()
        if self._shared is not None:
            self._shared.release()
            self._shared = None
        if self._gathers is not None:  # later passes without the plugin may use another dtype
            self._gathers.release()
            self._gathers = None

    def state_dict(self) -> dict[str, Any]:
        """Returns counters, phase, λ, changed casts and amaxes, as tensors and primitives."""
        self.report_changes()  # amaxes of layers that are gone are not saved
        state: dict[str, Any] = {name: getattr(self, name) for name in ("step", "micro_batch", "phase", "seed")}
        state["blend"] = self.blend.cpu().clone()
        if self.changed:
            state["casts"] = {name: primitive(casts) for name, casts in self.changed.items()}
        return state | (self.histories.state_dict() if self.histories else {})

    def load_casts(self, state: Mapping[str, Any]) -> None:
        """Loads the changed casts of a state; call it before :meth:`load_state_dict`, whose amaxes need them."""
        self.changed = {name: LinearCasts.of(casts) for name, casts in state.get("casts", {}).items()}
        if self._keys is None:
            return
        if missing := ", ".join(name for name in self.changed if name not in self.planned):
            what = "The checkpoint holds casts of layers that this run does not convert"
            rank_zero_warn(f"{what}: {missing}; they stay in high precision.")
            self.changed = {name: casts for name, casts in self.changed.items() if name in self.planned}
        self._renew_casts({n: self.changed.get(n, planned) for n, planned in self.planned.items()}, keep=False)

    def load_state_dict(self, state: Mapping[str, Any], histories: bool = True, accumulated: int = 1) -> None:
        """Loads counters, phase and λ, and with ``histories`` the amaxes, of a validated state. ``accumulated`` is the
        number of micro-batches by which a loss is divided, for states that do not tell it."""
        if self.histories and histories and "amax_history" not in state:
            rank_zero_warn(
                "The checkpoint holds no amax histories (it was trained without delayed scaling and smoothing): they "
                "start empty, and the first step scales by its own amaxes."
            )
        elif self.histories and histories:
            # Older versions saved the parts of the loss scale instead of `gradient_scale`.
            scale = state.get("scaler", {}).get("scale", 1.0) / state.get("accumulated", accumulated)
            self.histories.load_state_dict({"gradient_scale": {"loss": torch.tensor([float(scale)])}, **state})
        self.step, self.micro_batch = state["step"], state["micro_batch"]
        self.set_phase(state["phase"])
        self.set_blend(float(state.get("blend", 1.0)))
