"""Keys of the random bits of stochastic rounding, one per layer, operand and call.

    key = hash(seed, optimizer step, micro-batch, rank; layer name, operand; call, expert)

Random bits depend only on the key and an element's index. They are the same after a resume and in recomputation,
whatever other code draws. The data-parallel rank and the call enter only for x and g, which differ between ranks and
calls, and not for w. Each call has its own keys, so that noise does not add up (:mod:`lightning_lowbit.nn.core.calls`);
so has each expert of a stack, for all operands (:func:`lightning_lowbit.nn.core.calls.keys_of_product`).
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_lowbit._torch import unseen_writes
from lightning_lowbit._torch.devices import with_index
from lightning_lowbit.nn.casts.traits import OPERANDS
from lightning_lowbit.nn.core.calls import Calls, hash_text, number_calls
from lightning_lowbit.nn.layers.layer import quantized_layers
from lightning_lowbit.patterns import clean_name
from lightning_lowbit.quant.rounding import mix_key


class LayerKeys:
    """The keys of all quantized layers of a model, filled in place before each micro-batch.

    Each layer holds a view of its six keys. Filling them takes a few small operations for the whole model, without
    synchronization or recompilation.

    Args:
        model: holds converted layers; their names are those in this model.
        seed: any integer.

    Examples:
        >>> keys = LayerKeys(convert(model, "nvfp4"), seed=0)
        >>> for step, batch in enumerate(batches):
        ...     keys.fill_(step)
        ...     model(batch).backward()
    """

    def __init__(self, model: nn.Module, seed: int = 0) -> None:
        self.seed = seed
        self.layers = {clean_name(name): layer for name, layer in quantized_layers(model).items()}
        salts = [[hash_text(f"{name}/{operand}") for operand in OPERANDS] for name in self.layers]
        self._salts = torch.tensor(salts, dtype=torch.int64).view(-1, len(OPERANDS))
        self._is_weight = torch.tensor([operand.endswith("_w") for operand in OPERANDS])
        self._calls = Calls(self._is_weight.to(torch.int64) - 1)
        self._place(torch.device("cpu"))

    def fill_(self, step: int, micro_batch: int = 0, rank: int = 0, device: torch.device | None = None) -> None:
        """Sets the keys; the next call of each layer is its first one.

        Args:
            step: counts optimizer steps.
            micro_batch: counts those of a step.
            rank: counts data-parallel processes.
            device: that of the layers; None leaves the keys where they are.
        """
        if device is not None and with_index(device) != self._keys.device:
            self._place(device)
        self._calls.begin()
        shared = hash_numbers(self.seed, step, micro_batch)
        local = hash_numbers(self.seed, step, micro_batch, rank)
        self._keys.copy_(mix_key(self._salts ^ torch.where(self._is_weight, shared, local)))

    def expect_draws(self, on: bool) -> None:
        """Keeps the keys of all calls from now on for :meth:`in_use`, or no longer."""
        self._calls.drawn = [] if on else None

    def in_use(self) -> list[Tensor]:
        """Returns all keys that a backward pass over the micro-batch uses, also those of recomputed calls."""
        return [self._keys, *(self._calls.drawn or [])]

    def draw_again_(self, number: int) -> None:
        """Replaces the keys in use by those of draw ``number``, also the ones that compiled graphs have saved."""
        tensors = self.in_use()
        with unseen_writes(tensors):
            for keys in tensors:
                keys.bitwise_xor_(hash_numbers(-1 - number))

    def relink(self) -> None:
        """Gives layers views of the keys again, after pickle has copied them."""
        self._place(self._keys.device)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.relink()

    @torch.inference_mode(False)  # evaluation may move them, and training refills them
    def _place(self, device: torch.device) -> None:
        self._salts, self._is_weight = self._salts.to(device), self._is_weight.to(device)
        self._keys = torch.zeros_like(self._salts)
        self._calls.varying = self._calls.varying.to(device)
        for layer, keys in zip(self.layers.values(), self._keys, strict=True):
            number_calls(layer, keys, self._calls)


def hash_numbers(*numbers: int) -> int:
    """Returns an int64 hash of integers, the same in every process."""
    return hash_text(",".join(map(str, numbers)))


@contextmanager
def unchanged(tensors: list[Tensor]) -> Generator[None, None, None]:
    """Restores tensors that change in place within this context, without autograd noticing."""
    copies = [tensor.detach().clone() for tensor in tensors]
    with unseen_writes(tensors):
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, copy in zip(tensors, copies, strict=True):
                    tensor.copy_(copy)
