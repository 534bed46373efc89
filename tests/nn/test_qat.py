"""Quantization-aware training: a layer is autograd through ``F.linear(fake_quantize(x), fake_quantize(w), bias)``,
where fake quantization is that of the slow reference; golden vectors have layers of others."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from lightning_lowbit import Cast, LinearCasts, Scale
from lightning_lowbit.nn.casts.presets import quantization_aware
from lightning_lowbit.units import cpu_without
from tests import golden_vectors as golden
from tests.nn.layers import identical, layer_like, run, spied
from tests.references import quantize as reference
from tests.tables import each

TOKENS, IN, OUT = 24, 160, 40  # the second group of 128 is not a whole one
INTEGERS = [f"int{bits}" for bits in range(2, 9)]


@pytest.fixture(autouse=True)
def gemms_of_torch():
    """The GEMMs that ``F.linear`` runs, also on CPUs where ours are those of float32."""
    with cpu_without():
        yield


class Straight(torch.autograd.Function):
    """Fake quantization of x along its last dimension; the gradient is that of the result."""

    @staticmethod
    def forward(ctx, x, cast):
        return x.clone() if cast is None else reference.quantize(x.float(), cast, field="dequantized").to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


MODES = {"float32": torch.float32, "autocast": torch.bfloat16}


def as_matrix(layer, weight):
    """The weight of a layer, or its gradient, as ``[out_features, in_features]``; and back."""
    return weight.t() if isinstance(layer, Conv1D) else weight


def by_autograd(layer, casts, x, g, compute):
    """Autograd through ``F.linear`` of fake-quantized operands, in the dtype of the computation."""
    given = {"x": x, "weight": as_matrix(layer, layer.weight), "bias": layer.bias}
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in given.items() if tensor is not None}
    x_, w_ = (leaves[name].to(compute) for name in ("x", "weight"))
    bias = leaves["bias"].to(compute) if "bias" in leaves else None
    y = F.linear(Straight.apply(x_, casts.fprop_x), Straight.apply(w_, casts.fprop_w), bias)
    gradients = torch.autograd.grad(y, [x_, w_, *([] if bias is None else [bias])], g.to(compute))
    gradients = [gradient.to(leaf.dtype) for gradient, leaf in zip(gradients, leaves.values(), strict=True)]
    found = {"y": y.detach(), **dict(zip(leaves, gradients, strict=True))}
    return {**found, "weight": as_matrix(layer, found["weight"])}


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
    expected = by_autograd(original, GROUPS[name], x, g, MODES[mode])
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


@pytest.mark.parametrize("name", [name for name in golden.cases("bitnet") if name.startswith("layer_")])
def test_golden_layers(name):
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
