"""Layers on a stand-in for block-scaled tensor cores: the emulated ones, up to the order of sums."""

import pytest
import torch
from torch import nn
from torch.nn.functional import ScalingType as Scaling

from lightning_lowbit import Cast, LinearCasts, Scale
from lightning_lowbit.nn import set_blend
from lightning_lowbit.nn.core.operands import PrequantizedWeight
from lightning_lowbit.nn.native import gemms
from lightning_lowbit.nn.native.operand import BlockOperand
from lightning_lowbit.nn.native.table import kinds_of
from tests.nn.layers import GEMMS, assert_is_defined, by_definition, layer_like, run, spied
from tests.tables import each

CPU = torch.device("cpu")
NV, MX = Cast("e2m1", Scale("e4m3", 16, two_level=True)), Cast("e4m3", Scale("e8m0", 32))
NVFP4, MXFP8 = LinearCasts.preset("nvfp4"), LinearCasts.preset("mxfp8")
E4M3, E5M2 = (Cast(element, Scale("fp32", "tensor")) for element in ("e4m3", "e5m2"))
INT8 = Cast("int8", Scale("fp32", "row"))
TILES = MX.replace(scale={"block": (32, 32)})
# Casts, and the GEMMs that are native with them.
LAYERS = {
    **{
        name: (LinearCasts.preset(name), list(GEMMS))
        for name in ("nvfp4", "nvfp4-nvidia", "nvfp4-4over6", "mxfp8", "fp8-blockwise")
    },
    # In bfloat16 alone; in float32 there is no such GEMM.
    "mxfp4": (LinearCasts.preset("mxfp4"), list(GEMMS)),
    "mxfp4-rht": (LinearCasts.preset("mxfp4-rht"), list(GEMMS)),
    "one level": (NVFP4.replace(fprop_x=NV.replace(scale={"two_level": False})), list(GEMMS)),
    "larger blocks": (NVFP4.replace(fprop_x=NV.replace(scale={"block": 48})), list(GEMMS)),
    "means": (NVFP4.replace(subtract_mean=["fprop", "dgrad", "wgrad"]), list(GEMMS)),
    "surrogate": (NVFP4.replace(surrogate={"fprop_w": "dge"}), list(GEMMS)),
    "smoothed": (NVFP4.replace(smooth="channel"), list(GEMMS)),
    "shared tiles": (MXFP8.replace(fprop_w=TILES, dgrad_w=TILES), list(GEMMS)),
    "both in tiles": (MXFP8.replace(fprop_x=TILES, fprop_w=TILES, dgrad_w="fprop", wgrad_x="fprop"), list(GEMMS)),
    "blocks reused": (NVFP4.replace(dgrad_w="fprop", wgrad_x="fprop"), ["fprop"]),  # they lie along another axis
    "tiles and a mean": (MXFP8.replace(fprop_w=TILES, dgrad_w="fprop", subtract_mean=["dgrad"]), ["fprop", "wgrad"]),
    "forward alone": (NVFP4.phase("qaf"), ["fprop"]),
    "backward alone": (NVFP4.phase("hp-forward"), ["dgrad", "wgrad"]),
    "128 twice": (
        LinearCasts(**dict.fromkeys(("fprop_x", "fprop_w"), Cast("e4m3", Scale("fp32", (128, 128))))),
        ["fprop"],
    ),
    "tiles on the left": (
        LinearCasts(Cast("e4m3", Scale("fp32", (128, 128))), Cast("e4m3", Scale("fp32", 128))),
        ["fprop"],
    ),
}
BFLOAT16 = {"mxfp4", "mxfp4-rht"}  # whose results are rounded to bfloat16 before they are scaled


