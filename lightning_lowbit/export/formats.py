"""The formats of ``lowbit export``: which casts each holds, and which engines load it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from lightning_lowbit.export.source import Source
from lightning_lowbit.export.weights import Weight
from lightning_lowbit.nn.linear import QuantizedLayer


@dataclass(frozen=True)
class Options:
    """What a user asks for.

    Attributes:
        rescale: quantizes weights again where an engine needs other scales.
        input_amaxes: by layer, the amax of its input over calibration data; None without calibration.
        dtype: of the tensors that are not quantized.
    """

    rescale: bool = False
    input_amaxes: Mapping[str, float] | None = None
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class Written:
    """What was written of a layer: ``bytes`` on disk, and how far its weight is from that of the training."""

    name: str
    cast: str
    format: str
    bytes: int
    error: float


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
    """

    name: str
    about: str
    obstacle: Callable[[str, QuantizedLayer], str | None]
    write: Callable[[Source, Path, Options], list[Written]]
    load: Callable[[Path], nn.Module] | None = None
    needs_network: bool = True


def row(weight: Weight, format: str, size: int) -> Written:
    return Written(weight.name, str(weight.cast), format, size, weight.error)
