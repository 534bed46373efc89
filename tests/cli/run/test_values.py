"""Values that the command refuses from the sources alone are those that the parser of a run refuses."""

from functools import partial
from inspect import signature
from pathlib import Path
from typing import get_type_hints

import pytest
from jsonargparse import ArgumentError, ArgumentParser
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_lowbit import CrashSafeCheckpoint, FP4Precision, FP8Precision, LowBitPrecision, StableSPAM, cli, nn
from lightning_lowbit._lightning import Callback, LightningDataModule, LightningModule, Trainer
from lightning_lowbit.cli import options
from lightning_lowbit.cli.arguments import NAMES, PRESETS, SHORT, check_value
from lightning_lowbit.cli.mistakes import class_at
from lightning_lowbit.cli.sources import PACKAGES, class_arguments, class_names, table_keys
from lightning_lowbit.recipes.data import TextDataModule
from lightning_lowbit.recipes.models import CausalLM
from tests.tables import each

NUMBERS = ["3", "-1", "two", "1e3", "3.0", "true", "'3'", "[3]", "1_000", "0x10", "010", ".5", "5.", "1:30", ".inf"]
FLAGS = ["true", "FALSE", "no", "on", "y", "1", "0", "maybe", "'true'", "none"]
WORDS = ["16", "bf16", "bf17", "warn", "auto", "link", "3", "null"]
RESET = "{class_path: lightning_lowbit.OsciReset, init_args: {every: x}}"
LISTED = f"trainer: {{callbacks: [{RESET}]}}"
# Arguments whose annotations tell what they take, by class.
ARGUMENTS = {
    Trainer: {
        **dict.fromkeys(("max_epochs", "num_nodes", "limit_val_batches", "gradient_clip_val"), [*NUMBERS, "null"]),
        **dict.fromkeys(("detect_anomaly", "fast_dev_run", "benchmark"), [*FLAGS, "null", "2"]),
        **dict.fromkeys(("precision", "deterministic", "default_root_dir", "devices"), WORDS),
    },
    CausalLM: {"gather_dtype": WORDS, "pretrained": FLAGS, "seed": NUMBERS, "network": WORDS},
    StableSPAM: {"lr": NUMBERS, "eps": NUMBERS, "gamma1": NUMBERS, "matrices_only": FLAGS},
    TextDataModule: {"batch_size": NUMBERS},
    CrashSafeCheckpoint: {"save_top_k": NUMBERS, "save_last": [*FLAGS, *WORDS]},
    FP4Precision: {"seed": NUMBERS, "exact": FLAGS, "skip": WORDS, "compute_dtype": WORDS},
}


def refused(function, *arguments):
    """Whether a mistake is raised."""
    try:
        function(*arguments)
    except (ValueError, ArgumentError):
        return True
    return False


def path_of(cls):
    return f"{cls.__module__}.{cls.__qualname__}"


def parser_of(cls, name):
    """A parser of one option, as that of a run makes it."""
    owner = next(base for base in cls.__mro__ if name in signature(base.__init__).parameters)
    default = signature(owner.__init__).parameters[name].default
    hint = get_type_hints(owner.__init__)[name]
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=hint | None if default is None else hint, default=default)
    return parser


def test_no_value_is_refused_that_the_parser_accepts():
    early, late = set(), set()
    for cls, arguments in ARGUMENTS.items():
        of_class = class_arguments(path_of(cls)) or options.trainer_arguments()["__init__"]
        for name, values in arguments.items():
            parser = parser_of(cls, name)
            for value in values:
                early |= {f"{name}={value}"} if refused(check_value, name, value, of_class[name]) else set()
                late |= {f"{name}={value}"} if refused(parser.parse_args, [f"--value={value}"]) else set()
    assert early <= late
    assert len(early) > 80 and len(late - early) < 20, "the sources leave more open than they do today"


