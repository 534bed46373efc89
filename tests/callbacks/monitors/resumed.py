"""A run of a monitor that is interrupted and resumed."""

from contextlib import nullcontext

import pytest
import torch

from tests.lightning_imports import TensorBoardLogger


def resume(trainer, make, model, steps, warning, logged):
    """Curves of a whole run, of its first part, and of the rest, which does not repeat what the first part warned of.

    The monitor ends in the state of the whole run, and the checkpoint holds the state that it had then.

    Args:
        trainer: takes the monitor and arguments of a `Trainer`.
        make, model: the monitor, and the model.
        steps: of the whole run and of its first part.
        warning: of both.
        logged: curves of a run.
    """
    curves, states = [], []
    whole, half = steps
    for name, end in (("whole", whole), ("half", half), ("rest", whole)):
        monitor, is_rest = make(), name == "rest"
        torch.manual_seed(0)
        with nullcontext() if is_rest else pytest.warns(UserWarning, match=warning):
            # An epoch is a step: Lightning resumes with the next epoch.
            run = trainer(monitor, max_steps=end, logger=TensorBoardLogger(name), limit_train_batches=1)
            run.fit(model(), **({"ckpt_path": "half.ckpt", "weights_only": True} if is_rest else {}))
        run.save_checkpoint(f"{name}.ckpt")
        curves.append(logged(run))
        states.append(monitor.state_dict())
    assert states[0] == states[2]
    assert torch.load("half.ckpt", weights_only=True)["callbacks"][type(monitor).__name__] == states[1]
    return tuple(curves)
