"""Runs and exports of the installed command that are killed again and again (``kill -9``).

Each run goes on from ``--ckpt_path last``, and is killed at a random moment: every third one in a save, between two
operations on files or some milliseconds after it began; some while they start; the others anywhere. Weights, optimizer,
state of the plugin and all that was logged have to be those of a run that nobody killed. What Lightning logs of a step
after its callbacks have saved it is lost if the process dies in between, and nothing else.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from tests.callbacks.recovery.crash_in_save import changes_something
from tests.cli.run.commands import write_tiny

LOWBIT = Path(sys.executable).with_name("lowbit")
KINDS = ("save", "anywhere", "save", "anywhere", "anywhere", "start")  # in turn
STEPS_PER_KILL = 8  # at most, so that all kills come before the end
OPERATIONS = 9  # of the two saves and the removal at one step
TIMES = {"seconds", "tokens/s", "tflops"}
# What differs between any two runs, such as the identity of its report; and a default that torch adds to what it loads.
PATHS = {"dirpath", "best_model_path", "kth_best_model_path", "last_model_path", "best_k_models"}
OTHERS = PATHS | TIMES | {"differentiable", "id"}
CHAINS = 2  # at a time


class Die(Callback):
    """Kills this process so many seconds after a step (``kind`` is ``"anywhere"``), or after the first save from that
    step on (``"save"``), or before an ``operation`` on files of that save; and writes where into the file ``note``."""

    def __init__(self, kind: str, step: int, delay: float, operation: int | None, note: str) -> None:
        self.kind, self.step, self.delay, self.left, self.note = kind, step, delay, operation, note
        self.armed = False
        sys.addaudithook(self.hear)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if self.kind == "anywhere" and trainer.global_step == self.step:
            self.die_after(f"step {self.step}")

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self.kind != "save" or trainer.global_step < self.step or self.armed:
            return
        self.armed = True
        if self.left is None:
            self.die_after(f"the save at step {trainer.global_step}")

    def die_after(self, event: str) -> None:
        where = f"{self.delay:.4f} s after the beginning of {event}"
        threading.Timer(self.delay, self.die, [where]).start()

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.armed or self.left is None or not changes_something(event, arguments):
            return
        if self.left == 0:
            self.die(f"before {event} {' '.join(str(a) for a in arguments[:2])}")
        self.left -= 1

    def die(self, where: str) -> None:
        self.armed = False
        Path(self.note).write_text(where)
        os.kill(os.getpid(), signal.SIGKILL)


def fit(folder, *arguments, log, kill_after=None):
    """The exit status of ``lowbit fit`` in a folder, which goes on where something was saved."""
    root = str(Path(__file__).parents[2])  # where Die is
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "PYTHONPATH": root}
    often = "--trainer.callbacks.init_args.every_n_train_steps=2"  # of the last callback, which saves
    command = [str(LOWBIT), "fit", "--config=quickstart", "--config=tiny.yaml", often, *arguments]
    command += ["--ckpt_path=last"] * any(folder.glob("runs/*/checkpoints/*.ckpt"))
    with (folder / log).open("w") as told:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=told, stderr=told)
        if kill_after is not None:
            time.sleep(kill_after)
            process.kill()
        return process.wait(300)


def prepare(folder, steps):
    folder.mkdir(parents=True)
    write_tiny(folder / "tiny.yaml", max_steps=steps, default_root_dir="runs")


def chain(folder, steps, kills, seed):
    """Kills a run so often, and lets it end: where it was killed, and the steps that had been saved then."""
    prepare(folder, steps)
    draw, reached, died, saved_steps = random.Random(seed), 0, [], set()
    for number in range(kills):
        kind, step = KINDS[number % len(KINDS)], reached + draw.randrange(STEPS_PER_KILL - 1)
        operation = draw.choice([None, draw.randrange(OPERATIONS)]) if kind == "save" else None
        delay = draw.uniform(0, {"save": 0.02, "anywhere": 0.3, "start": 10}[kind])
        note = folder / f"{number}.txt"
        die = {"kind": kind, "step": step, "delay": delay, "operation": operation, "note": str(note)}
        callback = json.dumps({"class_path": "tests.cli.test_kill_and_resume.Die", "init_args": die})
        kill_after = delay if kind == "start" else None
        status = fit(folder, f"--trainer.callbacks+={callback}", log=f"{number}.log", kill_after=kill_after)
        assert status == -signal.SIGKILL, f"{number}: {kind} ended with {status}\n{tail(folder / f'{number}.log')}"
        where = note.read_text() if kind != "start" else f"{delay:.1f} s after the start"
        left = len([*folder.rglob("*.partial")])
        died.append(f"{kind}: {where.replace(str(folder), '')}; left {left} partial")
        reached = max(map(step_of, folder.glob("runs/*/checkpoints/*.ckpt")), default=0)
        saved_steps.add(reached)
    status = fit(folder, log="end.log")
    assert status == 0, f"the end: {status}\n{tail(folder / 'end.log')}"
    return died, saved_steps


def tail(log):
    return log.read_text()[-3000:]


def step_of(path):
    return torch.load(path, weights_only=True, mmap=True)["global_step"]


def state(folder):
    """Each leaf of the newest checkpoint but paths, by its place in it."""
    newest = max(folder.glob("runs/*/checkpoints/last.ckpt"), key=step_of)
    leaves = {}

    def add(place, value):
        if isinstance(value, list | tuple):
            value = dict(enumerate(value))
        if not isinstance(value, dict):
            leaves[place] = value
            return
        for key in value.keys() - OTHERS:
            add(f"{place}/{key}", value[key])

    add("", torch.load(newest, weights_only=True))
    return leaves


def scalars(folder):
    """All values that were logged, by name and step; those that are times left out."""
    found = {}
    for run in sorted(folder.glob("runs/version_*")):
        events = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
        for tag in set(events.Tags()["scalars"]) - TIMES:
            for event in events.Scalars(tag):
                found.setdefault((tag, event.step), set()).add(event.value)
    return found


def differences(uninterrupted, killed, saved):
    """What a run that was killed, after these steps had been saved, has else than one that was not."""
    ours, others = state(uninterrupted), state(killed)
    found = [f"only one has {place}" for place in sorted(ours.keys() ^ others.keys())]
    for place in sorted(ours.keys() & others.keys()):
        one, other = ours[place], others[place]
        if not (torch.equal(one, other) if isinstance(one, Tensor) else one == other):
            found.append(f"{place}: {one} is {other}")
    logged, again = scalars(uninterrupted), scalars(killed)
    for place in sorted(logged.keys() | again.keys()):
        lost = place not in again and place[1] + 1 in saved and not place[0].startswith("val_")
        if logged.get(place) != again.get(place) and not lost:
            found.append(f"logged {place}: {logged.get(place)} is {again.get(place)}")
    left = [path for path in killed.rglob("*") if path.name.endswith((".partial", ".previous"))]
    return [*found, *(f"left {path}" for path in left)]


@pytest.mark.slow
def test_killed_runs_end_as_if_nobody_had_killed_them(tmp_path):
    """8 kills; ``LOWBIT_KILLS`` is another number, of which 30 take ten minutes on two cores."""
    kills = int(os.environ.get("LOWBIT_KILLS", "8"))
    each = -(-kills // CHAINS)
    steps, whole = each * STEPS_PER_KILL + 4, tmp_path / "uninterrupted"
    prepare(whole, steps)
    assert fit(whole, log="end.log") == 0, tail(whole / "end.log")
    places = [tmp_path / f"chain {number}" for number in range(CHAINS)]
    counts = [min(each, kills - number * each) for number in range(CHAINS)]
    with ThreadPoolExecutor(CHAINS) as pool:
        chains = list(pool.map(chain, places, [steps] * CHAINS, counts, range(CHAINS)))
    died = sum((where for where, _ in chains), [])
    assert len(died) == kills and sum(where.startswith("save") for where in died) >= kills // 3, died
    for place, (_, saved) in zip(places, chains, strict=True):
        assert not differences(whole, place, saved), died


@pytest.mark.slow
def test_killed_exports_leave_nothing_that_looks_like_one(tmp_path):
    prepare(tmp_path / "run", 2)
    assert fit(tmp_path / "run", log="fit.log") == 0
    (checkpoint,) = tmp_path.glob("run/runs/*/checkpoints/last.ckpt")
    output, draw, died = tmp_path / "exports" / "exported", random.Random(0), 0
    command = [LOWBIT, "export", checkpoint, "--format=dequantized", "--no-parity", "--output", output]
    for _ in range(6):
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            while process.poll() is None and not [*output.parent.glob("*.partial")]:
                time.sleep(0.001)
            time.sleep(draw.uniform(0, 0.1))
            process.kill()
            died += process.wait() == -signal.SIGKILL
        if output.exists():
            assert (output / "lowbit.json").exists() and (output / "model.safetensors").exists()
            shutil.rmtree(output)
    assert died >= 3
    subprocess.run(command, check=True, capture_output=True)
    assert os.listdir(output.parent) == ["exported"]
