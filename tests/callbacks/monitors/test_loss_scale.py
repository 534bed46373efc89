"""What the monitor logs of the scale is what the module reads itself after each step; what it says, it says once."""

import math
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from lightning_lowbit import ConservativeGradScaler, LossScaleMonitor, LowBitPrecision, RunReport, StaticGradScaler
from lightning_lowbit.report.html import Text
from tests.callbacks.monitors.device_reads import HOOKS, counted
from tests.lightnings import (
    BoringModel,
    Callback,
    MisconfigurationException,
    MixedPrecision,
    TensorBoardLogger,
    Trainer,
)

CURVES = ("scale", "growth_tracker", "overflows", "skipped_steps")
Overflows = Collection[tuple[int, int]]  # of which batches, in the gradients of which optimizer


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=1e-3)


class Scripted(BoringModel):
    """Gradients overflow where they are told to; after each batch with a step, what the scaler says is kept."""

    def __init__(self, overflows: Collection[int] = (), make_optimizer: Callable[[nn.Module], Any] = sgd) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(32, 4), nn.Linear(4, 2))
        self.overflows: Overflows = {(batch, 0) for batch in overflows}
        self.make_optimizer = make_optimizer
        self.seen: list[dict[str, float]] = []
        self.steps = 0
        self.skip: set[int] = set()  # which optimizers, in the step under way

    def mean(self, batch: Tensor, optimizer: int = 0) -> Tensor:
        mean = self.layer(batch).float().mean()
        if (self.trainer.fit_loop.epoch_loop.total_batch_idx, optimizer) in self.overflows:
            self.skip.add(optimizer)
            return mean * math.inf
        return mean

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.mean(batch)

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step == self.steps:  # gradients are being accumulated
            return
        scaler = self.trainer.precision_plugin.scaler
        scale, tracker = scaler.get_scale(), scaler._get_growth_tracker()
        self.seen.append({"scale": scale, "growth_tracker": tracker, "overflows": len(self.skip)})
        self.steps, self.skip = self.trainer.global_step, set()

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self)


class Manual(Scripted):
    """Two optimizers that step in every batch, each after a backward pass of its own."""

    automatic_optimization = False

    def __init__(self, overflows: Overflows = ()) -> None:
        super().__init__()
        self.overflows = overflows

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for number, optimizer in enumerate(self.optimizers()):
            optimizer.zero_grad()
            self.manual_backward(self.mean(batch, number))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [sgd(layer) for layer in self.layer]


def conservative(**kwargs: Any) -> ConservativeGradScaler:
    settings = {"init_scale": 2.0**10, "growth_interval": 3, "cooldown": 1, "device": "cpu"}
    return ConservativeGradScaler(**{**settings, **kwargs})


def torchs(**kwargs: Any) -> GradScaler:
    return GradScaler("cpu", **{"init_scale": 2.0**10, "growth_interval": 3, **kwargs})


def lowbit(scaler: GradScaler) -> LowBitPrecision:
    return LowBitPrecision("bf16", compute_dtype="fp16", scaler=scaler)


def mixed(scaler: GradScaler) -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", scaler=scaler)


PLUGINS = {
    "conservative": lambda: lowbit(conservative()),
    "tolerant": lambda: lowbit(conservative(hysteresis=2)),
    "torch's": lambda: lowbit(torchs()),
    "static": lambda: lowbit(StaticGradScaler(2.0**10, device="cpu")),
    "Lightning's, conservative": lambda: mixed(conservative(hysteresis=2)),
    "Lightning's, torch's": lambda: mixed(torchs()),
}
plugins = pytest.mark.parametrize("plugin", PLUGINS.values(), ids=PLUGINS)


def trainer(*callbacks: Callback, plugin: Any = None, **kwargs: Any) -> Trainer:
    defaults = {
        "max_steps": 8,
        "log_every_n_steps": 1,
        "limit_val_batches": 0,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "plugins": [lowbit(conservative()) if plugin is None else plugin],
    }
    return Trainer(accelerator="cpu", callbacks=list(callbacks), **{**defaults, **kwargs})


