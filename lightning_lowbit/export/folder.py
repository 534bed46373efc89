"""A folder of ``transformers``: weights in shards, configuration, tokenizer; tensors are written as they come."""

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_lowbit._lightning import rank_zero_warn
from lightning_lowbit.export.source import Source

_SHARD = 2**29  # bytes of tensors that wait to be written, of which safetensors makes a copy


class Shards:
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

    def add_dense(self, source: Source, without: set[str], dtype: torch.dtype) -> None:
        """Takes the tensors of a model that are not quantized, all but those of some names; see :func:`dense`."""
        for name, tensor in dense(source, without, dtype):
            self.add({name: tensor})

    def close(self) -> None:
        """Writes what waits, and the index; names of several files tell their number."""
        self._write()
        if len(self._files) == 1:
            self._files[0][0].rename(self.folder / "model.safetensors")
            return
        where: dict[str, str] = {}
        for number, (path, names, _) in enumerate(self._files, 1):
            final = path.rename(self.folder / f"model-{number:05}-of-{len(self._files):05}.safetensors")
            where |= dict.fromkeys(names, final.name)
        index = {"metadata": {"total_size": sum(size for *_, size in self._files)}, "weight_map": where}
        write_json(self.folder / "model.safetensors.index.json", index)

    def _write(self) -> None:
        from safetensors.torch import save_file  # comes with transformers

        path = self.folder / f"part-{len(self._files)}.safetensors"
        if self._waiting or not self._files:
            save_file(self._waiting, path, metadata={"format": "pt"})
            self._files.append((path, [*self._waiting], _size(self._waiting)))
            self._waiting = {}


def dense(source: Source, without: set[str], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a model that are not quantized, one at a time: floating point ones in ``dtype``, and of tied ones
    the first.

    Args:
        source: the model.
        without: names of tensors to leave out.
        dtype: of floating point parameters; buffers keep theirs.
    """
    parameters = dict(source.model.named_parameters(remove_duplicate=False))
    seen: set[int] = set()
    for name, tensor in source.model.state_dict(keep_vars=True).items():
        if name in without or id(tensor) in seen or not isinstance(tensor, Tensor):
            continue
        seen.add(id(tensor))
        is_cast = name in parameters and tensor.is_floating_point()
        yield name, tensor.detach().to(dtype) if is_cast else tensor.detach()


def write_network(source: Source, folder: Path, dtype: torch.dtype, quantization: Mapping[str, Any] | None) -> None:
    """Writes the configuration of a model of ``transformers``, that of its generation, and its tokenizer.

    Args:
        source: the model.
        folder: exists.
        dtype: of the tensors that are not quantized.
        quantization: ``quantization_config``; None for none.
    """
    config = copy.deepcopy(source.config)
    assert config is not None
    config.architectures, config.dtype = [type(source.model).__name__], dtype
    if hasattr(config, "use_cache"):
        config.use_cache = True
    config.save_pretrained(folder)
    if quantization is not None:
        path = folder / "config.json"
        write_json(path, {**json.loads(path.read_text()), "quantization_config": quantization})
    generation: Any = getattr(source.model, "generation_config", None)
    if generation is not None:
        try:
            generation.save_pretrained(folder)
        except ValueError as error:  # settings that contradict each other
            rank_zero_warn(f"The exported folder has no generation_config.json: {str(error).splitlines()[0]}")
    write_tokenizer(source.facts.get("tokenizer"), folder)


def write_tokenizer(name: str | None, folder: Path) -> None:
    """Writes the files of a tokenizer: ``"bytes"``, a folder or a name on the Hub; none without a name."""
    if name is None:
        return
    from lightning_lowbit.export.tokenizer import load_tokenizer

    load_tokenizer(name).save_pretrained(folder)


def load_network(folder: Path, dtype: torch.dtype | None = None) -> nn.Module:
    """The model of a folder, as ``transformers`` reads it, in evaluation mode; None for the dtype of the folder."""
    from transformers.utils import logging

    cls = architecture(json.loads((folder / "config.json").read_text()), folder)

    had_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model: nn.Module = cls.from_pretrained(folder, dtype=dtype or "auto")
    finally:
        if had_bars:
            logging.enable_progress_bar()
    return model.eval()


def architecture(config: Mapping[str, Any], folder: Path) -> Any:
    """The class of ``transformers`` that a configuration names.

    Raises:
        ValueError: there is no such class.
    """
    import transformers

    name = next(iter(config.get("architectures") or ["none"]))
    cls = getattr(transformers, name, None)
    if cls is None:
        raise ValueError(f"{folder}/config.json names the architecture {name!r}, which transformers does not have.")
    return cls


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, default=str) + "\n")


def _size(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
