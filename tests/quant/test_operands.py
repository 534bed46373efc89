"""Operands of a GEMM: elements times scales in the GEMM's dtype, exact or rounded, as integers, or on their way."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from lightning_lowbit import Cast, Scale, quantize
from lightning_lowbit.formats import ELEMENT_FORMATS
from lightning_lowbit.quant import blend, quantize_operand
from tests.quant.tensors import EXMY, NVFP4, casts, same, sample, some_casts, spread_scales, whole
from tests.references import quantize as reference
from tests.tables import each


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("element", ELEMENT_FORMATS)
@pytest.mark.parametrize("scale_format", EXMY)
def test_fits_bfloat16(element, scale_format):
    left, right = (reference.magnitudes(name) for name in (element, scale_format))
    products = torch.from_numpy(np.unique(np.outer(left, right)))
    exact = bool((products.bfloat16().double() == products).all())
    assert Cast(element, Scale(scale_format)).fits_bfloat16 == exact, (
        f"{element} times {scale_format}: exact is {exact}"
    )
    assert Cast(element, Scale(scale_format, "row")).fits_bfloat16, f"{element} alone has 8 bits at most"


@each("element", ELEMENT_FORMATS)
def test_powers_of_two_fit_bfloat16(element):
    """Elements have 8 significant bits at most, from a zero point too, and a power of two adds none; other fp32 scales
    have all 24."""
    for statistic in ("absmax", "minmax") if element.startswith("int") else ("absmax",):
        for block, rounding, fits in ((16, "nearest", False), (16, "power_of_two", True), ("row", "nearest", True)):
            cast = Cast(element, Scale("fp32", block, rounding, statistic=statistic))
            assert cast.fits_bfloat16 == fits, f"{cast}: fits_bfloat16 is {cast.fits_bfloat16}"
    assert Cast(element, Scale("e8m0", 32)).fits_bfloat16


def exact_product(stored):
    """Elements times block scales, float32, exactly; only fp32 scales have so many digits that it is rounded."""
    elements, scales = stored.elements(), spread_scales(stored)
    product = elements * scales
    exact = (
        stored.cast.scale.format in ("fp16", "fp32") or (product.double() == elements.double() * scales.double()).all()
    )
    assert exact, f"{stored.cast}: a product of elements and scales is rounded in float32"
    return product


@pytest.mark.fast("e2m1-16-dtype0", "e3m0-16-dtype0", "e5m2-16-dtype1", "int4-16-dtype1", "ternary-16-dtype1")
@pytest.mark.fast("e4m3-block18-dtype1", "int8-row-dtype0", "e2m1-tensor-dtype1")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("element", "block"),
    [(element, 16) for element in ELEMENT_FORMATS]
    + [(element, block) for element in ("e2m1", "e4m3", "int8") for block in ((16, 16), "row", "tensor")],
)
def test_operand_is_codes_times_scales(element, block, dtype):
    x, key = sample(18, 40, dtype=dtype), torch.tensor(9)
    for cast, (rounding, dim) in itertools.product(some_casts(element, block), (("nearest", -1), ("stochastic", 0))):
        mode = replace(cast, rounding=rounding)
        message = f"{mode} of {dtype} along {dim}"
        stored = quantize(x, mode, dim, key)
        elements, scales = stored.elements(), spread_scales(stored)
        product = (exact_product(stored) if mode.scale.per_block else elements).double()
        for given in (None, torch.float32):
            operand = quantize_operand(x, mode, dim, key, dtype=given)
            wanted = given or (dtype if mode.fits_bfloat16 else torch.float32)
            assert operand.values.dtype == wanted, f"{message}: {operand.values.dtype}"
            same(operand.values.double(), product, f"{message}, values")
        if mode.scale.per_block:
            assert (operand.factor is None) == (stored.tensor_scale is None), f"{message}: factor {operand.factor}"
            if operand.factor is not None:
                same(operand.factor, stored.tensor_scale, f"{message}, factor")
        else:
            shape = () if block == "tensor" else (1, 40) if dim == 0 else (18, 1)
            assert operand.factor.shape == shape, f"{message}: factor of shape {tuple(operand.factor.shape)}"
        one = torch.ones(()) if stored.tensor_scale is None else stored.tensor_scale
        same(stored.dequantize(), elements * (scales * one), f"{message}, values of quantize")
        # Where a scale of the tensor multiplies too, the two associate differently.
        both, tolerance = whole(operand), 0 if stored.tensor_scale is None else 2.0**-22
        torch.testing.assert_close(both, stored.dequantize(), rtol=tolerance, atol=0, msg=lambda m, at=message: at + m)
        same(whole(operand.t()), both.t(), f"{message}, t()")


@each("element", ELEMENT_FORMATS)
def test_float16_operands_do_not_overflow(element):
    """codes * scales are exact in bfloat16; in float16, the largest ones of some casts are infinite."""
    x = sample(4, 64).clamp(-1e4, 1e4).half()
    for cast in some_casts(element):
        product = exact_product(quantize(x, cast)).double()
        same(quantize_operand(x, cast, -1).values.double(), product, f"{cast} of float16")


ROUNDED = [
    *[Cast(element, Scale("fp32", block)) for element in ("int4", "e1m2") for block in (16, (4, 16))],
    Cast("int8", Scale("fp32", 16, statistic="minmax")),
    Cast("int3", Scale("fp32", (4, 16), statistic="minmax", factor=0.9)),
    Cast("ternary", Scale("fp32", 16, statistic="absmean")),
    Cast("int8", Scale("e4m3", 16)),
    Cast("e2m1", Scale("e4m3", 16)),
]


@each("dtype", [torch.bfloat16, torch.float16, torch.float32])
@each("cast", ROUNDED)
def test_rounded_operands_are_the_dequantized_tensor(cast, dtype):
    """Rounded once to the dtype of the computation; in float32, which exact mode asks for, the same numbers.

    float16 lacks the range: there they are float32.
    """
    wide = torch.float32 if dtype == torch.float16 else dtype
    x, key = sample(18, 40).clamp(-1e4, 1e4).to(dtype), torch.tensor(9)
    for rounding, dim in (("nearest", -1), ("stochastic", 0)):
        mode = replace(cast, rounding=rounding, round_to_bfloat16=True)
        stored = quantize(x, mode, dim, key)
        plain = quantize(x, replace(mode, round_to_bfloat16=False), dim, key)
        same(stored.elements(), plain.elements(), f"{mode}, elements")
        found = quantize_operand(x, mode, dim, key)
        exact = quantize_operand(x, mode, dim, key, dtype=torch.float32)
        assert found.values.dtype == wide, f"{mode} of {dtype} along {dim}: {found.values.dtype}"
        assert exact.values.dtype == torch.float32
        assert found.factor is None and exact.factor is None, f"{mode}: a scale per block has no factor"
        same(found.values, stored.dequantize(wide), f"{mode} of {dtype} along {dim}")
        same(exact.values, found.values.float(), f"{mode} of {dtype} along {dim}, in float32")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rounding_a_second_level_leaves_its_factor_alone(dtype):
    """An int8 times an e4m3 has 11 digits: of these 8 are left, and then comes the scale of the tensor."""
    x, cast = sample(8, 64, dtype=dtype), Cast("int8", Scale("e4m3", 16, two_level=True), round_to_bfloat16=True)
    stored, found = quantize(x, cast), quantize_operand(x, cast, -1)
    same(found.factor, stored.tensor_scale, "the factor")
    same(found.values, exact_product(stored).to(dtype), f"elements times block scales in {dtype}")
    if dtype == torch.bfloat16:
        assert (found.values.float() != exact_product(stored)).any(), "nothing is rounded here"


@each("block", ["row", "tensor"])
def test_without_block_scales_there_is_nothing_to_round(block):
    x, cast = sample(8, 64).bfloat16(), Cast("int8", Scale("fp32", block))
    plain, rounded = (quantize_operand(x, replace(cast, round_to_bfloat16=rounded), 0) for rounded in (False, True))
    assert rounded.values.dtype == plain.values.dtype == torch.bfloat16
    same(rounded.values, plain.values, f"{cast}, values")
    same(rounded.factor, plain.factor, f"{cast}, factor")


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("block", ["row", "tensor"])
@pytest.mark.parametrize("element", [name for name, format in ELEMENT_FORMATS.items() if format.gemm_dtype])
def test_elements_in_the_dtype_of_the_hardware(element, block):
    x, key, dtype = sample(9, 40).bfloat16(), torch.tensor(4), ELEMENT_FORMATS[element].gemm_dtype
    for cast, rounding, dim in itertools.product(casts(element, block), ("nearest", "stochastic"), (0, -1)):
        if cast.scale.format != "fp32" or cast.scale.statistic == "minmax":
            continue
        mode = replace(cast, rounding=rounding)
        stored, found = quantize(x, mode, dim, key), quantize_operand(x, mode, dim, key, dtype=dtype)
        assert found.values.dtype == dtype, f"{mode}: {found.values.dtype}"
        same(found.values.float(), stored.elements(), f"{mode} along {dim}, elements")
        same(whole(found), stored.dequantize(), f"{mode} along {dim}")
        same(whole(quantize_operand(x, mode, dim, key)), stored.dequantize(), f"{mode} along {dim}, emulated")


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_integers_show_in_their_factor_what_is_not_finite(bad):
    x = sample(4, 40, seed=1)
    x[2, 7] = bad
    for element, statistic, block in itertools.product(("int8", "ternary"), ("absmax", "absmean"), ("row", "tensor")):
        cast = Cast(element, Scale("fp32", block, statistic=statistic))
        found = quantize_operand(x, cast, -1, dtype=torch.int8)
        rows = found.factor.expand(4, 1)[:, 0].isnan().tolist()
        assert rows == ([False, False, True, False] if block == "row" else [True] * 4), f"{cast}: NaN in rows {rows}"


BLENDED = [
    Cast("int4", Scale("fp32", 16), round_to_bfloat16=True),
    Cast("int3", Scale("fp32", 16, statistic="minmax")),
    Cast("int8", Scale("fp32", "row")),
    Cast("ternary", Scale("fp32", "tensor", statistic="absmean", epsilon=1e-5)),
    NVFP4,
]


def quantized(x, cast, dim, exact):
    return quantize_operand(x, cast, dim, dtype=torch.float32 if exact else None)


@pytest.mark.pairwise
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("cast", BLENDED, ids=str)
def test_blend(cast, dtype, exact):
    """x at 0 and q at 1, to the bit; in between x + λ (q - x), computed without loss and rounded once."""
    x, wide = sample(9, 40).clamp(-1e4, 1e4).to(dtype), torch.promote_types(dtype, torch.float32)
    for dim in (0, 1):
        q = quantized(x, cast, dim, exact)
        target = q.values.to(wide) * (1.0 if q.factor is None else q.factor)
        for share in (0.0, 0.1, 0.5, 0.7, 1.0):
            found = blend(x, q, torch.tensor(share), exact)
            message = f"{cast} along {dim}, λ {share}"
            assert found.factor is None, f"{message}: dense tensors have no factor"
            assert found.values.dtype == (wide if exact else dtype), f"{message}: {found.values.dtype}"
            if share in (0, 1):
                same(found.values, (target if share else x).to(found.values.dtype), message)
                continue
            between = torch.lerp(x.double(), target.double(), torch.tensor(share).double())
            # What the wider dtype loses of the larger term may tip a rounding, and is all that may.
            slack = torch.finfo(wide).eps * torch.maximum(x.double().abs(), target.double().abs())
            low, high = ((between + sign * slack).to(found.values.dtype) for sign in (-1, 1))
            off = (found.values < low) | (found.values > high)
            assert not off.any(), f"{message}: {found.values[off][:3].tolist()}, not {between[off][:3].tolist()}"


@each("share", [0.0, 0.4, 1.0])
@each("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_blend_of_what_is_not_finite_is_not_finite(bad, share):
    x = sample(4, 64, seed=1)
    x[1, 20] = bad
    for cast in BLENDED:
        for exact in (False, True):
            found = blend(x, quantized(x, cast, -1, exact), torch.tensor(share), exact).values
            assert not found[1, 20].isfinite(), f"{cast}, λ {share}: {bad} became {found[1, 20]}"
            if cast.scale.block != "tensor":
                assert found[[0, 2, 3]].isfinite().all(), f"{cast}, λ {share}: the damage leaves its row"
