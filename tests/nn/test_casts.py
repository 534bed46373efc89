"""LinearCasts as values: validation, presets, phases, YAML."""

import ast
import copy
import inspect
import itertools
import pickle
import textwrap
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import yaml

from lightning_lowbit import Cast, LinearCasts, Scale
from lightning_lowbit.nn import OPERANDS, PHASES, PRESETS
from lightning_lowbit.quant import Hadamard
from tests.nn.layers import GEMMS

NEAREST = Cast("e2m1", Scale("e4m3", 16, two_level=True))
STOCHASTIC = replace(NEAREST, rounding="stochastic")
INT4 = Cast("int4", Scale("e5m2", 128))
SIX = LinearCasts(**dict.fromkeys(OPERANDS, NEAREST))
ROTATED = SIX.replace(hadamard={"fprop": 16, "dgrad": Hadamard(64, "keyed"), "wgrad": 128})
CENTRED = SIX.replace(subtract_mean=["fprop", "dgrad", "wgrad"])
SURROGATES = ROTATED.replace(surrogate={"fprop_x": "trust", "fprop_w": "dge"}, subtract_mean=["dgrad", "wgrad"])
MIXED = LinearCasts(
    fprop_x=NEAREST,
    dgrad_w="fprop",
    wgrad_g=INT4,
    hadamard={"wgrad": 32},
    subtract_mean=["fprop", "wgrad"],
)
DELAYED = Cast("e4m3", Scale("fp32", "tensor", margin=1, source="delayed", history=4, algorithm="most_recent"))
SMOOTHED = SIX.replace(smooth="channel", fprop_x=DELAYED, dgrad_w="fprop", hadamard={"wgrad": 16})
REUSED = LinearCasts(fprop_w=INT4, dgrad_g=STOCHASTIC, dgrad_w="fprop", wgrad_x="fprop", subtract_mean=["dgrad"])
AWKWARD = {
    "rotated": ROTATED,
    "centerd": CENTRED,
    "surrogates": SURROGATES,
    "mixed": MIXED,
    "reused": REUSED,
    "smoothed": SMOOTHED,
    "smoothed tokens": SMOOTHED.replace(smooth="token"),
    "delayed": SIX.replace(fprop_x=DELAYED, dgrad_g=DELAYED.replace(scale={"algorithm": "max"})),
}


def test_operands_are_the_first_fields() -> None:
    names = tuple(field.name for field in fields(LinearCasts))
    assert names == (*OPERANDS, "hadamard", "subtract_mean", "surrogate", "smooth")


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name: str) -> None:
    casts = LinearCasts.preset(name)
    assert LinearCasts.of(name) == casts == LinearCasts.of({"preset": name})
    assert str(casts) == name
    assert hash(casts) == hash(LinearCasts.preset(name))
    assert all(str(casts) != str(LinearCasts.preset(other)) for other in PRESETS if other != name)


def test_bf16_quantizes_nothing() -> None:
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
    int4 = Cast("int4", Scale("e4m3", 16, two_level=True))
    assert found == LinearCasts.preset("nvfp4").replace(fprop_x=None, wgrad_x="fprop", dgrad_w=int4)
    assert given["preset"] == "nvfp4", "the mapping that was given was changed"
    assert given["dgrad_w"] == {"element": "int4"}, "the mapping that was given was changed"


LONG = Scale("fp32", "tensor", source="delayed", history=1024)
NVFP4, NVIDIA = LinearCasts.preset("nvfp4"), LinearCasts.preset("nvfp4-nvidia")


