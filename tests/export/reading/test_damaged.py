"""Damaged folders: an error in one line, or the model that the files hold; never another one."""

import copy
import shutil
from collections import Counter
from functools import cache

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_lowbit import load, load_compressed
from lightning_lowbit.export.folder import pretrained
from tests.export.reading.damage import ANY, FAILS, KINDS, SAME, TOKENS, cases, change_tensor, damaged, whole
from tests.tables import each


@torch.no_grad()
def outputs(model):
    return model(input_ids=TOKENS).logits


def loaded(folder, good):
    return load(folder, dtype=torch.float32)


def filled(folder, good):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(good), dtype=torch.float32)
    return load_compressed(model, folder, dtype=torch.float32).eval()


def evaluated(folder, good):
    return pretrained(AutoModelForCausalLM, folder, dtype=torch.float32)


# What a reader does not take: load alone knows a record, and only transformers and load take plain weights.
RECORDED = ("lowbit.json", "a layer without casts")
WITHOUT = {
    loaded: (),
    filled: ("dequantized", *RECORDED),
    evaluated: (*(kind for kind in KINDS if kind != "dequantized"), *RECORDED),
}


@pytest.fixture(scope="module")
def parent(tmp_path_factory):
    return tmp_path_factory.mktemp("folders")


@cache
def outputs_of_whole(read, good):
    return outputs(read(good, good))


def outcome(read, good, bad, expected):
    """Reads a damaged folder twice, and says what came of it."""
    try:
        found = outputs(read(bad, good))
    except ValueError as error:
        assert expected != SAME, error
        assert "\n" not in str(error), error
        return FAILS
    assert expected != FAILS, "it loads"
    assert torch.equal(found, outputs(read(bad, good))) or (expected == ANY and found.isnan().any())
    assert expected == ANY or torch.equal(found, outputs_of_whole(read, good)), "it loads another model"
    return SAME


def outcomes(read, count, seed, parent, folder):
    """How often reading failed, and how often it did not."""
    counts = Counter()
    for kind, damage, draw in cases(count, seed, WITHOUT[read]):
        good = whole(kind, parent, read is loaded)
        try:
            counts[outcome(read, good, folder, damaged(good, folder, damage, draw))] += 1
        except BaseException as error:
            error.add_note(f"{kind}: {damage}")
            raise
    return counts


@pytest.mark.parametrize("read", WITHOUT)
@pytest.mark.parametrize("count", [18, pytest.param(600, marks=pytest.mark.slow)])
def test_damage_is_an_error_or_changes_nothing_else(read, count, parent, tmp_path):
    counts = outcomes(read, count, count, parent, tmp_path / "folder")
    assert min(counts[FAILS], counts[SAME]) >= count // 6, counts


def test_whole_folders_load(parent):
    for kind in KINDS:
        folder = whole(kind, parent)
        assert outputs(loaded(folder, folder)).isfinite().all(), kind


QKV = "model.layers.0.self_attn.q_proj"


def resized(*shape):
    return lambda tensor: torch.ones(shape, dtype=torch.float32 if tensor is None else tensor.dtype)


def missing(tensor):
    return None


