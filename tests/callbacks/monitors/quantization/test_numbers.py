"""Statistics of operands are those of the metrics."""

import math
from itertools import product

import pytest
import torch
from torch._dynamo import OptimizedModule

from lightning_lowbit import LowBitPrecision
from lightning_lowbit.callbacks.monitors.quantization import QuantizationMonitor
from lightning_lowbit.nn import OPERANDS
from tests.callbacks.monitors.quantization.runs import (
    BACKWARD,
    FORWARD,
    LAYERS,
    MEANS,
    AtStep,
    Two,
    fit,
    logged,
    of_layers,
    trainer,
)
from tests.curves import assert_curves
from tests.lightning_imports import Callback
from tests.nn.operand_sums import assert_numbers, captured, numbers_of, places
from tests.tables import each


class Manual(Two):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        for part in batch.split(6):
            optimizer.zero_grad()
            self.manual_backward(super().training_step(part, batch_idx))
            optimizer.step()


PLUGINS = {
    "nvfp4": lambda: LowBitPrecision("nvfp4"),
    "mxfp4": lambda: LowBitPrecision("mxfp4"),
    "fp8-delayed": lambda: LowBitPrecision("fp8-delayed"),
    "ternary": lambda: LowBitPrecision("ternary"),
    "int4": lambda: LowBitPrecision("int4", compute_dtype="fp32"),  # in bf16 operands are rounded once more
}


@each("accumulate, plugin", product([3, 1], PLUGINS), fast=2)
def test_numbers_are_those_of_the_metrics(plugin, accumulate):
    """Of each layer and operand, over all micro-batches of a step that is logged, and of no other."""
    steps = []

    class Steps(Callback):
        """What has been captured by the end of a step is of that step."""

        def on_train_batch_end(self, trainer, *_):
            if made and not trainer.fit_loop._should_accumulate():
                steps.append({place: list(parts) for place, parts in made.items()})
                made.clear()

    with captured() as made:
        run = trainer(
            Steps(), QuantizationMonitor(weights=False), plugin=PLUGINS[plugin](), accumulate_grad_batches=accumulate
        )
        run.fit(Two({0: 3.0, 4: 0.01, 9: 20.0}))
    found = logged(run)
    assert list(found) == [1, 3], "Lightning numbers the first step 0, and every second one is logged"
    assert len(steps) == 2, "layers measured in other steps"
    for made_in_step, row in zip(steps, found.values(), strict=True):
        expected = places(LAYERS, made_in_step)
        numbers = of_layers(row)
        assert numbers.keys() == expected.keys()
        for (layer, operand), parts in expected.items():
            assert len(parts) == accumulate
            assert_numbers(numbers[layer, operand], numbers_of(parts), f"{layer}, {operand}")
        for name in MEANS:
            for operand in {operand for _, operand in expected}:
                of_one = [numbers[place][name] for place in expected if place[1] == operand]
                mean = pytest.approx(sum(of_one) / len(of_one), rel=1e-5, abs=1e-9)
                assert row[f"{name}/{operand}"] == mean, f"mean of {name}/{operand}"
    if plugin in ("ternary", "int4"):
        assert {operand for _, operand in of_layers(found[1])} == set(FORWARD), "what was taken over is no operand"


def test_phases():
    """Operands that a phase does not quantize have no numbers, and no means either."""

    def phase(name):
        return lambda run: run.precision_plugin.set_phase(name)

    switches = [AtStep(2, phase("qaf")), AtStep(4, phase("bf16")), AtStep(6, phase("hp-forward"))]
    for order in (0, 1):  # before the monitor and after it
        run = trainer(
            *(switches if order == 0 else []),
            QuantizationMonitor(weights=False),
            *(switches if order == 1 else []),
            log_every_n_steps=1,
            max_steps=8,
        )
        run.fit(Two())
        found = logged(run)
        assert list(found) == [0, 1, 2, 3, 6, 7], "nothing of a step in high precision"
        for steps, operands in (((0, 1), OPERANDS), ((2, 3), FORWARD), ((6, 7), BACKWARD)):
            for step in steps:
                assert {place[1] for place in of_layers(found[step])} == set(operands), f"step {step}"
                means = {name for name in found[step] if name.count("/") == 1}
                assert means == {f"{name}/{operand}" for name in MEANS for operand in operands}, f"step {step}"
                assert all(math.isfinite(value) for value in found[step].values()), f"step {step}"


