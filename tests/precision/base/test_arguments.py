"""Arguments of any precision plugin: from Python and YAML, and what is refused."""

import pytest
import yaml
from torch import nn

from lightning_lowbit import Cast, FP4Precision, LinearCasts, Scale, TernaryPrecision, pack_frozen
from lightning_lowbit.precision.run_settings import global_seed
from lightning_lowbit.quant import Hadamard
from tests.lightning_imports import (
    BoringModel,
    Fabric,
    MisconfigurationException,
    SingleDeviceXLAStrategy,
    Trainer,
    from_yaml,
    pytorch,
)
from tests.precision.regression_model import fitted
from tests.tables import each


def test_rounding_and_overrides_reach_the_layers():
    plugin = FP4Precision(rounding={"wgrad_x": "nearest"}, overrides={"head": "bf16"})
    model = fitted(plugin).lightning_module
    casts = LinearCasts.preset("nvfp4").with_rounding({"wgrad_x": "nearest"})
    assert casts.wgrad_x.rounding == "nearest"
    for phase in ("fqt", "qaf", "fqt"):
        plugin.set_phase(phase)
        assert (model.first.casts, model.head.casts) == (casts.phase(phase), LinearCasts())


@each(("name", "values"), [("exact", [False, True]), ("backend", ["auto", "emulated"])])
def test_settings_reach_the_layers(name, values):
    for value in values:
        run = fitted(FP4Precision(**{name: value}))
        assert getattr(run.lightning_module.first.lowbit, name) == value


def test_seed_of_seed_everything(monkeypatch):
    assert global_seed() == 0
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    assert FP4Precision().seed == 7
    assert FP4Precision(seed=1).seed == 1


def test_from_yaml():
    plugin = from_yaml("""
        plugins:
          class_path: lightning_lowbit.FP4Precision
          init_args:
            casts: {preset: nvfp4, wgrad_g: {element: e1m2, rounding: stochastic, scale: {format: e5m2, block: 32}}}
            rounding: {wgrad_g: nearest}
            overrides:
              layer:
                fprop_w: {element: e1m2, scale: {format: e5m2, block: 32}}
                hadamard: {fprop: {size: 32, signs: keyed}}
            compute_dtype: fp32
            seed: 5
    """).precision_plugin
    changed = Cast("e1m2", Scale("e5m2", 32, two_level=True), "nearest")
    assert plugin.casts.wgrad_g == changed, "YAML changes other fields of the preset than it names"
    alone = LinearCasts(fprop_w=Cast("e1m2", Scale("e5m2", 32)), hadamard={"fprop": Hadamard(32, "keyed")})
    assert plugin.overrides == {"layer": alone}, "YAML's fields have other defaults"
    assert (plugin.seed, plugin.precision) == (5, "32-true")


EXPLICIT = """
fprop_x: {element: int8, scale: {format: fp32, block: row}}
fprop_w: {element: e2m1, scale: {format: e4m3, block: [16, 16], two_level: true, top: 256, four_over_six: mse}}
dgrad_g: {element: e5m2, scale: {format: fp32, block: tensor, rounding: power_of_two}, rounding: stochastic}
dgrad_w: fprop
wgrad_g: {element: e2m1, scale: {format: e8m0, block: 32, rounding: floor, prescale: 0.75}}
wgrad_x: null
hadamard: {wgrad: 64}
subtract_mean: [dgrad, wgrad]
surrogate: {fprop_w: dge}
"""


@each(
    "casts",
    [
        "nvfp4",
        "{preset: int4, fprop_x: null, dgrad_w: {element: int4}, hadamard: {}}",
        "{preset: nvfp4, every: {scale: {format: e8m0, rounding: null, block: 32, two_level: false}}}",
        "{preset: mxfp4-rht, hadamard: {wgrad: {size: 128, signs: fixed}}, subtract_mean: [fprop]}",
        EXPLICIT,
        "{fprop_w: {element: int4}}",
    ],
    fast=2,
)
def test_casts_from_yaml(casts):
    plugin = {"class_path": "lightning_lowbit.LowBitPrecision", "init_args": {"casts": yaml.safe_load(casts)}}
    found = from_yaml(yaml.safe_dump({"plugins": plugin})).precision_plugin
    assert found.casts == LinearCasts.of(yaml.safe_load(casts))


