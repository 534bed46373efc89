"""Buffers that passes write to: statistics of operands, and amaxes for delayed scaling.

Statistics of operands and gradients:

    operand_sums    [6, 8] of a layer, with statistics of blocks [6, 43]: for each quantized operand, see
                    :mod:`lightning_lowbit.quant.statistics`
    gradient_sums   [2] of a layer: Σ (dW - dW')² and Σ dW'², dW' in high precision; doubles the GEMM of dW

Their rows add up over passes and micro-batches, and one collective adds them over ranks. Without a row nothing is
measured. For tests that look inside, :func:`observed` hands over each operand.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lightning_lowbit._torch import foreach_zero_
from lightning_lowbit._torch.devices import wide_dtype, with_index
from lightning_lowbit.kernels import delayed_amax
from lightning_lowbit.nn.casts.traits import OPERANDS
from lightning_lowbit.quant.statistics import MAXIMA, OF_BLOCKS, SUMS


class Watch:
    """Rows for the statistics of converted layers, given by name. ``what`` is ``"operand_sums"`` or
    ``"gradient_sums"``; ``of_blocks`` adds statistics of blocks to the former.

    Attributes:
        rows: float64 (float32 on Apple's GPUs) ``[6, 8]`` or ``[2]`` of each layer: of passes since the start.

    Examples:
        >>> watch = Watch({"up": model.up}, "operand_sums")
        >>> watch.start(torch.device("cpu"))
        >>> model(x).sum().backward()
        >>> watch.stop()
        >>> watch.sums
    """

    def __init__(
        self, layers: Mapping[str, Any], what: Literal["operand_sums", "gradient_sums"], of_blocks: bool = False
    ) -> None:
        self.layers, self._what = dict(layers), what
        size = len(SUMS) + len(MAXIMA) + of_blocks * OF_BLOCKS
        self._shape = (len(OPERANDS), size) if what == "operand_sums" else (2,)
        self._place(torch.device("cpu"))

    def start(self, device: torch.device) -> None:
        """Empties the rows, and gives them to the layers."""
        if self._device != (device := with_index(device)):
            self._place(device)
        if self.rows:
            foreach_zero_(self.rows)
        self.resume()

    def _place(self, device: torch.device) -> None:
        # No views of one tensor, which would share its version counter: in a model compiled in pieces the next piece
        # would invalidate a backward pass.
        self.rows = [torch.zeros(self._shape, dtype=wide_dtype(device), device=device) for _ in self.layers]
        self._device = device

    @property
    def sums(self) -> Tensor:
        """A copy of the rows: ``[layers, 6, 8]`` or ``[layers, 2]``."""
        return torch.stack(self.rows) if self.rows else torch.zeros(0, *self._shape, dtype=torch.float64)

    def resume(self) -> None:
        """Gives the rows to the layers without emptying them."""
        for layer, row in zip(self.layers.values(), self.rows, strict=True):
            setattr(layer.lowbit, self._what, row)

    def stop(self) -> None:
        for layer in self.layers.values():
            setattr(layer.lowbit, self._what, None)


class Watched(NamedTuple):
    """The rows of a layer that a pass adds to, see :class:`Watch`; each is None if there is none."""

    operand_sums: Tensor | None
    gradient_sums: Tensor | None

    def observe(
        self, how: Any, source: Any, operand: Any, key: Tensor | None = None, amax: Tensor | None = None
    ) -> Any:
        """Returns the operand, or another one by which an observer replaces it."""
        for observer in _OBSERVERS:
            operand = observer(how, source, operand, key, amax, self.operand_sums)
        return operand


_OBSERVERS: list[Callable[..., Any]] = []


@contextmanager
def observed(observer: Callable[..., Any]) -> Iterator[None]:
    """Calls ``observer(how, source, operand, key, amax, operand_sums)`` for each operand of passes that begin here, and
    takes the operand that it returns. ``key`` and ``amax`` are None where the source is taken as it is."""
    _OBSERVERS.append(observer)
    try:
        yield
    finally:
        _OBSERVERS.remove(observer)


def is_observed() -> bool:
    """Returns whether :func:`observed` takes operands now, one after the other."""
    return bool(_OBSERVERS)


def watched(operand_sums: Tensor | None, gradient_sums: Tensor | None) -> Watched | None:
    """Returns the rows of a pass that begins now; None if there are none, and nobody observes it."""
    if operand_sums is None and gradient_sums is None and not _OBSERVERS:
        return None
    return Watched(operand_sums, gradient_sums)


def add_gradients_(sums: Tensor, quantized: Tensor, exact: Tensor) -> None:
    exact = exact.float()
    norms = torch.stack([torch.linalg.vector_norm(quantized.float() - exact), torch.linalg.vector_norm(exact)])
    sums.add_(norms.to(sums.dtype).square())


class LayerAmaxes(NamedTuple):
    """A layer's views of the state of :class:`lightning_lowbit.nn.AmaxHistories`: float32, 0 where there is no amax.
    The staged ones are of the current step."""

    in_force: Tensor  # [6], for delayed scaling
    staged: Tensor  # [6]
    channels: Tensor  # [in_features], for smoothed channels; else empty
    staged_channels: Tensor
    switch: list[bool] | None  # one bool for all layers: whether passes stage; None where no histories renew amaxes

    def __deepcopy__(self, memo: Any) -> "LayerAmaxes":
        """Copies without the switch: in training zeros, so that a copy scales by its own amaxes; later the same
        ones."""
        one = torch.clone if self.switch is None else torch.zeros_like
        return LayerAmaxes(one(self.in_force), one(self.staged), one(self.channels), one(self.staged_channels), None)


def stage_(staged: Tensor, amax: Tensor) -> None:
    """Raises the amax of the current step, in place; an amax that is not finite is dropped."""
    staged.copy_(torch.maximum(staged, amax.nan_to_num(nan=0.0, posinf=0.0)))


def stage_and_choose(in_force: Tensor, staged: Tensor | None, places: list[int], amax: Tensor) -> Tensor:
    """Returns the amax that scales an operand with delayed scaling. Stages the operand's ``amax`` at ``places[0]``, and
    at the places of operands that reuse it."""
    if (choice := delayed_amax(amax, in_force, staged, places)) is not None:
        return choice
    if staged is not None:
        for place in places:
            stage_(staged[place], amax)
    return amax_in_force(in_force, OPERANDS[places[0]], amax)


def amax_in_force(in_force: Tensor, operand: str, amax: Tensor) -> Tensor:
    """Returns an operand's amax in force, or its ``amax`` while there is none."""
    remembered = in_force[OPERANDS.index(operand)]
    return torch.where(remembered > 0, remembered, amax)
