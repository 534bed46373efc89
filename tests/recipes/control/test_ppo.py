"""The recipe `control` in a stand-in for gymnasium's environments."""

import json
import sys
from pathlib import Path

import pytest
import torch

from lightning_lowbit import LowBitPrecision, cli
from lightning_lowbit.recipes.control.environments import Environments
from lightning_lowbit.recipes.control.ppo import PPO
from tests.lightning_imports import quiet_trainer
from tests.recipes.control.stand_in import install
from tests.recipes.recipe_names import Logged, run_json

SIZES = {"copies": 4, "steps": 4, "epochs": 2, "batch_size": 8, "evaluation_episodes": 2}
SMALL = {
    "trainer": {"max_steps": 7, "val_check_interval": 1},
    "model": {"init_args": {"environment": "Line-v0", **SIZES}},
}


@pytest.fixture(autouse=True)
def _here(monkeypatch, tmp_path):
    install(monkeypatch)
    Path("small.yaml").write_text(json.dumps(SMALL))


def made(environment="Line-v0", **changes):
    return PPO(environment, **{"hidden_sizes": [32, 32], "seed": 0, **SIZES, **changes})


def trainer(*callbacks, casts="bf16", **arguments):
    arguments = {"devices": 1, "limit_val_batches": 0, "log_every_n_steps": 1, **arguments}
    return quiet_trainer(LowBitPrecision(casts, skip=["first", "last"]), callbacks=[*callbacks], **arguments)


@pytest.mark.fast("adamw+int4_qat")
@pytest.mark.parametrize(
    "overlays",
    [["stable_spam"], ["adamw", "int4_qat"], ["fp8"], ["bf16"], ["fp16"], ["nvfp4_row", "dequantized"], ["ternary"]],
    ids="+".join,
)
def test_two_iterations_stop_at_the_step_that_was_asked_for(overlays):
    result = run_json("control", *overlays, "small.yaml")
    assert (result["status"], result["steps"], result["max_steps"]) == ("finished", 7, 7)
    metrics = result["metrics"]
    assert {"loss", "grad_norm", "episode_return", "kl", "mismatch", "val_return"} <= set(metrics)
    assert metrics["val_loss"] == -metrics["val_return"]
    assert [step for step, _ in result["history"]["val_return"]] == [4, 7]
    assert result["summary"]["optimizer_steps_by_phase"] == {"fqt": 7}


@pytest.mark.slow
def test_a_switch_acts_at_the_next_iteration():
    switch = "--trainer.callbacks+={class_path: lightning_lowbit.PrecisionSwitch, init_args: {to: bf16, step: 6}}"
    result = run_json("control", "qaf", "small.yaml", options=["--trainer.max_steps=12", switch])
    assert result["summary"]["optimizer_steps_by_phase"] == {"fqt": 8, "bf16": 4}


def test_training_computes_what_the_rollout_did_where_rows_are_quantized_alone():
    """A scale of the whole tensor sees other rows in a minibatch."""
    found = {}
    for casts in ("bf16", "nvfp4-row", "nvfp4"):
        run = trainer(logged := Logged(), casts=casts, max_steps=8)
        run.fit(made(copies=8, batch_size=16))
        found[casts] = [row["mismatch"] for row in logged.steps]
    assert len(found["nvfp4"]) == 2 and max(found["nvfp4"]) > 0
    assert max(found["bf16"] + found["nvfp4-row"]) < 1e-6


def test_a_resumed_run_repeats_the_uninterrupted_one():
    whole, parts = made(), made()
    trainer(casts="nvfp4", max_steps=12).fit(whole)
    first = trainer(casts="nvfp4", max_steps=8)
    first.fit(parts)
    first.save_checkpoint("part.ckpt")
    resumed = made(seed=0)
    trainer(casts="nvfp4", max_steps=12).fit(resumed, ckpt_path="part.ckpt", weights_only=True)
    for (name, expected), found in zip(whole.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(expected, found), name
    assert resumed.observed.count == 3 * resumed.samples


def test_episodes_that_outlast_an_iteration_go_on_in_the_next():
    environments, again, still = Environments("Uneven-v0", 1), Environments("Uneven-v0", 1), torch.zeros(1, 1).numpy()
    first, *steps = environments.observe(seed=0)[0, 0], environments.step(still), environments.step(still)
    assert environments.observe(seed=1)[0, 0] == steps[-1].observations[0, 0] and not steps[-1].ended[0]
    assert environments.step(still).ended[0]
    assert environments.observe(seed=1)[0, 0] == again.observe(seed=1)[0, 0] != first, "the seed decides"


def test_mistakes_are_errors_of_one_line(monkeypatch, capsys):
    for given, told in (
        ({"environment": "line-v1"}, "is a name that gymnasium knows; got 'line-v1'. Did you mean 'Line-v0'"),
        ({"environment": "HalfCheetah-v5"}, r"needs another package: MuJoCo is not installed, run `pip install"),
        ({"environment": "Discrete-v0"}, r"actions Discrete\(2\), and the policy draws continuous ones"),
        ({"environment": "Unbounded-v0"}, "draws continuous ones between bounds"),
        ({"environment": "Words-v0"}, "the networks take a vector of numbers"),
        ({"environment": "Endless-v0"}, "has no time limit"),
        ({"batch_size": 7}, r"batch_size divides the 4 x 4 = 16 steps of an iteration \(copies x steps\); got 7"),
        ({"hidden_sizes": []}, "hidden_sizes has the size of at least one layer"),
        ({"discount": 1.5}, "discount is a fraction, above 0 and at most 1"),
        ({"copies": 0}, "copies is a whole number, 1 or more"),
    ):
        with pytest.raises(ValueError, match=told) as raised:
            made(**given)
        assert "\n" not in str(raised.value)
    with pytest.raises(ValueError, match=r"give trainer\.max_steps"):
        trainer(max_epochs=1).fit(made())
    assert cli.main(["fit", "--config=control", "--config=small.yaml", "--model.batch_size=7"]) != 0
    assert "batch_size divides" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    assert cli.main(["fit", "--config=control", "--config=small.yaml"]) != 0
    assert "pip install 'gymnasium[mujoco]>=" in capsys.readouterr().err
    assert not Path("runs").exists()
