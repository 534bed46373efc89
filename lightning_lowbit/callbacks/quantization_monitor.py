"""What quantisation does to the weights of a run: columns of numbers, one row for each layer.

    on_before_optimizer_step    in a step that is logged: the codes of the weights
    on_train_batch_end          the columns, from the codes before and after; logged as tensors on the device
    on_train_batch_start        of the next batch: their numbers, for alerts and for the report

A column is a small function of what was seen of a weight. It gives 0-d tensors by name, none where it has nothing to
say; their metrics are called ``<name>/fprop_w/<layer>``.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_lowbit.callbacks.alerts import Alerts
from lightning_lowbit.callbacks.latent_weights import LatentWeight, latent_weights, whole_layers
from lightning_lowbit.callbacks.logged import forget_logged
from lightning_lowbit.callbacks.report_page import Section, Table, Text
from lightning_lowbit.metrics import expected_zeros, flip_rate, is_ternary, ternary_shares, threshold_distance
from lightning_lowbit.nn import QuantizedLayer
from lightning_lowbit.nn.convert import select
from lightning_lowbit.precision.base import compute_dtype
from lightning_lowbit.quant import Cast, Quantized
from lightning_lowbit.quant.cast import is_number

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
    """The numbers of one step, while they are on the device: a value for each (layer, name)."""

    step: int
    casts: dict[str, Cast]
    places: list[tuple[str, str]]
    values: Tensor


class QuantizationMonitor(Callback):
    """Logs what becomes of quantised weights, and warns where it is not what it should be.

    Of each weight that is rounded to nearest, as often as the logger takes it:

    - ``minus``, ``zeros`` and ``plus``: shares of -1, 0 and 1, where these are the levels.
    - ``flips``: share of codes that the optimizer step changed, or all the optimizer steps of a batch together.
    - ``distance``: mean distance of its elements from the nearest rounding threshold, in units of their scales. Where
      it is small, small steps flip many codes.

    The metrics have names such as ``zeros/fprop_w/layers.3.mlp.up_proj``. There are none of a weight while it is not
    quantised, in a phase or while λ is 0, nor of weights that are rotated or smoothed before they are rounded.

    Alerts are said once for each layer and run, and listed by :class:`RunReport`:

    - No element of a weight is finite.
    - All codes of a ternary weight are 0.
    - No code of a weight that is trained has changed for long.
    - The share of zeros of a ternary weight with ``statistic="absmean"`` is far from that of normally distributed ones
      (:func:`lightning_lowbit.metrics.expected_zeros`).

    A step that is logged quantises each weight a few more times, and keeps its codes, a byte for each element. Other
    steps cost nothing.

    Args:
        only: patterns of layers to watch, see :func:`lightning_lowbit.convert`; None for all.
        no_flips_for: optimizer steps without a flip, in those that are logged, after which to warn.
        zeros_tolerance: how far a share of zeros may be from the expected one, in (0, 1].

    Raises:
        ValueError: an argument is out of range; or, when training starts, a pattern matches no layer.
        MisconfigurationException: when training starts: weights are sharded.

    Example:
        >>> Trainer(plugins=[TernaryPrecision()], callbacks=[QuantizationMonitor()])
    """

    def __init__(self, only: list[str] | None = None, no_flips_for: int = 1000, zeros_tolerance: float = 0.15) -> None:
        if type(no_flips_for) is not int or no_flips_for < 1:
            raise ValueError(f"no_flips_for is a number of optimizer steps, 1 or more; got {no_flips_for!r}.")
        if not is_number(zeros_tolerance) or not 0 < zeros_tolerance <= 1:
            raise ValueError(f"zeros_tolerance is a share of elements, above 0 and up to 1; got {zeros_tolerance!r}.")
        self.only, self.no_flips_for, self.zeros_tolerance = only, no_flips_for, zeros_tolerance
        self._layers: dict[str, QuantizedLayer] = {}
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._alerts = Alerts(self)
        self._last_flip: dict[str, int] = {}  # the optimizer step of the last flip seen, or of the first look
        self._step, self._rows = 0, dict[str, dict[str, float]]()  # the last step logged: numbers by layer and name
        self._forget()

    def _forget(self) -> None:
        self._before: dict[str, Quantized] = {}
        self._measured: _Measured | None = None
        self._logged: list[str] = []

    # --- when ---

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forgets another run."""
        if stage == "fit" and trainer.global_step == 0:  # or else the same Trainer goes on; checkpoints come later
            self._start_afresh()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Finds the layers."""
        self._forget()
        self._layers = whole_layers(self, trainer, pl_module)
        if self.only is not None:
            chosen = select(list(self._layers), self.only, "only")
            self._layers = {name: layer for name, layer in self._layers.items() if name in chosen}

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Reads the numbers of the last step, if it was logged."""
        self._read()
        forget_logged(trainer, self._logged)
        self._logged = []

    def on_before_optimizer_step(self, trainer: Trainer, *_: Any) -> None:
        """Keeps the codes, before the first step of a batch that is logged."""
        if not self._before and trainer._logger_connector.should_update_logs:
            weights = latent_weights(self._layers, compute_dtype(trainer.precision_plugin))
            self._before = {layer: weight.quantize() for layer, weight in weights}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Measures and logs, after the last step of the batch."""
        if trainer._logger_connector.should_update_logs and not trainer.fit_loop._should_accumulate():
            self._measure(trainer, pl_module)
        self._before = {}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reads the numbers of the last step."""
        self._read()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Lets go of the codes."""
        self._before = {}

    # --- what ---

    def _measure(self, trainer: Trainer, pl_module: LightningModule) -> None:
        casts: dict[str, Cast] = {}
        metrics: dict[tuple[str, str], Tensor] = {}
        for layer, weight in latent_weights(self._layers, compute_dtype(trainer.precision_plugin)):
            casts[layer] = weight.cast
            seen = Seen(weight, self._before.pop(layer, None), weight.quantize())
            for column in COLUMNS:
                metrics |= {(layer, name): value for name, value in column(seen).items()}
        # Of a layer that was not seen this time nobody knows whether it flipped: its count begins anew.
        self._last_flip = {layer: step for layer, step in self._last_flip.items() if layer in casts}
        if metrics:
            self._measured = _Measured(trainer.global_step, casts, list(metrics), torch.stack(list(metrics.values())))
            named = {f"{name}/fprop_w/{layer}": value for (layer, name), value in metrics.items()}
            pl_module.log_dict(named, batch_size=1)
            self._logged = list(named)

    def _read(self) -> None:
        """Turns what was measured last into numbers, and looks for what is wrong with them.

        All by one copy, when the next batch begins: by then Lightning's logger has copied these values for itself, and
        waited for them, so that nothing is left to wait for.
        """
        if self._measured is None:
            return
        (step, casts, places, values), self._measured = self._measured, None
        try:
            numbers = values.tolist()
        except RuntimeError:  # after an error of the device nothing can be copied from it; whatever comes next says so
            return
        self._step, self._rows = step, {layer: {} for layer in casts}
        for (layer, name), number in zip(places, numbers, strict=True):
            self._rows[layer][name] = number
        for layer, row in self._rows.items():
            self._last_flip[layer] = step if row.get("flips") else self._last_flip.get(layer, step)
            self._check(layer, row, casts[layer])

    def _check(self, layer: str, row: Mapping[str, float], cast: Cast) -> None:
        zeros, expected = row.get("zeros"), expected_zeros(cast.scale.factor)
        if math.isnan(row.get("distance", 0.0)):
            self._alert(layer, "not finite", "no element of its weight is a number. Look for the step that broke it.")
            return
        if zeros == 1:
            message = (
                "all codes of its weight are 0, where some should be -1 or 1: its output does not depend on its input. "
                "Look for what keeps the weight at 0, or below the epsilon of its scale: initialisation, weight decay."
            )
            self._alert(layer, "all zeros", message)
        elif zeros is not None and cast.scale.statistic == "absmean" and abs(zeros - expected) > self.zeros_tolerance:
            message = (
                f"{zeros:.1%} of its weight are 0, where {expected:.1%} are expected of normally distributed weights "
                f"and a factor of {cast.scale.factor:g} (zeros_tolerance={self.zeros_tolerance:g}). Look at how the "
                "weight is distributed: few large elements among many small ones make zeros of those."
            )
            self._alert(layer, "zeros", message)
        quiet = self._step - self._last_flip[layer]
        if quiet >= self.no_flips_for and self._layers[layer].weight.requires_grad:
            message = (
                f"no code of its weight has changed in a logged step for {quiet} optimizer steps, where training "
                f"should change some (no_flips_for={self.no_flips_for}). Look at its gradient and learning rate: steps "
                "may be too small to cross a rounding threshold."
            )
            self._alert(layer, "no flips", message)

    def _alert(self, layer: str, kind: str, message: str) -> None:
        self._alerts.say(layer, kind, self._step, message)

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
        return {"quantized_weights": {"step": self._step, "layers": self._rows, "alerts": self._alerts.texts()}}

    def report_sections(self, trainer: Trainer) -> list[Section]:
        """The same as a table."""
        self._read()
        names = list(dict.fromkeys(name for row in self._rows.values() for name in row))
        rows = []
        for layer in dict.fromkeys([*self._rows, *self._alerts.said]):
            numbers = [self._rows.get(layer, {}).get(name) for name in names]
            cells = ["" if number is None else f"{number:.3g}" for number in numbers]
            rows.append([layer, *cells, ", ".join(self._alerts.kinds(layer))])
        blocks: list[Table | Text] = [Text("No step with quantised weights was logged.")]
        if rows:
            caption = f"At step {self._step}, the last one that was logged; distances are in units of scales."
            blocks = [Table(["layer", *names, "alerts"], rows, caption), *map(Text, self._alerts.texts())]
        return [Section("Quantised weights", tuple(blocks))]
