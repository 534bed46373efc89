"""``lowbit inspect``: every matrix of a checkpoint in every cast, as a table and a picture."""

import itertools
import json
import math
import re
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text
from safetensors.torch import save_file
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from lightning_lowbit import Cast, FP4Precision, Scale, cli
from lightning_lowbit.cli.inspect import command
from lightning_lowbit.cli.inspect.table import Candidate, Inspection, _limits
from lightning_lowbit.metrics import cast_statistics
from lightning_lowbit.nn.casts import PRESETS, LinearCasts
from lightning_lowbit.nn.conversion.convert import plan
from lightning_lowbit.quant.hadamard import rotate

NVFP4 = LinearCasts.preset("nvfp4").fprop_w
WITH_WEIGHTS = [name for name, preset in PRESETS.items() if preset().fprop_w is not None]


def inspect(*arguments):
    return cli.main(["inspect", *map(str, arguments)])


def table(capsys):
    """The cells of what was printed by (weight, cast)."""
    lines = capsys.readouterr().out.splitlines()
    header, ruler, *rows = [cells for line in lines if len(cells := re.split(r"\s{2,}", line.strip())) == 9]
    rows.remove(header)  # above the means
    assert header[:4] == ["weight", "shape", "cast", "bits"]
    assert set("".join(ruler)) == {"-"}
    return {(row[0], row[2]): dict(zip(header, row, strict=True)) for row in rows}


def check_row(row, error):
    numbers = error.floats()
    assert float(row["SQNR dB"]) == pytest.approx(numbers["sqnr"], abs=0.0051)
    assert float(row["relative MSE"]) == pytest.approx(numbers["relative_mse"], rel=0.006)
    for column, name in (("underflow %", "underflow"), ("saturation %", "saturation"), ("bias %", "bias")):
        assert float(row[column]) == pytest.approx(100 * numbers[name], abs=0.0051), name


def is_png(path):
    pixels = imread(path)  # decodes it, whatever the name says
    assert min(pixels.shape[:2]) > 200
    assert np.ptp(pixels[..., :3]) > 0.5, "nothing is drawn"
    return Path(path).read_bytes().startswith(b"\x89PNG\r\n")


class Model(BoringModel):
    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(32, 48), nn.LayerNorm(48), nn.Linear(48, 2))
        self.tokens = nn.Embedding(10, 24)
        self.register_buffer("numbers", torch.arange(6).view(2, 3))


def llama(layers=2):
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "vocab_size": 64}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, bos_token_id=0, eos_token_id=0, **shape))


def test_checkpoint_of_low_bit_training(capsys):
    """A converted layer has plain weights, so a checkpoint of FP4 training is one like any other."""
    model = Model()
    trainer = Trainer(
        max_steps=2,
        plugins=[FP4Precision("nvfp4")],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model)
    trainer.save_checkpoint("runs/last.ckpt")
    capsys.readouterr()
    assert inspect("runs/last.ckpt", "--casts", "nvfp4,mxfp4") == 0
    rows = table(capsys)
    weights = {"layer.0": model.layer[0].weight, "layer.2": model.layer[2].weight, "tokens": model.tokens.weight}
    assert list(rows) == [(name, cast) for name in (*weights, "mean of 3") for cast in ("nvfp4", "mxfp4")]
    for (name, cast), row in rows.items():
        if name in weights:
            check_row(row, cast_statistics(weights[name].detach().bfloat16(), LinearCasts.preset(cast).fprop_w))
            assert row["shape"] == " x ".join(map(str, weights[name].shape))
    assert rows["layer.0", "nvfp4"]["bits"] == "4.5"
    assert rows["mean of 3", "mxfp4"]["bits"] == "4.25"
    assert rows["mean of 3", "mxfp4"]["shape"] == "1,872 elements"
    assert is_png("last_casts.png")


