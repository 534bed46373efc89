"""The ``lowbit`` command as a user meets it: recipes by name, overlays, folders of runs, saved configurations."""

import math
import os
import re
import shutil
import warnings
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import yaml

from lightning_lowbit import cli
from lightning_lowbit._lightning import BasePredictionWriter, Callback, CSVLogger, TensorBoardLogger, take_versions
from lightning_lowbit.cli.run import LowBitCLI
from tests.cli.run.commands import OPTIMIZER, lowbit, scalars, write_tiny
from tests.lightning_imports import BoringModel, quiet_trainer
from tests.tables import each

RUN = Path("runs/tiny/version_0")
LAST = RUN / "checkpoints/last.ckpt"
NEXT_STEPS = (f"--ckpt_path={LAST}", "--trainer.max_steps=8")


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    """The folder of a run, and what it showed."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as shown:
        patch.chdir(folder := tmp_path_factory.mktemp("quickstart"))
        write_tiny(default_root_dir="runs/tiny")
        Path("only.yaml").write_text("trainer: {plugins: {init_args: {only: layers}}}")
        options = ("--trainer.plugins.init_args.skip", "lm_head", "--config=only.yaml")
        assert lowbit(*options, recipes=("quickstart", "qaf")) == 0
    os.environ.pop("PL_GLOBAL_SEED")
    return folder, shown.getvalue()


@pytest.fixture
def quickstart(once):
    """A copy of the run in the current folder; what it showed."""
    shutil.copytree(once[0], ".", dirs_exist_ok=True)
    return once[1]


def test_quickstart(quickstart):
    losses = scalars(RUN, "loss")
    assert list(losses) == list(range(6))
    assert all(0 < loss < 10 for loss in losses.values())
    assert scalars(RUN, "phase") == {5: 1.0}, "QAF at 90 % of six steps"
    assert set(scalars(RUN, "grad_norm")) == set(losses)
    validation, perplexity = scalars(RUN, "val_loss"), scalars(RUN, "val_perplexity")
    assert len(validation) == 2
    assert perplexity == pytest.approx({step: math.exp(loss) for step, loss in validation.items()}, rel=1e-5)
    assert all(part in quickstart for part in ("phase=qaf", "loss=", "grad_norm=", "tokens/s=")), "of the progress bar"
    checkpoint = torch.load(LAST, weights_only=True)
    state = checkpoint["lightning_lowbit"]
    assert checkpoint["global_step"] == 6 and state.pop("trained")["layers"]
    assert state == {"step": 6, "micro_batch": 0, "phase": "qaf", "seed": 0, "blend": 1}
    config = yaml.safe_load((RUN / "config.yaml").read_text())
    optimizer = config["model"]["init_args"]["optimizer"]["class_path"]
    assert (config["trainer"]["max_steps"], optimizer) == (6, "lightning_lowbit.StableSPAM")
    plugin = config["trainer"]["plugins"]["init_args"]
    assert (plugin["skip"], plugin["only"]) == (["lm_head"], ["layers"]), "a list option takes one item"


@pytest.mark.slow
def test_a_run_has_a_folder_of_its_own_for_each_combination():
    write_tiny(Path("mine.yaml"))
    assert cli.main(["fit", "--config=quickstart", "--config", "bf16", "-c", "mine.yaml"]) == 0
    config = yaml.safe_load(Path("runs/quickstart+bf16+mine/version_0/config.yaml").read_text())
    plugin = config["trainer"]["plugins"]["init_args"]
    assert (plugin["casts"], plugin["skip"]) == ("bf16", ["lm_head"])
    assert lowbit("--trainer.default_root_dir=elsewhere") == 0
    assert Path("elsewhere/version_0/checkpoints/last.ckpt").exists(), "default_root_dir was ignored"

    for _ in range(2):
        assert lowbit("--trainer.logger=false", "--trainer.callbacks=null", "--trainer.enable_checkpointing=false") == 0
    assert Path("runs/tiny/config.yaml").exists(), "without a logger runs share a folder"


@pytest.mark.slow
def test_the_same_seed_gives_the_same_run_also_from_the_saved_configuration():
    assert lowbit() == lowbit() == cli.main(["fit", "--config=runs/tiny/version_0/config.yaml"]) == 0
    assert lowbit("--seed_everything=1") == 0
    first, second, saved, other = (scalars(f"runs/tiny/version_{number}", "loss") for number in range(4))
    assert first == second == saved
    assert not set(first.values()) & set(other.values())


@pytest.mark.usefixtures("quickstart")
def test_validate_from_a_checkpoint(capsys, told):
    dtype, loss = "--trainer.plugins.init_args.compute_dtype", scalars(RUN, "val_loss")[5]
    capsys.readouterr()
    assert lowbit("--ckpt_path=last", command="validate") == 0
    assert "is evaluated in it" not in told.text
    assert lowbit(f"--ckpt_path={LAST}", f"{dtype}=bf16", command="validate") == 0
    assert "trained in torch.float32 and is evaluated in it, not in torch.bfloat16" in told.text
    said = "lowbit validate: runs/tiny/version_0/checkpoints/last.ckpt, in LowBitPrecision(<of a checkpoint: nvfp4 in"
    assert capsys.readouterr().out.count(said) == 2
    for version in (1, 2):
        assert [*scalars(f"runs/tiny/version_{version}", "val_loss").values()] == [loss]
    assert lowbit("--ckpt_path=last", "--model.init_args.config.hidden_size=16", command="validate") == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("lowbit: error: ")]
    assert "last.ckpt does not fit this run: size mismatch for model.model.embed_tokens.weight" in line
    assert "and 11 more. Give the model and the optimizer of its run, which are in runs/tiny/version_0/config" in line


@pytest.mark.slow
def test_options_that_a_checkpoint_overrides_are_said_and_recorded():
    assert lowbit() == 0
    with warnings.catch_warnings(record=True, action="always") as caught:
        assert lowbit("--ckpt_path=last", "--trainer.max_steps=8", f"{OPTIMIZER}.lr=0.05") == 0
    assert sum("overrides options that this run asks for" in str(each.message) for each in caught) == 1
    config = Path("runs/tiny/version_1/config.yaml").read_text()
    head, options, *rest = config.splitlines()
    assert head == "# The checkpoint that this run resumed from holds other options, and they were in force:"
    assert options == "# StableSPAM: lr 0.001 (asked for: 0.05)"
    assert not any(line.startswith("# StableSPAM") for line in rest)
    assert yaml.safe_load(config)["model"]["init_args"]["optimizer"]["init_args"]["lr"] == 0.05, "what was asked for"
    assert not Path("runs/tiny/version_0/config.yaml").read_text().startswith("# The checkpoint")


@pytest.mark.filterwarnings("ignore:The checkpoint was saved when its epoch had ended")
@pytest.mark.usefixtures("quickstart")
def test_a_checkpoint_of_another_optimizer_is_answered_with_the_options_of_its_run(capsys):
    assert lowbit("--config=adamw", *NEXT_STEPS, recipes=("quickstart", "qaf")) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith(f"lowbit: error: The checkpoint {LAST} does not fit this run: ") and "KeyError" in last
    assert "optimizer of its run, which are in runs/tiny/version_0/config.yaml, or another" in last


@pytest.mark.filterwarnings("ignore:The checkpoint was saved when its epoch had ended")
@pytest.mark.usefixtures("quickstart")
@each(
    "error",
    [RuntimeError("DefaultCPUAllocator: can't allocate memory"), torch.OutOfMemoryError("CUDA out of memory.")],
    fast=1,
)
def test_a_checkpoint_that_memory_does_not_hold_is_not_said_to_be_of_another_model(error, monkeypatch):
    monkeypatch.setattr(torch.optim.Optimizer, "load_state_dict", Mock(side_effect=error))
    with pytest.raises(type(error), match="memory"):
        lowbit(*NEXT_STEPS, recipes=("quickstart", "qaf"))


@pytest.mark.slow
def test_last_is_searched_where_the_checkpoints_are():
    for mine in (
        ["--trainer.default_root_dir=runs/mine"],
        ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=runs/csv"],
        ["--trainer.logger=[{class_path: CSVLogger, init_args: {save_dir: runs/list}}]"],
        ["--trainer.callbacks.init_args.dirpath=runs/checkpoints", "--trainer.default_root_dir=runs/beside"],
    ):
        assert lowbit(*mine) == 0
        assert lowbit("--ckpt_path=last", command="validate") == 2, "another run's folder has no checkpoint"
        assert lowbit(*mine, "--ckpt_path=last", command="validate") == 0


class Writer(BasePredictionWriter):
    pass


def test_predict_says_where_predictions_are(capsys):
    command = ["predict", f"--model={BoringModel.__module__}.BoringModel", "--trainer.limit_predict_batches=3"]
    assert cli.main([*command, "--seed_everything=1", "--trainer.default_root_dir=runs"]) == 0
    assert not Path("runs").exists(), "a folder in which nothing is logged"
    LowBitCLI.after_predict(Mock(trainer=quiet_trainer(callbacks=[Writer()])))
    nowhere, there = [line for line in capsys.readouterr().out.splitlines() if " batches; " in line]
    assert nowhere.startswith(
        "lowbit predict: 3 batches; what predict_step returns is not kept: give trainer.callbacks"
    )
    assert there.endswith("Writer got what predict_step returns")


# --- validate takes the casts of a checkpoint, whatever those of the configuration are ---


def validated(capsys, *recipes, option="--trainer.num_nodes=1"):
    """The validation loss that the command prints."""
    capsys.readouterr()
    assert lowbit(f"--ckpt_path={LAST}", option, recipes=("quickstart", *recipes), command="validate") == 0
    return float(re.findall(r"val_loss\s+│\s+([\d.]+)", capsys.readouterr().out)[-1])


@pytest.mark.slow
@pytest.mark.parametrize("overlay", ["ternary", "int2_qat", "nvfp4", "fp8"])
def test_the_loss_is_that_of_the_training(overlay, capsys):
    # One layer in another preset, and a phase that begins in mid-training: what no recipe below knows.
    casts = "--trainer.plugins.init_args.overrides={'down_proj': mxfp4}"
    assert lowbit(casts, recipes=("quickstart", overlay)) == 0
    trained = scalars(RUN, "val_loss")[5]
    for recipes in ((), ("bf16",), (overlay,)):
        assert validated(capsys, *recipes) == pytest.approx(trained, abs=1e-6), recipes
    if overlay == "ternary":
        own = validated(capsys, option="--trainer.plugins.init_args.casts_of_checkpoint=false")
        assert abs(own - trained) > 1e-4, "the casts of the recipe, on purpose"


@pytest.mark.usefixtures("quickstart")
def test_casts_of_the_command_line_are_those_of_the_training_or_refused(capsys):
    assert lowbit("--ckpt_path=last", "--trainer.plugins.init_args.casts=nvfp4", command="validate") == 0
    assert lowbit("--ckpt_path=last", "--trainer.plugins.init_args.casts", "mxfp4", command="validate") == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "nvfp4 in the checkpoint, mxfp4 here" in line and "(lowbit does, without options of casts)" in line


@pytest.mark.slow
@pytest.mark.usefixtures("quickstart")
def test_the_dtype_of_the_training_is_taken_without_a_word(capsys, told):
    assert validated(capsys, option="--trainer.plugins.init_args.compute_dtype=fp32") == validated(capsys)
    assert "is evaluated in it" not in told.text


class Begun(Callback):
    """Begins another run in the folder of the first one, before that trains."""

    def setup(self, trainer, pl_module, stage):
        assert lowbit("--seed_everything=7") == 0


@pytest.mark.slow
def test_runs_that_begin_together_have_a_folder_each():
    assert lowbit(f"--trainer.callbacks+={__name__}.Begun") == 0
    configs = [Path(f"runs/tiny/version_{version}/config.yaml") for version in (0, 1)]
    assert [yaml.safe_load(config.read_text())["seed_everything"] for config in configs] == [0, 7]


def test_a_file_in_the_place_of_a_runs_folder_ends_the_run(capfd):
    Path("runs/tiny").mkdir(parents=True)
    Path("runs/tiny/version_0").touch()
    assert lowbit() == 2
    assert "version_0" in capfd.readouterr().err.splitlines()[-1]


class AlwaysHere(CSVLogger):
    log_dir = "here"


def test_loggers_that_share_a_folder_or_count_nothing_have_theirs():
    Path("here").mkdir()
    loggers = TensorBoardLogger(".", "there", sub_dir="board"), CSVLogger(".", "there"), AlwaysHere(".")
    versions = [Path("there"), Path("there/version_0"), Path("there/version_0/board")]
    assert sorted(take_versions(loggers)) == versions
    assert Path("there/version_0/board").is_dir()
