"""``lowbit ls`` and ``lowbit cp``, here and from a wheel, and what the command answers at once."""

import logging
import os
import shutil
import subprocess
import sys
from importlib import import_module
from inspect import signature
from pathlib import Path
from unittest.mock import patch

import pytest

from lightning_lowbit import __version__, cli
from lightning_lowbit._lightning import Trainer
from lightning_lowbit.cli import options
from lightning_lowbit.cli.command import TRAINER_COMMANDS
from lightning_lowbit.cli.configs import kind, recipes
from lightning_lowbit.cli.run import LowBitCLI, check
from lightning_lowbit.packages import is_installed
from tests.cli.run.commands import write_tiny
from tests.tables import each

ROOT = Path(__file__).parent.parent.parent


def test_ls_shows_every_recipe_with_one_line(capsys):
    assert cli.main(["ls"]) == 0
    shown = capsys.readouterr().out
    for name, path in recipes().items():
        (line,) = [line for line in shown.splitlines() if line.startswith(f"  {name} ")]
        assert len(line.partition(" [")[0]) <= 120, f"{path.name} needs a shorter first line"
    order = ["Recipes", "  quickstart ", "Overlays", "  bf16 ", "Studies", "  scale_formats "]
    assert sorted(order, key=shown.index) == order


def test_cp(capsys):
    assert cli.main(["cp", "quickstart", "new/mine.yaml"]) == 0
    assert Path("new/mine.yaml").read_text() == recipes()["quickstart"].read_text()
    assert cli.main(["cp", "bf16"]) == 0
    Path("bf16.yaml").write_text("mine")
    assert cli.main(["cp", "bf16", "."]) == 2
    assert "bf16.yaml exists already" in capsys.readouterr().err
    assert Path("bf16.yaml").read_text() == "mine"
    assert cli.main(["cp", "scale_formats", "folder/"]) == 0
    assert "lowbit compare --study folder/scale_formats.yaml" in capsys.readouterr().out
    assert Path("folder/scale_formats.yaml").exists()


def test_nothing_imports_the_laboratory_but_its_own_commands():
    for path in (ROOT / "lightning_lowbit").rglob("*.py"):
        is_of_lab = path.is_relative_to(ROOT / "lightning_lowbit" / "cli" / "lab")
        assert is_of_lab or "lightning_lowbit.cli.lab" not in path.read_text(), f"{path} imports from cli/lab"


MISTAKES = {
    "fitt": "There is no command 'fitt'. Did you mean 'fit'?",
    "cp quikstart x.yaml": "Did you mean 'quickstart'?",
    "ls --nonsense": "There is no option --nonsense. For example: lowbit ls.",
    "cp": "lowbit cp needs NAME (a name from `lowbit ls`). For example: lowbit cp quickstart mine.yaml.",
    "cp quickstart a b": "lowbit cp takes no further argument; got 'b'.",
    "inspect": "lowbit inspect needs CHECKPOINT (a Lightning .ckpt) and --casts (presets).",
    "inspect x --cast nvfp4": "There is no option --cast. Did you mean '--casts'?",
    "inspect x --casts": "--casts takes a value, and none follows it.",
    "export": "lowbit export needs CHECKPOINT (a .ckpt of a run with a plugin of lightning_lowbit).",
    "export x --format=int44": "--format has no 'int44'. Did you mean 'int4'? Choose one of: nvfp4-w4a16",
    "export x --shape=a": "--shape takes sizes such as 2,3,32,32; got 'a'.",
    "export x --dtype=a": "last.ckpt --format nvfp4-w4a16 --output exported --rescale.",  # which takes no text
    "evaluate x": "lowbit evaluate needs --tasks (names). For example: lowbit evaluate runs/",
    "evaluate x --tasks=a --limit=q": "--limit takes a number; got 'q'.",
    "evaluate x --tasks=a --max_length=0": "--max_length is a number of tokens, 1 or more; got 0.",
    "compare --config=quickstart --seeds=x": "--seeds takes whole numbers such as 0,1,2; got 'x'.",
    "compare": "--config names the recipe to run, or --study a study",
    # Options are not abbreviated.
    "fit --config=quickstart --trainer.max_step=5": "Did you mean '--trainer.max_steps'",
    "fit --config=quickstart --traine.max_steps=5": "Did you mean '--trainer.max_steps'",
    "fit --config=quickstart --seed=1": "Did you mean '--seed_everything'",
    "fit --config=quickstart --ckpt=last": "Did you mean '--ckpt_path'",
    "fit --config=quickstart --data.init_args.batch=2": "Did you mean 'batch_size'",
    "fit --config=quickstart --trainer.plugins.init_args.cast=mxfp4": "Did you mean 'casts'",
    # Recipes that are missing or contradicted.
    "fit": "Give a recipe, e.g. `lowbit fit --config quickstart`: nothing names a model. `lowbit ls` lists",
    "validate --ckpt_path=last": "Give a recipe, e.g. `lowbit validate --config quickstart`: nothing names",
    "fit --config=nvfp4 -c adamw": "lowbit fit --config quickstart --config nvfp4 --config adamw`: nvfp4 and adam",
    "estimate": "Give a recipe, e.g. `lowbit estimate --config quickstart`: nothing names a model.",
    "estimate --config bf16": "`lowbit estimate --config quickstart --config bf16`: bf16 changes one, on top of",
    "compare --config bf16": "`lowbit compare --config quickstart --config bf16`: bf16 changes",
    "fit --config adamw -c bf16 -c quickstart": "overlay adamw stands before the recipe quickstart: give it after",
    "compare --config bf16 --config quickstart --vary adamw,lion": "overlay bf16 stands before the recipe quickstart",
    "fit --config mxfp": "mean 'mxfp4' or 'mxfp4_rht' or 'mxfp6' or 'mxfp8'? `lowbit ls` lists them.",
    "fit --config quickstart --trainer.precision nvfp4": "give --config nvfp4 after the recipe",
    "fit --config quickstart --trainer.precision bf16-mixed": "leave it out: the plugin's compute_dtype",
}


