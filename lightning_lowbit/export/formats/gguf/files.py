"""GGUF files, written in one pass: the names, types and sizes of all tensors stand before their data."""

import math
from collections import Counter
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_lowbit._lightning import rank_zero_warn
from lightning_lowbit.checks import some
from lightning_lowbit.export.folder import in_dtype
from lightning_lowbit.export.formats.base import Format, Options, Written, row
from lightning_lowbit.export.formats.gguf.blocks import TQ2_0, BlockType, block_type, has_scale, pack
from lightning_lowbit.export.formats.gguf.networks import Network, add_values, network_of
from lightning_lowbit.export.formats.gguf.vocabulary import Vocabulary, vocabulary
from lightning_lowbit.export.trained_model import TrainedModel, eos_tokens
from lightning_lowbit.export.weights import Weight, check, common_obstacle, training_with_scales, weight_cast, weights
from lightning_lowbit.nn.layers.layer import QuantizedLayer
from lightning_lowbit.patterns import clean_name

FILE = "model.gguf"
_Dense = dict[str, tuple[Tensor, torch.dtype, Tensor | None]]
_F32 = 0
_PLAIN = {torch.float32: _F32, torch.float16: 1, torch.bfloat16: 30}  # ``ggml_type`` of unquantized tensors


def obstacle(name: str, layer: QuantizedLayer, ternary: BlockType = TQ2_0) -> str | None:
    """Returns why no block type holds the weight of a layer, in words; None if one does."""
    kind = common_obstacle(layer) or _type(layer, ternary)
    return kind if isinstance(kind, str) else None


