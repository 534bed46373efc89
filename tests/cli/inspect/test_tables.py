"""Tables of layers and casts."""

import math
import re
from pathlib import Path

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from lightning_lowbit import Cast, FP4Precision, Scale, convert
from lightning_lowbit.cli.lab.inspect import command
from lightning_lowbit.cli.lab.inspect.options import cast_items
from lightning_lowbit.metrics import cast_statistics
from lightning_lowbit.nn.casts.linear_casts import LinearCasts
from lightning_lowbit.nn.conversion.convert import plan
from lightning_lowbit.quant.transforms import rotate
from tests.cli.inspect.models import WITH_WEIGHTS, inspect, is_png, table
from tests.lightning_imports import quiet_trainer
from tests.tables import each

NVFP4 = LinearCasts.preset("nvfp4").fprop_w


def check_row(row, error):
    numbers = error.floats()
    assert float(row["SQNR dB"]) == pytest.approx(numbers["sqnr"], abs=0.0051)
    assert float(row["relative MSE"]) == pytest.approx(numbers["relative_mse"], rel=0.006)
    for column, name in (("underflow %", "underflow"), ("saturation %", "saturation"), ("bias %", "bias")):
        assert float(row[column]) == pytest.approx(100 * numbers[name], abs=0.0051), name


class Model(BoringModel):
    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(32, 48), nn.LayerNorm(48), nn.Linear(48, 2))
        self.tokens = nn.Embedding(10, 24)
        self.register_buffer("numbers", torch.arange(6).view(2, 3))


def llama(layers=2):
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "vocab_size": 64}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, bos_token_id=0, eos_token_id=0, **shape))


@pytest.mark.usefixtures("no_pictures")
def test_weights_have_the_names_of_layers(capsys):
    model = nn.ModuleList(
        [nn.TransformerEncoderLayer(32, 4, 64), nn.MultiheadAttention(32, 4, kdim=16), nn.Linear(16, 8)]
    )
    torch.save(model.state_dict(), "weights.pt")
    assert inspect("weights.pt", "--casts", "nvfp4") == 0
    weights = {name for name, _ in table(capsys)} - {"mean of 9"}
    assert len(weights) == 9
    for name in weights:
        convert(model, "nvfp4", only=[name.replace(".", r"\.")])  # else no layer matches


@pytest.mark.usefixtures("no_pictures")
def test_checkpoint_of_low_bit_training(capsys):
    model = Model()
    trainer = quiet_trainer(FP4Precision("nvfp4"), max_steps=2)
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
    assert Path("last_casts.png").exists()


def test_the_last_row_is_a_mean_over_elements(capsys):
    state = {"a.weight": torch.randn(2, 16), "b.weight": 100 * torch.randn(6, 32), "zero": torch.zeros(4, 8)}
    torch.save(state, "weights.pt")
    assert inspect("weights.pt", "--casts", "mxfp4") == 0
    rows, sizes = table(capsys), {"a": 32, "b": 192, "zero": 32}
    for column in ("relative MSE", "underflow %", "saturation %", "bias %"):
        expected = sum(size * float(rows[name, "mxfp4"][column]) for name, size in sizes.items()) / 256
        assert float(rows["mean of 3", "mxfp4"][column]) == pytest.approx(expected, rel=0.01, abs=0.01)
    total = rows["mean of 3", "mxfp4"]
    assert float(total["SQNR dB"]) == pytest.approx(-10 * math.log10(float(total["relative MSE"])), abs=0.02)
    assert rows["zero", "mxfp4"]["SQNR dB"] == "inf"
    assert is_png("weights_casts.png")


@pytest.mark.usefixtures("no_pictures")
def test_what_is_no_weight_is_passed_over_and_the_means_have_a_header_of_their_own(capsys):
    """Beside a matrix: 0-d, objects of other kinds, keys that are no text; stacks of matrices and codes are named."""
    state = {"x.weight": torch.randn(16, 32), "x.bias": torch.tensor(1.0), "y.weight": torch.randn(2, 16)}
    state |= {"y.bias": 3, 7: torch.ones(2, 2), None: 1, ("a", 1): {}, "0.weight": torch.ones(16, 3, 3, 3)}
    state["z.weight"] = torch.zeros(9, dtype=torch.uint8)
    torch.save(state, "it.ckpt")
    assert inspect("it.ckpt", "--casts", "nvfp4,mxfp4") == 0
    codes, left_out, *_, x, _, y, _, blank, header, first, second, _, picture = capsys.readouterr().out.splitlines()
    assert codes == "Left out, because they are codes: z (quantized already, as by pack_frozen)."
    assert left_out == "Left out, because they are no matrices: 0 (convolutions, stacks of experts)."
    assert (blank, header.split()[:2], picture.split()[0]) == ("", ["weight", "shape"], "Picture:")
    assert [line.split()[0] for line in (x, y, first, second)] == ["x", "y", "mean", "mean"]
    assert "mean of 2 " in first


@pytest.mark.usefixtures("no_pictures")
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
        found = command.matrices(command.read_tensors(Path(checkpoint)), Path(checkpoint))
        assert set(found) == set(expected)
        assert all(torch.equal(found[name], expected[name]) for name in expected), checkpoint
        layers = [int(name.split(".")[2]) for name in found if ".mlp.up_proj" in name]
        assert layers == list(range(11)), f"{checkpoint}: layers out of order"
    capsys.readouterr()
    assert inspect("sharded", "--casts", "nvfp4", "--only", "mlp", "--output", "new/folder/a.png") == 0
    assert len(table(capsys)) == 34
    assert Path("new/folder/a.png").exists()


