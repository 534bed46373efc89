"""Recipes by name, and merging of configurations.

Mappings merge key by key, lists of callbacks are concatenated; any other value is replaced. A null at the head of an
overlay's callbacks drops earlier callbacks. Fields of casts change the preset of an earlier configuration. If an
overlay names another class, arguments that the new class also takes stay, such as an optimizer's learning rate. For
arguments of classes that take a list, a single item is accepted: ``skip lm_head`` means ``skip: [lm_head]``.
"""

import inspect
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml
from yaml.error import MarkedYAMLError

from lightning_lowbit.checks import nearest
from lightning_lowbit.cli.mistakes import arguments_of, class_at

# Folders of configurations that change a recipe, and of those that run a recipe many times.
OVERLAY, STUDY = "overlays", "studies"

_NEEDS_NO_RECIPE = r"--(model|model\.class_path|print_config|help|[\w.]+\.help)(=|$)"


@cache
def recipes() -> Mapping[str, Path]:
    folder = Path(str(files("lightning_lowbit.recipes")))
    return {path.stem: path for path in sorted(folder.rglob("*.yaml"), key=lambda path: path.stem)}


def headline(path: Path) -> str:
    return path.read_text().splitlines()[0].lstrip("# ")


def needs(path: Path) -> tuple[list[str], str]:
    """Returns packages that the line ``# needs A B, or --option`` of a configuration names, and that option, or ""."""
    match = re.search(r"^# needs ([^,\n]+)(?:, or --([\w.]+))?$", path.read_text(), re.MULTILINE)
    return (match[1].split(), match[2] or "") if match else ([], "")


def kind(path: Path) -> str:
    return path.parent.name if path.parent.name in (OVERLAY, STUDY) else ""


def find_config(name: str, option: str = "--config") -> Path:
    """Finds the file of an option: a path, or a name of this package, in which hyphens stand for underscores."""
    path = Path(name).expanduser()
    if path.is_file():
        return path
    if not name:
        raise ValueError("--config needs the name of a recipe or a file, and --study of a study; see `lowbit ls`.")
    known = recipes()
    if (stem := name.replace("-", "_")) not in known:
        file = f"{name}.yaml"
        hint = f" Did you mean {file!r}?" if Path(file).expanduser().is_file() else nearest(stem, known, most=4)
        raise FileNotFoundError(
            f"{option} {name}: no such file, and no recipe, overlay or study of this name.{hint}"
            " `lowbit ls` lists them."
        )
    return known[stem]


