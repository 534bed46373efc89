"""Text that is read during training, in a reproducible order that can be resumed at any batch.

The documents, repeated without end, are one row of tokens. It is cut into numbered sequences that share one token at
each border:

    tokens     t0 t1 t2 t3 t4 t5 t6 …         sequence_length = 3
    sequence   0: t0 … t3     1: t3 … t6      …
    block      0: sequences 0 … 1023          1: sequences 1024 … 2047      …
    order      the sequences of block 0 by a permutation drawn from (seed, 0), then those of block 1, …
    batch b    the next `ranks * batch_size` sequences of the order; a rank takes every `ranks`-th of them

So the sequences of a step depend neither on the number of ranks that share its batch nor on workers, and each sequence
is seen once before the data repeats. The price: every rank and worker tokenizes the whole stream.
"""

import hashlib
import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_lowbit._lightning import rank_zero_warn

from .loader import PackedSequences, refuse_another_order
from .tokenizers import BATCH, Tokenizer

HUB = "hf:"
# Sequences that are shuffled together. C4 comes shuffled, so this only has to break up long documents.
BLOCK = 1024

Position = dict[str, Any]  # integers, strings, None, and dictionaries of them, as safe checkpoints hold


@contextmanager
def no_progress_bars() -> Iterator[None]:
    import datasets  # imported late, because it takes a second

    bars_were_on = not datasets.utils.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if bars_were_on:
            datasets.enable_progress_bars()


def text_of(row: dict[str, Any], column: str, source: str) -> bytes:
    """Returns the text of a row as UTF-8, empty for None; raises a ``ValueError`` if there is no ``column`` of text."""
    if column not in row:
        columns = ", ".join(repr(name) for name in row)
        raise ValueError(f"{source} has no column {column!r}, but has {columns}; name the one with text in `column`.")
    text = row[column]
    if not isinstance(text, str | None):
        kind = type(text).__name__
        raise ValueError(f"The column {column!r} of {source} must hold text, but holds {kind}; give another `column`.")
    return (text or "").encode()


class Documents:
    """The documents of one split, as UTF-8, from any position on; every pass skips those before ``start``."""

    def __init__(self, dataset: Any, column: str, source: str) -> None:
        self._dataset, self._column, self._source = dataset, column, source
        self._has_warned = False
        self.start = self.position()

    def position(self) -> Position:
        """Returns the position of the latest `read`: after the document that it gave last."""
        return self._dataset.state_dict()

    def read(self, position: Position) -> Iterator[bytes]:
        """Yields the documents from a position to the end, without blank ones. Warns of the first row without text."""
        self._dataset.load_state_dict(position)
        # Not `iter(dataset)`, which gives each worker of a `DataLoader` only a part of the rows. One row at a time,
        # because positions are exact only between batches of `iter`.
        for rows in self._dataset.iter(batch_size=1):
            row = {name: values[0] for name, values in rows.items()}
            text = text_of(row, self._column, self._source)
            if row[self._column] is None and not self._has_warned:
                self._has_warned = True
                where = f"{self._source} has no text in the column {self._column!r}"
                rank_zero_warn(f"A row of {where}, and is left out, as is each further one.")
            if text.strip():
                yield text

    def tokens(self, tokenizer: Tokenizer, position: Position, batch: int = BATCH) -> Iterator[tuple[Position, Tensor]]:
        """Yields the tokens of a few documents at a time, and the position before them."""
        documents = self.read(position)
        while texts := list(islice(documents, batch)):
            yield position, tokenizer.encode(texts)
            position = self.position()

    def first_tokens(self, tokenizer: Tokenizer, number: int | None) -> Tensor:
        """Returns the first ``number`` tokens, or all for None."""
        parts, total = [torch.empty(0, dtype=torch.uint8)], 0
        for _, tokens in self.tokens(tokenizer, self.start, BATCH if number is None else 1):
            parts.append(tokens)
            total += len(tokens)
            if number is not None and total >= number:
                break
        return torch.cat(parts)[:number]


