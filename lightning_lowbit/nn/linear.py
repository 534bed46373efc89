"""Linear layers whose GEMMs are quantized.

``QuantLinear`` is what an ``nn.Linear`` becomes, in place: :func:`lightning_lowbit.convert` assigns its ``__class__``,
so that parameters, their names and every reference to the module stay what they were.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_lowbit.nn.calls import Calls, keys_of_call
from lightning_lowbit.nn.casts import LinearCasts
from lightning_lowbit.nn.function import MadeWeight, Setup, linear_function, stage_
from lightning_lowbit.nn.gemm import native_obstacle
from lightning_lowbit.nn.sharded.parallel import Parts, tensor_parallel
from lightning_lowbit.quant import largest, smoothing_factor
from lightning_lowbit.quant.part import largest_of

_HP = LinearCasts()

# Where GEMMs run: natively where device and casts allow, always natively, or never.
BACKENDS = ("auto", "native", "emulated")


def has_native_gemms(device: torch.device, kind: str, backend: str = "auto") -> bool:
    """Whether a device computes GEMMs in ``"fp8"`` or ``"int8"`` natively.

    Raises:
        ValueError: it does not, and ``backend`` is ``"native"``.
    """
    obstacle = native_obstacle(device, kind)
    if obstacle is not None and backend == "native":
        raise ValueError(f"backend='native': {obstacle}. Use backend='auto' or 'emulated'.")
    return obstacle is None


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
        calls: numbers the calls within a micro-batch, which have keys of their own; None: all have these.
        amaxes: what outlives a step; None until set.
        exact: float32 GEMMs over exact operands instead of those of the compute dtype.
        backend: ``"auto"`` (native GEMMs where device and casts allow), ``"native"`` or ``"emulated"``.
        blend: float32, 0-d: λ of progressive quantization, which is on its way; None for all the way. See
            :func:`set_blend`.
        operand_sums, gradient_sums: where passes leave what they see of operands and of the weight's gradient; None
            while nobody asks. See :mod:`lightning_lowbit.nn.watch`.
        token_amax: float32 ``[tokens, 1]``, what tokens are smoothed by in the next pass; None until set.
        weight_amax: float32, 0-d: what the weight's operands are scaled by instead of its own amax, see
            :mod:`lightning_lowbit.nn.conversion.shared_amax`; None for its own.
        made_weight: what the weight is while it is gathered, if it was quantized before; see
            :mod:`lightning_lowbit.nn.sharded.gather`.
    """

    casts: LinearCasts = LinearCasts()
    full_casts: LinearCasts = LinearCasts()
    keys: Tensor | None = None
    calls: Calls | None = None
    amaxes: LayerAmaxes | None = None
    exact: bool = False
    backend: str = "auto"
    blend: Tensor | None = None
    token_amax: Tensor | None = None
    operand_sums: Tensor | None = None
    gradient_sums: Tensor | None = None
    weight_amax: Tensor | None = None
    made_weight: MadeWeight | None = None

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
        if self.casts == _HP:  # nothing to quantize: the layer that this one was
            return super().forward(x)
        return self.quantized_forward(x)

    def quantized_forward(self, x: Tensor) -> Tensor:
        """:meth:`forward` through the six casts, whatever they are; with six of None still ``nn.Linear`` to the bit."""
        weight = self.weight_matrix()
        if isinstance(weight, DTensor):
            return tensor_parallel(self.local_forward, x, weight, self.bias)
        return self.local_forward(x, weight, self.bias, Parts())

    def local_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, parts: Parts) -> Tensor:
        """:meth:`quantized_forward` of what this process holds.

        Args:
            x: ``[..., in_features]``.
            weight: ``[out_features, in_features]``.
            bias: ``[out_features]`` or None.
            parts: what the three matrices are parts of.
        """
        device = x.device.type
        if torch.is_autocast_enabled(device) and x.dtype != torch.float64:  # which autocast leaves alone
            dtype = torch.get_autocast_dtype(device)
            x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
            weight = weight.to(dtype) if self.made_weight is None else weight
        elif x.dtype != weight.dtype:
            raise ValueError(
                f"Input and weight must have one dtype; got {x.dtype} and {weight.dtype}. Cast one of them, or use "
                "torch.autocast."
            )
        if self.made_weight is not None and self.made_weight.made_of != x.dtype:
            raise ValueError(
                f"The weight was quantized in {self.made_weight.made_of}, before it was gathered, and this pass is one "
                f"in {x.dtype}. Compute all passes of the layer in one dtype, or leave out quantize_before_gather."
            )
        with torch.autocast(device, enabled=False):
            matrix = x.flatten(0, -2) if x.dim() > 1 else x[None]  # also where there is nothing
            if matrix.shape[1] != weight.shape[1]:  # a rotation would pad both to whole groups
                raise ValueError(f"The layer takes {weight.shape[1]} features; got {tuple(x.shape)}.")
            y = self._smoothed(matrix, weight, bias, parts)
        # As nn.Linear does: what a module returns should not be a view, of which FSDP2 warns.
        return torch.ops.aten._unsafe_view(y, (*x.shape[:-1], y.shape[-1]))

    def _smoothed(self, x: Tensor, weight: Tensor, bias: Tensor | None, parts: Parts) -> Tensor:
        # Y = (X · diag(s)) · (W · diag(1/s))ᵀ + b      per channel
        # Y = diag(1/s) · (diag(s) · X) · Wᵀ + b        per token
        if self.casts.smooth == "channel":
            s = smoothing_factor(self._channel_amax(x, parts), x.dtype)
            return self._multiply(x * s, weight * s.reciprocal(), bias, parts)
        if self.casts.smooth == "token":
            s = smoothing_factor(self._token_amax(x, parts), x.dtype)
            y = self._multiply(x * s, weight, None, parts) * s.reciprocal()
            return y if bias is None else y + bias
        return self._multiply(x, weight, bias, parts)

    def _channel_amax(self, x: Tensor, parts: Parts) -> Tensor:
        """float32 ``[in_features]``: of this batch in training, of the last training step after it."""
        own = largest(x.detach(), 0)[0]
        if self.amaxes is None:
            return own
        _, _, channels, staged, (recording,) = self.amaxes
        if parts.x is not None:  # channels are cut: these are those of here
            channels, staged = (of_all.narrow(0, parts.x.start, len(own)) for of_all in (channels, staged))
        if recording:
            stage_(staged, own)
            return own
        return torch.where(channels > 0, channels, own)

    def _token_amax(self, x: Tensor, parts: Parts) -> Tensor:
        """float32 ``[tokens, 1]``: of the up projection's output, which that left here."""
        amax, self.token_amax = self.token_amax, None
        if amax is None or amax.numel() != len(x):
            raise ValueError(
                "smooth='token' scales by the output of an MLP's up projection, and none has come before this pass: "
                "set it up with lightning_lowbit.smooth_swiglu(model, 'token'), or smooth channels."
            )
        return largest_of(amax.view(-1, 1), parts.x)

    def _multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None, parts: Parts) -> Tensor:
        in_force, staged = (None, None) if self.amaxes is None else self.amaxes[:2]
        if in_force is None and self.casts.is_delayed:
            raise ValueError(
                "Delayed scaling needs histories: they are set by the precision plugin, or by "
                "lightning_lowbit.nn.AmaxHistories where there is no Trainer."
            )
        if self.amaxes is not None and not self.amaxes.switch[0]:
            staged = None
        native, sums = self.native_gemms(x.device), (self.operand_sums, self.gradient_sums)
        how = Setup(self.casts, keys_of_call(self), in_force, staged, self.exact, native, self.blend, *sums, parts)
        if (made := self.made_weight) is not None:
            how = how._replace(weight_amax=made.amax, made_dtype=made.dtype, made_factor=made.factor)
        else:
            how = how._replace(weight_amax=self.shared_amax(weight.dtype))
        return linear_function(x, weight, bias, how)

    def shared_amax(self, dtype: torch.dtype) -> Tensor | None:
        """``weight_amax`` of weights that are rounded to a dtype first, which keeps their order; None for their own."""
        return None if self.weight_amax is None else self.weight_amax.to(dtype).float()

    def native_gemms(self, device: torch.device, casts: LinearCasts | None = None) -> tuple[str, ...]:
        """The GEMMs that a device computes natively, with casts, or those in force; all others are emulated.

        None are while operands are on their way, see :func:`set_blend`; with casts given it is said for all the way.

        Raises:
            ValueError: ``backend="native"`` on a device that has none of their kind.
        """
        if self.backend == "emulated" or self.exact or (casts is None and self.blend is not None):
            return ()
        kinds = (casts or self.casts).native_gemms
        return tuple(gemm for gemm, kind in kinds.items() if has_native_gemms(device, kind, self.backend))

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
    if issubclass(cls, FSDPModule):
        from torch.distributed.fsdp._fully_shard._fully_shard import get_cls_to_fsdp_cls

        # What fully_shard makes of a module's class: FSDPModule, then the class itself
        sharded, original, *_ = cls.__bases__
        quantized = quantized_class(original)
        if quantized is None:
            return None
        members = {"__deepcopy__": cls.__deepcopy__}
        return get_cls_to_fsdp_cls().setdefault(
            quantized, type(f"FSDP{quantized.__name__}", (sharded, quantized), members)
        )
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
