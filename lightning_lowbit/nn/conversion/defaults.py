"""Layers that stay in high precision unless a pattern names them: routers, adapters, narrow layers, perhaps output
layers.

Routers decide by small differences, adapters are small matrices beside large ones, and a narrow layer has next to no
arithmetic. A pattern of ``only`` or ``overrides`` that matches the layer's own name, such as ``router``, quantizes it.

Routers of experts are recognized by the names that transformers and litgpt give them. A block is a module with a child
that holds experts (``experts`` in its name or its class). A router is

- a layer ``router`` or ``gate`` of a block, or within three levels of one, with as many outputs as there are experts;
- a layer within a ``…Router``, ``…Gate`` or ``…Gating`` of a block;
- a layer ``shared_expert_gate``.

``gate_proj`` of an MLP is none: it is part of an expert, or of a module without any.

A layer is narrow if fprop contracts over fewer ``in_features``, or dgrad over fewer ``out_features``, than half of the
smallest block of the GEMM's casts, while its other side has at least four blocks: a head ``[1, 768]``, but no layer
``[4, 4]`` of a model that is small throughout. Scales of rows or tensors make no layer narrow.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_lowbit.distributed import whole_shape
from lightning_lowbit.nn.casts.linear_casts import LinearCasts
from lightning_lowbit.nn.layers.composite import PartLayer
from lightning_lowbit.nn.layers.registry import quantized_class
from lightning_lowbit.patterns import clean_name, select, select_by_name

_SIDES = {"fprop": 1, "dgrad": 0}  # of the weight [out, in], along which each GEMM contracts
_LEVELS = 3  # most modules between an adapter and the layer that it adapts, or a block and a layer of its router

_ROUTER_CLASS = re.compile(r".*(Router|TopK\w*Gat(e|ing))|(Moe|MoE)\w*Gat(e|ing)|\w+(Moe|MoE)(V\d+)?Gate")
_ROUTER_IN_BLOCK = re.compile(r".*(Router(MLP)?|Gate|Gating)")  # a class
_ROUTER = re.compile(r"(\w+_)?(router|gate)|wg")
_SHARED_GATE = re.compile(r"shared_experts?_gate")
_EXPERTS = re.compile(r"experts?", re.IGNORECASE)
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "n_expert", "n_experts")

OUTPUT = "the output layer"
_HEAD = re.compile(r"(\w+_)?(head|classifier)|actor|critic")  # may be registered before the layers that it reads
_IS_LEFT_OUTPUT = "_is_left_output"  # a module's attribute: for reasons


def default_reasons(model: nn.Module, casts: Mapping[str, LinearCasts]) -> dict[str, str]:
    """Returns the reasons of layers that stay in high precision by default, by name, among those whose casts to be are
    given by name."""
    modules = modules_by_name(model)
    # A model that is one layer was named by giving it.
    reasons = {name: _reason(clean_name(name), modules, casts[name]) for name in casts if name}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def output_layers(model: nn.Module, layers: Mapping[str, nn.Module]) -> list[str]:
    """Returns the names of a model's output layers, among linear layers and convolutions of ``layers`` (by name).

    The first rule that finds any decides:

    1. the layers that ``get_output_embeddings`` of modules returns, as in transformers; trained ones if there are any;
    2. layers whose weight is also an embedding's;
    3. the last layer in the order of registration: of trained ones called a head or a classifier, else of trained ones,
       else of all. Layers beside it with the same input, such as a second head, come along.

    With a layer of 1 or 3 come its twins in copies of the module around it, such as teachers and averages. Routers and
    adapters are never output layers, nor is a model that is one layer.
    """
    modules = modules_by_name(model)
    names = [name for name, layer in layers.items() if name and _can_be_output(clean_name(name), layer, modules)]
    declared = [output for module in modules.values() if (output := _declared(module)) is not None]
    if declared:
        outputs = [output for output in declared if any(p.requires_grad for p in output.parameters())] or declared
        parts = {part for output in outputs for part in output.modules()}
        return _with_twins([name for name in names if layers[name] in parts], names, modules)
    embeddings = [getattr(module, "weight", None) for module in modules.values() if isinstance(module, nn.Embedding)]
    shared = {id(weight) for weight in embeddings if weight is not None}
    if tied := [name for name in names if id(getattr(layers[name], "weight", None)) in shared]:
        return tied
    trained = [name for name in names if any(p.requires_grad for p in layers[name].parameters(recurse=False))]
    heads = [name for name in trained if _HEAD.fullmatch(name.rpartition(".")[2])]
    last = (heads or trained or names)[-1:]
    beside = [name for name in names if last and _are_parallel(name, last[0], layers, modules)]
    return _with_twins([*last, *beside], names, modules)


def _are_parallel(name: str, last: str, layers: Mapping[str, nn.Module], modules: Mapping[str, nn.Module]) -> bool:
    """Returns whether two layers are heads: beside each other, of the same inputs, outside of repeated blocks. They are
    called so, or are entries of one ``nn.ModuleDict``, or of one ``nn.ModuleList`` and no chain."""
    (parent, _, last_name), (other_parent, _, own_name) = (clean_name(path).rpartition(".") for path in (last, name))
    if name == last or parent != other_parent or any(part.isdecimal() for part in parent.split(".")):
        return False
    sides, size = _sides(layers[name]), _sides(layers[last])
    if sides is None or size is None or sides[1] != size[1]:
        return False
    is_chain = sides[0] == size[1]
    is_list = isinstance(modules.get(parent), nn.ModuleList) and not is_chain
    are_called = _HEAD.fullmatch(last_name) is not None and _HEAD.fullmatch(own_name) is not None
    return is_list or are_called or isinstance(modules.get(parent), nn.ModuleDict)


def _with_twins(outputs: Sequence[str], names: Sequence[str], modules: Mapping[str, nn.Module]) -> list[str]:
    """Adds the layers at the same place in copies of a module around them, in the order of ``names``."""
    kinds: dict[Any, list[str]] = {}
    for path, module in modules.items():
        if path:
            shapes = tuple((name, _shape(weight)) for name, weight in module.named_parameters())
            kinds.setdefault((type(module), shapes), []).append(path)
    twins = {clean_name(name) for name in outputs}
    for copies in kinds.values():
        for path in copies if len(copies) > 1 else ():
            inside = [name.removeprefix(f"{path}.") for name in twins if name.startswith(f"{path}.")]
            twins |= {f"{copy}.{name}" for copy in copies for name in inside}
    return [name for name in names if clean_name(name) in twins]


def _shape(weight: Tensor) -> tuple[int, ...] | None:
    return None if is_lazy(weight) else tuple(weight.shape)


def modules_by_name(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules of a model by clean names, a composite layer before its parts."""
    modules: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        modules.setdefault(clean_name(name), module)
    return modules


