"""One of the processes that compute one layer together.

Each computes the whole layer, too, and says where its part of the other one differs.
"""

import copy
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_lowbit import LinearCasts, convert
from lightning_lowbit.compilation import backend
from lightning_lowbit.nn import OPERANDS, AmaxHistories, LayerKeys, QuantizedLayer
from lightning_lowbit.quant.statistics import MAXIMA, SAMPLE, SUMS, merge_statistics_
from tests.distributed.spreads import full
from tests.launch import refusal
from tests.nn.layers import pass_through, remember, spied, token_amax, value
from tests.nn.named_casts import CASTS, REMEMBERED

RANKS, TOKENS = 2, 32
STYLES = {"column": ColwiseParallel, "row": RowwiseParallel}

# Which dimension of x, w and g each style cuts.
CUT = {"column": {"w": 0, "g": 1}, "row": {"x": 1, "w": 1}}

# Scales of tensors and rows alone: any size will do, also one of which some processes get less, or nothing. DTensor
# itself asks for even parts where they are handed over, so that all are given the whole x.
UNEVEN = ("fp8-current", "rows", "ternary", "rows, powers of two", "channels")
SIZES = {"uneven": (7, 5), "empty": (1, 1)}

# By name: casts, style, sizes, and whether it is converted before it is cut, and runs under autocast.
RUNS = {
    f"{name}, {style}": (casts, style, (256, 256), number % 2 == 0, number % 5 == 0)
    for number, (name, casts) in enumerate(CASTS.items())
    for style in STYLES
} | {
    f"{name}, {style}, {size}": (CASTS[name], style, sizes, True, False)
    for size, sizes in SIZES.items()
    for name in UNEVEN
    for style in STYLES
}


def part(tensor, dim):
    """What of a matrix this rank holds."""
    if dim is None:
        return tensor
    parts = torch.chunk(tensor, RANKS, dim)
    rank = torch.distributed.get_rank()
    return parts[rank] if rank < len(parts) else tensor.narrow(dim, 0, 0)


def passes(layer, x, g, tokens, autocast):
    """A forward and a backward pass: the operands, and y and the gradients."""
    if layer.casts.smooth == "token":
        layer.lowbit.token_amax = tokens
    with spied() as seen:
        results = pass_through(layer, x, g, autocast=autocast)
    return {name: value(operand) for name, operand in seen.items()}, {
        name: tensor.to_local() if isinstance(tensor, DTensor) else tensor for name, tensor in results.items()
    }


def statistics(layer, cut, is_whole):
    """What a watched layer has seen of its operands, of all processes together, ``[6, 8]``."""
    sums = layer.lowbit.operand_sums.clone()
    if is_whole:
        return sums
    others = [torch.empty_like(sums) for _ in range(RANKS)]
    torch.distributed.all_gather(others, sums)
    for row, operand in enumerate(OPERANDS):
        if operand[-1] in cut:
            sums[row] = others[0][row]
            for other in others[1:]:
                merge_statistics_(sums[row], other[row])
    return sums


def prepare(layer):
    LayerKeys(layer, 1).fill_(3)
    AmaxHistories(layer)
    remember(layer, *REMEMBERED)


