"""A monitor ends no run: whatever a run lacks or holds, it trains on, with one line of what is not measured."""

import math
import re
import warnings
from itertools import product

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_lowbit import (
    FP4Precision,
    GradientNoiseMonitor,
    GradientNormMonitor,
    LossScaleMonitor,
    OutlierMonitor,
    PrecisionSummary,
    QuantizationMonitor,
    RunReport,
    SpikeRollback,
    Throughput,
)
from tests.lightning_imports import DeepSpeedStrategy, LightningModule, MisconfigurationException, quiet_trainer
from tests.tables import each

STEPS = 3

MONITORS = {
    "norm": lambda: GradientNormMonitor(every_n_steps=1),
    "noise, draws": lambda: GradientNoiseMonitor(every_n_steps=1),
    "noise, layers": lambda: GradientNoiseMonitor(every_n_steps=1, kind="layers"),
    "outliers": OutlierMonitor,
    "outliers, swiglu": lambda: OutlierMonitor(swiglu=True),
    "quantization": QuantizationMonitor,
    "quantization, weights": lambda: QuantizationMonitor(weights=True, blocks=True),
    "loss scale": LossScaleMonitor,
    "throughput": Throughput,
    "summary": PrecisionSummary,
    "report": RunReport,
}


class Model(LightningModule):
    """Trains a network on random inputs."""

    def __init__(self, net, x=None, scale=1.0):
        super().__init__()
        self.net, self.scale = net, scale
        self.x = torch.randn(8, 16) if x is None else x

    def loss(self):
        y = self.net(self.x)
        y = torch.view_as_real(y) if y.is_complex() else y
        return y.float().square().mean() * self.scale

    def training_step(self, batch, batch_idx):
        return self.loss()

    def train_dataloader(self):
        return DataLoader(range(STEPS))

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class Manual(Model):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss())
        optimizer.step()


class Opaque(Model):
    """Batches of which no size can be told."""

    def train_dataloader(self):
        return DataLoader(range(STEPS), collate_fn=lambda batch: object())


class Skipped(Model):
    def training_step(self, batch, batch_idx):
        return None


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 4, dtype=torch.complex64))

    def forward(self, x):
        return x.to(torch.complex64) @ self.weight


class Odd(nn.Module):
    """Parameters of integers, without elements, without a gradient; a layer without inputs, and one not called."""

    def __init__(self):
        super().__init__()
        self.whole = nn.Parameter(torch.arange(4), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.unused = nn.Linear(4, 4)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.none = nn.Linear(0, 4)
        self.linear = nn.Linear(16, 4)

    def forward(self, x):
        return self.linear(x) + self.empty.sum() + self.none(x[:, :0])


def mlp():
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def frozen(net):
    net[0].requires_grad_(False)
    return net


IDS, IMAGES = torch.arange(8), torch.randn(2, 3, 8, 8)
RUNS = {
    "usual": lambda: Model(mlp()),
    "convolutions": lambda: Model(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ConvTranspose2d(8, 2, 3)), IMAGES),
    "convolution of one image": lambda: Model(nn.Conv2d(3, 8, 3), IMAGES[0]),
    "embedding": lambda: Model(nn.Embedding(8, 4), IDS),
    "sparse": lambda: Model(nn.Embedding(8, 4, sparse=True), IDS),
    "norms alone": lambda: Model(nn.LayerNorm(16)),
    "manual": lambda: Manual(mlp()),
    "frozen": lambda: Model(frozen(mlp())),
    "converged": lambda: Model(mlp(), torch.zeros(8, 16), scale=0.0),
    "NaN": lambda: Model(mlp(), scale=math.nan),
    "opaque batches": lambda: Opaque(mlp()),
    "no loss": lambda: Skipped(mlp()),
    "odd parameters": lambda: Model(Odd()),
    "complex": lambda: Model(nn.Sequential(mlp(), nn.Linear(4, 16), Complex())),
    "no rows": lambda: Model(mlp(), torch.zeros(8, 16)[:0]),
    "recurrent": lambda: Model(nn.Sequential(nn.Linear(16, 16), Last(nn.GRU(16, 4)))),
}