def open_splits(path: str, column: str) -> dict[str, Documents]:
    """Returns the splits of ``hf:NAME[:CONFIG]``, a data set of the Hugging Face Hub or a folder in that shape."""
    name, _, config = path.removeprefix(HUB).partition(":")
    with no_progress_bars():
        import datasets

        try:
            splits = datasets.load_dataset(os.path.expanduser(name), config or None, streaming=True)
        except Exception as error:  # a missing network, name, configuration, file or package: each has its own class
            raise ValueError(
                f"The data set {name!r}, configuration {config or None!r}, cannot be opened"
                f" ({' '.join(str(error).split())}); check the name, the configuration in `path` {path!r}"
                f" (hf:NAME or hf:NAME:CONFIG), and the network."
            ) from error
    if "train" not in splits:
        raise ValueError(f"{path} must have a split 'train', but has {', '.join(splits)}; give another data set.")
    return {split: Documents(rows, column, f"{path} ({split})") for split, rows in splits.items()}


class SequenceStream(Dataset[Tensor]):
    """Numbered sequences of ``length + 1`` tokens, int64, one block at a time in memory, in forward order."""

    def __init__(self, documents: Documents, tokenizer: Tokenizer, length: int) -> None:
        self.documents, self.tokenizer, self.length = documents, tokenizer, length
        self.position: Position = {}  # of the block in memory, or of the first one to read
        self._blocks: Iterator[tuple[Position, Tensor]] | None = None
        self.seek(None)

    def _read(self, position: Position) -> Iterator[tuple[Position, Tensor]]:
        while True:
            number = 0
            whole = position == self.documents.start
            for before, tokens in self.documents.tokens(self.tokenizer, position):
                number += len(tokens)
                yield before, tokens
            if whole and number <= self.length:
                raise ValueError(
                    f"TextDataModule needs at least {self.length + 1} tokens for one sequence of {self.length}, but"
                    f" `path` leaves {number} of them for training; give more text, or lower `sequence_length`, or"
                    " `val_batches` where the data has no validation split."
                )
            position = self.documents.start

    def check(self) -> None:
        """Reads the first sequence; raises a ``ValueError`` if the data is too short."""
        needed = self.length + 1
        for _, tokens in self._read(self.documents.start):
            needed -= len(tokens)
            if needed <= 0:
                return

    def first(self, number: int) -> PackedSequences:
        tokens = self.documents.first_tokens(self.tokenizer, number * self.length + 1)
        return PackedSequences(tokens, self.length)

    def _read_blocks(self, position: Position) -> Iterator[tuple[Position, Tensor]]:
        """Yields the blocks from a position on: where each begins, and its ``BLOCK * length + 1`` tokens."""
        block, offset, size = position["block"], position["offset"], BLOCK * self.length
        parts = self._read(position["documents"])
        held: deque[tuple[Position, Tensor]] = deque()
        while True:
            available = sum(len(tokens) for _, tokens in held)
            while available <= offset + size:
                held.append(next(parts))
                available += len(held[-1][1])
            tokens = torch.cat([tokens for _, tokens in held])[offset : offset + size + 1]
            yield {"block": block, "documents": held[0][0], "offset": offset}, tokens
            block, offset = block + 1, offset + size
            while offset >= len(held[0][1]):
                offset -= len(held.popleft()[1])

    def seek(self, position: Position | None) -> None:
        """Moves to a block, None for the first; reads nothing, so that a worker process can do it."""
        position = position or {"block": 0, "documents": self.documents.start, "offset": 0}
        if self._blocks is None or self.position["block"] != position["block"]:
            self.position, self._blocks, self._tokens = position, None, torch.empty(0)

    def __getitem__(self, index: int) -> Tensor:
        block, number = divmod(index, BLOCK)
        if self._blocks is None:
            self._blocks = self._read_blocks(self.position)
            self.position, self._tokens = next(self._blocks)
        while self.position["block"] < block:
            self.position, self._tokens = next(self._blocks)
        assert self.position["block"] == block, "the stream moves forward"
        start = number * self.length
        return self._tokens[start : start + self.length + 1].long()

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Position]:
        """Returns a batch, and the position of its last block: later sequences of all ranks lie in it or after it."""
        return torch.stack([self[index] for index in indices]), self.position


