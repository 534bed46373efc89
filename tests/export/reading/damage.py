"""Folders that are damaged in one place, and what reading them may do."""

import json
import random
import shutil
from functools import partial

import torch
from safetensors.torch import load_file, save_file

from lightning_lowbit import LinearCasts
from lightning_lowbit.export.folder import write_record
from lightning_lowbit.export.formats.base import Options
from lightning_lowbit.export.formats.table import FORMATS
from tests.export.originals import language_model
from tests.precision.checkpoints.test_fuzzed import edit

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
FAILS, SAME, ANY = "fails", "same", "any"  # an error; the outputs of the whole folder; an error or any outputs
TOKENS = torch.randint(0, 96, (1, 12), generator=torch.Generator().manual_seed(0))


def _weights_alone(element, **scale):
    cast = {"element": element, "scale": scale, "round_to_bfloat16": scale["format"] != "fp32"}
    return {"fprop_w": cast, "dgrad_w": "fprop"}


_INT8_INPUTS = {"fprop_x": {"element": "int8", "scale": {"format": "fp32", "block": "row"}}, "wgrad_x": "fprop"}

# name: (format, casts, configuration)
KINDS = {
    "nvfp4": ("nvfp4-w4a16", "nvfp4", {}),
    "nvfp4, inputs": ("nvfp4-w4a4", "nvfp4", {"tie_word_embeddings": True}),
    "mxfp4": ("mxfp4", "mxfp4", {}),
    "mxfp6": ("mxfp6", _weights_alone("e2m3", format="e8m0", block=32), {}),
    "mxfp8": ("mxfp8", "mxfp8", {}),
    "fp8, rows": ("fp8", "fp8-row", {}),
    "fp8, tensor": ("fp8", "fp8-current", {"tie_word_embeddings": True}),
    "fp8, tiles": ("fp8", "fp8-blockwise", {}),
    "int2": ("int2", "ternary", {}),
    "int3": ("int3", _weights_alone("int3", format="bf16", block=32), {}),
    "int4": ("int4", _weights_alone("int4", format="fp32", block=32), {}),
    "int8": ("int8", _weights_alone("int8", format="fp32", block="row"), {}),
    "int8, inputs": ("int8", {**_weights_alone("int8", format="fp32", block="row"), **_INT8_INPUTS}, {}),
    "modelopt, nvfp4": ("modelopt-nvfp4", "nvfp4", {}),
    "modelopt, fp8": ("modelopt-fp8", "fp8-current", {}),
    "bitnet": ("bitnet", "ternary", {}),
    "dequantized": ("dequantized", "nvfp4", {"tie_word_embeddings": True}),
}


def whole(kind, parent, recorded=True):
    """A folder with a model of one layer, made once, with or without a record of its training."""
    folder = parent / f"{kind.replace(', ', '-')}-{recorded}"
    if folder.exists():
        return folder
    name, casts, config = KINDS[kind]
    original = language_model("llama", LinearCasts.of(casts), num_hidden_layers=1, **config)
    options = Options(True, dict.fromkeys(original.layers, 3.0), torch.float32)
    folder.mkdir()
    FORMATS[name].write(original, folder, options)
    if recorded:
        write_record(original, name, folder)
    return folder


def in_shards(folder):
    tensors = load_file(folder / WEIGHTS)
    names, half = sorted(tensors), len(tensors) // 2
    where = {}
    for file, part in (("a.safetensors", names[:half]), ("b.safetensors", names[half:])):
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(part, file)
    (folder / WEIGHTS).unlink()
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))


# --- one change of a tensor: what is there, or None to leave it out ---


def _one_number(tensor, value, draw):
    changed = tensor.clone()
    place = draw.randrange(tensor.numel())
    if tensor.is_floating_point() and tensor.element_size() > 1:
        changed.view(-1)[place] = value
    else:
        changed.view(torch.uint8).view(-1)[place] ^= 1 << draw.randrange(8)
    return changed


def _other_dtype(tensor, draw):
    possible = [torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2]
    dtype = draw.choice([each for each in possible if each != tensor.dtype])
    if tensor.dtype in (torch.int32, torch.int64) and tensor.dim() == 1 and dtype in (torch.int32, torch.int64):
        dtype = torch.float32  # shapes may be in either
    return tensor.float().to(dtype)


SHAPES = {
    "a row is cut": lambda t, draw: t[:-1] if t.dim() else None,
    "a row alone": lambda t, draw: t[:1] if t.dim() and len(t) > 1 else None,
    "no rows": lambda t, draw: t[:0] if t.dim() else None,
    "twice": lambda t, draw: torch.cat([t, t]) if t.dim() else t.repeat(2),
    "a column is cut": lambda t, draw: t[:, :-1] if t.dim() > 1 else None,
    "one column more": lambda t, draw: torch.cat([t, t[..., :1]], -1) if t.dim() else None,
    "transposed": lambda t, draw: t.t() if t.dim() == 2 and t.shape[0] != t.shape[1] else None,
    "one dimension more": lambda t, draw: t[None, None],
    "half as wide": lambda t, draw: t.reshape(2 * len(t), -1) if t.dim() == 2 and t.shape[1] % 2 == 0 else None,
    "missing": lambda t, draw: None,
    "another dtype": _other_dtype,
}
VALUES = {
    "a bit": lambda t, draw: _one_number(t, draw.choice([0.0, -1.0, 3e38, 1e-30]), draw),
    "all zero": lambda t, draw: torch.zeros_like(t),
    "NaN": lambda t, draw: _one_number(t, torch.nan, draw),
    "infinite": lambda t, draw: _one_number(t, torch.inf, draw),
    "drawn": lambda t, draw: t.view(torch.uint8).flip(0).view(t.dtype) if t.dim() else t,
}


