"""The sides of a layer's GEMMs: one class for each thing that x, w or g may be.

A side makes the input of an operand from its tensor, chooses what autograd saves, and makes the input of the operand in
the backward pass from that. :mod:`lightning_lowbit.nn.core.function` does not know which side it calls.

    x: Matrix, Codes, Patches        w: Parameter, Recast, Gathered, FrozenBytes        g: Gradient
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lightning_lowbit.kernels import Packed, pack_operand, quantize_both, rotate, unpack_operand
from lightning_lowbit.kernels.gemms import split_rows
from lightning_lowbit.kernels.operands import empty_product, joined, reads_once
from lightning_lowbit.kernels.products import decode
from lightning_lowbit.kernels.windows import Pixels, Window
from lightning_lowbit.nn.core.operands import OperandHow, OperandInput, Pass, common_amax
from lightning_lowbit.nn.core.saving import Frozen
from lightning_lowbit.nn.core.window import is_pixelwise
from lightning_lowbit.nn.native.grouped import sums_of_rows
from lightning_lowbit.nn.native.operand import AnyOperand, block_operands, unpacked_native_operand, values_of
from lightning_lowbit.quant import Operand
from lightning_lowbit.quant.call import CastCall, factor_shape, operand_dtype
from lightning_lowbit.quant.operand import StackOperand
from lightning_lowbit.quant.packed import packed_bytes

_USUAL = Pass()

# Of a side: values and a factor; the amax of the tensor; the tensor itself, where gradients need it; its shape.
Saved = tuple[Any, Tensor | None, Tensor | None, Tensor | None, torch.Size]


class Matrix:
    """``x`` as a matrix, which fprop takes as ``first`` says, and the backward pass as ``second`` says. Saves it, or
    its operand where the backward pass takes that."""

    def __init__(self, first: OperandHow, second: OperandHow) -> None:
        self.first, self.second, self.dtype = first, second, first.compute_dtype
        self.has_surrogate = first.surrogate is not None

    def forward(self, x: Tensor, pass_: Pass, is_read_again: bool) -> OperandInput:
        """Returns the input of fprop's operand. ``is_read_again``: the backward pass needs the tensor, too."""
        return OperandInput(x, common_amax(x, self.first, self.second if is_read_again else None, pass_))

    def save(self, x: Tensor, source: OperandInput, operand: AnyOperand) -> tuple[Any, Any]:
        """Returns the values and the factor that autograd saves, given all that the forward pass has made of ``x``."""
        return decoded(operand, self.dtype) if self.second.saves_operand else (source.values, None)

    def backward(self, saved: Saved, pass_: Pass) -> OperandInput:
        """Returns the input of the operand in the backward pass."""
        values, factor, amax, _, _ = saved
        if self.second.requantizes:
            return OperandInput(decode(values, factor, self.dtype))
        if factor is not None and factor.dim() > (pass_.ends is not None):  # it would vary along the contraction axis
            values, factor = decode(values, factor, torch.float32 if self.second.exact else self.dtype), None
        return OperandInput(values, amax, factor, self.second.is_reused)

    def gradient(self, gradient: Tensor, saved: Saved, pass_: Pass) -> Tensor:
        """Turns the gradient of fprop's operand into that of the tensor."""
        return self.first.through_rounding(gradient, saved[3], saved[2], pass_)

    def matrix(self, x: Any) -> Any:
        """Returns the tensor as the GEMMs read it."""
        return x


class Codes(Matrix):
    """``x`` as a matrix, whose codes and scales are saved: those of its backward operand, or of fprop's."""

    def __init__(self, first: OperandHow, second: OperandHow, coded: str) -> None:
        super().__init__(first, second)
        self.coded = first if first.name == coded else second

    def forward(self, x: Tensor, pass_: Pass, is_read_again: bool) -> OperandInput:
        source = super().forward(x, pass_, is_read_again)
        if not is_read_again:
            return source
        packed = _packed(self.coded, source, pass_)
        if self.coded is self.second:
            return source._replace(codes=packed)
        return _unpacked(self.coded, packed, x.shape, pass_)._replace(amax=source.amax, codes=packed)

    def save(self, x: Tensor, source: OperandInput, operand: AnyOperand) -> tuple[Any, Any]:
        assert source.codes is not None
        return source.codes

    def backward(self, saved: Saved, pass_: Pass) -> OperandInput:
        data, factor, amax, x, shape = saved
        assert factor is not None
        source = _unpacked(self.coded, Packed(data, factor), shape, pass_)
        if self.coded is self.second:
            return source
        return super().backward((source.values, source.factor, amax, x, shape), pass_)


