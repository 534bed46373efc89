"""LinearCasts as values: validation, presets, phases, YAML."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import yaml

from lightning_lowbit import Cast, LinearCasts, Scale
from lightning_lowbit.nn import OPERANDS, PHASES, PRESETS

NEAREST = Cast("e2m1", Scale("e4m3", 16, two_level=True))
STOCHASTIC = replace(NEAREST, rounding="stochastic")
INT4 = Cast("int4", Scale("e5m2", 128))
SIX = LinearCasts(**dict.fromkeys(OPERANDS, NEAREST))


def test_operands_are_the_fields() -> None:
    assert tuple(field.name for field in fields(LinearCasts)) == OPERANDS


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name: str) -> None:
    casts = LinearCasts.preset(name)
    assert LinearCasts.of(name) == casts == LinearCasts.of({"preset": name})
    assert str(casts) == name
    assert hash(casts) == hash(LinearCasts.preset(name))
    assert all(str(casts) != str(LinearCasts.preset(other)) for other in PRESETS if other != name)


def test_bf16_quantises_nothing() -> None:
    assert LinearCasts.preset("bf16") == LinearCasts() == LinearCasts(**dict.fromkeys(OPERANDS))


def test_nvfp4_is_that_of_the_paper() -> None:
    """FP4 All the Way, section 3: stochastic for both gradients and wgrad's activations, nearest elsewhere."""
    found = LinearCasts.preset("nvfp4")
    for operand in OPERANDS:
        expected = STOCHASTIC if operand in ("dgrad_g", "wgrad_g", "wgrad_x") else NEAREST
        assert getattr(found, operand) == expected, operand


def test_of_takes_casts_as_they_are() -> None:
    assert LinearCasts.of(SIX) is SIX


def test_of_mapping_starts_from_a_preset() -> None:
    given = {"preset": "nvfp4", "fprop_x": None, "wgrad_x": "fprop", "dgrad_w": {"element": "int4"}}
    found = LinearCasts.of(given)
    expected = LinearCasts.preset("nvfp4").replace(fprop_x=None, wgrad_x="fprop", dgrad_w=Cast("int4"))
    assert found == expected
    assert given["preset"] == "nvfp4", "the mapping that was given was changed"


def test_of_mapping_without_preset_starts_from_high_precision() -> None:
    assert LinearCasts.of({"wgrad_g": {"element": "int4"}}) == LinearCasts(wgrad_g=Cast("int4"))
    assert LinearCasts.of({}) == LinearCasts()


YAML_FIELDS = """
fprop_x: {element: e2m1, scale: {format: e4m3, block: 16, two_level: true}}
fprop_w: {element: int4, scale: {format: e5m2, block: [16, 16], rounding: up}}
dgrad_g: {element: e1m2, rounding: stochastic}
dgrad_w: fprop
wgrad_g: null
wgrad_x: fprop
"""


@pytest.mark.parametrize(
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
            ),
        ),
    ],
    ids=["name", "preset and override", "preset and null", "six fields"],
)
def test_yaml(text: str, expected: LinearCasts) -> None:
    assert LinearCasts.of(yaml.safe_load(text)) == expected


@pytest.mark.parametrize("operand", OPERANDS)
def test_replace_changes_one(operand: str) -> None:
    changed = SIX.replace(**{operand: INT4})
    for name in OPERANDS:
        assert getattr(changed, name) == (INT4 if name == operand else NEAREST)
    assert SIX.replace(**{operand: NEAREST}) == SIX


@pytest.mark.parametrize("operand", OPERANDS)
def test_with_rounding_changes_one(operand: str) -> None:
    changed = SIX.with_rounding({operand: "stochastic"})
    for name in OPERANDS:
        assert getattr(changed, name) == (STOCHASTIC if name == operand else NEAREST)
    assert changed.with_rounding({operand: "nearest"}) == SIX
    assert SIX.with_rounding({}) == SIX


