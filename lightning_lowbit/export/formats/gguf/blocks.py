"""The block types of GGUF, byte by byte, written from codes and scales; nothing is quantized here.

    type     elements  bytes  of a block                                               element i
    TQ1_0    256       54     48 + 4 bytes of base 3, then d                           :func:`_tq1_0`
    TQ2_0    256       66     64 bytes, then d                                         2 bits, 32 elements apart
    Q8_0     32        34     d, then 32 of int8                                       byte i
    Q4_0     32        18     d, then 16 bytes of element + 8                          byte i mod 16, low half first
    MXFP4    32        17     an E8M0 scale, then 16 bytes of E2M1                     as Q4_0
    NVFP4    64        36     4 E4M3 scales, then 4 times 8 bytes of E2M1              as Q4_0, 8 bytes for each 16

``d`` is a float16. A matrix may have a tensor ``NAME.scale`` beside it, a float32 by which llama.cpp multiplies the
product.
Layouts: ``ggml-common.h`` and ``ggml-quants.c`` of llama.cpp; type numbers: ``ggml.h``.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_lowbit.export.weights import has_second_level
from lightning_lowbit.quant import Cast, Quantized


@dataclass(frozen=True)
class BlockType:
    """A block type."""

    name: str  # as llama.cpp writes it
    number: int  # ``ggml_type``
    file_type: int  # ``llama_ftype`` of a file that is mostly of this type
    elements: int  # of a block, along in_features
    bytes: int  # of a block
    scale_block: int  # elements that have one scale
    pack: Callable[[Tensor, Tensor], Tensor]  # elements and scales ``[out, blocks, n]``, as stored in a ``Quantized``


class Blocks(NamedTuple):
    """A matrix as a file holds it.

    ``error`` is the largest difference from the values of the codes: above 0 where float16 rounds a scale, and infinite
    where a scale is beyond its normal numbers.
    """

    data: Tensor  # uint8 ``[out_features, bytes of a row]``
    scale: Tensor | None  # the tensor ``NAME.scale``, float32, 0-d
    error: float


def _split(values: Tensor, *sizes: int) -> Tensor:
    return values.reshape(*values.shape[:-1], *sizes)


def _pairs(low: Tensor, high: Tensor) -> Tensor:
    return low | (high << 4)


def _with_d(bytes: Tensor, scales: Tensor, first: bool) -> Tensor:
    d = scales.half().view(torch.uint8)
    return torch.cat([d, bytes] if first else [bytes, d], -1)


def _tq1_0(values: Tensor, scales: Tensor) -> Tensor:
    """Five digits of base 3 in a byte, 32 (then 16) elements apart, the first one highest; four in the last 4 bytes.

    A byte is ceil(256 / 243 * number), so that digits come out by multiplying with 3, without a division.
    """
    parts = []
    for part, digits in zip((values[..., :160], values[..., 160:240], values[..., 240:]), (5, 5, 4), strict=True):
        weights = torch.tensor([81, 27, 9, 3, 1][:digits], dtype=torch.int32)[:, None]
        number = (_split(part.int(), digits, -1) * weights).sum(-2)
        parts.append(((number * 256 + 242) // 243).to(torch.uint8))
    return _with_d(torch.cat(parts, -1), scales, first=False)


def _tq2_0(values: Tensor, scales: Tensor) -> Tensor:
    quarters = _split(values, 2, 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    return _with_d((quarters << shifts).sum(-2, dtype=torch.uint8).flatten(-2), scales, first=False)


def _nvfp4(codes: Tensor, scales: Tensor) -> Tensor:
    sixteens = _split(codes, 4, 16)
    return torch.cat([scales.view(torch.uint8), _pairs(sixteens[..., :8], sixteens[..., 8:]).flatten(-2)], -1)


def _in_halves(codes: Tensor) -> Tensor:
    return _pairs(codes[..., :16], codes[..., 16:])


TQ1_0 = BlockType("TQ1_0", 34, 36, 256, 54, 256, _tq1_0)
TQ2_0 = BlockType("TQ2_0", 35, 37, 256, 66, 256, _tq2_0)
Q8_0 = BlockType("Q8_0", 8, 7, 32, 34, 32, lambda values, scales: _with_d(values, scales, first=True))
Q4_0 = BlockType("Q4_0", 2, 2, 32, 18, 32, lambda values, scales: _with_d(_in_halves(values), scales, first=True))
MXFP4 = BlockType(
    "MXFP4", 39, 38, 32, 17, 32, lambda codes, scales: torch.cat([scales.view(torch.uint8), _in_halves(codes)], -1)
)
NVFP4 = BlockType("NVFP4", 40, 39, 64, 36, 16, _nvfp4)

# The element that each type stores, from its code (uint8) in a ``Quantized``.
_FROM_CODES: dict[str, dict[str, Callable[[Tensor], Tensor]]] = {
    "ternary": {"TQ1_0": lambda c: c, "TQ2_0": lambda c: c, "Q4_0": lambda c: c + 7},  # a code is value + 1
    "int4": {"Q4_0": lambda c: c ^ 8},  # two's complement to value + 8
    "int8": {"Q8_0": lambda c: c},
    "e2m1": {"MXFP4": lambda c: c, "NVFP4": lambda c: c},
}


def block_type(cast: Cast, in_features: int, ternary: BlockType = TQ2_0) -> BlockType | str:
    """Returns the block type that holds the codes of a weight with some ``in_features``, or why none does, in words.
    ``ternary`` is ``TQ1_0`` or ``TQ2_0``, where blocks of 256 fit; else ternary weights are in ``Q4_0``."""
    scale = cast.scale
    if scale.statistic == "minmax":
        return "it has zero points (statistic='minmax'), which no block type holds with its scale exactly"
    if scale.two_level == "row":
        return "its float32 scale differs from row to row (two_level='row'); llama.cpp has one of the tensor"
    if cast.element == "e2m1":
        kind = {"e8m0": MXFP4, "e4m3": NVFP4}.get(scale.format)
        if kind is None:
            return f"E2M1 has E4M3 scales (NVFP4) or E8M0 scales (MXFP4) in GGUF, not {scale.format}"
    elif cast.element == "ternary":
        kind = ternary if in_features % ternary.elements == 0 else Q4_0
    elif cast.element in ("int4", "int8"):
        kind = Q4_0 if cast.element == "int4" else Q8_0
    else:
        return f"GGUF has no block type of {cast.element}: it holds E2M1 (NVFP4, MXFP4), ternary, int4 and int8"
    if in_features % kind.elements:
        return f"its in_features, {in_features}, are no multiple of {kind.elements}, the block of {kind.name}"
    block = scale.block[1] if isinstance(scale.block, tuple) else scale.block
    if not isinstance(block, str) and block % kind.scale_block and block < in_features:
        return f"its blocks of {block} are no multiple of {kind.scale_block}, for which {kind.name} has a scale"
    return kind


def has_scale(cast: Cast) -> bool:
    """Returns whether blocks of a cast have a tensor ``NAME.scale`` beside them."""
    return has_second_level(cast) or (cast.scale.block == "tensor" and cast.element != "e2m1")


def pack(quantized: Quantized, kind: BlockType) -> Blocks:
    """Returns a matrix in blocks of a type that :func:`block_type` gave for its cast; a ``ValueError`` if a scale is
    NaN or infinite, as of a weight that is."""
    out, inner = quantized.codes.shape
    cast, tensor_scale = quantized.cast, quantized.tensor_scale
    decoded = replace(quantized, tensor_scale=None).multipliers()
    if not bool(decoded.isfinite().all()):
        raise ValueError("it has a NaN or infinite weight")
    error = 0.0
    if cast.element == "e2m1":
        scales = quantized.scales.view(torch.uint8)
    elif cast.scale.block == "tensor" and tensor_scale is None:  # float32, beside blocks whose d is 1
        tensor_scale, scales = decoded.reshape(()), torch.ones(1, 1)
    else:
        scales = decoded
    codes = _FROM_CODES[cast.element][kind.name](quantized.codes)
    spread = _spread(scales, (out, inner // kind.scale_block), cast, kind)
    if spread.is_floating_point() and not torch.equal(spread.half().float(), spread):
        largest = _split(quantized.elements().abs(), -1, kind.scale_block).amax(-1)
        errors = (spread.half().float() - spread).abs()
        is_near = (errors <= torch.finfo(torch.float16).eps / 2 * spread.abs()) | (largest == 0)
        error = float((errors * largest).max()) if bool(is_near.all()) else torch.inf
        error *= 1.0 if tensor_scale is None else float(tensor_scale)
    blocks = (out, inner // kind.elements, -1)
    return Blocks(kind.pack(codes.reshape(blocks), spread.reshape(blocks)).flatten(1), tensor_scale, error)


def _spread(scales: Tensor, shape: tuple[int, int], cast: Cast, kind: BlockType) -> Tensor:
    """Returns ``[out, blocks]``: the scale of each block of a type, from scales of larger blocks."""
    tile = cast.scale.block if isinstance(cast.scale.block, tuple) else (1, cast.scale.block)
    rows = shape[0] if cast.scale.block == "tensor" else tile[0]
    columns = shape[1] if isinstance(tile[1], str) else tile[1] // kind.scale_block
    return scales.repeat_interleave(rows, 0)[: shape[0]].repeat_interleave(columns, 1)[:, : shape[1]]
