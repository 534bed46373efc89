"""The names of a model's layers, of which a module that is used twice has several."""

from collections.abc import Iterable, Iterator

from torch import nn

from lightning_lowbit._torch import children_of
from lightning_lowbit.nn.layers.composite import PARTS


class Names(list[str]):
    """Names of a model's layers, each once. ``others`` has a layer's further names; patterns match any of them."""

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        super().__init__(names)
        paths: dict[int, list[str]] = {}
        for path, module in _paths(model):
            paths.setdefault(id(module), []).append(path)
        self.others: dict[str, list[str]] = {}
        for name in self:
            owner, inside, product_name = name.rpartition(f"{PARTS}.")
            path, ending = (owner.rstrip("."), f".{inside}{product_name}") if inside else (name, "")
            others = [other for other in paths[id(model.get_submodule(path))] if other != path]
            if others:
                self.others[name] = [f"{other}{ending}".lstrip(".") for other in others]


def _paths(module: nn.Module, path: str = "", around: tuple[nn.Module, ...] = ()) -> Iterator[tuple[str, nn.Module]]:
    """Yields all modules by all of their names; a module within itself has none there."""
    yield path, module
    for name, child in children_of(module).items():
        if child is not None and child is not module and child not in around:
            yield from _paths(child, f"{path}.{name}".lstrip("."), (*around, module))
