"""Norms of gradients: their curves, spikes, and warnings.

Squares of the norms of parts add up over parameters and ranks, so one collective serves every norm.
"""

import math
import re
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_lowbit._lightning import LightningModule, Trainer, is_logging_step, is_overridden, logger_step
from lightning_lowbit._torch import current_scale
from lightning_lowbit.callbacks.monitors.base import Monitor
from lightning_lowbit.checks import integer, number, positive, some
from lightning_lowbit.distributed import all_reduce_, local_norms, sharding_of
from lightning_lowbit.metrics.spikes import LEAST_RISE, SPIKE_STATE, detect_spike
from lightning_lowbit.optim.optimizer import ClippedOptimizer
from lightning_lowbit.patterns import clean_name, select
from lightning_lowbit.precision.grad_scalers import overflow
from lightning_lowbit.precision.loss_scaling import scaler_of
from lightning_lowbit.report.html import Section, Table, Text
from lightning_lowbit.saved_state import NUMBER

_ENOUGH = 10  # norms in the mean before any is a spike; and consecutive spikes that count as a new level
_MOST_SPIKES = 100  # the last ones, which the report lists

_ADVICE = {
    "not finite": (
        "it is {norm}{where}, and so are the weights after a step with it. Look at the data of this step and at the "
        "learning rate; optimizers of lightning_lowbit skip such a step."
    ),
    "limit": (
        "it is {norm:.4g} before clipping, above {limit}. Lower the learning rate or lengthen its warm-up{or_clip}; if "
        "such norms are usual for the model, raise the limit."
    ),
    "spike": (
        "it is {norm:.4g} before clipping, where its running mean is {mean:.4g}. Look at the data of this step.{clip} "
        "More are counted in grad_norm/spikes."
    ),
}
# The advice if nothing clips.
_OR_CLIP = ", or clip (gradient_clip_val, StableSPAM)"
_CLIP = " Clipping (gradient_clip_val, StableSPAM) bounds what a spike does."
_CLIPS = ("element_clip", "norm_clip")  # options of optimizers of this package

_TIMES = re.compile(r"(\d+(\.\d*)?)x")
_MOST_NORMS = 1000  # for the median; beyond it every other one is dropped


