"""Casts as values: equality, specs, mappings, copies with other fields, names and bits."""

import itertools
import warnings
from dataclasses import fields, replace

import pytest
import yaml

from lightning_lowbit import Cast, LinearCasts, Scale
from lightning_lowbit.formats import ELEMENT_FORMATS, SCALE_FORMATS
from lightning_lowbit.precision.checkpoints.trained import Trained
from lightning_lowbit.quant.cast import SCALE_ROUNDINGS
from tests.quant.tensors import NVFP4, casts
from tests.tables import each


def test_casts_are_values():
    cast = Cast("e2m1", Scale("e4m3", [16, 16], "up", True), "stochastic")
    same_cast = Cast(scale={"block": (16, 16), "rounding": "up", "two_level": True}, rounding="stochastic")
    assert cast == same_cast
    assert hash(cast) == hash(same_cast)
    assert cast != replace(cast, rounding="nearest")
    with pytest.raises(AttributeError):
        cast.element = "e1m2"


def every_cast():
    blocks = (8, 16, (16, 16), "row", "tensor", 1, (1, 16), (16, 1))
    nearest = [cast for element in ELEMENT_FORMATS for block in blocks for cast in casts(element, block)]
    nearest += [
        cast.replace(scale={"margin": margin})
        for cast in nearest
        if cast.scale.format == "fp32" and cast.scale.statistic == "absmax"
        for margin in (1, 64)
    ]
    nearest += [
        cast.replace(scale={"source": "delayed", "history": history, "algorithm": algorithm})
        for cast in nearest
        if cast.scale.needs_amax and cast.element in ("e2m1", "e5m2")
        for history, algorithm in itertools.product((1, 16), ("max", "most_recent"))
    ]
    nearest += [replace(cast, round_to_bfloat16=True) for cast in nearest if cast.element in ("e2m1", "int4")]
    return nearest + [replace(cast, rounding="stochastic") for cast in nearest]


@pytest.mark.slow
def test_names_tell_casts_apart_and_specs_round_trip():
    names = {}
    for cast in every_cast():
        other = names.setdefault(str(cast), cast)
        assert other == cast, f"{cast!r} and {other!r} are both called {cast}"
        again = Cast.from_spec(cast.spec)
        assert again == cast, f"{cast!r} came back as {again!r}"
        assert (hash(again), again.spec) == (hash(cast), cast.spec)


def test_casts_of_mappings():
    text = """
    element: int4
    round_to_bfloat16: true
    scale: {format: fp32, block: 128, statistic: minmax, factor: 0.9, epsilon: 1.0e-5}
    """
    expected = Cast("int4", Scale("fp32", 128, statistic="minmax", factor=0.9, epsilon=1e-5), round_to_bfloat16=True)
    assert Cast(**yaml.safe_load(text)) == expected


@each(
    ("cast", "name"),
    [
        (Cast(), "e2m1/e4m3:1x16"),
        (Cast("int4", Scale("e5m2", 128)), "int4/e5m2:1x128"),
        (Cast("e2m1", Scale("e4m3", (16, 16), "up", True), "stochastic"), "e2m1/e4m3:16x16+fp32^~"),
        (Cast("e2m1", Scale("e8m0", 32)), "e2m1/e8m0:1x32"),
        (Cast("e2m1", Scale("e8m0", 32, "floor", prescale=0.75), "stochastic"), "e2m1/e8m0:1x32(floor)(x0.75)~"),
        (Cast("e4m3", Scale("fp32", "row", "power_of_two")), "e4m3/fp32:row(power_of_two)"),
        (Cast("e5m2", Scale("fp32", "tensor")), "e5m2/fp32:tensor"),
        (Cast("e2m1", Scale(two_level=True, top=256, four_over_six="mae")), "e2m1/e4m3:1x16+fp32<256(4/6 mae)"),
        (Cast("e4m3", Scale("fp32", "row", margin=2)), "e4m3/fp32:row(margin 2)"),
        (Cast("e4m3", Scale("fp32", "tensor", source="delayed")), "e4m3/fp32:tensor(delayed 16)"),
        (
            Cast("int8", Scale("fp32", "tensor", margin=1, source="delayed", history=1024, algorithm="most_recent")),
            "int8/fp32:tensor(margin 1)(delayed 1024 most_recent)",
        ),
        (Cast("e2m1", Scale(two_level=True, source="delayed", history=1)), "e2m1/e4m3:1x16+fp32(delayed 1)"),
        (Cast("ternary", Scale("fp32", "tensor", statistic="absmean")), "ternary/fp32:tensor(absmean)"),
        (
            Cast("ternary", Scale("fp32", "tensor", statistic="absmean", factor=1.1547, epsilon=1e-5)),
            "ternary/fp32:tensor(absmean x1.1547)(epsilon 1e-05)",
        ),
        (Cast("int4", Scale("fp32", 128, statistic="minmax"), round_to_bfloat16=True), "int4/fp32:1x128(minmax)≈"),
        (Cast("int4", Scale("fp32", 128), "stochastic", round_to_bfloat16=True), "int4/fp32:1x128~≈"),
        (Cast("int8", Scale("fp32", "row", factor=0.5)), "int8/fp32:row(absmax x0.5)"),
        (Cast("int8", Scale("fp32", "row", "power_of_two", epsilon=0.5)), "int8/fp32:row(power_of_two)(epsilon 0.5)"),
    ],
)
def test_names(cast, name):
    assert str(cast) == name


