"""The base class of monitors decides when they measure and read, and where their numbers go.

    during a batch          tensors are measured and kept on the device: `_keep`
    on_train_batch_end      means over layers are logged through Lightning: `_log`
    on_train_batch_start    of the next batch: one copy to the host, then `_judge` notes alerts and
                            `_emit` sends numbers of layers to the loggers and the history of the run

The copy does not wait: Lightning's logger has already waited for values of the same step.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

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
from lightning_lowbit.saved_state import NUMBER, OneOf

_T = TypeVar("_T")
_MOST_UNREAD = 100  # measurements that are kept on the device while the logger takes none

# Numbers of layers: by quantity, such as "sqnr/wgrad_g", then by layer. They are logged as "sqnr/wgrad_g/<layer>".
LayerNumbers = Mapping[str, Mapping[str, float]]


# A warning is repeated if it concerns this many times as many layers, or the worst is this many times as bad.
MUCH_WORSE = 4.0


class _Problem(NamedTuple):
    severity: float
    subject: str
    message: str


class _Level(NamedTuple):
    step: int
    layers: int
    severity: float


class Alerts:
    """Collects warnings of ``owner``: one per kind, with the worst layer and the number of layers.

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
        self._noted: dict[str, list[_Problem]] = {}
        self._levels: dict[str, _Level] = {}
        self._kinds: dict[str, list[str]] = {}  # by subject
        self._texts: list[str] = []

    def note(self, subject: str, kind: str, severity: float, message: str) -> None:
        """Notes a problem for :meth:`say`; ``severity`` is above 0 and larger where the problem is worse."""
        self._noted.setdefault(kind, []).append(_Problem(severity, subject, message))
        kinds = self._kinds.setdefault(subject, [])
        if kind not in kinds:
            kinds.append(kind)

    def say(self, step: int) -> None:
        noted, self._noted = self._noted, {}
        for kind, problems in noted.items():
            worst = max(problems, key=lambda problem: problem.severity)
            before = self._levels.get(kind, _Level(0, 0, 0.0))
            is_worse = before.severity < worst.severity >= MUCH_WORSE * before.severity
            if not is_worse and len(problems) < MUCH_WORSE * before.layers:
                continue
            self._levels[kind] = _Level(step, len(problems), worst.severity)
            subject = worst.subject if len(problems) == 1 else f"{len(problems)} layers, the worst {worst.subject}"
            since = f" It is much worse than at step {before.step}." if before.layers else ""
            self._texts.append(f"{subject}, step {step}: {worst.message}{since}")
            rank_zero_warn(f"{self._owner}: {self._texts[-1]}")

    def subjects(self) -> list[str]:
        return list(self._kinds)

    def kinds(self, subject: str) -> list[str]:
        return list(self._kinds.get(subject, []))

    def texts(self) -> list[str]:
        return list(self._texts)

    def state_dict(self) -> dict[str, Any]:
        levels = {kind: dict(level._asdict()) for kind, level in self._levels.items()}
        kinds = {subject: list(kinds) for subject, kinds in self._kinds.items()}
        return {"levels": levels, "kinds": kinds, "texts": list(self._texts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._noted = {}
        if not isinstance(state.get("texts"), list):
            self._kinds = {subject: list(texts) for subject, texts in state.items()}
            self._texts = [text for texts in state.values() for text in texts.values()]
            counts = Counter(kind for kinds in self._kinds.values() for kind in kinds)
            self._levels = {kind: _Level(0, count, float("inf")) for kind, count in counts.items()}
            return
        levels = state["levels"].items()
        self._levels = {kind: _Level(*(level[name] for name in _Level._fields)) for kind, level in levels}
        self._kinds = {subject: list(kinds) for subject, kinds in state["kinds"].items()}
        self._texts = list(state["texts"])


class Monitor(LowBitCallback):
    """Measures on the device, reads one batch later, and sends the numbers to loggers and history.

    A subclass measures in its own hooks, calls :meth:`_keep` and :meth:`_log`, and interprets the numbers in
    :meth:`_judge`. It calls ``super()`` in the hooks that are defined here. Its alerts are part of its state.

    A monitor ends no run. If :meth:`_begin` raises a ``MisconfigurationException``, the run lacks something to measure:
    the monitor warns and stays idle (``_is_idle``).
    """

    saved: ClassVar[Any] = {"alerts": Alerts.saved}

    def __init__(self) -> None:
        self._is_idle = False
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._alerts = Alerts(self)
        self._forget()

    def _forget(self) -> None:
        self._unread: list[tuple[Any, Mapping[str, Tensor]]] = []
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
        return self._alerts.texts()

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

    def _keep(self, context: Any, columns: Mapping[str, Tensor]) -> None:
        """Keeps named tensors on the device; :meth:`_judge` gets ``context`` and their values one batch later."""
        self._unread.append((context, columns))

    def _judge(self, context: Any, columns: Mapping[str, Any]) -> int:
        """Interprets the values of :meth:`_keep`, nested lists; returns the optimizer step of the measurement."""
        raise NotImplementedError

    def _emit(self, numbers: LayerNumbers, step: int, logger_step: int) -> None:
        """Sends numbers of layers to loggers and history; not by ``log_dict``, which takes a millisecond per number."""
        flat = {f"{quantity}/{layer}": number for quantity, row in numbers.items() for layer, number in row.items()}
        for logger in self._loggers:
            logger.log_metrics(flat, step=logger_step)
        for report in self._reports:
            report.record_layers(numbers, step)

    def _read(self) -> None:
        unread, self._unread = self._unread, []
        tensors = [tensor.flatten() for _, columns in unread for tensor in columns.values()]
        try:
            numbers = iter(torch.cat(tensors).tolist() if tensors else [])
        except RuntimeError as error:
            if is_of_device(error):  # the next use of the device reports it
                return
            raise
        for context, columns in unread:
            values = {name: _nested(numbers, tensor.shape) for name, tensor in columns.items()}
            self._alerts.say(self._judge(context, values))


def _nested(numbers: Iterator[float], shape: Sequence[int]) -> Any:
    return [_nested(numbers, shape[1:]) for _ in range(shape[0])] if shape else next(numbers)


def is_of_device(error: RuntimeError) -> bool:
    """Tells whether an accelerator raised the error; nothing can be copied from it afterwards."""
    return isinstance(error, torch.AcceleratorError) or any(name in str(error) for name in ("CUDA error", "HIP error"))
