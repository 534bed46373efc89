"""What the monitor logs is what a witness of every step computes by itself; what it says, it says once."""

import csv
import json
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_lowbit import IntegerPrecision, LowBitPrecision, PrecisionSwitch, RunReport, TernaryPrecision
from lightning_lowbit.callbacks.monitors import quantization
from lightning_lowbit.callbacks.monitors.quantization import QuantizationMonitor
from tests.lightnings import BoringModel, Callback, CSVLogger, MisconfigurationException, RandomDataset, Trainer

LAYERS = ("layer.0", "layer.2")
SHARES = {"minus", "zeros", "plus"}
ALL = {*SHARES, "flips", "distance"}


class Two(BoringModel):
    """Steps that flip codes, on data that differ from step to step."""

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.1), nn.Linear(32, 2))
        self.lr = lr

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.lr)

    def train_dataloader(self) -> Any:
        return DataLoader(RandomDataset(32, 64), batch_size=2)


class Manual(Two):
    """Two optimizers, each of which steps in every batch; the first one twice."""

    automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for optimizer in (*self.optimizers(), self.optimizers()[0]):
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx)["loss"])
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(self.layer[i].parameters(), lr=self.lr) for i in (0, 2)]


def codes(weight: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Levels, and the weight in units of its scale before it is rounded. A group of 128 is a row here."""
    w = weight.detach().to(torch.bfloat16).float()
    if kind == "ternary":
        w = w * torch.ones(()).div(w.abs().mean())
        return w.round().clamp(-1, 1), w
    if kind == "int4":
        amax = w.abs().amax(1, keepdim=True)
        w = w * torch.full_like(amax, 7).div(amax)
        return w.round(), w
    low, high = w.amin(1, keepdim=True), w.amax(1, keepdim=True)  # on either side of 0
    steps = torch.full_like(low, 15).div(high - low)
    zero = (-low * steps).round()
    return torch.minimum(torch.maximum((w * steps).round(), -zero), 15 - zero), w * steps


def columns(before: Tensor, after: Tensor, kind: str) -> dict[str, float]:
    """What is logged of one weight; distances with zero points are left to the tests of the metric."""
    (old, _), (new, w) = codes(before, kind), codes(after, kind)
    found = {"flips": (old != new).float().mean().item()}
    if kind == "ternary":
        shares = {"minus": new == -1, "zeros": new == 0, "plus": new == 1}
        found |= {name: where.float().mean().item() for name, where in shares.items()}
        found["distance"] = (w.abs() - 0.5).abs().mean().item()
    elif kind == "int4":
        thresholds = torch.arange(-6.5, 7)
        found["distance"] = (w[..., None] - thresholds).abs().amin(-1).mean().item()
    return found


class Witness(Callback):
    """Weights before and after every batch."""

    def __init__(self) -> None:
        self.weights: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []
        self.grads: list[list[Tensor | None]] = []

    @staticmethod
    def _copies(module: Any) -> dict[str, Tensor]:
        return {name: module.get_submodule(name).weight.detach().clone() for name in LAYERS}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self._before = self._copies(pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.weights.append((self._before, self._copies(pl_module)))
        self.grads.append([None if p.grad is None else p.grad.clone() for p in pl_module.parameters()])


class AtStep(Callback):
    """Does something to a run before one of its batches."""

    def __init__(self, batch: int, action: Callable[[Trainer], Any]) -> None:
        self.batch, self.action = batch, action

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch:
            self.action(trainer)


def trainer(*callbacks: Callback, plugin: Any = None, **kwargs: Any) -> Trainer:
    defaults = {
        "max_steps": 6,
        "log_every_n_steps": 2,
        "limit_val_batches": 0,
        "logger": CSVLogger("logs"),
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    plugins = [plugin or TernaryPrecision()]
    return Trainer(accelerator="cpu", plugins=plugins, callbacks=list(callbacks), **{**defaults, **kwargs})


def rows(run: Trainer) -> dict[int, dict[str, float]]:
    """What was logged of weights, by the step it was logged at."""
    assert run.logger is not None
    path = Path(run.logger.experiment.metrics_file_path)
    found = {}
    for row in csv.DictReader(path.read_text().splitlines()) if path.exists() else ():
        values = {name: float(value) for name, value in row.items() if value and name.split("/")[0] in ALL}
        if values:
            found[int(row["step"])] = values
    return found


@contextmanager
def alerts_said() -> Iterator[list[str]]:
    """What the monitor warns of within this context, without its name."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        yield texts
    prefix = "QuantizationMonitor: "
    texts += [str(warning.message).removeprefix(prefix) for warning in said if str(warning.message).startswith(prefix)]


# --- columns ----------------------------------------------------------------------------------------------------------


@pytest.mark.pairwise(1)
@pytest.mark.parametrize(
    ("kind", "plugin"),
    [
        ("ternary", TernaryPrecision),
        ("int4", lambda: LowBitPrecision("int4")),
        ("zero points", lambda: IntegerPrecision(4, 8, group="row", symmetric=False)),
    ],
)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_columns_are_those_of_the_step(kind: str, plugin: Any, accumulate: int) -> None:
    witness = Witness()
    run = trainer(witness, QuantizationMonitor(), plugin=plugin(), accumulate_grad_batches=accumulate, max_steps=5)
    run.fit(Two())
    logged = rows(run)
    assert list(logged) == [1, 3], "Lightning numbers the first step 0, and every second one is logged"
    flips = []
    for step, row in logged.items():
        before, after = witness.weights[(step + 1) * accumulate - 1]
        expected = {}
        for layer in LAYERS:
            found = columns(before[layer], after[layer], kind)
            expected |= {f"{name}/fprop_w/{layer}": value for name, value in found.items()}
            flips.append(found["flips"])
        names = ALL if kind == "ternary" else ALL - SHARES
        assert set(row) == {f"{name}/fprop_w/{layer}" for name in names for layer in LAYERS}
        assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-5, abs=1e-6), f"step {step}"
    assert max(flips) > 0, "the run does not test what it should"


