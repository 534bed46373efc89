"""Arguments of the quantization-aware plugins."""

from functools import partial

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_lowbit import Cast, IntegerPrecision, LinearCasts, Scale, TernaryPrecision, quantize
from lightning_lowbit.nn.core.gemm import native_obstacle
from tests.lightning_imports import from_yaml
from tests.precision.regression_model import Regression, fitted, flat
from tests.tables import each

on_int8_units = pytest.mark.skipif(
    native_obstacle(torch.device("cpu"), "int8") is not None, reason="this CPU has no int8 units"
)


def qat(x, w):
    return LinearCasts(x, w, None, "fprop" if w else None, None, "fprop" if x else None)


def integer(bits, block=128, statistic="absmax"):
    return Cast(f"int{bits}", Scale("fp32", block, statistic=statistic), round_to_bfloat16=isinstance(block, int))


TOKENS = Cast("int8", Scale("fp32", "row", epsilon=1e-5))
GAMMA = Scale("fp32", "tensor", statistic="absmean", epsilon=1e-5)
TERNARY = Cast("ternary", GAMMA)


@each("kind, arguments, casts", [
    (TernaryPrecision, {}, qat(TOKENS, TERNARY)),
    (TernaryPrecision, {"activation_bits": 4}, qat(TOKENS.replace(element="int4"), TERNARY)),
    (TernaryPrecision, {"activation_bits": None}, qat(None, TERNARY)),
    (TernaryPrecision, {"scale_factor": 1.1547}, qat(TOKENS, TERNARY.replace(scale={"factor": 1.1547}))),
    (IntegerPrecision, {}, qat(integer(8), integer(8))),
    (IntegerPrecision, {"weight_bits": 4, "activation_bits": 2}, qat(integer(2), integer(4))),
    (IntegerPrecision, {"weight_bits": None}, qat(integer(8), None)),
    (IntegerPrecision, {"group": "tensor"}, qat(integer(8, "tensor"), integer(8, "tensor"))),
    (IntegerPrecision, {"activation_group": "row"}, qat(integer(8, "row"), integer(8))),
    (IntegerPrecision, {"group": 32, "activation_group": 64}, qat(integer(8, 64), integer(8, 32))),
    (IntegerPrecision, {"scale_format": "bf16"}, qat(integer(8), integer(8).replace(scale={"format": "bf16"}))),
    (IntegerPrecision, {"weight_bits": 3, "activation_bits": None, "group": "row", "symmetric": False},
     qat(None, integer(3, "row", "minmax"))),
])  # fmt: skip
def test_arguments_land_in_the_casts(kind, arguments, casts):
    assert kind(**arguments).casts == casts


def test_by_default_they_are_the_presets():
    assert TernaryPrecision().casts == LinearCasts.preset("ternary")
    for bits in range(2, 9):
        assert IntegerPrecision(bits, bits).casts == LinearCasts.preset(f"int{bits}")


BITS = r"is a number of bits, 2 or more and at most 8, or None; got"
FACTOR = r"is what mean\|W\| is multiplied by, above 0 and below 65536; got"
GROUP = r"group is a number of elements such as 128, 'row' or 'tensor'; got"


@each(
    ("kind", "arguments", "message"),
    [
        (TernaryPrecision, {"activation_bits": 1}, rf"activation_bits {BITS} 1\."),
        (TernaryPrecision, {"activation_bits": True}, rf"activation_bits {BITS} True\."),
        (TernaryPrecision, {"scale_factor": 0}, rf"scale_factor {FACTOR} 0\."),
        (TernaryPrecision, {"scale_factor": "1"}, rf"scale_factor {FACTOR} '1'\."),
        (TernaryPrecision, {"backend": "nativ"}, r"Unknown backend 'nativ'. Did you mean 'native'\?"),
        (IntegerPrecision, {"weight_bits": 9}, rf"weight_bits {BITS} 9\."),
        (IntegerPrecision, {"weight_bits": 4.5}, rf"weight_bits {BITS} 4.5\."),
        (IntegerPrecision, {"activation_bits": "4"}, rf"activation_bits {BITS} '4'\."),
        (IntegerPrecision, {"weight_bits": None, "activation_bits": None}, "Give weight_bits or activation_bits: with"),
        (IntegerPrecision, {"weight_bits": None, "symmetric": False}, "gives weights zero points, and"),
        (IntegerPrecision, {"activation_bits": None, "activation_group": 2}, "activation_group=2, and activation_bits"),
        (IntegerPrecision, {"scale_format": "bfloat16"}, "Unknown scale_format 'bfloat16'"),
        (IntegerPrecision, {"weight_bits": None, "scale_format": "bf16"}, "of the weights' scales, and weight_bits"),
        (IntegerPrecision, {"symmetric": False, "scale_format": "fp16"}, "zero points .* have fp32 scales"),
        (IntegerPrecision, {"group": 0}, f"{GROUP} 0"),
        (IntegerPrecision, {"group": "rows"}, f"{GROUP} 'rows'"),
        (IntegerPrecision, {"activation_group": 0}, f"activation_{GROUP} 0"),
        (IntegerPrecision, {"symmetric": 1}, r"symmetric is true or false; got 1\."),
        (IntegerPrecision, {"backend": "native"}, "fprop of the casts has no native GEMM: .* or integers, with scales"),
        (IntegerPrecision, {"group": "row", "symmetric": False, "backend": "native"}, "fprop .* has no native GEMM"),
    ],
)
def test_bad_arguments_say_what_to_do(kind, arguments, message):
    with pytest.raises(ValueError, match=message):
        kind(**arguments)


