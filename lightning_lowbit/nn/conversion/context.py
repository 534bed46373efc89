"""A context around the forward passes of a model outside a Trainer, entered by the outermost module that is called."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from lightning_lowbit._torch import hooks_of, remove_hook
from lightning_lowbit.nn.layers.layer import quantized_layers


class ForwardContext:
    """Runs a model's outermost forward pass in the context that ``enter`` makes from its module, by forward hooks."""

    def __init__(self, enter: Callable[[nn.Module], AbstractContextManager[Any]]) -> None:
        self.enter = enter
        self._inside: list[nn.Module] = []
        self._context: AbstractContextManager[Any] | None = None

    def attach(self, model: nn.Module) -> None:
        """Registers the hooks with every module that is, or holds, a converted layer."""
        for module in model.modules():
            if quantized_layers(module):
                module.register_forward_pre_hook(self._before)
                module.register_forward_hook(self._after, always_call=True)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before(self, module: nn.Module, inputs: Any) -> None:
        if not self._inside:
            self._context = self.enter(module)
            self._context.__enter__()
        self._inside.append(module)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if not self._inside or self._inside[-1] is not module:
            return  # entering the context has raised
        self._inside.pop()
        if not self._inside and self._context is not None:
            context, self._context = self._context, None
            context.__exit__(None, None, None)

    @staticmethod
    def of(model: nn.Module) -> "ForwardContext | None":
        """Returns the context attached to a model or to a part of it; None if there is none."""
        owners = (_owner(hook) for module in model.modules() for hook in hooks_of(module)[0].values())
        return next((owner for owner in owners if owner is not None), None)

    @staticmethod
    def detach(model: nn.Module) -> None:
        """Removes the hooks from a model and all its parts."""
        for module in model.modules():
            for hooks in hooks_of(module):
                for number in [number for number, hook in hooks.items() if _owner(hook) is not None]:
                    remove_hook(module, number)


def _owner(hook: Any) -> ForwardContext | None:
    owner = getattr(hook, "__self__", None)
    return owner if isinstance(owner, ForwardContext) else None
