"""One linear layer: three GEMMs, six operands, six casts.

``QuantLinear`` is what an ``nn.Linear`` becomes, in place: :func:`lightning_lowbit.convert` assigns its ``__class__``,
so that parameters, their names and every reference to the module stay what they were.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_lowbit.nn.casts import OPERANDS, LinearCasts, OperandCast
from lightning_lowbit.nn.gemm import matmul
from lightning_lowbit.quant import Cast, Operand, quantize_operand
from lightning_lowbit.quant.scaling import absmax


class _LinearFunction(torch.autograd.Function):
    """``Y = X · Wᵀ + b`` and its gradients, each operand by its own cast."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, keys: Tensor | None, casts: LinearCasts, exact: bool
    ) -> Tensor:
        needs_x, needs_w = ctx.needs_input_grad[:2]
        amax_x = _amax(x, casts.fprop_x, casts.wgrad_x if needs_w else None)
        amax_w = _amax(w, casts.fprop_w, casts.dgrad_w if needs_x else None)
        qx = _operand("fprop_x", x, 1, amax_x, keys, casts, exact)
        qw = _operand("fprop_w", w, 1, amax_w, keys, casts, exact)

        # Y = X · Wᵀ + b            [tokens, in] · [in, out]
        y = matmul(qx, qw.t(), bias, x.dtype)

        # "fprop" keeps what the forward pass used; everything else is quantised anew from the tensor itself.
        for_wgrad = qx if casts.wgrad_x == "fprop" else Operand(x)
        for_dgrad = qw if casts.dgrad_w == "fprop" else Operand(w)
        ctx.save_for_backward(
            *(for_wgrad if needs_w else (None, None)), amax_x, *(for_dgrad if needs_x else (None, None)), amax_w
        )
        # The keys are refilled in place for the next micro-batch, which may begin before this one's backward pass.
        ctx.rest = None if keys is None else keys.clone(), casts, exact, x.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, x_factor, amax_x, w, w_factor, amax_w = ctx.saved_tensors
        keys, casts, exact, dtype = ctx.rest
        needs_x, needs_w, needs_bias = ctx.needs_input_grad[:3]
        dx = dw = db = None
        with torch.autocast(g.device.type, enabled=False):
            amax_g = _amax(g, casts.dgrad_g, casts.wgrad_g)
            if needs_x:
                # dX = dY · W           [tokens, out] · [out, in]
                qg = _operand("dgrad_g", g, 1, amax_g, keys, casts, exact)
                qw = _operand("dgrad_w", w, 0, amax_w, keys, casts, exact, w_factor)
                dx = matmul(qg, qw, dtype=dtype)
            if needs_w:
                # dW = dYᵀ · X          [out, tokens] · [tokens, in]
                qg = _operand("wgrad_g", g, 0, amax_g, keys, casts, exact)
                qx = _operand("wgrad_x", x, 0, amax_x, keys, casts, exact, x_factor)
                dw = matmul(qg.t(), qx, dtype=dtype)
            if needs_bias:
                db = g.sum(0)  # of the unquantised gradient
        return dx, dw, db, None, None, None


def _amax(tensor: Tensor, *casts: OperandCast) -> Tensor | None:
    """Largest magnitude of a tensor, once for its casts, where one of them has a tensor scale."""
    return absmax(tensor) if any(isinstance(cast, Cast) and cast.scale.two_level for cast in casts) else None


def _operand(
    name: str,
    tensor: Tensor,
    dim: int,
    amax: Tensor | None,
    keys: Tensor | None,
    casts: LinearCasts,
    exact: bool,
    factor: Tensor | None = None,
) -> Operand:
    cast = getattr(casts, name)
    if not isinstance(cast, Cast):  # None: the tensor itself; "fprop": as the forward pass left it, with its factor
        return Operand(tensor, factor)
    key = None if keys is None else keys[OPERANDS.index(name)]
    return quantize_operand(tensor, cast, dim, key, amax if cast.scale.two_level else None, exact)


_HP = LinearCasts()


class QuantizedLayer(nn.Module):
    """What converted layers have in common.

    Attributes:
        casts: the casts in force.
        full_casts: the casts outside any phase.
        keys: int64 ``[6]``, the keys of stochastic rounding, in the order of ``OPERANDS``; None until set.
        exact: float32 GEMMs over exact operands instead of those of the compute dtype.
    """

    casts: LinearCasts = LinearCasts()
    full_casts: LinearCasts = LinearCasts()
    keys: Tensor | None = None
    exact: bool = False

    weight: Any  # as nn.Linear and Conv1D declare it
    bias: Any

    def weight_matrix(self) -> Tensor:
        """The weight as ``[out_features, in_features]``."""
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        """``x · Wᵀ + b``.

        Args:
            x: ``[..., in_features]``; cast to the autocast dtype where autocast is on, and so are weight and bias.

        Returns:
            ``[..., out_features]`` in the dtype of the computation.
        """
        if self.casts == _HP:  # nothing to quantise: the layer that this one was
            return super().forward(x)
        return self.quantized_forward(x)

    def quantized_forward(self, x: Tensor) -> Tensor:
        """:meth:`forward` through the six casts, whatever they are; with six of None still ``nn.Linear`` to the bit."""
        weight, bias, device = self.weight_matrix(), self.bias, x.device.type
        if torch.is_autocast_enabled(device) and x.dtype != torch.float64:  # which autocast leaves alone
            dtype = torch.get_autocast_dtype(device)
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        elif x.dtype != weight.dtype:
            raise ValueError(
                f"Input and weight must have one dtype; got {x.dtype} and {weight.dtype}. Cast one of them, or use "
                "torch.autocast."
            )
        with torch.autocast(device, enabled=False):
            matrix = x.reshape(-1, x.shape[-1])
            y: Tensor = _LinearFunction.apply(matrix, weight, bias, self.keys, self.casts, self.exact)  # type: ignore[no-untyped-call]
        return y.view(*x.shape[:-1], y.shape[-1])

    def extra_repr(self) -> str:
        """Shows the casts in force, so that ``print(model)`` tells how each layer computes."""
        inherited = super().extra_repr()
        return f"{inherited}, casts={self.casts}" if inherited else f"casts={self.casts}"


class QuantLinear(QuantizedLayer, nn.Linear):
    """A converted ``nn.Linear``. With six casts of None it computes what ``nn.Linear`` does, to the bit."""

    def forward(self, input: Tensor) -> Tensor:
        """As ``nn.Linear`` names its input, which callers may do too."""
        return super().forward(input)


@cache
def quantized_class(cls: Any) -> type[QuantizedLayer] | None:
    """The class that a layer of exactly this class is converted to, or None if it stays what it is."""
    if issubclass(cls, QuantizedLayer):
        return cls
    if cls is nn.Linear:
        return QuantLinear
    if (cls.__module__, cls.__name__) == ("transformers.pytorch_utils", "Conv1D"):
        # A linear layer whose weight is stored as [in_features, out_features] (GPT-2).
        members = {"weight_matrix": lambda self: self.weight.t(), "__repr__": nn.Module.__repr__}
        return type("QuantConv1D", (QuantizedLayer, cls), members)
    return None


def __getattr__(name: str) -> Any:
    """Finds the class of a converted ``Conv1D`` by name, which is how pickle looks for classes."""
    if name == "QuantConv1D":
        from transformers.pytorch_utils import Conv1D

        return quantized_class(Conv1D)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
