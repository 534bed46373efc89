"""The folder that an export makes: what it replaces, and what it says where it cannot be written."""

import resource
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from lightning_lowbit.cli import main
from lightning_lowbit.export.checkpoint import explain_formats, fitting
from lightning_lowbit.export.formats.base import Options
from lightning_lowbit.export.formats.table import FORMATS
from tests.export.originals import export, language_model, trained_model
from tests.tables import each

pytest.importorskip("gguf")


def test_only_what_an_export_wrote_is_replaced_and_only_when_asked(trained, tmp_path):
    checkpoint, folder = trained("llama", "mxfp8", steps=2), tmp_path / "out"
    folder.mkdir()
    with pytest.raises(FileExistsError, match=r"exists. Give another folder, or overwrite \(--overwrite\)"):
        export(checkpoint, "mxfp8", folder)
    export(checkpoint, "mxfp8", folder, overwrite=True)  # an empty one
    (folder / "stale.txt").write_text("of before")
    with pytest.raises(FileExistsError, match="--overwrite"):
        export(checkpoint, "mxfp8", folder)
    export(checkpoint, "mxfp8", folder, overwrite=True)
    assert not (folder / "stale.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_other_folders_and_files_are_not_replaced(trained, tmp_path):
    checkpoint = trained("llama", "mxfp8", steps=2)
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "work")
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    before = sorted(tmp_path.rglob("*"))
    for name in ("work", "file", "link", "broken"):
        with pytest.raises(FileExistsError, match=r"no folder that an export wrote \(it has no lowbit.json\)"):
            export(checkpoint, "mxfp8", tmp_path / name, overwrite=True)
        with pytest.raises(FileExistsError, match=r"exists. Give another folder\.$"):
            export(checkpoint, "mxfp8", tmp_path / name)
    assert sorted(tmp_path.rglob("*")) == before and (tmp_path / "work" / "thesis.txt").read_text() == "mine"


def test_the_checkpoint_is_not_replaced_by_its_export(trained, tmp_path):
    path = tmp_path / "run" / "last.ckpt"
    path.parent.mkdir()
    torch.save(torch.load(trained("llama", "mxfp8", steps=2), weights_only=True), path)
    with pytest.raises(ValueError, match="run would be replaced, and holds .*last.ckpt"):
        export(path, "mxfp8", tmp_path / "run", overwrite=True)
    assert path.exists()
    for name in (".", "..", "run/.."):
        with pytest.raises(ValueError, match=r"output \(--output\) is a folder to make.*got '.*\.'"):
            export(path, "mxfp8", name, overwrite=True)


@each("casts, format", [("mxfp8", "mxfp8"), ("mxfp8", "dequantized"), ("mxfp4", "gguf")])
@each("size", [100, 100_000])
def test_a_full_disk_is_told_with_a_remedy_and_nothing_is_left(trained, tmp_path, casts, format, size):
    checkpoint, limit = trained("llama", casts, steps=2), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limit[1]))  # larger files cannot be written
    try:
        with pytest.raises(OSError, match="does not fit into .*: free some space, or give --output"):
            export(checkpoint, format, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert not [*tmp_path.iterdir()]


@pytest.mark.skipif(
    not Path("/sys/kernel").is_dir() or sys.platform != "linux", reason="no folder that nobody writes to"
)
def test_a_folder_that_cannot_be_written_is_told_in_one_line(trained, capsys):
    checkpoint = trained("llama", "mxfp8", steps=2)
    command = ["export", str(checkpoint), "--format", "mxfp8", "--output", "/sys/kernel/out", "--no-parity"]
    assert main(command) != 0
    [line] = [line for line in capsys.readouterr().err.splitlines() if "cannot be written" in line]
    assert "/sys/kernel cannot be written" in line and "give --output in a folder of yours" in line


def test_without_a_format_those_that_fit_are_listed(trained, capsys):
    checkpoint = str(trained("llama", "mxfp8", steps=2))
    assert main(["export", checkpoint]) == 0
    assert capsys.readouterr().out.startswith("Formats that hold it: mxfp8")
    assert main(["export", checkpoint, "--format", "mxfp8"]) == 2
    assert "--format mxfp8 needs --output, the folder to make" in capsys.readouterr().err


def two_layers(second):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].weight = second(model[0].weight)
    return model


def one_module_twice():
    layer = nn.Linear(64, 64)
    return nn.Sequential(layer, nn.Linear(64, 64), layer)


TIED = (lambda w: w, lambda w: nn.Parameter(w.data), lambda w: nn.Parameter(w.data.t()))
SHARING = [*((two_layers(second), "also that of another module") for second in TIED), (one_module_twice(), "several")]


@each("model, why", SHARING)
def test_no_format_is_listed_for_layers_that_share_a_weight(model, why):
    message = explain_formats(trained_model(model, "nvfp4"))
    assert message.startswith("No format holds it.") and why in message
    assert ("another module" in message) == ("another module" in why)


def test_halves_of_one_tensor_are_two_weights_and_what_is_in_high_precision_is_written_twice(tmp_path):
    halves = torch.randn(128, 64)
    model = two_layers(lambda _: nn.Parameter(halves[64:]))
    model[0].weight = nn.Parameter(halves[:64])
    assert "dequantized" in explain_formats(trained_model(model, "nvfp4"))
    for second in TIED[:2]:
        model = nn.Sequential(*two_layers(second), nn.Linear(64, 64))
        original = trained_model(model, "nvfp4", skip=["0", "1"])
        FORMATS["dequantized"].write(original, tmp_path, Options(dtype=torch.float32))
        assert load_file(tmp_path / "model.safetensors").keys() == model.state_dict().keys()


def test_gguf_is_listed_where_llama_cpp_has_all_parts_of_the_network():
    for bias in (False, True):  # llama.cpp adds that of a feed-forward layer before it multiplies by a scale
        formats = fitting(language_model("llama", "nvfp4", mlp_bias=bias, intermediate_size=128))
        assert ("gguf" in formats) == (not bias) and "nvfp4-w4a16" in formats
