"""The command ``lowbit compare`` runs the rows of a study with their seeds, and makes one table of them.

Each run is a process with its own folder, ``<output>/<row>/seed_<n>``, with its configuration in ``recipe.yaml``.
Finished runs are not repeated; interrupted ones resume. Table, pictures and record are updated after each run.
"""

import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from argparse import Namespace
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import yaml

from lightning_lowbit.atomic_files import replace_file
from lightning_lowbit.callbacks.recovery.graceful_interrupt import TERMINATED
from lightning_lowbit.checks import integer, nearest
from lightning_lowbit.cli.checkpoints import find_checkpoints
from lightning_lowbit.cli.configs import as_list, merge
from lightning_lowbit.cli.lab.compare.losses import Finished, reduced
from lightning_lowbit.cli.lab.compare.power import pilot_seeds
from lightning_lowbit.cli.lab.compare.record import Record, read_record
from lightning_lowbit.cli.lab.compare.study import Row, Study, distinct, product, read_study
from lightning_lowbit.cli.mistakes import explain
from lightning_lowbit.cli.run import check

_REPORT = "lightning_lowbit.RunReport"
_LARGEST_SEED = 2**32 - 1  # that NumPy takes
_SET_BY_COMPARE = ("--seed_everything", "--trainer.default_root_dir", "--ckpt_path")


@dataclass(frozen=True)
class Run:
    """One training: a row with one seed."""

    row: str
    seed: int
    folder: Path
    recipe: str = field(repr=False)  # YAML
    arguments: tuple[str, ...] = ()

    def finished(self) -> tuple[Path, dict[str, Any]] | None:
        """Returns the ``run.json`` of the run that took the last step, as a path and its content."""
        return next((pair for pair in self._ends() if pair[1]["begin"] < pair[1]["steps"]), None)

    def was_at_its_end(self) -> bool:
        """Tells whether the last checkpoint is at the last step, so that a resumed run would do nothing."""
        return any(result["begin"] >= result["steps"] for _, result in self._ends())

    def _ends(self) -> list[tuple[Path, dict[str, Any]]]:
        results = [(path, _read_end(path)) for path in self.folder.rglob("run.json")]
        return [(path, result) for path, result in results if result["status"] == "finished"]

    @property
    def content(self) -> str:
        """The text of ``recipe.yaml``."""
        return f"# lowbit fit --config recipe.yaml {shlex.join(self.arguments)}\n{self.recipe}"

    @property
    def written(self) -> str | None:
        """The text of the ``recipe.yaml`` in the folder, if there is one."""
        path = self.folder / "recipe.yaml"
        return path.read_text() if path.exists() else None

    def is_as_planned(self) -> bool:
        """Tells whether ``recipe.yaml`` is this run's; the folder may have had another place or name."""
        written = self.written
        return written == self.content or (written is not None and _placeless(written) == _placeless(self.content))


def _read_end(path: Path) -> dict[str, Any]:
    try:
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        whole = {"steps", "begin", "status", "seconds", "metrics", "history"} <= result.keys()
    except (ValueError, AttributeError):
        whole = False
    if not whole:
        raise ValueError(f"{path} is damaged. Remove {path.parent}, so that the run is made again.")
    return result


def _placeless(content: str) -> tuple[str, Any]:
    """Returns the arguments and the configuration of a ``recipe.yaml`` without its folder."""
    arguments, _, recipe = content.partition("\n")
    try:
        config = yaml.safe_load(recipe)
        config["trainer"].pop("default_root_dir")
    except (yaml.YAMLError, TypeError, KeyError, AttributeError):  # changed by hand
        return content, None
    return arguments, config


