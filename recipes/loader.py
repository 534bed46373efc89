"""Training sequences in an order that can be taken up again anywhere.

The order is a function of (seed, epoch) alone, so that the state of the loader is the epoch, and how many batches were
handed out.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class PackedSequences(Dataset[Tensor]):
    """Sequences of ``length + 1`` tokens, int64, whose targets do not overlap; a shorter rest is dropped."""

    def __init__(self, tokens: Tensor, length: int) -> None:
        self.tokens = tokens  # 1-D, of any integer type
        self.length = length
        self.digest = hashlib.sha256(tokens.numpy().data).hexdigest()

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.length)

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * self.length
        return self.tokens[start : start + self.length + 1].long()


class ShuffledShard(DistributedSampler[Tensor]):
    """One rank's share of an epoch's permutation, from its ``start``-th sample on.

    A ``DistributedSampler`` also on one device, because Lightning then calls ``set_epoch`` and leaves the sampler in
    place whatever ``use_distributed_sampler`` says. The shards of the ranks are disjoint and equally long.
    """

    start = 0
    shift = 0  # added to Lightning's number of the epoch, see `ResumableLoader`

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch + self.shift)
        order = torch.randperm(len(self.dataset), generator=generator)[: self.total_size]  # type: ignore[arg-type]
        return iter(order[self.rank :: self.num_replicas][self.start :].tolist())


def refuse_another_order(saved: dict[str, Any], order: dict[str, Any]) -> None:
    """Compares what gives two positions their meaning.

    Raises:
        ValueError: they mean different things.
    """
    if changed := [name for name in order if saved.get(name) != order[name]]:
        raise ValueError(
            "The checkpoint was taken in another order of batches: "
            + ", ".join(f"{name} was {saved.get(name)!r}, is {order[name]!r}" for name in changed)
            + "; resume with the same data, batch_size, seed and number of ranks, or load the weights alone."
        )


class ResumableLoader(DataLoader[Tensor]):
    """A ``DataLoader`` that Lightning saves and restores with the checkpoint, in the middle of an epoch too.

    What counts is the batches handed out, not those that workers have fetched in advance. The ragged last batch is
    dropped. The length stays that of the whole epoch: Lightning continues its own count of batches after a restart.
    """

    def __init__(self, dataset: PackedSequences, sampler: ShuffledShard, batch_size: int, num_workers: int = 0) -> None:
        # Without a generator of its own, each epoch would draw a seed from the global one, which dropout uses.
        settings: dict[str, Any] = {"drop_last": True, "num_workers": num_workers, "generator": torch.Generator()}
        super().__init__(dataset, batch_size=batch_size, sampler=sampler, **settings)
        # What the order of the batches depends on: a position means nothing in any other order.
        self._order: dict[str, Any] = {
            "seed": sampler.seed,
            "ranks": sampler.num_replicas,
            "batch_size": batch_size,
            "sequence_length": dataset.length,
            "text": dataset.digest,
        }
        self._epoch = self._trainer_epoch = self._batches = 0
        self._restored = False

    def __iter__(self) -> Iterator[Tensor]:  # type: ignore[override]
        # A generator, because Lightning asks for the iterator before it says which epoch this is (and workers
        # would start to fetch): nothing below runs before the first batch is wanted.
        sampler: ShuffledShard = self.sampler  # type: ignore[assignment]
        goes_on = self._restored and sampler.epoch == self._trainer_epoch and self._batches < len(self)
        if self._restored:
            # Lightning 2.6 counts one epoch too many when `max_steps` runs resume at the end of an epoch, so what
            # follows a restored epoch is known from here, and Lightning only says whether it is over.
            sampler.shift = self._epoch + (not goes_on) - sampler.epoch
        self._batches = self._batches if goes_on else 0
        self._epoch, self._trainer_epoch, self._restored = sampler.epoch + sampler.shift, sampler.epoch, False
        sampler.start = self._batches * self._order["batch_size"]
        for batch in super().__iter__():
            self._batches += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """The position, the same on all ranks, and what gives it its meaning."""
        position = {"epoch": self._epoch, "trainer_epoch": self._trainer_epoch, "batches": self._batches}
        return {**position, "order": self._order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Makes the next iteration go on where the state was taken.

        Raises:
            ValueError: the state belongs to another order of batches.
        """
        refuse_another_order(state["order"], self._order)
        self._epoch, self._trainer_epoch = state["epoch"], state["trainer_epoch"]
        self._batches, self._restored = state["batches"], True
