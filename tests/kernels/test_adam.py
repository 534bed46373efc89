"""The optimizers' kernels alone: numbers of 16 bits, what is measured, and chunks."""

import math

import pytest
import torch

from lightning_lowbit.kernels.cpu.adam import CHUNK, CppParameters
from lightning_lowbit.kernels.cpu.library import library
from lightning_lowbit.kernels.shards import DENSE, KINDS, NOTHING, Decision, ParameterShard
from tests.kernels.test_casts import same_bits
from tests.tables import each

pytestmark = pytest.mark.skipif(library() is None, reason="the C++ kernels cannot be built here")


def shard(gradient, weights):
    kinds = (KINDS[weights.dtype], NOTHING if gradient is None else KINDS[gradient.dtype])
    addresses = (weights.data_ptr(), 0 if gradient is None else gradient.data_ptr())
    size = weights.numel()
    return ParameterShard(*addresses, 0, 0, 0, 0, 0, *kinds, DENSE, size, size, size, 1, 0, 0, 0)


def converted(values, dtype):
    target = torch.empty_like(values, dtype=dtype)
    one = torch.ones(1)
    CppParameters([shard(values, target)]).write_clipped(Decision(None, {"factor": one, "ratio": one}))
    return target


@each("dtype", [torch.float16, torch.bfloat16])
def test_numbers_of_16_bits_become_float32_and_are_rounded_as_by_torch(dtype):
    of_16_bits = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    assert same_bits(converted(of_16_bits, torch.float32), numbers := of_16_bits.float())
    middles = (numbers[:-1].double() + numbers[1:].double()).div(2).float()
    neighbors = [torch.nextafter(middles, torch.tensor(sign * math.inf)) for sign in (1, -1)]
    anything = torch.randint(-(2**31), 2**31, (10**5,), dtype=torch.int64).to(torch.int32).view(torch.float32)
    values = torch.cat([numbers, middles, *neighbors, anything])
    assert same_bits(converted(values, dtype), values.to(dtype))


@each("dtype", [torch.float32, torch.bfloat16, torch.float16])
@each("bad", [None, math.nan, math.inf, -math.inf])
def test_amax_of_each_shard(bad, dtype):
    sizes = [0, 1, 15, 17, CHUNK, 2 * CHUNK + 5]
    gradients = [torch.randn(size).to(dtype) for size in sizes]
    if bad is not None:
        gradients[-1][CHUNK + 1] = bad
    weights = [torch.zeros(size) for size in (*sizes, 3)]
    found = CppParameters([shard(*pair) for pair in zip([*gradients, None], weights, strict=True)]).measure()
    wanted = [g.abs().max().item() if g is not None and g.numel() else 0.0 for g in gradients]
    assert found[-1] == -1, f"a shard without gradient has the maximum {found[-1]}"
    assert found[:-1].tolist() == pytest.approx(wanted, rel=0, nan_ok=True), f"maxima are {found}, not {wanted}"


@each("limit", [math.inf, 3.0, 0.0])
@each("unit", [1.0, 1e-3])
def test_squares_after_ada_clip(limit, unit):
    """Where nothing is clipped, sums of the first pass are taken; a unit has all elements read again."""
    gradients = [torch.randn(size) for size in (5, CHUNK, 3 * CHUNK + 77)]
    shards = CppParameters([shard(g, torch.zeros_like(g)) for g in gradients])
    shards.measure()
    given = {"limit": torch.full((3,), limit), "ratio": torch.full((3,), 0.5), "unit": torch.full((3,), unit)}
    taken = torch.tensor([True, False, True])
    squares, changed = shards.squares(Decision("ada_clip", {**given, "taken": taken}))
    for index, gradient in enumerate(gradients):
        spikes = gradient.abs() > limit
        wanted = (torch.where(spikes, gradient * 0.5, gradient).double() / unit).square().sum() * taken[index]
        assert squares[index].item() == pytest.approx(wanted.item(), rel=1e-6)
        assert changed[index] == spikes.sum() * taken[index]
