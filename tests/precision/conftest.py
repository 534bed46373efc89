import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.precision.distributed import RANKS

LIMIT = 120  # seconds; it takes a tenth of that


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes made of everything, in one start: importing takes longer than training."""
    folder, root = tmp_path_factory.mktemp("ddp"), Path(__file__).parents[2]
    logs = [folder / f"{rank}.log" for rank in range(RANKS)]
    processes = []
    for rank, log in enumerate(logs):
        with log.open("w") as file:
            command = [sys.executable, "-m", "tests.precision.distributed", str(rank), str(folder)]
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
    assert codes == [0] * RANKS, f"the processes ended with {codes}; None: not within {LIMIT} s, or stopped\n{told}"
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(RANKS)]
