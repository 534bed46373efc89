"""The casts of weights that the folders of compressed-tensors and Model Optimizer hold."""

from collections.abc import Callable

from lightning_lowbit.export.weights import has_second_level
from lightning_lowbit.quant import Cast


def needs(text: str, test: Callable[[Cast], bool]) -> Callable[[Cast], str | None]:
    """Returns why a format does not hold a cast that fails a test, in words; None for one that passes."""
    return lambda cast: None if test(cast) else f"it takes {text}, and the weight has {cast}"


def is_nvfp4(cast: Cast | None) -> bool:
    if cast is None or cast.scale.block not in (16, (16, 16)):
        return False
    return (cast.element, cast.scale.format, cast.scale.two_level) == ("e2m1", "e4m3", True)


def is_mx(element: str) -> Callable[[Cast], bool]:
    return lambda cast: (
        (cast.element, cast.scale.format, cast.scale.block) == (element, "e8m0", 32) and not has_second_level(cast)
    )


def is_fp8(cast: Cast) -> bool:
    return (cast.element, cast.scale.format) == ("e4m3", "fp32") and cast.scale.block in ("row", "tensor", (128, 128))


def is_int(bits: int) -> Callable[[Cast], bool]:
    elements = ("int2", "ternary") if bits == 2 else (f"int{bits}",)
    return lambda cast: (
        cast.element in elements and not isinstance(cast.scale.block, tuple) and not has_second_level(cast)
    )
