"""The base class of monitors decides when they measure and read, and where their numbers go.

    during a batch          tensors are measured and kept on the device: `_keep`
    on_train_batch_end      means over layers are logged through Lightning: `_log`
    on_train_batch_start    of the next batch: one copy to the host, then `_judge` notes alerts and
                            `_emit` sends numbers of layers to the loggers and the history of the run

The copy does not wait: Lightning's logger has already waited for values of the same step.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from lightning_lowbit._lightning import (
    LightningModule,
    Logger,
    MisconfigurationException,
    Trainer,
    forget_logged,
    rank_zero_warn,
)
from lightning_lowbit.callbacks.base import LowBitCallback
from lightning_lowbit.distributed import connect
from lightning_lowbit.report.blocks import Table
from lightning_lowbit.saved_state import NUMBER, OneOf

_T = TypeVar("_T")
_MOST_UNREAD = 100  # measurements that are kept on the device while the logger takes none

# Numbers of layers: by quantity, such as "sqnr/wgrad_g", then by layer. They are logged as "sqnr/wgrad_g/<layer>".
LayerNumbers = Mapping[str, Mapping[str, float]]

# A warning is repeated if it concerns this many times as many layers, or the worst is this many times as bad.
MUCH_WORSE = 4.0


class Alerts:
    """Collects warnings of ``owner``: one per kind, with the worst layer and the number of layers.

    Attributes:
        texts: of all warnings, the oldest first.
        kinds: of all noted problems, by subject.

    Examples:
        >>> alerts.note("layers.0", "underflow", 0.6, "60% became 0.")
        >>> alerts.note("layers.1", "underflow", 0.9, "90% became 0.")
        >>> alerts.say(step=3)  # 2 layers, the worst layers.1, step 3: 90% became 0.
    """

    # Older checkpoints hold texts by subject and kind.
    saved: ClassVar[Any] = OneOf(
        {
            "levels": {str: {"step": int, "layers": int, "severity": NUMBER}},
            "kinds": {str: [str]},
            "texts": [str],
        },
        {str: {str: str}},
    )

    def __init__(self, owner: object) -> None:
        self._owner = type(owner).__name__
        self._noted: dict[str, list[tuple[float, str, str]]] = {}  # by kind: severity, subject, message
        self._levels: dict[str, dict[str, float]] = {}  # of the last warning of each kind
        self.kinds: dict[str, list[str]] = {}
        self.texts: list[str] = []

    def note(self, subject: str, kind: str, severity: float, message: str) -> None:
        """Notes a problem for :meth:`say`; ``severity`` is above 0 and larger where the problem is worse."""
        self._noted.setdefault(kind, []).append((severity, subject, message))
        kinds = self.kinds.setdefault(subject, [])
        if kind not in kinds:
            kinds.append(kind)

    def say(self, step: int) -> None:
        noted, self._noted = self._noted, {}
        for kind, problems in noted.items():
            severity, subject, message = max(problems, key=lambda problem: problem[0])
            before = self._levels.get(kind, {"step": 0, "layers": 0, "severity": 0.0})
            is_worse = before["severity"] < severity >= MUCH_WORSE * before["severity"]
            if not is_worse and len(problems) < MUCH_WORSE * before["layers"]:
                continue
            self._levels[kind] = {"step": step, "layers": len(problems), "severity": severity}
            where = subject if len(problems) == 1 else f"{len(problems)} layers, the worst {subject}"
            since = f" It is much worse than at step {before['step']}." if before["layers"] else ""
            self.texts.append(f"{where}, step {step}: {message}{since}")
            rank_zero_warn(f"{self._owner}: {self.texts[-1]}")

    def state_dict(self) -> dict[str, Any]:
        return deepcopy({"levels": self._levels, "kinds": self.kinds, "texts": self.texts})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._noted = {}
        if isinstance(state.get("texts"), list):
            self._levels, self.kinds, self.texts = (deepcopy(state[name]) for name in ("levels", "kinds", "texts"))
            return
        self.kinds = {subject: list(texts) for subject, texts in state.items()}
        self.texts = [text for texts in state.values() for text in texts.values()]
        counts = Counter(kind for kinds in self.kinds.values() for kind in kinds)
        self._levels = {kind: {"step": 0, "layers": count, "severity": float("inf")} for kind, count in counts.items()}


class Monitor(LowBitCallback):
    """Measures on the device, reads one batch later, and sends the numbers to loggers and history.

    A subclass measures in its own hooks, calls :meth:`_keep` and :meth:`_log`, and interprets the numbers in
    ``_judge(step, columns, *context)``. It calls ``super()`` in the hooks that are defined here. Its alerts are part of
    its state.

    A monitor ends no run. If :meth:`_begin` raises a ``MisconfigurationException``, the run lacks something to measure:
    the monitor warns and stays idle (``_is_idle``).
    """

    saved: ClassVar[Any] = {"alerts": Alerts.saved}
    _judge: Callable[..., None]

    def __init__(self) -> None:
        self._is_idle = False
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._alerts = Alerts(self)
        self._forget()

    def _forget(self) -> None:
        self._unread: list[tuple[int, Mapping[str, Tensor], tuple[Any, ...]]] = []
        self._loggers: list[Logger] = []
        self._reports: list[Any] = []
        self._logged: list[str] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._is_idle = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._forget()
        self._loggers = list(trainer.loggers)
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        self._reports = [callback for callback in callbacks if hasattr(callback, "record_layers")]
        connect(trainer.model or pl_module)  # also without a plugin; only FSDP1's wrapped module knows whole parameters
        self._try(lambda: self._begin(trainer, pl_module))

    def _begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prepares to measure, or raises, when training starts."""

    def _try(self, measure: Callable[[], _T]) -> _T | None:
        """Calls a function unless the monitor is idle; an exception about a missing part makes it idle."""
        if self._is_idle:
            return None
        try:
            return measure()
        except MisconfigurationException as missing:
            self._is_idle = True
            rank_zero_warn(f"Not measured: {missing}")
            return None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Reads the measurements of the last batch, if it was logged; else Lightning would log them again."""
        if self._logged or len(self._unread) >= _MOST_UNREAD:
            self._read()
        forget_logged(trainer, self._logged)
        self._logged = []

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._read()

    def report_alerts(self, trainer: Trainer) -> list[str]:
        self._read()
        return list(self._alerts.texts)

    def state_dict(self) -> dict[str, Any]:
        return {**self._numbers(), "alerts": self._alerts.state_dict()}

    def _numbers(self) -> dict[str, Any]:
        return {}

    def _load(self, state: dict[str, Any]) -> None:
        self._alerts.load_state_dict(state["alerts"])

    def _log(self, pl_module: LightningModule, metrics: Mapping[str, Tensor]) -> None:
        """Logs 0-d tensors for other callbacks to see; only in ``on_train_batch_end``."""
        pl_module.log_dict(dict(metrics), batch_size=1)
        self._logged += list(metrics)

    def _keep(self, step: int, columns: Mapping[str, Tensor], *context: Any) -> None:
        """Keeps named tensors of an optimizer step on the device; ``_judge`` gets nested lists one batch later."""
        self._unread.append((step, columns, context))

    def _emit(self, numbers: LayerNumbers, step: int, logger_step: int) -> None:
        """Sends numbers of layers to loggers and history; not by ``log_dict``, which takes a millisecond per number."""
        flat = {f"{quantity}/{layer}": number for quantity, row in numbers.items() for layer, number in row.items()}
        for logger in self._loggers:
            logger.log_metrics(flat, step=logger_step)
        for report in self._reports:
            report.record_layers(numbers, step)

    def _read(self) -> None:
        unread, self._unread = self._unread, []
        tensors = [tensor.flatten() for _, columns, _ in unread for tensor in columns.values()]
        try:
            numbers = iter(torch.cat(tensors).tolist() if tensors else [])
        except RuntimeError as error:
            if is_of_device(error):  # the next use of the device reports it
                return
            raise
        for step, columns, context in unread:
            values = {name: _nested(numbers, tensor.shape) for name, tensor in columns.items()}
            self._judge(step, values, *context)
            self._alerts.say(step)

    def _table(self, header: list[str], rows: Mapping[str, Iterable[float | None]], caption: str) -> Table:
        """Tabulates numbers of layers, with the kinds of their alerts in a last column."""
        cells = {name: ["" if number is None else f"{number:.3g}" for number in row] for name, row in rows.items()}
        body = [[name, *row, ", ".join(self._alerts.kinds.get(name, []))] for name, row in cells.items()]
        return Table([*header, "alerts"], body, caption)


def _nested(numbers: Iterator[float], shape: Sequence[int]) -> Any:
    return [_nested(numbers, shape[1:]) for _ in range(shape[0])] if shape else next(numbers)


def is_of_device(error: RuntimeError) -> bool:
    """Tells whether an accelerator raised the error; nothing can be copied from it afterwards."""
    return isinstance(error, torch.AcceleratorError) or any(name in str(error) for name in ("CUDA error", "HIP error"))
