"""Text as bytes, in an order that can be taken up again anywhere.

A byte is a token: 256 of them, no tokenizer to download, and text is never far away: without a path, the
corpus is the source code of the running Python's standard library. Documents are joined by a zero byte and
the stream is cut into sequences that share one token at each border,

    tokens    t0 t1 t2 t3 t4 t5 t6 …            sequence_length = 3
    sequence  0: inputs t0 t1 t2, targets t1 t2 t3
    sequence  1: inputs t3 t4 t5, targets t4 t5 t6

so each token is a target exactly once. The order of the training sequences is a function of (seed, epoch)
alone, so the state of the loader is the epoch, and how many batches were handed out.
"""

import glob
import hashlib
import sys
import sysconfig
import tempfile
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

SEPARATOR = b"\0"  # stands in no text, so it can mean "here ends a document"
SUFFIXES = (".txt", ".md", ".py")
# Parts of the standard library that are no example of its style; other packages are no part of it anyway.
TESTS = {"test", "tests", "idle_test"}


class PackedSequences(Dataset[Tensor]):
    """Sequences of ``length + 1`` tokens, int64, whose targets do not overlap; a shorter rest is dropped."""

    def __init__(self, text: bytes, length: int) -> None:
        self.tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0)
        self.length = length
        self.digest = hashlib.sha256(text).hexdigest()

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
        if changed := [name for name in self._order if state["order"][name] != self._order[name]]:
            raise ValueError(
                "The checkpoint was taken in another order of batches: "
                + ", ".join(f"{name} was {state['order'][name]!r}, is {self._order[name]!r}" for name in changed)
                + "; resume with the same data, batch_size, seed and number of ranks, or load the weights alone."
            )
        self._epoch, self._trainer_epoch = state["epoch"], state["trainer_epoch"]
        self._batches, self._restored = state["batches"], True


def find_files(path: str | None) -> list[Path]:
    """The files of the corpus, ordered by a hash of their names: any first part of them is a fair sample.

    Raises:
        ValueError: there is no such path, or no text file in it.
    """
    root = Path(sysconfig.get_path("stdlib") if path is None else path).expanduser().absolute()
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise ValueError(f"TextDataModule needs a file or a folder of text, but {root} does not exist; check `path`.")
    suffixes = SUFFIXES if path is not None else (".py",)
    found = {}
    for file in root.rglob("*"):
        parts = file.relative_to(root).parts
        standard = parts[0].removesuffix(".py") in sys.stdlib_module_names and TESTS.isdisjoint(parts)
        hidden = any(part.startswith(".") for part in parts)
        if file.suffix.lower() in suffixes and not hidden and (standard or path is not None) and file.is_file():
            found[hashlib.sha256("/".join(parts).encode(errors="surrogateescape")).digest()] = file
    if not found:
        kinds = ", ".join(f"*{suffix}" for suffix in suffixes)
        raise ValueError(f"TextDataModule needs text, but found no {kinds} in {root}; give another `path`.")
    return [found[digest] for digest in sorted(found)]


def read_documents(files: list[Path]) -> list[bytes]:
    """The text of each file as UTF-8; what was not UTF-8 becomes U+FFFD, line ends become ``\\n``."""
    import datasets  # takes a second, and only runs that read text need it

    bars_were_on = not datasets.utils.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        # Streaming keeps no copy of the text that could go stale, and writes but a lock, hence the temporary
        # folder. File names are taken for patterns, hence the escape.
        with tempfile.TemporaryDirectory() as cache:
            names = [glob.escape(str(file)) for file in files]
            settings = {"sample_by": "document", "encoding_errors": "replace", "cache_dir": cache}
            rows = datasets.IterableDataset.from_text(names, **settings)
            return [row["text"].encode() for row in rows]
    finally:
        if bars_were_on:
            datasets.enable_progress_bars()


def hold_out(documents: list[bytes], fraction: float) -> tuple[bytes, bytes]:
    """Splits into training and validation text, the first whole documents that fit into the fraction.

    Where they would fill less than half of it (one file, or a few large ones), it is the tail of the text instead.
    """
    ends = list(accumulate(len(document) + len(SEPARATOR) for document in documents))
    wanted = int(fraction * ends[-1])
    whole = bisect_right(ends, wanted)
    if whole and ends[whole - 1] >= wanted / 2:
        return SEPARATOR.join(documents[whole:]), SEPARATOR.join(documents[:whole])
    text = SEPARATOR.join(documents)
    return text[: len(text) - wanted], text[len(text) - wanted :]


