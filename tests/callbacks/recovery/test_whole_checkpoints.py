"""Checkpoints that are cut off, overwritten, empty or gone, and in which order they are looked at."""

import os
import pickle
import shutil
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from lightning_lowbit import CrashSafeCheckpoint, atomic_files
from lightning_lowbit.callbacks.recovery.whole_checkpoints import FOREIGN, damage, first_whole, newest_first, step_of
from tests.lightning_imports import BoringModel, quiet_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]


def content(step):
    # Lightning's first keys, a value that does not load with weights_only=True, and tensors
    return {"epoch": 0, "global_step": step, "of a user": Path("x"), "state_dict": {"w": torch.randn(64, 64)}}


def save_file(path, step=3):
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content(step), path)
    return path


def save_directory(path, step=3):
    state = {"state_dict": {"w": torch.randn(64, 64), "b": torch.randn(8)}, "number": 3}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as said
        dcp.save(state, checkpoint_id=path, no_dist=True)
    torch.save({"epoch": 0, "global_step": step, "of a user": Path("x")}, path / "meta.pt")
    return path


def flip(path):
    """Changes some bytes of the tensors, of which torch says nothing."""
    whole = bytearray(path.read_bytes())
    middle = len(whole) // 2
    whole[middle : middle + 4] = bytes(255 - byte for byte in whole[middle : middle + 4])
    path.write_bytes(whole)


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


def link_to_nothing(path):
    path.unlink()
    path.symlink_to("gone.ckpt")


DAMAGED_FILES = {
    "cut off": (cut, "is cut off"),
    "empty": (lambda path: os.truncate(path, 0), "is empty"),
    "garbage": (lambda path: path.write_bytes(bytes(range(256)) * 9), FOREIGN),
    "a link to nothing": (link_to_nothing, "is a link to gone.ckpt, which does not exist"),
    "flipped bytes": (flip, "does not match its checksum in"),
}

DAMAGED_DIRECTORIES = {
    "no meta.pt": (lambda path: (path / "meta.pt").unlink(), "lacks meta.pt"),
    "no index": (lambda path: (path / ".metadata").unlink(), "lacks .metadata"),
    "an empty directory": (lambda path: [entry.unlink() for entry in path.iterdir()], "lacks .metadata and meta.pt"),
    "an empty meta.pt": (lambda path: os.truncate(path / "meta.pt", 0), "has a meta.pt that is empty"),
    "half an index": (lambda path: cut(path / ".metadata"), "has a .metadata that cannot be read"),
    "no shard": (lambda path: (path / "__0_0.distcp").unlink(), "lacks __0_0.distcp"),
    "half a shard": (lambda path: cut(path / "__0_0.distcp"), "is cut off in __0_0.distcp"),
    "flipped bytes": (lambda path: flip(path / "__0_0.distcp"), "does not match its checksums in __0_0.distcp"),
}


@pytest.mark.parametrize("make, damages", [(save_file, DAMAGED_FILES), (save_directory, DAMAGED_DIRECTORIES)])
def test_each_damage_has_its_words(make, damages, tmp_path):
    assert damage(make(tmp_path / "whole.ckpt")) is None
    for name, (spoil, words) in damages.items():
        path = make(tmp_path / f"{name}.ckpt")
        spoil(path)
        assert (damage(path) or "").startswith(words), f"{name}: {damage(path)}"


def test_a_whole_file_is_whole_each_time(tmp_path):
    """From Python 3.12 on threads that read entries of one ZipFile disturb each other."""
    path = save_file(tmp_path / "whole.ckpt")
    assert [damage(path) for _ in range(100)] == [None] * 100


