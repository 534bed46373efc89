"""``lowbit compare --study``: what a study says, what two of them share, and what is shown of a row that diverges."""

import fcntl
from pathlib import Path

import pytest
import yaml
from matplotlib.figure import Figure

from lightning_lowbit import cli
from lightning_lowbit.cli.lab.compare.command import prepare, runs_of
from lightning_lowbit.cli.lab.compare.losses import reduced
from lightning_lowbit.cli.lab.compare.results import write_comparison
from lightning_lowbit.cli.lab.compare.study import read_study
from tests.launch import FORKS

TINY = """
trainer: {max_steps: 4, log_every_n_steps: 1, val_check_interval: 2}
model: {init_args: {config: {hidden_size: 32, intermediate_size: 48, num_hidden_layers: 1, num_attention_heads: 2},
                    scheduler: {init_args: {warmup_steps: 1}}}}
data: {init_args: {path: text.txt, sequence_length: 16, batch_size: 2, val_batches: 2, val_fraction: 0.2}}
"""
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
def _files(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_lowbit.cli.lab.compare.command.subprocess", FORKS)
    Path("text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 60)
    Path("tiny.yaml").write_text(TINY)
    Path("mine.yaml").write_text(MINE)


def compare(*arguments):
    return cli.main(["compare", *arguments])


def test_rows_and_seeds():
    study = read_study("mine.yaml")
    assert (study.name, study.baseline) == ("mine", "bf16")
    assert [(row.name, row.seeds) for row in study.rows] == [("nearest", [0, 5, 6]), ("bf16", [0]), ("both", [0])]
    assert [row.seeds for row in read_study("mine.yaml", [3, 4]).rows] == [[3, 4]] * 3
    nearest, bf16, both = (row.config for row in study.rows)
    assert nearest["trainer"]["plugins"]["init_args"] == {
        "casts": {"preset": "nvfp4", "every": {"rounding": "nearest"}},
        "skip": ["lm_head"],
    }
    assert bf16["trainer"]["plugins"]["init_args"]["casts"] == "bf16"
    optimizer = both["model"]["init_args"]["optimizer"]
    assert (optimizer["class_path"], optimizer["init_args"]["lr"]) == ("torch.optim.AdamW", 0.5)
    assert {config["trainer"]["max_steps"] for config in (nearest, bf16, both)} == {4}


def test_dry_run_says_what_would_run(capsys):
    assert compare("--study=mine.yaml", "--dry_run") == 0
    first, *others = capsys.readouterr().out.splitlines()
    assert first == "5 runs in runs/studies, 0 of them finished."
    assert [line.strip() for line in others] == [
        *("nearest, seed 0", "nearest, seed 5", "nearest, seed 6", "bf16, seed 0", "both, seed 0")
    ]
    assert compare("--study=mine.yaml", "--dry_run", "--seeds=7", "--output=here") == 0
    assert "3 runs in here, 0 of them finished." in capsys.readouterr().out
    assert not Path("runs").exists() and not Path("here").exists()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--study=scale_format"], "--study scale_format: no such file"),
        (["--study=scale_format"], "Did you mean 'scale_formats'"),
        (["--study="], "--study of a study; see `lowbit ls`"),
        (["--study=bf16"], "is no study, since it has no rows"),
        (["--study=mine.yaml", "--config=quickstart"], "leave out --config,"),
        (["--study=mine.yaml", "--vary=bf16", "--lr=1"], "leave out --vary and --lr,"),
        (["--study=mine.yaml", "--seeds=,"], "The study has no run"),
        (["--study=mine.yaml", "--pilot"], "study 'mine' has none: write effects"),
        (["--config=quickstart", "--pilot"], "--pilot needs the expected effects of a study: give one with --study"),
        (["--study=mine.yaml", "--baseline=bf17"], "there is no row 'bf17'. Did you mean 'bf16'?"),
        (["--config=quickstart", "--vary=bf16,missing.yaml"], "Row 'missing': No module named 'no_such_package'"),
        (["--config=quickstart", "--vary=bf16,missing.yaml"], "install its package (no-such-package), or"),
        (["--config=quickstart", "--vary=bf16,scale_formats"], "use `lowbit compare --study scale_formats`"),
    ],
)
def test_mistakes_on_the_command_line(arguments, line, capsys):
    optimizer = {"class_path": "no_such_package.Lion"}
    Path("missing.yaml").write_text(yaml.safe_dump({"model": {"init_args": {"optimizer": optimizer}}}))
    assert compare(*arguments) == 2
    assert line in capsys.readouterr().err
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"more_sedes": {"bf16": [1]}}, "more_sedes"),
        ({"config": None}, "config"),
        ({"config": "mine.yaml"}, "mine.yaml is a study, which is many runs"),
        ({"rows": {"a": "bf17"}}, "Did you mean 'bf16'"),
        ({"rows": {"a": 3}}, "Given value: 3"),
        ({"rows": {16: "bf16"}}, "the name of a row is text, and that of a folder; got 16"),
        ({"rows": {"a/b": "bf16"}}, "the name of a row is text, and that of a folder; got 'a/b'"),
        ({"rows": {}}, "The study has no run"),
        ({"seeds": [0, 0]}, "The study has the seed '0' twice"),
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
        (
            {"rows": {"odd": {"trainer": {"plugins": {"init_args": {"casts": {"preset": "nvfp5"}}}}}}},
            "Row 'odd': Unknown preset 'nvfp5'. Did you mean 'nvfp4'?",
        ),
    ],
)
def test_mistakes_in_the_file(changes, line, capsys):
    study = {"config": ["quickstart", "tiny.yaml"], "rows": {"bf16": "bf16", "two": "nvfp4"}}
    Path("wrong.yaml").write_text(yaml.safe_dump({**study, **changes}))
    assert compare("--study=wrong.yaml") == 2
    assert line in capsys.readouterr().err
    assert not Path("runs").exists()


