"""Checkpoints of any precision plugin: what they hold, and runs that go on from them."""

import pytest
import torch

from lightning_lowbit import FP4Precision, LowBitPrecision, QAFSwitch
from lightning_lowbit.nn import QuantLinear
from tests.lightning_imports import BoringModel, ModelCheckpoint
from tests.precision.base.models import Recorder, Recurrent, quiet
from tests.precision.regression_model import flat
from tests.precision.regression_model import trainer as regression_trainer


def test_trains_any_module_and_leaves_its_checkpoint_alone(tmp_path):
    model = BoringModel()
    before = model.layer.weight.detach().clone()
    weight = model.layer.weight
    trainer = quiet(plugins=[FP4Precision()])
    trainer.fit(model)
    assert type(model.layer) is QuantLinear
    assert model.layer.weight is weight, "conversion must keep the parameter object"
    assert not torch.equal(model.layer.weight, before), "nothing was trained"
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    checkpoint = torch.load(tmp_path / "x.ckpt", weights_only=True)
    assert list(checkpoint["state_dict"]) == ["layer.weight", "layer.bias"]
    assert {*checkpoint["lightning_lowbit"].pop("trained")["layers"].values()} == {"nvfp4"}
    assert checkpoint["lightning_lowbit"] == {"step": 2, "micro_batch": 0, "phase": "fqt", "seed": 0, "blend": 1.0}
    plain = BoringModel()
    plain.load_state_dict(checkpoint["state_dict"])
    assert torch.equal(plain.layer.weight, model.layer.weight)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch")
def test_a_run_whose_layers_are_called_several_times_is_resumed(tmp_path):
    how = {"accumulate_grad_batches": 2, "limit_train_batches": 8}
    whole, interrupted, resumed = Recurrent(), Recurrent(), Recurrent()
    regression_trainer(FP4Precision(), max_steps=4, **how).fit(whole)
    trainer = regression_trainer(FP4Precision(), max_steps=2, **how)
    trainer.fit(interrupted)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    regression_trainer(FP4Precision(), max_steps=4, **how).fit(resumed, ckpt_path=tmp_path / "x.ckpt")
    assert torch.equal(flat(resumed), flat(whole))


def test_fit_validate_fit_on_one_model_and_trainer():
    model, trainer = BoringModel(), quiet(plugins=[FP4Precision()], limit_val_batches=1)
    trainer.fit(model)
    trainer.validate(model, verbose=False)
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit(model)
    assert trainer.precision_plugin.step == 4
    assert trainer.precision_plugin.micro_batch == 0


def test_phase_of_a_checkpoint_holds_in_validation_without_any_callback(tmp_path):
    model, plugin = BoringModel(), FP4Precision()
    trainer = quiet(plugins=[plugin])
    trainer.fit(model)
    plugin.set_phase("hp-forward")
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    fresh = BoringModel()
    other = quiet(plugins=[LowBitPrecision("nvfp4")], limit_val_batches=1)
    other.validate(fresh, ckpt_path=tmp_path / "x.ckpt", verbose=False)
    assert other.precision_plugin.phase == "hp-forward", "the state is kept under the name of a class"
    assert fresh.layer.casts.fprop_x is None


def test_checkpoint_without_the_plugin_starts_quantization_and_says_so(tmp_path):
    trainer = quiet(limit_train_batches=2)  # ends with the epoch
    trainer.fit(BoringModel())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    with pytest.warns(UserWarning, match="holds no state of lightning_lowbit"):
        quiet(plugins=[FP4Precision()], max_steps=3, limit_train_batches=2).fit(
            BoringModel(), ckpt_path=tmp_path / "x.ckpt"
        )


def test_weights_only_checkpoint_says_that_it_has_no_state(tmp_path):
    trainer = quiet(plugins=[FP4Precision()], limit_train_batches=2)
    trainer.fit(BoringModel())
    trainer.save_checkpoint(tmp_path / "x.ckpt", weights_only=True)
    with pytest.warns(UserWarning, match="saved without the plugin, or weights only"):
        quiet(plugins=[FP4Precision()], limit_val_batches=1).validate(BoringModel(), ckpt_path=tmp_path / "x.ckpt")


def test_resuming_with_another_seed_is_said(tmp_path):
    trainer = quiet(plugins=[FP4Precision(seed=1)], limit_train_batches=2)
    trainer.fit(BoringModel())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    with pytest.warns(UserWarning, match="those of seed 1, this run's of seed 2"):
        other = quiet(plugins=[FP4Precision(seed=2)], max_steps=3, limit_train_batches=2)
        other.fit(BoringModel(), ckpt_path=tmp_path / "x.ckpt")


def test_one_plugin_in_two_runs_starts_each_from_the_beginning():
    plugin = FP4Precision()
    quiet(plugins=[plugin], callbacks=[QAFSwitch(step=1)]).fit(BoringModel())
    assert (plugin.step, plugin.phase) == (2, "qaf")
    second = Recorder()
    quiet(plugins=[plugin]).fit(second)
    assert (plugin.step, plugin.phase) == (2, "fqt")
    first = Recorder()
    quiet(plugins=[FP4Precision()]).fit(first)
    assert second.seen == first.seen


def test_checkpoint_callback_of_lightning_keeps_the_state(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)
    quiet(plugins=[FP4Precision()], enable_checkpointing=True, callbacks=[checkpoint]).fit(BoringModel())
    saved = sorted(torch.load(p, weights_only=True)["lightning_lowbit"]["step"] for p in tmp_path.glob("*.ckpt"))
    assert saved == [1, 2]
