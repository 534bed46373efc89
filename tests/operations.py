"""The operations that torch computes within a context."""

from collections import Counter

from lightning_lowbit._torch import CPU_PRODUCTS, TorchDispatchMode


class Operations(TorchDispatchMode):
    """Counts operations by name, and collects the dtypes of the operands of products."""

    def __init__(self):
        super().__init__()
        self.counts, self.dtypes = Counter(), set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket.__name__] += 1
        if func in CPU_PRODUCTS:
            self.dtypes |= {x.dtype for x in args[:2]}
        return func(*args, **(kwargs or {}))
