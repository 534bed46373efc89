"""``lowbit validate`` evaluates a checkpoint as it was trained, whatever casts the configuration has."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_lowbit import LowBitPrecision, restore
from lightning_lowbit.recipes.models import CausalLM
from tests.cli.run.commands import lowbit, scalars
from tests.lightning_imports import quiet_trainer

LAST = Path("runs/tiny/version_0/checkpoints/last.ckpt")


def validated(capsys, *recipes, option="--trainer.num_nodes=1"):
    """The validation loss that the command prints."""
    assert lowbit(f"--ckpt_path={LAST}", option, recipes=("quickstart", *recipes), command="validate") == 0
    return float(re.findall(r"val_loss\s+│\s+([\d.]+)", capsys.readouterr().out)[-1])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks")
@pytest.mark.parametrize("overlay", ["ternary", "int2_qat", "nvfp4", "fp8"])
def test_four_ways_to_evaluate_give_the_loss_of_training(overlay, capsys, monkeypatch):
    assert lowbit(recipes=("quickstart", overlay)) == 0
    trained = scalars(LAST.parent.parent, "val_loss")[5]
    capsys.readouterr()
    batches, step = [], CausalLM.validation_step  # those of the command

    def noted(model, batch, batch_idx):
        batches.append(batch)
        step(model, batch, batch_idx)

    with monkeypatch.context() as patch:
        patch.setattr(CausalLM, "validation_step", noted)
        found = {"lowbit validate": validated(capsys)}
    hparams = torch.load(LAST, weights_only=True)["hyper_parameters"]
    make = partial(CausalLM, hparams["network"], hparams["config"])
    run, loader = quiet_trainer(LowBitPrecision.from_checkpoint(LAST)), DataLoader(batches, batch_size=None)
    found["from_checkpoint"] = run.validate(make(), loader, ckpt_path=LAST, verbose=False)[0]["val_loss"]
    restored, sizes = restore(make(), LAST), [batch[:, 1:].numel() for batch in batches]
    with torch.no_grad():
        losses = [float(restored._loss(batch)) * size for batch, size in zip(batches, sizes, strict=True)]
    found["restore"] = sum(losses) / sum(sizes)
    assert found == pytest.approx(dict.fromkeys(found, trained), abs=1e-6)


@pytest.mark.slow
def test_casts_are_those_of_the_checkpoint(capsys):
    # Two layers in another preset, and a phase that begins in mid-training: what no recipe below knows.
    casts = "--trainer.plugins.init_args.overrides={'down_proj': mxfp4}"
    assert lowbit(casts, recipes=("quickstart", "ternary")) == 0
    trained = scalars(LAST.parent.parent, "val_loss")[5]
    capsys.readouterr()
    for recipes in ((), ("bf16",), ("ternary",)):
        assert validated(capsys, *recipes) == pytest.approx(trained, abs=1e-6), recipes
    own = validated(capsys, option="--trainer.plugins.init_args.casts_of_checkpoint=false")
    assert abs(own - trained) > 1e-4, "the casts of the recipe, on purpose"