def test_the_last_row_is_a_mean_over_elements(capsys):
    state = {"a.weight": torch.randn(2, 16), "b.weight": 100 * torch.randn(6, 32), "zero": torch.zeros(4, 8)}
    torch.save(state, "weights.pt")
    assert inspect("weights.pt", "--casts", "mxfp4") == 0
    rows = table(capsys)
    sizes = {"a": 32, "b": 192, "zero": 32}
    for column in ("relative MSE", "underflow %", "saturation %", "bias %"):
        expected = sum(size * float(rows[name, "mxfp4"][column]) for name, size in sizes.items()) / 256
        assert float(rows["mean of 3", "mxfp4"][column]) == pytest.approx(expected, rel=0.01, abs=0.01)
    total = rows["mean of 3", "mxfp4"]
    assert float(total["SQNR dB"]) == pytest.approx(-10 * math.log10(float(total["relative MSE"])), abs=0.02)
    assert rows["zero", "mxfp4"]["SQNR dB"] == "inf"
    assert is_png("weights_casts.png")


def test_the_means_have_a_header_of_their_own(capsys):
    """Of many weights the one on top has scrolled away."""
    torch.save(llama().state_dict(), "it.ckpt")
    assert inspect("it.ckpt", "--casts", "nvfp4,mxfp4") == 0
    *_, blank, header, first, second, _, picture = capsys.readouterr().out.splitlines()
    assert (blank, header.split()[:2], picture.split()[0]) == ("", ["weight", "shape"], "Picture:")
    assert [first.split()[0], second.split()[0]] == ["mean", "mean"]


def test_what_is_no_weight_is_passed_over(capsys):
    """Beside a matrix: 0-d, objects of other kinds, keys that are no text."""
    state = {"x.weight": torch.randn(16, 32), "x.bias": torch.tensor(1.0), "y.weight": torch.randn(2, 16)}
    torch.save(state | {"y.bias": 3, 7: torch.ones(2, 2), None: 1, ("a", 1): {}}, "it.ckpt")
    assert inspect("it.ckpt", "--casts", "nvfp4") == 0
    assert {name for name, _ in table(capsys)} == {"x", "y", "mean of 2"}


def test_folders_of_transformers(capsys):
    model = llama(layers=11)
    model.save_pretrained("whole")
    model.save_pretrained("sharded", max_shard_size="64KB")
    assert Path("sharded/model.safetensors.index.json").exists()
    torch.save(model.state_dict(), "weights.bin")
    Path("old").mkdir()
    torch.save(model.state_dict(), "old/pytorch_model.bin")
    expected = {name.removesuffix(".weight"): p for name, p in model.named_parameters() if p.dim() == 2}
    for checkpoint in ("whole", "whole/model.safetensors", "sharded", "weights.bin", "old"):
        found = command.matrices(Path(checkpoint))
        assert set(found) == set(expected)
        assert all(torch.equal(found[name], expected[name]) for name in expected), checkpoint
        layers = [int(name.split(".")[2]) for name in found if ".mlp.up_proj" in name]
        assert layers == list(range(11)), f"{checkpoint}: layers out of order"
    capsys.readouterr()
    assert inspect("sharded", "--casts", "nvfp4", "--only", "mlp", "--output", "new/folder/a.png") == 0
    assert len(table(capsys)) == 34
    assert is_png("new/folder/a.png")


