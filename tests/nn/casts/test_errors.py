"""Errors of casts say what was needed and what came."""

import pytest

from lightning_lowbit import LinearCasts
from tests.nn.casts.examples import SIX
from tests.tables import each


@each(
    ("call", "message"),
    [
        (lambda: LinearCasts("nvfp4"), "LinearCasts.fprop_x is a Cast, .* got 'nvfp4'"),
        *[
            (lambda operand=operand: LinearCasts(**{operand: "fprop"}), f"LinearCasts.{operand} is .* got 'fprop'")
            for operand in ("fprop_x", "fprop_w", "dgrad_g", "wgrad_g")
        ],
        (lambda: LinearCasts(dgrad_w="forward"), "or \"fprop\"; got 'forward'"),
        (lambda: LinearCasts(dgrad_w=16), "LinearCasts.dgrad_w .* got 16"),
        (lambda: LinearCasts(fprop_x={"elment": "e2m1"}), "Unknown field of Cast 'elment'. Did you mean 'element'"),
        (lambda: LinearCasts.preset("nvfp5"), "Unknown preset 'nvfp5'. Did you mean 'nvfp4'"),
        (lambda: LinearCasts.of("nvfp5"), "Unknown preset 'nvfp5'. Did you mean 'nvfp4'"),
        (lambda: LinearCasts.of({"preset": None}), "Unknown preset None"),
        (
            lambda: LinearCasts.of({"preset": "nvfp4", "fprop_y": None}),
            "Unknown field of LinearCasts 'fprop_y'. Did you",
        ),
        (lambda: LinearCasts.of({1: None}), "Unknown field of LinearCasts 1"),
        (lambda: LinearCasts.of(None), "a preset's name or a mapping of fields; got None"),
        (lambda: LinearCasts.of(["nvfp4"]), r"a preset's name or a mapping of fields; got \['nvfp4'\]"),
        (lambda: SIX.replace(fprop=None), "Unknown field of LinearCasts 'fprop'. Did you mean 'fprop_"),
        (lambda: SIX.replace(fprop_x="fprop"), "LinearCasts.fprop_x is"),
        (lambda: SIX.phase("qat"), "Unknown phase 'qat'. Did you mean 'qaf'"),
        (lambda: SIX.phase(None), "Unknown phase None"),
        (lambda: SIX.with_rounding({"wgradx": "nearest"}), "Unknown operand 'wgradx'. Did you mean 'wgrad_x'"),
        (lambda: SIX.with_rounding({"wgrad_x": "near"}), "Unknown rounding 'near'"),
        (lambda: SIX.with_rounding("stochastic"), "rounding"),
        (lambda: LinearCasts().with_rounding({"wgrad_x": "nearest"}), "wgrad_x is None"),
        (lambda: SIX.replace(wgrad_x="fprop").with_rounding({"wgrad_x": "nearest"}), "wgrad_x is 'fprop'"),
        (lambda: SIX.replace(hadamard=16), "LinearCasts.hadamard maps some of fprop, dgrad, wgrad to .* got 16"),
        (lambda: SIX.replace(hadamard=16), "LinearCasts.hadamard maps some of fprop, .*{'wgrad': 16}; got 16"),
        (
            lambda: SIX.replace(hadamard={"wgard": 16}),
            "Unknown key of LinearCasts.hadamard 'wgard'. Did you mean 'wgrad'",
        ),
        (lambda: SIX.replace(hadamard={"wgrad_x": 16}), "Unknown key of LinearCasts.hadamard 'wgrad_x'"),
        *[
            (lambda size=size: SIX.replace(hadamard={"wgrad": size}), "Hadamard.size is one of 16, 32, 64, 128; got")
            for size in (8, 48, True, None, "16", 16.0)
        ],
        (
            lambda: SIX.replace(hadamard={"wgrad": {"sise": 16}}),
            "Unknown field of Hadamard 'sise'. Did you mean 'size'",
        ),
        (lambda: SIX.replace(hadamard={"wgrad": {"signs": "key"}}), "Unknown signs of a Hadamard transform 'key'. Did"),
        (
            lambda: SIX.replace(subtract_mean="wgrad"),
            "LinearCasts.subtract_mean is a list of GEMMs such as .*; got 'wgrad'",
        ),
        (lambda: SIX.replace(subtract_mean=None), "LinearCasts.subtract_mean is a list of GEMMs such as .*; got None"),
        (lambda: SIX.replace(subtract_mean=True), "LinearCasts.subtract_mean is a list of GEMMs such as .*; got True"),
        (
            lambda: SIX.replace(subtract_mean={"wgrad": False}),
            "LinearCasts.subtract_mean is a list of GEMMs such as .*; got {",
        ),
        (
            lambda: SIX.replace(requantize="wgrad_x"),
            "LinearCasts.requantize is a list of operands such as .*; got 'wgr",
        ),
        (lambda: SIX.replace(requantize=["wgrad_g"]), "Unknown operand in LinearCasts.requantize 'wgrad_g'"),
        (lambda: SIX.replace(subtract_mean=["wgard"]), "Unknown GEMM in .*subtract_mean 'wgard'. Did you mean 'wgrad'"),
        (lambda: SIX.replace(subtract_mean=["wgrad_x"]), "Unknown GEMM in LinearCasts.subtract_mean 'wgrad_x'"),
        (lambda: SIX.replace(surrogate="dge"), "LinearCasts.surrogate maps some of fprop_x, fprop_w to .* got 'dge'"),
        (lambda: SIX.replace(surrogate={"dgrad_w": "dge"}), "Unknown key of LinearCasts.surrogate 'dgrad_w'"),
        (lambda: SIX.replace(surrogate={"fprop_w": "ste"}), "Unknown surrogate 'ste'.*'trust', 'dge'"),
        (lambda: SIX.replace(surrogate={"fprop_w": None}), "Unknown surrogate None"),
        (lambda: SIX.replace(smooth="chanel"), "Unknown kind of LinearCasts.smooth 'chanel'. Did you mean 'channel'"),
        (lambda: SIX.replace(smooth=True), "Unknown kind of LinearCasts.smooth True.* Choose one of: 'channel', 'tok"),
        (lambda: SIX.replace(smooth=""), "Unknown kind of LinearCasts.smooth ''"),
        (lambda: SIX.replace(smoth="token"), "Unknown field of LinearCasts 'smoth'. Did you mean 'smooth'"),
        (
            lambda: LinearCasts.of({"preset": "fp8-delayed", "smooth": "channel"}),
            "give fprop_w a scale with source='current'.* Got fprop\\(x=e4m3/fp32:tensor\\(delayed 16\\)",
        ),
        (
            lambda: LinearCasts.of({"preset": "fp8-row", "every": {"scale": {"source": "delayed"}}}),
            "take block='tensor', two_level=True, or source='current'",
        ),
        (
            lambda: LinearCasts.of({"preset": "nvfp4", "every": 32}),
            "casts.every is a mapping of fields of Cast; got 32",
        ),
        (
            lambda: LinearCasts.of({"every": {"element": "int4"}}),
            "every changes the casts of a preset, and there are none",
        ),
        (lambda: LinearCasts.of({"preset": "bf16", "every": {}}), "every changes the casts of a preset, and there are"),
        (lambda: LinearCasts.of({"preset": "nvfp4", "every": {"elment": "int4"}}), "Unknown field of Cast 'elment'"),
        (lambda: LinearCasts.of({"preset": "nvfp4", "every": {"scale": {"blok": 8}}}), "Unknown field of Scale 'blok'"),
        (lambda: LinearCasts.of({"preset": "nvfp4", "every": {1: 2}}), "Unknown field of Cast '?1"),
        (lambda: LinearCasts.of({"preset": "nvfp4", "fprop_x": {"elment": 1}}), "Unknown field of Cast 'elment'. Did"),
        (lambda: LinearCasts.of({"preset": "nvfp4", "fprop_x": {1: 2}}), "Unknown field of Cast '?1"),
        (
            lambda: LinearCasts.of({"preset": "nvfp4", "fprop_x": {"scale": {"top": 500}}}),
            "Scale.top is a number for e4m3 scales, above 0 and at most 448",
        ),
        (lambda: LinearCasts.of({"preset": "ufp4", "wgrad_g": None, "wgrad_x": None}), "hadamard rotates wgrad, which"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
