"""Moments in FP8: codes, scales and random bits, against a slow reference."""

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


def with_zeros():
    """Blocks of zeros, and rows of them."""
    values = heavy_tailed((3, 300))
    values[1, 128:256] = values[2] = 0.0
    return values


# What fp32 can hardly hold: scales themselves leave the normal numbers here.
EDGES = torch.tensor(
    [
        [3e38, -1e30, 1.0, 1e-20, 1e-38, 1e-45, 0.0],
        [1e-38, -1e-38, 3e-39, 1e-40, 1e-44, 1e-45, 0.0],
        [1e-40, -7e-41, 1e-42, 1e-43, 1e-44, 1e-45, 0.0],
        [1e-45, -1e-45, 1e-45, 0.0, 0.0, 0.0, 0.0],
    ]
)
MEANS = [*map(heavy_tailed, SHAPES), with_zeros(), -with_zeros()]


@each("mean, mean_square", [*((mean, mean.square()) for mean in MEANS), (EDGES, EDGES.abs())])
def test_fp8_is_the_reference(mean, mean_square):
    """Codes, scales and values, with other draws for each step, parameter and moment. A step of E5M2 may be lost, and
    of the smallest numbers half a place of the scale, times the largest."""
    shape = tuple(mean.shape)
    for step, number in ((7, 2), (8, 2), (7, 3)):
        piece = kept(mean, mean_square, draw(shape, step, number))
        for moment, (name, given) in enumerate(zip(NAMES, (mean, mean_square), strict=True)):
            numbers, scales = elements(piece.state, name), piece.state[f"{name}_scale"].double().numpy()
            wanted = reference.encode(given, reference.draws(shape, step, number, moment), name)
            assert np.array_equal(scales, wanted.scales), f"{name}: scales {scales} are not {wanted.scales}"
            assert np.array_equal(numbers, wanted.numbers), f"{name}: {numbers}, not {wanted.numbers}"
            decoded = FP8Moments().load(piece)[moment].double()
            expected = reference.decode(wanted, name)
            np.testing.assert_allclose(decoded.numpy(), expected, rtol=2**-23, atol=2.0**-149, err_msg=name)
            lost, largest = (x.abs().amax(-1) for x in (decoded - given.double(), given.double()))
            allowed = largest / 4 + reference.grid(name)[-1] * 2.0**-150
            assert (lost <= allowed).all(), f"{name}: lost {lost} of {largest}, allowed {allowed}"


@each("shape", [(9, 130), (8, 3, 130)])
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
