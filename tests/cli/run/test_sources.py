"""What the command reads in sources agrees with the classes that Python makes of them."""

import inspect
import re
from pathlib import Path

import lightning.pytorch.callbacks
import pytest
import torch

import lightning_lowbit
from lightning_lowbit import cli
from lightning_lowbit.cli import options
from lightning_lowbit.cli.configs import recipes
from lightning_lowbit.cli.mistakes import class_at
from lightning_lowbit.cli.sources import class_arguments, missing_class
from tests.tables import each

IN_RECIPES = {path for file in recipes().values() for path in re.findall(r"class_path: *([\w.]+)", file.read_text())}
OTHERS = {
    f"{module.__name__}.{name}"
    for module in (lightning_lowbit, torch.optim, torch.optim.lr_scheduler, torch.nn, lightning.pytorch.callbacks)
    for name in getattr(module, "__all__", dir(module))
}


def named(function):
    """Names of arguments that may be given by name."""
    parameters = inspect.signature(function).parameters.values()
    return {item.name for item in parameters if item.kind not in (item.VAR_POSITIONAL, item.VAR_KEYWORD)} - {"self"}


def test_arguments_are_those_that_classes_take():
    classes = {path: class_at(path) for path in sorted(IN_RECIPES | OTHERS)}
    read = {path: class_arguments(path) for path, cls in classes.items() if cls is not None}
    known = {path: names for path, names in read.items() if names is not None}
    assert len(known) > 250 and len(known) > 0.8 * len(read)
    for path, names in known.items():
        possible = set().union(*(named(base.__init__) for base in classes[path].__mro__[:-1]))
        assert named(classes[path].__init__) <= names.keys() <= possible, path
    ours = {path for path in IN_RECIPES if path.startswith("lightning_lowbit")}
    assert ours <= known.keys(), "a class of this package in a recipe is not read whole"
    missing = {path for path in IN_RECIPES | OTHERS if missing_class(path) is not None}
    assert not missing, "they are there"


def test_packages_need_no_init_file(tmp_path, monkeypatch):
    folder = tmp_path / "space" / "inner"
    folder.mkdir(parents=True)
    (folder / "mine.py").write_text("class Mine:\n    def __init__(self, size): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert class_arguments("space.inner.mine.Mine").keys() == {"size"}
    assert class_arguments("space.inner.other.Mine") is class_arguments("space.inner.mine.deeper.Mine") is None


SOURCE = """
import dataclasses
import functools
from torch.optim import SGD
from circle import Round

class Plain:
    def __init__(self, size): ...
class Passing(Plain):
    def __init__(self, depth, **kwargs):
        super().__init__(**kwargs)
class Keeping(Plain):
    def __init__(self, depth, **kwargs):
        self.kwargs = kwargs
class Changing(Plain):
    def __init__(self, depth, **kwargs):
        kwargs.pop("other")
        super().__init__(**kwargs)
class Inheriting(Passing): ...
class Unknown(Nowhere): ...
class Rounder(Round): ...
class Optimizer(SGD):
    def __init__(self, *, more=1, **kwargs):
        super().__init__(**kwargs)
@dataclasses.dataclass
class Fields:
    size: int
class Decorated:
    @functools.wraps(print)
    def __init__(self, size): ...
class Later:
    __init__ = Plain.__init__
Other = Plain
"""


@each(
    "name, arguments",
    [
        ("Plain", {"size"}),
        ("Passing", {"depth", "size"}),
        ("Inheriting", {"depth", "size"}),
        ("Other", {"size"}),
        ("Optimizer", {"more", *named(torch.optim.SGD.__init__)}),
        *((name, None) for name in ("Keeping", "Changing", "Unknown", "Rounder", "Fields", "Decorated", "Later", "No")),
    ],
)
def test_what_a_source_leaves_open_is_left_to_the_parser(name, arguments, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "mine_of_sources.py").write_text(SOURCE)
    (tmp_path / "circle.py").write_text("from mine_of_sources import Rounder as Round")
    parameters = class_arguments(f"mine_of_sources.{name}")
    assert (None if parameters is None else parameters.keys()) == arguments
    assert missing_class(f"mine_of_sources.{name}") is None


@each(
    "arguments, line",
    [
        (["--model.networ=x"], "There is no option --model.networ. Did you mean 'network'? CausalLM takes config, ga"),
        (["--model.optimizer.lrr=1"], "--model.optimizer.lrr. Did you mean 'lr'? StableSPAM takes betas"),
        (["--model.optimizer=torch.optim.SGD", "--model.optimizer.gamma1=1"], "SGD takes dampening"),
        (["--model.init_args={networ: x}"], "There is no option --model.init_args.networ."),
        (["--trainer.callbacks.save_topk=1"], "Did you mean 'save_top_k'? CrashSafeCheckpoint takes"),
        (["--model.class_path=lightning_lowbit.recipes.models.CausalM"], "has no CausalM. Did you mean 'CausalLM'?"),
        (["--config=adamw", "--model.optimizer.gamma1=1"], "AdamW takes amsgrad"),
        (["--config=mine.yaml"], "--model.init_args.networ in mine.yaml. Did you mean 'network'?"),
        (["--config=bare.yaml"], "--data.path in bare.yaml: arguments of a class stand in its init_args. Write data:"),
    ],
)
def test_a_name_that_a_class_does_not_take_is_answered_with_those_it_takes(arguments, line, capsys):
    Path("mine.yaml").write_text("model: {init_args: {networ: x}}")
    Path("bare.yaml").write_text("data: {path: x}")
    assert cli.main(["fit", "--config=quickstart", *arguments]) == 2
    assert line in capsys.readouterr().err


def test_arguments_may_come_before_the_class_that_takes_them():
    Path("size.yaml").write_text("model: {init_args: {beta: 0.5}}")
    Path("other.yaml").write_text("model: {class_path: lightning_lowbit.recipes.tuning.preferences.PreferenceLM}")
    options.check_run("fit", ["--config=quickstart", "--config=size.yaml", "--config=other.yaml"])
    with pytest.raises(ValueError, match="There is no option --model.init_args.beta in size.yaml. CausalLM takes"):
        options.check_run("fit", ["--config=quickstart", "--config=size.yaml"])
