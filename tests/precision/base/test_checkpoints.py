"""Checkpoints of any precision plugin: what they hold, and runs that go on from them."""

import pytest
import torch

from lightning_lowbit import FP4Precision
from lightning_lowbit.nn import QuantLinear
from tests.lightning_imports import BoringModel, ModelCheckpoint
from tests.precision.base.models import Recurrent, quiet
from tests.precision.regression_model import flat
from tests.precision.regression_model import trainer as regression_trainer
from tests.tables import each


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


@each("plugins", [[], [FP4Precision()]])
def test_a_checkpoint_without_the_plugin_or_of_weights_alone_starts_quantization_and_says_so(plugins, tmp_path):
    trainer = quiet(plugins=plugins, limit_train_batches=2)  # ends with the epoch
    trainer.fit(BoringModel())
    trainer.save_checkpoint(tmp_path / "x.ckpt", weights_only=bool(plugins))
    other = quiet(plugins=[FP4Precision()], max_steps=3, limit_train_batches=2, limit_val_batches=1)
    with pytest.warns(UserWarning, match="holds no state of lightning_lowbit .saved without the plugin, or weights"):
        if plugins:
            other.validate(BoringModel(), ckpt_path=tmp_path / "x.ckpt", verbose=False)
        else:
            other.fit(BoringModel(), ckpt_path=tmp_path / "x.ckpt")


def test_resuming_with_another_seed_is_said(tmp_path):
    trainer = quiet(plugins=[FP4Precision(seed=1)], limit_train_batches=2)
    trainer.fit(BoringModel())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    with pytest.warns(UserWarning, match="those of seed 1, this run's of seed 2"):
        other = quiet(plugins=[FP4Precision(seed=2)], max_steps=3, limit_train_batches=2)
        other.fit(BoringModel(), ckpt_path=tmp_path / "x.ckpt")


def test_checkpoint_callback_of_lightning_keeps_the_state(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)
    quiet(plugins=[FP4Precision()], enable_checkpointing=True, callbacks=[checkpoint]).fit(BoringModel())
    saved = sorted(torch.load(p, weights_only=True)["lightning_lowbit"]["step"] for p in tmp_path.glob("*.ckpt"))
    assert saved == [1, 2]
