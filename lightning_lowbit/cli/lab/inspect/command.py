"""The command ``lowbit inspect`` shows the errors that casts would make in the weights of a checkpoint.

Matrices are quantized as converted layers quantize weights in the forward pass: rounded to bfloat16, rotated if the
preset has a Hadamard transform in fprop, in blocks along in_features.
"""

import json
import math
import operator
import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_lowbit._lightning import Tqdm
from lightning_lowbit.checks import from_fields, some
from lightning_lowbit.cli.lab.inspect.options import KINDS
from lightning_lowbit.cli.options import check_whole
from lightning_lowbit.export.reading.files import opened
from lightning_lowbit.export.reading.layouts import layers_of
from lightning_lowbit.metrics import CastStatistics, cast_statistics, levels
from lightning_lowbit.nn.casts.linear_casts import PRESETS, LinearCasts
from lightning_lowbit.patterns import clean_name, select
from lightning_lowbit.precision.checkpoints.files import FLOATS, check_no_folder_of, load_checkpoint
from lightning_lowbit.quant import Cast, Hadamard
from lightning_lowbit.quant.cast import current_names
from lightning_lowbit.quant.shard import amax_of
from lightning_lowbit.quant.statistics import sqnr_db
from lightning_lowbit.quant.transforms import rotate
from lightning_lowbit.report.blocks import Chart, HeatMap, Table
from lightning_lowbit.report.formatting import by_kind
from lightning_lowbit.report.pictures import write_picture
from lightning_lowbit.report.tables import plain

_WEIGHTS_ALONE = "Save the weights alone, torch.save(model.state_dict(), 'weights.pt'), and give that file."

_MOST_ROWS = 100  # of a picture: more weights share the rows of their kinds


@dataclass(frozen=True)
class Candidate:
    """A cast, and the Hadamard transform of its preset in fprop."""

    label: str
    cast: Cast
    hadamard: Hadamard | None = None


def inspect(options: Namespace) -> None:
    path = options.checkpoint
    candidates = parse_casts(options.casts)
    tensors = read_tensors(path)
    weights = matrices(tensors, path)
    if coded := [_layer_of(key) for key in tensors if key.endswith("weight") and tensors[key].dtype == torch.uint8]:
        print(f"Left out, because they are codes: {some(coded)} (quantized already, as by pack_frozen).")
    if stacks := [_layer_of(key) for key, value in tensors.items() if value.dim() > 2 and value.is_floating_point()]:
        print(f"Left out, because they are no matrices: {some(stacks)} (convolutions, stacks of experts).")
    transposed = select(list(weights), options.transposed, "--transposed", "weight")
    chosen = select(list(weights), options.only, "--only", "weight") if options.only else set(weights)
    names = [name for name in weights if name in chosen]
    exported = [name for name in layers_of(tensors) if _dtype(tensors.get(f"{name}.weight")) not in FLOATS]
    _check_numbers({name: weights[name] for name in names}, exported)
    _check_layout(tensors, {name: weights[name] for name in names if name not in transposed})
    errors = {}
    for name in Tqdm(names, leave=False, disable=None):  # a bar, only on a terminal
        weight = weights[name].t() if name in transposed else weights[name]
        errors[name] = [measure(weight, candidate) for candidate in candidates]
    inspection = Inspection(candidates, {name: tuple(weights[name].shape) for name in names}, errors)
    print(inspection.table())
    write_picture(options.output, *inspection.picture(f"Weights of {path.resolve().name}, quantized"))
    print(f"Picture: {options.output}")


def parse_casts(items: Sequence[Any]) -> list[Candidate]:
    """Makes the candidates of ``--casts``: of presets, or of mappings of fields of a cast."""
    candidates = {}
    for item in items:
        if isinstance(item, Mapping) and "preset" not in item:
            cast = from_fields(Cast, "Cast", current_names(item, warn=True))
            candidates[str(cast)] = Candidate(str(cast), cast)
            continue
        casts = LinearCasts.of(item)
        if casts.fprop_w is None:
            others = ", ".join(name for name, preset in PRESETS.items() if preset().fprop_w is not None)
            raise ValueError(f"--casts: {item} leaves weights in high precision (no fprop_w). Choose from: {others}.")
        label = item if isinstance(item, str) else str(casts.fprop_w)
        candidates[label] = Candidate(label, casts.fprop_w, casts.hadamard.get("fprop"))
    return list(candidates.values())


