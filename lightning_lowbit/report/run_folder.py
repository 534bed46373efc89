"""The folder of a run's files; no run overwrites the files of another.

If runs share a folder, the first writes into it, the next ones into ``version_1`` … in it. A resumed run keeps its own.
"""

import json
from contextlib import suppress
from pathlib import Path
from weakref import WeakKeyDictionary

from lightning_lowbit._lightning import CSVLogger, TensorBoardLogger, Trainer, rank_zero_info

_FILES = ("run.json", "precision_summary.json")  # a folder that has one of them belongs to a run
_CHOSEN: WeakKeyDictionary[Trainer, tuple[Path, Path]] = WeakKeyDictionary()  # (folder of all runs, folder of this one)


def run_folder(trainer: Trainer, folder: Path, filename: str) -> Path:
    """Returns the folder of a run, always the same, and may create it; one with a ``filename`` is another run's."""
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


def continue_in(trainer: Trainer, folder: Path, identity: str) -> None:
    """Gives a resumed run the folder of the run that it continues, unless that one ended at a later step."""
    for place in [folder, *folder.glob("version_*")]:
        with suppress(OSError, ValueError):
            run = json.loads((place / "run.json").read_text())
            if run.get("id") == identity and (run["status"] != "finished" or run["steps"] <= trainer.global_step):
                _CHOSEN[trainer] = folder, place


def page_of(trainer: Trainer, folder: Path, identity: str) -> Path | None:
    """Returns the page of a run that has ended where it is resumed: in ``folder``, beside it, or above the checkpoint;
    None if there is none."""
    above = [*Path(str(trainer.ckpt_path)).parents[:2]] if trainer.ckpt_path is not None else []
    for place in [folder, *folder.glob("version_*"), *folder.parent.glob("version_*"), *above]:
        with suppress(OSError, ValueError):
            run = json.loads((place / "run.json").read_text())
            if run.get("id") == identity and (run["status"], run["steps"]) == ("finished", trainer.global_step):
                return next(place.glob("*.html"), place / "run.json")
    return None


def _free(folder: Path, names: set[str]) -> Path:
    if not any((folder / name).exists() for name in names):
        return folder
    numbers = [path.name.removeprefix("version_") for path in folder.glob("version_*")]
    number = max([int(text) for text in numbers if text.isdecimal()], default=0) + 1
    while True:
        chosen = folder / f"version_{number}"
        try:
            chosen.mkdir()  # one of several concurrent processes succeeds
        except FileExistsError:
            number += 1
        else:
            return chosen
