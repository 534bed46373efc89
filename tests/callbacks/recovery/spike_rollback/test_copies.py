"""What holds copies of weights goes back with them: averages, teachers, windows of other callbacks."""

import math
import warnings
from copy import deepcopy
from itertools import product

import pytest
import torch
from torch import Tensor

from lightning_lowbit import CrashSafeCheckpoint, FP4Precision, FP8Precision, OsciReset
from tests.callbacks.recovery.spike_rollback.runs import BAD, KEPT, Scripted, assert_same, fit, rollback, steps, trainer
from tests.lightning_imports import Callback, MisconfigurationException, pytorch
from tests.tables import each

EMA, WeightAveraging = pytorch.callbacks.EMAWeightAveraging, pytorch.callbacks.WeightAveraging


class Shadow(Callback):
    """An average of one's own: tensors in a dict or list, or a module that a list holds."""

    def __init__(self, kind):
        self.kind, self.shadow = kind, None

    def on_train_start(self, trainer, pl_module):
        tensors = {name: parameter.detach().clone() for name, parameter in pl_module.named_parameters()}
        body = [deepcopy(pl_module.body)]
        self.shadow = {"dict": tensors, "list": [*tensors.values()], "module": body, "tuple": tuple(body)}[self.kind]

    def tensors(self):
        if isinstance(self.shadow, dict):
            return [*self.shadow.values()]
        return [*self.shadow] if isinstance(self.shadow[0], Tensor) else [*self.shadow[0].parameters()]

    @torch.no_grad()
    def on_train_batch_end(self, trainer, pl_module, *_):
        for average, parameter in zip(self.tensors(), pl_module.parameters(), strict=True):
            average.lerp_(parameter, 0.5)

    def on_train_end(self, trainer, pl_module):
        pl_module.load_state_dict(
            dict(zip(dict(pl_module.named_parameters()), self.tensors(), strict=False)), strict=False
        )


AVERAGES = {
    "EMA": lambda: EMA(decay=0.9),
    "EMA, sparse": lambda: EMA(decay=0.9, update_every_n_steps=2, update_starting_at_step=6, use_buffers=False),
    "mean": WeightAveraging,
    **{f"one's own, {kind}": lambda kind=kind: Shadow(kind) for kind in ("dict", "list", "module", "tuple")},
}


def run(numbers, *callbacks, bad="", plugin=None, **kwargs):
    model = Scripted(numbers, {BAD: bad} if bad else None, "AdamW")
    return fit(model, *callbacks, plugin=plugin, **kwargs)


# The steps that an average with a rhythm takes differ once steps are left out.
RHYTHM = "EMA, sparse"


@each("average, kind, first, plugin", [
    *product(AVERAGES.keys() - {RHYTHM}, ["nan"], [True, False], [None]),
    *product(["EMA", "mean"], ["spike"], [True, False], [None]),
    ("EMA", "nan", True, lambda: FP8Precision("current", compute_dtype="fp32")),
    ("EMA", "spike", False, lambda: FP8Precision("delayed", compute_dtype="fp32")),
])  # fmt: skip
def test_averages_go_back(average, kind, first, plugin):
    """The run ends with the average of the run without these batches, whichever callback comes first."""
    callback = rollback()
    callbacks = [callback, AVERAGES[average]()] if first else [AVERAGES[average](), callback]
    with pytest.warns(UserWarning, match="SpikeRollback: .* with the weights of step 8") as warned:
        model = run(range(20), *callbacks, bad=kind, plugin=plugin and plugin())
    assert "Not restored" not in str(warned[-1].message)
    kept = [*range(8), *range(int(steps(callback)[0][0]), 20)]
    clean = run(kept, AVERAGES[average](), plugin=plugin and plugin())
    assert_same(model.end[0], clean.end[0], "not the average of the run without these batches")


def test_an_average_that_begins_late_holds_no_undone_weights():
    with pytest.warns(UserWarning, match="SpikeRollback"):
        model = run(range(20), rollback(), AVERAGES[RHYTHM](), bad="nan")
    assert all(value.isfinite().all() for value in model.end[0].values())


def test_other_averages_are_refused_or_named():
    with pytest.raises(MisconfigurationException, match="StochasticWeightAveraging.*Use WeightAveraging"):
        run(range(20), rollback(), pytorch.callbacks.StochasticWeightAveraging(1e-2))

    class Late(Shadow):
        def on_train_start(self, trainer, pl_module): ...

        def on_train_batch_end(self, trainer, pl_module, *_):
            if trainer.global_step == BAD:
                super().on_train_start(trainer, pl_module)

        def on_train_end(self, trainer, pl_module): ...

    with pytest.warns(UserWarning, match=r"Not restored: Late.shadow, which step 8 did not have"):
        run(range(20), rollback(), Late("dict"), bad="nan")


@each("where", ["submodule", "list", "dict"])
def test_a_teacher_of_the_module_goes_back(where):
    """A teacher that follows the model, as a submodule and in plain attributes."""

    class Taught(Scripted):
        def __init__(self, *args):
            super().__init__(*args)
            teacher = deepcopy(self.body).requires_grad_(False)
            if where == "submodule":
                self.teacher = teacher
            else:
                self.hidden = [teacher] if where == "list" else {"teacher": teacher}

        def of_teacher(self):
            if where == "submodule":
                return self.teacher
            return self.hidden[0 if where == "list" else "teacher"]

        @torch.no_grad()
        def on_train_batch_end(self, *_):
            for average, parameter in zip(self.of_teacher().parameters(), self.body.parameters(), strict=True):
                average.lerp_(parameter, 0.5)

    with pytest.warns(UserWarning, match="SpikeRollback"):
        model = fit(Taught(range(20), {BAD: "nan"}), rollback())
    clean = fit(Taught(KEPT))
    assert_same(model.of_teacher().state_dict(), clean.of_teacher().state_dict(), "the teacher kept undone weights")


def test_a_run_resumed_after_a_rollback_has_the_same_average(tmp_path):
    """A checkpoint with an average keeps the model's own weights beside it."""

    def callbacks():
        return [rollback(), EMA(decay=0.9), CrashSafeCheckpoint(tmp_path, every_n_train_steps=15, save_top_k=-1)]

    with pytest.warns(UserWarning, match="weights of step 8"):
        whole = run(range(20), *callbacks(), bad="nan", enable_checkpointing=True)
    model = Scripted(range(20), {BAD: "nan"}, "AdamW")
    (path,) = tmp_path.glob("*.ckpt")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch")
        warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")
        trainer(*callbacks(), enable_checkpointing=True).fit(model, ckpt_path=path)
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
    with pytest.warns(UserWarning, match="SpikeRollback"):
        model = fit(Scripted(range(40), {BAD: "nan"}, "AdamW"), rollback(), Watched(window=10, every=10), plugin=plugin)
    assert seen == [1, (0, None)]
    assert all(math.isfinite(loss) for loss in model.losses[13:])
