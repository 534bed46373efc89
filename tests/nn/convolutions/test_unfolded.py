"""A quantized convolution is ``F.unfold`` and a quantized linear layer, to the bit, forward and backward."""

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_lowbit import Cast, LinearCasts, Scale, convert
from lightning_lowbit.nn import LayerKeys, set_blend
from lightning_lowbit.nn.core.calls import keys_of_product
from tests.nn.layers import every, identical, pass_through


def wide(dtype):
    return torch.promote_types(dtype, torch.float32)


def unfold(x, kernel, stride, dilation):
    """Patches of images without padding ``[N, C, *sizes]`` with one or two sizes: ``[N, positions, kernel · C]``. Their
    gradients are added up in float32."""
    one = len(kernel) == 1
    x4 = x.unsqueeze(2) if one else x
    kernel, stride, dilation = ([1] * one + [*each] for each in (kernel, stride, dilation))
    columns = F.unfold(x4.to(wide(x.dtype)), kernel, dilation, 0, stride).to(x.dtype)  # [N, C · kernel, positions]
    return columns.unflatten(1, (x.shape[1], -1)).permute(0, 3, 2, 1).flatten(2)


def unfold_depth(x, kernel, stride, dilation):
    """:func:`unfold` of three sizes, of which the first is not overlapped: its slices are images of their own."""
    assert kernel[0] == stride[0]
    n, depth = len(x), x.shape[2] // kernel[0]
    slices = x[:, :, : depth * kernel[0]].movedim(2, 1).flatten(0, 1)  # [N · depth · k, C, H, W]
    patches = unfold(slices, kernel[1:], stride[1:], dilation[1:])
    patches = patches.unflatten(0, (n, depth, kernel[0])).transpose(2, 3)  # [N, depth, positions, k, kernel · C]
    return patches.flatten(-2).flatten(1, 2)


def rows_of_weight(layer):
    """``[groups, C_out, kernel · C_in]``, transposed ``[groups, kernel · C_out, C_in]``, written out."""
    w = layer.weight.detach().flatten(2)
    if isinstance(layer, nn.modules.conv._ConvTransposeNd):  # [C_in, C_out, k]
        return torch.stack([part.permute(2, 1, 0).flatten(0, 1) for part in w.chunk(layer.groups)])
    return torch.stack([part.permute(0, 2, 1).flatten(1) for part in w.chunk(layer.groups)])


def linears(layer):
    """A converted linear layer for each group, with its keys and weights."""
    layers = []
    for i, matrix in enumerate(rows_of_weight(layer)):
        linear = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False, dtype=matrix.dtype)
        linear.weight.data.copy_(matrix)
        convert(linear, layer.casts, exact=layer.lowbit.exact)
        linear.lowbit.keys = layer.lowbit.keys if layer.groups == 1 else keys_of_product(layer.lowbit.keys, i)
        linear.lowbit.blend = layer.lowbit.blend
        layers.append(linear)
    return layers


def by_unfolding(layer, x, g, autocast):
    """Output and gradients of a converted convolution, those of its weight as ``[groups, C_out, kernel · C_in]``."""
    x = x.detach().clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        parts = linears(layer)
        biases = [nn.Parameter(b) for b in layer.bias.detach().chunk(layer.groups)]
        if layer.padding_mode != "zeros" or layer.padding == "same":
            pads, mode = layer._reversed_padding_repeated_twice, layer.padding_mode
        else:
            pads, mode = [p for p in reversed(layer.padding) for _ in range(2)], "zeros"
        padded = F.pad(x, pads, mode="constant" if mode == "zeros" else mode)
        padded = padded.to(torch.bfloat16) if autocast and x.dtype != torch.float64 else padded
        of_patches = unfold if len(layer.kernel_size) < 3 else unfold_depth
        results = []
        for channels, part, bias in zip(padded.chunk(layer.groups, 1), parts, biases, strict=True):
            part.bias = bias
            results.append(part(of_patches(channels, layer.kernel_size, layer.stride, layer.dilation)))
        spans = [d * (k - 1) + 1 for k, d in zip(layer.kernel_size, layer.dilation, strict=True)]
        sizes = [(n - s) // t + 1 for n, s, t in zip(padded.shape[2:], spans, layer.stride, strict=True)]
        y = torch.cat(results, -1).movedim(-1, 1).unflatten(2, sizes)
    y.backward(g.to(y.dtype))
    weight, bias = torch.stack([part.weight.grad for part in parts]), torch.cat([bias.grad for bias in biases])
    return {"y": y.detach(), "x": x.grad, "weight": weight, "bias": bias}


def by_folding(layer, x, g):
    """Output and gradients of a converted transposed convolution with two sizes, as :func:`by_unfolding`."""
    x = x.detach().clone().requires_grad_()
    parts, results = linears(layer), []
    for part, channels in zip(parts, x.chunk(layer.groups, 1), strict=True):
        rows = part(channels.flatten(2).transpose(1, 2))  # [N, pixels, kernel · C_out]
        k = layer.kernel_size[0] * layer.kernel_size[1]
        columns = rows.unflatten(2, (k, -1)).permute(0, 3, 2, 1).flatten(1, 2)  # [N, C_out · kernel, pixels]
        settings = layer.kernel_size, layer.dilation, layer.padding, layer.stride
        results.append(F.fold(columns.to(wide(x.dtype)), g.shape[2:], *settings).to(x.dtype))
    bias = nn.Parameter(layer.bias.detach().clone())
    y = torch.cat(results, 1) + bias.view(-1, 1, 1)
    y.backward(g)
    weight = torch.stack([part.weight.grad for part in parts])
    return {"y": y.detach(), "x": x.grad, "weight": weight, "bias": bias.grad}


def passed(layer, x, autocast=False):
    drawn = []

    def g(y):
        drawn.append(torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y.dtype))
        return drawn[0]

    return pass_through(layer, x, g, autocast=autocast), drawn[0]


