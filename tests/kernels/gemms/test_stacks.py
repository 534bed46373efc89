"""A stack of GEMMs of codes is one call of C++, which gives the bits of each product alone."""

import random
from itertools import pairwise

import pytest
import torch

from lightning_lowbit.kernels.cpu import gemms as cpp
from lightning_lowbit.kernels.cpu.library import library
from lightning_lowbit.kernels.gemms import code_operand, multiply, stack_operand
from lightning_lowbit.quant import Hadamard
from lightning_lowbit.quant.call import CastCall
from tests.kernels.gemms.products import CASTS, DRAWN, LAYOUTS, NVFP4, VALUES, Product
from tests.kernels.test_casts import same_bits
from tests.tables import each

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


pytestmark = pytest.mark.skipif(library() is None, reason="the C++ kernels cannot be built")


def check(one):
    result = one.by_cpp()
    assert same_bits(result, one.by_loop()), f"the loop: {one}"
    assert same_bits(result, one.by_plain_code()), f"plain code: {one}"


@each("name", CASTS)
def test_a_stack_is_the_loop_and_the_plain_code(name):
    for seed, sizes in enumerate(SIZES):
        check(stack(name, COUNTS[seed], sizes, seed))


@pytest.mark.slow
def test_random_stacks_are_the_loop_and_the_plain_code():
    for one in stacks(1000, 1000):
        check(one)


def test_threads_do_not_change_bits(threads):
    """Whether they share a product with most of the rows, or take products whole."""
    for seed, counts in enumerate(([300, 2, 0, 5], [40] * 7, [0, 1, 250])):
        for name in ("stochastic", "levels of rows"):
            one = stack(name, counts, (90, 160), seed)
            threads(1)
            expected = one.by_cpp()
            for number in (2, 4, 2):
                threads(number)
                assert same_bits(one.by_cpp(), expected), f"{one} with {number} threads"


def test_rows_of_other_products_do_not_change_a_product():
    x, w, ends, results = torch.randn(30, 64), torch.randn(3, 16, 64), [10, 10, 30], []
    for _ in range(2):
        pair = (stack_operand(matrices, CastCall(NVFP4, 1), ends) for matrices in (x, w))
        results.append(multiply(*pair, None, torch.float32)[:10])
        x[10:] *= 1000
    assert torch.equal(*results)


def test_products_without_rows_have_zeros_as_gradients():
    x, g, call = torch.randn(6, 32), torch.randn(6, 16), CastCall(NVFP4, 0)
    for ends in ([0, 6, 6], [0, 0, 0]):
        rows = ends[-1]
        pair = (stack_operand(matrix[:rows], call, ends) for matrix in (g, x))
        result = multiply(*pair, None, torch.float32)
        assert result.shape == (3, 16, 32)
        assert [bool(matrix.any()) for matrix in result] == [start < end for start, end in pairwise([0, *ends])]


X, W = torch.randn(6, 32), torch.randn(3, 8, 32)
CALL, ENDS = CastCall(NVFP4, 1), [2, 2, 6]


@each(
    ("x", "w", "x_call", "ends", "bias"),
    [
        (X, W, CALL, [2, 6], None),
        (X, W, CALL, [2, 1, 6], None),
        (X, W, CALL, [2, 2, 5], None),
        (X, W, CALL, [2, 2, 7], None),
        (X, W, CALL, [-1, 2, 6], None),
        (X, W[:2], CALL, ENDS, None),
        (X, W, CALL, ENDS, torch.randn(8)),
        (X, W, CALL, ENDS, torch.randn(2, 8)),
        (X, W, CastCall(DRAWN, 1, torch.tensor(3)), ENDS, None),
        (X, W, CastCall(DRAWN, 1, torch.arange(2)), ENDS, None),
        (X, W, CastCall(NVFP4, 1, None, rotation=torch.ones(2, 16)), ENDS, None),
        (X, W.mT[:, :6], CastCall(NVFP4, 0), ENDS, None),
    ],
)
def test_operands_that_do_not_fit_are_refused(x, w, x_call, ends, bias):
    right = CastCall(NVFP4, x_call.dim, rotation=x_call.rotation)
    left = stack_operand(x, x_call._replace(key=None), ends)._replace(call=x_call)
    with pytest.raises(ValueError, match=r"A stack of \d products takes ascending ends of all rows.*by stack_operand"):
        multiply(left, stack_operand(w, right, ends), bias, torch.float32)


def test_a_stack_and_the_operand_of_one_product_are_refused():
    alone, together = code_operand(X, CALL), stack_operand(X, CALL, ENDS)
    for left, right in ((alone, stack_operand(W, CALL, ENDS)), (together, code_operand(W[0], CALL))):
        with pytest.raises(ValueError, match="Make both by stack_operand"):
            multiply(left, right, None, torch.float32)


def test_what_the_kernels_do_not_cast_is_multiplied_one_by_one():
    x, w = torch.randn(6, 32), torch.randn(3, 8, 32)
    left, right = (stack_operand(matrix, CALL, ENDS) for matrix in (x.double(), w))
    assert cpp.multiply(left.x, left, right, None, torch.float32) is None
    expected = multiply(stack_operand(x, CALL, ENDS), right, None, torch.float32)
    assert torch.equal(multiply(left, right, None, torch.float32), expected)
