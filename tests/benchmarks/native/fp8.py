"""Native FP8 against bf16 and against torchao's float8: a linear layer, forward alone and with its backward pass.

    python -m tests.benchmarks.native.fp8 [--sizes 2048 4096 8192] [--tokens 8192] [--rounds 20]

Needs a GPU with FP8 tensor cores; elsewhere every row says "not measured". All in one run, in interleaved rounds: a
bf16 ``nn.Linear`` d → d; this project's ``fp8-delayed``, ``fp8-current`` and ``fp8-row`` with native GEMMs; torchao's
``tensorwise`` and ``rowwise`` (where it is installed: ``pip install torchao``), compiled, as it advises. Weights are
bf16, and are cast in each step. Before anything is timed the outputs are held against bf16, and the native ones against
emulated ones.
"""

import argparse
import copy
import statistics
from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from lightning_lowbit import convert
from lightning_lowbit.nn import AmaxHistories
from lightning_lowbit.nn.core.gemm import native_obstacle
from tests.benchmarks.environment import describe
from tests.benchmarks.step_overhead import relative_error

OURS = ("fp8-delayed", "fp8-current", "fp8-row")
TORCHAO = ("tensorwise", "rowwise")
# Calls between two events: the device is to be busy, and launches are to hide behind it, as in training.
REPEATS = 10


def ours(original: nn.Module, casts: str, backend: str) -> nn.Module:
    model = convert(copy.deepcopy(original), casts, backend=backend)
    histories = AmaxHistories(model)
    histories.to_(torch.device("cuda"))
    return model


def torchao(original: nn.Module, recipe: str) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    model: nn.Module = torch.compile(convert_to_float8_training(copy.deepcopy(original), config=config))
    return model


def both_passes(model: nn.Module, x: Tensor, g: Tensor) -> Tensor:
    model.zero_grad()
    x.grad = None
    y: Tensor = model(x)
    y.backward(g)
    return y.detach()


def milliseconds(function: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(REPEATS):
        function()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / REPEATS


def check(models: dict[str, nn.Module], original: nn.Module, x: Tensor, g: Tensor) -> None:
    expected = both_passes(models["bf16"], x, g)
    for name in list(models)[1:]:
        error = relative_error(both_passes(models[name], x, g), expected)
        assert 0.005 < error < 0.1, f"{name} is off by {error}"
    for casts in OURS:
        emulated = both_passes(ours(original, casts, "emulated"), x, g)
        error = relative_error(both_passes(ours(original, casts, "native"), x, g), emulated)
        assert error < 0.01, f"{casts}: native and emulated differ by {error}"


def measure(size: int, tokens: int, rounds: int) -> dict[str, tuple[float, float]]:
    """Medians in ms by name, of the forward pass and of both."""
    torch.manual_seed(0)
    original = nn.Sequential(nn.Linear(size, size, bias=False)).to("cuda", torch.bfloat16)
    x = torch.randn(tokens, size, device="cuda", dtype=torch.bfloat16).requires_grad_()
    g = torch.randn(tokens, size, device="cuda", dtype=torch.bfloat16)
    models = {"bf16": original, **{casts: ours(original, casts, "native") for casts in OURS}}
    if find_spec("torchao") is not None:
        models |= {f"torchao {recipe}": torchao(original, recipe) for recipe in TORCHAO}
    check(models, original, x, g)
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in models}
    for _ in range(rounds):
        for name, model in models.items():
            forward, both = times[name]
            forward.append(milliseconds(lambda model=model: model(x)))  # type: ignore[misc]
            both.append(milliseconds(lambda model=model: both_passes(model, x, g)))  # type: ignore[misc]
    return {name: (statistics.median(forward), statistics.median(both)) for name, (forward, both) in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    names = [*OURS, *(f"torchao {recipe}" for recipe in TORCHAO)]
    obstacle = native_obstacle(torch.device("cuda" if torch.cuda.is_available() else "cpu"), "fp8")
    print(f"{describe('cuda' if torch.cuda.is_available() else 'cpu')}{f'; {obstacle}' if obstacle else ''}")
    print(f"{options.tokens} tokens; {options.rounds} interleaved rounds of {REPEATS} calls, medians; bf16 in ms, the")
    print("others relative to it in speed\n")
    print(f"| d → d | pass | bf16, ms | {' | '.join(names)} |")
    print("|---|---|---|" + "---|" * len(names))
    for size in options.sizes:
        found = {} if obstacle else measure(size, options.tokens, options.rounds)
        for i, what in enumerate(("forward", "forward and backward")):
            cells = [f"{found['bf16'][i] / found[name][i]:.2f}×" if name in found else "not measured" for name in names]
            base = f"{found['bf16'][i]:.3f}" if found else "not measured"
            print(f"| {size} | {what} | {base} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
