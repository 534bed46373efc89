"""Formats of Adam's two moments: in full, in FP8, or for some of the elements only.

    DenseMoments    fp32 (float64 for a float64 parameter), one of each per element: 8 bytes
    FP8Moments      E4M3 and E5M2 in blocks of 128 along the last dimension, one fp32 scale each: 2.06 bytes
    SparseMoments   one of n neighbors, drawn anew at each reset, has moments and moves: 8/n bytes
    Momentum        Muon's, the first moment alone: 4 bytes; FP8Momentum 1.03

FP8 moments are rounded stochastically, because rounding to nearest would never change the second one: at β2 = .999 it
moves by a thousandth, and a step of E5M2 is a quarter. A mean square below 2.7e-10 of the largest in its block becomes
0 or that number by chance. 0 is read as that number, since the update divides by the root of the mean square.

Random bits are a function of (step, parameter, index of the element in the whole parameter): the upper half is for the
first moment, the lower half for the second. So a resumed run equals an uninterrupted one, and a parameter sharded along
rows equals a whole one.

Source: arXiv 2409.12517, section 5, for the two formats; COAT (arXiv 2410.19313) for blocks of 128; FP8-LM (arXiv
2310.18313) for master weights in fp16; SPAM (arXiv 2501.06842) for sparse momentum.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_lowbit._torch.devices import lacks
from lightning_lowbit.compilation import compiled, opaque
from lightning_lowbit.distributed import local, zeros_sharded_as
from lightning_lowbit.formats import ELEMENT_FORMATS, Format
from lightning_lowbit.kernels.memory import described
from lightning_lowbit.quant.rounding import mix_key, random_bits, uniform

BLOCK = 128
NAMES = ("mean", "mean_square")

#: Dtypes of statistics; a saved one becomes that of the parameter.
STATISTICS = (torch.float32, torch.float64)

#: Shapes and dtypes by name.
Entries = dict[str, tuple[tuple[int, ...], torch.dtype]]


def statistics_dtype(parameter: Tensor) -> torch.dtype:
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


def misfit(values: Mapping[str, Any], entries: Entries) -> str:
    """Says how values differ from the shapes and dtypes of entries; empty if they do not."""
    for name, (shape, dtype) in entries.items():
        value = values.get(name)
        if not isinstance(value, Tensor):
            return f"{name} is {'missing' if value is None else described(value)}"
        if value.shape != shape or (value.dtype != dtype and not {value.dtype, dtype} <= {*STATISTICS}):
            return f"{name} is {described(value)}, and {tuple(shape)}, {dtype} is needed"
    return ""


class Draw(NamedTuple):
    """The place of some rows in a parameter and in the run: their random bits depend on nothing else.

    Attributes:
        offsets: index of their first element in the whole parameter.
        shape: of the whole parameter.
        key, epoch: int64, 0-d; identify the parameter in this step, and since the last reset of its moments.
        taken: bool, 0-d; False if the parameter skips the step.
    """

    offsets: tuple[int, ...]
    shape: torch.Size
    key: Tensor
    epoch: Tensor
    taken: Tensor

    def at(self, row: int) -> "Draw":
        return self._replace(offsets=(self.offsets[0] + row, *self.offsets[1:]))


class Piece(NamedTuple):
    """State of some rows of a parameter, as views by name; and their random bits, if the format needs any."""

    state: Mapping[str, Tensor]
    draw: Draw | None = None


@dataclass(frozen=True)
class DenseMoments:
    """Both moments of every element, in the dtype of the statistics; also the interface of all formats."""

    names: ClassVar[tuple[str, ...]] = NAMES  # of the tensors in the state
    draws: ClassVar[bool] = False  # rounding or choosing elements takes random bits
    is_sparse: ClassVar[bool] = False  # some elements have no moments
    needs_rows: ClassVar[bool] = False  # FSDP1, which cuts through rows, cannot keep them
    has_mean_square: ClassVar[bool] = True

    def entries(self, shape: torch.Size, dtype: torch.dtype) -> Entries:
        """Returns the shapes and dtypes of the tensors of a shard."""
        return dict.fromkeys(self.names, (shape, dtype))

    def new_state(self, parameter: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        return {name: torch.zeros_like(parameter, dtype=dtype) for name in self.names}

    def select(self, rows: Tensor, piece: Piece) -> Tensor:
        """Returns the elements of some rows that have moments."""
        return rows

    def restore(self, rows: Tensor, selected: Tensor, piece: Piece) -> None:
        if selected is not rows:
            rows.copy_(selected)

    def load(self, piece: Piece) -> tuple[Tensor, Tensor]:
        """Mean and mean square of the selected elements, to be changed in place."""
        return piece.state["mean"], piece.state["mean_square"]

    def mean(self, piece: Piece) -> Tensor:
        """Mean of the selected elements, to be changed in place."""
        return piece.state["mean"]

    def mean_square(self, piece: Piece) -> Tensor | None:
        """Mean square of the selected elements; None if there is none (yet)."""
        return piece.state.get("mean_square")

    def store(self, piece: Piece, *moments: Tensor) -> None:
        """Writes the moments back, mean and mean square."""


@dataclass(frozen=True)
class Momentum(DenseMoments):
    """The first moment of every element of a matrix, in the dtype of the statistics."""

    names: ClassVar[tuple[str, ...]] = ("mean",)
    needs_rows: ClassVar[bool] = True
    has_mean_square: ClassVar[bool] = False


@dataclass(frozen=True)
class FP8Moments(DenseMoments):
    """Codes of E4M3 (``mean``) and E5M2 (``mean_square``), of the parameter's shape; fp32 scales per 128 columns.

    Codes are uint8: gloo cannot gather tensors of FP8, which full checkpoints need.
    """

    names: ClassVar[tuple[str, ...]] = (*NAMES, "mean_scale", "mean_square_scale")
    draws: ClassVar[bool] = True
    needs_rows: ClassVar[bool] = True
    coded: ClassVar[tuple[str, ...]] = NAMES

    def entries(self, shape: torch.Size, dtype: torch.dtype) -> Entries:
        codes, scales = (shape, torch.uint8), (_with_columns(shape, BLOCK), torch.float32)
        return {name: codes if name in self.coded else scales for name in self.names}

    def new_state(self, parameter: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        state = {}
        for name in self.coded:
            state[name] = torch.zeros_like(parameter, dtype=torch.uint8, memory_format=torch.contiguous_format)
            state[f"{name}_scale"] = zeros_sharded_as(parameter, lambda length: -(-length // BLOCK), torch.float32)
        return state

    def load(self, piece: Piece) -> tuple[Tensor, Tensor]:
        return self.mean(piece), self.mean_square(piece)

    def mean(self, piece: Piece) -> Tensor:
        return _decode_moment(piece.state["mean"], piece.state["mean_scale"], "mean")

    def mean_square(self, piece: Piece) -> Tensor:
        return _decode_moment(piece.state["mean_square"], piece.state["mean_square_scale"], "mean_square")

    def store(self, piece: Piece, *moments: Tensor) -> None:
        assert piece.draw is not None
        bits = random_bits(_element_index(moments[0].shape, piece.draw, moments[0].device), mix_key(piece.draw.key))
        for name, values, draws in zip(self.coded, moments, (bits, bits << 16), strict=False):
            codes, scales = piece.state[name], piece.state[f"{name}_scale"]
            new_codes, new_scales = _encode_moment(values, draws, name)
            codes.copy_(torch.where(piece.draw.taken, new_codes, codes))
            scales.copy_(torch.where(piece.draw.taken, new_scales, scales))


@dataclass(frozen=True)
class FP8Momentum(FP8Moments):
    """Codes and scales of the first moment alone."""

    names: ClassVar[tuple[str, ...]] = ("mean", "mean_scale")
    has_mean_square: ClassVar[bool] = False
    coded: ClassVar[tuple[str, ...]] = ("mean",)


@dataclass(frozen=True)
class SparseMoments(DenseMoments):
    """Moments of one element in each ``every`` neighbors of a row; only those elements move."""

    draws: ClassVar[bool] = True
    needs_rows: ClassVar[bool] = True
    is_sparse: ClassVar[bool] = True
    every: int = 1

    def entries(self, shape: torch.Size, dtype: torch.dtype) -> Entries:
        return dict.fromkeys(NAMES, (_with_columns(shape, self.every), dtype))

    def new_state(self, parameter: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        if local(parameter).shape[-1] != parameter.shape[-1]:
            raise ValueError(
                f"Sparse moments need whole rows, and a parameter of {tuple(parameter.shape)} is cut along the last "
                "dimension: put it in a group with density=1."
            )
        return {name: zeros_sharded_as(parameter, lambda length: -(-length // self.every), dtype) for name in NAMES}

    def select(self, rows: Tensor, piece: Piece) -> Tensor:
        return rows.gather(-1, self._columns(rows, piece))

    def restore(self, rows: Tensor, selected: Tensor, piece: Piece) -> None:
        rows.scatter_(-1, self._columns(rows, piece), selected.to(rows.dtype))

    def _columns(self, rows: Tensor, piece: Piece) -> Tensor:
        assert piece.draw is not None
        drawn, columns = piece.state["mean"].shape, rows.shape[-1]
        draw = piece.draw._replace(shape=torch.Size((*piece.draw.shape[:-1], drawn[-1])))
        draws = uniform(_element_index(drawn, draw, rows.device), mix_key(draw.epoch))
        first = torch.arange(0, columns, self.every, device=rows.device)
        neighbors = (columns - first).clamp_(max=self.every)  # fewer at the end
        return first + (draws * neighbors).long()


def _with_columns(shape: torch.Size, share: int) -> tuple[int, ...]:
    """Returns the shape with one element for every ``share`` elements of a row."""
    return (*shape[:-1], -(-shape[-1] // share))


_DENSE, _IN_FP8 = DenseMoments(), FP8Moments()


def moments_of(group: Mapping[str, Any], dims: int) -> DenseMoments:
    """Returns a group's format for a parameter of ``dims`` dimensions; below two dimensions moments are dense."""
    if dims > 1 and group["density"] < 1:
        return SparseMoments(every=round(1 / group["density"]))
    return _IN_FP8 if dims > 1 and group["moments"] == "fp8" else _DENSE


