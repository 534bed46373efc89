"""Runs of two processes, whoever starts them: torchrun, Lightning, or (its script, without SLURM) a scheduler."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

from lightning_lowbit.cli.configs import recipes
from tests.cli.run.commands import write_tiny

SCRIPT = Path(__file__).parents[2] / "recipes" / "launch" / "slurm.sh"
LIMIT = 120  # seconds; on two quiet cores they take a sixth of that

TWO = {"max_steps": 3, "limit_val_batches": 0, "accelerator": "cpu", "num_nodes": 1, "devices": 2}
FSDP = {"init_args": {"data_parallel_size": 2, "save_distributed_checkpoint": False}}
STARTERS = {
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "lightning_lowbit.cli"],
    "Lightning": ["-m", "lightning_lowbit.cli"],
}


def begin(starter, *arguments):
    """A run in a folder that is called after who starts it, with a log beside it."""
    saving = {"class_path": "ModelCheckpoint", "init_args": {"dirpath": starter, "save_last": True}}
    trainer = {"strategy": FSDP, "callbacks": [None, saving], "default_root_dir": starter, **TWO}
    write_tiny(Path(f"{starter}.yaml"), **trainer)
    clean = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE")}
    environment = {**clean, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, *STARTERS[starter], "fit"]
    command += [f"--config={name}" for name in ("quickstart", "multi_node", f"{starter}.yaml")]
    with Path(f"{starter}.log").open("w") as file:
        return subprocess.Popen(
            [*command, *arguments], stdout=file, stderr=file, env=environment, start_new_session=True
        )


def end(process):
    """The exit status, once all processes have ended."""
    try:
        return process.wait(LIMIT)
    except subprocess.TimeoutExpired:
        return f"nothing within {LIMIT} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and those that it started


@pytest.mark.slow
def test_torchrun_and_lightning_start_the_same_run():
    processes = [*map(begin, STARTERS)]
    codes = [*map(end, processes)]
    assert codes == [0, 0], "\n".join(Path(f"{starter}.log").read_text()[-3000:] for starter in STARTERS)
    first, second = (torch.load(Path(starter) / "last.ckpt", weights_only=True) for starter in STARTERS)
    assert first["global_step"] == second["global_step"] == 3
    assert first["state_dict"].keys() == second["state_dict"].keys()
    for name, weight in first["state_dict"].items():
        assert torch.equal(weight, second["state_dict"][name]), f"{name} is another one"
    fresh = yaml.safe_load((Path("torchrun") / "version_0" / "config.yaml").read_text())
    assert fresh["trainer"]["devices"] == 2
    order = first["loops"]["fit_loop"]["state_dict"]["combined_loader"][0]["order"]
    assert order["ranks"] == 2, "both processes trained alone"


@pytest.mark.slow
@pytest.mark.parametrize("starter", STARTERS)
def test_sigterm_to_what_has_started_them_saves_and_is_no_success(starter):
    often = "--trainer.callbacks+={class_path: ModelCheckpoint, init_args: {every_n_train_steps: 2, dirpath: often}}"
    graceful = "--trainer.callbacks+=lightning_lowbit.GracefulInterrupt"
    process, limit = begin(starter, "--trainer.max_steps=100000", often, graceful), time.monotonic() + LIMIT
    while not any(Path("often").glob("*.ckpt")):
        assert process.poll() is None and time.monotonic() < limit, Path(f"{starter}.log").read_text()[-3000:]
        time.sleep(0.05)
    process.terminate()
    code, told = end(process), Path(f"{starter}.log").read_text()[-3000:]
    assert code == 143 if starter == "Lightning" else code not in (0, -signal.SIGKILL), f"ended with {code}\n{told}"
    assert (Path(starter) / "interrupted.ckpt").exists(), told


# Commands of SLURM that write down how they are called; the tasks of `srun` end when `scancel` interrupts them.
FAKES = {
    "srun": 'echo "srun $*" >> calls\nwhile [ -e wait ]; do sleep 0.05; done\necho ended >> calls\nexit "${CODE:-0}"',
    "scancel": 'echo "scancel $*" >> calls\nrm wait',
    "scontrol": 'echo "scontrol $*" >> calls',
}


@pytest.fixture
def slurm():
    """Starts the script on a machine that seems to have SLURM."""
    Path("bin").mkdir()
    for name, body in FAKES.items():
        (Path("bin") / name).write_text(f"#!/bin/bash\n{body}\n")
        (Path("bin") / name).chmod(0o755)

    def begin(*arguments, **environment):
        known = {"PATH": f"{Path('bin').absolute()}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
        return subprocess.Popen(["bash", SCRIPT, *arguments], env={**os.environ, **known, **environment})

    return begin


def calls():
    return Path("calls").read_text().splitlines()


def test_the_slurm_script_asks_for_what_the_overlay_has():
    lines = SCRIPT.read_text().splitlines()
    options = [line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH --")]
    asked = dict(option.split("=", 1) for option in options if "=" in option)
    trainer = yaml.safe_load(recipes()["multi_node"].read_text())["trainer"]
    assert int(asked["nodes"]) == trainer["num_nodes"]
    assert int(asked["ntasks-per-node"]) == int(asked["gpus-per-node"]) == trainer["devices"]
    sizes = trainer["strategy"]["init_args"]
    world = trainer["num_nodes"] * trainer["devices"]
    assert sizes["data_parallel_size"] * sizes["tensor_parallel_size"] == world


def test_a_job_of_slurm_fits(slurm):
    assert slurm("--trainer.max_steps=5", SLURM_CPUS_PER_TASK="12").wait(LIMIT) == 0
    call, _ = calls()
    assert call.startswith("srun --cpus-per-task=12 ")
    assert call.endswith("fit --config c4 --config llama_7b --config multi_node --trainer.max_steps=5")


def test_a_job_that_fails_is_not_queued_again_and_one_that_was_goes_on(slurm):
    assert slurm(CODE="3").wait(LIMIT) == 3
    assert [call.split()[0] for call in calls()] == ["srun", "ended"]
    assert slurm(SLURM_RESTART_COUNT="1").wait(LIMIT) == 0
    assert calls()[2].endswith("--ckpt_path last")


def test_a_job_whose_time_is_up_is_queued_again(slurm):
    Path("wait").touch()
    job = slurm()
    end = time.monotonic() + LIMIT
    while not Path("calls").exists():
        assert time.monotonic() < end
        time.sleep(0.05)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(LIMIT) == 0
    assert calls()[1:] == ["scancel --signal=INT 7", "ended", "scontrol requeue 7"]
