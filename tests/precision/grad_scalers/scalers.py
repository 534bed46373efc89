"""Scalers of the loss, and steps with them."""

import itertools
import math

import torch
from torch.nn import Parameter
from torch.optim import SGD

from tests.tables import deterministic

PROFILE = deterministic(25)

INF, NAN = math.inf, math.nan


def make(cls, **arguments):
    """A scaler of the CPU, on machines with an accelerator too."""
    return cls(device="cpu", **arguments)


def state_of(scaler):
    scale, tracker = scaler._check_scale_growth_tracker("the test")
    assert (scale.dtype, tracker.dtype, scale.shape, tracker.shape) == (torch.float32, torch.int32, (), ())
    return scale.item(), int(tracker.item())


def drive(scaler, overflows):
    """Trains a parameter, in some steps with an infinity or a NaN in its gradient; yields the scale and the tracker.

    A step is taken unless there is one, by the gradient without the scale.
    """
    parameter = Parameter(torch.zeros(2))
    optimizer = SGD([parameter], lr=1.0)
    bad = itertools.cycle((INF, NAN, -INF))
    for overflowed in overflows:
        before = parameter[0].item()
        scaler.scale(torch.zeros(()))
        scale = scaler.get_scale()
        parameter.grad = torch.tensor([1.0, next(bad) if overflowed else 1.0]) * scale
        scaler.step(optimizer)
        scaler.update()
        if 2.0**-100 < scale < 2.0**100:  # beyond, the reciprocal is not within float32
            moved = before - parameter[0].item()
            assert math.isclose(moved, not overflowed, rel_tol=1e-5), f"moved by {moved}, overflow: {overflowed}"
        yield state_of(scaler)


def steps(text):
    """x for a step with an overflow, a dot for one without."""
    return [letter == "x" for letter in text]
