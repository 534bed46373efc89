"""The six casts of a linear layer, and the phases.

    fprop   Y  = X  · Wᵀ      casts fprop_x, fprop_w      contraction: in_features
    dgrad   dX = dY · W       casts dgrad_g, dgrad_w      contraction: out_features
    wgrad   dW = dYᵀ · X      casts wgrad_g, wgrad_x      contraction: tokens

Each operand is blocked along the contraction axis of its own GEMM, so X and W are quantized once for fprop and again,
the other way round, for wgrad and dgrad. None stands for the unquantized operand. ``"fprop"`` (dgrad_w and wgrad_x)
stands for what the forward pass used, dequantized: the gradient of quantization-aware training.

Four things belong to a GEMM or to the layer rather than to one tensor: a Hadamard transform of both operands, the mean
that is split off before quantization, what stands for the derivative of rounding, and the smoothing of x.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch

from lightning_lowbit.checks import choose, from_fields
from lightning_lowbit.quant import SURROGATES, Cast, Hadamard

OPERANDS = ("fprop_x", "fprop_w", "dgrad_g", "dgrad_w", "wgrad_g", "wgrad_x")
FORWARD, BACKWARD = OPERANDS[:2], OPERANDS[2:]
GEMMS = ("fprop", "dgrad", "wgrad")

# Operands that another GEMM may have made already. x is not among them: its quantized self would have to be kept for
# the backward pass, once per layer that reads it.
SHARED = {"dgrad_w": "fprop_w", "wgrad_g": "dgrad_g"}

# The dimension of each operand that its GEMM contracts.
CONTRACTION = dict(zip(OPERANDS, (1, 1, 1, 0, 0, 0), strict=True))

# What each phase sets to None. "qaf" is quantization-aware finetuning (FP4 All the Way, arXiv 2505.19115, section 4):
# forward as trained, backward in high precision.
PHASES: dict[str, tuple[str, ...]] = {
    "fqt": (),
    "qaf": BACKWARD,
    "hp-forward": FORWARD,
    "bf16": OPERANDS,
}

# What brings to one size the channels or the tokens of a layer's input.
SMOOTHINGS = ("channel", "token")

# Named casts, see presets.py.
PRESETS: "dict[str, Callable[[], LinearCasts]]" = {}

OperandCast = Cast | Literal["fprop"] | None


class Settings(dict[str, Any]):
    """A mapping that does not change and hashes as its items do, to be a field of a frozen dataclass."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        return Settings, (dict(self),)  # pickle and deepcopy would fill an empty one

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError("The settings of LinearCasts do not change: make others with LinearCasts.replace(...).")

    __setitem__ = __delitem__ = __ior__ = update = pop = popitem = clear = setdefault = _refuse


