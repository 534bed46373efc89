"""StableSPAM against the slow reference; what every optimizer keeps to is in `conformance`."""

import torch
from torch.nn import Parameter

from lightning_lowbit.optim import StableSPAM
from tests.optim.parameters import assert_same, make_parameters, set_gradients
from tests.references.stable_spam import Reference


def test_bf16_update_is_the_fp32_update_rounded_once():
    low = make_parameters(torch.bfloat16)
    high = [Parameter(p.detach().float()) for p in low]
    set_gradients(low, seed=0)
    for p, q in zip(low, high, strict=True):
        q.grad = p.grad.float()
    StableSPAM(low, lr=0.1, weight_decay=0.1).step()
    StableSPAM(high, lr=0.1, weight_decay=0.1).step()
    assert_same([p.detach() for p in low], [q.detach().bfloat16() for q in high], "bf16 is not fp32 rounded")


def test_bf16_preset_multiplier_is_accurate():
    """1 − γ2ᵗ in fp32, taken literally, is off by more than 1e-3 here."""
    parameter, generator = Parameter(torch.zeros(1)), torch.Generator().manual_seed(0)
    optimizer = StableSPAM([parameter], preset="bf16")
    reference = Reference(parameter, gamma1=0.85, gamma2=0.99999)
    for step in range(300):
        parameter.grad = torch.randn(1, generator=generator).exp()
        optimizer.step()
        reference.step(parameter.grad)
        state = optimizer.state[parameter]
        multiplier = (state["norm_mean"] / (state["norm_mean_square"].sqrt() + 1e-8)).item()
        error = abs(multiplier / reference.multiplier - 1)
        assert error < 1e-6, f"step {step + 1}: {multiplier} against {reference.multiplier}, relative error {error}"
