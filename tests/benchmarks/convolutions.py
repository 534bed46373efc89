"""What a quantized convolution costs beside torch's own in bfloat16.

    python -m tests.benchmarks.convolutions [--casts nvfp4 int4] [--channels 64 128] [--rounds 9] [--json FILE]

Forward and backward pass of one 3x3 convolution on 32 images of 32x32 pixels in channels-last order under bf16
autocast, in interleaved rounds; medians, and the median of the ratios of a round. Results are compared before they are
timed.
"""

import argparse
import statistics
import time

import torch
from torch import nn

from lightning_lowbit import convert
from lightning_lowbit.nn import PRESETS, AmaxHistories, LayerKeys
from tests.benchmarks.environment import describe, keep_large_blocks, save


def layer(casts: str | None, channels: int) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, bias=False))
    model.to(memory_format=torch.channels_last)
    if casts is not None:
        LayerKeys(convert(model, casts)).fill_(0)
        AmaxHistories(model).to_(torch.device("cpu"))
    return model


def step(model: nn.Module, x: torch.Tensor, g: torch.Tensor) -> tuple[float, float]:
    start = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    middle = time.perf_counter()
    y.backward(g)
    return middle - start, time.perf_counter() - middle


def check(model: nn.Module, plain: nn.Module, x: torch.Tensor) -> None:
    """Raises where the quantized layer is further from the other than casts to four bits explain."""
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        y, expected = model(x).float(), plain(x).float()
    error = ((y - expected).norm() / expected.norm()).item()
    if not 0 < error < 0.35:
        raise ValueError(f"The relative error of the result is {error:.3f}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    presets = [name for name in PRESETS if name != "bf16"]
    parser.add_argument("--casts", nargs="+", default=["nvfp4", "int4"], choices=presets, metavar="PRESET")
    parser.add_argument("--channels", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json")
    options = parser.parse_args()
    print(f"{describe()}; memory: {keep_large_blocks()}; 32 images of 32x32\n")
    print("| channels | | forward, ms | backward, ms | both, of bf16's |")
    print("|---|---|---|---|---|")
    numbers = {}
    for channels in options.channels:
        x = torch.randn(32, channels, 32, 32).bfloat16().to(memory_format=torch.channels_last).requires_grad_()
        g = torch.randn(32, channels, 32, 32).bfloat16().to(memory_format=torch.channels_last)
        models = {"bf16": layer(None, channels), **{name: layer(name, channels) for name in options.casts}}
        for name in options.casts:
            check(models[name], models["bf16"], x)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
        for round in range(options.rounds + 2):
            for name, model in models.items():
                taken = step(model, x, g)
                if round >= 2:
                    times[name].append(taken)
        for name, taken in times.items():
            passes = [statistics.median(each[i] for each in taken) * 1e3 for i in (0, 1)]
            ratio = statistics.median(sum(a) / sum(b) for a, b in zip(taken, times["bf16"], strict=True))
            numbers[f"{name}, {channels} channels"] = ratio
            print(f"| {channels} → {channels} | {name} | {passes[0]:.0f} | {passes[1]:.0f} | {ratio:.2f} |")
    save(options.json, numbers)


if __name__ == "__main__":
    main()
