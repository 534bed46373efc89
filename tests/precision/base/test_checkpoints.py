"""Checkpoints of any precision plugin: what they hold, and runs that go on from them."""

import pytest
import torch

from lightning_lowbit import FP4Precision
from lightning_lowbit.nn import QuantLinear
from tests.lightning_imports import BoringModel, ModelCheckpoint
from tests.precision.base.models import Recurrent
from tests.precision.regression_model import fitted, flat, trainer


def test_trains_any_module_and_leaves_its_checkpoint_alone(tmp_path):
    model = BoringModel()
    weight, before = model.layer.weight, model.layer.weight.detach().clone()
    run = fitted(FP4Precision(), model, callbacks=[ModelCheckpoint(tmp_path, "{step}")], enable_checkpointing=True)
    assert type(model.layer) is QuantLinear
    assert model.layer.weight is weight, "conversion must keep the parameter object"
    assert not torch.equal(weight, before), "nothing was trained"
    run.save_checkpoint(tmp_path / "x.ckpt")
    checkpoint, by_lightning = (torch.load(tmp_path / name, weights_only=True) for name in ("x.ckpt", "step=2.ckpt"))
    assert list(checkpoint["state_dict"]) == ["layer.weight", "layer.bias"]
    assert {*checkpoint["lightning_lowbit"].pop("trained")["layers"].values()} == {"nvfp4"}
    assert checkpoint["lightning_lowbit"] == {"step": 2, "micro_batch": 0, "phase": "fqt", "seed": 0, "blend": 1.0}
    assert by_lightning["lightning_lowbit"]["step"] == 2
    plain = BoringModel()
    plain.load_state_dict(checkpoint["state_dict"])
    assert torch.equal(plain.layer.weight, weight)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch")
def test_a_run_whose_layers_are_called_several_times_is_resumed(tmp_path):
    def run(steps, path=None):
        how = {"accumulate_grad_batches": 2, "limit_train_batches": 8}
        return fitted(FP4Precision(), Recurrent(), path, max_steps=steps, **how)

    run(2).save_checkpoint(tmp_path / "x.ckpt")
    assert torch.equal(*(flat(made.lightning_module) for made in (run(4), run(4, tmp_path / "x.ckpt"))))


def test_what_a_checkpoint_lacks_of_the_plugins_state_is_said(tmp_path):
    said = {
        (None, False): "holds no state of lightning_lowbit .saved without the plugin, or weights",
        (FP4Precision(), True): "holds no state of lightning_lowbit .saved without the plugin, or weights",
        (FP4Precision(seed=1), False): "those of seed 1, this run's of seed 2",
    }
    for (plugin, weights_only), message in said.items():
        fitted(plugin, BoringModel()).save_checkpoint(tmp_path / "x.ckpt", weights_only=weights_only)
        with pytest.warns(UserWarning, match=message):
            if weights_only:
                run = trainer(FP4Precision(seed=2), limit_val_batches=1)
                run.validate(BoringModel(), ckpt_path=tmp_path / "x.ckpt", verbose=False)
            else:
                fitted(FP4Precision(seed=2), BoringModel(), tmp_path / "x.ckpt", max_steps=3)
