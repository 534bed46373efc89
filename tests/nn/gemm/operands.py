"""Operands of GEMMs and their calls, compared with float64."""

import torch

from lightning_lowbit import Cast, Scale
from lightning_lowbit.quant import quantize_operand
from tests.nn.layers import value

NVFP4 = Cast("e2m1", Scale("e4m3", 16, two_level=True))
WIDE = Cast("int8", Scale("e4m3", 16, two_level=True))  # does not fit bfloat16
ROWS = Cast("int8", Scale("fp32", "row"))
TENSOR = Cast("e4m3", Scale("fp32", "tensor"))


def operands(m=24, k=80, n=40, *, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(m, k, generator=generator).to(dtype), torch.randn(k, n, generator=generator).to(dtype))


def ulp(x, dtype):
    """Distance of neighboring numbers of ``dtype`` at the size of x."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(x.double().abs().clamp(min=info.tiny)).exponent - 1
    return torch.ldexp(torch.full_like(x.double(), info.eps), exponent)


def check(found, a, b, bias, dtype, ulps, scaled_before_rounding=False):
    product = value(a) @ value(b)
    exact = product + (0.0 if bias is None else bias.double())
    # Rounding of partial sums counts against what was added up, not against what is left after cancellation.
    size = value(a).abs() @ value(b).abs() + (0.0 if bias is None else bias.double().abs())
    allowed = ulps * ulp(exact, dtype) + size * 2.0**-22
    if not scaled_before_rounding and any(o.factor is not None and o.factor.dim() for o in (a, b)):
        # Scales of rows multiply what the GEMM has rounded, and bias comes after them.
        allowed += torch.finfo(dtype).eps / 2 * product.abs()
    error = (found.double() - exact).abs()
    assert found.dtype == dtype
    assert (error <= allowed).all(), f"off by {(error / ulp(exact, dtype)).max():.2f} ulp of {dtype}"


SIZES = [(1e18, 1e18), (1e-15, 1e-15), (1e30, 1e-30), (1e-25, 1e8), (1e-30, 1.0), (1e-18, 1e-17)]


def native(x, element, block, dim, **scale):
    """An operand whose values are in FP8 themselves: the same numbers as those of the emulated one."""
    cast = Cast(element, Scale("fp32", block, **scale))
    operand, emulated = quantize_operand(x, cast, dim, dtype=cast.format.dtype), quantize_operand(x, cast, dim)
    assert operand.values.dtype == cast.format.dtype
    assert torch.equal(value(operand).nan_to_num(7e7), value(emulated).nan_to_num(7e7)), f"{cast}: other values in FP8"
    return operand
