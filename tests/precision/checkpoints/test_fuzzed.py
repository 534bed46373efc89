"""Damaged checkpoints: restoring them is a ``ValueError`` that names the entry, or gives what the file holds."""

import copy
import random
import warnings
from collections import Counter
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from lightning_lowbit import LowBitPrecision, restore
from lightning_lowbit.precision.checkpoints.files import load_checkpoint, load_weights, state_of
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


@pytest.mark.parametrize(("count", "seed"), [(25, 0), pytest.param(2000, 1, marks=pytest.mark.slow)])
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


STATE = {"step": 3, "micro_batch": 1, "seed": 0, "phase": "fqt"}


@each("changes, message", [
    ({"step": None}, "step = None, which should be a whole number, 0 or more"),
    ({"step": True}, "step = True, which should be a whole number"),
    ({"micro_batch": -1}, "micro_batch = -1, which should be a whole number, 0 or more"),
    ({"phase": "fpt"}, "Unknown phase in the checkpoint 'fpt'. Did you mean 'fqt'"),
    ({"blend": torch.ones(2)}, r"blend = a tensor torch.float32 of shape \(2,\), which should be one number"),
    ({"accumulated": 0}, "accumulated = 0, which should be 1 or more"),
    ({"casts": {"layer": "nvfp4"}}, "casts.layer = 'nvfp4', which should be a mapping"),
    ({"scaler": {"scale": "large"}}, r"scaler\.\w+"),
    ({"amax_history": {"layer": torch.ones(2, 2)}, "channel_amax": {}},
     r"amax_history.layer = a tensor torch.float32 of shape \(2, 2\), which should be one row"),
    ({"amax_history": {}, "channel_amax": {"layer": torch.ones(2, dtype=int)}},
     "channel_amax.layer = .*, which should be one row of floating-point numbers"),
    ({"gradient_scale": {"loss": 2.0}}, "gradient_scale.loss = 2.0, which should be one row"),
    ({"trained": 1}, "trained = 1, which should be"),
])  # fmt: skip
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
