"""Gradient noise on two processes."""

import pytest

from tests.callbacks.monitors.gradient_noise.ranks import ASKED, RANKS, RUNS, STEPS, train
from tests.callbacks.monitors.gradient_noise.runs import assert_equal
from tests.launch import launch


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return launch("tests.callbacks.monitors.gradient_noise.ranks", RANKS, tmp_path_factory.mktemp("noisy"))


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run[0]}, {run[1]}, {run[2]} micro-batches")
class TestTwoProcesses:
    def test_measure_the_same(self, run, results):
        first, second = (result[*run, True] for result in results)
        assert [step for step, _ in first["measurements"]] == list(range(1, STEPS + 1))
        assert first["measurements"] == second["measurements"]
        assert first["layers"] == second["layers"]
        assert len(first["layers"]) == 4
        noisy = [ratio < 1e3 for _, ratio in first["measurements"]]
        assert noisy == [run[1] != "nearest"] * STEPS

    def test_and_change_nothing(self, run, results):
        for rank, result in enumerate(results):
            with_it, without = result[*run, True], result[*run, False]
            assert with_it["same gradients"] == [True] * STEPS, f"rank {rank}"
            assert without["measurements"] == []
            for name in ("weights", "random"):
                assert_equal([*with_it[name]], [*without[name]], f"rank {rank}, {name}")

    def test_whatever_the_strategy(self, run, results):
        """One that draws only a weight, with one process, too; sums over tokens are rounded in another order there."""
        _, casts, micro = run
        first = next(one for one in RUNS if one[1:] == (casts, micro))
        same = train("", casts, micro) if casts == "weight" else results[0][*first, True]
        found = results[0][*run, True]
        wanted = [ratio for _, ratio in same["measurements"]]
        assert [ratio for _, ratio in found["measurements"]] == pytest.approx(wanted, rel=1e-4)
        assert found["layers"] == pytest.approx(same["layers"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ASKED)
class TestTwoProcessesAsk:
    """Layers, of their part of the tokens."""

    def test_and_measure_the_same(self, name, results):
        first, second = (result[name, True] for result in results)
        assert [step for step, _ in first["measurements"]] == list(range(1, STEPS + 1))
        assert all(ratio < 1e3 for _, ratio in first["measurements"])
        assert len(first["layers"]) == 4
        assert first["measurements"] == second["measurements"]
        assert first["layers"] == second["layers"]

    def test_and_change_nothing(self, name, results):
        for rank, result in enumerate(results):
            assert_equal(*([*result[name, measured]["weights"]] for measured in (True, False)), f"rank {rank}")

    def test_whatever_the_strategy(self, name, results):
        found, wanted = results[0][name, True], results[0]["ddp", True]
        assert dict(found["measurements"]) == pytest.approx(dict(wanted["measurements"]), rel=1e-4)
        assert found["layers"] == pytest.approx(wanted["layers"], rel=1e-4)

    def test_and_go_on(self, name, results):
        for result in results:
            whole, resumed = result[name, True], result.get((name, "resumed"), result[name, True])
            assert resumed["measurements"] == whole["measurements"]
            assert resumed["layers"] == whole["layers"]
