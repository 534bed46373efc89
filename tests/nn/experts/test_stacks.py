"""Stacks of linear layers: each expert is quantized as a layer of its own, and grouped GEMMs multiply all of them at
once, as the products one after the other do up to roundings."""

import warnings
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_lowbit import FP4Precision, FP8Precision, LinearCasts, LowBitPrecision, convert
from lightning_lowbit.callbacks.layer_table import native_notes
from lightning_lowbit.kernels.cpu.gemms import instructions
from lightning_lowbit.nn import AmaxHistories, GemmCounter, GroupedLinear, LayerKeys, set_blend, set_phase
from lightning_lowbit.nn.casts.traits import GEMMS
from lightning_lowbit.nn.core.saving import SAVES
from lightning_lowbit.nn.core.watch import Watch
from lightning_lowbit.nn.native.devices import declared
from lightning_lowbit.nn.native.grouped import has_grouped_gemm
from tests.nn.experts.models import logits, tiny
from tests.nn.experts.stacks import ENDS, EXPERTS, INNER, OUT, ROWS, converted, inputs, loop, run_loop, stack
from tests.nn.experts.stacks import run_stack as run
from tests.nn.experts.test_transformers import STACK, Model
from tests.nn.layers import identical
from tests.operations import Operations
from tests.precision.regression_model import fitted
from tests.tables import each

