"""Language models are loaded as they were trained, and are not saved as something else."""

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from lightning_lowbit import FP4Precision, IntegerPrecision, TernaryPrecision, bake, convert, restore
from lightning_lowbit.recipes.models import CausalLM
from tests.lightning_imports import quiet_trainer

CONFIG = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
TOKENS = torch.randint(256, (4, 17), generator=torch.Generator().manual_seed(0))
TERNARY = {"skip": ["lm_head"]}


def loader():
    return DataLoader([TOKENS], batch_size=None)


def validate(model, *plugins, **kwargs):
    run = quiet_trainer(*plugins, **kwargs)
    return run.validate(model, loader(), verbose=False)[0]["val_loss"]


def train(plugin, path, weights_only=False):
    model = CausalLM("llama-small", config=CONFIG)
    model.make_optimizer = lambda parameters: torch.optim.AdamW(parameters, 1e-2)
    run = quiet_trainer(plugin, max_epochs=8)
    run.fit(model, loader(), loader())
    loss = run.validate(model, loader(), verbose=False)[0]["val_loss"]
    run.save_checkpoint(path, weights_only=weights_only)
    return model, loss


@pytest.mark.fast("whole")
@pytest.mark.parametrize("weights_only", [False, True], ids=["whole", "of weights alone"])
def test_a_checkpoint_is_loaded_as_it_was_trained(weights_only, tmp_path):
    _, expected = train(TernaryPrecision(**TERNARY), path := tmp_path / "last.ckpt", weights_only)
    loaded = CausalLM.load_from_checkpoint(path, weights_only=True)
    assert validate(loaded) == pytest.approx(expected, abs=1e-6)
    assert loaded.training, "as Lightning leaves it"
    run = quiet_trainer()
    found = run.validate(CausalLM("llama-small", config=CONFIG), loader(), ckpt_path=path, verbose=False)
    assert found[0]["val_loss"] == pytest.approx(expected, abs=1e-6), "also by a Trainer without a plugin"
    latent = validate(convert(CausalLM.load_from_checkpoint(path, weights_only=True), "bf16"))
    assert abs(latent - expected) > 0.1


def test_a_checkpoint_without_casts_is_loaded_with_a_warning(tmp_path):
    train(TernaryPrecision(**TERNARY), path := tmp_path / "last.ckpt")
    old = torch.load(path, weights_only=True)
    del old["lightning_lowbit"]["trained"]
    torch.save(old, path)
    with pytest.warns(UserWarning, match=r"did not record the casts: the model computes in high precision"):
        CausalLM.load_from_checkpoint(path, weights_only=True)


def test_latent_weights_of_quantization_aware_training_are_saved_on_purpose_only(tmp_path):
    trained, _ = train(TernaryPrecision(**TERNARY), path := tmp_path / "last.ckpt")
    for model in (trained, CausalLM.load_from_checkpoint(path, weights_only=True)):
        with pytest.raises(ValueError, match=r"7 layers, e.g. model.layers.0.*latent=True"):
            model.model.save_pretrained(tmp_path / "refused")
        model.model.save_pretrained(tmp_path / "latent", latent=True)
    assert not (tmp_path / "refused").exists()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "latent")
    assert torch.equal(again.lm_head.weight, trained.model.lm_head.weight)


def test_weights_that_compute_the_same_are_saved(tmp_path):
    nvfp4, _ = train(FP4Precision("nvfp4"), tmp_path / "nvfp4.ckpt")
    nvfp4.model.save_pretrained(tmp_path / "nvfp4")
    train(IntegerPrecision(4, None, group=32), path := tmp_path / "int4.ckpt")
    baked = bake(restore(CausalLM("llama-small", config=CONFIG), path))
    baked.model.save_pretrained(tmp_path / "int4")
    logits = AutoModelForCausalLM.from_pretrained(tmp_path / "int4")(TOKENS).logits
    torch.testing.assert_close(logits, baked(TOKENS))
