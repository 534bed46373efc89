"""The networks of ``transformers`` that llama.cpp runs with the same outputs, and how its files name their parts.

In q and k of a LLaMA llama.cpp rotates pairs of neighbors, and ``transformers`` elements i and i + d/2 of a head of d.
So their rows are written in the order 0, d/2, 1, d/2 + 1, ...
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_lowbit.checks import some
from lightning_lowbit.packages import install


@dataclass(frozen=True)
class Network:
    """A network that llama.cpp runs."""

    architecture: str  # its name there
    activation: str = "silu"  # the only one that llama.cpp computes there, as ``transformers`` names it
    interleaved: bool = False  # rotations are of neighbors, see above
    scaled: str = r"attn_(q|k|v|output)|ffn_(gate|up|down)"  # parts that llama.cpp multiplies by ``NAME.scale``
    biases: bool = False  # its linear layers may have biases
    fixed: Mapping[str, Any] = field(default_factory=dict)  # of the configuration, which llama.cpp takes for granted
    more: Mapping[str, str] = field(default_factory=dict)  # parts that ``gguf`` does not know, by their last names here
    remedy: str = ""  # for networks with other values, a piece of the error message

    def name(self, name: str) -> str | None:
        """Returns the name of a module of the model in files; None if they have no such part."""
        number = re.search(r"\.(\d+)\.", name)
        part = self.more.get(name.rpartition(".")[2]) or _names(self.architecture).get_name(_in_block(name, "0"))
        return part if part is None or number is None else _in_block(part, number[1])

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
    "llama": Network("llama", interleaved=True, biases=True),
    "mistral": Network("llama", interleaved=True, biases=True),
    "qwen3": Network("qwen3"),
    "gpt2": Network(
        "gpt2",
        activation="gelu_new",
        biases=True,
        scaled="attn_(qkv|output)",
        fixed={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    ),
    "bitnet": Network(  # computes SiLU whatever the file says: llama.cpp's issues 25885 and 26751
        "bitnet",
        fixed={"tie_word_embeddings": True},
        more={name: f"blk.0.{name}" for name in ("attn_sub_norm", "ffn_sub_norm")},
        remedy="e.g. with network: llama, or config: {hidden_act: silu, tie_word_embeddings: true}, ",
    ),
}


def _in_block(name: str, number: str) -> str:
    return re.sub(r"\.\d+\.", f".{number}.", name, count=1)


@cache
def _names(architecture: str) -> Any:
    """Returns the names of the parts of a network with one block, as llama.cpp's converter gives them."""
    try:
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
    except ImportError as error:
        raise ValueError(f"GGUF files take a package that is not here ({error}): {install('gguf')}.") from error
    return get_tensor_name_map({name: number for number, name in MODEL_ARCH_NAMES.items()}[architecture], 1)


def head_size(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def network_of(config: Any) -> Network:
    """Returns the network of a configuration of ``transformers``; a ``ValueError`` if llama.cpp has none that computes
    the same."""
    kind = getattr(config, "model_type", None)
    network = NETWORKS.get(str(kind))
    if network is None:
        raise ValueError(
            f"GGUF files are for networks that llama.cpp has; here {', '.join(NETWORKS)} of transformers. The trained "
            f"model is {'of none' if kind is None else repr(kind)}. Without --format, those that hold it are listed."
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
