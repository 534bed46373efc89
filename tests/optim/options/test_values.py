"""Values of options: which are refused, at first and in mid-training."""

import inspect
import math

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_lowbit.optim import SPAM, Adaptive, StableSPAM
from lightning_lowbit.optim.adam import ClippedAdam
from lightning_lowbit.optim.rules import OPTIONS, check_options
from tests.optim.parameters import assert_same, make_parameters, snapshot, train
from tests.tables import each


def test_unknown_preset_is_refused():
    with pytest.raises(ValueError, match=r"Unknown preset 'BF16'\. Did you mean 'bf16'\?"):
        StableSPAM([Parameter(torch.ones(2))], preset="BF16")
    optimizer = StableSPAM([Parameter(torch.ones(2))])
    with pytest.raises(ValueError, match="Unknown preset 'fp4'"):
        optimizer.add_param_group({"params": [Parameter(torch.ones(2))], "preset": "fp4"})


GOOD = {
    "lr": [0, 1e-3, 1, torch.tensor(0.1)],
    "betas": [(0.9, 0.999), [0, 0]],
    **dict.fromkeys(("eps", "norm_eps", "spike_threshold", "max_norm"), [1e-30, 1, 5000.0]),
    "weight_decay": [0, 0.1, 2.0],
    **dict.fromkeys(("maximize", "matrices_only"), [True, False]),
    **dict.fromkeys(("gamma1", "gamma2", "gamma3"), [0, 0.99999]),
    "element_clip": ["ada_clip", "spike_clip", None],
    "norm_clip": ["ada_gn", "grad_clip", None],
    **dict.fromkeys(("reset_interval", "total_steps"), [1, 10**9, None]),
    "warmup_steps": [0, 1, 150],
    "moments": ["fp32", "fp8"],
    "master_weights": ["fp16", None],
    "density": [1, 0.5, 1 / 3, 0.25, 1e-3],
}  # fmt: skip

BAD = {
    "lr": [-1.0, math.nan, math.inf, "1e-3", None, True, torch.ones(2)],
    "betas": [(1.0, 0.9), (True, 0.9), (0.9, math.nan), (0.9,), 0.9, (0.9, 0.99, 0.999), ("0.9", 0.9), None],
    **dict.fromkeys(
        ("eps", "norm_eps", "spike_threshold", "max_norm"), [0, -1e-8, math.nan, math.inf, None, "1", True, 2**70]
    ),
    "weight_decay": [-0.1, math.nan, math.inf, None, "0", True],
    **dict.fromkeys(("maximize", "matrices_only"), [0, 1, None, "True"]),
    **dict.fromkeys(("gamma1", "gamma2", "gamma3"), [1.0, -0.1, 1.5, math.nan, None, "0.9", True]),
    "element_clip": ["AdaClip", "ada_gn", True, 0, ["ada_clip"]],
    "norm_clip": ["AdaGN", "ada_clip", True, 1.0],
    **dict.fromkeys(("reset_interval", "total_steps"), [0, -1, 2.5, 2.0, "2", True, math.inf]),
    "warmup_steps": [-1, 0.5, None, "0", True, math.nan],
    "moments": ["FP8", None, "bf16", True],
    "master_weights": ["fp32", True, False],
    "density": [0, -0.5, 1.5, 0.3, 0.75, math.nan, math.inf, None, "1", True, 5e-324],
}  # fmt: skip


def test_every_option_has_good_and_bad_values_here():
    assert set(GOOD) == set(BAD) == set(OPTIONS), "an option is missing from this file's tables"


@each(("name", "value"), [(name, value) for name, values in GOOD.items() for value in values])
def test_good_options_pass(name, value):
    check_options("Me", {name: value, "an entry of another": object()})


