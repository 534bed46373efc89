"""Trackers of experiments get casts, coverage and the page: stand-ins, and in slow tests the packages themselves."""

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from lightning_lowbit import FP4Precision, PrecisionSummary
from lightning_lowbit.callbacks.run_report import RunReport
from tests.lightning_imports import BoringModel, MLFlowLogger, WandbLogger, quiet_trainer


def train(logger, *callbacks):
    settings = {"max_steps": 2, "limit_val_batches": 0, "log_every_n_steps": 1}
    run = quiet_trainer(FP4Precision("nvfp4"), logger=logger, callbacks=[RunReport(), *callbacks], **settings)
    run.fit(BoringModel())
    return run


class Config(dict):
    def update(self, values, allow_val_change=False):
        assert allow_val_change, "a resumed run could not say what it is"
        super().update(values)


class Artifact:
    def __init__(self, name, type):
        self.name, self.type, self.files = name, type, {}

    def add_file(self, path, name):
        self.files[name] = Path(path).read_text()


def ignore(*_, **__):
    pass


class Wandb(WandbLogger):
    """Has the surface of a run of W&B that is used."""

    name, version, save_dir, _checkpoint_callbacks = "run", "1", "wandb", {}

    def __init__(self):
        self.artifacts = []
        self.run = SimpleNamespace(id="abc", config=Config(), summary={}, log_artifact=self.artifacts.append)

    experiment = property(lambda self: self.run)
    log_metrics = log_hyperparams = log_graph = save = finalize = ignore


class MLFlow(MLFlowLogger):
    """Has the surface of MLflow's client that is used."""

    name, version, save_dir, run_id = "run", "1", "mlflow", "r1"

    def __init__(self):
        self.tags, self.metrics, self.artifacts = {}, {}, []
        self.client = SimpleNamespace(
            set_tag=lambda run, name, text: self.tags.update({name: text}),
            log_metric=lambda run, name, number: self.metrics.update({name: number}),
            log_artifact=lambda run, path: self.artifacts.append(Path(path).name),
        )

    experiment = property(lambda self: self.client)
    log_metrics = log_hyperparams = log_graph = save = finalize = ignore


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Artifact=Artifact))


def test_trackers_are_told(stand_in):
    loggers = Wandb(), MLFlow()
    train(list(loggers))
    wandb, mlflow = loggers
    assert wandb.run.config == {"lightning_lowbit/plugin": "FP4Precision", "lightning_lowbit/casts": "nvfp4"}
    assert wandb.run.summary == {"lightning_lowbit/alerts": 0}
    (artifact,) = wandb.artifacts
    assert (artifact.name, artifact.type) == ("report-abc", "report")
    assert artifact.files["report.html"].startswith("<!doctype html>")
    assert json.loads(artifact.files["run.json"])["steps"] == 2
    assert mlflow.tags == wandb.run.config
    assert mlflow.metrics == wandb.run.summary
    assert mlflow.artifacts == ["report.html", "run.json"]
    logger = Wandb()
    train(logger, PrecisionSummary(quiet=True))
    assert set(logger.run.summary) == {f"lightning_lowbit/{name}" for name in ("coverage", "average_bits", "alerts")}


def test_a_tracker_that_is_not_reached_is_a_warning(stand_in):
    logger = Wandb()
    logger.run.log_artifact = Mock(side_effect=ConnectionError("no tracker"))
    with pytest.warns(UserWarning, match="Wandb did not take what RunReport knows: ConnectionError: no tracker"):
        train(logger)
    assert Path("wandb/report.html").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_wandb_takes_it(monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger(save_dir="root", offline=True)
    train(logger, PrecisionSummary(quiet=True))
    run = logger.experiment
    assert run.config["lightning_lowbit/casts"] == "nvfp4"
    assert run.summary["lightning_lowbit/coverage"] == 1.0
    assert Path("root/report.html").exists()
    wandb.finish()
    (log,) = Path(run.dir).parent.glob("*.wandb")
    until = time.monotonic() + 60  # a process of its own writes the file
    while b"report.html" not in log.read_bytes() and time.monotonic() < until:
        time.sleep(0.2)
    assert b"report-" in log.read_bytes() and b"report.html" in log.read_bytes()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_mlflow_takes_it(monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for _ in range(2):
        logger = MLFlowLogger(tracking_uri=f"file:{os.getcwd()}/mlruns")
        train(logger, PrecisionSummary(quiet=True))
        found = logger.experiment.get_run(logger.run_id)
        assert found.data.tags["lightning_lowbit/casts"] == "nvfp4"
        assert found.data.metrics["lightning_lowbit/coverage"] == 1.0
        names = {one.path for one in logger.experiment.list_artifacts(logger.run_id)}
        assert {"report.html", "run.json"} <= names
    assert Path("mlruns/report.html").exists()
    assert Path("mlruns/version_1/report.html").exists()
