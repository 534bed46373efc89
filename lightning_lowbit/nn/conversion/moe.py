"""Routers of mixtures of experts, recognized by the names that transformers and litgpt give them.

A block is a module with a child that holds experts (``experts`` in its name or its class). A router is

- a layer ``router`` or ``gate`` of a block, or within three levels of one, with as many outputs as there are experts;
- a layer within a ``…Router``, ``…Gate`` or ``…Gating`` of a block;
- a layer ``shared_expert_gate``.

``gate_proj`` of an MLP is none: it is part of an expert, or of a module without any.
"""

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

_CLASS = re.compile(r".*(Router(MLP)?|Gate|Gating)")
_ROUTER_CLASS = re.compile(r".*(Router|TopK\w*Gat(e|ing))|(Moe|MoE)\w*Gat(e|ing)|\w+(Moe|MoE)(V\d+)?Gate")
_NAME = re.compile(r"(\w+_)?(router|gate)|wg")
_SHARED = re.compile(r"shared_experts?_gate")
_EXPERTS = re.compile(r"experts?", re.IGNORECASE)
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "n_expert", "n_experts")
_LEVELS = 3  # most modules between a block and a layer of its router


def is_router_class(cls: type) -> bool:
    return _ROUTER_CLASS.fullmatch(cls.__name__) is not None


def is_router(name: str, outputs: int | None, modules: Mapping[str, nn.Module]) -> bool:
    """Returns whether the layer of a name, with so many output features, is a router of experts."""
    path = name.split(".")
    if _SHARED.fullmatch(path[-1]):
        return True
    for level in range(1, min(len(path), _LEVELS) + 1):
        block = modules.get(".".join(path[:-level]))
        child_name = path[-level]
        if block is None or not _experts(block) or _EXPERTS.search(child_name):
            continue
        child = modules.get(".".join(path[: len(path) - level + 1]))
        if level > 1 and _CLASS.fullmatch(type(child).__name__):
            return True
        return bool(_NAME.fullmatch(path[-1])) and outputs in _counts(block)
    return False


def _experts(block: nn.Module) -> list[nn.Module]:
    children = block.named_children()
    return [child for name, child in children if _EXPERTS.search(name) or _EXPERTS.search(type(child).__name__)]


def _counts(block: nn.Module) -> set[Any]:
    """Returns all numbers that may be that of a block's experts."""
    counts: set[Any] = {getattr(block, name, None) for name in _COUNTS}
    for child in _experts(block):
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            counts.add(len(child))
        counts |= {getattr(child, count, None) for count in _COUNTS}
        counts |= {parameter.shape[0] for parameter in child.parameters(recurse=False) if parameter.dim() > 2}
    return counts - {None}
