"""Every format against its definition (enumerated) and, where another library has it, against that library."""

import ml_dtypes
import numpy as np
import torch

from lightning_lowbit.formats import ELEMENT_FORMATS, SCALE_FORMATS, integer, table
from lightning_lowbit.quant.rounding import round_nearest, round_up
from tests.golden_vectors import load
from tests.references import quantize as reference
from tests.tables import each

ORACLE = load("formats")
HAS_ORACLE = {str(name) for name in ORACLE["formats"]}
assert {*ELEMENT_FORMATS, *SCALE_FORMATS} >= HAS_ORACLE, "a golden format is missing from the package"
# fp32 scales are float32 numbers: there is nothing to encode, and no table of 2^32 codes.
ALL_FORMATS = {name: format for name, format in (ELEMENT_FORMATS | SCALE_FORMATS).items() if format.bits <= 8}
# Unsigned scales with subnormals. E8M0 has no zero and no subnormals.
BLOCK_SCALES = [name for name in SCALE_FORMATS if name not in ("e8m0", "bf16", "fp16", "fp32")]
ML_DTYPES = {
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e8m0": ml_dtypes.float8_e8m0fnu,
}


def expected_table(name):
    """Code -> value, NaN where a code is no finite number."""
    if name == "e8m0":
        return ORACLE["e8m0/table"]
    positive = reference.magnitudes(name)
    if name == "ternary":
        return np.array([-1, 0, 1, np.nan])
    if name.startswith("int"):
        return np.concatenate([positive, [-positive[-1] - 1], -positive[:0:-1]])
    bits = 1 + int(name[1]) + int(name[3])
    half = np.append(positive, np.full(2 ** (bits - 1) - len(positive), np.nan))
    return np.concatenate([half, -half]) if name in ELEMENT_FORMATS else half


def probes(name):
    """All values and midpoints of a format with their float32 neighbors, both signs, far out, subnormal, zero."""
    grid = reference.magnitudes(name)
    exact = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2]).astype(np.float32)
    infinity = np.float32(np.inf)
    x = np.concatenate([exact, np.nextafter(exact, infinity), np.nextafter(exact, -infinity)])
    tiny = np.float32([2.0**-149, 2.0**-126, 1e-38, reference.FLOAT32_MAX, np.inf, np.nan, grid[-1] * 1.01, 0.0])
    x = np.concatenate([x, tiny])
    return np.concatenate([x, -x])


@each("name", ALL_FORMATS)
def test_table(name):
    format, expected = ALL_FORMATS[name], expected_table(name)
    found = table(format).numpy()
    assert format.name == name
    assert found.shape == (2**format.bits,), f"{name}: {found.shape} codes"
    np.testing.assert_array_equal(np.where(np.isinf(found), np.nan, found), expected, err_msg=f"table of {name}")
    if name in HAS_ORACLE:
        stored = ORACLE[f"{name}/table"]  # ternary: without the code that means nothing
        np.testing.assert_array_equal(found[: len(stored)], stored, err_msg=f"{name} against its golden table")
    assert format.max == np.nanmax(expected) == ORACLE.get(f"{name}/max", format.max)


@each("name", ALL_FORMATS)
def test_codes_round_trip(name):
    format = ALL_FORMATS[name]
    codes = torch.arange(2**format.bits, dtype=torch.uint8)
    values = format.decode(codes)
    assert values.dtype == torch.float32
    assert format.encode(values).dtype == torch.uint8
    numbers = values.isfinite()
    assert (format.decode(format.encode(torch.zeros(1))) == 0) or name == "e8m0"
    expected = torch.where(values == 0, format.encode(torch.zeros(())), codes)  # -0 folds into 0
    assert torch.equal(format.encode(values)[numbers], expected[numbers]), f"{name}: encode(decode(code)) != code"
    shaped = values[numbers].clone().expand(2, 1, -1).transpose(0, 2)
    assert torch.equal(format.decode(format.encode(shaped)), shaped), f"{name}: shape or strides matter"
    code = format.encode(torch.tensor([torch.nan, -torch.nan]))
    assert (code.int() < 2**format.bits).all(), f"{name}: NaN is encoded as {code.tolist()}, beyond the table"
    if table(format).isnan().any() and name != "ternary":  # ternary's fourth code stands for nothing
        assert format.decode(code).isnan().all(), f"{name} has a NaN, yet encodes NaN as {format.decode(code).tolist()}"


@each("name", ELEMENT_FORMATS)
def test_nearest(name):
    x, format = probes(name), ELEMENT_FORMATS[name]
    found = round_nearest(torch.from_numpy(x), format)
    np.testing.assert_array_equal(found.numpy(), reference.nearest(x, name).astype(np.float32), err_msg=name)
    numbers = found[~found.isnan()]
    assert torch.equal(format.decode(format.encode(numbers)), numbers), f"{name}: a rounded number has no code"


@each("name", sorted(HAS_ORACLE & set(ELEMENT_FORMATS)))
@each("probe", ["own", "common"])
def test_nearest_equals_other_libraries(name, probe):
    keys = (f"{name}/x", f"{name}/y") if probe == "own" else ("common/x", f"common/{name}")
    x, y = (ORACLE[key] for key in keys)
    found = round_nearest(torch.from_numpy(x), ELEMENT_FORMATS[name]).numpy()
    np.testing.assert_array_equal(found, y, err_msg=name)
    np.testing.assert_array_equal(reference.nearest(x, name).astype(np.float32), y, err_msg=f"reference, {name}")


