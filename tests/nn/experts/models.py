"""Tiny models of transformers with experts, by model type."""

import pytest
import torch
import transformers
from packaging.version import Version
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

EXPERTS, CHOSEN = 4, 2
IDENTITIES = 2  # of LongCat, after its experts
_SIZES = {"vocab_size": 64, "hidden_size": 64, "max_position_embeddings": 64, "pad_token_id": 0}
_SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
_SIZES |= {"intermediate_size": 32, "moe_intermediate_size": 32, "num_experts_per_tok": CHOSEN}
_SIZES |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), EXPERTS)
_GROUPS = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
_LATENT = {**_GROUPS, "q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 16}
_LATENT |= dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "head_dim"), 8)
_MAMBA = {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1, "ssm_state_size": 8}
_JAMBA = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
_DBRX = {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}
_LONGCAT = {**_LATENT, "num_layers": 1, "ffn_hidden_size": 64, "expert_ffn_hidden_size": 32, "moe_topk": CHOSEN}

# What each model type needs beside these sizes.
MODELS = {
    **{name: {} for name in ("mixtral", "olmoe", "gpt_oss", "jetmoe", "qwen3_moe", "granitemoe", "granitemoeshared")},
    **{name: {} for name in ("phimoe", "ernie4_5_moe", "minimax", "hunyuan_v1_moe", "flex_olmo")},
    "llama4_text": {"intermediate_size_mlp": 32},
    "qwen2_moe": {"shared_expert_intermediate_size": 32},
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "jamba": {**_JAMBA, "mamba_d_state": 4, "use_mamba_kernels": False},
    "nemotron_h": {"layers_block_type": ["mamba", "moe"], **_MAMBA},
    "glm4_moe": _GROUPS,
    "aria_text": {"moe_num_experts": EXPERTS, "moe_topk": CHOSEN},
    "dbrx": {
        **_DBRX,
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": EXPERTS, "moe_top_k": CHOSEN},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    "longcat_flash": {**_LONGCAT, "zero_expert_num": IDENTITIES, "bos_token_id": 1, "eos_token_id": 2},
}
# Versions of transformers from which they run, and their experts are stacks that other code may multiply.
_FIRST = {"granitemoe": "5.13", "granitemoeshared": "5.13", "aria_text": "5.18", "dbrx": "5.15"}


def settings(name):
    """What the configuration of a model type has of these."""
    default = AutoConfig.for_model(name)
    known = {*default.to_dict(), *default.attribute_map}
    return {key: value for key, value in {**_SIZES, **MODELS[name]}.items() if key in known}


def tiny(name, **changes):
    first = _FIRST.get(name, "5.8")
    if Version(transformers.__version__) < Version(first):
        pytest.skip(f"{name} runs, or has stacks of experts, from transformers {first} on")
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**settings(name), **changes})
    model = AutoModelForCausalLM.from_config(config).float()
    for parameter in expert_matrices(model):  # some are left empty
        nn.init.normal_(parameter, std=0.1)
    return model


def expert_matrices(model):
    """Parameters that hold a matrix for each expert: stacks, or one below the other in DBRX."""
    of_dbrx = ("mlp.w1", "mlp.v1", "mlp.w2")
    return [p for name, p in model.named_parameters() if (p.dim() == 3 and p.shape[1] > 1) or name.endswith(of_dbrx)]


TOKENS = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(0))


def logits(model):
    return model(input_ids=TOKENS, use_cache=False).logits
