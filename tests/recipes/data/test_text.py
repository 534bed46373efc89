"""Text data: what is read, and how it is packed and split."""

import gzip
import json
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import torch

from lightning_lowbit.recipes.data import TextDataModule, find_files, hold_out, read_documents, take_bytes
from lightning_lowbit.recipes.loader import PackedSequences
from tests.recipes.data.runs import SIZES, assert_refused
from tests.recipes.test_tokenizers import save_tokenizer
from tests.tables import each


def read(path, **arguments):
    """A data module that has read a text, and its training and validation tokens."""
    data = TextDataModule(path, **arguments)
    data.prepare_data()
    data.setup("fit")
    return data, *(sequences.tokens for sequences in data._sequences or pytest.fail("nothing was read"))


def test_sequences_share_one_token_and_no_target():
    sequences = PackedSequences(torch.arange(1, 15, dtype=torch.uint8), length=4)
    assert [sequence.tolist() for sequence in sequences] == [[1, 2, 3, 4, 5], [5, 6, 7, 8, 9], [9, 10, 11, 12, 13]]
    assert sequences[0].dtype == torch.int64
    assert len(PackedSequences(torch.empty(0), 4)) == len(PackedSequences(torch.arange(4), 4)) == 0


def test_reads_any_file_as_utf8(tmp_path, capfd):
    contents = {"a [1].txt": "\ufeffé\r\n".encode(), "b*.md": b"bad \xff", "[!c].PY": b"", "d#{1}::é.txt": b"d"}
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
    with pytest.warns(UserWarning, match=r"b\*\.md is not in UTF-8 \(invalid start byte, at byte 4\)") as caught:
        texts = {file.name: text for file, text in zip(files, read_documents(files), strict=True)}
    assert len(caught) == 1
    assert len(texts) == 24
    assert [texts[name] for name in contents] == ["é\n".encode(), "bad \N{REPLACEMENT CHARACTER}".encode(), b"", b"d"]
    assert sorted(tmp_path.rglob("*")) == before
    assert datasets.utils.are_progress_bars_disabled() == bars
    assert "".join(capfd.readouterr()) == ""


def test_text_in_utf_16_is_told_without_a_byte_order_mark(tmp_path):
    file = tmp_path / "text.txt"
    file.write_bytes("abc".encode("utf-16-le"))
    with pytest.warns(
        UserWarning, match=r"has characters NUL, as UTF-16 read as UTF-8 has, .* iconv -f ENCODING -t UT"
    ):
        assert [*read_documents([file])] == [b"a\0b\0c\0"]


def test_file_changed_between_runs_is_read_anew(tmp_path):
    file = tmp_path / "text.txt"
    for text in ("first " * 50, "other " * 50):
        file.write_text(text)
        _, train, _ = read(str(file), val_fraction=0.2, **SIZES)
        assert bytes(train.tolist()).startswith(text[:5].encode())


def test_holds_out_whole_files_or_else_the_tail_of_the_joined_text():
    documents = [b"aaa", b"bbb", b"ccc", b"ddd"]
    assert hold_out(documents, 0.5) == ([b"ccc", b"ddd"], [b"aaa", b"bbb"])
    assert hold_out(documents, 0.3) == ([b"bbb", b"ccc", b"ddd"], [b"aaa"])
    assert hold_out([b"abcdefghi"], 0.2) == ([b"abcdefg"], [b"hi"])
    assert hold_out([b"a" * 90, b"b" * 8], 0.1) == ([b"a" * 89], [b"a", b"b" * 8])
    documents = [b"a" * 30, b"b" * 7, b"", b"c" * 20]
    text = b"\0".join(documents)
    for wanted in range(1, len(text)):
        train, val = hold_out(documents, (wanted + 0.5) / (len(text) + 1))
        if train[0][:1] == b"a":
            cut = len(text) - wanted
            assert (b"\0".join(train), b"\0".join(val)) == (text[:cut], text[cut:])


def test_held_out_files_do_not_depend_on_the_seed_or_the_place(folder, tmp_path):
    texts = []
    for seed in (0, 1):
        _, *parts = read(str(folder), val_fraction=0.25, seed=seed, **SIZES)
        texts.append([bytes(tokens.tolist()).split(b"\0") for tokens in parts])
        folder = folder.rename(tmp_path / "elsewhere")
    assert texts[0] == texts[1]
    train, val = texts[0]
    assert len(val) == 3 and len(train) == 9 and not set(val) & set(train)


def test_validation_text_of_its_own(folder, tmp_path):
    (tmp_path / "val.txt").write_text("other text " * 9)
    _, train, val = read(str(folder), val_path=str(tmp_path / "val.txt"), val_fraction=0.5, max_bytes=99, **SIZES)
    assert bytes(val.tolist()).decode() == "other text " * 9
    assert len(train) == 99, "validation took its share of the text, or is bounded, too"
    for path, val_path in (("hf:./c4", str(folder)), (str(folder), "hf:./c4")):
        with pytest.raises(ValueError, match=r"and hf:\./c4 is a stream, .* leave val_path out"):
            TextDataModule(path, val_path=val_path)
    (tmp_path / "val.txt").write_text("short")
    message = "17 bytes for one validation batch .* `val_path` .*val.txt leave 5; give more"
    assert_refused(str(folder), message, val_path=str(tmp_path / "val.txt"), **SIZES)


