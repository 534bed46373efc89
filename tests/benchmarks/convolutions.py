"""What a quantized convolution costs beside torch's own in bfloat16.

    python -m tests.benchmarks.convolutions [--casts nvfp4 int4] [--channels 64 128] [--rounds 9] [--json FILE]

Forward and backward pass of one 3x3 convolution on 32 images of 32x32 pixels in channels-last order under bf16
autocast, in interleaved rounds; medians, and the median of the ratios of a round. Results are compared before they are
timed.
"""

import statistics
from functools import partial

import torch
from torch import nn

from tests.benchmarks.environment import describe, interleaved, keep_large_blocks, parser, passes, quantized, save


def layer(casts: str | None, channels: int) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, bias=False))
    model.to(memory_format=torch.channels_last)
    return model if casts is None else quantized(model, casts)


def check(model: nn.Module, plain: nn.Module, x: torch.Tensor) -> None:
    """Raises where the quantized layer is further from the other than casts to four bits explain."""
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        y, expected = model(x).float(), plain(x).float()
    error = ((y - expected).norm() / expected.norm()).item()
    if not 0 < error < 0.35:
        raise ValueError(f"The relative error of the result is {error:.3f}.")


def main() -> None:
    arguments = parser(__doc__, 9, ["nvfp4", "int4"])
    arguments.add_argument("--channels", nargs="+", type=int, default=[64, 128])
    options = arguments.parse_args()
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
        steps = {name: partial(passes, model, x, g) for name, model in models.items()}
        times = interleaved(steps, options.rounds, warmup=2)
        for name, taken in times.items():
            medians = [statistics.median(each[i] for each in taken) * 1e3 for i in (0, 1)]
            ratio = statistics.median(sum(a) / sum(b) for a, b in zip(taken, times["bf16"], strict=True))
            numbers[f"{name}, {channels} channels"] = ratio
            print(f"| {channels} → {channels} | {name} | {medians[0]:.0f} | {medians[1]:.0f} | {ratio:.2f} |")
    save(options.json, numbers)


if __name__ == "__main__":
    main()
