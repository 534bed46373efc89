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
from tests.callbacks.recovery.crash_in_save import CASES, KILLED, SAVED
from tests.launch import start, wait
from tests.lightning_imports import (
    AsyncCheckpointIO,
    BoringModel,
    Callback,
    CSVLogger,
    MisconfigurationException,
    ModelCheckpoint,
    TorchCheckpointIO,
    quiet_trainer,
)
from tests.pairwise import selected

pytestmark = [
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]


@pytest.fixture(scope="module")
def crashes(request, tmp_path_factory):
    """Of each case, what each moment has led to."""
    folder, cases = tmp_path_factory.mktemp("crashes"), selected(request, "case")
    together = [names for names in (cases[::2], cases[1::2]) if names]
    logs = [folder / f"{number}.log" for number in range(len(together))]
    processes = [
        start(log, "tests.callbacks.recovery.crash_in_save", str(folder), *names)
        for log, names in zip(logs, together, strict=True)
    ]
    codes = wait(processes)
    assert codes == [0] * len(together), "\n".join(log.read_text()[-3000:] for log in logs)
    return {case: json.loads((folder / f"{case}.json").read_text()) for case in cases}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_crash_at_any_moment_leaves_a_whole_checkpoint(crashes, case):
    moments = crashes[case]
    assert len(moments) >= 5, "nothing was killed"
    starts = {moment["step"]: moment["start"] for moment in reversed(moments) if moment["code"] == 0}
    for number, moment in enumerate(moments):
        place = f"moment {number}, before {moment['before']}, with {moment['names']}"
        assert moment["code"] == 0, f"no run goes on: {place}"
        assert moment["step"] in (SAVED, KILLED), f"it began at {moment['step']}: {place}"
        assert moment["start"] == starts[moment["step"]], f"other weights than of step {moment['step']}: {place}"
        assert moment["end"] == moments[0]["end"], f"another end than without the crash: {place}"
        assert all(name.endswith(".ckpt") for name in moment["left"]), f"it left {moment['left']}: {place}"
    assert KILLED not in starts or starts[SAVED] != starts[KILLED], "a mixture of steps would not be noticed"
    steps = [moment["step"] for moment in moments]
    assert steps[0] == SAVED and steps == sorted(steps), "a later crash lost more"
    names = {name for moment in moments for name in moment["names"]}
    assert any(name.endswith(".partial") for name in names), "no crash was in the midst of a save"


# --- in one process ---


def fit(*callbacks, model=None, ckpt_path=None, max_steps=2, **kwargs):
    defaults = {"limit_val_batches": 0, "enable_checkpointing": True}
    trainer = quiet_trainer(max_steps=max_steps, callbacks=list(callbacks), **{**defaults, **kwargs})
    trainer.fit(model or BoringModel(), ckpt_path=ckpt_path)
    return trainer


def test_a_dry_run_saves_nothing(tmp_path):
    fit(CrashSafeCheckpoint(tmp_path, save_last=True), fast_dev_run=True)
    assert not list(tmp_path.rglob("*.ckpt"))


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


def test_remote_folders_and_writing_in_the_background_are_refused():
    with pytest.raises(MisconfigurationException, match="memory://there.*ModelCheckpoint"):
        fit(CrashSafeCheckpoint("memory://there"))
    with pytest.raises(MisconfigurationException, match="AsyncCheckpointIO"):
        fit(CrashSafeCheckpoint("here"), plugins=[AsyncCheckpointIO()])


