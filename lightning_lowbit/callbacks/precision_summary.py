"""Shows which layers compute in few bits: measured in the first step, averaged at the end."""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from lightning_lowbit._lightning import LightningModule, Trainer
from lightning_lowbit.atomic_files import replace_file
from lightning_lowbit.callbacks.base import LowBitCallback
from lightning_lowbit.callbacks.layer_table import (
    flops_text,
    layer_data,
    layers_and_casts,
    merge_numbers,
    speed_on_cpu,
)
from lightning_lowbit.checks import some
from lightning_lowbit.distributed import connect
from lightning_lowbit.nn import Coverage, GemmCounter
from lightning_lowbit.nn.casts.linear_casts import PHASES, LinearCasts
from lightning_lowbit.nn.conversion.reasons import Reasons
from lightning_lowbit.nn.layers.classes import Inventory
from lightning_lowbit.nn.layers.speed import Speed
from lightning_lowbit.precision import LowBitPrecision
from lightning_lowbit.precision.run_settings import compute_dtype
from lightning_lowbit.report.blocks import Section, Table, Text
from lightning_lowbit.report.contents import casts_in_words
from lightning_lowbit.report.formatting import by_kind
from lightning_lowbit.report.run_folder import run_folder
from lightning_lowbit.report.tables import show
from lightning_lowbit.saved_state import NUMBER, OneOf, count

_NEW = "new since the model was converted; the next fit converts it"
_REASONS = 3  # of an alert
_BLENDING = "blending"  # steps with λ below 1, in any phase: operands are still in high precision


class _Stretch(NamedTuple):
    """Optimizer steps by phase, all with the same casts of layers; none for those that a checkpoint has."""

    casts: dict[str, LinearCasts]
    steps: Counter[str]


class _Part(NamedTuple):
    """Bits per operand in some optimizer steps; older checkpoints do not say in which phase."""

    bits: float
    steps: int
    phase: str | None = None


def _mean_bits(parts: list[_Part]) -> float:
    return sum(part.bits * part.steps for part in parts) / sum(part.steps for part in parts)


def _merge(parts: list[_Part]) -> list[_Part]:
    """Returns one part per phase and number of bits, in an order that does not tell how often a run was resumed."""
    steps = Counter[tuple[str, float]]()
    for part in parts:
        steps[part.phase or "", part.bits] += part.steps
    return [_Part(bits, number, phase or None) for (phase, bits), number in sorted(steps.items())]


def _is_phase(value: object) -> bool:
    """a phase"""
    return value in (_BLENDING, *PHASES)


