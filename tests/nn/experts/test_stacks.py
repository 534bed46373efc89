"""Stacks of linear layers: each expert is quantized as a layer of its own."""

import copy
import pickle
from itertools import product

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lightning_lowbit import LinearCasts, bake, convert
from lightning_lowbit.kernels.cpu.gemms import instructions
from lightning_lowbit.nn import AmaxHistories, GroupedLinear, LayerKeys, set_blend, set_phase
from lightning_lowbit.nn.casts.traits import GEMMS
from lightning_lowbit.nn.core.saving import SAVES
from lightning_lowbit.nn.core.watch import Watch
from lightning_lowbit.nn.native.devices import declared
from tests.nn.experts.stacks import ENDS, EXPERTS, INNER, OUT, ROWS, converted, inputs, loop, run_loop, stack
from tests.nn.experts.stacks import run_stack as run
from tests.nn.layers import identical
from tests.operations import Operations

NVFP4 = LinearCasts.preset("nvfp4")
PRESETS = ("fp8-row", "fp8-blockwise", "nvfp4-nvidia", "mxfp4", "mxfp4-rht", "ternary", "int8", "quartet2")
CASTS = {
    "nvfp4": NVFP4,
    "fp8-current": LinearCasts.preset("fp8-current"),
    **{name: LinearCasts.preset(name) for name in PRESETS},
    "means": NVFP4.replace(subtract_mean=GEMMS),
    "surrogates": NVFP4.replace(surrogate={"fprop_x": "trust", "fprop_w": "dge"}),
}


@pytest.mark.fast("nvfp4", "nvfp4-nvidia", "fp8-current")
@pytest.mark.parametrize("name", CASTS)
def test_each_expert_equals_a_linear_layer_of_its_own(name):
    packs = CASTS[name].traits.coded is not None
    for autocast, save in product((False, True), SAVES if packs else SAVES[:1]):
        together, apart = converted(CASTS[name], bias=autocast, save=save)
        x, g = inputs()
        identical(run(together, x, g, autocast=autocast), run_loop(apart, x, g, autocast=autocast))


@pytest.mark.skipif(instructions() is None, reason="the C++ kernels cannot be built")
def test_gemms_of_codes_are_one_call_for_all_experts(within):
    within(declared("cpu", {"cpu"}))
    for name in ("nvfp4", "nvfp4-nvidia", "mxfp4-rht", "nvfp4-row"):
        layer, _ = converted(name)
        with Operations() as operations:
            run(layer, *inputs())
        assert operations.counts["multiply_codes"] == 3, name


def test_a_stack_that_is_not_converted_is_a_loop_of_linear_layers():
    x, g = inputs()
    for autocast in (False, True):
        layer = stack()
        expected = run_loop(loop(layer), x, g, autocast=autocast)
        identical(run(layer, x, g, autocast=autocast), expected)
        identical(run(convert(layer, "bf16"), x, g, autocast=autocast), expected)


def test_results_of_an_expert_do_not_depend_on_the_rows_of_others():
    layer, _ = converted("nvfp4")
    x, g = inputs()
    start, end = ENDS[1], ENDS[2]  # of the third expert
    whole = run(layer, x, g)
    alone = run(converted("nvfp4")[0], x[start:end], g[start:end], [0, 0, *[end - start] * 3])
    for name in ("y", "x"):
        assert torch.equal(whole[name][start:end], alone[name])
    for name in ("weight", "bias"):
        assert torch.equal(whole[name][2], alone[name][2])
        assert not alone[name][[0, 1, 3, 4]].any()


def test_no_rows_at_all_give_gradients_of_zero():
    for casts in ("bf16", "nvfp4", "fp8-delayed"):
        layer, _ = converted(casts)
        found = run(layer, *inputs(0), [0] * EXPERTS)
        assert found["y"].shape == (0, OUT)
        assert not found["weight"].any() and not found["bias"].any()


def test_offsets_that_fit_neither_rows_nor_experts_are_refused():
    x, _ = inputs()
    for layer in (stack(), converted("nvfp4")[0]):
        for wrong in ([7, 7], [7, 3, 40, 41, 77], [7, 7, 40, 41, ROWS + 1], [-1, 7, 40, 41, 77]):
            with pytest.raises(ValueError, match="5 ascending numbers of at most 80"):
                layer(x, wrong)


def test_smoothing_is_refused():
    with pytest.raises(ValueError, match="Leave the stacks out by skip"):
        convert(stack(), LinearCasts.preset("fp8-current").replace(smooth="channel"))


