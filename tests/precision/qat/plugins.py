"""Plugins of quantization-aware training."""

from lightning_lowbit import (
    Cast,
    LinearCasts,
)


def qat(x: Cast | None, w: Cast | None) -> LinearCasts:
    return LinearCasts(x, w, None, "fprop" if w else None, None, "fprop" if x else None)
