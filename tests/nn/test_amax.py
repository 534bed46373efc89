"""Delayed scaling without a Trainer: what histories remember, and that layers scale by it."""

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from lightning_lowbit import Cast, LinearCasts, Scale, convert, quantize
from lightning_lowbit.nn import OPERANDS, AmaxHistories, LayerKeys, set_phase, smooth_swiglu
from lightning_lowbit.quant import rotate, split_mean, surrogate_factor
from lightning_lowbit.quant.scaling import absmax, scales_of
from tests.nn.layers import (
    CONTRACTION,
    GEMMS,
    Net,
    every,
    gradients,
    identical,
    layer_like,
    rotation,
    run,
    spied,
    value,
)
from tests.oracles import load

TOKENS, IN, OUT = 32, 48, 16
BY_TENSOR = {"x": ("fprop_x", "wgrad_x"), "w": ("fprop_w", "dgrad_w"), "g": ("dgrad_g", "wgrad_g")}


def delayed(element: str = "e4m3", rounding: str | None = None, **scale: Any) -> Cast:
    return Cast(element, Scale("fp32", "tensor", rounding, source="delayed", **scale))


E4M3 = delayed()
NVFP4 = every(
    Cast("e2m1", Scale("e4m3", 16, two_level=True, source="delayed")),
    dgrad_g=Cast("e2m1", Scale("e4m3", 16, two_level=True, source="delayed"), "stochastic"),
)


def single(casts: Any, inputs: int = IN, outputs: int = OUT) -> tuple[Any, AmaxHistories]:
    """A layer of its own, and its histories."""
    layer = layer_like(nn.Linear(inputs, outputs, bias=False), casts)
    return layer, AmaxHistories(layer)


def filled(shape: tuple[int, ...], amax: float, seed: int = 0) -> Tensor:
    """Numbers of all sizes, one of which is minus the largest magnitude."""
    tensor = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    tensor *= amax if math.isfinite(amax) else 1
    tensor.view(-1)[1] = -amax
    return tensor


def one_pass(layer: Any, x: float, w: float | None = None, g: float | None = None) -> dict[str, Tensor | None]:
    """Forward and backward pass of tensors with these largest magnitudes, those of w and g by default that of x."""
    layer.weight.data.copy_(filled(layer.weight.shape, x if w is None else w, 1))
    outputs, inputs = layer.weight.shape
    return run(layer, filled((TOKENS, inputs), x), filled((TOKENS, outputs), x if g is None else g, 2))


def remembered(histories: AmaxHistories) -> dict[str, list[float]]:
    """By layer and operand, the amaxes that there are, oldest first."""
    found = {}
    for name, tensor in histories.state_dict()["amax_history"].items():
        amaxes = tensor.tolist()
        found[name] = [amax for amax in amaxes if amax != 0]
        empty = len(amaxes) - len(found[name])
        assert not any(amaxes[:empty]), f"{name}: a gap in {amaxes}"
    return found


def same_states(found: AmaxHistories, expected: AmaxHistories, message: str = "") -> None:
    for kind, tensors in expected.state_dict().items():
        own = found.state_dict()[kind]
        assert own.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(own[name], tensor), f"{message} {kind} of {name}: {own[name]}, not {tensor}"


# --- golden vectors ---------------------------------------------------------------------------------------------------

# Per sequence the amaxes of 12 steps and, for 16 configurations, what Transformer Engine's update makes of them.
GOLDEN = load("fp8_delayed")
SEQUENCES = [str(name) for name in GOLDEN["sequences"]]
CONFIGS = [
    delayed({448: "e4m3", 57344: "e5m2"}[int(largest)], history=int(length), algorithm=str(algorithm), margin=int(m))
    for length, algorithm, m, largest in zip(
        *(GOLDEN[f"config/{name}"] for name in ("history_len", "algo", "margin", "fp8_max")), strict=True
    )
]


def by_the_rule(amaxes: np.ndarray, cast: Cast) -> tuple[Tensor, Tensor, list[float]]:
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


@pytest.mark.parametrize("sequence", SEQUENCES)
@pytest.mark.parametrize("config", range(len(CONFIGS)))
def test_the_rule_is_that_of_the_golden_vectors(config: int, sequence: str) -> None:
    """And where it is not: before the first amax, where theirs is a scale of 1, and after one that is not finite."""
    cast, amaxes = CONFIGS[config], GOLDEN[f"{sequence}/amax"]
    scales, histories = GOLDEN[f"{sequence}/scale_used"][config], GOLDEN[f"{sequence}/history_after"][config]
    tainted = GOLDEN[f"{sequence}/after_nonfinite"]
    for step, theirs in enumerate(scales.tolist()):
        if step > 0 and tainted[step - 1]:
            break
        _, encode, history = by_the_rule(amaxes[: step + 1], cast)
        if any(amaxes[:step] > 0):
            assert encode.item() == theirs, f"step {step}: the rule scales by {encode}, not {theirs}"
        else:
            assert theirs == 1, f"step {step}: nothing has been remembered, and the scale is {theirs}"
        if not tainted[step]:  # theirs has one slot for the step under way, and so one fewer for former ones
            assert history[1:] == histories[step, 1 : cast.scale.history].tolist(), f"after step {step}"


