"""What a precision plugin has made of a model, and keeps of it from step to step.

    planned      by layer, the casts it was converted with
    changed      by layer, the casts it was given instead since then
    phase        which GEMMs of all layers are quantized; it stays in force on top of either
    λ            how far operands are quantized, one tensor that all layers share
    keys         of this micro-batch's random bits
    histories    the amaxes that outlive a step; those of a layer start anew with its casts

Layers are known by their names without wrappers, in checkpoints, too.
"""

import weakref
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from lightning_lowbit._lightning import MisconfigurationException, rank_zero_warn
from lightning_lowbit.distributed import all_reduce_world_
from lightning_lowbit.nn.amax import AmaxHistories
from lightning_lowbit.nn.calls import draws
from lightning_lowbit.nn.casts import PHASES, PRESETS, LinearCasts
from lightning_lowbit.nn.conversion.convert import CastsLike, check_blend, select, set_phase
from lightning_lowbit.nn.conversion.smooth_swiglu import smooth_casts, watch_up_projections
from lightning_lowbit.nn.keys import LayerKeys, clean_name, hash_numbers, with_index
from lightning_lowbit.nn.linear import QuantizedLayer, is_linear
from lightning_lowbit.precision.checkpoints.trained import primitive
from lightning_lowbit.quant.cast import choose


def named_casts(value: CastsLike) -> LinearCasts | str:
    """Casts from what :meth:`LowBitPrecision.set_casts` takes; of a phase its name.

    Raises:
        ValueError: there is no such phase or preset, or a field is wrong.
    """
    if isinstance(value, str):
        choose("phase or preset", value, [*PHASES, *PRESETS])
        return value if value in PHASES else LinearCasts.preset(value)
    return LinearCasts.of(value)


