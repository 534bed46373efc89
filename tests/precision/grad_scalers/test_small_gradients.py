"""Small gradients count for more under a scaled loss."""

import math

import pytest
import torch
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW

from lightning_lowbit import (
    ConservativeGradScaler,
    GradientNormGradScaler,
    ShardedGradientNormGradScaler,
    StaticGradScaler,
)
from lightning_lowbit.precision.grad_scalers import overflow
from tests.precision.grad_scalers.scalers import INF, NAN, make, state_of
from tests.tables import each


def test_sparse_gradients_and_groups_without_any():
    """A sparse gradient has a norm when what it holds twice is added; so one row of two ones twice is of length √8."""
    sparse = Parameter(torch.zeros(4, 2))
    sparse.grad = torch.sparse_coo_tensor([[1, 1]], torch.ones(2, 2), (4, 2), check_invariants=True)
    optimizer = SGD([{"params": []}, {"params": [sparse]}], lr=1.0)
    scaler = make(GradientNormGradScaler, threshold=math.sqrt(32), init_scale=1.0)
    scaler.scale(torch.zeros(()))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    expected = torch.zeros(4, 2)
    expected[1] = -2 * 1.5  # 1 + (1 - √8 / √32)
    torch.testing.assert_close(sparse.detach(), expected)  # a root and a quotient are rounded


def test_gradients_in_float64_have_a_norm():
    parameter = Parameter(torch.zeros(4, dtype=torch.float64))
    parameter.grad = torch.ones(4, dtype=torch.float64)
    scaler = make(GradientNormGradScaler, threshold=4.0, init_scale=1.0)
    scaler.scale(torch.zeros(()))
    scaler.unscale_(SGD([parameter], lr=1.0))
    assert parameter.grad.tolist() == [1.5] * 4


def test_a_device_is_taken_by_its_type():
    for device, kind in (("cpu", "cpu"), ("cpu:0", "cpu"), ("meta", "meta")):
        assert ConservativeGradScaler(device=device)._device == kind
    with pytest.raises(ValueError, match="device is where it trains, such as 'cuda' or 'cpu'; got 'gpu'"):
        ConservativeGradScaler(device="gpu")


def test_a_static_scale_takes_no_setting_that_moves_it():
    for other in ("floor", "growth_factor", "preset", "hysteresis"):
        with pytest.raises(TypeError, match=other):
            StaticGradScaler(8.0, **{other: 2})


@each("cls", [GradientNormGradScaler, ShardedGradientNormGradScaler])
@each(("size", "factor"), [(0.0, 2), (0.2, 1.8), (0.5, 1.5), (0.75, 1.25), (1.0, 1), (3.0, 1)])
def test_unscaled_gradients_are_the_true_ones_times_the_factor(cls, size, factor):
    """The norm is that of all gradients of the optimizer: 3, 4 and 12 make 13."""
    scaler = make(cls, threshold=0.13, init_scale=2.0**12)
    parameters = [Parameter(torch.zeros(shape)) for shape in ((2, 2), (1,), (0,), (3,), ())]
    true = [torch.tensor([[0, 0.03], [0, 0]]), torch.tensor([0.04]), torch.zeros(0), None, torch.tensor(-0.12)]
    optimizer = SGD([{"params": parameters[:2]}, {"params": parameters[2:]}], lr=1.0)
    scaled = scaler.scale(torch.ones(()))
    for p, gradient in zip(parameters, true, strict=True):
        p.grad = None if gradient is None else gradient * size * scaled
    scaler.unscale_(optimizer)
    for p, gradient in zip(parameters, true, strict=True):
        if gradient is None:
            assert p.grad is None
        else:  # float32, a few roundings: of the norm, the factor and the product
            torch.testing.assert_close(p.grad, gradient * size * factor, rtol=1e-6, atol=0)
    assert overflow(scaler) == torch.tensor(False)
    scaler.step(optimizer)
    torch.testing.assert_close(parameters[1].detach(), torch.tensor([-0.04 * size * factor]), rtol=1e-6, atol=0)


def gradients_of(step):
    """Of norms below the threshold of 1, and each another one."""
    generator = torch.Generator().manual_seed(step)
    directions = [torch.randn(shape, generator=generator) for shape in ((4, 3), (5,))]
    return [g * 0.04 * (step + 1) for g in directions]


def trained(make_optimizer, scaler=None, rule=None):
    """Parameters after some steps: by a scaler, or by gradients to which the rule is applied by hand."""
    parameters = [Parameter(torch.ones(shape)) for shape in ((4, 3), (5,))]
    optimizer = make_optimizer(parameters)
    for step in range(5):
        gradients = gradients_of(step)
        if scaler is not None:
            scale = scaler.scale(torch.ones(()))
            gradients = [g * scale for g in gradients]
        elif rule is not None:
            norm = math.sqrt(sum(g.double().square().sum().item() for g in gradients))
            assert norm < rule or step > 2, "these are to be small"
            gradients = [g * min(max(2 - norm / rule, 1), 2) for g in gradients]
        for p, g in zip(parameters, gradients, strict=True):
            p.grad = g
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    return [p.detach() for p in parameters]


@each("fused", [True, False])
@each("cls", [SGD, Adam, AdamW])
@each("scaler", [GradientNormGradScaler, ShardedGradientNormGradScaler])
def test_optimizers_are_given_the_factor(scaler, cls, fused):
    """Without an explicit `unscale_`; fused optimizers would unscale by themselves."""

    def make_optimizer(parameters):
        return cls(parameters, lr=0.1, fused=fused)

    found = trained(make_optimizer, make(scaler, threshold=1.0))
    expected, without = trained(make_optimizer, rule=1.0), trained(make_optimizer)
    for a, b, c in zip(found, expected, without, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)  # float32 in another order, five steps of about 0.1
        assert (a - c).abs().max() > 1e-3, "it makes no difference, so that this shows nothing"


@each("fused", [True, False])
@each("bad", [INF, -INF, NAN])
@each("cls", [GradientNormGradScaler, ShardedGradientNormGradScaler])
def test_an_infinity_is_found_under_the_rule(cls, bad, fused):
    scaler, parameters = make(cls), [Parameter(torch.ones(3)), Parameter(torch.ones(2))]
    optimizer = AdamW(parameters, lr=0.1, fused=fused)
    scaler.scale(torch.ones(()))
    parameters[0].grad, parameters[1].grad = torch.tensor([1.0, bad, 1.0]), torch.ones(2)
    scaler.step(optimizer)
    assert overflow(scaler, optimizer) == torch.tensor(True)
    scaler.update()
    assert all((p == 1).all() for p in parameters), "a step with an infinity was taken"
    assert state_of(scaler)[0] == 2.0**15
