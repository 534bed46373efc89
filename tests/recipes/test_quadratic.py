"""The quadratic loss: every curve against what theory expects of it, within four standard errors."""

import math
from functools import cache
from itertools import product
from pathlib import Path
from unittest import mock

import pytest
import torch
import yaml
from lightning.pytorch import seed_everything
from matplotlib.figure import Figure

from lightning_lowbit import Cast, Scale, cli, quantize
from lightning_lowbit.cli.configs import recipes
from lightning_lowbit.recipes.quadratic import Curve, Quadratic, charts
from tests.lightning_imports import quiet_trainer
from tests.tables import each

STEPS, DIMENSIONS = 150, 1000
NOISES = (2.0, 1.0, 0.5, 0.0)
EXACT = 1e-12  # for what no noise disturbs


def fit(model, steps):
    """Fits without drawing, which takes longer."""
    with mock.patch.object(Figure, "savefig"):
        quiet_trainer(max_steps=steps, devices=1).fit(model)
    return model


def begin(**arguments):
    seed_everything(0, verbose=False)
    return Quadratic(**{"dimensions": DIMENSIONS, "noises": (), "errors": (), **arguments})


def descend(**arguments):
    return fit(begin(**arguments), STEPS).losses()


@cache
def descend_all(curvature):
    return descend(noises=NOISES, errors=(0.1, 1.0), steps=(1, 0.3, 0.1), curvature=curvature)


def factor(noise, step):
    """Mean and standard deviation of L' / L over one step, whatever happened before.

    The step takes θ to ‖θ‖ (a u + b/√d z), where u has length 1, z is normal, a = 1 - ηλ and b = ηλ k/√3.
    """
    a, b = 1 - step, step * noise / math.sqrt(3)
    return a**2 + b**2, math.sqrt((4 * a**2 * b**2 + 2 * b**4) / DIMENSIONS)


def factors(losses):
    return losses[1:] / losses[:-1]


# --- noise that shrinks with the gradient -----------------------------------------------------------------------------


@pytest.mark.slow
@each("curvature", [1.0, 2.5])
def test_the_loss_falls_by_the_factor_expected_of_noise_and_step(curvature):
    curves = {curve: losses for curve, losses in descend_all(curvature).items() if curve.error == "noise"}
    assert len(curves) == 12
    for (_, noise, step), losses in curves.items():
        assert losses.shape == (STEPS + 1,) and losses[0].item() == pytest.approx(1)
        if noise == 0 and step == 1:
            assert losses[1] < 1e-30
            continue
        mean, deviation = factor(noise, step)
        measured = factors(losses)
        assert measured.mean().item() == pytest.approx(mean, abs=4 * deviation / math.sqrt(STEPS) + EXACT)
        # Of noise that is not independent in each dimension, the mean would be the same.
        assert measured.std().item() == pytest.approx(deviation, rel=4 / math.sqrt(2 * STEPS), abs=EXACT)
    first, second = (factors(curves[Curve("noise", noise, 1)]) for noise in (2, 1))
    correlation = torch.corrcoef(torch.stack([first, second]))[0, 1]
    assert abs(correlation) < 4 / math.sqrt(STEPS), "each row has noise of its own"


# --- errors of constant size ------------------------------------------------------------------------------------------


@pytest.mark.slow
@each("curvature", [1.0, 2.5])
def test_bias_leaves_a_floor_that_the_step_does_not_move(curvature):
    start = begin(curvature=curvature, errors=(1.0,)).points[0].detach()
    curves = {curve: losses for curve, losses in descend_all(curvature).items() if curve.error == "biased"}
    assert len(curves) == 6
    for curve, losses in curves.items():
        for n in (0, 1, 7, STEPS):
            rest = (1 - curve.step) ** n
            point = rest * start - (1 - rest) * curve.size / math.sqrt(DIMENSIONS) / curvature
            assert losses[n].item() == pytest.approx(curvature / 2 * point.square().sum().item(), rel=1e-9)
        assert losses[-1].item() == pytest.approx(curve.size**2 / (2 * curvature), rel=1e-3)


@pytest.mark.fast("1.0")
@pytest.mark.parametrize("curvature", [1.0, 2.5])
def test_unbiased_errors_of_that_size_have_a_floor_that_falls_with_the_step(curvature):
    number = 100  # steps, after those in which the loss settles
    floors, curves = {}, descend(errors=(0.1,), steps=(1, 0.1), curvature=curvature)
    for step in (1, 0.1):
        floor = 0.1**2 / (2 * curvature) * step / (2 - step)
        settled = curves[Curve("unbiased", 0.1, step)][-number:]
        # About its mean the loss is correlated with itself, by (1 - ηλ)² from step to step.
        correlated = (1 + (1 - step) ** 2) / (1 - (1 - step) ** 2)
        floors[step] = settled.mean().item()
        assert floors[step] == pytest.approx(floor, rel=4 * math.sqrt(2 * correlated / DIMENSIONS / number))
    assert floors[1] / floors[0.1] == pytest.approx(19, rel=0.1)


