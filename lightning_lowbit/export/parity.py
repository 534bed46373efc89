"""The parity report: the comparison of an exported model, loaded by its real client, with the training.

    weights    each layer's weight in the loaded model, against codes · scales; and all other parameters
    layers     the output of each layer there, against the product of the same operands here
    logits     against the training's forward pass, where the client's choice of operands is quantized
    loss       of the next token, and greedy tokens: against the training's forward pass as it was

A client that keeps activations in high precision computes other logits than a training that quantized them: closer to
the unquantized ones. A layer's output depends on its own operands alone: so layers decide. Logits decide where
the client shows no layers, and where inputs stay in high precision tell whether the rest of the network is the same.
Text for it serves for calibration, too: the amaxes of activations.
"""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_lowbit.checks import some
from lightning_lowbit.export.formats.base import Chat, Inputs, Written
from lightning_lowbit.export.tokenizer import load_tokenizer
from lightning_lowbit.export.trained_model import TrainedModel
from lightning_lowbit.export.weights import Weight
from lightning_lowbit.nn.casts.linear_casts import LinearCasts
from lightning_lowbit.quant import quantize

# Largest relative differences of a layer's output, as a norm: bfloat16 rounds it; and engines make scales of inputs in
# bfloat16, or by 127.5 for int8, where elements near the middle between two values round otherwise. In four bits these
# are far apart.
LAYERS, WITH_INPUTS, IN_FOUR_BITS = 0.01, 0.03, 0.1

# Largest relative difference of logits where all layers compute the same from inputs in high precision: 22 small models
# had at most 0.02 (2026-11-23), and a wrong constant of the network, such as an epsilon, makes far more.
NETWORK = 0.25

# Largest relative difference of outputs that rounding explains where the client shows no layers; with inputs in four
# bits three times as much.
OUTPUTS = 0.05


@dataclass(frozen=True)
class Parity:
    """The comparison of an exported model with the training.

    ``weights``, ``layers`` and ``limits`` are by layer, the former two empty where the client shows none; differences
    of outputs and logits are norms, relative to theirs.
    """

    weights: Mapping[str, float]  # the largest difference from codes · scales, beyond the rounding to the loaded dtype
    layers: Mapping[str, float]  # the difference of outputs
    limits: Mapping[str, float]  # that which rounding explains
    others: Sequence[str]  # parameters in high precision that differ from the training's, in the dtype of the files
    unchanged: bool  # inputs and weights are those of the training, so that logits must be
    logits: float  # the difference, from the same operands in few bits
    trained: float  # loss of the training's forward pass, in nats per token
    exported: float  # loss of the exported model
    greedy: float  # share of positions whose most likely next token is that of the training's forward pass
    same: float  # share of positions whose most likely token is that of the same operands in few bits
    tokens: int  # number of positions that were compared
    merged: float | None = None  # the difference of logits from adapters that are not merged; None without adapters
    chat: Chat | None = None  # where the format's files tell in their own way how a prompt is made

    def check(self) -> None:
        """Raises a ``ValueError`` if parameters or layers differ, or logits by more than rounding explains."""
        if wrong := [name for name, difference in self.weights.items() if not difference == 0]:
            raise ValueError(
                f"The exported weights of {some(wrong)} are not those of the training: they differ by up to "
                f"{max(self.weights[name] for name in wrong):.3g}. Nothing was exported; please report this."
            )
        if self.others:
            raise ValueError(
                f"The exported parameters {some(self.others)} are not those of the training. Nothing was exported; "
                "please report this."
            )
        if wrong := [name for name, difference in self.layers.items() if not difference <= self.limits[name]]:
            raise ValueError(
                f"The exported layers {some(wrong)} compute something else than those of the training: by up to "
                f"{max(self.layers[name] for name in wrong):.3g} of the norm, where rounding explains "
                f"{self.limits[wrong[0]]:g}. Nothing was exported; parity=False (--no-parity) exports."
            )
        shown = NETWORK if self.unchanged else torch.inf
        limit = shown if self.layers else outputs_limit(self.limits)
        if not self.logits <= limit:
            raise ValueError(
                f"The exported model computes other logits: they differ by {self.logits:.3g} of their norm, and the "
                f"format's rounding explains {limit:g}. Nothing was exported; parity=False (--no-parity) exports."
            )

    def __str__(self) -> str:
        lines = [
            f"weights, largest difference: {_largest(self.weights)}",
            f"layers, relative difference: {_largest(self.layers)}",
            f"logits, relative difference: {self.logits:.2g} with the same operands in few bits",
            f"loss: {self.exported:.4f}, in training {self.trained:.4f} ({self.tokens} tokens)",
            f"greedy tokens equal: {self.same:.1%} with the same operands, {self.greedy:.1%} of the training's",
            f"logits, from unmerged adapters: {self.merged:.2g}" if self.merged is not None else "",
            f"chat: {self.chat}" if self.chat is not None else "",
        ]
        return "\n".join(filter(None, lines))