class ConvertedModel:
    """The converted layers of a model, by name; before there is a model, a phase and λ for those to come.

    :class:`LowBitPrecision` has one, documents what of it is public, and says when things happen.

    Attributes:
        phase: the phase in force.
        phases_set: how often it was set; who has set it sees by that whether somebody else has done so since.
        blend: λ, 0-d float32.
        is_blending: whether λ is below 1.
        histories: the amaxes that outlive a step; None while there is no model.
    """

    def __init__(self) -> None:
        self.phase = "fqt"
        self.phases_set = 0
        self.blend = torch.ones(())
        self.is_blending = False
        self.histories: AmaxHistories | None = None
        self._model: weakref.ref[nn.Module] | None = None
        self._keys: LayerKeys | None = None
        self._planned: dict[str, LinearCasts] = {}
        self._changed: dict[str, LinearCasts] = {}
        self._is_copy = False  # of a pickle, in which layers hold copies of keys and amaxes

    @property
    def model(self) -> nn.Module | None:
        """The one that was converted last, or is about to be; None while there is none, or if it is gone."""
        return None if self._model is None else self._model()

    @property
    def casts(self) -> dict[str, LinearCasts]:
        """By layer, the casts in force outside any phase."""
        return {name: layer.full_casts for name, layer in self._layers.items()}

    @property
    def started(self) -> dict[str, LinearCasts]:
        """The casts that layers were converted with, of those that have others now."""
        return {name: self._planned[name] for name in self._changed if name in self._planned}

    @property
    def _layers(self) -> dict[str, QuantizedLayer]:
        return {} if self._keys is None else self._keys.layers

    def __getstate__(self) -> dict[str, Any]:
        """Without the model, which a weak reference cannot be pickled of; converting it again brings it back."""
        return {**vars(self), "_model": None, "_is_copy": True}

    # --- conversion ---

    def start_afresh(self) -> None:
        """Forgets another run; λ stays what it is."""
        self.phase, self.histories, self._changed = "fqt", None, {}

    def expect(self, model: nn.Module) -> None:
        """A model is about to be converted; amaxes of another one are forgotten."""
        if self._model is not None and self.model is not model:
            self.histories = None
        self._model = weakref.ref(model)

    def take(self, model: nn.Module, planned: Mapping[str, LinearCasts], seed: int) -> None:
        """A model has been converted: its layers get the casts and the phase in force, keys and histories.

        λ is theirs once it is set again.

        Args:
            model: whose layers.
            planned: by name in the model, the casts of each layer.
            seed: of the keys.
        """
        self._keys = LayerKeys(model, seed)
        self._planned = {clean_name(name): casts for name, casts in planned.items()}
        self._change_casts(self._planned | {n: c for n, c in self._changed.items() if n in self._planned}, model)
        set_phase(model, self.phase)
        before, self.histories = self.histories, AmaxHistories(model)
        self.record(False)
        if before is not None:  # the same run goes on
            self.histories.load_state_dict(before.state_dict())

    # --- phase and λ ---

    def set_phase(self, phase: str) -> None:
        """See :meth:`LowBitPrecision.set_phase`."""
        self.phase = choose("phase", phase, PHASES)
        self.phases_set += 1
        for layer in self._layers.values():
            layer.casts = layer.full_casts.phase(phase)

    def set_blend(self, value: float) -> None:
        """See :meth:`LowBitPrecision.set_blend`."""
        self.blend.fill_(check_blend(value))
        self.is_blending = value < 1
        self._share_blend()

    @torch.inference_mode(False)  # evaluation may be what moves it, and it is refilled in training
    def _place_blend(self, device: torch.device) -> None:
        self.blend = self.blend.to(device)
        self._share_blend()

    def _share_blend(self) -> None:
        for layer in self._layers.values():
            layer.blend = self.blend if self.is_blending else None

    # --- casts ---

    def resolve_casts(self, casts: Mapping[str, CastsLike], smooth_swiglu: str | None) -> dict[str, LinearCasts]:
        """What patterns stand for, by layer; nothing is changed. See :meth:`LowBitPrecision.set_casts`.

        Args:
            casts: by pattern, casts or a phase's name.
            smooth_swiglu: how SwiGLU is smoothed, as the plugin takes it.

        Raises:
            ValueError: a pattern matches no converted layer, or there is no such preset or phase.
            MisconfigurationException: there is no model yet.
        """
        model = self.model
        if self._keys is None or model is None:
            raise MisconfigurationException(
                "set_casts changes the casts of converted layers, and no model has been converted yet. Give the "
                "plugin overrides=..., or change casts once training has started."
            )
        given: dict[str, LinearCasts | str] = {pattern: named_casts(value) for pattern, value in casts.items()}
        matched = {pattern: self._match(pattern, model) for pattern in given}
        changes: dict[str, LinearCasts] = {}
        for name, planned in self._planned.items():
            pattern = next((pattern for pattern in given if name in matched[pattern]), None)
            if pattern is not None:
                value = given[pattern]
                changes[name] = planned.phase(value) if isinstance(value, str) else value
        if smooth_swiglu is not None:
            raw = {clean_name(name): name for name, _ in model.named_modules() if clean_name(name) in self._planned}
            casts_of = {name: changes.get(name, layer.full_casts) for name, layer in self._layers.items()}
            with suppress(ValueError):  # or else no down projection is quantized any more
                smoothed = smooth_casts(model, {raw[n]: casts_of[n] for n in self._planned}, smooth_swiglu)
                changes = {name: smoothed[raw[name]] for name in changes}
        return changes

    def set_casts(self, changes: Mapping[str, LinearCasts]) -> None:
        """Gives layers what :meth:`resolve_casts` found."""
        self._changed = {n: c for n, c in {**self._changed, **changes}.items() if c != self._planned.get(n)}
        self._renew_casts(changes)

    def casts_of(self, pattern: str) -> dict[str, LinearCasts]:
        """See :meth:`LowBitPrecision.casts_of`."""
        model = self.model
        if self._keys is None or model is None:
            return {}
        return {name: self._layers[name].full_casts for name in sorted(self._match(pattern, model))}

    def _match(self, pattern: str, model: nn.Module) -> set[str]:
        """The converted layers that a pattern matches."""
        try:
            return select(list(self._planned), [pattern], "casts", "converted layer")
        except ValueError:
            names = [clean_name(n) for n, m in model.named_modules() if isinstance(m, nn.Linear) or is_linear(m)]
            left = [name for name in names if name not in self._planned]
            found: list[str] = []
            with suppress(ValueError):
                found = sorted(select(left, [pattern], "casts"))
            if found:
                raise ValueError(
                    f"casts: the pattern {pattern!r} matches {', '.join(found)}, left in high precision by skip or "
                    "only, and casts are given to converted layers. Convert it, with overrides={...: 'bf16'} if it is "
                    "to begin in high precision."
                ) from None
            raise

    def _change_casts(self, casts: Mapping[str, LinearCasts], model: nn.Module) -> set[str]:
        """Sets casts outside any phase; returns the layers that had others."""
        layers = self._layers
        changed = {name for name, new in casts.items() if layers[name].full_casts != new}
        for name in changed:
            layers[name].set_casts(casts[name])
            layers[name].casts = casts[name].phase(self.phase)
        if changed:
            watch_up_projections(model)
        return changed

    def _renew_casts(self, casts: Mapping[str, LinearCasts], keep: bool = True) -> None:
        """Sets casts outside any phase, and makes histories for what they remember."""
        model, before, layers = self.model, self.histories, self._layers
        if model is None or before is None:
            return
        had = {name for name, layer in layers.items() if layer.amaxes is not None}
        changed = self._change_casts(casts, model)
        if any(name in had or _remembers(layers[name]) for name in changed):
            self.histories = AmaxHistories(model)
            self.histories.go_on(before, changed)
            if not keep:  # a checkpoint is about to be loaded, strictly
                self.histories.renewed.clear()

    # --- one step ---

    def prepare(self, step: int, micro_batch: int, rank: int, device: torch.device) -> None:
        """Before a forward pass: its random bits, and all that layers need, on their device. It stages no amaxes."""
        if self._keys is None or self.histories is None:
            return
        if self._is_copy:
            self._keys.relink()
            self.histories.relink()
            self._is_copy = False
        self._keys.fill_(step, micro_batch, rank, device)
        self.histories.to_(device)
        self.record(False)
        if self.blend.device != with_index(device):
            self._place_blend(device)

    def record(self, on: bool) -> None:
        """Whether passes stage amaxes from now on."""
        if self.histories is not None:
            self.histories.recording = on

    def expect_draws(self, on: bool) -> None:
        """Whether :meth:`another_draw` follows the next forward passes."""
        if self._keys is not None:
            self._keys.expect_draws(on)

    @contextmanager
    def another_draw(self, number: int) -> Generator[None, None, None]:
        """A context for a backward pass with other random bits, after which everything is as before."""
        assert self._keys is not None and self.histories is not None and self.model is not None
        keys, layers = self._keys.in_use(), self._layers.values()
        rows = [row for layer in layers for row in (layer.operand_sums, layer.gradient_sums) if row is not None]
        norms = [m for m in self.model.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]  # in a checkpoint
        buffers = [buffer for norm in norms for buffer in norm.buffers(recurse=False)]
        with _unchanged([*keys, *rows, *self.histories.staged, *buffers]):
            with _unsafe_preserve_version_counter(tuple(keys)):  # which compiled graphs have saved
                for one in keys:
                    one.bitwise_xor_(hash_numbers(-1 - number))
            yield
        if len(self._keys.in_use()) == 1 and any(draws(layer.casts) for layer in layers):
            raise MisconfigurationException(
                "Another draw of a gradient needs the random bits of layers, and none asked for any, neither in the "
                "forward pass nor in this backward pass, as in a CUDA graph that is replayed: compile without CUDA "
                "graphs (no mode='reduce-overhead'), or measure with GradientNoiseMonitor(kind='layers')."
            )

    def advance_(self) -> None:
        """Ends an optimizer step: what it staged enters the histories, by one collective for all layers."""
        if self.histories is not None:
            self.histories.advance_(partial(all_reduce_world_, op=dist.ReduceOp.MAX))

    # --- state; phase and λ are set through the plugin ---

    def state_dict(self) -> dict[str, Any]:
        """Changed casts and histories, where there are any; in tensors and primitives, the same on all ranks."""
        state: dict[str, Any] = {}
        if self._changed:
            state["casts"] = {name: primitive(casts) for name, casts in self._changed.items()}
        return state | self.histories.state_dict() if self.histories else state

    def load_histories(self, state: Mapping[str, Any], growth: float) -> None:
        """Takes the histories that :meth:`state_dict` gave; after :meth:`load_casts`, whose they are.

        Args:
            state: it may hold more.
            growth: this run's scale of the loss over that of the run which has saved the state.

        Raises:
            ValueError: its amax histories are those of other layers, or of another length.
        """
        if not self.histories:
            return
        if "amax_history" not in state:
            rank_zero_warn(
                "The checkpoint holds no amax histories (it was trained without delayed scaling and smoothing): they "
                "start empty, and the first step scales by its own amaxes."
            )
            return
        self.histories.load_state_dict(state)
        self.histories.scale_gradients_(torch.tensor(growth, device="cpu"))

    def load_casts(self, state: Mapping[str, Any]) -> None:
        """Takes the changed casts that :meth:`state_dict` gave."""
        self._changed = {name: LinearCasts.of(casts) for name, casts in state.get("casts", {}).items()}
        if self._keys is None:
            return
        missing = [name for name in self._changed if name not in self._planned]
        if missing:
            rank_zero_warn(
                f"The checkpoint holds casts of layers that this run does not convert: {', '.join(missing)}; they stay "
                "in high precision."
            )
            self._changed = {name: casts for name, casts in self._changed.items() if name in self._planned}
        self._renew_casts({n: self._changed.get(n, planned) for n, planned in self._planned.items()}, keep=False)


def _remembers(layer: QuantizedLayer) -> bool:
    """Whether the casts of a layer need amaxes of former steps."""
    return layer.full_casts.is_delayed or layer.full_casts.smooth == "channel"


@contextmanager
@torch.no_grad()
def _unchanged(tensors: list[Tensor]) -> Generator[None, None, None]:
    """Within this context tensors may change in place; afterwards they are as before, also in the eyes of autograd."""
    kept = [tensor.clone() for tensor in tensors]
    with _unsafe_preserve_version_counter(tuple(tensors)):
        try:
            yield
        finally:
            for tensor, before in zip(tensors, kept, strict=True):
                tensor.copy_(before)
