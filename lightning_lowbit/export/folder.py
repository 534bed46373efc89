"""A folder of ``transformers``: weights in shards, configuration, tokenizer; tensors are written as they come.

``lowbit.json`` in it says how each layer was trained, for ``load``.
"""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_lowbit._lightning import rank_zero_warn
from lightning_lowbit.checks import choose, integer, number, some, text
from lightning_lowbit.export.reading.files import AGAIN, INDEX, WHOLE, first_line, is_saved_safely, locate, read_json
from lightning_lowbit.export.tokenizer import fitting_tokenizer, load_tokenizer
from lightning_lowbit.export.trained_model import TrainedModel, parameters_on_meta
from lightning_lowbit.kernels.memory import overlaps
from lightning_lowbit.nn.casts.linear_casts import LinearCasts
from lightning_lowbit.nn.casts.traits import OPERANDS
from lightning_lowbit.precision.checkpoints.trained import primitive

_FLOATS = ("F64", "F32", "F16", "BF16")  # safetensors' names of dtypes that weights have
_SHARD = 2**29  # bytes of tensors that wait to be written, of which safetensors makes a copy


class SafetensorsWriter:
    """Writes tensors to ``model.safetensors``, or to several files with an index; holds at most one file in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._waiting: dict[str, Tensor] = {}
        self._files: list[tuple[Path, list[str], int]] = []

    def add(self, tensors: Mapping[str, Tensor]) -> int:
        """Takes tensors; returns their bytes."""
        self._waiting |= {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        if _size(self._waiting) >= _SHARD:
            self._write()
        return _size(tensors)

    def finish(self, original: TrainedModel, without: set[str], dtype: torch.dtype) -> None:
        """Writes the other tensors of a model, ``without`` those of some names, and the index. Of tied ones a network
        takes the first, and other modules all. Floating point parameters are cast to ``dtype``. Names of several files
        tell their number."""
        parameters = dict(original.model.named_parameters(remove_duplicate=False))
        seen: set[int] = set()
        for name, tensor in original.model.state_dict(keep_vars=True).items():
            if name in without or id(tensor) in seen or not isinstance(tensor, Tensor):
                continue
            if original.config is not None:
                seen.add(id(tensor))
            is_cast = name in parameters and tensor.is_floating_point()
            self.add({name: in_dtype(name, tensor.detach(), dtype) if is_cast else tensor})
        self._write()
        if len(self._files) == 1:
            self._files[0][0].rename(self.folder / WHOLE)
            return
        files: dict[str, str] = {}
        for place, (path, names, _) in enumerate(self._files, 1):
            final = path.rename(self.folder / f"model-{place:05}-of-{len(self._files):05}.safetensors")
            files |= dict.fromkeys(names, final.name)
        index = {"metadata": {"total_size": sum(size for *_, size in self._files)}, "weight_map": files}
        write_json(self.folder / INDEX, index)

    def _write(self) -> None:
        from safetensors.torch import save_file  # comes with transformers

        path = self.folder / f"part-{len(self._files)}.safetensors"
        if self._waiting or not self._files:
            for name in (name for names in overlaps(self._waiting) for name in names):  # of parameters with one data
                self._waiting[name] = self._waiting[name].clone()
            save_file(self._waiting, path, metadata={"format": "pt"})
            self._files.append((path, [*self._waiting], _size(self._waiting)))
            self._waiting = {}


def in_dtype(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a tensor in the dtype of a file; a ``ValueError`` that names it if that does not hold a value, or it
    holds NaN."""
    rounded = tensor.to(dtype)
    if bool((rounded.isinf() & tensor.isfinite()).any()):
        short = str(dtype).removeprefix("torch.")
        raise ValueError(f"{name} has values that {short} does not hold: give --dtype bf16 or fp32.")
    if bool(rounded.isnan().any()):
        raise ValueError(f"{name} holds NaN: export a checkpoint from before.")
    return rounded


def write_network(
    original: TrainedModel, folder: Path, dtype: torch.dtype, quantization: Mapping[str, Any] | None
) -> None:
    """Writes the configuration of a model of ``transformers`` with a ``quantization_config``, if any, and the ``dtype``
    of the tensors that are not quantized; the configuration of its generation; and its tokenizer."""
    config = copy.deepcopy(original.config)
    assert config is not None
    config.architectures, config.dtype = [type(original.model).__name__], dtype
    if hasattr(config, "use_cache"):
        config.use_cache = True
    config.save_pretrained(folder)
    if quantization is not None:
        path = folder / "config.json"
        write_json(path, {**json.loads(path.read_text()), "quantization_config": quantization})
    generation: Any = getattr(original.model, "generation_config", None)
    if generation is not None:
        try:
            generation.save_pretrained(folder)
        except ValueError as error:  # settings that contradict each other
            rank_zero_warn(f"The exported folder has no generation_config.json: {str(error).splitlines()[0]}")
    write_tokenizer(original, folder)


def write_tokenizer(original: TrainedModel, folder: Path) -> None:
    """Writes the files of a model's tokenizer: ``"bytes"``, a folder or a name on the Hub; none without a name."""
    name = original.facts.get("tokenizer")
    if name is not None:
        tokenizer = load_tokenizer(name) if original.config is None else fitting_tokenizer(name, original.model)
        tokenizer.save_pretrained(folder)


def load_network(folder: Path, dtype: torch.dtype | None = None) -> nn.Module:
    """The model of a folder, as ``transformers`` reads it, in evaluation mode; None for the dtype of the folder."""
    return pretrained(architecture(read_json(folder / "config.json"), folder), folder, dtype=dtype or "auto")


