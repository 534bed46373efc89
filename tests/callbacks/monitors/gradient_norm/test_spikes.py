"""Spikes of the gradient norm, their warnings, and what checkpoints and reports know of them."""

import math
import re
import statistics

import pytest
import torch

from lightning_lowbit import GradientNormMonitor, LowBitPrecision, StaticGradScaler
from tests.callbacks.monitors.gradient_norm.runs import RULES, Constant, Planned, fit, sgd, trainer
from tests.callbacks.monitors.said import alerts_said
from tests.lightning_imports import Callback
from tests.tables import each

SAID = "Gradient norm, step {}: it is {} before clipping, where its running mean is {}"


def spikes_of(factors, monitor=None, steps=20, said=None, **kwargs):
    """Steps, norms and means of the spikes of a run, which says no more than that."""
    monitor = monitor or GradientNormMonitor()
    with alerts_said() as texts:
        trainer(monitor, max_steps=steps, **kwargs).fit(Constant(factors))
    assert len(texts) == (said is not None) and all(re.match(said, text) for text in texts), texts
    return [tuple(round(value, 4) for value in spike) for spike in monitor.state_dict()["spikes"]]


def test_a_spike_is_told_with_its_step_and_does_not_enter_the_mean():
    factors = {12: 6.0, 14: 7.0, 16: 4.0, 17: 6.5}
    found = spikes_of(factors, GradientNormMonitor(limit=None), said=SAID.format(13, 6, 1))
    # Of steps 1 to 17 but for two spikes: norms of 1, and one of 4, whose weight is 0.01 / (1 - 0.99^15).
    mean = 1 + 3 * 0.01 / (1 - 0.99**15)
    assert found == [(13, 6.0, 1.0), (15, 7.0, 1.0), (18, 6.5, round(mean, 4))]


def test_a_spike_between_logged_steps():
    """Every n steps of the logger: ten norms are known after step 20; of steps 21 and 22 the latter is looked at."""
    options = {"steps": 24, "log_every_n_steps": 4}
    assert spikes_of({12: 6.0}, **options) == []
    assert spikes_of({20: 6.0}, GradientNormMonitor(every_n_steps=2), **options) == []
    for batch, every in ((12, 1), (21, 2)):
        monitor, said = GradientNormMonitor(every_n_steps=every), SAID.format(batch + 1, 6, 1)
        assert spikes_of({batch: 6.0}, monitor, said=said, **options) == [(batch + 1, 6.0, 1.0)]


def test_first_norms_are_no_spikes():
    few, enough = dict.fromkeys(range(9), 0.1), dict.fromkeys(range(10), 0.1)
    assert spikes_of(few, steps=10) == [], "of nine norms one knows little"
    assert spikes_of(enough, steps=11, said=SAID.format(11, 1, 0.1))


@pytest.mark.slow
def test_a_new_level_is_no_spike_for_ever():
    factors = {**dict.fromkeys(range(12, 40), 6.0), 38: 31.0}
    found = spikes_of(factors, GradientNormMonitor(limit=None), 40, said=SAID.format(13, 6, 1))
    assert [step for step, *_ in found] == [*range(13, 23), 39]
    assert found[-1] == (39, 31.0, 6.0)


def test_the_factor_and_the_decay():
    assert spikes_of({12: 6.0}, GradientNormMonitor(spike_factor=6.1)) == []
    monitor = GradientNormMonitor(spike_factor=3.9, decay=0.0)
    assert spikes_of({12: 1.5, 13: 6.0}, monitor, said=SAID.format(14, 6, 1.5))


@pytest.mark.slow
def test_no_more_spikes_are_listed_than_needed():
    factors = dict.fromkeys((step for step in range(12, 130) if step % 9), 6.0)  # ten in a row are a new level
    found = spikes_of(factors, GradientNormMonitor(limit=None), 130, said="Gradient norm")
    assert len(factors) == 105
    assert [step for step, *_ in found] == [batch + 1 for batch in factors][-100:]


@each("value", [math.inf, math.nan])
def test_not_finite(value):
    match = r"Gradient norm, step 4: it is (inf|nan) \(in layer\.1\), and so are .* Look at the data of this step"
    model = Planned(make_optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.0))

    def breaks(gradient):
        return gradient * value if model.trainer.global_step >= 3 else gradient

    model.layer[1].weight.register_hook(breaks)
    with alerts_said() as said:
        trainer(GradientNormMonitor([r"layer\.\d"])).fit(model)
    (text,) = said  # once, and what is infinite is not also above the limit
    assert re.match(match, text), text


