"""Where the files of a run lie, so that no run overwrites those of another.

Lightning's own loggers have a folder for each run, ``version_N``. Others have one for all runs, and so has a Trainer
without a logger: the first run's files lie in it, those of the next ones in ``version_1``, ``version_2`` … in it. A
resumed run goes on where it was.
"""

import json
from contextlib import suppress
from pathlib import Path
from weakref import WeakKeyDictionary

from lightning_lowbit._lightning import CSVLogger, TensorBoardLogger, Trainer, rank_zero_info

_FILES = ("run.json", "precision_summary.json")  # of which a folder without any is free
_CHOSEN: WeakKeyDictionary[Trainer, tuple[Path, Path]] = WeakKeyDictionary()  # (the folder of all runs, of this one)


def run_folder(trainer: Trainer, folder: Path, filename: str) -> Path:
    """The folder of a run, the same whenever it is asked for. To be asked for when something is to be written.

    Args:
        trainer: of the run.
        folder: ``trainer.log_dir``, or what stands for it.
        filename: what is to be written there; another run may have written a file of this name.
    """
    if trainer.loggers and isinstance(trainer.loggers[0], (TensorBoardLogger, CSVLogger)):
        return folder
    known, chosen = _CHOSEN.get(trainer, (None, folder))
    if known == folder:
        return chosen
    chosen = _free(folder, {*_FILES, filename})
    if chosen != folder:
        rank_zero_info(f"{folder} holds the files of another run; those of this one are in {chosen}.")
    _CHOSEN[trainer] = folder, chosen
    return chosen


def go_on(trainer: Trainer, folder: Path, identity: str) -> None:
    """Lets a resumed run go on in the folder of the run that it goes on with: that broke off, or ended where it begins.

    One that ended later keeps its files: this is another run from the same checkpoint.
    """
    for place in [folder, *folder.glob("version_*")]:
        with suppress(OSError, ValueError):
            run = json.loads((place / "run.json").read_text())
            if run.get("id") == identity and (run["status"] != "finished" or run["steps"] <= trainer.global_step):
                _CHOSEN[trainer] = folder, place


def _free(folder: Path, names: set[str]) -> Path:
    if not any((folder / name).exists() for name in names):
        return folder
    numbers = [path.name.removeprefix("version_") for path in folder.glob("version_*")]
    number = max([int(text) for text in numbers if text.isdecimal()], default=0) + 1
    while True:
        chosen = folder / f"version_{number}"
        try:
            chosen.mkdir()  # of several processes that try at once, one makes it
        except FileExistsError:
            number += 1
        else:
            return chosen