@each("command", MISTAKES)
def test_mistakes(command, capsys):
    assert cli.main(command.split()) == 2
    assert MISTAKES[command] in capsys.readouterr().err.strip().splitlines()[-1]
    assert not list(Path().iterdir())


def test_help_and_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"lightning_lowbit {__version__}\n"
    assert cli.main(["--help"]) == 0
    assert cli.main([]) == 2
    shown = capsys.readouterr().out
    assert shown.count("To begin: lowbit fit --config quickstart") == 2
    commands = ("ls", "cp", "fit", "validate", "test, predict", "compare", "estimate", "inspect CHECKPOINT --casts A,B")
    assert all(f"\n  {command}" in shown for command in commands)
    assert set(TRAINER_COMMANDS) == set(LowBitCLI.subcommands())


def test_the_hub_tells_of_its_retries_once(caplog):
    cli.main(["--version"])
    logger = logging.getLogger(import_module("huggingface_hub.utils._http").__name__)
    with caplog.at_level("WARNING"), patch.object(logging.getLogger("huggingface_hub"), "propagate", True):
        for number in range(1, 6):
            logger.warning("'[Errno -2]' thrown while requesting HEAD https://huggingface.co/x")
            logger.warning(f"Retrying in {number}s [Retry {number}/5].")
    assert [record.getMessage()[:8] for record in caplog.records] == ["'[Errno ", "Retrying"]


