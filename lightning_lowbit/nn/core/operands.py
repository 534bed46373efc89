"""The operands of a layer's GEMMs.

An :class:`OperandHow` holds all that follows from the casts, the dtype and the device for one operand: it is made once.
A :class:`Pass` holds the rest, and an :class:`OperandInput` is the tensor that an operand is made from.
"""

from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_lowbit.kernels import amax_of, quantize_operand, rotate
from lightning_lowbit.kernels.gemms import split_rows
from lightning_lowbit.kernels.operands import measures_again, quantize_stack, signs_of
from lightning_lowbit.kernels.windows import Pixels
from lightning_lowbit.nn.casts.linear_casts import LinearCasts
from lightning_lowbit.nn.casts.traits import CONTRACTION, GEMM, INDEX, OPERANDS_OF, SHARED
from lightning_lowbit.nn.core.calls import keys_of_product, keys_of_products
from lightning_lowbit.nn.core.gemm import mean_times
from lightning_lowbit.nn.core.parallel import Shards
from lightning_lowbit.nn.core.watch import Watched, add_gradients_, stage_and_choose
from lightning_lowbit.nn.native.operand import AnyOperand, native_operand
from lightning_lowbit.nn.native.table import BLOCK_SCALED
from lightning_lowbit.quant import Cast, Operand, blend, split_mean, through_rounding
from lightning_lowbit.quant.call import CastCall
from lightning_lowbit.quant.operand import StackOperand
from lightning_lowbit.quant.shard import Shard
from lightning_lowbit.quant.statistics import MAXIMA, SUMS, merge_statistics_, operand_statistics
from lightning_lowbit.units import float32_products, has_units


class PrequantizedWeight(NamedTuple):
    """A weight that was quantized before it was gathered (:mod:`lightning_lowbit.nn.sharded.gather`)."""

    source_dtype: torch.dtype  # in which it was quantized
    dtype: torch.dtype  # of its operand; may be narrower than that of the gathered tensor
    factor: Tensor | None  # of its operand, float32, 0-d or [out_features, 1]; None for 1
    amax: Tensor | None  # float32, 0-d; None if the cast does not need it


class Amaxes(NamedTuple):
    """The amaxes of a pass that come from other passes or layers."""

    in_force: Tensor | None  # float32 [6], which delayed scaling uses
    staged: Tensor | None  # float32 [6], to which it records; None to record nothing
    weight: Tensor | None  # float32, 0-d, which scales the weight; None for its own


class Pass(NamedTuple):
    """The settings of a pass that differ from those of other passes of the layer.

    Attributes:
        number: of one of several products of the call, such as an expert, or of the first one of a stack; None for the
            only one.
        ends: of the rows of each product of a stack, whose matrices x and g are in one and whose weights are
            ``[products, out, in]``; None for one product.
    """

    keys: Tensor | None = None  # int64 [6], of the call: a copy, as those of the layer may be refilled meanwhile
    number: int | None = None
    amaxes: Amaxes | None = None
    blend: Tensor | None = None  # float32, 0-d: λ of annealing; None for fully quantized operands
    watch: Watched | None = None  # what is measured; None for nothing
    gathered: PrequantizedWeight | None = None
    ends: tuple[int, ...] | None = None

    @property
    def operand_sums(self) -> Tensor | None:
        return None if self.watch is None else self.watch.operand_sums

    @property
    def gradient_sums(self) -> Tensor | None:
        return None if self.watch is None else self.watch.gradient_sums

    def with_keys_of_product(self) -> "Pass":
        """Returns the pass with the keys of its product, or ``[6, products]`` of a stack. Forward and backward pass
        each derive them, since another draw of random bits may change the call's keys in place."""
        if self.number is None or self.keys is None:
            return self
        if self.ends is not None:
            return self._replace(keys=keys_of_products(self.keys, self.number, len(self.ends)), number=None)
        return self._replace(keys=keys_of_product(self.keys, self.number), number=None)

    def add_gradients_(self, dw: Tensor, g: Tensor, x: Tensor) -> None:
        """Adds statistics of a weight's gradient, or of those of a stack, to ``gradient_sums``."""
        assert self.gradient_sums is not None
        with float32_products([g.dtype], g.device):
            if self.ends is None:
                add_gradients_(self.gradient_sums, dw, torch.mm(g.t(), x))
                return
            for product, rows, inputs in zip(dw, split_rows(g, self.ends), split_rows(x, self.ends), strict=True):
                add_gradients_(self.gradient_sums, product, torch.mm(rows.t(), inputs))

    def for_backward(self) -> "Pass":
        """Returns the pass with copies of all that is refilled in place, perhaps before this one's backward pass."""
        if self.amaxes is None and self.blend is None:
            return self
        keys, number, amaxes, blend, watch, gathered, ends = self  # faster than _replace
        if amaxes is not None and amaxes.in_force is not None:
            amaxes = Amaxes(amaxes.in_force.clone(), amaxes.staged, amaxes.weight)
        return Pass(keys, number, amaxes, None if blend is None else blend.clone(), watch, gathered, ends)

    def unrecorded(self) -> "Pass":
        """Returns the pass for an operand that another pass has quantized, and recorded, before."""
        return self._replace(amaxes=None if self.amaxes is None else self.amaxes._replace(staged=None), watch=None)


