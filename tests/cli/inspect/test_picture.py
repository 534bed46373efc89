"""The picture of layers, and mistakes."""

import math
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lightning_lowbit.cli.lab.inspect import command
from lightning_lowbit.metrics import levels
from lightning_lowbit.report.pictures import write_picture
from tests.cli.inspect.models import WITH_WEIGHTS, inspect, is_png
from tests.tables import each


def inspection(names, casts=("nvfp4", "mxfp4"), weight=torch.randn):
    candidates = command.parse_casts(casts)
    errors = {name: [command.measure(weight(4, 32), candidate) for candidate in candidates] for name in names}
    return command.Inspection(candidates, dict.fromkeys(names, (4, 32)), errors)


def test_the_picture_has_all_weights_and_how_often_levels_are_used():
    study = inspection(["a", "b"], WITH_WEIGHTS)
    heat, *charts = study.picture("a title")
    assert heat.caption == "a title" and [*heat.rows] == ["a", "b"] and [*heat.columns] == WITH_WEIGHTS
    assert heat.values == [[numbers["sqnr"] for numbers in study.numbers[name]] for name in heat.rows]
    assert len(charts) == len(WITH_WEIGHTS)
    for chart, candidate, total, codes in zip(charts, study.candidates, study.totals, study.codes, strict=True):
        xs, ys = chart.series[candidate.label]
        assert xs == levels(candidate.cast.grid) and ys == pytest.approx((100 * codes / codes.sum()).tolist())
        assert f"{candidate.label}: {candidate.cast.bits:.4g} bits, mean {total['sqnr']:.1f} dB" in chart.title


def test_many_weights_share_the_rows_of_their_kinds():
    kinds = ("norm", "blocks.{}.up", "blocks.{}.down")
    study = inspection(dict.fromkeys(kind.format(i) for i in range(60) for kind in kinds))
    heat, *_ = study.picture("a title")
    assert [*heat.rows] == ["norm", "blocks.{0-59}.up", "blocks.{0-59}.down"]
    lowest = [min(study.numbers[f"blocks.{i}.up"][column]["sqnr"] for i in range(60)) for column in (0, 1)]
    assert heat.values[1] == lowest and "the lowest of weights whose names differ in numbers" in heat.unit


def test_small_differences_look_small_and_exact_weights_are_drawn():
    assert command._limits([20.0, 20.2]) == pytest.approx((18.6, 21.6))
    assert command._limits([10.0, 20.0, math.inf, -math.inf, math.nan]) == (10.0, 20.0)
    assert command._limits([math.inf]) == pytest.approx((-1.5, 1.5))
    study = inspection(["zero"], weight=torch.zeros)
    assert study.totals[0]["sqnr"] == math.inf
    write_picture(Path("a.png"), *study.picture("title"))
    assert is_png("a.png")