def _largest(differences: Mapping[str, float]) -> str:
    return f"{max(differences.values()):.2g}" if differences else "not shown by the client"


@torch.no_grad()
def compare(
    original: TrainedModel,
    loaded: Any,
    rows: Sequence[Written],
    written: Iterable[Weight],
    tokens: Tensor,
    dtype: torch.dtype,
    shown: Callable[[Any, Weight], Tensor | None],
) -> Parity:
    """Compares the client's model with the training on some tokens, int64 ``[sequences, length]``. ``rows`` are of the
    layers in the files, ``written`` the weights there, ``dtype`` that of the other parameters."""
    outputs = _logits(loaded, tokens)
    weights, layers, is_rescaled = _layers(loaded, {row.name: row.inputs for row in rows}, written, tokens[:1], shown)
    trained = _logits(original.model if original.unmerged is None else original.unmerged, tokens)
    with _high_precision_inputs(original, [row.name for row in rows if row.inputs is None]):
        same = _logits(original.model, tokens)
    targets = tokens[:, 1:].flatten()

    def loss(logits: Tensor) -> float:
        return float(F.cross_entropy(logits[:, :-1].flatten(0, 1), targets))

    def agreement(logits: Tensor) -> float:
        return float((outputs.argmax(-1) == logits.argmax(-1)).float().mean())

    return Parity(
        weights=weights,
        layers=layers,
        limits=limits_of(rows),
        others=_other_parameters(original, loaded, dtype) if layers else [],
        unchanged=not is_rescaled and all(row.inputs is None for row in rows),
        logits=_logits_difference(outputs, same),
        trained=loss(trained),
        exported=loss(outputs),
        greedy=agreement(trained),
        same=agreement(same),
        tokens=tokens.numel(),
        merged=None if original.unmerged is None else _logits_difference(outputs, trained),
    )


def _logits_difference(outputs: Tensor, logits: Tensor) -> float:
    return float((outputs - logits).norm() / (logits - logits.mean(-1, keepdim=True)).norm())


def limits_of(rows: Iterable[Written]) -> dict[str, float]:
    """Returns the difference of outputs that rounding explains, by layer."""
    bits = {row.name: None if row.inputs is None else row.inputs.cast.format.bits for row in rows}
    return {name: LAYERS if b is None else WITH_INPUTS if b > 4 else IN_FOUR_BITS for name, b in bits.items()}


def outputs_limit(limits: Mapping[str, float]) -> float:
    return OUTPUTS * (3 if IN_FOUR_BITS in limits.values() else 1)


def _logits(model: Any, tokens: Tensor) -> Tensor:
    return torch.cat([model(input_ids=part).logits.float() for part in torch.split(tokens, 4)])


@torch.no_grad()
def outputs_difference(original: TrainedModel, loaded: Any, example: Tensor) -> float:
    """Returns the norm of the difference of outputs for an input, relative to theirs: of several outputs the first one.
    An example of real numbers tells the shape of random ones, any other is the input."""
    x = torch.randn(example.shape, generator=torch.Generator().manual_seed(0))
    x = x if example.is_floating_point() else example
    ours, theirs = (_first(model(x)).float() for model in (original.model, loaded))
    return float((theirs - ours).norm() / ours.norm())


def _first(outputs: Any) -> Tensor:
    if hasattr(outputs, "logits"):
        outputs = outputs.logits
    while not isinstance(outputs, Tensor):
        outputs = next(iter(outputs.values())) if isinstance(outputs, Mapping) else outputs[0]
    return outputs


@contextmanager
def _high_precision_inputs(original: TrainedModel, names: Sequence[str]) -> Generator[None, None, None]:
    """Leaves the inputs of some layers in high precision within it."""
    before = {name: original.layers[name].casts for name in names}
    try:
        for name, casts in before.items():
            original.layers[name].casts = LinearCasts(fprop_w=casts.fprop_w)
        yield
    finally:
        for name, casts in before.items():
            original.layers[name].casts = casts


