"""Reports of runs that end early, are resumed, or share a folder."""

import warnings
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_lowbit import PrecisionSummary, QAFSwitch
from lightning_lowbit.callbacks.run_report import RunReport
from lightning_lowbit.report import history as run_history
from tests.callbacks.run_report.runs import Known, load, page, steps, trainer
from tests.lightning_imports import (
    Callback,
    Checkpoint,
    DummyLogger,
    ModelCheckpoint,
    SaveConfigCallback,
    SIGTERMException,
    TensorBoardLogger,
)
from tests.precision.regression_model import On
from tests.report.test_html import EVIL
from tests.tables import each


def test_an_exception_is_reported_and_stays():
    with pytest.raises(RuntimeError, match="alert"):
        trainer().fit(Known(fail_at=4))
    run, (text, _) = load(), page()
    assert (run["status"], run["steps"], run["error"]) == ("failed", 3, f"RuntimeError: {EVIL}")
    assert steps(run, "loss") == [1, 2, 3]
    assert run["history"]["tokens/s"] == [[1, 100.0], [2, 200.0], [3, 300.0]]
    assert "Traceback" in text and text.count(EVIL) >= 2


@pytest.mark.parametrize("signal", [KeyboardInterrupt, SIGTERMException])
def test_signals_are_interruptions(signal):
    with pytest.raises(SystemExit):
        trainer().fit(Known(fail_at=4, error=signal))
    assert load()["status"] == "interrupted"
    assert "Traceback" not in page()[0]


def test_a_signal_after_the_end_leaves_the_run_finished():
    def stop(*_, **__):
        raise KeyboardInterrupt

    with pytest.raises(SystemExit):
        trainer(On(teardown=stop)).fit(Known())
    assert load()["status"] == "finished"


@pytest.mark.parametrize("hook", ["setup", "on_train_start", "on_train_batch_start"])
def test_an_exception_before_the_first_step(hook):
    def fail(*_, **__):
        raise RuntimeError("early")

    setattr(fails := Callback(), hook, fail)
    with pytest.raises(RuntimeError, match="early"):
        trainer(fails).fit(Known())
    if hook == "on_train_batch_start":
        assert (load()["status"], load()["steps"], load()["history"]) == ("failed", 0, {})
    else:
        assert not list(Path().iterdir()), "training never began: there is nothing to report"


def test_a_report_that_cannot_be_written_is_a_warning():
    """Where warnings are errors, it is none, and the training ends as it would."""
    Path("root").write_text("a file where a folder should be")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", "The '.*_dataloader' does not have many workers")
        with pytest.raises(RuntimeError, match="alert"):
            trainer(default_root_dir="root").fit(Known(fail_at=4))
        trainer(default_root_dir="root").fit(Known())
    with pytest.warns(UserWarning, match="RunReport could not be written: FileExistsError"):
        trainer(default_root_dir="root").fit(Known())
    assert not list(Path().glob(".*"))


def test_values_that_cannot_be_read_any_more_are_given_up():
    class Lost(RunReport):
        def _start_afresh(self):
            super()._start_afresh()
            self._history = run_history.History(most_pending=14, steps_pending=0)  # values of the first three steps

        def on_train_batch_start(self, trainer, *args):
            super().on_train_batch_start(trainer, *args)
            if trainer.global_step == 3:  # a meta tensor has no value, like one on a device that has failed
                self._history.add("lost", 4, torch.empty((), device="meta"))

    with pytest.raises(RuntimeError, match="alert"):
        trainer(report=Lost()).fit(Known(fail_at=5))
    assert (load()["status"], load()["steps"]) == ("failed", 4)
    assert steps(load(), "loss") == [1, 2, 3]
    assert "alert" in page()[0]


def test_no_more_than_fit_is_reported():
    run_trainer, model = trainer(), Known()
    run_trainer.fit(model)
    before = Path("run.json").read_text()
    run_trainer.validate(model, verbose=False)
    model.on_validation_epoch_end = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        run_trainer.validate(model, verbose=False)
    assert Path("run.json").read_text() == before
    trainer(fast_dev_run=True, default_root_dir="dry").fit(Known())
    assert not list(Path().glob("dry/r*"))


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


