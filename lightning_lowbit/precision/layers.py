"""The converted layers of a model, and what a precision plugin keeps of them from step to step.

    planned      by layer, the casts it was converted with
    changed      by layer, other casts that it was given since
    phases       which GEMMs of all layers are quantized: one phase, and temporary ones on top of it
    λ            how far operands are quantized, one tensor that all layers share
    keys         of the random bits of this micro-batch
    histories    the amaxes that outlive a step; those of a layer start again with its casts

Layers are known by their names without wrappers, also in checkpoints.
"""

import weakref
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_lowbit._lightning import MisconfigurationException
from lightning_lowbit.checks import choose
from lightning_lowbit.distributed import all_reduce_world_, parameter_amaxes
from lightning_lowbit.nn.amax import AmaxHistories
from lightning_lowbit.nn.calls import draws
from lightning_lowbit.nn.casts import PHASES, LinearCasts
from lightning_lowbit.nn.conversion.convert import CastsLike, check_backend, check_blend, convert_layers, set_phase
from lightning_lowbit.nn.conversion.shared_amax import SharedAmaxes, groups
from lightning_lowbit.nn.conversion.smooth_swiglu import watch_up_projections
from lightning_lowbit.nn.keys import LayerKeys, clean_name, unchanged, with_index
from lightning_lowbit.nn.linear import QuantizedLayer
from lightning_lowbit.precision.changed_casts import changed_casts, match, smoothed


