"""Outliers in the inputs of layers, and in the weights that are about to cause them."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_lowbit._lightning import (
    LightningModule,
    MisconfigurationException,
    Trainer,
    is_logging_step,
    is_mid_step,
    logger_step,
)
from lightning_lowbit._torch import ConvNd
from lightning_lowbit.callbacks.monitors.base import Monitor
from lightning_lowbit.callbacks.monitors.faults import alignment_fault, channel_fault, input_fault
from lightning_lowbit.callbacks.monitors.latent_weights import has_flat_weights
from lightning_lowbit.callbacks.monitors.layer_inputs import LayerInputs, in_features
from lightning_lowbit.checks import fraction, number, positive
from lightning_lowbit.metrics import swiglu_alignment
from lightning_lowbit.metrics.outliers import kurtosis, outlier_share
from lightning_lowbit.metrics.spikes import RunningMean, SpikeDetector
from lightning_lowbit.nn import QuantizedLayer
from lightning_lowbit.nn.conversion.smooth_swiglu import swiglus
from lightning_lowbit.nn.layers.classes import is_linear
from lightning_lowbit.patterns import clean_name, select
from lightning_lowbit.report.html import Section, Table, Text
from lightning_lowbit.saved_state import NUMBER, count

_ENOUGH = 10  # amaxes in the mean before any warning, since activations grow fast in the beginning
_MEMORY = 50  # amaxes that the mean covers, so that it follows slow growth
_NAMED = 3  # channels of an MLP that a warning names

_LAYER_METRICS = ("activation_max", "kurtosis", "outliers")
_MLP_METRICS = ("alignment", "gate_norm")


class OutlierMonitor(Monitor):
    """Logs outliers in the inputs of linear layers and convolutions, and warns before and when they grow suddenly.

    In each logged step, of each layer's input: ``activation_max``, ``kurtosis`` (3 if normally distributed; see arXiv
    2306.12929, section 3) and ``outliers``, the share of elements beyond ``k`` times the root mean square. Of each
    SwiGLU: ``alignment``, the largest ``|cos|`` between rows of gate and up projection (near 1 the channel squares its
    input, arXiv 2409.12517, theorem 1), and ``gate_norm``. Metrics have names such as
    ``kurtosis/layers.3.mlp.up_proj``; ``kurtosis`` is the largest over all layers, for other callbacks to monitor. See
    ``docs/guides/monitoring.md``.

    Args:
        layers: patterns of linear layers and convolutions, see :func:`lightning_lowbit.convert`; None for the quantized
            ones, or for all if none is.
        swiglu: also measures the weights of SwiGLUs; None: if there are any whose weights are not flattened.
        k: how many times the root mean square makes an outlier, above 0 (LLM.int8(), arXiv 2208.07339, uses 6).
        alignment_limit: ``|cos|`` above which to warn, in (0, 1]; None for never. Independent rows of 64 elements never
            reach 0.9 (chance 1e-22 for each channel).
        takeoff: how many times the running mean of a layer's amax (over about 50 measurements, from the 10th on) a
            channel must reach for a warning, above 1; None for never.

    Raises:
        ValueError: an argument is out of range; or, when training starts, a pattern matches no layer.

    Examples:
        >>> Trainer(plugins=[FP8Precision()], callbacks=[OutlierMonitor(layers=["down_proj", "lm_head"])])
    """

    saved: ClassVar[Any] = {"means": {str: {"count": count, "mean": NUMBER, "start?": NUMBER}}, **Monitor.saved}

    def __init__(
        self,
        layers: list[str] | None = None,
        swiglu: bool | None = None,
        k: float = 6.0,
        alignment_limit: float | None = 0.9,
        takeoff: float | None = 10.0,
    ) -> None:
        if swiglu is not None and type(swiglu) is not bool:
            raise ValueError(f"swiglu is True, False or None, which looks where it can; got {swiglu!r}.")
        self.layers, self.swiglu = layers, swiglu
        self.k = float(positive("k", k, "how many times the rms an outlier exceeds"))
        self.alignment_limit = fraction("alignment_limit", alignment_limit, "a |cos|", or_none=True)
        self.takeoff = number("takeoff", takeoff, "how many times the mean is too much", above=1, or_none=True)
        self._inputs: LayerInputs | None = None
        self._mlps: dict[str, Any] = {}
        super().__init__()

    def _start_afresh(self) -> None:
        super()._start_afresh()
        self._means: dict[str, RunningMean] = {}  # of the amaxes of layers
        self._step = 0  # the last logged one, and its numbers
        self._rows: dict[str, dict[str, float]] = {}
        self._mlp_rows: dict[str, dict[str, float]] = {}

    @torch.no_grad()
    def _begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._let_go()
        self._inputs = LayerInputs(self._find_layers(pl_module), trainer.strategy.root_device, self.k)
        self._mlps = self._find_mlps(trainer, pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if self._inputs is not None:
            self._inputs.switch[0] = is_logging_step(trainer)

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if self._inputs is not None and self._inputs.switch[0]:
            self._inputs.switch[0] = False
            if not is_mid_step(trainer):
                self._measure(trainer, pl_module, self._inputs)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        self._let_go()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._let_go()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._let_go()

    def _let_go(self) -> None:
        if self._inputs is not None:
            self._inputs.remove()
        self._inputs, self._mlps = None, {}

    def _find_layers(self, pl_module: LightningModule) -> dict[str, nn.Module]:
        modules = {clean_name(name): module for name, module in pl_module.named_modules()}
        kinds = (nn.Linear, ConvNd)
        layers = {name: module for name, module in modules.items() if isinstance(module, kinds) or is_linear(module)}
        layers = {name: layer for name, layer in layers.items() if in_features(layer)}
        if not layers:
            raise MisconfigurationException(
                f"OutlierMonitor needs linear layers or convolutions, and {type(pl_module).__name__} holds none: leave "
                "it out. Layers that are created in configure_model must exist when training starts."
            )
        if self.layers is not None:
            chosen = select(list(layers), self.layers, "layers")
            return {name: layer for name, layer in layers.items() if name in chosen}
        return {name: layer for name, layer in layers.items() if isinstance(layer, QuantizedLayer)} or layers

    def _find_mlps(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        if self.swiglu is False:
            return {}
        mlps = {clean_name(name): module for name, module in swiglus(pl_module).items()}
        is_flat = has_flat_weights(trainer) or any(hasattr(p, "ds_id") for p in pl_module.parameters())  # of ZeRO-3
        if self.swiglu and not mlps:
            raise MisconfigurationException(
                f"swiglu=True needs SwiGLUs, and {type(pl_module).__name__} holds none: modules with linear layers "
                "gate_proj, up_proj and down_proj. Give your own MLPs properties of these names, or leave out swiglu."
            )
        if self.swiglu and is_flat:
            raise MisconfigurationException(
                f"swiglu=True needs the rows of weights, which {type(trainer.strategy).__name__} flattens and shards: "
                "leave it out, or train with DDP or ModelParallelStrategy (FSDP2)."
            )
        return {} if is_flat else mlps

    def _measure(self, trainer: Trainer, pl_module: LightningModule, inputs: LayerInputs) -> None:
        sums, amax, channel = inputs.take()
        elements = sums[:, 0]
        columns = {"activation_max": amax, "kurtosis": kurtosis(sums).float(), "outliers": outlier_share(sums).float()}
        unseen = elements == 0  # the maximum is NaN if no layer was called, and keeps values that are not finite
        largest = {
            name: torch.where(unseen.all(), torch.nan, column.where(~unseen, -math.inf).amax())
            for name, column in columns.items()
        }
        alignments = [_alignment(mlp, self.alignment_limit) for mlp in self._mlps.values()]
        if alignments:
            mlps = {name: torch.stack([row[name] for row in alignments]) for name in alignments[0]}
            largest |= {name: mlps[name].amax() for name in _MLP_METRICS}
            columns |= mlps
        self._log(pl_module, largest)
        columns |= {"channel": channel, "elements": elements}
        self._keep(trainer.global_step, columns, logger_step(trainer), list(inputs.layers), list(self._mlps))

    def _judge(
        self, step: int, columns: Mapping[str, Any], logger_step: int, layers: list[str], mlp_names: list[str]
    ) -> None:
        self._step = step
        seen = {layer: row for row, layer in enumerate(layers) if columns["elements"][row]}
        mlps = {mlp: row for row, mlp in enumerate(mlp_names)}
        self._rows = {layer: {name: columns[name][row] for name in _LAYER_METRICS} for layer, row in seen.items()}
        self._mlp_rows = {mlp: {name: columns[name][row] for name in _MLP_METRICS} for mlp, row in mlps.items()}
        for layer, row in seen.items():
            self._judge_layer(layer, columns["activation_max"][row], int(columns["channel"][row]))
        for mlp, row in mlps.items():
            if (beyond := int(columns["beyond"][row])) and self.alignment_limit is not None:
                pairs = list(zip(columns["channels"][row], columns["cosines"][row], strict=True))[:beyond]
                fault = alignment_fault(self._mlps.get(mlp), pairs, beyond, self.alignment_limit)
                self._alerts.note(mlp, *fault)
        places = {**dict.fromkeys(_LAYER_METRICS, seen), **dict.fromkeys(_MLP_METRICS, mlps)}
        numbers = {name: {at: columns[name][row] for at, row in rows.items()} for name, rows in places.items() if rows}
        self._emit(numbers, step, logger_step)

    def _judge_layer(self, layer: str, amax: float, channel: int) -> None:
        module = None if self._inputs is None else self._inputs.layers.get(layer)
        if not math.isfinite(amax):
            self._alerts.note(layer, *input_fault())
            return
        mean = self._means.setdefault(layer, self._new_mean())
        before = mean.mean
        if SpikeDetector(mean, _ENOUGH, learns_spikes=True).judge(amax) and self.takeoff is not None:
            self._alerts.note(layer, *channel_fault(module, channel, amax, before, self.takeoff))

    def _new_mean(self) -> RunningMean:
        return RunningMean(self.takeoff or math.inf, _MEMORY)

    def _numbers(self) -> dict[str, Any]:
        self._read()
        names = ("count", "mean", "start")
        return {"means": {layer: {name: getattr(mean, name) for name in names} for layer, mean in self._means.items()}}

    def _load(self, state: dict[str, Any]) -> None:
        super()._load(state)
        self._means = {}
        for layer, known in state["means"].items():
            self._means[layer] = mean = self._new_mean()
            mean.count, mean.mean, mean.start = known["count"], known["mean"], known.get("start", known["mean"])

    def report_data(self, trainer: Trainer) -> dict[str, Any]:
        alerts = self.report_alerts(trainer)
        return {"outliers": {"step": self._step, "layers": self._rows, "mlps": self._mlp_rows, "alerts": alerts}}

    def report_sections(self, trainer: Trainer) -> list[Section]:
        self._read()
        at = f"At step {self._step}, the last one that was logged"
        caption = f"{at}; outliers: share of elements beyond {self.k:g} times the rms."
        blocks: list[Table | Text] = [Text("No step with these layers was logged.")]
        if self._rows:
            rows = {layer: row.values() for layer, row in self._rows.items()}
            blocks = [self._table(["layer", "largest", "kurtosis", "outliers"], rows, caption)]
        if self._mlp_rows:
            caption = f"{at}; largest |cos| between rows of gate and up projection, largest norm of a row of the gate."
            rows = {mlp: row.values() for mlp, row in self._mlp_rows.items()}
            blocks.append(self._table(["MLP", "alignment", "gate norm"], rows, caption))
        return [Section("Outliers", blocks)]


def _alignment(mlp: Any, limit: float | None) -> dict[str, Tensor]:
    measured = swiglu_alignment(_whole_weight(mlp.gate_proj), _whole_weight(mlp.up_proj))
    cosines, channels = measured.cosine.topk(min(_NAMED, len(measured.cosine)))
    return {
        "alignment": measured.cosine.max(),
        "gate_norm": measured.gate_norm.max(),
        "beyond": (measured.cosine > (math.inf if limit is None else limit)).sum(),
        "channels": F.pad(channels.float(), (0, _NAMED - len(channels))),
        "cosines": F.pad(cosines.float(), (0, _NAMED - len(cosines))),
    }


def _whole_weight(layer: Any) -> Tensor:
    if isinstance(layer, QuantizedLayer) and layer.lowbit.frozen is not None:  # bytes
        return layer.weight_matrix()
    weight = layer.weight.full_tensor() if isinstance(layer.weight, DTensor) else layer.weight
    return weight if isinstance(layer, nn.Linear) else weight.t()
