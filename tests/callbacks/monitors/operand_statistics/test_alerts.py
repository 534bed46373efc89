"""Alerts on statistics of operands."""

import math

import pytest
import torch

from lightning_lowbit.callbacks.monitors.quantization import QuantizationMonitor
from lightning_lowbit.nn import OPERANDS
from tests.callbacks.monitors.operand_statistics.runs import MEANS, NAMES, Two, logged, of_layers, trainer
from tests.callbacks.monitors.said import alerts_said


def outlier(batch):
    """All but one element of the input are so small beside it that int4 makes zeros of them."""
    batch = torch.full_like(batch, 1e-3)
    batch[:, 0] = 1.0
    return batch


class Spoilt(Two):
    """Some batches are spoilt; weights stay as they are."""

    def __init__(self, spoil, since=2):
        super().__init__()
        self.spoil, self.since = spoil, since

    def training_step(self, batch, batch_idx):
        return super().training_step(self.spoil(batch) if batch_idx >= self.since else batch, batch_idx)

    def on_before_optimizer_step(self, optimizer):
        self.zero_grad()


def test_underflow_is_said_once():
    monitor = QuantizationMonitor()
    run = trainer(monitor, plugin="int4", log_every_n_steps=1, max_steps=5)
    with alerts_said() as said:
        run.fit(Spoilt(outlier))
    (text,) = said
    assert text.startswith("layer.0, step 3: 96.9% of the elements of fprop_x that are not 0 became 0")
    assert "(underflow_limit=0.5): few large elements take the range from the others. Smaller blocks, stoch" in text
    assert monitor.report_alerts(run) == [text]


@pytest.mark.parametrize(("plugin", "limit"), [("int4", 0.97), ("ternary", 1e-3)])
def test_underflow_that_is_tolerated(plugin, limit):
    """Zeros are levels of ternary weights. Warnings are errors."""
    monitor = QuantizationMonitor(underflow_limit=limit)
    run = trainer(monitor, plugin=plugin, log_every_n_steps=1)
    run.fit(Spoilt(outlier if plugin == "int4" else lambda batch: torch.ones_like(batch), since=0))
    assert not any("underflow" in alert or "fprop_w" in alert for alert in monitor.report_alerts(run))


def test_what_is_not_finite_is_said_once():
    def spoil(batch):
        batch = batch.clone()
        batch[3, 4] = math.nan
        return batch

    run = trainer(QuantizationMonitor(weights=False), log_every_n_steps=1, max_steps=5)
    with alerts_said() as texts:
        run.fit(Spoilt(spoil))
    assert len(texts) == len(set(texts)) > 0
    assert "layer.0, step 3: fprop_x holds a NaN or an infinity. Look at the data of this step" in texts[0]
    assert not any("fprop_w" in text or "became 0" in text for text in texts)
    assert math.isnan(of_layers(logged(run)[2])["layer.0", "fprop_x"]["sqnr"])


@pytest.mark.parametrize(("operands", "weights"), [(True, None), (True, False), (False, True), (False, None)])
def test_operands_or_weights(operands, weights):
    run = trainer(QuantizationMonitor(only=[r"layer\.2"], operands=operands, weights=weights))
    run.fit(Two())
    found = logged(run, {*NAMES, "flips", "distance"})[3]
    of_operands = {f"{name}/{operand}/layer.2" for name in NAMES for operand in OPERANDS}
    of_operands |= {f"{name}/{operand}" for name in MEANS for operand in OPERANDS}
    of_weights = {f"{name}/fprop_w/layer.2" for name in ("flips", "distance")}
    assert set(found) == (of_operands if operands else set()) | (of_weights if weights is not False else set())
