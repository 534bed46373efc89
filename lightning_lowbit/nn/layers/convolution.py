"""Convolutions, and transposed ones, whose GEMMs are quantized.

A convolution is a linear layer over patches (:mod:`lightning_lowbit.kernels.windows`), a transposed one a linear layer
whose outputs are patches, which are added up:

    convolution             patches of x [positions, kernel · C_in]  ·  Wᵀ [kernel · C_in, C_out]
    transposed convolution               x [pixels, C_in]            ·  Wᵀ [C_in, kernel · C_out]  →  scattered

Each group of channels is such a layer of its own, with keys of its own. The backward pass gathers patches again,
instead of keeping them.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.lazy import LazyModuleMixin

from lightning_lowbit.kernels.windows import Window
from lightning_lowbit.nn.core.calls import keys_of_call
from lightning_lowbit.nn.core.inputs import check_inputs
from lightning_lowbit.nn.core.saving import saved_bits
from lightning_lowbit.nn.core.window import Images
from lightning_lowbit.nn.layers.layer import QuantizedLayer
from lightning_lowbit.nn.layers.registry import derived, kind

DEPTHWISE = "a depthwise convolution, whose contractions are narrower than a block"

_CHANNELS_LAST = {2: torch.channels_last, 3: torch.channels_last_3d}


class QuantizedConvolution(QuantizedLayer):
    """Base class of converted convolutions. With six casts of None each equals its original class to the bit."""

    kind = "convolution"
    keeps_parameter = False
    patched_side: ClassVar[int] = 0  # where patches are: 0 for the input, 1 for the output

    in_channels: Any  # as nn.Conv2d and the others declare them
    out_channels: Any
    kernel_size: Any
    stride: Any
    padding: Any
    dilation: Any
    groups: Any
    padding_mode: Any
    _reversed_padding_repeated_twice: Any
    _output_padding: Any

    @staticmethod
    def obstacle(module: Any) -> str | None:
        return DEPTHWISE if module.in_channels == module.groups > 1 else None

    def matrix_of(self, weight: Tensor) -> Tensor:
        """Returns the weight as ``[C_out, kernel · C_in]``, of a transposed convolution ``[kernel · C_out, C_in]``,
        channels innermost, or ``[groups, …]`` a stack of such: a copy, unless the weight is in channels-last order."""
        return self._matrices(weight)[0]

    def _matrices(self, weight: Any) -> tuple[Tensor, Tensor]:
        """Returns :meth:`weight_matrix`, and the weight in the same order before its dimensions are merged."""
        stack = int(self.groups > 1)  # dimensions before those of a matrix
        view = (weight.unflatten(0, (self.groups, -1)) if stack else weight).movedim(1 + stack, -1)
        return view.flatten(1 + stack), view

    def set_weight_matrix(self, values: Tensor) -> None:
        view = self._matrices(self.weight.detach())[1]
        view.copy_(values.reshape(view.shape))

    @property
    def size_text(self) -> str:
        """The size in tables, of each group: ``64×3×3 → 128``, or ``128 → 64×2×2`` of a transposed convolution."""
        sizes = [str(channels // self.groups) for channels in (self.in_channels, self.out_channels)]
        sizes[self.patched_side] += "".join(f"×{k}" for k in self.kernel_size)
        return " → ".join(sizes) + f", {self.groups} groups" * (self.groups > 1)

    def saved_input(self, dtype: torch.dtype) -> tuple[int, float]:
        """Returns the elements of an input pixel, and the bits of each that a pass in ``dtype`` saves for backward:
        those of the images where patches of them overlap."""
        save = self.lowbit.save if self.patched_side or self._window(self.padding).is_tiling else "inputs"
        return self.in_channels, saved_bits(self.full_casts, save, dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Computes the convolution of ``input`` ``[N, C, *sizes]`` or ``[C, *sizes]``; under autocast in its dtype."""
        if self.lowbit.casts.traits.is_empty or check_inputs(self, input):
            return super().forward(input)
        x = self._batch(input)
        padding = self.padding
        if self.padding_mode != "zeros":
            x, padding = F.pad(x, self._reversed_padding_repeated_twice, mode=self.padding_mode), "valid"
        window = self._window(padding)
        positions = window.positions(x.shape[2:], self.name_in_errors)
        rows = self._products(x, self.bias, window)
        y = rows[0] if len(rows) == 1 else torch.cat(rows, 1)
        y = y.view(len(x), *positions, self.out_channels).movedim(-1, 1)
        return self._laid_out(y, input)

    def _window(self, padding: str | tuple[int, ...]) -> Window:
        spans = [d * (k - 1) for k, d in zip(self.kernel_size, self.dilation, strict=True)]
        if not isinstance(padding, str):
            before = after = padding
        else:  # "same": the odd one of the zeros goes to the end
            before, after = (tuple((n + odd) // 2 * (padding == "same") for n in spans) for odd in (0, 1))
        return Window(self.kernel_size, self.stride, self.dilation, before, after)

    def _batch(self, input: Tensor) -> Tensor:
        """Returns the input as ``[N, C, *sizes]``; a ValueError for one that the layer cannot take."""
        if isinstance(self.weight, DTensor):
            raise ValueError(
                "The weight of a convolution is spread over processes, and a quantized one computes with the whole "
                "weight. If fully_shard has spread it, call the module that was given to fully_shard; leave it out of "
                "tensor parallelism."
            )
        spatial = len(self.kernel_size)
        if input.dim() - spatial not in (1, 2) or input.shape[-spatial - 1] != self.in_channels:
            raise ValueError(
                f"Layer {self.name_in_model} takes {self.in_channels} channels of {spatial} dimensions, with a batch "
                f"dimension or without; got {tuple(input.shape)}."
            )
        return input if input.dim() == spatial + 2 else input.unsqueeze(0)

    def _products(self, x: Tensor, bias: Tensor | None, window: Window | None) -> list[Tensor]:
        """Multiplies each group: rows of positions, or of pixels where there is no window."""
        keys, matrices, groups = keys_of_call(self), self.weight_matrix(), self.groups
        if groups == 1:
            return [self.quantized_forward(x, matrices, bias, window=window, keys=keys)]
        biases = [None] * groups if bias is None else bias.chunk(groups)
        return [
            self.quantized_forward(channels, matrix, row, window=window, keys=keys, number=i)
            for i, (channels, matrix, row) in enumerate(zip(x.chunk(groups, 1), matrices.unbind(), biases, strict=True))
        ]

    def _laid_out(self, y: Tensor, input: Tensor) -> Tensor:
        """Brings the result into the memory format that torch's convolution would give it."""
        order = _CHANNELS_LAST.get(len(self.kernel_size))
        if order is None or not any(
            tensor.dim() == y.dim() and tensor.is_contiguous(memory_format=order) and not tensor.is_contiguous()
            for tensor in (input, self.weight)
        ):
            order = torch.contiguous_format
        y = y.contiguous(memory_format=order)
        return y if input.dim() == y.dim() else y.squeeze(0)


class QuantizedTransposed(QuantizedConvolution):
    """Base class of converted transposed convolutions: rounded outputs of the GEMM are added up in float32."""

    patched_side = 1

    def _matrices(self, weight: Any) -> tuple[Tensor, Tensor]:
        stack = int(self.groups > 1)
        view = (weight.unflatten(0, (self.groups, -1)) if stack else weight).movedim((1 + stack, stack), (-2, -1))
        return view.flatten(stack, -2), view

    def forward(self, input: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        """Computes the transposed convolution of ``[N, C, *sizes]`` or ``[C, *sizes]``; under autocast in its dtype."""
        if self.lowbit.casts.traits.is_empty or check_inputs(self, input):
            return super(QuantizedLayer, self).forward(input, output_size)
        if self.padding_mode != "zeros":
            raise ValueError(
                f"Layer {self.name_in_model} pads with zeros alone; got padding_mode={self.padding_mode!r}."
            )
        x = self._batch(input)
        added = self._output_padding(
            input, output_size, self.stride, self.padding, self.kernel_size, len(self.kernel_size), self.dilation
        )
        after = tuple(p - more for p, more in zip(self.padding, added, strict=True))
        window = Window(self.kernel_size, self.stride, self.dilation, self.padding, after)
        shape = (len(x), self.out_channels // self.groups, *window.sizes(x.shape[2:]))
        rows = self._products(x.movedim(1, -1).flatten(0, -2), None, None)
        parts = [Images.apply(patches, window, shape, self.name_in_errors) for patches in rows]  # type: ignore[no-untyped-call]
        y = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        if self.bias is not None:
            y = y + self.bias.to(y.dtype).view(-1, *[1] * len(self.kernel_size))
        return self._laid_out(y, input)


class QuantConv1d(QuantizedConvolution, nn.Conv1d):
    """A converted ``nn.Conv1d``."""


class QuantConv2d(QuantizedConvolution, nn.Conv2d):
    """A converted ``nn.Conv2d``."""


class QuantConv3d(QuantizedConvolution, nn.Conv3d):
    """A converted ``nn.Conv3d``."""


class QuantConvTranspose1d(QuantizedTransposed, nn.ConvTranspose1d):
    """A converted ``nn.ConvTranspose1d``."""


class QuantConvTranspose2d(QuantizedTransposed, nn.ConvTranspose2d):
    """A converted ``nn.ConvTranspose2d``."""


class QuantConvTranspose3d(QuantizedTransposed, nn.ConvTranspose3d):
    """A converted ``nn.ConvTranspose3d``."""


_CLASSES: dict[Any, type[QuantizedConvolution]] = {
    cls.__bases__[1]: cls
    for cls in (QuantConv1d, QuantConv2d, QuantConv3d, QuantConvTranspose1d, QuantConvTranspose2d, QuantConvTranspose3d)
}


@kind
def convolution_class(cls: Any) -> type[QuantizedConvolution] | None:
    """Returns the class for a convolution of torch, or a class that computes as one; None for others."""
    if cls in _CLASSES:
        return _CLASSES[cls]
    original = next((base for base in _CLASSES if issubclass(cls, base)), None)
    if original is None or issubclass(cls, LazyModuleMixin):  # which changes its class itself
        return None
    methods = ("forward", "_conv_forward", "__call__")
    if any(getattr(cls, name, None) is not getattr(original, name, None) for name in methods):
        return None
    return derived(_CLASSES[original].__bases__[0], cls)
