"""Quantizing one tensor: against the slow reference, in every shape, and what is not finite."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch

from lightning_lowbit import Cast, Scale, quantize
from lightning_lowbit.formats import ELEMENT_FORMATS
from lightning_lowbit.quant import quantize_operand
from tests.quant.tensors import (
    NVFP4,
    NVFP4_TILES,
    casts,
    check_against_reference,
    check_stochastic,
    ragged,
    same,
    same_bytes,
    sample,
    some_casts,
    whole,
)
from tests.references import quantize as reference
from tests.tables import each

# --- non-finite elements ----------------------------------------------------------------------------------------------


def dequantized_both_ways(x, cast, key=None, amax=None, dim=-1):
    operand = quantize_operand(x, cast, dim, key, amax)
    return {"quantize": quantize(x, cast, dim, key, amax).dequantize(), "quantize_operand": whole(operand)}


@pytest.mark.fast("e2m1-16", "int8-16", "e4m3-block18", "int6-row", "ternary-tensor")
@pytest.mark.parametrize(
    ("element", "block"),
    [(element, 16) for element in ELEMENT_FORMATS]
    + [(element, block) for element in ("e2m1", "e4m3", "int6", "ternary") for block in ((2, 16), "row", "tensor")],
)
def test_non_finite_never_becomes_finite(element, block):
    """Blocks with such an element are NaN, and all others are what they are without it, unless S is made of it."""
    clean, x = sample(4, 48), sample(4, 48)
    x[0, 20], x[1, 20], x[2, 20] = torch.inf, -torch.inf, torch.nan
    damaged = torch.zeros(4, 48, dtype=torch.bool)
    rows, columns = {16: (3, slice(16, 32)), (2, 16): (4, slice(16, 32)), "row": (3, slice(0, 48))}.get(block, (4,) * 2)
    damaged[:rows, columns if isinstance(columns, slice) else slice(None)] = True  # at most the blocks around them
    for cast, rounding in itertools.product(some_casts(element, block), ("nearest", "stochastic")):
        mode = replace(cast, rounding=rounding)
        for amax in (None, torch.tensor(3.0)) if cast.scale.needs_amax else (None,):  # an amax that does not tell
            undamaged = dequantized_both_ways(clean, mode, torch.tensor(3), amax)
            for name, values in dequantized_both_ways(x, mode, torch.tensor(3), amax).items():
                bad, message = values[:3, 20], f"{name}, {mode}, amax {amax}"
                assert bad.isnan().all(), f"{message}: inf, -inf, nan became {bad.tolist()}"
                assert values[~damaged].isfinite().all(), f"{message}: the damage leaves its block"
                if amax is None:
                    assert values[damaged].isnan().all(), f"{message}: a part of a block is not NaN"
                if not cast.scale.two_level:
                    same(values[~damaged], undamaged[name][~damaged], f"{message}: beside it")


@each("amax", [torch.inf, torch.nan])
@each("element", ["e2m1", "e4m3", "int8", "ternary"])
def test_an_amax_that_is_not_finite(element, amax):
    """One scale for the whole tensor, shared with a tensor that overflowed: NaN. With two levels S is 1."""
    x = sample(3, 32)
    for cast in casts(element, "tensor"):
        if not cast.scale.needs_amax:
            continue
        for name, values in dequantized_both_ways(x, cast, amax=torch.tensor(amax)).items():
            assert values.isnan().all(), f"{name}, {cast}, amax {amax}: some elements became numbers"
    cast = Cast(element, Scale(two_level=True))
    assert quantize(x, cast, amax=torch.tensor(amax)).tensor_scale == 1, f"{cast}, amax {amax}"


# --- the slow reference -----------------------------------------------------------------------------------------------


@pytest.mark.fast("some_casts")
@pytest.mark.parametrize("choose", [some_casts, casts])
@each("element", ELEMENT_FORMATS)
def test_equals_reference(choose, element):
    for number, cast in enumerate(choose(element)):
        check_against_reference(ragged(number), cast, dim=-(number // 2 % 2))


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("block", [(4, 16), "row", "tensor"])
@pytest.mark.parametrize("element", ["e2m1", "e5m2", "e3m0", "int3", "int8", "ternary"])
def test_blocks_of_other_shapes_equal_reference(element, block):
    for number, cast in enumerate(casts(element, block)):
        check_against_reference(ragged(number // 2), cast, dim=number % 2)


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("block", [1, 7, 16, 32, 128, (16, 16), (1, 16), (8, 4), (128, 128), (3, 1), "row", "tensor"])
def test_blocks_of_any_size(block):
    x = sample(13, 60)
    some = [Scale("e4m3", block), Scale("e8m0", block), Scale("fp32", block)]
    if block != "tensor":
        some += [Scale("e4m3", block, two_level=True)]
    if not isinstance(block, str):
        some += [Scale("e4m3", block, two_level=True, top=256, four_over_six="mae")]
    for number, scale in enumerate(some):
        check_against_reference(x, Cast("e2m1", scale), number % 2)
    same_bytes(quantize(x, Cast(scale=some[0]), -2), quantize(x, Cast(scale=some[0]), 0), f"{block}: dimensions -2, 0")


@pytest.mark.parametrize("amax", [1e4, 0.25])
def test_amax_from_outside_equals_reference(amax):
    x = sample(6, 64)
    for cast in [NVFP4, NVFP4_TILES, *casts("e4m3", "tensor"), *casts("e2m1")]:
        if cast.scale.needs_amax:
            check_against_reference(x, cast, amax=amax)
    one = quantize(x, NVFP4, amax=torch.tensor([[amax]]))
    same_bytes(one, quantize(x, NVFP4, amax=torch.tensor(amax)), "one element in any shape")


STOCHASTIC = [
    *[Cast(element, Scale(two_level=True), "stochastic") for element in ELEMENT_FORMATS],
    Cast("e2m1", Scale("e8m0", 32, "floor", prescale=0.75), "stochastic"),
    Cast("e5m2", Scale("fp32", "row"), "stochastic"),
    Cast("int8", Scale("fp32", "tensor", "power_of_two"), "stochastic"),
    *[Cast("int4", Scale("fp32", block, statistic="minmax"), "stochastic") for block in (16, (4, 16), "row", "tensor")],
    Cast("ternary", Scale("fp32", "row", statistic="absmean", factor=1.25, epsilon=1e-5), "stochastic"),
    Cast("e2m1", Scale("e4m3", (16, 16), two_level=True, four_over_six="mse"), "stochastic"),
]


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("cast", STOCHASTIC, ids=str)
@pytest.mark.parametrize("dim", [0, 1])
def test_stochastic_equals_reference(cast, dim):
    check_stochastic(sample(13, 100), cast, dim)


# --- shapes -----------------------------------------------------------------------------------------------------------


@each("shape", [(40,), (3, 40), (2, 5, 18), (2, 3, 2, 18)])
@each(
    "cast",
    [
        NVFP4,
        *(Cast("e2m1", Scale("fp32", block)) for block in ("row", "tensor")),
        Cast("int4", Scale("fp32", 16, statistic="minmax")),
        Cast("ternary", Scale("fp32", 16, statistic="absmean")),
    ],
)
def test_every_dimension(shape, cast):
    x, scale = sample(*shape), cast.scale
    for rounding, dim in itertools.product(("nearest", "stochastic"), range(-len(shape), len(shape))):
        cast = cast.replace(rounding=rounding)
        found = quantize(x, cast, dim, key=6)
        expected = [1] * len(shape) if scale.block == "tensor" else list(shape)
        expected[dim] = -(-shape[dim] // 16) if scale.block == 16 else 1
        assert found.codes.shape == shape
        assert found.codes.dtype == torch.uint8
        assert found.scales.shape == tuple(expected), f"scales along {dim} of {shape}"
        assert found.dequantize(torch.bfloat16).dtype == torch.bfloat16
        if rounding == "nearest":
            same(found.dequantize(), reference.quantize(x, cast, dim, field="dequantized"), f"{shape} along {dim}")
        positive = quantize(x, cast, dim % len(shape), key=6)
        same_bytes(positive, found, f"{shape} along {dim} and {dim % len(shape)}")


EMPTY = [
    NVFP4,
    replace(NVFP4, rounding="stochastic"),
    Cast("int4", Scale("e5m2", 8)),
    Cast("e2m1", Scale("e4m3", two_level=True, four_over_six="mse")),
    Cast("e4m3", Scale("e8m0", "row")),
    Cast("e4m3", Scale("fp32", "row")),
    Cast("e4m3", Scale("fp32", "tensor")),
    *[Cast("ternary", Scale("fp32", block, statistic="absmean")) for block in (16, "row", "tensor")],
    *[Cast("int4", Scale("fp32", block, statistic="minmax")) for block in (16, "row", "tensor")],
]


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("shape", [(0,), (0, 32), (3, 0), (2, 0, 16), (2, 3, 0)])
@pytest.mark.parametrize("cast", EMPTY, ids=str)
def test_empty(shape, cast):
    for dim in range(-len(shape), len(shape)):
        found = quantize(torch.empty(shape), cast, dim, key=0)
        assert found.codes.shape == found.dequantize().shape == shape
        if found.tensor_scale is not None:
            assert found.tensor_scale == 1
        if len(shape) == 2:
            assert quantize_operand(torch.empty(shape), cast, dim, torch.tensor(0)).values.shape == shape


@each(
    "view",
    [lambda x: x.t(), lambda x: x[::2], lambda x: x[:, 3:51], lambda x: x[:, ::3], lambda x: x[:1].expand(9, -1)],
)
@each("block", [16, (16, 16), "row", "tensor"])
def test_non_contiguous(view, block):
    x = view(sample(48, 64))
    assert not x.is_contiguous()
    before = x.clone()
    for dim in (0, 1):
        cast = Cast("e2m1", Scale("e4m3", block, two_level=block != "tensor"), "stochastic")
        same_bytes(quantize(x, cast, dim, key=1), quantize(x.contiguous(), cast, dim, key=1), f"along {dim}")
        operand, other = (quantize_operand(t, cast, dim, torch.tensor(1)) for t in (x, x.contiguous()))
        same(operand.values, other.values, f"operand along {dim}")
    same(x, before, "the input was changed")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_floating_point_dtypes(dtype):
    x = sample(4, 64).clamp(-1e4, 1e4).to(dtype)
    for cast in (NVFP4, Cast("e2m1", Scale("e8m0", 32)), Cast("int8", Scale("fp32", "row")), *casts("e4m3", "tensor")):
        same_bytes(quantize(x, cast), quantize(x.float(), cast), f"{cast} of {dtype}")


def test_quantized_tensors_do_not_require_gradients():
    found = quantize(sample(4, 32).requires_grad_(), NVFP4)
    graphs = [tensor.requires_grad for tensor in (found.scales, found.tensor_scale, found.dequantize())]
    assert not any(graphs), "rounding has no derivative, yet a graph was recorded"


# --- errors -----------------------------------------------------------------------------------------------------------


@each(
    ("call", "message"),
    [
        (lambda: quantize(torch.ones(4, 16), Cast(rounding="stochastic")), "needs a key.*LayerKeys"),
        (lambda: quantize(torch.ones(4, 16), Cast(rounding="stochastic"), key=torch.ones(2).long()), "one element"),
        (lambda: quantize(torch.ones(4, 16), Cast(rounding="stochastic"), key=torch.ones(())), "A key is an integer"),
        (lambda: quantize(torch.ones(4, 16, dtype=torch.int32), NVFP4), r"got torch\.int32"),
        (lambda: quantize(torch.ones(4, 16, dtype=torch.bool), NVFP4), r"got torch\.bool"),
        (lambda: quantize(torch.ones(4, 16, 16), NVFP4_TILES), r"\(4, 16, 16\)"),
        (lambda: quantize(torch.ones(16), NVFP4_TILES), r"\(16,\)"),
        (lambda: quantize(torch.ones(()), NVFP4), r"\(\)"),
        (lambda: quantize(torch.ones(4, 16), Cast(scale=Scale()), amax=torch.tensor(1.0)), "two_level=True"),
        (lambda: quantize(torch.ones(4, 16), Cast(scale=Scale("fp32", "row")), amax=torch.tensor(1.0)), "'tensor'"),
        *[
            (
                partial(quantize, torch.ones(4, 16), Cast("int4", scale), amax=torch.ones(())),
                "amax was given, but .*has no",
            )
            for scale in (Scale("fp32", "tensor", statistic=statistic) for statistic in ("absmean", "minmax"))
        ],
        (lambda: quantize(torch.ones(4, 16), NVFP4, amax=torch.ones(2)), "amax is a tensor of one element"),
        (lambda: quantize(torch.ones(4, 16), NVFP4, amax=1.0), "amax is a tensor of one element"),
        (lambda: quantize([1.0, 2.0], NVFP4), "takes a tensor; got list"),
        (lambda: quantize(torch.ones(4, 16), "nvfp4"), "takes a Cast.*got 'nvfp4'"),
        *[(partial(quantize, torch.ones(4, 16), NVFP4, dim), f"no dimension {dim}") for dim in (2, 5, -3)],
        *[(partial(quantize, torch.ones(16), NVFP4, dim), f"no dimension {dim}") for dim in (1, -2)],
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
