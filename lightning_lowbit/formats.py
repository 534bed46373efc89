"""Number formats as data.

The grid of a format doubles its spacing from binade to binade, and three numbers describe it:

    step(v) = 2^(max(floor(log2 |v|), min_exponent) - mantissa_bits),      |v| <= max

Uniform formats (integers, ternary, E1M2) lie below ``2^min_exponent``, where the spacing is constant. ExMy names count
exponent and mantissa bits, as in OCP Microscaling and ml_dtypes. Codes are unsigned bytes: sign and magnitude for
floats (sign in the top bit), two's complement for integers, 0 1 2 for ternary -1 0 1.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from lightning_lowbit._torch.devices import frexp, lacks, power_of_two


@dataclass(frozen=True)
class Format:
    """A number format.

    Attributes:
        name: standard name, as users write it.
        bits: width of a code.
        mantissa_bits: stored mantissa bits.
        min_exponent: exponent of the smallest binade with a full mantissa.
        max: largest finite magnitude.
        encoding: meaning of a code; ``"unsigned"`` formats serve only as scales.
        dtype: the torch dtype with the same bytes, if there is one.
    """

    name: str
    bits: int
    mantissa_bits: int
    min_exponent: int
    max: float
    encoding: Literal["sign-magnitude", "twos-complement", "offset", "unsigned"] = "sign-magnitude"
    dtype: torch.dtype | None = None

    @property
    def max_exponent(self) -> int:
        """Exponent of the binade that holds ``max``, at least ``min_exponent``."""
        return max(math.frexp(self.max)[1] - 1, self.min_exponent)

    @property
    def gemm_dtype(self) -> torch.dtype | None:
        """The dtype in which native GEMMs take elements of this format; None if there is none."""
        if self.encoding in ("twos-complement", "offset"):
            return torch.int8 if self.bits <= 8 else None
        return self.dtype

    @property
    def significant_bits(self) -> int:
        if self.encoding in ("twos-complement", "offset"):
            return int(self.max).bit_length()
        return self.mantissa_bits + 1

    def encode(self, values: Tensor) -> Tensor:
        """uint8 codes of float32 values on the grid. -0 becomes 0; NaN becomes the format's NaN, or any code."""
        if self.encoding == "offset":
            return (values + self.max).to(torch.uint8)
        if self.encoding == "twos-complement":
            return (values.to(torch.int32) & (2**self.bits - 1)).to(torch.uint8)
        if self.dtype is not None and not lacks(values.device, self.dtype):
            return (values + 0.0).to(self.dtype).view(torch.uint8)  # -0 + 0 = +0
        magnitude = values.abs()
        exponent = (frexp(magnitude)[1] - 1).clamp(min=self.min_exponent)
        exponent = torch.where(magnitude > 0, exponent, self.min_exponent)
        steps = magnitude * power_of_two(self.mantissa_bits - exponent)
        code = steps.to(torch.int32) + ((exponent - self.min_exponent) << self.mantissa_bits)
        if self.name == "e8m0":  # whose codes count powers of two alone, without a zero
            code = exponent - self.min_exponent
        if self.encoding == "unsigned":  # the top code is NaN
            return torch.where(values.isnan(), 2**self.bits - 1, code).to(torch.uint8)
        if self.dtype is not None:
            code = torch.where(values.isnan(), 2 ** (self.bits - 1) - 1, code)
        return (code + (values < 0) * 2 ** (self.bits - 1)).to(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        """Returns float32 values of codes, in the same shape."""
        return table(self, codes.device)[codes.to(torch.int64)]


@cache
def table(format: Format, device: torch.device | None = None) -> Tensor:
    """Returns float32 ``[2^bits]``: the value of each code, NaN where a code means no number."""
    if format.dtype is not None:
        if device is not None and device.type != "cpu" and lacks(device, format.dtype):
            return table(format, torch.device("cpu")).to(device)
        return torch.arange(2**format.bits, dtype=torch.uint8, device=device).view(format.dtype).float()
    return torch.tensor([_value(format, code) for code in range(2**format.bits)], device=device)


def _value(format: Format, code: int) -> float:
    sign = 1.0
    if format.encoding == "offset":
        return code - format.max if code <= 2 * format.max else math.nan
    if format.encoding == "twos-complement":
        return float(code - 2**format.bits if code >= 2 ** (format.bits - 1) else code)
    if format.encoding == "sign-magnitude" and code >= 2 ** (format.bits - 1):
        sign, code = -1.0, code - 2 ** (format.bits - 1)
    binade, digits = divmod(code, 2**format.mantissa_bits)
    if binade > 0:
        binade, digits = binade - 1, digits + 2**format.mantissa_bits
    value = digits * 2.0 ** (binade + format.min_exponent - format.mantissa_bits)
    return sign * value if value <= format.max else math.nan


def _float(name: str, largest: float, dtype: torch.dtype | None = None) -> Format:
    exponent_bits, mantissa_bits = int(name[1]), int(name[3])
    bias = max(2 ** (exponent_bits - 1) - 1, 1)  # the usual bias; E1M2 takes 1, so that its largest value is 1.75
    bits = 1 + exponent_bits + mantissa_bits
    return Format(name, bits, mantissa_bits, 1 - bias, largest, dtype=dtype)


def integer(bits: int) -> Format:
    """Returns the format of whole numbers up to ±(2^(bits-1) - 1)."""
    # min_exponent = mantissa_bits: the whole range lies below the first binade and has spacing 1.
    return Format(f"int{bits}", bits, bits - 1, bits - 1, 2 ** (bits - 1) - 1, encoding="twos-complement")


def _scale(name: str) -> Format:
    # Unsigned, seven bits, only the top code is NaN; E1M6 has bias 0 (FP4 All the Way, figure 1).
    exponent_bits, mantissa_bits = int(name[1]), int(name[3])
    bias = 2 ** (exponent_bits - 1) - 1
    binade, digits = divmod(2**7 - 2, 2**mantissa_bits)
    largest = (1 + digits / 2**mantissa_bits) * 2.0 ** (binade - bias)
    return Format(name, 7, mantissa_bits, 1 - bias, largest, encoding="unsigned")


E4M3 = _float("e4m3", 448.0, torch.float8_e4m3fn)
E5M2 = _float("e5m2", 57344.0, torch.float8_e5m2)

ELEMENT_FORMATS: dict[str, Format] = {
    "e2m1": _float("e2m1", 6.0),
    "e1m2": _float("e1m2", 1.75),
    "e3m0": _float("e3m0", 16.0),
    "e2m3": _float("e2m3", 7.5),
    "e3m2": _float("e3m2", 28.0),
    "e4m3": E4M3,
    "e5m2": E5M2,
    **{f"int{bits}": integer(bits) for bits in range(2, 9)},
    "ternary": Format("ternary", 2, 1, 1, 1.0, encoding="offset"),
}

SCALE_FORMATS: dict[str, Format] = {
    "e1m6": _scale("e1m6"),
    "e2m5": _scale("e2m5"),
    "e3m4": _scale("e3m4"),
    "e4m3": E4M3,
    "e5m2": E5M2,
    "e6m1": _scale("e6m1"),
    "e8m0": Format("e8m0", 8, 0, -127, 2.0**127, encoding="unsigned", dtype=torch.float8_e8m0fnu),
    "bf16": Format("bf16", 16, 7, -126, torch.finfo(torch.bfloat16).max, encoding="unsigned", dtype=torch.bfloat16),
    "fp16": Format("fp16", 16, 10, -14, torch.finfo(torch.float16).max, encoding="unsigned", dtype=torch.float16),
    "fp32": Format("fp32", 32, 23, -126, torch.finfo(torch.float32).max, encoding="unsigned", dtype=torch.float32),
}
