"""Layers on a stand-in for block-scaled tensor cores: the emulated ones, up to the order of sums; and what they do
alike with codes that a CPU multiplies."""

import pytest
import torch
from torch import nn
from torch.nn.functional import ScalingType as Scaling
from torch.utils.flop_counter import FlopCounterMode

from lightning_lowbit import Cast, LinearCasts, Scale
from lightning_lowbit.kernels.cpu.gemms import instructions
from lightning_lowbit.nn import OPERANDS, AmaxHistories, GemmCounter, set_blend
from lightning_lowbit.nn.core.operands import PrequantizedWeight
from lightning_lowbit.nn.core.watch import Watch
from lightning_lowbit.nn.native import devices, gemms
from lightning_lowbit.nn.native.operand import BlockOperand
from lightning_lowbit.nn.native.table import kinds_of
from tests.nn.layers import GEMMS, assert_is_defined, by_definition, gradients, identical, layer_like, net, run, spied
from tests.tables import each

CPU = torch.device("cpu")
NV, MX = Cast("e2m1", Scale("e4m3", 16, two_level=True)), Cast("e4m3", Scale("e8m0", 32))
NVFP4, MXFP8 = LinearCasts.preset("nvfp4"), LinearCasts.preset("mxfp8")
E4M3, E5M2 = (Cast(element, Scale("fp32", "tensor")) for element in ("e4m3", "e5m2"))
ROWS_128, TILES_128 = (Cast("e4m3", Scale("fp32", block)) for block in (128, (128, 128)))
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
    "128 twice": (LinearCasts(TILES_128, TILES_128), ["fprop"]),
    "tiles on the left": (LinearCasts(TILES_128, ROWS_128), ["fprop"]),
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
        (ROWS_128, TILES_128, ("fp8-blockwise",)),
        (ROWS_128.replace(round_to_bfloat16=True), ROWS_128, ()),
        (E4M3.replace(scale={"block": "row"}), ROWS_128, ()),
        (ROWS_128, ROWS_128.replace(element="e5m2"), ()),
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


# --- on both, block-scaled tensor cores and CPUs ----------------------------------------------------------------------

# By hardware, presets that are native in all GEMMs or in the first.
NAMES = {
    "blocks": ("nvfp4", "nvfp4-nvidia", "mxfp8", "fp8-blockwise"),
    "codes": ("nvfp4", "nvfp4-nvidia", "nvfp4-row", "mxfp4", "mxfp4-rht", "quartet2", "int4", "e1m2"),
}


@pytest.fixture(params=NAMES)
def units(request, within):
    if request.param == "blocks":
        request.getfixturevalue("scaled_mm")
    elif instructions() is None:
        pytest.skip("the C++ kernels cannot be built")
    else:
        within(devices.declared("cpu", {"cpu"}))
    return request.param


def pair_of(units, casts, tokens=16, inputs=32, outputs=48):
    original = nn.Linear(inputs, outputs)
    layer, emulated = (layer_like(original, casts, backend=backend) for backend in ("auto", "emulated"))
    assert layer.native_gemms(CPU, dtype=torch.float32) and not emulated.native_gemms(CPU), units
    return layer, emulated, torch.randn(tokens, inputs), torch.randn(tokens, outputs)


def test_what_is_not_finite_reaches_its_rows(units):
    for name in NAMES[units]:
        for bad in (torch.nan, torch.inf):
            layer, _, x, _ = pair_of(units, name, 8, 48, 16)
            x[3, 5] = bad
            y = layer(x).detach()
            assert y[3].isnan().all(), f"{name}: {bad} vanished"
            assert y.isfinite().all(1).tolist() == [i != 3 for i in range(8)], name


def check_compiled(units, name, backend, unequal=()):
    torch._dynamo.reset()
    casts = LinearCasts.preset(name)
    drawn = [operand for operand in OPERANDS if (cast := casts.cast_of(operand)) is not None and cast.draws]
    casts = casts.with_rounding(dict.fromkeys(drawn, "nearest"))  # calls have keys of their own
    layer, _, x, g = pair_of(units, casts)
    expected, results = run(layer, x, g), run(torch.compile(layer, backend=backend, fullgraph=True), x, g)
    for gradient in unequal:
        del results[gradient], expected[gradient]
    identical(results, expected, name)