def compare(options: Namespace) -> int:
    if options.record is not None:
        return _draw_again(options)
    rest = options.rest
    if options.study is not None:
        study = read_study(options.study, options.seeds)
    else:
        usual = [0] if options.seeds is None else options.seeds
        study = Study(product(options.config, options.vary, options.lr, usual))
    output = Path(options.output or ("runs/studies" if study.name else "runs/compare")).expanduser()
    planned = runs = runs_of(study.rows, output, rest)
    rows = list(dict.fromkeys(run.row for run in runs))
    baseline = options.baseline or study.baseline or rows[0]
    if baseline not in rows:
        raise ValueError(f"--baseline: there is no row {baseline!r}.{nearest(baseline, rows)} Rows: {', '.join(rows)}.")
    seeds = {row.name: row.seeds for row in study.rows}

    def record() -> Record:
        command = shlex.join(["lowbit", "compare", *options.arguments])
        results = {row: _finished_runs([run for run in planned if run.row == row], output) for row in rows}
        return Record(study.name, baseline, command, options.pilot, seeds, study.effects, results)

    if options.pilot:
        chosen = pilot_seeds(study.effects, seeds, study.name)
        runs = [run for run in runs if run.seed in chosen.get(run.row, ())]
    check_folders(runs)
    todo = [run for run in runs if run.finished() is None]
    print(f"{len(runs)} runs in {output}, {len(runs) - len(todo)} of them finished.")
    if options.dry_run:
        print("\n".join([*(f"  {run.row}, seed {run.seed}" for run in todo), record().power_text()]).rstrip())
        return 0
    for run in {run.row: run for run in runs}.values():
        with tempfile.TemporaryDirectory() as folder:
            (recipe := Path(folder) / "recipe.yaml").write_text(run.recipe)
            try:
                check(["fit", "--config", str(recipe), *rest])
            except ValueError as error:
                raise ValueError(f"Row {run.row!r}: {explain(error)}") from error
    prepare(runs)
    if not options.pilot:
        print(record().power_text(), end="")
    execute(todo, options.jobs, lambda: record().write(output))
    print(record().write(output))
    if options.pilot:
        nothing = "\nThe pilot says nothing: it needs two seeds of both rows whose losses are finite."
        print(record().power_text() or nothing)
    failed = [run for run in todo if run.finished() is None]
    for run in failed:
        print(f"failed: {run.row}, seed {run.seed}; see {run.folder / 'log.txt'}", file=sys.stderr)
    return 1 if failed else 0


def _finished_runs(runs: Sequence[Run], output: Path) -> dict[int, Finished]:
    """Reads the runs that have finished as planned, by seed; their pages are relative to the output folder."""
    ends = [(run.seed, end) for run in runs if run.is_as_planned() and (end := run.finished())]
    pages = [Path(os.path.relpath(path.with_name("report.html"), output)).as_posix() for _, (path, _) in ends]
    return {seed: reduced(result, page) for (seed, (_, result)), page in zip(ends, pages, strict=True)}


def _draw_again(options: Namespace) -> int:
    path = options.record
    output = Path(options.output).expanduser() if options.output else path.parent
    record = read_record(path)
    output.mkdir(parents=True, exist_ok=True)
    print(record.write(output))
    return 0


def runs_of(rows: Sequence[Row], output: Path, arguments: Sequence[str]) -> list[Run]:
    for argument in arguments:
        if argument.partition("=")[0] in _SET_BY_COMPARE:
            raise ValueError(
                f"{argument} differs between the runs of a study: use --seeds and --output, or leave it out."
            )
    distinct("row", [row.name for row in rows])
    runs = []
    for row in rows:
        distinct("seed", list(map(str, row.seeds)))
        for seed in row.seeds:
            integer("a seed", seed, 0, at_most=_LARGEST_SEED)
            folder = output / row.name / f"seed_{seed}"
            recipe = yaml.safe_dump(_run_config(row.config, seed, folder), sort_keys=False)
            runs.append(Run(row.name, seed, folder, recipe, tuple(arguments)))
    if not runs:
        raise ValueError("The study has no run: --seeds and each --vary need at least one name, such as --seeds 0,1,2.")
    return runs


def _run_config(config: dict[str, Any], seed: int, folder: Path) -> dict[str, Any]:
    changes: dict[str, Any] = {"seed_everything": seed, "trainer": {"default_root_dir": str(folder)}}
    callbacks = as_list(config["trainer"].get("callbacks") or [])
    names = [callback.get("class_path", "") if isinstance(callback, dict) else callback for callback in callbacks]
    if not any(name.rpartition(".")[2] == "RunReport" for name in names):
        changes["trainer"]["callbacks"] = [{"class_path": _REPORT}]  # writes run.json
    if config.get("ckpt_path"):
        raise ValueError("The recipe sets ckpt_path, from which all runs would resume: leave it out.")
    if config["trainer"].get("logger"):  # each run logs into its own folder
        changes["trainer"]["logger"] = True
    return merge(config, changes)


