"""Casts of a layer with all their settings."""

from dataclasses import replace

from lightning_lowbit import Cast, LinearCasts, Scale
from lightning_lowbit.nn import OPERANDS, PHASES
from lightning_lowbit.quant import Hadamard
from tests.nn.layers import GEMMS

NEAREST = Cast("e2m1", Scale("e4m3", 16, two_level=True))
STOCHASTIC = replace(NEAREST, rounding="stochastic")
INT4 = Cast("int4", Scale("e5m2", 128))
SIX = LinearCasts(**dict.fromkeys(OPERANDS, NEAREST))
ROTATED = SIX.replace(hadamard={"fprop": 16, "dgrad": Hadamard(64, "keyed"), "wgrad": 128})
CENTERED = SIX.replace(subtract_mean=["fprop", "dgrad", "wgrad"])
SURROGATES = ROTATED.replace(surrogate={"fprop_x": "trust", "fprop_w": "dge"}, subtract_mean=["dgrad", "wgrad"])

MIXED = LinearCasts(
    fprop_x=NEAREST, dgrad_w="fprop", wgrad_g=INT4, hadamard={"wgrad": 32}, subtract_mean=["fprop", "wgrad"]
)

DELAYED = Cast("e4m3", Scale("fp32", "tensor", margin=1, source="delayed", history=4, algorithm="most_recent"))
SMOOTHED = SIX.replace(smooth="channel", fprop_x=DELAYED, dgrad_w="fprop", hadamard={"wgrad": 16})
REUSED = LinearCasts(fprop_w=INT4, dgrad_g=STOCHASTIC, dgrad_w="fprop", wgrad_x="fprop", subtract_mean=["dgrad"])

AWKWARD = {
    "rotated": ROTATED,
    "centered": CENTERED,
    "surrogates": SURROGATES,
    "mixed": MIXED,
    "reused": REUSED,
    "requantized": LinearCasts.preset("quartet2").replace(requantize=["wgrad_x"]),
    "smoothed": SMOOTHED,
    "smoothed tokens": SMOOTHED.replace(smooth="token"),
    "delayed": SIX.replace(fprop_x=DELAYED, dgrad_g=DELAYED.replace(scale={"algorithm": "max"})),
}

EXPECTED_PHASES = {
    "fqt": (),
    "qaf": ("dgrad_g", "dgrad_w", "wgrad_g", "wgrad_x"),
    "hp-forward": ("fprop_x", "fprop_w"),
    "bf16": OPERANDS,
}


def assert_phases(casts):
    for phase in PHASES:
        changed = casts.phase(phase)
        quantized = set()
        for operand in OPERANDS:
            expected = None if operand in EXPECTED_PHASES[phase] else getattr(casts, operand)
            assert getattr(changed, operand) == expected, f"{operand} in phase {phase} of {casts}"
            quantized |= {operand} if isinstance(expected, Cast) else set()
        # What belongs to a GEMM or a tensor stays exactly where something is quantized that it concerns.
        rotated = {gemm: setting for gemm, setting in casts.hadamard.items() if quantized & set(GEMMS[gemm])}
        centered = tuple(
            gemm for gemm in casts.subtract_mean if any(name in quantized and name[-1] != "w" for name in GEMMS[gemm])
        )
        surrogate = {operand: kind for operand, kind in casts.surrogate.items() if operand in quantized}
        assert changed.hadamard == rotated, f"{phase} of {casts}"
        assert changed.subtract_mean == centered, f"{phase} of {casts}"
        assert changed.surrogate == surrogate, f"{phase} of {casts}"
        again = tuple(n for n in casts.requantize if n in quantized and getattr(changed, f"fprop_{n[-1]}") is not None)
        assert changed.requantize == again, f"{phase} of {casts}"
        assert changed.smooth == (casts.smooth if {name[-1] for name in quantized} & {"x", "w"} else None), phase
        assert changed.phase(phase) == changed, f"{phase} is not idempotent"
        assert changed.phase("fqt") == changed, "fqt changes casts"
    assert casts.phase("fqt") == casts, "fqt does not give the casts back"
    assert casts.phase("bf16") == LinearCasts()


# What decides whether hardware takes an operand as it is.
E4M3, E5M2 = (Cast(element, Scale("fp32", "tensor")) for element in ("e4m3", "e5m2"))
