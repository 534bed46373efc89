"""GEMMs against float64: the emulated one, and those in FP8, which the CPU computes too where operands are small."""

import itertools

import pytest
import torch

from lightning_lowbit import Cast, Scale
from lightning_lowbit.nn.core.gemm import matmul
from lightning_lowbit.quant import Operand, quantize_operand
from lightning_lowbit.units import cpu_without
from tests.nn.gemm.operands import NVFP4, ROWS, SIZES, TENSOR, WIDE, check, native, operands
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


@each("dtype", [torch.bfloat16, torch.float16])
def test_cpus_without_units_for_a_dtype_compute_in_float32(dtype):
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


def damaged(where, bad, x, w, bias):
    """Puts what is not finite into an operand or the bias, and returns the elements of the result that it reaches."""
    {"a": x, "b": w, "bias": bias[None]}[where][0, 0] = bad
    reached = torch.zeros(len(x), w.shape[1], dtype=torch.bool)
    reached[{"a": (0, slice(None)), "b": (slice(None), 0), "bias": (slice(None), 0)}[where]] = True
    return reached


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("cast", [None, ONE_LEVEL, NVFP4, ROWS], ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["a", "b", "bias"])
def test_non_finite_propagates(where, bad, cast, dtype):
    x, w = operands(dtype=dtype)
    bias = torch.zeros(40, dtype=dtype)
    hit = damaged(where, bad, x, w, bias)
    a = Operand(x) if cast is None else quantize_operand(x, cast, 1)
    b = Operand(w) if cast is None else quantize_operand(w, cast, 0)
    found = matmul(a, b, bias, dtype).isfinite()
    assert not found[hit].any(), f"{bad} in {where} vanished"
    assert found[~hit].all(), f"{bad} in {where} spread to other rows or columns"


@pytest.mark.parametrize("cast", [NVFP4, ROWS], ids=str)
def test_transposed_operands(cast):
    x, w = operands(dtype=torch.bfloat16)
    a, b = quantize_operand(x, cast, 1), quantize_operand(w, cast, 0)
    assert torch.equal(value(a.t()), value(a).t())
    check(matmul(b.t(), a.t()), b.t(), a.t(), None, torch.bfloat16, ulps=1)


