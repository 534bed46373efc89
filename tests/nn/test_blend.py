"""Progressive quantization: every operand with a cast is ``x + λ (q(x) - x)``; when λ takes effect, what it may be."""

import copy

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from lightning_lowbit import Cast, Scale, convert
from lightning_lowbit.nn import OPERANDS, AmaxHistories, set_blend
from lightning_lowbit.nn.casts.presets import quantization_aware
from lightning_lowbit.nn.native.devices import declared
from lightning_lowbit.quant import rotate, surrogate_factor
from lightning_lowbit.units import float32_products
from tests.nn import named_casts
from tests.nn.amax.histories import remembered
from tests.nn.layers import (
    GEMMS,
    RESULTS,
    Net,
    every,
    gradients,
    identical,
    layer_like,
    net,
    remember,
    run,
    spied,
    value,
)
from tests.nn.named_casts import NVFP4, SATURATING
from tests.tables import each

CPU = torch.device("cpu")
TOKENS, IN, OUT = 24, 64, 32
REMEMBERED = (0.5, 2.0)
INT4 = Cast("int4", Scale("fp32", 32), round_to_bfloat16=True)
NAMED = (
    *("ternary", "int8", "int4", "int2", "e1m2", "nvfp4", "mxfp4", "fp8-delayed", "fp8-current", "fp8-row"),
    *("rows", "rows reused", "tensors reused", "some hp", "qaf", "surrogates", "delayed, surrogates"),
)
# Without what is done to a GEMM's operands before they are quantized, which λ = 0 leaves where it is.
PLAIN = {
    **{name: named_casts.CASTS[name] for name in NAMED},
    "W4A16": quantization_aware(None, INT4),
    "from min to max": quantization_aware(
        Cast("int8", Scale("fp32", "row")), INT4.replace(scale={"statistic": "minmax"})
    ),
}
CASTS = {
    **PLAIN,
    **{name: named_casts.CASTS[name] for name in ("nvfp4-nvidia", "mxfp4-rht", "surrogates, rotated", "channels")},
    "rotated": NVFP4.replace(hadamard=dict.fromkeys(GEMMS, 16)),
    "centered": NVFP4.replace(subtract_mean=list(GEMMS)),
}


def tensors(dtype=torch.float32):
    """Input, with a channel that is far larger, and gradient of the output."""
    generator = torch.Generator().manual_seed(6)
    x, g = (torch.randn(TOKENS, size, generator=generator) for size in (IN, OUT))
    x[:, 5] *= 30
    return x.to(dtype), g.to(dtype)


