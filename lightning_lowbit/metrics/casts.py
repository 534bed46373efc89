"""What a cast makes of a tensor.

With x a tensor and q what its codes and scales decode to:

    SQNR          10 log10(Σ x² / Σ (x - q)²)      dB
    relative MSE  Σ (x - q)² / Σ x²                10^(-SQNR / 10)
    bias          Σ (q - x) sign(x) / Σ |x|        below 0 where magnitudes shrink, -1 where all became 0
    underflow     of the elements that are not 0, the share that became 0
    saturation    of all elements, the share beyond the largest magnitude that the scale of their block can express, or
                  with a zero point beyond the least or the largest level of their block

Everything is computed where the tensor lies, from sums in float64, and nothing waits for a device.
"""

import warnings
from dataclasses import dataclass, fields, replace
from functools import cache

import torch
from torch import Tensor

from lightning_lowbit.formats import Format, table
from lightning_lowbit.quant import Cast, Quantized, quantize
from lightning_lowbit.quant.statistics import sqnr_db, wide_dtype

# A largest magnitude is a product of scales, each rounded to float32: elements that it misses by so little fit.
_ULPS = 2.0**-20


# --- a tensor and its quantized self ----------------------------------------------------------------------------------


def sqnr(x: Tensor, q: Tensor) -> Tensor:
    """Signal to quantization noise ratio: ``10 log10(Σ x² / Σ (x - q)²)``.

    Args:
        x: floating point, any shape.
        q: what became of it, same shape.

    Returns:
        dB, 0-d. Infinite where nothing changed, zeros included; minus infinity where ``x`` is all zeros and ``q`` is
        not; NaN where either tensor holds a NaN or an infinity.

    Raises:
        ValueError: the shapes differ.
    """
    signal, noise, *_ = _sums(x, q)
    return sqnr_db(signal, noise)


def mse(x: Tensor, q: Tensor, relative: bool = False) -> Tensor:
    """Mean squared error: ``Σ (x - q)²`` over the number of elements, or relative, over ``Σ x²``.

    Args:
        x, q: as in :func:`sqnr`.
        relative: to the mean square of ``x``.

    Returns:
        0-d, in units of x² or of 1. Relative, 0 where nothing changed, zeros included. NaN as in :func:`sqnr`, and for
        tensors without elements.

    Raises:
        ValueError: the shapes differ.
    """
    signal, noise, *_ = _sums(x, q)
    return ratio(noise, signal) if relative else noise / x.numel()


def bias(x: Tensor, q: Tensor) -> Tensor:
    """How much magnitudes shrink or grow on the whole: ``Σ (q - x) sign(x) / Σ |x|``.

    Grids whose spacing grows with the magnitude, E2M1's among them, lose magnitude when they round to nearest, and the
    loss adds up over the layers of a network (Rethinking Shrinkage Bias in LLM FP4 Pretraining, arXiv 2606.20381).
    Underflow and saturation lose more. Stochastic rounding has no bias where nothing saturates.

    Args:
        x, q: as in :func:`sqnr`.

    Returns:
        0-d, relative to the mean magnitude; negative where magnitudes shrink. 0 where nothing changed, zeros included;
        NaN as in :func:`sqnr`.

    Raises:
        ValueError: the shapes differ.
    """
    *_, magnitude, growth = _sums(x, q)
    return ratio(growth, magnitude)


