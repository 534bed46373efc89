"""Modules of the current folder are found, and never run in place of installed ones."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from lightning_lowbit import cli
from tests.cli.run.commands import write_tiny
from tests.tables import each

LIMIT = 300  # seconds; on two quiet cores a command takes a thirtieth of that
LOWBIT = [str(Path(sys.executable).with_name("lowbit"))]
MODULE = [sys.executable, "-m", "lightning_lowbit.cli"]

# Packages that commands import, at the start or late, and modules of Python that nothing has imported when a command
# begins. In place of each a file that says so and ends the process.
POISON = (
    "accelerate argparse compressed_tensors datasets difflib fcntl gguf jsonargparse lightning lm_eval matplotlib "
    "multiprocessing numpy onnx onnxruntime onnxscript packaging pickle pydoc pytorch_lightning random resource rich "
    "safetensors scipy select shlex sklearn socket subprocess sympy tensorboard tokenizers torch torchmetrics tqdm "
    "transformers triton yaml"
)

RECIPE = "--config=quickstart --config=tiny.yaml"
COMMANDS = (
    "ls",
    "cp quickstart mine.yaml",
    f"fit {RECIPE}",
    f"validate {RECIPE} --ckpt_path=last",
    f"compare {RECIPE} --vary=bf16 --seeds=0 --output=study",
    "inspect last.ckpt --casts=nvfp4",
    "estimate --config=quickstart --device=h100",
    "export last.ckpt --format=dequantized --output=exported",
    "evaluate exported --tasks=arc_easy --limit=1",
)


@pytest.fixture
def poisoned(tmp_path):
    for name in filter(find_spec, POISON.split()):  # what is not installed is found there
        (tmp_path / f"{name}.py").write_text(f"import os\nos.write(2, b'{name} ran\\n')\nos._exit(9)\n")


def run(*command, **environment):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT)


@pytest.mark.slow
@pytest.mark.parametrize(
    "program, commands",
    [(LOWBIT, COMMANDS), (MODULE, COMMANDS[:3])],  # that differ in how they start
    ids=["lowbit", "python -m"],
)
def test_no_command_runs_what_lies_in_the_current_folder(program, commands, poisoned, tmp_path):
    write_tiny(max_steps=2, accelerator="cpu")
    for command in commands:
        if command.startswith("inspect"):
            Path(next(tmp_path.glob("runs/**/last.ckpt"))).rename("last.ckpt")
        done = run(*program, *command.split(), HF_HUB_OFFLINE="1")
        said = done.stdout + done.stderr
        assert " ran\n" not in said, f"{command}: {said[-500:]}"
        is_offline = command.startswith("evaluate")  # its tasks are on the Hub
        assert is_offline or done.returncode == 0, f"{command}: {said[-2000:]}"


def test_a_picture_is_not_drawn_by_a_file_of_the_current_folder(poisoned):
    torch.save({"weight": torch.randn(16, 32)}, "good.ckpt")
    done = run(*LOWBIT, "inspect", "good.ckpt", "--casts=nvfp4", PYTHONPATH=os.pathsep)
    assert done.returncode == 0 and Path("good_casts.png").exists(), done.stderr


def test_modules_of_the_current_folder_are_found_last_and_only_by_the_command(tmp_path, monkeypatch):
    (tmp_path / "only_here.py").touch()
    (tmp_path / "difflib.py").touch()
    monkeypatch.setattr(sys, "path", ["", str(tmp_path), *sys.path])
    before = sys.path[:]
    with cli.current_folder_last():
        assert Path(find_spec("only_here").origin) == tmp_path / "only_here.py"
        assert Path(find_spec("difflib").origin) != tmp_path / "difflib.py"
    assert sys.path == before


@each(
    "arguments",
    [
        ["fit", "--config=quickstart", "--model=difflib.Net"],
        ["estimate", "--config=quickstart", "--trainer.plugins=difflib.Net"],
        ["compare", "--config=quickstart", "--vary=bf16", "--model=difflib.deep.Net"],
    ],
)
def test_what_was_taken_is_said_where_a_class_is_missing(arguments, tmp_path, capsys):
    (tmp_path / "difflib.py").write_text("class Net: ...")
    assert cli.main(arguments) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"difflib is {sys.modules['difflib'].__file__}, which is installed, and not ./difflib.py" in said
