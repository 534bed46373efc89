"""Presets are what their sources say, come out of YAML as they went in, and train."""

import inspect
import json
from dataclasses import asdict, fields

import pytest
import torch
import yaml
from torch import nn

from lightning_lowbit import Cast, LinearCasts, convert, quantize
from lightning_lowbit.nn import OPERANDS, PHASES, PRESETS, AmaxHistories, LayerKeys, set_phase
from tests.nn.casts.examples import AWKWARD
from tests.tables import each

# The six operands in order, as casts print, and the rest.
NVFP4, TILES = "e2m1/e4m3:1x16+fp32", "e2m1/e4m3:16x16+fp32"
ADAPTIVE = f"{NVFP4}(4/6 mse)"
MXFP4, TSENG = "e2m1/e8m0:1x32", "e2m1/e8m0:1x32(floor)(x0.75)~"
ROWS = "e2m1/e4m3:1x16+fp32:row"
EDEN = "e2m1/e4m3:1x16+fp32<255.99(stochastic)(corrected 128)(absmax x0.988125)"
MXFP8 = "e4m3/e8m0:1x32"
UFP4 = "e1m2/e4m3:1x16+fp32"
E4M3, E5M2 = "e4m3/fp32:", "e5m2/fp32:"
TOKENS, TERNARY = "int8/fp32:row(epsilon 1e-05)", "ternary/fp32:tensor(absmean)(epsilon 1e-05)"
EXPECTED = {
    "bf16": (["None"] * 6, {}),
    "nvfp4": ([NVFP4, NVFP4, f"{NVFP4}~", NVFP4, f"{NVFP4}~", f"{NVFP4}~"], {}),
    "nvfp4-nvidia": ([NVFP4, TILES, f"{NVFP4}~", "fprop", f"{NVFP4}~", NVFP4], {"wgrad": "16"}),
    "nvfp4-4over6": ([ADAPTIVE, ADAPTIVE, f"{NVFP4}~", NVFP4, f"{NVFP4}~", f"{NVFP4}~"], {}),
    "nvfp4-row": ([ROWS, ROWS, f"{ROWS}~", ROWS, f"{ROWS}~", f"{ROWS}~"], {}),
    "quartet2": ([ADAPTIVE, ADAPTIVE, EDEN, EDEN, EDEN, EDEN], {"dgrad": "128~", "wgrad": "128~"}),
    "mxfp4": ([MXFP4, MXFP4, f"{MXFP4}~", MXFP4, f"{MXFP4}~", f"{MXFP4}~"], {}),
    "mxfp4-rht": ([MXFP4, MXFP4, TSENG, TSENG, TSENG, TSENG], {"dgrad": "64~", "wgrad": "64~"}),
    "mxfp6": (["e3m2/e8m0:1x32"] * 6, {}),
    "mxfp8": ([MXFP8] * 6, {}),
    "mxfp8-nvfp4": ([MXFP8, MXFP8, f"{NVFP4}~", NVFP4, f"{NVFP4}~", f"{NVFP4}~"], {}),
    "nvfp4-mxfp8": ([NVFP4, NVFP4, MXFP8, MXFP8, MXFP8, MXFP8], {}),
    "ufp4": ([UFP4, UFP4, f"{UFP4}~", UFP4, f"{UFP4}~", UFP4], dict.fromkeys(("fprop", "dgrad", "wgrad"), "16")),
    # E5M2 for gradients, E4M3 for the rest
    **{
        name: ([f"{element}{scale}" for element in (E4M3, E4M3, E5M2, E4M3, E5M2, E4M3)], {})
        for name, scale in (("fp8-delayed", "tensor(delayed 16)"), ("fp8-current", "tensor"), ("fp8-row", "row"))
    },
    "fp8-blockwise": ([f"{E4M3}{block}" for block in ("1x128", "128x128", "1x128", "128x128", "1x128", "1x128")], {}),
    # Gradients in high precision, of what the forward pass used
    **{
        name: ([f"{name}/fp32:1x128≈", f"{name}/fp32:1x128≈", "None", "fprop", "None", "fprop"], {})
        for name in ("int8", "int7", "int6", "int5", "int4", "int3", "int2", "e1m2")
    },
    "ternary": ([TOKENS, TERNARY, "None", "fprop", "None", "fprop"], {}),
}


