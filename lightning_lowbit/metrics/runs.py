"""Measures of a run."""

from collections.abc import Sequence

from lightning_lowbit.checks import integer, positive
from lightning_lowbit.metrics.spikes import SpikeDetector, Window, median_limit


def count_spikes(losses: Sequence[float], window: int = 20, threshold: float = 6.0) -> int:
    """Counts the spikes of a loss.

    A value is a spike when it is not finite, or more than ``threshold`` robust standard deviations (1.4826 times the
    median absolute deviation) above the median of the ``window`` values before it. Consecutive ones count once. A loss
    that stays high becomes normal after half a window.

    Args:
        losses: training losses in nats, in the order of steps.
        window: values to compare with, 2 or more; before the first full window only NaN and infinity are spikes.
        threshold: in standard deviations, above 0.
    """
    integer("window", window, 2, "a number of losses")
    positive("threshold", threshold, "a number of standard deviations")
    detector = SpikeDetector(Window(window, median_limit(threshold)), window, learns_spikes=True)
    jumped = [detector.judge(loss) for loss in losses]
    return sum(now and not before for before, now in zip([False, *jumped], jumped, strict=False))
