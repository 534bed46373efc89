"""Models of a package that uses ``pytorch_lightning``, in a process of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
def test_models_train_and_predict_the_same_once_saved_and_loaded(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tests.integrations.forecasts"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert set(told) == {"NHITS", "PatchTST", "TFT"}
    for name, findings in told.items():
        assert all(findings.values()), f"{name}: {findings}"
