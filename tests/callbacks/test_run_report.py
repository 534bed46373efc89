"""Reports of real runs: what is recorded, at which step, and that a report never stands in the way."""

import json
import logging
import math
import re
import statistics
import warnings
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from lightning_lowbit import FP4Precision, LinearCasts, PrecisionSummary, PrecisionSwitch, QAFSwitch
from lightning_lowbit.callbacks.run_report import RunReport
from lightning_lowbit.nn import OPERANDS
from lightning_lowbit.nn.presets import PRESETS
from lightning_lowbit.report import history as run_history
from lightning_lowbit.report import page as run_page
from lightning_lowbit.report.cast_words import in_words
from lightning_lowbit.report.history import History
from lightning_lowbit.report.html import Section, Table, Text
from tests.lightnings import (
    BoringModel,
    Callback,
    Checkpoint,
    CSVLogger,
    DummyLogger,
    LearningRateMonitor,
    ModelCheckpoint,
    SaveConfigCallback,
    SIGTERMException,
    TensorBoardLogger,
    Trainer,
)
from tests.report.test_html import EVIL, check_self_contained


class Known(BoringModel):
    """Logs values that say in which optimizer step they were logged: the k-th step logs k."""

    def __init__(self, lr=1.0, fail_at=None, error=RuntimeError):
        super().__init__()
        self.save_hyperparameters(ignore="error")
        self.lr, self.fail_at, self.error = lr, fail_at, error

    def training_step(self, batch, batch_idx):
        self.k = self.trainer.global_step + 1
        if self.k == self.fail_at:
            raise self.error(EVIL)
        self.log("loss", torch.tensor(float(self.k)), on_step=True, on_epoch=True)
        self.log("epoch_only", torch.tensor(float(self.k)), on_step=False, on_epoch=True, reduce_fx="max")
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer):
        self.log("grad_norm", torch.tensor(float(self.k)))

    def on_train_batch_end(self, *_):
        self.log("tokens/s", torch.tensor(100.0 * self.k))  # after the callbacks' hooks of this name

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", torch.tensor(1.0 + abs(self.trainer.global_step - 4)))
        self.log("val_acc", torch.tensor(0.1))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr * 1e-3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: done + 1)  # step k has k·lr·1e-3
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def trainer(*callbacks, report=None, **kwargs):
    defaults = {
        "max_steps": 6,
        "log_every_n_steps": 1,
        "limit_val_batches": 1,
        "val_check_interval": 2,
        "check_val_every_n_epoch": None,
        "logger": False,
        "enable_checkpointing": any(isinstance(callback, Checkpoint) for callback in callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "plugins": [FP4Precision()],
    }
    return Trainer(accelerator="cpu", callbacks=[*callbacks, report or RunReport()], **{**defaults, **kwargs})


def load(folder="."):
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return json.loads((Path(folder) / "run.json").read_text(), parse_constant=refuse)


def steps(run, name):
    return [step for step, _ in run["history"][name]]


# --- a run and its report ---------------------------------------------------------------------------------------------


def test_a_finished_run():
    trainer(QAFSwitch(step=4)).fit(Known())
    run = load()
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
    page = check_self_contained(Path("report.html").read_text())
    assert "Validation loss3at step 6; best 1 at step 4" in page.text, "the last value, and beside it the best"
    assert re.search(r"Training loss\S+at step 6", page.text)
    for text in ("finished", "fqt 0–4", "qaf 4–6", "grad_norm", "tokens/s, median", "lr: 1.0"):
        assert text in page.text, text
    assert "Traceback" not in page.text
    assert not list(Path().glob(".*")), "a temporary file stayed"


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

    trainer().fit(Rare())
    assert steps(load(), "grad_norm") == [2, 5]


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

    trainer().fit(Groups())
    metrics = load()["metrics"]
    assert metrics["lr-SGD"] == 0.1
    assert metrics["lr-SGD/pg2"] == 0.2


def test_what_was_not_logged_is_said():
    trainer(plugins=[], max_steps=2).fit(BoringModel())
    page, run = check_self_contained(Path("report.html").read_text()).text, load()
    for text in ("No training loss", "No validation loss", "No gradient norm", "No throughput", "no saved hyper"):
        assert text in page
    assert run["phases"] == []
    assert run["precision"] == {"plugin": "Precision", "casts": "32-true"}


class Layers(Known):
    """Logs metrics of 30 layers, and 30 others."""

    def on_before_optimizer_step(self, optimizer):
        for i in range(30):
            for operand in ("fprop_x", "fprop_w", "wgrad_g"):
                self.log(f"sqnr/{operand}/layers.{i}.up", torch.tensor(float(i)))
            self.log(f"flips/fprop_w/layers.{i}.up", torch.tensor(float(i)))
            self.log(f"part.{i}", torch.tensor(float(i + self.k)))


def test_layers_of_one_quantity_share_a_chart(monkeypatch):
    monkeypatch.setattr(run_page, "MOST_CHARTS", 20)
    trainer(max_steps=2).fit(Layers())
    page = check_self_contained(Path("report.html").read_text())
    assert page.text.count("30 series of layers; lowest and highest in the end:0.up 029.up 29") == 1, "of flips"
    assert "14 more are in run.json: part.26, part.27" in page.text
    assert page.count("svg") < 30


def test_quantities_of_layers_have_sections_of_their_own():
    trainer(max_steps=2).fit(Layers())
    page = check_self_contained(Path("report.html").read_text())
    titles = re.findall(r"<h2>(.*?)</h2>(.*?)</section>", Path("report.html").read_text(), re.DOTALL)
    drawn = {title: re.findall("<strong>(.*?)</strong>", body) for title, body in titles}
    assert drawn["sqnr of layers"] == ["sqnr/fprop_x", "sqnr/fprop_w", "sqnr/wgrad_g"], "in the order of logging"
    assert drawn["Metrics of layers"] == ["flips/fprop_w"], "few charts share a section"
    assert drawn["Other metrics"][0] == "part.0"
    assert page.text.count("30 series of layers; lowest and highest in the end:0.up 029.up 29") == 4


def test_what_monitors_log_is_neither_the_loss_nor_its_own_norm():
    class Monitored(BoringModel):
        def on_before_optimizer_step(self, optimizer):
            step = float(self.trainer.global_step)
            for name in ("loss_scale/scale", "grad_norm/spikes", "grad_norm/unclipped/layer", "grad_norm/used"):
                self.log(name, torch.tensor(1024.0 if name == "loss_scale/scale" else step))
            self.log("grad_norm/unclipped", torch.tensor(step + 1))

    trainer(max_steps=2, plugins=[]).fit(Monitored())
    text = check_self_contained(page := Path("report.html").read_text()).text
    assert "No training loss was logged" in text
    assert "loss_scale/scale1,024" in text, "a constant needs no chart"
    assert "No gradient norm" not in text
    drawn = re.findall("<strong>(.*?)</strong>", page)
    assert drawn == ["grad_norm", "lr-SGD", "grad_norm/spikes", "grad_norm/unclipped"]
    assert "grad_normunclipped 2used 1" in re.sub(r" +", " ", text)


# --- ends of a run ----------------------------------------------------------------------------------------------------


def test_an_exception_is_reported_and_stays():
    with pytest.raises(RuntimeError, match="alert"):
        trainer().fit(Known(fail_at=4))
    run, page = load(), check_self_contained(Path("report.html").read_text())
    assert (run["status"], run["steps"], run["error"]) == ("failed", 3, f"RuntimeError: {EVIL}")
    assert steps(run, "loss") == [1, 2, 3]
    assert run["history"]["tokens/s"] == [[1, 100.0], [2, 200.0], [3, 300.0]]
    assert "Traceback" in page.text
    assert page.text.count(EVIL) >= 2


@pytest.mark.parametrize("signal", [KeyboardInterrupt, SIGTERMException])
def test_signals_are_interruptions(signal):
    with pytest.raises(SystemExit):
        trainer().fit(Known(fail_at=4, error=signal))
    assert load()["status"] == "interrupted"
    assert "Traceback" not in Path("report.html").read_text()


@pytest.mark.parametrize("hook", ["setup", "on_train_start", "on_train_batch_start"])
def test_an_exception_before_the_first_step(hook):
    class Fails(Callback):
        pass

    def fail(*_, **__):
        raise RuntimeError("early")

    setattr(Fails, hook, fail)
    with pytest.raises(RuntimeError, match="early"):
        trainer(Fails()).fit(Known())
    if hook == "on_train_batch_start":
        assert (load()["status"], load()["steps"], load()["history"]) == ("failed", 0, {})
    else:
        assert not list(Path().iterdir()), "training never began: there is nothing to report"


@pytest.mark.parametrize("fail_at", [None, 4])
def test_a_report_that_cannot_be_written_is_a_warning(fail_at):
    Path("root").write_text("a file where a folder should be")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", "The '.*_dataloader' does not have many workers")
        if fail_at:
            with pytest.raises(RuntimeError, match="alert"):
                trainer(default_root_dir="root").fit(Known(fail_at=fail_at))
        else:
            trainer(default_root_dir="root").fit(Known())
    with pytest.warns(UserWarning, match="RunReport could not be written: FileExistsError"):
        trainer(default_root_dir="root").fit(Known())
    assert not list(Path().glob(".*"))


def test_values_that_cannot_be_read_any_more_are_given_up(monkeypatch):
    class Lost(RunReport):
        def on_train_batch_start(self, trainer, *args):
            super().on_train_batch_start(trainer, *args)
            if trainer.global_step == 3:  # a meta tensor has no value, like one on a device that has failed
                self._history.add("lost", 4, torch.empty((), device="meta"))

    monkeypatch.setattr(run_history, "_MOST_PENDING", 14)  # those of the first three steps
    monkeypatch.setattr(run_history, "_STEPS_PENDING", 0)
    with pytest.raises(RuntimeError, match="alert"):
        trainer(report=Lost()).fit(Known(fail_at=5))
    assert (load()["status"], load()["steps"]) == ("failed", 4)
    assert steps(load(), "loss") == [1, 2, 3]
    assert "alert" in Path("report.html").read_text()


def test_no_more_than_fit_is_reported():
    report, model = RunReport(), Known()
    run_trainer = trainer(report=report)
    run_trainer.fit(model)
    before = Path("run.json").read_text()
    run_trainer.validate(model, verbose=False)
    model.on_validation_epoch_end = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        run_trainer.validate(model, verbose=False)
    assert Path("run.json").read_text() == before


def test_a_dry_run_writes_nothing():
    trainer(fast_dev_run=True).fit(Known())
    assert not list(Path().glob("r*"))


def test_one_callback_in_two_runs():
    report = RunReport()
    trainer(report=report).fit(Known())
    trainer(report=report, max_steps=3).fit(Known())
    assert steps(load("version_1"), "loss") == [1, 2, 3]
    assert load("version_1")["phases"] == [[0, 3, "fqt"]]
    assert steps(load(), "loss") == [1, 2, 3, 4, 5, 6], "the report of the first run is gone"


class Elsewhere(DummyLogger):
    """A logger with one folder for all runs, as most have."""

    save_dir = "elsewhere"


@pytest.mark.parametrize(("logger", "root"), [(lambda: False, "."), (Elsewhere, "elsewhere")])
def test_runs_without_folders_of_their_own_do_not_overwrite_each_other(logger, root, caplog, monkeypatch):
    for name in ("lightning.pytorch", "lightning.fabric"):  # either may be the one of rank_zero_info
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
    caplog.set_level(logging.INFO)
    folders = [Path(root), Path(root) / "version_1", Path(root) / "version_2"]
    for steps_taken, folder in zip((3, 4, 5), folders, strict=True):
        caplog.clear()
        summary = PrecisionSummary(quiet=True)
        trainer(summary, logger=logger(), max_steps=steps_taken, limit_val_batches=0).fit(Known())
        assert (folder / "report.html").exists()
        assert ("holds the files of another run" in caplog.text) == (folder != folders[0])
        assert (folder / summary.filename).exists() == (root != "."), "without a logger it is not written"
    assert [load(folder)["steps"] for folder in folders] == [3, 4, 5]
    assert load(folders[1])["name"] == f"{folders[0].resolve().name}/version_1"
    assert not list(Path(root).rglob("version_3"))


def test_another_run_from_the_checkpoint_of_one_that_ended_leaves_its_report():
    trainer(SaveEarly("on_train_batch_end", 3)).fit(Ordered())
    for _ in range(2):
        trainer().fit(Ordered(), ckpt_path="x.ckpt", weights_only=True)
    runs = [load(folder) for folder in (".", "version_1", "version_2")]
    assert [(run["begin"], run["steps"]) for run in runs] == [(0, 6), (3, 6), (3, 6)]
    assert len({run["id"] for run in runs}) == 1


# --- resuming ---------------------------------------------------------------------------------------------------------


class Ordered(Known):
    """Its loader can be resumed, so that Lightning does not warn."""

    def train_dataloader(self):
        class Loader(DataLoader):
            def state_dict(self):
                return {}

            def load_state_dict(self, state):
                pass

        return Loader(torch.randn(64, 32))


class SaveEarly(Callback):
    """Saves at a step in one of the hooks, before the report's turn."""

    def __init__(self, hook, step):
        self.step = step
        setattr(self, hook, self.save)

    def save(self, trainer, *_):
        if trainer.global_step == self.step:
            trainer.save_checkpoint("x.ckpt")


class SaveLate(SaveEarly, Checkpoint):
    """Lightning puts a ``Checkpoint`` last."""


@pytest.mark.parametrize("saver", [SaveEarly, SaveLate])
@pytest.mark.parametrize(("hook", "saved_at"), [("on_train_batch_end", 3), ("on_validation_end", 4)])
def test_a_resumed_run_shows_the_whole_once(hook, saved_at, saver):
    with pytest.raises(RuntimeError):
        trainer(QAFSwitch(step=2), saver(hook, saved_at)).fit(Ordered(fail_at=6))
    seconds = load()["seconds"]
    state = torch.load("x.ckpt", weights_only=True)["callbacks"]["RunReport"]
    assert 0 < state["seconds"] <= seconds
    trainer(QAFSwitch(step=2), max_steps=8).fit(Ordered(), ckpt_path="x.ckpt", weights_only=True)
    run = load()
    assert run["history"]["loss"] == run["history"]["grad_norm"] == [[k, float(k)] for k in range(1, 9)]
    assert [rate for _, rate in run["history"]["lr-SGD"]] == pytest.approx([k * 1e-3 for k in range(1, 9)])
    assert run["history"]["val_loss"] == [[k, 1.0 + abs(k - 4)] for k in (2, 4, 6, 8)]
    assert run["phases"] == [[0, 2, "fqt"], [2, 8, "qaf"]]
    assert run["best"] == {"val_loss": 1.0}
    assert run["seconds"] > state["seconds"]
    # The first checkpoint was written before the module logged this one, at the very end of the step.
    missing = saved_at if hook == "on_train_batch_end" else None
    assert run["history"]["tokens/s"] == [[k, 100.0 * k] for k in range(1, 9) if k != missing]


def test_a_longer_run_on_one_trainer():
    run_trainer, model = trainer(max_steps=3), Known()
    run_trainer.fit(model)
    run_trainer.fit_loop.epoch_loop.max_steps = 6
    run_trainer.fit(model)
    assert steps(load(), "loss") == [1, 2, 3, 4, 5, 6]


# --- where, and how it is configured ----------------------------------------------------------------------------------


def test_beside_the_logs(tmp_path):
    logger = TensorBoardLogger(tmp_path / "logs", name="demo")
    folder = tmp_path / "logs" / "demo" / "version_0"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("password: hunter2 # <b>")
    logger._version = 0
    trainer(logger=logger).fit(Known())
    assert load(folder)["name"] == "demo/version_0"
    page = check_self_contained((folder / "report.html").read_text())
    assert "hunter2" not in page.text, "a file that the run did not write was shown"

    class Saved(SaveConfigCallback):
        def __init__(self):
            pass

        def setup(self, *_, **__):
            pass

    trainer(Saved(), logger=logger).fit(Known())
    page = check_self_contained((folder / "report.html").read_text())
    assert "password: hunter2 # <b>" in page.text


def test_into_the_default_root_dir(tmp_path):
    trainer(report=RunReport("x.html"), default_root_dir=tmp_path / "root").fit(Known())
    assert sorted(path.name for path in (tmp_path / "root").iterdir()) == ["run.json", "x.html"]


def test_not_into_a_store_elsewhere():
    with pytest.warns(UserWarning, match="local folders alone, and nothing into memory://root"):
        trainer(default_root_dir="memory://root").fit(Known())
    assert not list(Path().iterdir())


@pytest.mark.parametrize("filename", ["report", ".html", "a/report.html", "a\\report.html"])
def test_filenames(filename):
    with pytest.raises(ValueError, match="ends in .html, without folders; got"):
        RunReport(filename)


def test_best_of_what_a_callback_monitors(tmp_path):
    trainer(ModelCheckpoint(tmp_path, monitor="val_acc", mode="max")).fit(Known())
    assert load()["best"] == {"val_loss": 1.0, "val_acc": pytest.approx(0.1)}


# --- what other callbacks contribute ----------------------------------------------------------------------------------


class Contributes(Callback):
    def __init__(self, name, fails=False):
        self.name, self.fails = name, fails

    @property
    def state_key(self):
        return self.name

    def report_sections(self, trainer):
        if self.fails:
            raise RuntimeError(f"{self.name} has no sections")
        yield Section(self.name, [Text(EVIL), Table(["layer"], [[EVIL]])])

    def report_data(self, trainer):
        if self.fails:
            raise RuntimeError(f"{self.name} has no data")
        return {self.name: {"share": torch.tensor(0.5), "bad": math.nan, "list": (1, None, True, Path("x"))}}


def test_alerts_come_first():
    class Alarmed(Contributes):
        def report_alerts(self, trainer):
            return [f"{self.name} is wrong {EVIL}"]

    class Convolutional(Known):
        def __init__(self):
            super().__init__()
            self.convolution = torch.nn.Conv1d(1, 64, 9)

        def training_step(self, batch, batch_idx):
            return super().training_step(batch + self.convolution(batch[:, None]).mean(), batch_idx)

    trainer(Alarmed("Alpha"), Alarmed("Omega")).fit(Convolutional())
    page, run = check_self_contained(Path("report.html").read_text()).text, load()
    little, *others = run["alerts"]
    assert "Conv1d (a convolution), such as convolution" in little
    assert run["coverage"] < 0.5
    assert others == [f"Alpha is wrong {EVIL}", f"Omega is wrong {EVIL}"]
    places = [page.index(text) for text in ("Alerts", little, *others, "Optimization")]
    assert places == sorted(places)
    trainer(default_root_dir="fine").fit(Known())
    assert "Alerts" not in check_self_contained(Path("fine/report.html").read_text()).text


def test_casts_are_explained():
    trainer(max_steps=1).fit(Known())
    page = check_self_contained(Path("report.html").read_text()).text
    words = "elements in e2m1, rounded stochastically; one scale in e4m3 for each 16 elements along the contraction; "
    assert f"e2m1/e4m3:1x16+fp32~{words}another scale in fp32 for the tensor" in page


def test_every_preset_is_explained():
    for preset in PRESETS:
        casts = LinearCasts.preset(preset)
        for operand in OPERANDS:
            cast = casts.cast_of(operand)
            if cast is not None:
                text = in_words(cast)
                assert cast.element in text
                assert cast.scale.format in text
                assert ("stochastic" in text) == str(cast).endswith("~")


def test_throughput_while_compiling_does_not_stretch_the_axis():
    class Compiles(Known):
        def on_train_batch_end(self, *_):
            self.log("tokens/s", torch.tensor(10.0 * self.k if self.k < 3 else 1000.0 + self.k))

    trainer().fit(Compiles())
    page = check_self_contained(Path("report.html").read_text())
    assert "Not drawn, since a run begins with compiling: 10 at step 1, 20 at step 2." in page.text
    assert [value for _, value in load()["history"]["tokens/s"]][:2] == [10.0, 20.0], "run.json has all"
    trainer(default_root_dir="fine").fit(Known())
    assert "Not drawn" in check_self_contained(Path("fine/report.html").read_text()).text, "100 where 350 is usual"


def test_sections_and_data_of_other_callbacks():
    trainer(Contributes("Alpha"), Contributes("broken", fails=True), Contributes("Omega")).fit(Known())
    page, run = check_self_contained(Path("report.html").read_text()).text, load()
    places = [page.index(text) for text in ("Other metrics", "Alpha", "Omega", "Environment", "Configuration")]
    assert places == sorted(places)
    assert "broken has no sections" in page
    assert "broken has no data" in page
    expected = {"share": 0.5, "bad": None, "list": [1, None, True, "x"]}
    assert run["summary"] == {"Alpha": expected, "Omega": expected}


# --- values -----------------------------------------------------------------------------------------------------------


def test_names_and_values_of_any_kind():
    class Odd(Known):
        def training_step(self, batch, batch_idx):
            self.log(EVIL, torch.tensor(1.0))
            self.log("breaks", torch.tensor(math.inf if self.trainer.global_step >= 3 else 2.0))
            self.log("half", torch.tensor(0.5, dtype=torch.bfloat16))
            self.log("double", torch.tensor(0.1, dtype=torch.float64))
            return super().training_step(batch, batch_idx)

    trainer().fit(Odd())
    run, page = load(), check_self_contained(Path("report.html").read_text())
    assert run["history"]["breaks"] == [[1, 2.0], [2, 2.0], [3, 2.0], [4, None], [5, None], [6, None]]
    assert (run["metrics"]["breaks"], run["metrics"]["half"], run["metrics"]["double"]) == (None, 0.5, 0.1)
    assert "3 values not finite, first at step 4" in page.text
    assert EVIL in page.text


def test_a_history_is_bounded_and_evenly_thinned():
    history = History()
    for step in range(1, 10_001):
        history.add("a", step, torch.tensor(float(step if step != 4321 else -1)))
    points = history.points()["a"]
    found = [step for step, _ in points]
    assert 900 < len(points) <= run_history.MOST_POINTS
    assert (found[0], found[-1]) == (1, 10_000)
    gaps = [b - a for a, b in zip(found, found[1:], strict=False)]
    assert max(gaps) <= 4 * statistics.median(gaps)
    assert history.extremes["a"] == (-1.0, 10_000.0), "the best value is lost with its point"
    other = History()
    other.load_state_dict(history.state_dict())
    assert other.points() == history.points()
    assert not other.add("a", 10_000, torch.tensor(0.0))
    assert other.add("a", 10_001, torch.tensor(0.0))


def test_metrics_of_many_layers_share_a_bound(monkeypatch):
    monkeypatch.setattr(run_history, "MOST_OF_LAYERS", 2000)
    history = History()
    for step in range(1, 1001):
        history.add("loss", step, torch.tensor(0.0))
        for layer in range(10):
            history.add(f"sqnr/fprop_x/{layer}", step, torch.tensor(float(step)))
    points = history.points()
    assert len(points.pop("loss")) == 1000
    assert {points[name][-1] for name in points} == {(1000, 1000.0)}
    assert {100 <= len(of_layer) <= 200 for of_layer in points.values()} == {True}, "2000 points for 10 layers"


def test_hundreds_of_metrics_are_not_copied_in_each_step(monkeypatch):
    history, copies = History(), []
    monkeypatch.setattr(History, "_convert", lambda self: (copies.append(len(self._pending)), self._pending.clear()))
    for step in range(1, 13):
        for layer in range(300):
            history.add(f"sqnr/fprop_x/{layer}", step, torch.tensor(0.0))
    assert copies == [1200, 1200, 1200]


def test_later_changes_do_not_reach_what_is_recorded():
    history, value = History(), torch.tensor([3.0], requires_grad=True)
    history.add("a", 1, value)
    value.data.zero_()
    assert history.points() == {"a": [(1, 3.0)]}


class NoSync(TorchDispatchMode):
    """Refuses what makes the host wait for a device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default), func
        return func(*args, **(kwargs or {}))


NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("accelerator", ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])
def test_recording_waits_for_no_device(accelerator):
    hooks = ["on_train_batch_start", "on_train_batch_end", "on_train_epoch_end", "on_validation_start"]

    def watched(hook):
        def method(self, *args):
            with NoSync():
                mode = torch.cuda.get_sync_debug_mode() if accelerator == "cuda" else None
                if mode is not None:
                    torch.cuda.set_sync_debug_mode("error")
                try:
                    getattr(RunReport, hook)(self, *args)
                finally:
                    if mode is not None:
                        torch.cuda.set_sync_debug_mode(mode)

        return method

    report_class = type("Watched", (RunReport,), {hook: watched(hook) for hook in [*hooks, "on_validation_end"]})

    class OnDevice(Known):
        def training_step(self, batch, batch_idx):
            self.log("level", batch.mean())
            return super().training_step(batch, batch_idx)

    options = {"accelerator": accelerator, "devices": 1, "max_steps": 6, "log_every_n_steps": 1, "limit_val_batches": 1}
    quiet = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
    Trainer(callbacks=[report_class()], plugins=[FP4Precision()], **options, **quiet).fit(OnDevice())
    assert steps(load(), "level") == [1, 2, 3, 4, 5, 6]
    with pytest.raises(AssertionError), NoSync():
        torch.ones(()).item()


def test_two_processes_write_one_report(tmp_path):
    class Shared(Known):
        def training_step(self, batch, batch_idx):
            self.k = self.trainer.global_step + 1
            self.log("rank", torch.tensor(float(self.trainer.global_rank)), on_step=True, on_epoch=True, sync_dist=True)
            return BoringModel.training_step(self, batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", torch.tensor(float(self.trainer.global_rank)), sync_dist=True)

    logger = CSVLogger(tmp_path, name=None)
    trainer(devices=2, strategy="ddp_fork", logger=logger, max_steps=4, limit_train_batches=2).fit(Shared())
    assert len(list(tmp_path.rglob("run.json"))) == len(list(tmp_path.rglob("report.html"))) == 1
    run = load(tmp_path / "version_0")
    assert run["environment"]["processes"] == 2
    assert run["history"]["rank"] == [[k, 0.5] for k in range(1, 5)]
    assert run["history"]["val_loss"] == [[2, 0.5], [4, 0.5]]
