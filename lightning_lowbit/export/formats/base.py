"""Formats of files: which casts one holds, how it is written, and how its client reads it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_lowbit.export.folder import SafetensorsWriter, write_network
from lightning_lowbit.export.trained_model import TrainedModel
from lightning_lowbit.export.weights import Weight, check, weights
from lightning_lowbit.nn.casts.traits import INDEX
from lightning_lowbit.nn.layers.layer import QuantizedLayer
from lightning_lowbit.patterns import clean_name
from lightning_lowbit.quant import Cast


@dataclass(frozen=True)
class Options:
    """Settings of an export."""

    rescale: bool = False  # where an engine needs other scales, rounds them, or quantizes the weights of a group again
    input_amaxes: Mapping[str, float] | None = None  # by layer, over calibration data; None without calibration
    dtype: torch.dtype = torch.bfloat16  # of the tensors that are not quantized
    shape: Sequence[int] | None = None  # of an input of the model, for formats that trace it; None for tokens


class NoClient(Exception):
    """Raised where the client of a format cannot read a folder; the message tells why."""


class Inputs(NamedTuple):
    """An engine's quantization of a layer's input: a cast, with the amax of its static scale, if it has one."""

    cast: Cast
    amax: float | None = None


@dataclass(frozen=True)
class Written:
    """A layer in an exported file."""

    name: str
    cast: str  # of its weight
    format: str  # of the file
    bytes: int  # on disk
    error: float  # the largest difference of its weight from that of the training
    inputs: Inputs | None = None  # engines' quantization of its input; None for high precision


@dataclass(frozen=True)
class Chat:
    """A question to the training and to an exported model; of each pair, the training's comes first."""

    question: str
    ids: tuple[Sequence[int], Sequence[int]]  # of the prompt
    prompts: tuple[str, str]
    answers: tuple[str, str]  # the greedy ones

    @property
    def is_same_prompt(self) -> bool:
        return [*self.ids[0]] == [*self.ids[1]]

    def __str__(self) -> str:
        ours, theirs = self.answers
        comparison = "as in training" if ours == theirs else f"in training {ours!r}"
        if not self.is_same_prompt:
            comparison += f"; the prompt is {self.prompts[1]!r}, in training {self.prompts[0]!r}"
        return f"{self.question} {theirs!r}, {comparison}"


def shown_weight(loaded: Any, weight: Weight) -> Tensor | None:
    """Returns the weight of a loaded layer ``[out_features, in_features]``; None if it is not kept as numbers."""
    matrix = getattr(loaded, "weight", None)
    if not isinstance(matrix, Tensor) or not matrix.is_floating_point():
        return None
    if matrix.dim() == 2 and not isinstance(weight.layer, nn.Linear):
        matrix = matrix.t()  # of Conv1D
    return matrix if matrix.shape == weight.quantized.codes.shape else None


@dataclass(frozen=True)
class Format:
    """A format of files.

    ``obstacle`` returns why it cannot hold a layer (its name, the layer), in words, or None; ``writes`` is called by
    :meth:`write`, such as :func:`by_layer`. ``load`` reads a folder back by the real client, ready to be called as the
    model is; it raises an ``ImportError`` that names a missing package, or a :class:`NoClient`.
    """

    name: str  # as ``--format`` takes it
    obstacle: Callable[[str, QuantizedLayer], str | None]
    writes: Callable[["Format", TrainedModel, Path, Options], list[Written]]
    load: Callable[[Path], nn.Module] | None = None  # None without a client in Python
    needs_network: bool = True  # refuses models that are not of ``transformers``
    accepts: Callable[[TrainedModel], object] | None = None  # raises a ``ValueError``, whatever the casts
    traces: bool = False  # files are a trace of the model, with an input of a shape: any module can be compared
    fused: bool = False  # engines take one scale of the tensor for q, k and v, and for gate and up
    rounds_scales: bool = False  # engines keep scales of rows and blocks in the dtype of the model
    dtypes: Sequence[torch.dtype] = (torch.bfloat16, torch.float16, torch.float32)  # of the rest, default first
    computes_in: torch.dtype | None = None  # the only dtype in which transformers computes; None for the folder's
    shown: Callable[[Any, Weight], Tensor | None] = shown_weight  # of a loaded layer, as numbers; None if it shows none
    own_cast: Cast | None = None  # of sums of weights and adapters, where the format cannot hold the cast of the base
    programs: tuple[str, ...] = ()  # for its folders, keys of ``PROGRAMS`` in ``card.py``
    chat: Callable[[TrainedModel, Any], Chat | None] | None = None  # of formats with prompts of their own

    def weights(self, original: TrainedModel, options: Options) -> Iterator[Weight]:
        """The weights of all layers as the format stores them; see :func:`lightning_lowbit.export.weights.weights`."""
        scale_dtype = options.dtype if self.rounds_scales else None
        return weights(original, self.fused, options.rescale, scale_dtype)

    def fits(self, original: TrainedModel) -> bool:
        """Returns whether it can hold all quantized layers of a model."""
        if self.needs_network and original.config is None:
            return False
        try:
            if self.accepts is not None:
                self.accepts(original)
            self.check(original)
        except ValueError:
            return False
        return True

    def check(self, original: TrainedModel) -> None:
        """Raises a ``ValueError`` that names the layers that the format cannot hold."""
        check(original, {name: self.obstacle(name, layer) for name, layer in original.layers.items()}, self.name)

    def write(self, original: TrainedModel, folder: Path, options: Options) -> list[Written]:
        """Writes a model to a folder that exists; returns a row for each quantized layer. A ``ValueError`` if the
        format cannot hold the model or a layer, or a package is missing."""
        return self.writes(self, original, folder, options)


