"""Crashes at each moment of a save, what is refused, and what else writes checkpoints."""

import errno
import json
import os
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightning_lowbit import CrashSafeCheckpoint
from lightning_lowbit.callbacks.recovery.crash_safe_checkpoint import save_checkpoint
from tests.callbacks.recovery.crash_in_save import KILLED, SAVED
from tests.launch import start, wait
from tests.lightning_imports import (
    AsyncCheckpointIO,
    BoringModel,
    Callback,
    MisconfigurationException,
    ModelCheckpoint,
    TorchCheckpointIO,
    quiet_trainer,
)
from tests.pairwise import selected

OURS = ("a file", "a directory", "a linked directory", "a linked directory, resumed")
PLAIN = ("Lightning's file", "Lightning's directory")


@pytest.fixture(scope="module")
def crashes(request, tmp_path_factory):
    """Of each case, what each moment has led to."""
    folder = tmp_path_factory.mktemp("crashes")
    wanted = selected(request, "case")
    wanted += ["a directory"] * ("Lightning's directory" in wanted)  # which it is held against
    longest_first = [case for case in (*OURS[1:], OURS[0], *PLAIN) if case in wanted]
    together = [cases for cases in (longest_first[::2], longest_first[1::2]) if cases]
    logs = [folder / f"{number}.log" for number in range(len(together))]
    codes = wait(
        [
            start(log, "tests.callbacks.recovery.crash_in_save", str(folder), *cases)
            for log, cases in zip(logs, together, strict=True)
        ]
    )
    told = "\n".join(log.read_text()[-3000:] for log in logs)
    assert codes == [0] * len(together), told
    return {case: json.loads((folder / f"{case}.json").read_text()) for cases in together for case in cases}


@pytest.mark.slow
@pytest.mark.parametrize("case", OURS)
def test_a_crash_at_any_moment_leaves_a_whole_checkpoint(crashes, case):
    moments = crashes[case]
    assert len(moments) >= 5, "nothing was killed"
    for number, moment in enumerate(moments):
        place = f"moment {number}, before {moment['before']}, with {moment['names']}"
        assert moment["code"] == 0, f"no run goes on: {place}"
        assert moment["step"] in (SAVED, KILLED), f"it began at {moment['step']}: {place}"
        same = next(other for other in moments if other["step"] == moment["step"])
        assert moment["start"] == same["start"], f"other weights than of step {moment['step']}: {place}"
        assert moment["end"] == moments[0]["end"], f"another end than without the crash: {place}"
        assert all(name.endswith(".ckpt") for name in moment["left"]), f"it left {moment['left']}: {place}"
    steps = [moment["step"] for moment in moments]
    assert steps[0] == SAVED and steps == sorted(steps), "a later crash lost more"
    names = {name for moment in moments for name in moment["names"]}
    assert any(name.endswith(".partial") for name in names), "no crash was in the midst of a save"


@pytest.mark.parametrize("case", ["a directory"])
@pytest.mark.slow
def test_steps_have_weights_of_their_own(crashes, case):
    """Or else the above would not notice a mixture."""
    starts = {moment["step"]: moment["start"] for moment in crashes[case]}
    assert starts[SAVED] != starts[KILLED]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["Lightning's file"])
def test_lightning_loses_a_file_that_comes_from_another_file_system(crashes, case):
    broken = [moment for moment in crashes[case] if moment["code"] != 0]
    assert [moment["before"].split()[0] for moment in broken] == ["half"]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["Lightning's directory"])
def test_lightning_mixes_the_shards_of_two_steps(crashes, case):
    moments = crashes[case]
    whole = {moment["step"]: moment["start"] for moment in crashes["a directory"]}
    assert any(moment["code"] != 0 for moment in moments), "what is left of one cannot be loaded"
    mixed = [moment for moment in moments if moment["code"] == 0 and moment["start"] != whole[moment["step"]]]
    assert mixed and all(moment["step"] == SAVED and moment["start"] == whole[KILLED] for moment in mixed)


# --- in one process ---


def fit(*callbacks, model=None, ckpt_path=None, max_steps=2, **kwargs):
    defaults = {"limit_val_batches": 0, "enable_checkpointing": True}
    trainer = quiet_trainer(max_steps=max_steps, callbacks=list(callbacks), **{**defaults, **kwargs})
    trainer.fit(model or BoringModel(), ckpt_path=ckpt_path)
    return trainer


class Manual(BoringModel):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx)["loss"])
        self.optimizers().step()


def test_manual_optimization_saves_the_weights_after_the_step():
    fit(CrashSafeCheckpoint("here", every_n_train_steps=2), model=(model := Manual()))
    saved = torch.load("here/epoch=0-step=2.ckpt", weights_only=True)
    assert torch.equal(saved["state_dict"]["layer.weight"], model.layer.weight)


@pytest.mark.parametrize("kind", [BoringModel, Manual])
def test_a_warning_of_the_model_is_shown_once(kind):
    class Warns(kind):
        def training_step(self, batch, batch_idx):
            warnings.warn("told", stacklevel=1)
            return super().training_step(batch, batch_idx)

    with warnings.catch_warnings(record=True) as shown:
        warnings.filterwarnings("default", "told")
        fit(CrashSafeCheckpoint("here", every_n_train_steps=1), model=Warns(), max_steps=4)
    assert [str(warning.message) for warning in shown] == ["told"]


