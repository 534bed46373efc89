"""Noise of single layers, asked in the backward pass."""

import math

import pytest
import torch

from lightning_lowbit import GradientNoiseMonitor, LowBitPrecision
from tests.callbacks.monitors.gradient_noise.runs import METRIC, NOISY, Model, assert_equal, ratios, steps, trainer
from tests.lightning_imports import Callback


class ByHand(Callback):
    """Of each step, by layer: Σ (dW - dW')² and Σ dW'², of the last backward pass, from what hooks saw and `.grad`.

    Attributes:
        rows: of each step; once for all layers, by ``""``.
    """

    def __init__(self):
        self.rows = []
        self._before = {}
        self._exact = {}

    def on_train_start(self, run, module):
        for name in ("net.0", "net.2"):
            layer = module.get_submodule(name)

            def look(layer, inputs, y, name=name):
                (x,) = inputs
                dtype = y.dtype  # what autocast computes in

                def gradient(g):
                    exact = g.to(dtype).double().flatten(0, -2).t() @ x.to(dtype).double().flatten(0, -2)
                    self._exact[name] = exact.detach()
                    grad = layer.weight.grad
                    self._before[name] = torch.zeros_like(exact) if grad is None else grad.double().clone()

                y.register_hook(gradient)

            layer.register_forward_hook(look)

    def on_after_backward(self, run, module):
        if run.fit_loop._should_accumulate():
            return
        found = {}
        for name, exact in self._exact.items():
            dw = module.get_submodule(name).weight.grad.double() - self._before[name]
            found[name] = (float((dw - exact).square().sum()), float(exact.square().sum()))
        found[""] = tuple(map(sum, zip(*found.values(), strict=True)))
        self.rows.append(found)

    def ratio(self, steps, name=""):
        noise, signal = (sum(row[name][i] for row in self.rows[steps]) for i in (0, 1))
        return math.sqrt(signal / noise) if noise else math.inf


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("preset", ["nvfp4", "nvfp4-nvidia", "ternary", "fp8-delayed"])
def test_layers_by_hand(preset, micro):
    """The norm of dW' over that of dW - dW', of the last micro-batch, averaged; all layers weigh as their elements."""
    monitor, hand = GradientNoiseMonitor(2, kind="layers", average=2, layers=["net.*"]), ByHand()
    torch.manual_seed(1)
    plugin = LowBitPrecision(preset, compute_dtype="fp32", seed=2)
    run = trainer(plugin, monitor, hand, accumulate_grad_batches=micro)
    run.fit(model := Model(0.1, 4))
    expected = [hand.ratio(slice(1, 2)), hand.ratio(slice(1, 4, 2)), hand.ratio(slice(3, 6, 2))]
    assert steps(monitor) == [2, 4, 6]
    assert ratios(monitor) == pytest.approx(expected, rel=1e-4)
    assert all(ratio < 1e3 for ratio in expected)
    found = {name: float(value) for name, value in run.callback_metrics.items()}
    wanted = {f"{METRIC}/{name}": hand.ratio(slice(3, 6, 2), name) for name in ("net.0", "net.2")}
    assert found == pytest.approx({METRIC: expected[-1], **wanted}, rel=1e-4)
    assert model.calls == dict.fromkeys(range(1, 7), micro), "no step runs twice"


@pytest.mark.slow
def test_compiled_layers_measure_the_same_and_compile_twice(compiler):
    """With and without rows; not once for each measurement."""

    class Plain(Model):
        def training_step(self, batch, batch_idx):
            return self.loss(batch)

    class Look(Callback):
        def on_train_batch_end(self, *_):
            graphs.append(compiler.frame_count)

    found = []
    for is_compiled in (False, True):
        model, monitor, graphs = Plain(0.1, 4), GradientNoiseMonitor(2, kind="layers", layers=["net.*"]), []
        torch.manual_seed(1)
        run = trainer(LowBitPrecision("nvfp4", compute_dtype="fp32", seed=2), monitor, Look(), max_steps=8)
        run.fit(torch.compile(model, backend=compiler) if is_compiled else model)
        metrics = {name: float(value) for name, value in run.callback_metrics.items()}
        found.append((ratios(monitor), metrics, model.state_dict()))
    eager, compiled = found
    assert compiled[0] == pytest.approx(eager[0], rel=1e-6)
    assert compiled[1] == pytest.approx(eager[1], rel=1e-6)
    assert_equal(compiled[2], eager[2])
    assert graphs[0] > 0 and graphs == [graphs[0]] + [2 * graphs[0]] * 7


def test_layers_are_asked_in_measured_steps_only():
    """And not once a step has failed, measured or not."""

    class Look(Callback):
        def on_before_backward(self, run, module, loss):
            asked.append(all(layer.lowbit.gradient_sums is not None for layer in (module.net[0], module.net[2])))
            if run.global_step == 5:
                raise RuntimeError("of the step's own")

        def on_train_batch_end(self, run, module, *_):
            assert module.net[0].lowbit.gradient_sums is None

    # Micro-batches of steps 1 to 5, and the first one of the sixth, which fails; measured are the last one or all.
    for every, accumulate, wanted in ((3, 2, [*[False] * 5, True, *[False] * 5]), (1, 1, [True] * 6)):
        asked = []
        run = trainer(NOISY, GradientNoiseMonitor(every, kind="layers"), Look(), accumulate_grad_batches=accumulate)
        with pytest.raises(RuntimeError, match="of the step's own"):
            run.fit(model := Model())
        assert asked == wanted
        assert model.net[0].lowbit.gradient_sums is None
