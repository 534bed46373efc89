"""What a quantized stack of experts costs against a loop of linear layers in bf16.

    python -m tests.benchmarks.experts [--casts nvfp4 fp8-current] [--experts 16] [--in 512] [--out 1024]
                                       [--tokens 64 256] [--rounds 20] [--cpu-time] [--json FILE]

Forward and backward pass under bf16 autocast, interleaved, medians and ratios. Each expert gets a number of tokens
between the two that are given. One side is an ``nn.Linear`` per expert, called one by one; another the same linear
layers converted; the third the converted ``GroupedLinear``, whose results are checked to equal those of the second.
``--cpu-time`` counts the time of this process on its cores, which others on the machine hardly change.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from lightning_lowbit import convert
from lightning_lowbit.nn import GroupedLinear, LayerKeys
from lightning_lowbit.nn.core.calls import keys_of_product
from tests.benchmarks.environment import describe, interleaved, keep_large_blocks, parser, passes, save


class Loop(nn.Module):
    """An ``nn.Linear`` per expert, of the weights of a stack."""

    def __init__(self, stack: GroupedLinear) -> None:
        super().__init__()
        experts, out, inner = stack.weight.shape
        self.layers = nn.ModuleList(nn.Linear(inner, out, bias=False) for _ in range(experts))
        for layer, weight in zip(self.layers, stack.weight, strict=True):
            layer.weight.data.copy_(weight.data)

    def forward(self, x: Tensor, ends: list[int]) -> Tensor:
        parts = x.split([end - start for start, end in zip((0, *ends), ends, strict=False)])
        return torch.cat([layer(part) for layer, part in zip(self.layers, parts, strict=True)])


def step(
    model: Callable[..., Tensor], x: Tensor, g: Tensor, ends: list[int], now: Callable[[], float] = time.perf_counter
) -> tuple[float, float, Tensor]:
    model.zero_grad()  # type: ignore[attr-defined]
    x = x.clone().requires_grad_()
    return *passes(model, x, g, ends, now=now), x.grad


def sides(casts: str, experts: int, inner: int, out: int) -> dict[str, nn.Module]:
    stack = GroupedLinear(experts, inner, out, bias=False)
    plain, apart = Loop(stack), convert(Loop(stack), casts)
    LayerKeys(convert(stack, casts)).fill_(0)
    for i, layer in enumerate(apart.layers):
        layer.lowbit.keys = keys_of_product(stack.lowbit.keys, i)
    return {"bf16 loop": plain, "quantized loop": apart, "stack": stack}


def main() -> None:
    arguments = parser(__doc__, 20, ["nvfp4"])
    arguments.add_argument("--experts", type=int, default=16)
    arguments.add_argument("--in", type=int, default=512, dest="inner")
    arguments.add_argument("--out", type=int, default=1024)
    arguments.add_argument("--tokens", type=int, nargs=2, default=[64, 256], metavar=("LEAST", "MOST"))
    arguments.add_argument("--cpu-time", action="store_true")
    args = arguments.parse_args()
    memory, now = keep_large_blocks(), time.process_time if args.cpu_time else time.perf_counter
    torch.manual_seed(0)
    sizes = torch.linspace(*args.tokens, args.experts).long()
    ends = sizes[torch.randperm(args.experts)].cumsum(0).tolist()
    x, g = torch.randn(ends[-1], args.inner), torch.randn(ends[-1], args.out, dtype=torch.bfloat16)
    print(f"{describe()}; {memory}")
    print(f"{args.experts} experts, {args.inner} -> {args.out}, {ends[-1]} tokens; forward + backward in ms\n")
    numbers = {}
    for casts in args.casts:
        models = sides(casts, args.experts, args.inner, args.out)
        gradients = {name: step(model, x, g, ends)[2] for name, model in models.items()}
        assert torch.equal(gradients["quantized loop"], gradients["stack"])
        steps = interleaved(
            {name: partial(step, model, x, g, ends, now) for name, model in models.items()}, args.rounds
        )
        medians = {
            name: [1e3 * statistics.median(taken[i] for taken in rounds) for i in (0, 1)]
            for name, rounds in steps.items()
        }
        base = sum(medians["bf16 loop"])
        for name, (forward, backward) in medians.items():
            ratio = (forward + backward) / base
            numbers[f"{casts}/{name}"] = ratio
            print(f"{casts:14} {name:16} {forward:8.2f} + {backward:8.2f}   {ratio:5.2f} times the loop in bf16")
    save(args.json, numbers)


if __name__ == "__main__":
    main()
