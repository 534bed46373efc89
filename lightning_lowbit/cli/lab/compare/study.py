"""The rows that ``lowbit compare`` compares: named configurations with seeds.

They are the product of ``--vary`` and ``--lr``, or are listed in a file, a study; ``docs/guides/comparing.md`` has an
example with all its entries.
"""

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser, Namespace

from lightning_lowbit.checks import choose
from lightning_lowbit.cli.configs import (
    as_list,
    check_effects,
    combined_name,
    find_config,
    merge,
    merge_all,
    read_config,
)
from lightning_lowbit.cli.lab.compare.claims import Effect, read_effects
from lightning_lowbit.cli.mistakes import explain

_CONFIGS = str | dict[str, Any] | list[str | dict[str, Any]]


@dataclass(frozen=True)
class Row:
    """A row of the table: one configuration, run with each seed."""

    name: str
    config: dict[str, Any]
    seeds: Sequence[int]


@dataclass(frozen=True)
class Study:
    """The rows to compare; gaps are relative to ``baseline`` or the first row, and ``name`` is the file's."""

    rows: Sequence[Row]
    baseline: str | None = None
    name: str | None = None
    effects: Sequence[Effect] = ()


def product(base: Sequence[str], vary: Sequence[list[str]], rates: Sequence[str], seeds: Sequence[int]) -> list[Row]:
    distinct("learning rate", [str(_number(rate)) for rate in rates])
    rows = []
    for choice in itertools.product(*vary):
        overlays = [name for item in choice for name in item.split("+") if name != "none"]
        check_effects(overlays)
        name, config = combined_name(overlays) or "base", merge_all([*base, *overlays])
        named = [(f"{name},lr={rate}", _with_rate(config, rate)) for rate in rates] or [(name, config)]
        rows += [Row(*pair, seeds) for pair in named]
    return rows


def read_study(name: str, seeds: Sequence[int] | None = None) -> Study:
    path = find_config(name, "--study")
    study = _parse(path)
    for row in study.more_seeds:
        choose(f"row in more_seeds of {path}", row, study.rows)
    rows = []
    for row, changes in study.rows.items():
        if not isinstance(row, str) or row != Path(row).name:
            raise ValueError(f"{path}: the name of a row is text, and that of a folder; got {row!r}.")
        config = merge_all([*as_list(study.config), *as_list(changes)])
        row_seeds = [*study.seeds, *study.more_seeds.get(row, [])] if seeds is None else seeds
        rows.append(Row(row, config, row_seeds))
    names = [row.name for row in rows]
    baseline = study.baseline if study.baseline in names else next(iter(names), "")
    effects = read_effects(study.effects, names, baseline, str(path))
    return Study(rows, study.baseline, path.stem, effects)


def _parse(path: Path) -> Namespace:
    content = read_config(path)
    if "rows" not in content:
        raise ValueError(f"{path} is no study, since it has no rows: use `lowbit fit --config` or `compare --config`.")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", type=_CONFIGS, required=True)
    parser.add_argument("--rows", type=dict[str, _CONFIGS])
    parser.add_argument("--baseline", type=str | None)
    parser.add_argument("--seeds", type=list[int], default=[0])
    parser.add_argument("--more_seeds", type=dict[str, list[int]], default={})
    parser.add_argument("--effects", type=Any, default={})
    try:
        study = parser.parse_object(copy.deepcopy(content))
    except ArgumentError as error:
        raise ValueError(f"{path}: {explain(error)}") from None
    study.rows = content["rows"]  # the parser makes objects of mappings with a class_path
    study.effects = content.get("effects", {})
    return study


def _with_rate(config: dict[str, Any], rate: str) -> dict[str, Any]:
    try:
        config["model"]["init_args"]["optimizer"]["class_path"]
    except (KeyError, TypeError):
        raise ValueError("--lr needs a recipe that names its optimizer in model.init_args.optimizer.") from None
    changes = {"model": {"init_args": {"optimizer": {"init_args": {"lr": _number(rate)}}}}}
    return merge(config, changes)


def _number(rate: str) -> float:
    try:
        return float(rate)
    except ValueError:
        raise ValueError(f"--lr takes numbers such as 1e-3,3e-4; got {rate!r}.") from None


def distinct(kind: str, names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"The study has the {kind} {name!r} twice: their runs would share a folder. Leave one out."
            )
