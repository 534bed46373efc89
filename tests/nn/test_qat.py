"""Quantization-aware training: a layer is autograd through ``F.linear(fake_quantize(x), fake_quantize(w), bias)``.

Fake quantization with its straight-through gradient is written out here, and once more in transformers.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.integrations.bitnet import AutoBitLinear
from transformers.pytorch_utils import Conv1D

from lightning_lowbit import Cast, LinearCasts, Scale
from lightning_lowbit.nn.casts.presets import quantization_aware
from lightning_lowbit.units import cpu_without
from tests import golden_vectors as golden
from tests.nn.layers import identical, layer_like, run, spied
from tests.tables import each

TOKENS, IN, OUT = 24, 160, 40  # the second group of 128 is not a whole one
INTEGERS = [f"int{bits}" for bits in range(2, 9)]


@pytest.fixture(autouse=True)
def gemms_of_torch():
    """The GEMMs that ``F.linear`` runs, also on CPUs where ours are those of float32."""
    with cpu_without():
        yield


# --- by definition ----------------------------------------------------------------------------------------------------


def fake_quantize(x, cast, dtype):
    """``code * s`` with groups along the last dimension, in float32 and then in ``dtype``; in float64 for float64.

    absmax   code = clamp(round(x e), -largest, largest)        e = largest / max|x|
    absmean  likewise                                           e = 1 / mean|x|
    minmax   code = clamp(round(x e), -z, 2^bits - 1 - z)       e = (2^bits - 1) / (max x - min x),  z = round(-min x e)
    """
    scale = cast.scale
    step, largest = (0.25, 1.75) if cast.element == "e1m2" else (1.0, 1.0)
    if cast.element.startswith("int"):
        largest = 2.0 ** (int(cast.element[3:]) - 1) - 1
    rows = x.float().reshape(
        1 if scale.block == "tensor" else -1, x.numel() if scale.block == "tensor" else x.shape[-1]
    )
    group = rows.shape[1] if isinstance(scale.block, str) else scale.block
    groups = F.pad(rows, (0, -rows.shape[1] % group)).view(len(rows), -1, group)
    low, high = groups.amin(-1, True).clamp(max=0), groups.amax(-1, True).clamp(min=0)
    amount, levels = {
        "absmax": (torch.maximum(-low, high), largest),
        "absmean": (groups.double().abs().mean(-1, True).float(), 1.0),
        "minmax": (high - low, 2 * largest + 1),
    }[scale.statistic]
    amount = amount.clamp(min=scale.epsilon) * scale.factor
    e = torch.where(amount > 0, torch.full_like(amount, levels) / amount, 1.0)
    codes = (groups * e / step).round() * step
    if scale.statistic == "minmax":
        z = (-low * e).round()
        codes = torch.minimum(torch.maximum(codes, -z), levels - z)
    else:
        codes = codes.clamp(-largest, largest)
    wide = dtype if dtype == torch.float64 else torch.float32
    values = codes.to(wide) * (1 / e).to(wide)
    return values.reshape(len(rows), -1)[:, : rows.shape[1]].reshape(x.shape).to(dtype)


class Straight(torch.autograd.Function):
    """Fake quantization of x, rounded to the dtype of the computation; the gradient is that of the result."""

    @staticmethod
    def forward(ctx, x, cast, compute):
        """Of the dtype of x. Only what has scales of rows or tensors may be wider than the computation."""
        rounded = x.to(compute)
        if cast is None:
            return rounded.to(x.dtype)
        outside = isinstance(cast.scale.block, str)
        return fake_quantize(rounded, cast, x.dtype if outside else compute).to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None, None


MODES = {"float32": torch.float32, "autocast": torch.bfloat16}


def as_matrix(layer, weight):
    """The weight of a layer, or its gradient, as ``[out_features, in_features]``; and back."""
    return weight.t() if isinstance(layer, Conv1D) else weight


def reference(layer, casts, x, g, compute):
    """Autograd through ``F.linear`` of fake-quantized operands, in the dtype of the computation."""
    given = {"x": x, "weight": as_matrix(layer, layer.weight), "bias": layer.bias}
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in given.items() if tensor is not None}
    x_, w_ = (leaves[name].to(compute) for name in ("x", "weight"))
    bias = leaves["bias"].to(compute) if "bias" in leaves else None
    y = F.linear(Straight.apply(x_, casts.fprop_x, compute), Straight.apply(w_, casts.fprop_w, compute), bias)
    gradients = torch.autograd.grad(y, [x_, w_, *([] if bias is None else [bias])], g.to(compute))
    gradients = [gradient.to(leaf.dtype) for gradient, leaf in zip(gradients, leaves.values(), strict=True)]
    found = {"y": y.detach(), **dict(zip(leaves, gradients, strict=True))}
    return {**found, "weight": as_matrix(layer, found["weight"])}


def sizes(layer, casts, x, g, compute):
    """What each GEMM adds up, regardless of signs: its rounding errors are relative to that."""
    x, w = (
        Straight.apply(tensor.detach().double(), cast, compute).abs()
        for tensor, cast in ((x, casts.fprop_x), (as_matrix(layer, layer.weight), casts.fprop_w))
    )
    g = g.double().abs()
    dw = g.flatten(0, -2).t() @ x.flatten(0, -2)
    return {"y": x @ w.t(), "x": g @ w, "weight": as_matrix(layer, dw)}


def assert_close(found, expected, allowed, message):
    for name, most in allowed.items():
        tensor = found[name]
        assert tensor is not None, f"{message} {name} is missing"
        error = (tensor.double() - expected[name].double()).abs()
        assert (error <= most).all(), (
            f"{message} {name}: off by {error.max():.2e}, {(error / most).max():.2f} x allowed"
        )


# --- dense operands: groups -------------------------------------------------------------------------------------------


def group(element, size=128, **scale):
    return Cast(element, Scale("fp32", size, **scale), round_to_bfloat16=True)


GROUPS = {
    **{name: LinearCasts.preset(name) for name in (*INTEGERS, "e1m2")},
    "W4A16": quantization_aware(None, group("int4")),
    "W16A8": quantization_aware(group("int8"), None),
    "W2A8, other groups": quantization_aware(group("int8", 64), group("int2", 32)),
    **{
        f"{name} from min to max": quantization_aware(group("int8"), group(name, 32, statistic="minmax"))
        for name in INTEGERS
    },
    "ternary groups": quantization_aware(group("int8"), group("ternary", 32, statistic="absmean", epsilon=1e-5)),
}


@pytest.mark.pairwise
@pytest.mark.parametrize("shape", [(TOKENS,), (3, 8)], ids=["matrix", "batch"])
@pytest.mark.parametrize("kind", ["bias", "no bias", "Conv1D"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", GROUPS)
def test_groups_are_autograd_to_the_bit(name, mode, kind, shape):
    original = Conv1D(OUT, IN) if kind == "Conv1D" else nn.Linear(IN, OUT, bias=kind == "bias")
    x, g = torch.randn(*shape, IN), torch.randn(*shape, OUT)
    x[..., 3] *= 20
    found = run(layer_like(original, GROUPS[name]), x, g, mode == "autocast")
    expected = reference(original, GROUPS[name], x, g, MODES[mode])
    assert expected["y"].isfinite().all()
    identical(found, expected, f"{name}, {mode}:")


@each("name", GROUPS)
def test_groups_are_dense_in_the_dtype_of_the_computation(name):
    """So that no GEMM is one of float32, and nothing wider is kept for the backward pass."""
    with spied() as seen:
        run(layer_like(nn.Linear(IN, OUT), GROUPS[name]), torch.randn(TOKENS, IN), torch.randn(TOKENS, OUT), True)
    for operand, (values, factor) in seen.items():
        assert values.dtype == torch.bfloat16, f"{operand} is in {values.dtype}"
        assert factor is None, f"{operand} has a factor"


# --- others' ----------------------------------------------------------------------------------------------------------

TERNARY = LinearCasts.preset("ternary")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_bitlinear(dtype, bias):
    """The same weights in transformers' online quantization, which rounds what it dequantizes to the dtype."""
    peer = AutoBitLinear(IN, OUT, bias=bias, dtype=dtype, online_quant=True).to(dtype)  # transformers 5.8 does not
    original = nn.Linear(IN, OUT, bias=bias, dtype=dtype)
    original.load_state_dict(peer.state_dict())
    x, g = torch.randn(3, 8, IN).to(dtype), torch.randn(3, 8, OUT).to(dtype)
    # The peer's scale may be off by its last bit, which decides where an element lies half-way between two levels.
    place = (x.double() * 127 / x.double().abs().amax(-1, True)).remainder(1)
    x[(place - 0.5).abs() < 1e-4] = 0
    found = run(layer_like(original, "ternary"), x, g)
    # Its functions are torch.compiled: without a compiler they give the same numbers, and soon.
    with torch.compiler.set_stance("force_eager"):
        expected = run(peer, x, g)
    summed = sizes(original, TERNARY, x, g, dtype)
    eps = torch.finfo(dtype).eps
    # Both operands of the forward pass are rounded there and not here; of those of the backward passes, the weight.
    operands = {"y": 2, "x": 1, "weight": 0}
    allowed = {
        name: eps * expected[name].double().abs() + (count * eps / 2 + 2.0**-20) * summed[name]
        for name, count in operands.items()
    }
    if bias:
        allowed["y"] = allowed["y"] + eps * original.bias.detach().abs().double()
        assert torch.equal(found["bias"], expected["bias"])
    assert_close(found, expected, allowed, f"{dtype}")


@pytest.mark.parametrize("name", [name for name in golden.cases("bitnet") if name.startswith("layer_")])
def test_golden_layers(name):
    """Forward passes of whole layers, exact from the codes, and as transformers' two classes compute them."""
    case = golden.case("bitnet", name)
    x, bias = torch.from_numpy(case["layer_x"]), torch.from_numpy(case["layer_bias"])
    original = nn.Linear(x.shape[1], len(case["w"]), bias=len(bias) > 0)
    original.weight.data = case["w"]
    if len(bias):
        original.bias.data = bias
    expected = torch.from_numpy(case["layer_y_float64_nobias"])
    for exact in (False, True):
        y = layer_like(original, "ternary", exact=exact)(x).detach().double()
        y = y - bias if len(bias) else y
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6 * expected.abs().max().item())
    for peer in ("layer_y_bitlinear", "layer_y_autobitlinear_nobias"):
        others = torch.from_numpy(case[peer]).double()
        others = others - bias if len(bias) and "nobias" not in peer else others
        torch.testing.assert_close(y, others, rtol=1e-5, atol=1e-6 * expected.abs().max().item())