@dataclass(frozen=True)
class LinearCasts:
    """The casts of one linear layer; None leaves an operand in high precision.

    Args:
        fprop_x, fprop_w, dgrad_g, wgrad_g: a :class:`Cast` or None.
        dgrad_w, wgrad_x: a :class:`Cast`, None, or ``"fprop"`` for the operand of the forward pass, dequantized.
        hadamard: by GEMM, the transform of both operands along the contraction axis before they are quantized: a
            :class:`Hadamard`, or the size of its groups: ``{"wgrad": 16}``.
        subtract_mean: GEMMs whose quantized x and g lose their mean over the tokens first. The product with the mean,
            of rank one, is added in high precision (Averis, arXiv 2603.10444):
            ``Y = Q(X - 1μᵀ) · Q(W)ᵀ + 1 (W μ)ᵀ``, likewise ``dX`` with the mean ν of dY, and
            ``dW = Q(dY - 1νᵀ)ᵀ · Q(X - 1μᵀ) + tokens · ν μᵀ``.
        surrogate: for ``fprop_x`` and ``fprop_w``, what stands for the derivative of rounding: ``"dge"`` (meant for
            weights) or ``"trust"``, see :mod:`lightning_lowbit.quant.surrogate`; the gradient passes straight through
            where nothing is given.
        smooth: brings the channels (``"channel"``) or tokens (``"token"``) of x to one size by powers of two, which the
            weight or the output is divided by; see :mod:`lightning_lowbit.nn.conversion.smooth_swiglu`.

    Raises:
        ValueError: a field is none of these, or contradicts another one.
    """

    fprop_x: Cast | None = None
    fprop_w: Cast | None = None
    dgrad_g: Cast | None = None
    dgrad_w: OperandCast = None
    wgrad_g: Cast | None = None
    wgrad_x: OperandCast = None
    hadamard: Mapping[str, Hadamard] = field(default_factory=Settings)
    subtract_mean: tuple[str, ...] = ()
    surrogate: Mapping[str, str] = field(default_factory=Settings)
    smooth: Literal["channel", "token"] | None = None

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
        object.__setattr__(self, "hadamard", self._checked("hadamard", GEMMS, _hadamard, {"wgrad": 16}))
        object.__setattr__(self, "surrogate", self._checked("surrogate", FORWARD, _surrogate, {"fprop_w": "dge"}))
        if isinstance(self.subtract_mean, str | Mapping) or not isinstance(self.subtract_mean, Iterable):
            raise ValueError(
                f"LinearCasts.subtract_mean is a list of GEMMs such as ['fprop', 'dgrad']; got {self.subtract_mean!r}."
            )
        means = {choose("GEMM in LinearCasts.subtract_mean", gemm, GEMMS) for gemm in self.subtract_mean}
        object.__setattr__(self, "subtract_mean", tuple(gemm for gemm in GEMMS if gemm in means))
        if self.smooth is not None:
            choose("kind of LinearCasts.smooth", self.smooth, SMOOTHINGS)
        for problem in self._contradictions():
            raise ValueError(f"{problem} Got {self}.")

    def _checked(self, name: str, keys: tuple[str, ...], read: Callable[[Any], Any], example: object) -> Settings:
        given = getattr(self, name) or {}
        if not isinstance(given, Mapping):
            raise ValueError(
                f"LinearCasts.{name} maps some of {', '.join(keys)} to a setting, such as {example}; got {given!r}."
            )
        for key in given:
            choose(f"key of LinearCasts.{name}", key, keys)
        return Settings((key, read(given[key])) for key in keys if key in given)

    def _contradictions(self) -> Iterable[str]:
        """What is wrong between the fields, and what to do: every combination that is refused."""
        reused = [operand for operand in BACKWARD if getattr(self, operand) == "fprop"]
        for gemm in self.hadamard:
            if not self._casts_of(gemm):
                yield f"hadamard rotates {gemm}, which quantizes nothing: leave {gemm} out of hadamard."
            for operand in reused:
                if gemm == "fprop" or operand.startswith(gemm):
                    yield (
                        f"hadamard rotates {gemm}, but {operand} is the operand of the forward pass as that pass "
                        f"quantized it: give {operand} a cast of its own, or leave {gemm} out of hadamard."
                    )
        for gemm in self.subtract_mean:
            if not self._means_of(gemm):
                yield f"subtract_mean needs an x or g of {gemm} with a cast: leave {gemm} out of subtract_mean."
            if self.wgrad_x == "fprop" and gemm in ("fprop", "wgrad"):
                yield (
                    f"subtract_mean changes x in {gemm}, but wgrad_x is the x that the forward pass quantized: give "
                    f"wgrad_x a cast of its own, or leave {gemm} out of subtract_mean."
                )
        for operand, kind in self.surrogate.items():
            cast = getattr(self, operand)
            if cast is None:
                yield f"surrogate names {operand}, which is not quantized: leave it out of surrogate."
            elif cast.scale.statistic == "minmax":
                yield (
                    f"The surrogate of {operand} counts levels from zero, and with statistic='minmax' those of a block "
                    f"begin elsewhere: leave {operand} out of surrogate, or take another statistic."
                )
            elif kind == "dge" and cast.rounding == "stochastic":
                yield (
                    f"The surrogate 'dge' stands for rounding to nearest, and {operand} rounds stochastically, whose "
                    f"mean is the identity already: leave {operand} out of surrogate, or round it to nearest."
                )
            if "fprop" in self.subtract_mean:
                yield (
                    f"A surrogate of {operand} and subtract_mean in fprop contradict each other, since the product "
                    "with the mean, whose gradient it would change too, is not quantized: leave out one of them."
                )
        if self.smooth is not None and not self.quantizes_x_or_w:
            yield "smooth scales x and w, which are not quantized: leave out smooth."
        for operand in self.delayed:
            if self.smooth == "channel" and operand.endswith("_w"):
                yield (
                    f"With smooth='channel' the weight changes with every batch, and delayed scaling of {operand} "
                    f"would meet the leap of a channel there: give {operand} a scale with source='current'."
                )

    @property
    def quantizes_x_or_w(self) -> bool:
        """Whether x or w, which ``smooth`` scales, has a cast in any GEMM."""
        return any(isinstance(getattr(self, operand), Cast) for operand in OPERANDS if not operand.endswith("_g"))

    def cast_of(self, operand: str) -> Cast | None:
        """The cast that an operand has gone through, ``"fprop"`` resolved; None for high precision."""
        cast = getattr(self, operand)
        return getattr(self, f"fprop_{operand[-1]}") if cast == "fprop" else cast

    def shared(self, operand: str) -> bool:
        """Whether an operand is the one in ``SHARED``, to the bit: of the same tensor, by a cast that has no axis."""
        other, cast = SHARED[operand], getattr(self, operand)
        alike = isinstance(cast, Cast) and cast == getattr(self, other) and cast.rounding == "nearest"
        if not alike or not (cast.scale.block == "tensor" or isinstance(cast.scale.block, tuple)):
            return False
        gemms = {operand.partition("_")[0], other.partition("_")[0]}
        return not gemms & {*self.hadamard, *self.subtract_mean}

    @property
    def delayed(self) -> dict[str, Cast]:
        """The casts of the operands that are scaled by what :class:`lightning_lowbit.nn.AmaxHistories` remembers."""
        casts = {operand: getattr(self, operand) for operand in OPERANDS}
        return {name: c for name, c in casts.items() if isinstance(c, Cast) and c.scale.source == "delayed"}

    @property
    def is_delayed(self) -> bool:
        """Whether any operand is."""
        return bool(self.delayed)

    @property
    def quantized_gemms(self) -> tuple[str, ...]:
        """The GEMMs whose two operands are both quantized; any other is one in high precision."""
        return tuple(gemm for gemm in GEMMS if all(self.cast_of(operand) for operand in self.operands_of(gemm)))

    @property
    def native_gemms(self) -> dict[str, str]:
        """The GEMMs that hardware may compute on the elements as they are, and in what: ``"fp8"`` or ``"int8"``.

        Scales are per tensor or row. In FP8 not both operands are in E5M2; with scales per row the second one is in
        E4M3: CUTLASS, which torch mostly takes then, has no other kernel. Integers and ternary weights are int8.
        """
        kinds = {gemm: self._native_kind(gemm) for gemm in GEMMS}
        return {gemm: kind for gemm, kind in kinds.items() if kind is not None}

    def _native_kind(self, gemm: str) -> str | None:
        casts = [self.cast_of(operand) for operand in self.operands_of(gemm)]
        given = [cast for cast in casts if cast is not None and not cast.scale.per_block]
        if len(given) < 2:
            return None
        for operand, cast in zip(self.operands_of(gemm), given, strict=True):
            # What the forward pass used has its dtype; scales per row lie along the other axis now.
            if getattr(self, operand) == "fprop" and (cast.scale.block == "row" or not self._native_kind("fprop")):
                return None
        if all(cast.grid.gemm_dtype == torch.int8 for cast in given):
            # Integers have no NaN: an element that is none must show in the scale, which is then its own tensor's.
            return "int8" if all(cast.scale.source == "current" for cast in given) else None
        left, right = (cast.element for cast in given)
        if not {left, right} <= {"e4m3", "e5m2"}:
            return None
        rows = any(cast.scale.block == "row" for cast in given)
        return "fp8" if right == "e4m3" or (left == "e4m3" and not rows) else None

    @staticmethod
    def operands_of(gemm: str) -> tuple[str, ...]:
        """The names of the two operands of a GEMM, the one with tokens in its rows first."""
        return tuple(operand for operand in OPERANDS if operand.startswith(gemm))

    def _casts_of(self, gemm: str) -> list[Cast]:
        values = [getattr(self, operand) for operand in self.operands_of(gemm)]
        return [value for value in values if isinstance(value, Cast)]

    def _means_of(self, gemm: str) -> list[str]:
        """The operands of a GEMM that have tokens and a cast."""
        tokens = [operand for operand in self.operands_of(gemm) if not operand.endswith("_w")]
        return [operand for operand in tokens if isinstance(getattr(self, operand), Cast)]

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

        A mapping may have the key ``preset`` to start from, and ``every``: fields of :class:`Cast` to change in all its
        casts. What it gives for one operand then changes the named fields only, those of the scale too:
        ``{"preset": "nvfp4", "every": {"scale": {"block": 32}}, "wgrad_x": {"rounding": "nearest"}}``. Without a
        preset, operands that it does not name are in high precision. What ``hadamard`` and ``surrogate`` give likewise
        changes those of the preset, and null takes one away: ``{"preset": "ufp4", "hadamard": {"dgrad": None}}``.

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
        start = {f.name: getattr(base, f.name) for f in fields(cls)}
        if "every" in given:
            start.update(_every(start, given.pop("every")))
        given = {name: _on_top(start.get(name), value) for name, value in given.items()}
        return from_fields(cls, "LinearCasts", {**start, **given})

    def replace(self, **changes: Any) -> "LinearCasts":
        """A copy with other fields, such as other casts for some operands.

        Raises:
            ValueError: an unknown field, or one with a wrong value.
        """
        for name in changes:
            choose("field of LinearCasts", name, [f.name for f in fields(self)])
        return replace(self, **changes)

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
        off = PHASES[choose("phase", name, PHASES)]
        bare: LinearCasts = self.replace(**dict.fromkeys(off), hadamard={}, subtract_mean=(), surrogate={}, smooth=None)
        # What belongs to a GEMM or operand that is no longer quantized goes with it.
        return replace(
            bare,
            hadamard={gemm: value for gemm, value in self.hadamard.items() if bare._casts_of(gemm)},
            subtract_mean=tuple(gemm for gemm in self.subtract_mean if bare._means_of(gemm)),
            surrogate={operand: kind for operand, kind in self.surrogate.items() if operand not in off},
            # Kept as long as anything it scales is quantized, so that histories go on to hold the same tensors.
            smooth=self.smooth if bare.quantizes_x_or_w else None,
        )

    def __str__(self) -> str:
        def show(gemm: str) -> str:
            parts = [f"{operand[-1]}={_show(operand, self)}" for operand in self.operands_of(gemm)]
            if gemm in self.hadamard:
                parts.append(f"hadamard={self.hadamard[gemm]}")
            return f"{gemm}({', '.join([*parts, *(['-mean'] if gemm in self.subtract_mean else [])])})"

        for preset in PRESETS:
            if self == PRESETS[preset]():
                return preset
        return " ".join([*map(show, GEMMS), *([f"smooth={self.smooth}"] if self.smooth else [])])


