"""Layers whose GEMMs of codes a CPU computes natively: the emulated ones, up to the order of sums."""

import copy

import pytest
import torch
from torch import nn

from lightning_lowbit import LinearCasts, convert, pack_frozen
from lightning_lowbit.callbacks.layer_table import layer_table
from lightning_lowbit.kernels.cpu.gemms import instructions
from lightning_lowbit.kernels.gemms import CodeOperand
from lightning_lowbit.nn import PRESETS, LayerKeys
from lightning_lowbit.nn.attention.products import ActivationProduct
from lightning_lowbit.nn.native import devices
from tests.nn.layers import GEMMS, assert_is_defined, by_definition, layer_like, run, spied, value
from tests.nn.native.test_layer import LAYERS
from tests.tables import each

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(instructions() is None, reason="the C++ kernels cannot be built")

# Presets, and the GEMMs of codes that they have.
NATIVE = {
    **dict.fromkeys(("nvfp4", "nvfp4-nvidia", "nvfp4-4over6", "nvfp4-row", "quartet2", "ufp4"), [*GEMMS]),
    **dict.fromkeys(("mxfp4", "mxfp4-rht"), [*GEMMS]),
    "mxfp8-nvfp4": ["dgrad", "wgrad"],
    **dict.fromkeys(("nvfp4-mxfp8", "int5", "int4", "int3", "int2", "e1m2", "ternary"), ["fprop"]),
}
OTHERS = ("one level", "larger blocks", "means", "surrogate", "smoothed", "blocks reused", "forward alone")
CASTS = {name: LinearCasts.preset(name) for name in NATIVE} | {name: LAYERS[name][0] for name in OTHERS}
CASTS |= {
    f"{name}, not rounded": LinearCasts.of({"preset": name, "every": {"round_to_bfloat16": False}})
    for name in ("int4", "int2", "e1m2")
}


@pytest.fixture(autouse=True)
def codes_on_cpus(within):
    """Also where other GEMMs are faster."""
    within(devices.declared("cpu", {"cpu"}))


@each("name", PRESETS)
def test_gemms_of_presets(name):
    kinds = LinearCasts.preset(name).traits.native_kinds
    assert [gemm for gemm in kinds if "cpu" in kinds[gemm]] == NATIVE.get(name, [])


def pair_of(tokens, inputs, outputs, dtype):
    torch.manual_seed(0)
    original = nn.Linear(inputs, outputs, dtype=dtype)
    return original, torch.randn(tokens, inputs).to(dtype), torch.randn(tokens, outputs).to(dtype)


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("sizes", [(16, 32, 48), (13, 40, 7), (1, 16, 16), (130, 200, 150)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", CASTS)
def test_results_are_those_by_definition(name, dtype, sizes):
    """And operands are the emulation's to the bit."""
    original, x, g = pair_of(*sizes, dtype)
    with spied() as operands:
        results = run(layer := layer_like(original, CASTS[name]), x, g)
    with spied() as emulated:
        expected = run(layer_like(original, CASTS[name], backend="emulated"), x, g)
    codes = [gemm for gemm, kind in layer.native_kinds(CPU, dtype=dtype).items() if kind == "cpu"]
    for operand, quantized in operands.items():
        assert isinstance(quantized, CodeOperand) == (operand.partition("_")[0] in codes), operand
        assert torch.equal(value(quantized), value(emulated[operand])), operand
    assert_is_defined(results, by_definition(layer, x, g), dtype)
    assert torch.equal(results["bias"], expected["bias"])


@each("name", [name for name in NATIVE if name not in ("nvfp4-row", "ufp4")])
def test_frozen_codes_give_the_bits_of_their_matrices(name):
    original, x, g = pair_of(24, 64, 48, torch.float32)
    original.weight.requires_grad_(False)
    results = []
    for freeze, how in ((convert, {}), (pack_frozen, {"dtype": torch.float32})):
        LayerKeys(layer := freeze(copy.deepcopy(original), name, **how)).fill_(1)
        results.append(run(layer, x, g))
    assert torch.equal(results[0]["y"], results[1]["y"])
    if LinearCasts.preset(name).dgrad_w == "fprop":
        assert torch.equal(results[0]["x"], results[1]["x"])


@each("module", [nn.Conv1d(16, 24, 3, padding=1), nn.Conv1d(16, 24, 1)])
def test_convolutions_are_the_emulated_ones_up_to_the_order_of_sums(module):
    x, g = torch.randn(3, 16, 20), torch.randn(3, 24, 20)
    results = [run(layer_like(module, "nvfp4", backend=backend), x, g) for backend in ("auto", "emulated")]
    for name, tensor in results[1].items():
        torch.testing.assert_close(results[0][name], tensor, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


QAF = LinearCasts.preset("int4").phase("qaf").replace(dgrad_w=None, wgrad_x=None)


@each(
    ("casts", "dtype", "message"),
    [
        (QAF, torch.bfloat16, "fprop rounds operands to bfloat16 .* Give its casts round_to_bfloat16=False"),
        ("nvfp4", torch.float16, "cpu GEMMs give bfloat16 or float32 here, and this pass computes in torch"),
    ],
)
def test_dtypes_that_are_emulated(casts, dtype, message):
    layer = layer_like(nn.Linear(32, 32, dtype=dtype), casts)
    assert layer.native_gemms(CPU, dtype=torch.float32) and layer.native_gemms(CPU, dtype=dtype) == ()
    layer.lowbit.backend = "native"
    with pytest.raises(ValueError, match=message):
        layer(torch.randn(4, 32).to(dtype))


def test_what_is_emulated_is_said_for_the_dtype_of_the_passes():
    model = nn.Sequential(layer_like(nn.Linear(32, 32), "int4"))
    assert [row[-1] for row in layer_table(model, torch.float32).rows] == ["native"]
    assert [row[-1] for row in layer_table(model, torch.bfloat16).rows] == ["emulated"]
    reason = "fprop rounds operands to bfloat16 (round_to_bfloat16), and GEMMs of codes do not"
    assert model[0].emulated_because(CPU, torch.bfloat16) == {"fprop": reason}
    assert model[0].emulated_because(CPU, torch.float32) == {}
    not_rounded = layer_like(nn.Linear(32, 32), CASTS["int4, not rounded"])
    assert not_rounded.native_gemms(CPU, dtype=torch.bfloat16) == ("fprop",)


def test_products_of_attention_are_emulated():
    product = ActivationProduct(nn.Module())
    product.set_casts(CASTS["nvfp4"])
    assert product.native_kinds(CPU) == {}
    assert product.native_gemms(CPU) == ()
