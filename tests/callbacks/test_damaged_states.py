"""States of callbacks that a file has damaged: a ValueError that names what is wrong, and the callback as it was."""

import math
import re
from collections import deque
from collections.abc import Mapping
from random import Random

import pytest
import torch

import lightning_lowbit
from lightning_lowbit import (
    CrashSafeCheckpoint,
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
    WeightDecaySwitch,
)
from lightning_lowbit.callbacks.base import LowBitCallback
from lightning_lowbit.callbacks.switches.base import _CHECKPOINT_KEY
from lightning_lowbit.metrics.spikes import SPIKE_STATE
from tests.lightning_imports import BoringModel, quiet_trainer
from tests.tables import each

ALERTS = {
    "levels": {"noise": {"step": 3, "layers": 2, "severity": math.inf}},
    "kinds": {"the gradient": ["noise"]},
    "texts": ["the gradient, step 3: it is noise."],
}
COUNTS = ("step", "scale", "skipped_steps", "overflows", "falls", "at_floor", "at_cap")

# By callback, a state with all there can be in it.
STATES = {
    SpikeRollback: {
        "good": [3.0, 1.0],
        "seen": 9,
        "start": 3.5,
        "pending": [(11, 2.5), (12, None)],
        "rollbacks": [{"step": 8, "spike": 6, "loss": 9.0, "mean": 2.0, "to": 4}],
        "until": 14,
        "phase_before": "fqt",
        "is_phase_ours": True,
    },
    GradientNoiseMonitor: {
        "kind": "draws",
        "casts": "abc",
        "window": [{"names": ["", "layer"], "sums": [[1.0, 2.0], [0.5, 1.0]]}],
        "measurements": [(3, 0.5), (5, math.inf)],
        "to_log": True,
        "alerts": ALERTS,
    },
    GradientNormMonitor: {
        "running": dict.fromkeys(SPIKE_STATE, 1.0),
        "spikes": [(4, 9.0, 1.0)],
        "norms": [1.0, 2.0],
        "alerts": ALERTS,
    },
    LossScaleMonitor: {"counts": dict.fromkeys(COUNTS, 1.0), "fell": [-math.inf, 3.0, 4.0, 5.0, 6.0], "alerts": ALERTS},
    OutlierMonitor: {"means": {"layer": {"count": 3, "mean": 1.5, "start": 1.0}}, "alerts": ALERTS},
    QuantizationMonitor: {"alerts": ALERTS, "last_flip": {"layer": 3}},
    PrecisionSummary: {"steps": {"fqt": 3, "blending": 1}, "since": {"fqt": 1}, "past": [[4.5, 3]]},
    RunReport: {
        "history": {
            "points": {"loss": torch.tensor([[1.0, 2.0], [2.0, 1.5]], dtype=torch.float64)},
            "phases": [(0, 2, "fqt")],
            "extremes": {"loss": (1.5, 2.0)},
            "quantities": {"sqnr": "dB"},
        },
        "validation": ["val_loss"],
        "seconds": 1.5,
        "id": "abc",
    },
    OsciReset: {"step": 3, "end": 9, "paths": {"layer": {"latent": torch.ones(2, 3), "quantized": torch.ones(2, 3)}}},
    CrashSafeCheckpoint: {
        "monitor": "val_loss", "dirpath": None, "last_model_path": "",
        **dict.fromkeys(["best_model_path", "kth_best_model_path"], "a.ckpt"),
        **dict.fromkeys(["best_model_score", "current_score", "kth_value"], torch.tensor(1.0)),
        "best_k_models": {"a.ckpt": torch.tensor(1.0)},
    },
    lambda: QAFSwitch(plateau=Plateau()): {
        "due": math.inf, "best": 1.5, "stalled": 2, "set": 3,
        "record": {"step": 3, "from": "fqt", "to": "qaf", "why": "plateau"},
    },
    lambda: PrecisionSwitch("qaf", below={}):
        {"due": math.inf, "in_a_row": 1, "value": 1.2, "seen": 4, "waiting": [(5, 1.1)]},
    lambda: PrecisionSwitch("qaf", tokens=9): {"due": math.inf, "began": 0, "tokens": 4, "check": 2},
}  # fmt: skip
STATELESS = {"ExactResume", "GracefulInterrupt", "LowBitProgressBar", "Throughput", "WeightDecaySwitch"}


def load(callback, state):
    if isinstance(callback, PrecisionSwitch):
        callback.on_load_checkpoint(None, None, {_CHECKPOINT_KEY: {callback.state_key: state}})
    else:
        callback.load_state_dict(state)


