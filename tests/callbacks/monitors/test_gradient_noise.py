"""The ratio is that of the gradient to its noise, and a run that is measured is the run that is not."""

import json
import math
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_lowbit import (
    Cast,
    FP8Precision,
    GradientNoiseMonitor,
    LinearCasts,
    LossScaleMonitor,
    LowBitPrecision,
    PrecisionSummary,
    PrecisionSwitch,
    QuantizationMonitor,
    RunReport,
    StaticGradScaler,
    convert,
)
from lightning_lowbit.nn import LayerKeys
from lightning_lowbit.report.html import Chart, Text
from tests.callbacks.monitors.device_reads import counted
from tests.callbacks.monitors.ranks_gradient_noise import ASKED, E2M1, RANKS, RUNS, STEPS, STOCHASTIC, train
from tests.launch import launch
from tests.lightnings import (
    BoringModel,
    Callback,
    DeepSpeedStrategy,
    LightningCLI,
    LightningModule,
    MisconfigurationException,
    TensorBoardLogger,
    Trainer,
)

NEAREST = LinearCasts(**dict.fromkeys(("fprop_x", "fprop_w", "dgrad_g", "wgrad_g"), Cast(**E2M1)))
NOISY = LinearCasts(wgrad_g=STOCHASTIC, dgrad_w=STOCHASTIC)
METRIC = "gradient_noise/ratio"


