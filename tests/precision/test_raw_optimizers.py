"""Optimizers that manual optimization steps without Lightning, as with ``use_pl_optimizer=False``."""

import pytest
import torch

from lightning_lowbit import FP8Precision
from tests.lightning_imports import MisconfigurationException
from tests.precision.regression_model import Regression, fitted, flat, state


class Manual(Regression):
    """Takes two optimizer steps in each training step, by an optimizer of Lightning, a raw one, or one of its own."""

    def __init__(self, steps_by):
        super().__init__()
        self.automatic_optimization = False
        self.steps_by = steps_by
        self.alone = torch.optim.SGD(self.parameters(), 0.05)

    def training_step(self, batch, batch_idx):
        raw = self.optimizers(use_pl_optimizer=False)
        optimizer = {"Lightning": self.optimizers(), "itself": raw, "alone": self.alone}[self.steps_by]
        for place in (2 * batch_idx, 2 * batch_idx + 1):
            optimizer.zero_grad()
            self.manual_backward(self.loss(place, 1.0 + place))
            optimizer.step()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05)


def fit(steps_by, compute_dtype="bf16"):
    plugin = FP8Precision("delayed", compute_dtype=compute_dtype)
    return fitted(plugin, Manual(steps_by), max_epochs=1, limit_train_batches=3, max_steps=-1)


def test_their_steps_advance_delayed_scaling_and_one_warning_says_what_does_not_advance():
    with pytest.warns(UserWarning) as warned:
        runs = fit("Lightning"), fit("itself")
    assert sum("global_step stays" in str(warning.message) for warning in warned) == 1
    plugins = [run.precision_plugin for run in runs]
    assert [plugin.step for plugin in plugins] == [6, 6]
    histories, found = (state(plugin)["amax_history"] for plugin in plugins)
    assert all(torch.equal(found[name], history) for name, history in histories.items())
    assert torch.equal(*(flat(run.lightning_module) for run in runs))


def test_scaled_gradients_are_refused_and_a_warning_says_that_no_step_was_counted():
    with pytest.raises(MisconfigurationException, match="SGD, which steps itself .* would take scaled gradients"):
        fit("itself", "fp16")
    with pytest.warns(UserWarning, match="No optimizer step was counted in 3 training steps"):
        fit("alone")
