"""The text data: what is read, how it is packed and split, and that its order survives every restart."""

import gzip
import json
from collections import Counter
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from lightning_lowbit.recipes.data import TextDataModule, find_files, hold_out, read_documents, take_bytes
from lightning_lowbit.recipes.loader import PackedSequences
from tests.recipes.test_tokenizers import save_tokenizer

SIZES = {"sequence_length": 8, "batch_size": 2}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twelve files, so that a quarter of them can be held out."""
    for number in range(12):
        file = tmp_path / "text" / f"part{number % 3}" / f"{number}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{number:02d}" * 12)
    return tmp_path / "text"


class Recorder(LightningModule):
    """Remembers the batches it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[list[list[int]]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append(batch.tolist())
        torch.rand(3)  # moves the global generator, as dropout would
        return self.weight * batch.float().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.weight)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(path: Path, ckpt_path: Path | None = None, seed: int = 0, num_workers: int = 0, **trainer: Any) -> Recorder:
    """A quiet run on the CPU."""
    model = Recorder()
    data = TextDataModule(str(path), val_fraction=0.25, seed=seed, num_workers=num_workers, **SIZES)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    settings = {"accelerator": "cpu", "devices": 1, "enable_checkpointing": False, **quiet, **trainer}
    Trainer(**settings).fit(model, datamodule=data, ckpt_path=ckpt_path)
    return model


def test_sequences_share_one_token_and_no_target() -> None:
    sequences = PackedSequences(torch.arange(1, 15, dtype=torch.uint8), length=4)
    assert [sequence.tolist() for sequence in sequences] == [[1, 2, 3, 4, 5], [5, 6, 7, 8, 9], [9, 10, 11, 12, 13]]
    assert sequences[0].dtype == torch.int64
    assert len(PackedSequences(torch.empty(0), 4)) == len(PackedSequences(torch.arange(4), 4)) == 0