def logged(run: Trainer) -> dict[int, dict[str, float]]:
    """What the event file holds, by the step it was logged at."""
    assert run.logger is not None
    run.logger.finalize("success")
    events = EventAccumulator(run.logger.log_dir).Reload()
    assert {tag for tag in events.Tags()["scalars"] if tag != "epoch"} == {f"loss_scale/{name}" for name in CURVES}
    found: dict[int, dict[str, float]] = {}
    for name in CURVES:
        for event in events.Scalars(f"loss_scale/{name}"):
            assert name not in found.setdefault(event.step, {}), f"{name} twice in step {event.step}"
            found[event.step][name] = event.value
    return found


def expected(seen: list[dict[str, float]], every: int) -> dict[int, dict[str, float]]:
    """Lightning numbers the first step 0. Overflows are those since the last point, skipped steps all of them."""
    return {
        step: {
            **seen[step],
            "overflows": sum(one["overflows"] for one in seen[step - every + 1 : step + 1]),
            "skipped_steps": sum(one["overflows"] for one in seen[: step + 1]),
        }
        for step in range(every - 1, len(seen), every)
    }


def reported(monitor: LossScaleMonitor, run: Trainer) -> list[str]:
    (section,) = monitor.report_sections(run)
    assert section.title == "Loss scale"
    return [block.text for block in section.blocks if isinstance(block, Text)]


# --- curves -----------------------------------------------------------------------------------------------------------


@pytest.mark.pairwise
@plugins
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_curves_are_what_the_module_reads(plugin: Callable[[], Any], every: int, accumulate: int) -> None:
    run = trainer(
        LossScaleMonitor(falls=20),
        plugin=plugin(),
        log_every_n_steps=every,
        accumulate_grad_batches=accumulate,
        max_steps=9,
        logger=TensorBoardLogger("."),
    )
    # With two micro-batches: in both of a step, in the second of one, in the first of one.
    model = Scripted({2, 3, 7, 12} if accumulate == 2 else {1, 2, 6})
    run.fit(model)
    assert sum(one["overflows"] for one in model.seen) == 3, "the run does not test what it should"
    assert logged(run) == expected(model.seen, every)


@pytest.mark.parametrize("every", [1, 3])
def test_a_fused_optimizer_shows_overflows_in_the_scale_alone(every: int) -> None:
    """Under Lightning's plugin it unscales within its step."""
    monitor = LossScaleMonitor()
    run = trainer(monitor, plugin=mixed(torchs()), log_every_n_steps=every, logger=TensorBoardLogger("."))
    model = Scripted({1, 4}, lambda module: torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True))
    run.fit(model)
    assert [one["scale"] for one in model.seen][:5] == [2**10, 2**9, 2**9, 2**9, 2**8]
    assert logged(run) == expected(model.seen, every)


@pytest.mark.parametrize(
    "make",
    [
        lambda: StaticGradScaler(2.0**10, device="cpu"),
        lambda: conservative(hysteresis=3),
        lambda: conservative(floor=2.0**10),
        lambda: conservative(cap=2.0**10, growth_interval=1, cooldown=0),
    ],
    ids=["static", "tolerant", "at its floor", "at its cap"],
)
def test_overflows_of_a_fused_optimizer_show_where_the_scale_does_not_fall(make: Callable[[], GradScaler]) -> None:
    monitor = LossScaleMonitor()
    run = trainer(monitor, plugin=mixed(make()), logger=TensorBoardLogger("."))
    model = Scripted({1, 4, 5}, lambda module: torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True))
    run.fit(model)
    assert logged(run) == expected(model.seen, 1)


def test_falls_of_a_first_scale_that_is_too_large_do_not_count() -> None:
    """Before a step is taken it only finds its place; at its floor it does not."""
    silent(conservative(), {0, 1, 2, 3, 5}, falls=2, within=8)
    warned("Loss scale, step 7: 2 overflows", conservative(), {0, 1, 2, 3, 5, 6}, falls=2, within=8)
    warned("Loss scale, step 2: 2 overflows", conservative(floor=2.0**9), {0, 1, 2}, falls=2, within=20)


def test_a_static_scale_that_is_too_large_is_told_so() -> None:
    scaler = StaticGradScaler(2.0**10, device="cpu")
    advice = "3 overflows came within 6 optimizer steps at 1024, where it stays: lower it, or let it adapt"
    warned(f"Loss scale, step 3: {advice}", scaler, {0, 1, 2, 3}, **FALLS)