class Patches(Matrix):
    """``x`` as patches of images ``[N, C, *sizes]``: each pass gathers them anew, or lets a GEMM find their pixels, and
    saves the smaller images."""

    def __init__(self, first: OperandHow, second: OperandHow, window: Window, takes_tensor: bool) -> None:
        super().__init__(first, second)
        self.window = window
        self.may_quantize_pixels = takes_tensor and first.kind in (None, "cpu")

    def forward(self, x: Tensor, pass_: Pass, is_read_again: bool) -> OperandInput:
        return self._gathered(x, pass_, self.second if is_read_again else None)

    def save(self, x: Tensor, source: OperandInput, operand: AnyOperand) -> tuple[Any, Any]:
        return x, None

    def backward(self, saved: Saved, pass_: Pass) -> OperandInput:
        images, _, amax, x, shape = saved
        if not self.second.saves_operand:
            return super().backward((self.matrix(images), None, amax, x, shape), pass_)
        unrecorded = pass_.unrecorded()
        operand = self.first.operand(self._gathered(images, unrecorded, None, amax), unrecorded)
        return super().backward((*decoded(operand, self.dtype), amax, x, shape), pass_)

    def gradient(self, gradient: Tensor, saved: Saved, pass_: Pass) -> Tensor:
        values, factor, amax, x, shape = saved
        patches = super().gradient(gradient, (values, factor, amax, self.matrix(x), shape), pass_)
        return self.window.scatter(patches, shape)

    def matrix(self, x: Any) -> Any:
        return None if x is None else self.window.gather(x)

    def _gathered(self, x: Tensor, pass_: Pass, second: OperandHow | None, amax: Tensor | None = None) -> OperandInput:
        """Gathers the patches for fprop. Quantizes pixels first, which are fewer, where that gives the same values."""
        covers, pixels = self.window.covers(x.shape[2:]), x.movedim(1, -1)
        if covers and amax is None:
            amax = common_amax(pixels, self.first, second)
        is_watched = pass_.watch is not None or pass_.blend is not None
        if covers and self.may_quantize_pixels and not is_watched and is_pixelwise(self.first.cast, x.shape[1]):
            source = OperandInput(pixels.flatten(0, -2), amax)
            if self.first.kind == "cpu":  # its GEMM finds the pixels of patches itself
                return source._replace(pixels=Pixels(self.window, x.shape))
            values, factor = values_of(self.first.operand(source, pass_))
            images = values.view(pixels.shape).movedim(-1, 1)
            return OperandInput(self.window.gather(images), amax, factor, is_operand=True)
        patches = self.window.gather(x)
        return OperandInput(patches, common_amax(patches, self.first, second) if amax is None else amax)


class Parameter(Matrix):
    """``w`` as a matrix, which is converted to the dtype of the computation."""

    def forward(self, x: Tensor, pass_: Pass, is_read_again: bool) -> OperandInput:
        w, amaxes = x.to(self.dtype), pass_.amaxes
        if amaxes is not None and amaxes.weight is not None:
            return OperandInput(w, amaxes.weight)
        return OperandInput(w, common_amax(w, self.first, self.second if is_read_again else None, pass_))


class Recast(Parameter):
    """``w``, saved as the parameter, which lives anyway, and quantized again in the backward pass."""

    def save(self, x: Tensor, source: OperandInput, operand: AnyOperand) -> tuple[Any, Any]:
        return x, None

    def backward(self, saved: Saved, pass_: Pass) -> OperandInput:
        parameter, _, amax, x, shape = saved
        operand = Operand(parameter.to(self.dtype))
        if self.second.saves_operand:
            source = OperandInput(operand.values, amax)
            operand = decoded(self.first.operand(source, pass_.unrecorded()), self.dtype)
        return super().backward((*operand, amax, x, shape), pass_)