GOOD = {"state_dict": {"up.weight": torch.randn(2, 16)}}
OBJECT = {"state_dict": {"w": torch.ones(2, 16)}, "hyper_parameters": partial(print)}
NUMBERS = {"bias": torch.ones(16), "count": torch.ones(2, 16, dtype=torch.int64), "step": 1}
SPARSE = {"up.weight": torch.eye(16).to_sparse(), "down.weight": torch.randn(2, 16)}
CODES = {"up.weight": torch.zeros(2, 16, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}
EXPORTED = {"up.weight_packed": torch.zeros(32, 8, dtype=torch.uint8), "up.weight_scale": torch.ones(32, 1)}
HALF = '{"weight_map": {"w": "1.safetensors"}}'
INDEX, NO_INDEX = "pytorch_model.bin.index.json", "/pytorch_model.bin.index.json does not name the files of weights"


def write(name, content):
    """A file with a text, or what torch or safetensors save; of a name with a slash also its folder."""
    path = Path(name)
    path.parent.mkdir(exist_ok=True)
    if isinstance(content, str):
        path.write_text(content)
    else:
        (save_file if path.suffix == ".safetensors" else torch.save)(content, path)


@each(
    "name, content, line",
    [
        ("nothing.ckpt", None, "There is no nothing.ckpt. Give a Lightning .ckpt, "),
        ("object.ckpt", OBJECT, " holds an object, functools.partial, beside tensors and primitives. Save the weights"),
        ("empty.ckpt", "", " cannot be loaded (EOFError). It is damaged, or no checkpoint: give another."),
        ("text.ckpt", "hello there\n" * 20, "text.ckpt is a text, and no checkpoint."),
        ("text.safetensors", "hello there\n" * 20, " cannot be read (Error while deserializing header"),
        ("numbers.ckpt", NUMBERS, "numbers.ckpt holds no matrix of floating point numbers"),
        ("tensor.ckpt", torch.ones(4, 16), " holds a Tensor, not the mapping that a checkpoint is."),
        ("sharded/.metadata", "", "`lowbit consolidate sharded` makes of it"),
        ("folder/text", "", "The folder folder holds neither model.safetensors nor pytorch_model.bin."),
        (f"garbage/{INDEX}", "garbage", f"garbage{NO_INDEX}"),
        (f"empty/{INDEX}", "{}", f"empty{NO_INDEX}"),
        (f"nested/{INDEX}", "[" * 200_000, f"nested{NO_INDEX}"),
        ("sparse.pt", SPARSE, "up is sparse (sparse_coo); save weight.to_dense(). Name the other weights with --only"),
        ("meta.pt", {"up.weight": torch.empty(2, 16, device="meta")}, "up has a shape and no numbers (it is on the me"),
        ("codes.safetensors", CODES, "up holds codes of FP4, two in a byte, which are quantized already. Name the"),
        ("exported.safetensors", EXPORTED, "up.weight_scale is of a layer that is quantized already"),
        ("half/model.safetensors.index.json", HALF, "No such file or directory: half/1.safetensors"),
    ],
)
def test_what_is_no_checkpoint(name, content, line, capsys):
    if content is not None:
        write(name, content)
    assert inspect(Path(name).parent if "/" in name else name, "--casts", "nvfp4") == 2
    (shown,) = capsys.readouterr().err.strip().splitlines()
    assert line in shown
    assert not list(Path().glob("*.png"))


@each(
    "arguments, line",
    [
        (["--casts", "nvfp5"], "Unknown preset 'nvfp5'. Did you mean 'nvfp4'?"),
        (["--casts", "4"], "a preset's name or a mapping of fields; got 4."),
        (["--casts", "bf16"], "bf16 leaves weights in high precision (no fprop_w)"),
        (["--casts", "{elment: int4}"], "Unknown field of Cast 'elment'. Did you mean 'element'?"),
        (["--casts", "{element: int4"], "--casts takes presets and fields of casts"),
        (["--casts", ""], "--casts takes presets and fields of casts"),
        (["--casts", "nvfp4", "--only", "u"], "--only: the pattern 'u' matches no weight. There are 1, e.g. up."),
        (["--casts", "nvfp4", "--only", "("], "--only: '(' is not a regular expression"),
        (["--casts", "nvfp4", "--transposed", "c_fc"], "--transposed: the pattern 'c_fc' matches no weight."),
        (["--casts", "nvfp4", "--output=a.doc"], "is the name of a picture, such as casts.png; got 'a.doc'."),
        ([], "lowbit inspect needs --casts (presets). For example: lowbit inspect runs/"),
    ],
)
def test_mistakes(arguments, line, capsys):
    write("good.ckpt", GOOD)
    assert inspect("good.ckpt", *arguments) == 2
    assert line in capsys.readouterr().err.strip().splitlines()[-1]
    assert not list(Path().glob("*.png"))


def test_without_matplotlib_there_is_the_table(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    write("good.ckpt", GOOD)
    assert inspect("good.ckpt", "--casts", "nvfp4") == 2
    shown = capsys.readouterr()
    assert "The picture takes matplotlib: pip install 'matplotlib>=" in shown.err and "mean of 1" in shown.out
