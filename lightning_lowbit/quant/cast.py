"""How one tensor is quantized: ``Scale`` says how its scales are made, ``Cast`` adds the elements and their rounding.

Both are frozen values: they compare, hash, print and validate themselves, and nothing else in the project decides how
a tensor is quantized.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from typing import Any, Literal

from lightning_lowbit.checks import choose, from_fields, is_number
from lightning_lowbit.formats import ELEMENT_FORMATS, SCALE_FORMATS, Format, integer

Block = int | tuple[int, int] | Literal["row", "tensor"]

# How a block's scale is rounded to its format; the first of each is the default.
_EXMY = ("nearest", "up")
SCALE_ROUNDINGS = dict.fromkeys(SCALE_FORMATS, _EXMY) | {
    "e8m0": ("rceil", "floor", "ceil", "even"),
    "fp32": ("nearest", "power_of_two"),
}


# Every combination that has no meaning: when it applies, given the scale and the element (None while there is only a
# scale), and what to say. All other combinations of the fields are honored.
REFUSED: "tuple[tuple[Callable[[Scale, str | None], bool], str], ...]" = (
    (
        lambda scale, _: scale.two_level and scale.format == "fp32",
        "Scales in fp32 have the range and the digits that a second level would give: leave out two_level, or take "
        "another format, such as 'e4m3'.",
    ),
    (
        lambda scale, _: scale.two_level and scale.block == "tensor",
        "With block='tensor' a second level would scale the same elements again: leave out two_level, or take smaller "
        "blocks.",
    ),
    (
        lambda scale, _: scale.top is not None and not scale.two_level,
        "Scale.top says where the scale of the tensor maps its largest element: take two_level=True, or leave out top.",
    ),
    (
        lambda scale, element: (scale.top or 0) * (ELEMENT_FORMATS[element].max if element else 1) >= 2.0**128,
        "Scale.top times the largest element exceeds float32: take a smaller top, or leave it out.",
    ),
    (
        lambda scale, _: scale.prescale != 1 and (scale.format, scale.rounding) != ("e8m0", "floor"),
        "Scale.prescale makes room for elements that would saturate, which e8m0 scales with rounding='floor' cause and "
        "no others: take those, or leave out prescale.",
    ),
    (
        lambda scale, _: scale.prescale != 1 and scale.two_level,
        "With two levels the scale of the tensor makes the room: leave out prescale, or two_level.",
    ),
    (
        lambda scale, _: scale.four_over_six is not None and scale.format in ("e8m0", "fp32"),
        "4/6 chooses between a scale and 6/4 of it: powers of two cannot hold that, and fp32 scales have no reason to. "
        "Take an ExMy format such as 'e4m3', or leave out four_over_six.",
    ),
    (
        lambda scale, _: scale.four_over_six is not None and not scale.per_block,
        "4/6 chooses per block: take a block such as 16, or leave out four_over_six.",
    ),
    (
        lambda scale, element: scale.four_over_six is not None and element not in (None, "e2m1"),
        "4/6 maps the largest element of a block to 6 or to 4, levels of e2m1: take element='e2m1', or leave out "
        "four_over_six.",
    ),
    (
        lambda scale, _: scale.format != "fp32" and (scale.statistic, scale.factor, scale.epsilon) != ("absmax", 1, 0),
        "Scale.statistic, factor and epsilon say what an fp32 scale is made from: take format='fp32', or leave them "
        "out.",
    ),
    (
        lambda scale, _: scale.statistic != "absmax" and scale.margin > 0,
        "Scale.margin leaves room above the largest magnitude, from which this scale is not made: leave it out, or "
        "take factor.",
    ),
    (
        lambda scale, _: scale.statistic != "absmax" and scale.source == "delayed",
        "Delayed scaling remembers largest magnitudes, from which this scale is not made: take statistic='absmax', or "
        "source='current'.",
    ),
    (
        lambda scale, element: scale.statistic == "minmax" and not (element or "int").startswith("int"),
        "With statistic='minmax' an element counts steps from the least one, which integers do: take 'int2' to 'int8', "
        "or statistic='absmax'.",
    ),
    (
        lambda scale, _: scale.margin > 0 and scale.format != "fp32",
        "Scale.margin leaves room above the largest magnitude in fp32 scales: take format='fp32', or leave out margin.",
    ),
    (
        lambda scale, _: scale.source == "delayed" and not scale.needs_amax,
        "Delayed scaling remembers the largest magnitude of the whole tensor: take block='tensor' or two_level=True, "
        "or source='current'.",
    ),
    (
        lambda scale, _: scale.source != "delayed" and (scale.history, scale.algorithm) != (16, "max"),
        "Scale.history and Scale.algorithm say what delayed scaling remembers: take source='delayed', or leave both "
        "out.",
    ),
)


def _refuse(scale: "Scale", element: str | None) -> None:
    for applies, message in REFUSED:
        if applies(scale, element):
            raise ValueError(f"{message} Got {scale}" + (f" for {element}." if element else "."))


@dataclass(frozen=True)
class Scale:
    """How the scales of one tensor are made.

    Args:
        format: format of the block scales: ``"e1m6"``, ``"e2m5"``, ``"e3m4"``, ``"e4m3"``, ``"e5m2"``, ``"e6m1"`` (FP4
            All the Way, arXiv 2505.19115, figure 1), ``"e8m0"`` (OCP Microscaling), ``"fp32"``.
        block: elements that share a scale: ``16`` along the contraction axis; ``(16, 16)``, a tile of the tensor (a
            tile is the same for the tensor and its transpose); ``"row"``, the whole contraction axis: one scale per
            token or output channel; ``"tensor"``.
        rounding: of the scale itself. ``"nearest"`` may round the scale of a block below what its largest element
            needs, which then saturates; ``"up"`` never does, which makes stochastic rounding unbiased. For ``"e8m0"``
            the rules by which the exponent follows from the largest magnitude 2^k * m of a block: ``"floor"`` (OCP; may
            saturate), ``"ceil"``, ``"even"`` (up where m rounds up to 2 in the element format; may saturate),
            ``"rceil"`` (the smallest exponent at which nothing saturates; the default). For ``"fp32"`` ``"nearest"`` or
            ``"power_of_two"``, the next one at which nothing saturates.
        two_level: with a float32 scale of the whole tensor above the block scales, as in NVFP4: it maps the largest
            element of the tensor to ``top * element.max``.
        top: scale of the block with the largest element of the tensor, with two levels; None is the largest scale
            there is (1 for ``"e8m0"``, which has float32's range; with 4/6 the largest power of two of which 6/4 is
            still a scale: 256 for ``"e4m3"``).
        four_over_six: ``"mse"`` or ``"mae"``: of each block's scale and the one 6/4 as large, which maps the block's
            largest element to 4 instead of 6, the one with the smaller error (Four Over Six, arXiv 2512.02010).
        prescale: what elements are multiplied by once the scales are made; undone in the operand's own decoding. 3/4
            keeps FP4 elements from saturating under ``"floor"`` (Tseng et al., arXiv 2502.20586, algorithm 2).
        margin: powers of two of room above the largest magnitude, for ``"fp32"``: scales are 2^margin larger.
        statistic: of a block, what its scale is made from, for ``"fp32"``. ``"absmax"``: the largest magnitude, which
            becomes the largest level; ``"absmean"``: the mean magnitude, which becomes 1, and larger elements saturate
            (BitNet b1.58, arXiv 2402.17764, section 2); ``"minmax"``: least and largest element, 0 among them, between
            which an integer of b bits counts 2^b - 1 steps from a zero point (Jacob et al., arXiv 1712.05877, section
            2.1).
        factor: what the statistic is multiplied by, for ``"fp32"``: below 1 more elements saturate.
        epsilon: the least that the statistic is taken for, for ``"fp32"``: 1e-5 in BitNet.
        source: of the largest magnitude of the tensor. ``"current"``: the tensor itself; ``"delayed"``: those of the
            steps before, which :class:`lightning_lowbit.nn.AmaxHistories` remembers (FP8 Formats for Deep Learning,
            arXiv 2209.05433, and Transformer Engine's ``DelayedScaling``). Magnitudes beyond it saturate. Takes
            ``block="tensor"`` or ``two_level=True``.
        history: steps that delayed scaling remembers (Transformer Engine: 1024).
        algorithm: ``"max"`` or ``"most_recent"`` of the remembered magnitudes.

    Raises:
        ValueError: an argument is not one of the above, or a combination has no meaning; ``REFUSED`` lists those.
    """

    format: str = "e4m3"
    block: Block = 16
    rounding: str | None = None
    two_level: bool = False
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
        if not isinstance(self.two_level, bool):
            raise ValueError(f"Scale.two_level is true or false; got {self.two_level!r}.")
        if self.four_over_six is not None:
            choose("error measure of Scale.four_over_six", self.four_over_six, ("mse", "mae"))
        choose("statistic of Scale", self.statistic, ("absmax", "absmean", "minmax"))
        choose("source of Scale", self.source, ("current", "delayed"))
        choose("algorithm of Scale", self.algorithm, ("max", "most_recent"))
        for name, least, most in (("margin", 0, 64), ("history", 1, 2**20)):
            if type(number := getattr(self, name)) is not int or not least <= number <= most:
                raise ValueError(f"Scale.{name} is a whole number from {least} to {most}; got {number!r}.")
        for name, largest in (("top", self.storage.max), ("prescale", 1.0), ("factor", 2.0**16), ("epsilon", 1.0)):
            value = getattr(self, name)
            if name == "top" and value is None:
                continue
            if not is_number(value):
                raise ValueError(f"Scale.{name} is a number; got {value!r}.")
            if not (0 < value <= largest or (name == "epsilon" and value == 0)):
                bracket = "[" if name == "epsilon" else "("
                raise ValueError(
                    f"Scale.{name} must lie in {bracket}0, {largest:g}] for {self.format} scales; got {value!r}."
                )
        _refuse(self, None)

    @property
    def storage(self) -> Format:
        """The format in which block scales are stored."""
        return SCALE_FORMATS[self.format]

    @property
    def largest(self) -> float:
        """Scale of the block that holds the largest element of the tensor, with two levels: ``top`` or its default."""
        if self.four_over_six is not None and self.top is None:
            return 2.0 ** math.floor(math.log2(self.storage.max / 1.5))
        return self.top or (1.0 if self.format == "e8m0" else self.storage.max)

    @property
    def per_block(self) -> bool:
        """Whether a scale belongs to a part of the contraction axis; if not, it factors out of the GEMM."""
        return self.block not in ("row", "tensor")

    @property
    def needs_amax(self) -> bool:
        """Whether the largest magnitude of the whole tensor enters."""
        return self.two_level or (self.block == "tensor" and self.statistic == "absmax")

    @property
    def significant_bits(self) -> int:
        """Binary digits that a scale adds to those of an element; a power of two adds none."""
        power_of_two = self.format == "e8m0" or self.rounding == "power_of_two"
        return 0 if power_of_two else self.storage.significant_bits

    def __str__(self) -> str:
        block = self.block if isinstance(self.block, str) else f"1x{self.block}"
        if isinstance(self.block, tuple):
            block = "x".join(map(str, self.block))
            block = f"[{block}]" if self.block[0] == 1 else block  # a tile, whatever the contraction axis
        parts = [f"{self.format}:{block}"]
        if self.two_level:
            parts.append("+fp32" + ("" if self.top is None else f"<{self.top:g}"))
        if self.rounding != SCALE_ROUNDINGS[self.format][0]:
            parts.append("^" if self.rounding == "up" else f"({self.rounding})")
        if self.four_over_six is not None:
            parts.append(f"(4/6 {self.four_over_six})")
        if self.prescale != 1:
            parts.append(f"(x{self.prescale:g})")
        if self.margin:
            parts.append(f"(margin {self.margin})")
        if (self.statistic, self.factor) != ("absmax", 1):
            parts.append(f"({self.statistic}{'' if self.factor == 1 else f' x{self.factor:g}'})")
        if self.epsilon:
            parts.append(f"(epsilon {self.epsilon:g})")
        if self.source == "delayed":
            parts.append(f"(delayed {self.history}{'' if self.algorithm == 'max' else f' {self.algorithm}'})")
        return "".join(parts)


@dataclass(frozen=True)
class Cast:
    """How one tensor is quantized.

    Args:
        element: format of the elements: ``"e2m1"``, ``"e1m2"``, ``"e3m0"``, ``"e2m3"``, ``"e3m2"``, ``"e4m3"``,
            ``"e5m2"``, ``"int2"`` to ``"int8"``, ``"ternary"``.
        scale: how the scales are made; a mapping of its fields is accepted too.
        rounding: of the elements. ``"nearest"`` has ties to even; ``"stochastic"`` is unbiased and needs a key.
        rounded: what enters a GEMM, elements times block scales, is rounded to bfloat16 where that is the dtype of the
            computation, as fake quantization does; what it holds exactly stays as it is. If not, a GEMM whose operands
            bfloat16 does not hold exactly is one of float32.

    Raises:
        ValueError: an argument is not one of the above, or a combination has no meaning; ``REFUSED`` lists those.
    """

    element: str = "e2m1"
    scale: Scale = Scale()
    rounding: Literal["nearest", "stochastic"] = "nearest"
    rounded: bool = False
    spec: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        choose("element format", self.element, ELEMENT_FORMATS)
        choose("rounding", self.rounding, ("nearest", "stochastic"))
        if isinstance(self.scale, Mapping):
            object.__setattr__(self, "scale", from_fields(Scale, "Scale", self.scale))
        if not isinstance(self.scale, Scale):
            raise ValueError(f"Cast.scale is a Scale or a mapping of its fields; got {self.scale!r}.")
        if not isinstance(self.rounded, bool):
            raise ValueError(f"Cast.rounded is true or false; got {self.rounded!r}.")
        _refuse(self.scale, self.element)
        own = {name: getattr(self, name) for name in ("element", "rounding", "rounded")}
        object.__setattr__(self, "spec", json.dumps({**own, "scale": asdict(self.scale)}))

    @staticmethod
    @cache
    def from_spec(spec: str) -> "Cast":
        """The cast with this ``spec``, a JSON object of its fields: custom operators take strings, not objects."""
        return Cast(**json.loads(spec))

    def replace(self, **changes: Any) -> "Cast":
        """A copy with other fields; ``scale`` may be a mapping of those fields of the scale that change.

        Raises:
            ValueError: an unknown field, or a combination that has no meaning.
        """
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
    def format(self) -> Format:
        """The format of the elements."""
        return ELEMENT_FORMATS[self.element]

    @property
    def grid(self) -> Format:
        """What elements are rounded to: their format, or with a zero point whole numbers on either side of it."""
        return integer(self.format.bits + 1) if self.scale.statistic == "minmax" else self.format

    @property
    def fits_bfloat16(self) -> bool:
        """Whether what enters the GEMM, elements times block scales, is exact in bfloat16 (8 significant bits)."""
        return self.grid.significant_bits + (self.scale.significant_bits if self.scale.per_block else 0) <= 8

    @property
    def bits(self) -> float:
        """Bits per element, with its share of scale and zero point: 4.5 for NVFP4; one of a row or tensor is 0."""
        block = self.scale.block
        if isinstance(block, str):
            return float(self.format.bits)
        shared = self.scale.storage.bits + (self.format.bits if self.scale.statistic == "minmax" else 0)
        return self.format.bits + shared / (math.prod(block) if isinstance(block, tuple) else block)

    def __str__(self) -> str:
        marks = ("~" if self.rounding == "stochastic" else "") + ("≈" if self.rounded else "")
        return f"{self.element}/{self.scale}{marks}"
