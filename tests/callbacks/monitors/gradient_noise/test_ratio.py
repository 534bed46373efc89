"""The ratio of a gradient to the noise of stochastic rounding, by draws."""

import math
import warnings

import pytest
import torch
from torch import nn

from lightning_lowbit import (
    Cast,
    GradientNoiseMonitor,
    LinearCasts,
    LowBitPrecision,
    PrecisionSwitch,
    StaticGradScaler,
    convert,
)
from lightning_lowbit.nn import LayerKeys
from tests.callbacks.monitors.gradient_noise.ranks import E2M1
from tests.callbacks.monitors.gradient_noise.runs import METRIC, NOISY, Model, fit, ratios, steps, trainer
from tests.lightning_imports import Callback
from tests.tables import each

KINDS = ("draws", "layers")


def test_the_ratio_is_that_of_many_draws():
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


def test_averaged_over_the_last_measurements():
    single, averaged = GradientNoiseMonitor(1, average=1), GradientNoiseMonitor(1, average=3)
    for monitor, length in ((single, 1), (averaged, 3)):
        fit(Model(0.1, 8), monitor)
        rows = monitor.state_dict()["window"]
        assert len(rows) == length
    noise, signal = (sum(row["sums"][0][i] for row in rows) for i in (0, 1))
    assert ratios(averaged)[-1] == pytest.approx(math.sqrt(signal / noise), rel=1e-6)
    assert ratios(averaged)[0] == ratios(single)[0] != ratios(averaged)[1]


@each("kind", KINDS, fast=1)
def test_not_averaged_over_a_switch(kind):
    """In finetuning nothing is measured; back in training the window is that of other weights."""
    monitor, single = GradientNoiseMonitor(1, kind, average=5), GradientNoiseMonitor(1, kind, average=1)
    for one in (monitor, single):
        switches = [PrecisionSwitch("qaf", step=3), PrecisionSwitch("fqt", step=6)]
        trainer(NOISY.replace(fprop_w=Cast(**E2M1)), *switches, one, max_steps=8).fit(Model(0.1, 8))
        assert steps(one) == [1, 2, 3, 7, 8]
        assert all(ratio < math.inf for ratio in ratios(one)), "the end of noise is logged as a number"
    assert ratios(monitor)[3] == ratios(single)[3]
    assert ratios(monitor)[4] != ratios(single)[4], "the window did not fill again"
    fit(Model(), monitor := GradientNoiseMonitor(1, kind), LinearCasts(fprop_w=Cast(**E2M1)))
    assert ratios(monitor) == []


CHANGES = {
    "casts": lambda plugin, step: plugin.set_casts({"net.2": NOISY.replace(dgrad_w=None)}),
    "blend": lambda plugin, step: plugin.set_blend(0.1 * step),
    "phase": lambda plugin, step: plugin.set_phase("hp-forward"),
}


@each("change", CHANGES, fast=1)
def test_not_averaged_over_a_change_of_precision(change):
    class Changes(Callback):
        def on_train_batch_start(self, run, *_):
            if run.global_step in (3, 5):  # the second time it is no change
                CHANGES[change](run.precision_plugin, run.global_step)

        def on_train_batch_end(self, *_):
            lengths.append(len(monitor.state_dict()["window"]))

    monitor, lengths = GradientNoiseMonitor(1), list[int]()
    trainer(NOISY, monitor, Changes()).fit(Model())
    assert lengths == [1, 2, 3, 1, 2, 3]


def test_accumulation_draws_of_the_last_micro_batch():
    """The same gradient, so that the ratio has to be the same, too, but for other bits."""
    last = []
    for micro in (1, 2):
        monitor, model = GradientNoiseMonitor(2, average=3), Model()
        fit(model, monitor, accumulate_grad_batches=micro)
        assert model.calls == dict.fromkeys(range(1, 7), micro), "a training step ran again"
        last.append(ratios(monitor)[-1])
    assert last[0] == pytest.approx(last[1], rel=0.1)
    monitor = GradientNoiseMonitor(1, average=1)
    fit(Model(), monitor, accumulate_grad_batches=2, limit_train_batches=3, max_steps=4)
    assert steps(monitor) == [1, 2, 3, 4], "the last batch of an epoch steps alone"


