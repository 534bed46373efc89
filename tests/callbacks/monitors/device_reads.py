"""Counts what the hooks of a callback read: a number of a tensor is what a device has to be waited for."""

from collections import Counter

from torch import Tensor, ops
from torch.utils._python_dispatch import TorchDispatchMode

HOOKS = ("on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end")


def counted(cls, monkeypatch, hooks=HOOKS):
    """A callback that counts its reads, by hook and ``global_step``; and how often a hook was called, as step -1.

    On the CPU ``tolist`` is no operation of its own.
    """
    reads = Counter()

    def watched(hook):
        def call(callback, run, module, *arguments):
            class Count(TorchDispatchMode):
                def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                    reads[hook, run.global_step] += func is ops.aten._local_scalar_dense.default
                    return func(*args, **(kwargs or {}))

            def tolist(tensor):
                reads[hook, run.global_step] += 1
                return original(tensor)

            original = Tensor.tolist
            with monkeypatch.context() as patch, Count():
                patch.setattr(Tensor, "tolist", tolist)
                getattr(cls, hook)(callback, run, module, *arguments)
            reads[hook, -1] += 1

        return call

    return type(f"Watched{cls.__name__}", (cls,), {hook: watched(hook) for hook in hooks}), reads
