"""GGUF files for llama.cpp: the codes of the training in its block types, bit for bit.

``blocks`` has the block types, ``networks`` what llama.cpp runs, ``vocabulary`` tokenizers, ``files`` writes files, and
``client`` is llama.cpp.
"""

from functools import partial
from pathlib import Path

from torch import nn

from lightning_lowbit.export.formats import Format
from lightning_lowbit.export.formats.gguf.blocks import TQ1_0
from lightning_lowbit.export.formats.gguf.client import LlamaCpp
from lightning_lowbit.export.formats.gguf.files import FILE, obstacle, write


def load(folder: Path) -> nn.Module:
    """The file of a folder in llama.cpp, which has ``logits`` for ``input_ids``, on the CPU."""
    return LlamaCpp(folder / FILE)


GGUF = Format(
    "gguf",
    "one file for llama.cpp: NVFP4, MXFP4, ternary, int4 and int8 weights of LLaMA, Mistral, Qwen3, GPT-2 and BitNet",
    obstacle,
    write,
    load,
)
GGUF_TQ1 = Format(
    "gguf-tq1",
    "as gguf, with ternary weights in TQ1_0: 1.7 bits instead of 2.1",
    partial(obstacle, ternary=TQ1_0),
    partial(write, ternary=TQ1_0),
    load,
)
FORMATS = {format.name: format for format in (GGUF, GGUF_TQ1)}
