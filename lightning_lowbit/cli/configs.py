"""Recipes by name, and several configurations put together into one.

Mappings merge key by key, lists of callbacks one after the other, and everything else by the last word. A null at the
head of an overlay's callbacks drops those before it. Fields of casts change the preset that is named before. Where an
overlay names another class, the arguments that the new class takes as well stay: the learning rate of a recipe's
optimizer holds for the one that takes its place.
"""

import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from lightning_lowbit.checks import nearest
from lightning_lowbit.cli.lists import options_with_lists, with_lists

# The folders of configurations that go on top of a recipe, and of those that run one many times.
OVERLAY, STUDY = "overlays", "studies"

_NEEDS_NO_RECIPE = r"--(model|model\.class_path|print_config|help|[\w.]+\.help)(=|$)"


def recipes() -> dict[str, Path]:
    """The configurations that come with the package, by name."""
    found = Path(str(files("lightning_lowbit.recipes")))
    return {path.stem: path for path in sorted(found.rglob("*.yaml"), key=lambda path: path.stem)}


def headline(path: Path) -> str:
    """The first line of a configuration, which says what it is for."""
    return path.read_text().splitlines()[0].lstrip("# ")


def kind(path: Path) -> str:
    """What a configuration of this package is, by its folder: ``OVERLAY``, ``STUDY``, or empty for a recipe."""
    return path.parent.name if path.parent.name in (OVERLAY, STUDY) else ""


def find_config(name: str, option: str = "--config") -> Path:
    """The file of an option: a path, or the name of a recipe, overlay or study of this package (also as presets are
    written, with hyphens).

    Raises:
        FileNotFoundError: there is neither.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return path
    if not name:
        raise ValueError("--config needs the name of a recipe or a file, and --study of a study; see `lowbit ls`.")
    known = recipes()
    if name.replace("-", "_") not in known:
        raise FileNotFoundError(
            f"{option} {name}: no such file, and no recipe, overlay or study of this name."
            f"{nearest(name.replace('-', '_'), known, most=4)} `lowbit ls` lists them."
        )
    return known[name.replace("-", "_")]


def merge(base: Any, overlay: Any, key: str = "") -> Any:
    """Puts one configuration on top of another."""
    if key == "callbacks" and isinstance(overlay, list) and overlay[:1] == [None]:
        return overlay[1:]
    if key == "callbacks" and base and overlay:
        # One that is there already, with the same arguments, is the same: Lightning refuses most callbacks twice.
        return as_list(base) + [callback for callback in as_list(overlay) if callback not in as_list(base)]
    if key == "plugins" and isinstance(base, list) and isinstance(overlay, Mapping):
        if len(base) != 1:
            raise ValueError(
                f"An overlay changes the one plugin of a recipe, but trainer.plugins lists {len(base)} of them. Write "
                "the whole list in the overlay."
            )
        base = base[0]
    if not isinstance(overlay, Mapping):
        return overlay
    if key == "casts" and _is_whole(overlay):  # six casts in full: nothing is left of those before
        return overlay
    if key == "casts" and isinstance(base, str):
        base = {"preset": base}
    base = base if isinstance(base, Mapping) else {}
    if base and "class_path" in overlay and overlay["class_path"] != base.get("class_path"):
        from lightning_lowbit.cli.mistakes import arguments_of

        taken = arguments_of(overlay["class_path"])  # None: the parser will say what is wrong with it
        kept = (base.get("init_args") or {}).items()
        base = {"init_args": {name: value for name, value in kept if taken is None or name in taken}}
        if not base["init_args"]:
            return overlay
    return {**base, **{name: merge(base.get(name), value, name) for name, value in overlay.items()}}


def _is_whole(casts: Mapping[str, Any]) -> bool:
    from lightning_lowbit.nn.casts import OPERANDS  # and with it torch, for which a list of recipes does not wait

    return set(OPERANDS) <= set(casts)


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def read_config(path: Path) -> dict[str, Any]:
    """A YAML file as a mapping.

    Raises:
        ValueError: it is not YAML, or no mapping.
    """
    try:
        config = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}. Mend it there.") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold a mapping such as 'trainer: {{max_steps: 100}}'; got {config!r}.")
    return config


def merge_all(configs: Sequence[str | Mapping[str, Any]]) -> dict[str, Any]:
    """Some configurations, each on top of those before it: names, paths, or what would stand in a file.

    A run that says nothing of its folder gets ``runs/<names>``, so that each combination has one of its own.

    Raises:
        ValueError: one of them is a study, or no mapping.
        FileNotFoundError: there is no such file.
    """
    config: Any = {}
    for each in configs:
        config = merge(config, _read(each) if isinstance(each, str) else each)
    if config.get("trainer") is None:
        config["trainer"] = {}
    if isinstance(trainer := config["trainer"], dict):
        names = [each for each in configs if isinstance(each, str)]
        trainer.setdefault("default_root_dir", f"runs/{combined_name(names)}")
    return config


def _read(name: str) -> dict[str, Any]:
    config = read_config(find_config(name))
    if "rows" in config:
        raise ValueError(f"{name} is a study, which is many runs: use `lowbit compare --study {name}`.")
    return config


def combined_name(names: Sequence[str]) -> str:
    """What a combination of configurations is called."""
    return "+".join(find_config(name).stem for name in names)


def split_configs(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The values of all ``--config`` of a command line, and the rest of it."""
    names, rest = [], []
    remaining = iter(arguments)
    for argument in remaining:
        option, equals, value = argument.partition("=")
        if option in ("--config", "-c"):
            names.append(value if equals else next(remaining, ""))
        else:
            rest.append(argument)
    return names, rest


def merge_configs(arguments: Sequence[str], merged: Path) -> list[str]:
    """Replaces all ``--config`` of a command line by a single one, the file ``merged``, which this function writes.

    Raises:
        ValueError: nothing names a model, or as :func:`merge_all`.
    """
    names, rest = split_configs(arguments)
    config = merge_all(names) if names else {}
    model = config.get("model")
    named = isinstance(model, str) or (isinstance(model, Mapping) and "class_path" in model)
    if not named and not any(re.match(_NEEDS_NO_RECIPE, argument) for argument in rest):
        overlays = [name for name in names if kind(find_config(name)) == OVERLAY]
        why = "nothing names a model"
        if overlays:
            why = f"{' and '.join(overlays)} {'change' if overlays[1:] else 'changes'} one, on top of it"
        command = " ".join(["lowbit", *rest[:1], *(f"--config {name}" for name in ["quickstart", *overlays])])
        raise ValueError(f"Give a recipe, e.g. `{command}`: {why}. `lowbit ls` lists recipes.")
    rest = options_with_lists(rest, config)
    if not names:
        return rest
    merged.write_text(yaml.safe_dump(with_lists(config)))
    return [rest[0], "--config", str(merged), *rest[1:]] if rest else ["--config", str(merged)]
