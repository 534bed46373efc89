"""What holds copies of weights goes back with them: averages, teachers, windows of other callbacks."""

import math
from copy import deepcopy
from itertools import product

import pytest
import torch

from lightning_lowbit import CrashSafeCheckpoint, FP4Precision, FP8Precision, OsciReset
from tests.callbacks.recovery.spike_rollback.runs import (
    BAD,
    KEPT,
    RESTORED,
    Scripted,
    assert_same,
    fit,
    rollback,
    rolled_back,
    steps,
)
from tests.lightning_imports import Callback, MisconfigurationException, pytorch
from tests.tables import each

EMA, WeightAveraging = pytorch.callbacks.EMAWeightAveraging, pytorch.callbacks.WeightAveraging


class Shadow(Callback):
    """An average of one's own: tensors in a dict or list, or a module that a list or tuple holds."""

    def __init__(self, kind):
        self.kind, self.shadow, self._tensors = kind, None, None

    def on_train_start(self, trainer, pl_module):
        body = deepcopy(pl_module.body).requires_grad_(False)
        tensors = dict(body.named_parameters())
        self.shadow = {"dict": tensors, "list": [*tensors.values()], "module": [body], "tuple": (body,)}[self.kind]
        self._tensors = body.parameters  # the attribute itself holds none

    @torch.no_grad()
    def on_train_batch_end(self, trainer, pl_module, *_):
        for average, parameter in zip(self._tensors(), pl_module.parameters(), strict=True):
            average.lerp_(parameter, 0.5)

    @torch.no_grad()
    def on_train_end(self, trainer, pl_module):
        for average, parameter in zip(self._tensors(), pl_module.parameters(), strict=True):
            parameter.copy_(average)


AVERAGES = {
    "EMA": lambda: EMA(decay=0.9),
    "EMA, sparse": lambda: EMA(decay=0.9, update_every_n_steps=2, update_starting_at_step=6, use_buffers=False),
    "mean": WeightAveraging,
    **{f"one's own, {kind}": lambda kind=kind: Shadow(kind) for kind in ("dict", "list", "module", "tuple")},
}


def scripted(numbers=range(20), kind="nan"):
    return Scripted(numbers, {BAD: kind}, "AdamW")


# The steps that an average with a rhythm takes differ once steps are left out.
RHYTHM = "EMA, sparse"


@each("average, kind, first, plugin", [
    ("EMA", "spike", False, lambda: FP8Precision("delayed", compute_dtype="fp32")),
    ("EMA", "nan", True, lambda: FP8Precision("current", compute_dtype="fp32")),
    *product([name for name in AVERAGES if name != RHYTHM], ["nan"], [True, False], [lambda: None]),
    *product(["EMA", "mean"], ["spike"], [True, False], [lambda: None]),
], fast=4)  # fmt: skip
def test_averages_go_back(average, kind, first, plugin):
    callback = rollback()
    callbacks = [callback, AVERAGES[average]()] if first else [AVERAGES[average](), callback]
    model = rolled_back(*callbacks, model=scripted(kind=kind), plugin=plugin(), says=RESTORED)
    ((step, _, to),) = steps(callback)
    clean = fit(scripted([*range(8), *range(int(step), 20)]), AVERAGES[average](), plugin=plugin())
    assert to == 8
    assert_same(model.end[0], clean.end[0], "not the average of the run without these batches")


def test_an_average_that_begins_late_holds_no_undone_weights():
    model = rolled_back(rollback(), AVERAGES[RHYTHM](), model=scripted())
    assert all(value.isfinite().all() for value in model.end[0].values())


def test_other_averages_are_refused_or_named():
    with pytest.raises(MisconfigurationException, match="StochasticWeightAveraging.*Use WeightAveraging"):
        fit(scripted(), rollback(), pytorch.callbacks.StochasticWeightAveraging(1e-2))

    class Late(Shadow):
        def on_train_start(self, trainer, pl_module): ...

        def on_train_batch_end(self, trainer, pl_module, *_):
            if trainer.global_step == BAD:
                super().on_train_start(trainer, pl_module)

        def on_train_end(self, trainer, pl_module): ...

    rolled_back(
        rollback(), Late("dict"), model=scripted(), says=r"Not restored: Late.shadow, which step 8 did not have"
    )


@each("hold", [lambda teacher: teacher, lambda teacher: [teacher], lambda teacher: {"teacher": teacher}], fast=1)
def test_a_teacher_of_the_module_goes_back(hold):
    class Taught(Scripted):
        def __init__(self, *args):
            super().__init__(*args)
            teacher = deepcopy(self.body).requires_grad_(False)
            self.teacher, self.of_teacher = hold(teacher), teacher.parameters

        @torch.no_grad()
        def on_train_batch_end(self, *_):
            for average, parameter in zip(self.of_teacher(), self.body.parameters(), strict=True):
                average.lerp_(parameter, 0.5)

    model = rolled_back(rollback(), model=Taught(range(20), {BAD: "nan"}))
    clean = fit(Taught(KEPT))
    assert_same([*model.of_teacher()], [*clean.of_teacher()], "the teacher kept undone weights")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_a_run_resumed_after_a_rollback_has_the_same_average(tmp_path):
    """A checkpoint with an average keeps the model's own weights beside it."""

    def callbacks():
        return [rollback(), EMA(decay=0.9), CrashSafeCheckpoint(tmp_path, every_n_train_steps=15, save_top_k=-1)]

    whole = rolled_back(*callbacks(), model=scripted(), enable_checkpointing=True)
    (path,) = tmp_path.glob("*.ckpt")
    model = fit(scripted(), *callbacks(), ckpt_path=path, enable_checkpointing=True)
    assert len(model.losses) == 5 and all(value.isfinite().all() for value in whole.end[0].values())
    assert_same(model.end[0], whole.end[0], "the resumed run ends elsewhere")


def test_going_back_is_no_movement_of_a_step():
    """A window of OsciReset that is open ends; the next one begins as if there had been none."""
    seen = []

    class Watched(OsciReset):
        def on_rollback(self, *args):
            seen.append(len(self._paths))
            super().on_rollback(*args)
            seen.append((len(self._paths), self._end))

    plugin = FP4Precision("nvfp4", compute_dtype="fp32", skip=["body.3"])
    model = rolled_back(rollback(), Watched(window=10, every=10), model=scripted(range(40)), plugin=plugin)
    assert seen == [1, (0, None)]
    assert all(math.isfinite(loss) for loss in model.losses[13:])
