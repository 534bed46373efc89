"""Small trained models: checkpoints, and models as :func:`lightning_lowbit.export.trained_model.read` returns them."""

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_lowbit import convert, export_checkpoint
from lightning_lowbit.export.trained_model import TrainedModel
from lightning_lowbit.nn.layers.layer import quantized_layers
from lightning_lowbit.recipes.data import TextDataModule
from tests.lightning_imports import quiet_trainer

TEXT = "for number in range(10):\n    print(number, 'of ten')\n" * 60
VOCABULARY = 96
_SIZES = {
    **dict.fromkeys(("llama", "mistral", "bitnet"), {"num_key_value_heads": 2, "intermediate_size": 96}),
    "qwen3": {"num_key_value_heads": 2, "intermediate_size": 96, "head_dim": 16},
    "gpt2": {"n_positions": 64},
}


def fit(model, precision, folder, steps, data=None):
    """Trains a recipe's model for some steps, on a text or other ``data``; returns the checkpoint's path."""
    if data is None:
        (folder / "text.txt").write_text(TEXT)
        data = TextDataModule(str(folder / "text.txt"), sequence_length=32, batch_size=8, val_fraction=0.3)
    trainer = quiet_trainer(precision, max_steps=steps, limit_val_batches=0, default_root_dir=folder)
    trainer.fit(model, data)
    trainer.save_checkpoint(folder / "last.ckpt")
    return folder / "last.ckpt"


def export(checkpoint, format, folder, **options):
    return export_checkpoint(checkpoint, format, folder, **{"parity": False, **options})


def trained_model(model, casts, skip=()):
    """A model with random weights as one that was trained with these casts, in float32."""
    convert(model.eval(), casts, skip=[*skip])
    return TrainedModel(model, quantized_layers(model), torch.float32, getattr(model, "config", None))


def language_model(kind, casts, seed=0, skip=("lm_head",), std=0.1, **config):
    """A model of two layers of this type of ``transformers``; ``std`` of its matrices lets logits differ."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    made = AutoConfig.for_model(kind, **{**sizes, **tokens, **_SIZES[kind], **config})
    model = AutoModelForCausalLM.from_config(made, attn_implementation="eager")
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=std)
    return trained_model(model, casts, skip)


@torch.no_grad()
def greedy(model, tokens, length=12):
    """Tokens and their most likely continuation."""
    for _ in range(length):
        tokens = torch.cat([tokens, model(input_ids=tokens).logits[:, -1:].argmax(-1)], 1)
    return tokens[0].tolist()
