"""What a format of files is: which casts it holds, how it is written, and how its client reads it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from lightning_lowbit.export.source import Source
from lightning_lowbit.export.weights import Weight, weights
from lightning_lowbit.nn.linear import QuantizedLayer


@dataclass(frozen=True)
class Options:
    """What a user asks for.

    Attributes:
        rescale: quantizes weights again where an engine needs other scales.
        input_amaxes: by layer, the amax of its input over calibration data; None without calibration.
        dtype: of the tensors that are not quantized.
        shape: of an input of the model, for formats that trace it; None for tokens.
    """

    rescale: bool = False
    input_amaxes: Mapping[str, float] | None = None
    dtype: torch.dtype = torch.bfloat16
    shape: Sequence[int] | None = None


@dataclass(frozen=True)
class Written:
    """What was written of a layer.

    Attributes:
        name: of the layer.
        cast: of its weight.
        format: of the file.
        bytes: on disk.
        error: the largest difference of its weight from that of the training.
        inputs: whether engines quantize its input, too.
    """

    name: str
    cast: str
    format: str
    bytes: int
    error: float
    inputs: bool = False


@dataclass(frozen=True)
class Format:
    """A format of files.

    Attributes:
        name: as ``--format`` takes it.
        about: a line for people: what it holds, and who loads it.
        obstacle: why it cannot hold a layer (its name, the layer), in words; None if it can.
        write: writes the model's files to a folder that exists; returns a row for each quantized layer.
        load: reads a folder back by the real client, ready to be called as the model is; None if there is no client
            in Python. An ``ImportError`` names a package that is missing.
        needs_network: whether the model must be one of ``transformers``.
        tolerance: how far logits may be from those of the training's forward pass with the same operands in few bits,
            as a norm relative to theirs: rounding of what is in bfloat16 there.
        fused: whether engines take one scale of the tensor for q, k and v, and for gate and up.
        rounds_scales: whether engines keep scales of rows and blocks in the dtype of the model.
    """

    name: str
    about: str
    obstacle: Callable[[str, QuantizedLayer], str | None]
    write: Callable[[Source, Path, Options], list[Written]]
    load: Callable[[Path], nn.Module] | None = None
    needs_network: bool = True
    tolerance: float = 0.05
    fused: bool = False
    rounds_scales: bool = False

    def weights(self, source: Source, options: Options) -> Iterator[Weight]:
        """The weights of all layers as the format stores them; see :func:`lightning_lowbit.export.weights.weights`."""
        scale_dtype = options.dtype if self.rounds_scales else None
        return weights(source, self.fused, options.rescale, scale_dtype)


def row(weight: Weight, format: str, size: int, inputs: bool = False) -> Written:
    return Written(weight.name, str(weight.cast), format, size, weight.error, inputs)
