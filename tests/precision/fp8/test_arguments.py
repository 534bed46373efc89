"""Arguments of the FP8 plugin, and single layers."""

import pytest
from torch import nn

from lightning_lowbit import Cast, FP8Precision, LinearCasts, Scale
from lightning_lowbit.nn import OPERANDS
from tests.lightning_imports import BoringModel, from_yaml
from tests.precision.regression_model import DOWN, Regression, Witness, assert_histories, fitted, state
from tests.tables import each

DELAYED = {"block": "tensor", "source": "delayed"}


def fp8(gradient, scale):
    x, g = Cast("e4m3", scale), Cast(gradient, scale)
    return LinearCasts(fprop_x=x, fprop_w=x, dgrad_g=g, dgrad_w=x, wgrad_g=g, wgrad_x=x)


def fp8_blockwise(rounding):
    rows, tiles = (Cast("e4m3", Scale("fp32", block, rounding)) for block in (128, (128, 128)))
    return LinearCasts(fprop_x=rows, fprop_w=tiles, dgrad_g=rows, dgrad_w=tiles, wgrad_g=rows, wgrad_x=rows)


@each(
    ("arguments", "casts"),
    [
        ({}, fp8("e5m2", Scale("fp32", **DELAYED, history=16, algorithm="max"))),
        ({"history": 3, "margin": 2}, fp8("e5m2", Scale("fp32", **DELAYED, history=3, margin=2))),
        ({"algorithm": "most_recent"}, fp8("e5m2", Scale("fp32", **DELAYED, algorithm="most_recent"))),
        ({"power_of_two": True}, fp8("e5m2", Scale("fp32", **DELAYED, rounding="power_of_two"))),
        ({"gradient_format": "e4m3"}, fp8("e4m3", Scale("fp32", **DELAYED))),
        ({"scaling": "current"}, fp8("e5m2", Scale("fp32", "tensor"))),
        ({"scaling": "row", "margin": 1}, fp8("e5m2", Scale("fp32", "row", margin=1))),
        ({"scaling": "blockwise", "power_of_two": True}, fp8_blockwise("power_of_two")),
        ({"scaling": "mx", "power_of_two": True}, fp8("e4m3", Scale("e8m0", 32))),
        ({"scaling": "mx", "gradient_format": "e5m2"}, fp8("e5m2", Scale("e8m0", 32))),
    ],
)
def test_arguments_land_in_the_casts(arguments, casts):
    plugin = FP8Precision(**arguments)
    for operand in OPERANDS:
        assert getattr(plugin.casts, operand) == getattr(casts, operand), f"{arguments} gives another {operand}"
    assert plugin.casts == casts


@each("arguments, message", [
    ({"scaling": "delayd"}, r"Unknown scaling 'delayd'. Did you mean 'delayed'\? Choose one of: 'delayed', 'cur"),
    ({"scaling": None}, r"Unknown scaling None. Choose one of"),
    ({"history": 0}, r"history is a whole number, 1 or more .*; got 0"),
    ({"algorithm": "mean"}, r"Unknown algorithm of Scale 'mean'.* Choose one of: 'max', 'most_recent'"),
    ({"power_of_two": "no"}, r"power_of_two is true or false; got 'no'"),
    ({"margin": -1}, r"margin is a whole number, 0 or more .*; got -1"),
    ({"gradient_format": "e3m2"}, r"Unknown gradient_format 'e3m2'.* Choose one of: 'e4m3', 'e5m2'"),
    ({"scaling": "current", "history": 4}, r"history .* take source='delayed', or leave both out"),
    ({"scaling": "row", "algorithm": "most_recent"}, r"algorithm .* take source='delayed', or leave both out"),
    ({"scaling": "mx", "margin": 1}, r"margin .*leave out margin"),
    ({"smooth_swiglu": "chanel"}, r"Unknown kind of smooth_swiglu 'chanel'. Did you mean 'channel'"),
    ({"backend": "cuda"}, r"Unknown backend 'cuda'.* Choose one of: 'auto', 'native', 'emulated'"),
    ({"backend": "native", "scaling": "mx", "gradient_format": "e5m2"},
     r"backend='native', but dgrad .* no native GEMM.* Use backend='auto'"),
    ({"backend": "native", "gradient_format": "e4m3", "overrides": {"head": "mxfp6"}}, r"head has no native GEMM"),
    ({"backend": "native", "exact": True}, r"exact emulates GEMMs, and backend='native' does not: choose one"),
])  # fmt: skip
def test_bad_arguments_say_what_to_do(arguments, message):
    with pytest.raises(ValueError, match=message):
        FP8Precision(**arguments)


def test_what_a_run_cannot_honor_is_refused_when_training_starts():
    with pytest.raises(ValueError, match=r"NVIDIA GPU of compute capability 8\.9 .*the device is 'cpu'.*'auto'"):
        fitted(FP8Precision(backend="native"), model := Regression())
    assert type(model.head) is nn.Linear, "a refused model has been changed"
    with pytest.raises(ValueError, match="found no SwiGLU in BoringModel"):
        fitted(FP8Precision(smooth_swiglu="channel"), BoringModel())


def test_from_yaml():
    plugin = from_yaml(
        """
        plugins:
          class_path: lightning_lowbit.FP8Precision
          init_args:
            scaling: delayed
            history: 4
            algorithm: most_recent
            margin: 1
            power_of_two: true
            gradient_format: e4m3
            overrides: {head: bf16, first: {preset: fp8-delayed, every: {scale: {history: 2}}}}
            skip: [down_proj]
            smooth_swiglu: token
            backend: emulated
            fresh_histories: true
            compute_dtype: fp32
    """,
        Regression,
    ).precision_plugin
    scale = Scale("fp32", **DELAYED, history=4, algorithm="most_recent", margin=1, rounding="power_of_two")
    assert plugin.casts == fp8("e4m3", scale)
    assert plugin.overrides == {"head": LinearCasts(), "first": fp8("e5m2", Scale("fp32", **DELAYED, history=2))}
    assert (plugin.skip, plugin.smooth_swiglu, plugin.backend) == (["down_proj"], "token", "emulated")
    assert (plugin.fresh_histories, plugin.precision) == (True, "32-true")


def test_layers_in_other_casts_have_no_histories_and_the_others_do():
    shorter = {"preset": "fp8-delayed", "every": {"scale": {"history": 2}}}
    overrides = {"head": "bf16", "up_proj": "fp8-current", "gate_proj": shorter}
    plugin, witness = FP8Precision(history=4, overrides=overrides, skip=["first"], compute_dtype="fp32"), Witness()
    model = fitted(plugin, callbacks=[witness], max_steps=3, limit_train_batches=3).lightning_module
    found = state(plugin)["amax_history"]
    assert {key.split("/")[0] for key in found} == {"mlp.gate_proj", DOWN}
    assert model.head.lowbit.amaxes is None
    for layer, length in (("mlp.gate_proj", 2), (DOWN, 4)):
        amaxes = {key: history for key, history in found.items() if key.startswith(layer)}
        assert_histories({"amax_history": amaxes, "channel_amax": {}}, witness, length)