@pytest.mark.parametrize(
    "plugin", [lambda: lowbit(conservative()), lambda: mixed(torchs())], ids=["ours", "Lightning's"]
)
def test_each_of_two_optimizers_counts(plugin: Callable[[], Any]) -> None:
    monitor = LossScaleMonitor()
    run = trainer(monitor, plugin=plugin(), max_steps=12, log_every_n_steps=2, logger=TensorBoardLogger("."))
    model = Manual({(0, 1), (2, 0), (3, 0), (3, 1)})
    run.fit(model)
    assert [one["overflows"] for one in model.seen] == [1, 0, 1, 2, 0, 0]
    assert logged(run) == expected(model.seen, 2)
    assert reported(monitor, run)[0].startswith("4 of 12 optimizer steps were skipped")


def test_falls_of_two_optimizers_in_one_batch_are_two() -> None:
    with pytest.warns(UserWarning, match="2 overflows came within 2 optimizer steps, .*; it is now 256."):
        trainer(LossScaleMonitor(falls=2, within=2)).fit(Manual({(1, 0), (1, 1)}))


def test_a_batch_without_a_step_counts_nothing() -> None:
    class Skips(Manual):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            if batch_idx % 2:
                super().training_step(batch, batch_idx)

    monitor = LossScaleMonitor()
    run = trainer(monitor, max_steps=-1, max_epochs=1, limit_train_batches=6)
    run.fit(Skips({(1, 0)}))
    assert reported(monitor, run)[0].startswith("1 of 6 optimizer steps were skipped")


def test_nothing_is_read_between_logged_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    Watched, reads = counted(LossScaleMonitor, monkeypatch)
    trainer(Watched(), log_every_n_steps=4, max_steps=10).fit(Scripted({1, 5}))
    assert all(reads.pop((hook, -1)) == 10 for hook in HOOKS), "a hook was not watched"
    assert +reads == {("on_train_batch_start", 4): 1, ("on_train_batch_start", 8): 1}


def test_watching_changes_nothing() -> None:
    ends = []
    for callbacks in ([], [LossScaleMonitor()]):
        torch.manual_seed(0)
        run, model = trainer(*callbacks), Scripted({1, 2, 6})
        run.fit(model)
        ends.append((model.seen, [parameter.detach() for parameter in model.parameters()]))
    torch.testing.assert_close(*ends, rtol=0, atol=0)


# --- warnings ---------------------------------------------------------------------------------------------------------


def warned(match: str, scaler: GradScaler, overflows: Collection[int], plugin: Any = lowbit, **kwargs: Any) -> None:
    """A run warns of the scale once, and of nothing else."""
    settings = {name: kwargs.pop(name) for name in ("falls", "within") if name in kwargs}
    with pytest.warns(UserWarning) as said:  # what is not matched here is raised again, and is an error
        trainer(LossScaleMonitor(**settings), plugin=plugin(scaler), **kwargs).fit(Scripted(overflows))
    texts = [str(one.message) for one in said if "Loss scale" in str(one.message)]
    assert len(texts) == 1, texts
    assert texts[0].startswith(f"LossScaleMonitor: {match}"), texts[0]


def silent(scaler: GradScaler, overflows: Collection[int], plugin: Any = lowbit, **kwargs: Any) -> None:
    """A run warns of nothing: warnings are errors."""
    settings = {name: kwargs.pop(name) for name in ("falls", "within") if name in kwargs}
    trainer(LossScaleMonitor(**settings), plugin=plugin(scaler), **kwargs).fit(Scripted(overflows))


FALLS: dict[str, Any] = {"falls": 3, "within": 6}
BOUNDS: dict[str, Any] = {"falls": 3, "within": 4}


@pytest.mark.parametrize("make", [conservative, torchs])
@pytest.mark.parametrize("plugin", [lowbit, mixed])
def test_too_many_falls(make: Any, plugin: Any) -> None:
    """Three in the steps 2 to 7, which are six; and, a step later, not."""
    warned(
        "Loss scale, step 7: 3 overflows came within 6 optimizer steps, where one now and then is usual; it is "
        "now 128. Look for what grows: a learning rate too high or a warm-up too short, data or activations with "
        "outliers. Clipping comes too late for that. Where the device has bf16, compute_dtype='bf16' needs no scale.",
        make(growth_interval=100),
        {1, 4, 6},
        plugin,
        **FALLS,
    )
    silent(make(growth_interval=100), {1, 4, 7}, plugin, **FALLS)


