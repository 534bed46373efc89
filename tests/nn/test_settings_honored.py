"""Settings are honored: every field of Scale, Cast and LinearCasts changes what it names, and nothing else.

The tables have an entry for each field, and their values are all that a field may be: a field or a value that is added
to the package fails here until it is turned.
"""

from dataclasses import fields, replace
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from torch import nn

from lightning_lowbit import Cast, LinearCasts, Scale
from lightning_lowbit.formats import ELEMENT_FORMATS, SCALE_FORMATS
from lightning_lowbit.nn import OPERANDS
from lightning_lowbit.quant import SURROGATES, Hadamard
from lightning_lowbit.quant.cast import SCALE_ROUNDINGS
from lightning_lowbit.quant.transforms import SIZES
from tests.nn.layers import GEMMS, RESULTS, every, layer_like, remember, run, spied, value
from tests.tables import each

ONE_LEVEL = Cast("e2m1", Scale("e4m3", 16))
TWO_LEVEL = Cast("e2m1", Scale("e4m3", 16, two_level=True))
SATURATING = Cast("e2m1", Scale("e8m0", 32, "floor"))  # gives each surrogate something to do
TOKENS, IN, OUT = 48, 64, 32
# Amaxes of former steps, other ones for each tensor: the largest, the largest of the last two and the last all differ.
REMEMBERED = [{name: amax + "xwg".index(name[-1]) / 8 for name in OPERANDS} for amax in (0.7, 7.0, 0.1, 2.3, 0.9)]


def traced(casts, dtype=torch.float32):
    """Operands (float64, by name) and results of a pass, always over the same tensors and after the same steps."""
    generator = torch.Generator().manual_seed(0)
    x, w, g = (torch.randn(shape, generator=generator) for shape in ((TOKENS, IN), (OUT, IN), (TOKENS, OUT)))
    x[:, 5], w[3], g[7] = 60.0, 0.0, g[7] * 1e-3  # an outlier channel, a zero row, a row of small gradients
    torch.manual_seed(2)  # of the bias
    original = nn.Linear(IN, OUT)
    original.weight.data.copy_(w)
    layer = layer_like(original.to(dtype), casts)
    remember(layer, *REMEMBERED)
    with spied() as seen:
        results = run(layer, x.to(dtype), g.to(dtype))
    assert tuple(seen) == OPERANDS, "operands in another order, or missing"
    return {name: value(operand) for name, operand in seen.items()}, results


def moved(before, after):
    return {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}


def assert_turns(knob, before, after, operands):
    """Exactly these operands change, and with them exactly the results of their GEMMs."""
    (old, old_results), (new, new_results) = traced(before), traced(after)
    assert moved(old, new) == operands, f"{knob} changed {moved(old, new)}"
    results = {RESULTS[gemm] for gemm, pair in GEMMS.items() if operands & set(pair)}
    assert moved(old_results, new_results) == results, f"{knob} changed {moved(old_results, new_results)}"


# --- one tensor -------------------------------------------------------------------------------------------------------

# Scales that depend on the largest magnitude of the whole tensor.
WHOLE = (Scale("fp32", "tensor"), Scale("e4m3", "tensor"), Scale("e4m3", 16, two_level=True))
STATISTICS = ("absmax", "absmean", "minmax")

