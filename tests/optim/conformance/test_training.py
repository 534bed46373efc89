"""Every optimizer in a training loop: closures, hooks, Lightning, memory layouts, host syncs."""

import math

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import Parameter
from torch.optim.lr_scheduler import StepLR

from lightning_lowbit.optim import LowBitAdamW
from lightning_lowbit.optim.optimizer import ClippedOptimizer
from tests.lightning_imports import quiet_trainer
from tests.optim.conformance.entries import ENTRIES, LR, each_entry, entries, every_entry, subclasses
from tests.optim.parameters import (
    NoHostSync,
    assert_close,
    assert_same,
    make_parameters,
    set_gradients,
    snapshot,
    train,
    use,
)


def test_every_optimizer_has_an_entry():
    kinds = {kind for kind in subclasses(ClippedOptimizer) if not any(subclasses(kind))}
    assert kinds == {entry.kind for entry in ENTRIES.values()}, "classes and entries of the table differ"


@each_entry
def test_closure_runs_first_with_gradients_enabled(entry):
    (with_closure, optimizer), (without, other) = entry.new(), entry.new()

    def loss_of(parameters):
        return torch.stack([(p.float() ** 2).sum() for p in parameters]).sum()

    def closure():
        assert torch.is_grad_enabled(), "the closure runs without gradients"
        assert not optimizer.state, "state was read before the closure ran"
        optimizer.zero_grad()
        loss = loss_of(with_closure)
        loss.backward()
        return loss

    with torch.no_grad():
        returned = optimizer.step(closure)
        assert not torch.is_grad_enabled()
    loss = loss_of(without)
    loss.backward()
    assert other.step() is None
    assert isinstance(returned, Tensor) and torch.equal(returned, loss), f"the closure's loss came back as {returned}"
    assert_same(snapshot(optimizer, with_closure), snapshot(other, without), "a step with a closure differs")


@each_entry
def test_hooks_of_torch(entry):
    parameters, optimizer = entry.new()
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before step"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after step"))
    optimizer.register_state_dict_pre_hook(lambda _: calls.append("before state_dict"))
    optimizer.register_state_dict_post_hook(lambda _, saved: {**saved, "extra": calls.append("after state_dict")})
    optimizer.register_load_state_dict_pre_hook(lambda *_: calls.append("before load"))
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("after load"))
    train(optimizer, parameters, range(1))
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    verbs = ["step", "state_dict", "load"]
    assert calls == [f"{when} {verb}" for verb in verbs for when in ("before", "after")], f"hooks ran as {calls}"
    assert "extra" in saved, "what the state_dict hook returns was ignored"


@each_entry
def test_load_pre_hooks_count(entry):
    (parameters, optimizer), (_, other) = entry.new(), entry.new()
    train(optimizer, parameters, range(2))

    def count_from_ten(_, loaded):
        return {**loaded, "state": {i: {**state, "steps": torch.tensor(10)} for i, state in loaded["state"].items()}}

    other.register_load_state_dict_pre_hook(count_from_ten)
    other.load_state_dict(optimizer.state_dict())
    assert all(state["steps"] == 10 for state in other.state.values()), "what the user's pre-hook returns was ignored"


class _Model(LightningModule):
    """A linear layer on fixed data."""

    def __init__(self, entry):
        super().__init__()
        self.entry = entry
        self.layer = torch.nn.Linear(8, 4, dtype=entry.dtype)
        with torch.no_grad():
            for p, start in zip(self.parameters(), make_parameters(entry.dtype, [(4, 8), (4,)]), strict=True):
                p.copy_(start)

    def training_step(self, batch):
        return self.layer(batch).float().square().mean()

    def configure_optimizers(self):
        self.optimizer = self.entry(self.parameters(), lr=0.1)
        return [self.optimizer], [StepLR(self.optimizer, step_size=1, gamma=0.5)]