def test_a_file_that_others_compressed_is_whole_until_it_is_damaged(tmp_path):
    with (
        zipfile.ZipFile(save_file(tmp_path / "plain.ckpt")) as plain,
        zipfile.ZipFile(path := tmp_path / "compressed.ckpt", "w", zipfile.ZIP_DEFLATED) as compressed,
    ):
        for entry in plain.infolist():
            compressed.writestr(entry.filename, plain.read(entry))
    torch.load(path, weights_only=False)
    assert damage(path) is None
    with zipfile.ZipFile(path) as archive:
        entry = max(archive.infolist(), key=lambda entry: entry.compress_size)
    data = bytearray(path.read_bytes())
    data[entry.header_offset + 30 + len(entry.filename) + entry.compress_size // 2] ^= 0xFF
    path.write_bytes(data)
    assert damage(path) == f"does not match its checksum in {entry.filename}"


def test_what_has_no_checksum_is_not_called_damaged(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        assert damage(save_file(tmp_path / "unchecked.ckpt")) is None
    finally:
        torch.serialization.set_crc32_options(True)
    torch.save(content(3), tmp_path / "old.ckpt", _use_new_zipfile_serialization=False)
    assert damage(tmp_path / "old.ckpt") is None
    (tmp_path / "others.ckpt").mkdir()
    (tmp_path / "others.ckpt" / "mp_rank_00_model_states.pt").touch()
    assert damage(tmp_path / "others.ckpt") is None


def test_the_step_is_that_of_the_content_then_that_of_the_name(tmp_path):
    for step in (0, 255, 70_000, 2**31):
        assert step_of(save_file(tmp_path / "step=5.ckpt", step)) == step
        assert step_of(save_directory(tmp_path / f"{step}.ckpt", step)) == step
    torch.save(content(9), tmp_path / "old.ckpt", _use_new_zipfile_serialization=False)
    assert step_of(tmp_path / "old.ckpt") == 9
    cut(save_file(tmp_path / "cut.ckpt", 7))
    assert step_of(tmp_path / "cut.ckpt") == 7
    for name, step in {"epoch=0-step=12.ckpt": 12, "last.ckpt": float("inf")}.items():
        (tmp_path / name).touch()
        assert step_of(tmp_path / name) == step
    (tmp_path / "weights.ckpt").write_bytes(pickle.dumps({"weight": [1, 2]}))
    assert step_of(tmp_path / "weights.ckpt") == float("inf")


def test_the_newest_is_of_the_last_run_and_the_highest_step_whatever_the_times_say(tmp_path):
    order = [("version_10", 4), ("version_10", 2), ("version_9", 8), ("version_9", 6)]
    paths = [save_file(tmp_path / run / "checkpoints" / f"{step}.ckpt", step) for run, step in order]
    for age, path in enumerate(reversed(paths)):
        os.utime(path, (1e9 - age, 1e9 - age))
    assert newest_first(set(paths)) == paths
    assert newest_first([*paths, tmp_path / "vanished.ckpt"]) == paths
    without_a_run = save_file(tmp_path / "hpc_ckpt_1.ckpt", 3)
    assert newest_first({*paths, without_a_run}).index(without_a_run) == 1


def test_the_first_whole_one_and_what_is_wrong_with_those_before_it(tmp_path):
    paths = [save_file(tmp_path / f"{step}.ckpt", step) for step in (9, 6, 3)]
    cut(paths[0])
    gone = tmp_path / "gone.ckpt"
    assert first_whole([gone, *paths]) == (paths[1], {paths[0]: "is cut off"})
    assert first_whole([]) == (None, {})


# --- the Trainer ---


def fit(folder, steps, ckpt_path=None):
    callback = CrashSafeCheckpoint(folder, every_n_train_steps=2, save_last=True, save_top_k=-1, filename="{step}")
    trainer = quiet_trainer(max_steps=steps, limit_val_batches=0, callbacks=[callback], enable_checkpointing=True)
    trainer.fit(BoringModel(), ckpt_path=ckpt_path)
    return trainer


def test_the_trainer_names_a_damaged_last_checkpoint_and_the_newest_whole_one(tmp_path):
    fit(tmp_path / "run", 6)
    for name, (spoil, words) in DAMAGED_FILES.items():
        folder = tmp_path / name
        shutil.copytree(tmp_path / "run", folder)
        spoil(folder / "last.ckpt")
        cut(folder / "step=6.ckpt")
        with pytest.raises(ValueError) as error:
            fit(folder, 8, "last")
        told = str(error.value)
        assert told.startswith(f"The checkpoint {folder / 'last.ckpt'} is damaged: it {words}"), told
        assert told.endswith(f"{folder / 'step=4.ckpt'} (step 4): take it with ckpt_path='{folder / 'step=4.ckpt'}'.")
    assert fit(tmp_path / "run", 8, "last").global_step == 8


def test_the_trainer_takes_the_last_checkpoint_of_the_highest_step(tmp_path):
    for steps, name in ((4, "last.ckpt"), (2, "last-v1.ckpt")):
        fit(tmp_path / name, steps).save_checkpoint(tmp_path / "run" / name)
    os.utime(tmp_path / "run" / "last.ckpt", (0, 0))
    assert fit(tmp_path / "run", 4, "last").ckpt_path == str(tmp_path / "run" / "last.ckpt")


def test_validation_finds_what_a_crash_took_the_name_of_and_changes_nothing(tmp_path):
    trainer = fit(tmp_path, 2)
    left = tmp_path / f"last.ckpt.{atomic_files._HOST}-1.previous"
    (tmp_path / "last.ckpt").rename(left)
    trainer.validate(BoringModel(), ckpt_path="last", verbose=False)
    assert trainer.ckpt_path == str(left)
    assert left.exists()
