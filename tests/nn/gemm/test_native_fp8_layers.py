"""Layers whose GEMMs are in FP8: equal to emulated ones; where they run and where not."""

import pytest
import torch
from torch import nn

from lightning_lowbit import LinearCasts
from lightning_lowbit.nn import AmaxHistories, GemmCounter
from lightning_lowbit.nn.core.gemm import native_obstacle
from lightning_lowbit.nn.native.devices import declared
from tests.nn.gemm.operands import NVFP4
from tests.nn.layers import GEMMS, assert_is_defined, by_definition, identical, layer_like, remember, run, spied, value
from tests.tables import each

CURRENT, ROW = LinearCasts.preset("fp8-current"), LinearCasts.preset("fp8-row")
DELAYED = LinearCasts.preset("fp8-delayed")
REUSE = {"dgrad_w": "fprop", "wgrad_x": "fprop"}


# Casts, and the GEMMs that are native with them.
LAYERS = {
    "current": (CURRENT, list(GEMMS)),
    "delayed": (DELAYED, list(GEMMS)),
    "row": (ROW, list(GEMMS)),
    "current, w reused": (CURRENT.replace(dgrad_w="fprop"), list(GEMMS)),
    "delayed, reused": (DELAYED.replace(**REUSE), list(GEMMS)),
    "row, w reused": (ROW.replace(dgrad_w="fprop"), ["fprop", "wgrad"]),  # whose scales lie along the contraction
    "row, reused": (ROW.replace(**REUSE), ["fprop"]),
    "rows times tensors": (ROW.replace(fprop_w=CURRENT.fprop_w, dgrad_g=CURRENT.dgrad_g), list(GEMMS)),
    "some of it": (CURRENT.replace(fprop_x=None, dgrad_w=NVFP4), ["wgrad"]),
    "reused in an emulated GEMM": (CURRENT.replace(dgrad_g=NVFP4, wgrad_g=None, **REUSE), ["fprop"]),
    "reused from an emulated GEMM": (CURRENT.replace(fprop_x=NVFP4, dgrad_w="fprop"), ["wgrad"]),
    "E5M2 twice": (CURRENT.replace(dgrad_w=CURRENT.dgrad_g), ["fprop", "wgrad"]),
    "transformed": (CURRENT.replace(hadamard={"wgrad": 16}, subtract_mean=["fprop", "wgrad"]), list(GEMMS)),
    "means, w reused": (DELAYED.replace(dgrad_w="fprop", subtract_mean=["dgrad", "wgrad"]), list(GEMMS)),
    "smoothed": (CURRENT.replace(smooth="channel"), list(GEMMS)),
    "stochastic": (ROW.with_rounding({"dgrad_g": "stochastic", "wgrad_g": "stochastic"}), list(GEMMS)),
}


@pytest.fixture(autouse=True)
def _has_native_gemms():
    """As if the CPU were a device for FP8."""
    with declared("cpu", {"fp8"}):
        yield


