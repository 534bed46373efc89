"""The model card of an export, ``README.md``: casts, training, coverage, parity, use and versions.

Nothing in it is of the machine that made it: of paths their last names are told.
"""

import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any

import yaml

from lightning_lowbit.export.formats.base import Format
from lightning_lowbit.export.formats.names import ABOUT
from lightning_lowbit.export.tokenizer import load_tokenizer
from lightning_lowbit.export.trained_model import TrainedModel
from lightning_lowbit.report.blocks import Table
from lightning_lowbit.report.tables import as_markdown

if TYPE_CHECKING:
    from lightning_lowbit.export.checkpoint import Exported

_PACKAGES = ("lightning_lowbit", "torch", "transformers", "compressed-tensors")
_SHOWN = 200  # rows of layers
_PATH = re.compile(r"(?:file://)?(?<![\w./\\~-])(?:~|[A-Za-z]:)?[/\\](?![/\\])[^\s,'\"\])}]*")
_HUB = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_CACHED = re.compile(r".*models--([^/]+)--([^/]+)/snapshots/\w+/?")  # a folder of the Hub's cache

_LOADED = """```python
from transformers import {model}

model = {model}.from_pretrained("{folder}", dtype={dtype})
```"""
_GENERATED = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{folder}", dtype={dtype})
tokenizer = AutoTokenizer.from_pretrained("{folder}")
{inputs}
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=32)[0]))
```"""
_CHAT = """question = [{"role": "user", "content": "Who are you?"}]
settings = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
inputs = tokenizer.apply_chat_template(question, **settings)"""
_TEXT = 'inputs = tokenizer("Once upon a time", return_tensors="pt")'

# By program; "transformers" stands for code that depends on the model.
PROGRAMS = {
    "transformers": "`pip install transformers`\n\n{code}",
    "transformers, compressed-tensors": "`pip install transformers compressed-tensors`. Weights are decoded when "
    "they are loaded: the folder saves disk, and neither memory nor time.\n\n{code}",
    "transformers, accelerate": "`pip install transformers accelerate`\n\n{code}",
    "vLLM": "```bash\npip install vllm\nvllm serve {folder}\n```",
    "TensorRT-LLM": "```bash\ntrtllm-serve {folder}\n```",
    "llama.cpp": "```bash\nllama-cli -m {folder}/model.gguf     # a chat, if the tokenizer has a template of one\n"
    "llama-server -m {folder}/model.gguf  # over HTTP\n```",
    "onnxruntime": """`pip install onnxruntime`. Without the entry below it multiplies by inputs that it rounds to int8:
faster, with other outputs.

```python
import numpy
import onnxruntime

options = onnxruntime.SessionOptions()
options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
session = onnxruntime.InferenceSession("{folder}/model.onnx", options)
[given] = session.get_inputs()
shape = [size if isinstance(size, int) else 2 for size in given.shape]  # names are of sizes that are free
inputs = numpy.zeros(shape, "int64" if given.type == "tensor(int64)" else "float32")
[outputs] = session.run(None, {{given.name: inputs}})
```""",
    "PyTorch": """```python
from safetensors.torch import load_file

state = load_file("{folder}/model.safetensors")  # for load_state_dict of the model's class
```""",
    "lightning_lowbit": """[lightning_lowbit](https://github.com/lightning-lowbit/lightning_lowbit), from a clone:

```python
from lightning_lowbit import load

model = load("{folder}")  # layers that compute with the codes of the folder
```""",
}


