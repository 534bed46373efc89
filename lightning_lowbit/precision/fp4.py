"""FP4 training."""

from collections.abc import Mapping
from typing import Any

from lightning_lowbit.nn.casts.linear_casts import LinearCasts
from lightning_lowbit.nn.casts.traits import OPERANDS
from lightning_lowbit.nn.conversion.convert import CastsLike
from lightning_lowbit.precision.base import LowBitPrecision

_ELEMENTS = {"e2m1", "e1m2"}


class FP4Precision(LowBitPrecision):
    """Fully quantized training in FP4: all six operands of the three GEMMs (FP4 All the Way, arXiv 2505.19115).

    The output layer stays in high precision unless ``quantize_output`` is true, see :class:`LowBitPrecision`.

    Args:
        casts: as in :class:`LowBitPrecision`, a preset with an operand in FP4 at least; NVFP4 by default.
        rounding: other roundings for some operands, e.g. ``{"wgrad_x": "nearest"}``; ``overrides`` are not changed.
        **kwargs: arguments of :class:`LowBitPrecision`.

    Raises:
        ValueError: a preset quantizes to other formats alone.
        ValueError: ``rounding`` names an unknown operand or rounding, or an operand in high precision.

    Examples:
        >>> Trainer(plugins=[FP4Precision("nvfp4", rounding={"wgrad_x": "nearest"})])
    """

    leaves_output = True

    def __init__(self, casts: CastsLike = "nvfp4", *, rounding: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        operands = LinearCasts.of(casts)
        if isinstance(casts, str):
            _check_family(casts, operands)
        super().__init__(operands.with_rounding(rounding or {}), **kwargs)


def _check_family(preset: str, casts: LinearCasts) -> None:
    elements = {cast.element for operand in OPERANDS if (cast := casts.cast_of(operand)) is not None}
    if elements and not elements & _ELEMENTS:
        raise ValueError(
            f"FP4Precision takes presets in FP4, and {preset!r} quantizes to {' and '.join(sorted(elements))}: give "
            f"LowBitPrecision({preset!r}), which takes any preset; on the command line --trainer.plugins "
            f"lightning_lowbit.LowBitPrecision --trainer.plugins.casts {preset}."
        )