@pytest.mark.parametrize("first", range(0, len(SEQUENCES), 3), ids=lambda i: "-".join(SEQUENCES[i : i + 3]))
def test_golden_vectors(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
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
        state: dict[str, list[float]] = {}
        for i, (layer, cast) in enumerate(zip(model, CONFIGS, strict=True)):
            layer.weight.data.copy_(tensors["w"])
            with spied(monkeypatch) as seen:
                run(layer, tensors["x"], tensors["g"])
            for kind, operands in BY_TENSOR.items():
                in_force, encode, history = by_the_rule(amaxes[kind], cast)
                message = f"{names[kind]}, step {step}, {cast}, scaled by {in_force}"
                given = scales_of(in_force, torch.ones(()), cast)
                assert torch.equal(given, encode) or encode.isnan(), f"{message}: multiplied by {given}, not {encode}"
                public = quantize(tensors[kind], cast, amax=in_force)
                finite = bool(tensors[kind].isfinite().all())
                expected = encode.reciprocal() if finite else torch.tensor(torch.nan)  # its one block holds a NaN
                np.testing.assert_array_equal(public.scales, expected.view(1, 1), message)
                elements = (tensors[kind] * encode).clamp(-cast.format.max, cast.format.max).to(cast.format.dtype)
                elements = torch.where(tensors[kind].isfinite(), elements.float(), torch.nan)
                for operand in operands:
                    factor = seen[operand].factor
                    assert factor is not None
                    np.testing.assert_array_equal(factor, encode.reciprocal(), f"{operand} of {message}")
                    np.testing.assert_array_equal(seen[operand].values, elements, f"{operand} of {message}")
                    if finite:
                        decoded = (seen[operand].values * factor).numpy()
                        np.testing.assert_array_equal(public.dequantize(), decoded, f"{operand} of {message}, decoded")
                    state[f"{i}/{operand}"] = history
        histories.advance_()
        found = {name: tensor.tolist() for name, tensor in histories.state_dict()["amax_history"].items()}
        assert found.keys() == state.keys()
        wrong = [name for name in state if found[name] != state[name]]
        assert not wrong, f"after step {step}: {wrong[0]} is {found[wrong[0]]}, not {state[wrong[0]]}"


def test_golden_single_amaxes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A history of one step: 0 and what is not finite leave the scale at 1."""
    amaxes, scales, largest = (GOLDEN[f"unit_tests/{name}"] for name in ("amax", "scale", "fp8_max"))
    casts = [LinearCasts(fprop_x=delayed("e4m3" if most == 448 else "e5m2", history=1)) for most in largest]
    model = nn.ModuleList(nn.Linear(8, 8) for _ in casts)
    convert(model, "bf16", overrides={str(i): cast for i, cast in enumerate(casts)})
    histories = AmaxHistories(model)
    for layer, amax in zip(model, amaxes.tolist(), strict=True):
        layer(filled((4, 8), amax))
    histories.advance_()
    for layer, amax, expected in zip(model, amaxes, scales.tolist(), strict=True):
        found = scales_of(layer.amaxes.in_force[0], torch.ones(()), layer.casts.fprop_x)
        assert found == expected, f"amax {amax}: scaled by {found}, not {expected}"
        with spied(monkeypatch) as seen:
            layer(torch.zeros(4, 8))
        assert seen["fprop_x"].factor == torch.tensor(expected).reciprocal(), f"amax {amax}"


@pytest.mark.parametrize(("sequence", "frozen_until"), [("inf", 7), ("nan", 5)])
def test_what_is_not_finite_is_forgotten_at_once(sequence: str, frozen_until: int) -> None:
    """On purpose: with an infinity in its history the peer's scale stays what it was until that has left. After step 4,
    whose amax is 100, it is 448 / 100."""
    config, amaxes = 0, GOLDEN[f"{sequence}/amax"]  # E4M3, the largest of 4 steps
    assert amaxes.astype(str).tolist()[:5] == ["1.0", "2.0", sequence, "1.0", "100.0"]
    theirs = GOLDEN[f"{sequence}/scale_used"][config].tolist()
    assert theirs[5 : frozen_until + 1] == [224.0] * (frozen_until - 5) + [pytest.approx(4.48)]
    layer, histories = single(LinearCasts(fprop_x=CONFIGS[config]))
    for amax in amaxes[:5].tolist():
        layer(filled((TOKENS, IN), amax))
        histories.advance_()
    assert remembered(histories) == {"/fprop_x": [1, 2, 1, 100]}
    assert layer.amaxes.in_force[0] == 100, "the scale is frozen"


# --- a step -----------------------------------------------------------------------------------------------------------


def test_a_step_is_the_largest_of_its_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, histories = single(every(E4M3))
    for step, amaxes in enumerate(([1.0, 3.0, 2.0], [0.5, 0.25])):
        for amax in amaxes:
            with spied(monkeypatch) as seen:
                one_pass(layer, amax)
            in_force = amax if step == 0 else 3.0
            for operand in OPERANDS:
                assert seen[operand].factor == pytest.approx(in_force / 448), f"{operand}: changed in mid-step"
        assert all(len(history) == step for history in remembered(histories).values()), "advanced in mid-step"
        histories.advance_()
    assert remembered(histories) == {f"/{operand}": [3, 0.5] for operand in OPERANDS}
    for _ in range(3):
        histories.advance_()
    assert remembered(histories) == {f"/{operand}": [3, 0.5] for operand in OPERANDS}, "advanced without a pass"


def test_each_tensor_has_its_own_history() -> None:
    layer, histories = single(every(E4M3))
    for x, w, g in ((1.0, 2.0, 3.0), (6.0, 5.0, 4.0)):
        one_pass(layer, x, w, g)
        histories.advance_()
    expected = {"x": [1, 6], "w": [2, 5], "g": [3, 4]}
    assert remembered(histories) == {f"/{operand}": expected[operand[-1]] for operand in OPERANDS}


def test_amaxes_are_those_of_the_compute_dtype() -> None:
    layer, histories = single(every(E4M3))
    layer.weight.data.copy_(filled((OUT, IN), 1.001))
    run(layer, filled((TOKENS, IN), 1.002), filled((TOKENS, OUT), 1.003), autocast=True)
    histories.advance_()
    rounded = {name: torch.tensor(amax).bfloat16().item() for name, amax in (("x", 1.002), ("w", 1.001), ("g", 1.003))}
    assert remembered(histories) == {f"/{operand}": [rounded[operand[-1]]] for operand in OPERANDS}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_evaluation_is_no_step(monkeypatch: pytest.MonkeyPatch, mode: Callable[[], Any]) -> None:
    layer, histories = single(every(E4M3))
    one_pass(layer, 3.5)
    histories.advance_()
    before = copy.deepcopy(histories.state_dict())
    histories.recording = False
    assert not histories.recording
    with mode(), spied(monkeypatch) as seen:
        y = layer(filled((TOKENS, IN), 7.0))
    assert seen["fprop_x"].factor == 1 / 128, "not scaled by what is remembered"
    if y.requires_grad:
        y.sum().backward()
    histories.advance_()
    for name, history in histories.state_dict()["amax_history"].items():
        assert torch.equal(history, before["amax_history"][name]), f"{name}: evaluation was staged"
    histories.recording = True
    with mode():
        layer(filled((TOKENS, IN), 7.0))
    histories.advance_()
    assert remembered(histories)["/fprop_x"] == [3.5, 7]


def test_a_pass_that_the_step_overtakes_keeps_its_scales() -> None:
    """The backward pass scales by what was in force in its forward pass."""
    found = []
    for overtaken in (False, True):
        layer, histories = single(every(E4M3))
        one_pass(layer, 1.0)
        histories.advance_()
        x = filled((TOKENS, IN), 9.0).requires_grad_()
        y = layer(x)
        if overtaken:
            histories.advance_()
        y.backward(filled((TOKENS, OUT), 5.0))
        found.append({"x": x.grad, "weight": layer.weight.grad})
    identical(*found, "overtaken")


class Blocks(Net):
    """:class:`Net` with either kind of recomputation."""

    use_reentrant: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.block(x) if self.use_reentrant is None else checkpoint(self.block, x, use_reentrant=self.use_reentrant)
        return self.head(x + y)


@pytest.mark.parametrize("casts", ["fp8-delayed", NVFP4], ids=["fp8", "nvfp4"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_changes_nothing(use_reentrant: bool, casts: Any) -> None:
    models = []
    for kind in (None, use_reentrant):
        torch.manual_seed(0)
        model = convert(Blocks(), casts)
        model.use_reentrant = kind
        LayerKeys(model).fill_(0)
        models.append((model, AmaxHistories(model)))
    (plain, expected), (recomputing, histories) = models
    for step, amax in enumerate((1.0, 7.0, 0.5, 3.0)):
        for micro_batch in range(2):
            x = filled((16, 32), amax, micro_batch)
            identical(gradients(recomputing, x), gradients(plain, x), f"step {step}")
        histories.advance_()
        expected.advance_()
        same_states(histories, expected, f"step {step}")
    assert len(remembered(histories)["first/fprop_x"]) == 4


def test_a_layer_that_does_not_run_keeps_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    model = convert(nn.ModuleList(nn.Linear(IN, OUT, bias=False) for _ in range(2)), every(E4M3))
    histories = AmaxHistories(model)
    for amax, layers in ((3.5, (0, 1)), (7.0, (0,)), (14.0, (1,))):
        for i in layers:
            with spied(monkeypatch) as seen:
                one_pass(model[i], amax)
        histories.advance_()
    assert seen["wgrad_g"].factor == 1 / 128, "a step without the layer changed its scale"
    expected = {0: [3.5, 7], 1: [3.5, 14]}
    assert remembered(histories) == {f"{i}/{name}": history for i, history in expected.items() for name in OPERANDS}


def test_a_phase_leaves_the_histories_of_what_it_does_not_quantise() -> None:
    layer, histories = single(every(E4M3))
    for phase in ("fqt", "qaf", "bf16", "hp-forward", "fqt"):
        set_phase(layer, phase)
        one_pass(layer, {"fqt": 1.0, "qaf": 2.0, "bf16": 3.0, "hp-forward": 4.0}[phase])
        histories.advance_()
    forward = {f"/{name}": [1, 2, 1] for name in OPERANDS[:2]}
    assert remembered(histories) == forward | {f"/{name}": [1, 4, 1] for name in OPERANDS[2:]}


def test_a_layer_that_runs_twice_remembers_the_larger() -> None:
    layer, histories = single(every(E4M3), IN, IN)
    x = filled((TOKENS, IN), 2.0)
    middle = layer(x)
    layer(middle).sum().backward()
    histories.advance_()
    assert remembered(histories)["/fprop_x"] == [max(2.0, middle.abs().max().item())]
    assert len(remembered(histories)) == len(OPERANDS)


@pytest.mark.parametrize("first", [False, True], ids=["", "first"])
def test_zeros_change_nothing(monkeypatch: pytest.MonkeyPatch, first: bool) -> None:
    layer, histories = single(every(E4M3))
    if not first:
        one_pass(layer, 3.5)
        histories.advance_()
    before = remembered(histories)
    with spied(monkeypatch) as seen:
        found = one_pass(layer, 0.0)
    histories.advance_()
    assert remembered(histories) == before
    for operand in OPERANDS:
        assert seen[operand].factor == (1 if first else 1 / 128), f"{operand}: another scale"
    for name, tensor in found.items():
        assert tensor is not None
        assert not tensor.any(), f"{name}: {tensor}"


@pytest.mark.parametrize("first", [False, True], ids=["", "first"])
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("where", BY_TENSOR)
def test_an_overflow_is_seen_and_not_remembered(
    monkeypatch: pytest.MonkeyPatch, where: str, bad: float, first: bool
) -> None:
    layer, histories = single(every(E4M3))
    if not first:
        one_pass(layer, 3.5)
        histories.advance_()
    with spied(monkeypatch) as seen:
        found = one_pass(layer, **{**dict.fromkeys("xwg", 1.75), where: bad})
    histories.advance_()
    before = [] if first else [3.5]
    for operand in OPERANDS:
        tainted = operand[-1] == where
        assert remembered(histories)[f"/{operand}"] == (before if tainted else [*before, 1.75])
        place = value(seen[operand]).flatten()[1]  # where the largest magnitude is
        assert place.isnan() == tainted, f"{operand} is {place}"
    for name in {"x": ("y", "weight"), "w": ("y", "x"), "g": ("x", "weight")}[where]:
        tensor = found[name]
        assert tensor is not None
        assert tensor.isnan().any(), f"{bad} in {where} is not seen in {name}"
    with spied(monkeypatch) as seen:
        found = one_pass(layer, 0.875)
    for operand in BY_TENSOR[where]:
        assert seen[operand].factor == (1 / 512 if first else 1 / 128), f"{operand}: another scale"
    assert all(tensor is not None and tensor.isfinite().all() for tensor in found.values()), "it lasts"


def test_an_overflow_in_one_micro_batch_leaves_the_others() -> None:
    layer, histories = single(every(E4M3))
    for amax in (2.0, torch.inf, 3.0, torch.nan):
        one_pass(layer, amax)
    histories.advance_()
    assert remembered(histories) == {f"/{operand}": [3] for operand in OPERANDS}


# --- scales -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_what_exceeds_the_histories_saturates(monkeypatch: pytest.MonkeyPatch, element: str) -> None:
    layer, histories = single(LinearCasts(fprop_x=delayed(element)), 4, 4)
    layer.weight.data.copy_(torch.eye(4))
    x = torch.tensor([[3.5, -3.5, 3.0, 0.25], [14.0, -7.0, 5.0, 0.25]])
    layer(x[:1])
    histories.advance_()
    with spied(monkeypatch) as seen:
        y = layer(x)
    assert seen["fprop_x"].values.abs().max() == seen["fprop_x"].values[1, 0] == {"e4m3": 448, "e5m2": 57344}[element]
    clipped = torch.tensor([[3.5, -3.5, 3.0, 0.25], [3.5, -3.5, 3.5, 0.25]])
    assert y.tolist() == clipped.tolist(), "does not clip at the amax in force"
    assert (x - y).abs().max() == 14 - 3.5
    histories.advance_()
    assert layer(x).tolist() == x.tolist(), "the next step does not make room"


# By what is asked of the scale, the factors of amaxes 3.5, 0.75, 1.75 and 0.875, step by step, in E4M3: a factor is
# the amax in force over 448.
FACTORS: dict[str, tuple[dict[str, Any], list[float]]] = {
    "the largest": ({}, [3.5 / 448, 3.5 / 448, 3.5 / 448, 3.5 / 448, 3.5 / 448]),
    "the largest of 2": ({"history": 2}, [3.5 / 448, 3.5 / 448, 3.5 / 448, 1.75 / 448, 1.75 / 448]),
    "the largest of 1": ({"history": 1}, [3.5 / 448, 3.5 / 448, 0.75 / 448, 1.75 / 448, 0.875 / 448]),
    "the newest": ({"algorithm": "most_recent"}, [3.5 / 448, 3.5 / 448, 0.75 / 448, 1.75 / 448, 0.875 / 448]),
    "margin": ({"margin": 3, "history": 2}, [28 / 448, 28 / 448, 28 / 448, 14 / 448, 14 / 448]),
    "power of two": (
        {"rounding": "power_of_two", "algorithm": "most_recent"},
        [2.0**-7, 2.0**-7, 2.0**-9, 2.0**-8, 2.0**-9],
    ),
    "power of two and margin": (
        {"rounding": "power_of_two", "algorithm": "most_recent", "margin": 2},
        [2.0**-5, 2.0**-5, 2.0**-7, 2.0**-6, 2.0**-7],
    ),
}


@pytest.mark.parametrize("name", FACTORS)
def test_scales_by_hand(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The first step scales by its own amax, each other one by those before it."""
    settings, factors = FACTORS[name]
    layer, histories = single(every(delayed(**settings)))
    for step, (amax, factor) in enumerate(zip((3.5, 0.75, 1.75, 0.875, 1.0), factors, strict=True)):
        with spied(monkeypatch) as seen:
            one_pass(layer, amax)
        histories.advance_()
        for operand in OPERANDS:
            found = seen[operand].factor
            assert found is not None
            assert found.item() == pytest.approx(factor, rel=2e-7), f"{operand}, step {step}: {found.item() * 448}/448"
            if "power" in name:
                assert math.frexp(found.item())[0] == 0.5, f"{operand}: {found.item()} is no power of two"


def test_every_operand_has_its_own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
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
    with spied(monkeypatch) as seen:
        one_pass(layer, 16.0)
    scaled_by = {"fprop_x": 2 / 448, "fprop_w": 8 / 448, "dgrad_g": 2 / 57344, "dgrad_w": 8 / 448}
    scaled_by |= {"wgrad_g": 4 / 57344, "wgrad_x": 16 / 448}
    found = {name: operand.factor.item() for name, operand in seen.items() if operand.factor is not None}
    assert found == pytest.approx(scaled_by, rel=2e-7)


def test_every_layer_has_its_own_settings() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(5)))
    overrides = {
        "1": every(delayed(history=2)),
        "2": "fp8-current",
        "3": LinearCasts(dgrad_g=delayed("e5m2", history=7, algorithm="most_recent")),
    }
    convert(model, every(delayed(history=3)), skip=["4"], overrides=overrides)
    histories = AmaxHistories(model)
    assert len(histories) == 3
    assert [layer.amaxes is not None for layer in model[:4]] == [True, True, False, True]
    expected: dict[str, list[float]] = {}
    for amax in (5.0, 3.0, 1.0, 2.0):
        for layer in model[:4]:
            one_pass(layer, amax)
        histories.advance_()
    for name in OPERANDS:
        expected |= {f"0/{name}": [3, 1, 2], f"1/{name}": [1, 2]}
    expected["3/dgrad_g"] = [5, 3, 1, 2]
    assert remembered(histories) == expected
    in_force = [layer.amaxes.in_force.tolist() for layer in model if getattr(layer, "amaxes", None) is not None]
    assert in_force == [[3] * 6, [2] * 6, [0, 0, 2, 0, 0, 0]]


