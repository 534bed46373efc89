"""StableSPAM's options against the slow reference, alone, together and per group."""

import math

import pytest
import torch
from torch.nn import Parameter

from lightning_lowbit.optim import StableSPAM
from lightning_lowbit.optim.adam import PRESETS
from lightning_lowbit.optim.optimizer import GradientStatistics
from lightning_lowbit.optim.passes import in_pieces
from tests.optim.parameters import assert_close, assert_same, make_parameters, set_gradients
from tests.references.adaptive import norm_of
from tests.references.stable_spam import Reference, step_all
from tests.tables import each

# fp32 loses some ulps a step; float64 shows what is computed in fp32 where it should not be.
PLACES = {
    "fp32, C++": (torch.float32, 1e-5, "C++"),
    "fp32": (torch.float32, 1e-5, "torch"),
    "fp64": (torch.float64, 1e-11, "torch"),
}

everywhere = pytest.mark.parametrize(("dtype", "tolerance", "code"), PLACES.values(), ids=PLACES, indirect=["code"])
SHAPES = [(), (7,), (0, 3), (5, 6), (3, 2, 2, 2)]
ADAM = {"element_clip": None, "norm_clip": None, "reset_interval": None}


# The ablation table 4.6 of the thesis, with resets that come within a few steps.
TABLE_4_6 = {
    "Adam": ADAM,
    "MoRet": ADAM | {"reset_interval": 4},
    "MoRet, AdaClip": {"norm_clip": None, "reset_interval": 4},
    "MoRet, AdaGN": {"element_clip": None, "reset_interval": 4},
    "MoRet, AdaGN, AdaClip": {"reset_interval": 4},
    "MoRet, AdaGN, SpikeClip": {"element_clip": "spike_clip", "spike_threshold": 4.0, "reset_interval": 24},
    "MoRet, GradClip, AdaClip": {"norm_clip": "grad_clip", "reset_interval": 4},
}

ALONE = {
    "AdaClip": ADAM | {"element_clip": "ada_clip"},
    "SpikeClip": ADAM | {"element_clip": "spike_clip", "spike_threshold": 4.0},
    "AdaGN": ADAM | {"norm_clip": "ada_gn"},
    "GradClip": ADAM | {"norm_clip": "grad_clip", "max_norm": 2.0},
    "GradClip of all that is small": ADAM | {"norm_clip": "grad_clip", "max_norm": 1e6},
    "weight decay": ADAM | {"weight_decay": 0.5},
    "maximize": {"maximize": True, "weight_decay": 0.1},
    "matrices only": {"matrices_only": True, "reset_interval": 3, "warmup_steps": 2, "gamma3": 0.5},
    "reset in each step": {"reset_interval": 1},
    "warm-up": {"reset_interval": 5, "warmup_steps": 3, "weight_decay": 0.5},
    "warm-up longer than the interval": {"reset_interval": 4, "warmup_steps": 9},
    "warm-up without resets": {"reset_interval": None, "warmup_steps": 5},
    "falling decays": {"total_steps": 8, "reset_interval": None},
    "falling decays, resets": {"total_steps": 6, "reset_interval": 4, "betas": (0.95, 0.9), "gamma1": 0.9},
    "falling decays of one step": {"total_steps": 1},
    "preset": {"gamma1": 0.85, "gamma2": 0.99999, "gamma3": 0.9},
    "no memory": {"betas": (0.0, 0.0), "gamma1": 0},
}  # fmt: skip

TOGETHER = {
    "all of Stable-SPAM": {
        "weight_decay": 0.1, "reset_interval": 5, "warmup_steps": 2, "total_steps": 9, "maximize": True,
        "matrices_only": True,
    },
    "all of SPAM": {
        "element_clip": "spike_clip", "spike_threshold": 4.0, "norm_clip": "grad_clip", "max_norm": 0.5,
        "weight_decay": 0.1, "reset_interval": 23, "warmup_steps": 4, "total_steps": 40, "maximize": True,
    },
}  # fmt: skip


