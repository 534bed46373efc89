"""Values of options: which are refused, at first and in mid-training."""

import inspect
import math

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_lowbit.optim import SPAM, Adaptive, LowBitAdamW, Muon, StableSPAM
from lightning_lowbit.optim.adam import ClippedAdam
from lightning_lowbit.optim.rules import MUON, OPTIONS, check_options
from tests.optim.conformance.entries import subclasses
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
    **dict.fromkeys(("maximize", "matrices_only", "nesterov"), [True, False]),
    **dict.fromkeys(("gamma1", "gamma2", "gamma3", "momentum"), [0, 0.99999]),
    "element_clip": ["ada_clip", "spike_clip", None],
    "norm_clip": ["ada_gn", "grad_clip", None],
    **dict.fromkeys(("reset_interval", "total_steps"), [1, 10**9, None]),
    "warmup_steps": [0, 1, 150],
    "moments": ["fp32", "fp8"],
    "master_weights": ["fp16", None],
    "density": [1, 0.5, 1 / 3, 0.25, 1e-3],
    "ns_steps": [1, 5, 99],
    "adjust_lr_fn": ["original", "match_rms_adamw"],
    **dict.fromkeys(("adam_names", "stack_names"), [None, [], [".*mb"], ("emb.*", "emb")]),
}  # fmt: skip

BAD = {
    "lr": [-1.0, math.nan, math.inf, "1e-3", None, True, torch.ones(2)],
    "betas": [(1.0, 0.9), (True, 0.9), (0.9, math.nan), (0.9,), 0.9, (0.9, 0.99, 0.999), ("0.9", 0.9), None],
    **dict.fromkeys(
        ("eps", "norm_eps", "spike_threshold", "max_norm"), [0, -1e-8, math.nan, math.inf, None, "1", True, 2**70]
    ),
    "weight_decay": [-0.1, math.nan, math.inf, None, "0", True],
    **dict.fromkeys(("maximize", "matrices_only", "nesterov"), [0, 1, None, "True"]),
    **dict.fromkeys(("gamma1", "gamma2", "gamma3", "momentum"), [1.0, -0.1, 1.5, math.nan, None, "0.9", True]),
    "element_clip": ["AdaClip", "ada_gn", True, 0, ["ada_clip"]],
    "norm_clip": ["AdaGN", "ada_clip", True, 1.0],
    **dict.fromkeys(("reset_interval", "total_steps"), [0, -1, 2.5, 2.0, "2", True, math.inf]),
    "warmup_steps": [-1, 0.5, None, "0", True, math.nan],
    "moments": ["FP8", None, "bf16", True],
    "master_weights": ["fp32", True, False],
    "density": [0, -0.5, 1.5, 0.3, 0.75, math.nan, math.inf, None, "1", True, 5e-324],
    "ns_steps": [0, 100, 2.0, None, "5", True],
    "adjust_lr_fn": ["rms", None, True],
    **dict.fromkeys(("adam_names", "stack_names"), ["lm_head", ["("], [1], 3]),
}  # fmt: skip


def test_every_option_has_good_and_bad_values_here():
    assert set(GOOD) == set(BAD) == set(OPTIONS), "an option is missing from this file's tables"


