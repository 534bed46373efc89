"""Golden vectors: what independent implementations computed, bit for bit. ``tests/golden_vectors.py`` loads them.

-0 folds into 0 on their side (ours never emits it). A block whose scale is 0 decodes to 0 whatever its codes, so codes
under a zero scale are not compared. Non-finite elements follow our own rule: they decode to NaN.
"""

import numpy as np
import pytest
import torch

from lightning_lowbit import Cast, LinearCasts, Scale, compilation, quantize
from lightning_lowbit.quant import Hadamard, quantize_operand, rotate
from lightning_lowbit.quant.shard import Shard
from tests import golden_vectors as golden
from tests.quant.tensors import NVFP4, NVFP4_TILES, float_scales, ragged, same, sample
from tests.references import quantize as reference
from tests.tables import each

CPU = torch.device("cpu")


def codes_of(case, field, bits=4):
    """Golden codes, -0 folded into 0."""
    return np.where(case[field] == 1 << (bits - 1), 0, case[field])


def equal(found, expected, where, message):
    found = found.view(torch.uint8).numpy()
    where = np.ones(expected.shape, bool) if where is None else np.broadcast_to(where, expected.shape)
    np.testing.assert_array_equal(found[where], expected[where], err_msg=message)


# --- NVFP4 ------------------------------------------------------------------------------------------------------------

FINITE_CASES = [name for name in golden.cases("nvfp4_1x16") if not golden.case("nvfp4_1x16", name)["peer_only"]]