# --- real casts -------------------------------------------------------------------------------------------------------


def descend_in(cast, step, amax):
    """Where 200 steps with λ = 1 and quantized gradients lead from a point of loss 1."""
    generator = torch.Generator().manual_seed(0)
    point = torch.randn(DIMENSIONS, generator=generator)
    point *= math.sqrt(2) / point.norm()
    for n in range(200):
        point -= step * quantize(point, cast, key=n if cast.rounding == "stochastic" else None, amax=amax).dequantize()
    return point


def test_scales_that_follow_the_gradient_leave_no_floor_and_others_halt_or_obey_the_step():
    follows, stays = Scale("e4m3", block=16, two_level=True), Scale("fp32", block="tensor")
    spacing = 0.5 / 6  # between E2M1's values around 0, where its 6 stands for 1
    loss = {}
    for rounding, step in product(("nearest", "stochastic"), (1, 0.1)):
        assert descend_in(Cast("e2m1", follows, rounding=rounding), step, amax=None).square().sum() / 2 < 1e-12
        point = descend_in(Cast("e2m1", stays, rounding=rounding), step, torch.tensor(1.0))
        loss[rounding, step] = point.square().sum().item() / 2
        assert rounding == "stochastic" or point.abs().max() <= spacing / 2
    assert loss["nearest", 0.1] >= loss["nearest", 1] > 0.1
    assert loss["stochastic", 0.1] < loss["stochastic", 1] / 10
    assert loss["stochastic", 0.1] < loss["nearest", 0.1] / 10


# --- the recipe and its picture ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_recipe_runs_repeats_itself_and_draws():
    short = "--trainer.max_steps=10"
    for options in ([], [short], [short], [short, "--seed_everything=1"]):
        assert cli.main(["fit", "--config=quadratic", *options]) == 0
    whole, first, again, other = (Path(f"runs/quadratic/version_{i}/quadratic.png").read_bytes() for i in range(4))
    assert whole.startswith(b"\x89PNG\r\n\x1a\n")
    assert first == again != other


def test_the_recipe_spells_out_the_defaults():
    written = yaml.safe_load(recipes()["quadratic"].read_text())["model"]["init_args"]
    assert Quadratic(**written).curves == Quadratic().curves
    assert (written["dimensions"], written["curvature"]) == (Quadratic().dimensions, Quadratic().curvature)


def test_the_picture_shows_all_curves_and_the_floors():
    model = fit(begin(noises=NOISES, errors=(0.1, 0.01), steps=(1, 0.1), curvature=2.5), steps=5)
    noise, constant = charts(model.losses(), 2.5)
    assert [*noise.series][:2] == ["k = 2, η = 1/λ", "k = 1, η = 1/λ"] and len(noise.series) == 8
    assert len(constant.series) == 8 + 2 and "biased, μ = 0.01, η = 0.1/λ" in constant.series
    lines = [ys for chart in (noise, constant) for _, ys in chart.series.values()]
    assert all(losses.tolist() in lines for losses in model.losses().values())
    floors = [ys for name, (_, ys) in constant.series.items() if name.startswith("μ²/2λ")]
    assert floors == [pytest.approx([0.1**2 / 5] * 2), pytest.approx([0.01**2 / 5] * 2)]


def test_it_logs_each_curve_before_its_step_and_a_second_fit_forgets_the_first():
    model = fit(begin(noises=(2, 1), errors=(0.1,), steps=(1, 0.1)), steps=1)
    errors = ("noise_2", "noise_1", "biased_0.1", "unbiased_0.1")
    names = [f"loss/{error}/step_{step}" for error in errors for step in ("1", "0.1")]
    logged = {name: value.item() for name, value in model.trainer.logged_metrics.items()}
    assert logged == pytest.approx(dict.fromkeys(names, 1.0))
    model = fit(begin(noises=(1,), steps=(1,)), steps=3)
    end = model().detach()
    (losses,) = fit(model, steps=2).losses().values()
    assert losses.shape == (3,) and losses[0] == end


@each("arguments", [{"dimensions": 0}, {"curvature": 0}, {"curvature": -1}])
def test_a_loss_without_minimum_is_refused(arguments):
    with pytest.raises(ValueError, match="at least one dimension and a positive curvature"):
        Quadratic(**arguments)
