"""Small trained models, as :func:`lightning_lowbit.export.trained_model.read` returns them."""

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_lowbit import convert
from lightning_lowbit.export.trained_model import TrainedModel
from lightning_lowbit.nn.layers.layer import quantized_layers

VOCABULARY = 96
_SIZES = {
    "llama": {"num_key_value_heads": 2, "intermediate_size": 96},
    "qwen3": {"num_key_value_heads": 2, "intermediate_size": 96, "head_dim": 16},
    "bitnet": {"num_key_value_heads": 2, "intermediate_size": 96},
    "gpt2": {"n_positions": 64},
}


def trained_model(model, casts, skip=()):
    """A model with random weights as one that was trained with these casts, in float32."""
    convert(model.eval(), casts, skip=[*skip])
    return TrainedModel(model, quantized_layers(model), torch.float32, getattr(model, "config", None))


def language_model(kind, casts, seed=0, **config):
    """A model of two layers of this type of ``transformers``; all but its last layer is quantized."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    made = AutoConfig.for_model(kind, **{**sizes, **tokens, **_SIZES[kind], **config})
    model = AutoModelForCausalLM.from_config(made, attn_implementation="eager")
    for parameter in model.parameters():  # large enough for logits that differ
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.1)
    return trained_model(model, casts, skip=("lm_head",))
