"""Any text, as bytes.

A byte is a token: 256 of them, no tokenizer to download, and text is never far away: without a path, the
corpus is the source code of the running Python's standard library. Documents are joined by a zero byte and
the stream is cut into sequences that share one token at each border,

    tokens    t0 t1 t2 t3 t4 t5 t6 …            sequence_length = 3
    sequence  0: inputs t0 t1 t2, targets t1 t2 t3
    sequence  1: inputs t3 t4 t5, targets t4 t5 t6

so each token is a target exactly once.
"""

import glob
import hashlib
import sys
import sysconfig
import tempfile
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from lightning_lowbit.precision.base import global_seed

from .loader import PackedSequences, ResumableLoader, ShuffledShard

SEPARATOR = b"\0"  # stands in no text, so it can mean "here ends a document"
SUFFIXES = (".txt", ".md", ".py")
# Parts of the standard library that are no example of its style; other packages are no part of it anyway.
TESTS = {"test", "tests", "idle_test"}


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
        seed: chooses the order of the training sequences, not the validation text; None takes that of
            ``seed_everything``, or 0.
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
        seed: int | None = None,
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
        self.seed, self.max_bytes, self.num_workers = global_seed() if seed is None else seed, max_bytes, num_workers
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
