"""Moments in FP8: codes, scales and random bits, against a slow reference."""

import math

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from lightning_lowbit.compilation import backend
from lightning_lowbit.optim import LowBitAdamW
from lightning_lowbit.optim.moments import NAMES, FP8Moments, _encode_moment, _fake_encoded
from lightning_lowbit.optim.passes import in_pieces
from tests.optim.moments.helpers import draw, elements, heavy_tailed, kept
from tests.references import moments as reference
from tests.tables import each

SHAPES = [(3, 130), (5, 1), (2, 127), (2, 129), (3, 256), (0, 5), (2, 3, 130), (2, 2, 2, 129)]


@each("shape", SHAPES)
def test_fp8_is_the_reference(shape):
    values = heavy_tailed(shape)
    piece = kept(values, values.square(), draw(shape, step=7, number=2))
    loaded = FP8Moments().load(piece)
    for moment, (name, given) in enumerate(zip(NAMES, (values, values.square()), strict=True)):
        numbers, scales = elements(piece.state, name), piece.state[f"{name}_scale"].double().numpy()
        wanted = reference.encode(given, reference.draws(shape, 7, 2, moment), name)
        assert np.array_equal(scales, wanted.scales), f"{name}: scales {scales} are not {wanted.scales}"
        is_neighbor = (numbers == wanted.below) | (numbers == wanted.above)
        assert is_neighbor.all(), f"{name}: {numbers[~is_neighbor]} are no neighbors of what was rounded"
        assert np.array_equal(numbers, wanted.numbers), f"{name}: the draws went another way than the reference's"
        decoded = loaded[moment].double().numpy()
        np.testing.assert_allclose(decoded, reference.decode(wanted, name), rtol=2**-23, err_msg=name)
        for row, out in zip(given.reshape(-1, shape[-1]).double(), decoded.reshape(-1, shape[-1]), strict=True):
            for first in range(0, shape[-1], 128):
                at = first + int(row[first : first + 128].abs().argmax())
                # Two roundings of fp32: of the scale, and of its product with the format's largest number.
                error = abs(out[at] / row[at].item() - 1)
                assert error <= 2**-23, f"{name}: the largest of a block, {row[at]}, came back as {out[at]}"


def test_fp8_of_what_fp32_can_hardly_hold():
    """Scales themselves leave the normal numbers here; what is lost is below their last place times the largest."""
    rows = [
        [3e38, -1e30, 1.0, 1e-20, 1e-38, 1e-45, 0.0],
        [1e-38, -1e-38, 3e-39, 1e-40, 1e-44, 1e-45, 0.0],
        [1e-40, -7e-41, 1e-42, 1e-43, 1e-44, 1e-45, 0.0],
        [1e-45, -1e-45, 1e-45, 0.0, 0.0, 0.0, 0.0],
    ]
    values = torch.tensor(rows)
    for moment, name in enumerate(NAMES):
        given = values if name == "mean" else values.abs()
        piece = kept(given, given, draw(given.shape))
        wanted = reference.encode(given, reference.draws(tuple(given.shape), 0, 0, moment), name)
        numbers, scales = elements(piece.state, name), piece.state[f"{name}_scale"].double().numpy()
        assert np.array_equal(scales, wanted.scales) and np.array_equal(numbers, wanted.numbers), f"{name}: {numbers}"
        decoded = FP8Moments().load(piece)[moment]
        assert decoded.isfinite().all(), f"{name}: not finite: {decoded}"
        lost = (decoded.double() - given.double()).abs().amax(-1)
        largest = given.double().abs().amax(-1)
        allowed = largest / 4 + reference.grid(name)[-1] * 2.0**-150  # a step of E5M2, half a step of the scale
        assert (lost <= allowed).all(), f"{name}: lost {lost} of {largest}, allowed {allowed}"


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_fp8_zeros_stay_zero(sign):
    values = heavy_tailed((3, 300)).abs()
    values[1, 128:256] = 0.0
    values[2] = 0.0
    piece = kept(values * sign, values.square(), draw(values.shape))
    for name, loaded in zip(NAMES, FP8Moments().load(piece), strict=True):
        assert (loaded[1, 128:256] == 0).all() and (loaded[2] == 0).all(), f"{name}: a block of zeros was read as more"
        assert piece.state[f"{name}_scale"][2].tolist() == [0, 0, 0], f"{name}: zeros have a scale"
    assert (FP8Moments().load(piece)[1][1, :128] > 0).all(), "a mean square above 0 was read as 0: its root divides"
    decoded = FP8Moments().load(piece)[1]
    smallest = decoded[0].min() / piece.state["mean_square_scale"][0].max()
    assert smallest <= 2.0**-16, f"what is far below the largest was read as {smallest} units, more than the smallest"