def as_rows(layer, results):
    """Results with the gradient of the weight as :func:`rows_of_weight`."""
    weight = layer.weight.data
    layer.weight.data = results["weight"]
    rows = rows_of_weight(layer)
    layer.weight.data = weight
    return {**results, "weight": rows}


# --- the tests --------------------------------------------------------------------------------------------------------

# Row scales, stochastic, groups that straddle pixels, and one scale per tensor.
ROWS = every(Cast("int8", Scale("fp32", "row"), "stochastic"))
W4A8 = LinearCasts(
    Cast("int8", Scale("fp32", "row")), Cast("int4", Scale("fp32", "row")), dgrad_w="fprop", wgrad_x="fprop"
)
FAST = [
    (nn.Conv2d(32, 48, 3, padding=1), (2, 32, 6, 5), "nvfp4", True),
    (nn.Conv2d(32, 48, (3, 2), (2, 1), (2, 1), (1, 2), 2, padding_mode="reflect"), (2, 32, 9, 8), "nvfp4", False),
    (nn.Conv1d(20, 16, 4, padding="same"), (3, 20, 11), ROWS, True),
    (nn.Conv2d(16, 32, 1, 2), (2, 16, 5, 5), "ternary", True),
    (nn.Conv2d(3, 24, 4, 4), (2, 3, 9, 12), "nvfp4-nvidia", False),
    (nn.Conv3d(16, 16, (2, 3, 3), (2, 1, 1), (0, 1, 1)), (2, 16, 5, 4, 4), W4A8, False),
    (nn.Conv2d(16, 16, 3, padding=1), (2, 16, 6, 6), "fp8-current", True),
]


def check(layer, shape, casts, autocast, dtype=torch.float32, blend=None, exact=False, channels_last=False):
    torch.manual_seed(0)
    layer = convert(copy.deepcopy(layer).to(dtype), casts, exact=exact)
    LayerKeys(layer).fill_(0)
    set_blend(layer, blend)
    x = torch.randn(shape).to(dtype)
    if channels_last:
        x, layer = x.to(memory_format=torch.channels_last), layer.to(memory_format=torch.channels_last)
    found, g = passed(layer, x, autocast)
    identical(as_rows(layer, found), by_unfolding(layer, x, g, autocast), f"{layer} {shape} {autocast} {dtype}:")


def test_convolutions_are_unfolded_linear_layers():
    for layer, shape, casts, autocast in FAST:
        check(layer, shape, casts, autocast)
    layer, shape = nn.Conv2d(32, 16, 3, 2, 1), (2, 32, 7, 6)
    check(layer, shape, "nvfp4", True, channels_last=True)
    check(layer, shape, "nvfp4", False, blend=0.5)
    check(layer, shape, "int4", False, exact=True)


def test_transposed_convolutions_are_linear_layers_that_are_folded():
    for original, size in (
        (nn.ConvTranspose2d(32, 16, 3, 2, 1, 1), (5, 6)),
        (nn.ConvTranspose2d(32, 32, (2, 3), (1, 2), 0, (0, 1), 2, dilation=2), (4, 4)),
    ):
        torch.manual_seed(0)
        layer = convert(copy.deepcopy(original), "nvfp4")
        LayerKeys(layer).fill_(0)
        x = torch.randn(2, 32, *size)
        found, g = passed(layer, x)
        identical(as_rows(layer, found), by_folding(layer, x, g), f"{layer}:")


@pytest.mark.slow
def test_settings_that_are_drawn_at_random():
    values = [
        [(1, 3), (3, 2)],  # kernel
        [1, 2, 3],
        [0, 1, (2, 1)],
        [1, 2],
        [1, 2, 4],
        ["zeros", "circular"],
        ["nvfp4", "mxfp4", "ternary", "int8", "fp8-row", "nvfp4-row", "quartet2", ROWS, W4A8],
        [(torch.float32, False), (torch.float32, True), (torch.bfloat16, False), (torch.float64, False)],
    ]
    draw = random.Random(0)
    for _ in range(100):
        kernel, stride, padding, dilation, groups, mode, casts, (dtype, autocast) = map(draw.choice, values)
        layer = nn.Conv2d(32, 32, kernel, stride, padding, dilation, groups, padding_mode=mode)
        check(layer, (2, 32, 9, 8), casts, autocast, dtype)
