"""``lowbit inspect`` of what is no checkpoint, or no longer a whole one: a table, or one line; and no code runs.

Cases are drawn from a seed, with what could go wrong in each layer.
"""

import json
import os
import pickle
import random
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.inspect.models import inspect


class Evil:
    """Runs code when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("code ran",)


# --- whole files ---


def whole(draw, path):
    """A checkpoint, weights alone, in torch's old format, of safetensors, or a folder with or without an index."""
    state = {f"layers.{i}.weight": torch.randn(draw.choice([1, 8, 16]), draw.choice([1, 16, 33])) for i in range(2)}
    name = draw.choice(["a.ckpt", "a.pt", "a.bin", "a.safetensors", "model.safetensors", "shard.safetensors"])
    if name.endswith(".safetensors"):
        save_file(state, path / name)
    else:
        content = {"state_dict": state, "epoch": 1, "hyper_parameters": {"lr": 0.1}} if name == "a.ckpt" else state
        torch.save(content, path / name, _use_new_zipfile_serialization=name != "a.bin")
    if name == "shard.safetensors":
        index = json.dumps({"weight_map": dict.fromkeys(state, name)})
        (path / "model.safetensors.index.json").write_text(index)
    return path / name if name.startswith("a.") else path


# --- damage to bytes ---


def flip(draw, data):
    for _ in range(draw.choice([1, 1, 8, 64])):
        place = draw.randrange(min(len(data), draw.choice([64, 512, len(data)])))
        data[place] = draw.randrange(256)
    return data


def clear(draw, data):
    start = draw.randrange(len(data))
    data[start : start + 100] = bytes(len(data[start : start + 100]))
    return data


def insert(draw, data):
    start = draw.randrange(len(data))
    return data[:start] + draw.randbytes(draw.choice([1, 8, 100])) + data[start:]