def test_activation_checkpoints_draw_the_same_bits():
    layer, _ = converted("nvfp4")
    x, g = inputs()
    expected = run(layer, x, g)
    for reentrant in (False, True):
        convert(layer, "nvfp4")
        LayerKeys(layer, seed=1).fill_(3)
        again = x.clone().requires_grad_()
        y = checkpoint(layer, again, ENDS, use_reentrant=reentrant)
        layer.zero_grad()
        y.backward(g)
        identical(
            {"y": y.detach(), "x": again.grad, "w": layer.weight.grad},
            {"y": expected["y"], "x": expected["x"], "w": expected["weight"]},
        )


def test_another_draw_of_the_backward_pass_has_other_bits():
    layer = convert(stack(), "nvfp4")
    keys = LayerKeys(layer)
    keys.expect_draws(True)
    keys.fill_(0)
    x, g = inputs()
    y = layer(x, ENDS)
    draws = []
    for number in range(2):
        keys.draw_again_(number)
        draws.append(torch.autograd.grad(y, layer.weight, g, retain_graph=True)[0])
    changed = [not torch.equal(*pair) for pair in zip(*draws, strict=True)]
    assert changed == [True, False, True, True, True]  # the second expert has no rows


def test_copies_and_pickles_compute_the_same():
    layer, _ = converted("nvfp4")
    expected = run(layer, *inputs())
    for again in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        LayerKeys(again, seed=1).fill_(3)
        assert type(again) is type(layer)
        identical(run(again, *inputs()), expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # from Dynamo
def test_compiled_layers_break_the_graph_once_and_compute_the_same():
    class Network(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.experts = torch.nn.Linear(INNER, INNER), convert(stack(), "nvfp4")

        def forward(self, x, ends):
            return self.experts(self.first(x).relu(), ends).square()

    torch.manual_seed(0)
    model = Network()
    LayerKeys(model).fill_(0)
    x, ends = inputs()[0], torch.tensor(ENDS)
    expected = model(x, ends)
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    LayerKeys(model).fill_(0)
    assert torch.equal(torch.compile(model, backend=count)(x, ends), expected)
    assert len(graphs) == 2


def test_phases_annealing_and_exact_gemms_reach_every_expert():
    for prepare, kwargs in (
        (lambda model: set_phase(model, "qaf"), {}),
        (lambda model: set_blend(model, 0.5), {}),
        (lambda _: None, {"exact": True}),
    ):
        together, apart = converted("nvfp4", **kwargs)
        prepare(together), prepare(apart)
        identical(run(together, *inputs()), run_loop(apart, *inputs()))


def test_one_history_holds_the_amaxes_of_all_experts():
    layer = convert(stack(), "fp8-delayed")
    histories = AmaxHistories(layer)
    x, g = inputs()
    run(layer, x, g)
    histories.advance_()
    found = histories.state_dict()["amax_history"]
    assert found["/fprop_x"][-1] == x[: ENDS[-1]].abs().max()
    assert found["/dgrad_g"][-1] == g[: ENDS[-1]].abs().max()
    with_rows = layer.weight[[0, 2, 3, 4]]
    assert found["/fprop_w"][-1] == with_rows.abs().max()


def test_measurements_are_sums_over_the_experts():
    for what in ("operand_sums", "gradient_sums"):
        together, apart = converted("nvfp4")
        watches = [Watch({"": together}, what), Watch({str(i): layer for i, layer in enumerate(apart)}, what)]
        for watch in watches:
            watch.start(torch.device("cpu"))
        run(together, *inputs()), run_loop(apart, *inputs())
        whole, parts = (watch.sums for watch in watches)
        added = slice(0, 5) if what == "operand_sums" else slice(None)
        assert whole[..., added].any()
        torch.testing.assert_close(whole[0][..., added], parts.sum(0)[..., added])


def test_baked_stacks_compute_the_same():
    casts = LinearCasts(fprop_w=LinearCasts.preset("nvfp4").fprop_w)
    layer = convert(stack(), casts)
    x = inputs()[0]
    expected, latent = layer(x, ENDS), layer.weight.detach().clone()
    assert type(bake(layer)) is GroupedLinear
    assert not torch.equal(layer.weight, latent)
    torch.testing.assert_close(layer(x, ENDS), expected, rtol=1e-5, atol=1e-5)


def test_frozen_stacks_have_no_gradients_of_their_own():
    together, apart = converted("nvfp4")
    together.requires_grad_(False), apart.requires_grad_(False)
    x, g = inputs()
    identical(run(together, x, g), run_loop(apart, x, g))
    assert together.weight.grad is None


def test_a_backward_pass_may_run_under_any_autocast():
    layer = convert(GroupedLinear(3, 32, 16).half(), "nvfp4")
    LayerKeys(layer).fill_(0)
    x = torch.randn(20, 32, dtype=torch.half, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        layer(x, [5, 5, 15]).float().square().sum().backward()
    assert x.grad.dtype == layer.weight.grad.dtype == torch.half
    assert not x.grad[15:].any() and not layer.weight.grad[1].any(), "rows and experts that have no part"
