"""Checkpoints with one entry changed: restoring them is a ``ValueError``, or gives what the file holds."""

import copy
import random
import warnings
from collections import Counter
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from lightning_lowbit import LowBitPrecision, restore
from tests.precision.checkpoints.test_restore import BATCH, PLUGINS, Module, in_the_midst, train
from tests.tables import each

KINDS = ("nvfp4", "fp8-delayed", "shared")
WRONG = [None, True, -1, 0, 2**70, 1.5, float("nan"), "", "fqt", "nvfp4", [], [1], {}, {"a": 1}, torch.ones(3)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A checkpoint of each kind, of weights and what the plugin tells alone."""
    paths = {}
    for kind in KINDS:
        path = tmp_path_factory.mktemp(kind) / "last.ckpt"
        train(PLUGINS[kind](), path, in_the_midst if kind == "nvfp4" else None)
        loaded = torch.load(path, weights_only=True)
        torch.save({name: loaded[name] for name in ("state_dict", "lightning_lowbit", "global_step")}, path)
        paths[kind] = path
    return paths


def edit(value, draw):
    """A value with one entry somewhere changed, removed, renamed or added."""
    if isinstance(value, Mapping) and value and draw.random() < 0.95:
        key = draw.choice(sorted(value, key=str))
        others = {name: item for name, item in value.items() if name != key}
        chance = draw.random()
        if chance < 0.1:
            return others
        return {**others, f"{key}x": value[key]} if chance < 0.15 else {**value, key: edit(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.7:
        place = draw.randrange(len(value))
        return [*value[:place], edit(value[place], draw), *value[place + 1 :]]
    if isinstance(value, Tensor) and draw.random() < 0.8:
        changes = [
            lambda t: t[:-1] if t.dim() else t,
            lambda t: torch.cat([t, t]) if t.dim() else t[None],
            lambda t: t.t() if t.dim() == 2 else t[None],
            lambda t: t * torch.nan,
            lambda t: t.half(),
            lambda t: t.long(),
            lambda t: t.to(torch.float8_e4m3fn),
            lambda t: t.to_sparse() if t.dim() else t,
            lambda t: t.to("meta"),
            lambda t: t.flatten().flip(0).reshape(t.shape),
        ]
        return draw.choice(changes)(value)
    return draw.choice(WRONG)


@torch.no_grad()
def outcome(path):
    """Restores a file twice, and says what came of it."""
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # entries that contradict each other are said
        try:
            LowBitPrecision.from_checkpoint(path)
            found = restore(Module(), path)(BATCH)
        except ValueError as error:
            assert str(error)
            return "error"
        again = restore(Module(), path)(BATCH)
    assert torch.equal(found, again) or found.isnan().any()
    return "restored"


@pytest.mark.parametrize(("count", "seed"), [(60, 0), pytest.param(2000, 1, marks=pytest.mark.slow)])
def test_a_changed_entry_is_refused_or_restored(checkpoints, tmp_path, count, seed):
    draw, counts, path = random.Random(seed), Counter[str](), tmp_path / "damaged.ckpt"
    whole = {kind: torch.load(file, weights_only=True) for kind, file in checkpoints.items()}
    for number in range(count):
        kind = draw.choice(KINDS)
        if number % 8 == 0:
            content = checkpoints[kind].read_bytes()
            path.write_bytes(content[: draw.randrange(len(content))])
        else:
            torch.save(edit(copy.deepcopy(whole[kind]), draw), path)
        try:
            counts[outcome(path)] += 1
        except BaseException as error:
            error.add_note(f"case {number} of the seed {seed}: {kind}")
            raise
    assert min(counts["error"], counts["restored"]) >= 5, counts


@each(
    ("change", "message"),
    [
        (lambda t: 3, "it is 3, and no tensor"),
        (lambda t: [1.0], r"it is \[1.0\], and no tensor"),
        (lambda t: t.half(), r"torch.float16 of shape \(32, 32\), and .* torch.float32 .*model.to\(dtype\)"),
        (lambda t: t.long(), "torch.int64"),
        (lambda t: t[:-1], r"of shape \(31, 32\), and a tensor torch.float32 of shape \(32, 32\) is needed"),
        (lambda t: t.to("meta"), "without numbers"),
        (lambda t: t.to_sparse(), "sparse"),
    ],
)
def test_a_weight_that_is_not_the_models_is_named(change, message, checkpoints):
    loaded = torch.load(checkpoints["nvfp4"], weights_only=True)
    loaded["state_dict"]["net.head.weight"] = change(loaded["state_dict"]["net.head.weight"])
    with pytest.raises(ValueError, match=f"another net.head.weight than the model: .*{message}"):
        restore(Module(), loaded)


def test_weights_of_another_dtype_are_restored_into_a_model_that_has_it(checkpoints):
    loaded = torch.load(checkpoints["shared"], weights_only=True)
    loaded["state_dict"] = {name: tensor.double() for name, tensor in loaded["state_dict"].items()}
    model = restore(Module().double(), loaded)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
