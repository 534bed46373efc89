"""All formats by the name that ``--format`` takes."""

from lightning_lowbit.export.formats import compressed_tensors, dequantized, gguf, modelopt
from lightning_lowbit.export.formats.base import Format

FORMATS: dict[str, Format] = {
    **compressed_tensors.FORMATS,
    **modelopt.FORMATS,
    **gguf.FORMATS,
    **dequantized.FORMATS,
}
