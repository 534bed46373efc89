"""Delayed scaling, step by step: what a pass stages, what is remembered of a step, and what is no step."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_lowbit import convert
from lightning_lowbit.nn import OPERANDS, AmaxHistories, set_phase
from tests.nn.amax.histories import (
    BY_TENSOR,
    E4M3,
    IN,
    NVFP4,
    OUT,
    TOKENS,
    assert_equal_steps,
    filled,
    gated,
    one_pass,
    remembered,
    single,
    trained,
    twins,
)
from tests.nn.layers import every, gradients, identical, run, spied, value
from tests.optim.parameters import NoHostSync
from tests.tables import each


def test_a_step_is_the_largest_of_its_passes():
    layer, histories = single(every(E4M3))
    for step, amaxes in enumerate(([1.0, 3.0, 2.0], [0.5, 0.25])):
        for amax in amaxes:
            with spied() as seen:
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


def test_amaxes_are_those_of_the_compute_dtype():
    layer, histories = single(every(E4M3))
    layer.weight.data.copy_(filled((OUT, IN), 1.001))
    run(layer, filled((TOKENS, IN), 1.002), filled((TOKENS, OUT), 1.003), autocast=True)
    histories.advance_()
    rounded = {name: torch.tensor(amax).bfloat16().item() for name, amax in (("x", 1.002), ("w", 1.001), ("g", 1.003))}
    assert remembered(histories) == {f"/{operand}": [rounded[operand[-1]]] for operand in OPERANDS}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_evaluation_is_no_step(mode):
    layer, histories = single(every(E4M3))
    one_pass(layer, 3.5)
    histories.advance_()
    before = histories.state_dict()
    histories.recording = False
    assert not histories.recording
    with mode(), spied() as seen:
        y = layer(filled((TOKENS, IN), 7.0))
    assert seen["fprop_x"].factor == 1 / 128, "not scaled by what is remembered"
    if y.requires_grad:
        y.sum().backward()
    histories.advance_()
    identical(histories.state_dict()["amax_history"], before["amax_history"], "evaluation was staged:")
    histories.recording = True
    with mode():
        layer(filled((TOKENS, IN), 7.0))
    histories.advance_()
    assert remembered(histories)["/fprop_x"] == [3.5, 7]


def test_a_pass_that_the_step_overtakes_keeps_its_scales():
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


@pytest.mark.parametrize("casts", ["fp8-delayed", NVFP4], ids=["fp8", "nvfp4"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_changes_nothing(use_reentrant, casts):
    recomputing, plain = twins(casts)
    block = recomputing[0].block
    recomputing[0].block = lambda x: checkpoint(block, x, use_reentrant=use_reentrant)
    assert_equal_steps(recomputing, plain)


def test_a_layer_that_does_not_run_keeps_what_it_has():
    model = convert(nn.ModuleList(nn.Linear(IN, OUT, bias=False) for _ in range(2)), every(E4M3))
    histories = AmaxHistories(model)
    for amax, layers in ((3.5, (0, 1)), (7.0, (0,)), (14.0, (1,))):
        for i in layers:
            with spied() as seen:
                one_pass(model[i], amax)
        histories.advance_()
    assert seen["wgrad_g"].factor == 1 / 128, "a step without the layer changed its scale"
    expected = {0: [3.5, 7], 1: [3.5, 14]}
    assert remembered(histories) == {f"{i}/{name}": history for i, history in expected.items() for name in OPERANDS}


def test_a_phase_leaves_the_histories_of_what_it_does_not_quantize():
    layer, histories = single(every(E4M3))
    for phase in ("fqt", "qaf", "bf16", "hp-forward", "fqt"):
        set_phase(layer, phase)
        one_pass(layer, {"fqt": 1.0, "qaf": 2.0, "bf16": 3.0, "hp-forward": 4.0}[phase])
        histories.advance_()
    forward = {f"/{name}": [1, 2, 1] for name in OPERANDS[:2]}
    assert remembered(histories) == forward | {f"/{name}": [1, 4, 1] for name in OPERANDS[2:]}


@each("first", [False, True])
@each("bad", [torch.inf, -torch.inf, torch.nan])
@each("where", BY_TENSOR)
def test_an_overflow_is_seen_and_not_remembered(where, bad, first):
    layer, histories = single(every(E4M3))
    if not first:
        one_pass(layer, 3.5)
        histories.advance_()
    with spied() as seen:
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
        assert tensor.isnan().any(), f"{bad} in {where} is not seen in {name}"
    with spied() as seen:
        found = one_pass(layer, 0.875)
    for operand in BY_TENSOR[where]:
        assert seen[operand].factor == (1 / 512 if first else 1 / 128), f"{operand}: another scale"
    assert all(tensor is not None and tensor.isfinite().all() for tensor in found.values()), "it lasts"


def test_an_overflow_in_one_micro_batch_leaves_the_others():
    layer, histories = single(every(E4M3))
    for amax in (2.0, torch.inf, 3.0, torch.nan):
        one_pass(layer, amax)
    histories.advance_()
    assert remembered(histories) == {f"/{operand}": [3] for operand in OPERANDS}


# --- ranks ------------------------------------------------------------------------------------------------------------


def test_amaxes_of_gradients_follow_the_scale_of_the_loss():
    """Those of the step under way too; without an index that the host would copy to the device."""

    class NoIndex(NoHostSync):
        FORBIDDEN = (*NoHostSync.FORBIDDEN, "index", "index_put", "index_put_")

    layer, histories = single(every(E4M3))
    for amax in (1.0, 2.0):
        one_pass(layer, amax)
        histories.advance_()
    one_pass(layer, 4.0)
    factor = torch.tensor(0.5)
    with NoIndex():
        histories.scale_gradients_(factor)
    histories.advance_()
    for name, amaxes in remembered(histories).items():
        assert amaxes == ([0.5, 1, 2] if name.endswith("_g") else [1, 2, 4]), name
    for scale, growth in ((0.5, 0.5), (0.5, 0.5), (torch.tensor(3.0), 3), (torch.tensor(3.0), 3)):
        histories.follow_(scale)
        assert remembered(histories)["/dgrad_g"] == [0.5 * growth, growth, 2 * growth]
        assert remembered(histories)["/wgrad_x"] == [1, 2, 4]
    for scale in (0.0, 2.0):  # torch's scaler may fall to 0
        histories.follow_(scale)
        assert remembered(histories)["/dgrad_g"] == [], "what is unknown is 0: they are empty"


def test_a_state_knows_the_scale_of_its_amaxes():
    layer, histories = single(every(E4M3))
    histories.follow_(0.25)
    one_pass(layer, 1.0)
    histories.advance_()
    state = histories.state_dict()
    histories.follow_(torch.tensor(8.0))
    for loaded, expected in ((state, 32), ({**state, "gradient_scale": {"loss": torch.ones(1)}}, 8)):
        histories.load_state_dict(loaded)
        histories.follow_(torch.tensor(8.0))
        assert remembered(histories)["/wgrad_g"] == [expected]
    histories.load_state_dict({kind: state[kind] for kind in ("amax_history", "channel_amax")})
    histories.follow_(1.0)
    assert remembered(histories)["/wgrad_g"] == [1], "a state without a scale is taken to be unscaled"


def test_one_collective_per_step():
    model, histories = gated()
    plain, alone = gated()
    calls = []

    def as_if_twice_as_large_elsewhere(tensor):
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
            for kind in ("amax_history", "channel_amax"):
                twice = {name: 2 * tensor for name, tensor in alone.state_dict()[kind].items()}
                identical(histories.state_dict()[kind], twice, f"{kind} of")
    assert remembered(histories)["up_proj/fprop_x"] == [2, 4, 8]
    assert model.up_proj.lowbit.amaxes.in_force[0] == 8, "not scaled by what was reduced"
    histories.advance_(as_if_twice_as_large_elsewhere)
    assert len(calls) == 4, "a rank without a pass takes part, too"
    assert not calls[3].any()


# --- compiled ---------------------------------------------------------------------------------------------------------

COMPILED = {
    "fp8-delayed": "fp8-delayed",
    "nvfp4": NVFP4,
    "transformed": every(
        E4M3, hadamard={"fprop": 16, "wgrad": 16}, subtract_mean=["dgrad"], surrogate={"fprop_x": "trust"}
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("casts", "recompute"), [("fp8-delayed", False), ("nvfp4", True), ("transformed", False)])
def test_compiled_layers_stage_the_same(compiler, casts, recompute):
    (model, histories), plain = twins(COMPILED[casts], recompute=recompute)
    compiled = torch.compile(model, backend=compiler, fullgraph=True)
    assert_equal_steps((compiled, histories), plain)
    assert compiler.frame_count == 1, f"{compiler.frame_count} compilations"


@pytest.mark.slow
def test_evaluation_costs_one_compilation(compiler):
    model, histories = trained(steps=0)
    compiled = torch.compile(model, backend=compiler, fullgraph=True)
    x = filled((16, 32), 1.0)
    for recording, expected in ((True, 1), (False, 2), (True, 2), (False, 2)):
        histories.recording = recording
        gradients(compiled, x)
        histories.advance_()
        assert compiler.frame_count == expected, f"{compiler.frame_count} compilations, recording {recording}"
    assert remembered(histories)["first/fprop_x"] == [1, 1]


@pytest.mark.usefixtures("compiler")
@pytest.mark.slow
def test_generated_code_stages_the_same():
    (model, histories), plain = twins("fp8-delayed", nn.Linear(32, 16, bias=False))
    assert_equal_steps((torch.compile(model, fullgraph=True), histories), plain)


# Dynamo looks at the gradient of what the piece before gives.
@pytest.mark.usefixtures("compiler")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor is being accessed")
def test_a_model_that_is_compiled_in_pieces():
    """The pass of one piece changes nothing that the backward pass of another needs."""
    (model, histories), plain = twins("fp8-delayed")
    for layer in (model.first, model.second, model.head):
        layer.compile(backend="aot_eager")
    assert_equal_steps((model, histories), plain)
