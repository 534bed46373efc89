"""Delayed scaling under torch.compile: the same numbers and the same histories, without a compilation per step."""

import pytest
import torch
from torch import nn

from tests.nn.amax.histories import E4M3, NVFP4, assert_equal_steps, filled, remembered, trained, twins
from tests.nn.layers import every, gradients

COMPILED = {
    "fp8-delayed": "fp8-delayed",
    "nvfp4": NVFP4,
    "transformed": every(
        E4M3, hadamard={"fprop": 16, "wgrad": 16}, subtract_mean=["dgrad"], surrogate={"fprop_x": "trust"}
    ),
}


@pytest.mark.fast("fp8-delayed-False")
@pytest.mark.parametrize(("casts", "recompute"), [("fp8-delayed", False), ("nvfp4", True), ("transformed", False)])
def test_compiled_layers_stage_the_same(compiler, casts, recompute):
    """One compilation serves all steps, whatever histories hold."""
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