@every_entry
def test_lightning_trains_as_a_loop_by_hand_does(entry, tmp_path):
    data = torch.randn(8, 2, 8).to(entry.dtype)
    model, by_hand = _Model(entry), _Model(entry)
    trainer = quiet_trainer(default_root_dir=tmp_path, max_epochs=2, accumulate_grad_batches=2)
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=None))
    (optimizer,), (scheduler,) = by_hand.configure_optimizers()
    for _ in range(2):
        for first in range(0, len(data), 2):
            optimizer.zero_grad()
            for batch in data[first : first + 2]:
                (by_hand.training_step(batch) / 2).backward()
            optimizer.step()
        scheduler.step()
    steps = {state["steps"].item() for state in model.optimizer.state.values()}
    assert steps == {8}, f"two epochs of eight batches, accumulated by two, are eight steps; counted {steps}"
    assert model.optimizer.param_groups[0]["lr"] == 0.025, "the scheduler did not halve lr after each of two epochs"
    assert_same(
        snapshot(model.optimizer, list(model.parameters())), snapshot(optimizer, list(by_hand.parameters())),
        "Lightning trains differently",
    )  # fmt: skip


@each_entry
def test_layouts(entry):
    """Channels last, and a transposed matrix, train as their contiguous copies do."""
    conv, matrix, expanded = make_parameters(entry.dtype, [(4, 3, 2, 2), (6, 5), (4, 6)])
    strided = [Parameter(conv.detach().to(memory_format=torch.channels_last)), Parameter(matrix.detach().t()), expanded]
    plain = [Parameter(p.detach().clone(memory_format=torch.contiguous_format)) for p in strided]
    optimizer, other = entry(strided), entry(plain)
    for step in range(6):
        for parameters in (strided, plain):
            set_gradients(parameters, seed=step)
            parameters[2].grad = torch.full((), 0.5 + step, dtype=entry.dtype).expand(4, 6)
        strided[0].grad = strided[0].grad.to(memory_format=torch.channels_last)
        strides = [p.stride() for p in strided]
        optimizer.step()
        other.step()
    assert [p.stride() for p in strided] == strides, "a parameter changed its layout"
    for p, q in zip(strided, plain, strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.pairwise(1)
@entries(lambda entry: not entry.waits_for_the_host)  # only fused ones can be told on the device to skip a step
@pytest.mark.parametrize("lr_is_tensor", [False, True], ids=["float", "tensor"])
def test_no_host_sync(entry, lr_is_tensor, within):
    within(use("torch"))
    parameters = entry.parameters()
    optimizer = entry(parameters, lr=torch.tensor(LR) if lr_is_tensor else LR)
    for step in range(6):  # new state, steps, a reset, a warm-up, a skipped step
        set_gradients(parameters, seed=step)
        if step == 5:
            parameters[-1].grad = torch.full_like(parameters[-1], math.inf)
        with NoHostSync():
            optimizer.step()
            optimizer.gradient_statistics()


@pytest.mark.pairwise(1)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": 0.01},
        {"lr": 0.01, "weight_decay": 0.1},
        {"weight_decay": 0.1, "maximize": True},
        {"lr": torch.tensor(0.001, dtype=torch.float64)},
        {"lr": 0.01, "betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.0},
        {"betas": (0.0, 0.0)},
    ],
    ids=str,
)
def test_is_the_adamw_of_torch(options, dtype, tolerance, code):
    parameters, references = make_parameters(dtype), make_parameters(dtype)
    optimizer = LowBitAdamW(parameters, moments="fp32", **options)
    reference = torch.optim.AdamW(references, **options)
    for step in range(20):
        for optimizer_, parameters_ in ((optimizer, parameters), (reference, references)):
            set_gradients(parameters_, seed=step)
            parameters_[2].grad = None if step in (3, 4) else parameters_[2].grad
            optimizer_.step()
        assert_close(parameters, references, tolerance, f"step {step}")
