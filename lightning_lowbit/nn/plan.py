"""The names of operands and GEMMs, and what a pass through a layer needs to know of its casts, worked out once."""

from typing import TYPE_CHECKING, NamedTuple

import torch

from lightning_lowbit.quant import Cast

if TYPE_CHECKING:
    from lightning_lowbit.nn.casts import LinearCasts

OPERANDS = ("fprop_x", "fprop_w", "dgrad_g", "dgrad_w", "wgrad_g", "wgrad_x")
GEMMS = ("fprop", "dgrad", "wgrad")

# Operands that may equal one of another GEMM. x is not among them: a quantized copy would have to be kept for the
# backward pass by each layer that reads it.
SHARED = {"dgrad_w": "fprop_w", "wgrad_g": "dgrad_g"}

# The dimension of each operand that its GEMM contracts.
CONTRACTION = dict(zip(OPERANDS, (1, 1, 1, 0, 0, 0), strict=True))

# The names of the two operands of a GEMM, the one with tokens in its rows first.
OPERANDS_OF = {gemm: tuple(operand for operand in OPERANDS if operand.startswith(gemm)) for gemm in GEMMS}

# Of each operand, its GEMM and its place in OPERANDS.
GEMM = {operand: operand.partition("_")[0] for operand in OPERANDS}
INDEX = {operand: i for i, operand in enumerate(OPERANDS)}


class Plan(NamedTuple):
    """What a pass through a layer needs to know of its casts.

    Attributes:
        is_empty: whether nothing is quantized.
        draws: whether random bits depend on keys.
        delayed: the casts with delayed scaling, by operand.
        scaled_by_amax: the operands whose scales need the amax of the whole tensor.
        altered: the operands of GEMMs with a transform, or without means, or that are quantized again: they are not the
            tensor itself.
        kept: the operands that are made from those of the forward pass: reused, or quantized again.
        shared: the operands that equal the one in ``SHARED`` to the bit: the same tensor, by a cast without an axis.
        native_gemms: the GEMMs that hardware may compute on quantized elements, and how.
    """

    is_empty: bool
    draws: bool
    delayed: dict[str, Cast]
    scaled_by_amax: frozenset[str]
    altered: frozenset[str]
    kept: frozenset[str]
    shared: frozenset[str]
    native_gemms: dict[str, str]


def plan_of(casts: "LinearCasts") -> Plan:
    """The plan of casts; that of combinations which have no meaning has none, either."""
    own = {operand: cast for operand in OPERANDS if isinstance(cast := getattr(casts, operand), Cast)}
    keyed = any(hadamard.signs == "keyed" for hadamard in casts.hadamard.values())
    altered = frozenset(name for gemm in (*casts.hadamard, *casts.subtract_mean) for name in OPERANDS_OF[gemm])
    altered |= {*casts.requantize}
    nearest = {name for name, cast in own.items() if not cast.draws}
    without_axis = {name for name, c in own.items() if c.scale.block == "tensor" or isinstance(c.scale.block, tuple)}
    repeated = {a for a, b in SHARED.items() if a in own and own[a] == own.get(b) and not altered & {a, b}}
    kinds = {gemm: native_kind(casts, gemm) for gemm in GEMMS}
    return Plan(
        is_empty=all(getattr(casts, operand) is None for operand in OPERANDS),
        draws=keyed or len(nearest) < len(own),
        delayed={name: cast for name, cast in own.items() if cast.scale.source == "delayed"},
        scaled_by_amax=frozenset(name for name, cast in own.items() if cast.scale.needs_amax),
        altered=altered,
        kept=frozenset(name for name in OPERANDS if getattr(casts, name) == "fprop" or name in casts.requantize),
        shared=frozenset(repeated & nearest & without_axis),
        native_gemms={gemm: kind for gemm, kind in kinds.items() if kind is not None},
    )


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