@each(
    ("cast", "bits"),
    [
        (NVFP4, 4 + 8 / 16),
        (Cast("e2m1", Scale("e4m3", (16, 16), two_level=True)), 4 + 8 / 256),
        (Cast("e2m1", Scale("e8m0", 32)), 4 + 8 / 32),
        (Cast("e3m2", Scale("e8m0", 32)), 6 + 8 / 32),
        (Cast("e4m3", Scale("e8m0", 32)), 8 + 8 / 32),
        (Cast("int4", Scale("fp32", 128)), 4 + 32 / 128),
        (Cast("int5", Scale("e6m1", 10)), 5 + 7 / 10),
        (Cast("e4m3", Scale("fp32", "row")), 8),
        (Cast("ternary", Scale("fp32", "tensor")), 2),
    ],
)
def test_bits(cast, bits):
    assert cast.bits == bits


def test_replace_changes_what_it_names():
    scale = Scale("e4m3", (16, 16), "up", two_level=True, top=256, four_over_six="mse", source="delayed")
    cast = Cast("e2m1", scale, "stochastic")
    changes = {"format": "e5m2", "block": [8, 8], "rounding": "nearest", "two_level": True, "top": None}
    changes |= {"four_over_six": "mae", "prescale": 1, "margin": 0, "statistic": "absmax", "factor": 1, "epsilon": 0}
    changes |= {"source": "current", "history": 1024, "algorithm": "most_recent", "correction": None}
    assert set(changes) == {field.name for field in fields(Scale)}, "a field of Scale is not tried"
    for name, value in changes.items():
        found = cast.replace(scale={name: value})
        expected = tuple(value) if isinstance(value, list) else value
        assert getattr(found.scale, name) == expected, f"scale.{name} is {getattr(found.scale, name)}"
        others = {field.name for field in fields(Scale)} - {name}
        kept = {other: getattr(found.scale, other) == getattr(cast.scale, other) for other in others}
        assert all(kept.values()), f"scale.{name} changed, and so did another field: {kept}"
        assert replace(found, scale=cast.scale) == cast
    assert cast.replace(rounding="nearest") == replace(cast, rounding="nearest")
    assert cast.replace(round_to_bfloat16=True) == Cast("e2m1", scale, "stochastic", round_to_bfloat16=True)
    assert cast.replace(scale=Scale("e8m0")).scale == Scale("e8m0")
    both = cast.replace(element="e2m1", rounding="nearest", scale={"block": 32})
    assert (both.rounding, both.scale.block, both.scale.top) == ("nearest", 32, 256)
    assert cast.replace() == cast
    assert cast.replace(element="int4", scale={"four_over_six": None}).element == "int4"
    room = Cast("e4m3", Scale("fp32", "row", "power_of_two"))
    assert room.replace(scale={"margin": 2}) == Cast("e4m3", Scale("fp32", "row", "power_of_two", margin=2))
    for name, value in {"statistic": "absmean", "factor": 0.5, "epsilon": 1e-5}.items():
        expected = Cast("e4m3", Scale("fp32", "row", "power_of_two", **{name: value}))
        assert room.replace(scale={name: value}) == expected, f"scale.{name}"


@each("name", SCALE_FORMATS)
def test_a_default_rounding_follows_the_format(name):
    """Nobody chose it, so it must not stand in the way of another format; a chosen one is kept, or refused."""
    for cast in (Cast(), Cast(scale=Scale("e8m0")), Cast(scale=Scale("fp32"))):
        assert cast.replace(scale={"format": name}).scale == Scale(name)
    chosen = Cast(scale=Scale("e4m3", rounding="up"))
    if "up" in SCALE_ROUNDINGS[name]:
        assert chosen.replace(scale={"format": name}).scale.rounding == "up"
    else:
        with pytest.raises(ValueError, match=f"Unknown rounding of {name} scales 'up'"):
            chosen.replace(scale={"format": name})


@each(
    ("changes", "message"),
    [
        ({"elemnt": "e2m1"}, "Unknown field of Cast 'elemnt'. Did you mean 'element'"),
        ({"spec": "{}"}, "Unknown field of Cast 'spec'"),
        ({"scale": {"blok": 16}}, "Unknown field of Scale 'blok'. Did you mean 'block'"),
        ({"scale": {"block": "tensor"}}, "leave out two_level"),
        ({"scale": {"format": "fp32", "two_level": False, "statistic": "minmax"}}, "take 'int2' to 'int8'"),
        ({"round_to_bfloat16": "no"}, "Cast.round_to_bfloat16 is true or false; got 'no'"),
    ],
)
def test_replace_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        NVFP4.replace(**changes)


CAST = Cast("int4", Scale("fp32", 32), round_to_bfloat16=True)


@each(
    "make",
    [
        lambda: Cast("int4", Scale("fp32", 32), rounded=True),
        lambda: Cast("int4", Scale("fp32", 32)).replace(rounded=True),
        lambda: replace(Cast("int4", Scale("fp32", 32)), rounded=True),
        lambda: LinearCasts.of({"fprop_w": {"element": "int4", "scale": {"format": "fp32"}, "rounded": True}}).fprop_w,
        lambda: LinearCasts.of({"preset": "int4", "every": {"rounded": True, "scale": {"block": 32}}}).fprop_w,
    ],
)
def test_the_old_name_warns_and_sets_the_field(make):
    with pytest.warns(DeprecationWarning, match="rounded is deprecated .* it is now Cast.round_to_bfloat16"):
        made = make()
    assert made.round_to_bfloat16 is True
    with pytest.warns(DeprecationWarning, match="Cast.round_to_bfloat16"):
        assert made.rounded is True


def test_checkpoints_with_the_old_name_load_without_a_warning():
    record = Trained({"layer": LinearCasts(fprop_w=CAST)}, "bf16", None, ()).record()
    (casts,) = record["casts"].values()
    casts["fprop_w"]["rounded"] = casts["fprop_w"].pop("round_to_bfloat16")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Trained.read(record).layers["layer"].fprop_w == CAST
