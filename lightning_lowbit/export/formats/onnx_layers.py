"""Layers in ONNX's operators: weights that ``DequantizeLinear`` decodes, and inputs that are rounded to few bits.

    weight                          DequantizeLinear(codes, scales)
    input, e = max / amax           Abs, ReduceMax, Div of a token, a group of its features, or the tensor
           round(x · e) / e         Mul, Round or Cast, Mul
    input whose scale is known      Clip, QuantizeLinear, DequantizeLinear

They compute in float32, and only while ``torch.onnx`` traces them.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.onnx.ops import symbolic

from lightning_lowbit.export.formats.packing import by_row
from lightning_lowbit.export.weights import Weight
from lightning_lowbit.formats import E4M3, E5M2
from lightning_lowbit.kernels.windows import Window
from lightning_lowbit.nn.core.window import is_pixelwise
from lightning_lowbit.nn.layers.convolution import QuantizedConvolution, QuantizedTransposed
from lightning_lowbit.nn.layers.layer import QuantizedLayer
from lightning_lowbit.quant import Cast, Quantized
from lightning_lowbit.quant.scales import e8m0_rule, fp32_numerator, scales_of

# Types of ONNX, by their numbers.
UINT8, INT8, FLOAT8E4M3FN, FLOAT8E5M2, UINT4, INT4 = 2, 3, 17, 19, 21, 22
TYPES = {UINT8: "uint8", INT8: "int8", FLOAT8E4M3FN: "e4m3", FLOAT8E5M2: "e5m2", UINT4: "uint4", INT4: "int4"}

_FLOAT8 = {E4M3: FLOAT8E4M3FN, E5M2: FLOAT8E5M2}
_DTYPES = {FLOAT8E4M3FN: torch.float8_e4m3fn, FLOAT8E5M2: torch.float8_e5m2}
_WHOLE = ("twos-complement", "offset")  # encodings of formats whose values are whole numbers
_LARGEST, _TINY = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny

_CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)
_TRANSPOSED = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


def stored_as(cast: Cast) -> tuple[int, float]:
    """Returns the type that holds the elements of a weight exactly, divided by a number."""
    if cast.scale.statistic == "minmax":
        return (UINT4 if cast.format.bits <= 4 else UINT8), 1.0
    unit = 2.0 ** (cast.format.min_exponent - cast.format.mantissa_bits)  # elements are whole multiples of it
    largest = cast.format.max / unit
    if largest <= 127:
        return (INT4 if largest <= 7 else INT8), unit
    return (FLOAT8E5M2 if cast.format is E5M2 else FLOAT8E4M3FN), 1.0  # E4M3 holds E3M2, too


class Decoded(nn.Module):
    """A weight as ``DequantizeLinear`` decodes it, to the values of ``quantized.dequantize()``: ``number`` is the type
    of its ``codes`` in the file, of which those of four bits are int8 or uint8 here."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None

    def __init__(self, quantized: Quantized, transposed: bool, codes: Tensor | None = None) -> None:
        """``transposed`` decodes to ``[in, out]``. ``codes``, of another shape, are those of rows in dimension 0."""
        super().__init__()
        self.number, unit = stored_as(quantized.cast)
        block, zeros = quantized.cast.scale.block, quantized.zero_points
        scales = by_row(quantized, quantized.multipliers() * unit)
        codes = quantized.codes if codes is None else codes
        if zeros is None:
            codes = (quantized.cast.format.decode(codes) / unit).to(_DTYPES.get(self.number, torch.int8))
        self.attributes: dict[str, Any] = {}
        if scales.shape[1] > 1:
            size = block[1] if isinstance(block, tuple) else block
            self.attributes = {"axis": int(not transposed), "block_size": size}
        elif len(scales) > 1:
            self.attributes = {"axis": int(transposed)}

        def laid_out(values: Tensor) -> Tensor:
            if scales.shape[1] == 1:
                return values.flatten() if len(scales) > 1 else values.reshape(())
            return values.t().contiguous() if transposed else values

        self.register_buffer("codes", codes.t().contiguous() if transposed else codes.contiguous())
        self.register_buffer("scales", laid_out(scales))
        self.register_buffer("zeros", None if zeros is None else laid_out(by_row(quantized, zeros)))

    def forward(self) -> Tensor:
        inputs, shape = [self.codes, self.scales, *([] if self.zeros is None else [self.zeros])], self.codes.shape
        return symbolic("DequantizeLinear", inputs, self.attributes, dtype=torch.float32, shape=shape, version=21)


