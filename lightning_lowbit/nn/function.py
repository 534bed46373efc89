"""The autograd function of a linear layer: three GEMMs, six operands, six casts."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_lowbit.nn.casts import CONTRACTION, OPERANDS, SHARED, LinearCasts
from lightning_lowbit.nn.gemm import matmul, mean_times
from lightning_lowbit.nn.sharded.parallel import Parts
from lightning_lowbit.nn.watch import add_gradients_
from lightning_lowbit.quant import Cast, Operand, blend, quantize_operand, rotate, split_mean, through_rounding
from lightning_lowbit.quant.part import Part, absmax_of
from lightning_lowbit.quant.statistics import merge_statistics_, operand_statistics


class MadeWeight(NamedTuple):
    """What a weight is that was quantized before it was gathered, see :mod:`lightning_lowbit.nn.sharded.gather`.

    Attributes:
        made_of: the dtype that it was quantized in.
        dtype: of the operand, which may be narrower than that of the weight.
        factor: float32, 0-d or ``[out_features, 1]``, what the weight is to be multiplied by; None for 1.
        amax: float32, 0-d, its largest magnitude before; None where that is of no consequence.
    """

    made_of: torch.dtype
    dtype: torch.dtype
    factor: Tensor | None
    amax: Tensor | None


class Setup(NamedTuple):
    """How a layer computes: its casts, and what :class:`lightning_lowbit.nn.QuantizedLayer` says of the rest."""

    casts: LinearCasts
    keys: Tensor | None  # of this call: what is given is not filled anew, as the layer's own are
    in_force: Tensor | None
    staged: Tensor | None  # None: amaxes are not recorded
    exact: bool
    native: tuple[str, ...]
    blend: Tensor | None  # None: all the way
    operand_sums: Tensor | None = None  # None: nobody asks, see `lightning_lowbit.nn.watch`
    gradient_sums: Tensor | None = None
    parts: Parts = Parts()
    weight_amax: Tensor | None = None  # float32, 0-d, what the weight is scaled by; None: by its own
    # Of a weight that is quantized already, its MadeWeight: tensors must not be nested. None: it is not.
    made_dtype: torch.dtype | None = None
    made_factor: Tensor | None = None

    def part_of(self, operand: str) -> Part | None:
        """Which part of a larger matrix an operand is, as its GEMM takes it."""
        part: Part | None = getattr(self.parts, operand[-1])
        gemm = operand.partition("_")[0]
        if part is not None and gemm in self.casts.hadamard and part.dim == CONTRACTION[operand]:
            return part.padded(self.casts.hadamard[gemm].size)
        return part


class _LinearFunction(torch.autograd.Function):
    """``Y = X · Wᵀ + b`` and its gradients, each operand by its own cast."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, *setup: Any) -> Tensor:
        how = Setup(*setup)
        casts, (needs_x, needs_w) = how.casts, ctx.needs_input_grad[:2]
        amax_x = _amax(x, how, "fprop_x", *["wgrad_x"] * needs_w)
        is_made = how.made_dtype is not None
        amax_w = how.weight_amax
        if amax_w is None and not is_made:
            amax_w = _amax(w, how, "fprop_w", *["dgrad_w"] * needs_x)

        # Y = X · Wᵀ + b            [tokens, in] · [in, out]
        w_ = _made(w, how) if is_made else _Source(w, amax_w)
        qx, qw, offset = _operands("fprop", _Source(x, amax_x), w_, how, bias)
        y = matmul(qx, qw.t(), offset, x.dtype, fast_accumulation=True)

        # "fprop" keeps what the forward pass used; everything else is quantized anew from the tensor itself.
        for_wgrad = qx if casts.wgrad_x == "fprop" else Operand(x)
        for_dgrad = qw if casts.dgrad_w == "fprop" or _shared("dgrad_w", how) else Operand(w)
        ctx.save_for_backward(
            *(for_wgrad if needs_w else (None, None)),
            amax_x,
            *(for_dgrad if needs_x else (None, None)),
            amax_w,
            x if (needs_x and "fprop_x" in casts.surrogate) or (needs_w and how.gradient_sums is not None) else None,
            w if needs_w and "fprop_w" in casts.surrogate else None,
        )
        # Both are refilled in place for the next micro-batch or step, which may begin before this one's backward pass.
        in_force, blend_ = (None if tensor is None else tensor.clone() for tensor in (how.in_force, how.blend))
        ctx.rest = how._replace(in_force=in_force, blend=blend_), x.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, x_factor, amax_x, w, w_factor, amax_w, forward_x, forward_w = ctx.saved_tensors
        how, dtype = ctx.rest
        needs_x, needs_w, needs_bias = ctx.needs_input_grad[:3]
        reused = torch.float32 if how.exact else dtype
        dx = dw = db = None
        with torch.autocast(g.device.type, enabled=False):
            g_ = _Source(g, _amax(g, how, *["dgrad_g"] * needs_x, *["wgrad_g"] * needs_w))
            if needs_x:
                # dX = dY · W           [tokens, out] · [out, in]
                w, w_factor = _reusable(Operand(w, w_factor), reused)
                w_ = _Source(w, amax_w, w_factor, made=_shared("dgrad_w", how))
                qg, qw, of_mean = _operands("dgrad", g_, w_, how)
                dx = matmul(qg, qw, of_mean, dtype)
                dx = _through_rounding("fprop_x", dx, _Source(forward_x, amax_x), how)
                if _shared("wgrad_g", how):
                    g_ = _Source(qg.values, None, qg.factor, made=True)
            if needs_w:
                # dW = dYᵀ · X          [out, tokens] · [tokens, in]
                x, x_factor = _reusable(Operand(x, x_factor), reused)
                qg, qx, of_mean = _operands("wgrad", g_, _Source(x, amax_x, x_factor), how)
                dw = matmul(qg.t(), qx, of_mean, dtype)
                if how.gradient_sums is not None:
                    add_gradients_(how.gradient_sums, dw, torch.mm(g.to(dtype).t(), forward_x))
                dw = _through_rounding("fprop_w", dw, _Source(forward_w, amax_w), how)
            if needs_bias:
                db = g.sum(0)  # of the unquantized gradient
        return dx, dw, db, *[None] * len(how)