@pytest.mark.parametrize(
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
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_of_changes_what_it_names(given: dict[str, Any], expected: LinearCasts) -> None:
    given = {"preset": "nvfp4", **given}
    before = copy.deepcopy(given)
    assert LinearCasts.of(given) == expected
    assert given == before, "the mapping that was given was changed"


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
    ids=["name", "preset and override", "preset and null", "fields", "preset and all its casts", "delayed, smoothed"],
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


def assert_phases(casts: LinearCasts) -> None:
    for phase in PHASES:
        changed = casts.phase(phase)
        quantized = set()
        for operand in OPERANDS:
            expected = None if operand in EXPECTED_PHASES[phase] else getattr(casts, operand)
            assert getattr(changed, operand) == expected, f"{operand} in phase {phase} of {casts}"
            quantized |= {operand} if isinstance(expected, Cast) else set()
        # What belongs to a GEMM or a tensor stays exactly where something is quantized that it concerns.
        rotated = {gemm: setting for gemm, setting in casts.hadamard.items() if quantized & set(GEMMS[gemm])}
        centerd = tuple(
            gemm for gemm in casts.subtract_mean if any(name in quantized and name[-1] != "w" for name in GEMMS[gemm])
        )
        surrogate = {operand: kind for operand, kind in casts.surrogate.items() if operand in quantized}
        assert changed.hadamard == rotated, f"{phase} of {casts}"
        assert changed.subtract_mean == centerd, f"{phase} of {casts}"
        assert changed.surrogate == surrogate, f"{phase} of {casts}"
        assert changed.smooth == (casts.smooth if {name[-1] for name in quantized} & {"x", "w"} else None), phase
        assert changed.phase(phase) == changed, f"{phase} is not idempotent"
        assert changed.phase("fqt") == changed, "fqt changes casts"
    assert casts.phase("fqt") == casts, "fqt does not give the casts back"
    assert casts.phase("bf16") == LinearCasts()


@pytest.mark.parametrize("name", [*PRESETS, *AWKWARD, "six", "reuse of a weight"])
def test_phases(name: str) -> None:
    others = {**AWKWARD, "six": SIX, "reuse of a weight": LinearCasts(fprop_w=INT4, dgrad_w="fprop")}
    assert_phases(others[name] if name in others else LinearCasts.preset(name))


@pytest.mark.parametrize("name", [*PRESETS, *AWKWARD])
def test_values(name: str) -> None:
    """They compare and hash by what they say, and survive copying and pickling."""
    casts = AWKWARD[name] if name in AWKWARD else LinearCasts.preset(name)
    for twin in (copy.copy(casts), copy.deepcopy(casts), pickle.loads(pickle.dumps(casts)), casts.replace()):
        assert twin == casts
        assert hash(twin) == hash(casts)
        assert str(twin) == str(casts)
        assert twin.phase("qaf") == casts.phase("qaf")
    others = [*AWKWARD.values(), *map(LinearCasts.preset, PRESETS)]
    assert sum(casts == other for other in others) == 1
    assert sum(str(casts) == str(other) for other in others) == 1, f"{casts} says less than it is"
    assert len(set(others)) == len(others)


def test_settings_of_gemms_have_one_form() -> None:
    """However they are written, and whatever becomes of what was given."""
    given: dict[str, Any] = {"wgrad": 16, "fprop": {"size": 32, "signs": "keyed"}}
    casts = SIX.replace(hadamard=given, subtract_mean=iter(["wgrad", "fprop", "wgrad"]))
    same = SIX.replace(
        hadamard={"fprop": Hadamard(32, "keyed"), "wgrad": Hadamard(16, "fixed")}, subtract_mean=("fprop", "wgrad")
    )
    assert casts == same
    assert (hash(casts), str(casts)) == (hash(same), str(same))
    assert CENTRED.subtract_mean == SIX.replace(subtract_mean={"wgrad", "dgrad", "fprop"}).subtract_mean == tuple(GEMMS)
    given["dgrad"] = 64
    assert casts == same, "the mapping that was given is still in use"
    one, other = ({"fprop_x": "dge", "fprop_w": "trust"}, {"fprop_w": "trust", "fprop_x": "dge"})
    assert hash(SIX.replace(surrogate=one)) == hash(SIX.replace(surrogate=other))


def test_str() -> None:
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


# --- what follows from casts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*PRESETS, *AWKWARD])
def test_casts_of_operands(name: str) -> None:
    casts = AWKWARD[name] if name in AWKWARD else LinearCasts.preset(name)
    for operand in OPERANDS:
        given = getattr(casts, operand)
        expected = {"dgrad_w": casts.fprop_w, "wgrad_x": casts.fprop_x}[operand] if given == "fprop" else given
        assert casts.cast_of(operand) == expected, operand
    assert casts.quantizes_x_or_w == any(isinstance(getattr(casts, n), Cast) for n in OPERANDS if n[-1] in "xw")


@pytest.mark.parametrize("operand", OPERANDS)
def test_any_delayed_operand_makes_casts_delayed(operand: str) -> None:
    assert not SIX.is_delayed
    assert SIX.replace(**{operand: DELAYED}).is_delayed
    assert LinearCasts(**{operand: DELAYED}).is_delayed
    assert not SIX.replace(**{operand: DELAYED}).phase("bf16").is_delayed
    assert LinearCasts(**{operand: DELAYED}).quantizes_x_or_w == (operand[-1] != "g")


def test_former_spellings_warn() -> None:
    with pytest.warns(DeprecationWarning, match="quantised_gemms is now quantized_gemms"):
        assert SIX.quantised_gemms == SIX.quantized_gemms
    with pytest.warns(DeprecationWarning, match="quantises_x_or_w is now quantizes_x_or_w"):
        assert SIX.quantises_x_or_w


# What decides whether hardware takes an operand as it is.
E4M3, E5M2 = (Cast(element, Scale("fp32", "tensor")) for element in ("e4m3", "e5m2"))
FORMS = {
    None: None,
    "e4m3": E4M3,
    "e5m2": E5M2,
    "e4m3 rows": Cast("e4m3", Scale("fp32", "row", "power_of_two")),
    "e5m2 rows": Cast("e5m2", Scale("e4m3", "row", two_level=True), "stochastic"),
    "e4m3 delayed": DELAYED,
    "e4m3 blocks": Cast("e4m3", Scale("e8m0", 32)),
    "e4m3 tiles": Cast("e4m3", Scale("e4m3", (16, 16), two_level=True)),
    "e3m2": Cast("e3m2", Scale("fp32", "tensor")),
    "int8 rows": Cast("int8", Scale("fp32", "row")),
    "int2 rows": Cast("int2", Scale("fp32", "row", "power_of_two"), "stochastic", rounded=True),
    "int4": Cast("int4", Scale("e8m0", "tensor")),
    "ternary": Cast("ternary", Scale("fp32", "tensor", statistic="absmean", factor=1.1, epsilon=1e-5)),
    "int8 groups": Cast("int8", Scale("fp32", 128), rounded=True),
    "int8 from min to max": Cast("int8", Scale("fp32", "row", statistic="minmax")),
    "int8 delayed": Cast("int8", Scale("fp32", "tensor", source="delayed")),
}
TAKEN = {
    "fp8": {"e4m3", "e5m2", "e4m3 rows", "e5m2 rows", "e4m3 delayed"},
    "int8": {"int8 rows", "int2 rows", "int4", "ternary"},
}


def taken(left: str | None, right: str | None) -> str | None:
    """In what hardware computes a GEMM of these two: FP8 takes E4M3 and E5M2, not E5M2 twice, and by rows E4M3 last."""
    if {left, right} <= TAKEN["int8"]:
        return "int8"
    if not {left, right} <= TAKEN["fp8"]:
        return None
    rows = "rows" in f"{left} {right}"
    return "fp8" if str(right).startswith("e4m3") or (str(left).startswith("e4m3") and not rows) else None


def test_native_gemms() -> None:
    for left, right in itertools.product(FORMS, repeat=2):
        for gemm, (one, other) in GEMMS.items():
            found = LinearCasts(**{one: FORMS[left], other: FORMS[right]}).native_gemms
            kind = taken(left, right)
            assert found == ({gemm: kind} if kind else {}), f"{gemm}: {left} times {right}"


def test_native_gemms_of_what_is_reused() -> None:
    """It is in few bits if the forward pass had it so, and its scales do not lie along what is now the contraction."""
    weights = ("e4m3", "e5m2", "e4m3 rows", "e4m3 delayed", "ternary", "int8 rows", "int8 groups", None)
    for x, w, g in itertools.product(FORMS, weights, FORMS):
        casts = LinearCasts(
            fprop_x=FORMS[x], fprop_w=FORMS[w], dgrad_g=FORMS[g], dgrad_w="fprop", wgrad_g=FORMS[g], wgrad_x="fprop"
        )
        expected = {"fprop": kind} if (kind := taken(x, w)) else {}
        for gemm, operand in (("dgrad", w), ("wgrad", x)):
            if "fprop" in expected and (kind := taken(g, operand)) and not str(operand).endswith("rows"):
                expected[gemm] = kind
        assert casts.native_gemms == expected, f"x {x}, w {w}, g {g}"


@pytest.mark.parametrize(
    ("name", "native"),
    [
        *((name, {}) for name in PRESETS if not name.startswith("fp8-") and name != "ternary"),
        *((name, dict.fromkeys(GEMMS, "fp8")) for name in ("fp8-delayed", "fp8-current", "fp8-row")),
        ("ternary", {"fprop": "int8"}),
    ],
)
def test_native_gemms_of_presets(name: str, native: dict[str, str]) -> None:
    casts = LinearCasts.preset(name)
    assert casts.native_gemms == native
    assert casts.phase("qaf").native_gemms == {gemm: kind for gemm, kind in native.items() if gemm == "fprop"}
    assert casts.phase("hp-forward").native_gemms == {gemm: kind for gemm, kind in native.items() if gemm != "fprop"}


TILES = Cast("e2m1", Scale("e4m3", (16, 16), two_level=True))


@pytest.mark.parametrize(
    ("cast", "one"),
    [
        (E4M3, True),
        (E5M2, True),
        (DELAYED, True),
        (TILES, True),
        (Cast("int4", Scale("e4m3", (4, 8))), True),
        (NEAREST, False),  # whose blocks lie along another axis
        (INT4, False),
        (FORMS["e4m3 rows"], False),
        (replace(E4M3, rounding="stochastic"), False),  # whose random bits are the operand's own
        (replace(TILES, rounding="stochastic"), False),
        (None, False),
    ],
    ids=str,
)
def test_operands_that_are_one(cast: Any, one: bool) -> None:
    for first, second in (("fprop_w", "dgrad_w"), ("dgrad_g", "wgrad_g")):
        casts = LinearCasts(**{first: cast, second: cast})
        others = {"dgrad_w", "wgrad_g"} - {second}
        assert casts.shared(second) == one
        assert not any(casts.shared(other) for other in others)
        if cast is None:
            continue
        assert not casts.replace(**{first: None}).shared(second)
        assert not casts.replace(**{first: MIXED.wgrad_g}).shared(second), "not if the two differ"
        for gemm in GEMMS:
            touched = gemm in (first.split("_")[0], second.split("_")[0])
            six = LinearCasts(**{**dict.fromkeys(OPERANDS, E5M2), first: cast, second: cast})
            assert six.replace(hadamard={gemm: 16}).shared(second) == (one and not touched), f"{gemm} rotated"
            assert six.replace(subtract_mean=[gemm]).shared(second) == (one and not touched), f"{gemm} centerd"
    assert not LinearCasts(fprop_w=cast, dgrad_w="fprop").shared("dgrad_w"), "what is reused is no cast of its own"


# --- what is refused --------------------------------------------------------------------------------------------------

# Fields that contradict each other, what the error says of them, and a change that it proposes.
CONTRADICTIONS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "hadamard of nothing": (
        {"hadamard": {"wgrad": 16}},
        "hadamard rotates wgrad, which quantizes nothing: leave wgrad out of hadamard",
        {"hadamard": {}},
    ),
    "hadamard of what is only reused": (
        {"fprop_x": INT4, "wgrad_x": "fprop", "hadamard": {"wgrad": 16}},
        "hadamard rotates wgrad, which quantizes nothing: leave wgrad out",
        {"hadamard": {}},
    ),
    "hadamard and reuse in its GEMM": (
        {"fprop_w": INT4, "dgrad_g": INT4, "dgrad_w": "fprop", "hadamard": {"dgrad": 16}},
        "hadamard rotates dgrad, but dgrad_w is the operand of the forward pass as that pass quantized it: give "
        "dgrad_w a cast of its own, or leave dgrad out",
        {"dgrad_w": INT4},
    ),
    "reuse of what is rotated": (
        {"fprop_x": INT4, "wgrad_x": "fprop", "hadamard": {"fprop": 16}},
        "hadamard rotates fprop, but wgrad_x is the operand of the forward pass .*: give wgrad_x a cast of its own",
        {"wgrad_x": INT4},
    ),
    "reuse of a weight whose GEMM is rotated": (
        {"fprop_x": INT4, "dgrad_w": "fprop", "hadamard": {"fprop": 16}},
        "hadamard rotates fprop, but dgrad_w is the operand of the forward pass .* or leave fprop out of hadamard",
        {"hadamard": {}},
    ),
    "mean of no cast": (
        {"fprop_w": INT4, "subtract_mean": ["fprop"]},
        "subtract_mean needs an x or g of fprop with a cast: leave fprop out of subtract_mean",
        {"subtract_mean": []},
    ),
    "mean of dgrad in hp": (
        {"dgrad_w": INT4, "subtract_mean": ["dgrad"]},
        "subtract_mean needs an x or g of dgrad with a cast: leave dgrad out of subtract_mean",
        {"subtract_mean": []},
    ),
    "mean of what is reused": (
        {"fprop_x": INT4, "wgrad_x": "fprop", "subtract_mean": ["fprop"]},
        "subtract_mean changes x in fprop, but wgrad_x is the x that the forward pass quantized: give wgrad_x a cast "
        "of its own, or leave fprop out",
        {"wgrad_x": INT4},
    ),
    "mean and reuse in wgrad": (
        {"fprop_x": INT4, "wgrad_g": INT4, "wgrad_x": "fprop", "subtract_mean": ["wgrad"]},
        "subtract_mean changes x in wgrad, but wgrad_x is .* or leave wgrad out of subtract_mean",
        {"subtract_mean": []},
    ),
    "surrogate of hp": (
        {"fprop_x": INT4, "surrogate": {"fprop_w": "trust"}},
        "surrogate names fprop_w, which is not quantized: leave it out of surrogate",
        {"surrogate": {}},
    ),
    "surrogate of levels that begin elsewhere": (
        {"fprop_w": Cast("int4", Scale("fp32", "row", statistic="minmax")), "surrogate": {"fprop_w": "dge"}},
        "The surrogate of fprop_w counts levels from zero, and with statistic='minmax' those of a block begin "
        "elsewhere: leave fprop_w out of surrogate, or take another statistic",
        {"fprop_w": Cast("int4", Scale("fp32", "row", statistic="absmean"))},
    ),
    "dge of stochastic rounding": (
        {"fprop_w": STOCHASTIC, "surrogate": {"fprop_w": "dge"}},
        "'dge' stands for rounding to nearest, and fprop_w rounds stochastically, .*: leave fprop_w out of surrogate, "
        "or round it to nearest",
        {"fprop_w": NEAREST},
    ),
    "surrogate of x without its mean": (
        {"fprop_x": INT4, "surrogate": {"fprop_x": "trust"}, "subtract_mean": ["fprop"]},
        "A surrogate of fprop_x and subtract_mean in fprop contradict each other, .*: leave out one of them",
        {"subtract_mean": []},
    ),
    "surrogate of a weight that also meets the mean": (  # which it does unquantized: that part of dW passes as it is
        {"fprop_x": INT4, "fprop_w": INT4, "surrogate": {"fprop_w": "trust"}, "subtract_mean": ["fprop"]},
        "A surrogate of fprop_w and subtract_mean in fprop contradict each other, .*: leave out one of them",
        {"surrogate": {}},
    ),
    "smoothing of hp": (
        {"smooth": "channel"},
        "smooth scales x and w, which are not quantized: leave out smooth",
        {"smooth": None},
    ),
    "smoothing of gradients only": (
        {"dgrad_g": INT4, "dgrad_w": "fprop", "wgrad_g": INT4, "wgrad_x": "fprop", "smooth": "token"},
        "smooth scales x and w, which are not quantized: leave out smooth",
        {"wgrad_x": INT4},
    ),
    "delayed scaling of a smoothed weight": (
        {"fprop_x": DELAYED, "fprop_w": DELAYED, "smooth": "channel"},
        "With smooth='channel' the weight changes with every batch, and delayed scaling of fprop_w would meet the leap "
        "of a channel there: give fprop_w a scale with source='current'",
        {"fprop_w": E4M3},
    ),
    "delayed scaling of a smoothed weight, backwards": (
        {"fprop_x": DELAYED, "dgrad_w": DELAYED, "smooth": "channel"},
        "delayed scaling of dgrad_w would meet the leap of a channel there: give dgrad_w a scale with source='current'",
        {"smooth": "token"},
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradictions(name: str) -> None:
    given, message, remedy = CONTRADICTIONS[name]
    with pytest.raises(ValueError, match=message) as caught:
        LinearCasts(**given)
    assert "Got fprop(" in str(caught.value), "the error does not say what was given"
    LinearCasts(**{**given, **remedy})


def test_every_contradiction_is_in_the_table() -> None:
    source = textwrap.dedent(inspect.getsource(LinearCasts._contradictions))
    kinds = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Yield)]
    starts = [
        "hadamard rotates .*, which",
        "hadamard rotates .*, but",
        "subtract_mean needs",
        "subtract_mean changes",
        "surrogate names",
        "The surrogate of",
        "'dge'",
        "A surrogate of",
        "smooth scales",
        "With smooth='channel'",
    ]
    assert len(kinds) == len(starts), "a contradiction was added: tell of it here and in CONTRADICTIONS"
    for start in starts:
        assert any(message.startswith(start.split(" .*")[0]) for _, message, _ in CONTRADICTIONS.values()), start