@pytest.mark.parametrize("every", [5, 50])
def test_too_many_falls_between_two_logged_steps(every: int) -> None:
    """What falls where nobody looks is told of when somebody does, also where single falls come after it."""
    at = {5: 10, 50: 20}[every]  # the first logged step after them, or the last one
    for later in (set(), {18}):
        scale = 128 / 2 ** (len(later) if at == 20 else 0)
        match = f"Loss scale, step {at}: 3 overflows came within 6 optimizer steps, where one now and then is "
        match += f"usual; it is now {scale:g}."
        options = {**FALLS, "log_every_n_steps": every, "max_steps": 20}
        warned(match, conservative(growth_interval=100), {1, 4, 6} | later, **options)
    silent(conservative(growth_interval=100), {1, 4, 7, 18}, **options)


def test_too_many_falls_are_said_once() -> None:
    warned("Loss scale, step 4: 3 overflows", conservative(), {1, 2, 3, 4, 20, 21, 22}, max_steps=24, **FALLS)


def test_falls_that_are_too_many_at_the_end() -> None:
    warned("Loss scale, step 8: 3 overflows", conservative(), {5, 6, 7}, **FALLS)


def test_one_fall_may_be_too_many() -> None:
    warned("Loss scale, step 3: 1 overflows", conservative(), {2}, falls=1, within=1)


@pytest.mark.parametrize("plugin", [lowbit, mixed])
def test_overflows_that_are_tolerated_are_no_falls(plugin: Any) -> None:
    silent(conservative(hysteresis=3), {1, 2, 3}, plugin, falls=2)
    warned("Loss scale, step 5: 2 overflows", conservative(hysteresis=3), {1, 2, 3, 4}, plugin, falls=2)


def test_at_its_floor_overflows_count() -> None:
    """It leaves the floor in between, so that there is no warning of that."""
    floor = {"init_scale": 4, "floor": 4, "growth_interval": 2, "cooldown": 0}
    warned("Loss scale, step 7: 3 overflows came within 6 optimizer steps", conservative(**floor), {1, 4, 6}, **FALLS)
    silent(conservative(**floor), {1, 4, 7}, **FALLS)


@pytest.mark.parametrize("plugin", [lowbit, mixed])
def test_of_a_static_scale_overflows_count(plugin: Any) -> None:
    match = "Loss scale, step 7: 3 overflows came within 6 optimizer steps"
    warned(match, StaticGradScaler(8, device="cpu"), {1, 4, 6}, plugin, **FALLS)


@pytest.mark.parametrize("plugin", [lowbit, mixed])
def test_a_static_scale_is_at_no_bound(plugin: Any) -> None:
    silent(StaticGradScaler(1, device="cpu"), {1}, plugin, falls=3, within=3)


AT_FLOOR = "it has been at its floor of {:g} for 4 optimizer steps: gradients leave the range of fp16 by themselves."


@pytest.mark.parametrize(
    ("make", "floor"),
    [
        (lambda: conservative(init_scale=16, floor=8, growth_interval=100), 8),
        (lambda: torchs(init_scale=2.0, growth_interval=100), 1),
        (lambda: torchs(init_scale=1.0, growth_interval=100), 1),  # falls below 1, where it has no floor
    ],
)
def test_the_floor(make: Callable[[], GradScaler], floor: float) -> None:
    advice = " The model needs the range of float32: train it with compute_dtype='bf16' or 'fp32'; or lower"
    first = 2 if make().get_scale() > floor else 1  # the first step at the floor
    at = first + BOUNDS["within"] - 1
    warned(f"Loss scale, step {at}: " + AT_FLOOR.format(floor) + advice, make(), {1}, **BOUNDS)
    silent(make(), {1}, **BOUNDS, max_steps=at - 1)


def test_a_scale_that_leaves_its_floor_again() -> None:
    def make() -> GradScaler:
        return conservative(init_scale=1, growth_interval=2, growth_factor=2.0, cooldown=0)

    scales = Scripted({2, 5, 8})
    trainer(LossScaleMonitor(), plugin=lowbit(make()), max_steps=10).fit(scales)
    assert [one["scale"] for one in scales.seen] == [1, 2, 1, 1, 2, 1, 1, 2, 1, 1]
    silent(make(), {2, 5, 8}, falls=3, within=3, max_steps=10)


