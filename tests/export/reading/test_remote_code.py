"""Code that a folder, a tokenizer, a data set or a checkpoint brings is never run, and nobody is asked to run it."""

import ast
import builtins
import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint import save
from transformers import LlamaConfig, LlamaForCausalLM

import lightning_lowbit
from lightning_lowbit import export_checkpoint, load, load_compressed
from lightning_lowbit.cli.evaluate import command
from lightning_lowbit.export.formats.gguf.vocabulary import vocabulary
from lightning_lowbit.export.tokenizer import load_tokenizer
from lightning_lowbit.export.trained_model import read
from lightning_lowbit.precision.checkpoints.files import load_weights
from lightning_lowbit.recipes.models import CausalLM, network_config
from lightning_lowbit.recipes.stream import open_splits
from lightning_lowbit.recipes.tokenizers import PretrainedTokenizer
from tests.tables import each

PACKAGE = Path(lightning_lowbit.__file__).parent
CODE = "open({path!r}, 'w').close()\nclass A: pass\n"


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """The file that code of the folder would write, or a question whether to run it."""
    monkeypatch.setattr(builtins, "input", lambda *_: (tmp_path / "ran").write_text("asked") and "n")
    return tmp_path / "ran"


@pytest.fixture
def folder(tmp_path, ran):
    """A model, a tokenizer and a data set that bring code."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "code.py").write_text(CODE.format(path=str(ran)))
    (folder / "folder.py").write_text(CODE.format(path=str(ran)))  # the name of a data set's script
    names = ("AutoConfig", "AutoModel", "AutoModelForCausalLM")
    config = {"model_type": "own", "architectures": ["Own"], "auto_map": dict.fromkeys(names, "code.A")}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["code.A", "code.A"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    save_file({"a": torch.ones(1)}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


ENTRIES = {
    "load": load,
    "load_compressed": lambda folder: load_compressed(torch.nn.Linear(2, 2), folder),
    "evaluate": lambda folder: command.load(folder, None, None, torch.device("cpu")),
    "tokenizer": lambda folder: load_tokenizer(str(folder)),
    "tokenizer of recipes": lambda folder: PretrainedTokenizer(str(folder)),
    "network": lambda folder: network_config(str(folder)),
    "network that asks for it": lambda folder: network_config(str(folder), {"trust_remote_code": True}),
    "module": lambda folder: CausalLM(str(folder)),
    "pretrained module": lambda folder: CausalLM(str(folder), pretrained=True),
    "data": lambda folder: open_splits(f"hf:{folder}", "text"),
}


@each("name", ENTRIES)
def test_a_folder_runs_no_code(name, folder, ran):
    with pytest.raises(ValueError) as raised:
        ENTRIES[name](folder)
    assert not ran.exists(), name
    assert "\n" not in str(raised.value), name


def test_a_network_of_transformers_is_taken_without_the_code_beside_it_and_gguf_takes_no_tokenizer(folder, ran):
    assert "cannot be loaded" in vocabulary(str(folder), 256)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=256)).save_pretrained(folder)
    own = json.loads((folder / "config.json").read_text()) | {"auto_map": {"AutoModelForCausalLM": "code.A"}}
    (folder / "config.json").write_text(json.dumps(own))
    assert isinstance(CausalLM(str(folder), pretrained=True).model, LlamaForCausalLM)
    assert isinstance(command.load(folder, "bytes", None, torch.device("cpu")).model, LlamaForCausalLM)
    assert not ran.exists()


def test_a_checkpoint_cannot_ask_for_code(trained, folder, ran, tmp_path):
    whole = torch.load(trained("llama", "mxfp8", steps=2), weights_only=True)
    for changes in ({"trust_remote_code": True}, {"trust_remote_code": True, "auto_map": {"AutoConfig": "code.A"}}):
        given = {**whole["hyper_parameters"], "network": str(folder), "config": changes, "pretrained": True}
        torch.save({**whole, "hyper_parameters": given}, tmp_path / "asks.ckpt")
        with pytest.raises(ValueError, match=r"models.CausalLM cannot be made from the hyper-parameters"):
            read(tmp_path / "asks.ckpt")
    data = {"TextDataModule": {**whole["TextDataModule"], "tokenizer": str(folder)}}
    torch.save({**whole, **data}, tmp_path / "asks.ckpt")
    with pytest.raises(ValueError, match="The tokenizer .*folder' cannot be loaded"):
        export_checkpoint(tmp_path / "asks.ckpt", "mxfp8", tmp_path / "out", parity=False)
    assert not ran.exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_description_of_shards_names_no_code(trained, ran, tmp_path):
    loaded = torch.load(trained("llama", "mxfp8", steps=2), weights_only=True)
    save({"state_dict": {"weight": torch.ones(2, 3)}}, checkpoint_id=tmp_path / "shards", no_dist=True)
    torch.save({**loaded, "state_dict": None}, tmp_path / "shards" / "meta.pt")
    description, model = tmp_path / "shards" / ".metadata", torch.nn.Linear(3, 2, bias=False)
    load_weights(model, tmp_path / "shards")
    assert torch.equal(model.weight, torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"another weight than the model: .*\(2, 3\), and .*\(5, 3\) is needed"):
        load_weights(torch.nn.Linear(3, 5, bias=False), tmp_path / "shards")
    whole = pickle.loads(description.read_bytes())
    whole.state_dict_metadata["x"] = Runs(ran)
    description.write_bytes(pickle.dumps(whole))
    for entry in (lambda path: load_weights(model, path), read):
        with pytest.raises(ValueError, match=r"cannot be read \(it names \w+.open, and descriptions of tensors do not"):
            entry(tmp_path / "shards")
    for damage in (lambda: description.write_bytes(b"\x80"), description.unlink):
        damage()
        with pytest.raises(ValueError, match="metadata cannot be read"):
            load_weights(model, tmp_path / "shards")
    assert not ran.exists()


class Runs:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_every_call_says_that_code_is_not_trusted():
    calls = []
    for path in [*PACKAGE.rglob("*.py"), *(PACKAGE.parent / "recipes").rglob("*.py")]:
        original = path.read_text()
        for node in ast.walk(ast.parse(original)) if "from_pretrained" in original else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = ast.unparse(node.func.value)
                if node.func.attr in ("from_pretrained", "from_config") and owner != "GenerationConfig":
                    trusts = [ast.unparse(key.value) for key in node.keywords if key.arg == "trust_remote_code"]
                    calls.append((f"{path.name}: {ast.unparse(node)}", trusts))
    assert len(calls) >= 6
    assert all(trusts == ["False"] for _, trusts in calls), [call for call, trusts in calls if trusts != ["False"]]
