"""The converted layers of a model, and their state from step to step.

    planned, changed    by layer, its casts at conversion, and other casts set since
    phases              which GEMMs are quantized: one phase for all layers, and a stack of temporary ones above it
    λ, keys             how much operands are quantized; keys of this micro-batch's random bits
    histories           amaxes of previous steps; changing a layer's casts resets its own

Layer names are without wrapper prefixes, also in checkpoints.
"""

import weakref
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_lowbit._lightning import MisconfigurationException, rank_zero_info
from lightning_lowbit.checks import choose, some
from lightning_lowbit.distributed import all_reduce_world_, parameter_amaxes
from lightning_lowbit.nn.attention.products import check_attention
from lightning_lowbit.nn.casts.linear_casts import PHASES, LinearCasts
from lightning_lowbit.nn.conversion.convert import CastsLike, check_backend, check_blend, convert_layers, set_phase
from lightning_lowbit.nn.conversion.inventory import Inventory
from lightning_lowbit.nn.conversion.shared_amax import SharedAmaxes, groups
from lightning_lowbit.nn.conversion.smooth_swiglu import watch_up_projections
from lightning_lowbit.nn.core.saving import check_save
from lightning_lowbit.nn.layers.layer import QuantizedLayer, clean_name
from lightning_lowbit.nn.state.amax import AmaxHistories
from lightning_lowbit.nn.state.keys import LayerKeys, unchanged, with_index
from lightning_lowbit.precision.changed_casts import changed_casts, match, smoothed


