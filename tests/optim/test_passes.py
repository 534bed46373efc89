"""The passes in C++ against those in plain torch, whatever the options; and which of them is chosen."""

import math

import pytest
import torch
from torch.nn import Parameter

from lightning_lowbit.compilation import backend
from lightning_lowbit.kernels.cpu.library import library
from lightning_lowbit.optim import SPAM, Adaptive, LowBitAdamW, StableSPAM, kernels
from lightning_lowbit.optim.adam import ClippedAdam
from lightning_lowbit.optim.rules import spikes_clipped_after
from tests.optim.moments.helpers import heavy_tailed
from tests.optim.parameters import assert_same, make_parameters, set_gradients, snapshot, train, use
from tests.tables import each

# Rows that end within a block of 128, and a tensor of more than one chunk of 2^14 elements.
SHAPES = [(), (0, 3), (300,), (5, 6), (2, 3, 130), (130, 129)]

needs_cpp = pytest.mark.skipif(library() is None, reason="the C++ kernels cannot be built here")


@pytest.fixture(autouse=True)
def _early():
    with spikes_clipped_after(2):
        yield


def run(make, code, dtype):
    """Eight steps with a reset and a skipped step; parameters, optimizer, and all statistics on the way."""
    with use(code):
        parameters = make_parameters(dtype, SHAPES)
        optimizer = make(parameters)
        seen = []
        for step in range(8):
            set_gradients(parameters, seed=step)
            if step == 5:
                parameters[-1].grad[3] = float("nan")
            optimizer.step()
            seen += [value for row in optimizer.gradient_statistics().values() for value in row]
    return parameters, optimizer, seen


def assert_near(found, wanted, tolerance, what, others=0):
    """All but ``others`` elements are within ``tolerance`` of the largest one."""
    found, wanted = found.detach().double(), wanted.detach().double()
    assert torch.equal(found.isnan(), wanted.isnan()), f"{what}: {found} {wanted}"
    error = (found - wanted).nan_to_num(0.0).abs() / wanted.nan_to_num(0.0).abs().amax().clamp(min=1e-30)
    assert (error > tolerance).sum() <= others, f"{what}: {error.max():.1e} off at {error.argmax()}"


@needs_cpp
@pytest.mark.pairwise(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("moments", ["fp32", "fp8", "half of them"])
@pytest.mark.parametrize("element_clip", ["ada_clip", "spike_clip", None])
@pytest.mark.parametrize("norm_clip", ["ada_gn", "grad_clip", None])
@pytest.mark.parametrize("master_weights", [None, "fp16"])
@pytest.mark.parametrize(
    "others", [{}, {"weight_decay": 0.1, "reset_interval": 3, "maximize": True}], ids=["", "decay, resets, ascent"]
)
def test_trajectories_are_those_of_plain_torch(dtype, moments, element_clip, norm_clip, master_weights, others):
    """To 1e-6 of the largest element, and 2e-6 of squares.

    Of FP8, one code in a thousand may lie on the other side of a draw, and its parameter be moved by another moment.
    """
    options = {"lr": 1e-2, "spike_threshold": 2.0, "warmup_steps": 2, "element_clip": element_clip, **others}
    if moments == "half of them":
        options |= {"density": 0.5}
    else:
        options |= {"moments": moments, "norm_clip": norm_clip}
        options |= {"master_weights": None if dtype == torch.float32 else master_weights}
    runs = [run(lambda p: ClippedAdam(p, **options), code, dtype) for code in ("C++", "torch")]
    (parameters, optimizer, seen), (twins, twin, wanted) = runs
    for index, (found, expected) in enumerate(zip(seen, wanted, strict=True)):
        assert_near(found, expected, 1e-6, f"statistic {index}")
    # A last place of fp32 may be one of 16 bits.
    place = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype]
    for p, q in zip(parameters, twins, strict=True):
        state, expected = optimizer.state[p], twin.state[q]
        assert state.keys() == expected.keys()
        drawn = max(1.0, p.numel() / 1000) if "mean_scale" in state else 0
        for name, value in state.items():
            what, other = f"{name} of {tuple(p.shape)}", expected[name]
            assert value.dtype == other.dtype and value.shape == other.shape, what
            if value.dtype == torch.uint8:
                assert (value != other).sum() <= drawn, f"{what}: {(value != other).sum()} codes differ"
            elif value.numel() and name != "master":
                assert_near(value, other, 2e-6 if "square" in name else 1e-6, what)
        if p.numel():
            assert_near(p, q, place, f"parameter of {tuple(p.shape)}", drawn)
        if p.numel() > 1000 and dtype != torch.float32:
            differ = (p != q).double().mean().item()
            assert differ < 1e-2, f"{differ:.1%} of the elements were rounded to another number"


