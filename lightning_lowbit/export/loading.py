"""Reads exported folders, and checkpoints of compressed-tensors, back into models that this package quantizes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_lowbit.checks import some
from lightning_lowbit.export.compressed import METHODS, fill, read
from lightning_lowbit.export.folder import empty_network
from lightning_lowbit.export.reading.files import AGAIN, read_json
from lightning_lowbit.export.record import NAME, read_record
from lightning_lowbit.nn.casts.linear_casts import LinearCasts
from lightning_lowbit.nn.conversion.convert import CastsLike
from lightning_lowbit.nn.state.amax import AmaxHistories
from lightning_lowbit.quant import Cast


@torch.no_grad()
def load(folder: str | Path, casts: CastsLike | None = None, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Reads a model whose weights a folder keeps in few bits; its layers are converted, with the file's codes, frozen.

    It evaluates as it was trained, and can be the base of adapters. To train its weights further, read it in float32,
    make matrices of them by :func:`lightning_lowbit.unpack_frozen`, and call ``requires_grad_(True)``. Compute under
    ``torch.autocast`` where it was trained under it.

    Args:
        folder: that ``lowbit export`` made, in a format of compressed-tensors, modelopt, bitnet or ``dequantized``; or
            any checkpoint of compressed-tensors.
        casts: of all quantized layers, with the file's cast as ``fprop_w``. None: those of the training, if the folder
            tells them; else weights alone are quantized.
        dtype: of the computation, and of the tensors that are not quantized.

    Returns:
        A model of ``transformers`` in evaluation mode. From ``dequantized`` folders it is a plain one.

    Raises:
        ValueError: the folder holds no such model, or takes code of its own; a file is missing or damaged; a tensor is
            missing, is not the model's, or has another shape or dtype than its format; scales or codes hold NaN or
            Inf; or the codes are not those of ``casts``.

    Examples:
        >>> model = load("llama-nvfp4")
        >>> logits = model(input_ids=tokens).logits
    """
    folder = Path(folder).expanduser()
    config = _config(folder)
    record = read_record(folder)
    quantized = record is None or record.format != "dequantized"
    if casts is not None:
        record = None
    recorded = {} if record is None else {name: _current(layer_casts) for name, layer_casts in record.casts.items()}
    default = None if casts is None else LinearCasts.of(casts)
    model = empty_network(config, folder)
    contents = read(model, folder, recorded, default, dtype, quantized)
    if record is not None and quantized:
        delayed = {name for name, layer_casts in record.casts.items() if "fprop_x" in layer_casts.delayed}
        wrong = (record.casts.keys() ^ contents.layers.keys()) | (record.input_amaxes.keys() ^ delayed)
        if wrong:
            names = some(sorted(wrong))
            raise ValueError(f"{folder / NAME} and the weights differ in how {names} was trained. {AGAIN}")
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                module.register_parameter(name, nn.Parameter(torch.empty(parameter.shape, dtype=dtype)))
    model.tie_weights()
    fill(model, contents)
    _scale_inputs(model, {} if record is None else record.input_amaxes)
    return model.eval()


def _scale_inputs(model: nn.Module, amaxes: Mapping[str, float]) -> None:
    """Gives layers with delayed scaling the amaxes of their inputs; without one, an input is scaled by its own."""
    histories = AmaxHistories(model)
    state = histories.state_dict()
    for name, amax in amaxes.items():
        if (history := state["amax_history"].get(f"{name}/fprop_x")) is not None:
            history[-1] = amax
    histories.load_state_dict(state)
    histories.release()


def _current(casts: LinearCasts) -> LinearCasts:
    """Casts whose weight is scaled by its own amax: that of earlier steps is in the file's scale."""
    cast = casts.fprop_w
    if not isinstance(cast, Cast) or cast.scale.source == "current":
        return casts
    return casts.replace(fprop_w=cast.replace(scale={"source": "current", "history": 16, "algorithm": "max"}))


def _config(folder: Path) -> Mapping[str, Any]:
    path, engine_files = folder / "config.json", [*folder.glob("*.gguf"), *folder.glob("*.onnx")]
    if engine_files or not path.is_file():
        reason = f"{engine_files[0].name} is read by its engine" if engine_files else "it has no config.json"
        raise ValueError(
            f"{folder} holds no model that can be read back: {reason}. Give a folder of `lowbit export` with a model "
            "of transformers, in another format than gguf and onnx."
        )
    config = read_json(path)
    quantization = config.get("quantization_config") or {}
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    if method is not None and method not in METHODS:
        raise ValueError(f"{folder} was quantized by {method!r}; load reads {', '.join(METHODS)}.")
    return config
