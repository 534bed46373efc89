"""FP8 training."""

from typing import Any

from lightning_lowbit.checks import choose, flag
from lightning_lowbit.precision.base import LowBitPrecision

_PRESETS = {
    "delayed": "fp8-delayed",
    "current": "fp8-current",
    "row": "fp8-row",
    "blockwise": "fp8-blockwise",
    "mx": "mxfp8",
}


class FP8Precision(LowBitPrecision):
    """Training with all six operands of each linear layer in FP8 (FP8 Formats for Deep Learning, arXiv 2209.05433).

    GEMMs run on FP8 tensor cores where there are some for the scaling, see docs/concepts/hardware.md. Other hardware
    uses emulation, with the same results up to the order of summation.

    Args:
        scaling: ``"delayed"``: one scale per tensor, from amaxes of previous steps. ``"current"``: one per tensor, from
            the tensor itself. ``"row"``: one per token or channel. ``"blockwise"``: one per 1x128 elements of x and
            g, and 128x128 of w (DeepSeek-V3). ``"mx"``: one power of two per 32 elements (MXFP8).
        history: number of steps in the history of delayed scaling.
        algorithm: ``"max"`` or ``"most_recent"`` of the history.
        margin: headroom above the amax, in powers of two.
        power_of_two: round scales to powers of two; always so with ``"mx"``.
        gradient_format: ``"e5m2"`` or ``"e4m3"``; x and w are in E4M3. None for E5M2, or E4M3 with ``"mx"`` (arXiv
            2506.08027) and ``"blockwise"``.
        **kwargs: arguments of :class:`LowBitPrecision`.

    Raises:
        ValueError: an argument is invalid, or belongs to another scaling.

    Examples:
        >>> Trainer(plugins=[FP8Precision("delayed", overrides={"up_proj": "bf16"}, skip=["lm_head"])])
    """

    def __init__(
        self,
        scaling: str = "delayed",
        *,
        history: int = 16,
        algorithm: str = "max",
        margin: int = 0,
        power_of_two: bool = False,
        gradient_format: str | None = None,
        **kwargs: Any,
    ) -> None:
        scale: dict[str, Any] = {"history": history, "algorithm": algorithm, "margin": margin}
        if flag("power_of_two", power_of_two) and scaling != "mx":
            scale["rounding"] = "power_of_two"
        casts: dict[str, Any] = {"preset": _PRESETS[choose("scaling", scaling, _PRESETS)], "every": {"scale": scale}}
        if gradient_format is not None:
            choose("gradient_format", gradient_format, ("e4m3", "e5m2"))
            casts |= dict.fromkeys(("dgrad_g", "wgrad_g"), {"element": gradient_format})
        super().__init__(casts, **kwargs)
