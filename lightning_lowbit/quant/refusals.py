"""Combinations of fields of a cast that have no meaning, each with the remedy."""

from typing import TYPE_CHECKING

from lightning_lowbit.formats import ELEMENT_FORMATS

if TYPE_CHECKING:
    from lightning_lowbit.quant.cast import Scale


def refuse(scale: "Scale", element: str | None) -> None:
    """Raises a ``ValueError`` for fields without a meaning together; ``element`` is None while only a scale is known."""
    if (message := refusal(scale, element)) is not None:
        raise ValueError(f"{message} Got {scale}" + (f" for {element}." if element else "."))


def refusal(s: "Scale", e: str | None) -> str | None:
    """Returns why fields have no meaning together, with the remedy; None for all others, which are honored."""
    if s.two_level and s.format == "fp32":
        return "fp32 scales have the range and digits of a second level: leave out two_level, or take format='e4m3'."
    if s.two_level and s.block == "tensor":
        return "With block='tensor' a second level scales the same elements again: leave out two_level, or take blocks."
    if s.two_level == "row" and not _holds_blocks(0, s.block):
        return "two_level='row' is a scale above the blocks of a row: take a block such as 16, or two_level=True."
    if s.top is not None and not s.two_level:
        return "Scale.top says where the tensor's scale maps its largest element: take two_level=True, or leave it out."
    if (s.top or 0) * (ELEMENT_FORMATS[e].max if e else 1) >= 2.0**128:
        return "Scale.top times the largest element exceeds float32: take a smaller top, or leave it out."
    if s.prescale != 1 and (s.format, s.rounding) != ("e8m0", "floor"):
        return "Elements saturate and need prescale under e8m0 scales with rounding='floor' alone: leave out prescale."
    if s.prescale != 1 and s.two_level:
        return "With two levels the scale of the tensor makes the room: leave out prescale, or two_level."
    if s.four_over_six is not None and s.format in ("e8m0", "bf16", "fp16", "fp32"):
        return "4/6 needs scales that hold 6/4 of each other: take an ExMy format, 'e4m3', or leave out four_over_six."
    if s.four_over_six is not None and not s.per_block:
        return "4/6 chooses per block: take a block such as 16, or leave out four_over_six."
    if s.four_over_six is not None and e not in (None, "e2m1"):
        return "4/6 maps a block's amax to 6 or 4, levels of e2m1: take element='e2m1', or leave out four_over_six."
    if s.four_over_six is not None and s.rounding == "stochastic" and s.correction is None:
        return "4/6 compares two scales that round to nearest: leave out rounding='stochastic', or take a correction."
    if s.correction and (s.rounding != "stochastic" or not _holds_blocks(s.correction, s.block)):
        return "A correction needs rounding='stochastic' and whole blocks, as 128 of 16: take these, or leave it out."
    if s.format != "fp32" and (s.statistic, s.factor, s.epsilon) != ("absmax", s.factor if s.correction else 1, 0):
        return "Scale.statistic, factor and epsilon are of fp32 scales: take format='fp32', or leave them out."
    if s.statistic != "absmax" and s.margin > 0:
        return "Scale.margin leaves room above the amax, which this scale does not use: leave it out, or take factor."
    if s.statistic != "absmax" and s.source == "delayed":
        return "Delayed scaling remembers amaxes, which this scale lacks: take statistic='absmax', or source='current'."
    if s.statistic == "minmax" and not (e or "int").startswith("int"):
        return "With 'minmax' elements count steps, as integers do: take 'int2' to 'int8', or statistic='absmax'."
    if s.margin > 0 and s.format != "fp32":
        return "Scale.margin leaves room above the amax in fp32 scales: take format='fp32', or leave out margin."
    if s.source == "delayed" and not s.needs_amax:
        return "A delay remembers the amax of the tensor: take block='tensor', two_level=True, or source='current'."
    if s.source != "delayed" and (s.history, s.algorithm) != (16, "max"):
        return "Scale.history and Scale.algorithm are of delayed scaling: take source='delayed', or leave both out."
    return None


def _holds_blocks(group: int, block: object) -> bool:
    return isinstance(block, int) and block > 1 and group % block == 0
