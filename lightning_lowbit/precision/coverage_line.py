"""Says in the first training step if less than half of a model's weights are in quantized layers, and why.

:class:`lightning_lowbit.nn.GemmCounter` alone counts FLOPs, in a step of eager code that a callback asks for. A run
without one must not change, so this line counts weights, which need no step: also of compiled, sharded and recomputed
models. Products without weights, as in attention, are not in it.
"""

from collections import Counter
from math import prod
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from lightning_lowbit._lightning import rank_zero_info, rank_zero_warn
from lightning_lowbit.checks import some
from lightning_lowbit.nn.casts.linear_casts import LinearCasts
from lightning_lowbit.nn.conversion.reasons import WITHOUT_PRODUCTS, Reasons, is_matrix
from lightning_lowbit.nn.layers.composite import PartLayer
from lightning_lowbit.nn.layers.layer import QuantizedLayer, without_pass
from lightning_lowbit.patterns import clean_name
from lightning_lowbit.precision.layers import RunLayers

_ENOUGH = 0.5  # nothing is said from this share of quantized weights on
_REASONS, _MENTIONED = 3, 0.005  # number of reasons to name, and the least share of each


class CoverageLine:
    """Logs once how little is quantized, unless a callback shows the coverage; ``text`` is what was logged."""

    _is_first = False  # that no step with all casts has been taken

    def __init__(self) -> None:
        self.text = self._due = ""

    def count(self, model: nn.Module) -> None:
        """Counts the weights of a converted model, before a strategy flattens them."""
        self.text, self._due, self._is_first = "", weights_line(model), True

    def say(self, trainer: Any, phase: str) -> None:
        """Logs the line, in the first process and the first step with all casts."""
        if phase != "fqt":
            return
        text, self._due = self._due, ""
        if text and not _is_shown(trainer):
            self.text = text
            rank_zero_info(f"{text} PrecisionSummary() among the callbacks counts FLOPs, and lists all.")

    def warn(self, trainer: Any, layers: RunLayers) -> None:
        """Warns after the first step with all casts of layers that were not called, and have gradients."""
        if not self._is_first or layers.phase != "fqt":
            return
        self._is_first = False
        if not _is_shown(trainer) and (idle := without_pass(layers.present)):
            rank_zero_warn(
                f"Converted, and trained without a call in the first step: {some(idle)}. Where a module reads their "
                "weights itself, it computes in high precision. Let it call the layers, or leave them out by skip."
            )


def _is_shown(trainer: Any) -> bool:
    return any(getattr(callback, "shows_coverage", False) for callback in trainer.callbacks)


def weights_line(model: nn.Module) -> str:
    """Says why less than half of a model's matrices are in quantized layers, if some are meant to be; else nothing."""
    if not any(isinstance(m, QuantizedLayer) and m.full_casts != LinearCasts() for m in model.modules()):
        return ""
    amounts, examples = Counter[str](), dict[str, str]()  # by reason, "" if there is none
    reasons, counted = Reasons(model), set[int]()
    modules = [(clean_name(name), module) for name, module in model.named_modules()]
    modules.sort(key=lambda item: not isinstance(item[1], PartLayer))  # a part before its host, which has its weights
    for name, module in modules:
        if isinstance(module, WITHOUT_PRODUCTS):
            continue
        why = reasons.module_reason(name, module)
        text = "" if why is None else f"{_kind(module)} ({why})"
        for amount, key in _matrices(module):
            if key not in counted:  # a tied weight belongs to several modules
                counted.add(key)
                amounts[text] += amount
                examples.setdefault(text, name or _kind(module))
    total = amounts.total()
    quantized = amounts.pop("", 0)
    if quantized >= _ENOUGH * total:
        return ""
    parts = [
        f"{amount / total:.0%} {why}, such as {examples[why]}"
        for why, amount in amounts.most_common(_REASONS)
        if amount > _MENTIONED * total
    ]
    share = f"{quantized / total:.1%} of the weights of matrix products are in quantized layers"
    return f"lightning_lowbit: {share}. The rest: {'; '.join(parts)}."


def _matrices(module: Any) -> list[tuple[int, int]]:
    """Returns elements and identity of each matrix among a module's own parameters, and those that they are made of."""
    if isinstance(module, QuantizedLayer):
        if module.lowbit.frozen is not None:  # bytes
            return [(prod(module.lowbit.frozen.shape), id(module.weight))]
        parameters = module.own_parameters()
    else:
        parameters = list(module.parameters(recurse=False))
    if is_parametrized(module):
        parameters += module.parametrizations.parameters()
    return [(p.numel(), id(p)) for p in parameters if not nn.parameter.is_lazy(p) and is_matrix(p)]


def _kind(module: nn.Module) -> str:
    kind, package = type(module).__name__, type(module).__module__.split(".")[0]
    return f"{kind} of {package}" if package != "torch" and hasattr(nn, kind) else kind  # such as Linear
