"""The format ``bitnet``: the codec against golden vectors of transformers, and models in transformers itself."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_lowbit import Cast, LinearCasts, Scale, quantize
from lightning_lowbit.export.formats import bitnet
from lightning_lowbit.export.formats.base import Options
from lightning_lowbit.export.parity import compare
from lightning_lowbit.export.weights import Weight, weights
from tests import golden_vectors as golden
from tests.export.originals import VOCABULARY, language_model, trained_model

TERNARY = LinearCasts.preset("ternary")
FORMAT = bitnet.FORMATS["bitnet"]


def layer_of(casts, made=None):
    return trained_model(nn.Sequential(made or nn.Linear(16, 8)), casts).layers["0"]


def test_bytes_and_scales_are_those_of_transformers():
    for name, case in ((name, golden.case("bitnet", name)) for name in golden.cases("bitnet")):
        if "packed" not in case or len(case["w"]) % 4:
            continue
        quantized = quantize(case["w"], TERNARY.cast_of("fprop_w"))
        tensors = bitnet.tensors(Weight(name, layer_of(TERNARY), quantized))
        assert torch.equal(tensors["weight"], torch.from_numpy(case["packed"])), name
        peer = torch.from_numpy(case["weight_scale_bitlinear"])  # whose mean is summed in float32
        torch.testing.assert_close(tensors["weight_scale"], peer, rtol=2.0**-22, atol=0)


def test_the_reciprocal_of_weight_scale_is_the_scale_to_the_bit():
    for exponent in range(-40, 40):
        quantized = quantize(torch.randn(8, 16) * 2.0**exponent, TERNARY.cast_of("fprop_w"))
        weight_scale = bitnet.tensors(Weight("0", layer_of(TERNARY), quantized))["weight_scale"]
        assert torch.equal(weight_scale.reciprocal(), quantized.scales.reshape(1))


def test_layers_that_it_cannot_hold_are_refused_by_name():
    weight, x = TERNARY.fprop_w, TERNARY.fprop_x
    by_row = TERNARY.replace(fprop_w=weight.replace(scale={"block": "row"}))
    for layer, message in (
        (layer_of(LinearCasts.preset("int4")), "ternary weights with one scale of the tensor"),
        (layer_of(by_row), "ternary weights with one scale of the tensor"),
        (layer_of(TERNARY.replace(fprop_x=x.replace(element="int4"))), "quantizes inputs by int8"),
        (layer_of(TERNARY, nn.Linear(16, 6)), "its 6 out_features are no multiple of 4"),
        (layer_of(TERNARY, nn.Conv2d(4, 8, 1)), "is no nn.Linear"),
        (layer_of(TERNARY.replace(fprop_x=None, wgrad_x=None)), "the training not at all: take int2, or gguf"),
    ):
        assert message in str(bitnet.obstacle("0", layer))
    absmax = TERNARY.replace(fprop_w=Cast("ternary", Scale("fp32", "tensor")))
    assert [bitnet.obstacle("0", layer_of(casts)) for casts in (TERNARY, absmax)] == [None] * 2


@pytest.mark.slow  # the module of transformers takes seconds to import
@torch.compiler.set_stance("force_eager")  # else its helpers are compiled
def test_a_loaded_layer_shows_each_of_its_elements():
    pytest.importorskip("transformers")
    (weight,) = weights(trained_model(nn.Sequential(nn.Linear(16, 8)), TERNARY))
    loaded = SimpleNamespace(weight=bitnet.tensors(weight)["weight"])
    exact = weight.quantized.dequantize()
    assert torch.equal(FORMAT.shown(loaded, weight), exact)
    loaded.weight[1, 3] ^= 0b0100
    assert (FORMAT.shown(loaded, weight) != exact).sum() == 1


def test_layers_that_stay_are_named_so_that_no_other_is():
    model = nn.ModuleDict({"fc": nn.Linear(8, 8), "up_fc": nn.Linear(8, 8), "head": nn.Linear(8, 8)})
    original = trained_model(model, TERNARY, skip=("fc", "head"))
    assert bitnet.quantization_config(original)["modules_to_not_convert"] == ["^fc$", "head"]


def test_a_dtype_that_rounds_the_scale_is_told():
    [weight] = weights(trained_model(nn.Sequential(nn.Linear(64, 64)), TERNARY))
    assert bitnet.error(weight, torch.float32) == 0
    scale = weight.quantized.scales.double().reshape(())
    expected = (1 / (1 / scale).bfloat16().double() - scale).abs().item()
    assert bitnet.error(weight, torch.bfloat16) == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "bitnet", "llama with biases"])
@torch.compiler.set_stance("force_eager")  # else the helpers of transformers are compiled
def test_transformers_computes_the_same(kind, tmp_path):
    pytest.importorskip("accelerate")
    original = language_model(kind.partition(" ")[0], TERNARY, **({"attention_bias": True} if " " in kind else {}))
    for layer in original.layers.values():
        if layer.bias is not None:
            nn.init.normal_(layer.bias, std=0.1)
    written = FORMAT.write(original, tmp_path, Options(dtype=torch.float32))
    assert [row.name for row in written] == [*original.layers] and all(row.error == 0 and row.inputs for row in written)
    loaded = FORMAT.load(tmp_path)

    from transformers.integrations.bitnet import unpack_weights

    for weight in weights(original):
        layer = loaded.get_submodule(weight.name)
        decoded = unpack_weights(layer.weight, dtype=torch.float32) / layer.weight_scale
        assert torch.equal(decoded, weight.quantized.dequantize()), weight.name
        x = torch.randn(3, decoded.shape[1])
        torch.testing.assert_close(layer(x), weight.layer(x), rtol=1e-5, atol=1e-6)

    # Sums of whole numbers are exact, and the rest differs in the last bits of float32, by which an input may come to
    # the other side of a tie: that moves the output of a layer by 1/127 of the input's amax in one of 64 features.
    tokens, model = torch.randint(VOCABULARY, (2, 12)), original.model
    with torch.no_grad():
        expected = model(tokens).logits
        report = compare(original, loaded, written, weights(original), tokens, torch.float32, FORMAT.shown)
        assert not report.others, "biases are buffers there"
        torch.testing.assert_close(loaded(tokens).logits, expected, rtol=0, atol=0.01 * expected.std().item())
        greedy = {"max_new_tokens": 16, "do_sample": False}
        assert torch.equal(loaded.generate(tokens, **greedy), model.generate(tokens, **greedy))
