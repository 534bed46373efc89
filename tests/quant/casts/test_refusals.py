"""Every combination of fields is honored or refused, and a refusal says what to do."""

import itertools
import math
import re
from functools import partial

import pytest
import torch

from lightning_lowbit import Cast, Scale, quantize
from lightning_lowbit.formats import ELEMENT_FORMATS, SCALE_FORMATS
from lightning_lowbit.quant.cast import SCALE_ROUNDINGS
from tests.tables import each

BLOCKS = (8, 16, (16, 16), "row", "tensor")


def every(**fields_of):
    """The fields of every Scale with these settings: all formats with their roundings and blocks, possible or not."""
    formats = [{"format": name, "rounding": rounding} for name in SCALE_FORMATS for rounding in SCALE_ROUNDINGS[name]]
    fields_of = {"block": BLOCKS, **fields_of}
    settings = [dict(zip(fields_of, values, strict=True)) for values in itertools.product(*fields_of.values())]
    return [format | setting for format in formats for setting in settings]


def refusal(kind, *arguments, **settings):
    """What was built, or the error that refused it, which names a remedy and stands in REFUSALS."""
    try:
        return kind(*arguments, **settings), None
    except ValueError as error:
        assert any(part.partition(". Got")[0] in str(error) for part in REFUSALS), f"not listed: {error}"  # noqa: PT017
        assert re.search("(?i)leave out|take", str(error)), f"no remedy in {error}"  # noqa: PT017
        return None, error


def honored(scales, elements, is_possible=None):
    """How many casts of these scales and elements are not refused, all of which quantize."""
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    x[3] = 0
    count = 0
    for settings in scales:
        scale, message = refusal(Scale, **settings)
        if is_possible is not None:
            assert (scale is not None) == is_possible(**settings), f"{settings}: {message or 'not refused'}"
        made = [refusal(Cast, element, scale)[0] for element in elements] if scale is not None else []
        for cast in filter(None, made):
            # What delayed scaling remembers comes from outside, and may be too small or too large.
            for amax in (None, 0.3, 50.0) if cast.scale.source == "delayed" else (None,):
                found = quantize(x, cast, key=1, amax=None if amax is None else torch.tensor(amax))
                assert found.elements().isfinite().all(), f"{cast}, amax {amax}: codes without a value"
                assert (found.elements().abs() <= cast.grid.max).all(), f"{cast}, amax {amax}: beyond the largest"
                values = found.dequantize()
                assert values.isfinite().all(), f"{cast}, amax {amax}: finite elements decode to infinity or NaN"
                assert not values[3].any(), f"{cast}, amax {amax}: zeros became numbers"
            count += 1
    return count


@pytest.mark.slow
def test_every_combination_is_honored_or_refused():
    """All elements, scale formats with their roundings, blocks, levels, 4/6, prescales and tops.

    By hand: the six ExMy in three roundings, bf16 and fp16 with 5 blocks + 4 with two levels * 2 tops; of e2m1 also
    4/6 twice on 3 blocks * 3 levels, not stochastic; e8m0 in four roundings alike, and its prescale on 5 blocks; fp32
    in two on 5. The level per row is one more on each block of elements.
    """
    levels, measures = (False, True, "row"), (None, "mse", "mae")
    scales = every(two_level=levels, four_over_six=measures, prescale=(1, 0.75), top=(None, 1))
    each = 5 + 4 * 2 + 2 * 2
    expected = 15 * (18 * each + 2 * each + 4 * each + 5 + 2 * 5) + 12 * 2 * (3 * 3 + 2 * 2)
    assert honored(scales, ELEMENT_FORMATS) == expected


@pytest.mark.slow
def test_every_margin_and_memory_is_honored_or_refused():
    """By hand: all but fp32 in 24 with 9 blocks and levels, 5 of which know the tensor's amax; fp32 in 2 with 5 and 1.
    Each of the latter has 4 memories."""

    def is_possible(format, rounding, block, two_level, margin, source, history, algorithm):
        levels = not two_level or (format != "fp32" and block != "tensor")
        whole = two_level or block == "tensor"  # something is made of the amax of the tensor, which steps can remember
        remembers = whole if source == "delayed" else (history, algorithm) == (16, "max")
        return levels and (margin == 0 or format == "fp32") and remembers

    memories = {"source": ("current", "delayed"), "history": (16, 4), "algorithm": ("max", "most_recent")}
    scales = every(two_level=(False, True), margin=(0, 1), **memories)
    assert honored(scales, ("e4m3", "int4"), is_possible) == 2 * (24 * (9 + 5 * 4) + 2 * 2 * (5 + 1 * 4))


