"""Handlers of signals in a process and in the children that it forks."""

import subprocess
import sys

FORK = """if True:
    import os, signal
    from lightning_lowbit.signals import handle
    handlers = {signal.SIGINT: lambda *_: None, signal.SIGTERM: lambda *_: None}
    for number, handler in handlers.items():
        handle(number, handler)
    signal.signal(signal.SIGUSR1, handlers[signal.SIGINT])
    handle(signal.SIGUSR2, signal.SIG_IGN)
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
        assert all(signal.getsignal(number) is handler for number, handler in handlers.items())
    else:
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGUSR1) is handlers[signal.SIGINT]
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
"""


def test_forked_children_ignore_ctrl_c_and_leave_other_signals_to_the_default():
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=60)