@pytest.mark.parametrize("preset", WITH_WEIGHTS)
def test_slices_make_no_difference(preset, monkeypatch):
    casts = LinearCasts.preset(preset)
    (candidate,) = command.parse_casts(preset)
    weight = torch.randn(70, 96) * torch.randn(70, 1).exp()
    whole = weight.bfloat16()
    if "fprop" in casts.hadamard:
        whole = rotate(whole, casts.hadamard["fprop"].matrix(None, whole.device), 1)
    expected = cast_statistics(whole, casts.fprop_w, key=0).floats()
    assert command.measure(weight, candidate).floats() == pytest.approx(expected, rel=1e-9)
    monkeypatch.setattr(command, "_SLICE", 96 * 20)
    assert command.measure(weight, candidate).floats() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    "scale",
    [
        Scale("fp32", "tensor"),
        Scale("fp32", "tensor", statistic="minmax"),
        Scale("fp32", "row", statistic="absmean"),
        Scale("fp32", "row"),
        Scale("e4m3", (32, 16)),
    ],
    ids=str,
)
def test_slices_make_no_difference_to_other_scales(scale, monkeypatch):
    monkeypatch.setattr(command, "_SLICE", 96 * 20)
    weight, cast = torch.randn(70, 96) * torch.randn(70, 1).exp(), Cast("int4", scale)
    found = command.measure(weight, Candidate("it", cast)).floats()
    assert found == pytest.approx(cast_statistics(weight.bfloat16(), cast).floats(), rel=1e-9)


def test_casts_are_presets_or_fields():
    text = "nvfp4,{element: int4, scale: {format: fp32, block: 128}}, {element: e2m1, scale: {block: [16, 16]}}, nvfp4"
    found = command.parse_casts(text)
    assert [candidate.label for candidate in found] == ["nvfp4", "int4/fp32:1x128", "e2m1/e4m3:16x16"]
    assert [candidate.cast for candidate in found] == [
        NVFP4,
        Cast("int4", Scale("fp32", 128)),
        Cast("e2m1", Scale("e4m3", (16, 16))),
    ]
    (ufp4,) = command.parse_casts("ufp4")
    assert ufp4.hadamard == LinearCasts.preset("ufp4").hadamard["fprop"]


def test_only_matches_as_the_plugin_does(capsys):
    model = llama()
    model.save_pretrained("model")
    names = list(command.matrices(Path("model")))
    layers = set(plan(model, "nvfp4"))
    assert layers == set(names) - {"model.embed_tokens"}
    for pattern in ("lm_head", "mlp", r"layers\.0", ".*_proj", "model", r"layers\.1\.self_attn", r"model\.layers", "1"):
        found = command.select(names, [pattern], "--only", "weight")
        assert found & layers == set(plan(model, "nvfp4", only=[pattern])), pattern
    assert command.select(names, ["embed_tokens"], "--only", "weight") == {"model.embed_tokens"}
    capsys.readouterr()
    assert inspect("model", "--casts", "nvfp4", "--only", "lm_head", "--only", r"layers\.1\.mlp\.up_proj") == 0
    assert [name for name, _ in table(capsys)] == ["lm_head", "model.layers.1.mlp.up_proj", "mean of 2"]


def test_transposed_weights(capsys):
    """GPT-2 stores [in, out]: blocks shall lie along in all the same."""
    shape = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 16}
    model = GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **shape))
    torch.save(model.state_dict(), "gpt2.pt")
    assert inspect("gpt2.pt", "--casts", "nvfp4", "--transposed", "c_attn|c_proj|c_fc") == 0
    rows = table(capsys)
    block = model.transformer.h[0]
    weight = block.mlp.c_fc.weight.detach()
    check_row(rows["transformer.h.0.mlp.c_fc", "nvfp4"], cast_statistics(weight.t().bfloat16(), NVFP4))
    assert rows["transformer.h.0.mlp.c_fc", "nvfp4"]["shape"] == "32 x 128", "as it is stored"
    check_row(
        rows["transformer.wpe", "nvfp4"], cast_statistics(model.transformer.wpe.weight.detach().bfloat16(), NVFP4)
    )
    different = cast_statistics(weight.t().bfloat16(), NVFP4).sqnr - cast_statistics(weight.bfloat16(), NVFP4).sqnr
    assert abs(different) > 0.01, "this weight cannot tell"


