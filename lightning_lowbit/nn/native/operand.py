"""An operand of a block-scaled native GEMM: codes and scales, not yet multiplied."""

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_lowbit.formats import ELEMENT_FORMATS
from lightning_lowbit.kernels import Packed, amax_of, lay_out_both, lay_out_operand, lay_out_packed, rotate
from lightning_lowbit.kernels.gemms import CodeOperand, code_operand, packed_operand, stack_operand
from lightning_lowbit.kernels.layout import repeated, taken_apart
from lightning_lowbit.kernels.windows import Pixels
from lightning_lowbit.nn.native.table import NATIVE
from lightning_lowbit.quant import Cast, Operand
from lightning_lowbit.quant.call import CastCall
from lightning_lowbit.quant.operand import StackOperand, has_factor
from lightning_lowbit.quant.shard import Shard


class BlockOperand(NamedTuple):
    """One operand of a GPU's block-scaled GEMM, with the contraction axis in its columns, in the GEMM's layout
    (:mod:`lightning_lowbit.kernels.layout`). That of a CPU is a :class:`lightning_lowbit.kernels.gemms.CodeOperand`.

    Attributes:
        values: codes of E2M1, uint8 ``[rows', k' / 2]``, or elements in float8 ``[rows', k']``, padded with zeros.
        scales: of blocks, in their storage dtype, in the order of tensor cores. In FP8 with blocks of 128
            ``[rows, k / 128]`` with strides ``(1, rows)`` or, for tiles, ``[rows / 128, k / 128]``, rounded up.
        factor: float32, 0-d, multiplies the result; None for 1.
        kind: of the GEMM, a key of ``NATIVE``.
        size: rows and k.
    """

    values: Tensor
    scales: Tensor
    factor: Tensor | None
    kind: str
    size: tuple[int, int]

    def t(self) -> "BlockOperand":
        """Returns itself: native GEMMs take both operands with the contraction axis in the columns."""
        return self

    def decoded(self, dtype: torch.dtype, dim: int = 1) -> Operand:
        """Returns the emulation's operand for a pass in ``dtype``, with contraction axis ``dim``, bit for bit."""
        native = NATIVE[self.kind]
        codes, scales = taken_apart(self.values, self.scales, native.block, *self.size)
        elements = ELEMENT_FORMATS[native.elements[0]].decode(codes) if codes.dtype == torch.uint8 else codes.float()
        scales = repeated(scales.float(), *self.size, 128 if has_tiles(self) else 1, native.block)
        exact = dtype if native.scale != "fp32" and dtype != torch.float16 else torch.float32
        values = (elements * scales).to(exact)
        return Operand(values if dim == 1 else values.t().contiguous(), self.factor)


# An operand of a GEMM: emulated, perhaps for all products of a stack, or native on a GPU or a CPU.
AnyOperand = Operand | StackOperand | BlockOperand | CodeOperand


def values_of(operand: AnyOperand) -> Operand:
    """Returns the operand of a GEMM that is emulated, or takes no scales of blocks, as it is."""
    assert isinstance(operand, Operand)
    return operand


def has_tiles(operand: BlockOperand) -> bool:
    return operand.scales.dim() == 2 and len(operand.scales) < operand.size[0]


def native_operand(
    x: Tensor, kind: str, call: CastCall, ends: tuple[int, ...] | None = None, pixels: Pixels | None = None
) -> BlockOperand | CodeOperand:
    """Makes one operand of a block-scaled native GEMM of this ``kind``. The GEMM of a CPU quantizes it; with ``ends``,
    those of all products of a stack (:func:`lightning_lowbit.kernels.gemms.stack_operand`); with ``pixels`` that of
    their patches (:func:`lightning_lowbit.kernels.gemms.code_operand`)."""
    cast, dim, key, amax, _, shard, rotation, _ = call
    if kind == "cpu":
        if ends is not None:
            return stack_operand(x, call, ends)
        if shard is not None and amax is None and cast.scale.needs_amax:
            call = call._replace(amax=amax_of(x, shard.spec, rotation, dim))
        return code_operand(x, call, pixels)
    return block_operand(x if rotation is None else rotate(x, rotation, dim), cast, kind, dim, key, amax, shard)


def block_operand(
    x: Tensor,
    cast: Cast,
    kind: str,
    dim: int,
    key: Tensor | None = None,
    amax: Tensor | None = None,
    shard: Shard | None = None,
) -> BlockOperand:
    """Quantizes one operand of a GPU's block-scaled GEMM, with the arguments and errors of ``quantize_operand``."""
    return _arranged(*lay_out_operand(x, cast, NATIVE[kind].block, dim, key, amax, shard), cast, kind, dim, x.shape)


def _arranged(
    values: Tensor, scales: Tensor, factor: Tensor, cast: Cast, kind: str, dim: int, shape: torch.Size
) -> BlockOperand:
    return BlockOperand(values, scales, factor if has_factor(cast) else None, kind, (shape[1 - dim], shape[dim]))


def block_operands(
    x: Tensor, casts: tuple[Cast, Cast], kind: str, keys: tuple[Tensor | None, Tensor | None], amax: Tensor | None
) -> tuple[BlockOperand, BlockOperand]:
    """Makes :func:`block_operand` along rows (dim 1) and along columns (dim 0) of a matrix, from one read on GPUs."""
    row, column = lay_out_both(x, casts, NATIVE[kind].block, keys, amax)
    return _arranged(*row, casts[0], kind, 1, x.shape), _arranged(*column, casts[1], kind, 0, x.shape)


def unpacked_native_operand(
    data: Tensor, factor: Tensor, cast: Cast, kind: str, dim: int, shape: torch.Size
) -> BlockOperand | CodeOperand:
    """Makes a :func:`native_operand` for a matrix of ``shape`` from a packed operand, ``data`` and ``factor``
    (:func:`lightning_lowbit.kernels.pack_operand`). The GEMM of a CPU unpacks it."""
    if kind == "cpu":
        return packed_operand(Packed(data, factor), cast, dim, shape)
    return _arranged(*lay_out_packed(data, cast, NATIVE[kind].block, dim, shape), factor, cast, kind, dim, shape)
