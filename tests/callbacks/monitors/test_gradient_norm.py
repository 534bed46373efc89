"""Norms are those that torch computes of whole gradients; what the monitor says, it says once, and nothing changes."""

import json
import math
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import get_total_norm
from torch.utils.data import DataLoader

from lightning_lowbit import GradientNormMonitor, LowBitPrecision, RunReport, StaticGradScaler
from lightning_lowbit.optim import Adaptive, StableSPAM
from lightning_lowbit.report.html import Table, Text
from tests.callbacks.monitors.device_reads import HOOKS, counted
from tests.callbacks.monitors.ranks_gradient_norm import EVERY, RANKS, RUNS, STEPS, UNPLUGGED, train
from tests.launch import launch
from tests.lightnings import (
    BoringModel,
    Callback,
    DeepSpeedStrategy,
    LightningCLI,
    MisconfigurationException,
    MixedPrecision,
    RandomDataset,
    TensorBoardLogger,
    Trainer,
)

Run = tuple[str, str, bool]

# Norms of sums: the same squares in another order and rounded some five times more, in float32 (2^-24 = 6e-8 each).
CLOSE = {"rtol": 1e-6, "atol": 0.0}


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=1e-3)


class Planned(BoringModel):
    """The loss, and so the gradient, of some batches is multiplied; what torch says of the norms is kept.

    Attributes:
        seen: by optimizer step, before clipping and at the end of the batch.
    """

    def __init__(
        self, factors: Mapping[int, float] | None = None, make_optimizer: Callable[[nn.Module], Any] = sgd
    ) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(32, 4), nn.Linear(4, 2))
        self.factors, self.make_optimizer = factors or {}, make_optimizer
        self.seen: dict[int, dict[str, float]] = {}

    def norm(self, module: nn.Module) -> float:
        return float(get_total_norm([p.grad.float() for p in module.parameters() if p.grad is not None]))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        factor = self.factors.get(self.trainer.fit_loop.epoch_loop.total_batch_idx, 1.0)
        return self.layer(batch).float().square().mean() * factor

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        found = {"unclipped": self.norm(self), **{f"unclipped/layer.{i}": self.norm(self.layer[i]) for i in (0, 1)}}
        self.seen[self.trainer.global_step + 1] = found

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step in self.seen:
            found = {"clipped": self.norm(self), **{f"clipped/layer.{i}": self.norm(self.layer[i]) for i in (0, 1)}}
            self.seen[self.trainer.global_step] |= found

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self)

    def train_dataloader(self) -> DataLoader:
        torch.manual_seed(5)
        return DataLoader(RandomDataset(32, 64))


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
    """What the event file holds, by optimizer step (Lightning numbers the first one 0)."""
    assert run.logger is not None
    run.logger.finalize("success")
    events = EventAccumulator(run.logger.log_dir).Reload()
    found: dict[int, dict[str, float]] = {}
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag) if tag != "epoch" else ():
            name = tag.removeprefix("grad_norm/")
            assert name not in found.setdefault(event.step + 1, {}), f"{name} twice in step {event.step + 1}"
            found[event.step + 1][name] = event.value
    return found


def fit(model: Planned, monitor: GradientNormMonitor | None = None, **kwargs: Any) -> dict[int, dict[str, float]]:
    """What is logged of a run."""
    run = trainer(monitor or GradientNormMonitor([r"layer\.\d"]), logger=TensorBoardLogger("."), **kwargs)
    run.fit(model)
    return logged(run)


def texts(said: pytest.WarningsRecorder) -> list[str]:
    """What the monitor said; Lightning's advice on tiny loaders is among the recorded, too."""
    return [str(one.message) for one in said if "Gradient norm" in str(one.message)]


def assert_same(found: Any, wanted: Any) -> None:
    assert found.keys() == wanted.keys()
    for step in wanted:
        assert found[step].keys() == wanted[step].keys(), f"step {step}"
        for name, value in wanted[step].items():
            message = f"step {step}, {name}: {found[step][name]}, wanted {value}"
            torch.testing.assert_close(found[step][name], value, **CLOSE, equal_nan=True, msg=message)


