"""Names of export formats and dtypes, with a line about each format, for a command that does not wait for torch."""

_COMPRESSED_TENSORS = "compressed-tensors: vLLM, SGLang, transformers"
_MODEL_OPTIMIZER = "NVIDIA's Model Optimizer: TensorRT-LLM, vLLM, SGLang"

# By the name that ``--format`` takes: its weights, and the programs that load it.
ABOUT = {
    **dict.fromkeys(("nvfp4-w4a16", "nvfp4-w4a4", "mxfp4", "mxfp6", "mxfp8", "fp8"), _COMPRESSED_TENSORS),
    **{f"int{bits}": _COMPRESSED_TENSORS for bits in range(2, 9)},
    **dict.fromkeys(("modelopt-nvfp4", "modelopt-fp8"), _MODEL_OPTIMIZER),
    "bitnet": "transformers' own for ternary weights: transformers, llama.cpp's converter",
    "gguf": "one file for llama.cpp: NVFP4, MXFP4, ternary, int4 and int8 weights of LLaMA, Mistral, Qwen3, GPT-2 and "
    "BitNet",
    "gguf-tq1": "as gguf, with ternary weights in TQ1_0: 1.7 bits instead of 2.1",
    "onnx": "model.onnx of any module: onnxruntime and other engines",
    "dequantized": "plain weights with quantized values: anything",
}

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}  # of tensors that are not quantized; torch's names