# By field, pairs of scales that differ in this field only.
SCALES = {
    "format": [(Scale("e4m3", 16), Scale(name, 16)) for name in SCALE_FORMATS if name != "e4m3"],
    "block": [
        (Scale("e4m3", 16), Scale("e4m3", block)) for block in (8, 32, 64, 128, (16, 16), (4, 8), "row", "tensor")
    ],
    "rounding": [
        (Scale(name, 16), Scale(name, 16, rounding))
        for name, (_, *others) in SCALE_ROUNDINGS.items()
        for rounding in others
    ],
    "two_level": [
        (Scale(name, 16), Scale(name, 16, two_level=level))
        for name in SCALE_FORMATS
        for level in (True, "row")
        if name != "fp32"
    ],
    "top": [(Scale("e4m3", 16, two_level=True), Scale("e4m3", 16, two_level=True, top=top)) for top in (256, 0.1)],
    "four_over_six": [(Scale("e4m3", 16), Scale("e4m3", 16, four_over_six=measure)) for measure in ("mse", "mae")],
    "prescale": [(Scale("e8m0", 32, "floor"), Scale("e8m0", 32, "floor", prescale=factor)) for factor in (0.75, 0.6)],
    "margin": [
        (Scale("fp32", block, rounding), Scale("fp32", block, rounding, margin=margin))
        for block in (16, "row", "tensor")
        for rounding in SCALE_ROUNDINGS["fp32"]
        for margin in (1, 2)
    ],
    "statistic": [
        (Scale("fp32", block), Scale("fp32", block, statistic=statistic))
        for block in (16, "row", "tensor")
        for statistic in STATISTICS
        if statistic != "absmax"
    ],
    "factor": [
        (Scale("fp32", block, statistic=statistic), Scale("fp32", block, statistic=statistic, factor=factor))
        for block in (16, "row", "tensor")
        for statistic in STATISTICS
        for factor in (0.7, 1.3)
    ],
    "epsilon": [  # of a few elements: of more, the statistic is rarely as small
        (Scale("fp32", 2, statistic=statistic), Scale("fp32", 2, statistic=statistic, epsilon=epsilon))
        for statistic in STATISTICS
        for epsilon in (1.0, 0.6)
    ],
    "source": [(scale, replace(scale, source="delayed")) for scale in WHOLE],
    "history": [
        (replace(scale, source="delayed"), replace(scale, source="delayed", history=steps))
        for scale in WHOLE
        for steps in (1, 2)
    ],
    "correction": [
        (Scale("e4m3", 16, "stochastic", True), Scale("e4m3", 16, "stochastic", True, correction=group))
        for group in (64, 128)
    ],
    "algorithm": [
        (replace(scale, source="delayed"), replace(scale, source="delayed", algorithm="most_recent")) for scale in WHOLE
    ],
}


def scaled(before, after):
    """Casts with these scales, and elements that both may have."""
    element = "int4" if after.statistic == "minmax" else "e2m1"
    return Cast(element, before), Cast(element, after)


CASTS = {
    "element": [(ONE_LEVEL, Cast(name, ONE_LEVEL.scale)) for name in ELEMENT_FORMATS if name != "e2m1"],
    "scale": [scaled(*pair) for pairs in SCALES.values() for pair in pairs],
    "rounding": [(ONE_LEVEL, Cast("e2m1", ONE_LEVEL.scale, "stochastic"))],
    "round_to_bfloat16": [
        (Cast(element, scale), Cast(element, scale, round_to_bfloat16=True))
        for element in ("int8", "e1m2")
        for scale in (Scale("fp32", 16), Scale("fp32", 32, statistic="absmean"))
    ],
}


def test_every_field_of_scale_and_cast_has_a_knob():
    assert {field.name for field in fields(Scale)} == set(SCALES)
    assert {field.name for field in fields(Cast) if field.init} == set(CASTS)
    for table in (SCALES, CASTS):
        for name, pairs in table.items():
            for before, after in pairs:
                differ = {
                    f.name for f in fields(before) if f.compare and getattr(before, f.name) != getattr(after, f.name)
                }
                # The rounding of a scale is one that its format has.
                assert differ <= {name, "rounding"} if name == "format" else differ == {name}, f"{name}: {after}"


@pytest.mark.parametrize("field", CASTS)
def test_a_cast_changes_its_own_operand(field):
    # What is rounded to the dtype of the computation is in float32 already.
    dtype = torch.bfloat16 if field == "round_to_bfloat16" else torch.float32
    pairs = CASTS[field]
    for number, (before, after) in enumerate(pairs):
        group = after.scale.correction  # of a random rotation
        base = every(before, hadamard={gemm: Hadamard(group, "keyed") for gemm in GEMMS} if group else {})
        expected, _ = traced(base, dtype)
        for operand in OPERANDS if len(pairs) == 1 else OPERANDS[number % 2 :: 2]:  # each with every other pair
            found, _ = traced(base.replace(**{operand: after}), dtype)
            assert moved(expected, found) == {operand}, (
                f"{operand}: {before} -> {after} changed {moved(expected, found)}"
            )


