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

from lightning_lowbit.nn.casts import OPERANDS, SHARED, LinearCasts
from lightning_lowbit.nn.gemm import matmul, mean_times, native_obstacle
from lightning_lowbit.quant import (
    Cast,
    Operand,
    largest,
    quantize_operand,
    rotate,
    smoothing_factor,
    split_mean,
    through_rounding,
)
from lightning_lowbit.quant.scaling import absmax


class _Setup(NamedTuple):
    """How a layer computes: see :class:`QuantizedLayer`."""

    casts: LinearCasts
    keys: Tensor | None
    in_force: Tensor | None
    staged: Tensor | None  # None: amaxes are not recorded
    exact: bool
    native: tuple[str, ...]


class _LinearFunction(torch.autograd.Function):
    """``Y = X · Wᵀ + b`` and its gradients, each operand by its own cast."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, *setup: Any) -> Tensor:
        how = _Setup(*setup)
        casts, (needs_x, needs_w) = how.casts, ctx.needs_input_grad[:2]
        amax_x = _amax(x, casts, "fprop_x", *["wgrad_x"] * needs_w)
        amax_w = _amax(w, casts, "fprop_w", *["dgrad_w"] * needs_x)

        # Y = X · Wᵀ + b            [tokens, in] · [in, out]
        qx, qw, offset = _operands("fprop", _Source(x, amax_x), _Source(w, amax_w), how, bias)
        y = matmul(qx, qw.t(), offset, x.dtype, fast_accumulation=True)

        # "fprop" keeps what the forward pass used; everything else is quantised anew from the tensor itself.
        reused = torch.float32 if how.exact else x.dtype
        for_wgrad = _reusable(qx, reused) if casts.wgrad_x == "fprop" else Operand(x)
        for_dgrad = _reusable(qw, reused) if casts.dgrad_w == "fprop" or _shared("dgrad_w", how) else Operand(w)
        ctx.save_for_backward(
            *(for_wgrad if needs_w else (None, None)),
            amax_x,
            *(for_dgrad if needs_x else (None, None)),
            amax_w,
            x if needs_x and "fprop_x" in casts.surrogate else None,
            w if needs_w and "fprop_w" in casts.surrogate else None,
        )
        # Both are refilled in place for the next micro-batch or step, which may begin before this one's backward pass.
        keys, in_force = (None if slots is None else slots.clone() for slots in (how.keys, how.in_force))
        ctx.rest = how._replace(keys=keys, in_force=in_force), x.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, x_factor, amax_x, w, w_factor, amax_w, forward_x, forward_w = ctx.saved_tensors
        how, dtype = ctx.rest
        needs_x, needs_w, needs_bias = ctx.needs_input_grad[:3]
        dx = dw = db = None
        with torch.autocast(g.device.type, enabled=False):
            g_ = _Source(g, _amax(g, how.casts, *["dgrad_g"] * needs_x, *["wgrad_g"] * needs_w))
            if needs_x:
                # dX = dY · W           [tokens, out] · [out, in]
                w_ = _Source(w, amax_w, w_factor, made=_shared("dgrad_w", how))
                qg, qw, of_mean = _operands("dgrad", g_, w_, how)
                dx = matmul(qg, qw, of_mean, dtype)
                dx = _through_rounding("fprop_x", dx, _Source(forward_x, amax_x), how)
                if _shared("wgrad_g", how):
                    g_ = _Source(qg.values, None, qg.factor, made=True)
            if needs_w:
                # dW = dYᵀ · X          [out, tokens] · [tokens, in]
                qg, qx, of_mean = _operands("wgrad", g_, _Source(x, amax_x, x_factor), how)
                dw = matmul(qg.t(), qx, of_mean, dtype)
                dw = _through_rounding("fprop_w", dw, _Source(forward_w, amax_w), how)
            if needs_bias:
                db = g.sum(0)  # of the unquantised gradient
        return dx, dw, db, *[None] * len(how)


class _Source(NamedTuple):
    """What an operand is made from: ``values * factor``; ``amax`` is its largest magnitude where that is known.

    ``made``: it is the operand already, quantised for another GEMM.
    """

    values: Any
    amax: Tensor | None = None
    factor: Tensor | None = None
    made: bool = False


# The dimension of each operand that its GEMM contracts, in the order of OPERANDS.
_CONTRACTION = dict(zip(OPERANDS, (1, 1, 1, 0, 0, 0), strict=True))


def _operands(
    gemm: str, left: _Source, right: _Source, how: _Setup, bias: Tensor | None = None
) -> tuple[Operand, Operand, Tensor | None]:
    """Both operands of a GEMM as it takes them, and what is added to it: bias and product with a mean."""
    casts, names = how.casts, how.casts.operands_of(gemm)
    offset = bias
    if gemm in casts.subtract_mean:
        left, right, offset = _split_means(names, left, right, casts, bias)
    if gemm in casts.hadamard:
        transform = _transform(gemm, casts, how.keys, left.values.device)
        left, right = (
            _Source(rotate(source.values, transform, _CONTRACTION[name]))
            for name, source in zip(names, (left, right), strict=True)
        )
    return _operand(names[0], left, how), _operand(names[1], right, how), offset


def _operand(name: str, source: _Source, how: _Setup) -> Operand:
    cast = getattr(how.casts, name)
    if source.made or not isinstance(cast, Cast):  # None: the tensor itself; "fprop": as it was left, with its factor
        return Operand(source.values, source.factor)
    key = None if how.keys is None else how.keys[OPERANDS.index(name)]
    amax = _scale_amax(name, cast, source, how)
    native = cast.format.dtype if name.partition("_")[0] in how.native else None
    dtype = torch.float32 if how.exact else native
    return quantize_operand(source.values, cast, _CONTRACTION[name], key, amax, dtype)


def _scale_amax(name: str, cast: Cast, source: _Source, how: _Setup) -> Tensor | None:
    """The amax that a tensor is scaled by: its own, or with delayed scaling that in force, if there is one."""
    if not cast.scale.needs_amax:
        return None
    if cast.scale.source == "current":
        return source.amax
    own = absmax(source.values) if source.amax is None else source.amax
    i = OPERANDS.index(name)
    assert how.in_force is not None
    if how.staged is not None:  # a slot keeps the largest of the step; an operand that is shared has two
        others = [other for other, made in SHARED.items() if made == name and _shared(other, how)]
        for slot in (i, *map(OPERANDS.index, others)):
            how.staged[slot] = torch.maximum(how.staged[slot], own.nan_to_num(nan=0.0, posinf=0.0))
    return torch.where(how.in_force[i] > 0, how.in_force[i], own)


def _shared(operand: str, how: _Setup) -> bool:
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


def _through_rounding(name: str, gradient: Tensor, source: _Source, how: _Setup) -> Tensor:
    """The gradient of a tensor from that of its quantised self, in the space in which it was quantised."""
    casts, how = how.casts, how._replace(staged=None)
    if name not in casts.surrogate:
        return gradient  # straight through
    cast, kind = getattr(casts, name), casts.surrogate[name]
    if "fprop" not in casts.hadamard:
        return through_rounding(gradient, kind, source.values, cast, 1, _scale_amax(name, cast, source, how))
    transform = _transform("fprop", casts, how.keys, gradient.device)
    turned = _Source(rotate(source.values, transform, 1))
    amax = _scale_amax(name, cast, turned, how)
    rotated = through_rounding(rotate(gradient, transform, 1), kind, turned.values, cast, 1, amax)
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

# Where GEMMs run: natively where device and casts allow, always natively, or never.
BACKENDS = ("auto", "native", "emulated")


class LayerAmaxes(NamedTuple):
    """A layer's views of what :class:`lightning_lowbit.nn.AmaxHistories` remembers; all float32, 0 where there is none.

    Attributes:
        in_force: ``[6]``, what operands with delayed scaling are scaled by.
        staged: ``[6]``, the largest of the step under way.
        channels: ``[in_features]``, amaxes of the channels of x in the last step, where they are smoothed; else empty.
        staged_channels: likewise, of the step under way.
        switch: whether passes are stages of a step, a list of one for all layers.
    """

    in_force: Tensor
    staged: Tensor
    channels: Tensor
    staged_channels: Tensor
    switch: list[bool]


class QuantizedLayer(nn.Module):
    """What converted layers have in common.

    Attributes:
        casts: the casts in force.
        full_casts: the casts outside any phase.
        keys: int64 ``[6]``, the keys of stochastic rounding, in the order of ``OPERANDS``; None until set.
        amaxes: what outlives a step; None until set.
        exact: float32 GEMMs over exact operands instead of those of the compute dtype.
        backend: ``"auto"`` (native GEMMs where device and casts allow), ``"native"`` or ``"emulated"``.
        token_amax: float32 ``[tokens, 1]``, what tokens are smoothed by in the next pass; None until set.
    """

    casts: LinearCasts = LinearCasts()
    full_casts: LinearCasts = LinearCasts()
    keys: Tensor | None = None
    amaxes: LayerAmaxes | None = None
    exact: bool = False
    backend: str = "auto"
    token_amax: Tensor | None = None

    weight: Any  # as nn.Linear and Conv1D declare it
    bias: Any

    def set_casts(self, casts: LinearCasts) -> None:
        """Sets the casts, outside any phase. Amaxes of other ones are dropped: they may be of other operands."""
        if casts != self.full_casts:
            self.amaxes = None
        self.full_casts = self.casts = casts

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
            y = self._smoothed(matrix, weight, bias)
        return y.view(*x.shape[:-1], y.shape[-1])

    def _smoothed(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # Y = (X · diag(s)) · (W · diag(1/s))ᵀ + b      per channel
        # Y = diag(1/s) · (diag(s) · X) · Wᵀ + b        per token
        if self.casts.smooth == "channel":
            s = smoothing_factor(self._channel_amax(x), x.dtype)
            return self._multiply(x * s, weight * s.reciprocal(), bias)
        if self.casts.smooth == "token":
            s = smoothing_factor(self._token_amax(x), x.dtype)
            y = self._multiply(x * s, weight, None) * s.reciprocal()
            return y if bias is None else y + bias
        return self._multiply(x, weight, bias)

    def _channel_amax(self, x: Tensor) -> Tensor:
        """float32 ``[in_features]``: of this batch in training, of the last training step after it."""
        own = largest(x.detach(), 0)[0]
        if self.amaxes is None:
            return own
        _, _, channels, staged, (recording,) = self.amaxes
        if recording:
            staged.copy_(torch.maximum(staged, own.nan_to_num(nan=0.0, posinf=0.0)))
            return own
        return torch.where(channels > 0, channels, own)

    def _token_amax(self, x: Tensor) -> Tensor:
        """float32 ``[tokens, 1]``: of the up projection's output, which that left here."""
        amax, self.token_amax = self.token_amax, None
        if amax is None or amax.numel() != len(x):
            raise ValueError(
                "smooth='token' scales by the output of an MLP's up projection, and none has come before this pass: "
                "set it up with lightning_lowbit.smooth_swiglu(model, 'token'), or smooth channels."
            )
        return amax.view(-1, 1)

    def _multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        in_force, staged = (None, None) if self.amaxes is None else self.amaxes[:2]
        if in_force is None and self.casts.is_delayed:
            raise ValueError(
                "Delayed scaling needs histories: they are set by the precision plugin, or by "
                "lightning_lowbit.nn.AmaxHistories where there is no Trainer."
            )
        if self.amaxes is not None and not self.amaxes.switch[0]:
            staged = None
        native = self.native_gemms(x.device)
        setup = _Setup(self.casts, self.keys, in_force, staged, self.exact, native)
        y: Tensor = _LinearFunction.apply(x, weight, bias, *setup)  # type: ignore[no-untyped-call]
        return y

    def native_gemms(self, device: torch.device, casts: LinearCasts | None = None) -> tuple[str, ...]:
        """The GEMMs that a device computes natively in FP8, with casts, or those in force; all others are emulated.

        Raises:
            ValueError: ``backend="native"`` on a device that has no FP8 GEMMs.
        """
        if self.backend == "emulated" or self.exact:
            return ()
        obstacle = native_obstacle(device)
        if obstacle is not None and self.backend == "native":
            raise ValueError(f"backend='native': {obstacle}. Use backend='auto' or 'emulated'.")
        return (casts or self.casts).native_gemms if obstacle is None else ()

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


def is_linear(module: Any) -> bool:
    """Whether a module is a layer that can be converted, or has been."""
    return quantized_class(type(module)) is not None  # type: ignore[arg-type]


def __getattr__(name: str) -> Any:
    """Finds the class of a converted ``Conv1D`` by name, which is how pickle looks for classes."""
    if name == "QuantConv1D":
        from transformers.pytorch_utils import Conv1D

        return quantized_class(Conv1D)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
