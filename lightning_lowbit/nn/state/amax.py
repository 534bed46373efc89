"""Amaxes that last between steps, for delayed scaling and for the evaluation of smoothed layers.

During a step, each pass raises an operand's staged amax to its own, so that micro-batches add up and recomputation
changes nothing. At the end, the staged amaxes, as maxima over all ranks, enter the histories; 0 (the layer did not run)
and non-finite ones do not. Operands are scaled by the amax in force: the largest in the history, or the newest, or
their own while the history is empty. Transformer Engine instead starts with the scale 1, with which gradients below
2^-17 vanish, and keeps an infinity in the history.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_lowbit._torch import foreach_mul_, foreach_zero_
from lightning_lowbit._torch.devices import with_index
from lightning_lowbit.checks import some
from lightning_lowbit.nn.casts.traits import OPERANDS
from lightning_lowbit.nn.core.watch import LayerAmaxes
from lightning_lowbit.nn.layers.layer import QuantizedLayer, quantized_layers
from lightning_lowbit.patterns import clean_name

_UNSCALED = {"loss": torch.ones(1)}  # of states that do not say what the loss was multiplied by
_GRADIENTS = [OPERANDS.index(name) for name in ("dgrad_g", "wgrad_g")]


@dataclass
class _Row:
    """A layer, its slice of the channels, and the length of each operand's history in steps, 0 without one."""

    name: str
    layer: QuantizedLayer
    channels: slice
    lengths: list[int]


