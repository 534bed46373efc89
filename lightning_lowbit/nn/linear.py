"""One linear layer: three GEMMs, six operands, six casts.

``QuantLinear`` is what an ``nn.Linear`` becomes, in place: :func:`lightning_lowbit.convert` assigns its ``__class__``,
so that parameters, their names and every reference to the module stay what they were.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_lowbit.nn.casts import OPERANDS, LinearCasts
from lightning_lowbit.nn.gemm import matmul, mean_times
from lightning_lowbit.quant import Cast, Operand, quantize_operand, rotate, split_mean, through_rounding
from lightning_lowbit.quant.scaling import absmax


class _LinearFunction(torch.autograd.Function):
    """``Y = X · Wᵀ + b`` and its gradients, each operand by its own cast."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, keys: Tensor | None, casts: LinearCasts, exact: bool
    ) -> Tensor:
        needs_x, needs_w = ctx.needs_input_grad[:2]
        amax_x = _amax(x, casts, "fprop_x", *["wgrad_x"] * needs_w)
        amax_w = _amax(w, casts, "fprop_w", *["dgrad_w"] * needs_x)

        # Y = X · Wᵀ + b            [tokens, in] · [in, out]
        qx, qw, offset = _operands("fprop", _Source(x, amax_x), _Source(w, amax_w), keys, casts, exact, bias)
        y = matmul(qx, qw.t(), offset, x.dtype)

        # "fprop" keeps what the forward pass used; everything else is quantised anew from the tensor itself.
        reused = torch.float32 if exact else x.dtype
        for_wgrad = _reusable(qx, reused) if casts.wgrad_x == "fprop" else Operand(x)
        for_dgrad = _reusable(qw, reused) if casts.dgrad_w == "fprop" else Operand(w)
        ctx.save_for_backward(
            *(for_wgrad if needs_w else (None, None)),
            amax_x,
            *(for_dgrad if needs_x else (None, None)),
            amax_w,
            x if needs_x and "fprop_x" in casts.surrogate else None,
            w if needs_w and "fprop_w" in casts.surrogate else None,
        )
        # The keys are refilled in place for the next micro-batch, which may begin before this one's backward pass.
        ctx.rest = None if keys is None else keys.clone(), casts, exact, x.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, x_factor, amax_x, w, w_factor, amax_w, forward_x, forward_w = ctx.saved_tensors
        keys, casts, exact, dtype = ctx.rest
        needs_x, needs_w, needs_bias = ctx.needs_input_grad[:3]
        dx = dw = db = None
        with torch.autocast(g.device.type, enabled=False):
            g_ = _Source(g, _amax(g, casts, *["dgrad_g"] * needs_x, *["wgrad_g"] * needs_w))
            if needs_x:
                # dX = dY · W           [tokens, out] · [out, in]
                qg, qw, of_mean = _operands("dgrad", g_, _Source(w, amax_w, w_factor), keys, casts, exact)
                dx = matmul(qg, qw, of_mean, dtype)
                dx = _through_rounding("fprop_x", dx, _Source(forward_x, amax_x), keys, casts)
            if needs_w:
                # dW = dYᵀ · X          [out, tokens] · [tokens, in]
                qg, qx, of_mean = _operands("wgrad", g_, _Source(x, amax_x, x_factor), keys, casts, exact)
                dw = matmul(qg.t(), qx, of_mean, dtype)
                dw = _through_rounding("fprop_w", dw, _Source(forward_w, amax_w), keys, casts)
            if needs_bias:
                db = g.sum(0)  # of the unquantised gradient
        return dx, dw, db, None, None, None


class _Source(NamedTuple):
    """What an operand is made from: ``values * factor``; ``amax`` is its largest magnitude where that is known."""

    values: Any
    amax: Tensor | None = None
    factor: Tensor | None = None


# The dimension of each operand that its GEMM contracts, in the order of OPERANDS.
_CONTRACTION = dict(zip(OPERANDS, (1, 1, 1, 0, 0, 0), strict=True))


