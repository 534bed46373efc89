"""Measures whether the gradient stands out from quantization noise; see :mod:`lightning_lowbit.metrics.noise`."""

import hashlib
import math
from collections import deque
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_lowbit._lightning import LightningModule, Trainer, is_logging_step, is_mid_step, logger_step
from lightning_lowbit.callbacks.monitors.base import Monitor
from lightning_lowbit.callbacks.monitors.latent_weights import converted_layers
from lightning_lowbit.callbacks.monitors.noise_sources import FromDraws, FromLayers, NoiseMeasurement, Sums
from lightning_lowbit.checks import choose, integer, positive
from lightning_lowbit.metrics.noise import gradient_to_noise
from lightning_lowbit.nn import OPERANDS, LinearCasts, QuantizedLayer
from lightning_lowbit.patterns import select
from lightning_lowbit.precision import LowBitPrecision
from lightning_lowbit.report.html import Chart, Section, Text
from lightning_lowbit.saved_state import NUMBER, check_state

_GRADIENT_OPERANDS = [operand for operand in OPERANDS if not operand.startswith("fprop")]

METRIC = "gradient_noise/ratio"

_SOURCES: dict[str, type[NoiseMeasurement]] = {"draws": FromDraws, "layers": FromLayers}

_ADVICE = (
    "it is {ratio:.3g} times as large as the noise that quantization adds to it, below {threshold:.3g}: more and more "
    "of each step is noise. {switch}Larger batches and fewer operands that are rounded stochastically lower the noise."
)
_SWITCH = "To train in higher precision from here on, give PrecisionSwitch('qaf', below={}). "


def _is_measurement(value: object) -> bool:
    """a measurement: names, the empty one first, and two sums for each name"""
    try:
        check_state("", value, {"names": [str], "sums": [(NUMBER, NUMBER)]})
    except ValueError:
        return False
    row: Any = value
    return len(row["names"]) == len(row["sums"]) and row["names"][:1] == [""]