CASTS = {
    "fp8-delayed": LinearCasts.preset("fp8-delayed"),
    "nvfp4": NVFP4,
    "tiles": every(Cast("e2m1", Scale("e4m3", (16, 16), two_level=True, source="delayed", history=3))),
    "rows": every(Cast("int4", Scale("e4m3", "row", two_level=True, source="delayed"))),
    "4/6": every(Cast("e2m1", Scale("e4m3", 16, two_level=True, four_over_six="mse", source="delayed"))),
    "mx": every(Cast("e4m3", Scale("e8m0", 32, two_level=True, source="delayed", algorithm="most_recent"))),
    "powers of two": every(Cast("e4m3", Scale("e8m0", "tensor", source="delayed"))),
    "integers": every(Cast("int8", Scale("fp32", "tensor", source="delayed", margin=1), "stochastic")),
    "ternary": every(Cast("ternary", Scale("fp32", "tensor", source="delayed"))),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASTS)
def test_operands_are_quantized_with_the_amax_in_force(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype
) -> None:
    casts = CASTS[name]
    layer = layer_like(nn.Linear(IN, OUT, dtype=dtype), casts)
    histories = AmaxHistories(layer)
    sizes = {"x": (5.0, 17.0, 0.13), "w": (0.25, 0.11, 0.6), "g": (1e-3, 1.3e-4, 3e-3)}
    shapes = {"x": (TOKENS, IN), "w": (OUT, IN), "g": (TOKENS, OUT)}
    largest: dict[str, list[Tensor]] = {name: [] for name in sizes}
    for step in range(3):
        tensors = {key: filled(shape, sizes[key][step], step).to(dtype) for key, shape in shapes.items()}
        layer.weight.data.copy_(tensors["w"])
        with spied(monkeypatch) as seen:
            run(layer, tensors["x"], tensors["g"])
        histories.advance_()
        for i, operand in enumerate(OPERANDS):
            cast, past = getattr(casts, operand), largest[operand[-1]]
            pick = max if cast.scale.algorithm == "max" else (lambda amaxes: amaxes[-1])
            tensor, axis = tensors[operand[-1]], CONTRACTION[operand]
            amax = pick(past) if past else None
            expected = quantize(tensor, cast, axis, layer.keys[i], amax).dequantize().double()
            message = f"step {step}, {operand}, amax {amax}"
            torch.testing.assert_close(value(seen[operand]), expected, rtol=2e-7, atol=0, msg=message)
            if past:
                own = quantize(tensor, cast, axis, layer.keys[i]).dequantize().double()
                # Powers of two, and the blocks below them, do not see every change of the amax above.
                assert name in ("mx", "powers of two") or not torch.equal(own, expected), f"{message}: nothing to see"
        for key, tensor in tensors.items():
            largest[key].append(absmax(tensor))


