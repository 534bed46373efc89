"""One page that says how a run went, also when it broke off.

    every log step      the metrics of optimizer step k, learning rate and phase, kept as tensors on the device
    end or exception    report.html (to be read) and run.json (to be computed with), in the run's folder

Other callbacks contribute by having a method, in the order of the Trainer's list:

    report_alerts(trainer) -> list[str]           what was warned of, shown first
    report_sections(trainer) -> list[Section]     shown between the metrics and the environment
    report_data(trainer) -> dict                  merged into "summary" of run.json

They are called in the first process alone, and also after an exception: no collectives in them.
"""

import importlib.metadata
import importlib.util
import json
import math
import re
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_lowbit._lightning import (
    LightningModule,
    Trainer,
    is_logging_step,
    is_mid_step,
    logged_metrics,
    rank_zero_warn,
)
from lightning_lowbit.atomic_files import replace_file
from lightning_lowbit.callbacks.base import LowBitCallback
from lightning_lowbit.precision import LowBitPrecision
from lightning_lowbit.report.contents import (
    ask,
    cast_sections,
    configuration_of,
    coverage_alerts,
    coverage_of,
    name_of,
    precision_of,
    status_of,
    strict,
)
from lightning_lowbit.report.environment import environment, peak_memory
from lightning_lowbit.report.history import History
from lightning_lowbit.report.page import render_run
from lightning_lowbit.report.run_folder import go_on, run_folder
from lightning_lowbit.report.trackers import begin, finish