def impossible(casts: dict[str, Any]) -> bool:
    """Whether the fields contradict each other, in other words than the package's."""
    quantized = {name for name in OPERANDS if isinstance(casts.get(name), Cast)}
    reused = {name for name in OPERANDS if casts.get(name) == "fprop"}
    rotated = {name for gemm in casts["hadamard"] for name in GEMMS[gemm]}
    centerd = {name for gemm in casts["subtract_mean"] for name in GEMMS[gemm] if name[-1] != "w"}
    return (
        any(not quantized & set(GEMMS[gemm]) for gemm in casts["hadamard"])
        or any(not quantized & centerd & set(GEMMS[gemm]) for gemm in casts["subtract_mean"])
        or bool(reused & rotated)  # the tensor of the forward pass, in a space in which it was not quantized
        or bool(reused and "fprop" in casts["hadamard"])  # and the other way round
        or ("wgrad_x" in reused and bool(centerd & {"fprop_x", "wgrad_x"}))
        or any(name not in quantized for name in casts["surrogate"])
        or any(k == "dge" and casts[name].rounding == "stochastic" for name, k in casts["surrogate"].items())
        or ("fprop" in casts["subtract_mean"] and bool(casts["surrogate"]))
        or (casts["smooth"] is not None and not any(name[-1] != "g" for name in quantized))
        or (
            casts["smooth"] == "channel"
            and any(name[-1] == "w" and casts[name].scale.source == "delayed" for name in quantized)
        )
    )


