"""The command ``lowbit evaluate`` runs tasks of lm-evaluation-harness on a trained checkpoint or an exported folder."""

import argparse
import json
import logging
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from lightning_lowbit.checks import nearest, some
from lightning_lowbit.cli.evaluate.options import KINDS
from lightning_lowbit.cli.options import check_whole, existing
from lightning_lowbit.export.folder import pretrained
from lightning_lowbit.export.reading.files import first_line, read_json
from lightning_lowbit.export.tokenizer import fitting_tokenizer
from lightning_lowbit.export.trained_model import read
from lightning_lowbit.packages import install, install_extra
from lightning_lowbit.precision.checkpoints.files import check_no_folder_of

_NO_LOGITS = (
    "{} holds a {}, which gives no logits of a next token. The tasks of the harness take a causal language model of "
    "transformers, or in a checkpoint a module that holds one, with all quantized layers in it."
)


@dataclass(frozen=True)
class Loaded:
    """A causal language model of ``transformers`` on its device, and its tokenizer."""

    model: Any
    tokenizer: Any
    about: str  # its precision, in a line
    facts: Mapping[str, Any]  # entries about the model in the results
    as_trained: Mapping[str, Any] = field(default_factory=dict)  # what makes the harness tokenize as the training did


def evaluate(options: argparse.Namespace) -> None:
    path, device = options.model, _device(options.device)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    try:
        from lm_eval import simple_evaluate
        from lm_eval.utils import handle_non_serializable, make_table

        import_module("lm_eval.models.huggingface")  # takes packages of its own
    except ImportError as error:
        raise ValueError(
            f"lowbit evaluate takes lm-evaluation-harness ({error}): {install_extra('lm_eval')}."
        ) from error
    loaded = load(path, options.tokenizer, options.module, device)
    tasks, manager = find_tasks(options.tasks, options.include_path)
    print(f"{path}: {loaded.about}")
    results: dict[str, Any] = simple_evaluate(
        harness_model(loaded, options.batch_size, options.max_length),
        tasks=tasks,
        num_fewshot=options.num_fewshot,
        limit=options.limit,
        batch_size=options.batch_size,
        device=str(device),
        log_samples=False,
        task_manager=manager,
    )
    print("\n".join(make_table(results, which) for which in ("results", "groups") if which in results))
    shots = options.num_fewshot
    if fixed := [name for name, number in results["n-shot"].items() if shots is not None and number != shots]:
        print(f"Without --num_fewshot {shots}: {some(fixed)}, which fix their number of examples.")
    results = {"model": {"path": str(path), **loaded.facts}, **results}
    options.output.write_text(json.dumps(results, indent=2, default=handle_non_serializable, ensure_ascii=False))
    print(f"Results: {options.output}")


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise ValueError(f"--device {name} cannot be used here ({reason}). Give cpu, or leave it out.") from error
    return device


def find_tasks(names: Sequence[str], include: Sequence[str]) -> tuple[list[str], Any]:
    """Finds the tasks, groups and tags of ``--tasks`` (else a ``ValueError``), and the ``TaskManager`` that knows them,
    with those in files and folders of the user, which must exist."""
    from lm_eval.tasks import TaskManager

    wanted = [name.strip() for text in names for name in text.split(",") if name.strip()]
    if not wanted:
        raise ValueError(f"--tasks takes names of tasks, such as hellaswag,arc_easy; got {','.join(names)!r}.")
    paths = [existing(name, "a folder of tasks, or a task's file, as --include_path") for name in include]
    folders = [path if path.is_dir() else path.parent for path in paths]
    manager = TaskManager(include_path=folders, include_defaults=False)
    # The harness's own 15,000 take seconds to read; groups may refer to them.
    if not all(_matches(name, manager.all_subtasks) for name in wanted):
        manager = TaskManager(include_path=folders)
    tasks = {name: _matches(name, manager.all_tasks) for name in wanted}
    if unknown := [name for name, matches in tasks.items() if not matches]:
        where = f" {some(include)} has none of this name." if include else " --include_path names a folder of your own."
        hint = nearest(unknown[0], manager.all_tasks, 3)
        raise ValueError(f"The harness has no task {unknown[0]!r}.{hint}{where} `lm_eval ls tasks` lists all.")
    return list(dict.fromkeys(name for matches in tasks.values() for name in matches)), manager


