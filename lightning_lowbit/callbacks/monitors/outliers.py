"""Outliers in what enters linear layers, and in the weights that are about to make them.

    on_train_batch_start    of a step that is logged: the hooks of layers are switched on, off at the end of the batch
    forward passes          sums and largest magnitudes of each layer's input
    on_train_batch_end      of the step: two collectives, and the weights of the MLPs
    on_train_batch_start    of the next batch: the numbers, for loggers, alerts and the report

A hook's switch is a bool, for which torch.compile makes two graphs. Each layer has tensors of its own, no rows of a
shared one: blocks that are compiled one by one then share these graphs, since nothing in them says which block it is.
"""

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.utils.rnn import pad_sequence

from lightning_lowbit._lightning import LightningModule, MisconfigurationException, Trainer, is_mid_step
from lightning_lowbit.callbacks.monitors.base import LooksAway, Monitor
from lightning_lowbit.callbacks.monitors.latent_weights import has_flat_weights
from lightning_lowbit.callbacks.monitors.outlier_alerts import of_channel, of_input, of_mlp
from lightning_lowbit.callbacks.monitors.quantization_alerts import Fault
from lightning_lowbit.checks import is_number
from lightning_lowbit.distributed import all_reduce_world_
from lightning_lowbit.metrics import swiglu_alignment
from lightning_lowbit.metrics.outliers import SUMS, activation_sums, kurtosis, outlier_share
from lightning_lowbit.nn import QuantizedLayer
from lightning_lowbit.nn.conversion.convert import select
from lightning_lowbit.nn.conversion.smooth_swiglu import swiglus
from lightning_lowbit.nn.keys import clean_name
from lightning_lowbit.nn.linear import is_linear
from lightning_lowbit.quant.statistics import wide_dtype
from lightning_lowbit.report.html import Section, Table, Text

_ENOUGH = 10  # measurements in the mean before any takes off, since activations grow fast in the beginning
_MEMORY = 50  # measurements that the mean reaches back, so that it follows slow growth
_NAMED = 3  # channels of an MLP that a warning names

_OF_LAYERS = ("activation_max", "kurtosis", "outliers")
_OF_MLPS = ("alignment", "gate_norm")


class _Input(NamedTuple):
    """What entered a layer in the step under way: ``SUMS``, and amaxes ``[in_features]``."""

    sums: Tensor
    channel_amax: Tensor


class _Measured(NamedTuple):
    """Of what the numbers of a step are, a row for each layer and then for each MLP."""

    step: int
    logger_step: int
    layers: list[str]
    mlps: list[str]


