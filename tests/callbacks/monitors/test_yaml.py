"""Monitors in a YAML: every argument arrives."""

import pytest
import yaml

from tests.lightning_imports import from_yaml

ARGUMENTS = {
    "GradientNormMonitor": {"layers": ["layer"], "every_n_steps": 1, "spike_factor": 3.0, "decay": 0.9, "limit": "20x"},
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
def test_arguments_arrive(name):
    callback = {"class_path": f"lightning_lowbit.{name}", "init_args": ARGUMENTS[name]}
    run = from_yaml(yaml.safe_dump({"accelerator": "cpu", "callbacks": [callback]}))
    (monitor,) = [one for one in run.callbacks if type(one).__name__ == name]
    assert {argument: getattr(monitor, argument) for argument in ARGUMENTS[name]} == ARGUMENTS[name]