def _layers(
    loaded: Any,
    inputs: Mapping[str, Inputs | None],
    written: Iterable[Weight],
    tokens: Tensor,
    shows: Callable[[Any, Weight], Tensor | None],
) -> tuple[dict[str, float], dict[str, float], bool]:
    """Returns the differences of layers from the files, of weights and outputs, and if weights were quantized again."""
    modules = dict(loaded.named_modules()) if isinstance(loaded, nn.Module) else {}
    passed: dict[str, tuple[Tensor, Tensor]] = {}
    names = {id(module): name for name, module in modules.items() if name in inputs}

    def note(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        passed[names[id(module)]] = args[0].clone(), output.clone()  # the network may change them in place

    handles = [modules[name].register_forward_hook(note) for name in names.values()]
    if handles:
        loaded(input_ids=tokens)
    for handle in handles:
        handle.remove()
    weights, layers, is_rescaled = dict[str, float](), dict[str, float](), False
    for weight in written if handles else ():
        is_rescaled = is_rescaled or weight.error > 0
        if (matrix := shows(modules.get(weight.name), weight)) is not None:
            weights[weight.name] = _beyond_rounding(matrix, weight.quantized.dequantize())
        if weight.name in passed:
            layers[weight.name] = _difference(weight, inputs[weight.name], *passed[weight.name])
    return weights, layers, is_rescaled


def _other_parameters(original: TrainedModel, loaded: nn.Module, dtype: torch.dtype) -> list[str]:
    """Parameters that are not quantized, and that a loaded model, in which some may be buffers, lacks or has with other
    values."""
    tensors = dict([*loaded.named_parameters(remove_duplicate=False), *loaded.named_buffers(remove_duplicate=False)])
    quantized = {f"{name}{end}" for name in original.layers for end in ("", ".weight")}  # a stack is a parameter
    wrong = []
    for name, parameter in original.model.named_parameters(remove_duplicate=False):
        if name not in quantized:
            other, expected = tensors.get(name), parameter.detach().to(dtype)
            if other is None or not torch.equal(other.detach(), expected.to(other.dtype)):
                wrong.append(name)
    return wrong


def _beyond_rounding(loaded: Tensor, exact: Tensor) -> float:
    """Returns a weight's largest difference beyond its rounding to a dtype and that of its scale in float32."""
    # Some products of codes and scales lie in the middle between two numbers of bfloat16, or beside it.
    ends = [(exact * (1 + sign * 2.0**-22)).to(loaded.dtype).float() for sign in (-1, 1)]
    low, high, values = torch.minimum(*ends), torch.maximum(*ends), loaded.float()
    return float(torch.maximum(low - values, values - high).clamp(min=0).max())


def _difference(weight: Weight, inputs: Inputs | None, x: Tensor, y: Tensor) -> float:
    """The relative difference of a layer's output from the product of its operands, quantized as the engine does."""
    rows = x.flatten(0, -2).float()
    if inputs is not None:
        amax = None if inputs.amax is None else torch.tensor(inputs.amax)
        rows = quantize(rows, inputs.cast, amax=amax).dequantize()
    product = rows @ weight.quantized.dequantize().t()
    if isinstance(weight.layer.bias, Tensor):
        product += weight.layer.bias.float()
    return float((y.flatten(0, -2).float() - product).norm() / product.norm().clamp(min=1e-12))


LENGTH, SEQUENCES = 128, 16  # tokens of a sequence, and how many


def tokens_of(original: TrainedModel, text: str | Path | None) -> Tensor:
    """Token ids, int64 ``[sequences, length]``: of a text file, or drawn at random where there is none. An error for a
    text that is missing or shorter than a sequence, or where the checkpoint does not tell its tokenizer."""
    whole: Any = original.config
    config = whole.get_text_config()
    vocabulary, positions = int(config.vocab_size), int(getattr(config, "max_position_embeddings", LENGTH) or LENGTH)
    length = min(LENGTH, positions)
    if text is None:
        return torch.randint(vocabulary, (4, length), generator=torch.Generator().manual_seed(0))
    path, name = Path(text).expanduser(), original.facts.get("tokenizer")
    if not path.is_file():
        raise FileNotFoundError(f"There is no file of text {path}. Give one in UTF-8.")
    if name is None:
        raise ValueError("The checkpoint does not tell its tokenizer: give --tokenizer bytes, or a folder or name.")
    ids = torch.tensor(load_tokenizer(name)(path.read_text(errors="replace"), add_special_tokens=False)["input_ids"])
    count = min(len(ids) // length, SEQUENCES)
    if count == 0:
        raise ValueError(f"{path} has {len(ids)} tokens, and a sequence {length}: give a longer text.")
    if int(ids.max()) >= vocabulary:
        raise ValueError(
            f"The tokenizer {name!r} gives the token {int(ids.max())}, and the model has {vocabulary}: give the "
            "tokenizer of the training (--tokenizer)."
        )
    return ids[: count * length].view(count, length)


@torch.no_grad()
def input_amaxes(original: TrainedModel, tokens: Tensor) -> dict[str, float]:
    """Returns the largest magnitude of each layer's input, by name, over the training's forward pass of some tokens."""
    amaxes: dict[str, float] = dict.fromkeys(original.layers, 0.0)

    def note(name: str, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        amaxes[name] = max(amaxes[name], float(inputs[0].detach().to(original.dtype).abs().amax()))

    handles = [layer.register_forward_pre_hook(partial(note, name)) for name, layer in original.layers.items()]
    try:
        for part in torch.split(tokens, 4):
            original.model(input_ids=part)
    finally:
        for handle in handles:
            handle.remove()
    return amaxes