class OutlierMonitor(Monitor, LooksAway):
    """Logs how far outliers stand out in what enters linear layers, and warns before and when they take off.

    Of each layer's input in a step, as often as the logger takes it, over all its micro-batches and ranks:

    - ``activation_max``: the largest magnitude.
    - ``kurtosis``: 3 for normally distributed elements; heavy tails make it large (arXiv 2306.12929, section 3).
    - ``outliers``: share of elements beyond ``k`` times the root mean square, that of their forward pass on their rank.

    There are none of a layer that was not called in the step; the latter two are NaN where its input is not finite.

    Of each SwiGLU (see :class:`lightning_lowbit.nn.conversion.smooth_swiglu.SwiGLU`), after the optimizer step:

    - ``alignment``: largest ``|cos|`` between the rows of a channel in gate and up projection. As it nears 1, the
      channel begins to square one projection of its input (arXiv 2409.12517, theorem 1).
    - ``gate_norm``: largest norm of a row of the gate projection, which grows first (section 4.3 there).

    The metrics have names such as ``kurtosis/layers.3.mlp.up_proj`` and ``alignment/layers.3.mlp``. They go to the
    loggers themselves when the next batch begins, since Lightning takes a millisecond for each metric. What is logged
    as usual, for other callbacks to see, are the largest of all: ``activation_max``, ``kurtosis``, ``outliers``,
    ``alignment`` and ``gate_norm``.

    Alerts are said once for each kind and run, with the number of layers and the worst one, and again where they are
    much worse: four times as many layers, or as bad. They are listed by :class:`RunReport`: an input that is not
    finite; a channel that takes off, of the input or by its alignment. They name the channels.

    A step that is logged passes over each input twice. Other steps cost a Python call for each layer, or nothing where
    the model is compiled. Nothing waits for the device but for one copy of a few numbers in the batch after one that
    was logged. Of sharded weights (FSDP2, tensor parallelism) those of one MLP at a time are made whole.

    Args:
        layers: patterns of linear layers, see :func:`lightning_lowbit.convert`, whether they are quantized or not;
            None for those that are, or, if none is, for all.
        swiglu: whether to look at the weights of SwiGLUs; None: where there are any, and they are not flattened.
        k: above 0. LLM.int8() takes what is beyond 6 out of its GEMM (arXiv 2208.07339, section 3.2); in units of the
            root mean square that is beyond what normally distributed activations reach.
        alignment_limit: of ``|cos|``, in (0, 1], from which on to warn; None for never. Independent rows of 64 elements
            never reach 0.9 (chance 1e-22 for each channel), and what does is on its steep way to 1 (section 4.3 there).
        takeoff: how many times the running mean of a layer's largest magnitude a channel must reach for a warning,
            above 1; None for never. The mean is of 10 measurements or more, and reaches back some 50. A
            leap by ten is 3 of the 15 binades of E4M3.

    Raises:
        ValueError: an argument is out of range; or, when training starts, a pattern matches no layer.
        MisconfigurationException: when training starts: there is no linear layer; with ``swiglu=True``, no SwiGLU, or
            its weights are flattened by FSDP1 or ZeRO.

    Example:
        >>> Trainer(plugins=[FP8Precision()], callbacks=[OutlierMonitor(layers=["down_proj", "lm_head"])])
    """

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
        if not is_number(k) or not 0 < k < math.inf:
            raise ValueError(f"k is how many times the rms an outlier exceeds, above 0; got {k!r}.")
        if alignment_limit is not None and (not is_number(alignment_limit) or not 0 < alignment_limit <= 1):
            raise ValueError(f"alignment_limit is a |cos| above 0 and up to 1, or None; got {alignment_limit!r}.")
        if takeoff is not None and (not is_number(takeoff) or not 1 < takeoff < math.inf):
            raise ValueError(f"takeoff is how many times the mean is too much, above 1, or None; got {takeoff!r}.")
        self.layers, self.swiglu, self.k = layers, swiglu, float(k)
        self.alignment_limit, self.takeoff = alignment_limit, takeoff
        self._switch = [False]
        self._handles: list[Any] = []
        self._inputs: dict[str, _Input] = {}
        self._layers: dict[str, nn.Module] = {}
        self._mlps: dict[str, Any] = {}
        super().__init__()

    def _start_afresh(self) -> None:
        super()._start_afresh()
        self._means: dict[str, tuple[int, float]] = {}  # of layers' largest magnitudes: of how many, and the mean
        self._step = 0  # the last one that was logged, and what was seen
        self._rows: dict[str, dict[str, float]] = {}
        self._mlp_rows: dict[str, dict[str, float]] = {}

    # --- when ---

    @torch.no_grad()
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Finds the layers and hooks into them."""
        super().on_train_start(trainer, pl_module)
        self._let_go()
        self._layers, self._mlps = self._find_layers(pl_module), self._find_mlps(trainer, pl_module)
        device = trainer.strategy.root_device
        for name, layer in self._layers.items():
            sums = torch.zeros(len(SUMS), dtype=wide_dtype(device), device=device)
            self._inputs[name] = _Input(sums, torch.zeros(_in_features(layer), device=device, dtype=torch.float32))
            hook = _hook(self._switch, *self._inputs[name], self.k)
            self._handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Reads what was measured; switches hooks on where the step is logged."""
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        self._switch[0] = self._is_logged(trainer)

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Switches hooks off; measures and logs at the end of the step."""
        was_on, self._switch[0] = self._switch[0], False
        if was_on and not is_mid_step(trainer):
            self._measure(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reads the numbers of the last step, and removes the hooks."""
        super().on_train_end(trainer, pl_module)
        self._let_go()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Removes the hooks."""
        self._let_go()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Removes the hooks."""
        self._let_go()

    def _let_go(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._switch[0], self._handles, self._inputs, self._layers, self._mlps = False, [], {}, {}, {}

    @contextmanager
    def look_away(self) -> Generator[None, None, None]:
        """A context for passes that are not those of the training step."""
        was_on, self._switch[0] = self._switch[0], False
        try:
            yield
        finally:
            self._switch[0] = was_on

    # --- where ---

    def _find_layers(self, pl_module: LightningModule) -> dict[str, nn.Module]:
        modules = {clean_name(name): module for name, module in pl_module.named_modules()}
        found = {name: module for name, module in modules.items() if isinstance(module, nn.Linear) or is_linear(module)}
        if not found:
            raise MisconfigurationException(
                f"OutlierMonitor watches what enters linear layers, and {type(pl_module).__name__} holds none: leave "
                "it out. Layers that are created in configure_model must exist when training starts."
            )
        if self.layers is not None:
            chosen = select(list(found), self.layers, "layers")
            return {name: module for name, module in found.items() if name in chosen}
        return {name: module for name, module in found.items() if isinstance(module, QuantizedLayer)} or found

    def _find_mlps(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        if self.swiglu is False:
            return {}
        found = {clean_name(name): module for name, module in swiglus(pl_module).items()}
        is_flat = has_flat_weights(trainer) or any(
            hasattr(parameter, "ds_id") for parameter in pl_module.parameters()
        )  # ZeRO-3
        if self.swiglu and not found:
            raise MisconfigurationException(
                f"swiglu=True looks at SwiGLUs, and {type(pl_module).__name__} holds none: a module with linear layers "
                "gate_proj, up_proj and down_proj. Give your own MLPs properties of these names, or leave out swiglu."
            )
        if self.swiglu and is_flat:
            raise MisconfigurationException(
                f"swiglu=True needs the rows of weights, which {type(trainer.strategy).__name__} flattens and shards: "
                "leave it out, or train with DDP or ModelParallelStrategy (FSDP2)."
            )
        return {} if is_flat else found

    # --- what ---

    def _measure(self, trainer: Trainer, pl_module: LightningModule) -> None:
        sums = torch.stack([seen.sums for seen in self._inputs.values()])
        amaxes = pad_sequence([seen.channel_amax for seen in self._inputs.values()], batch_first=True)
        for seen in zip(*self._inputs.values(), strict=True):
            torch._foreach_zero_(seen)
        all_reduce_world_(sums)
        all_reduce_world_(amaxes, dist.ReduceOp.MAX)
        amax, channel = amaxes.max(1)
        # A maximum over ranks may lose a NaN, a sum keeps it.
        amax = torch.where(sums[:, SUMS.index("first")].isnan() | (sums[:, 0] == 0), torch.nan, amax)
        of_layers = torch.stack([amax, kurtosis(sums), outlier_share(sums), channel, sums[:, 0]], 1).float()
        of_mlps = [_aligned(mlp, self.alignment_limit) for mlp in self._mlps.values()]
        was_called = (sums[:, 0] > 0)[:, None]
        of_all = torch.where(was_called, of_layers, -math.inf).amax(0)  # what is not finite comes through
        of_all = torch.where(was_called.any(), of_all, torch.nan)
        largest = dict(zip(_OF_LAYERS, of_all, strict=False))
        if of_mlps:
            largest |= dict(zip(_OF_MLPS, torch.stack(of_mlps).amax(0), strict=False))
        self._log(pl_module, largest)
        what = _Measured(trainer.global_step, self._logger_step(trainer), list(self._inputs), list(self._mlps))
        self._keep(what, torch.cat([of_layers.flatten(), *(row.to(of_layers) for row in of_mlps)]))

    def _judge(self, what: _Measured, numbers: Sequence[float]) -> int:
        self._step, self._rows, self._mlp_rows = what.step, {}, {}
        width, start = len(_OF_LAYERS) + 2, len(what.layers) * (len(_OF_LAYERS) + 2)
        for index, layer in enumerate(what.layers):
            *values, channel, elements = numbers[index * width : (index + 1) * width]
            if elements:
                self._rows[layer] = dict(zip(_OF_LAYERS, values, strict=True))
                self._judge_layer(layer, values[0], int(channel))
        width = len(_OF_MLPS) + 1 + 2 * _NAMED
        for index, mlp in enumerate(what.mlps):
            row = numbers[start + index * width : start + (index + 1) * width]
            beyond, named = int(row[len(_OF_MLPS)]), row[len(_OF_MLPS) + 1 :]
            self._mlp_rows[mlp] = dict(zip(_OF_MLPS, row[: len(_OF_MLPS)], strict=True))
            if beyond and self.alignment_limit is not None:
                pairs = list(zip(named[:_NAMED], named[_NAMED:], strict=True))[:beyond]
                self._note(mlp, of_mlp(self._mlps.get(mlp), pairs, beyond, self.alignment_limit))
        rows = {**self._rows, **self._mlp_rows}
        self._write(
            {f"{metric}/{name}": n for name, row in rows.items() for metric, n in row.items()}, what.logger_step
        )
        return what.step

    def _judge_layer(self, layer: str, amax: float, channel: int) -> None:
        module = self._layers.get(layer)
        if not math.isfinite(amax):
            self._note(layer, of_input(module))
            return
        count, mean = self._means.get(layer, (0, 0.0))
        if self.takeoff is not None and count >= _ENOUGH and amax > self.takeoff * mean > 0:
            self._note(layer, of_channel(module, channel, amax, mean, self.takeoff))
        count = min(count + 1, _MEMORY)
        self._means[layer] = count, mean + (amax - mean) / count

    def _note(self, subject: str, fault: Fault) -> None:
        self._alerts.note(subject, *fault)

    # --- what is left of it ---

    def state_dict(self) -> dict[str, Any]:
        """The running means, and what was said."""
        self._read()
        means = {layer: {"count": count, "mean": mean} for layer, (count, mean) in self._means.items()}
        return {"means": means, "alerts": self._alerts.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on with it."""
        self._means = {layer: (known["count"], known["mean"]) for layer, known in state_dict["means"].items()}
        self._alerts.load_state_dict(state_dict["alerts"])

    def report_data(self, trainer: Trainer) -> dict[str, Any]:
        """The numbers of the last step that was logged, and all alerts."""
        self._read()
        found = {"step": self._step, "layers": self._rows, "mlps": self._mlp_rows, "alerts": self._alerts.texts()}
        return {"outliers": found}

    def report_sections(self, trainer: Trainer) -> list[Section]:
        """The same as tables."""
        self._read()
        at = f"At step {self._step}, the last one that was logged"
        caption = f"{at}; outliers: share of elements beyond {self.k:g} times the rms."
        blocks: list[Table | Text] = [Text("No step with linear layers was logged.")]
        if self._rows:
            blocks = [self._table("layer", ["largest", "kurtosis", "outliers"], self._rows, caption)]
        if self._mlp_rows:
            caption = f"{at}; largest |cos| between rows of gate and up projection, largest norm of a row of the gate."
            blocks.append(self._table("MLP", ["alignment", "gate norm"], self._mlp_rows, caption))
        return [Section("Outliers", blocks)]

    def _table(self, of: str, names: list[str], found: Mapping[str, Mapping[str, float]], caption: str) -> Table:
        rows = [
            [name, *(f"{number:.3g}" for number in numbers.values()), ", ".join(self._alerts.kinds(name))]
            for name, numbers in found.items()
        ]
        return Table([of, *names, "alerts"], rows, caption)


def _hook(switch: list[bool], sums: Tensor, channel_amax: Tensor, k: float) -> Callable[..., None]:
    """A forward pre-hook that adds what enters a layer to its sums, while it is switched on."""

    def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if switch[0]:
            with torch.no_grad():
                x = (*args, *kwargs.values())[0].detach()
                x, start = _local(x) if isinstance(x, DTensor) else (x, 0)
                more, amax = activation_sums(x, k)
                sums.add_(more.to(sums.device))
                into = channel_amax[start : start + len(amax)]
                into.copy_(torch.maximum(into, amax.to(sums.device)))

    return note


def _local(x: DTensor) -> tuple[Tensor, int]:
    """What of an activation lies on this rank, and the first of its channels."""
    _, offset = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)
    return x.to_local(), offset[-1]


def _in_features(layer: Any) -> int:
    return layer.in_features if isinstance(layer, nn.Linear) else layer.weight.shape[0]


def _aligned(mlp: Any, limit: float | None) -> Tensor:
    """Largest cosine and gate norm, how many cosines are beyond the limit, and channels and cosines of the largest."""
    gate, up = (_whole(layer) for layer in (mlp.gate_proj, mlp.up_proj))
    found = swiglu_alignment(gate, up)
    beyond = (found.cosine > (math.inf if limit is None else limit)).sum()
    cosines, channels = found.cosine.topk(min(_NAMED, len(found.cosine)))
    named = [F.pad(values.float(), (0, _NAMED - len(values))) for values in (channels, cosines)]
    return torch.cat([torch.stack([found.cosine.max(), found.gate_norm.max(), beyond.float()]), *named])


def _whole(layer: Any) -> Tensor:
    """The weight ``[out_features, in_features]``, gathered where it is sharded."""
    weight = layer.weight.full_tensor() if isinstance(layer.weight, DTensor) else layer.weight
    return weight if isinstance(layer, nn.Linear) else weight.t()
