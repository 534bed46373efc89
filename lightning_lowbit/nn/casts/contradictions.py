"""Combinations of fields of casts that are refused, each with a remedy."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lightning_lowbit.nn.casts.traits import GEMM, OPERANDS, OPERANDS_OF
from lightning_lowbit.quant import Cast

if TYPE_CHECKING:
    from lightning_lowbit.nn.casts.linear_casts import LinearCasts


def contradictions(casts: "LinearCasts") -> Iterator[str]:
    for check in (_hadamard, _subtract_mean, _requantize, _correction, _surrogate, _smooth):
        yield from check(casts)


def _hadamard(casts: "LinearCasts") -> Iterator[str]:
    reused = [operand for operand in OPERANDS[2:] if getattr(casts, operand) == "fprop"]
    for gemm in casts.hadamard:
        if not casts.has_cast(OPERANDS_OF[gemm]):
            yield f"hadamard rotates {gemm}, which quantizes nothing: leave {gemm} out of hadamard."
        for operand in reused:
            if gemm == "fprop" or operand.startswith(gemm):
                yield (
                    f"hadamard rotates {gemm}, but {operand} is the operand of the forward pass as that pass quantized "
                    f"it: give {operand} a cast of its own, or leave {gemm} out of hadamard."
                )


def _subtract_mean(casts: "LinearCasts") -> Iterator[str]:
    for gemm in casts.subtract_mean:
        if not casts.has_cast(OPERANDS_OF[gemm], "xg"):
            yield f"subtract_mean needs an x or g of {gemm} with a cast: leave {gemm} out of subtract_mean."
        if casts.wgrad_x == "fprop" and gemm in ("fprop", "wgrad"):
            yield (
                f"subtract_mean changes x in {gemm}, but wgrad_x is the x that the forward pass quantized: give "
                f"wgrad_x a cast of its own, or leave {gemm} out of subtract_mean."
            )


def _requantize(casts: "LinearCasts") -> Iterator[str]:
    for operand in casts.requantize:
        source = f"fprop_{operand[-1]}"
        if not isinstance(getattr(casts, operand), Cast) or getattr(casts, source) is None:
            yield (
                f"requantize quantizes {source} again by the cast of {operand}, and one of them has no cast: give both "
                f"a cast, or leave {operand} out of requantize."
            )
        if "fprop" in casts.hadamard or (operand == "wgrad_x" and "fprop" in casts.subtract_mean):
            yield (
                f"hadamard or subtract_mean changes {source} in fprop, which {operand} would quantize again: leave "
                f"{operand} out of requantize, or fprop out of the other."
            )


def _correction(casts: "LinearCasts") -> Iterator[str]:
    for operand in OPERANDS:
        cast = getattr(casts, operand)
        size = cast.scale.correction if isinstance(cast, Cast) else None
        if size is not None and str(casts.hadamard.get(GEMM[operand])) != f"{size}~":
            yield (
                f"The correction of {operand} makes rounding unbiased over random rotations of {size} elements: give "
                f"hadamard of {GEMM[operand]} the size {size} and signs='keyed', or leave out correction."
            )


def _surrogate(casts: "LinearCasts") -> Iterator[str]:
    for operand, kind in casts.surrogate.items():
        cast = getattr(casts, operand)
        if cast is None:
            yield f"surrogate names {operand}, which is not quantized: leave it out of surrogate."
        elif cast.scale.statistic == "minmax":
            yield (
                f"The surrogate of {operand} counts levels from zero, and with statistic='minmax' those of a block "
                f"begin elsewhere: leave {operand} out of surrogate, or take another statistic."
            )
        elif kind == "dge" and cast.rounding == "stochastic":
            yield (
                f"The surrogate 'dge' stands for rounding to nearest, and {operand} rounds stochastically, whose mean "
                f"is the identity already: leave {operand} out of surrogate, or round it to nearest."
            )
        elif cast.scale.rounding == "stochastic":
            yield (
                f"The surrogate of {operand} needs the scales, which round stochastically: leave {operand} out of "
                "surrogate, or take scales with rounding='nearest'."
            )
        if "fprop" in casts.subtract_mean:
            yield (
                f"A surrogate of {operand} and subtract_mean in fprop contradict each other, since the product with "
                "the mean, whose gradient it would change too, is not quantized: leave out one of them."
            )


def _smooth(casts: "LinearCasts") -> Iterator[str]:
    if casts.smooth is not None and not casts.quantizes_x_or_w:
        yield "smooth scales x and w, which are not quantized: leave out smooth."
    for operand in casts.delayed:
        if casts.smooth == "channel" and operand.endswith("_w"):
            yield (
                f"With smooth='channel' the weight changes with every batch, and delayed scaling of {operand} would "
                f"meet the leap of a channel there: give {operand} a scale with source='current'."
            )