def _trained(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _share_text(measured: Coverage) -> str:
    share = f"Coverage: {measured.share:.1%} of {flops_text(measured.flops)}"
    return f"{share} per micro-batch and process have two quantized operands"


class PrecisionSummary(LowBitCallback):
    """Shows which layers compute in which casts, and how much of the arithmetic that is.

    When training starts, it prints a table of layers, parameters and casts, why GEMMs are emulated, how fast this CPU
    multiplies codes (measured once on a machine), and in what else is computed. After the first training step it prints
    the coverage: FLOPs of GEMMs with two quantized operands over the FLOPs of all matrix products, attentions and
    convolutions. At the end it prints the bits of a GEMM operand, block scales included, averaged over FLOPs and steps;
    steps with λ below 1 count as high precision. A JSON file has the same. FLOPs are counted in one micro-batch of the
    first process, in eager code, and again where an epoch begins with other layers, or trains others: that step is
    several times slower, with more memory and the same results. One whose ``training_step`` returns None is left out.

    Args:
        filename: of the JSON file in the logger's directory.
        quiet: prints nothing.

    Attributes:
        counter: FLOPs of the first training step, by module and GEMM; None before.
        shows_coverage: True, so the plugin does not print the coverage.

    Examples:
        >>> Trainer(plugins=[FP4Precision("nvfp4")], callbacks=[PrecisionSummary()])
    """

    shows_coverage = True

    saved: ClassVar[Any] = {
        "steps": {_is_phase: count},
        "since?": {_is_phase: count},
        "past?": [OneOf((NUMBER, count, _is_phase), (NUMBER, count))],
    }

    def __init__(self, filename: str = "precision_summary.json", quiet: bool = False) -> None:
        if Path(filename).name != filename or not filename.endswith(".json"):
            raise ValueError(f"filename is a name that ends in .json, without folders; got {filename!r}.")
        self.filename, self.quiet = filename, quiet
        self.counter: GemmCounter | None = None
        self._counting = self._has_backward = False
        self._inventory: Inventory | None = None
        self._added: set[str] = set()
        self._trained: set[str] = set()  # names of parameters
        self._folder: Path | None = None
        self._model: nn.Module | None = None
        self._dtype, self._why = torch.float32, ""
        self._speed: Speed | None = None
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._steps: Counter[str] = Counter()  # optimizer steps by phase
        self._since: list[_Stretch] = []  # since the last change of layers
        self._past: list[_Part] = []  # of each time before

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.counter, self._counting, self._model = None, False, pl_module
        self._inventory, self._added, self._trained = Inventory(pl_module), set(), _trained(pl_module)
        connect(trainer.model or pl_module)  # for sizes of weights that FSDP1 has flattened
        plugin = trainer.precision_plugin
        self._dtype, self._why = compute_dtype(plugin), getattr(plugin, "compute_reason", "")
        self._speed = speed_on_cpu(pl_module, self._dtype) if trainer.is_global_zero else None
        casts = GemmCounter(pl_module).casts()
        self._since = [stretch if stretch.casts else _Stretch(casts, stretch.steps) for stretch in self._since]
        folder = trainer.log_dir  # all processes ask for it together
        self._folder = Path(folder) if folder is not None and trainer.loggers and "://" not in folder else None
        self._show(trainer, *self._layer_blocks(pl_module), *casts_in_words(pl_module))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0 and self._inventory is not None:
            added, removed = self._inventory.take(pl_module)
            self._added |= added.keys()
            before, self._trained = self._trained, _trained(pl_module)
            if self.counter is not None and (added or removed or before != self._trained):
                self._past, self._since = self._past + self._parts(self._since), []
                self.counter = None  # counts anew
        if self.counter is None:
            self.counter = GemmCounter(pl_module)
            self.counter.__enter__()
            self._counting, self._has_backward = True, False

    def on_before_backward(self, trainer: Trainer, *_: Any) -> None:
        self._has_backward = True
        if self.counter is not None:
            self.counter.paused = False

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Stops counting before the optimizer's own arithmetic; notes the phase of the step."""
        phase = self._phase(trainer)
        self._steps[phase] += 1
        self._stretch().steps[phase] += 1
        if pl_module.automatic_optimization:
            self._stop(trainer)
        elif self._counting and self.counter is not None:
            self.counter.paused = True  # until the next forward or backward pass: a batch may have several steps

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._stop(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stops counting after a skipped batch, for which ``on_train_batch_end`` is not called."""
        self._abandon()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.counter is not None and self._steps:
            steps = ", ".join(f"{phase}: {count}" for phase, count in self._steps.items())
            phases = f" (optimizer steps in {steps})" if self.counter.casts() else ""  # without layers of casts: none
            self._show(trainer, Text(f"Average over the run: {self.average_bits():.2f} bits per GEMM operand{phases}."))
            self._write(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._abandon()

    def _abandon(self) -> None:
        if self._close():
            self.counter = None

    def _stop(self, trainer: Trainer) -> None:
        if trainer.lightning_module.automatic_optimization and not self._has_backward:
            self._abandon()  # training_step returned None
        elif self._close():
            self._show(trainer, *self._coverage_blocks())
            self._write(trainer)

    def _close(self) -> bool:
        was_counting, self._counting = self._counting, False
        if was_counting and self.counter is not None:
            self.counter.__exit__(None, None, None)
        return was_counting

    def coverage(self, phase: str | None = None) -> Coverage:
        """Returns the measured coverage, for the current casts or a phase's; ``RuntimeError`` before the first step."""
        if self.counter is None or self._counting:
            raise RuntimeError("Coverage is measured in the first training step, and there was none yet.")
        return self.counter.coverage(phase, torch.finfo(self._dtype).bits)

    def average_bits(self) -> float:
        """Averages the bits of a GEMM operand over FLOPs and all optimizer steps, each with its layers and casts."""
        measured = self.coverage("fqt").average_bits
        return _mean_bits(self._past + self._parts(self._since)) if self._steps else measured

    def _bits_by_phase(self) -> dict[str, float]:
        parts = self._past + self._parts(self._since) if self._steps else [_Part(self.average_bits(), 1, "fqt")]
        phases = dict.fromkeys(part.phase for part in parts if part.phase is not None)
        return {phase: _mean_bits([part for part in parts if part.phase == phase]) for phase in phases}

    def _stretch(self) -> _Stretch:
        casts = {} if self.counter is None else self.counter.casts()
        stretch = next((one for one in self._since if one.casts == casts), None)
        if stretch is None:
            self._since.append(stretch := _Stretch(casts, Counter()))
        return stretch

    def _parts(self, stretches: list[_Stretch]) -> list[_Part]:
        return [
            _Part(self._measured(phase, casts).average_bits, number, phase)
            for casts, steps in stretches
            for phase, number in steps.items()
        ]

    def _measured(self, phase: str, casts: dict[str, LinearCasts] | None = None) -> Coverage:
        """Returns the coverage in steps of a phase, with the current casts if there are none."""
        assert self.counter is not None and not self._counting
        return self.counter.coverage("bf16" if phase == _BLENDING else phase, torch.finfo(self._dtype).bits, casts)

    def report_data(self, trainer: Trainer) -> dict[str, Any]:
        data: dict[str, Any] = {"layers": list(layer_data(self._model, self._dtype)) if self._model is not None else []}
        if self._why:
            data |= {"compute_dtype": _name(self._dtype), "compute_dtype_because": self._why}
        if self._speed is not None:
            data["gemms_of_codes"] = self._speed.data()
        if self.counter is not None and not self._counting:
            measured = self.coverage("fqt")
            data |= {
                "flops_per_micro_batch": measured.flops,
                "coverage": measured.share,
                "bits_by_phase": self._bits_by_phase(),
                "average_bits": self.average_bits(),
                "optimizer_steps_by_phase": dict(self._steps),
                "uncovered": measured.uncovered,
                "uncovered_because": self._reasons(measured),
                "uncounted": list(measured.uncounted),
            }
        return data

    def report_alerts(self, trainer: Trainer) -> list[str]:
        if self.counter is None or self._counting:
            return []
        measured = self.coverage("fqt")
        if not measured.outside > measured.flops / 2:
            return []
        rest = merge_numbers(measured.uncovered, self._reasons(measured))[:_REASONS]
        reasons = "; ".join(f"{flops / measured.flops:.1%} {name} ({why})" for name, _, flops, why in rest)
        return [f"{_share_text(measured)}. The rest: {reasons}."]

    def report_sections(self, trainer: Trainer) -> list[Section]:
        if self._model is None:
            return []
        coverage: list[Table | Text] = [Text("No training step was taken.")]
        if self.counter is not None and not self._counting:
            average = Text(f"Average over the run: {self.average_bits():.2f} bits per GEMM operand.")
            coverage = [*self._coverage_blocks(), average]
        return [
            Section("Layers and casts", tuple(self._layer_blocks(self._model))),
            Section("Coverage", tuple(coverage)),
        ]

    def _layer_blocks(self, model: nn.Module) -> list[Table | Text]:
        why = [Text(f"What is not quantized is computed in {_name(self._dtype)}, {self._why}.")] if self._why else []
        speed = [] if self._speed is None else [Text(f"{self._speed}")]
        return [*layers_and_casts(model, self._dtype), *speed, *why]

    def _coverage_blocks(self) -> list[Table | Text]:
        measured = self.coverage("fqt")
        last = ", with the last layers and casts" if self._has_changed() else ""
        blocks: list[Table | Text] = [
            Text(f"{_share_text(measured)}; {measured.average_bits:.2f} bits per GEMM operand{last}.")
        ]
        if measured.uncovered:
            rows = [
                [name, str(count), flops_text(flops), f"{flops / measured.flops:.1%}", why]
                for name, count, flops, why in merge_numbers(measured.uncovered, self._reasons(measured))
            ]
            blocks.append(Table(["not covered", "modules", "FLOPs", "share", "why"], rows))
        if self.counter is not None and (idle := [*by_kind(self.counter.idle())]):
            blocks.append(
                Text(
                    f"Converted, but not called in the counted step: {some(idle)}. Where a module reads their weights "
                    "itself, it computes in high precision."
                )
            )
        if measured.uncounted:
            names = ", ".join(measured.uncounted)
            blocks.append(Text(f"Matrix products whose FLOPs are not known are left out of all numbers: {names}."))
        return blocks

    def _has_changed(self) -> bool:
        """Returns whether earlier steps had other bits than the same phase has now, or other casts."""
        return len(self._since) > 1 or any(
            part.phase is None or not math.isclose(part.bits, self._measured(part.phase).average_bits)
            for part in self._past
        )

    def _reasons(self, measured: Coverage) -> dict[str, str]:
        if self._model is None or self._inventory is None:
            return dict.fromkeys(measured.uncovered, "")
        reasons, added = Reasons(self._model), self._added | self._inventory.added(self._model).keys()
        return {name: _NEW if name in added else str(reasons.of(name)) for name in measured.uncovered}

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
        past, since = self._past, sum((stretch.steps for stretch in self._since), Counter[str]())
        if self.counter is not None and not self._counting:
            past, since = past + self._parts(self._since), Counter()  # a resumed run may have other casts
        rows = [[value for value in part if value is not None] for part in _merge(past)]
        return {"steps": dict(self._steps), "since": dict(since), "past": rows}

    def _load(self, state: dict[str, Any]) -> None:
        self._steps = Counter(state["steps"])
        self._since = [_Stretch({}, Counter(state.get("since", self._steps)))]  # of the casts in the checkpoint
        self._past = [_Part(*part) for part in state.get("past", [])]
