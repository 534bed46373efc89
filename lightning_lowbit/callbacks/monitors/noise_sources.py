"""Measures the sums of gradient and noise for :class:`lightning_lowbit.GradientNoiseMonitor`.

draws     before the backward pass of training, two others over the same graph, each with other random bits
layers    in the backward pass of training, see `lightning_lowbit.nn.core.watch`
"""

from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from lightning_lowbit._lightning import (
    DeepSpeedStrategy,
    LightningModule,
    MisconfigurationException,
    Trainer,
    random_states,
    set_random_states,
)
from lightning_lowbit._torch import current_scale, disable_current_modes, repeatable_backward
from lightning_lowbit._torch.devices import wide_dtype
from lightning_lowbit.callbacks.monitors.latent_weights import converted_layers
from lightning_lowbit.distributed import (
    all_reduce_,
    all_reduce_world_,
    forget_gathered,
    local_gradient,
    sharding_of,
)
from lightning_lowbit.metrics.noise import gradient_noise_sums
from lightning_lowbit.nn import QuantizedLayer
from lightning_lowbit.nn.core.watch import Watch
from lightning_lowbit.precision import LowBitPrecision
from lightning_lowbit.precision.loss_scaling import scaler_of
from lightning_lowbit.quant import Cast

Layers = Mapping[str, QuantizedLayer]
Sums = dict[str, Tensor]  # by layer, noise and signal [2], of whole weights


class NoiseMeasurement:
    """Measures the sums of a step; ``without_noise`` explains in words a measurement that finds no noise.

    ``check`` refuses a run when training starts; ``prepare`` begins a measurement, with the last micro-batch of a step;
    ``before_backward`` or ``after_backward`` returns the sums; ``cancel`` ends a measurement; ``end`` follows training.
    """

    without_noise: str

    def check(self, trainer: Trainer, pl_module: LightningModule) -> None: ...
    def prepare(self, trainer: Trainer, pl_module: LightningModule) -> None: ...
    def before_backward(self, trainer: Trainer, loss: Tensor, layers: Layers) -> Sums | None: ...
    def after_backward(self, trainer: Trainer, layers: Layers) -> Sums | None: ...
    def cancel(self, trainer: Trainer) -> None: ...
    def end(self) -> None: ...


