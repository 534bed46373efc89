"""Which GEMMs of a layer hardware can compute on the quantized elements themselves."""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from lightning_lowbit.nn.casts import LinearCasts


def native_kind(casts: "LinearCasts", gemm: str) -> str | None:
    """The arithmetic of a GEMM on quantized elements, ``"fp8"`` or ``"int8"`` (also for ternary); None if there is
    none. Scales must be per tensor or row. In FP8, at most one operand is in E5M2; with scales per row, the second one
    is in E4M3, because CUTLASS, which torch mostly uses then, has no other kernel."""
    operands = casts.operands_of(gemm)
    pair = [cast for cast in map(casts.cast_of, operands) if cast is not None and not cast.scale.per_block]
    if len(pair) < 2:
        return None
    for operand, cast in zip(operands, pair, strict=True):
        # A reused operand has the forward pass's dtype. Its scales per row would vary along this contraction.
        reused = getattr(casts, operand) == "fprop"
        if reused and (cast.scale.block == "row" or not native_kind(casts, "fprop")):
            return None
    if all(cast.grid.gemm_dtype == torch.int8 for cast in pair):
        # Integers have no NaN: one in the tensor must appear in its scale, and a delayed scale would hide it.
        return "int8" if all(cast.scale.source == "current" for cast in pair) else None
    left, right = (cast.element for cast in pair)
    if not {left, right} <= {"e4m3", "e5m2"}:
        return None
    rows = any(cast.scale.block == "row" for cast in pair)
    return "fp8" if right == "e4m3" or (left == "e4m3" and not rows) else None
