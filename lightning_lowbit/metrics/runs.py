"""How a run went."""

from collections.abc import Sequence

from lightning_lowbit.checks import integer, positive
from lightning_lowbit.metrics.spikes import SpikeDetector, Window, median_limit


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
    integer("window", window, 2, "a number of losses")
    positive("threshold", threshold, "a number of standard deviations")
    detector = SpikeDetector(Window(window, median_limit(threshold)), window, learns_spikes=True)
    jumped = [detector.judge(loss) for loss in losses]
    return sum(now and not before for before, now in zip([False, *jumped], jumped, strict=False))