@each(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_bad_options_are_refused(name, value):
    _, _, needed, advice = OPTIONS[name]
    with pytest.raises(ValueError) as caught:
        check_options("Me", {"lr": 1e-3, name: value})
    assert str(caught.value) == f"Me needs {name} to be {needed}, got {value!r}; {advice}."


def keywords(kind):
    return [name for name in inspect.signature(kind).parameters if name not in ("params", "optimizer", "base")]


def parameters_for(kind):
    parameter = Parameter(torch.ones(2, dtype=torch.bfloat16))  # in which master weights are of use
    return torch.optim.SGD([parameter]) if kind is Adaptive else [parameter]


def all_subclasses(kind):
    return [kind for child in kind.__subclasses__() for kind in (child, *all_subclasses(child))]


@pytest.mark.parametrize("kind", [*all_subclasses(ClippedAdam), Adaptive], ids=lambda kind: kind.__name__)
def test_every_argument_reaches_the_group_and_is_checked(kind):
    for name in keywords(kind):
        if name == "preset":  # stands for values of others
            continue
        values = [value for value in GOOD[name] if not isinstance(value, Tensor)]
        for value in values:
            group = kind(parameters_for(kind), **{name: value}).param_groups[0]
            assert group[name] == value, f"{kind.__name__}({name}={value}) has {group[name]} in its group"
        bad = next(bad for bad in BAD[name] if bad is not None)  # None of a γ is the preset's
        with pytest.raises(ValueError, match=f"{kind.__name__} needs {name} to be .*, got .*; .*"):
            kind(parameters_for(kind), **{name: bad})


@pytest.mark.parametrize("kind", all_subclasses(ClippedAdam), ids=lambda kind: kind.__name__)
def test_defaults_are_good_and_a_group_may_have_any_option(kind):
    optimizer = kind([Parameter(torch.ones(2, 2))])
    assert set(optimizer.defaults) == set(OPTIONS) - {"norm_eps"}, "a default that no option describes, or no default"
    for name, values in BAD.items():
        with pytest.raises(ValueError, match=f"{kind.__name__} needs {name} to be"):
            optimizer.add_param_group({"params": [Parameter(torch.ones(2))], name: values[0]})
        assert len(optimizer.param_groups) == 1, "a refused group was added nevertheless"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"density": 0.5, "moments": "fp8"}, "'moments': 'fp8'"),
        ({"density": 0.5, "norm_clip": "ada_gn"}, "'norm_clip': 'ada_gn'"),
        ({"density": 0.5, "master_weights": "fp16"}, "'master_weights': 'fp16'"),
    ],
)
def test_sparse_moments_are_refused_with_what_they_cannot_do(options, words):
    optimizer = SPAM([Parameter(torch.ones(2))])
    with pytest.raises(ValueError, match=f"density=0.5.*{words}"):
        optimizer.add_param_group({"params": [Parameter(torch.ones(2))], **options})


@each(
    ("kind", "name", "value"),
    [
        (StableSPAM, "norm_clip", "adagn"),
        (StableSPAM, "element_clip", "AdaClip"),
        (Adaptive, "norm_clip", "adagn"),
        (Adaptive, "element_clip", "AdaClip"),
        (StableSPAM, "moments", "FP8"),
        (StableSPAM, "master_weights", "bf16"),
    ],
)
def test_rules_misspelt_in_mid_training_are_refused(kind, name, value):
    parameters = make_parameters(shapes=[(3, 4), (4,)])
    groups = [{"params": [p]} for p in parameters]
    optimizer = kind(torch.optim.AdamW(groups) if kind is Adaptive else groups)
    assert_refused_in_mid_training(
        optimizer, parameters, {name: value}, f"{kind.__name__} needs {name} to be .*{value}"
    )


@pytest.mark.parametrize(
    ("name", "first", "then"),
    [
        ("moments", "fp32", "fp8"),
        ("moments", "fp8", "fp32"),
        ("master_weights", None, "fp16"),
        ("master_weights", "fp16", None),
    ],
)
def test_what_state_is_made_of_cannot_be_changed_in_mid_training(name, first, then):
    parameters = make_parameters(torch.bfloat16, [(3, 4), (3, 4)])
    optimizer = StableSPAM([{"params": [p]} for p in parameters], **{name: first})
    words = rf"\(3, 4\) .* are kept, and not .*{name} cannot be changed in mid-training.*new optimizer"
    assert_refused_in_mid_training(optimizer, parameters, {name: then}, words.replace("moments c", "moments and .* c"))


def assert_refused_in_mid_training(optimizer, parameters, options, words):
    train(optimizer, parameters, range(2))
    before = snapshot(optimizer, parameters)
    optimizer.param_groups[-1].update(options)
    with pytest.raises(ValueError, match=words):
        train(optimizer, parameters, [2])
    assert_same(snapshot(optimizer, parameters), before, "a refused step left traces")


@pytest.mark.parametrize(
    ("kind", "option"),
    [(StableSPAM, {"norm_eps": 1e-8}), (Adaptive, {"reset_interval": 3}), (Adaptive, {"moments": "fp8"})],
)
def test_options_of_other_classes_are_refused(kind, option):
    words = f"{kind.__name__} has no option {next(iter(option))}"
    first, second = make_parameters(shapes=[(2, 2), (3, 3)])
    optimizer = kind(torch.optim.SGD([first]) if kind is Adaptive else [first])
    with pytest.raises(ValueError, match=words):
        optimizer.add_param_group({"params": [second], **option})
    assert len(optimizer.param_groups) == 1, "a refused group was added nevertheless"
    groups = [{"params": [second], **option}]
    with pytest.raises(ValueError, match=words):
        kind(torch.optim.SGD(groups) if kind is Adaptive else groups)
