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

from lightning_lowbit.nn.attention.operands import decoded, multiply, of_rows, of_weights, part, transposed
from lightning_lowbit.nn.core.derivatives import first_derivative, mark
from lightning_lowbit.nn.core.gemm import no_autocast
from lightning_lowbit.nn.core.operands import Settings
from lightning_lowbit.quant import Cast, Operand
from lightning_lowbit.quant.rounding import uniform
from lightning_lowbit.quant.shard import amax_of


class Attention(NamedTuple):
    """How one call is computed: settings of its products, the ``id`` of their layers, the scale of scores, whether
    queries see no later keys, the number of queries in a tile, and the share of P that is dropped by the bits of a key
    (int64, 0-d)."""

    qk: Settings
    pv: Settings
    layers: tuple[int, int]
    scale: float
    causal: bool
    tile: int
    dropout: float = 0.0
    key: Tensor | None = None

    def tiles(self, queries: int) -> list[tuple[int, int]]:
        return [(start, min(start + self.tile, queries)) for start in range(0, queries, self.tile)]

    def keys_seen(self, end: int, keys: int) -> int:
        """The keys that take part in products of queries before ``end``; a rotation mixes them with later ones."""
        rotates = self.qk.casts.hadamard or self.pv.casts.hadamard
        return min(end, keys) if self.causal and not rotates else keys

    def dropped(self, p: Tensor, start: int) -> Tensor:
        """P, or what is multiplied with it, ``[n, queries, keys]`` from a query on, with dropout."""
        if self.key is None:
            return p
        n, queries, keys = p.shape
        ends = (0, n), (start, start + queries), (0, keys)
        heads, rows, columns = (torch.arange(*each, dtype=torch.int32, device=p.device) for each in ends)
        index = (rows[:, None] * n + heads[:, None, None]) * keys + columns
        return p.masked_fill(uniform(index, self.key) < self.dropout, 0) * (1 / (1 - self.dropout))

    def amax_of_p(self, x: Tensor) -> Tensor:
        """The amax of P in the dtype of ``x``, whatever the scores."""
        return torch.full((), 1 / (1 - self.dropout), dtype=x.dtype, device=x.device).float()

    def owner(self, product: str, gemm: str) -> tuple[int, str]:
        """Whose a GEMM is, see :func:`lightning_lowbit.compilation.counted_for`."""
        return self.layers[product == "pv"], gemm


