"""Weights that a script moves: what oscillates is set to its center, when a window ends, and nothing else ever is."""

import csv
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_lowbit import Cast, IntegerPrecision, LowBitPrecision, Scale, TernaryPrecision, quantize
from lightning_lowbit.callbacks import osci_reset
from lightning_lowbit.callbacks.osci_reset import OsciReset
from tests.lightnings import BoringModel, Callback, CSVLogger, MisconfigurationException, RandomDataset, Trainer

# Of a row whose largest element is 7 the int4 scale is 1, and the levels are whole numbers.
PLUGIN = {"weight_bits": 4, "activation_bits": None, "group": "row", "compute_dtype": "fp32"}

# Element by element what a weight is after t steps, and its ratio over ten steps.
MOVES: dict[str, tuple[Callable[[int], float], str]] = {
    "the largest": (lambda t: 7.0, "still"),
    "oscillating": (lambda t: 2.49 + 0.02 * (t % 2), "1 / 0.02"),
    "oscillating below 0": (lambda t: -0.49 - 0.02 * (t % 2), "1 / 0.02"),
    "oscillating widely": (lambda t: 4.3 + 0.4 * (t % 2), "1 / 0.4"),
    "traveling": (lambda t: -6.0 + 0.6 * t, "6 / 6"),
    "crossing once": (lambda t: 3.41 + 0.02 * t, "1 / 0.2"),
    "still": (lambda t: 1.5, "0 / 0"),
    "trembling in its bin": (lambda t: 5.1 + 0.1 * (t % 2), "0 / 1"),
}
WEIGHT = torch.tensor([[[move(t) for move, _ in MOVES.values()]] for t in range(64)])


class Scripted(torch.optim.Optimizer):
    """Adds to a weight what a script does in this step, from wherever it is."""

    def __init__(self, parameters: Any, script: Tensor) -> None:
        super().__init__(parameters, {"steps": 0})
        self.script = script

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = closure() if closure is not None else None
        (group,) = self.param_groups
        (weight,) = group["params"]
        weight += (self.script[group["steps"] + 1] - self.script[group["steps"]]).view_as(weight)
        group["steps"] += 1
        return loss


class Row(BoringModel):
    def __init__(self, script: Tensor = WEIGHT) -> None:
        super().__init__()
        self.layer = nn.Linear(script.shape[-1], script.shape[-2], bias=False)
        self.layer.weight.data = script[0].clone()
        self.script = script

    def configure_optimizers(self) -> Any:
        return Scripted(self.parameters(), self.script)

    def train_dataloader(self) -> Any:
        return DataLoader(RandomDataset(self.layer.weight.shape[-1], 64), batch_size=1)


class Watch(Callback):
    """The weight at the end of each batch."""

    def __init__(self) -> None:
        self.weights: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.weights.append(pl_module.layer.weight.detach().clone())


