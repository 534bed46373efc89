"""One process of a part: ``python -m tests.gpu.child PART --out DIR ...``, started by the command.

It runs the checks that are its share and have not begun yet, and stops before one for which no time is left. After an
error of CUDA, which leaves a process without a GPU, it ends; the command starts another one for the rest.
"""

import argparse
import importlib
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path

from tests.gpu import plants
from tests.gpu.records import Log, lines_of, names_begun
from tests.gpu.table import LOST, Setting, Skipped, Wrong


def run(check, log):
    """Runs a check, and returns whether the process can go on."""
    log.begin(check.name)
    start, value, why, ok, goes_on = time.monotonic(), None, "", True, True
    try:
        value = check.run()
        ok = True if check.judges else None
    except Skipped as reason:
        ok, why = None, f"skipped: {reason}"
    except Wrong as fault:
        ok, why = False, str(fault)
    except Exception as error:
        ok, why = False, _words(error)
        goes_on = not _is_of_cuda(error)
    log.end(check.name, ok, value, why, time.monotonic() - start)
    return goes_on


def _words(error):
    """The error, and the last lines of code that it came from."""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    places = " < ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in reversed(frames))
    return f"{type(error).__name__}: {' '.join(str(error).split())[:800]} ({places})"


def _is_of_cuda(error):
    import torch

    return isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("part")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--share", type=int)
    parser.add_argument("--shares", type=int)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--only", action="append", default=[])
    options = parser.parse_args()
    start, log = time.monotonic(), Log(options.out, options.part, options.share)
    begun = names_begun(lines_of(log.path), options.part)
    try:
        import torch

        torch.set_num_threads(1 if options.shares > 1 else 4)
        warnings.simplefilter("default")
        module = importlib.import_module(f"tests.gpu.parts.{options.part}")
        checks = list(module.checks(Setting(options.device, options.small)))
        if options.only:
            checks = [check for check in checks if any(words in check.name for words in options.only)]
        names = Counter(check.name for check in checks)
        if names and max(names.values()) > 1:
            raise ValueError(f"names of checks repeat: {names.most_common(3)}")
        checks = checks[options.share :: options.shares]
    except Exception as error:
        log.end("(start)", False, why=_words(error), seconds=time.monotonic() - start)
        sys.exit(1)
    for check in checks:
        if check.name in begun:
            continue
        if time.monotonic() - start > options.seconds:
            log.end(check.name, None, why="skipped: time")
        elif not run(plants.planted(check, options.part), log):
            sys.exit(LOST)


if __name__ == "__main__":
    main()
