"""Delayed scaling under torch.compile: the same numbers and the same histories, without a compilation per step."""

import copy

import pytest
import torch

from lightning_lowbit import LinearCasts, convert
from lightning_lowbit.nn import OPERANDS, AmaxHistories, LayerKeys
from tests.nn.amax.histories import E4M3, IN, NVFP4, OUT, TOKENS, filled, remembered, same_states, single, trained
from tests.nn.layers import Net, every, gradients, identical, run

COMPILED = {
    "fp8-delayed": LinearCasts.preset("fp8-delayed"),
    "nvfp4": NVFP4,
    "transformed": every(
        E4M3, hadamard={"fprop": 16, "wgrad": 16}, subtract_mean=["dgrad"], surrogate={"fprop_x": "trust"}
    ),
}


@pytest.mark.fast("fp8-delayed-False")
@pytest.mark.parametrize(("casts", "recompute"), [("fp8-delayed", False), ("nvfp4", True), ("transformed", False)])
def test_compiled_layers_stage_the_same(compiler, casts, recompute):
    """One compilation serves all steps, whatever histories hold."""
    torch.manual_seed(0)
    model = convert(Net(recompute=recompute), COMPILED[casts])
    twin = copy.deepcopy(model)
    for each in (model, twin):
        LayerKeys(each).fill_(0)
    histories, expected = AmaxHistories(model), AmaxHistories(twin)
    compiled = torch.compile(model, backend=compiler, fullgraph=True)
    for step, amax in enumerate((1.0, 20.0, 0.1)):
        for micro_batch in range(2):
            x = filled((16, 32), amax, micro_batch)
            identical(gradients(compiled, x), gradients(twin, x), f"step {step}")
        histories.advance_()
        expected.advance_()
        same_states(histories, expected, f"step {step}")
    assert [len(history) for history in remembered(histories).values()] == [3] * len(remembered(histories))
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
    layer, histories = single("fp8-delayed")
    twin, expected = single("fp8-delayed")
    twin.load_state_dict(layer.state_dict())
    compiled = torch.compile(layer, fullgraph=True)
    for step, amax in enumerate((1.0, 20.0, 0.1)):
        found = run(compiled, filled((TOKENS, IN), amax), filled((TOKENS, OUT), amax, 2))
        identical(found, run(twin, filled((TOKENS, IN), amax), filled((TOKENS, OUT), amax, 2)), f"step {step}")
        histories.advance_()
        expected.advance_()
        same_states(histories, expected, f"step {step}")
    assert [len(history) for history in remembered(histories).values()] == [3] * len(OPERANDS)


# Dynamo looks at the gradient of what the piece before gives.
@pytest.mark.usefixtures("compiler")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor is being accessed")
def test_a_model_that_is_compiled_in_pieces():
    """The pass of one piece changes nothing that the backward pass of another needs."""
    torch.manual_seed(0)
    model = convert(Net(), "fp8-delayed")
    twin = copy.deepcopy(model)
    for each in (model, twin):
        LayerKeys(each).fill_(0)
    histories, expected = AmaxHistories(model), AmaxHistories(twin)
    for layer in (model.first, model.second, model.head):
        layer.compile(backend="aot_eager")
    for step in range(2):
        x = filled((16, 32), 1.0 + step)
        identical(gradients(model, x), gradients(twin, x), f"step {step}")
        histories.advance_()
        expected.advance_()
        same_states(histories, expected, f"step {step}")
