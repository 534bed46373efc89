"""Which checkpoint ``--ckpt_path last`` and ``last-good`` take, what they remove, and what they say of damaged ones."""

import os
import re
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from lightning_lowbit import LowBitPrecision, atomic_files, cli
from lightning_lowbit.cli.checkpoints import as_trained, find_checkpoints, resolve
from lightning_lowbit.precision.checkpoints.files import load_shards
from tests.callbacks.recovery.test_whole_checkpoints import DAMAGED_FILES, cut, save_directory, save_file
from tests.cli.run.commands import lowbit, write_tiny
from tests.launch import LIMIT
from tests.tables import each

TRAINER = Namespace(callbacks=None, logger=None, default_root_dir="runs")
LEFT = f"{atomic_files._HOST}-1"


def place(run, name):
    return Path("runs", f"version_{run}", "checkpoints", name)


def last(which="last", trains=True):
    return Path(str(resolve(which, TRAINER, trains)))


def test_a_crash_between_two_renames_loses_nothing_and_a_resume_removes_what_others_left():
    save_directory(previous := place(0, f"last.ckpt.{LEFT}.previous"), 6)
    save_directory(place(0, "step=3.ckpt"), 3)
    for path in (place(0, f"step=9.ckpt.{LEFT}.partial"), place(1, f"step=4.ckpt.{LEFT}.partial")):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert last(trains=False) == previous, "who only reads changes nothing"
    assert len(list(Path("runs").rglob("*.partial"))) == 2
    assert last() == place(0, "last.ckpt") and not list(Path("runs").rglob("*.partial"))


@pytest.mark.parametrize("damage", DAMAGED_FILES)
def test_a_damaged_last_one_is_named_with_the_newest_whole_one_which_last_good_takes(damage, capsys):
    spoil, words = DAMAGED_FILES[damage]
    for name, step in (("step=2.ckpt", 2), ("step=4.ckpt", 4), ("step=6.ckpt", 6), ("last.ckpt", 8)):
        save_file(place(0, name), step)
    spoil(place(0, "last.ckpt"))
    cut(place(0, "step=6.ckpt"))
    with pytest.raises(ValueError) as error:
        last()
    assert f"{place(0, 'last.ckpt')} is damaged: it {words}" in str(error.value)
    assert str(error.value).endswith(f"{place(0, 'step=4.ckpt')} (step 4): take it with --ckpt_path last-good.")
    assert last("last-good") == place(0, "step=4.ckpt")
    assert f"{place(0, 'last.ckpt')} is damaged: it {words}" in capsys.readouterr().out


def test_where_none_is_whole_last_and_last_good_say_so():
    for name in ("step=2.ckpt", "last.ckpt"):
        cut(save_file(place(0, name), 2))
    for which in ("last", "last-good"):
        with pytest.raises(ValueError, match="No other checkpoint there is whole: begin afresh, without ckpt_path"):
            last(which)


def test_a_path_is_looked_at_too_unless_it_is_in_the_format_of_others():
    for content, message in (
        ("", "mine.ckpt is damaged: it is empty. Give another one, or --ckpt_path last-good"),
        ("a text", "mine.ckpt is a text, and no checkpoint. Give the path of one"),
    ):
        Path("mine.ckpt").write_text(content)
        with pytest.raises(ValueError, match=message):
            resolve("mine.ckpt", TRAINER, trains=True)
    save_file(place(3, "step=7.ckpt"), 7)
    with pytest.raises(ValueError, match="runs is a folder of checkpoints. .* newest: --ckpt_path runs/.*step=7.ckpt"):
        resolve("runs", TRAINER, trains=True)
    Path("mine.ckpt").write_bytes(b"of a plugin\0")
    for path in ("mine.ckpt", "registry:name", "best", "hpc", None):
        assert resolve(path, TRAINER, trains=True) == path


def test_what_torch_does_not_load_is_answered_in_one_line(capsys):
    write_tiny()
    Path("mine.ckpt").write_bytes(b"of no plugin\0")
    torch.save({"folder": Path("runs")}, "objects.ckpt")
    for command, path, message in (
        ("fit", "mine.ckpt", "cannot be loaded (UnpicklingError). It is damaged, or no checkpoint: give another."),
        ("validate", "objects.ckpt", "If you trust whoever wrote it, give --weights_only false."),
    ):
        assert lowbit(f"--ckpt_path={path}", command=command) == 2
        assert message in capsys.readouterr().err.splitlines()[-1], (path, command)


