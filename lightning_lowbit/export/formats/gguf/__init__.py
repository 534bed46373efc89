"""GGUF files for llama.cpp: the codes of the training in its block types, bit for bit."""

from functools import partial

from lightning_lowbit.export.formats.base import Format
from lightning_lowbit.export.formats.gguf.blocks import TQ1_0, TQ2_0, BlockType
from lightning_lowbit.export.formats.gguf.client import LlamaCpp, chat
from lightning_lowbit.export.formats.gguf.files import FILE, accept, obstacle, write
from lightning_lowbit.quant import Cast, Scale


def _format(name: str, ternary: BlockType, own_cast: Cast | None) -> Format:
    return Format(
        name,
        partial(obstacle, ternary=ternary),
        partial(write, ternary=ternary),
        lambda folder: LlamaCpp(folder / FILE),
        accepts=partial(accept, ternary=ternary),
        own_cast=own_cast,
        programs=("llama.cpp",),
        chat=chat,
    )


GGUF = _format("gguf", TQ2_0, Cast("int4", Scale("fp16", 32)))
GGUF_TQ1 = _format("gguf-tq1", TQ1_0, None)
FORMATS = {format.name: format for format in (GGUF, GGUF_TQ1)}