def test_fit_refuses_a_study(capsys):
    assert cli.main(["fit", "--config=scale_formats"]) == 2
    assert "use `lowbit compare --study scale_formats`" in capsys.readouterr().err


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
    assert [line.split("|")[1].strip() for line in Path("runs/studies/second.md").read_text().splitlines()[2:]] == [
        *("wild", "bf16")
    ]
    for name in ("first", "second"):
        for picture in ("loss", "gap"):
            assert Path(f"runs/studies/{name}_{picture}.png").read_bytes().startswith(b"\x89PNG")
    changed = MINE.replace("bf16: bf16", "bf16: [bf16, adamw]")
    Path("third.yaml").write_text(changed)
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


# --- pictures ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def figures(monkeypatch):
    """Figures that were saved, by the names of their files."""
    saved = {}
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: saved.update({path.name: figure}))
    return saved


def result(*losses):
    run = {
        "steps": 40 * len(losses),
        "seconds": 1.0,
        "metrics": {"val_loss": losses[-1]},
        "history": {"val_loss": [[40 * (i + 1), loss] for i, loss in enumerate(losses)]},
        "peak_memory_bytes": 2**30,
    }
    return reduced(run)


def labels(figure):
    (legend,) = figure.legends
    return [text.get_text() for text in legend.get_texts()]


def test_many_rows_look_different(figures):
    write_comparison({f"row {i}": {0: result(3.0, 2.0 + i / 100)} for i in range(30)}, "row 0", Path(), "many")
    (axes,) = figures["many_loss.png"].axes
    assert len({(line.get_color(), line.get_linestyle()) for line in axes.lines}) == 30
    assert axes.get_ylim()[1] > 3 and "cut off" not in axes.get_ylabel()
    (axes,) = figures["many_gap.png"].axes
    assert axes.get_xlim()[1] > 0.29 and "cut off" not in axes.get_xlabel()
    assert axes.get_yticklabels()[0].get_text() == "row 1   +0.01"


def test_what_diverges_does_not_flatten_the_others(figures):
    results = {
        "bf16": {0: result(3.0, 2.0), 1: result(3.1, 2.1)},
        "good": {0: result(3.0, 2.02), 1: result(3.1, 2.13)},
        "also good": {0: result(3.0, 2.05)},
        "huge": {0: result(3.0, 1e6)},
        "half": {0: result(3.0, 2.5), 1: result(3.0, None)},
        "never": {0: result(None, None)},
    }
    table = write_comparison(results, "bf16", Path()).splitlines()
    assert table[-1].startswith("| never | 1 | nan |")
    (axes,) = figures["loss.png"].axes
    assert labels(figures["loss.png"]) == ["bf16", "good", "also good", "huge", "half (diverged)", "never (diverged)"]
    low, high = axes.get_ylim()
    assert 1.5 < low < 2 and 3.1 < high < 6 and f"above {high:.3g} is cut off" in axes.get_ylabel()
    half = axes.lines[4].get_ydata()
    assert half[0] == 3 and half[1] != half[1], "a mean over those that are left would hide the one that diverged"
    (axes,) = figures["gap.png"].axes
    low, high = axes.get_xlim()
    assert low <= 0 and 0.05 < high < 1 and f"beyond {high:.3g} is cut off" in axes.get_xlabel()
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        *("good   +0.025", "also good   +0.05", "huge   +1e+06", "half   diverged", "never   diverged")
    ]
    bottom, top = axes.get_ylim()
    assert bottom > 4 and top < 0, "a row without a bar is outside of the picture"