def measure(weight: Tensor, candidate: Candidate, elements: int = 2**18) -> CastStatistics:
    """Measures the error of one weight ``[out_features, in_features]``, summed over slices of rows.

    ``elements`` of about one slice are quantized at a time; by default intermediate results fit into the cache.
    """
    cast, block = candidate.cast, candidate.cast.scale.block
    height = block[0] if isinstance(block, tuple) else 1
    rows = max(elements // weight.shape[1] // height, 1) * height
    if block == "tensor" and not cast.scale.needs_amax:  # a mean or a range of the whole weight
        rows = len(weight)
    slices = [operand(part, candidate) for part in torch.split(weight, rows)]
    amax = torch.stack([amax_of(part) for part in slices]).amax() if cast.scale.needs_amax else None
    errors = (cast_statistics(part, cast, key=number, amax=amax) for number, part in enumerate(slices))
    return reduce(operator.add, errors)


def operand(weight: Tensor, candidate: Candidate) -> Tensor:
    """Returns rows of a weight as a layer quantizes them: bfloat16 ``[rows, in_features]``, padded if rotated."""
    weight = weight.bfloat16()
    if candidate.hadamard is None:
        return weight
    any_key = torch.zeros(1, dtype=torch.int64)  # for random signs
    return rotate(weight, candidate.hadamard.diagonal(any_key, weight.device), 1)


def matrices(tensors: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Returns the floating point matrices among tensors by key, by the names of layers that ``skip`` takes."""
    weights = {
        _layer_of(key): value
        for key, value in tensors.items()
        if value.dim() == 2 and value.is_floating_point() and value.numel()
    }
    if not weights:
        raise ValueError(f"{path} holds no matrix of floating point numbers, so there is no weight to quantize.")
    return weights


def _layer_of(key: str, kind: str = "weight") -> str:
    """Returns the layer of a parameter: ``up`` of ``up.weight``, and ``in_proj`` of attention's ``in_proj_weight``."""
    return re.sub(rf"\.{kind}$|(?<=\bin_proj)_{kind}$|(?<=\b[qkv]_proj)_{kind}$", "", clean_name(key))


def _dtype(tensor: Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


def _check_numbers(weights: Mapping[str, Tensor], exported: Sequence[str]) -> None:
    for name, weight in weights.items():
        reason = None
        if weight.is_meta:
            reason = "has a shape and no numbers (it is on the meta device)"
        elif weight.layout != torch.strided:
            reason = f"is sparse ({str(weight.layout).removeprefix('torch.')}); save weight.to_dense()"
        elif weight.dtype == torch.float4_e2m1fn_x2:
            reason = "holds codes of FP4, two in a byte, which are quantized already"
        elif name in exported or name.rpartition(".")[0] in exported:
            reason = "is of a layer that is quantized already, whose codes and scales are in several tensors"
        if reason is not None:
            raise ValueError(
                f"{name or repr(name)} {reason}. Name the other weights with --only, or give another checkpoint."
            )


def _check_layout(tensors: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    for key, bias in tensors.items():
        name = _layer_of(key, "bias")
        if not key.endswith("bias") or name not in weights or bias.dim() != 1:
            continue
        shape = tuple(weights[name].shape)
        if shape[0] != len(bias) == shape[1]:
            raise ValueError(
                f"{name} has {len(bias)} biases and the shape {shape}: it is stored as [in_features, out_features], "
                "like transformers' Conv1D. Name all such weights, in GPT-2 --transposed 'c_attn|c_proj|c_fc'."
            )


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Reads the tensors of a checkpoint by key, memory-mapped: the disk is read when they are used."""
    files = _files(path)
    tensors = {key: tensor for file in files for key, tensor in _read(file).items()}
    if not tensors or files[0].suffix != ".safetensors":
        return tensors

    def numbers_last(key: str) -> list[tuple[int, str]]:
        return [(int(part), "") if part.isdigit() else (-1, part) for part in _layer_of(key).split(".")]

    # They are sorted by letters: layers.10 before layers.2.
    return {key: tensors[key] for key in sorted(tensors, key=numbers_last)}


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    check_whole(path)
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (path / name).exists():
            return [path / name]
        if (index := path / f"{name}.index.json").exists():
            try:
                return [path / shard for shard in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                raise ValueError(f"{index} does not name the files of weights: save or download it again.") from None
    check_no_folder_of(path)
    raise ValueError(f"The folder {path} holds neither model.safetensors nor pytorch_model.bin. Give {KINDS}.")


def _read(file: Path) -> dict[str, Tensor]:
    if file.exists() and not file.is_file():  # a pipe or a device may have no end
        raise ValueError(f"{file} is not a file. Give {KINDS}.")
    if file.suffix == ".safetensors":
        with opened(file) as content:
            return {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118  it is no mapping
    loaded = load_checkpoint(file, advice=_WEIGHTS_ALONE)
    state = loaded.get("state_dict", loaded)
    items = state.items() if isinstance(state, Mapping) else ()
    return {name: value for name, value in items if isinstance(name, str) and isinstance(value, Tensor)}


class Inspection:
    """The errors of some casts in the weights of a checkpoint; raises a ``ValueError`` if no weight is finite.

    ``shapes`` and ``errors`` are by name of the weight: its stored shape, and one error for each candidate. ``totals``
    has for each candidate means of the finite weights' relative errors, weighted by their sizes: the error of all
    elements together would depend mostly on the largest weights. ``codes`` are their histograms.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        shapes: Mapping[str, tuple[int, ...]],
        errors: Mapping[str, Sequence[CastStatistics]],
    ) -> None:
        self.candidates, self.shapes = candidates, shapes
        self.numbers = {name: [error.floats() for error in row] for name, row in errors.items()}
        self.finite = [name for name, row in self.numbers.items() if not row[0]["not_finite"]]
        if not self.finite:
            raise ValueError("Every weight holds a NaN or an infinity. Take another checkpoint.")
        self.elements = sum(math.prod(shapes[name]) for name in self.finite)
        self.totals = [self._total(i) for i in range(len(candidates))]
        codes = [[errors[name][i].codes for name in self.finite] for i in range(len(candidates))]
        self.codes = [torch.stack(histograms).sum(0) for histograms in codes]

    def _total(self, candidate: int) -> dict[str, float]:
        rows = [(math.prod(self.shapes[name]), self.numbers[name][candidate]) for name in self.finite]
        metrics = ("relative_mse", "underflow", "saturation", "bias")
        total = {metric: sum(size * row[metric] for size, row in rows) / self.elements for metric in metrics}
        return {**total, "sqnr": sqnr_db(1.0, total["relative_mse"])}

    def table(self) -> str:
        """Tabulates each weight and candidate, then, below a second header, each candidate over all weights."""
        header = ["weight", "shape", "cast", "bits", "SQNR dB", "relative MSE", "underflow %", "saturation %", "bias %"]
        shapes = {name: " x ".join(map(str, shape)) for name, shape in self.shapes.items()}

        def lines(name: str, shape: str, row: Sequence[Mapping[str, float]]) -> list[list[str]]:
            return [
                [name, shape, candidate.label, f"{candidate.cast.bits:.4g}", *_cells(numbers)]
                for candidate, numbers in zip(self.candidates, row, strict=True)
            ]

        weights = [line for name, row in self.numbers.items() for line in lines(name, shapes[name], row)]
        means = lines(f"mean of {len(self.finite)}", f"{self.elements:,} elements", self.totals)
        bad = [name for name in self.numbers if name not in self.finite]
        caption = f"With a NaN or an infinity, and left out of the last lines: {', '.join(bad)}" if bad else ""
        return plain(Table(header, [*weights, [""] * len(header), header, *means], caption))

    def picture(self, title: str) -> list[HeatMap | Chart]:
        """Returns the SQNR of each finite weight, or of each kind of many, and for each cast how often elements take
        each level."""
        rows = {name: [name] for name in self.finite} if len(self.finite) <= _MOST_ROWS else by_kind(self.finite)
        columns = range(len(self.candidates))
        sqnr = [[min(self.numbers[name][i]["sqnr"] for name in names) for i in columns] for names in rows.values()]
        low, high = _limits([value for row in sqnr for value in row])
        of_many = "; the lowest of weights whose names differ in numbers" if len(rows) < len(self.finite) else ""
        unit = f"SQNR of the weight, dB (higher is better; inf: exact{of_many})"
        labels = [candidate.label for candidate in self.candidates]
        heat = HeatMap([*rows], labels, sqnr, unit, low, high, caption=title)
        return [heat, *map(self._level_chart, columns)]

    def _level_chart(self, i: int) -> Chart:
        candidate, total = self.candidates[i], self.totals[i]
        shares = (100 * self.codes[i] / self.codes[i].sum()).tolist()
        errors = ", ".join(f"{metric} {total[metric]:.2%}" for metric in ("underflow", "saturation", "bias"))
        return Chart(
            f"{candidate.label}: {candidate.cast.bits:.4g} bits, mean {total['sqnr']:.1f} dB, {errors}",
            {candidate.label: (levels(candidate.cast.grid), shares)},
            "% of elements",
            "level of the element, in units of its scale",
            bands={candidate.label: ([0.0] * len(shares), shares)},
        )


def _cells(numbers: Mapping[str, float]) -> list[str]:
    widths = {"underflow": "11.2f", "saturation": "12.2f", "bias": "+6.2f"}
    percent = [f"{100 * numbers[name]:{width}}" for name, width in widths.items()]
    return [f"{numbers['sqnr']:7.2f}", f"{numbers['relative_mse']:12.2e}", *percent]


def _limits(values: Sequence[float]) -> tuple[float, float]:
    """Returns the ends of all finite values, at least 3 dB apart, so that small differences look small."""
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    room = max(3 - max(finite) + min(finite), 0.0) / 2
    return min(finite) - room, max(finite) + room