def test_a_checkpoint_between_steps_is_a_loadable_file_also_remote_or_written_in_the_background():
    from fsspec.implementations.memory import MemoryFileSystem

    trainer = fit(enable_checkpointing=False, plugins=[AsyncCheckpointIO()])
    save_checkpoint(trainer, "interrupted.ckpt")
    trainer.strategy.checkpoint_io.teardown()  # waits for it
    assert os.listdir() == ["interrupted.ckpt"]
    trainer = fit(enable_checkpointing=False)
    for path in ("interrupted.ckpt", "interrupted.ckpt", "memory://there/interrupted.ckpt"):
        save_checkpoint(trainer, path)
    assert torch.load("interrupted.ckpt", weights_only=True)["global_step"] == 2
    assert os.listdir() == ["interrupted.ckpt"]
    assert [name.rsplit("/", 1)[-1] for name in MemoryFileSystem.store if "there" in name] == ["interrupted.ckpt"]


@pytest.mark.parametrize("kinds", [(ModelCheckpoint, CrashSafeCheckpoint), (CrashSafeCheckpoint, ModelCheckpoint)])
def test_takes_the_state_of_lightnings_and_the_other_way_round(kinds):
    first, second = (kind("here", every_n_train_steps=1, save_last=True, save_top_k=1) for kind in kinds)
    fit(first)
    fit(second, ckpt_path="here/last.ckpt", max_steps=3)
    assert sorted(path.name for path in Path("here").iterdir()) == ["epoch=0-step=3.ckpt", "last.ckpt"]


def test_loggers_are_told_of_whole_checkpoints():
    told = []

    class Logger(CSVLogger):
        def after_save_checkpoint(self, checkpoint_callback):
            told.append(Path(checkpoint_callback.best_model_path).exists())

    fit(CrashSafeCheckpoint("here", every_n_train_steps=1), logger=Logger("."))
    assert told == [True, True]


@pytest.mark.parametrize("is_first, error", [(True, OSError), (False, RuntimeError)])
def test_what_the_first_rank_cannot_do_ends_all(is_first, error):
    Path("file").touch()
    told = None, "NotADirectoryError('Not a directory')"  # as another process has it from the first one
    strategy = SimpleNamespace(broadcast=lambda own: own if is_first else told, checkpoint_io=None)
    trainer = SimpleNamespace(strategy=strategy, is_global_zero=is_first)
    with pytest.raises(error, match="Not a directory|File exists"):
        save_checkpoint(trainer, "file/last.ckpt")


class OwnIO(TorchCheckpointIO):
    """Writes half of a later checkpoint to a full disk, and notes what it is to remove."""

    def __init__(self, full_at):
        self.full_at, self.removed = full_at, []

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        if checkpoint["global_step"] == self.full_at:
            Path(path).write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        super().save_checkpoint(checkpoint, path, storage_options)

    def remove_checkpoint(self, path):
        self.removed.append(Path(path).name.split(".ckpt")[0])
        super().remove_checkpoint(path)


def test_a_plugin_that_writes_checkpoints_removes_them_and_a_full_disk_leaves_nothing_that_is_not_whole(tmp_path):
    io = OwnIO(full_at=3)
    with pytest.raises(OSError, match="No space left"):
        fit(CrashSafeCheckpoint(tmp_path, every_n_train_steps=1, filename="{step}"), plugins=[io], max_steps=3)
    assert io.removed == ["step=1"] and os.listdir(tmp_path) == ["step=2.ckpt"]


class Validated(Callback):
    """Notes where it is validated, and dies there at a step."""

    def __init__(self, dies=None):
        self.dies, self.steps = dies, []

    def on_validation_epoch_end(self, trainer, pl_module):
        self.steps.append(trainer.global_step)
        if trainer.global_step == self.dies:
            raise RuntimeError("killed")


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


class Unvalidated(BoringModel):
    def val_dataloader(self):
        return []


@pytest.mark.filterwarnings("ignore:Total length of")
def test_no_checkpoint_waits_for_a_validation_without_data(tmp_path):
    callbacks = [CrashSafeCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)]
    settings = {"limit_train_batches": 2, "max_epochs": 1, "enable_checkpointing": True}
    quiet_trainer(callbacks=callbacks, **settings).fit(Unvalidated())
    assert {path.name for path in tmp_path.iterdir()} == {"step=1.ckpt", "step=2.ckpt"}
