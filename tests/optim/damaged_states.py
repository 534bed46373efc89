"""Damages states of optimizers at random and loads them, in a process of its own, which a crash may end.

``python -m tests.optim.damaged_states FIRST COUNT`` tries cases of these numbers: each is refused with a ``ValueError``
and changes nothing, or is loaded and the next step works.
"""

import copy
import math
import random
import sys
import warnings
from typing import Any

import torch
from torch import Tensor

from lightning_lowbit.distributed import local
from lightning_lowbit.optim import Adaptive
from lightning_lowbit.optim.moments import misfit
from tests.optim.conformance.entries import ENTRIES, assert_nothing_happened
from tests.optim.parameters import set_gradients, snapshot, train

CHOICES = [entry for entry in ENTRIES.values() if entry.base is None or entry.base[0] == "torch.optim"]
DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
]
SHAPES = [(), (0,), (1,), (3,), (6, 5), (5, 6), (1, 5, 6), (40, 6), (2**16,), (3, 2, 2, 2)]
ODDITIES = [None, 3, -1.5, math.nan, 10**400, "mean", b"", [], [1, 2], (), {}, {"a": 1}, torch.zeros(3), True]
Saved = dict[str, Any]


def reshape(value, draw):
    return torch.zeros(draw.choice(SHAPES)).to(value.dtype)


def swap_last_dimensions(value, draw):
    return value.mT.contiguous() if value.dim() > 1 else value.flatten().unsqueeze(0)


def recast(value, draw):
    return value if value.is_complex() else value.to(draw.choice(DTYPES))


def fill(value, draw):
    if not value.dtype.is_floating_point:
        return torch.full_like(
            value, draw.choice([0, 1, 127, 255] if value.dtype == torch.uint8 else [-1, 2**62, 2**40])
        )
    return torch.full_like(value, draw.choice([math.nan, math.inf, -math.inf, -1.0, 1e38, 0.0]))


def move(value, draw):
    views = [
        torch._neg_view, lambda v: v.to("meta"), lambda v: v.to_sparse(), lambda v: v.mT if v.dim() > 1 else v,
        lambda v: v.new_zeros(()).expand(v.shape), lambda v: v.cdouble(), lambda v: torch.nn.Parameter(v.double()),
    ]  # fmt: skip
    return draw.choice(views)(value)


def replace(value, draw):
    return draw.choice(ODDITIES)


def damage_entry(saved, names, draw):
    states = [state for state in saved["state"].values() if isinstance(state, dict) and state.keys() & set(names)]
    if not states:
        return
    state = draw.choice(states)
    name = draw.choice(sorted(state.keys() & set(names)))
    changes = [reshape, swap_last_dimensions, recast, fill, move, replace]
    if draw.random() < 0.15:
        del state[name]
    elif isinstance(state[name], Tensor):
        state[name] = draw.choice(changes)(state[name], draw)


def damage_states(saved, draw):
    states, index = saved["state"], draw.choice(sorted(saved["state"], key=str) or [0])
    other = draw.choice(sorted(states, key=str) or [0])
    kind = draw.randrange(6)
    if kind == 0 and states and not any("row_var" in state for state in states.values() if isinstance(state, dict)):
        states[index], states[other] = states[other], states[index]
    elif kind == 1:
        states.pop(index, None)
    elif kind == 2:
        states[draw.choice([99, "a", None])] = states.get(index, {})
    elif kind == 3:
        states[index] = draw.choice(ODDITIES)
    elif kind == 4 and isinstance(states.get(index), dict):
        states[index][draw.choice(["exp_avg", "threshold", "other"])] = draw.choice(ODDITIES)
    else:
        saved["state"] = draw.choice([*ODDITIES, {}])


def damage_group(saved, options, draw):
    group = draw.choice(saved["param_groups"])
    name, kind = draw.choice(options), draw.randrange(8)
    if kind < 3:
        group[name] = draw.choice(ODDITIES)
    elif kind == 3:
        group.pop(name, None)
    elif kind == 4:
        draw.shuffle(group["params"])
    elif kind == 5:
        group["params"] = draw.choice(
            [group["params"][1:], group["params"] * 2, [0] * len(group["params"]), 3, ["a"], None]
        )
    elif kind == 6:
        group["param_names"] = draw.choice(ODDITIES)
    else:
        groups = saved["param_groups"]
        saved["param_groups"] = draw.choice([groups[1:], groups * 2, [3], None, {"params": []}, [{}], [{"lr": 1}]])


def of_another(draw):
    kind, entry = draw.randrange(3), draw.choice(CHOICES)
    parameters = entry.parameters()
    if kind == 0:
        optimizer = torch.optim.AdamW(parameters)
    elif kind == 1:
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=draw.choice([0.0, 0.9]))
    else:
        optimizer = entry(parameters)
    train(optimizer, parameters, range(2))
    return copy.deepcopy(optimizer.state_dict())


def damaged(entry, draw):
    """A state that an optimizer saved, changed in one to three places."""
    parameters = entry.parameters()
    optimizer = entry(parameters)
    train(optimizer, parameters, range(draw.choice([1, 3])))
    saved = copy.deepcopy(optimizer.state_dict())
    if draw.random() < 0.1:
        return of_another(draw)
    if draw.random() < 0.05:
        return draw.choice([*ODDITIES, {**saved, "state": None}, {"state": saved["state"]}])
    options = sorted(optimizer.options if isinstance(optimizer, Adaptive) else optimizer.defaults)
    names = sorted(
        optimizer.SCALARS if isinstance(optimizer, Adaptive) else {n for s in saved["state"].values() for n in s}
    )
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        if not isinstance(saved["state"], dict) or not isinstance(saved["param_groups"], list):
            break
        kind = draw.randrange(10)
        if kind < 6:
            damage_entry(saved, names, draw)
        elif kind < 8:
            damage_states(saved, draw)
        elif saved["param_groups"] and all(
            isinstance(group, dict) and isinstance(group.get("params"), list) for group in saved["param_groups"]
        ):
            damage_group(saved, options, draw)
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
