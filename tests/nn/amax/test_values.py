"""Delayed scaling by golden vectors: its rule is Transformer Engine's, except, on purpose, where nothing finite is
remembered."""

import numpy as np
import pytest
import torch
from torch import nn

from lightning_lowbit import convert
from lightning_lowbit.nn import AmaxHistories
from tests.golden_vectors import load
from tests.nn.amax.histories import BY_TENSOR, delayed, filled
from tests.nn.layers import every, run, spied

# Per sequence the amaxes of 12 steps and, for 16 configurations, what Transformer Engine's update makes of them.
GOLDEN = load("fp8_delayed")
SEQUENCES = [str(name) for name in GOLDEN["sequences"]]
CONFIGS = [
    delayed({448: "e4m3", 57344: "e5m2"}[int(largest)], history=int(length), algorithm=str(algorithm), margin=int(m))
    for length, algorithm, m, largest in zip(
        *(GOLDEN[f"config/{name}"] for name in ("history_len", "algo", "margin", "fp8_max")), strict=True
    )
]


def by_the_rule(amaxes, cast):
    """At the last of the steps with these amaxes: what is in force, what elements are multiplied by, and the history
    after it. An amax that is 0 or not finite is not remembered, and with nothing remembered the own one is in force."""
    scale = cast.scale
    *past, own = amaxes
    window = [amax for amax in past if 0 < amax < np.inf][-scale.history :]
    in_force = own if not window else max(window) if scale.algorithm == "max" else window[-1]
    if in_force == 0:
        encode = np.float32(1)
    elif not np.isfinite(in_force):
        encode = np.float32(np.nan)
    else:
        with np.errstate(over="ignore"):
            encode = min(np.float32(cast.format.max * 2.0**-scale.margin) / in_force, np.finfo(np.float32).max)
    history = [*window, *([own] if 0 < own < np.inf else [])][-scale.history :]
    padded = [0.0] * (scale.history - len(history)) + [float(amax) for amax in history]
    return torch.tensor(float(in_force)), torch.tensor(float(encode)), padded


def assert_theirs(amaxes, config, step, sequence, encode, history):
    """The rule is that of the golden vectors, except before the first amax, where theirs is a scale of 1, and after one
    that is not finite."""
    tainted = GOLDEN[f"{sequence}/after_nonfinite"]
    if tainted[:step].any():
        return
    assert GOLDEN[f"{sequence}/scale_used"][config, step] == (encode.item() if any(amaxes[:-1] > 0) else 1)
    if not tainted[step]:  # theirs has one slot for the step under way, and so one fewer for former ones
        theirs = GOLDEN[f"{sequence}/history_after"][config][step, 1 : CONFIGS[config].scale.history]
        assert history[1:] == theirs.tolist(), f"{sequence} after step {step}"


@pytest.mark.parametrize("first", range(0, len(SEQUENCES), 3), ids=lambda i: "-".join(SEQUENCES[i : i + 3]))
def test_golden_vectors(first):
    """Layers of all configurations in one model, with a sequence for x, one for w and one for g: every operand is
    scaled, bit for bit, as the rule has it, and the histories are the rule's."""
    size = 4
    names = dict(zip(BY_TENSOR, SEQUENCES[first : first + 3], strict=True))
    model = nn.ModuleList(nn.Linear(size, size, bias=False) for _ in CONFIGS)
    convert(model, "bf16", overrides={str(i): every(cast) for i, cast in enumerate(CONFIGS)})
    histories = AmaxHistories(model)
    assert len(histories) == len(CONFIGS)
    for step in range(12):
        amaxes = {kind: GOLDEN[f"{name}/amax"][: step + 1] for kind, name in names.items()}
        tensors = {kind: filled((size, size), float(given[-1]), step) for kind, given in amaxes.items()}
        state = {}
        for i, (layer, cast) in enumerate(zip(model, CONFIGS, strict=True)):
            layer.weight.data.copy_(tensors["w"])
            with spied() as seen:
                run(layer, tensors["x"], tensors["g"])
            for kind, operands in BY_TENSOR.items():
                in_force, encode, history = by_the_rule(amaxes[kind], cast)
                message = f"{names[kind]}, step {step}, {cast}, scaled by {in_force}"
                assert_theirs(amaxes[kind], i, step, names[kind], encode, history)
                elements = (tensors[kind] * encode).clamp(-cast.format.max, cast.format.max).to(cast.format.dtype)
                elements = torch.where(tensors[kind].isfinite(), elements.float(), torch.nan)
                for operand in operands:
                    factor = seen[operand].factor
                    assert factor is not None
                    np.testing.assert_array_equal(factor, encode.reciprocal(), f"{operand} of {message}")
                    np.testing.assert_array_equal(seen[operand].values, elements, f"{operand} of {message}")
                    state[f"{i}/{operand}"] = history
        histories.advance_()
        found = {name: tensor.tolist() for name, tensor in histories.state_dict()["amax_history"].items()}
        assert found.keys() == state.keys()
        wrong = [name for name in state if found[name] != state[name]]
        assert not wrong, f"after step {step}: {wrong[0]} is {found[wrong[0]]}, not {state[wrong[0]]}"
