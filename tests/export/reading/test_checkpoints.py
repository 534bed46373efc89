"""What an export reads of a checkpoint that is damaged, or whose module needs files that have moved."""

import random

import pytest
import torch

from lightning_lowbit.export.trained_model import read
from tests.precision.checkpoints.test_fuzzed import edit

BASED, MOVED = "tests.export.modules.Based", "tests.export.modules.Moved"


@pytest.fixture
def whole(trained):
    return torch.load(trained("llama", "mxfp8", steps=2), weights_only=True)


def test_a_module_that_needs_a_folder_is_made_where_the_folder_is(whole, tmp_path):
    base = tmp_path / "base"
    read_back = read(_saved(whole, tmp_path)).model
    read_back.config.save_pretrained(base)
    torch.save(whole["state_dict"], base / "pytorch_model.bin")
    checkpoint = _saved({**whole, "hyper_parameters": {"folder": str(base)}}, tmp_path)
    assert len(read(checkpoint, BASED).layers) == len(read(_saved(whole, tmp_path, "own.ckpt")).layers)
    base.rename(tmp_path / "base-moved")
    with pytest.raises(ValueError, match=r"Based cannot be made .*OSError: .*moved.*--module a subclass"):
        read(checkpoint, BASED)
    assert read(checkpoint, MOVED).layers


def test_hyper_parameters_that_are_a_tensor_are_refused(whole, tmp_path):
    with pytest.raises(ValueError, match="hyper_parameters that are no mapping of names"):
        read(_saved({**whole, "hyper_parameters": torch.ones(3)}, tmp_path))


def test_half_a_file_is_no_reason_to_trust_it(whole, tmp_path):
    path = _saved(whole, tmp_path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ValueError, match="central directory.*It is damaged, or no checkpoint: give another") as raised:
        read(path)
    assert "weights_only" not in str(raised.value)


@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_a_changed_entry_is_refused_or_read(whole, tmp_path, count):
    draw, counts = random.Random(count // 200), {True: 0, False: 0}
    whole = {name: whole[name] for name in ("state_dict", "hyper_parameters", "lightning_lowbit", "TextDataModule")}
    for number in range(count):
        key = draw.choice(["hyper_parameters", "TextDataModule", "state_dict", "lightning_lowbit"])
        torch.save({**whole, key: edit(whole[key], draw)}, tmp_path / "damaged.ckpt")
        try:
            original = read(tmp_path / "damaged.ckpt")
            counts[original.model.config.vocab_size > 0] += 1
        except ValueError as error:
            assert str(error)
            counts[False] += 1
        except BaseException as error:
            error.add_note(f"case {number}: {key}")
            raise
    assert min(counts.values()) >= 2, counts


def _saved(content, folder, name="last.ckpt"):
    torch.save(content, folder / name)
    return folder / name
