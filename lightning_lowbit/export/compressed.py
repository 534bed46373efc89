"""Reads checkpoints that compressed-tensors wrote, as llm-compressor does, into layers with frozen weights.

    format                          files hold                                          cast
    nvfp4-pack-quantized            weight_packed, weight_scale, weight_global_scale    e2m1/e4m3:1x16+fp32
    mxfp4-pack-quantized            weight_packed, weight_scale (uint8)                 e2m1/e8m0:1x32
    mxfp6-pack-quantized            weight_packed, weight_scale (uint8)                 e2m3/e8m0:1x32
    mxfp8-quantized                 weight (E4M3), weight_scale (uint8)                 e4m3/e8m0:1x32
    float-quantized                 weight (E4M3), weight_scale                         e4m3 per tensor, row or tile
    pack-quantized, int-quantized   weight_packed or weight, weight_scale               int2 … int8 per group or row

Codes and scales are the file's, to the bit. Only weights are read: how a file's engine quantizes activations is up to
the casts.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from lightning_lowbit.checks import some
from lightning_lowbit.formats import ELEMENT_FORMATS
from lightning_lowbit.kernels import Packed
from lightning_lowbit.nn.casts import LinearCasts
from lightning_lowbit.nn.conversion.convert import CastsLike, convert_more
from lightning_lowbit.nn.conversion.frozen import keep_bytes
from lightning_lowbit.nn.layers.frozen import Frozen, joined
from lightning_lowbit.quant import Cast, Scale
from lightning_lowbit.quant.packed import assembled

_Model = TypeVar("_Model", bound=nn.Module)

_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_PARTS = (
    *("weight_packed", "weight", "weight_scale", "weight_global_scale", "weight_shape", "weight_zero_point"),
    *("weight_scale_2", "input_global_scale", "input_scale"),
)
METHODS = ("compressed-tensors", "modelopt", "bitnet")  # whose folders are read


@torch.no_grad()
def load_compressed(
    model: _Model, folder: str | Path, casts: CastsLike | None = None, dtype: torch.dtype = torch.bfloat16
) -> _Model:
    """Fills a model from a checkpoint of compressed-tensors; its quantized weights stay codes, and frozen.

    Args:
        model: a ``transformers`` model of the checkpoint's architecture, such as ``from_config`` makes.
        folder: holds ``config.json`` and ``*.safetensors``.
        casts: of the layers whose weights are quantized, with the file's cast as ``fprop_w`` (or the error says which
            it is); None quantizes weights alone: ``LinearCasts(fprop_w=the file's, dgrad_w="fprop")``.
        dtype: of the computation, and of :func:`lightning_lowbit.unpack_frozen`.

    Returns:
        The model. Other tensors of the file are loaded as they are, into parameters and buffers of their names.

    Raises:
        ValueError: no checkpoint of compressed-tensors, a format or scheme that is not listed above, a layer or
            parameter that only one side has, or casts with another ``fprop_w``.

    Examples:
        >>> model = load_compressed(model, "llama-fp8")
    """
    return fill(model, Path(folder), {}, None if casts is None else LinearCasts.of(casts), dtype)


@torch.no_grad()
def fill(
    model: _Model, folder: Path, casts: Mapping[str, LinearCasts], default: LinearCasts | None, dtype: torch.dtype
) -> _Model:
    """Fills a model as :func:`load_compressed`, with casts by layer, and those of all others."""
    method, schemes = _schemes(folder)
    tensors = dict(_tensors(folder))
    layers = sorted({name.rpartition(".")[0] for name in tensors if name.endswith(".weight_scale")})
    modules = dict(model.named_modules())
    if lacking := [name for name in layers if not isinstance(modules.get(name), nn.Linear)]:
        raise ValueError(
            f"{folder} has quantized weights of {len(lacking)} layers that {type(model).__name__} does not have as "
            f"nn.Linear, e.g. {some(lacking)}. Build the model from the checkpoint's own config.json."
        )
    taken: dict[str, tuple[LinearCasts, Frozen, Tensor]] = {}
    for name in layers:
        parts = {part: tensors.pop(f"{name}.{part}") for part in _PARTS if f"{name}.{part}" in tensors}
        codes = _codes(name, parts, method, schemes)
        if codes.values.shape != modules[name].weight.shape:
            raise ValueError(
                f"{name}.weight is {tuple(codes.values.shape)} in {folder}, and {tuple(modules[name].weight.shape)} in "
                "the model."
            )
        of_layer = _casts(name, codes.cast, casts.get(name, default), codes.values.shape[1])
        assert isinstance(of_layer.fprop_w, Cast)
        frozen = Frozen(of_layer.fprop_w, codes.values.shape, dtype)
        taken[name] = of_layer, frozen, joined(codes.packed(name, of_layer.fprop_w))
    _load_rest(model, tensors, {f"{name}.weight" for name in layers}, folder)
    convert_more(model, {name: of_layer for name, (of_layer, _, _) in taken.items()})
    for name, (_, frozen, data) in taken.items():
        layer: Any = model.get_submodule(name)
        keep_bytes(layer, frozen, data.to(layer.weight.device))
    return model


class Codes(NamedTuple):
    """A weight in a file: elements on the grid of their format, float32 ``[rows, columns]``, the scales of its blocks
    or rows, float32, and the scale of the matrix."""

    cast: Cast
    values: Tensor
    scales: Tensor
    factor: Tensor

    def packed(self, name: str, cast: Cast) -> Packed:
        """The codes of a layer as those of a cast that differs only in how scales are made."""
        block, scales = cast.scale.block, self.scales
        if isinstance(block, tuple) and len(scales) == len(self.values):  # repeated for each row of a tile
            scales = self.scales[:: block[0]]
            if not torch.equal(scales.repeat_interleave(block[0], 0)[: len(self.values)], self.scales):
                raise ValueError(
                    f"The file's scales of {name} differ within tiles of {block[0]} rows, which the casts have. Give "
                    f"casts with fprop_w={self.cast!r}, or None."
                )
        factor = self.scales.reshape(()) if block == "tensor" else self.factor
        return Packed(assembled(self.values, scales, cast), factor)


def _schemes(folder: Path) -> tuple[str, list[Mapping[str, Any]]]:
    """Who quantized a checkpoint, and the weights' arguments of each group of the configuration, with its format."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} is no checkpoint of compressed-tensors: it has no config.json.")
    config = json.loads(path.read_text()).get("quantization_config") or {}
    method = config.get("quant_method")
    if method not in METHODS:
        raise ValueError(
            f"{path} has quant_method {method!r}, not one of {', '.join(METHODS)}. Load a model in high precision with "
            "from_pretrained, and call lightning_lowbit.pack_frozen(model, casts)."
        )
    groups = config.get("config_groups", {}).values()
    return method, [
        {"format": each.get("format") or config["format"], **(each.get("weights") or {})} for each in groups
    ]


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open  # comes with transformers

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} has no *.safetensors.")
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  it is no mapping
                yield name, opened.get_tensor(name)