@pytest.mark.parametrize("name", NAMES)
def test_fp8_is_unbiased(name):
    """Also where one of hundreds of draws rounds up, and all others to 0: the mean over 2^14 draws against theory."""
    row = torch.logspace(0, -8 if name == "mean" else -12, 128)
    repeats, keys, total = 256, 64, torch.zeros(128, dtype=torch.float64)
    values = row.expand(repeats, 128).contiguous()
    for key in range(keys):
        state = kept(values, values, draw(values.shape, step=key)).state
        total += torch.from_numpy(elements(state, name)).sum(0)
    wanted = reference.encode(row[None], np.full((1, 128), 0.5), name)
    scaled = row.double().numpy() / wanted.scales[0, 0]
    step = wanted.above[0] - wanted.below[0]
    share = (scaled - wanted.below[0]) / np.where(step > 0, step, 1)
    count = repeats * keys
    tested = count * share * (1 - share) > 10  # where the normal distribution is near
    assert tested.sum() > 90 and (scaled[tested] < reference.grid(name)[reference.grid(name) > 0][0] / 100).any()
    deviation = step * np.sqrt(share * (1 - share) / count)
    z = ((total.numpy() / count - scaled) / np.where(tested, deviation, 1))[tested]
    # Of 128 normal numbers one is above 4.5 in one of a thousand trials; z² summed is within 5 sigma of its mean.
    assert np.abs(z).max() < 4.5, f"{name}: z is up to {np.abs(z).max():.1f}: stochastic rounding is biased"
    excess = ((z**2).sum() - len(z)) / math.sqrt(2 * len(z))
    assert abs(excess) < 5, f"{name}: z² sums to {(z**2).sum():.0f} over {len(z)}, {excess:.1f} sigma off"


def test_a_mean_and_its_negative_are_rounded_alike():
    values = heavy_tailed((5, 130))
    above, below = (kept(sign * values, values.square(), draw(values.shape, step=3)).state for sign in (1, -1))
    assert torch.equal(below["mean"], above["mean"] ^ 0x80)


def coins(step=0, number=0, moment=0):
    """4096 draws above a half or not: elements in the middle between two numbers, in blocks with a scale of 1."""
    largest, middle = ((448.0, 1.0625), (57344.0, 1.125))[moment]
    values = torch.full((32, 128), middle)
    values[:, 0] = largest
    state = kept(values, values, draw(values.shape, step, number)).state
    assert (state[f"{NAMES[moment]}_scale"] == 1).all()
    return torch.from_numpy(elements(state, NAMES[moment]))[:, 1:] > middle


def test_draws_are_of_the_step_the_parameter_and_the_moment():
    cases = [dict(zip(("step", "number", "moment"), case, strict=True)) for case in np.ndindex(4, 4, 2)]
    thrown = [coins(**case) for case in cases]
    for case, once in zip(cases, thrown, strict=True):
        assert torch.equal(once, coins(**case)), f"{case}: drawn twice, the bits differ"
    for first, (case, left) in enumerate(zip(cases, thrown, strict=True)):
        for other, right in zip(cases[first + 1 :], thrown[first + 1 :], strict=True):
            z = ((left == right).double().mean() - 0.5).item() * 2 * math.sqrt(left.numel())
            assert abs(z) < 5, f"bits of {case} and {other} agree {z:.1f} sigma from half of the time"
    for left, right in ((thrown[0][:, :-1], thrown[0][:, 1:]), (thrown[0][:-1], thrown[0][1:])):
        z = ((left == right).double().mean() - 0.5).item() * 2 * math.sqrt(left.numel())
        assert abs(z) < 5, f"bits of neighboring elements agree {z:.1f} sigma from half of the time"


@pytest.mark.parametrize("shape", [(9, 130), (8, 3, 130)], ids=str)
def test_rows_of_a_parameter_get_the_bits_of_those_rows(shape):
    values = heavy_tailed(shape)
    whole = draw(shape, step=3, number=1)
    expected = kept(values, values.square(), whole).state
    rows = kept(values[3:7], values[3:7].square(), whole.at(3)).state
    for name in FP8Moments().names:
        assert torch.equal(rows[name].float(), expected[name][3:7].float()), f"{name} of rows 3 … 7 is another"
    # A part of another dimension, as tensor parallelism cuts: it begins where a block does.
    inner = whole._replace(offsets=(*(0 for _ in shape[1:]), 128))
    columns = kept(values[..., 128:], values[..., 128:].square(), inner).state
    for name in NAMES:
        assert torch.equal(columns[name].float(), expected[name][..., 128:].float()), f"{name} of columns is another"


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("shape", [(9, 130), (8, 3, 129)], ids=str)
@pytest.mark.parametrize("piece", [1, 300, 2**18])
def test_codes_do_not_depend_on_the_pieces(shape, piece, within):
    """β = 0 keeps a gradient and its square as they are: Adam's own arithmetic, in vectors, is not what is tested."""
    gradient = heavy_tailed(shape)
    within(in_pieces(piece))
    parameters = [Parameter(torch.zeros(shape)) for _ in range(2)]
    optimizer = LowBitAdamW(parameters, betas=(0.0, 0.0))
    for _ in range(3):
        for p in parameters:
            p.grad = gradient
        optimizer.step()
    for number, p in enumerate(parameters):
        expected = kept(gradient, gradient.square(), draw(shape, step=2, number=number)).state
        for name in FP8Moments().names:
            same = torch.equal(optimizer.state[p][name].float(), expected[name].float())
            assert same, f"{name} of parameter {number} in pieces of {piece} is not that of the whole"


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(3, 130), (2, 3, 256)], ids=str)
def test_compiled_rounding_is_eager_rounding(shape):
    values = heavy_tailed(shape)
    states = []
    for name in ("eager", "compiled"):
        with backend(name):
            states.append(kept(values, values.square(), draw(shape)).state)
    for name in FP8Moments().names:
        assert torch.equal(states[0][name].float(), states[1][name].float()), f"{name}: compiled code gives other bits"


def test_compiled_code_is_told_the_shapes_of_codes_and_scales():
    for shape in ((300,), (5, 130), (2, 3, 300)):
        given = torch.randn(shape), torch.zeros(shape, dtype=torch.int32), "mean"
        for told, made in zip(_fake_encoded(*given), _encode_moment(*given), strict=True):
            assert (told.shape, told.stride(), told.dtype) == (made.shape, made.stride(), made.dtype), f"of {shape}"
