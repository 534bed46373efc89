"""What the optimizers' tests share: parameters of all shapes, gradients with spikes, and comparison bit for bit."""

import torch
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_lowbit.compilation import backend

SHAPES = [(), (1,), (7,), (0,), (0, 3), (5, 6), (3, 2, 2, 2)]


def use(code):
    """Plain torch, the code of all other devices, or C++ where it serves."""
    return backend("eager" if code == "torch" else "auto")


def make_parameters(dtype=torch.float32, shapes=SHAPES, device="cpu"):
    generator = torch.Generator().manual_seed(1)
    return [Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in shapes]


def set_gradients(parameters, seed):
    """Heavy-tailed gradients, so that AdaClip clips and AdaGN scales."""
    generator = torch.Generator().manual_seed(seed)
    for p in parameters:
        normal = (torch.randn(p.shape, generator=generator) for _ in range(2))
        p.grad = (next(normal) * next(normal) ** 4).to(p.device, p.dtype)


def train(optimizer, parameters, steps):
    for step in steps:
        set_gradients(parameters, seed=step)
        optimizer.step()


def snapshot(optimizer, parameters):
    """Copies of every parameter and all its state."""
    values = [value for p in parameters for value in (p.detach(), *optimizer.state[p].values())]
    return [torch.as_tensor(value).clone() for value in values]


def assert_close(parameters, expected, tolerance, message):
    """Each parameter is near the tensor that is expected, absolutely or relatively."""
    for p, q in zip(parameters, expected, strict=True):
        torch.testing.assert_close(
            p.detach().double(), q.detach().double(), rtol=tolerance, atol=tolerance,
            msg=lambda text, shape=tuple(p.shape): f"{message}, shape {shape}: {text}",
        )  # fmt: skip


def assert_same(left, right, message):
    assert len(left) == len(right), f"{message}: {len(left)} tensors against {len(right)}"
    for index, (a, b) in enumerate(zip(left, right, strict=True)):
        assert a.dtype == b.dtype and torch.equal(a, b), f"{message}: tensor {index} differs: {a} {b}"


class NoHostSync(TorchDispatchMode):
    """Raises where a value would travel to the host or from it, or a shape would depend on one."""

    FORBIDDEN = ("_local_scalar_dense", "item", "nonzero", "masked_select", "is_nonzero", "equal", "unique")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in self.FORBIDDEN, f"host sync: {func}"
        # What torch.tensor and torch.as_tensor make of Python's numbers: elsewhere, a copy for which the host waits.
        assert name != "lift_fresh", "host sync: a tensor of Python's numbers"
        if name in ("index", "index_put_", "index_put"):
            assert all(i is None or i.dtype != torch.bool for i in args[1]), f"boolean indexing: {func}"
        return func(*args, **(kwargs or {}))