def _kind(layer: nn.Module | None) -> str | None:
    """Returns the kind of a layer whose class can be quantized; None for others and for parts of composite layers."""
    cls = None if layer is None or isinstance(layer, PartLayer) else quantized_class(type(layer))
    return None if cls is None else cls.kind


def _can_be_output(name: str, layer: nn.Module, modules: Mapping[str, nn.Module]) -> bool:
    if _kind(layer) not in ("linear", "convolution"):
        return False
    return not _is_router(name, getattr(layer, "out_features", None), modules) and not _is_adapter(name, modules)


def _declared(module: Any) -> nn.Module | None:
    """Returns the output layer by a module's own declaration; None without one."""
    output = None
    if callable(method := getattr(type(module), "get_output_embeddings", None)):
        with suppress(AttributeError, NotImplementedError, TypeError):
            output = method(module)
    return output if isinstance(output, nn.Module) else None


def mark_outputs(model: nn.Module, names: Collection[str]) -> None:
    """Notes in the modules which output layers, by clean names, conversion has left out, and in no others."""
    for name, module in model.named_modules():
        vars(module).pop(_IS_LEFT_OUTPUT, None)
        if clean_name(name) in names:
            vars(module)[_IS_LEFT_OUTPUT] = True


def is_left_output(module: nn.Module) -> bool:
    return _IS_LEFT_OUTPUT in vars(module)