def test_two_levels_saturate_above_the_histories(monkeypatch: pytest.MonkeyPatch) -> None:
    """2688 = 6 * 448 in force: the scale of the tensor is 1, and no block reaches higher."""
    layer, histories = single(NVFP4)
    layer(filled((TOKENS, IN), 2688.0))
    histories.advance_()
    x = torch.zeros(TOKENS, IN)
    x[0, :3] = torch.tensor([5376.0, -2688.0, 1344.0])
    x[0, 16:19] = torch.tensor([6.0, -3.0, 0.5])
    with spied(monkeypatch) as seen:
        layer(x)
    decoded = value(seen["fprop_x"])
    assert seen["fprop_x"].factor == 1
    assert decoded[0, :3].tolist() == [2688, -2688, 1344]
    assert decoded[0, 16:19].tolist() == [6, -3, 0.5]
    assert decoded.count_nonzero() == 6


TRANSFORMS: dict[str, dict[str, Any]] = {
    "hadamard": {"hadamard": dict.fromkeys(GEMMS, 16)},
    "keyed": {"hadamard": {"fprop": 16, "wgrad": {"size": 32, "signs": "keyed"}}},
    "means": {"subtract_mean": tuple(GEMMS)},
    "both": {"hadamard": {"dgrad": 16, "wgrad": 16}, "subtract_mean": tuple(GEMMS)},
}


