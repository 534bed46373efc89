"""The command: what it prints, and mistakes."""

import json
import re
from pathlib import Path

import pytest
import torch

from lightning_lowbit import LinearCasts, cli
from lightning_lowbit.cli.lab.estimate.shapes import describe, operations
from lightning_lowbit.recipes.models import CausalLM
from tests.cli.estimate.models import SMALL
from tests.tables import each

QUICK = ["--config=quickstart", f"--model.init_args.config={json.dumps(SMALL)}"]


def estimate(*arguments):
    return cli.main(["estimate", *arguments])


def numbers(capsys, *arguments):
    assert estimate(*QUICK, *arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


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
    peak = "--peak=fp32=1,bf16=989"
    assert estimate(*QUICK, "--devices=16", "--strategy=fsdp", "--utilization=0.3", peak) == 0
    shown = capsys.readouterr().out
    for part in (
        *("16 devices: 16 data-parallel (fsdp)", "32,768 tokens a step: 8 sequences of 256", "optimizer state"),
        *("fits on h100 with your figures", "all_gather of parameters", "data sheets of h100 with your figures"),
        *("GEMMs are assumed to reach 30% of the peak, links 70%", "h100 with your figures has no arithmetic for fp4"),
        *("Not in it:", "A step: host-bound, "),
        *("in a CUDA graph: ", "eager, on a host as slow as --launch says: "),
    ):
        assert part in shown, part
    assert shown.count("so its --peak changes nothing") == shown.count("No GEMM is counted in fp32, ") == 1
    assert estimate(*QUICK, "--device=b200", "--memory=0.001") == 0
    shown = capsys.readouterr().out
    assert "does NOT fit on b200 with your figures" in shown
    assert "this package emulates them" in shown and "1 device\n" in shown


TWO = ["--trainer.devices=2", "--trainer.num_nodes=2", "--trainer.strategy=ModelParallelStrategy"]


@each("arguments, layout", [
    (TWO, (4, "fsdp", 2)),  # Lightning's auto: tensor parallelism within a node
    ([*TWO, "--tensor_parallel=1"], (4, "fsdp", 1)),
    (["--trainer.devices=4", "--trainer.num_nodes=2", "--trainer.strategy=ddp"], (8, "ddp", 1)),
    ([], (1, "ddp", 1)),
], fast=1)  # fmt: skip
def test_the_configuration_says_what_options_do_not(arguments, layout, capsys):
    numbered = numbers(capsys, *arguments)["layout"]
    assert tuple(numbered[name] for name in ("devices", "strategy", "tensor_parallel")) == layout


@pytest.mark.slow
def test_the_configuration_says_what_is_gathered(capsys):
    def gather(*arguments):
        told = numbers(capsys, "--strategy=fsdp", "--devices=4", "--config=fp8_current", *arguments)
        return told["layout"]["gather"]

    casts, bf16 = "--trainer.plugins.init_args.quantize_before_gather=true", "--model.init_args.gather_dtype=bf16"
    assert (gather(), gather(bf16)) == ("stored", "bf16")
    assert (gather(casts), gather(casts, bf16)) == ("casts", "casts+bf16")
    assert gather(casts, bf16, "--gather=stored") == "stored"


@pytest.mark.slow
def test_what_a_device_lacks_is_counted_as_what_is_computed_in(capsys):
    for dtype, high in (("bf16", "bf16"), ("fp32", "fp32")):
        assert estimate(*QUICK, f"--trainer.plugins.init_args.compute_dtype={dtype}") == 0
        assert f"no arithmetic for fp4: its GEMMs are counted as {high}" in capsys.readouterr().out


@pytest.mark.fast("--device=h1000-", "--nonsense=1-")
@pytest.mark.parametrize("arguments, line", [
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
    (["--peak=1e15"], "--peak takes arithmetics and their TFLOP/s, such as bf16=989,fp8=1979; got '1e15'."),
    (["--memory=-1"], "--memory takes numbers above 0"),
    (["--launch=0"], "--launch takes numbers above 0, such as 50, in microseconds"),
    (["--trainer.devices=auto", "--trainer.strategy=deepspeed", "--batch_size=0"],
     "give --devices. How deepspeed spreads a model is not known here: say --strategy ddp or --strategy fsdp. "
     "TextDataModule tells no batch_size of 1 or more (got 0): give --batch_size."),
    (["--nonsense=1"], "nonsense"),
], ids=lambda value: " ".join(value) if isinstance(value, list) else "")  # fmt: skip
def test_mistakes(arguments, line, capsys):
    assert estimate(*QUICK, *arguments) == 2
    assert line in capsys.readouterr().err.strip().splitlines()[-1]


def test_a_step_with_convolutions_has_no_rate(capsys):
    assert estimate("--config=digits", "--data.init_args.path=images", "--sequence_length=64") == 0
    printed = capsys.readouterr().out
    assert re.search(r"A step: more than .* ms, since \d+ convolutions are not counted", printed)
    assert "tokens/s" not in printed


def test_what_a_host_starts_is_what_an_h200_launched():
    """Kernels of both passes of a layer, docs/results/gpu.md."""
    launched = {"nvfp4": 22, "nvfp4-nvidia": 27, "mxfp4": 13, "mxfp4-rht": 18, "mxfp8": 11, "ufp4": 32, "quartet2": 37}
    launched |= {"fp8-delayed": 24, "fp8-current": 19, "fp8-row": 15, "fp8-blockwise": 11, "int4": 8, "ternary": 12}
    for name, number in launched.items():
        assert operations(LinearCasts.preset(name)) == pytest.approx(number, rel=1 / 3), name
    assert operations(LinearCasts()) == 3


def test_peaks_and_launches_can_be_given_and_a_step_with_slow_ones_takes_as_long_as_the_host(capsys):
    slow, fast = (numbers(capsys, f"--launch={launch}", "--peak=bf16=1,fp4=2") for launch in (100, 0.001))
    rest = slow["flops"]["bf16"] + slow["flops"]["attention"]
    slow, fast, flops = slow["seconds"], fast["seconds"], slow["flops"]
    assert slow["gemms"]["fp4"] == pytest.approx(flops["fp4"] / 2e12 / 0.4)
    assert slow["gemms"]["bf16"] == pytest.approx(rest / 1e12 / 0.4)
    assert slow["hidden"] == slow["launches"] == pytest.approx(1e5 * fast["launches"])
    assert slow["captured_hidden"] == fast["captured_hidden"] == fast["hidden"] < slow["hidden"]


def test_a_gate_is_found():
    with torch.device("meta"):
        networks = CausalLM("llama-small"), CausalLM("bitnet-small"), CausalLM("gpt2", {"n_layer": 2, "n_embd": 96})
        assert [describe(network)[0].decoder.gated for network in networks] == [True, True, False]
