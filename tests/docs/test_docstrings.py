"""Every public class and function has an example, and all of them run."""

import doctest
import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import lightning_lowbit
from lightning_lowbit import FP4Precision, FP8Precision, IntegerPrecision
from lightning_lowbit.recipes.models import CausalLM
from tests.lightning_imports import LightningModule, MixedPrecision, Trainer

NAMES = sorted(lightning_lowbit.__all__)


class MyModule(LightningModule):
    def __init__(self, layers=None):
        super().__init__()
        self.layers = layers or nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))

    def forward(self, x):
        return self.layers(x)

    def training_step(self, batch, batch_idx):
        return self(batch)[0].square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def trainer(**arguments):
    return Trainer(accelerator="cpu", logger=False, enable_model_summary=False, **arguments)


def checkpoint_of(precision, model, data):
    """Trains a model for a step and saves ``last.ckpt``."""
    saver = trainer(plugins=[precision], max_steps=1, enable_checkpointing=False, enable_progress_bar=False)
    saver.fit(model, torch.utils.data.DataLoader(data, batch_size=16))
    saver.save_checkpoint("last.ckpt")


def llama():
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=64, num_hidden_layers=2))


def compressed_llama():
    """Writes the folder ``llama-fp8``, as compressed-tensors does."""
    state, folder = {}, Path("llama-fp8")
    for name, tensor in llama().state_dict().items():
        if name.endswith("_proj.weight"):
            scale = (tensor.abs().max() / 448).reshape(1)
            state[f"{name}_scale"], tensor = scale, (tensor / scale).to(torch.float8_e4m3fn)
        state[name] = tensor
    folder.mkdir()
    save_file(state, folder / "model.safetensors")
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "tensor"}}}
    own = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}
    (folder / "config.json").write_text(json.dumps({"quantization_config": own}))


def trained_llama():
    """Trains a network of the recipes, which its checkpoint names."""
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "vocab_size": 256, "intermediate_size": 128}
    precision = IntegerPrecision(4, activation_bits=None, group=64, skip=["lm_head"])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You defined a `validation_step`", UserWarning)
        checkpoint_of(precision, CausalLM("llama", {**sizes, "num_hidden_layers": 1}), torch.randint(64, (16, 33)))


def exported_llama():
    """Writes the folder ``llama-nvfp4``."""
    trained_llama()
    options = {"dtype": "fp32", "tokenizer": "bytes", "parity": False}
    lightning_lowbit.export_checkpoint("last.ckpt", "int4", "llama-nvfp4", **options)


# What an example needs beside the names of the package, by the name that has the example.
PREPARED = {
    "bake": lambda: checkpoint_of(IntegerPrecision(4, activation_bits=None), MyModule(), torch.randn(16, 32)),
    "restore": lambda: checkpoint_of(FP4Precision(), MyModule(), torch.randn(16, 32)),
    "export_checkpoint": trained_llama,
    "load": exported_llama,
    "load_compressed": compressed_llama,
    "fold": lambda: checkpoint_of(FP8Precision(smooth_swiglu="channel"), MyModule(llama()), torch.arange(16)[:, None]),
}


@pytest.mark.parametrize("name", NAMES)
def test_an_example_runs(name, tmp_path):
    PREPARED.get(name, lambda: None)()
    known = {each: getattr(lightning_lowbit, each) for each in NAMES} | {
        "MixedPrecision": MixedPrecision,
        "MyModule": MyModule,
        "Trainer": trainer,
        "llama": llama(),
        "model": MyModule(llama()) if name == "fold" else llama(),
        "tokens": torch.randint(64, (4, 32)) if name == "load" else torch.randn(4, 32),
        "torch": torch,
    }
    examples = doctest.DocTestParser().get_examples(getattr(lightning_lowbit, name).__doc__ or "")
    assert examples, f"{name} has no example"
    for example in examples:
        if example.want:
            assert repr(eval(example.source, known)) == example.want.strip()
        else:
            exec(example.source, known)
