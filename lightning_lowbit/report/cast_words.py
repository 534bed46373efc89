"""What a cast's notation means, such as ``e2m1/e4m3:1x16+fp32~``."""

from lightning_lowbit.quant import Cast
from lightning_lowbit.quant.cast import Scale


def in_words(cast: Cast) -> str:
    """A cast in words, in the order of its notation.

    Example:
        >>> in_words(Cast.from_spec('{"element": "e4m3", "scale": {"format": "fp32", "block": "tensor"}}'))
        'elements e4m3, nearest; one fp32 scale for the tensor'
    """
    rounding = "rounded stochastically" if cast.rounding == "stochastic" else "rounded to nearest"
    parts = [f"elements in {cast.element}, {rounding}", *_of_scale(cast.scale)]
    parts += ["what enters the GEMM is rounded to bfloat16"] if cast.rounded else []
    return "; ".join(parts)


def _of_scale(scale: Scale) -> list[str]:
    blocks = {"tensor": "the tensor", "row": "each row along the contraction"}
    block = scale.block
    if isinstance(block, tuple):
        of = f"each tile of {block[0]} x {block[1]}"
    else:
        of = blocks.get(str(block), f"each {block} elements along the contraction")
    parts = [f"one scale in {scale.format} for {of}"]
    parts += ["another scale in fp32 for the tensor"] if scale.two_level else []
    parts += ["scales are rounded up, so that nothing saturates"] if scale.rounding == "up" else []
    parts += [f"scales are rounded by {scale.rounding!r}"] if scale.rounding not in ("nearest", "up", "rceil") else []
    if scale.four_over_six is not None:
        parts.append(
            f"the largest element of a block becomes 6 or 4, whichever has the smaller error ({scale.four_over_six})"
        )
    parts += [f"elements are multiplied by {scale.prescale:g} before"] if scale.prescale != 1 else []
    parts += [f"2^{scale.margin} of room above the largest magnitude"] if scale.margin else []
    if (scale.statistic, scale.factor) != ("absmax", 1):
        names = {
            "absmax": "the largest magnitude",
            "absmean": "the mean magnitude",
            "minmax": "least and largest element",
        }
        times = "" if scale.factor == 1 else f" times {scale.factor:g}"
        parts.append(f"scales are made from {names[scale.statistic]}{times}")
    if scale.source == "delayed":
        parts.append(f"from the largest magnitudes of the {scale.history} steps before")
    return parts
