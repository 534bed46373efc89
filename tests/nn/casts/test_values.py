"""LinearCasts as values: presets, YAML, phases."""

import copy
import pickle
from dataclasses import fields, replace

import pytest
import yaml

from lightning_lowbit import Cast, LinearCasts, Scale
from lightning_lowbit.nn import OPERANDS, PRESETS
from lightning_lowbit.quant import Hadamard
from tests.nn.casts.examples import AWKWARD, CENTERED, DELAYED, INT4, NEAREST, SIX, STOCHASTIC, assert_phases
from tests.nn.layers import GEMMS
from tests.tables import each


def test_operands_are_the_first_fields():
    names = tuple(field.name for field in fields(LinearCasts))
    assert names == (*OPERANDS, "hadamard", "subtract_mean", "surrogate", "smooth", "requantize")


def test_bf16_quantizes_nothing():
    assert LinearCasts.preset("bf16") == LinearCasts() == LinearCasts(**dict.fromkeys(OPERANDS))


def test_of_takes_casts_as_they_are():
    assert LinearCasts.of(SIX) is SIX


LONG = Scale("fp32", "tensor", source="delayed", history=1024)
NVFP4, NVIDIA = LinearCasts.preset("nvfp4"), LinearCasts.preset("nvfp4-nvidia")


@each(
    ("given", "expected"),
    [
        # one operand: the fields that are named, of the scale too
        ({"wgrad_x": {"rounding": "nearest"}}, NVFP4.with_rounding({"wgrad_x": "nearest"})),
        (
            {"wgrad_g": {"scale": {"block": 32}}},
            NVFP4.replace(wgrad_g=Cast("e2m1", Scale("e4m3", 32, two_level=True), "stochastic")),
        ),
        (
            {"wgrad_g": {"scale": Scale("e5m2", 32)}},
            NVFP4.replace(wgrad_g=Cast("e2m1", Scale("e5m2", 32), "stochastic")),
        ),
        ({"wgrad_g": Cast("int4")}, NVFP4.replace(wgrad_g=Cast("int4"))),
        ({"wgrad_g": {}}, NVFP4),
        # where there is no cast to change, fields make one
        ({"preset": "nvfp4-nvidia", "dgrad_w": {"element": "int4"}}, NVIDIA.replace(dgrad_w=Cast("int4"))),
        ({"preset": "bf16", "dgrad_w": {"element": "int4"}}, LinearCasts(dgrad_w=Cast("int4"))),
        # every cast that there is, then single ones
        (
            {"every": {"element": "e1m2"}},
            NVFP4.replace(**{n: replace(getattr(NVFP4, n), element="e1m2") for n in OPERANDS}),
        ),
        (
            {"every": {"scale": {"block": 32}}, "wgrad_x": {"rounding": "nearest"}, "fprop_w": None},
            NVFP4.replace(
                **{n: getattr(NVFP4, n).replace(scale={"block": 32}) for n in OPERANDS if n != "fprop_w"}, fprop_w=None
            ).with_rounding({"wgrad_x": "nearest"}),
        ),
        (
            {"preset": "nvfp4-nvidia", "every": {"rounding": "nearest"}},
            NVIDIA.with_rounding({"dgrad_g": "nearest", "wgrad_g": "nearest"}),
        ),
        ({"every": {}}, NVFP4),
        # the rest of the fields is given whole
        ({"preset": "nvfp4-nvidia", "hadamard": {}}, NVIDIA),
        ({"preset": "nvfp4-nvidia", "hadamard": None}, NVIDIA.replace(hadamard={})),
        ({"preset": "nvfp4-nvidia", "hadamard": {"wgrad": None}}, NVIDIA.replace(hadamard={})),
        (
            {"preset": "nvfp4-nvidia", "hadamard": {"wgrad": {"signs": "keyed"}}},
            NVIDIA.replace(hadamard={"wgrad": Hadamard(16, "keyed")}),
        ),
        ({"preset": "nvfp4-nvidia", "hadamard": {"wgrad": 64}}, NVIDIA.replace(hadamard={"wgrad": 64})),
        (
            {"preset": "nvfp4-nvidia", "hadamard": {"dgrad": 32}, "dgrad_w": None},
            NVIDIA.replace(hadamard={"dgrad": 32, "wgrad": 16}, dgrad_w=None),
        ),
        ({"subtract_mean": ["wgrad"]}, NVFP4.replace(subtract_mean=("wgrad",))),
        ({"surrogate": {"fprop_w": "dge"}}, NVFP4.replace(surrogate={"fprop_w": "dge"})),
        ({"smooth": "token"}, NVFP4.replace(smooth="token")),
        ({"preset": "fp8-current", "smooth": None}, LinearCasts.preset("fp8-current")),
        (
            {"preset": "fp8-delayed", "every": {"scale": {"history": 1024}}, "wgrad_g": {"scale": {"margin": 2}}},
            LinearCasts(*(Cast("e5m2" if n[-1] == "g" else "e4m3", LONG) for n in OPERANDS)).replace(
                wgrad_g=Cast("e5m2", replace(LONG, margin=2))
            ),
        ),
    ],
)
def test_of_changes_what_it_names(given, expected):
    given = {"preset": "nvfp4", **given}
    before = copy.deepcopy(given)
    assert LinearCasts.of(given) == expected
    assert given == before, "the mapping that was given was changed"


