"""Sharded or not, an optimizer takes the same steps: DDP, FSDP1, FSDP2, tensor parallelism and meshes of them."""

import math
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from lightning_lowbit.distributed import Sharding, local_gradient, offsets_of, sharding_of, zeros_sharded_as
from lightning_lowbit.optim import SPAM, Adaptive, LowBitAdamW, StableSPAM, connect
from lightning_lowbit.optim.optimizer import GradientStatistics
from tests.distributed import parameters
from tests.distributed.parameters import (
    COUNTED,
    MISSING,
    PLACED,
    masters,
    matrices_of_two_shapes,
    missing_gradients,
    moments_in_cut_blocks,
)
from tests.distributed.ranks import RANKS, RESUMPTIONS
from tests.distributed.spreads import BAD, CASES, HALF, SPREADS, Run
from tests.launch import launch
from tests.pairwise import selected
from tests.tables import each

# float64: sums in another order. fp32: the same, and where a gradient nearly cancels, Adam divides it by its own size;
# a dozen steps of 1e-3 move by a hundredth.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-6}
TRAJECTORIES = [f"{spread}: {case}" for spread in SPREADS for case in SPREADS[spread].cases]
FAST = ["fsdp2 on three: sparse", "fsdp2 of tensor parallel: stable_spam", "fsdp1: adaptive", "ddp: fp8", "hsdp: muon"]


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    runs = [*selected(request, "trajectory"), *selected(request, "resumption")]
    return launch("tests.distributed.ranks", RANKS, tmp_path_factory.mktemp("sharding"), *runs)


@cache
def whole(case):
    """What comes out of one process."""
    return Run(case).train().outcome()


def taking_part(results, mesh):
    return results[: math.prod(mesh)]


def column(statistics, name):
    """One of the statistics, [steps, parameters]."""
    at = GradientStatistics._fields.index(name)
    return torch.stack([torch.stack([values[at] for values in step.values()]) for step in statistics])


def assert_same_run(found, wanted, case, where, steps=0):
    """The same weights and, in float64, statistics of the last steps."""
    tolerance = TOLERANCE[CASES[case].dtype]
    assert found["weights"].keys() == wanted["weights"].keys(), f"{where}: parameters {list(found['weights'])}"
    for name, weights in wanted["weights"].items():
        off = (found["weights"][name] - weights).abs()
        if case == "fp8" and (off > tolerance).sum() == 1 and off.max() < 1e-3:
            continue  # a sum in another order was rounded to the other neighbor
        torch.testing.assert_close(
            found["weights"][name], weights, rtol=0, atol=tolerance, msg=lambda text, n=name: f"{where}, {n}: {text}"
        )
    if CASES[case].dtype != torch.float64:
        return
    for name in GradientStatistics._fields:
        torch.testing.assert_close(
            column(found["statistics"], name), column(wanted["statistics"], name)[steps:], rtol=1e-9, atol=1e-11,
            equal_nan=True, msg=lambda text, n=name: f"{where}, statistics, {n}: {text}",
        )  # fmt: skip


@each("case", CASES, fast=4)
def test_the_cases_do_what_they_are_for(case):
    statistics = whole(case)["statistics"]
    if "adamw" not in case and case != "sparse":
        clipped = column(statistics, "clipped")
        assert clipped.nan_to_num(0).sum() > 3, f"nothing is clipped: {clipped}"
    if case in ("stable_spam", "in fp32", "fp8", "spam", "sparse"):
        assert (column(statistics, "steps_since_reset").diff(dim=0) < 0).any(), "no moments are reset"
    assert column(statistics, "maximum")[BAD].isinf().any(), "there was no step to skip"


@pytest.mark.fast(*FAST)
@pytest.mark.parametrize("trajectory", TRAJECTORIES)
def test_trajectory(results, trajectory):
    """With a NaN on one rank in one of the steps, which all ranks skip.

    Reductions: maxima, and where norms are needed sums, in each dimension of the mesh over which elements are spread;
    Muon's two rules need sums one after the other. Muon alone has more collectives, which gather matrices.
    """
    spread, case = trajectory.split(": ")
    wanted = len(SPREADS[spread].elements) * (1 if "adamw" in case else 3 if "muon" in case else 2)
    for rank, result in enumerate(taking_part(results, SPREADS[spread].mesh)):
        found = result["trajectories"][trajectory]
        assert_same_run(found, whole(case), case, f"rank {rank}")
        counted = [n for name, n in found["collectives"].items() if "allreduce" in name or "muon" not in case]
        assert sum(counted) == wanted, f"rank {rank}: {found['collectives']}, wanted {wanted}"


