"""The settings of a run (seed, rank, dtype of everything that is not quantized), and the runs of a plugin."""

import os
import weakref
from typing import Any, Literal

import torch
from torch import nn

from lightning_lowbit._lightning import (
    NAME,
    Callback,
    DeepSpeedStrategy,
    LightningModule,
    MisconfigurationException,
    Precision,
    StochasticWeightAveraging,
    Trainer,
    TrainerFn,
    WeightAveraging,
    rank_zero_warn,
    say_once,
)
from lightning_lowbit._torch.sharding import is_flat_buffer
from lightning_lowbit.checks import choose, integer, some
from lightning_lowbit.nn.layers.layer import quantized_layers
from lightning_lowbit.patterns import clean_name
from lightning_lowbit.units import has_units

#: By the name that plugins take: Lightning's precision name, and the dtype.
COMPUTE_DTYPES: dict[str, tuple[Literal["bf16-mixed", "16-mixed", "32-true"], torch.dtype]] = {
    "bf16": ("bf16-mixed", torch.bfloat16),
    "fp16": ("16-mixed", torch.float16),
    "fp32": ("32-true", torch.float32),
}

# Names of Lightning and, without "torch.", of torch. The command reads them in this source.
_SPELLINGS = {
    "auto": "auto", "bf16": "bf16", "fp16": "fp16", "fp32": "fp32",
    "bf16-mixed": "bf16", "16-mixed": "fp16", "32-true": "fp32", "16": "fp16", "32": "fp32",
    "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32",
}  # fmt: skip
_16_TRUE = (
    "'{0}-true' makes parameters 16 bits wide, and the plugin leaves them as they are. Give {1!r} for the computation; "
    "for parameters of that width, convert the model before training, as with model.bfloat16()."
)
_64 = "the GEMMs of quantized layers have float32 at most. Give 'fp32'."
# Why a dtype is what it is: an argument does not change it, or none says it.
AS_TRAINED, UNDECIDED = "as the checkpoint was trained", "until a run decides"
_FP8 = "FP8 is not for what is left in high precision. FP8Precision quantizes the layers; here give 'auto' or 'bf16'."
_INSTEAD = {
    "bf16-true": _16_TRUE.format("bf16", "bf16"),
    "16-true": _16_TRUE.format("16", "fp16"),
    "64": _64,
    "64-true": _64,
    "float64": _64,
    "double": _64,
    "transformer-engine": _FP8,
    "transformer-engine-float16": _FP8,
    "float8_e4m3fn": _FP8,
    "float8_e5m2": _FP8,
}


def checked_run(plugin: Precision, module: nn.Module) -> tuple[Trainer, LightningModule]:
    """Returns the Trainer and the module; ``MisconfigurationException`` for what does not go with a plugin."""
    name = type(plugin).__name__
    trainer = getattr(module, "_trainer", None)
    if trainer is None or not isinstance(module, LightningModule):
        raise MisconfigurationException(
            f"{name} is a plugin of {NAME}.Trainer; it got {type(module).__name__} outside a Trainer. Else call "
            "lightning_lowbit.convert(model, casts), and set keys with lightning_lowbit.nn.LayerKeys."
        )
    if isinstance(trainer.strategy, DeepSpeedStrategy):
        raise MisconfigurationException(
            f"{name} runs backward passes and optimizers itself, and so does DeepSpeed. Train with DDPStrategy, "
            "FSDPStrategy, or ModelParallelStrategy (FSDP2), which shards what ZeRO does."
        )
    packed = [clean_name(name) for name, layer in quantized_layers(module).items() if layer.lowbit.frozen is not None]
    averaging = averaging_of(trainer)
    if packed and averaging is not None:
        raise MisconfigurationException(
            f"{type(averaging).__name__} averages all parameters, and codes, which {some(packed)} keep instead of a "
            "weight, are no numbers to average. Call unpack_frozen(model) first, or leave out the callback."
        )
    return trainer, module


def check_whole_weights(model: nn.Module) -> None:
    """Raises ``MisconfigurationException`` for flat buffers, of whose weights no amax can be shared."""
    if any(is_flat_buffer(parameter) for parameter in model.parameters()):
        raise MisconfigurationException(
            "shared_amax needs whole weights between steps, and FSDP1 keeps flat buffers alone. Train with "
            "FSDPStrategy(use_orig_params=True), its default, or with ModelParallelStrategy (FSDP2)."
        )


def averaging_of(trainer: Any) -> Callback | None:
    """Returns the callback of Lightning that evaluates averages of weights, or leaves them in the model, or None."""
    kinds = (StochasticWeightAveraging, WeightAveraging)
    return next((callback for callback in trainer.callbacks if isinstance(callback, kinds)), None)


