"""How long one optimizer step takes: StableSPAM against torch's AdamW, on the parameters of a LLaMA of 60M.

Run: ``python -m tests.benchmarks.optimizer_step``. Both sides are measured in one run, in interleaved rounds, with new
gradients in each. Large blocks are kept by the allocator (glibc `mallopt`, as jemalloc or tcmalloc would), because with
the default every scratch tensor costs page faults; ``--default-allocator`` leaves it alone.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_lowbit.optim import StableSPAM
from tests.benchmarks.environment import describe, keep_large_blocks
from tests.references.stable_spam import Reference

VOCABULARY, WIDTH, HIDDEN, LAYERS = 32000, 512, 1376, 8
LAYER = [(WIDTH, WIDTH)] * 4 + [(HIDDEN, WIDTH)] * 2 + [(WIDTH, HIDDEN)] + [(WIDTH,)] * 2
SHAPES = [(VOCABULARY, WIDTH), *LAYER * LAYERS, (WIDTH,), (VOCABULARY, WIDTH)]  # embedding, layers, norm, head

OPTIMIZERS: dict[str, Callable[[list[Parameter]], torch.optim.Optimizer]] = {
    "AdamW(fused=True)": lambda parameters: torch.optim.AdamW(parameters, weight_decay=0, fused=True),
    "AdamW(foreach=True)": lambda parameters: torch.optim.AdamW(parameters, weight_decay=0, foreach=True),
    "StableSPAM": StableSPAM,
}


def check() -> None:
    """StableSPAM gives what the slow reference gives."""
    parameter = Parameter(torch.randn(64, 48))
    reference, optimizer = Reference(parameter, reset_interval=3), StableSPAM([parameter], reset_interval=3)
    for _ in range(5):
        parameter.grad = torch.randn_like(parameter) ** 3
        reference.step(parameter.grad)
        optimizer.step()
    torch.testing.assert_close(parameter.detach().double(), reference.parameter, rtol=1e-5, atol=1e-5)


def measure(rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each step of each optimizer; two rounds of warm-up are left out.

    All share parameters and gradients, whose values do not influence the time; the moments are each one's own.
    """
    parameters = [Parameter(torch.randn(shape) * 0.02) for shape in SHAPES]
    noise: list[Tensor] = [torch.randn(shape) for shape in SHAPES]
    optimizers = {name: make(parameters) for name, make in OPTIMIZERS.items()}
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    for number in range(rounds + 2):
        for p, g in zip(parameters, noise, strict=True):
            p.grad = g.roll(number, 0).mul_(1 + 0.1 * number)
        for name, optimizer in optimizers.items():
            start = time.perf_counter()
            optimizer.step()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: values[2:] for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--default-allocator", action="store_true")
    options = parser.parse_args()
    allocator = "default" if options.default_allocator else keep_large_blocks()
    torch.manual_seed(0)
    check()
    millions = sum(torch.Size(shape).numel() for shape in SHAPES) / 1e6
    print(describe())
    print(f"allocator: {allocator}; {millions:.2f}M fp32 parameters in {len(SHAPES)} tensors; {options.rounds} rounds")
    times = measure(options.rounds)
    base = statistics.median(times["AdamW(fused=True)"])
    for name, values in times.items():
        median = statistics.median(values)
        print(f"{name:20} median {median:6.1f} ms  (min {min(values):6.1f})  {median / base:5.2f} x fused AdamW")


if __name__ == "__main__":
    main()