class GradientNormMonitor(Monitor):
    """Logs norms of gradients, and warns when one spikes, is too large, or is not finite.

    In each logged step, of all gradients together and of chosen layers (``grad_norm/unclipped/layers.3.mlp.up_proj``):
    ``grad_norm/unclipped``; ``grad_norm/clipped`` if the Trainer or the module clips; ``grad_norm/used``, as an
    optimizer of this package used it; and ``grad_norm/spikes``, the number of spikes so far. Norms are of whole
    gradients on one device and under DDP, FSDP and tensor parallelism. See ``docs/guides/monitoring.md``.

    Args:
        layers: patterns of layers, see :func:`lightning_lowbit.convert`. Any module with parameters of its own is a
            layer; a pattern that matches a block stands for all layers in it.
        every_n_steps: also look for spikes in each n-th step, as the logger counts them; None: only in logged steps.
        spike_factor: how many times the running mean of at least 10 earlier norms is a spike, above 1. Healthy norms
            vary by some ten per cent.
        decay: of the running mean, in [0, 1): it reaches back about 1 / (1 - decay) norms.
        limit: the norm above which to warn; a text such as ``"10x"`` is relative to the median norm of the run so far
            (10 norms or more). None: no limit.

    Raises:
        ValueError: an argument is out of range; or, when training starts, a pattern matches no layer.

    Examples:
        >>> Trainer(callbacks=[GradientNormMonitor(layers=["lm_head"], every_n_steps=1)])
    """

    # Older checkpoints have no start and no norms.
    saved: ClassVar[Any] = {
        "running": {f"{name}?" if name == "start" else name: NUMBER for name in SPIKE_STATE},
        "spikes": [(int, NUMBER, NUMBER)],
        "norms?": [NUMBER],
        **Monitor.saved,
    }

    def __init__(
        self,
        layers: list[str] | None = None,
        every_n_steps: int | None = None,
        spike_factor: float = 5.0,
        decay: float = 0.99,
        limit: float | str | None = "10x",
    ) -> None:
        times = _TIMES.fullmatch(limit) if isinstance(limit, str) else None
        if times is None or not float(times[1]) > 1:
            kinds = "a norm, or a text such as '10x' (times the median of norms so far, above 1)"
            positive("limit", limit, kinds, or_none=True)
        self.layers, self.limit = layers, limit
        self.every_n_steps = integer("every_n_steps", every_n_steps, 1, "a number of steps", or_none=True)
        self.spike_factor = number("spike_factor", spike_factor, "how many times the mean is a spike", above=1)
        self.decay = number("decay", decay, "what remains of a mean with each norm", at_least=0, below=1)
        self._chosen: set[str] = set()
        self._times = None if times is None else float(times[1])
        self._has_scaler = self._is_clipped = False
        super().__init__()

    def _start_afresh(self) -> None:
        super()._start_afresh()
        self._running = torch.zeros(len(SPIKE_STATE), dtype=torch.float32)
        self._spikes: deque[tuple[int, float, float]] = deque(maxlen=_MOST_SPIKES)  # step, norm, mean before it
        self._norms: list[float] = []

    def _forget(self) -> None:
        super()._forget()
        self._steps: dict[Optimizer, tuple[list[Tensor], Tensor]] = {}  # in this batch: parameters, norms unclipped [P]

    def _begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._chosen = set()
        self._refuse_deepspeed(trainer)
        self._has_scaler = scaler_of(trainer.precision_plugin) is not None
        self._is_clipped = bool(trainer.gradient_clip_val) or any(
            group.get(name) for optimizer in trainer.optimizers for group in optimizer.param_groups for name in _CLIPS
        )
        if self.layers is not None and (names := list(_layers(pl_module))):
            self._chosen = select(names, self.layers, "layers", "layer with parameters")

    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self._is_idle:
            return
        step = logger_step(trainer) + 1
        is_due = self.every_n_steps is not None and step % self.every_n_steps == 0
        if is_due or is_logging_step(trainer):
            parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
            norms, scaler = local_norms(parameters, trainer.strategy.root_device), scaler_of(trainer.precision_plugin)
            if scaler is not None and overflow(scaler, optimizer) is None:  # a fused optimizer will unscale in its step
                scale = current_scale(scaler)
                norms = norms if scale is None else norms / scale.to(norms)
            self._steps[optimizer] = parameters, norms

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        steps, self._steps = self._steps, {}
        parameters = [parameter for members, _ in steps.values() for parameter in members]
        if not parameters:
            return
        stages, parts = ["unclipped"], [torch.cat([norms for _, norms in steps.values()])]
        clips = trainer.gradient_clip_val or is_overridden("configure_gradient_clipping", pl_module)
        if clips and pl_module.automatic_optimization:
            stages.append("clipped")
            parts.append(local_norms(parameters, trainer.strategy.root_device))
        groups = [sharding_of(parameter).groups for parameter in parameters]
        squares = torch.stack(all_reduce_(torch.stack(parts, 1).square().unbind(), groups, dist.ReduceOp.SUM))
        if any(isinstance(optimizer, ClippedOptimizer) for optimizer in steps):
            stages.append("used")
            squares = torch.cat([squares, _used([*steps], parameters, squares)[:, None]], 1)
        norms = {"": squares.sum(0).sqrt()}  # by layer: [stages]
        indices = {id(parameter): index for index, parameter in enumerate(parameters)}
        for name, weights in _layers(pl_module).items() if self._chosen else ():  # again, because layers may thaw
            members = [indices[id(weight)] for weight in weights if id(weight) in indices]
            if name in self._chosen and members:
                norms[f"/{name}"] = torch.stack([squares[index] for index in members]).sum(0).sqrt()
        whole = norms[""][0]
        self._running, mean, is_spike = detect_spike(self._running, whole, self.spike_factor, self.decay, _ENOUGH)
        unclipped = torch.stack([row[0] for row in norms.values()])
        columns = {"mean": mean, "is_spike": is_spike, "norms": unclipped}
        self._keep(trainer.global_step, columns, [name[1:] for name in norms][1:])
        if is_logging_step(trainer):
            metrics = {"grad_norm/spikes": self._running[SPIKE_STATE.index("spikes")]}
            for layer, row in norms.items():
                metrics |= {f"grad_norm/{stage}{layer}": row[index] for index, stage in enumerate(stages)}
            self._log(pl_module, metrics)

    def _judge(self, step: int, columns: Mapping[str, Any], layers: list[str]) -> None:
        mean, is_spike, (norm, *layer_norms) = columns["mean"], columns["is_spike"], columns["norms"]
        if is_spike:
            self._spikes.append((step, norm, mean))
        bad = [name for name, value in zip(layers, layer_norms, strict=True) if not math.isfinite(value)]
        where = f" (in {some(bad)})" if bad else ""
        limit, limit_text = self._limit(bool(is_spike))
        or_clip, clip = ("", "") if self._is_clipped else (_OR_CLIP, _CLIP)
        for kind, severity, holds in (
            ("not finite", 1.0, not math.isfinite(norm) and not self._has_scaler),
            ("limit", norm / limit, limit < norm < math.inf),
            ("spike", norm / mean if mean else math.inf, is_spike),
        ):
            if holds:
                facts = {"norm": norm, "mean": mean, "limit": limit_text, "where": where, "clip": clip}
                advice = _ADVICE[kind].format(**facts, or_clip=or_clip)
                self._alerts.note("Gradient norm", kind, severity, advice)
        if math.isfinite(norm):
            self._norms.append(norm)
            if len(self._norms) > _MOST_NORMS:
                self._norms = self._norms[::2]

    def _limit(self, is_spike: bool) -> tuple[float, str]:
        if self._times is None:
            return (math.inf, "") if self.limit is None else (float(self.limit), f"the limit of {self.limit:g}")
        if is_spike or len(self._norms) < _ENOUGH:  # a spike has its own warning
            return math.inf, ""
        median = statistics.median(self._norms)
        least = LEAST_RISE * statistics.median(self._norms[:_ENOUGH])  # the norms of a converged model are near 0
        limit = max(self._times * median, least) or math.inf
        return limit, f"{self._times:g} times the median of {median:.4g} so far (limit)"

    def _numbers(self) -> dict[str, Any]:
        self._read()
        running = dict(zip(SPIKE_STATE, self._running.tolist(), strict=True))
        return {"running": running, "spikes": list(self._spikes), "norms": list(self._norms)}

    def _load(self, state: dict[str, Any]) -> None:
        super()._load(state)
        running = state["running"]
        running = {"start": running["sum"] / running["weight"] if running["weight"] else 0.0, **running}
        self._running = torch.tensor([running[name] for name in SPIKE_STATE], dtype=torch.float32)
        self._spikes = deque(state["spikes"], maxlen=_MOST_SPIKES)
        self._norms = list(state.get("norms", ()))

    def report_data(self, trainer: Trainer) -> dict[str, Any]:
        alerts = self.report_alerts(trainer)
        spikes = [dict(zip(("step", "norm", "mean"), spike, strict=True)) for spike in self._spikes]
        return {"gradient_norm": {"spikes": spikes, "alerts": alerts}}

    def report_sections(self, trainer: Trainer) -> list[Section]:
        self._read()
        blocks: list[Table | Text] = [Text(f"No gradient norm exceeded {self.spike_factor:g} times its running mean.")]
        if self._spikes:
            caption = f"Norms above {self.spike_factor:g} times their running mean; the last {_MOST_SPIKES}, if more."
            blocks = [Table(["step", "norm", "running mean"], list(self._spikes), caption)]
        return [Section("Gradient norm", blocks)]


def _layers(pl_module: LightningModule) -> dict[str, list[Tensor]]:
    layers = {clean_name(name): [*module.parameters(recurse=False)] for name, module in pl_module.named_modules()}
    return {name: parameters for name, parameters in layers.items() if name and parameters}


def _used(optimizers: list[Optimizer], parameters: list[Tensor], squares: Tensor) -> Tensor:
    """Σg² after the optimizers' own clipping, or as given to those without any: [P]; 0 in a skipped step."""
    guarded = [optimizer for optimizer in optimizers if isinstance(optimizer, ClippedOptimizer)]
    seen = {parameter: row for optimizer in guarded for parameter, row in optimizer.gradient_statistics().items()}
    unknown = torch.full_like(squares[0, 0], math.nan)
    after = torch.stack([seen[p].norm_after.to(unknown) if p in seen else unknown for p in parameters])
    after = torch.where(after.isnan(), squares[:, -1], after.square())
    return torch.where(squares[:, 0].sum().isfinite(), after, 0.0)
