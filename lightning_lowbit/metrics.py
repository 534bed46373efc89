"""Numbers that tell how a run went, and what a cast makes of a tensor.

With x a tensor and q what its codes and scales decode to:

    SQNR          10 log10(Σ x² / Σ (x - q)²)      dB
    relative MSE  Σ (x - q)² / Σ x²                10^(-SQNR / 10)
    bias          Σ (q - x) sign(x) / Σ |x|        below 0 where magnitudes shrink, -1 where all became 0
    underflow     of the elements that are not 0, the share that became 0
    saturation    of all elements, the share beyond the largest magnitude that the scale of their block can express

With h = (w1ᵀx) Swish(w2ᵀx) a channel of a SwiGLU, w1 a row of its up projection and w2 one of its gate projection:

    cosine        |w1ᵀw2| / (‖w1‖ ‖w2‖)            1 where both branches see one projection of x, and h its square
    gate norm     ‖w2‖                             grows before the cosine does
    active        of the tokens x, the share with |w2ᵀx| > 1

Everything is computed where the tensor lies, from sums in float64 (a SwiGLU's in float32), and nothing waits for a
device.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import cache
from math import inf, isfinite
from statistics import median

import torch
from torch import Tensor

from lightning_lowbit.formats import Format, table
from lightning_lowbit.quant import Cast, Quantized, largest, quantize

# A largest magnitude is a product of scales, each rounded to float32: elements that it misses by so little fit.
_ULPS = 2.0**-20

# Rows of weights, and tokens, that are float32 at one time: at 4096 columns 16 MiB each, and enough to fill a GPU.
_ROWS = 1024


# --- a tensor and its quantised self ----------------------------------------------------------------------------------


def sqnr(x: Tensor, q: Tensor) -> Tensor:
    """Signal to quantisation noise ratio: ``10 log10(Σ x² / Σ (x - q)²)``.

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
    return _decibels(signal, noise)


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
    return _ratio(noise, signal) if relative else noise / x.numel()


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
    return _ratio(growth, magnitude)


def _sums(x: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Σ x², Σ (x - q)², Σ |x| and Σ (q - x) sign(x)."""
    if x.shape != q.shape:
        raise ValueError(
            f"The error of a tensor needs that tensor in two versions of one shape; got {tuple(x.shape)} and "
            f"{tuple(q.shape)}."
        )
    wide = torch.float32 if x.device.type == "mps" else torch.float64  # which Apple's GPUs lack
    x, error = x.to(wide), q.to(wide) - x.to(wide)
    return x.square().sum(), error.square().sum(), x.abs().sum(), (error * x.sign()).sum()


def _decibels(signal: Tensor, noise: Tensor) -> Tensor:
    return torch.where(noise == 0, inf, 10 * torch.log10(signal / noise))


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    return torch.where(part == 0, 0.0, part / whole)


# --- codes ------------------------------------------------------------------------------------------------------------


def levels(format: Format) -> tuple[float, ...]:
    """The values that elements of a format take, ascending: ``-6.0`` to ``6.0`` for E2M1, with one zero.

    Codes that rounding never gives are no levels: NaNs, infinities, and the lowest integer, which has no opposite.
    """
    return tuple(sorted({value for value in _values(format) if abs(value) <= format.max}))


def code_histogram(quantized: Quantized, normalise: bool = False) -> Tensor:
    """How often each level is used.

    Args:
        quantized: from :func:`lightning_lowbit.quantize`.
        normalise: to a sum of 1.

    Returns:
        int64 counts (float32 shares if normalised) in the order of :func:`levels`. Codes count as they are stored, also
        in a block whose scale underflowed to 0. Elements that decode to NaN are left out.
    """
    counts = _count_codes(quantized, quantized.dequantize())
    return _ratio(counts, counts.sum()) if normalise else counts


def _count_codes(quantized: Quantized, decoded: Tensor) -> Tensor:
    format, device = quantized.cast.format, quantized.codes.device
    size = len(levels(format))
    places = torch.where(decoded.isnan(), size, _places(format, device)[quantized.codes.long()]).flatten()
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
        cast: how the tensor was quantised.
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
            a block whose scale underflowed to 0 became 0, and count as underflow only.
        codes: elements at each of the :func:`levels` of the element format; see :func:`code_histogram`.
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
        return _decibels(self.signal, self.noise)

    @property
    def mse(self) -> Tensor:
        """In units of x²; see :func:`mse`."""
        return self.noise / self.elements

    @property
    def relative_mse(self) -> Tensor:
        """Relative to the mean square of x; see :func:`mse`."""
        return _ratio(self.noise, self.signal)

    @property
    def bias(self) -> Tensor:
        """Relative, negative where magnitudes shrink; see :func:`bias`."""
        return _ratio(self.growth, self.magnitude)

    @property
    def underflow(self) -> Tensor:
        """Share of the elements that are not 0; 0 where there are none."""
        return _ratio(self.underflowed.to(self.signal), self.nonzero)

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
            ValueError: they were quantised by different casts.
        """
        if self.cast != other.cast:
            raise ValueError(f"Errors of one cast add up; got those of {self.cast} and {other.cast}.")
        names = [f.name for f in fields(self) if f.name != "cast"]
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in names})


