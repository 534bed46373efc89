"""Layouts of quantized layers in files: their tensors, with dtypes and shapes, and the codes that they hold.

    format                          files hold                                          cast
    nvfp4-pack-quantized            weight_packed, weight_scale, weight_global_scale    e2m1/e4m3:1x16+fp32
    mxfp4-pack-quantized            weight_packed, weight_scale (uint8)                 e2m1/e8m0:1x32
    mxfp6-pack-quantized            weight_packed, weight_scale (uint8)                 e2m3/e8m0:1x32
    mxfp8-quantized                 weight (E4M3), weight_scale (uint8)                 e4m3/e8m0:1x32
    float-quantized                 weight (E4M3), weight_scale                         e4m3 per tensor, row or tile
    pack-quantized, int-quantized   weight_packed or weight, weight_scale               int2 … int8 per group or row
    modelopt                        weight, weight_scale, weight_scale_2                e2m1/e4m3:1x16+fp32
                                    weight (E4M3), weight_scale                         e4m3 per tensor or row
    bitnet                          weight, weight_scale                                ternary, one scale

The model tells the shape ``[rows, columns]`` of each weight, the configuration the format. Tensors are compared with
both before they are decoded.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_lowbit.checks import choose, integer, some
from lightning_lowbit.export.reading.files import AGAIN
from lightning_lowbit.formats import ELEMENT_FORMATS
from lightning_lowbit.kernels import Packed
from lightning_lowbit.quant import Cast, Scale
from lightning_lowbit.quant.packed import assembled

Scheme = Mapping[str, Any]
Parts = Mapping[str, Tensor]

FLOATS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
WEIGHT, UNUSED = "weight", ("input_scale", "input_global_scale")  # of activations, which the casts quantize
QUANTIZED = ("weight_packed", "weight_scale", "weight_global_scale", "weight_scale_2", "weight_shape")
REFUSED = {
    "weight_zero_point": "zero points, which codes of frozen weights do not. Load it in high precision.",
    "weight_g_idx": "the order of its groups, which codes of frozen weights keep. Load it in high precision.",
}
PARTS = (WEIGHT, *UNUSED, *QUANTIZED, *REFUSED)

_NVFP4 = Cast("e2m1", Scale("e4m3", 16, two_level=True))
_NVFP4_PARTS = {
    "nvfp4-pack-quantized": ("weight_packed", "weight_global_scale"),
    "modelopt": ("weight", "weight_scale_2"),
}
_E4M3, _BYTES, _FLOATS = (torch.float8_e4m3fn,), (torch.uint8,), tuple(FLOATS)
_EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)


class Codes(NamedTuple):
    """A weight in a file: elements on the grid of their format, float32 ``[rows, columns]``, the scales of its blocks
    or rows, float32, and the scale of the matrix."""

    cast: Cast
    values: Tensor
    scales: Tensor
    factor: Tensor

    def with_one_scale(self) -> "Codes":
        """Returns the same weight with the scale of its rows as that of the tensor, if all are equal, as integers are
        written that were trained so."""
        first = self.scales.flatten()[:1]
        if self.cast.scale.block != "row" or not (self.scales == first).all():
            return self
        return self._replace(cast=self.cast.replace(scale={"block": "tensor"}), scales=first)

    def packed(self, name: str, cast: Cast) -> Packed:
        """Returns the codes of a layer under a cast that differs only in how scales are made."""
        block, scales = cast.scale.block, self.scales
        if cast.element == "ternary" and (self.values < -1).any():  # which two bits can hold
            raise ValueError(f"The weight of {name} has codes that are not ternary, as its casts are. {AGAIN}")
        if isinstance(block, tuple) and len(scales) == len(self.values):  # repeated for each row of a tile
            scales = self.scales[:: block[0]]
            if not torch.equal(scales.repeat_interleave(block[0], 0)[: len(self.values)], self.scales):
                raise ValueError(
                    f"The file's scales of {name} differ within tiles of {block[0]} rows, which the casts have. Give "
                    f"casts with fprop_w={self.cast!r}, or None."
                )
        factor = self.scales.reshape(()) if block == "tensor" else self.factor
        return Packed(assembled(self.values, scales, cast), factor)


class Part(NamedTuple):
    """The dtypes and shapes that a tensor of a layer may have; ``values`` where they are known."""

    dtypes: Sequence[torch.dtype]
    shapes: Sequence[tuple[int, ...]]
    values: Sequence[int] | None = None

    def differs(self, name: str, tensor: Tensor) -> str | None:
        """Tells in words how a tensor is something else; None if it fits."""
        if tensor.dtype in self.dtypes and tuple(tensor.shape) in self.shapes:
            values = None if self.values is None else tensor.tolist()
            return None if values == self.values else f"{name} has {values}, and {self.values} is needed"
        needed = f"{' or '.join(map(_short, self.dtypes))} {' or '.join(map(str, map(list, self.shapes)))}"
        return f"{name} is {_short(tensor.dtype)} {[*tensor.shape]}, and {needed} is needed"


_SCALAR = Part(tuple(FLOATS), ((), (1,)))


class Layout(NamedTuple):
    """The tensors of a layer, by the ends of their names, and how they are decoded."""

    parts: Mapping[str, Part]
    decode: Callable[[Parts], Codes]

    def differs(self, tensors: Parts) -> list[str]:
        """Tells in words how the tensors of a layer differ from this layout."""
        known = {**self.parts, **{part: _SCALAR for part in UNUSED if part in tensors}}
        lacking = [f"{part} is missing" for part in self.parts if part not in tensors]
        other = [f"{part} is not of its format" for part in tensors if part not in known]
        differing = (known[part].differs(part, tensor) for part, tensor in tensors.items() if part in known)
        return [*lacking, *other, *filter(None, differing)]


def codes_of(name: str, tensors: Parts, layouts: Sequence[Layout]) -> Codes:
    """Returns the codes of a layer, by the one of some layouts that its tensors have. A ``ValueError`` if they have
    none of them, scales are not finite, or codes mean no number."""
    for part, reason in REFUSED.items():
        if part in tensors:
            raise ValueError(f"{name} has {reason}")
    wrong = [layout.differs(tensors) for layout in layouts]
    fitting = [layout for layout, differences in zip(layouts, wrong, strict=True) if not differences]
    if not fitting:
        nearest = min(wrong, key=len, default=["config.json describes no weights"])
        raise ValueError(f"The tensors of {name} are not those of its format: {some(nearest)}. {AGAIN}")
    codes = fitting[0].decode(tensors)
    if not all(scale.isfinite().all() and (scale >= 0).all() for scale in (codes.scales, codes.factor)):
        raise ValueError(f"The scales of {name} are not all finite and 0 or more. {AGAIN}")
    if codes.values.isnan().any():
        raise ValueError(f"The weight of {name} holds codes that mean no number. {AGAIN}")
    return codes


def layouts(method: str, schemes: Sequence[Scheme], rows: int, columns: int) -> list[Layout]:
    """Returns the layouts that a weight ``[rows, columns]`` may have in the files of a quantization method; ``schemes``
    are, for compressed-tensors, the arguments of the weights of each group, with its ``format``."""
    if method == "bitnet":
        quarter = {"weight": Part(_BYTES, [(rows // 4, columns)]), "weight_scale": _SCALAR}
        return [Layout(quarter, _ternary)] if rows % 4 == 0 else []
    if method == "modelopt":
        fp8 = {"format": "float-quantized", "type": "float", "num_bits": 8}
        schemes = [{"format": "modelopt"}, *({**fp8, "strategy": strategy} for strategy in ("tensor", "channel"))]
    return [_layout(scheme, rows, columns) for scheme in schemes]


def check_scheme(scheme: Scheme, where: str) -> Scheme:
    """The arguments of a group's weights in ``config.json``, with compressed-tensors' defaults; a ``ValueError`` if the
    format or strategy is unknown, or a number is wrong or missing."""
    size = scheme.get("group_size")
    inferred = {None: "tensor", -1: "channel"}.get(size, "group") if isinstance(size, int | None) else "group"
    scheme = {"num_bits": 8, "type": "int", "symmetric": True, **scheme, "strategy": scheme.get("strategy") or inferred}
    choose(f"format in {where}", scheme.get("format"), _FORMATS)
    integer(f"num_bits in {where}", scheme.get("num_bits"), 2, "bits of an element", at_most=8)
    if scheme["symmetric"] is not True:
        raise ValueError(f"The weights in {where} have {REFUSED['weight_zero_point']}")
    if scheme["strategy"] in ("group", "tensor_group"):
        integer(f"group_size in {where}", scheme.get("group_size"), 1, "columns with one scale")
    if scheme["strategy"] == "block":
        tile, meaning = scheme.get("block_structure"), "rows and columns of a tile"
        if not isinstance(tile, list) or len(tile) != 2:
            raise ValueError(f"block_structure in {where} is the {meaning}; got {tile!r}. {AGAIN}")
        for size in tile:
            integer(f"block_structure in {where}", size, 1, meaning)
    needed = _FORMATS[scheme["format"]]
    arguments = {key: scheme.get(key) for key in needed}
    if any(arguments[key] not in values for key, values in needed.items()):
        takes = ", ".join(f"{key} {' or '.join(map(str, values))}" for key, values in needed.items())
        raise ValueError(f"{scheme['format']} in {where} takes {takes}; got {arguments}.")
    return scheme


# The arguments of weights that each format takes.
_MX = {"type": ("float",), "strategy": ("group",), "group_size": (32,)}
_NUMBERS = {"num_bits": (8,), "strategy": ("tensor", "channel", "group", "block")}
_FORMATS: Mapping[str, Mapping[str, Sequence[Any]]] = {
    "nvfp4-pack-quantized": {"type": ("float",), "num_bits": (4,), "strategy": ("tensor_group",), "group_size": (16,)},
    "mxfp4-pack-quantized": {**_MX, "num_bits": (4,)},
    "mxfp6-pack-quantized": {**_MX, "num_bits": (6,)},
    "mxfp8-quantized": {**_MX, "num_bits": (8,)},
    "float-quantized": {**_NUMBERS, "type": ("float",)},
    "pack-quantized": {"type": ("int",), "strategy": ("tensor", "channel", "group")},
    "int-quantized": {"type": ("int",), "num_bits": (8,), "strategy": ("tensor", "channel", "group")},
    "naive-quantized": {**_NUMBERS, "type": ("float", "int")},
}


def _layout(scheme: Scheme, rows: int, columns: int) -> Layout:
    format, bits = scheme["format"], scheme.get("num_bits", 4)
    packed = Part(_BYTES, [(rows, -(-columns * bits // 8))])
    if format in _NVFP4_PARTS:
        weight, scale = _NVFP4_PARTS[format]
        blocks = Part(_E4M3, [(rows, -(-columns // 16))])
        return Layout({weight: packed, "weight_scale": blocks, scale: _SCALAR}, partial(_nvfp4, columns, weight, scale))
    if format.startswith("mxfp"):
        element, scales = {4: "e2m1", 6: "e2m3", 8: "e4m3"}[bits], Part(_EXPONENTS, [(rows, -(-columns // 32))])
        weights = {"weight": Part(_E4M3, [(rows, columns)])} if bits == 8 else {"weight_packed": packed}
        return Layout({**weights, "weight_scale": scales}, partial(_mx, element, columns))
    scales, block = _scales(scheme, rows, columns)
    if format == "pack-quantized":
        parts = {
            "weight_packed": Part((torch.int32,), [(rows, -(-columns * bits // 32))]),
            "weight_scale": scales,
            "weight_shape": Part((torch.int32, torch.int64), [(2,)], [rows, columns]),
        }
        return Layout(parts, partial(_integers, f"int{bits}", columns, block))
    element, dtypes = ("int8", (torch.int8,)) if scheme["type"] == "int" else ("e4m3", _E4M3)
    numbers = {"weight": Part(dtypes, [(rows, columns)]), "weight_scale": scales}
    return Layout(numbers, lambda parts: _scaled(element, parts["weight"].float(), parts["weight_scale"], block))


def _scales(scheme: Scheme, rows: int, columns: int) -> tuple[Part, Any]:
    """Returns the tensor of a weight's scales, and the block of each."""
    if scheme["strategy"] == "tensor":
        return _SCALAR, "tensor"
    if scheme["strategy"] == "channel":
        return Part(_FLOATS, [(rows, 1), (rows,)]), "row"
    if scheme["strategy"] == "group":
        size = scheme["group_size"]
        return Part(_FLOATS, [(rows, -(-columns // size))]), size
    down, across = scheme["block_structure"]  # the last tile may be cut
    return Part(_FLOATS, [(-(-rows // down), -(-columns // across))]), (down, across)


def _scaled(element: str, values: Tensor, scale: Tensor, block: Any) -> Codes:
    format = FLOATS[scale.dtype] if isinstance(block, int) else "fp32"
    return Codes(Cast(element, Scale(format, block)), values, scale.float(), torch.ones(()))


def _nvfp4(columns: int, weight: str, scale: str, parts: Parts) -> Codes:
    """Reads NVFP4: modelopt keeps the scale of the matrix, compressed-tensors one over it."""
    factor = parts[scale].float().reshape(())
    factor = factor if scale == "weight_scale_2" else 1 / factor
    return Codes(_NVFP4, _elements(parts[weight], "e2m1", columns), parts["weight_scale"].float(), factor)


def _mx(element: str, columns: int, parts: Parts) -> Codes:
    is_fp8 = element == "e4m3"
    values = parts["weight"].float() if is_fp8 else _elements(parts["weight_packed"], element, columns)
    scales = parts["weight_scale"].view(torch.float8_e8m0fnu).float()
    return Codes(Cast(element, Scale("e8m0", 32)), values, scales, torch.ones(()))


def _integers(element: str, columns: int, block: Any, parts: Parts) -> Codes:
    bits = ELEMENT_FORMATS[element].bits
    values = _bits(parts["weight_packed"], bits, columns) - 2 ** (bits - 1)
    return _scaled(element, values, parts["weight_scale"], block)


def _ternary(parts: Parts) -> Codes:
    """Row r of the bytes holds the rows r, r + N/4, … of the weight, in pairs of bits; its scale divides."""
    values = torch.cat([(parts["weight"] >> shift & 3) for shift in (0, 2, 4, 6)]).float() - 1
    cast = Cast("ternary", Scale("fp32", "tensor", statistic="absmean"))
    return Codes(cast, values.where(values < 2, torch.nan), 1 / parts["weight_scale"].float(), torch.ones(()))


def _elements(packed: Tensor, element: str, columns: int) -> Tensor:
    format = ELEMENT_FORMATS[element]
    return format.decode(_bits(packed, format.bits, columns).to(torch.uint8))


def _bits(packed: Tensor, bits: int, columns: int) -> Tensor:
    """Rows of a little-endian stream of bits: element i is at the bits from ``i * bits``. float32."""
    rows = len(packed)
    octets = packed.contiguous().view(torch.uint8).view(rows, -1, 1)
    stream = (octets >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1)
    return stream[:, : columns * bits].view(rows, columns, bits).float() @ (2.0 ** torch.arange(bits))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def layers_of(names: Iterable[str]) -> list[str]:
    """Returns the layers of which some tensors' names say that they are quantized."""
    ends = {*QUANTIZED, *REFUSED}
    return sorted({layer for layer, _, part in (name.rpartition(".") for name in names) if part in ends})
