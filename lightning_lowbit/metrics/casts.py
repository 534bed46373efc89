"""The error of a cast.

With x a tensor and q the values that its codes and scales decode to:

    SQNR          10 log10(Σ x² / Σ (x - q)²)      dB
    relative MSE  Σ (x - q)² / Σ x²                10^(-SQNR / 10)
    bias          Σ (q - x) sign(x) / Σ |x|        below 0 where magnitudes shrink, -1 where all became 0
    underflow     of the elements that are not 0, the share that became 0
    saturation    of all elements, the share outside the range that the scale of their block can express

Everything is computed on the tensor's device, from sums in float64, without waiting for it.
"""

import warnings
from dataclasses import dataclass, fields, replace
from functools import cache

import torch
from torch import Tensor

from lightning_lowbit._torch.devices import wide_dtype
from lightning_lowbit.formats import Format, table
from lightning_lowbit.quant import Cast, Quantized, quantize
from lightning_lowbit.quant.statistics import sqnr_db

# The largest magnitude is a product of scales, each rounded to float32: elements beyond it by so little still fit.
_ULPS = 2.0**-20


def sqnr(x: Tensor, q: Tensor) -> Tensor:
    """Returns the signal to quantization noise ratio, ``10 log10(Σ x² / Σ (x - q)²)`` in dB, 0-d.

    It is infinite where ``x`` equals ``q``; minus infinity where only ``x`` is all zeros; NaN with any NaN or infinity.

    Args:
        x: floating point, any shape.
        q: the quantized values; another shape is a ``ValueError``.
    """
    signal, noise, *_ = _sums(x, q)
    return sqnr_db(signal, noise)


def mse(x: Tensor, q: Tensor, relative: bool = False) -> Tensor:
    """Returns the mean squared error, 0-d: ``Σ (x - q)²`` over the number of elements; ``relative``: over ``Σ x²``.

    Relative, it is 0 where ``x`` equals ``q``. Arguments and NaN are as in :func:`sqnr`; also NaN without elements.
    """
    signal, noise, *_ = _sums(x, q)
    return ratio(noise, signal) if relative else noise / x.numel()


def bias(x: Tensor, q: Tensor) -> Tensor:
    """Returns the mean growth of magnitudes, negative where they shrink: ``Σ (q - x) sign(x) / Σ |x|``, 0-d.

    Grids whose spacing grows with the magnitude, such as E2M1, lose magnitude when they round to nearest, and the loss
    adds up over layers (arXiv 2606.20381). Arguments and NaN are as in :func:`sqnr`; 0 where ``x`` equals ``q``.
    """
    *_, magnitude, growth = _sums(x, q)
    return ratio(growth, magnitude)


def _sums(x: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if x.shape != q.shape:
        raise ValueError(f"A tensor and its quantized self have one shape; got {tuple(x.shape)} and {tuple(q.shape)}.")
    wide = wide_dtype(x.device)
    x, error = x.to(wide), q.to(wide) - x.to(wide)
    return x.square().sum(), error.square().sum(), x.abs().sum(), (error * x.sign()).sum()


def ratio(part: Tensor, whole: Tensor) -> Tensor:
    """Returns ``part / whole``, and 0 where the part is 0, also for 0 / 0."""
    return torch.where(part == 0, 0.0, part / whole)


def levels(format: Format) -> tuple[float, ...]:
    """Returns the values that rounding gives elements of a format, ascending, with one zero: -6.0 to 6.0 for E2M1."""
    return tuple(sorted({value for value in _values(format) if abs(value) <= format.max}))


def code_histogram(quantized: Quantized, normalize: bool = False, **deprecated: bool) -> Tensor:
    """Counts how often each level is used: int64, or float32 shares if normalized.

    The order is that of the :func:`levels` of the cast's grid; with zero points these reach to both sides of them,
    ``-15`` to ``15`` for int4. Codes also count in a block whose scale underflowed to 0, but not where they decode to
    NaN.

    Args:
        quantized: from :func:`lightning_lowbit.quantize`.
        normalize: to a sum of 1. Its old spelling ``normalise`` is deprecated.
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
    """int64 ``[2^bits]``: the index of each code's value among the levels; their number for codes that are no level."""
    place = {value: i for i, value in enumerate(levels(format))}
    return torch.tensor([place.get(value, len(place)) for value in _values(format)], device=device)


def _values(format: Format) -> list[float]:
    return table(format, torch.device("cpu")).tolist()


@dataclass(frozen=True, eq=False)
class CastStatistics:
    """The error of a cast as sums over a tensor, so that statistics of parts can be added: ``left + right``.

    Attributes and properties are 0-d tensors (``codes`` a vector) on the tensor's device; :meth:`floats` waits for it.

    Attributes:
        cast, elements: how the tensor was quantized, and its number of elements.
        signal, noise: ``Σ x²`` and ``Σ (x - q)²``.
        magnitude, growth: ``Σ |x|`` and ``Σ (q - x) sign(x)``.
        nonzero, underflowed: numbers of elements that are not 0, and of nonzero elements that became 0, int64.
        saturated: elements whose magnitude exceeds ``scale * tensor_scale * element.max`` of their block by more than
            float32 rounding of the scales. An E4M3 scale rounded to nearest leaves the largest element of about every
            other block slightly outside. A block whose scale underflowed to 0 counts as underflow only. With a zero
            point: elements outside the levels of their block, mostly at one end and by up to half a step.
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
        """Share of all elements that became NaN because their block holds a NaN or an infinity."""
        return (self.elements - self.codes.sum()).to(self.signal) / self.elements

    def floats(self) -> dict[str, float]:
        """Returns the seven properties above by name, as numbers."""
        names = ("sqnr", "mse", "relative_mse", "bias", "underflow", "saturation", "not_finite")
        values = torch.stack([getattr(self, name) for name in names]).tolist()
        return dict(zip(names, values, strict=True))

    def __add__(self, other: "CastStatistics") -> "CastStatistics":
        """Adds the statistics of two tensors; a ValueError if they were quantized by different casts."""
        if self.cast != other.cast:
            raise ValueError(f"Errors of one cast add up; got those of {self.cast} and {other.cast}.")
        names = [f.name for f in fields(self) if f.name != "cast"]
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in names})


@torch.no_grad()
def cast_statistics(
    x: Tensor, cast: Cast, dim: int = -1, key: Tensor | int | None = None, amax: Tensor | None = None
) -> CastStatistics:
    """Quantizes a tensor and measures the error; arguments and errors are those of :func:`lightning_lowbit.quantize`.

    A block that holds a NaN or an infinity decodes to NaN: SQNR, MSE and bias are then NaN, and its elements count
    neither as underflow nor as saturation, nor in the histogram.
    """
    quantized = quantize(x, cast, dim, key, amax)
    q = quantized.dequantize()
    if cast.scale.statistic == "minmax":
        ends = [0, 2**cast.format.bits - 1]
    else:
        ends = cast.format.encode(torch.tensor([-cast.format.max, cast.format.max])).tolist()
    low, high = (replace(quantized, codes=torch.full_like(quantized.codes, code)).dequantize() for code in ends)
    return CastStatistics(
        cast,
        x.numel(),
        *_sums(x, q),
        nonzero=(x != 0).sum(),
        underflowed=((x != 0) & (q == 0)).sum(),
        saturated=(((x < low * (1 + _ULPS)) | (x > high * (1 + _ULPS))) & (low < high)).sum(),
        codes=_count_codes(quantized, q),
    )
