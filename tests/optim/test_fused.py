"""Adaptive around torch's fused steps, which go through parameters and moments in memory order and compare nothing."""

import copy
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_lowbit.optim import Adaptive
from tests.tables import each


def with_moments(values, layout):
    """A saved state whose moments lie otherwise in memory."""
    saved = copy.deepcopy(values)
    for entry in saved["state"].values():
        entry |= {name: layout(value) for name, value in entry.items() if isinstance(value, Tensor) and value.dim() > 1}
    return saved


def dense(layout):
    return lambda value: layout(value).contiguous()


@each("name", ["AdamW", "SGD", "Adagrad"])
def test_moments_of_fused_steps_lie_as_their_parameters(name):
    """torch's fused steps go through both in memory order."""
    layouts = [
        lambda value: value.contiguous(memory_format=torch.channels_last),
        lambda value: value.transpose(0, 1).contiguous().transpose(0, 1),
        lambda value: value.mean().expand(value.shape),
    ]
    for layout in layouts:
        results = []
        for fused in (True, False):
            torch.manual_seed(0)
            parameters = [Parameter(torch.randn(6, 4, 3, 3))]
            options = {"lr": 1e-2, "fused": fused, **({"momentum": 0.9} if name == "SGD" else {})}
            make = partial(getattr(torch.optim, name), **options)
            first, second = Adaptive(make(parameters)), Adaptive(make(parameters))
            for optimizer in (first, second, second):
                parameters[0].grad = torch.randn(6, 4, 3, 3)
                optimizer.step()
                if optimizer is first:
                    second.load_state_dict(with_moments(first.state_dict(), layout if fused else dense(layout)))
            results.append(parameters[0].detach())
        torch.testing.assert_close(*results)


@each("data", [lambda: torch.randn(9, 4), lambda: torch.randn(1, 4).expand(8, 4)])
def test_fused_steps_of_other_memory_are_refused(data):
    parameter = Parameter(torch.randn(8, 4))
    optimizer = Adaptive(torch.optim.AdamW([parameter], fused=True))
    parameter.grad = torch.randn(8, 4)
    optimizer.step()
    parameter.data, shape = data(), data().shape
    parameter.grad = torch.randn(shape)
    with pytest.raises(ValueError, match="fused step needs|at a parameter that is"):
        optimizer.step()
