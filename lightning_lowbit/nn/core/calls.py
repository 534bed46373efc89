"""Calls of one layer within a micro-batch: each has its own random bits, and the same ones when it is recomputed.

The keys of a later call are those of the layer XOR a hash of the call's number, for x and g alone: a weight is rounded
alike in all calls and on all ranks.

Activation checkpointing recomputes a region of the forward pass in the backward pass, the last region first. A region
notes the number of each layer's first call in it, and its recomputation counts from there. The region of a call is read
from Python's stack: it is the ``ctx`` of an autograd function (a reentrant checkpoint, a compiled graph, any other), or
the frame of a non-reentrant checkpoint. Where none is found, a layer with several calls raises.
"""

import hashlib
import sys
from collections import Counter
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor

from lightning_lowbit._torch import FunctionContext, graph_in_compilation, number_of_backward, saved_tensor_hooks
from lightning_lowbit.compilation import opaque


class Calls:
    """Counts the calls of each layer of a model.

    Attributes:
        varying: int64 ``[6]``: all bits where each call has its own key, and none for a weight.
        drawn: the keys of all calls of a micro-batch; None where nothing needs them.
    """

    def __init__(self, varying: Tensor) -> None:
        self.varying = varying
        self.drawn: list[Tensor] | None = None
        self._counts: Counter[int] = Counter()  # by id: a copy of a layer must not hold other layers

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update({"drawn" if name == "given" else name: value for name, value in state.items()})  # once given

    def begin(self) -> None:
        """Starts a micro-batch: the next call of each layer is its first one."""
        self._counts.clear()
        if self.drawn is not None:
            self.drawn.clear()

    def number(self, layer: Any, site: int | None = None) -> int:
        """Returns the number of a call that begins, at a ``site`` of a compiled graph; a ``ValueError`` if unknown."""
        regions, again = _surroundings(site is not None)
        if again is None:
            number = self._counts[id(layer)]
            self._counts[id(layer)] += 1
        elif (first_number := _recomputed(*again, id(layer), site)) is not None:
            number = first_number
        elif self._counts[id(layer)] <= 1:
            number = 0
        else:
            raise ValueError(
                f"{layer} is called {self._counts[id(layer)]} times in a step, each time with random bits of its own, "
                "and it cannot be told which of these calls is computed now, within a backward pass. Recompute "
                "activations with torch.utils.checkpoint.checkpoint, or give the layer casts without stochastic "
                "rounding: overrides={...}."
            )
        for region in regions:
            _notes(region).setdefault(id(layer), number)
            if site is not None:
                _notes(region)[id(layer), site] = number
        return number


def keys_of_call(layer: Any) -> Tensor | None:
    """Returns the keys of a call that begins now, as a copy; None for a layer that has none, or draws no bits."""
    state = layer.lowbit
    if state.keys is None or not state.casts.traits.draws:
        return None
    return _keys_in_graph(state.keys, _site()) if torch.compiler.is_compiling() else _keys_of_call(layer)


def number_calls(layer: Any, keys: Tensor, calls: Calls) -> None:
    """Sets the keys of a layer, and counts its calls."""
    state = layer.lowbit
    state.keys, state.calls, state.plugin_is_gone = keys, calls, False
    _LAYERS[keys.data_ptr()] = layer


def _keys_of_call(layer: Any, site: int | None = None) -> Tensor:
    layer_keys, calls = layer.lowbit.keys, layer.lowbit.calls
    number = 0 if calls is None else calls.number(layer, site)
    keys: Tensor = layer_keys.clone() if number == 0 else layer_keys ^ (calls.varying & _hash(number))
    if calls is not None and calls.drawn is not None:
        calls.drawn.append(keys)
    return keys


def keys_of_product(keys: Tensor, number: int) -> Tensor:
    """Returns the keys of one of several products of a call, such as an expert: the call's XOR a hash of the index."""
    return keys ^ _hash_of_product(number)