def input_obstacle(cast: Cast) -> str | None:
    """Returns why operators of ONNX do not express the cast of an input, in words; None if they do."""
    scale = cast.scale
    if cast.draws:
        return f"its input is rounded stochastically ({cast})"
    if cast.format.mantissa_bits == 0:
        return f"its input is quantized to {cast.element}, whose rounding operators of ONNX do not express"
    plain = scale.rounding == "nearest" and (scale.format == "fp32" or scale.storage in _FLOAT8)
    other = scale.statistic != "absmax" or scale.four_over_six or scale.correction or scale.prescale != 1
    if not (plain or scale.format == "e8m0") or other or isinstance(scale.block, tuple):
        return f"its input has scales {scale}, which operators of ONNX do not express"
    return None


class InputRounding(nn.Module):
    """Rounds an input ``[..., features]`` to few bits, as a cast does, in the order of operations of
    :mod:`lightning_lowbit.quant.scaling`. ``amax`` of the tensor, 0-d, is None if scales are made of the input's
    own."""

    numerator: Tensor
    amax: Tensor | None
    step: Tensor | None

    def __init__(self, cast: Cast, amax: Tensor | None) -> None:
        super().__init__()
        self.cast = cast
        two_level = cast.scale.largest * cast.format.max / cast.scale.factor
        self.register_buffer("numerator", torch.tensor(two_level if cast.scale.two_level else fp32_numerator(cast)))
        self.inverse = float(torch.ones(()) / cast.format.max)  # in float32
        self.register_buffer("amax", None if amax is None else amax.float())
        # ``QuantizeLinear`` rounds to FP8 and to whole numbers.
        is_type = cast.scale.format == "fp32" and (cast.format in _FLOAT8 or cast.format.encoding in _WHOLE)
        is_static = amax is not None and cast.scale.block == "tensor" and is_type
        e = scales_of(self.amax, torch.ones(()), cast) if is_static and self.amax is not None else None
        self.register_buffer("step", None if e is None else e.reciprocal())
        self.limit = 0.0 if e is None else float(cast.format.max / e)

    def forward(self, x: Tensor) -> Tensor:
        block, size = self.cast.scale.block, x.shape[-1]
        if self.step is not None:
            return self._by_known_step(x, self.step)
        if not isinstance(block, int):
            amax = self._amax_of_tensor(x) if block == "tensor" else x.abs().amax(-1, keepdim=True)
            e, step = self._scales(amax, x)
            return self._rounded(x * e) * step
        groups = F.pad(x, (0, -size % block))
        groups = groups.reshape(*x.shape[:-1], -1, block)
        e, step = self._scales(groups.abs().amax(-1, keepdim=True), x)
        return (self._rounded(groups * e) * step).flatten(-2)[..., :size]

    def _amax_of_tensor(self, x: Tensor) -> Tensor:
        return x.abs().amax([*range(x.dim())], keepdim=True) if self.amax is None else self.amax

    def _scales(self, amax: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """The numbers that encode elements, and that decode them. The former is finite, so that zeros stay zeros."""
        scale, format = self.cast.scale, self.cast.format
        if scale.format == "fp32":
            amax = amax.clamp(min=scale.epsilon) if scale.epsilon else amax
            e = (self.numerator / (amax * scale.factor)).clamp(max=_LARGEST)
            return e, e.reciprocal()
        encode = torch.ones(())
        if scale.two_level:
            is_by_row = scale.two_level == "row"
            whole = x.abs().amax(-1, keepdim=True).unsqueeze(-1) if is_by_row else self._amax_of_tensor(x)
            encode = (self.numerator / whole).clamp(_TINY, _LARGEST)
        if scale.format == "e8m0":
            exponent, threshold = e8m0_rule(format, scale.rounding)
            large = amax * encode * (2.0**23 + 1)
            # The largest power of two that is not above the amax. A factor of 1 - 2^-24 would be optimized away.
            power = large - (large - large * 2.0**-24)
            stored = power * torch.where(amax * encode >= power * threshold, 2.0 ** (1 - exponent), 2.0**-exponent)
        else:
            wanted = amax * scale.factor * (encode * self.inverse)
            stored = wanted.clamp(max=scale.storage.max).to(scale.storage.dtype).to(torch.float32)
        step = stored * encode.reciprocal()
        return step.reciprocal().clamp(max=_LARGEST), step

    def _rounded(self, values: Tensor) -> Tensor:
        format, scale = self.cast.format, self.cast.scale
        if scale.format != "fp32" or scale.factor < 1:
            values = values.clamp(-format.max, format.max)
        if format in _FLOAT8:
            return values.to(format.dtype).to(torch.float32)
        if format.encoding in _WHOLE:
            return values.round()
        step: Any = torch.full((), 2.0 ** (format.min_exponent - format.mantissa_bits))
        for exponent in range(format.min_exponent + 1, format.max_exponent + 1):
            step = torch.where(values.abs() >= 2.0**exponent, 2.0 ** (exponent - format.mantissa_bits), step)
        return (values / step).round() * step

    def _by_known_step(self, x: Tensor, step: Tensor) -> Tensor:
        number, dtype = _FLOAT8.get(self.cast.format, INT8), self.cast.format.dtype or torch.int8
        x = x.clamp(-self.limit, self.limit)
        codes = symbolic("QuantizeLinear", (x, step), {"output_dtype": number}, dtype=dtype, shape=x.shape, version=21)
        return symbolic("DequantizeLinear", (codes, step), dtype=torch.float32, shape=x.shape, version=21)


class Product(nn.Module):
    """``x · Wᵀ + b`` of a converted layer, in place of its ``quantized_forward``."""

    def __init__(self, weight: Weight | None, inputs: InputRounding | None) -> None:
        super().__init__()
        self.weight = None if weight is None else Decoded(weight.quantized, transposed=True)
        self.inputs = inputs

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, **settings: Any) -> Tensor:
        x = x if self.inputs is None else self.inputs(x)
        y = x @ (weight.t() if self.weight is None else self.weight())
        return y if bias is None else y + bias


