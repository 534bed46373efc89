"""A stack of linear layers, and the same matrices as layers of their own."""

import torch
from torch import nn

from lightning_lowbit import convert
from lightning_lowbit.nn import AmaxHistories, GroupedLinear, LayerKeys
from lightning_lowbit.nn.core.calls import keys_of_product
from tests.nn.layers import pass_through

EXPERTS, INNER, OUT = 5, 48, 32
ENDS = [7, 7, 40, 41, 77]  # one expert has no rows, and one has one
ROWS = 80  # three of which belong to none


def stack(bias=True):
    torch.manual_seed(0)
    return GroupedLinear(EXPERTS, INNER, OUT, bias)


def loop(of):
    layers = nn.ModuleList(nn.Linear(INNER, OUT, bias=of.bias is not None) for _ in range(EXPERTS))
    for i, layer in enumerate(layers):
        layer.load_state_dict({name: parameter[i] for name, parameter in of.state_dict().items()})
    return layers


def converted(casts, bias=True, **kwargs):
    """A converted stack with keys, and layers whose keys are those of its experts."""
    together = stack(bias)
    apart = convert(loop(together), casts, **kwargs)
    convert(together, casts, **kwargs)
    LayerKeys(together, seed=1).fill_(3)
    for i, layer in enumerate(apart):
        layer.lowbit.keys = keys_of_product(together.lowbit.keys, i)
    AmaxHistories(together), AmaxHistories(apart)
    return together, apart


def inputs(rows=ROWS):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, INNER, generator=generator), torch.randn(rows, OUT, generator=generator)


def run(compute, model, x, g, autocast=False):
    """Output and gradients, those of experts that were not called as zeros; of separate layers as stacks."""
    results = pass_through(model, x, g, compute, autocast)
    gradients = {}
    for name, p in model.named_parameters():
        gradient = results.pop(name)
        gradients.setdefault(name.rpartition(".")[2], []).append(torch.zeros_like(p) if gradient is None else gradient)
    return {**results, **{name: torch.stack(all_) if len(all_) > 1 else all_[0] for name, all_ in gradients.items()}}


def run_stack(layer, x, g, ends=ENDS, autocast=False):
    return run(lambda x: layer(x, torch.tensor(ends, dtype=torch.int32)), layer, x, g, autocast)


def run_loop(layers, x, g, ends=ENDS, autocast=False):
    def compute(x):
        bounds = [0, *ends, len(x)]
        *parts, rest = (x[start:end] for start, end in zip(bounds, bounds[1:], strict=False))
        results = [layer(part) for layer, part in zip(layers, parts, strict=True) if len(part)]
        return torch.cat([*results, results[0].new_zeros(len(rest), OUT)])

    return run(compute, layers, x, g, autocast)
