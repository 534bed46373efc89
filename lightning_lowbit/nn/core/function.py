"""The autograd function of a linear layer: three GEMMs, six operands, six casts."""

from typing import Any

import torch
from torch import Tensor

from lightning_lowbit.nn.core.derivatives import first_derivative, mark
from lightning_lowbit.nn.core.gemm import matmul, no_autocast
from lightning_lowbit.nn.core.how import How
from lightning_lowbit.nn.core.operands import Pass

_NOTHING = (None, None)


class QuantizedGemms(torch.autograd.Function):
    """``Y = X · Wᵀ + b`` and its gradients, each operand by its own cast.

    The sides of ``how`` know what x and w are, and what is saved of them.

    Args:
        x: ``[tokens, in_features]``, or for a side of patches images ``[N, C, *sizes]``.
        weight: ``[out_features, in_features]``, or for a side of frozen bytes uint8, 1-D. Of a stack of products
            ``[products, out_features, in_features]``, where x has the rows of all of them.
        bias: ``[out_features]``, of a stack ``[products, out_features]``, or None.
        how: the GEMMs, operands and sides. Tensors may have any dtype; ``how.dtype`` is that of the computation.
        pass_: the pass, which changes from call to call.

    Returns:
        ``Y`` ``[tokens, out_features]``, and a :func:`lightning_lowbit.nn.core.derivatives.mark`.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: How, pass_: Pass
    ) -> tuple[Tensor, Tensor | None]:
        ctx.how, ctx.pass_, ctx.layer, ctx.shape = how, pass_.for_backward(), how.layer, x.shape
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        x, bias = x.to(how.dtype), None if bias is None else bias.to(how.dtype)
        (needs_x, needs_w), pass_ = ctx.needs_input_grad[:2], pass_.with_keys_of_product()
        source_x, source_w = how.x.forward(x, pass_, needs_w), how.w.forward(weight, pass_, needs_x)

        # Y = X · Wᵀ + b            [tokens, in] · [in, out]
        qx, qw, offset = how.fprop.operands(source_x, source_w, pass_, bias)
        y = matmul(qx, qw.t(), offset, how.dtype, fast_accumulation=True)

        reads_x = (needs_x and how.x.has_surrogate) or (needs_w and pass_.gradient_sums is not None)
        last = mark(ctx, y)
        ctx.save_for_backward(
            *(how.x.save(x, source_x, qx) if needs_w else _NOTHING),
            source_x.amax,
            x if reads_x else None,
            *(how.w.save(weight, source_w, qw) if needs_x else _NOTHING),
            source_w.amax,
            source_w.values if needs_w and how.w.has_surrogate else None,
            last,
        )
        return y, last

    @staticmethod
    @first_derivative
    def backward(ctx: Any, g: Tensor, saved: Any) -> tuple[Tensor | None, ...]:
        how, pass_ = ctx.how, ctx.pass_.with_keys_of_product()
        x, w = (*saved[:4], ctx.shape), (*saved[4:], ctx.shape)
        x_dtype, w_dtype, bias_dtype = ctx.dtypes
        needs_x, needs_w, needs_bias = ctx.needs_input_grad[:3]
        dx = dw = db = None
        with no_autocast(g.device.type):
            source_g, source_g_again = how.g.backward(g, needs_x, needs_w, pass_)
            if needs_x:
                # dX = dY · W           [tokens, out] · [out, in]
                source_w = how.w.backward(w, pass_)
                qg, qw, offset = how.dgrad.operands(source_g, source_w, pass_)
                dx = matmul(qg, qw, offset, how.dtype)
                dx = how.x.gradient(dx, x, pass_).to(x_dtype)
                source_g_again = how.g.reused(source_g_again, qg)
            if needs_w:
                # dW = dYᵀ · X          [out, tokens] · [tokens, in]
                source_x = how.x.backward(x, pass_)
                qg, qx, offset = how.wgrad.operands(source_g_again, source_x, pass_)
                dw = matmul(qg.t(), qx, offset, how.dtype)
                if pass_.gradient_sums is not None:
                    pass_.add_gradients_(dw, g.to(how.dtype), how.x.matrix(x[3]))
                dw = how.w.gradient(dw, w, pass_).to(w_dtype)
            if needs_bias:
                db = how.g.sum_of_rows(g, pass_).to(bias_dtype)  # of the unquantized gradient
        return dx, dw, db, None, None
