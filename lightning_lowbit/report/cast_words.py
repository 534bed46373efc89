"""The notation of casts in words, such as ``e2m1/e4m3:1x16+fp32~``."""

from lightning_lowbit.quant import Cast
from lightning_lowbit.quant.cast import Scale

_BLOCKS = {"tensor": "the tensor", "row": "each row along the contraction"}
_STATISTICS = {
    "absmax": "the largest magnitude",
    "absmean": "the mean magnitude",
    "minmax": "least and largest element",
}


def in_words(cast: Cast) -> str:
    """A cast in words, in the order of its notation.

    Examples:
        >>> in_words(Cast.from_spec('{"element": "e4m3", "scale": {"format": "fp32", "block": "tensor"}}'))
        'elements in e4m3, rounded to nearest; one scale in fp32 for the tensor'
    """
    rounding = "rounded stochastically" if cast.rounding == "stochastic" else "rounded to nearest"
    parts = [f"elements in {cast.element}, {rounding}", *_of_scale(cast.scale)]
    parts += ["what enters the GEMM is rounded to bfloat16"] if cast.round_to_bfloat16 else []
    return "; ".join(parts)


def _of_scale(scale: Scale) -> list[str]:
    block = scale.block
    tile = f"each tile of {block[0]} x {block[1]}" if isinstance(block, tuple) else ""
    of = tile or _BLOCKS.get(str(block), f"each {block} elements along the contraction")
    times = "" if scale.factor == 1 else f" times {scale.factor:g}"
    said = {
        f"one scale in {scale.format} for {of}": True,
        f"another scale in fp32 for {'each row' if scale.two_level == 'row' else 'the tensor'}": bool(scale.two_level),
        "scales are rounded up, so that nothing saturates": scale.rounding == "up",
        "scales are rounded stochastically": scale.rounding == "stochastic",
        f"scales are rounded by {scale.rounding!r}": scale.rounding not in ("nearest", "up", "rceil", "stochastic"),
        f"and corrected in groups of {scale.correction}, so that rounding is unbiased": scale.correction is not None,
        "the largest element of a block becomes 6 or 4, whichever has the smaller error "
        f"({scale.four_over_six})": scale.four_over_six is not None,
        f"elements are multiplied by {scale.prescale:g} before": scale.prescale != 1,
        f"2^{scale.margin} of room above the largest magnitude": bool(scale.margin),
        f"scales are made from {_STATISTICS[scale.statistic]}{times}": (scale.statistic, scale.factor) != ("absmax", 1),
        f"from the largest magnitudes of the {scale.history} steps before": scale.source == "delayed",
    }
    return [text for text, holds in said.items() if holds]
