"""What a small quantized layer costs beside arithmetic: host time and operations that would be launches on a GPU.

    python -m tests.benchmarks.layers [--casts nvfp4 mxfp8] [--size 256] [--rounds 300] [--json FILE]

Forward and backward pass of one ``nn.Linear`` of size x size, with as many tokens, under bf16 autocast on one thread,
in interleaved rounds, medians; above those of the unquantized layer. An operation counts as a launch if it computes or
copies: views, allocations and, on a CPU, reading a number do not. GEMMs are not counted, calls of kernels are.
"""

import argparse
import statistics
import time

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from lightning_lowbit import convert
from lightning_lowbit.kernels import operands
from lightning_lowbit.nn import PRESETS, AmaxHistories, LayerKeys
from tests.benchmarks.environment import describe, save

# Operations that launch nothing on a GPU.
FREE = """
    view as_strided t transpose reshape expand unsqueeze squeeze slice select detach permute alias flatten to item
    empty empty_strided empty_like new_empty resize_ resolve_conj is_same_size lift_fresh
    _unsafe_view _reshape_alias _local_scalar_dense
"""


def layer(casts: str | None, size: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(size, size, bias=False))
    if casts is not None:
        LayerKeys(convert(model, casts)).fill_(0)
        AmaxHistories(model).to_(torch.device("cpu"))
    return model


def step(model: nn.Module, x: torch.Tensor) -> tuple[float, float]:
    start = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    middle = time.perf_counter()
    y.backward(torch.ones_like(y))
    return middle - start, time.perf_counter() - middle


def launches(model: nn.Module, x: torch.Tensor) -> tuple[int, int]:
    """Operations of torch that would be launches, and calls of kernels."""
    calls, original = 0, operands.cpu.library()

    class Counting:
        def __getattr__(self, name):
            nonlocal calls
            calls += 1
            return getattr(original, name)

    operands.cpu.library = lambda: Counting()
    try:
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            step(model, x)
    finally:
        operands.cpu.library = operands.library
    leaves = [
        event.name.removeprefix("aten::")
        for event in profiled.events()
        if event.name.startswith("aten::") and not any(child.name.startswith("aten::") for child in event.cpu_children)
    ]
    return sum(name not in FREE.split() for name in leaves), calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    presets = [name for name in PRESETS if name != "bf16"]
    parser.add_argument(
        "--casts", nargs="+", default=["nvfp4", "mxfp8", "fp8-delayed"], choices=presets, metavar="PRESET"
    )
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{describe()}; {options.size} tokens, {options.size} → {options.size}\n")
    x = torch.randn(options.size, options.size, requires_grad=True)
    models = {
        name: layer(None if name == "nn.Linear" else name, options.size) for name in ("nn.Linear", *options.casts)
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    for round in range(options.rounds + 20):
        for name, model in models.items():
            taken = step(model, x)
            if round >= 20:
                times[name].append(taken)
    numbers = {}
    print("| | forward, µs | backward, µs | above nn.Linear, µs | launches | kernels among them |")
    print("|---|---|---|---|---|---|")
    for name, model in models.items():
        passes = [statistics.median(taken[i] for taken in times[name]) * 1e6 for i in (0, 1)]
        numbers[name] = sum(passes)
        of_torch, of_kernels = launches(model, x)
        numbers[f"{name}, launches"] = of_torch + of_kernels
        row = [*passes, numbers[name] - numbers["nn.Linear"], of_torch + of_kernels, of_kernels]
        print(f"| {name} | {' | '.join(f'{number:.0f}' for number in row)} |")
    save(options.json, numbers)


if __name__ == "__main__":
    main()
