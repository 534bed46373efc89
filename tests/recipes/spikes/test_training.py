"""Spoilt gradients and batches in training, and mistakes."""

import math
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.data import DataLoader

from lightning_lowbit import GradientNormMonitor
from lightning_lowbit.recipes.spikes import CorruptBatches, GradientSpikes
from tests.cli.run.commands import scalars
from tests.lightning_imports import quiet_trainer
from tests.recipes.spikes.runs import SLOPE, Slope, fit, sgd, spiked
from tests.tables import each


def test_it_is_logged():
    logger = TensorBoardLogger("logs", name=None)
    module = fit(GradientSpikes(0.3, seed=0), steps=30, logger=logger, log_every_n_steps=1)
    logged = scalars(logger.log_dir, "gradient_spike")
    assert logged == {step: float(gradients[0].max() > 1) for step, gradients in module.seen.items()}
    assert {*logged.values()} == {0.0, 1.0}


def test_clipping_sees_the_spike():
    module = fit(GradientSpikes(0.3, seed=0), steps=20, gradient_clip_val=1.0)
    quiet = SLOPE * sum(weight.numel() for weight in module.weights) ** 0.5
    assert quiet < 1, "without a spike nothing is to be clipped"
    norms = [torch.nn.utils.get_total_norm(gradients).item() for gradients in module.clipped.values()]
    is_spiked = [gradients[0].max() > 1 for gradients in module.seen.values()]
    assert norms == pytest.approx([1.0 if spike else quiet for spike in is_spiked], rel=1e-5)
    assert 0 < sum(is_spiked) < 20


def test_monitors_see_the_spike_wherever_they_are_listed():
    spikes = [step for step, is_spike in enumerate(spiked(GradientSpikes(0.1, seed=0), 40), 1) if is_spike]
    for is_first in (True, False):
        monitor = GradientNormMonitor(every_n_steps=1)
        callbacks = [GradientSpikes(0.1, seed=0), monitor] if is_first else [monitor, GradientSpikes(0.1, seed=0)]
        run = quiet_trainer(max_steps=40, callbacks=callbacks)
        with pytest.warns(UserWarning, match="where its running mean is"):
            run.fit(Slope(), DataLoader(range(1000)))
        seen = [row["step"] for row in monitor.report_data(run)["gradient_norm"]["spikes"]]
        assert seen == [step for step in spikes if step > 10]  # ten norms make the first mean


def test_each_of_several_optimizers_has_its_steps():
    optimizers = (lambda module: sgd([module.weights[0], module.weights[1]]), lambda module: sgd([module.weights[2]]))
    spikes = GradientSpikes(0.5, seed=0)
    module = fit(spikes, Slope(optimizers), steps=40)
    expected = spiked(spikes, 40)
    assert sorted(module.seen) == list(range(40))
    assert {expected[step : step + 2] for step in range(0, 40, 2)} == {(a, b) for a in (0, 1) for b in (0, 1)}
    for step, gradients in module.seen.items():
        factors = [(gradient / SLOPE).unique().item() for gradient in gradients]
        own = 1000.0 if expected[step] else 1.0
        assert factors == ([own, own, 1.0] if step % 2 == 0 else [1.0, 1.0, own]), f"step {step}"


def test_accumulated_gradients_are_multiplied_once_and_bf16_stays():
    module = fit(GradientSpikes(1, seed=0), steps=3, accumulate_grad_batches=4, precision="bf16-true")
    expected = torch.tensor(1000 * SLOPE).bfloat16()
    assert len(module.seen) == 3
    for gradient in sum(module.seen.values(), []):
        assert gradient.dtype == torch.bfloat16 and (gradient == expected).all()


def test_parameters_without_a_gradient_keep_none():
    module = Slope()
    module.log = lambda name, value: None
    module.weights[1].grad = torch.ones(5)
    GradientSpikes(1).on_before_optimizer_step(SimpleNamespace(global_step=0), module, sgd(module.parameters()))
    assert [weight.grad is None for weight in module.weights] == [True, False, True]
    assert module.weights[1].grad.tolist() == [1000.0] * 5


@each(
    "name, kind, values",
    [
        ("probability", "a number, 0 or more and at most 1", [1.1, -0.1, "0.1", float("nan")]),
        ("share", "a number, 0 or more and at most 1", [2, True]),
        ("factor", "a number", ["large", None]),
        ("seed", "a whole number, 0 or more and at most 4294967295, or None", [-1, 2**32, 0.5]),
    ],
)
def test_wrong_arguments(name, kind, values):
    for value in values:
        with pytest.raises(ValueError, match=f"{name} is {kind}; got {value!r}"):
            GradientSpikes(**{name: value})


class Tokens(LightningModule):
    """What of each batch arrives, and what becomes of it."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 2))
        self.batches, self.losses = [], []

    def training_step(self, batch, batch_idx):
        self.batches.append(batch.clone())
        loss = self.layer(batch.float()).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return sgd(self.parameters())


TOKENS = torch.arange(6 * 24).view(18, 8) % 50


def spoil(tokens=TOKENS, **arguments):
    model = Tokens()
    run = quiet_trainer(max_steps=6, callbacks=[CorruptBatches(**arguments)])
    run.fit(model, DataLoader(tokens, batch_size=3))
    return model


@each("kind", ["noise", "shuffle"])
def test_tokens_of_a_corrupt_batch(kind):
    clean, spoilt = spoil(steps=[100]), spoil(steps=[1, 4], kind=kind)
    for step, (before, after) in enumerate(zip(clean.batches, spoilt.batches, strict=True)):
        assert torch.equal(before, after) == (step not in (1, 4)), f"step {step}"
        assert after.dtype == before.dtype and after.min() >= 0 and after.max() <= before.max()
        are_same = torch.equal(before.flatten().sort().values, after.flatten().sort().values)
        assert are_same == (kind == "shuffle" or step not in (1, 4)), f"step {step}"
    again = spoil(steps=[1, 4], kind=kind)
    assert all(map(torch.equal, spoilt.batches, again.batches)), "not the same in another run"


def test_a_loss_that_is_nan_for_one_step():
    model = spoil(steps=[5], kind="nan")
    assert [math.isnan(loss) for loss in model.losses] == [False] * 5 + [True]
    assert not any(module._forward_hooks for module in model.modules()), "the model is not itself again"


def test_bad_corruption():
    for steps in ([], [-1], [0.5]):
        with pytest.raises(ValueError, match="steps are optimizer steps"):
            CorruptBatches(steps=steps)
    with pytest.raises(ValueError, match="Unknown kind of corruption 'tokens'"):
        CorruptBatches(steps=[1], kind="tokens")
    with pytest.raises(ValueError, match="takes a batch of integers"):
        spoil(tokens=torch.zeros(18, 8), steps=[0])
