"""What quantization does to the tensors of a run: of each layer its six operands, and its weight from step to step.

    on_train_batch_start        of a step that is logged: layers begin to leave sums of what casts do to their operands
    on_before_optimizer_step    the codes of the weights
    on_train_batch_end          the sums over all ranks; columns, from the codes of the weights before and after
    on_train_batch_start        of the next batch: their numbers, for loggers, alerts and the report

A column is a small function of what was seen of a weight. It gives 0-d tensors by name, none where it has nothing to
say. Metrics are called ``<name>/<operand>/<layer>``.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_lowbit._lightning import LightningModule, MisconfigurationException, Trainer, is_mid_step
from lightning_lowbit.callbacks.monitors.base import LooksAway, Monitor
from lightning_lowbit.callbacks.monitors.latent_weights import (
    LatentWeight,
    converted_layers,
    has_flat_weights,
    latent_weights,
)
from lightning_lowbit.callbacks.monitors.operand_statistics import QuantizedOperands
from lightning_lowbit.callbacks.monitors.quantization_alerts import Fault, of_codes, of_operand, of_weight
from lightning_lowbit.checks import is_number
from lightning_lowbit.metrics import flip_rate, is_ternary, ternary_shares, threshold_distance
from lightning_lowbit.nn import QuantizedLayer
from lightning_lowbit.nn.conversion.convert import select
from lightning_lowbit.precision.base import compute_dtype
from lightning_lowbit.quant import Cast, Quantized
from lightning_lowbit.report.html import Block, Section, Table, Text

# --- columns ----------------------------------------------------------------------------------------------------------


class Seen(NamedTuple):
    """A weight around an optimizer step; ``before`` is None where there was none."""

    weight: LatentWeight
    before: Quantized | None
    after: Quantized


Column = Callable[[Seen], Mapping[str, Tensor]]


def shares(seen: Seen) -> Mapping[str, Tensor]:
    """Of -1, 0 and 1, where these are the levels."""
    if not is_ternary(seen.weight.cast):
        return {}
    return dict(zip(("minus", "zeros", "plus"), ternary_shares(seen.after), strict=True))


def flips(seen: Seen) -> Mapping[str, Tensor]:
    """Share of codes that the step changed."""
    if seen.before is None or seen.before.cast != seen.after.cast:
        return {}
    return {"flips": flip_rate(seen.before, seen.after)}


def distance(seen: Seen) -> Mapping[str, Tensor]:
    """Of latent weights from their rounding thresholds, in units of their scales."""
    return {"distance": threshold_distance(seen.weight.values, seen.weight.cast, amax=seen.weight.amax)}


COLUMNS: tuple[Column, ...] = (shares, flips, distance)


# --- the callback -----------------------------------------------------------------------------------------------------


class _Measured(NamedTuple):
    """Of what the numbers of a step are: first the sums of operands, then values of weights by (layer, name)."""

    step: int
    logger_step: int
    casts: dict[str, Cast]
    places: list[tuple[str, str]]


class QuantizationMonitor(Monitor, LooksAway):
    """Logs what becomes of quantized operands and weights, and warns where it is not what it should be.

    Of each operand of each layer that its cast quantizes, as often as the logger takes it, on the tensors of the step:

    - ``sqnr``: signal to quantization noise ratio in dB.
    - ``underflow``: of the elements that are not 0, the share that became 0.
    - ``saturation``: share of the elements beyond the largest magnitude that their scale can express.
    - ``scale_min`` and ``scale_max``: the range of its scales, those of blocks of zeros left out.

    All micro-batches and ranks count together. Of an operand of more than 2^15 elements a sample of about as many, in
    whole blocks, is looked at; scales are those of the sample, too. An operand that a GEMM takes over from another one
    has the numbers of that one; of ``"fprop"`` there are none.

    Of each weight that is rounded to nearest, of a large one in a sample of as many elements, always the same ones:

    - ``minus``, ``zeros`` and ``plus``: shares of -1, 0 and 1, where these are the levels.
    - ``flips``: share of codes that the optimizer step changed, or all the optimizer steps of a batch together.
    - ``distance``: mean distance of its elements from the nearest rounding threshold, in units of their scales. Where
      it is small, small steps flip many codes.

    The metrics have names such as ``sqnr/wgrad_g/layers.3.mlp.up_proj`` and ``zeros/fprop_w/layers.3.mlp.up_proj``.
    They go to the loggers themselves when the next batch begins, since Lightning takes a millisecond for each metric,
    and of these there are hundreds. What is logged as usual, for other callbacks to see, are the means over layers:
    ``sqnr/wgrad_g``, ``underflow/wgrad_g``, ``saturation/wgrad_g``.

    There are none of an operand while it is not quantized, in a phase, nor of a weight that is rotated or smoothed
    before it is rounded, or while λ is 0. While λ is on its way, those of operands are of where it leads.

    Alerts are said once for each kind and run, with the number of layers and the worst one, and again where they are
    much worse: four times as many layers, or as bad. They are listed by :class:`RunReport`:

    - An operand holds a number that is not finite, or most of its elements became 0.
    - No element of a weight is finite.
    - All codes of a ternary weight are 0.
    - No code of a weight that is trained has changed for long.
    - The share of zeros of a ternary weight with ``statistic="absmean"`` is far from that of normally distributed ones
      (:func:`lightning_lowbit.metrics.expected_zeros`).

    A step that is logged quantizes what it looks at of each weight a few more times, and keeps its codes; weights that
    are sharded (FSDP2, tensor parallelism) are gathered one by one, and each rank keeps codes. Other steps
    cost nothing.

    Args:
        only: patterns of layers to watch, see :func:`lightning_lowbit.convert`; None for all.
        no_flips_for: optimizer steps without a flip, in those that are logged, after which to warn.
        zeros_tolerance: how far a share of zeros may be from the expected one, in (0, 1].
        underflow_limit: share of an operand's elements that became 0 above which to warn, in (0, 1]; ternary ones are
            left out.
        operands: whether to look at operands.
        weights: whether to look at weights; None: where they are matrices, which they are not under FSDP1.

    Raises:
        ValueError: an argument is out of range; or, when training starts, a pattern matches no layer.
        MisconfigurationException: when training starts: ``weights=True`` under FSDP1.

    Example:
        >>> Trainer(plugins=[TernaryPrecision()], callbacks=[QuantizationMonitor()])
    """

    def __init__(
        self,
        only: list[str] | None = None,
        no_flips_for: int = 1000,
        zeros_tolerance: float = 0.15,
        underflow_limit: float = 0.5,
        operands: bool = True,
        weights: bool | None = None,
    ) -> None:
        if type(no_flips_for) is not int or no_flips_for < 1:
            raise ValueError(f"no_flips_for is a number of optimizer steps, 1 or more; got {no_flips_for!r}.")
        if not is_number(zeros_tolerance) or not 0 < zeros_tolerance <= 1:
            raise ValueError(f"zeros_tolerance is a share of elements, above 0 and up to 1; got {zeros_tolerance!r}.")
        if not is_number(underflow_limit) or not 0 < underflow_limit <= 1:
            raise ValueError(f"underflow_limit is a share of elements, above 0 and up to 1; got {underflow_limit!r}.")
        if not operands and weights is False:
            raise ValueError("There is nothing to watch with operands=False and weights=False: leave out the callback.")
        self.only, self.no_flips_for, self.zeros_tolerance = only, no_flips_for, zeros_tolerance
        self.underflow_limit, self.operands, self.weights = underflow_limit, operands, weights
        self._watched = QuantizedOperands({})
        self._weights: dict[str, QuantizedLayer] = {}
        super().__init__()

    def _start_afresh(self) -> None:
        super()._start_afresh()
        self._last_flip: dict[str, int] = {}  # the optimizer step of the last flip seen, or of the first look
        self._step = 0  # the last one that was logged: numbers of weights by layer and name, and of operands
        self._rows: dict[str, dict[str, float]] = {}
        self._operands: dict[str, dict[str, dict[str, float]]] = {}

    def _forget(self) -> None:
        super()._forget()
        self._before: dict[str, Quantized] = {}
        self._is_watching = False

    # --- when ---

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Finds the layers."""
        super().on_train_start(trainer, pl_module)
        layers = converted_layers(pl_module)
        is_flat = has_flat_weights(trainer)
        if is_flat and self.weights:
            raise MisconfigurationException(
                "QuantizationMonitor(weights=True) needs weights that are matrices, and FSDPStrategy flattens them: "
                "leave weights out, or train with one device, DDP or ModelParallelStrategy."
            )
        if self.only is not None:
            chosen = select(list(layers), self.only, "only")
            layers = {name: layer for name, layer in layers.items() if name in chosen}
        self._weights = {} if is_flat or self.weights is False else layers
        self._watched.stop()
        self._watched = QuantizedOperands(layers if self.operands else {})

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Reads the numbers of the last step, if it was logged; layers begin to measure, if this one is."""
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if not self._is_watching and self._is_logged(trainer):
            self._is_watching = True
            self._watched.start(trainer.strategy.root_device)

    def on_before_optimizer_step(self, trainer: Trainer, *_: Any) -> None:
        """Keeps the codes, before the first step of a batch that is logged."""
        if not self._before and self._is_logged(trainer):
            weights = latent_weights(self._weights, compute_dtype(trainer.precision_plugin))
            self._before = {layer: weight.sample().quantize() for layer, weight in weights}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Measures and logs, after the last step of the batch."""
        if self._is_watching and not is_mid_step(trainer):
            self._let_go()
            self._measure(trainer, pl_module)
        self._before = {}

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lets go of layers, between two micro-batches too."""
        self._watched.stop()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Goes on with the step."""
        if self._is_watching:
            self._watched.resume()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reads the numbers of the last step, and lets go of layers: a step may have been cut short."""
        super().on_train_end(trainer, pl_module)
        self._let_go()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Lets go of layers and codes."""
        self._let_go()
        self._before = {}

    def _let_go(self) -> None:
        self._is_watching = False
        self._watched.stop()

    @contextmanager
    def look_away(self) -> Generator[None, None, None]:
        """A context for passes that are not those of the training step."""
        self._watched.stop()
        try:
            yield
        finally:
            if self._is_watching:
                self._watched.resume()

    # --- what ---

    def _measure(self, trainer: Trainer, pl_module: LightningModule) -> None:
        casts: dict[str, Cast] = {}
        values: dict[tuple[str, str], Tensor] = {}
        for layer, weight in latent_weights(self._weights, compute_dtype(trainer.precision_plugin)):
            casts[layer] = weight.cast
            weight = weight.sample()
            seen = Seen(weight, self._before.pop(layer, None), weight.quantize())
            for column in COLUMNS:
                values |= {(layer, name): value for name, value in column(seen).items()}
        sums = self._watched.sums_over_ranks()
        if not self._weights and not len(sums):
            return
        what = _Measured(trainer.global_step, self._logger_step(trainer), casts, list(values))
        self._keep(what, torch.cat([sums.flatten(), *(value.to(sums.dtype)[None] for value in values.values())]))
        self._log(pl_module, self._watched.means(sums))

    def _judge(self, what: _Measured, numbers: Sequence[float]) -> int:
        """Writes the numbers of a step, and looks for what is wrong with them."""
        split = len(numbers) - len(what.places)
        rows: dict[str, dict[str, float]] = {layer: {} for layer in what.casts}
        operands = self._watched.numbers(numbers[:split])
        for (layer, name), number in zip(what.places, numbers[split:], strict=True):
            rows[layer][name] = number
        written = {
            f"{name}/{operand}/{layer}": number
            for layer, row in operands.items()
            for operand, found in row.items()
            for name, number in found.items()
        }
        written |= {f"{name}/fprop_w/{layer}": n for layer, of_one in rows.items() for name, n in of_one.items()}
        if written:  # if not, nothing was quantized: what is reported stays that of the last step that had something
            self._step, self._rows = what.step, rows
            for layer, row in operands.items():  # what a phase no longer quantizes is reported as it was
                self._operands.setdefault(layer, {}).update(row)
            self._write(written, what.logger_step)
        # Of a layer that was not seen this time nobody knows whether it flipped: its count begins anew.
        self._last_flip = {layer: step for layer, step in self._last_flip.items() if layer in what.casts}
        for layer, of_one in rows.items():
            self._last_flip[layer] = what.step if of_one.get("flips") else self._last_flip.get(layer, what.step)
            self._note(layer, self._faults_of_weight(layer, of_one, what))
        for layer, row in operands.items():
            for operand, found in row.items():
                limit = self.underflow_limit
                if found["underflow"] > limit and self._watched.is_ternary(layer, operand):
                    limit = 1.0
                casts = self._watched.layers[layer].full_casts
                self._note(layer, of_operand(operand, casts, found, limit))
        return what.step

    def _faults_of_weight(self, layer: str, row: Mapping[str, float], what: _Measured) -> Iterator[Fault]:
        faults = list(of_weight(row, what.casts[layer], self.zeros_tolerance))
        yield from faults
        if self._weights[layer].weight.requires_grad and not any(fault.kind == "not finite" for fault in faults):
            yield from of_codes(what.step - self._last_flip[layer], self.no_flips_for)

    def _note(self, layer: str, faults: Iterable[Fault]) -> None:
        for fault in faults:
            self._alerts.note(layer, *fault)

    # --- what is left of it ---

    def state_dict(self) -> dict[str, Any]:
        """What was said, and since when no code has changed."""
        self._read()
        return {"alerts": self._alerts.state_dict(), "last_flip": dict(self._last_flip)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on with it."""
        self._alerts.load_state_dict(state_dict["alerts"])
        self._last_flip = dict(state_dict["last_flip"])

    def report_data(self, trainer: Trainer) -> dict[str, Any]:
        """The numbers of the last step that was logged, and all alerts."""
        self._read()
        return {
            "quantized_weights": {"step": self._step, "layers": self._rows, "alerts": self._alerts.texts()},
            "quantized_operands": {"step": self._step, "layers": self._operands},
        }

    def report_sections(self, trainer: Trainer) -> list[Section]:
        """A heat map of SQNR by layer and operand, and tables."""
        self._read()
        at = f"At step {self._step}, the last one that was logged"
        operands = QuantizedOperands.blocks(self._operands, at)
        names = list(dict.fromkeys(name for row in self._rows.values() for name in row))
        rows = []
        for layer in dict.fromkeys([*self._rows, *self._alerts.subjects()]):
            numbers = [self._rows.get(layer, {}).get(name) for name in names]
            cells = ["" if number is None else f"{number:.3g}" for number in numbers]
            rows.append([layer, *cells, ", ".join(self._alerts.kinds(layer))])
        blocks: list[Block] = [Text("No step with quantized weights was logged.")]
        if rows:
            caption = f"{at}; distances are in units of scales."
            blocks = [Table(["layer", *names, "alerts"], rows, caption)]
        sections = [Section("Quantized operands", operands)] if operands else []
        return [*sections, Section("Quantized weights", blocks)]
