"""Casts by name, with their sources."""

from dataclasses import replace
from functools import partial
from typing import Any

from lightning_lowbit.nn.casts.linear_casts import BACKWARD, PRESETS, LinearCasts
from lightning_lowbit.nn.casts.traits import GEMMS, OPERANDS
from lightning_lowbit.quant import Cast, Hadamard, Scale


def _bf16() -> LinearCasts:
    """Everything in high precision: the baseline."""
    return LinearCasts()


def _nvfp4() -> LinearCasts:
    """NVFP4 in all operands: blocks of 16, E4M3 scales, a tensor scale (FP4 All the Way, arXiv 2505.19115, section 3).
    Gradients and wgrad's activations round stochastically. Scales round to nearest, so the largest element of some
    blocks saturates: products of wgrad are 0.7 % too small on normal data. Scales that round up have no such bias."""
    return _fully(Cast("e2m1", Scale("e4m3", 16, two_level=True)))


def _nvfp4_nvidia() -> LinearCasts:
    """NVIDIA's recipe (arXiv 2509.25149, section 4; Transformer Engine's default): weights in tiles of 16x16, so that
    forward and backward pass use the same values; a Hadamard transform of 16 in wgrad; only gradients round
    stochastically. The paper leaves some layers, mostly the last ones, in bf16: ``skip``."""
    nearest = Cast("e2m1", Scale("e4m3", 16, two_level=True))
    tiles = nearest.replace(scale={"block": (16, 16)})
    return _fully(nearest).replace(fprop_w=tiles, dgrad_w="fprop", wgrad_x=nearest, hadamard={"wgrad": Hadamard(16)})


def _nvfp4_4over6() -> LinearCasts:
    """``nvfp4`` with Four Over Six in the forward pass (arXiv 2512.02010): each block maps its amax to 6 or 4,
    whichever has the smaller squared error. The tensor scale leaves room for 6/4 of a block scale (256 * 6 instead of
    448 * 6)."""
    casts = _nvfp4()
    adaptive = Cast("e2m1", Scale("e4m3", 16, two_level=True, four_over_six="mse"))
    return casts.replace(fprop_x=adaptive, fprop_w=adaptive)


def _nvfp4_row() -> LinearCasts:
    """``nvfp4`` with a float32 scale per row above the block scales instead of one per tensor, as in Transformer
    Engine's row-scaled NVFP4 (elements, blocks and roundings: arXiv 2505.19115): no amax of the whole tensor, and a
    token's values do not depend on the others. Rows are those of an operand along the contraction axis of its GEMM."""
    return _fully(Cast("e2m1", Scale("e4m3", 16, two_level="row")))


def _quartet2() -> LinearCasts:
    """Quartet II (arXiv 2601.22813): NVFP4 with Four Over Six in the forward pass, nearest. The backward pass takes
    gradients and the quantized x and w of the forward pass, rotates them by random Hadamard transforms of 128 and
    quantizes them by MS-EDEN: nearest, with scales that a correction and stochastic rounding make unbiased."""
    # Block scales below 256 leave room for the correction; the paper's search found 0.93 * 17/16, which clips a little.
    eden = Cast("e2m1", Scale("e4m3", 16, "stochastic", True, top=255.99, factor=0.93 * 17 / 16, correction=128))
    hadamard = {gemm: Hadamard(128, "keyed") for gemm in ("dgrad", "wgrad")}
    backward = dict.fromkeys(BACKWARD, eden)
    return _nvfp4_4over6().replace(**backward, hadamard=hadamard, requantize=("dgrad_w", "wgrad_x"))


def _mxfp4() -> LinearCasts:
    """MXFP4 (OCP Microscaling v1.0, arXiv 2310.10537: blocks of 32, E8M0 scales), rounded as in ``nvfp4``. The exponent
    rounds up where the largest element would saturate, as stochastic rounding needs (``"rceil"``)."""
    return _fully(Cast("e2m1", Scale("e8m0", 32)))