def keys_of_products(keys: Tensor, first: int, count: int) -> Tensor:
    """Returns :func:`keys_of_product` of so many products from a first one on, int64 ``[6, count]``."""
    return keys[:, None] ^ _hashes_of_products(first, count, keys.device)


@cache  # a copy to a GPU waits for it
def _hashes_of_products(first: int, count: int, device: torch.device) -> Tensor:
    return torch.tensor([_hash_of_product(first + i) for i in range(count)], dtype=torch.int64, device=device)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _hash_of_product(number: int) -> int:
    return _hash(number, "part")


@cache
def _hash(number: int, unit: str = "call") -> int:
    return hash_text(f"{unit} {number}")


def hash_text(text: str) -> int:
    """Returns an int64 hash of a text, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


# --- compiled graphs --------------------------------------------------------------------------------------------------

_LAYERS: WeakValueDictionary[int, Any] = WeakValueDictionary()  # by the address of their keys
_SITES: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # the last site of each graph that is being compiled


@opaque(lambda keys, site: torch.empty_like(keys))
def _keys_in_graph(keys: Tensor, site: int) -> Tensor:
    layer = _LAYERS.get(keys.data_ptr())
    # Keys elsewhere are a copy, as CUDA graphs make it: every call counts as the first.
    if layer is None or layer.lowbit.keys.data_ptr() != keys.data_ptr():
        return keys.clone()
    return _keys_of_call(layer, site)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _site() -> int:
    """Numbers the calls in one graph: the compiler would merge equal calls, and may recompute them in any order."""
    graph = graph_in_compilation()
    if graph is None:  # not compiled, but exported
        return 0
    _SITES[graph] = _SITES.get(graph, -1) + 1
    return _SITES[graph]


# --- regions ----------------------------------------------------------------------------------------------------------

# Only this part depends on names of torch's functions and variables. Under other names, regions are not found.

_CHECKPOINTS = ("checkpoint", "_checkpoint_impl")  # of torch 2.13, and of 2.15
_NOTES = "_lightning_lowbit_calls"


def _notes(region: Any) -> dict[Any, int]:
    """Returns a region's notes: first calls by layer, calls by (layer, site), recomputed calls by (pass, layer)."""
    notes: dict[Any, int] = vars(region).setdefault(_NOTES, {})
    return notes


def _recomputed(region: Any, run: Any, layer: int, site: int | None) -> int | None:
    """Returns the number of the call that a pass of recomputation has reached; None if it is unknown."""
    notes = vars(region).get(_NOTES, {}) if region is not None else {}
    if type(region).__name__ == "CompiledFunctionBackward":
        return notes.get((layer, site))
    if layer not in notes:
        return None
    before = notes.get((run, layer), 0)
    notes[run, layer] = before + 1
    return int(notes[layer] + before)


def _surroundings(compiled: bool) -> tuple[list[Any], tuple[Any, Any] | None]:
    """Returns the regions around a call, to be noted; in a recomputation also its region, or None, and its id."""
    hooks, backward = saved_tensor_hooks(False), number_of_backward()
    regions: list[Any] = []
    if hooks is None and backward == -1 and torch.is_grad_enabled() and not compiled:
        return regions, None  # no region: the usual case
    frame = sys._getframe(1).f_back
    while frame is not None:
        code, variables = frame.f_code, frame.f_code.co_varnames
        if code.co_name == "unpack_hook" and "gid" in variables:
            return regions, (frame.f_locals["frame"], frame.f_locals["gid"])
        if code.co_name in ("forward", "backward") and variables[:1] == ("ctx",):
            ctx = frame.f_locals.get("ctx")
            if isinstance(ctx, FunctionContext):
                if code.co_name == "backward":
                    return regions, (ctx, backward)
                regions.append(ctx)
        elif code.co_name in _CHECKPOINTS and (without_ctx := frame.f_locals.get("gen")) is not None:
            regions.append(without_ctx.gi_frame.f_locals["new_frame"])
        elif code.co_name == "_engine_run_backward":  # this backward pass recomputes nothing of the outer frames
            break
        frame = frame.f_back
    return regions, None if backward == -1 else (None, None)
