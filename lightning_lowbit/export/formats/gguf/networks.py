"""The networks of ``transformers`` that llama.cpp runs with the same outputs, and how its files name their parts.

In q and k of a LLaMA llama.cpp rotates pairs of neighbors, and ``transformers`` elements i and i + d/2 of a head of d.
So their rows are written in the order 0, d/2, 1, d/2 + 1, ...
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_lowbit.checks import some

_LLAMA = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.*.input_layernorm": "blk.*.attn_norm",
    "model.layers.*.self_attn.q_proj": "blk.*.attn_q",
    "model.layers.*.self_attn.k_proj": "blk.*.attn_k",
    "model.layers.*.self_attn.v_proj": "blk.*.attn_v",
    "model.layers.*.self_attn.o_proj": "blk.*.attn_output",
    "model.layers.*.post_attention_layernorm": "blk.*.ffn_norm",
    "model.layers.*.mlp.gate_proj": "blk.*.ffn_gate",
    "model.layers.*.mlp.up_proj": "blk.*.ffn_up",
    "model.layers.*.mlp.down_proj": "blk.*.ffn_down",
}
_QWEN3 = _LLAMA | {
    "model.layers.*.self_attn.q_norm": "blk.*.attn_q_norm",
    "model.layers.*.self_attn.k_norm": "blk.*.attn_k_norm",
}
_BITNET = _LLAMA | {
    "model.layers.*.self_attn.attn_sub_norm": "blk.*.attn_sub_norm",
    "model.layers.*.mlp.ffn_sub_norm": "blk.*.ffn_sub_norm",
}
_GPT2 = {
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "lm_head": "output",
    "transformer.h.*.ln_1": "blk.*.attn_norm",
    "transformer.h.*.attn.c_attn": "blk.*.attn_qkv",
    "transformer.h.*.attn.c_proj": "blk.*.attn_output",
    "transformer.h.*.ln_2": "blk.*.ffn_norm",
    "transformer.h.*.mlp.c_fc": "blk.*.ffn_up",
    "transformer.h.*.mlp.c_proj": "blk.*.ffn_down",
}


@dataclass(frozen=True)
class Network:
    """A network that llama.cpp runs.

    Attributes:
        architecture: its name there.
        names: of each part in files, where ``*`` stands for the number of a block.
        activation: the only one that llama.cpp computes there, as ``transformers`` names it.
        interleaved: rotations are of neighbors, see above.
        scaled: parts of a block, as files call them, whose product llama.cpp multiplies by ``NAME.scale``.
        biases: its linear layers may have biases.
        fixed: values of the configuration that llama.cpp takes for granted.
        remedy: for networks with other values, a piece of the error message.
    """

    architecture: str
    names: Mapping[str, str]
    activation: str = "silu"
    interleaved: bool = False
    scaled: str = r"attn_(q|k|v|output)|ffn_(gate|up|down)"
    biases: bool = False
    fixed: Mapping[str, Any] = field(default_factory=dict)
    remedy: str = ""

    def name(self, name: str) -> str | None:
        """Returns the name of a module of the model in files; None if they have no such part."""
        part = self.names.get(re.sub(r"\.\d+\.", ".*.", name, count=1))
        number = re.search(r"\.(\d+)\.", name)
        return part if part is None or number is None else part.replace("*", number.group(1))

    def takes_scale(self, part: str, kind: str, has_bias: bool) -> bool:
        """Returns whether llama.cpp multiplies the product of a part, in blocks of a type, by ``NAME.scale``, and then
        adds a bias: in feed-forward layers it is added before."""
        if part == "output":
            return kind == "NVFP4"
        last = part.rpartition(".")[2]
        return re.fullmatch(self.scaled, last) is not None and not (has_bias and last.startswith("ffn"))

    def rows(self, name: str, config: Any) -> Tensor | None:
        """Returns the order of a part's rows in the file; None if it is that of the model."""
        if not self.interleaved or not name.endswith((".attn_q", ".attn_k")):
            return None
        heads = config.num_attention_heads if name.endswith("q") else config.num_key_value_heads
        return torch.arange(heads * head_size(config)).view(heads, 2, -1).mT.flatten()


# By the model type of ``transformers``.
NETWORKS: dict[str, Network] = {
    "llama": Network("llama", _LLAMA, interleaved=True, biases=True),
    "mistral": Network("llama", _LLAMA, interleaved=True, biases=True),
    "qwen3": Network("qwen3", _QWEN3),
    "gpt2": Network(
        "gpt2",
        _GPT2,
        activation="gelu_new",
        biases=True,
        scaled="attn_(qkv|output)",
        fixed={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    ),
    "bitnet": Network(  # computes SiLU whatever the file says: llama.cpp's issues 25885 and 26751
        "bitnet",
        _BITNET,
        fixed={"tie_word_embeddings": True},
        remedy="e.g. with network: llama, or config: {hidden_act: silu, tie_word_embeddings: true}, ",
    ),
}


def head_size(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def network_of(config: Any) -> Network:
    """Returns the network of a configuration of ``transformers``.

    Raises:
        ValueError: llama.cpp has none that computes the same.
    """
    kind = getattr(config, "model_type", None)
    network = NETWORKS.get(str(kind))
    if network is None:
        raise ValueError(
            f"GGUF files are for networks that llama.cpp has; here {', '.join(NETWORKS)} of transformers. The trained "
            f"model is {'of none' if kind is None else repr(kind)}. Other formats: --format dequantized, onnx."
        )
    activation = getattr(config, "hidden_act", None) or getattr(config, "activation_function", None)
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    is_windowed = "sliding_attention" in (getattr(config, "layer_types", None) or ()) or (
        kind == "mistral" and (config.sliding_window or config.max_position_embeddings) < config.max_position_embeddings
    )
    other = [
        f"{name}={getattr(config, name)!r}" for name, value in network.fixed.items() if getattr(config, name) != value
    ]
    if activation != network.activation:
        other.append(f"{activation!r} as its activation, where llama.cpp has {network.activation!r}")
    if rope != "default":
        other.append(f"positions of type {rope!r}")
    if is_windowed:
        other.append("a sliding window of attention")
    if other:
        raise ValueError(
            f"llama.cpp's {network.architecture!r} cannot compute what the model does, which has {some(other, 9)}. "
            f"Train without, {network.remedy}or take another format."
        )
    return network


def add_values(writer: Any, network: Network, config: Any) -> None:
    """Writes the values of a configuration, by the names of llama.cpp."""
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    if network.architecture == "gpt2":
        writer.add_feed_forward_length(config.n_inner or 4 * config.hidden_size)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_size(config))
    writer.add_value_length(head_size(config))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head_size(config))
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
