"""The quantization of one tensor: ``Scale`` describes its scales, ``Cast`` adds the elements and their rounding.

Both are immutable values that validate themselves. Nothing else in the project decides how a tensor is quantized.
"""

import json
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, wraps
from typing import Any, Literal

from lightning_lowbit.checks import choose, flag, fraction, from_fields, integer, number
from lightning_lowbit.formats import ELEMENT_FORMATS, SCALE_FORMATS, Format
from lightning_lowbit.formats import integer as integers

Block = int | tuple[int, int] | Literal["row", "tensor"]

# Roundings of the scales of each format; the first one is the default.
_EXMY = ("nearest", "up", "stochastic")
SCALE_ROUNDINGS = dict.fromkeys(SCALE_FORMATS, _EXMY) | {
    "e8m0": ("rceil", "floor", "ceil", "even"),
    "bf16": ("nearest",),
    "fp16": ("nearest",),
    "fp32": ("nearest", "power_of_two"),
}


@dataclass(frozen=True)
class Scale:
    """The recipe for the scales of one tensor; docs/guides/scales.md explains each field with its source.

    Args:
        format: format of the block scales: ``"e1m6"``, ``"e2m5"``, ``"e3m4"``, ``"e4m3"``, ``"e5m2"``, ``"e6m1"``,
            ``"e8m0"``, ``"bf16"``, ``"fp16"`` or ``"fp32"``.
        block: elements that share a scale: ``16`` along the contraction axis, a tile, ``"row"`` or ``"tensor"``.
        rounding: of the scale, see ``SCALE_ROUNDINGS``: ``"nearest"``, ``"up"`` or ``"stochastic"``; for ``"e8m0"``
            ``"rceil"``, ``"floor"``, ``"ceil"`` or ``"even"``; for ``"fp32"`` ``"nearest"`` or ``"power_of_two"``.
        two_level: adds a float32 scale above the block scales: True, of the whole tensor, as in NVFP4; or ``"row"``.
        top: with two levels, the scale of the block with the tensor's largest element; None for the largest scale.
        four_over_six: ``"mse"`` or ``"mae"``, the error by which each block chooses its scale or 6/4 of it.
        correction: elements of a group whose scales carry a correction that makes rounding unbiased (MS-EDEN).
        prescale: factor of the elements, applied after the scales are made and undone in decoding.
        margin: room above the amax in powers of two, for ``"fp32"``.
        statistic: the source of an ``"fp32"`` scale: ``"absmax"``, ``"absmean"`` or ``"minmax"`` of the block.
        factor: of the statistic, for ``"fp32"`` and corrected scales; below 1 more elements saturate.
        epsilon: lower bound of the statistic, for ``"fp32"``.
        source: the tensor's amax is its own (``"current"``) or that of earlier steps (``"delayed"``).
        history: number of steps that delayed scaling remembers.
        algorithm: ``"max"`` or ``"most_recent"`` of the remembered amaxes.

    Raises:
        ValueError: an unknown value, or a combination without meaning.

    Examples:
        >>> Scale("e4m3", 16, two_level=True)  # NVFP4's
    """

    format: str = "e4m3"
    block: Block = 16
    rounding: str | None = None
    two_level: bool | Literal["row"] = False
    top: float | None = None
    four_over_six: Literal["mse", "mae"] | None = None
    prescale: float = 1.0
    margin: int = 0
    statistic: Literal["absmax", "absmean", "minmax"] = "absmax"
    factor: float = 1.0
    epsilon: float = 0.0
    source: Literal["current", "delayed"] = "current"
    history: int = 16
    algorithm: Literal["max", "most_recent"] = "max"
    correction: int | None = None

    def __post_init__(self) -> None:
        choose("scale format", self.format, SCALE_FORMATS)
        if self.rounding is None:
            object.__setattr__(self, "rounding", SCALE_ROUNDINGS[self.format][0])
        choose(f"rounding of {self.format} scales", self.rounding, SCALE_ROUNDINGS[self.format])
        if isinstance(self.block, list):  # YAML has no tuples
            object.__setattr__(self, "block", tuple(self.block))
        sizes = self.block if isinstance(self.block, tuple) and len(self.block) == 2 else (self.block,)
        if self.block not in ("row", "tensor") and not all(type(size) is int and size > 0 for size in sizes):
            raise ValueError(
                f"Scale.block is a positive number of elements such as 16, a tile such as (16, 16), 'row' or 'tensor'; "
                f"got {self.block!r}."
            )
        if self.two_level != "row":
            flag("Scale.two_level", self.two_level, "true, false or 'row'")
        if self.four_over_six is not None:
            choose("error measure of Scale.four_over_six", self.four_over_six, ("mse", "mae"))
        choose("statistic of Scale", self.statistic, ("absmax", "absmean", "minmax"))
        choose("source of Scale", self.source, ("current", "delayed"))
        choose("algorithm of Scale", self.algorithm, ("max", "most_recent"))
        integer("Scale.margin", self.margin, 0, at_most=64)
        integer("Scale.history", self.history, 1, at_most=2**20)
        integer("Scale.correction", self.correction, 1, at_most=2**20, or_none=True)
        largest = f"a number for {self.format} scales"
        number("Scale.top", self.top, largest, above=0, at_most=self.storage.max, or_none=True)
        fraction("Scale.prescale", self.prescale, "a number")
        number("Scale.factor", self.factor, above=0, at_most=2.0**16)
        number("Scale.epsilon", self.epsilon, at_least=0, at_most=1)
        _refuse(self, None)

    @property
    def storage(self) -> Format:
        return SCALE_FORMATS[self.format]

    @property
    def largest(self) -> float:
        """With two levels, the scale of the block with the tensor's largest element: ``top`` or its default."""
        if self.four_over_six is not None and self.top is None:
            return 2.0 ** math.floor(math.log2(self.storage.max / 1.5))
        return self.top or (1.0 if self.storage.max_exponent == 127 else self.storage.max)  # which has float32's range

    @property
    def per_block(self) -> bool:
        """Returns whether scales vary along the contraction axis; if not, they factor out of the GEMM."""
        return self.block not in ("row", "tensor")

    @property
    def needs_amax(self) -> bool:
        """Returns whether scales depend on the largest magnitude of the whole tensor."""
        return self.two_level is True or (self.block == "tensor" and self.statistic == "absmax")

    @property
    def significant_bits(self) -> int:
        """Significant bits that a scale adds to those of an element; a power of two adds none."""
        power_of_two = self.format == "e8m0" or self.rounding == "power_of_two"
        return 0 if power_of_two else self.storage.significant_bits

    def __str__(self) -> str:
        block = self.block if isinstance(self.block, str) else f"1x{self.block}"
        if isinstance(self.block, tuple):
            block = "x".join(map(str, self.block))
            block = f"[{block}]" if self.block[0] == 1 else block  # a tile, whatever the contraction axis
        by = "" if self.factor == 1 else f" x{self.factor:g}"
        algorithm = "" if self.algorithm == "max" else f" {self.algorithm}"
        marks = (
            (self.two_level, "+fp32"),
            (self.two_level == "row", ":row"),
            (self.two_level and self.top, f"<{self.top or 0:g}"),
            (self.rounding != SCALE_ROUNDINGS[self.format][0], "^" if self.rounding == "up" else f"({self.rounding})"),
            (self.four_over_six, f"(4/6 {self.four_over_six})"),
            (self.correction, f"(corrected {self.correction})"),
            (self.prescale != 1, f"(x{self.prescale:g})"),
            (self.margin, f"(margin {self.margin})"),
            ((self.statistic, self.factor) != ("absmax", 1), f"({self.statistic}{by})"),
            (self.epsilon, f"(epsilon {self.epsilon:g})"),
            (self.source == "delayed", f"(delayed {self.history}{algorithm})"),
        )
        return f"{self.format}:{block}" + "".join(text for applies, text in marks if applies)