def test_remote_folders_are_refused():
    with pytest.raises(MisconfigurationException, match="memory://there.*ModelCheckpoint"):
        fit(CrashSafeCheckpoint("memory://there"))


def test_writing_in_the_background_is_refused():
    with pytest.raises(MisconfigurationException, match="AsyncCheckpointIO"):
        fit(CrashSafeCheckpoint("here"), plugins=[AsyncCheckpointIO()])


def test_a_remote_checkpoint_is_written_as_it_is():
    trainer = fit(enable_checkpointing=False)
    save_checkpoint(trainer, "memory://there/interrupted.ckpt")
    from fsspec.implementations.memory import MemoryFileSystem

    assert [name.rsplit("/", 1)[-1] for name in MemoryFileSystem.store if "there" in name] == ["interrupted.ckpt"]


def test_a_checkpoint_that_is_written_in_the_background_has_its_name_at_once():
    trainer = fit(enable_checkpointing=False, plugins=[AsyncCheckpointIO()])
    save_checkpoint(trainer, "interrupted.ckpt")
    trainer.strategy.checkpoint_io.teardown()  # waits for it
    assert os.listdir() == ["interrupted.ckpt"]


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.parametrize("kinds", [(ModelCheckpoint, CrashSafeCheckpoint), (CrashSafeCheckpoint, ModelCheckpoint)])
def test_takes_the_state_of_lightnings_and_the_other_way_round(kinds):
    first, second = (kind("here", every_n_train_steps=1, save_last=True, save_top_k=1) for kind in kinds)
    fit(first)
    fit(second, ckpt_path="here/last.ckpt", max_steps=3)
    assert sorted(path.name for path in Path("here").iterdir()) == ["epoch=0-step=3.ckpt", "last.ckpt"]


def test_loggers_are_told_of_whole_checkpoints():
    from tests.lightning_imports import CSVLogger

    told = []

    class Logger(CSVLogger):
        def after_save_checkpoint(self, checkpoint_callback):
            told.append(Path(checkpoint_callback.best_model_path).exists())

    trainer = quiet_trainer(
        max_steps=2,
        limit_val_batches=0,
        callbacks=[CrashSafeCheckpoint("here", every_n_train_steps=1)],
        logger=Logger("."),
        enable_checkpointing=True,
    )
    trainer.fit(BoringModel())
    assert told == [True, True]


def test_interrupted_checkpoints_are_loadable_torch_files():
    trainer = fit(enable_checkpointing=False)
    for _ in range(2):
        save_checkpoint(trainer, "interrupted.ckpt")
    assert torch.load("interrupted.ckpt", weights_only=True)["global_step"] == 2
    assert os.listdir() == ["interrupted.ckpt"]


@pytest.mark.parametrize("is_first, error", [(True, OSError), (False, RuntimeError)])
def test_what_the_first_rank_cannot_do_ends_all(is_first, error):
    Path("file").touch()
    told = None, "NotADirectoryError('Not a directory')"  # as another process has it from the first one
    strategy = SimpleNamespace(broadcast=lambda own: own if is_first else told, checkpoint_io=None)
    trainer = SimpleNamespace(strategy=strategy, is_global_zero=is_first)
    with pytest.raises(error, match="Not a directory|File exists"):
        save_checkpoint(trainer, "file/last.ckpt")


def names():
    return {str(path) for path in Path().rglob("*") if path.is_file()}


class OwnIO(TorchCheckpointIO):
    """Writes half of the second checkpoint to a full disk, and notes what it is to remove."""

    def __init__(self, full):
        self.full, self.saves, self.removed = full, 0, []

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        self.saves += 1
        if self.full and self.saves == 2:
            Path(path).write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        super().save_checkpoint(checkpoint, path, storage_options)

    def remove_checkpoint(self, path):
        self.removed.append(Path(path).name.split(".ckpt")[0])
        super().remove_checkpoint(path)


def test_a_full_disk_leaves_nothing_that_is_not_whole(tmp_path):
    with pytest.raises(OSError, match="No space left"):
        fit(CrashSafeCheckpoint(tmp_path, every_n_train_steps=1, filename="{step}"), plugins=[OwnIO(full=True)])
    assert names() == {"step=1.ckpt"}


def test_a_plugin_that_writes_checkpoints_removes_them_too(tmp_path):
    io = OwnIO(full=False)
    fit(CrashSafeCheckpoint(tmp_path, every_n_train_steps=1, filename="{step}"), plugins=[io])
    assert io.removed == ["step=1"] and names() == {"step=2.ckpt"}


class Validated(Callback):
    """Notes where it is validated, and dies there at a step."""

    def __init__(self, dies=None):
        self.dies, self.steps = dies, []

    def on_validation_epoch_end(self, trainer, pl_module):
        self.steps.append(trainer.global_step)
        if trainer.global_step == self.dies:
            raise RuntimeError("killed")


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_a_run_that_dies_in_a_validation_repeats_it():
    def run(validated, **kwargs):
        every = {"limit_val_batches": 1, "val_check_interval": 2, "num_sanity_val_steps": 0, "max_steps": 6}
        fit(CrashSafeCheckpoint("here", every_n_train_steps=1, save_last=True), validated, **every, **kwargs)
        return validated.steps

    with pytest.raises(RuntimeError, match="killed"):
        run(Validated(dies=4))
    assert torch.load("here/last.ckpt", weights_only=True)["global_step"] == 3
    assert run(Validated(), ckpt_path="last") == [4, 6]
    assert torch.load("here/last.ckpt", weights_only=True)["global_step"] == 6
