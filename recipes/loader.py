"""Training sequences in a reproducible order that can be resumed at any batch.

The order is a function of (seed, epoch), so a loader saves the epoch and the number of batches that it gave.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_lowbit._lightning import LightningDataModule


class OrderedSamples(Dataset[Tensor]):
    """Samples that know what they are made of, which a resumed run compares."""

    order: dict[str, Any]


class PackedSequences(OrderedSamples):
    """Sequences of ``length + 1`` tokens, int64, whose targets do not overlap; the incomplete last one is dropped."""

    def __init__(self, tokens: Tensor, length: int) -> None:
        self.tokens = tokens  # 1-D, of any integer type
        self.length = length
        self.digest = hashlib.sha256(tokens.numpy().data).hexdigest()
        self.order = {"sequence_length": length, "text": self.digest}

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.length)

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * self.length
        return self.tokens[start : start + self.length + 1].long()


class ShuffledShard(DistributedSampler[Tensor]):
    """One rank's share of an epoch's permutation from its ``start``-th sample on; shares are disjoint and equally long.

    Always a ``DistributedSampler``, so that Lightning calls ``set_epoch`` and does not replace it.
    """

    start = 0
    shift = 0  # added to Lightning's epoch, see `ResumableLoader`

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch + self.shift)
        order = torch.randperm(len(self.dataset), generator=generator)[: self.total_size]  # type: ignore[arg-type]
        return iter(order[self.rank :: self.num_replicas][self.start :].tolist())


def shard_of(data: LightningDataModule) -> dict[str, int]:
    """Returns the number of ranks that share the batches, ``num_replicas``, and the ``rank`` of this one."""
    sharding = data.trainer.distributed_sampler_kwargs if data.trainer is not None else None
    return sharding or {"num_replicas": 1, "rank": 0}


def refuse_another_order(saved: dict[str, Any], order: dict[str, Any]) -> None:
    """Raises a ``ValueError`` unless a saved position belongs to this order of batches."""
    if changed := [name for name in order if saved.get(name) != order[name]]:
        raise ValueError(
            "The checkpoint was taken in another order of batches: "
            + ", ".join(f"{name} was {saved.get(name)!r}, is {order[name]!r}" for name in changed)
            + "; resume with the same data, batch_size, seed and number of ranks, or load the weights alone."
        )


class ResumableLoader(DataLoader[Tensor]):
    """A ``DataLoader`` that Lightning saves and restores with the checkpoint, also within an epoch.

    It counts the batches that it gave, without those that workers prefetched. The incomplete last batch is dropped. The
    length is that of the whole epoch, because Lightning continues its own count of batches after a restart.
    """

    def __init__(self, dataset: OrderedSamples, sampler: ShuffledShard, batch_size: int, num_workers: int = 0) -> None:
        # Its own generator: else each epoch would draw a seed from the global one, which dropout uses.
        settings: dict[str, Any] = {"drop_last": True, "num_workers": num_workers, "generator": torch.Generator()}
        super().__init__(dataset, batch_size=batch_size, sampler=sampler, **settings)
        # Everything that the order of batches depends on.
        self._order: dict[str, Any] = {
            "seed": sampler.seed,
            "ranks": sampler.num_replicas,
            "batch_size": batch_size,
            **dataset.order,
        }
        self._epoch = self._trainer_epoch = self._batches = 0
        self._restored = False

    def __iter__(self) -> Iterator[Tensor]:  # type: ignore[override]
        # A generator, so that nothing below runs before the first batch: Lightning asks for the iterator (and would
        # start workers) before it sets the epoch.
        sampler: ShuffledShard = self.sampler  # type: ignore[assignment]
        resumes = self._restored and sampler.epoch == self._trainer_epoch and self._batches < len(self)
        if self._restored:
            # Lightning 2.6 counts one epoch too many when a run with `max_steps` resumes at the end of an epoch. So the
            # epoch is counted here, and Lightning's only tells whether the restored epoch is over.
            sampler.shift = self._epoch + (not resumes) - sampler.epoch
        self._batches = self._batches if resumes else 0
        self._epoch, self._trainer_epoch, self._restored = sampler.epoch + sampler.shift, sampler.epoch, False
        sampler.start = self._batches * self._order["batch_size"]
        for batch in super().__iter__():
            self._batches += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Returns the position, equal on all ranks, and the order that it belongs to."""
        position = {"epoch": self._epoch, "trainer_epoch": self._trainer_epoch, "batches": self._batches}
        return {**position, "order": self._order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues at the saved position in the next iteration; raises a ``ValueError`` if the order differs."""
        refuse_another_order(state["order"], self._order)
        self._epoch, self._trainer_epoch = state["epoch"], state["trainer_epoch"]
        self._batches, self._restored = state["batches"], True
