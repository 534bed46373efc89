"""The autograd function of a linear layer: three GEMMs, six operands, six casts; and what follows from these casts."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from lightning_lowbit.kernels.windows import Window
from lightning_lowbit.nn.casts.linear_casts import LinearCasts
from lightning_lowbit.nn.casts.traits import GEMMS, OPERANDS
from lightning_lowbit.nn.core.gemm import matmul, no_autocast
from lightning_lowbit.nn.core.inputs import first_derivative, mark
from lightning_lowbit.nn.core.operands import GemmHow, OperandHow, Pass
from lightning_lowbit.nn.core.parallel import WHOLE, Shards
from lightning_lowbit.nn.core.saving import Frozen
from lightning_lowbit.nn.core.sides import Codes, FrozenBytes, Gathered, Gradient, Matrix, Parameter, Patches, Recast
from lightning_lowbit.units import multiplies_itself

_NOTHING = (None, None)


class How:
    """The three GEMMs of a layer, and what x, w and g are: worked out once from casts, a dtype and a device.

    Args:
        casts, dtype, device: the casts in force, in what the pass computes, and where.
        exact: computes float32 GEMMs over exact operands.
        shards: which of x, w and g are shards of global matrices.
        layer: what errors of the backward pass call the layer.
        window: of a convolution, whose x are images; None where x is a matrix.
        frozen: what the bytes of a frozen weight are; None for a matrix.
        is_gathered: whether the weight was quantized before it was gathered.
        saves_codes: saves x as codes and scales, where the casts have such an operand.
        native: the GEMMs that the device computes natively, with their kinds.
        recasts: saves the parameter itself for the backward pass, and quantizes it again there.
        is_grouped: takes stacks of products, each of whose GEMMs is a grouped one.

    Attributes:
        takes_stacks: whether one pass computes a stack of products, each of whose GEMMs is one call.
    """

    def __init__(
        self,
        casts: LinearCasts,
        dtype: torch.dtype,
        device: torch.device,
        exact: bool = False,
        shards: Shards = WHOLE,
        layer: str = "(without a name)",
        window: Window | None = None,
        frozen: Frozen | None = None,
        is_gathered: bool = False,
        saves_codes: bool = False,
        native: Mapping[str, str] = MappingProxyType({}),
        recasts: bool = False,
        is_grouped: bool = False,
    ) -> None:
        self.casts, self.dtype, self.layer, self.window, self.frozen = casts, dtype, layer, window, frozen
        traits = casts.traits
        operands = {
            name: OperandHow(name, casts, dtype, device, exact, native, shards, is_grouped) for name in OPERANDS
        }
        for operand in operands.values():
            operand.scaling = operands[operand.scaled_as]
        self.operands = operands
        self.fprop, self.dgrad, self.wgrad = (GemmHow(gemm, operands, casts) for gemm in GEMMS)
        x, w = (self.fprop.left, self.wgrad.right), (self.fprop.right, self.dgrad.right)
        self.x = Matrix(*x)
        # Codes of the forward pass lie along its contraction.
        are_codes_read = traits.coded == "wgrad_x" or (x[0].kind is None and x[1].kind is None)
        if window is not None:
            self.x = Patches(*x, window, takes_tensor="fprop_x" not in traits.altered)
        elif saves_codes and traits.coded is not None and are_codes_read:
            self.x = Codes(*x, traits.coded)
        self.w = Parameter(*w)
        if frozen is not None:
            self.w = FrozenBytes(*w, frozen)
        elif is_gathered:
            self.w = Gathered(*w)
        elif recasts and not (("dgrad_w" in traits.from_fprop or w[1].is_reused) and "fprop_w" in traits.altered):
            self.w = Recast(*w)
        self.g = Gradient(self.dgrad.left, self.wgrad.left, traits.casts_g_twice)
        self.takes_stacks = all(operand.takes_stacks for operand in operands.values()) and (
            type(self.x) is Matrix or (is_grouped and type(self.x) is Codes)
        )
        self.is_grouped = is_grouped


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
        ``Y`` ``[tokens, out_features]``, and a :func:`lightning_lowbit.nn.core.inputs.mark`.
    """

    @staticmethod
    @multiplies_itself
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
    @multiplies_itself
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
                dw = matmul(qg.t(), qx, offset, how.dtype, stored=None if how.w.has_surrogate else w_dtype)
                if pass_.gradient_sums is not None:
                    pass_.add_gradients_(dw, g.to(how.dtype), how.x.matrix(x[3]))
                dw = how.w.gradient(dw, w, pass_).to(w_dtype)
            if needs_bias:
                db = how.g.sum_of_rows(g, pass_).to(bias_dtype)  # of the unquantized gradient
        return dx, dw, db, None, None
