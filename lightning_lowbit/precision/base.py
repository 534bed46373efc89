"""One precision plugin for every Trainer: it converts the model, and owns all state that quantisation needs.

    Trainer.fit ── convert_module          the model's linear layers become QuantLinear, in place
                ── train_step_context      autocast; keys of this micro-batch's random bits
                ── optimizer_step          counts the step

The state (step, micro-batch, phase) is saved under one key whatever the plugin's class, as tensors and primitives. The
model's ``state_dict`` is untouched: its weights load into the unconverted model.
"""

import os
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import FSDPPrecision
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from lightning_lowbit.nn.casts import PHASES, LinearCasts
from lightning_lowbit.nn.convert import CastsLike, convert, plan, set_phase
from lightning_lowbit.nn.keys import LayerKeys
from lightning_lowbit.quant.cast import choose

_CHECKPOINT_KEY = "lightning_lowbit"

_COMPUTE_DTYPES: dict[str, tuple[Literal["bf16-mixed", "32-true"], torch.dtype]] = {
    "bf16": ("bf16-mixed", torch.bfloat16),
    "fp32": ("32-true", torch.float32),
}


def global_seed() -> int:
    """The seed given to ``lightning.seed_everything``, which leaves it in the environment; 0 without one."""
    return int(os.environ.get("PL_GLOBAL_SEED", 0))


def _as_list(patterns: Iterable[str]) -> Iterable[str]:
    return patterns if isinstance(patterns, str) else list(patterns)  # a string is refused when it is used


