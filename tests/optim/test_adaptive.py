"""Adaptive against reference guards, and the wrapped optimizer alone on what these let through."""

import math

import pytest
import torch
from torch.nn import Parameter

from lightning_lowbit.optim import SPAM, Adaptive, LowBitAdamW, StableSPAM
from lightning_lowbit.optim.passes import in_pieces
from tests.optim.parameters import assert_close, assert_same, make_parameters, set_gradients, train
from tests.references.adaptive import Guard, guard_all
from tests.tables import each

SHAPES = [(), (7,), (5, 6), (3, 2, 2, 2)]


def lion(parameters):
    return pytest.importorskip("pytorch_optimizer").Lion(parameters, lr=1e-3)


OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    # With this dampening, a momentum that begins with anything but the first gradient shows, with zeros too.
    "SGD, fused": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, dampening=0.5, fused=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, nesterov=True),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
    "Lion": lion,
}
RULES = {
    "ada_clip, ada_gn": {"gamma3": 0.9},
    "ada_clip": {"norm_clip": None, "gamma3": 0.9},
    "ada_gn": {"element_clip": None, "gamma1": 0.85, "gamma2": 0.99999, "norm_eps": 1e-3},
    "ada_clip, grad_clip": {"norm_clip": "grad_clip", "max_norm": 0.5, "gamma3": 0.9},
    "none": {"element_clip": None, "norm_clip": None},
}


def follow_reference(adaptive, plain, guarding, steps, tolerance):
    """Trains both, with a skipped step on the way; ``plain`` has reference guards before it. How many were cut."""
    parameters = [p for group in adaptive.param_groups for p in group["params"]]
    twins = [p for group in plain.param_groups for p in group["params"]]
    cut = 0
    for step in range(steps):
        set_gradients(parameters, seed=step)
        if step == 3:
            parameters[-1].grad = torch.full_like(parameters[-1], math.nan)
        gradients = [p.grad for p in parameters]
        copies = [gradient.clone() for gradient in gradients]
        second_moments = [uncorrected_second_moment(plain, twin) for twin in twins]
        if (guarded := guard_all(guarding, gradients, second_moments)) is not None:
            for twin, gradient in zip(twins, guarded, strict=True):
                twin.grad = gradient.to(twin.dtype)
            plain.step()
        adaptive.step()
        cut += sum(guard.clipped for guard in guarding)
        assert all(p.grad is gradient for p, gradient in zip(parameters, gradients, strict=True)), "another p.grad"
        if guarded is None:
            assert_same([g.nan_to_num() for g in gradients], [g.nan_to_num() for g in copies], "a skipped step: p.grad")
        else:
            assert_close(gradients, guarded, tolerance, f"gradients of step {step + 1}")
        assert_close(parameters, twins, tolerance, f"step {step + 1}")
    return cut


def uncorrected_second_moment(optimizer, parameter):
    state = optimizer.state.get(parameter, {})
    return state["exp_avg_sq"].double() if "exp_avg_sq" in state else None


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("options", RULES.values(), ids=RULES)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_reference(make, options, within):
    """In float64, where only the order of sums differs; Lion's signs are then safe, too."""
    within(in_pieces(8))
    parameters, twins = make_parameters(torch.float64, SHAPES), make_parameters(torch.float64, SHAPES)
    guarding = [Guard(**options) for _ in parameters]
    cut = follow_reference(Adaptive(make(parameters), **options), make(twins), guarding, 10, 1e-9)
    assert (cut > 0) == (options.get("element_clip", "ada_clip") == "ada_clip"), f"{cut} elements were cut"


