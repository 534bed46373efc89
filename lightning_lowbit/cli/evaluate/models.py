"""Loads a checkpoint, or a folder of Hugging Face, for ``lowbit evaluate``."""

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from lightning_lowbit.cli.evaluate.options import KINDS
from lightning_lowbit.cli.options import check_whole
from lightning_lowbit.export.folder import pretrained
from lightning_lowbit.export.reading.files import first_line, read_json
from lightning_lowbit.export.tokenizer import fitting_tokenizer
from lightning_lowbit.export.trained_model import read
from lightning_lowbit.packages import install


@dataclass(frozen=True)
class Loaded:
    """A causal language model on its device.

    Attributes:
        model: of ``transformers``.
        tokenizer: of ``transformers``.
        about: its precision, in a line.
        facts: entries about the model in the results.
        as_trained: arguments of the harness's model that tokenize as the training did.
    """

    model: Any
    tokenizer: Any
    about: str
    facts: Mapping[str, Any]
    as_trained: Mapping[str, Any] = field(default_factory=dict)


def load(path: Path, tokenizer: str | None, module: str | None, device: torch.device) -> Loaded:
    """Loads a model and its tokenizer.

    Args:
        path: a checkpoint or a folder.
        tokenizer: ``"bytes"``, or a name or folder for ``AutoTokenizer``; None for the tokenizer of the model.
        module: the class of the trained module, as in :func:`lightning_lowbit.export.trained_model.read`.
        device: where it computes.

    Raises:
        FileNotFoundError: there is nothing at the path.
        ValueError: it is neither, it is no language model, or its tokenizer or a package is missing.
    """
    if not path.exists():
        raise FileNotFoundError(f"There is no {path}. Give {KINDS}.")
    if path.is_dir() and (path / "config.json").exists():
        return _load_folder(path, tokenizer, device)
    check_whole(path)
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is neither a checkpoint nor a folder of Hugging Face. Give {KINDS}.")
    return _load_checkpoint(path, tokenizer, module, device)


def _load_checkpoint(path: Path, tokenizer: str | None, module: str | None, device: torch.device) -> Loaded:
    original = read(path, module, in_few_bits=False)
    model: Any = original.model
    if not (hasattr(model, "can_generate") and model.can_generate()) or model.config.is_encoder_decoder:
        raise ValueError(
            f"{path} holds a {type(model).__name__}, which gives no logits of a next token. The tasks of the "
            "harness take a causal language model of transformers, or a module that holds one."
        )
    trained = original.facts["tokenizer"]
    if tokenizer is None and trained is None:
        raise ValueError(f"{path} does not tell its tokenizer. Give --tokenizer bytes, or a name or folder of another.")
    loaded = fitting_tokenizer(tokenizer or trained, model)
    # The recipes' data has no special tokens around a text; a separator stands between texts.
    ends = (loaded.eos_token_id, loaded.sep_token_id, loaded.bos_token_id)
    separator = next((end for end in ends if end is not None), None)
    as_trained = {"add_bos_token": False, "prefix_token_id": separator} if trained is not None else {}
    about = "as trained until step {step}: {casts}, phase {phase}".format_map(original.facts)
    return Loaded(model.to(device), loaded, about, original.facts, as_trained)


def _load_folder(folder: Path, tokenizer: str | None, device: torch.device) -> Loaded:
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    config = read_json(folder / "config.json")
    classes = config.get("architectures") or []
    if not isinstance(classes, list):
        raise ValueError(f"{folder}/config.json has architectures {classes!r}, which is no list of names.")
    if classes and not {*classes} & {*CAUSAL.values()}:
        raise ValueError(
            f"{folder} holds a {classes[0]}, which gives no logits of a next token. The tasks of the harness take a "
            "causal language model of transformers."
        )
    quantization = config.get("quantization_config") or {}
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    _check_method(folder, method)
    try:  # some formats load on their device alone
        place = device if device.type != "cpu" else None
        model = pretrained(AutoModelForCausalLM, folder, dtype="auto", device_map=place)
    except ImportError as error:
        raise ValueError(f"{folder} takes a package to load: {first_line(error)}.") from error
    loaded = fitting_tokenizer(tokenizer or str(folder), model)
    dtype = str(model.dtype).removeprefix("torch.")
    about = f"in {dtype}, {f'quantized by {method}' if method else 'not quantized'}"
    return Loaded(model, loaded, about, {"dtype": dtype, "quantization": method})


def _check_method(folder: Path, method: str | None) -> None:
    """Refuses a method that ``transformers`` would ignore with a warning."""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as METHODS

    if method is not None and method not in METHODS:
        raise ValueError(
            f"{folder} is quantized by {method!r}, which transformers does not load. Evaluate it in the engine that it "
            f"was written for: lm_eval --model vllm --model_args pretrained={folder}."
        )
    if method == "compressed-tensors" and find_spec("compressed_tensors") is None:
        raise ValueError(f"{folder} takes a package to load: {install('compressed-tensors')}.")
