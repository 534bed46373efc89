"""Checkpoints that hold something else than they should: what is refused names the entry, and what to do."""

import pytest
import torch
from torch import nn

from lightning_lowbit.precision.checkpoints.files import load_checkpoint, load_weights, state_of
from tests.tables import each

STATE = {"step": 3, "micro_batch": 1, "seed": 0, "phase": "fqt"}


@each(
    ("changes", "message"),
    [
        ({"step": None}, "step = None, which should be a whole number, 0 or more"),
        ({"step": True}, "step = True, which should be a whole number"),
        ({"micro_batch": -1}, "micro_batch = -1, which should be a whole number, 0 or more"),
        ({"phase": "fpt"}, "Unknown phase in the checkpoint 'fpt'. Did you mean 'fqt'"),
        ({"blend": torch.ones(2)}, r"blend = a tensor torch.float32 of shape \(2,\), which should be one number"),
        ({"accumulated": 0}, "accumulated = 0, which should be 1 or more"),
        ({"casts": {"layer": "nvfp4"}}, "casts.layer = 'nvfp4', which should be a mapping"),
        ({"scaler": {"scale": "large"}}, r"scaler\.\w+"),
        (
            {"amax_history": {"layer": torch.ones(2, 2)}, "channel_amax": {}},
            r"amax_history.layer = a tensor torch.float32 of shape \(2, 2\), which should be one row",
        ),
        (
            {"amax_history": {}, "channel_amax": {"layer": torch.ones(2, dtype=int)}},
            "channel_amax.layer = .*, which should be one row of floating-point numbers",
        ),
        ({"gradient_scale": {"loss": 2.0}}, "gradient_scale.loss = 2.0, which should be one row"),
        ({"trained": 1}, "trained = 1, which should be"),
    ],
)
def test_a_wrong_entry_is_named(changes, message):
    assert state_of({"lightning_lowbit": STATE}) == STATE
    with pytest.raises(ValueError, match=message):
        state_of({"lightning_lowbit": {**STATE, **changes}})


@pytest.mark.parametrize("name", STATE)
def test_a_missing_entry_is_named(name):
    with pytest.raises(ValueError, match=f"lacks the entry {name}, .*: it was damaged, or written by another version"):
        state_of({"lightning_lowbit": {key: value for key, value in STATE.items() if key != name}})


def test_files_that_are_no_checkpoints_are_refused(tmp_path):
    file, folder = tmp_path / "a.ckpt", tmp_path / "folder"
    with pytest.raises(FileNotFoundError, match="a.ckpt does not exist"):
        load_checkpoint(file)
    torch.save([1, 2], file)
    with pytest.raises(ValueError, match="holds a list, not the mapping"):
        load_checkpoint(file)
    file.write_text("text")
    with pytest.raises(ValueError, match="a.ckpt is a text, and no checkpoint"):
        load_checkpoint(file)
    file.write_bytes(b"\0")
    with pytest.raises(ValueError, match="a.ckpt cannot be loaded .*damaged, or no checkpoint: give another"):
        load_checkpoint(file)
    with pytest.raises(ValueError, match="A checkpoint is a path, or what torch.load returned; got None"):
        load_checkpoint(None)
    folder.mkdir()
    with pytest.raises(ValueError, match="folder is no checkpoint: a folder with one has a file"):
        load_checkpoint(folder)


def test_weights_of_another_model_are_refused():
    model = nn.Linear(4, 2)
    with pytest.raises(ValueError, match=r"no weights \(no state_dict\)"):
        load_weights(model, {})
    with pytest.raises(ValueError, match="lacks 1 of the model's 2 tensors, e.g. bias; it has e.g. weight"):
        load_weights(model, {"state_dict": {"weight": torch.zeros(2, 4)}})
    with pytest.raises(ValueError, match=r"another weight .* of shape \(4, 2\), and .* of shape \(2, 4\) is needed"):
        load_weights(model, {"state_dict": {"weight": torch.zeros(4, 2), "bias": torch.zeros(2)}})