class LowBitPrecision(FSDPPrecision):
    """Trains the linear layers of any ``LightningModule`` with the given casts.

    Args:
        casts: a preset's name, :class:`LinearCasts`, or a mapping of its fields (and ``preset`` to start from).
        skip: patterns of layers to leave in high precision, e.g. ``["lm_head"]``; see :func:`convert`.
        only: patterns of the layers to convert; None for all.
        overrides: other casts for some layers, by pattern.
        compute_dtype: ``"bf16"`` (autocast) or ``"fp32"``: what everything else computes in, and what operands are
            rounded to before they are quantised. Parameters stay as they are.
        seed: of the random bits of stochastic rounding; None takes that of ``seed_everything``, or 0.
        exact: emulate GEMMs in float32 over exact operands, rounded once. Slow; for comparisons.

    Attributes:
        phase: the phase in force, set by :meth:`set_phase`.
        step: optimizer steps taken.
        micro_batch: training steps taken since the last optimizer step.

    Raises:
        ValueError: an argument is not one of the above; a pattern matches no layer (when the model is converted).
        MisconfigurationException: the plugin is used outside ``lightning.pytorch.Trainer``.

    Example:
        >>> Trainer(plugins=[LowBitPrecision("nvfp4", skip=["lm_head"])])
    """

    def __init__(
        self,
        casts: CastsLike,
        *,
        skip: Iterable[str] = (),
        only: Iterable[str] | None = None,
        overrides: Mapping[str, CastsLike] | None = None,
        compute_dtype: str = "bf16",
        seed: int | None = None,
        exact: bool = False,
    ) -> None:
        precision, self._compute_dtype = _COMPUTE_DTYPES[choose("compute_dtype", compute_dtype, _COMPUTE_DTYPES)]
        super().__init__(precision)
        self.casts = LinearCasts.of(casts)
        self.overrides = {pattern: LinearCasts.of(value) for pattern, value in (overrides or {}).items()}
        self.skip, self.only = _as_list(skip), None if only is None else _as_list(only)
        self.seed, self.exact = global_seed() if seed is None else seed, exact
        self.phase = "fqt"
        self.step = 0
        self.micro_batch = 0
        self._root: nn.Module | None = None
        self._trainer: weakref.ref[Any] | None = None
        self._device = torch.device("cpu")
        self._rank = 0
        self._keys: LayerKeys | None = None

    @property
    def compute_dtype(self) -> torch.dtype:
        """What everything that is not quantised computes in."""
        return self._compute_dtype

    # --- conversion and phases ---

    def plan(self, model: nn.Module) -> dict[str, LinearCasts]:
        """The casts that each layer of a model would get, by name, without changing it. Raises as conversion does."""
        return plan(model, self.casts, self.skip, self.only, self.overrides)

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Converts the model in place."""
        trainer = getattr(module, "_trainer", None) if isinstance(module, LightningModule) else None
        if trainer is None:
            raise MisconfigurationException(
                f"{type(self).__name__} is a plugin of lightning.pytorch.Trainer and converts a LightningModule; it "
                f"got {type(module).__name__} outside a Trainer. With Fabric or plain PyTorch, call "
                "lightning_lowbit.convert(model, casts) and set keys with lightning_lowbit.nn.LayerKeys."
            )
        if self._trainer is not None and self._trainer() is not trainer:  # another run
            self.step, self.micro_batch, self.phase = 0, 0, "fqt"
        self._trainer = weakref.ref(trainer)
        strategy = trainer.strategy
        self._device, self._rank = strategy.root_device, trainer.global_rank
        convert(module, self.casts, self.skip, self.only, self.overrides, self.exact)
        set_phase(module, self.phase)
        self._root = module
        self._keys = LayerKeys(module, self.seed)
        return module

    def set_phase(self, phase: str) -> None:
        """Puts all layers into a phase: ``"fqt"``, ``"qaf"``, ``"hp-forward"`` or ``"bf16"``.

        Raises:
            ValueError: there is no such phase.
        """
        self.phase = choose("phase", phase, PHASES)
        if self._keys is not None:
            for layer in self._keys.layers.values():
                layer.casts = layer.full_casts.phase(phase)

    # --- one step ---

    def convert_input(self, data: Any) -> Any:
        """Leaves batches as they are, as Lightning's ``bf16-mixed`` does (FSDP's would cast them)."""
        return data

    def forward_context(self) -> AbstractContextManager[None]:
        """Autocast to the compute dtype."""
        if self._keys is not None:
            self._keys.fill_(self.step, self.micro_batch, self._rank, self._device)
        if self._compute_dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._compute_dtype)

    @contextmanager
    def train_step_context(self) -> Generator[None, None, None]:
        """The forward context, with random bits of this micro-batch's own (the backward pass still uses them)."""
        with self.forward_context():
            yield
        self.micro_batch += 1

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Steps, and counts the step."""
        result = super().optimizer_step(optimizer, model, closure, **kwargs)
        self.step += 1
        self.micro_batch = 0
        return result

    # --- gradient clipping, on every strategy ---

    def connect(self, model: nn.Module, optimizers: list[Any], lr_schedulers: list[Any]) -> Any:
        """Keeps the wrapped model: under FSDP1 only its root can compute a gradient norm."""
        self._root = model
        return super().connect(model, optimizers, lr_schedulers)

    def clip_grad_by_norm(self, optimizer: Any, clip_val: int | float) -> None:
        """Clips the gradients to a total norm."""
        if isinstance(self._root, FullyShardedDataParallel):
            self._root.clip_grad_norm_(clip_val)
        else:
            torch.nn.utils.clip_grad_norm_(self.main_params(optimizer), clip_val)

    # --- state ---

    def state_dict(self) -> dict[str, Any]:
        """Empty: Lightning would file it under the name of the class, see :meth:`on_save_checkpoint`."""
        return {}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds the state under a key that does not depend on the plugin's class."""
        state = {"step": self.step, "micro_batch": self.micro_batch, "phase": self.phase, "seed": self.seed}
        checkpoint[_CHECKPOINT_KEY] = state

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Takes the state of a checkpoint; one that was saved without this plugin, or weights only, has none."""
        state = checkpoint.get(_CHECKPOINT_KEY)
        if state is None:
            rank_zero_warn(
                "The checkpoint holds no state of lightning_lowbit (saved without the plugin, or weights only): its "
                f"weights are loaded, and quantisation starts anew at step {self.step}, in phase {self.phase!r}. If it "
                "was trained in another phase, call plugin.set_phase(...)."
            )
            return
        if state["seed"] != self.seed:
            rank_zero_warn(
                f"The checkpoint's random bits are those of seed {state['seed']}, this run's of seed {self.seed}: it "
                f"will not repeat the uninterrupted run. Give seed={state['seed']} for that."
            )
        self.step, self.micro_batch = state["step"], state["micro_batch"]
        self.set_phase(state["phase"])
