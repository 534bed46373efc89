"""The forward pass of ternary layers on int8 units, against the emulation and against bf16.

    python -m tests.benchmarks.native.int8 [--tokens 2048] [--rounds 30] [--device cpu]

All in one run, in interleaved rounds, without gradients: ``nn.Linear`` under bf16 autocast; the preset ``ternary`` with
native GEMMs, and emulated; and of these the GEMM alone, of operands that are there. Weights are fp32, and are cast and
quantized anew in each pass. The native outputs are those of ``exact=True`` to the bit, which is checked before anything
is timed. Where a device has no int8 units every row says "not measured".
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from lightning_lowbit import LinearCasts, convert
from lightning_lowbit.nn.core.gemm import matmul, native_obstacle
from lightning_lowbit.quant import quantize_operand
from tests.benchmarks.environment import describe, keep_large_blocks

# The linear layers of LLaMA-60M (Stable-SPAM, table A.1), and one of a larger model.
SHAPES = [(512, 512), (512, 1376), (1376, 512), (2048, 2048)]
COLUMNS = ("nn.Linear", "ternary, native", "ternary, emulated", "GEMM in bf16", "GEMM in int8")


def passes(inputs: int, outputs: int, tokens: int, device: str) -> dict[str, Callable[[], Tensor]]:
    torch.manual_seed(0)
    linear = nn.Linear(inputs, outputs, bias=False, device=device)
    x = torch.randn(tokens, inputs, device=device, dtype=torch.bfloat16)
    native, emulated, exact = (
        convert(copy.deepcopy(linear), "ternary", **how)  # type: ignore[arg-type]
        for how in ({}, {"backend": "emulated"}, {"exact": True})
    )

    def forward(model: nn.Module) -> Tensor:
        with torch.no_grad(), torch.autocast(device, torch.bfloat16):
            y: Tensor = model(x)
        return y

    assert torch.equal(forward(native), forward(exact)), "the native GEMM computes something else"
    casts = LinearCasts.preset("ternary")
    assert casts.fprop_x is not None and casts.fprop_w is not None
    weight = linear.weight.detach().bfloat16()
    pairs = {
        dtype: (
            quantize_operand(x, casts.fprop_x, 1, dtype=dtype),
            quantize_operand(weight, casts.fprop_w, 1, dtype=dtype).t(),
        )
        for dtype in (torch.bfloat16, torch.int8)
    }
    wide, narrow = pairs[torch.bfloat16], pairs[torch.int8]
    functions = (
        lambda: forward(linear),
        lambda: forward(native),
        lambda: forward(emulated),
        lambda: matmul(*wide),
        lambda: matmul(*narrow),
    )
    return dict(zip(COLUMNS, functions, strict=True))


def milliseconds(function: Callable[[], Tensor], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    allocator = keep_large_blocks() if options.device == "cpu" else "torch's caching allocator"
    print(f"{describe(options.device)}; allocator: {allocator}")
    print(f"{options.tokens} tokens, {options.rounds} interleaved rounds, medians; the others relative to nn.Linear\n")
    print(f"| in → out | {COLUMNS[0]}, ms | {' | '.join(COLUMNS[1:])} |")
    print("|---|---|" + "---|" * (len(COLUMNS) - 1))
    obstacle = native_obstacle(torch.device(options.device), "int8")
    for inputs, outputs in SHAPES:
        if obstacle is not None:
            print(f"| {inputs} → {outputs} |" + " not measured |" * len(COLUMNS))
            continue
        functions = passes(inputs, outputs, options.tokens, options.device)
        times: dict[str, list[float]] = {name: [] for name in functions}
        for _ in range(options.rounds):
            for name, function in functions.items():
                times[name].append(milliseconds(function, options.device))
        linear, *others = (statistics.median(values) for values in times.values())
        cells = " | ".join(f"{other / linear:.2f}×" for other in others)
        print(f"| {inputs} → {outputs} | {linear:.2f} | {cells} |", flush=True)
    if obstacle is not None:
        print(f"\n{obstacle}")


if __name__ == "__main__":
    main()
