"""Casts that tests of linear layers share."""

from lightning_lowbit import Cast, LinearCasts, Scale
from lightning_lowbit.quant import Hadamard
from tests.nn.layers import every
from tests.nn.named_casts import FP8_TENSORS, INT8_ROWS, SATURATING, STOCHASTIC, TWO_LEVEL

ONE_LEVEL = Cast("e2m1", Scale("e4m3", 16))
TOKENS, IN, OUT = 48, 64, 32


# Everything that belongs to a GEMM or to the forward pass at once, scales of rows and tensors among it.
EVERYTHING = {
    "surrogates": LinearCasts(
        fprop_x=INT8_ROWS.fprop_x,
        fprop_w=SATURATING,
        dgrad_g=STOCHASTIC,
        dgrad_w=INT8_ROWS.dgrad_w,
        wgrad_g=INT8_ROWS.wgrad_g,
        wgrad_x=TWO_LEVEL,
        hadamard={"fprop": 16, "dgrad": Hadamard(32, "keyed"), "wgrad": 64},
        subtract_mean=("dgrad", "wgrad"),
        surrogate={"fprop_x": "trust", "fprop_w": "dge"},
    ),
    "reuse": LinearCasts(
        fprop_x=FP8_TENSORS.fprop_x,
        fprop_w=INT8_ROWS.fprop_w,
        dgrad_g=Cast("int8", Scale("e5m2", 32), "stochastic"),
        dgrad_w="fprop",
        wgrad_g=INT8_ROWS.wgrad_g,
        hadamard={"wgrad": Hadamard(16, "keyed")},
        subtract_mean=("fprop", "dgrad"),
    ),
    "wide and hp": LinearCasts(fprop_w=Cast("int8", Scale("e5m2", 32)), wgrad_g=Cast("int8", Scale("e5m2", 32))),
}

_DELAYED = {"source": "delayed", "two_level": True}
OF_FORMER_STEPS = {
    "delayed tiles": every(Cast("e2m1", Scale("e4m3", (16, 16), history=3, **_DELAYED))),
    "delayed rows": every(Cast("int4", Scale("e4m3", "row", **_DELAYED))),
    "delayed 4/6": every(Cast("e2m1", Scale("e4m3", 16, four_over_six="mse", **_DELAYED))),
    "delayed mx": every(Cast("e4m3", Scale("e8m0", 32, algorithm="most_recent", **_DELAYED))),
    "delayed e8m0": every(Cast("e4m3", Scale("e8m0", "tensor", source="delayed"))),
    "delayed powers of two": every(Cast("e4m3", Scale("fp32", "tensor", "power_of_two", source="delayed", margin=2))),
    "delayed integers": every(Cast("int8", Scale("fp32", "tensor", source="delayed", margin=1), "stochastic")),
    "delayed ternary": every(Cast("ternary", Scale("fp32", "tensor", source="delayed"))),
}