def test_several_optimizers() -> None:
    """Flips of a batch are those from before its first step to after its last one."""
    witness = Witness()
    run = trainer(witness, QuantizationMonitor(), max_steps=12)
    run.fit(Manual())
    logged = rows(run)
    assert list(logged) == [1, 3], "three optimizer steps a batch"
    for step, row in logged.items():
        before, after = witness.weights[step]
        for layer in LAYERS:
            flips = row[f"flips/fprop_w/{layer}"]
            assert flips == pytest.approx(columns(before[layer], after[layer], "ternary")["flips"])
            assert flips > 0, "the run does not test what it should"


def test_a_batch_without_a_step() -> None:
    class Skips(Manual):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            if batch_idx < 2:
                super().training_step(batch, batch_idx)

    run = trainer(QuantizationMonitor(), max_steps=-1, max_epochs=1, limit_train_batches=4)
    run.fit(Skips())
    with_step, without = rows(run).values()
    assert {name.partition("/")[0] for name in with_step} == ALL
    assert {name.partition("/")[0] for name in without} == ALL - {"flips"}, "those of the last step are logged again"


def test_nothing_is_computed_in_other_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    original = quantization.latent_weights
    run = trainer(QuantizationMonitor(), accumulate_grad_batches=2, log_every_n_steps=3, max_steps=7)

    def spy(*arguments: Any) -> Any:
        steps.append(run.global_step)
        return original(*arguments)

    monkeypatch.setattr(quantization, "latent_weights", spy)
    run.fit(Two())
    assert steps == [2, 3, 5, 6], "before and after the third and the sixth step"