def blended(original, casts, blend, **kwargs):
    """A converted copy; λ is set as a tensor, which it stays at 1."""
    layer = layer_like(original, casts, **kwargs)
    remember(layer, *REMEMBERED)
    set_blend(layer, None if blend is None else torch.tensor(blend))
    return layer


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("mode", ["float32", "bfloat16", "float64", "autocast"])
@pytest.mark.parametrize("kind", ["bias", "no bias", "Conv1D"])
@pytest.mark.parametrize("name", PLAIN)
def test_at_0_it_is_the_original(name, kind, mode):
    """A linear layer to the bit; Conv1D's gradients come from GEMMs of other layouts."""
    dtype = torch.float32 if mode == "autocast" else getattr(torch, mode)
    original = Conv1D(OUT, IN).to(dtype) if kind == "Conv1D" else nn.Linear(IN, OUT, bias=kind == "bias", dtype=dtype)
    x, g = tensors(dtype)
    found, expected = (run(one, x, g, mode == "autocast") for one in (blended(original, PLAIN[name], 0.0), original))
    if kind != "Conv1D":
        identical(found, expected, f"λ = 0, {name}:")
    for result, tensor in expected.items():
        torch.testing.assert_close(found[result], tensor, msg=lambda text, result=result: f"{result}: {text}")


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASTS)
def test_at_0_only_what_transforms_do_remains(name, dtype):
    """A rotation and its inverse, a mean and the rest, a power of two and its reciprocal: the same up to roundings."""
    original = nn.Linear(IN, OUT, dtype=dtype)
    x, g = tensors(dtype)
    found, expected = run(blended(original, CASTS[name], 0.0), x, g), run(original, x, g)
    w = original.weight.detach().abs()
    sizes = {"y": x.abs() @ w.t(), "x": g.abs() @ w, "weight": g.abs().t() @ x.abs()}
    for result, size in sizes.items():
        error = (found[result] - expected[result]).abs()
        assert (error <= 4 * torch.finfo(dtype).eps * size.max()).all(), f"{result}: off by {error.max()}"


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASTS)
def test_at_1_operands_are_the_quantized_ones(name, dtype):
    """As a tensor they are dense, in the dtype of the computation; as a number they are as if λ had never been."""
    original, (x, g) = nn.Linear(IN, OUT, dtype=dtype), tensors(dtype)
    with spied() as expected:
        results = run(blended(original, CASTS[name], None), x, g)
    with spied() as found:
        run(blended(original, CASTS[name], 1.0), x, g)
    for operand in OPERANDS:
        assert found[operand].factor is None, f"{operand} keeps a factor"
        assert found[operand].values.dtype == dtype, f"{operand} is in {found[operand].values.dtype}"
        wanted = expected[operand].values.float()
        if expected[operand].factor is not None:
            wanted = wanted * expected[operand].factor
        assert torch.equal(found[operand].values, wanted.to(dtype)), f"{operand} is not the quantized one"
    layer = blended(original, CASTS[name], 0.3)
    set_blend(layer, 1)
    identical(run(layer, x, g), results, "λ = 1:")


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("exact", [False, True], ids=["", "exact"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASTS)
def test_operands_are_on_their_way(name, dtype, exact):
    """In the space where they are quantized, by the casts and random bits that they have without λ."""
    casts, original, (x, g) = CASTS[name], nn.Linear(IN, OUT, bias=False, dtype=dtype), tensors(dtype)
    seen = {}
    for blend in (0.0, None, 0.3):
        with spied() as seen[blend]:
            results = run(blended(original, casts, blend, exact=exact), x, g)
    if name in PLAIN and not casts.surrogate and not exact:
        for gemm, (left, right) in GEMMS.items():
            a, b = seen[0.3][left], seen[0.3][right]
            a, b = (a.t() if gemm == "wgrad" else a).values, (b.t() if gemm == "fprop" else b).values
            with float32_products([dtype], CPU):
                product = a @ b
            assert torch.equal(results[RESULTS[gemm]], product), f"{gemm} is another product"
    raw = {"x": x, "w": original.weight.detach(), "g": g}
    for operand in OPERANDS:
        # What is reused is what the forward pass used, which without λ may have been rounded since.
        end = value(seen[None][f"fprop_{operand[-1]}" if getattr(casts, operand) == "fprop" else operand])
        start, found = (value(seen[blend][operand]) for blend in (0.0, 0.3))
        gemm = operand.partition("_")[0]
        if gemm not in casts.hadamard and gemm not in casts.subtract_mean and casts.smooth is None:
            assert torch.equal(start, raw[operand[-1]].double()), f"{operand} begins elsewhere"
        if casts.cast_of(operand) is None:
            assert torch.equal(found, start), f"{operand} has no cast, and moves"
            continue
        expected = start + torch.tensor(0.3).double() * (end - start)
        allowed = 2.0**-22 * torch.maximum(start.abs(), end.abs())
        if not exact:
            allowed += torch.finfo(dtype).eps / 2 * expected.abs()
        error = (found - expected).abs()
        assert (error <= allowed).all(), f"{operand}: off by {error.max():.2e}, {(error / allowed).max():.2f} x allowed"
        assert not torch.equal(found, start) and not torch.equal(found, end), f"{operand} does not move"


@each("blend", [0.0, 0.3, 0.99, 1.0])
@each("dtype", [torch.float32, torch.bfloat16])
@each("kind", ["trust", "dge"])
def test_surrogates_are_on_their_way(kind, dtype, blend):
    """The gradient is multiplied by ``1 + λ (f - 1)``: of what is quantized in part, that part alone rounds."""
    original, (x, g) = nn.Linear(IN, OUT, dtype=dtype), tensors(dtype)
    casts = every(SATURATING)
    straight = run(blended(original, casts, blend), x, g)
    found = run(blended(original, casts.replace(surrogate={"fprop_x": kind, "fprop_w": kind}), blend), x, g)
    identical({"y": found["y"]}, {"y": straight["y"]})
    for result, tensor in (("x", x), ("weight", original.weight.detach())):
        factor = surrogate_factor(kind, tensor, SATURATING, 1).double()
        assert factor.unique().numel() > 1, f"nothing shows in {result}"
        share = torch.tensor(blend).double()
        expected = straight[result].double() * (1 + share * (factor - 1))
        # Two products are rounded: that with f, and what becomes of it.
        largest = straight[result].double().abs() * (share * factor + (1 - share))
        error, allowed = (found[result].double() - expected).abs(), torch.finfo(dtype).eps * largest
        assert (error <= allowed).all(), f"{result}: off by {error.max():.2e}, {(error / allowed).max():.2f} x allowed"


@pytest.mark.parametrize("kind", ["trust", "dge"])
def test_rotated_surrogates_are_on_their_way(kind):
    """In the space in which the tensor was rounded; at λ = 0 the gradient does not go there."""
    original, (x, g) = nn.Linear(IN, OUT), tensors()
    casts = every(SATURATING, hadamard={"fprop": 16})
    with_surrogate = casts.replace(surrogate={"fprop_x": kind, "fprop_w": kind})
    signs = casts.hadamard["fprop"].diagonal(None, x.device)
    for blend in (0.0, 0.3):
        straight, found = (run(blended(original, how, blend), x, g) for how in (casts, with_surrogate))
        for result, tensor in (("x", x), ("weight", original.weight.detach())):
            turned = rotate(straight[result], signs, 1)
            factor = surrogate_factor(kind, rotate(tensor, signs, 1), SATURATING, 1)
            through = rotate(turned * factor, signs, 1, inverse=True)
            expected = straight[result] + blend * (through - straight[result])
            allowed = 0.0 if blend == 0 else 1e-5 * straight[result].abs().max().item()
            torch.testing.assert_close(found[result], expected, rtol=0, atol=allowed)


def test_histories_go_on():
    original, (x, g) = nn.Linear(IN, OUT), tensors()
    found = {}
    for blend in (None, 0.0, 0.3):
        layer = layer_like(original, "fp8-delayed")
        histories = AmaxHistories(layer)
        set_blend(layer, None if blend is None else torch.tensor(blend))
        for size in (1.0, 4.0):
            run(layer, x * size, g)
            histories.advance_()
        found[blend] = remembered(histories)
    assert len(found[None]) == len(OPERANDS)
    assert found[0.3] == found[0.0] == found[None]


@each("name", CASTS)
def test_a_backward_pass_has_the_share_of_its_forward_pass(name):
    """λ of the next micro-batch may be set before this one's backward pass."""
    original, (x, g) = nn.Linear(IN, OUT), tensors()
    found = {}
    for later in (0.3, 0.8):
        layer, x_ = blended(original, CASTS[name], 0.3), x.clone().requires_grad_()
        y = layer(x_)
        layer.lowbit.blend.fill_(later)
        y.backward(g)
        found[later] = {"x": x_.grad, **{n: p.grad for n, p in layer.named_parameters()}}
    identical(found[0.8], found[0.3], "λ was changed in between:")


@pytest.mark.parametrize("name", ["ternary", "fp8-current"])
def test_on_its_way_nothing_is_native(within, name):
    within(declared("cpu", {"fp8", "int8"}))
    layer = layer_like(nn.Linear(IN, OUT), name)
    native = layer.native_gemms(torch.device("cpu"))
    assert native, "nothing shows"
    set_blend(layer, 0.5)
    assert layer.native_gemms(torch.device("cpu")) == ()
    assert layer.native_gemms(torch.device("cpu"), layer.full_casts) == native, "what it will be, all the way"


def test_it_changes_in_place_and_for_all_layers():
    model, _ = net("int4")
    share, x = torch.tensor(0.0), torch.randn(16, 32)
    set_blend(model, share)
    start = gradients(model, x)
    for number in (0.5, 0.25):
        share.fill_(number)
        found = gradients(model, x)
        assert not torch.equal(found["y"], start["y"])
        other, _ = net("int4")
        set_blend(other, number)
        identical(found, gradients(other, x), f"λ = {number}:")


@pytest.mark.slow
@pytest.mark.parametrize("casts", ["ternary", "delayed, surrogates"])
def test_it_costs_no_compilation_to_change(compiler, casts):
    model, keys = net(CASTS[casts])
    compiled = torch.compile(model, backend=compiler, fullgraph=True)
    x, share = torch.randn(16, 32), torch.tensor(0.0)
    set_blend(model, share)
    for step, number in enumerate((0.0, 0.25, 0.5, 1.0)):
        keys.fill_(step)
        share.fill_(number)
        identical(gradients(compiled, x), gradients(model, x), f"compiled, λ = {number}:")
    assert compiler.frame_count == 1, f"{compiler.frame_count} compilations"
    set_blend(model, None)
    gradients(compiled, x)
    assert compiler.frame_count == 2, "all the way is another graph"


NUMBERS = (-0.1, 1.1, 2, torch.inf, torch.nan, True, "0.5")
TENSORS = torch.tensor(1.5), torch.tensor([0.5]), torch.tensor(0.5, dtype=torch.float64)


@each(
    ("blend", "message"),
    [
        *((number, rf"blend is λ, .*, 0 or more and at most 1; got {number!r}") for number in NUMBERS),
        *((tensor, "0-d float32 tensor|at most 1") for tensor in TENSORS),
    ],
)
def test_what_is_no_share_is_refused(blend, message):
    """When it is set, and not by the kernel that meets it first."""
    model = convert(Net(), "int4")
    set_blend(model, 0.5)
    with pytest.raises(ValueError, match=message):
        set_blend(model, blend)
    assert model.first.lowbit.blend == 0.5, "what was refused has been set"


def test_numbers_and_copies():
    model = convert(Net(), "int4")
    for number in (0, 0.0, 0.5):
        set_blend(model, number)
        share = model.first.lowbit.blend
        assert (share.dtype, share.shape, share.item()) == (torch.float32, (), number)
        assert model.second.lowbit.blend is share, "layers do not share λ"
    twin = copy.deepcopy(model)
    twin.first.lowbit.blend.fill_(0.75)
    assert model.first.lowbit.blend == 0.5
    assert list(model.state_dict()) == list(Net().state_dict()), "λ is none of the model's state"
    for whole in (1, 1.0, None):
        set_blend(model, whole)
        assert model.first.lowbit.blend is None
