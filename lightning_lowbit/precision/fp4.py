"""FP4 training."""

from collections.abc import Mapping
from typing import Any

from lightning_lowbit.nn.casts.linear_casts import LinearCasts
from lightning_lowbit.nn.conversion.convert import CastsLike
from lightning_lowbit.precision.base import LowBitPrecision


class FP4Precision(LowBitPrecision):
    """Fully quantized training in FP4: all six operands of the three GEMMs (FP4 All the Way, arXiv 2505.19115).

    The output layer stays in high precision unless ``quantize_output`` is true, see :class:`LowBitPrecision`.

    Args:
        casts: as in :class:`LowBitPrecision`; NVFP4 by default.
        rounding: other roundings for some operands, e.g. ``{"wgrad_x": "nearest"}``; ``overrides`` are not changed.
        **kwargs: those of :class:`LowBitPrecision`.

    Raises:
        ValueError: ``rounding`` names an unknown operand or rounding, or an operand in high precision.

    Examples:
        >>> Trainer(plugins=[FP4Precision("nvfp4", rounding={"wgrad_x": "nearest"})])
    """

    leaves_output = True

    def __init__(self, casts: CastsLike = "nvfp4", *, rounding: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        super().__init__(LinearCasts.of(casts).with_rounding(rounding or {}), **kwargs)