class Gathered(Parameter):
    """``w``, which was quantized before it was gathered."""

    def forward(self, x: Tensor, pass_: Pass, is_read_again: bool) -> OperandInput:
        assert pass_.gathered is not None and self.first.cast is not None
        _, dtype, factor, amax = pass_.gathered
        if self.first.is_delayed:
            self.first.scaling_amax(OperandInput(x, amax), pass_)  # stages it
        return OperandInput(x.to(self.first.dtype or dtype), amax, factor, is_operand=True)

    def save(self, x: Tensor, source: OperandInput, operand: AnyOperand) -> tuple[Any, Any]:
        return super().save(x, source, operand) if self.second.saves_operand else (x, None)


class FrozenBytes(Parameter):
    """``w``, which is not trained, as the bytes of codes and scales."""

    def __init__(self, first: OperandHow, second: OperandHow, frozen: Frozen) -> None:
        super().__init__(first, second)
        self.frozen = frozen
        self.takes_codes = second.kind is not None and second.cast is None  # of tiles, which lie along both axes
        self.is_quantized_again = second.cast is not None and not second.is_reused

    def forward(self, x: Tensor, pass_: Pass, is_read_again: bool) -> OperandInput:
        return _unpacked(self.first, self.frozen.packed(x), self.frozen.shape)

    def save(self, x: Tensor, source: OperandInput, operand: AnyOperand) -> tuple[Any, Any]:
        return x, None

    def backward(self, saved: Saved, pass_: Pass) -> OperandInput:
        data, _, amax, x, shape = saved
        if self.takes_codes:
            return _unpacked(self.second, self.frozen.packed(data), self.frozen.shape)
        values, factor = self.frozen.operand(data, self.dtype, self.second.dtype)
        if self.is_quantized_again:
            values, factor = decode(values, factor, self.dtype), None
        return super().backward((values, factor, amax, x, shape), pass_)


class Gradient:
    """``g``, which both GEMMs of the backward pass read; ``is_cast_twice``: a kernel may make both operands at once."""

    def __init__(self, dgrad: OperandHow, wgrad: OperandHow, is_cast_twice: bool) -> None:
        self.dgrad, self.wgrad = dgrad, wgrad
        is_alike = dgrad.kind == wgrad.kind and dgrad.kind != "cpu" and not dgrad.is_grouped
        self.is_cast_twice = is_cast_twice and dgrad.cut is None and is_alike

    def backward(self, g: Tensor, needs_x: bool, needs_w: bool, pass_: Pass) -> tuple[OperandInput, OperandInput]:
        """Returns the inputs of both operands: ``g``, or the operands, where a kernel makes them in one read."""
        amax = common_amax(g, self.dgrad if needs_x else None, self.wgrad if needs_w else None, pass_)
        source = OperandInput(g, amax)
        if not (self.is_cast_twice and needs_x and needs_w and reads_once(g)):
            return source, source
        if pass_.operand_sums is not None or pass_.blend is not None:
            return source, source
        row, column = self.dgrad, self.wgrad
        assert row.cast is not None and column.cast is not None
        keys = row.key(pass_), column.key(pass_)
        if row.kind is not None:
            codes = block_operands(g, (row.cast, column.cast), row.kind, keys, amax)
            return OperandInput(codes[0], is_operand=True), OperandInput(codes[1], is_operand=True)
        pair = quantize_both(g, (row.cast, column.cast), keys, amax, (row.dtype, column.dtype))
        left, right = (OperandInput(values, None, factor, is_operand=True) for values, factor in pair)
        return left, right

    def sum_of_rows(self, g: Tensor, pass_: Pass) -> Tensor:
        """Returns the sum of the rows of ``g``, of a stack ``[products, columns]``."""
        if pass_.ends is None:
            return g.sum(0)
        if self.wgrad.is_grouped and g.dtype == torch.bfloat16:
            return sums_of_rows(g, pass_.ends)
        return torch.stack([rows.sum(0) for rows in split_rows(g, pass_.ends)])

    def reused(self, source: OperandInput, operand: AnyOperand) -> OperandInput:
        """Returns the input of wgrad's operand: ``source``, or the operand of dgrad where wgrad takes the same."""
        if not self.wgrad.is_reused:
            return source
        values, factor = decoded(operand, self.wgrad.compute_dtype)
        return OperandInput(values, None, factor, is_operand=True)


