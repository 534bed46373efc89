"""What layers keep as codes and scales instead of a matrix: inputs saved for the backward pass, and frozen weights."""

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lightning_lowbit.checks import choose
from lightning_lowbit.kernels import Packed, pack_operand, unpack_operand
from lightning_lowbit.kernels.packing import check_bytes
from lightning_lowbit.quant import Cast, Operand
from lightning_lowbit.quant.packed import packed_bits

if TYPE_CHECKING:
    from lightning_lowbit.nn.casts.linear_casts import LinearCasts

SAVES = ("inputs", "codes")


def check_save(planned: "Mapping[str, LinearCasts]", save: str) -> None:
    """Raises a ``ValueError`` for an unknown ``save``, or for ``"codes"`` where layers need their input."""
    if choose("save", save, SAVES) == "inputs":
        return
    for name, casts in planned.items():
        if "fprop_x" in casts.surrogate:
            raise ValueError(
                f"save='codes' keeps no input, and the surrogate gradient of fprop_x needs it; got {name or 'casts'} "
                f"with {casts}. Leave the surrogate of fprop_x out, or take save='inputs'."
            )
    if planned and all(casts.traits.coded is None for casts in planned.values()):
        raise ValueError(
            "save='codes' keeps the quantized operand of wgrad, and none of these casts has one that can be packed: "
            "give wgrad_x a cast (or 'fprop'), without zero points or means, or take save='inputs'. Got "
            f"{next(iter(planned.values()))}."
        )


def saved_bits(casts: "LinearCasts", save: str, dtype: torch.dtype) -> float:
    """Returns the bits per element of its input that a layer saves for the backward pass.

    Examples:
        >>> saved_bits(LinearCasts.preset("nvfp4"), "codes", torch.bfloat16)
        4.5
    """
    if save == "codes" and casts.traits.coded is not None:
        return packed_bits(getattr(casts, casts.traits.coded))
    return 8.0 * dtype.itemsize


class Readers:
    """Finds layers that read one tensor together. Where their codes would take more memory, they save the tensor, which
    serves all of them: instead of codes of 4.5 bits, four layers save one bfloat16 tensor."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._input: weakref.ref[Tensor] | None = None
        self._layers: list[Any] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return Readers, ()  # a copy, or a pickled model, has layers of its own

    def pack(self, layer: Any, x: Tensor, dtype: torch.dtype) -> bool:
        """Returns whether a layer saves codes of its input ``x``, which it reads in ``dtype``. Readers of ``x`` are
        known from their first pass on. The choice changes no bits of gradients."""
        shares = layer.casts.traits.coded == "wgrad_x" and x.dtype == dtype  # or else the tensor is a copy of its own
        if not shares or torch.compiler.is_compiling():
            return not (shares and layer.lowbit.keeps_input)
        if self._input is None or self._input() is not x:
            self._input, self._layers = weakref.ref(x), []
        self._layers = [*(other for other in self._layers if other is not layer), layer]
        if sum(saved_bits(other.casts, "codes", dtype) for other in self._layers) > 8 * dtype.itemsize:
            for other in self._layers:
                other.lowbit.keeps_input = True
        return not layer.lowbit.keeps_input


class Frozen(NamedTuple):
    """Describes the bytes of a frozen weight: uint8, 1-D, those of :class:`Packed` and the matrix's float32 scale."""

    cast: Cast  # by which the matrix was quantized along its columns
    shape: torch.Size  # [out_features, in_features]
    dtype: torch.dtype  # from which it was quantized

    def pack(self, weight: Tensor) -> Tensor:
        """Packs a weight, which is rounded to ``dtype`` first."""
        return joined(pack_operand(weight.to(self.dtype), self.cast, 1))

    def packed(self, data: Tensor) -> Packed:
        """Returns the bytes as an operand; a ``ValueError`` if they are not as many as the matrix needs."""
        check_bytes(data, self.cast, 1, self.shape, more=4)
        return Packed(data[:-4], data[-4:].clone().view(torch.float32)[0])

    def operand(self, data: Tensor, source: torch.dtype, dtype: torch.dtype | None = None) -> Operand:
        """Decodes the weight for a GEMM that computes in ``source``; ``dtype`` is that of the values."""
        return unpack_operand(self.packed(data), self.cast, 1, self.shape, source, dtype)

    def dense(self, data: Tensor) -> Tensor:
        """Decodes the weight to a matrix, in ``dtype``."""
        values, factor = self.operand(data, torch.float32, torch.float32)
        return (values if factor is None else values * factor).to(self.dtype)


def joined(packed: Packed) -> Tensor:
    """Joins codes, scales of blocks, and the scale of the matrix, as bytes."""
    return torch.cat([packed.data, packed.factor.detach().reshape(1).view(torch.uint8)])
