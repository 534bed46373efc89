"""Errors of casts say what was needed and what came; casts that contradict each other are refused."""

import pytest

from lightning_lowbit import Cast, LinearCasts, Scale
from tests.nn.casts.examples import DELAYED, E4M3, INT4, NEAREST, SIX, STOCHASTIC
from tests.tables import each


def replaced(fields):
    return SIX.replace(**fields)


def rounded(roundings):
    return SIX.with_rounding(roundings)


of = LinearCasts.of
GEMMS = "LinearCasts.subtract_mean is a list of GEMMs such as .*; got "


@each(
    ("call", "argument", "message"),
    [
        (LinearCasts, "nvfp4", "LinearCasts.fprop_x is a Cast, .* got 'nvfp4'"),
        *(
            (replaced, {operand: "fprop"}, f"LinearCasts.{operand} is .* got 'fprop'")
            for operand in ("fprop_x", "fprop_w", "dgrad_g", "wgrad_g")
        ),
        (replaced, {"dgrad_w": "forward"}, "or \"fprop\"; got 'forward'"),
        (replaced, {"dgrad_w": 16}, "LinearCasts.dgrad_w .* got 16"),
        (replaced, {"fprop_x": {"elment": "e2m1"}}, "Unknown field of Cast 'elment'. Did you mean 'element'"),
        (of, "nvfp5", "Unknown preset 'nvfp5'. Did you mean 'nvfp4'"),
        (of, {"preset": None}, "Unknown preset None"),
        (of, {"preset": "nvfp4", "fprop_y": None}, "Unknown field of LinearCasts 'fprop_y'. Did you"),
        (of, {1: None}, "Unknown field of LinearCasts 1"),
        (of, {"preset": "nvfp4", "bakward": "dequantized"}, "Did you mean 'backward'"),
        (of, {"preset": "nvfp4", "backward": "bf16"}, "Unknown backward pass 'bf16'"),
        (of, {"preset": "ufp4", "backward": "dequantized"}, "dgrad_w is the operand of the forward pass"),
        (of, None, "a preset's name or a mapping of fields; got None"),
        (of, ["nvfp4"], r"a preset's name or a mapping of fields; got \['nvfp4'\]"),
        (replaced, {"fprop": None}, "Unknown field of LinearCasts 'fprop'. Did you mean 'fprop_"),
        (SIX.phase, "qat", "Unknown phase 'qat'. Did you mean 'qaf'"),
        (rounded, {"wgradx": "nearest"}, "Unknown operand 'wgradx'. Did you mean 'wgrad_x'"),
        (rounded, {"wgrad_x": "near"}, "Unknown rounding 'near'"),
        (rounded, "stochastic", "rounding"),
        (LinearCasts().with_rounding, {"wgrad_x": "nearest"}, "wgrad_x is None"),
        (SIX.replace(wgrad_x="fprop").with_rounding, {"wgrad_x": "nearest"}, "wgrad_x is 'fprop'"),
        (
            replaced,
            {"hadamard": 16},
            "LinearCasts.hadamard maps some of fprop, dgrad, wgrad to .*{'wgrad': 16}; got 16",
        ),
        (replaced, {"hadamard": {"wgard": 16}}, "Unknown key of LinearCasts.hadamard 'wgard'. Did you mean 'wgrad'"),
        *(
            (replaced, {"hadamard": {"wgrad": size}}, "Hadamard.size is one of 16, 32, 64, 128; got")
            for size in (8, 48, True, None, "16", 16.0)
        ),
        (replaced, {"hadamard": {"wgrad": {"sise": 16}}}, "Unknown field of Hadamard 'sise'. Did you mean 'size'"),
        (replaced, {"hadamard": {"wgrad": {"signs": "key"}}}, "Unknown signs of a Hadamard transform 'key'. Did"),
        (replaced, {"subtract_mean": "wgrad"}, f"{GEMMS}'wgrad'"),
        (replaced, {"subtract_mean": None}, f"{GEMMS}None"),
        (replaced, {"subtract_mean": {"wgrad": False}}, f"{GEMMS}{{"),
        (replaced, {"subtract_mean": ["wgard"]}, "Unknown GEMM in .*subtract_mean 'wgard'. Did you mean 'wgrad'"),
        (replaced, {"requantize": "wgrad_x"}, "LinearCasts.requantize is a list of operands such as .*; got 'wgr"),
        (replaced, {"requantize": ["wgrad_g"]}, "Unknown operand in LinearCasts.requantize 'wgrad_g'"),
        (replaced, {"surrogate": "dge"}, "LinearCasts.surrogate maps some of fprop_x, fprop_w to .* got 'dge'"),
        (replaced, {"surrogate": {"dgrad_w": "dge"}}, "Unknown key of LinearCasts.surrogate 'dgrad_w'"),
        (replaced, {"surrogate": {"fprop_w": "ste"}}, "Unknown surrogate 'ste'.*'trust', 'dge'"),
        (replaced, {"smooth": "chanel"}, "Unknown kind of LinearCasts.smooth 'chanel'. Did you mean 'channel'"),
        (replaced, {"smooth": True}, "Unknown kind of LinearCasts.smooth True.* Choose one of: 'channel', 'tok"),
        (replaced, {"smoth": "token"}, "Unknown field of LinearCasts 'smoth'. Did you mean 'smooth'"),
        (
            of,
            {"preset": "fp8-delayed", "smooth": "channel"},
            "give fprop_w a scale with source='current'.* Got fprop\\(x=e4m3/fp32:tensor\\(delayed 16\\)",
        ),
        (
            of,
            {"preset": "fp8-row", "every": {"scale": {"source": "delayed"}}},
            "take block='tensor', two_level=True, or source='current'",
        ),
        (of, {"preset": "nvfp4", "every": 32}, "casts.every is a mapping of fields of Cast; got 32"),
        (of, {"every": {"element": "int4"}}, "every changes the casts of a preset, and there are none"),
        (of, {"preset": "bf16", "every": {}}, "every changes the casts of a preset, and there are"),
        (of, {"preset": "nvfp4", "every": {"elment": "int4"}}, "Unknown field of Cast 'elment'"),
        (of, {"preset": "nvfp4", "every": {"scale": {"blok": 8}}}, "Unknown field of Scale 'blok'"),
        (of, {"preset": "nvfp4", "every": {1: 2}}, "Unknown field of Cast '?1"),
        (of, {"preset": "nvfp4", "fprop_x": {"elment": 1}}, "Unknown field of Cast 'elment'. Did"),
        (of, {"preset": "nvfp4", "fprop_x": {1: 2}}, "Unknown field of Cast '?1"),
        (
            of,
            {"preset": "nvfp4", "fprop_x": {"scale": {"top": 500}}},
            "Scale.top is a number for e4m3 scales, above 0 and at most 448",
        ),
        (of, {"preset": "ufp4", "wgrad_g": None, "wgrad_x": None}, "hadamard rotates wgrad, which"),
    ],
)
def test_errors(call, argument, message):
    with pytest.raises(ValueError, match=message):
        call(argument)