class ConvertedLayers:
    """The part of :class:`LowBitPrecision` that owns the converted layers."""

    # Set by the plugin.
    backend: str
    exact: bool
    save: str
    smooth_swiglu: str | None
    shared_amax: Iterable[str]

    def __init__(self) -> None:
        self.blend = torch.ones(())  # λ of progressive quantization, set by `set_blend`
        self.is_blending = False  # whether λ is below 1
        self.histories: AmaxHistories | None = None  # amaxes of previous steps, once a model is converted
        self._phase = "fqt"
        self._temporary: dict[str, str | None] = {}  # by owner, the last one counts
        self._model: weakref.ref[nn.Module] | None = None
        self._keys: LayerKeys | None = None
        self._planned: dict[str, LinearCasts] = {}
        self._changed: dict[str, LinearCasts] = {}
        self._shared: SharedAmaxes | None = None
        self._device = torch.device("cpu")
        self._inventory: Inventory | None = None
        self._is_copy = False  # unpickled: layers hold copies of keys and amaxes

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the model: a weak reference cannot be pickled. Converting the model again restores it."""
        return {**vars(self), "_model": None, "_inventory": None, "_is_copy": True}

    @property
    def _converted_model(self) -> nn.Module | None:
        return None if self._model is None else self._model()

    @property
    def _layers(self) -> dict[str, QuantizedLayer]:
        return {} if self._keys is None else self._keys.layers

    @property
    def _casts(self) -> dict[str, LinearCasts]:
        return {name: layer.full_casts for name, layer in self._present.items()}

    @property
    def _present(self) -> dict[str, QuantizedLayer]:
        """The layers but those that were removed from the model, or replaced, since it was converted."""
        model, layers = self._converted_model, self._layers
        present = {*layers.values()} if model is None else {*model.modules()}
        return {name: layer for name, layer in layers.items() if layer in present}

    @property
    def _present_names(self) -> dict[str, str]:
        """The names that layers have now, by those at conversion: an insertion moves layers behind it."""
        model = self._converted_model
        names = {} if model is None else {module: clean_name(name) for name, module in model.named_modules()}
        return {name: names.get(layer, name) for name, layer in self._present.items()}

    @property
    def _present_plan(self) -> dict[str, LinearCasts]:
        return {name: self._planned[name] for name in self._present if name in self._planned}

    def _say_what_has_changed(self) -> None:
        """Says once which layers have come and gone."""
        model = self._converted_model
        if model is None or self._inventory is None:
            return
        added, removed = self._inventory.take(model)
        if removed and self.histories is not None:
            before, self.histories = self.histories, AmaxHistories(self._present)
            self.histories.go_on(before, ())
        copies = [name for name, module in added.items() if isinstance(module, QuantizedLayer)]
        parts = {
            "in high precision until the next fit converts them": [name for name in added if name not in copies],
            "copies, which keep their casts and phase, and which no histories and random bits renew": copies,
            "gone": removed,
        }
        if told := "; ".join(f"{some(names)} ({what})" for what, names in parts.items() if names):
            rank_zero_info(f"lightning_lowbit: layers have changed since the model was converted: {told}.")

    def _start_afresh(self) -> None:
        self._changed, self.histories = {}, None
        self._phase, self._temporary = "fqt", {}
        self.set_blend(1.0)

    def _expect(self, model: nn.Module) -> None:
        if self._model is not None and self._converted_model is not model:
            self.histories = None
        self._model = weakref.ref(model)

    def _convert(self, model: nn.Module, planned: Mapping[str, LinearCasts], seed: int) -> None:
        convert_layers(model, planned, self.exact, self.backend, self.save)
        self._keys = LayerKeys(model, seed)
        self._planned = {clean_name(name): casts for name, casts in planned.items()}
        self._change_casts(self._planned | {n: c for n, c in self._changed.items() if n in self._planned}, model)
        set_phase(model, self.phase)
        before, self.histories = self.histories, AmaxHistories(model)
        self._record(False)
        if before is not None:  # the same run continues, maybe with other layers
            self.histories.renewed = self.histories.names ^ before.names
            self.histories.load_state_dict(before.state_dict())
            self.histories.renewed.clear()
        self.set_blend(float(self.blend))
        self._shared = SharedAmaxes(model, self.shared_amax) if self.shared_amax else None
        self._inventory = Inventory(model)

    @property
    def phase(self) -> str:
        """The phase in force: the latest temporary one, or else that of :meth:`set_phase`."""
        return next((phase for phase in reversed(self._temporary.values()) if phase is not None), self._phase)

    def set_phase(self, phase: str) -> None:
        """Puts all layers into ``"fqt"``, ``"qaf"``, ``"hp-forward"`` or ``"bf16"``, and ends temporary phases."""
        self._phase = choose("phase", phase, PHASES)
        self._temporary.clear()
        self._apply_phase()

    def push_phase(self, owner: str, phase: str | None) -> None:
        """Puts all layers into the temporary phase of an owner (a name); None leaves the phase below in force."""
        if phase is not None:
            choose("phase", phase, PHASES)
        self._temporary.pop(owner, None)
        self._temporary[owner] = phase
        self._apply_phase()

    def pop_phase(self, owner: str) -> None:
        """Ends an owner's temporary phase, if it is still there."""
        if self.has_pushed(owner):
            del self._temporary[owner]
            self._apply_phase()

    def has_pushed(self, owner: str) -> bool:
        """Whether an owner's temporary phase is still there, so :meth:`set_phase` was not called since."""
        return owner in self._temporary

    def _apply_phase(self) -> None:
        phase = self.phase
        for layer in self._layers.values():
            layer.casts = layer.full_casts.phase(phase)

    def set_blend(self, value: float) -> None:
        """Sets λ, from 0 (high precision) to 1 (quantized).

        Operands that have a cast become ``x + λ (q(x) - x)``. Changing λ below 1 does not recompile. At 1, native GEMMs
        are used again. A number outside [0, 1] raises ``ValueError``.
        """
        self.blend.fill_(check_blend(value))
        self.is_blending = value < 1
        self._share_blend()

    def _share_blend(self) -> None:
        for layer in self._layers.values():
            layer.blend = self.blend if self.is_blending else None

    def set_casts(self, casts: Mapping[str, CastsLike]) -> None:
        """Gives layers other casts; the phase still applies to them.

        Changed casts are saved in checkpoints. Training by another Trainer begins with those of the constructor.
        Delayed scaling and smoothing restart for the changed layers only.

        Args:
            casts: by name pattern (see :func:`lightning_lowbit.convert`; the first match counts), what
                :meth:`LinearCasts.of` takes, or a phase: the constructor's casts in this phase, so ``"fqt"`` restores
                them.

        Raises:
            ValueError: a pattern matches no converted layer, a preset or phase does not exist, the backend has no
                native form of such casts, or layers could no longer share an amax. Nothing has changed then.
            MisconfigurationException: no model is converted yet; give ``overrides`` to the constructor.

        Examples:
            >>> trainer.precision_plugin.set_casts({"lm_head": "bf16", "down_proj": "nvfp4-4over6"})
        """
        changes = self.resolve_casts(casts)
        self._changed = {n: c for n, c in {**self._changed, **changes}.items() if c != self._planned.get(n)}
        self._renew_casts(changes)

    def resolve_casts(self, casts: Mapping[str, CastsLike]) -> dict[str, LinearCasts]:
        """Returns the casts by layer that :meth:`set_casts` would set, with the same errors."""
        model = self._converted_model
        if self._keys is None or model is None:
            raise MisconfigurationException(
                "set_casts needs a converted model, and none has been converted yet. Give the plugin overrides=..., or "
                "change casts once training has started."
            )
        changes = changed_casts(casts, self._present_plan, model)
        if self.smooth_swiglu is not None:
            changes = smoothed(changes, self._casts, model, self.smooth_swiglu)
        for name, new in changes.items():
            if self._layers[name].kind == "attention":
                check_attention(name, new)
        check_backend(changes, self.backend, self.exact, self._device)
        check_save({name: casts for name, casts in changes.items() if casts.surrogate}, self.save)
        if self.shared_amax:
            groups({**self.casts_of(".*"), **changes}, self.shared_amax)  # raises if they could not share an amax
        return changes

    def casts_of(self, pattern: str) -> dict[str, LinearCasts]:
        """The casts by name of the layers that a pattern matches, regardless of the phase; ``ValueError`` if none."""
        model = self._converted_model
        if self._keys is None or model is None:
            return {}
        return {name: self._layers[name].full_casts for name in sorted(match(pattern, self._present_plan, model))}

    def _change_casts(self, casts: Mapping[str, LinearCasts], model: nn.Module) -> set[str]:
        layers = self._layers
        changed = {name for name, new in casts.items() if layers[name].full_casts != new}
        for name in changed:
            layers[name].set_casts(casts[name])
            layers[name].casts = casts[name].phase(self.phase)
        if changed:
            watch_up_projections(model)
        return changed

    def _renew_casts(self, casts: Mapping[str, LinearCasts], keep: bool = True) -> None:
        model, before, layers = self._converted_model, self.histories, self._layers
        if model is None or before is None:
            return
        had = {name for name, layer in layers.items() if layer.amaxes is not None}
        changed = self._change_casts(casts, model)
        new = [layers[name].full_casts for name in changed]
        if changed & had or any(each.is_delayed or each.smooth == "channel" for each in new):
            self.histories = AmaxHistories(self._present)
            self.histories.go_on(before, changed)
            if not keep:  # a checkpoint is loaded next, with strict matching
                self.histories.renewed.clear()

    def _prepare(self, step: int, micro_batch: int, rank: int, in_use: bool) -> None:
        """Before a forward pass: fills its random keys and moves state to the device; recording is off. ``in_use`` is
        whether it scales by histories."""
        device = self._device
        if self._keys is None or self.histories is None:
            return
        if self._is_copy:
            self._keys.relink()
            self.histories.relink()
            self._is_copy = False
        self._keys.fill_(step, micro_batch, rank, device)
        self.histories.to_(device)
        self.histories.in_use = in_use
        self._record(False)
        if self.blend.device != with_index(device):
            with torch.inference_mode(False):  # not an inference tensor: training writes to it
                self.blend = self.blend.to(device)
            self._share_blend()

    def _record(self, on: bool) -> None:
        if self.histories is not None:
            self.histories.recording = on

    def _share_amaxes(self) -> None:
        if self._shared is not None:
            self._shared.measure(partial(parameter_amaxes, device=self._device))

    def expect_draws(self, on: bool = True) -> None:
        """Before a forward pass, says whether :meth:`LowBitPrecision.another_draw` will follow."""
        if self._keys is not None:
            self._keys.expect_draws(on)

    @contextmanager
    def _other_keys(self, number: int) -> Generator[None, None, None]:
        """Context for a backward pass with other random bits; restores all state afterwards."""
        model = self._converted_model
        assert self._keys is not None and self.histories is not None and model is not None
        keys, layers = self._keys.in_use(), self._layers.values()
        rows = [row for layer in layers for row in (layer.operand_sums, layer.gradient_sums) if row is not None]
        # Activation checkpointing runs the forward pass again, which updates running statistics.
        norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
        buffers = [buffer for norm in norms for buffer in norm.buffers(recurse=False)]
        with unchanged([*keys, *rows, *self.histories.staged, *buffers]):
            self._keys.draw_again_(number)
            yield
        if len(self._keys.in_use()) == 1 and any(layer.casts.plan.draws for layer in layers):
            raise MisconfigurationException(
                "Another draw of a gradient needs the random bits of layers, and none asked for any, as in a replayed "
                "CUDA graph: compile without CUDA graphs (no mode='reduce-overhead'), or measure with "
                "GradientNoiseMonitor(kind='layers')."
            )

    def _advance_histories(self) -> None:
        if self.histories is not None:
            self.histories.advance_(partial(all_reduce_world_, op=dist.ReduceOp.MAX))

    def _release(self, in_use: bool) -> None:
        """Leaves the layers as they are, until the model is converted again; ``in_use`` as above."""
        for layer in self._layers.values():
            layer.is_left = True
        if self.histories is not None:
            self.histories.in_use = in_use
            self.histories.release()
        if self._shared is not None:
            self._shared.release()
            self._shared = None
