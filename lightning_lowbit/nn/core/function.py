"""The autograd function of a linear layer: three GEMMs, six operands, six casts."""

from typing import Any

import torch
from torch import Tensor

from lightning_lowbit.kernels import Packed
from lightning_lowbit.nn.core.derivatives import first_derivative, mark
from lightning_lowbit.nn.core.gemm import matmul, no_autocast
from lightning_lowbit.nn.core.operands import Settings, amax_for, operands, sources_of_gradient, through_rounding_of
from lightning_lowbit.nn.core.patches import patches, patches_for_wgrad
from lightning_lowbit.nn.core.saving import (
    frozen_weight,
    keeps_weight_operand,
    kept_source,
    pack_for_backward,
    prequantized_weight,
    unpacked_source,
    weight_for_dgrad,
)
from lightning_lowbit.nn.core.source import Source
from lightning_lowbit.nn.core.watch import add_gradients_
from lightning_lowbit.quant import Operand


class QuantizedGemms(torch.autograd.Function):
    """``Y = X · Wᵀ + b`` and its gradients, each operand by its own cast. Takes ``x`` [tokens, in_features], ``w``
    [out_features, in_features], ``bias`` [out_features] or None, each of any dtype, and :class:`Settings`, which say in
    which dtype to compute. With a window, ``x`` are images [N, C, *sizes], and tokens are the positions of its patches.
    Returns ``Y`` and a :func:`lightning_lowbit.nn.core.derivatives.mark`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, settings: Settings
    ) -> tuple[Tensor, Tensor | None]:
        dtype = settings.dtype or x.dtype
        ctx.layer, ctx.dtypes = settings.layer, (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
        y, saved = _forward(ctx, x, weight, bias, settings)
        end = mark(ctx, y)
        ctx.save_for_backward(*saved, end)
        return y, end

    @staticmethod
    @first_derivative
    def backward(ctx: Any, g: Tensor, saved: Any) -> tuple[Tensor | None, ...]:
        return _backward(ctx, g, saved)


def _forward(
    ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, settings: Settings
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """The output, and what the backward pass reads."""
    casts, (needs_x, needs_w) = settings.casts, ctx.needs_input_grad[:2]
    given, settings, dtype = settings, settings.of_part(), x.dtype
    w = weight if settings.frozen is not None or settings.prequantized is not None else weight.to(dtype)
    read_by = ("fprop_x", *["wgrad_x"] * needs_w)
    is_matrix = settings.window is None
    source_x = Source(x, amax_for(x, settings, *read_by)) if is_matrix else patches(x, settings, *read_by)
    if settings.frozen is not None:
        source_w = frozen_weight(weight, dtype, settings)
    elif settings.prequantized is not None:
        source_w = prequantized_weight(w, settings.prequantized, settings)
    elif settings.weight_amax is not None:
        source_w = Source(w, settings.weight_amax)
    else:
        source_w = Source(w, amax_for(w, settings, "fprop_w", *["dgrad_w"] * needs_x))
    packed, of_fprop = None, source_x
    if needs_w and settings.packed is not None:
        packed = pack_for_backward(settings.packed, source_x, settings)
        if settings.packed == "fprop_x":
            of_fprop = unpacked_source("fprop_x", packed, x.shape, dtype, settings)

    # Y = X · Wᵀ + b            [tokens, in] · [in, out]
    qx, qw, offset = operands("fprop", of_fprop, source_w, settings, bias)
    y = matmul(qx, qw.t(), offset, dtype, fast_accumulation=True)

    # "fprop" and requantize keep the operand of the forward pass; others are quantized anew from the tensor itself.
    # Of images, which are smaller than their patches, the images themselves are kept.
    keeps_qx = "wgrad_x" in casts.plan.kept and is_matrix
    for_wgrad: Any = packed or (qx if keeps_qx else Operand(x))
    keeps_operand = keeps_weight_operand(settings)
    for_dgrad: Any = qw if keeps_operand else Operand(weight if settings.recasts else w)
    if settings.native:
        for_wgrad = packed or settings.kept("wgrad_x", for_wgrad, x)
        for_dgrad = settings.kept("dgrad_w", for_dgrad, w) if keeps_operand else for_dgrad
    reads_x = (needs_x and "fprop_x" in casts.surrogate) or (needs_w and settings.gradient_sums is not None)
    saved = (
        *(for_wgrad if needs_w else (None, None)),
        source_x.amax,
        *(for_dgrad if needs_x else (None, None)),
        settings.weight_amax if source_w.amax is None else source_w.amax,
        x if reads_x else None,
        w if needs_w and "fprop_w" in casts.surrogate else None,
    )
    # Both are refilled in place for the next micro-batch or step, which may begin before this one's backward pass.
    if given.in_force is not None:
        given = given._replace(in_force=given.in_force.clone())
    if given.blend is not None:
        given = given._replace(blend=given.blend.clone())
    ctx.settings, ctx.dtype, ctx.shape = given, dtype, x.shape
    return y, saved


def _backward(ctx: Any, g: Tensor, saved: Any) -> tuple[Tensor | None, ...]:
    x_dtype, w_dtype, bias_dtype = ctx.dtypes
    x, x_factor, amax_x, w, w_factor, amax_w, forward_x, forward_w = saved
    settings: Settings = ctx.settings.of_part()
    window = settings.window
    needs_x, needs_w, needs_bias = ctx.needs_input_grad[:3]
    dx = dw = db = None
    with no_autocast(g.device.type):
        if window is not None and forward_x is not None:
            forward_x = window.gather(forward_x)
        source_g = of_wgrad = Source(g, amax_for(g, settings, *["dgrad_g"] * needs_x, *["wgrad_g"] * needs_w))
        if needs_x and needs_w:
            source_g, of_wgrad = sources_of_gradient(source_g, settings)
        if needs_x:
            # dX = dY · W           [tokens, out] · [out, in]
            of_weight = weight_for_dgrad(Operand(w, w_factor), amax_w, ctx.dtype, settings)
            source_w = kept_source("dgrad_w", of_weight, amax_w, ctx.dtype, settings)
            qg, qw, of_mean = operands("dgrad", source_g, source_w, settings)
            dx = matmul(qg, qw, of_mean, ctx.dtype)
            dx = through_rounding_of("fprop_x", dx, Source(forward_x, amax_x), settings)
            dx = (dx if window is None else window.scatter(dx, ctx.shape)).to(x_dtype)
            if settings.reuses("wgrad_g"):
                of_wgrad = Source(qg.values, None, qg.factor, is_operand=True)
        if needs_w:
            # dW = dYᵀ · X          [out, tokens] · [tokens, in]
            of_input, packed = Operand(x, x_factor), settings.packed
            if window is not None:
                of_input = patches_for_wgrad(x, amax_x, settings)
            if packed is not None:
                source_x = unpacked_source(packed, Packed(x, x_factor), ctx.shape, ctx.dtype, settings)
                of_input = Operand(source_x.values, source_x.factor)
            if packed != "wgrad_x":
                source_x = kept_source("wgrad_x", of_input, amax_x, ctx.dtype, settings)
            qg, qx, of_mean = operands("wgrad", of_wgrad, source_x, settings)
            dw = matmul(qg.t(), qx, of_mean, ctx.dtype)
            if settings.gradient_sums is not None:
                add_gradients_(settings.gradient_sums, dw, torch.mm(g.to(ctx.dtype).t(), forward_x))
            dw = through_rounding_of("fprop_w", dw, Source(forward_w, amax_w), settings).to(w_dtype)
        if needs_bias:
            db = g.sum(0).to(bias_dtype)  # of the unquantized gradient
    return dx, dw, db, None