def test_each_rank_orthogonalizes_stacks_of_equal_shapes(results):
    """Of five matrices, two and one on the first rank, two on the second."""
    alone = matrices_of_two_shapes(None)["weights"]
    for result in taking_part(results, (2,)):
        torch.testing.assert_close(result["matrices"]["weights"], alone, rtol=0, atol=1e-12)
        assert result["matrices"]["broadcasts"] == 3


def test_ranks_share_the_work_under_ddp_where_their_gradients_are_the_same(results):
    others = dict.fromkeys(("not connected", "hook", "no_sync", "join", "ignored"), 0)
    for result in taking_part(results, (2,)):
        assert result["matrices under DDP"] == {"connected": 3, **others}


@each("parameters", [3, 9])
@each("name", COUNTED)
def test_collectives_whatever_the_number_of_parameters(results, name, parameters):
    for result in taking_part(results, (2,)):
        found = result["collectives"][parameters][name]
        assert found == (1 if name == "adamw" else 2), f"{found} collectives for {parameters} parameters"


@pytest.mark.fast(
    "stable_spam: parts, hsdp",
    "stable_spam: whole, one process",
    "fp8: parts, one process",
    "fp8: whole, fsdp2 on three",
)
@pytest.mark.parametrize("resumption", RESUMPTIONS)
def test_run_goes_on_from_a_checkpoint(results, resumption):
    """Of two ranks, each of which has written its part, or gathered."""
    case, on = resumption.split(": ")[0], resumption.split(", ")[1]
    ranks = (1,) if on == "one process" else SPREADS[on].mesh
    for rank, result in enumerate(taking_part(results, ranks)):
        assert_same_run(result["resumptions"][resumption], whole(case), case, f"rank {rank}", HALF)


@each(
    "name, ranks, cuts",
    [
        ("rows", [[0, 1, 2]], [260]),
        ("fewer rows than ranks", [[0, 1, 2]], [260]),
        ("columns", [[0, 1]], [130, 130]),
        ("columns on three", [[0, 1, 2]], [134, 134, 132]),
        ("rows and columns", [[0, 2], [0, 1]], [130, 130]),
        ("columns twice", [[0, 2], [0, 1]], [129, 128, 129, 128]),
        ("replicas of rows", [[0, 1]], [260]),
        ("replicas", [], [260]),
        ("rows twice", [[0, 2], [0, 1]], [16]),
    ],
)
def test_places(results, name, ranks, cuts):
    mesh, shape, _ = PLACED.get(name, ((2, 2), (32, 16), ()))
    elements = torch.arange(float(math.prod(shape))).view(shape)
    parts = [result["places"][name] for result in taking_part(results, mesh)]
    assert parts[0]["ranks"] == ranks, f"spread over {parts[0]['ranks']}"
    for rank, found in enumerate(parts):
        assert found["shape"] == shape and not found["is_flat"], f"rank {rank}: {found['shape']}"
        sizes = zip(found["offsets"], found["part"].shape, strict=True)
        slices = tuple(slice(offset, offset + size) for offset, size in sizes)
        torch.testing.assert_close(elements[slices], found["part"], rtol=0, atol=0, msg=f"rank {rank}: {slices}")
        wanted = torch.cat([parameters.last_of_blocks(part) for part in elements.split(cuts, dim=1)], dim=1)
        torch.testing.assert_close(found["kept"], wanted, rtol=0, atol=0, msg=f"rank {rank}: {found['kept']}")


def test_whole_parameters_are_in_one_place():
    model = nn.Linear(3, 2)
    connect(model)  # nothing to tell
    assert sharding_of(model.weight) == Sharding(torch.Size((2, 3)))
    assert offsets_of(model.weight) == (0, 0)
    assert local_gradient(model.weight) is None
    kept = zeros_sharded_as(model.weight, lambda length: 2 * length, torch.float16)
    assert kept.shape == (2, 6) and kept.dtype == torch.float16


def test_gradients_that_are_still_to_be_summed(results):
    total = 3 * torch.arange(6.0).view(3, 2)
    for result, rows in zip(taking_part(results, (2,)), (slice(0, 2), slice(2, 3)), strict=True):
        assert torch.equal(result["partial"]["replicas"], total), f"of all: {result['partial']['replicas']}"
        assert torch.equal(result["partial"]["rows"], total[rows]), f"of rows {rows}: {result['partial']['rows']}"


