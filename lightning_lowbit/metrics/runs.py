"""How a run went."""

from collections.abc import Sequence
from math import isfinite
from statistics import median


def count_spikes(losses: Sequence[float], window: int = 20, threshold: float = 6.0) -> int:
    """How often a loss jumped.

    A value is a spike when it is not finite, or lies more than ``threshold`` robust standard deviations above the
    median of the ``window`` values before it; a run of such values is one spike. The robust standard deviation is
    1.4826 times the median absolute deviation, which spikes among those values hardly move; a loss that stays high is
    the new normal after half a window.

    Args:
        losses: training losses in nats, in the order of steps.
        window: values to compare with; those before the first full window are no spikes unless not finite.
        threshold: in standard deviations.

    Raises:
        ValueError: window is less than 2, or threshold is not positive.
    """
    if window < 2 or not threshold > 0:
        raise ValueError(f"window must be at least 2 and threshold positive; got {window} and {threshold}.")
    spikes, before, in_spike = 0, list[float](), False
    for loss in losses:
        jumped = not isfinite(loss)
        if not jumped and len(before) >= window:
            center = median(before[-window:])
            deviation = 1.4826 * median(abs(value - center) for value in before[-window:])
            deviation = max(deviation, abs(center) / 512)  # losses rounded to bfloat16 often are one number
            jumped = loss > center + threshold * deviation
        spikes += jumped and not in_spike
        in_spike = jumped
        if isfinite(loss):
            before.append(loss)
    return spikes