@each(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_bad_options_are_refused(name, value):
    _, _, needed, advice = OPTIONS[name]
    with pytest.raises(ValueError) as caught:
        check_options("Me", {"lr": 1e-3, name: value})
    assert str(caught.value) == f"Me needs {name} to be {needed}, got {value!r}; {advice}."


NO_MOMENT = (Muon, "spike_clip")  # refused, for want of a second moment
FP32 = {LowBitAdamW: {"moments": "fp32"}}  # its default is fp8
WIDE = (torch.float32, torch.float64)


def keywords(kind):
    return [name for name in inspect.signature(kind).parameters if name not in ("params", "optimizer", "base")]


def parameters_for(kind):
    one, other = (Parameter(torch.ones(2, 2, dtype=torch.bfloat16)) for _ in range(2))  # master weights are of use
    return torch.optim.SGD([one]) if kind is Adaptive else [("m.emb.weight", one), ("m.weight", other)]


@pytest.mark.parametrize("kind", [*subclasses(ClippedAdam), Adaptive], ids=lambda kind: kind.__name__)
def test_every_argument_reaches_the_group_and_is_checked(kind):
    for name in keywords(kind):
        if name == "preset":  # stands for values of others
            continue
        values = [value for value in GOOD[name] if not (isinstance(value, Tensor) or (kind, value) == NO_MOMENT)]
        for value in values:
            group = kind(parameters_for(kind), **{name: value}).param_groups[0]
            assert group[name] == value, f"{kind.__name__}({name}={value}) has {group[name]} in its group"
        bad = next(bad for bad in BAD[name] if bad is not None)  # None of a γ is the preset's
        with pytest.raises(ValueError, match=f"{kind.__name__} needs {name} to be .*, got .*; .*"):
            kind(parameters_for(kind), **{name: bad})


@pytest.mark.parametrize("kind", [*subclasses(ClippedAdam)], ids=lambda kind: kind.__name__)
def test_defaults_are_good_and_a_group_may_have_any_option(kind):
    optimizer = kind([("layer.weight", Parameter(torch.ones(2, 2)))])
    others = {"norm_eps", *(() if kind is Muon else MUON)}
    assert set(optimizer.defaults) == set(OPTIONS) - others, "a default that no option describes, or no default"
    for name, values in BAD.items():
        if name in others:
            continue
        with pytest.raises(ValueError, match=f"{kind.__name__} needs {name} to be"):
            optimizer.add_param_group({"params": [Parameter(torch.ones(2))], name: values[0]})
        assert len(optimizer.param_groups) == 1, "a refused group was added nevertheless"


@each(
    "kind, dtype, option, words",
    [
        (SPAM, torch.float32, {"density": 0.5, "moments": "fp8"}, "density=0.5.*'moments': 'fp8'"),
        (SPAM, torch.float32, {"density": 0.5, "norm_clip": "ada_gn"}, "density=0.5.*'norm_clip': 'ada_gn'"),
        (SPAM, torch.float32, {"density": 0.5, "master_weights": "fp16"}, "density=0.5.*'master_weights': 'fp16'"),
        (StableSPAM, torch.float32, {"norm_eps": 1e-8}, "StableSPAM has no option norm_eps"),
        (StableSPAM, torch.float32, {"momentum": 0.9}, "StableSPAM has no option momentum"),
        (Adaptive, torch.float32, {"reset_interval": 3}, "Adaptive has no option reset_interval"),
        (Adaptive, torch.float32, {"moments": "fp8"}, "Adaptive has no option moments"),
        (LowBitAdamW, torch.float64, {"moments": "fp8"}, "float64.*moments='fp32'"),
        *((LowBitAdamW, dtype, {"master_weights": "fp16"}, f"got .*{dtype}.*leave it out") for dtype in WIDE),
    ],
)
def test_options_that_do_not_fit_are_refused(kind, dtype, option, words):
    """At first, and of a group that is added later: other options, of other classes, and for other dtypes."""
    first, second = Parameter(torch.ones(2, 2, dtype=torch.bfloat16)), Parameter(torch.ones(3, 3, dtype=dtype))
    optimizer = kind(torch.optim.SGD([first])) if kind is Adaptive else kind([first], **FP32.get(kind, {}))
    groups = [{"params": [second], **FP32.get(kind, {}), **option}]
    for build in (
        lambda: optimizer.add_param_group(groups[0]),
        lambda: kind(torch.optim.SGD(groups) if kind is Adaptive else groups),
    ):
        with pytest.raises(ValueError, match=words):
            build()
    assert len(optimizer.param_groups) == 1, "a refused group was added nevertheless"


@each(
    "kind, name, meant",
    [
        (StableSPAM, "weight_decy", "weight_decay"),
        (LowBitAdamW, "lrr", "lr"),
        (Adaptive, "beta", "betas"),  # of the wrapped AdamW
        (Adaptive, "norm_clips", "norm_clip"),
    ],
)
def test_a_misspelled_option_of_a_group_is_said_and_the_notes_of_others_are_not(kind, name, meant):
    notes = {"name": "head", "lr_scale": 0.5, "layer_id": 3, "initial_lr": 0.1}
    groups = [[{"params": [Parameter(torch.ones(2, 2))], **notes, **typo}] for typo in ({}, {name: 0.1})]

    def build(groups):
        return kind(torch.optim.AdamW(groups) if kind is Adaptive else groups)

    optimizer = build(groups[0])
    for add in (build, lambda groups: optimizer.add_param_group({**groups[0], "params": [Parameter(torch.ones(2))]})):
        with pytest.warns(UserWarning, match=f"{kind.__name__} has no option {name}.*Did you mean {meant}"):
            add(groups[1])


@each("option, dtype", [({"moments": "fp8"}, torch.float64), ({"master_weights": "fp16"}, torch.float32)])
def test_a_model_of_another_dtype_since_is_refused(option, dtype):
    """As that of Fabric's setup with 64-true, which comes after the optimizer."""
    optimizer = LowBitAdamW([parameter := Parameter(torch.ones(3, 3, dtype=torch.bfloat16))], **option)
    parameter.data = parameter.data.to(dtype)
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(ValueError, match=f"is for parameters in .*, got {dtype}"):
        optimizer.step()


KEPT = r"\(3, 4\) .* are kept, and not .*moments and master_weights cannot be changed in mid-training.*new optimizer"


@each(
    ("kind", "options", "then", "words"),
    [
        (StableSPAM, {}, {"norm_clip": "adagn"}, "StableSPAM needs norm_clip to be .*adagn"),
        (StableSPAM, {}, {"element_clip": "AdaClip"}, "StableSPAM needs element_clip to be .*AdaClip"),
        (Adaptive, {}, {"norm_clip": "adagn"}, "Adaptive needs norm_clip to be .*adagn"),
        (Adaptive, {}, {"element_clip": "AdaClip"}, "Adaptive needs element_clip to be .*AdaClip"),
        (StableSPAM, {}, {"moments": "FP8"}, "StableSPAM needs moments to be .*FP8"),
        (StableSPAM, {}, {"master_weights": "bf16"}, "StableSPAM needs master_weights to be .*bf16"),
        (Muon, {"adam_names": []}, {"adjust_lr_fn": "Original"}, "Muon needs adjust_lr_fn to be .*Original"),
        (Muon, {"adam_names": []}, {"moments": "fp8"}, KEPT),
        (StableSPAM, {"moments": "fp32"}, {"moments": "fp8"}, KEPT),
        (StableSPAM, {"moments": "fp8"}, {"moments": "fp32"}, KEPT),
        (StableSPAM, {"master_weights": None}, {"master_weights": "fp16"}, KEPT),
        (StableSPAM, {"master_weights": "fp16"}, {"master_weights": None}, KEPT),
    ],
)
def test_changes_in_mid_training_are_refused(kind, options, then, words):
    """Rules misspelt, and what the state is made of."""
    parameters = make_parameters(torch.bfloat16, [(3, 4), (3, 4)])
    groups = [{"params": [p]} for p in parameters]
    optimizer = kind(torch.optim.AdamW(groups) if kind is Adaptive else groups, **options)
    train(optimizer, parameters, range(2))
    before = snapshot(optimizer, parameters)
    optimizer.param_groups[-1].update(then)
    with pytest.raises(ValueError, match=words):
        train(optimizer, parameters, [2])
    assert_same(snapshot(optimizer, parameters), before, "a refused step left traces")
