"""Distillation into few bits: the loss is the divergence from the frozen model that it was, which stays as it was."""

import copy

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_lowbit import LowBitPrecision
from lightning_lowbit.recipes.models import CausalLM
from tests.launch import launch
from tests.lightning_imports import quiet_trainer
from tests.recipes.tuning.ranks_frozen import CASTS, CLASSES, losses, make, plugin, tokens


def fit(module, *plugins):
    data = [DataLoader([tokens(), tokens(2)], batch_size=None)] * 2
    trainer = quiet_trainer(*plugins, max_steps=1, log_every_n_steps=1)
    trainer.fit(module, *data)
    return trainer.callback_metrics


def moved(module):
    """A module whose student is no longer its teacher."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return module


def divergence(module, batch):
    """Mean over tokens of Σ p log(p / q), each token after a pass of its own over those before it."""
    totals = []
    for sequence in batch[:, :-1]:
        for end in range(1, len(sequence) + 1):
            p, q = (
                net(input_ids=sequence[None, :end]).logits[0, -1].double() for net in (module.teacher, module.model)
            )
            p, q = (logits - logits.exp().sum().log() for logits in (p, q))
            totals.append((p.exp() * (p - q)).sum().item())
    return sum(totals) / len(totals)


@torch.no_grad()
def test_the_loss_is_the_divergence_from_the_teacher():
    module = moved(make("distillation"))
    expected = divergence(module, tokens())
    assert expected > 0.01
    with torch.enable_grad():
        logged = fit(module)
    assert logged["loss"].item() == pytest.approx(expected, rel=1e-5)


def test_a_student_in_high_precision_has_nothing_to_learn():
    logged = fit(make("distillation"), LowBitPrecision("bf16", compute_dtype="fp32", skip=["teacher"]))
    assert logged["loss"] == 0 and logged["grad_norm"] < 1e-6


def test_validation_is_that_of_the_text_and_the_divergence_over_tokens():
    module = moved(make("distillation"))
    trainer = quiet_trainer()
    (logged,) = trainer.validate(module, DataLoader([tokens(), tokens(1)], batch_size=None), verbose=False)
    both = torch.cat([tokens(), tokens(1)])
    with torch.no_grad():
        assert logged["val_divergence"] == pytest.approx(divergence(module, both), rel=1e-5)
        assert logged["val_loss"] == pytest.approx(module._loss(both).item(), rel=1e-5)


def test_the_last_target_does_not_count():
    """There are no labels: the tokens that a language model predicts are inputs here."""
    module, batch = moved(make("distillation")), tokens()
    other = batch.clone()
    other[:, -1] = (other[:, -1] + 1) % 256
    assert torch.equal(module._divergence(batch)[0], module._divergence(other)[0])


def test_the_student_learns_and_the_teacher_stays():
    module = make("distillation")
    before = copy.deepcopy(module.teacher.state_dict())
    assert fit(module, plugin())["loss"] > 0, "quantization costs nothing"
    assert all(torch.equal(value, before[name]) for name, value in module.teacher.state_dict().items())
    assert any(not torch.equal(value, before[name]) for name, value in module.model.state_dict().items())


def test_a_quantized_teacher_is_refused():
    with pytest.raises(ValueError, match=r"The teacher computes in high precision, and 7 of .* add 'teacher' to the"):
        fit(make("distillation"), LowBitPrecision(CASTS, skip=["lm_head"]))


def test_a_checkpoint_loads_as_it_was_trained(tmp_path):
    module = make("distillation")
    fit(module, plugin())
    module.trainer.save_checkpoint(tmp_path / "last.ckpt")
    loaded = type(module).load_from_checkpoint(tmp_path / "last.ckpt", pretrained=False)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(tokens()), module.eval()(tokens()))
        teacher = CausalLM(config=module.hparams["config"], seed=0)
        assert torch.equal(loaded.teacher.eval()(tokens()).logits, teacher.eval()(tokens()))


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return launch("tests.recipes.tuning.ranks_frozen", 2, tmp_path_factory.mktemp("two"))


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
def test_fsdp2_shards_both_networks(two, name):
    expected, _ = losses(name, tokens())
    torch.testing.assert_close(sum(of_rank[name][0] for of_rank in two) / 2, expected, rtol=1e-4, atol=1e-6)
    assert [of_rank[name][1] for of_rank in two] == [[], []]
