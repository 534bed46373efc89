"""Text data from one argument: a folder, a file, or a stream from the Hugging Face Hub.

Documents are joined by a separator, and the tokens are cut into sequences that share one token at each border:

    tokens    t0 t1 t2 t3 t4 t5 t6 …            sequence_length = 3
    sequence  0: inputs t0 t1 t2, targets t1 t2 t3
    sequence  1: inputs t3 t4 t5, targets t4 t5 t6

So each token is a target exactly once. Files are read into memory and shuffled in each epoch (`loader.py`). Paths that
begin with ``hf:`` are read during training (`stream.py`).
"""

import hashlib
import sys
import sysconfig
import tempfile
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from lightning_lowbit._lightning import LightningDataModule, rank_zero_warn
from lightning_lowbit.checks import integer, number
from lightning_lowbit.precision.run_settings import seed_or_global

from .loader import PackedSequences, ResumableLoader, ShuffledShard, shard_of
from .stream import HUB, SequenceStream, StreamLoader, StreamShard, no_progress_bars, open_stream, text_of
from .tokenizers import Tokenizer, encode_all, load_tokenizer

SUFFIXES = {
    "text": (".txt", ".md", ".py"),
    "json": tuple(suffix + packed for suffix in (".jsonl", ".json") for packed in ("", ".gz", ".zst")),
    "parquet": (".parquet",),
}
TABLES = (".csv", ".tsv", ".xlsx", ".arrow")
PACKED = (".gz", ".zst", ".xz", ".bz2", ".zip", ".tar")
# Folders of the standard library to leave out.
TESTS = {"test", "tests", "idle_test"}


def kind_of(file: Path) -> str | None:
    """``text``, ``json`` or ``parquet``, by the name of a file; None for other names."""
    return next((kind for kind, suffixes in SUFFIXES.items() if file.name.lower().endswith(suffixes)), None)


def find_files(path: str | None) -> list[Path]:
    """Returns the files of the corpus, ordered by a hash of their names, so that the first ones are a fair sample."""
    root = Path(sysconfig.get_path("stdlib") if path is None else path).expanduser().absolute()
    if root.is_file():
        if kind_of(root) is None and root.suffix.lower() in PACKED:
            raise ValueError(f"TextDataModule reads packed JSON, but no packed text such as {root}; unpack it first.")
        if kind_of(root) is None and (root.suffix.lower() in TABLES or b"\0" in _beginning(root)):
            raise ValueError(
                f"TextDataModule reads text in UTF-8, JSON and Parquet, but {root} is none of these. Write its text to "
                "*.txt, or its rows to *.jsonl or *.parquet."
            )
        return [root]
    if not root.is_dir():
        raise ValueError(
            f"TextDataModule needs a file or a folder of text, but {root}"
            f" {'is neither' if root.exists() else 'does not exist'}; check `path`, or write {HUB}NAME or"
            f" {HUB}NAME:CONFIG for a data set of the Hugging Face Hub."
        )
    files = {}
    # Beside the standard library lie all installed packages.
    standard = (top for top in root.iterdir() if top.name.removesuffix(".py") in sys.stdlib_module_names)
    tops = [root] if path is not None else [*standard]
    for file in (file for top in tops for file in (top, *top.rglob("*"))):
        parts = file.relative_to(root).parts
        wanted = kind_of(file) is not None if path is not None else file.suffix == ".py" and TESTS.isdisjoint(parts)
        if wanted and not any(part.startswith(".") for part in parts) and file.is_file():
            files[hashlib.sha256("/".join(parts).encode(errors="surrogateescape")).digest()] = file
    if not files:
        text, json, parquet = (", ".join(f"*{suffix}" for suffix in suffixes) for suffixes in SUFFIXES.values())
        raise ValueError(
            f"TextDataModule needs text, but found no {text} in {root}, and no {json} or {parquet} with rows of text;"
            " give another `path`."
        )
    return [files[digest] for digest in sorted(files)]


def _beginning(file: Path) -> bytes:
    with file.open("rb") as stream:
        return stream.read(2**16)


