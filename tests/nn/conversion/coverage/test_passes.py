"""FLOPs of backward passes, recomputed activations and compiled code."""

import warnings

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from lightning_lowbit import compilation
from lightning_lowbit.nn import GemmCounter, set_phase
from tests.nn.conversion.coverage.flops import (
    BACKWARD,
    TOKENS,
    WIDTH,
    Applied,
    assert_counted,
    backward,
    count,
    gemm,
    layer,
    low_bit,
    tower,
    x_of,
)
from tests.tables import each


@each("phase", ["fqt", "bf16"])
@each("needs_x", [False, True])
@each("needs_w", [False, True])
def test_frozen_weights_and_inputs_without_gradient(needs_x, needs_w, phase):
    """Counted alike whatever the phase in force: the coverage of another one can be asked for."""
    model = low_bit(nn.Linear(WIDTH, 8))
    set_phase(model, phase)
    model.weight.requires_grad_(needs_w)
    x = x_of(TOKENS, WIDTH, grad=needs_x)
    with GemmCounter(nn.Sequential(model)) as counter:
        backward(model(x))
    without = [name for name, needed in (("dgrad", needs_x), ("wgrad", needs_w)) if not needed]
    set_phase(model, "fqt")
    assert_counted(counter, {"0": layer(TOKENS, WIDTH, 8, without)}, {})


def test_a_layer_called_twice():
    """The first call needs no gradient of its input, the second does."""
    counter = count(
        low_bit(Applied(lambda self, x: self.layer(self.layer(x)), layer=nn.Linear(WIDTH, WIDTH))), x_of(TOKENS, WIDTH)
    )
    flops = gemm(TOKENS, WIDTH, WIDTH)
    assert_counted(counter, {"layer": {"fprop": 2 * flops, "dgrad": flops, "wgrad": 2 * flops}}, {})


def test_an_input_given_by_name():
    """A converted layer may be called as its original may."""
    for name, original in (("input", nn.Linear(WIDTH, 8)), ("x", Conv1D(8, WIDTH))):
        model = low_bit(Applied(lambda self, x, name=name: self.layer(**{name: x}), layer=original))
        with GemmCounter(model) as counter:
            backward(model(x_of(TOKENS, WIDTH, grad=True)))
        assert_counted(counter, {"layer": layer(TOKENS, WIDTH, 8)}, {})


def test_two_towers():
    """Without gradients of inputs, and one of them in high precision: each gets its own backward pass."""
    model = low_bit(Applied(lambda self, x: self.a(x) * self.b(x), a=tower(WIDTH, 8), b=tower(WIDTH, 32)), skip=["b"])
    counter = count(model, x_of(TOKENS, WIDTH))
    assert_counted(
        counter,
        {"a.0": layer(TOKENS, WIDTH, 8, ["dgrad"]), "a.2": layer(TOKENS, 8, 4)},
        {"b.0": 2 * gemm(TOKENS, 32, WIDTH), "b.2": 3 * gemm(TOKENS, 4, 32)},
    )


@each("frozen", [False, True])
@each("skip", [[], ["teacher"], ["student"], ["student", "teacher"]])
def test_a_teacher_without_gradients_after_a_student(frozen, skip):
    """It leaves no autograd node behind, and takes no gradient of the student's."""

    def distance(self, x):
        student = self.student(x)
        with torch.set_grad_enabled(frozen):
            teacher = self.teacher(x)
        return self.head(student - teacher)

    names = ("student", "teacher", "head")
    model = low_bit(Applied(distance, **{name: nn.Linear(4, 4) for name in names}), skip=skip)
    model.teacher.requires_grad_(not frozen)
    counter = count(model, x_of(TOKENS, 4))
    without = {"student": ["dgrad"], "teacher": BACKWARD, "head": []}
    expected = {name: layer(TOKENS, 4, 4, without[name]) for name in names}
    layers = {name: gemms for name, gemms in expected.items() if name not in skip}
    assert_counted(counter, layers, {name: sum(expected[name].values()) for name in skip})


def test_a_backward_pass_inside_a_forward():
    """As in manual optimization under DDP, whose forward runs the training step: nothing is computed twice."""
    model = low_bit(nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 4)), skip=["0"])

    def step(self, x):
        loss = self.model(x).square().sum()
        loss.backward()
        return loss.detach()

    with GemmCounter(model) as counter:
        Applied(step, model=model)(x_of(TOKENS, WIDTH))
    assert_counted(counter, {"2": layer(TOKENS, 8, 4)}, {"0": 2 * gemm(TOKENS, 8, WIDTH)})


