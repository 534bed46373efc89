"""``lowbit validate`` evaluates a checkpoint as it was trained, whatever casts the configuration has."""

import re
from pathlib import Path

import pytest

from tests.cli.test_run import _text, lowbit, scalars  # noqa: F401  # the fixture writes a text and a recipe

LAST = Path("runs/tiny/version_0/checkpoints/last.ckpt")


def validated(capsys: pytest.CaptureFixture[str], *recipes: str, option: str = "--trainer.num_nodes=1") -> float:
    """The validation loss that the command prints."""
    assert lowbit(f"--ckpt_path={LAST}", option, recipes=("quickstart", *recipes), command="validate") == 0
    return float(re.findall(r"val_loss\s+│\s+([\d.]+)", capsys.readouterr().out)[-1])


def test_casts_are_those_of_the_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    # Two layers in another preset, and a phase that begins in mid-training: what no recipe below knows.
    casts = "--trainer.plugins.init_args.overrides={'down_proj': mxfp4}"
    assert lowbit(casts, recipes=("quickstart", "ternary")) == 0
    trained = scalars(LAST.parent.parent, "val_loss")[5]
    capsys.readouterr()
    for recipes in ((), ("bf16",), ("ternary",)):
        assert validated(capsys, *recipes) == pytest.approx(trained, abs=1e-6), recipes
    own = validated(capsys, option="--trainer.plugins.init_args.casts_of_checkpoint=false")
    assert abs(own - trained) > 1e-4, "the casts of the recipe, on purpose"
