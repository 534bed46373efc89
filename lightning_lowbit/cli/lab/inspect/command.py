"""The command ``lowbit inspect`` shows the errors that casts would make in the weights of a checkpoint.

Matrices are quantized as converted layers quantize weights in the forward pass: rounded to bfloat16, rotated if the
preset has a Hadamard transform in fprop, in blocks along in_features.
"""

import json
import operator
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from functools import reduce
from pathlib import Path

import torch
import yaml
from torch import Tensor

from lightning_lowbit._lightning import Tqdm
from lightning_lowbit.checks import from_fields, some
from lightning_lowbit.cli.lab.inspect.options import KINDS
from lightning_lowbit.cli.lab.inspect.table import Candidate, Inspection
from lightning_lowbit.cli.options import check_whole
from lightning_lowbit.export.reading.files import opened
from lightning_lowbit.metrics import CastStatistics, cast_statistics
from lightning_lowbit.nn.casts.linear_casts import PRESETS, LinearCasts
from lightning_lowbit.nn.conversion.convert import select
from lightning_lowbit.nn.layers.layer import clean_name
from lightning_lowbit.precision.checkpoints.files import load_checkpoint
from lightning_lowbit.quant import Cast
from lightning_lowbit.quant.cast import current_names
from lightning_lowbit.quant.shard import amax_of
from lightning_lowbit.quant.transforms import rotate
from lightning_lowbit.report.pictures import write_picture

_WEIGHTS_ALONE = "Save the weights alone, torch.save(model.state_dict(), 'weights.pt'), and give that file."


def inspect(options: Namespace) -> None:
    path = options.checkpoint
    candidates = parse_casts(",".join(options.casts))
    weights = matrices(path)
    if stacks := [name for name, value in _named(path) if value.dim() > 2 and value.is_floating_point()]:
        print(f"Left out, because they are no matrices: {some(stacks)} (convolutions, stacks of experts).")
    transposed = select(list(weights), options.transposed, "--transposed", "weight")
    chosen = select(list(weights), options.only, "--only", "weight") if options.only else set(weights)
    names = [name for name in weights if name in chosen]
    _check_numbers({name: weights[name] for name in names})
    _check_layout(path, {name: weights[name] for name in names if name not in transposed})
    errors = {}
    for name in Tqdm(names, leave=False, disable=None):  # a bar, only on a terminal
        weight = weights[name].t() if name in transposed else weights[name]
        errors[name] = [measure(weight, candidate) for candidate in candidates]
    inspection = Inspection(candidates, {name: tuple(weights[name].shape) for name in names}, errors)
    print(inspection.table())
    write_picture(options.output, *inspection.picture(f"Weights of {path.resolve().name}, quantized"))
    print(f"Picture: {options.output}")


def parse_casts(text: str) -> list[Candidate]:
    """Reads the candidates in ``--casts``: presets, or mappings of fields of a cast, separated by commas."""
    try:
        items = yaml.safe_load(f"[{text}]")
    except yaml.YAMLError:
        items = None
    if not items:
        example = "'nvfp4, {element: int4}'"
        raise ValueError(f"--casts takes presets and fields of casts, such as {example}; got {text!r}.")
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


def _named(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a checkpoint; weights of layers have the names that ``skip`` takes."""
    for file in _files(path):
        for name, value in _read(file).items():
            yield _layer_of(name, "weight"), value


def _layer_of(name: str, kind: str) -> str:
    """Returns the layer of a parameter: ``up`` of ``up.weight``, and ``in_proj`` of attention's ``in_proj_weight``."""
    return re.sub(rf"\.{kind}$|(?<=\bin_proj)_{kind}$|(?<=\b[qkv]_proj)_{kind}$", "", clean_name(name))


def matrices(path: Path) -> dict[str, Tensor]:
    """Returns the floating point matrices of a checkpoint by name."""
    weights = {
        name: value for name, value in _named(path) if value.dim() == 2 and value.is_floating_point() and value.numel()
    }
    if not weights:
        raise ValueError(f"{path} holds no matrix of floating point numbers, so there is no weight to quantize.")
    if _files(path)[0].suffix != ".safetensors":
        return weights

    def numbers_last(name: str) -> list[tuple[int, str]]:
        return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]

    # They are sorted by letters: layers.10 before layers.2.
    return {name: weights[name] for name in sorted(weights, key=numbers_last)}


def _check_numbers(weights: Mapping[str, Tensor]) -> None:
    for name, weight in weights.items():
        reason = None
        if weight.is_meta:
            reason = "has a shape and no numbers (it is on the meta device)"
        elif weight.layout != torch.strided:
            reason = f"is sparse ({str(weight.layout).removeprefix('torch.')}); save weight.to_dense()"
        elif weight.dtype == torch.float4_e2m1fn_x2:
            reason = "holds codes of FP4, two in a byte, which are quantized already"
        if reason is not None:
            raise ValueError(
                f"{name or repr(name)} {reason}. Name the other weights with --only, or give another checkpoint."
            )


def _check_layout(path: Path, weights: Mapping[str, Tensor]) -> None:
    for file in _files(path):
        for key, bias in _read(file).items():
            name = _layer_of(key, "bias")
            if not key.endswith("bias") or name not in weights or bias.dim() != 1:
                continue
            shape = tuple(weights[name].shape)
            if shape[0] != len(bias) == shape[1]:
                raise ValueError(
                    f"{name} has {len(bias)} biases and the shape {shape}: it is stored as [in_features, "
                    "out_features], like transformers' Conv1D. Name all such weights, in GPT-2 --transposed "
                    "'c_attn|c_proj|c_fc'."
                )


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
    raise ValueError(f"The folder {path} holds neither model.safetensors nor pytorch_model.bin. Give {KINDS}.")


def _read(file: Path) -> dict[str, Tensor]:
    """Reads the tensors of a file by name, memory-mapped: the disk is read when they are used."""
    if file.exists() and not file.is_file():  # a pipe or a device may have no end
        raise ValueError(f"{file} is not a file. Give {KINDS}.")
    if file.suffix == ".safetensors":
        with opened(file) as content:
            return {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118  it is no mapping
    loaded = load_checkpoint(file, advice=_WEIGHTS_ALONE)
    state = loaded.get("state_dict", loaded)
    items = state.items() if isinstance(state, Mapping) else ()
    return {name: value for name, value in items if isinstance(name, str) and isinstance(value, Tensor)}