def trainer(*callbacks: Callback, plugin: Any = None, **kwargs: Any) -> Trainer:
    defaults = {
        "max_steps": 10,
        "limit_val_batches": 0,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    plugins = [plugin or IntegerPrecision(**PLUGIN)]
    return Trainer(accelerator="cpu", plugins=plugins, callbacks=list(callbacks), **{**defaults, **kwargs})


def fit(*callbacks: Callback, model: Any = None, **kwargs: Any) -> list[Tensor]:
    """Runs, and returns the weight after each batch and its callbacks."""
    watch = Watch()
    trainer(*callbacks, watch, **kwargs).fit(model or Row())
    return watch.weights


def reset_at(weights: list[Tensor], script: Tensor = WEIGHT, accumulate: int = 1) -> dict[int, list[str]]:
    """Which elements did something else than the script, by optimizer step."""
    found = {}
    before = script[0]
    for batch, weight in enumerate(weights):
        step, is_step = divmod(batch + 1, accumulate)
        move = script[step] - script[step - 1] if is_step == 0 else torch.zeros_like(before)
        changed = ((weight - before - move).abs() > 1e-3).flatten().tolist()
        if any(changed):
            found[step if is_step == 0 else -batch] = [name for name, odd in zip(MOVES, changed, strict=True) if odd]
        before = weight
    return found


def logged(run: Trainer) -> dict[int, dict[str, float]]:
    assert run.logger is not None
    path = Path(run.logger.experiment.metrics_file_path)
    rows = csv.DictReader(path.read_text().splitlines()) if path.exists() else ()
    return {
        int(row["step"]): {name: float(value) for name, value in row.items() if name.startswith("reset/") and value}
        for row in rows
        if any(name.startswith("reset/") and value for name, value in row.items())
    }


# --- what is reset ----------------------------------------------------------------------------------------------------


def test_what_oscillates_is_set_to_its_center() -> None:
    weights = fit(OsciReset(window=10, every=20))
    assert reset_at(weights) == {10: ["oscillating", "oscillating below 0"]}
    after = dict(zip(MOVES, weights[9].flatten().tolist(), strict=True))
    assert after["oscillating"] == pytest.approx(2.0), "2.49 is rounded to 2"
    assert after["oscillating below 0"] == 0.0
    torch.testing.assert_close(weights[8], WEIGHT[9])
    rest = [i for i, name in enumerate(MOVES) if not name.startswith("oscillating b") and name != "oscillating"]
    assert torch.allclose(weights[9][0, rest], WEIGHT[10][0, rest]), "others have been moved"


@pytest.mark.parametrize(
    ("threshold", "caught"),
    [
        (51.0, []),
        (49.0, ["oscillating", "oscillating below 0"]),
        (4.5, ["oscillating", "oscillating below 0", "crossing once"]),
        (2.2, ["oscillating", "oscillating below 0", "oscillating widely", "crossing once"]),
        (1.2, ["oscillating", "oscillating below 0", "oscillating widely", "crossing once"]),
    ],
)
def test_the_ratio_of_two_paths(threshold: float, caught: list[str]) -> None:
    """50 for what oscillates, 5 for what crosses a threshold once, 2.5 for wide steps, 1 for what travels."""
    weights = fit(OsciReset(window=10, every=20, threshold=threshold))
    assert reset_at(weights) == ({10: caught} if caught else {})


def test_a_scale_that_changes_is_no_jump() -> None:
    """The largest element trembles by 5 %, and with it every quantized value, by much more than the weights move."""
    script = WEIGHT.clone()
    script[1::2, 0, 0] = 7.35
    script[:, 0, 1:] = torch.tensor([1.1, -2.1, 4.2, -6.2, 3.2, 0.1, 2.2])
    script[1::2, 0, 1:] += 0.001
    levels = quantize(script.squeeze(1), Cast("int4", Scale("fp32", "row")))
    assert (levels.codes[0] == levels.codes[1]).all(), "the script does not test what it should"
    assert (levels.dequantize()[0] - levels.dequantize()[1]).abs()[-1] > 8 * 0.001
    assert reset_at(fit(OsciReset(window=10, every=20), model=Row(script)), script) == {}


def test_what_does_not_move_is_left_alone() -> None:
    """The largest element moves thresholds across weights that rest: codes flip, and yet these do not oscillate."""
    script = WEIGHT.clone()
    script[1::2, 0, 0] = 7.35
    script[:, 0, 1:] = torch.tensor([1.52, -2.6, 4.55, -6.6, 3.6, 0.51, 2.51])
    levels = quantize(script.squeeze(1), Cast("int4", Scale("fp32", "row")))
    assert (levels.codes[0] != levels.codes[1]).sum() > 2, "the script does not test what it should"
    assert reset_at(fit(OsciReset(window=10, every=20, threshold=1.01), model=Row(script)), script) == {}


def test_a_zero_point() -> None:
    """Rows from -8 to 7: levels are whole numbers, and codes count from -8."""
    script = torch.cat([torch.full((64, 1, 1), -8.0), WEIGHT], -1)
    weights = fit(OsciReset(window=10, every=20), model=Row(script), plugin=IntegerPrecision(symmetric=False, **PLUGIN))
    changed = (weights[9] - script[10]).abs() > 1e-3
    assert changed.flatten().nonzero().flatten().tolist() == [2, 3]
    assert weights[9][0, 2:4].tolist() == pytest.approx([2.0, 0.0])


def test_weights_stored_the_other_way_round() -> None:
    from transformers.pytorch_utils import Conv1D

    class Turned(Row):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Conv1D(1, len(MOVES))
            self.layer.weight.data = WEIGHT[0].t().clone()
            self.layer.bias.requires_grad_(False)

        def configure_optimizers(self) -> Any:
            return Scripted([self.layer.weight], WEIGHT)

        def train_dataloader(self) -> Any:
            return DataLoader(RandomDataset(len(MOVES), 64), batch_size=1)

    weights = [weight.t() for weight in fit(OsciReset(window=10, every=20), model=Turned())]
    assert reset_at(weights) == {10: ["oscillating", "oscillating below 0"]}


# --- when -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "ends"),
    [
        ({"window": 4, "every": 10}, [4, 14, 24]),
        ({"window": 4, "every": 10, "start": 5}, [9, 19, 29]),
        ({"window": 4, "every": 10, "start": 25}, [29]),
        ({"window": 4, "every": 4}, [4, 8, 12, 16, 20, 24, 28]),
        ({}, []),
    ],
)
def test_windows(arguments: dict[str, int], ends: list[int]) -> None:
    """A window ends after ``window`` optimizer steps, whatever the epochs, and that is when it is logged."""
    run = trainer(
        OsciReset(**arguments), max_steps=30, limit_train_batches=7, logger=CSVLogger("logs"), log_every_n_steps=9
    )
    run.fit(Row())
    found = logged(run)
    assert [step + 1 for step in found] == ends, "Lightning numbers the first step 0"
    assert all(set(row) == {"reset/fprop_w/layer"} for row in found.values())
    if ends:
        if ends[0] == 4:
            assert next(iter(found.values())) == {"reset/fprop_w/layer": 2 / 8}
        assert run.callback_metrics["reset/fprop_w/layer"] == list(found.values())[-1]["reset/fprop_w/layer"]


