"""Learning-rate schedules: a linear warm-up, then a decay that ends with the run.

Step t = 0 … T - 1 of T, with w warm-up steps, has f(t) times the peak, the optimizer's learning rate:

    t < w     f = (t + 1) / w
    t >= w    f = e + (1 - e) (1 + cos πp) / 2     p = (t - w) / (T - w)     WarmupCosine, e is the last factor
              f = (1 - p) s                        s = 1, from half-way 2/3  TwoStageLinear

No step has a learning rate of zero: p reaches 1 one step after the last. A share of the run, such as 0.1, warms up for
w = round(0.1 T) steps.
"""

import inspect
import math
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


class WarmupSchedule(LambdaLR):
    """A linear warm-up, then a decay that the subclass defines in :meth:`decay`; see its subclasses for the arguments.

    A subclass sets its own arguments, as attributes of the same names, before it calls this constructor.

    Raises:
        ValueError: the warm-up is negative, leaves no step to the decay, or is neither a whole number of steps nor a
            share. In the second step: it is a share of an unknown length.
    """

    warmup: float
    """Optimizer steps of the warm-up; infinite while it is a share of an unknown length."""

    def __init__(self, optimizer: Optimizer, warmup_steps: int | float, total_steps: int | None = None) -> None:
        self.warmup_steps = warmup_steps
        self.set_total_steps(math.inf if total_steps is None else total_steps)
        super().__init__(optimizer, self._factor)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position only; a resumed run takes all arguments from its own configuration."""
        shape = {*inspect.signature(type(self)).parameters, "warmup"}
        return {name: value for name, value in super().state_dict().items() if name not in shape}

    def set_total_steps(self, total_steps: float) -> None:
        is_share = 0 < self.warmup_steps < 1
        if not 0 <= self.warmup_steps < total_steps or not (is_share or self.warmup_steps == int(self.warmup_steps)):
            raise ValueError(
                f"warmup_steps must be at least 0 and less than the {total_steps} steps of the run; got "
                f"{self.warmup_steps}. Warm up for fewer steps. A number below 1, such as 0.1, is a share of them."
            )
        self.total_steps = total_steps
        self.warmup = self.warmup_steps
        if is_share:
            self.warmup = math.inf if total_steps == math.inf else round(self.warmup_steps * total_steps)
            if hasattr(self, "lr_lambdas"):  # the first learning rate was set before the length was known
                self._update_rates()

    def _update_rates(self) -> None:
        for group, peak in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            rate = peak * self._factor(self.last_epoch)
            group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], Tensor) else rate
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def decay(self, step: int, progress: float) -> float:
        """Learning rate over the peak at ``step``; ``progress`` is 0 after the warm-up and 1 at the end."""
        raise NotImplementedError(f"{type(self).__name__} does not say how its learning rate decays.")

    def _factor(self, step: int) -> float:
        if self.warmup == math.inf and step > 0:
            raise ValueError(
                f"warmup_steps is a share, {self.warmup_steps}, of a run whose length is not known: give total_steps, "
                "or the warm-up as a whole number of steps."
            )
        if step < self.warmup:
            return (step + 1) / self.warmup
        return self.decay(step, min(1.0, (step - self.warmup) / (self.total_steps - self.warmup)))


class WarmupCosine(WarmupSchedule):
    """Raises the learning rate linearly over ``warmup_steps``, then lowers it along half a cosine.

    From step ``total_steps`` on it stays at ``final_fraction`` of the peak.

    Args:
        optimizer: its learning rates are the peak.
        warmup_steps: optimizer steps until the peak; 0 starts there. A number below 1 is a share of all steps.
        total_steps: optimizer steps of the whole run; with None, ``CausalLM`` fills in those of its Trainer.
        final_fraction: last learning rate over the peak.

    Raises:
        ValueError: the warm-up is negative or leaves no step to the cosine, or ``final_fraction`` is not in [0, 1].
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_steps: int | float,
        total_steps: int | None = None,
        final_fraction: float = 0.1,
    ) -> None:
        if not 0 <= final_fraction <= 1:
            raise ValueError(f"final_fraction is the last learning rate over the peak, 0 to 1; got {final_fraction}.")
        self.final_fraction = final_fraction
        super().__init__(optimizer, warmup_steps, total_steps)

    def decay(self, step: int, progress: float) -> float:
        return self.final_fraction + (1 - self.final_fraction) * (1 + math.cos(math.pi * progress)) / 2


class TwoStageLinear(WarmupSchedule):
    """BitNet b1.58's schedule: a linear warm-up, and a linear decay toward zero that drops half-way to a lower peak.

    Ternary weights need a high learning rate to change at all, and settle in the second stage. Weight decay ends at the
    same step, see :class:`lightning_lowbit.WeightDecaySwitch`.

    Source: "The Era of 1-bit LLMs: Training Tips, Code and FAQ" (microsoft/unilm): warm-up for 375 of 100 000 steps,
    peaks of 1.5e-3 and 1e-3 with 700M parameters, 1.2e-3 and 8e-4 with 1.3B and 3.9B. BitNet b1.58 2B4T (arXiv
    2504.12285, section 3.1) makes each stage a cosine.

    Args:
        optimizer: its learning rates are the peak of the first stage.
        warmup_steps: optimizer steps until the peak; 0 starts there. A number below 1 is a share of all steps.
        total_steps: optimizer steps of the whole run; with None, ``CausalLM`` fills in those of its Trainer.
        second_peak: the peak of the second stage over that of the first.
        at: start of the second stage, as a fraction of all optimizer steps.

    Raises:
        ValueError: the warm-up is negative or not over when the second stage starts, the first stage has no step,
            ``second_peak`` is not in (0, 1], or ``at`` not in (0, 1).
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_steps: int | float,
        total_steps: int | None = None,
        second_peak: float = 2 / 3,
        at: float = 0.5,
    ) -> None:
        if not 0 < second_peak <= 1:
            raise ValueError(
                f"second_peak is a fraction of the first peak, above 0 and at most 1; got {second_peak}. For 1e-3 "
                "after 1.5e-3 give 0.667."
            )
        if not 0 < at < 1:
            raise ValueError(f"at is a fraction of all optimizer steps, between 0 and 1, both excluded; got {at}.")
        self.second_peak, self.at = second_peak, at
        super().__init__(optimizer, warmup_steps, total_steps)

    @property
    def second_stage(self) -> float:
        """The first step of the second stage, rounded like ``at`` of callbacks."""
        return math.inf if self.total_steps == math.inf else round(self.at * self.total_steps)

    def set_total_steps(self, total_steps: float) -> None:
        super().set_total_steps(total_steps)
        if self.second_stage < max(1, self.warmup):
            raise ValueError(
                f"The second stage starts at step {self.second_stage} of {total_steps}, but the first has to last for "
                f"its warm-up of {self.warmup} steps, and for one at least. Warm up for fewer steps, or raise at."
            )

    def decay(self, step: int, progress: float) -> float:
        return (1 - progress) * (1 if step < self.second_stage else self.second_peak)
