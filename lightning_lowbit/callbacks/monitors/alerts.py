"""Warnings of callbacks, which the report of the run lists, too."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from lightning_lowbit._lightning import rank_zero_warn
from lightning_lowbit.saved_state import NUMBER, OneOf

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
            who = worst.subject if len(problems) == 1 else f"{len(problems)} layers, the worst {worst.subject}"
            since = f" It is much worse than at step {before.step}." if before.layers else ""
            self._texts.append(f"{who}, step {step}: {worst.message}{since}")
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
