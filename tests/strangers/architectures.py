"""Tiny models of 47 types of transformers, with random weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto as auto

VOCABULARY, TOKENS, WIDTH, PIXELS = 128, 32, 64, 32

_WIDTHS = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4}
_TEXT = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_ENCODER = {**_TEXT, **_WIDTHS, "intermediate_size": 128, "max_position_embeddings": 64}
_DECODER = {**_ENCODER, "num_key_value_heads": 2}
_GROUPED = {**_DECODER, "head_dim": 16}
_EXPERTS = {"num_experts_per_tok": 2, "num_experts": 4, "num_local_experts": 4}
_VISION = {**_WIDTHS, "intermediate_size": 128, "image_size": PIXELS, "patch_size": 8}


@dataclass(frozen=True)
class Architecture:
    """A type of transformers, of which at least so many percent have to be covered."""

    least: float
    config: Mapping[str, Any]
    of: str = "CausalLM"
    batch: Callable[[], dict[str, Any]] = field(default=lambda: text())
    nested: Mapping[str, tuple[str, Mapping[str, Any]]] = field(default_factory=dict)  # (type, config) by name

    def build(self, kind):
        torch.manual_seed(0)
        nested = {name: CONFIG_MAPPING[part](**config) for name, (part, config) in self.nested.items()}
        config = CONFIG_MAPPING[kind](**self.config, **nested)
        return getattr(auto, f"AutoModel{f'For{self.of}' if self.of else ''}").from_config(config)


def _ids():
    return torch.randint(3, VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(0))


def text():
    return {"input_ids": _ids(), "labels": _ids()}


def image():
    pixels = torch.randn(2, 3, PIXELS, PIXELS, generator=torch.Generator().manual_seed(0))
    return {"pixel_values": pixels, "labels": torch.tensor([0, 1])}


def image_and_text():
    return {**image(), **text()}


def question():
    """Text that begins with one token for each patch."""
    ids = _ids()
    ids[:, : (PIXELS // 8) ** 2] = VOCABULARY - 1
    return {**image(), "input_ids": ids, "labels": ids}


def sound():
    waves = torch.randn(2, 4000, generator=torch.Generator().manual_seed(0))
    return {"input_values": waves, "labels": torch.randint(3, 30, (2, 4))}


def spectrogram():
    mel = torch.randn(2, 16, 2 * TOKENS, generator=torch.Generator().manual_seed(0))
    return {"input_features": mel, "labels": _ids()[:, :16]}


_MAMBA = {**_TEXT, "hidden_size": WIDTH, "num_hidden_layers": 2, "state_size": 16}
_T5 = {**_TEXT, "d_model": WIDTH, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
_BART = {"d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4}
_BART |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128}
_SWIN = {
    "image_size": PIXELS,
    "patch_size": 2,
    "embed_dim": 32,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
}
_CLIP_TEXT = {**_WIDTHS, **_TEXT, "intermediate_size": 128, "max_position_embeddings": 64}
_MLA = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}

ARCHITECTURES = {
    "llama": Architecture(89, _DECODER),
    "mistral": Architecture(89, _GROUPED),
    "qwen2": Architecture(89, _DECODER),
    "qwen3": Architecture(89, _GROUPED),
    "gemma": Architecture(89, _GROUPED),
    "gemma2": Architecture(90, _GROUPED),
    "gemma3_text": Architecture(89, _GROUPED),
    "phi3": Architecture(89, _DECODER),
    "olmo2": Architecture(89, _DECODER),
    "smollm3": Architecture(89, _DECODER),
    "cohere": Architecture(89, _DECODER),
    "starcoder2": Architecture(87, _DECODER),
    "stablelm": Architecture(89, _DECODER),
    "gpt2": Architecture(92, {**_TEXT, "n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "gpt_neox": Architecture(88, _ENCODER),
    "bloom": Architecture(92, {**_TEXT, "hidden_size": WIDTH, "n_layer": 2, "n_head": 4}),
    "opt": Architecture(88, {**_ENCODER, "ffn_dim": 128, "word_embed_proj_dim": WIDTH}),
    "bitnet": Architecture(89, _DECODER),
    "mamba": Architecture(91, _MAMBA),
    "bert": Architecture(90, _ENCODER, "MaskedLM"),
    "roberta": Architecture(90, {**_ENCODER, "max_position_embeddings": 66}, "MaskedLM"),
    "modernbert": Architecture(90, {**_ENCODER, "cls_token_id": 1, "sep_token_id": 2}, "MaskedLM"),
    "distilbert": Architecture(90, {**_TEXT, "dim": WIDTH, "hidden_dim": 128, "n_layers": 2, "n_heads": 4}, "MaskedLM"),
    "deberta-v2": Architecture(
        72, {**_ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}, "MaskedLM"
    ),
    "electra": Architecture(90, {**_ENCODER, "embedding_size": WIDTH}, "MaskedLM"),
    "t5": Architecture(87, _T5, "Seq2SeqLM"),
    "bart": Architecture(85, {**_TEXT, **_BART, "max_position_embeddings": 64}, "Seq2SeqLM"),
    "dinov2": Architecture(95, _VISION, "ImageClassification", image),
    "swin": Architecture(94, _SWIN, "ImageClassification", image),
    "llava": Architecture(
        90,
        {"image_token_index": VOCABULARY - 1, "vision_feature_layer": -1},
        "ImageTextToText",
        question,
        {"text_config": ("llama", _DECODER), "vision_config": ("clip_vision_model", _VISION)},
    ),
    "rwkv": Architecture(100, {**_TEXT, "hidden_size": WIDTH, "num_hidden_layers": 2, "context_length": 64}),
    "mamba2": Architecture(76, {**_MAMBA, "num_heads": 8, "head_dim": 16, "n_groups": 1, "chunk_size": 16}),
    "clip": Architecture(
        89, {"projection_dim": WIDTH, "text_config": _CLIP_TEXT, "vision_config": _VISION}, "", image_and_text
    ),
    "vit": Architecture(93, _VISION, "ImageClassification", image),
    "whisper": Architecture(
        89,
        {**_TEXT, **_BART, "num_mel_bins": 16, "max_source_positions": TOKENS, "max_target_positions": 64}
        | {"decoder_start_token_id": 1},
        "SpeechSeq2Seq",
        spectrogram,
    ),
    "deepseek_v3": Architecture(
        88,
        {**_ENCODER, **_MLA, "num_key_value_heads": 4, "moe_intermediate_size": 64, "n_routed_experts": 8}
        | {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    ),
    "convnext": Architecture(
        88, {"hidden_sizes": [32, 64], "depths": [2, 2], "num_stages": 2}, "ImageClassification", image
    ),
    "jamba": Architecture(
        92,
        {**_DECODER, "num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2, "use_mamba_kernels": False}
        | {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
        | {"mamba_d_state": 16, "mamba_dt_rank": 16},
    ),
    "qwen2_moe": Architecture(
        92, {**_DECODER, **_EXPERTS, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 128}
    ),
    "wav2vec2": Architecture(
        75,
        {**_ENCODER, "vocab_size": 32, "conv_dim": [32, 32, 32], "conv_kernel": [10, 3, 3], "conv_stride": [5, 4, 4]}
        | {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "mask_time_length": 2},
        "CTC",
        sound,
    ),
    "qwen3_moe": Architecture(88, {**_GROUPED, **_EXPERTS, "moe_intermediate_size": 64}),
    "llama4_text": Architecture(95, {**_GROUPED, **_EXPERTS, "intermediate_size_mlp": 128}),
    "gpt_oss": Architecture(93, {**_GROUPED, **_EXPERTS}),
    "mixtral": Architecture(92, {**_DECODER, **_EXPERTS}),
    "olmoe": Architecture(92, {**_DECODER, **_EXPERTS}),
    "granitemoe": Architecture(92, {**_DECODER, **_EXPERTS}),
    "falcon": Architecture(92, {**_TEXT, **_WIDTHS}),
}