def assert_same_codes(gradients, steps):
    """β = 0 keeps a gradient and its square as they are."""
    runs = []
    for code in ("C++", "torch"):
        with use(code):
            parameters = [Parameter(torch.zeros_like(gradient)) for gradient in gradients]
            optimizer = LowBitAdamW(parameters, betas=(0.0, 0.0))
            for _ in range(steps):
                for p, gradient in zip(parameters, gradients, strict=True):
                    p.grad = gradient.clone()
                optimizer.step()
        runs.append([optimizer.state[p][name] for p in parameters for name in optimizer.state[p] if "mean" in name])
    assert_same(*runs, "moments in C++ differ")


@needs_cpp
@each("scale", [1e-30, 1e-4, 1.0, 1e8])
def test_fp8_codes_of_equal_moments_are_equal(scale):
    """Over nine orders of magnitude."""
    assert_same_codes([heavy_tailed(shape) * scale for shape in SHAPES], steps=3)


@needs_cpp
def test_fp8_codes_are_equal_where_a_draw_hardly_decides():
    """Of two million moments some thirty are, with their draws, within a few last places of the middle of two codes."""
    assert_same_codes([torch.randn(512, 2048)], steps=1)


@needs_cpp
@each("code", ["C++", "torch"])
@each("rule", ["ada_clip", "spike_clip"])
@each("size", [1.0, 1e-20])
def test_without_a_rule_for_norms_the_update_counts_and_measures(size, rule, code):
    """As the pass before it does where a rule needs norms; here one that changes nothing, or none."""
    with use(code), pytest.MonkeyPatch.context() as patch:
        runs = []
        for norm_clip in ("grad_clip", None):
            if norm_clip is None:
                for passes in (kernels.CppPasses, kernels.Passes):
                    patch.setattr(passes, "squares", None)
            parameters, saw, options = make_parameters(shapes=SHAPES), [], {"spike_threshold": 2.0, "max_norm": 1e9}
            optimizer = ClippedAdam(parameters, element_clip=rule, norm_clip=norm_clip, **options)
            for step in range(5):
                set_gradients(parameters, seed=step)
                for p in parameters:
                    p.grad *= math.nan if step == 3 else size
                optimizer.step()
                saw += [torch.stack(column) for column in zip(*optimizer.gradient_statistics().values(), strict=True)]
            runs.append(saw)
    assert any(column.sum() > 0 for column in runs[0][2::6]), "nothing was clipped"
    for index, (found, wanted) in enumerate(zip(*runs, strict=True)):
        assert_near(found, wanted, 1e-6, f"column {index}")


OPTIMIZERS = {
    "StableSPAM": lambda p: StableSPAM(p, reset_interval=4),
    "SPAM": lambda p: SPAM(p, spike_threshold=2.0, density=0.5),
    "FP8": lambda p: StableSPAM(p, moments="fp8", element_clip="spike_clip", spike_threshold=2.0),
    "Adaptive": lambda p: Adaptive(torch.optim.SGD(p, lr=0.1)),
}


@needs_cpp
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_number_of_threads_changes_no_bit(make):
    before, runs = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            parameters, optimizer, seen = run(make, "C++", torch.float32)
            runs.append([*snapshot(optimizer, parameters), *(value.nan_to_num(-1) for value in seen)])
    finally:
        torch.set_num_threads(before)
    assert_same(runs[0], runs[1], "two threads")
    assert_same(runs[0], runs[2], "four threads")


# --- what is remembered from step to step ---


