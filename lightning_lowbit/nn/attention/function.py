"""The autograd function of attention: two products, each with three GEMMs and six operands.

    S = Q · Kᵀ               P = softmax(scale · S + mask)          O = P · V        (of P with dropout, if any)
    qk: x = Q, w = K         pv: x = P, w = Vᵀ

    dP = dO · Vᵀ             dV = Pᵀ · dO                           dgrad and wgrad of pv, with g = dO
    dS = P ∘ (dP - δ)        δ = Σ P ∘ dP over keys
    dQ = scale · dS · K      dK = scale · dSᵀ · Q                   dgrad and wgrad of qk, with g = dS

P is made in tiles of queries, with all keys, and again in the backward pass (as in FlashAttention, arXiv 2205.14135),
so that there is never a whole matrix of scores. Operands are in the dtype of the computation before they are cast;
scores, P, dP and dS are float32 until then.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_lowbit.compilation import counted_for
from lightning_lowbit.kernels.products import decode
from lightning_lowbit.nn.core.function import How
from lightning_lowbit.nn.core.gemm import no_autocast
from lightning_lowbit.nn.core.inputs import first_derivative, mark
from lightning_lowbit.nn.core.operands import OperandHow, OperandInput, Pass
from lightning_lowbit.nn.native.operand import values_of
from lightning_lowbit.quant import Operand
from lightning_lowbit.quant.rounding import uniform
from lightning_lowbit.quant.shard import Shard, amax_of


class ProductPass(NamedTuple):
    """A pass of one of attention's two products: its ``How``, its ``Pass``, and the ``id`` of the product's layer.

    It makes operands of many matrices at once, one for each head of each sequence, by the casts of the six operands:

        x and g    [rows, n, features]      of n matrices [rows, features]
        w          [n, out, in]             of n matrices [out, in]

    Operands are ``[n, rows, features]`` and ``[n, out, in]``. A cast meets one matrix: for a contraction along features
    ``[rows * n, features]`` or ``[n * out, in]``, for one along rows ``[rows, n * features]`` or ``[out, n * in]``.
    Scales of tensors are those of all n matrices; random bits depend on an element's place in that one matrix.
    """

    how: How
    pass_: Pass
    layer: int

    def unrecorded(self) -> "ProductPass":
        """Returns a pass for operands that the forward pass has recorded."""
        return self._replace(pass_=self.pass_.unrecorded())

    def row_operand(self, name: str, x: Tensor, amax: Tensor | None = None, tile: Any = None) -> Operand:
        """Quantizes an operand of x or g ``[rows, n, features]`` by an ``amax`` (float32, 0-d; None for its own).

        ``tile`` tells where ``x`` is a tile of the rows: the index of its first row, the rows of a tile, and all rows.
        """
        operand, (rows, n, features) = self.how.operands[name], x.shape
        along_features = operand.dim == 1
        flat = x.reshape(rows * n, features) if along_features else x.reshape(rows, n * features)
        shard = None
        if tile is not None and operand.cast is not None and operand.cast.draws:
            first, step, size = (number * n if along_features else number for number in tile)
            shard = Shard("", 0, first, step, size)
        values, factor = self._quantized(operand, flat, amax, shard)
        if along_features:
            values = values.view(rows, n, -1).transpose(0, 1)
            return Operand(values, _view(factor, rows, n, 1, transposed=True))
        return Operand(values.view(len(values), n, features).transpose(0, 1), _view(factor, n, 1, features))

    def weight_operand(self, name: str, w: Tensor) -> Operand:
        """Quantizes an operand of w ``[n, out, features]``, padded inside so that no two matrices lie in one block."""
        operand, (n, out, features) = self.how.operands[name], w.shape
        if operand.dim == 1:
            w = _padded(w, 1, operand)
            values, factor = self._quantized(operand, w.reshape(-1, features))
            result = Operand(values.view(n, w.shape[1], -1), _view(factor, n, -1, 1))
            return cut_operand(result, 1, 0, out, w.shape[1])
        w = _padded(w, 2, operand).transpose(0, 1)
        values, factor = self._quantized(operand, w.reshape(out, -1))
        result = Operand(values.view(len(values), n, -1).transpose(0, 1), _view(factor, n, 1, w.shape[-1]))
        return cut_operand(result, 2, 0, features, w.shape[-1])

    def _quantized(
        self, operand: OperandHow, x: Tensor, amax: Tensor | None = None, shard: Shard | None = None
    ) -> Operand:
        source = OperandInput(x if operand.cast is None else x.contiguous(), amax)
        if operand.transform is not None:
            source = operand.with_rotation(source, operand.signs(self.pass_, x.device))
        return values_of(operand.operand(source, self.pass_, shard))

    def multiply(self, gemm: str, left: Operand, right: Operand, dtype: torch.dtype, again: bool = False) -> Tensor:
        """Multiplies ``[n, rows, k]`` and ``[n, k, columns]``, with sums and result in ``dtype``, float32 or wider.

        It is counted as a GEMM of this name, maybe ``again`` (:func:`lightning_lowbit.compilation.counted_for`).
        """
        a, b = left.values, right.values
        with counted_for(self.layer, gemm, again):
            if a.is_cuda and dtype == torch.float32 and a.dtype == b.dtype == torch.bfloat16:
                product = torch.bmm(a, b, out_dtype=torch.float32)
            else:
                product = torch.bmm(a.to(dtype), b.to(dtype))
        for factor in (left.factor, right.factor):
            product = product if factor is None else product * factor
        return product


def decoded(operand: Operand) -> Operand:
    """Multiplies a factor of rows into the values, in float32, for a contraction along them."""
    if operand.factor is None or not operand.factor.dim():
        return operand
    return Operand(decode(operand.values, operand.factor, torch.float32))


def cut_operand(operand: Operand, dim: int, start: int, end: int, size: int) -> Operand:
    """Cuts the rows (``dim=1``) or columns (2) of an operand from ``start`` to ``end``, unless these are all ``size``:
    uncut, it keeps the padding that a rotation added."""
    if end - start == size:
        return operand
    factor = operand.factor
    if factor is not None and factor.dim() and factor.shape[dim] > 1:
        factor = factor.narrow(dim, start, end - start)
    return Operand(operand.values.narrow(dim, start, end - start), factor)


def transposed(operand: Operand) -> Operand:
    factor = operand.factor
    return Operand(operand.values.mT, factor if factor is None or not factor.dim() else factor.mT)


def _view(factor: Tensor | None, *shape: int, transposed: bool = False) -> Tensor | None:
    if factor is None or not factor.dim():
        return factor
    return factor.view(shape).transpose(0, 1) if transposed else factor.view(shape)


def _padded(w: Tensor, dim: int, operand: OperandHow) -> Tensor:
    block = None if operand.cast is None else operand.cast.scale.block
    missing = -w.shape[dim] % block[dim - 1] if isinstance(block, tuple) else 0
    return F.pad(w, (0, missing) if dim == 2 else (0, 0, 0, missing)) if missing else w


class Attention(NamedTuple):
    """Holds the arguments of one call: both products, the scale of the scores, whether queries see no later keys, the
    number of queries in a tile, the share of P that is dropped, and the key (int64, 0-d) of bits that decide which."""

    qk: ProductPass
    pv: ProductPass
    scale: float
    causal: bool
    tile: int
    dropout: float = 0.0
    key: Tensor | None = None

    def tiles(self, queries: int) -> list[tuple[int, int]]:
        return [(start, min(start + self.tile, queries)) for start in range(0, queries, self.tile)]

    def keys_seen(self, end: int, keys: int) -> int:
        """Returns how many keys queries before ``end`` may see: a rotation mixes keys with later ones."""
        rotates = self.qk.how.casts.hadamard or self.pv.how.casts.hadamard
        return min(end, keys) if self.causal and not rotates else keys

    def dropped(self, p: Tensor, start: int) -> Tensor:
        """Applies dropout to P, or to what is multiplied with it, ``[n, queries, keys]`` from a query on."""
        if self.key is None:
            return p
        n, queries, keys = p.shape
        ends = (0, n), (start, start + queries), (0, keys)
        heads, rows, columns = (torch.arange(*pair, dtype=torch.int32, device=p.device) for pair in ends)
        index = (rows[:, None] * n + heads[:, None, None]) * keys + columns
        return p.masked_fill(uniform(index, self.key) < self.dropout, 0) * (1 / (1 - self.dropout))

    def amax_of_p(self, x: Tensor) -> Tensor:
        """Returns the amax of P in the dtype of ``x``, whatever the scores."""
        return torch.full((), 1 / (1 - self.dropout), dtype=x.dtype, device=x.device).float()


class QuantizedAttention(torch.autograd.Function):
    """Takes q ``[..., queries, d]``, k ``[..., keys, d]`` and v ``[..., keys, e]`` of one dtype, an additive or bool
    mask that broadcasts to ``[..., queries, keys]`` or None, and :class:`Attention`; returns ``[..., queries, e]`` and
    a :func:`lightning_lowbit.nn.core.inputs.mark`."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, how: Attention
    ) -> tuple[Tensor, Tensor | None]:
        x, w, wv = _rows_first(q), k.flatten(0, -3), v.flatten(0, -3).mT
        queries, keys, wide = q.shape[-2], k.shape[-2], _wide(q.dtype)
        qx, qw = how.qk.row_operand("fprop_x", x), how.qk.weight_operand("fprop_w", w)
        qv = how.pv.weight_operand("fprop_w", wv)
        o = q.new_empty(len(w), queries, v.shape[-1])
        for start, end in how.tiles(queries):
            seen = how.keys_seen(end, keys)
            rows, columns = cut_operand(qx, 1, start, end, queries), cut_operand(qw, 1, 0, seen, keys)
            p = _weights(rows, columns, mask, start, keys, q.shape[:-2], how)
            p = how.dropped(p, start).to(q.dtype)
            qp = _tile_operand("fprop_x", p, how.pv, start, queries, how.tile, how.amax_of_p(q))
            left, right = cut_operand(qp, 2, 0, seen, keys), transposed(cut_operand(qv, 2, 0, seen, keys))
            o[:, start:end] = how.pv.multiply("fprop", left, right, wide).to(q.dtype)
        last = mark(ctx, o)
        ctx.save_for_backward(q, k, v, mask, last)
        ctx.how, ctx.layer = how, how.qk.how.layer
        return o.view(*q.shape[:-1], v.shape[-1]), last

    @staticmethod
    @first_derivative
    def backward(ctx: Any, g: Tensor, saved: Any) -> tuple[Tensor | None, ...]:
        q, k, v, mask = saved
        with no_autocast(g.device.type):
            return (*_gradients(g.to(q.dtype), q, k, v, mask, ctx.how, ctx.needs_input_grad), None)


