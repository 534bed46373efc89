"""What is written of a run beside its metrics: how it ended, its precision and configuration, what callbacks say."""

import math
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_lowbit._lightning import LightningModule, SaveConfigCallback, SIGTERMException, Trainer
from lightning_lowbit.nn import OPERANDS, QuantizedLayer
from lightning_lowbit.precision import LowBitPrecision
from lightning_lowbit.report.cast_words import in_words
from lightning_lowbit.report.html import Section, Table, Text


def ask(trainer: Trainer, method: str, kind: type) -> tuple[list[Any], list[Section]]:
    """What the callbacks have to say, each as a list or dictionary, and a section for each that fails to."""
    answers, failures = [], []
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        try:
            if hasattr(callback, method):
                answers.append(kind(getattr(callback, method)(trainer)))
        except Exception:
            text = Text(traceback.format_exc(), preformatted=True)
            failures.append(Section(f"{type(callback).__name__}.{method} failed", [text]))
    return answers, failures


def status_of(exception: BaseException | None) -> str:
    """How a run ended, in a word."""
    if exception is None:
        return "finished"
    return "interrupted" if isinstance(exception, (KeyboardInterrupt, SIGTERMException)) else "failed"


def name_of(folder: Path) -> str:
    """What a run is called that lies in a folder."""
    parts = folder.resolve().parts
    return "/".join(parts[-2:] if parts[-1].startswith("version_") else parts[-1:])


def precision_of(trainer: Trainer) -> dict[str, str]:
    """The plugin's class and its casts."""
    plugin = trainer.precision_plugin
    if not isinstance(plugin, LowBitPrecision):
        return {"plugin": type(plugin).__name__, "casts": str(plugin.precision)}
    parts = [str(plugin.casts), *(f"{pattern}: {casts}" for pattern, casts in plugin.overrides.items())]
    parts += [f"only {', '.join(plugin.only)}"] if plugin.only else []
    parts += [f"without {', '.join(plugin.skip)}"] if plugin.skip else []
    return {"plugin": type(plugin).__name__, "casts": "; ".join(parts)}


def configuration_of(folder: Path, trainer: Trainer, pl_module: LightningModule) -> str:
    """What the run was given: the command line's file, or hyperparameters and the plugin's settings."""
    if any(isinstance(callback, SaveConfigCallback) for callback in trainer.callbacks):  # type: ignore[attr-defined]
        with suppress(OSError):
            return (folder / "config.yaml").read_text(errors="replace")  # Lightning's command line wrote it
    lines = [f"{type(pl_module).__name__}:"]
    lines += [f"  {name}: {value}" for name, value in pl_module.hparams.items()] or ["  (no saved hyperparameters)"]
    plugin = trainer.precision_plugin
    lines += [f"{type(plugin).__name__}:", f"  casts: {precision_of(trainer)['casts']}"]
    if isinstance(plugin, LowBitPrecision):
        lines += [f"  {name}: {getattr(plugin, name)}" for name in ("compute_dtype", "seed", "exact")]
    return "\n".join(lines)


def strict(value: Any) -> Any:
    """What JSON can hold, with null for numbers that are not finite."""
    if isinstance(value, Mapping):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(item) for item in value]
    if isinstance(value, Tensor):
        return strict(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, (int, str)) or value is None else str(value)


def coverage_of(trainer: Trainer) -> float | None:
    """The share of FLOPs in quantized layers, as the plugin estimated it in the first step; None if it did not."""
    plugin = trainer.precision_plugin
    coverage = plugin.coverage_line.coverage if isinstance(plugin, LowBitPrecision) else None
    return None if coverage is None or coverage.unit != "FLOPs" else coverage.share


def coverage_alerts(trainer: Trainer) -> list[str]:
    """What the plugin says where little is quantized."""
    plugin = trainer.precision_plugin
    text = plugin.coverage_line.text if isinstance(plugin, LowBitPrecision) else ""
    return [text] if text else []


def cast_sections(pl_module: LightningModule) -> list[Section]:
    """A legend of the casts of a model's layers, such as ``e2m1/e4m3:1x16+fp32~``."""
    layers = [module for module in pl_module.modules() if isinstance(module, QuantizedLayer)]
    distinct = dict.fromkeys(layer.full_casts for layer in layers)
    casts = dict.fromkeys(cast for casts in distinct for name in OPERANDS if (cast := casts.cast_of(name)) is not None)
    rows = [[str(cast), in_words(cast)] for cast in casts]
    return [Section("Casts in words", [Table(["cast", "what it does to an operand"], rows)])] if rows else []
