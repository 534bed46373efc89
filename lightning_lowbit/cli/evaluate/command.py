"""The command ``lowbit evaluate`` runs tasks of lm-evaluation-harness on a trained checkpoint or an exported folder."""

import argparse
import json
import logging
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Any

import torch

from lightning_lowbit.checks import nearest, some
from lightning_lowbit.cli.evaluate.models import Loaded, load
from lightning_lowbit.cli.options import existing
from lightning_lowbit.packages import install_extra


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
    _report_fixed_shots(results["n-shot"], options.num_fewshot)
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
    """Finds the tasks, groups and tags of ``--tasks``, and the harness's ``TaskManager`` that knows them.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: there is no such task.
    """
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


def _report_fixed_shots(shots: Mapping[str, int], wanted: int | None) -> None:
    fixed = [name for name, number in shots.items() if wanted is not None and number != wanted]
    if fixed:
        print(f"Without --num_fewshot {wanted}: {some(fixed)}, which fix their number of examples.")
