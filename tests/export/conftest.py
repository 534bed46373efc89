"""Checkpoints of language models that were trained in few bits."""

import json
import warnings
from functools import cache

import pytest
import torch

from lightning_lowbit.precision import LowBitPrecision
from lightning_lowbit.recipes.data import TextDataModule
from lightning_lowbit.recipes.models import CausalLM
from tests.lightning_imports import quiet_trainer

SIZES = {
    "llama": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4},
    "qwen3": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"num_key_value_heads": 2, "head_dim": 32},
    "gpt2": {"n_embd": 128, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0},
    "bitnet": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"num_key_value_heads": 4, "bos_token_id": 0, "eos_token_id": 0},
}
TEXT = "for number in range(10):\n    print(number, 'of ten')\n" * 60


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A function that trains a network with casts for some steps, and returns the checkpoint's path."""

    @cache
    def train(network, casts, steps=30, shared=False, overridden=None):
        folder = tmp_path_factory.mktemp("trained")
        (folder / "text.txt").write_text(TEXT)
        config = {"vocab_size": 256, "max_position_embeddings": 128, **SIZES[network]}
        model = CausalLM(network, config, seed=0, optimizer=lambda p: torch.optim.AdamW(p, lr=3e-3))
        data = TextDataModule(str(folder / "text.txt"), sequence_length=32, batch_size=8, val_fraction=0.3)
        patterns = ["(q|k|v)_proj", "gate_proj|up_proj"] if shared else []
        others = {"layers.0.mlp": _casts(overridden)} if overridden else {}
        how = {"skip": ["lm_head"], "shared_amax": patterns, "overrides": others, "compute_dtype": "bf16"}
        precision = LowBitPrecision(_casts(casts), **how)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = quiet_trainer(max_steps=steps, plugins=precision, limit_val_batches=0, default_root_dir=folder)
            trainer.fit(model, data)
        trainer.save_checkpoint(folder / "last.ckpt")
        return folder / "last.ckpt"

    return train


def _casts(casts):
    """A preset's name, or fields of casts in JSON, which a cache takes."""
    return json.loads(casts) if casts.startswith("{") else casts


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path
