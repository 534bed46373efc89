"""Damages states of optimizers at random and loads them, in a process of its own, which a crash may end.

``python -m tests.optim.damaged_states FIRST COUNT`` tries cases of these numbers: each is refused with a ``ValueError``
and changes nothing, or is loaded and the next step works.
"""

import copy
import random
import sys
import warnings

import torch

from lightning_lowbit.distributed import local
from lightning_lowbit.optim.moments import misfit
from tests.optim.conformance.entries import ENTRIES, assert_nothing_happened
from tests.optim.parameters import set_gradients, snapshot, train
from tests.precision.checkpoints.test_fuzzed import edit

CHOICES = [entry for entry in ENTRIES.values() if entry.base is None]  # what others keep, they check or do not


def damaged(entry, draw):
    """A state that an optimizer saved, changed in one to three places; sometimes that of another one."""
    entry = draw.choice(CHOICES) if draw.random() < 0.1 else entry
    parameters = entry.parameters()
    optimizer = entry(parameters)
    train(optimizer, parameters, range(draw.choice([1, 3])))
    saved = copy.deepcopy(optimizer.state_dict())
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        saved = edit(saved, draw)
    return saved


def attempt(number):
    """Loads the damaged state of a number; returns what came of it."""
    draw = random.Random(number)
    entry = draw.choice(CHOICES)
    saved = damaged(entry, draw)
    parameters = entry.parameters()
    optimizer = entry(parameters)
    train(optimizer, parameters, range(draw.choice([0, 2])))
    before, groups = snapshot(optimizer, parameters), optimizer.state_dict()["param_groups"]
    kept = {parameter: [*optimizer.state[parameter]] for parameter in parameters if parameter in optimizer.state}
    hooks = len(optimizer._optimizer_load_state_dict_pre_hooks)
    try:
        optimizer.load_state_dict(saved)
    except ValueError as error:
        assert str(error).strip().endswith("."), f"no sentence: {error}"
        assert_nothing_happened(optimizer, parameters, before, groups, "a refused state")
        assert len(optimizer._optimizer_load_state_dict_pre_hooks) == hooks
        assert kept.items() <= {p: [*optimizer.state[p]] for p in parameters}.items()
        return "refused"
    set_gradients(parameters, seed=7)
    shapes = [parameter.shape for parameter in parameters]
    optimizer.step()
    assert [parameter.shape for parameter in parameters] == shapes, "a step changed shapes"
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            fault = misfit(optimizer.state[parameter], optimizer._entries(local(parameter), group))
            assert not fault, f"after a step {fault}"
    return "loaded"


def main(first, count):
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    results = {"refused": 0, "loaded": 0}
    for number in range(first, first + count):
        print(f"case {number}", flush=True)  # the last one is what a crash is from
        results[attempt(number)] += 1
    print(results)
    assert count < 20 or min(results.values()) > 0, "all cases ended alike"


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
