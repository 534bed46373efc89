"""Curves of outliers, also of compiled models."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_lowbit import LowBitPrecision, OutlierMonitor
from lightning_lowbit.metrics import swiglu_alignment
from tests.callbacks.monitors.outliers.runs import CLOSE, LAYERS, Model, assert_same, fit, logged, trainer
from tests.callbacks.monitors.ranks import MLP
from tests.lightning_imports import Callback, TensorBoardLogger
from tests.metrics.activations import activation_outliers

METRICS = ("activation_max", "kurtosis", "outliers")


@pytest.mark.fast("2-3")
@pytest.mark.parametrize(("every", "accumulate"), [(1, 1), (2, 3)])
def test_curves_are_what_the_definitions_say(every, accumulate):
    """Outliers are beyond the rms of their pass, the rest is of all micro-batches together."""

    class Last(Callback):
        def on_train_batch_end(self, run, model, *_):
            found = swiglu_alignment(model.mlp.gate_proj.weight, model.mlp.up_proj.weight)
            weights[run.global_step] = {"alignment": found.cosine.max(), "gate_norm": found.gate_norm.max()}

    weights = {}
    model = Model({2: 40.0, 9: -50.0})
    run = trainer(
        OutlierMonitor(k=2.0),
        Last(),
        logger=TensorBoardLogger("."),
        log_every_n_steps=every,
        accumulate_grad_batches=accumulate,
        val_check_interval=2,
        limit_val_batches=1,
    )
    run.fit(model)
    found = logged(run)
    assert sorted(found) == list(range(every, 7, every))
    for step, row in found.items():
        names = {f"{metric}/{layer}" for metric in METRICS for layer in LAYERS} | {"alignment/mlp", "gate_norm/mlp"}
        assert row.keys() == names
        assert len(model.seen[step]) == accumulate
        whole = activation_outliers(torch.cat(model.seen[step]))
        share = torch.stack([activation_outliers(x, 2.0).outliers for x in model.seen[step]]).mean()
        for layer in ("mlp.gate_proj", "mlp.up_proj"):
            seen = torch.tensor([row[f"{metric}/{layer}"] for metric in METRICS])
            wanted = torch.stack([whole.channel_amax.max(), whole.kurtosis, share])
            torch.testing.assert_close(seen, wanted, **CLOSE, msg=f"step {step}, {layer}: {seen}, wanted {wanted}")
        for metric, value in weights[step].items():
            assert row[f"{metric}/mlp"] == pytest.approx(float(value), rel=1e-6)
    assert max(row["kurtosis/mlp.up_proj"] for row in found.values()) > 50, "no outlier was planted"


def test_layers_are_those_that_are_quantized_or_chosen():
    plugin = LowBitPrecision("fp8-current", compute_dtype="fp32", skip=["lm_head"])
    rows = fit(Model(), OutlierMonitor(swiglu=False), plugins=[plugin], max_steps=1)
    assert {name.partition("/")[2] for name in rows[1]} == set(LAYERS[:3])
    for layers, wanted in ((["lm_head"], LAYERS[3:]), (["mlp"], LAYERS[:3])):
        plugin = LowBitPrecision("fp8-current", compute_dtype="fp32", skip=["lm_head"])
        rows = fit(Model(), OutlierMonitor(layers, swiglu=False), plugins=[plugin], max_steps=1)
        assert {name.partition("/")[2] for name in rows[1]} == set(wanted)


def test_smoothed_or_quantized_input_is_seen_as_it_comes():
    plain, model = fit(Model(), max_steps=1), Model()
    plugin = LowBitPrecision("fp8-current", compute_dtype="fp32", smooth_swiglu="channel")
    found = fit(model, plugins=[plugin], max_steps=1)
    for metric in METRICS:  # what enters the MLP, not yet quantized
        assert found[1][f"{metric}/mlp.up_proj"] == pytest.approx(plain[1][f"{metric}/mlp.up_proj"], rel=1e-5)


def test_a_layer_that_is_not_called_has_no_numbers():
    class Idle(Model):
        def __init__(self):
            super().__init__()
            self.idle = nn.Linear(3, 3)

    monitor = OutlierMonitor()
    found = fit(Idle(), monitor, max_steps=2)
    assert {"kurtosis/mlp.up_proj", "kurtosis/lm_head"} <= found[2].keys()
    assert not [name for name in found[2] if name.endswith("idle")]
    assert "idle" not in monitor.report_data(trainer())["outliers"]["layers"]


def test_an_input_by_keyword():
    class Keyword(Model):
        def forward(self, x):
            return self.lm_head(input=x)

    model = Keyword()
    found = fit(model, OutlierMonitor(["lm_head"]), max_steps=1)
    wanted = activation_outliers(model.seen[1][0])
    assert found[1]["activation_max/lm_head"] == pytest.approx(float(wanted.channel_amax.max()))
    assert found[1]["kurtosis/lm_head"] == pytest.approx(float(wanted.kurtosis), rel=1e-5)


@pytest.mark.fast("True")
@pytest.mark.parametrize("reentrant", [False, True])
def test_computing_activations_again_changes_no_value(reentrant):
    def again(mlp, x):
        calls.append(torch.is_grad_enabled())
        return checkpoint(mlp, x.requires_grad_(), use_reentrant=reentrant)

    calls = []
    plan = {1: 30.0}
    found = fit(Model(plan, again), accumulate_grad_batches=2)
    assert calls, "nothing was checkpointed"
    assert_same(found, fit(Model(plan), accumulate_grad_batches=2))


def test_manual_optimization():
    class Manual(Model):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            for _ in range(2):
                self.manual_backward(super().training_step(batch, batch_idx))
                self.optimizers().step()
                self.optimizers().zero_grad()

    model = Manual()
    found = fit(model, max_steps=8, log_every_n_steps=2)
    assert sorted(found) == [2, 4]
    wanted = activation_outliers(torch.cat([model.seen[step][0] for step in (7, 8)]))
    assert found[4]["kurtosis/mlp.up_proj"] == pytest.approx(float(wanted.kurtosis), rel=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # from Dynamo
@pytest.mark.parametrize("part", ["model", "blocks"])
def test_compiled(part, compiler):
    """Ten blocks, more than torch would compile if each needed a graph of its own."""

    class Block(MLP):
        def forward(self, x):
            return x + super().forward(x)

    class Blocks(Model):
        def __init__(self, compiles):
            super().__init__()
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(4)
                self.mlp = nn.Sequential(*(Block(16, 12) for _ in range(10)))
            if compiles and part == "model":
                self.mlp = torch.compile(self.mlp, backend=compiler, fullgraph=True)
            for block in self.mlp if compiles and part == "blocks" else ():
                block.compile(backend=compiler, fullgraph=True)

    class Look(Callback):
        def on_train_batch_end(self, *_):
            graphs.append(compiler.frame_count)

    graphs = []
    run = trainer(OutlierMonitor(), Look(), logger=TensorBoardLogger("."), log_every_n_steps=2, max_steps=8)
    run.fit(Blocks(compiles=True))
    assert_same(logged(run), fit(Blocks(compiles=False), log_every_n_steps=2, max_steps=8))
    assert graphs[0] < graphs[1] == 2 * graphs[0], "hooks are not compiled"
    assert graphs[-1] == graphs[1], f"graphs by step: {graphs}"
    assert graphs[0] <= 2, "blocks do not share a graph"  # the first block's input needs no gradient