class Model(LightningModule):
    """Two layers, and the same batch all the time unless there are several.

    Attributes:
        calls: how often ``training_step`` was called in each optimizer step; no list of the module itself.
    """

    def __init__(self, lr: float = 0.0, batches: int = 1) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
            self.data = torch.randn(batches, 48, 32)
        self.lr = lr
        self.calls = (calls := dict[int, int]()).items()  # a view, so that no draw takes it back
        self.count = lambda: calls.__setitem__(
            self.trainer.global_step + 1, calls.get(self.trainer.global_step + 1, 0) + 1
        )

    def loss(self, x: Tensor) -> Tensor:
        return (self.net(x).float() - x.roll(1, 1)).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.count()
        return self.loss(batch)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.data.repeat(40, 1, 1), batch_size=None)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def trainer(casts: LinearCasts | LowBitPrecision, *callbacks: Callback, **kwargs: Any) -> Trainer:
    plugin = casts if isinstance(casts, LowBitPrecision) else LowBitPrecision(casts, compute_dtype="fp32", seed=2)
    defaults = {
        "max_steps": 6,
        "log_every_n_steps": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(accelerator="cpu", plugins=[plugin], callbacks=list(callbacks), **{**defaults, **kwargs})


def fit(model: LightningModule, monitor: Callback, casts: Any = NOISY, **kwargs: Any) -> Trainer:
    torch.manual_seed(11)
    run = trainer(casts, monitor, **kwargs)
    run.fit(model)
    return run


def ratios(monitor: GradientNoiseMonitor) -> list[float]:
    return [ratio for _, ratio in monitor.measurements(METRIC)]


def logged(run: Trainer) -> dict[str, dict[int, float]]:
    """What the event file holds, by optimizer step (Lightning numbers the first one 0)."""
    assert run.logger is not None
    run.logger.finalize("success")
    events = EventAccumulator(run.logger.log_dir).Reload()
    return {tag: {event.step + 1: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


# --- the ratio --------------------------------------------------------------------------------------------------------


def test_the_ratio_is_that_of_many_draws() -> None:
    """σ and ‖∇L‖ from 200 draws, against 20 measurements; of some 4000 elements each scatters by less than 1 %."""
    model = Model()
    net, x = convert(Model(), NOISY).net, model.data[0]
    keys, gradients = LayerKeys(net, seed=9), []
    for step in range(200):
        keys.fill_(step)
        loss = (net(x) - x.roll(1, 1)).square().mean()
        gradients.append([*torch.autograd.grad(loss, [net[0].weight, net[2].weight])])
    expected = {}
    for name, layers in (("", (0, 1)), ("/net.0", (0,)), ("/net.2", (1,))):
        drawn = torch.stack([torch.cat([pair[i].flatten() for i in layers]) for pair in gradients]).double()
        variance = drawn.var(0).sum()
        signal = drawn.mean(0).square().sum() - variance / len(drawn)  # the mean has noise of its own
        expected[METRIC + name] = float((signal / variance).sqrt())
    monitor = GradientNoiseMonitor(1, average=20, layers=["net.*"])
    run = fit(model, monitor, max_steps=20)
    found = {name: float(value) for name, value in run.callback_metrics.items()}
    assert found == pytest.approx(expected, rel=0.03)
    assert ratios(monitor)[-1] == found[METRIC]


def test_averaged_over_the_last_measurements() -> None:
    single, averaged = GradientNoiseMonitor(1, average=1), GradientNoiseMonitor(1, average=3)
    for monitor in (single, averaged):
        fit(Model(0.1, 8), monitor)
    state = single.state_dict()
    assert len(state["window"]) == 1
    rows = averaged.state_dict()["window"]
    assert len(rows) == 3
    noise, signal = (sum(row["sums"][0][i] for row in rows) for i in (0, 1))
    assert ratios(averaged)[-1] == pytest.approx(math.sqrt(signal / noise), rel=1e-6)
    assert ratios(averaged)[0] == ratios(single)[0] != ratios(averaged)[1]


@pytest.mark.parametrize("kind", ["draws", "layers"])
def test_not_averaged_over_a_switch(kind: str) -> None:
    """In finetuning nothing is rounded stochastically; back in training the window is that of other weights."""
    monitor, single = GradientNoiseMonitor(1, kind, average=5), GradientNoiseMonitor(1, kind, average=1)
    for one in (monitor, single):
        switches = [PrecisionSwitch("qaf", step=3), PrecisionSwitch("fqt", step=6)]
        trainer(NOISY.replace(fprop_w=Cast(**E2M1)), *switches, one, max_steps=8).fit(Model(0.1, 8))
        assert [ratio == math.inf for ratio in ratios(one)] == [False] * 3 + [True] * 3 + [False] * 2
    assert ratios(monitor)[6] == ratios(single)[6]
    assert ratios(monitor)[7] != ratios(single)[7], "the window did not fill again"


@pytest.mark.parametrize("change", ["casts", "blend", "phase"])
def test_not_averaged_over_a_change_of_precision(change: str) -> None:
    class Changes(Callback):
        def on_train_batch_start(self, run: Trainer, *_: Any) -> None:
            plugin: Any = run.precision_plugin
            if run.global_step in (3, 5):  # the second time it is no change
                {
                    "casts": lambda: plugin.set_casts({"net.2": NOISY.replace(dgrad_w=None)}),
                    "blend": lambda: plugin.set_blend(0.1 * run.global_step),
                    "phase": lambda: plugin.set_phase("hp-forward"),
                }[change]()

    monitor, lengths = GradientNoiseMonitor(1), list[int]()

    class Look(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            lengths.append(len(monitor.state_dict()["window"]))

    trainer(NOISY, Changes(), monitor, Look()).fit(Model())
    assert lengths == [1, 2, 3, 1, 2, 3]


@pytest.mark.parametrize("micro", [1, 2])
def test_accumulation_draws_of_the_last_micro_batch(micro: int) -> None:
    """The same gradient, so that the ratio has to be the same, too, but for other bits."""
    monitor, model = GradientNoiseMonitor(2, average=3), Model()
    fit(model, monitor, accumulate_grad_batches=micro)
    assert dict(model.calls) == dict.fromkeys(range(1, 7), micro), "a training step ran again"
    other = GradientNoiseMonitor(2, average=3)
    fit(Model(), other)
    assert ratios(monitor)[-1] == pytest.approx(ratios(other)[-1], rel=0.1)


def test_the_last_batch_of_an_epoch_steps_alone() -> None:
    monitor, model = GradientNoiseMonitor(1, average=1), Model()
    fit(model, monitor, accumulate_grad_batches=2, limit_train_batches=3, max_steps=4)
    assert [step for step, _ in monitor.measurements()] == [1, 2, 3, 4]


@pytest.mark.parametrize("optimizer", ["sgd", "lbfgs"])
def test_one_measurement_in_a_step(optimizer: str) -> None:
    """LBFGS computes losses several times."""

    class Chosen(Model):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return (
                torch.optim.LBFGS(self.parameters(), max_iter=3)
                if optimizer == "lbfgs"
                else super().configure_optimizers()
            )

    monitor = GradientNoiseMonitor(2)
    fit(Chosen(), monitor)
    assert [step for step, _ in monitor.measurements()] == [2, 4, 6]


def test_a_backward_pass_of_the_modules_own_is_not_compared() -> None:
    """Draws are gradients of the loss, whatever it makes of that."""

    class Doubles(Model):
        def backward(self, loss: Tensor) -> None:
            (2 * loss).backward()

    monitor, model = GradientNoiseMonitor(1), Doubles()
    fit(model, monitor, NEAREST)
    assert set(ratios(monitor)) == {math.inf}


def test_a_layer_without_a_gradient_in_both_draws_counts_for_nothing() -> None:
    class Unused(Model):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(32, 32)

    monitor = GradientNoiseMonitor(1, layers=["unused"])
    run = fit(Unused(), monitor)
    assert 0 < ratios(monitor)[-1] < math.inf
    assert run.callback_metrics[f"{METRIC}/unused"] == math.inf


def test_weights_that_are_shared_or_frozen() -> None:
    class Shared(Model):
        def __init__(self, frozen: bool = False) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32))
            self.net[2].weight = self.net[0].weight
            self.net.requires_grad_(not frozen)
            self.bias = nn.Parameter(torch.zeros(32))

        def loss(self, x: Tensor) -> Tensor:
            return super().loss(x + self.bias)

    monitor = GradientNoiseMonitor(1, layers=["net.*"])
    run = fit(Shared(), monitor)
    assert set(run.callback_metrics) == {METRIC, f"{METRIC}/net.0", f"{METRIC}/net.1"}
    monitor = GradientNoiseMonitor(1)
    run = fit(model := Shared(frozen=True), monitor)
    assert ratios(monitor) == []
    assert not run.callback_metrics
    assert set(dict(model.calls).values()) == {1}, "a draw for nothing"


def test_nothing_quantized_nothing_measured() -> None:
    monitor, model = GradientNoiseMonitor(1), Model()
    run = trainer(NOISY, monitor, PrecisionSwitch("bf16", step=2), PrecisionSwitch("fqt", step=4))
    run.fit(model)
    assert [step for step, _ in monitor.measurements()] == [1, 2, 5, 6]


# --- layers -----------------------------------------------------------------------------------------------------------


class ByHand(Callback):
    """Of each step, by layer: Σ (dW - dW')² and Σ dW'², of the last backward pass, from what hooks saw and `.grad`.

    Attributes:
        rows: of each step; once for all layers, by ``""``.
    """

    def __init__(self) -> None:
        self.rows: list[dict[str, tuple[float, float]]] = []
        self._before: dict[str, Tensor] = {}
        self._exact: dict[str, Tensor] = {}

    def on_train_start(self, run: Trainer, module: LightningModule) -> None:
        for name in ("net.0", "net.2"):
            layer = module.get_submodule(name)

            def look(layer: Any, inputs: tuple[Tensor], y: Tensor, name: str = name) -> None:
                (x,) = inputs
                dtype = y.dtype  # what autocast computes in

                def gradient(g: Tensor) -> None:
                    exact = g.to(dtype).double().flatten(0, -2).t() @ x.to(dtype).double().flatten(0, -2)
                    self._exact[name] = exact.detach()
                    grad = layer.weight.grad
                    self._before[name] = torch.zeros_like(exact) if grad is None else grad.double().clone()

                y.register_hook(gradient)

            layer.register_forward_hook(look)

    def on_after_backward(self, run: Trainer, module: LightningModule) -> None:
        if run.fit_loop._should_accumulate():
            return
        found = {}
        for name, exact in self._exact.items():
            dw = module.get_submodule(name).weight.grad.double() - self._before[name]  # type: ignore[union-attr, operator]
            found[name] = (float((dw - exact).square().sum()), float(exact.square().sum()))
        found[""] = tuple(map(sum, zip(*found.values(), strict=True)))  # type: ignore[assignment]
        self.rows.append(found)

    def ratio(self, steps: slice, name: str = "") -> float:
        noise, signal = (sum(row[name][i] for row in self.rows[steps]) for i in (0, 1))
        return math.sqrt(signal / noise) if noise else math.inf


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("preset", ["nvfp4", "nvfp4-nvidia", "ternary", "fp8-delayed"])
def test_layers_by_hand(preset: str, micro: int) -> None:
    """The norm of dW' over that of dW - dW', of the last micro-batch, averaged; all layers weigh as their elements."""
    monitor, hand = GradientNoiseMonitor(2, kind="layers", average=2, layers=["net.*"]), ByHand()
    torch.manual_seed(1)
    plugin = LowBitPrecision(preset, compute_dtype="fp32", seed=2)
    run = trainer(plugin, monitor, hand, accumulate_grad_batches=micro)
    run.fit(model := Model(0.1, 4))
    expected = [hand.ratio(slice(1, 2)), hand.ratio(slice(1, 4, 2)), hand.ratio(slice(3, 6, 2))]
    assert [step for step, _ in monitor.measurements()] == [2, 4, 6]
    assert ratios(monitor) == pytest.approx(expected, rel=1e-4)
    assert all(ratio < 1e3 for ratio in expected)
    found = {name: float(value) for name, value in run.callback_metrics.items()}
    wanted = {f"{METRIC}/{name}": hand.ratio(slice(3, 6, 2), name) for name in ("net.0", "net.2")}
    assert found == pytest.approx({METRIC: expected[-1], **wanted}, rel=1e-4)
    assert dict(model.calls) == dict.fromkeys(range(1, 7), micro), "no step runs twice"


def test_layers_in_the_phase_of_finetuning_have_no_noise() -> None:
    monitor = GradientNoiseMonitor(1, kind="layers", average=1)
    plugin = LowBitPrecision("nvfp4", compute_dtype="bf16", seed=2)
    run = trainer(plugin, monitor, PrecisionSwitch("qaf", step=3), PrecisionSwitch("bf16", step=5))
    run.fit(Model(0.1))
    assert [step for step, _ in monitor.measurements()] == [1, 2, 3, 4, 5]
    assert [ratio == math.inf for ratio in ratios(monitor)] == [False] * 3 + [True] * 2
    (chart, text) = monitor.report_sections(run)[0].blocks
    assert isinstance(chart, Chart)
    monitor = GradientNoiseMonitor(1, kind="layers")
    run = trainer(LinearCasts(fprop_w=Cast(**E2M1)), monitor)
    run.fit(Model())
    (text,) = monitor.report_sections(run)[0].blocks
    assert isinstance(text, Text)
    assert "none of their operands was quantized" in text.text


def test_layers_that_are_frozen_are_left_out() -> None:
    model = Model()
    model.net[0].weight.requires_grad_(False)
    monitor, hand = GradientNoiseMonitor(1, kind="layers", layers=["net.*"]), GradientNoiseMonitor(1, kind="layers")
    run = fit(model, monitor)
    assert set(run.callback_metrics) == {METRIC, f"{METRIC}/net.2"}
    model.net.requires_grad_(False)
    model.bias = nn.Parameter(torch.zeros(()))
    model.loss = lambda x: Model.loss(model, x + model.bias)  # type: ignore[method-assign, operator]
    fit(model, hand)
    assert ratios(hand) == []


def test_layers_are_asked_in_measured_steps_only() -> None:
    class Look(Callback):
        def on_before_backward(self, run: Trainer, module: Any, loss: Tensor) -> None:
            asked.append(all(layer.gradient_sums is not None for layer in (module.net[0], module.net[2])))

        def on_train_batch_end(self, run: Trainer, module: Any, *_: Any) -> None:
            assert "gradient_sums" not in vars(module.net[0])

    class Fails(Model):
        def on_before_backward(self, loss: Tensor) -> None:
            if self.trainer.global_step == 5:
                raise RuntimeError("of the step's own")

    asked: list[bool] = []
    run = trainer(NOISY, GradientNoiseMonitor(3, kind="layers"), Look(), accumulate_grad_batches=2)
    with pytest.raises(RuntimeError, match="of the step's own"):
        run.fit(model := Fails())
    # Micro-batches of steps 1 to 5, and the first one of the sixth, which failed.
    assert asked == [False, False, False, False, False, True, *[False] * 4, False]
    assert "gradient_sums" not in vars(model.net[0])


def test_a_step_of_layers_that_fails() -> None:
    class Fails(Model):
        def on_before_backward(self, loss: Tensor) -> None:
            assert self.net[0].gradient_sums is not None
            raise RuntimeError("of the step's own")

    with pytest.raises(RuntimeError, match="of the step's own"):
        trainer(NOISY, GradientNoiseMonitor(1, kind="layers")).fit(model := Fails())
    assert "gradient_sums" not in vars(model.net[0])


@pytest.mark.slow
def test_compiled_layers_measure_the_same_and_compile_twice() -> None:
    """With and without rows; not once for each measurement."""

    class Plain(Model):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return self.loss(batch)

    found, graphs = [], []
    for is_compiled in (False, True):
        torch._dynamo.reset()
        model, monitor = Plain(0.1, 4), GradientNoiseMonitor(2, kind="layers", layers=["net.*"])
        counter = CompileCounterWithBackend("aot_eager")
        compiles: Any = torch.compile(model, backend=counter) if is_compiled else model

        class Look(Callback):
            def on_train_batch_end(self, *_: Any) -> None:
                graphs.append(counter.frame_count)  # noqa: B023

        torch.manual_seed(1)
        run = trainer(LowBitPrecision("nvfp4", compute_dtype="fp32", seed=2), monitor, Look(), max_steps=8)
        run.fit(compiles)
        values = {name: float(value) for name, value in run.callback_metrics.items()}
        found.append((ratios(monitor), values, model.state_dict()))
    torch._dynamo.reset()
    eager, compiled = found
    assert compiled[0] == pytest.approx(eager[0], rel=1e-6)
    assert compiled[1] == pytest.approx(eager[1], rel=1e-6)
    assert_equal(compiled[2], eager[2])
    once = graphs[8]
    assert once > 0
    assert graphs == [0] * 8 + [once] + [2 * once] * 7


def test_layers_do_not_mind_an_iterator() -> None:
    class Iterates(Model):
        def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
            return self.loss(next(dataloader_iter)[0])

    monitor = GradientNoiseMonitor(1, kind="layers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning warns of it
        fit(Iterates(), monitor, max_steps=3)
    assert [step for step, _ in monitor.measurements()] == [1, 2, 3]


# --- fp16 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["draws", "layers"])
def test_the_ratio_does_not_depend_on_the_scale_of_the_loss(kind: str) -> None:
    """The backward pass computes in fp16, where powers of two change no digit; nor do scales that change on the way."""

    class Grows(Callback):
        def on_train_batch_end(self, run: Trainer, *_: Any) -> None:
            run.precision_plugin.scaler._scale.mul_(2)  # type: ignore[union-attr]

    found = []
    for scale, others in ((2.0**4, ()), (2.0**9, ()), (2.0**5, (Grows(),))):
        monitor = GradientNoiseMonitor(1, kind)
        plugin = LowBitPrecision(NOISY, compute_dtype="fp16", scaler=StaticGradScaler(scale, device="cpu"), seed=2)
        torch.manual_seed(1)
        trainer(plugin, monitor, *others).fit(Model(0.01))
        found.append(ratios(monitor))
    assert len(found[0]) == 6
    rel = 0 if kind == "draws" else 1e-4  # dW' is rounded to fp16, below its smallest normal number too
    assert found[1] == pytest.approx(found[0], rel=rel)
    assert found[2] == pytest.approx(found[0], rel=rel)


@pytest.mark.parametrize("kind", ["draws", "layers"])
def test_an_overflow_is_no_measurement(kind: str) -> None:
    monitor = GradientNoiseMonitor(1, kind, average=2)
    plugin = LowBitPrecision(NOISY, compute_dtype="fp16", scaler=torch.amp.GradScaler("cpu", 2.0**24), seed=2)
    run = trainer(plugin, monitor, max_steps=16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run.fit(Model(0.01))
    skipped = int(plugin.skipped_steps)
    assert 0 < skipped < 14
    assert [step for step, _ in monitor.measurements()] == list(range(skipped + 1, 17))
    assert all(0 < ratio < math.inf for ratio in ratios(monitor))
    torch.save(monitor.state_dict(), "state.pt")
    assert torch.load("state.pt", weights_only=True)["measurements"] == monitor.measurements()


# --- without a trace --------------------------------------------------------------------------------------------------


class Stateful(Model):
    """Its loss depends on everything that a step may leave behind, and it leaves much."""

    def __init__(self) -> None:
        super().__init__(0.05, 4)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            self.net = nn.Sequential(
                nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Dropout(0.2), nn.GELU(), nn.Linear(64, 32)
            )
        self.error = torchmetrics.MeanMetric()
        self.losses: list[float] = []
        self.steps_seen = 0
        self.generator = torch.Generator().manual_seed(3)
        self.running = torch.zeros(())
        self.register_buffer("power", torch.ones(32))
        self.register_buffer("replaced", torch.zeros(1))
        self.register_buffer("expanded", torch.ones(1).expand(3), persistent=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        assert isinstance(batch, Tensor)
        batch += 0.1 * torch.randn(batch.shape, generator=self.generator)  # in place
        batch *= 1 + 0.1 * random.random() + 0.1 * np.random.rand() + 0.1 * torch.rand(())
        self.power.mul_(0.9).add_(0.1 * self.net[0].weight.detach().norm(dim=0))
        self.replaced = self.replaced + 1
        loss = self.loss(batch * self.power) * (1 + 0.1 * self.steps_seen + 0.1 * self.running)
        loss = loss * (1 + 0.01 * self.replaced.sum() + 0.01 * len(self.losses))
        self.running.mul_(0.5).add_(loss.detach())
        self.steps_seen += 1
        self.losses.append(float(loss.detach()))
        self.late = self.steps_seen
        self.error(loss.detach())
        self.log("error", self.error, on_step=True, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log_dict({"sum": loss.detach()}, on_step=False, on_epoch=True, reduce_fx="sum")
        if self.logger is not None:
            self.logger.experiment.add_scalar("by hand", loss.detach(), self.steps_seen)
            self.logger.log_metrics({"by logger": float(loss.detach())}, step=self.steps_seen)
        return {"loss": loss, "more": batch}

    def on_before_backward(self, loss: Tensor) -> None:
        """Between the step and the measurement."""
        self.between = float(torch.rand(())) + random.random() + np.random.rand()


def left_behind(model: Stateful, run: Trainer) -> dict[str, Any]:
    """Everything."""
    plugin: Any = run.precision_plugin
    found = {
        **model.state_dict(),
        "error": model.error.metric_state,
        "updates": model.error._update_count,
        "losses": list(model.losses),
        "steps": [model.steps_seen, model.late],
        "generator": model.generator.get_state(),
        "running": model.running,
        "random": [random.getstate(), str(np.random.get_state()), torch.get_rng_state()],
        "plugin": [plugin.step, plugin.micro_batch],
        "metrics": {name: value for name, value in run.callback_metrics.items() if not name.startswith("gradient")},
    }
    if plugin.histories:
        found |= plugin.histories.state_dict()
    return found


def assert_equal(found: Any, wanted: Any, where: str = "") -> None:
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), where
        for name in wanted:
            assert_equal(found[name], wanted[name], f"{where}/{name}")
    elif isinstance(wanted, list | tuple):
        for index, pair in enumerate(zip(found, wanted, strict=True)):
            assert_equal(*pair, f"{where}/{index}")
    else:
        same = torch.equal(found, wanted) if isinstance(wanted, Tensor) else found == wanted
        assert same, f"{where} is {found}, without the monitor {wanted}"


PLUGINS: dict[str, Callable[[], LowBitPrecision]] = {
    "nvfp4": lambda: LowBitPrecision("nvfp4", seed=2),
    "delayed": lambda: FP8Precision("delayed", compute_dtype="fp32", seed=2),
    "fp16": lambda: LowBitPrecision("nvfp4", compute_dtype="fp16", seed=2),
    "nearest": lambda: LowBitPrecision(NEAREST, seed=2),
}


@pytest.mark.pairwise
@pytest.mark.parametrize(
    ("plugin", "micro", "kind"),
    [
        *((plugin, micro, "draws") for plugin in PLUGINS for micro in (1, 2)),
        *((plugin, 2, "layers") for plugin in PLUGINS),
    ],
)
def test_a_run_that_is_measured_is_the_run_that_is_not(plugin: str, micro: int, kind: str) -> None:
    """And where rounding draws nothing, a further draw is the training step to the bit: all states were put back."""
    found, make = [], PLUGINS[plugin]
    for monitor in (GradientNoiseMonitor(2, kind), Callback()):
        random.seed(1)
        np.random.seed(1)
        model = Stateful()
        run = fit(model, monitor, make(), logger=TensorBoardLogger("."), accumulate_grad_batches=micro)
        curves = {name: curve for name, curve in logged(run).items() if not name.startswith("gradient")}
        found.append({**left_behind(model, run), "curves": curves})
        if isinstance(monitor, GradientNoiseMonitor):
            assert [step for step, _ in monitor.measurements()] == [2, 4, 6]
            noisy = kind == "layers" or plugin in ("nvfp4", "fp16")
            assert all((ratio < 1e3) == noisy and (ratio == math.inf) != noisy for ratio in ratios(monitor))
    assert_equal(*found)
    assert len(found[0]["losses"]) == 6 * micro
    assert {"loss_step", "sum", "by hand", "by logger"} <= found[0]["curves"].keys() | {"sum"}


def test_gradients_and_buffers_stay_the_same_objects() -> None:
    class Look(GradientNoiseMonitor):
        def on_after_backward(self, run: Trainer, module: LightningModule) -> None:
            def objects() -> list[Any]:
                gradients = [(id(p.grad), p.grad._version) for p in module.parameters()]  # type: ignore[union-attr]
                return [*gradients, *map(id, module.buffers()), module.training, set(vars(module))]

            before = objects()
            hooks = [p.register_post_accumulate_grad_hook(lambda _: touched.append(1)) for p in module.parameters()]
            super().on_after_backward(run, module)
            for hook in hooks:
                hook.remove()
            seen.append(objects() == before)

    seen: list[bool] = []
    touched: list[int] = []
    fit(Stateful(), Look(1))
    assert seen == [True] * 6
    assert not touched, "hooks on what accumulates gradients belong to others"


class Checkpointed(Model):
    reentrant = False

    def loss(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.net[0], x.requires_grad_(), use_reentrant=self.reentrant)
        y = checkpoint(nn.Sequential(nn.Dropout(0.1), self.net[2]), hidden, use_reentrant=self.reentrant)
        return (y.float() - x.roll(1, 1)).square().mean()


@pytest.mark.parametrize("casts", [NEAREST, NOISY], ids=["nearest", "noisy"])
def test_activation_checkpointing(casts: LinearCasts) -> None:
    monitor = GradientNoiseMonitor(1)
    fit(Checkpointed(), monitor, LowBitPrecision(casts, seed=2))
    assert len(ratios(monitor)) == 6
    assert all((ratio == math.inf) == (casts is NEAREST) for ratio in ratios(monitor))


def test_a_backward_pass_runs_outside_of_autocast() -> None:
    """As in training, where a product of float32 stays one."""

    class Wide(Model):
        def loss(self, x: Tensor) -> Tensor:
            y = self.net(x).float()
            with torch.autocast("cpu", enabled=False):
                return (y @ self.data[0].t()).square().mean()

    monitor = GradientNoiseMonitor(1)
    fit(Wide(), monitor, LowBitPrecision(NEAREST, seed=2), max_steps=2)
    assert ratios(monitor) == [math.inf] * 2


def test_reentrant_checkpointing_is_refused() -> None:
    model = Checkpointed()
    model.reentrant = True
    with pytest.raises(MisconfigurationException, match="use_reentrant=False"):
        fit(model, GradientNoiseMonitor(1))


@pytest.mark.slow
@pytest.mark.parametrize("casts", [NEAREST, NOISY], ids=["nearest", "noisy"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_module(casts: LinearCasts, backend: str) -> None:
    """Its graphs run backward three times."""

    class Random(Model):
        def __init__(self) -> None:
            super().__init__(0.1)
            self.net = nn.Sequential(self.net[0], nn.BatchNorm1d(64), nn.Dropout(0.2), self.net[2])

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return self.loss(batch)

    found = []
    for monitor in (GradientNoiseMonitor(1), Callback()):
        torch._dynamo.reset()
        model = Random()
        torch.manual_seed(3)
        compiled: Any = torch.compile(model, backend=backend)
        trainer(LowBitPrecision(casts, seed=2), monitor, max_steps=3).fit(compiled)
        found.append(model.state_dict())
        if isinstance(monitor, GradientNoiseMonitor):
            assert len(ratios(monitor)) == 3
            assert all((ratio == math.inf) == (casts is NEAREST) for ratio in ratios(monitor))
    assert_equal(*found)
    assert torch._functorch.config.donated_buffer, "it is switched off"
    torch._dynamo.reset()


@pytest.mark.parametrize("recompute", [False, True])
def test_other_callbacks_do_not_see_draws(recompute: bool) -> None:
    """Neither what layers measure of their operands, nor FLOPs."""
    found = []
    for monitors in ([GradientNoiseMonitor(1)], []):
        torch.manual_seed(11)  # of dropout
        summary = PrecisionSummary(quiet=True)
        run = trainer(LowBitPrecision("fp8-delayed", seed=2), summary, QuantizationMonitor(), *monitors)
        run.fit(Checkpointed(0.1) if recompute else Model(0.1))
        metrics = {name: float(value) for name, value in run.callback_metrics.items() if "gradient_noise" not in name}
        found.append((metrics, summary.coverage().flops, summary.counter.recomputed))  # type: ignore[union-attr]
    assert found[0] == found[1]
    assert found[0][0]


@pytest.mark.parametrize(
    ("kind", "micro", "message"),
    [
        (FullyShardedDataParallel, 1, "frees the weights in it after the first: use kind='layers'"),
        (FSDPModule, 2, "use kind='layers', or accumulate_grad_batches=1"),
    ],
)
def test_strategies_that_are_refused(kind: Any, micro: int, message: str) -> None:
    run, part = trainer(NOISY, accumulate_grad_batches=micro), object.__new__(kind)  # of processes alone
    run.strategy._model = SimpleNamespace(modules=lambda: [part])  # type: ignore[assignment]
    with pytest.raises(MisconfigurationException, match=message):
        GradientNoiseMonitor()._source.check(run, Model())


@pytest.mark.parametrize("casts", [{"fprop_x": STOCHASTIC}, {"hadamard": {"fprop": {"size": 16, "signs": "keyed"}}}])
def test_random_bits_of_the_forward_pass_are_refused(casts: Any) -> None:
    with pytest.raises(MisconfigurationException, match="forward pass of net.0 has some, too.*use kind='layers'"):
        fit(
            Model(),
            GradientNoiseMonitor(1),
            LinearCasts.of({"fprop_w": Cast(**E2M1), "fprop_x": Cast(**E2M1), **casts}),
        )
    fit(Model(), GradientNoiseMonitor(1, kind="layers"), NOISY.replace(fprop_x=STOCHASTIC))


# --- strategies -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return launch("tests.callbacks.monitors.ranks_gradient_noise", RANKS, tmp_path_factory.mktemp("noisy"))


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run[0]}, {run[1]}, {run[2]} micro-batches")
class TestTwoProcesses:
    def test_measure_the_same(self, run: Any, results: list[dict[Any, Any]]) -> None:
        first, second = (result[*run, True] for result in results)
        assert [step for step, _ in first["measurements"]] == list(range(1, STEPS + 1))
        assert first["measurements"] == second["measurements"]
        assert first["layers"] == second["layers"]
        assert len(first["layers"]) == 4
        noisy = [ratio < 1e3 for _, ratio in first["measurements"]]
        assert noisy == [run[1] != "nearest"] * STEPS

    def test_and_change_nothing(self, run: Any, results: list[dict[Any, Any]]) -> None:
        for rank, result in enumerate(results):
            with_it, without = result[*run, True], result[*run, False]
            assert with_it["same gradients"] == [True] * STEPS, f"rank {rank}"
            assert without["measurements"] == []
            for name in ("weights", "random"):
                assert_equal([*with_it[name]], [*without[name]], f"rank {rank}, {name}")

    def test_whatever_the_strategy(self, run: Any, results: list[dict[Any, Any]]) -> None:
        """One that draws only a weight, with one process, too; sums over tokens are rounded in another order there."""
        _, casts, micro = run
        first = next(one for one in RUNS if one[1:] == (casts, micro))
        same = train("", casts, micro) if casts == "weight" else results[0][*first, True]
        found = results[0][*run, True]
        wanted = [ratio for _, ratio in same["measurements"]]
        assert [ratio for _, ratio in found["measurements"]] == pytest.approx(wanted, rel=1e-4)
        assert found["layers"] == pytest.approx(same["layers"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ASKED)
class TestTwoProcessesAsk:
    """Layers, of their part of the tokens."""

    def test_and_measure_the_same(self, name: str, results: list[dict[Any, Any]]) -> None:
        first, second = (result[name, True] for result in results)
        assert [step for step, _ in first["measurements"]] == list(range(1, STEPS + 1))
        assert all(ratio < 1e3 for _, ratio in first["measurements"])
        assert len(first["layers"]) == 4
        assert first["measurements"] == second["measurements"]
        assert first["layers"] == second["layers"]

    def test_and_change_nothing(self, name: str, results: list[dict[Any, Any]]) -> None:
        for rank, result in enumerate(results):
            assert_equal(*([*result[name, measured]["weights"]] for measured in (True, False)), f"rank {rank}")  # type: ignore[misc]

    def test_whatever_the_strategy(self, name: str, results: list[dict[Any, Any]]) -> None:
        found, wanted = results[0][name, True], results[0]["ddp", True]
        assert dict(found["measurements"]) == pytest.approx(dict(wanted["measurements"]), rel=1e-4)
        assert found["layers"] == pytest.approx(wanted["layers"], rel=1e-4)

    def test_and_go_on(self, name: str, results: list[dict[Any, Any]]) -> None:
        for result in results:
            whole, resumed = result[name, True], result.get((name, "resumed"), result[name, True])
            assert resumed["measurements"] == whole["measurements"]
            assert resumed["layers"] == whole["layers"]


# --- when -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "log_every", "micro", "expected"),
    [
        (2, 2, 1, {2: 2, 4: 4, 6: 6, 8: 8}),
        (2, 3, 1, {3: 2, 6: 6, 9: 8}),
        (3, 2, 2, {4: 3, 6: 6}),
        (4, 1, 1, {4: 4, 8: 8}),
        (1, 4, 1, {4: 4, 8: 8}),
    ],
)
def test_logged_in_the_step_or_in_the_next_one_that_is_logged(
    every: int, log_every: int, micro: int, expected: dict[int, int]
) -> None:
    """By step in which it is logged, the step that was measured."""
    monitor = GradientNoiseMonitor(every, layers=[r"net\.2"])
    kwargs: Any = {
        "log_every_n_steps": log_every,
        "accumulate_grad_batches": micro,
        "max_steps": 9 if log_every == 3 else 8,
    }
    run = fit(Model(0.1, 5), monitor, logger=TensorBoardLogger("."), **kwargs)
    found = logged(run)
    known = dict(monitor.measurements())
    assert set(found) - {"epoch"} == {METRIC, f"{METRIC}/net.2"}
    assert found[METRIC] == pytest.approx({step: known[measured] for step, measured in expected.items()})
    assert found[f"{METRIC}/net.2"].keys() == expected.keys()


def test_infinity_is_logged() -> None:
    run = fit(Model(), GradientNoiseMonitor(3), NEAREST, logger=TensorBoardLogger("."))
    assert logged(run)[METRIC] == {3: math.inf, 6: math.inf}


@pytest.mark.parametrize("kind", ["draws", "layers"])
def test_read_once_after_each_measurement(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = ("on_train_batch_start", "on_after_backward", "on_train_batch_end")
    monkeypatch.setattr("tests.callbacks.monitors.device_reads.HOOKS", hooks)
    Watched, reads = counted(GradientNoiseMonitor, monkeypatch)
    monitor = Watched(3, kind)
    steps: list[tuple[int, list[int]]] = []

    class Look(Callback):
        def on_train_batch_start(self, run: Trainer, *_: Any) -> None:
            steps.append((run.global_step, [step for step, _ in monitor.measurements(METRIC)]))

    # Without a scale of the whole tensor, whose numbers emulated GEMMs read on the CPU.
    mx = Cast("e2m1", {"block": 32, "format": "e8m0"}, "stochastic")
    trainer(LinearCasts(wgrad_g=mx), monitor, Look(), max_steps=8, log_every_n_steps=5).fit(Model())
    assert all(reads.pop((hook, -1)) == 8 for hook in hooks), "a hook was not watched"
    assert +reads == {("on_train_batch_start", 3): 1, ("on_train_batch_start", 6): 1}
    assert steps[3:] == [(3, [3]), (4, [3]), (5, [3]), (6, [3, 6]), (7, [3, 6])]


# --- what it says -----------------------------------------------------------------------------------------------------


def test_a_warning_is_said_once() -> None:
    monitor = GradientNoiseMonitor(1, threshold=1e6)
    with pytest.warns(UserWarning, match="GradientNoiseMonitor: the gradient, step 1: it is .* below 1e") as said:
        fit(Model(), monitor)
    assert sum("the gradient, step" in str(one.message) for one in said) == 1
    assert "PrecisionSwitch('qaf', below={})" in monitor._alerts.texts()[0]


def test_none_where_the_gradient_stands_out() -> None:
    monitor = GradientNoiseMonitor(1)
    fit(Model(), monitor)  # warnings are errors
    assert min(ratios(monitor)) > math.sqrt(3)
    assert not monitor._alerts.texts()


@pytest.mark.parametrize("kind", ["draws", "layers"])
def test_a_switch_follows(kind: str) -> None:
    monitor = GradientNoiseMonitor(1, kind, threshold=1e-3)
    run = trainer(NOISY, PrecisionSwitch("bf16", below={"threshold": 1e6, "measurements": 2}), monitor)
    run.fit(Model())
    steps = [step for step, _ in monitor.measurements()]
    assert run.precision_plugin.phase == "bf16"  # type: ignore[union-attr]
    assert 2 <= len(steps) < 6


def test_other_metrics() -> None:
    monitor = GradientNoiseMonitor()
    assert monitor.measurements(METRIC) == []
    with pytest.raises(KeyError, match="gradient_noise/ratio"):
        monitor.measurements("gradient_noise")


def test_reported() -> None:
    monitor = GradientNoiseMonitor(2)
    run = trainer(NOISY, RunReport(), monitor)
    run.fit(Model(0.1))
    chart, text = monitor.report_sections(run)[0].blocks
    assert isinstance(chart, Chart)
    assert isinstance(text, Text)
    assert chart.series["ratio"] == ([2, 4, 6], ratios(monitor))
    assert chart.series["threshold"] == ([2, 4, 6], [math.sqrt(3)] * 3)
    assert "Gradient noise" in Path("report.html").read_text()
    found = json.loads(Path("run.json").read_text())["summary"]["gradient_noise"]
    assert found["ratios"] == [{"step": step, "ratio": ratio} for step, ratio in monitor.measurements()]


def test_reported_without_noise_or_measurements() -> None:
    monitor = GradientNoiseMonitor(2)
    run = trainer(NEAREST, RunReport(), monitor)
    run.fit(Model())
    (text,) = monitor.report_sections(run)[0].blocks
    assert text == Text("Both draws of the gradient were always the same: nothing was rounded stochastically.")
    assert "Gradient noise" in Path("report.html").read_text()
    (text,) = GradientNoiseMonitor(7).report_sections(run)[0].blocks
    assert text == Text("Not measured: every 7 steps, in quantized layers.")


# --- state ------------------------------------------------------------------------------------------------------------


def test_a_resumed_run_is_the_uninterrupted_one() -> None:
    """Stopped between a measurement and the step that logs it."""
    curves, states = [], []
    for name, steps, resumed in (("whole", 9, None), ("half", 5, None), ("rest", 9, "half.ckpt")):
        monitor = GradientNoiseMonitor(5, average=3, threshold=1e6, layers=[r"net\.0"])
        run = trainer(
            NOISY,
            monitor,
            max_steps=steps,
            logger=TensorBoardLogger(name),
            limit_train_batches=1,  # an epoch is a step: Lightning resumes with the next epoch
            log_every_n_steps=3,
        )
        torch.manual_seed(0)
        if name == "rest":
            run.fit(Model(0.1, 3), ckpt_path=resumed, weights_only=True)  # what was said is not repeated
        else:
            with pytest.warns(UserWarning, match="the gradient, step 5"):
                run.fit(Model(0.1, 3))
        run.save_checkpoint(f"{name}.ckpt")
        curves.append(logged(run))
        states.append(monitor.state_dict())
    whole, half, rest = curves
    assert METRIC not in half
    assert whole[METRIC] == rest[METRIC]
    assert whole[METRIC].keys() == {6}
    assert states[0] == states[2]
    saved = torch.load("half.ckpt", weights_only=True)["callbacks"]
    assert saved["GradientNoiseMonitor"] == states[1]


def test_the_window_goes_on() -> None:
    monitor = GradientNoiseMonitor(1, average=4)
    fit(Model(0.1, 5), monitor)
    shorter = GradientNoiseMonitor(1, average=2, layers=[r"net\.0"])
    shorter.load_state_dict(monitor.state_dict())
    assert [row["sums"] for row in shorter.state_dict()["window"]] == [
        row["sums"] for row in monitor.state_dict()["window"][-2:]
    ]
    run = trainer(NOISY, shorter, max_steps=1)
    shorter.setup = lambda *_, **__: None  # type: ignore[method-assign]  # as if a run went on
    run.fit(Model(0.1, 5))
    assert set(run.callback_metrics) == {METRIC, f"{METRIC}/net.0"}
    assert len(shorter.measurements()) == 7


def test_sums_of_other_casts_are_not_averaged_with_after_a_resume() -> None:
    monitor = GradientNoiseMonitor(1)
    fit(Model(), monitor, max_steps=3)
    for casts, length in ((NOISY, 4), (NEAREST, 1)):
        other = GradientNoiseMonitor(1)
        other.load_state_dict(monitor.state_dict())
        other.setup = lambda *_, **__: None  # type: ignore[method-assign]  # as if a run went on
        fit(Model(), other, casts, max_steps=1)
        assert len(other.state_dict()["window"]) == length
    assert ratios(other)[-1] == math.inf


def test_sums_of_another_kind_are_not_averaged_with() -> None:
    """What was measured stays."""
    monitor, other = GradientNoiseMonitor(4, log := "draws"), GradientNoiseMonitor(1, kind="layers")
    fit(Model(), monitor, max_steps=5, log_every_n_steps=6)
    state = monitor.state_dict()
    assert state["kind"] == log
    assert state["to_log"]
    other.load_state_dict(state)
    assert other.measurements() == monitor.measurements()
    assert other.state_dict()["window"] == []
    assert not other.state_dict()["to_log"]


def test_another_run_begins_anew() -> None:
    monitor = GradientNoiseMonitor(2)
    for _ in range(2):
        fit(Model(), monitor)
        assert [step for step, _ in monitor.measurements()] == [2, 4, 6]


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every_n_steps": 0}, "every_n_steps is a number of optimizer steps, 1 or more; got 0"),
        ({"every_n_steps": 1.5}, "1 or more; got 1.5"),
        ({"every_n_steps": None}, "1 or more; got None"),
        ({"kind": "layer"}, "Unknown kind of GradientNoiseMonitor 'layer'. Did you mean 'layers'.*: 'draws', 'layers'"),
        ({"kind": None}, "Unknown kind of GradientNoiseMonitor None"),
        ({"average": 0}, "average is a number of measurements, 1 or more; got 0"),
        ({"average": True}, "1 or more; got True"),
        ({"threshold": 0}, "threshold is a ratio of gradient to noise, above 0; got 0"),
        ({"threshold": math.nan}, "above 0; got nan"),
        ({"threshold": math.inf}, "above 0; got inf"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GradientNoiseMonitor(**arguments)


def test_bad_patterns() -> None:
    with pytest.raises(ValueError, match="layers: the pattern 'lm_head' matches no quantized layer. There are 2"):
        fit(Model(), GradientNoiseMonitor(layers=["lm_head"]))


def test_without_the_plugin() -> None:
    run = Trainer(accelerator="cpu", callbacks=[GradientNoiseMonitor()], max_steps=1, logger=False)
    with pytest.raises(MisconfigurationException, match="Trainer has Precision. Use e.g. Trainer"):
        run.fit(Model())


def test_manual_optimization() -> None:
    model = Model()
    model.automatic_optimization = False
    with pytest.raises(MisconfigurationException, match="train with automatic optimization"):
        fit(model, GradientNoiseMonitor())


def test_deepspeed_is_refused() -> None:
    run, model = trainer(NOISY), Model()
    run.strategy.__class__ = DeepSpeedStrategy  # which is not installed
    with pytest.raises(
        MisconfigurationException, match="DeepSpeed keeps to itself: use kind='layers', or train with DDP"
    ):
        GradientNoiseMonitor().on_train_start(run, model)


def test_from_a_yaml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py"])
    arguments = {"every_n_steps": 10, "kind": "layers", "average": 2, "threshold": 2.5, "layers": ["layer"]}
    path = f"{GradientNoiseMonitor.__module__}.GradientNoiseMonitor"
    config = {
        "seed_everything": 1,
        "trainer": {"accelerator": "cpu", "callbacks": [{"class_path": path, "init_args": arguments}]},
    }
    Path("run.yaml").write_text(yaml.safe_dump(config))
    args = ["--config", "run.yaml"]
    cli = LightningCLI(BoringModel, args=args, run=False, save_config_callback=None, auto_configure_optimizers=False)
    (monitor,) = [one for one in cli.trainer.callbacks if isinstance(one, GradientNoiseMonitor)]
    assert {name: getattr(monitor, name) for name in arguments} == arguments


# --- errors -----------------------------------------------------------------------------------------------------------


class Broken(Tensor):
    """Cannot be read."""

    error: RuntimeError

    def tolist(self) -> Any:
        raise self.error


@pytest.mark.parametrize("error", ["CUDA error: an illegal memory access", "HIP error: invalid", "of the accelerator"])
def test_nothing_is_read_after_an_error_of_the_device(error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = torch.AcceleratorError if "accelerator" in error else RuntimeError
    monkeypatch.setattr(Broken, "error", kind(error), raising=False)
    monitor = GradientNoiseMonitor()
    monitor._keep(3, {"ratio": torch.ones(()).as_subclass(Broken)})
    monitor._read()
    assert monitor.measurements() == []
    assert monitor._unread == []


def test_other_errors_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Broken, "error", RuntimeError("a bug"), raising=False)
    monitor = GradientNoiseMonitor()
    monitor._keep(3, {"ratio": torch.ones(()).as_subclass(Broken)})
    with pytest.raises(RuntimeError, match="a bug"):
        monitor._read()
    monitor._keep(4, {"ratio": torch.tensor(5.0)})
    monitor._read()
    assert monitor.measurements() == [(4, 5.0)]


@pytest.mark.parametrize("error", ["CUDA error", "a bug"])
def test_a_report_of_the_loss_scale_after_an_error(error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Broken, "error", RuntimeError(error), raising=False)
    monitor = LossScaleMonitor()
    monitor._counts = monitor._counts.as_subclass(Broken)
    if error == "a bug":
        with pytest.raises(RuntimeError, match="a bug"):
            monitor.report_sections(trainer(NOISY))
    else:
        (section,) = monitor.report_sections(trainer(NOISY))
        assert section.blocks == [Text("Lost in an error of the device.")]
