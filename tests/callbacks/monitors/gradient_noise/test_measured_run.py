"""A run that is measured is the run that is not; what cannot be measured is refused."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.utils.checkpoint import checkpoint

from lightning_lowbit import (
    Cast,
    GradientNoiseMonitor,
    LinearCasts,
    LowBitPrecision,
    PrecisionSummary,
    QuantizationMonitor,
)
from tests.callbacks.monitors.gradient_noise.ranks import E2M1, STOCHASTIC
from tests.callbacks.monitors.gradient_noise.runs import NEAREST, NOISY, Model, assert_equal, fit, ratios, trainer
from tests.lightning_imports import Callback, MisconfigurationException
from tests.tables import each


def test_gradients_stay_the_same_objects():
    """In the second of two micro-batches, where gradients are there already."""

    class Look(GradientNoiseMonitor):
        def on_before_backward(self, run, module, loss):
            def objects():
                gradients = [(id(p.grad), None if p.grad is None else p.grad._version) for p in module.parameters()]
                return [*gradients, module.training, set(vars(module))]

            before = objects()
            hooks = [p.register_post_accumulate_grad_hook(lambda _: touched.append(1)) for p in module.parameters()]
            super().on_before_backward(run, module, loss)
            for hook in hooks:
                hook.remove()
            seen.append(objects() == before)

    seen, touched = [], []
    fit(Model(), monitor := Look(1), accumulate_grad_batches=2)
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


@each("recompute", [True, False], fast=1)
def test_other_callbacks_do_not_see_draws(recompute):
    """Neither what layers measure of their operands, nor FLOPs."""
    found = []
    for monitors in ([GradientNoiseMonitor(1)], []):
        torch.manual_seed(11)  # of dropout
        summary = PrecisionSummary(quiet=True)
        run = trainer(LowBitPrecision("fp8-delayed", seed=2), summary, QuantizationMonitor(), *monitors, max_steps=3)
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


@each("casts", [{"fprop_x": STOCHASTIC}, {"hadamard": {"fprop": {"size": 16, "signs": "keyed"}}}], fast=1)
def test_random_bits_of_the_forward_pass_are_not_measured(casts):
    casts = LinearCasts.of({"fprop_w": Cast(**E2M1), "fprop_x": Cast(**E2M1), **casts})
    with pytest.warns(UserWarning, match="forward pass of net.0 has some, too.*use kind='layers'"):
        fit(Model(), GradientNoiseMonitor(1), casts)
    fit(Model(), GradientNoiseMonitor(1, kind="layers"), casts)  # warnings are errors
