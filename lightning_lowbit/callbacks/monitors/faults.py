"""Judges the numbers of operands, weights and activations, and suggests remedies that are not yet in use."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lightning_lowbit.metrics import expected_zeros
from lightning_lowbit.nn import LinearCasts, QuantizedLayer
from lightning_lowbit.quant import Cast

_SMALL_BLOCK = 16  # elements in the smallest blocks of any hardware


class Fault(NamedTuple):
    """A problem: its kind, its severity (see ``monitors/base.py``), and what to do."""

    kind: str
    severity: float
    message: str


def judge_operand(
    operand: str, casts: LinearCasts, numbers: Mapping[str, float], underflow_limit: float
) -> Iterator[Fault]:
    if math.isnan(numbers["sqnr"]):
        message = (
            f"{operand} holds a NaN or an infinity. Look at the data of this step and the learning rate; with a "
            "loss scaler, whether it skips such a step."
        )
        yield Fault(f"{operand} not finite", 1.0, message)
    elif numbers["underflow"] > underflow_limit:
        message = (
            f"{numbers['underflow']:.1%} of the elements of {operand} that are not 0 became 0 "
            f"(underflow_limit={underflow_limit:g}): few large elements take the range from the others. "
            f"{_remedies(operand, casts)}"
        )
        left = 1 - numbers["underflow"]
        yield Fault(f"{operand} underflow", 1 / left if left else math.inf, message)


def _remedies(operand: str, casts: LinearCasts) -> str:
    cast = casts.cast_of(operand)
    remedies = []
    if isinstance(cast, Cast):
        block = cast.scale.block
        is_small = isinstance(block, int) and block <= _SMALL_BLOCK
        remedies += [] if is_small else ["smaller blocks"]
        remedies += ["scales with more range (e8m0)"] if cast.scale.format == "e4m3" else []
        remedies += [] if cast.rounding == "stochastic" else ["stochastic rounding"]
    remedies += [] if operand.partition("_")[0] in casts.hadamard else ["a Hadamard rotation"]
    remedies += ["a format with more range, by overrides"]
    text = f"{', '.join(remedies[:-1])} or {remedies[-1]}" if len(remedies) > 1 else remedies[0]
    return f"{text[0].upper()}{text[1:]} help{'' if len(remedies) > 1 else 's'}."


def judge_weight(row: Mapping[str, float], cast: Cast, zeros_tolerance: float) -> Iterator[Fault]:
    """Judges a weight that is rounded to nearest; ``zeros_tolerance`` bounds the deviation of its share of zeros."""
    zeros, expected = row.get("zeros"), expected_zeros(cast.scale.factor)
    if math.isnan(row.get("distance", 0.0)):
        yield Fault("not finite", 1.0, "no element of its weight is a number. Look for the step that broke it.")
    elif zeros == 1:
        message = (
            "all codes of its weight are 0, where some should be -1 or 1: its output does not depend on its input. "
            "Look for what keeps the weight at 0, or below the epsilon of its scale: initialization, weight decay."
        )
        yield Fault("all zeros", 1.0, message)
    elif zeros is not None and cast.scale.statistic == "absmean" and abs(zeros - expected) > zeros_tolerance:
        message = (
            f"{zeros:.1%} of its weight are 0, where {expected:.1%} are expected of normally distributed weights "
            f"and a factor of {cast.scale.factor:g} (zeros_tolerance={zeros_tolerance:g}). Look at how the "
            "weight is distributed: few large elements among many small ones make zeros of those."
        )
        yield Fault("zeros", abs(zeros - expected), message)


def judge_codes(quiet: int, no_flips_for: int) -> Iterator[Fault]:
    if quiet >= no_flips_for:
        message = (
            f"no code of its weight has changed in a logged step for {quiet} optimizer steps (no_flips_for="
            f"{no_flips_for}). Look at its gradient and learning rate: are steps too small to cross a threshold?"
        )
        yield Fault("no flips", 1.0, message)


def input_fault() -> Fault:
    advice = "Look at the data of this step, and at the weights of the layers before it for the step that broke them."
    return Fault("not finite", 1.0, f"what enters it is not finite. {advice}")


def channel_fault(layer: Any, channel: int, amax: float, mean: float, takeoff: float) -> Fault:
    """Reports a channel above ``takeoff`` times ``mean``, the running mean of its layer's largest magnitude."""
    message = (
        f"channel {channel} of what enters it reaches {amax:.4g}, where the largest of all was {mean:.4g} on average "
        f"(takeoff={takeoff:g}). Look at the data of this step and at the learning rate."
    )
    return Fault("takeoff", amax / mean, f"{message}{_scale_advice(layer)}")


def _scale_advice(layer: Any) -> str:
    cast = layer.full_casts.cast_of("fprop_x") if isinstance(layer, QuantizedLayer) else None
    if cast is None:
        return ""
    few, remedies = "", []
    if isinstance(cast.scale.block, str):
        few = f" With one scale for each {cast.scale.block}, few levels are left for the rest."
        remedies += ["small blocks"]
    if not layer.full_casts.smooth:
        remedies += ["smooth_swiglu='channel' before a down projection"]
    keep = f" To keep the outlier to itself, take {' or '.join(remedies)}." if remedies else ""
    return f"{few}{keep} With skip the layer stays in high precision."


def alignment_fault(mlp: Any, pairs: Sequence[tuple[float, float]], beyond: int, limit: float) -> Fault:
    """Reports aligned channels of a SwiGLU, the worst as (channel, ``|cos|``); ``beyond`` channels exceed ``limit``."""
    channels = ", ".join(f"{channel:.0f} ({cosine:.3f})" for channel, cosine in pairs)
    more = f" and {beyond - len(pairs)} more channels have" if beyond > len(pairs) else ""
    more = more or (" has" if beyond == 1 else " have")
    message = (
        f"{'channel' if beyond == 1 else 'channels'} {channels}{more} |cos| between rows of its gate and up projection "
        f"above {limit:g} (alignment_limit). Such a channel squares one projection of its input, and makes outliers "
        "where that is large."
    )
    down = getattr(mlp, "down_proj", None)
    if not isinstance(down, QuantizedLayer) or not down.full_casts.smooth:
        message += " smooth_swiglu='channel' keeps them from the scale of the down projection's input."
    return Fault("alignment", float(beyond), message)
