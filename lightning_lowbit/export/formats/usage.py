"""How programs run a folder: a section of its model card for each."""

from pathlib import Path
from typing import Any

from lightning_lowbit.export.tokenizer import load_tokenizer
from lightning_lowbit.export.trained_model import TrainedModel

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


def usage(original: TrainedModel, programs: tuple[str, ...], folder: Path, computes_in: Any = None) -> str:
    """Returns the sections of some programs, keys of ``PROGRAMS``, in Markdown; ``computes_in`` of their format."""
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
