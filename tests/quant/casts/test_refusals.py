"""Every combination of fields is honored or refused, and a refusal says what to do."""

import itertools
import re

import pytest
import torch

from lightning_lowbit import Cast, Scale, quantize
from lightning_lowbit.formats import ELEMENT_FORMATS, SCALE_FORMATS
from lightning_lowbit.quant.cast import SCALE_ROUNDINGS
from lightning_lowbit.quant.cast import refusal as reason
from tests.tables import each

BLOCKS = (8, 16, (16, 16), "row", "tensor")

MESSAGES = [text for text in reason.__code__.co_consts[1:] if isinstance(text, str) and text.endswith(".")]


def every(**fields_of):
    """The fields of every Scale with these settings: all formats with their roundings and blocks, possible or not."""
    formats = [{"format": name, "rounding": rounding} for name in SCALE_FORMATS for rounding in SCALE_ROUNDINGS[name]]
    fields_of = {"block": BLOCKS, **fields_of}
    settings = [dict(zip(fields_of, values, strict=True)) for values in itertools.product(*fields_of.values())]
    return [format | setting for format in formats for setting in settings]


def grid():
    levels = (False, True, "row")
    return every(two_level=levels, four_over_six=(None, "mse", "mae"), prescale=(1, 0.75), top=(None, 1))


def margins_and_memories():
    """With and without a margin and all that delayed scaling remembers."""
    return every(
        two_level=(False, True),
        margin=(0, 1),
        source=("current", "delayed"),
        history=(16, 4),
        algorithm=("max", "most_recent"),
    )


def statistics():
    """All that fp32 scales are made from."""
    return every(
        statistic=("absmax", "absmean", "minmax"),
        factor=(1, 0.5),
        epsilon=(0, 0.25),
        margin=(0, 1),
        source=("current", "delayed"),
    )


def refusal(build):
    """What was built, or which of MESSAGES refused it."""
    try:
        return build(), None
    except ValueError as error:
        (known,) = [message for message in MESSAGES if str(error).startswith(message)] or [None]
        assert known is not None, f"a refusal that MESSAGES does not list: {error}"  # noqa: PT017
        return None, known


@pytest.mark.slow
def test_every_combination_is_honored_or_refused():
    """All elements, scale formats with their roundings, blocks, levels, 4/6, prescales and tops."""
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    honored, hit = 0, set()
    for settings in grid():
        scale, message = refusal(lambda settings=settings: Scale(**settings))
        hit.add(message)
        if scale is None:
            continue
        for element, format in ELEMENT_FORMATS.items():
            cast, message = refusal(lambda element=element, scale=scale: Cast(element, scale))
            hit.add(message)
            if cast is None:
                continue
            found = quantize(x, cast, key=1)
            values = format.decode(found.codes)
            assert values.isfinite().all(), f"{cast}: codes without a value"
            assert (values.abs() <= format.max).all(), f"{cast}: values beyond the largest"
            assert found.dequantize().isfinite().all(), f"{cast}: finite elements decode to infinity or NaN"
            honored += 1
    # By hand: the six ExMy in three roundings, bf16 and fp16 with 5 blocks + 4 with two levels * 2 tops; of e2m1 also
    # 4/6 twice on 3 blocks * 3 levels, not stochastic; e8m0 in four roundings alike, and its prescale on 5 blocks; fp32
    # in two on 5. The level per row is one more on each block of elements.
    each = 5 + 4 * 2 + 2 * 2
    assert honored == 15 * (18 * each + 2 * each + 4 * each + 5 + 2 * 5) + 12 * 2 * (3 * 3 + 2 * 2)
    # What no top of 1 can do: exceed float32.
    hit.add(refusal(lambda: Cast("e5m2", Scale("e8m0", two_level=True, top=2.0**127)))[1])
    # Of statistics only one depends on the element.
    hit.add(refusal(lambda: Cast("ternary", Scale("fp32", statistic="minmax")))[1])
    others = [*margins_and_memories(), *statistics(), {"correction": 128}]
    hit |= {refusal(lambda settings=settings: Scale(**settings))[1] for settings in others}
    assert hit >= set(MESSAGES), f"in MESSAGES, but never refused: {set(MESSAGES) - hit}"


def possible(format, block, two_level, margin, source, memory):
    """Whether these fields have a meaning together, in other words than the package's."""
    levels = not two_level or (format != "fp32" and block != "tensor")
    whole = two_level or block == "tensor"  # something is made of the amax of the tensor, which steps can remember
    return levels and (margin == 0 or format == "fp32") and (whole if source == "delayed" else memory == (16, "max"))


