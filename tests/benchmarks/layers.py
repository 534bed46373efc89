"""What a small quantized layer costs beside arithmetic: host time and operations that would be launches on a GPU.

    python -m tests.benchmarks.layers [--casts nvfp4 mxfp8] [--size 256] [--rounds 300] [--json FILE]

Forward and backward pass of one ``nn.Linear`` of size x size, with as many tokens, under bf16 autocast on one thread,
in interleaved rounds, medians; above those of the unquantized layer. An operation counts as a launch if it computes or
copies: views, allocations and, on a CPU, reading a number do not. GEMMs are not counted, calls of kernels are. Launches
are counted at 512 x 512: of smaller matrices each cast measures its own amax, on CPUs alone.
"""

import statistics

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from lightning_lowbit.kernels import operands
from lightning_lowbit.nn import LayerKeys
from tests.benchmarks.environment import describe, interleaved, parser, passes, quantized, save

# Operations that launch nothing on a GPU.
FREE = """
    view as_strided t transpose reshape expand unsqueeze squeeze slice select detach permute alias flatten to item
    empty empty_strided empty_like new_empty resize_ resolve_conj is_same_size lift_fresh
    _unsafe_view _reshape_alias _local_scalar_dense
"""


class Layer:
    """One layer with an input; ``casts`` is None for an unquantized one."""

    def __init__(self, casts: str | None, size: int) -> None:
        self.model = nn.Sequential(nn.Linear(size, size, bias=False))
        self.x, self.g = torch.randn(size, size, requires_grad=True), torch.ones(size, size, dtype=torch.bfloat16)
        self.keys = None if casts is None else LayerKeys(quantized(self.model, casts))

    def begin(self) -> None:
        """A micro-batch; once for all layers of a model, so neither timed nor counted."""
        if self.keys is not None:
            self.keys.fill_(0)

    def step(self) -> tuple[float, float]:
        self.begin()
        return passes(self.model, self.x, self.g)


def launches(casts: str | None) -> tuple[int, int]:
    """Operations of torch that would be launches, and calls of kernels, of a step that adds to gradients."""
    calls, original, layer = 0, operands.cpp.library(), Layer(casts, 512)
    layer.step()

    class Counting:
        def __getattr__(self, name):
            nonlocal calls
            calls += 1
            return getattr(original, name)

    operands.cpp.library = lambda: Counting()
    try:
        layer.begin()
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            passes(layer.model, layer.x, layer.g)
    finally:
        operands.cpp.library = operands.library
    leaves = [
        event.name.removeprefix("aten::")
        for event in profiled.events()
        if event.name.startswith("aten::") and not any(child.name.startswith("aten::") for child in event.cpu_children)
    ]
    return sum(name not in FREE.split() for name in leaves), calls


def main() -> None:
    arguments = parser(__doc__, 300, ["nvfp4", "mxfp8", "fp8-delayed"])
    arguments.add_argument("--size", type=int, default=256)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    print(f"{describe()}; {options.size} tokens, {options.size} → {options.size}\n")
    casts = {"nn.Linear": None, **{name: name for name in options.casts}}
    layers = {name: Layer(preset, options.size) for name, preset in casts.items()}
    times = interleaved({name: layer.step for name, layer in layers.items()}, options.rounds, warmup=20)
    numbers = {}
    print("| | forward, µs | backward, µs | above nn.Linear, µs | launches | kernels among them |")
    print("|---|---|---|---|---|---|")
    for name, preset in casts.items():
        medians = [statistics.median(taken[i] for taken in times[name]) * 1e6 for i in (0, 1)]
        numbers[name] = sum(medians)
        of_torch, of_kernels = launches(preset)
        numbers[f"{name}, launches"] = of_torch + of_kernels
        row = [*medians, numbers[name] - numbers["nn.Linear"], of_torch + of_kernels, of_kernels]
        print(f"| {name} | {' | '.join(f'{number:.0f}' for number in row)} |")
    save(options.json, numbers)


if __name__ == "__main__":
    main()