def read_rows(file: Path, kind: str) -> Iterator[dict[str, Any]]:
    """Yields the rows of a JSON or Parquet file."""
    import datasets

    # Streaming keeps no copy of the text; the temporary folder is for its lock file.
    with no_progress_bars(), tempfile.TemporaryDirectory() as cache:
        # A symlink with a plain name: `datasets` takes names as patterns, and those of packed files as addresses.
        plain = Path(cache, "rows" + file.suffix.lower())
        plain.symlink_to(file.absolute())
        try:
            rows = datasets.load_dataset(kind, data_files=str(plain), split="train", streaming=True, cache_dir=cache)
            yield from rows
        except Exception as error:  # a broken file, a missing package: each has its own class
            reason = " ".join(str(error).split()) or type(error).__name__
            what = "install `zstandard`" if "zst" in reason else "mend it"
            raise ValueError(
                f"{file} cannot be read as {kind} ({reason}); {what}, or take it out of `path`."
            ) from error


def read_documents(files: list[Path], column: str = "text") -> Iterator[bytes]:
    """Yields the documents of files as UTF-8: each text file is one, and each row of JSON or Parquet.

    In text files, invalid UTF-8 becomes U+FFFD, line ends become ``\\n``, and a byte order mark at the start is left
    out. Warns of the first, of characters NUL, and of rows without text.
    """
    for file in files:
        kind = kind_of(file)
        if kind in ("text", None):
            yield _read_text(file).encode()
        elif file.stat().st_size:
            rows = blanks = 0
            for row in read_rows(file, kind):
                yield text_of(row, column, str(file))
                rows, blanks = rows + 1, blanks + (row[column] is None)
            if blanks:
                rank_zero_warn(
                    f"{blanks} of {rows} rows of {file} have no text in the column {column!r}, and are left out."
                )


def _read_text(file: Path) -> str:
    try:
        text, fault = file.read_text(encoding="utf-8-sig"), ""
    except UnicodeDecodeError as error:
        text = file.read_text(encoding="utf-8-sig", errors="replace")
        fault = f"is not in UTF-8 ({error.reason}, at byte {error.start}): U+FFFD stands for what cannot be read"
    if "\0" in text and not fault:
        fault = "has characters NUL, as UTF-16 read as UTF-8 has, and stays so"
    if fault:
        how = f"iconv -f ENCODING -t UTF-8 '{file.name}' > new.txt"
        rank_zero_warn(f"{file} {fault}. Convert it, for example by: {how}")
    return text


def take_bytes(documents: Iterable[bytes], number: int | None) -> list[bytes]:
    """Returns the first documents that are not blank, up to ``number`` bytes with one separator between any two."""
    taken = []
    left = sys.maxsize if number is None else number
    for document in documents:
        if document.strip():
            taken.append(document[:left])
            left -= len(document) + 1
            if left < 0:
                break
    return taken


def hold_out(documents: list[bytes], fraction: float) -> tuple[list[bytes], list[bytes]]:
    """Splits documents into training and validation text: validation gets the first ones that fit into the fraction.

    If they fill less than half of it, because files are few and large, validation gets the tail of the text.
    """
    ends = list(accumulate(len(document) + 1 for document in documents))
    wanted = int(fraction * ends[-1])
    whole = bisect_right(ends, wanted)
    if whole and ends[whole - 1] >= wanted / 2:
        return documents[whole:], documents[:whole]
    # The tail begins in the middle of a document, unless the border lies between two.
    cut = ends[-1] - 1 - wanted
    first = bisect_right(ends, cut)
    into = cut - (ends[first - 1] if first else 0)
    return [*documents[:first], documents[first][:into]], [documents[first][into:], *documents[first + 1 :]]


