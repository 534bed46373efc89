"""Training with any precision plugin."""

import pickle

import pytest
import torch
from torch import nn

from lightning_lowbit import FP4Precision, FP8Precision, GradientNoiseMonitor, LowBitPrecision, convert
from lightning_lowbit.nn import set_phase
from lightning_lowbit.units import cpu_without
from tests.lightning_imports import BoringModel, MisconfigurationException
from tests.precision.base.models import Recurrent
from tests.precision.fp16.runs import assert_same
from tests.precision.regression_model import On, Regression, fitted, flat, state


def test_each_micro_batch_has_its_own_random_bits():
    def drawn(seed):
        seen = []
        note = On(on_before_backward=lambda trainer, model, _: seen.append(str(model.layer.lowbit.keys.tolist())))
        how = {"accumulate_grad_batches": 2, "limit_train_batches": 4, "callbacks": [note]}
        fitted(FP4Precision(seed=seed), BoringModel(), **how)
        return seen

    keys, again, other = map(drawn, (3, 3, 4))
    assert len(set(keys)) == len(keys) == 4, "two micro-batches share their keys"
    assert again == keys, "the keys of a run are not reproducible"
    assert not set(keys) & set(other), "the seed changes nothing"


@pytest.mark.parametrize(
    ("recompute", "settings"),
    [
        (True, dict),
        (False, lambda: {"limit_val_batches": 2, "val_check_interval": 1}),
        (True, lambda: {"callbacks": [GradientNoiseMonitor(1, average=2)]}),
    ],
    ids=["recomputed", "evaluated in between", "drawn a second time"],
)
def test_what_else_computes_leaves_the_calls_of_a_layer_alone(recompute, settings):
    weights = []
    for model, how in ((Recurrent(), {}), (Recurrent(recompute), settings())):
        fitted(FP4Precision(compute_dtype="fp32"), model, accumulate_grad_batches=2, max_steps=3, **how)
        weights.append(flat(model))
    assert torch.equal(*weights)


class Twice(BoringModel):
    """Manual optimization with two steps on each batch."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization, self.outputs = False, []

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        for _ in range(2):
            self.outputs.append(self.layer(batch))
            optimizer.zero_grad()
            self.manual_backward(self.outputs[-1].sum())
            optimizer.step()


def test_a_forward_pass_in_manual_optimization_has_the_weights_of_the_last_step():
    """Autocast keeps copies of them until its context ends."""
    before, after, *_ = fitted(LowBitPrecision("bf16"), Twice()).lightning_module.outputs
    assert not torch.equal(before, after)


def test_bf16_casts_train_as_lightnings_bf16_mixed_does_to_the_bit():
    def weights(plugin, **kwargs):
        torch.manual_seed(1)
        with cpu_without():  # on CPUs without bf16 units, ours are float32's products
            return flat(fitted(plugin, BoringModel(), max_steps=4, **kwargs).lightning_module)

    ours = weights(LowBitPrecision("bf16", compute_dtype="bf16"))
    assert torch.equal(ours, weights(None, precision="bf16-mixed"))


@pytest.mark.parametrize("is_automatic", [True, False])
def test_backward_passes_stay_in_the_thread_that_calls_them(is_automatic):
    class Watch(BoringModel):
        def __init__(self):
            super().__init__()
            self.automatic_optimization, self.seen = is_automatic, []

        def training_step(self, batch, batch_index):
            loss = super().training_step(batch, batch_index)["loss"]
            loss.register_hook(lambda _: self.seen.append(torch._C._is_multithreading_enabled()))
            if not is_automatic:
                self.manual_backward(loss)
                self.optimizers().step()
            return loss

    model = fitted(FP4Precision(), Watch()).lightning_module
    assert model.seen and not any(model.seen)
    assert torch._C._is_multithreading_enabled()


def test_clips_by_norm_and_by_value():
    class Watch(BoringModel):
        def on_before_zero_grad(self, optimizer):
            gradients = [p.grad for p in self.parameters() if p.grad is not None]
            if gradients:
                self.norm = torch.nn.utils.get_total_norm(gradients).item()
                self.largest = max(g.abs().max().item() for g in gradients)

    by_norm = fitted(FP4Precision(), Watch(), gradient_clip_val=1e-3)
    assert by_norm.lightning_module.norm == pytest.approx(1e-3, rel=1e-3)
    by_value = fitted(FP4Precision(), Watch(), gradient_clip_val=1e-4, gradient_clip_algorithm="value")
    assert by_value.lightning_module.largest == pytest.approx(1e-4, rel=1e-3)


def test_batches_keep_their_dtype():
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64):
        assert FP4Precision().convert_input({"x": torch.ones(2, dtype=dtype)})["x"].dtype == dtype


def test_transformer_encoder_is_quantized_in_evaluation_too():
    """Torch's fused evaluation path reads the raw weights; it must not be taken."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 2).eval()
    convert(model, "nvfp4")
    x = torch.randn(2, 16, 32)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        quantized = model(x)
        set_phase(model, "bf16")
        plain = model(x)
    assert not torch.equal(quantized, plain), "the casts change nothing in evaluation"


def test_training_goes_on_without_the_plugin_after_a_warning_and_with_delayed_scaling_not_at_all():
    for casts in ("nvfp4", "fp8-delayed"):
        model = fitted(LowBitPrecision(casts), BoringModel()).lightning_module
        told = "goes on in low precision without the precision plugin that converted the model"
        if casts == "nvfp4":
            with pytest.warns(UserWarning, match=told):
                fitted(None, model)
        else:
            with pytest.raises(ValueError, match=f"{told}.*amaxes would stay those of the last step"):
                fitted(None, model)
        model.eval()(torch.ones(2, 32))  # says nothing
        model.train()
        fitted(LowBitPrecision(casts), model)
        fitted(None, convert(model, "bf16"))


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
    assert [run.precision_plugin.step for run in runs] == [6, 6]
    assert_same(*([state(run.precision_plugin)["amax_history"], flat(run.lightning_module)] for run in runs))


def test_scaled_gradients_are_refused_and_a_warning_says_that_no_step_was_counted():
    with pytest.raises(MisconfigurationException, match="SGD, which steps itself .* would take scaled gradients"):
        fit("itself", "fp16")
    with pytest.warns(UserWarning, match="No optimizer step was counted in 3 training steps"):
        fit("alone")


def test_the_last_temporary_phase_is_in_force_until_its_owner_pops_it():
    model = fitted(plugin := FP4Precision(quantize_output=True), max_steps=1).lightning_module
    full = model.head.full_casts
    plugin.push_phase("a", "bf16")
    plugin.push_phase("b", "qaf")
    assert plugin.phase == "qaf" and model.head.casts == full.phase("qaf") != full
    for owner, phase in (("a", "qaf"), ("b", "fqt"), ("b", "fqt")):
        plugin.pop_phase(owner)
        assert plugin.phase == phase
    assert model.head.casts == full


def test_an_owner_may_keep_its_place_until_another_phase_is_set():
    plugin = FP4Precision()
    with pytest.raises(ValueError, match="Unknown phase 'fp32'"):
        plugin.push_phase("a", "fp32")
    assert not plugin.has_pushed("a")
    plugin.push_phase("a", "bf16")
    plugin.push_phase("a", None)
    assert plugin.phase == "fqt" and plugin.has_pushed("a")
    plugin.push_phase("a", "qaf")
    assert pickle.loads(pickle.dumps(plugin)).phase == "qaf"
    plugin.set_phase("bf16")
    assert not plugin.has_pushed("a")
    plugin.pop_phase("a")
    assert plugin.phase == "bf16"
