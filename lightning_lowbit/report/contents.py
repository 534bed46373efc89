"""The contents of a report besides metrics: outcome, precision, configuration, environment, other callbacks."""

import importlib.metadata
import math
import platform
import re
import shlex
import sys
import traceback
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_lowbit._lightning import LightningModule, SaveConfigCallback, SIGTERMException, Trainer
from lightning_lowbit.nn import OPERANDS
from lightning_lowbit.nn.layers.layer import quantized_layers
from lightning_lowbit.precision import LowBitPrecision
from lightning_lowbit.quant import Cast
from lightning_lowbit.quant.cast import Scale
from lightning_lowbit.report.blocks import Section, Table, Text


def call_reports(trainer: Trainer, method: str, failures: list[Section]) -> list[Any]:
    """Calls a method of all callbacks that have it, and joins the lists, or the items of mappings, that they return."""
    answers: list[Any] = []
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        try:
            if hasattr(callback, method):
                answer = getattr(callback, method)(trainer)
                answers += list(answer.items() if isinstance(answer, Mapping) else answer)
        except Exception:
            text = Text(traceback.format_exc(), preformatted=True)
            failures.append(Section(f"{type(callback).__name__}.{method} failed", [text]))
    return answers


def status_of(exception: BaseException | None) -> str:
    if exception is None:
        return "finished"
    return "interrupted" if isinstance(exception, (KeyboardInterrupt, SIGTERMException)) else "failed"


def name_of(folder: Path) -> str:
    parts = folder.resolve().parts
    return "/".join(parts[-2:] if parts[-1].startswith("version_") else parts[-1:])


def precision_of(trainer: Trainer) -> dict[str, str]:
    plugin = trainer.precision_plugin
    if not isinstance(plugin, LowBitPrecision):
        return {"plugin": type(plugin).__name__, "casts": str(plugin.precision)}
    parts = [str(plugin.casts), *(f"{pattern}: {casts}" for pattern, casts in plugin.overrides.items())]
    parts += [f"only {', '.join(plugin.only)}"] if plugin.only else []
    parts += [f"without {', '.join(plugin.skip)}"] if plugin.skip else []
    return {"plugin": type(plugin).__name__, "casts": "; ".join(parts)}


def configuration_of(folder: Path, trainer: Trainer, pl_module: LightningModule) -> str:
    if any(isinstance(callback, SaveConfigCallback) for callback in trainer.callbacks):  # type: ignore[attr-defined]
        with suppress(OSError):
            return (folder / "config.yaml").read_text(errors="replace")  # which Lightning's command line wrote
    lines = [f"{type(pl_module).__name__}:"]
    lines += [f"  {name}: {value}" for name, value in pl_module.hparams.items()] or ["  (no saved hyperparameters)"]
    plugin = trainer.precision_plugin
    lines += [f"{type(plugin).__name__}:", f"  casts: {precision_of(trainer)['casts']}"]
    if isinstance(plugin, LowBitPrecision):
        lines += [f"  {name}: {getattr(plugin, name)}" for name in ("compute_dtype", "seed", "exact")]
    return "\n".join(lines)


