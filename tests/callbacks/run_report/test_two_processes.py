"""Two processes write one report, of what both have logged."""

from tests.callbacks.run_report.ranks import RANKS, STEPS
from tests.callbacks.run_report.runs import load
from tests.launch import launch


def test_two_processes_write_one_report(tmp_path):
    launch("tests.callbacks.run_report.ranks", RANKS, tmp_path)
    assert len(list(tmp_path.rglob("run.json"))) == len(list(tmp_path.rglob("report.html"))) == 1
    run = load(tmp_path / "version_0")
    assert run["environment"]["processes"] == RANKS
    assert run["history"]["rank"] == [[k, 0.5] for k in range(1, STEPS + 1)]
    assert run["history"]["val_loss"] == [[2, 0.5], [4, 0.5]]
