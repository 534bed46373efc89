"""Warnings of many layers are one, what lasts is not repeated, and nothing is advised that is on."""

import math
import warnings

import torch
from torch.utils.data import DataLoader

from lightning_lowbit import FP4Precision, GradientNormMonitor, QuantizationMonitor, convert
from lightning_lowbit.callbacks.monitors.base import Alerts
from lightning_lowbit.callbacks.monitors.faults import alignment_fault, channel_fault, judge_operand
from lightning_lowbit.nn import LinearCasts
from tests.lightning_imports import LightningModule, quiet_trainer
from tests.tables import each


def said(work):
    with warnings.catch_warnings(record=True, action="always") as caught:
        work()
    return [str(one.message) for one in caught if "Owner: " in str(one.message) or "Monitor: " in str(one.message)]


class Owner:
    """What warns."""

    def __init__(self, state=None):
        self.alerts = Alerts(self)
        if state is not None:
            self.alerts.load_state_dict(state)

    def step(self, number, severities, kind="underflow"):
        """What is said in a step, without the name."""

        def work():
            for subject, severity in severities.items():
                self.alerts.note(subject, kind, severity, f"{severity:g} is too much.")
            self.alerts.say(number)

        return [text.removeprefix("Owner: ") for text in said(work)]


def test_layers_share_a_warning_that_names_the_worst():
    owner = Owner()
    first = owner.step(3, {"a": 2.0, "b": 5.0, "c": 3.0})
    assert first == ["3 layers, the worst b, step 3: 5 is too much."]
    second = owner.step(3, {"b": 1.0}, "zeros")
    assert second == ["b, step 3: 1 is too much."], "another kind"
    assert owner.alerts.kinds == {"a": ["underflow"], "b": ["underflow", "zeros"], "c": ["underflow"]}
    assert owner.alerts.texts == first + second


def test_what_lasts_is_said_again_where_it_is_much_worse():
    owner, many = Owner(), dict.fromkeys("abcdefgh", 1.0)
    assert len(owner.step(1, {"a": 1.0, "b": 1.0})) == 1
    for number in range(2, 50):
        assert owner.step(number, {"a": 3.9, "c": 1.0, "d": 1.0}) == []
    assert owner.step(50, {"a": 4.0}) == ["a, step 50: 4 is too much. It is much worse than at step 1."]
    worse = "8 layers, the worst a, step 51: 1 is too much. It is much worse than at step 50."
    assert owner.step(51, many) == [worse]
    assert len(owner.step(52, {"a": math.inf})) == 1
    assert owner.step(53, {"a": math.inf}) == []


def test_state_goes_on_also_that_of_older_checkpoints():
    owner = Owner()
    owner.step(1, {"a": 1.0, "b": 2.0})
    other = Owner(owner.alerts.state_dict())
    assert other.alerts.texts == owner.alerts.texts
    assert other.step(2, {"a": 3.0}) == []
    assert len(other.step(3, {"a": 8.0})) == 1
    older = Owner({"a": {"underflow": "a, step 1: much"}, "b": {"underflow": "b, step 2: much"}})
    assert older.alerts.texts == ["a, step 1: much", "b, step 2: much"]
    assert older.alerts.kinds["b"] == ["underflow"]
    assert older.step(3, {"a": 100.0}) == []
    assert len(older.step(4, dict.fromkeys("abcdefgh", 1.0))) == 1


class Classifier(LightningModule):
    """A ViT, whose gradients are those of one token of 17."""

    def __init__(self):
        super().__init__()
        from transformers import ViTConfig, ViTForImageClassification

        sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64}
        self.model = ViTForImageClassification(ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=4))

    def training_step(self, batch):
        return self.model(batch, labels=torch.arange(len(batch))).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)

    def train_dataloader(self):
        return DataLoader(torch.randn(16, 3, 32, 32), batch_size=4)


def test_a_vit_is_warned_of_once_and_not_advised_what_is_on():
    run = quiet_trainer(
        FP4Precision("nvfp4", quantize_output=True),
        max_steps=4,
        log_every_n_steps=1,
        callbacks=[QuantizationMonitor(), GradientNormMonitor()],
    )
    texts = said(lambda: run.fit(Classifier()))
    (text,) = texts
    assert " layers, the worst model.vit." in text
    assert "of the elements of wgrad_g that are not 0 became 0" in text
    assert "stochastic" not in text, "nvfp4 rounds it so"


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
