"""What an export promises without any client: codes, refusals, what is left of a failure."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint import save
from torch.testing import assert_close

from lightning_lowbit import LinearCasts, export_checkpoint, load, unpack_frozen
from lightning_lowbit.export import checkpoint as checkpoints
from lightning_lowbit.export.checkpoint import fitting
from lightning_lowbit.export.formats.packing import nibbles, words
from lightning_lowbit.export.formats.table import FORMATS
from lightning_lowbit.export.parity import _beyond_rounding
from lightning_lowbit.export.trained_model import _network, read
from lightning_lowbit.export.weights import fused_groups, matrices, weights
from lightning_lowbit.nn.casts.linear_casts import PRESETS
from lightning_lowbit.nn.layers.layer import QuantizedLayer
from lightning_lowbit.units import float32_products
from tests.export.originals import export, language_model
from tests.golden_vectors import load as golden
from tests.tables import each

TOKENS = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logits(model):
    with torch.autocast("cpu", torch.bfloat16), float32_products([torch.bfloat16], torch.device("cpu")):
        return model(input_ids=TOKENS).logits.float()


def test_packed_bytes_are_those_of_compressed_tensors():
    vectors = golden("compressed_tensors_nvfp4")
    for case in map(str, vectors["cases"]):
        codes, packed = (torch.from_numpy(vectors[f"{case}/{name}"]) for name in ("codes", "weight_packed"))
        assert torch.equal(nibbles(codes), packed), case


def test_integers_of_any_width_lie_in_one_stream_of_bits():
    for bits in range(1, 9):
        codes = torch.randint(0, 2**bits, (3, 37), generator=torch.Generator().manual_seed(bits), dtype=torch.uint8)
        for row, packed in zip(codes.tolist(), words(codes, bits).tolist(), strict=True):
            stream = sum((word % 2**32) << (32 * i) for i, word in enumerate(packed))
            assert [stream >> (bits * i) & (2**bits - 1) for i in range(37)] == row, bits


@pytest.mark.filterwarnings("ignore:transformers computes with a folder of nvfp4-w4a16 in torch.bfloat16 alone")
@each(
    "casts, format, shared",
    [
        ("nvfp4", "nvfp4-w4a16", True),
        ("nvfp4-nvidia", "modelopt-nvfp4", True),
        ("fp8-delayed", "fp8", True),  # static scales
        ("int4", "int4", False),
        ("fp8-blockwise", "fp8", False),  # cut tiles
    ],
    fast=2,
)
def test_an_exported_folder_is_read_back_with_the_codes_and_the_outputs_of_the_training(
    casts, format, shared, trained, tmp_path
):
    checkpoint = trained("llama", casts, steps=4, shared=shared)
    export(checkpoint, format, tmp_path / casts, dtype="fp32")
    original, model = read(checkpoint), load(tmp_path / casts, dtype=torch.float32)
    assert torch.equal(logits(model), logits(original.model)), casts
    layer = model.model.layers[0].mlp.up_proj
    expected = original.layers["model.layers.0.mlp.up_proj"].full_casts
    assert layer.casts.replace(fprop_w=None) == expected.replace(fprop_w=None)
    assert layer.casts == expected or casts == "fp8-delayed"  # whose weight has the scale of the file
    matrices = {weight.name: weight.quantized.dequantize() for weight in weights(original)}
    unpack_frozen(model)
    for name, matrix in matrices.items():
        # One product of a file's scales is rounded before the elements are multiplied, or after.
        assert_close(model.get_submodule(name).weight, matrix, rtol=2.0**-22, atol=0, msg=name)


def test_each_weight_is_read_once_and_knows_the_amax_that_it_shares(trained, monkeypatch):
    original = read(trained("llama", "nvfp4", steps=2, shared=True))
    reads, weight_matrix = Counter(), QuantizedLayer.weight_matrix
    monkeypatch.setattr(QuantizedLayer, "weight_matrix", lambda self: reads.update([id(self)]) or weight_matrix(self))
    assert [name for name, *_ in matrices(original, fused_groups(original))] == [*original.layers]
    assert set(reads.values()) == {1} and len(reads) == len(original.layers)
    shared = {name: layer.shared_amax(original.dtype) for name, layer in original.layers.items()}
    logits(original.model)
    assert shared == {name: layer.shared_amax(original.dtype) for name, layer in original.layers.items()}
    assert sum(amax is not None for amax in shared.values()) == 10


def test_fused_layers_with_scales_of_their_own_are_refused_or_quantized_again(trained, tmp_path):
    checkpoint = trained("llama", "nvfp4", steps=4)
    with pytest.raises(ValueError, match=r"one scale for the layers of a group.*shared_amax.*--rescale"):
        export(checkpoint, "nvfp4-w4a16", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    exported = export(checkpoint, "nvfp4-w4a16", tmp_path / "out", rescale=True)
    errors = {row.name.rpartition(".")[2]: row.error for row in exported.rows if ".layers.0." in row.name}
    assert errors["o_proj"] == errors["down_proj"] == 0 < max(errors["q_proj"], errors["k_proj"], errors["v_proj"])
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    scales = {float(tensors[f"model.layers.0.self_attn.{p}_proj.weight_global_scale"]) for p in "qkv"}
    assert len(scales) == 1


def test_scales_that_an_engine_rounds_are_refused_kept_or_rounded_with_the_weight(trained, tmp_path):
    checkpoint = trained("llama", "int4", steps=4)
    with pytest.raises(ValueError, match="keep the scales of .* in bfloat16, and it was trained with fp32 scales"):
        export(checkpoint, "int4", tmp_path / "out")
    assert max(row.error for row in export(checkpoint, "int4", tmp_path / "kept", dtype="fp32").rows) == 0
    rounded = export(checkpoint, "int4", tmp_path / "rounded", rescale=True)
    assert 0 < max(row.error for row in rounded.rows) < 0.05


@each(
    ("run", "format", "options", "why"),
    [
        (("llama", "mxfp8", 2), "onnx", {"dtype": "bf16"}, "format onnx holds tensors in fp32, not in bf16: leave out"),
        (("llama", "mxfp8", 2), "mxfp8", {"shape": [2, 3]}, "format mxfp8 does not trace the model: leave it out"),
        (("llama", "mxfp8", 2), "onnx", {"shape": [2, 3]}, "the model takes tokens: leave it out"),
        (("gpt2", "mxfp8", 2), "mxfp8", {}, "8 of 8 layers. transformer.h.0.attn.c_attn.*QuantConv1D is no nn.Linear"),
        (("llama", "nvfp4", 4, True), "nvfp4-w4a4", {}, r"takes data: give calibration text \(--calibrate FILE\)"),
    ],
)
def test_what_a_format_does_not_hold_or_take_is_refused(trained, tmp_path, run, format, options, why):
    with pytest.raises(ValueError, match=why):
        export(trained(*run), format, tmp_path / "out", **options)
    assert not [*tmp_path.iterdir()]


ANY = "onnx dequantized"
NVFP4 = "nvfp4-w4a16 nvfp4-w4a4 modelopt-nvfp4 gguf"
FITTING = {
    **dict.fromkeys(("nvfp4", "nvfp4-nvidia", "nvfp4-mxfp8"), f"{NVFP4} {ANY}"),
    **dict.fromkeys(("nvfp4-4over6", "quartet2"), f"{NVFP4} dequantized"),
    **dict.fromkeys(("mxfp4", "mxfp4-rht"), f"mxfp4 gguf {ANY}"),
    **dict.fromkeys(("mxfp8", "mxfp8-nvfp4"), f"mxfp8 {ANY}"),
    **dict.fromkeys(("fp8-delayed", "fp8-current"), f"fp8 modelopt-fp8 {ANY}"),
    **dict.fromkeys(("fp8-row", "fp8-blockwise"), f"fp8 {ANY}"),
    **{f"int{bits}": f"int{bits} {'gguf ' if bits in (4, 8) else ''}{ANY}" for bits in range(2, 9)},
    **dict.fromkeys(("mxfp6", "e1m2", "nvfp4-row"), ANY),
    "ternary": f"int2 bitnet gguf {ANY}",
    "ufp4": "",
}


def test_the_formats_that_hold_each_preset():
    assert {*FITTING, "bf16"} == {*PRESETS}
    for preset, formats in FITTING.items():
        sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
        original = language_model("llama", LinearCasts.preset(preset), **sizes)
        assert [name for name in fitting(original) if name != "gguf-tq1"] == formats.split(), preset


def test_bytes_on_disk_are_those_of_the_bits(trained, tmp_path):
    exported = export(trained("llama", "mxfp8", steps=2), "mxfp8", tmp_path / "out")
    few, total = exported.parameters[1], exported.parameters[0]
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    assert size == few * 33 // 32 + (total - few) * 2  # 8 bits and a scale for 32; the rest in bfloat16
    assert sum(row.bytes for row in exported.rows) == few * 33 // 32


def test_what_differs_outside_of_the_quantized_layers_is_not_exported(trained, tmp_path, monkeypatch):
    def changed(folder, name, factor):
        path, config = folder / "model.safetensors", folder / "config.json"
        tensors = load_file(path)
        if name in tensors:
            save_file({**tensors, name: tensors[name] * factor}, path, metadata={"format": "pt"})
        else:
            config.write_text(json.dumps({**json.loads(config.read_text()), name: factor}))
        return FORMATS["dequantized"].load(folder)

    for name, factor, told in (
        ("model.embed_tokens.weight", 1.01, "parameters model.embed_tokens.weight are not those"),
        ("model.norm.weight", 1.5, "parameters model.norm.weight are not those"),
        ("model.layers.1.mlp.up_proj.weight", 1.01, "weights of model.layers.1.mlp.up_proj are not those"),
        ("rms_norm_eps", 1.0, "computes other logits"),
    ):
        load = partial(changed, name=name, factor=factor)
        monkeypatch.setattr(checkpoints, "FORMATS", {"dequantized": replace(FORMATS["dequantized"], load=load)})
        with pytest.raises(ValueError, match=told):
            export_checkpoint(trained("llama", "mxfp8", steps=2), "dequantized", tmp_path / "out")


def test_a_weight_is_the_nearest_number_of_its_dtype_to_codes_times_scales():
    exact = torch.tensor([1.955, 1.95703125])  # the second one lies in the middle of two
    for there, differs in (
        ([1.953125, 1.953125], False),
        ([1.953125, 1.9609375], False),
        ([1.9609375, 1.953125], True),
    ):
        assert (_beyond_rounding(torch.tensor(there, dtype=torch.bfloat16), exact) > 0) == differs, there


class Runs:
    def __reduce__(self):
        return os.mkdir, ("ran",)


@pytest.mark.filterwarnings("ignore:transformers computes with a folder of mxfp8 in torch.bfloat16 alone")
@each(
    ("place", "value", "why"),
    [
        ("hyper_parameters._class_path", "os.system", "says 'os.system' of which class.*--module"),
        (
            "hyper_parameters._class_path",
            "lightning_lowbit.recipes.loader.DataLoader",
            "the class of a LightningModule; .* is <class",
        ),
        ("extra", Runs(), r"holds an object, \w+.mkdir.* weights_only=False.*, remove such objects"),
        ("lightning_lowbit", None, r"^[^\n]* holds no casts[^\n]*$"),
        ("state_dict.model.model.layers.1.mlp.up_proj.weight", torch.nan, "layers.1.mlp.up_proj holds NaN"),
        ("state_dict.model.model.embed_tokens.weight", torch.nan, "embed_tokens.weight holds NaN"),
        ("state_dict.model.model.embed_tokens.weight", 1e5, "embed_tokens.weight has values that float16 does not"),
    ],
)
@each("format", ["mxfp8", "dequantized"])
def test_a_checkpoint_that_is_not_to_be_exported_is_refused(trained, tmp_path, place, value, why, format):
    """No code that it names is run."""
    loaded = torch.load(trained("llama", "mxfp8", steps=2), weights_only=True)
    key, _, name = place.partition(".")
    if isinstance(value, float):
        loaded[key][name][3, 4] = value
    else:
        loaded[key] = {**loaded[key], name: value} if name else value
    torch.save(loaded, tmp_path / "last.ckpt")
    with pytest.raises(ValueError, match=why):
        export(tmp_path / "last.ckpt", format, tmp_path / "out", dtype="fp16" if value == 1e5 else None)
    assert not Path("ran").exists()


def saved(checkpoint, path, state):
    torch.save({**torch.load(checkpoint, weights_only=True), "state_dict": state}, path)
    return path


def test_compiled_models_are_exported_by_the_names_of_their_layers(trained, tmp_path):
    checkpoint = trained("llama", "mxfp8", steps=2)
    state = torch.load(checkpoint, weights_only=True)["state_dict"]
    compiled = {name.replace("model.", "model._orig_mod.", 1): tensor for name, tensor in state.items()}
    expected = export(checkpoint, "mxfp8", tmp_path / "expected")
    for module in (None, "tests.export.modules.Compiled"):  # compiled before the run, or in the module
        path = saved(checkpoint, tmp_path / "compiled.ckpt", compiled)
        assert export(path, "mxfp8", tmp_path / "out", module=module, overwrite=True).rows == expected.rows
        written, tensors = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "expected"))
        assert written.keys() == tensors.keys() and all(torch.equal(written[name], tensors[name]) for name in tensors)


def test_the_model_with_the_quantized_layers_is_exported_and_what_is_outside_is_told(trained, tmp_path):
    checkpoint, module = trained("llama", "mxfp8", steps=2), "tests.export.modules.Distilled"
    state = torch.load(checkpoint, weights_only=True)["state_dict"]
    teacher = {name.replace("model.", "teacher.", 1): tensor * 0 for name, tensor in state.items()}
    others = {"head.weight": torch.zeros(4, 4), "head.bias": torch.zeros(4)}
    path = saved(checkpoint, tmp_path / "distilled.ckpt", {**teacher, **state, **others})
    with pytest.warns(UserWarning, match="has teacher.* outside of model, .*: they are not exported"):
        original = read(path, module)
    assert original.model.get_parameter("model.norm.weight").abs().max() > 0
    whole = nn.ModuleDict({"teacher": original.model})
    assert _network(whole, ["head", "teacher.lm_head"]) == ("", whole, None)  # for formats that hold any module


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_folder_of_shards_is_exported_as_a_file(trained, tmp_path):
    checkpoint = trained("llama", "mxfp8", steps=2)
    loaded = torch.load(checkpoint, weights_only=True)
    save({"state_dict": loaded.pop("state_dict")}, checkpoint_id=tmp_path / "shards", no_dist=True)
    torch.save(loaded, tmp_path / "shards" / "meta.pt")
    assert torch.equal(logits(read(tmp_path / "shards").model), logits(read(checkpoint).model))


def test_text_for_what_is_no_language_model_is_refused(trained, text, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "is_language_model", lambda model: False)
    with pytest.raises(ValueError, match="Calibration takes a causal language model"):
        export(trained("llama", "mxfp8", steps=2), "dequantized", tmp_path / "out", calibrate=text)


@pytest.mark.slow
def test_an_interrupted_export_leaves_nothing(trained, tmp_path):
    checkpoint = trained("llama", "mxfp8", steps=2)
    waits = (
        "import sys, time; from lightning_lowbit.export import folder\n"
        "close = folder.SafetensorsWriter.finish\n"
        "def slow(self, *arguments):\n    close(self, *arguments); print('written', flush=True); time.sleep(60)\n"
        "folder.SafetensorsWriter.finish = slow\n"
        "from lightning_lowbit.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", waits, "export", str(checkpoint), "--format", "mxfp8"]
    for number in (signal.SIGINT, signal.SIGTERM):
        process = subprocess.Popen([*command, "--output", str(tmp_path / "out")], stdout=subprocess.PIPE, text=True)
        with process:
            assert any("written" in line for line in process.stdout)
            process.send_signal(number)
        assert process.returncode == 130
        assert not [*Path(tmp_path).iterdir()]
