"""Settings of a run: Trainer, seed, data-parallel rank, and the dtype of what is not quantized."""

import os
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import nn

from lightning_lowbit._lightning import (
    NAME,
    DeepSpeedStrategy,
    LightningModule,
    MisconfigurationException,
    Precision,
    Trainer,
    WeightAveraging,
    say_once,
)
from lightning_lowbit.checks import choose, some
from lightning_lowbit.nn.conversion.layers import quantized_layers
from lightning_lowbit.nn.gemm import SLOW_ON_CPU
from lightning_lowbit.nn.keys import clean_name

#: By the name that plugins take: Lightning's precision name, and the dtype.
COMPUTE_DTYPES: dict[str, tuple[Literal["bf16-mixed", "16-mixed", "32-true"], torch.dtype]] = {
    "bf16": ("bf16-mixed", torch.bfloat16),
    "fp16": ("16-mixed", torch.float16),
    "fp32": ("32-true", torch.float32),
}

# Other names of the same: of Lightning, without "torch." those of torch.
_SPELLINGS = {
    **{name: name for name in ("auto", *COMPUTE_DTYPES)},
    **dict.fromkeys(("bf16-mixed", "bfloat16"), "bf16"),
    **dict.fromkeys(("16", "16-mixed", "float16", "half"), "fp16"),
    **dict.fromkeys(("32", "32-true", "float32", "float"), "fp32"),
}
_16_TRUE = (
    "'{0}-true' makes parameters 16 bits wide, and the plugin leaves them as they are. Give {1!r} for the computation; "
    "for parameters of that width, convert the model before training, as with model.bfloat16()."
)
_64 = "the GEMMs of quantized layers have float32 at most. Give 'fp32'."
_FP8 = "FP8 is not for what is left in high precision. FP8Precision quantizes the layers; here give 'auto' or 'bf16'."
_INSTEAD = {
    "bf16-true": _16_TRUE.format("bf16", "bf16"),
    "16-true": _16_TRUE.format("16", "fp16"),
    **dict.fromkeys(("64", "64-true", "float64", "double"), _64),
    **dict.fromkeys(("transformer-engine", "transformer-engine-float16", "float8_e4m3fn", "float8_e5m2"), _FP8),
}


def run_of(plugin: Precision, module: nn.Module) -> tuple[Trainer, LightningModule]:
    """Returns the Trainer of a module and the module; raises ``MisconfigurationException`` outside a Trainer, and for
    a strategy or callback that would not compute what it should."""
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
    packed = [clean_name(layer) for layer, each in quantized_layers(module).items() if each.frozen is not None]
    averaging = next((callback for callback in trainer.callbacks if isinstance(callback, WeightAveraging)), None)
    if packed and averaging is not None:
        raise MisconfigurationException(
            f"{type(averaging).__name__} averages all parameters, and codes, which {some(packed)} keep instead of a "
            "weight, are no numbers to average. Call unpack_frozen(model) first, or leave out the callback."
        )
    return trainer, module


def data_rank(trainer: Trainer) -> int:
    """The data-parallel rank of this process: model-parallel ranks that see the same data have the same."""
    sampler = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
    return int(sampler.get("rank", trainer.global_rank))


def global_seed() -> int:
    """The seed of ``seed_everything``, which stores it in the environment; 0 without one."""
    return int(os.environ.get("PL_GLOBAL_SEED", 0))


def as_list(patterns: Iterable[str]) -> Iterable[str]:
    is_list = isinstance(patterns, Iterable) and not isinstance(patterns, str)
    return list(patterns) if is_list else patterns  # anything else is kept: selecting by it raises


def has_bf16(device: torch.device) -> bool:
    """Whether a device has instructions for bf16. One that does not tell is taken to have them."""
    if device.type == "cpu":
        return torch.bfloat16 not in SLOW_ON_CPU
    if device.type == "mps":
        return torch.backends.mps.is_macos_or_newer(14, 0)  # autocast to bf16 needs it
    answer = getattr(getattr(torch, device.type, None), "is_bf16_supported", None)
    return answer is None or bool(answer(including_emulation=False))


class ComputeDtype:
    """The dtype of what is not quantized: an argument, or for ``"auto"`` what the devices of a run have.

    Args:
        asked: ``"auto"``, a key of :data:`COMPUTE_DTYPES`, another name of it, such as Lightning's ``"bf16-mixed"`` and
            ``32``, or a ``torch.dtype``.

    Attributes:
        name: a key of :data:`COMPUTE_DTYPES`. Of ``"auto"`` it is ``"bf16"`` until a run decides.

    Raises:
        ValueError: another dtype.
    """

    def __init__(self, asked: str | int | torch.dtype) -> None:
        is_name = isinstance(asked, str | int | torch.dtype) and not isinstance(asked, bool)
        spelling = str(asked).removeprefix("torch.") if is_name else ""
        if spelling in _INSTEAD:
            raise ValueError(f"compute_dtype={asked!r}: {_INSTEAD[spelling]}")
        if spelling not in _SPELLINGS:
            choose("compute_dtype", asked, ("auto", *COMPUTE_DTYPES))
        name = _SPELLINGS[spelling]
        self.is_auto, self._is_decided = name == "auto", False
        self.name = "bf16" if self.is_auto else name

    @property
    def dtype(self) -> torch.dtype:
        return COMPUTE_DTYPES[self.name][1]

    @property
    def precision(self) -> Literal["bf16-mixed", "16-mixed", "32-true"]:
        """Lightning's name."""
        return COMPUTE_DTYPES[self.name][0]

    def restart(self) -> None:
        """Another run decides anew."""
        self._is_decided = False

    def decide(self, strategy: Any) -> None:
        """Takes bf16 for ``"auto"`` if the devices of all processes have it, else float32. All processes must call it.

        Says once what takes long.
        """
        device = strategy.root_device
        if self.is_auto and not self._is_decided:
            here = has_bf16(device)
            everywhere = strategy.reduce_boolean_decision(here)
            self.name, self._is_decided = "bf16" if everywhere else "fp32", True
            if not everywhere:
                whose = f"this {device.type.upper()} has" if not here else "the device of another process has"
                say_once(f"compute_dtype='auto': float32, as {whose} no bf16 instructions.")
        self._say_if_slow(device)

    def follow(self, name: str, device: torch.device) -> bool:
        """Takes for ``"auto"`` the dtype of a checkpoint, bf16 or float32; returns whether that is another one."""
        if not self.is_auto or name == self.name or name not in ("bf16", "fp32"):
            return False
        self.name, self._is_decided = name, True
        say_once(f"compute_dtype='auto': {str(self.dtype).removeprefix('torch.')}, as the checkpoint was trained.")
        self._say_if_slow(device)
        return True

    def _say_if_slow(self, device: torch.device) -> None:
        if device.type == "cpu" and self.dtype in SLOW_ON_CPU:
            say_once(
                f"This CPU has no instructions for {self.dtype}. What is not quantized takes many times as long as "
                "with compute_dtype='fp32' (in a recipe: --trainer.plugins.init_args.compute_dtype fp32)."
            )


def compute_dtype(plugin: Precision) -> torch.dtype:
    """The dtype of high-precision matrix products under a precision plugin of this package or Lightning."""
    dtype = getattr(plugin, "compute_dtype", None)  # of this package's plugins
    if isinstance(dtype, torch.dtype):
        return dtype
    names = {"bf16": torch.bfloat16, "16": torch.float16, "64": torch.float64}
    return next((dtype for name, dtype in names.items() if name in str(plugin.precision)), torch.float32)