def test_what_vanishes_during_the_search_is_left_out(monkeypatch):
    save_file(place(0, "last.ckpt"))
    names = {place(0, "last.ckpt"), place(0, "step=1.ckpt")}
    monkeypatch.setattr("lightning_lowbit.callbacks.recovery.whole_checkpoints.named", lambda *_: names)
    assert find_checkpoints(Path("runs")) == [place(0, "last.ckpt")]


OFTEN = "--trainer.callbacks.init_args.every_n_train_steps=2"


@pytest.mark.slow
def test_the_command_says_one_line_of_a_damaged_checkpoint_and_goes_on_from_a_whole_one(capsys):
    write_tiny(default_root_dir="runs/tiny")
    assert lowbit(OFTEN, "--trainer.max_steps=4", "--trainer.callbacks.init_args.save_top_k=-1") == 0
    folder = Path("runs/tiny/version_0/checkpoints")
    cut(folder / "last.ckpt")
    cut(folder / "step=4.ckpt")
    (folder / f"step=6.ckpt.{LEFT}.partial").touch()
    capsys.readouterr()
    assert lowbit(OFTEN, "--ckpt_path=last") == 2
    told = capsys.readouterr().err.strip().splitlines()
    assert told[-1].startswith("lowbit: error: The checkpoint ") and "Traceback" not in "".join(told)
    assert "(step 2): take it with --ckpt_path last-good." in told[-1]
    assert lowbit(OFTEN, "--ckpt_path=last-good") == 0
    assert f"Resuming from {folder / 'step=2.ckpt'}" in capsys.readouterr().out
    assert torch.load("runs/tiny/version_1/checkpoints/last.ckpt", weights_only=True)["global_step"] == 6
    assert not list(Path("runs").rglob("*.partial"))