def drop_named(names: Collection[str], layers: Sequence[str], patterns: Iterable[str]) -> set[str]:
    """Drops the names that a pattern names: by the layer itself, or by a module around it that has no other layers."""
    rest = set(names)
    for pattern in patterns:
        matched = select(layers, [pattern], "a pattern")
        rest -= matched if matched <= set(names) else select_by_name(layers, pattern)
    return rest


def _reason(name: str, modules: Mapping[str, nn.Module], casts: LinearCasts) -> str | None:
    layer = modules.get(name)
    if _kind(layer) != "linear":
        return None
    shape = _sides(layer)
    if _is_router(name, None if shape is None else shape[0], modules):
        return "a router of experts"
    if _is_adapter(name, modules):
        return "an adapter"
    return None if shape is None else _narrow(shape, casts)


def _sides(layer: Any) -> tuple[int, int] | None:
    """Returns outputs and inputs of a linear layer, or channels of a convolution: as attributes if there are any, since
    FSDP1 flattens weights."""
    for what in ("channels", "features"):
        declared = getattr(layer, f"out_{what}", None), getattr(layer, f"in_{what}", None)
        if all(isinstance(size, int) for size in declared):
            return declared  # type: ignore[return-value]
    whole = torch.empty(whole_shape(layer.weight), device="meta")  # FSDP1 may have taken the memory of the weight
    if whole.dim() != 2:
        return None
    return tuple(quantized_class(type(layer)).matrix_of(layer, whole).shape)  # type: ignore[union-attr]


def _narrow(shape: tuple[int, int], casts: LinearCasts) -> str | None:
    for gemm, side in _SIDES.items():
        operands = [getattr(casts, operand) for operand in casts.operands_of(gemm)]
        blocks = [cast.scale.block for cast in operands if not isinstance(cast, str | None)]
        lengths = [min(block) if isinstance(block, tuple) else block for block in blocks]
        block = min((length for length in lengths if isinstance(length, int)), default=0)  # rows and tensors have none
        if 2 * shape[side] < block and shape[1 - side] >= 4 * block:
            what = ("output", "input")[side] + "s" * (shape[side] != 1)
            return f"narrow, {shape[side]} {what} for blocks of {block}"
    return None


def is_router_class(cls: type) -> bool:
    return _ROUTER_CLASS.fullmatch(cls.__name__) is not None


def _is_router(name: str, outputs: int | None, modules: Mapping[str, nn.Module]) -> bool:
    """Returns whether the layer of a name, with so many output features, is a router of experts."""
    path = name.split(".")
    if _SHARED_GATE.fullmatch(path[-1]):
        return True
    for level in range(1, min(len(path), _LEVELS) + 1):
        block = modules.get(".".join(path[:-level]))
        if block is None or not _experts(block) or _EXPERTS.search(path[-level]):
            continue
        child = modules.get(".".join(path[: len(path) - level + 1]))
        if level > 1 and _ROUTER_IN_BLOCK.fullmatch(type(child).__name__):
            return True
        return bool(_ROUTER.fullmatch(path[-1])) and outputs in _counts(block)
    return False


def _experts(block: nn.Module) -> list[nn.Module]:
    children = block.named_children()
    return [child for name, child in children if _EXPERTS.search(name) or _EXPERTS.search(type(child).__name__)]


def _counts(block: nn.Module) -> set[Any]:
    """Returns all numbers that may be that of a block's experts."""
    experts = _experts(block)
    counts: set[Any] = {getattr(module, count, None) for module in (block, *experts) for count in _COUNTS}
    for child in experts:
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            counts.add(len(child))
        counts |= {parameter.shape[0] for parameter in child.parameters(recurse=False) if parameter.dim() > 2}
    return counts - {None}


def _is_adapter(name: str, modules: Mapping[str, nn.Module]) -> bool:
    path = name.split(".")
    if any(part.startswith("lora_") for part in path[-_LEVELS:]):
        return True
    for level in range(1, min(len(path), _LEVELS) + 1):
        around = modules.get(".".join(path[:-level]))
        if type(around).__module__.startswith("peft.tuners") and hasattr(around, "base_layer"):
            return path[-level] != "base_layer"
    return False