def test_one_measurement_in_a_step():
    """LBFGS computes losses several times."""

    class Searches(Model):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), max_iter=3)

    monitor = GradientNoiseMonitor(2)
    fit(Searches(), monitor)
    assert steps(monitor) == [2, 4, 6]


def test_a_layer_without_a_gradient_in_both_draws_counts_for_nothing():
    model, monitor = Model(), GradientNoiseMonitor(1, layers=["unused"])
    model.unused = nn.Linear(32, 32)
    run = fit(model, monitor)
    assert 0 < ratios(monitor)[-1] < math.inf
    assert run.callback_metrics[f"{METRIC}/unused"] == math.inf


def shared(net):
    net[2].weight = net[0].weight


def frozen(net):
    net.requires_grad_(False)


def frozen_in_part(net):
    frozen(net[1])


@each(
    "kind, change, layers",
    [
        ("draws", shared, ["net.0", "net.1"]),
        *((kind, frozen_in_part, ["net.0", "net.2"]) for kind in KINDS),
        *((kind, frozen, []) for kind in KINDS),
    ],
    fast=2,
)
def test_weights_that_are_shared_or_frozen(kind, change, layers):
    model, monitor = Model(), GradientNoiseMonitor(1, kind, layers=["net.*"])
    model.net = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
    model.bias = nn.Parameter(torch.zeros(32))
    model.loss = lambda x: Model.loss(model, x + model.bias)
    change(model.net)
    run = fit(model, monitor)
    assert set(run.callback_metrics) == ({METRIC, *(f"{METRIC}/{name}" for name in layers)} if layers else set())
    assert len(ratios(monitor)) == (6 if layers else 0)
    assert set(model.calls.values()) == {1}, "a draw for nothing"


@each("kind", KINDS, fast=1)
def test_the_ratio_does_not_depend_on_the_scale_of_the_loss(kind):
    """The backward pass computes in fp16, where powers of two change no digit; nor do scales that change on the way."""

    class Grows(Callback):
        def on_train_batch_end(self, run, *_):
            run.precision_plugin.scaler._scale.mul_(2)

    found = []
    for scale, others in ((2.0**6, ()), (2.0**7, (Grows(),))):
        monitor = GradientNoiseMonitor(1, kind)
        plugin = LowBitPrecision(NOISY, compute_dtype="fp16", scaler=StaticGradScaler(scale, device="cpu"), seed=2)
        torch.manual_seed(1)
        trainer(plugin, monitor, *others, max_steps=3).fit(Model(0.01))
        found.append(ratios(monitor))
    assert len(found[0]) == 3
    rel = 0 if kind == "draws" else 1e-4  # dW' is rounded to fp16, below its smallest normal number too
    assert found[1] == pytest.approx(found[0], rel=rel)


@each("kind", KINDS, fast=1)
def test_an_overflow_is_no_measurement(kind):
    monitor = GradientNoiseMonitor(1, kind, average=2)
    plugin = LowBitPrecision(NOISY, compute_dtype="fp16", scaler=torch.amp.GradScaler("cpu", 2.0**24), seed=2)
    run = trainer(plugin, monitor, max_steps=16)
    with warnings.catch_warnings(action="ignore"):
        run.fit(Model(0.01))
    skipped = int(plugin.skipped_steps)
    assert 0 < skipped < 14
    assert steps(monitor) == list(range(skipped + 1, 17))
    assert all(0 < ratio < math.inf for ratio in ratios(monitor))
    torch.save(monitor.state_dict(), "state.pt")
    assert torch.load("state.pt", weights_only=True)["measurements"] == monitor.measurements()


@each("kind", KINDS, fast=1)
def test_activations_as_codes_have_the_same_noise(kind):
    """In a step that is measured, layers keep their input: codes would hold one draw of its random bits."""
    found = []
    for save in ("inputs", "codes"):
        monitor = GradientNoiseMonitor(2, kind)
        fit(Model(), monitor, LowBitPrecision("nvfp4", seed=2, save=save), max_steps=4)
        found.append(ratios(monitor))
    assert found[0] == found[1] and all(0 < ratio < math.inf for ratio in found[0])