@each(
    ("make", "message"),
    [
        (lambda: FP4Precision("nvfp5"), r"Unknown preset 'nvfp5'. Did you mean 'nvfp4'\?"),
        (lambda: FP4Precision({"fprop_y": None}), r"Unknown field of LinearCasts 'fprop_y'. Did you mean 'fprop_"),
        (lambda: FP4Precision(rounding={"wgradx": "nearest"}), r"Unknown operand 'wgradx'. Did you mean 'wgrad_x'"),
        (lambda: FP4Precision(rounding={"wgrad_x": "up"}), r"Unknown rounding 'up'"),
        (lambda: FP4Precision("bf16", rounding={"wgrad_x": "nearest"}), r"needs an operand with a cast of its own"),
        (lambda: FP4Precision(overrides={"x": "nvfp"}), r"Unknown preset 'nvfp'"),
        (lambda: FP4Precision(overrides=["lm_head"]), r"overrides maps name patterns to casts, .*; got \['lm_head'\]"),
        (lambda: FP4Precision(seed="a"), "seed is a whole number; got 'a'"),  # a checkpoint with it could not be read
        (lambda: FP4Precision(exact="no"), "exact is true or false; got 'no'"),
        (lambda: FP4Precision(quantize_before_gather="no"), "quantize_before_gather is true or false"),
        (lambda: FP4Precision(quantize_output="yes"), "quantize_output is true or false; got 'yes'"),
        (lambda: FP4Precision(quantize_output=1), "quantize_output is true or false; got 1"),
        (lambda: FP4Precision(shared_amax=None), r"shared_amax is a list of patterns, \[\] for none; got None"),
        (lambda: FP4Precision(skip="lm_head"), r"skip is a list of patterns; got the string 'lm_head'. Write \['lm_h"),
        (lambda: FP4Precision(only=["("]), r"only: '\(' is not a regular expression"),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


class Recurrent(BoringModel):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(1, 1)


@each(
    ("model", "arguments", "message"),
    [
        *(
            (BoringModel, {name: ["head"]}, rf"{name}: the pattern 'head' matches no linear layer.*e\.g\. layer")
            for name in ("skip", "only")
        ),
        (Recurrent, {}, "holds no layer to quantize"),
        (BoringModel, {"skip": ["layer"]}, "No layer is left to quantize"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(model, arguments, message):
    with pytest.raises(ValueError, match=message):
        fitted(FP4Precision(**arguments), model := model())
    assert type(model.layer) in (nn.Linear, nn.LSTM)


def test_averaged_weights_beside_codes():
    class Frozen(BoringModel):
        def __init__(self):
            super().__init__()
            self.base = pack_frozen(nn.Linear(32, 32).requires_grad_(False), "nvfp4")

    for averaging in (pytorch.callbacks.EMAWeightAveraging(), pytorch.callbacks.StochasticWeightAveraging(1e-2)):
        with pytest.raises(MisconfigurationException, match="WeightAveraging averages all.*base.*unpack_frozen"):
            fitted(FP4Precision(), Frozen(), callbacks=[averaging])


def test_fabric_and_xla():
    fabric = Fabric(plugins=[FP4Precision()], accelerator="cpu", devices=1)
    with pytest.raises(MisconfigurationException, match=r"Else call lightning_lowbit.convert"):
        fabric.setup(nn.Linear(16, 16))
    with pytest.raises(TypeError, match="XLAPrecision"):
        SingleDeviceXLAStrategy.precision_plugin.fset(object.__new__(SingleDeviceXLAStrategy), FP4Precision())


def test_a_preset_of_another_family_is_refused_by_name():
    for preset in ("fp8-delayed", "int4", "ternary", "mxfp8"):
        with pytest.raises(ValueError, match=rf"takes presets in FP4, .*: give LowBitPrecision\('{preset}'\)"):
            FP4Precision(preset)
    for preset in ("nvfp4", "mxfp8-nvfp4", "e1m2", "bf16"):
        assert FP4Precision(preset).casts == LinearCasts.preset(preset)


def test_calls_that_are_mistaken_say_what_was_meant():
    with pytest.raises(TypeError, match="positional"):
        TernaryPrecision(8, 8)  # bits of weights, which are ternary
    with pytest.raises(TypeError, match="FP4Precision has no argument 'skipp'. Did you mean 'skip'?"):
        FP4Precision("nvfp4", skipp=["lm_head"])
    with pytest.raises(MisconfigurationException, match=r"FP4Precision\('nvfp4'\) is a plugin: give Trainer\(plugins="):
        Trainer(callbacks=[FP4Precision()], logger=False)
