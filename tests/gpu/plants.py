"""Faults that are planted into a run, to see that it reports them and that the rest goes on.

``LOWBIT_GPU_PLANT=PART:KIND:WORDS``, or some of these with ``;`` between them, plants into the checks of a part whose
names hold these words: ``bit``, the last bit of each result of a kernel is another one; ``compile``, a kernel that does
not compile; ``hang``, a check that does not end; ``death``, a process that ends.
"""

import os
import time
from functools import partial

import torch

VARIABLE = "LOWBIT_GPU_PLANT"


def planted(check, part):
    """The check, which is made to fail if this is asked for."""
    for plant in filter(None, os.environ.get(VARIABLE, "").split(";")):
        where, kind, words = plant.split(":", 2)
        if where == part and words in check.name:
            return check._replace(run=partial(KINDS[kind], check.run))
    return check


def _bit(run):
    from tests.kernels import interpreted

    right = interpreted.there
    interpreted.there = lambda *arguments: _other(right(*arguments))
    try:
        return run()
    finally:
        interpreted.there = right


def _other(result):
    """A result with another last bit in its first element."""
    values = result if isinstance(result, torch.Tensor) else getattr(result, "values", None)
    if isinstance(values, torch.Tensor) and values.numel():
        values.view(-1)[:1].view(torch.uint8)[0] ^= 1
    return result


def _compile(run):
    from tests.benchmarks import kernels

    right = kernels.compile_for
    kernels.compile_for = lambda launch, arch: right(launch._replace(arguments=launch.arguments | {"x": None}), arch)
    try:
        return run()
    finally:
        kernels.compile_for = right


def _hang(run):
    time.sleep(10**6)


def _death(run):
    os.abort()


KINDS = {"bit": _bit, "compile": _compile, "hang": _hang, "death": _death}
