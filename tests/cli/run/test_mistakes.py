"""Mistakes on the command line end with one line that says what to do."""

import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_lowbit.cli.run import LowBitCLI
from tests.cli.run.commands import SCHEDULER, lowbit

PLUGIN = "--trainer.plugins.init_args"


@pytest.mark.fast(
    "--trainer.plugins.init_args.skip=[lm_haed]-",
    "--config=broken.yaml-",
    "--data.init_args.path=nowhere-",
    "--ckpt_path=last-",
)
@pytest.mark.parametrize("arguments, line", [
    ([f"{PLUGIN}.casts={{fprop_x: {{scale: {{block: 0}}}}}}"], "'row' or 'tensor'; got 0."),
    ([f"{PLUGIN}.rounding={{wgradx: nearest}}"], "Unknown operand 'wgradx'. Did you mean 'wgrad_x'?"),
    ([f"{PLUGIN}.skip=[lm_haed]"], "skip: the pattern 'lm_haed' matches no linear layer."),
    ([f"{PLUGIN}.skip=lm_haed"], "The option is --trainer.plugins.init_args.skip. (LOWBIT"),
    ([f"{SCHEDULER}.warmup_steps=40"], f"is a share of them. The option is {SCHEDULER}.warmup_steps."),
    ([f"{SCHEDULER}.final_fraction=7"], f"The option is {SCHEDULER}.final_fraction."),
    (["--trainer.plugins=lightning_lowbit.FP44Precision"], "Did you mean 'FP4Precision'?"),
    (["--trainer.callbacks+={class_path: lightning_lowbit.QAFSwich}"], "Did you mean 'QAFSwitch'?"),
    (["--trainer.callbacks+=[{class_path: RunReprt}, {class_path: string.Formatter}]"], "RunReprt. (LOWBIT"),
    (["--model.init_args.network=lama-60m"], "such as gpt2. The option is --model.init_args.network. (LOWBIT"),
    (["--trainer.accelerator=tpu"], "The Trainer cannot be made: Requirement 'torch_xla"),
    (["--trainer.devices=-2"], "The Trainer cannot be made: `devices` selected with `CPUAccelerator` should be an int"),
    (["--trainer.accumulate_grad_batches=-1"], "trainer.accumulate_grad_batches is a number of batches, above 0; got"),
    (["--trainer.val_check_interval=0"], "is a number of batches, or a share of an epoch, above 0; got 0. (LOWBIT"),
    (["--trainer.logger=[CSVLogger,TensorBoardLogger]"],
     "given class_path 'lightning.pytorch.loggers.CSVLogger': the following arguments are required: save_dir."),
    (["--config="], "--config needs the name of a recipe or a file"),
    (["--config=broken.yaml"], "broken.yaml is not valid YAML"),
    (["--config=list.yaml"], "list.yaml must hold a mapping"),
    (["--config=trainer.yaml"], "trainer in trainer.yaml takes a mapping such as {max_steps: 100}; got [1]."),
    (["--data.init_args.path=nowhere"], "does not exist; check `path`, or write hf:NAME"),
    (["--data.init_args.path=hf:./nowhere:en"], "The data set './nowhere', configuration 'en', cannot be opened"),
    (["--ckpt_path=nowhere.ckpt"], "The checkpoint 'nowhere.ckpt' does not exist."),
    (["--ckpt_path=last"], "--ckpt_path last: there is no checkpoint (*.ckpt) below runs/tiny."),
    (["--trainer.default_root_dir=null", "--trainer.logger=false", "--ckpt_path=last"],
     "set the logger's save_dir or trainer.default_root_dir"),
    (["--trainer.callbacks+={class_path: lightning_lowbit.QAFSwitch, init_args: {at: 2}}"],
     "0 or more and at most 1; got 2"),
    (["--trainer.callbacks+={class_path: lightning_lowbit.RunReport, init_args: {filename: b.html}}"],
     "The Trainer takes one RunReport, and trainer.callbacks has more. Leave out one; `callbacks: [null, ...]`"),
], ids=lambda value: " ".join(value) if isinstance(value, list) else "")  # fmt: skip
def test_a_mistake_ends_with_one_line_that_says_what_to_do(arguments, line, capsys):
    Path("broken.yaml").write_text("trainer: {max_steps: 3")
    Path("list.yaml").write_text("[1, 2]")
    Path("trainer.yaml").write_text("trainer: [1]")
    before = {*Path().rglob("*")}
    assert lowbit(*arguments) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("lowbit: error: ") and line in last
    assert {*Path().rglob("*")} == before, "a mistake must not leave files"


def test_a_full_disk_leaves_no_half_of_a_configuration(capsys):
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limit[1]))  # larger files cannot be written
    try:
        assert lowbit("--trainer.callbacks=null", "--trainer.enable_checkpointing=false") == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert "'runs/tiny/version_0/config.yaml'" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_interrupt_before_training(monkeypatch, capsys):
    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(LowBitCLI, "instantiate_classes", interrupted)
    assert lowbit() == 130
    assert capsys.readouterr().err.endswith("lowbit: interrupted\n")


def test_a_process_that_lost_another_one_refers_to_its_message(monkeypatch, capsys):
    def lost(self):
        raise RuntimeError(
            "[/__w/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:9. "
            "This is typically caused by a remote worker crashing."
        )

    monkeypatch.setattr(LowBitCLI, "instantiate_classes", lost)
    assert lowbit() == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        "lowbit: error: Another process of this run ended or hangs; its messages, if any, tell. Here: Connection "
        "closed by peer [127.0.0.1]:9. (LOWBIT_TRACEBACK=1 shows where.)"
    )


SIGTERM = """
import signal
from lightning_lowbit.cli import command
command.recipes = lambda: signal.raise_signal(signal.SIGTERM)
command.main(["ls"])
"""


def test_sigterm_before_training_ends_with_a_line():
    ended = subprocess.run([sys.executable, "-c", SIGTERM], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (-signal.SIGTERM, "lowbit: ended by SIGTERM\n")


def test_traceback_on_request(monkeypatch):
    monkeypatch.setenv("LOWBIT_TRACEBACK", "1")
    with pytest.raises(ValueError, match="Unknown preset 'nvfp5'"):
        lowbit("--trainer.plugins.init_args.casts=nvfp5")
