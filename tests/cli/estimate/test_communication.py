"""FLOPs and communication that are estimated are those of real steps."""

import pytest
from torch.utils.flop_counter import FlopCounterMode

from lightning_lowbit import FP4Precision, FP8Precision, LowBitPrecision, convert
from lightning_lowbit.cli.lab.estimate.formulas import (
    Assumptions,
    Batch,
    Collective,
    Layout,
    communication,
    flops,
    memory,
    times,
)
from lightning_lowbit.cli.lab.estimate.options import DEVICES
from lightning_lowbit.cli.lab.estimate.shapes import Linear, Model, Weight, arithmetic
from lightning_lowbit.nn.casts import PRESETS, LinearCasts
from lightning_lowbit.nn.casts.traits import GEMMS
from lightning_lowbit.nn.conversion.coverage import GemmCounter
from lightning_lowbit.recipes.models import CausalLM
from tests.cli import ranks_estimate
from tests.cli.estimate.models import BATCH, SMALL, loss_of, shapes
from tests.launch import launch
from tests.pairwise import selected
from tests.tables import each


@each("checkpointing", [False, True])
def test_flops_are_those_that_torch_counts_of_linear_layers_and_the_coverage_of_all(checkpointing):
    module = CausalLM(config=SMALL, gradient_checkpointing=checkpointing)
    with FlopCounterMode(display=False) as counter:
        loss_of(module, enabled=False).backward()
    counted = counter.get_flop_counts()["Global"]
    estimated = flops(shapes("32-true", gradient_checkpointing=checkpointing), BATCH, Layout())
    left_out = 2 * 2 * BATCH.tokens * 64 * 176 if checkpointing else 0  # down projections, which end their blocks
    linear = sum(count for op, count in counted.items() if str(op) in ("aten.mm", "aten.addmm"))
    assert estimated["fp32"] == linear + left_out
    with GemmCounter(convert(module, "fp8-current", skip=["lm_head"])) as counter:
        loss_of(module).backward()
    estimated = flops(shapes(gradient_checkpointing=checkpointing), BATCH, Layout())
    assert counter.coverage().flops == estimated["bf16"] + estimated["attention"]


@each("name", PRESETS)
def test_arithmetic_of_presets(name):
    kinds = {gemm: arithmetic(LinearCasts.preset(name), gemm) for gemm in GEMMS}
    whole = {
        **dict.fromkeys(("nvfp4", "nvfp4-4over6", "nvfp4-nvidia", "quartet2", "mxfp4", "mxfp4-rht"), "fp4"),
        **dict.fromkeys(("mxfp6", "mxfp8"), "mxfp8"),
        **dict.fromkeys(("fp8-delayed", "fp8-current"), "fp8"),
    }
    if name in whole:
        assert set(kinds.values()) == {whole[name]}
    native = {gemm: kind for gemm, kind in LinearCasts.preset(name).native_gemms.items() if kind != "cpu"}
    names = dict.fromkeys(("nvfp4", "mxfp4"), "fp4")
    assert {gemm: kinds[gemm] for gemm in native} == {gemm: names.get(kind, kind) for gemm, kind in native.items()}
    if name in ("bf16", "ufp4"):
        assert set(kinds.values()) == {"bf16"}, "there is no tensor core for it"


