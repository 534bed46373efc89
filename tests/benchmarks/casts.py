"""What a cast costs: nanoseconds per element of each implementation, beside a copy and an amax.

    python -m tests.benchmarks.casts [--casts nvfp4] [--shape 2048 1376] [--rounds 30] [--threads 2] [--json FILE]

All in one run, in interleaved rounds, medians. The amax is given, as layers give it, except for rotated operands.
"""

import argparse
import statistics
import time
from functools import partial

import torch

from lightning_lowbit import LinearCasts
from lightning_lowbit.kernels import amax_of, backend, quantize_operand, rotate
from lightning_lowbit.nn import PRESETS
from lightning_lowbit.nn.plan import CONTRACTION, GEMM, OPERANDS
from lightning_lowbit.quant import Cast
from tests.benchmarks.environment import describe, keep_large_blocks, save

BACKENDS = ("eager", "compiled", "cpp")


def measurements(casts: LinearCasts, x: torch.Tensor) -> dict[str, dict[str, object]]:
    """By operand, a call without arguments for each implementation."""
    key, target, calls = torch.tensor(2**40 + 1), torch.empty_like(x), {}
    calls["copy_"] = {"eager": lambda: target.copy_(x)}
    calls["amax"] = {name: lambda: amax_of(x) for name in ("eager", "cpp")}
    for operand in OPERANDS:
        if isinstance(cast := getattr(casts, operand), Cast):
            rotation, given = casts.hadamard.get(GEMM[operand]), None
            signs = None if rotation is None else rotation.diagonal(key, x.device)
            if cast.scale.needs_amax and rotation is None:
                given = amax_of(x)
            call = partial(quantize_operand, x, cast, CONTRACTION[operand], key, given, rotation=signs)
            calls[operand] = dict.fromkeys(BACKENDS, call)
            if signs is not None:
                calls[f"{operand}, of that the rotation"] = dict.fromkeys(
                    ("eager", "cpp"), partial(rotate, x, signs, CONTRACTION[operand])
                )
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--casts", default="nvfp4", choices=[name for name in PRESETS if name != "bf16"])
    parser.add_argument("--shape", type=int, nargs=2, default=[2048, 1376])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{describe()}; allocator: {keep_large_blocks()}; {options.casts}, bf16 {tuple(options.shape)}")
    torch.manual_seed(0)
    x = torch.randn(options.shape).bfloat16()
    calls = measurements(LinearCasts.preset(options.casts), x)
    times: dict[tuple[str, str], list[float]] = {}
    for round in range(options.rounds + 2):  # two to compile, and to fill caches
        for what, by_backend in calls.items():
            for name, call in by_backend.items():
                with backend(name):
                    start = time.perf_counter()
                    call()
                    taken = time.perf_counter() - start
                if round >= 2:
                    times.setdefault((what, name), []).append(taken / x.numel() * 1e9)
    medians = {key: statistics.median(values) for key, values in times.items()}
    print("\n| ns per element | plain | compiled | C++ |\n|---|---|---|---|")
    for what in calls:
        row = [f"{medians[what, name]:.3f}" if (what, name) in medians else "" for name in BACKENDS]
        print(f"| {what} | {' | '.join(row)} |")
    save(options.json, {f"{what} {name}": value for (what, name), value in medians.items()})


if __name__ == "__main__":
    main()
