"""Why a format cannot hold a layer, in words."""

import re

from torch import nn

from lightning_lowbit import Cast, LinearCasts, Scale, convert
from lightning_lowbit.export.formats.table import FORMATS
from lightning_lowbit.nn import GroupedLinear


def weight(element, *scale, **settings):
    return LinearCasts(fprop_w=Cast(element, Scale(*scale, **settings)))


def test_casts_that_a_format_does_not_hold_are_refused_with_the_reason():
    for casts, format, why in (
        ("int4", "nvfp4-w4a16", "it takes NVFP4 .* and the weight has int4"),
        ("nvfp4-row", "nvfp4-w4a4", "it takes NVFP4"),
        ("nvfp4", "modelopt-fp8", "it takes E4M3 with"),
        ({"preset": "nvfp4", "fprop_x": None}, "nvfp4-w4a4", "the training had None: take nvfp4-w4a16"),
        ({"preset": "fp8-current", "fprop_x": None}, "modelopt-fp8", "the training had None; take fp8"),
        ("fp8-row", "modelopt-fp8", "one scale of the tensor"),
        ("mxfp6", "mxfp6", "E2M3.* and the weight has e3m2"),
        ("ufp4", "dequantized", "its forward pass rotates weights and activations"),
        ("e1m2", "mxfp4", "it takes MXFP4 .* and the weight has e1m2"),
        ({"preset": "nvfp4", "fprop_w": {"rounding": "stochastic"}}, "dequantized", "rounded stochastically"),
        ("nvfp4", "nvfp4-w4a16", "its 24 in_features are no multiple of 16"),
        (weight("e2m1", "e8m0", 32, two_level=True), "mxfp4", "and the weight has"),
        (weight("e2m1", "e8m0", 32, "floor", prescale=0.75), "mxfp4", "and the weight has"),
        (weight("e4m3", "e8m0", 32, two_level=True), "mxfp8", "and the weight has"),
        (weight("int4", "bf16", 32, two_level=True), "int4", "and the weight has"),
        (weight("int4", "e4m3", 16, two_level=True), "int4", "and the weight has"),
    ):
        layer = convert(nn.Sequential(nn.Linear(24, 8)), casts, only=["0"])[0]
        assert re.search(why, FORMATS[format].obstacle("0", layer)), (casts, format)


def test_stacks_of_matrices_are_dequantized_only_as_the_forward_pass_has_them():
    for preset, why in (("mxfp4-rht", "None"), ("ufp4", "its forward pass rotates"), ("nvfp4", "None")):
        layer = convert(nn.Sequential(GroupedLinear(2, 32, 32)), preset, only=["0"])[0]
        assert why in str(FORMATS["dequantized"].obstacle("0", layer)), preset