def check(found, case, message, prefix="", ambiguous=False, transposed=False):
    """Scales, codes but under scales of 0, the scale of the tensor, and values, of blocks that are not ambiguous."""
    parts = found.codes, found.scales.view(torch.uint8), found.dequantize()
    codes, scales, values = (part.t() if transposed else part for part in parts)
    scales = scales.repeat_interleave(len(codes) // len(scales), 0)  # golden ones of tiles stand in each row
    expected = case[f"{prefix}scale"]
    sure = np.broadcast_to(np.logical_not(ambiguous), expected.shape)
    equal(scales, expected, sure, f"{message}: scales")
    equal(codes, codes_of(case, f"{prefix}codes"), (sure & (expected != 0)).repeat(16, axis=1), f"{message}: codes")
    encode = case.get(f"{prefix}encode_scale", case.get("encode_scale"))
    assert found.tensor_scale.item() == np.float32(1) / encode, f"{message}: tensor scale"
    decoded, where = case.get(f"{prefix}deq_reciprocal", case[f"{prefix}deq"]), sure.repeat(16, axis=1)
    np.testing.assert_allclose(values.numpy()[where], decoded[where], rtol=3e-7, atol=0, err_msg=f"{message}: values")


@each("name", FINITE_CASES)
def test_nvfp4(name):
    case = golden.case("nvfp4_1x16", name)
    check(quantize(case["x"], NVFP4), case, name)
    check(quantize(case["x"].t(), NVFP4, dim=0), case, f"{name}: blocks along columns", transposed=True)


@each("name", golden.cases("nvfp4_16x16"))
def test_nvfp4_tiles(name):
    case = golden.case("nvfp4_16x16", name)
    check(quantize(case["x"], NVFP4_TILES), case, name)
    check(quantize(case["x"].t(), NVFP4_TILES), case, f"{name} transposed", "t_")


# --- MXFP4, MXFP6, MXFP8 ----------------------------------------------------------------------------------------------


@each(("file", "name"), [(file, name) for file in ("mxfp4", "mxfp6", "mxfp8") for name in golden.cases(file)])
def test_mx(file, name):
    case = golden.case(file, name)
    finite = case["finite"]
    for mode in sorted({field.split("/")[0] for field in case if field.endswith("/codes")}):
        element, rounding = mode.split("_")
        cast = Cast(element, Scale("e8m0", 32, rounding))
        found, message = quantize(case["x"], cast), f"{file} {name} {mode}"
        equal(found.scales, np.where(finite, case[f"{mode}/scale"], 255), None, f"{message}: scales")
        in_finite = finite.repeat(32, axis=1)[:, : found.codes.shape[1]]
        equal(found.codes, codes_of(case, f"{mode}/codes", cast.format.bits), in_finite, f"{message}: codes")
        same(~found.dequantize().isnan(), torch.from_numpy(in_finite), f"{message}: which elements are NaN")


# --- the Hadamard transform of NVFP4 ----------------------------------------------------------------------------------


def rotated(name):
    """A case and its x, rotated along tokens."""
    case = golden.case("nvfp4_rht", name)
    signs = torch.from_numpy(case["signs"]).float()
    if not name.startswith("no_signs"):
        same(Hadamard(16).diagonal(None, CPU), signs, "fixed signs")
    return case, rotate(case["x"], signs, 0)


def test_hadamard_matrix():
    file = golden.load("nvfp4_rht")
    expected = torch.from_numpy(file["transform_bf16"].view(np.int16)).view(torch.bfloat16).float()
    same(rotate(torch.eye(16), Hadamard(16).diagonal(None, CPU), 1), expected, "diag(signs) H / 4")


@each("name", golden.cases("nvfp4_rht"))
def test_hadamard(name):
    case, y = rotated(name)
    assert y.dtype == torch.bfloat16
    sure = ~case["ambiguous_t"]
    bits = y.t().contiguous().view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(bits[sure], case["rht_t"][sure], err_msg=f"{name}: bits of the rotated operand")
    check_rotated(y, case, name)
    found = quantize(case["x"], NVFP4)
    equal(found.scales, case["scale"], None, f"{name}: scales without rotation")
    equal(found.codes, codes_of(case, "codes"), case["scale"].repeat(16, axis=1) != 0, f"{name}: codes without it")


def check_rotated(y, case, name):
    ambiguous = case["ambiguous_t"].reshape(len(case["t_scale"]), -1, 16).any(-1)
    check(quantize(y, NVFP4, dim=0), case, name, "t_", ambiguous, transposed=True)


# --- 4/6 --------------------------------------------------------------------------------------------------------------


@each("name", golden.cases("nvfp4_4over6"))
def test_four_over_six(name):
    case, block = golden.case("nvfp4_4over6", name), (16, 16) if "2d" in name else 16
    modes = {field.split("/")[0] for field in case if field.endswith("/codes")}
    assert modes >= {"mae448", "mse256"}
    for mode in sorted(modes):
        cast = Cast("e2m1", Scale("e4m3", block, two_level=True, top=float(mode[3:]), four_over_six=mode[:3]))
        check(quantize(case["x"], cast), case, f"{name} {mode}", f"{mode}/", case[f"{mode}/ambiguous"])


# --- BitNet -----------------------------------------------------------------------------------------------------------

BITNET = LinearCasts.preset("ternary")
BITNET_CASES = {name: golden.case("bitnet", name) for name in golden.cases("bitnet")}
WEIGHTS = [name for name, case in BITNET_CASES.items() if "w" in case]
ACTIVATIONS = [name for name, case in BITNET_CASES.items() if "x" in case]
TWO_ULPS = 2.0**-22  # what codes * mean and codes / (1 / mean) differ by at most


@each("name", WEIGHTS)
def test_ternary_weights(name):
    case, found = BITNET_CASES[name], quantize(BITNET_CASES[name]["w"], BITNET.fprop_w)
    np.testing.assert_array_equal(found.elements().numpy(), case["codes"], err_msg=f"{name}: codes")
    np.testing.assert_array_equal(found.codes.numpy(), case["codes"] + 1, err_msg=f"{name}: stored codes")
    one, mean = np.float32(1), np.maximum(np.float32(case["absmean_float64"]), np.float32(1e-5))
    assert found.scales.item() == one / (one / mean), f"{name}: scale"
    # Peers store it in two ways: to divide by, and to multiply with.
    for stored in (one / case["weight_scale_bitlinear"], case["weight_scale_autobitlinear"]):
        np.testing.assert_allclose(found.scales.flatten(), stored, rtol=TWO_ULPS, atol=0, err_msg=f"{name}: scale")
    values = found.dequantize().numpy()
    np.testing.assert_allclose(values, case["deq"], rtol=TWO_ULPS, atol=0, err_msg=f"{name}: values")


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_int8_activations_of_bitnet(name):
    case, found = BITNET_CASES[name], quantize(BITNET_CASES[name]["x"], BITNET.fprop_x)
    sure = ~case["act_ambiguous"]
    np.testing.assert_array_equal(found.elements().numpy()[sure], case["act_codes"][sure], err_msg=f"{name}: codes")
    scale = np.float32(1) / case["act_scale_correctly_rounded"]
    np.testing.assert_array_equal(found.scales.numpy(), scale, err_msg=f"{name}: scales")
    values = found.dequantize().numpy()[sure]
    np.testing.assert_allclose(values, case["act_deq"][sure], rtol=TWO_ULPS, atol=0, err_msg=f"{name}: values")


# --- compiled code ----------------------------------------------------------------------------------------------------
# Few layouts and dtypes: each further one takes seconds to generate.


@pytest.mark.slow
def test_compiled_hadamard():
    with compilation.backend("compiled"):
        for name in ("randn", "outlier_tokens", "zero_tokens", "integers"):
            case, y = rotated(name)
            check_rotated(y, case, f"{name} compiled")


# Magnitudes of float32 from the smallest subnormal to the largest, in blocks of 32, and what is beyond.
EDGES = torch.cat([torch.logspace(-149, 127, 277, 2), torch.tensor([3.4028235e38, 0.0, torch.inf, torch.nan])]).float()


@pytest.mark.fast("e4m3/fp32:row(power_of_two)-0")
@pytest.mark.parametrize(
    ("cast", "dim"),
    [
        (Cast("e1m2", Scale("e8m0", 32, "ceil")), -1),
        (Cast("e4m3", Scale("fp32", "row", "power_of_two")), 0),
        (Cast("int8", Scale("fp32", "tensor")), -1),
        (Cast("int8", Scale("fp32", "row", statistic="minmax")), -1),
        (Cast("int4", Scale("fp32", 32, factor=0.8, epsilon=1e-5)), -1),
        (Cast("int4", Scale("fp32", statistic="minmax")), -1),
        (Cast("int8", Scale("fp32", "tensor", statistic="minmax")), -1),
        (Cast("int3", Scale("fp32", "row", statistic="minmax"), "stochastic"), 0),
        (Cast("int8", Scale("fp32", (4, 16), factor=0.8, epsilon=0.5), "stochastic"), -1),
        (Cast("ternary", Scale("fp32", "tensor", statistic="absmean", factor=1.25, epsilon=1e-5)), -1),
        (NVFP4, -1),
        (NVFP4_TILES, -1),
        *((NVFP4.replace(scale={"top": 256, "four_over_six": measure}), -1) for measure in ("mse", "mae")),
    ],
    ids=str,
)
def test_compiled_equals_eager_to_the_last_exponent(cast, dim):
    """E8M0 bytes 0 and 254 included, subnormal elements and scales, a NaN or an infinity in a block."""
    x = torch.linspace(-1, 1, 32) * EDGES[:, None]
    x = x if dim == -1 else x.t()
    for part in (x, x[:, :-2] if dim == 0 else x[:-2]):  # with and without what is not finite
        found = {}
        for backend in ("eager", "compiled"):
            with compilation.backend(backend):
                found[backend] = quantize(part, cast, dim, key=12345)
        values = {backend: quantized.elements() for backend, quantized in found.items()}
        same(values["compiled"], values["eager"], f"{cast} compiled, values of codes")  # the sign of a NaN is no matter
        same(float_scales(found["compiled"]), float_scales(found["eager"]), f"{cast} compiled, scales")
    if cast.scale.format == "e8m0":
        assert {0, 254} <= set(found["compiled"].scales.view(torch.uint8).flatten().tolist())


def test_compiled_operands_equal_reference():
    """In bfloat16, rounded to it: what a layer computes with."""
    x, cast = ragged(1), Cast("int4", Scale("fp32", 16, statistic="minmax"), round_to_bfloat16=True)
    with compilation.backend("compiled"):
        found = quantize_operand(x, cast, -1).values
    same(found, reference.quantize(x, cast, field="dequantized").bfloat16(), f"{cast} compiled")


def test_compiled_shards_have_the_random_bits_of_the_whole():
    x, cast, key = ragged(1), Cast("e2m1", Scale("e4m3", 16), "stochastic"), torch.tensor(5)
    whole, rows = quantize_operand(x, cast, 1, key).values, len(x) // 2
    with compilation.backend("compiled"):
        found = quantize_operand(x[rows:], cast, 1, key, shard=Shard("group", 0, rows, len(x) - rows, len(x))).values
    same(found, whole[rows:], "compiled")


def test_compiled_code_sees_an_infinity_that_amax_hides():
    x = sample(8, 64)
    x[2, 5], x[3, 6] = torch.inf, torch.nan
    with compilation.backend("compiled"):
        found = quantize(x, Cast("int8", Scale("fp32", "tensor")), amax=torch.tensor(3.0)).dequantize()
    assert found[2, 5].isnan(), f"inf became {found[2, 5]}"
    assert found[3, 6].isnan(), f"NaN became {found[3, 6]}"
