"""The recipe `control` in gymnasium's own environments."""

import json
from pathlib import Path

import pytest

from lightning_lowbit import cli

pytestmark = pytest.mark.slow
pytest.importorskip("gymnasium")

SMALL = {
    "trainer": {"max_steps": 16, "val_check_interval": 2},
    "model": {"init_args": {"copies": 2, "steps": 64, "epochs": 2, "batch_size": 32, "evaluation_episodes": 1}},
}


def fit(*configs):
    assert cli.main(["fit", *(f"--config={config}" for config in ("control", *configs))]) == 0
    [result] = [json.loads(path.read_text()) for path in Path("runs").rglob("run.json")]
    return result


def test_pendulum_learns_to_stand():
    """An untrained policy reaches about -1400, and one that holds the pendulum up -150 to -250."""
    result = fit("bf16")
    assert result["steps"] == 2000
    assert result["metrics"]["val_return"] > -400


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of MuJoCo's bindings
@pytest.mark.parametrize("overlay", ["half_cheetah", "ant", "hopper"])
def test_two_iterations_in_mujoco(overlay):
    pytest.importorskip("mujoco")
    Path("small.yaml").write_text(json.dumps(SMALL))
    assert fit(overlay, "small.yaml")["steps"] == 16
