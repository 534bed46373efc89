"""What layers do alike on a stand-in for block-scaled tensor cores and with codes that a CPU multiplies."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_lowbit import LinearCasts
from lightning_lowbit.kernels.cpu.gemms import instructions
from lightning_lowbit.nn import OPERANDS, AmaxHistories, GemmCounter
from lightning_lowbit.nn.core.watch import Watch
from lightning_lowbit.nn.native import devices
from tests.nn.layers import GEMMS, identical, layer_like, run
from tests.nn.native.test_layer import LAYERS

CPU = torch.device("cpu")
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
    """A native layer and its emulation, input and gradient."""
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


@pytest.mark.usefixtures("compiler")
def test_a_compiled_layer_gives_the_same_bits(units):
    for name in {"blocks": ("nvfp4-nvidia", "fp8-blockwise"), "codes": ("nvfp4-nvidia", "nvfp4-row", "int4")}[units]:
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


def test_activations_as_codes_give_the_same_gradients(units):
    dtype = torch.bfloat16 if units == "blocks" else torch.float32
    original = nn.Linear(200, 136, dtype=dtype)
    x, g = torch.randn(130, 200).to(dtype), torch.randn(130, 136).to(dtype)
    for name in (*NAMES[units], "mxfp4", *(["both in tiles"] if units == "blocks" else ["nvfp4-4over6", "ternary"])):
        casts = LAYERS[name][0] if name in LAYERS else name
        layers = [layer_like(original, casts, save=save) for save in ("codes", "inputs")]
        assert all(layer.native_gemms(CPU, dtype=dtype) for layer in layers)
        identical(*(run(layer, x, g) for layer in layers), name)