def linear_function(x: Tensor, w: Tensor, bias: Tensor | None, how: Setup) -> Tensor:
    """``x · wᵀ + bias``.

    Args:
        x: ``[tokens, in_features]``, in the dtype of the computation.
        w: ``[out_features, in_features]``, likewise.
        bias: ``[out_features]``, likewise, or None.
        how: the casts of the six operands, and what they need.

    Returns:
        ``[tokens, out_features]``.
    """
    y: Tensor = _LinearFunction.apply(x, w, bias, *how)  # type: ignore[no-untyped-call]
    return y


class _Source(NamedTuple):
    """What an operand is made from: ``values * factor``; ``amax`` is its largest magnitude where that is known.

    ``made``: it is the operand already, quantized for another GEMM.
    """

    values: Any
    amax: Tensor | None = None
    factor: Tensor | None = None
    made: bool = False


def _made(w: Tensor, how: Setup) -> _Source:
    """The weight as an operand, where it is one already."""
    cast = how.casts.fprop_w
    assert isinstance(cast, Cast)
    if cast.scale.source == "delayed":
        _scale_amax("fprop_w", cast, _Source(w, how.weight_amax), how)  # which stages it
    native = cast.grid.gemm_dtype if "fprop" in how.native else None
    return _Source(w.to(torch.float32 if how.exact else native or how.made_dtype), None, how.made_factor, made=True)


def _operands(
    gemm: str, left: _Source, right: _Source, how: Setup, bias: Tensor | None = None
) -> tuple[Operand, Operand, Tensor | None]:
    """Both operands of a GEMM as it takes them, and what is added to it: bias and product with a mean."""
    casts, names = how.casts, how.casts.operands_of(gemm)
    offset = bias
    if gemm in casts.subtract_mean:
        left, right, offset = _split_means(names, left, right, casts, bias)
    if gemm in casts.hadamard:
        transform = _transform(gemm, casts, how.keys, left.values.device)
        left, right = (
            _rotated(name, source, transform, how) for name, source in zip(names, (left, right), strict=True)
        )
    return _operand(names[0], left, how), _operand(names[1], right, how), offset


def _rotated(name: str, source: _Source, transform: Tensor, how: Setup) -> _Source:
    """An operand whose groups along the contraction axis are rotated; a group is rotated by one process."""
    part = getattr(how.parts, name[-1])
    if part is not None and part.dim == CONTRACTION[name]:
        part.check(source.values.shape, len(transform), "groups of a Hadamard transform, of")
    return _Source(rotate(source.values, transform, CONTRACTION[name]))


def _operand(name: str, source: _Source, how: Setup) -> Operand:
    cast = getattr(how.casts, name)
    if source.made or not isinstance(cast, Cast):  # None: the tensor itself; "fprop": as it was left, with its factor
        if source.made and how.operand_sums is not None:
            how.operand_sums[OPERANDS.index(name)].copy_(how.operand_sums[OPERANDS.index(SHARED[name])])
        return Operand(source.values, source.factor)
    key = None if how.keys is None else how.keys[OPERANDS.index(name)]
    amax = _scale_amax(name, cast, source, how)
    native = cast.grid.gemm_dtype if name.partition("_")[0] in how.native else None
    dtype = torch.float32 if how.exact else native
    dim, part = CONTRACTION[name], how.part_of(name)
    quantized = quantize_operand(source.values, cast, dim, key, amax, dtype, part)
    if how.operand_sums is not None:
        seen = operand_statistics(source.values, quantized, cast, dim, amax, part=part)
        merge_statistics_(how.operand_sums[OPERANDS.index(name)], seen)
    return quantized if how.blend is None else blend(source.values, quantized, how.blend, how.exact)


