"""What quantized training costs: a linear layer's forward and backward pass, in any preset, against bf16.

    python -m tests.benchmarks.step_overhead [--casts nvfp4 mxfp4] [--tokens 2048 8192] [--width 1024] [--device cpu]
                                            [--backend emulated]

All in one run, in interleaved rounds: ``nn.Linear`` under bf16 autocast, and in float32; the same arithmetic through
this project's autograd function, nothing quantized, as the control; six operands as each preset quantizes them. Weights
are fp32 and are cast and quantized anew in each step. Outputs are checked before anything is timed.
"""

import statistics
import time
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_lowbit import compilation
from lightning_lowbit.nn.core.gemm import no_autocast
from lightning_lowbit.units import has_units
from tests.benchmarks.environment import CASTS, describe, interleaved, keep_large_blocks, parser, quantized

# Inner widths of blocks of LLaMA-60M, 350M and 1B (Stable-SPAM, table A.1), by width.
INNER = {512: 1376, 1024: 2736, 2048: 5461}


def layer(casts: str | None, inputs: int, outputs: int, device: str, backend: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(inputs, outputs, bias=False)).to(device)
    if casts == "float32":
        model[0].forward = partial(float32_linear, weight=model[0].weight)
    elif casts is not None:
        linear = quantized(model, casts, device, backend)[0]  # of bf16 casts too, which would else be a plain nn.Linear
        linear.forward = lambda x: linear.quantized_forward(x, linear.weight, linear.bias)
    return model


def float32_linear(x: Tensor, weight: Tensor) -> Tensor:
    with no_autocast(x.device.type):
        return F.linear(x.float(), weight).to(x.dtype)


def step(model: nn.Module, x: Tensor, gradient: Tensor) -> Tensor:
    x.grad = model[0].weight.grad = None
    with torch.autocast(x.device.type, torch.bfloat16):
        y = model(x)
    y.backward(gradient)
    return y.detach()


def seconds(model: nn.Module, x: Tensor, gradient: Tensor) -> float:
    if x.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    step(model, x, gradient)
    if x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def relative_error(a: Tensor, b: Tensor) -> float:
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


def check(models: dict[str, nn.Module], x: Tensor, gradient: Tensor) -> None:
    """The control is nn.Linear, bitwise but for CPUs where it sums in float32's order; compiled casts are bitwise eager
    ones; results are off as few bits are."""
    results = {name: step(model, x, gradient) for name, model in models.items()}
    plain, first = results["linear"], models["linear"][0].weight.grad
    for name, result in (("control", results["control"]), ("float32", results["float32"])):
        second = models[name][0].weight.grad
        same = name == "control" and has_units(torch.bfloat16, x.device)
        for one, other in ((plain, result), (first, second)):
            assert torch.equal(one, other) if same else relative_error(one, other) < 0.01, f"{name} is something else"
    for name in list(models)[3:]:
        error = relative_error(results[name], plain)
        least, most = 0.001 if name in ("int7", "int8") else 0.01, 1.2 if name in ("int2", "int3", "ternary") else 0.3
        assert least < error < most, f"{name} is off by {error}"
        with compilation.backend("eager"):
            assert torch.equal(results[name], step(models[name], x, gradient)), f"{name}: compiled and eager differ"


def main() -> None:
    arguments = parser(__doc__, 20)
    arguments.add_argument("--casts", nargs="+", default=["nvfp4"], choices=[*CASTS, "all"], metavar="PRESET")
    arguments.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192])
    arguments.add_argument("--width", type=int, default=512, choices=INNER)
    arguments.add_argument("--device", default="cpu")
    arguments.add_argument("--backend", default="auto", choices=["auto", "native", "emulated"])
    options = arguments.parse_args()
    casts: dict[str, str | None] = {"linear": None, "float32": "float32", "control": "bf16"}
    casts |= {name: name for name in (CASTS if "all" in options.casts else options.casts)}
    allocator = keep_large_blocks() if options.device == "cpu" else "torch's caching allocator"
    print(f"{describe(options.device)}; allocator: {allocator}")
    print(
        f"{options.rounds} interleaved rounds, medians; nn.Linear in bf16 autocast in ms, the others relative to it\n"
    )
    print(f"| tokens | in → out | nn.Linear, ms | {' | '.join(list(casts)[1:])} |")
    print("|---|---|---|" + "---|" * (len(casts) - 1))
    width, inner = options.width, INNER[options.width]
    shapes = [(4, width, width), (2, width, inner), (1, inner, width)]  # how many, in_features, out_features
    for tokens in options.tokens:
        block = dict.fromkeys(casts, 0.0)
        for count, inputs, outputs in shapes:
            models = {
                key: layer(value, inputs, outputs, options.device, options.backend) for key, value in casts.items()
            }
            x = torch.randn(tokens, inputs, device=options.device, dtype=torch.bfloat16).requires_grad_()
            gradient = torch.randn(tokens, outputs, device=options.device, dtype=torch.bfloat16)
            check(models, x, gradient)
            calls = {key: partial(seconds, model, x, gradient) for key, model in models.items()}
            times = interleaved(calls, options.rounds)
            medians = {key: statistics.median(values) * 1e3 for key, values in times.items()}
            for key, value in medians.items():
                block[key] += count * value
            print(row(tokens, f"{inputs} → {outputs}", medians))
        print(row(tokens, "block (7 layers)", block), flush=True)


def row(tokens: int, shape: str, ms: dict[str, float]) -> str:
    linear, *others = ms.values()
    return f"| {tokens} | {shape} | {linear:.2f} | {' | '.join(f'{other / linear:.2f}×' for other in others)} |"


if __name__ == "__main__":
    main()
