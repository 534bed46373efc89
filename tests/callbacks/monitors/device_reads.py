"""Counts what the hooks of a callback read: a number of a tensor is what a device has to be waited for."""

from collections import Counter

from torch import Tensor, ops
from torch.utils._python_dispatch import TorchDispatchMode

HOOKS = ("on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end")


class Operations(TorchDispatchMode):
    """Keeps which operations were executed."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def counted(cls, monkeypatch, hooks=HOOKS):
    """A callback that counts its reads, by hook and ``global_step``; and how often a hook was called, as step -1.

    On the CPU ``tolist`` is no operation of its own.
    """
    reads = Counter()

    def watched(hook):
        def call(callback, run, module, *arguments):
            def tolist(tensor):
                operations.seen.append("tolist")
                return original(tensor)

            original = Tensor.tolist
            with monkeypatch.context() as patch, Operations() as operations:
                patch.setattr(Tensor, "tolist", tolist)
                getattr(cls, hook)(callback, run, module, *arguments)
            kinds = "tolist", ops.aten._local_scalar_dense.default
            reads[hook, run.global_step] += sum(map(operations.seen.count, kinds))
            reads[hook, -1] += 1

        return call

    return type(f"Watched{cls.__name__}", (cls,), {hook: watched(hook) for hook in hooks}), reads