def change_tensor(folder, name, change):
    """Applies a change to a tensor, or to None where it is not there yet; None leaves it out."""
    tensors = load_file(folder / WEIGHTS)
    changed = change(tensors.pop(name, None))
    if changed is not None:
        tensors[name] = changed.contiguous()
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def change_some_tensor(folder, draw, change):
    name = draw.choice(sorted(load_file(folder / WEIGHTS)))
    change_tensor(folder, name, lambda tensor: change(tensor, draw))
    return name


def rename(folder, draw):
    tensors = load_file(folder / WEIGHTS)
    one, other = draw.sample(sorted(tensors), 2)
    name = draw.choice([f"{one}_old", f"x.{one}".replace("layers.0", "layers.7"), None])
    if name is None:
        tensors[f"{other}.{one.rpartition('.')[2]}"] = tensors[one].clone()
    else:
        tensors[name] = tensors.pop(one)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def _two_files(folder, draw):
    return draw.sample(
        [folder / name for name in (WEIGHTS, "config.json", "lowbit.json") if (folder / name).exists()], 2
    )


def truncate(folder, draw):
    path, _ = _two_files(folder, draw)
    content = path.read_bytes()
    path.write_bytes(content[: draw.randrange(len(content.rstrip()))])


def swap_files(folder, draw):
    one, other = _two_files(folder, draw)
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def to_folder(folder, draw):
    path, _ = _two_files(folder, draw)
    path.unlink()
    path.mkdir()


def add_strays(folder, draw):
    tensors = load_file(folder / WEIGHTS)
    other = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    for name in ("zzz.safetensors", "consolidated.safetensors", "model.safetensors.bak"):
        save_file(other, folder / name)


def edit_index(folder, draw):
    in_shards(folder)
    index = json.loads((folder / INDEX).read_text())
    where, name = index["weight_map"], draw.choice(sorted(index["weight_map"]))
    kind = draw.randrange(10)
    if kind < 5:
        outside = folder.parent / "outside.safetensors"
        shutil.copy(folder / "a.safetensors", outside)
        (folder / "sub").mkdir()
        shutil.copy(outside, folder / "sub" / "a.safetensors")
        new = ["missing.safetensors", "../outside.safetensors", str(outside), "./a.safetensors", "sub/a.safetensors"]
        where |= {name: new[kind] for name, file in where.items() if file == "a.safetensors"}
    elif kind == 5:
        where[name] = {"a.safetensors": "b.safetensors", "b.safetensors": "a.safetensors"}[where[name]]
    elif kind == 6:
        del where[name]
    elif kind == 7:
        where["other.weight"] = "a.safetensors"
    elif kind == 8:
        index["weight_map"] = draw.choice([None, [], 3, {name: 3}, {name: None}])
    else:  # a tensor in two files
        others = load_file(folder / "b.safetensors")
        both = {**load_file(folder / "a.safetensors"), min(others): others[min(others)]}
        save_file(both, folder / "a.safetensors", metadata={"format": "pt"})
    (folder / INDEX).write_text(json.dumps(index))


def edit_json(folder, draw, name, key=None):
    path = folder / name
    content = json.loads(path.read_text())
    if key is None:
        content = edit(content, draw)
    elif key in content:
        content[key] = edit(content[key], draw)
    path.write_text(json.dumps(content, default=str))


def drop_from_record(folder, draw):
    path = folder / "lowbit.json"
    record = json.loads(path.read_text())
    if record["format"] != "dequantized":  # whose casts are for people
        del record["layers"][draw.choice(sorted(record["layers"]))]
        path.write_text(json.dumps(record))


DAMAGE = {
    **{name: (FAILS, partial(change_some_tensor, change=change)) for name, change in SHAPES.items()},
    **{name: (ANY, partial(change_some_tensor, change=change)) for name, change in VALUES.items()},
    "renamed": (FAILS, rename),
    "bytes are cut": (FAILS, truncate),
    "files are swapped": (FAILS, swap_files),
    "a folder in place of a file": (FAILS, to_folder),
    "no file": (FAILS, lambda folder, draw: (folder / draw.choice([WEIGHTS, "config.json"])).unlink()),
    "old files beside it": (SAME, add_strays),
    "in shards": (SAME, lambda folder, draw: in_shards(folder)),
    "an index beside a file": (FAILS, lambda folder, draw: (folder / INDEX).write_text('{"weight_map": {"a": "b"}}')),
    "another index": (FAILS, edit_index),
    "config.json": (ANY, partial(edit_json, name="config.json")),
    "quantization_config": (SAME + FAILS, partial(edit_json, name="config.json", key="quantization_config")),
    "lowbit.json": (ANY, partial(edit_json, name="lowbit.json")),
    "a layer without casts": (FAILS, drop_from_record),
}


def cases(count, seed, without=()):
    """Kinds of folders and of damage, without some, each with a generator of its own."""
    draw = random.Random(seed)
    kinds, damage = ([name for name in names if name not in without] for names in (KINDS, DAMAGE))
    for number in range(count):
        yield draw.choice(kinds), damage[number % len(damage)], random.Random(f"{seed} {number}")


def damaged(folder, target, damage, draw):
    """A copy of a folder with some damage; returns what reading it may do."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(folder, target)
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    expected, change = DAMAGE[damage]
    changed = change(target, draw)
    if isinstance(changed, str) and changed.endswith(("input_scale", "input_global_scale")):  # engines alone use them
        expected = SAME + FAILS
    after = {path.name: path.read_bytes() for path in target.rglob("*") if path.is_file()}
    return SAME if before == after else expected