def check_folders(runs: Sequence[Run]) -> None:
    """Raises a ``ValueError`` for a folder that holds a run of another configuration."""
    for run in runs:
        if run.is_as_planned():
            continue
        if any(run.folder.rglob("run.json")) or find_checkpoints(run.folder) or _is_running(run):
            other = "of another configuration (see recipe.yaml there)"
            which = "without a recipe.yaml" if run.written is None else other
            raise ValueError(f"{run.folder} holds a run {which}. Give another --output, or remove that folder.")


def prepare(runs: Sequence[Run]) -> None:
    """Writes ``recipe.yaml`` of each run, with its folder of now."""
    check_folders(runs)
    for run in runs:
        if run.written != run.content:
            run.folder.mkdir(parents=True, exist_ok=True)
            replace_file(run.folder / "recipe.yaml", run.content)


def _is_running(run: Run) -> bool:
    if not (path := run.folder / "lock").exists():
        return False
    with path.open() as lock:
        return not _try_lock(lock)


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def environment(jobs: int) -> dict[str, str]:
    """Returns the environment of a run; concurrent runs share the cores, unless the user set ``OMP_NUM_THREADS``.

    Threads that wait for each other without a core of their own take many times as long.
    """
    shared = {"OMP_NUM_THREADS": str(max((os.cpu_count() or 1) // jobs, 1))} if jobs > 1 else {}
    return {**shared, **os.environ}


def execute(runs: Sequence[Run], jobs: int, after_each: Callable[[], object]) -> None:
    """Runs ``jobs`` processes at a time; a signal is forwarded to them."""
    children: list[subprocess.Popen[bytes]] = []
    stopping, starting = threading.Event(), threading.Lock()

    def train(run: Run) -> None:
        # The process inherits the lock. If this command is killed and restarted, it waits for surviving processes.
        with (run.folder / "lock").open("w") as lock, (run.folder / "log.txt").open("ab") as log:
            while not _try_lock(lock) and not stopping.wait(0.2):
                pass
            while not stopping.is_set() and run.finished() is None:
                resumes = bool(find_checkpoints(run.folder)) and not run.was_at_its_end()
                resume = ["--ckpt_path", "last"] if resumes else []
                recipe = str(run.folder / "recipe.yaml")
                command = [sys.executable, "-P", "-m", "lightning_lowbit.cli", "fit", "--config", recipe, *resume]
                with starting:  # so that every started process is in `children` when they are stopped
                    if stopping.is_set():
                        break
                    print(f"  {run.row}, seed {run.seed} {'resumes' if resumes else 'begins'}", flush=True)
                    child = subprocess.Popen(
                        [*command, *run.arguments],
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        stdin=subprocess.DEVNULL,
                        pass_fds=[lock.fileno()],
                        env=environment(jobs),
                        start_new_session=True,  # Ctrl-C reaches only this process, which forwards it once
                    )
                    children.append(child)
                child.wait()
                if not (resumes and run.was_at_its_end()):  # else killed in its last validation: start again
                    break

    def terminate(*_: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # until the children have ended
        raise SystemExit(TERMINATED)

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        with ThreadPoolExecutor(jobs) as pool:
            try:
                for done in as_completed([pool.submit(train, run) for run in runs]):
                    done.result()
                    after_each()
            except (KeyboardInterrupt, SystemExit) as interruption:
                with starting:
                    stopping.set()
                pool.shutdown(wait=False, cancel_futures=True)
                for child in children:
                    if child.poll() is None:
                        terminated = isinstance(interruption, SystemExit)
                        os.kill(child.pid, signal.SIGTERM if terminated else signal.SIGINT)
                raise
    finally:
        signal.signal(signal.SIGTERM, before)
