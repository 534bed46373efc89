"""What outliers mean for a layer or an MLP, in words, and what would help that is not on already."""

from collections.abc import Sequence
from typing import Any

from lightning_lowbit.callbacks.monitors.quantization_alerts import Fault
from lightning_lowbit.nn import QuantizedLayer


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
