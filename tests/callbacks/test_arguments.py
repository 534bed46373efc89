"""Arguments of callbacks: those that are refused, with what was needed and what came, and those of a YAML."""

import math

import pytest
import yaml

from lightning_lowbit import (
    Below,
    GradientNoiseMonitor,
    GradientNormMonitor,
    LossScaleMonitor,
    OsciReset,
    OutlierMonitor,
    Plateau,
    PrecisionSummary,
    PrecisionSwitch,
    QAFSwitch,
    QuantizationMonitor,
    RunReport,
    SpikeRollback,
    Throughput,
    WeightDecaySwitch,
)
from lightning_lowbit.callbacks.switches.step_triggers import count_tokens
from tests.lightning_imports import from_yaml
from tests.tables import each

# Of each callback what it is given besides, and by argument what it says.
REFUSED = [
    (GradientNormMonitor, {}, [
        ({"every_n_steps": 0}, "every_n_steps is a number of steps, 1 or more, or None; got 0"),
        ({"spike_factor": 1}, "spike_factor is how many times the mean is a spike, above 1; got 1"),
        ({"decay": 1.0}, "decay is what remains of a mean with each norm, 0 or more and below 1; got 1.0"),
        ({"decay": -0.1}, "below 1; got -0.1"),
        ({"limit": 0}, "limit is a norm, or a text such as '10x' .* above 0, or None; got 0"),
        ({"limit": "10"}, "or None; got '10'"),
        ({"limit": "1x"}, "or None; got '1x'"),
        ({"limit": math.inf}, "or None; got inf"),
        ({"limit": True}, "or None; got True"),
    ]),
    (GradientNoiseMonitor, {}, [
        ({"every_n_steps": 0}, "every_n_steps is a number of optimizer steps, 1 or more; got 0"),
        ({"kind": "layer"}, "Unknown kind of GradientNoiseMonitor 'layer'. Did you mean 'layers'.*: 'draws', 'layers'"),
        ({"kind": None}, "Unknown kind of GradientNoiseMonitor None"),
        ({"average": 0}, "average is a number of measurements, 1 or more; got 0"),
        ({"threshold": 0}, "threshold is a ratio of gradient to noise, above 0; got 0"),
    ]),
    (OutlierMonitor, {}, [
        ({"swiglu": "yes"}, "swiglu is True, False or None, which looks where it can; got 'yes'"),
        ({"swiglu": 1}, "looks where it can; got 1"),
        ({"k": 0}, "k is how many times the rms an outlier exceeds, above 0; got 0"),
        ({"alignment_limit": 1.5}, r"alignment_limit is a \|cos\|, above 0 and at most 1, or None; got 1.5"),
        ({"takeoff": 1}, "takeoff is how many times the mean is too much, above 1, or None; got 1"),
    ]),
    (QuantizationMonitor, {}, [
        ({"underflow_limit": 0}, "underflow_limit is a share of elements, above 0 and at most 1; got 0"),
        ({"operands": False, "weights": False}, "nothing to watch with operands=False and weights=False: leave out"),
        ({"no_flips_for": 0}, "no_flips_for is a number of optimizer steps, 1 or more; got 0"),
        ({"zeros_tolerance": 0}, "zeros_tolerance is a share of elements, above 0 and at most 1; got 0"),
    ]),
    (LossScaleMonitor, {}, [
        ({"falls": 0}, "falls is how often the scale falls before a warning, 1 or more; got 0"),
        ({"within": 4}, "within is a number of optimizer steps, no fewer than falls, 5 or more; got 4"),
        ({"falls": 200}, "no fewer than falls, 200 or more; got 100"),
    ]),
    (Throughput, {}, [
        ({"unit": 5}, "unit names what batches hold, such as 'tokens'; got 5"),
        ({"count": 5}, "count takes a batch and gives a number; got 5"),
    ]),
    (PrecisionSwitch, {}, [
        ({"to": "qat", "at": 0.5}, r"Unknown phase 'qat'. Did you mean 'qaf'\?"),
        ({"to": "qaf", "at": 1.5}, "0 or more and at most 1; got 1.5"),
        ({"to": "qaf", "step": -1}, "0 or more; got -1"),
    ]),
    (WeightDecaySwitch, {}, [
        ({"to": -0.1, "at": 0.5}, "to is a weight decay, 0 or more; got -0.1"),
        ({}, r"Give either at \(a fraction of all steps\) or step \(a number\); got at=None, step=None"),
    ]),
    (PrecisionSwitch, {"to": "fqt"}, [
        ({"at": 0.5, "over": 0.1, "steps": 5}, r"Give over .* or steps .*, not both; got over=0.1, steps=5"),
        ({"at": 0.5, "over": 0}, "over is a fraction of all optimizer steps, above 0 and below 1, or None; got 0"),
        ({"at": 0, "over": 1}, "above 0 and below 1, or None; got 1"),
        ({"at": 0.95, "over": 0.1}, r"would end half quantized: at \+ over is less than 1; got at=0.95, over=0.1"),
        ({"at": 0.5, "over": 0.5}, r"at \+ over is less than 1; got at=0.5, over=0.5"),
        ({"plateau": "val_loss"}, "plateau is a Plateau or a mapping such as .*; got 'val_loss'"),
        ({"plateau": {"monitor": None}}, "monitor is the name of a metric that validation logs; got None"),
        ({"at": 0.5, "steps": 0}, "steps is a number of optimizer steps, 1 or more, or None; got 0"),
        ({"at": 0.5, "over": 0.1, "schedule": "cosin"}, r"Unknown schedule 'cosin'. Did you mean 'cosine'\?"),
        ({"at": 0.5, "schedule": "cosine"}, "A sudden switch has no schedule: give over or steps"),
        ({"to": "bf16", "at": 0.5, "over": 0.1}, "quantizes nothing, so not progressively: leave out over and steps"),
        ({"at": 0.5, "plateau": {}}, r"Give either at .* or below \(.*; got at=0.5, plateau={}\."),
        ({"plateau": {"moniter": "x"}}, r"Unknown field of a plateau 'moniter'. Did you mean 'monitor'\?"),
        ({"plateau": {"patience": 0}}, "patience is a number of validations, 1 or more; got 0"),
        ({"plateau": {"min_delta": -1}}, "min_delta is what an improvement exceeds, 0 or more; got -1"),
        ({"plateau": {"mode": "least"}}, "Unknown mode of a plateau 'least'"),
    ]),
    (PrecisionSwitch, {"to": "fqt", "step": 3}, [
        ({"to": {}}, "to maps patterns of layers to casts, at least one"),
        ({"to": {"head": "qat"}}, "Unknown phase or preset 'qat'. Did you mean 'qaf'.*'hp-forward', 'bf16', 'nvfp4'"),
        ({"to": {"head": {"fprop_v": None}}}, "Unknown field of LinearCasts 'fprop_v'"),
        ({"to": {"head": "bf16"}, "steps": 5}, "λ is for all layers, and a mapping for some"),
        ({"rewarm": 0}, "rewarm is a number of optimizer steps, 1 or more, or None; got 0"),
        ({"moments": "forget"}, "Unknown moments 'forget'"),
    ]),
    (QAFSwitch, {}, [
        ({}, "got at=None, step=None, tokens=None, plateau=None, below=None"),
        ({"at": 0.5, "tokens": 5}, "Give either .*; got at=0.5, tokens=5"),
        ({"tokens": -1}, "tokens is how many are trained on first, 0 or more; got -1"),
        ({"step": 5, "count": count_tokens}, "count counts the tokens of a batch, for tokens alone"),
        ({"tokens": 5, "count": 3}, "count takes a batch and gives the number of its tokens; got 3"),
        ({"below": "noise"}, "below is a Below or a mapping .*; got 'noise'"),
        ({"below": {"measurement": 3}}, "Unknown field of below 'measurement'. Did you mean 'measurements'"),
        ({"below": {"measurements": 0}}, "measurements is how many in a row, 1 or more; got 0"),
        ({"below": {"threshold": math.nan}}, "threshold is what the metric is below, a finite number; got nan"),
        ({"below": {"monitor": ""}}, "monitor is the name of a metric that a callback measures; got ''"),
    ]),
    (OsciReset, {}, [
        ({"window": 1}, "window is a number of optimizer steps, 2 or more; got 1"),
        ({"window": 50, "every": 49}, "every is a number of optimizer steps, no fewer than window, 50 or more; got 49"),
        ({"threshold": 1}, "threshold is the ratio of two paths, above 1; got 1"),
        ({"start": -1}, "start is a number of optimizer steps, 0 or more; got -1"),
    ]),
    (SpikeRollback, {}, [
        ({"threshold": 0}, "threshold is a number of standard deviations, above 0; got 0"),
        ({"history": 1}, "history is a whole number, 2 or more; got 1"),
        ({"warmup_steps": 1.0}, "warmup_steps is a whole number, 2 or more; got 1.0"),
        ({"every_n_steps": 0}, "every_n_steps is a whole number, 1 or more; got 0"),
        ({"good_for": -1}, "good_for is a whole number, 0 or more; got -1"),
        ({"every_n_steps": 20}, "good_for is less than every_n_steps; got good_for=20, every_n_steps=20"),
        ({"recovery_steps": 0}, "recovery_steps is a whole number, 1 or more; got 0"),
        ({"max_rollbacks": 0}, "max_rollbacks is a whole number, 1 or more; got 0"),
        ({"within": None}, "within is a whole number, 1 or more; got None"),
        ({"lr_factor": 0}, "above 0 and at most 1; got 0"),
        ({"device": "cuda"}, "Unknown device of snapshots 'cuda'.*'same', 'cpu'"),
        ({"phase": "fp32"}, "Unknown phase 'fp32'"),
    ]),
    (PrecisionSummary, {}, [
        ({"filename": name}, f"filename is a name that ends in .json, without folders; got '{name}'")
        for name in ("summary.txt", "folder/summary.json", "../summary.json", "/summary.json", "")
    ]),
    (RunReport, {}, [
        ({"filename": name}, "ends in .html, without folders; got")
        for name in ("report", ".html", "a/report.html", "a\\report.html")
    ]),
]  # fmt: skip


@each("make, others, arguments, message", [(*case[:2], *row) for case in REFUSED for row in case[2]])
def test_bad_arguments(make, others, arguments, message):
    with pytest.raises(ValueError, match=message):
        make(**{**others, **arguments})


COUNT = "lightning_lowbit.callbacks.switches.step_triggers.count_tokens"
IN_YAML = [
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
    callbacks = [{"class_path": f"lightning_lowbit.{name}", "init_args": arguments} for name, arguments in IN_YAML]
    run = from_yaml(yaml.safe_dump({"accelerator": "cpu", "callbacks": callbacks}))
    arrived = [callback for callback in run.callbacks if type(callback).__name__ in dict(IN_YAML)]
    for callback, (name, arguments) in zip(arrived, IN_YAML, strict=True):
        wanted = {key: FIELDS[key](**value) if key in FIELDS else value for key, value in arguments.items()}
        wanted |= {"count": count_tokens} if "count" in arguments else {}
        assert type(callback).__name__ == name
        assert {key: getattr(callback, key) for key in arguments} == wanted
