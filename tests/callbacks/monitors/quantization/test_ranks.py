"""Statistics of operands on several processes."""

import pytest

from tests.callbacks.monitors.quantization.ranks import EVERY, RANKS, RUNS, STEPS, train
from tests.callbacks.monitors.quantization.runs import FORWARD
from tests.launch import launch
from tests.nn.operand_sums import assert_numbers


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return launch("tests.callbacks.monitors.quantization.ranks", RANKS, tmp_path_factory.mktemp("quantized"))


@pytest.mark.parametrize("how", RUNS, ids=str)
def test_ranks_have_the_numbers_of_all(results, how):
    """Of operands whose blocks know of no other tokens those of one process with the whole batch."""
    one, other = (result[how] for result in results)
    assert list(one["operands"]) == list(range(EVERY, STEPS + 1, EVERY))
    assert one["operands"] == other["operands"]
    assert one["weights"] == other["weights"]
    alone = train("auto", how[1], devices=1)["operands"]
    for step, layers in alone.items():
        for layer, row in layers.items():
            found = one["operands"][step][layer]
            assert found.keys() == row.keys(), f"step {step}, {layer}"
            for operand in row:
                message = f"step {step}, {layer}, {operand}"
                if how[1] == "int4":
                    assert_numbers(found[operand], row[operand], message)
                elif operand in FORWARD:  # random bits are each rank's own: from the first step on weights differ
                    assert found[operand]["sqnr"] == pytest.approx(row[operand]["sqnr"], abs=1), message


def test_gathered_weights_tell_what_whole_ones_do(results):
    """Flips and distances under FSDP2 are those under DDP, and FSDP1 has none."""
    for result in results:
        ddp, sharded = (result[strategy, "int4"]["weights"] for strategy in ("ddp", "fsdp2"))
        assert list(ddp) == list(sharded) == list(range(EVERY, STEPS + 1, EVERY))
        for step, layers in ddp.items():
            for layer, row in layers.items():
                assert set(row) == {"flips", "distance"}
                assert sharded[step][layer] == pytest.approx(row, rel=1e-6), f"step {step}, {layer}"
        assert any(row["flips"] > 0 for layers in ddp.values() for row in layers.values()), "nothing flips"
        assert not any(result["fsdp1", "int4"]["weights"].values())
    (said,) = results[0]["said"]
    assert said.startswith("Not measured: QuantizationMonitor(weights=True) needs weights that are matrices")
    assert results[1]["said"] == []


def test_two_collectives_in_a_logged_step(results):
    """For all operands of all layers; none in other steps."""
    for strategy in ("ddp", "fsdp1"):
        assert results[0][strategy, "int4"]["collectives"] == [0, 2] * (STEPS // EVERY), strategy
