"""GEMMs in FP8 against float64 and the emulated one; the CPU computes them too where operands are small."""

import pytest
import torch

from lightning_lowbit import Cast, Scale
from lightning_lowbit.nn.core.gemm import matmul
from lightning_lowbit.quant import Operand, quantize_operand
from tests.nn.gemm.operands import NVFP4, ROWS, SIZES, TENSOR, WIDE, check, native, operands
from tests.tables import each

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
    """For sizes that are multiples of 16, others, and none; a result that is rounded once."""
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
    """The left operand of wgrad is transposed; others may be parts of larger matrices."""
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
    {"a": x, "b": w, "bias": bias[None]}[where][0, 0] = bad
    a, b = native(x, elements[0], blocks[0], 1), native(w, elements[1], blocks[1], 0)
    found = matmul(a, b, bias, dtype)
    hit = torch.zeros(16, 16, dtype=torch.bool)
    hit[{"a": (0, slice(None)), "b": (slice(None), 0), "bias": (slice(None), 0)}[where]] = True
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