def test_default_groups_train_models_of_any_width():
    for arguments in ({}, {"symmetric": False}, {"group": 24, "activation_group": 25}):
        model = Regression()
        model.narrow = nn.Linear(1, 16)
        before = flat(model)
        fitted(IntegerPrecision(4, 8, **arguments), model)
        assert flat(model).isfinite().all() and not torch.equal(flat(model), before), f"{arguments}: not trained"
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    assert len(IntegerPrecision(4, 8).plan(GPT2LMHeadModel(config))) == 5


@each("columns", [1, 86, 128])
@each("symmetric", [True, False])
def test_a_short_row_is_one_group(columns, symmetric):
    """Zeros that pad it are no part of it: codes, scales and zero points are those of the row."""
    x = torch.randn(5, columns, generator=torch.Generator().manual_seed(0)) + 0.5
    of = {group: IntegerPrecision(4, None, group, symmetric=symmetric).casts.fprop_w for group in (128, "row")}
    groups, rows = (quantize(x, cast) for cast in of.values())
    assert groups.scales.shape == rows.scales.shape == (5, 1)
    for name in ("codes", "scales", "zero_points"):
        found, wanted = getattr(groups, name), getattr(rows, name)
        assert found is wanted is None or torch.equal(found, wanted), f"{name} differ"
    assert torch.equal(groups.dequantize(), rows.dequantize())


@on_int8_units
@each("make", [partial(TernaryPrecision, quantize_output=True), partial(IntegerPrecision, 4, 8, "row")])
def test_backend_native(make):
    model = fitted(make(backend="native")).lightning_module
    assert model.head.native_gemms(torch.device("cpu")) == ("fprop",)


def test_backend_native_without_units_is_refused_before_anything_is_changed(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    with pytest.raises(ValueError, match="or a CPU with VNNI; this CPU has none. Use backend='auto'"):
        fitted(IntegerPrecision(8, 8, "row", backend="native"), model := Regression())
    assert type(model.head) is nn.Linear, "a refused model has been changed"


def test_from_yaml():
    def plugin(kind, arguments):
        plugins = f"{{plugins: {{class_path: lightning_lowbit.{kind}, init_args: {arguments}}}}}"
        return from_yaml(plugins, Regression).precision_plugin

    found = plugin("TernaryPrecision", "{activation_bits: 4, scale_factor: 1.1547, skip: [head], backend: emulated}")
    assert found.casts == TernaryPrecision(4, scale_factor=1.1547).casts
    assert (found.skip, found.backend) == (["head"], "emulated")
    found = plugin("TernaryPrecision", "{activation_bits: null, overrides: {head: int8}, compute_dtype: fp32}")
    assert found.casts == TernaryPrecision(None).casts
    assert (found.overrides, found.precision) == ({"head": LinearCasts.preset("int8")}, "32-true")
    found = plugin("IntegerPrecision", "{weight_bits: 4, group: 16, activation_group: row, symmetric: false}")
    assert found.casts == IntegerPrecision(4, 8, 16, activation_group="row", symmetric=False).casts
    found = plugin("IntegerPrecision", "{weight_bits: 2, activation_bits: null, group: row, scale_format: bf16}")
    assert found.casts == IntegerPrecision(2, None, "row", scale_format="bf16").casts