def write(
    format: Format, original: TrainedModel, folder: Path, options: Options, ternary: BlockType = TQ2_0
) -> list[Written]:
    """Writes ``model.gguf``, with ternary weights in blocks of type ``ternary`` where these fit. A ``ValueError`` if
    llama.cpp has no such network, or no block type for a layer; float16 does not hold a scale, and ``options.rescale``
    is False; or the package ``gguf`` is missing."""
    network, dense = _plan(original, ternary, options.dtype)
    from gguf import GGUFWriter  # here, as its absence is told by then

    kinds = {name: _type(layer, ternary) for name, layer in original.layers.items()}
    with closing(GGUFWriter(folder / FILE, network.architecture)) as writer:
        _describe(writer, original, network, kinds)
        for name, (tensor, dtype, _) in dense.items():
            _declare(writer, name, _PLAIN[dtype], *tensor.shape[:-1], tensor.shape[-1] * dtype.itemsize)
        for name, layer in original.layers.items():
            kind, (rows, columns), part = kinds[name], layer.weight_matrix().shape, network.name(name)
            _declare(writer, f"{part}.weight", kind.number, rows, columns // kind.elements * kind.bytes)
            if has_scale(weight_cast(layer)):
                _declare(writer, f"{part}.scale", _F32, 4)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, (tensor, dtype, order) in dense.items():
            _put(writer, in_dtype(name, tensor, dtype), order)
        return [
            _put_layer(writer, weight, network, original.config, kinds[weight.name], options.rescale)
            for weight in weights(original)
        ]


def accept(original: TrainedModel, ternary: BlockType = TQ2_0) -> None:
    """Raises a ``ValueError`` if llama.cpp has no such network; or, where the package ``gguf`` tells the names of its
    parts, lacks one, or does not compute one with the scale of its weight."""
    network_of(original.config)
    if find_spec("gguf") is not None:
        _plan(original, ternary, torch.float32)


def _plan(original: TrainedModel, ternary: BlockType, dtype: torch.dtype) -> tuple[Network, _Dense]:
    """Returns the network of a file and its tensors that are not quantized; raises as :func:`write`."""
    network = network_of(original.config)
    check(original, {name: _obstacle(network, name, layer, ternary) for name, layer in original.layers.items()}, "gguf")
    return network, _dense(original, network, dtype)


def _type(layer: QuantizedLayer, ternary: BlockType) -> Any:
    return block_type(weight_cast(layer), layer.weight_matrix().shape[1], ternary)


def _obstacle(network: Network, name: str, layer: QuantizedLayer, ternary: BlockType) -> str | None:
    if (reason := obstacle(name, layer, ternary)) is not None:
        return reason
    part = network.name(name)
    if part is None:
        return f"llama.cpp's {network.architecture!r} has no such layer"
    kind = _type(layer, ternary)
    if has_scale(weight_cast(layer)) and not network.takes_scale(part, kind.name, layer.bias is not None):
        return (
            f"it has a scale of the tensor, by which llama.cpp's {network.architecture!r} does not multiply "
            f"{kind.name} there: leave it in high precision (skip), or train without such a scale (mxfp4)"
        )
    return None


def _dense(original: TrainedModel, network: Network, dtype: torch.dtype) -> _Dense:
    """Returns the tensors that are not quantized, with their dtypes and the order of their rows in the file."""
    from transformers.pytorch_utils import Conv1D

    tensors, unknown = {}, []
    for name, parameter in original.model.named_parameters():
        module, _, kind = clean_name(name).rpartition(".")
        if module in original.layers and kind == "weight":
            continue
        part, tensor = network.name(module), parameter.detach()
        if part is None or (kind == "bias" and not network.biases):
            unknown.append(name)
            continue
        if tensor.dim() > 1 and isinstance(original.model.get_submodule(name.rpartition(".")[0]), Conv1D):
            tensor = tensor.mT
        is_float32 = tensor.dim() == 1 or part == "position_embd"
        rows = network.rows(part, original.config)
        tensors[f"{part}.{kind}"] = (tensor, torch.float32 if is_float32 else dtype, rows)
    if unknown:
        raise ValueError(f"llama.cpp's {network.architecture!r} has no {some(unknown)}, which the trained model has.")
    return tensors


def _put_layer(writer: Any, weight: Weight, network: Network, config: Any, kind: BlockType, rescale: bool) -> Written:
    blocks = pack(weight.quantized, kind)
    if blocks.error == math.inf:
        raise ValueError(
            f"{weight.name} ({weight.cast}) has scales beyond the range of float16, which {kind.name} has: weights are "
            "too small or too large. Take a format with scales in bf16 or fp32, such as int4, onnx or dequantized."
        )
    if blocks.error > 0 and not rescale:
        raise ValueError(
            f"{weight.name} ({weight.cast}) has scales that float16, which {kind.name} has, does not hold. "
            f"{training_with_scales(weight.cast, 'fp16')}Or give rescale (--rescale), which keeps the codes, rounds "
            "the scales, and tells the error of each layer."
        )
    _put(writer, blocks.data, network.rows(str(network.name(weight.name)), config))
    if blocks.scale is not None:
        _put(writer, blocks.scale.reshape(1))
    size = blocks.data.numel() + (0 if blocks.scale is None else 4)
    return row(replace(weight, error=max(weight.error, blocks.error)), kind.name, size)


def _describe(writer: Any, original: TrainedModel, network: Network, kinds: dict[str, BlockType]) -> None:
    config: Any = original.config
    add_values(writer, network, config)
    writer.add_name(Path(original.facts.get("checkpoint", FILE)).stem)
    writer.add_file_type(Counter(kind.file_type for kind in kinds.values()).most_common(1)[0][0])
    writer.add_quantization_version(2)
    tokenizer = vocabulary(original.facts.get("tokenizer"), config.vocab_size, eos_tokens(original.model))
    if isinstance(tokenizer, Vocabulary):
        _describe_tokenizer(writer, tokenizer)
    else:
        rank_zero_warn(f"The GGUF file has no tokenizer, and llama.cpp takes token ids alone: {tokenizer}.")
        writer.add_tokenizer_model("none")


def _describe_tokenizer(writer: Any, vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    writer.add_token_merges(vocabulary.merges)
    for name, id in vocabulary.special.items():
        getattr(writer, f"add_{name}_token_id")(id)
    for name, is_added in vocabulary.added.items():  # always said: without, it depends on the cut
        getattr(writer, f"add_add_{name}_token")(is_added)
    template = vocabulary.template
    if isinstance(template, str):
        writer.add_chat_template(template)
    elif template is not None:
        writer.add_chat_template([{"name": name, "template": text} for name, text in template.items()])


def _declare(writer: Any, name: str, number: int, *shape: int) -> None:
    """Announces a tensor of a type, by the shape of its bytes."""
    import numpy as np
    from gguf import GGMLQuantizationType

    writer.add_tensor_info(name, shape, np.dtype(np.uint8), math.prod(shape), GGMLQuantizationType(number))


def _put(writer: Any, tensor: Tensor, order: Tensor | None = None) -> None:
    rows = tensor.contiguous() if order is None else tensor[order]
    writer.write_tensor_data(rows.view(torch.uint8).numpy())
