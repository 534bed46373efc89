"""A run and its report: the page and the files beside it."""

import re
from pathlib import Path

import pytest
import torch

from lightning_lowbit import PrecisionSummary, PrecisionSwitch, QAFSwitch
from lightning_lowbit.callbacks.run_report import RunReport
from tests.callbacks.run_report.runs import Known, both, load, page, steps, trainer
from tests.lightning_imports import BoringModel, CSVLogger, LearningRateMonitor, ModelCheckpoint
from tests.precision.regression_model import On


def test_a_finished_run():
    run, text = both(None, QAFSwitch(step=4))
    assert (run["status"], run["steps"], run["max_steps"], run["error"]) == ("finished", 6, 6, None)
    assert run["name"] == Path.cwd().name
    assert run["phases"] == [[0, 4, "fqt"], [4, 6, "qaf"]]
    assert run["best"] == {"val_loss": 1.0}
    assert run["metrics"]["val_loss"] == 3.0
    assert 0 < run["seconds"] < 60
    assert run["peak_memory_bytes"] > 2**20
    assert run["precision"] == {"plugin": "FP4Precision", "casts": "nvfp4"}
    assert run["environment"]["torch"] == torch.__version__
    assert run["environment"]["strategy"] == "SingleDeviceStrategy"
    assert "Validation loss3at step 6; best 1 at step 4" in text, "the last value, and beside it the best"
    assert re.search(r"Training loss\S+at step 6", text)
    for part in ("finished", "fqt 0–4", "qaf 4–6", "grad_norm", "tokens/s, median", "lr: 1.0"):
        assert part in text, part
    words = "elements in e2m1, rounded stochastically; one scale in e4m3 for each 16 elements along the contraction; "
    assert f"e2m1/e4m3:1x16+fp32~{words}another scale in fp32 for the tensor" in text, "casts are not explained"
    assert "Traceback" not in text and "Alerts" not in text
    assert not list(Path().glob(".*")), "a temporary file stayed"


@pytest.mark.fast("monitor1")
@pytest.mark.parametrize("monitor", [[], ["before"], ["after"]])
def test_each_value_belongs_to_its_step(monitor, tmp_path):
    rates = [LearningRateMonitor()] if monitor == ["before"] else []
    report = RunReport()
    loggers = CSVLogger(tmp_path, name=None) if monitor else False
    run_trainer = trainer(*rates, report=report, logger=loggers, limit_train_batches=4)
    run_trainer.callbacks += [LearningRateMonitor()] if monitor == ["after"] else []
    run_trainer.fit(Known())
    run = load(tmp_path / "version_0" if monitor else ".")
    every = list(range(1, 7))
    assert run["history"]["loss"] == run["history"]["grad_norm"] == [[k, float(k)] for k in every]
    assert run["history"]["tokens/s"] == [[k, 100.0 * k] for k in every]
    assert [step for step, _ in run["history"]["lr-SGD"]] == every
    assert [rate for _, rate in run["history"]["lr-SGD"]] == pytest.approx([k * 1e-3 for k in every])
    assert run["history"]["val_loss"] == [[2, 3.0], [4, 1.0], [6, 3.0]]
    assert run["history"]["epoch_only"] == [[4, 4.0], [6, 6.0]]
    assert not [name for name in run["history"] if name.endswith(("_step", "_epoch"))]


def test_a_step_that_is_logged_because_the_run_stops_has_no_rate_of_another():
    stop = On(on_train_batch_end=lambda trainer, *_: setattr(trainer, "should_stop", trainer.global_step == 5))
    trainer(stop, log_every_n_steps=3, limit_val_batches=0).fit(Known())
    run = load()
    assert [step for step, _ in run["history"]["loss"]] == [3, 5]
    assert run["history"]["lr-SGD"] == [[3, pytest.approx(3e-3)]]


def test_values_that_are_logged_after_the_reports_turn_are_those_of_the_step():
    run = trainer(ModelCheckpoint(".", "x", every_n_train_steps=4), log_every_n_steps=2, limit_val_batches=0)
    late = On(on_train_batch_end=lambda trainer, model, *_: model.log("late", float(trainer.global_step)))
    run.callbacks.insert(1, late)
    run.fit(Known())
    assert load()["history"]["late"] == [[k, k] for k in (2, 4, 6)]
    assert load()["history"]["tokens/s"] == [[k, 100.0 * k] for k in (2, 4, 6)]
    points = torch.load("x.ckpt", weights_only=True)["callbacks"]["RunReport"]["history"]["points"]
    assert points["late"].tolist() == [[2, 2], [4, 4]] and points["tokens/s"].tolist() == [[2, 200]]


def test_only_log_steps_and_whole_optimizer_steps():
    trainer(log_every_n_steps=2, accumulate_grad_batches=3, val_check_interval=6).fit(Known())
    run = load()
    assert run["history"]["loss"] == run["history"]["grad_norm"] == [[k, float(k)] for k in (2, 4, 6)]
    assert run["history"]["tokens/s"] == [[k, 100.0 * k] for k in (2, 4, 6)]
    assert steps(run, "val_loss") == [2, 4, 6]
    assert run["phases"] == [[0, 6, "fqt"]]