@pytest.mark.slow
def test_sigterm_ends_the_installed_command_with_143_within_the_time_of_docker_stop():
    """`timeout` hands a SIGTERM on, to the command and then to its group: it comes twice."""
    write_tiny(default_root_dir="runs/tiny", max_steps=4000)
    script = Path(sys.executable).with_name("lowbit")
    command = ["timeout", "-s", "TERM", "600", script, "fit", "--config=quickstart", "--config=tiny.yaml", OFTEN]
    with open("log.txt", "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    checkpoint, end = Path("runs/tiny/version_0/checkpoints/last.ckpt"), time.monotonic() + LIMIT
    while not checkpoint.exists():
        assert process.poll() is None and time.monotonic() < end, Path("log.txt").read_text()[-3000:]
        time.sleep(0.05)
    process.terminate()
    try:
        assert process.wait(10) == 143, Path("log.txt").read_text()[-3000:]
    finally:
        process.kill()
    interrupted = torch.load(checkpoint.with_name("interrupted.ckpt"), weights_only=True)["global_step"]
    assert interrupted >= torch.load(checkpoint, weights_only=True)["global_step"]


class Terminate(Callback):
    def on_validation_batch_start(self, *_):
        os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_outside_of_training_ends_with_143_too():
    write_tiny()
    with pytest.raises(SystemExit) as stopped:
        lowbit("--trainer.callbacks+=tests.cli.test_checkpoints.Terminate", command="validate")
    assert stopped.value.code == 143


@pytest.mark.parametrize(
    "command",
    [
        ["consolidate"],
        ["inspect", "--casts=nvfp4"],
        ["evaluate", "--tasks=arc_easy"],
        ["export", "--format=fp8", "--output=exported"],
    ],
)
def test_each_command_names_a_checkpoint_in_the_folder_of_a_run(command, capsys, monkeypatch, tmp_path):
    if command[0] == "evaluate":
        pytest.importorskip("lm_eval")
    monkeypatch.chdir(tmp_path)
    Path("run/version_0").mkdir(parents=True)
    torch.save({}, "run/version_0/last.ckpt")
    assert cli.main([command[0], "run", *command[1:]]) == 2
    line = "run is a folder of checkpoints. Give one, such as run/version_0/last.ckpt."
    assert line in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", [["inspect", "--casts=fp8-current"], ["export", "--format=fp8", "--output=exported"]]
)
def test_no_checkpoint_is_looked_for_far_below_a_folder(command, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("runs/1/2/3/4/5/6/7").mkdir(parents=True)
    torch.save({}, "runs/1/2/3/4/5/6/7/far.ckpt")
    assert cli.main([command[0], "runs", *command[1:]]) == 2
    assert "far.ckpt" not in capsys.readouterr().err
    torch.save({}, "runs/1/2/3/4/5/6/near.ckpt")
    assert cli.main([command[0], "runs", *command[1:]]) == 2
    assert "near.ckpt" in capsys.readouterr().err


def test_a_path_with_a_space_is_quoted_where_it_is_to_be_copied(capsys):
    save_file(place(3, "of mine.ckpt"), 7)
    with pytest.raises(ValueError, match="--ckpt_path 'runs/.*/of mine.ckpt'"):
        resolve("runs", TRAINER, trains=True)
    assert cli.main(["cp", "quickstart", "of mine.yaml"]) == 0
    assert "`lowbit fit --config 'of mine.yaml'`" in capsys.readouterr().out
    Path("in shards").mkdir()
    Path("in shards/.metadata").touch()
    assert cli.main(["inspect", "in shards", "--casts=int8"]) == 2
    assert "`lowbit consolidate 'in shards'`" in capsys.readouterr().err


@pytest.mark.parametrize("name", [".metadata", "meta.pt", "__0_0.distcp"])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
def test_shards_that_were_copied_in_part_are_named(name, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    save_distributed({"state_dict": {"weight": torch.ones(3)}}, checkpoint_id="it.ckpt", no_dist=True)
    torch.save({"global_step": 7}, "it.ckpt/meta.pt")
    Path("it.ckpt", name).unlink()
    assert cli.main(["consolidate", "it.ckpt"]) == 2
    assert f"it.ckpt is damaged: it lacks {name}. Copy all of its files" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
def test_shards_become_a_file_by_a_command(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    shards = {"state_dict": {"weight": torch.ones(3)}, "optimizer_0": {"state": {}, "param_groups": [{"lr": 0.1}]}}
    save_distributed(shards, checkpoint_id="it.ckpt", no_dist=True)
    torch.save({"global_step": 7}, "it.ckpt/meta.pt")
    assert cli.main(["consolidate", "it.ckpt", "--output=named.ckpt"]) == cli.main(["consolidate", "it.ckpt"]) == 0
    whole = torch.load("it_whole.ckpt")
    assert Path("named.ckpt").exists()
    assert whole["state_dict"]["weight"].tolist() == [1, 1, 1] and whole["global_step"] == 7
    assert whole["optimizer_states"] == [shards["optimizer_0"]]
    assert cli.main(["consolidate", "it_whole.ckpt"]) == 2
    assert "it_whole.ckpt is no checkpoint in shards" in capsys.readouterr().err
    weight = {"weight": torch.ones(3)}
    assert load_shards(weight, Path("it.ckpt"))["weight"].equal(weight["weight"])
    for damaged in (next(Path("it.ckpt").glob("*.distcp")), Path("it.ckpt/.metadata"), Path("it.ckpt/meta.pt")):
        damaged.write_bytes(b"damaged")
        assert cli.main(["consolidate", "it.ckpt", "--output=again.ckpt"]) == 2, damaged
        assert re.search("cannot be read|is a text", capsys.readouterr().err), damaged
        with pytest.raises(ValueError, match="cannot be read"):
            load_shards(weight, Path("it.ckpt"))
    assert not list(Path().glob("again*"))


def test_a_folder_of_shards_is_refused_where_the_strategy_loads_files(tmp_path):
    save_directory(tmp_path / "step=6.ckpt", 6)
    path = str(tmp_path / "step=6.ckpt")
    whole = ("auto", "ddp", "ddp_spawn", Namespace(class_path="lightning.pytorch.strategies.DDPStrategy"))
    for strategy in whole:
        with pytest.raises(ValueError, match="is a folder of shards, which .* does not load.*lowbit consolidate"):
            resolve(path, Namespace(**vars(TRAINER), strategy=strategy), trains=True)
    for strategy in ("fsdp", Namespace(class_path="lightning.pytorch.strategies.ModelParallelStrategy")):
        assert resolve(path, Namespace(**vars(TRAINER), strategy=strategy), trains=True) == path


@each(
    "argument, decides",
    [
        ("--trainer.plugins=lightning_lowbit.FP8Precision", True),
        ("--trainer.plugins+=lightning_lowbit.FP8Precision", True),
        ("--trainer.plugins.class_path", True),
        ("--trainer.plugins.init_args.overrides={'0': mxfp4}", True),
        ("--trainer.plugins.casts", True),
        ("--trainer.plugins.init_args.backend=emulated", False),
        ("--trainer.plugins.compute_dtype", False),
        ("--trainer.devices=1", False),
    ],
)
def test_options_that_decide_how_layers_compute_leave_the_configured_plugin(argument, decides):
    configured = {"plugins": [LowBitPrecision("mxfp4")]}
    if decides:
        assert as_trained(configured, __file__, [argument]) == {}
    else:
        with pytest.raises(ValueError, match="is a text, and no checkpoint"):  # it is read for its casts
            as_trained(configured, __file__, [argument])