def expected(
    seen: dict[int, dict[str, float]], every: int = 1, clips: bool = False, spikes: tuple[int, ...] = ()
) -> dict[int, dict[str, float]]:
    return {
        step: {name: value for name, value in found.items() if clips or not name.startswith("clipped")}
        | {"spikes": float(sum(at <= step for at in spikes))}
        for step, found in seen.items()
        if step % every == 0
    }


# --- norms ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("every_n_steps", [None, 1, 2])
def test_curves_are_what_torch_says(every: int, every_n_steps: int | None) -> None:
    model = Planned({1: 0.3})
    found = fit(model, GradientNormMonitor([r"layer\.\d"], every_n_steps), log_every_n_steps=every)
    assert_same(found, expected(model.seen, every))


@pytest.mark.parametrize("clip", [{"gradient_clip_val": 0.1}, {"gradient_clip_val": 0.03}], ids=["norm", "value"])
def test_clipped(clip: dict[str, Any], request: pytest.FixtureRequest) -> None:
    model = Planned({2: 2.0})
    algorithm = request.node.callspec.id
    found = fit(model, gradient_clip_algorithm=algorithm, **clip)
    assert_same(found, expected(model.seen, clips=True))
    assert found[3]["clipped"] < found[3]["unclipped"] / 5, "the run does not clip"
    if algorithm == "norm":
        assert found[3]["clipped"] == pytest.approx(0.1, rel=1e-4), "torch adds 1e-6 to the norm"


def test_clipped_by_a_hook() -> None:
    class Halves(Planned):
        def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
            for parameter in self.parameters():
                assert parameter.grad is not None
                parameter.grad /= 2

    model = Halves()
    found = fit(model)
    assert_same(found, expected(model.seen, clips=True))
    for row in found.values():
        assert row["clipped"] == pytest.approx(row["unclipped"] / 2)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_of_all_micro_batches_together(accumulate: int) -> None:
    model = Planned({3: 2.0})
    found = fit(model, accumulate_grad_batches=accumulate, log_every_n_steps=2)
    assert sorted(found) == [2, 4, 6]
    assert_same(found, expected(model.seen, 2))


RULES: dict[str, Callable[[nn.Module], Any]] = {
    "Stable-SPAM": lambda module: StableSPAM(module.parameters(), lr=1e-3),
    "matrices only": lambda module: StableSPAM(module.parameters(), lr=1e-3, matrices_only=True),
    "wrapped": lambda module: Adaptive(torch.optim.AdamW(module.parameters())),
    "without rules": lambda module: StableSPAM(module.parameters(), lr=1e-3, element_clip=None, norm_clip=None),
}


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("make", RULES.values(), ids=RULES)
def test_used_is_what_the_rules_leave(make: Callable[[nn.Module], Any], clip: float | None) -> None:
    class Rules(Planned):
        def on_train_batch_end(self, *_: Any) -> None:
            super().on_train_batch_end()
            rows = self.optimizers().optimizer.gradient_statistics()
            after = [p.grad.norm() if rows[p].norm_after.isnan() else rows[p].norm_after for p in self.parameters()]
            for name, norms in (("used", after), ("used/layer.0", after[:2]), ("used/layer.1", after[2:])):
                self.seen[self.trainer.global_step][name] = float(torch.stack(norms).norm())

    model = Rules({3: 30.0}, make)
    found = fit(model, GradientNormMonitor([r"layer\.\d"], limit=None), gradient_clip_val=clip)
    assert_same(found, expected(model.seen, clips=clip is not None))
    ratio = found[4]["used"] / found[4]["unclipped" if clip is None else "clipped"]
    if make is RULES["without rules"]:
        assert ratio == pytest.approx(1, rel=1e-6)
    elif clip is None:
        assert ratio < 0.9, "the rules did nothing"


