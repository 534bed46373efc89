"""Everything that a GPU can show, by one command.

    python -m tests.gpu --out DIR [--budget 540] [--parts NAME ...] [--only WORDS ...] [--device cuda]

Runs in the root of a checkout, installed or not; needs torch, Triton, Lightning, transformers and pytest, and no
network. This process never touches CUDA. Each part (:mod:`tests.gpu.table`) runs in processes of its own, with a time
limit; a check that ends its process, or does not end, is reported, and the rest goes on. DIR gets ``results.jsonl``,
line by line, and after each part ``summary.json`` and ``tables.md``; ``output.log`` holds what the processes print. The
exit status is the number of parts in which something is wrong. ``python -m tests.gpu.page DIR/results.jsonl`` draws
what a reader chooses by.

``--device cpu`` rehearses the command: kernels run in Triton's interpreter, sizes are small, and checks that need CUDA
are skipped. ``LOWBIT_GPU_PLANT`` plants a fault that must be reported (:mod:`tests.gpu.plants`).
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.gpu.records import (
    OUTPUT,
    RESULTS,
    SUMMARY,
    TABLES,
    Log,
    lines_of,
    open_checks,
    records_of,
    replace,
    summary_of,
    tables_of,
)
from tests.gpu.table import LOST, PARTS

ROOT = Path(__file__).parents[2]
GRACE = 5.0  # seconds that a process has to end by itself
LEAST = 10.0  # with less time, a part is not begun


class Worker:
    """A process that runs a share of the checks of a part, and its successors."""

    def __init__(self, part, share, shares, options, deadline):
        self.part, self.share, self.shares, self.options, self.deadline = part, share, shares, options, deadline
        self.log = Log(options.out, part.name, share)
        self.patience = options.patience or part.patience
        self._start()

    def _start(self):
        options, device = self.options, self.options.device
        seconds = max(self.deadline - time.monotonic(), 0)
        command = [sys.executable, "-m", "tests.gpu.child", self.part.name, "--out", options.out, "--device", device]
        command += ["--share", self.share, "--shares", self.shares, "--seconds", seconds]
        command += ["--small"] * (device == "cpu") + [f"--only={words}" for words in options.only]
        self.started = time.monotonic()
        environment = {**os.environ, "TRITON_CACHE_DIR": str(options.cache)}
        environment.pop("TRITON_INTERPRET", None)
        if self.shares > 1:  # there are as many processes as cores already
            environment |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        if device == "cpu" and self.part.interpreted:
            environment["TRITON_INTERPRET"] = "1"
        with open(options.out / OUTPUT, "a") as output:
            self.process = subprocess.Popen(
                [str(word) for word in command], cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
            )

    def is_at_work(self, lines):
        """Looks after the process: ends one that hangs, starts another for the rest; returns whether there is one."""
        now, status = time.monotonic(), self.process.poll()
        if status is not None:
            lines = lines_of(self.log.path)  # with the last ones
        begun = open_checks(lines, self.part.name, self.share)
        if status is None:
            waited = max((time.time() - began for began in begun.values()), default=0.0)
            if waited <= self.patience and now <= self.deadline + GRACE:
                return True
            self._end()
            if not begun and now - self.started > self.patience:
                self._report({"(start)": time.time()}, False, "the process did not begin within its time")
            elif not begun:
                self._report({"(start)": time.time()}, None, "skipped: time")
            elif waited > self.patience:
                self._report(begun, False, f"no end after {waited:.0f} s")
            else:
                self._report(begun, None, f"skipped: time, after {waited:.0f} s")
        elif status != LOST and not begun:
            return False  # at its end, or at its start, which it has reported
        else:
            self._report(begun, False, f"the process ended with status {status}")
        if now >= self.deadline:
            return False
        self._start()
        return True

    def _report(self, begun, ok, why):
        for name, began in begun.items():
            self.log.end(name, ok, why=why, seconds=time.time() - began)

    def _end(self):
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that waits for a lost GPU
            self.process.wait(GRACE)


def run_part(part, options, seconds):
    """Runs a part in at most so many seconds."""
    shares = min(part.processes, options.processes)
    deadline = time.monotonic() + seconds
    workers = [Worker(part, share, shares, options, deadline) for share in range(shares)]
    try:
        while workers:
            time.sleep(0.2)
            lines = lines_of(options.out / RESULTS)
            workers = [worker for worker in workers if worker.is_at_work(lines)]
    finally:
        for worker in workers:
            worker.process.kill()


def report(options, finished):
    records = records_of(options.out / RESULTS)
    summary = summary_of(records, options.parts)
    for name, seconds in finished.items():
        summary[name]["seconds"] = seconds
    replace(options.out / SUMMARY, json.dumps(summary, indent=1) + "\n")
    replace(options.out / TABLES, tables_of(records, options.parts))
    return summary


def parsed(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder, which is made")
    parser.add_argument("--budget", type=float, default=540, help="seconds for all parts")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS), metavar="NAME")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORDS", help="checks whose names hold one of these")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="at once, at most; the number of cores")
    parser.add_argument("--patience", type=float, help="seconds for a check, in place of those of its part")
    parser.add_argument("--cache", type=Path, help="of Triton's compiler, outside of DIR")
    options = parser.parse_args(arguments)
    options.out = options.out.resolve()
    options.cache = options.cache or Path(tempfile.gettempdir()) / "lowbit_gpu_cache"
    options.parts = [name for name in PARTS if name in options.parts]
    return options


def main(arguments=None):
    start, options = time.monotonic(), parsed(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    if lines_of(options.out / RESULTS):
        sys.exit(f"{options.out / RESULTS} holds the results of another run: give an empty folder.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))  # and so are the processes
    finished, summary = {}, {}
    for name in options.parts:
        part, begin = PARTS[name], time.monotonic()
        left = options.budget - (begin - start)
        if left < LEAST:
            Log(options.out, name).end("(all)", None, why="skipped: time")
        else:
            limit = part.seconds if options.device == "cuda" else left  # interpreted kernels take long
            run_part(part, options, min(limit, left - GRACE))
        finished[name] = round(time.monotonic() - begin, 1)
        summary = report(options, finished)
        counts = {key: value for key, value in summary[name].items() if key != "failures"}
        print(f"{name}: {counts}", flush=True)
        for check, why in summary[name]["failures"].items():
            print(f"    {check}: {why[:300]}", flush=True)
    sys.exit(sum(bool(part["failures"]) for part in summary.values()))


if __name__ == "__main__":
    main()
