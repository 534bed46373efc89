"""Scales that an engine keeps in fewer digits: codes stay those of the training, or the export is refused."""

import pytest
import torch
from torch import nn

from lightning_lowbit import Cast, IntegerPrecision, LinearCasts, Scale, TernaryPrecision, quantize
from lightning_lowbit.export.formats import bitnet
from lightning_lowbit.export.formats.gguf.blocks import block_type, pack
from lightning_lowbit.export.weights import weights
from tests.export.originals import trained_model
from tests.tables import each

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def trained(precision, factor=1.0):
    model = nn.Sequential(nn.Linear(256, 64))
    with torch.no_grad():
        model[0].weight.normal_(std=0.05 * factor)
    return trained_model(model, precision.casts)


@each(
    "precision",
    [
        *(IntegerPrecision(bits, None, group) for bits in (2, 4, 8) for group in (32, "row", "tensor")),
        *(IntegerPrecision(bits, None, group, symmetric=False) for bits in (2, 4, 8) for group in (32, "row")),
        IntegerPrecision(4, None, 64, scale_format="bf16"),
        TernaryPrecision(),
    ],
)
@each("name", DTYPES)
def test_rescaled_integers_keep_their_codes(precision, name):
    original, dtype = trained(precision), DTYPES[name]
    [exact], [rounded] = weights(original), weights(original, rescale=True, scale_dtype=dtype)
    ours, theirs = exact.quantized, rounded.quantized
    assert torch.equal(theirs.codes, ours.codes)
    assert (theirs.zero_points is None) == (ours.zero_points is None)
    assert torch.equal(theirs.scales.float(), ours.scales.to(dtype).float())
    differences = (theirs.dequantize() - ours.dequantize()).abs()
    assert bool((differences <= torch.finfo(dtype).eps / 2 * ours.dequantize().abs()).all())
    assert rounded.error == float(differences.max())
    if not torch.equal(theirs.scales.float(), ours.scales.float()):
        with pytest.raises(ValueError, match="keeps the codes") as refusal:
            [*weights(original, scale_dtype=dtype)]
        can_train = isinstance(precision, IntegerPrecision) and ours.zero_points is None
        advice = f"IntegerPrecision(scale_format='{name}'), or casts with fprop_w: {{scale: {{format: {name}}}}}"
        assert (advice in str(refusal.value)) == can_train
    casts = LinearCasts.of({"preset": "int4", "fprop_w": {"scale": {"format": "bf16"}}})  # can be trained
    assert casts == IntegerPrecision(4, 4, scale_format="bf16").casts


@each(("factor", "dtype"), [(1e7, torch.float16), (1e-5, torch.float16), (1e-36, torch.bfloat16)])
def test_scales_beyond_the_range_of_a_dtype_are_refused(factor, dtype):
    """They would become infinite, 0 or numbers of few digits."""
    original = trained(IntegerPrecision(4, None, 32), factor)
    with pytest.raises(ValueError, match=r"whose range does not hold them: give another --dtype"):
        [*weights(original, rescale=True, scale_dtype=dtype)]


def test_blocks_of_zeros_have_no_scale_to_round():
    original = trained(IntegerPrecision(4, None, 32))
    with torch.no_grad():
        original.layers["0"].weight[3, 32:64] = 0
    [weight] = weights(original, rescale=True, scale_dtype=torch.float16)
    assert not weight.quantized.dequantize()[3, 32:64].any()


def test_gguf_and_bitnet_know_where_float16_ends():
    cast = Cast("int4", Scale("fp32", 32))
    errors = [pack(quantize(torch.randn(8, 64) * f, cast), block_type(cast, 64)).error for f in (1.0, 1e7, 1e-5)]
    assert 0 < errors[0] < torch.inf and errors[1:] == [torch.inf] * 2
    for factor in (1e-6, 1e9):
        [weight] = weights(trained(TernaryPrecision(), factor))
        with pytest.raises(ValueError, match="give --dtype bf16 or fp32"):
            bitnet.error(weight, torch.float16)
        assert bitnet.error(weight, torch.bfloat16) >= 0