@pytest.mark.parametrize("optimizer", [sgd, RULES["Stable-SPAM"]])
def test_the_norm_does_not_depend_on_the_scale_of_the_loss(optimizer: Callable[[nn.Module], Any]) -> None:
    """The backward pass computes in fp16, where powers of two change no digit."""
    curves = []
    for scale in (2.0**4, 2.0**11):
        torch.manual_seed(1)
        plugin = LowBitPrecision("bf16", compute_dtype="fp16", scaler=StaticGradScaler(scale, device="cpu"))
        model = Planned(make_optimizer=optimizer)
        curves.append(fit(model, GradientNormMonitor([r"layer\.\d"]), plugins=[plugin], gradient_clip_val=0.1))
    assert curves[0].keys() == curves[1].keys()
    for step, row in curves[0].items():
        # Below 6e-8 fp16 has no numbers: the smaller scale loses some of the smallest gradients.
        assert curves[1][step] == pytest.approx(row, rel=1e-3), f"step {step}"
    found = {step: {n: v for n, v in row.items() if "used" not in n} for step, row in curves[1].items()}
    assert_same(found, expected(model.seen, clips=True))


def test_a_fused_optimizer_unscales_within_its_step() -> None:
    """Under Lightning's own plugin, where gradients are still scaled when they are measured."""

    def fused(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)

    scaler = GradScaler("cpu", init_scale=2.0**10)
    model = Planned(make_optimizer=fused)
    found = fit(model, plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)])
    for row in model.seen.values():
        row.update({name: value / 2**10 for name, value in row.items() if name.startswith("unclipped")})
    assert_same(found, expected(model.seen))


def test_gradients_of_other_kinds() -> None:
    """Sparse, of float64, of bfloat16, missing, frozen, and shared: each counts once, or not at all."""

    class Kinds(Planned):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(7, 4, sparse=True)
            self.wide, self.narrow = nn.Linear(4, 4).double(), nn.Linear(4, 4).bfloat16()
            self.idle, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
            self.tied = nn.Linear(4, 4)
            self.tied.weight = self.idle.weight

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            x = self.frozen(self.table(torch.tensor([1, 1, 4])))
            return (self.wide(x.double()).float() + self.narrow(x.bfloat16()).float() + self.tied(x)).square().mean()

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            gradients = {name: p.grad for name, p in self.named_parameters() if p.grad is not None}
            dense = {name: g.to_dense().float() for name, g in gradients.items()}
            layers = {name: [g for n, g in dense.items() if n.startswith(name)] for name in ("table", "wide", "narrow")}
            layers |= {"tied": [dense["idle.weight"], dense["tied.bias"]], "idle": [dense["idle.weight"]]}
            found = {f"unclipped/{name}": float(get_total_norm(of_one)) for name, of_one in layers.items()}
            self.seen[self.trainer.global_step + 1] = {"unclipped": float(get_total_norm([*dense.values()])), **found}

        def on_train_batch_end(self, *_: Any) -> None:
            pass

    names = ["table", "wide", "narrow", "idle", "tied", "frozen", "layer"]
    model = Kinds()
    found = fit(model, GradientNormMonitor(names))
    for row in found.values():
        for number in (0, 1):
            assert row.pop(f"unclipped/layer.{number}") == 0, "a layer without gradients has a norm"
    assert_same(found, expected(model.seen))


@pytest.mark.parametrize("precision", [None, "bf16-true"])
def test_optimizers_that_step_in_one_batch_count_together(precision: Any) -> None:
    """Norms are of float32, whatever dtype is the default in `training_step`, where such optimizers step."""

    class Manual(Planned):
        automatic_optimization = False

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            squares = []
            for number, optimizer in enumerate(self.optimizers()):
                optimizer.zero_grad()
                self.manual_backward(self.layer(batch).square().mean() * (number + 1))
                self.clip_gradients(optimizer, 0.05, "norm")
                squares.append(self.norm(self.layer[number]) ** 2)
                optimizer.step()
                optimizer.zero_grad()
            of_layers = {f"unclipped/layer.{number}": math.sqrt(square) for number, square in enumerate(squares)}
            self.seen[self.trainer.global_step] = {"unclipped": math.sqrt(sum(squares)), **of_layers}

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            pass

        def on_train_batch_end(self, *_: Any) -> None:
            pass

        def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
            raise AssertionError("Lightning clips nothing in manual optimization")

        def configure_optimizers(self) -> Any:
            return [sgd(layer) for layer in self.layer]

    model = Manual()
    found = fit(model, max_steps=8, log_every_n_steps=2, precision=precision)
    assert sorted(model.seen) == [2, 4, 6, 8]
    assert_same(found, {step: {**model.seen[2 * step], "spikes": 0.0} for step in (2, 4)})


