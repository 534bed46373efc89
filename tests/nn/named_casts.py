"""Named casts: every preset, with all that it can be combined with, for which a layer must be right."""

from dataclasses import replace

from lightning_lowbit import Cast, LinearCasts, Scale
from lightning_lowbit.nn import OPERANDS, PRESETS
from lightning_lowbit.nn.casts.linear_casts import SMOOTHINGS
from lightning_lowbit.quant import Hadamard
from tests.nn.layers import GEMMS, every

NVFP4 = LinearCasts.preset("nvfp4")
TWO_LEVEL = Cast("e2m1", Scale("e4m3", 16, two_level=True))
STOCHASTIC = replace(TWO_LEVEL, rounding="stochastic")
INT8_ROWS = every(Cast("int8", Scale("fp32", "row")))
FP8_TENSORS = LinearCasts.preset("fp8-current")
DELAYED = LinearCasts.preset("fp8-delayed")
REMEMBERED = (0.5, 2.0, 1.0)  # amaxes of the steps before, below those of x and g, above those of w
ALL_ROTATED = {"fprop": 64, "dgrad": Hadamard(16, "keyed"), "wgrad": Hadamard(32, "keyed")}
ALL_MEANS = ("fprop", "dgrad", "wgrad")
SATURATING = Cast("e2m1", Scale("e8m0", 32, "floor"))