class TextDataModule(LightningDataModule):
    """Byte-level language modelling on any text; batches are int64 (batch_size, sequence_length + 1).

    Args:
        path: a file, a folder (its ``*.txt``, ``*.md`` and ``*.py`` files, hidden ones left out), or None for the
            standard library of the running Python, without its tests.
        sequence_length: targets per sequence.
        batch_size: sequences per batch and rank.
        val_fraction: share of the text held out for validation, as whole files chosen by a hash of their names;
            the tail of the text where there is one file, or a few large ones.
        val_batches: at most so many validation batches, of the same sequences on any number of ranks; None for all.
        seed: chooses the order of the training sequences; the validation text does not depend on it.
        max_bytes: at most so much text; None for all.
        num_workers: processes that fetch batches; the text is in memory, so 0 is mostly fastest.

    Raises:
        ValueError: a number makes no sense, or (in ``prepare_data``, before any logger writes) the text is too short.
    """

    def __init__(
        self,
        path: str | None = None,
        sequence_length: int = 256,
        batch_size: int = 8,
        val_fraction: float = 0.05,
        val_batches: int | None = 32,
        seed: int = 0,
        max_bytes: int | None = None,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        sizes = {"sequence_length": sequence_length, "batch_size": batch_size}
        for name, value in {**sizes, "val_batches": val_batches, "max_bytes": max_bytes}.items():
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        if not 0 < val_fraction < 1:
            raise ValueError(f"val_fraction must lie between 0 and 1, got {val_fraction}.")
        self.path, self.sequence_length, self.batch_size = path, sequence_length, batch_size
        self.val_fraction, self.val_batches = val_fraction, val_batches
        self.seed, self.max_bytes, self.num_workers = seed, max_bytes, num_workers
        self._sequences: tuple[PackedSequences, PackedSequences] | None = None

    def _shard(self) -> dict[str, int]:
        """Number of data-parallel ranks and which one this is; ranks that share a batch count as one."""
        sharding = self.trainer.distributed_sampler_kwargs if self.trainer is not None else None
        return sharding or {"num_replicas": 1, "rank": 0}

    def _read(self) -> tuple[PackedSequences, PackedSequences]:
        files = find_files(self.path)
        if self.max_bytes is not None:
            # The file that crosses the bound is the last one read, and is cut below.
            ends = accumulate(file.stat().st_size for file in files)
            files = files[: bisect_right(list(ends), self.max_bytes) + 1]
        documents = [document for document in read_documents(files) if document.strip()]
        if not documents:
            raise ValueError(f"TextDataModule needs text, but all {len(files)} files of {self.path} are empty.")
        documents = SEPARATOR.join(documents)[: self.max_bytes].split(SEPARATOR)
        train, val = (PackedSequences(text, self.sequence_length) for text in hold_out(documents, self.val_fraction))
        ranks = self._shard()["num_replicas"]
        for name, sequences, parts in (("training", train, ranks), ("validation", val, 1)):
            batch = parts * self.batch_size
            if len(sequences) < batch:
                raise ValueError(
                    f"TextDataModule needs at least {batch * self.sequence_length + 1} bytes for one {name} batch"
                    f" ({batch} sequences of {self.sequence_length}), but `path` {self.path}, `max_bytes`"
                    f" {self.max_bytes} and `val_fraction` {self.val_fraction} leave {len(sequences.tokens)};"
                    " give more text, or lower `batch_size` or `sequence_length`."
                )
        return train, val

    def prepare_data(self) -> None:
        """Reads and checks the text: Lightning calls this before any logger or checkpoint writes a file."""
        self._sequences = self._read()

    def setup(self, stage: str) -> None:
        """Reads the text in the processes that Lightning does not call ``prepare_data`` in."""
        self._sequences = self._sequences or self._read()

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Batches of this rank, in an order that depends on ``seed`` and the epoch only."""
        assert self._sequences is not None
        train = self._sequences[0]
        if self.trainer is not None and self.trainer.overfit_batches > 0:  # type: ignore[attr-defined]
            return DataLoader(train, self.batch_size, drop_last=True)  # the same few batches, again and again
        shard = self._shard()
        sampler = ShuffledShard(train, shard["num_replicas"], shard["rank"], seed=self.seed, drop_last=True)
        return ResumableLoader(train, sampler, self.batch_size, self.num_workers)

    def val_dataloader(self) -> DataLoader[Tensor]:
        """Batches in the order of the text; Lightning shards them over ranks. The last one may be smaller."""
        assert self._sequences is not None
        val: Dataset[Tensor] = self._sequences[1]
        if self.val_batches is not None:
            val = Subset(val, range(min(len(self._sequences[1]), self.val_batches * self.batch_size)))
        return DataLoader(val, self.batch_size, num_workers=self.num_workers, generator=torch.Generator())
