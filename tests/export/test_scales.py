"""Scales that an engine keeps in fewer digits: codes stay those of the training, or the export is refused."""

from functools import partial

import pytest
import torch
from torch import nn

from lightning_lowbit import Cast, IntegerPrecision, LinearCasts, LowBitPrecision, Scale, TernaryPrecision, quantize
from lightning_lowbit.export.formats import bitnet
from lightning_lowbit.export.formats.gguf.blocks import block_type, pack
from lightning_lowbit.export.trained_model import read
from lightning_lowbit.export.weights import weights
from lightning_lowbit.recipes.models import CausalLM
from tests.export.originals import export, fit, trained_model
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


@torch.no_grad()
def test_folded_smoothing_keeps_the_codes_of_rows_and_is_told_where_other_scales_round_again(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
    tokens = torch.arange(64)[None]
    for casts, shared, layers in (
        ("fp8-row", [], set()),
        ("fp8-current", [], {"up_proj"}),
        ("fp8-current", ["gate_proj|up_proj"], {"gate_proj", "up_proj"}),
    ):
        model = CausalLM("llama", {**sizes, "vocab_size": 256}, 0, optimizer=partial(torch.optim.AdamW, lr=3e-3))
        how = {"smooth_swiglu": "channel", "shared_amax": shared, "compute_dtype": "fp32", "skip": ["lm_head"]}
        with torch.enable_grad():
            path = fit(model, LowBitPrecision(casts, **how), tmp_path, 2)
        folded, smoothed = read(path), read(path, in_few_bits=False)
        logits = [original.model(input_ids=tokens).logits for original in (folded, smoothed)]
        assert torch.equal(*logits) == (not layers)
        assert {name.rpartition(".")[2] for name in folded.folded} == layers
        if layers:
            with pytest.raises(ValueError, match="mlp.up_proj.* otherwise than in training.*--rescale"):
                export(path, "dequantized", tmp_path / "out", overwrite=True)
        rows = export(path, "dequantized", tmp_path / "out", dtype="fp32", rescale=True, overwrite=True).rows
        assert {row.name.rpartition(".")[2] for row in rows if row.error > 0} == layers
