"""Loads golden vectors: ``tests/data/<name>.npz`` holds ``case/field`` arrays, see :func:`load`."""

from functools import cache
from pathlib import Path

import numpy as np
import torch

DATA = Path(__file__).parent / "data"


@cache
def load(name):
    """All arrays of a file, by ``case/field``; ``["cases"]`` (or ``["formats"]``) lists the cases."""
    with np.load(DATA / f"{name}.npz") as file:
        return dict(file)


def cases(name):
    return [str(case) for case in load(name)["cases"]]


def case(name, case):
    """The fields of one case; its input, ``x`` or a weight ``w``, as a tensor in the dtype it stands for."""
    prefix = f"{case}/"
    fields = {key.removeprefix(prefix): value for key, value in load(name).items() if key.startswith(prefix)}
    inputs = {key: _tensor(fields[key], str(fields[f"{key}_dtype"])) for key in ("x", "w") if key in fields}
    return {**fields, **inputs}


def _tensor(array, dtype):
    if dtype == "bfloat16":  # stored as its 16 bits
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    assert dtype == "float32", f"no such input dtype: {dtype}"
    return torch.from_numpy(array.copy())