def content(value):
    """All that a callback, or a part of one, knows, as a text."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, Mapping):
        return sorted((str(key), content(item)) for key, item in value.items())
    if isinstance(value, list | tuple | deque):
        return [content(item) for item in value]
    if type(value).__module__.startswith("lightning_lowbit") and hasattr(value, "__dict__"):
        return content(vars(value))
    return repr(value) if isinstance(value, str | float | int | None) else type(value).__name__


def places(state, path=()):
    """Paths of all values within a state, itself included."""
    yield path
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list | tuple) else ()
    for key, value in items:
        yield from places(value, (*path, key))


GONE = object()
NOTHING = [None, [], {}, "x", True, [None], GONE]
DAMAGE = [*NOTHING, -3, math.nan, 1e300, torch.zeros(2, 5), torch.zeros(()), torch.zeros(3, 2)]


def damaged(state, path, damage):
    if not path:
        return {} if damage is GONE else damage
    key, *rest = path
    copied = dict(state) if isinstance(state, dict) else list(state)
    if rest or damage is not GONE:
        copied[key] = damaged(state[key], tuple(rest), damage)
    else:
        del copied[key]
    return copied if isinstance(state, dict | list) else tuple(copied)


def assert_refused_or_taken(make, state, path, damage):
    callback, taken = make(), damaged(state, path, damage)
    load(callback, state)
    before = str(content(callback))
    try:
        load(callback, taken)
    except ValueError as error:
        assert re.match(rf"{type(callback).__name__}'s state in the checkpoint .*\.$", str(error), re.DOTALL), error
        assert str(content(callback)) == before, "it has changed"
        return True
    if not isinstance(callback, PrecisionSwitch):
        assert isinstance(callback.state_dict(), dict)
    return False


def test_every_callback_is_here():
    classes = {type(make()).__name__ for make in STATES} | STATELESS
    for name in lightning_lowbit.__all__:
        kind = getattr(lightning_lowbit, name)
        if isinstance(kind, type) and issubclass(kind, LowBitCallback):
            assert name in classes


def test_whole_states_are_taken():
    untaken = {"seconds", "monitor", "current_score"}  # a clock, and what Lightning leaves
    for make, state in STATES.items():
        load(callback := make(), state)
        if not isinstance(callback, PrecisionSwitch):
            taken, whole = ({key: s[key] for key in s.keys() - untaken} for s in (callback.state_dict(), state))
            assert str(content(taken)) == str(content(whole))


def test_another_run_begins_anew():
    """A callback that a second run uses knows as much as a new one; a clock and an identity apart."""
    for make, state in STATES.items():
        fresh, used = make(), make()
        load(used, state)
        for callback in (fresh, used):
            callback.setup(quiet_trainer(), BoringModel(), "fit")
        if isinstance(used, RunReport):
            assert {**used.state_dict(), "id": ""} == {**fresh.state_dict(), "id": ""}
        elif not isinstance(used, CrashSafeCheckpoint):  # Lightning's, which goes on with its best checkpoints
            assert str(content(used)) == str(content(fresh))


def test_what_is_missing_or_of_another_kind():
    """Any entry that is gone, None where that says nothing, and a state that is none."""
    refused = 0
    for make, state in STATES.items():
        for damage in ([None], "x", 3, torch.zeros(2)):
            assert assert_refused_or_taken(make, state, (), damage), f"{make} takes {damage}"
        for path in places(state):
            if path:
                refused += assert_refused_or_taken(make, state, path, GONE)
    assert refused > 100


@pytest.mark.filterwarnings("ignore:The dirpath has changed")  # Lightning's, of a path that is another
@pytest.mark.parametrize("cases", [200, pytest.param(2000, marks=pytest.mark.slow)])
def test_damaged_states(cases):
    random, refused = Random(0), 0
    for _ in range(cases):
        make = random.choice([*STATES])
        path = random.choice([*places(STATES[make])][1:])
        refused += assert_refused_or_taken(make, STATES[make], path, random.choice(DAMAGE))
    assert refused > cases / 2


@each("make, path, damage, words", [
    (SpikeRollback, ("good",), GONE, r"SpikeRollback's state in the checkpoint lacks the entry good: it was damaged"),
    (SpikeRollback, ("good", 1), "x", r"SpikeRollback.* has good\.1 = 'x', which should be a number"),
    (SpikeRollback, ("rollbacks", 0, "loss"), None, r"has rollbacks\.0\.loss = None, which should be a number"),
    (GradientNormMonitor, ("alerts",), None, r"GradientNormMonitor.* has alerts = None, which should be a mapping"),
    (PrecisionSummary, ("steps",), {"fqt": -1}, r"has steps\.fqt = -1, which should be a whole number, 0 or more"),
    (RunReport, ("history", "points", "loss"), torch.zeros(3), r"loss = a tensor torch.float32 of shape \(3,\), which"),
])  # fmt: skip
def test_words(make, path, damage, words):
    with pytest.raises(ValueError, match=words):
        load(make(), damaged(STATES[make], path, damage))


def test_all_switches_of_a_checkpoint_are_checked():
    for states in (None, [], {"a": None}, {3: {}}):
        with pytest.raises(ValueError, match="WeightDecaySwitch's state in the checkpoint"):
            WeightDecaySwitch(at=0.5).on_load_checkpoint(None, None, {_CHECKPOINT_KEY: states})