@each("options", RULES.values())
def test_reference_in_fp32(options, code):
    parameters, twins = make_parameters(shapes=SHAPES), make_parameters(shapes=SHAPES)
    make = OPTIMIZERS["AdamW"]
    follow_reference(Adaptive(make(parameters), **options), make(twins), [Guard(**options) for _ in twins], 10, 1e-5)


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("make", [OPTIMIZERS["AdamW"], OPTIMIZERS["AdamW, fused"]], ids=["AdamW", "AdamW, fused"])
@pytest.mark.parametrize("norm_clip", ["ada_gn", "grad_clip", None])
def test_spike_clip_by_the_wrapped_second_moment(make, norm_clip, within):
    within(in_pieces(8))
    options = {"element_clip": "spike_clip", "norm_clip": norm_clip, "spike_threshold": 4.0}
    parameters, twins = make_parameters(torch.float64, SHAPES), make_parameters(torch.float64, SHAPES)
    guarding = [Guard(**options) for _ in parameters]
    cut = follow_reference(Adaptive(make(parameters), **options), make(twins), guarding, 30, 1e-9)
    assert cut, "no spike was cut: the test shows nothing"


@pytest.mark.parametrize("name", ["SGD", "Lion", "Adafactor"])
def test_spike_clip_is_refused_where_there_is_no_second_moment(name):
    parameters = make_parameters(shapes=SHAPES)
    optimizer = Adaptive(OPTIMIZERS[name](parameters), element_clip="spike_clip")
    words = f"{type(optimizer.optimizer).__name__} keeps no 'exp_avg_sq': use element_clip='ada_clip'"
    with pytest.raises(ValueError, match=words):  # an optimizer's state shows after its first step
        train(optimizer, parameters, range(2))


def test_groups_have_their_own_options_and_grad_clip_is_over_all_that_have_it():
    rules = list(RULES.values())
    groups, twin_groups, guarding = [], [], []
    for options in rules:
        groups.append({"params": make_parameters(torch.float64, SHAPES), **options})
        twin_groups.append({"params": make_parameters(torch.float64, SHAPES)})
        guarding.extend(Guard(**options) for _ in SHAPES)
    second = {"params": make_parameters(torch.float64, [(4, 4)]), "norm_clip": "grad_clip", "max_norm": 2.0}
    guarding.append(Guard(norm_clip="grad_clip", max_norm=2.0))
    adaptive = Adaptive(torch.optim.AdamW(groups, lr=1e-2))
    adaptive.add_param_group(second)
    plain = torch.optim.AdamW([*twin_groups, {"params": make_parameters(torch.float64, [(4, 4)])}], lr=1e-2)
    follow_reference(adaptive, plain, guarding, 8, 1e-9)


def test_matrices_only_leaves_vectors_as_they_are():
    parameters, twins = make_parameters(torch.float64, SHAPES), make_parameters(torch.float64, SHAPES)
    free = {"element_clip": None, "norm_clip": None}
    guarding = [Guard(**free), Guard(**free), Guard(gamma3=0.5), Guard(gamma3=0.5)]
    make = OPTIMIZERS["AdamW"]
    follow_reference(Adaptive(make(parameters), matrices_only=True, gamma3=0.5), make(twins), guarding, 8, 1e-9)


def test_the_gradients_are_restored_when_the_wrapped_optimizer_raises():
    class Broken(torch.optim.SGD):
        def step(self, closure=None):
            raise RuntimeError("out of order")

    [parameter] = make_parameters(shapes=[(3, 4)])
    set_gradients([parameter], seed=0)
    gradient = parameter.grad
    with pytest.raises(RuntimeError, match="out of order"):
        Adaptive(Broken([parameter])).step()
    assert parameter.grad is gradient, "a copy stayed in p.grad"