@each("name", MISSING)
def test_gradient_on_some_ranks_only(results, name):
    """Where a rank has none, the whole gradient is 0; a parameter without any is left alone, and begins with one."""
    wanted = missing_gradients(None, name)
    for rank, result in enumerate(taking_part(results, (3,))):
        found = result["missing"][name]
        for key in ("weights", "late", "idle"):
            torch.testing.assert_close(found[key], wanted[key], rtol=0, atol=1e-12, msg=f"rank {rank}, {key}")
        assert found["late steps"] == 3, f"rank {rank} counts {found['late steps']} steps with three late gradients"
        assert found["idle steps"] == 0, f"rank {rank} counts {found['idle steps']} steps without a gradient"


@each("bad", ["nan", "too large"])
def test_a_bad_element_in_a_parameter_of_other_ranks(results, bad):
    """All ranks of any group that its rank is in skip the step, and ask no more often for it."""
    for rank, result in enumerate(taking_part(results, (3,))):
        found, groups = result[f"{bad} elsewhere"], 1 if rank == 2 else 2
        assert found["steps"] == [2] * groups, f"rank {rank} took {found['steps']} steps, wanted 2: one was {bad}"
        assert found["collectives"] == 2 * groups, f"rank {rank}: {found['collectives']} collectives, {groups} groups"


def test_master_weights(results):
    wanted = masters(None)
    assert not torch.equal(wanted["weights"].float(), wanted["master"].float() * wanted["scale"]), "they add nothing"
    for rank, result in enumerate(taking_part(results, (3,))):
        for name, tensor in wanted.items():
            assert torch.equal(result["masters"][name], tensor), f"rank {rank}: {name} differs"


def test_fp8_moments_whose_blocks_are_cut(results):
    """Other blocks, and so other scales: still unbiased, with errors as large, and not the same on both ranks."""
    exact = moments_in_cut_blocks(None, "fp32")
    alone = moments_in_cut_blocks(None, "fp8")
    parts = [result["cut blocks"] for result in taking_part(results, (2,))]
    for name, wanted in exact.items():
        cut = torch.cat([part[name] for part in parts], dim=1)
        errors = {"whole": alone[name] - wanted, "cut": cut - wanted}
        for which, error in errors.items():
            bias = error.mean() / (error.std() / error.numel() ** 0.5)
            assert abs(bias) < 4, f"{name}, {which}: the mean error is {bias:.1f} standard errors from 0"
        ratio = errors["cut"].std() / errors["whole"].std()
        assert 0.9 < ratio < 1.1, f"{name}: errors are {ratio:.3f} times as large where blocks are cut"
        first, second = errors["cut"].split(130, dim=1)
        likeness = torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1]
        assert abs(likeness) < 4 / first.numel() ** 0.5, f"{name}: both ranks draw the same, correlation {likeness:.3f}"


@each(
    "name, ranks, words",
    [
        ("fp8 under fsdp1", 2, ["FSDP1", "ModelParallelStrategy (FSDP2)", "NO_SHARD"]),
        ("fp8 loaded under fsdp1", 2, ["FSDP1", "ModelParallelStrategy (FSDP2)", "NO_SHARD"]),
        ("muon under fsdp1", 2, ["FSDP1", "ModelParallelStrategy (FSDP2)", "NO_SHARD", "another optimizer"]),
        ("sparse under fsdp1", 2, ["FSDP1", "ModelParallelStrategy (FSDP2)", "NO_SHARD"]),
        ("sparse with cut rows", 2, ["(3, 32)", "density=1"]),
        ("flat buffers", 2, ["flat buffer", "use_orig_params=True"]),
        ("not connected", 2, ["LowBitPrecision", "lightning_lowbit.optim.connect"]),
        ("rows of lengths that no one else has", 3, ["(2, 260)", "3 ranks", "moments='fp32'"]),
    ],
)
def test_refusals(results, name, ranks, words):
    for rank, result in enumerate(results[:ranks]):
        for word in words:
            assert word in result["refusals"][name], f"rank {rank} was told: {result['refusals'][name]}"


@each("make", [StableSPAM, SPAM, LowBitAdamW, lambda p: Adaptive(torch.optim.AdamW(p))])
def test_flat_buffers_put_into_a_group_from_outside(make):
    """As DeepSpeed's ZeRO does."""
    optimizer = make([Parameter(torch.ones(2, 3)), Parameter(torch.ones(3))])
    flat = Parameter(torch.ones(9))
    flat.grad = torch.ones(9)
    optimizer.param_groups[0]["params"] = [flat]
    with pytest.raises(ValueError, match=r"DeepSpeed.*use DDP, FSDPStrategy or ModelParallelStrategy"):
        optimizer.step()
    assert torch.equal(flat.detach(), torch.ones(9)), "the buffer has changed"
