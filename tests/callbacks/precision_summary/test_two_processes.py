"""Layers of whole sizes, however weights are spread over two processes."""

from tests.callbacks.precision_summary.ranks import RANKS, RUNS, summary
from tests.launch import launch


def test_tables_are_those_of_one_process(tmp_path):
    first, second = launch("tests.callbacks.precision_summary.ranks", RANKS, tmp_path)
    alone = {with_plugin: summary("one", with_plugin) for with_plugin in (True, False)}
    assert [(row["out"], row["in"]) for row in alone[True]["layers"]] == [(32, 16), (24, 32), (3, 6), (4, 24)]
    assert "bits per element of their inputs" in alone[True]["tables"]
    for run in RUNS:
        for name in alone[run[1]].keys() - ({"tables"} if "flat" in run[0] else {}):  # there layers have no parameters
            assert first[run][name] == alone[run[1]][name], f"{run}, {name}"
        assert second[run]["layers"] == alone[run[1]]["layers"], run
