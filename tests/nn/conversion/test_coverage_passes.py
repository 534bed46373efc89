"""FLOPs of backward passes, recomputed activations and compiled code; and what the counter leaves behind: nothing."""

import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.modules import module as module_globals
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from lightning_lowbit import compilation
from lightning_lowbit.nn import GemmCounter, set_phase
from tests.nn.conversion.flops import TOKENS, WIDTH, Applied, assert_counted, backward, count, gemm, layer, low_bit
from tests.nn.named_casts import ALL_MEANS, ALL_ROTATED, NVFP4
from tests.tables import each


def tower(inputs, hidden, outputs=4):
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


@each("phase", ["fqt", "bf16"])
@each("needs_x", [False, True])
@each("needs_w", [False, True])
def test_frozen_weights_and_inputs_without_gradient(needs_x, needs_w, phase):
    model = low_bit(nn.Linear(WIDTH, 8))
    set_phase(model, phase)
    model.weight.requires_grad_(needs_w)
    x = torch.randn(TOKENS, WIDTH, requires_grad=needs_x)
    with GemmCounter(nn.Sequential(model)) as counter:
        backward(model(x))
    without = [name for name, needed in (("dgrad", needs_x), ("wgrad", needs_w)) if not needed]
    set_phase(model, "fqt")
    assert_counted(counter, {"0": layer(TOKENS, WIDTH, 8, without)}, {})


def test_a_layer_called_twice():
    model = low_bit(Applied(lambda self, x: self.layer(self.layer(x)), layer=nn.Linear(WIDTH, WIDTH)))
    flops = gemm(TOKENS, WIDTH, WIDTH)
    layers = {"layer": {"fprop": 2 * flops, "dgrad": flops, "wgrad": 2 * flops}}
    assert_counted(count(model, torch.randn(TOKENS, WIDTH)), layers, {})


def test_an_input_given_by_name():
    for name, original in (("input", nn.Linear(WIDTH, 8)), ("x", Conv1D(8, WIDTH))):
        model = low_bit(Applied(lambda self, x, name=name: self.layer(**{name: x}), layer=original))
        with GemmCounter(model) as counter:
            backward(model(torch.randn(TOKENS, WIDTH, requires_grad=True)))
        assert_counted(counter, {"layer": layer(TOKENS, WIDTH, 8)}, {})


def test_two_towers():
    model = low_bit(Applied(lambda self, x: self.a(x) * self.b(x), a=tower(WIDTH, 8), b=tower(WIDTH, 32)), skip=["b"])
    layers = {"a.0": layer(TOKENS, WIDTH, 8, ["dgrad"]), "a.2": layer(TOKENS, 8, 4)}
    others = {"b.0": 2 * gemm(TOKENS, 32, WIDTH), "b.2": 3 * gemm(TOKENS, 4, 32)}
    assert_counted(count(model, torch.randn(TOKENS, WIDTH)), layers, others)


@each("frozen", [False, True])
@each("skip", [[], ["teacher"], ["student"], ["student", "teacher"]])
def test_a_teacher_without_gradients_after_a_student(frozen, skip):
    def distance(self, x):
        student = self.student(x)
        with torch.set_grad_enabled(frozen):
            teacher = self.teacher(x)
        return self.head(student - teacher)

    names = ("student", "teacher", "head")
    model = low_bit(Applied(distance, **{name: nn.Linear(4, 4) for name in names}), skip=skip)
    model.teacher.requires_grad_(not frozen)
    counter = count(model, torch.randn(TOKENS, 4))
    without = {"student": ["dgrad"], "teacher": ["dgrad", "wgrad"], "head": []}
    expected = {name: layer(TOKENS, 4, 4, without[name]) for name in names}
    layers = {name: gemms for name, gemms in expected.items() if name not in skip}
    assert_counted(counter, layers, {name: sum(expected[name].values()) for name in skip})


def test_a_backward_pass_inside_a_forward():
    """As in manual optimization under DDP, whose forward runs the training step: nothing is computed twice."""
    model = low_bit(tower(WIDTH, 8), skip=["0"])

    def step(self, x):
        loss = self.model(x).square().sum()
        loss.backward()
        return loss.detach()

    with GemmCounter(model) as counter:
        Applied(step, model=model)(torch.randn(TOKENS, WIDTH))
    assert_counted(counter, {"2": layer(TOKENS, 8, 4)}, {"0": 2 * gemm(TOKENS, 8, WIDTH)})


def test_gradients_of_gradients():
    """A penalty on the gradient: backward operations with a graph of their own are no recomputation."""
    model = nn.Sequential(nn.Linear(WIDTH, 8, bias=False), nn.Tanh(), nn.Linear(8, 1, bias=False))
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)
    with GemmCounter(model) as counter:
        [gradient] = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    assert counter.recomputed == 0
    assert dict(counter.others) == {"0": 2 * gemm(TOKENS, 8, WIDTH), "2": 2 * gemm(TOKENS, 1, 8)}
    assert gradient.shape == x.shape