def _mxfp4_rht() -> LinearCasts:
    """MXFP4 with the backward pass of Tseng et al. (arXiv 2502.20586, section 3): OCP's exponent, elements scaled by
    3/4 so that none saturates, stochastic rounding of both operands, a Hadamard transform of 64 with random signs. The
    forward pass is that of ``mxfp4``; the paper's is in high precision."""
    cast = Cast("e2m1", Scale("e8m0", 32, "floor", prescale=0.75), "stochastic")
    hadamard = {gemm: Hadamard(64, "keyed") for gemm in ("dgrad", "wgrad")}
    return _mxfp4().replace(**dict.fromkeys(BACKWARD, cast), hadamard=hadamard)


def _mxfp6() -> LinearCasts:
    """MXFP6 (arXiv 2310.10537, section 5): blocks of 32, E8M0 scales rounded up, E3M2, nearest everywhere."""
    return LinearCasts().replace(**dict.fromkeys(OPERANDS, Cast("e3m2", Scale("e8m0", 32))))


def _mxfp8() -> LinearCasts:
    """MXFP8 (arXiv 2506.08027): blocks of 32, E8M0 scales rounded up, E4M3, nearest everywhere. Gradients are in E4M3,
    too, as the paper recommends, because the block scales provide their range."""
    return LinearCasts().replace(**dict.fromkeys(OPERANDS, Cast("e4m3", Scale("e8m0", 32))))


def _mxfp8_nvfp4() -> LinearCasts:
    """``mxfp8`` (arXiv 2506.08027) in the forward pass, ``nvfp4`` (arXiv 2505.19115) in the backward pass, one of the
    combinations in Transformer Engine's custom recipes: for models whose loss suffers from FP4 in the forward pass."""
    forward = _mxfp8()
    return _nvfp4().replace(fprop_x=forward.fprop_x, fprop_w=forward.fprop_w)


def _nvfp4_mxfp8() -> LinearCasts:
    """``nvfp4`` (arXiv 2505.19115) in the forward pass, ``mxfp8`` (arXiv 2506.08027) in the backward pass: a
    model that is served in FP4 is trained in FP4, with gradients of 8 bits."""
    forward = _nvfp4()
    return _mxfp8().replace(fprop_x=forward.fprop_x, fprop_w=forward.fprop_w)


def _ufp4() -> LinearCasts:
    """UFP4 (arXiv 2606.20381): the uniform grid of E1M2, whose rounding to nearest does not shrink magnitudes, in the
    blocks of NVFP4; a Hadamard transform of 16 in all GEMMs; only gradients round stochastically."""
    nearest = Cast("e1m2", Scale("e4m3", 16, two_level=True))
    return _fully(nearest).replace(wgrad_x=nearest, hadamard={gemm: Hadamard(16) for gemm in GEMMS})


def _fully(nearest: Cast) -> LinearCasts:
    """All six operands in one cast, with the roundings of FP4 All the Way (section 3.2)."""
    stochastic = replace(nearest, rounding="stochastic")
    return LinearCasts(nearest, nearest, dgrad_g=stochastic, dgrad_w=nearest, wgrad_g=stochastic, wgrad_x=stochastic)


def _fp8(**scale: Any) -> LinearCasts:
    """E4M3 for x and w, E5M2 with its wider range for g (arXiv 2209.05433, section 3); nearest everywhere."""
    x, g = (Cast(element, Scale("fp32", **scale)) for element in ("e4m3", "e5m2"))
    return LinearCasts(fprop_x=x, fprop_w=x, dgrad_g=g, dgrad_w=x, wgrad_g=g, wgrad_x=x)


def _fp8_delayed() -> LinearCasts:
    """FP8 with one scale per tensor, from the last 16 steps (arXiv 2209.05433; Transformer Engine remembers 1024)."""
    return _fp8(block="tensor", source="delayed")