def test_the_cap() -> None:
    def make() -> GradScaler:
        return conservative(init_scale=32, cap=64, growth_interval=2)

    match = "Loss scale, step 7: it has been at its cap of 64 for 4 optimizer steps, and nothing overflows. If "
    match += "gradients are that small, raise the cap; if they are 0, look for what does not depend on the parameters."
    warned(match, make(), (), **BOUNDS)  # 48 in the second step, 64 in the fourth
    silent(make(), (), **BOUNDS, max_steps=6)
    leaves = conservative(init_scale=64, cap=64, growth_interval=2, growth_factor=2.0, cooldown=0)
    silent(leaves, {2, 5, 8}, **BOUNDS, max_steps=10)  # at its cap in the steps 1, 2, 5 and 8


def test_torchs_own_scale_has_no_cap() -> None:
    silent(torchs(init_scale=2.0, growth_interval=1), (), **BOUNDS)


# --- state ------------------------------------------------------------------------------------------------------------

# An epoch is a step: Lightning resumes with the next epoch.
SHORT: dict[str, Any] = {"limit_train_batches": 1, "log_every_n_steps": 3}


@plugins
def test_a_resumed_run_is_the_uninterrupted_one(plugin: Callable[[], Any]) -> None:
    """Also where it stops between two logged steps, with an overflow since the last."""
    curves = []
    for name, steps, resumed in (("whole", 12, None), ("half", 5, None), ("rest", 12, "half.ckpt")):
        monitor = LossScaleMonitor(falls=20)
        run = trainer(monitor, plugin=plugin(), max_steps=steps, logger=TensorBoardLogger(name), **SHORT)
        torch.manual_seed(0)
        run.fit(Scripted({1, 4, 6}), ckpt_path=resumed, weights_only=True)
        run.save_checkpoint(f"{name}.ckpt")
        curves.append(logged(run))
    whole, half, rest = curves
    assert sorted(whole) == [2, 5, 8, 11]
    assert whole == half | rest
    states = [torch.load(f"{name}.ckpt", weights_only=True)["callbacks"] for name in ("whole", "rest")]
    (one,), (other,) = [[state for key, state in found.items() if "LossScaleMonitor" in key] for found in states]
    assert one == other


def test_a_resumed_run_does_not_repeat_what_was_said() -> None:
    scaler = {"init_scale": 8.0, "floor": 4.0, "growth_interval": 100}
    with pytest.warns(UserWarning, match="Loss scale") as said:
        monitor = LossScaleMonitor(falls=3, within=4)
        run = trainer(monitor, plugin=lowbit(conservative(**scaler)), max_steps=4, **SHORT)
        run.fit(Scripted({0, 2, 3}))
        run.save_checkpoint("half.ckpt")
    texts = [str(one.message) for one in said if "Loss scale" in str(one.message)]
    assert len(texts) == 2, f"falls, and the floor, which was reached in the first step: {texts}"
    resumed = LossScaleMonitor(falls=3, within=4)
    again = trainer(resumed, plugin=lowbit(conservative(**scaler)), max_steps=9, **SHORT)
    again.fit(Scripted({4, 5, 6}), ckpt_path="half.ckpt", weights_only=True)
    (counts,) = reported(resumed, again)
    assert counts.startswith("6 of 9 optimizer steps were skipped")
    assert resumed.report_alerts(again) == [text.removeprefix("LossScaleMonitor: ") for text in texts], (
        "not what was said before it"
    )


@pytest.mark.parametrize(("before", "after"), [(3, 3), (2, 3), (5, 3), (3, 4)])
def test_falls_before_the_checkpoint_count(before: int, after: int) -> None:
    """Also with another number of them, of which as many are known as were looked at."""
    run = trainer(LossScaleMonitor(before), max_steps=5, **SHORT)
    run.fit(Scripted({4} if before == 2 else {3, 4}))
    run.save_checkpoint("half.ckpt")
    later = {5, 6, 7, 8} if before == 2 or after == 4 else {5}
    with pytest.warns(UserWarning, match=f"step 9: {after} overflows came within 100 optimizer steps"):
        resumed = trainer(LossScaleMonitor(after), max_steps=9, **{**SHORT, "log_every_n_steps": 9})
        resumed.fit(Scripted(later), ckpt_path="half.ckpt", weights_only=True)