def _scale_amax(name: str, cast: Cast, source: _Source, how: Setup) -> Tensor | None:
    """The amax that a tensor is scaled by: its own, or with delayed scaling that in force, if there is one."""
    if not cast.scale.needs_amax:
        return None
    if cast.scale.source == "current":
        return source.amax
    own = absmax_of(source.values, how.part_of(name)) if source.amax is None else source.amax
    i = OPERANDS.index(name)
    assert how.in_force is not None
    if how.staged is not None:  # a slot keeps the largest of the step; an operand that is shared has two
        others = [other for other, made in SHARED.items() if made == name and _shared(other, how)]
        for slot in (i, *map(OPERANDS.index, others)):
            stage_(how.staged[slot], own)
    return torch.where(how.in_force[i] > 0, how.in_force[i], own)


def stage_(staged: Tensor, amax: Tensor) -> None:
    """Raises what is staged of a step to an amax, in place; what is not finite is dropped."""
    staged.copy_(torch.maximum(staged, amax.nan_to_num(nan=0.0, posinf=0.0)))


def _shared(operand: str, how: Setup) -> bool:
    """Whether an operand is one that another GEMM has made, in the form that this one takes."""
    gemms = (operand.partition("_")[0], SHARED[operand].partition("_")[0])
    return how.casts.shared(operand) and len({gemm in how.native for gemm in gemms}) == 1


def _split_means(
    names: Sequence[str], left: _Source, right: _Source, casts: LinearCasts, bias: Tensor | None
) -> tuple[_Source, _Source, Tensor]:
    """The operands without their means over the tokens, and the product with the mean, of rank one, plus bias.

    ``(A + 1μᵀ) B = A B + 1 (μᵀ B)``. Where both operands have tokens, ``(A + 1νᵀ)ᵀ (B + 1μᵀ) = Aᵀ B + tokens · ν μᵀ``,
    since the columns of A and B then sum to zero; splitting one of them gives the same.
    """
    rest, mean = split_mean(left.values)
    if names[1].endswith("_w"):
        weight = right.values.t() if CONTRACTION[names[1]] == 1 else right.values
        return _Source(rest), right, mean_times(mean, weight, right.factor, bias)
    other_rest, other_mean = split_mean(right.values)
    product = mean.t() * len(rest) * other_mean
    left_split, right_split = (isinstance(getattr(casts, name), Cast) for name in names)
    return _Source(rest) if left_split else left, _Source(other_rest) if right_split else right, product


def _transform(gemm: str, casts: LinearCasts, keys: Tensor | None, device: torch.device) -> Tensor:
    """The rotation of a GEMM. Its signs come from the key of the second operand: that of a weight is all ranks' own."""
    name = casts.operands_of(gemm)[1]
    return casts.hadamard[gemm].matrix(None if keys is None else keys[OPERANDS.index(name)], device)


def _through_rounding(name: str, gradient: Tensor, source: _Source, how: Setup) -> Tensor:
    """The gradient of a tensor from that of its quantized self, in the space in which it was quantized."""
    casts, how = how.casts, how._replace(staged=None)
    if name not in casts.surrogate:
        return gradient  # straight through
    cast, kind = getattr(casts, name), casts.surrogate[name]
    if "fprop" not in casts.hadamard:
        amax, part = _scale_amax(name, cast, source, how), how.part_of(name)
        through = through_rounding(gradient, kind, source.values, cast, 1, amax, part)
    else:
        transform = _transform("fprop", casts, how.keys, gradient.device)
        turned = _Source(rotate(source.values, transform, 1))
        amax, part = _scale_amax(name, cast, turned, how), how.part_of(name)
        rotated = through_rounding(rotate(gradient, transform, 1), kind, turned.values, cast, 1, amax, part)
        through = rotate(rotated, transform.t(), 1)[:, : gradient.shape[1]]
    if how.blend is None:
        return through
    wide = torch.promote_types(gradient.dtype, torch.float32)  # in bfloat16 a λ of 0.999 is 1
    return torch.lerp(gradient.to(wide), through.to(wide), how.blend.to(wide)).to(gradient.dtype)


def _amax(tensor: Tensor, how: Setup, *operands: str) -> Tensor | None:
    """Largest magnitude of a tensor, once for its operands, where one that is made of the tensor as it is needs it."""
    casts = how.casts

    def needed(operand: str) -> bool:
        cast, gemm = getattr(casts, operand), operand.partition("_")[0]
        altered = gemm in casts.hadamard or gemm in casts.subtract_mean
        return isinstance(cast, Cast) and cast.scale.needs_amax and not altered

    needing = [operand for operand in operands if needed(operand)]
    return absmax_of(tensor, getattr(how.parts, needing[0][-1])) if needing else None


def _reusable(operand: Operand, dtype: torch.dtype) -> Operand:
    """An operand for another GEMM, which may contract the axis along which its factor varies."""
    if operand.factor is None or operand.factor.dim() == 0:
        return operand
    return Operand((operand.values.float() * operand.factor).to(dtype))
