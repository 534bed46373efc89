"""Devices on which torch lacks dtypes or operators, and what is computed there instead."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

# What torch 2.13 has no memory or operators for, by the type of a device.
_LACKING: dict[str, frozenset[torch.dtype]] = {
    "mps": frozenset((torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu))
}
_WITHOUT_FREXP = {"mps", "xpu"}
_MIXED_PRODUCTS = {"cuda", "xpu"}  # of 16-bit operands to float32


@contextmanager
def device_like_mps(device_type: str) -> Iterator[None]:
    """Takes devices of a type in a context for ones that lack what Apple's GPUs do.

    Examples:
        >>> with device_like_mps("privateuseone"):
        ...     layer(x)
    """
    _LACKING[device_type] = _LACKING["mps"]
    _WITHOUT_FREXP.add(device_type)
    try:
        yield
    finally:
        del _LACKING[device_type]
        _WITHOUT_FREXP.remove(device_type)


def lacks(device: torch.device, dtype: torch.dtype | None) -> bool:
    """Returns whether torch has no tensors of a dtype on a device; False for None."""
    return dtype in _LACKING.get(device.type, ())


def with_index(device: torch.device) -> torch.device:
    """Returns a device as tensors name it, ``cuda:0`` for ``cuda``: the two do not compare equal."""
    return torch.empty(0, device=device).device


def wide_dtype(device: torch.device) -> torch.dtype:
    """Returns the dtype of sums over many elements: float64, or float32 on Apple's GPUs, which have no float64."""
    return torch.float32 if lacks(device, torch.float64) else torch.float64


def multiplies_to_float32(device: torch.device) -> bool:
    """Returns whether a device multiplies 16-bit operands to float32 results."""
    return device.type in _MIXED_PRODUCTS


def frexp(values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns what ``torch.frexp`` does of float32 ``values``, from their bits on devices that have no such operator.

    Of what is not finite the exponent is 0 there.
    """
    if values.device.type not in _WITHOUT_FREXP:
        mantissa, exponent = torch.frexp(values)
        return mantissa, exponent
    is_small = values.abs() < 2.0**-126
    bits = torch.where(is_small, values * 2.0**24, values).view(torch.int32)
    exponent = ((bits >> 23) & 0xFF) - 126 - torch.where(is_small, 24, 0)
    mantissa = ((bits & -0x7F800001) | 0x3F000000).view(torch.float32)
    is_number = values.isfinite() & (values != 0)
    return torch.where(is_number, mantissa, values), torch.where(is_number, exponent, 0).to(torch.int32)


def power_of_two(exponent: Tensor) -> Tensor:
    """Exact 2^exponent for int32 exponents from -149 to 127, made from its bits, as powers of some devices are not
    exact; below -126 it is subnormal."""
    normal, subnormal = (exponent + 127) << 23, 1 << (exponent + 149).clamp(0, 22)
    return torch.where(exponent >= -126, normal, subnormal).to(torch.int32).view(torch.float32)
