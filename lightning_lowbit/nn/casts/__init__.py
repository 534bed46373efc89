"""The casts of a layer: which operand is quantized to what."""

from lightning_lowbit.nn.casts.linear_casts import PHASES, PRESETS, LinearCasts

__all__ = ["PHASES", "PRESETS", "LinearCasts"]