@each("share", [0.0, 0.4], fast=1)
def test_on_the_way_numbers_are_of_where_it_leads(share):
    """Of the first step, whose weights and inputs are those of a run with λ = 1."""
    plugins = [LowBitPrecision("nvfp4") for _ in range(2)]
    plugins[1].set_blend(share)
    rows = [of_layers(fit(plugin=plugin, max_steps=1, log_every_n_steps=1)[0]) for plugin in plugins]
    for operand in ("fprop_x", "fprop_w"):
        assert rows[1]["layer.0", operand] == rows[0]["layer.0", operand]
    assert rows[1]["layer.2", "fprop_x"] != rows[0]["layer.2", "fprop_x"], "λ is 1 in both runs"


def test_computing_activations_again_changes_no_number():
    assert_curves(*(fit(Two(recompute=recompute)) for recompute in (True, False)), rtol=1e-6)


def test_manual_optimization():
    """Both passes of a batch together: with a learning rate of 0 those of the whole batch, of rows as of tokens."""

    manual = fit(Manual(lr=0.0), plugin="mxfp8", max_steps=8)
    whole = fit(Two(lr=0.0), plugin="mxfp8", max_steps=4)
    assert list(manual) == list(whole) == [1, 3]
    for step, row in whole.items():
        expected, found = of_layers(row), of_layers(manual[step])
        assert found.keys() == expected.keys()
        for layer in LAYERS:
            for operand in FORWARD:
                assert_numbers(found[layer, operand], expected[layer, operand], f"step {step}, {layer}, {operand}")


@each("accumulate", [1, 3], fast=1)
def test_evaluation_does_not_count(accumulate):
    """Neither between steps nor between micro-batches; its inputs are a hundred times as large."""
    validates = {"limit_val_batches": 2, "val_check_interval": 1, "num_sanity_val_steps": 2}
    evaluated, alone = (fit(accumulate_grad_batches=accumulate, **options) for options in (validates, {}))
    assert_curves(evaluated, alone, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch looks at it itself
def test_a_compiled_model_logs_the_same(compiler):
    """Compiled as a whole, and in pieces."""
    compilations = []

    class Count(Callback):
        def on_train_batch_end(self, *_):
            compilations.append(compiler.frame_count)

    class Compiled(Two):
        def configure_model(self):
            if not isinstance(self.layer, OptimizedModule):
                self.layer = torch.compile(self.layer, backend=compiler)

    class Pieces(Two):
        def configure_model(self):
            for layer in self.layer:
                layer.compile(backend="aot_eager")

    arguments = {"max_steps": 8, "limit_val_batches": 1, "val_check_interval": 3}
    expected = fit(**arguments)
    assert list(expected) == [1, 3, 5, 7]
    for model in (Compiled, Pieces):
        assert_curves(fit(model(), Count(), **arguments), expected, rtol=1e-5, atol=1e-12)
    assert compilations[3:8] == [compilations[3]] * 5, f"after the second logged step: {compilations}"


@each("casts", ["nvfp4", "quartet2"], fast=1)
def test_statistics_of_blocks_are_logged_and_reported(casts):
    """Of each layer and operand: scales between the least and the largest, and histograms that add up to 1."""
    monitor = QuantizationMonitor(weights=False, blocks=True)
    run = trainer(monitor, plugin=LowBitPrecision(casts))
    run.fit(Two())
    layers = monitor.report_data(run)["quantized_operands"]["layers"]
    assert set(layers) == set(LAYERS)
    for layer, operands in layers.items():
        assert set(operands) == set(OPERANDS) - ({"dgrad_g", "dgrad_w"} if layer == LAYERS[0] else set())
        for operand, found in operands.items():
            where = f"{operand} of {layer}"
            assert found["scale_min"] <= found["scale_mean"] <= found["scale_max"], where
            assert 0 < found["scale_std"] <= found["scale_max"] - found["scale_min"], where
            for kind in ("below", "block"):
                assert sum(found[f"{kind}_{i}"] for i in range(16)) == pytest.approx(1), where
            mean = sum((3 * i + 1.5) * found[f"block_{i}"] for i in range(16))
            assert found["sqnr"] == pytest.approx(mean, abs=4), where
    captions = [getattr(block, "caption", "") for section in monitor.report_sections(run) for block in section.blocks]
    assert sum(caption.startswith("Shares of blocks") for caption in captions) == 2
