"""Quantization-aware training, its λ, checkpoints and two processes."""

from functools import partial

import pytest
import torch
from torch import Tensor

from lightning_lowbit import IntegerPrecision, LowBitPrecision, TernaryPrecision
from lightning_lowbit.nn import convert, set_blend
from tests.precision.regression_model import LAYERS, On, Ramp, Regression, fitted, flat, state, trainer
from tests.tables import each

ternary = partial(TernaryPrecision, quantize_output=True)
PLUGINS = {
    "ternary": ternary,
    "ternary, x in hp": partial(ternary, None),
    "A8W8": partial(IntegerPrecision, group=8),
    "A8W4, zero points": partial(IntegerPrecision, 4, 8, 8, activation_group="row", symmetric=False),
    "W2": partial(IntegerPrecision, 2, None, "row"),
}


@pytest.mark.fast("ternary", "A8W4, zero points")
@pytest.mark.parametrize("name", PLUGINS)
def test_loss_falls_and_weights_keep_their_names(name):
    plugin = PLUGINS[name]()
    model = fitted(plugin, max_steps=40, limit_train_batches=20, limit_val_batches=4).lightning_module
    assert {layer.casts for layer in model.modules() if hasattr(layer, "casts")} == {plugin.casts}
    first, last = torch.stack(model.val_losses[2:6]).mean(), torch.stack(model.val_losses[-4:]).mean()
    assert last < 0.6 * first, f"the loss only falls from {first:.3f} to {last:.3f}"
    assert list(model.state_dict()) == list(Regression().state_dict())


def trained(plugin, *shares, ckpt_path=None, callbacks=(), **kwargs):
    """A model after four steps, in the first of which λ was set by hand."""
    options = {"max_steps": 4, "limit_train_batches": 4, **kwargs}
    return fitted(plugin, ckpt_path=ckpt_path, callbacks=[Ramp(*shares), *callbacks], **options).lightning_module


@each("name", PLUGINS, fast=2)
def test_at_0_it_trains_as_without_casts_and_at_1_as_without_a_share(name):
    make = PLUGINS[name]
    assert torch.equal(flat(trained(make(), 0.0)), flat(trained(LowBitPrecision("bf16"))))
    whole = flat(trained(make()))
    assert torch.equal(flat(trained(make(), 1.0)), whole)
    assert not torch.equal(flat(trained(make(), 0.0, 0.5, 1.0)), whole), "λ makes no difference"


def test_the_share_is_one_tensor_for_all_layers():
    plugin = ternary()
    assert (plugin.blend.shape, plugin.blend.dtype, plugin.blend.item()) == ((), torch.float32, 1.0)
    model = trained(plugin, 0.25)
    for name in LAYERS:
        assert model.get_submodule(name).lowbit.blend is plugin.blend, f"λ of {name} is another tensor"
    assert plugin.is_blending
    saved = state(plugin)
    plugin.set_blend(0)
    assert saved["blend"] == 0.25, "the checkpoint's λ is the plugin's own tensor"
    assert (model.head.lowbit.blend.item(), plugin.is_blending) == (0.0, True)
    plugin.set_blend(1)
    assert (model.head.lowbit.blend, plugin.blend.item(), plugin.is_blending) == (None, 1.0, False)


@each("share", [-0.1, 1.5, torch.nan, True, "0.5", None, torch.tensor(0.5)], fast=3)
def test_what_is_no_share_is_refused(share):
    plugin = ternary()
    model = trained(plugin, 0.25)
    with pytest.raises(ValueError, match="1 for full quantization, 0 or more and at most 1; got "):
        plugin.set_blend(share)
    assert plugin.blend == model.head.lowbit.blend == 0.25, "what was refused has been set"


def test_a_run_begins_with_the_share_that_was_set_and_another_one_at_1():
    plugin = ternary()
    plugin.set_blend(0.5)
    model = trained(plugin)
    assert plugin.blend == model.head.lowbit.blend == 0.5
    other = trained(plugin)
    assert plugin.blend == 1
    assert other.head.lowbit.blend is None
    assert torch.equal(flat(other), flat(trained(ternary())))


@pytest.mark.fast("0.3")
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_evaluation_has_the_share_in_force(share):
    plugin = ternary(compute_dtype="bf16")
    run = fitted(plugin, callbacks=[Ramp(share)], limit_val_batches=1, limit_test_batches=1)
    model = run.lightning_module
    for evaluate in (run.validate, run.test):
        evaluate(model, verbose=False)
    during, validated, tested = model.val_losses[-3:]
    plain = Regression()
    plain.load_state_dict(model.state_dict())
    convert(plain, "ternary")
    set_blend(plain, share)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = plain.loss(1000, 1.0)
    assert during == validated == tested == expected


class ElsewhereTensor(Tensor):
    """As on a GPU: it lies elsewhere than the model, and is copied there."""

    device = torch.device("meta")

    def to(self, *args, **kwargs):
        return self.as_subclass(Tensor).clone()


def test_training_goes_on_where_evaluation_has_moved_the_share():
    """Evaluation runs under ``torch.inference_mode``, whose tensors cannot be refilled outside."""
    model, plugin = Regression(), ternary()
    made = trainer(plugin, callbacks=[Ramp(0.25, 0.5)], limit_val_batches=1)
    plugin.blend = plugin.blend.as_subclass(ElsewhereTensor)
    made.validate(model, verbose=False)
    assert type(plugin.blend) is Tensor, "it was not moved"
    made.fit(model)
    assert plugin.blend == model.head.lowbit.blend == 0.5


def test_it_may_be_set_in_evaluation():
    later = On(on_validation_end=lambda trainer, _: trainer.precision_plugin.set_blend(0.5))
    plugin = ternary()
    model = trained(plugin, 0.25, callbacks=[later], val_check_interval=2, limit_val_batches=1)
    assert plugin.blend == model.head.lowbit.blend == 0.5
    assert len(model.losses) == 4


@pytest.mark.parametrize("name", ["ternary", "A8W4, zero points"])
def test_a_resumed_run_goes_on_with_the_share(name):
    """Set by hand in the first two of four steps; what goes on after these has it from the checkpoint alone."""
    epochs, keep = {"limit_train_batches": 2}, On(on_train_end=lambda trainer, _: trainer.save_checkpoint("x.ckpt"))
    whole = trained(PLUGINS[name](), 0.25, 0.5, **epochs)
    trained(PLUGINS[name](), 0.25, 0.5, callbacks=[keep], max_steps=2, **epochs)
    checkpoint = torch.load("x.ckpt", weights_only=True)
    share = checkpoint["lightning_lowbit"]["blend"]
    assert (share.shape, share.dtype, share.device.type, share.item()) == ((), torch.float32, "cpu", 0.5)
    plugin = PLUGINS[name]()
    resumed = trained(plugin, ckpt_path="x.ckpt", **epochs)
    assert plugin.blend == resumed.head.lowbit.blend == 0.5
    assert torch.equal(flat(resumed), flat(whole))
    # One from before there was a λ: all the way.
    del checkpoint["lightning_lowbit"]["blend"]
    torch.save(checkpoint, "before.ckpt")
    plugin = PLUGINS[name]()
    other = trained(plugin, ckpt_path="before.ckpt", **epochs)
    assert (plugin.blend, plugin.is_blending, other.head.lowbit.blend) == (1.0, False, None)
    assert not torch.equal(flat(other), flat(whole)), "λ makes no difference"
