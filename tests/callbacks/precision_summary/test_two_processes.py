"""Layers of whole sizes, however weights are spread over two processes."""

from tests.callbacks.precision_summary.ranks import RANKS, summary
from tests.launch import launch


def test_tables_are_those_of_one_process(tmp_path):
    alone, (first, second) = summary("one"), launch("tests.callbacks.precision_summary.ranks", RANKS, tmp_path)
    assert [(row["out"], row["in"]) for row in alone["layers"]] == [(32, 16), (24, 32), (3, 6), (4, 24)]
    assert "bits per element of their inputs" in alone["tables"]
    for strategy, found in first.items():
        assert found == alone, strategy
        assert second[strategy]["layers"] == alone["layers"], strategy
