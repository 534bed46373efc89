"""A precision plugin: the forward pass in one preset, the backward pass in another."""

from typing import Any

from lightning_lowbit import LinearCasts, LowBitPrecision


class HybridPrecision(LowBitPrecision):
    """Trains with six casts from two presets, by default MXFP8 forward and MXFP4 backward.

    Args:
        forward: preset of `fprop_x` and `fprop_w`.
        backward: preset of the four operands of the backward pass; it must give each a cast of its own.
        **kwargs: those of `LowBitPrecision`.

    Example:
        >>> Trainer(plugins=[HybridPrecision("mxfp8", "mxfp4", skip=["lm_head"])])
    """

    def __init__(self, forward: str = "mxfp8", backward: str = "mxfp4", **kwargs: Any) -> None:
        first = LinearCasts.preset(forward)
        super().__init__(LinearCasts.preset(backward).replace(fprop_x=first.fprop_x, fprop_w=first.fprop_w), **kwargs)
