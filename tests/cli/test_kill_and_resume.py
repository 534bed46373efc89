"""Runs of the installed command that are killed again and again."""

import json
import os
import random
import shutil
import signal
import subprocess
import time

import pytest

from tests.cli import kill_and_resume


@pytest.mark.slow
def test_killed_runs_end_as_if_nobody_had_killed_them(tmp_path):
    """8 kills; ``LOWBIT_KILLS`` is another number, of which 30 take ten minutes on two cores."""
    number = int(os.environ.get("LOWBIT_KILLS", "8"))
    kill_and_resume.main(str(tmp_path), str(number))
    report = json.loads((tmp_path / "report.json").read_text())
    assert len(report["died"]) == number
    assert sum(where.startswith("save") for where in report["died"]) >= number // 3
    assert not report["differences"], report


@pytest.mark.slow
def test_killed_exports_leave_nothing_that_looks_like_one(tmp_path):
    """Each dies some time after it began to write; the next one removes what was left, and is whole."""
    kill_and_resume.prepare(tmp_path / "run", 2)
    assert kill_and_resume.fit(tmp_path / "run", log="fit.log") == 0
    (checkpoint,) = tmp_path.glob("run/runs/*/checkpoints/last.ckpt")
    output, draw, died = tmp_path / "exports" / "exported", random.Random(0), 0
    command = [kill_and_resume.LOWBIT, "export", checkpoint, "--format=dequantized", "--no-parity", "--output", output]
    for _ in range(10):
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            while process.poll() is None and not [*output.parent.glob("*.partial")]:
                time.sleep(0.001)
            time.sleep(draw.uniform(0, 0.1))
            process.kill()
            died += process.wait() == -signal.SIGKILL
        if output.exists():
            assert (output / "lowbit.json").exists() and (output / "model.safetensors").exists()
            shutil.rmtree(output)
    assert died >= 5
    subprocess.run(command, check=True, capture_output=True)
    assert os.listdir(output.parent) == ["exported"]