EDEN = LinearCasts.preset("quartet2").wgrad_x

# Fields that contradict each other, what the error says of them, and a change that it proposes.
CONTRADICTIONS = {
    "hadamard of nothing": (
        {"hadamard": {"wgrad": 16}},
        "hadamard rotates wgrad, which quantizes nothing: leave wgrad out of hadamard",
        {"hadamard": {}},
    ),
    "hadamard of what is only reused": (
        {"fprop_x": INT4, "wgrad_x": "fprop", "hadamard": {"wgrad": 16}},
        "hadamard rotates wgrad, which quantizes nothing: leave wgrad out",
        {"hadamard": {}},
    ),
    "hadamard and reuse in its GEMM": (
        {"fprop_w": INT4, "dgrad_g": INT4, "dgrad_w": "fprop", "hadamard": {"dgrad": 16}},
        "hadamard rotates dgrad, but dgrad_w is the operand of the forward pass as that pass quantized it: give "
        "dgrad_w a cast of its own, or leave dgrad out",
        {"dgrad_w": INT4},
    ),
    "reuse of what is rotated": (
        {"fprop_x": INT4, "wgrad_x": "fprop", "hadamard": {"fprop": 16}},
        "hadamard rotates fprop, but wgrad_x is the operand of the forward pass .*: give wgrad_x a cast of its own",
        {"wgrad_x": INT4},
    ),
    "mean of no cast": (
        {"fprop_w": INT4, "subtract_mean": ["fprop"]},
        "subtract_mean needs an x or g of fprop with a cast: leave fprop out of subtract_mean",
        {"subtract_mean": []},
    ),
    "mean of what is reused": (
        {"fprop_x": INT4, "wgrad_x": "fprop", "subtract_mean": ["fprop"]},
        "subtract_mean changes x in fprop, but wgrad_x is the x that the forward pass quantized: give wgrad_x a cast "
        "of its own, or leave fprop out",
        {"wgrad_x": INT4},
    ),
    "mean and reuse in wgrad": (
        {"fprop_x": INT4, "wgrad_g": INT4, "wgrad_x": "fprop", "subtract_mean": ["wgrad"]},
        "subtract_mean changes x in wgrad, but wgrad_x is .* or leave wgrad out of subtract_mean",
        {"subtract_mean": []},
    ),
    "surrogate of hp": (
        {"fprop_x": INT4, "surrogate": {"fprop_w": "trust"}},
        "surrogate names fprop_w, which is not quantized: leave it out of surrogate",
        {"surrogate": {}},
    ),
    "surrogate of levels that begin elsewhere": (
        {"fprop_w": Cast("int4", Scale("fp32", "row", statistic="minmax")), "surrogate": {"fprop_w": "dge"}},
        "The surrogate of fprop_w counts levels from zero, and with statistic='minmax' those of a block begin "
        "elsewhere: leave fprop_w out of surrogate, or take another statistic",
        {"fprop_w": Cast("int4", Scale("fp32", "row", statistic="absmean"))},
    ),
    "dge of stochastic rounding": (
        {"fprop_w": STOCHASTIC, "surrogate": {"fprop_w": "dge"}},
        "'dge' stands for rounding to nearest, and fprop_w rounds stochastically, .*: leave fprop_w out of surrogate, "
        "or round it to nearest",
        {"fprop_w": NEAREST},
    ),
    "surrogate of x without its mean": (
        {"fprop_x": INT4, "surrogate": {"fprop_x": "trust"}, "subtract_mean": ["fprop"]},
        "A surrogate of fprop_x and subtract_mean in fprop contradict each other, .*: leave out one of them",
        {"subtract_mean": []},
    ),
    "surrogate of a weight that also meets the mean": (  # which it does unquantized: that part of dW passes as it is
        {"fprop_x": INT4, "fprop_w": INT4, "surrogate": {"fprop_w": "trust"}, "subtract_mean": ["fprop"]},
        "A surrogate of fprop_w and subtract_mean in fprop contradict each other, .*: leave out one of them",
        {"surrogate": {}},
    ),
    "surrogate of scales that are random": (
        {"fprop_w": Cast("e2m1", Scale("e4m3", 16, "stochastic")), "surrogate": {"fprop_w": "trust"}},
        "The surrogate of fprop_w needs the scales, which round stochastically: leave fprop_w out of surrogate, or",
        {"fprop_w": NEAREST},
    ),
    "requantizing what the forward pass leaves": (
        {"dgrad_w": INT4, "requantize": ["dgrad_w"]},
        "requantize quantizes fprop_w again by the cast of dgrad_w, and one of them has no cast: give both a cast",
        {"fprop_w": INT4},
    ),
    "requantizing without a cast": (
        {"fprop_x": INT4, "wgrad_x": "fprop", "requantize": ["wgrad_x"]},
        "requantize quantizes fprop_x again by the cast of wgrad_x, .*, or leave wgrad_x out of requantize",
        {"requantize": []},
    ),
    "requantizing what is rotated": (
        {"fprop_w": INT4, "dgrad_w": INT4, "requantize": ["dgrad_w"], "hadamard": {"fprop": 16}},
        "hadamard or subtract_mean changes fprop_w in fprop, which dgrad_w would quantize again: leave dgrad_w out",
        {"hadamard": {}},
    ),
    "requantizing x without its mean": (
        {"fprop_x": INT4, "wgrad_x": INT4, "requantize": ["wgrad_x"], "subtract_mean": ["fprop"]},
        "hadamard or subtract_mean changes fprop_x in fprop, .*: leave wgrad_x out of requantize, or fprop out",
        {"requantize": []},
    ),
    "a correction without a rotation": (
        {"wgrad_x": EDEN},
        "The correction of wgrad_x makes rounding unbiased over random rotations of 128 elements: give hadamard of "
        "wgrad the size 128 and signs='keyed', or leave out correction",
        {"hadamard": {"wgrad": {"size": 128, "signs": "keyed"}}},
    ),
    "a correction of another rotation": (
        {"wgrad_x": EDEN, "hadamard": {"wgrad": 128}},
        "The correction of wgrad_x makes rounding unbiased over random rotations of 128 elements",
        {"wgrad_x": NEAREST},
    ),
    "smoothing of hp": (
        {"smooth": "channel"},
        "smooth scales x and w, which are not quantized: leave out smooth",
        {"smooth": None},
    ),
    "smoothing of gradients only": (
        {"dgrad_g": INT4, "dgrad_w": "fprop", "wgrad_g": INT4, "wgrad_x": "fprop", "smooth": "token"},
        "smooth scales x and w, which are not quantized: leave out smooth",
        {"wgrad_x": INT4},
    ),
    "delayed scaling of a smoothed weight": (
        {"fprop_x": DELAYED, "fprop_w": DELAYED, "smooth": "channel"},
        "With smooth='channel' the weight changes with every batch, and delayed scaling of fprop_w would meet the leap "
        "of a channel there: give fprop_w a scale with source='current'",
        {"fprop_w": E4M3},
    ),
    "delayed scaling of a smoothed weight, backwards": (
        {"fprop_x": DELAYED, "dgrad_w": DELAYED, "smooth": "channel"},
        "delayed scaling of dgrad_w would meet the leap of a channel there: give dgrad_w a scale with source='current'",
        {"smooth": "token"},
    ),
}


@each("name", CONTRADICTIONS)
def test_contradictions(name):
    given, message, remedy = CONTRADICTIONS[name]
    with pytest.raises(ValueError, match=message) as caught:
        LinearCasts(**given)
    assert "Got fprop(" in str(caught.value), "the error does not say what was given"
    LinearCasts(**{**given, **remedy})