class Convolution(nn.Module):
    """A converted convolution, in place of its ``forward``: as ``Conv``, or as a product of patches whose input has
    scales that pixels of different patches do not share."""

    def __init__(self, layer: Any, weight: Weight | None, inputs: InputRounding | None) -> None:
        super().__init__()
        self._of = (layer,)  # in a tuple, so that it is no child
        self.inputs = inputs
        self.product = Product(weight, inputs)
        self.weight = None if weight is None else _kernel(layer, weight.quantized)

    def forward(self, input: Tensor, output_size: Any = None) -> Tensor:
        layer: Any = self._of[0]
        x, padding, n = layer._batch(input), layer.padding, len(layer.kernel_size)
        kernel = layer.weight if self.weight is None else self._kernel()
        if isinstance(layer, QuantizedTransposed):
            sizes = (layer.stride, layer.padding, layer.kernel_size, n, layer.dilation)
            added = layer._output_padding(input, output_size, *sizes)
            x = self._pixels(x)
            y = _TRANSPOSED[n - 1](x, kernel, layer.bias, layer.stride, layer.padding, added, 1, layer.dilation)
            return y if input.dim() == y.dim() else y.squeeze(0)
        if layer.padding_mode != "zeros":
            x, padding = F.pad(x, layer._reversed_padding_repeated_twice, mode=layer.padding_mode), "valid"
        window = layer._window(padding)
        if self.inputs is None or self._is_of_pixels(self.inputs, window, x):
            y = _CONVOLUTIONS[n - 1](self._pixels(x), kernel, layer.bias, layer.stride, padding, layer.dilation)
        else:
            y = self.product(patches(x, window), layer.weight_matrix(), layer.bias).movedim(-1, 1)
        return y if input.dim() == y.dim() else y.squeeze(0)

    def _kernel(self) -> Tensor:
        """Returns the decoded weight in the layer's own order."""
        layer: Any = self._of[0]
        assert self.weight is not None
        weight, sizes = self.weight(), layer.kernel_size
        if weight.dim() > 2:
            return weight
        if isinstance(layer, QuantizedTransposed):
            return weight.unflatten(0, (*sizes, -1)).movedim((-1, -2), (0, 1))
        return weight.unflatten(1, (*sizes, -1)).movedim(-1, 1)

    def _pixels(self, x: Tensor) -> Tensor:
        if self.inputs is None or self.inputs.cast.scale.block == "tensor":
            return x if self.inputs is None else self.inputs(x)
        return self.inputs(x.movedim(1, -1)).movedim(-1, 1)

    def _is_of_pixels(self, inputs: InputRounding, window: Window, x: Tensor) -> bool:
        """Returns whether pixels that are rounded before the patches are gathered have the same values."""
        cast, pixels = inputs.cast, all(k == 1 for k in window.kernel)
        if inputs.amax is None and cast.scale.needs_amax and not window.covers([*map(int, x.shape[2:])]):
            return False
        return is_pixelwise(cast, x.shape[1]) or (pixels and cast.scale.block == "row")