CASTS = {
    **{name: LinearCasts.preset(name) for name in PRESETS if name != "bf16"},
    "all stochastic": every(STOCHASTIC),
    "wide": every(Cast("int8", Scale("e5m2", 32), "stochastic")),
    "tiles": every(Cast("e2m1", Scale("e4m3", (16, 16), two_level=True))),
    "reuse": NVFP4.replace(dgrad_w="fprop", wgrad_x="fprop"),
    "some hp": NVFP4.replace(fprop_x=None, dgrad_w=None, wgrad_g=None),
    "qaf": NVFP4.phase("qaf"),
    "hp-forward": NVFP4.phase("hp-forward"),
    "reuse of hp": LinearCasts(dgrad_w="fprop", wgrad_x="fprop"),
    # transforms
    **{f"hadamard {gemm} {n}": NVFP4.replace(hadamard={gemm: n}) for gemm in GEMMS for n in (16, 64)},
    "hadamard, one side hp": NVFP4.replace(fprop_w=None, dgrad_g=None, wgrad_x=None, hadamard=ALL_ROTATED),
    "hadamard 128, tiles": every(Cast("e2m1", Scale("e4m3", (16, 16))), hadamard=dict.fromkeys(GEMMS, 128)),
    **{f"mean {gemm}": NVFP4.replace(subtract_mean=[gemm]) for gemm in GEMMS},
    "mean wgrad, x hp": NVFP4.replace(subtract_mean=["wgrad"], wgrad_x=None),
    "mean wgrad, g hp": NVFP4.replace(subtract_mean=["wgrad"], wgrad_g=None),
    "mean, weights hp": NVFP4.replace(subtract_mean=ALL_MEANS, fprop_w=None, dgrad_w=None),
    "mean, weights reused": NVFP4.replace(subtract_mean=ALL_MEANS, dgrad_w="fprop"),
    "mean and hadamard": NVFP4.replace(subtract_mean=ALL_MEANS, hadamard=ALL_ROTATED),
    **{f"{kind} {x}": every(SATURATING, surrogate={x: kind}) for kind in ("dge", "trust") for x in OPERANDS[:2]},
    "surrogates": every(SATURATING, surrogate={"fprop_x": "trust", "fprop_w": "dge"}),
    "surrogates, two levels": NVFP4.replace(surrogate={"fprop_x": "dge", "fprop_w": "dge"}),
    "surrogates, rotated": every(SATURATING, surrogate={"fprop_x": "trust", "fprop_w": "dge"}, hadamard=ALL_ROTATED),
    # scales that factor out
    "requantized": NVFP4.replace(requantize=["dgrad_w", "wgrad_x"]),
    "requantized rows": INT8_ROWS.replace(requantize=["dgrad_w", "wgrad_x"], subtract_mean=["dgrad", "wgrad"]),
    "requantized tensors": FP8_TENSORS.replace(requantize=["dgrad_w", "wgrad_x"]),
    "requantized, delayed": DELAYED.replace(requantize=["dgrad_w"], wgrad_x=TWO_LEVEL),
    "requantized, surrogates": NVFP4.replace(requantize=["dgrad_w", "wgrad_x"], surrogate={"fprop_w": "dge"}),
    "16-bit scales": every(
        Cast("int4", Scale("bf16", 32)), wgrad_x=Cast("int4", Scale("fp16", 32), round_to_bfloat16=True)
    ),
    "random scales": every(Cast("e2m1", Scale("e4m3", 16, "stochastic", two_level="row"), "stochastic")),
    "rows": INT8_ROWS,
    "rows, powers of two": every(Cast("int8", Scale("fp32", "row", "power_of_two"), "stochastic")),
    "rows, e8m0": every(Cast("int8", Scale("e8m0", "row"))),
    "rows, two levels": every(Cast("e2m1", Scale("e4m3", "row", two_level=True))),
    "rows reused": INT8_ROWS.replace(dgrad_w="fprop", wgrad_x="fprop"),
    "rows reused, mean": INT8_ROWS.replace(dgrad_w="fprop", subtract_mean=["dgrad"]),
    "rows, hadamard and mean": INT8_ROWS.replace(hadamard=ALL_ROTATED, subtract_mean=ALL_MEANS),
    "rows times blocks": NVFP4.replace(fprop_x=INT8_ROWS.fprop_x, dgrad_w=INT8_ROWS.dgrad_w, wgrad_g=None),
    "tensors": FP8_TENSORS,
    "tensors, powers of two": every(Cast("e4m3", Scale("fp32", "tensor", "power_of_two"))),
    "tensors, e8m0": every(Cast("e4m3", Scale("e8m0", "tensor"))),
    "tensors reused": FP8_TENSORS.replace(dgrad_w="fprop", wgrad_x="fprop"),
    "rows times tensors": INT8_ROWS.replace(fprop_w=FP8_TENSORS.fprop_w, dgrad_g=FP8_TENSORS.dgrad_g),
    "tensors and rows, margin": every(
        Cast("e4m3", Scale("fp32", "row", margin=3)), wgrad_g=Cast("e3m2", Scale("fp32", "tensor", margin=2))
    ),
    # scales of former steps
    "delayed, most recent": every(
        Cast("e4m3", Scale("fp32", "tensor", margin=1, source="delayed", algorithm="most_recent"))
    ),
    "delayed, reused": DELAYED.replace(dgrad_w="fprop", wgrad_x="fprop"),
    "delayed, two levels": every(Cast("e2m1", Scale("e4m3", 16, two_level=True, source="delayed", history=1))),
    "delayed, hadamard and mean": DELAYED.replace(hadamard=ALL_ROTATED, subtract_mean=ALL_MEANS),
    "delayed, surrogates": DELAYED.replace(surrogate={"fprop_x": "trust", "fprop_w": "dge"}),
    "delayed, surrogates, rotated": DELAYED.replace(
        surrogate={"fprop_x": "trust", "fprop_w": "dge"}, hadamard=ALL_ROTATED
    ),
    # smoothing
    **{f"{kind}s": FP8_TENSORS.replace(smooth=kind) for kind in SMOOTHINGS},
    **{f"{kind}s, rows": INT8_ROWS.replace(smooth=kind) for kind in SMOOTHINGS},
    **{f"{kind}s, reused": FP8_TENSORS.replace(smooth=kind, dgrad_w="fprop", wgrad_x="fprop") for kind in SMOOTHINGS},
    **{
        f"{kind}s, hadamard and mean": NVFP4.replace(smooth=kind, hadamard=ALL_ROTATED, subtract_mean=ALL_MEANS)
        for kind in SMOOTHINGS
    },
    **{
        f"{kind}s, surrogates": every(SATURATING, smooth=kind, surrogate={"fprop_x": "trust", "fprop_w": "dge"})
        for kind in SMOOTHINGS
    },
    "channels, some hp": NVFP4.replace(smooth="channel", fprop_x=None, dgrad_w=None, wgrad_g=None),
    "channels, delayed": DELAYED.replace(smooth="channel", fprop_w=FP8_TENSORS.fprop_w, dgrad_w=FP8_TENSORS.dgrad_w),
    "tokens, delayed": DELAYED.replace(smooth="token"),
}

# --- linear layers ---------------------------------------------------------------------------------------------------

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