@pytest.mark.slow
def test_every_margin_and_memory_is_honored_or_refused():
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    honored = 0
    for given in margins_and_memories():
        scale, message = refusal(lambda given=given: Scale(**given))
        fields_of = [given[name] for name in ("format", "block", "two_level", "margin", "source")]
        expected = possible(*fields_of, (given["history"], given["algorithm"]))
        assert (scale is not None) == expected, f"{given}: {message or 'not refused'}"
        for element in ("e4m3", "int4") if scale is not None else ():
            cast, message = refusal(lambda element=element, scale=scale: Cast(element, scale))
            assert cast is not None, f"{scale} is refused for {element}: {message}"
            # What delayed scaling remembers comes from outside, and may be too small or too large.
            for amax in (None, 0.3, 50.0) if scale.source == "delayed" else (None,):
                given_amax = None if amax is None else torch.tensor(amax)
                found = quantize(x, cast, key=1, amax=given_amax).dequantize()
                assert found.isfinite().all(), f"{cast}, amax {amax}"
            honored += 1
    # By hand: all but fp32 in 24 with 9 blocks and levels, 5 of which know the tensor's amax; fp32 in 2 with 5 and 1.
    # Each of the latter has 4 memories.
    assert honored == 2 * (24 * (9 + 5 * 4) + 2 * 2 * (5 + 1 * 4))


def test_every_statistic_is_honored_or_refused():
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    x[3] = 0
    honored = 0
    for given in statistics():
        scale, message = refusal(lambda given=given: Scale(**given))
        amax, delayed = given["statistic"] == "absmax", given["source"] == "delayed"
        plain = amax and (given["factor"], given["epsilon"], given["margin"]) == (1, 0, 0)
        expected = plain or (given["format"] == "fp32" and (amax or not given["margin"]))
        if delayed:
            expected = expected and amax and given["block"] == "tensor"
        assert (scale is not None) == expected, f"{given}: {message or 'not refused'}"
        for element in ("ternary", "int4", "e4m3") if scale is not None else ():
            cast, message = refusal(lambda element=element, scale=scale: Cast(element, scale))
            assert (cast is not None) == (given["statistic"] != "minmax" or element == "int4"), f"{scale}, {element}"
            if cast is None:
                continue
            found = quantize(x, cast, key=1).dequantize()
            assert found.isfinite().all(), f"{cast}: finite elements decode to infinity or NaN"
            assert not found[3].any(), f"{cast}: zeros became numbers"
            honored += 1
    # By hand: fp32 in 2 roundings with 2 factors and 2 epsilons, of absmax on 5 blocks and delayed on one in 2 margins
    # for 3 elements, of absmean on 5 blocks for 3 elements, of minmax on 5 for one; others in 24 on 5 blocks and
    # delayed on one.
    assert honored == 2 * 4 * (3 * 2 * (5 + 1) + 3 * 5 + 5) + 3 * 24 * (5 + 1)


@each("message", MESSAGES)
def test_a_refusal_says_what_to_do(message):
    assert re.search("(?i)leave out|take", message), f"no remedy in {message!r}"


