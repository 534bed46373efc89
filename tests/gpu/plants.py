"""Faults that are planted into a run, to see that it reports them and that the rest goes on.

``LOWBIT_GPU_PLANT=PART:KIND:WORDS`` plants into the checks of a part whose names hold these words: ``bit``, the last
bit of each result of a kernel is another one; ``compile``, a kernel that does not compile; ``hang``, a check that does
not end; ``death``, a process that ends.
"""

import os
import time

import torch

VARIABLE = "LOWBIT_GPU_PLANT"


def planted(check, part):
    """The check, which is made to fail if this is asked for."""
    where, kind, words = [*os.environ.get(VARIABLE, "").split(":", 2), "", ""][:3]
    return check._replace(run=lambda: KINDS[kind](check.run)) if where == part and words in check.name else check


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
