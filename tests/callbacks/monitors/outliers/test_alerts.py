"""Alerts, state, report and refusals of the outlier monitor."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_lowbit import OutlierMonitor
from tests.callbacks.monitors.outliers.runs import LAYERS, Model, fit, trainer
from tests.callbacks.monitors.said import alerts_said
from tests.lightning_imports import BoringModel


def test_a_channel_takes_off():
    plan = {**dict.fromkeys(range(40), 6.0), 15: 60.1, 18: 200.0, 20: 1400.0}
    with alerts_said() as said:
        fit(Model(plan), OutlierMonitor(["up_proj"], swiglu=False), max_steps=24)
    text, worse = said
    assert "mlp.up_proj, step 21: channel 5" in worse
    assert worse.endswith("It is much worse than at step 16.")
    assert "mlp.up_proj, step 16: channel 5 of what enters it reaches 60.1, where the largest of all was 6" in text


@pytest.mark.slow
def test_takeoff_needs_measurements_and_can_be_changed():
    six = dict.fromkeys(range(40), 6.0)
    fit(Model({**six, 9: 700.0}), OutlierMonitor(["up_proj"], swiglu=False), max_steps=10)  # warnings are errors
    fit(Model({**six, 15: 59.9}), OutlierMonitor(["up_proj"], swiglu=False), max_steps=16)
    fit(Model({**six, 15: 700.0}), OutlierMonitor(["up_proj"], swiglu=False, takeoff=None), max_steps=16)
    with pytest.warns(UserWarning, match=r"up_proj, step 11: channel 5 .* reaches 12.1"):
        fit(Model({**six, 10: 12.1}), OutlierMonitor(["up_proj"], swiglu=False, takeoff=2.0), max_steps=11)


@pytest.mark.fast("nan")
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_not_finite(value):
    class Still(Model):
        def training_step(self, batch, batch_idx):
            return 0 * self.lm_head.bias.sum() + 0 * torch.nan_to_num(super().training_step(batch, batch_idx)).detach()

    monitor = OutlierMonitor(["up_proj", "lm_head"])
    with alerts_said() as said:
        found = fit(Still({3: value, 4: value}), monitor)
    (text,) = said
    assert "2 layers, the worst mlp.up_proj, step 4: what enters it is not finite" in text
    assert not math.isfinite(found[4]["activation_max/mlp.up_proj"])
    assert math.isnan(found[4]["kurtosis/mlp.up_proj"])
    assert monitor.state_dict()["means"]["mlp.up_proj"]["count"] == 4, "what is not finite enters the mean"


def test_alignment_names_its_channels():
    model = Model()
    with torch.no_grad():
        for channel in (2, 7):
            model.mlp.up_proj.weight[channel] = -3 * model.mlp.gate_proj.weight[channel]
    with alerts_said() as said:
        found = fit(model, OutlierMonitor(alignment_limit=0.95))
    (text,) = said
    assert "mlp, step 1: channels " in text
    named = text.split("channels ")[1].split(" have")[0]
    assert sorted(int(one.split()[0]) for one in named.split(", ")) == [2, 7]
    assert "above 0.95 (alignment_limit)" in text
    assert found[1]["alignment/mlp"] > 0.99
    fit(model, OutlierMonitor(alignment_limit=None), max_steps=1)
    with torch.no_grad():
        model.mlp.up_proj.weight.copy_(model.mlp.gate_proj.weight)
    with pytest.warns(UserWarning, match="and 9 more channels have"):
        fit(model, max_steps=1)
    with torch.no_grad():
        nn.init.normal_(model.mlp.up_proj.weight)
        model.mlp.up_proj.weight[4] = model.mlp.gate_proj.weight[4]
    with pytest.warns(UserWarning, match=r"step 1: channel 4 \(0.99\d|1.000\) has"):
        fit(model, OutlierMonitor(alignment_limit=0.97), max_steps=1)


def test_reported():
    monitor = OutlierMonitor()
    run = trainer(monitor, max_steps=14)
    with pytest.warns(UserWarning, match="takeoff=10"):
        run.fit(Model({**dict.fromkeys(range(40), 6.0), 13: 100.0}))
    layers, mlps = monitor.report_sections(run)[0].blocks
    assert [row[0] for row in layers.rows] == LAYERS
    assert layers.rows[1][1] == "100"
    assert layers.rows[1][-1] == "takeoff"
    assert [row[0] for row in mlps.rows] == ["mlp"]
    assert "At step 14" in str(layers.caption)
    found = monitor.report_data(run)["outliers"]
    assert found["step"] == 14
    assert found["alerts"] == monitor.report_alerts(run)
    assert found["layers"]["mlp.up_proj"]["activation_max"] == 100
    assert found["mlps"]["mlp"].keys() == {"alignment", "gate_norm"}


def test_what_is_not_there():
    class Convolution(Model):
        def __init__(self):
            super().__init__()
            del self.mlp, self.lm_head
            self.layer = nn.Conv1d(1, 1, 3)

        def forward(self, x):
            return F.silu(self.layer(x[:, None]))

    class Norm(Convolution):
        def __init__(self):
            super().__init__()
            self.layer = nn.BatchNorm1d(1)

    with pytest.warns(UserWarning, match="Not measured: OutlierMonitor .*Norm holds none: leave it out"):
        trainer(OutlierMonitor()).fit(Norm())
    with pytest.warns(UserWarning, match="Not measured: swiglu=True needs SwiGLUs, and BoringModel holds none"):
        trainer(OutlierMonitor(swiglu=True)).fit(BoringModel())
    run = trainer(monitor := OutlierMonitor())
    run.fit(Convolution())
    assert list(monitor.report_data(run)["outliers"]["layers"]) == ["layer"]
