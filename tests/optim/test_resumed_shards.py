"""A run that resumes from a folder of shards goes on as if it had not stopped, to the bit, on each rank."""

from tests.launch import launch
from tests.optim.ranks_resume import RUNS


def test_weights_statistics_and_options_are_those_of_the_uninterrupted_run(tmp_path):
    for rank, results in enumerate(launch("tests.optim.ranks_resume", 2, tmp_path, *RUNS)):
        for name in RUNS:
            whole, resumed = results[name]
            assert all(map(lambda a, b: a.equal(b), whole.pop("weights"), resumed.pop("weights"))), (name, rank)
            assert str(whole) == str(resumed), (name, rank)  # which NaN equals
            assert whole["knows replicas"] == (name == "ddp, muon"), (name, rank)
