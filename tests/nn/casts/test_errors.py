"""Errors of casts say what was needed and what came."""

import pytest

from lightning_lowbit import LinearCasts
from tests.nn.casts.examples import SIX
from tests.tables import each


def replaced(fields):
    return SIX.replace(**fields)


def rounded(roundings):
    return SIX.with_rounding(roundings)


of, preset = LinearCasts.of, LinearCasts.preset
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
        (preset, "nvfp5", "Unknown preset 'nvfp5'. Did you mean 'nvfp4'"),
        (of, "nvfp5", "Unknown preset 'nvfp5'. Did you mean 'nvfp4'"),
        (of, {"preset": None}, "Unknown preset None"),
        (of, {"preset": "nvfp4", "fprop_y": None}, "Unknown field of LinearCasts 'fprop_y'. Did you"),
        (of, {1: None}, "Unknown field of LinearCasts 1"),
        (of, {"preset": "nvfp4", "bakward": "dequantized"}, "Did you mean 'backward'"),
        (of, None, "a preset's name or a mapping of fields; got None"),
        (of, ["nvfp4"], r"a preset's name or a mapping of fields; got \['nvfp4'\]"),
        (replaced, {"fprop": None}, "Unknown field of LinearCasts 'fprop'. Did you mean 'fprop_"),
        (SIX.phase, "qat", "Unknown phase 'qat'. Did you mean 'qaf'"),
        (SIX.phase, None, "Unknown phase None"),
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
        (replaced, {"hadamard": {"wgrad_x": 16}}, "Unknown key of LinearCasts.hadamard 'wgrad_x'"),
        *(
            (replaced, {"hadamard": {"wgrad": size}}, "Hadamard.size is one of 16, 32, 64, 128; got")
            for size in (8, 48, True, None, "16", 16.0)
        ),
        (replaced, {"hadamard": {"wgrad": {"sise": 16}}}, "Unknown field of Hadamard 'sise'. Did you mean 'size'"),
        (replaced, {"hadamard": {"wgrad": {"signs": "key"}}}, "Unknown signs of a Hadamard transform 'key'. Did"),
        (replaced, {"subtract_mean": "wgrad"}, f"{GEMMS}'wgrad'"),
        (replaced, {"subtract_mean": None}, f"{GEMMS}None"),
        (replaced, {"subtract_mean": True}, f"{GEMMS}True"),
        (replaced, {"subtract_mean": {"wgrad": False}}, f"{GEMMS}{{"),
        (replaced, {"subtract_mean": ["wgard"]}, "Unknown GEMM in .*subtract_mean 'wgard'. Did you mean 'wgrad'"),
        (replaced, {"subtract_mean": ["wgrad_x"]}, "Unknown GEMM in LinearCasts.subtract_mean 'wgrad_x'"),
        (replaced, {"requantize": "wgrad_x"}, "LinearCasts.requantize is a list of operands such as .*; got 'wgr"),
        (replaced, {"requantize": ["wgrad_g"]}, "Unknown operand in LinearCasts.requantize 'wgrad_g'"),
        (replaced, {"surrogate": "dge"}, "LinearCasts.surrogate maps some of fprop_x, fprop_w to .* got 'dge'"),
        (replaced, {"surrogate": {"dgrad_w": "dge"}}, "Unknown key of LinearCasts.surrogate 'dgrad_w'"),
        (replaced, {"surrogate": {"fprop_w": "ste"}}, "Unknown surrogate 'ste'.*'trust', 'dge'"),
        (replaced, {"surrogate": {"fprop_w": None}}, "Unknown surrogate None"),
        (replaced, {"smooth": "chanel"}, "Unknown kind of LinearCasts.smooth 'chanel'. Did you mean 'channel'"),
        (replaced, {"smooth": True}, "Unknown kind of LinearCasts.smooth True.* Choose one of: 'channel', 'tok"),
        (replaced, {"smooth": ""}, "Unknown kind of LinearCasts.smooth ''"),
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
        (of, {"preset": "nvfp4", "backward": "bf16"}, "Unknown backward pass 'bf16'"),
        (of, {"preset": "ufp4", "backward": "dequantized"}, "dgrad_w is the operand of the forward pass"),
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
