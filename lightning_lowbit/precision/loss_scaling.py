"""Optimizer steps in fp16: unscale_ -> (hooks, clipping) -> step -> update. Skipped steps count as steps everywhere."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import LBFGS, SGD, Optimizer

from lightning_lowbit._lightning import MisconfigurationException, Precision, rank_zero_info
from lightning_lowbit._torch import (
    current_scale,
    forget_optimizer,
    forget_optimizers,
    mark_stepped,
    unscales_in_step,
    version,
    without,
)
from lightning_lowbit.distributed import local
from lightning_lowbit.precision.grad_scalers import ConservativeGradScaler, overflow, share_overflow
from lightning_lowbit.precision.run_settings import ComputeDtype


def scaler_for(compute: ComputeDtype, scaler: GradScaler | None) -> GradScaler | None:
    """Returns the scaler for a dtype: a given one, or the default; None except in fp16. Raises ``ValueError``."""
    if compute.name != "fp16":
        if scaler is not None:
            name = "auto" if compute.is_auto else compute.name
            raise ValueError(
                f"A scaler of the loss is for compute_dtype='fp16'; got {name!r}, which has the range of "
                f"float32: leave out scaler={type(scaler).__name__}, or train in fp16."
            )
        return None
    if scaler is None:
        return ConservativeGradScaler()
    if not isinstance(scaler, GradScaler):
        raise ValueError(f"scaler is a torch.amp.GradScaler, or None; got {scaler!r}.")
    if not scaler.is_enabled():
        raise ValueError(
            f"The scaler {type(scaler).__name__} is disabled, and fp16 needs one. torch disables one for CUDA where "
            "there is none: give device='cpu'; or leave out enabled=False."
        )
    return scaler


def scaler_of(plugin: Precision) -> GradScaler | None:
    """Returns the enabled loss scaler of a precision plugin, of this package or Lightning; None if there is none."""
    scaler = getattr(plugin, "scaler", None)
    return scaler if isinstance(scaler, GradScaler) and scaler.is_enabled() else None


class LossScaling:
    """A loss scaler in use; ``skipped_steps`` (0-d int64, on the device) counts steps with a non-finite gradient."""

    def __init__(self, scaler: GradScaler) -> None:
        self.scaler = scaler
        self._first = scaler.state_dict()
        self.skipped_steps = torch.tensor(0, device="cpu")
        self._has_stepped = False  # since the last update
        self._unscaled: list[Optimizer] = []  # whose gradients were unscaled, and have not been used yet
        self._versions: list[list[Any]] = []  # of their gradients before a backward pass

    def restart(self) -> None:
        """Resets the scaler for another run; the last one may have failed during a step."""
        self.load_state_dict({"scaler": self._first})
        forget_optimizers(self.scaler)
        self._has_stepped, self._unscaled = False, []

    def check(self, model: nn.Module, strategy: str) -> None:
        """Refuses sharded scalers without a process group, and float16 parameters, which torch does not unscale."""
        if isinstance(self.scaler, ShardedGradScaler):
            if not (dist.is_available() and dist.is_initialized()):
                raise MisconfigurationException(
                    f"{type(self.scaler).__name__} needs a process group, and {strategy} has none. Use a class that is "
                    "not sharded, such as ConservativeGradScaler: the plugin asks all ranks itself."
                )
            return
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.dtype == torch.float16:
                raise ValueError(
                    f"compute_dtype='fp16' trains parameters in float32, and {name} is in float16, too coarse for an "
                    "optimizer's steps. Call model.float() before training."
                )

    def unscale_(self, optimizer: Optimizer, device: torch.device, over_ranks: bool) -> None:
        """Divides the gradients by the scale, also for fused optimizers; ``over_ranks``: all ranks must call this."""
        if isinstance(optimizer, LBFGS):
            advice = "train it with compute_dtype='bf16' or 'fp32', or use another optimizer"
            raise MisconfigurationException(f"LBFGS computes losses within its step, which no scale reaches: {advice}.")
        if overflow(self.scaler, optimizer) is not None:  # already unscaled: clipping in manual optimization
            return
        if current_scale(self.scaler) is None:  # no loss has been scaled yet
            self.scaler.scale(torch.zeros((), device=device))
        self.scaler.unscale_(optimizer)
        share_overflow(self.scaler, optimizer, device, over_ranks)
        self._unscaled.append(optimizer)

    def before_backward(self, over_ranks: bool) -> None:
        """Forgets unscaled gradients that were cleared instead of used; ``over_ranks``: all ranks must call this."""
        for optimizer in [*self._unscaled]:
            if not _has_gradients(optimizer, over_ranks):
                forget_optimizer(self.scaler, optimizer)
                self._unscaled.remove(optimizer)
        self._versions = [_versions(optimizer) for optimizer in self._unscaled]

    def after_backward(self) -> None:
        """Raises ``MisconfigurationException`` if scaled gradients were added to unscaled ones."""
        for optimizer, before in zip(self._unscaled, self._versions, strict=True):
            if _versions(optimizer) != before:
                raise MisconfigurationException(
                    f"In fp16 clip_gradients divides the gradients of {type(optimizer).__name__} by the loss scale, "
                    "and this backward pass added scaled ones to them. Call step() or zero_grad() between "
                    "clip_gradients and the next manual_backward; or accumulate first, and clip after the last one."
                )

    def step(self, optimizer: Any, **kwargs: Any) -> Any:
        self._has_stepped = True
        self._unscaled = [other for other in self._unscaled if other is not optimizer]
        skipped = overflow(self.scaler, optimizer)
        assert skipped is not None
        self.skipped_steps = self.skipped_steps.to(skipped.device, non_blocking=True) + skipped
        # torch would warn if the first step is skipped: schedules count skipped steps on purpose.
        mark_stepped(optimizer)
        # After a skipped first step, fused SGD would use uninitialized memory as momentum. So the host waits for the
        # overflow flag until there is a momentum, as it does for optimizers that are not fused.
        if isinstance(optimizer, SGD) and unscales_in_step(optimizer) and not optimizer.state and skipped:
            return None
        return self.scaler.step(optimizer, **kwargs)

    def update(self) -> None:
        """Updates the scale after all optimizers stepped, if any has."""
        if self._has_stepped:  # gradients may be unscaled for clipping before the step
            self._has_stepped = False
            with without(self.scaler, self._unscaled):
                self.scaler.update()

    @property
    def scale(self) -> float | Tensor:
        """The factor of the loss: 0-d, on the device; a number until a loss has been scaled."""
        scale = current_scale(self.scaler)
        return self.scaler.get_scale() if scale is None else scale

    def state_dict(self) -> dict[str, Any]:
        return {"scaler": self.scaler.state_dict(), "skipped_steps": int(self.skipped_steps)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.skipped_steps = torch.tensor(state.get("skipped_steps", 0), device="cpu")
        if "scaler" in state:
            self.scaler.load_state_dict(state["scaler"])

    def report(self, steps: int) -> None:
        with suppress(RuntimeError):  # a failed device cannot be read
            if skipped := int(self.skipped_steps):
                rank_zero_info(
                    f"{skipped} of {steps} optimizer steps were skipped, since a gradient was not finite in fp16; "
                    "global_step and learning-rate schedules have counted them. LossScaleMonitor shows when."
                )


def _gradients(optimizer: Optimizer) -> list[Tensor | None]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [None if parameter.grad is None else local(parameter.grad) for parameter in parameters]


def _versions(optimizer: Optimizer) -> list[Any]:
    return [None if gradient is None else version(gradient) for gradient in _gradients(optimizer)]


def _has_gradients(optimizer: Optimizer, over_ranks: bool) -> bool:
    """Returns whether a gradient is not None or zero, here or on another rank; the host waits only if some are left."""
    here = any(bool(gradient.any()) for gradient in _gradients(optimizer) if gradient is not None)
    if not over_ranks:
        return here
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, here)
    return any(everywhere)
