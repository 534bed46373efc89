"""Trained models as GGUF: the file, as the package gguf reads it, holds the weights of the training, and llama.cpp
computes its logits.

llama.cpp's kernels for CPUs round the inputs of matrices to 8 bits, in blocks of 32 (Q8_0; for ternary weights 256,
Q8_K), and keep keys and values in float16. So logits are compared with those of a forward pass that quantizes weights
alone; they differ by 0.2 to 0.4 % of their norm (llama.cpp b11739, AVX2).
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from tokenizers.normalizers import NFC
from transformers import PreTrainedTokenizerFast

import lightning_lowbit
from lightning_lowbit import LowBitPrecision
from lightning_lowbit.export.formats.base import Options
from lightning_lowbit.export.formats.gguf import GGUF, GGUF_TQ1
from lightning_lowbit.export.formats.gguf.networks import NETWORKS, network_of
from lightning_lowbit.export.tokenizer import bytes_tokenizer
from lightning_lowbit.export.trained_model import read
from lightning_lowbit.export.weights import weights
from lightning_lowbit.nn.casts.linear_casts import LinearCasts
from lightning_lowbit.recipes.data import TextDataModule
from lightning_lowbit.recipes.models import CausalLM
from tests.export.llama_cpp import tokenizers
from tests.export.llama_cpp.tokenizers import client
from tests.export.originals import fit, language_model

pytestmark = pytest.mark.slow
gguf = pytest.importorskip("gguf")
CODE = Path(lightning_lowbit.__file__).parent
GPT2 = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
GPT2 |= {"vocab_size": 256, "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 0}
SIZE = {**GPT2, "intermediate_size": 256, "num_key_value_heads": 2}
WIDE = {**SIZE, "hidden_size": 256, "intermediate_size": 704}
BITNET = {"hidden_act": "silu", "tie_word_embeddings": True}
HEAD = ["lm_head"]


def integers(bits):
    """Groups of 128 with scales that float16 holds."""
    casts = LinearCasts.preset(f"int{bits}")
    return casts.replace(fprop_x=None, wgrad_x=None, fprop_w=casts.fprop_w.replace(scale={"format": "fp16"}))


# Network, configuration, casts, what is left in high precision, types of blocks.
CASES = {
    "llama-nvfp4": ("llama", SIZE, "nvfp4", HEAD, {"NVFP4"}),
    "llama-head-nvfp4": ("llama", SIZE, "nvfp4-4over6", [], {"NVFP4"}),
    "llama-biases-mxfp4": ("llama", SIZE | {"attention_bias": True, "mlp_bias": True}, "mxfp4", HEAD, {"MXFP4"}),
    "llama-ternary": ("llama", WIDE, "ternary", HEAD, {"TQ2_0", "Q4_0"}),
    "mistral-int8": ("mistral", SIZE | {"sliding_window": None}, integers(8), HEAD, {"Q8_0"}),
    "qwen3-nvfp4": ("qwen3", SIZE | {"head_dim": 64}, "nvfp4-nvidia", HEAD, {"NVFP4"}),
    "qwen3-int4": ("qwen3", SIZE | {"head_dim": 32, "tie_word_embeddings": True}, integers(4), HEAD, {"Q4_0"}),
    "gpt2-mxfp4": ("gpt2", GPT2, "mxfp4", HEAD, {"MXFP4"}),
    "bitnet-ternary": ("bitnet", WIDE | BITNET, "ternary", HEAD, {"TQ2_0", "Q4_0"}),
}


def train(network, config, casts, skip, folder):
    model = CausalLM(network, {**config, "use_cache": False}, optimizer=partial(torch.optim.AdamW, lr=3e-3))
    data = TextDataModule(str(CODE / "quant"), sequence_length=64, batch_size=8)
    return read(fit(model, LowBitPrecision(casts, skip=skip), folder, 30, data))


@pytest.fixture(scope="module", params=CASES)
def export(request, tmp_path_factory):
    *case, kinds = CASES[request.param]
    folder = tmp_path_factory.mktemp("export")
    original = train(*case, folder)
    original = replace(original, facts={**original.facts, "tokenizer": "bytes"})
    rows = GGUF.write(original, folder, Options())
    assert {row.format for row in rows} == kinds and {row.name for row in rows} == {*original.layers}
    assert all(row.error == 0 for row in rows)
    return original, folder, rows


def read_file(folder):
    tensors = gguf.GGUFReader(folder / "model.gguf").tensors
    return {tensor.name: torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type)) for tensor in tensors}


def test_the_file_holds_the_weights(export):
    original, folder, rows = export
    found = read_file(folder)
    network = network_of(original.config)
    sizes = {tensor.name: tensor.n_bytes for tensor in gguf.GGUFReader(folder / "model.gguf").tensors}
    for weight, row in zip(weights(original), rows, strict=True):
        part, q = network.name(weight.name), weight.quantized
        assert row.bytes == sizes[f"{part}.weight"] + sizes.get(f"{part}.scale", 0)
        assert part is not None
        decoded, scale = found.pop(f"{part}.weight"), found.pop(f"{part}.scale", None)
        if (order := network.rows(part, original.config)) is not None:
            decoded = decoded[order.argsort()]
        if q.tensor_scale is not None:  # value = element * scale exactly, times the tensor's: rounded once
            assert scale is not None and torch.equal(scale.reshape(()), q.tensor_scale)
            assert torch.equal(decoded, replace(q, tensor_scale=None).dequantize()), weight.name
        else:
            assert torch.equal(decoded * (1.0 if scale is None else scale), q.dequantize()), weight.name
    embedding = original.model.get_input_embeddings().weight.detach()
    assert torch.equal(found["token_embd.weight"], embedding.bfloat16().float())
    assert all(found[name].dtype == torch.float32 for name in found if "norm" in name)


def logits(original, tokens):
    with torch.no_grad():
        return original.model(input_ids=tokens).logits.float()


def difference(found, expected):
    return float((found - expected).norm() / (expected - expected.mean(-1, keepdim=True)).norm())


def with_high_precision_inputs(original):
    for layer in original.layers.values():
        layer.casts = LinearCasts(fprop_w=layer.casts.fprop_w)
    return original


def test_llama_cpp_computes_the_logits_of_the_training(export):
    original, folder, _ = export
    llama = client(folder)
    text = (CODE / "checks.py").read_bytes()[1000:1256]
    tokens = torch.tensor([*text]).view(2, 128)
    found, trained = llama(input_ids=tokens).logits, logits(original, tokens)
    expected = logits(with_high_precision_inputs(original), tokens)
    assert difference(found, expected) < 0.01
    # After 30 steps many tokens are about as likely as the next one, so that inputs in 8 bits decide between them.
    for ours in (expected, trained):
        assert float((found.argmax(-1) == ours.argmax(-1)).float().mean()) >= 0.95


def untrained(casts, network="llama", skip=HEAD, tokenizer="bytes", std=0.02, **changes):
    sizes = {**(GPT2 if network == "gpt2" else SIZE), **changes}
    original = language_model(network, casts, skip=skip, std=std, **sizes)
    return replace(original, facts={"tokenizer": tokenizer})


def test_llama_cpp_knows_positions_as_the_model_does(tmp_path):
    tokens = torch.randint(256, (1, 100), generator=torch.Generator().manual_seed(0))
    for network, changes in [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("mistral", {"sliding_window": None, "head_dim": 64}),
        ("qwen3", {"head_dim": 64}),
        ("gpt2", {}),
        ("bitnet", BITNET),
    ]:
        original = untrained("mxfp4", network, std=0.12, **changes)  # large, so that attention prefers some tokens
        with torch.no_grad():
            for name, parameter in original.model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(std=0.3)
        GGUF.write(original, tmp_path, Options(dtype=torch.float32))
        expected = logits(with_high_precision_inputs(original), tokens)
        assert difference(client(tmp_path)(input_ids=tokens).logits, expected) < 0.05, network


def test_ternary_weights_in_base_3(tmp_path):
    original = untrained("ternary", **WIDE)
    for format, name in ((GGUF, "TQ2_0"), (GGUF_TQ1, "TQ1_0")):
        (tmp_path / name).mkdir()
        rows = format.write(original, tmp_path / name, Options())
        assert {row.format for row in rows} == {name, "Q4_0"}
    tq2, tq1 = read_file(tmp_path / "TQ2_0"), read_file(tmp_path / "TQ1_0")
    assert all(torch.equal(tensor, tq1[name]) for name, tensor in tq2.items())
    tokens = torch.arange(64)[None]
    found = [client(tmp_path / name)(input_ids=tokens).logits for name in ("TQ2_0", "TQ1_0")]
    assert torch.allclose(*found, atol=1e-4)


def test_scales_that_float16_does_not_hold_are_refused_or_rounded(tmp_path):
    original = untrained("int4")
    with pytest.raises(ValueError, match=r"layers.0.self_attn.q_proj .* float16, which Q4_0 has.*--rescale"):
        GGUF.write(original, tmp_path, Options())
    rows = GGUF.write(original, tmp_path, Options(rescale=True))
    found = read_file(tmp_path)
    for weight, row in zip(weights(original), rows, strict=True):
        if weight.name.endswith("v_proj"):
            decoded = found[f"{NETWORKS['llama'].name(weight.name)}.weight"]
            difference = float((decoded - weight.quantized.dequantize()).abs().max())
            assert 0 < difference == pytest.approx(row.error, rel=1e-2)


def test_layers_whose_scale_llama_cpp_does_not_apply_are_refused(tmp_path):
    for original, names in [
        (untrained("nvfp4", "gpt2"), "transformer.h.0.mlp.c_fc"),
        (untrained("nvfp4", mlp_bias=True), "model.layers.0.mlp.gate_proj"),
        (untrained("ternary", skip=[]), "lm_head"),
    ]:
        with pytest.raises(ValueError, match=f"{names}.*scale of the tensor, by which llama.cpp"):
            GGUF.write(original, tmp_path, Options())
    assert not [*tmp_path.iterdir()]


def test_tensors_that_are_not_quantized_have_the_dtype_that_was_asked_for(tmp_path):
    original = untrained("nvfp4", "gpt2", skip=[*HEAD, "c_fc", r"mlp\.c_proj"])
    embedding = original.model.get_input_embeddings().weight.detach()
    up = original.model.get_submodule("transformer.h.0.mlp.c_fc").weight.detach()
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        GGUF.write(original, tmp_path, Options(dtype=dtype))
        found = read_file(tmp_path)
        assert torch.equal(found["token_embd.weight"], embedding.to(dtype).float())
        assert torch.equal(found["blk.0.ffn_up.weight"], up.mT.to(dtype).float())


def byte_level(cut, whole, normalizer=None):
    texts = [path.read_text() for path in (CODE / "quant").glob("*.py")]
    made = tokenizers.byte_level(cut, whole, ["<end>"], normalizer=normalizer, texts=texts)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")


def test_llama_cpp_tokenizes_as_the_training_did(tmp_path):
    text = "def quantize(x: Tensor) -> Quantized:\n    return 12345 + 678  # don't — naïve 漢字\n\n\tif x:"
    for name, made in {
        "gpt-2": byte_level(None, False),
        "llama-bpe": byte_level(tokenizers.LLAMA3, True),
        "qwen2": byte_level(tokenizers.QWEN2, False, NFC()),
    }.items():
        made.save_pretrained(tmp_path / name)
        GGUF.write(untrained("mxfp4", tokenizer=str(tmp_path / name), vocab_size=512), tmp_path, Options())
        found = client(tmp_path).tokenize(text)
        assert found == made(text)["input_ids"] and len(found) < len(text.encode()), name


def test_llama_cpp_gives_texts_of_bytes_back(tmp_path):
    text = "f (a , b) .  don 't\n\té e\u0301 漢 Ā"
    bytes_tokenizer().save_pretrained(tmp_path)
    for tokenizer in ("bytes", str(tmp_path)):
        GGUF.write(untrained("mxfp4", tokenizer=tokenizer), tmp_path, Options())
        llama, tokens = client(tmp_path), [*text.encode()]
        assert llama.tokenize(text) == llama.tokenize(text, special=True) == tokens
        assert llama.text(tokens) == text


def test_a_tokenizer_that_a_file_cannot_tell_is_left_out(tmp_path):
    other = byte_level(r"\s+|\w+|.", False)
    other.save_pretrained(tmp_path / "other")
    for tokenizer, size, why in [
        (None, 256, "does not name one"),
        (str(tmp_path / "other"), 512, "not byte-level BPE with a cut of text"),
        (str(tmp_path / "missing"), 512, "cannot be loaded"),
    ]:
        with pytest.warns(UserWarning, match=why):
            GGUF.write(untrained("mxfp4", tokenizer=tokenizer, vocab_size=size), tmp_path, Options())
    tokens = torch.arange(32)[None]
    assert client(tmp_path)(input_ids=tokens).logits.shape == (1, 32, 512)


def test_what_llama_cpp_cannot_compute_is_an_error_without_noise(tmp_path, capfd):
    GGUF.write(untrained("mxfp4"), tmp_path, Options())
    with pytest.raises(ValueError, match="128 positions, and got 129 tokens"):
        client(tmp_path)(input_ids=torch.zeros(1, 129))
    path = tmp_path / "model.gguf"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"cannot read .*model.gguf: \w+"):
        client(tmp_path)
    assert capfd.readouterr().err == ""
