"""How one tensor is quantised: ``Scale`` says how its scales are made, ``Cast`` adds the elements and their rounding.

Both are frozen values: they compare, hash, print and validate themselves, and nothing else in the project decides how
a tensor is quantised.
"""

import difflib
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from typing import Any, Literal, TypeVar

from lightning_lowbit.formats import ELEMENT_FORMATS, SCALE_FORMATS, Format

Block = int | tuple[int, int]
_T = TypeVar("_T")


def nearest(given: object, possible: Collection[object], most: int = 1) -> str:
    """`` Did you mean 'x'?`` or `` Did you mean 'x' or 'y'?``; nothing where nothing is near."""
    close = difflib.get_close_matches(str(given), [str(choice) for choice in possible], n=most)
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else ""


def choose(what: str, given: object, possible: Collection[str]) -> str:
    """Returns ``given`` if it is one of ``possible``, else raises a ``ValueError`` that names the nearest one."""
    if isinstance(given, str) and given in possible:
        return given
    hint = nearest(given, possible)
    raise ValueError(f"Unknown {what} {given!r}.{hint} Choose one of: {', '.join(map(repr, possible))}.")


def from_fields(cls: type[_T], what: str, given: Mapping[str, Any]) -> _T:
    """Builds a dataclass from a mapping as YAML gives it; an unknown field is an error that names the nearest one."""
    for name in given:
        choose(f"field of {what}", name, [f.name for f in fields(cls) if f.init])  # type: ignore[arg-type]
    return cls(**given)


@dataclass(frozen=True)
class Scale:
    """How the scales of one tensor are made.

    Args:
        format: format of the block scales: ``"e4m3"``, ``"e5m2"``, ``"e1m6"``, ``"e2m5"``, ``"e3m4"``, ``"e6m1"``
            (FP4 All the Way, arXiv 2505.19115, figure 1).
        block: elements that share a scale: ``16`` along the contraction axis, or ``(16, 16)``, a tile of the tensor
            (a tile is the same for the tensor and its transpose).
        rounding: of the scale itself. ``"nearest"`` may round the scale of a block below what its largest element
            needs, which then saturates; ``"up"`` never does, which makes stochastic rounding unbiased.
        two_level: with a float32 scale of the whole tensor above the block scales, as in NVFP4: it maps the largest
            element of the tensor to ``scale.max * element.max``.

    Raises:
        ValueError: an argument is not one of the above.
    """

    format: str = "e4m3"
    block: Block = 16
    rounding: Literal["nearest", "up"] = "nearest"
    two_level: bool = False

    def __post_init__(self) -> None:
        choose("scale format", self.format, [name for name in SCALE_FORMATS if name != "e8m0"])
        choose("rounding of scales", self.rounding, ("nearest", "up"))
        if isinstance(self.block, list):  # YAML has no tuples
            object.__setattr__(self, "block", tuple(self.block))
        sizes = self.block if isinstance(self.block, tuple) and len(self.block) == 2 else (self.block,)
        if not all(type(size) is int and size > 0 for size in sizes):
            raise ValueError(
                f"Scale.block is a positive number of elements such as 16, or a tile such as (16, 16); "
                f"got {self.block!r}."
            )
        if not isinstance(self.two_level, bool):
            raise ValueError(f"Scale.two_level is true or false; got {self.two_level!r}.")

    @property
    def storage(self) -> Format:
        """The format in which block scales are stored."""
        return SCALE_FORMATS[self.format]

    def __str__(self) -> str:
        block = "x".join(map(str, self.block)) if isinstance(self.block, tuple) else f"1x{self.block}"
        return f"{self.format}:{block}" + ("+fp32" if self.two_level else "") + ("^" if self.rounding == "up" else "")


@dataclass(frozen=True)
class Cast:
    """How one tensor is quantised.

    Args:
        element: format of the elements: ``"e2m1"``, ``"e1m2"``, ``"e3m0"``, ``"e2m3"``, ``"e3m2"``, ``"e4m3"``,
            ``"e5m2"``, ``"int2"`` to ``"int8"``, ``"ternary"``.
        scale: how the scales are made; a mapping of its fields is accepted too.
        rounding: of the elements. ``"nearest"`` has ties to even; ``"stochastic"`` is unbiased and needs a key.

    Raises:
        ValueError: an argument is not one of the above.
    """

    element: str = "e2m1"
    scale: Scale = Scale()
    rounding: Literal["nearest", "stochastic"] = "nearest"
    spec: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        choose("element format", self.element, ELEMENT_FORMATS)
        choose("rounding", self.rounding, ("nearest", "stochastic"))
        if isinstance(self.scale, Mapping):
            object.__setattr__(self, "scale", from_fields(Scale, "Scale", self.scale))
        if not isinstance(self.scale, Scale):
            raise ValueError(f"Cast.scale is a Scale or a mapping of its fields; got {self.scale!r}.")
        own = {name: getattr(self, name) for name in ("element", "rounding")}
        object.__setattr__(self, "spec", json.dumps({**own, "scale": asdict(self.scale)}))

    @staticmethod
    @cache
    def from_spec(spec: str) -> "Cast":
        """The cast with this ``spec``, a JSON object of its fields: custom operators take strings, not objects."""
        return Cast(**json.loads(spec))

    @property
    def format(self) -> Format:
        """The format of the elements."""
        return ELEMENT_FORMATS[self.element]

    @property
    def fits_bfloat16(self) -> bool:
        """Whether every product of an element with its block scale is exact in bfloat16 (8 significant bits)."""
        return self.format.significant_bits + self.scale.storage.significant_bits <= 8

    @property
    def bits(self) -> float:
        """Bits per element, with its share of the block scale: 4.5 for NVFP4."""
        block = self.scale.block
        return self.format.bits + self.scale.storage.bits / (math.prod(block) if isinstance(block, tuple) else block)

    def __str__(self) -> str:
        return f"{self.element}/{self.scale}" + ("~" if self.rounding == "stochastic" else "")