@pytest.mark.parametrize("cast", [TWO_LEVEL, Cast("int8", Scale("fp32", "row")), Cast("int4", Scale("fp32", "tensor"))])
def test_what_is_exact_is_rounded_to_itself(cast):
    (expected, _), (found, _) = (
        traced(every(cast.replace(round_to_bfloat16=rounded)), torch.bfloat16) for rounded in (False, True)
    )
    assert not moved(expected, found), (
        f"round_to_bfloat16=True changes {moved(expected, found)}, which bfloat16 holds exactly"
    )


# --- one layer --------------------------------------------------------------------------------------------------------

DELAYED = Scale("fp32", "tensor", source="delayed")
BASES = {
    "mostly hp": LinearCasts(fprop_x=ONE_LEVEL, fprop_w=TWO_LEVEL, wgrad_g=ONE_LEVEL),
    "nvfp4": LinearCasts.preset("nvfp4"),
    "stochastic": every(Cast("e2m1", ONE_LEVEL.scale, "stochastic")),
    "rows": every(Cast("int8", Scale("fp32", "row"))),
    "delayed": LinearCasts.preset("fp8-delayed").replace(  # no two casts alike, which would share one operand
        dgrad_w=Cast("e5m2", DELAYED), wgrad_g=Cast("e4m3", DELAYED), wgrad_x=Cast("e5m2", DELAYED)
    ),
}
OPERAND_SETTINGS = (None, Cast("e3m0", Scale("e5m2", 32)), Cast("int4", Scale("e4m3", 16, "up", True), "stochastic"))


# By field: other values of it, and the operands that they change, given casts in all six of them.
LINEAR = {
    **{operand: [(setting, {operand}) for setting in OPERAND_SETTINGS] for operand in OPERANDS},
    "hadamard": [
        ({gemm: Hadamard(size, signs)}, set(pair))
        for gemm, pair in GEMMS.items()
        for size in SIZES
        for signs in ("fixed", "keyed")
    ],
    "subtract_mean": [([gemm], {name for name in pair if not name.endswith("_w")}) for gemm, pair in GEMMS.items()],
    "requantize": [([operand], {operand}) for operand in ("dgrad_w", "wgrad_x")],
    "surrogate": [({operand: kind}, set()) for operand in ("fprop_x", "fprop_w") for kind in SURROGATES],
    # s goes to x, and 1/s to w, or to the output, whose gradient takes it on.
    "smooth": [
        ("channel", {"fprop_x", "fprop_w", "dgrad_w", "wgrad_x"}),
        ("token", {"fprop_x", "dgrad_g", "wgrad_g", "wgrad_x"}),
    ],
}
for _operand in ("dgrad_w", "wgrad_x"):
    LINEAR[_operand].append(("fprop", {_operand}))


def test_every_field_of_linear_casts_has_a_knob():
    assert {field.name for field in fields(LinearCasts)} == set(LINEAR)


def choices(hint):
    """What the type of a field lists by name."""
    if get_origin(hint) is Literal:
        return set(get_args(hint))
    return set().union(*map(choices, get_args(hint)))