@pytest.mark.pairwise
@pytest.mark.parametrize("sizes", [(16, 16, 32), (13, 24, 7), (1, 16, 16), (16, 16, 1), (16, 1, 16)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", LAYERS)
def test_a_native_layer_is_the_emulated_one(native_calls, name, dtype, sizes):
    """The same operands; results differ by the order of sums, and by roundings that native GEMMs do not have."""
    tokens, inputs, outputs = sizes
    casts, native_gemms = LAYERS[name]
    original = nn.Linear(inputs, outputs, dtype=dtype)
    x, g = torch.randn(tokens, inputs).to(dtype), torch.randn(tokens, outputs).to(dtype)
    found, seen = {}, {}
    for backend in ("auto", "native", "emulated"):
        layer = layer_like(original, casts)
        layer.lowbit.backend = backend
        remember(layer, 0.5, 2.0)
        native_calls.clear()
        with spied() as seen[backend]:
            found[backend] = run(layer, x, g)
        fast = [call["use_fast_accum"] for call in native_calls]  # the forward pass alone
        assert fast == [gemm == "fprop" for gemm in (() if backend == "emulated" else native_gemms)], backend
        for gemm in GEMMS if backend != "emulated" else ():
            in_fp8 = [seen[backend][operand].values.element_size() == 1 for operand in GEMMS[gemm]]
            assert all(in_fp8) == (gemm in native_gemms), f"{gemm}: operands in FP8 {in_fp8}"
    identical(found["native"], found["auto"], "backend='native',")
    for operand, emulated in seen["emulated"].items():
        torch.testing.assert_close(
            value(seen["auto"][operand]), value(emulated), rtol=2e-7, atol=0, msg=lambda text, o=operand: f"{o}: {text}"
        )
    assert_is_defined(found["auto"], by_definition(layer, x, g, (0.5, 2.0)), dtype)
    assert torch.equal(found["auto"]["bias"], found["emulated"]["bias"])


@each("name", LAYERS)
def test_a_native_layer_of_no_tokens(name):
    layer = layer_like(nn.Linear(16, 32), LAYERS[name][0])
    found = run(layer, torch.randn(0, 16), torch.randn(0, 32))
    assert (found["y"].shape, found["x"].shape) == ((0, 32), (0, 16))
    assert not found["weight"].any()
    assert not found["bias"].any()


@pytest.mark.parametrize("casts", ["fp8-current", "fp8-row"])
def test_autocast_goes_native(native_calls, casts):
    original, x, g = nn.Linear(16, 32), torch.randn(16, 16), torch.randn(16, 32)
    found = run(layer_like(original, casts), x, g, autocast=True)
    assert [call["out_dtype"] for call in native_calls] == [torch.bfloat16] * 3
    layer = layer_like(original.bfloat16(), casts)
    expected = run(layer, x.bfloat16(), g.bfloat16())
    identical({"y": found["y"]}, {"y": expected["y"]})
    assert torch.equal(found["weight"].bfloat16(), expected["weight"])


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_asking_for_the_hardware_breaks_no_graph(monkeypatch, capability):
    """As on a GPU of this capability, of which the compiler can trace neither name nor properties."""

    def name(device=None):
        torch._dynamo.graph_break()
        return "a GPU"

    monkeypatch.setattr(torch.cuda, "get_device_name", name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (name(), capability)[1])
    monkeypatch.setattr("lightning_lowbit.nn.native.devices._trial_obstacle", lambda device, kind: None)

    def asks(x):
        return x * (2 if native_obstacle(torch.device("cuda"), "fp8") is None else 3)

    compiled = torch.compile(asks, backend="eager", fullgraph=True)
    assert compiled(torch.ones(1)).item() == (2 if capability >= (8, 9) else 3)


def test_padding_is_no_work_of_the_models():
    tokens, inputs, outputs = 13, 24, 7
    model = nn.Sequential(layer_like(nn.Linear(inputs, outputs), CURRENT))
    with GemmCounter(model) as counter:
        run(model, torch.randn(tokens, inputs), torch.randn(tokens, outputs))
    assert counter.gemms == {("0", gemm): 2 * tokens * inputs * outputs for gemm in GEMMS}
    assert counter.native_shares(torch.device("cpu")) == {"fp8": 1}


@pytest.mark.usefixtures("compiler")
@pytest.mark.fast("row, w reused")
@pytest.mark.parametrize("casts", ["delayed", "row, w reused"])
def test_a_compiled_native_layer(native_calls, casts):
    layer = layer_like(nn.Linear(16, 32), LAYERS[casts][0])
    histories = AmaxHistories(layer)
    x, g = torch.randn(16, 16), torch.randn(16, 32)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for step in range(2):
        identical(run(compiled, x, g), run(layer, x, g), f"step {step},")
        histories.advance_()
    assert len(native_calls) == 2 * 2 * len(LAYERS[casts][1])