def test_names_are_those_of_the_bare_model():
    state = {"model._orig_mod.up.weight": torch.ones(2, 2), "rnn.weight_ih": torch.ones(2, 2)}
    state |= {"bias": torch.ones(2), "experts": torch.ones(2, 2, 2), "none.weight": torch.ones(0, 2)}
    torch.save({"state_dict": state, "optimizer_states": [{"state": torch.ones(3, 3)}]}, "a.ckpt")
    assert list(command.matrices(Path("a.ckpt"))) == ["model.up", "rnn.weight_ih"]


def test_weights_that_are_not_finite(capsys):
    good, bad = torch.randn(4, 16), torch.randn(4, 16)
    bad[1, 1] = math.nan
    torch.save({"good": good, "bad": bad}, "a.pt")
    assert inspect("a.pt", "--casts", "mxfp4") == 0
    shown = capsys.readouterr().out
    assert re.search(r"bad +4 x 16 +mxfp4 +4.25 +nan", shown)
    assert "left out of the last lines: bad" in shown
    good_row, total = (re.search(rf"{name}.*mxfp4 (.*)", shown)[1] for name in ("good", "mean of 1"))
    assert good_row == total
    torch.save({"bad": bad}, "a.pt")
    assert inspect("a.pt", "--casts", "mxfp4") == 2
    assert "Every weight holds a NaN or an infinity" in capsys.readouterr().err


# --- the picture ------------------------------------------------------------------------------------------------------


def inspection(names, casts="nvfp4,mxfp4"):
    candidates = command.parse_casts(casts)
    errors = {name: [command.measure(torch.randn(4, 32), candidate) for candidate in candidates] for name in names}
    return Inspection(candidates, dict.fromkeys(names, (4, 32)), errors)


def test_many_weights_share_rows():
    few = [f"layers.{i}.up" for i in range(40)]
    assert inspection(few)._rows() == {name: [name] for name in few}
    many = ["embed", *(f"layers.{i}.{kind}2" for i in range(30) for kind in ("up", "down")), "lm_head"]
    rows = inspection(many)._rows()
    assert [label.splitlines()[0] for label in rows] == ["embed", "layers.*.up2", "layers.*.down2", "lm_head"]
    assert rows["layers.*.up2\n30, first on top"] == [f"layers.{i}.up2" for i in range(30)]
    assert sorted(name for names in rows.values() for name in names) == sorted(many)


@pytest.mark.fast("a row for each", "one cast")
@pytest.mark.parametrize(
    ("names", "casts"),
    [
        (["a", "b"], "nvfp4"),
        (["embed", *(f"layers.{i}.up" for i in range(300))], "nvfp4, mxfp8, {element: int8}, {element: ternary}"),
        ([f"layers.{i}.up" for i in range(40)], "nvfp4, {element: int4, scale: {format: fp32, statistic: minmax}}"),
        (["a", "b"], ",".join(WITH_WEIGHTS)),
    ],
    ids=["one cast", "many weights", "a row for each", "many casts"],
)
def test_pictures(names, casts, monkeypatch):
    figures, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: figures.append(figure))
    study = inspection(names, casts)
    study.draw("a title as long as the names of two casts", Path("a.png"))
    (figure,) = figures
    save(figure, "a.png", dpi=100, bbox_inches="tight")
    assert is_png("a.png")
    left, *histograms = figure.axes
    assert len(histograms) == len(study.candidates)
    for i in range(len(histograms)):
        line, exact = left.lines[2 * i : 2 * i + 2]
        assert sorted(line.get_xdata()) == sorted(study.numbers[name][i]["sqnr"] for name in names)
        assert len(exact.get_xdata()) == 0
        (low, high), (bottom, top) = left.get_xlim(), left.get_ylim()
        assert high - low > 2.999
        assert all(low < x < high for x in line.get_xdata())
        assert all(top < y < bottom for y in line.get_ydata())
        assert [bar.get_height() for bar in histograms[i].patches] == pytest.approx(
            (100 * study.codes[i] / study.codes[i].sum()).tolist()
        )
    boxes = list(boxes_of_texts(figure))
    assert len(boxes) > 20
    for (one, box), (other, another) in itertools.combinations(boxes, 2):
        assert not box.overlaps(another), f"{one!r} and {other!r} lie on top of each other"


