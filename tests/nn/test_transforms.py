"""Rotations, means that are split off and surrogates: what they are for, and what they leave alone.

That a layer computes them as they are defined is in linear/test_operands.py; here they meet what they stand in for.
"""

import pytest
import torch
from torch import nn

from lightning_lowbit import Cast, LinearCasts, Scale, convert
from lightning_lowbit.nn import OPERANDS
from lightning_lowbit.quant import Hadamard
from tests.nn.layers import GEMMS, RESULTS, every, layer_like, run
from tests.tables import each

LOSSLESS = Cast("int8", Scale("fp32", 1))  # each element is the largest of its block
NEAREST = Cast("e2m1", Scale("e4m3", 16, two_level=True))
TOKENS, IN, OUT = 50, 40, 24
KEYED = {gemm: Hadamard(16, "keyed") for gemm in GEMMS}
ALL = tuple(GEMMS)


def tensors(tokens=TOKENS, mean=0.0):
    """A layer, x and g; all tokens share a direction of the given size."""
    generator = torch.Generator().manual_seed(3)
    layer = nn.Linear(IN, OUT)
    layer.weight.data = torch.randn(OUT, IN, generator=generator)
    layer.bias.data = torch.randn(OUT, generator=generator)
    x, g = (
        torch.randn(tokens, size, generator=generator) + mean * torch.randn(size, generator=generator)
        for size in (IN, OUT)
    )
    return layer, x, g


def error(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("mean", [0.0, 30.0])
@pytest.mark.parametrize("exact", [False, True], ids=["", "exact"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        *[{"hadamard": {gemm: size}} for gemm in GEMMS for size in (16, 64)],
        {"hadamard": KEYED},
        *[{"subtract_mean": [gemm]} for gemm in GEMMS],
        {"subtract_mean": ["wgrad"], "wgrad_x": None},
        {"subtract_mean": ["wgrad"], "wgrad_g": None},
        {"subtract_mean": ALL, "hadamard": KEYED},
        {"subtract_mean": ["fprop", "dgrad"], "dgrad_w": "fprop"},
        {"surrogate": {"fprop_x": "trust", "fprop_w": "trust"}},  # nothing is saturated
        {"surrogate": {"fprop_w": "trust"}, "hadamard": KEYED, "subtract_mean": ["dgrad", "wgrad"]},
    ],
    ids=str,
)
def test_with_lossless_casts_the_layer_is_linear(settings, exact, mean):
    original, x, g = tensors(mean=mean)
    found = run(layer_like(original, every(LOSSLESS, **settings), exact=exact), x, g)
    for name, expected in run(original, x, g).items():
        assert error(found[name], expected) < 1e-5, f"{name}: off by {error(found[name], expected):.1e}"


@pytest.mark.parametrize("gemm", GEMMS)
def test_splitting_the_mean_off_helps_where_there_is_one(gemm):
    """Averaged over draws of the random bits, where there are some."""
    casts = LinearCasts.preset("nvfp4")
    for mean, low, high in ((30.0, 0.0, 0.5), (0.0, 0.7, 1.3)):
        original, x, g = tensors(tokens=512, mean=mean)
        expected = run(original, x, g)[RESULTS[gemm]]
        errors = [
            sum(error(run(layer_like(original, c, seed), x, g)[RESULTS[gemm]], expected) for seed in range(4))
            for c in (casts.replace(subtract_mean=[gemm]), casts)
        ]
        ratio = errors[0] / errors[1]
        assert low < ratio < high, f"{gemm}, a mean of size {mean}: {ratio:.2f} of the error without"


def test_signs_of_the_gemms_differ():
    """Three GEMMs of a layer do not share their signs, and signs do not share their bits with rounding."""
    layer = layer_like(nn.Linear(16, 16), every(NEAREST, hadamard=KEYED))
    device = torch.device("cpu")
    signs = [
        Hadamard(128, "keyed").diagonal(layer.lowbit.keys[OPERANDS.index(names[1])], device) for names in GEMMS.values()
    ]
    for i in range(3):
        assert not torch.equal(signs[i], signs[i - 1])
        assert 0.2 < (signs[i] > 0).float().mean() < 0.8, "signs are not balanced"


@each("gemm", GEMMS)
def test_keyed_signs_without_keys_are_refused(gemm):
    layer = convert(nn.Linear(IN, OUT), every(NEAREST, hadamard={gemm: Hadamard(16, "keyed")}))
    x = torch.randn(2, IN, requires_grad=True)
    with pytest.raises(ValueError, match="Keyed signs of a Hadamard transform need a key.*LayerKeys"):
        layer(x).sum().backward()