def decoded(operand: AnyOperand, dtype: torch.dtype) -> Operand:
    """Returns an operand as values and a factor, for a computation in ``dtype``."""
    return operand if isinstance(operand, Operand) else operand.decoded(dtype)


def _packed(how: OperandHow, source: OperandInput, pass_: Pass) -> Packed:
    """Quantizes an operand, or those of a stack one after the other, to codes and scales."""
    assert how.cast is not None
    if how.transform is not None:
        source = how.with_rotation(source, how.signs(pass_, source.values.device))
    sums, key, amax = pass_.operand_sums, how.key(pass_), how.scaling_amax(source, pass_)
    call = CastCall(how.cast, how.dim, key, amax, None, how.shard, source.rotation)
    if pass_.ends is None:
        return _packed_one(how, source.values, call, sums)
    matrices = enumerate(StackOperand(source.values, None, pass_.ends).products())
    packed = [_packed_one(how, x, call.of_product(index), sums) for index, (x, _) in matrices]
    return Packed(torch.cat([data for data, _ in packed]), torch.cat([factor.reshape(-1) for _, factor in packed]))


def _packed_one(how: OperandHow, x: Tensor, call: CastCall, sums: Tensor | None) -> Packed:
    if sums is not None and call.rotation is not None:
        x, call = rotate(x, call.rotation, how.dim), call._replace(rotation=None)
    cast, dim, key, amax, _, shard, rotation, _ = call
    packed = pack_operand(x, cast, dim, key, amax, shard, rotation)
    if sums is not None and x.numel():
        how.record(sums, x, unpack_operand(packed, cast, dim, x.shape, x.dtype), amax)
    return packed


def _unpacked(how: OperandHow, packed: Packed, shape: torch.Size, pass_: Pass = _USUAL) -> OperandInput:
    """Returns the operand that :func:`_packed` made of a tensor of ``shape``, or those of a stack."""
    cast = how.source_cast
    assert cast is not None
    if how.transform is not None and (pass_.ends is None or how.dim == 1):  # padded to whole groups
        shape = torch.Size(n + -n % how.transform.size if i == how.dim else n for i, n in enumerate(shape))
    if how.kind is not None:
        return OperandInput(unpacked_native_operand(*packed, cast, how.kind, how.dim, shape), is_operand=True)
    if pass_.ends is not None:
        return _unpacked_stack(how, packed, shape[1], how.ends_of_operand(pass_.ends))
    values, factor = unpack_operand(packed, cast, how.dim, shape, how.compute_dtype, how.dtype)
    return OperandInput(values, None, factor, is_operand=True)


def _unpacked_stack(how: OperandHow, packed: Packed, columns: int, ends: tuple[int, ...]) -> OperandInput:
    cast = how.source_cast
    assert cast is not None
    shapes = [torch.Size((end - start, columns)) for start, end in pairwise((0, *ends))]
    has_rows = cast.scale.two_level == "row"
    factors = torch.split(packed.factor, [shape[1 - how.dim] if has_rows else 1 for shape in shapes])
    codes = torch.split(packed.data, [packed_bytes(shape[0], shape[1], cast, how.dim) for shape in shapes])
    products = []
    for shape, data, factor in zip(shapes, codes, factors, strict=True):
        if shape.numel():
            factor = factor.reshape(factor_shape(shape, cast, how.dim) if has_rows else ())
            one = unpack_operand(Packed(data, factor), cast, how.dim, shape, how.compute_dtype, how.dtype)
        else:
            call = CastCall(cast, how.dim, dtype=how.dtype or operand_dtype(how.compute_dtype, cast))
            one = empty_product(data.new_empty(shape), call)
        products.append(one)
    stack = joined(products, how.dim, is_grouped=True)
    return OperandInput(stack.values, None, stack.factor, is_operand=True)
