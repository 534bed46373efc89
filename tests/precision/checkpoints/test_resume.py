"""A resumed run repeats the uninterrupted one bit for bit."""

import random
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_lowbit import ExactResume, FP4Precision, FP8Precision, PrecisionSummary, QAFSwitch, StableSPAM
from lightning_lowbit.recipes.data import TextDataModule
from lightning_lowbit.recipes.models import CausalLM
from tests.lightning_imports import Callback, quiet_trainer
from tests.precision.fp16.runs import assert_same

STEPS, SWITCH, ACCUMULATE = 6, 3, 2

PLUGINS = {
    "fp4": lambda: FP4Precision("nvfp4", skip=["lm_head"]),
    "fp8": lambda: FP8Precision(history=3, smooth_swiglu="channel", skip=["lm_head"]),
}


@dataclass
class Run(Callback):
    """What happened in a run: losses by (epoch, batch), the weights, and a checkpoint of each step."""

    folder: Path
    losses: dict = field(default_factory=dict)
    phases: dict = field(default_factory=dict)
    weights: torch.Tensor | None = None

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses[trainer.current_epoch, batch_idx] = outputs["loss"].item()
        self.phases[trainer.current_epoch, batch_idx] = trainer.precision_plugin.phase
        if (batch_idx + 1) % ACCUMULATE == 0:
            trainer.save_checkpoint(self.folder / f"step={trainer.global_step}.ckpt")

    def on_train_end(self, trainer, pl_module):
        self.weights = torch.cat([p.detach().flatten() for p in pl_module.parameters()])

    def losses_from(self, step):
        return dict(list(self.losses.items())[step * ACCUMULATE :])


def train(plugin, folder, ckpt_path=None, switches=(SWITCH,)):
    (folder / "text").mkdir(exist_ok=True)
    words = random.Random(0)
    text = " ".join(words.choice(["red", "green", "blue", "round", "square"]) for _ in range(400))
    (folder / "text" / "a.txt").write_text(text)
    # Whatever ran before in this process must not matter.
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(random.SystemRandom().randrange(2**31))
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = CausalLM(
        config={**sizes, "attention_dropout": 0.2},
        gradient_checkpointing=True,
        optimizer=lambda params: StableSPAM(params, lr=1e-2, reset_interval=3),
    )
    run = Run(folder)
    # The summary counts in the first step after each start, and must change nothing.
    made = [*(QAFSwitch(step=step) for step in switches), ExactResume(), PrecisionSummary(quiet=True)]
    steps = {"max_steps": STEPS, "accumulate_grad_batches": ACCUMULATE, "limit_val_batches": 0}
    trainer = quiet_trainer(PLUGINS[plugin](), callbacks=[*made, run], **steps)
    trainer.fit(model, TextDataModule(str(folder / "text"), sequence_length=16, batch_size=2), ckpt_path=ckpt_path)
    return run


@pytest.fixture(scope="module", params=PLUGINS)
def uninterrupted(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    return request.param, folder, train(request.param, folder)


@pytest.mark.fast("fp8-2-switches0")
@pytest.mark.parametrize(("step", "switches"), [(2, (SWITCH,)), (SWITCH, (SWITCH,)), (5, (SWITCH,)), (5, ())])
def test_resume_equals_the_uninterrupted_run(uninterrupted, tmp_path, step, switches):
    """The phase is the checkpoint's, also without the callback."""
    plugin, folder, whole = uninterrupted
    assert set(whole.phases.values()) == {"fqt", "qaf"}
    assert max(batch for _, batch in whole.losses) >= 2 * 5, "checkpoints must lie in mid-epoch"
    resumed = train(plugin, tmp_path, folder / f"step={step}.ckpt", switches=switches)
    assert resumed.losses, "the resumed run did nothing"
    assert list(resumed.losses) == list(whole.losses_from(step)), "other batches than in the whole run"
    assert resumed.losses == whole.losses_from(step), f"losses after a resume at step {step} differ"
    assert resumed.phases == {place: whole.phases[place] for place in resumed.phases}
    assert torch.equal(resumed.weights, whole.weights), f"final weights after a resume at step {step} differ"
    found, expected = (
        torch.load(place / f"step={STEPS}.ckpt", weights_only=True)["lightning_lowbit"] for place in (tmp_path, folder)
    )
    assert_same(found, expected)