def test_gradients_of_gradients():
    """A penalty on the gradient: backward operations with a graph of their own are no recomputation."""
    model = nn.Sequential(nn.Linear(WIDTH, 8, bias=False), nn.Tanh(), nn.Linear(8, 1, bias=False))
    x = x_of(TOKENS, WIDTH, grad=True)
    with GemmCounter(model) as counter:
        [gradient] = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    assert counter.recomputed == 0
    assert dict(counter.others) == {"0": 2 * gemm(TOKENS, 8, WIDTH), "2": 2 * gemm(TOKENS, 1, 8)}
    assert gradient.shape == x.shape


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations(reentrant):
    """They count once more as forward GEMMs, and are told apart from what the model needs."""
    block = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))
    model = low_bit(
        Applied(
            lambda self, x: self.head(checkpoint(self.block, x, use_reentrant=reentrant)),
            block=block,
            head=nn.Linear(WIDTH, 4),
        )
    )
    counter = count(model, x_of(TOKENS, WIDTH, grad=True))
    flops = gemm(TOKENS, 32, WIDTH)
    twice = {"fprop": 2 * flops, "dgrad": flops, "wgrad": flops}
    layers = {"block.0": twice, "block.2": twice, "head": layer(TOKENS, WIDTH, 4)}
    assert_counted(counter, layers, {}, recomputed=2 * flops)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations_of_a_function(reentrant):
    """A raw product in a checkpointed function, before a converted layer: it is recomputed, and is not low-bit."""

    def block(self, x):
        return self.layer(torch.relu(x @ self.w))

    model = low_bit(
        Applied(
            lambda self, x: checkpoint(block, self, x, use_reentrant=reentrant),
            w=nn.Parameter(torch.randn(WIDTH, 32)),
            layer=nn.Linear(32, WIDTH),
        )
    )
    counter, flops = count(model, x_of(TOKENS, WIDTH, grad=True)), gemm(TOKENS, 32, WIDTH)
    assert counter.coverage().flops == 8 * flops
    assert counter.recomputed == 2 * flops
    assert counter.model_flops == 6 * flops
    assert dict(counter.gemms) == {("layer", "fprop"): 2 * flops, ("layer", "dgrad"): flops, ("layer", "wgrad"): flops}
    assert sum(counter.others.values()) == 4 * flops


@pytest.mark.parametrize("whole", [True, False], ids=["module", "in place"])
def test_compiled(whole):
    """A compiled module counts as it does otherwise, and says nothing about hooks."""
    x = x_of(TOKENS, WIDTH)
    model = low_bit(nn.Sequential(tower(WIDTH, 8), nn.Tanh(), nn.Linear(4, 2)), skip=["2"])
    eager = count(model, x)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    if whole:
        compiled = torch.compile(model, backend=backend)
    else:
        compiled = model
        compiled.compile(backend=backend)
    with warnings.catch_warnings(record=True) as caught, GemmCounter(compiled) as counter:
        backward(compiled(x))
    assert not caught, [str(warning.message) for warning in caught]
    assert counter.gemms == eager.gemms
    assert counter.others == eager.others
    assert not graphs, "which module computes is not known in compiled code"
    backward(compiled(x))
    assert graphs, "the model was left as eager code for good"


def test_a_compiled_function_that_calls_modules():
    """It counts as it does otherwise."""
    x = x_of(TOKENS, WIDTH)
    model = low_bit(tower(WIDTH, 8))
    with GemmCounter(model) as counter:
        backward(torch.compile(lambda x: model(x), backend="eager")(x))
    assert counter.gemms == count(model, x).gemms


@pytest.mark.usefixtures("compiler")
@pytest.mark.slow
def test_casts_are_compiled_after_the_count():
    """What torch.compile once ran as eager code stays eager code; the casts of a run must not be among it."""
    x = x_of(TOKENS, WIDTH)
    model = low_bit(tower(WIDTH, 8))
    counters.clear()
    with compilation.backend("compiled"):
        with GemmCounter(model):
            backward(model(x))
        assert not counters["frames"]
        backward(model(x))
    assert counters["frames"]["ok"] > 0 and counters["frames"]["ok"] == counters["frames"]["total"]
