"""StableSPAM's options against the slow reference, alone, together and per group; and what is refused."""

import inspect
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_lowbit.optim import SPAM, Adaptive, LowBitAdamW, StableSPAM, clipping
from lightning_lowbit.optim.guarded_adam import GuardedAdam
from lightning_lowbit.optim.options import OPTIONS, check_options
from lightning_lowbit.optim.stable_spam import PRESETS
from tests.optim.parameters import (
    assert_same,
    make_parameters,
    set_gradients,
    snapshot,
    train,
    use,
)
from tests.references.adaptive import norm_of
from tests.references.stable_spam import Reference, step_all

# fp32 loses some ulps a step; float64 shows what is computed in fp32 where it should not be.
PLACES: dict[str, tuple[torch.dtype, float, str]] = {
    "fp32, C++": (torch.float32, 1e-5, "C++"),
    "fp32": (torch.float32, 1e-5, "torch"),
    "fp64": (torch.float64, 1e-11, "torch"),
}
everywhere = pytest.mark.parametrize(("dtype", "tolerance", "code"), PLACES.values(), ids=PLACES)
SHAPES = [(), (7,), (0, 3), (5, 6), (3, 2, 2, 2)]
ADAM: dict[str, Any] = {"element_clip": None, "norm_clip": None, "reset_interval": None}

# The ablation table 4.6 of the thesis, with resets that come within a few steps.
TABLE_4_6: dict[str, dict[str, Any]] = {
    "Adam": ADAM,
    "MoRet": ADAM | {"reset_interval": 4},
    "MoRet, AdaClip": {"norm_clip": None, "reset_interval": 4},
    "MoRet, AdaGN": {"element_clip": None, "reset_interval": 4},
    "MoRet, AdaGN, AdaClip": {"reset_interval": 4},
    "MoRet, AdaGN, SpikeClip": {"element_clip": "spike_clip", "spike_threshold": 4.0, "reset_interval": 24},
    "MoRet, GradClip, AdaClip": {"norm_clip": "grad_clip", "reset_interval": 4},
}
ALONE: dict[str, dict[str, Any]] = {
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
}  # fmt: skip
TOGETHER: dict[str, dict[str, Any]] = {
    "all of Stable-SPAM": {
        "weight_decay": 0.1, "reset_interval": 5, "warmup_steps": 2, "total_steps": 9, "maximize": True,
        "matrices_only": True,
    },
    "all of SPAM": {
        "element_clip": "spike_clip", "spike_threshold": 4.0, "norm_clip": "grad_clip", "max_norm": 0.5,
        "weight_decay": 0.1, "reset_interval": 23, "warmup_steps": 4, "total_steps": 40, "maximize": True,
    },
}  # fmt: skip


def compare(optimizer: torch.optim.Optimizer, references: Sequence[Reference], steps: int, tolerance: float) -> int:
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
        for p, reference in zip(parameters, references, strict=True):
            torch.testing.assert_close(
                p.detach().double(), reference.parameter, rtol=tolerance, atol=tolerance,
                msg=lambda text, at=(step + 1, tuple(p.shape)): f"step, shape = {at}: {text}",
            )  # fmt: skip
    return cut