@pytest.mark.fast("Elsewhere-elsewhere")
@pytest.mark.parametrize(("logger", "root"), [(lambda: False, "."), (Elsewhere, "elsewhere")])
def test_runs_without_folders_of_their_own_do_not_overwrite_each_other(logger, root, told):
    folders = [Path(root), Path(root) / "version_1", Path(root) / "version_2"]
    for steps_taken, folder in zip((3, 4, 5), folders, strict=True):
        told.clear()
        summary = PrecisionSummary(quiet=True)
        trainer(summary, logger=logger(), max_steps=steps_taken, limit_val_batches=0).fit(Known())
        assert (folder / "report.html").exists()
        assert ("holds the files of another run" in told.text) == (folder != folders[0])
        assert (folder / summary.filename).exists() == (root != "."), "without a logger it is not written"
    assert [load(folder)["steps"] for folder in folders] == [3, 4, 5]
    assert load(folders[1])["name"] == f"{folders[0].resolve().name}/version_1"
    assert not list(Path(root).rglob("version_3"))


def test_a_resumed_run_without_a_step_left_leaves_the_report(told):
    trainer(SaveEarly("on_train_end", 6)).fit(Ordered())
    before = {path: path.read_bytes() for path in Path().glob("r*")}
    assert len(before) == 2
    trainer().fit(Ordered(), ckpt_path="x.ckpt", weights_only=True)
    assert {path: path.read_bytes() for path in Path().glob("r*")} == before and not list(Path().glob("version_*"))
    assert "Nothing was left to train: the run had ended at step 6, and its report is "
    assert "report.html. To train on, give more steps" in told.text
    for path in before:  # a run that was killed before it wrote them
        path.unlink()
    trainer().fit(Ordered(), ckpt_path="x.ckpt", weights_only=True)
    assert steps(load(), "loss") == [1, 2, 3, 4, 5, 6]


def test_another_run_from_the_checkpoint_of_one_that_ended_leaves_its_report():
    trainer(SaveEarly("on_train_batch_end", 3)).fit(Ordered())
    for _ in range(2):
        trainer().fit(Ordered(), ckpt_path="x.ckpt", weights_only=True)
    runs = [load(folder) for folder in (".", "version_1", "version_2")]
    assert [(run["begin"], run["steps"]) for run in runs] == [(0, 6), (3, 6), (3, 6)]
    assert len({run["id"] for run in runs}) == 1


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


@each(
    "save",
    [
        lambda: ModelCheckpoint(".", "x", every_n_train_steps=3),
        lambda: On(on_train_batch_end=lambda trainer, *_: trainer.save_checkpoint("x.ckpt")),  # as GracefulInterrupt
    ],
    fast=1,
)
def test_a_checkpoint_has_what_callbacks_behind_the_report_log(save):
    run = trainer(max_steps=3, limit_val_batches=0)
    late = On(on_train_batch_end=lambda trainer, model, *_: model.log("late", float(trainer.global_step)))
    run.callbacks += [late, save()]
    run.fit(Known())
    history = torch.load("x.ckpt", weights_only=True)["callbacks"]["RunReport"]["history"]
    assert history["points"]["late"].tolist() == [[k, k] for k in (1, 2, 3)]


@pytest.mark.pairwise(1)
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


def test_beside_the_logs(tmp_path):
    logger = TensorBoardLogger(tmp_path / "logs", name="demo", version=0)
    folder = tmp_path / "logs" / "demo" / "version_0"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("password: hunter2 # <b>")
    trainer(logger=logger).fit(Known())
    assert load(folder)["name"] == "demo/version_0"
    assert "hunter2" not in page(folder)[0], "a file that the run did not write was shown"

    class Saved(SaveConfigCallback):
        def __init__(self):
            pass

        def setup(self, *_, **__):
            pass

    trainer(Saved(), logger=logger).fit(Known())
    assert "password: hunter2 # <b>" in page(folder)[0]


def test_into_the_default_root_dir(tmp_path):
    trainer(report=RunReport("x.html"), default_root_dir=tmp_path / "root").fit(Known())
    assert sorted(path.name for path in (tmp_path / "root").iterdir()) == ["run.json", "x.html"]


def test_not_into_a_store_elsewhere():
    with pytest.warns(UserWarning, match="local folders alone, and nothing into memory://root"):
        trainer(default_root_dir="memory://root").fit(Known())
    assert not list(Path().iterdir())


def test_best_of_what_a_callback_monitors(tmp_path):
    trainer(ModelCheckpoint(tmp_path, monitor="val_acc", mode="max")).fit(Known())
    assert load()["best"] == {"val_loss": 1.0, "val_acc": pytest.approx(0.1)}
