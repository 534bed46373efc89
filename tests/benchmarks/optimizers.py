"""What one optimizer step takes, in time and memory, on the parameters of a LLaMA of 60M, against torch's AdamW.

Run: ``python -m tests.benchmarks.optimizers``. Times: all optimizers in one run, in interleaved rounds, with new
gradients in each. Memory: each optimizer in a process of its own; ``state`` is what it keeps, ``extra`` by how much the
process's peak in three steps exceeds that. Times are those of an allocator that keeps large blocks (glibc `mallopt`, as
jemalloc or tcmalloc would), because with the default every scratch tensor costs page faults; ``--default-allocator``
leaves it alone.

Gradients grow by a tenth in each round under ``--growing``: every threshold of AdaClip is then below every maximum, and
nearly every piece of a gradient has elements to clip, which is the most that a step can cost. Otherwise their size
varies by a tenth around one value. SpikeClip works from the third step on. Under ``--eager`` the package's steps are
plain torch. torchao and pytorch_optimizer are measured where they are installed.
"""

import argparse
import ctypes
import gc
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_lowbit import SPAM, Adaptive, LowBitAdamW, Muon, StableSPAM
from lightning_lowbit.compilation import backend
from lightning_lowbit.optim import rules
from tests.benchmarks.environment import describe, keep_large_blocks
from tests.references.stable_spam import Reference

VOCABULARY, WIDTH, HIDDEN, LAYERS = 32000, 512, 1376, 8
LAYER = [(WIDTH, WIDTH)] * 4 + [(HIDDEN, WIDTH)] * 2 + [(WIDTH, HIDDEN)] + [(WIDTH,)] * 2
SHAPES = [(VOCABULARY, WIDTH), *LAYER * LAYERS, (WIDTH,), (VOCABULARY, WIDTH)]  # embedding, layers, norm, head

BASE = "AdamW(fused=True)"


def _other(module: str, name: str) -> Callable[[list[Parameter]], Any]:
    return lambda parameters: getattr(import_module(module), name)(parameters, lr=1e-3)


OPTIMIZERS: dict[str, Callable[[list[Parameter]], Any]] = {
    BASE: lambda parameters: torch.optim.AdamW(parameters, weight_decay=0, fused=True),
    "AdamW(foreach=True)": lambda parameters: torch.optim.AdamW(parameters, weight_decay=0, foreach=True),
    "StableSPAM": StableSPAM,
    "StableSPAM, FP8 moments": lambda parameters: StableSPAM(parameters, moments="fp8"),
    "LowBitAdamW, FP8 moments": LowBitAdamW,
    "SPAM": SPAM,
    "SPAM, density 1/4": lambda parameters: SPAM(parameters, density=0.25),
    "Muon": lambda parameters: Muon(parameters, adam_names=[]),
    "torch.optim.Muon": lambda parameters: torch.optim.Muon([p for p in parameters if p.dim() == 2]),
    "Adaptive(AdamW(fused=True))": lambda parameters: Adaptive(torch.optim.AdamW(parameters, fused=True)),
    "pytorch_optimizer StableSPAM": _other("pytorch_optimizer", "StableSPAM"),
    "torchao AdamW8bit": _other("torchao.optim", "AdamW8bit"),
    "torchao AdamWFp8": _other("torchao.optim", "AdamWFp8"),
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


def make_parameters() -> tuple[list[Parameter], list[Tensor]]:
    """Parameters, and noise to make their gradients of."""
    torch.manual_seed(0)
    return [Parameter(torch.randn(shape) * 0.02) for shape in SHAPES], [torch.randn(shape) for shape in SHAPES]


def made(names: Iterable[str], parameters: list[Parameter]) -> dict[str, Any]:
    """The optimizers whose packages are installed."""
    optimizers = {}
    for name in names:
        try:
            optimizers[name] = OPTIMIZERS[name](parameters)
        except ImportError as error:
            print(f"{name}: not measured ({error})")
    return optimizers


def measure(optimizers: dict[str, Any], parameters: list[Parameter], noise: list[Tensor], rounds: int, growing: bool):
    """Milliseconds of each step of each optimizer; two rounds of warm-up are left out.

    All share parameters and gradients; the state is each one's own.
    """
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    for number in range(rounds + 2):
        factor = 1 + 0.1 * (number if growing else torch.randn(()).item())
        for p, g in zip(parameters, noise, strict=True):
            p.grad = g.roll(number, 0).mul_(factor)
        for name, optimizer in optimizers.items():
            start = time.perf_counter()
            optimizer.step()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: values[2:] for name, values in times.items()}


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _state_bytes(optimizer: Any) -> int:
    tensors = (value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))
    return sum(_bytes(tensor) for tensor in tensors)


def _bytes(tensor: Tensor) -> int:
    if type(tensor) in (Tensor, Parameter):
        return tensor.numel() * tensor.element_size()
    names, _ = tensor.__tensor_flatten__()  # torchao's quantized states are tensors of tensors
    return sum(_bytes(getattr(tensor, name)) for name in names)


def memory(name: str) -> None:
    """Prints bytes per parameter of the state, and MB that three steps take on top of it."""
    tiny = Parameter(torch.ones(256, 256))  # threads, code and caches are not counted
    tiny.grad = torch.ones_like(tiny)
    OPTIMIZERS[name]([tiny]).step()
    parameters, noise = make_parameters()
    optimizer = OPTIMIZERS[name](parameters)
    for p, g in zip(parameters, noise, strict=True):
        p.grad = g
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what has been freed shall not serve the steps
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = _resident()
    for _ in range(3):
        optimizer.step()
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    state = _state_bytes(optimizer)
    print(state / sum(p.numel() for p in parameters), (int(peak.split()[1]) * 1024 - before - state) / 1e6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--growing", action="store_true")
    parser.add_argument("--default-allocator", action="store_true")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--only", nargs="*", default=list(OPTIMIZERS), help="optimizers to measure, with AdamW fused")
    parser.add_argument("--memory", metavar="NAME", help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # of the others' imports
    if options.memory:
        memory(options.memory)
        return
    allocator = "default" if options.default_allocator else keep_large_blocks()
    torch.manual_seed(0)
    check()
    parameters, noise = make_parameters()
    print(describe())
    millions = sum(p.numel() for p in parameters) / 1e6
    gradients = "growing" if options.growing else "of one size, give or take a tenth"
    print(f"{allocator}; {millions:.2f}M fp32 parameters in {len(SHAPES)} tensors; gradients {gradients}")
    optimizers = made(dict.fromkeys([BASE, *options.only]), parameters)
    with backend("eager" if options.eager else "auto"), rules.spikes_clipped_after(2):
        times = measure(optimizers, parameters, noise, options.rounds, options.growing)
    base = statistics.median(times[BASE])
    for name, values in times.items():
        command = [sys.executable, "-m", "tests.benchmarks.optimizers", "--memory", name]
        state, extra = map(float, subprocess.run(command, capture_output=True, check=True, text=True).stdout.split())
        median = statistics.median(values)
        print(
            f"{name:29} median {median:7.1f} ms (min {min(values):7.1f}) {median / base:6.2f} x fused AdamW"
            f"   state {state:5.2f} bytes per parameter, extra {extra:6.1f} MB"
        )


if __name__ == "__main__":
    main()
