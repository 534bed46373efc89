"""``lowbit compare --study``: what a study says, and what two of them share."""

import fcntl
import re
from pathlib import Path

import pytest
import yaml

from lightning_lowbit import cli
from lightning_lowbit.cli.lab.compare.command import prepare, runs_of
from lightning_lowbit.cli.lab.compare.study import read_study

MINE = """
# Study: mine
config: [quickstart, study, tiny.yaml]
seeds: [0]
more_seeds: {nearest: [5, 6]}
baseline: bf16
rows:
  nearest: {trainer: {plugins: {init_args: {casts: {preset: nvfp4, every: {rounding: nearest}}}}}}
  bf16: bf16
  both: [nvfp4, adamw, {model: {init_args: {optimizer: {init_args: {lr: 0.5}}}}}]
"""


@pytest.fixture(autouse=True)
def _mine(tmp_path):
    Path("mine.yaml").write_text(MINE)


def compare(*arguments):
    return cli.main(["compare", *arguments])


def test_rows_and_seeds():
    study = read_study("mine.yaml")
    assert (study.name, study.baseline) == ("mine", "bf16")
    assert [(row.name, row.seeds) for row in study.rows] == [("nearest", [0, 5, 6]), ("bf16", [0]), ("both", [0])]
    assert [row.seeds for row in read_study("mine.yaml", [3, 4]).rows] == [[3, 4]] * 3
    nearest, bf16, both = (row.config for row in study.rows)
    casts = {"preset": "nvfp4", "every": {"rounding": "nearest"}}
    assert nearest["trainer"]["plugins"]["init_args"] == {"casts": casts, "skip": ["lm_head"]}
    assert bf16["trainer"]["plugins"]["init_args"]["casts"] == "bf16"
    optimizer = both["model"]["init_args"]["optimizer"]
    assert (optimizer["class_path"], optimizer["init_args"]["lr"]) == ("torch.optim.AdamW", 0.5)
    assert {config["trainer"]["max_steps"] for config in (nearest, bf16, both)} == {8}


def test_dry_run_says_what_would_run(capsys):
    assert compare("--study=mine.yaml", "--dry_run") == 0
    first, *others = capsys.readouterr().out.splitlines()
    assert first == "5 runs in runs/studies, 0 of them finished."
    runs = [line.strip().replace(", seed ", " ") for line in others]
    assert runs == ["nearest 0", "nearest 5", "nearest 6", "bf16 0", "both 0"]
    assert compare("--study=mine.yaml", "--dry_run", "--seeds=7", "--output=here") == 0
    assert "3 runs in here, 0 of them finished." in capsys.readouterr().out
    assert not Path("runs").exists() and not Path("here").exists()


@pytest.mark.parametrize("arguments, line", [
    (["--study=scale_format"], "--study scale_format: no such file, and no recipe, overlay or study of this name."),
    (["--study="], "--study of a study; see `lowbit ls`"),
    (["--study=bf16"], "is no study, since it has no rows"),
    (["--study=mine.yaml", "--config=quickstart"], "leave out --config,"),
    (["--study=mine.yaml", "--vary=bf16", "--lr=1"], "leave out --vary and --lr,"),
    (["--study=mine.yaml", "--pilot"], "study 'mine' has none: write effects"),
    (["--config=quickstart", "--pilot"], "--pilot needs the expected effects of a study: give one with --study"),
    (["--config=quickstart", "--vary=bf16,missing.yaml"],
     "Row 'missing': No module named 'no_such_package', which the configuration names: install its package "
     "(no-such-package), or"),
    (["--config=quickstart", "--vary=bf16,scale_formats"], "use `lowbit compare --study scale_formats`"),
])  # fmt: skip
def test_mistakes_on_the_command_line(arguments, line, capsys):
    optimizer = {"class_path": "no_such_package.Lion"}
    Path("missing.yaml").write_text(yaml.safe_dump({"model": {"init_args": {"optimizer": optimizer}}}))
    assert compare(*arguments) == 2
    assert line in capsys.readouterr().err
    assert not Path("runs").exists()