@each("name", PRESETS)
def test_a_preset_is_what_its_source_says(name):
    casts = LinearCasts.preset(name)
    operands, hadamard = EXPECTED[name]
    assert [str(getattr(casts, operand)) for operand in OPERANDS] == operands
    assert {gemm: str(setting) for gemm, setting in casts.hadamard.items()} == hadamard
    assert (casts.subtract_mean, casts.surrogate, casts.smooth) == ((), {}, None)
    assert casts.requantize == (("dgrad_w", "wgrad_x") if name == "quartet2" else ())


def test_no_preset_is_missing_and_each_names_its_source():
    assert set(PRESETS) == set(EXPECTED)
    for name, preset in PRESETS.items():
        documented = getattr(preset, "func", preset)  # of several presets
        assert name == "bf16" or "arXiv" in (inspect.getdoc(documented) or ""), f"{name} names no paper"


def written_out(casts):
    """All fields of casts, as someone would write them in YAML."""
    found = {field.name: getattr(casts, field.name) for field in fields(casts)}
    for name, setting in found.items():
        if isinstance(setting, Cast):
            found[name] = {key: value for key, value in asdict(setting).items() if key != "spec"}
    found["hadamard"] = {gemm: asdict(setting) for gemm, setting in casts.hadamard.items()}
    return json.loads(json.dumps(found))


def read(text):
    return LinearCasts.of(yaml.safe_load(text))


@each("casts", [*map(LinearCasts.preset, PRESETS), *AWKWARD.values()])
def test_casts_from_all_their_fields_in_yaml(casts):
    assert read(yaml.safe_dump(written_out(casts))) == casts


@each("name", PRESETS)
def test_a_preset_from_yaml(name):
    casts = LinearCasts.preset(name)
    assert read(name) == casts and str(casts) == name
    assert read(f"preset: {name}") == casts
    hadamard, given = ({}, "null") if name != "quartet2" else (casts.hadamard, "{}")  # which corrections need
    changed = read(f"{{preset: {name}, wgrad_g: null, dgrad_w: {{element: int4}}, hadamard: {given}}}")
    dgrad_w = casts.dgrad_w.replace(element="int4") if isinstance(casts.dgrad_w, Cast) else Cast("int4")
    assert changed == casts.replace(wgrad_g=None, dgrad_w=dgrad_w, hadamard=hadamard)
    if name != "bf16":
        nearest = read(f"{{preset: {name}, every: {{rounding: nearest}}}}")
        assert not any("~" in str(getattr(nearest, operand)) for operand in OPERANDS)


def two_steps(casts, phase, autocast):
    """Trains, the second step with the amaxes of the first; yields losses and gradients."""
    torch.manual_seed(0)
    model = convert(nn.Sequential(nn.Linear(40, 24), nn.Tanh(), nn.Linear(24, 8)), casts)
    set_phase(model, phase)
    keys, histories = LayerKeys(model), AmaxHistories(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, target = torch.randn(20, 40), torch.randn(20, 8)
    for step in range(2):
        before = [p.detach().clone() for p in model.parameters()]
        keys.fill_(step)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = (model(x).float() - target).square().sum() / 20
        loss.backward()
        optimizer.step()
        histories.advance_()
        yield f"loss {step}", loss.detach()
        for (name, p), old in zip(model.named_parameters(), before, strict=True):
            assert p.grad is not None, f"{name} has no gradient"
            yield f"gradient of {name}, step {step}", p.grad
            assert not torch.equal(p, old), f"{name} does not change in step {step}"


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_trains_in_every_phase(name, phase):
    for autocast in (True, False):
        for what, tensor in two_steps(name, phase, autocast):
            assert tensor.isfinite().all(), f"{name} in phase {phase}: {what} is not finite"


@pytest.mark.parametrize(("rounding", "bias"), [("nearest", -0.007), ("up", 0.0)])
def test_the_bias_of_nvfp4_is_the_one_that_is_told(rounding, bias):
    """Of wgrad's products, both of whose operands are rounded stochastically, on normal data."""
    casts = LinearCasts.of({"preset": "nvfp4", "every": {"scale": {"rounding": rounding}}})
    assert (rounding == "nearest") == (casts == LinearCasts.preset("nvfp4"))
    x, g = torch.randn(256, 64), torch.randn(256, 64)
    exact, mean, draws = g.T @ x, torch.zeros(64, 64), 100
    for draw in range(draws):
        decoded = [
            quantize(each, cast, dim=0, key=2 * draw + i).dequantize(torch.float32)
            for i, (each, cast) in enumerate([(g, casts.wgrad_g), (x, casts.wgrad_x)])
        ]
        mean += decoded[0].T @ decoded[1] / draws
    assert ((mean * exact).sum() / exact.square().sum()).item() - 1 == pytest.approx(bias, abs=0.002)
