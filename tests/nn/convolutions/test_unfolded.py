"""A quantized convolution is F.unfold and a quantized linear layer, to the bit, forward and backward."""

import copy
import random

import pytest
import torch
from torch import nn

from lightning_lowbit import Cast, LinearCasts, Scale, convert
from lightning_lowbit.nn import LayerKeys, set_blend
from tests.nn.convolutions.unfolded import as_rows, by_folding, by_unfolding, passed
from tests.nn.layers import every, identical

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
