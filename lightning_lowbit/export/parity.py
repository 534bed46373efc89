"""The parity report: whether an exported model, loaded by its real client, computes what was trained.

    weights    each layer's weight in the loaded model, against codes · scales
    logits     of the loaded model, against the training's forward pass with those operands quantized that it quantizes
    loss       of the next token, greedy tokens: against the training's forward pass as it was

A client that keeps activations in high precision computes other logits than a training that quantized them: closer to
the unquantized ones. The report tells both differences, and fails on the first.
"""

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_lowbit.checks import some
from lightning_lowbit.export.formats.base import Written
from lightning_lowbit.export.source import Source, hp_forward
from lightning_lowbit.export.weights import Weight


@dataclass(frozen=True)
class Parity:
    """How an exported model compares with the training.

    Attributes:
        weights: by layer, the largest difference of the loaded weight from what was written; empty where the client
            does not show its weights.
        logits: norm of the difference of logits, relative to theirs, from the same operands in few bits.
        trained, exported: losses (nats per token) of the training's forward pass, and of the exported model.
        greedy: share of positions whose most likely next token is that of the training's forward pass.
        same: share of positions whose most likely token is that of the same operands in few bits.
        tokens: how many positions were compared.
    """

    weights: Mapping[str, float]
    logits: float
    trained: float
    exported: float
    greedy: float
    same: float
    tokens: int

    def check(self, tolerance: float) -> None:
        """Raises a ``ValueError`` if weights differ, or logits by more than ``tolerance``."""
        if wrong := [name for name, difference in self.weights.items() if not difference == 0]:
            raise ValueError(
                f"The exported weights of {some(wrong)} are not those of the training: they differ by up to "
                f"{max(self.weights[name] for name in wrong):.3g}. Nothing was exported; please report this."
            )
        if not self.logits <= tolerance:
            raise ValueError(
                f"The exported model computes other logits: they differ by {self.logits:.3g} of their norm, and the "
                f"format's rounding explains {tolerance:g}. Nothing was exported; parity=False (--no-parity) exports."
            )

    def __str__(self) -> str:
        worst = f"{max(self.weights.values()):g}" if self.weights else "not shown by the client"
        return (
            f"weights, largest difference: {worst}\n"
            f"logits, relative difference: {self.logits:.2g} with the same operands in few bits\n"
            f"loss: {self.exported:.4f}, in training {self.trained:.4f} ({self.tokens} tokens)\n"
            f"greedy tokens equal: {self.same:.1%} with the same operands, {self.greedy:.1%} of the training's"
        )


@torch.no_grad()
def compare(source: Source, loaded: Any, rows: Sequence[Written], written: Iterable[Weight], tokens: Tensor) -> Parity:
    """Compares an exported model with the training on some tokens.

    Args:
        source: the trained model.
        loaded: what the client read, called as the model of ``transformers``.
        rows: what was written.
        written: the weights as the format stores them.
        tokens: int64 ``[sequences, length]``.
    """
    outputs = _logits(loaded, tokens)
    trained = _logits(source.model, tokens)
    with _high_precision_inputs(source, [row.name for row in rows if not row.inputs]):
        same = _logits(source.model, tokens)
    targets = tokens[:, 1:].flatten()

    def loss(logits: Tensor) -> float:
        return float(F.cross_entropy(logits[:, :-1].flatten(0, 1), targets))

    def agreement(logits: Tensor) -> float:
        return float((outputs.argmax(-1) == logits.argmax(-1)).float().mean())

    return Parity(
        _weights(loaded, written),
        float((outputs - same).norm() / (same - same.mean(-1, keepdim=True)).norm()),
        loss(trained),
        loss(outputs),
        agreement(trained),
        agreement(same),
        tokens.numel(),
    )


def _logits(model: Any, tokens: Tensor) -> Tensor:
    return torch.cat([model(input_ids=part).logits.float() for part in torch.split(tokens, 4)])


@contextmanager
def _high_precision_inputs(source: Source, names: Sequence[str]) -> Generator[None, None, None]:
    """Within it, the inputs of some layers are not quantized."""
    before = {name: source.layers[name].casts for name in names}
    try:
        for name, casts in before.items():
            source.layers[name].casts = hp_forward(casts)
        yield
    finally:
        for name, casts in before.items():
            source.layers[name].casts = casts


def _weights(loaded: Any, written: Iterable[Weight]) -> dict[str, float]:
    """How far the weights of the loaded model, after a forward pass, are from those that were written."""
    shown = dict(loaded.named_modules()) if isinstance(loaded, nn.Module) else {}
    found = {}
    for weight in written if shown else ():
        there = getattr(shown.get(weight.name), "weight", None)
        if isinstance(there, Tensor) and not isinstance(weight.layer, nn.Linear):
            there = there.t()  # of Conv1D
        if isinstance(there, Tensor) and there.shape == weight.quantized.codes.shape and there.is_floating_point():
            expected = weight.quantized.dequantize(there.dtype)
            found[weight.name] = float((there.float() - expected.float()).abs().max())
    return found