@pytest.mark.parametrize("changes, line", [
    ({"more_sedes": {"bf16": [1]}}, "more_sedes"),
    ({"config": None}, "config"),
    ({"config": "mine.yaml"}, "mine.yaml is a study, which is many runs"),
    ({"rows": {"a": 3}}, "Given value: 3"),
    ({"rows": {16: "bf16"}}, "the name of a row is text, and that of a folder; got 16"),
    ({"rows": {"a/b": "bf16"}}, "the name of a row is text, and that of a folder; got 'a/b'"),
    ({"rows": {}}, "The study has no run"),
    ({"seeds": ["a"]}, "Got value: a"),
    ({"more_seeds": {"bf16": [0]}}, "The study has the seed '0' twice"),
    ({"more_seeds": {"bf17": [1]}}, "Did you mean 'bf16'?"),
    ({"baseline": "bf17"}, "there is no row 'bf17'. Did you mean 'bf16'?"),
    ({"effects": ["bf16"]}, "wrong.yaml: effects are written by row, such as {fp4: {expected: +0.02}}"),
    ({"effects": {"bf17": {"expected": 1}}}, "row in effects of wrong.yaml 'bf17'. Did you mean 'bf16'?"),
    ({"effects": {"bf16": 0.02}}, "row 'bf16' is a mapping with expected, such as {expected: +0.02}; got 0.02"),
    ({"effects": {"bf16": {"expected": 1, "agianst": "a"}}}, "Did you mean 'against'?"),
    ({"effects": {"bf16": {"expected": 1}}}, "compares it with itself: name another row as against"),
    ({"effects": {"two": {"expected": 1, "against": "bf17"}}}, "Did you mean 'bf16'?"),
    ({"effects": {"two": {"expected": 0}}}, "such as +0.02 or -3.4% (of the other row's loss), or lower or"),
    ({"effects": {"two": {"expected": "better"}}}, "or lower or higher; got 'better'"),
    ({"effects": {"two": {"expected": True}}}, "or lower or higher; got True"),
    ({"effects": {"two": {"expected": 1, "source": 3}}}, "a source that is no text: put it in quotes; got 3"),
    ({"effects": {"two": [{"expected": 1}, {"expected": 2}]}}, "effects has 'two against bf16' twice"),
    ({"rows": {"bf16": "bf16", "odd": {"trainer": {"max_stepz": 3}}}}, "Row 'odd': "),
    ({"rows": {"odd": {"trainer": {"plugins": {"init_args": {"casts": {"preset": "nvfp5"}}}}}}},
     "Row 'odd': Unknown preset 'nvfp5'. Did you mean 'nvfp4'?"),
])  # fmt: skip
def test_mistakes_in_the_file(changes, line, capsys):
    study = {"config": ["quickstart", "tiny.yaml"], "rows": {"bf16": "bf16", "two": "nvfp4"}}
    Path("wrong.yaml").write_text(yaml.safe_dump({**study, **changes}))
    assert compare("--study=wrong.yaml") == 2
    assert line in capsys.readouterr().err
    assert not Path("runs").exists()


@pytest.mark.slow
def test_studies_share_their_runs_and_one_that_diverges_is_shown(capsys):
    nowhere = {"model": {"init_args": {"config": {"rms_norm_eps": -1.0}}}}  # the root of a negative number
    rows = {"bf16": "bf16", "wild": ["nvfp4", nowhere]}
    for name, order in (("first", rows), ("second", dict(reversed(rows.items())))):
        study = {"config": ["quickstart", "study", "tiny.yaml"], "baseline": "bf16", "rows": order}
        Path(f"{name}.yaml").write_text(yaml.safe_dump(study, sort_keys=False))
    assert compare("--study=first.yaml", "--jobs=2") == 0
    assert "| wild | 1 | nan |" in capsys.readouterr().out
    assert compare("--study=second.yaml") == 0
    assert "2 runs in runs/studies, 2 of them finished." in capsys.readouterr().out
    assert re.findall(r"^\| (wild|bf16) ", Path("runs/studies/second.md").read_text(), re.MULTILINE) == ["wild", "bf16"]
    pictures = {path.name for path in Path("runs/studies").glob("*.png")}
    assert pictures == {f"{name}_{kind}.png" for name in ("first", "second") for kind in ("loss", "gap")}
    Path("third.yaml").write_text(MINE.replace("bf16: bf16", "bf16: [bf16, adamw]"))
    assert compare("--study=third.yaml") == 2
    assert "bf16/seed_0 holds a run of another configuration" in capsys.readouterr().err
    assert not Path("runs/studies/nearest").exists(), "it wrote before it refused"


@pytest.mark.slow
def test_a_pilot_runs_two_seeds_of_two_rows_and_says_what_the_study_needs(capsys):
    effects = {"both": {"against": "nearest", "expected": -0.02}, "nearest": {"expected": "higher"}}
    study = yaml.safe_load(MINE) | {"seeds": [0, 1, 2], "more_seeds": {}, "effects": effects}
    Path("mine.yaml").write_text(yaml.safe_dump(study, sort_keys=False))
    assert compare("--study=mine.yaml", "--pilot", "--dry_run") == 0
    assert capsys.readouterr().out.count("seed ") == 4
    assert compare("--study=mine.yaml", "--pilot") == 0
    told = capsys.readouterr().out
    assert "| nearest | 2 |" in told and "| both | 2 |" in told and "| bf16 | 0 |" in told
    assert "| both against nearest | -0.02 | 3 |" in told and "seeds needed" in told and "1 degree of freedom" in told
    assert len(list(Path("runs").rglob("run.json"))) == 4 and not Path("runs/studies/bf16").exists()
    page = Path("runs/studies/mine.html").read_text()
    assert 'href="both/seed_0/version_0/report.html"' in page and "lowbit compare --study=mine.yaml --pilot" in page
    assert compare("--study=mine.yaml", "--dry_run") == 0
    told = capsys.readouterr().out
    assert "9 runs in runs/studies, 4 of them finished." in told and "power" in told and "seeds needed" not in told
    assert compare("--study=mine.yaml", "--pilot", "--trainer.max_steps=3") == 2
    assert "holds a run of another configuration" in capsys.readouterr().err


def test_a_run_that_has_just_begun_elsewhere_keeps_its_recipe():
    first = runs_of(read_study("mine.yaml").rows, Path("out"), ())
    prepare(first)
    written = {run: (run.folder / "recipe.yaml").stat().st_mtime_ns for run in first}
    prepare(first)
    assert {run: (run.folder / "recipe.yaml").stat().st_mtime_ns for run in first} == written
    other = runs_of(read_study("mine.yaml").rows, Path("out"), ["--trainer.max_steps=3"])
    with (first[-1].folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as the process of a run does
        with pytest.raises(ValueError, match="both/seed_0 holds a run of another configuration"):
            prepare(other)
    prepare(other)
    assert "max_steps=3" in (first[-1].folder / "recipe.yaml").read_text(), "nothing had begun there"