DAMAGE = [
    *(flip, flip, flip, clear, insert),
    lambda draw, data: data[: draw.randrange(len(data))],
    lambda draw, data: data[len(data) // 2 :] + data[: len(data) // 2],
    lambda draw, data: draw.choice([0, 2, 2**31, 2**62, 2**64 - 1]).to_bytes(8, "little") + data[8:],
]

# --- other content ---

ODD = {
    "meta": lambda: torch.empty(4, 4, device="meta"),
    "sparse": lambda: torch.eye(4).to_sparse(),
    "csr": lambda: torch.eye(4).to_sparse_csr(),
    "fp8": lambda: torch.randn(4, 16).to(torch.float8_e4m3fn),
    "e8m0": lambda: torch.ones(4, 16).to(torch.float8_e8m0fnu),
    "fp4": lambda: torch.zeros(4, 16, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    "fp64": lambda: torch.randn(4, 16, dtype=torch.float64) * 1e300,
    "complex": lambda: torch.randn(4, 4, dtype=torch.complex64),
    "nan": lambda: torch.full((4, 16), float("nan")),
    "empty": lambda: torch.empty(0, 16),
    "expanded": lambda: torch.ones(1, 1).expand(40, 40),
    "transposed": lambda: torch.randn(16, 4).t(),
    "three": lambda: torch.randn(2, 4, 16),
    "quantized": lambda: torch.quantize_per_tensor(torch.randn(4, 16), 0.1, 0, torch.qint8),
    "huge": lambda: torch.full((4, 16), 3e38),
    "tiny": lambda: torch.full((4, 16), 1e-45),
}
ONES = torch.ones(4, 4)
CONTENTS = [None, 1, "text", [], [ONES], {}, {"state_dict": None}, {"state_dict": [1]}, {1: ONES}]
CONTENTS += [{"state_dict": {"a": {"b": ONES}}}, ONES, {"a": 1, "b": "c"}]
CODE = [Evil(), {"state_dict": Evil()}, {"a.weight": ONES, "b": Evil()}]
TEXTS = ["", "{}", "[]", "null", "a: 1", "\0", "\ud800", "#!/bin/sh\n", "version https://git-lfs.github.com/spec/v1\n"]
WEIGHT_MAPS = ["1", "{}", '{"a": 1}', '{"a": null}', '{"a": "../../etc/passwd"}', '{"a": "/dev/zero"}']
WEIGHT_MAPS += ['{"a": "missing.safetensors"}', '{"a": "."}', '{"a": "\\u0000"}']
INDICES = ["", "[]", "{}", "[" * 100_000, *(f'{{"weight_map": {content}}}' for content in WEIGHT_MAPS)]


def odd_tensors(draw, path):
    kinds = draw.sample([*ODD], draw.choice([1, 1, 2]))
    names = draw.choice([kinds, ["", *kinds], ["\n", "a.bias"], ["x" * 300, "é.weight"]])
    return saved(draw, path, dict(zip(names, (ODD[kind]() for kind in kinds), strict=False)))


def odd_content(draw, path):
    return saved(draw, path, draw.choice([*CONTENTS, *CODE, *CODE, *CODE, *CODE]))


def saved(draw, path, content):
    path = path / draw.choice(["a.ckpt", "a.pt", "pytorch_model.bin"])
    if draw.random() < 0.1:
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=draw.random() < 0.7)
    return path.parent if path.suffix == ".bin" and draw.random() < 0.5 else path


def text_or_noise(draw, path):
    path = path / draw.choice(["a.ckpt", "a.safetensors", "model.safetensors", "pytorch_model.bin", "noextension"])
    text = draw.choice(TEXTS).encode(errors="surrogatepass")
    path.write_bytes(draw.choice([text, draw.randbytes(draw.choice([1, 8, 9, 1000]))]))
    return path


def archive(draw, path):
    with zipfile.ZipFile(path / "a.ckpt", "w") as file:
        for name in draw.sample(["data.pkl", "archive/data.pkl", "version", "archive/data/0", "../x"], 2):
            file.writestr(name, draw.randbytes(20))
    return path / "a.ckpt"


def index(draw, path):
    name = draw.choice(["model.safetensors", "pytorch_model.bin"])
    (path / f"{name}.index.json").write_text(draw.choice(INDICES))
    return path


ELSEWHERE = ["", "x" * 5000, "a\0b", "~nobody_there/a.ckpt", "/dev", "/dev/null/a", "\ud800.ckpt"]
PLACES = {
    "nothing": lambda path: None,
    "folder": Path.mkdir,
    "dangling": lambda path: path.symlink_to("nowhere"),
    "loop": lambda path: path.symlink_to(path.name),
    "fifo": os.mkfifo,
    "zeros": lambda path: path.symlink_to("/dev/zero"),
    "null": lambda path: path.symlink_to("/dev/null"),
    "metadata": lambda path: path.with_name(".metadata").touch(),
}


def place(draw, path):
    """Something that is no file, or cannot be read."""
    name = path / draw.choice(["a.ckpt", "a.safetensors", "model.safetensors", "pytorch_model.bin"])
    PLACES[draw.choice([*PLACES])](name)
    return draw.choice([name, path, Path(draw.choice(ELSEWHERE))])


OTHERS = [odd_tensors, odd_content, text_or_noise, place] * 2 + [archive, index]


def make(number, path):
    """The case of a number, in an empty folder: what to inspect."""
    draw = random.Random(number)
    torch.manual_seed(number)
    if draw.random() < 0.5:
        return draw.choice(OTHERS)(draw, path)
    inspected = whole(draw, path)
    files = [inspected] if inspected.is_file() else sorted(inspected.iterdir())
    damaged = draw.choice(files)
    damaged.write_bytes(draw.choice(DAMAGE)(draw, bytearray(damaged.read_bytes())))
    return inspected


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.filterwarnings("ignore")  # what torch says of rare tensors
@pytest.mark.parametrize(
    "cases", [range(60), pytest.param(range(60, 1060), marks=pytest.mark.slow)], ids=["60", "1000"]
)
def test_whatever_is_given_the_answer_is_a_table_or_one_line(cases, tmp_path, capsys, monkeypatch):
    statuses = []
    for number in cases:
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        try:
            path = make(number, folder)
            status = inspect(path, "--casts=nvfp4")
        except BaseException as error:
            error.add_note(f"in the case {number}: {[*folder.iterdir()]}")
            raise
        said = capsys.readouterr()
        statuses.append(status)
        assert status in (0, 2), (number, said)
        assert status == 0 or len(said.err.strip().splitlines()) == 1, (number, path, said.err)
        assert "code ran" not in {entry.name for entry in folder.iterdir()}, number
        assert "Traceback" not in said.err
    assert {0, 2} == set(statuses)
