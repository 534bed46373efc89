"""What a cast costs: nanoseconds per element of each implementation, beside a copy and an amax.

    python -m tests.benchmarks.casts [--casts nvfp4] [--shape 2048 1376] [--rounds 30] [--threads 2] [--json FILE]

All in one run, in interleaved rounds, medians. The amax is given, as layers give it, except for rotated operands. With
``--casts mxfp8`` torchao and microxcaling, where they are installed, cast the same matrix along its rows: to MX and
back, as the operands here are ``elements * scales``.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module

import torch

from lightning_lowbit import LinearCasts
from lightning_lowbit.kernels import amax_of, backend, quantize_operand, rotate
from lightning_lowbit.nn.casts.traits import CONTRACTION, GEMM, OPERANDS
from lightning_lowbit.quant import Cast
from tests.benchmarks.environment import CASTS, describe, interleaved, keep_large_blocks, parser, save

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


def peers(x: torch.Tensor) -> dict[str, dict[str, Callable[[], torch.Tensor]]]:
    """Calls of other packages that cast to MXFP8 along rows, plain and compiled."""

    def by_torchao() -> torch.Tensor:
        mx = import_module("torchao.prototype.mx_formats.mx_tensor")
        return mx.MXTensor.to_mx(x, torch.float8_e4m3fn, 32).dequantize(x.dtype)

    def by_microxcaling() -> torch.Tensor:
        cast = import_module("mx.mx_ops")._quantize_mx
        return cast(x, scale_bits=8, elem_format="fp8_e4m3", axes=[-1], block_size=32)

    found: dict[str, dict[str, Callable[[], torch.Tensor]]] = {}
    for name, call in (("torchao, along rows", by_torchao), ("microxcaling, along rows", by_microxcaling)):
        for backend_name, made in (("eager", call), ("compiled", torch.compile(call))):
            try:
                made()
            except (ImportError, torch._inductor.exc.InductorError) as error:
                print(f"{name}, {backend_name}: not measured ({str(error).splitlines()[0]})")
            else:
                found.setdefault(name, {})[backend_name] = made
    return found


def seconds(call: Callable[[], object], name: str) -> float:
    with backend(name):
        start = time.perf_counter()
        call()
        return time.perf_counter() - start


def main() -> None:
    arguments = parser(__doc__, 30)
    arguments.add_argument("--casts", default="nvfp4", choices=CASTS)
    arguments.add_argument("--shape", type=int, nargs=2, default=[2048, 1376])
    arguments.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{describe()}; allocator: {keep_large_blocks()}; {options.casts}, bf16 {tuple(options.shape)}")
    torch.manual_seed(0)
    x = torch.randn(options.shape).bfloat16()
    calls = measurements(LinearCasts.preset(options.casts), x) | (peers(x) if options.casts == "mxfp8" else {})
    timed = {
        (what, name): partial(seconds, call, name)
        for what, by_backend in calls.items()
        for name, call in by_backend.items()
    }
    times = interleaved(timed, options.rounds, warmup=2)  # two to compile, and to fill caches
    medians = {key: statistics.median(values) / x.numel() * 1e9 for key, values in times.items()}
    print("\n| ns per element | plain | compiled | C++ |\n|---|---|---|---|")
    for what in calls:
        row = [f"{medians[what, name]:.3f}" if (what, name) in medians else "" for name in BACKENDS]
        print(f"| {what} | {' | '.join(row)} |")
    save(options.json, {f"{what} {name}": value for (what, name), value in medians.items()})


if __name__ == "__main__":
    main()