def test_lists_help_and_mistakes_do_not_wait_for_torch():
    program = """if True:
        import sys
        from lightning_lowbit.cli import main
        for command in (
            "ls", "--help", "cp quickstart mine.yaml", "nonsense", "ls --help", "fit", "fit --config quikstart",
            "fit --config quickstart --trainer.max_step 5", "fit --config quickstart --ckpt_path nowhere.ckpt",
            "fit --config quickstart --model.optimizer.lrr 1", "compare --config quickstart --trainer.max_step 5",
            "fit --config quickstart --model lightning_lowbit.Nothing", "compare --config quickstart --dryrun",
            "fit --config quickstart --trainer.precision nvfp4", "estimate --config quickstart --device h10",
            "compare --from nowhere.json", "compare --config quickstart --vary nvfp5", "inspect nowhere --casts nvfp4",
            "fit --config quickstart --trainer.max_epochs two", "fit --config quickstart --data.batch_size big",
            "compare --config quickstart --model.optimizer.lr high", "fit --config quickstart --model.scheduler Nope",
            "fit --config quickstart --trainer.plugins.casts nvfp5", "inspect", "export", "evaluate", "cp", "estimate",
            "fit --config quickstart --trainer.plugins.compute_dtype x",
            "export nowhere.ckpt", "export nowhere.ckpt --format int44", "evaluate nowhere.ckpt --tasks one",
            *(f"{name} --help" for name in ("fit", "compare", "inspect", "export", "evaluate", "estimate")),
        ):
            try:
                main(command.split())
            except SystemExit:
                pass
        print({"torch", "lightning", "transformers", "jsonargparse"} & set(sys.modules) or "light")
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "light"


def test_help_on_training_is_short_and_begins_with_recipes(capsys):
    for command in TRAINER_COMMANDS:
        assert cli.main([command, "--config", "quickstart", "--help"]) == 0
        text = capsys.readouterr().out
        usage, _, title, *shown = text.splitlines()
        assert len(shown) < 37, "it does not fit a screen"
        assert usage == f"usage: lowbit {command} --config RECIPE [--config OVERLAY ...] [--any.argument VALUE ...]"
        names = [name for name, path in recipes().items() if not kind(path)]
        assert (title, [line.split()[0] for line in shown[: len(names)]]) == ("Recipes:", names)
        assert f"`lowbit {command} --help all` shows all arguments" in text
    options = [line.split() for line in shown if line.startswith("  --")]
    examples = {option: "quickstart" if option == "--config" else value for option, value, *_ in options}
    assert len(examples) == 11
    check(["fit", *(f"{option}={value}" for option, value in examples.items())])
    for option in ("--help", "-h"):
        with pytest.raises(SystemExit) as ended:
            cli.main(["fit", option, "all"])
        assert ended.value.code == 0
        assert "--trainer.gradient_clip_val" in capsys.readouterr().out


def test_options_of_the_trainer_are_those_of_the_installed_one():
    assert {"max_steps", "plugins", "precision"} <= options.trainer_arguments()["__init__"].keys()
    for name in ("__init__", "fit", "predict"):
        assert {"self", *options.trainer_arguments()[name]} == set(signature(getattr(Trainer, name)).parameters)


def test_a_key_of_a_recipe_that_no_trainer_takes_is_named_with_its_file(capsys):
    Path("mine.yaml").write_text(recipes()["quickstart"].read_text().replace("  max_steps:", "  max_step:"))
    assert cli.main(["fit", "--config", "mine.yaml"]) == 2
    line = "There is no option --trainer.max_step in mine.yaml. Did you mean 'trainer.max_steps'?"
    assert line in capsys.readouterr().err


def test_packages_that_a_recipe_needs_are_marked_and_missing_ones_refused_at_once(capsys):
    assert cli.main(["ls"]) == 0
    missing = "" if is_installed("scikit-learn") else ": not installed"
    assert f"half a minute on two cores [scikit-learn{missing}]\n" in capsys.readouterr().out
    recipe = recipes()["digits"].read_text().replace("# needs scikit-learn,", "# needs no-such-package,")
    Path("mine.yaml").write_text(recipe)
    assert cli.main(["fit", "--config", "mine.yaml"]) == 2
    remedy = "pip install no-such-package, or give --data.init_args.path."
    assert f"mine.yaml needs packages that are not installed: {remedy}" in capsys.readouterr().err
    Path("images.yaml").write_text("data: {init_args: {path: images}}")
    options.check_run("fit", ["--config", "mine.yaml", "--config", "images.yaml"])
    options.check_run("fit", ["--config", "mine.yaml", "--data.init_args.path", "images"])


def test_a_reader_that_has_gone_is_no_error():
    """`lowbit ls | head -3`"""
    command = [Path(sys.executable).with_name("lowbit"), "ls"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


@pytest.mark.slow
def test_recipes_of_a_wheel_are_found_from_any_directory(tmp_path_factory, tmp_path):
    site, sources = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("sources")
    for name in ("lightning_lowbit", "recipes"):  # a copy: setuptools leaves its build beside what it builds
        shutil.copytree(ROOT / name, sources / name)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    # With the setuptools that is here: making an environment for it takes half a minute.
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--no-build-isolation"]
    subprocess.run([*pip, "--no-deps", "--target", site, sources], check=True)

    def run(*command):
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(site)})
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    lowbit = site / "bin" / "lowbit"
    where = run(sys.executable, "-c", "import lightning_lowbit.cli; print(lightning_lowbit.__file__)")
    assert where.startswith(str(site)), "the sources were imported instead of the wheel"
    shown = run(lowbit, "ls")
    assert all(f"  {name} " in shown for name in recipes())
    assert (site / "lightning_lowbit/recipes/launch/slurm.sh").exists()
    run(lowbit, "cp", "quickstart", "mine.yaml")
    assert Path("mine.yaml").read_text() == recipes()["quickstart"].read_text()
    write_tiny(max_steps=2)
    run(lowbit, "fit", "--config=quickstart", "--config=tiny.yaml")
    assert Path("runs/quickstart+tiny/version_0/config.yaml").exists()