def test_of_mapping_without_preset_starts_from_high_precision():
    assert LinearCasts.of({"wgrad_g": {"element": "int4"}}) == LinearCasts(wgrad_g=Cast("int4"))
    assert LinearCasts.of({}) == LinearCasts()


YAML_FIELDS = """
fprop_x: {element: e2m1, scale: {format: e4m3, block: 16, two_level: true}}
fprop_w: {element: int4, scale: {format: e5m2, block: [16, 16], rounding: up}}
dgrad_g: {element: e1m2, rounding: stochastic}
dgrad_w: fprop
wgrad_g: null
wgrad_x: fprop
subtract_mean: [dgrad]
surrogate: {fprop_w: dge}
"""

YAML_ROTATED = """
preset: nvfp4
hadamard: {dgrad: 32, wgrad: {size: 64, signs: keyed}}
every: {scale: {format: e8m0, rounding: rceil, two_level: false}}
"""

YAML_DELAYED = """
fprop_x: {element: e4m3, scale: {format: fp32, block: tensor, margin: 1, source: delayed, history: 4,
          algorithm: most_recent}}
smooth: token
"""


@each(
    ("text", "expected"),
    [
        ("nvfp4", LinearCasts.preset("nvfp4")),
        ("{preset: nvfp4, dgrad_w: fprop}", LinearCasts.preset("nvfp4").replace(dgrad_w="fprop")),
        ("{preset: nvfp4, dgrad_g: null}", LinearCasts.preset("nvfp4").replace(dgrad_g=None)),
        (
            YAML_FIELDS,
            LinearCasts(
                fprop_x=NEAREST,
                fprop_w=Cast("int4", Scale("e5m2", (16, 16), "up")),
                dgrad_g=Cast("e1m2", rounding="stochastic"),
                dgrad_w="fprop",
                wgrad_g=None,
                wgrad_x="fprop",
                subtract_mean=("dgrad",),
                surrogate={"fprop_w": "dge"},
            ),
        ),
        (
            YAML_ROTATED,
            LinearCasts(
                *(Cast("e2m1", Scale("e8m0", 16), getattr(NVFP4, operand).rounding) for operand in OPERANDS),
                hadamard={"dgrad": Hadamard(32), "wgrad": Hadamard(64, "keyed")},
            ),
        ),
        (YAML_DELAYED, LinearCasts(fprop_x=DELAYED, smooth="token")),
    ],
)
def test_yaml(text, expected):
    assert LinearCasts.of(yaml.safe_load(text)) == expected


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
    """They compare and hash by what they say, and survive copying and pickling."""
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
    """However they are written, and whatever becomes of what was given."""
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


@pytest.mark.parametrize(
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
