"""Checkpoints that compressed-tensors writes, read to the bit of what it reads."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from lightning_lowbit import LinearCasts, load_compressed
from lightning_lowbit.nn import LayerKeys

pytestmark = pytest.mark.slow
E4M3, U8 = torch.float8_e4m3fn, torch.uint8


def weight():
    return torch.randn(96, 256, generator=torch.Generator().manual_seed(0)).bfloat16()


def amax(group):
    return weight().float().view(96, -1, group).abs().amax(-1)


def schemes():
    """(format, arguments, tensors beside the weight) of each kind of file."""
    of_tensor = 2688 / weight().float().abs().max().reshape(1)
    nvfp4 = {"strategy": "tensor_group", "group_size": 16, "scale_dtype": E4M3, "zp_dtype": E4M3}
    scale = (amax(16) / 6 * of_tensor).to(E4M3).float()
    yield "nvfp4-pack-quantized", {"num_bits": 4, "type": "float", **nvfp4}, (scale, of_tensor)
    mx = {"type": "float", "strategy": "group", "group_size": 32, "scale_dtype": U8, "zp_dtype": U8}
    for format, bits, largest in (("mxfp4-pack-quantized", 4, 6), ("mxfp8-quantized", 8, 448)):
        yield format, {"num_bits": bits, **mx}, (((amax(32) / largest).log2().ceil() + 127).to(U8),)
    for bits in (2, 3, 4, 5, 8):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            own = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 64}
            yield "pack-quantized", own, ((amax(64) / (2 ** (bits - 1) - 1)).to(dtype),)
    yield "pack-quantized", {"num_bits": 4, "type": "int", "strategy": "channel"}, ((amax(256) / 7).bfloat16(),)
    yield "int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}, (amax(256) / 127,)
    fp8 = {"num_bits": 8, "type": "float"}
    yield "float-quantized", {**fp8, "strategy": "channel"}, (amax(256) / 448,)
    yield "float-quantized", {**fp8, "strategy": "tensor"}, (amax(256).max().reshape(1) / 448,)
    tiles = torch.tensor([[0.01, 0.012]])
    yield "float-quantized", {**fp8, "strategy": "block", "block_structure": [128, 128]}, (tiles,)


def compressed(tensor, format, arguments, scales):
    """The tensors of a layer in a file, and its weight as compressed-tensors reads it."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments, symmetric=True))
    compressor = compressors.BaseCompressor.get_value_from_registry(format)
    given = dict(zip(("weight_scale", "weight_global_scale"), scales, strict=False))
    tensors = compressor.compress({"weight": tensor, **given}, scheme)
    return {k: v.contiguous() for k, v in tensors.items()}, compressor.decompress(dict(tensors), scheme)["weight"]


def write_config(folder, format, arguments, config=None, **others):
    from compressed_tensors.quantization import QuantizationArgs

    weights = json.loads(QuantizationArgs(**arguments, symmetric=True).model_dump_json())
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "format": format}}
    own = {"quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed"}
    quantization = {**own, "config_groups": groups, **others}
    (folder / "config.json").write_text(json.dumps({**(config or {}), "quantization_config": quantization}))


def written(folder, format, arguments, scales):
    """A checkpoint of one layer, and its weight as compressed-tensors reads it."""
    tensors, expected = compressed(weight(), format, arguments, scales)
    save_file({f"0.{k}": v for k, v in tensors.items()} | {"0.bias": torch.ones(96)}, folder / "model.safetensors")
    write_config(folder, format, arguments)
    return expected


def layer():
    return nn.Sequential(nn.Linear(256, 96))


@pytest.mark.filterwarnings("ignore")  # of the package, at import
def test_weights_are_those_that_the_package_reads(tmp_path):
    for number, (format, arguments, scales) in enumerate(schemes()):
        folder = tmp_path / str(number)
        folder.mkdir()
        expected = written(folder, format, arguments, scales)
        model = load_compressed(layer(), folder, dtype=torch.float32)
        found = model[0].weight_matrix().to(expected.dtype)
        assert torch.equal(found, expected), (format, arguments, (found - expected).abs().max())
        assert torch.equal(model[0].bias, torch.ones(96))


@pytest.mark.filterwarnings("ignore")
def test_casts_and_folders_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(ValueError, match="it has no config.json"):
        load_compressed(layer(), tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="None, not one of compressed-tensors"):
        load_compressed(layer(), tmp_path)
    written(tmp_path, *next(schemes()))
    with pytest.raises(ValueError, match="Give casts with fprop_w="):
        load_compressed(layer(), tmp_path, "nvfp4-nvidia")
    model = load_compressed(layer(), tmp_path, "nvfp4")
    LayerKeys(model).fill_(0)
    assert model[0].casts == LinearCasts.preset("nvfp4") and model(torch.randn(4, 256)).isfinite().all()


@pytest.mark.filterwarnings("ignore")
def test_a_model_of_transformers_computes_as_transformers_does(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, tie_word_embeddings=True, **sizes)).bfloat16()
    model.save_pretrained(tmp_path)
    state, quantized = model.state_dict(), {}
    nvfp4, arguments, _ = next(schemes())
    for name in [name for name in state if name.endswith("_proj.weight")]:
        w = state.pop(name)
        of_tensor = 2688 / w.float().abs().max().reshape(1)
        scale = (w.float().view(len(w), -1, 16).abs().amax(-1) / 6 * of_tensor).to(E4M3).float()
        tensors, _ = compressed(w, nvfp4, arguments, (scale, of_tensor))
        quantized |= {f"{name.removesuffix('.weight')}.{k}": v for k, v in tensors.items()}
    state.pop("lm_head.weight")
    save_file(state | quantized, tmp_path / "model.safetensors", metadata={"format": "pt"})
    write_config(tmp_path, nvfp4, arguments, json.loads((tmp_path / "config.json").read_text()), ignore=["lm_head"])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    empty = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path), dtype=torch.bfloat16)
    ours, tokens = load_compressed(empty, tmp_path), torch.randint(0, 256, (2, 16))
    with torch.no_grad():
        expected, found = theirs.eval()(tokens).logits.float(), ours.eval()(tokens).logits.float()
        latent = model.eval()(tokens).logits.float()
    assert (found - expected).norm() < 0.02 * expected.norm()
    assert (latent - expected).norm() > 0.05 * expected.norm()