def _operands(
    gemm: str,
    left: _Source,
    right: _Source,
    keys: Tensor | None,
    casts: LinearCasts,
    exact: bool,
    bias: Tensor | None = None,
) -> tuple[Operand, Operand, Tensor | None]:
    """Both operands of a GEMM as it takes them, and what is added to it: bias and product with a mean."""
    names = casts.operands_of(gemm)
    offset = bias
    if gemm in casts.subtract_mean:
        left, right, offset = _split_means(names, left, right, casts, bias)
    if gemm in casts.hadamard:
        transform = _transform(gemm, casts, keys, left.values.device)
        left, right = (
            _Source(rotate(source.values, transform, _CONTRACTION[name]))
            for name, source in zip(names, (left, right), strict=True)
        )
    return _operand(names[0], left, keys, casts, exact), _operand(names[1], right, keys, casts, exact), offset


def _operand(name: str, source: _Source, keys: Tensor | None, casts: LinearCasts, exact: bool) -> Operand:
    cast = getattr(casts, name)
    if not isinstance(cast, Cast):  # None: the tensor itself; "fprop": as the forward pass left it, with its factor
        return Operand(source.values, source.factor)
    key = None if keys is None else keys[OPERANDS.index(name)]
    amax = source.amax if cast.scale.needs_amax else None
    return quantize_operand(source.values, cast, _CONTRACTION[name], key, amax, exact)


def _split_means(
    names: Sequence[str], left: _Source, right: _Source, casts: LinearCasts, bias: Tensor | None
) -> tuple[_Source, _Source, Tensor]:
    """The operands without their means over the tokens, and the product with the mean, of rank one, plus bias.

    ``(A + 1μᵀ) B = A B + 1 (μᵀ B)``. Where both operands have tokens, ``(A + 1νᵀ)ᵀ (B + 1μᵀ) = Aᵀ B + tokens · ν μᵀ``,
    since the columns of A and B then sum to zero; splitting one of them gives the same.
    """
    rest, mean = split_mean(left.values)
    if names[1].endswith("_w"):
        weight = right.values.t() if _CONTRACTION[names[1]] == 1 else right.values
        return _Source(rest), right, mean_times(mean, weight, right.factor, bias)
    other_rest, other_mean = split_mean(right.values)
    product = mean.t() * len(rest) * other_mean
    left_split, right_split = (isinstance(getattr(casts, name), Cast) for name in names)
    return _Source(rest) if left_split else left, _Source(other_rest) if right_split else right, product


def _transform(gemm: str, casts: LinearCasts, keys: Tensor | None, device: torch.device) -> Tensor:
    """The rotation of a GEMM. Its signs come from the key of the second operand: that of a weight is all ranks' own."""
    name = casts.operands_of(gemm)[1]
    return casts.hadamard[gemm].matrix(None if keys is None else keys[OPERANDS.index(name)], device)


def _through_rounding(name: str, gradient: Tensor, source: _Source, keys: Tensor | None, casts: LinearCasts) -> Tensor:
    """The gradient of a tensor from that of its quantised self, in the space in which it was quantised."""
    if name not in casts.surrogate:
        return gradient  # straight through
    cast, kind = getattr(casts, name), casts.surrogate[name]
    if "fprop" not in casts.hadamard:
        amax = source.amax if cast.scale.needs_amax else None
        return through_rounding(gradient, kind, source.values, cast, 1, amax)
    transform = _transform("fprop", casts, keys, gradient.device)
    rotated = through_rounding(rotate(gradient, transform, 1), kind, rotate(source.values, transform, 1), cast, 1)
    return rotate(rotated, transform.t(), 1)[:, : gradient.shape[1]]


def _amax(tensor: Tensor, casts: LinearCasts, *operands: str) -> Tensor | None:
    """Largest magnitude of a tensor, once for its operands, where one that is made of the tensor as it is needs it."""

    def needed(operand: str) -> bool:
        cast, gemm = getattr(casts, operand), operand.partition("_")[0]
        altered = gemm in casts.hadamard or gemm in casts.subtract_mean
        return isinstance(cast, Cast) and cast.scale.needs_amax and not altered

    return absmax(tensor) if any(map(needed, operands)) else None


def _reusable(operand: Operand, dtype: torch.dtype) -> Operand:
    """An operand for another GEMM, which may contract the axis along which its factor varies."""
    if operand.factor is None or operand.factor.dim() == 0:
        return operand
    return Operand((operand.values.float() * operand.factor).to(dtype))


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
            if matrix.shape[1] != weight.shape[1]:  # a rotation would pad both to whole groups
                raise ValueError(f"The layer takes {weight.shape[1]} features; got {tuple(x.shape)}.")
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
