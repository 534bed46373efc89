"""What is logged of operands is what the slow metrics say of each tensor that was quantized; nothing else changes."""

import csv
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_lowbit import LowBitPrecision, PrecisionSwitch, RunReport
from lightning_lowbit.callbacks.monitors import quantization
from lightning_lowbit.callbacks.monitors.quantization import QuantizationMonitor
from lightning_lowbit.nn import OPERANDS, QuantizedLayer
from lightning_lowbit.report.html import HeatMap, Table
from tests.callbacks.monitors.device_reads import HOOKS, counted
from tests.callbacks.monitors.ranks_operand_statistics import EVERY, RANKS, RUNS, STEPS, train
from tests.launch import launch
from tests.lightnings import BoringModel, Callback, CSVLogger, LightningCLI, RandomDataset, TensorBoardLogger, Trainer
from tests.nn.operand_sums import Operands, assert_numbers, captured, numbers_of, places

LAYERS = ["layer.0", "layer.2"]
# The input of the first layer needs no gradient.
PLACES = [(layer, operand) for layer in LAYERS for operand in OPERANDS if (layer, operand[:5]) != ("layer.0", "dgrad")]
NAMES = {"sqnr", "underflow", "saturation", "scale_min", "scale_max"}
MEANS = {"sqnr", "underflow", "saturation"}
FORWARD, BACKWARD = OPERANDS[:2], OPERANDS[2:]

Curves = dict[int, dict[str, float]]


