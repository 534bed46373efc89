"""GEMMs of int8 units: what they take, and that they give the numbers of the emulated ones, of which sums are exact."""

from itertools import product

import pytest
import torch
from torch import nn

from lightning_lowbit import Cast, LinearCasts, Scale, compilation, convert
from lightning_lowbit.callbacks.layer_table import layer_table
from lightning_lowbit.nn import GemmCounter
from lightning_lowbit.nn.casts.presets import quantization_aware
from lightning_lowbit.nn.core.gemm import native_obstacle
from lightning_lowbit.nn.native.devices import declared
from tests.nn.layers import GEMMS, RESULTS, every, gradients, identical, layer_like, net, run, spied, value
from tests.tables import each

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(native_obstacle(CPU, "int8") is not None, reason="this CPU has no int8 units")

TERNARY = LinearCasts.preset("ternary")
TOKENS, TENSOR = Cast("int8", Scale("fp32", "row")), Cast("int4", Scale("fp32", "tensor"))
POWERS = TOKENS.replace(scale={"rounding": "power_of_two"})
GROUPS = Cast("int8", Scale("fp32", 32), round_to_bfloat16=True)
FP8 = Cast("e4m3", Scale("fp32", "tensor"))

# Casts, and the GEMMs that are native with them.
LAYERS = {
    "ternary": (TERNARY, ["fprop"]),
    "rows": (quantization_aware(TOKENS, TOKENS), ["fprop"]),
    "tensors": (quantization_aware(TENSOR, TENSOR), ["fprop"]),
    "rows times tensors": (quantization_aware(TOKENS, TENSOR), ["fprop"]),
    "int8 x int2": (quantization_aware(TOKENS, TOKENS.replace(element="int2")), ["fprop"]),
    "powers of two x absmean": (quantization_aware(POWERS, TENSOR.replace(scale={"statistic": "absmean"})), ["fprop"]),
    "scales in e8m0": (quantization_aware(TOKENS, TENSOR.replace(scale={"format": "e8m0"})), ["fprop"]),
    "all six": (every(TOKENS), list(GEMMS)),
    "all six, of tensors": (every(TENSOR), list(GEMMS)),
    "stochastic": (every(TOKENS.replace(rounding="stochastic")), list(GEMMS)),
    "w reused": (every(TENSOR, dgrad_w="fprop"), list(GEMMS)),
    "rows reused": (every(TOKENS, dgrad_w="fprop", wgrad_x="fprop"), ["fprop"]),  # its scales no longer factor out
    "more than a product": (every(TOKENS, smooth="channel", subtract_mean=["dgrad", "wgrad"]), list(GEMMS)),
    "x in hp": (quantization_aware(None, TERNARY.fprop_w), []),
    "w in hp": (quantization_aware(TOKENS, None), []),
    "groups": (quantization_aware(GROUPS, GROUPS), []),
    "groups of x": (quantization_aware(GROUPS, TOKENS), []),
    "groups of w": (quantization_aware(TOKENS, GROUPS), []),
    "tiles": (every(Cast("int8", Scale("e8m0", (16, 16)))), []),
    "a zero point": (quantization_aware(TOKENS, TOKENS.replace(scale={"statistic": "minmax"})), []),
    "delayed": (every(Cast("int8", Scale("fp32", "tensor", source="delayed"))), []),
    "e2m3": (quantization_aware(TOKENS, TOKENS.replace(element="e2m3")), []),
    "times FP8": (every(TOKENS, fprop_w=FP8, dgrad_w=FP8, wgrad_g=FP8), []),
}


@pytest.fixture(autouse=True)
def native_calls(monkeypatch):
    """Sizes of the native GEMMs."""
    calls = []

    def spy(left, right):
        calls.append((*left.shape, right.shape[1]))
        return torch._int_mm(left, right)

    monkeypatch.setattr("lightning_lowbit.nn.native.gemms.int_mm", spy)
    return calls


@pytest.mark.parametrize("name", LAYERS)
def test_what_runs_natively(native_calls, name):
    """And ``backend="native"`` refuses the rest."""
    casts, gemms = LAYERS[name]
    sizes = {"fprop": (8, 64, 48), "dgrad": (8, 48, 64), "wgrad": (48, 8, 64)}
    original, x, g = nn.Linear(64, 48), torch.randn(8, 64), torch.randn(8, 48)
    layer = layer_like(original, casts)
    expected = run(layer, x, g)
    assert native_calls == [sizes[gemm] for gemm in gemms]
    assert layer.native_gemms(CPU) == tuple(gemms)
    quantizes = [any(isinstance(getattr(casts, o), Cast) for o in casts.operands_of(gemm)) for gemm in GEMMS]
    lacking = [gemm for gemm, some in zip(GEMMS, quantizes, strict=True) if some and gemm not in gemms]
    if lacking:
        message = rf"{lacking[0]} of the casts has no native GEMM: those take E4M3 .* or integers, with scales per"
        with pytest.raises(ValueError, match=message):
            convert(original, casts, backend="native")
        assert type(original) is nn.Linear
    else:
        identical(run(layer_like(original, casts, backend="native"), x, g), expected, "backend='native'")
        assert len(native_calls) == 2 * len(gemms)


