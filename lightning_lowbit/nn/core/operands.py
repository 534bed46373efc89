"""The operands of a layer's GEMMs: what each is made from, and by which cast."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_lowbit.kernels import amax_of, quantize_both, quantize_operand, rotate
from lightning_lowbit.kernels.operands import measures_again, reads_once
from lightning_lowbit.nn.casts.linear_casts import LinearCasts
from lightning_lowbit.nn.casts.plan import CONTRACTION, GEMM, INDEX, OF_G, OPERANDS_OF, SHARED
from lightning_lowbit.nn.core.calls import keys_of_part
from lightning_lowbit.nn.core.frozen import Frozen
from lightning_lowbit.nn.core.gemm import is_slow, mean_times
from lightning_lowbit.nn.core.parallel import Shards
from lightning_lowbit.nn.core.source import Source
from lightning_lowbit.nn.core.watch import stage_and_choose
from lightning_lowbit.nn.core.window import Window
from lightning_lowbit.nn.native.operand import BlockOperand, block_operand
from lightning_lowbit.quant import Cast, Operand, blend, split_mean, through_rounding
from lightning_lowbit.quant.shard import Shard
from lightning_lowbit.quant.statistics import MAXIMA, SUMS, merge_statistics_, operand_statistics


class PrequantizedWeight(NamedTuple):
    """A weight that was quantized, in ``source_dtype``, before it was gathered
    (:mod:`lightning_lowbit.nn.sharded.gather`). Its operand has ``dtype``, which may be narrower than that of the
    gathered tensor, and ``factor``, float32, 0-d or ``[out_features, 1]``, or None for 1. ``amax``, float32, 0-d, is
    None if the cast does not need it."""

    source_dtype: torch.dtype
    dtype: torch.dtype
    factor: Tensor | None
    amax: Tensor | None


class Settings(NamedTuple):
    """How one pass of a layer is computed.

    Attributes:
        keys: int64 ``[6]``, a copy: the layer's own keys may be refilled before the backward pass.
        in_force, staged: float32 ``[6]``, amaxes for delayed scaling, and those of this pass (None to record nothing).
        exact: computes float32 GEMMs over exact operands.
        native: the GEMMs that the device computes natively.
        blend: float32, 0-d: λ of annealing; None for fully quantized operands.
        operand_sums, gradient_sums: rows of a :class:`~lightning_lowbit.nn.core.watch.Watch`; None if unmeasured.
        shards: which of x, w and g are shards of global matrices.
        weight_amax: float32, 0-d, scales the weight; None for its own amax.
        recasts: keeps the parameter for the backward pass, and converts it again, instead of what was made of it.
        packs: keeps what wgrad needs of x as codes and scales.
        frozen: what the bytes of a frozen weight are; None for a matrix.
        window: of a convolution: x are images, whose patches the GEMMs take; None where x is a matrix.
        part: index of one of several products of a call, such as an expert; all keep the keys of the call for the
            backward pass, where another draw may change them in place. None for the only one.
        dtype: of the computation; None for that of x.
        layer: what errors of the backward pass call the layer.
    """

    casts: LinearCasts
    keys: Tensor | None
    in_force: Tensor | None
    staged: Tensor | None
    exact: bool
    native: tuple[str, ...]
    blend: Tensor | None
    operand_sums: Tensor | None
    gradient_sums: Tensor | None
    shards: Shards
    weight_amax: Tensor | None
    prequantized: PrequantizedWeight | None
    recasts: bool = False
    packs: bool = False
    frozen: Frozen | None = None
    window: Window | None = None
    part: int | None = None
    dtype: torch.dtype | None = None
    layer: str = "(without a name)"

    def of_part(self) -> "Settings":
        """With the keys of the product that this is."""
        if self.part is None or self.keys is None:
            return self
        return self._replace(keys=keys_of_part(self.keys, self.part), part=None)

    def key_of(self, operand: str) -> Tensor | None:
        """The key of an operand's random bits, int64, 0-d. In a compiled graph also of one that draws none: this use in
        the forward pass keeps the call's keys from being made in the backward pass, for another call."""
        if self.keys is None or not (operand in self.casts.plan.drawing or torch.compiler.is_compiling()):
            return None
        return self.keys[INDEX[operand]]

    def shard_of(self, operand: str) -> Shard | None:
        """The shard that an operand is, padded as its GEMM takes it; None if it is whole."""
        shard: Shard | None = getattr(self.shards, operand[-1])
        hadamard = self.casts.hadamard
        if shard is not None and GEMM[operand] in hadamard and shard.dim == CONTRACTION[operand]:
            return shard.padded(hadamard[GEMM[operand]].size)
        return shard

    def dtype_of(self, operand: str, cast: Cast) -> torch.dtype | None:
        """The dtype in which the GEMM takes an operand; None for the default of `quantize_operand`."""
        if self.exact:
            return torch.float32
        return cast.grid.gemm_dtype if GEMM[operand] in self.native else None

    @property
    def packed(self) -> str | None:
        """The operand of x that is kept as codes and scales; None where x, or its operand, is kept."""
        if not self.packs or self.blend is not None or self.gradient_sums is not None:
            return None
        if self.keys is None and self.casts.plan.draws:  # so there will be no backward pass
            return None
        packed = self.casts.plan.packed
        if packed == "fprop_x" and self.native and (self.takes_codes("fprop_x") or self.takes_codes("wgrad_x")):
            return None  # codes of the forward pass lie along its contraction
        return packed

    def unrecorded(self) -> "Settings":
        """For an operand that another pass has quantized, and recorded, before."""
        return self._replace(staged=None, operand_sums=None)

    def reuses(self, operand: str) -> bool:
        """Whether another GEMM has quantized the operand in the form that this one takes."""
        if operand not in self.casts.plan.shared or not self.native:
            return operand in self.casts.plan.shared
        alike = (GEMM[operand] in self.native) == (GEMM[SHARED[operand]] in self.native)
        return alike and not self.takes_codes(operand)

    def takes_codes(self, operand: str) -> bool:
        """Whether the GEMM of an operand is native and takes codes with the scales of blocks."""
        return GEMM[operand] in self.native and GEMM[operand] in self.casts.plan.block_scaled

    def kept(self, operand: str, quantized: Operand | BlockOperand, tensor: Tensor) -> Operand:
        """What the forward pass keeps for an operand of the backward pass, given that of its own: the tensor for a GEMM
        that takes codes, which lie along another axis, and no codes for one that does not."""
        if self.takes_codes(operand) and operand not in self.casts.requantize:
            return Operand(tensor)
        return quantized.decoded(tensor.dtype) if isinstance(quantized, BlockOperand) else quantized


