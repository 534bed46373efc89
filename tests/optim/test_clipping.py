"""The rules one by one: values that can be worked out by hand, edges, and what holds for any input."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_lowbit.optim import passes, rules
from lightning_lowbit.optim.passes import in_pieces
from tests.tables import deterministic, each

PROFILE = deterministic(100)
# Squares of these are no more than a third of what fp32 holds, and those of float64 are far away from its limits.
finite = st.floats(-(2.0**60), 2.0**60, width=32)
vectors = st.lists(finite, min_size=1, max_size=12).map(torch.tensor)


@each(
    ("shape", "rows"),
    [((), [1]), ((1,), [1]), ((8,), [8]), ((9,), [8, 1]), ((5, 3), [2, 2, 1]), ((3, 20), [1, 1, 1]), ((4, 2, 1), [4])],
)
def test_pieces_are_rows_of_at_most_so_many_elements(shape, rows, within):
    within(in_pieces(8))
    tensor = torch.arange(math.prod(shape)).reshape(shape)
    parts = [piece for (piece,) in passes.pieces_of(tensor)]
    assert [len(part) for part in parts] == rows, f"pieces of {shape} have {[len(part) for part in parts]} rows"
    assert torch.equal(torch.cat(parts).reshape(shape), tensor), "the pieces are not the tensor"
    for part in parts:
        part.zero_()
    assert not tensor.any(), "a piece is a copy, not a view"


def test_the_first_tensor_decides_the_rows_of_all(within):
    within(in_pieces(8))
    wide, narrow = torch.arange(20).reshape(5, 4), torch.arange(5)
    shapes = [(tuple(a.shape), tuple(b.shape)) for a, b in passes.pieces_of(wide, narrow)]
    assert shapes == [((2, 4), (2,)), ((2, 4), (2,)), ((1, 4), (1,))]
    with pytest.raises(ValueError):  # of another length
        list(passes.pieces_of(wide, torch.arange(8)))


def test_elsewhere_pieces_are_larger():
    for device, rows in {"cpu": [2**8] * 4, "meta": [2**16, 2**16]}.items():
        zeros = torch.zeros((), device=device).expand(sum(rows), 2**10)
        assert [len(piece) for (piece,) in passes.pieces_of(zeros)] == rows, f"pieces on {device}"


@PROFILE
@given(vectors, st.floats(0, 1))
def test_ada_clip_of_anything(gradient, share):
    maximum = gradient.abs().max()
    threshold = maximum * share
    ratio = torch.where(maximum > threshold, threshold / maximum, 1.0)
    got = rules.AdaClip.clip(gradient, threshold, ratio, None)[0]
    for value, clipped in zip(gradient.tolist(), got.tolist(), strict=True):
        wanted = value * ratio.item() if abs(value) > threshold else value
        assert clipped == pytest.approx(wanted, rel=1e-6, abs=1e-45), f"{value} became {clipped}, not {wanted}"
    assert got.abs().max() <= threshold * (1 + 1e-6), f"{got} exceeds T = {threshold}"


@PROFILE
@given(
    st.lists(st.tuples(finite, st.floats(0, 2.0**100, width=32)), min_size=1), st.sampled_from([0.5, 5000.0, math.inf])
)
def test_spike_clip_of_anything(pairs, factor):
    gradient, v = (torch.tensor(column, dtype=torch.float64) for column in zip(*pairs, strict=True))
    is_spike = (v > 0) & (gradient.square() > factor * v) if math.isfinite(factor) else torch.zeros_like(v).bool()
    expected = torch.where(is_spike, gradient.sign() * (v * (factor if is_spike.any() else 1)).sqrt(), gradient)
    got = rules.SpikeClip.clip(gradient, factor, 1.0, v)[0]
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0, msg=f"θ = {factor}: {got}, not {expected}")