def test_every_statistic_is_honored_or_refused():
    """By hand: fp32 in 2 roundings with 2 factors and 2 epsilons, of absmax on 5 blocks and delayed on one in 2 margins
    for 3 elements, of absmean on 5 blocks for 3 elements, of minmax on 5 for one; others in 24 on 5 blocks and delayed
    on one."""

    def is_possible(format, rounding, block, statistic, factor, epsilon, margin, source):
        amax = statistic == "absmax"
        plain = amax and (factor, epsilon, margin) == (1, 0, 0)
        known = plain or (format == "fp32" and (amax or not margin))
        return known and (source == "current" or (amax and block == "tensor"))

    settings = {"statistic": ("absmax", "absmean", "minmax"), "factor": (1, 0.5), "epsilon": (0, 0.25)}
    scales = every(**settings, margin=(0, 1), source=("current", "delayed"))
    expected = 2 * 4 * (3 * 2 * (5 + 1) + 3 * 5 + 5) + 3 * 24 * (5 + 1)
    assert honored(scales, ("ternary", "int4", "e4m3"), is_possible) == expected


REFUSALS = {
    "range and digits of a second level: leave out two_level": [partial(Scale, "fp32", two_level=True)],
    "scales the same elements again: leave out two_level": [partial(Scale, "e4m3", "tensor", two_level=True)],
    "take a block such as 16, or two_level=True": [
        partial(Scale, "e4m3", block, two_level="row") for block in ((16, 16), "row", 1)
    ],
    "leave out rounding='stochastic', or take a correc": [partial(Scale, rounding="stochastic", four_over_six="mse")],
    "A correction needs rounding='stochastic'": [
        partial(Scale, correction=128),
        *(partial(Scale, "e4m3", block, "stochastic", correction=128) for block in (1, 24, "row", (4, 16))),
    ],
    "Scale.top says where": [partial(Scale, "e4m3", top=256)],
    "Scale.top times the largest element exceeds float32": [
        partial(Cast, "e5m2", Scale("e8m0", two_level=True, top=2.0**127))
    ],
    "under e8m0 scales with rounding='floor' alone": [partial(Scale, name, prescale=0.75) for name in ("e4m3", "e8m0")],
    "leave out prescale, or two_level": [partial(Scale, "e8m0", 32, "floor", two_level=True, prescale=0.75)],
    "4/6 needs scales that hold 6/4 of each other": [
        partial(Scale, name, four_over_six="mse") for name in ("e8m0", "bf16", "fp16", "fp32")
    ],
    "4/6 chooses per block: take a block such as 16": [
        partial(Scale, "e4m3", block, four_over_six="mse") for block in ("row", "tensor")
    ],
    "levels of e2m1: take element='e2m1', or leave out four_over_six. Got e4m3:1x16": [
        partial(Cast, "e4m3", Scale(four_over_six="mse")),
        partial(Cast, "int4", {"four_over_six": "mse"}),
        partial(Cast("e2m1", Scale(four_over_six="mse")).replace, element="int4"),
    ],
    "in fp32 scales: take format='fp32', or leave out margin. Got e4m3:1x16(margin": [partial(Scale, margin=1)],
    "in fp32 scales: take format='fp32', or leave out margin": [partial(Scale, "e8m0", "tensor", margin=2)],
    "take block='tensor', two_level=True, or source='current'": [
        partial(Scale, *scale, source="delayed") for scale in (("fp32", "row"), ("e4m3", 16))
    ],
    "take source='delayed', or leave both out. Got fp32:tensor": [partial(Scale, "fp32", "tensor", history=32)],
    "Scale.history and Scale.algorithm are of delayed scaling": [partial(Scale, algorithm="most_recent")],
    "are of fp32 scales: take format='fp32', or leave them out. Got e4m3:1x16(": [
        partial(Scale, "e4m3", **{name: value})
        for name, value in (("statistic", "absmean"), ("statistic", "minmax"), ("factor", 0.5), ("epsilon", 1e-5))
    ],
    "take format='fp32', or leave them out. Got e8m0:1x32(absmax x2)": [partial(Scale, "e8m0", 32, factor=2)],
    "which this scale does not use: leave it out, or take factor. Got fp32:1x16(margin 1)(": [
        partial(Scale, "fp32", statistic=statistic, margin=1) for statistic in ("absmean", "minmax")
    ],
    "Delayed scaling remembers amaxes, which this scale lacks: take statistic='absmax', or source=": [
        partial(Scale, "fp32", "tensor", statistic=statistic, source="delayed") for statistic in ("absmean", "minmax")
    ],
    "as integers do: take 'int2' to 'int8', or statistic='absmax'. Got fp32:1x32(minmax) for e": [
        partial(Cast, element, Scale("fp32", 32, statistic="minmax"))
        for element in ELEMENT_FORMATS
        if element.startswith("e")
    ],
    "statistic='absmax'. Got fp32:1x32(minmax) for ternary.": [
        partial(Cast, "ternary", Scale("fp32", 32, statistic="minmax"))
    ],
}


@each("message, builds", REFUSALS.items())
def test_refusals(message, builds):
    for build in builds:
        assert message in str(refusal(build)[1])