@each("reentrant", [False, True])
def test_recomputed_activations(reentrant):
    """They count once more as forward GEMMs, and are told apart from what the model needs: of a function, in which a
    raw product comes before a converted layer, and of modules."""

    def block(self, x):
        return self.layer(torch.relu(x @ self.w))

    members = {"w": nn.Parameter(torch.randn(WIDTH, 32)), "layer": nn.Linear(32, WIDTH)}
    model = low_bit(Applied(lambda self, x: checkpoint(block, self, x, use_reentrant=reentrant), **members))
    flops = gemm(TOKENS, 32, WIDTH)
    twice = {"fprop": 2 * flops, "dgrad": flops, "wgrad": flops}
    counter = count(model, torch.randn(TOKENS, WIDTH, requires_grad=True))
    assert sum(counter.others.values()) == 4 * flops
    assert_counted(counter, {"layer": twice}, counter.others, recomputed=2 * flops)

    members = {"block": tower(WIDTH, 32, WIDTH), "head": nn.Linear(WIDTH, 4)}
    model = low_bit(Applied(lambda self, x: self.head(checkpoint(self.block, x, use_reentrant=reentrant)), **members))
    layers = {"block.0": twice, "block.2": twice, "head": layer(TOKENS, WIDTH, 4)}
    assert_counted(count(model, torch.randn(TOKENS, WIDTH, requires_grad=True)), layers, {}, recomputed=2 * flops)


@each("whole", ["function", "in place", "module"], fast=1)
def test_compiled(whole):
    """Compiled modules, and a function that calls them, count as they do otherwise, and say nothing about hooks."""
    x, graphs = torch.randn(TOKENS, WIDTH), []
    model = low_bit(nn.Sequential(tower(WIDTH, 8), nn.Tanh(), nn.Linear(4, 2)), skip=["2"])
    eager = count(model, x)

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    if whole == "in place":
        model.compile(backend=backend)
    called = {"module": model, "in place": None, "function": lambda x: model(x)}[whole]
    compiled = model if called is None else torch.compile(called, backend=backend)
    counted = model if whole == "function" else compiled
    with warnings.catch_warnings(record=True) as caught, GemmCounter(counted) as counter:
        backward(compiled(x))
    assert not caught, [str(warning.message) for warning in caught]
    assert counter.gemms == eager.gemms
    assert counter.others == eager.others
    assert not graphs, "which module computes is not known in compiled code"
    backward(compiled(x))
    assert graphs, "the model was left as eager code for good"


@pytest.mark.usefixtures("compiler")
@pytest.mark.slow
def test_casts_are_compiled_after_the_count():
    """What torch.compile once ran as eager code stays eager code; the casts of a run must not be among it."""
    x = torch.randn(TOKENS, WIDTH)
    model = low_bit(tower(WIDTH, 8))
    counters.clear()
    with compilation.backend("compiled"):
        with GemmCounter(model):
            backward(model(x))
        assert not counters["frames"]
        backward(model(x))
    assert counters["frames"]["ok"] > 0 and counters["frames"]["ok"] == counters["frames"]["total"]


# --- the counter ------------------------------------------------------------------------------------------------------


def traces(model):
    """Everything by which a counter could stay behind."""
    own = [len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules()]
    everywhere = [len(getattr(module_globals, name)) for name in vars(module_globals) if name.endswith("_hooks")]
    return own, everywhere, list(_get_current_dispatch_mode_stack()), list(warnings.filters)


@each("where", ["nowhere", "forward", "backward"])
def test_leaves_nothing_behind(where):
    """Nor after an exception, after which it counts as before."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            if where == "forward":
                raise RuntimeError("broken forward")
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            raise RuntimeError("broken backward")

    fails = nn.Identity() if where == "nowhere" else Applied(lambda self, x: Fails.apply(x))
    model = low_bit(nn.Sequential(nn.Linear(WIDTH, 8), fails, nn.Linear(8, 4)))
    before = traces(model)
    with nullcontext() if where == "nowhere" else pytest.raises(RuntimeError, match=f"broken {where}"):
        count(model, torch.randn(TOKENS, WIDTH))
    assert traces(model) == before
    model[1] = nn.Identity()
    layers = {"0": layer(TOKENS, WIDTH, 8, ["dgrad"]), "2": layer(TOKENS, 8, 4)}
    assert_counted(count(model, torch.randn(TOKENS, WIDTH)), layers, {})


def test_an_exception_that_the_model_catches():
    def forward(self, x):
        try:
            return self.fails(x)
        except RuntimeError:
            return x @ self.w

    def fail(self, x):
        raise RuntimeError("broken")

    model = Applied(forward, fails=Applied(fail), w=nn.Parameter(torch.randn(WIDTH, 4)))
    with GemmCounter(model) as counter:
        backward(model(torch.randn(TOKENS, WIDTH)))
    assert dict(counter.others) == {"": 2 * gemm(TOKENS, 4, WIDTH)}


@each("changes", [{}, {"hadamard": ALL_ROTATED, "subtract_mean": ALL_MEANS}])
@each("dtype", [torch.float32, torch.bfloat16])
def test_changes_no_result(dtype, changes):
    """Outputs and gradients are the same to the bit: random rounding, dropout and activations with kernels of their own
    (of which torch's own counter makes many operations, with a rounding each) included."""
    casts = NVFP4.replace(**changes)

    def run(counting):
        torch.manual_seed(0)
        encoder = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.1, batch_first=True)
        activations = (nn.SiLU(), nn.GELU("tanh"), nn.Mish(), nn.Hardswish(), nn.LayerNorm(WIDTH), nn.Softplus())
        model = low_bit(nn.Sequential(encoder, *activations, nn.LogSoftmax(-1), nn.Linear(WIDTH, 4)).to(dtype), casts)
        x = torch.randn(2, TOKENS, WIDTH, dtype=dtype, requires_grad=True)
        with GemmCounter(model) if counting else nullcontext():
            output = model(x)
            backward(output)
        assert x.grad is not None
        return [output.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]

    for found, expected in zip(run(True), run(False), strict=True):
        assert torch.equal(found, expected)
