"""Counts what the hooks of a callback read: a number of a tensor is what a device has to be waited for."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, ops
from torch.utils._python_dispatch import TorchDispatchMode

from tests.lightning_imports import Callback, Trainer

HOOKS = ("on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end")


def counted(cls: type[Callback], monkeypatch: pytest.MonkeyPatch) -> tuple[type[Any], Counter[tuple[str, int]]]:
    """A callback that counts its reads, by hook and ``global_step``; and how often a hook was called, as step -1.

    On the CPU ``tolist`` is no operation of its own.
    """
    reads: Counter[tuple[str, int]] = Counter()

    def watched(hook: str) -> Callable[..., None]:
        def call(callback: Callback, run: Trainer, module: Any, *arguments: Any) -> None:
            class Count(TorchDispatchMode):
                def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                    reads[hook, run.global_step] += func is ops.aten._local_scalar_dense.default
                    return func(*args, **(kwargs or {}))

            def tolist(tensor: Tensor) -> Any:
                reads[hook, run.global_step] += 1
                return original(tensor)

            original = Tensor.tolist
            with monkeypatch.context() as patch, Count():
                patch.setattr(Tensor, "tolist", tolist)
                getattr(cls, hook)(callback, run, module, *arguments)
            reads[hook, -1] += 1

        return call

    return type(f"Watched{cls.__name__}", (cls,), {hook: watched(hook) for hook in HOOKS}), reads
