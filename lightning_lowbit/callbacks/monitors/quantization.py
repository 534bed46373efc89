"""Measures the quantization of the six operands of each layer, and of its weight between steps."""

from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_lowbit._lightning import (
    LightningModule,
    MisconfigurationException,
    Trainer,
    is_logging_step,
    is_mid_step,
    logger_step,
    say_once,
)
from lightning_lowbit.callbacks.monitors.base import Monitor
from lightning_lowbit.callbacks.monitors.faults import Fault, judge_codes, judge_operand, judge_weight
from lightning_lowbit.callbacks.monitors.latent_weights import (
    LatentWeight,
    converted_layers,
    has_flat_weights,
    latent_weights,
)
from lightning_lowbit.callbacks.monitors.operand_statistics import OperandNumbers, QuantizedOperands, operand_blocks
from lightning_lowbit.checks import flag, fraction, integer
from lightning_lowbit.metrics import flip_rate, is_ternary, ternary_shares, threshold_distance
from lightning_lowbit.nn import QuantizedLayer
from lightning_lowbit.patterns import select
from lightning_lowbit.precision.run_settings import compute_dtype
from lightning_lowbit.quant import Cast, Quantized
from lightning_lowbit.report.html import Block, Section, Text


class QuantizationMonitor(Monitor):
    """Logs the errors of quantized operands and weights, and warns where something is wrong.

    In each logged step, for each layer: ``sqnr`` (dB), ``underflow``, ``saturation``, ``scale_min`` and ``scale_max``
    of every quantized operand. For every weight that is rounded to nearest: ``flips`` (the share of codes that the step
    changed), ``distance`` (of its elements from rounding thresholds, in units of their scales) and, if it is ternary,
    the shares ``minus``, ``zeros`` and ``plus``. Metrics have names such as ``sqnr/wgrad_g/layers.3.mlp.up_proj``;
    ``sqnr/wgrad_g`` is the mean over layers, for other callbacks to monitor. See ``docs/guides/monitoring.md``.

    Args:
        only: patterns of layers to watch, see :func:`lightning_lowbit.convert`; None for all.
        no_flips_for: optimizer steps without a flip after which to warn.
        zeros_tolerance: how far the share of zeros of a ternary weight may be from the expected one, in (0, 1].
        underflow_limit: share of elements that became 0 above which to warn, in (0, 1]; not for ternary operands.
        operands: measures operands.
        weights: measures weights; None: unless FSDP1 flattens them.
        blocks: logs statistics of the blocks of operands, too: ``scale_mean``, ``scale_std`` and histograms.

    Raises:
        ValueError: an argument is out of range; or, when training starts, a pattern matches no layer.

    Examples:
        >>> Trainer(plugins=[TernaryPrecision()], callbacks=[QuantizationMonitor()])
    """

    saved: ClassVar[Any] = {"last_flip": {str: int}, **Monitor.saved}

    def __init__(
        self,
        only: list[str] | None = None,
        no_flips_for: int = 1000,
        zeros_tolerance: float = 0.15,
        underflow_limit: float = 0.5,
        operands: bool = True,
        weights: bool | None = None,
        blocks: bool = False,
    ) -> None:
        if not operands and weights is False:
            raise ValueError("There is nothing to watch with operands=False and weights=False: leave out the callback.")
        self.only, self.operands, self.weights = only, operands, weights
        self.no_flips_for = integer("no_flips_for", no_flips_for, 1, "a number of optimizer steps")
        self.zeros_tolerance = fraction("zeros_tolerance", zeros_tolerance, "a share of elements")
        self.underflow_limit = fraction("underflow_limit", underflow_limit, "a share of elements")
        self.blocks = flag("blocks", blocks)
        self._watched = QuantizedOperands({})
        self._weights: dict[str, QuantizedLayer] = {}
        super().__init__()

    def _start_afresh(self) -> None:
        super()._start_afresh()
        self._last_flip: dict[str, int] = {}  # the optimizer step of the last flip, of the first look, or while frozen
        self._step = 0  # the last one that was logged: numbers of weights by layer and name, and of operands
        self._rows: dict[str, dict[str, float]] = {}
        self._operands: dict[str, dict[str, dict[str, float]]] = {}

    def _forget(self) -> None:
        super()._forget()
        self._before: dict[str, Quantized] = {}
        self._is_watching = False

    def _begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not (layers := converted_layers(pl_module)):
            say_once("QuantizationMonitor has nothing to log: no layer is converted by a LowBitPrecision plugin.")
        is_flat = has_flat_weights(trainer)
        if self.only is not None and layers:
            chosen = select(list(layers), self.only, "only")
            layers = {name: layer for name, layer in layers.items() if name in chosen}
        self._weights = {} if is_flat or self.weights is False else layers
        self._watched.stop()
        self._watched = QuantizedOperands(layers if self.operands else {}, self.blocks)
        if is_flat and self.weights:
            raise MisconfigurationException(
                "QuantizationMonitor(weights=True) needs weights that are matrices, and FSDPStrategy flattens them: "
                "leave weights out, or train with one device, DDP or ModelParallelStrategy."
            )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if not self._is_watching and is_logging_step(trainer):
            self._is_watching = True
            self._watched.start(trainer.strategy.root_device)

    def on_before_optimizer_step(self, trainer: Trainer, *_: Any) -> None:
        if not self._before and is_logging_step(trainer):
            self._before = {layer: weight.sample().quantize() for layer, weight in self._latent(trainer)}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if self._is_watching and not is_mid_step(trainer):
            self._let_go()
            self._measure(trainer, pl_module)
        self._before = {}

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stops measuring; a validation may come between two micro-batches."""
        self._watched.stop()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._is_watching:
            self._watched.resume()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reads the last numbers, and stops measuring: a step may be incomplete."""
        super().on_train_end(trainer, pl_module)
        self._let_go()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._let_go()
        self._before = {}

    def _let_go(self) -> None:
        self._is_watching = False
        self._watched.stop()

    def _latent(self, trainer: Trainer) -> Iterator[tuple[str, LatentWeight]]:
        return latent_weights(self._weights, compute_dtype(trainer.precision_plugin))

    def _measure(self, trainer: Trainer, pl_module: LightningModule) -> None:
        casts: dict[str, Cast] = {}
        values: dict[tuple[str, str], Tensor] = {}
        for layer, weight in self._latent(trainer):
            casts[layer] = weight.cast
            numbers = _weight_numbers(weight.sample(), self._before.pop(layer, None))
            values |= {(layer, name): value for name, value in numbers.items()}
        operands = self._watched.measure()
        if not self._weights and not self._watched.layers:
            return
        trained = {layer for layer in casts if self._weights[layer].weight.requires_grad}
        columns = {**operands, "weights": torch.stack([*values.values()]) if values else torch.empty(0)}
        self._keep(trainer.global_step, columns, logger_step(trainer), casts, trained, list(values))
        self._log(pl_module, self._watched.means(operands))

    def _judge(
        self,
        step: int,
        columns: Mapping[str, Any],
        logger_step: int,
        casts: Mapping[str, Cast],  # of the weights that were measured
        trained: Set[str],  # of these, what is not frozen
        weights: list[tuple[str, str]],  # layer and name of each number of a weight
    ) -> None:
        operands = self._watched.numbers(columns)
        rows: dict[str, dict[str, float]] = {layer: {} for layer in casts}
        for (layer, name), number in zip(weights, columns["weights"], strict=True):
            rows[layer][name] = number
        self._publish(step, logger_step, operands, rows)
        # A layer that was not measured may have flipped: its count starts again.
        self._last_flip = {layer: last for layer, last in self._last_flip.items() if layer in casts}
        for layer, numbers in rows.items():
            is_still = layer in trained and not numbers.get("flips")
            self._last_flip[layer] = self._last_flip.get(layer, step) if is_still else step
            faults = list(judge_weight(numbers, casts[layer], self.zeros_tolerance))
            if not any(fault.kind == "not finite" for fault in faults):
                faults += judge_codes(step - self._last_flip[layer], self.no_flips_for)
            self._note(layer, faults)
        for layer, row in operands.items():
            layer_casts = self._watched.layers[layer].full_casts
            for operand, numbers in row.items():
                limit = self.underflow_limit
                if numbers["underflow"] > limit and self._watched.is_ternary(layer, operand):
                    limit = 1.0
                self._note(layer, judge_operand(operand, layer_casts, numbers, limit))

    def _publish(
        self, step: int, logger_step: int, operands: OperandNumbers, weights: Mapping[str, Mapping[str, float]]
    ) -> None:
        numbers: dict[str, dict[str, float]] = {}
        rows = [(layer, operand, values) for layer, row in operands.items() for operand, values in row.items()]
        for layer, operand, values in [*rows, *((layer, "fprop_w", values) for layer, values in weights.items())]:
            for name, number in values.items():
                numbers.setdefault(f"{name}/{operand}", {})[layer] = number
        if not numbers:  # nothing was quantized: the report keeps the last step with numbers
            return
        self._step, self._rows = step, {layer: dict(row) for layer, row in weights.items()}
        for layer, row in operands.items():  # the report keeps the last numbers if a phase no longer quantizes
            self._operands.setdefault(layer, {}).update(row)
        self._emit(numbers, step, logger_step)

    def _note(self, layer: str, faults: Iterable[Fault]) -> None:
        for fault in faults:
            self._alerts.note(layer, *fault)

    def _numbers(self) -> dict[str, Any]:
        self._read()
        return {"last_flip": dict(self._last_flip)}

    def _load(self, state: dict[str, Any]) -> None:
        super()._load(state)
        self._last_flip = dict(state["last_flip"])

    def report_data(self, trainer: Trainer) -> dict[str, Any]:
        alerts = self.report_alerts(trainer)
        return {
            "quantized_weights": {"step": self._step, "layers": self._rows, "alerts": alerts},
            "quantized_operands": {"step": self._step, "layers": self._operands},
        }

    def report_sections(self, trainer: Trainer) -> list[Section]:
        self._read()
        at = f"At step {self._step}, the last one that was logged"
        operands = operand_blocks(self._operands, at)
        names = list(dict.fromkeys(name for row in self._rows.values() for name in row))
        layers = dict.fromkeys([*self._rows, *self._alerts.kinds])
        rows = {layer: [self._rows.get(layer, {}).get(name) for name in names] for layer in layers}
        blocks: list[Block] = [Text("No step with quantized weights was logged.")]
        if rows:
            blocks = [self._table(["layer", *names], rows, f"{at}; distances are in units of scales.")]
        sections = [Section("Quantized operands", operands)] if operands else []
        return [*sections, Section("Quantized weights", blocks)]


def _weight_numbers(weight: LatentWeight, before: Quantized | None) -> dict[str, Tensor]:
    """Measures a weight after an optimizer step, 0-d tensors by name; ``before`` has its codes before the step."""
    after = weight.quantize()
    shares = zip(("minus", "zeros", "plus"), ternary_shares(after), strict=True) if is_ternary(weight.cast) else ()
    numbers = dict(shares)
    if before is not None and before.cast == after.cast:
        numbers["flips"] = flip_rate(before, after)
    numbers["distance"] = threshold_distance(weight.values, weight.cast, amax=weight.amax)
    return numbers
