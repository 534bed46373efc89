"""Steps of the optimizers by the Triton kernels: few launches, and the results of plain torch."""

import itertools
from contextlib import nullcontext
from operator import is_
from unittest import mock

import pytest
import torch
from torch.nn import Parameter

from lightning_lowbit.kernels.gpu import adam as gpu
from lightning_lowbit.optim import SPAM, Adaptive, LowBitAdamW, StableSPAM, kernels
from tests.kernels import steps
from tests.kernels.passes import Launches
from tests.optim.parameters import NoHostSync, set_gradients

OPTIMIZERS = {
    "StableSPAM": StableSPAM,
    "FP8": lambda p: StableSPAM(p, moments="fp8", weight_decay=0.1),
    "SPAM": SPAM,
    "LowBitAdamW": LowBitAdamW,
    "Adaptive": lambda p: Adaptive(torch.optim.AdamW(p, fused=True)),
}


def llama(layers):
    """The parameters of a small LLaMA: 9 tensors per layer, and 3."""
    layer = [(64, 64)] * 4 + [(172, 64)] * 2 + [(64, 172), (64,), (64,)]
    return [Parameter(torch.randn(shape)) for shape in [(512, 64), *layer * layers, (64,), (512, 64)]]


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_launches_do_not_depend_on_the_number_of_parameters(make):
    counts = []
    for layers in (2, 8):
        parameters, count = llama(layers), Launches()
        optimizer = make(parameters)
        with steps.launched(count.counting(lambda launch: None)):
            for seed in range(2):
                set_gradients(parameters, seed)
                count.number = 0
                with count, NoHostSync():
                    optimizer.step()
        counts.append(count.number)
    assert counts[0] == counts[1], f"{counts[0]} launches for 21 tensors, {counts[1]} for 75"
    assert counts[1] <= 130


def test_scalars_of_states_are_views_of_one_tensor_until_they_are_replaced():
    dtypes = {"steps": torch.int64, "norm": torch.float32, "mean": torch.float32}
    states = [{"steps": torch.tensor(i), "norm": torch.tensor(2.0 * i), "mean": torch.tensor(-1.0)} for i in range(3)]
    scalars = gpu.Scalars(states, dtypes)
    scalars.store({name: values + 1 for name, values in scalars.load().items()})
    assert [state["steps"].item() for state in states] == [1, 2, 3] and states[2]["norm"] == 5.0
    assert len({state[name].untyped_storage().data_ptr() for state in states for name in state}) == 2  # of two dtypes

    views = [*states[1].values()]
    assert torch.equal(gpu.Scalars(states, dtypes, scalars).load()["norm"], torch.tensor([1.0, 3.0, 5.0]))
    assert all(map(is_, states[1].values(), views))
    states[1]["norm"] = torch.tensor(7.0)  # loaded
    loaded = gpu.Scalars(states, dtypes, scalars)
    assert loaded.load()["norm"].tolist() == [1.0, 7.0, 5.0] and loaded.load()["mean"].tolist() == [0.0, 0.0, 0.0]
    states[2]["norm"].data = torch.tensor(9.0)  # moved
    assert gpu.Scalars(states, dtypes, loaded).load()["norm"].tolist() == [1.0, 7.0, 9.0]


def test_an_optimizer_whose_parameters_move_between_devices_steps_on_each():
    parameters = llama(1)
    optimizer = StableSPAM(parameters)
    for is_on_gpu in (False, True, False):
        set_gradients(parameters, seed=0)
        with steps.launched(lambda launch: None) if is_on_gpu else nullcontext():
            optimizer.step()


def test_the_comparison_before_the_first_use(run):
    assert run(steps.sample_is_near)


def test_kernels_that_are_wrong_or_do_not_compile_are_not_used(monkeypatch):
    for results, why in (
        ([[torch.ones(3)], [torch.full((3,), torch.nan)]], "differs from the plain code"),
        (RuntimeError("no such instruction"), "fails .RuntimeError: no such instruction."),
    ):
        monkeypatch.setattr(kernels, "_sample_results", mock.Mock(side_effect=results))
        with pytest.warns(UserWarning, match=f"for the steps of optimizers {why} on meta"):
            assert not kernels.triton_agrees.__wrapped__(torch.device("meta"))


RULES = {"element_clip": "ada_clip", "norm_clip": "ada_gn"}
SPIKES = {"element_clip": "spike_clip", "spike_threshold": 0.5}
OTHERS = {"weight_decay": 0.1, "reset_interval": 2, "warmup_steps": 2, "maximize": True}


def test_steps_are_those_of_plain_torch(run):
    cases = [
        (RULES, torch.float32),
        ({"moments": "fp8", **SPIKES, **OTHERS}, torch.bfloat16),
        ({"moments": "fp8", "master_weights": "fp16", "norm_clip": "grad_clip"}, torch.float16),
    ]
    assert run(steps.differences, [({"lr": 1e-2, **options}, dtype) for options, dtype in cases]) == []


def test_a_shard_whose_gradient_is_elsewhere(run):
    """It decays, and so do its moments."""
    options = {"lr": 1e-2, "moments": "fp8", "norm_clip": "ada_gn", "weight_decay": 0.1}
    assert run(steps.differences_without_a_gradient, options, torch.float32) == []
    assert run(steps.differences_without_a_gradient, {}, torch.float32, steps.small_adaptive) == []


FAILING = [
    ({"moments": "fp8", "master_weights": "fp16", **SPIKES, "norm_clip": None}, torch.bfloat16),  # sums in the update
    ({"moments": "fp8", **RULES}, torch.float32),  # and before it
]


@pytest.mark.fast("0-sums in the update", "1-sums before it")
@pytest.mark.parametrize("options, dtype", FAILING, ids=["sums in the update", "sums before it"])
@pytest.mark.parametrize("first", range(3))
def test_plain_torch_ends_a_step_in_which_a_launch_fails(run, options, dtype, first):
    for number in itertools.count(first, 3):
        texts, launches, warned = run(steps.differences_after_a_failure, {"lr": 1e-2, **options}, dtype, number)
        assert texts == [], f"launch {number}"
        if launches <= number:  # there is no such launch
            break
        assert launches == number + 1, f"{launches} launches after the failure of launch {number}"
        [message] = warned
        assert message.startswith("The Triton kernel for the steps of optimizers fails (NotImplementedError: no such")
    assert warned == [], "a launch failed by itself"
    assert number > 9


def test_other_optimizers_get_the_same_gradients(run):
    assert run(steps.differences, [({}, torch.float32), (SPIKES, torch.float32)], steps.small_adaptive) == []


@pytest.mark.slow
def test_steps_with_all_options_are_those_of_plain_torch(run):
    every = itertools.product(("fp32", "fp8"), (RULES, SPIKES, {}), ({}, OTHERS))
    for number, (moments, rules, others) in enumerate(every):
        options = {"lr": 1e-2, "moments": moments, **rules, **others}
        dtype = torch.bfloat16 if number % 3 else torch.float32
        master = "fp16" if number % 3 == 1 else None
        assert run(steps.differences, [({**options, "master_weights": master}, dtype)]) == []