def _sums(x: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Σ x², Σ (x - q)², Σ |x| and Σ (q - x) sign(x)."""
    if x.shape != q.shape:
        raise ValueError(
            f"The error of a tensor needs that tensor in two versions of one shape; got {tuple(x.shape)} and "
            f"{tuple(q.shape)}."
        )
    wide = wide_dtype(x.device)
    x, error = x.to(wide), q.to(wide) - x.to(wide)
    return x.square().sum(), error.square().sum(), x.abs().sum(), (error * x.sign()).sum()


def ratio(part: Tensor, whole: Tensor) -> Tensor:
    """``part / whole``, and 0 where the part is 0, of nothing too."""
    return torch.where(part == 0, 0.0, part / whole)


# --- codes ------------------------------------------------------------------------------------------------------------


def levels(format: Format) -> tuple[float, ...]:
    """The values that elements of a format take, ascending: ``-6.0`` to ``6.0`` for E2M1, with one zero.

    Codes that rounding never gives are no levels: NaNs, infinities, and the lowest integer, which has no opposite.
    """
    return tuple(sorted({value for value in _values(format) if abs(value) <= format.max}))


def code_histogram(quantized: Quantized, normalize: bool = False, **deprecated: bool) -> Tensor:
    """How often each level is used.

    Args:
        quantized: from :func:`lightning_lowbit.quantize`.
        normalize: to a sum of 1. Its old spelling ``normalise`` is deprecated.

    Returns:
        int64 counts (float32 shares if normalized) in the order of the :func:`levels` of the cast's grid: those of its
        element format, or with zero points those on either side of them, ``-15`` to ``15`` for int4. Codes count as
        they are stored, also in a block whose scale underflowed to 0. Elements that decode to NaN are left out.
    """
    if "normalise" in deprecated:
        warnings.warn("code_histogram(normalise=) is now normalize=.", DeprecationWarning, stacklevel=2)
        normalize = deprecated.pop("normalise")
    if deprecated:
        raise TypeError(f"code_histogram() got an unexpected keyword argument {next(iter(deprecated))!r}")
    counts = _count_codes(quantized, quantized.dequantize())
    return ratio(counts, counts.sum()) if normalize else counts


def _count_codes(quantized: Quantized, decoded: Tensor) -> Tensor:
    grid, device = quantized.cast.grid, quantized.codes.device
    size = len(levels(grid))
    if quantized.zero_points is None:
        places = _places(grid, device)[quantized.codes.long()]
    else:  # the levels are whole numbers
        places = (quantized.elements() + grid.max).long()
    places = torch.where(decoded.isnan(), size, places).flatten()
    one = torch.ones((), dtype=torch.int64, device=device).expand_as(places)
    return torch.zeros(size + 1, dtype=torch.int64, device=device).scatter_add_(0, places, one)[:size]


@cache
def _places(format: Format, device: torch.device) -> Tensor:
    """int64 ``[2^bits]``: the place of each code's value among the levels; behind them for codes that are none."""
    place = {value: i for i, value in enumerate(levels(format))}
    return torch.tensor([place.get(value, len(place)) for value in _values(format)], device=device)


def _values(format: Format) -> list[float]:
    values: list[float] = table(format, torch.device("cpu")).tolist()
    return values


# --- a tensor and a cast ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class CastStatistics:
    """What a cast makes of a tensor, as sums, so that errors of parts add up to that of the whole: ``left + right``.

    The attributes and what follows from them are 0-d tensors (``codes`` a vector) on the device of the tensor;
    :meth:`floats` waits for it and gives numbers.

    Attributes:
        cast: how the tensor was quantized.
        elements: how many it has.
        signal: ``Σ x²``.
        noise: ``Σ (x - q)²``.
        magnitude: ``Σ |x|``.
        growth: ``Σ (q - x) sign(x)``.
        nonzero: elements that are not 0, int64.
        underflowed: of these, those that became 0.
        saturated: elements whose magnitude exceeds ``scale * tensor_scale * element.max`` of their block, by more than
            the rounding of scales to float32: what they lose is not decided by the grid. They need not be far beyond:
            an E4M3 scale rounded to nearest leaves the largest element of about every other block outside. Elements in
            a block whose scale underflowed to 0 became 0, and count as underflow only. With a zero point, elements
            below the least level of their block or above the largest: since the zero point is a whole number, mostly
            one end of each block, by up to half a step.
        codes: elements at each of the :func:`levels` of the cast's grid; see :func:`code_histogram`.
    """

    cast: Cast
    elements: int
    signal: Tensor
    noise: Tensor
    magnitude: Tensor
    growth: Tensor
    nonzero: Tensor
    underflowed: Tensor
    saturated: Tensor
    codes: Tensor

    @property
    def sqnr(self) -> Tensor:
        """dB; see :func:`sqnr`."""
        return sqnr_db(self.signal, self.noise)

    @property
    def mse(self) -> Tensor:
        """In units of x²; see :func:`mse`."""
        return self.noise / self.elements

    @property
    def relative_mse(self) -> Tensor:
        """Relative to the mean square of x; see :func:`mse`."""
        return ratio(self.noise, self.signal)

    @property
    def bias(self) -> Tensor:
        """Relative, negative where magnitudes shrink; see :func:`bias`."""
        return ratio(self.growth, self.magnitude)

    @property
    def underflow(self) -> Tensor:
        """Share of the elements that are not 0; 0 where there are none."""
        return ratio(self.underflowed.to(self.signal), self.nonzero)

    @property
    def saturation(self) -> Tensor:
        """Share of all elements."""
        return self.saturated.to(self.signal) / self.elements

    @property
    def not_finite(self) -> Tensor:
        """Share of all elements that became NaN, since their block holds a NaN or an infinity."""
        return (self.elements - self.codes.sum()).to(self.signal) / self.elements

    def floats(self) -> dict[str, float]:
        """The seven numbers above by name."""
        names = ("sqnr", "mse", "relative_mse", "bias", "underflow", "saturation", "not_finite")
        values = torch.stack([getattr(self, name) for name in names]).tolist()
        return dict(zip(names, values, strict=True))

    def __add__(self, other: "CastStatistics") -> "CastStatistics":
        """The error of both tensors together.

        Raises:
            ValueError: they were quantized by different casts.
        """
        if self.cast != other.cast:
            raise ValueError(f"Errors of one cast add up; got those of {self.cast} and {other.cast}.")
        names = [f.name for f in fields(self) if f.name != "cast"]
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in names})