class StreamShard(DistributedSampler[Tensor]):
    """One rank's share of the order, from its ``start``-th sequence on, without end.

    Always a ``DistributedSampler``, so that Lightning does not replace it.
    """

    start = 0

    def __init__(self, num_replicas: int, rank: int, seed: int) -> None:
        # Not the base class's, which needs the length of the data.
        self.num_replicas, self.rank, self.seed, self.epoch = num_replicas, rank, seed, 0

    def __iter__(self) -> Iterator[Any]:
        block = -1
        for place in count(self.start * self.num_replicas + self.rank, self.num_replicas):
            if place // BLOCK != block:
                block = place // BLOCK
                digest = hashlib.sha256(f"{self.seed} {block}".encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))
                order = (block * BLOCK + torch.randperm(BLOCK, generator=generator)).tolist()
            yield order[place % BLOCK]

    def __len__(self) -> int:
        raise TypeError("The stream has no end.")


def as_it_is(batch: tuple[Tensor, Position]) -> tuple[Tensor, Position]:
    """A collate function: ``SequenceStream`` gives whole batches."""
    return batch


class StreamLoader(DataLoader[Tensor]):
    """An endless ``DataLoader`` that Lightning saves and restores with the checkpoint.

    A new iteration continues where the last one stopped. The state is the number of used batches, and the position of
    the next one's block.

    Args:
        dataset, sampler: the sequences, and the order of this rank.
        batch_size: sequences per batch and rank.
        num_workers: processes that fetch batches.
        order: what the order depends on besides seed, ranks and sizes.
        ahead: whether the consumer (Lightning) prefetches and calls `use` for each used batch. Otherwise a batch counts
            as used when it is given.
    """

    def __init__(
        self,
        dataset: SequenceStream,
        sampler: StreamShard,
        batch_size: int,
        num_workers: int = 0,
        order: dict[str, Any] | None = None,
        ahead: bool = False,
    ) -> None:
        # Its own generator: else each iteration would draw a seed from the global one, which dropout uses.
        settings: dict[str, Any] = {"num_workers": num_workers, "generator": torch.Generator(), "collate_fn": as_it_is}
        super().__init__(dataset, batch_size=batch_size, sampler=sampler, **settings)
        sizes = {"batch_size": batch_size, "sequence_length": dataset.length}
        self._order = {"seed": sampler.seed, "ranks": sampler.num_replicas, **sizes, **(order or {})}
        self._ahead, self._batches = ahead, 0
        self._position: Position | None = None
        self._unused: deque[Position] = deque()

    def __iter__(self) -> Iterator[Tensor]:  # type: ignore[override]
        self._unused.clear()
        self.dataset.seek(self._position)  # type: ignore[attr-defined]
        self.sampler.start = self._batches * self._order["batch_size"]  # type: ignore[attr-defined]
        for batch, position in super().__iter__():
            self._unused.append(position)
            if not self._ahead:
                self.use()
            yield batch

    def use(self) -> None:
        self._position = self._unused.popleft()
        self._batches += 1

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self._batches, "position": self._position, "order": self._order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues at the saved position in the next iteration; raises a ``ValueError`` if the order differs."""
        refuse_another_order(state["order"], self._order)
        self._batches, self._position = state["batches"], state["position"]


def open_stream(
    path: str, column: str, tokenizer: Tokenizer, length: int, val_sequences: int | None
) -> tuple[SequenceStream, PackedSequences]:
    """Returns the training stream, and the validation sequences in memory.

    Validation takes the first sequences (all for None) of the split ``validation`` or ``test``; without such a split,
    the first documents of ``train``, which training then skips.

    Raises:
        ValueError: the data cannot be opened or is too short, or ``val_sequences`` is None without such a split.
    """
    splits = open_splits(path, column)
    train = splits["train"]
    validation = splits.get("validation", splits.get("test", train))
    if validation is train and val_sequences is None:
        raise ValueError(
            f"`val_batches` None asks for all of a split 'validation' or 'test', but {path} has only"
            f" {', '.join(splits)}; give a number, and so many batches of 'train' are held out."
        )
    number = None if val_sequences is None else val_sequences * length + 1
    held_out = PackedSequences(validation.first_tokens(tokenizer, number), length)
    if validation is train:
        train.start = train.position()
    stream = SequenceStream(train, tokenizer, length)
    stream.check()
    return stream, held_out
