"""The picture of layers, and mistakes."""

import json
import math
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_lowbit import cli
from lightning_lowbit.cli.lab.inspect import command
from lightning_lowbit.metrics import levels
from lightning_lowbit.report.pictures import write_picture
from tests.cli.inspect.models import WITH_WEIGHTS, inspect, is_png, table


def inspection(names, casts="nvfp4,mxfp4", weight=torch.randn):
    candidates = command.parse_casts(casts)
    errors = {name: [command.measure(weight(4, 32), candidate) for candidate in candidates] for name in names}
    return command.Inspection(candidates, dict.fromkeys(names, (4, 32)), errors)


def test_the_picture_has_all_weights_and_how_often_levels_are_used():
    study = inspection(["a", "b"], ",".join(WITH_WEIGHTS))
    heat, *charts = study.picture("a title")
    assert heat.caption == "a title" and [*heat.rows] == ["a", "b"] and [*heat.columns] == WITH_WEIGHTS
    assert heat.values == [[numbers["sqnr"] for numbers in study.numbers[name]] for name in heat.rows]
    assert len(charts) == len(WITH_WEIGHTS)
    for chart, candidate, total, codes in zip(charts, study.candidates, study.totals, study.codes, strict=True):
        xs, ys = chart.series[candidate.label]
        assert xs == levels(candidate.cast.grid) and ys == pytest.approx((100 * codes / codes.sum()).tolist())
        assert f"{candidate.label}: {candidate.cast.bits:.4g} bits, mean {total['sqnr']:.1f} dB" in chart.title


def test_small_differences_look_small():
    assert command._limits([20.0, 20.2]) == pytest.approx((18.6, 21.6))
    assert command._limits([10.0, 20.0, math.inf, -math.inf, math.nan]) == (10.0, 20.0)
    assert command._limits([math.inf]) == pytest.approx((-1.5, 1.5))


def test_exact_weights_are_drawn():
    study = inspection(["zero"], weight=torch.zeros)
    assert study.totals[0]["sqnr"] == math.inf
    write_picture(Path("a.png"), *study.picture("title"))
    assert is_png("a.png")