COMPILED = {"blocks": ("nvfp4-nvidia", "fp8-blockwise"), "codes": ("nvfp4-nvidia", "nvfp4-row", "int4")}


@pytest.mark.fast("blocks-nvfp4-nvidia", "codes-nvfp4-row")
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    ("units", "name"), [(units, name) for units, names in COMPILED.items() for name in names], indirect=["units"]
)
def test_a_compiled_layer_gives_the_same_bits(units, name):
    check_compiled(units, name, "aot_eager")


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("name", ["nvfp4-nvidia", "nvfp4-4over6", "nvfp4-row", "int4", "e1m2"])
@pytest.mark.parametrize("units", ["codes"], indirect=True)
def test_generated_code_gives_the_same_bits(units, name):
    check_compiled(units, name, "inductor", ["bias"])  # whose gradient it sums in another order


def test_statistics_are_those_of_the_emulation(units):
    for name in {"blocks": ["nvfp4-nvidia"], "codes": ["nvfp4-nvidia", "nvfp4-row", "mxfp4-rht", "int4"]}[units]:
        *layers, x, g = pair_of(units, name, 40, 48, 32)
        sums = []
        for layer in layers:
            watch = Watch({"layer": layer}, "operand_sums", of_blocks=True)
            watch.start(CPU)
            run(layer, x, g)
            sums.append(watch.sums)
        assert sums[0].any()
        assert torch.equal(*sums), name


def test_padding_is_no_work_of_the_models(units):
    for name in {"blocks": ["nvfp4"], "codes": ["nvfp4", "nvfp4-row", "int4"]}[units]:
        *layers, x, g = pair_of(units, name, 13, 40, 7)
        native = len(layers[0].native_gemms(CPU, dtype=torch.float32)) / 3
        for layer, shares in zip(layers, ({"nvfp4" if units == "blocks" else "cpu": native}, {}), strict=True):
            with GemmCounter(model := nn.Sequential(layer)) as counter:
                run(model, x, g)
            assert counter.gemms == {("0", gemm): 2 * 13 * 40 * 7 for gemm in GEMMS}
            assert counter.native_shares(CPU) == pytest.approx(shares)
            with FlopCounterMode(display=False) as mode:
                run(model, x, g)
            # The stand-in's own product counts, too, with its padding.
            assert units == "blocks" or mode.get_total_flops() == 3 * 2 * 13 * 40 * 7


def test_delayed_scales_of_two_levels(units):
    delayed = LinearCasts.preset("nvfp4").fprop_x.replace(scale={"source": "delayed"})
    casts = LinearCasts(**dict.fromkeys(("fprop_x", "fprop_w", "dgrad_g", "dgrad_w"), delayed))
    *layers, x, g = pair_of(units, casts)
    histories = [AmaxHistories(layer) for layer in layers]
    for factor in (1, 3):
        results, expected = (run(layer, factor * x, g) for layer in layers)
        for history in histories:
            history.advance_()
        for name, tensor in expected.items():
            torch.testing.assert_close(results[name], tensor, rtol=1e-5, atol=1e-5)


def test_recomputed_activations_give_the_same_gradients(units):
    x = torch.randn(16, 32)
    for name in {"blocks": ("nvfp4", "fp8-blockwise"), "codes": ("nvfp4", "quartet2", "int4")}[units]:
        identical(*(gradients(net(name, recompute=recompute, dropout=0.1)[0], x) for recompute in (False, True)))


def test_activations_as_codes_give_the_same_gradients(units):
    dtype = torch.bfloat16 if units == "blocks" else torch.float32
    original = nn.Linear(200, 136, dtype=dtype)
    x, g = torch.randn(130, 200).to(dtype), torch.randn(130, 136).to(dtype)
    for name in (*NAMES[units], "mxfp4", *(["both in tiles"] if units == "blocks" else ["nvfp4-4over6", "ternary"])):
        casts = LAYERS[name][0] if name in LAYERS else name
        layers = [layer_like(original, casts, save=save) for save in ("codes", "inputs")]
        assert all(layer.native_gemms(CPU, dtype=dtype) for layer in layers)
        identical(*(run(layer, x, g) for layer in layers), name)
