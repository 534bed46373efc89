"""Argument checks say what was needed and what came; near names are offered."""

import math

import pytest

from lightning_lowbit.checks import choose, flag, fraction, from_fields, integer, near, nearest, number, positive, some
from lightning_lowbit.cli.configs import recipes
from lightning_lowbit.nn import PRESETS
from lightning_lowbit.quant import Scale
from tests.tables import each


@each(
    ("given", "meant"),
    [
        ("fp4", "nvfp4"),  # and not ufp4, which is spelled as much alike
        ("fp8", "fp8-delayed"),
        ("int", "int8"),
        ("mx", "mxfp4"),
        ("nvfp5", "nvfp4"),
        ("NVFP4", "nvfp4"),
        ("nvidia", "nvfp4-nvidia"),
        ("tenary", "ternary"),
    ],
)
def test_a_part_of_a_name_stands_for_it(given, meant):
    assert near(given, PRESETS) == [meant]
    with pytest.raises(ValueError, match=f"Unknown preset '{given}'. Did you mean '{meant}'"):
        choose("preset", given, PRESETS)


def test_nothing_is_near_or_several_are_each_named_once():
    assert nearest("xyz", PRESETS) == nearest("x", ["fprop_x"]) == nearest("", PRESETS) == ""
    assert near("llama", recipes(), most=3) == ["llama_130m", "llama_1b", "llama_350m"]
    assert nearest("fp", ["fp8", "nvfp4", "fp16"], most=2) == " Did you mean 'fp8' or 'fp16'?"


@each(
    ("check", "needed", "valid", "wrong"),
    [
        (lambda n, v: integer(n, v, 2), "a whole number, 2 or more", [2, 10**40], [1, 2.0, True, "2", None]),
        (lambda n, v: integer(n, v, 0, "a number of steps"), "a number of steps, 0 or more", [0], [-1]),
        (lambda n, v: integer(n, v, 2, at_most=8), "a whole number, 2 or more and at most 8", [2, 8], [1, 9]),
        (lambda n, v: integer(n, v, 1, or_none=True), "a whole number, 1 or more, or None", [None, 1], [0]),
        (lambda n, v: number(n, v, "a finite number"), "a finite number", [-1, 10**400], [math.inf, math.nan, True]),
        (lambda n, v: number(n, v, finite=False), "a number", [math.inf], [math.nan]),
        (lambda n, v: number(n, v, at_least=0, at_most=1), "a number, 0 or more and at most 1", [0, 1], [-0.1, 1.1]),
        (lambda n, v: number(n, v, at_least=0, below=1), "a number, 0 or more and below 1", [0, 0.9], [1]),
        (lambda n, v: number(n, v, above=0, below=1), "a number, above 0 and below 1", [0.1], [0, 1]),
        (lambda n, v: number(n, v, "a ratio", above=1), "a ratio, above 1", [1.1], [1, math.inf]),
        (positive, "a number, above 0", [5e-324, 3], [0, -1, math.inf, math.nan]),
        (fraction, "a fraction, above 0 and at most 1", [0.1, 1], [0, 2, math.nan]),
        (flag, "true or false", [True, False], [0, 1, "true", None]),
    ],
)
def test_a_check_returns_what_it_accepts_and_says_what_it_needs(check, needed, valid, wrong):
    for value in valid:
        assert check("x", value) is value
    for value in wrong:
        with pytest.raises(ValueError) as error:
            check("x", value)
        assert str(error.value) == f"x is {needed}; got {value!r}."


def test_a_few_names_stand_for_all():
    assert [some("abc"), some("abcde"), some([])] == ["a, b, c", "a, b, c and 2 more", ""]


def test_a_dataclass_from_fields():
    assert from_fields(Scale, "Scale", {"block": 16}) == Scale(block=16)
    with pytest.raises(ValueError, match="Unknown field of Scale 'blok'. Did you mean 'block'"):
        from_fields(Scale, "Scale", {"blok": 16})