@each(
    "arguments, line",
    [
        (["--trainer.max_epochs=two"], "--trainer.max_epochs takes a whole number or null; got 'two'. Give a value"),
        (["--trainer.max_steps=1e3"], "--trainer.max_steps takes a whole number; got '1e3'. Write 1000."),
        (["--seed_everything=abc"], "--seed_everything takes a whole number or true or false; got 'abc'. Give a value"),
        (["--data.batch_size=big"], "got 'big'. Give a value such as --data.batch_size 8."),
        (["--model.optimizer.lr=high"], "takes a number; got 'high'. Give a value such as --model.optimizer.lr 0.001."),
        (["--trainer.detect_anomaly=maybe"], "takes true or false; got 'maybe'."),
        (["--model.gather_dtype=bf17"], "one of 'bf16' or null; got 'bf17'. Did you mean 'bf16'?"),
        (["--trainer.detect_anomaly", "--trainer.max_steps=1"], "--trainer.detect_anomaly takes a value, and none"),
        (["--data.batch_size"], "--data.batch_size takes a value, and none follows it."),
        (["--data.batch_size="], "--data.batch_size takes a whole number; got ''."),
        (["--config=listed.yaml"], "--trainer.callbacks.init_args.every in listed.yaml takes a whole number; got 'x'."),
        ([f"--trainer.callbacks=[{RESET}]"], "--trainer.callbacks.init_args.every takes a whole number; got 'x'."),
        (["--config=mine.yaml"], "--trainer.max_steps in mine.yaml takes a whole number; got 'few'."),
        (["--trainer.plugins.casts=nvfp5"], "Unknown preset 'nvfp5'. Did you mean 'nvfp4'?"),
        (["--trainer.plugins.attention=fp7"], "The option is --trainer.plugins.attention."),
        (["--model.scheduler=Nope"], "--model.scheduler takes a class, and there is no Nope."),
        (["--model.scheduler=torch.optim.lr_scheduler.StepLT"], "torch.optim.lr_scheduler has no StepLT. Did you mean"),
        (["--model=CausaLM"], "--model takes a class, and there is no CausaLM. Did you mean 'CausalLM'?"),
        (["--optimizer=AdamW"], "There is no option --optimizer. Did you mean '--model.optimizer'?"),
        (["--config=own.yaml"], "There is no option --lr_scheduler in own.yaml. Did you mean 'model.scheduler'?"),
        (["--config=short.yaml"], "--trainer.callbacks in short.yaml takes a class, and there is no GradNoise. Did"),
        (["--trainer.plugins.class_path=FP4Precison"], "--trainer.plugins takes a class, and there is no FP4Precison."),
        (["--trainer.logger=[{class_path: CSVLoger}]"], "there is no CSVLoger. Did you mean 'CSVLogger'?"),
        (["--trainer.callbacks=[EarlyStopping, EarlyStoping]"], "there is no EarlyStoping. Did you mean 'EarlyStoppi"),
        (["--trainer.callbacks+=EarlyStoping"], "Did you mean 'EarlyStopping'? Give its path"),
        (["--trainer.plugins.backend=nativ"], "Unknown backend 'nativ'. Did you mean 'native'?"),
        (["--trainer.plugins=lightning_lowbit.FP8Precision", "--trainer.plugins.scaling=row_wise"], "Unknown scaling"),
        (["--trainer.plugins.compute_dtype=x"], "Choose one of: 'auto', 'bf16', 'fp16', 'fp32'"),
        (["--config=adamw", "--model.optimizer.fused=fast"], "fused takes true or false or null; got 'fast'"),
    ],
)
def test_a_value_that_an_option_does_not_take_is_answered_with_what_it_takes(arguments, line, capsys):
    Path("mine.yaml").write_text("trainer: {max_steps: few}")
    Path("listed.yaml").write_text(LISTED)
    Path("own.yaml").write_text("lr_scheduler: {class_path: torch.optim.lr_scheduler.StepLR}")
    Path("short.yaml").write_text("trainer: {callbacks: [RunReport, {class_path: GradNoise}]}")
    for command in ("fit", "compare"):
        assert cli.main([command, "--config=quickstart", *arguments]) == 2
        assert line in capsys.readouterr().err


@each(
    "arguments",
    [
        ["--config=few.yaml", "--config=many.yaml"],  # a later file replaces the value
        ["--config=few.yaml", "--trainer.max_steps=3"],
        ["--config=wild.yaml", "--model.optimizer=torch.optim.AdamW"],  # and here the class that takes it
        ["--config=listed.yaml", "--trainer.callbacks.every=2"],
        ["--config=listed.yaml", "--config=none.yaml"],
        ["--trainer.max_steps=number.yaml"],  # a file may hold what is taken
        ["--trainer.plugins.attention=fp8"],
        ["--trainer.callbacks+={class_path: lightning_lowbit.CrashSafeCheckpoint, init_args: {every_n_epochs: null}}"],
        ["--config=plain.yaml", "--trainer.precision=16-mixed"],  # without the plugin of the recipe
        ["--trainer.plugins.compute_dtype=torch.bfloat16"],
        ["--trainer.plugins.casts=mine", "--trainer.callbacks+=mine.Registers"],  # which may add a preset
    ],
)
def test_values_that_do_not_count_are_not_refused(arguments):
    for name, text in {
        "few": "trainer: {max_steps: few}",
        "many": "trainer: {max_steps: 5}",
        "wild": "model: {init_args: {optimizer: {init_args: {gamma1: wild}}}}",
        "listed": LISTED,
        "none": "trainer: {callbacks: [null]}",
        "number": "3",
        "plain": "trainer: {plugins: null}",
    }.items():
        Path(f"{name}.yaml").write_text(text)
    options.check_run("fit", ["--config=quickstart", *arguments])


def test_every_class_with_a_short_name_is_known():
    def below(cls):
        return {cls}.union(*map(below, cls.__subclasses__()))

    kinds = (Callback, LightningModule, LightningDataModule, Optimizer, LRScheduler)
    classes = set().union(*map(below, kinds))
    ours = {cls for cls in classes if cls.__module__.partition(".")[0] in PACKAGES and class_at(path_of(cls)) is cls}
    assert len(ours) > 60
    assert {cls.__name__ for cls in ours} <= class_names(*SHORT)


def test_names_are_those_that_plugins_take():
    assert table_keys(PRESETS) == list(nn.PRESETS) and table_keys(f"{PRESETS}_OF_NONE") == []
    for argument, (_, tables) in NAMES.items():
        plugin = FP8Precision if argument == "scaling" else partial(LowBitPrecision, "nvfp4-nvidia")
        plugin = LowBitPrecision if argument == "casts" else plugin
        shown, *others = map(table_keys, tables)
        assert shown and all(others), f"the source does not tell {argument}"
        for name in shown:
            if (argument, name) not in {("attention", "fp8-delayed"), ("attention", "quartet2"), ("backend", "native")}:
                plugin(**{argument: name})
        with pytest.raises(ValueError, match="Unknown"):
            plugin(**{argument: "nonsense"})
