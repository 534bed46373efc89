"""Quantising one tensor: golden vectors, the slow reference, shapes, and every way to ask for what cannot be done."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_lowbit import Cast, Scale, kernels, quantize
from lightning_lowbit.formats import ELEMENT_FORMATS, SCALE_FORMATS, table
from lightning_lowbit.quant import Quantized, quantize_operand
from tests import oracles
from tests.references import quantize as reference

NVFP4 = Cast("e2m1", Scale("e4m3", 16, two_level=True))
NVFP4_TILES = Cast("e2m1", Scale("e4m3", (16, 16), two_level=True))
BLOCK_SCALES = [name for name in SCALE_FORMATS if name != "e8m0"]


def casts_of(element: str) -> list[Cast]:
    """Every combination of the fields of a Scale, blocks of 16."""
    combinations = itertools.product(BLOCK_SCALES, ("nearest", "up"), (False, True))
    return [Cast(element, Scale(name, 16, rounding, two_level)) for name, rounding, two_level in combinations]


def sample(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Blocks of very different sizes, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    size = torch.randn((*shape[:-1], 1), generator=generator).mul(3).exp()
    return (x * size * (torch.rand((*shape[:-1], 1), generator=generator) > 0.1)).to(dtype)


def same(found: Tensor, expected: Tensor, message: str) -> None:
    """Equal values: NaN equals NaN, and -0 equals 0."""
    assert found.shape == expected.shape, f"{message}: shape {tuple(found.shape)}, not {tuple(expected.shape)}"
    wrong = (found != expected) & ~(found.isnan() & expected.isnan())
    assert not wrong.any(), (
        f"{message}: {int(wrong.sum())} of {wrong.numel()} differ, e.g. {found[wrong][:4].tolist()} "
        f"instead of {expected[wrong][:4].tolist()}"
    )


def same_bytes(found: Quantized, expected: Quantized, message: str) -> None:
    same(found.codes, expected.codes, f"{message}, codes")
    same(found.scales.view(torch.uint8), expected.scales.view(torch.uint8), f"{message}, scales")
    assert (found.tensor_scale is None) == (expected.tensor_scale is None)
    if found.tensor_scale is not None:
        same(found.tensor_scale, expected.tensor_scale, f"{message}, tensor scale")


def float_scales(quantized: Quantized) -> Tensor:
    storage = quantized.cast.scale.storage
    return quantized.scales.float() if storage.dtype is not None else storage.decode(quantized.scales)


# --- golden vectors ---------------------------------------------------------------------------------------------------


def check_golden(found: Quantized, case: dict[str, Any], name: str, prefix: str = "") -> None:
    codes = found.codes.numpy()
    expected = case[f"{prefix}codes"]
    np.testing.assert_array_equal(
        found.scales.view(torch.uint8).numpy(), case["stored_scale"], err_msg=f"{name} scales"
    )
    zero_scale = np.broadcast_to(case[f"{prefix}scale"].repeat(16, axis=1) == 0, codes.shape)
    # -0 folds into 0. A block whose scale is 0 decodes to 0 whatever its codes.
    np.testing.assert_array_equal(codes[~zero_scale], np.where(expected == 8, 0, expected)[~zero_scale], err_msg=name)
    assert found.tensor_scale is not None
    assert found.tensor_scale.item() == np.float32(1) / case["encode_scale"], f"{name}: tensor scale"
    values = case.get(f"{prefix}deq_reciprocal", case[f"{prefix}deq"])
    np.testing.assert_allclose(found.dequantize().numpy(), values, rtol=3e-7, atol=0, err_msg=f"{name} values")


def check_1x16(name: str) -> None:
    case = oracles.case("nvfp4_1x16", name)
    case["stored_scale"] = case["scale"]
    check_golden(quantize(case["x"], NVFP4), case, name)
    columns = quantize(case["x"].t(), NVFP4, dim=0)
    rows = quantize(case["x"], NVFP4)
    same(columns.codes.t(), rows.codes, f"{name}: blocks along columns, codes")
    same(columns.scales.view(torch.uint8).t(), rows.scales.view(torch.uint8), f"{name}: blocks along columns, scales")
    same(columns.dequantize().t(), rows.dequantize(), f"{name}: blocks along columns, values")


def check_16x16(name: str) -> None:
    case = oracles.case("nvfp4_16x16", name)
    check_golden(quantize(case["x"], NVFP4_TILES), {**case, "stored_scale": case["block_scale"]}, name)
    transposed = {**case, "stored_scale": case["block_scale"].T}
    check_golden(quantize(case["x"].t(), NVFP4_TILES), transposed, f"{name} transposed", "t_")


FINITE_CASES = [name for name in oracles.cases("nvfp4_1x16") if not oracles.case("nvfp4_1x16", name)["peer_only"]]
PEER_CASES = sorted(set(oracles.cases("nvfp4_1x16")) - set(FINITE_CASES))


@pytest.mark.parametrize("name", FINITE_CASES)
def test_nvfp4_golden(name: str) -> None:
    check_1x16(name)


@pytest.mark.parametrize("name", oracles.cases("nvfp4_16x16"))
def test_nvfp4_tiles_golden(name: str) -> None:
    check_16x16(name)


def test_compiled_code_is_golden() -> None:
    """A few cases that share their compiled code: each further layout or dtype would take seconds."""
    with kernels.backend("compiled"):
        for name in ("randn_f32", "association_f32", "code_tie_ulp_f32", "underflow_blocks_bf16", "small_bf16"):
            case = oracles.case("nvfp4_1x16", name)
            check_golden(quantize(case["x"], NVFP4), {**case, "stored_scale": case["scale"]}, f"{name} compiled")
        for name in PEER_CASES:
            check_non_finite(name)
        for name in ("randn_bf16", "zero_and_underflow_bf16", "ties_f32"):
            case = oracles.case("nvfp4_16x16", name)
            found = quantize(case["x"], NVFP4_TILES)
            check_golden(found, {**case, "stored_scale": case["block_scale"]}, f"{name} compiled")


def check_non_finite(name: str) -> None:
    x = oracles.case("nvfp4_1x16", name)["x"]
    found = quantize(x, NVFP4)
    bad = ~x.isfinite()
    bad_block = bad.unflatten(1, (-1, 16)).any(-1)
    values = found.dequantize()
    assert bad.any()
    assert values[bad].isnan().all(), f"{name}: a non-finite element became {values[bad].tolist()}"
    assert values[~bad_block.repeat_interleave(16, 1)].isfinite().all(), f"{name}: the damage leaves its block"
    same(found.scales.float().isnan(), bad_block, f"{name}: scales that are NaN")


@pytest.mark.parametrize("name", PEER_CASES)
def test_non_finite_golden_inputs(name: str) -> None:
    check_non_finite(name)


# --- non-finite elements ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("element", ELEMENT_FORMATS)
def test_non_finite_never_becomes_finite(element: str) -> None:
    x = sample(4, 48)
    x[0, 20], x[1, 20], x[2, 20] = torch.inf, -torch.inf, torch.nan
    damaged = torch.zeros(4, 48, dtype=torch.bool)
    damaged[:3, 16:32] = True  # at most the blocks around them
    key = torch.tensor(3)
    for cast, rounding in itertools.product(casts_of(element), ("nearest", "stochastic")):
        mode = replace(cast, rounding=rounding)
        found = {
            "quantize": quantize(x, mode, key=key).dequantize(),
            "quantize_operand": quantize_operand(x, mode, -1, key).values,
        }
        for name, values in found.items():
            bad = values[:3, 20]
            assert bad.isnan().all(), f"{name}, {mode}: inf, -inf, nan became {bad.tolist()}"
            assert values[~damaged].isfinite().all(), f"{name}, {mode}: the damage leaves its block"


# --- the slow reference -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("element", ELEMENT_FORMATS)
def test_equals_reference(element: str) -> None:
    x = sample(5, 48)
    for cast in casts_of(element):
        check_against_reference(x, cast)


def check_against_reference(x: Tensor, cast: Cast) -> None:
    found = quantize(x, cast)
    same(float_scales(found), reference.quantize(x, cast, field="scales"), f"{cast}, scales")
    spread = float_scales(found).repeat_interleave(16, 1)
    values = torch.where(spread == 0, 0.0, cast.format.decode(found.codes))  # codes under a zero scale mean nothing
    expected = torch.where(spread == 0, 0.0, reference.quantize(x, cast, field="values"))
    same(values, expected, f"{cast}, values of codes")
    same(found.dequantize(), reference.quantize(x, cast, field="dequantized"), f"{cast}, values")


@pytest.mark.parametrize("block", [1, 7, 16, 32, 128, (16, 16), (1, 16), (8, 4), (128, 128), (3, 1)])
@pytest.mark.parametrize("two_level", [False, True])
def test_blocks_of_any_size(block: Any, two_level: bool) -> None:
    x = sample(13, 100)
    for dim in (0, 1, -2, -1):
        cast = Cast("e2m1", Scale("e4m3", block, two_level=two_level))
        found = quantize(x, cast, dim)
        same(float_scales(found), reference.quantize(x, cast, dim, field="scales"), f"{cast} along {dim}, scales")
        same(found.dequantize(), reference.quantize(x, cast, dim, field="dequantized"), f"{cast} along {dim}")


@pytest.mark.parametrize("element", ELEMENT_FORMATS)
@pytest.mark.parametrize("dim", [0, 1])
def test_stochastic_equals_reference(element: str, dim: int) -> None:
    x, key = sample(13, 100), 12345
    cast = Cast(element, Scale("e4m3", 16, two_level=True), "stochastic")
    found = cast.format.decode(quantize(x, cast, dim, key=torch.tensor(key)).codes)
    scaled = reference.quantize(x, cast, dim, field="scaled").numpy()
    lower, upper = reference.neighbours(scaled, element)
    index_size = (13, 112) if dim else (16, 100)  # indices are those of the padded matrix
    index = np.arange(13)[:, None] * index_size[1] + np.arange(100)
    step = np.maximum(upper - lower, 1e-30)
    limit = float(reference.magnitudes(element)[-1])
    margin = (np.clip(scaled.astype(np.float64), -limit, limit) - lower) / step - (1 - reference.uniform(index, key))
    expected = np.where((margin > 0) & (upper > lower), upper, lower)
    # float32 adds the random number to a value of up to 127 steps: the last few bits of the comparison are open.
    open_ = (np.abs(margin) < 2.0**-16) & (upper > lower)
    assert open_.mean() < 1e-3
    same(found[~open_], torch.from_numpy(expected[~open_]).float(), f"{cast} along {dim}")


def test_stochastic_index_is_that_of_the_whole_tensor() -> None:
    """Rows quantise alike whether more rows follow or not; padding does not shift the index of whole blocks."""
    x, cast = sample(8, 64), Cast(scale=Scale(two_level=True), rounding="stochastic")
    amax = x.abs().max()
    whole = quantize(x, cast, key=5, amax=amax).codes
    same(quantize(x[:3], cast, key=5, amax=amax).codes, whole[:3], "the first three rows")


# --- amax and scales --------------------------------------------------------------------------------------------------


def test_amax_from_outside() -> None:
    x = sample(6, 64)
    own = quantize(x, NVFP4)
    same_bytes(quantize(x, NVFP4, amax=x.abs().max()), own, "the tensor's own amax")
    given = quantize(x, NVFP4, amax=torch.tensor(1e4))
    same(given.dequantize(), reference.quantize(x, NVFP4, amax=1e4, field="dequantized"), "a larger amax")
    small = quantize(x, NVFP4, amax=x.abs().max() / 8)
    same(small.dequantize(), reference.quantize(x, NVFP4, amax=(x.abs().max() / 8).item(), field="dequantized"), "less")
    assert quantize(x.bfloat16(), NVFP4, amax=x.abs().max().bfloat16()).tensor_scale.dtype == torch.float32


@pytest.mark.parametrize("scale_format", BLOCK_SCALES)
@pytest.mark.parametrize("element", ELEMENT_FORMATS)
def test_scales_rounded_up_never_saturate(element: str, scale_format: str) -> None:
    largest = ELEMENT_FORMATS[element].max
    scale = SCALE_FORMATS[scale_format]
    # Block maxima from below the smallest scale to the largest one.
    maxima = torch.logspace(-9, 0, 200, base=10.0) * (scale.max * largest)
    x = maxima[:, None] * torch.linspace(-1, 0.5, 16)
    cast = Cast(element, Scale(scale_format, 16, "up"))
    found = quantize(x, cast)
    needed = x.abs().amax(1) / float_scales(found)[:, 0]
    assert (needed <= largest * (1 + 2.0**-22)).all(), f"{cast}: elements of {needed.max()} for {largest}"
    assert (float_scales(found) > 0).all(), f"{cast}: a scale underflowed"
    # No larger than it must be: the next smaller scale would saturate.
    values = table(scale)
    place = torch.searchsorted(values[: int((values < torch.inf).sum())], float_scales(found)[:, 0].contiguous())
    smaller = values[(place - 1).clamp(min=0)]
    assert (x.abs().amax(1) > smaller * largest * (1 - 2.0**-22)).all(), f"{cast}: a scale is larger than needed"


@pytest.mark.parametrize(("scale_rounding", "biased"), [("up", False), ("nearest", True)])
def test_stochastic_rounding_of_block_maxima(scale_rounding: Any, biased: bool) -> None:
    """Scales rounded up make block maxima unbiased; to nearest, half of them saturate (the test would see a bias)."""
    x = torch.rand(512, 16) * torch.logspace(-1, 3, 512)[:, None]  # all scales within reach
    cast = Cast("e2m1", Scale("e4m3", 16, scale_rounding), "stochastic")
    place = x.argmax(1, keepdim=True)
    draws = torch.stack([quantize(x, cast, key=key).dequantize().gather(1, place)[:, 0] for key in range(64)])
    top = x.gather(1, place)[:, 0]
    relative = ((draws.mean(0) - top) / top).double()
    error = relative.std() / len(top) ** 0.5
    if biased:
        assert relative.mean() < -0.005, f"scales to nearest should bias block maxima, found {relative.mean():.2e}"
    else:
        spread = (draws / top).double().var(0).mean().sqrt() / draws.numel() ** 0.5
        assert relative.mean().abs() < 4 * spread, f"bias of block maxima {relative.mean():.2e} ± {error:.1e}"


# --- shapes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [16, (16, 16)])
@pytest.mark.parametrize("dim", [0, 1])
def test_ragged_is_zero_padded(block: Any, dim: int) -> None:
    x = sample(13, 100)
    padded = torch.zeros(16, 112)
    padded[:13, :100] = x
    for rounding in ("nearest", "stochastic"):
        cast = Cast("e2m1", Scale("e4m3", block, two_level=True), rounding)
        found, whole = quantize(x, cast, dim, key=4), quantize(padded, cast, dim, key=4)
        rows, columns = (13, 100) if block == 16 else (16, 112)
        if rounding == "nearest" or (block, dim) == (16, 1):  # otherwise padding of the other side shifts the indices
            same(found.codes, whole.codes[:13, :100], f"{cast} along {dim}, codes")
            same(found.dequantize(), whole.dequantize()[:13, :100], f"{cast} along {dim}, values")
        scales = whole.scales.float()[: rows if dim else 16, : columns if not dim else 112]
        same(found.scales.float(), scales, f"{cast} along {dim}, scales")


@pytest.mark.parametrize("shape", [(40,), (7, 40), (3, 5, 40), (2, 3, 5, 18)])
def test_every_dimension(shape: tuple[int, ...]) -> None:
    x = sample(*shape)
    for rounding, dim in itertools.product(("nearest", "stochastic"), range(-len(shape), len(shape))):
        cast = Cast("e2m1", Scale("e4m3", 16, two_level=True), rounding)
        found = quantize(x, cast, dim, key=6)
        expected = list(shape)
        expected[dim] = -(-shape[dim] // 16)
        assert found.codes.shape == shape
        assert found.codes.dtype == torch.uint8
        assert found.scales.shape == tuple(expected), f"scales along {dim} of {shape}"
        assert found.dequantize(torch.bfloat16).dtype == torch.bfloat16
        if rounding == "nearest":
            same(found.dequantize(), reference.quantize(x, cast, dim, field="dequantized"), f"{shape} along {dim}")
        positive = quantize(x, cast, dim % len(shape), key=6)
        same_bytes(positive, found, f"{shape} along {dim} and {dim % len(shape)}")


@pytest.mark.parametrize("shape", [(0,), (0, 32), (3, 0), (2, 0, 16), (2, 3, 0)])
@pytest.mark.parametrize(
    "cast", [NVFP4, replace(NVFP4, rounding="stochastic"), Cast("int4", Scale("e5m2", 8))], ids=str
)
def test_empty(shape: tuple[int, ...], cast: Cast) -> None:
    for dim in range(-len(shape), len(shape)):
        found = quantize(torch.empty(shape), cast, dim, key=0)
        assert found.codes.shape == found.dequantize().shape == shape
        if found.tensor_scale is not None:
            assert found.tensor_scale == 1


@pytest.mark.parametrize(
    "view",
    [lambda x: x.t(), lambda x: x[::2], lambda x: x[:, 3:51], lambda x: x[:, ::3], lambda x: x[:1].expand(9, -1)],
    ids=["transposed", "every second row", "columns 3 to 51", "every third column", "expanded"],
)
@pytest.mark.parametrize("block", [16, (16, 16)])
def test_non_contiguous(view: Callable[[Tensor], Tensor], block: Any) -> None:
    x = view(sample(48, 64))
    assert not x.is_contiguous()
    before = x.clone()
    for dim in (0, 1):
        cast = Cast("e2m1", Scale("e4m3", block, two_level=True), "stochastic")
        same_bytes(quantize(x, cast, dim, key=1), quantize(x.contiguous(), cast, dim, key=1), f"along {dim}")
        operand, other = (quantize_operand(t, cast, dim, torch.tensor(1)) for t in (x, x.contiguous()))
        same(operand.values, other.values, f"operand along {dim}")
    same(x, before, "the input was changed")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_floating_point_dtypes(dtype: torch.dtype) -> None:
    x = sample(4, 64).clamp(-1e4, 1e4).to(dtype)
    same_bytes(quantize(x, NVFP4), quantize(x.float(), NVFP4), str(dtype))


def test_quantised_tensors_do_not_require_gradients() -> None:
    found = quantize(sample(4, 32).requires_grad_(), NVFP4)
    assert found.tensor_scale is not None
    for name, tensor in {
        "scales": found.scales,
        "tensor_scale": found.tensor_scale,
        "values": found.dequantize(),
    }.items():
        assert not tensor.requires_grad, f"{name}: rounding has no derivative, yet a graph was recorded"


# --- operands ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("element", ELEMENT_FORMATS)
@pytest.mark.parametrize("scale_format", BLOCK_SCALES)
def test_fits_bfloat16(element: str, scale_format: str) -> None:
    left, right = (reference.magnitudes(name) for name in (element, scale_format))
    products = torch.from_numpy(np.unique(np.outer(left, right)))
    exact = bool((products.bfloat16().double() == products).all())
    assert Cast(element, Scale(scale_format)).fits_bfloat16 == exact, (
        f"{element} times {scale_format}: exact is {exact}"
    )


@pytest.mark.parametrize("element", ELEMENT_FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operand_is_codes_times_scales(element: str, dtype: torch.dtype) -> None:
    x = sample(18, 40, dtype=dtype)
    for cast, (rounding, dim) in itertools.product(casts_of(element), (("nearest", -1), ("stochastic", 0))):
        mode = replace(cast, rounding=rounding)
        key = torch.tensor(9)
        stored = quantize(x, mode, dim, key)
        scales = float_scales(stored).repeat_interleave(16, dim)[:18, :40]
        product = mode.format.decode(stored.codes).double() * scales.double()
        for exact in (False, True):
            operand = quantize_operand(x, mode, dim, key, exact=exact)
            wanted = torch.float32 if exact or not mode.fits_bfloat16 else dtype
            assert operand.values.dtype == wanted, f"{mode} of {dtype}: {operand.values.dtype}"
            same(operand.values.double(), product, f"{mode} of {dtype} along {dim}, codes * scales")
        if stored.tensor_scale is None:
            assert operand.factor is None
            same(stored.dequantize().double(), product, f"{mode}, values")
        else:
            same(operand.factor, stored.tensor_scale, f"{mode}, factor")
            expected = mode.format.decode(stored.codes) * (scales * stored.tensor_scale)
            same(stored.dequantize(), expected, f"{mode}, values")


def test_float16_operands_do_not_overflow() -> None:
    """codes * scales are exact in bfloat16; in float16, the largest ones of some casts are infinite."""
    x = sample(4, 64).clamp(-1e4, 1e4).half()
    for cast in itertools.chain(*map(casts_of, ELEMENT_FORMATS)):
        stored = quantize(x, cast)
        product = cast.format.decode(stored.codes).double() * float_scales(stored).repeat_interleave(16, 1).double()
        same(quantize_operand(x, cast, -1).values.double(), product, f"{cast} of float16")


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quantize(torch.ones(4, 16), Cast(rounding="stochastic")), "needs a key"),
        (lambda: quantize(torch.ones(4, 16, dtype=torch.int32), NVFP4), r"got torch\.int32"),
        (lambda: quantize(torch.ones(4, 16, dtype=torch.bool), NVFP4), r"got torch\.bool"),
        (lambda: quantize(torch.ones(4, 16, 16), NVFP4_TILES), r"\(4, 16, 16\)"),
        (lambda: quantize(torch.ones(16), NVFP4_TILES), r"\(16,\)"),
        (lambda: quantize(torch.ones(()), NVFP4), r"\(\)"),
        (lambda: quantize(torch.ones(4, 16), Cast(scale=Scale()), amax=torch.tensor(1.0)), "two_level=True"),
        (lambda: Cast("ternry"), "Unknown element format 'ternry'. Did you mean 'ternary'"),
        (lambda: Cast("E2M1"), "Unknown element format 'E2M1'"),
        (lambda: Cast(4), "Unknown element format 4"),
        (lambda: Cast(rounding="stochastc"), "Unknown rounding 'stochastc'. Did you mean 'stochastic'"),
        (lambda: Cast(scale="e4m3"), "Cast.scale is a Scale or a mapping of its fields; got 'e4m3'"),
        (lambda: Cast(scale=None), "Cast.scale is a Scale"),
        (lambda: Cast(scale={"blok": 16}), "Unknown field of Scale 'blok'. Did you mean 'block'"),
        (lambda: Scale("e4m4"), "Unknown scale format 'e4m4'. Did you mean 'e4m3'"),
        (lambda: Scale("e8m0"), "Unknown scale format 'e8m0'"),
        (lambda: Scale(rounding="upp"), "Unknown rounding of scales 'upp'. Did you mean 'up'"),
        (lambda: Scale(two_level=1), "two_level is true or false; got 1"),
        (lambda: Scale(two_level="no"), "two_level is true or false; got 'no'"),
        *[
            (lambda block=block: Scale(block=block), "Scale.block is a positive number")
            for block in (0, -1, True, 1.5, (16,), "x", None, (16, 0), (16, True), (16, 16, 16), [16], [16, 1.5], {})
        ],
    ],
)
def test_errors(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(("shape", "dim"), [((4, 16), 2), ((4, 16), 5), ((4, 16), -3), ((16,), 1), ((16,), -2)])
def test_a_dimension_that_does_not_exist(shape: tuple[int, ...], dim: int) -> None:
    with pytest.raises((ValueError, IndexError), match="(?i)dim"):
        quantize(torch.ones(shape), NVFP4, dim)


def test_an_unknown_backend() -> None:
    with pytest.raises(ValueError, match="'auto', 'eager' or 'compiled'"), kernels.backend("fast"):
        pass


def test_casts_are_values() -> None:
    cast = Cast("e2m1", Scale("e4m3", [16, 16], "up", True), "stochastic")
    same_cast = Cast(scale={"block": (16, 16), "rounding": "up", "two_level": True}, rounding="stochastic")
    assert cast == same_cast
    assert hash(cast) == hash(same_cast)
    assert cast != replace(cast, rounding="nearest")
    assert Cast.from_spec(cast.spec) == cast
    assert str(cast) == "e2m1/e4m3:16x16+fp32^~"
    assert str(Cast("int4", Scale("e5m2", 128))) == "int4/e5m2:1x128"
