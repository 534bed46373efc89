"""The six casts of a linear layer, the presets, and the phases.

    fprop   Y  = X  · Wᵀ      casts fprop_x, fprop_w      contraction: in_features
    dgrad   dX = dY · W       casts dgrad_g, dgrad_w      contraction: out_features
    wgrad   dW = dYᵀ · X      casts wgrad_g, wgrad_x      contraction: tokens

Each operand is blocked along the contraction axis of its own GEMM, so X and W are quantised once for fprop and again,
the other way round, for wgrad and dgrad. None stands for the unquantised operand. ``"fprop"`` (dgrad_w and wgrad_x)
stands for what the forward pass used, dequantised: the gradient of quantisation-aware training.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from lightning_lowbit.quant.cast import Cast, Scale, choose, from_fields

OPERANDS = ("fprop_x", "fprop_w", "dgrad_g", "dgrad_w", "wgrad_g", "wgrad_x")
BACKWARD = OPERANDS[2:]

# What each phase sets to None. "qaf" is quantisation-aware finetuning (FP4 All the Way, arXiv 2505.19115, section 4):
# forward as trained, backward in high precision.
PHASES: dict[str, tuple[str, ...]] = {
    "fqt": (),
    "qaf": BACKWARD,
    "hp-forward": ("fprop_x", "fprop_w"),
    "bf16": OPERANDS,
}

OperandCast = Cast | Literal["fprop"] | None


@dataclass(frozen=True)
class LinearCasts:
    """The casts of one linear layer; None leaves an operand in high precision.

    Args:
        fprop_x, fprop_w, dgrad_g, wgrad_g: a :class:`Cast` or None.
        dgrad_w, wgrad_x: a :class:`Cast`, None, or ``"fprop"`` for the operand of the forward pass, dequantised.

    Raises:
        ValueError: a field is none of these.
    """

    fprop_x: Cast | None = None
    fprop_w: Cast | None = None
    dgrad_g: Cast | None = None
    dgrad_w: OperandCast = None
    wgrad_g: Cast | None = None
    wgrad_x: OperandCast = None

    def __post_init__(self) -> None:
        for operand in OPERANDS:
            value = getattr(self, operand)
            if isinstance(value, Mapping):
                value = from_fields(Cast, "Cast", value)
                object.__setattr__(self, operand, value)
            if value == "fprop" and operand in ("dgrad_w", "wgrad_x"):
                continue
            if value is not None and not isinstance(value, Cast):
                also = ', or "fprop"' if operand in ("dgrad_w", "wgrad_x") else ""
                raise ValueError(
                    f"LinearCasts.{operand} is a Cast, a mapping of its fields, or None for high precision{also}; "
                    f"got {value!r}."
                )

    @classmethod
    def preset(cls, name: str) -> "LinearCasts":
        """The casts of a name in ``PRESETS``.

        Raises:
            ValueError: there is no such preset.
        """
        return PRESETS[choose("preset", name, PRESETS)]()

    @classmethod
    def of(cls, value: "LinearCasts | str | Mapping[str, Any]") -> "LinearCasts":
        """Casts from what Python code or YAML gives: casts, the name of a preset, or fields.

        A mapping may have the key ``preset`` to start from; fields that it does not name are None otherwise.

        Raises:
            ValueError: an unknown preset or field, or a field with a wrong value.
        """
        if isinstance(value, LinearCasts):
            return value
        if isinstance(value, str):
            return cls.preset(value)
        if not isinstance(value, Mapping):
            raise ValueError(f"Casts are a LinearCasts, a preset's name or a mapping of fields; got {value!r}.")
        given = dict(value)
        base = cls.preset(given.pop("preset")) if "preset" in given else cls()
        return from_fields(cls, "LinearCasts", {**{name: getattr(base, name) for name in OPERANDS}, **given})

    def replace(self, **operands: OperandCast) -> "LinearCasts":
        """A copy with other casts for some operands."""
        for name in operands:
            choose("operand", name, OPERANDS)
        return replace(self, **operands)  # type: ignore[arg-type]

    def with_rounding(self, rounding: Mapping[str, str]) -> "LinearCasts":
        """A copy in which the named operands round as given, e.g. ``{"wgrad_x": "nearest"}``.

        Raises:
            ValueError: no such operand or rounding, or an operand that has no cast to round with.
        """
        if not isinstance(rounding, Mapping):
            raise ValueError(f"rounding maps operands to roundings, e.g. {{'wgrad_x': 'nearest'}}; got {rounding!r}.")
        changed: dict[str, OperandCast] = {}
        for name, mode in rounding.items():
            cast = getattr(self, choose("operand", name, OPERANDS))
            if not isinstance(cast, Cast):
                raise ValueError(
                    f"rounding={{{name!r}: {mode!r}}} needs an operand with a cast of its own, but {name} is {cast!r}. "
                    f"Leave {name} out of rounding, or give it a cast."
                )
            changed[name] = replace(cast, rounding=mode)  # type: ignore[arg-type]
        return self.replace(**changed)

    def phase(self, name: str) -> "LinearCasts":
        """These casts in a phase of training: ``"fqt"``, ``"qaf"``, ``"hp-forward"`` or ``"bf16"``.

        Raises:
            ValueError: there is no such phase.
        """
        return self.replace(**dict.fromkeys(PHASES[choose("phase", name, PHASES)]))

    def __str__(self) -> str:
        def show(gemm: str) -> str:
            pair = [field.name for field in fields(self) if field.name.startswith(gemm)]
            return f"{gemm}(" + ", ".join(f"{name[-1]}={_show(getattr(self, name))}" for name in pair) + ")"

        for preset in PRESETS:
            if self == PRESETS[preset]():
                return preset
        return " ".join(show(gemm) for gemm in ("fprop", "dgrad", "wgrad"))


def _show(value: OperandCast) -> str:
    return "hp" if value is None else str(value)


# --- presets ----------------------------------------------------------------------------------------------------------


def _bf16() -> LinearCasts:
    """Everything in high precision: the baseline."""
    return LinearCasts()


def _nvfp4() -> LinearCasts:
    """Fully quantised training in NVFP4 (FP4 All the Way, arXiv 2505.19115, section 3): blocks of 16 with E4M3 scales
    and a tensor scale in all six operands; stochastic rounding of both gradients and of wgrad's activations, nearest
    elsewhere."""
    nearest = Cast("e2m1", Scale("e4m3", 16, two_level=True))
    stochastic = replace(nearest, rounding="stochastic")
    return LinearCasts(
        fprop_x=nearest,
        fprop_w=nearest,
        dgrad_g=stochastic,
        dgrad_w=nearest,
        wgrad_g=stochastic,
        wgrad_x=stochastic,
    )


PRESETS: dict[str, Callable[[], LinearCasts]] = {
    "bf16": _bf16,
    "nvfp4": _nvfp4,
}