REFUSALS = [
    (lambda: Scale("fp32", two_level=True), "range and digits of a second level: leave out two_level"),
    (lambda: Scale("e4m3", "tensor", two_level=True), "scales the same elements again: leave out two_level"),
    (lambda: Scale("e4m3", (16, 16), two_level="row"), "take a block such as 16, or two_level=True"),
    (lambda: Scale("e4m3", "row", two_level="row"), "take a block such as 16, or two_level=True"),
    (lambda: Scale("e4m3", 1, two_level="row"), "take a block such as 16, or two_level=True"),
    (lambda: Scale("e4m3", 16, "stochastic", four_over_six="mse"), "leave out rounding='stochastic', or take a correc"),
    *[
        (lambda scale=scale: Scale("e4m3", correction=128, **scale), "A correction needs rounding='stochastic'")
        for scale in ({}, *({"block": block, "rounding": "stochastic"} for block in (1, 24, "row", (4, 16))))
    ],
    (lambda: Scale("e4m3", top=256), "Scale.top says where"),
    (lambda: Scale("e4m3", prescale=0.75), "under e8m0 scales with rounding='floor' alone"),
    (lambda: Scale("e8m0", prescale=0.75), "under e8m0 scales with rounding='floor' alone"),
    (lambda: Scale("e8m0", 32, "floor", two_level=True, prescale=0.75), "leave out prescale, or two_level"),
    (lambda: Scale("e8m0", four_over_six="mse"), "4/6 needs scales that hold 6/4 of each other"),
    (lambda: Scale("fp32", four_over_six="mae"), "4/6 needs scales that hold 6/4 of each other"),
    (lambda: Scale("e4m3", "row", four_over_six="mse"), "4/6 chooses per block: take a block such as 16"),
    (lambda: Scale("e4m3", "tensor", four_over_six="mse"), "4/6 chooses per block"),
    (
        lambda: Cast("e4m3", Scale(four_over_six="mse")),
        "take element='e2m1', or leave out four_over_six. Got e4m3:1x16",
    ),
    (lambda: Cast("int4", {"four_over_six": "mse"}), "levels of e2m1"),
    (lambda: Scale("e4m3", margin=1), "in fp32 scales: take format='fp32', or leave out margin. Got e4m3:1x16(margin"),
    (lambda: Scale("e8m0", "tensor", margin=2), "in fp32 scales: take format='fp32', or leave out margin"),
    (lambda: Scale("fp32", "row", source="delayed"), "take block='tensor', two_level=True, or source='current'"),
    (lambda: Scale("e4m3", 16, source="delayed"), "remembers the amax of the tensor"),
    (lambda: Scale("fp32", "tensor", history=32), "take source='delayed', or leave both out. Got fp32:tensor"),
    (lambda: Scale(algorithm="most_recent"), "Scale.history and Scale.algorithm are of delayed scaling"),
    *[
        (
            lambda setting=setting: Scale("e4m3", **setting),
            "are of fp32 scales: take format='fp32', or leave them out. Got e4m3:1x16(",
        )
        for setting in ({"statistic": "absmean"}, {"statistic": "minmax"}, {"factor": 0.5}, {"epsilon": 1e-5})
    ],
    (lambda: Scale("e8m0", 32, factor=2), "take format='fp32', or leave them out. Got e8m0:1x32(absmax x2)"),
    (
        lambda: Scale("fp32", statistic="absmean", margin=1),
        "which this scale does not use: leave it out, or take factor. Got fp32:1x16(margin 1)(absmean)",
    ),
    (lambda: Scale("fp32", "row", statistic="minmax", margin=2), "leave it out, or take factor"),
    (
        lambda: Scale("fp32", "tensor", statistic="absmean", source="delayed"),
        "Delayed scaling remembers amaxes, which this scale lacks: take statistic='absmax'",
    ),
    (lambda: Scale("fp32", "tensor", statistic="minmax", source="delayed"), "take statistic='absmax', or source="),
    *[
        (
            lambda element=element: Cast(element, Scale("fp32", 32, statistic="minmax")),
            f"as integers do: take 'int2' to 'int8', or statistic='absmax'. Got fp32:1x32(minmax) for {element}.",
        )
        for element in ELEMENT_FORMATS
        if not element.startswith("int")
    ],
]


