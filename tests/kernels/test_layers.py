"""Layers, and what stands around their casts, have the same bits by every implementation."""

import itertools
from collections import Counter

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from lightning_lowbit import convert
from lightning_lowbit.compilation import backend
from lightning_lowbit.kernels import delayed_amax
from lightning_lowbit.kernels.cpu import casts as casts_in_cpp
from lightning_lowbit.kernels.cpu import products as products_in_cpp
from lightning_lowbit.kernels.products import decode, scale_and_round
from lightning_lowbit.nn import PRESETS, LayerKeys
from lightning_lowbit.nn.core.watch import stage_and_choose
from tests.kernels import passes
from tests.nn.layers import identical, layer_like
from tests.nn.layers import run as run_layer
from tests.tables import each


def results(casts, name):
    """Output, gradients and staged amaxes of a layer in the casts of a preset, by one implementation."""
    torch.manual_seed(0)
    layer, x, g = layer_like(nn.Linear(70, 48), casts), torch.randn(40, 70), torch.randn(40, 48)
    with backend(name):
        found, amaxes = run_layer(layer, x, g, autocast=True), layer.lowbit.amaxes
    return found | {"amaxes": None if amaxes is None else amaxes.staged}


def compare(name):
    for casts in PRESETS:
        identical(results(casts, name), results(casts, "eager"), f"{casts} by {name}")


def test_cpp():
    compare("cpp")


@pytest.mark.slow
def test_triton_in_its_interpreter(run):
    run(compare, "triton")


def test_each_tensor_is_measured_once_and_each_operand_made_once(monkeypatch):
    """Calls of kernels of a layer's forward and backward pass, of tensors too large to measure again in each cast."""
    kernels = casts_in_cpp.library()

    class Counting:
        def __getattr__(self, name):
            def call(*arguments):
                is_given_amax = name == "lowbit_cast" and arguments[7] is not None
                counts["cast by a given amax" if is_given_amax else name.removeprefix("lowbit_")] += 1
                getattr(kernels, name)(*arguments)

            return call

    monkeypatch.setattr(casts_in_cpp, "library", Counting)
    found = {}
    for preset in ("nvfp4", "mxfp8", "fp8-current", "ternary"):
        model = nn.Sequential(nn.Linear(272, 256, bias=False))
        LayerKeys(convert(model, preset, backend="emulated" if preset == "nvfp4" else "auto")).fill_(0)
        counts = Counter()
        model(torch.randn(260, 272, requires_grad=True)).sum().backward()
        found[preset] = dict(counts)
    assert found == {
        "nvfp4": {"amax": 3, "cast by a given amax": 6},
        "mxfp8": {"cast": 6},
        "fp8-current": {"amax": 3, "cast by a given amax": 4},  # two GEMMs share an operand of w, and two of g
        "ternary": {"cast": 2},
    }


def test_a_compiled_model_has_the_bits_of_eager_code_and_tensors_without_memory_take_plain_code():
    model = convert(nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 16)), "mxfp8")
    x = torch.randn(32, 64)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), model(x))
    with FakeTensorMode():
        model = convert(nn.Sequential(nn.Linear(64, 48)), "mxfp8")
        assert model(torch.randn(32, 64)).shape == (32, 48)


# --- factors and bias of a GEMM ---------------------------------------------------------------------------------------


def test_factors_and_biases_of_all_shapes_and_dtypes():
    torch.manual_seed(0)
    whole, real = torch.randint(-(2**30), 2**30, (40, 70), dtype=torch.int32), torch.randn(40, 70)
    one, rows, columns = torch.randn(()), torch.randn(40, 1), torch.randn(1, 70)
    for product, pair, bias, dtype in itertools.product(
        (real, real.bfloat16(), (whole >> 24).to(torch.int8), whole),
        ([], [one], [rows], [one, rows], [rows, columns], [columns, one]),
        (None, torch.randn(70), torch.randn(70).bfloat16(), torch.randn(1, 70)),
        (torch.float32, torch.bfloat16),
    ):
        with backend("cpp"):
            found = scale_and_round(product, pair, bias, dtype)
        with backend("eager"):
            expected = scale_and_round(product, pair, bias, dtype)
        assert products_in_cpp.scale_and_round(product, pair, bias, dtype) is not None
        assert found.dtype == dtype and torch.equal(found, expected), (product.dtype, pair, bias, dtype)


def test_decoded_operands_are_rounded_once():
    torch.manual_seed(0)
    values, dtypes = torch.randn(40, 70) * 100, (torch.int8, torch.bfloat16, torch.float32, torch.float64)
    factors = (None, torch.tensor(0.3), torch.randn(40, 1), torch.rand(1, 70))
    for dtype, factor in itertools.product((*dtypes, torch.float8_e4m3fn), factors):
        for stack in (values.to(dtype), values.to(dtype)[None]):
            expected = stack.float() if factor is None else stack.float() * factor
            assert torch.equal(decode(stack, factor, torch.bfloat16), expected.bfloat16()), (dtype, stack.shape)