class Last(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x)[0]


PLUGINS = {"plugin": lambda: [FP4Precision("nvfp4", compute_dtype="fp32", only=None)], "none": list}
# Two of one class need different state keys.
VARIANTS = ("noise, layers", "outliers, swiglu", "quantization, weights")
REPORTS = ("summary", "report")  # which take longer
TOGETHER = [[name for name in MONITORS if name not in VARIANTS + REPORTS], list(VARIANTS)]


def run(model, monitors, plugins, **kwargs):
    """Trains, and returns the lines that say what is not measured."""
    used = {"max_steps": STEPS, "log_every_n_steps": 1, **kwargs}
    with warnings.catch_warnings(record=True, action="always") as said:
        trainer = quiet_trainer(*plugins, callbacks=[MONITORS[name]() for name in monitors], **used)
        trainer.fit(model)
    if not isinstance(model, Skipped):
        assert trainer.global_step == used["max_steps"]
    return [str(one.message) for one in said if "Not measured" in str(one.message)]


def check(name, plugin, monitors, **kwargs):
    try:
        lines = run(RUNS[name](), monitors, PLUGINS[plugin](), **kwargs)
    except ValueError as error:  # of the plugin, not of a monitor
        assert "holds no layer to quantize" in str(error) and name in ("embedding", "sparse", "norms alone")
        return
    assert len(lines) <= len(monitors), lines
    assert all(re.search("leave|[Gg]ive|use ", line) for line in lines), lines


@each("plugin, name", product(PLUGINS, RUNS), fast=5)
def test_any_run_trains(name, plugin):
    for monitors in TOGETHER if plugin == "plugin" else TOGETHER[:1]:
        check(name, plugin, monitors)


def test_reports_of_any_run(tmp_path):
    for name, plugin in (("convolutions", "plugin"), ("embedding", "none"), ("odd parameters", "plugin")):
        check(name, plugin, REPORTS, default_root_dir=str(tmp_path))


