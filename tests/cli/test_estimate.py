"""``lowbit estimate``: its formulas against what small runs really allocate, compute and send."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from lightning_lowbit import SPAM, FP4Precision, FP8Precision, LowBitAdamW, LowBitPrecision, StableSPAM, cli, convert
from lightning_lowbit.cli.estimate.devices import DEVICES, arithmetic
from lightning_lowbit.cli.estimate.formulas import (
    Assumptions,
    Batch,
    Collective,
    Layout,
    backward_peak,
    block_activations,
    communication,
    flops,
    memory,
    saved_activations,
    times,
    weight_copies,
)
from lightning_lowbit.cli.estimate.shapes import Decoder, Linear, Model, Weight, describe
from lightning_lowbit.nn.casts import GEMMS, PRESETS, LinearCasts
from lightning_lowbit.nn.conversion.coverage import GemmCounter
from lightning_lowbit.recipes.models import CausalLM
from tests.cli import ranks_estimate
from tests.launch import launch

SMALL = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4}
BATCH = Batch(sequences=2, length=48)
AUTOCAST = partial(torch.autocast, "cpu", dtype=torch.bfloat16)


def shapes(precision="bf16-mixed", plugin=None, **arguments):
    """What is estimated of a small model, which is made without numbers."""
    with torch.device("meta"):
        module = CausalLM(**{"config": SMALL, **arguments})
    return describe(module, plugin, precision)[0]


def loss_of(module, enabled=True):
    tokens = torch.randint(0, module.model.config.vocab_size, (BATCH.sequences, BATCH.length + 1))
    with AUTOCAST(enabled=enabled):
        logits = module(tokens[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


# --- memory -----------------------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "AdamW": torch.optim.AdamW,
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "StableSPAM": StableSPAM,
    "StableSPAM, FP8": partial(StableSPAM, moments="fp8"),
    "LowBitAdamW": LowBitAdamW,
    "SPAM, a quarter": partial(SPAM, density=0.25),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_gradients_and_optimizer_state_are_those_of_a_real_step(name):
    module = CausalLM(config=SMALL, optimizer=OPTIMIZERS[name])
    optimizer = module.configure_optimizers()
    loss_of(module).backward()
    optimizer.step()
    state = [value for each in optimizer.state.values() for value in each.values() if isinstance(value, Tensor)]
    found = memory(shapes(optimizer=OPTIMIZERS[name]), BATCH, Layout())
    assert found["parameters"] == size_of(module.parameters())
    assert found["gradients"] == size_of(parameter.grad for parameter in module.parameters())
    assert found["optimizer state"] == size_of(state)


def size_of(tensors):
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def test_bytes_of_optimizer_state_per_parameter():
    """Of matrices: 8 in fp32, 2 and two scales per 128 in FP8; vectors and counters are what is left."""
    config = {**SMALL, "hidden_size": 256, "intermediate_size": 512}
    sizes = {}
    for name in ("AdamW", "StableSPAM", "LowBitAdamW"):
        model = shapes(config=config, optimizer=OPTIMIZERS[name])
        sizes[name] = memory(model, BATCH, Layout())["optimizer state"] / model.parameters
    assert sizes["AdamW"] == pytest.approx(8, rel=1e-3) and sizes["StableSPAM"] == pytest.approx(8, rel=1e-2)
    assert sizes["LowBitAdamW"] == pytest.approx(2 + 2 * 4 / 128, rel=1e-2)


def saved(module, enabled):
    """Bytes that autograd keeps: of activations, and of copies of weights."""
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    matrices = {tuple(parameter.shape) for parameter in module.parameters() if parameter.dim() == 2}
    kept, copies = {}, {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            is_weight = tensor.dim() == 2 and bool(matrices & {tuple(tensor.shape), tuple(tensor.shape)[::-1]})
            (copies if is_weight else kept)[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = loss_of(module, enabled)
    assert loss.isfinite()
    return sum(kept.values()), sum(copies.values())


# What is not estimated, once for all blocks: tables of sine and cosine in fp32, tokens and targets in int64 (tokens are
# a slice of sequences that are longer by one), and the number of targets.
INTEGERS = 8 * (BATCH.sequences * (BATCH.length + 1) + BATCH.tokens) + 4
ROTARY = 2 * BATCH.length * 16 * 4
TABLES = ROTARY + INTEGERS


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("casts", [None, "nvfp4", "fp8-current"])
@pytest.mark.parametrize("config", [{}, {"num_key_value_heads": 2}, {"num_hidden_layers": 3}], ids=str)
def test_activations_are_those_that_autograd_keeps(config, casts):
    """To the byte, but for the tables above; and amaxes and scales, three numbers for each layer at most."""
    module = CausalLM(config={**SMALL, **config})
    if casts:
        convert(module, casts, skip=["lm_head"])
    activations, copies = saved(module, enabled=True)
    model = shapes(config={**SMALL, **config})
    left = activations - TABLES - saved_activations(model, BATCH, Layout())
    assert 0 <= left <= (3 * 4 * len(model.layers) if casts else 0)
    assert copies == weight_copies(model, Layout())


def test_activations_in_fp32():
    activations, copies = saved(CausalLM(config=SMALL), enabled=False)
    model = shapes("32-true")
    assert activations - TABLES == saved_activations(model, BATCH, Layout()) and copies == 0
    assert weight_copies(model, Layout()) == 0


def test_activations_of_parameters_in_bf16():
    """As where FSDP gathers them in bf16: nothing is cast, but norms compute in fp32."""
    activations, copies = saved(CausalLM(config=SMALL).bfloat16(), enabled=False)
    estimated = saved_activations(shapes("bf16-true"), BATCH, Layout())
    assert activations - INTEGERS - ROTARY // 2 == estimated and copies == 0
    assert saved_activations(shapes(), BATCH, Layout(4, "fsdp", gather="bf16")) == estimated


def test_one_data_parallel_group_gathers_nothing():
    """Parameters stay in fp32, whatever they would be gathered in."""
    (stored, bf16) = (memory(shapes(), BATCH, Layout(2, "fsdp", 2, gather)) for gather in ("stored", "bf16"))
    assert stored == bf16 and "weights to compute with" in stored and "gathered parameters" not in stored


def test_activations_with_checkpointing():
    """A block keeps its input; one block at a time is computed again."""
    activations, copies = saved(CausalLM(config=SMALL, gradient_checkpointing=True), enabled=True)
    plain, model = shapes(), shapes(gradient_checkpointing=True)
    assert model.checkpointing and not plain.checkpointing
    estimated = saved_activations(model, BATCH, Layout())
    assert activations - estimated == INTEGERS, "tables are kept with the inputs of blocks, elsewhere"
    kept = BATCH.tokens * 2 * (block_activations(plain, Layout()) - 4 * 64)
    assert saved_activations(plain, BATCH, Layout()) - estimated == kept
    assert weight_copies(model, Layout()) == copies + 2 * (4 * 64 * 64 + 3 * 64 * 176), "of one block and the head"
    assert backward_peak(plain, BATCH, Layout()) == BATCH.tokens * 256 * (4 + 2)


def test_what_is_no_decoder_counts_the_inputs_of_its_linear_layers():
    with torch.device("meta"):
        model, notes = describe(BoringModel())
    assert model.decoder is None and "not one decoder" in notes[0]
    assert saved_activations(model, BATCH, Layout()) == BATCH.tokens * 4 * 32
    with pytest.raises(ValueError, match="cuts the blocks of a decoder"):
        memory(model, BATCH, Layout(2, "fsdp", 2))

    class NoLayer(LightningModule):
        pass

    with pytest.raises(ValueError, match="NoLayer has no linear layer"):
        describe(NoLayer())


def test_an_optimizer_that_reads_numbers_is_refused():
    class Reads(torch.optim.SGD):
        def step(self, closure=None):
            return float(self.param_groups[0]["params"][0].sum())

    with pytest.raises(ValueError, match="Reads reads numbers in its step"):
        shapes(optimizer=partial(Reads, lr=0.1))


# --- FLOPs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointing", [False, True])
def test_flops_of_linear_layers_are_those_that_torch_counts(checkpointing):
    module = CausalLM(config=SMALL, gradient_checkpointing=checkpointing)
    with FlopCounterMode(display=False) as counter:
        loss_of(module, enabled=False).backward()
    counted = counter.get_flop_counts()["Global"]
    estimated = flops(shapes("32-true", gradient_checkpointing=checkpointing), BATCH, Layout())
    left_out = 2 * 2 * BATCH.tokens * 64 * 176 if checkpointing else 0  # down projections, which end their blocks
    linear = sum(count for op, count in counted.items() if str(op) in ("aten.mm", "aten.addmm"))
    assert estimated["fp32"] == linear + left_out


@pytest.mark.parametrize("checkpointing", [False, True])
def test_flops_of_attention_and_converted_layers(checkpointing):
    module = CausalLM(config=SMALL, gradient_checkpointing=checkpointing)
    convert(module, "fp8-current", skip=["lm_head"])
    with GemmCounter(module) as counter:
        loss_of(module).backward()
    estimated = flops(shapes(gradient_checkpointing=checkpointing), BATCH, Layout())
    assert counter.coverage().flops == estimated["bf16"] + estimated["attention"]


@pytest.mark.parametrize("name", PRESETS)
def test_arithmetic_of_presets(name):
    kinds = {gemm: arithmetic(LinearCasts.preset(name), gemm) for gemm in GEMMS}
    whole = {
        **dict.fromkeys(("nvfp4", "nvfp4-4over6", "nvfp4-nvidia", "mxfp4", "mxfp4-rht"), "fp4"),
        **dict.fromkeys(("mxfp6", "mxfp8"), "mxfp8"),
        **dict.fromkeys(("fp8-delayed", "fp8-current"), "fp8"),
    }
    if name in whole:
        assert set(kinds.values()) == {whole[name]}
    native = LinearCasts.preset(name).native_gemms
    assert {gemm: kinds[gemm] for gemm in native} == native
    if name in ("bf16", "ufp4"):
        assert set(kinds.values()) == {"bf16"}, "there is no tensor core for it"


# --- communication ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return launch("tests.cli.ranks_estimate", ranks_estimate.RANKS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", ["ddp stored", "fsdp stored", "fsdp bf16", "fsdp casts", "fsdp casts+bf16"])
def test_two_processes_send_and_keep_what_is_estimated(ranks, name):
    """Bytes of all collectives of a step with two micro-batches, and memory of the first rank, exactly."""
    strategy, gather = name.split()
    seen, layout = ranks[0][name], Layout(2, strategy, gather=gather)
    batch = Batch(ranks_estimate.SEQUENCES, ranks_estimate.LENGTH, ranks_estimate.MICRO_BATCHES)
    plugin = FP8Precision("current", skip=["lm_head"]) if "casts" in gather else None
    model = shapes(plugin=plugin, config=ranks_estimate.TINY)
    names = {"all_reduce": "allreduce_", "all_gather": "_allgather_base_", "reduce_scatter": "_reduce_scatter_base_"}
    sent = {names[each.name]: each.payload for each in communication(model, batch, layout)}
    assert seen["sent"] == sent == ranks[1][name]["sent"]
    found = memory(model, batch, layout)
    # What FSDP gathers in bf16 it frees itself; else copies in bf16 of the whole model stay.
    copied = ["weights to compute with"] if "bf16" not in gather else []
    kept = ["parameters", "gradients", "optimizer state", *copied]
    assert {what: seen[what] for what in kept} == {what: found[what] for what in kept}
    assert ("weights to compute with" in found) == bool(copied)


@pytest.mark.parametrize("name", ["tensor parallel", "tensor parallel, again"])
def test_two_tensor_parallel_processes_send_and_keep_what_is_estimated(ranks, name):
    seen, layout = ranks[0][name], Layout(2, "fsdp", 2)
    batch = Batch(ranks_estimate.SEQUENCES, ranks_estimate.LENGTH, ranks_estimate.MICRO_BATCHES)
    model = shapes(config=ranks_estimate.EVEN, gradient_checkpointing="again" in name)
    (reduced,) = communication(model, batch, layout)
    assert seen["sent"] == {reduced.name: reduced.payload} == ranks[1][name]["sent"]
    found = memory(model, batch, layout)
    # Checkpointed blocks have copies of weights one at a time, when the forward pass is over.
    kept = ["parameters", "gradients", "optimizer state", *([] if model.checkpointing else ["weights to compute with"])]
    assert {what: seen[what] for what in kept} == {what: found[what] for what in kept}


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
        lambda: payload("nvfp4", casts),  # the backward pass takes another operand
        lambda: payload("bf16", casts),
        lambda: payload("nvfp4-nvidia", eight),  # 64 and 176 rows in shards of 8 and 22, and tiles of 16
        lambda: payload("nvfp4-nvidia", Layout(4, "fsdp", 2, "casts")),
    ):
        with pytest.raises(ValueError, match="No weight can be gathered as its casts quantize it"):
            refused()
    some = payload("nvfp4", casts, {"down_proj": "fp8-current"})
    assert payload("nvfp4", stored) - some == 2 * 2 * 3 * 64 * 176, "24 bits of down projections, in both passes"
    saved = [payload("nvfp4-nvidia", each, hidden_size=128) for each in (eight_stored, eight)]
    fitting = 4 * 128 * 128 + 128 * 176  # q, k, v, o and down projections, in shards of 16 rows
    assert saved[0] - saved[1] == 2 * 2 * fitting * (32 - 4 - 8 / 256) / 8


def test_tensor_parallelism():
    """A half of the matrices in blocks; all-reduces of activations, some of them again if they are computed again."""
    model, layout = shapes(), Layout(2, "fsdp", 2)
    matrices = 2 * (4 * 64 * 64 + 3 * 64 * 176)
    found, whole = memory(model, BATCH, layout), memory(model, BATCH, Layout())
    assert whole["parameters"] - found["parameters"] == matrices * 4 // 2
    (sent,) = communication(model, BATCH, layout)
    assert (sent.name, sent.payload) == ("all_reduce", 2 * BATCH.tokens * 64 * (2 * 2 + 5 * 4))
    (again,) = communication(shapes(gradient_checkpointing=True), BATCH, layout)
    assert again.payload == 2 * BATCH.tokens * 64 * (3 * 2 + 5 * 4)
    (_, _, bf16) = communication(model, BATCH, Layout(4, "fsdp", 2, "bf16"))
    assert bf16.payload == 2 * BATCH.tokens * 64 * (2 * 2 + 5 * 2)
    halves = flops(model, BATCH, layout)
    assert flops(model, BATCH, Layout())["bf16"] - halves["bf16"] == 6 * BATCH.tokens * matrices // 2
    assert halves["attention"] * 2 == flops(model, BATCH, Layout())["attention"]
    with pytest.raises(ValueError, match="--tensor_parallel 8 does not divide the model's heads, 4"):
        memory(model, BATCH, Layout(8, "fsdp", 8))


def test_a_ring():
    def sent(name, ranks):
        return Collective(name, "gradients", 100, ranks).sent

    assert (sent("all_reduce", 1), sent("all_reduce", 2), sent("all_gather", 4)) == (0, 100, 75)
    h100 = DEVICES["h100"]
    bandwidths = [Collective("all_gather", "", 1, ranks, stride).bandwidth(h100, 8) for ranks, stride in RINGS]
    assert bandwidths == [450e9, 450e9, 400e9, 50e9]


# Within a node, both ways; eight devices of each node, with a network card each; one device of each node.
RINGS = [(8, 1), (2, 4), (16, 1), (16, 8)]


# --- time -------------------------------------------------------------------------------------------------------------


def test_times_by_hand():
    kinds = {"fprop": "fp4", "dgrad": "fp8", "wgrad": "bf16"}
    model = Model([Weight((1000, 1000))], [Linear("one", 1000, 1000, kinds)], None)
    batch, layout = Batch(1, 500), Layout(2, "ddp")
    assert flops(model, batch, layout) == dict.fromkeys(("fp4", "fp8", "bf16"), 10**9)
    half = Assumptions(utilization=0.5, link_utilization=0.25)
    b200, h100 = (times(model, batch, layout, DEVICES[name], half) for name in ("b200", "h100"))
    assert b200.gemms == pytest.approx({"fp4": 2e9 / 9e15, "fp8": 2e9 / 4.5e15, "bf16": 2e9 / 2.25e15})
    assert h100.gemms == pytest.approx({"bf16": 4e9 / 989e12, "fp8": 2e9 / 1979e12}), "it has no FP4"
    assert h100.data_parallel == pytest.approx(4e6 / 450e9 * 4)
    assert h100.hidden == max(sum(h100.gemms.values()), h100.data_parallel)
    assert h100.exposed == sum(h100.gemms.values()) + h100.data_parallel


# --- the command ------------------------------------------------------------------------------------------------------

QUICK = ["--config=quickstart", f"--model.init_args.config={json.dumps(SMALL)}"]


def estimate(*arguments):
    return cli.main(["estimate", *arguments])


def test_llama_7b_on_256_devices(capsys):
    """Two of its 32 blocks, which take most of the time that it takes to make them."""
    two = "--model.init_args.config.num_hidden_layers=2"
    recipe = ["--config=c4", "--config=llama_7b", "--config=multi_node", two]
    assert estimate(*recipe, "--devices=256", "--device=b200", "--gather=bf16", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    block = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
    assert told["parameters"] == 2 * block + 2 * 32000 * 4096 + 4096
    assert told["memory_bytes"]["parameters"] == 4 * told["parameters"] // 256
    assert told["memory_bytes"]["optimizer state"] == pytest.approx(8 * told["parameters"] / 256, rel=1e-3)
    assert told["layout"] == {**told["layout"], "devices": 256, "strategy": "fsdp", "tensor_parallel": 1}
    assert told["flops"]["fp4"] == 6 * 16 * 256 * 2 * (block - 2 * 4096)
    assert 0 < told["seconds"]["hidden"] < told["seconds"]["exposed"]
    assert not Path("runs").exists()


def test_what_is_printed(capsys):
    assert estimate(*QUICK, "--devices=16", "--strategy=fsdp", "--utilization=0.3") == 0
    shown = capsys.readouterr().out
    for part in (
        "16 devices: 16 data-parallel (fsdp)",
        "32,768 tokens a step: 8 sequences of 256",
        "optimizer state",
        "fits on h100",
        "all_gather of parameters",
        "not a measurement: GEMMs are assumed to reach 30% of the peak, links 70%",
        "h100 has no arithmetic for fp4",
        "Not in it:",
    ):
        assert part in shown, part
    assert estimate(*QUICK, "--device=b200", "--memory=0.001") == 0
    shown = capsys.readouterr().out
    assert "does NOT fit" in shown and "This package emulates them" in shown and "1 device\n" in shown


def test_the_configuration_says_what_options_do_not(capsys):
    def layout(*arguments):
        assert estimate(*QUICK, *arguments, "--json") == 0
        told = json.loads(capsys.readouterr().out)
        return tuple(told["layout"][name] for name in ("devices", "strategy", "tensor_parallel"))

    assert layout() == (1, "ddp", 1)
    assert layout("--trainer.devices=4", "--trainer.num_nodes=2", "--trainer.strategy=ddp") == (8, "ddp", 1)
    two = ["--trainer.devices=2", "--trainer.num_nodes=2", "--trainer.strategy=ModelParallelStrategy"]
    assert layout(*two) == (4, "fsdp", 2), "Lightning's auto: tensor parallelism within a node"
    assert layout(*two, "--tensor_parallel=1") == (4, "fsdp", 1)


@pytest.mark.slow
def test_the_configuration_says_what_is_gathered(capsys):
    def gather(*arguments):
        assert (
            estimate(
                *QUICK,
                "--strategy=fsdp",
                "--devices=4",
                "--trainer.plugins.init_args.casts=fp8-current",
                *arguments,
                "--json",
            )
            == 0
        )
        return json.loads(capsys.readouterr().out)["layout"]["gather"]

    casts, bf16 = "--trainer.plugins.init_args.quantize_before_gather=true", "--model.init_args.gather_dtype=bf16"
    assert (gather(), gather(bf16)) == ("stored", "bf16")
    assert (gather(casts), gather(casts, bf16)) == ("casts", "casts+bf16")
    assert gather(casts, bf16, "--gather=stored") == "stored"


def test_what_a_device_lacks_is_counted_as_what_is_computed_in(capsys):
    for dtype, high in (("bf16", "bf16"), ("fp32", "fp32")):
        assert estimate(*QUICK, f"--trainer.plugins.init_args.compute_dtype={dtype}") == 0
        assert f"no arithmetic for fp4: its GEMMs are counted as {high}" in capsys.readouterr().out


@pytest.mark.fast("--device=h1000-", "--devices=0-", "--peak=fp8=fast-", "--nonsense=1-")
@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--device=h1000"], "Did you mean 'h100'?"),
        (["--strategy=ddpp"], "Did you mean 'ddp'?"),
        (["--gather=fp8", "--strategy=fsdp"], "Unknown --gather 'fp8'."),
        (["--gather=bf16"], "DDP gathers nothing"),
        (["--gather=casts", "--strategy=fsdp", "--devices=4"], "No weight can be gathered as its casts quantize it"),
        (["--devices=0"], "--devices is a whole number, 1 or more; got 0."),
        (["--devices=6", "--tensor_parallel=4", "--strategy=fsdp"], "6 devices do not divide into groups of 4"),
        (["--devices=2", "--tensor_parallel=2"], "give --strategy fsdp"),
        (["--utilization=1.5"], "--utilization is a share of the peak"),
        (["--peak=fp9=100"], "Unknown arithmetic in --peak 'fp9'."),
        (["--peak=fp8=fast"], "such as bf16=989,fp8=1979"),
        (["--memory=-1"], "--memory takes numbers above 0"),
        (["--batch_size=0"], "give --batch_size"),
        (["--trainer.devices=auto"], "give --devices"),
        (["--trainer.strategy=deepspeed"], "say --strategy ddp or --strategy fsdp"),
        (["--trainer.plugins.init_args.casts=nvfp5"], "Did you mean 'nvfp4'?"),
        (["--nonsense=1"], "nonsense"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes(arguments, line, capsys):
    assert estimate(*QUICK, *arguments) == 2
    assert line in capsys.readouterr().err.strip().splitlines()[-1]


def test_peaks_can_be_given(capsys):
    assert estimate(*QUICK, "--json", "--peak=bf16=1,fp4=2") == 0
    told = json.loads(capsys.readouterr().out)
    rest = told["flops"]["bf16"] + told["flops"]["attention"]
    assert told["seconds"]["gemms"]["fp4"] == pytest.approx(told["flops"]["fp4"] / 2e12 / 0.4)
    assert told["seconds"]["gemms"]["bf16"] == pytest.approx(rest / 1e12 / 0.4)


def test_a_gate_is_found():
    def gated(network, **config):
        with torch.device("meta"):
            decoder = describe(CausalLM(network, config))[0].decoder
        assert isinstance(decoder, Decoder)
        return decoder.gated

    assert gated("llama-small") and gated("bitnet-small")
    assert not gated("gpt2", n_layer=2, n_embd=64, n_head=2, vocab_size=256)