def test_a_batch_without_a_step_shows_no_norm() -> None:
    """Not even that of the step before it, which Lightning would go on to log."""

    class Skips(Planned):
        automatic_optimization = False

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            self.manual_backward(super().training_step(batch, batch_idx))
            if batch_idx % 2 == 0:
                self.optimizers().step()

    found = fit(Skips(), GradientNormMonitor(), max_steps=-1, max_epochs=1, limit_train_batches=6)
    assert sorted(found) == [1, 3, 5]


# --- two processes ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Run, Any]]:
    return launch("tests.callbacks.monitors.ranks_gradient_norm", RANKS, tmp_path_factory.mktemp("watched"))


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, bool], Any]:
    """What one process logs."""
    return {run[1:]: train("auto", *run[1:], devices=1)["curves"] for run in [*RUNS, UNPLUGGED]}


@pytest.mark.parametrize("run", [*RUNS, UNPLUGGED], ids=str)
def test_two_processes_log_what_one_does(
    results: list[dict[Run, Any]], alone: dict[tuple[str, bool], Any], run: Run
) -> None:
    first, second = (result[run]["curves"] for result in results)
    assert sorted(first) == list(range(EVERY, STEPS + 1, EVERY))
    assert first == second, "ranks log different values"
    assert_same(first, alone[run[1:]])
    assert {name for name in first[2] if "body" in name} >= {f"grad_norm/unclipped/body.{i}" for i in range(3)}
    if run[2]:
        assert first[2]["grad_norm/clipped"] < first[2]["grad_norm/unclipped"] / 2, "the run does not clip"
    assert ("grad_norm/used" in first[2]) == (run[1] == "stable_spam")


@pytest.mark.parametrize("run", [*RUNS, UNPLUGGED], ids=str)
def test_one_collective_in_a_logged_step_where_gradients_are_spread(results: list[dict[Run, Any]], run: Run) -> None:
    for rank, result in enumerate(results):
        counts = result[run]["collectives"]
        wanted = [int(run[0] != "ddp" and step % EVERY == 0) for step in range(1, STEPS + 1)]
        assert counts == wanted, f"rank {rank}; three layers need none of their own"


# --- nothing is disturbed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [sgd, RULES["Stable-SPAM"]])
def test_watching_changes_nothing(make: Callable[[nn.Module], Any]) -> None:
    ends = []
    for callbacks in ([], [GradientNormMonitor(["layer"], every_n_steps=1, limit=None)]):
        torch.manual_seed(0)
        run, model = trainer(*callbacks, gradient_clip_val=0.1, log_every_n_steps=2), Planned({3: 9.0}, make)
        run.fit(model)
        ends.append([*model.parameters(), *(p.grad for p in model.parameters()), torch.rand(3)])
    for number, (a, b) in enumerate(zip(*ends, strict=True)):
        assert a.equal(b), f"tensor {number} differs: weights, gradients, random numbers"


def test_nothing_is_read_between_logged_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    Watched, reads = counted(GradientNormMonitor, monkeypatch)
    model = Planned(make_optimizer=RULES["Stable-SPAM"])
    trainer(Watched(["layer"], 1), log_every_n_steps=4, max_steps=10, gradient_clip_val=1.0).fit(model)
    assert all(reads.pop((hook, -1)) == 10 for hook in HOOKS), "a hook was not watched"
    assert +reads == {("on_train_batch_start", 4): 1, ("on_train_batch_start", 8): 1}


