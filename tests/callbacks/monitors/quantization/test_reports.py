"""When operands are watched, and where the numbers go."""

import json

import pytest

from lightning_lowbit import RunReport
from lightning_lowbit.callbacks.monitors.quantization import QuantizationMonitor
from lightning_lowbit.nn import OPERANDS, QuantizedLayer
from tests.callbacks.monitors.quantization.runs import LAYERS, MEANS, NAMES, Two, fit, logged, of_layers, trainer
from tests.lightning_imports import Callback

# The input of the first layer needs no gradient.
PLACES = [(layer, operand) for layer in LAYERS for operand in OPERANDS if (layer, operand[:5]) != ("layer.0", "dgrad")]


class Watching(Callback):
    """Whether layers measure, by batch, while the loss is computed."""

    def __init__(self):
        self.seen = []

    def on_before_zero_grad(self, trainer, pl_module, *_):
        (on,) = {is_on(layer) for layer in pl_module.modules() if isinstance(layer, QuantizedLayer)}
        self.seen.append(on)


def is_on(layer):
    return layer.lowbit.operand_sums is not None


def all_off(model):
    return not any(is_on(layer) for layer in model.modules() if isinstance(layer, QuantizedLayer))


def test_layers_measure_in_logged_steps_only():
    watching, model = Watching(), Two()
    fit(model, watching, max_steps=6, log_every_n_steps=3)
    assert watching.seen == [False, False, True, False, False, True]
    assert all_off(model)
    watching = Watching()
    trainer(watching, QuantizationMonitor(operands=False)).fit(Two())
    assert not any(watching.seen)


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_layers_are_let_go_of_after_an_error(error, where):
    class Breaks(Two):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            assert not all_off(self)
            if where == "forward":
                raise error("broken")
            return loss

        def on_after_backward(self):
            raise error("broken")

    model = Breaks()
    run = trainer(QuantizationMonitor(), log_every_n_steps=1)
    # Ctrl-C ends the process, once callbacks know of it.
    with pytest.raises(SystemExit if error is KeyboardInterrupt else error):
        run.fit(model)
    assert all_off(model)


def test_layers_are_let_go_of_when_a_step_is_cut_short():
    """After the first of three micro-batches of a step."""

    class Ends(Two):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 4 else None

    model = Ends()
    run = trainer(QuantizationMonitor(), accumulate_grad_batches=3, max_epochs=1, max_steps=-1, log_every_n_steps=1)
    run.fit(model)
    assert all_off(model)
    assert list(logged(run)) == [0]


@pytest.mark.fast("1")
@pytest.mark.parametrize("order", [1, -1])
def test_a_report_draws_the_sqnr_of_each_layer_over_steps(tmp_path, order):
    """The points of the history are those of the logger, also of the last step; and the page has a chart of them."""
    run = trainer(*[RunReport(), QuantizationMonitor(weights=False)][::order], log_every_n_steps=1)
    run.fit(Two())
    curves = logged(run)
    (path,) = tmp_path.rglob("run.json")
    data = json.loads(path.read_text())
    for layer, operand in PLACES:
        name = f"sqnr/{operand}/{layer}"
        points = dict(data["history"][name])
        assert points == pytest.approx({step + 1: row[name] for step, row in curves.items()})
        assert len(points) == 4
        assert data["quantities"][name] == f"sqnr/{operand}"
    page = (path.parent / "report.html").read_text()
    assert "sqnr of layers" in page
    assert "sqnr/wgrad_g" in page


@pytest.mark.fast("-1")
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch")
@pytest.mark.parametrize("order", [1, -1])
def test_a_resumed_report_has_points_that_were_not_read_when_it_was_saved(tmp_path, order):
    class Save(Callback):
        def on_train_batch_end(self, run, *_):
            if run.global_step == 2:
                run.save_checkpoint(tmp_path / "two.ckpt")

    def watched():
        return [RunReport(), QuantizationMonitor(weights=False)][::order]

    trainer(*watched(), Save(), log_every_n_steps=1).fit(Two())
    trainer(*watched(), log_every_n_steps=1).fit(Two(), ckpt_path=tmp_path / "two.ckpt", weights_only=False)
    for path in tmp_path.rglob("run.json"):
        points = json.loads(path.read_text())["history"]["sqnr/fprop_x/layer.2"]
        assert [step for step, _ in points] == [1, 2, 3, 4]


def test_means_are_there_for_other_callbacks():
    seen = []

    class Looks(Callback):
        def on_train_batch_end(self, trainer, *_):
            seen.append({name for name in trainer.callback_metrics if name.split("/")[0] in NAMES})

    trainer(QuantizationMonitor(), Looks(), max_steps=2).fit(Two())
    assert seen == [set(), {f"{name}/{operand}" for name in MEANS for operand in OPERANDS}]


def test_without_converted_layers_nothing_is_logged_and_a_line_says_so(told):
    run = trainer(QuantizationMonitor(), plugin=None)
    run.fit(Two())
    line = "QuantizationMonitor has nothing to log: no layer is converted by a LowBitPrecision plugin."
    assert told.messages.count(line) == 1
    assert logged(run) == {}
    assert not any("/" in name for name in run.callback_metrics)


def test_reported():
    monitor = QuantizationMonitor(weights=False)
    run = trainer(monitor)
    assert monitor.report_data(run)["quantized_operands"] == {"step": 0, "layers": {}}
    run.fit(Two())
    last = of_layers(logged(run)[3])
    data = monitor.report_data(run)["quantized_operands"]
    assert data["step"] == 4
    assert set(last) == set(PLACES)
    for (layer, operand), numbers in last.items():
        assert data["layers"][layer][operand] == pytest.approx(numbers, rel=1e-6)
    section = monitor.report_sections(run)[0]
    assert section.title == "Quantized operands"
    picture, table = section.blocks
    assert (list(picture.rows), list(picture.columns)) == (LAYERS, list(OPERANDS))
    assert "At step 4" in picture.caption
    for layer, row in zip(picture.rows, picture.values, strict=True):
        expected = [last.get((layer, operand), {}).get("sqnr") for operand in picture.columns]
        assert row == [None if value is None else pytest.approx(value) for value in expected]
    assert [row[0] for row in table.rows] == list(OPERANDS)
    for operand, underflow, saturation, least, largest in table.rows:
        of_one = [numbers for (_, name), numbers in last.items() if name == operand]
        assert float(underflow.strip("%")) / 100 == pytest.approx(max(n["underflow"] for n in of_one), abs=1e-4)
        assert float(saturation.strip("%")) / 100 == pytest.approx(max(n["saturation"] for n in of_one), abs=1e-4)
        assert float(least) == pytest.approx(min(n["scale_min"] for n in of_one), rel=1e-2)
        assert float(largest) == pytest.approx(max(n["scale_max"] for n in of_one), rel=1e-2)
