"""What watching costs: the time of a training step with all monitors, against the same run without any.

    python -m tests.benchmarks.monitors [--casts nvfp4] [--rounds 5] [--steps 100] [--every 50] [--device cpu]

Interleaved rounds of whole runs in one process, on the model of the quickstart (3.3M parameters, 2048 bytes a step),
that log every 50 steps to TensorBoard. `control` is `plain` once more: what differs between the two is the machine.
`monitors` has GradientNormMonitor (looking for spikes in every step), QuantizationMonitor, OutlierMonitor,
GradientNoiseMonitor in its cheap form, SpikeRollback with its snapshots, and RunReport; `draws` has the two-draw
GradientNoiseMonitor alone. The time of a run is from its second step to its last, over these steps, without what is
done once when it ends, such as writing the report; weights at the end are checked to be those of `plain`.

Where whole runs differ by more than what is looked for, as they do on shared machines, the last column tells: it
compares steps of one run, those that measure and those after, which write, with the median of all others. A small
`--every` gives it more of them; it is the share of 50 steps. What monitors do in every step is not in it.
"""

import argparse
import logging
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.data import DataLoader

from lightning_lowbit import (
    FP4Precision,
    GradientNoiseMonitor,
    GradientNormMonitor,
    OutlierMonitor,
    QuantizationMonitor,
    RunReport,
    SpikeRollback,
    StableSPAM,
)
from lightning_lowbit.recipes.models import CausalLM
from tests.benchmarks.environment import describe, keep_large_blocks

LENGTH, SEQUENCES = 256, 8


class Clock(Callback):
    """Seconds per step, from the second one on."""

    def __init__(self) -> None:
        self.begin = self.end = 0.0
        self.ends: list[float] = []  # of all steps

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 1:
            self.begin = now(trainer)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:  # the last of the callbacks
        self.end = now(trainer)
        self.ends.append(self.end)

    def extra(self, every: int) -> float:
        """Of a measurement, over what two steps take without: in steps."""
        seconds = [after - before for before, after in zip(self.ends, self.ends[1:], strict=False)]
        steps = dict(enumerate(seconds, 2))
        others = statistics.median(s for step, s in steps.items() if step % every not in (0, 1))
        measured = [steps[step] + steps[step + 1] for step in range(every, len(steps) + 1, every)]
        return statistics.median(measured) / others - 2


def now(trainer: Trainer) -> float:
    if trainer.strategy.root_device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def sides(every: int) -> dict[str, Callable[[], list[Callback]]]:
    """The callbacks of each side."""
    return {
        "plain": list,
        "control": list,
        "monitors": lambda: [
            GradientNormMonitor(every_n_steps=1),
            QuantizationMonitor(),
            OutlierMonitor(),
            GradientNoiseMonitor(every_n_steps=every, kind="layers"),
            SpikeRollback(),
            RunReport(),
        ],
        "draws": lambda: [GradientNoiseMonitor(every_n_steps=every)],
    }


def run(
    callbacks: list[Callback], casts: str, steps: int, every: int, device: str
) -> tuple[float, float, torch.Tensor]:
    """Seconds per step, what a measurement takes in steps, and the weights at the end."""
    seed_everything(0, verbose=False)
    model = CausalLM("llama-small", optimizer=lambda parameters: StableSPAM(parameters, lr=1e-3))
    tokens = torch.randint(0, 256, (steps * SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        Trainer(
            accelerator=device,
            devices=1,
            plugins=[FP4Precision(casts, skip=["lm_head"])],
            callbacks=[*callbacks, clock],
            logger=TensorBoardLogger(folder),
            max_steps=steps,
            log_every_n_steps=every,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(model, DataLoader(tokens, SEQUENCES))
    weights = torch.cat([p.detach().flatten().cpu() for p in model.parameters()])
    return (clock.end - clock.begin) / (steps - 1), clock.extra(every), weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--casts", default="nvfp4")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    if options.every < 3 or options.steps <= options.every:
        parser.error("--every is 3 or more, and --steps more than that: a measurement is compared with steps without.")
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    allocator = keep_large_blocks() if options.device == "cpu" else "torch's caching allocator"
    print(f"{describe(options.device)}; allocator: {allocator}")
    what = f"{options.casts}, {LENGTH * SEQUENCES} tokens a step, logged every {options.every}"
    print(f"{what}; medians of {options.rounds} interleaved rounds of {options.steps} steps\n")
    times: dict[str, list[float]] = {side: [] for side in sides(options.every)}
    extras: dict[str, list[float]] = {side: [] for side in times}
    for number in range(options.rounds + 1):  # the first one generates code
        weights: dict[str, torch.Tensor] = {}
        for side, callbacks in sides(options.every).items():
            seconds, extra, weights[side] = run(
                callbacks(), options.casts, options.steps, options.every, options.device
            )
            print(f"round {number}, {side}: {seconds * 1e3:.1f} ms per step", file=sys.stderr, flush=True)
            if number:
                times[side].append(seconds)
                extras[side].append(extra)
        for side, end in weights.items():
            assert torch.equal(end, weights["plain"]), f"{side} changed the run"
    plain = statistics.median(times["plain"])
    print("| side | ms per step | against plain | spread over rounds | measurements, of 50 steps |")
    print("|---|---:|---:|---:|---:|")
    for side, seconds_of in times.items():
        ratios = [a / b for a, b in zip(seconds_of, times["plain"], strict=True)]
        median = statistics.median(seconds_of)
        spread = f"{min(ratios):.4f} to {max(ratios):.4f}"
        measuring = f"{statistics.median(extras[side]) / 50:.2%}"
        print(f"| {side} | {median * 1e3:.1f} | {median / plain:.4f} | {spread} | {measuring} |")
    print(f"\nA measurement of two draws takes {statistics.median(extras['draws']):.2f} steps.")


if __name__ == "__main__":
    main()