@torch.no_grad()
def cast_statistics(
    x: Tensor, cast: Cast, dim: int = -1, key: Tensor | int | None = None, amax: Tensor | None = None
) -> CastStatistics:
    """Quantises a tensor and says what that did to it.

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
    top = int(cast.format.encode(torch.tensor(cast.format.max)))
    largest = replace(quantized, codes=torch.full_like(quantized.codes, top)).dequantize()
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
        saturated=((x.abs() > largest * (1 + _ULPS)) & (largest > 0)).sum(),
        codes=_count_codes(quantized, q),
    )


# --- a SwiGLU ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class SwiGLUAlignment:
    """How close each channel of a SwiGLU is to squaring one projection of its input; from :func:`swiglu_alignment`.

    Attributes:
        cosine: ``|cos(w1, w2)|``, float32 ``[hidden]``, from 0 to 1; NaN where one of the rows holds a NaN or an
            infinity, else 0 where one is all zeros. Rows of independent normal numbers have about ``0.8 / sqrt(in)``.
        gate_norm: ``‖w2‖``, float32 ``[hidden]``, in units of the weight; NaN where the row holds a NaN or an infinity.
        active: share of tokens with ``|w2ᵀx| > 1``, float32 ``[hidden]``; NaN where one of these products is NaN, and
            of no tokens. None without tokens to look at.
    """

    cosine: Tensor
    gate_norm: Tensor
    active: Tensor | None


@torch.no_grad()
def swiglu_alignment(gate_weight: Tensor, up_weight: Tensor, x: Tensor | None = None) -> SwiGLUAlignment:
    """Which channels of a SwiGLU make outliers, or are about to.

    A channel is ``(w1ᵀx) Swish(w2ᵀx)``: w1, a row of the up projection, is its linear branch; w2, a row of the gate
    projection, that of Swish. Where w1 = ±w2 both are large at the same tokens, and the channel gives about
    ``±(w2ᵀx)²`` where its gate is open. If the sigmoid in Swish is flat at all tokens, ``σ'(w2ᵀx) → 0``, training with
    ℓ2 regularisation, however weak, comes to rest at w1 = ±w2 and nowhere else (Scaling FP8 Training to Trillion-Token
    LLMs, arXiv 2409.12517, theorem 1). What that looks like in Llama2 7B (section 4.3 there): ``‖w2‖`` of a few
    channels grows; their cosine, long low, rises steeply between 125 and 210 billion tokens; FP8 training diverges.
    Mostly w1 and w2 pointed the same way, in some channels opposite ways. At about 99 % of the tokens an outlier
    channel was active (section 4.2), which is a lenient mark of flatness: ``σ'`` is 0.25 at 0, 0.20 at 1, 0.02 at 4.

    Args:
        gate_weight: of ``gate_proj``, floating point, ``[hidden, in]``, as ``nn.Linear`` has it.
        up_weight: of ``up_proj``, same shape.
        x: what both projections get, floating point, ``[..., in]``; None leaves ``active`` out.

    Returns:
        Per channel, on the device of the weights; see :class:`SwiGLUAlignment`. The computation is in float32, also
        under autocast, its matrix product ``w2ᵀx`` as precise as ``torch.set_float32_matmul_precision`` says. Biases
        are left out. No more than 1024 rows of a weight, and as many tokens, are copied to float32 at a time.

    Raises:
        ValueError: the weights are not matrices of one shape, or ``x`` does not fit them.
    """
    if gate_weight.dim() != 2 or gate_weight.shape != up_weight.shape:
        raise ValueError(
            "The alignment of a SwiGLU needs the weights of its gate and up projection, both [hidden, in]; got "
            f"{tuple(gate_weight.shape)} and {tuple(up_weight.shape)}. Pass those of one MLP: split a fused weight, "
            "and transpose those of Conv1D."
        )
    if x is not None and x.shape[-1:] != gate_weight.shape[1:]:
        raise ValueError(
            f"x needs {gate_weight.shape[1]} columns, [..., in], for weights {tuple(gate_weight.shape)}; got "
            f"{tuple(x.shape)}. Pass what enters the gate projection, and transpose the weights of Conv1D."
        )
    device = gate_weight.device.type
    tokens = None if x is None else x.reshape(x.shape[:-1].numel(), x.shape[-1])
    cosines, norms, shares = list[Tensor](), list[Tensor](), list[Tensor]()
    # The meta device has no autocast, and torch refuses to turn off what is not there.
    with torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext():
        for gate, up in zip(torch.split(gate_weight, _ROWS), torch.split(up_weight, _ROWS), strict=True):
            gate = gate.float()
            w2, gate_size = _direction(gate)
            w1, _ = _direction(up.float())
            size1, size2 = torch.linalg.vector_norm(w1, dim=1), torch.linalg.vector_norm(w2, dim=1)
            cosines.append(_ratio((w1 * w2).sum(1).abs(), size1 * size2).clamp(max=1))
            norms.append(gate_size * size2)
            if tokens is not None:
                shares.append(_active(gate, tokens))
    return SwiGLUAlignment(torch.cat(cosines), torch.cat(norms), None if tokens is None else torch.cat(shares))


def _direction(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows over their largest magnitudes, and these: squares of what is left neither overflow nor all underflow."""
    size = largest(rows, 1)
    return rows / torch.where(size == 0, 1.0, size), size.squeeze(1)


