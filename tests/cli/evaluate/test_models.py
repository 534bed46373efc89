"""What ``lowbit evaluate`` loads, and what it refuses; without the harness."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from lightning_lowbit import cli
from lightning_lowbit.cli.evaluate import command, options
from lightning_lowbit.export.tokenizer import bytes_tokenizer
from lightning_lowbit.packages import install_extra, is_installed
from tests.cli.evaluate.models import SIZES, language_model, train
from tests.lightning_imports import BoringModel
from tests.recipes.test_tokenizers import save_tokenizer
from tests.tables import each

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return language_model("int4", tmp_path_factory.mktemp("int4"))


@pytest.fixture
def folder(tmp_path):
    LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=256)).bfloat16().save_pretrained(tmp_path / "llama")
    bytes_tokenizer().save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def load(path, tokenizer=None, module=None):
    return command.load(path, tokenizer, module, CPU)


def test_a_checkpoint_has_the_tokenizer_of_its_data_or_another(checkpoint, tmp_path):
    loaded = load(checkpoint)
    assert loaded.tokenizer("é")["input_ids"] == [0xC3, 0xA9]
    assert loaded.about == "as trained until step 4: int4 in 7 layers, phase fqt"
    assert loaded.as_trained == {"add_bos_token": False, "prefix_token_id": 0}
    assert not loaded.model.training
    loaded = load(checkpoint, save_tokenizer(tmp_path / "tokenizer"))
    assert loaded.as_trained["prefix_token_id"] == loaded.tokenizer.eos_token_id == 1
    name = save_tokenizer(tmp_path / "large", "".join(map(chr, range(33, 300))))
    with pytest.raises(ValueError, match="has ids up to 270, and the model takes 256. Give --tokenizer that of the tr"):
        load(checkpoint, name)


def test_a_folder_is_loaded_as_it_is_if_it_is_whole(folder):
    loaded = load(folder)
    assert loaded.about == "in bfloat16, not quantized"
    assert (loaded.model.dtype, loaded.tokenizer.eos_token_id, loaded.as_trained) == (torch.bfloat16, 0, {})
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="llama lacks model.norm.weight, which transformers would draw at random"):
        load(folder)


def test_nothing_to_evaluate_is_told_with_what_is_possible(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"There is no .*last.ckpt. Give a checkpoint of a run \(.ckpt\), or a"):
        options.parse([str(tmp_path / "last.ckpt"), "--tasks=one"])
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for path in (tmp_path, tmp_path / "model.gguf"):
        with pytest.raises(ValueError, match="is neither a checkpoint nor a folder of Hugging Face. Give a checkpoint"):
            load(path)
    (tmp_path / ".metadata").touch()
    with pytest.raises(ValueError, match="is a sharded checkpoint. Give the file that `lowbit consolidate"):
        load(tmp_path)


def test_models_without_logits_are_refused(tmp_path):
    file = train(BoringModel(), tmp_path / "plain.ckpt")
    with pytest.raises(ValueError, match="--module package.module.Class"):
        load(file)
    with pytest.raises(ValueError, match="holds a BoringModel, which gives no logits of a next token"):
        load(file, module=f"{BoringModel.__module__}.BoringModel")
    LlamaForSequenceClassification(LlamaConfig(**SIZES, vocab_size=256)).save_pretrained(tmp_path / "classes")
    with pytest.raises(ValueError, match="holds a LlamaForSequenceClassification, which gives no logits"):
        load(tmp_path / "classes")


def test_a_tokenizer_that_is_not_known_is_asked_for(checkpoint, folder, tmp_path):
    saved = torch.load(checkpoint, weights_only=True)
    del saved["TextDataModule"]
    torch.save(saved, tmp_path / "old.ckpt")
    with pytest.raises(ValueError, match=r"old.ckpt does not tell its tokenizer. Give --tokenizer bytes"):
        load(tmp_path / "old.ckpt")
    assert load(tmp_path / "old.ckpt", "bytes").as_trained == {}
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ValueError, match=r"The tokenizer '.*llama' cannot be loaded \(.*\). Give --tokenizer bytes"):
        load(folder)


@each(
    "method, message",
    [
        ("compressed-tensors", "takes a package to load: pip install .compressed-tensors>="),
        ("modelopt", "is quantized by 'modelopt', which transformers does not load. Evaluate it in the engine"),
    ],
)
def test_folders_that_would_load_without_their_quantization_are_refused(folder, method, message, monkeypatch):
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": method}}))
    with pytest.raises(ValueError, match=message):
        load(folder)


@each(
    "options, message",
    [
        ([], f": {install_extra('lm_eval')}."),
        (["--limit", "0"], "--limit is a number of documents, above 0; got 0.0."),
        (["--limit", "2.5"], "--limit is a whole number of documents, or a share below 1; got 2.5."),
        (["--batch_size", "many"], "--batch_size is auto or a number of requests, 1 or more; got 'many'."),
        (["--num_fewshot", "-1"], "--num_fewshot is a number of examples, 0 or more; got -1."),
        (["--output", "results.txt"], "--output is the name of a file such as results.json; got 'results.txt'."),
    ],
)
def test_options_are_checked_before_the_harness_is_missing(options, message, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    Path("last.ckpt").touch()
    assert cli.main(["evaluate", "last.ckpt", "--tasks", "hellaswag", *options]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.skipif(not is_installed("lm_eval"), reason="the harness is missing, which is said first")
def test_a_device_that_is_not_there_is_refused(capsys):
    Path("last.ckpt").touch()
    assert cli.main(["evaluate", "last.ckpt", "--tasks", "hellaswag", "--device", "gpu"]) == 2
    assert "--device gpu cannot be used here (" in capsys.readouterr().err.splitlines()[-1]