@each("kwargs", [
    {"barebones": True, "logger": None, "enable_checkpointing": None, "enable_progress_bar": None,
     "enable_model_summary": None, "log_every_n_steps": None},
    {"enable_model_summary": True, "fast_dev_run": STEPS},
    {"accumulate_grad_batches": 2, "max_steps": STEPS // 2},
], fast=1)  # fmt: skip
def test_any_trainer(kwargs):
    for monitors in TOGETHER:
        check("usual", "plugin", monitors, **kwargs)


def test_a_line_for_what_is_missing():
    """One line for each monitor that measures nothing, and none for the others."""
    names = ["norm", "noise, draws", "outliers", "loss scale", "throughput"]
    said = {name: run(RUNS["opaque batches"](), [name], []) for name in names}
    assert {name: len(lines) for name, lines in said.items()} == {
        **dict.fromkeys(names, 1), "norm": 0, "outliers": 0,
    }  # fmt: skip
    assert said["throughput"][0].startswith("Not measured: samples/s, for Throughput cannot tell how many a object")


def test_convolutions_are_measured():
    """By the channels of their inputs, with and without a batch dimension."""
    for image, plugin in ((IMAGES, "plugin"), (IMAGES[0], "none")):
        model, monitor = Model(nn.Conv2d(3, 8, 3), image.clone()), OutlierMonitor()
        model.x[..., 1, 2, 2] = 9.0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = quiet_trainer(*PLUGINS[plugin](), callbacks=[monitor], max_steps=1, log_every_n_steps=1)
            trainer.fit(model)
        numbers = monitor.report_data(trainer)["outliers"]["layers"]["net"]
        x = model.x.double()
        kurtosis = ((x - x.mean()) ** 4).mean() / x.var(correction=0) ** 2
        assert numbers["activation_max"] == x.abs().max() and numbers["kurtosis"] == pytest.approx(float(kurtosis))


def test_runs_that_a_callback_cannot_follow():
    """A monitor warns, and a callback that would change the run refuses it."""
    for plugins, module, words in (
        (PLUGINS["plugin"](), Manual(mlp()), "Use automatic optimization, or leave out the callback"),
        ([], Model(mlp()), r"the Trainer has Precision\. Use e\.g\. Trainer\(plugins="),
    ):
        trainer = quiet_trainer(*plugins)
        with pytest.raises(MisconfigurationException, match=words):
            SpikeRollback(phase="bf16").on_fit_start(trainer, module)
        with pytest.warns(UserWarning, match=f"Not measured: .*{words}"):
            GradientNoiseMonitor().on_fit_start(trainer, module)


def test_callbacks_that_share_a_state_are_refused():
    model = Model(mlp())
    model.configure_callbacks = lambda: [RunReport(), RunReport("b.html")]
    with pytest.raises(MisconfigurationException, match="RunReport keeps one state .* has 2 of them. Leave one, in"):
        quiet_trainer(max_steps=1).fit(model)


def test_deepspeed_is_not_measured():
    for monitor, hook, instead in (
        (GradientNormMonitor(), "on_train_start", "leave out the callback"),
        (GradientNoiseMonitor(), "on_fit_start", "use kind='layers'"),
    ):
        trainer = quiet_trainer(*PLUGINS["plugin"]())
        trainer.strategy.__class__ = DeepSpeedStrategy  # which is not installed
        with pytest.warns(UserWarning, match=f"DeepSpeed keeps to itself: {instead}, or train with DDP"):
            getattr(monitor, hook)(trainer, Model(mlp()))
    with pytest.raises(MisconfigurationException, match="DeepSpeed keeps to itself: leave out the callback, or train"):
        SpikeRollback().on_fit_start(trainer, Model(mlp()))


NO_LAYER = "the pattern 'lm_head' matches no {}. There are 2, e.g. net.0, net.2"


@each("make, words", [
    (lambda: GradientNormMonitor(["net", "lm_head"]), f"layers: {NO_LAYER.format('layer with parameters')}"),
    (lambda: GradientNormMonitor("net"), r"layers is a list of patterns; got the string 'net'. Write \['net'\]"),
    (lambda: GradientNormMonitor(["("]), r"layers: '\(' is not a regular expression"),
    (lambda: GradientNoiseMonitor(layers=["lm_head"]), f"layers: {NO_LAYER.format('quantized layer')}"),
    (lambda: OutlierMonitor(["net", "lm_head"]), f"layers: {NO_LAYER.format('linear layer')}"),
    (lambda: OutlierMonitor("net"), "layers is a list of patterns; got the string 'net'"),
    (lambda: QuantizationMonitor(only=["lm_head"]), f"only: {NO_LAYER.format('linear layer')}"),
    (lambda: QuantizationMonitor(only="net"), "list of patterns"),
])  # fmt: skip
def test_patterns_that_match_nothing(make, words):
    plugin = FP4Precision("nvfp4", compute_dtype="fp32", quantize_output=True)
    with pytest.raises(ValueError, match=words):
        quiet_trainer(plugin, callbacks=[make()], max_steps=1).fit(Model(mlp()))


@each("monitor, text", [
    (GradientNormMonitor, "No gradient norm exceeded 5 times its running mean."),
    (GradientNoiseMonitor, "Not measured: every 500 steps, in quantized layers."),
    (OutlierMonitor, "No step with these layers was logged."),
    (LossScaleMonitor, "No optimizer step was taken"),
    (QuantizationMonitor, "No step with quantized weights was logged."),
])  # fmt: skip
def test_a_report_without_measurements(monitor, text):
    (section,) = monitor().report_sections(quiet_trainer())
    assert section.blocks[0].text.startswith(text)
