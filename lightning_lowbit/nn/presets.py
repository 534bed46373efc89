"""Casts by name, with their sources."""

from dataclasses import replace
from functools import partial
from typing import Any

from lightning_lowbit.nn.casts import GEMMS, OPERANDS, PRESETS, LinearCasts
from lightning_lowbit.quant import Cast, Hadamard, Scale


def _bf16() -> LinearCasts:
    """Everything in high precision: the baseline."""
    return LinearCasts()


def _nvfp4() -> LinearCasts:
    """Fully quantized training in NVFP4 (FP4 All the Way, arXiv 2505.19115, section 3): blocks of 16 with E4M3 scales
    and a tensor scale in all six operands; stochastic rounding of both gradients and of wgrad's activations, nearest
    elsewhere.

    Stochastic rounding is unbiased where nothing saturates. Scales are rounded to nearest, as in the paper, so that the
    largest element of some blocks saturates: on average the products of wgrad are too small, by 0.7 % on normal data
    and up to 1.75 % with heavy tails. The other presets with E4M3 scales share this bias. Scales that are rounded up do
    not have it: ``{"preset": "nvfp4", "every": {"scale": {"rounding": "up"}}}``."""
    return _fully(Cast("e2m1", Scale("e4m3", 16, two_level=True)))


def _nvfp4_nvidia() -> LinearCasts:
    """NVIDIA's recipe (Pretraining Large Language Models with NVFP4, arXiv 2509.25149, section 4; Transformer Engine's
    default): weights in tiles of 16x16, so that forward and backward pass see the same ones; a Hadamard transform of 16
    in wgrad; stochastic rounding of gradients only. The paper leaves some layers, mostly the last ones, in bf16:
    ``skip``."""
    nearest = Cast("e2m1", Scale("e4m3", 16, two_level=True))
    gradient = replace(nearest, rounding="stochastic")
    return LinearCasts(
        fprop_x=nearest,
        fprop_w=nearest.replace(scale={"block": (16, 16)}),
        dgrad_g=gradient,
        dgrad_w="fprop",
        wgrad_g=gradient,
        wgrad_x=nearest,
        hadamard={"wgrad": Hadamard(16)},
    )


def _nvfp4_4over6() -> LinearCasts:
    """``nvfp4`` with Four Over Six in the forward pass (arXiv 2512.02010): each block takes the scale, 6 or 4, with the
    smaller squared error; the tensor scale leaves room for 6/4 of the largest one (256 * 6 in place of 448 * 6)."""
    casts = _nvfp4()
    adaptive = Cast("e2m1", Scale("e4m3", 16, two_level=True, four_over_six="mse"))
    return casts.replace(fprop_x=adaptive, fprop_w=adaptive)


def _mxfp4() -> LinearCasts:
    """MXFP4 (OCP Microscaling v1.0: blocks of 32, E8M0 scales; arXiv 2310.10537), rounded as in ``nvfp4``. The exponent
    is rounded up where the largest element would saturate, as stochastic rounding needs (``"rceil"``)."""
    return _fully(Cast("e2m1", Scale("e8m0", 32)))


def _mxfp4_rht() -> LinearCasts:
    """MXFP4 with the backward pass of Tseng et al. (Training LLMs with MXFP4, arXiv 2502.20586, section 3): OCP's
    exponent, elements scaled by 3/4 so that none saturates, stochastic rounding of both operands, and a Hadamard
    transform with random signs over groups of 64. The paper leaves the forward pass in high precision; here it is that
    of ``mxfp4``."""
    cast = Cast("e2m1", Scale("e8m0", 32, "floor", prescale=0.75), "stochastic")
    return _mxfp4().replace(
        dgrad_g=cast,
        dgrad_w=cast,
        wgrad_g=cast,
        wgrad_x=cast,
        hadamard={gemm: Hadamard(64, "keyed") for gemm in ("dgrad", "wgrad")},
    )


def _mxfp6() -> LinearCasts:
    """MXFP6 (Microscaling Data Formats, arXiv 2310.10537, section 5: blocks of 32, E8M0 scales, E3M2 for weights,
    activations and gradients); nearest everywhere. The exponent is rounded up as in ``mxfp4``."""
    return LinearCasts().replace(**dict.fromkeys(OPERANDS, Cast("e3m2", Scale("e8m0", 32))))


def _mxfp8() -> LinearCasts:
    """MXFP8 (Recipes for Pre-training LLMs with MXFP8, arXiv 2506.08027): blocks of 32, E8M0 scales rounded up, E4M3
    for all six operands; nearest everywhere. Gradients too are in E4M3, as the paper recommends: the block scale takes
    care of their range. E5M2 for them is ``{"preset": "mxfp8", "dgrad_g": {"element": "e5m2"}, ...}``."""
    return LinearCasts().replace(**dict.fromkeys(OPERANDS, Cast("e4m3", Scale("e8m0", 32))))


