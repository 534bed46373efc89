"""Runs that die in the midst of a save, at each moment in turn:
``python -m tests.callbacks.recovery.crash_in_save FOLDER CASE …``.

A moment lies between two operations on files, which Python announces (``sys.audit``), or half-way through copying one.
For each there is a process that trains, and is killed there, and another one that trains on. What these found lies in
``FOLDER/CASE.json``: of each moment the operation before which the first one died, and what became of the second one.
"""

import json
import os
import shutil
import signal
import sys
import tempfile
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist

from lightning_lowbit import CrashSafeCheckpoint, StableSPAM
from tests import ranks
from tests.distributed.spreads import full
from tests.lightning_imports import Callback, ModelParallelStrategy, quiet_trainer

SAVED, KILLED, LAST = 1, 2, 3  # steps: of the save before, of the one that is killed, of the end
OPERATIONS = {"os.remove", "os.rmdir", "os.symlink", "half a copy"}


class Fitted(ranks.Regression):
    """Learns from noise of each step's own."""

    def configure_optimizers(self):
        return StableSPAM(self.parameters(), lr=0.1)


class Case(NamedTuple):
    """How checkpoints are written.

    Attributes:
        links: the last one is a link to the best; or else it is the only one.
        directory: of shards, by FSDP2; or else a file.
        far: files come from another file system, so that they are copied.
        resumed: another run has made the save before.
    """

    links: bool = False
    directory: bool = True
    far: bool = False
    resumed: bool = False

    def saver(self, folder):
        kinds = {"save_last": "link"} if self.links else {"save_last": True, "save_top_k": 0}
        return CrashSafeCheckpoint(folder, every_n_train_steps=1, enable_version_counter=False, **kinds)


CASES = {
    "a file": Case(directory=False, far=True),
    "a directory": Case(),
    "a linked directory": Case(links=True),
    "a linked directory, resumed": Case(links=True, resumed=True),
}


class Kill(Callback):
    """Kills this process before one of the operations that follow the step ``KILLED``.

    Args:
        moment: its number.
        note: a file in which its name is left.
    """

    def __init__(self, moment, note):
        self.left, self.note, self.armed = moment, note, False
        sys.addaudithook(self.hear)

    def on_train_batch_end(self, trainer, *_):  # callbacks that save come after all others
        self.armed = trainer.global_step == KILLED

    def hear(self, event, arguments):
        if not self.armed or not changes_something(event, arguments):
            return
        if self.left == 0:
            self.armed = False
            self.note.write_text(f"{event} {' '.join(str(a) for a in arguments[:2])}")
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1


def changes_something(event, arguments):
    if event == "open":
        return bool(arguments[2] & (os.O_WRONLY | os.O_RDWR)) and isinstance(arguments[0], str | os.PathLike)
    if event == "os.mkdir":
        return not os.path.exists(arguments[0])
    if event == "os.rename" or (event == "os.remove" and arguments[1] == -1):  # or else relative to a directory
        return os.path.lexists(arguments[0])
    return event in OPERATIONS


def _copy_by_halves(source, target, *, follow_symlinks=True):
    content = Path(source).read_bytes()
    with open(target, "wb") as file:
        file.write(content[: len(content) // 2])
        file.flush()
        sys.audit("half a copy", target)
        file.write(content[len(content) // 2 :])
    return target


@contextmanager
def _file_systems(far):
    """Lets nothing be renamed that comes from the temporary folder."""
    rename = os.rename

    def refuse(source, target):
        if Path(source).parent == Path(tempfile.gettempdir()):
            raise OSError("another file system")
        rename(source, target)

    with patch("shutil.copyfile", _copy_by_halves), patch("os.rename", refuse if far else rename):
        yield


def train(case, folder, end, *callbacks):
    """Steps and weights when training starts (those of a checkpoint, if there is one) and at the end."""
    seen = []

    class Weights(Callback):
        def on_train_start(self, trainer, pl_module):
            weights = torch.cat([full(p).flatten() for p in pl_module.parameters()])
            seen.append((trainer.global_step, weights.tolist()))

        on_train_end = on_train_start

    quiet_trainer(
        devices=1,
        strategy=ModelParallelStrategy(1, 1) if case.directory else "auto",
        callbacks=[Weights(), case.saver(str(folder)), *callbacks],
        max_steps=end,
        enable_checkpointing=True,
    ).fit(Fitted(shard=case.directory), ckpt_path="last")
    return seen


def _in_a_process(folder, work, *arguments):
    """How one ended that works in a process group of its own, and shares nothing with this one."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            (folder / "store").unlink(missing_ok=True)
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
            work(*arguments)
            dist.destroy_process_group()
            code = 0
        except BaseException as error:
            print(repr(error), file=sys.stderr)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def crash(case, folder, moment):
    """What one moment leads to; None if there are not so many."""
    place, note, results = folder / "checkpoints", folder / "note", folder / "results.json"

    def begin():
        with _file_systems(case.far):
            train(case, place, KILLED, Kill(moment, note))

    def go_on():
        (step, start), (_, end) = train(case, place, LAST)
        results.write_text(json.dumps({"step": step, "start": start, "end": end}))

    if case.resumed:
        assert _in_a_process(folder, train, case, place, SAVED) == 0
    if _in_a_process(folder, begin) != -signal.SIGKILL:
        return None
    names = sorted(path.name for path in place.iterdir())
    code = _in_a_process(folder, go_on)
    left = sorted(path.name for path in place.iterdir())
    result = {"before": note.read_text().replace(str(folder), ""), "code": code, "names": names, "left": left}
    return result | (json.loads(results.read_text()) if code == 0 else {})


def moments(case, folder):
    """What each moment leads to."""
    results = []
    while True:
        folder.mkdir()
        result = crash(case, folder, len(results))
        shutil.rmtree(folder)
        if result is None:
            return results
        results.append(result)


def main(folder, *names):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ.update(LOCAL_RANK="0", NODE_RANK="0", WORLD_SIZE="1")
    own = Path(folder) / names[0]
    tempfile.tempdir = str(own / "far")
    os.makedirs(tempfile.tempdir)
    for name in names:
        (Path(folder) / f"{name}.json").write_text(json.dumps(moments(CASES[name], own / "place")))


if __name__ == "__main__":
    main(*sys.argv[1:])
