"""Running a training step a second time, with other random bits of quantization, and without a trace.

    training_step    as it begins: a copy of its arguments, random states, and what modules hold
    later            all of it is put back, and the step runs as it did, with bits of `LowBitPrecision.another_draw`
    and then         everything is as if it had not run: random states, buffers, metrics, attributes, what was logged

Other callbacks may look at passes through the model, by hooks or through the layers. One that must not see such a pass
is a :class:`lightning_lowbit.callbacks.monitors.base.LooksAway`.
"""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from copy import copy
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from lightning_lowbit._lightning import (
    LightningModule,
    Trainer,
    apply_to_collection,
    random_states,
    set_random_states,
    training_step_through,
    without_logging,
)
from lightning_lowbit.callbacks.monitors.base import LooksAway
from lightning_lowbit.precision import LowBitPrecision
from lightning_lowbit.precision.loss_scaling import scaler_of

_T = TypeVar("_T")

# Of a module's attributes, those of nn.Module itself: parameters and submodules stay, buffers have their own place.
_INTERNAL = set(vars(nn.Module())) - {"training"}
_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict, Counter)


class RepeatableStep:
    """Waits for the next training step, and can run it again.

    From now on until that step begins, ``training_step`` of the module is another function, which looks the same to
    Lightning.

    Args:
        trainer: with a plugin of lightning_lowbit.
        module: what it trains.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self._trainer, self._module = trainer, module
        # FSDP1 puts gathered weights in the place of parameters, as plain tensors; it does so within the step.
        self._parameters = {id(part): set(part._parameters) for part in module.modules()}
        self._arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._original = vars(module).get("training_step")  # torch.compile leaves one on the instance
        step = module.training_step

        @wraps(step)
        def first(*args: Any, **kwargs: Any) -> Any:
            self.cancel()
            self._arguments = _copied(args), _copied(kwargs)
            self._before, self._random = _ModuleState(module, self._parameters), _random_states(module.device)
            return step(*args, **kwargs)

        # Lightning asks for the names of arguments, and looks behind one wrapper: there may have been one before.
        first.__wrapped__ = getattr(step, "__wrapped__", step)
        self._waiting: Callable[..., Any] | None = first
        vars(module)["training_step"] = first

    @property
    def has_begun(self) -> bool:
        """Whether there was a step, which can be run again."""
        return self._arguments is not None

    def cancel(self) -> None:
        """Gives the module its step back, if it has not begun."""
        if self._waiting is not None and vars(self._module).get("training_step") is self._waiting:
            del vars(self._module)["training_step"]
            if self._original is not None:
                vars(self._module)["training_step"] = self._original
        self._waiting = None

    def draw(self, number: int, gradients: Callable[[Tensor], _T]) -> _T | None:
        """Runs the step again.

        Args:
            number: of the draw, 0 or more; each has other bits.
            gradients: what to do with the loss, 0-d: divided over micro-batches and scaled as in training. It runs
                where backward passes do.

        Returns:
            What ``gradients`` gave; None where the step gave no loss.
        """
        assert self._arguments is not None
        trainer, module, plugin = self._trainer, self._module, self._trainer.precision_plugin
        assert isinstance(plugin, LowBitPrecision)
        device = trainer.strategy.root_device
        with ExitStack() as stack:
            stack.callback(_set_random_states, _random_states(device), device)
            stack.callback(_ModuleState(module, self._parameters).restore)
            stack.enter_context(without_logging(trainer))
            self._before.restore()  # with Lightning's note that a training step is running, which logging asks for
            _set_random_states(self._random, device)
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, LooksAway):  # after the modules were put back: some look through attributes
                    stack.enter_context(callback.look_away())
            stack.enter_context(plugin.another_draw(number))  # its keys lie in the modules, too: it comes last
            stack.enter_context(torch.enable_grad())
            args, kwargs = _copied(self._arguments)  # a step may change its batch
            if isinstance(trainer.model, FullyShardedDataParallel):  # whose forward pass gathers the weights
                output = training_step_through(trainer, module, *args, **kwargs)
            else:  # past DDP, which would wait for all gradients
                output = module.training_step(*args, **kwargs)
            loss = output.get("loss") if isinstance(output, Mapping) else output
            if loss is None:
                return None
            loss = loss / trainer.accumulate_grad_batches
            scaler = scaler_of(plugin)
            loss = loss if scaler is None else scaler.scale(loss)
            with torch.autocast(device.type, enabled=False):  # as in training, where the context has ended
                return gradients(loss)


class _ModuleState:
    """Buffers, and all other attributes, of a module and those in it: which they are, and what is in them.

    Contents are kept of tensors, of random generators and of containers (but not of what is in those). So the states of
    torchmetrics are among them.
    """

    def __init__(self, model: nn.Module, parameters: Mapping[int, set[str]]) -> None:
        # By what holds them: all entries but those to be left alone.
        self._entries: list[tuple[dict[str, Any], set[str], dict[str, Any]]] = []
        self._contents: dict[int, Callable[[], Any]] = {}  # of each object once
        for module in model.modules():
            if isinstance(module, FullyShardedDataParallel):  # nothing of its own is a user's
                continue
            self._note(module._buffers, set())
            self._note(vars(module), _INTERNAL | parameters.get(id(module), set()))

    @torch.no_grad()
    def restore(self) -> None:
        """Puts everything back."""
        for holder, left_alone, entries in self._entries:
            for name in [name for name in holder if name not in entries and name not in left_alone]:
                del holder[name]
            holder.update(entries)
        for put_back in self._contents.values():
            put_back()

    def _note(self, holder: dict[str, Any], left_alone: set[str]) -> None:
        entries = {name: value for name, value in holder.items() if name not in left_alone}
        self._entries.append((holder, left_alone, entries))
        for value in entries.values():
            if id(value) in self._contents:
                continue
            if isinstance(value, Tensor) and not value.requires_grad:  # no step changes what belongs to a graph
                self._contents[id(value)] = _content_of(value)
            elif isinstance(value, torch.Generator):
                self._contents[id(value)] = _state_of(value)
            elif type(value) in _CONTAINERS:
                self._contents[id(value)] = _elements_of(value)


def _content_of(tensor: Tensor) -> Callable[[], Any]:
    if tensor.is_inference() or _is_expanded(tensor):  # nothing changes it in place
        return lambda: None
    content = tensor.detach().clone()
    return lambda: tensor.copy_(content)  # always: batch norms change theirs without a new version of the tensor


def _is_expanded(tensor: Tensor) -> bool:
    if tensor.layout != torch.strided or tensor.is_nested:  # which have no strides
        return False
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _state_of(generator: torch.Generator) -> Callable[[], Any]:
    state = generator.get_state()
    return lambda: generator.set_state(state)


def _elements_of(container: Any) -> Callable[[], Any]:
    elements = copy(container)

    def put_back() -> None:
        container.clear()
        (container.extend if isinstance(container, list | deque) else container.update)(elements)

    return put_back


def _random_states(device: torch.device) -> dict[str, Any]:
    states = random_states()
    if device.type not in ("cpu", "cuda"):
        states["device"] = torch.get_device_module(device).get_rng_state()
    return states


def _set_random_states(states: dict[str, Any], device: torch.device) -> None:
    set_random_states({name: state for name, state in states.items() if name != "device"})
    if "device" in states:
        torch.get_device_module(device).set_rng_state(states["device"])


def _copied(data: _T) -> _T:
    """The same with copies of all tensors in it."""
    copied: _T = apply_to_collection(
        data, Tensor, lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad)
    )
    return copied