def _show(operand: str, casts: LinearCasts) -> str:
    value = getattr(casts, operand)
    return "hp" if value is None else f"{value}{' ' + casts.surrogate[operand] if operand in casts.surrogate else ''}"


def _on_top(before: Any, value: Any) -> Any:
    """What becomes of a field: a mapping changes a cast, or settings, of which None takes one away."""
    if not isinstance(value, Mapping):
        return value
    if isinstance(before, Cast):
        return before.replace(**{str(name): change for name, change in value.items()})  # keys of YAML may be numbers
    if isinstance(before, Hadamard):
        return from_fields(Hadamard, "Hadamard", {**vars(before), **value})
    if isinstance(before, Settings):
        changed = {**before, **{key: _on_top(before.get(key), change) for key, change in value.items()}}
        return {key: change for key, change in changed.items() if change is not None}
    return value


def _every(start: Mapping[str, Any], changes: Any) -> dict[str, Cast]:
    if not isinstance(changes, Mapping):
        raise ValueError(f"casts.every is a mapping of fields of Cast; got {changes!r}.")
    changed = {name: _on_top(value, changes) for name, value in start.items() if isinstance(value, Cast)}
    if not changed:
        raise ValueError("casts.every changes the casts of a preset, and there are none: name a preset that has some.")
    return changed


def _hadamard(value: Any) -> Hadamard:
    if isinstance(value, Mapping):
        return from_fields(Hadamard, "Hadamard", value)
    return value if isinstance(value, Hadamard) else Hadamard(value)


def _surrogate(value: Any) -> str:
    return choose("surrogate", value, SURROGATES)