class Two(BoringModel):
    """Data that differ from step to step; the loss of a batch may be multiplied."""

    def __init__(self, factors: Mapping[int, float] | None = None, recompute: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.layer = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16))
        self.factors, self.recompute = factors or {}, recompute

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layer, x, use_reentrant=False) if self.recompute else self.layer(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self(batch).float().square().mean() * self.factors.get(batch_idx, 1.0)

    def validation_step(self, batch: Tensor, batch_idx: int) -> Any:
        self(100 * batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def train_dataloader(self) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            return DataLoader(RandomDataset(32, 64 * 12), batch_size=12)


class Manual(Two):
    automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        for part in batch.split(6):
            optimizer.zero_grad()
            self.manual_backward(super().training_step(part, batch_idx))
            optimizer.step()


class AtBatch(Callback):
    """Does something to a run before one of its batches."""

    def __init__(self, batch: int, action: Callable[[Any], Any]) -> None:
        self.batch, self.action = batch, action

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch:
            self.action(trainer)


class Weights(Callback):
    """Weights, gradients and random numbers after each batch."""

    def __init__(self) -> None:
        self.seen: list[list[Tensor]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        gradients = [p.grad.clone() for p in pl_module.parameters() if p.grad is not None]
        state = torch.random.get_rng_state()
        self.seen.append([*(p.detach().clone() for p in pl_module.parameters()), *gradients, state])


def trainer(*callbacks: Callback, plugin: Any = "nvfp4", **kwargs: Any) -> Trainer:
    defaults = {
        "max_steps": 4,
        "log_every_n_steps": 2,
        "limit_val_batches": 0,
        "logger": CSVLogger("logs"),
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    plugins = [LowBitPrecision(plugin) if isinstance(plugin, str) else plugin] if plugin else None
    return Trainer(accelerator="cpu", plugins=plugins, callbacks=list(callbacks), **{**defaults, **kwargs})


def logged(run: Trainer, names: set[str] = NAMES) -> Curves:
    """What was logged of operands, by the step it was logged at."""
    assert run.logger is not None
    path = Path(run.logger.experiment.metrics_file_path)
    found: Curves = {}
    for row in csv.DictReader(path.read_text().splitlines()) if path.exists() else ():
        values = {name: float(value) for name, value in row.items() if value and name.split("/")[0] in names}
        if values:
            found.setdefault(int(row["step"]), {}).update(values)
    return found


def of_layers(row: Mapping[str, float]) -> dict[tuple[str, str], dict[str, float]]:
    """The numbers by name, by layer and operand."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for tag, value in row.items():
        name, operand, *layer = tag.split("/")
        if layer:
            found.setdefault((layer[0], operand), {})[name] = value
    return found


def fit(model: Any = None, *callbacks: Callback, **kwargs: Any) -> Curves:
    run = trainer(*callbacks, QuantizationMonitor(weights=False), **kwargs)
    run.fit(model or Two())
    return logged(run)


def assert_curves(found: Curves, expected: Curves) -> None:
    assert found.keys() == expected.keys()
    for step, row in expected.items():
        assert found[step].keys() == row.keys(), f"step {step}"
        for name, value in row.items():
            assert found[step][name] == pytest.approx(value, rel=1e-6, nan_ok=True), f"step {step}, {name}"


# --- numbers ----------------------------------------------------------------------------------------------------------

PLUGINS: dict[str, Any] = {
    "nvfp4": lambda: LowBitPrecision("nvfp4"),
    "mxfp4": lambda: LowBitPrecision("mxfp4"),
    "fp8-delayed": lambda: LowBitPrecision("fp8-delayed"),
    "ternary": lambda: LowBitPrecision("ternary"),
    "int4": lambda: LowBitPrecision("int4", compute_dtype="fp32"),  # in bf16 operands are rounded once more
}


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_numbers_are_those_of_the_metrics(plugin: str, accumulate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each layer and operand, over all micro-batches of a step that is logged, and of no other."""
    steps: list[Operands] = []

    class Steps(Callback):
        """What has been captured by the end of a step is of that step."""

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if made and not trainer.fit_loop._should_accumulate():
                steps.append({place: list(each) for place, each in made.items()})
                made.clear()

    with captured(monkeypatch) as made:
        run = trainer(
            Steps(), QuantizationMonitor(weights=False), plugin=PLUGINS[plugin](), accumulate_grad_batches=accumulate
        )
        run.fit(Two({0: 3.0, 4: 0.01, 9: 20.0}))
    found = logged(run)
    assert list(found) == [1, 3], "Lightning numbers the first step 0, and every second one is logged"
    assert len(steps) == 2, "layers measured in other steps"
    for made_in_step, row in zip(steps, found.values(), strict=True):
        expected = places(LAYERS, made_in_step)
        numbers = of_layers(row)
        assert numbers.keys() == expected.keys()
        for (layer, operand), each in expected.items():
            assert len(each) == accumulate
            assert_numbers(numbers[layer, operand], numbers_of(each), f"{layer}, {operand}")
        for name in MEANS:
            for operand in {operand for _, operand in expected}:
                of_one = [numbers[place][name] for place in expected if place[1] == operand]
                mean = pytest.approx(sum(of_one) / len(of_one), rel=1e-5, abs=1e-9)
                assert row[f"{name}/{operand}"] == mean, f"mean of {name}/{operand}"
    if plugin in ("ternary", "int4"):
        assert {operand for _, operand in of_layers(found[1])} == set(FORWARD), "what was taken over is no operand"


def test_phases() -> None:
    """Operands that a phase does not quantize have no numbers, and no means either."""

    def phase(name: str) -> Callable[[Any], None]:
        return lambda run: run.precision_plugin.set_phase(name)

    switches = [AtBatch(2, phase("qaf")), AtBatch(4, phase("bf16")), AtBatch(6, phase("hp-forward"))]
    for order in (0, 1):  # before the monitor and after it
        run = trainer(
            *(switches if order == 0 else []),
            QuantizationMonitor(weights=False),
            *(switches if order == 1 else []),
            log_every_n_steps=1,
            max_steps=8,
        )
        run.fit(Two())
        found = logged(run)
        assert list(found) == [0, 1, 2, 3, 6, 7], "nothing of a step in high precision"
        for steps, operands in (((0, 1), OPERANDS), ((2, 3), FORWARD), ((6, 7), BACKWARD)):
            for step in steps:
                assert {place[1] for place in of_layers(found[step])} == set(operands), f"step {step}"
                means = {name for name in found[step] if name.count("/") == 1}
                assert means == {f"{name}/{operand}" for name in MEANS for operand in operands}, f"step {step}"
                assert all(math.isfinite(value) for value in found[step].values()), f"step {step}"


@pytest.mark.parametrize("share", [0.0, 0.4])
def test_on_the_way_numbers_are_of_where_it_leads(share: float) -> None:
    """Of the first step, whose weights and inputs are those of a run with λ = 1."""
    plugins = [LowBitPrecision("nvfp4") for _ in range(2)]
    plugins[1].set_blend(share)
    rows = [of_layers(fit(plugin=plugin, max_steps=1, log_every_n_steps=1)[0]) for plugin in plugins]
    for operand in ("fprop_x", "fprop_w"):
        assert rows[1]["layer.0", operand] == rows[0]["layer.0", operand]
    assert rows[1]["layer.2", "fprop_x"] != rows[0]["layer.2", "fprop_x"], "λ is 1 in both runs"


def test_computing_activations_again_changes_no_number() -> None:
    assert_curves(*(fit(Two(recompute=recompute)) for recompute in (True, False)))


def test_manual_optimization() -> None:
    """Both passes of a batch together: with a learning rate of 0 those of the whole batch, of rows as of tokens."""

    class Still:
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)  # type: ignore[attr-defined]

    class StillManual(Still, Manual): ...

    class StillTwo(Still, Two): ...

    manual = fit(StillManual(), plugin="mxfp8", max_steps=8)
    whole = fit(StillTwo(), plugin="mxfp8", max_steps=4)
    assert list(manual) == list(whole) == [1, 3]
    for step, row in whole.items():
        expected, found = of_layers(row), of_layers(manual[step])
        assert found.keys() == expected.keys()
        for layer in LAYERS:
            for operand in FORWARD:
                assert_numbers(found[layer, operand], expected[layer, operand], f"step {step}, {layer}, {operand}")


@pytest.mark.parametrize("how", ["between steps", "between micro-batches"])
def test_evaluation_does_not_count(how: str) -> None:
    """Its inputs are a hundred times as large."""
    accumulate = 1 if how == "between steps" else 3
    evaluated, alone = (
        fit(accumulate_grad_batches=accumulate, limit_val_batches=2, val_check_interval=1, num_sanity_val_steps=2)
        if validate
        else fit(accumulate_grad_batches=accumulate)
        for validate in (True, False)
    )
    assert_curves(evaluated, alone)


@pytest.mark.slow
def test_a_compiled_model_logs_the_same() -> None:
    torch._dynamo.reset()
    compilations: list[int] = []

    class Count(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            compilations.append(counter.frame_count)

    class Compiled(Two):
        def configure_model(self) -> None:
            if not isinstance(self.layer, OptimizedModule):
                self.layer = torch.compile(self.layer, backend=counter)

    counter = CompileCounterWithBackend("aot_eager")
    arguments: dict[str, Any] = {"max_steps": 8, "limit_val_batches": 1, "val_check_interval": 3}
    found = fit(Compiled(), Count(), **arguments)
    expected = fit(**arguments)
    assert list(found) == [1, 3, 5, 7]
    for step, row in expected.items():
        assert found[step] == pytest.approx(row, rel=1e-5), f"step {step}"
    assert compilations[3:] == [compilations[3]] * 5, f"after the second logged step: {compilations}"
    torch._dynamo.reset()


# --- what does not change ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plugin", ["nvfp4", "fp8-delayed", "mxfp4-rht"])
def test_watching_changes_nothing(plugin: str) -> None:
    """Weights, gradients and random numbers are those of a run without the monitor, to the bit."""
    runs = []
    for monitors in ([], [QuantizationMonitor()]):
        torch.manual_seed(1)
        witness = Weights()
        trainer(*monitors, witness, plugin=plugin, log_every_n_steps=1, accumulate_grad_batches=2).fit(Two())
        runs.append(witness.seen)
    assert len(runs[0]) == 8
    for batch, (one, other) in enumerate(zip(*runs, strict=True)):
        assert len(one) == len(other), "a gradient is left, or gone"
        assert all(map(torch.equal, one, other)), f"batch {batch}"


class Watching(Callback):
    """Whether layers measure, by batch, while the loss is computed."""

    def __init__(self) -> None:
        self.seen: list[bool] = []

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        (on,) = {is_on(layer) for layer in pl_module.modules() if isinstance(layer, QuantizedLayer)}
        self.seen.append(on)


def is_on(layer: QuantizedLayer) -> bool:
    return layer.operand_sums is not None


def all_off(model: nn.Module) -> bool:
    return not any(is_on(layer) for layer in model.modules() if isinstance(layer, QuantizedLayer))


def test_layers_measure_in_logged_steps_only() -> None:
    watching, model = Watching(), Two()
    fit(model, watching, max_steps=6, log_every_n_steps=3)
    assert watching.seen == [False, False, True, False, False, True]
    assert all_off(model)
    watching = Watching()
    trainer(watching, QuantizationMonitor(operands=False)).fit(Two())
    assert not any(watching.seen)


def test_hooks_read_nothing_but_the_numbers_of_the_last_logged_step(monkeypatch: pytest.MonkeyPatch) -> None:
    cls, reads = counted(QuantizationMonitor, monkeypatch)
    monkeypatch.setattr(quantization, "is_ternary", lambda cast: False)  # which asks a table of the host
    trainer(cls(), max_steps=6).fit(Two())
    assert {place: n for place, n in reads.items() if n and place[1] >= 0} == {
        ("on_train_batch_start", 2): 1,
        ("on_train_batch_start", 4): 1,
    }
    assert [reads[hook, -1] for hook in HOOKS] == [6, 6, 6]


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_layers_are_let_go_of_after_an_error(error: Any, where: str) -> None:
    class Breaks(Two):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            assert not all_off(self)
            if where == "forward":
                raise error("broken")
            return loss

        def on_after_backward(self) -> None:
            raise error("broken")

    model = Breaks()
    run = trainer(QuantizationMonitor(), log_every_n_steps=1)
    # Ctrl-C ends the process, once callbacks know of it.
    with pytest.raises(SystemExit if error is KeyboardInterrupt else error):
        run.fit(model)
    assert all_off(model)


def test_layers_are_let_go_of_when_a_step_is_cut_short() -> None:
    """After the first of three micro-batches of a step."""

    class Ends(Two):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 4 else None

    model = Ends()
    run = trainer(QuantizationMonitor(), accumulate_grad_batches=3, max_epochs=1, max_steps=-1, log_every_n_steps=1)
    run.fit(model)
    assert all_off(model)
    assert list(logged(run)) == [0]


# --- where it goes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [1, -1])
def test_a_report_draws_the_sqnr_of_each_layer_over_steps(tmp_path: Path, order: int) -> None:
    """The points of the history are those of the logger, also of the last step; and the page has a chart of them."""
    run = trainer(*[RunReport(), QuantizationMonitor(weights=False)][::order], log_every_n_steps=1)
    run.fit(Two())
    curves = logged(run)
    (path,) = tmp_path.rglob("run.json")
    data = json.loads(path.read_text())
    for layer, operand in PLACES:
        name = f"sqnr/{operand}/{layer}"
        points = dict(data["history"][name])
        assert points == pytest.approx({step + 1: row[name] for step, row in curves.items()})
        assert len(points) == 4
        assert data["quantities"][name] == f"sqnr/{operand}"
    page = (path.parent / "report.html").read_text()
    assert "sqnr of layers" in page
    assert "sqnr/wgrad_g" in page


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch")
@pytest.mark.parametrize("order", [1, -1])
def test_a_resumed_report_has_points_that_were_not_read_when_it_was_saved(tmp_path: Path, order: int) -> None:
    class Save(Callback):
        def on_train_batch_end(self, run: Trainer, *_: Any) -> None:
            if run.global_step == 2:
                run.save_checkpoint(tmp_path / "two.ckpt")

    def watched() -> list[Callback]:
        return [RunReport(), QuantizationMonitor(weights=False)][::order]

    trainer(*watched(), Save(), log_every_n_steps=1).fit(Two())
    trainer(*watched(), log_every_n_steps=1).fit(Two(), ckpt_path=tmp_path / "two.ckpt", weights_only=False)
    for path in tmp_path.rglob("run.json"):
        points = json.loads(path.read_text())["history"]["sqnr/fprop_x/layer.2"]
        assert [step for step, _ in points] == [1, 2, 3, 4]


def test_event_files_have_the_steps_of_other_metrics() -> None:
    class Logs(Two):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss)
            return loss

    run = trainer(QuantizationMonitor(weights=False), logger=TensorBoardLogger("."), max_steps=6)
    run.fit(Logs())
    events = EventAccumulator(run.logger.log_dir).Reload()  # type: ignore[union-attr]
    of_each = {f"{name}/{operand}/{layer}" for name in NAMES for layer, operand in PLACES}
    means = {f"{name}/{operand}" for name in MEANS for operand in OPERANDS}
    assert set(events.Tags()["scalars"]) == {*of_each, *means, "loss", "epoch"}
    steps = [event.step for event in events.Scalars("loss")]
    assert steps == [1, 3, 5]
    for tag in (*of_each, *means):
        assert [event.step for event in events.Scalars(tag)] == steps, tag
        assert all(math.isfinite(event.value) for event in events.Scalars(tag)), tag


def test_means_are_there_for_other_callbacks() -> None:
    seen: list[set[str]] = []

    class Looks(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            seen.append({name for name in trainer.callback_metrics if name.split("/")[0] in NAMES})

    trainer(QuantizationMonitor(), Looks(), max_steps=2).fit(Two())
    assert seen == [set(), {f"{name}/{operand}" for name in MEANS for operand in OPERANDS}]


def test_without_converted_layers_nothing_is_logged() -> None:
    run = trainer(QuantizationMonitor(), plugin=None)
    run.fit(Two())
    assert logged(run) == {}
    assert not any("/" in name for name in run.callback_metrics)


def test_without_a_logger() -> None:
    """Numbers are for the report and for alerts."""
    monitor = QuantizationMonitor()
    run = trainer(monitor, logger=False)
    run.fit(Two())
    data = monitor.report_data(run)["quantized_operands"]
    assert data["step"] == 4
    assert set(data["layers"]) == set(LAYERS)


def test_reported() -> None:
    monitor = QuantizationMonitor(weights=False)
    run = trainer(monitor)
    assert monitor.report_data(run)["quantized_operands"] == {"step": 0, "layers": {}}
    run.fit(Two())
    last = of_layers(logged(run)[3])
    data = monitor.report_data(run)["quantized_operands"]
    assert data["step"] == 4
    assert set(last) == set(PLACES)
    for (layer, operand), numbers in last.items():
        assert data["layers"][layer][operand] == pytest.approx(numbers, rel=1e-6)
    section = monitor.report_sections(run)[0]
    assert section.title == "Quantized operands"
    picture, table = section.blocks
    assert isinstance(picture, HeatMap)
    assert (list(picture.rows), list(picture.columns)) == (LAYERS, list(OPERANDS))
    assert "At step 4" in picture.caption
    for layer, row in zip(picture.rows, picture.values, strict=True):
        expected = [last.get((layer, operand), {}).get("sqnr") for operand in picture.columns]
        assert row == [None if value is None else pytest.approx(value) for value in expected]
    assert isinstance(table, Table)
    assert [row[0] for row in table.rows] == list(OPERANDS)
    for operand, underflow, saturation, least, largest in table.rows:
        of_one = [numbers for (_, name), numbers in last.items() if name == operand]
        assert float(underflow.strip("%")) / 100 == pytest.approx(max(n["underflow"] for n in of_one), abs=1e-4)
        assert float(saturation.strip("%")) / 100 == pytest.approx(max(n["saturation"] for n in of_one), abs=1e-4)
        assert float(least) == pytest.approx(min(n["scale_min"] for n in of_one), rel=1e-2)
        assert float(largest) == pytest.approx(max(n["scale_max"] for n in of_one), rel=1e-2)


def test_the_report_shows_operands_of_the_last_step_that_had_some() -> None:
    monitor = QuantizationMonitor()
    run = trainer(PrecisionSwitch("bf16", step=2), monitor)
    run.fit(Two())
    assert monitor.report_data(run)["quantized_operands"]["step"] == 2
    assert [section.title for section in monitor.report_sections(run)] == ["Quantized operands", "Quantized weights"]


# --- alerts -----------------------------------------------------------------------------------------------------------


def said_by(monitor: QuantizationMonitor, said: pytest.WarningsRecorder) -> list[str]:
    prefix = f"{type(monitor).__name__}: "
    return [text.removeprefix(prefix) for text in (str(one.message) for one in said) if text.startswith(prefix)]


def outlier(batch: Tensor) -> Tensor:
    """All but one element of the input are so small beside it that int4 makes zeros of them."""
    batch = torch.full_like(batch, 1e-3)
    batch[:, 0] = 1.0
    return batch


class Spoilt(Two):
    """Some batches are spoilt; weights stay as they are."""

    def __init__(self, spoil: Callable[[Tensor], Tensor], since: int = 2) -> None:
        super().__init__()
        self.spoil, self.since = spoil, since

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return super().training_step(self.spoil(batch) if batch_idx >= self.since else batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.zero_grad()


def test_underflow_is_said_once() -> None:
    monitor = QuantizationMonitor()
    run = trainer(monitor, plugin="int4", log_every_n_steps=1, max_steps=5)
    with pytest.warns(UserWarning, match="fprop_x") as said:
        run.fit(Spoilt(outlier))
    (text,) = said_by(monitor, said)
    assert text.startswith("layer.0, step 3: 96.9% of the elements of fprop_x that are not 0 became 0")
    assert "(underflow_limit=0.5)" in text
    assert monitor.report_data(run)["quantized_weights"]["alerts"] == [text]


@pytest.mark.parametrize(("plugin", "limit"), [("int4", 0.97), ("ternary", 1e-3)])
def test_underflow_that_is_tolerated(plugin: str, limit: float) -> None:
    """Zeros are levels of ternary weights. Warnings are errors."""
    monitor = QuantizationMonitor(underflow_limit=limit)
    run = trainer(monitor, plugin=plugin, log_every_n_steps=1)
    run.fit(Spoilt(outlier if plugin == "int4" else lambda batch: torch.ones_like(batch), since=0))
    assert not any("underflow" in alert or "fprop_w" in alert for alert in _alerts(monitor, run))


def _alerts(monitor: QuantizationMonitor, run: Trainer) -> list[str]:
    return monitor.report_data(run)["quantized_weights"]["alerts"]


def test_what_is_not_finite_is_said_once() -> None:
    def spoil(batch: Tensor) -> Tensor:
        batch = batch.clone()
        batch[3, 4] = math.nan
        return batch

    monitor = QuantizationMonitor(weights=False)
    run = trainer(monitor, log_every_n_steps=1, max_steps=5)
    with pytest.warns(UserWarning, match="a NaN or an infinity") as said:
        run.fit(Spoilt(spoil))
    texts = said_by(monitor, said)
    assert len(texts) == len(set(texts))
    assert "layer.0, step 3: fprop_x holds a NaN or an infinity. Look at the data of this step" in texts[0]
    assert not any("fprop_w" in text or "became 0" in text for text in texts)
    assert math.isnan(of_layers(logged(run)[2])["layer.0", "fprop_x"]["sqnr"])


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    def go(steps: int, **kwargs: Any) -> tuple[Curves, list[str]]:
        monitor = QuantizationMonitor(no_flips_for=100)
        run = trainer(monitor, max_steps=steps, plugin="int4", log_every_n_steps=1)
        with pytest.warns(UserWarning) as said:
            run.fit(Spoilt(outlier, since=0), **kwargs)
            run.save_checkpoint(tmp_path / f"{steps}.ckpt")
        return logged(run), said_by(monitor, said)

    whole, texts = go(4)
    first, before = go(2)
    assert (
        [text.partition(":")[0] for text in texts] == [text.partition(":")[0] for text in before] == ["layer.0, step 1"]
    )
    monitor = QuantizationMonitor(no_flips_for=100)
    run = trainer(monitor, max_steps=4, plugin="int4", log_every_n_steps=1)
    run.fit(Spoilt(outlier, since=0), ckpt_path=tmp_path / "2.ckpt", weights_only=True)  # an alert would be an error
    assert_curves(first | logged(run), whole)
    assert _alerts(monitor, run) == before


# --- several processes ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch("tests.callbacks.monitors.ranks_operand_statistics", RANKS, tmp_path_factory.mktemp("quantized"))


@pytest.mark.parametrize("how", RUNS, ids=str)
def test_ranks_have_the_numbers_of_all(results: list[dict[str, Any]], how: tuple[str, str]) -> None:
    """Of operands whose blocks know of no other tokens those of one process with the whole batch."""
    one, other = (result[how] for result in results)
    assert list(one["operands"]) == list(range(EVERY, STEPS + 1, EVERY))
    assert one["operands"] == other["operands"]
    assert one["weights"] == other["weights"]
    alone = train("auto", how[1], devices=1)["operands"]
    for step, layers in alone.items():
        for layer, row in layers.items():
            found = one["operands"][step][layer]
            assert found.keys() == row.keys(), f"step {step}, {layer}"
            for operand in row:
                message = f"step {step}, {layer}, {operand}"
                if how[1] == "int4":
                    assert_numbers(found[operand], row[operand], message)
                elif operand in FORWARD:  # random bits are each rank's own: from the first step on weights differ
                    assert found[operand]["sqnr"] == pytest.approx(row[operand]["sqnr"], abs=1), message


def test_gathered_weights_tell_what_whole_ones_do(results: list[dict[str, Any]]) -> None:
    """Flips and distances under FSDP2 are those under DDP, and FSDP1 has none."""
    for result in results:
        ddp, sharded = (result[strategy, "int4"]["weights"] for strategy in ("ddp", "fsdp2"))
        assert list(ddp) == list(sharded) == list(range(EVERY, STEPS + 1, EVERY))
        for step, layers in ddp.items():
            for layer, row in layers.items():
                assert set(row) == {"flips", "distance"}
                assert sharded[step][layer] == pytest.approx(row, rel=1e-6), f"step {step}, {layer}"
        assert any(row["flips"] > 0 for layers in ddp.values() for row in layers.values()), "nothing flips"
        assert not any(result["fsdp1", "int4"]["weights"].values())
        assert result["refused"].startswith("QuantizationMonitor(weights=True) needs weights that are matrices")


def test_two_collectives_in_a_logged_step(results: list[dict[str, Any]]) -> None:
    """For all operands of all layers; none in other steps."""
    for strategy in ("ddp", "fsdp1"):
        assert results[0][strategy, "int4"]["collectives"] == [0, 2] * (STEPS // EVERY), strategy


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"underflow_limit": 0}, "underflow_limit is a share of elements, above 0 and at most 1; got 0"),
        ({"underflow_limit": 1.01}, "got 1.01"),
        ({"underflow_limit": math.nan}, "got nan"),
        ({"underflow_limit": True}, "got True"),
        ({"operands": False, "weights": False}, "nothing to watch with operands=False and weights=False: leave out"),
    ],
    ids=str,
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QuantizationMonitor(**arguments)


@pytest.mark.parametrize(("operands", "weights"), [(True, None), (True, False), (False, True), (False, None)])
def test_operands_or_weights(operands: bool, weights: bool | None) -> None:
    run = trainer(QuantizationMonitor(only=[r"layer\.2"], operands=operands, weights=weights))
    run.fit(Two())
    found = logged(run, {*NAMES, "flips", "distance"})[3]
    of_operands = {f"{name}/{operand}/layer.2" for name in NAMES for operand in OPERANDS}
    of_operands |= {f"{name}/{operand}" for name in MEANS for operand in OPERANDS}
    of_weights = {f"{name}/fprop_w/layer.2" for name in ("flips", "distance")}
    assert set(found) == (of_operands if operands else set()) | (of_weights if weights is not False else set())


def test_from_a_yaml(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {"only": [r"layer\.2"], "underflow_limit": 0.25, "operands": True, "weights": False}
    callback = {"class_path": "lightning_lowbit.QuantizationMonitor", "init_args": arguments}
    config = {"seed_everything": 1, "trainer": {"accelerator": "cpu", "callbacks": [callback]}}
    Path("run.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.setattr("sys.argv", ["run"])
    args = ["--config", "run.yaml"]
    cli = LightningCLI(BoringModel, args=args, run=False, save_config_callback=None, auto_configure_optimizers=False)
    (monitor,) = [one for one in cli.trainer.callbacks if isinstance(one, QuantizationMonitor)]
    assert {name: getattr(monitor, name) for name in arguments} == arguments
