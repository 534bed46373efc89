"""Attention with quantized operands, slow and obvious: whole matrices of scores, head by head."""

import torch
import torch.nn.functional as F

from lightning_lowbit import Cast
from lightning_lowbit.nn import OPERANDS
from lightning_lowbit.quant import quantize_operand, rotate


class Reference:
    """``q``, ``k``, ``v`` and ``g`` are ``[heads, tokens, features]``; ``keys`` int64 ``[2, 6]``, of both products."""

    def __init__(self, casts, keys):
        self.casts, self.keys = casts, keys

    def operand(self, product, name, heads, amax=None):
        """The values of an operand of all heads, ``[heads, rows, columns]``, as its cast gives them."""
        cast, contracted = getattr(self.casts, name), 1 if name in ("fprop_x", "fprop_w", "dgrad_g") else 0
        if cast == "fprop":
            return self.operand(product, f"fprop_{name[-1]}", heads, amax)
        if not isinstance(cast, Cast):
            return heads.float()
        _, own_rows, own_columns = heads.shape
        if isinstance(block := cast.scale.block, tuple):  # no tile holds elements of two heads
            below, beside = (-own_rows % block[0], 0) if contracted == 1 else (0, -own_columns % block[1])
            heads = F.pad(heads, (0, beside, 0, below))
        n, rows, columns = heads.shape
        by_rows = not name.endswith("_w")  # rows of x and g of all heads alternate
        if contracted == 1:
            flat = (heads.transpose(0, 1) if by_rows else heads).reshape(n * rows, columns)
        else:
            flat = heads.transpose(0, 1).reshape(rows, n * columns)
        gemm, i = name.partition("_")[0], OPERANDS.index(name)
        if gemm in self.casts.hadamard:
            flat, amax = rotate(flat, self.casts.hadamard[gemm].diagonal(None, flat.device), contracted), None
        amax = amax if cast.scale.needs_amax else None
        made = quantize_operand(flat.contiguous(), cast, contracted, self.keys[product, i], amax)
        values = made.values.float() if made.factor is None else made.values.float() * made.factor
        if contracted == 0:
            return values.view(len(values), n, columns).transpose(0, 1)[..., :own_columns]
        values = values.view(rows, n, -1).transpose(0, 1) if by_rows else values.view(n, rows, -1)
        return values[:, :own_rows]

    def scores(self, q, k):
        qs, ks = self.operand(0, "fprop_x", q), self.operand(0, "fprop_w", k)
        return torch.stack([a @ b.T for a, b in zip(qs, ks, strict=True)])

    def __call__(self, q, k, v, g, seen, scale):
        """``o`` and the gradients of q, k and v; ``seen`` is bool ``[queries, keys]``."""
        dtype, one, vt = q.dtype, torch.ones(()), v.transpose(1, 2)
        scores = (self.scores(q, k) * scale).masked_fill(~seen, -torch.inf)
        exps = (scores - scores.amax(-1, keepdim=True)).exp()
        p = exps / exps.sum(-1, keepdim=True)
        ps, vs = self.operand(1, "fprop_x", p.to(dtype), one), self.operand(1, "fprop_w", vt)
        o = torch.stack([a @ b.T for a, b in zip(ps, vs, strict=True)])
        gs, ws = self.operand(1, "dgrad_g", g), self.operand(1, "dgrad_w", vt)
        dp = torch.stack([a @ b for a, b in zip(gs, ws, strict=True)])
        ds = (p * (dp - (p * dp).sum(-1, keepdim=True))).to(dtype)
        gs, xs = self.operand(1, "wgrad_g", g), self.operand(1, "wgrad_x", p.to(dtype), one)
        dv = torch.stack([(a.T @ b).T for a, b in zip(gs, xs, strict=True)])
        gs, ws = self.operand(0, "dgrad_g", ds), self.operand(0, "dgrad_w", k)
        dq = torch.stack([a @ b for a, b in zip(gs, ws, strict=True)]) * scale
        gs, xs = self.operand(0, "wgrad_g", ds), self.operand(0, "wgrad_x", q)
        dk = torch.stack([a.T @ b for a, b in zip(gs, xs, strict=True)]) * scale
        return o.to(dtype), dq.to(dtype), dk.to(dtype), dv.to(dtype)
