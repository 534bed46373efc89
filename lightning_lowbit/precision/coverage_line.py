"""Logs one line after the first training step if less than half of the matrix FLOPs are quantized, and why.

The autograd graph shows, before the backward pass, the products of the forward pass with shapes and parameters:

    AddmmBackward0 [tokens, out]  ──  TBackward0 [in, out]  ──  AccumulateGrad [out, in]     2 · tokens · out · in FLOPs

:class:`lightning_lowbit.nn.GemmCounter` counts exactly, but runs everything eagerly, in two to three times the time and
with the roundings of eager code. A run that did not ask for it must not change, and walking the graph takes
milliseconds. Saved tensors are not read: activation checkpointing would compute them again. A compiled function or
reentrant checkpoint is a single node; then weights are counted instead of FLOPs.
"""

import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from math import prod
from typing import Any

from torch import Tensor, nn

from lightning_lowbit._lightning import rank_zero_info
from lightning_lowbit._torch import is_node_of, is_transposed, shape_at
from lightning_lowbit.nn.attention.function import QuantizedAttention
from lightning_lowbit.nn.casts.linear_casts import LinearCasts
from lightning_lowbit.nn.conversion.reasons import FROZEN, PRODUCTS, Reasons, is_matrix
from lightning_lowbit.nn.core.function import QuantizedGemms
from lightning_lowbit.nn.layers.layer import QuantizedLayer, clean_name

_ENOUGH = 0.5  # nothing is logged from this share of quantized FLOPs on
_REASONS, _MENTIONED = 3, 0.005  # number of reasons to name, and the least share of each
_MOST_NODES = 500_000  # of a graph: walking it takes one to two seconds
_VIEWS = 20  # most nodes between a weight and its product
_OTHER_ATTENTION = "attention that does not call F.scaled_dot_product_attention where attention= looks for it"

# Nodes between a weight and its product: views, and the cast by autocast.
_VIEW = re.compile(
    r"(T|Transpose|Permute|View|UnsafeView|ReshapeAlias|Expand|Unsqueeze|Squeeze|Select|Slice|Split|SplitWithSizes|"
    r"Unbind|Alias|Clone|ToCopy|MT|MH)Backward\d*"
)
_PRODUCT = re.compile(r"(Mm|Addmm|Bmm|Baddbmm|Addbmm|Linear|GroupedMm|ScaledGroupedMm)Backward\d*")


@dataclass
class GraphCoverage:
    """The products behind a loss, counted in ``unit``: ``"FLOPs"``, or ``"weights"`` where FLOPs are unknown.

    ``others`` counts the rest by kind of module and reason; ``example`` names a module of each kind.
    """

    quantized: int = 0
    others: Counter[str] = field(default_factory=Counter)
    example: dict[str, str] = field(default_factory=dict)
    unit: str = "FLOPs"

    @property
    def share(self) -> float | None:
        total = self.quantized + self.others.total()
        return self.quantized / total if total else None

    def add(self, amount: int, name: str, why: str | None) -> None:
        """Counts a product of the module with this name, if there is one; ``why`` is None if it is quantized."""
        if why is None:
            self.quantized += amount
            return
        self.others[why] += amount
        if name:
            self.example.setdefault(why, name)

    def __str__(self) -> str:
        total = self.quantized + self.others.total()
        parts = [
            f"{amount / total:.0%} {why}" + (f", such as {self.example[why]}" if why in self.example else "")
            for why, amount in self.others.most_common(_REASONS)
            if amount > _MENTIONED * total
        ]
        return (
            f"lightning_lowbit: {self.share:.1%} of the {self.unit} of matrix products are in quantized layers. The "
            f"rest: {'; '.join(parts)}."
        )


