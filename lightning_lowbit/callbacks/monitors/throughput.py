"""The speed of a run, and its share of the hardware's peak."""

import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from lightning_lowbit._lightning import (
    LightningModule,
    MisconfigurationException,
    Trainer,
    extract_batch_size,
    is_logging_step,
    is_mid_step,
    rank_zero_warn,
)
from lightning_lowbit.callbacks.base import LowBitCallback
from lightning_lowbit.callbacks.precision_summary import PrecisionSummary
from lightning_lowbit.data_sheets import PEAKS
from lightning_lowbit.nn import GemmCounter
from lightning_lowbit.precision.run_settings import compute_dtype, data_ranks

# Behind the name of a chip: other chips, and slower versions of one.
_OTHERS = r"(?!\d| D\b| Laptop)"


class Throughput(LowBitCallback):
    """Logs ``<unit>/s`` over all processes, whose batches count as the first one's do, and, if FLOPs and peak are
    known, ``tflops`` and ``mfu`` per device.

    Model FLOPs utilization (MFU) is the time that the model's FLOPs would take at the device's dense peak over the time
    they took. The peak belongs to the executed arithmetic: an emulated FP4 GEMM counts as bf16, native GEMMs at their
    own peaks if :class:`PrecisionSummary` measures them, those of codes on CPUs at that of int8. Recomputed activations
    do not count, except for one of the five products in the gradient of fused attention.

    FLOPs of a batch come from :class:`PrecisionSummary` if it is among the callbacks, or from the module's
    ``flops_per_batch``. The time excludes validation and the first batch. Logging does not wait for the device.

    Args:
        unit: the name of the counted items, such as ``"tokens"``.
        count: returns how many a batch has; None takes the size of the first dimension. If that is unknown, the
            callback warns, and logs no ``<unit>/s``.
        peak_flops: FLOP/s of one device by ``"bfloat16"``, ``"float8"``, ``"int8"``, ``"float32"``, …; None looks the
            device up.

    Examples:
        >>> Trainer(callbacks=[PrecisionSummary(), Throughput("tokens", count=lambda batch: batch.numel())])
    """

    def __init__(
        self,
        unit: str = "samples",
        count: Callable[[Any], int] | None = None,
        peak_flops: Mapping[str, float] | None = None,
    ) -> None:
        if not isinstance(unit, str):
            raise ValueError(f"unit names what batches hold, such as 'tokens'; got {unit!r}.")
        if count is not None and not callable(count):
            raise ValueError(f"count takes a batch and gives a number; got {count!r}.")
        self.unit = unit
        self.count = extract_batch_size if count is None else count
        self.peak_flops = peak_flops
        self._restart()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._replicas = data_ranks(trainer)
        self._peaks = peaks_of(trainer.strategy.root_device) if self.peak_flops is None else self.peak_flops
        self._begun, self._is_counting = False, True

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restart()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._begun:
            self._begun = True
            self._restart()
            return
        self._count_items(batch)
        self._batches += 1
        if not is_logging_step(trainer) or is_mid_step(trainer):
            return
        seconds = time.perf_counter() - self._since
        metrics = {f"{self.unit}/s": self._replicas * self._items / seconds} if self._is_counting else {}
        counter = _counter(trainer)
        flops = getattr(pl_module, "flops_per_batch", None if counter is None else counter.model_flops)
        if flops is not None:
            rate = flops * self._batches / seconds
            metrics["tflops"] = rate / 1e12
            if peak := _peak(trainer, counter, self._peaks):
                metrics["mfu"] = rate / peak
        for name, value in metrics.items():
            # A tensor on the host: copying a float to the device would synchronize.
            pl_module.log(name, torch.tensor(value), prog_bar=name != "tflops", batch_size=1)
        self._restart()

    def _count_items(self, batch: Any) -> None:
        if not self._is_counting:
            return
        try:
            self._items += self.count(batch)
        except MisconfigurationException:
            self._is_counting = False
            rank_zero_warn(
                f"Not measured: {self.unit}/s, for Throughput cannot tell how many a {type(batch).__name__} holds. "
                "Give count, a callable that takes a batch and gives their number."
            )
        except Exception as error:
            raise ValueError(
                f"Throughput: count cannot tell how many {self.unit} a {type(batch).__name__} holds "
                f"({type(error).__name__}: {error}). Give another count, or leave Throughput out."
            ) from error

    def _restart(self) -> None:
        self._items = self._batches = 0
        self._since = time.perf_counter()


def peaks_of(device: torch.device) -> Mapping[str, float]:
    """Returns the peaks of a device by dtype, in FLOP/s; empty if unknown."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peaks for chip, peaks in PEAKS.items() if re.search(chip + _OTHERS, name)), {})


def _peak(trainer: Trainer, counter: GemmCounter | None, peaks: Mapping[str, float]) -> float | None:
    """Returns FLOP/s as if all FLOPs of the model ran at the peaks of their arithmetic; None if a peak is unknown."""
    dtype = compute_dtype(trainer.precision_plugin)
    native = counter.native_shares(trainer.strategy.root_device, dtype) if counter is not None else {}
    rest = {str(dtype).removeprefix("torch."): 1 - sum(native.values())}
    # fp16 runs as fast as bf16 on all of them.
    names = {"float16": "bfloat16", **dict.fromkeys(("fp8", "fp8-blockwise", "mxfp8"), "float8")}
    names |= dict.fromkeys(("nvfp4", "mxfp4"), "float4") | {"cpu": "int8"}
    shares = {names.get(kind, kind): share for kind, share in (native | rest).items() if share}
    if not all(peaks.get(name) for name in shares):
        return None
    return 1 / sum(share / peaks[name] for name, share in shares.items())


def _counter(trainer: Trainer) -> GemmCounter | None:
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    counters = [callback.counter for callback in callbacks if isinstance(callback, PrecisionSummary)]
    return next((counter for counter in counters if counter is not None), None)