def _ufp4() -> LinearCasts:
    """UFP4 (Rethinking Shrinkage Bias in LLM FP4 Pretraining, arXiv 2606.20381): the uniform grid of E1M2, whose
    rounding to nearest does not shrink magnitudes, in the blocks of NVFP4; a Hadamard transform of 16 in all three
    GEMMs; stochastic rounding of gradients only."""
    nearest = Cast("e1m2", Scale("e4m3", 16, two_level=True))
    gradient = replace(nearest, rounding="stochastic")
    return LinearCasts(
        nearest, nearest, gradient, nearest, gradient, nearest, hadamard={gemm: Hadamard(16) for gemm in GEMMS}
    )


def _fully(nearest: Cast) -> LinearCasts:
    """All six operands in one cast, with the roundings of FP4 All the Way (section 3.2)."""
    stochastic = replace(nearest, rounding="stochastic")
    return LinearCasts(
        fprop_x=nearest,
        fprop_w=nearest,
        dgrad_g=stochastic,
        dgrad_w=nearest,
        wgrad_g=stochastic,
        wgrad_x=stochastic,
    )


def _fp8(**scale: Any) -> LinearCasts:
    """E4M3 for x and w, E5M2 for g, whose range is wider (FP8 Formats for Deep Learning, arXiv 2209.05433, section 3);
    nearest everywhere, which all of FP8's recipes share."""
    x, g = (Cast(element, Scale("fp32", **scale)) for element in ("e4m3", "e5m2"))
    return LinearCasts(fprop_x=x, fprop_w=x, dgrad_g=g, dgrad_w=x, wgrad_g=g, wgrad_x=x)


def _fp8_delayed() -> LinearCasts:
    """FP8 with one scale per tensor, from the largest magnitude of the last 16 steps (arXiv 2209.05433, and Transformer
    Engine's ``DelayedScaling``, which remembers 1024)."""
    return _fp8(block="tensor", source="delayed")


def _fp8_current() -> LinearCasts:
    """FP8 with one scale per tensor, from the tensor itself (formats as in arXiv 2209.05433; Transformer Engine's
    ``Float8CurrentScaling`` and torchao's ``tensorwise``)."""
    return _fp8(block="tensor")


def _fp8_row() -> LinearCasts:
    """FP8 with one scale per token or channel, across the contraction axis of the GEMM (formats as in
    arXiv 2209.05433; torchao's ``rowwise`` has E4M3 for gradients too, and powers of two as scales)."""
    return _fp8(block="row")


def quantization_aware(x: Cast | None, w: Cast | None) -> LinearCasts:
    """Forward pass in few bits, backward pass with its operands: ``F.linear(fake_quantize(x), fake_quantize(w))``,
    whose gradients pass straight through the rounding."""
    return LinearCasts(fprop_x=x, fprop_w=w, dgrad_w="fprop" if w else None, wgrad_x="fprop" if x else None)


def _groups_of_128(element: str) -> LinearCasts:
    cast = Cast(element, Scale("fp32", 128), rounded=True)
    return quantization_aware(cast, cast)


def _integer(bits: int) -> LinearCasts:
    """Integer QAT of weights and activations, symmetric in groups of 128, the group size of most int4 checkpoints
    (GPTQ, arXiv 2210.17323; AWQ, arXiv 2306.00978)."""
    return _groups_of_128(f"int{bits}")


def _e1m2() -> LinearCasts:
    """The "FP4" of Stable-SPAM's experiments (arXiv 2502.17055, section 4): QAT of weights and activations in E1M2. The
    authors' code has groups of 256 of which the two largest elements stay exact, and 9 levels; these are E1M2's 15."""
    return _groups_of_128("e1m2")


def _ternary() -> LinearCasts:
    """BitNet b1.58 (arXiv 2402.17764, section 2): int8 activations per token, ternary weights times their mean
    magnitude per tensor."""
    return quantization_aware(
        Cast("int8", Scale("fp32", "row", epsilon=1e-5)),
        Cast("ternary", Scale("fp32", "tensor", statistic="absmean", epsilon=1e-5)),
    )


PRESETS.update(
    {
        "bf16": _bf16,
        "nvfp4": _nvfp4,
        "nvfp4-nvidia": _nvfp4_nvidia,
        "nvfp4-4over6": _nvfp4_4over6,
        "mxfp4": _mxfp4,
        "mxfp4-rht": _mxfp4_rht,
        "mxfp6": _mxfp6,
        "mxfp8": _mxfp8,
        "ufp4": _ufp4,
        "fp8-delayed": _fp8_delayed,
        "fp8-current": _fp8_current,
        "fp8-row": _fp8_row,
        **{f"int{bits}": partial(_integer, bits) for bits in range(8, 1, -1)},
        "e1m2": _e1m2,
        "ternary": _ternary,
    }
)