class GradientNoiseMonitor(Monitor):
    """Measures how far the gradient stands out from the noise of quantization: ``‖∇L‖ / (σ √d)``.

    d is the number of weights of all quantized layers. σ² is the variance that stochastic rounding and random rotations
    give to an element of their gradient. Below √3, training gets little further in this precision (FP4 All the Way,
    arXiv 2505.19115, section 4): ``PrecisionSwitch("qaf", below=...)`` switches to quantization-aware finetuning.

    Logs ``gradient_noise/ratio``, and ``gradient_noise/ratio/<layer>`` of chosen layers, in the measured step or the
    next one that is logged. The ratio is infinite without noise. Nothing is measured while no backward pass is
    quantized. A run that cannot be measured gets a warning; ``docs/guides/monitoring.md`` lists them, and the cost.

    Args:
        every_n_steps: optimizer steps between measurements, as the logger counts them.
        kind: ``"draws"`` (exact, two more backward passes) or ``"layers"`` (approximate, cheap, for every strategy).
        average: number of last measurements with the same casts over which the squares are averaged.
        threshold: the ratio below which to warn.
        layers: patterns of layers to log as well, see :func:`lightning_lowbit.convert`.

    Raises:
        ValueError: an argument is out of range; or, when training starts, a pattern matches no quantized layer.

    Examples:
        >>> Trainer(plugins=[FP4Precision()], callbacks=[GradientNoiseMonitor(), PrecisionSwitch("qaf", below={})])
    """

    saved: ClassVar[Any] = {
        "kind": str,
        "casts": str,
        "window": [_is_measurement],
        "measurements": [(int, NUMBER)],
        "to_log": bool,
        **Monitor.saved,
    }

    def __init__(
        self,
        every_n_steps: int = 500,
        kind: str = "draws",
        average: int = 5,
        threshold: float = math.sqrt(3),
        layers: list[str] | None = None,
    ) -> None:
        self.every_n_steps = integer("every_n_steps", every_n_steps, 1, "a number of optimizer steps")
        self.kind = choose("kind of GradientNoiseMonitor", kind, _SOURCES)
        self.average = integer("average", average, 1, "a number of measurements")
        self.threshold = positive("threshold", threshold, "a ratio of gradient to noise")
        self.layers = layers
        self._chosen: set[str] = set()
        self._switches = False  # a switch to higher precision depends on the measurements
        self._source: NoiseMeasurement = _SOURCES[kind]()
        super().__init__()

    def _start_afresh(self) -> None:
        super()._start_afresh()
        # The last measurements: layer names ("" for the whole model), and noise and signal of each, [names, 2].
        self._window: deque[tuple[tuple[str, ...], Tensor]] = deque(maxlen=self.average)
        self._casts = ""  # of the last measurements
        self._measurements: list[tuple[int, float]] = []
        self._to_log = False  # the last measurement is still to be logged

    def _forget(self) -> None:
        super()._forget()
        self._is_due = False  # in the current micro-batch

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Checks the run now: a switch asks for measurements before training starts."""
        super().on_fit_start(trainer, pl_module)
        self._try(lambda: self._check(trainer, pl_module))

    def _check(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._needs_plugin(trainer)
        self._needs_automatic_optimization(pl_module)
        self._source.check(trainer, pl_module)

    def _begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        self._switches = any(getattr(callback, "below", None) is not None for callback in callbacks)
        self._chosen = set()
        if self.layers is not None and (names := list(converted_layers(pl_module))):
            self._chosen = select(names, self.layers, "layers", "quantized layer")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._unread:
            self._read()
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        self._cancel(trainer)
        if not self._is_idle and _step(trainer) % self.every_n_steps == 0 and not is_mid_step(trainer):
            self._is_due = True
            self._try(lambda: self._source.prepare(trainer, pl_module))

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._is_due and not _quantizes_gradients(pl_module):
            self._casts = ""  # the next measurement is of other weights
            self._cancel(trainer)
        if self._is_due:
            layers = _quantized(pl_module)
            self._take(trainer, pl_module, self._try(lambda: self._source.before_backward(trainer, loss, layers)))

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._is_due:
            self._take(trainer, pl_module, self._source.after_backward(trainer, _quantized(pl_module)))
            self._cancel(trainer)  # an optimizer may run several backward passes in a step

    def _take(self, trainer: Trainer, pl_module: LightningModule, sums: Sums | None) -> None:
        if not sums:
            return
        if (casts := _casts_in_force(trainer, converted_layers(pl_module))) != self._casts:
            self._casts = casts
            self._window.clear()  # noise of other casts does not apply to these
        names = [name for name in sums if name in self._chosen]
        whole = torch.stack([*sums.values()]).sum(0)
        self._window.append((("", *names), torch.stack([whole, *(sums[name] for name in names)])))
        self._to_log = True
        self._keep(_step(trainer), {"ratio": self._ratios()[""]})

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self._cancel(trainer)
        if self._to_log and is_logging_step(trainer) and not is_mid_step(trainer):
            self._to_log = False
            ratios = self._ratios()
            self._log(pl_module, {f"{METRIC}/{name}" if name else METRIC: ratio for name, ratio in ratios.items()})

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._cancel(trainer)
        self._source.end()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._cancel(trainer)
        self._source.end()
        super().on_train_end(trainer, pl_module)

    def _cancel(self, trainer: Trainer) -> None:
        if self._is_due:
            self._is_due = False
            self._source.cancel(trainer)

    def _ratios(self) -> dict[str, Tensor]:
        """Returns averaged ratios by layer, of the layers in the last measurement: float32, 0-d."""
        names, latest = self._window[-1]
        unknown = torch.full_like(latest[0], math.nan)
        rows = [dict(zip(row_names, sums.to(latest).unbind(), strict=True)) for row_names, sums in self._window]
        sums = torch.stack([torch.stack([row.get(name, unknown) for name in names]) for row in rows])
        return dict(zip(names, gradient_to_noise(sums).float().unbind(), strict=True))

    def _judge(self, step: int, columns: Mapping[str, Any]) -> None:
        ratio: float = columns["ratio"]
        if not math.isnan(ratio):  # NaN if no measurement was finite
            self._measurements.append((step, ratio))
        if ratio < self.threshold:
            advice = _ADVICE.format(ratio=ratio, threshold=self.threshold, switch="" if self._switches else _SWITCH)
            self._alerts.note("the gradient", "noise", self.threshold / ratio if ratio else math.inf, advice)

    def measurements(self, monitor: str = METRIC) -> list[tuple[int, float]]:
        """Returns optimizer steps from 1, and averaged ratios of a metric, oldest first; the same on all ranks.

        It has all measurements up to the step before the last one. Ratios that are not finite are left out.

        Raises:
            KeyError: there is no such metric, or nothing can be measured in this run.
        """
        if self._is_idle:
            raise KeyError("it measures nothing in this run")
        if monitor != METRIC:
            raise KeyError(f"it measures {METRIC!r}, not {monitor!r}")
        return list(self._measurements)

    def _numbers(self) -> dict[str, Any]:
        self._read()
        return {
            "kind": self.kind,
            "casts": self._casts,
            "window": [{"names": list(names), "sums": sums.tolist()} for names, sums in self._window],
            "measurements": list(self._measurements),
            "to_log": self._to_log,
        }

    def _load(self, state: dict[str, Any]) -> None:
        super()._load(state)
        rows = [(tuple(row["names"]), torch.tensor(row["sums"], dtype=torch.float64)) for row in state["window"]]
        is_same = state["kind"] == self.kind
        self._window, self._casts = deque(rows if is_same else [], maxlen=self.average), state["casts"]
        self._measurements = [(step, ratio) for step, ratio in state["measurements"]]
        self._to_log = is_same and state["to_log"] and bool(rows)

    def report_data(self, trainer: Trainer) -> dict[str, Any]:
        alerts = self.report_alerts(trainer)
        rows = [{"step": step, "ratio": ratio} for step, ratio in self._measurements]
        return {"gradient_noise": {"threshold": self.threshold, "ratios": rows, "alerts": alerts}}

    def report_sections(self, trainer: Trainer) -> list[Section]:
        self._read()
        blocks: list[Chart | Text] = [Text(f"Not measured: every {self.every_n_steps} steps, in quantized layers.")]
        if self._measurements:
            steps, ratios = (list(column) for column in zip(*self._measurements, strict=True))
            finite = [ratio for ratio in ratios if ratio < math.inf]
            blocks = [Text(self._source.without_noise)]
            if finite:
                text = (
                    f"The gradient was {min(finite):.3g} to {max(finite):.3g} times as large as its noise from "
                    f"quantization; at {self.threshold:.3g} training is most sensitive to it."
                )
                lines = {"ratio": (steps, ratios), "threshold": (steps, [self.threshold] * len(steps))}
                blocks = [Chart("Gradient against noise", lines, "ratio", log=True), Text(text)]
        return [Section("Gradient noise", blocks)]


def _step(trainer: Trainer) -> int:
    return logger_step(trainer) + 1


def _quantized(pl_module: LightningModule) -> dict[str, QuantizedLayer]:
    layers = converted_layers(pl_module)
    return {name: m for name, m in layers.items() if m.casts != LinearCasts() and m.weight is not None}


def _quantizes_gradients(pl_module: LightningModule) -> bool:
    distinct = {layer.casts for layer in converted_layers(pl_module).values()}
    return any(getattr(casts, operand) is not None for casts in distinct for operand in _GRADIENT_OPERANDS)


def _casts_in_force(trainer: Trainer, layers: Mapping[str, QuantizedLayer]) -> str:
    plugin = trainer.precision_plugin
    assert isinstance(plugin, LowBitPrecision)
    texts = {casts: str(casts) for casts in {layer.casts for layer in layers.values()}}  # many layers share few casts
    text = str([plugin.phase, plugin.is_blending, *((name, texts[layer.casts]) for name, layer in layers.items())])
    return hashlib.sha256(text.encode()).hexdigest()