def test_what_is_not_finite_enters_no_mean_and_is_no_step():
    monitor = GradientNormMonitor()
    with alerts_said() as said:
        found = fit(Constant({3: math.nan, 13: 6.0}, RULES["Stable-SPAM"]), monitor, max_steps=14)
    nan, spike = said
    assert "step 4: it is nan, and so are the weights after a step with it" in nan
    assert "step 14: it is 6 before clipping" in spike
    assert math.isnan(found[4]["unclipped"])
    assert found[4]["used"] == 0, "a skipped step used something"
    assert (found[13]["spikes"], found[14]["spikes"]) == (0, 1)
    ((step, norm, mean),) = monitor.state_dict()["spikes"]
    assert (step, norm, round(mean, 5)) == (14, 6.0, 1.0)


def test_a_loss_scaler_sees_to_what_is_not_finite():
    plugin = LowBitPrecision("bf16", compute_dtype="fp16", scaler=StaticGradScaler(8, device="cpu"))
    found = fit(Planned({2: math.inf}, RULES["Stable-SPAM"]), plugins=[plugin])  # warnings are errors
    assert not math.isfinite(found[3]["unclipped"])
    assert found[3]["used"] == found[3]["used/layer.0"] == 0, "what an older step used"


def test_the_limit():
    match = r"Gradient norm, step 3: it is 12 before clipping, above the limit of 10. Lower the learning rate"
    spikes_of({2: 12.0, 3: 13.0}, GradientNormMonitor(limit=10), 6, said=match, gradient_clip_val=1.0)
    for limit in (None, 12.5):  # from here on warnings are errors
        spikes_of({2: 12.0}, GradientNormMonitor(limit=limit), 6)
    spikes_of(dict.fromkeys(range(6), 40.0), steps=6)
    spikes_of({step: 40.0 / (1 + step) for step in range(24)}, steps=24)


@pytest.mark.slow
def test_a_level_that_rose_is_above_the_limit():
    """A norm doubles every four steps: never five times its running mean of the last few, in the end ten medians."""
    rising = {step: 2 ** (step / 4) for step in range(40)}
    medians = [statistics.median([rising[i] for i in range(step)]) for step in range(1, 40)]
    first = next(step for step in range(10, 40) if rising[step] > 10 * medians[step - 1])
    text = f"Gradient norm, step {first + 1}: it is {rising[first]:.4g} before clipping, above 10 times the median of"
    spikes_of(rising, GradientNormMonitor(decay=0.5), first + 3, said=text)
    spikes_of(rising, GradientNormMonitor(decay=0.5, limit="100x"), first + 3)


def test_no_clipping_is_advised_where_something_clips():
    def advice(make=sgd, **kwargs):
        with alerts_said() as said:
            trainer(GradientNormMonitor(limit=5.0), max_steps=14, **kwargs).fit(Constant({13: 6.0}, make))
        assert len(said) == 2, "a spike, and the limit"
        return [text for text in said if "StableSPAM" in text]

    assert len(advice()) == 2
    assert advice(gradient_clip_val=1.0) == advice(RULES["Stable-SPAM"]) == []
    assert len(advice(RULES["without rules"])) == 2


def test_a_checkpoint_knows_of_the_step_that_has_just_been_done():
    monitor, saved = GradientNormMonitor(), []

    class Save(Callback):
        def on_train_batch_end(self, run, *_):
            if run.global_step == 13:
                saved.append(monitor.state_dict())

    with pytest.warns(UserWarning, match=SAID.format(13, 6, 1)):
        trainer(monitor, Save(), max_steps=14).fit(Constant({12: 6.0}))
    assert [step for step, *_ in saved[0]["spikes"]] == [13]
    assert saved[0]["alerts"]["texts"], "the checkpoint does not know what was said"


def test_reported():
    monitor = GradientNormMonitor(["layer"], limit=10)
    run = trainer(monitor, max_steps=16)
    with alerts_said() as said:
        run.fit(Constant({12: 6.0, 14: 12.0}))
    (table,) = monitor.report_sections(run)[0].blocks
    assert [row[0] for row in table.rows] == [13, 15]
    assert [text.split(":")[0] for text in said] == ["Gradient norm, step 13", "Gradient norm, step 15"]
    assert "above the limit of 10" in said[1]
    data = monitor.report_data(run)["gradient_norm"]
    assert ([spike["step"] for spike in data["spikes"]], data["alerts"]) == ([13, 15], said)
