"""The operand x of a convolution: patches of images, gathered in each pass and not kept."""

from torch import Tensor

from lightning_lowbit.nn.core import operands
from lightning_lowbit.nn.core.operands import Settings, amax_for
from lightning_lowbit.nn.core.source import Source
from lightning_lowbit.nn.core.window import is_pixelwise
from lightning_lowbit.nn.native.operand import BlockOperand
from lightning_lowbit.quant import Operand


def patches(x: Tensor, settings: Settings, *names: str, amax: Tensor | None = None) -> Source:
    """The patches of images ``[N, C, *sizes]`` as fprop takes them, from quantized pixels where those are the same,
    with the amax that the operands of these names need, or a given one."""
    window = settings.window
    assert window is not None
    sizes, pixels = x.shape[2:], x.movedim(1, -1)
    if amax is None and window.covers(sizes):
        amax = amax_for(pixels, settings, *names)
    if window.covers(sizes) and _quantizes_pixels(x.shape[1], settings):
        quantized = operands.operand_of("fprop_x", Source(pixels.flatten(0, -2), amax), settings)
        images = quantized.values.view(pixels.shape).movedim(-1, 1)
        return Source(window.gather(images), amax, quantized.factor, is_operand=True)
    gathered = window.gather(x)
    return Source(gathered, amax_for(gathered, settings, *names) if amax is None else amax)


def _quantizes_pixels(channels: int, settings: Settings) -> bool:
    reads_patches = settings.operand_sums is not None or settings.blend is not None
    if reads_patches or "fprop_x" in settings.casts.plan.altered or settings.takes_codes("fprop_x"):
        return False
    return is_pixelwise(settings.casts.fprop_x, channels)


def patches_for_wgrad(x: Tensor, amax: Tensor | None, settings: Settings) -> Operand:
    """What wgrad quantizes or takes as it is, gathered again from the images that the forward pass has kept."""
    assert settings.window is not None
    takes_tensor = settings.takes_codes("wgrad_x") and "wgrad_x" not in settings.casts.requantize
    if takes_tensor or "wgrad_x" not in settings.casts.plan.kept:
        return Operand(settings.window.gather(x))
    settings = settings.unrecorded()
    quantized = operands.operand_of("fprop_x", patches(x, settings, amax=amax), settings)
    return quantized.decoded(x.dtype) if isinstance(quantized, BlockOperand) else quantized