def _refuse(scale: Scale, element: str | None) -> None:
    """Raises a ``ValueError`` for fields without a meaning together. A scale alone has no element."""
    if (message := refusal(scale, element)) is not None:
        raise ValueError(f"{message} Got {scale}" + (f" for {element}." if element else "."))


def refusal(s: Scale, e: str | None) -> str | None:
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


@dataclass(frozen=True)
class Cast:
    """The recipe for quantizing one tensor.

    Args:
        element: format of the elements: ``"e2m1"``, ``"e1m2"``, ``"e3m0"``, ``"e2m3"``, ``"e3m2"``, ``"e4m3"``,
            ``"e5m2"``, ``"int2"`` to ``"int8"``, or ``"ternary"``.
        scale: a :class:`Scale`, or a mapping of its fields.
        rounding: of the elements: ``"nearest"`` (ties to even) or ``"stochastic"`` (unbiased, needs a key).
        round_to_bfloat16: rounds ``elements * block scales`` to bfloat16 where the model computes in it, as fake
            quantization does. By default operands that bfloat16 does not hold exactly are float32, as is their GEMM.

    Raises:
        ValueError: an unknown value, or a combination without meaning.

    Examples:
        >>> Cast("e2m1", Scale("e4m3", 16, two_level=True), "stochastic")
    """

    element: str = "e2m1"
    scale: Scale = Scale()
    rounding: Literal["nearest", "stochastic"] = "nearest"
    round_to_bfloat16: bool = False
    spec: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        choose("element format", self.element, ELEMENT_FORMATS)
        choose("rounding", self.rounding, ("nearest", "stochastic"))
        if isinstance(self.scale, Mapping):
            object.__setattr__(self, "scale", from_fields(Scale, "Scale", self.scale))
        if not isinstance(self.scale, Scale):
            raise ValueError(f"Cast.scale is a Scale or a mapping of its fields; got {self.scale!r}.")
        flag("Cast.round_to_bfloat16", self.round_to_bfloat16)
        _refuse(self.scale, self.element)
        if self.scale.correction is not None and self.rounding == "stochastic":
            raise ValueError(f"Elements of corrected scales round to nearest: take rounding='nearest'. Got {self}.")
        settings = {name: getattr(self, name) for name in ("element", "rounding", "round_to_bfloat16")}
        object.__setattr__(self, "spec", json.dumps({**settings, "scale": asdict(self.scale)}))

    @staticmethod
    @cache
    def from_spec(spec: str) -> "Cast":
        """Returns the cast with this ``spec``, a JSON object of its fields, which custom operators take as a string."""
        return Cast(**json.loads(spec))

    def replace(self, **changes: Any) -> "Cast":
        """Returns a copy with other fields; ``scale`` may be a mapping of the fields of the scale that change. A
        ValueError for an unknown field, or a combination that has no meaning."""
        changes = current_names(changes, warn=True)
        for name in changes:
            choose("field of Cast", name, [f.name for f in fields(Cast) if f.init])
        if isinstance(scale := changes.get("scale"), Mapping):
            for name in scale:
                choose("field of Scale", name, [f.name for f in fields(Scale)])
            if self.scale.rounding == SCALE_ROUNDINGS[self.scale.format][0]:  # a default, which another format changes
                scale = {"rounding": None, **scale}
            changes = {**changes, "scale": replace(self.scale, **scale)}
        return replace(self, **changes)

    @property
    def rounded(self) -> bool:
        """Deprecated: ``round_to_bfloat16``."""
        current_names({"rounded": None}, warn=True)
        return self.round_to_bfloat16

    @property
    def format(self) -> Format:
        return ELEMENT_FORMATS[self.element]

    @property
    def draws(self) -> bool:
        """Returns whether elements or scales round stochastically, which takes a key."""
        return "stochastic" in (self.rounding, self.scale.rounding)

    @property
    def grid(self) -> Format:
        """The grid that elements are rounded to: their format, or with a zero point the whole numbers around it."""
        return integers(self.format.bits + 1) if self.scale.statistic == "minmax" else self.format

    @property
    def fits_bfloat16(self) -> bool:
        """Returns whether elements times block scales are exact in bfloat16 (8 significant bits)."""
        return self.grid.significant_bits + (self.scale.significant_bits if self.scale.per_block else 0) <= 8

    @property
    def bits(self) -> float:
        """Bits per element with block scale and zero point: 4.5 for NVFP4. Scales per row or tensor count 0."""
        block = self.scale.block
        if isinstance(block, str):
            return float(self.format.bits)
        shared = self.scale.storage.bits + (self.format.bits if self.scale.statistic == "minmax" else 0)
        return self.format.bits + shared / (math.prod(block) if isinstance(block, tuple) else block)

    def __str__(self) -> str:
        return f"{self.element}/{self.scale}{'~' * (self.rounding == 'stochastic')}{'≈' * self.round_to_bfloat16}"


def current_names(settings: Mapping[str, Any], warn: bool = False) -> dict[str, Any]:
    """Fields of a cast with ``rounded``, the name of ``round_to_bfloat16`` until version 0.3, replaced."""
    if warn and "rounded" in settings:
        message = "Cast.rounded is deprecated and is removed in version 0.3: it is now Cast.round_to_bfloat16."
        warnings.warn(message, DeprecationWarning, stacklevel=3)
    replaced = {"round_to_bfloat16": settings["rounded"]} if "rounded" in settings else {}
    return {name: value for name, value in settings.items() if name != "rounded"} | replaced


_init: Callable[..., None] = Cast.__init__


@wraps(_init)
def _init_with_old_names(self: Cast, *args: Any, **settings: Any) -> None:
    _init(self, *args, **current_names(settings, warn=True))


Cast.__init__ = _init_with_old_names  # type: ignore[method-assign]