def test_what_nobody_logs_is_read_at_last() -> None:
    monitor, lengths = GradientNormMonitor(every_n_steps=1), []

    class Look(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            lengths.append(len(monitor._unread))

    trainer(monitor, Look(), log_every_n_steps=0, max_steps=120).fit(Planned())
    assert max(lengths) == 100, "steps pile up"


# --- spikes -----------------------------------------------------------------------------------------------------------


class Constant(Planned):
    """The norm of the gradient is the factor of the batch, but for rounding."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        factor = self.factors.get(self.trainer.fit_loop.epoch_loop.total_batch_idx, 1.0)
        return self.layer[0].bias.sum() * factor / 2  # four elements


def spikes_of(
    factors: Mapping[int, float], monitor: GradientNormMonitor, steps: int = 20, **kwargs: Any
) -> list[tuple[float, ...]]:
    trainer(monitor, max_steps=steps, **kwargs).fit(Constant(factors))
    return [tuple(round(value, 4) for value in spike) for spike in monitor.state_dict()["spikes"]]


SAID = "Gradient norm, step {}: it is {} before clipping, where its running mean is {}"


def test_a_spike_is_told_with_its_step_and_does_not_enter_the_mean() -> None:
    monitor = GradientNormMonitor(limit=None)
    with pytest.warns(UserWarning, match=SAID.format(13, 6, 1)) as said:
        found = spikes_of({12: 6.0, 14: 7.0, 16: 4.0, 17: 6.5}, monitor)
    assert len(texts(said)) == 1, "said more than once"
    # Of steps 1 to 17 but for two spikes: norms of 1, and one of 4, whose weight is 0.01 / (1 - 0.99^15).
    mean = 1 + 3 * 0.01 / (1 - 0.99**15)
    assert found == [(13, 6.0, 1.0), (15, 7.0, 1.0), (18, 6.5, round(mean, 4))]


def test_a_spike_between_logged_steps() -> None:
    factors = {12: 6.0}
    assert spikes_of(factors, GradientNormMonitor(), log_every_n_steps=4) == []
    with pytest.warns(UserWarning, match=SAID.format(13, 6, 1)):
        assert spikes_of(factors, GradientNormMonitor(every_n_steps=1), log_every_n_steps=4) == [(13, 6.0, 1.0)]


def test_every_n_steps_are_those_of_the_logger() -> None:
    """Ten norms are known after step 20; step 22 is looked at, step 21 is not."""
    options: dict[str, Any] = {"steps": 24, "log_every_n_steps": 4}
    assert spikes_of({20: 6.0}, GradientNormMonitor(every_n_steps=2), **options) == []
    with pytest.warns(UserWarning, match=SAID.format(22, 6, 1)):
        spikes_of({21: 6.0}, GradientNormMonitor(every_n_steps=2), **options)


def test_spikes_are_counted_in_a_curve() -> None:
    with pytest.warns(UserWarning, match=SAID.format(13, 6, 1)):
        found = fit(
            Constant({12: 6.0, 14: 6.0}), GradientNormMonitor(every_n_steps=1), max_steps=16, log_every_n_steps=4
        )
    assert {step: row["spikes"] for step, row in found.items()} == {4: 0, 8: 0, 12: 0, 16: 2}


def test_first_norms_are_no_spikes() -> None:
    few, enough = dict.fromkeys(range(9), 0.1), dict.fromkeys(range(10), 0.1)
    assert spikes_of(few, GradientNormMonitor(), 10) == [], "of nine norms one knows little"
    with pytest.warns(UserWarning, match=SAID.format(11, 1, 0.1)):
        spikes_of(enough, GradientNormMonitor(), 11)


def test_a_new_level_is_no_spike_for_ever() -> None:
    with pytest.warns(UserWarning, match=SAID.format(13, 6, 1)):
        found = spikes_of({**dict.fromkeys(range(12, 40), 6.0), 38: 31.0}, GradientNormMonitor(limit=None), 40)
    assert [step for step, *_ in found] == [*range(13, 23), 39]
    assert found[-1] == (39, 31.0, 6.0)


def test_the_factor_and_the_decay() -> None:
    assert spikes_of({12: 6.0}, GradientNormMonitor(spike_factor=6.1)) == []
    with pytest.warns(UserWarning, match=SAID.format(14, 6, 1.5)):
        spikes_of({12: 1.5, 13: 6.0}, GradientNormMonitor(spike_factor=3.9, decay=0.0))


def test_no_more_spikes_are_listed_than_needed() -> None:
    factors = dict.fromkeys(range(12, 240, 2), 6.0)
    monitor = GradientNormMonitor()
    with pytest.warns(UserWarning, match="Gradient norm"):
        found = spikes_of(factors, monitor, 240)
    assert len(factors) == 114
    assert [step for step, *_ in found] == [batch + 1 for batch in factors][-100:]


# --- warnings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_not_finite(value: float) -> None:
    match = r"Gradient norm, step 4: it is (inf|nan) \(in layer\.1\), and so are .* Look at the data of this step"
    model = Planned(make_optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.0))

    def breaks(gradient: Tensor) -> Tensor:
        return gradient * value if model.trainer.global_step >= 3 else gradient

    model.layer[1].weight.register_hook(breaks)
    with pytest.warns(UserWarning, match=match) as said:
        trainer(GradientNormMonitor([r"layer\.\d"])).fit(model)
    assert len(texts(said)) == 1, "said more than once, or what is infinite is also above the limit"


def test_what_is_not_finite_enters_no_mean_and_is_no_step() -> None:
    monitor = GradientNormMonitor()
    with pytest.warns(UserWarning) as said:
        found = fit(Constant({3: math.nan, 13: 6.0}, RULES["Stable-SPAM"]), monitor, max_steps=14)
    nan, spike = texts(said)
    assert "step 4: it is nan, and so are the weights after a step with it" in nan
    assert "step 14: it is 6 before clipping" in spike
    assert math.isnan(found[4]["unclipped"])
    assert found[4]["used"] == 0, "a skipped step used something"
    ((step, norm, mean),) = monitor.state_dict()["spikes"]
    assert (step, norm, round(mean, 5)) == (14, 6.0, 1.0)


def test_a_loss_scaler_sees_to_what_is_not_finite() -> None:
    plugin = LowBitPrecision("bf16", compute_dtype="fp16", scaler=StaticGradScaler(8, device="cpu"))
    found = fit(Planned({2: math.inf}, RULES["Stable-SPAM"]), plugins=[plugin])  # warnings are errors
    assert not math.isfinite(found[3]["unclipped"])
    assert found[3]["used"] == found[3]["used/layer.0"] == 0, "what an older step used"


def test_the_limit() -> None:
    match = r"Gradient norm, step 3: it is 12 before clipping, above the limit of 10. Lower the learning rate"
    with pytest.warns(UserWarning, match=match) as said:
        trainer(GradientNormMonitor(limit=10), gradient_clip_val=1.0).fit(Constant({2: 12.0, 3: 13.0}))
    assert len(texts(said)) == 1, "said more than once"
    trainer(GradientNormMonitor(limit=None)).fit(Constant({2: 12.0}))
    trainer(GradientNormMonitor(limit=12.5)).fit(Constant({2: 12.0}))


def test_large_norms_are_no_fault_of_a_model() -> None:
    """Warnings are errors."""
    trainer(GradientNormMonitor()).fit(Constant(dict.fromkeys(range(6), 40.0)))
    trainer(GradientNormMonitor(), max_steps=24).fit(Constant({step: 40.0 / (1 + step) for step in range(24)}))


def test_a_level_that_rose_is_above_the_limit() -> None:
    """A norm doubles every four steps: never five times its running mean of the last few, in the end ten medians."""
    rising = {step: 2 ** (step / 4) for step in range(40)}
    medians = [statistics.median([rising[i] for i in range(step)]) for step in range(1, 40)]
    first = next(step for step in range(10, 40) if rising[step] > 10 * medians[step - 1])
    with pytest.warns(UserWarning, match="times the median of") as said:
        trainer(GradientNormMonitor(decay=0.5), max_steps=first + 3).fit(Constant(rising))
    (text,) = texts(said)
    assert f"Gradient norm, step {first + 1}: it is {rising[first]:.4g} before clipping, above 10 times" in text
    trainer(GradientNormMonitor(decay=0.5, limit="100x"), max_steps=first + 3).fit(Constant(rising))


def test_no_clipping_is_advised_where_something_clips() -> None:
    def advice(make: Callable[[nn.Module], Any] = sgd, **kwargs: Any) -> list[str]:
        with pytest.warns(UserWarning) as said:
            trainer(GradientNormMonitor(limit=5.0), max_steps=14, **kwargs).fit(Constant({13: 6.0}, make))
        found = texts(said)
        assert len(found) == 2, "a spike, and the limit"
        return [text for text in found if "StableSPAM" in text]

    assert len(advice()) == 2
    assert advice(gradient_clip_val=1.0) == advice(RULES["Stable-SPAM"]) == []
    assert len(advice(RULES["without rules"])) == 2


def test_the_last_step_counts() -> None:
    with pytest.warns(UserWarning, match="step 6: it is 12 before clipping"):
        trainer(GradientNormMonitor(limit=10.0)).fit(Constant({5: 12.0}))


# --- state ------------------------------------------------------------------------------------------------------------


def test_a_resumed_run_is_the_uninterrupted_one() -> None:
    """Stopped after a spike, between two logged steps, and before another."""
    curves, states = [], []
    for name, steps, resumed in (("whole", 18, None), ("half", 14, None), ("rest", 18, "half.ckpt")):
        monitor = GradientNormMonitor(["layer"], every_n_steps=1)
        run = trainer(
            monitor,
            max_steps=steps,
            logger=TensorBoardLogger(name),
            limit_train_batches=1,  # an epoch is a step: Lightning resumes with the next epoch
            log_every_n_steps=3,
        )
        torch.manual_seed(0)
        model = Constant({12: 6.0, 16: 7.0, 17: 1.5})
        if name == "rest":
            run.fit(model, ckpt_path=resumed, weights_only=True)  # what was said is not repeated
        else:
            with pytest.warns(UserWarning, match=SAID.format(13, 6, 1)):
                run.fit(model)
        run.save_checkpoint(f"{name}.ckpt")
        curves.append(logged(run))
        states.append(monitor.state_dict())
    whole, half, rest = curves
    assert sorted(whole) == [3, 6, 9, 12, 15, 18]
    assert whole == half | rest
    assert states[0] == states[2]
    saved = torch.load("half.ckpt", weights_only=True)["callbacks"]
    assert saved["GradientNormMonitor"] == states[1]


def test_a_checkpoint_knows_of_the_step_that_has_just_been_done() -> None:
    monitor, saved = GradientNormMonitor(), []

    class Save(Callback):
        def on_train_batch_end(self, run: Trainer, *_: Any) -> None:
            if run.global_step == 13:
                saved.append(monitor.state_dict())

    with pytest.warns(UserWarning, match=SAID.format(13, 6, 1)):
        trainer(monitor, Save(), max_steps=14).fit(Constant({12: 6.0}))
    assert [step for step, *_ in saved[0]["spikes"]] == [13]
    assert saved[0]["alerts"], "the checkpoint does not know what was said"


def test_another_run_begins_anew_and_the_same_goes_on() -> None:
    monitor = GradientNormMonitor()
    for _ in range(2):
        with pytest.warns(UserWarning, match=SAID.format(13, 6, 1)):
            assert spikes_of({12: 6.0}, monitor, 14) == [(13, 6.0, 1.0)]
    run, model = trainer(monitor, max_steps=12, limit_train_batches=12), Constant({12: 6.0})
    run.fit(model)
    run.fit_loop.epoch_loop.max_steps = 14
    with pytest.warns(UserWarning, match=SAID.format(13, 6, 1)):
        run.fit(model)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every_n_steps": 0}, "every_n_steps is a number of steps, 1 or more, or None; got 0"),
        ({"every_n_steps": 2.0}, "or None; got 2.0"),
        ({"every_n_steps": True}, "or None; got True"),
        ({"spike_factor": 1}, "spike_factor is how many times the mean is a spike, above 1; got 1"),
        ({"spike_factor": math.inf}, "above 1; got inf"),
        ({"spike_factor": "5"}, "above 1; got '5'"),
        ({"spike_factor": None}, "above 1; got None"),
        ({"decay": 1.0}, "decay is what remains of a mean with each norm, 0 or more and below 1; got 1.0"),
        ({"decay": -0.1}, "below 1; got -0.1"),
        ({"decay": math.nan}, "below 1; got nan"),
        ({"limit": 0}, "limit is a norm, or a text such as '10x' .* above 0, or None; got 0"),
        ({"limit": "10"}, "or None; got '10'"),
        ({"limit": "1x"}, "or None; got '1x'"),
        ({"limit": math.inf}, "or None; got inf"),
        ({"limit": True}, "or None; got True"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GradientNormMonitor(**arguments)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (
            ["layer", "lm_head"],
            r"layers: the pattern 'lm_head' matches no layer with parameters. There are 2, e.g. layer.0, layer.1",
        ),
        ("layer", r"layers is a list of patterns; got the string 'layer'. Write \['layer'\]"),
        (["("], "layers: '\\(' is not a regular expression"),
    ],
)
def test_bad_patterns(layers: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trainer(GradientNormMonitor(layers)).fit(Planned())


def test_deepspeed_is_refused() -> None:
    run, model = trainer(), Planned()
    run.strategy.__class__ = DeepSpeedStrategy  # which is not installed
    with pytest.raises(MisconfigurationException, match="DeepSpeed keeps to itself: leave it out, or train with DDP"):
        GradientNormMonitor().on_train_start(run, model)


def test_from_a_yaml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py"])
    arguments = {"layers": ["layer"], "every_n_steps": 1, "spike_factor": 3.0, "decay": 0.9, "limit": "20x"}
    path = f"{GradientNormMonitor.__module__}.GradientNormMonitor"
    config = {
        "seed_everything": 1,
        "trainer": {"accelerator": "cpu", "callbacks": [{"class_path": path, "init_args": arguments}]},
    }
    Path("run.yaml").write_text(yaml.safe_dump(config))
    args = ["--config", "run.yaml"]
    cli = LightningCLI(BoringModel, args=args, run=False, save_config_callback=None, auto_configure_optimizers=False)
    (monitor,) = [one for one in cli.trainer.callbacks if isinstance(one, GradientNormMonitor)]
    assert {name: getattr(monitor, name) for name in arguments} == arguments


# --- the report -------------------------------------------------------------------------------------------------------


def test_reported() -> None:
    monitor = GradientNormMonitor(["layer"], limit=10)
    with pytest.warns(UserWarning, match="Gradient norm"):
        run = trainer(RunReport(), monitor, max_steps=16)
        run.fit(Constant({12: 6.0, 14: 12.0}))
    (table,) = monitor.report_sections(run)[0].blocks
    assert isinstance(table, Table)
    assert [row[0] for row in table.rows] == [13, 15]
    listed = monitor.report_alerts(run)
    assert [text.split(":")[0] for text in listed] == ["Gradient norm, step 13", "Gradient norm, step 15"]
    page = Path("report.html").read_text()
    assert "Gradient norm" in page
    assert "above the limit of 10" in page
    found = json.loads(Path("run.json").read_text())["summary"]["gradient_norm"]
    assert [spike["step"] for spike in found["spikes"]] == [13, 15]
    assert found["alerts"] == listed


def test_reported_without_a_spike() -> None:
    monitor = GradientNormMonitor()
    run = trainer(monitor)
    run.fit(Planned())
    (block,) = monitor.report_sections(run)[0].blocks
    assert block == Text("No gradient norm exceeded 5 times its running mean.")
