"""Smooth-SwiGLU over steps: evaluation by what the last training step told, recomputation, and the state."""

import copy

import pytest
import torch
from torch import nn

from lightning_lowbit import convert
from lightning_lowbit.nn import AmaxHistories, swiglus
from tests.nn.conversion.swiglus import (
    CURRENT,
    DELAYED,
    KINDS,
    MLP,
    Net,
    down_power,
    factors,
    only_down,
    product_amax,
    step,
)


def test_histories_hold_what_is_quantized():
    """Of s * h, whose largest magnitude is between 1/2 and 1, and of no weight, which has its own scale."""
    mlp = only_down(MLP(), DELAYED)
    histories = AmaxHistories(mlp)
    for scale in (1.0, 1000.0, 1e-3):
        step(mlp, histories, scale * torch.randn(20, 16))
    of_down = {k.split("/")[1]: v for k, v in histories.state_dict()["amax_history"].items() if k.startswith("down")}
    assert of_down.keys() == {"fprop_x", "dgrad_g", "wgrad_g", "wgrad_x"}
    for name in ("fprop_x", "wgrad_x"):
        assert ((of_down[name][-3:] > 0.5) & (of_down[name][-3:] <= 1)).all(), of_down[name]
        assert not of_down[name][:-3].any()


def test_evaluation_uses_the_last_training_step():
    """The largest of its micro-batches; training uses the batch's own, and evaluation leaves no trace."""
    mlp = MLP()
    model = only_down(copy.deepcopy(mlp), DELAYED)
    histories = AmaxHistories(model)
    batches = [torch.randn(6, 16) * scale for scale in (100.0, 1.0, 1.2, 0.01)]
    amaxes = [product_amax(mlp, x) for x in batches]
    assert torch.equal(factors(model, batches[0]), down_power(amaxes[0])), "recording"
    histories.recording = False
    assert torch.equal(factors(model, batches[1]), down_power(amaxes[1])), "no step yet: its own"
    histories.recording = True
    step(model, histories, batches[0])  # an earlier step must be forgotten
    step(model, histories, batches[1], batches[2])
    of_step = torch.maximum(amaxes[1], amaxes[2])
    assert not torch.equal(down_power(of_step), down_power(amaxes[2])), "the micro-batches must differ"
    state = histories.state_dict()
    torch.testing.assert_close(state["channel_amax"]["down_proj"], of_step)
    for x in (batches[3], batches[0]):
        assert torch.equal(factors(model, x), down_power(of_step)), "evaluation"
    assert all(torch.equal(histories.state_dict()[k][n], t) for k, d in state.items() for n, t in d.items())
    histories.recording = True
    assert torch.equal(factors(model, batches[3]), down_power(amaxes[3])), "training again"
    histories.advance_()
    torch.testing.assert_close(histories.state_dict()["channel_amax"]["down_proj"], amaxes[3])


def test_a_channel_that_was_silent_keeps_its_amax():
    """Silent in the last step: that of the step before; silent so far: evaluation takes the batch's own."""
    mlp = MLP()
    model = only_down(copy.deepcopy(mlp), DELAYED)
    histories = AmaxHistories(model)
    x = torch.randn(6, 16)
    silence = model.between.register_forward_hook(lambda _, __, h: h.index_fill(-1, torch.tensor([7]), 0))
    step(model, histories, x)
    silence.remove()
    amax = product_amax(mlp, 64 * x)
    seen = factors(model, 64 * x)
    assert seen[7] == down_power(amax)[7]
    assert (seen[:7] > down_power(amax)[:7]).all()
    step(model, histories, x)
    silence = model.between.register_forward_hook(lambda _, __, h: h.index_fill(-1, torch.tensor([7]), 0))
    step(model, histories, 2 * x)
    silence.remove()
    kept = histories.state_dict()["channel_amax"]["down_proj"]
    torch.testing.assert_close(kept[7], product_amax(mlp, x)[7])
    torch.testing.assert_close(kept[:7], product_amax(mlp, 2 * x)[:7])


@pytest.mark.parametrize("in_training", [False, True], ids=["eval", "train"])
def test_without_histories_it_uses_the_batch(in_training):
    mlp = MLP()
    model = only_down(copy.deepcopy(mlp), CURRENT)
    model.train(in_training)
    for scale in (1.0, 100.0):
        x = scale * torch.randn(6, 16)
        assert torch.equal(factors(model, x), down_power(product_amax(mlp, x)))


@pytest.mark.parametrize("recompute", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("kind", KINDS)
def test_activation_checkpointing_changes_nothing(kind, recompute):
    """Losses, gradients and histories of three steps of two micro-batches each."""
    runs = []
    for how in (None, recompute):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 16), MLP(), MLP(), nn.Linear(16, 4))  # no residual: two terms have one sum
        convert(model, DELAYED, smooth_swiglu=kind)
        for mlp in swiglus(model).values():
            mlp.recompute = how
        histories, optimizer = AmaxHistories(model), torch.optim.SGD(model.parameters(), lr=0.1)
        seen = {}
        for i in range(3):
            optimizer.zero_grad()
            for j in range(2):
                loss = model(torch.randn(9, 8)).square().mean()
                loss.backward()
                seen[f"loss {i} {j}"] = loss.detach()
            seen |= {f"{name} {i}": p.grad.clone() for name, p in model.named_parameters()}
            histories.advance_()
            optimizer.step()
            state = histories.state_dict()
            seen |= {f"{what} {name} {i}": t for what in state for name, t in state[what].items()}
        runs.append(seen)
    assert runs[0].keys() == runs[1].keys()
    for name, expected in runs[0].items():
        assert torch.equal(runs[1][name], expected), name


def test_token_smoothing_alone_has_nothing_to_remember():
    assert len(AmaxHistories(convert(MLP(), CURRENT, smooth_swiglu="token"))) == 0
    assert len(AmaxHistories(convert(MLP(), CURRENT, smooth_swiglu="channel"))) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_deepcopy(kind):
    """A copy computes by its own up projection, and once training is over by the same amaxes; it shares nothing."""
    model = convert(Net(), DELAYED, smooth_swiglu=kind)
    histories = AmaxHistories(model)
    step(model, histories, torch.randn(9, 8))
    x = torch.randn(9, 8)
    expected = model(x)
    histories.release()
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x), expected)
    histories = AmaxHistories(model)
    for mlp, own in zip(twin.layers, model.layers, strict=True):
        assert mlp.down_proj.lowbit.amaxes.in_force is not own.down_proj.lowbit.amaxes.in_force
        for hook in mlp.up_proj._forward_hooks.values():
            assert hook.down is mlp.down_proj, "tells the tokens to the original"
    step(model, histories, 100 * torch.randn(9, 8))
    assert not torch.equal(model(x), expected)
    assert torch.equal(twin(x), expected), "training the original changed the copy"
