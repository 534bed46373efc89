"""What trackers of experiments get beside metrics: casts and coverage of a run, and its page as an artifact."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lightning_lowbit._lightning import MLFlowLogger, Trainer, WandbLogger, rank_zero_warn

_LONGEST = 5000  # characters of a tag, which MLflow limits


def begin(trainer: Trainer, precision: Mapping[str, str]) -> None:
    """Says what the run is: plugin and casts. In the first process."""
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger):
            settings = {f"lightning_lowbit/{name}": text for name, text in precision.items()}
            _try(logger, partial(_set_config, settings=settings))
        elif isinstance(logger, MLFlowLogger):
            _try(logger, partial(_set_tags, texts=precision))


def finish(trainer: Trainer, run: Mapping[str, Any], page: Path) -> None:
    """Hands over the page, and the share of the arithmetic that was quantized. In the first process.

    Args:
        trainer: of the run.
        run: what ``run.json`` holds.
        page: the file.
    """
    bits = run["summary"].get("average_bits")
    numbers = {"coverage": run["coverage"], "average_bits": bits, "alerts": len(run["alerts"])}
    numbers = {f"lightning_lowbit/{name}": number for name, number in numbers.items() if number is not None}
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger):
            _try(logger, partial(_to_wandb, numbers=numbers, page=page))
        elif isinstance(logger, MLFlowLogger):
            _try(logger, partial(_to_mlflow, numbers=numbers, page=page))


def _set_config(logger: WandbLogger, settings: Mapping[str, str]) -> None:
    logger.experiment.config.update(settings, allow_val_change=True)


def _to_wandb(logger: WandbLogger, numbers: Mapping[str, float], page: Path) -> None:
    import wandb

    logger.experiment.summary.update(dict(numbers))
    artifact = wandb.Artifact(f"report-{logger.experiment.id}", type="report")
    artifact.add_file(str(page), name=page.name)
    artifact.add_file(str(page.with_name("run.json")), name="run.json")
    logger.experiment.log_artifact(artifact)


def _to_mlflow(logger: MLFlowLogger, numbers: Mapping[str, float], page: Path) -> None:
    for name, number in numbers.items():
        logger.experiment.log_metric(logger.run_id, name, float(number))
    for path in (page, page.with_name("run.json")):
        logger.experiment.log_artifact(logger.run_id, str(path))


def _set_tags(logger: MLFlowLogger, texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
        logger.experiment.set_tag(logger.run_id, f"lightning_lowbit/{name}", text[:_LONGEST])


def _try(logger: Any, send: Callable[[Any], Any]) -> None:
    """No training ends because a tracker is not reached."""
    try:
        send(logger)
    except Exception as error:
        rank_zero_warn(f"{type(logger).__name__} did not take what RunReport knows: {type(error).__name__}: {error}")
