"""Reads folders of quantized models back: those that :func:`export_checkpoint` wrote, and checkpoints that
compressed-tensors wrote, as llm-compressor does. Layers get frozen weights.

Codes and scales are the file's, to the bit. Only weights are read: how a file's engine quantizes activations is up to
the casts. A model is changed only after everything has been compared with it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_lowbit.checks import some
from lightning_lowbit.export.folder import RECORD, empty_network, read_record
from lightning_lowbit.export.reading.files import AGAIN, read_json, read_tensors
from lightning_lowbit.export.reading.layouts import FLOATS, PARTS, Scheme, check_scheme, codes_of, layers_of, layouts
from lightning_lowbit.nn.casts.linear_casts import LinearCasts
from lightning_lowbit.nn.conversion.convert import CastsLike, convert_more
from lightning_lowbit.nn.conversion.frozen import keep_bytes
from lightning_lowbit.nn.core.saving import Frozen, joined
from lightning_lowbit.nn.state.amax import AmaxHistories
from lightning_lowbit.precision.checkpoints.files import differs
from lightning_lowbit.quant import Cast

_Model = TypeVar("_Model", bound=nn.Module)
_Layers = dict[str, tuple[LinearCasts, Frozen, Tensor]]  # casts and bytes by name
_METHODS = ("compressed-tensors", "modelopt", "bitnet")  # whose folders are read


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
    model = empty_network(config, folder)
    layers, others = _read(model, folder, config, recorded, casts, dtype, quantized)
    if record is not None and quantized:
        delayed = {name for name, layer_casts in record.casts.items() if "fprop_x" in layer_casts.delayed}
        if wrong := sorted((record.casts.keys() ^ layers.keys()) | (record.input_amaxes.keys() ^ delayed)):
            raise ValueError(f"{folder / RECORD} and the weights differ in how {some(wrong)} was trained. {AGAIN}")
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                module.register_parameter(name, nn.Parameter(torch.empty(parameter.shape, dtype=dtype)))
    model.tie_weights()
    _fill(model, layers, others)
    _scale_inputs(model, {} if record is None else record.input_amaxes)
    return model.eval()


@torch.no_grad()
def load_compressed(
    model: _Model, folder: str | Path, casts: CastsLike | None = None, dtype: torch.dtype = torch.bfloat16
) -> _Model:
    """Fills a model from a checkpoint of compressed-tensors; its quantized weights stay codes, and frozen.

    Dtypes and shapes of all tensors are compared with the model and the format first. NaN and Inf in scales, and codes
    that mean no number, are errors; other tensors are loaded as they are.

    Args:
        model: a ``transformers`` model of the checkpoint's architecture, such as ``from_config`` makes.
        folder: holds ``config.json``, and ``model.safetensors`` or files that ``model.safetensors.index.json`` names.
        casts: of the layers whose weights are quantized, with the file's cast as ``fprop_w`` (or the error says which
            it is); None quantizes weights alone: ``LinearCasts(fprop_w=the file's, dgrad_w="fprop")``.
        dtype: of the computation, and of :func:`lightning_lowbit.unpack_frozen`.

    Returns:
        The model. Other tensors of the file are loaded into parameters and buffers of their names.

    Raises:
        ValueError: no checkpoint of compressed-tensors, a damaged one, a format or scheme that is not read, a tensor
            that only one side has or whose shape or dtype differs, or casts with another ``fprop_w``. The model is
            then unchanged.

    Examples:
        >>> model = load_compressed(model, "llama-fp8")
    """
    folder = Path(folder).expanduser()
    return _fill(model, *_read(model, folder, _config(folder), {}, casts, dtype))


def _read(
    model: nn.Module,
    folder: Path,
    config: Mapping[str, Any],
    recorded: Mapping[str, LinearCasts],
    casts: CastsLike | None,
    dtype: torch.dtype,
    quantized: bool = True,
) -> tuple[_Layers, dict[str, Tensor]]:
    """Returns the layers and all other tensors of a folder, compared with a model, which may be on the meta device.
    Layers have ``recorded`` casts, by name, or ``casts``; a folder that is not ``quantized`` holds plain weights."""
    default = None if casts is None else LinearCasts.of(casts)
    method, schemes = _schemes(config, folder / "config.json") if quantized else ("", [])
    tensors = read_tensors(folder)
    names = layers_of(tensors) if quantized else []
    modules = dict(model.named_modules())
    if lacking := [name for name in names if not isinstance(modules.get(name), nn.Linear)]:
        raise ValueError(
            f"{folder} has quantized weights of {len(lacking)} layers that {type(model).__name__} does not have as "
            f"nn.Linear, e.g. {some(lacking)}. Build the model from the checkpoint's own config.json."
        )
    layers: _Layers = {}
    for name in names:
        parts = {part: tensors.pop(f"{name}.{part}") for part in PARTS if f"{name}.{part}" in tensors}
        shape: torch.Size = modules[name].weight.shape
        codes = codes_of(name, parts, layouts(method, schemes, *shape))
        layer_casts = recorded.get(name, default)
        weight = None if layer_casts is None else layer_casts.fprop_w
        if isinstance(weight, Cast) and weight.scale.block == "tensor":
            codes = codes.with_one_scale()
        layer_casts = _casts(name, codes.cast, layer_casts, shape[1])
        assert isinstance(layer_casts.fprop_w, Cast)
        frozen = Frozen(layer_casts.fprop_w, shape, dtype)
        layers[name] = layer_casts, frozen, joined(codes.packed(name, layer_casts.fprop_w))
    return layers, _others(model, tensors, {f"{name}.weight" for name in names}, folder)


@torch.no_grad()
def _fill(model: _Model, layers: _Layers, others: dict[str, Tensor]) -> _Model:
    """Gives a model the contents of a folder."""
    model.load_state_dict(others, strict=False)
    convert_more(model, {name: casts for name, (casts, _, _) in layers.items()})
    for name, (_, frozen, data) in layers.items():
        layer: Any = model.get_submodule(name)
        keep_bytes(layer, frozen, data.to(layer.weight.device))
    return model


def _schemes(whole: Mapping[str, Any], path: Path) -> tuple[str, Sequence[Scheme]]:
    """The quantization method of a checkpoint, and the weights' arguments of each group in its configuration."""
    config = whole.get("quantization_config") or {}
    method = config.get("quant_method") if isinstance(config, dict) else None
    if method not in _METHODS:
        raise ValueError(
            f"{path} has quant_method {method!r}, not one of {', '.join(_METHODS)}. Load a model in high precision "
            "with from_pretrained, and call lightning_lowbit.pack_frozen(model, casts)."
        )
    if method != "compressed-tensors":
        return method, []
    groups, schemes = config.get("config_groups"), []
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise ValueError(f"{path} has config_groups that are no mapping of mappings. {AGAIN}")
    for name, group in groups.items():
        weights = group.get("weights")
        if not isinstance(weights, dict | None):
            raise ValueError(f"{path} has weights in config_groups that are no mapping. {AGAIN}")
        if weights is not None:
            scheme = {**weights, "format": group.get("format") or config.get("format")}
            schemes.append(check_scheme(scheme, f"{path}, config_groups.{name}"))
    return method, schemes


def _casts(name: str, cast: Cast, casts: LinearCasts | None, columns: int) -> LinearCasts:
    if casts is None:
        return LinearCasts(fprop_w=cast, dgrad_w="fprop")
    if not isinstance(casts.fprop_w, Cast) or _kind(casts.fprop_w, columns) != _kind(cast, columns):
        raise ValueError(
            f"The file's weight of {name} is quantized by {cast}, and the casts have {casts.fprop_w} for fprop_w. Give "
            f"casts with fprop_w={cast!r}, or None."
        )
    return casts


def _kind(cast: Cast, columns: int) -> tuple[Any, ...]:
    """Returns the kind of codes and scales, whatever the scales were made from: a block of all columns is a row."""
    scale, block = cast.scale, cast.scale.block
    if isinstance(block, tuple) and scale.two_level:  # each row of a tile has its scale in the file
        block = block[1]
    format = "float" if scale.format in FLOATS.values() else scale.format
    element = "int2" if cast.element == "ternary" else cast.element
    return element, format, "row" if block == columns else block, scale.two_level


def _others(model: nn.Module, tensors: Mapping[str, Tensor], quantized: set[str], folder: Path) -> dict[str, Tensor]:
    """Returns the tensors of a file that are not quantized; a ``ValueError`` if the model has others."""
    state = model.state_dict(keep_vars=True)
    names = {name: id(tensor) for name, tensor in state.items()}
    computed = dict(model.named_buffers()).keys() - state.keys()  # the model makes them
    others = {name: tensor for name, tensor in tensors.items() if name not in computed}
    present = {names[name] for name in others if name in names}  # one of tied tensors suffices
    missing = [name for name in state if names[name] not in present and name not in quantized]
    unexpected = [name for name in others if name not in state or name in quantized]
    if missing or unexpected:
        raise ValueError(
            f"{folder} lacks {some(missing) or 'nothing'} of {type(model).__name__}, and has "
            f"{some(unexpected) or 'nothing'} that the model lacks. Build it from the checkpoint's own config.json."
        )
    firsts: dict[int, str] = {}
    for name, tensor in others.items():
        if (how := differs(state[name], tensor, same_dtype=False)) is not None:
            raise ValueError(f"{folder} has another {name} than {type(model).__name__}: {how}. {AGAIN}")
        first = firsts.setdefault(names[name], name)
        if first != name and not torch.equal(others[first].double(), tensor.double()):
            raise ValueError(f"{folder} has other values for {first} than for {name}, which the model ties. {AGAIN}")
    return others


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


def _config(folder: Path) -> dict[str, Any]:
    path, engine_files = folder / "config.json", [*folder.glob("*.gguf"), *folder.glob("*.onnx")]
    if engine_files or not path.is_file():
        reason = f"{engine_files[0].name} is read by its engine" if engine_files else "it has no config.json"
        raise ValueError(
            f"{folder} holds no model that can be read back: {reason}. Give a folder of `lowbit export` with a model "
            "of transformers, in another format than gguf and onnx."
        )
    return read_json(path)