def pretrained(cls: Any, folder: Path, **arguments: Any) -> Any:
    """Returns a model in evaluation mode that ``from_pretrained`` of a class of ``transformers`` makes of a folder.

    An ``ImportError`` if a package is missing; a ``ValueError`` if the folder takes code of its own, which is not run,
    a file is missing or damaged, or a tensor is missing, is not the model's, or has another shape or a dtype of codes.
    """
    from transformers.utils import logging

    places = locate(folder) if is_saved_safely(folder) else {}
    had_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model, report = cls.from_pretrained(
            folder, trust_remote_code=False, output_loading_info=True, ignore_mismatched_sizes=True, **arguments
        )
    except ImportError:
        raise
    except Exception as error:  # configurations, networks and quantizers raise errors of any class
        raise ValueError(f"transformers cannot load {folder} ({first_line(error)}). {AGAIN}") from error
    finally:
        if had_bars:
            logging.enable_progress_bar()
    if missing := sorted(report["missing_keys"]):
        raise ValueError(f"{folder} lacks {some(missing)}, which transformers would draw at random. {AGAIN}")
    if unexpected := sorted(report["unexpected_keys"]):
        raise ValueError(f"{folder} has {some(unexpected)}, which {type(model).__name__} lacks. {AGAIN}")
    if other := sorted(str(key) for key, *_ in report["mismatched_keys"]):
        raise ValueError(f"{folder} has other shapes of {some(other)} than {type(model).__name__}. {AGAIN}")
    if not hasattr(model.config, "quantization_config"):
        floating = {name for name, parameter in model.named_parameters() if parameter.is_floating_point()}
        if codes := sorted(name for name in floating & places.keys() if places[name].dtype not in _FLOATS):
            raise ValueError(f"{folder} has {some(codes)} in {places[codes[0]].dtype}, which is no weight's. {AGAIN}")
    return model.eval()


def empty_network(config: Mapping[str, Any], folder: Path) -> Any:
    """Returns the network of a folder's configuration without its quantization, with parameters on the meta device. A
    ``ValueError`` if ``transformers`` has no such network, or cannot make it of this configuration."""
    from transformers import AutoConfig, GenerationConfig

    cls = architecture(config, folder)
    try:
        parsed = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if hasattr(parsed, "quantization_config"):
            del parsed.quantization_config
        with parameters_on_meta():
            model = cls(parsed)
        if (folder / "generation_config.json").exists():
            model.generation_config = GenerationConfig.from_pretrained(folder)
    except Exception as error:  # configurations and networks raise errors of any class
        raise ValueError(f"{folder}/config.json makes no {cls.__name__} ({first_line(error)}). {AGAIN}") from error
    return model


def architecture(config: Mapping[str, Any], folder: Path) -> Any:
    """Returns the class of ``transformers`` that a configuration names; a ``ValueError`` if there is none."""
    import transformers

    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else names
    cls = getattr(transformers, name, None) if isinstance(name, str) else None
    if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
        raise ValueError(f"{folder}/config.json names the architecture {name!r}, which transformers does not have.")
    return cls


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, default=str) + "\n")


def _size(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


RECORD = "lowbit.json"
_VERSION = 1


class Record(NamedTuple):
    """The casts with which an exported model was trained."""

    format: str  # of the folder
    casts: Mapping[str, LinearCasts]  # of each layer that is quantized
    input_amaxes: Mapping[str, float]  # by layer, the amax that scales its input, with delayed scaling


def write_record(original: TrainedModel, format: str, folder: Path) -> None:
    """Writes the casts of the quantized layers by name, each once."""
    names: dict[LinearCasts, str] = {}
    layers = {name: names.setdefault(layer.full_casts, str(len(names))) for name, layer in original.layers.items()}
    casts = {name: primitive(casts) for casts, name in names.items()}
    amaxes = {
        name: float(layer.lowbit.amaxes.in_force[OPERANDS.index("fprop_x")])
        for name, layer in original.layers.items()
        if layer.lowbit.amaxes is not None and "fprop_x" in layer.full_casts.delayed
    }
    content = {"version": _VERSION, "format": format, "layers": layers, "casts": casts, "input_amaxes": amaxes}
    write_json(folder / RECORD, content)


def read_record(folder: Path) -> Record | None:
    """Returns the record of an exported folder, None for folders of others; a ``ValueError`` for a damaged or later
    one."""
    path = folder / RECORD
    if not path.exists():
        return None
    record = read_json(path)
    try:
        version: Any = integer("version", record.get("version"), 1)
        if version > _VERSION:
            raise ValueError(f"it has version {version}, and this lightning_lowbit reads up to {_VERSION}")
        parts: dict[str, Any] = {key: record.get(key) for key in ("casts", "layers", "input_amaxes")}
        for key, part in parts.items():
            if not isinstance(part, dict):
                raise ValueError(f"it has {key} {part!r}, no mapping")
        casts = {name: LinearCasts.of(value) for name, value in parts["casts"].items()}
        layers = {layer: casts[choose("casts", name, casts)] for layer, name in parts["layers"].items()}
        amaxes = {layer: number("input_amaxes", amax, at_least=0) for layer, amax in parts["input_amaxes"].items()}
        format: Any = text("format", record.get("format"))
    except (ValueError, TypeError) as error:  # fields of casts are of any type
        raise ValueError(f"{path} cannot be read ({error}). {AGAIN}") from error
    return Record(format, layers, amaxes)
