"""Starts the processes of a test, what each of them does, and gathers what they saw.

Importing takes most of the time of a short run. So processes are forks of one that has imported everything, one for
each process of pytest.
"""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
from datetime import timedelta
from importlib import import_module
from multiprocessing.reduction import DupFd
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

LIMIT = 300  # seconds; on two quiet cores they take a tenth of that

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(
    [
        os.environ.get("LOWBIT_TEST_LIGHTNING", "lightning.pytorch"),  # first, as in tests.lightning_imports
        "datasets",
        "lightning_lowbit.callbacks",
        "lightning_lowbit.recipes.models",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.debug",
        "torch.distributed.tensor.parallel",
        "torch.utils.tensorboard",
        "transformers.models.llama.modeling_llama",
    ]
)


def start(log, module, *arguments):
    """``python -m MODULE ARGUMENTS`` in the current folder: its ``multiprocessing.Process``, which has begun."""
    with log.open("w") as told:
        process = _forks.Process(
            target=_run, args=(_Descriptor(told.fileno()), Path.cwd(), {**os.environ}, module, *arguments)
        )
        process.start()
    return process


def _run(told, folder, environment, module, *arguments):
    for stream in (sys.stdout, sys.stderr):
        os.dup2(told.number, stream.fileno())
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells take it from what runs in the background
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


class Fork:
    """Stands in for ``subprocess.Popen`` of ``python -P -m MODULE ARGUMENTS``."""

    def __init__(self, command, stdout, pass_fds=(), **_):
        python, *options, module = command[:4]
        arguments = command[4:]
        assert (python, options) == (sys.executable, ["-P", "-m"]), command
        inherited = [_Descriptor(number) for number in pass_fds]
        told = _Descriptor(stdout.fileno()), Path.cwd(), {**os.environ}, module, *arguments
        self._process = _forks.Process(target=_run_as_child, args=(inherited, *told))
        self._process.start()
        self.pid = self._process.pid

    def wait(self):
        self._process.join()
        return self._process.exitcode

    def poll(self):
        return self._process.exitcode


FORKS = SimpleNamespace(Popen=Fork, STDOUT=subprocess.STDOUT, DEVNULL=subprocess.DEVNULL)  # instead of the module


class _Descriptor:
    """An open file that a fork shall have, too."""

    def __init__(self, number):
        self.number = number

    def __reduce__(self):
        return _opened, (DupFd(self.number),)


def _opened(passed):
    return _Descriptor(passed.detach())


def _run_as_child(inherited, told, *what):
    os.setsid()
    _run(told, *what)


def wait(processes):
    """Exit codes, once all have ended or one has failed, for which the others would wait; no process is left.

    None stands for one that had to be stopped.
    """
    end = time.monotonic() + LIMIT
    try:
        while any(process.exitcode is None for process in processes) and time.monotonic() < end:
            if any(process.exitcode for process in processes):
                break
            time.sleep(0.05)
        return [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()


def wait_for(happens, process, log):
    """What something returns, once it is true, while a process is running."""
    end = time.monotonic() + LIMIT
    while not (found := happens()):
        assert process.exitcode is None, f"the process ended with {process.exitcode}\n{log.read_text()[-3000:]}"
        assert time.monotonic() < end, f"nothing within {LIMIT} s"
        time.sleep(0.05)
    return found


def launch(module, ranks, folder, *arguments):
    """What ``work()`` of a module returned in each of some processes that meet.

    Each finds its rank, the folder and the arguments in ``sys.argv``, and leaves its result in ``FOLDER/RANK.pt``.
    """
    logs = [folder / f"{rank}.log" for rank in range(ranks)]
    processes = [
        start(log, "tests.launch", str(rank), str(folder), module, str(ranks), *arguments)
        for rank, log in enumerate(logs)
    ]
    codes = wait(processes)
    output = "\n".join(f"--- rank {rank}\n{log.read_text()[-3000:]}" for rank, log in enumerate(logs))
    assert codes == [0] * ranks, f"the processes ended with {codes}; None: not within {LIMIT} s, or stopped\n{output}"
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(ranks)]


def take_part(rank, folder, module, ranks, *arguments):
    """Meets the other processes, works, and leaves what came of it."""
    # How Lightning is told that others start the processes.
    os.environ.update(LOCAL_RANK=rank, NODE_RANK="0", WORLD_SIZE=ranks)
    torch.set_num_threads(1)
    os.chdir(folder)
    sys.argv = [module, rank, folder, *arguments]
    work = import_module(module).work
    # They meet in a file: a free port might be taken by the time it is used.
    meet = {"init_method": f"file://{folder}/store", "timeout": timedelta(seconds=60)}
    dist.init_process_group("gloo", **meet, rank=int(rank), world_size=int(ranks))
    torch.save(work(), f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def refusal(call, *args):
    """What a call says that is refused."""
    try:
        call(*args)
    except ValueError as error:
        return str(error)
    return "nothing"


if __name__ == "__main__":
    take_part(*sys.argv[1:])
