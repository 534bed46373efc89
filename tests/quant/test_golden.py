"""Golden vectors: what independent implementations computed, bit for bit. ``tests/golden_vectors.py`` loads them.

-0 folds into 0 on their side (ours never emits it). A block whose scale is 0 decodes to 0 whatever its codes, so codes
under a zero scale are not compared. Non-finite elements follow our own rule: they decode to NaN.
"""

import numpy as np
import pytest
import torch

from lightning_lowbit import Cast, LinearCasts, Scale, compilation, quantize
from lightning_lowbit.quant import Hadamard, rotate
from tests import golden_vectors as golden
from tests.quant.tensors import NVFP4, NVFP4_TILES, float_scales, same, sample
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
PEER_CASES = sorted(set(golden.cases("nvfp4_1x16")) - set(FINITE_CASES))


def check_nvfp4(found, case, name, prefix="", scale="scale"):
    """``scale`` is the field with as many scales as we have; ``{prefix}scale`` has one per row in any case."""
    stored = case[scale].T if (scale, prefix) == ("block_scale", "t_") else case[scale]
    equal(found.scales, stored, None, f"{name}: scales")
    not_zero = case[f"{prefix}scale"].repeat(16, axis=1) != 0
    equal(found.codes, codes_of(case, f"{prefix}codes"), not_zero, f"{name}: codes")
    encode = case.get(f"{prefix}encode_scale", case.get("encode_scale"))
    assert found.tensor_scale.item() == np.float32(1) / encode, f"{name}: tensor scale"
    values = case.get(f"{prefix}deq_reciprocal", case[f"{prefix}deq"])
    np.testing.assert_allclose(found.dequantize().numpy(), values, rtol=3e-7, atol=0, err_msg=f"{name}: values")


@each("name", FINITE_CASES)
def test_nvfp4(name):
    case = golden.case("nvfp4_1x16", name)
    rows, columns = quantize(case["x"], NVFP4), quantize(case["x"].t(), NVFP4, dim=0)
    check_nvfp4(rows, case, name)
    same(columns.codes.t(), rows.codes, f"{name}: blocks along columns, codes")
    same(columns.scales.view(torch.uint8).t(), rows.scales.view(torch.uint8), f"{name}: blocks along columns, scales")
    same(columns.dequantize().t(), rows.dequantize(), f"{name}: blocks along columns, values")


@each("name", golden.cases("nvfp4_16x16"))
def test_nvfp4_tiles(name):
    case = golden.case("nvfp4_16x16", name)
    check_nvfp4(quantize(case["x"], NVFP4_TILES), case, name, scale="block_scale")
    check_nvfp4(quantize(case["x"].t(), NVFP4_TILES), case, f"{name} transposed", "t_", "block_scale")


@pytest.mark.parametrize("name", PEER_CASES)
def test_non_finite_inputs(name):
    x = golden.case("nvfp4_1x16", name)["x"]
    found = quantize(x, NVFP4)
    bad = ~x.isfinite()
    bad_block = bad.unflatten(1, (-1, 16)).any(-1)
    values = found.dequantize()
    assert bad.any()
    assert values[bad].isnan().all(), f"{name}: a non-finite element became {values[bad].tolist()}"
    assert values[~bad_block.repeat_interleave(16, 1)].isfinite().all(), f"{name}: the damage leaves its block"
    same(found.scales.float().isnan(), bad_block, f"{name}: scales that are NaN")


# --- MXFP4, MXFP6, MXFP8 ----------------------------------------------------------------------------------------------

MX_FILES = ("mxfp4", "mxfp6", "mxfp8")


def mx_modes(file, name):
    """The combinations of element and rule that a case has, such as ``e2m1_floor``."""
    fields = golden.case(file, name)
    return sorted({field.split("/")[0] for field in fields if field.endswith("/codes")})


def check_mx(file, name, mode):
    case = golden.case(file, name)
    element, rounding = mode.split("_")
    cast = Cast(element, Scale("e8m0", 32, rounding))
    found = quantize(case["x"], cast)
    message, finite = f"{file} {name} {mode}", case["finite"]
    equal(found.scales, np.where(finite, case[f"{mode}/scale"], 255), None, f"{message}: scales")
    in_finite = finite.repeat(32, axis=1)[:, : found.codes.shape[1]]
    equal(found.codes, codes_of(case, f"{mode}/codes", cast.format.bits), in_finite, f"{message}: codes")
    same(~found.dequantize().isnan(), torch.from_numpy(in_finite), f"{message}: which elements are NaN")


@each(("file", "name"), [(file, name) for file in MX_FILES for name in golden.cases(file)])
def test_mx(file, name):
    for mode in mx_modes(file, name):
        check_mx(file, name, mode)


def test_mx_covers_every_element_and_rule():
    found = {mode for file in MX_FILES for name in golden.cases(file) for mode in mx_modes(file, name)}
    rules = {f"{element}_{rule}" for element in ("e2m1", "e2m3", "e4m3") for rule in ("floor", "ceil", "even", "rceil")}
    assert found >= rules | {f"{element}_{rule}" for element in ("e3m2", "e5m2") for rule in ("floor", "even", "rceil")}


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
    check_rotated(quantize(y, NVFP4, dim=0), case, name)
    plain = {field: case[field] for field in ("codes", "scale", "encode_scale")}
    found = quantize(case["x"], NVFP4)
    equal(found.scales, plain["scale"], None, f"{name}: scales without rotation")
    equal(found.codes, codes_of(plain, "codes"), plain["scale"].repeat(16, axis=1) != 0, f"{name}: codes without it")


