"""GGUF files for llama.cpp: the codes of the training in its block types, bit for bit.

``blocks`` has the block types, ``networks`` what llama.cpp runs, ``vocabulary`` tokenizers, ``files`` writes files, and
``client`` is llama.cpp, and ``chat`` a chat with it.
"""

from functools import partial
from pathlib import Path

import torch
from torch import nn

from lightning_lowbit.export.formats import Format
from lightning_lowbit.export.formats.base import integers
from lightning_lowbit.export.formats.gguf.blocks import TQ1_0
from lightning_lowbit.export.formats.gguf.chat import chat
from lightning_lowbit.export.formats.gguf.client import LlamaCpp
from lightning_lowbit.export.formats.gguf.files import FILE, obstacle, write
from lightning_lowbit.export.formats.gguf.networks import network_of
from lightning_lowbit.export.source import Source


def load(folder: Path) -> nn.Module:
    """The file of a folder in llama.cpp, which has ``logits`` for ``input_ids``, on the CPU."""
    return LlamaCpp(folder / FILE)


def accepts(source: Source) -> None:
    """Raises a ``ValueError`` for networks that llama.cpp does not have."""
    network_of(source.config)


GGUF = Format(
    "gguf",
    "one file for llama.cpp: NVFP4, MXFP4, ternary, int4 and int8 weights of LLaMA, Mistral, Qwen3, GPT-2 and BitNet",
    obstacle,
    write,
    load,
    accepts=accepts,
    own_cast=lambda dtype: integers(4, 32, torch.float16),
    programs=("llama.cpp",),
    chat=chat,
)
GGUF_TQ1 = Format(
    "gguf-tq1",
    "as gguf, with ternary weights in TQ1_0: 1.7 bits instead of 2.1",
    partial(obstacle, ternary=TQ1_0),
    partial(write, ternary=TQ1_0),
    load,
    accepts=accepts,
    programs=("llama.cpp",),
    chat=chat,
)
FORMATS = {format.name: format for format in (GGUF, GGUF_TQ1)}