def data_rank(trainer: Trainer) -> int:
    """Returns the data-parallel rank of this process; model-parallel ranks with the same data share one."""
    sampler = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
    return int(sampler.get("rank", trainer.global_rank))


def data_ranks(trainer: Trainer) -> int:
    """Returns how many ranks have batches of their own; model-parallel ranks with the same data count as one."""
    sharding = trainer.distributed_sampler_kwargs
    return int(sharding["num_replicas"]) if sharding else 1


def global_seed() -> int:
    """Returns the seed of ``seed_everything``, which stores it in the environment; 0 without one."""
    return int(os.environ.get("PL_GLOBAL_SEED", 0))


def seed_or_global(seed: int | None) -> int:
    """Returns a seed, or the global one for None; a ``ValueError`` for one that not all generators take."""
    integer("seed", seed, 0, "a whole number", at_most=2**32 - 1, or_none=True)
    return global_seed() if seed is None else seed


class ComputeDtype:
    """The dtype of everything that is not quantized: an argument, or for ``"auto"`` one that all devices have.

    It is ``asked`` for by a key of :data:`COMPUTE_DTYPES`, another name of it, such as Lightning's ``"bf16-mixed"`` and
    ``32``, or a ``torch.dtype``; anything else is a ``ValueError``. For ``"auto"``, ``name`` is ``"bf16"`` until a run
    decides. ``reason`` says why it is this one, and ``is_followed`` whether a checkpoint decided.
    """

    def __init__(self, asked: str | int | torch.dtype) -> None:
        is_name = isinstance(asked, str | int | torch.dtype) and not isinstance(asked, bool)
        spelling = str(asked).removeprefix("torch.") if is_name else ""
        if spelling in _INSTEAD:
            raise ValueError(f"compute_dtype={asked!r}: {_INSTEAD[spelling]}")
        if spelling not in _SPELLINGS:
            choose("compute_dtype", asked, ("auto", *COMPUTE_DTYPES))
        name = _SPELLINGS[spelling]
        self.is_auto, self._is_decided, self.is_followed = name == "auto", False, False
        self.name = "bf16" if self.is_auto else name
        self.reason = UNDECIDED if self.is_auto else f"as compute_dtype={asked!r} says"

    @property
    def dtype(self) -> torch.dtype:
        return COMPUTE_DTYPES[self.name][1]

    @property
    def precision(self) -> Literal["bf16-mixed", "16-mixed", "32-true"]:
        """Lightning's name."""
        return COMPUTE_DTYPES[self.name][0]

    def restart(self) -> None:
        """Lets another run decide."""
        self._is_decided = self.is_followed = False

    def decide(self, strategy: Any) -> None:
        """Takes bf16 for ``"auto"`` if the devices of all processes have it, else float32. Call it in all of them."""
        device = strategy.root_device
        if self.is_auto and not self._is_decided:
            here = has_units(torch.bfloat16, device)
            everywhere = strategy.reduce_boolean_decision(here)
            self._take("bf16" if everywhere else "fp32", f"as {_whose(device, here, everywhere)} bf16 instructions")
            if not everywhere:
                say_once(f"compute_dtype='auto': float32, {self.reason}.")
        self._say_if_wide(device)

    def follow(self, name: str, device: torch.device) -> bool:
        """Takes for ``"auto"`` the dtype of a checkpoint, bf16 or float32; returns whether that is another one."""
        if not self.is_auto or name == self.name or name not in ("bf16", "fp32"):
            return False
        self._take(name, AS_TRAINED)
        self.is_followed = True
        say_once(f"compute_dtype='auto': {str(self.dtype).removeprefix('torch.')}, {self.reason}.")
        self._say_if_wide(device)
        return True

    def _take(self, name: str, reason: str) -> None:
        self.name, self.reason, self._is_decided = name, reason, True

    def _say_if_wide(self, device: torch.device) -> None:
        if device.type == "cpu" and not has_units(self.dtype, device):
            text = f"This CPU has no instructions for {self.dtype}: products of it are computed in float32 and rounded"
            advice = "compute_dtype='fp32' (in a recipe: --trainer.plugins.init_args.compute_dtype fp32) is faster"
            say_once(f"{text}, {self.reason}." if self.reason == AS_TRAINED else f"{text}. {advice}.")


def _whose(device: torch.device, here: bool, everywhere: bool) -> str:
    if everywhere:
        return "all devices have"
    return "the device of another process has no" if here else f"this {device.type.upper()} has no"


def compute_dtype(plugin: Precision) -> torch.dtype:
    """Returns the dtype of high-precision matrix products under a plugin of this package or Lightning."""
    dtype = getattr(plugin, "compute_dtype", None)  # of this package's plugins
    if isinstance(dtype, torch.dtype):
        return dtype
    names = {"bf16": torch.bfloat16, "16": torch.float16, "64": torch.float64}
    return next((dtype for name, dtype in names.items() if name in str(plugin.precision)), torch.float32)


