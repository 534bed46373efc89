"""The names of operands and GEMMs, and facts about casts that passes ask for."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_lowbit.nn.native.table import BLOCK_SCALED, kinds_of
from lightning_lowbit.quant import Cast
from lightning_lowbit.quant.packed import packing_obstacle

if TYPE_CHECKING:
    from lightning_lowbit.nn.casts.linear_casts import LinearCasts

OPERANDS = ("fprop_x", "fprop_w", "dgrad_g", "dgrad_w", "wgrad_g", "wgrad_x")
GEMMS = ("fprop", "dgrad", "wgrad")

# Operands that may equal one of another GEMM; x would have to be kept for the backward pass by each of its readers.
SHARED = {"dgrad_w": "fprop_w", "wgrad_g": "dgrad_g"}

# The dimension of each operand that its GEMM contracts.
CONTRACTION = dict(zip(OPERANDS, (1, 1, 1, 0, 0, 0), strict=True))

# The operands that are made from the gradient.
OF_G = {"dgrad_g", "wgrad_g"}

# The names of the two operands of a GEMM, the one with tokens in its rows first.
OPERANDS_OF = {gemm: tuple(operand for operand in OPERANDS if operand.startswith(gemm)) for gemm in GEMMS}

# Of each operand, its GEMM and its place in OPERANDS.
GEMM = {operand: operand.partition("_")[0] for operand in OPERANDS}
INDEX = {operand: i for i, operand in enumerate(OPERANDS)}


@dataclass(frozen=True)
class CastTraits:
    """Facts about casts that a pass through a layer asks for, worked out once. Sets hold operands."""

    is_empty: bool  # nothing is quantized
    draws: bool  # results depend on keys
    drawing: frozenset[str]  # those that round stochastically
    delayed: dict[str, Cast]  # the casts with delayed scaling, by operand
    scaled_by_amax: frozenset[str]  # those whose scales need the amax of the whole tensor
    altered: frozenset[str]  # not the tensor itself: of GEMMs with a transform or without means, or quantized again
    from_fprop: frozenset[str]  # made from operands of the forward pass: reused, or quantized again
    shared: frozenset[str]  # equal to the one in SHARED to the bit: the same tensor, by a cast without an axis
    casts_g_twice: bool  # dgrad and wgrad take two casts of g itself, scaled by the same amax
    transient: frozenset[str]  # not kept from the forward pass to the backward pass
    rounding: frozenset[str]  # of GEMMs: one operand differs in bfloat16 from its codes times their scales
    native_kinds: dict[str, tuple[str, ...]]  # by GEMM, those of hardware on quantized elements: keys of NATIVE
    coded: str | None  # whose codes replace x in memory with save='codes'; None where the backward pass needs x itself

    def __new__(cls, *_: Any, **__: Any) -> "CastTraits":
        """Takes the arguments with which earlier versions pickled traits: the casts work them out again."""
        return object.__new__(cls)


def traits_of(casts: "LinearCasts") -> CastTraits:
    """Works out the traits of casts that are not refused."""
    cast_of = {operand: cast for operand in OPERANDS if isinstance(cast := getattr(casts, operand), Cast)}
    keyed = any(hadamard.signs == "keyed" for hadamard in casts.hadamard.values())
    altered = frozenset(name for gemm in (*casts.hadamard, *casts.subtract_mean) for name in OPERANDS_OF[gemm])
    altered |= {*casts.requantize}
    drawing = frozenset(name for name, cast in cast_of.items() if cast.draws)
    blocks = {name: cast.scale.block for name, cast in cast_of.items()}
    without_axis = {name for name, block in blocks.items() if block == "tensor" or isinstance(block, tuple)}
    repeated = {a for a, b in SHARED.items() if a in cast_of and cast_of[a] == cast_of.get(b) and not altered & {a, b}}
    from_fprop = frozenset(name for name in OPERANDS if getattr(casts, name) == "fprop" or name in casts.requantize)
    shared = (repeated & without_axis) - drawing
    sources = {name: cast for name in OPERANDS if (cast := casts.cast_of(name)) is not None}
    rounded = [name for name, cast in sources.items() if cast.round_to_bfloat16 and not cast.fits_bfloat16]
    delayed = {name: cast for name, cast in cast_of.items() if cast.scale.source == "delayed"}
    kinds = {gemm: kinds_of_gemm for gemm in GEMMS if (kinds_of_gemm := native_kinds(casts, gemm))}
    return CastTraits(
        is_empty=all(getattr(casts, operand) is None for operand in OPERANDS),
        draws=keyed or len(drawing) > 0,
        drawing=drawing,
        delayed=delayed,
        scaled_by_amax=frozenset(name for name, cast in cast_of.items() if cast.scale.needs_amax),
        altered=altered,
        from_fprop=from_fprop,
        shared=frozenset(shared),
        casts_g_twice=cast_of.keys() >= OF_G and not OF_G & (altered | shared | delayed.keys()),
        transient=frozenset(OPERANDS) - {f"fprop_{name[-1]}" for name in from_fprop | shared},
        rounding=frozenset(GEMM[name] for name in rounded),
        native_kinds=kinds,
        coded=_coded(casts),
    )


def _coded(casts: "LinearCasts") -> str | None:
    name = "fprop_x" if casts.wgrad_x == "fprop" or "wgrad_x" in casts.requantize else "wgrad_x"
    cast = getattr(casts, name)
    if not isinstance(cast, Cast) or packing_obstacle(cast) is not None or "fprop_x" in casts.surrogate:
        return None
    # Means are taken of x itself; a rotated operand of the forward pass is not the one of another GEMM.
    altered = GEMM[name] in casts.subtract_mean or (name == "fprop_x" and "fprop" in casts.hadamard)
    return None if altered or ("wgrad" in casts.subtract_mean) else name


def native_kinds(casts: "LinearCasts", gemm: str) -> tuple[str, ...]:
    """Returns the kinds of native GEMMs that serve, keys of :data:`lightning_lowbit.nn.native.table.NATIVE`."""
    operands = OPERANDS_OF[gemm]
    pair = [cast for cast in map(casts.cast_of, operands) if cast is not None]
    if len(pair) < 2:
        return ()
    kinds = kinds_of(pair, [CONTRACTION[operand] for operand in operands])
    return tuple(kind for kind in kinds if _takes_reused(casts, gemm, kind))


def _takes_reused(casts: "LinearCasts", gemm: str, kind: str) -> bool:
    """Returns whether a native GEMM takes the operands of the forward pass that a GEMM reuses."""
    for operand in OPERANDS_OF[gemm]:
        cast = casts.cast_of(operand)
        if getattr(casts, operand) != "fprop" or cast is None:
            continue
        if kind in BLOCK_SCALED:
            # It is quantized again, along the other axis, which gives the values of the forward pass only with tiles
            # that round to nearest, and without a mean, whose product takes those values as they are.
            is_same = isinstance(cast.scale.block, tuple) and cast.rounding == "nearest"
            if not is_same or cast.scale.source == "delayed" or gemm in casts.subtract_mean:
                return False
        # A reused operand has the forward pass's dtype. Its scales per row would vary along this contraction.
        elif cast.scale.block == "row" or kind not in native_kinds(casts, "fprop"):
            return False
    return True