@pytest.mark.pairwise
@pytest.mark.parametrize("sizes", [(16, 32, 48), (13, 40, 7), (1, 16, 16), (130, 200, 150), (0, 16, 16)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", LAYERS)
def test_a_native_layer_is_the_emulated_one(scaled_mm, name, dtype, sizes):
    tokens, inputs, outputs = sizes
    casts, native = LAYERS[name]
    original = nn.Linear(inputs, outputs, dtype=dtype)
    x, g = torch.randn(tokens, inputs).to(dtype), torch.randn(tokens, outputs).to(dtype)
    found, seen, layer = {}, {}, original
    for backend in ("auto", "emulated"):
        layer = layer_like(original, casts, backend=backend)
        assert layer.native_gemms(CPU) == (() if backend == "emulated" else tuple(native))
        with spied() as seen[backend]:
            found[backend] = run(layer, x, g)
    without = not tokens or (name in BFLOAT16 and dtype == torch.float32)
    assert len(scaled_mm.calls) == (0 if without else len(native))
    for operand, emulated_operand in seen["emulated"].items():
        quantized = seen["auto"][operand]
        if isinstance(quantized, BlockOperand):
            dim = {"fprop": 1, "dgrad": 1 if operand == "dgrad_g" else 0, "wgrad": 0}[operand.partition("_")[0]]
            quantized = quantized.decoded(dtype, dim)
        assert torch.equal(quantized.values, emulated_operand.values), f"{operand}: other values"
    if without:
        for name, tensor in found["emulated"].items():
            torch.testing.assert_close(found["auto"][name], tensor, rtol=1e-5, atol=1e-5)
        return
    assert_is_defined(found["auto"], by_definition(layer, x, g), dtype, 2 if name in BFLOAT16 else 1)
    assert torch.equal(found["auto"]["bias"], found["emulated"]["bias"])


def test_the_recipes_of_the_presets(scaled_mm):
    for name, recipes in {
        "nvfp4": {(Scaling.BlockWise1x16, Scaling.TensorWise) * 2},
        "mxfp4": {(Scaling.BlockWise1x32,) * 2},
        "mxfp8": {(Scaling.BlockWise1x32,) * 2},
        "fp8-blockwise": {
            (Scaling.BlockWise1x128, Scaling.BlockWise128x128),
            (Scaling.BlockWise1x128, Scaling.BlockWise1x128),  # of g and x, in wgrad
        },
    }.items():
        scaled_mm.calls.clear()
        layer = layer_like(nn.Linear(160, 136, bias=False, dtype=torch.bfloat16), name)
        run(layer, torch.randn(200, 160).bfloat16(), torch.randn(200, 136).bfloat16())
        assert {call[0] for call in scaled_mm.calls} == recipes, name
        assert {call[1] for call in scaled_mm.calls} == {torch.bfloat16}, "rounded once, by the GEMM"


def test_annealing_exact_layers_and_gathered_weights_are_emulated(scaled_mm):
    layer = layer_like(nn.Linear(32, 32), "nvfp4")
    set_blend(layer, 0.5)
    assert layer.native_gemms(CPU) == ()
    set_blend(layer, None)
    layer.lowbit.exact = True
    assert layer.native_gemms(CPU) == ()
    layer.lowbit.exact = False
    layer.lowbit.prequantized_weight = PrequantizedWeight(torch.float32, torch.float32, None, None)
    assert layer.native_gemms(CPU) == ("wgrad",)
    layer.lowbit.backend = "native"
    with pytest.raises(ValueError, match="decoded before fprop and dgrad, which take codes. Leave out quantize_before"):
        layer.native_gemms(CPU)
    assert not scaled_mm.calls


def test_amd_takes_scales_as_they_are(monkeypatch, scaled_mm):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert gemms.results("mxfp8") == (torch.bfloat16, torch.float16)
    for name in ("mxfp8", "mxfp4"):
        original = nn.Linear(40, 24, bias=False, dtype=torch.bfloat16)
        x, g = torch.randn(50, 40).bfloat16(), torch.randn(50, 24).bfloat16()
        found, expected = (run(layer_like(original, name, backend=b), x, g) for b in ("auto", "emulated"))
        for result, tensor in expected.items():
            torch.testing.assert_close(found[result], tensor, rtol=2**-7, atol=2**-9)
    assert len(scaled_mm.calls) == 6
    run(layer_like(nn.Linear(32, 32), "mxfp8"), torch.randn(4, 32), torch.randn(4, 32))
    assert len(scaled_mm.calls) == 6, "a float32 result, which this GPU does not give"
    layer = layer_like(nn.Linear(32, 32), "mxfp8", backend="native")
    with pytest.raises(ValueError, match="mxfp8 GEMMs give bfloat16 or float16 here, .* in torch.float32. Train in bf"):
        layer(torch.randn(4, 32))


@each(
    ("left", "right", "kinds"),
    [
        (NV, NV.replace(scale={"block": (16, 16)}), ("nvfp4", "cpu")),
        (NV, NV.replace(scale={"block": 24}), ()),  # no whole number of 16
        (NV, NV.replace(scale={"block": (16, 8)}), ()),
        (NV, NV.replace(scale={"block": (8, 16)}), ("nvfp4", "cpu")),
        (NV, NV.replace(scale={"format": "e8m0", "block": 16}), ("cpu",)),
        (NV, Cast("e2m1", Scale("e8m0", 32)), ("cpu",)),
        (NV, NV.replace(element="e1m2"), ("cpu",)),
        (NV, None, ()),
        (NV, Cast("int4", Scale("fp32", "tensor", source="delayed")), ()),  # whose code of a NaN would be a zero
        (MX, MX, ("mxfp8",)),
        (MX, MX.replace(element="e5m2"), ()),  # torch has no recipe for it
        (MX, MX.replace(scale={"block": 16}), ()),
        (Cast("e4m3", Scale("fp32", 128)), Cast("e4m3", Scale("fp32", (128, 128))), ("fp8-blockwise",)),
        (Cast("e4m3", Scale("fp32", 128), round_to_bfloat16=True), Cast("e4m3", Scale("fp32", 128)), ()),
        (Cast("e4m3", Scale("fp32", 128)), Cast("e5m2", Scale("fp32", 128)), ()),
        (Cast("e4m3", Scale("fp32", "row")), Cast("e4m3", Scale("fp32", 128)), ()),
        (NV, NV.replace(scale={"two_level": "row"}), ("cpu",)),
        (NV, NV.replace(scale={"rounding": "stochastic"}), ("cpu",)),
        *((E4M3, right, ("fp8",)) for right in (E4M3, E5M2, E4M3.replace(scale={"source": "delayed"}))),
        *((E4M3, right, ()) for right in (INT8, E4M3.replace(element="e3m2"), E4M3.replace(scale={"block": (16, 16)}))),
        (E5M2, E5M2, ()),
        (E5M2, E4M3, ("fp8",)),
        (E4M3.replace(scale={"block": "row"}), E5M2, ()),
        (E4M3.replace(scale={"block": "row"}), E5M2.replace(scale={"block": "row"}), ()),
        (Cast("e5m2", Scale("e4m3", "row", two_level=True), "stochastic"), E4M3, ("fp8",)),
        (INT8, Cast("ternary", Scale("fp32", "tensor")), ("int8", "cpu")),
        (INT8.replace(element="int2", rounding="stochastic"), Cast("int4", Scale("e8m0", "tensor")), ("int8", "cpu")),
        *((INT8, INT8.replace(scale=scale), ()) for scale in ({"statistic": "minmax"}, {"block": 128})),
        (INT8, INT8.replace(scale={"block": "tensor"}), ("int8",)),
        (INT8, INT8.replace(scale={"block": "tensor", "source": "delayed"}), ()),
    ],
)
def test_the_table(left, right, kinds):
    assert LinearCasts(fprop_x=left, fprop_w=right).traits.native_kinds.get("fprop", ()) == kinds
    if right is not None:
        assert kinds_of([left, right], [1, 1]) == kinds
