"""The guards between a gradient and the optimizer that uses it: one clip per element, one for the norm.

The gradients of a step are measured in two passes, so that whole tensors are known before any element is changed:

    maxima      max|g| of each parameter                              one MAX over the ranks that hold parts of it
    squares     Σg² after the clip of the elements, and how many      one SUM
                elements it changed

A NaN or Inf anywhere shows in the maxima, and the step is then not *taken*: every weight of an average and every count
is multiplied by 0, without asking the device. As large as Inf is an element whose square does not fit (9e18 in fp32),
unless a rule for norms brings it down. A parameter that no rank has a gradient of has the maximum −1, and is not taken.

What a device computes, its host cannot know without waiting for it; on a CPU there is nothing to wait for. There, the
scalars of a parameter become Python's numbers, and pieces of a gradient without a spike are not searched for one.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_lowbit.distributed import all_reduce_
from lightning_lowbit.optim import clipping

# Devices whose results the host has at once.
HOST_DEVICES = {"cpu"}

# Squares of gradients within these need no unit to fit fp32; neither does the sum of 2^40 of them.
_SMALL, _LARGE = 1e-12, 1e12

# SpikeClip waits until so many gradients are in the second moment.
SPIKE_CLIP_AFTER = 20


class GradientStatistics(NamedTuple):
    """What the last step saw of one parameter's gradient, whole even if the parameter is sharded; 0-d, on its device.

    Attributes:
        maximum: max|g|, before anything was done; Inf if the step was skipped for it, −1 if no rank has one.
        threshold: T of AdaClip, with this maximum in it; 0 without that rule.
        clipped: elements changed by AdaClip or SpikeClip.
        norm: ‖g‖₂ after that; NaN under no rule, when nobody measures it.
        norm_after: ‖g‖₂ as the optimizer saw it, after AdaGN or GradClip; NaN likewise.
        steps_since_reset: gradients in the moments, this one included.
    """

    maximum: Tensor
    threshold: Tensor
    clipped: Tensor
    norm: Tensor
    norm_after: Tensor
    steps_since_reset: Tensor


class Guards:
    """P parameters with the same options, device, dtype of the statistics and process groups, in one step.

    Args:
        options: of the parameter group.
        device: of the parameters.
        dtype: of the statistics.
        groups: process groups over which each parameter is spread.

    Attributes:
        on_host: whether the host may read results without waiting.
    """

    #: What is remembered of a parameter: t, T, and of AdaGN m, the total weight in it, and v.
    SCALARS: ClassVar[tuple[str, ...]] = ("steps", "threshold", "norm_mean", "norm_mean_weight", "norm_mean_square")
    SUMMED: ClassVar[int] = 1  # how many squares of gradients the optimizer behind the guards adds up

    steps: Tensor  # of these, one for each parameter: [P]
    threshold: Tensor
    norm_mean: Tensor
    norm_mean_weight: Tensor
    norm_mean_square: Tensor

    def __init__(
        self,
        options: Mapping[str, Any],
        device: torch.device,
        dtype: torch.dtype,
        groups: tuple[dist.ProcessGroup, ...] = (),
    ) -> None:
        self.options, self.device, self.dtype, self.groups = options, device, dtype, groups
        self.on_host = device.type in HOST_DEVICES and not torch.compiler.is_compiling()
        self._zero = torch.zeros((), dtype=dtype, device=device)
        self.parameters: list[Tensor] = []
        self.gradients: list[Tensor] = []
        self.states: list[dict[str, Tensor]] = []
        self._has_gradient: list[bool] = []
        self._piece_maxima: list[Tensor] = []
        self._piece_squares: list[list[Tensor | None]] = []

    @classmethod
    def new_scalars(cls, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """Zeros: int64 counts of steps, the rest statistics."""
        return {
            name: torch.zeros((), dtype=torch.int64 if name.startswith("steps") else dtype, device=device)
            for name in cls.SCALARS
        }

    def add(self, parameter: Tensor, part: Tensor, gradient: Tensor | None, state: dict[str, Tensor]) -> None:
        """Adds a parameter.

        Args:
            parameter: as the optimizer was given it.
            part: of it, on this rank.
            gradient: of that part; None where there is none on this rank, which only sharded parameters have.
            state: whose scalars, `SCALARS`, are read and written.
        """
        self.parameters.append(parameter)
        self._has_gradient.append(gradient is not None)
        self.gradients.append(part.new_zeros(()).expand(part.shape) if gradient is None else gradient)
        self.states.append(state)

    def scalars(self, values: Tensor) -> Sequence[Any]:
        """One scalar for each parameter: a number on the host, a 0-d tensor elsewhere."""
        return values.tolist() if self.on_host else values.unbind()

    @property
    def clips_elements(self) -> bool:
        """Whether any element may be changed before the norm is taken."""
        return self.options["element_clip"] is not None

    @property
    def measures_norms(self) -> bool:
        """Whether a second pass over the gradients is needed."""
        return self.clips_elements or self.options["norm_clip"] is not None

    @property
    def norm_eps(self) -> float:
        """ε of AdaGN."""
        return float(self.options["norm_eps"])

    @property
    def largest_usable(self) -> float:
        """The largest element that a gradient may have."""
        rule, limit = self.options["norm_clip"], clipping.largest_root(self.dtype, self.SUMMED)
        is_brought_down = rule == "ada_gn" or (rule == "grad_clip" and self.options["max_norm"] <= limit)
        return torch.finfo(self.dtype).max if is_brought_down else limit

    # --- the first pass ---

    def maxima(self) -> Tensor:
        """max|g| of the parts [1, P]: Inf where the step has to be skipped for it, −1 where there is no gradient."""
        self._piece_maxima, self._piece_squares = [], []
        # While a piece is in the cache. Most are not clipped, and this is then all that the second pass needs.
        sums = self.on_host and self.measures_norms and self.options["element_clip"] != "spike_clip"
        for gradient in self.gradients:
            maxima: list[Tensor] = []
            squares: list[Tensor | None] = []
            for (piece,) in clipping.pieces(gradient):
                maxima.append(clipping.absolute_maximum(piece).to(self.dtype))
                squares.append(clipping.sum_of_squares(piece.to(self.dtype)) if sums else None)
            self._piece_maxima.append(torch.stack(maxima or [self._zero]))
            self._piece_squares.append(squares)
        parts = zip(self._piece_maxima, self._has_gradient, strict=True)
        largest = torch.stack([maxima.amax() if has_gradient else self._zero - 1 for maxima, has_gradient in parts])
        return torch.where(largest <= self.largest_usable, largest, torch.inf).unsqueeze(0)  # NaN is not <=

    def read(self, maxima: Tensor, finite: Tensor) -> None:
        """Takes the maxima of the whole gradients [1, P], and whether all of all parameters are finite (0-d bool)."""
        self.maximum, self.finite = maxima[0], finite
        self.taken = finite & (self.maximum >= 0)
        self.weight = self.taken.to(self.dtype)
        maximum = torch.where(self.taken, self.maximum, 0.0)
        vars(self).update({name: torch.stack([state[name] for state in self.states]) for name in self.SCALARS})
        self.clipped = torch.zeros_like(maximum)
        self.begin()
        if self.options["element_clip"] == "spike_clip":
            waits = self.gradients_averaged < SPIKE_CLIP_AFTER
            factors = torch.where(waits, torch.inf, self.options["spike_threshold"] * self.second_moment_weight())
            self._spike_factors = self.scalars(factors)
        if self.options["element_clip"] == "ada_clip":
            self.threshold.lerp_(maximum, self._averaging(self.options["gamma3"], self.steps))
            self.ratio = clipping.clip_ratio(maximum, self.threshold)
            self._thresholds, self._ratios = self.scalars(self.threshold), self.scalars(self.ratio)
            if self.on_host:
                self._touched = [
                    (piece > threshold).tolist()
                    for piece, threshold in zip(self._piece_maxima, self.threshold, strict=True)
                ]
            maximum = torch.minimum(maximum, self.threshold)
        # Squares are summed in units of the largest element after the clip where they would not fit otherwise.
        fits = (maximum > _SMALL) & (maximum < _LARGE)
        self.unit = torch.where(fits, 1.0, maximum.clamp(min=torch.finfo(self.dtype).tiny))

    def begin(self) -> None:
        """What a step begins with, once it is known which parameters it takes."""

    @property
    def gradients_averaged(self) -> Tensor:
        """How many are in the second moment that SpikeClip compares with, [P]."""
        return self.steps

    def second_moment_weight(self) -> Tensor:
        """What that moment has to be multiplied with to be the paper's v, whose bias is not corrected, [P]."""
        return torch.ones_like(self.weight)

    def _averaging(self, decay: float, steps_before: Tensor) -> Tensor:
        return self.weight * clipping.averaging_weight(decay, steps_before, self.dtype)

    # --- the second pass ---

    def may_clip(self, parameter: int, piece: int) -> bool:
        """Whether elements of a piece may be changed, as far as the host knows."""
        if self.options["element_clip"] == "ada_clip" and self.on_host:
            return bool(self._touched[parameter][piece])
        return self.clips_elements

    def clip(
        self, gradient: Tensor, parameter: int, piece: int, mean_square: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """A piece of a gradient after the clip of its elements, in the dtype of the statistics.

        Args:
            gradient: the piece.
            parameter, piece: which one it is.
            mean_square: v of SpikeClip, of the piece's elements.

        Returns:
            A new tensor, and one that is 0 where nothing was changed; or the gradient itself, and None.
        """
        wide = gradient.to(self.dtype)
        if not self.may_clip(parameter, piece):
            return wide, None
        if self.options["element_clip"] == "ada_clip":
            above = clipping.spikes(wide, self._thresholds[parameter])
            return clipping.ada_clip(wide, above, self._ratios[parameter]), above
        assert mean_square is not None
        clipped = clipping.spike_clip(wide, mean_square, self._spike_factors[parameter])
        return clipped, clipped - wide

    def adapted(
        self, gradient: Tensor, parameter: int, piece: int, factor: Any, mean_square: Tensor | None = None
    ) -> Tensor:
        """A piece of a gradient as it leaves the guards, a new tensor; arguments as for `clip`."""
        clipped, changed = self.clip(gradient, parameter, piece, mean_square)
        return clipped * factor if changed is None else clipped.mul_(factor)

    def squares(self) -> Tensor:
        """Σg² of the parts after the clip, in units of `unit`², and how many elements were changed: [2, P]."""
        columns = []
        for index, (gradient, unit) in enumerate(zip(self.gradients, self.scalars(self.unit), strict=True)):
            squares, counts = [self._zero], [self._zero]
            for number, (piece, mean_square) in enumerate(self.measured_pieces(index, gradient)):
                known = self._piece_squares[index][number]
                if known is not None and unit == 1 and not self.may_clip(index, number):
                    squares.append(known)
                    continue
                clipped, changed = self.clip(piece, index, number, mean_square)
                squares.append(clipping.sum_of_squares(clipped if self.on_host and unit == 1 else clipped / unit))
                if changed is not None:
                    counts.append(torch.count_nonzero(changed))
            columns.append(torch.stack([torch.stack(squares).sum(), torch.stack(counts).sum().to(self.dtype)]))
        return torch.stack(columns, dim=1)

    def measured_pieces(self, index: int, gradient: Tensor) -> Any:
        """Pieces of a gradient, each with v of SpikeClip or None."""
        return ((piece, None) for (piece,) in clipping.pieces(gradient))

    def read_squares(self, sums: Tensor) -> None:
        """Takes what `squares` gives, of the whole gradients."""
        squares, self.clipped = torch.where(self.taken, sums, 0.0)
        self.norm_in_units = squares.sqrt()
        self.norm = (self.norm_in_units * self.unit).clamp_(max=torch.finfo(self.dtype).max)

    # --- what becomes of the norms ---

    def factors(self, total_norm: Tensor | None) -> Tensor:
        """What gradients are multiplied with after the clip [P]; the averages of norms take these norms in.

        Args:
            total_norm: of all gradients under GradClip, 0-d.
        """
        options = self.options
        if options["norm_clip"] == "ada_gn":
            decay = options["gamma1"] * self.decay_factor()
            weight, total = clipping.growing_weight(1 - decay, self.norm_mean_weight)
            self.norm_mean_weight = torch.where(self.taken, total, self.norm_mean_weight)
            norm = self.norm.clamp(max=clipping.largest_root(self.dtype))  # one above counts as that: n² has to fit
            self.norm_mean.lerp_(norm, self.weight * weight)
            self.norm_mean_square.lerp_(norm.square(), self._averaging(options["gamma2"], self.steps))
            ratio = clipping.norm_ratio(self.norm_in_units, self.norm_mean, self.norm_mean_square, self.norm_eps)
            factor = (ratio / self.unit).clamp_(max=torch.finfo(self.dtype).max)
        elif options["norm_clip"] == "grad_clip":
            assert total_norm is not None
            factor = (options["max_norm"] / (total_norm + 1e-6)).clamp(max=1.0).expand_as(self.maximum)
        else:
            factor = torch.ones_like(self.maximum)
        if self.measures_norms:
            self.norm_after = self.norm * factor
        return factor

    def decay_factor(self) -> Tensor | float:
        """What γ1 and β1 are multiplied with in this step: [P], or 1."""
        return 1.0

    def finish(self) -> None:
        """Counts the step and writes the scalars back."""
        self.steps += self.taken
        for name in self.SCALARS:
            torch._foreach_copy_([state[name] for state in self.states], list(getattr(self, name).unbind()))

    def statistics(self) -> dict[Tensor, GradientStatistics]:
        """What this step saw, by parameter."""
        nothing = torch.full_like(self.maximum, torch.nan)
        since = getattr(self, "steps_since_reset", self.steps)
        norms = (getattr(self, "norm", nothing), getattr(self, "norm_after", nothing))
        columns = (self.maximum, self.threshold, self.clipped, *norms, since)
        rows = zip(*(column.unbind() for column in columns), strict=True)
        return {p: GradientStatistics(*row) for p, row in zip(self.parameters, rows, strict=True)}

    def forget_gradients(self) -> None:
        """Lets go of the gradients: what is left are statistics."""
        self.gradients, self.states, self._piece_maxima, self._piece_squares = [], [], [], []


def measure(batches: Sequence[Guards]) -> list[Tensor]:
    """Both passes over the gradients of a step.

    Two collectives for each process group, however many parameters and batches there are; the second only if a norm
    is needed.

    Returns:
        For each batch what its gradients are multiplied with after the clip, [P].
    """
    groups = [batch.groups for batch in batches]
    local_maxima = [batch.maxima() for batch in batches]
    # Rides through every group, so that a rank skips the step for a gradient of which it has no part.
    largest = torch.cat([rows[0].to(local_maxima[0].device) for rows in local_maxima]).amax()
    every_group = tuple(dict.fromkeys(chain.from_iterable(groups)))
    *maxima, largest = all_reduce_([*local_maxima, largest], [*groups, every_group], dist.ReduceOp.MAX)
    finite = largest.isfinite()
    for batch, rows in zip(batches, maxima, strict=True):
        batch.read(rows, finite.to(batch.device))
    normed = [batch for batch in batches if batch.measures_norms]
    squares = all_reduce_([batch.squares() for batch in normed], [batch.groups for batch in normed], dist.ReduceOp.SUM)
    for batch, sums in zip(normed, squares, strict=True):
        batch.read_squares(sums)
    clipped = [batch.norm for batch in normed if batch.options["norm_clip"] == "grad_clip"]
    total = clipping.norm_of(torch.cat([norms.to(clipped[0].device) for norms in clipped])) if clipped else None
    return [batch.factors(None if total is None else total.to(batch.device)) for batch in batches]
