"""What a scaler found, and bad input."""

import math

import pytest
import torch
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn import Parameter
from torch.optim import SGD, AdamW

from lightning_lowbit import (
    ConservativeGradScaler,
    GradientNormGradScaler,
    ShardedConservativeGradScaler,
    ShardedGradientNormGradScaler,
    StaticGradScaler,
)
from lightning_lowbit.precision.grad_scalers import overflow, share_overflow
from tests.precision.grad_scalers.scalers import INF, NAN, make, state_of
from tests.tables import each


@pytest.mark.parametrize("cls", [GradScaler, ShardedGradScaler, ConservativeGradScaler, ShardedConservativeGradScaler])
def test_overflow(cls):
    scaler = make(cls)
    parameters = [Parameter(torch.ones(2)) for _ in range(3)]
    clean, infinite, later = (SGD([p], lr=0.1) for p in parameters)
    assert overflow(scaler) is None
    scaler.scale(torch.ones(()))
    assert overflow(scaler) is None
    assert overflow(scaler, clean) is None
    for p, gradient in zip(parameters, (1.0, INF, 1.0), strict=True):
        p.grad = torch.full((2,), gradient)
    scaler.unscale_(clean)
    assert overflow(scaler, infinite) is None, "not unscaled yet"
    assert overflow(scaler) == torch.tensor(False)
    scaler.unscale_(infinite)
    for optimizer, expected in ((None, True), (clean, False), (infinite, True)):
        found = overflow(scaler, optimizer)
        assert (found.dtype, found.shape, bool(found)) == (torch.bool, (), expected)
    assert overflow(scaler, later) is None, "asking leaves nothing behind"
    scaler.update()
    assert overflow(scaler) is None


@each("cls", [GradScaler, ConservativeGradScaler, GradientNormGradScaler, ShardedGradScaler])
@each("over_ranks", [False, True])
def test_a_step_without_any_gradient(cls, over_ranks):
    scaler, parameter = make(cls), Parameter(torch.ones(2))
    optimizer = SGD([parameter], lr=0.1)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    share_overflow(scaler, optimizer, torch.device("cpu"), over_ranks)
    assert overflow(scaler, optimizer) == torch.tensor(False)
    scaler.step(optimizer)
    scaler.update()
    assert state_of(scaler) == (2.0**16, 1)


@each("fused", [True, False])
@each("bad", [1.0, INF])
@each("cls", [GradScaler, ShardedGradScaler, ConservativeGradScaler, ShardedConservativeGradScaler])
def test_sharing_keeps_what_was_found(cls, bad, fused):
    """And every optimizer takes it; what torch's sharded class finds has one dimension, fused ones ask for none."""
    scaler, parameter = make(cls), Parameter(torch.ones(2))
    optimizer = AdamW([parameter], lr=0.1, fused=fused)
    scaler.scale(torch.ones(()))
    parameter.grad = torch.tensor([1.0, bad])
    scaler.unscale_(optimizer)
    share_overflow(scaler, optimizer, torch.device("cpu"), over_ranks=True)
    assert overflow(scaler, optimizer) == torch.tensor(math.isinf(bad))
    scaler.step(optimizer)
    assert (parameter == 1).all() == math.isinf(bad), "a step with an infinity is skipped, and no other"


@each("cls", [ShardedConservativeGradScaler, ShardedGradientNormGradScaler])
def test_sharded_scalers_unscale_before_fused_steps(cls):
    """As when gradients are clipped, which torch's sharded class does not go with."""
    scaler, parameter = make(cls), Parameter(torch.ones(2))
    optimizer = AdamW([parameter], lr=0.1, fused=True)
    for bad, expected in ((1.0, 2.0**16), (INF, 2.0**15)):
        scaler.scale(torch.ones(()))
        parameter.grad = torch.tensor([1.0, bad])
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert state_of(scaler)[0] == expected


NO_COUNT, NO_BOUND = (0, -1, 1.5, True, "2"), (-1, NAN, True, "1", None)
BAD = {
    "growth_factor": (1, 0.5, -2, INF, NAN, True, "2"),
    "backoff_factor": (0, 1, -0.5, 2, NAN, True, "0.5"),
    "init_scale": (0, -1, INF, NAN, 1e39, True, "65536"),
    "growth_interval": NO_COUNT,
    "hysteresis": NO_COUNT,
    "cooldown": NO_COUNT[1:],
    "floor": NO_BOUND,
    "cap": NO_BOUND,
}
TOGETHER = [
    ({"init_scale": 0.5}, "floor=1.0 and cap=16777216.0; got init_scale=0.5"),
    ({"init_scale": 2.0**25}, "cap=16777216.0; got init_scale=33554432.0"),
    ({"preset": "tiny-loss", "cap": 2.0**17}, "cap=131072.0; got init_scale=262144.0"),
    ({"floor": 8, "cap": 4}, "floor=8, cap=4"),
    ({"preset": "tinyloss"}, r"Unknown preset 'tinyloss'\. Did you mean 'tiny-loss'\?.*'quantized-fine-tuning'"),
    ({"preset": None}, "Unknown preset None"),
]
REFUSED = [
    *((ConservativeGradScaler, {name: bad}, name) for name, values in BAD.items() for bad in values),
    *((ConservativeGradScaler, *case) for case in TOGETHER),
    *((StaticGradScaler, {"scale": bad}, "scale is") for bad in (-1, 0, INF, NAN, 1e39, True, "1")),
    *((GradientNormGradScaler, {"threshold": bad}, "threshold") for bad in (-1, 0, INF, NAN, True, "1")),
    (GradientNormGradScaler, {"growth_factor": 1}, "growth_factor"),
]


@each(("cls", "arguments", "message"), REFUSED)
def test_bad_input(cls, arguments, message):
    with pytest.raises(ValueError, match=message) as raised:
        make(cls, **arguments)
    *_, value = arguments.values()
    assert repr(value) in str(raised.value) or f"{value}" in str(raised.value), "does not say what came"


def test_good_input_at_the_edges():
    make(ConservativeGradScaler, floor=2.0**16, cap=2.0**16)
    make(ConservativeGradScaler, init_scale=torch.finfo(torch.float32).max, cap=INF)
    make(ConservativeGradScaler, cooldown=0, hysteresis=1, growth_interval=1, growth_factor=1.0001)
    make(StaticGradScaler, scale=1)
