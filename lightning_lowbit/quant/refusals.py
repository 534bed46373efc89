"""Combinations of fields of a cast that have no meaning, each with the remedy."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning_lowbit.formats import ELEMENT_FORMATS

if TYPE_CHECKING:
    from lightning_lowbit.quant.cast import Scale

# Refused combinations of fields: the condition on a scale s and an element e (None while only the scale is known), and
# the error message. All other combinations are honored.
REFUSED: tuple[tuple[Callable[["Scale", str | None], object], str], ...] = (
    (
        lambda s, _: s.two_level and s.format == "fp32",
        "fp32 scales have the range and digits of a second level: leave out two_level, or take e.g. format='e4m3'.",
    ),
    (
        lambda s, _: s.two_level and s.block == "tensor",
        "With block='tensor' a second level scales the same elements again: leave out two_level, or take a block.",
    ),
    (
        lambda s, _: s.two_level == "row" and (not _holds_blocks(0, s.block)),
        "two_level='row' is a scale above the blocks of a row: take a block such as 16, or two_level=True.",
    ),
    (
        lambda s, _: s.top is not None and not s.two_level,
        "Scale.top says where the scale of the tensor maps its largest element: take two_level=True, or leave out top.",
    ),
    (
        lambda s, e: (s.top or 0) * (ELEMENT_FORMATS[e].max if e else 1) >= 2.0**128,
        "Scale.top times the largest element exceeds float32: take a smaller top, or leave it out.",
    ),
    (
        lambda s, _: s.prescale != 1 and (s.format, s.rounding) != ("e8m0", "floor"),
        "Elements saturate, and need a prescale, under e8m0 scales with rounding='floor' alone: leave out prescale.",
    ),
    (
        lambda s, _: s.prescale != 1 and s.two_level,
        "With two levels the scale of the tensor makes the room: leave out prescale, or two_level.",
    ),
    (
        lambda s, _: s.four_over_six is not None and s.format in ("e8m0", "bf16", "fp16", "fp32"),
        "4/6 needs scales that hold 6/4 of each other: take an ExMy format, 'e4m3', or leave out four_over_six.",
    ),
    (
        lambda s, _: s.four_over_six is not None and not s.per_block,
        "4/6 chooses per block: take a block such as 16, or leave out four_over_six.",
    ),
    (
        lambda s, e: s.four_over_six is not None and e not in (None, "e2m1"),
        "4/6 maps the amax of a block to 6 or 4, levels of e2m1: take element='e2m1', or leave out four_over_six.",
    ),
    (
        lambda s, _: s.four_over_six is not None and s.rounding == "stochastic" and s.correction is None,
        "4/6 compares two scales that round to nearest: leave out rounding='stochastic', or take a correction.",
    ),
    (
        lambda s, _: s.correction and (s.rounding != "stochastic" or not _holds_blocks(s.correction, s.block)),
        "A correction needs rounding='stochastic' and is of whole blocks, as 128 of 16: take these, or leave it out.",
    ),
    (
        lambda s, _: (
            s.format != "fp32" and (s.statistic, s.factor, s.epsilon) != ("absmax", s.factor if s.correction else 1, 0)
        ),
        "Scale.statistic, factor and epsilon are of fp32 scales: take format='fp32', or leave them out.",
    ),
    (
        lambda s, _: s.statistic != "absmax" and s.margin > 0,
        "Scale.margin leaves room above the amax, which this scale does not use: leave it out, or take factor.",
    ),
    (
        lambda s, _: s.statistic != "absmax" and s.source == "delayed",
        "Delayed scaling remembers amaxes, which this scale lacks: take statistic='absmax', or source='current'.",
    ),
    (
        lambda s, e: s.statistic == "minmax" and not (e or "int").startswith("int"),
        "With statistic='minmax' elements count steps, as integers do: take 'int2' to 'int8', or statistic='absmax'.",
    ),
    (
        lambda s, _: s.margin > 0 and s.format != "fp32",
        "Scale.margin leaves room above the amax in fp32 scales: take format='fp32', or leave out margin.",
    ),
    (
        lambda s, _: s.source == "delayed" and not s.needs_amax,
        "Delayed scaling remembers the amax of the tensor: take block='tensor', two_level=True, or source='current'.",
    ),
    (
        lambda s, _: s.source != "delayed" and (s.history, s.algorithm) != (16, "max"),
        "Scale.history and Scale.algorithm are of delayed scaling: take source='delayed', or leave both out.",
    ),
)


def _holds_blocks(group: int, block: object) -> bool:
    return isinstance(block, int) and block > 1 and group % block == 0


def refuse(scale: "Scale", element: str | None) -> None:
    for applies, message in REFUSED:
        if applies(scale, element):
            raise ValueError(f"{message} Got {scale}" + (f" for {element}." if element else "."))
