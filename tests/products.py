"""The products that torch computes within a context."""

from lightning_lowbit._torch import CPU_PRODUCTS, TorchDispatchMode


class Products(TorchDispatchMode):
    """Collects the dtypes of the operands of torch's products."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in CPU_PRODUCTS:
            self.dtypes |= {x.dtype for x in args[:2]}
        return func(*args, **(kwargs or {}))
