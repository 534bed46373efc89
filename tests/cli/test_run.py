"""The ``lowbit`` command as a user meets it: recipes by name, overlays, mistakes, interruption, resume."""

import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import Callback
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_lowbit import cli
from lightning_lowbit.cli.run import LowBitCLI
from tests.launch import start, wait_for

TINY = """
trainer: {max_steps: 6, log_every_n_steps: 1, val_check_interval: 3, default_root_dir: runs/tiny}
model: {init_args: {config: {hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 2},
                    scheduler: {init_args: {warmup_steps: 1}}}}
data: {init_args: {path: text, sequence_length: 16, batch_size: 2, val_batches: 2, val_fraction: 0.2}}
"""


@pytest.fixture(autouse=True)
def _text(tmp_path):
    Path("text").mkdir()
    Path("text/a.txt").write_text("The quick brown fox jumps over the lazy dog. " * 60)
    Path("tiny.yaml").write_text(TINY)


def lowbit(*arguments, recipes=("quickstart",), command="fit"):
    return cli.main([command, *(f"--config={name}" for name in (*recipes, "tiny.yaml")), *arguments])


def scalars(run, tag):
    """What a real TensorBoard event file of a run says."""
    events = EventAccumulator(str(run)).Reload()
    return {event.step: event.value for event in events.Scalars(tag)}


def written():
    return {str(path) for path in Path().rglob("*")} - {"text", "text/a.txt", "tiny.yaml"}


def test_quickstart(capsys):
    assert lowbit() == 0
    run = Path("runs/tiny/version_0")
    losses = scalars(run, "loss")
    assert list(losses) == list(range(6))
    assert all(0 < loss < 10 for loss in losses.values())
    assert scalars(run, "phase") == {5: 1.0}, "QAF at 90 % of six steps"
    assert set(scalars(run, "grad_norm")) == set(losses)
    validation, perplexity = scalars(run, "val_loss"), scalars(run, "val_perplexity")
    assert len(validation) == 2
    for step, loss in validation.items():
        assert perplexity[step] == pytest.approx(torch.tensor(loss).exp().item(), rel=1e-5)
    shown = capsys.readouterr().out
    assert "phase=qaf" in shown
    for metric in ("loss=", "grad_norm=", "tokens/s="):
        assert metric in shown, f"the progress bar does not show {metric}"
    checkpoint = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
    assert checkpoint["global_step"] == 6
    assert checkpoint["lightning_lowbit"].pop("blend") == 1
    assert "trained" in checkpoint["lightning_lowbit"] and checkpoint["lightning_lowbit"].pop("trained")["layers"]
    assert checkpoint["lightning_lowbit"] == {"step": 6, "micro_batch": 0, "phase": "qaf", "seed": 0}
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["trainer"]["max_steps"] == 6
    assert config["model"]["init_args"]["optimizer"]["class_path"] == "lightning_lowbit.StableSPAM"


@pytest.mark.slow
def test_a_run_has_a_folder_of_its_own_for_each_combination():
    Path("mine.yaml").write_text(TINY.replace(", default_root_dir: runs/tiny", ""))
    assert cli.main(["fit", "--config=quickstart", "--config", "bf16", "-c", "mine.yaml"]) == 0
    config = yaml.safe_load(Path("runs/quickstart+bf16+mine/version_0/config.yaml").read_text())
    assert config["trainer"]["plugins"]["init_args"]["casts"] == "bf16"
    assert config["trainer"]["plugins"]["init_args"]["skip"] == ["lm_head"]
    assert lowbit("--trainer.default_root_dir=elsewhere") == 0
    assert Path("elsewhere/version_0/checkpoints/last.ckpt").exists(), "default_root_dir was ignored"


@pytest.mark.slow
def test_twice_without_a_logger():
    for _ in range(2):
        assert lowbit("--trainer.logger=false", "--trainer.callbacks=null", "--trainer.enable_checkpointing=false") == 0
    assert Path("runs/tiny/config.yaml").exists()


MINE = """
from lightning.pytorch import Callback
from lightning_lowbit.recipes.data import TextDataModule as Data

class Hello(Callback):
    def on_train_start(self, trainer, pl_module):
        print("hello from the current folder", flush=True)
"""
# Of a recipe all of whose steps are few, the warm-up is a share.
MINE_YAML = """
trainer: {max_steps: 2, callbacks: [{class_path: mine.Hello}], default_root_dir: runs/mine}
model: {init_args: {config: {hidden_size: 32, intermediate_size: 48, num_hidden_layers: 1, num_attention_heads: 2}}}
data: {class_path: mine.Data, init_args: {path: text, sequence_length: 16, batch_size: 2, val_batches: 2}}
"""