@pytest.mark.slow
def test_all_combinations_are_honored_or_refused_and_have_phases() -> None:
    forward = itertools.product((None, NEAREST), (None, NEAREST, STOCHASTIC))
    backward = itertools.product((None, NEAREST), (None, NEAREST, "fprop"), (None, NEAREST), (None, NEAREST, "fprop"))
    extras = [{}, *({"hadamard": {gemm: 16}} for gemm in GEMMS), *({"subtract_mean": (gemm,)} for gemm in GEMMS)]
    extras += [{"surrogate": {name: kind}} for name in OPERANDS[:2] for kind in ("dge", "trust")]
    extras += [{"surrogate": {name: "trust"}, "subtract_mean": ("fprop",)} for name in OPERANDS[:2]]
    extras += [{"hadamard": {"wgrad": 64}, "subtract_mean": ("fprop", "wgrad"), "surrogate": {}}]
    settings = itertools.product(((*f, *b) for f, b in itertools.product(forward, list(backward))), extras)
    casts_of_x, casts_of_w = (None, NEAREST, DELAYED), (None, DELAYED, E4M3)
    smoothed = itertools.product(
        casts_of_x, casts_of_w, (None, DELAYED), (*casts_of_w, "fprop"), (None, NEAREST), (*casts_of_x, "fprop")
    )
    extras = [{"smooth": kind, **extra} for kind in ("channel", "token") for extra in ({}, {"hadamard": {"wgrad": 16}})]
    valid = 0
    for six, extra in itertools.chain(settings, itertools.product(smoothed, extras)):
        given = dict(zip(OPERANDS, six, strict=True))
        given = {**given, "hadamard": {}, "subtract_mean": (), "surrogate": {}, "smooth": None, **extra}
        try:
            casts = LinearCasts(**given)
        except ValueError as error:
            assert impossible(given), f"refused: {error}"
        else:
            assert not impossible(given), f"not refused: {casts}"
            valid += 1
            assert_phases(casts)
    assert valid > 500


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
        (lambda: SIX.replace(fprop=None), "Unknown field of LinearCasts 'fprop'. Did you mean 'fprop_"),
        (lambda: SIX.replace(fprop_x="fprop"), "LinearCasts.fprop_x is"),
        (lambda: SIX.phase("qat"), "Unknown phase 'qat'. Did you mean 'qaf'"),
        (lambda: SIX.phase(None), "Unknown phase None"),
        (lambda: SIX.with_rounding({"wgradx": "nearest"}), "Unknown operand 'wgradx'. Did you mean 'wgrad_x'"),
        (lambda: SIX.with_rounding({"wgrad_x": "near"}), "Unknown rounding 'near'"),
        (lambda: SIX.with_rounding("stochastic"), "rounding"),
        (lambda: LinearCasts().with_rounding({"wgrad_x": "nearest"}), "wgrad_x is None"),
        (lambda: SIX.replace(wgrad_x="fprop").with_rounding({"wgrad_x": "nearest"}), "wgrad_x is 'fprop'"),
        (lambda: SIX.replace(hadamard=16), "LinearCasts.hadamard maps some of fprop, dgrad, wgrad to .* got 16"),
        (lambda: SIX.replace(hadamard=16), "LinearCasts.hadamard maps some of fprop, .*{'wgrad': 16}; got 16"),
        (
            lambda: SIX.replace(hadamard={"wgard": 16}),
            "Unknown key of LinearCasts.hadamard 'wgard'. Did you mean 'wgrad'",
        ),
        (lambda: SIX.replace(hadamard={"wgrad_x": 16}), "Unknown key of LinearCasts.hadamard 'wgrad_x'"),
        *[
            (lambda size=size: SIX.replace(hadamard={"wgrad": size}), "Hadamard.size is one of 16, 32, 64, 128; got")
            for size in (8, 48, True, None, "16", 16.0)
        ],
        (
            lambda: SIX.replace(hadamard={"wgrad": {"sise": 16}}),
            "Unknown field of Hadamard 'sise'. Did you mean 'size'",
        ),
        (lambda: SIX.replace(hadamard={"wgrad": {"signs": "key"}}), "Unknown signs of a Hadamard transform 'key'. Did"),
        (
            lambda: SIX.replace(subtract_mean="wgrad"),
            "LinearCasts.subtract_mean is a list of GEMMs such as .*; got 'wgrad'",
        ),
        (lambda: SIX.replace(subtract_mean=None), "LinearCasts.subtract_mean is a list of GEMMs such as .*; got None"),
        (lambda: SIX.replace(subtract_mean=True), "LinearCasts.subtract_mean is a list of GEMMs such as .*; got True"),
        (
            lambda: SIX.replace(subtract_mean={"wgrad": False}),
            "LinearCasts.subtract_mean is a list of GEMMs such as .*; got {",
        ),
        (lambda: SIX.replace(subtract_mean=["wgard"]), "Unknown GEMM in .*subtract_mean 'wgard'. Did you mean 'wgrad'"),
        (lambda: SIX.replace(subtract_mean=["wgrad_x"]), "Unknown GEMM in LinearCasts.subtract_mean 'wgrad_x'"),
        (lambda: SIX.replace(surrogate="dge"), "LinearCasts.surrogate maps some of fprop_x, fprop_w to .* got 'dge'"),
        (lambda: SIX.replace(surrogate={"dgrad_w": "dge"}), "Unknown key of LinearCasts.surrogate 'dgrad_w'"),
        (lambda: SIX.replace(surrogate={"fprop_w": "ste"}), "Unknown surrogate 'ste'.*'trust', 'dge'"),
        (lambda: SIX.replace(surrogate={"fprop_w": None}), "Unknown surrogate None"),
        (lambda: SIX.replace(smooth="chanel"), "Unknown kind of LinearCasts.smooth 'chanel'. Did you mean 'channel'"),
        (lambda: SIX.replace(smooth=True), "Unknown kind of LinearCasts.smooth True.* Choose one of: 'channel', 'tok"),
        (lambda: SIX.replace(smooth=""), "Unknown kind of LinearCasts.smooth ''"),
        (lambda: SIX.replace(smoth="token"), "Unknown field of LinearCasts 'smoth'. Did you mean 'smooth'"),
        (
            lambda: LinearCasts.of({"preset": "fp8-delayed", "smooth": "channel"}),
            "give fprop_w a scale with source='current'.* Got fprop\\(x=e4m3/fp32:tensor\\(delayed 16\\)",
        ),
        (
            lambda: LinearCasts.of({"preset": "fp8-row", "every": {"scale": {"source": "delayed"}}}),
            "take block='tensor', two_level=True, or source='current'",
        ),
        (
            lambda: LinearCasts.of({"preset": "nvfp4", "every": 32}),
            "casts.every is a mapping of fields of Cast; got 32",
        ),
        (
            lambda: LinearCasts.of({"every": {"element": "int4"}}),
            "every changes the casts of a preset, and there are none",
        ),
        (lambda: LinearCasts.of({"preset": "bf16", "every": {}}), "every changes the casts of a preset, and there are"),
        (lambda: LinearCasts.of({"preset": "nvfp4", "every": {"elment": "int4"}}), "Unknown field of Cast 'elment'"),
        (lambda: LinearCasts.of({"preset": "nvfp4", "every": {"scale": {"blok": 8}}}), "Unknown field of Scale 'blok'"),
        (lambda: LinearCasts.of({"preset": "nvfp4", "every": {1: 2}}), "Unknown field of Cast '?1"),
        (lambda: LinearCasts.of({"preset": "nvfp4", "fprop_x": {"elment": 1}}), "Unknown field of Cast 'elment'. Did"),
        (lambda: LinearCasts.of({"preset": "nvfp4", "fprop_x": {1: 2}}), "Unknown field of Cast '?1"),
        (
            lambda: LinearCasts.of({"preset": "nvfp4", "fprop_x": {"scale": {"top": 500}}}),
            r"Scale.top must lie in \(0, 448",
        ),
        (lambda: LinearCasts.of({"preset": "ufp4", "wgrad_g": None, "wgrad_x": None}), "hadamard rotates wgrad, which"),
    ],
)
def test_errors(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    "change",
    [
        lambda settings: settings.__setitem__("wgrad", None),
        lambda settings: settings.update(wgrad=None),
        lambda settings: settings.pop("wgrad"),
        lambda settings: settings.clear(),
    ],
)
def test_settings_do_not_change(change: Callable[[Any], Any]) -> None:
    casts = LinearCasts.preset("ufp4")
    with pytest.raises(TypeError, match="LinearCasts.replace"):
        change(casts.hadamard)
    assert casts == LinearCasts.preset("ufp4")