def differences(casts, style, sizes, early, autocast):
    """Of what this rank computes from what it would of the whole; none if all is well."""
    mesh, told = init_device_mesh("cpu", (RANKS,)), []
    torch.manual_seed(5)
    whole = nn.Linear(*sizes)
    x, g = torch.randn(2, TOKENS // 2, sizes[0]), torch.randn(2, TOKENS // 2, sizes[1])
    spread = copy.deepcopy(whole)
    if early:
        convert(spread, casts)
    is_even = all(size % RANKS == 0 for size in sizes)
    made = STYLES[style]() if is_even else STYLES[style](input_layouts=Replicate(), output_layouts=Replicate())
    parallelize_module(spread, mesh, made)
    for layer in (whole, spread):
        prepare(convert(layer, casts))
        layer.lowbit.operand_sums = torch.zeros(len(OPERANDS), len(SUMS) + len(MAXIMA), dtype=torch.float64)
    cut = CUT[style]
    tokens = token_amax(x)
    operands, results = passes(whole, x, g, tokens, autocast)
    own = part(tokens.expand(-1, RANKS), 1)[:, :1] / (1 if torch.distributed.get_rank() == 0 else 8)
    own = own if style == "row" else tokens
    local = {name: part(t, 2 if name in cut and is_even else None) for name, t in (("x", x), ("g", g))}
    found_operands, found = passes(spread, local["x"], local["g"], own, autocast)
    for name, expected in operands.items():
        mine = part(expected, cut.get(name[-1]))
        if not torch.equal(found_operands[name], mine):
            off = (found_operands[name] != mine).sum() if found_operands[name].shape == mine.shape else "all"
            told.append(f"{name}: {off} of {mine.numel()} elements")
    last = {"y": 2 if style == "column" else None, "x": 2 if style == "row" else None}
    last = last if is_even else {"y": None, "x": None}
    last |= {"weight": cut["w"], "bias": 0 if style == "column" else None}
    coarse = 2.0**-7 if autocast else 2.0**-20  # sums are made in another order, in bf16 of rounded terms
    for name, expected in results.items():
        mine, size = part(expected, last[name]), expected.abs().max()
        if found[name].shape != mine.shape or (found[name] - mine).abs().gt(4 * coarse * size).any():
            off = (found[name] - mine).abs().max() if found[name].shape == mine.shape else "all"
            told.append(f"{name}: {tuple(found[name].shape)} for {tuple(mine.shape)}, off by {off} of {size}")
    seen, expected_sums = statistics(spread, cut, False), statistics(whole, cut, True)
    for row, operand in enumerate(OPERANDS):
        # Of large weights a sample is looked at, of parts another one than of the whole.
        if operand[-1] != "w" or whole.weight.numel() <= SAMPLE:
            close = torch.isclose(seen[row], expected_sums[row], rtol=1e-5, atol=0)
            if not close.all():
                told.append(f"statistics of {operand}: {seen[row].tolist()} for {expected_sums[row].tolist()}")
    staged = (layer.lowbit.amaxes.staged for layer in (spread, whole) if layer.lowbit.amaxes is not None)
    if len({tuple(row.tolist()) for row in staged}) > 1:
        told.append("other amaxes are staged")
    return told


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(6)
        self.norm, self.gate_proj, self.up_proj = nn.LayerNorm(64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.down_proj = nn.Linear(64, 64)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


def compiled():
    """Of generated code, largest relative differences of gradients from those of eager code, for two sizes of x."""
    plan = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
    models = [parallelize_module(MLP(), init_device_mesh("cpu", (RANKS,)), plan) for _ in range(2)]
    for model in models:
        prepare(convert(model, "nvfp4"))
    models[1].compile()
    told = {}
    for tokens in (16, 32):  # from the second one on the code is that of any size
        x, gradients = torch.randn(tokens, 64), []
        for model in models:
            model.zero_grad()
            own = x.clone().requires_grad_()
            model(own).square().sum().backward()
            gradients.append({"x": own.grad, **{name: full(p.grad) for name, p in model.named_parameters()}})
        for name, expected in gradients[0].items():
            told[f"{name}, {tokens} tokens"] = float((gradients[1][name] - expected).abs().max() / expected.abs().max())
    return told


def run_parallel(sizes, style, casts):
    """Of a layer that cannot be parallelized."""
    layer = nn.Linear(*sizes)
    parallelize_module(layer, init_device_mesh("cpu", (RANKS,)), STYLES[style]())
    prepare(convert(layer, casts))
    layer(part(torch.randn(TOKENS, sizes[0]), 1 if "x" in CUT[style] else None)).sum().backward()


def plain_input():
    layer = parallelize_module(nn.Linear(32, 32), init_device_mesh("cpu", (RANKS,)), ColwiseParallel())
    prepare(convert(layer, "nvfp4"))
    QuantizedLayer.forward(layer, torch.randn(4, 32))


@backend("cpp")
def work():
    rotated = LinearCasts.preset("fp8-current").replace(hadamard={"fprop": 64})
    return {
        "differences": {case: differences(*RUNS[case]) for case in sys.argv[3:] if case in RUNS},
        "compiled": compiled() if "compiled" in sys.argv[3:] else {},
        "refused": {
            "blocks": refusal(run_parallel, (80, 64), "row", "nvfp4"),
            "tiles": refusal(run_parallel, (64, 80), "column", "nvfp4-nvidia"),
            "groups": refusal(run_parallel, (96, 64), "row", rotated),
            "plain": refusal(plain_input),
        },
    }
