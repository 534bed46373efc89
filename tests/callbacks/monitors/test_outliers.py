"""Curves are what the definitions say of whole steps; alerts name their channels, once; and nothing changes."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_lowbit import LowBitPrecision, OutlierMonitor, RunReport
from lightning_lowbit.metrics import swiglu_alignment
from lightning_lowbit.report.html import Table
from tests.callbacks.monitors.device_reads import HOOKS, counted
from tests.callbacks.monitors.ranks_outliers import EVERY, MLP, RANKS, STEPS, train
from tests.launch import launch
from tests.lightnings import (
    BoringModel,
    Callback,
    LightningCLI,
    LightningModule,
    MisconfigurationException,
    TensorBoardLogger,
    Trainer,
)
from tests.metrics.activations import activation_outliers

CLOSE = {"rtol": 1e-5, "atol": 1e-7}  # sums of float32 in another order
METRICS = ("activation_max", "kurtosis", "outliers")
LAYERS = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "lm_head"]


class Model(LightningModule):
    """Learns from batches that follow from their number; those that are planned hold an outlier in channel 5."""

    def __init__(self, planned: dict[int, float] | None = None, wrap: Callable[..., Any] | None = None) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.mlp, self.lm_head = MLP(16, 12), nn.Linear(16, 4)
        self.planned, self.wrap = planned or {}, wrap
        self.seen: dict[int, list[Tensor]] = {}  # what enters the MLP, by optimizer step

    def batch(self, number: int) -> Tensor:
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(number))
        x[3, 5] = self.planned.get(number, x[3, 5].item())
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(x + (self.wrap(self.mlp, x) if self.wrap else self.mlp(x)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.batch(self.trainer.fit_loop.epoch_loop.total_batch_idx)
        self.seen.setdefault(self.trainer.global_step + 1, []).append(x)
        return self(x).float().square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self(torch.full((4, 16), 1000.0))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(range(256))

    def val_dataloader(self) -> DataLoader:
        return DataLoader(range(2))


def trainer(*callbacks: Callback, **kwargs: Any) -> Trainer:
    defaults = {
        "max_steps": 6,
        "log_every_n_steps": 1,
        "limit_val_batches": 0,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(accelerator="cpu", callbacks=list(callbacks), **{**defaults, **kwargs})


def logged(run: Trainer) -> dict[int, dict[str, float]]:
    """What the event file holds of layers and MLPs, by optimizer step (Lightning numbers the first one 0)."""
    assert run.logger is not None
    run.logger.finalize("success")
    events = EventAccumulator(run.logger.log_dir).Reload()
    found: dict[int, dict[str, float]] = {}
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag) if "/" in tag else ():
            assert tag not in found.setdefault(event.step + 1, {}), f"{tag} twice in step {event.step + 1}"
            found[event.step + 1][tag] = event.value
    return found


def fit(model: LightningModule, monitor: OutlierMonitor | None = None, **kwargs: Any) -> dict[int, dict[str, float]]:
    run = trainer(monitor or OutlierMonitor(), logger=TensorBoardLogger("."), **kwargs)
    run.fit(model)
    return logged(run)


def texts(said: pytest.WarningsRecorder) -> list[str]:
    return [str(one.message) for one in said if str(one.message).startswith("OutlierMonitor")]


def assert_same(found: Any, wanted: Any) -> None:
    assert found.keys() == wanted.keys()
    for step in wanted:
        assert found[step].keys() == wanted[step].keys(), f"step {step}"
        for name, value in wanted[step].items():
            message = f"step {step}, {name}: {found[step][name]}, wanted {value}"
            torch.testing.assert_close(found[step][name], value, **CLOSE, equal_nan=True, msg=message)


# --- curves -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("every", "accumulate"), [(1, 1), (2, 3)])
def test_curves_are_what_the_definitions_say(every: int, accumulate: int) -> None:
    """Outliers are beyond the rms of their pass, the rest is of all micro-batches together."""

    class Last(Callback):
        def on_train_batch_end(self, run: Trainer, model: Any, *_: Any) -> None:
            found = swiglu_alignment(model.mlp.gate_proj.weight, model.mlp.up_proj.weight)
            weights[run.global_step] = {"alignment": found.cosine.max(), "gate_norm": found.gate_norm.max()}

    weights: dict[int, dict[str, Tensor]] = {}
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


def test_layers_are_those_that_are_quantized_or_chosen() -> None:
    plugin = LowBitPrecision("fp8-current", compute_dtype="fp32", skip=["lm_head"])
    rows = fit(Model(), OutlierMonitor(swiglu=False), plugins=[plugin], max_steps=1)
    assert {name.partition("/")[2] for name in rows[1]} == set(LAYERS[:3])
    for layers, wanted in ((["lm_head"], LAYERS[3:]), (["mlp"], LAYERS[:3])):
        plugin = LowBitPrecision("fp8-current", compute_dtype="fp32", skip=["lm_head"])
        rows = fit(Model(), OutlierMonitor(layers, swiglu=False), plugins=[plugin], max_steps=1)
        assert {name.partition("/")[2] for name in rows[1]} == set(wanted)


def test_smoothed_or_quantized_input_is_seen_as_it_comes() -> None:
    plain, model = fit(Model(), max_steps=1), Model()
    plugin = LowBitPrecision("fp8-current", compute_dtype="fp32", smooth_swiglu="channel")
    found = fit(model, plugins=[plugin], max_steps=1)
    for metric in METRICS:  # what enters the MLP, not yet quantized
        assert found[1][f"{metric}/mlp.up_proj"] == pytest.approx(plain[1][f"{metric}/mlp.up_proj"], rel=1e-5)


def test_a_layer_that_is_not_called_has_no_numbers() -> None:
    class Idle(Model):
        def __init__(self) -> None:
            super().__init__()
            self.idle = nn.Linear(3, 3)

    monitor = OutlierMonitor()
    found = fit(Idle(), monitor, max_steps=2)
    assert {"kurtosis/mlp.up_proj", "kurtosis/lm_head"} <= found[2].keys()
    assert not [name for name in found[2] if name.endswith("idle")]
    assert "idle" not in monitor.report_data(trainer())["outliers"]["layers"]


def test_an_input_by_keyword() -> None:
    class Keyword(Model):
        def forward(self, x: Tensor) -> Tensor:
            return self.lm_head(input=x)

    model = Keyword()
    found = fit(model, OutlierMonitor(["lm_head"]), max_steps=1)
    wanted = activation_outliers(model.seen[1][0])
    assert found[1]["activation_max/lm_head"] == pytest.approx(float(wanted.channel_amax.max()))
    assert found[1]["kurtosis/lm_head"] == pytest.approx(float(wanted.kurtosis), rel=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_computing_activations_again_changes_no_value(reentrant: bool) -> None:
    def again(mlp: nn.Module, x: Tensor) -> Tensor:
        calls.append(torch.is_grad_enabled())
        return checkpoint(mlp, x.requires_grad_(), use_reentrant=reentrant)

    calls: list[bool] = []
    plan = {1: 30.0}
    found = fit(Model(plan, again), accumulate_grad_batches=2)
    assert calls, "nothing was checkpointed"
    assert_same(found, fit(Model(plan), accumulate_grad_batches=2))


def test_manual_optimization() -> None:
    class Manual(Model):
        automatic_optimization = False

        def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
            for _ in range(2):
                self.manual_backward(super().training_step(batch, batch_idx))
                self.optimizers().step()
                self.optimizers().zero_grad()

    model = Manual()
    found = fit(model, max_steps=8, log_every_n_steps=2)
    assert sorted(found) == [2, 4]
    wanted = activation_outliers(torch.cat([model.seen[step][0] for step in (7, 8)]))
    assert found[4]["kurtosis/mlp.up_proj"] == pytest.approx(float(wanted.kurtosis), rel=1e-5)


# --- torch.compile ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # from Dynamo
@pytest.mark.parametrize("part", ["model", "blocks"])
def test_compiled(part: str) -> None:
    """Ten blocks, more than torch would compile if each needed a graph of its own."""

    class Block(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return x + super().forward(x)

    class Blocks(Model):
        def __init__(self, compiles: bool) -> None:
            super().__init__()
            blocks: list[Any] = [Block(16, 12) for _ in range(10)]
            for number, block in enumerate(blocks):
                generator = torch.Generator().manual_seed(number)
                for parameter in block.parameters():
                    nn.init.normal_(parameter, 0, 0.1, generator)
                if compiles and part == "blocks":
                    block.compile(backend="aot_eager", fullgraph=True)
            body: Any = nn.Sequential(*blocks)
            self.mlp = (
                torch.compile(body, backend="aot_eager", fullgraph=True) if compiles and part == "model" else body
            )

    torch._dynamo.reset()
    counters.clear()
    graphs: list[int] = []

    class Look(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            graphs.append(counters["stats"]["unique_graphs"])

    run = trainer(OutlierMonitor(), Look(), logger=TensorBoardLogger("."), log_every_n_steps=2, max_steps=8)
    run.fit(Blocks(compiles=True))
    assert_same(logged(run), fit(Blocks(compiles=False), log_every_n_steps=2, max_steps=8))
    assert not counters["graph_break"]
    assert graphs[0] < graphs[1] == 2 * graphs[0], "hooks are not compiled"
    assert graphs[-1] == graphs[1], f"graphs by step: {graphs}"
    assert graphs[0] <= 2, "blocks do not share a graph"  # the first block's input needs no gradient


# --- two processes ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch("tests.callbacks.monitors.ranks_outliers", RANKS, tmp_path_factory.mktemp("outliers"))


@pytest.mark.parametrize("how", ["ddp", "fsdp2", "tp", "fsdp1"])
def test_two_processes_log_what_one_does(results: list[dict[str, Any]], how: str) -> None:
    first, second = (result[how] for result in results)
    assert sorted(first["curves"]) == list(range(EVERY, STEPS + 1, EVERY))
    assert first["curves"] == second["curves"], "ranks log different values"
    assert first["state"] == second["state"]
    alone = train("auto", "", 8 if how == "tp" else 9, 1)["curves"]
    if how == "fsdp1":  # flattened weights
        alone = {step: {n: v for n, v in row.items() if not n.endswith("/mlp")} for step, row in alone.items()}
    if how == "tp":  # of the input of the down projection each rank has half of the channels, and their rms
        for row in (*first["curves"].values(), *alone.values()):
            assert row.pop("outliers/mlp.down_proj") > 0
    assert_same(first["curves"], alone)
    assert first["curves"][2]["outliers/mlp.up_proj"] == 2 / (32 * 16), "a planted outlier is missed"


@pytest.mark.parametrize("how", ["ddp", "fsdp2", "tp", "fsdp1"])
def test_two_collectives_in_a_logged_step(results: list[dict[str, Any]], how: str) -> None:
    for rank, result in enumerate(results):
        wanted = [2 * int(step % EVERY == 0) for step in range(1, STEPS + 1)]
        assert result[how]["collectives"] == wanted, f"rank {rank}"


def test_flattened_weights_are_refused_where_they_are_asked_for(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert "swiglu=True needs the rows of weights, which FSDPOnCPU flattens and shards" in result["refused"]


# --- nothing is disturbed ---------------------------------------------------------------------------------------------


def test_watching_changes_nothing() -> None:
    ends = []
    for callbacks in ([], [OutlierMonitor()]):
        torch.manual_seed(0)
        plugin = LowBitPrecision("nvfp4", compute_dtype="fp32")
        run, model = trainer(*callbacks, plugins=[plugin], log_every_n_steps=2), Model({3: 9.0})
        run.fit(model)
        ends.append([*model.parameters(), *(p.grad for p in model.parameters()), torch.rand(3)])
        assert not any(module._forward_pre_hooks for module in model.modules()), "hooks are left behind"
    for number, (a, b) in enumerate(zip(*ends, strict=True)):
        assert a.equal(b), f"tensor {number} differs: weights, gradients, random numbers"


def test_hooks_go_after_an_error() -> None:
    class Breaks(Model):
        def on_before_zero_grad(self, *_: Any) -> None:
            hooked.append(sum(len(module._forward_pre_hooks) for module in self.modules()))
            raise RuntimeError("broken")

    hooked: list[int] = []
    model = Breaks()
    with pytest.raises(RuntimeError, match="broken"):
        trainer(OutlierMonitor()).fit(model)
    assert hooked == [4]
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_nothing_is_read_between_logged_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    Watched, reads = counted(OutlierMonitor, monkeypatch)
    trainer(Watched(), log_every_n_steps=4, max_steps=10).fit(Model())
    for hook in ("on_train_batch_start", "on_train_batch_end"):
        assert reads.pop((hook, -1)) == 10, f"{hook} was not watched"
    reads.pop((HOOKS[1], -1), None)
    assert +reads == {("on_train_batch_start", 4): 1, ("on_train_batch_start", 8): 1}


def test_hooks_read_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reads(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(str(func))
            return func(*args, **(kwargs or {}))

    class Watched(Model):
        def forward(self, x: Tensor) -> Tensor:
            with Reads():
                return super().forward(x)

    calls: list[str] = []
    trainer(OutlierMonitor(), log_every_n_steps=2, max_steps=2).fit(Watched())
    assert any("amax" in call for call in calls), "hooks were not watched"
    assert not [call for call in calls if "_local_scalar_dense" in call or "nonzero" in call]


# --- alerts -----------------------------------------------------------------------------------------------------------


def test_a_channel_takes_off() -> None:
    plan = {**dict.fromkeys(range(40), 6.0), 15: 60.1, 18: 200.0, 20: 1400.0}
    with pytest.warns(UserWarning) as said:
        fit(Model(plan), OutlierMonitor(["up_proj"], swiglu=False), max_steps=24)
    text, worse = texts(said)
    assert "mlp.up_proj, step 21: channel 5" in worse
    assert worse.endswith("It is much worse than at step 16.")
    assert "mlp.up_proj, step 16: channel 5 of what enters it reaches 60.1, where the largest of all was 6" in text


def test_takeoff_needs_measurements_and_can_be_changed() -> None:
    six = dict.fromkeys(range(40), 6.0)
    fit(Model({**six, 9: 700.0}), OutlierMonitor(["up_proj"], swiglu=False), max_steps=10)  # warnings are errors
    fit(Model({**six, 15: 59.9}), OutlierMonitor(["up_proj"], swiglu=False), max_steps=16)
    fit(Model({**six, 15: 700.0}), OutlierMonitor(["up_proj"], swiglu=False, takeoff=None), max_steps=16)
    with pytest.warns(UserWarning, match=r"up_proj, step 11: channel 5 .* reaches 12.1"):
        fit(Model({**six, 10: 12.1}), OutlierMonitor(["up_proj"], swiglu=False, takeoff=2.0), max_steps=11)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_not_finite(value: float) -> None:
    class Still(Model):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return 0 * self.lm_head.bias.sum() + 0 * torch.nan_to_num(super().training_step(batch, batch_idx)).detach()

    monitor = OutlierMonitor(["up_proj", "lm_head"])
    with pytest.warns(UserWarning) as said:
        found = fit(Still({3: value, 4: value}), monitor)
    (text,) = texts(said)
    assert ": 2 layers, the worst mlp.up_proj, step 4: what enters it is not finite" in text
    assert not math.isfinite(found[4]["activation_max/mlp.up_proj"])
    assert math.isnan(found[4]["kurtosis/mlp.up_proj"])
    assert monitor.state_dict()["means"]["mlp.up_proj"]["count"] == 4, "what is not finite enters the mean"


def test_alignment_names_its_channels() -> None:
    model = Model()
    with torch.no_grad():
        for channel in (2, 7):
            model.mlp.up_proj.weight[channel] = -3 * model.mlp.gate_proj.weight[channel]
    with pytest.warns(UserWarning) as said:
        found = fit(model, OutlierMonitor(alignment_limit=0.95))
    (text,) = texts(said)
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


# --- state and report -------------------------------------------------------------------------------------------------


def test_a_resumed_run_is_the_uninterrupted_one() -> None:
    plan = {**dict.fromkeys(range(40), 6.0), 9: 9.0, 12: 61.0, 16: 200.0}
    curves, states = [], []
    for name, steps, resumed in (("whole", 18, None), ("half", 14, None), ("rest", 18, "half.ckpt")):
        monitor = OutlierMonitor(["up_proj"], swiglu=False, takeoff=9.0)
        run = trainer(monitor, max_steps=steps, logger=TensorBoardLogger(name), limit_train_batches=1)
        model = Model(plan)
        if name == "rest":
            run.fit(model, ckpt_path=resumed, weights_only=True)  # what was said is not repeated
        else:
            with pytest.warns(UserWarning, match="up_proj, step 13: channel 5"):
                run.fit(model)
        run.save_checkpoint(f"{name}.ckpt")
        curves.append(logged(run))
        states.append(monitor.state_dict())
    assert curves[0] == curves[1] | curves[2]
    assert states[0] == states[2]
    assert torch.load("half.ckpt", weights_only=True)["callbacks"]["OutlierMonitor"] == states[1]
    assert states[1]["means"]["mlp.up_proj"]["count"] == 14


def test_another_run_begins_anew() -> None:
    monitor = OutlierMonitor(["up_proj"], swiglu=False)
    for _ in range(2):
        trainer(monitor).fit(Model())
        assert monitor.state_dict()["means"]["mlp.up_proj"]["count"] == 6


def test_reported() -> None:
    plan = {**dict.fromkeys(range(40), 6.0), 13: 100.0}
    monitor = OutlierMonitor()
    with pytest.warns(UserWarning, match="takeoff=10"):
        run = trainer(RunReport(), monitor, max_steps=14)
        run.fit(Model(plan))
    layers, mlps = monitor.report_sections(run)[0].blocks
    assert isinstance(layers, Table)
    assert isinstance(mlps, Table)
    assert [row[0] for row in layers.rows] == LAYERS
    assert layers.rows[1][1] == "100"
    assert layers.rows[1][-1] == "takeoff"
    assert [row[0] for row in mlps.rows] == ["mlp"]
    assert "At step 14" in str(layers.caption)
    found = json.loads(Path("run.json").read_text())["summary"]["outliers"]
    assert found["step"] == 14
    assert found["alerts"] == monitor.report_alerts(run)
    assert found["layers"]["mlp.up_proj"]["activation_max"] == 100
    assert found["mlps"]["mlp"].keys() == {"alignment", "gate_norm"}
    assert "Outliers" in Path("report.html").read_text()


def test_reported_without_a_step() -> None:
    assert "No step" in str(OutlierMonitor().report_sections(trainer())[0].blocks)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"swiglu": "yes"}, "swiglu is True, False or None, which looks where it can; got 'yes'"),
        ({"swiglu": 1}, "looks where it can; got 1"),
        ({"k": 0}, "k is how many times the rms an outlier exceeds, above 0; got 0"),
        ({"k": math.inf}, "above 0; got inf"),
        ({"k": None}, "above 0; got None"),
        ({"alignment_limit": 1.5}, r"alignment_limit is a \|cos\|, above 0 and at most 1, or None; got 1.5"),
        ({"alignment_limit": 0}, "or None; got 0"),
        ({"takeoff": 1}, "takeoff is how many times the mean is too much, above 1, or None; got 1"),
        ({"takeoff": math.nan}, "or None; got nan"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OutlierMonitor(**arguments)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (["mlp", "q_proj"], "layers: the pattern 'q_proj' matches no linear layer. There are 4, e.g. mlp.gate_proj"),
        ("mlp", "layers is a list of patterns; got the string 'mlp'"),
    ],
)
def test_bad_patterns(layers: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trainer(OutlierMonitor(layers)).fit(Model())


def test_what_is_not_there() -> None:
    class Convolution(Model):
        def __init__(self) -> None:
            super().__init__()
            del self.mlp, self.lm_head
            self.layer = nn.Conv1d(1, 1, 3)

        def forward(self, x: Tensor) -> Tensor:
            return F.silu(self.layer(x[:, None]))

    with pytest.raises(MisconfigurationException, match="Convolution holds none: leave it out"):
        trainer(OutlierMonitor()).fit(Convolution())
    with pytest.raises(MisconfigurationException, match="swiglu=True looks at SwiGLUs, and BoringModel holds none"):
        trainer(OutlierMonitor(swiglu=True)).fit(BoringModel())


def test_from_a_yaml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py"])
    arguments = {"layers": ["mlp"], "swiglu": False, "k": 5.0, "alignment_limit": None, "takeoff": 3.0}
    path = f"{OutlierMonitor.__module__}.OutlierMonitor"
    config = {
        "seed_everything": 1,
        "trainer": {"accelerator": "cpu", "callbacks": [{"class_path": path, "init_args": arguments}]},
    }
    Path("run.yaml").write_text(yaml.safe_dump(config))
    args = ["--config", "run.yaml"]
    cli = LightningCLI(BoringModel, args=args, run=False, save_config_callback=None, auto_configure_optimizers=False)
    (monitor,) = [one for one in cli.trainer.callbacks if isinstance(one, OutlierMonitor)]
    assert {name: getattr(monitor, name) for name in arguments} == arguments