class CoverageLine:
    """Logs once how little is quantized; ``text`` is set even if ``PrecisionSummary`` shows the coverage instead."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.coverage: GraphCoverage | None = None
        self.text = ""
        self._is_done = False

    def see(self, loss: Tensor, model: nn.Module, is_quantizing: bool) -> None:
        """Counts the products behind a loss of the first step, before its backward pass, if all casts are in force."""
        if self._is_done or loss.grad_fn is None or not is_quantizing:
            return
        has_casts = any(isinstance(m, QuantizedLayer) and m.full_casts != LinearCasts() for m in model.modules())
        try:
            self.coverage = self.count(loss, model) if has_casts else None
        except Exception:  # the autograd graph is no public API; training must not fail
            self.coverage = None
        self._is_done = self.coverage is None

    def count(self, loss: Tensor, model: nn.Module) -> GraphCoverage | None:
        """Adds the products behind a loss to those so far; None for no line."""
        return graph_coverage(loss, model, self.coverage)

    def say(self, trainer: Any) -> None:
        if self._is_done or self.coverage is None or trainer is None:
            return
        self._is_done = True
        share = self.coverage.share
        if share is None or share >= _ENOUGH:
            return
        self.text = str(self.coverage)
        if not any(getattr(callback, "shows_coverage", False) for callback in trainer.callbacks):
            rank_zero_info(f"{self.text} PrecisionSummary() among the callbacks lists all.")


def graph_coverage(loss: Tensor, model: nn.Module, onto: GraphCoverage | None = None) -> GraphCoverage:
    """Counts how much of the matrix products behind a loss is quantized; ``onto`` is a coverage to add to."""
    coverage = GraphCoverage() if onto is None else onto
    if coverage.unit != "FLOPs":
        return coverage
    owners = _Owners(model)
    seen, multiplied = set[Any](), set[str]()  # nodes, and names of quantized layers
    stack = [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = node.name()
        is_opaque = name == "CheckpointFunctionBackward" or (name.startswith("CompiledFunction") and _weights(node))
        if len(seen) > _MOST_NODES or is_opaque:
            return owners.weights()
        if flops := _flops(node):
            coverage.add(flops, *owners.owner_of(node))
        if _is_converted(node):
            multiplied.add(node.how.layer)  # type: ignore[attr-defined]
        stack += [edge for edge, _ in node.next_functions]
    return owners.weights() if _has_other_layers(model, multiplied) else coverage


def _has_other_layers(model: nn.Module, multiplied: Collection[str]) -> bool:
    """Returns whether the graph lacks quantized linear layers and convolutions, as nothing behind them is trained."""
    layers = [m for m in model.modules() if isinstance(m, QuantizedLayer) and m.kind in ("linear", "convolution")]
    frozen = [layer for layer in layers if not any(p.requires_grad for p in layer.own_parameters())]
    return any(layer.full_casts != LinearCasts() and layer.name_in_model not in multiplied for layer in frozen)


def _shape(edge: tuple[Any, int]) -> tuple[int, ...] | None:
    node, index = edge
    return None if node is None else shape_at(node, index)


def _is_converted(node: Any) -> bool:
    return is_node_of(QuantizedGemms, node)


def _is_attention(node: Any) -> bool:
    return is_node_of(QuantizedAttention, node)


def _operands(node: Any) -> list[tuple[Any, int]]:
    edges = list(node.next_functions)
    return edges[1:3] if node.name().startswith(("Addmm", "Baddbmm", "Addbmm")) else edges[:2]


def _flops(node: Any) -> int:
    name, is_converted = node.name(), _is_converted(node)
    if is_converted or _PRODUCT.fullmatch(name):
        (left, right), out = map(_shape, _operands(node)), shape_at(node)
        if is_converted and (frozen := node.how.frozen) is not None:
            return 2 * prod(out) * frozen.shape[1]
        if left is None and right is None:
            return 0
        rows = is_converted or name.startswith("Linear")  # their weight is [out, in]
        inner = left[-1] if left is not None else right[-1 if rows else -2]  # type: ignore[index]
        if left is not None and is_converted and (window := node.how.window) is not None:
            inner = prod(window.kernel) * left[1]  # of images [N, C, *sizes]
        return 2 * prod(out) * inner
    if name.startswith("ScaledDotProduct") or _is_attention(node):  # Q · Kᵀ and P · V of [..., tokens, features]
        query, key, out = *map(_shape, node.next_functions[:2]), shape_at(node)
        return 4 * prod(out) * (key or query or out)[-2]
    if name.startswith("ConvolutionBackward"):
        x, weight = map(_shape, _operands(node))
        out = shape_at(node)
        outputs = x if is_transposed(node) and x is not None else out  # positions where the weight is applied
        return 2 * outputs[0] * prod(outputs[2:]) * prod(weight) if weight is not None else 0
    if "Rnn" in name:  # each token is multiplied by each matrix
        return 2 * prod(shape_at(node)[:-1]) * sum(weight.numel() for weight in _weights(node))
    return 0


class _Owners:
    """The modules of a model by their weights, with the reason for each that computes in high precision."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._modules = model, dict[str, nn.Module]()
        for name, module in model.named_modules():
            self._modules.setdefault(clean_name(name), module)  # a composite layer before its parts
        attends = any(isinstance(m, QuantizedLayer) and m.kind == "attention" for m in self._modules.values())
        self._attention = _OTHER_ATTENTION if attends else str(PRODUCTS)
        self._names: dict[int, str] = {}  # by the id of a parameter
        self._names_by_shape: dict[tuple[int, ...], str] = {}  # FSDP2 replaces parameters
        self._reasons = Reasons(model)
        for name, module in self._modules.items():
            is_embedding = isinstance(module, nn.Embedding)
            is_other = not is_embedding and self._reasons.module_reason(name, module) is not None
            for parameter in module.parameters(recurse=False):
                if not is_embedding or id(parameter) not in self._names:  # tied to another layer
                    self._names[id(parameter)] = name
                if is_other:
                    self._names_by_shape.setdefault(tuple(parameter.shape), name)

    def owner_of(self, node: Any) -> tuple[str, str | None]:
        """Returns the name of a product's module, if there is one, and why it is in high precision, if it is."""
        if _is_converted(node):
            return "", None if node.how.casts != LinearCasts() else str(FROZEN)
        if _is_attention(node):
            return "", None if LinearCasts() not in (node.how.qk.how.casts, node.how.pv.how.casts) else str(PRODUCTS)
        if node.name().startswith("ScaledDotProduct"):
            return "", self._attention
        edges = node.next_functions if "Rnn" in node.name() else _operands(node)
        for weight in reversed([_parameter(edge) for edge, _ in edges]):  # usually the right operand
            if weight is None:
                continue
            name = self._names.get(id(weight)) or self._names_by_shape.get(tuple(weight.shape))
            if name is not None:
                return self._module(name, self._modules[name])
        return "", self._attention if all(edge is not None for edge, _ in edges) else str(FROZEN)

    def weights(self) -> GraphCoverage:
        coverage, counted = GraphCoverage(unit="weights"), set[int]()
        for name, module in self._model.named_modules():
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
                continue
            for parameter in module.parameters(recurse=False):
                if is_matrix(parameter) and id(parameter) not in counted:
                    counted.add(id(parameter))
                    coverage.add(parameter.numel(), *self._module(clean_name(name), module))
        return coverage

    def _module(self, name: str, module: nn.Module) -> tuple[str, str | None]:
        """Returns a module's name with its kind, and why its weights are in high precision, or None if they are not."""
        reason = self._reasons.module_reason(name, module)
        kind, package = type(module).__name__, type(module).__module__.split(".")[0]
        shown = f"{kind} of {package}" if package != "torch" and hasattr(nn, kind) else kind  # such as Linear
        return name or kind, None if reason is None else f"{shown} ({reason})"


def _parameter(node: Any) -> Tensor | None:
    for _ in range(_VIEWS):
        if node is None or node.name().endswith("AccumulateGrad"):
            return None if node is None else node.variable
        if not _VIEW.fullmatch(node.name()):
            return None
        node = node.next_functions[0][0]
    return None


def _weights(node: Any) -> list[Tensor]:
    parameters = [_parameter(edge) for edge, _ in node.next_functions]
    return [parameter for parameter in parameters if parameter is not None and parameter.dim() > 1]