@everywhere
@pytest.mark.parametrize("options", [pytest.param(v, id=k) for k, v in (TABLE_4_6 | ALONE | TOGETHER).items()])
def test_rules(
    options: dict[str, Any], dtype: torch.dtype, tolerance: float, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(code, monkeypatch)
    monkeypatch.setattr(clipping, "PIECE_ON_CPU", 8)  # so that even small tensors are worked on in pieces
    parameters = make_parameters(dtype, SHAPES)
    clips = options.get("element_clip", "ada_clip")
    cut = compare(
        StableSPAM(parameters, lr=1e-2, **options),
        [Reference(p, lr=1e-2, **options) for p in parameters],
        steps=30 if clips == "spike_clip" else 12,
        tolerance=tolerance,
    )
    assert (cut > 0) == (clips is not None), f"{cut} elements were cut by {clips}: the test shows nothing"


def test_spike_clip_by_the_last_gradient_alone() -> None:
    """β2 = 0. In float64, as an element of 1e-6 after one of 1 moves its parameter by 1e6·lr, and no test is near."""
    options: dict[str, Any] = ADAM | {"element_clip": "spike_clip", "spike_threshold": 2.0, "betas": (0.9, 0.0)}
    parameters = make_parameters(torch.float64, SHAPES)
    references = [Reference(p, lr=1e-2, **options) for p in parameters]
    assert compare(StableSPAM(parameters, lr=1e-2, **options), references, 30, 1e-9), "nothing was cut"


@everywhere
def test_each_group_has_its_own_rules(
    dtype: torch.dtype, tolerance: float, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(code, monkeypatch)
    rules = list((TABLE_4_6 | TOGETHER).values())
    groups, references = [], []
    for options in rules:
        parameters = make_parameters(dtype, [(4,), (3, 5)])
        groups.append({"params": parameters, **options})
        references.extend(Reference(p, lr=1e-2, **options) for p in parameters)
    compare(StableSPAM(groups, lr=1e-2), references, steps=30, tolerance=tolerance)


def test_grad_clip_bounds_the_norm_over_all_groups_that_have_it_after_the_clip_of_elements() -> None:
    first, second, other = (Parameter(torch.zeros(2, dtype=torch.float64)) for _ in range(3))
    optimizer = StableSPAM(
        [
            {"params": [first], "element_clip": "ada_clip", "gamma3": 0.0},
            {"params": [second], "element_clip": None, "max_norm": 2.0},
            {"params": [other], "element_clip": None, "norm_clip": None},
        ],
        norm_clip="grad_clip",
    )
    for p, gradient in ((first, [3.0, 0.0]), (second, [0.0, 4.0]), (other, [100.0, 0.0])):
        p.grad = torch.tensor(gradient, dtype=torch.float64)
    optimizer.step()
    after = [optimizer.gradient_statistics()[p].norm_after.item() for p in (first, second, other)]
    # The first two have the norm 5 together. γ3 = 0 makes each maximum its own threshold, so that nothing is cut.
    assert after[:2] == pytest.approx([3 / 5, 4 * 2 / 5], rel=1e-6), f"norms after GradClip are {after[:2]}"
    assert other.detach().tolist() == pytest.approx([-1e-3, 0]), "GradClip reached a group that has none"


@pytest.mark.parametrize("scale", [1e-30, 1e15, 1e25, 1e36])
@pytest.mark.parametrize("count", [1, 6])
def test_grad_clip_bounds_gradients_of_any_size(count: int, scale: float) -> None:
    """Squares overflow fp32 from 1.8e19 on."""
    parameters = [Parameter(torch.ones(8)) for _ in range(count)]
    optimizer = StableSPAM(parameters, element_clip=None, norm_clip="grad_clip", betas=(0.0, 0.9))
    for p in parameters:
        p.grad = torch.linspace(-1, 1, 8) * scale
    optimizer.step()
    before = norm_of(*(p.grad for p in parameters if p.grad is not None))
    after = norm_of(*(optimizer.state[p]["mean"] for p in parameters))  # β1 = 0: the mean is the gradient itself
    assert after == pytest.approx(min(1, before), rel=1e-5), f"‖g‖ = {before} is {after} after GradClip"


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("given", [{}, {"gamma1": 0.5}, {"gamma2": 0.0}, {"gamma3": 0.25}])
def test_presets(name: str, given: dict[str, float]) -> None:
    expected = {"4-bit": (0.7, 0.9, 0.999), "bf16": (0.85, 0.99999, 0.999)}[name]
    group = StableSPAM([Parameter(torch.ones(2))], preset=name, **given).param_groups[0]  # type: ignore[arg-type]
    gammas = {f"gamma{i}": group[f"gamma{i}"] for i in (1, 2, 3)}
    assert gammas == dict(zip(gammas, expected, strict=True)) | given, f"preset {name} with {given} gives {gammas}"


def test_a_group_may_have_its_own_preset() -> None:
    groups = [
        {"params": [Parameter(torch.ones(2))], "preset": "bf16", "gamma2": 0.5},
        {"params": [Parameter(torch.ones(2))]},
    ]
    gammas = [(group["gamma1"], group["gamma2"]) for group in StableSPAM(groups).param_groups]
    assert gammas == [(0.85, 0.5), (0.7, 0.9)], f"γ1, γ2 of the groups are {gammas}"


def test_unknown_preset_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Unknown preset 'BF16'\. Did you mean 'bf16'\?"):
        StableSPAM([Parameter(torch.ones(2))], preset="BF16")
    optimizer = StableSPAM([Parameter(torch.ones(2))])
    with pytest.raises(ValueError, match="Unknown preset 'fp4'"):
        optimizer.add_param_group({"params": [Parameter(torch.ones(2))], "preset": "fp4"})


GOOD: dict[str, list[Any]] = {
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
BAD: dict[str, list[Any]] = {
    "lr": [-1.0, math.nan, math.inf, "1e-3", None, True],
    "betas": [(1.0, 0.9), (0.9, math.nan), (0.9,), 0.9, (0.9, 0.99, 0.999), ("0.9", 0.9), None],
    **dict.fromkeys(
        ("eps", "norm_eps", "spike_threshold", "max_norm"), [0, -1e-8, math.nan, math.inf, None, "1", True]
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


def test_every_option_has_good_and_bad_values_here() -> None:
    assert set(GOOD) == set(BAD) == set(OPTIONS), "an option is missing from this file's tables"


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in GOOD.items() for value in values])
def test_good_options_pass(name: str, value: Any) -> None:
    check_options("Me", {name: value, "an entry of another": object()})


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_bad_options_are_refused(name: str, value: Any) -> None:
    _, needed, advice = OPTIONS[name]
    with pytest.raises(ValueError) as caught:
        check_options("Me", {"lr": 1e-3, name: value})
    assert str(caught.value) == f"Me needs {name} to be {needed}, got {value!r}; {advice}."


def keywords(kind: type) -> list[str]:
    return [name for name in inspect.signature(kind).parameters if name not in ("params", "optimizer", "base")]


def parameters_for(kind: type) -> Any:
    parameter = Parameter(torch.ones(2, dtype=torch.bfloat16))  # in which master weights are of use
    return torch.optim.SGD([parameter]) if kind is Adaptive else [parameter]


def all_subclasses(kind: type) -> list[type]:
    return [kind for child in kind.__subclasses__() for kind in (child, *all_subclasses(child))]


@pytest.mark.parametrize("kind", [*all_subclasses(GuardedAdam), Adaptive], ids=lambda kind: kind.__name__)
def test_every_argument_reaches_the_group_and_is_checked(kind: Any) -> None:
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


@pytest.mark.parametrize("kind", all_subclasses(GuardedAdam), ids=lambda kind: kind.__name__)
def test_defaults_are_good_and_a_group_may_have_any_option(kind: Any) -> None:
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
    ],
)
def test_sparse_moments_are_refused_with_what_they_cannot_do(options: dict[str, Any], words: str) -> None:
    optimizer = SPAM([Parameter(torch.ones(2))])
    with pytest.raises(ValueError, match=f"density=0.5.*{words}"):
        optimizer.add_param_group({"params": [Parameter(torch.ones(2))], **options})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_master_weights_are_refused_where_they_are_of_no_use(dtype: torch.dtype) -> None:
    wide, low = Parameter(torch.ones(2, dtype=dtype)), Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = LowBitAdamW([low], master_weights="fp16")
    with pytest.raises(ValueError, match=f"bfloat16.*float16, got .*{dtype}.*.*leave"):
        optimizer.add_param_group({"params": [wide]})
    assert len(optimizer.param_groups) == 1, "a refused group was added nevertheless"


@pytest.mark.parametrize(
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
def test_rules_misspelt_in_mid_training_are_refused(kind: Any, name: str, value: str) -> None:
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
def test_what_state_is_made_of_cannot_be_changed_in_mid_training(name: str, first: Any, then: Any) -> None:
    parameters = make_parameters(torch.bfloat16, [(3, 4), (3, 4)])
    optimizer = StableSPAM([{"params": [p]} for p in parameters], **{name: first})
    words = rf"\(3, 4\) .* are kept, and not .*{name} cannot be changed in mid-training.*new optimizer"
    assert_refused_in_mid_training(optimizer, parameters, {name: then}, words.replace("moments c", "moments and .* c"))


def assert_refused_in_mid_training(
    optimizer: torch.optim.Optimizer, parameters: Sequence[Parameter], options: dict[str, Any], words: str
) -> None:
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
def test_options_of_other_classes_are_refused(kind: Any, option: dict[str, Any]) -> None:
    words = f"{kind.__name__} has no option {next(iter(option))}"
    first, second = make_parameters(shapes=[(2, 2), (3, 3)])
    optimizer = kind(torch.optim.SGD([first]) if kind is Adaptive else [first])
    with pytest.raises(ValueError, match=words):
        optimizer.add_param_group({"params": [second], **option})
    assert len(optimizer.param_groups) == 1, "a refused group was added nevertheless"
    groups = [{"params": [second], **option}]
    with pytest.raises(ValueError, match=words):
        kind(torch.optim.SGD(groups) if kind is Adaptive else groups)
