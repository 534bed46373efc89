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

MINE = """
from lightning.pytorch import Callback
from lightning_lowbit.recipes.data import TextDataModule as Data

class Hello(Callback):
    def on_train_start(self, trainer, pl_module):
        print("hello from the current folder", flush=True)
"""
MINE_YAML = """
trainer:
  callbacks:
  - {class_path: mine.Hello}
  - {class_path: lightning_lowbit.CrashSafeCheckpoint, init_args: {save_last: true}}
  default_root_dir: runs/mine
data: {class_path: mine.Data}
"""
RECIPE = "--config=quickstart --config=sub/mine.yaml --config=tiny.yaml"
FIT = f"fit {RECIPE}"
VALIDATE = f"validate {RECIPE} --ckpt_path=last"
COMPARE = f"compare {RECIPE} --vary=bf16 --seeds=0 --output=study"
ESTIMATE = f"estimate {RECIPE} --device=h100"
INSPECT = "inspect last.ckpt --casts=nvfp4"
OTHERS = ("export last.ckpt --format=dequantized --output=exported", "evaluate exported --tasks=arc_easy --limit=1")
COMMANDS = ("ls", "cp quickstart mine.yaml", FIT, VALIDATE, COMPARE, INSPECT, ESTIMATE, *OTHERS)


def poison():
    for name in filter(find_spec, POISON.split()):  # what is not installed is found there
        Path(f"{name}.py").write_text(f"import os\nos.write(2, b'{name} ran\\n')\nos._exit(9)\n")


def run(*command, **environment):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The folder in which the commands have run, and what came of each; ``python -m`` only has another start."""
    folder, done = tmp_path_factory.mktemp("here"), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        poison()
        write_tiny(max_steps=2, accelerator="cpu")
        Path("mine.py").write_text(MINE)
        Path("sub").mkdir()
        Path("sub/mine.yaml").write_text(MINE_YAML)
        done[f"python -m {FIT}"] = run(*MODULE, *FIT.split())
        for command in COMMANDS:
            if command == INSPECT:
                Path(next(folder.glob("runs/mine/**/last.ckpt"))).rename("last.ckpt")
            done[command] = run(*LOWBIT, *command.split(), HF_HUB_OFFLINE="1")
    return folder, done


@pytest.mark.slow
def test_no_command_runs_what_lies_in_the_current_folder(done):
    for command, process in done[1].items():
        said = process.stdout + process.stderr
        assert " ran\n" not in said, f"{command}: {said[-500:]}"
        is_offline = command.startswith("evaluate")  # its tasks are on the Hub
        assert is_offline or process.returncode == 0, f"{command}: {said[-2000:]}"


@pytest.mark.slow
def test_every_command_finds_classes_of_the_current_folder(done):
    folder, processes = done
    (log,) = (folder / "study").rglob("log.txt")
    for said in (processes[FIT].stdout, log.read_text()):
        assert "hello from the current folder" in said
    assert "class_path: mine.Hello" in (folder / "runs/mine/version_0/config.yaml").read_text()
    assert "A step:" in processes[ESTIMATE].stdout
    assert "val_loss" in processes[VALIDATE].stdout


@pytest.mark.fast("ls-")
@pytest.mark.parametrize("command, picture", [("ls", ""), ("inspect good.ckpt --casts=nvfp4", "good_casts.png")])
def test_an_empty_entry_of_the_search_path_does_not_run_the_current_folder(command, picture):
    poison()
    torch.save({"weight": torch.randn(16, 32)}, "good.ckpt")
    done = run(*LOWBIT, *command.split(), PYTHONPATH=os.pathsep)
    assert done.returncode == 0 and Path(picture).exists(), done.stderr


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
