"""What every optimizer's state keeps to: resumed, copied and refused."""

import copy
import io

import pytest
import torch
from torch.nn import Parameter

from tests.optim.conformance.entries import ENTRIES, each_entry, entries, entries_and_dtypes
from tests.optim.parameters import assert_same, make_parameters, snapshot, train
from tests.tables import each


def through_a_file(value, weights_only=True):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


@pytest.mark.pairwise(1)
@entries_and_dtypes(torch.float32, torch.bfloat16)
def test_resume_is_bit_for_bit(entry, dtype):
    """Early, just before a reset, and within a warm-up."""
    parameters, optimizer = entry.new(dtype)
    saved = {}
    for step in range(8):
        if step in (1, 3, 5):
            weights = [p.detach().clone() for p in parameters]
            saved[step] = snapshot(optimizer, parameters), weights, through_a_file(optimizer.state_dict())
        train(optimizer, parameters, [step])
    for step, (before, weights, state) in saved.items():
        resumed_parameters = [Parameter(weight) for weight in weights]
        resumed = entry(resumed_parameters, lr=7.0)
        resumed.load_state_dict(state)
        assert_same(snapshot(resumed, resumed_parameters), before, f"loading the state of step {step} changed it")
        train(resumed, resumed_parameters, range(step, 8))
        after = snapshot(optimizer, parameters)
        assert_same(snapshot(resumed, resumed_parameters), after, f"resumed at step {step}, the run differs")


def _pickled(value):
    return through_a_file(value, weights_only=False)  # Python's pickle cannot read FP8 tensors


@pytest.mark.pairwise(1)
@entries(lambda entry: entry.can_be_copied)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, _pickled])
@pytest.mark.parametrize("trained", [0, 5])
def test_copies_go_on_alike(entry, duplicate, trained):
    parameters, optimizer = entry.new()
    train(optimizer, parameters, range(trained))
    twins, twin = duplicate((parameters, optimizer))
    for one, its_parameters in ((optimizer, parameters), (twin, twins)):
        its_parameters += make_parameters(entry.dtype, [(4, 6)])
        one.add_param_group({"params": its_parameters[-1:]})
        train(one, its_parameters, range(trained, trained + 3))
    assert_same(snapshot(twin, twins), snapshot(optimizer, parameters), "the copy trains differently")


@each_entry
def test_named_parameters(entry):
    parameters, named = entry.parameters(), entry.parameters()
    optimizer, with_names = entry(parameters), entry((f"p{i}", p) for i, p in enumerate(named))
    train(optimizer, parameters, range(3))
    train(with_names, named, range(3))
    assert_same(snapshot(with_names, named), snapshot(optimizer, parameters), "names changed the trajectory")
    names = [f"p{i}" for i in range(len(named))]
    assert with_names.state_dict()["param_groups"][0]["param_names"] == names, "the names are not saved"
    again = [Parameter(p.detach().clone()) for p in named]
    resumed = entry((f"p{i}", p) for i, p in enumerate(again))
    saved = with_names.state_dict()
    resumed.load_state_dict(saved if entry.base is None else copy.deepcopy(saved))  # what is loaded is a copy
    train(with_names, named, range(3, 6))
    train(resumed, again, range(3, 6))
    assert_same(snapshot(resumed, again), snapshot(with_names, named), "the resumed run with names differs")


@each_entry
def test_moments_begin_anew_after_their_reset_and_statistics_go_on(entry):
    parameters, optimizer = entry.new()
    train(optimizer, parameters, range(2))
    optimizer.reset_moments()
    train(optimizer, parameters, [2])
    for state in map(optimizer.state.get, parameters):
        assert state["steps"] == 3, "the reset is counted as a start"
        assert state.get("steps_since_reset", 1) == state.get("step", 1) == 1, "old moments are left"


def _reloaded(value):
    """Parameters, and an optimizer of them with what the given one has saved; the entry makes it."""
    entry, parameters, optimizer = value
    again = [Parameter(p.detach().clone()) for p in parameters]
    resumed = entry(again)
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    return entry, again, resumed


@each("entry", [entry for entry in ENTRIES.values() if entry.can_be_copied])
@pytest.mark.parametrize("duplicate", [_reloaded, copy.deepcopy])
def test_what_is_saved_between_a_reset_and_the_next_step_goes_on_alike(entry, duplicate):
    parameters, optimizer = entry.new()
    train(optimizer, parameters, range(3))
    optimizer.reset_moments()
    _, twins, twin = duplicate((entry, parameters, optimizer))
    for one, its_parameters in ((optimizer, parameters), (twin, twins)):
        train(one, its_parameters, range(3, 5))
    assert_same(snapshot(twin, twins), snapshot(optimizer, parameters), "the state of the rules is lost")