def _codes(name: str, parts: Mapping[str, Tensor], method: str, schemes: list[Mapping[str, Any]]) -> Codes:
    """The codes of one layer, by what its tensors are."""
    scale, packed, one = parts["weight_scale"], parts.get("weight_packed"), torch.ones(())
    nvfp4 = Cast("e2m1", Scale("e4m3", 16, two_level=True))
    if method == "bitnet":  # row r of packed holds rows r, r + N/4, … in pairs of bits; the scale divides
        values = torch.cat([(parts["weight"] >> shift & 3) for shift in (0, 2, 4, 6)]).float() - 1
        cast = Cast("ternary", Scale("fp32", "tensor", statistic="absmean"))
        return Codes(cast, values, 1 / scale.float(), one)
    if "weight_scale_2" in parts:  # modelopt's, which multiplies
        return Codes(nvfp4, _elements(parts["weight"], "e2m1"), scale.float(), parts["weight_scale_2"].reshape(()))
    if "weight_zero_point" in parts:
        raise ValueError(f"{name} has zero points, which codes of frozen weights do not. Load it in high precision.")
    if packed is not None and packed.dtype == torch.int32:
        return _integers(name, packed, parts, schemes)
    if packed is not None and "weight_global_scale" in parts:
        values, factor = _elements(packed, "e2m1"), 1 / parts["weight_global_scale"].float().reshape(())
        return Codes(nvfp4, values, scale.float(), factor)
    if packed is not None:
        element = "e2m1" if packed.shape[1] == scale.shape[1] * 16 else "e2m3"
        return Codes(Cast(element, Scale("e8m0", 32)), _elements(packed, element), _powers(scale), one)
    weight = parts["weight"]
    if weight.dtype == torch.int8:
        return _rows_or_groups("int8", weight.float(), scale)
    if weight.dtype != torch.float8_e4m3fn:
        raise ValueError(f"{name}.weight has {weight.dtype}, of which no format of compressed-tensors here has codes.")
    if scale.dtype == torch.uint8:
        return Codes(Cast("e4m3", Scale("e8m0", 32)), weight.float(), _powers(scale), one)
    for size in (tuple(s["block_structure"]) for s in schemes if s.get("block_structure")):
        if scale.shape == tuple(-(-n // k) for n, k in zip(weight.shape, size, strict=True)):  # the last may be cut
            return Codes(Cast("e4m3", Scale("fp32", size)), weight.float(), scale.float(), one)
    return _rows_or_groups("e4m3", weight.float(), scale)


def _elements(packed: Tensor, element: str) -> Tensor:
    """Elements of codes in a stream of bits."""
    format = ELEMENT_FORMATS[element]
    return format.decode(bits_of(packed, format.bits, packed.shape[1] * 8 // format.bits).to(torch.uint8))


def bits_of(packed: Tensor, bits: int, columns: int) -> Tensor:
    """Rows of a little-endian stream of bits: element i is at the bits from ``i * bits``. float32."""
    rows = len(packed)
    stream = (
        packed.contiguous().view(torch.uint8).view(rows, -1, 1) >> torch.arange(8, dtype=torch.uint8) & 1
    ).flatten(1)
    return stream[:, : columns * bits].view(rows, columns, bits).float() @ (2.0 ** torch.arange(bits))


def _integers(name: str, packed: Tensor, parts: Mapping[str, Tensor], schemes: list[Mapping[str, Any]]) -> Codes:
    columns = int(parts["weight_shape"][1])
    sizes = {int(s["num_bits"]) for s in schemes if s.get("type") == "int"}
    fitting = [bits for bits in sorted(sizes) if packed.shape[1] == -(-columns * bits // 32)]
    if len(fitting) != 1:
        named = some(map(str, sorted(sizes))) or "none"
        raise ValueError(
            f"{name} has {packed.shape[1]} int32 per row of {columns} elements. Integers of config.json have "
            f"{named} bits, which do not fit. Load it in high precision."
        )
    bits = fitting[0]
    return _rows_or_groups(f"int{bits}", bits_of(packed, bits, columns) - 2 ** (bits - 1), parts["weight_scale"])


def _rows_or_groups(element: str, values: Tensor, scale: Tensor) -> Codes:
    if scale.numel() == 1:
        return Codes(Cast(element, Scale("fp32", "tensor")), values, scale.float(), torch.ones(()))
    groups = scale.numel() // len(values)
    block = "row" if groups == 1 else values.shape[1] // groups
    cast = Cast(element, Scale("fp32" if groups == 1 else _DTYPES[scale.dtype], block))  # type: ignore[arg-type]
    return Codes(cast, values, scale.float(), torch.ones(()))


def _powers(exponents: Tensor) -> Tensor:
    return exponents.view(torch.float8_e8m0fnu).float()


def _casts(name: str, cast: Cast, given: LinearCasts | None, columns: int) -> LinearCasts:
    if given is None:
        return LinearCasts(fprop_w=cast, dgrad_w="fprop")
    if not isinstance(given.fprop_w, Cast) or _kind(given.fprop_w, columns) != _kind(cast, columns):
        raise ValueError(
            f"The file's weight of {name} is quantized by {cast}, and the casts have {given.fprop_w} for fprop_w. Give "
            f"casts with fprop_w={cast!r}, or None."
        )
    return given


def _kind(cast: Cast, columns: int) -> tuple[Any, ...]:
    """What codes and scales are, whatever the scales were made from: a block of all columns is a row."""
    scale, block = cast.scale, cast.scale.block
    if isinstance(block, tuple) and scale.two_level:  # each row of a tile has its scale in the file
        block = block[1]
    format = "float" if scale.format in _DTYPES.values() else scale.format
    element = "int2" if cast.element == "ternary" else cast.element
    return element, format, "row" if block == columns else block, scale.two_level


def _load_rest(model: nn.Module, tensors: Mapping[str, Tensor], quantized: set[str], folder: Path) -> None:
    tied = {id(p): name for name, p in model.named_parameters()}
    missing, unexpected = model.load_state_dict(dict(tensors), strict=False)
    names = dict(model.named_parameters(remove_duplicate=False))
    loaded = {tied[id(names[name])] for name in tensors if name in names}
    missing = [
        name for name in missing if name not in quantized and not (name in names and tied[id(names[name])] in loaded)
    ]
    if missing or unexpected:
        lacks, has = some(missing) or "nothing", some(unexpected) or "nothing"
        raise ValueError(
            f"{folder} lacks {lacks} of {type(model).__name__}, and has {has} that the model lacks. Build "
            "it from the checkpoint's own config.json."
        )