def test_accumulated_gradients() -> None:
    """Windows are counted in optimizer steps, and weights change in no other batch."""
    watch = Watch()
    run = trainer(
        OsciReset(window=4, every=6), watch, accumulate_grad_batches=3, max_steps=11, logger=CSVLogger("logs")
    )
    run.fit(Row())
    assert len(watch.weights) == 33
    assert reset_at(watch.weights, accumulate=3) == {4: ["oscillating", "oscillating below 0"]}
    assert logged(run) == {3: {"reset/fprop_w/layer": 2 / 8}, 9: {"reset/fprop_w/layer": 0.0}}, "set once, it is quiet"


def test_only_optimizer_steps_of_a_window_cost_something(monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[int] = []
    original = osci_reset.latent_weights
    run = trainer(OsciReset(window=2, every=4), accumulate_grad_batches=3, max_steps=5)

    def spy(*arguments: Any) -> Any:
        batches.append(run.fit_loop.epoch_loop.batch_idx)
        return original(*arguments)

    monkeypatch.setattr(osci_reset, "latent_weights", spy)
    run.fit(Row())
    assert batches == [0, 2, 5, 12, 14], "once where a window opens, and once where the optimizer steps within it"


def test_several_optimizers() -> None:
    class Manual(Row):
        """The second optimizer steps in every second batch."""

        automatic_optimization = False

        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(2, 2)

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            one, other = self.optimizers()
            self.manual_backward(super().training_step(batch, batch_idx)["loss"])
            one.step()
            if batch_idx % 2:
                other.step()

        def configure_optimizers(self) -> Any:
            return [Scripted([self.layer.weight], WEIGHT), torch.optim.SGD(self.other.parameters(), lr=0.0)]

    weights = fit(OsciReset(window=9, every=30, threshold=12), model=Manual(), max_steps=12, limit_train_batches=8)
    assert reset_at(weights) == {6: ["oscillating", "oscillating below 0"]}, "nine optimizer steps are six batches"


@pytest.mark.parametrize("off", ["phase", "λ"])
def test_weights_that_are_not_quantized(off: str) -> None:
    class Switch(Callback):
        """Off for one step within the first window."""

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            plugin, on = trainer.precision_plugin, batch_idx != 5
            plugin.set_phase("fqt" if on else "bf16") if off == "phase" else plugin.set_blend(float(on))

    run = trainer(Switch(), OsciReset(window=8, every=10), max_steps=20, logger=CSVLogger("logs"))
    run.fit(Row())
    assert [step + 1 for step in logged(run)] == [18]


def test_no_memory_between_windows() -> None:
    reset, held = OsciReset(window=4, every=10), []

    class Look(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            held.append(len(reset._paths))

    trainer(reset, Look(), max_steps=12).fit(Row())
    assert held == [1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 1, 1]


# --- a real run -------------------------------------------------------------------------------------------------------


class Small(BoringModel):
    """Steps that are small beside the bins, on data that differ from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 16)
        self.head = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).relu())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> Any:
        return DataLoader(RandomDataset(32, 64), batch_size=2)


def slow(path: list[Tensor], cast: Cast, threshold: float) -> Iterator[bool]:
    """Whether each element oscillates, by a loop over the steps of a window."""
    quantized = [quantize(weight.bfloat16(), cast) for weight in path]
    codes = [q.codes.flatten().tolist() for q in quantized]
    values = [q.dequantize().flatten().tolist() for q in quantized]
    weights = [weight.flatten().tolist() for weight in path]
    for i in range(path[0].numel()):
        steps = range(1, len(path))
        moved = sum(abs(weights[t][i] - weights[t - 1][i]) for t in steps)
        jumped = sum(abs(values[t][i] - values[t - 1][i]) for t in steps if codes[t][i] != codes[t - 1][i])
        yield moved > 0 and jumped >= threshold * moved


@pytest.mark.parametrize("plugin", [TernaryPrecision, lambda: LowBitPrecision("nvfp4")])
def test_a_real_run(plugin: Any) -> None:
    before, after = Watch(), Watch()
    model, run = Small(), trainer(before, OsciReset(window=6, every=8), after, plugin=plugin(), max_steps=16)
    first = model.layer.weight.detach().clone()
    run.fit(model)
    cast = model.layer.casts.fprop_w
    number = 0
    for begin, end in ((0, 6), (8, 14)):
        path = [after.weights[begin - 1] if begin else first, *before.weights[begin:end]]
        expected = torch.tensor(list(slow(path, cast, 8.0))).view_as(first)
        number += expected.sum().item()
        centers = quantize(path[-1].bfloat16(), cast).dequantize()
        torch.testing.assert_close(after.weights[end - 1], torch.where(expected, centers, path[-1]), rtol=0, atol=0)
    assert number > 0, "the run does not test what it should"
    for step in {*range(16)} - {5, 13}:
        assert torch.equal(before.weights[step], after.weights[step]), f"reset in step {step}"


def test_the_moments_stay() -> None:
    class Moments(Callback):
        def __init__(self) -> None:
            self.seen: list[Tensor] = []

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            state = trainer.optimizers[0].state[pl_module.layer.weight]
            self.seen.append(torch.stack([state["exp_avg"], state["exp_avg_sq"]]).clone())

    before, after = Moments(), Moments()
    run = trainer(before, OsciReset(window=2, every=2), after, plugin=TernaryPrecision(), max_steps=4)
    run.fit(Small())
    assert torch.equal(torch.stack(before.seen), torch.stack(after.seen))
    assert run.callback_metrics["reset/fprop_w/layer"] > 0, "the run does not test what it should"


# --- resuming ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [3, 4, 5, 6, 9, 10])
def test_a_resumed_run_goes_on_with_its_window(tmp_path: Path, at: int) -> None:
    """Windows are open from 0 to 5 and from 10 to 15; checkpoints lie within, at the ends and in between.

    Were paths of the first four steps lost, the fifth alone would not reach the threshold, or too easily.
    """

    class Keep(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == at:
                trainer.save_checkpoint(tmp_path / "x.ckpt")

    def run(*callbacks: Callback, **kwargs: Any) -> tuple[Tensor, dict[int, Any]]:
        made = trainer(
            OsciReset(window=5, every=10, threshold=12),
            *callbacks,
            max_steps=16,
            limit_train_batches=1,
            logger=CSVLogger("logs"),
        )
        model = Row()
        made.fit(model, **kwargs)
        return model.layer.weight.detach(), logged(made)

    whole, rows = run(Keep())
    resumed, more = run(ckpt_path=tmp_path / "x.ckpt", weights_only=True)
    assert list(rows) == [4, 14], "the run does not test what it should"
    assert rows[4] == {"reset/fprop_w/layer": 2 / 8}
    assert more == {step: row for step, row in rows.items() if step >= at}
    assert torch.equal(whole, resumed)


def test_a_window_is_part_of_the_checkpoint_while_it_is_open(tmp_path: Path) -> None:
    for steps, size in ((3, 2 * WEIGHT[0].numel()), (5, 0)):
        run = trainer(OsciReset(window=4, every=10), max_steps=steps)
        run.fit(Row())
        run.save_checkpoint(tmp_path / "x.ckpt")
        (state,) = torch.load(tmp_path / "x.ckpt", weights_only=True)["callbacks"].values()
        assert sum(tensor.numel() for paths in state["paths"].values() for tensor in paths.values()) == size
        loaded = OsciReset(window=4, every=10)
        loaded.load_state_dict(state)
        assert loaded.state_dict() == state, "what is loaded and saved again before training starts is lost"


def test_another_run_begins_anew() -> None:
    reset = OsciReset(window=4, every=10)
    fit(reset, max_steps=2)
    assert reset_at(fit(reset, max_steps=6)) == {4: ["oscillating", "oscillating below 0"]}


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window": 1}, "window is a number of optimizer steps, 2 or more; got 1"),
        ({"window": 50.0}, "got 50.0"),
        ({"window": 50, "every": 49}, "every is a number of optimizer steps, no fewer than window, 50 or more; got 49"),
        ({"threshold": 1}, "threshold is the ratio of two paths, above 1; got 1"),
        ({"threshold": math.nan}, "got nan"),
        ({"threshold": math.inf}, "got inf"),
        ({"threshold": "8"}, "above 1; got '8'"),
        ({"start": -1}, "start is a number of optimizer steps, 0 or more; got -1"),
        ({"start": 0.6}, "got 0.6"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OsciReset(**arguments)


@pytest.mark.parametrize("casts", ["bf16", "ufp4", {"preset": "int4", "fprop_w": {"rounding": "stochastic"}}], ids=str)
def test_nothing_to_act_on(casts: Any) -> None:
    with pytest.raises(MisconfigurationException, match="OsciReset needs .* and of 1 converted layers none has one"):
        fit(OsciReset(), plugin=LowBitPrecision(casts))


def test_sharded_weights_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(callback: Any, run: Any, module: Any) -> Any:
        assert isinstance(callback, OsciReset) and isinstance(run, Trainer) and isinstance(module, Row)
        raise MisconfigurationException("sharded")

    monkeypatch.setattr(osci_reset, "whole_layers", refuse)
    with pytest.raises(MisconfigurationException, match="sharded"):
        fit(OsciReset())
