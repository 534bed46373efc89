"""What is wrong with an operand, a weight or an activation, judged by its numbers, and the remedies not yet in use."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lightning_lowbit.metrics import expected_zeros
from lightning_lowbit.nn import LinearCasts, QuantizedLayer
from lightning_lowbit.quant import Cast

_SMALL_BLOCK = 16  # elements, than which no hardware has smaller ones
_NARROW_SCALES = ("e4m3",)  # formats of scales with less range than the operands that they are made for


class Fault(NamedTuple):
    """What is wrong: its kind, how bad it is (see :class:`Alerts`), and what to do in words."""

    kind: str
    severity: float
    message: str


def of_operand(operand: str, casts: LinearCasts, found: Mapping[str, float], underflow_limit: float) -> Iterator[Fault]:
    """Of an operand.

    Args:
        operand: its name.
        casts: of its layer.
        found: its ``sqnr`` and ``underflow``.
        underflow_limit: share of elements that became 0 which is tolerated.
    """
    if math.isnan(found["sqnr"]):
        message = (
            f"{operand} holds a NaN or an infinity. Look at the data of this step and the learning rate; with a "
            "loss scaler, whether it skips such a step."
        )
        yield Fault(f"{operand} not finite", 1.0, message)
    elif found["underflow"] > underflow_limit:
        message = (
            f"{found['underflow']:.1%} of the elements of {operand} that are not 0 became 0 "
            f"(underflow_limit={underflow_limit:g}): few large elements take the range from the others. "
            f"{_remedies(operand, casts)}"
        )
        left = 1 - found["underflow"]
        yield Fault(f"{operand} underflow", 1 / left if left else math.inf, message)


def _remedies(operand: str, casts: LinearCasts) -> str:
    """What keeps more of an operand, and is not on."""
    cast = casts.cast_of(operand)
    found = []
    if isinstance(cast, Cast):
        block = cast.scale.block
        is_small = isinstance(block, int) and block <= _SMALL_BLOCK
        found += [] if is_small else ["smaller blocks"]
        found += ["scales with more range (e8m0)"] if cast.scale.format in _NARROW_SCALES else []
        found += [] if cast.rounding == "stochastic" else ["stochastic rounding"]
    found += [] if operand.partition("_")[0] in casts.hadamard else ["a Hadamard rotation"]
    found += ["a format with more range, by overrides"]
    text = f"{', '.join(found[:-1])} or {found[-1]}" if len(found) > 1 else found[0]
    return f"{text[0].upper()}{text[1:]} help{'' if len(found) > 1 else 's'}."


def of_weight(row: Mapping[str, float], cast: Cast, zeros_tolerance: float) -> Iterator[Fault]:
    """Of a weight that is rounded to nearest.

    Args:
        row: what columns gave.
        cast: of the weight.
        zeros_tolerance: how far a share of zeros may be from the expected one.
    """
    zeros, expected = row.get("zeros"), expected_zeros(cast.scale.factor)
    if math.isnan(row.get("distance", 0.0)):
        message = "no element of its weight is a number. Look for the step that broke it."
        yield Fault("not finite", 1.0, message)
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


def of_codes(quiet: int, no_flips_for: int) -> Iterator[Fault]:
    """Of the codes of a weight that is trained.

    Args:
        quiet: optimizer steps for which none has changed.
        no_flips_for: of these, how many are too many.
    """
    if quiet >= no_flips_for:
        message = (
            f"no code of its weight has changed in a logged step for {quiet} optimizer steps, where training "
            f"should change some (no_flips_for={no_flips_for}). Look at its gradient and learning rate: steps "
            "may be too small to cross a rounding threshold."
        )
        yield Fault("no flips", 1.0, message)


def of_input(layer: Any) -> Fault:
    """What enters a layer is not finite."""
    message = (
        "what enters it is not finite. Look at the data of this step, and at the weights of the layers before it for "
        "the step that broke them."
    )
    return Fault("not finite", 1.0, message)


def of_channel(layer: Any, channel: int, amax: float, mean: float, takeoff: float) -> Fault:
    """A channel of what enters a layer takes off.

    Args:
        layer: converted or not.
        channel: its number.
        amax: the largest magnitude in it.
        mean: running mean of the largest magnitude of all channels before.
        takeoff: how many times the mean is too much.
    """
    message = (
        f"channel {channel} of what enters it reaches {amax:.4g}, where the largest of all was {mean:.4g} on average "
        f"(takeoff={takeoff:g}). Look at the data of this step and at the learning rate."
    )
    return Fault("takeoff", amax / mean, f"{message}{_of_scales(layer)}")


def _of_scales(layer: Any) -> str:
    """What an outlier does to the others that share its scale."""
    cast = layer.full_casts.cast_of("fprop_x") if isinstance(layer, QuantizedLayer) else None
    if cast is None:  # it takes no levels from the rest
        return ""
    few, remedies = "", []
    if isinstance(cast.scale.block, str):
        few, remedies = (
            f" With one scale for each {cast.scale.block}, few levels are left for the rest.",
            ["small blocks"],
        )
    if not layer.full_casts.smooth:
        remedies += ["smooth_swiglu='channel' before a down projection"]
    keep = f" To keep the outlier to itself, take {' or '.join(remedies)}." if remedies else ""
    return f"{few}{keep} With skip the layer stays in high precision."


def of_mlp(mlp: Any, pairs: Sequence[tuple[float, float]], beyond: int, limit: float) -> Fault:
    """Channels of a SwiGLU whose rows of gate and up projection are aligned.

    Args:
        mlp: with a ``down_proj``.
        pairs: number and ``|cos|`` of some of them, the largest first.
        beyond: how many there are.
        limit: of ``|cos|``.
    """
    told = ", ".join(f"{channel:.0f} ({cosine:.3f})" for channel, cosine in pairs)
    more = f" and {beyond - len(pairs)} more channels have" if beyond > len(pairs) else ""
    more = more or (" has" if beyond == 1 else " have")
    message = (
        f"{'channel' if beyond == 1 else 'channels'} {told}{more} |cos| between rows of its gate and up projection "
        f"above {limit:g} (alignment_limit). Such a channel squares one projection of its input, and makes outliers "
        "where that is large."
    )
    down = getattr(mlp, "down_proj", None)
    if not isinstance(down, QuantizedLayer) or not down.full_casts.smooth:
        message += " smooth_swiglu='channel' keeps them from the scale of the down projection's input."
    return Fault("alignment", float(beyond), message)
