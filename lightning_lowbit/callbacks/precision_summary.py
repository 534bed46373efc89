"""What is trained in few bits, and what is not: said at the start, measured in the first step, averaged at the end."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_lowbit._lightning import LightningModule, Trainer
from lightning_lowbit.atomic_files import replace_file
from lightning_lowbit.callbacks.base import LowBitCallback
from lightning_lowbit.nn import OPERANDS, Coverage, GemmCounter, LinearCasts, QuantizedLayer
from lightning_lowbit.nn.keys import clean_name
from lightning_lowbit.precision import LowBitPrecision
from lightning_lowbit.precision.run_settings import compute_dtype
from lightning_lowbit.report.console import Table, Text, show
from lightning_lowbit.report.html import Section
from lightning_lowbit.report.run_folder import run_folder

# Steps of progressive quantization, whatever their phase: operands are on their way, and still dense.
_BLENDING = "blending"


class PrecisionSummary(LowBitCallback):
    """Shows which layers compute in which casts, and how much of the arithmetic that is.

    When training starts, a table of layers, parameters and casts. After the first training step, the coverage: FLOPs of
    GEMMs whose operands are both quantized over the FLOPs of all matrix products, attentions and convolutions, counted
    while they ran, and which modules make up the rest. At the end, the bits of a GEMM operand, block scales included,
    averaged over FLOPs and over the steps in each phase; steps of progressive quantization, with λ below 1, count as
    high precision.

    Printed by the first process, as wide as the terminal or the notebook, and written to the logger's directory. The
    counts are those of one micro-batch in one process. The counted step runs as eager code: several times slower, with
    more memory, and with the same results.

    Args:
        filename: of the JSON file in the logger's directory.
        quiet: prints nothing.

    Attributes:
        counter: FLOPs of the first training step, by module and GEMM; None before.
        shows_coverage: so that the plugin need not.

    Example:
        >>> Trainer(plugins=[FP4Precision("nvfp4")], callbacks=[PrecisionSummary()])
    """

    shows_coverage = True

    def __init__(self, filename: str = "precision_summary.json", quiet: bool = False) -> None:
        if Path(filename).name != filename or not filename.endswith(".json"):
            raise ValueError(f"filename is a name that ends in .json, without folders; got {filename!r}.")
        self.filename, self.quiet = filename, quiet
        self.counter: GemmCounter | None = None
        self._counting = False
        self._steps: Counter[str] = Counter()  # optimizer steps by phase
        self._folder: Path | None = None
        self._model: nn.Module | None = None
        self._hp_bits = 32

    # --- when ---

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Shows the layers."""
        self.counter, self._counting, self._model = None, False, pl_module
        if trainer.global_step == 0:  # another run
            self._steps.clear()
        self._hp_bits = torch.finfo(compute_dtype(trainer.precision_plugin)).bits
        folder = trainer.log_dir  # all processes ask for it together
        self._folder = Path(folder) if folder is not None and trainer.loggers and "://" not in folder else None
        self._show(trainer, layer_table(pl_module), *cast_legend(pl_module))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Begins to count, in the first step."""
        if self.counter is None:
            self.counter = GemmCounter(pl_module)
            self.counter.__enter__()
            self._counting = True

    def on_before_backward(self, trainer: Trainer, *_: Any) -> None:
        """Counts again after an optimizer step."""
        if self.counter is not None:
            self.counter.paused = False

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Ends the count before the optimizer's own arithmetic; notes the phase of the step."""
        self._steps[self._phase(trainer)] += 1
        if pl_module.automatic_optimization:
            self._stop(trainer)
        elif self._counting and self.counter is not None:
            self.counter.paused = True  # until the next forward or backward pass: the batch may have other steps

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Ends the count at the latest."""
        self._stop(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ends the count of a batch that was skipped, which has no end."""
        self._abandon()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Shows and writes the average."""
        if self.counter is not None and self._steps:
            steps = ", ".join(f"{phase}: {count}" for phase, count in self._steps.items())
            text = (
                f"Average over the run: {self.average_bits():.2f} bits per GEMM operand (optimizer steps in {steps})."
            )
            self._show(trainer, Text(text))
            self._write(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leaves no counter behind, nor half a measurement."""
        self._abandon()

    def _abandon(self) -> None:
        if self._counting:
            self._close()
            self.counter = None

    def _stop(self, trainer: Trainer) -> None:
        if self._counting:
            self._close()
            self._show(trainer, *self._coverage_blocks())
            self._write(trainer)

    def _close(self) -> None:
        assert self.counter is not None
        self._counting = False
        self.counter.__exit__(None, None, None)

    # --- what ---

    def coverage(self, phase: str | None = None) -> Coverage:
        """What was measured in the first training step, for the casts of a phase or those in force.

        Raises:
            RuntimeError: there was no training step yet.
        """
        if self.counter is None or self._counting:
            raise RuntimeError("Coverage is measured in the first training step, and there was none yet.")
        return self.counter.coverage(phase, self._hp_bits)

    def average_bits(self) -> float:
        """Bits of a GEMM operand, block scales included, averaged over FLOPs and the optimizer steps of each phase."""
        steps = self._steps or Counter({"fqt": 1})
        return sum(count * self._bits(phase) for phase, count in steps.items()) / sum(steps.values())

    def _bits(self, phase: str) -> float:
        return self.coverage("bf16" if phase == _BLENDING else phase).average_bits

    def report_data(self, trainer: Trainer) -> dict[str, Any]:
        """What a machine wants to know."""
        data: dict[str, Any] = {"layers": list(_layers(self._model)) if self._model is not None else []}
        if self.counter is not None and not self._counting:
            measured = self.coverage("fqt")
            data |= {
                "flops_per_micro_batch": measured.flops,
                "coverage": measured.share,
                "bits_by_phase": {phase: self._bits(phase) for phase in self._steps or ["fqt"]},
                "average_bits": self.average_bits(),
                "optimizer_steps_by_phase": dict(self._steps),
                "uncovered": measured.uncovered,
                "uncounted": list(measured.uncounted),
            }
        return data

    def report_sections(self, trainer: Trainer) -> list[Section]:
        """The tables, for a report."""
        if self._model is None:
            return []
        measured = self.counter is not None and not self._counting
        coverage = self._coverage_blocks() if measured else [Text("No training step was taken.")]
        if measured:
            coverage.append(Text(f"Average over the run: {self.average_bits():.2f} bits per GEMM operand."))
        return [
            Section("Layers and casts", (layer_table(self._model), *cast_legend(self._model))),
            Section("Coverage", tuple(coverage)),
        ]

    def _coverage_blocks(self) -> list[Table | Text]:
        measured = self.coverage("fqt")
        head = Text(
            f"Coverage: {measured.share:.1%} of {_flops(measured.flops)} per micro-batch and process have two "
            f"quantized operands; {measured.average_bits:.2f} bits per GEMM operand."
        )
        blocks: list[Table | Text] = [head]
        if measured.uncovered:
            rows = [
                [name or "(outside any module)", str(count), _flops(flops), f"{flops / measured.flops:.1%}"]
                for name, count, flops in _merge_numbers(measured.uncovered)
            ]
            blocks.append(Table(["not covered", "modules", "FLOPs", "share"], rows))
        if measured.uncounted:
            names = ", ".join(measured.uncounted)
            blocks.append(Text(f"Matrix products whose FLOPs are not known are left out of all numbers: {names}."))
        return blocks

    def _phase(self, trainer: Trainer) -> str:
        plugin = trainer.precision_plugin
        if not isinstance(plugin, LowBitPrecision):
            return "fqt"
        return _BLENDING if plugin.is_blending else plugin.phase

    def _show(self, trainer: Trainer, *blocks: Table | Text) -> None:
        if trainer.is_global_zero and not self.quiet:
            show(trainer, *blocks)

    def _write(self, trainer: Trainer) -> None:
        if trainer.is_global_zero and self._folder is not None:
            folder = run_folder(trainer, self._folder, self.filename)
            folder.mkdir(parents=True, exist_ok=True)
            replace_file(folder / self.filename, json.dumps(self.report_data(trainer), indent=1))

    def state_dict(self) -> dict[str, Any]:
        """The steps in each phase: a resumed run's average is that of the whole run."""
        return {"steps": dict(self._steps)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes them up."""
        self._steps = Counter(state_dict["steps"])


# --- tables -----------------------------------------------------------------------------------------------------------


def layer_table(model: nn.Module) -> Table:
    """The layers of a model with parameters and casts; layers alike but for numbers in their names are one row."""
    rows: dict[tuple[Any, ...], list[str]] = {}
    parameters: Counter[tuple[Any, ...]] = Counter()
    labels = _labels(model)
    counted: set[nn.Parameter] = set()  # tied ones belong to several modules
    for name, module in model.named_modules():
        name = clean_name(name)
        if isinstance(module, QuantizedLayer):
            out_features, in_features = module.weight_matrix().shape[-2:]
            size, casts = f"{in_features} → {out_features}", labels[module.full_casts]
            where = _executed(module)
        elif any(True for _ in module.parameters(recurse=False)):
            size, casts, where = "", "high precision", ""
        else:
            continue
        key = (re.sub(r"\d+", "*", name), type(module).__name__, size, casts, where)
        rows.setdefault(key, []).append(name)
        own = set(module.parameters(recurse=False)) - counted
        parameters[key] += sum(parameter.numel() for parameter in own)
        counted |= own
    body = [
        [_range(names), kind, size, _count(parameters[key]), casts, where]
        for key, names in rows.items()
        for _, kind, size, casts, where in [key]
    ]
    quantized = sum(count for key, count in parameters.items() if key[3] != "high precision")
    total = sum(parameters.values())
    share = f"{quantized / total:.1%}" if total else "none"
    caption = f"{_count(quantized)} of {_count(total)} parameters ({share}) are weights and biases of converted layers."
    return Table(["layers", "class", "in → out", "parameters", "casts", "GEMMs"], body, caption)


def _executed(layer: QuantizedLayer) -> str:
    """Where the quantized GEMMs of a layer run: natively, emulated, or some so and some so."""
    casts, quantized = layer.full_casts, layer.full_casts.quantized_gemms
    native = layer.native_gemms(layer.weight.device, casts)
    if not quantized or not native:
        return "emulated" if quantized else ""
    rest = [gemm for gemm in quantized if gemm not in native]
    return f"native {', '.join(native)}; emulated {', '.join(rest)}" if rest else "native"


def cast_legend(model: nn.Module) -> list[Table]:
    """What the casts in the table are, operand by operand; ``~`` is stochastic rounding."""
    labels = _labels(model)
    shown = [_describe(casts) for casts in labels]
    names = dict.fromkeys(name for casts in shown for name in casts)
    rows = [[name, *(casts.get(name, "") for casts in shown)] for name in names]
    return [Table(["operand", *labels.values()], rows)] if labels else []


def _describe(casts: LinearCasts) -> dict[str, str]:
    """The six operands in words, and what there is beside them."""
    beside = {
        "hadamard": ", ".join(f"{gemm} {transform}" for gemm, transform in casts.hadamard.items()),
        "subtract_mean": ", ".join(casts.subtract_mean),
        "surrogate": ", ".join(f"{operand} {kind}" for operand, kind in casts.surrogate.items()),
        "smooth": casts.smooth or "",
    }
    operands = {operand: str(casts.cast_of(operand) or "hp") for operand in OPERANDS}
    return operands | {name: text for name, text in beside.items() if text}


def _labels(model: nn.Module) -> dict[LinearCasts, str]:
    distinct = dict.fromkeys(m.full_casts for m in model.modules() if isinstance(m, QuantizedLayer))
    return {
        casts: str(casts) if " " not in str(casts) else f"casts {number}"
        for number, casts in enumerate(distinct, start=1)
    }


def _layers(model: nn.Module) -> Iterable[dict[str, Any]]:
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLayer):
            out_features, in_features = module.weight_matrix().shape[-2:]
            casts = _describe(module.full_casts)
            native = list(module.native_gemms(module.weight.device, module.full_casts))
            yield {"name": clean_name(name), "in": in_features, "out": out_features, "casts": casts, "native": native}


def _merge_numbers(flops: Mapping[str, int]) -> list[tuple[str, int, int]]:
    """(names, how many, FLOPs) of entries alike but for the numbers in their names, largest first."""
    groups: dict[str, list[str]] = {}
    for name in flops:
        groups.setdefault(re.sub(r"\d+", "*", name), []).append(name)
    merged = [(_range(names), len(names), sum(flops[name] for name in names)) for names in groups.values()]
    return sorted(merged, key=lambda row: -row[2])


def _range(names: list[str]) -> str:
    """``layers.0.up`` … ``layers.7.up`` as ``layers.{0-7}.up``."""
    columns = zip(*(re.split(r"(\d+)", name) for name in names), strict=True)
    return "".join(
        parts[0] if len(set(parts)) == 1 else f"{{{_runs(sorted(set(map(int, parts))))}}}" for parts in columns
    )


def _runs(numbers: list[int]) -> str:
    """``0,2-5`` of 0, 2, 3, 4, 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)


def _count(number: int) -> str:
    return _scaled(number, (("B", 1e9), ("M", 1e6), ("k", 1e3)))


def _flops(number: int) -> str:
    return _scaled(number, (("PFLOPs", 1e15), ("TFLOPs", 1e12), ("GFLOPs", 1e9), ("MFLOPs", 1e6), ("FLOPs", 1)))


def _scaled(number: int, units: Iterable[tuple[str, float]]) -> str:
    for unit, size in units:
        if number >= size:
            return f"{number / size:.2f} {unit}" if size > 1 else f"{number} {unit}"
    return str(number)