class Encoded(NamedTuple):
    """A layer's weight in a file: tensors by the last part of their names; ``scheme``, what the configuration tells of
    the layer; other fields are as in :class:`Written`."""

    tensors: Mapping[str, Tensor]
    format: str
    inputs: Inputs | None = None
    scheme: Any = None
    error: float = 0.0


def by_layer(
    encode: Callable[[Weight, Options], Encoded],
    configure: Callable[[TrainedModel, Path, Mapping[str, Encoded]], Mapping[str, Any]],
) -> Callable[[Format, TrainedModel, Path, Options], list[Written]]:
    """Returns a function that writes a folder of ``transformers``: each layer as ``encode`` makes it, and the
    ``quantization_config`` that ``configure`` makes of the model, the folder and the layers, here without tensors."""

    def write(format: Format, original: TrainedModel, folder: Path, options: Options) -> list[Written]:
        format.check(original)
        writer, rows, layers = SafetensorsWriter(folder), list[Written](), dict[str, Encoded]()
        for weight in format.weights(original, options):
            encoded = encode(weight, options)
            size = writer.add({f"{weight.name}.{part}": tensor for part, tensor in encoded.tensors.items()})
            rows.append(row(weight, encoded.format, size, encoded.inputs, encoded.error))
            layers[weight.name] = encoded._replace(tensors={})
        writer.finish(original, {f"{layer}.weight" for layer in original.layers}, options.dtype)
        write_network(original, folder, options.dtype, configure(original, folder, layers))
        return rows

    return write


def row(weight: Weight, format: str, size: int, inputs: Inputs | None = None, error: float = 0.0) -> Written:
    """Returns the row of a weight, to whose error the file adds ``error``."""
    return Written(weight.name, str(weight.cast), format, size, weight.error + error, inputs)


def static_amax(name: str, layer: QuantizedLayer, options: Options) -> float | None:
    """Returns the amax of a layer's input: over calibration data, or else of delayed scaling; None without either."""
    if options.input_amaxes is not None and name in options.input_amaxes:
        return options.input_amaxes[name]
    inputs, amaxes = layer.casts.fprop_x, layer.lowbit.amaxes
    if inputs is None or inputs.scale.source == "current" or amaxes is None:
        return None
    return float(amaxes.in_force[INDEX["fprop_x"]]) or None


def unquantized_linears(original: TrainedModel) -> list[str]:
    linears = [clean_name(name) for name, module in original.model.named_modules() if isinstance(module, nn.Linear)]
    return [name for name in linears if name not in original.layers]


def example_input(original: TrainedModel, options: Options) -> Tensor | None:
    """Returns an input of a model that is no language model: its ``example_input_array``, or zeros of a shape that was
    asked for, in the dtype of that. Real numbers are float32."""
    example = getattr(original.model, "example_input_array", None)
    example = example if isinstance(example, Tensor) else None
    if options.shape is not None:
        example = torch.zeros(tuple(options.shape), dtype=None if example is None else example.dtype)
    return example.float() if example is not None and example.is_floating_point() else example