class FromDraws(NoiseMeasurement):
    without_noise = "Both draws of the gradient were always the same: nothing was rounded stochastically."

    def __init__(self) -> None:
        self._settings = ExitStack()  # those of torch during training

    def check(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuses strategies that cannot repeat a backward pass, and random bits of a forward pass."""
        model, can = trainer.model, "use kind='layers', or train with DDP or ModelParallelStrategy (FSDP2)"
        if isinstance(trainer.strategy, DeepSpeedStrategy):
            raise _refusal(f"reads gradients of parameters, which DeepSpeed keeps to itself: {can}")
        assert model is not None
        if any(isinstance(part, FullyShardedDataParallel) for part in model.modules()):
            raise _refusal(f"runs several backward passes over one graph, whose weights FSDPStrategy frees: {can}")
        if trainer.accumulate_grad_batches > 1 and any(isinstance(part, FSDPModule) for part in model.modules()):
            raise _refusal(
                "runs more backward passes, whose gradients FSDP2 would mix with those that it accumulates: use "
                "kind='layers', or accumulate_grad_batches=1"
            )
        _check_forward(converted_layers(pl_module))
        self.end()  # after a training that raised
        self._settings.enter_context(repeatable_backward())

    def prepare(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _check_forward(converted_layers(pl_module))  # casts may have changed
        _plugin(trainer).expect_draws()

    def before_backward(self, trainer: Trainer, loss: Tensor, layers: Layers) -> Sums | None:
        assert trainer.model is not None
        forget_gathered(trainer.model)  # after a forward pass FSDP2's root has whole parameters, which get no gradients
        weights: dict[str, Tensor] = {}
        for name, layer in layers.items():
            if layer.weight.requires_grad and not any(layer.weight is weight for weight in weights.values()):
                weights[name] = layer.weight
        if not weights:
            return None
        shards = list(weights.values())
        first, second = (_draw(trainer, number, loss, shards) for number in range(2))
        pairs = [_compare(*three) for three in zip(first, second, shards, strict=True)]
        pairs = all_reduce_(pairs, [sharding_of(weight).groups for weight in shards], dist.ReduceOp.SUM)
        device = trainer.strategy.root_device
        return {name: _unscaled(pair, trainer).to(device) for name, pair in zip(weights, pairs, strict=True)}

    def cancel(self, trainer: Trainer) -> None:
        _plugin(trainer).expect_draws(False)

    def end(self) -> None:
        self._settings.close()


class FromLayers(NoiseMeasurement):
    """Takes gradients that layers compute in both precisions, see :mod:`lightning_lowbit.nn.core.watch`."""

    without_noise = "Gradients of weights were always those in high precision: none of their operands was quantized."

    def __init__(self) -> None:
        self._watch: Watch | None = None

    def prepare(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._watch = Watch(converted_layers(pl_module), "gradient_sums")
        self._watch.start(trainer.strategy.root_device)

    def after_backward(self, trainer: Trainer, layers: Layers) -> Sums | None:
        watch = self._watch
        self.cancel(trainer)
        trained = [name for name, layer in layers.items() if layer.weight.requires_grad]
        if watch is None or not trained:
            return None
        all_reduce_world_(sums := watch.sums)
        rows = dict(zip(watch.layers, _unscaled(sums, trainer).unbind(), strict=True))
        return {name: rows[name] for name in trained}

    def cancel(self, trainer: Trainer) -> None:
        if self._watch is not None:
            self._watch.stop()
        self._watch = None


def _plugin(trainer: Trainer) -> LowBitPrecision:
    assert isinstance(trainer.precision_plugin, LowBitPrecision)
    return trainer.precision_plugin


def _refusal(why: str) -> MisconfigurationException:
    return MisconfigurationException(f"GradientNoiseMonitor {why}.")


def _check_forward(layers: Layers) -> None:
    for name, layer in layers.items():
        casts = layer.casts
        draws = any(isinstance(cast, Cast) and cast.draws for cast in (casts.fprop_x, casts.fprop_w))
        is_keyed = "fprop" in casts.hadamard and casts.hadamard["fprop"].signs == "keyed"
        if is_keyed or draws:
            raise _refusal(
                f"draws the random bits of backward passes again, and the forward pass of {name} has some, too, by a "
                "stochastic cast or keyed signs of a Hadamard rotation: use kind='layers'"
            )


def _unscaled(sums: Tensor, trainer: Trainer) -> Tensor:
    scaler = scaler_of(trainer.precision_plugin)
    scale = None if scaler is None else current_scale(scaler)
    return sums if scale is None else sums / scale.to(sums).square()


def _compare(first: Tensor | None, second: Tensor | None, weight: Tensor) -> Tensor:
    """Returns noise and signal ``[2]`` of two gradients; zeros if the loss does not depend on the weight."""
    if first is None or second is None:
        return torch.zeros(2, dtype=wide_dtype(weight.device), device=weight.device)
    return gradient_noise_sums(first, second)


def _draw(trainer: Trainer, number: int, loss: Tensor, weights: list[Tensor]) -> list[Tensor | None]:
    """Computes gradients of this rank's shards with other random bits; changes nothing else, and counts no FLOPs."""
    model, states = trainer.model, random_states()
    assert model is not None
    try:
        with disable_current_modes(), _plugin(trainer).another_draw(number):
            return _gradients(model, loss, weights)
    finally:
        set_random_states(states)


def _gradients(model: nn.Module, loss: Tensor, weights: list[Tensor]) -> list[Tensor | None]:
    if any(isinstance(part, FSDPModule) for part in model.modules()):
        with _set_aside(model):
            loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
            return [local_gradient(weight) for weight in weights]
    if _is_reentrant(loss):
        raise _refusal(
            "asks for gradients of weights, which reentrant activation checkpointing cannot give: use "
            "torch.utils.checkpoint.checkpoint(..., use_reentrant=False), in transformers "
            "gradient_checkpointing_kwargs={'use_reentrant': False}"
        )
    # Bypasses gradient accumulation, where others such as DDP have hooks.
    with _without_delayed_reduction(model):
        gradients = torch.autograd.grad(loss, weights, allow_unused=True, retain_graph=True)
    pairs = zip(gradients, weights, strict=True)
    shards = [None if gradient is None else local_gradient(weight, gradient) for gradient, weight in pairs]
    if not isinstance(model, DistributedDataParallel):
        return shards
    # The mean over ranks, as DDP makes it.
    dense = [torch.zeros_like(w) if shard is None else shard for shard, w in zip(shards, weights, strict=True)]
    packed = torch.cat([shard.flatten() for shard in dense])
    packed /= dist.get_world_size(model.process_group)
    dist.all_reduce(packed, group=model.process_group)
    means = torch.split(packed, [shard.numel() for shard in dense])
    return [mean.view_as(shard).to(shard) for mean, shard in zip(means, dense, strict=True)]


@contextmanager
def _without_delayed_reduction(model: nn.Module) -> Generator[None, None, None]:
    """DDP with a static graph reduces at the end of its first backward pass, which must be training's."""
    name = "_static_graph_delay_allreduce_enqueued"
    before = vars(model).get(name)
    if before is not None:
        setattr(model, name, True)
    try:
        yield
    finally:
        if before is not None:
            setattr(model, name, before)


def _is_reentrant(loss: Tensor) -> bool:
    """Tells whether reentrant checkpointing hides weights: their gradients would be missing."""
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
    forget_gathered(model)
    saved = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in saved:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in saved:
            parameter.grad = gradient
