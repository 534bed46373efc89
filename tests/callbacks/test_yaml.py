"""Callbacks in a YAML: every argument arrives."""

import yaml

from lightning_lowbit import Below, Plateau
from lightning_lowbit.callbacks.switches.step_triggers import count_tokens
from tests.lightning_imports import from_yaml

COUNT = "lightning_lowbit.callbacks.switches.step_triggers.count_tokens"
CALLBACKS = [
    ("GradientNormMonitor",
     {"layers": ["layer"], "every_n_steps": 1, "spike_factor": 3.0, "decay": 0.9, "limit": "20x"}),
    ("GradientNoiseMonitor",
     {"every_n_steps": 10, "kind": "layers", "average": 2, "threshold": 2.5, "layers": ["layer"]}),
    ("OutlierMonitor", {"layers": ["mlp"], "swiglu": False, "k": 5.0, "alignment_limit": None, "takeoff": 3.0}),
    ("QuantizationMonitor", {"only": [r"layer\.2"], "underflow_limit": 0.25, "operands": True, "weights": False}),
    ("SpikeRollback", {"threshold": 4, "phase": "bf16", "lr_factor": 0.5, "device": "cpu"}),
    ("PrecisionSwitch", {"to": "bf16", "step": 0}),
    ("PrecisionSwitch",
     {"to": "fqt", "plateau": {"monitor": "loss"}, "over": 0.1, "steps": None, "schedule": "cosine"}),
    ("PrecisionSwitch", {"to": "bf16", "below": {"threshold": 1.5, "measurements": 5}, "rewarm": 10}),
    ("PrecisionSwitch", {"to": "fqt", "tokens": 1000000, "count": COUNT}),
    ("PrecisionSwitch",
     {"to": {"lm_head": "bf16", r"layers\.0": {"preset": "nvfp4", "every": {"rounding": "nearest"}}}, "step": 7}),
    ("QAFSwitch", {"below": {}}),
    ("QAFSwitch", {"plateau": {"patience": 3}, "moments": "reset"}),
]  # fmt: skip
FIELDS = {"below": Below, "plateau": Plateau}


def test_arguments_arrive():
    callbacks = [{"class_path": f"lightning_lowbit.{name}", "init_args": arguments} for name, arguments in CALLBACKS]
    run = from_yaml(yaml.safe_dump({"accelerator": "cpu", "callbacks": callbacks}))
    arrived = [callback for callback in run.callbacks if type(callback).__name__ in dict(CALLBACKS)]
    for callback, (name, arguments) in zip(arrived, CALLBACKS, strict=True):
        wanted = {key: FIELDS[key](**value) if key in FIELDS else value for key, value in arguments.items()}
        wanted |= {"count": count_tokens} if "count" in arguments else {}
        assert type(callback).__name__ == name
        assert {key: getattr(callback, key) for key in arguments} == wanted
