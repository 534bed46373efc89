"""Handlers of signals that forked children do not inherit.

Python runs a handler once the call returns in which a process waits. In a worker that may be never, and a pool that
ends its workers by SIGTERM would wait for them.
"""

import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

_handlers: dict[int, Any] = {}


def handle(number: int, handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> Any:
    """Installs a handler of a signal, and returns the one before.

    Instead of calling it, forked children ignore Ctrl-C, which a terminal sends to them, too, and other signals end
    them. A signal that is ignored is ignored there, too.
    """
    _handlers[number] = handler
    return signal.signal(number, handler)


def _reset() -> None:
    for number, handler in _handlers.items():
        if callable(handler) and signal.getsignal(number) is handler:
            signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)


if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(after_in_child=_reset)
