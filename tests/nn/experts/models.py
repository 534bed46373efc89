"""Tiny models of transformers with experts, by model type."""

import pytest
import torch
import transformers
from packaging.version import Version
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

EXPERTS, CHOSEN = 4, 2
_SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 32,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_LATENT = {
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
    "first_k_dense_replace": 1,
}
_SHARED = {"shared_expert_intermediate_size": 32}
_MAMBA = {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1, "ssm_state_size": 8}

# What each model type needs beside these sizes.
MODELS = {
    "mixtral": {},
    "olmoe": {},
    "gpt_oss": {},
    "llama4_text": {"intermediate_size_mlp": 32},
    "jetmoe": {},
    "qwen2_moe": _SHARED,
    "qwen3_moe": {},
    "granitemoe": {},
    "granitemoeshared": {},
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 4,
        "use_mamba_kernels": False,
    },
    "nemotron_h": {"layers_block_type": ["mamba", "moe"], **_MAMBA},
    "phimoe": {},
    "glm4_moe": {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "ernie4_5_moe": {},
    "minimax": {},
    "hunyuan_v1_moe": {},
    "aria_text": {"moe_num_experts": EXPERTS, "moe_topk": CHOSEN},
    "flex_olmo": {},
}
# Versions of transformers from which their experts are stacks that other code may multiply.
_STACKED = {"granitemoe": "5.13", "granitemoeshared": "5.13", "aria_text": "5.18"}


def settings(name):
    """What the configuration of a model type has of these."""
    default = AutoConfig.for_model(name)
    known = {*default.to_dict(), *default.attribute_map}
    return {key: value for key, value in {**_SIZES, **MODELS[name]}.items() if key in known}


def tiny(name, **changes):
    """A causal language model of a type, with random weights."""
    first = _STACKED.get(name, "5.8")
    if Version(transformers.__version__) < Version(first):
        pytest.skip(f"experts of {name} are stacks from transformers {first} on")
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**settings(name), **changes})
    model = AutoModelForCausalLM.from_config(config).float()
    for parameter in model.parameters():
        if parameter.dim() == 3:  # some stacks are left empty
            nn.init.normal_(parameter, std=0.1)
    return model


TOKENS = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(0))


def logits(model):
    return model(input_ids=TOKENS, use_cache=False).logits
