"""Writes a page about a run when it ends, also after an exception.

Other callbacks contribute by methods, which the first process alone calls, in the order of the Trainer's list. They
must not use collectives: ``report_alerts(trainer)`` returns texts, ``report_sections(trainer)`` a list of ``Section``,
and ``report_data(trainer)`` a dict for "summary" of run.json.
"""

import json
import math
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

from torch import Tensor

from lightning_lowbit._lightning import (
    LightningModule,
    Trainer,
    is_logging_step,
    is_mid_step,
    is_validation_of_fit,
    logged_in_batch,
    logged_metrics,
    rank_zero_info,
    rank_zero_warn,
    total_steps,
)
from lightning_lowbit.atomic_files import replace_file
from lightning_lowbit.callbacks.base import LowBitCallback
from lightning_lowbit.precision import LowBitPrecision
from lightning_lowbit.report import contents
from lightning_lowbit.report.blocks import Section
from lightning_lowbit.report.history import History, learning_rates, scalars
from lightning_lowbit.report.page import render_run
from lightning_lowbit.report.run_folder import continue_in, page_of, run_folder
from lightning_lowbit.report.trackers import send_results, send_start
from lightning_lowbit.saved_state import NUMBER


class RunReport(LowBitCallback):
    """Writes ``report.html`` and ``run.json`` into the logger's directory when ``fit`` ends or raises.

    Without a logger they go to ``default_root_dir``; a dry run (``fast_dev_run``) writes nothing. If runs share the
    directory, later ones write into ``version_1`` and so on in it; a resumed run continues its own files, since
    checkpoints hold the history. One that has no step left says so, and leaves the report as it is. ``WandbLogger``
    and ``MLFlowLogger`` also get casts, the page and, with a ``PrecisionSummary``, the coverage.

    Values logged during the k-th optimizer step, or in a validation after it, are shown at k. Recording copies values
    to the host once in many steps. With launchers that start processes inside ``fit`` (``ddp_spawn``, ``ddp_fork``) an
    exception is not reported: Lightning calls no callback in the process that raised it.

    Args:
        filename: of the page; a name that ends in ``.html``, without folders, or else a ``ValueError``.

    Examples:
        >>> Trainer(plugins=[FP4Precision()], callbacks=[PrecisionSummary(), RunReport()])
    """

    saved: ClassVar[Any] = {"history": History.saved, "validation": [str], "seconds": NUMBER, "id?": str}

    def __init__(self, filename: str = "report.html") -> None:
        if not filename.endswith(".html") or filename == ".html" or set(filename) & set("/\\"):
            raise ValueError(f"filename is a name that ends in .html, without folders; got {filename!r}.")
        self.filename = filename
        self._trainer: Trainer | None = None
        self._folder: Path | None = None
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._id = uuid4().hex  # of the run; a resumed run keeps it
        self._history = History()
        self._validation: list[str] = []  # names of validation metrics
        self._seconds = 0.0
        self._since: float | None = None
        self._max_steps: int | None = None
        self._trained = False
        self._begin = self._recorded = 0  # optimizer steps: at the start of training, and the last one recorded
        self._seen: dict[str, Tensor] = {}  # logged values that are already recorded
        self._old: dict[str, Tensor] = {}  # those of earlier steps than the one after `_begun`
        self._begun: int | None = None
        self._late: int | None = None  # a step whose last values are not recorded yet
        self._rates: dict[str, Tensor] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Chooses the folder in all processes, because ``log_dir`` is a broadcast."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self._trainer = trainer
            folder = str(trainer.log_dir or trainer.default_root_dir)
            if "://" in folder:
                rank_zero_warn(f"RunReport writes into local folders alone, and nothing into {folder}.")
            is_written = "://" not in folder and not trainer.fast_dev_run  # type: ignore[attr-defined]
            self._folder = Path(folder) if is_written else None
            self._trained, self._started = False, datetime.now().astimezone()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._trained = True
        if self._folder is not None and trainer.is_global_zero:
            send_start(trainer, contents.precision_of(trainer))
            if trainer.global_step:
                continue_in(trainer, self._folder, self._id)
        self._since, self._begin, self._recorded = time.monotonic(), trainer.global_step, trainer.global_step
        self._seen, self._late, self._begun = scalars(logged_metrics(trainer)), None, None
        self._rates, self._old = {}, {}
        is_automatic = pl_module.automatic_optimization
        steps = total_steps(trainer) if is_automatic else trainer.max_steps
        self._max_steps = int(steps) if 0 < steps < math.inf else None

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self._take_late(trainer)
        if trainer.is_global_zero:  # should_stop, set within the batch, makes any step one that is logged
            self._rates = dict(learning_rates(trainer)) if is_logging_step(trainer) else {}
            if self._begun != trainer.global_step:
                self._begun, self._old = trainer.global_step, scalars(logged_metrics(trainer))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._take_late(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._take_epoch(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._take_epoch(trainer)
        self._seconds, self._since = self._elapsed(), None

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero and is_validation_of_fit(trainer):
            self._take_late(trainer)
            self._seen.update(scalars(logged_metrics(trainer)))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        earlier = None if self._trained or self._folder is None else page_of(trainer, self._folder, self._id)
        if earlier is None:
            self._write(trainer, pl_module, None)
            self._trained = False  # what ends the program from now on is not the end of this run
            return
        rank_zero_info(
            f"Nothing was left to train: the run had ended at step {trainer.global_step}, and its report is {earlier}. "
            "To train on, give more steps or epochs (max_steps, max_epochs)."
        )

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if trainer.state.fn == "fit" and self._trained:  # before that, there is nothing to report
            self._seconds, self._since = self._elapsed(), None
            self._write(trainer, pl_module, exception)

    def record_layers(self, numbers: Mapping[str, Mapping[str, float]], step: int) -> None:
        if self._trainer is not None and self._trainer.is_global_zero:
            self._history.add_layers(numbers, step)

    def state_dict(self) -> dict[str, Any]:
        """Returns the history, after recording the last step: another callback may save before it is recorded."""
        if self._trainer is not None and self._since is not None:
            if self._trainer.is_global_zero:  # monitors record the numbers that they have not read yet
                contents.call_reports(self._trainer, "report_alerts", [])
            (self.on_validation_end if self._trainer.validating else self.on_train_batch_end)(self._trainer)
            if self._late is not None:
                self._take(logged_in_batch(self._trainer), self._late, self._old)
        state = {"history": self._history.state_dict(), "validation": list(self._validation)}
        return {**state, "seconds": self._elapsed(), "id": self._id}

    def _load(self, state: dict[str, Any]) -> None:
        self._history.load_state_dict(state["history"])
        self._validation, self._seconds = list(state["validation"]), state["seconds"]
        self._id = state.get("id", self._id)  # older checkpoints have none

    def _elapsed(self) -> float:
        return self._seconds + (0 if self._since is None else time.monotonic() - self._since)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        step, plugin = trainer.global_step, trainer.precision_plugin
        in_mid_step = trainer.lightning_module.automatic_optimization and is_mid_step(trainer)
        if not trainer.is_global_zero or in_mid_step or step <= self._recorded:
            return
        self._recorded = step
        if isinstance(plugin, LowBitPrecision):
            self._history.add_phase(plugin.phase, self._begin, step)
        if is_logging_step(trainer):
            for name, rate in self._rates.items():
                self._history.add(name, step, rate)
            self._take(trainer.callback_metrics, step, self._old)
            self._late = step

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.is_global_zero and is_validation_of_fit(trainer):
            new = self._take(logged_metrics(trainer), trainer.global_step)
            self._validation += [name for name in new if name not in self._validation]

    def _take(
        self, metrics: Mapping[str, Any], step: int, old: Mapping[str, Tensor] | None = None, forked: bool = True
    ) -> list[str]:
        """Adds newly logged metrics and returns their names; Lightning logs a new tensor each time.

        ``old`` are left out: values of an earlier step, which the hooks that follow may still log anew.
        """
        new, old = [], old or {}
        for name, value in scalars(metrics).items():
            stem, _, suffix = name.rpartition("_")
            is_twin = suffix in ("step", "epoch") and stem in metrics  # of `on_step=True, on_epoch=True`
            is_recorded = name in self._history.quantities  # by `record_layers`, at its step
            if is_twin or is_recorded or (not forked and f"{name}_step" in metrics):
                continue
            if all(one is None or one.data_ptr() != value.data_ptr() for one in (self._seen.get(name), old.get(name))):
                self._seen[name] = value  # keeps the tensor alive, so that no other one gets its address
                new += [name] if self._history.add(name, step, value) else []
        return new

    def _take_late(self, trainer: Trainer) -> None:
        """Adds values logged in ``on_train_batch_end``, without a collective (``callback_metrics`` may run one)."""
        if self._late is not None:
            self._take(logged_metrics(trainer), self._late)
            self._late = None

    def _take_epoch(self, trainer: Trainer) -> None:
        if trainer.is_global_zero:
            self._take(logged_metrics(trainer), trainer.global_step, forked=False)

    def _write(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException | None) -> None:
        if self._folder is None or not trainer.is_global_zero:
            return
        try:
            self._write_files(trainer, pl_module, exception)
        except Exception as error:  # a failed report must not hide the end or the error of a training
            with suppress(Warning):  # where warnings are errors
                rank_zero_warn(f"RunReport could not be written: {type(error).__name__}: {error}")

    def _write_files(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException | None) -> None:
        assert self._folder is not None
        failures: list[Section] = []
        # First, because monitors record their last numbers then.
        alerts = contents.call_reports(trainer, "report_alerts", failures)
        try:
            history = self._history.points()
        except Exception:  # after a device error nothing can be copied
            self._history.drop_pending()
            history = self._history.points()
        folder = run_folder(trainer, self._folder, self.filename)
        folder.mkdir(parents=True, exist_ok=True)
        summary = dict(contents.call_reports(trainer, "report_data", failures))
        run: dict[str, Any] = {
            "name": contents.name_of(folder),
            "id": self._id,
            "status": contents.status_of(exception),
            "error": "".join(traceback.format_exception_only(exception)).strip() if exception else None,
            "steps": trainer.global_step,
            "begin": self._begin if self._trained else trainer.global_step,  # a resumed run may have no step left
            "max_steps": self._max_steps,
            "seconds": self._seconds,
            "peak_memory_bytes": contents.peak_memory(trainer.strategy.root_device),
            "precision": contents.precision_of(trainer),
            "alerts": [*contents.coverage_alerts(trainer), *alerts],
            "metrics": {name: points[-1][1] for name, points in history.items()},
            "validation_metrics": self._validation,
            "best": contents.best_values(trainer, self._validation, self._history.extremes),
            "history": history,
            "quantities": self._history.quantities,
            "phases": self._history.phases,
            "environment": contents.environment(trainer, self._started),
            "summary": summary,
            "coverage": summary.get("coverage"),
        }
        replace_file(folder / "run.json", json.dumps(contents.strict(run), indent=1, allow_nan=False))
        sections = contents.call_reports(trainer, "report_sections", failures)
        words = contents.casts_in_words(pl_module)
        sections += [*([Section("Casts in words", words)] if words else []), *failures]
        page = render_run(run, sections, exception, contents.configuration_of(self._folder, trainer, pl_module))
        replace_file(folder / self.filename, page)
        send_results(trainer, run, folder / self.filename)
        rank_zero_info(f"Report: {folder / self.filename}")
