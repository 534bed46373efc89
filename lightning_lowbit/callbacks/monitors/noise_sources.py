"""Where the sums of gradient and noise come from: a training step that is run again, or what layers leave of one.

A source prepares before the last micro-batch of a step, and is asked after its backward pass. See
:class:`lightning_lowbit.GradientNoiseMonitor`.
"""

import math
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from lightning_lowbit._lightning import (
    Callback,
    DeepSpeedStrategy,
    LightningModule,
    MisconfigurationException,
    Trainer,
    is_overridden,
    is_param_in_hook_signature,
)
from lightning_lowbit.callbacks.monitors.base import Monitor
from lightning_lowbit.callbacks.monitors.latent_weights import converted_layers
from lightning_lowbit.callbacks.monitors.second_draw import RepeatableStep
from lightning_lowbit.distributed import all_reduce_, all_reduce_world_, local_gradient, sharding_of
from lightning_lowbit.metrics.noise import gradient_noise_sums
from lightning_lowbit.nn import QuantizedLayer
from lightning_lowbit.nn.watch import Watch
from lightning_lowbit.precision.loss_scaling import scaler_of
from lightning_lowbit.quant.statistics import wide_dtype


class Source(Protocol):
    """Where the sums of a measurement come from.

    Attributes:
        without_noise: what it means where there is none, in words.
    """

    without_noise: str

    def check(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Training starts: refuses what it cannot measure.

        Raises:
            MisconfigurationException: it cannot measure this run.
        """

    def prepare(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The last micro-batch of a step that is to be measured begins."""

    def take(self, layers: Mapping[str, QuantizedLayer]) -> dict[str, Tensor] | None:
        """After its backward pass: of each layer noise and signal ``[2]``, of whole weights; None if there are none."""

    def cancel(self) -> None:
        """That micro-batch is over, or will not come."""


class Draws:
    """Compares the gradient of training with another draw of it, or two further draws."""

    without_noise = "Both draws of the gradient were always the same: nothing was rounded stochastically."

    def __init__(self) -> None:
        self._step: RepeatableStep | None = None
        self._trainer: Trainer | None = None

    def check(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuses steps that cannot run twice, and gradients that cannot be told apart."""
        if is_param_in_hook_signature(pl_module.training_step, "dataloader_iter", explicit=True):
            raise MisconfigurationException(
                "GradientNoiseMonitor runs a training step again, and one that takes a dataloader_iter would fetch the "
                "next batch: let it take a batch, or use kind='layers'."
            )
        if isinstance(trainer.strategy, DeepSpeedStrategy):
            raise MisconfigurationException(
                "GradientNoiseMonitor reads gradients of parameters, which DeepSpeed keeps to itself: use "
                "kind='layers', or train with DDP, FSDPStrategy or ModelParallelStrategy."
            )
        assert trainer.model is not None
        for part in FullyShardedDataParallel.fsdp_modules(trainer.model):
            if part._handle is not None and not part._handle._use_orig_params:
                raise MisconfigurationException(
                    "GradientNoiseMonitor tells gradients of layers apart, and use_orig_params=False makes one of "
                    "many: leave that argument of FSDPStrategy out, or use kind='layers'."
                )

    def prepare(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Waits for the training step."""
        self._trainer, self._step = trainer, RepeatableStep(trainer, pl_module)

    def cancel(self) -> None:
        """Lets go of it."""
        if self._step is not None:
            self._step.cancel()
        self._trainer = self._step = None

    def take(self, layers: Mapping[str, QuantizedLayer]) -> dict[str, Tensor] | None:
        """Draws."""
        step, trainer = self._step, self._trainer
        if step is None or trainer is None or not step.has_begun:
            return None
        weights: dict[str, Tensor] = {}
        for name, layer in layers.items():
            if layer.weight.requires_grad and not any(layer.weight is weight for weight in weights.values()):
                weights[name] = layer.weight
        if not weights:
            return None
        try:
            draws = self._draws(trainer, step, list(weights.values()))
        finally:
            self.cancel()
        if draws is None:
            return None
        pairs = [_compare(*three) for three in zip(*draws, weights.values(), strict=True)]
        pairs = all_reduce_(pairs, [sharding_of(weight).groups for weight in weights.values()], dist.ReduceOp.SUM)
        device = trainer.strategy.root_device
        pairs = [_unscaled(pair, trainer).to(device) for pair in pairs]
        return dict(zip(weights, pairs, strict=True))

    def _draws(
        self, trainer: Trainer, step: RepeatableStep, weights: list[Tensor]
    ) -> tuple[list[Tensor | None], list[Tensor | None]] | None:
        """Two gradients, of parts on this rank; None where neither has any."""
        model, module = trainer.model, trainer.lightning_module
        assert model is not None

        def gradients(loss: Tensor) -> list[Tensor | None]:
            return _gradients(model, loss, weights)

        # The gradient of training is that of this loss alone, and nothing but that: nobody had a hand in it.
        is_comparable = (
            trainer.accumulate_grad_batches == 1
            and not is_overridden("backward", module)
            and not getattr(model, "_comm_hooks", None)
            and not any(getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in module.parameters())
            and not is_overridden("on_after_backward", module)
            and not any(map(_may_change_gradients, trainer.callbacks))  # type: ignore[attr-defined]
        )
        draws = [step.draw(number, gradients) for number in range(1 if is_comparable else 2)]
        if draws[0] is None or draws[-1] is None:
            return None
        first = [local_gradient(weight) for weight in weights] if is_comparable else draws[0]
        return first, draws[-1]


class Layers:
    """Takes what layers leave of their gradients in both precisions, see :mod:`lightning_lowbit.nn.watch`."""

    without_noise = "Gradients of weights were always those in high precision: none of their operands was quantized."

    def __init__(self) -> None:
        self._watch: Watch | None = None
        self._trainer: Trainer | None = None

    def check(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Takes any run: layers see their own gradients."""

    def prepare(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Asks the layers."""
        self._trainer, self._watch = trainer, Watch(converted_layers(pl_module), "gradient_sums")
        self._watch.start(trainer.strategy.root_device)

    def cancel(self) -> None:
        """Asks no more."""
        if self._watch is not None:
            self._watch.stop()
        self._trainer = self._watch = None

    def take(self, layers: Mapping[str, QuantizedLayer]) -> dict[str, Tensor] | None:
        """Adds up over ranks."""
        watch, trainer = self._watch, self._trainer
        self.cancel()
        if watch is None or trainer is None:
            return None
        trained = [name for name, layer in layers.items() if layer.weight.requires_grad]
        if not trained:
            return None
        sums = watch.sums
        all_reduce_world_(sums)
        rows = dict(zip(watch.layers, _unscaled(sums, trainer).unbind(), strict=True))
        return {name: rows[name] for name in trained}


def _unscaled(sums: Tensor, trainer: Trainer) -> Tensor:
    """Without the scale of the loss, which squares of gradients have twice."""
    scaler = scaler_of(trainer.precision_plugin)
    scale = None if scaler is None else scaler._get_scale_async()
    return sums if scale is None else sums / scale.to(sums).square()


def _may_change_gradients(callback: Callback) -> bool:
    """Whether it does anything after a backward pass; a monitor only looks."""
    hook = getattr(callback.on_after_backward, "__func__", None)  # LambdaCallback has functions of its own
    return hook is not Callback.on_after_backward and not isinstance(callback, Monitor)


def _compare(first: Tensor | None, second: Tensor | None, weight: Tensor) -> Tensor:
    """Noise and signal ``[2]``; NaN, no measurement, where only one gradient is there, and it is not 0."""
    if first is not None and second is not None:
        return gradient_noise_sums(first, second)
    wide, given = wide_dtype(weight.device), second if first is None else first
    if given is None:
        return torch.zeros(2, dtype=wide, device=weight.device)
    # On the device, and so on all ranks alike. DDP's mean of gradients that no rank has is 0.
    return torch.where(given.ne(0).any(), math.nan, 0.0).to(wide).expand(2)


def _gradients(model: nn.Module, loss: Tensor, weights: list[Tensor]) -> list[Tensor | None]:
    """Gradients of weights, of their parts on this rank, as training would find them; leaves all others alone."""
    if any(isinstance(part, FSDPModule | FullyShardedDataParallel) for part in model.modules()):
        with _set_aside(model):
            loss.backward()  # type: ignore[no-untyped-call]
            parts = [local_gradient(weight) for weight in weights]
            return [None if part is None else part.clone() for part in parts]
    if _is_reentrant(loss):
        raise MisconfigurationException(
            "GradientNoiseMonitor asks for the gradients of some weights, which reentrant activation checkpointing "
            "cannot give: use torch.utils.checkpoint.checkpoint(..., use_reentrant=False), in transformers "
            "gradient_checkpointing_kwargs={'use_reentrant': False}."
        )
    # Past what accumulates gradients: hooks there belong to others, DDP among them.
    found = torch.autograd.grad(loss, weights, allow_unused=True)
    pairs = zip(found, weights, strict=True)
    parts = [None if gradient is None else local_gradient(weight, gradient) for gradient, weight in pairs]
    if not isinstance(model, DistributedDataParallel):
        return parts
    # The mean over ranks, as DDP makes it.
    dense = [torch.zeros_like(w) if part is None else part for part, w in zip(parts, weights, strict=True)]
    packed = torch.cat([part.flatten() for part in dense])
    packed /= dist.get_world_size(model.process_group)
    dist.all_reduce(packed, group=model.process_group)
    means = torch.split(packed, [part.numel() for part in dense])
    return [mean.view_as(part).to(part) for mean, part in zip(means, dense, strict=True)]


def _is_reentrant(loss: Tensor) -> bool:
    """Whether weights are hidden in checkpoints that run a backward pass of their own: asked for them, none would."""
    waiting, seen = [loss.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if node.name() == "CheckpointFunctionBackward":
            return True
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
    return False


@contextmanager
def _set_aside(model: nn.Module) -> Generator[None, None, None]:
    """Within this context no parameter has a gradient; then each has its own again."""
    # Gradients of FSDP1 are views of a flat one, which it makes anew: their contents are put back into that.
    saved = [
        (p, p.grad, p.grad.clone() if p.grad is not None and getattr(p, "_fsdp_flattened", False) else None)
        for p in model.parameters()
    ]
    for parameter, *_ in saved:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient, content in saved:
            if content is not None and parameter.grad is not None:
                parameter.grad.copy_(content)
            else:
                parameter.grad = gradient if content is None else content