# float32 holds whole numbers up to 2^24: sums of 127 · 1 are exact up to an inner size of 132104.
LONGEST = 2**24 // 127
SIZES = [(24, 160, 40), (1, 64, 32), (5, 33, 7), (1, 1, 1), (3, 7, 1), (2, LONGEST, 3)]


def pass_through(casts, sizes, dtype, bias=True, largest=False, **how):
    """A pass, always over the same tensors; ``largest``: in which all elements have the largest code."""
    torch.manual_seed(3)
    tokens, inputs, outputs = sizes
    original = nn.Linear(inputs, outputs, bias=bias, dtype=dtype)
    x, g = torch.randn(tokens, inputs).to(dtype), torch.randn(tokens, outputs).to(dtype)
    if largest:
        x, original.weight.data = torch.full_like(x, 0.7), torch.full_like(original.weight, -0.03)
    with compilation.backend("eager"):  # generating code for the longest takes longer than the test
        return run(layer_like(original, casts, **how), x, g)


@pytest.mark.pairwise
@pytest.mark.parametrize("largest", [False, True], ids=["", "largest codes"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", ""])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_ternary_is_the_exact_emulation_to_the_bit(native_calls, sizes, dtype, bias, largest):
    found = pass_through("ternary", sizes, dtype, bias, largest)
    assert native_calls == [sizes], "not the native GEMM"
    exact = pass_through("ternary", sizes, dtype, bias, largest, exact=True)
    assert torch.equal(found["y"], exact["y"]), f"off by {(found['y'] - exact['y']).abs().max()}"
    emulated = pass_through("ternary", sizes, dtype, bias, largest, backend="emulated")
    assert len(native_calls) == 1, "the native GEMM where it was not wanted"
    if not bias:
        # Its GEMM is rounded to the dtype before the scales, which moves the result to a neighbor at most.
        one_ulp = torch.finfo(dtype).eps * torch.maximum(found["y"].abs(), emulated["y"].abs())
        assert ((found["y"] - emulated["y"]).abs() <= one_ulp).all()
    # What is kept for the backward pass stands for the same numbers.
    names = [name for name in found if name != "y"]
    identical({n: found[n] for n in names}, {n: emulated[n] for n in names}, "backward pass after the native GEMM:")


@each("dtype", [torch.float32, torch.bfloat16])
@each("name", [name for name, (_, gemms) in LAYERS.items() if gemms and name != "more than a product"])
def test_native_gemms_round_once(name, dtype):
    """The product of the operands, as float32 has it after their scales, and rounded to the dtype."""
    casts, gemms = LAYERS[name]
    with spied() as seen:
        found = pass_through(casts, (37, 515, 21), dtype, bias=False)
    for gemm in gemms:
        left, right = (seen[operand] for operand in GEMMS[gemm])
        assert left.values.dtype == right.values.dtype == torch.int8
        a, b = value(left.t() if gemm == "wgrad" else left), value(right.t() if gemm == "fprop" else right)
        error = (found[RESULTS[gemm]].double() - a @ b).abs()
        allowed = (torch.finfo(dtype).eps / 2 + 2.0**-21) * (a @ b).abs()
        allowed += 2.0**-48 * (a.abs() @ b.abs())  # float64 does not sum these products exactly, int32 does
        assert (error <= allowed).all(), f"{gemm}: off by {error.max():.2e}, {(error / allowed).max():.2f} x allowed"


@pytest.mark.parametrize("inner", [133144, 133145])
def test_sums_that_int32_does_not_hold(inner):
    """Up to which inner size it holds those of 127 · 127; beyond it, there is the emulated GEMM."""
    layer = layer_like(nn.Linear(inner, 1, bias=False), LAYERS["rows"][0])
    layer.weight.data = torch.ones(1, inner)
    with compilation.backend("eager"):
        y = layer(torch.ones(1, inner))
    assert y.item() == pytest.approx(inner, rel=1e-3)


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("casts", ["ternary", every(TOKENS)], ids=["ternary", "all six"])
@pytest.mark.parametrize("sizes", [(0, 33, 7), *product((1, 2, 17), repeat=3)], ids=str)
def test_of_few_rows(casts, sizes):
    """Among them those with strides of which the CPU's GEMM would make nothing, and return whatever was in memory."""
    found = pass_through(casts, sizes, torch.float32)
    expected = pass_through(casts, sizes, torch.float32, backend="emulated")
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-5)


def test_under_autocast(native_calls):
    original, x, g = nn.Linear(64, 48), torch.randn(8, 64), torch.randn(8, 48)
    found = run(layer_like(original, "ternary"), x, g, autocast=True)
    expected = run(layer_like(original.bfloat16(), "ternary"), x.bfloat16(), g.bfloat16())
    assert len(native_calls) == 2
    assert found["y"].dtype == torch.bfloat16
    for name, tensor in expected.items():
        assert torch.equal(found[name].bfloat16(), tensor), f"{name} is another one under autocast"


def test_activation_checkpointing_changes_nothing(native_calls):
    x = torch.randn(16, 32)
    identical(*(gradients(net("ternary", recompute=recompute)[0], x) for recompute in (True, False)))
    assert len(native_calls) == 5 + 3


@pytest.mark.usefixtures("compiler")
def test_a_compiled_layer(native_calls):
    layer = layer_like(nn.Linear(33, 7), "ternary")
    x, g = torch.randn(5, 33), torch.randn(5, 7)
    expected = run(layer, x, g)
    found = run(torch.compile(layer, backend="aot_eager", fullgraph=True), x, g)
    identical(found, expected, "compiled,")
    assert len(native_calls) == 2


# What a bad element [0, 3] of an operand spoils in the result of its GEMM where scales are those of rows.
ALL = slice(None)
SPOILT = {
    "fprop_x": (0, ALL),
    "fprop_w": (ALL, 0),
    "dgrad_g": (0, ALL),
    "dgrad_w": (ALL, 3),
    "wgrad_g": (3, ALL),
    "wgrad_x": (ALL, 3),
}


@pytest.mark.pairwise
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["x", "w", "bias", "g"])
@pytest.mark.parametrize("name", ["ternary", "rows", "all six", "all six, of tensors"])
def test_what_is_not_finite_shows(native_calls, name, where, bad):
    """As NaN in the rows or columns that share its scale; and nowhere else, where all is as it was."""
    casts, gemms = LAYERS[name]
    original, x, g = nn.Linear(64, 48), torch.randn(8, 64), torch.randn(8, 48)
    clean = run(layer_like(original, casts), x, g)
    {"x": x, "w": original.weight.data, "bias": original.bias.data[None], "g": g}[where][0, 3] = bad
    found = run(layer_like(original, casts), x, g)
    assert len(native_calls) == 2 * len(gemms)
    hit = {result: torch.zeros_like(found[result], dtype=torch.bool) for result in RESULTS.values()}
    for operand, place in SPOILT.items():
        if operand[-1] == where:
            cast = casts.cast_of(operand)
            # One scale for all; or rows that were lost in the forward pass, and lie along the contraction now.
            everywhere = cast is not None and (cast.scale.block == "tensor" or getattr(casts, operand) == "fprop")
            hit[RESULTS[operand.partition("_")[0]]][... if everywhere else place] = True
    if where == "bias":
        hit["y"][:, 3] = True
    for result, bad_ones in hit.items():
        tensor = found[result]
        if where == "bias" or (where == "g" and casts.dgrad_g is None):
            assert not tensor[bad_ones].isfinite().any(), f"{bad} in {where} does not show in {result}"
        else:
            assert tensor[bad_ones].isnan().all(), f"{bad} in {where} is no NaN in {result}"
        assert torch.equal(tensor[~bad_ones], clean[result][~bad_ones]), (
            f"{bad} in {where} changes the rest of {result}"
        )


