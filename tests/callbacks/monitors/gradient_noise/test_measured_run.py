"""A run that is measured is the run that is not; what cannot be measured is refused."""

import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.utils.checkpoint import checkpoint

from lightning_lowbit import (
    Cast,
    FP8Precision,
    GradientNoiseMonitor,
    LinearCasts,
    LowBitPrecision,
    PrecisionSummary,
    QuantizationMonitor,
)
from tests.callbacks.monitors.gradient_noise.ranks import E2M1, STOCHASTIC
from tests.callbacks.monitors.gradient_noise.runs import (
    NEAREST,
    NOISY,
    Model,
    assert_equal,
    fit,
    ratios,
    steps,
    trainer,
)
from tests.curves import event_curves
from tests.lightning_imports import Callback, MisconfigurationException, TensorBoardLogger
from tests.tables import each


class Stateful(Model):
    """Its loss depends on all random numbers and on what normalization remembers."""

    def __init__(self):
        super().__init__(0.05, 4)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            self.net = nn.Sequential(
                nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Dropout(0.2), nn.GELU(), nn.Linear(64, 32)
            )
        self.losses = []

    def training_step(self, batch, batch_idx):
        batch *= 1 + 0.1 * random.random() + 0.1 * np.random.rand() + 0.1 * torch.rand(())
        loss = self.loss(batch)
        self.losses.append(float(loss.detach()))
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def on_before_backward(self, loss):
        """Between the step and the measurement."""
        self.between = float(torch.rand(())) + random.random() + np.random.rand()


def left_behind(model, run):
    """Everything."""
    plugin = run.precision_plugin
    return {
        **model.state_dict(),
        "losses": model.losses,
        "random": [random.getstate(), str(np.random.get_state()), torch.get_rng_state()],
        "plugin": [plugin.step, plugin.micro_batch],
        "metrics": {name: value for name, value in run.callback_metrics.items() if not name.startswith("gradient")},
        "histories": plugin.histories.state_dict() if plugin.histories else {},
        "curves": event_curves(run, lambda name: name.startswith("loss")),
    }