def check_rotated(found, case, name):
    sure = ~case["ambiguous_t"].reshape(len(case["t_scale"]), -1, 16).any(-1)
    equal(found.scales.view(torch.uint8).t(), case["t_scale"], sure, f"{name}: scales")
    where = (sure & (case["t_scale"] != 0)).repeat(16, axis=1)
    equal(found.codes.t(), codes_of(case, "t_codes"), where, f"{name}: codes")
    assert found.tensor_scale.item() == np.float32(1) / case["t_encode_scale"], f"{name}: tensor scale"
    values = found.dequantize().t().numpy()
    np.testing.assert_allclose(values[where], case["t_deq"][where], rtol=3e-7, atol=0, err_msg=f"{name}: values")


# --- 4/6 --------------------------------------------------------------------------------------------------------------


def four_over_six(name, mode):
    """A case in one mode, such as ``mse256``, and what we make of it."""
    case = golden.case("nvfp4_4over6", name)
    block = (16, 16) if "2d" in name else 16
    cast = Cast("e2m1", Scale("e4m3", block, two_level=True, top=float(mode[3:]), four_over_six=mode[:3]))
    fields = {key.removeprefix(f"{mode}/"): value for key, value in case.items() if key.startswith(f"{mode}/")}
    return fields, quantize(case["x"], cast)


def check_four_over_six(name, mode):
    case, found = four_over_six(name, mode)
    rows = 16 if "2d" in name else 1  # a tile's scale is stored once per row
    sure = ~case["ambiguous"]
    scales = found.scales.view(torch.uint8).repeat_interleave(rows, 0)
    equal(scales, case["scale"], sure, f"{name} {mode}: scales")
    where = (sure & (case["scale"] != 0)).repeat(16, axis=1)
    equal(found.codes, codes_of(case, "codes"), where, f"{name} {mode}: codes")
    assert found.tensor_scale.item() == np.float32(1) / case["encode_scale"], f"{name} {mode}: tensor scale"
    where = sure.repeat(16, axis=1)
    np.testing.assert_allclose(
        found.dequantize().numpy()[where], case["deq"][where], rtol=3e-7, atol=0, err_msg=f"{name} {mode}: values"
    )


@each("name", golden.cases("nvfp4_4over6"))
def test_four_over_six(name):
    modes = {field.split("/")[0] for field in golden.case("nvfp4_4over6", name) if field.endswith("/codes")}
    assert modes >= {"mae448", "mse256"}
    for mode in sorted(modes):
        check_four_over_six(name, mode)


def test_four_over_six_takes_both():
    """The golden cases tell the two maps apart: some blocks take 4, some 6."""
    picks = np.concatenate([golden.case("nvfp4_4over6", "randn_bf16")[f"{m}/pick4"].ravel() for m in ("mse256",)])
    assert 0.1 < picks.mean() < 0.9


# --- BitNet -----------------------------------------------------------------------------------------------------------

BITNET = LinearCasts.preset("ternary")
BITNET_CASES = {name: golden.case("bitnet", name) for name in golden.cases("bitnet")}
WEIGHTS = [name for name, case in BITNET_CASES.items() if "w" in case]
ACTIVATIONS = [name for name, case in BITNET_CASES.items() if "x" in case]
LAYERS = [name for name, case in BITNET_CASES.items() if "layer_x" in case]
TWO_ULPS = 2.0**-22
"""What codes * mean and codes / (1 / mean) differ by at most."""


def test_every_case_of_bitnet_is_used():
    assert {*WEIGHTS, *ACTIVATIONS, *LAYERS} == set(BITNET_CASES)
    assert (len(WEIGHTS), len(ACTIVATIONS), len(LAYERS)) == (9, 3, 2)


@each("name", WEIGHTS)
def test_ternary_weights(name):
    """Codes are those of float64 in every case, and the scale is that of the float64 mean, rounded once."""
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
            check_rotated(quantize(y, NVFP4, dim=0), case, f"{name} compiled")


# Magnitudes of float32 from the smallest subnormal to the largest, in blocks of 32, and what is beyond.
EDGES = torch.cat([torch.logspace(-149, 127, 277, 2), torch.tensor([3.4028235e38, 0.0, torch.inf, torch.nan])]).float()


@pytest.mark.fast("e4m3/fp32:row(power_of_two)-0", "int8/fp32:tensor--1")
@pytest.mark.parametrize(
    ("cast", "dim"),
    [
        (Cast("e1m2", Scale("e8m0", 32, "ceil")), -1),
        (Cast("e4m3", Scale("fp32", "row", "power_of_two")), 0),
        (Cast("int8", Scale("fp32", "tensor")), -1),
        (Cast("int8", Scale("fp32", "row", statistic="minmax")), -1),
        (Cast("int4", Scale("fp32", 32, factor=0.8, epsilon=1e-5)), -1),
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
                found[backend] = quantize(part, cast, dim)
        values = {backend: quantized.elements() for backend, quantized in found.items()}
        same(values["compiled"], values["eager"], f"{cast} compiled, values of codes")  # the sign of a NaN is no matter
        same(float_scales(found["compiled"]), float_scales(found["eager"]), f"{cast} compiled, scales")
    if cast.scale.format == "e8m0":
        assert {0, 254} <= set(found["compiled"].scales.view(torch.uint8).flatten().tolist())


def test_compiled_code_sees_an_infinity_that_amax_hides():
    x = sample(8, 64)
    x[2, 5], x[3, 6] = torch.inf, torch.nan
    with compilation.backend("compiled"):
        found = quantize(x, Cast("int8", Scale("fp32", "tensor")), amax=torch.tensor(3.0)).dequantize()
    assert found[2, 5].isnan(), f"inf became {found[2, 5]}"
    assert found[3, 6].isnan(), f"NaN became {found[3, 6]}"