def test_what_was_not_said_before_the_checkpoint_is_said_after_it() -> None:
    class Save(Callback):
        def on_train_batch_end(self, run: Trainer, *_: Any) -> None:
            if run.global_step == 4:
                run.save_checkpoint("half.ckpt")

    run = trainer(LossScaleMonitor(3, 3), Save(), max_steps=4, limit_train_batches=1)
    with pytest.warns(UserWarning, match="step 4: 3 overflows came within 3"):
        run.fit(Scripted({1, 2, 3}))
    with pytest.warns(UserWarning, match="step 5: 3 overflows came within 3"):
        again = trainer(LossScaleMonitor(3, 3), max_steps=8, limit_train_batches=1)
        again.fit(Scripted(), ckpt_path="half.ckpt", weights_only=True)


def test_another_run_begins_anew() -> None:
    monitor = LossScaleMonitor(**FALLS)
    for _ in range(2):
        run = trainer(monitor, logger=TensorBoardLogger("."))
        model = Scripted({1, 2, 3})
        with pytest.warns(UserWarning, match="Loss scale, step 4: 3 overflows"):
            run.fit(model)
        assert logged(run) == expected(model.seen, 1)
    assert reported(monitor, run)[0].startswith("3 of 8 optimizer steps")


def test_the_same_trainer_goes_on() -> None:
    monitor = LossScaleMonitor(**FALLS)
    run, model = trainer(monitor, max_steps=4, limit_train_batches=4), Scripted({1, 2, 3, 5, 6, 7})
    with pytest.warns(UserWarning, match="Loss scale, step 4: 3 overflows"):
        run.fit(model)
    run.fit_loop.epoch_loop.max_steps = 8
    run.fit(model)
    assert reported(monitor, run)[0].startswith("6 of 8 optimizer steps")


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        (lambda: [LowBitPrecision("bf16")], "LowBitPrecision with precision 'bf16-mixed' has none"),
        (lambda: [MixedPrecision("bf16-mixed", "cpu")], "MixedPrecision with precision 'bf16-mixed' has none"),
        (lambda: [mixed(GradScaler("cpu", enabled=False))], "MixedPrecision with precision '16-mixed' has none"),
        (list, "Precision with precision '32-true' has none"),
    ],
)
def test_without_a_scaler(plugin: Callable[[], list[Any]], message: str) -> None:
    advice = "compute_dtype='fp16'.* or leave out the callback"
    with pytest.raises(MisconfigurationException, match=f"{message}.* {advice}"):
        trainer(LossScaleMonitor(), plugins=plugin()).fit(Scripted())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"falls": 0}, "falls is how often the scale falls before a warning, 1 or more; got 0"),
        ({"falls": -1}, "1 or more; got -1"),
        ({"falls": 2.0}, "1 or more; got 2.0"),
        ({"falls": True}, "1 or more; got True"),
        ({"falls": "5"}, "1 or more; got '5'"),
        ({"within": 4}, "within is a number of optimizer steps, no fewer than falls, 5 or more; got 4"),
        ({"falls": 200}, "no fewer than falls, 200 or more; got 100"),
        ({"within": 100.0}, "or more; got 100.0"),
        ({"within": math.inf}, "or more; got inf"),
        ({"within": None}, "or more; got None"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LossScaleMonitor(**arguments)


# --- the report -------------------------------------------------------------------------------------------------------


def test_reported() -> None:
    with pytest.warns(UserWarning, match="Loss scale"):
        trainer(RunReport(), LossScaleMonitor(**FALLS)).fit(Scripted({1, 2, 3, 6}))
    page = Path("report.html").read_text()
    assert "Loss scale" in page
    assert "4 of 8 optimizer steps were skipped" in page
    assert "3 overflows came within 6 optimizer steps" in page


@pytest.mark.parametrize("at", [0, 3])
def test_reported_after_an_exception(at: int) -> None:
    class Breaks(Scripted):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            if batch_idx == at:
                raise KeyError("broken")
            return super().training_step(batch, batch_idx)

    with pytest.raises(KeyError, match="broken"):
        trainer(RunReport(), LossScaleMonitor()).fit(Breaks({1}))
    page = Path("report.html").read_text()
    assert "Loss scale" in page
    if at:
        assert "1 of 3 optimizer steps were skipped" in page
        assert "The loss scale ended at 512." in page
    else:
        assert "ended at 0" not in page, "it never was 0"
        assert "No optimizer step was taken" in page


def test_nothing_warns_in_a_healthy_run() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", "The '.*_dataloader' does not have many workers")
        trainer(LossScaleMonitor(falls=1, within=1), max_steps=20).fit(Scripted())