WRONG = {
    "Unknown element format 'ternry'. Did you mean 'ternary'": [partial(Cast, "ternry")],
    "Unknown element format ('E2M1'|4|'e8m0')": [partial(Cast, element) for element in ("E2M1", 4, "e8m0")],
    "Unknown element format 'fp32'.* Choose one of: 'e2m1', 'e1m2', .*'ternary'": [partial(Cast, "fp32")],
    "Unknown rounding 'stochastc'. Did you mean 'stochastic'": [partial(Cast, rounding="stochastc")],
    "Cast.scale is a Scale or a mapping of its fields; got": [partial(Cast, scale=scale) for scale in ("e4m3", None)],
    "Unknown field of Scale 'blok'. Did you mean 'block'": [partial(Cast, scale={"blok": 16})],
    "Unknown scale format 'e4m4'. Did you mean 'e4m3'": [partial(Scale, "e4m4")],
    "Unknown scale format 'int8'.* Choose one of: .*'bf16', 'fp16', 'fp32'": [partial(Scale, "int8")],
    "Unknown rounding of e4m3 scales 'upp'. Did you mean 'up'": [partial(Scale, rounding="upp")],
    "rounding of e4m3 scales 'rceil'.*Choose one of: 'nearest', 'up'": [partial(Scale, rounding="rceil")],
    "of e8m0 scales '(up|nearest)'.*: 'rceil', 'floor', 'ceil', 'even'": [
        partial(Scale, "e8m0", rounding=rounding) for rounding in ("up", "nearest")
    ],
    "of fp32 scales 'up'.*Choose one of: 'nearest', 'power_of_two'": [partial(Scale, "fp32", rounding="up")],
    "error measure of Scale.four_over_six 'mxe'. Did you mean .*'mse', 'mae'": [partial(Scale, four_over_six="mxe")],
    "error measure of Scale.four_over_six True": [partial(Scale, four_over_six=True)],
    "two_level is true, false or 'row'; got": [partial(Scale, two_level=value) for value in (1, "no")],
    "Scale.block is a positive number .* 'row' or 'tensor'; got": [
        partial(Scale, block=block)
        for block in (
            0,
            -1,
            True,
            1.5,
            (16,),
            "x",
            "rows",
            None,
            (16, 0),
            (16, True),
            (16, 16, 16),
            [16],
            [16, 1.5],
            {},
        )
    ],
    "Scale.top is a number for e4m3 scales, above 0 and at most 448.*, or None; got": [
        partial(Scale, two_level=True, top=top) for top in (0, -1, 449, math.nan, math.inf)
    ],
    "Scale.prescale is a number, above 0 and at most 1; got": [
        partial(Scale, "e8m0", 32, "floor", prescale=factor) for factor in (0, -0.75, 1.5, math.nan)
    ],
    "Scale.top is a number .*; got ('448'|True)": [partial(Scale, two_level=True, top=top) for top in ("448", True)],
    "Scale.prescale is a number, .*; got None": [partial(Scale, "e8m0", prescale=None)],
    "Scale.margin is a whole number, 0 or more and at most 64; got": [
        partial(Scale, "fp32", margin=margin) for margin in (-1, 65, 1.0, True, "1", None, math.nan)
    ],
    "Scale.history is a whole number, 1 or more and at most 1048576; got": [
        partial(Scale, "fp32", "tensor", source="delayed", history=history)
        for history in (0, -16, 2**20 + 1, 16.0, True, "16", None)
    ],
    "Scale.correction is a whole number, 1 or more .*or None": [partial(Scale, rounding="stochastic", correction=0)],
    "Elements of corrected scales round to nearest: take rounding='nearest'": [
        partial(Cast, "e2m1", Scale("e4m3", 16, "stochastic", correction=64), "stochastic")
    ],
    "Unknown source of Scale 'delay'. Did you mean 'delayed'": [partial(Scale, source="delay")],
    "Unknown source of Scale None.* Choose one of: 'current', 'delayed'": [partial(Scale, source=None)],
    "Unknown algorithm of Scale 'recent'.* Choose one of: 'max', 'most_recent'": [partial(Scale, algorithm="recent")],
    "Unknown statistic of Scale 'absmeen'. Did you mean 'absmean'": [partial(Scale, "fp32", statistic="absmeen")],
    "Unknown statistic of Scale ('mean'|None).*: 'absmax', 'absmean', 'minmax'": [
        partial(Scale, "fp32", statistic=statistic) for statistic in ("mean", None)
    ],
    "Scale.factor is a number, above 0 and at most 65536.*; got": [
        partial(Scale, "fp32", factor=factor) for factor in (0, -1, 0.0, 65537, math.nan, math.inf)
    ],
    "Scale.epsilon is a number, 0 or more and at most 1; got": [
        partial(Scale, "fp32", epsilon=epsilon) for epsilon in (-1e-5, 1.5, math.nan, math.inf)
    ],
    # What YAML makes of 1e-5 is a string.
    "Scale.(factor|epsilon) is a number, .*; got (True|'1e-5'|None)": [
        partial(Scale, "fp32", **{name: value}) for name in ("factor", "epsilon") for value in (True, "1e-5", None)
    ],
    "Cast.round_to_bfloat16 is true or false; got": [
        partial(Cast, round_to_bfloat16=value) for value in (1, "yes", None)
    ],
}


@each("message, builds", WRONG.items())
def test_wrong_fields(message, builds):
    for build in builds:
        with pytest.raises(ValueError, match=message):
            build()