@each(("build", "message"), REFUSALS)
def test_refusals(build, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build()


def test_e2m1_with_four_over_six_may_replace_another_element_and_back():
    cast = Cast("e2m1", Scale(four_over_six="mse"))
    with pytest.raises(ValueError, match="levels of e2m1"):
        cast.replace(element="int4")
    assert cast.replace(element="int4", scale={"four_over_six": None}).element == "int4"


@each(
    ("build", "message"),
    [
        (lambda: Cast("ternry"), "Unknown element format 'ternry'. Did you mean 'ternary'"),
        (lambda: Cast("E2M1"), "Unknown element format 'E2M1'. Did you mean|Unknown element format 'E2M1'. Choose"),
        (lambda: Cast(4), "Unknown element format 4"),
        (lambda: Cast("fp32"), "Unknown element format 'fp32'.* Choose one of: 'e2m1', 'e1m2', .*'ternary'"),
        (lambda: Cast("e8m0"), "Unknown element format 'e8m0'"),
        (lambda: Cast(rounding="stochastc"), "Unknown rounding 'stochastc'. Did you mean 'stochastic'"),
        (lambda: Cast(scale="e4m3"), "Cast.scale is a Scale or a mapping of its fields; got 'e4m3'"),
        (lambda: Cast(scale=None), "Cast.scale is a Scale"),
        (lambda: Cast(scale={"blok": 16}), "Unknown field of Scale 'blok'. Did you mean 'block'"),
        (lambda: Scale("e4m4"), "Unknown scale format 'e4m4'. Did you mean 'e4m3'"),
        (lambda: Scale("int8"), "Unknown scale format 'int8'.* Choose one of: .*'bf16', 'fp16', 'fp32'"),
        (lambda: Scale(rounding="upp"), "Unknown rounding of e4m3 scales 'upp'. Did you mean 'up'"),
        (lambda: Scale("e4m3", rounding="rceil"), "rounding of e4m3 scales 'rceil'.*Choose one of: 'nearest', 'up'"),
        (lambda: Scale("e8m0", rounding="up"), "of e8m0 scales 'up'.*: 'rceil', 'floor', 'ceil', 'even'"),
        (lambda: Scale("e8m0", rounding="nearest"), "of e8m0 scales 'nearest'.*Choose one of: 'rceil'"),
        (lambda: Scale("fp32", rounding="up"), "of fp32 scales 'up'.*Choose one of: 'nearest', 'power_of_two'"),
        (lambda: Scale(four_over_six="mxe"), "error measure of Scale.four_over_six 'mxe'. Did you mean .*'mse', 'mae'"),
        (lambda: Scale(four_over_six=True), "error measure of Scale.four_over_six True"),
        (lambda: Scale(two_level=1), "two_level is true, false or 'row'; got 1"),
        (lambda: Scale(two_level="no"), "two_level is true, false or 'row'; got 'no'"),
        *[
            (lambda block=block: Scale(block=block), "Scale.block is a positive number .* 'row' or 'tensor'; got")
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
        *[
            (lambda top=top: Scale(two_level=True, top=top), r"Scale.top must lie in \(0, 448\] for e4m3 scales; got")
            for top in (0, -1, 449, float("nan"), float("inf"))
        ],
        *[
            (lambda factor=factor: Scale("e8m0", 32, "floor", prescale=factor), r"Scale.prescale must lie in \(0, 1\]")
            for factor in (0, -0.75, 1.5, float("nan"))
        ],
        (lambda: Scale(two_level=True, top="448"), "Scale.top is a number; got '448'"),
        (lambda: Scale(two_level=True, top=True), "Scale.top is a number; got True"),
        (lambda: Scale("e8m0", prescale=None), "Scale.prescale is a number; got None"),
        *[
            (lambda margin=margin: Scale("fp32", margin=margin), "Scale.margin is a whole number from 0 to 64; got")
            for margin in (-1, 65, 1.0, True, "1", None, float("nan"))
        ],
        *[
            (
                lambda history=history: Scale("fp32", "tensor", source="delayed", history=history),
                "Scale.history is a whole number from 1 to 1048576; got",
            )
            for history in (0, -16, 2**20 + 1, 16.0, True, "16", None)
        ],
        (lambda: Scale("e4m3", 16, "stochastic", correction=0), "Scale.correction is a whole number from 1 to 1048576"),
        (
            lambda: Cast("e2m1", Scale("e4m3", 16, "stochastic", correction=64), "stochastic"),
            "Elements of corrected scales round to nearest: take rounding='nearest'",
        ),
        (lambda: Scale(source="delay"), "Unknown source of Scale 'delay'. Did you mean 'delayed'"),
        (lambda: Scale(source=None), "Unknown source of Scale None.* Choose one of: 'current', 'delayed'"),
        (
            lambda: Scale(algorithm="recent"),
            "Unknown algorithm of Scale 'recent'.* Choose one of: 'max', 'most_recent'",
        ),
        (lambda: Cast(scale={"histroy": 16}), "Unknown field of Scale 'histroy'. Did you mean 'history'"),
        (lambda: Scale("fp32", statistic="absmeen"), "Unknown statistic of Scale 'absmeen'. Did you mean 'absmean'"),
        (lambda: Scale("fp32", statistic="mean"), "Unknown statistic of Scale 'mean'.*: 'absmax', 'absmean', 'minmax'"),
        (lambda: Scale("fp32", statistic=None), "Unknown statistic of Scale None"),
        *[
            (
                lambda factor=factor: Scale("fp32", factor=factor),
                r"Scale.factor must lie in \(0, 65536\] for fp32 scales; got",
            )
            for factor in (0, -1, 0.0, 65537, float("nan"), float("inf"))
        ],
        *[
            (
                lambda epsilon=epsilon: Scale("fp32", epsilon=epsilon),
                r"Scale.epsilon must lie in \[0, 1\] for fp32 scales; got",
            )
            for epsilon in (-1e-5, 1.5, float("nan"), float("inf"))
        ],
        *[
            (lambda name=name, value=value: Scale("fp32", **{name: value}), f"Scale.{name} is a number; got {value!r}")
            for name in ("factor", "epsilon")
            for value in (True, "1e-5", None)  # what YAML makes of 1e-5 is a string
        ],
        *[
            (
                lambda value=value: Cast(round_to_bfloat16=value),
                f"Cast.round_to_bfloat16 is true or false; got {value!r}",
            )
            for value in (1, "yes", None)
        ],
    ],
)
def test_wrong_fields(build, message):
    with pytest.raises(ValueError, match=message):
        build()
