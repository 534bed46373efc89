"""Keys of the random bits of stochastic rounding, one per layer and operand, and for each call of the layer.

    key = hash(seed, optimizer step, micro-batch, rank; layer name, operand; call)

The bits are a pure function of the key and of the index of an element (see :mod:`lightning_lowbit.quant.rounding`), so
they are the same when activations are recomputed, after a resume and whatever other code draws random numbers. The rank
among data-parallel processes enters for x and g, which differ between ranks, and not for w, which does not. So does the
call, for layers that a micro-batch passes through several times: the first one has the keys that are filled in, and
each later one its own, so that noise does not add up (:mod:`lightning_lowbit.nn.calls`).
"""

import hashlib
from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from lightning_lowbit.nn.calls import Calls, number_calls
from lightning_lowbit.nn.casts import OPERANDS
from lightning_lowbit.nn.linear import QuantizedLayer
from lightning_lowbit.quant.rounding import mix_key

# What wrappers add to module names. It is removed, so that a layer keeps its key when it is wrapped or compiled.
_WRAPPERS = ("_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module")
_IS_WEIGHT = [operand.endswith("_w") for operand in OPERANDS]


def clean_name(name: str) -> str:
    """A module's name without what wrappers added to it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def with_index(device: torch.device) -> torch.device:
    """A device as tensors name it: ``cuda:0`` for ``cuda``, which does not compare equal to it."""
    return torch.empty(0, device=device).device


class LayerKeys:
    """The keys of all quantized layers of a model, filled in place before each micro-batch.

    Each layer holds a view of its six keys, so that filling launches a handful of tiny operations whatever the number
    of layers, synchronizes nothing, and recompiles nothing.

    Args:
        model: holds converted layers; their names are those in this model.
        seed: any integer.

    Example:
        >>> keys = LayerKeys(convert(model, "nvfp4"), seed=0)
        >>> for step, batch in enumerate(batches):
        ...     keys.fill_(step)
        ...     model(batch).backward()
    """

    def __init__(self, model: nn.Module, seed: int = 0) -> None:
        self.seed = seed
        self.layers = {clean_name(name): m for name, m in model.named_modules() if isinstance(m, QuantizedLayer)}
        salts = [[_salt(name, operand) for operand in OPERANDS] for name in self.layers]
        self._salts = torch.tensor(salts, dtype=torch.int64).view(-1, len(OPERANDS))
        self._is_weight = torch.tensor(_IS_WEIGHT)
        self._calls = Calls(self._is_weight)
        self._place(torch.device("cpu"))

    def fill_(self, step: int, micro_batch: int = 0, rank: int = 0, device: torch.device | None = None) -> None:
        """Sets the keys; the next call of each layer is its first one.

        Args:
            step: optimizer steps taken so far.
            micro_batch: of this optimizer step.
            rank: of this process among the data-parallel ones.
            device: where the layers compute; None leaves the keys where they are.
        """
        if device is not None and with_index(device) != self._keys.device:
            self._place(device)
        self._calls.begin()
        shared = hash_numbers(self.seed, step, micro_batch)
        own = hash_numbers(self.seed, step, micro_batch, rank)
        self._keys.copy_(mix_key(self._salts ^ torch.where(self._is_weight, shared, own)))

    def expect_draws(self, on: bool) -> None:
        """Whether to keep the keys of all calls from now on, for :meth:`in_use`."""
        self._calls.given = [] if on else None

    def in_use(self) -> list[Tensor]:
        """All keys that a backward pass over the micro-batch uses: of its calls, and of what it computes again."""
        return [self._keys, *(self._calls.given or [])]

    def draw_again_(self, number: int) -> None:
        """Replaces the keys in use by others for draw ``number``, also those that compiled graphs have saved."""
        with _unsafe_preserve_version_counter(tuple(self.in_use())):
            for keys in self.in_use():
                keys.bitwise_xor_(hash_numbers(-1 - number))

    def relink(self) -> None:
        """Gives layers views of the keys again, after pickle has made copies of them."""
        self._place(self._keys.device)

    @torch.inference_mode(False)  # evaluation may move them, and training refills them
    def _place(self, device: torch.device) -> None:
        self._salts, self._is_weight = self._salts.to(device), self._is_weight.to(device)
        self._keys = torch.zeros_like(self._salts)
        self._calls.is_weight = self._is_weight
        for layer, keys in zip(self.layers.values(), self._keys, strict=True):
            number_calls(layer, keys, self._calls)


def _salt(name: str, operand: str) -> int:
    return _int64(hashlib.blake2b(f"{name}/{operand}".encode(), digest_size=8).digest())


def hash_numbers(*numbers: int) -> int:
    """A hash of integers, the same in every process: an int64."""
    return _int64(hashlib.blake2b(",".join(map(str, numbers)).encode(), digest_size=8).digest())


def _int64(digest: bytes) -> int:
    return int.from_bytes(digest, "little", signed=True)


@contextmanager
@torch.no_grad()
def unchanged(tensors: list[Tensor]) -> Generator[None, None, None]:
    """Within this context tensors may change in place; afterwards they are as before, also to autograd."""
    kept = [tensor.clone() for tensor in tensors]
    with _unsafe_preserve_version_counter(tuple(tensors)):
        try:
            yield
        finally:
            for tensor, before in zip(tensors, kept, strict=True):
                tensor.copy_(before)
