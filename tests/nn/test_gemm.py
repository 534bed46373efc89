"""The GEMMs against float64: the emulated one, and FP8's own, which the CPU computes too where operands are small."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_lowbit import Cast, LinearCasts, Scale
from lightning_lowbit.nn import AmaxHistories, GemmCounter, linear, set_phase
from lightning_lowbit.nn.gemm import matmul, native_obstacle
from lightning_lowbit.quant import Operand, quantize_operand
from tests.nn.layers import GEMMS, RESULTS, by_definition, identical, layer_like, remember, run, spied, value

NVFP4 = Cast("e2m1", Scale("e4m3", 16, two_level=True))
ONE_LEVEL = Cast("e2m1", Scale("e4m3", 16))
WIDE = Cast("int8", Scale("e4m3", 16, two_level=True))  # does not fit bfloat16
ROWS = Cast("int8", Scale("fp32", "row"))
TENSOR = Cast("e4m3", Scale("fp32", "tensor"))


def operands(m: int = 24, k: int = 80, n: int = 40, *, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(m, k, generator=generator).to(dtype), torch.randn(k, n, generator=generator).to(dtype))


def ulp(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Distance of neighboring numbers of ``dtype`` at the size of x."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(x.double().abs().clamp(min=info.tiny)).exponent - 1
    return torch.ldexp(torch.full_like(x.double(), info.eps), exponent)


def check(
    found: Tensor,
    a: Operand,
    b: Operand,
    bias: Tensor | None,
    dtype: torch.dtype,
    ulps: float,
    scaled_before_rounding: bool = False,
) -> None:
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


@pytest.mark.pairwise
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    ("left", "right"),
    list(itertools.product([None, ONE_LEVEL, NVFP4, WIDE, ROWS, TENSOR], repeat=2)),
    ids=lambda cast: "hp" if cast is None else str(cast),
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_against_float64(left: Cast | None, right: Cast | None, dtype: torch.dtype, with_bias: bool) -> None:
    x, w = operands(dtype=dtype)
    bias = torch.randn(40).to(dtype) if with_bias else None
    a = Operand(x) if left is None else quantize_operand(x, left, 1)
    b = Operand(w) if right is None else quantize_operand(w, right, 0)
    check(matmul(a, b, bias, dtype), a, b, bias, dtype, ulps=1)


@pytest.mark.parametrize("with_bias", [False, True])
def test_exact_mode_rounds_once(with_bias: bool) -> None:
    x, w = operands(dtype=torch.bfloat16)
    bias = torch.randn(40).bfloat16() if with_bias else None
    a, b = quantize_operand(x, NVFP4, 1, dtype=torch.float32), quantize_operand(w, NVFP4, 0, dtype=torch.float32)
    found = matmul(a, b, bias, torch.bfloat16)
    check(found, a, b, bias, torch.bfloat16, ulps=0.5)
    fast = matmul(quantize_operand(x, NVFP4, 1), quantize_operand(w, NVFP4, 0), bias, torch.bfloat16)
    check(fast, a, b, bias, torch.bfloat16, ulps=1)


SIZES = [(1e18, 1e18), (1e-15, 1e-15), (1e30, 1e-30), (1e-25, 1e8), (1e-30, 1.0), (1e-18, 1e-17)]
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
def test_tensors_of_extreme_size(size_a: float, size_b: float, pair: str, dtype: torch.dtype) -> None:
    x, w = operands(dtype=torch.float32)
    x, w = (x * size_a).to(dtype), (w * size_b).to(dtype)
    bias = (torch.randn(40) * size_a * size_b).to(dtype)
    a, b = quantize_operand(x, PAIRS[pair][0], 1), quantize_operand(w, PAIRS[pair][1], 0)
    for offset in (None, bias):
        check(matmul(a, b, offset, dtype), a, b, offset, dtype, ulps=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("pair", PAIRS)
def test_huge_maxima_that_never_meet(pair: str, dtype: torch.dtype) -> None:
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
def test_non_finite_propagates(where: str, bad: float, cast: Cast | None, dtype: torch.dtype) -> None:
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


@pytest.mark.pairwise
@pytest.mark.parametrize("shape", [(0, 32, 8), (4, 32, 0), (4, 0, 8), (1, 1, 1)])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("cast", [NVFP4, ROWS, TENSOR], ids=str)
def test_empty(shape: tuple[int, int, int], with_bias: bool, cast: Cast) -> None:
    x, w = operands(*shape, dtype=torch.bfloat16)
    bias = torch.randn(shape[2]).bfloat16() if with_bias else None
    a, b = quantize_operand(x, cast, 1), quantize_operand(w, cast, 0)
    check(matmul(a, b, bias), a, b, bias, torch.bfloat16, ulps=1)


@pytest.mark.parametrize("cast", [NVFP4, ROWS], ids=str)
def test_transposed_operands(cast: Cast) -> None:
    x, w = operands(dtype=torch.bfloat16)
    a, b = quantize_operand(x, cast, 1), quantize_operand(w, cast, 0)
    assert torch.equal(value(a.t()), value(a).t())
    check(matmul(b.t(), a.t()), b.t(), a.t(), None, torch.bfloat16, ulps=1)


# --- FP8's own --------------------------------------------------------------------------------------------------------

PAIRS_OF_ELEMENTS = [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2")]
PAIRS_OF_BLOCKS = [("tensor", "tensor"), ("row", "row"), ("tensor", "row"), ("row", "tensor")]


def native(x: Tensor, element: str, block: Any, dim: int, **scale: Any) -> Operand:
    """An operand whose values are in FP8 themselves: the same numbers as those of the emulated one."""
    cast = Cast(element, Scale("fp32", block, **scale))
    operand, emulated = quantize_operand(x, cast, dim, dtype=cast.format.dtype), quantize_operand(x, cast, dim)
    assert operand.values.dtype == cast.format.dtype
    assert torch.equal(value(operand).nan_to_num(7e7), value(emulated).nan_to_num(7e7)), f"{cast}: other values in FP8"
    return operand


def native_pair(
    elements: tuple[str, str],
    blocks: tuple[str, str],
    shape: tuple[int, int, int] = (16, 16, 16),
    dtype: torch.dtype = torch.float32,
) -> tuple[Operand, Operand]:
    x, w = operands(*shape, dtype=dtype)
    return native(x, elements[0], blocks[0], 1), native(w, elements[1], blocks[1], 0)


def as_gpus_want_it(left: Tensor, right: Tensor, arguments: dict[str, Any]) -> None:
    """What cuBLAS and CUTLASS ask of layouts, sizes and scales, and the CPU does not."""
    (rows, inner), columns = left.shape, right.shape[1]
    assert inner % 16 == columns % 16 == 0, f"sizes {inner} and {columns}"
    if left.numel() and right.numel():
        assert left.stride() == (inner, 1), f"the left operand {tuple(left.shape)} has strides {left.stride()}"
        assert right.stride() == (1, inner), f"the right operand {tuple(right.shape)} has strides {right.stride()}"
    scales = arguments["scale_a"], arguments["scale_b"]
    assert all(scale.dtype == torch.float32 for scale in scales)
    if any(scale.dim() for scale in scales):
        assert [tuple(scale.shape) for scale in scales] == [(rows, 1), (1, columns)]
        assert scales[0].stride(1) == scales[1].stride(1) == 1
        assert all(scale.is_contiguous() for scale in scales)
        assert arguments["out_dtype"] == torch.bfloat16, "scales of rows come with bfloat16 alone"
    if arguments["bias"] is not None:
        assert arguments["bias"].dtype == arguments["out_dtype"] == torch.bfloat16
        assert arguments["bias"].shape == (columns,)


@pytest.fixture(autouse=True)
def native_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """What the native GEMM is called with. Nothing may call it with large operands, which take the CPU minutes."""
    calls: list[dict[str, Any]] = []
    original = torch._scaled_mm

    def spy(left: Tensor, right: Tensor, **arguments: Any) -> Tensor:
        assert left.numel() * right.shape[1] < 2**20, "too large for the CPU"
        as_gpus_want_it(left, right, arguments)
        calls.append(arguments)
        return original(left, right, **arguments)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "_scaled_mm", spy)
        yield calls


BIASES = {"": lambda n, dtype: None, "bias": lambda n, dtype: torch.randn(n).to(dtype)}
BIASES["with a mean"] = lambda n, dtype: torch.randn(1, n)  # float32


@pytest.mark.pairwise
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("blocks", PAIRS_OF_BLOCKS, ids=lambda pair: " x ".join(pair))
@pytest.mark.parametrize("elements", PAIRS_OF_ELEMENTS, ids=lambda pair: " x ".join(pair))
def test_native_against_float64(
    native_calls: list[Any], elements: tuple[str, str], blocks: tuple[str, str], dtype: torch.dtype, bias: str
) -> None:
    """For sizes that are multiples of 16 and others; a result that is rounded once."""
    for fast, shape in enumerate([(16, 16, 16), (5, 20, 7), (1, 32, 16), (33, 15, 1), (1, 1, 1), (3, 48, 17)]):
        a, b = native_pair(elements, blocks, shape)
        offset = BIASES[bias](shape[2], dtype)
        found = matmul(a, b, offset, dtype, fast_accumulation=bool(fast % 2))
        assert found.shape == (shape[0], shape[2])
        assert found.is_contiguous(), f"{shape}: strides {found.stride()}"
        assert len(native_calls) == fast + 1, "not the native GEMM"
        assert native_calls[-1]["use_fast_accum"] == bool(fast % 2)
        check(found, a, b, offset, dtype, ulps=0.5, scaled_before_rounding=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("blocks", PAIRS_OF_BLOCKS, ids=lambda pair: " x ".join(pair))
def test_native_is_the_emulated_gemm(blocks: tuple[str, str], dtype: torch.dtype) -> None:
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


@pytest.mark.parametrize("shape", [(0, 16, 16), (0, 20, 7), (16, 16, 0), (5, 0, 7), (16, 0, 16), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("blocks", PAIRS_OF_BLOCKS, ids=lambda pair: " x ".join(pair))
def test_native_of_nothing(shape: tuple[int, int, int], blocks: tuple[str, str]) -> None:
    a, b = native_pair(("e4m3", "e5m2"), blocks, shape)
    for dtype in (torch.bfloat16, torch.float32):
        for bias in BIASES.values():
            offset = bias(shape[2], dtype)
            found = matmul(a, b, offset, dtype)
            expected = torch.zeros(shape[0], shape[2]) + (0 if offset is None else offset.float())
            assert found.dtype == dtype
            assert torch.equal(found, expected.to(dtype)), f"{shape}, {dtype}: {found}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("blocks", PAIRS_OF_BLOCKS, ids=lambda pair: " x ".join(pair))
def test_native_of_any_layout(blocks: tuple[str, str], dtype: torch.dtype) -> None:
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
        assert one.factor is not None
        assert one.factor.shape == (rows, 1)
        check(matmul(one, b, None, dtype), one, b, None, dtype, ulps=0.5, scaled_before_rounding=True)


@pytest.mark.pairwise
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["a", "b", "bias"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("blocks", PAIRS_OF_BLOCKS, ids=lambda pair: " x ".join(pair))
@pytest.mark.parametrize("elements", PAIRS_OF_ELEMENTS, ids=lambda pair: " x ".join(pair))
def test_native_propagates_what_is_not_finite(
    elements: tuple[str, str], blocks: tuple[str, str], dtype: torch.dtype, where: str, bad: float
) -> None:
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
def test_native_of_tensors_of_extreme_size(
    size_a: float, size_b: float, blocks: tuple[str, str], dtype: torch.dtype
) -> None:
    x, w = operands(16, 32, 16, dtype=torch.float32)
    a, b = native((x * size_a).to(dtype), "e4m3", blocks[0], 1), native((w * size_b).to(dtype), "e4m3", blocks[1], 0)
    check(matmul(a, b, None, dtype), a, b, None, dtype, ulps=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("other", [None, NVFP4, WIDE, ROWS], ids=str)
@pytest.mark.parametrize("side", [0, 1])
def test_one_operand_in_fp8_is_emulated(
    native_calls: list[Any], side: int, other: Cast | None, dtype: torch.dtype
) -> None:
    tensors = operands(16, 32, 16, dtype=dtype)
    pair = [Operand(x) if other is None else quantize_operand(x, other, 1 - i) for i, x in enumerate(tensors)]
    pair[side] = native(tensors[side], "e4m3", "tensor", 1 - side)
    expected = list(pair)
    expected[side] = quantize_operand(tensors[side], TENSOR, 1 - side)
    bias = torch.randn(16).to(dtype)
    assert torch.equal(matmul(*pair, bias, dtype), matmul(*expected, bias, dtype))
    assert not native_calls


# --- where they run ---------------------------------------------------------------------------------------------------


def test_the_cpu_is_no_place_for_native_gemms() -> None:
    for device in ("cpu", "meta", "mps"):
        found = native_obstacle(torch.device(device), "fp8")
        assert f"8.9 or more (Ada, Hopper, Blackwell); the device is '{device}'" in str(found)


@pytest.mark.parametrize(
    ("kind", "capability", "hip", "obstacle"),
    [
        ("fp8", (7, 5), None, "8.9 or more (Ada, Hopper, Blackwell); Some GPU has 7.5"),
        ("fp8", (8, 6), None, "8.9 or more (Ada, Hopper, Blackwell); Some GPU has 8.6"),
        ("fp8", (8, 9), None, None),
        ("fp8", (9, 0), None, None),
        ("fp8", (10, 0), None, None),
        ("fp8", (12, 0), None, None),
        ("fp8", (9, 4), "6.4", "Some GPU is AMD's, which has not been tried"),
        (
            "int8",
            (7, 0),
            None,
            "int8 GEMMs need an NVIDIA GPU of compute capability 7.5 or more, or a CPU with VNNI; Some GPU has 7.0",
        ),
        ("int8", (7, 5), None, None),
        ("int8", (8, 0), None, None),
        ("int8", (9, 0), None, None),
        ("int8", (9, 4), "6.4", "Some GPU is AMD's, which has not been tried"),
    ],
)
def test_gpus(
    monkeypatch: pytest.MonkeyPatch, kind: str, capability: tuple[int, int], hip: Any, obstacle: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    monkeypatch.setattr(torch.version, "hip", hip)
    found = native_obstacle(torch.device("cuda", 1), kind)
    assert found is None if obstacle is None else found.endswith(obstacle), found


# --- a layer ----------------------------------------------------------------------------------------------------------

CURRENT, ROW = LinearCasts.preset("fp8-current"), LinearCasts.preset("fp8-row")
DELAYED = LinearCasts.preset("fp8-delayed")
REUSE = {"dgrad_w": "fprop", "wgrad_x": "fprop"}
# Casts, and the GEMMs that are native with them.
LAYERS: dict[str, tuple[LinearCasts, list[str]]] = {
    "current": (CURRENT, list(GEMMS)),
    "delayed": (DELAYED, list(GEMMS)),
    "row": (ROW, list(GEMMS)),
    "current, w reused": (CURRENT.replace(dgrad_w="fprop"), list(GEMMS)),
    "delayed, reused": (DELAYED.replace(**REUSE), list(GEMMS)),
    "row, w reused": (ROW.replace(dgrad_w="fprop"), ["fprop", "wgrad"]),  # whose scales lie along the contraction
    "row, reused": (ROW.replace(**REUSE), ["fprop"]),
    "rows times tensors": (ROW.replace(fprop_w=CURRENT.fprop_w, dgrad_g=CURRENT.dgrad_g), list(GEMMS)),
    "some of it": (CURRENT.replace(fprop_x=None, dgrad_w=NVFP4), ["wgrad"]),
    "reused in an emulated GEMM": (CURRENT.replace(dgrad_g=NVFP4, wgrad_g=None, **REUSE), ["fprop"]),
    "reused from an emulated GEMM": (CURRENT.replace(fprop_x=NVFP4, dgrad_w="fprop"), ["wgrad"]),
    "E5M2 twice": (CURRENT.replace(dgrad_w=CURRENT.dgrad_g), ["fprop", "wgrad"]),
    "transformed": (CURRENT.replace(hadamard={"wgrad": 16}, subtract_mean=["fprop", "wgrad"]), list(GEMMS)),
    "means, w reused": (DELAYED.replace(dgrad_w="fprop", subtract_mean=["dgrad", "wgrad"]), list(GEMMS)),
    "smoothed": (CURRENT.replace(smooth="channel"), list(GEMMS)),
    "stochastic": (ROW.with_rounding({"dgrad_g": "stochastic", "wgrad_g": "stochastic"}), list(GEMMS)),
}


@pytest.fixture
def has_native_gemms(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the CPU were a device for FP8."""
    monkeypatch.setattr(linear, "native_obstacle", lambda device, kind: None)


