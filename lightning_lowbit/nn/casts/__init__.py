"""The casts of a layer: the number format of each operand."""

from lightning_lowbit.nn.casts.linear_casts import PHASES, PRESETS, LinearCasts

__all__ = ["PHASES", "PRESETS", "LinearCasts"]
