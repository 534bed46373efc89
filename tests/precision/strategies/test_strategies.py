"""Under each strategy a model trains as in one process: there and then, each micro-batch is quantized by itself."""

import re
from functools import cache
from pathlib import Path

import pytest
import torch

from lightning_lowbit import FP4Precision
from tests.launch import launch
from tests.lightning_imports import BoringModel, DeepSpeedStrategy, MisconfigurationException
from tests.pairwise import selected
from tests.precision.fp16.runs import assert_same
from tests.precision.strategies.ranks import (
    CHANGES,
    KINDS,
    ODD,
    ON_FOUR,
    RANKS,
    STEPS,
    STRATEGIES,
    alone,
    cases,
    changed,
    table,
    trainer,
)

# Of each kind one that recomputes, converts earlier or casts to something that all ranks share. Tensor parallelism
# alone is fast below; tests/nn/sharded has every cast under it.
FAST = {
    "DDP, static_graph, NVFP4, StableSPAM",
    "FSDP1, activation checkpointing, NVFP4, StableSPAM",
    "FSDP2, converted first, NVFP4, StableSPAM",
    "FSDP2, NVFP4, tiles, rotated, codes, StableSPAM",
    "FSDP2 and tensor parallel, NVFP4, StableSPAM",
}
TWO, FOUR = ({", ".join(case): case for case in cases(of)} for of in (STRATEGIES, ON_FOUR))

# Which ranks see other data; all others see those of one before.
DATA_RANKS = {name: [0] for name in STRATEGIES if name.startswith("tensor parallel")}
DATA_RANKS |= {name: [0, 2] for name in ON_FOUR if name.endswith("tensor parallel")}


@pytest.fixture(scope="module")
def two(request, tmp_path_factory):
    names = selected(request, "run")
    return launch("tests.precision.strategies.ranks", RANKS, tmp_path_factory.mktemp("two"), *names)


@pytest.fixture(scope="module")
def four(request, tmp_path_factory):
    return launch("tests.precision.strategies.ranks", 4, tmp_path_factory.mktemp("four"), *selected(request, "run"))


@cache
def in_one_process(precision, optimizer, micro_batches, what=None, steps=STEPS):
    """Losses ``[steps, micro-batches]``, also of a run that changes."""
    how, of_plugin = changed(what) if what else ({}, {})
    return alone(precision, optimizer, micro_batches, {"max_steps": steps, **how}, **of_plugin)


def compare(ranks, name, of_ranks, expected):
    """Losses ``[steps]`` of all ranks are those of one process, ``[steps, micro-batches]``."""
    data = DATA_RANKS.get(name, list(range(len(ranks))))
    found = torch.stack([of_ranks[rank]["losses"] for rank in data], 1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    for rank, of_rank in enumerate(of_ranks):
        assert_same(of_rank["state"], of_ranks[0]["state"], f"rank {rank}")
        before = max(first for first in data if first <= rank)
        assert torch.equal(of_rank["losses"], of_ranks[before]["losses"]), f"rank {rank} saw the data of rank {before}"


@pytest.mark.fast(*(FAST & TWO.keys()))
@pytest.mark.parametrize("run", TWO)
def test_two_processes(two, run):
    check(two, run)


@pytest.mark.fast(*(FAST & FOUR.keys()))
@pytest.mark.parametrize("run", FOUR)
def test_four_processes(four, run):
    check(four, run)


def check(ranks, run):
    name, precision, optimizer = (TWO | FOUR)[run]
    expected = in_one_process(precision, optimizer, len(DATA_RANKS.get(name, ranks)))
    compare(ranks, name, [of_rank[run] for of_rank in ranks], expected)


@pytest.mark.fast("FSDP2, switched", "tensor parallel, shared")
@pytest.mark.parametrize("run", [f"{name}, {what}" for name in KINDS for what in CHANGES])
def test_a_phase_begins_elements_are_clipped_and_projections_share_an_amax_on_all_ranks(two, run):
    name, _, what = run.rpartition(", ")
    case = "NVFP4", "StableSPAM", len(DATA_RANKS.get(name, two))
    expected = in_one_process(*case, what)
    assert not torch.equal(expected, in_one_process(*case, steps=len(expected))), "it changes nothing"
    compare(two, name, [of_rank[run] for of_rank in two], expected)
    assert all(of_rank[run]["state"]["phase"] == ("qaf" if what == "switched" else "fqt") for of_rank in two)


@pytest.mark.fast("FSDP2, stochastic")
@pytest.mark.parametrize("run", [f"{name}, stochastic" for name in KINDS])
def test_stochastic_rounding_repeats_itself(two, run):
    data = DATA_RANKS.get(run.rpartition(", ")[0], range(len(two)))
    nearest = in_one_process("NVFP4", "StableSPAM", len(data))
    for rank, of_rank in enumerate(two):
        first, second = of_rank[run]
        assert torch.equal(first, second), f"rank {rank}"
        off = (first - nearest[:, rank % len(data)]).abs().max()
        assert off > 1e-5, f"rank {rank} has not rounded stochastically"


@pytest.mark.parametrize("run", ["gradient norms"])
def test_fsdp1_knows_gradient_norms_without_a_plugin(two, run):
    for rank, of_rank in enumerate(two):
        ddp, fsdp1 = of_rank[run]
        torch.testing.assert_close(fsdp1, ddp, msg=f"rank {rank}: {fsdp1} for {ddp}")


@pytest.mark.parametrize("run", ["refused"])
@pytest.mark.parametrize(
    "case, message",
    [
        ("an amax of flat buffers", r"FSDP1 keeps flat buffers alone\. Train with .*use_orig_params=True"),
        ("gather_dtype, DDP", "gather_dtype is what FSDP2 gathers parameters in, and DDPStrategy is another strategy"),
        ("gather_dtype, tensor parallel", "with a data_parallel_size of 1: leave gather_dtype out"),
    ],
)
def test_what_a_strategy_cannot_honor_is_refused(two, case, message, run):
    for of_rank in two:
        assert re.search(message, of_rank[run][case]), of_rank[run][case]


@pytest.mark.parametrize("run", [f"{name}, odd" for name in ODD])
def test_uneven_batches_and_empty_shards(two, run):
    """That they have ended is most of it: a collective that one rank leaves out makes the others wait."""
    first, second = (of_rank[run] for of_rank in two)
    assert_same(second, first, "rank 1")
    amaxes = {operand: amax for operand, amax in first["amax_history"].items() if operand != "body.0/dgrad_g"}
    assert all(amax[-1] > 0 for amax in amaxes.values()), f"{amaxes} after a step in which one rank had no rows"


def test_the_table_of_the_guide_is_what_is_tested():
    guide = (Path(__file__).parents[3] / "docs/guides/distributed.md").read_text()
    assert table() in guide, "replace it: python -m tests.precision.strategies.ranks"


def test_deepspeed_is_refused():
    run = trainer(FP4Precision(), devices=1)
    run.strategy.__class__ = DeepSpeedStrategy  # which is not installed
    model = BoringModel()
    model.trainer = run
    with pytest.raises(MisconfigurationException, match=r"and so does DeepSpeed.*ModelParallelStrategy \(FSDP2\)"):
        run.precision_plugin.convert_module(model)
    assert type(model.layer) is torch.nn.Linear, "nothing has been converted"