@pytest.fixture(scope="module")
def ranks(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return launch("tests.cli.ranks_estimate", ranks_estimate.RANKS, folder, *selected(request, "name"))


NAMES = {"all_reduce": "allreduce_", "all_gather": "_allgather_base_", "reduce_scatter": "_reduce_scatter_base_"}


@pytest.mark.slow  # processes; formulas by hand are below
@pytest.mark.parametrize(
    "name",
    ["ddp stored", "fsdp stored", "fsdp bf16", "fsdp casts", "fsdp casts+bf16", "tensor parallel"]
    + ["tensor parallel again"],
)
def test_two_processes_send_and_keep_what_is_estimated(ranks, name):
    """Bytes of all collectives of a step with two micro-batches, and memory of the first rank, exactly."""
    strategy, gather, *again = name.split()
    batch = Batch(ranks_estimate.SEQUENCES, ranks_estimate.LENGTH, ranks_estimate.MICRO_BATCHES)
    if strategy == "tensor":
        layout, names = Layout(2, "fsdp", 2), {"all_reduce": "all_reduce"}  # of DTensors
        model = shapes(config=ranks_estimate.EVEN, gradient_checkpointing=bool(again))
    else:
        layout, names = Layout(2, strategy, gather=gather), NAMES
        plugin = FP8Precision("current", skip=["lm_head"]) if "casts" in gather else None
        model = shapes(plugin=plugin, config=ranks_estimate.TINY)
    seen = ranks[0][name]
    sent = {names[each.name]: each.payload for each in communication(model, batch, layout)}
    assert seen["sent"] == sent == ranks[1][name]["sent"]
    estimated = memory(model, batch, layout)
    # What FSDP gathers in bf16 it frees itself; else copies in bf16 of the whole model stay. Blocks that compute again
    # have copies one at a time, when the forward pass is over.
    assert ("weights to compute with" in estimated) == ("bf16" not in gather)
    copied = ["weights to compute with"] if "bf16" not in gather and not again else []
    kept = ["parameters", "gradients", "optimizer state", *copied]
    assert {what: seen[what] for what in kept} == {what: estimated[what] for what in kept}


WIDER = {**SMALL, "intermediate_size": 192}  # shards of whole tiles
MATRICES, VECTORS, REST = 4 * 64 * 64 + 3 * 64 * 192, 2 * 64, 2 * 256 * 64 + 64  # of a block, and outside of them
GATHERED = {"stored": (32, 4), "bf16": (16, 2), "casts": (4 + 8 / 256, 4), "casts+bf16": (4 + 8 / 256, 2)}


@pytest.mark.parametrize("gather", GATHERED)
def test_gathering_what_casts_make_of_weights(gather):
    """Of the seven matrices in both passes; all else in its own dtype, or bf16. And what is whole at a time."""
    model = shapes(plugin=FP4Precision("nvfp4-nvidia", skip=["lm_head"]), config=WIDER)
    layout = Layout(4, "fsdp", gather=gather)
    bits, rest = GATHERED[gather]
    block = MATRICES * bits / 8 + VECTORS * rest
    (gathered, _) = communication(model, BATCH, layout)
    assert gathered.payload == 2 * 2 * block + REST * rest
    found = memory(model, BATCH, layout)
    assert found["gathered parameters"] == (MATRICES + VECTORS + REST) * rest + block
    assert found["gradients to reduce"] == (MATRICES + VECTORS) * 4 + REST * rest
    copies = 0 if rest == 2 else 2 * (2 * MATRICES + 256 * 64)
    assert found.get("weights to compute with", 0) == copies


def test_weights_that_cannot_be_gathered_as_casts_quantize_them():
    def payload(casts, layout, overrides=None, **config):
        plugin = LowBitPrecision(casts, skip=["lm_head"], overrides=overrides or {})
        return communication(shapes(plugin=plugin, config={**SMALL, **config}), BATCH, layout)[0].payload

    casts, stored = (Layout(4, "fsdp", gather=gather) for gather in ("casts", "stored"))
    eight, eight_stored = (Layout(8, "fsdp", gather=gather) for gather in ("casts", "stored"))
    for refused in (
        ("nvfp4", casts),  # the backward pass takes another operand
        ("bf16", casts),
        ("nvfp4-nvidia", eight),  # 64 and 176 rows in shards of 8 and 22, and tiles of 16
        ("nvfp4-nvidia", Layout(4, "fsdp", 2, "casts")),
    ):
        with pytest.raises(ValueError, match="No weight can be gathered as its casts quantize it"):
            payload(*refused)
    some = payload("nvfp4", casts, {"down_proj": "fp8-current"})
    assert payload("nvfp4", stored) - some == 2 * 2 * 3 * 64 * 176, "24 bits of down projections, in both passes"
    saved = [payload("nvfp4-nvidia", each, hidden_size=128) for each in (eight_stored, eight)]
    fitting = 4 * 128 * 128 + 128 * 176  # q, k, v, o and down projections, in shards of 16 rows
    assert saved[0] - saved[1] == 2 * 2 * fitting * (32 - 4 - 8 / 256) / 8


def test_tensor_parallelism():
    model, layout = shapes(), Layout(2, "fsdp", 2)
    matrices = 2 * (4 * 64 * 64 + 3 * 64 * 176)
    found, whole = memory(model, BATCH, layout), memory(model, BATCH, Layout())
    assert whole["parameters"] - found["parameters"] == matrices * 4 // 2
    (_, _, bf16) = communication(model, BATCH, Layout(4, "fsdp", 2, "bf16"))
    assert bf16.payload == 2 * BATCH.tokens * 64 * (2 * 2 + 5 * 2)
    halves = flops(model, BATCH, layout)
    assert flops(model, BATCH, Layout())["bf16"] - halves["bf16"] == 6 * BATCH.tokens * matrices // 2
    assert halves["attention"] * 2 == flops(model, BATCH, Layout())["attention"]
    with pytest.raises(ValueError, match="--tensor_parallel 8 does not divide the model's heads, 4"):
        memory(model, BATCH, Layout(8, "fsdp", 8))


def test_a_ring():
    rings = ("all_reduce", 1), ("all_reduce", 2), ("all_gather", 4)
    assert [Collective(name, "gradients", 100, ranks).sent for name, ranks in rings] == [0, 100, 75]
    # Within a node, both ways; eight devices of each node, with a network card each; one device of each node.
    rings = (8, 1), (2, 4), (16, 1), (16, 8)
    bandwidths = [Collective("all_gather", "", 1, *ring).bandwidth(DEVICES["h100"], 8) for ring in rings]
    assert bandwidths == [450e9, 450e9, 400e9, 50e9]


def test_times_by_hand():
    kinds = {"fprop": "fp4", "dgrad": "fp8", "wgrad": "bf16"}
    model = Model([Weight((1000, 1000))], [Linear("one", 1000, 1000, kinds)], None)
    batch, layout = Batch(1, 500), Layout(2, "ddp")
    assert flops(model, batch, layout) == dict.fromkeys(("fp4", "fp8", "bf16"), 10**9)
    half = Assumptions(utilization=0.5, link_utilization=0.25, launch=0)
    b200, h100 = (times(model, batch, layout, DEVICES[name], half) for name in ("b200", "h100"))
    assert b200.gemms == pytest.approx({"fp4": 2e9 / 9e15, "fp8": 2e9 / 4.5e15, "bf16": 2e9 / 2.25e15})
    assert h100.gemms == pytest.approx({"bf16": 4e9 / 989.4e12, "fp8": 2e9 / 1978.9e12}), "it has no FP4"
    assert h100.data_parallel == pytest.approx(4e6 / 450e9 * 4)
    assert h100.hidden == max(sum(h100.gemms.values()), h100.data_parallel)
    assert h100.exposed == sum(h100.gemms.values()) + h100.data_parallel
    # The longer of launches and GEMMs counts.
    model = Model([Weight((100, 100))], [Linear("one", 100, 100, dict.fromkeys(GEMMS, "fp4"), operations=23)], None)
    spent = times(model, Batch(1, 500, micro_batches=2), Layout(), DEVICES["b200"], Assumptions(launch=1e-5))
    assert spent.launches == pytest.approx(2 * 23 * 1e-5)
    assert spent.hidden == spent.launches > sum(spent.gemms.values()) == spent.captured.hidden