class AmaxHistories:
    """The amaxes of all layers with delayed scaling or smoothed channels, advanced once per optimizer step.

    They belong to no module, so that the model's ``state_dict`` is that of the unconverted model. Each layer holds
    views: a step takes a few operations and, on several ranks, one collective.

    Args:
        model: holds converted layers, whose names are those in this model; or converted layers by name.

    Attributes:
        recording: whether passes stage their amaxes. Set it to False to evaluate: smoothing then uses the channel
            amaxes of the last training step.
        staged: the amaxes of the current step: a tensor for each layer, then one of channels for each layer.
        renewed: the layers whose casts have changed since training started, see :meth:`go_on`.

    Examples:
        >>> histories = AmaxHistories(convert(model, "fp8-delayed"))
        >>> for batch in batches:
        ...     model(batch).backward()
        ...     histories.advance_()
    """

    def __init__(self, model: nn.Module | Mapping[str, QuantizedLayer]) -> None:
        self._switch: list[bool] | None = [True]
        self._is_in_use = True
        self._gradient_scale: float | Tensor = 1.0  # of the amaxes of output gradients, see `follow_`
        self.renewed: set[str] = set()
        self._rows: list[_Row] = []
        numbers: list[list[int]] = []  # of newest amaxes from which the one in force is chosen
        channels = 0
        for name, layer in (quantized_layers(model) if isinstance(model, nn.Module) else model).items():
            layer.lowbit.amaxes = None
            casts = layer.full_casts
            smoothed = _in_features(layer) if casts.smooth == "channel" else 0
            if casts.is_delayed or smoothed:
                place = slice(channels, channels := channels + smoothed)
                lengths = [casts.delayed[o].scale.history if o in casts.delayed else 0 for o in OPERANDS]
                self._rows.append(_Row(clean_name(name), layer, place, lengths))
                newest = {o for o, cast in casts.delayed.items() if cast.scale.algorithm == "most_recent"}
                numbers.append([1 if o in newest else length for o, length in zip(OPERANDS, lengths, strict=True)])
        size, operands = len(self._rows), len(OPERANDS)
        longest = max([1, *(length for row in self._rows for length in row.lengths)])
        self._history = torch.zeros(size, operands, longest, dtype=torch.float32)  # oldest first
        self._remembered = torch.arange(longest) >= longest - torch.tensor(numbers).view(size, operands, 1)
        self._channels = torch.zeros(channels, dtype=torch.float32)
        # No views of one tensor, which would share its version counter: in a model compiled in pieces the next piece
        # would invalidate a backward pass.
        sizes = [operands] * size + [row.channels.stop - row.channels.start for row in self._rows]
        self.staged = [torch.zeros(length, dtype=torch.float32) for length in sizes]
        self._place(torch.device("cpu"))

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def recording(self) -> bool:
        return self._switch is not None and self._switch[0]

    @recording.setter
    def recording(self, on: bool) -> None:
        if self._switch is not None:
            self._switch[0] = on

    @property
    def in_use(self) -> bool:
        """Scales operands by the histories. Set it to False to evaluate other weights than those in training, such as
        their averages: operands are then scaled by their own amaxes."""
        return self._is_in_use

    @in_use.setter
    def in_use(self, on: bool) -> None:
        if on != self._is_in_use:
            self._is_in_use = on
            self._choose()

    def release(self) -> None:
        """Leaves the layers their amaxes for evaluation: it is an error to train them without other histories."""
        self._switch = None
        self._place(self._history.device)

    @property
    def names(self) -> set[str]:
        return {row.name for row in self._rows}

    def go_on(self, before: "AmaxHistories", renewed: Collection[str]) -> None:
        """Copies amaxes from ``before``, prior to a change of casts; those of ``renewed`` layers start empty."""
        self._switch, self._gradient_scale = before._switch, before._gradient_scale
        self.renewed = before.renewed | set(renewed)
        self._place(before._history.device)
        former = {row.name: (j, row) for j, row in enumerate(before._rows) if row.name not in renewed}
        length = min(self._history.shape[-1], before._history.shape[-1])
        for i, row in enumerate(self._rows):
            if row.name in former:
                j, old = former[row.name]
                self._history[i, :, -length:] = before._history[j, :, -length:]
                self._channels[row.channels] = before._channels[old.channels]
                self.staged[i].copy_(before.staged[j])
                self.staged[len(self._rows) + i].copy_(before.staged[len(before._rows) + j])
        self._choose()

    def to_(self, device: torch.device) -> None:
        """Moves the amaxes to the device of the layers."""
        if with_index(device) != self._history.device:
            self._place(device)

    def relink(self) -> None:
        """Gives layers views of the amaxes again, after pickle has copied them."""
        self._place(self._history.device)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.relink()

    @torch.inference_mode(False)  # evaluation may move it, and training writes to these tensors
    def _place(self, device: torch.device) -> None:
        self._history, self._remembered = self._history.to(device), self._remembered.to(device)
        self._channels = self._channels.to(device)
        self.staged = [amaxes.to(device) for amaxes in self.staged]
        size = len(self._rows)
        self._in_force = torch.zeros(size, len(OPERANDS), dtype=torch.float32, device=device)
        self._choose()
        rows = zip(self._rows, self._in_force, self.staged[:size], self.staged[size:], strict=True)
        for row, in_force, staged, channels in rows:
            views = in_force, staged, self._channels[row.channels], channels
            row.layer.lowbit.amaxes = LayerAmaxes(*views, self._switch)

    def _choose(self) -> None:
        remembered = torch.where(self._remembered, self._history, 0).amax(-1)
        self._in_force.copy_(remembered if self._is_in_use else 0 * remembered)

    def advance_(self, reduce: Callable[[Tensor], Any] | None = None) -> None:
        """Ends a step: staged amaxes enter the histories.

        Args:
            reduce: replaces a tensor in place by its maximum over the ranks that train one model, e.g.
                ``partial(torch.distributed.all_reduce, op=ReduceOp.MAX)``; all ranks must take part.
        """
        if not self._rows:
            return
        everything = torch.cat(self.staged)
        if reduce is not None:
            reduce(everything)
        size = len(self._rows) * len(OPERANDS)
        staged, staged_channels = everything[:size].view(-1, len(OPERANDS)), everything[size:]
        advanced = torch.cat([self._history[..., 1:], staged[..., None]], -1)
        self._history = torch.where(staged[..., None] > 0, advanced, self._history)
        self._choose()
        self._channels.copy_(torch.where(staged_channels > 0, staged_channels, self._channels))
        foreach_zero_(self.staged)

    def follow_(self, scale: float | Tensor) -> None:
        """Multiplies the amaxes of output gradients by the growth of the loss's ``scale`` (0-d) since the last call.

        The scale is 1 at first, and is part of the state.
        """
        before, self._gradient_scale = self._gradient_scale, scale.clone() if isinstance(scale, Tensor) else scale
        if isinstance(scale, Tensor) or isinstance(before, Tensor) or scale != before:
            growth = torch.as_tensor(scale, dtype=torch.float32) / before
            self.scale_gradients_(torch.where(growth.isfinite(), growth, 1.0))

    def scale_gradients_(self, factor: Tensor) -> None:
        """Multiplies the amaxes of output gradients by ``factor`` (0-d), as a loss will be from now on; for a loss with
        a known scale, see :meth:`follow_`."""
        if not self._rows:
            return
        factor = factor.to(self._history.device)
        for operand in _GRADIENTS:  # indexing by a list would copy it to the device, and wait for that
            self._history[:, operand].mul_(factor)
            foreach_mul_([amaxes[operand] for amaxes in self.staged[: len(self._rows)]], factor)
        self._choose()

    # --- state ---

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Returns float32 tensors on the CPU, the same on all ranks.

        ``amax_history``: by layer and operand, such as ``"layers.0.up_proj/fprop_x"``, oldest first, 0 where there is
            none yet.
        ``channel_amax``: by layer, of the channels of its input in the last step.
        ``gradient_scale``: the last scale of the loss, ``[1]``, under ``"loss"``.
        """
        views = self._views(self._history.cpu(), self._channels.cpu())
        state = {kind: {name: view.clone() for name, view in named.items()} for kind, named in views.items()}
        return state | {"gradient_scale": {"loss": torch.tensor([float(self._gradient_scale)], dtype=torch.float32)}}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Loads the result of :meth:`state_dict`; a ValueError, which changes nothing, if layers, operands or lengths
        differ, except of ``renewed`` layers."""
        present = self.state_dict()
        state = {kind: self._fitted(tensors, state.get(kind, _UNSCALED)) for kind, tensors in present.items()}
        for kind, tensors in present.items():
            _compare(kind, tensors, state[kind])
        history, channels = torch.zeros(self._history.shape), torch.zeros(self._channels.shape)
        for kind, views in self._views(history, channels).items():
            for name, view in views.items():
                view.copy_(state[kind][name])
        self._history.copy_(history)
        self._channels.copy_(channels)
        self._gradient_scale = float(state["gradient_scale"]["loss"])
        for amaxes in self.staged:
            amaxes.zero_()
        self._choose()

    def _views(self, history: Tensor, channels: Tensor) -> dict[str, dict[str, Tensor]]:
        """Cuts tensors like ``_history`` and ``_channels`` into those of layers, named as in the state."""
        histories = {
            f"{row.name}/{operand}": history[i, j, -length:]
            for i, row in enumerate(self._rows)
            for j, (operand, length) in enumerate(zip(OPERANDS, row.lengths, strict=True))
            if length
        }
        smoothed = {row.name: channels[row.channels] for row in self._rows if row.channels.start < row.channels.stop}
        return {"amax_history": histories, "channel_amax": smoothed}

    def _fitted(self, present: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns saved tensors, with empty ones for renewed layers whose own do not fit."""
        fitted = dict(saved)
        for name in {*present, *saved}:
            fits = name in present and name in saved and present[name].shape == saved[name].shape
            if not fits and name.partition("/")[0] in self.renewed:
                fitted.pop(name, None)
                if name in present:
                    fitted[name] = torch.zeros_like(present[name])
        return fitted


def _in_features(layer: QuantizedLayer) -> int:
    """Returns the input features of the global weight, even if FSDP1 has flattened it."""
    return int(getattr(layer, "in_features", 0) or getattr(layer, "nx", 0) or layer.weight_matrix().shape[-1])


_ADVICE = "Give the settings with which it was saved, or start with empty histories: fresh_histories=True."


def _compare(kind: str, present: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    missing, unexpected = sorted(present.keys() - saved.keys()), sorted(saved.keys() - present.keys())
    if missing or unexpected:
        parts = [("missing there", missing), ("not in this model", unexpected)]
        message = "; ".join(f"{label}: {some(names, 6)}" for label, names in parts if names)
        raise ValueError(f"The checkpoint's {kind} is that of other layers: {message}. {_ADVICE}")
    for name, tensor in present.items():
        if saved[name].shape != tensor.shape:
            unit = "steps" if kind == "amax_history" else "channels"
            raise ValueError(
                f"The checkpoint's {kind} of {name} has {len(saved[name])} {unit}, and this run's {len(tensor)}. "
                f"{_ADVICE}"
            )