@each("name", ML_DTYPES)
def test_every_code_decodes_as_in_ml_dtypes(name):
    format = ALL_FORMATS[name]
    codes = np.arange(2**format.bits, dtype=np.uint8)
    expected = codes.view(ML_DTYPES[name]).astype(np.float32)
    found = format.decode(torch.from_numpy(codes)).numpy()
    np.testing.assert_array_equal(found, expected, err_msg=f"{name}: code -> value")
    numbers = np.isfinite(expected)
    zero = expected == 0  # -0 is encoded as +0
    encoded = format.encode(torch.from_numpy(expected)).numpy()
    np.testing.assert_array_equal(encoded[numbers], np.where(zero, 0, codes)[numbers], err_msg=f"{name}: value -> code")


@each("name", ML_DTYPES)
def test_rounding_equals_ml_dtypes(name):
    """Random numbers over all binades and beyond, every midpoint, and their neighbors; clamped, for ours saturate."""
    format = ALL_FORMATS[name]
    generator = np.random.default_rng(0)
    span = (format.min_exponent - format.mantissa_bits - 2, format.max_exponent + 2)
    x = generator.standard_normal(20000) * 2.0 ** generator.uniform(max(span[0], -126), min(span[1], 126), 20000)
    x = np.concatenate([x.astype(np.float32), probes(name)]).astype(np.float32)
    x = x[np.isfinite(x)]
    if name == "e8m0":  # has no zero, no sign, and its casts from below 2^-127 differ between libraries
        x = np.maximum(np.abs(x), np.float32(2.0**-126))
    codes = np.clip(x, -format.max, format.max).astype(np.float32).astype(ML_DTYPES[name])
    found = round_nearest(torch.from_numpy(x), format)
    np.testing.assert_array_equal(found.numpy(), codes.astype(np.float32), err_msg=f"{name}: values")
    expected = np.where(codes.astype(np.float32) == 0, 0, codes.view(np.uint8))
    np.testing.assert_array_equal(format.encode(found).numpy(), expected, err_msg=f"{name}: codes")


def test_e3m0_ties_go_to_the_even_code():
    ties = torch.tensor([0.125, 0.375, 0.75, 1.5, 3.0, 6.0, 12.0])
    assert round_nearest(ties, ELEMENT_FORMATS["e3m0"]).tolist() == [0.0, 0.5, 0.5, 2.0, 2.0, 8.0, 8.0]


@each("name", ELEMENT_FORMATS)
def test_what_hardware_multiplies(name):
    """FP8 as it is; integers, ternary among them, in int8; nothing else."""
    format = ELEMENT_FORMATS[name]
    native = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "ternary": torch.int8}
    assert format.gemm_dtype == native.get(name, torch.int8 if name.startswith("int") else None)
    if format.gemm_dtype is not None:
        values = table(format)[table(format).abs() <= format.max]
        assert torch.equal(values.to(format.gemm_dtype).float(), values), f"{name}: {format.gemm_dtype} lacks a value"


@each("bits", range(2, 10))
def test_whole_numbers_of_any_width(bits):
    """Nine bits hold what lies on either side of a zero point of eight."""
    format, largest = integer(bits), 2 ** (bits - 1) - 1
    assert ELEMENT_FORMATS.get(f"int{bits}", format) == format
    assert (format.max, format.significant_bits) == (largest, bits - 1)
    x = torch.arange(-4.0 * largest - 4, 4 * largest + 5) / 4
    expected = torch.from_numpy(np.clip(np.rint(x.numpy()), -largest, largest))
    assert torch.equal(round_nearest(x, format), expected), "they are symmetric"


@each("name, largest", [("e1m6", 3.9375), ("e2m5", 7.75), ("e3m4", 30.0), ("e6m1", 2.0**32)])
def test_seven_bit_scales(name, largest):
    """Largest by hand: (1 + m / 2^M) * 2^(e - bias) for the code below the top one."""
    format = SCALE_FORMATS[name]
    values = table(format)
    assert values[-1].isnan(), f"{name}: the top code is NaN"
    assert values[:-1].isfinite().all(), f"{name}: only the top code is NaN"
    assert values[0] == 0
    assert (values[1:-1] > values[:-2]).all(), f"{name}: values ascend with codes"
    assert values[-2] == format.max == largest


@each("name", BLOCK_SCALES)
@each("rounding", ["nearest", "up"])
def test_scale_rounding(name, rounding):
    x = probes(name)
    x = x[~(x < 0)]
    found = {"nearest": round_nearest, "up": round_up}[rounding](torch.from_numpy(x), SCALE_FORMATS[name]).numpy()
    expected = {"nearest": reference.nearest, "up": reference.up}[rounding](x, name).astype(np.float32)
    np.testing.assert_array_equal(found, expected, err_msg=f"{name} {rounding}")


def test_e8m0_against_its_oracle():
    x, y = ORACLE["e8m0/x"], ORACLE["e8m0/y"]
    keep = (x > 0) & np.isfinite(x)
    format = SCALE_FORMATS["e8m0"]
    clamped = torch.from_numpy(np.clip(x[keep], 2.0**-127, 2.0**127).astype(np.float32))
    np.testing.assert_array_equal(round_nearest(clamped, format).numpy(), y[keep])
