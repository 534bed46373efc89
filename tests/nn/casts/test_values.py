"""LinearCasts as values: presets, YAML, phases."""

import copy
import pickle
from dataclasses import fields

import pytest

from lightning_lowbit import Cast, LinearCasts, Scale
from lightning_lowbit.nn import OPERANDS, PRESETS
from lightning_lowbit.quant import Hadamard
from tests.nn.casts.examples import AWKWARD, CENTERED, DELAYED, INT4, NEAREST, SIX, STOCHASTIC, assert_phases
from tests.nn.layers import GEMMS
from tests.tables import each


def test_operands_are_the_first_fields():
    names = tuple(field.name for field in fields(LinearCasts))
    assert names == (*OPERANDS, "hadamard", "subtract_mean", "surrogate", "smooth", "requantize")


def test_of_starts_from_high_precision_or_takes_casts_as_they_are():
    assert LinearCasts.preset("bf16") == LinearCasts() == LinearCasts(**dict.fromkeys(OPERANDS)) == LinearCasts.of({})
    assert LinearCasts.of({"wgrad_g": {"element": "int4"}}) == LinearCasts(wgrad_g=Cast("int4"))
    weights = LinearCasts.of({"fprop_w": {"element": "int4"}, "backward": "dequantized"})
    assert weights == LinearCasts(fprop_w=Cast("int4"), dgrad_w="fprop", wgrad_x="fprop")
    assert LinearCasts.of(SIX) is SIX


NVFP4, NVIDIA, BF16 = map(LinearCasts.preset, ("nvfp4", "nvfp4-nvidia", "bf16"))
CURRENT, DELAYED_FP8 = LinearCasts.preset("fp8-current"), LinearCasts.preset("fp8-delayed")
BACKWARD = dict.fromkeys(OPERANDS[2:])
DEQUANTIZED = BACKWARD | {"dgrad_w": "fprop", "wgrad_x": "fprop"}
NEAREST_X = NVFP4.wgrad_x.replace(rounding="nearest")


def changed(preset, operands=OPERANDS, **fields):
    """The casts of a preset with other fields."""
    return {operand: getattr(preset, operand).replace(**fields) for operand in operands}


@each(
    ("preset", "changes", "fields"),
    [
        # one operand: the fields that are named, of the scale too
        (NVFP4, {"wgrad_x": {"rounding": "nearest"}}, {"wgrad_x": NEAREST_X}),
        (
            NVFP4,
            {"wgrad_g": {"scale": {"block": 32}}},
            {"wgrad_g": Cast("e2m1", Scale("e4m3", 32, two_level=True), "stochastic")},
        ),
        (NVFP4, {"wgrad_g": {"scale": Scale("e5m2", 32)}}, {"wgrad_g": Cast("e2m1", Scale("e5m2", 32), "stochastic")}),
        (NVFP4, {"wgrad_g": Cast("int4")}, {"wgrad_g": Cast("int4")}),
        (NVFP4, {"wgrad_g": {}}, {}),
        # where there is no cast to change, fields make one
        (NVIDIA, {"dgrad_w": {"element": "int4"}}, {"dgrad_w": Cast("int4")}),
        (BF16, {"dgrad_w": {"element": "int4"}}, {"dgrad_w": Cast("int4")}),
        # every cast that there is, then single ones
        (NVFP4, {"every": {"element": "e1m2"}}, changed(NVFP4, element="e1m2")),
        (
            NVFP4,
            {"every": {"scale": {"block": 32}}, "wgrad_x": {"rounding": "nearest"}, "fprop_w": None},
            changed(NVFP4, scale={"block": 32}) | {"wgrad_x": NEAREST_X.replace(scale={"block": 32}), "fprop_w": None},
        ),
        (NVIDIA, {"every": {"rounding": "nearest"}}, changed(NVIDIA, ("dgrad_g", "wgrad_g"), rounding="nearest")),
        (NVFP4, {"every": {}}, {}),
        # the backward pass of a preset is changed before operands are
        (NVFP4, {"backward": "dequantized"}, DEQUANTIZED),
        (NVIDIA, {"backward": "dequantized"}, DEQUANTIZED | {"hadamard": {}}),
        (NVIDIA, {"backward": "high_precision"}, BACKWARD | {"hadamard": {}}),
        (
            NVFP4,
            {"backward": "dequantized", "every": {"scale": {"block": 32}}, "fprop_x": None},
            DEQUANTIZED | {"fprop_x": None, "fprop_w": NVFP4.fprop_w.replace(scale={"block": 32})},
        ),
        (
            DELAYED_FP8,
            {"every": {"scale": {"history": 1024}}, "wgrad_g": {"scale": {"margin": 2}}},
            changed(DELAYED_FP8, scale={"history": 1024})
            | changed(DELAYED_FP8, ["wgrad_g"], scale={"history": 1024, "margin": 2}),
        ),
        # the rest of the fields is given whole
        (NVIDIA, {"hadamard": {}}, {}),
        (NVIDIA, {"hadamard": None}, {"hadamard": {}}),
        (NVIDIA, {"hadamard": {"wgrad": None}}, {"hadamard": {}}),
        (NVIDIA, {"hadamard": {"wgrad": {"signs": "keyed"}}}, {"hadamard": {"wgrad": Hadamard(16, "keyed")}}),
        (NVIDIA, {"hadamard": {"wgrad": 64}}, {"hadamard": {"wgrad": 64}}),
        (
            NVIDIA,
            {"hadamard": {"dgrad": 32}, "dgrad_w": None},
            {"hadamard": {"dgrad": 32, "wgrad": 16}, "dgrad_w": None},
        ),
        (NVFP4, {"subtract_mean": ["wgrad"]}, {"subtract_mean": ("wgrad",)}),
        (NVFP4, {"surrogate": {"fprop_w": "dge"}}, {"surrogate": {"fprop_w": "dge"}}),
        (NVFP4, {"smooth": "token"}, {"smooth": "token"}),
        (CURRENT, {"smooth": None}, {}),
    ],
)
def test_of_changes_what_it_names(preset, changes, fields):
    given = {"preset": str(preset), **changes}
    before = copy.deepcopy(given)
    assert LinearCasts.of(given) == preset.replace(**fields)
    assert given == before, "the mapping that was given was changed"