class QuantizedAttention(torch.autograd.Function):
    """Takes q ``[..., queries, d]``, k ``[..., keys, d]`` and v ``[..., keys, e]`` of one dtype, an additive or bool
    mask that broadcasts to ``[..., queries, keys]`` or None, and :class:`Attention`; returns ``[..., queries, e]`` and
    a :func:`lightning_lowbit.nn.core.derivatives.mark`."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, how: Attention
    ) -> tuple[Tensor, Tensor | None]:
        x, w, wv = _rows_first(q), k.flatten(0, -3), v.flatten(0, -3).mT
        queries, keys, wide = q.shape[-2], k.shape[-2], _wide(q.dtype)
        qx, qw = of_rows("fprop_x", x, how.qk), of_weights("fprop_w", w, how.qk)
        qv = of_weights("fprop_w", wv, how.pv)
        o = q.new_empty(len(w), queries, v.shape[-1])
        for start, end in how.tiles(queries):
            seen = how.keys_seen(end, keys)
            p = _weights(part(qx, 1, start, end), part(qw, 1, 0, seen), mask, start, keys, q.shape[:-2], how)
            p = how.dropped(p, start).to(q.dtype)
            qp = _of_tile("fprop_x", p, how.pv, start, queries, how.tile, how.amax_of_p(q))
            left, right = _first(qp, 2, seen, keys), transposed(_first(qv, 2, seen, keys))
            product = multiply(left, right, wide, how.owner("pv", "fprop"))
            o[:, start:end] = product.to(q.dtype)
        last = mark(ctx, o)
        ctx.save_for_backward(q, k, v, mask, last)
        ctx.how, ctx.layer = how, how.qk.layer
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
    again = how._replace(qk=_seen(how.qk), pv=_seen(how.pv))  # what the forward pass has recorded
    qx, qw = of_rows("fprop_x", x, again.qk), of_weights("fprop_w", w, again.qk)
    g_dgrad, g_wgrad = of_rows("dgrad_g", go, how.pv), of_rows("wgrad_g", go, how.pv)
    w_pv, w_qk = _for_dgrad(wv, how.pv), _for_dgrad(w, how.qk)
    x_qk = decoded(qx) if how.qk.casts.wgrad_x == "fprop" else of_rows("wgrad_x", x, how.qk)

    def of_scores(start: int, end: int, again: bool = False) -> tuple[Tensor, Tensor]:
        """P and dS of a tile, ``[n, queries, keys]``."""
        seen = how.keys_seen(end, keys)
        p = _weights(part(qx, 1, start, end), part(qw, 1, 0, seen), mask, start, keys, q.shape[:-2], how)
        right, owner = _first(w_pv, 2, seen, keys), (*how.owner("pv", "dgrad"), again)
        dp = F.pad(multiply(part(g_dgrad, 1, start, end), right, wide, owner), (0, keys - seen))
        dp = how.dropped(dp, start)
        ds = p * (dp - (p * dp).sum(-1, keepdim=True))
        return p, ds

    amax = None
    if len(how.tiles(queries)) > 1 and _needs_amax(how.qk):  # one scale for all tiles takes a pass of its own
        found = [amax_of(of_scores(start, end, True)[1].to(q.dtype)) for start, end in how.tiles(queries)]
        amax = torch.stack(found).amax()
    dq = torch.empty(len(w), *q.shape[-2:], dtype=q.dtype, device=q.device)
    dk, dv = q.new_zeros(w.shape, dtype=wide), q.new_zeros(wv.shape, dtype=wide)
    dmask = None if mask is None or not needs[3] else torch.zeros_like(mask, dtype=wide)
    for start, end in how.tiles(queries):
        p, ds = of_scores(start, end)
        seen = how.keys_seen(end, keys)
        if dmask is not None and mask is not None:
            into = dmask if mask.shape[-2] == 1 else dmask[..., start:end, :]
            into.add_(ds.view(*q.shape[:-2], end - start, keys).sum_to_size(into.shape))
        p, ds = how.dropped(p, start).to(q.dtype), ds.to(q.dtype)
        tile = (start, queries, how.tile)
        if how.pv.casts.wgrad_x == "fprop":
            qp = decoded(_of_tile("fprop_x", p, again.pv, *tile, how.amax_of_p(q)))
        else:
            qp = _of_tile("wgrad_x", p, how.pv, *tile, how.amax_of_p(q))
        left = transposed(_cut(g_wgrad, start, end, queries))
        dv[..., :seen] += multiply(left, _first(qp, 2, seen, keys), wide, how.owner("pv", "wgrad"))
        left, right = _of_tile("dgrad_g", ds, how.qk, *tile, amax), _first(w_qk, 1, seen, keys)
        product = multiply(_first(left, 2, seen, keys), right, wide, how.owner("qk", "dgrad"))
        dq[:, start:end] = (product * how.scale).to(q.dtype)
        left = transposed(_first(_of_tile("wgrad_g", ds, how.qk, *tile, amax), 2, seen, keys))
        dk[:, :seen] += multiply(left, _cut(x_qk, start, end, queries), wide, how.owner("qk", "wgrad"))
    dk = (dk * how.scale).to(k.dtype)
    return (
        dq.view(q.shape),
        dk.view(k.shape),
        dv.mT.to(v.dtype).reshape(v.shape),
        None if dmask is None or mask is None else dmask.to(mask.dtype),
    )


def _rows_first(x: Tensor) -> Tensor:
    """``[..., rows, features]`` as ``[rows, n, features]``."""
    return x.flatten(0, -3).transpose(0, 1)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _seen(settings: Settings) -> Settings:
    return settings._replace(operand_sums=None)


def _weights(
    qx: Operand, qw: Operand, mask: Tensor | None, start: int, keys: int, shape: torch.Size, how: Attention
) -> Tensor:
    """P of a tile, ``[n, queries, keys]``; 0 for a query that sees no key, and for keys that come later."""
    wide = torch.float64 if qx.values.dtype == torch.float64 else torch.float32
    scores = multiply(qx, transposed(qw), wide, how.owner("qk", "fprop")) * how.scale
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


def _of_tile(
    name: str, x: Tensor, settings: Settings, start: int, queries: int, tile: int, amax: Tensor | None
) -> Operand:
    """The operand of P or dS of a tile, ``[n, queries, keys]``."""
    place = None if tile >= queries else (start, tile, queries)
    return of_rows(name, x.transpose(0, 1), settings, amax, place)


def _for_dgrad(w: Tensor, settings: Settings) -> Operand:
    if settings.casts.dgrad_w == "fprop":
        return decoded(of_weights("fprop_w", w, _seen(settings)))
    return of_weights("dgrad_w", w, settings)


def _needs_amax(settings: Settings) -> bool:
    own = (settings.casts.dgrad_g, settings.casts.wgrad_g)
    return any(isinstance(cast, Cast) and cast.scale.needs_amax for cast in own)


def _first(operand: Operand, dim: int, seen: int, keys: int) -> Operand:
    """The keys that take part; if these are all, with those that a rotation has added."""
    return operand if seen == keys else part(operand, dim, 0, seen)


def _cut(operand: Operand, start: int, end: int, queries: int) -> Operand:
    """The rows of a tile; of a single tile all, with those that a rotation has added."""
    return operand if start == 0 and end == queries else part(operand, 1, start, end)