def _active(gate: Tensor, tokens: Tensor) -> Tensor:
    """Share of tokens ``[n, in]`` that a row of ``gate``, float32 ``[hidden, in]``, takes beyond 1: ``[hidden]``."""
    count = gate.new_zeros(len(gate))
    for part in torch.split(tokens, _ROWS):
        z = part.float() @ gate.t()
        count += torch.where(z.isnan(), z, (z.abs() > 1).to(z)).sum(0)
    return count / len(tokens)


# --- a run ------------------------------------------------------------------------------------------------------------


def count_spikes(losses: Sequence[float], window: int = 20, threshold: float = 6.0) -> int:
    """How often a loss jumped.

    A value is a spike when it is not finite, or lies more than ``threshold`` robust standard deviations above the
    median of the ``window`` values before it; a run of such values is one spike. The robust standard deviation is
    1.4826 times the median absolute deviation, which spikes among those values hardly move; a loss that stays high is
    the new normal after half a window.

    Args:
        losses: training losses in nats, in the order of steps.
        window: values to compare with; those before the first full window are no spikes unless not finite.
        threshold: in standard deviations.

    Raises:
        ValueError: window is less than 2, or threshold is not positive.
    """
    if window < 2 or not threshold > 0:
        raise ValueError(f"window must be at least 2 and threshold positive; got {window} and {threshold}.")
    spikes, before, in_spike = 0, list[float](), False
    for loss in losses:
        jumped = not isfinite(loss)
        if not jumped and len(before) >= window:
            center = median(before[-window:])
            deviation = 1.4826 * median(abs(value - center) for value in before[-window:])
            deviation = max(deviation, abs(center) / 512)  # losses rounded to bfloat16 often are one number
            jumped = loss > center + threshold * deviation
        spikes += jumped and not in_spike
        in_spike = jumped
        if isfinite(loss):
            before.append(loss)
    return spikes