def _fp8_current() -> LinearCasts:
    """FP8 with one scale per tensor, from the tensor itself (formats as in arXiv 2209.05433): Transformer Engine's
    ``Float8CurrentScaling`` and torchao's ``tensorwise``."""
    return _fp8(block="tensor")


def _fp8_row() -> LinearCasts:
    """FP8 with one scale per token or channel, across the contraction axis (formats as in arXiv 2209.05433). torchao's
    ``rowwise`` uses E4M3 for gradients, too, and powers of two as scales."""
    return _fp8(block="row")


def _fp8_blockwise() -> LinearCasts:
    """DeepSeek-V3's FP8 (arXiv 2412.19437, section 3.3): E4M3 everywhere, also for gradients; activations and gradients
    in blocks of 1x128 along the contraction axis, weights in tiles of 128x128, float32 scales from their own amaxes.
    The paper's powers of two as scales of some activations are ``scale: {rounding: power_of_two}``."""
    rows = Cast("e4m3", Scale("fp32", 128))
    tiles = rows.replace(scale={"block": (128, 128)})
    return LinearCasts(fprop_x=rows, fprop_w=tiles, dgrad_g=rows, dgrad_w=tiles, wgrad_g=rows, wgrad_x=rows)


def quantization_aware(x: Cast | None, w: Cast | None) -> LinearCasts:
    """Quantizes the forward pass; the backward pass reuses its operands, straight through the rounding."""
    return LinearCasts(fprop_x=x, fprop_w=w, dgrad_w="fprop" if w else None, wgrad_x="fprop" if x else None)


def _groups_of_128(element: str) -> LinearCasts:
    cast = Cast(element, Scale("fp32", 128), round_to_bfloat16=True)
    return quantization_aware(cast, cast)


def _integer(bits: int) -> LinearCasts:
    """Integer QAT, symmetric in groups of 128, as in GPTQ (arXiv 2210.17323) and AWQ (arXiv 2306.00978) checkpoints."""
    return _groups_of_128(f"int{bits}")


def _e1m2() -> LinearCasts:
    """QAT in E1M2, the "FP4" of Stable-SPAM's experiments (arXiv 2502.17055, section 4). The authors' code has 9 levels
    in groups of 256, with the two largest elements exact. E1M2 has 15 levels."""
    return _groups_of_128("e1m2")


def _ternary() -> LinearCasts:
    """BitNet b1.58 (arXiv 2402.17764, section 2): int8 activations per token, ternary weights with an absmean scale."""
    return quantization_aware(
        Cast("int8", Scale("fp32", "row", epsilon=1e-5)),
        Cast("ternary", Scale("fp32", "tensor", statistic="absmean", epsilon=1e-5)),
    )


PRESETS |= {
    "bf16": _bf16,
    "nvfp4": _nvfp4,
    "nvfp4-nvidia": _nvfp4_nvidia,
    "nvfp4-4over6": _nvfp4_4over6,
    "nvfp4-row": _nvfp4_row,
    "quartet2": _quartet2,
    "mxfp4": _mxfp4,
    "mxfp4-rht": _mxfp4_rht,
    "mxfp6": _mxfp6,
    "mxfp8": _mxfp8,
    "mxfp8-nvfp4": _mxfp8_nvfp4,
    "nvfp4-mxfp8": _nvfp4_mxfp8,
    "ufp4": _ufp4,
    "fp8-delayed": _fp8_delayed,
    "fp8-current": _fp8_current,
    "fp8-row": _fp8_row,
    "fp8-blockwise": _fp8_blockwise,
    # Each by its name: the command reads them in the source, before torch is imported.
    "int8": partial(_integer, 8),
    "int7": partial(_integer, 7),
    "int6": partial(_integer, 6),
    "int5": partial(_integer, 5),
    "int4": partial(_integer, 4),
    "int3": partial(_integer, 3),
    "int2": partial(_integer, 2),
    "e1m2": _e1m2,
    "ternary": _ternary,
}
