"""The emulated GEMM against float64."""

import itertools

import pytest
import torch

from lightning_lowbit import Cast, Scale
from lightning_lowbit.nn.core.gemm import matmul
from lightning_lowbit.quant import Operand, quantize_operand
from lightning_lowbit.units import cpu_without
from tests.nn.gemm.operands import NVFP4, ROWS, SIZES, TENSOR, WIDE, check, operands
from tests.nn.layers import value
from tests.operations import Operations
from tests.tables import each

ONE_LEVEL = Cast("e2m1", Scale("e4m3", 16))


@pytest.mark.pairwise
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    ("left", "right"),
    list(itertools.product([None, ONE_LEVEL, NVFP4, WIDE, ROWS, TENSOR], repeat=2)),
    ids=lambda cast: "hp" if cast is None else str(cast),
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(24, 80, 40), (0, 32, 8), (4, 32, 0), (4, 0, 8), (1, 1, 1)], ids=str)
def test_against_float64(left, right, dtype, with_bias, shape):
    x, w = operands(*shape, dtype=dtype)
    bias = torch.randn(shape[2]).to(dtype) if with_bias else None
    a = Operand(x) if left is None else quantize_operand(x, left, 1)
    b = Operand(w) if right is None else quantize_operand(w, right, 0)
    check(matmul(a, b, bias, dtype), a, b, bias, dtype, ulps=1)


@pytest.mark.parametrize("with_bias", [False, True])
def test_exact_mode_rounds_once(with_bias):
    x, w = operands(dtype=torch.bfloat16)
    bias = torch.randn(40).bfloat16() if with_bias else None
    a, b = quantize_operand(x, NVFP4, 1, dtype=torch.float32), quantize_operand(w, NVFP4, 0, dtype=torch.float32)
    found = matmul(a, b, bias, torch.bfloat16)
    check(found, a, b, bias, torch.bfloat16, ulps=0.5)
    fast = matmul(quantize_operand(x, NVFP4, 1), quantize_operand(w, NVFP4, 0), bias, torch.bfloat16)
    check(fast, a, b, bias, torch.bfloat16, ulps=1)


@each("dtype", [torch.bfloat16, torch.float16])
def test_cpus_without_units_for_a_dtype_compute_in_float32(dtype):
    """And round once, as GEMMs of the dtype do."""
    x, w = operands(dtype=dtype)
    bias = torch.randn(40).to(dtype)
    pairs = {None: (Operand(x), Operand(w))}
    for cast in (ONE_LEVEL, NVFP4, ROWS):
        pairs[cast] = (quantize_operand(x, cast, 1), quantize_operand(w, cast, 0))
    for a, b in pairs.values():
        for own in (None, bias):
            with cpu_without(dtype), Operations() as seen:
                found = matmul(a, b, own, dtype)
            assert seen.dtypes == {torch.float32}
            check(found, a, b, own, dtype, ulps=0.5)


PAIRS = {"nvfp4": (NVFP4, NVFP4), "rows": (ROWS, ROWS), "tensor": (TENSOR, TENSOR), "mixed": (ROWS, NVFP4)}


@pytest.mark.pairwise
@pytest.mark.parametrize(
    ("pair", "size_a", "size_b"),
    [
        *((pair, *sizes) for pair in PAIRS for sizes in SIZES),
        # Scales of rows multiply one after the other, in float32: codes times the first of them may not exceed it.
        ("nvfp4", 1e36, 1.0),
        ("tensor", 1e36, 1.0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tensors_of_extreme_size(size_a, size_b, pair, dtype):
    x, w = operands(dtype=torch.float32)
    x, w = (x * size_a).to(dtype), (w * size_b).to(dtype)
    bias = (torch.randn(40) * size_a * size_b).to(dtype)
    a, b = quantize_operand(x, PAIRS[pair][0], 1), quantize_operand(w, PAIRS[pair][1], 0)
    for offset in (None, bias):
        check(matmul(a, b, offset, dtype), a, b, offset, dtype, ulps=1)


@each("dtype", [torch.bfloat16, torch.float32])
@each("pair", PAIRS)
def test_huge_maxima_that_never_meet(pair, dtype):
    """The product of the two tensor scales is infinite, no element of the result is."""
    x, w = (torch.zeros(2, 32, dtype=dtype), torch.zeros(32, 2, dtype=dtype))
    x[0, 0], x[1, 20] = 1e28, 1e26
    w[1, 0], w[21, 1] = 1e26, 1e28
    a, b = quantize_operand(x, PAIRS[pair][0], 1), quantize_operand(w, PAIRS[pair][1], 0)
    assert matmul(a, b, dtype=dtype).tolist() == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("cast", [None, ONE_LEVEL, NVFP4, ROWS], ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["a", "b", "bias"])
def test_non_finite_propagates(where, bad, cast, dtype):
    x, w = operands(dtype=dtype)
    bias = torch.zeros(40, dtype=dtype)
    {"a": x, "b": w, "bias": bias[None]}[where][0, 0] = bad
    a = Operand(x) if cast is None else quantize_operand(x, cast, 1)
    b = Operand(w) if cast is None else quantize_operand(w, cast, 0)
    found = matmul(a, b, bias, dtype).isfinite()
    hit = torch.zeros_like(found)
    hit[{"a": (0, slice(None)), "b": (slice(None), 0), "bias": (slice(None), 0)}[where]] = True
    assert not found[hit].any(), f"{bad} in {where} vanished"
    assert found[~hit].all(), f"{bad} in {where} spread to other rows or columns"


@pytest.mark.parametrize("cast", [NVFP4, ROWS], ids=str)
def test_transposed_operands(cast):
    x, w = operands(dtype=torch.bfloat16)
    a, b = quantize_operand(x, cast, 1), quantize_operand(w, cast, 0)
    assert torch.equal(value(a.t()), value(a).t())
    check(matmul(b.t(), a.t()), b.t(), a.t(), None, torch.bfloat16, ulps=1)
