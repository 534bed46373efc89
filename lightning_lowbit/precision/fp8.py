"""FP8 training."""

from typing import Any

from lightning_lowbit.checks import choose
from lightning_lowbit.precision.base import LowBitPrecision

# What each scaling starts from.
_PRESETS = {"delayed": "fp8-delayed", "current": "fp8-current", "row": "fp8-row", "mx": "mxfp8"}


class FP8Precision(LowBitPrecision):
    """Training with all six operands of each linear layer in FP8 (FP8 Formats for Deep Learning, arXiv 2209.05433).

    On NVIDIA GPUs with FP8 tensor cores the GEMMs run on these, for scales per tensor and per row; elsewhere, and for
    ``"mx"``, they are emulated, with the same numbers up to the order of summation.

    Args:
        scaling: what a scale is made from, and for how many elements. ``"delayed"``: one per tensor, from the largest
            magnitudes of former steps; ``"current"``: one per tensor, from the tensor itself; ``"row"``: one per token
            or channel; ``"mx"``: one per 32 elements, a power of two (MXFP8).
        history: steps that delayed scaling remembers.
        algorithm: ``"max"`` or ``"most_recent"`` of what it remembers.
        margin: powers of two of room above the largest magnitude.
        power_of_two: scales are powers of two; those of ``"mx"`` always are.
        gradient_format: ``"e5m2"`` or ``"e4m3"``; x and w are in E4M3. None for E5M2, and with ``"mx"`` for E4M3
            (arXiv 2506.08027).
        **kwargs: those of :class:`LowBitPrecision`.

    Raises:
        ValueError: an argument is none of these; or it belongs to another scaling.

    Example:
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
        if not isinstance(power_of_two, bool):
            raise ValueError(f"power_of_two is true or false; got {power_of_two!r}.")
        if power_of_two and scaling != "mx":
            scale["rounding"] = "power_of_two"
        casts: dict[str, Any] = {"preset": _PRESETS[choose("scaling", scaling, _PRESETS)], "every": {"scale": scale}}
        if gradient_format is not None:
            choose("gradient_format", gradient_format, ("e4m3", "e5m2"))
            casts |= dict.fromkeys(("dgrad_g", "wgrad_g"), {"element": gradient_format})
        super().__init__(casts, **kwargs)