def _kernel(layer: QuantizedConvolution, quantized: Quantized) -> Decoded:
    """Returns the weight of a convolution: in the layer's own order where its scales are of rows or of the tensor."""
    if isinstance(layer, QuantizedTransposed) or quantized.scales.shape[1] > 1:
        return Decoded(quantized, transposed=False)
    codes = torch.empty(layer.weight.shape, dtype=torch.uint8)
    view = layer._matrices(codes)[1]
    view.copy_(quantized.codes.reshape(view.shape))
    return Decoded(quantized, transposed=False, codes=codes)


def patches(x: Tensor, window: Window) -> Tensor:
    """Returns ``[N, *positions, kernel · C]`` of images ``[N, C, *sizes]``, in the order of :class:`Window`."""
    positions = window.positions(x.shape[2:])
    x = F.pad(x, [size for pair in reversed([*zip(window.before, window.after, strict=True)]) for size in pair])
    for dim, (k, s, d, o) in enumerate(zip(window.kernel, window.stride, window.dilation, positions, strict=True), 2):
        parts = [x.narrow(dim, i * d, (o - 1) * s + 1) for i in range(k)]
        if s > 1:
            parts = [part[(slice(None),) * dim + (slice(None, None, s),)] for part in parts]
        x = torch.stack(parts, -1)
    n = len(positions)
    return x.permute(0, *range(2, 2 + n), *range(2 + n, 2 + 2 * n), 1).flatten(n + 1)


def attach(layer: QuantizedLayer, weight: Weight | None, inputs: InputRounding | None) -> Any:
    """Lets a converted layer compute by these operators, which it returns; ``weight`` is None in high precision."""
    is_image = isinstance(layer, QuantizedConvolution)
    module = Convolution(layer, weight, inputs) if is_image else Product(weight, inputs)
    layer.add_module("in_onnx", module)
    vars(layer)["forward" if is_image else "quantized_forward"] = module
    return module
