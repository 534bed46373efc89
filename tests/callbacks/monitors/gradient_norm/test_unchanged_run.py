"""A run is the same with the gradient norm monitor and without."""

import pytest
import torch

from lightning_lowbit import GradientNormMonitor
from tests.callbacks.monitors.device_reads import HOOKS, counted
from tests.callbacks.monitors.gradient_norm.ranks import EVERY, RANKS, RUNS, STEPS, UNPLUGGED, train
from tests.callbacks.monitors.gradient_norm.runs import RULES, Planned, assert_same, sgd, trainer
from tests.launch import launch
from tests.lightning_imports import Callback

Run = tuple[str, str, bool]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return launch("tests.callbacks.monitors.gradient_norm.ranks", RANKS, tmp_path_factory.mktemp("watched"))


@pytest.fixture(scope="module")
def alone():
    """What one process logs."""
    return {run[1:]: train("auto", *run[1:], devices=1)["curves"] for run in [*RUNS, UNPLUGGED]}


@pytest.mark.parametrize("run", [*RUNS, UNPLUGGED], ids=str)
def test_two_processes_log_what_one_does(results, alone, run):
    first, second = (result[run]["curves"] for result in results)
    assert sorted(first) == list(range(EVERY, STEPS + 1, EVERY))
    assert first == second, "ranks log different values"
    assert_same(first, alone[run[1:]])
    assert {name for name in first[2] if "body" in name} >= {f"grad_norm/unclipped/body.{i}" for i in range(3)}
    if run[2]:
        assert first[2]["grad_norm/clipped"] < first[2]["grad_norm/unclipped"] / 2, "the run does not clip"
    assert ("grad_norm/used" in first[2]) == (run[1] == "stable_spam")


@pytest.mark.parametrize("run", [*RUNS, UNPLUGGED], ids=str)
def test_one_collective_in_a_logged_step_where_gradients_are_spread(results, run):
    for rank, result in enumerate(results):
        counts = result[run]["collectives"]
        wanted = [int(run[0] != "ddp" and step % EVERY == 0) for step in range(1, STEPS + 1)]
        assert counts == wanted, f"rank {rank}; three layers need none of their own"


@pytest.mark.parametrize("make", [sgd, RULES["Stable-SPAM"]])
def test_watching_changes_nothing(make):
    ends = []
    for callbacks in ([], [GradientNormMonitor(["layer"], every_n_steps=1, limit=None)]):
        torch.manual_seed(0)
        run, model = trainer(*callbacks, gradient_clip_val=0.1, log_every_n_steps=2), Planned({3: 9.0}, make)
        run.fit(model)
        ends.append([*model.parameters(), *(p.grad for p in model.parameters()), torch.rand(3)])
    for number, (a, b) in enumerate(zip(*ends, strict=True)):
        assert a.equal(b), f"tensor {number} differs: weights, gradients, random numbers"


def test_nothing_is_read_between_logged_steps(monkeypatch):
    Watched, reads = counted(GradientNormMonitor, monkeypatch)
    model = Planned(make_optimizer=RULES["Stable-SPAM"])
    trainer(Watched(["layer"], 1), log_every_n_steps=4, max_steps=10, gradient_clip_val=1.0).fit(model)
    assert all(reads.pop((hook, -1)) == 10 for hook in HOOKS), "a hook was not watched"
    assert +reads == {("on_train_batch_start", 4): 1, ("on_train_batch_start", 8): 1}


def test_what_nobody_logs_is_read_at_last():
    monitor, lengths = GradientNormMonitor(every_n_steps=1), []

    class Look(Callback):
        def on_train_batch_end(self, *_):
            lengths.append(len(monitor._unread))

    trainer(monitor, Look(), log_every_n_steps=0, max_steps=120).fit(Planned())
    assert max(lengths) == 100, "steps pile up"