class ConvertedLayers:
    """The part of :class:`LowBitPrecision` that owns the converted layers.

    Before there is a model, it holds the phase and λ of the layers to come.

    Attributes:
        blend: λ of progressive quantization, 0-d float32, set by :meth:`set_blend`.
        is_blending: whether λ is below 1.
        histories: the amaxes that outlive a step; None before a model is converted.
    """

    # Arguments of the plugin.
    backend: str
    exact: bool
    smooth_swiglu: str | None
    shared_amax: Iterable[str]

    def __init__(self) -> None:
        self.blend = torch.ones(())
        self.is_blending = False
        self.histories: AmaxHistories | None = None
        self._phase = "fqt"
        self._temporary: dict[str, str | None] = {}  # by owner, the last one on top
        self._model: weakref.ref[nn.Module] | None = None
        self._keys: LayerKeys | None = None
        self._planned: dict[str, LinearCasts] = {}
        self._changed: dict[str, LinearCasts] = {}
        self._shared: SharedAmaxes | None = None
        self._device = torch.device("cpu")
        self._is_copy = False  # of a pickle, in which layers hold copies of keys and amaxes

    def __getstate__(self) -> dict[str, Any]:
        """Without the model, of which a weak reference cannot be pickled; converting it again brings it back."""
        return {**vars(self), "_model": None, "_is_copy": True}

    @property
    def _converted_model(self) -> nn.Module | None:
        """The model that was converted last, or is about to be; None if there is none, or if it is gone."""
        return None if self._model is None else self._model()

    @property
    def _layers(self) -> dict[str, QuantizedLayer]:
        return {} if self._keys is None else self._keys.layers

    @property
    def _casts(self) -> dict[str, LinearCasts]:
        """By layer, the casts in force outside any phase."""
        return {name: layer.full_casts for name, layer in self._layers.items()}

    # --- conversion ---

    def _start_afresh(self) -> None:
        """Forgets another run."""
        self._changed, self.histories = {}, None
        self._phase, self._temporary = "fqt", {}
        self.set_blend(1.0)

    def _expect(self, model: nn.Module) -> None:
        """Prepares for the conversion of a model; amaxes of another one are forgotten."""
        if self._model is not None and self._converted_model is not model:
            self.histories = None
        self._model = weakref.ref(model)

    def _convert(self, model: nn.Module, planned: Mapping[str, LinearCasts], seed: int) -> None:
        """Converts a model: its layers get casts, phase, λ, keys and histories.

        Args:
            model: in place.
            planned: by name in the model, the casts of each layer.
            seed: of the keys.
        """
        convert_layers(model, planned, self.exact, self.backend)
        self._keys = LayerKeys(model, seed)
        self._planned = {clean_name(name): casts for name, casts in planned.items()}
        self._change_casts(self._planned | {n: c for n, c in self._changed.items() if n in self._planned}, model)
        set_phase(model, self.phase)
        before, self.histories = self.histories, AmaxHistories(model)
        self._record(False)
        if before is not None:  # the same run goes on
            self.histories.load_state_dict(before.state_dict())
        self.set_blend(float(self.blend))
        self._shared = SharedAmaxes(model, self.shared_amax) if self.shared_amax else None

    # --- phases and λ ---

    @property
    def phase(self) -> str:
        """The phase in force: the last temporary one, or else that of :meth:`set_phase`."""
        return next((phase for phase in reversed(self._temporary.values()) if phase is not None), self._phase)

    def set_phase(self, phase: str) -> None:
        """Puts all layers into a phase, and ends temporary ones.

        Args:
            phase: ``"fqt"``, ``"qaf"``, ``"hp-forward"`` or ``"bf16"``.

        Raises:
            ValueError: there is no such phase.
        """
        self._phase = choose("phase", phase, PHASES)
        self._temporary.clear()
        self._apply_phase()

    def push_phase(self, owner: str, phase: str | None) -> None:
        """Puts all layers into a temporary phase, until its owner pops it or somebody sets a phase.

        Args:
            owner: a name; what it pushed before is replaced.
            phase: None keeps the owner's place, but leaves the phase below in force.

        Raises:
            ValueError: there is no such phase.
        """
        if phase is not None:
            choose("phase", phase, PHASES)
        self._temporary.pop(owner, None)
        self._temporary[owner] = phase
        self._apply_phase()

    def pop_phase(self, owner: str) -> None:
        """Ends the temporary phase of an owner, if it is still there."""
        if self.has_pushed(owner):
            del self._temporary[owner]
            self._apply_phase()

    def has_pushed(self, owner: str) -> bool:
        """Whether an owner has a temporary phase: nobody has set a phase since it was pushed."""
        return owner in self._temporary

    def _apply_phase(self) -> None:
        phase = self.phase
        for layer in self._layers.values():
            layer.casts = layer.full_casts.phase(phase)

    def set_blend(self, value: float) -> None:
        """Sets λ, how far operands are quantized: from 0 (high precision) to 1 (quantized).

        Operands that have a cast are ``x + λ (q(x) - x)``. Changes of λ below 1 compile nothing again; at 1 operands
        are again what hardware takes.

        Raises:
            ValueError: a number outside [0, 1].
        """
        self.blend.fill_(check_blend(value))
        self.is_blending = value < 1
        self._share_blend()

    def _share_blend(self) -> None:
        for layer in self._layers.values():
            layer.blend = self.blend if self.is_blending else None

    # --- casts ---

    def set_casts(self, casts: Mapping[str, CastsLike]) -> None:
        """Gives layers other casts; the phase stays in force on top of them.

        Changed casts are part of a checkpoint. A run with another Trainer begins with those of the constructor.
        Delayed scaling and smoothing start again for these layers, and go on for all others.

        Args:
            casts: by pattern of layers (see :func:`lightning_lowbit.convert`; the first that matches a layer counts),
                what :meth:`LinearCasts.of` takes, or a phase's name: the constructor's casts in this phase, so that
                ``"fqt"`` restores them. Layers that no pattern matches keep theirs.

        Raises:
            ValueError: a pattern matches no converted layer, there is no such preset or phase, the backend has no
                native form of such casts, or layers could no longer share an amax; then nothing has changed.
            MisconfigurationException: there is no model yet; give ``overrides`` to the constructor.

        Example:
            >>> trainer.precision_plugin.set_casts({"lm_head": "bf16", "down_proj": "nvfp4-4over6"})
        """
        changes = self.resolve_casts(casts)
        self._changed = {n: c for n, c in {**self._changed, **changes}.items() if c != self._planned.get(n)}
        self._renew_casts(changes)

    def resolve_casts(self, casts: Mapping[str, CastsLike]) -> dict[str, LinearCasts]:
        """The casts that :meth:`set_casts` would give to each layer that a pattern matches, without changing anything.

        Arguments and errors are the same.
        """
        model = self._converted_model
        if self._keys is None or model is None:
            raise MisconfigurationException(
                "set_casts changes the casts of converted layers, and no model has been converted yet. Give the "
                "plugin overrides=..., or change casts once training has started."
            )
        changes = changed_casts(casts, self._planned, model)
        if self.smooth_swiglu is not None:
            changes = smoothed(changes, self._casts, model, self.smooth_swiglu)
        check_backend(changes, self.backend, self.exact, self._device)
        if self.shared_amax:
            groups({**self.casts_of(".*"), **changes}, self.shared_amax)  # raises if they could share none
        return changes

    def casts_of(self, pattern: str) -> dict[str, LinearCasts]:
        """The casts, outside any phase, of the converted layers that a pattern matches, by name.

        Raises:
            ValueError: it matches none.
        """
        model = self._converted_model
        if self._keys is None or model is None:
            return {}
        return {name: self._layers[name].full_casts for name in sorted(match(pattern, self._planned, model))}

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
        """Sets casts outside any phase, and makes histories for those that need amaxes of former steps."""
        model, before, layers = self._converted_model, self.histories, self._layers
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

    def _prepare(self, step: int, micro_batch: int, rank: int) -> None:
        """Before a forward pass, which stages no amaxes: fills its keys, and moves what layers need to their device."""
        device = self._device
        if self._keys is None or self.histories is None:
            return
        if self._is_copy:
            self._keys.relink()
            self.histories.relink()
            self._is_copy = False
        self._keys.fill_(step, micro_batch, rank, device)
        self.histories.to_(device)
        self._record(False)
        if self.blend.device != with_index(device):
            with torch.inference_mode(False):  # an evaluation may be what moves λ, and training refills it
                self.blend = self.blend.to(device)
            self._share_blend()

    def _record(self, on: bool) -> None:
        """Whether passes stage amaxes from now on."""
        if self.histories is not None:
            self.histories.recording = on

    def _share_amaxes(self) -> None:
        """Measures the weights that share an amax, where they have changed."""
        if self._shared is not None:
            self._shared.measure(partial(parameter_amaxes, device=self._device))

    def expect_draws(self, on: bool = True) -> None:
        """Says before a forward pass whether :meth:`LowBitPrecision.another_draw` will follow it."""
        if self._keys is not None:
            self._keys.expect_draws(on)

    @contextmanager
    def _other_keys(self, number: int) -> Generator[None, None, None]:
        """A context for a backward pass with other random bits, after which everything is as before."""
        model = self._converted_model
        assert self._keys is not None and self.histories is not None and model is not None
        keys, layers = self._keys.in_use(), self._layers.values()
        rows = [row for layer in layers for row in (layer.operand_sums, layer.gradient_sums) if row is not None]
        norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]  # in a checkpoint
        buffers = [buffer for norm in norms for buffer in norm.buffers(recurse=False)]
        with unchanged([*keys, *rows, *self.histories.staged, *buffers]):
            self._keys.draw_again_(number)
            yield
        if len(self._keys.in_use()) == 1 and any(draws(layer.casts) for layer in layers):
            raise MisconfigurationException(
                "Another draw of a gradient needs the random bits of layers, and none asked for any, neither in the "
                "forward pass nor in this backward pass, as in a CUDA graph that is replayed: compile without CUDA "
                "graphs (no mode='reduce-overhead'), or measure with GradientNoiseMonitor(kind='layers')."
            )

    def _advance_histories(self) -> None:
        """Ends an optimizer step: the staged amaxes enter the histories, by one collective for all layers."""
        if self.histories is not None:
            self.histories.advance_(partial(all_reduce_world_, op=dist.ReduceOp.MAX))

    def _release_shared(self) -> None:
        """Nobody measures shared amaxes any more."""
        if self._shared is not None:
            self._shared.release()
            self._shared = None


def _remembers(layer: QuantizedLayer) -> bool:
    """Whether the casts of a layer need amaxes of former steps."""
    return layer.full_casts.is_delayed or layer.full_casts.smooth == "channel"
