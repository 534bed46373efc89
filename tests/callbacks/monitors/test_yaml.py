"""Monitors in a YAML: every argument arrives."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.lightning_imports import BoringModel, LightningCLI

ARGUMENTS: dict[str, dict[str, Any]] = {
    "GradientNormMonitor": {
        "layers": ["layer"],
        "every_n_steps": 1,
        "spike_factor": 3.0,
        "decay": 0.9,
        "limit": "20x",
    },
    "GradientNoiseMonitor": {
        "every_n_steps": 10,
        "kind": "layers",
        "average": 2,
        "threshold": 2.5,
        "layers": ["layer"],
    },
    "OutlierMonitor": {"layers": ["mlp"], "swiglu": False, "k": 5.0, "alignment_limit": None, "takeoff": 3.0},
    "QuantizationMonitor": {"only": [r"layer\.2"], "underflow_limit": 0.25, "operands": True, "weights": False},
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_arrive(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    callback = {"class_path": f"lightning_lowbit.{name}", "init_args": ARGUMENTS[name]}
    Path("run.yaml").write_text(yaml.safe_dump({"trainer": {"accelerator": "cpu", "callbacks": [callback]}}))
    monkeypatch.setattr("sys.argv", ["train.py"])
    cli = LightningCLI(
        BoringModel,
        args=["--config", "run.yaml"],
        run=False,
        save_config_callback=None,
        seed_everything_default=1,
        auto_configure_optimizers=False,
    )
    (monitor,) = [one for one in cli.trainer.callbacks if type(one).__name__ == name]
    assert {argument: getattr(monitor, argument) for argument in ARGUMENTS[name]} == ARGUMENTS[name]