@pytest.mark.parametrize("rows", [["never"], ["never", "fine"], ["fine", "never"], ["fine", "alike"], ["none", "fine"]])
def test_pictures_of_little(rows):
    each = {"never": {0: result(None)}, "fine": {0: result(2.0)}, "alike": {0: result(2.0)}, "none": {}}
    write_comparison({row: each[row] for row in rows}, rows[0], Path())
    assert Path("loss.png").exists() and Path("gap.png").exists()


def by_rate(name, losses, between="@"):
    """Rows of a name that end in a learning rate, one for each list of what the seeds ended with."""
    return {
        f"{name}{between}{rate}": {seed: result(3.0, loss) for seed, loss in enumerate(seeds)}
        for rate, seeds in losses.items()
    }


@pytest.mark.parametrize("between", ["@", ",lr="])
def test_losses_over_learning_rates(between, figures):
    adam = {"1e-2": [4.0], "5e-4": [2.5, 2.7], "0.001": [2.0, 2.4]}
    results = {"bf16": {0: result(2.0)}, **by_rate("a+b", adam, between), **by_rate("c", {".001": [2.1]}, between)}
    write_comparison(results, "bf16", Path(), "mine")
    (axes,) = figures["mine_rates.png"].axes
    assert axes.get_xscale() == "log"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0.0005", "0.001", "0.01"]
    assert labels(figures["mine_rates.png"]) == ["a+b", "c"], "a row without a learning rate has no curve"
    curve, dots, other, dot = axes.lines
    assert list(curve.get_xdata()) == [5e-4, 1e-3, 1e-2], "rates are not in their order"
    assert curve.get_ydata() == pytest.approx([2.6, 2.2, 4.0]), "not the mean over the seeds"
    assert sorted(dots.get_ydata()) == [2.0, 2.4, 2.5, 2.7, 4.0] and dots.get_linestyle() == "None"
    assert list(other.get_xdata()) == [1e-3] and dot.get_color() == other.get_color() != curve.get_color()


def test_rates_at_which_a_run_diverged(figures):
    results = {
        **by_rate("fine", {"1e-4": [2.0], "1e-3": [2.1], "1e-2": [2.2]}),
        **by_rate("half", {"1e-4": [2.0, 2.0], "1e-3": [2.1, 2.2], "1e-2": [2.5, None]}),
        **by_rate("never", {"1e-4": [None], "1e-3": [None], "1e-2": [None]}),
        **by_rate("huge", {"1e-4": [2.1], "1e-3": [2.2], "1e-2": [1e6]}),
    }
    write_comparison(results, "fine@1e-4", Path())
    (axes,) = figures["rates.png"].axes
    lines = {line.get_label(): line for line in axes.lines}
    colors = {lines[name].get_color(): name for name in ("fine", "half", "never", "huge")}
    crosses = {colors[line.get_color()]: line for line in axes.lines if line.get_marker() == "x"}
    assert {name: list(line.get_xdata()) for name, line in crosses.items()} == {
        "half": [1e-2],
        "never": [1e-4, 1e-3, 1e-2],
    }
    assert 0.9 < crosses["never"].get_ydata()[0] < crosses["half"].get_ydata()[0] < 1, "a cross hides another"
    last = {colors[line.get_color()]: line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == ":"}
    assert last == {"half": 1e-3}, "the last rate that trained"
    ends = lines["half"].get_ydata()
    assert ends[1] == pytest.approx(2.15) and ends[2] != ends[2], "a mean over those that are left"
    low, high = axes.get_ylim()
    assert 1.9 < low < 2 and 2.5 < high < 4 and f"above {high:.3g} is cut off" in axes.get_ylabel()


@pytest.mark.parametrize(
    "results",
    [
        {"bf16": {0: result(2.0)}},
        by_rate("a", {"1e-3": [2.0], "5e-3": [2.0]}) | by_rate("b", {"1e-2": [2.0], "5e-3": [2.0]}),
        {**by_rate("a", {"1e-3": [2.0], "5e-3": [2.0]}), "a@1e-2": {}},
        by_rate("a", {rate: [2.0] for rate in ("1e-3", "5e-3", "0", "1e999", "1.2.3", "fast")}),
        by_rate("", {"1e-3": [2.0], "5e-3": [2.0], "1e-2": [2.0]}),
    ],
    ids=["no rates", "two each", "one is missing", "no rates after all", "no name"],
)
def test_there_is_no_curve_of_two_rates(results, figures):
    write_comparison(results, next(iter(results)), Path())
    assert set(figures) == {"loss.png", "gap.png"}


def test_where_every_rate_diverged(figures):
    write_comparison(by_rate("a", {"1e-3": [None], "5e-3": [None], "1e-2": [None]}), "a@1e-3", Path())
    assert set(figures) == {"loss.png", "gap.png", "rates.png"}