EXPECTED_PHASES = {
    "fqt": (),
    "qaf": ("dgrad_g", "dgrad_w", "wgrad_g", "wgrad_x"),
    "hp-forward": ("fprop_x", "fprop_w"),
    "bf16": OPERANDS,
}


@pytest.mark.parametrize("casts", [SIX, LinearCasts.preset("nvfp4"), LinearCasts(fprop_w=INT4, dgrad_w="fprop")])
@pytest.mark.parametrize("phase", PHASES)
def test_phases(phase: str, casts: LinearCasts) -> None:
    changed = casts.phase(phase)
    for operand in OPERANDS:
        expected = None if operand in EXPECTED_PHASES[phase] else getattr(casts, operand)
        assert getattr(changed, operand) == expected, f"{operand} in phase {phase}"
    assert changed.phase(phase) == changed, f"{phase} is not idempotent"
    assert casts.phase("fqt") == casts, "fqt does not give the casts back"
    assert casts.phase("bf16") == LinearCasts()


def test_str() -> None:
    casts = LinearCasts(fprop_x=NEAREST, fprop_w=INT4, dgrad_w="fprop", wgrad_g=STOCHASTIC)
    assert str(casts) == (
        "fprop(x=e2m1/e4m3:1x16+fp32, w=int4/e5m2:1x128) dgrad(g=hp, w=fprop) wgrad(g=e2m1/e4m3:1x16+fp32~, x=hp)"
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: LinearCasts("nvfp4"), "LinearCasts.fprop_x is a Cast, .* got 'nvfp4'"),
        *[
            (lambda operand=operand: LinearCasts(**{operand: "fprop"}), f"LinearCasts.{operand} is .* got 'fprop'")
            for operand in ("fprop_x", "fprop_w", "dgrad_g", "wgrad_g")
        ],
        (lambda: LinearCasts(dgrad_w="forward"), "or \"fprop\"; got 'forward'"),
        (lambda: LinearCasts(dgrad_w=16), "LinearCasts.dgrad_w .* got 16"),
        (lambda: LinearCasts(fprop_x={"elment": "e2m1"}), "Unknown field of Cast 'elment'. Did you mean 'element'"),
        (lambda: LinearCasts.preset("nvfp5"), "Unknown preset 'nvfp5'. Did you mean 'nvfp4'"),
        (lambda: LinearCasts.of("nvfp5"), "Unknown preset 'nvfp5'. Did you mean 'nvfp4'"),
        (lambda: LinearCasts.of({"preset": None}), "Unknown preset None"),
        (
            lambda: LinearCasts.of({"preset": "nvfp4", "fprop_y": None}),
            "Unknown field of LinearCasts 'fprop_y'. Did you",
        ),
        (lambda: LinearCasts.of({1: None}), "Unknown field of LinearCasts 1"),
        (lambda: LinearCasts.of(None), "a preset's name or a mapping of fields; got None"),
        (lambda: LinearCasts.of(["nvfp4"]), r"a preset's name or a mapping of fields; got \['nvfp4'\]"),
        (lambda: SIX.replace(fprop=None), "Unknown operand 'fprop'"),
        (lambda: SIX.replace(fprop_x="fprop"), "LinearCasts.fprop_x is"),
        (lambda: SIX.phase("qat"), "Unknown phase 'qat'. Did you mean 'qaf'"),
        (lambda: SIX.phase(None), "Unknown phase None"),
        (lambda: SIX.with_rounding({"wgradx": "nearest"}), "Unknown operand 'wgradx'. Did you mean 'wgrad_x'"),
        (lambda: SIX.with_rounding({"wgrad_x": "near"}), "Unknown rounding 'near'"),
        (lambda: SIX.with_rounding("stochastic"), "rounding"),
        (lambda: LinearCasts().with_rounding({"wgrad_x": "nearest"}), "wgrad_x is None"),
        (lambda: SIX.replace(wgrad_x="fprop").with_rounding({"wgrad_x": "nearest"}), "wgrad_x is 'fprop'"),
    ],
)
def test_errors(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