PAIRS_OF_ELEMENTS = [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2")]
PAIRS_OF_BLOCKS = [("tensor", "tensor"), ("row", "row"), ("tensor", "row"), ("row", "tensor")]
SHAPES = [(16, 16, 16), (5, 20, 7), (1, 32, 16), (33, 15, 1), (1, 1, 1), (3, 48, 17)]
SHAPES += [(0, 16, 16), (0, 20, 7), (16, 16, 0), (5, 0, 7), (16, 0, 16), (0, 0, 0)]
BIASES = {"": lambda n, dtype: None, "bias": lambda n, dtype: torch.randn(n).to(dtype)}
BIASES["with a mean"] = lambda n, dtype: torch.randn(1, n)  # float32


def native_pair(elements, blocks, shape=(16, 16, 16), dtype=torch.float32):
    x, w = operands(*shape, dtype=dtype)
    return native(x, elements[0], blocks[0], 1), native(w, elements[1], blocks[1], 0)


@pytest.mark.pairwise
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("blocks", PAIRS_OF_BLOCKS, ids=lambda pair: " x ".join(pair))
@pytest.mark.parametrize("elements", PAIRS_OF_ELEMENTS, ids=lambda pair: " x ".join(pair))
def test_native_against_float64(native_calls, elements, blocks, dtype, bias):
    for fast, shape in enumerate(SHAPES):
        a, b = native_pair(elements, blocks, shape)
        offset = BIASES[bias](shape[2], dtype)
        found = matmul(a, b, offset, dtype, fast_accumulation=bool(fast % 2))
        assert found.shape == (shape[0], shape[2])
        assert found.is_contiguous(), f"{shape}: strides {found.stride()}"
        if 0 not in shape:
            assert len(native_calls) == fast + 1, "not the native GEMM"
            assert native_calls[-1]["use_fast_accum"] == bool(fast % 2)
        check(found, a, b, offset, dtype, ulps=0.5, scaled_before_rounding=True)


def test_the_gemm_reads_biases_and_scales_from_aligned_memory(native_calls):
    """Views at odd addresses and with gaps are copied, vectors that fit are not."""
    bias = torch.randn(48).bfloat16()
    a, b = native_pair(("e4m3", "e4m3"), ("row", "row"))
    for offset in (bias[:16], bias[1:17], bias[::3]):
        found = matmul(a, b, offset, torch.bfloat16)
        read = native_calls[-1]["bias"]
        assert read.data_ptr() % 16 == 0 and read.is_contiguous() and torch.equal(read, offset)
        assert (read.data_ptr() == offset.data_ptr()) == (offset.data_ptr() % 16 == 0 and offset.is_contiguous())
        assert native_calls[-1]["scale_b"].is_contiguous()
        check(found, a, b, offset, torch.bfloat16, ulps=0.5, scaled_before_rounding=True)


@each("dtype", [torch.bfloat16, torch.float32])
@each("blocks", PAIRS_OF_BLOCKS)
def test_native_is_the_emulated_gemm(blocks, dtype):
    """To the bit where sums are exact: then their order makes no difference."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randint(-3, 4, (16, 16), generator=generator).to(dtype) for _ in range(2))
    x[:, 0], w[0] = 7 / 2, 7 / 2  # which makes every scale a power of two
    casts = [Cast("e4m3", Scale("fp32", block, "power_of_two")) for block in blocks]
    for offset in (None, torch.randint(-3, 4, (16,), generator=generator).to(dtype)):
        found, expected = (
            matmul(*(quantize_operand(t, c, d, dtype=e) for t, c, d in zip((x, w), casts, (1, 0), strict=True)), offset)
            for e in (torch.float8_e4m3fn, None)
        )
        assert torch.equal(found, expected), f"off by {(found - expected).abs().max()}"


@each("dtype", [torch.bfloat16, torch.float32])
@each("blocks", PAIRS_OF_BLOCKS)
def test_native_of_any_layout(blocks, dtype):
    a, b = native_pair(("e5m2", "e4m3"), blocks, (24, 32, 40))
    expected = matmul(a, b, None, dtype)
    turned = [Operand(o.values.t().contiguous().t(), None if o.factor is None else o.factor.clone()) for o in (a, b)]
    assert not any(operand.values.is_contiguous() for operand in turned)
    assert torch.equal(matmul(*turned, None, dtype), expected)
    assert torch.equal(matmul(a, turned[1], None, dtype), expected)
    check(matmul(b.t(), a.t(), None, dtype), b.t(), a.t(), None, dtype, ulps=0.5, scaled_before_rounding=True)
    parts = [Operand(a.values[:, 3:19], a.factor), Operand(b.values[3:19], b.factor)]
    check(matmul(*parts, None, dtype), *parts, None, dtype, ulps=0.5, scaled_before_rounding=True)
    for rows in (1, 16):  # strides of a side of 1 are anyone's choice
        one = native(torch.randn(32, rows), "e5m2", "row", 0).t()
        assert one.factor.shape == (rows, 1)
        check(matmul(one, b, None, dtype), one, b, None, dtype, ulps=0.5, scaled_before_rounding=True)


@pytest.mark.pairwise
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["a", "b", "bias"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("blocks", PAIRS_OF_BLOCKS, ids=lambda pair: " x ".join(pair))
@pytest.mark.parametrize("elements", PAIRS_OF_ELEMENTS, ids=lambda pair: " x ".join(pair))
def test_native_propagates_what_is_not_finite(elements, blocks, dtype, where, bad):
    """To its row or column, or all of the result where one scale serves all of the tensor."""
    x, w = operands(16, 20, 16, dtype=dtype)
    bias = torch.zeros(16, dtype=dtype)
    hit = damaged(where, bad, x, w, bias)
    a, b = native(x, elements[0], blocks[0], 1), native(w, elements[1], blocks[1], 0)
    found = matmul(a, b, bias, dtype)
    if where != "bias" and blocks["ab".index(where)] == "tensor":
        hit[:] = True
    assert not found.isfinite()[hit].any(), f"{bad} in {where} vanished"
    assert where == "bias" or found.isnan()[hit].all(), f"{bad} in {where} became an infinity"
    assert found.isfinite()[~hit].all(), f"{bad} in {where} spread"


@pytest.mark.pairwise
@pytest.mark.parametrize(("size_a", "size_b"), SIZES)
@pytest.mark.parametrize("blocks", PAIRS_OF_BLOCKS, ids=lambda pair: " x ".join(pair))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_native_of_tensors_of_extreme_size(size_a, size_b, blocks, dtype):
    x, w = operands(16, 32, 16, dtype=torch.float32)
    a, b = native((x * size_a).to(dtype), "e4m3", blocks[0], 1), native((w * size_b).to(dtype), "e4m3", blocks[1], 0)
    check(matmul(a, b, None, dtype), a, b, None, dtype, ulps=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("other", [None, NVFP4, WIDE, ROWS], ids=str)
@pytest.mark.parametrize("side", [0, 1])
def test_one_operand_in_fp8_is_emulated(native_calls, side, other, dtype):
    tensors = operands(16, 32, 16, dtype=dtype)
    pair = [Operand(x) if other is None else quantize_operand(x, other, 1 - i) for i, x in enumerate(tensors)]
    pair[side] = native(tensors[side], "e4m3", "tensor", 1 - side)
    expected = list(pair)
    expected[side] = quantize_operand(tensors[side], TENSOR, 1 - side)
    bias = torch.randn(16).to(dtype)
    assert torch.equal(matmul(*pair, bias, dtype), matmul(*expected, bias, dtype))
    assert not native_calls