def _gradients(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, how: Attention, needs: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    queries, keys, wide = q.shape[-2], k.shape[-2], _wide(q.dtype)
    x, w, wv, go = _rows_first(q), k.flatten(0, -3), v.flatten(0, -3).mT, _rows_first(g)
    qk, pv = how.qk, how.pv
    qk_again, pv_again = qk.unrecorded(), pv.unrecorded()
    qx, qw = qk_again.row_operand("fprop_x", x), qk_again.weight_operand("fprop_w", w)
    g_dgrad, g_wgrad = pv.row_operand("dgrad_g", go), pv.row_operand("wgrad_g", go)
    w_pv, w_qk = _dgrad_weight(wv, pv), _dgrad_weight(w, qk)
    x_qk = decoded(qx) if qk.how.casts.wgrad_x == "fprop" else qk.row_operand("wgrad_x", x)

    def score_gradient(start: int, end: int, again: bool = False) -> tuple[Tensor, Tensor]:
        """P and dS of a tile, ``[n, queries, keys]``."""
        seen = how.keys_seen(end, keys)
        rows, columns = cut_operand(qx, 1, start, end, queries), cut_operand(qw, 1, 0, seen, keys)
        p = _weights(rows, columns, mask, start, keys, q.shape[:-2], how)
        left, right = cut_operand(g_dgrad, 1, start, end, queries), cut_operand(w_pv, 2, 0, seen, keys)
        dp = pv.multiply("dgrad", left, right, wide, again)
        dp = how.dropped(F.pad(dp, (0, keys - seen)), start)
        ds = p * (dp - (p * dp).sum(-1, keepdim=True))
        return p, ds

    amax = None
    if len(how.tiles(queries)) > 1 and (qk.how.dgrad.left.needs_amax or qk.how.wgrad.left.needs_amax):
        # One scale for all tiles takes a pass of its own.
        amaxes = [amax_of(score_gradient(start, end, True)[1].to(q.dtype)) for start, end in how.tiles(queries)]
        amax = torch.stack(amaxes).amax()
    dq = torch.empty(len(w), *q.shape[-2:], dtype=q.dtype, device=q.device)
    dk, dv = q.new_zeros(w.shape, dtype=wide), q.new_zeros(wv.shape, dtype=wide)
    dmask = None if mask is None or not needs[3] else torch.zeros_like(mask, dtype=wide)
    for start, end in how.tiles(queries):
        p, ds = score_gradient(start, end)
        seen = how.keys_seen(end, keys)
        if dmask is not None and mask is not None:
            rows = dmask if mask.shape[-2] == 1 else dmask[..., start:end, :]
            rows.add_(ds.view(*q.shape[:-2], end - start, keys).sum_to_size(rows.shape))
        p, ds = how.dropped(p, start).to(q.dtype), ds.to(q.dtype)
        tile = (start, queries, how.tile)
        if pv.how.casts.wgrad_x == "fprop":
            qp = decoded(_tile_operand("fprop_x", p, pv_again, *tile, how.amax_of_p(q)))
        else:
            qp = _tile_operand("wgrad_x", p, pv, *tile, how.amax_of_p(q))
        left = transposed(cut_operand(g_wgrad, 1, start, end, queries))
        dv[..., :seen] += pv.multiply("wgrad", left, cut_operand(qp, 2, 0, seen, keys), wide)
        left = cut_operand(_tile_operand("dgrad_g", ds, qk, *tile, amax), 2, 0, seen, keys)
        product = qk.multiply("dgrad", left, cut_operand(w_qk, 1, 0, seen, keys), wide)
        dq[:, start:end] = (product * how.scale).to(q.dtype)
        left = transposed(cut_operand(_tile_operand("wgrad_g", ds, qk, *tile, amax), 2, 0, seen, keys))
        dk[:, :seen] += qk.multiply("wgrad", left, cut_operand(x_qk, 1, start, end, queries), wide)
    dk = (dk * how.scale).to(k.dtype)
    return (
        dq.view(q.shape),
        dk.view(k.shape),
        dv.mT.to(v.dtype).reshape(v.shape),
        None if dmask is None or mask is None else dmask.to(mask.dtype),
    )


def _rows_first(x: Tensor) -> Tensor:
    """Returns ``[..., rows, features]`` as ``[rows, n, features]``."""
    return x.flatten(0, -3).transpose(0, 1)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _weights(
    qx: Operand, qw: Operand, mask: Tensor | None, start: int, keys: int, shape: torch.Size, how: Attention
) -> Tensor:
    """P of a tile, ``[n, queries, keys]``; 0 for a query that sees no key, and for keys that come later."""
    wide = torch.float64 if qx.values.dtype == torch.float64 else torch.float32
    scores = how.qk.multiply("fprop", qx, transposed(qw), wide) * how.scale
    queries, seen = scores.shape[1:]
    if mask is not None:
        mask = mask if mask.shape[-2] == 1 else mask[..., start : start + queries, :]
        mask = mask[..., :seen] if mask.shape[-1] > 1 else mask
        by_head = scores.view(*shape, queries, seen)
        by_head = by_head.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else by_head + mask
        scores = by_head.view(scores.shape)
    if how.causal:
        query, key = (torch.arange(*ends, device=scores.device) for ends in ((start, start + queries), (0, seen)))
        scores = scores.masked_fill(key > query[:, None], -torch.inf)
    top = scores.amax(-1, keepdim=True)
    exps = (scores - top.masked_fill(top == -torch.inf, 0)).exp()
    total = exps.sum(-1, keepdim=True)
    p = exps / total.masked_fill(total == 0, 1)
    return F.pad(p, (0, keys - seen))


def _tile_operand(
    name: str, x: Tensor, product: ProductPass, start: int, queries: int, tile: int, amax: Tensor | None
) -> Operand:
    """Returns the operand of P or dS of a tile, ``[n, queries, keys]``."""
    return product.row_operand(name, x.transpose(0, 1), amax, None if tile >= queries else (start, tile, queries))


def _dgrad_weight(w: Tensor, product: ProductPass) -> Operand:
    if product.how.casts.dgrad_w == "fprop":
        return decoded(product.unrecorded().weight_operand("fprop_w", w))
    return product.weight_operand("dgrad_w", w)