SCALES = [Scale("fp32", "tensor"), Scale("fp32", "tensor", statistic="minmax"), Scale("fp32", "row")]
SCALES += [Scale("fp32", "row", statistic="absmean"), Scale("e4m3", (32, 16))]


@each("candidate", command.parse_casts(WITH_WEIGHTS) + [command.Candidate("it", Cast("int4", s)) for s in SCALES])
def test_slices_make_no_difference(candidate):
    weight = torch.randn(70, 96) * torch.randn(70, 1).exp()
    whole = weight.bfloat16()
    if candidate.hadamard is not None:
        whole = rotate(whole, candidate.hadamard.diagonal(None, whole.device), 1)
    expected = pytest.approx(cast_statistics(whole, candidate.cast, key=0).floats(), rel=1e-9)
    assert command.measure(weight, candidate).floats() == expected
    assert command.measure(weight, candidate, 96 * 20).floats() == expected


@pytest.mark.usefixtures("no_pictures")
def test_casts_are_presets_or_fields(capsys):
    text = "nvfp4,{element: int4, scale: {format: fp32, block: 128}}, {element: e2m1, scale: {block: [16, 16]}}, nvfp4"
    found = command.parse_casts(cast_items(text))
    assert {candidate.label: candidate.cast for candidate in found} == {
        "nvfp4": NVFP4,
        "int4/fp32:1x128": Cast("int4", Scale("fp32", 128)),
        "e2m1/e4m3:16x16": Cast("e2m1", Scale("e4m3", (16, 16))),
    }
    (ufp4,) = command.parse_casts(["ufp4"])
    assert ufp4.hadamard == LinearCasts.preset("ufp4").hadamard["fprop"]
    torch.save({"up.weight": torch.randn(8, 32)}, "weights.pt")
    changed = "{preset: nvfp4, every: {scale: {block: 8}}}"
    assert inspect("weights.pt", "--casts", "nvfp4", "--casts", f"mxfp4, {changed}") == 0
    casts = [cast for name, cast in table(capsys) if name == "up"]
    assert casts == ["nvfp4", "mxfp4", "e2m1/e4m3:1x8+fp32"], "they may be repeated and change a preset"


@pytest.mark.usefixtures("no_pictures")
def test_only_matches_as_the_plugin_does(capsys):
    model = llama()
    model.save_pretrained("model")
    names = list(command.matrices(command.read_tensors(Path("model")), Path("model")))
    layers = set(plan(model, "nvfp4"))
    assert layers == set(names) - {"model.embed_tokens"}
    for pattern in ("lm_head", "mlp", r"layers\.0", ".*_proj", "model", r"layers\.1\.self_attn", r"model\.layers", "1"):
        found = command.select(names, [pattern], "--only", "weight")
        assert found & layers == set(plan(model, "nvfp4", only=[pattern])), pattern
    assert command.select(names, ["embed_tokens"], "--only", "weight") == {"model.embed_tokens"}
    capsys.readouterr()
    assert inspect("model", "--casts", "nvfp4", "--only", "lm_head", "--only", r"layers\.1\.mlp\.up_proj") == 0
    assert [name for name, _ in table(capsys)] == ["lm_head", "model.layers.1.mlp.up_proj", "mean of 2"]


@pytest.mark.usefixtures("no_pictures")
def test_transposed_weights(capsys):
    """GPT-2 stores [in, out]: blocks shall lie along in all the same; biases tell where that is not said."""
    shape = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 16}
    model = GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **shape))
    torch.save(model.state_dict(), "gpt2.pt")
    assert inspect("gpt2.pt", "--casts", "nvfp4") == 2
    error = capsys.readouterr().err
    assert "c_attn has 96 biases and the shape (32, 96)" in error and "--transposed 'c_attn|c_proj|c_fc'" in error
    assert inspect("gpt2.pt", "--casts", "nvfp4", "--only", "wte") == 0
    capsys.readouterr()
    assert inspect("gpt2.pt", "--casts", "nvfp4", "--transposed", "c_attn|c_proj|c_fc") == 0
    rows = table(capsys)
    weight, place = model.transformer.h[0].mlp.c_fc.weight.detach(), model.transformer.wpe.weight.detach()
    row = rows["transformer.h.0.mlp.c_fc", "nvfp4"]
    check_row(row, cast_statistics(weight.t().bfloat16(), NVFP4))
    assert row["shape"] == "32 x 128", "as it is stored"
    check_row(rows["transformer.wpe", "nvfp4"], cast_statistics(place.bfloat16(), NVFP4))
    different = cast_statistics(weight.t().bfloat16(), NVFP4).sqnr - cast_statistics(weight.bfloat16(), NVFP4).sqnr
    assert abs(different) > 0.01, "this weight cannot tell"


def test_names_are_those_of_the_bare_model():
    state = {"model._orig_mod.up.weight": torch.ones(2, 2), "rnn.weight_ih": torch.ones(2, 2)}
    state |= {"bias": torch.ones(2), "experts": torch.ones(2, 2, 2), "none.weight": torch.ones(0, 2)}
    torch.save({"state_dict": state, "optimizer_states": [{"state": torch.ones(3, 3)}]}, "a.ckpt")
    assert list(command.matrices(command.read_tensors(Path("a.ckpt")), Path("a.ckpt"))) == ["model.up", "rnn.weight_ih"]


@pytest.mark.usefixtures("no_pictures")
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