@pytest.mark.pairwise
@pytest.mark.usefixtures("has_native_gemms")
@pytest.mark.parametrize("sizes", [(16, 16, 32), (13, 24, 7), (1, 16, 16), (16, 16, 1), (16, 1, 16)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", LAYERS)
def test_a_native_layer_is_the_emulated_one(
    monkeypatch: pytest.MonkeyPatch,
    native_calls: list[dict[str, Any]],
    name: str,
    dtype: torch.dtype,
    sizes: tuple[int, int, int],
) -> None:
    """The same operands; results differ by the order of sums, and by roundings that native GEMMs do not have."""
    tokens, inputs, outputs = sizes
    casts, native_gemms = LAYERS[name]
    original = nn.Linear(inputs, outputs, dtype=dtype)
    x, g = torch.randn(tokens, inputs).to(dtype), torch.randn(tokens, outputs).to(dtype)
    found, seen = {}, {}
    for backend in ("auto", "native", "emulated"):
        layer = layer_like(original, casts)
        layer.backend = backend
        remember(layer, 0.5, 2.0)
        native_calls.clear()
        with spied(monkeypatch) as seen[backend]:
            found[backend] = run(layer, x, g)
        assert len(native_calls) == (0 if backend == "emulated" else len(native_gemms)), f"{backend}: another backend"
        for gemm in GEMMS if backend != "emulated" else ():
            in_fp8 = [seen[backend][operand].values.element_size() == 1 for operand in GEMMS[gemm]]
            assert all(in_fp8) == (gemm in native_gemms), f"{gemm}: operands in FP8 {in_fp8}"
    identical(found["native"], found["auto"], "backend='native',")
    for operand, emulated in seen["emulated"].items():
        torch.testing.assert_close(
            value(seen["auto"][operand]), value(emulated), rtol=2e-7, atol=0, msg=lambda text, o=operand: f"{o}: {text}"
        )
    expected = by_definition(layer, x, g, (0.5, 2.0))
    for result in RESULTS.values():
        error = (found["auto"][result].double() - expected.results[result]).abs()
        allowed = torch.finfo(dtype).eps * (expected.results[result].abs() + 2 * expected.offsets[result])
        allowed += expected.sizes[result] * 2.0**-21
        assert (error <= allowed).all(), f"{result}: off by {error.max():.2e}, {(error / allowed).max():.2f} x allowed"
    assert torch.equal(found["auto"]["bias"], found["emulated"]["bias"])


@pytest.mark.usefixtures("has_native_gemms")
@pytest.mark.parametrize("name", LAYERS)
def test_a_native_layer_of_no_tokens(name: str) -> None:
    layer = layer_like(nn.Linear(16, 32), LAYERS[name][0])
    found = run(layer, torch.randn(0, 16), torch.randn(0, 32))
    assert (found["y"].shape, found["x"].shape) == ((0, 32), (0, 16))
    assert not found["weight"].any()
    assert not found["bias"].any()


@pytest.mark.usefixtures("has_native_gemms")
@pytest.mark.parametrize("name", LAYERS)
def test_only_the_forward_pass_accumulates_fast(native_calls: list[dict[str, Any]], name: str) -> None:
    run(layer_like(nn.Linear(16, 16), LAYERS[name][0]), torch.randn(16, 16), torch.randn(16, 16))
    assert [call["use_fast_accum"] for call in native_calls] == [gemm == "fprop" for gemm in LAYERS[name][1]]


@pytest.mark.usefixtures("has_native_gemms")
def test_phases_keep_their_native_gemms(native_calls: list[dict[str, Any]]) -> None:
    layer = layer_like(nn.Linear(16, 16), DELAYED)
    for phase, gemms in {"fqt": 3, "qaf": 1, "hp-forward": 2, "bf16": 0}.items():
        native_calls.clear()
        set_phase(layer, phase)
        run(layer, torch.randn(16, 16), torch.randn(16, 16))
        assert len(native_calls) == gemms, f"{len(native_calls)} native GEMMs in the phase {phase}"


@pytest.mark.usefixtures("has_native_gemms")
@pytest.mark.parametrize("casts", ["fp8-current", "fp8-row"])
def test_autocast_goes_native(native_calls: list[dict[str, Any]], casts: str) -> None:
    original, x, g = nn.Linear(16, 32), torch.randn(16, 16), torch.randn(16, 32)
    found = run(layer_like(original, casts), x, g, autocast=True)
    assert [call["out_dtype"] for call in native_calls] == [torch.bfloat16] * 3
    layer = layer_like(original.bfloat16(), casts)
    expected = run(layer, x.bfloat16(), g.bfloat16())
    identical({"y": found["y"]}, {"y": expected["y"]})
    assert torch.equal(found["weight"].bfloat16(), expected["weight"])


@pytest.mark.usefixtures("has_native_gemms")
def test_exact_layers_are_emulated(native_calls: list[dict[str, Any]]) -> None:
    layer = layer_like(nn.Linear(16, 16), CURRENT, exact=True)
    assert layer.native_gemms(torch.device("cpu")) == ()
    run(layer, torch.randn(16, 16), torch.randn(16, 16))
    assert not native_calls


def test_without_the_hardware_layers_are_emulated_or_refuse(native_calls: list[dict[str, Any]]) -> None:
    layer = layer_like(nn.Linear(16, 16), CURRENT)
    run(layer, torch.randn(16, 16), torch.randn(16, 16))
    assert not native_calls
    layer.backend = "native"
    with pytest.raises(
        ValueError, match="backend='native': native FP8 GEMMs need .*; the device is 'cpu'. Use backend="
    ):
        layer(torch.randn(16, 16))


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_asking_for_the_hardware_breaks_no_graph(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    """As on a GPU of this capability, of which the compiler can trace neither name nor properties."""
    torch._dynamo.reset()

    def name(device: Any = None) -> str:
        torch._dynamo.graph_break()
        return "a GPU"

    monkeypatch.setattr(torch.cuda, "get_device_name", name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (name(), capability)[1])

    def asks(x: Tensor) -> Tensor:
        return x * (2 if native_obstacle(torch.device("cuda"), "fp8") is None else 3)

    compiled = torch.compile(asks, backend="eager", fullgraph=True)
    assert compiled(torch.ones(1)).item() == (2 if capability >= (8, 9) else 3)
    torch._dynamo.reset()


@pytest.mark.usefixtures("has_native_gemms")
@pytest.mark.parametrize("shape", [(16, 32, 48), (13, 24, 7)], ids=str)
def test_padding_is_no_work_of_the_models(shape: tuple[int, int, int]) -> None:
    tokens, inputs, outputs = shape
    model = nn.Sequential(layer_like(nn.Linear(inputs, outputs), CURRENT))
    AmaxHistories(model)
    with GemmCounter(model) as counter:
        run(model, torch.randn(tokens, inputs), torch.randn(tokens, outputs))
    assert counter.gemms == {("0", gemm): 2 * tokens * inputs * outputs for gemm in GEMMS}
    assert counter.native_shares(torch.device("cpu")) == {"fp8": 1}


@pytest.mark.usefixtures("has_native_gemms")
@pytest.mark.parametrize("casts", ["delayed", "row, w reused"])
def test_a_compiled_native_layer(native_calls: list[dict[str, Any]], casts: str) -> None:
    torch._dynamo.reset()
    layer = layer_like(nn.Linear(16, 32), LAYERS[casts][0])
    histories = AmaxHistories(layer)
    x, g = torch.randn(16, 16), torch.randn(16, 32)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for step in range(2):
        expected = run(layer, x, g)
        found = {name.removeprefix("_orig_mod."): tensor for name, tensor in run(compiled, x, g).items()}
        identical(found, expected, f"step {step},")
        histories.advance_()
    assert len(native_calls) == 2 * 2 * len(LAYERS[casts][1])
    torch._dynamo.reset()