PLUGINS = {
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
def test_a_run_that_is_measured_is_the_run_that_is_not(plugin, micro, kind):
    found, monitor = [], GradientNoiseMonitor(2, kind)
    for callback in (monitor, Callback()):
        random.seed(1)
        np.random.seed(1)
        model, options = Stateful(), {"logger": TensorBoardLogger("."), "accumulate_grad_batches": micro}
        found.append(left_behind(model, fit(model, callback, PLUGINS[plugin](), **options)))
    assert_equal(*found)
    assert len(model.losses) == 6 * micro
    assert steps(monitor) == [2, 4, 6]
    noisy = kind == "layers" or plugin in ("nvfp4", "fp16")
    assert all((ratio < 1e3) == noisy and (ratio == math.inf) != noisy for ratio in ratios(monitor))


def test_gradients_and_buffers_stay_the_same_objects():
    """In the second of two micro-batches, where gradients are there already."""

    class Look(GradientNoiseMonitor):
        def on_before_backward(self, run, module, loss):
            def objects():
                gradients = [(id(p.grad), None if p.grad is None else p.grad._version) for p in module.parameters()]
                return [*gradients, *map(id, module.buffers()), module.training, set(vars(module))]

            before = objects()
            hooks = [p.register_post_accumulate_grad_hook(lambda _: touched.append(1)) for p in module.parameters()]
            super().on_before_backward(run, module, loss)
            for hook in hooks:
                hook.remove()
            seen.append(objects() == before)

    seen, touched = [], []
    fit(Stateful(), monitor := Look(1), accumulate_grad_batches=2)
    assert len(ratios(monitor)) == 6
    assert seen == [True] * 12
    assert not touched, "hooks on what accumulates gradients belong to others"


class Checkpointed(Model):
    reentrant = False

    def loss(self, x):
        hidden = checkpoint(self.net[0], x.requires_grad_(), use_reentrant=self.reentrant)
        y = checkpoint(nn.Sequential(nn.Dropout(0.1), self.net[2]), hidden, use_reentrant=self.reentrant)
        return (y.float() - x.roll(1, 1)).square().mean()


def test_activation_checkpointing():
    for casts in (NEAREST, NOISY):
        monitor = GradientNoiseMonitor(1)
        fit(Checkpointed(), monitor, LowBitPrecision(casts, seed=2))
        assert [ratio == math.inf for ratio in ratios(monitor)] == [casts is NEAREST] * 6
    model = Checkpointed()
    model.reentrant = True
    with pytest.warns(UserWarning, match="Not measured: .*use_reentrant=False"):
        fit(model, GradientNoiseMonitor(1))


def test_a_backward_pass_runs_outside_of_autocast():
    """As in training, where a product of float32 stays one."""

    class Wide(Model):
        def loss(self, x):
            y = self.net(x).float()
            with torch.autocast("cpu", enabled=False):
                return (y @ self.data[0].t()).square().mean()

    monitor = GradientNoiseMonitor(1)
    fit(Wide(), monitor, LowBitPrecision(NEAREST, seed=2), max_steps=2)
    assert ratios(monitor) == [math.inf] * 2


@pytest.mark.slow
@each("backend", ["eager", "aot_eager"])
@each("casts", [NEAREST, NOISY])
def test_a_compiled_module(casts, backend):
    """Its graphs run backward three times."""

    class Random(Model):
        def __init__(self):
            super().__init__(0.1)
            self.net = nn.Sequential(self.net[0], nn.BatchNorm1d(64), nn.Dropout(0.2), self.net[2])

        def training_step(self, batch, batch_idx):
            return self.loss(batch)

    found, monitor = [], GradientNoiseMonitor(1)
    for callback in (monitor, Callback()):
        torch._dynamo.reset()
        model = Random()
        torch.manual_seed(3)
        trainer(LowBitPrecision(casts, seed=2), callback, max_steps=3).fit(torch.compile(model, backend=backend))
        found.append(model.state_dict())
    assert [ratio == math.inf for ratio in ratios(monitor)] == [casts is NEAREST] * 3
    assert_equal(*found)
    assert torch._functorch.config.donated_buffer, "it is switched off"
    torch._dynamo.reset()


@pytest.mark.slow
def test_code_of_a_run_that_was_not_measured_is_not_taken(tmp_path, monkeypatch):
    """It may write to what a second backward pass reads; torch keeps it on the disk, and in the process."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

        def forward(self, x):
            return x + self.down(self.up(x).relu())

    found = []
    for compiles, monitors in ((False, []), (True, []), (True, [GradientNoiseMonitor(1)])):
        model = Model(0.1)
        torch.manual_seed(0)
        model.net = nn.Sequential(Block(), nn.Linear(32, 32))
        if compiles:
            model.net[0].compile()
        trainer(LowBitPrecision("nvfp4", compute_dtype="fp32", seed=2), *monitors, max_steps=3).fit(model)
        found.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    for compiled in found[1:]:
        torch.testing.assert_close(compiled, found[0], rtol=0, atol=1e-4)
    torch._dynamo.reset()


@each("recompute", [False, True])
def test_other_callbacks_do_not_see_draws(recompute):
    """Neither what layers measure of their operands, nor FLOPs."""
    found = []
    for monitors in ([GradientNoiseMonitor(1)], []):
        torch.manual_seed(11)  # of dropout
        summary = PrecisionSummary(quiet=True)
        run = trainer(LowBitPrecision("fp8-delayed", seed=2), summary, QuantizationMonitor(), *monitors)
        run.fit(Checkpointed(0.1) if recompute else Model(0.1))
        metrics = {name: float(value) for name, value in run.callback_metrics.items() if "gradient_noise" not in name}
        found.append((metrics, summary.coverage().flops, summary.counter.recomputed))
    assert found[0] == found[1]
    assert found[0][0]


@each(
    "kind, micro, message",
    [
        (FullyShardedDataParallel, 1, "whose weights FSDPStrategy frees: use kind='layers'"),
        (FSDPModule, 2, "use kind='layers', or accumulate_grad_batches=1"),
    ],
)
def test_strategies_that_are_refused(kind, micro, message):
    run, part = trainer(NOISY, accumulate_grad_batches=micro), object.__new__(kind)  # of processes alone
    run.strategy._model = SimpleNamespace(modules=lambda: [part])
    with pytest.raises(MisconfigurationException, match=message):
        GradientNoiseMonitor()._source.check(run, Model())


@each("casts", [{"fprop_x": STOCHASTIC}, {"hadamard": {"fprop": {"size": 16, "signs": "keyed"}}}])
def test_random_bits_of_the_forward_pass_are_not_measured(casts):
    casts = LinearCasts.of({"fprop_w": Cast(**E2M1), "fprop_x": Cast(**E2M1), **casts})
    with pytest.warns(UserWarning, match="forward pass of net.0 has some, too.*use kind='layers'"):
        fit(Model(), GradientNoiseMonitor(1), casts)
    fit(Model(), GradientNoiseMonitor(1, kind="layers"), casts)  # warnings are errors