_FP8 = {"mean": ELEMENT_FORMATS["e4m3"], "mean_square": ELEMENT_FORMATS["e5m2"]}
_SMALLEST = 2.0 ** (_FP8["mean_square"].min_exponent - _FP8["mean_square"].mantissa_bits)


# Both are opaque because the compiler of torch 2.13 reads out of bounds where rows of FP8 end within a block.
@opaque(lambda codes, scales, name: torch.empty_like(codes, dtype=torch.float32))
def _decode_moment(codes: Tensor, scales: Tensor, name: str) -> Tensor:
    """Codes (uint8) […, columns] and scales […, blocks] as fp32; a mean square of 0 becomes the smallest number."""
    format = _FP8[name]
    assert format.dtype is not None
    values = format.decode(codes) if lacks(codes.device, format.dtype) else codes.view(format.dtype).float()
    if name == "mean_square":
        values.clamp_(min=_SMALLEST)
    factors = scales.unsqueeze(-1).expand(*scales.shape, BLOCK)
    return values.mul_(_join(factors, codes.shape[-1]))


def _fake_encoded(values: Tensor, bits: Tensor, name: str) -> tuple[Tensor, Tensor]:
    blocks = -(-values.shape[-1] // BLOCK)
    codes = torch.empty_like(values, dtype=torch.uint8, memory_format=torch.contiguous_format)
    return codes, values.new_empty((*values.shape[:-1], blocks))


@opaque(_fake_encoded)
def _encode_moment(values: Tensor, bits: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Codes (uint8, the shape of the fp32 values) and scales. ``bits``: int32, the upper 16 are random."""
    format, blocks = _FP8[name], _cut(values)
    scales = blocks.abs().amax(-1) / format.max
    in_blocks = blocks.flatten(0, -2), scales.reshape(-1, 1), _cut(bits).flatten(0, -2)
    codes = _join(_codes(*in_blocks, format=format).view_as(blocks), values.shape[-1])
    return codes.contiguous(), scales


@compiled
def _codes(blocks: Tensor, scales: Tensor, bits: Tensor, *, format: Format) -> Tensor:
    """Rounds blocks [n, 128] to codes, uint8, magnitudes up or down; a block of zeros has the scale 0, and stays zeros.

    The bits of a float count numbers: a draw is added below the last bit of the code, and the sum cut there. Below the
    smallest normal number the bits of (value + smallest) / 2 do so; they are the larger ones there.
    """
    cut, smallest = 23 - format.mantissa_bits, (format.min_exponent + 127) << 23
    scaled = blocks / torch.where(scales > 0, scales, torch.inf)
    magnitude = scaled.abs().clamp(max=format.max)
    below = magnitude * 0.5 + 2.0 ** (format.min_exponent - 1)
    draw = (((bits >> 16) & 0xFFFF) << (cut - 16)) + (1 << (cut - 17)) + ((1 << 23) - smallest)
    codes = (torch.maximum(magnitude.view(torch.int32), below.view(torch.int32)) + draw) >> cut
    return torch.where(scaled < 0, codes | 0x80, codes).to(torch.uint8)


def _cut(values: Tensor) -> Tensor:
    columns = values.shape[-1]
    if columns % BLOCK:
        values = F.pad(values, (0, -columns % BLOCK))
    return torch.unflatten(values, -1, (-1, BLOCK))


def _join(blocks: Tensor, columns: int) -> Tensor:
    return blocks.flatten(-2)[..., :columns]


def _element_index(shape: torch.Size, draw: Draw, device: torch.device) -> Tensor:
    """Flat index in the whole parameter of each element of some rows: int32, which repeats beyond 2^32."""
    strides = torch.empty(draw.shape, device="meta").stride()
    index = torch.zeros((), dtype=torch.int64, device=device)
    for size, offset, stride in zip(shape, draw.offsets, strides, strict=True):
        index = index.unsqueeze(-1) + torch.arange(offset, offset + size, device=device) * stride
    return index.to(torch.int32)