def test_a_value_that_was_not_logged_again_is_no_new_one():
    class Rare(Known):
        def on_before_optimizer_step(self, optimizer):
            if self.k in (2, 5):
                self.log("grad_norm", torch.tensor(1.0))

    assert steps(both(Rare())[0], "grad_norm") == [2, 5]


def test_manual_optimization_counts_each_optimizer():
    class Manual(BoringModel):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(self.layer(batch).mean())
                optimizer.step()
            self.log("loss", torch.tensor(float(self.trainer.global_step)))

        def configure_optimizers(self):
            return [torch.optim.SGD(self.parameters(), rate) for rate in (0.1, 0.2)]

    trainer(PrecisionSwitch("bf16", step=4), max_steps=8, val_check_interval=None, limit_val_batches=0).fit(Manual())
    run = load()
    assert run["history"]["loss"] == [[k, float(k)] for k in (2, 4, 6, 8)]
    assert run["history"]["lr-SGD"] == [[k, 0.1] for k in (2, 4, 6, 8)]
    assert run["history"]["lr-SGD-1"] == [[k, 0.2] for k in (2, 4, 6, 8)]
    assert run["phases"] == [[0, 4, "fqt"], [4, 8, "bf16"]]


def test_learning_rates_of_groups_that_differ():
    class Groups(Known):
        def configure_optimizers(self):
            groups = [{"params": [p], "lr": lr} for p, lr in zip(self.parameters(), (0.1, 0.2), strict=True)]
            return torch.optim.SGD(groups)

    metrics = both(Groups())[0]["metrics"]
    assert (metrics["lr-SGD"], metrics["lr-SGD/pg2"]) == (0.1, 0.2)


def test_what_was_not_logged_is_said():
    run, text = both(BoringModel(), plugins=[], max_steps=2)
    for part in ("No training loss", "No validation loss", "No gradient norm", "No throughput", "no saved hyper"):
        assert part in text
    assert run["phases"] == []
    assert run["precision"] == {"plugin": "Precision", "casts": "32-true"}


class Layers(Known):
    """Logs metrics of 30 layers, and others."""

    def __init__(self, others=30):
        super().__init__()
        self.others = others

    def on_before_optimizer_step(self, optimizer):
        for i in range(30):
            for operand in ("fprop_x", "fprop_w", "wgrad_g"):
                self.log(f"sqnr/{operand}/layers.{i}.up", torch.tensor(float(i)))
            self.log(f"flips/fprop_w/layers.{i}.up", torch.tensor(float(i)))
        for i in range(self.others):
            self.log(f"part.{i}", torch.tensor(float(i + self.k)))


SERIES = "30 series of layers; lowest and highest in the end:0.up 029.up 29"


def test_layers_of_one_quantity_share_a_chart_and_there_are_sixty_at_most():
    _, text = both(Layers(70), max_steps=2)
    assert text.count(SERIES) == 1, "of flips"
    assert "14 more are in run.json: part.62, part.63" in text
    assert page()[1].count("<svg") < 70


def test_quantities_of_layers_have_sections_of_their_own_behind_the_coverage():
    run, text = both(Layers(), PrecisionSummary(quiet=True), max_steps=2)
    assert text.count(SERIES) == 4
    source = page()[1]
    titles = re.findall("(<summary>)?<h2>(.*?)</h2>(.*?)</section>", source, re.DOTALL)
    drawn = {title: re.findall("<strong>(.*?)</strong>", body) for _, title, body in titles}
    assert drawn["sqnr of layers"] == ["sqnr/fprop_x", "sqnr/fprop_w", "sqnr/wgrad_g"], "in the order of logging"
    assert drawn["Metrics of layers"] == ["flips/fprop_w"], "few charts share a section"
    assert drawn["Other metrics"][0] == "part.0"
    assert [title for folded, title, _ in titles if folded] == ["Metrics of layers", "sqnr of layers"]
    names = list(drawn)
    assert names.index("Other metrics") < names.index("Coverage") < names.index("Metrics of layers")
    assert source.count("<details>") == source.count("</details>") == 2
    assert f"<dt>Coverage</dt><dd>{run['coverage']:.1%}<small>of FLOPs have two quantized operands" in source


def test_what_monitors_log_is_neither_the_loss_nor_its_own_norm():
    class Monitored(BoringModel):
        def on_before_optimizer_step(self, optimizer):
            step = float(self.trainer.global_step)
            for name in ("loss_scale/scale", "grad_norm/spikes", "grad_norm/unclipped/layer", "grad_norm/used"):
                self.log(name, torch.tensor(1024.0 if name == "loss_scale/scale" else step))
            self.log("grad_norm/unclipped", torch.tensor(step + 1))

    _, text = both(Monitored(), max_steps=2, plugins=[])
    assert "No training loss was logged" in text
    assert "loss_scale/scale1,024" in text, "a constant needs no chart"
    assert "No gradient norm" not in text
    drawn = re.findall("<strong>(.*?)</strong>", page()[1])
    assert drawn == ["grad_norm", "lr-SGD", "grad_norm/spikes", "grad_norm/unclipped"]
    assert "grad_normunclipped 2used 1" in re.sub(r" +", " ", text)
