"""Ends the oscillation of latent weights around rounding thresholds (OsciReset of TetraJet-v2).

The measure is Σ |q_t - q_{t-1}| / Σ |w_t - w_{t-1}| over a window of optimizer steps, of a latent weight w and its
quantized value q. Near a threshold, q jumps between two levels while w hardly moves.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_lowbit._lightning import LightningModule, MisconfigurationException, Trainer, logger_step
from lightning_lowbit.callbacks.base import LowBitCallback
from lightning_lowbit.callbacks.monitors.latent_weights import LatentWeight, latent_weights, nearest_cast, whole_layers
from lightning_lowbit.checks import integer, number
from lightning_lowbit.metrics import flipped
from lightning_lowbit.nn import QuantizedLayer
from lightning_lowbit.precision.run_settings import compute_dtype
from lightning_lowbit.saved_state import OneOf, shown

_QUANTITY = "reset/fprop_w"  # the share of reset elements, by layer


@dataclass
class _Paths:
    """The paths of the elements of a weight in a window, all ``[out_features, in_features]``; sums are float32."""

    last: Tensor
    latent: Tensor
    quantized: Tensor

    @classmethod
    def begin(cls, matrix: Tensor) -> "_Paths":
        return cls(matrix.clone(), *(torch.zeros_like(matrix, dtype=torch.float32) for _ in range(2)))

    def add_(self, matrix: Tensor, weight: LatentWeight) -> None:
        before, after = weight._replace(values=self.last.to(weight.values.dtype)).quantize(), weight.quantize()
        jump = (after.dequantize() - before.dequantize()).abs_()
        self.quantized += jump.where(flipped(before, after), 0)  # a change of the scale alone does not count as a jump
        self.latent += (matrix.float() - self.last.float()).abs_()
        self.last.copy_(matrix)

    def oscillating(self, threshold: float) -> Tensor:
        return (self.latent > 0) & (self.quantized >= threshold * self.latent)


def _is_path(value: object) -> bool:
    """a matrix of floating-point numbers"""
    return isinstance(value, Tensor) and value.dim() == 2 and value.is_floating_point()


class OsciReset(LowBitCallback):
    """Sets latent weights that oscillate between two levels to the center of their bin.

    In windows of ``window`` optimizer steps it adds up, for each element of every weight that is rounded to nearest,
    the movements of the latent weight and the jumps of its quantized value. Elements whose jumps add up to
    ``threshold`` times their movement are set to their quantized value; the optimizer's moments stay. It logs the share
    of these elements as ``reset/fprop_w/<layer>``. Weights that are computed from others, as by pruning, are left out.

    The defaults are the authors' for 70 and 150 million parameters in NVFP4
    (github.com/thu-ml/TetraJet-v2-NVFP4Training), except ``start``: they begin at 60 to 70 % of a run. A window takes
    two float32 tensors, which a checkpoint keeps, and a copy of each weight, and two quantizations of it per step. See
    ``docs/guides/callbacks.md`` for the weights that are left out.

    Source: TetraJet-v2 (arXiv 2510.27527); the ratio is from TetraJet (arXiv 2502.20853).

    Args:
        window: optimizer steps in which movements are summed up, at least 2.
        every: optimizer steps between the starts of two windows, at least ``window``.
        threshold: of the ratio, above 1. A weight that travels through several bins has a ratio of about 1.
        start: optimizer steps before the first window.

    Raises:
        ValueError: an argument is out of range.
        MisconfigurationException: when training starts: weights are sharded or have master weights, or none is
            rounded to nearest.

    Examples:
        >>> Trainer(max_steps=10_000, plugins=[FP4Precision()], callbacks=[OsciReset(start=6_000)])
    """

    # Checkpoints before version 0.1 spell a name as in British English.
    saved: ClassVar[Any] = {
        "step": int | None,
        "end": int | None,
        "paths": {str: OneOf(*({"latent": _is_path, name: _is_path} for name in ("quantized", "quantised")))},
    }

    def __init__(self, window: int = 50, every: int = 200, threshold: float = 8.0, start: int = 0) -> None:
        self.window = integer("window", window, 2, "a number of optimizer steps")
        self.every = integer("every", every, window, "a number of optimizer steps, no fewer than window")
        self.threshold = number("threshold", threshold, "the ratio of two paths", above=1)
        self.start = integer("start", start, 0, "a number of optimizer steps")
        self._layers: dict[str, QuantizedLayer] = {}
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._step: int | None = None  # optimizer steps taken when the last batch began
        self._end: int | None = None  # the optimizer step that ends the window; None where none is open
        self._paths: dict[str, _Paths] = {}
        self._loaded: dict[str, dict[str, Tensor]] = {}  # paths of a checkpoint, until training starts

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        layers = whole_layers(self, trainer, pl_module)
        own = {name: layer for name, layer in layers.items() if isinstance(layer.weight, nn.Parameter)}
        self._layers = {name: layer for name, layer in own.items() if nearest_cast(layer.full_casts) is not None}
        if not self._layers:
            raise MisconfigurationException(
                f"OsciReset needs parameters that are rounded to nearest, and of {len(layers)} converted layers none "
                "has one. Use e.g. Trainer(plugins=[FP4Precision()]), or leave out the callback."
            )
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        copied = {id(p) for group in groups if group.get("master_weights") for p in group["params"]}
        if any(id(layer.weight) in copied for layer in self._layers.values()):
            raise MisconfigurationException(
                "OsciReset sets weights, which an optimizer with master_weights='fp16' computes from its own copies: "
                "they would be back after a step. Leave out master_weights or the callback."
            )
        for name in self._loaded.keys() & self._layers.keys():
            self._paths[name] = paths = _Paths.begin(self._matrix(name))
            state = self._loaded[name]
            quantized = state["quantized"] if "quantized" in state else state["quantised"]
            for place, value in ((paths.latent, state["latent"]), (paths.quantized, quantized)):
                if place.shape != value.shape:
                    raise ValueError(
                        f"OsciReset's window in the checkpoint is of another model: a path of {name} is "
                        f"{shown(value)}, and its weight has shape {tuple(place.shape)}."
                    )
                place.copy_(value)
        self._loaded = {}

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        step, before = trainer.global_step, trainer.global_step - 1 if self._step is None else self._step
        self._step = step
        # A batch may have several optimizer steps, so the first step of a window may fall inside one.
        if step >= self.start and (step - self.start) // self.every > (before - self.start) // self.every:
            self._paths = {name: _Paths.begin(self._matrix(name)) for name, _ in self._latent(trainer)}
            self._end = step + self.window

    def _latent(self, trainer: Trainer) -> Iterator[tuple[str, LatentWeight]]:
        return latent_weights(self._layers, compute_dtype(trainer.precision_plugin))

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        step = trainer.global_step
        if self._end is None or step == self._step:
            return
        before, self._paths = self._paths, {}
        shares = {}
        for name, weight in self._latent(trainer):
            if name not in before:
                continue
            paths, matrix = before.pop(name), self._matrix(name)
            paths.add_(matrix, weight)
            if step < self._end:
                self._paths[name] = paths
            else:
                where = paths.oscillating(self.threshold)
                centers = weight.quantize().dequantize(matrix.dtype)
                self._layers[name].set_weight_matrix(centers.where(where, matrix))
                shares[name] = where.mean(dtype=torch.float32)
        if step >= self._end:
            self._end = None
            # Written directly, as Lightning's own monitors do: a window rarely ends in a step that the logger takes.
            if shares:
                row = dict(zip(shares, torch.stack(list(shares.values())).tolist(), strict=True))
                metrics = {f"{_QUANTITY}/{name}": share for name, share in row.items()}
                for logger in trainer.loggers:
                    logger.log_metrics(metrics, step=logger_step(trainer))
                for callback in trainer.callbacks:  # type: ignore[attr-defined]
                    if hasattr(callback, "record_layers"):
                        callback.record_layers({_QUANTITY: row}, step)
                trainer.callback_metrics.update({name: torch.tensor(share) for name, share in metrics.items()})

    def on_rollback(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gives up the open window: going back is no movement of a step."""
        self._end, self._paths = None, {}

    def _matrix(self, name: str) -> Tensor:
        return self._layers[name].weight_matrix().detach().flatten(0, -2)

    def state_dict(self) -> dict[str, Any]:
        """Returns the open window, without the last values: between steps they equal the weights."""
        paths = {name: {"latent": p.latent, "quantized": p.quantized} for name, p in self._paths.items()}
        return {"step": self._step, "end": self._end, "paths": self._loaded or paths}

    def _load(self, state: dict[str, Any]) -> None:
        self._step, self._end, self._loaded = (state[name] for name in ("step", "end", "paths"))