def test_every_choice_is_tried():
    for kind, table in ((Scale, SCALES), (Cast, CASTS)):
        for name, pairs in table.items():
            missing = choices(get_type_hints(kind)[name]) - {getattr(one, name) for pair in pairs for one in pair}
            assert not missing, f"{kind.__name__}.{name}: {missing} are not tried"
    for name, settings in LINEAR.items():
        missing = choices(get_type_hints(LinearCasts)[name]) - {s for s, _ in settings if isinstance(s, str)}
        assert not missing, f"LinearCasts.{name}: {missing} are not tried"


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("field", [name for name in LINEAR if name not in ("surrogate", "smooth")])
def test_every_field_changes_what_it_names(field, base):
    casts = BASES[base]
    quantized = {name for name in OPERANDS if isinstance(getattr(casts, name), Cast)}
    for setting, operands in LINEAR[field]:
        if field in OPERANDS and getattr(casts, field) == setting:
            continue
        if field == "subtract_mean":
            operands = operands & quantized
        if field not in OPERANDS and not operands & quantized:
            continue  # refused: it would change nothing
        assert_turns(f"{base}: {field}={setting}", casts, casts.replace(**{field: setting}), operands)


@each("base", BASES)
@each(("kind", "operands"), LINEAR["smooth"])
def test_smoothing_changes_what_it_scales(kind, operands, base):
    """And results of GEMMs that quantize what is scaled: all others have the powers of two divided out again."""
    casts = BASES[base]
    if base == "delayed" and kind == "channel":  # refused where the weight is scaled by former steps
        casts = casts.replace(fprop_w=ONE_LEVEL, dgrad_w=TWO_LEVEL)
    (old, old_results), (new, new_results) = (traced(casts.replace(smooth=smooth)) for smooth in (None, kind))
    assert moved(old, new) == operands, f"{kind} changed {moved(old, new)}"
    quantized = {name for name in operands if isinstance(getattr(casts, name), Cast)}
    results = {RESULTS[gemm] for gemm, pair in GEMMS.items() if quantized & set(pair)}
    found = moved(old_results, new_results)
    assert found, f"{kind} changed no result"
    if (kind, base) == ("token", "mostly hp"):
        found -= {"y"}  # its bias is added later
    assert found <= results, f"{kind} changed {found}"


@pytest.mark.parametrize(("fprop", "reuses"), [("fprop_w", "dgrad_w"), ("fprop_x", "wgrad_x")])
def test_what_is_reused_changes_with_the_forward_pass(fprop, reuses):
    for base in BASES.values():
        before = base.replace(**{reuses: "fprop"})
        for setting in OPERAND_SETTINGS:
            if getattr(before, fprop) != setting:
                after = before.replace(**{fprop: setting})
                assert_turns(f"{fprop}={setting}", before, after, {fprop, reuses})


@pytest.mark.parametrize("hadamard", [{}, {"fprop": 16}], ids=["", "rotated"])
@pytest.mark.parametrize("kind", SURROGATES)
def test_a_surrogate_changes_the_gradient_of_its_tensor(kind, hadamard):
    before = every(SATURATING, hadamard=hadamard)
    operands, results = traced(before)
    for given in ({"fprop_x"}, {"fprop_w"}, {"fprop_x", "fprop_w"}):
        found, found_results = traced(before.replace(surrogate=dict.fromkeys(given, kind)))
        assert not moved(operands, found), f"{kind} of {given} changed the operands {moved(operands, found)}"
        expected = {{"fprop_x": "x", "fprop_w": "weight"}[operand] for operand in given}
        assert moved(results, found_results) == expected, f"{kind} of {given} changed {moved(results, found_results)}"


def test_fields_of_hadamard_are_all_turned():
    turned = {(gemm, h.size, h.signs) for setting, _ in LINEAR["hadamard"] for gemm, h in setting.items()}
    assert {field.name for field in fields(Hadamard)} == {"size", "signs"}
    assert len(turned) == len(GEMMS) * len(SIZES) * 2


def test_groups_and_signs_all_differ():
    """No two transforms of a GEMM give the same operand."""
    for gemm, pair in GEMMS.items():
        settings = [setting for setting, operands in LINEAR["hadamard"] if operands == set(pair)]
        found = [traced(every(ONE_LEVEL, hadamard=setting))[0][pair[0]] for setting in settings]
        for i, one in enumerate(found):
            for j in range(i):
                assert not torch.equal(one, found[j]), f"{gemm}: {settings[i]} is {settings[j]}"