def operands(
    gemm: str, left: Source, right: Source, settings: Settings, bias: Tensor | None = None
) -> tuple[Operand | BlockOperand, Operand | BlockOperand, Tensor | None]:
    casts, names = settings.casts, OPERANDS_OF[gemm]
    if gemm in casts.subtract_mean:
        left, right, bias = _split_means(names, left, right, casts, bias)
    if gemm in casts.hadamard:
        signs = signs_of(gemm, settings, left.values.device)
        left, right = (
            source.rotated(name, signs, getattr(settings.shards, name[-1]))
            for name, source in zip(names, (left, right), strict=True)
        )
    return operand_of(names[0], left, settings), operand_of(names[1], right, settings), bias


def operand_of(name: str, source: Source, settings: Settings) -> Operand | BlockOperand:
    """An operand by its cast, or its source where there is none; codes for a native GEMM that takes them."""
    if settings.native and settings.takes_codes(name):
        return _codes(name, source.turned(name), settings)
    cast, sums = getattr(settings.casts, name), settings.operand_sums
    if sums is not None or settings.blend is not None or not isinstance(cast, Cast):
        source = source.turned(name)
    if source.is_operand or not isinstance(cast, Cast):  # None: the tensor itself; "fprop": the operand of that GEMM
        if source.is_operand and sums is not None and name in settings.casts.plan.shared:
            sums[INDEX[name]].copy_(sums[INDEX[SHARED[name]]])
        return Operand(source.values, source.factor)
    amax, dtype = scale_amax(name, source, settings), settings.dtype_of(name, cast)
    if dtype is None and name in settings.casts.plan.transient and is_slow(source.values):
        dtype = torch.float32  # in which the GEMM computes: nothing is to convert
    dim, shard = CONTRACTION[name], settings.shard_of(name)
    key, rotation = settings.key_of(name), source.rotation
    quantized = quantize_operand(source.values, cast, dim, key, amax, dtype, shard, rotation)
    if sums is not None:
        record_statistics(sums[INDEX[name]], source.values, quantized, cast, dim, amax, shard)
    return quantized if settings.blend is None else blend(source.values, quantized, settings.blend, settings.exact)


def sources_of_gradient(source: Source, settings: Settings) -> tuple[Source, Source]:
    """What dgrad and wgrad make their operands of g from: g, or the operands, where a kernel makes both in one read."""
    if not settings.casts.plan.casts_g_twice or not reads_once(source.values) or settings.shards.g is not None:
        return source, source
    if settings.operand_sums is not None or settings.blend is not None or any(map(settings.takes_codes, OF_G)):
        return source, source
    row, column = settings.casts.dgrad_g, settings.casts.wgrad_g
    assert isinstance(row, Cast) and isinstance(column, Cast)
    pair, keys = (row, column), (settings.key_of("dgrad_g"), settings.key_of("wgrad_g"))
    dtypes = settings.dtype_of("dgrad_g", row), settings.dtype_of("wgrad_g", column)
    if (both := quantize_both(source.values, pair, keys, source.amax, dtypes)) is None:
        return source, source
    of_dgrad, of_wgrad = (Source(values, None, factor, is_operand=True) for values, factor in both)
    return of_dgrad, of_wgrad