def _matches(name: str, names: Sequence[str]) -> list[str]:
    return [other for other in names if fnmatchcase(other, name)] if "*" in name else [name] * (name in names)


def harness_model(loaded: Loaded, batch_size: int | str = 1, max_length: int | None = None) -> Any:
    """Wraps a loaded model for the harness (``HFLM``), with the logarithms of probabilities in float32."""
    from lm_eval.models.huggingface import HFLM

    positions = getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None)
    if max_length is not None and positions is not None and max_length > positions:
        raise ValueError(
            f"--max_length {max_length} is more than the {positions} positions of the model (max_position_embeddings): "
            "it has learned nothing beyond. Give fewer tokens, or leave it out."
        )
    logger = logging.getLogger(HFLM.__module__)
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns that the model is loaded already
    try:
        return HFLM(
            loaded.model,
            backend="causal",
            tokenizer=loaded.tokenizer,
            batch_size=batch_size,
            max_length=max_length,
            softmax_dtype="float32",
            **loaded.as_trained,
        )
    finally:
        logger.setLevel(level)


def load(path: Path, tokenizer: str | None, module: str | None, device: torch.device) -> Loaded:
    """Loads a model and its tokenizer.

    Args:
        path: a checkpoint or a folder.
        tokenizer: ``"bytes"``, or a name or folder for ``AutoTokenizer``; None for the tokenizer of the model.
        module: the class of the trained module, as in :func:`lightning_lowbit.export.trained_model.read`.
        device: where it computes.

    Raises:
        ValueError: the path is neither, it is no language model, or its tokenizer or a package is missing.
    """
    if path.is_dir() and (path / "config.json").exists():
        return _load_folder(path, tokenizer, device)
    check_whole(path)
    check_no_folder_of(path)
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is neither a checkpoint nor a folder of Hugging Face. Give {KINDS}.")
    return _load_checkpoint(path, tokenizer, module, device)


def _load_checkpoint(path: Path, tokenizer: str | None, module: str | None, device: torch.device) -> Loaded:
    original = read(path, module, in_few_bits=False)
    model: Any = original.model
    if not (hasattr(model, "can_generate") and model.can_generate()) or model.config.is_encoder_decoder:
        raise ValueError(_NO_LOGITS.format(path, type(model).__name__))
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
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as METHODS

    config = read_json(folder / "config.json")
    classes = config.get("architectures") or []
    if not isinstance(classes, list):
        raise ValueError(f"{folder}/config.json has architectures {classes!r}, which is no list of names.")
    if classes and not {*classes} & {*CAUSAL.values()}:
        raise ValueError(_NO_LOGITS.format(folder, classes[0]))
    quantization = config.get("quantization_config") or {}
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    if method is not None and method not in METHODS:  # transformers would ignore it with a warning
        raise ValueError(
            f"{folder} is quantized by {method!r}, which transformers does not load. Evaluate it in the engine that it "
            f"was written for: lm_eval --model vllm --model_args pretrained={folder}."
        )
    if method == "compressed-tensors" and find_spec("compressed_tensors") is None:
        raise ValueError(f"{folder} takes a package to load: {install('compressed-tensors')}.")
    try:  # some formats load on their device alone
        place = device if device.type != "cpu" else None
        model = pretrained(AutoModelForCausalLM, folder, dtype="auto", device_map=place)
    except ImportError as error:
        raise ValueError(f"{folder} takes a package to load: {first_line(error)}.") from error
    loaded = fitting_tokenizer(tokenizer or str(folder), model)
    dtype = str(model.dtype).removeprefix("torch.")
    about = f"in {dtype}, {f'quantized by {method}' if method else 'not quantized'}"
    return Loaded(model, loaded, about, {"dtype": dtype, "quantization": method})
