"""Warnings of many layers are one, what lasts is not repeated, and nothing is advised that is on."""

import math

import torch

from lightning_lowbit import convert
from lightning_lowbit.callbacks.monitors.base import Alerts
from lightning_lowbit.callbacks.monitors.faults import alignment_fault, channel_fault, judge_operand
from lightning_lowbit.nn import LinearCasts
from tests.callbacks.monitors.said import alerts_said
from tests.tables import each


class OwnerMonitor:
    """What warns."""

    def __init__(self, state=None):
        self.alerts = Alerts(self)
        if state is not None:
            self.alerts.load_state_dict(state)

    def step(self, number, severities, kind="underflow"):
        """What is said in a step."""
        with alerts_said() as said:
            for subject, severity in severities.items():
                self.alerts.note(subject, kind, severity, f"{severity:g} is too much.")
            self.alerts.say(number)
        return said


def test_layers_share_a_warning_that_names_the_worst():
    owner = OwnerMonitor()
    first = owner.step(3, {"a": 2.0, "b": 5.0, "c": 3.0})
    assert first == ["3 layers, the worst b, step 3: 5 is too much."]
    second = owner.step(3, {"b": 1.0}, "zeros")
    assert second == ["b, step 3: 1 is too much."], "another kind"
    assert owner.alerts.kinds == {"a": ["underflow"], "b": ["underflow", "zeros"], "c": ["underflow"]}
    assert owner.alerts.texts == first + second


def test_what_lasts_is_said_again_where_it_is_much_worse():
    owner, many = OwnerMonitor(), dict.fromkeys("abcdefgh", 1.0)
    assert len(owner.step(1, {"a": 1.0, "b": 1.0})) == 1
    for number in range(2, 50):
        assert owner.step(number, {"a": 3.9, "c": 1.0, "d": 1.0}) == []
    assert owner.step(50, {"a": 4.0}) == ["a, step 50: 4 is too much. It is much worse than at step 1."]
    worse = "8 layers, the worst a, step 51: 1 is too much. It is much worse than at step 50."
    assert owner.step(51, many) == [worse]
    assert len(owner.step(52, {"a": math.inf})) == 1
    assert owner.step(53, {"a": math.inf}) == []


def test_state_goes_on_also_that_of_older_checkpoints():
    owner = OwnerMonitor()
    owner.step(1, {"a": 1.0, "b": 2.0})
    other = OwnerMonitor(owner.alerts.state_dict())
    assert other.alerts.texts == owner.alerts.texts
    assert other.step(2, {"a": 3.0}) == []
    assert len(other.step(3, {"a": 8.0})) == 1
    older = OwnerMonitor({"a": {"underflow": "a, step 1: much"}, "b": {"underflow": "b, step 2: much"}})
    assert older.alerts.texts == ["a, step 1: much", "b, step 2: much"]
    assert older.alerts.kinds["b"] == ["underflow"]
    assert older.step(3, {"a": 100.0}) == []
    assert len(older.step(4, dict.fromkeys("abcdefgh", 1.0))) == 1


@each(
    ("preset", "operand", "on", "off"),
    [
        ("nvfp4", "wgrad_g", ["stochastic", "maller blocks"], ["Hadamard", "more range"]),
        ("nvfp4", "fprop_x", ["maller blocks"], ["stochastic", "Hadamard"]),
        ("nvfp4-nvidia", "wgrad_g", ["stochastic", "Hadamard"], ["more range"]),
        ("mxfp4", "fprop_x", ["e8m0"], ["maller blocks", "stochastic"]),
        ("fp8-current", "fprop_x", ["e8m0"], ["maller blocks", "Hadamard"]),
    ],
)
def test_of_an_operand_nothing_is_advised_that_is_on(preset, operand, on, off):
    found = {"sqnr": 3.0, "underflow": 0.8}
    (fault,) = judge_operand(operand, LinearCasts.preset(preset), found, underflow_limit=0.5)
    assert not [remedy for remedy in on if remedy in fault.message], fault.message
    assert all(remedy in fault.message for remedy in off), fault.message


def test_of_an_outlier_nothing_is_advised_that_is_on():
    def layer(casts):
        model = torch.nn.Sequential(torch.nn.Linear(16, 16))
        return convert(model, casts)[0] if casts else model[0]

    def advice(casts):
        return channel_fault(layer(casts), 5, 60.0, 6.0, takeoff=10.0).message.partition("learning rate.")[2]

    smooth = LinearCasts.preset("fp8-current").replace(smooth="channel")
    assert advice(None) == "", "a layer in high precision has no levels to lose"
    assert "small blocks or smooth_swiglu" in advice("fp8-current")
    assert "small blocks" not in advice("nvfp4")
    assert "smooth_swiglu" in advice("nvfp4")
    assert "smooth_swiglu" not in advice(smooth)
    mlp = torch.nn.Module()
    for casts, is_on in (("fp8-current", False), (smooth, True)):
        mlp.down_proj = layer(casts)
        assert ("smooth_swiglu" in alignment_fault(mlp, [(3.0, 0.95)], 1, 0.9).message) != is_on