def test_reads_any_file_as_utf8(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    contents = {"a [1].txt": "é\r\n".encode(), "b*.md": b"bad \xff", "[!c].PY": b"", "d#{1}::é.txt": b"d"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    for number in range(20):  # beyond the number of files at which a progress bar would appear
        (tmp_path / f"{number}.txt").write_text(str(number))
    for hidden in (".git/config.txt", "image.png"):
        (tmp_path / hidden).parent.mkdir(exist_ok=True)
        (tmp_path / hidden).write_text("not text")
    bars = datasets.utils.are_progress_bars_disabled()
    before = sorted(tmp_path.rglob("*"))
    files = find_files(str(tmp_path))
    texts = {file.name: text for file, text in zip(files, read_documents(files), strict=True)}
    assert len(texts) == 24
    assert [texts[name] for name in contents] == ["é\n".encode(), "bad \N{REPLACEMENT CHARACTER}".encode(), b"", b"d"]
    assert sorted(tmp_path.rglob("*")) == before
    assert datasets.utils.are_progress_bars_disabled() == bars
    assert "".join(capfd.readouterr()) == ""


def test_file_changed_between_runs_is_read_anew(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    for text in ("first " * 50, "other " * 50):
        file.write_text(text)
        data = TextDataModule(str(file), val_fraction=0.2, **SIZES)
        data.prepare_data()
        data.setup("fit")
        assert bytes(data.train_dataloader().dataset.tokens.tolist()).startswith(text[:5].encode())


def test_holds_out_whole_files_or_else_the_tail() -> None:
    documents = [b"aaa", b"bbb", b"ccc", b"ddd"]
    assert hold_out(documents, 0.5) == ([b"ccc", b"ddd"], [b"aaa", b"bbb"])
    assert hold_out(documents, 0.3) == ([b"bbb", b"ccc", b"ddd"], [b"aaa"])
    assert hold_out([b"abcdefghi"], 0.2) == ([b"abcdefg"], [b"hi"])
    assert hold_out([b"a" * 90, b"b" * 8], 0.1) == ([b"a" * 89], [b"a", b"b" * 8])


def test_the_tail_is_that_of_the_joined_text() -> None:
    documents = [b"a" * 30, b"b" * 7, b"", b"c" * 20]
    text = b"\0".join(documents)
    for wanted in range(1, len(text)):
        train, val = hold_out(documents, (wanted + 0.5) / (len(text) + 1))
        if train[0][:1] == b"a":
            cut = len(text) - wanted
            assert (b"\0".join(train), b"\0".join(val)) == (text[:cut], text[cut:])


def test_held_out_files_do_not_depend_on_the_seed_or_the_place(folder: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    texts = []
    for seed in (0, 1):
        data = TextDataModule(str(folder), val_fraction=0.25, seed=seed, **SIZES)
        data.prepare_data()
        data.setup("fit")
        texts.append([sequences.tokens.tolist() for sequences in data._sequences or ()])
        folder = folder.rename(moved)
    train, val = (bytes(tokens).split(b"\0") for tokens in texts[0])
    assert texts[0] == texts[1]
    assert len(val) == 3 and len(train) == 9 and not set(val) & set(train)


def test_standard_library() -> None:
    names = [file.as_posix() for file in find_files(None)]
    assert any(name.endswith("/json/decoder.py") for name in names)
    assert not [name for name in names if "/test/" in name or "/tests/" in name or "-packages/" in name]
    data = TextDataModule(max_bytes=100_000)
    data.prepare_data()
    data.setup("fit")
    train, val = data._sequences or pytest.fail("nothing was read")
    assert 90_000 < len(train.tokens) + len(val.tokens) <= 100_000
    assert b"import " in bytes(train.tokens.tolist())
    (first, *_), (held_out, *_) = data.train_dataloader(), data.val_dataloader()
    assert first.shape == held_out.shape == (8, 257) and first.max() < 256


def test_order_depends_on_seed_and_epoch_only(folder: Path) -> None:
    torch.manual_seed(1)
    one = fit(folder, max_epochs=2).seen
    torch.manual_seed(2)
    assert fit(folder, max_epochs=2, num_workers=2).seen == one
    first, second = one[: len(one) // 2], one[len(one) // 2 :]
    assert first != second
    assert fit(folder, max_epochs=1, seed=1).seen != first


def test_reading_batches_leaves_the_global_generator_alone(folder: Path) -> None:
    data = TextDataModule(str(folder), val_fraction=0.25, **SIZES)
    data.prepare_data()
    data.setup("fit")
    before = torch.get_rng_state()
    assert len(list(data.train_dataloader())) == len(data.train_dataloader())
    list(data.val_dataloader())
    assert torch.equal(torch.get_rng_state(), before)


class SaveAlways(Callback):
    """Saves after each optimizer step and after each epoch, at the moments of ``ModelCheckpoint``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        file = self.folder / f"step{trainer.global_step}.ckpt"
        if not file.exists():  # with accumulation, a batch need not end a step
            trainer.save_checkpoint(file)

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.folder / f"epoch{trainer.current_epoch}.ckpt")


@pytest.mark.fast("max_epochs-2-0", "max_steps-1-2")
@pytest.mark.parametrize(
    "limit, accumulate, num_workers",
    [*product(["max_epochs", "max_steps"], [1, 2], [0]), ("max_epochs", 2, 2), ("max_steps", 1, 2)],
)
def test_resumed_run_sees_the_batches_of_the_uninterrupted_one(
    folder: Path, tmp_path: Path, limit: str, accumulate: int, num_workers: int
) -> None:
    batches = 13  # per epoch; odd, so with accumulation the last batch makes a step of its own
    steps = -(-batches // accumulate)
    common = {"num_workers": num_workers, "accumulate_grad_batches": accumulate, "limit_val_batches": 1}
    common[limit] = 3 if limit == "max_epochs" else 3 * steps
    whole = fit(folder, callbacks=[SaveAlways(tmp_path)], **common).seen
    assert len(whole) == 3 * batches

    # The middle and the end of the first epoch, the beginning and the middle of the second, the end of the run.
    # Workers start anew for each epoch, which takes time: fewer positions.
    for step in (3, steps) if num_workers else (1, 3, steps - 1, steps, steps + 1, steps + 4, 3 * steps - 1):
        epoch, step_in_epoch = divmod(step, steps)
        resumed = fit(folder, tmp_path / f"step{step}.ckpt", **common).seen
        assert resumed == whole[batches * epoch + accumulate * step_in_epoch :], f"resumed after step {step}"
    assert (
        fit(folder, tmp_path / "epoch0.ckpt", callbacks=[SaveAlways(tmp_path / "again")], **common).seen == whole[13:]
    )
    assert fit(folder, tmp_path / "again" / f"step{2 * steps - 1}.ckpt", **common).seen[-batches:] == whole[-batches:]
    assert fit(folder, tmp_path / "again" / "epoch1.ckpt", **common).seen == whole[-batches:]


def test_checkpoint_of_another_order_is_refused(folder: Path, tmp_path: Path) -> None:
    fit(folder, callbacks=[SaveAlways(tmp_path)], max_epochs=1)
    with pytest.raises(ValueError, match="another order of batches: seed was 0, is 1; resume with the same data"):
        fit(folder, tmp_path / "step3.ckpt", seed=1, max_epochs=1)
    (folder / "new.txt").write_text("changed text")
    with pytest.raises(ValueError, match="another order of batches: text was"):
        fit(folder, tmp_path / "step3.ckpt", max_epochs=1)


def test_overfitting_repeats_the_first_batches(folder: Path) -> None:
    seen = fit(folder, max_epochs=3, overfit_batches=2).seen
    assert seen == seen[:2] * 3 and seen[0] != seen[1]


def write_rows(file: Path, texts: list[str | None], column: str = "text") -> Path:
    """Rows as Parquet or JSON lines, by the name of the file."""
    rows = [{column: text, "number": number} for number, text in enumerate(texts)]
    if file.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file, row_group_size=2)
    else:
        lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
        file.write_bytes(gzip.compress(lines) if file.suffix == ".gz" else lines)
    return file


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows [1].jsonl.gz", "rows.JSON.gz", "rows.parquet"])
def test_rows_are_documents(tmp_path: Path, name: str) -> None:
    file = write_rows(tmp_path / name, ["one", None, "zwei\r\nü", " "], column="content")
    expected = [b"one", b"", "zwei\r\nü".encode(), b" "]
    for path in (file, tmp_path):
        assert list(read_documents(find_files(str(path)), "content")) == expected
    assert take_bytes(expected, None) == [expected[0], expected[2]]
    assert take_bytes(expected, 6) == [b"one", b"zw"]


def test_a_folder_can_mix_kinds(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", ["a1", "a2"])
    write_rows(tmp_path / "b.parquet", ["b1", "b2", "b3"])
    write_rows(tmp_path / "c.json.gz", ["c1"])
    for name in ("d.txt", "e.md"):
        (tmp_path / name).write_text(name[0] + "1")
    files = find_files(str(tmp_path))
    documents = [document.decode() for document in read_documents(files)]
    assert [name for name in documents if name[1] == "1"] == [file.name[0] + "1" for file in files]
    assert sorted(documents) == ["a1", "a2", "b1", "b2", "b3", "c1", "d1", "e1"]


def test_tokens_of_a_pretrained_tokenizer(tmp_path: Path) -> None:
    name = save_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "text").mkdir()
    write_rows(tmp_path / "text" / "rows.jsonl", [f"the document {number}" for number in range(100)])
    data = TextDataModule(str(tmp_path / "text"), tokenizer=name, **SIZES)
    data.prepare_data()
    data.setup("fit")
    train, val = data._sequences or pytest.fail("nothing was read")
    row = [*val.tokens.tolist(), 1, *train.tokens.tolist()]
    expected = data._tokenizer.encode([f"the document {number}".encode() for number in range(100)])
    assert row == expected.tolist()[:-1]
    batch = next(iter(data.train_dataloader()))
    assert batch.dtype == torch.int64 and batch.shape == (2, 9) and batch.max() < data.vocab_size


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_an_epoch_holds_each_sequence_once(folder: Path, ranks: int, num_workers: int) -> None:
    seen: list[tuple[int, ...]] = []
    for rank in range(ranks):
        data = TextDataModule(str(folder), val_fraction=0.25, num_workers=num_workers, sequence_length=8, batch_size=1)
        sharding = {"num_replicas": ranks, "rank": rank}
        data.trainer = SimpleNamespace(distributed_sampler_kwargs=sharding, overfit_batches=0.0)  # type: ignore[assignment]
        data.prepare_data()
        data.setup("fit")
        seen += [tuple(sequence) for batch in data.train_dataloader() for sequence in batch.tolist()]
    train, _ = data._sequences or pytest.fail("nothing was read")
    tokens = train.tokens.tolist()
    slow = [tuple(tokens[start : start + 9]) for start in range(0, len(tokens) - 8, 8)]
    assert len(slow) == 27 and len(seen) == 27 // ranks * ranks
    assert Counter(seen) <= Counter(slow)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_share_the_text_without_overlap(folder: Path, ranks: int) -> None:
    shards = []
    for rank in range(ranks):
        data = TextDataModule(str(folder), val_fraction=0.25, **SIZES)
        sharding = {"num_replicas": ranks, "rank": rank}
        data.trainer = SimpleNamespace(distributed_sampler_kwargs=sharding, overfit_batches=0.0)  # type: ignore[assignment]
        data.prepare_data()
        data.setup("fit")
        loader = data.train_dataloader()
        loader.sampler.set_epoch(1)  # type: ignore[attr-defined]
        shards.append(list(loader.sampler))
        assert len(list(loader)) == len(loader) == 27 // ranks // 2
    indices = sum(shards, [])
    assert len(set(indices)) == len(indices) == 27 // ranks * ranks


@pytest.mark.parametrize("use_distributed_sampler", [True, False])
def test_two_processes_share_each_epoch(folder: Path, tmp_path: Path, use_distributed_sampler: bool) -> None:
    fit(
        folder,
        devices=2,
        strategy="ddp_fork",
        max_epochs=2,
        limit_val_batches=0,
        use_distributed_sampler=use_distributed_sampler,
        callbacks=[SaveSeen(tmp_path)],
    )
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert len(first) == len(second) == 2 * 6
    for epoch in (0, 1):
        one, other = (sum(seen[6 * epoch : 6 * epoch + 6], []) for seen in (first, second))
        assert len(one) == len(other) == 12
        assert one != other


class SaveSeen(Callback):
    """Brings a rank's batches out of its process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        torch.save(pl_module.seen, self.folder / f"{trainer.global_rank}.pt")


@pytest.mark.parametrize(
    ("files", "arguments", "message"),
    [
        (None, {}, "does not exist; check `path`"),
        ({}, {}, r"found no \*.txt, \*.md, \*.py in .*; give another `path`"),
        ({"a.txt": "", "b.txt": " \n"}, {}, "all 2 files of .* are empty"),
        ({"a.txt": "short"}, {}, "at least 17 bytes for one training batch .* leave 5; give more text"),
        ({"a.txt": "x" * 100}, {}, "at least 17 bytes for one validation batch .* leave 5; give more text"),
        ({"a.json": '[{"a": 1, "b": 2}]'}, {}, "a.json has no column 'text', but has 'a', 'b'; name the one"),
        ({"a.json": '[{"a": 1}]'}, {"column": "a"}, "'a' of .*a.json must hold text, but holds int; give another"),
        ({"a.jsonl": "{ not JSON"}, {}, r"a.jsonl cannot be read as json \(.+\); mend it, or take it out of `path`"),
        ({"a.parquet": "not Parquet"}, {}, r"a.parquet cannot be read as parquet \(.+\); mend it"),
        ({"a.json": ""}, {}, "all 1 files of .* are empty"),
        ({"a.txt": "text"}, {"tokenizer": "/no/where"}, "'/no/where' cannot be loaded"),
        ({"a.txt": "x" * 999}, {"max_bytes": 100}, "`max_bytes` 100 .* leave 5; give more text"),
    ],
)
def test_unusable_text_is_refused_before_anything_is_written(
    tmp_path: Path, files: dict[str, str] | None, arguments: dict[str, Any], message: str
) -> None:
    text, root = tmp_path / "text", tmp_path / "run"
    root.mkdir()
    if files is not None:
        text.mkdir()
    for name, content in (files or {}).items():
        (text / name).write_text(content)
    trainer = Trainer(accelerator="cpu", default_root_dir=root, logger=TensorBoardLogger(root), max_epochs=1)
    with pytest.raises(ValueError, match=message) as error:
        trainer.fit(Recorder(), datamodule=TextDataModule(str(text), **SIZES, **arguments))
    assert "\n" not in str(error.value)
    assert not list(root.iterdir())


@pytest.mark.parametrize("argument", ["sequence_length", "batch_size", "val_batches", "max_bytes", "val_fraction"])
def test_meaningless_numbers_are_refused(argument: str) -> None:
    with pytest.raises(ValueError, match=f"{argument} must .*, got 0"):
        TextDataModule(**{argument: 0})


def test_packed_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.txt.gz").write_bytes(b"packed")
    with pytest.raises(ValueError, match="unpack it first"):
        find_files(str(tmp_path / "text.txt.gz"))
