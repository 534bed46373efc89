"""The model card: what the Hub reads of it, how the folder is run, and nothing of the machine that made it."""

import ast
import json
import re

import pytest
import torch
import yaml

from lightning_lowbit.export.card import PROGRAMS, portable
from lightning_lowbit.export.formats.table import FORMATS
from lightning_lowbit.export.tokenizer import bytes_tokenizer
from lightning_lowbit.recipes.models import CausalLM
from tests.export.originals import export
from tests.tables import each


def metadata(folder):
    return yaml.safe_load((folder / "README.md").read_text().split("---")[1])


def code(folder):
    return re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)


def test_a_card_and_the_files_of_transformers_come_with_it(trained, tmp_path):
    export(trained("llama", "mxfp8", steps=2), "mxfp8", tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    for told in ("mxfp8", "| step | 2 |", "model.layers.0.self_attn.q_proj", "e4m3/e8m0:1x32", "| tokenizer | bytes |"):
        assert told in card, told
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["quantization_config"]["ignore"] == ["lm_head"]
    assert (tmp_path / "out" / "tokenizer.json").exists()


def moved(checkpoint, path, base, **changes):
    """A checkpoint of a run that started from the model in a folder."""
    loaded = torch.load(checkpoint, weights_only=True)
    loaded["hyper_parameters"] |= {"network": str(base), "pretrained": True, "config": None, **changes}
    torch.save(loaded, path)
    return path


@pytest.fixture
def base(trained, tmp_path):
    """A pretrained model in a folder, with a card and settings of generation."""
    folder = tmp_path / "base"
    model = CausalLM.load_from_checkpoint(trained("llama", "mxfp8", steps=2)).model
    model.generation_config.update(eos_token_id=[0, 10], temperature=0.5, do_sample=True)
    model.save_pretrained(folder, latent=True)
    front = {"license": "apache-2.0", "language": ["en", "de"], "base_model": "someone/large"}
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump(front)}---\n# Base\n")
    return folder


def test_what_the_hub_reads(trained, base, tmp_path):
    checkpoint = trained("llama", "mxfp8", steps=2)
    plain = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    tags = ["lightning_lowbit", "quantized", "mxfp8"]
    export(checkpoint, "mxfp8", tmp_path / "alone")
    assert metadata(tmp_path / "alone") == {"license": "unknown", **plain, "tags": tags}
    assert "The license is not known" in (tmp_path / "alone" / "README.md").read_text()
    export(checkpoint, "mxfp8", tmp_path / "mit", license="mit")
    assert metadata(tmp_path / "mit")["license"] == "mit"
    export(moved(checkpoint, tmp_path / "based.ckpt", base), "mxfp8", tmp_path / "based")
    found = {"license": "apache-2.0", **plain, "language": ["en", "de"], "base_model": "someone/large", "tags": tags}
    based = (tmp_path / "based" / "README.md").read_text()
    assert metadata(tmp_path / "based") == {**found, "base_model_relation": "quantized"}
    assert "not known" not in based and "| base model | base |" in based
    found = json.loads((tmp_path / "based" / "generation_config.json").read_text())
    assert (found["eos_token_id"], found["temperature"], found["do_sample"]) == ([0, 10], 0.5, True)


def test_no_file_names_a_folder_of_this_machine(trained, base, tmp_path):
    checkpoint = moved(trained("llama", "mxfp8", steps=2), tmp_path / "based.ckpt", base)
    bytes_tokenizer().save_pretrained(tmp_path / "tokenizer")
    for format in ("mxfp8", "dequantized"):
        export(checkpoint, format, tmp_path / format, tokenizer=str(tmp_path / "tokenizer"))
        for path in (tmp_path / format).rglob("*"):
            assert str(tmp_path).encode() not in path.read_bytes(), path
        assert "| network | base |" in (tmp_path / format / "README.md").read_text()


@each(
    ("value", "told"),
    [
        ("/home/me/models/llama", "llama"),
        ("/home/me/my models/llama/", "llama"),
        ("~/models/llama", "llama"),
        (r"C:\Users\me\llama", "llama"),
        ("file:///home/me/text.txt", "text.txt"),
        ("hf:/home/me/c4:en", "hf:c4:en"),
        ("text of /home/me/a.txt, and '/b/c'", "text of a.txt, and 'c'"),
        ({"train": ["/data/a.txt", {"n": "/x/y"}], "steps": 3}, {"train": ["a.txt", {"n": "y"}], "steps": 3}),
        ("org/name", "org/name"),
        ("https://hf.co/org/name", "https://hf.co/org/name"),
        ("e2m1/e4m3:1x16+fp32", "e2m1/e4m3:1x16+fp32"),
        ("models/llama", "models/llama"),
        (0.5, 0.5),
        (None, None),
    ],
)
def test_of_paths_the_last_name_is_told(value, told):
    assert portable(value) == told


def test_each_format_says_who_runs_it():
    for name, format in FORMATS.items():
        assert format.programs and {*format.programs} <= {*PROGRAMS}, name


def test_the_code_of_a_card_is_python(trained, tmp_path):
    for format in ("mxfp8", "dequantized"):
        export(trained("llama", "mxfp8", steps=2), format, tmp_path / format)
        assert "## Use" in (tmp_path / format / "README.md").read_text() and code(tmp_path / format)
        for block in code(tmp_path / format):
            ast.parse(block)
            assert format in block


@pytest.mark.slow
def test_the_code_of_a_card_runs(trained, tmp_path, monkeypatch):
    pytest.importorskip("compressed_tensors")
    monkeypatch.chdir(tmp_path)
    for format in ("mxfp8", "dequantized", "onnx"):
        export(trained("llama", "mxfp8", steps=2), format, tmp_path / format)
        for block in code(tmp_path / format):
            exec(block, {})


def test_a_folder_without_a_tokenizer_says_so(trained, tmp_path):
    loaded = torch.load(trained("llama", "mxfp8", steps=2), weights_only=True)
    torch.save({key: value for key, value in loaded.items() if not key.endswith("DataModule")}, tmp_path / "own.ckpt")
    for format in ("mxfp8", "dequantized"):
        with pytest.warns(UserWarning, match="not tell its tokenizer.*give --tokenizer bytes, a folder, or a name"):
            export(tmp_path / "own.ckpt", format, tmp_path / format)
        assert not (tmp_path / format / "tokenizer.json").exists()
    export(tmp_path / "own.ckpt", "mxfp8", tmp_path / "told", tokenizer="bytes")
    assert (tmp_path / "told" / "tokenizer.json").exists()