def record_statistics(
    sums: Tensor, x: Tensor, quantized: Operand, cast: Cast, dim: int, amax: Tensor | None, shard: Shard | None
) -> None:
    of_blocks = len(sums) > len(SUMS) + len(MAXIMA)
    merge_statistics_(sums, operand_statistics(x, quantized, cast, dim, amax, shard=shard, of_blocks=of_blocks))


def _codes(name: str, source: Source, settings: Settings) -> BlockOperand:
    """An operand as codes and scales; "fprop" is quantized again, as in the forward pass but along this contraction."""
    if source.is_operand:
        codes: BlockOperand = source.values
        return codes
    own = isinstance(getattr(settings.casts, name), Cast)
    cast, sums = settings.casts.cast_of(name), settings.operand_sums
    assert cast is not None
    amax = scale_amax(name if own else f"fprop_{name[-1]}", source, settings)
    dim, shard, kind = CONTRACTION[name], settings.shard_of(name), settings.casts.plan.native_gemms[GEMM[name]]
    codes = block_operand(source.values, cast, kind, dim, settings.key_of(name), amax, shard)
    if sums is not None and own:
        quantized = codes.decoded(source.values.dtype, dim)
        record_statistics(sums[INDEX[name]], source.values, quantized, cast, dim, amax, shard)
    return codes


def amax_for(tensor: Tensor, settings: Settings, *operands: str) -> Tensor | None:
    """The amax of a tensor, measured once for all operands that need it; None where they measure their own: rotated or
    centered ones, and those of a small tensor."""
    plan = settings.casts.plan
    for operand in operands:
        if operand in plan.scaled_by_amax and operand not in plan.altered:
            shard: Shard | None = getattr(settings.shards, operand[-1])
            if shard is None and operand not in plan.delayed and measures_again(tensor):
                return None
            return amax_of(tensor, None if shard is None else shard.spec)
    return None


def scale_amax(name: str, source: Source, settings: Settings) -> Tensor | None:
    """The amax that scales a tensor: its own, or with delayed scaling the one in force."""
    plan = settings.casts.plan
    if name not in plan.delayed:
        return source.amax if name in plan.scaled_by_amax else None
    shard, own = settings.shard_of(name), source.amax
    if own is None:
        own = amax_of(source.values, None if shard is None else shard.spec, source.rotation, CONTRACTION[name])
    # An operand that another GEMM reuses is staged for both.
    reusing = [other for other, quantized in SHARED.items() if quantized == name and settings.reuses(other)]
    assert settings.in_force is not None
    return stage_and_choose(settings.in_force, settings.staged, [INDEX[each] for each in (name, *reusing)], own)


def _split_means(
    names: Sequence[str], left: Source, right: Source, casts: LinearCasts, bias: Tensor | None
) -> tuple[Source, Source, Tensor]:
    """The operands without their means over the tokens, and the rank-one product with the mean, plus bias.

    ``(A + 1μᵀ) B = A B + 1 (μᵀ B)``. Where both operands have tokens, ``(A + 1νᵀ)ᵀ (B + 1μᵀ) = Aᵀ B + tokens · ν μᵀ``,
    since the columns of A and B then sum to zero; splitting one of them gives the same.
    """
    rest, mean = split_mean(left.values)
    if names[1].endswith("_w"):
        weight = right.values.t() if CONTRACTION[names[1]] == 1 else right.values
        return Source(rest), right, mean_times(mean, weight, right.factor, bias)
    other_rest, other_mean = split_mean(right.values)
    product = mean.t() * len(rest) * other_mean
    left_split, right_split = (isinstance(getattr(casts, name), Cast) for name in names)
    return Source(rest) if left_split else left, Source(other_rest) if right_split else right, product


def signs_of(gemm: str, settings: Settings, device: torch.device) -> Tensor:
    """The signs of the rotation of a GEMM, from the key of its second operand, so that ranks agree for a weight."""
    i = INDEX[OPERANDS_OF[gemm][1]]
    return settings.casts.hadamard[gemm].diagonal(None if settings.keys is None else settings.keys[i], device)


def through_rounding_of(name: str, gradient: Tensor, source: Source, settings: Settings) -> Tensor:
    """The gradient of a tensor from that of its quantized values, in the space in which it was quantized."""
    casts = settings.casts
    if name not in casts.surrogate:
        return gradient  # straight through
    settings = settings.unrecorded()
    cast, quantized = getattr(casts, name), gradient
    if is_rotated := "fprop" in casts.hadamard:
        transform = signs_of("fprop", settings, gradient.device)
        source, quantized = Source(rotate(source.values, transform, 1)), rotate(gradient, transform, 1)
    amax, shard = scale_amax(name, source, settings), settings.shard_of(name)
    through = through_rounding(quantized, casts.surrogate[name], source.values, cast, 1, amax, shard)
    if is_rotated:
        through = rotate(through, transform, 1, inverse=True)[:, : gradient.shape[1]]
    if settings.blend is None:
        return through
    wide = torch.promote_types(gradient.dtype, torch.float32)  # in bfloat16 a λ of 0.999 is 1
    return torch.lerp(gradient.to(wide), through.to(wide), settings.blend.to(wide)).to(gradient.dtype)
