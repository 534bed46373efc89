"""Copies of casts with other fields."""

from dataclasses import fields, replace

import pytest

from lightning_lowbit import Cast, Scale
from lightning_lowbit.formats import SCALE_FORMATS
from lightning_lowbit.quant.cast import SCALE_ROUNDINGS
from tests.quant.tensors import NVFP4
from tests.tables import each


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
