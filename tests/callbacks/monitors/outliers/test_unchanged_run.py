"""A run is the same with the outlier monitor and without."""

import pytest
import torch

from lightning_lowbit import LowBitPrecision, OutlierMonitor
from tests.callbacks.monitors.device_reads import HOOKS, counted
from tests.callbacks.monitors.outliers.runs import Model, trainer


def test_watching_changes_nothing():
    ends = []
    for callbacks in ([], [OutlierMonitor()]):
        torch.manual_seed(0)
        plugin = LowBitPrecision("nvfp4", compute_dtype="fp32")
        run, model = trainer(*callbacks, plugins=[plugin], log_every_n_steps=2), Model({3: 9.0})
        run.fit(model)
        ends.append([*model.parameters(), *(p.grad for p in model.parameters()), torch.rand(3)])
        assert not any(module._forward_pre_hooks for module in model.modules()), "hooks are left behind"
    for number, (a, b) in enumerate(zip(*ends, strict=True)):
        assert a.equal(b), f"tensor {number} differs: weights, gradients, random numbers"


def test_hooks_go_after_an_error():
    class Breaks(Model):
        def on_before_zero_grad(self, *_):
            hooked.append(sum(len(module._forward_pre_hooks) for module in self.modules()))
            raise RuntimeError("broken")

    hooked = []
    model = Breaks()
    with pytest.raises(RuntimeError, match="broken"):
        trainer(OutlierMonitor()).fit(model)
    assert hooked == [4]
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_nothing_is_read_between_logged_steps(monkeypatch):
    Watched, reads = counted(OutlierMonitor, monkeypatch)
    trainer(Watched(), log_every_n_steps=4, max_steps=10).fit(Model())
    for hook in ("on_train_batch_start", "on_train_batch_end"):
        assert reads.pop((hook, -1)) == 10, f"{hook} was not watched"
    reads.pop((HOOKS[1], -1), None)
    assert +reads == {("on_train_batch_start", 4): 1, ("on_train_batch_start", 8): 1}


def test_hooks_read_nothing(monkeypatch):
    class Reads(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(str(func))
            return func(*args, **(kwargs or {}))

    class Watched(Model):
        def forward(self, x):
            with Reads():
                return super().forward(x)

    calls = []
    trainer(OutlierMonitor(), log_every_n_steps=2, max_steps=2).fit(Watched())
    assert any("amax" in call for call in calls), "hooks were not watched"
    assert not [call for call in calls if "_local_scalar_dense" in call or "nonzero" in call]