def test_what_is_not_covered_takes_plain_code():
    product = torch.randn(8, 6)
    for arguments in (
        (product.double(), [], None, torch.float32),
        (product, [], torch.randn(8, 6), torch.float32),  # a bias for each element
        (product, [], None, torch.float16),
    ):
        assert products_in_cpp.scale_and_round(*arguments) is None
        with backend("cpp"):
            result = scale_and_round(*arguments)
        with backend("eager"):
            assert torch.equal(result, scale_and_round(*arguments)) and result.dtype == arguments[-1]


# --- delayed scaling --------------------------------------------------------------------------------------------------

# An operand's own amax, those in force, those of the step, and the places of the operand and of what reuses it.
IN_FORCE, STAGED = torch.tensor([0, 2.0, 0, 0.5, 0, 7]), torch.tensor([0.0, 1, 2, 1.5, 0.5, 5])
DELAYED = [
    (torch.tensor(own), IN_FORCE, staged, places)
    for own in (2.5, 0.0, 1e-42, float("inf"), float("nan"))
    for staged in (STAGED, None)
    for places in ([0], [1, 3], [2, 4], [5])
]


@each("own, in_force, staged, places", DELAYED)
def test_amaxes_of_delayed_scaling(own, in_force, staged, places):
    results = []
    for name in ("cpp", "eager"):
        record = None if staged is None else staged.clone()
        with backend(name):
            assert (delayed_amax(own, in_force, None, places) is not None) == (name == "cpp")
            results.append((stage_and_choose(in_force, record, places, own), record))
    (found, of_kernel), (expected, of_plain) = results
    assert torch.equal(found.nan_to_num(9), expected.nan_to_num(9))
    assert staged is None or torch.equal(of_kernel, of_plain)
    assert torch.equal(in_force, IN_FORCE)


def test_amaxes_that_are_not_float32_take_plain_code():
    own, in_force, staged = (tensor.bfloat16() for tensor in (torch.tensor(2.5), IN_FORCE, STAGED))
    with backend("cpp"):
        assert delayed_amax(own, in_force, staged, [0]) is None


# --- Triton's kernels in its interpreter ------------------------------------------------------------------------------


@pytest.mark.fast("nvfp4-14")
@pytest.mark.parametrize("preset, launches", [("nvfp4", 14), ("nvfp4-4over6", 14), ("mxfp8", 10), ("mxfp4", 11)])
def test_a_native_layer_launches_little(run, preset, launches):
    """Five casts, of which one makes both operands of the gradient; amaxes of three tensors, and a copy of keys; three
    GEMMs, and a bias with its gradient."""
    assert run(passes.layer_passes, preset, True)[:2] == ([], launches)


@pytest.mark.slow
def test_passes_after_a_warm_up_can_be_captured_in_a_graph(run):
    """They read nothing on the host, pin no memory, and do the same with other data."""
    first, second = run(passes.recorded_passes, "nvfp4")
    assert first == second
    assert sum("lay_out" in event for event in first) > 12
    waits = ("_local_scalar_dense", "item", "pin_memory", "nonzero", "unique", "masked_select", "is_nonzero", "equal")
    assert [event for event in first if any(event.startswith(f"({name}") for name in waits)] == []


@each("preset, casts", [("nvfp4-nvidia", (0, 3)), ("mxfp8", (1, 2)), ("nvfp4", (1, 2))], fast=2)
def test_a_backward_pass_reads_the_gradient_once_for_both_of_its_casts(run, preset, casts):
    """Not where one of them is rotated; the layer of that preset takes its weight from the forward pass."""
    differences, _, launched = run(passes.layer_passes, preset, False)
    assert differences == []
    assert (launched.get("cast_both", 0), launched["cast_blocks"]) == casts


@pytest.mark.slow
def test_operands_of_stacks_have_the_bits_of_products_one_by_one(run):
    texts, count = run(passes.differences_of_stacks, ("nvfp4-4over6", "mxfp4-rht", "fp8-current", "int8", "ufp4"))
    assert texts == [] and count > 20


@pytest.mark.slow
def test_launches_of_a_grouped_layer_do_not_grow_with_its_experts(run):
    for preset, experts, expected in (("mxfp8", 2, 9), ("mxfp8", 7, 9), ("nvfp4", 3, 32), ("fp8-row", 3, 14)):
        assert run(passes.grouped_layer, preset, experts) == expected, preset