def write(kind):
    path = Path("it.safetensors" if kind in ("garbage.safetensors", "F4") else "it.ckpt")
    if kind == "object":
        torch.save({"state_dict": {"w": torch.ones(2, 16)}, "hyper_parameters": partial(print)}, path)
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind in ("garbage", "garbage.safetensors"):
        path.write_text("hello there\n" * 20)
    elif kind == "broken zip":
        torch.save({"w": torch.ones(2, 16)}, path)
        path.write_bytes(path.read_bytes()[:-200])
    elif kind == "numbers":
        torch.save({"bias": torch.ones(16), "count": torch.ones(2, 16, dtype=torch.int64), "step": 1}, path)
    elif kind == "tensor":
        torch.save(torch.ones(4, 16), path)
    elif kind == "sharded":
        path.mkdir()
        (path / ".metadata").touch()
    elif kind == "folder":
        path.mkdir()
    elif kind == "missing shard":
        path.mkdir()
        index = {"weight_map": {"w": "model-00001-of-00002.safetensors"}}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    elif kind.endswith("index"):
        path.mkdir()
        content = {"garbage index": "garbage", "empty index": "{}", "nested index": "[" * 200_000}[kind]
        (path / "pytorch_model.bin.index.json").write_text(content)
    elif kind == "sparse":
        torch.save({"up.weight": torch.eye(16).to_sparse(), "down.weight": torch.randn(2, 16)}, path)
    elif kind == "meta":
        torch.save({"up.weight": torch.empty(2, 16, device="meta")}, path)
    elif kind == "F4":
        save_file({"up.weight": torch.zeros(2, 16, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}, path)
    elif kind == "good":
        torch.save({"state_dict": {"up.weight": torch.randn(2, 16)}}, path)
    return path


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("nothing", "There is no it.ckpt. Give a Lightning .ckpt, "),
        ("object", "it.ckpt holds an object, functools.partial, beside tensors and primitives. Save the weights"),
        ("empty", "it.ckpt cannot be loaded (EOFError). It is damaged, or no checkpoint: give another."),
        ("garbage", "it.ckpt is a text, and no checkpoint."),
        ("garbage.safetensors", "it.safetensors cannot be read (Error while deserializing header"),
        ("broken zip", "it.ckpt cannot be loaded ("),
        ("numbers", "it.ckpt holds no matrix of floating point numbers"),
        ("tensor", "it.ckpt holds a Tensor, not the mapping that a checkpoint is."),
        ("sharded", "`lowbit consolidate it.ckpt` makes of it"),
        ("folder", "The folder it.ckpt holds neither model.safetensors nor pytorch_model.bin."),
        ("garbage index", "it.ckpt/pytorch_model.bin.index.json does not name the files of weights"),
        ("empty index", "it.ckpt/pytorch_model.bin.index.json does not name the files of weights"),
        ("nested index", "it.ckpt/pytorch_model.bin.index.json does not name the files of weights"),
        ("sparse", "up is sparse (sparse_coo); save weight.to_dense(). Name the other weights with --only, or give"),
        ("meta", "up has a shape and no numbers (it is on the meta device). Name the other weights with --only"),
        ("F4", "up holds codes of FP4, two in a byte, which are quantized already. Name the other weights with"),
        ("missing shard", "No such file or directory: it.ckpt/model-00001-of-00002.safetensors"),
    ],
)
def test_what_is_no_checkpoint(kind, line, capsys):
    assert inspect(write(kind), "--casts", "nvfp4") == 2
    shown = capsys.readouterr().err.strip()
    assert line in shown
    assert len(shown.splitlines()) == 1
    assert not list(Path().glob("*.png"))


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--casts", "nvfp5"], "Unknown preset 'nvfp5'. Did you mean 'nvfp4'?"),
        (["--casts", "nvfp4,mxfp"], "Unknown preset 'mxfp'. Did you mean 'mxfp"),
        (["--casts", "4"], "a preset's name or a mapping of fields; got 4."),
        (["--casts", "bf16"], "bf16 leaves weights in high precision (no fprop_w)"),
        (["--casts", "{element: int5000}"], "Unknown element format 'int5000'. Did you mean 'int5'?"),
        (["--casts", "{elment: int4}"], "Unknown field of Cast 'elment'. Did you mean 'element'?"),
        (["--casts", "{element: int4"], "--casts takes presets and fields of casts"),
        (["--casts", ""], "--casts takes presets and fields of casts"),
        (["--casts", "nvfp4", "--only", "u"], "--only: the pattern 'u' matches no weight. There are 1, e.g. up."),
        (["--casts", "nvfp4", "--only", "("], "--only: '(' is not a regular expression"),
        (["--casts", "nvfp4", "--transposed", "c_fc"], "--transposed: the pattern 'c_fc' matches no weight."),
        (
            ["--casts", "nvfp4", "--output", "a.doc"],
            "--output is the name of a picture, such as casts.png; got 'a.doc'.",
        ),
        (["--casts", "nvfp4", "--nonsense"], "There is no option --nonsense. For example: lowbit inspect runs/"),
        ([], "lowbit inspect needs --casts (presets). For example: lowbit inspect runs/"),
    ],
)
def test_mistakes(arguments, line, capsys):
    assert inspect(write("good"), *arguments) == 2
    assert line in capsys.readouterr().err.strip().splitlines()[-1]
    assert not list(Path().glob("*.png"))


def test_without_matplotlib_there_is_the_table(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert inspect(write("good"), "--casts", "nvfp4") == 2
    shown = capsys.readouterr()
    assert "The picture takes matplotlib: pip install 'matplotlib>=" in shown.err and "mean of 1" in shown.out


def test_help(capsys):
    assert cli.main(["--help"]) == 0
    assert "\n  inspect CHECKPOINT --casts A,B\n" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        inspect("--help")
    shown = capsys.readouterr().out
    assert all(option in shown for option in ("--casts", "--only", "--transposed", "--output", "Conv1D"))


def test_weights_stored_the_other_way_round_are_told_by_their_biases(capsys):
    shape = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 16}
    torch.save(GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **shape)).state_dict(), "gpt2.pt")
    assert inspect("gpt2.pt", "--casts", "nvfp4") == 2
    error = capsys.readouterr().err
    assert "c_attn has 96 biases and the shape (32, 96)" in error and "--transposed 'c_attn|c_proj|c_fc'" in error
    assert inspect("gpt2.pt", "--casts", "nvfp4", "--only", "wte") == 0


def test_casts_may_be_repeated_and_change_a_preset(capsys):
    torch.save({"up.weight": torch.randn(8, 32)}, "weights.pt")
    changed = "{preset: nvfp4, every: {scale: {block: 8}}}"
    assert inspect("weights.pt", "--casts", "nvfp4", "--casts", f"mxfp4, {changed}") == 0
    casts = [cast for name, cast in table(capsys) if name == "up"]
    assert casts == ["nvfp4", "mxfp4", "e2m1/e4m3:1x8+fp32"]
