"""A layer that processes compute together has the operands of one that is whole, to the bit, and its results."""

import re
from itertools import cycle

import pytest
import torch

from lightning_lowbit import LinearCasts
from lightning_lowbit.nn import PRESETS
from lightning_lowbit.nn.core.function import How
from lightning_lowbit.nn.core.parallel import Shards
from lightning_lowbit.quant.shard import Shard
from tests.launch import launch
from tests.nn.named_casts import CASTS
from tests.nn.sharded.ranks_tensor_parallel import RANKS, RUNS, SIZES, STYLES
from tests.pairwise import selected
from tests.tables import each

# Fast is every third preset, cut either way by turns, and all that is uneven.
FAST = [f"{name}, {style}" for name, style in zip([n for n in CASTS if n in PRESETS][::3], cycle(STYLES), strict=False)]
FAST += [case for case in RUNS if case.rpartition(", ")[2] in SIZES]


@pytest.fixture(scope="module")
def ranks(request, tmp_path_factory):
    work = [*selected(request, "case"), *selected(request, "compiled")]
    return launch("tests.nn.sharded.ranks_tensor_parallel", RANKS, tmp_path_factory.mktemp("ranks"), *work)


@pytest.mark.fast(*FAST)
@pytest.mark.parametrize("case", RUNS)
def test_parts_are_those_of_the_whole(ranks, case):
    for rank, results in enumerate(ranks):
        assert results["differences"][case] == [], f"rank {rank} differs"


@pytest.mark.slow
@pytest.mark.parametrize("compiled", ["compiled"])
def test_generated_code_has_the_same_gradients(ranks, compiled):
    for rank, results in enumerate(ranks):
        wrong = {name: off for name, off in results[compiled].items() if off > 1e-6}
        assert not wrong, f"rank {rank}: {wrong}"


@each(
    "what, message",
    [
        ("blocks", "cut after each 40 of dimension 1, in the middle of blocks of 16"),
        ("tiles", "in the middle of blocks of 16"),
        ("groups", "in the middle of groups of a Hadamard transform, of 64"),
        ("plain", "its input is a plain tensor"),
    ],
)
def test_what_has_no_scale_is_refused_on_all_ranks(ranks, what, message):
    for results in ranks:
        assert re.search(message, results["refused"][what]), results["refused"][what]


def test_a_rotated_shard_is_one_of_a_padded_matrix():
    shards = Shards(x=Shard("", dim=1, start=16, step=16, size=31))
    casts = LinearCasts.preset("ufp4")
    how = How(casts, torch.float32, torch.device("cpu"), shards=shards)
    assert how.operands["fprop_x"].shard.size == 32, "groups of 16 along the contraction"
    assert how.operands["wgrad_x"].shard.size == 31, "whole along the contraction"
    assert how.operands["fprop_w"].shard is None
