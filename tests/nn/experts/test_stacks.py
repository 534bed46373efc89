"""Stacks of linear layers: each expert is quantized as a layer of its own."""

from itertools import product

import pytest
import torch

from lightning_lowbit import LinearCasts, convert
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
        identical(run(layer, x, g, autocast=autocast), run_loop(loop(layer), x, g, autocast=autocast))


def test_no_rows_at_all_give_gradients_of_zero():
    for casts in ("bf16", "nvfp4", "fp8-delayed"):
        layer, _ = converted(casts)
        results = run(layer, *inputs(0), [0] * EXPERTS)
        assert results["y"].shape == (0, OUT)
        assert not results["weight"].any() and not results["bias"].any()


def test_offsets_that_fit_neither_rows_nor_experts_are_refused():
    x, _ = inputs()
    for layer in (stack(), converted("nvfp4")[0]):
        for wrong in ([7, 7], [7, 3, 40, 41, 77], [7, 7, 40, 41, ROWS + 1], [-1, 7, 40, 41, 77]):
            with pytest.raises(ValueError, match="5 ascending numbers of at most 80"):
                layer(x, wrong)


def test_smoothing_is_refused():
    with pytest.raises(ValueError, match="Leave the stacks out by skip"):
        convert(stack(), LinearCasts.preset("fp8-current").replace(smooth="channel"))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # from Dynamo
def test_compiled_layers_break_the_graph_once_and_compute_the_same(compiler):
    model = torch.nn.ModuleDict({"first": torch.nn.Linear(INNER, INNER), "experts": convert(stack(), "nvfp4")})

    def call(x, ends):
        return model["experts"](model["first"](x).relu(), ends).square()

    LayerKeys(model).fill_(0)
    x, ends = inputs()[0], torch.tensor(ENDS)
    expected = call(x, ends)
    assert torch.equal(torch.compile(call, backend=compiler)(x, ends), expected)
    assert compiler.frame_count == 2


def test_phases_annealing_exact_gemms_and_frozen_weights_reach_every_expert():
    for prepare, kwargs in (
        (lambda model: set_phase(model, "qaf"), {}),
        (lambda model: set_blend(model, 0.5), {}),
        (lambda _: None, {"exact": True}),
        (lambda model: model.requires_grad_(False), {}),
    ):
        together, apart = converted("nvfp4", **kwargs)
        prepare(together), prepare(apart)
        identical(run(together, *inputs()), run_loop(apart, *inputs()))
    assert together.weight.grad is None


def test_one_history_holds_the_amaxes_of_all_experts():
    layer = convert(stack(), "fp8-delayed")
    histories = AmaxHistories(layer)
    x, g = inputs()
    run(layer, x, g)
    histories.advance_()
    histories = histories.state_dict()["amax_history"]
    amaxes = {"fprop_x": x[: ENDS[-1]], "fprop_w": layer.weight[[0, 2, 3, 4]], "dgrad_g": g[: ENDS[-1]]}
    assert all(histories[f"/{name}"][-1] == rows.abs().max() for name, rows in amaxes.items()), "of experts with rows"


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


def test_a_backward_pass_may_run_under_any_autocast():
    layer = convert(GroupedLinear(3, 32, 16).half(), "nvfp4")
    LayerKeys(layer).fill_(0)
    x = torch.randn(20, 32, dtype=torch.half, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        layer(x, [5, 5, 15]).float().square().sum().backward()
    assert x.grad.dtype == layer.weight.grad.dtype == torch.half
    assert not x.grad[15:].any() and not layer.weight.grad[1].any(), "rows and experts that have no part"
