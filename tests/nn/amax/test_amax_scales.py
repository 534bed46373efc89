"""Delayed scaling's scales: every operand's are by its own casts and histories, and by golden vectors."""

import numpy as np
import pytest
import torch
from torch import nn

from lightning_lowbit import Cast, LinearCasts, Scale, convert
from lightning_lowbit.nn import OPERANDS, AmaxHistories
from lightning_lowbit.quant import rotate, split_mean
from lightning_lowbit.quant.shard import amax_of
from tests.golden_vectors import load
from tests.nn.amax.histories import (
    BY_TENSOR,
    E4M3,
    IN,
    NVFP4,
    OUT,
    TOKENS,
    delayed,
    filled,
    one_pass,
    remembered,
    single,
)
from tests.nn.layers import CONTRACTION, GEMMS, every, rotation, run, signs_of, spied
from tests.tables import each


def test_every_operand_has_its_own_settings():
    casts = LinearCasts(
        fprop_x=delayed(history=2),
        fprop_w=delayed(history=5),
        dgrad_g=delayed("e5m2", history=1),
        dgrad_w="fprop",
        wgrad_g=delayed("e5m2", history=3, algorithm="most_recent", margin=1),
        wgrad_x=Cast("e4m3", Scale("fp32", "tensor")),
    )
    layer, histories = single(casts)
    for amax in (8.0, 4.0, 1.0, 2.0):
        one_pass(layer, amax)
        histories.advance_()
    assert remembered(histories) == {
        "/fprop_x": [1, 2],
        "/fprop_w": [8, 4, 1, 2],
        "/dgrad_g": [2],
        "/wgrad_g": [4, 1, 2],
    }
    with spied() as seen:
        one_pass(layer, 16.0)
    scaled_by = {"fprop_x": 2 / 448, "fprop_w": 8 / 448, "dgrad_g": 2 / 57344, "dgrad_w": 8 / 448}
    scaled_by |= {"wgrad_g": 4 / 57344, "wgrad_x": 16 / 448}
    found = {name: operand.factor.item() for name, operand in seen.items() if operand.factor is not None}
    assert found == pytest.approx(scaled_by, rel=2e-7)


TRANSFORMS = {
    "hadamard": {"hadamard": dict.fromkeys(GEMMS, 16)},
    "keyed": {"hadamard": {"fprop": 16, "wgrad": {"size": 32, "signs": "keyed"}}},
    "means": {"subtract_mean": tuple(GEMMS)},
    "both": {"hadamard": {"dgrad": 16, "wgrad": 16}, "subtract_mean": tuple(GEMMS)},
}


@each("element", ["e4m3", "nvfp4"])
@each("name", TRANSFORMS)
def test_amaxes_are_those_of_the_transformed_tensor(name, element):
    cast = E4M3 if element == "e4m3" else NVFP4.fprop_x
    layer, histories = single(every(cast, **TRANSFORMS[name]))
    casts = layer.casts

    def transformed(operand, tensor):
        gemm, kind = operand.split("_")
        if gemm in casts.subtract_mean and kind != "w":
            tensor = split_mean(tensor)[0]
        if gemm in casts.hadamard:
            matrix = rotation(casts.hadamard[gemm], int(layer.lowbit.keys[OPERANDS.index(GEMMS[gemm][1])]))
            tensor = rotate(tensor, signs_of(matrix), CONTRACTION[operand])
        return tensor

    expected = {f"/{operand}": [] for operand in OPERANDS}
    for amax in (3.0, 1.0):
        tensors = {"x": filled((TOKENS, IN), amax) + amax, "g": filled((TOKENS, OUT), amax, 2) + amax}
        tensors["w"] = layer.weight.data.copy_(filled((OUT, IN), amax, 1)).clone()
        layer.lowbit.calls.begin()
        run(layer, tensors["x"], tensors["g"])
        histories.advance_()
        for operand in OPERANDS:
            raw = tensors[operand[-1]]
            history = expected[f"/{operand}"]
            history.append(amax_of(transformed(operand, raw)).item())
            changed = operand.split("_")[0] in casts.hadamard or (name != "keyed" and operand[-1] != "w")
            assert (history[-1] != amax_of(raw)) == changed, f"{operand}: the sample does not tell"
    assert remembered(histories) == expected


@pytest.mark.parametrize("operand", ["fprop_x", "fprop_w"])
def test_trust_ends_where_the_forward_pass_saturated(operand):
    """With 3.5 in force elements are multiplied by 128, and 448 + 16 is the last one that is trusted: 3.625."""
    casts = LinearCasts(**{operand: E4M3}, surrogate={operand: "trust"})
    layer, histories = single(casts, 6, 1)
    sample = torch.tensor([[1.0, 3.5, -3.625, 3.65, -7.0, 14.0]])
    # With an empty history the own amax is in force, which saturates nothing.
    for amax, trusted in ((3.5, [True] * 6), (14.0, [True, True, True, False, False, False])):
        tensor, other = (sample * (amax / 14)).requires_grad_(), torch.ones(1, 6)
        x, w = (tensor, other) if operand == "fprop_x" else (other, tensor)
        layer.weight.data.copy_(w.detach())
        layer.zero_grad()
        y = layer(x)
        histories.advance_()  # the backward pass does not see what is in force from now on
        y.sum().backward()
        gradient = x.grad if operand == "fprop_x" else layer.weight.grad
        assert gradient is not None
        assert (gradient != 0).tolist() == [trusted], f"{operand}: {gradient} after {remembered(histories)}"
    histories.advance_()
    assert remembered(histories) == {f"/{operand}": [3.5, 14]}, "the backward pass staged it for another step"


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