class Runs:
    """The run whose state a plugin has. Several Trainers may use a plugin, one after another.

    another Trainer trains                          a run begins, with the state of the constructor
    any Trainer evaluates the model of the run      with its state
    another Trainer evaluates another model         with the state of the constructor
    one whose state was displaced meanwhile         an error, unless a checkpoint restores the state
    the Trainer trains after it evaluated a         with the state before that checkpoint
      checkpoint

    ``before`` is the state before the evaluation that is under way, or before the first checkpoint that was evaluated;
    ``is_of_checkpoint`` says whether the state now is that of such a checkpoint.
    """

    def __init__(self) -> None:
        self._trainer: weakref.ref[Any] | None = None
        self._trained: tuple[weakref.ref[Any], weakref.ref[nn.Module]] | None = None  # Trainer and model of the state
        self._displaced: list[weakref.ref[Any]] = []  # Trainers and models
        self._is_lost = False
        self.handles: list[Any] = []  # of hooks of the optimizers
        self.before: dict[str, Any] = {}
        self.is_of_checkpoint = False

    def __reduce__(self) -> tuple[Any, ...]:
        return Runs, ()  # weak references cannot be pickled

    @property
    def trainer(self) -> Any:
        """The Trainer that uses the plugin now, or did last; None if there is none anymore."""
        return None if self._trainer is None else self._trainer()

    @property
    def ranks(self) -> int:
        """The number of data-parallel ranks; 1 without a Trainer."""
        return 1 if self.trainer is None else data_ranks(self.trainer)

    def warn_of_ranks(self, before: int) -> None:
        """Warns of another number of data-parallel ranks: a mean over fewer rows has larger gradients."""
        if self.trainer is not None and not self.is_evaluating and before != self.ranks:
            rank_zero_warn(
                f"The checkpoint was trained on {before} data-parallel ranks, and this run has {self.ranks}. "
                "Delayed scaling begins with the amaxes of gradients of then. If a rank has more or fewer rows now, "
                "call trainer.precision_plugin.scale_gradients(rows_before / rows_now) in on_train_start."
            )

    @property
    def is_evaluating(self) -> bool:
        return self.trainer is not None and self.trainer.state.fn not in (None, TrainerFn.FITTING)

    @property
    def has_averages(self) -> bool:
        """True if a callback evaluates and saves averages of weights, which the histories have not seen."""
        return self.trainer is not None and averaging_of(self.trainer) is not None

    @property
    def is_trained(self) -> bool:
        """True if the state is that of a training."""
        return self._trained is not None

    def is_first(self) -> bool:
        """Returns whether no Trainer has used the plugin yet."""
        return self._trainer is None

    def go_on(self, trainer: Any, model: nn.Module, has_state: bool, has_histories: bool) -> bool:
        """Notes that a Trainer begins to use the plugin; returns whether it continues the run of the plugin's state.

        With ``has_state``, evaluation depends on the state, which another run would lose; with ``has_histories``, the
        same run of another model would lose amaxes.
        """
        before, trained = (self.trainer, None) if self._trained is None else (self._trained[0](), self._trained[1]())
        self._trainer = weakref.ref(trainer)
        goes_on = trainer is before or (self.is_evaluating and model is trained)
        user = model if self.is_evaluating else trainer
        self._is_lost = any(displaced() is user for displaced in self._displaced)
        if self._trained is not None and not goes_on:
            self._displaced += self._trained if has_state else ()
            self._trained = None
        elif self._trained is not None and model is not trained and has_histories:
            self._displaced.append(self._trained[1])
            self._trained = self._trained[0], weakref.ref(model)
        if not self.is_evaluating:
            self._trained = weakref.ref(trainer), weakref.ref(model)
            if not self._is_lost:
                self._forget(trainer, model)
        return goes_on

    def restored(self, model: nn.Module | None) -> None:
        """Notes that a checkpoint has given the state of the run."""
        self.is_of_checkpoint = self.is_evaluating and not self._is_lost  # of a lost run it is the only state
        self._is_lost = False
        self._forget(self.trainer, model)

    def check(self) -> None:
        """Raises ``MisconfigurationException`` if the plugin has lost the state of the run that goes on."""
        if self._is_lost:
            raise MisconfigurationException(
                "This plugin has been used with another model since it trained this one, and no longer has the phase, "
                "λ, casts and amaxes of that training. Make a plugin for each Trainer, or give ckpt_path, a checkpoint "
                "of the training."
            )

    def _forget(self, *users: Any) -> None:
        self._displaced = [displaced for displaced in self._displaced if displaced() not in (None, *users)]