@pytest.mark.parametrize("backend", ["auto", "emulated"])
def test_flops_and_where_they_run(backend, within):
    within(declared("cpu", {"int8", "cpu"}))
    model = nn.Sequential(nn.Linear(33, 24, bias=False), nn.Linear(24, 7))
    convert(model, "ternary", overrides={"1": LinearCasts.preset("int4")}, backend=backend)
    with GemmCounter(model) as counter:
        run(model, torch.randn(5, 33), torch.randn(5, 7))
    first, second = 2 * 5 * 33 * 24, 2 * 5 * 24 * 7
    assert counter.gemms == {("0", gemm): first for gemm in GEMMS} | {("1", gemm): second for gemm in GEMMS}
    assert counter.coverage().low_bit == first + second, "the two forward GEMMs are quantized"
    flops = {"int8": first, "cpu": second} if backend == "auto" else {}
    assert counter.native_shares(CPU) == {kind: part / (3 * first + 3 * second) for kind, part in flops.items()}
    assert [row[-1] for row in layer_table(model, torch.float32).rows] == [
        "native" if backend == "auto" else "emulated"
    ] * 2


@pytest.mark.parametrize(("backend", "wanted"), [("auto", torch.int8), ("emulated", torch.bfloat16)])
def test_one_byte_per_element_is_kept_for_the_backward_pass(backend, wanted):
    kept = []
    layer = layer_like(nn.Linear(64, 48, dtype=torch.bfloat16), "ternary", backend=backend)
    x = torch.randn(8, 64, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        layer(x)
    sizes = {tuple(tensor.shape): tensor.dtype for tensor in kept if tensor.numel() > 8}
    assert sizes == {(8, 64): wanted, (48, 64): wanted}, f"kept are {[(t.shape, t.dtype) for t in kept]}"
