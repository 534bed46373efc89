"""Starts the processes of a distributed test, what each of them does, and gathers what they saw."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LIMIT = 300  # seconds; on two quiet cores they take a tenth of that


def launch(module: str, ranks: int, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """What each of some processes made of everything, in one start: importing takes longer than training.

    ``python -m MODULE RANK FOLDER ARGUMENTS`` is what each runs; it calls :func:`take_part`, which leaves
    ``FOLDER/RANK.pt``.
    """
    root = Path(__file__).parents[1]
    logs = [folder / f"{rank}.log" for rank in range(ranks)]
    processes = []
    for rank, log in enumerate(logs):
        with log.open("w") as file:
            command = [sys.executable, "-m", module, str(rank), str(folder), *arguments]
            environment = {**os.environ, "PYTHONPATH": str(root)}
            processes.append(subprocess.Popen(command, stdout=file, stderr=file, env=environment, cwd=root))
    try:
        end = time.monotonic() + LIMIT
        while any(process.poll() is None for process in processes) and time.monotonic() < end:
            if any(process.poll() for process in processes):  # the others would wait for it
                break
            time.sleep(0.1)
        codes = [process.poll() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    told = "\n".join(f"--- rank {rank}\n{log.read_text()[-3000:]}" for rank, log in enumerate(logs))
    assert codes == [0] * ranks, f"the processes ended with {codes}; None: not within {LIMIT} s, or stopped\n{told}"
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(ranks)]


def take_part(ranks: int, work: Callable[[], dict[str, Any]]) -> None:
    """Meets the other processes, works, and leaves what came of it."""
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    # How Lightning is told that others start the processes.
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    os.chdir(folder)
    # They meet in a file: a free port might be taken by the time it is used.
    meet = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=meet, timeout=timedelta(seconds=60), rank=rank, world_size=ranks)
    torch.save(work(), f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
