"""A cast as the numbers that kernels in C++ and Triton take, in the symbols of quant/scaling.py."""

from functools import cache
from typing import NamedTuple

from lightning_lowbit.formats import Format
from lightning_lowbit.quant.cast import Cast
from lightning_lowbit.quant.scales import e8m0_rule, fp32_numerator


class Grid(NamedTuple):
    """A number format as the kernels round to it, and what its codes mean."""

    max: float
    mantissa_bits: int
    min_exponent: int
    is_uniform: bool  # one spacing from 0 to max
    coding: str
    bits: int


class CastNumbers(NamedTuple):
    """A cast.

    ``size`` is the numerator of fp32 scales, ``top`` that of the tensor's scale. ``threshold`` is the fraction of a
    significand, in units of 2^-23, from which an e8m0 scale is one power of two larger, and ``exponent`` that of the
    largest element. ``group`` counts blocks, 0 for scales that are not corrected. ``fours`` is that of
    :meth:`CastCall.in_fours`. ``capability`` is that of the GPU for which Triton compiles, such as 90, or 0 in its
    interpreter, which knows no instructions of GPUs.
    """

    elements: Grid
    stochastic: bool
    scale: str  # "exmy", "e8m0", "bf16", "fp16" or "fp32"
    storage: Grid
    up: bool
    power_of_two: bool
    element_max: float
    exponent: int
    threshold: int
    statistic: str
    size: float
    factor: float
    epsilon: float
    two_level: bool  # of the tensor
    by_row: bool  # a second level of rows
    drawn: bool  # whether scales round stochastically
    group: int
    top: float
    prescale: float
    four_over_six: str
    is_tensor: bool
    per_block: bool  # scales, where a NaN shows
    scaled: bool
    fours: bool
    capability: int = 0


def grid_of(format: Format) -> Grid:
    uniform = format.max_exponent == format.min_exponent
    return Grid(format.max, format.mantissa_bits, format.min_exponent, uniform, format.encoding, format.bits)


@cache
def cast_numbers(cast: Cast, fours: bool = True) -> CastNumbers:
    scale, element = cast.scale, cast.format
    exponent, significand = e8m0_rule(element, scale.rounding) if scale.format == "e8m0" else (0, 1.0)
    return CastNumbers(
        elements=grid_of(cast.grid),
        stochastic=cast.rounding == "stochastic",
        scale=scale.format if scale.format in ("e8m0", "bf16", "fp16", "fp32") else "exmy",
        storage=grid_of(scale.storage),
        up=scale.rounding == "up",
        power_of_two=scale.rounding == "power_of_two",
        element_max=element.max,
        exponent=exponent,
        threshold=int((significand - 1) * 2**23),
        statistic=scale.statistic,
        size=fp32_numerator(cast) if scale.format == "fp32" else 1.0,
        factor=float(scale.factor),
        epsilon=float(scale.epsilon),
        two_level=scale.two_level is True,
        by_row=scale.two_level == "row",
        drawn=scale.rounding == "stochastic",
        group=scale.correction // scale.block if scale.correction and isinstance(scale.block, int) else 0,
        top=scale.largest * element.max / scale.factor if scale.two_level else 1.0,
        prescale=float(scale.prescale),
        four_over_six=scale.four_over_six or "",
        is_tensor=scale.block == "tensor",
        per_block=scale.per_block,
        scaled=scale.per_block,
        fours=fours,
    )
