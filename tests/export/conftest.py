"""Checkpoints of language models that were trained in few bits."""

import json
import warnings
from functools import cache, partial

import pytest
import torch

from lightning_lowbit.precision import LowBitPrecision
from lightning_lowbit.recipes.models import CausalLM
from tests.export.originals import TEXT, fit

LLAMA = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES = {
    "llama": LLAMA,
    "qwen3": {**LLAMA, "num_key_value_heads": 2, "head_dim": 32},
    "gpt2": {"n_embd": 128, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0},
    "bitnet": {**LLAMA, "num_key_value_heads": 4, "bos_token_id": 0, "eos_token_id": 0},
}


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A function that trains a network with casts for some steps, and returns the checkpoint's path."""

    @cache
    def train(network, casts, steps=30, shared=False, overridden=None):
        config = {"vocab_size": 256, "max_position_embeddings": 128, **SIZES[network]}
        model = CausalLM(network, config, seed=0, optimizer=partial(torch.optim.AdamW, lr=3e-3))
        patterns = ["(q|k|v)_proj", "gate_proj|up_proj"] if shared else []
        others = {"layers.0.mlp": _casts(overridden)} if overridden else {}
        how = {"skip": ["lm_head"], "shared_amax": patterns, "overrides": others, "compute_dtype": "bf16"}
        with warnings.catch_warnings(action="ignore"):
            return fit(model, LowBitPrecision(_casts(casts), **how), tmp_path_factory.mktemp("trained"), steps)

    return train


def _casts(casts):
    """A preset's name, or fields of casts in JSON, which a cache takes."""
    return json.loads(casts) if casts.startswith("{") else casts


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path
