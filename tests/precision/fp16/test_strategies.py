"""Training in fp16 on two processes: what one of them finds infinite, none of them steps with.

What comes out is held against one process that accumulates the halves of each batch, and that to the bit, although
ranks sum: of two numbers there is one sum. A mean of two halves a sum, and each rank's gradients are those of a
micro-batch times two; in fp16, too, that is exact, where nothing is subnormal or overflows. Where another order or
rounding comes in, the test says which.
"""

from functools import cache

import pytest
import torch

from tests.launch import launch
from tests.precision.fp16 import ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return launch("tests.precision.fp16.ranks", ranks.RANKS, tmp_path_factory.mktemp("scaled"))


@cache
def alone(scaler, name="bf16", end=ranks.STEPS, **kwargs):
    """The same run in one process, where a scaler has no ranks to ask."""
    return ranks.train(ranks.plugin(scaler.removeprefix("sharded "), name), end=end, **kwargs)


def skipped(*steps):
    """How many were skipped after each step, if these were."""
    return [sum(bad <= step for bad in steps) for step in range(ranks.STEPS)]


def assert_near(found, wanted, atol=0.0):
    torch.testing.assert_close(found, wanted, rtol=0, atol=atol)


def paths(run):
    """How far each weight that is here went in each step."""
    weights = torch.stack(run["weights"]).double()
    return (weights[1:] - weights[:-1]).abs()


def length(results, name, step=0):
    """Of one step, over the weights of all ranks; divided by the learning rate, the norm of the first gradients."""
    return sum(paths(result[name])[step].square().sum().item() for result in results) ** 0.5


def rounding(run, epsilon):
    """What an error of ``epsilon`` in each gradient makes of the weight that goes farthest."""
    return epsilon * paths(run).sum(0).max().item()


@pytest.mark.parametrize(("strategy", "scaler", "part"), ranks.PLANTED)
def test_an_infinity_on_one_rank_skips_the_step_on_all(results, strategy, scaler, part):
    expected = alone(scaler, part=part, culprit=0)
    # The norm is a sum of two sums, in float32.
    atol = rounding(expected, 2**-20) if scaler == "norm" else 0.0
    runs = [result[f"planted: {strategy}, {scaler}, {part}"] for result in results]
    for rank, run in enumerate(runs):
        assert torch.equal(*run["weights"][ranks.BAD : ranks.BAD + 2]), f"rank {rank} stepped"
        assert run["skipped"] == skipped(ranks.BAD), f"rank {rank} has skipped {run['skipped']} steps"
        assert run["scales"] == expected["scales"], f"rank {rank}: {run['scales']}, one process {expected['scales']}"
        assert_near(run["whole"], expected["whole"], atol)
    steps = sorted(len(run["factors"]) for run in runs)
    assert part != "head" or steps == [0, ranks.STEPS], f"of the head one rank has no gradient, and they had {steps}"


@pytest.mark.parametrize(("strategy", "name"), ranks.ORGANIC)
def test_the_trajectory_and_the_monitor_are_those_of_one_process(results, strategy, name):
    expected = alone("patient", name, outlier=True)
    assert expected["metrics"]["loss_scale/skipped_steps"] == len(ranks.OUTLIERS), expected["metrics"]
    # A sum in fp16 is off by 2^-11 of itself, or less; later activations, in fp16 themselves, may be as far off again.
    atol = rounding(expected, 2**-10) if strategy == "fsdp1, sums in fp16" else 0.0
    for rank, result in enumerate(results):
        run = result[f"organic: {strategy}, {name}"]
        assert run["skipped"] == skipped(*ranks.OUTLIERS), f"rank {rank} has skipped {run['skipped']} steps"
        for kind in ("skipped", "scales", "monitor", "metrics"):
            assert run[kind] == expected[kind], f"rank {rank}: {run[kind]}, one process {expected[kind]}"
        assert_near(run["whole"], expected["whole"], atol)


@pytest.mark.parametrize(("strategy", "part"), ranks.NORMS)
def test_alpha_is_that_of_the_whole_norm(results, strategy, part):
    expected = alone("norm", part=part)
    alpha = expected["factors"][0]
    moved = length([{"run": expected}], "run") / ranks.RATE  # the first step is the gradient
    assert alpha == pytest.approx(2 - moved / alpha / ranks.THRESHOLD, rel=1e-5), f"α is {alpha}, the step {moved}"
    assert all(1 < factor < 2 for factor in expected["factors"]), f"one process: {expected['factors']}"
    # Factors are ratios of float32, and the norm is a sum of two sums.
    for rank, result in enumerate(results):
        run = result[f"norm: {strategy}, {part}"]
        if run["factors"]:
            assert run["factors"] == pytest.approx(expected["factors"], rel=2**-20), f"on rank {rank}"
        assert_near(run["whole"], expected["whole"], rounding(expected, 2**-20))


@pytest.mark.parametrize("strategy", ranks.CLIPPED)
def test_what_is_clipped_is_the_whole_unscaled_norm(results, strategy):
    expected = alone("conservative", end=1, clip=ranks.CLIP)
    norm = length([{"run": alone("conservative")}], "run") / ranks.RATE
    assert norm > 2 * ranks.CLIP, f"the norm is {norm}, so that nothing is clipped"
    # All ranks of DDP have all weights.
    found = length(results[:1] if strategy == "ddp" else results, f"clipped: {strategy}") / ranks.RATE
    # torch adds 1e-6 to the norm; weights of 0.3 in float32 have moved by 1e-3.
    assert found == pytest.approx(ranks.CLIP, rel=1e-5), f"clipped to {found}"
    for result in results:
        assert_near(result[f"clipped: {strategy}"]["whole"], expected["whole"], rounding(expected, 2**-20))


@pytest.mark.parametrize("strategy", ranks.COUNTED)
def test_an_overflow_costs_one_collective_where_gradients_are_sharded(results, strategy):
    for rank, result in enumerate(results):
        counts = result[f"collectives: {strategy}"]
        own = counts["fp16"] - counts["fp32"] - counts["unscaling"]
        assert counts["fp32"] > 0, f"rank {rank} has not seen any collectives"
        assert own == ranks.STEPS * (strategy in ranks.SHARDED), f"rank {rank}: {own} more, of {counts}"


@pytest.mark.parametrize("name", ranks.PLAIN)
def test_sharded_scalers_do_without_lightning(results, name):
    scales = [result[f"plain: {name}"]["scales"] for result in results]
    assert scales[0] == scales[1], f"the ranks have the scales {scales}"
    before, bad, after = scales[0]
    assert bad == (before if name == "static" else before / 2), f"the scale went {scales[0]}"
    assert after == bad, f"the scale went {scales[0]}"
    for rank, result in enumerate(results):
        moved = (paths(result[f"plain: {name}"]) > 0).any(1).tolist()
        assert moved == [True, False, True], f"rank {rank} stepped: {moved}"
    if name == "norm":
        norm, moved = (length(results, f"plain: {kind}") for kind in ("conservative", "norm"))
        alpha = moved / norm
        assert 1 < alpha < 2, f"α is {alpha}"
        assert alpha == pytest.approx(2 - norm / ranks.RATE / ranks.THRESHOLD, rel=1e-5), f"the step is {norm}"