@each("operand", OPERANDS)
def test_with_rounding_changes_one(operand):
    changed = SIX.with_rounding({operand: "stochastic"})
    for name in OPERANDS:
        assert getattr(changed, name) == (STOCHASTIC if name == operand else NEAREST)
    assert changed.with_rounding({operand: "nearest"}) == SIX
    assert SIX.with_rounding({}) == SIX


@each("name", [*PRESETS, *AWKWARD, "six", "reuse of a weight"])
def test_phases(name):
    others = {**AWKWARD, "six": SIX, "reuse of a weight": LinearCasts(fprop_w=INT4, dgrad_w="fprop")}
    assert_phases(others[name] if name in others else LinearCasts.preset(name))


@each("name", [*PRESETS, *AWKWARD])
def test_values(name):
    casts = AWKWARD[name] if name in AWKWARD else LinearCasts.preset(name)
    for twin in (copy.copy(casts), copy.deepcopy(casts), pickle.loads(pickle.dumps(casts)), casts.replace()):
        assert twin == casts
        assert hash(twin) == hash(casts)
        assert str(twin) == str(casts)
        assert twin.phase("qaf") == casts.phase("qaf")


def test_no_two_are_equal_or_say_the_same():
    given = [*AWKWARD.values(), *map(LinearCasts.preset, PRESETS)]
    assert [sum(casts == other for other in given) for casts in given] == [1] * len(given)
    assert len(set(given)) == len(given)
    assert len(set(map(str, given))) == len(given), f"some say less than they are: {sorted(map(str, given))}"


def test_settings_of_gemms_have_one_form():
    given = {"wgrad": 16, "fprop": {"size": 32, "signs": "keyed"}}
    casts = SIX.replace(hadamard=given, subtract_mean=iter(["wgrad", "fprop", "wgrad"]))
    same = SIX.replace(
        hadamard={"fprop": Hadamard(32, "keyed"), "wgrad": Hadamard(16, "fixed")}, subtract_mean=("fprop", "wgrad")
    )
    assert casts == same
    assert (hash(casts), str(casts)) == (hash(same), str(same))
    assert (
        CENTERED.subtract_mean == SIX.replace(subtract_mean={"wgrad", "dgrad", "fprop"}).subtract_mean == tuple(GEMMS)
    )
    given["dgrad"] = 64
    assert casts == same, "the mapping that was given is still in use"
    one, other = ({"fprop_x": "dge", "fprop_w": "trust"}, {"fprop_w": "trust", "fprop_x": "dge"})
    assert hash(SIX.replace(surrogate=one)) == hash(SIX.replace(surrogate=other))


def test_str():
    casts = LinearCasts(fprop_x=NEAREST, fprop_w=INT4, dgrad_w="fprop", wgrad_g=STOCHASTIC)
    assert str(casts) == (
        "fprop(x=e2m1/e4m3:1x16+fp32, w=int4/e5m2:1x128) dgrad(g=hp, w=fprop) wgrad(g=e2m1/e4m3:1x16+fp32~, x=hp)"
    )
    assert str(casts.replace(hadamard={"wgrad": {"size": 64, "signs": "keyed"}}, surrogate={"fprop_w": "dge"})) == (
        "fprop(x=e2m1/e4m3:1x16+fp32, w=int4/e5m2:1x128 dge) dgrad(g=hp, w=fprop) "
        "wgrad(g=e2m1/e4m3:1x16+fp32~, x=hp, hadamard=64~)"
    )
    assert str(casts.replace(hadamard={"wgrad": 16}, subtract_mean=["fprop", "wgrad"])) == (
        "fprop(x=e2m1/e4m3:1x16+fp32, w=int4/e5m2:1x128, -mean) dgrad(g=hp, w=fprop) "
        "wgrad(g=e2m1/e4m3:1x16+fp32~, x=hp, hadamard=16, -mean)"
    )
    assert str(LinearCasts(fprop_x=DELAYED, smooth="token")) == (
        "fprop(x=e4m3/fp32:tensor(margin 1)(delayed 4 most_recent), w=hp) dgrad(g=hp, w=hp) wgrad(g=hp, x=hp) "
        "smooth=token"
    )


@each(
    "change",
    [
        lambda settings: settings.__setitem__("wgrad", None),
        lambda settings: settings.update(wgrad=None),
        lambda settings: settings.pop("wgrad"),
        lambda settings: settings.clear(),
    ],
)
def test_settings_do_not_change(change):
    casts = LinearCasts.preset("ufp4")
    with pytest.raises(TypeError, match="LinearCasts.replace"):
        change(casts.hadamard)
    assert casts == LinearCasts.preset("ufp4")
