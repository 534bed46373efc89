"""Which casts of weights the folders of compressed-tensors and Model Optimizer hold."""

from collections.abc import Callable

from lightning_lowbit.export.weights import has_second_level
from lightning_lowbit.nn.layers.layer import QuantizedLayer
from lightning_lowbit.quant import Cast

INTEGERS = "in rows, groups or one tensor, with scales of one level in bf16, fp16 or fp32"


def needs(text: str, test: Callable[[Cast], bool]) -> Callable[[Cast], str | None]:
    """Why a format does not hold a cast that fails a test, in words; None for one that passes."""
    return lambda cast: None if test(cast) else f"it takes {text}, and the weight has {cast}"


def is_nvfp4(cast: Cast) -> bool:
    scale = cast.scale
    return (cast.element, scale.format, scale.two_level) == ("e2m1", "e4m3", True) and scale.block in (16, (16, 16))


def is_mx(element: str) -> Callable[[Cast], bool]:
    def fits(cast: Cast) -> bool:
        is_standard = (cast.element, cast.scale.format, cast.scale.block) == (element, "e8m0", 32)
        return is_standard and not has_second_level(cast)

    return fits


def is_fp8(cast: Cast) -> bool:
    return (cast.element, cast.scale.format) == ("e4m3", "fp32") and cast.scale.block in ("row", "tensor", (128, 128))


def is_int(bits: int) -> Callable[[Cast], bool]:
    elements = ("int2", "ternary") if bits == 2 else (f"int{bits}",)

    def fits(cast: Cast) -> bool:
        return cast.element in elements and not isinstance(cast.scale.block, tuple) and not has_second_level(cast)

    return fits


INTEGERS = "in rows, groups or one tensor, with scales of one level in bf16, fp16 or fp32"


def takes_nvfp4(layer: QuantizedLayer) -> bool:
    """Whether the training quantized a layer's input to NVFP4."""
    cast = layer.casts.fprop_x
    return cast is not None and is_nvfp4(cast)