def test_codes_are_kept_for_a_step_only() -> None:
    """Also where the phase has changed by its end."""
    kept = []

    class Look(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            kept.append(len(monitor._before))

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            trainer.precision_plugin.set_phase("bf16" if batch_idx == 2 else "fqt")

    monitor = QuantizationMonitor()
    trainer(Look(), monitor, log_every_n_steps=1).fit(Two())
    assert kept == [0] * 6


@pytest.mark.parametrize("plugin", [TernaryPrecision, lambda: LowBitPrecision("nvfp4")])
def test_watching_changes_nothing(plugin: Any) -> None:
    """Gradients, weights and random numbers (dropout, stochastic rounding) are those of a run without the monitor."""
    witnesses, draws = [Witness(), Witness()], []
    for witness, callbacks in zip(witnesses, ([], [QuantizationMonitor()]), strict=True):
        torch.manual_seed(1)
        trainer(*callbacks, witness, plugin=plugin(), log_every_n_steps=1, accumulate_grad_batches=2).fit(Two())
        draws.append(torch.rand(4))
    assert torch.equal(*draws), "the generator is not where it was"
    for (_, one), (_, other) in zip(*(witness.weights for witness in witnesses), strict=True):
        assert all(torch.equal(one[layer], other[layer]) for layer in LAYERS), "weights differ"
    for one, other in zip(*(witness.grads for witness in witnesses), strict=True):
        assert [a is None for a in one] == [b is None for b in other], "a gradient is left, or gone"
        assert all(a is None or torch.equal(a, b) for a, b in zip(one, other, strict=True)), "gradients differ"


@pytest.mark.parametrize("off", ["phase", "λ"])
def test_nothing_is_logged_while_weights_are_not_quantized(off: str) -> None:
    def switch(on: bool) -> Callable[[Trainer], None]:
        if off == "phase":
            return lambda run: run.precision_plugin.set_phase("fqt" if on else "bf16")
        return lambda run: run.precision_plugin.set_blend(0.5 if on else 0.0)

    run = trainer(AtStep(2, switch(False)), AtStep(4, switch(True)), QuantizationMonitor(), log_every_n_steps=1)
    run.fit(Two())
    assert list(rows(run)) == [0, 1, 4, 5], "what Lightning logged before it logs again"


def test_no_layer_is_quantized() -> None:
    run = trainer(QuantizationMonitor(), plugin=LowBitPrecision("bf16"))
    run.fit(Two())
    assert rows(run) == {}


@pytest.mark.slow
def test_only_some_layers_with_clean_names() -> None:
    class Wrapped(Two):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.compile(self.layer, backend="eager")

    run = trainer(QuantizationMonitor(only=[r"layer\.2"]), log_every_n_steps=6)
    run.fit(Wrapped())
    (row,) = rows(run).values()
    assert set(row) == {f"{name}/fprop_w/layer.2" for name in ALL}


@pytest.mark.parametrize(
    ("only", "message"),
    [
        (["layer.7"], "only: the pattern 'layer.7' matches no linear layer. There are 2"),
        ("layer.2", "list of patterns"),
    ],
)
def test_patterns_that_match_nothing(only: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trainer(QuantizationMonitor(only=only), logger=False).fit(Two())


def test_flat_weights_are_left_out_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of FSDP1, of which no stretch is a matrix; operands are there as they always are."""
    monkeypatch.setattr(quantization, "has_flat_weights", lambda run: True)
    run = trainer(monitor := QuantizationMonitor())
    run.fit(Two())
    assert rows(run) == {}
    data = monitor.report_data(run)
    assert data["quantized_weights"]["layers"] == {}
    assert set(data["quantized_operands"]["layers"]) == set(LAYERS)
    with pytest.raises(MisconfigurationException, match=r"QuantizationMonitor\(weights=True\) needs weights that are"):
        trainer(QuantizationMonitor(weights=True)).fit(Two())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"no_flips_for": 0}, "no_flips_for is a number of optimizer steps, 1 or more; got 0"),
        ({"no_flips_for": 10.0}, "got 10.0"),
        ({"zeros_tolerance": 0}, "zeros_tolerance is a share of elements, above 0 and at most 1; got 0"),
        ({"zeros_tolerance": 1.5}, "got 1.5"),
        ({"zeros_tolerance": math.nan}, "got nan"),
        ({"zeros_tolerance": "a"}, "a share of elements, above 0 and at most 1; got 'a'"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QuantizationMonitor(**arguments)


# --- alerts -----------------------------------------------------------------------------------------------------------


def still(fill: Callable[[Tensor], Any] | None = None) -> Two:
    """A model that does not learn, the first layer's weight filled in some way."""
    model = Two(lr=0.0)
    if fill is not None:
        with torch.no_grad():
            fill(model.layer[0].weight)
    return model


def alerts(monitor: QuantizationMonitor, run: Trainer) -> list[str]:
    return monitor.report_data(run)["quantized_weights"]["alerts"]


def zeros(weight: Tensor) -> None:
    weight.zero_()


def heavy_tailed(weight: Tensor) -> None:
    """One row of 32 is large: 31 of 32 elements become 0."""
    weight.fill_(0.01)
    weight[0] = 10.0


def test_a_healthy_run_has_no_alerts() -> None:
    """Warnings are errors."""
    for plugin in (TernaryPrecision(), TernaryPrecision(scale_factor=2 / math.sqrt(3)), LowBitPrecision("int2")):
        monitor = QuantizationMonitor(no_flips_for=2)
        run = trainer(monitor, plugin=plugin, log_every_n_steps=1)
        run.fit(Two())
        assert alerts(monitor, run) == []


def test_all_codes_are_zero() -> None:
    monitor = QuantizationMonitor()
    run = trainer(monitor, log_every_n_steps=1)
    with alerts_said() as said:
        run.fit(still(zeros))
    (text,) = said  # once, of one layer, and not of a share of zeros that is not expected
    assert text.startswith("layer.0, step 1: all codes of its weight are 0, where some should be -1 or 1")
    assert "Look for what keeps the weight at 0" in text
    assert alerts(monitor, run) == said


def test_a_weight_that_is_not_finite() -> None:
    monitor = QuantizationMonitor()
    run = trainer(monitor, log_every_n_steps=1)
    with alerts_said() as said:
        run.fit(still(lambda weight: weight.fill_(math.nan)))
    text = next(text for text in said if "no element" in text)
    assert text.startswith("2 layers, the worst layer.0, step 1: no element of its weight is a number")
    assert not any("zeros" in text or "are 0" in text for text in said), "a share of zeros of what are no numbers"


def test_an_alert_of_the_last_step_is_said() -> None:
    with alerts_said() as said:
        trainer(QuantizationMonitor(), max_steps=2).fit(still(zeros))
    assert [text.partition(":")[0] for text in said] == ["layer.0, step 2"]


def test_a_share_of_zeros_that_is_not_expected() -> None:
    monitor = QuantizationMonitor()
    run = trainer(monitor, log_every_n_steps=1, plugin=TernaryPrecision(scale_factor=0.866))
    with alerts_said() as said:
        run.fit(still(heavy_tailed))
    (text,) = said
    assert text.startswith("layer.0, step 1: 96.9% of its weight are 0, where 27.0% are expected")
    assert "a factor of 0.866 (zeros_tolerance=0.15)" in text
    assert alerts(monitor, run) == said


@pytest.mark.parametrize(("plugin", "tolerance"), [(TernaryPrecision, 0.9), (lambda: LowBitPrecision("int2"), 0.15)])
def test_a_share_of_zeros_that_is_tolerated(plugin: Any, tolerance: float) -> None:
    """Of weights whose scale is not made of their mean nothing is expected: here none is 0."""
    monitor = QuantizationMonitor(zeros_tolerance=tolerance)
    run = trainer(monitor, log_every_n_steps=1, plugin=plugin())
    run.fit(still(heavy_tailed))
    assert alerts(monitor, run) == []


def test_no_flips() -> None:
    """Counted from the first look, in optimizer steps, for each layer; of a frozen layer nothing is expected."""
    monitor = QuantizationMonitor(no_flips_for=3)
    run = trainer(monitor, log_every_n_steps=2, accumulate_grad_batches=2, max_steps=8)
    model = still()
    model.layer[2].requires_grad_(False)
    with alerts_said() as said:
        run.fit(model)
    (text,) = said
    assert text.startswith("layer.0, step 6: no code of its weight has changed in a logged step for 4 optimizer steps")
    assert "(no_flips_for=3). Look at its gradient and learning rate" in text
    assert alerts(monitor, run) == said


def test_a_flip_begins_the_count_anew() -> None:
    def step(lr: float) -> Callable[[Trainer], None]:
        return lambda run: run.optimizers[0].param_groups[0].update(lr=lr)

    monitor = QuantizationMonitor(no_flips_for=3)
    run = trainer(AtStep(3, step(0.5)), AtStep(4, step(0.0)), monitor, log_every_n_steps=1)
    run.fit(still())
    assert alerts(monitor, run) == [], "two steps from the fourth, in which codes flip, to the sixth"


@pytest.mark.parametrize("operands", [True, False])
def test_steps_that_were_not_seen_do_not_count(operands: bool) -> None:
    def phase(name: str) -> Callable[[Trainer], None]:
        return lambda run: run.precision_plugin.set_phase(name)

    monitor = QuantizationMonitor(no_flips_for=3, operands=operands)
    run = trainer(AtStep(2, phase("bf16")), AtStep(4, phase("fqt")), monitor, log_every_n_steps=1, max_steps=7)
    run.fit(still())
    assert alerts(monitor, run) == []
    assert monitor.report_data(run)["quantized_weights"]["step"] == 7


def test_a_resumed_run_goes_on_counting_and_does_not_repeat_itself(tmp_path: Path) -> None:
    def fit(steps: int, **kwargs: Any) -> tuple[QuantizationMonitor, Trainer]:
        monitor = QuantizationMonitor(no_flips_for=4)
        run = trainer(monitor, max_steps=steps, log_every_n_steps=1, limit_train_batches=10)
        run.fit(still(zeros), **kwargs)
        run.save_checkpoint(tmp_path / f"{steps}.ckpt")
        return monitor, run

    with alerts_said() as first:
        fit(3)
    with alerts_said() as second:
        monitor, run = fit(6, ckpt_path=tmp_path / "3.ckpt", weights_only=True)
    assert [text.partition(":")[0] for text in first] == ["layer.0, step 1"]
    assert [text.partition(":")[0] for text in second] == ["2 layers, the worst layer.0, step 5"]
    assert "no code of its weight has changed in a logged step for 4 optimizer steps" in second[0]
    assert set(alerts(monitor, run)) == {*first, *second}, "what was said before the checkpoint belongs to the report"


def test_another_run_begins_anew() -> None:
    monitor = QuantizationMonitor()
    for _ in range(2):
        with alerts_said() as said:
            trainer(monitor).fit(still(zeros))
        assert len(said) == 1


# --- the report -------------------------------------------------------------------------------------------------------


def test_the_last_step_is_reported() -> None:
    monitor = QuantizationMonitor()
    run = trainer(monitor)
    assert monitor.report_data(run)["quantized_weights"] == {"step": 0, "layers": {}, "alerts": []}
    (section,) = monitor.report_sections(run)
    assert section.blocks[0].text == "No step with quantized weights was logged."
    run.fit(Two())
    data = monitor.report_data(run)["quantized_weights"]
    (_, _, row) = rows(run).values()
    assert data["step"] == 6
    for layer in LAYERS:
        expected = {name: row[f"{name}/fprop_w/{layer}"] for name in ALL}
        assert data["layers"][layer] == pytest.approx(expected, rel=1e-6)
    operands, section = monitor.report_sections(run)
    assert (operands.title, section.title) == ("Quantized operands", "Quantized weights")
    (table,) = section.blocks
    assert list(table.header) == ["layer", "minus", "zeros", "plus", "flips", "distance", "alerts"]
    assert [line[0] for line in table.rows] == list(LAYERS)
    assert [float(cell) for cell in table.rows[0][1:4]] == pytest.approx(
        [row[f"{name}/fprop_w/layer.0"] for name in ("minus", "zeros", "plus")], rel=5e-3
    )
    assert "At step 6" in table.caption


def test_reported_after_an_exception(tmp_path: Path) -> None:
    class Breaks(Two):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if self.trainer.global_step == 2:
                raise KeyError("broken")

    model = Breaks(lr=0.0)
    heavy_tailed(model.layer[0].weight.data)
    monitor = QuantizationMonitor()
    run = trainer(RunReport(), monitor, log_every_n_steps=1)
    with alerts_said() as said, pytest.raises(KeyError, match="broken"):
        run.fit(model)
    assert len(said) == 1
    assert monitor._before == {}, "codes are kept"
    (path,) = tmp_path.rglob("run.json")
    weights = json.loads(path.read_text())["summary"]["quantized_weights"]
    assert weights["step"] == 2
    assert set(weights["layers"]["layer.2"]) == ALL
    assert len(weights["alerts"]) == 1
    (page,) = tmp_path.rglob("report.html")
    assert "Quantized weights" in page.read_text()


def test_reported_after_an_error_of_the_device() -> None:
    class Lost(torch.Tensor):
        def tolist(self) -> Any:
            raise RuntimeError("CUDA error")

    monitor = QuantizationMonitor()
    run = trainer(monitor)
    run.fit(Two())
    expected = monitor.report_data(run)
    monitor._keep(quantization._Measured(8, 7, {}, []), {"weights": torch.zeros(1).as_subclass(Lost)})
    assert monitor.report_data(run) == expected, "the numbers before are lost, too"
    assert monitor._unread == []


def test_a_switch_before_the_numbers_are_read() -> None:
    monitor = QuantizationMonitor()
    run = trainer(PrecisionSwitch("bf16", step=4), monitor)
    run.fit(Two())
    assert list(rows(run)) == [1, 3]
    assert monitor.report_data(run)["quantized_weights"]["step"] == 4