def test_gradients_are_clipped_in_their_own_memory(code):
    parameters = make_parameters(shapes=[(3, 4), (5,)])
    optimizer, places, seen = Adaptive(torch.optim.SGD(parameters, lr=0.0), norm_clip="grad_clip"), [], []
    optimizer.optimizer.register_step_pre_hook(lambda *_: seen.extend(p.grad.data_ptr() for p in parameters))
    for p in parameters:
        p.grad = torch.full_like(p, 10.0)
        places.append(p.grad.data_ptr())
    optimizer.step()
    norm = torch.cat([p.grad.flatten() for p in parameters]).norm()
    torch.testing.assert_close(norm, torch.tensor(1.0), msg="gradients are left as they were")
    assert seen == places, "the wrapped optimizer saw copies of gradients"


def test_a_gradient_laid_out_unlike_its_parameter_is_clipped_in_a_copy():
    """The wrapped optimizer sees the parameter's layout, and the gradient stays as it was."""
    [parameter], seen = make_parameters(shapes=[(3, 4)]), []
    parameter.grad = gradient = torch.full((4, 3), 10.0).t()
    optimizer = Adaptive(torch.optim.SGD([parameter], lr=0.0), norm_clip="grad_clip")
    optimizer.optimizer.register_step_pre_hook(lambda *_: seen.append(parameter.grad))
    optimizer.step()
    assert seen[0].stride() == parameter.stride() and float(seen[0].norm()) == pytest.approx(1)
    assert parameter.grad is gradient and bool((gradient == 10).all()), "p.grad was not restored"


def test_base_makes_the_optimizer_from_parameters_and_groups():
    parameters = make_parameters(shapes=[(3, 4), (4,)])
    optimizer = Adaptive(iter(parameters), torch.optim.SGD)
    assert type(optimizer.optimizer) is torch.optim.SGD and optimizer.param_groups[0]["params"] == parameters
    groups = [{"params": parameters[:1], "lr": 0.5}, {"params": parameters[1:], "norm_clip": None}]
    optimizer = Adaptive(groups, base=lambda given: torch.optim.SGD(given, lr=0.1), gamma1=0.25)
    found = [(group["lr"], group["norm_clip"], group["gamma1"]) for group in optimizer.param_groups]
    assert found == [(0.5, "ada_gn", 0.25), (0.1, None, 0.25)], f"lr, norm_clip and gamma1 of the groups are {found}"


def test_an_option_of_the_wrapped_optimizer_may_have_a_name_and_other_values_of_one_here():
    parameters = make_parameters(shapes=[(3, 4)])
    before, optimizer = parameters[0].detach().clone(), Adaptive(torch.optim.Muon(parameters))
    set_gradients(parameters, seed=0)
    optimizer.step()
    assert optimizer.param_groups[0]["adjust_lr_fn"] is None and not torch.equal(parameters[0], before)


WRAPS = "Adaptive wraps a torch.optim.Optimizer .*got "


@each(
    ("make", "message"),
    [
        (lambda p: Adaptive([p]), f"{WRAPS}list"),
        (lambda p: Adaptive(None), f"{WRAPS}NoneType"),
        (lambda p: Adaptive(StableSPAM([p])), f"{WRAPS}StableSPAM. StableSPAM and Muon have these rules themselves"),
        (lambda p: Adaptive(SPAM([p])), f"{WRAPS}SPAM"),
        (lambda p: Adaptive(LowBitAdamW([p])), f"{WRAPS}LowBitAdamW"),
        (lambda p: Adaptive(Adaptive(torch.optim.SGD([p]))), f"{WRAPS}Adaptive"),
        (lambda p: Adaptive(torch.optim.SGD), f"{WRAPS}type"),
        (lambda p: Adaptive(torch.optim.LBFGS([p])), "steps without a closure, which LBFGS needs: use it alone"),
        (lambda p: Adaptive(torch.optim.SGD([p]), torch.optim.AdamW), "SGD and a base that makes another: leave one"),
        (lambda p: Adaptive(torch.optim.SGD([{"params": [p], "gamma1": 1.5}])), "Adaptive needs gamma1 to .*got 1.5"),
    ],
)
def test_what_it_cannot_wrap_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make(Parameter(torch.ones(2, 2)))
