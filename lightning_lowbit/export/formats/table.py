"""All formats by the name that ``--format`` takes."""

from lightning_lowbit.export.formats import bitnet, compressed_tensors, dequantized, gguf, modelopt, onnx
from lightning_lowbit.export.formats.base import Format

FORMATS: dict[str, Format] = {
    **compressed_tensors.FORMATS,
    **modelopt.FORMATS,
    **bitnet.FORMATS,
    **gguf.FORMATS,
    **onnx.FORMATS,
    **dequantized.FORMATS,
}
