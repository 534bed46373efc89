"""Experts of transformers that keep their matrices in ways of their own: DBRX and LongCat."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_lowbit import convert
from lightning_lowbit.nn import GemmCounter, LayerKeys
from lightning_lowbit.nn.layers.classes import restore_classes
from lightning_lowbit.nn.layers.layer import quantized_layers
from tests.nn.experts.models import CHOSEN, EXPERTS, logits
from tests.nn.experts.test_transformers import routed, stacks

IDENTITIES = 2  # of LongCat, after its experts
_DBRX = {
    "d_model": 64,
    "n_heads": 4,
    "n_layers": 2,
    "max_seq_len": 64,
    "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": EXPERTS, "moe_top_k": CHOSEN},
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
}
_LONGCAT = {
    "hidden_size": 64,
    "num_layers": 1,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "ffn_hidden_size": 64,
    "expert_ffn_hidden_size": 32,
    "moe_topk": CHOSEN,
    "n_routed_experts": EXPERTS,
    "zero_expert_num": IDENTITIES,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS = {"dbrx": _DBRX, "longcat_flash": _LONGCAT}
PRODUCTS = {"dbrx": {"w1", "v1", "w2"}, "longcat_flash": {"gate_up_proj", "down_proj"}}


def tiny(name):
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, vocab_size=64, pad_token_id=0, **MODELS[name])
    model = AutoModelForCausalLM.from_config(config).float().eval()
    if name == "dbrx" and model.transformer.blocks[0].ffn.router.layer.in_features != model.config.d_model:
        pytest.skip("DBRX does not run in transformers before 5.15")
    for parameter, values in model.named_parameters():
        if "experts" in parameter:  # left empty
            nn.init.normal_(values, std=0.1)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_experts_compute_what_transformers_does(name):
    model = tiny(name)
    expected, keys = logits(model), [*model.state_dict()]
    convert(model, "bf16")
    assert torch.equal(logits(model), expected)
    host = routed(model)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, 64, generator=generator)
    x = x if name == "dbrx" else x.flatten(0, 1)
    known = EXPERTS if name == "dbrx" else EXPERTS + IDENTITIES
    chosen = torch.stack([torch.randperm(known, generator=generator)[:CHOSEN] for _ in range(15)])
    weights = torch.rand(15, CHOSEN, generator=generator)
    torch.testing.assert_close(
        host._quantized(x, chosen, weights), host(x, chosen, weights), rtol=1e-4, atol=1e-5, check_stride=False
    )
    restore_classes(model)
    assert not quantized_layers(model) and not host._forward_pre_hooks
    assert [*model.state_dict()] == keys
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("name", MODELS)
def test_products_are_quantized_and_counted(name):
    model = convert(tiny(name), "nvfp4")
    LayerKeys(model).fill_(0)
    with GemmCounter(model.train()) as counter:
        logits(model).square().mean().backward()
    found = stacks(model)
    assert {layer.rpartition(".")[2] for layer in found} == PRODUCTS[name]
    for stack, layer in found.items():
        assert all(counter.gemms[stack, gemm] > 0 for gemm in ("fprop", "dgrad", "wgrad"))
        gradient = layer.own_parameters()[0].grad
        assert gradient.isfinite().all() and gradient.any()
    assert not any(".experts" in uncovered for uncovered in counter.coverage().uncovered)
