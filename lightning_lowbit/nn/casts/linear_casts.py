"""The six casts of a linear layer, and the phases.

    fprop   Y  = X  · Wᵀ      casts fprop_x, fprop_w      contraction: in_features
    dgrad   dX = dY · W       casts dgrad_g, dgrad_w      contraction: out_features
    wgrad   dW = dYᵀ · X      casts wgrad_g, wgrad_x      contraction: tokens

Each operand is blocked along the contraction axis of its GEMM, so X and W are quantized for fprop and again, along the
other axis, for wgrad and dgrad. ``"fprop"`` (dgrad_w and wgrad_x) reuses the dequantized operand of the forward pass:
the gradient of quantization-aware training. ``requantize`` quantizes it anew, along the other axis, by a cast.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, ClassVar, Literal

from lightning_lowbit.checks import choose, from_fields
from lightning_lowbit.nn.casts.contradictions import contradictions
from lightning_lowbit.nn.casts.from_yaml import FrozenDict, apply_change, change_every, read_hadamard, read_surrogate
from lightning_lowbit.nn.casts.traits import GEMMS, OPERANDS, OPERANDS_OF, CastTraits, traits_of
from lightning_lowbit.quant import Cast, Hadamard
from lightning_lowbit.quant.cast import current_names

FORWARD, BACKWARD = OPERANDS[:2], OPERANDS[2:]

# Operands that each phase sets to None. "qaf" is quantization-aware finetuning (FP4 All the Way, arXiv 2505.19115,
# section 4): forward as trained, backward in high precision.
PHASES: dict[str, tuple[str, ...]] = {
    "fqt": (),
    "qaf": BACKWARD,
    "hp-forward": FORWARD,
    "bf16": OPERANDS,
}

# Operands that may be reused from the forward pass.
REUSABLE = ("dgrad_w", "wgrad_x")

# Backward passes without casts, by what they multiply gradients with.
_BACKWARD_PASSES = {"dequantized": dict.fromkeys(REUSABLE, "fprop"), "high_precision": {}}

# Smoothing scales the channels or the tokens of a layer's input to one magnitude.
SMOOTHINGS = ("channel", "token")

# Named casts, see presets.py.
PRESETS: "dict[str, Callable[[], LinearCasts]]" = {}
_casts_of: "Callable[[Callable[[], LinearCasts]], LinearCasts]" = cache(lambda preset: preset())  # to compare with

OperandCast = Cast | Literal["fprop"] | None


def _renamed(old: str, new: str) -> Any:
    def get(casts: "LinearCasts") -> Any:
        warnings.warn(f"LinearCasts.{old} is now {new}.", DeprecationWarning, stacklevel=2)
        return getattr(casts, new)

    return property(get)


@dataclass(frozen=True)
class LinearCasts:
    """The casts of one linear layer; None leaves an operand in high precision.

    Args:
        fprop_x, fprop_w, dgrad_g, wgrad_g: a :class:`Cast` or None.
        dgrad_w, wgrad_x: a :class:`Cast`, None, or ``"fprop"`` for the operand of the forward pass, dequantized.
        hadamard: by GEMM, the transform of both operands along the contraction axis before they are quantized: a
            :class:`Hadamard`, or the size of its groups: ``{"wgrad": 16}``.
        subtract_mean: GEMMs whose quantized x and g lose their mean over the tokens first. The product with the mean,
            of rank one, is added in high precision (Averis, arXiv 2603.10444): ``Y = Q(X - 1μᵀ) · Q(W)ᵀ + 1 (W μ)ᵀ``,
            likewise ``dX`` with the mean ν of dY, and ``dW = Q(dY - 1νᵀ)ᵀ · Q(X - 1μᵀ) + tokens · ν μᵀ``.
        surrogate: for ``fprop_x`` and ``fprop_w``, the derivative of rounding: ``"dge"`` (meant for weights) or
            ``"trust"``, see :mod:`lightning_lowbit.quant.operand`. By default gradients pass straight through.
        requantize: names ``dgrad_w`` or ``wgrad_x`` whose cast quantizes the dequantized operand of the forward pass
            instead of the tensor (Quartet II, arXiv 2601.22813).
        smooth: scales the channels (``"channel"``) or tokens (``"token"``) of x to one magnitude by powers of two, and
            divides the weight or the output by them; see :mod:`lightning_lowbit.nn.conversion.smooth_swiglu`.

    Raises:
        ValueError: a field has another value, or contradicts another field.

    Examples:
        >>> LinearCasts.preset("nvfp4").replace(wgrad_x=None).quantized_gemms
        ('fprop', 'dgrad')
    """

    fprop_x: Cast | None = None
    fprop_w: Cast | None = None
    dgrad_g: Cast | None = None
    dgrad_w: OperandCast = None
    wgrad_g: Cast | None = None
    wgrad_x: OperandCast = None
    hadamard: Mapping[str, Hadamard] = field(default_factory=FrozenDict)
    subtract_mean: tuple[str, ...] = ()
    surrogate: Mapping[str, str] = field(default_factory=FrozenDict)
    smooth: Literal["channel", "token"] | None = None
    requantize: tuple[str, ...] = ()
    traits: ClassVar[CastTraits]  # of each instance, but no field of the dataclass

    def __post_init__(self) -> None:
        for operand in OPERANDS:
            value = getattr(self, operand)
            if isinstance(value, Mapping):
                value = from_fields(Cast, "Cast", current_names(value, warn=True))
                object.__setattr__(self, operand, value)
            if value == "fprop" and operand in REUSABLE:
                continue
            if value is not None and not isinstance(value, Cast):
                also = ', or "fprop"' if operand in REUSABLE else ""
                raise ValueError(
                    f"LinearCasts.{operand} is a Cast, a mapping of its fields, or None for high precision{also}; "
                    f"got {value!r}."
                )
        object.__setattr__(self, "hadamard", self._checked("hadamard", GEMMS, read_hadamard, {"wgrad": 16}))
        object.__setattr__(self, "surrogate", self._checked("surrogate", FORWARD, read_surrogate, {"fprop_w": "dge"}))
        object.__setattr__(self, "subtract_mean", self._listed("subtract_mean", "GEMM", GEMMS, GEMMS[:2]))
        object.__setattr__(self, "requantize", self._listed("requantize", "operand", REUSABLE, REUSABLE))
        if self.smooth is not None:
            choose("kind of LinearCasts.smooth", self.smooth, SMOOTHINGS)
        object.__setattr__(self, "traits", traits_of(self))
        for problem in contradictions(self):
            raise ValueError(f"{problem} Got {self}.")

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "traits"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update((name, value) for name, value in state.items() if name != "plan")  # the former name
        object.__setattr__(self, "traits", traits_of(self))

    def _checked(self, name: str, keys: tuple[str, ...], read: Callable[[Any], Any], example: object) -> FrozenDict:
        value = getattr(self, name) or {}
        if not isinstance(value, Mapping):
            raise ValueError(
                f"LinearCasts.{name} maps some of {', '.join(keys)} to a setting, such as {example}; got {value!r}."
            )
        for key in value:
            choose(f"key of LinearCasts.{name}", key, keys)
        return FrozenDict((key, read(value[key])) for key in keys if key in value)

    def _listed(self, name: str, kind: str, possible: tuple[str, ...], example: tuple[str, ...]) -> tuple[str, ...]:
        value = getattr(self, name)
        if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
            raise ValueError(f"LinearCasts.{name} is a list of {kind}s such as {[*example]}; got {value!r}.")
        chosen = {choose(f"{kind} in LinearCasts.{name}", one, possible) for one in value}
        return tuple(one for one in possible if one in chosen)

    @property
    def quantizes_x_or_w(self) -> bool:
        """Returns whether x or w, which ``smooth`` scales, has a cast in any GEMM."""
        return self.has_cast(OPERANDS, "xw")

    def has_cast(self, operands: Iterable[str], tensors: str = "xwg") -> bool:
        """Returns whether one of some operands has a cast; only operands of some tensors count (x, w and g)."""
        return any(isinstance(getattr(self, name), Cast) for name in operands if name[-1] in tensors)

    def cast_of(self, operand: str) -> Cast | None:
        """Returns the cast of an operand, with ``"fprop"`` resolved; None for high precision."""
        cast = getattr(self, operand)
        return getattr(self, f"fprop_{operand[-1]}") if cast == "fprop" else cast

    def shared(self, operand: str) -> bool:
        """Returns whether an operand equals the one in ``SHARED`` to the bit: the same tensor, cast without an axis."""
        return operand in self.traits.shared

    @property
    def delayed(self) -> dict[str, Cast]:
        """The casts with delayed scaling, by operand (:class:`lightning_lowbit.nn.AmaxHistories`)."""
        return self.traits.delayed

    @property
    def is_delayed(self) -> bool:
        return bool(self.traits.delayed)

    @property
    def quantized_gemms(self) -> tuple[str, ...]:
        """The GEMMs with two quantized operands; the others are in high precision."""
        return tuple(gemm for gemm in GEMMS if all(self.cast_of(operand) for operand in self.operands_of(gemm)))

    @property
    def native_gemms(self) -> dict[str, str]:
        """The GEMMs that hardware may compute on quantized elements, with their kind (see ``nn/native/table.py``), the
        first one where several serve."""
        return {gemm: kinds[0] for gemm, kinds in self.traits.native_kinds.items()}

    quantised_gemms = _renamed("quantised_gemms", "quantized_gemms")
    quantises_x_or_w = _renamed("quantises_x_or_w", "quantizes_x_or_w")

    @staticmethod
    def operands_of(gemm: str) -> tuple[str, ...]:
        """Returns the names of the two operands of a GEMM, the one with tokens in its rows first."""
        return OPERANDS_OF[gemm]

    @classmethod
    def preset(cls, name: str) -> "LinearCasts":
        """Returns the casts of a name in ``PRESETS``; a ValueError if there is no such preset."""
        return PRESETS[choose("preset", name, PRESETS)]()

    @classmethod
    def of(cls, value: "LinearCasts | str | Mapping[str, Any]") -> "LinearCasts":
        """Casts from Python code or YAML: casts, the name of a preset, or a mapping of fields such as
        ``{"preset": "nvfp4", "every": {"scale": {"block": 32}}, "wgrad_x": {"rounding": "nearest"}}``.

        ``backward`` is the argument of `with_backward`, ``every`` changes all casts of the preset. The mapping of an
        operand changes only the fields that it names; so do ``hadamard`` and ``surrogate``, where null removes an
        entry. Without a preset, unnamed operands stay in high precision.

        Raises:
            ValueError: an unknown preset or field, or a field with a wrong value.
        """
        if isinstance(value, LinearCasts):
            return value
        if isinstance(value, str):
            return cls.preset(value)
        if not isinstance(value, Mapping):
            raise ValueError(f"Casts are a LinearCasts, a preset's name or a mapping of fields; got {value!r}.")
        names = [f.name for f in fields(cls)]
        for name in value:
            choose("field of LinearCasts", name, ["preset", "backward", "every", *names])
        changes = dict(value)
        base = cls.preset(changes.pop("preset")) if "preset" in changes else cls()
        base = base.with_backward(changes.pop("backward")) if "backward" in changes else base
        start = {name: getattr(base, name) for name in names}
        if "every" in changes:
            start.update(change_every(start, changes.pop("every")))
        changes = {name: apply_change(start.get(name), change) for name, change in changes.items()}
        return cls(**{**start, **changes})

    def replace(self, **changes: Any) -> "LinearCasts":
        """Returns a copy with other fields; a ValueError for an unknown field, or a wrong value."""
        for name in changes:
            choose("field of LinearCasts", name, [f.name for f in fields(self)])
        return replace(self, **changes)

    def with_rounding(self, rounding: Mapping[str, str]) -> "LinearCasts":
        """Returns a copy with other roundings, e.g. ``{"wgrad_x": "nearest"}``; a ValueError if one is not possible."""
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

    def with_backward(self, multiplies: str) -> "LinearCasts":
        """Returns a copy whose backward pass quantizes nothing; a ValueError for another word.

        ``"dequantized"`` multiplies gradients by the operands of the forward pass, as quantization-aware training does
        (``backward_override`` of Transformer Engine's recipes), ``"high_precision"`` by x and w, as the phase qaf does.
        """
        casts = self.phase("qaf")
        return casts.replace(**_BACKWARD_PASSES[choose("backward pass", multiplies, _BACKWARD_PASSES)])

    def phase(self, name: str) -> "LinearCasts":
        """Returns the casts in a phase of training: ``"fqt"``, ``"qaf"``, ``"hp-forward"`` or ``"bf16"``."""
        off = PHASES[choose("phase", name, PHASES)]
        if not off:
            return self
        on = {gemm: [operand for operand in OPERANDS_OF[gemm] if operand not in off] for gemm in GEMMS}
        # The settings of a GEMM or operand that is no longer quantized are dropped.
        return self.replace(
            **dict.fromkeys(off),
            hadamard={gemm: value for gemm, value in self.hadamard.items() if self.has_cast(on[gemm])},
            subtract_mean=tuple(gemm for gemm in self.subtract_mean if self.has_cast(on[gemm], "xg")),
            surrogate={operand: kind for operand, kind in self.surrogate.items() if operand not in off},
            requantize=tuple(name for name in self.requantize if not {name, f"fprop_{name[-1]}"} & {*off}),
            # Smoothing stays while any operand that it scales is quantized, so that histories keep their tensors.
            smooth=self.smooth if self.has_cast([*on["fprop"], *on["dgrad"], *on["wgrad"]], "xw") else None,
        )

    def __str__(self) -> str:
        def show(gemm: str) -> str:
            parts = [f"{operand[-1]}={_show(operand, self)}" for operand in self.operands_of(gemm)]
            if gemm in self.hadamard:
                parts.append(f"hadamard={self.hadamard[gemm]}")
            return f"{gemm}({', '.join([*parts, *(['-mean'] if gemm in self.subtract_mean else [])])})"

        for name, preset in PRESETS.items():
            if self == _casts_of(preset):
                return name
        return " ".join([*map(show, GEMMS), *([f"smooth={self.smooth}"] if self.smooth else [])])


def _show(operand: str, casts: LinearCasts) -> str:
    value = getattr(casts, operand)
    if value is None:
        return "hp"
    again = "fprop>" if operand in casts.requantize else ""
    return f"{again}{value}{' ' + casts.surrogate[operand] if operand in casts.surrogate else ''}"