def merge(base: Any, overlay: Any, key: str = "") -> Any:
    if key == "callbacks" and isinstance(overlay, list) and overlay[:1] == [None]:
        return overlay[1:]
    if key == "callbacks" and base and overlay:
        # Without duplicates: Lightning refuses most duplicate callbacks.
        return as_list(base) + [callback for callback in as_list(overlay) if callback not in as_list(base)]
    if key == "plugins" and isinstance(base, list) and isinstance(overlay, Mapping):
        if len(base) != 1:
            rule = "An overlay changes the one plugin of a recipe"
            raise ValueError(f"{rule}, but trainer.plugins lists {len(base)}. Write the whole list in the overlay.")
        base = base[0]
    if not isinstance(overlay, Mapping):
        return overlay
    if key in ("casts", "attention"):
        from lightning_lowbit.nn.casts.traits import OPERANDS  # imports torch, which `lowbit ls` must not

        if set(OPERANDS) <= set(overlay):  # six casts replace all earlier ones
            return overlay
        base = {"preset": base} if isinstance(base, str) else base
    base = base if isinstance(base, Mapping) else {}
    if base and "class_path" in overlay and overlay["class_path"] != base.get("class_path"):
        allowed = arguments_of(overlay["class_path"])  # None for an unknown class, which the parser will report
        items = (base.get("init_args") or {}).items()
        base = {"init_args": {name: value for name, value in items if allowed is None or name in allowed}}
        if not base["init_args"]:
            return overlay
    keys = {name: "casts" if key == "overrides" else name for name in overlay}
    return {**base, **{name: merge(base.get(name), value, keys[name]) for name, value in overlay.items()}}


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _load(text: str) -> Any:
    """Reads YAML; a ``MarkedYAMLError`` for a key that stands in a mapping twice, of which PyYAML takes the last."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)  # ten times as fast, where PyYAML has its library
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _check_keys(node, set())
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _check_keys(node: yaml.Node, passed: set[int]) -> None:
    if isinstance(node, yaml.ScalarNode) or id(node) in passed:  # an alias is the same node again
        return
    passed.add(id(node))
    pairs = node.value if isinstance(node, yaml.MappingNode) else [(None, item) for item in node.value]
    names: set[str] = set()
    for key, value in pairs:
        if isinstance(key, yaml.ScalarNode):
            if key.value in names:
                raise MarkedYAMLError(None, None, f"found the key {key.value!r} twice", key.start_mark)
            names.add(key.value)
        _check_keys(value, passed)


def read_config(path: Path) -> dict[str, Any]:
    try:
        config = _load(path.read_text())
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no text: give a YAML file.") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}. Mend it there.") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold a mapping such as 'trainer: {{max_steps: 100}}'; got {config!r}.")
    return config


def merge_all(configs: Sequence[str | Mapping[str, Any]]) -> dict[str, Any]:
    """Merges configurations in order: names, paths, or contents of files; runs go to ``runs/<names>`` by default."""
    config: Any = {}
    contents = [read_recipe(item) if isinstance(item, str) else item for item in configs]
    check_order(configs, contents)
    for content in contents:
        config = merge(config, content)
    if config.get("trainer") is None:
        config["trainer"] = {}
    if isinstance(trainer := config["trainer"], dict):
        names = [item for item in configs if isinstance(item, str)]
        trainer.setdefault("default_root_dir", f"runs/{combined_name(names)}")
    return config


def read_recipe(name: str) -> dict[str, Any]:
    config = read_config(find_config(name))
    if "rows" in config:
        raise ValueError(f"{name} is a study, which is many runs: use `lowbit compare --study {name}`.")
    return config


def combined_name(names: Sequence[str]) -> str:
    return "+".join(find_config(name).stem for name in names)


def split_configs(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    names, rest = [], []
    remaining = iter(arguments)
    for argument in remaining:
        option, equals, value = argument.partition("=")
        if option in ("--config", "-c"):
            names.append(value if equals else next(remaining, ""))
        else:
            rest.append(argument)
    return names, rest


def _names_model(config: Mapping[str, Any]) -> bool:
    model = config.get("model")
    return isinstance(model, str) or (isinstance(model, Mapping) and "class_path" in model)


def check_order(configs: Sequence[str | Mapping[str, Any]], contents: Sequence[Mapping[str, Any]]) -> None:
    """Raises a ``ValueError`` for an overlay before the recipe, which would undo what the overlay changes."""
    first = next((place for place, content in enumerate(contents) if _names_model(content)), 0)
    for name in configs[:first]:
        if isinstance(name, str) and kind(find_config(name)) == OVERLAY:
            raise ValueError(f"The overlay {name} stands before the recipe {configs[first]}: give it after the recipe.")


def check_effects(names: Sequence[str]) -> None:
    """Raises a ``ValueError`` for an overlay of which later ones leave nothing, such as fields of casts before a
    preset."""
    merged: Any = {}
    overlays: dict[str, Any] = {}
    for name in names:
        content = read_recipe(name)
        merged = merge(merged, content)
        for former, changes in overlays.items():
            if not _is_left(changes, merged):
                raise ValueError(
                    f"The overlay {name} replaces all that the overlay {former} before it changes: leave one of them "
                    f"out, or give {former} after {name}."
                )
        if kind(find_config(name)) == OVERLAY:
            overlays[name] = content


def _is_left(changes: Any, merged: Any, key: str = "") -> bool:
    """Tells whether a configuration has any of the changes; a class with arguments is told by these."""
    if key == "callbacks":
        return any(item in as_list(merged) for item in as_list(changes) if item is not None)
    if not isinstance(changes, Mapping):
        return bool(changes == (merged.get("preset") if key == "casts" and isinstance(merged, Mapping) else merged))
    names = changes.keys() - ({"class_path"} if "init_args" in changes else ())
    return isinstance(merged, Mapping) and any(_is_left(changes[name], merged.get(name), name) for name in names)


def check_recipe(names: Sequence[str], configs: Sequence[Mapping[str, Any]], rest: Sequence[str]) -> None:
    """Raises a ``ValueError`` if neither configurations (the contents of ``names``, or these merged) nor the other
    arguments, a command first, name a model."""
    if any(map(_names_model, configs)) or any(re.match(_NEEDS_NO_RECIPE, argument) for argument in rest):
        return
    overlays = [name for name in names if kind(find_config(name)) == OVERLAY]
    why = "nothing names a model"
    if overlays:
        why = f"{' and '.join(overlays)} {'change' if overlays[1:] else 'changes'} one, on top of it"
    command = " ".join(["lowbit", *rest[:1], *(f"--config {name}" for name in ["quickstart", *overlays])])
    raise ValueError(f"Give a recipe, e.g. `{command}`: {why}. `lowbit ls` lists recipes.")


def merge_configs(arguments: Sequence[str], merged: Path) -> list[str]:
    names, rest = split_configs(arguments)
    config = merge_all(names) if names else {}
    check_effects(names)
    check_recipe(names, [config], rest)
    rest = options_with_lists(rest, config)
    if not names:
        return rest
    merged.write_text(yaml.safe_dump(with_lists(config), sort_keys=False))
    return [rest[0], "--config", str(merged), *rest[1:]] if rest else ["--config", str(merged)]


def with_lists(config: Any) -> Any:
    if isinstance(config, list):
        return [with_lists(item) for item in config]
    if not isinstance(config, Mapping):
        return config
    result = {key: with_lists(value) for key, value in config.items()}
    if isinstance(arguments := result.get("init_args"), dict):
        cls = class_at(result.get("class_path"))
        result["init_args"] = {key: [value] if _is_item(value, cls, key) else value for key, value in arguments.items()}
    return result


def options_with_lists(arguments: Sequence[str], config: Mapping[str, Any]) -> list[str]:
    """Does the same as :func:`with_lists` for a command line whose options change ``config``."""
    result = list(arguments)
    named: dict[str, str] = {}  # class paths by option
    for i, argument in enumerate(arguments):
        option, equals, value = argument.partition("=")
        if not option.startswith("--") or (not equals and (i + 1 == len(arguments) or result[i + 1].startswith("--"))):
            continue
        value = value if equals else result[i + 1]
        key = option.removeprefix("--").removesuffix("+").removesuffix(".class_path")
        named[key] = value
        owner, _, name = key.rpartition(".")
        owner = owner.removesuffix(".init_args")
        try:
            item = yaml.safe_load(value)
        except yaml.YAMLError:
            item = value
        if not option.endswith("+") and _is_item(item, class_at(named.get(owner) or _class_path(config, owner)), name):
            value = yaml.safe_dump([item], default_flow_style=True, width=10**9).strip()
            result[i if equals else i + 1] = f"{option}={value}" if equals else value
    return result


def _class_path(config: Any, path: str) -> Any:
    for part in path.split("."):
        within = config.get("init_args") if isinstance(config, Mapping) and part not in config else config
        config = within.get(part) if isinstance(within, Mapping) else None
        config = config[-1] if isinstance(config, list) and config else config
    return config.get("class_path") if isinstance(config, Mapping) else config


def _is_item(value: Any, cls: Any, argument: str) -> bool:
    if cls is None or not isinstance(value, str | int | float):
        return False
    try:
        owner = next(base for base in cls.__mro__ if argument in inspect.signature(base.__init__).parameters)
        hint = get_type_hints(owner.__init__)[argument]
    except (StopIteration, NameError, KeyError, ValueError):  # no such argument, or no type
        return False
    possible = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return not {Any, str, int, float} & set(possible) and any(
        get_origin(kind) in (list, Iterable, Sequence, Collection) for kind in possible
    )