@each(
    ("kind", "name", "change", "message"),
    [
        ("nvfp4", f"{QKV}.weight_scale", resized(63, 4), r"n \[63, 4\], and float8_e4m3fn \[64, 4\] is needed"),
        ("nvfp4", f"{QKV}.weight_scale", lambda t: t.float(), r"float32 \[64, 4\], and float8_e4m3fn \[64, 4\]"),
        ("nvfp4", f"{QKV}.weight_global_scale", resized(2), r"float32 \[2\], and .* \[\] or \[1\]"),
        ("nvfp4", f"{QKV}.weight_global_scale", torch.zeros_like, "scales of .*q_proj are not all finite"),
        ("nvfp4", f"{QKV}.weight_global_scale", missing, "q_proj .* weight_global_scale is missing"),
        ("nvfp4, inputs", f"{QKV}.input_global_scale", resized(3), "input_global_scale is float32"),
        ("mxfp4", f"{QKV}.weight_scale", lambda t: torch.full_like(t, 255), "scales of .*q_proj are not all finite"),
        ("fp8, rows", f"{QKV}.weight_scale", resized(33, 1), r"\[33, 1\], and .* \[64, 1\] or \[64\] is needed"),
        ("fp8, rows", f"{QKV}.weight_scale", resized(31, 1), r"\[31, 1\]"),
        ("fp8, rows", f"{QKV}.weight_scale", resized(64, 0), r"\[64, 0\]"),
        ("fp8, rows", f"{QKV}.weight_scale", missing, "has another .*q_proj.weight than .*float8_e4m3fn"),
        ("fp8, rows", f"{QKV}.weight_scale", lambda t: t * torch.nan, "scales of .*q_proj are not all finite"),
        ("fp8, rows", f"{QKV}.weight_scale", lambda t: -t, "scales of .*q_proj are not all finite and 0 or more"),
        ("fp8, rows", f"{QKV}.weight", lambda t: t.fill_(torch.nan), "q_proj holds codes that mean no number"),
        ("int4", f"{QKV}.weight_shape", lambda t: t + 1, r"weight_shape has \[65, 65\], and \[64, 64\] is needed"),
        ("int4", f"{QKV}.weight_zero_point", resized(8, 2), "q_proj has zero points"),
        ("int4", f"{QKV}.weight_g_idx", resized(64), "q_proj has the order of its groups"),
        ("int2", f"{QKV}.weight_packed", torch.zeros_like, "q_proj has codes that are not ternary"),
        ("bitnet", f"{QKV}.weight", lambda t: torch.full_like(t, 255), "q_proj holds codes that mean no number"),
        ("dequantized", "model.norm.weight", missing, "lacks model.norm.weight of LlamaForCausalLM, and has nothing"),
        ("dequantized", f"{QKV}.weight", lambda t: t.to(torch.int8), "has another .*q_proj.weight than .*torch.int8"),
        ("dequantized", "lm_head.weight", resized(96, 64), "other values for .* which the model ties"),
        ("dequantized", "model.rotary_emb.inv_freq", resized(8), None),  # which the model computes
        ("dequantized", "model.extra", resized(8), "lacks nothing .* and has model.extra"),
    ],
)
def test_a_wrong_tensor_is_named(kind, name, change, message, parent, tmp_path):
    folder = tmp_path / "folder"
    shutil.copytree(whole(kind, parent), folder, dirs_exist_ok=True)
    change_tensor(folder, name, change)
    if message is None:
        assert torch.equal(outputs(load(folder)), outputs(load(whole(kind, parent))))
        return
    with pytest.raises(ValueError, match=message):
        load(folder)


def test_files_may_be_links_as_in_the_hubs_cache(parent, tmp_path):
    snapshot, blobs = tmp_path / "models--x" / "snapshots" / "1a", tmp_path / "models--x" / "blobs"
    shutil.copytree(whole("int4", parent), snapshot)
    blobs.mkdir()
    (snapshot / "model.safetensors").rename(blobs / "2b")
    (snapshot / "model.safetensors").symlink_to("../../blobs/2b")
    assert torch.equal(outputs(load(snapshot)), outputs(load(whole("int4", parent))))
    blobs.rename(tmp_path / "elsewhere")
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(tmp_path / "elsewhere" / "2b")
    assert torch.equal(outputs(load(snapshot)), outputs(load(whole("int4", parent))))


def test_a_model_is_unchanged_where_its_folder_is_refused(parent, tmp_path):
    folder = shutil.copytree(whole("int4", parent, False), tmp_path / "folder")
    change_tensor(folder, "model.norm.weight", lambda tensor: None)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="lacks model.norm.weight"):
        load_compressed(model, folder)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_what_is_not_finite_in_high_precision_loads_as_it_is(parent, tmp_path):
    folder = shutil.copytree(whole("nvfp4", parent), tmp_path / "folder")
    change_tensor(folder, "model.norm.weight", lambda tensor: tensor * torch.nan)
    assert load(folder).model.norm.weight.isnan().all()