class RunReport(LowBitCallback):
    """Writes ``report.html`` and ``run.json`` into the logger's directory when ``fit`` ends or breaks off.

    Without a logger they go to ``default_root_dir``; a dry run (``fast_dev_run``) writes nothing. Where the logger has
    no folder for each run, that holds the first run's, and ``version_1`` and so on in it those of later runs; a run
    that is resumed goes on where it was. With ``WandbLogger`` and ``MLFlowLogger`` the page is an artifact, too, and
    casts and coverage are among what they show of a run.

    The history is saved with the checkpoint, so that the page of a resumed run shows the whole run. A step is an
    optimizer step: what is logged during the k-th one is shown at k, and a validation after it, too. Recording copies
    from the device once in many values, and else waits for nothing.

    Of launchers that start processes inside ``fit`` (``ddp_spawn``, ``ddp_fork``) an exception cannot be reported:
    Lightning calls no callback in the process where it happened.

    Args:
        filename: of the page.

    Raises:
        ValueError: ``filename`` does not end in ``.html`` or has folders in it.
        ModuleNotFoundError: matplotlib is not installed.

    Example:
        >>> Trainer(plugins=[FP4Precision()], callbacks=[PrecisionSummary(), RunReport()])
    """

    def __init__(self, filename: str = "report.html") -> None:
        if not filename.endswith(".html") or filename == ".html" or set(filename) & set("/\\"):
            raise ValueError(f"filename is a name that ends in .html, without folders; got {filename!r}.")
        if importlib.util.find_spec("matplotlib") is None:
            raise ModuleNotFoundError(
                'RunReport draws its charts with matplotlib: pip install "lightning_lowbit[recipes]".'
            )
        self.filename = filename
        self._trainer: Trainer | None = None
        self._folder: Path | None = None
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._id = uuid4().hex  # of the run, which it keeps when it is resumed
        self._history = History()
        self._validation: list[str] = []  # names of validation metrics
        self._seconds = 0.0
        self._since: float | None = None
        self._max_steps: int | None = None
        self._trained = False
        self._begin = self._recorded = 0  # optimizer steps: when training started, and the last one seen
        self._seen: dict[str, Tensor] = {}
        self._late: int | None = None
        self._rates: dict[str, Tensor] = {}

    # --- when ---

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Asks for the folder, where all processes do: ``log_dir`` is a broadcast."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self._trainer = trainer
            if trainer.global_step == 0:  # or else the same Trainer goes on
                self._start_afresh()
            folder = str(trainer.log_dir or trainer.default_root_dir)
            if "://" in folder:
                rank_zero_warn(f"RunReport writes into local folders alone, and nothing into {folder}.")
            is_written = "://" not in folder and not trainer.fast_dev_run  # type: ignore[attr-defined]
            self._folder = Path(folder) if is_written else None
            self._trained, self._started = False, datetime.now().astimezone()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the clock; trackers of experiments learn what the run is."""
        self._trained = True
        if self._folder is not None and trainer.is_global_zero:
            begin(trainer, precision_of(trainer))
            if trainer.global_step:
                go_on(trainer, self._folder, self._id)
        self._since, self._begin, self._recorded = time.monotonic(), trainer.global_step, trainer.global_step
        self._seen, self._late, self._rates = {}, None, {}
        steps: float = trainer.max_steps
        if pl_module.automatic_optimization:
            steps = trainer.estimated_stepping_batches
        self._max_steps = int(steps) if 0 < steps < math.inf else None

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Notes the learning rates of the step; at its end the schedule has moved on."""
        self._take_late(trainer)
        if trainer.is_global_zero and is_logging_step(trainer):
            self._rates = dict(learning_rates(trainer))

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Records the optimizer step."""
        self._record_step(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Completes the last step."""
        self._take_late(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Records the metrics of the epoch before."""
        self._take_epoch(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Records the metrics of the last epoch, and stops the clock."""
        self._take_epoch(trainer)
        self._seconds, self._since = self._elapsed(), None

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tells what was logged until now from what the validation will."""
        if self._is_validation_of_fit(trainer):
            self._take_late(trainer)
            self._seen.update(_scalars(logged_metrics(trainer)))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Records the validation."""
        self._record_validation(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the report."""
        self._write(trainer, pl_module, None)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Writes the report of a run that broke off."""
        if trainer.state.fn == "fit" and self._trained:  # before that, there is nothing to report
            self._seconds, self._since = self._elapsed(), None
            self._write(trainer, pl_module, exception)

    def record_layers(self, numbers: Mapping[str, Mapping[str, float]], step: int) -> None:
        """Adds numbers of layers, by quantity and layer, which a monitor has read."""
        if self._trainer is not None and self._trainer.is_global_zero:
            self._history.add_layers(numbers, step)

    def state_dict(self) -> dict[str, Any]:
        """The history so far, also that of the step at whose end another callback saves before this one's turn."""
        if self._trainer is not None and self._since is not None:
            ask(self._trainer, "report_alerts", list)  # monitors read what they have not yet, and record it here
            self._record_validation(self._trainer) if self._trainer.validating else self._record_step(self._trainer)
        history = self._history.state_dict()
        kept = {"history": history, "validation": list(self._validation), "seconds": self._elapsed()}
        return kept | {"id": self._id}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on with it."""
        self._history.load_state_dict(state_dict["history"])
        self._validation, self._seconds = list(state_dict["validation"]), state_dict["seconds"]
        self._id = state_dict.get("id", self._id)  # which older checkpoints lack

    def _elapsed(self) -> float:
        return self._seconds + (0 if self._since is None else time.monotonic() - self._since)

    # --- which value belongs to which step ---

    def _record_step(self, trainer: Trainer) -> None:
        """Adds the optimizer step that has just been done, when it is one that is logged; once."""
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
            self._take(trainer.callback_metrics, step)
            self._late = step

    def _record_validation(self, trainer: Trainer) -> None:
        if self._is_validation_of_fit(trainer):
            new = self._take(logged_metrics(trainer), trainer.global_step)
            self._validation += [name for name in new if name not in self._validation]

    def _take(self, metrics: Mapping[str, Any], step: int, forked: bool = True) -> list[str]:
        """Adds what was logged since the last call. Lightning keeps the values of old steps among those of new ones,
        but makes a new tensor whenever something is logged."""
        new = []
        for name, value in _scalars(metrics).items():
            stem, _, suffix = name.rpartition("_")
            is_twin = suffix in ("step", "epoch") and stem in metrics  # of `on_step=True, on_epoch=True`
            is_mean = not forked and f"{name}_step" in metrics
            seen = self._seen.get(name)
            if not is_twin and not is_mean and (seen is None or seen.data_ptr() != value.data_ptr()):
                self._seen[name] = value  # as long as it is kept, no other one has its address
                if self._history.add(name, step, value):
                    new.append(name)
        return new

    def _take_late(self, trainer: Trainer) -> None:
        """Adds what the module and other callbacks logged in their ``on_train_batch_end``, after this one's.

        Not `trainer.callback_metrics`: at the end of an epoch this would reduce means over processes, in one of them.
        """
        if self._late is not None:
            self._take(logged_metrics(trainer), self._late)
            self._late = None

    def _take_epoch(self, trainer: Trainer) -> None:
        """Adds the metrics of an epoch, but not its means of metrics that have a value for each step."""
        if trainer.is_global_zero:
            self._take(logged_metrics(trainer), trainer.global_step, forked=False)

    @staticmethod
    def _is_validation_of_fit(trainer: Trainer) -> bool:
        return trainer.is_global_zero and trainer.state.fn == "fit" and not trainer.sanity_checking

    # --- what is written ---

    def _write(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException | None) -> None:
        if self._folder is None or not trainer.is_global_zero:
            return
        try:
            self._write_files(trainer, pl_module, exception)
        except Exception as error:  # neither the end of a training nor what went wrong in it is lost to a report
            with suppress(Warning):  # where warnings are errors
                rank_zero_warn(f"RunReport could not be written: {type(error).__name__}: {error}")

    def _write_files(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException | None) -> None:
        assert self._folder is not None
        alerts, failures = ask(trainer, "report_alerts", list)  # first: monitors record their last numbers
        try:
            history = self._history.points()
        except Exception:  # after an error of the device nothing can be copied from it
            self._history.drop_pending()
            history = self._history.points()
        folder = run_folder(trainer, self._folder, self.filename)
        folder.mkdir(parents=True, exist_ok=True)
        summaries, more_failures = ask(trainer, "report_data", dict)
        run: dict[str, Any] = {
            "name": name_of(folder),
            "id": self._id,
            "status": status_of(exception),
            "error": "".join(traceback.format_exception_only(exception)).strip() if exception else None,
            "steps": trainer.global_step,
            "begin": self._begin if self._trained else trainer.global_step,  # a resume may find nothing left to do
            "max_steps": self._max_steps,
            "seconds": self._seconds,
            "peak_memory_bytes": peak_memory(trainer.strategy.root_device),
            "precision": precision_of(trainer),
            "alerts": [*coverage_alerts(trainer), *(text for texts in alerts for text in texts)],
            "metrics": {name: points[-1][1] for name, points in history.items()},
            "validation_metrics": self._validation,
            "best": self._best(trainer),
            "history": history,
            "quantities": self._history.quantities,
            "phases": self._history.phases,
            "environment": environment(trainer, self._started),
            "summary": {name: value for summary in summaries for name, value in summary.items()},
        }
        run["coverage"] = run["summary"].get("coverage", coverage_of(trainer))
        replace_file(folder / "run.json", json.dumps(strict(run), indent=1, allow_nan=False))
        contributed, last_failures = ask(trainer, "report_sections", list)
        sections = [section for sections in contributed for section in sections]
        sections += cast_sections(pl_module)
        configuration = configuration_of(self._folder, trainer, pl_module)
        page = render_run(run, [*sections, *failures, *more_failures, *last_failures], exception, configuration)
        replace_file(folder / self.filename, page)
        finish(trainer, run, folder / self.filename)

    def _best(self, trainer: Trainer) -> dict[str, float]:
        """Of the validation metrics of which it is known what is better: losses, and what a callback monitors."""
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        modes = {getattr(callback, "monitor", None): getattr(callback, "mode", "min") for callback in callbacks}
        best = {}
        for name in self._validation:
            if name in self._history.extremes and (name in modes or re.search("loss|perplexity|ppl", name)):
                best[name] = self._history.extremes[name][modes.get(name) == "max"]
        return best


# --- the run ----------------------------------------------------------------------------------------------------------


def _scalars(metrics: Mapping[str, Any]) -> dict[str, Tensor]:
    local = {name: value.to_local() if isinstance(value, DTensor) else value for name, value in metrics.items()}
    return {name: value for name, value in local.items() if isinstance(value, Tensor) and value.numel() == 1}


def learning_rates(trainer: Trainer) -> Iterable[tuple[str, Tensor]]:
    """(name, value) of each optimizer's first parameter group, and of other groups where it differs; named as
    ``LearningRateMonitor`` does."""
    used: Counter[str] = Counter()
    for optimizer in trainer.optimizers:
        name = f"lr-{type(optimizer).__name__}"
        used[name] += 1
        name += f"-{used[name] - 1}" if used[name] > 1 else ""
        rates = [group["lr"] for group in optimizer.param_groups]
        for i, rate in enumerate(rates):
            if i == 0 or rate is not rates[0] and (isinstance(rate, Tensor) or rate != rates[0]):
                value = rate.detach().clone() if isinstance(rate, Tensor) else torch.tensor(rate, dtype=torch.float64)
                yield f"{name}/pg{i + 1}" if i else name, value