CPU = torch.device("cpu")
NVFP4 = LinearCasts.preset("nvfp4")
PRESETS = ("nvfp4", "nvfp4-nvidia", "fp8-row", "fp8-current", "mxfp4-rht", "int8", "ternary")
CASTS = {
    **{name: LinearCasts.preset(name) for name in (*PRESETS, "fp8-blockwise", "mxfp4", "quartet2")},
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


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # from Dynamo
def test_compiled_layers_break_the_graph_once_and_compute_the_same(compiler):
    model = nn.ModuleDict({"first": nn.Linear(INNER, INNER), "experts": convert(stack(), "nvfp4")})

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
            watch.start(CPU)
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


# --- grouped GEMMs ----------------------------------------------------------------------------------------------------

GROUPED = (*PRESETS, "nvfp4-row", "mxfp8")
WEIGHTS_ALONE = LinearCasts(fprop_w=LinearCasts.preset("int4").fprop_w, dgrad_w="fprop")
PRODUCTS = ("mm", "addmm", "_grouped_mm", "_scaled_mm", "_int_mm", "multiply_codes")
POWERS = [{"preset": f"fp8-{of}", "every": {"scale": {"rounding": "power_of_two"}}} for of in ("row", "current")]


def both(casts, save="inputs", change=lambda layer: None, data=None):
    """Results of a stack one expert after the other, and by grouped GEMMs."""
    results = []
    for grouped in ("auto", "native"):
        layer, _ = converted(LinearCasts.of(casts), save=save)
        layer.lowbit.grouped = grouped
        change(layer)
        results.append(run(layer, *(data or inputs()), autocast=True))
    return results


@each("casts", ["mxfp8", "mxfp4", "mxfp6", "int8", *POWERS])
def test_sums_that_bfloat16_holds_are_equal_to_the_bit(casts):
    generator = torch.Generator().manual_seed(2)

    def small(*shape):
        return torch.randint(-1, 2, shape, generator=generator).float()

    def change(layer):
        with torch.no_grad():
            layer.weight.copy_(weight), layer.bias.copy_(bias)

    weight, bias, data = small(EXPERTS, OUT, INNER), small(EXPERTS, OUT), (small(80, INNER), small(80, OUT))
    identical(*both(casts, change=change, data=data))


@each("casts", [*GROUPED, WEIGHTS_ALONE, {"preset": "fp8-blockwise", "every": {"round_to_bfloat16": True}}])
def test_random_products_differ_by_two_roundings_at_most(casts):
    expected, results = both(casts)
    for name, tensor in results.items():
        error = (tensor.float() - expected[name].float()).norm() / expected[name].float().norm()
        assert error < 2**-8, f"{name}: {error}"


@each("casts", GROUPED)
def test_saved_codes_give_the_bits_of_saved_inputs(casts):
    identical(*(both(casts, save=save)[1] for save in ("inputs", "codes")))


def products(layer):
    with Operations() as operations:
        run(layer, *inputs(), autocast=True)
    return {name: count for name, count in operations.counts.items() if name in PRODUCTS}


def test_each_gemm_is_one_call_unless_operands_are_annealed():
    for casts in ("nvfp4", "mxfp8", "fp8-row", "int8"):
        layer, _ = converted(casts, bias=False)
        layer.lowbit.grouped = "native"
        assert products(layer) == {"_grouped_mm": 3}, casts
    set_blend(layer, 0.5)
    assert "_grouped_mm" not in products(layer)


def test_sizes_of_any_number_are_padded():
    for inner, out in ((20, 13), (7, 1), (1, 9)):
        generator, results = torch.Generator().manual_seed(0), []
        x, g, w = (
            torch.randint(-1, 2, shape, generator=generator) for shape in ((37, inner), (37, out), (4, out, inner))
        )
        for grouped in ("auto", "native"):
            layer = convert(GroupedLinear(4, inner, out, bias=False), "mxfp8", grouped=grouped)
            layer.weight.data.copy_(w)
            results.append(run(layer, x.float(), g.float(), [3, 3, 20, 33], autocast=True))
        identical(*results)


def test_experts_without_rows_have_gradients_of_zero_whatever_the_gemm_leaves_there(monkeypatch):
    product = F.grouped_mm

    def leaving(left, right, *, offs):
        result = product(left, right, offs=offs)
        if result.dim() == 3:
            result[1] = float("nan")  # of the expert without rows
        return result

    assert ENDS[0] == ENDS[1] and has_grouped_gemm(CPU)
    monkeypatch.setattr(F, "grouped_mm", leaving)
    _, results = both("nvfp4")
    assert not results["weight"][1].any()


def test_a_grouped_gemm_that_is_wrong_is_left_with_one_warning(monkeypatch):
    product = F.grouped_mm
    faults = {
        "gives other results": lambda left, right, *, offs: product(left, right, offs=offs) + 1,
        "fails .RuntimeError: no kernel": lambda *_, **__: (_ for _ in ()).throw(RuntimeError("no kernel")),
    }
    expected, _ = both("mxfp8")
    for text, fault in faults.items():
        has_grouped_gemm.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(F, "grouped_mm", fault)
            with pytest.warns(UserWarning, match=text.replace("RuntimeError: ", "")):
                _, results = both("mxfp8")
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                identical(both("mxfp8")[1], results)
        identical(results, expected)
    has_grouped_gemm.cache_clear()


@each(
    "kwargs, text",
    [
        ({"grouped": "loop"}, "Unknown grouped 'loop'"),
        ({"grouped": "auto", "casts": {"preset": "fp8-current", "smooth": "channel"}}, "leave them out by skip"),
        ({"exact": True}, "in bfloat16, and exact=True does not"),
        ({"casts": "fp8-row", "backend": "native"}, "backend='native' does not: choose one"),
        ({"casts": "fp8-blockwise"}, "fprop_x are not exact in bfloat16.*round_to_bfloat16"),
        ({"casts": "fp8-delayed"}, "delayed scaling"),
        ({"casts": {"preset": "nvfp4", "subtract_mean": ["fprop"]}}, r"means that are subtracted .*\(fprop\)"),
        ({"casts": {"preset": "nvfp4", "surrogate": {"fprop_x": "trust"}}}, r"surrogate gradients .*\(fprop_x\)"),
        ({"casts": "quartet2"}, "quantized again"),
        ({"model": nn.Sequential(nn.Linear(16, 16))}, "none is among the layers"),
    ],
)
def test_what_cannot_be_honored_is_refused(kwargs, text):
    arguments = {"model": nn.Sequential(GroupedLinear(2, 16, 16)), "casts": "nvfp4", "grouped": "native", **kwargs}
    with pytest.raises(ValueError, match=text):
        convert(**arguments)


def test_passes_in_other_dtypes_and_on_devices_without_a_kernel_are_refused():
    layer = convert(GroupedLinear(2, 16, 16), "nvfp4", grouped="native")
    LayerKeys(layer).fill_(0)
    with pytest.raises(ValueError, match="multiply in bfloat16, and layers compute in torch.float32: train in bf16"):
        layer(torch.randn(4, 16), [2, 4])
    with pytest.raises(ValueError, match="was not tried on 'mps', or leave grouped out"):
        layer.is_grouped(torch.device("mps"))


def test_measurements_are_those_of_experts_one_by_one():
    for what, casts in (("operand_sums", "mxfp8"), ("gradient_sums", "mxfp8"), ("operand_sums", "fp8-current")):
        sums = []

        def measured(layer, sums=sums, what=what):
            watch = Watch({"": layer}, what)
            watch.start(CPU)
            sums.append(watch)

        both(casts, change=measured)
        torch.testing.assert_close(sums[0].sums, sums[1].sums, rtol=1e-4, atol=1e-4)
        assert sums[1].sums.any()


def test_notes_of_summaries_say_which_gemm_serves():
    model = nn.Sequential(GroupedLinear(2, 16, 16))
    convert(model, "mxfp8", grouped="native")
    texts = [str(note) for note in native_notes(model, torch.bfloat16)]
    assert len(texts) == 1 and "fprop, dgrad, wgrad of mxfp8: one grouped GEMM in bfloat16 for all experts" in texts[0]


@each("name", ["mixtral", "olmoe", "gpt_oss"])
def test_experts_of_transformers_have_gradients_and_flops_of_the_loop(name):
    gradients, flops = [], []
    for grouped in ("auto", "native"):
        has_grouped_gemm.cache_clear()  # its trial counts for nothing
        model = convert(tiny(name, intermediate_size=36), "mxfp8", only=["experts"], grouped=grouped)
        LayerKeys(model).fill_(0)
        with GemmCounter(model) as counter, torch.autocast("cpu", torch.bfloat16):
            logits(model).float().square().mean().backward()
        flops.append({key: number for key, number in counter.gemms.items() if "experts" in key[0]})
        gradients.append({n: p.grad.float() for n, p in model.named_parameters() if p.dim() == 3})
    assert flops[0] == flops[1] and len(flops[0]) == 12
    for key, expected in gradients[0].items():
        assert (gradients[1][key] - expected).norm() <= 2**-5 * expected.norm(), key


def test_runs_train_and_their_checkpoints_tell_it(tmp_path):
    losses = {}
    for grouped in ("auto", "native"):
        model = Model()
        plugin = FP4Precision("nvfp4", compute_dtype="bf16", grouped=grouped)
        fitted(plugin, model, limit_train_batches=4, max_steps=4).save_checkpoint(tmp_path / f"{grouped}.ckpt")
        losses[grouped] = torch.tensor(model.losses)
        again = LowBitPrecision.from_checkpoint(tmp_path / f"{grouped}.ckpt")
        assert again.grouped == grouped
    torch.testing.assert_close(losses["native"], losses["auto"], rtol=1e-2, atol=0)
    assert not torch.equal(losses["native"], losses["auto"]), "the option changed nothing"


def test_plugins_refuse_what_layers_would_before_it_is_in_force():
    with pytest.raises(ValueError, match="exact=True does not"):
        FP8Precision("row", exact=True, grouped="native")
    with pytest.raises(ValueError, match="train in bf16"):
        fitted(FP4Precision("nvfp4", compute_dtype="fp32", grouped="native"), Model(), max_steps=1)
    fitted(plugin := FP8Precision("row", grouped="native", compute_dtype="bf16"), Model(), max_steps=1)
    before = plugin.casts_of(STACK)
    with pytest.raises(ValueError, match="grouped='native' does not serve the casts of .* not exact in bfloat16"):
        plugin.set_casts({STACK: "fp8-blockwise"})
    assert plugin.casts_of(STACK) == before
