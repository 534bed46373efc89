"""Memory and time of an export: a checkpoint with random weights, as a run would write it, to a folder.

Run: ``python -m tests.benchmarks.export --network llama-1b --format nvfp4-w4a16``. It takes disk for the checkpoint,
four bytes per parameter. Memory is what the process holds beside mapped files. Outputs are not compared.
"""

import argparse
import tempfile
import threading
import time
from pathlib import Path

import torch

from lightning_lowbit import export_checkpoint
from lightning_lowbit.nn.casts.linear_casts import LinearCasts
from lightning_lowbit.nn.conversion.convert import plan
from lightning_lowbit.patterns import clean_name
from lightning_lowbit.precision.checkpoints.files import CHECKPOINT_KEY
from lightning_lowbit.precision.checkpoints.trained import Trained
from lightning_lowbit.recipes.models import CausalLM
from tests.benchmarks.environment import describe

GIB = 2**30
SHARED = ("(q|k|v)_proj", "gate_proj|up_proj")


def write_checkpoint(path: Path, network: str) -> int:
    """Writes random weights with casts of NVFP4; returns the number of parameters."""
    # 5461 of llama-1b is no multiple of a block.
    config = {"intermediate_size": 5504} if network == "llama-1b" else None
    module = CausalLM(network, config)
    planned = plan(module, LinearCasts.preset("nvfp4"), skip=["lm_head"])
    trained = Trained({clean_name(name): casts for name, casts in planned.items()}, "bf16", None, SHARED)
    state = {"step": 1, "micro_batch": 0, "phase": "fqt", "seed": 0, "blend": torch.tensor(1.0)}
    checkpoint = {"state_dict": module.state_dict(), CHECKPOINT_KEY: {**state, "trained": trained.record()}}
    torch.save({**checkpoint, "hyper_parameters": dict(module.hparams), "global_step": 1}, path)
    return sum(parameter.numel() for parameter in module.parameters())


def held() -> float:
    """GiB of the process that are not of mapped files."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", default="llama-60m")
    parser.add_argument("--format", default="nvfp4-w4a16")
    given = parser.parse_args()
    print(describe())
    with tempfile.TemporaryDirectory() as folder:
        count = write_checkpoint(Path(folder, "last.ckpt"), given.network)
        before, peak, done = held(), [0.0], threading.Event()

        def watch() -> None:
            while not done.wait(0.05):
                peak[0] = max(peak[0], held())

        watcher = threading.Thread(target=watch)
        watcher.start()
        start = time.perf_counter()
        exported = export_checkpoint(Path(folder, "last.ckpt"), given.format, Path(folder, "out"), parity=False)
        seconds = time.perf_counter() - start
        done.set()
        watcher.join()
        print(
            f"{given.network}, {given.format}: {count / 1e9:.3f} billion parameters, {2 * count / GIB:.2f} GiB in bf16"
        )
        print(f"peak {peak[0]:.2f} GiB (before {before:.2f}), {seconds:.0f} s, {exported.bytes / GIB:.2f} GiB on disk")


if __name__ == "__main__":
    main()
