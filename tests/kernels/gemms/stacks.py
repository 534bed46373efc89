"""Random stacks of GEMMs of codes, by number."""

import random

import torch

from lightning_lowbit.kernels.gemms import multiply, stack_operand
from lightning_lowbit.quant import Hadamard
from lightning_lowbit.quant.call import CastCall
from tests.kernels.gemms.products import CASTS, LAYOUTS, VALUES, Product

COUNTS = [[3, 0, 17], [1], [0, 40, 1, 0], [16, 16, 16, 16], [0, 0, 5], [70, 2, 1, 3, 9]]
SIZES = [(8, 16), (33, 100), (48, 64), (5, 1), (70, 31)]


class Stack(Product):
    def by_loop(self):
        """The products one by one, each by C++."""
        pairs = zip(self.left.products(), self.right.products(), strict=True)
        results = [
            multiply(*pair, None if self.bias is None else self.bias[i], self.dtype) for i, pair in enumerate(pairs)
        ]
        return torch.cat(results) if self.left.call.dim == 1 else torch.stack(results)


def stack(name, counts, sizes, seed=0, values="normal"):
    """A stack of two casts, else at random; ``sizes`` are of the result, and of a contraction along features."""
    torch.manual_seed(seed)
    choose = random.Random(seed).choice
    is_along_rows, narrow = choose([True, False]), choose([torch.float32, torch.bfloat16])
    ends, products = torch.tensor(counts).cumsum(0).tolist(), len(counts)
    device, rotation = torch.device("cpu"), None
    rotates = not any(cast.scale.two_level == "row" or cast.scale.statistic == "absmean" for cast in CASTS[name])
    if rotates and choose([True, False]):
        signs = torch.randint(2**62, (products,))
        rotation = Hadamard(choose([16, 32]), choose(["keyed", "fixed"])).diagonals(signs, device)
    operands = []
    for side, cast in enumerate(CASTS[name]):
        dim = 0 if is_along_rows else 1 if side == 0 else choose([0, 1])
        keys = torch.randint(2**62, (products,))
        if is_along_rows or side == 0:
            x = LAYOUTS[choose([*LAYOUTS])](VALUES[values](torch.randn(ends[-1], sizes[side]).roll(side)).to(narrow))
            if not is_along_rows:
                x = VALUES[values](torch.randn(ends[-1], sizes[1])).to(narrow)
        else:
            matrix = VALUES[values](torch.randn(products * sizes[0], sizes[1])).to(narrow)
            x = matrix.view(products, *sizes)
            x = x if dim == 1 else choose([x.mT, x.mT.contiguous()])
        operands.append(stack_operand(x, CastCall(cast, dim, keys, rotation=rotation), ends))
    bias = choose([None, torch.randn(products, sizes[0]), torch.randn(products, sizes[0]).bfloat16()])
    return Stack(name, *operands, None if is_along_rows else bias, choose([torch.float32, torch.bfloat16]))


def stacks(count, first=0):
    """Stacks by number: all casts in turn, with counts of rows, sizes and values at random."""
    for seed in range(first, first + count):
        choose = random.Random(seed).choice
        yield stack([*CASTS][seed % len(CASTS)], choose(COUNTS), choose(SIZES), seed, choose([*VALUES]))