@torch.no_grad()
def cast_statistics(
    x: Tensor, cast: Cast, dim: int = -1, key: Tensor | int | None = None, amax: Tensor | None = None
) -> CastStatistics:
    """Quantizes a tensor and says what that did to it.

    Args:
        x, cast, dim, key, amax: as in :func:`lightning_lowbit.quantize`.

    Returns:
        Sums on the device of ``x``. A block that holds a NaN or an infinity decodes to NaN: SQNR, MSE and bias are NaN
        then, and its elements count neither as underflow nor as saturation, nor in the histogram.

    Raises:
        ValueError: as in :func:`lightning_lowbit.quantize`.
    """
    quantized = quantize(x, cast, dim, key, amax)
    q = quantized.dequantize()
    ends = _lowest_and_highest(cast)
    low, high = (replace(quantized, codes=torch.full_like(quantized.codes, code)).dequantize() for code in ends)
    signal, noise, magnitude, growth = _sums(x, q)
    return CastStatistics(
        cast=cast,
        elements=x.numel(),
        signal=signal,
        noise=noise,
        magnitude=magnitude,
        growth=growth,
        nonzero=(x != 0).sum(),
        underflowed=((x != 0) & (q == 0)).sum(),
        saturated=(((x < low * (1 + _ULPS)) | (x > high * (1 + _ULPS))) & (low < high)).sum(),
        codes=_count_codes(quantized, q),
    )


def _lowest_and_highest(cast: Cast) -> tuple[int, int]:
    """The codes of the least and the largest level."""
    if cast.scale.statistic == "minmax":
        return 0, 2**cast.format.bits - 1
    low, high = cast.format.encode(torch.tensor([-cast.format.max, cast.format.max])).tolist()
    return low, high