def card(exported: "Exported", original: TrainedModel, format: Format, license: str | None = None) -> str:
    """The card as markdown; ``license`` of the model, None for that of the model from which the training started."""
    total, few = exported.parameters
    names = ("checkpoint", "step", "phase", "casts", "tokenizer", "adapters")
    facts = {name: original.facts.get(name) for name in names} | {
        "base model": getattr(original.config, "name_or_path", "")
    }
    metadata = _metadata(original, format, license)
    is_module = original.config is None and "transformers" in format.programs
    programs = ("PyTorch",) if is_module else format.programs
    blocks = [
        f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---",
        f"# {exported.folder.name}",
        f"Trained in few bits with lightning_lowbit, and exported as `{format.name}` ({ABOUT[format.name]}).",
        f"{few:,} of {total:,} parameters ({few / total:.0%}) are in few bits, those of {len(exported.rows)} layers; "
        "the rest is in high precision.",
        "The license is not known." if metadata["license"] == "unknown" else "",
        "## Use",
        _usage(original, programs, exported.folder, format.computes_in),
        "## Training",
        _table(("", ""), facts),
        _table(("hyper-parameter", "value"), original.facts.get("hyper_parameters", {})),
        _table(("of the run", ""), original.facts.get("run", {})),
        "## Parity with the training",
        f"```text\n{exported.compared()}\n```",
        "## Layers",
        layers_table(exported),
        "## Versions",
        _table(("package", "version"), {name: _version(name) for name in _PACKAGES}),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def layers_table(exported: "Exported") -> str:
    """Returns a row for each layer: its cast, its bytes, and the difference of its weight from the training's."""
    shown = exported.rows[:_SHOWN]
    rows = [[row.name, row.cast, f"{row.bytes:,}", f"{row.error:.3g}"] for row in shown]
    table = as_markdown(Table(("layer", "weight", "bytes", "difference from the training"), rows)) if rows else ""
    left = len(exported.rows) - len(shown)
    return f"{table}\n\n{left} more layers are left out here." if left else table


def _metadata(original: TrainedModel, format: Format, license: str | None) -> dict[str, Any]:
    """Returns the metadata that the Hugging Face Hub reads."""
    name = str(getattr(original.config, "name_or_path", "") or "")
    base = _base(name)
    model: Any = original.model
    generates = original.config is not None and bool(model.can_generate())
    is_folder = "transformers" in format.programs[0]
    metadata = {
        "license": license or base.get("license", "unknown"),
        "library_name": "transformers" if original.config is not None and is_folder else None,
        "pipeline_tag": "text-generation" if generates else None,
        "language": base.get("language"),
        "base_model": _hub_name(name) or base.get("base_model"),
        "tags": ["lightning_lowbit", "quantized", format.name],
    }
    if metadata["base_model"]:
        metadata["base_model_relation"] = "quantized"
    return {name: value for name, value in metadata.items() if value is not None}


def _hub_name(name: str) -> str | None:
    """The name on the Hugging Face Hub of a model that was loaded by a name or from a folder; None if it has none."""
    if (cached := _CACHED.fullmatch(name)) is not None:
        return f"{cached[1]}/{cached[2]}"
    return name if _HUB.fullmatch(name) and not Path(name).exists() else None


def _base(name: str) -> Mapping[str, Any]:
    """Returns the metadata of the card in the folder of a model; empty without a card."""
    try:
        text = (Path(name).expanduser() / "README.md").read_text() if name else ""
        front = yaml.safe_load(text.split("---")[1]) if text.startswith("---") else None
    except (OSError, ValueError, IndexError, yaml.YAMLError):
        return {}
    return front if isinstance(front, Mapping) else {}


def portable(value: Any) -> Any:
    """Returns a value without the folders of this machine: of an absolute path its last name."""
    if isinstance(value, Mapping):
        return {name: portable(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [portable(item) for item in value]
    if isinstance(value, Path):
        value = str(value)
    if not isinstance(value, str):
        return value
    text = value.removeprefix("file://")
    if PurePosixPath(text).is_absolute() or PureWindowsPath(text).is_absolute() or text.startswith("~/"):
        return (PureWindowsPath if "\\" in text else PurePosixPath)(text).name
    return _PATH.sub(lambda match: PurePosixPath(match[0].replace("\\", "/")).name, value)


def _table(head: tuple[str, ...], facts: Mapping[str, Any]) -> str:
    rows = [[name, str(portable(value))] for name, value in facts.items() if value is not None and value != ""]
    return as_markdown(Table(head, rows)) if rows else ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _usage(original: TrainedModel, programs: tuple[str, ...], folder: Path, computes_in: Any = None) -> str:
    """Returns the sections of some programs, keys of ``PROGRAMS``; ``computes_in`` of their format."""
    dtype = f'"{"auto" if computes_in is None else str(computes_in).removeprefix("torch.")}"'
    model: Any = original.model
    name = original.facts.get("tokenizer")
    if original.config is None or name is None or not model.can_generate():
        code = _LOADED.format(model=type(model).__name__, folder=folder.name, dtype=dtype)
    else:
        inputs = _TEXT if load_tokenizer(name).chat_template is None else _CHAT
        code = _GENERATED.format(folder=folder.name, inputs=inputs, dtype=dtype)
    sections = {program: PROGRAMS[program].format(folder=folder.name, code=code) for program in programs}
    return "\n\n".join(f"### {program}\n\n{text}" for program, text in sections.items())
