"""The recipe `control` in gymnasium's own environments."""

from pathlib import Path

import pytest

from tests.recipes.recipe_names import run_json

pytestmark = pytest.mark.slow
pytest.importorskip("gymnasium")

SMALL = """
trainer: {max_steps: 16, val_check_interval: 2}
model: {init_args: {copies: 2, steps: 64, epochs: 2, batch_size: 32, evaluation_episodes: 1}}
"""


def test_pendulum_learns_to_stand():
    """An untrained policy reaches about -1400, and one that holds the pendulum up -150 to -250."""
    result = run_json("control", "bf16")
    assert result["steps"] == 2000
    assert result["metrics"]["val_return"] > -400


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of MuJoCo's bindings
@pytest.mark.parametrize("overlay", ["half_cheetah", "ant", "hopper"])
def test_two_iterations_in_mujoco(overlay):
    pytest.importorskip("mujoco")
    Path("small.yaml").write_text(SMALL)
    assert run_json("control", overlay, "small.yaml")["steps"] == 16