@pytest.mark.parametrize("element", ["e4m3", "nvfp4"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_amaxes_are_those_of_the_transformed_tensor(monkeypatch: pytest.MonkeyPatch, name: str, element: str) -> None:
    cast = E4M3 if element == "e4m3" else NVFP4.fprop_x
    layer, histories = single(every(cast, **TRANSFORMS[name]))  # type: ignore[arg-type]
    casts = layer.casts

    def transformed(operand: str, tensor: Tensor) -> Tensor:
        gemm, kind = operand.split("_")
        if gemm in casts.subtract_mean and kind != "w":
            tensor = split_mean(tensor)[0]
        if gemm in casts.hadamard:
            matrix = rotation(casts.hadamard[gemm], int(layer.keys[OPERANDS.index(GEMMS[gemm][1])]))
            tensor = rotate(tensor, matrix.float(), CONTRACTION[operand])
        return tensor

    expected: dict[str, list[float]] = {f"/{operand}": [] for operand in OPERANDS}
    for step, amax in enumerate((3.0, 1.0)):
        tensors = {"x": filled((TOKENS, IN), amax) + amax, "g": filled((TOKENS, OUT), amax, 2) + amax}
        tensors["w"] = layer.weight.data.copy_(filled((OUT, IN), amax, 1)).clone()
        with spied(monkeypatch) as seen:
            run(layer, tensors["x"], tensors["g"])
        histories.advance_()
        for operand in OPERANDS:
            raw = tensors[operand[-1]]
            tensor = transformed(operand, raw)
            history = expected[f"/{operand}"]
            given = torch.tensor(history[0]) if history else None
            wanted = quantize(tensor, cast, CONTRACTION[operand], amax=given).dequantize().double()
            torch.testing.assert_close(value(seen[operand]), wanted, rtol=2e-7, atol=0, msg=f"{operand}, step {step}")
            history.append(absmax(tensor).item())
            changed = operand.split("_")[0] in casts.hadamard or (name != "keyed" and operand[-1] != "w")
            assert (history[-1] != absmax(raw)) == changed, f"{operand}: the sample does not tell"
    assert remembered(histories) == expected


# --- surrogates -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operand", ["fprop_x", "fprop_w"])
def test_trust_ends_where_the_forward_pass_saturated(operand: str) -> None:
    """With 3.5 in force elements are multiplied by 128, and 448 + 16 is the last one that is trusted: 3.625."""
    casts = LinearCasts(**{operand: E4M3}, surrogate={operand: "trust"})  # type: ignore[arg-type]
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


@pytest.mark.parametrize("hadamard", [{}, {"fprop": 16}], ids=["", "rotated"])
@pytest.mark.parametrize("kind", ["trust", "dge"])
def test_surrogates_take_the_amax_of_the_forward_pass(kind: str, hadamard: dict[str, int]) -> None:
    bare = LinearCasts(fprop_x=E4M3, fprop_w=E4M3, hadamard=hadamard)  # type: ignore[arg-type]
    (layer, histories), (straight, plain) = (
        single(bare.replace(surrogate=surrogate)) for surrogate in ({"fprop_x": kind, "fprop_w": kind}, {})
    )
    for step, amax in enumerate((1.0, 2.5, 1.5)):
        in_force = {operand: layer.amaxes.in_force[i].clone() for i, operand in enumerate(OPERANDS[:2])}
        found, expected = one_pass(layer, amax), one_pass(straight, amax)
        histories.advance_()
        plain.advance_()
        same_states(histories, plain, f"step {step}: a surrogate is no pass of its own")
        for operand, name, tensor in (
            ("fprop_x", "x", filled((TOKENS, IN), amax)),
            ("fprop_w", "weight", layer.weight.detach()),
        ):
            gradient, turn = expected[name], torch.eye(IN)
            assert gradient is not None
            if hadamard:
                turn = torch.block_diag(*[rotation(layer.casts.hadamard["fprop"], 0).float()] * (IN // 16))
            turned = tensor @ turn
            given = in_force[operand] if step else absmax(turned)
            factor = surrogate_factor(kind, turned, E4M3, 1, given)
            wanted = ((gradient @ turn) * factor) @ turn.t()
            tolerance = 1e-5 * wanted.abs().max().item()
            torch.testing.assert_close(
                found[name], wanted, rtol=1e-5, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
            )
            if kind == "trust" and step == 1:
                assert 0 < factor.mean() < 1, f"{operand}: nothing saturates"


# --- state ------------------------------------------------------------------------------------------------------------


def trained(casts: Any = "fp8-delayed", steps: int = 3, start: int = 0, **kwargs: Any) -> tuple[Net, AmaxHistories]:
    torch.manual_seed(0)
    model = convert(Net(), casts, **kwargs)
    histories = AmaxHistories(model)
    steps_of(model, histories, range(start, start + steps))
    return model, histories


def steps_of(model: nn.Module, histories: AmaxHistories, steps: range) -> list[dict[str, Tensor | None]]:
    found = []
    for step in steps:
        found.append(gradients(model, filled((16, 32), [2.0, 0.5, 5.0, 1.0, 0.3][step % 5], step)))
        histories.advance_()
    return found


class Gated(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(16, width), nn.Linear(16, width)
        self.down_proj = nn.Linear(width, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def gated(casts: Any = "fp8-delayed", width: int = 24, smooth: str | None = "channel") -> tuple[Gated, AmaxHistories]:
    torch.manual_seed(0)
    model = convert(Gated(width), casts, smooth_swiglu=smooth)
    return model, AmaxHistories(model)


def test_state_is_plain_tensors() -> None:
    casts = LinearCasts(fprop_x=delayed(history=3), wgrad_g=delayed("e5m2", history=5))
    model, histories = trained(every(delayed(history=2)), steps=1, overrides={"second": casts, "head": "fp8-current"})
    expected = {f"first/{name}": 2 for name in OPERANDS} | {"second/fprop_x": 3, "second/wgrad_g": 5}
    state = histories.state_dict()
    assert list(state) == ["amax_history", "channel_amax"]
    assert {name: tensor.numel() for name, tensor in state["amax_history"].items()} == expected
    assert state["channel_amax"] == {}
    for name, tensor in state["amax_history"].items():
        assert (type(tensor), tensor.dtype, tensor.device.type, tensor.dim()) == (Tensor, torch.float32, "cpu", 1), name
        assert tensor.untyped_storage().nbytes() == 4 * len(tensor), f"{name} drags other tensors into the file"
        tensor.fill_(7)
    assert all(7 not in history for history in remembered(histories).values()), "the state is not a copy"


def test_names_are_those_of_the_unwrapped_model() -> None:
    model = nn.Sequential(torch.compile(convert(nn.Linear(8, 8), LinearCasts(fprop_x=E4M3))))
    assert list(AmaxHistories(model).state_dict()["amax_history"]) == ["0/fprop_x"]


@pytest.mark.parametrize("casts", ["fp8-delayed", "mixed"])
def test_a_loaded_state_goes_on_bit_for_bit(casts: str) -> None:
    setup: dict[str, Any] = {}
    if casts == "mixed":
        setup = {"casts": every(delayed(history=2)), "overrides": {"second": NVFP4.replace(dgrad_g=None)}}
    model, histories = trained(**setup)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "lightning_lowbit": histories.state_dict()}, file)
    expected = steps_of(model, histories, range(3, 6))
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed, resumed_histories = trained(steps=0, **setup)
    resumed.load_state_dict(saved["model"])
    resumed_histories.load_state_dict(saved["lightning_lowbit"])
    found = steps_of(resumed, resumed_histories, range(3, 6))
    for step, results in enumerate(found):
        identical(results, expected[step], f"step {step} after loading")
    same_states(resumed_histories, histories, "later")
    anew, anew_histories = trained(steps=0, **setup)
    assert not torch.equal(steps_of(anew, anew_histories, range(3, 4))[0]["y"], expected[0]["y"]), "nothing to resume"


def test_smoothed_channels_are_state() -> None:
    model, histories = gated()
    seen: list[Tensor] = []
    model.down_proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    for micro_batch in range(2):
        model(filled((TOKENS, 16), 2.0, micro_batch)).sum().backward()
    histories.advance_()
    state = copy.deepcopy(histories.state_dict())
    assert list(state["channel_amax"]) == ["down_proj"]
    assert torch.equal(state["channel_amax"]["down_proj"], torch.cat(seen).abs().amax(0)), "of another input"
    assert "down_proj/fprop_w" not in state["amax_history"], "the smoothed weight has its own scale"
    other, loaded = gated()
    loaded.load_state_dict(state)
    same_states(loaded, histories)
    x = filled((TOKENS, 16), 0.01, 3)
    for each in (histories, loaded):
        each.recording = False
    assert torch.equal(other(x), model(x)), "evaluates with other channels"
    assert not torch.equal(gated()[0](x), model(x)), "the sample does not tell"
    for each in (histories, loaded):
        each.advance_()
        same_states(each, loaded, "evaluation was staged")
    assert torch.equal(histories.state_dict()["channel_amax"]["down_proj"], state["channel_amax"]["down_proj"])


def test_loading_forgets_the_step_under_way() -> None:
    model, histories = trained()
    state = copy.deepcopy(histories.state_dict())
    gradients(model, filled((16, 32), 100.0))
    histories.load_state_dict(state)
    histories.advance_()
    for name, tensor in state["amax_history"].items():
        assert torch.equal(histories.state_dict()["amax_history"][name], tensor), f"{name} holds a step of before"


# By case: how the state was saved, who loads it, and what the message says.
OTHERS: dict[str, tuple[Callable[[], Any], Callable[[], Any], list[str]]] = {
    "shorter": (
        lambda: trained(),
        lambda: trained(every(delayed(history=8))),
        ["amax_history of first/fprop_x has 16 steps", "this run's 8"],
    ),
    "longer": (
        lambda: trained(every(delayed(history=8))),
        lambda: trained(),
        ["amax_history of first/fprop_x has 8 steps", "this run's 16"],
    ),
    "one is longer": (
        lambda: trained(),
        lambda: trained(overrides={"head": every(E4M3).replace(wgrad_x=delayed(history=17))}),
        ["amax_history of head/wgrad_x has 16 steps", "this run's 17"],
    ),
    "fewer layers": (
        lambda: trained(skip=["second"]),
        lambda: trained(),
        ["missing there", "second/dgrad_g, second/dgrad_w, second/fprop_w, second/fprop_x, second/wgrad_g"],
    ),
    "more layers": (lambda: trained(), lambda: trained(skip=["head"]), ["not in this model", "head/fprop_x"]),
    "other layers": (
        lambda: trained(skip=["head"]),
        lambda: trained(skip=["first"]),
        ["missing there: head/dgrad_g", "not in this model: first/dgrad_g"],
    ),
    "fewer operands": (
        lambda: trained(every(E4M3).replace(wgrad_x=None)),
        lambda: trained(every(E4M3)),
        ["missing there: first/wgrad_x, head/wgrad_x, second/wgrad_x."],
    ),
    "other operands": (
        lambda: trained(LinearCasts(fprop_x=E4M3)),
        lambda: trained(LinearCasts(fprop_w=E4M3)),
        ["missing there: first/fprop_w, head/fprop_w, second/fprop_w; not in this model: first/fprop_x"],
    ),
    "no delayed scaling": (lambda: trained("fp8-current"), lambda: trained(), ["missing there", "and 12 more"]),
    "not smoothed": (lambda: gated(smooth=None), lambda: gated(), ["not in this model: down_proj/dgrad_w"]),
    "channels missing": (
        lambda: gated("fp8-current", smooth=None),
        lambda: gated("fp8-current"),
        ["channel_amax is that of other layers", "missing there: down_proj"],
    ),
    "other channels": (
        lambda: gated("fp8-current", 32),
        lambda: gated("fp8-current"),
        ["channel_amax of down_proj has 32 channels", "this run's 24"],
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_state_of_something_else_is_refused_whole(case: str) -> None:
    save, load, words = OTHERS[case]
    state = save()[1].state_dict()
    model, histories = load()
    before = copy.deepcopy(histories.state_dict())
    in_force = [layer.amaxes.in_force.clone() for layer in model.modules() if getattr(layer, "amaxes", None)]
    with pytest.raises(ValueError, match="fresh_histories=True") as error:
        histories.load_state_dict(state)
    for part in words:
        assert part in str(error.value), f"{part!r} is not in {error.value}"
    for kind, tensors in before.items():
        for name, tensor in tensors.items():
            assert torch.equal(histories.state_dict()[kind][name], tensor), f"{kind} of {name} has been changed"
    after = [layer.amaxes.in_force for layer in model.modules() if getattr(layer, "amaxes", None)]
    assert all(map(torch.equal, after, in_force))


def test_the_model_holds_no_state() -> None:
    model, _ = trained()
    assert list(model.state_dict()) == list(Net().state_dict())
    assert not list(model.buffers())
    Net().load_state_dict(model.state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_dtype_of_the_model_is_not_that_of_amaxes(dtype: torch.dtype) -> None:
    model, histories = trained(steps=0)
    model.to(dtype)
    amax = 1.0 + 2**-7  # which both hold
    gradients(model, filled((16, 32), amax).to(dtype))
    histories.advance_()
    assert remembered(histories)["first/fprop_x"] == [amax]
    for tensor in (*histories.state_dict()["amax_history"].values(), *model.first.amaxes[:4]):
        assert tensor.dtype == torch.float32


def test_copies_are_independent() -> None:
    model, histories = trained()
    before = copy.deepcopy(histories.state_dict())
    twin = copy.deepcopy(model)
    x = filled((16, 32), 50.0)
    found = gradients(twin, x)
    histories.advance_()
    for name, tensor in before["amax_history"].items():
        assert torch.equal(histories.state_dict()["amax_history"][name], tensor), f"{name}: the copy staged it"
    identical(gradients(model, x), found, "the copy is scaled otherwise")
    own = AmaxHistories(twin)
    own.load_state_dict(histories.state_dict())
    histories.advance_()
    identical(gradients(twin, x), found, "the original stepped, and changed the copy")
    own.advance_()
    same_states(own, histories, "each by itself")


def test_new_histories_take_the_place_of_old_ones() -> None:
    model, old = trained()
    new = AmaxHistories(model)
    gradients(model, filled((16, 32), 9.0))
    old.advance_()
    assert len(remembered(old)["first/fprop_x"]) == 3, "the layers still stage into the old ones"
    assert model.first.amaxes.in_force.tolist() == [0] * 6, "not empty"
    new.advance_()
    assert remembered(new)["first/fprop_x"] == [9]


def test_without_histories_is_refused() -> None:
    layer = convert(nn.Linear(IN, OUT), LinearCasts(dgrad_g=E4M3))
    with pytest.raises(ValueError, match=r"Delayed scaling needs histories.*lightning_lowbit\.nn\.AmaxHistories"):
        layer(torch.ones(1, IN))


@pytest.mark.parametrize("change", ["convert", "smooth"])
def test_casts_that_the_histories_do_not_know_are_refused(change: str) -> None:
    """Other operands than those that are remembered would be scaled by their own amaxes for ever, without a word."""
    model, _ = gated(LinearCasts(fprop_x=E4M3), smooth=None)
    if change == "convert":
        convert(model, LinearCasts(fprop_x=E4M3, dgrad_g=E4M3))
    else:
        smooth_swiglu(model)
    with pytest.raises(ValueError, match="histories"):
        model(torch.ones(2, 16))
    histories = AmaxHistories(model)
    model(torch.ones(2, 16)).sum().backward()
    histories.advance_()
    assert ("down_proj/dgrad_g" in remembered(histories)) == (change == "convert")


def test_nothing_to_remember() -> None:
    model, _ = trained(steps=1)
    histories = AmaxHistories(convert(model, "fp8-current"))
    assert not histories
    assert len(histories) == 0
    histories.advance_(lambda tensor: pytest.fail("there is nothing to reduce"))
    assert histories.state_dict() == {"amax_history": {}, "channel_amax": {}}
    histories.load_state_dict(histories.state_dict())
    assert model.first.amaxes is None, "it still holds those of former casts"


def test_the_first_pass_may_be_in_inference_mode() -> None:
    """Evaluation before training moves what layers hold to their device; training then fills it in place."""
    model, histories = trained(steps=0)
    with torch.inference_mode():
        histories.to_(torch.device("meta"))
    assert model.first.amaxes.staged.device.type == "meta"
    held = {name: getattr(model.first.amaxes, name) for name in ("in_force", "staged", "channels", "staged_channels")}
    assert not [name for name, tensor in held.items() if tensor.is_inference()], "cannot be changed any more"
    histories.advance_()


def test_moving_to_the_same_device_changes_nothing() -> None:
    model, histories = trained()
    before = model.first.amaxes
    gradients(model, filled((16, 32), 9.0))
    histories.to_(torch.device("cpu"))
    assert all(a is b for a, b in zip(before, model.first.amaxes, strict=True))
    histories.advance_()
    assert remembered(histories)["first/fprop_x"][-1] == 9


# --- ranks ------------------------------------------------------------------------------------------------------------


def test_one_collective_per_step() -> None:
    """Whatever is given as the maximum over ranks is what is remembered."""
    model, histories = gated()
    plain, alone = gated()
    calls: list[Tensor] = []

    def as_if_twice_as_large_elsewhere(tensor: Tensor) -> None:
        calls.append(tensor.clone())
        tensor.mul_(2)

    for step in range(3):
        x = filled((TOKENS, 16), 2.0**step)
        if step == 0:  # later ones differ, for other scales are in force
            plain(x).sum().backward()
            alone.advance_()
        model(x).sum().backward()
        histories.advance_(as_if_twice_as_large_elsewhere)
        assert len(calls) == step + 1, f"{len(calls)} collectives in {step + 1} steps"
        assert calls[step].dim() == 1
        assert calls[step].dtype == torch.float32
        if step == 0:
            for kind, tensors in alone.state_dict().items():
                for name, tensor in tensors.items():
                    found = histories.state_dict()[kind][name]
                    assert torch.equal(found, 2 * tensor), f"{kind} of {name}: {found}, not twice {tensor}"
    assert remembered(histories)["up_proj/fprop_x"] == [2, 4, 8]
    assert model.up_proj.amaxes.in_force[0] == 8, "not scaled by what was reduced"
    histories.advance_(as_if_twice_as_large_elsewhere)
    assert len(calls) == 4, "a rank without a pass takes part, too"
    assert not calls[3].any()


def test_ranks_that_reduce_agree() -> None:
    """Two replicas with different batches: the larger amax of both is what either remembers."""
    ranks = [trained(steps=0) for _ in range(2)]
    for step in range(2):
        staged: list[Tensor] = []
        for rank, (model, histories) in enumerate(ranks):
            gradients(model, filled((16, 32), [[1.0, 4.0], [3.0, 2.0]][rank][step], rank))
            reference = copy.deepcopy(histories)
            reference.advance_(lambda tensor, staged=staged: staged.append(tensor.clone()))
        for _, histories in ranks:
            histories.advance_(lambda tensor, staged=staged: tensor.copy_(torch.maximum(*staged)))
    same_states(ranks[0][1], ranks[1][1], "another history on the other rank")
    assert remembered(ranks[0][1])["first/fprop_x"] == [3, 4]


# --- torch.compile ----------------------------------------------------------------------------------------------------

COMPILED = {
    "fp8-delayed": LinearCasts.preset("fp8-delayed"),
    "nvfp4": NVFP4,
    "transformed": every(
        E4M3, hadamard={"fprop": 16, "wgrad": 16}, subtract_mean=["dgrad"], surrogate={"fprop_x": "trust"}
    ),
}


@pytest.mark.parametrize(("casts", "recompute"), [("fp8-delayed", False), ("nvfp4", True), ("transformed", False)])
def test_compiled_layers_stage_the_same(casts: str, recompute: bool) -> None:
    """One compilation serves all steps, whatever histories hold."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = convert(Net(recompute=recompute), COMPILED[casts])
    twin = copy.deepcopy(model)
    for each in (model, twin):
        LayerKeys(each).fill_(0)
    histories, expected = AmaxHistories(model), AmaxHistories(twin)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for step, amax in enumerate((1.0, 20.0, 0.1)):
        for micro_batch in range(2):
            x = filled((16, 32), amax, micro_batch)
            found = {name.removeprefix("_orig_mod."): tensor for name, tensor in gradients(compiled, x).items()}
            identical(found, gradients(twin, x), f"step {step}")
        histories.advance_()
        expected.advance_()
        same_states(histories, expected, f"step {step}")
    assert [len(history) for history in remembered(histories).values()] == [3] * len(remembered(histories))
    assert counter.frame_count == 1, f"{counter.frame_count} compilations"
    torch._dynamo.reset()


def test_evaluation_costs_one_compilation() -> None:
    torch._dynamo.reset()
    model, histories = trained(steps=0)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    x = filled((16, 32), 1.0)
    for recording, expected in ((True, 1), (False, 2), (True, 2), (False, 2)):
        histories.recording = recording
        gradients(compiled, x)
        histories.advance_()
        assert counter.frame_count == expected, f"{counter.frame_count} compilations, recording {recording}"
    assert remembered(histories)["first/fprop_x"] == [1, 1]
    torch._dynamo.reset()


def test_generated_code_stages_the_same() -> None:
    torch._dynamo.reset()
    layer, histories = single("fp8-delayed")
    twin, expected = single("fp8-delayed")
    twin.load_state_dict(layer.state_dict())
    compiled = torch.compile(layer, fullgraph=True)
    for step, amax in enumerate((1.0, 20.0, 0.1)):
        found = run(compiled, filled((TOKENS, IN), amax), filled((TOKENS, OUT), amax, 2))
        found = {name.removeprefix("_orig_mod."): tensor for name, tensor in found.items()}
        identical(found, run(twin, filled((TOKENS, IN), amax), filled((TOKENS, OUT), amax, 2)), f"step {step}")
        histories.advance_()
        expected.advance_()
        same_states(histories, expected, f"step {step}")
    assert [len(history) for history in remembered(histories).values()] == [3] * len(OPERANDS)
    torch._dynamo.reset()
