"""How far a step is from what ``lowbit estimate``'s formulas make of the arithmetic of this machine.

    python -m tests.benchmarks.estimates [--network llama-60m] [--sequences 1] [--length 256] [--rounds 7]

In each round: a forward and a backward pass in float32 of one device, and before it, for the peak, the GEMMs of its
linear layers by themselves. The estimate has this peak and a utilization of 1, so that what the ratio shows is what the
formulas leave out: norms, activations, softmax, the loss, the embedding. There is no communication on one device.
"""

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable

import torch

from lightning_lowbit.cli.lab.estimate.formulas import Assumptions, Batch, Layout, flops, times
from lightning_lowbit.cli.lab.estimate.options import Device
from lightning_lowbit.cli.lab.estimate.shapes import describe as shapes_of
from lightning_lowbit.recipes.models import CausalLM
from tests.benchmarks.environment import describe, keep_large_blocks


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def gemms(shapes: Counter[tuple[int, int]], tokens: int) -> tuple[Callable[[], None], int]:
    """The three GEMMs of all linear layers, and their FLOPs."""
    operands = {(m, n): (torch.randn(tokens, n), torch.randn(m, n), torch.randn(tokens, m)) for m, n in shapes}

    def work() -> None:
        for shape, count in shapes.items():
            x, w, g = operands[shape]
            for _ in range(count):
                torch.mm(x, w.t()), torch.mm(g, w), torch.mm(g.t(), x)

    return work, sum(count * 6 * tokens * m * n for (m, n), count in shapes.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", default="llama-60m")
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    allocator = keep_large_blocks()
    with torch.device("meta"):
        model, _ = shapes_of(CausalLM(options.network), precision="32-true")
    batch = Batch(options.sequences, options.length)
    network = CausalLM(options.network, seed=0).model
    tokens = torch.randint(0, network.config.vocab_size, (batch.sequences, batch.length))

    def step() -> None:
        network.zero_grad()
        network(input_ids=tokens, labels=tokens).loss.backward()

    alone, count = gemms(Counter((layer.out_features, layer.in_features) for layer in model.layers), batch.tokens)
    counted = flops(model, batch, Layout())
    assert count == sum(counted.values()) - counted["attention"], "other GEMMs than those that are estimated"
    step(), alone()
    rounds = [(seconds(alone), seconds(step)) for _ in range(options.rounds)]
    rates = [count / of_gemms for of_gemms, _ in rounds]
    device = Device(0, {"fp32": statistics.median(rates)}, 1, 1)
    estimated = times(model, batch, Layout(), device, Assumptions(utilization=1.0)).hidden
    measured = statistics.median(of_step for _, of_step in rounds)
    print(f"{describe()}, allocator: {allocator}")
    print(f"{options.network}, {batch.tokens} tokens in float32: {sum(counted.values()) / 1e9:.0f} GFLOP a step")
    print(f"GEMMs alone {device.peaks['fp32'] / 1e9:.0f} GFLOP/s, so that a step should take {estimated * 1e3:.0f} ms")
    spread = max(of_step for _, of_step in rounds) / min(of_step for _, of_step in rounds)
    print(f"measured {measured * 1e3:.0f} ms (medians of {options.rounds}, slowest / fastest {spread:.2f})")
    print(f"measured / estimated {measured / estimated:.2f}")


if __name__ == "__main__":
    main()
