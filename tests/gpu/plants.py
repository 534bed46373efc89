"""Faults that are planted into a run, to see that it reports them and that the rest goes on.

``LOWBIT_GPU_PLANT=PART:KIND`` plants into the first check of a part: ``bit``, the last bit of each result of a kernel
is another one; ``compile``, a kernel that does not compile; ``hang``, a check that does not end; ``death``, a process
that ends.
"""

import os
import time

import torch

VARIABLE = "LOWBIT_GPU_PLANT"


def planted(checks, part, share):
    """The checks of a part, of which the first one is made to fail if this is asked for."""
    where, _, kind = os.environ.get(VARIABLE, "").partition(":")
    if where != part or share or not checks:
        return checks
    first = checks[0]
    return [first._replace(run=lambda: KINDS[kind](first.run)), *checks[1:]]


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
    values = getattr(result, "values", None)
    if isinstance(values, torch.Tensor) and values.numel():
        values.view(torch.uint8).view(-1)[0] ^= 1
    return result


def _compile(run):
    from tests.benchmarks import kernels

    right = kernels.compile_for
    kernels.compile_for = lambda launch, arch: right(launch._replace(constants=launch.constants | {"CAST": None}), arch)
    try:
        return run()
    finally:
        kernels.compile_for = right


def _hang(run):
    time.sleep(10**6)


def _death(run):
    os.abort()


KINDS = {"bit": _bit, "compile": _compile, "hang": _hang, "death": _death}