class OperandInput(NamedTuple):
    """The input of an operand: ``values * factor``, which its cast quantizes."""

    values: Any  # a matrix, or a BlockOperand
    amax: Tensor | None = None  # float32, 0-d, of the matrix; None if its cast needs none, or measures it
    factor: Tensor | None = None  # float32, 0-d or one number per row or column; None for 1
    is_operand: bool = False  # whether it is quantized already
    rotation: Tensor | None = None  # signs of a Hadamard transform that the kernel of a cast applies; None for none
    codes: tuple[Tensor, Tensor] | None = None  # saved in place of the matrix, bytes and a factor; None for the matrix
    pixels: Pixels | None = None  # of images, whose patches are the matrix that the values stand for; None for none


class OperandHow:
    """The way in which one operand is made.

    Attributes:
        dim: the dimension that its GEMM contracts.
        cast: its cast; None in high precision, and for ``"fprop"``.
        source_cast: the same with ``"fprop"`` resolved; ``scaling`` is the operand with this cast.
        kind: of a native GEMM that takes codes with the scales of blocks; None for other GEMMs.
        is_grouped: whether it is one of a grouped GEMM, of all products of a stack; ``is_usual``: neither of these.
        dtype: of the values; None for the default of :func:`quantize_operand`.
        signs_index: of the key of the signs of ``transform``, the Hadamard transform of its GEMM.
        cut: the shard that its tensor is, and ``shard``: the same as its GEMM takes it, padded; None if whole.
        draws: whether it has a key. In a compiled graph also where it draws no bits: this use in the forward pass keeps
            the call's keys from being computed in the backward pass, when the layer has those of another call.
        shares_amax: whether its scales need the amax of the tensor itself, which other operands may need, too.
        is_reused: whether another GEMM has quantized it in the form that this one takes.
        reused: the index of the operand that it then is; None for others.
        places: where its amax is staged: at its index, and at those of operands that reuse it.
        requantizes: whether it is quantized from the decoded operand of the forward pass.
        saves_operand: whether the forward pass saves its operand for this one, and not the tensor.
        takes_stacks: whether one call makes the operands of all products of a stack.
    """

    def __init__(
        self,
        name: str,
        casts: LinearCasts,
        dtype: torch.dtype,
        device: torch.device,
        exact: bool,
        native: Mapping[str, str],
        shards: Shards,
        is_grouped: bool,
    ) -> None:
        traits, gemm, cast = casts.traits, GEMM[name], getattr(casts, name)
        self.name, self.index, self.dim = name, INDEX[name], CONTRACTION[name]
        self.cast: Cast | None = cast if isinstance(cast, Cast) else None
        self.source_cast = casts.cast_of(name)
        self.scaled_as = f"fprop_{name[-1]}" if cast == "fprop" else name
        self.scaling = self
        self.kind = native.get(gemm) if native.get(gemm) in BLOCK_SCALED else None
        self.is_grouped, self.is_usual = is_grouped, self.kind is None and not is_grouped
        self.compute_dtype, self.exact = dtype, exact
        codes_dtype = self.source_cast.grid.gemm_dtype if gemm in native and self.source_cast is not None else None
        self.dtype = torch.float32 if exact else codes_dtype
        is_widened = name in traits.transient and device.type == "cpu" and not has_units(dtype, device)
        if self.dtype is None and is_widened and not is_grouped:
            self.dtype = torch.float32  # in which the GEMM computes: nothing is to convert
        self.transform = casts.hadamard.get(gemm)
        self.signs_index = INDEX[OPERANDS_OF[gemm][1]]  # the weight's where there is one, on which ranks agree
        self.cut: Shard | None = getattr(shards, name[-1])
        self.shard = self.cut
        if self.cut is not None and self.transform is not None and self.cut.dim == self.dim:
            self.shard = self.cut.padded(self.transform.size)
        self.draws = name in traits.drawing or torch.compiler.is_compiling()
        self.is_delayed, self.needs_amax = name in traits.delayed, name in traits.scaled_by_amax
        self.shares_amax = self.needs_amax and name not in traits.altered
        self.is_reused = _is_reused(name, casts, native)
        self.reused = INDEX[SHARED[name]] if name in traits.shared else None
        self.places = [self.index, *(INDEX[a] for a, b in SHARED.items() if b == name and _is_reused(a, casts, native))]
        self.requantizes = name in casts.requantize
        takes_tensor = self.kind is not None and not self.requantizes  # codes of fprop lie along another axis
        self.saves_operand = (name in traits.from_fprop or self.is_reused) and not takes_tensor
        self.surrogate = casts.surrogate.get(name)
        is_plain = not self.is_delayed and not self.requantizes and self.surrogate is None
        self.takes_stacks = (is_grouped or self.kind == "cpu") and is_plain and gemm not in casts.subtract_mean

    def operand(self, source: OperandInput, pass_: Pass, shard: Shard | None = None) -> AnyOperand:
        """Quantizes one operand. Returns the input unchanged if it has no cast or is quantized already, and codes plus
        scales if its GEMM is native and block-scaled. ``shard`` stands for the operand's own."""
        cast, watch = self.cast, pass_.watch
        if source.is_operand or cast is None or not self.is_usual:
            if watch is None and source.rotation is None and self.is_usual:
                return Operand(source.values, source.factor)
            return self._stack_operand(source, pass_) if self.is_grouped else self._other_operand(source, pass_)
        if source.rotation is not None and (watch is not None or pass_.blend is not None):
            source = self.rotated(source)
        amax = self.scaling_amax(source, pass_) if self.needs_amax else None
        key = self.key(pass_) if self.draws else None
        quantized = quantize_operand(
            source.values, cast, self.dim, key, amax, self.dtype, shard or self.shard, source.rotation
        )
        if watch is not None and watch.operand_sums is not None:
            self.record(watch.operand_sums, source.values, quantized, amax)
        if pass_.blend is not None:
            quantized = blend(source.values, quantized, pass_.blend, self.exact)
        return quantized if watch is None else watch.observe(self, source, quantized, key, amax)

    def _other_operand(self, source: OperandInput, pass_: Pass) -> AnyOperand:
        """Takes the input as it is; or makes codes, where ``"fprop"`` is quantized again along this contraction."""
        watch, sums = pass_.watch, pass_.operand_sums
        if self.kind != "cpu" or watch is not None or source.is_operand:
            source = self.rotated(source)
        key = amax = None
        if source.is_operand or self.kind is None:
            operand: Any = source.values if self.kind is not None else Operand(source.values, source.factor)
            if source.is_operand and sums is not None and self.reused is not None:
                sums[self.index].copy_(sums[self.reused])
        else:
            assert self.source_cast is not None
            key, amax = self.key(pass_), self.scaling.scaling_amax(source, pass_)
            call = CastCall(self.source_cast, self.dim, key, amax, None, self.shard, source.rotation)
            operand = native_operand(source.values, self.kind, call, pass_.ends, source.pixels)
            if sums is not None and self.cast is not None:
                self.record(sums, source.values, operand.decoded(source.values.dtype, self.dim), amax)
        return operand if watch is None else watch.observe(self, source, operand, key, amax)

    def _stack_operand(self, source: OperandInput, pass_: Pass) -> StackOperand:
        """Makes the operands of all products of a stack for a grouped GEMM."""
        ends, sums = pass_.ends if source.values.dim() == 2 else None, pass_.operand_sums
        if source.is_operand or self.cast is None:
            if source.is_operand and sums is not None and self.reused is not None:
                sums[self.index].copy_(sums[self.reused])
            return StackOperand(source.values, source.factor, None if ends is None else self.ends_of_operand(ends))
        amax = self.scaling_amax(source, pass_)
        call = CastCall(self.cast, self.dim, self.key(pass_), amax, self.dtype, None, source.rotation)
        operand = quantize_stack(source.values, call, ends)
        if sums is not None:
            self._record_stack(pass_, StackOperand(source.values, None, ends), operand, call)
        return operand

    def _record_stack(self, pass_: Pass, source: StackOperand, operand: StackOperand, call: CastCall) -> None:
        """Adds statistics of the operands of products with rows."""
        assert pass_.ends is not None and pass_.operand_sums is not None
        rows = pairwise((0, *pass_.ends))
        for index, ((x, _), quantized, (start, end)) in enumerate(
            zip(source.products(), operand.products(), rows, strict=True)
        ):
            if start < end:
                rotation = call.of_product(index).rotation
                x = x if rotation is None else rotate(x, rotation, self.dim)
                self.record(pass_.operand_sums, x, quantized, call.amax)

    def ends_of_operand(self, ends: tuple[int, ...]) -> tuple[int, ...]:
        """Returns where the rows of operands end: a rotation along rows pads those of each product."""
        group = 1 if self.transform is None or self.dim == 1 else self.transform.size
        return tuple(accumulate(-(-(end - start) // group) * group for start, end in pairwise((0, *ends))))

    def key(self, pass_: Pass) -> Tensor | None:
        """Returns the key of the random bits, int64, 0-d or one for each product of a stack; None if it draws none."""
        return None if pass_.keys is None or not self.draws else pass_.keys[self.index]

    def scaling_amax(self, source: OperandInput, pass_: Pass) -> Tensor | None:
        """Returns the amax that scales the operand: the input's, or with delayed scaling the one in force."""
        if not self.is_delayed:
            return source.amax if self.needs_amax else None
        amax, shard, amaxes = source.amax, self.shard, pass_.amaxes
        if amax is None:
            amax = amax_of(source.values, None if shard is None else shard.spec, source.rotation, self.dim)
        assert amaxes is not None and amaxes.in_force is not None
        return stage_and_choose(amaxes.in_force, amaxes.staged, self.places, amax)

    def signs(self, pass_: Pass, device: torch.device) -> Tensor:
        """Returns the signs of the rotation of its GEMM, from the key of the second operand, so that both agree."""
        assert self.transform is not None
        key = None if pass_.keys is None else pass_.keys[self.signs_index]
        return signs_of(self.transform, key if key is None or pass_.ends is not None else key.reshape(()), device)

    def with_rotation(self, source: OperandInput, signs: Tensor) -> OperandInput:
        """Returns the input with signs to rotate groups along the contraction axis. No process cuts a group."""
        if source.is_operand:  # it was rotated before
            return source
        if self.cut is not None and self.cut.dim == self.dim:
            self.cut.check(source.values.shape, len(signs), "groups of a Hadamard transform, of")
        return OperandInput(source.values, rotation=signs)

    def rotated(self, source: OperandInput) -> OperandInput:
        """Rotates the input, where more than the kernel of a cast reads it."""
        return source if source.rotation is None else OperandInput(rotate(source.values, source.rotation, self.dim))

    def record(self, sums: Tensor, x: Tensor, quantized: Operand, amax: Tensor | None) -> None:
        """Adds statistics of the operand to its row of a layer's ``sums``."""
        assert self.cast is not None
        row = sums[self.index]
        has_blocks = len(row) > len(SUMS) + len(MAXIMA)
        statistics = operand_statistics(x, quantized, self.cast, self.dim, amax, shard=self.shard, of_blocks=has_blocks)
        merge_statistics_(row, statistics)

    def through_rounding(self, gradient: Tensor, x: Tensor | None, amax: Tensor | None, pass_: Pass) -> Tensor:
        """Applies the surrogate derivative of rounding: turns dL/dQ(x) into dL/dx, in the space of the rounding."""
        if self.surrogate is None:
            return gradient  # straight through
        assert self.cast is not None
        pass_, source, quantized = pass_.unrecorded(), OperandInput(x, amax), gradient
        if self.transform is not None:
            signs = self.signs(pass_, gradient.device)
            source, quantized = OperandInput(rotate(source.values, signs, 1)), rotate(gradient, signs, 1)
        amax = self.scaling_amax(source, pass_)
        through = through_rounding(quantized, self.surrogate, source.values, self.cast, 1, amax, self.shard)
        if self.transform is not None:
            through = rotate(through, signs, 1, inverse=True)[:, : gradient.shape[1]]
        if pass_.blend is None:
            return through
        wide = torch.promote_types(gradient.dtype, torch.float32)  # in bfloat16 a λ of 0.999 is 1
        return torch.lerp(gradient.to(wide), through.to(wide), pass_.blend.to(wide)).to(gradient.dtype)


def _is_reused(name: str, casts: LinearCasts, native: Mapping[str, str]) -> bool:
    if name not in casts.traits.shared or not native:
        return name in casts.traits.shared
    kind = native.get(GEMM[name])
    return kind == native.get(GEMM[SHARED[name]]) and kind not in BLOCK_SCALED


def common_amax(
    tensor: Tensor, first: OperandHow | None, second: OperandHow | None, pass_: Pass | None = None
) -> Tensor | None:
    """Measures the amax of a tensor once for the operands made from it. Returns None where they measure their own:
    rotated or centered ones, and those of a small tensor, or of a stack of them."""
    if pass_ is not None and pass_.ends is not None:
        return None
    operand = first if first is not None and first.shares_amax else second
    if operand is None or not operand.shares_amax:
        return None
    if operand.cut is not None:
        return amax_of(tensor, operand.cut.spec)
    return None if not operand.is_delayed and measures_again(tensor) else amax_of(tensor)


class GemmHow:
    """One of the three GEMMs: its operands, and what happens to both before they are quantized."""

    def __init__(self, name: str, operands: Mapping[str, OperandHow], casts: LinearCasts) -> None:
        self.left, self.right = (operands[operand] for operand in OPERANDS_OF[name])
        self.splits_means, self.rotates = name in casts.subtract_mean, name in casts.hadamard

    def operands(
        self, left: OperandInput, right: OperandInput, pass_: Pass, bias: Tensor | None = None
    ) -> tuple[AnyOperand, AnyOperand, Tensor | None]:
        """Quantizes both operands, and returns with them what is added to their product."""
        if self.splits_means:
            left, right, bias = self._split_means(left, right, bias)
        if self.rotates:
            signs = self.right.signs(pass_, left.values.device)
            left, right = self.left.with_rotation(left, signs), self.right.with_rotation(right, signs)
        return self.left.operand(left, pass_), self.right.operand(right, pass_), bias

    def _split_means(
        self, left: OperandInput, right: OperandInput, bias: Tensor | None
    ) -> tuple[OperandInput, OperandInput, Tensor]:
        """Splits off the operands' means over the tokens, whose rank-one product is returned, plus bias."""
        # (A + 1μᵀ) B = A B + 1 (μᵀ B). Where both operands have tokens, (A + 1νᵀ)ᵀ (B + 1μᵀ) = Aᵀ B + tokens · ν μᵀ,
        # since the columns of A and B then sum to zero; splitting one of them gives the same.
        rest, mean = split_mean(left.values)
        if self.right.name.endswith("_w"):
            weight = right.values.t() if self.right.dim == 1 else right.values
            return OperandInput(rest), right, mean_times(mean, weight, right.factor, bias)
        right_rest, right_mean = split_mean(right.values)
        product = mean.t() * len(rest) * right_mean
        left = left if self.left.cast is None else OperandInput(rest)
        return left, right if self.right.cast is None else OperandInput(right_rest), product
