"""Sends plugin and casts to experiment trackers at the start of a run, and coverage and its page at the end."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning_lowbit._lightning import MLFlowLogger, Trainer, WandbLogger, rank_zero_warn

_LONGEST = 5000  # characters of a tag in MLflow


def send_start(trainer: Trainer, precision: Mapping[str, str]) -> None:
    def to_wandb(logger: WandbLogger) -> None:
        settings = {f"lightning_lowbit/{name}": text for name, text in precision.items()}
        logger.experiment.config.update(settings, allow_val_change=True)

    def to_mlflow(logger: MLFlowLogger) -> None:
        for name, text in precision.items():
            logger.experiment.set_tag(logger.run_id, f"lightning_lowbit/{name}", text[:_LONGEST])

    _send(trainer, to_wandb, to_mlflow)


def send_results(trainer: Trainer, run: Mapping[str, Any], page: Path) -> None:
    bits = run["summary"].get("average_bits")
    numbers = {"coverage": run["coverage"], "average_bits": bits, "alerts": len(run["alerts"])}
    numbers = {f"lightning_lowbit/{name}": number for name, number in numbers.items() if number is not None}
    files = page, page.with_name("run.json")

    def to_wandb(logger: WandbLogger) -> None:
        import wandb

        logger.experiment.summary.update(numbers)
        artifact = wandb.Artifact(f"report-{logger.experiment.id}", type="report")
        for path in files:
            artifact.add_file(str(path), name=path.name)
        logger.experiment.log_artifact(artifact)

    def to_mlflow(logger: MLFlowLogger) -> None:
        for name, number in numbers.items():
            logger.experiment.log_metric(logger.run_id, name, float(number))
        for path in files:
            logger.experiment.log_artifact(logger.run_id, str(path))

    _send(trainer, to_wandb, to_mlflow)


def _send(trainer: Trainer, to_wandb: Callable[[Any], None], to_mlflow: Callable[[Any], None]) -> None:
    """Calls the functions; a tracker that cannot be reached does not end the training."""
    for logger in trainer.loggers:
        try:
            if isinstance(logger, WandbLogger):
                to_wandb(logger)
            elif isinstance(logger, MLFlowLogger):
                to_mlflow(logger)
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            rank_zero_warn(f"{type(logger).__name__} did not take what RunReport knows: {message}")
