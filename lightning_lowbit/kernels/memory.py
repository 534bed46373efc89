"""Tensors as memory: the one place that hands it to kernels, after a check of its size, dtype and device.

C++ and Triton get addresses and sizes: with a smaller tensor they would touch the memory behind it. They also see
numbers as they are stored, where torch may read their negatives (`Tensor.is_neg`).
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from operator import is_
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_lowbit.quant.transforms import SIZES

CPU = torch.device("cpu")

_T = TypeVar("_T", Tensor, Tensor | None)


class Misfit(ValueError):
    """A tensor differs in size, dtype, layout or device from the memory that a kernel would touch."""


def is_dense(tensor: Tensor) -> bool:
    """Returns whether a tensor has memory of its own: FakeTensor and other subclasses have none."""
    return type(tensor) is Tensor or type(tensor) is Parameter


def overlaps(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """Returns the names of tensors that share memory, a list for each piece of it: of the same tensor under two names,
    or of views of one. Of columns side by side the memory between them counts, too."""
    spans = []
    for name, tensor in tensors.items():
        if is_dense(tensor) and tensor.numel() and (place := tensor.data_ptr()):  # on meta there is none
            extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
            spans.append((str(tensor.device), place, place + extent * tensor.itemsize, name))
    pieces, at, furthest = list[list[str]](), "", 0
    for device, begin, end, name in sorted(spans):
        if (device, begin) < (at, furthest):
            pieces[-1].append(name)
        else:
            pieces.append([name])
            furthest = 0
        at, furthest = device, max(furthest, end)
    return [names for names in pieces if len(names) > 1]


def resolved(tensor: _T) -> _T:
    """Returns the tensor, or a copy with the signs that torch reads, for kernels. (No kernel takes complex numbers.)"""
    return tensor.resolve_neg() if tensor is not None and tensor.is_neg() else tensor


def address(name: str, tensor: Tensor, dtype: torch.dtype, elements: int, device: torch.device = CPU) -> int:
    """Returns the address at which a kernel may touch so many elements of a dtype, or raises :class:`Misfit`.

    The tensor must outlive the kernel.

    Examples:
        >>> address("scales", torch.ones(4), torch.float32, 8)
        Traceback (most recent call last):
        ValueError: Kernels need scales as 8 contiguous elements of torch.float32 on cpu, and got a tensor of shape
            (4,), torch.float32, on cpu. Give what fits the other arguments.
    """
    return start(checked(name, tensor, dtype, elements, device))


def start(tensor: Tensor) -> int:
    """Returns the address of a tensor whose size, dtype and device are known to fit."""
    place = tensor.data_ptr()
    if not place and tensor.numel():
        raise Misfit(f"Kernels need memory, and that of {described(tensor)} was freed.")
    return place


def addresses(name: str, scalars: Sequence[Tensor], dtype: torch.dtype) -> list[int]:
    """Returns the :func:`address` of each of many tensors of one element on a CPU; optimizers have hundreds."""
    starts = [
        one.data_ptr() for one in scalars if one.dtype is dtype and one.numel() == 1 and one.is_cpu and not one.is_neg()
    ]
    return starts if len(starts) == len(scalars) and all(starts) else [address(name, one, dtype, 1) for one in scalars]


def are_where_they_were(tensors: Sequence[Tensor], before: Sequence[Tensor], starts: "array[int]") -> bool:
    """Returns whether tensors are those that were checked before, at the addresses that they had then."""
    if len(tensors) != len(before) or not all(map(is_, tensors, before)):
        return False
    return array("q", [tensor.data_ptr() for tensor in tensors]) == starts


def are_signs(rotation: Tensor, x: Tensor, dim: int) -> bool:
    """Returns whether kernels may rotate groups of a matrix along a dimension by these signs."""
    is_known = type(rotation) is Tensor and rotation.dtype == torch.float32 and rotation.device == x.device
    is_vector = is_known and rotation.dim() == 1 and rotation.is_contiguous() and not rotation.is_neg()
    return is_vector and len(rotation) in SIZES and dim in (0, 1)


def layout(tensors: Iterable[Tensor]) -> list[object]:
    """Returns the addresses, shapes and dtypes of tensors, on which the checks of contiguous ones depend."""
    return [part for tensor in tensors for part in (tensor.data_ptr(), tensor.shape, tensor.dtype)]


def checked(name: str, tensor: _T, dtype: torch.dtype, elements: int, device: torch.device) -> _T:
    """Returns a tensor of which a kernel may touch so many elements, or None for None; else raises :class:`Misfit`."""
    if tensor is None or (
        tensor.dtype is dtype
        and tensor.numel() == elements
        and tensor.is_contiguous()
        and tensor.device == device
        and not tensor.is_neg()
    ):
        return tensor
    is_view = not tensor.is_contiguous() or tensor.is_neg()
    raise Misfit(
        f"Kernels need {name} as {elements} contiguous elements of {dtype} on {device}, and got "
        f"{described(tensor)}{', a view with another layout or sign' if is_view else ''}. Give what fits the other "
        "arguments."
    )


@lru_cache(maxsize=16)  # both passes of the layers of a module have the same ones
def ends_on(device: torch.device, ends: tuple[int, ...]) -> Tensor:
    """Returns where the rows of each product of a stack end, int32, filled up to a power of two by the last one. The
    host does not wait for a GPU."""
    length = 1 << max(len(ends) - 1, 0).bit_length()
    numbers = torch.tensor([*ends, *ends[-1:] * (length - len(ends))], dtype=torch.int32, device="cpu")
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers.to(device)


def traits(arguments: Iterable[Tensor | int | None], device: torch.device) -> tuple[object, ...]:
    """Returns what compilers of kernels read off arguments: the dtype of a tensor, and whether its address is a
    multiple of 16; of an integer whether it is 1, a multiple of 16, or longer than 32 bits. None stays.

    Raises :class:`Misfit` if some of the tensors are not on the device, or not resolved.
    """
    marks: list[object] = []
    for value in arguments:
        if value is None:
            marks.append(None)
        elif isinstance(value, int):
            marks.append("one" if value == 1 else (value & 15 == 0) + 2 * (value >> 31))
        else:
            if value.device != device or value.is_neg():
                raise Misfit(f"Kernels need resolved tensors on {device}, and got {described(value)}.")
            marks.append((value.dtype, value.data_ptr() & 15 == 0))
    return tuple(marks)


def described(value: object) -> str:
    """Describes a tensor by shape, dtype and device, and any other value by its type."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"a tensor of shape {tuple(value.shape)}, {value.dtype}, on {value.device}"