class TextDataModule(LightningDataModule):
    """Language modeling on any text; batches are int64 (batch_size, sequence_length + 1).

    Args:
        path: a file; a folder (its ``*.txt``, ``*.md`` and ``*.py`` files, and rows of ``*.jsonl``, ``*.json``, also
            ``.gz`` or ``.zst``, and ``*.parquet``, no hidden files); None for Python's standard library without its
            tests; or ``hf:NAME[:CONFIG]``, e.g. ``hf:allenai/c4:en``, a data set of the Hugging Face Hub or a folder
            in that shape, read as an endless stream (without epochs: set the trainer's ``max_steps``).
        tokenizer: ``bytes``, or a name or folder for ``AutoTokenizer.from_pretrained``.
        column: the one with the text, in JSON, Parquet and data sets.
        sequence_length: targets per sequence.
        batch_size: sequences per batch and rank.
        val_fraction: share of the text for validation: whole documents chosen by a hash of their files' names, or the
            tail of the text if documents are too few and large. Not used for streams, nor with ``val_path``.
        val_batches: maximum number of validation batches, of the same sequences on any number of ranks; None for all.
            A stream takes them from its split ``validation`` or ``test``, or else from its first documents.
        seed: of the order of training sequences; None takes that of ``seed_everything``, or 0.
        max_bytes: maximum size of the text; None for all. Not for streams.
        num_workers: processes that fetch batches; usually best: 0 for text in memory, 1 or 2 for a stream.
        val_path: a file or folder of text for validation alone; training leaves out its files. Not for streams.

    Raises:
        ValueError: an argument is invalid; or (in ``prepare_data``, before any logger writes) text, column or tokenizer
            do not exist, or the text is too short.
    """

    def __init__(
        self,
        path: str | None = None,
        tokenizer: str = "bytes",
        column: str = "text",
        sequence_length: int = 256,
        batch_size: int = 8,
        val_fraction: float = 0.05,
        val_batches: int | None = 32,
        seed: int | None = None,
        max_bytes: int | None = None,
        num_workers: int = 0,
        val_path: str | None = None,
    ) -> None:
        super().__init__()
        integer("sequence_length", sequence_length, 1, "a number of tokens")
        integer("batch_size", batch_size, 1, "a number of sequences")
        integer("val_batches", val_batches, 1, "a number of batches", or_none=True)
        integer("max_bytes", max_bytes, 1, "a number of bytes", or_none=True)
        number("val_fraction", val_fraction, "a share of the text", above=0, below=1)
        self._streams = path is not None and path.startswith(HUB)
        if self._streams and max_bytes is not None:
            raise ValueError(
                f"max_bytes bounds text in memory, but {path} is a stream; bound it by the trainer's steps."
            )
        if val_path is not None and (self._streams or val_path.startswith(HUB)):
            raise ValueError(
                f"val_path is for text in memory, and {path if self._streams else val_path} is a stream, which "
                "validates on its own split: leave val_path out."
            )
        self.path, self.val_path, self.tokenizer, self.column = path, val_path, tokenizer, column
        self.sequence_length, self.batch_size = sequence_length, batch_size
        self.val_fraction, self.val_batches = val_fraction, val_batches
        self.seed, self.max_bytes, self.num_workers = seed_or_global(seed), max_bytes, num_workers
        self._sequences: tuple[PackedSequences | SequenceStream, PackedSequences] | None = None
        self._stream_loader: StreamLoader | None = None
        self._restored: dict[str, Any] = {}

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.tokenizer)

    @property
    def vocab_size(self) -> int:
        """1 + the largest possible token; loads the tokenizer if necessary."""
        return self._tokenizer.vocab_size

    def _check_length(self, name: str, sequences: PackedSequences, batch: int) -> None:
        if len(sequences) < batch:
            unit = "bytes" if self.tokenizer == "bytes" else "tokens"
            limits = f"`max_bytes` {self.max_bytes} and `val_fraction` {self.val_fraction}"
            if self._streams:
                limits = f"`val_batches` {self.val_batches}"
            elif self.val_path is not None:
                limits = f"`max_bytes` {self.max_bytes} and `val_path` {self.val_path}"
            raise ValueError(
                f"TextDataModule needs at least {batch * self.sequence_length + 1} {unit} for one {name} batch"
                f" ({batch} sequences of {self.sequence_length}), but `path` {self.path}, {limits} leave"
                f" {len(sequences.tokens)}; give more text, or lower `batch_size` or `sequence_length`."
            )

    def _documents(self, path: str | None, number: int | None = None, without: str | None = None) -> list[bytes]:
        held_out = set() if without is None else {file.resolve() for file in find_files(without)}
        files = [file for file in find_files(path) if file.resolve() not in held_out]
        if not files:
            raise ValueError(
                f"TextDataModule validates on all files of `path` {path}, and none is left for training; give other "
                f"text as `val_path`, or leave out {without}: then the share `val_fraction` is held out."
            )
        documents = take_bytes(read_documents(files, self.column), number)
        if not documents:
            raise ValueError(f"TextDataModule needs text, but all {len(files)} files of {path} are empty.")
        return documents

    def _read(self) -> tuple[PackedSequences | SequenceStream, PackedSequences]:
        if self._streams:
            wanted = None if self.val_batches is None else self.val_batches * self.batch_size
            stream, val = open_stream(str(self.path), self.column, self._tokenizer, self.sequence_length, wanted)
            self._check_length("validation", val, self.batch_size)
            return stream, val
        documents = self._documents(self.path, self.max_bytes, self.val_path)
        if self.val_path is None:
            parts = hold_out(documents, self.val_fraction)
        else:
            parts = documents, self._documents(self.val_path)
        train, val = (PackedSequences(encode_all(self._tokenizer, part), self.sequence_length) for part in parts)
        self._check_length("training", train, shard_of(self)["num_replicas"] * self.batch_size)
        self._check_length("validation", val, self.batch_size)
        return train, val

    def prepare_data(self) -> None:
        """Reads and checks the text, before any logger or checkpoint writes a file."""
        self._sequences = self._read()

    def setup(self, stage: str) -> None:
        self._sequences = self._sequences or self._read()
        self._stream_loader, self._restored = None, {}  # a new run starts at the first batch

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Batches of this rank, in an order that depends only on ``seed`` and the epoch; a stream has no epochs."""
        assert self._sequences is not None
        train, val = self._sequences
        shard, overfit = shard_of(self), getattr(self.trainer, "overfit_batches", 0)
        if overfit:  # the same few batches, repeated
            if isinstance(train, SequenceStream):
                if not isinstance(overfit, int):
                    raise ValueError(
                        f"A stream has no end to take a share of; give `overfit_batches` {overfit} as a number."
                    )
                train = train.first(overfit * self.batch_size * shard["num_replicas"])
            return DataLoader(train, self.batch_size, drop_last=True)
        if isinstance(train, PackedSequences):
            sampler = ShuffledShard(train, shard["num_replicas"], shard["rank"], seed=self.seed, drop_last=True)
            return ResumableLoader(train, sampler, self.batch_size, self.num_workers)
        if self._stream_loader is None:  # otherwise Lightning asks again during the run
            names = {"path": self.path, "column": self.column, "tokenizer": self.tokenizer}
            self._stream_loader = StreamLoader(
                train,
                StreamShard(shard["num_replicas"], shard["rank"], self.seed),
                self.batch_size,
                self.num_workers,
                order={**names, "validation text": val.digest},
                ahead=self.trainer is not None,
            )
            if self._restored:
                self._stream_loader.load_state_dict(self._restored)
        return self._stream_loader

    def state_dict(self) -> dict[str, Any]:
        """Returns the tokenizer's name, and the position in a stream, which Lightning drops at the end of an epoch."""
        position = self._stream_loader.state_dict() if self._stream_loader is not None else {}
        return {"tokenizer": self.tokenizer, **position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keeps the position for ``train_dataloader``, which Lightning calls next; warns of another tokenizer."""
        self._restored = {name: value for name, value in state.items() if name != "tokenizer"}
        trained = state.get("tokenizer", self.tokenizer)  # older checkpoints do not tell
        if trained != self.tokenizer:
            rank_zero_warn(
                f"The checkpoint was trained with the tokenizer {trained!r}, and the data has {self.tokenizer!r}, whose"
                f" ids may stand for other text; set data.init_args.tokenizer to {trained!r}."
            )

    def on_before_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        """Tells a stream that a batch is used: Lightning prefetches one batch."""
        if self._stream_loader is not None and self.trainer is not None and self.trainer.training:
            self._stream_loader.use()
        return batch

    def val_dataloader(self) -> DataLoader[Tensor]:
        """Batches in the order of the text, sharded by Lightning; the last one may be smaller."""
        assert self._sequences is not None
        val: Dataset[Tensor] = self._sequences[1]
        if self.val_batches is not None:
            val = Subset(val, range(min(len(self._sequences[1]), self.val_batches * self.batch_size)))
        return DataLoader(val, self.batch_size, num_workers=self.num_workers, generator=torch.Generator())