def installed(*arguments):
    """What the installed script prints, as users run it: from their folder, without PYTHONPATH."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [Path(sys.executable).with_name("lowbit"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=clean, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_classes_of_the_current_folder_that_a_file_names():
    Path("mine.py").write_text(MINE)
    Path("sub").mkdir()
    Path("sub/mine.yaml").write_text(MINE_YAML)
    assert "hello from the current folder" in installed("fit", "--config=quickstart", "--config=sub/mine.yaml")
    assert "class_path: mine.Hello" in Path("runs/mine/version_0/config.yaml").read_text()


@pytest.mark.slow
def test_every_command_finds_classes_of_the_current_folder():
    Path("mine.py").write_text(MINE)
    Path("mine.yaml").write_text(MINE_YAML)
    recipe = ("--config=quickstart", "--config=mine.yaml")
    assert "A step:" in installed("estimate", *recipe)
    installed("compare", *recipe, "--vary=bf16")
    (log,) = Path("runs/compare").rglob("log.txt")
    assert "hello from the current folder" in log.read_text()
    checkpoint = next(Path("runs/compare").rglob("last.ckpt"))
    assert "val_loss" in installed("validate", *recipe, f"--ckpt_path={checkpoint}")


@pytest.mark.slow
def test_the_saved_configuration_runs_again():
    assert lowbit() == 0
    assert cli.main(["fit", "--config=runs/tiny/version_0/config.yaml"]) == 0
    first, second = (scalars(f"runs/tiny/version_{number}", "loss") for number in range(2))
    assert first == second


@pytest.mark.slow
def test_the_same_command_twice():
    assert lowbit() == 0
    assert lowbit() == 0
    first, second = (scalars(f"runs/tiny/version_{number}", "loss") for number in range(2))
    assert first == second, "the same command gives another run"


@pytest.mark.slow
def test_the_seed_of_seed_everything_reaches_everything():
    for seed in (0, 1):
        assert lowbit(f"--seed_everything={seed}") == 0
    first, second = (scalars(f"runs/tiny/version_{number}", "loss") for number in range(2))
    assert not set(first.values()) & set(second.values())


def test_validate_from_a_checkpoint(capsys):
    assert lowbit() == 0
    last = scalars("runs/tiny/version_0", "val_loss")[5]
    capsys.readouterr()
    assert lowbit("--ckpt_path=last", command="validate") == 0
    said = "lowbit validate: runs/tiny/version_0/checkpoints/last.ckpt, in LowBitPrecision(<of a checkpoint: nvfp4 in"
    assert said in capsys.readouterr().out
    (again,) = scalars("runs/tiny/version_1", "val_loss").values()
    assert again == last


@pytest.mark.slow
def test_options_that_a_checkpoint_overrides_are_said_and_recorded():
    assert lowbit() == 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert lowbit("--ckpt_path=last", "--trainer.max_steps=8", f"{OPTIMIZER}.lr=0.05") == 0
    assert sum("overrides options that this run asks for" in str(each.message) for each in caught) == 1
    config = Path("runs/tiny/version_1/config.yaml").read_text()
    head, options, *rest = config.splitlines()
    assert head == "# The checkpoint that this run resumed from holds other options, and they were in force:"
    assert options == "# StableSPAM: lr 0.001 (asked for: 0.05)"
    assert not any(line.startswith("# StableSPAM") for line in rest)
    assert yaml.safe_load(config)["model"]["init_args"]["optimizer"]["init_args"]["lr"] == 0.05, "what was asked for"
    assert not Path("runs/tiny/version_0/config.yaml").read_text().startswith("# The checkpoint")


def test_a_list_option_takes_one_item():
    Path("skip.yaml").write_text("trainer: {plugins: {init_args: {only: q_proj}}}")
    assert lowbit("--trainer.plugins.init_args.skip", "lm_head", "--config=skip.yaml") == 0
    config = yaml.safe_load(Path("runs/tiny/version_0/config.yaml").read_text())
    plugin = config["trainer"]["plugins"]["init_args"]
    assert (plugin["skip"], plugin["only"]) == (["lm_head"], ["q_proj"])


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


OPTIMIZER, SCHEDULER = (f"--model.init_args.{part}.init_args" for part in ("optimizer", "scheduler"))

# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.fast(
    "--trainer.plugins.init_args.casts=nvfp5-",
    "--trainer.plugins.init_args.skip=[lm_haed]-",
    "--trainer.max_stepz=3-",
    "--config=quikstart-",
    "--config=broken.yaml-",
    "--data.init_args.path=nowhere-",
    "--ckpt_path=last-",
    "--model.init_args.network=lama-60m-",
)
@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--trainer.plugins.init_args.casts=nvfp5"], "Unknown preset 'nvfp5'. Did you mean 'nvfp4'?"),
        (
            ["--trainer.plugins.init_args.casts={fprop_x: {element: e2m2}}"],
            "Unknown element format 'e2m2'. Did you mean",
        ),
        (["--trainer.plugins.init_args.casts={fprop_x: {scale: {format: e4m4}}}"], "Unknown scale format 'e4m4'."),
        (
            ["--trainer.plugins.init_args.casts={fprop_x: {scale: {block: 0}}}"],
            "Scale.block is a positive number of elements such as 16, a tile such as (16, 16), 'row' or 'tensor'; "
            "got 0.",
        ),
        (
            ["--trainer.plugins.init_args.rounding={wgradx: nearest}"],
            "Unknown operand 'wgradx'. Did you mean 'wgrad_x'?",
        ),
        (
            ["--trainer.plugins.init_args.rounding={wgrad_x: nearst}"],
            "Unknown rounding 'nearst'. Did you mean 'nearest'?",
        ),
        (["--trainer.plugins.init_args.skip=[lm_haed]"], "skip: the pattern 'lm_haed' matches no linear layer."),
        (["--trainer.plugins.init_args.skip=lm_haed"], "The option is --trainer.plugins.init_args.skip. (LOWBIT"),
        (
            [f"{SCHEDULER}.warmup_steps=40"],
            f"got 40. Warm up for fewer steps. A number below 1, such as 0.1, is a share "
            f"of them. The option is {SCHEDULER}.warmup_steps.",
        ),
        ([f"{SCHEDULER}.final_fraction=7"], f"The option is {SCHEDULER}.final_fraction."),
        (["--data.init_args.batch_size"], "error: --data.init_args.batch_size takes a value, and none follows it."),
        (["--trainer.plugins.init_args.skipp=[lm_head]"], "Did you mean 'skip'?"),
        (["--model.init_args.optimizer.init_args.weight_decai=1"], "Did you mean 'weight_decay'?"),
        (["--trainer.plugins=lightning_lowbit.FP44Precision"], "Did you mean 'FP4Precision'?"),
        (["--trainer.callbacks+={class_path: lightning_lowbit.QAFSwich}"], "Did you mean 'QAFSwitch'?"),
        (["--trainer.max_stepz=3"], "Did you mean 'trainer.max_steps'?"),
        (["--model.init_args.nettwork=gpt2"], "Did you mean 'network'?"),
        (["--model.init_args.network=lama-60m"], "Did you mean 'llama-60m'?"),
        (["--model.init_args.config.hidden_sise=32"], "Did you mean 'hidden_size'?"),
        (["--model.init_args.config.vocab_size=100"], "config.vocab_size to 256 or more"),
        (["--model.init_args.config.max_position_embeddings=8"], "max_position_embeddings to 16 or more"),
        (["--config=quikstart"], "Did you mean 'quickstart'?"),
        (["--config="], "--config needs the name of a recipe or a file"),
        (["--config=typo.yaml"], "Did you mean 'trainer.max_steps'?"),
        (["--config=broken.yaml"], "broken.yaml is not valid YAML"),
        (["--config=list.yaml"], "list.yaml must hold a mapping"),
        (["--data.init_args.path=empty"], "found no *.txt, *.md, *.py in"),
        (["--data.init_args.path=empty.txt"], "are empty"),
        (["--data.init_args.path=nowhere"], "does not exist; check `path`, or write hf:NAME"),
        (["--data.init_args.path=hf:./nowhere:en"], "The data set './nowhere', configuration 'en', cannot be opened"),
        (["--data.init_args.tokenizer=./nowhere"], "The tokenizer './nowhere' cannot be loaded"),
        (["--ckpt_path=nowhere.ckpt"], "The checkpoint 'nowhere.ckpt' does not exist."),
        (["--ckpt_path=last"], "--ckpt_path last: there is no checkpoint (*.ckpt) below runs/tiny."),
        (["--trainer.precision=16-mixed"], "Received both `precision=16-mixed` and `plugins="),
        (
            ["--trainer.callbacks+={class_path: lightning_lowbit.QAFSwitch, init_args: {at: 2}}"],
            "0 or more and at most 1; got 2",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_ends_with_one_line_that_says_what_to_do(arguments, line, capsys):
    Path("typo.yaml").write_text("trainer: {max_stepz: 3}")
    Path("broken.yaml").write_text("trainer: {max_steps: 3")
    Path("list.yaml").write_text("[1, 2]")
    Path("empty").mkdir()
    Path("empty.txt").touch()
    before = written()
    assert lowbit(*arguments) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("lowbit: error: ")
    assert line in last
    assert written() == before, "a mistake must not leave files"


def test_last_needs_a_folder_to_search(capsys):
    arguments = ["--trainer.default_root_dir=null", "--trainer.logger=false", "--ckpt_path=last"]
    assert lowbit(*arguments) == 2
    assert "set the logger's save_dir or trainer.default_root_dir" in capsys.readouterr().err


def test_interrupt_before_training(monkeypatch, capsys):
    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(LowBitCLI, "instantiate_classes", interrupted)
    assert lowbit() == 130
    assert capsys.readouterr().err.endswith("lowbit: interrupted\n")


def test_traceback_on_request(monkeypatch):
    monkeypatch.setenv("LOWBIT_TRACEBACK", "1")
    with pytest.raises(ValueError, match="Unknown preset 'nvfp5'"):
        lowbit("--trainer.plugins.init_args.casts=nvfp5")


# --- interruption -----------------------------------------------------------------------------------------------------

LONG = [
    "--trainer.max_steps=400",
    "--trainer.callbacks.init_args.every_n_train_steps=2",
    "--trainer.val_check_interval=100",
]


def begin(checkpoint):
    """A run in a process of its own that has saved a checkpoint."""
    process = start(Path("log.txt"), "lightning_lowbit.cli", "fit", "--config=quickstart", "--config=tiny.yaml", *LONG)
    wait_for(checkpoint.exists, process, Path("log.txt"))
    return process


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The losses of a run of 30 steps."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    here = Path.cwd()
    os.chdir(folder)
    Path("text").mkdir()
    Path("text/a.txt").write_text("The quick brown fox jumps over the lazy dog. " * 60)
    Path("tiny.yaml").write_text(TINY)
    try:
        assert lowbit(*LONG, "--trainer.limit_val_batches=0", "--trainer.max_steps=400", *stop_after(60)) == 0
    finally:
        os.chdir(here)
    return scalars(folder / "runs/tiny/version_0", "loss")


def stop_after(steps):
    # max_steps decides the step of the switch; a limit on time or epochs would too. So a run is stopped by a callback.
    return [f"--trainer.callbacks+={{class_path: tests.cli.test_run.StopAfter, init_args: {{steps: {steps}}}}}"]


class StopAfter(Callback):
    def __init__(self, steps: int):
        self.steps = steps

    def on_train_batch_end(self, trainer, *_):
        trainer.should_stop = trainer.global_step >= self.steps


def resume_and_compare(checkpoint, uninterrupted):
    step = torch.load(checkpoint, weights_only=True)["global_step"]
    assert step < 50, "the machine was so fast that nothing is left to compare"
    assert lowbit(f"--ckpt_path={checkpoint}", *LONG, "--trainer.limit_val_batches=0", *stop_after(60)) == 0
    resumed = scalars("runs/tiny/version_1", "loss")
    assert min(resumed) == step
    assert resumed == {at: loss for at, loss in uninterrupted.items() if at >= step}
    return step


@pytest.mark.slow
def test_kill_and_resume(uninterrupted):
    checkpoint = Path("runs/tiny/version_0/checkpoints/last.ckpt")
    process = begin(checkpoint)
    process.kill()
    process.join()
    resume_and_compare(checkpoint, uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize("number, status", [(signal.SIGINT, 1), (signal.SIGTERM, 143)])
def test_interrupt_and_resume(number, status, uninterrupted):
    process = begin(Path("runs/tiny/version_0/checkpoints/last.ckpt"))
    os.kill(process.pid, number)
    process.join(60)
    output = Path("log.txt").read_text()
    assert process.exitcode == status, f"it ended with {process.exitcode}\n{output}"
    assert "Traceback" not in output, output
    assert "To resume: --ckpt_path" in output, output
    resume_and_compare(Path("runs/tiny/version_0/checkpoints/interrupted.ckpt"), uninterrupted)