def test_training_leaves_out_the_files_of_the_validation_text(folder, tmp_path):
    (tmp_path / "val.txt").write_text("other text " * 9)
    _, alone, _ = read(str(folder), val_path=str(tmp_path / "val.txt"), **SIZES)
    (inside := folder / "sub").mkdir()
    (inside / "val.txt").write_text("other text " * 9)
    (tmp_path / "link").symlink_to(inside)
    for val_path in (inside / "val.txt", inside, tmp_path / "link"):
        _, train, val = read(str(folder), val_path=str(val_path), **SIZES)
        assert train.equal(alone) and bytes(val.tolist()).decode() == "other text " * 9
    assert_refused(str(folder), "none is left for training; give other text", val_path=str(folder), **SIZES)


def test_standard_library():
    names = [file.as_posix() for file in find_files(None)]
    assert any(name.endswith("/json/decoder.py") for name in names)
    assert not [name for name in names if "/test/" in name or "/tests/" in name or "-packages/" in name]
    data, train, val = read(None, max_bytes=100_000)
    assert 90_000 < len(train) + len(val) <= 100_000
    assert b"import " in bytes(train.tolist())
    (first, *_), (held_out, *_) = data.train_dataloader(), data.val_dataloader()
    assert first.shape == held_out.shape == (8, 257) and first.max() < 256


def write_rows(file, texts, column="text"):
    """Rows as Parquet or JSON lines, by the name of the file."""
    rows = [{column: text, "number": number} for number, text in enumerate(texts)]
    if file.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file, row_group_size=2)
    else:
        lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
        file.write_bytes(gzip.compress(lines) if file.suffix == ".gz" else lines)
    return file


def test_rows_are_documents(tmp_path):
    expected = [b"one", b"", "zwei\r\nü".encode(), b" "]
    for name in ("rows.jsonl", "rows.json", "rows [1].jsonl.gz", "rows.JSON.gz", "rows.parquet"):
        file = write_rows(tmp_path / name, ["one", None, "zwei\r\nü", " "], column="content")
        with pytest.warns(UserWarning, match="1 of 4 rows of .* have no text in the column 'content'"):
            assert list(read_documents(find_files(str(file)), "content")) == expected, name
    assert take_bytes(expected, None) == [expected[0], expected[2]]
    assert take_bytes(expected, 6) == [b"one", b"zw"]


def test_a_folder_can_mix_kinds(tmp_path):
    write_rows(tmp_path / "a.jsonl", ["a1", "a2"])
    write_rows(tmp_path / "b.parquet", ["b1", "b2", "b3"])
    write_rows(tmp_path / "c.json.gz", ["c1"])
    for name in ("d.txt", "e.md"):
        (tmp_path / name).write_text(name[0] + "1")
    files = find_files(str(tmp_path))
    documents = [document.decode() for document in read_documents(files)]
    assert [name for name in documents if name[1] == "1"] == [file.name[0] + "1" for file in files]
    assert sorted(documents) == ["a1", "a2", "b1", "b2", "b3", "c1", "d1", "e1"]


def test_tokens_of_a_pretrained_tokenizer(tmp_path):
    name = save_tokenizer(tmp_path / "tokenizer")
    documents = [f"the document {number}" for number in range(100)]
    data, train, val = read(str(write_rows(tmp_path / "rows.jsonl", documents)), tokenizer=name, **SIZES)
    expected = data._tokenizer.encode([document.encode() for document in documents])
    assert [*val.tolist(), 1, *train.tolist()] == expected.tolist()[:-1]
    batch = next(iter(data.train_dataloader()))
    assert batch.dtype == torch.int64 and batch.shape == (2, 9) and batch.max() < data.vocab_size


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
def test_unusable_text_is_refused_before_anything_is_written(files, arguments, message, tmp_path):
    for name, content in (files or {}).items():
        (tmp_path / name).write_text(content)
    path = tmp_path / "nowhere" if files is None else tmp_path
    assert_refused(str(path), message, **SIZES, **arguments)


@each("argument", ["sequence_length", "batch_size", "val_batches", "max_bytes", "val_fraction"])
def test_meaningless_numbers_are_refused(argument):
    with pytest.raises(ValueError, match=f"{argument} is a .*; got 0"):
        TextDataModule(**{argument: 0})


@each(
    "name, data, message",
    [
        ("rows.csv", b"a,b\n1,2\n", "rows.csv is none of these. Write its text to"),
        ("weights.bin", b"text\0\1\2", "weights.bin is none of these. Write its text to"),
        ("text.txt.gz", b"packed", "unpack it first"),
    ],
)
def test_files_that_are_no_text_are_refused(name, data, message):
    Path(name).write_bytes(data)
    with pytest.raises(ValueError, match=message):
        find_files(name)
    with pytest.raises(ValueError, match="/dev/null is neither; check `path`"):
        find_files("/dev/null")
