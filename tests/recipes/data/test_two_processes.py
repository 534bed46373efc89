"""Two processes read each sequence once: of a text in memory, and of a stream that goes on from a checkpoint."""

import pytest

from tests.launch import launch
from tests.recipes.data.conftest import write_text
from tests.recipes.data.ranks import EPOCHS, RANKS, SAVED, STEPS
from tests.recipes.data.streams import fit, write_c4
from tests.tables import each


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def results(folder):
    write_text(folder / "text")
    write_c4((400, 30, 400), folder=folder / "c4")
    return launch("tests.recipes.data.ranks", RANKS, folder)


@each("run", ["text", "text, without a sampler"])
def test_two_processes_share_each_epoch(results, run):
    first, second = (result[run] for result in results)
    assert len(first) == len(second) == EPOCHS * 6
    for epoch in range(EPOCHS):
        one, other = (sum(seen[6 * epoch : 6 * epoch + 6], []) for seen in (first, second))
        assert len(one) == len(other) == 12
        assert one != other


def test_two_processes_share_the_stream_and_go_on_with_it(results, folder, monkeypatch):
    monkeypatch.chdir(folder)
    whole = fit(limit_val_batches=0, max_steps=STEPS).seen
    seen = [result["stream"] for result in results]
    assert [sorted(a + b) for a, b in zip(*seen, strict=True)] == [sorted(batch) for batch in whole]
    assert [result["stream, resumed"] for result in results] == [part[SAVED:] for part in seen]