def boxes_of_texts(figure):
    """What is written, and where: without labels of ticks beyond an axis, and turned ones, whose boxes say nothing."""
    beyond = set()
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        places = zip(axis.get_ticklabels(), axis.get_ticklocs(), strict=True)
        beyond |= {label for label, place in places if not low <= place <= high}
    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # gives everything its place
    for text in set(figure.findobj(Text)) - beyond:
        if text.get_visible() and text.get_text() and not text.get_rotation():
            yield text.get_text(), text.get_window_extent(canvas.get_renderer())


def test_small_differences_look_small():
    assert _limits([20.0, 20.2]) == pytest.approx((18.6, 21.6))
    assert _limits([10.0, 20.0, math.inf, -math.inf, math.nan]) == pytest.approx((9.5, 20.5))
    assert _limits([math.inf]) == pytest.approx((-1.5, 1.5))


def test_exact_weights_are_drawn():
    candidates = command.parse_casts("nvfp4")
    errors = {"zero": [command.measure(torch.zeros(4, 32), candidates[0])]}
    study = Inspection(candidates, {"zero": (4, 32)}, errors)
    assert study.totals[0]["sqnr"] == math.inf
    study.draw("title", Path("a.png"))
    assert is_png("a.png")


# --- mistakes ---------------------------------------------------------------------------------------------------------


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
        ("nothing", "There is no checkpoint it.ckpt. Give a Lightning .ckpt, "),
        (
            "object",
            "it.ckpt holds an object of functools.partial, which to load may run any code. Save the weights",
        ),
        ("empty", "it.ckpt is not a checkpoint to read (EOFError). Give a Lightning .ckpt, "),
        ("garbage", "it.ckpt is not a checkpoint to read"),
        ("garbage.safetensors", "it.safetensors is not a checkpoint to read (SafetensorError). Give "),
        ("broken zip", "it.ckpt is not a checkpoint to read"),
        ("numbers", "it.ckpt holds no matrix of floating point numbers"),
        ("tensor", "it.ckpt holds no matrix of floating point numbers"),
        ("sharded", "`python -m lightning.pytorch.utilities.consolidate_checkpoint it.ckpt` makes of it"),
        ("folder", "The folder it.ckpt holds neither model.safetensors nor pytorch_model.bin."),
        ("garbage index", "it.ckpt/pytorch_model.bin.index.json does not tell the files of weights"),
        ("empty index", "it.ckpt/pytorch_model.bin.index.json does not tell the files of weights"),
        ("nested index", "it.ckpt/pytorch_model.bin.index.json does not tell the files of weights"),
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
        (["--casts", "nvfp4", "--nonsense"], "unrecognized arguments: --nonsense"),
        ([], "required: --casts"),
    ],
)
def test_mistakes(arguments, line, capsys):
    try:
        status = inspect(write("good"), *arguments)
    except SystemExit as ended:  # argparse prints its line itself
        status = ended.code
    assert status == 2
    assert line in capsys.readouterr().err.strip().splitlines()[-1]
    assert not list(Path().glob("*.png"))


@pytest.mark.parametrize(
    ("missing", "checkpoint", "line"),
    [
        ("matplotlib.figure", "good", "The picture takes matplotlib: pip install 'lightning_lowbit[recipes]'."),
        ("safetensors.torch", "garbage.safetensors", "takes the package safetensors: pip install safetensors."),
    ],
)
def test_packages_that_are_missing(missing, checkpoint, line, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    assert inspect(write(checkpoint), "--casts", "nvfp4") == 2
    shown = capsys.readouterr()
    assert line in shown.err
    assert ("mean of 1" in shown.out) == (checkpoint == "good"), "the table needs no picture"


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