def best_values(
    trainer: Trainer, names: Iterable[str], extremes: Mapping[str, tuple[float, float]]
) -> dict[str, float]:
    """Returns the best values of validation losses and of metrics that a callback monitors."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    modes = {getattr(callback, "monitor", None): getattr(callback, "mode", "min") for callback in callbacks}
    known = [name for name in names if name in modes or re.search("loss|perplexity|ppl", name)]
    return {name: extremes[name][modes.get(name) == "max"] for name in known if name in extremes}


def strict(value: Any) -> Any:
    """Returns a value for strict JSON: null for NaN and infinity, text for other types."""
    if isinstance(value, Mapping):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(item) for item in value]
    if isinstance(value, Tensor):
        return strict(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, (int, str)) or value is None else str(value)


def coverage_alerts(trainer: Trainer) -> list[str]:
    plugin = trainer.precision_plugin
    text = plugin.coverage_line.text if isinstance(plugin, LowBitPrecision) else ""
    return [text] if text else []


def casts_in_words(pl_module: LightningModule) -> list[Table]:
    distinct = dict.fromkeys(layer.full_casts for layer in quantized_layers(pl_module).values())
    casts = dict.fromkeys(cast for casts in distinct for name in OPERANDS if (cast := casts.cast_of(name)) is not None)
    rows = [[str(cast), in_words(cast)] for cast in casts]
    return [Table(["cast", "what it does to an operand"], rows)] if rows else []


_BLOCKS = {"tensor": "the tensor", "row": "each row along the contraction"}
_STATISTICS = {
    "absmax": "the largest magnitude",
    "absmean": "the mean magnitude",
    "minmax": "least and largest element",
}


def in_words(cast: Cast) -> str:
    """Describes a cast in words, in the order of its notation.

    Examples:
        >>> in_words(Cast.from_spec('{"element": "e4m3", "scale": {"format": "fp32", "block": "tensor"}}'))
        'elements in e4m3, rounded to nearest; one scale in fp32 for the tensor'
    """
    rounding = "rounded stochastically" if cast.rounding == "stochastic" else "rounded to nearest"
    parts = [f"elements in {cast.element}, {rounding}", *_scale_in_words(cast.scale)]
    parts += ["in passes in bfloat16 what enters the GEMM is rounded to it"] if cast.round_to_bfloat16 else []
    return "; ".join(parts)


def _scale_in_words(scale: Scale) -> list[str]:
    block = scale.block
    tile = f"each tile of {block[0]} x {block[1]}" if isinstance(block, tuple) else ""
    of = tile or _BLOCKS.get(str(block), f"each {block} elements along the contraction")
    times = "" if scale.factor == 1 else f" times {scale.factor:g}"
    phrases = {
        f"one scale in {scale.format} for {of}": True,
        f"another scale in fp32 for {'each row' if scale.two_level == 'row' else 'the tensor'}": bool(scale.two_level),
        "scales are rounded up, so that nothing saturates": scale.rounding == "up",
        "scales are rounded stochastically": scale.rounding == "stochastic",
        f"scales are rounded by {scale.rounding!r}": scale.rounding not in ("nearest", "up", "rceil", "stochastic"),
        f"and corrected in groups of {scale.correction}, so that rounding is unbiased": scale.correction is not None,
        "the largest element of a block becomes 6 or 4, whichever has the smaller error "
        f"({scale.four_over_six})": scale.four_over_six is not None,
        f"elements are multiplied by {scale.prescale:g} before": scale.prescale != 1,
        f"2^{scale.margin} of room above the largest magnitude": bool(scale.margin),
        f"scales are made from {_STATISTICS[scale.statistic]}{times}": (scale.statistic, scale.factor) != ("absmax", 1),
        f"from the largest magnitudes of the {scale.history} steps before": scale.source == "delayed",
    }
    return [text for text, holds in phrases.items() if holds]


def environment(trainer: Trainer, started: datetime) -> dict[str, Any]:
    versions = {"python": platform.python_version(), "torch": torch.__version__}  # which names the build
    for package in ("lightning", "lightning_lowbit", "transformers", "datasets"):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    device = trainer.strategy.root_device
    return {
        "started": started.isoformat(" ", "seconds"),
        "command": shlex.join(sys.argv),
        **versions,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "processes": trainer.world_size,
        "strategy": type(trainer.strategy).__name__,
        "CPU": _cpu_name(),
        "threads": torch.get_num_threads(),
        "operating system": platform.platform(),
    }


def _cpu_name() -> str:
    with suppress(OSError):
        if match := re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return match[1]
    return platform.processor() or platform.machine()


def peak_memory(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