def compare(optimizer, references, steps, tolerance):
    """Trains both, with a parameter that has no gradient and a skipped step on the way; how many elements were cut."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    cut = 0
    for step in range(steps):
        set_gradients(parameters, seed=step)
        if step == 2:
            parameters[1].grad = None
        if step == 3:
            parameters[-1].grad = torch.full_like(parameters[-1], math.nan)
        step_all(references, [p.grad for p in parameters])
        optimizer.step()
        cut += sum(reference.guard.clipped for reference in references)
        assert_close(parameters, [reference.parameter for reference in references], tolerance, f"step {step + 1}")
        saw = optimizer.gradient_statistics() if step != 3 else {}
        for p, reference in zip(parameters, references, strict=True):
            if p in saw:
                assert_saw(saw[p], p, reference, tolerance)
    return cut


def assert_saw(statistics, parameter, reference, tolerance):
    guard, where = reference.guard, f"of {tuple(parameter.shape)} in step {reference.t}"
    measures = (guard.element_clip, guard.norm_clip) != (None, None)
    norms = (guard.norm, guard.norm_after) if measures else (math.nan, math.nan)
    exact = (guard.maximum, guard.threshold, guard.clipped, *norms, reference.k)
    for name, value, expected in zip(GradientStatistics._fields, statistics, exact, strict=True):
        assert value.dim() == 0 and value.device == parameter.device, f"{name} {where} is {value}"
        near = pytest.approx(expected, rel=tolerance, abs=tolerance / 100, nan_ok=True)
        assert value.item() == near, f"{name} {where}: {value}, not {expected}"


@pytest.mark.pairwise(1)
@everywhere
@pytest.mark.parametrize("options", [pytest.param(v, id=k) for k, v in (TABLE_4_6 | ALONE | TOGETHER).items()])
def test_rules(options, dtype, tolerance, code, within):
    within(in_pieces(8))
    parameters = make_parameters(dtype, SHAPES)
    clips = options.get("element_clip", "ada_clip")
    cut = compare(
        StableSPAM(parameters, lr=1e-2, **options),
        [Reference(p, lr=1e-2, **options) for p in parameters],
        steps=30 if clips == "spike_clip" else 12,
        tolerance=tolerance,
    )
    assert (cut > 0) == (clips is not None), f"{cut} elements were cut by {clips}: the test shows nothing"


def test_spike_clip_by_the_last_gradient_alone():
    """β2 = 0. In float64, as an element of 1e-6 after one of 1 moves its parameter by 1e6·lr, and no test is near."""
    options = ADAM | {"element_clip": "spike_clip", "spike_threshold": 2.0, "betas": (0.9, 0.0)}
    parameters = make_parameters(torch.float64, SHAPES)
    references = [Reference(p, lr=1e-2, **options) for p in parameters]
    assert compare(StableSPAM(parameters, lr=1e-2, **options), references, 30, 1e-9), "nothing was cut"


@everywhere
def test_each_group_has_its_own_rules(dtype, tolerance, code):
    rules = list((TABLE_4_6 | TOGETHER).values())
    groups, references = [], []
    for options in rules:
        parameters = make_parameters(dtype, [(4,), (3, 5)])
        groups.append({"params": parameters, **options})
        references.extend(Reference(p, lr=1e-2, **options) for p in parameters)
    compare(StableSPAM(groups, lr=1e-2), references, steps=30, tolerance=tolerance)


@each("scale", [1e-30, 1e15, 1e25, 1e36])
@each("count", [1, 6])
def test_grad_clip_bounds_gradients_of_any_size(count, scale):
    """Squares overflow fp32 from 1.8e19 on."""
    parameters = [Parameter(torch.ones(8)) for _ in range(count)]
    optimizer = StableSPAM(parameters, element_clip=None, norm_clip="grad_clip", betas=(0.0, 0.9))
    for p in parameters:
        p.grad = torch.linspace(-1, 1, 8) * scale
    optimizer.step()
    before = norm_of(*(p.grad for p in parameters if p.grad is not None))
    after = norm_of(*(optimizer.state[p]["mean"] for p in parameters))  # β1 = 0: the mean is the gradient itself
    assert after == pytest.approx(min(1, before), rel=1e-5), f"‖g‖ = {before} is {after} after GradClip"


@each("name", PRESETS)
@each("given", [{}, {"gamma1": 0.5}, {"gamma2": 0.0}, {"gamma3": 0.25}])
def test_presets(name, given):
    expected = {"4-bit": (0.7, 0.9, 0.999), "bf16": (0.85, 0.99999, 0.999)}[name]
    group = StableSPAM([Parameter(torch.ones(2))], preset=name, **given).param_groups[0]
    gammas = {f"gamma{i}": group[f"gamma{i}"] for i in (1, 2, 3)}
    assert gammas == dict(zip(gammas, expected, strict=True)) | given, f"preset {name} with {given} gives {gammas}"


def test_a_group_may_have_its_own_preset():
    groups = [
        {"params": [Parameter(torch.ones(2))], "preset": "bf16", "gamma2": 0.5},
        {"params": [Parameter(torch.ones(2))]},
    ]
    gammas = [(group["gamma1"], group["gamma2"]) for group in StableSPAM(groups).param_groups]
    assert gammas == [(0.85, 0.5), (0.7, 0.9)], f"γ1, γ2 of the groups are {gammas}"


def test_bf16_update_is_the_fp32_update_rounded_once():
    low = make_parameters(torch.bfloat16)
    high = [Parameter(p.detach().float()) for p in low]
    set_gradients(low, seed=0)
    for p, q in zip(low, high, strict=True):
        q.grad = p.grad.float()
    StableSPAM(low, lr=0.1, weight_decay=0.1).step()
    StableSPAM(high, lr=0.1, weight_decay=0.1).step()
    assert_same([p.detach() for p in low], [q.detach().bfloat16() for q in high], "bf16 is not fp32 rounded")