def moved(optimizer, parameters):
    """Everything lies elsewhere, with other numbers."""
    for p in parameters:
        p.data = p.detach() * 2
        for name, value in optimizer.state[p].items():
            optimizer.state[p][name] = value.clone()


def moved_within(optimizer, parameters):
    """The same tensors, whose memory is elsewhere."""
    for p in parameters:
        p.data = p.detach() * 2
        for value in optimizer.state[p].values():
            value.data = value.clone()


@needs_cpp
@each("change", [moved, moved_within, lambda optimizer, parameters: setattr(parameters[1], "grad", None)])
def test_what_changes_between_steps_is_seen(change):
    """With the old memory freed and overwritten, results are those of a step that remembers nothing."""
    runs = []
    for remembers in (True, False):
        parameters = make_parameters(shapes=SHAPES)
        optimizer = StableSPAM(parameters, moments="fp8")
        for step in range(4):
            set_gradients(parameters, seed=step)
            if step == 2:
                change(optimizer, parameters)
            if not remembers:
                optimizer._memory.clear()
            optimizer.step()
        runs.append(snapshot(optimizer, parameters))
    assert_same(runs[0], runs[1], "a remembered address or shape was used")


@needs_cpp
@each("name, shape", [("mean", (6, 5)), ("mean_square_scale", (5, 2))])
def test_a_state_of_another_shape_is_refused_after_steps(name, shape):
    parameter = Parameter(torch.ones(5, 6))
    optimizer = StableSPAM([parameter], moments="fp8")
    train(optimizer, [parameter], range(2))
    optimizer.state[parameter][name].resize_(shape)
    set_gradients([parameter], seed=2)
    with pytest.raises(ValueError, match="The state of a parameter of"):
        optimizer.step()


# --- which passes ---


def chosen(parameter, **options):
    made = Parameter(parameter)
    optimizer = StableSPAM([made], **options)
    made.grad = torch.ones_like(made)
    [batch] = optimizer._batches()
    return type(batch.passes)


@needs_cpp
def test_cpp_serves_what_trains_on_a_cpu():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for moments in ("fp32", "fp8"):
            assert chosen(torch.ones(3, 4, dtype=dtype), moments=moments) is kernels.CppPasses, f"{dtype}, {moments}"


def test_plain_torch_serves_all_else(monkeypatch):
    cases = {
        "float64": torch.ones(3, 4, dtype=torch.float64),
        "a transposed parameter": torch.ones(3, 4).t(),
        "channels last": torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "another device": torch.ones(3, 4, device="meta"),
    }
    for name, parameter in cases.items():
        assert chosen(parameter) is kernels.Passes, f"{name} runs in C++"
    with backend("eager"):
        assert chosen(torch.ones(3, 4)) is kernels.Passes, "plain code was asked for"
    monkeypatch.setattr(kernels, "library", lambda: None)
    assert chosen(torch.ones(3, 4)) is kernels.Passes, "there is no library"


@needs_cpp
@pytest.mark.parametrize("default", [torch.float64, "meta"], ids=str)
def test_torch_s_defaults_do_not_matter(default):
    """What the passes make for themselves has a dtype and a device of its own."""
    runs = []
    for changed in (False, True):
        parameters = make_parameters(shapes=SHAPES)
        optimizer = StableSPAM(parameters, moments="fp8")
        train(optimizer, parameters, range(1))
        set_gradients(parameters, seed=1)
        try:
            if changed:
                (torch.set_default_device if default == "meta" else torch.set_default_dtype)(default)
            optimizer.step()
        finally:
            torch.set_default_device(None)
            torch.set_default_dtype(torch.float32)
        runs.append(snapshot(optimizer, parameters))
    assert_same(runs[0], runs[1], f"a default of {default} changed the step")


def test_autograd_refuses_a_graph_from_before_the_step():
    for name in ("eager", "cpp"):
        parameter = torch.nn.Parameter(torch.ones(40))
        optimizer = StableSPAM([parameter], lr=1e-2)
        loss = parameter.square().sum()
        parameter.grad = torch.ones(40)
        with backend(name):
            optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
