"""The stream: every sequence once, on any number of ranks and workers, across every restart and past the end."""

import gzip
import json
import pickle
from collections import Counter
from itertools import islice, product
from pathlib import Path

import pytest
import torch

from lightning_lowbit.recipes.data import TextDataModule
from lightning_lowbit.recipes.stream import BLOCK, SequenceStream, StreamLoader, StreamShard, open_stream
from lightning_lowbit.recipes.tokenizers import load_tokenizer
from tests.lightning_imports import quiet_trainer
from tests.recipes.data.runs import Recorder, SaveAlways, assert_refused
from tests.recipes.data.streams import C4, LENGTH, fit, write_c4
from tests.recipes.test_tokenizers import save_tokenizer
from tests.tables import each


def slow_sequences(texts, number, length=LENGTH):
    """The first sequences of the endless stream of bytes."""
    row = []
    while len(row) <= number * length:
        for text in texts:
            row += [*text.encode(), 0]
    return [tuple(row[index * length : (index + 1) * length + 1]) for index in range(number)]


def open_loader(ranks=1, rank=0, batch_size=2, num_workers=0, tokenizer="bytes"):
    stream, _ = open_stream(C4, "text", load_tokenizer(tokenizer), LENGTH, 3)
    return StreamLoader(stream, StreamShard(ranks, rank, seed=0), batch_size, num_workers)


def take(loader, batches):
    return [[tuple(sequence) for sequence in batch.tolist()] for batch in islice(loader, batches)]


@pytest.mark.fast("once-1-2")
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("shards", [(500, 1, 500), (11, 4)], ids=["once", "again and again"])
def test_ranks_and_workers_share_the_stream(shards, ranks, num_workers):
    texts = write_c4(shards)
    batches = 3 * BLOCK // (24 // ranks * ranks)
    seen = [take(open_loader(ranks, rank, 24 // ranks, num_workers), batches) for rank in range(ranks)]
    sequences = slow_sequences(texts, 3 * BLOCK)
    steps = [sum(step, []) for step in zip(*seen, strict=True)]
    assert Counter(sum(steps, [])) == Counter(sequences)
    whole = take(open_loader(batch_size=24), batches)
    assert [Counter(step) for step in steps] == [Counter(step) for step in whole]
    assert whole[0] != sequences[:24]


def test_rows_without_text_are_told_once():
    Path("rows").mkdir()
    rows = [{"text": text} for text in ("a document", None, "another document", None)]
    Path("rows/train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.warns(UserWarning) as warned:
        stream, _ = open_stream("hf:./rows", "text", load_tokenizer("bytes"), LENGTH, 1)
        take(StreamLoader(stream, StreamShard(1, 0, seed=0), 2, 0), 3)
    (message,) = [str(each.message) for each in warned]
    assert message.startswith("A row of hf:./rows (train) has no text in the column 'text', and is left out")


def test_a_tokenizer_of_transformers(tmp_path):
    name = save_tokenizer(tmp_path / "tokenizer")
    texts = write_c4((300, 300), text="the document {}")
    tokenizer = load_tokenizer(name)
    row = tokenizer.encode([text.encode() for text in texts]).tolist() * 3
    expected = [tuple(row[index * LENGTH : (index + 1) * LENGTH + 1]) for index in range(BLOCK)]
    for num_workers in (0, 2):
        batches = take(open_loader(batch_size=64, num_workers=num_workers, tokenizer=name), BLOCK // 64)
        assert Counter(sum(batches, [])) == Counter(expected)


@pytest.mark.fast("0")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_state_goes_on_with_the_next_sequence(num_workers):
    write_c4((400, 30, 400))
    whole = take(open_loader(batch_size=100, num_workers=num_workers), 40)
    for batches in (1, 10, 11, 25):  # the 11th crosses from the first block into the second, the data ends in the 20th
        loader = open_loader(batch_size=100, num_workers=num_workers)
        assert take(loader, batches) == whole[:batches]
        torch.save(loader.state_dict(), "state.pt")
        state = torch.load("state.pt", weights_only=True)
        assert Path("state.pt").stat().st_size < 4096
        resumed = open_loader(batch_size=100, num_workers=num_workers)
        resumed.load_state_dict(state)
        assert take(resumed, 5) == whole[batches : batches + 5]
        assert take(resumed, 5) == whole[batches + 5 : batches + 10], "a new iteration goes on"
        assert take(loader, 5) == whole[batches : batches + 5]


def test_the_state_of_one_rank_serves_all():
    write_c4((400, 30, 400))
    loaders = [open_loader(3, rank, batch_size=31) for rank in range(3)]
    for loader in loaders:
        take(loader, 11)  # sequence 1023: the third rank is in the next block, the first is not
    states = [loader.state_dict() for loader in loaders]
    assert [state["position"]["block"] for state in states] == [0, 0, 0]
    expected = [take(loader, 3) for loader in loaders]
    for rank in range(3):
        loader = open_loader(3, rank, batch_size=31)
        loader.load_state_dict(states[0])
        assert take(loader, 3) == expected[rank]


def test_resuming_reads_only_from_the_block_on():
    texts = write_c4((300, 500))
    loader = open_loader(batch_size=512)
    take(loader, 3)
    with gzip.open("c4/en/c4-train.00000-of-00002.json.gz", "wt") as file:
        file.writelines(json.dumps({"text": "x", "timestamp": "", "url": ""}) + "\n" for _ in range(300))
    resumed = open_loader(batch_size=512)
    resumed.load_state_dict(loader.state_dict())
    sequences = slow_sequences(texts, 2 * BLOCK)
    assert {bytes(sequence) for sequence in take(resumed, 1)[0]} <= {bytes(sequence) for sequence in sequences[BLOCK:]}


def test_the_loader_is_endless_and_its_workers_can_be_spawned():
    write_c4((50, 50))
    loader = open_loader()
    with pytest.raises(TypeError, match="no end"):
        len(loader)
    copy = pickle.loads(pickle.dumps(loader.dataset))
    assert isinstance(copy, SequenceStream) and torch.equal(copy[3], loader.dataset[3])
    before = torch.get_rng_state()
    take(loader, 3)
    assert torch.equal(torch.get_rng_state(), before)


def test_validation_comes_from_its_split_or_from_held_out_documents():
    texts = write_c4((300,), validation=30)
    held_out = [f"document {number} of many" for number in range(300, 330)]
    _, val = open_stream(C4, "text", load_tokenizer("bytes"), LENGTH, 3)
    assert [tuple(sequence.tolist()) for sequence in val] == slow_sequences(held_out, 3)
    _, val = open_stream(C4, "text", load_tokenizer("bytes"), LENGTH, None)
    assert bytes(val.tokens.tolist()) == "\0".join([*held_out, ""]).encode()

    texts = write_c4((300,), validation=0, folder=Path("alone"))
    stream, val = open_stream("hf:./alone:en", "text", load_tokenizer("bytes"), LENGTH, 30)
    assert [tuple(sequence.tolist()) for sequence in val] == slow_sequences(texts, 30)
    unseen = -(-(30 * LENGTH + 1) // len("document 0 of many "))
    loader = StreamLoader(stream, StreamShard(1, 0, seed=0), BLOCK)
    again = take(loader, 2)  # the data ends in the first of them
    assert Counter(sum(again, [])) == Counter(slow_sequences(texts[unseen:], 2 * BLOCK))


@pytest.mark.fast("0-None-2")
@pytest.mark.parametrize("num_workers, limit, accumulate", [*product([0], [None, 5], [1, 2]), (2, None, 2), (2, 5, 1)])
def test_resumed_run_sees_the_batches_of_the_uninterrupted_one(tmp_path, num_workers, limit, accumulate):
    write_c4((400, 30, 400), validation=60)
    common = {"num_workers": num_workers, "limit_train_batches": limit, "accumulate_grad_batches": accumulate}
    common |= {"max_steps": 18 // accumulate} if limit is None else {"max_epochs": 4}
    if limit is None:
        common |= {"val_check_interval": 4, "check_val_every_n_epoch": None}
    whole = fit(callbacks=[SaveAlways(tmp_path)], **common).seen
    loader = StreamLoader(open_loader().dataset, StreamShard(1, 0, seed=0), 100)
    count = 18 if limit is None else 20
    assert [[tuple(sequence) for sequence in batch] for batch in whole] == take(loader, count)

    steps = {1: (5, 11) if num_workers else (1, 4, 5, 6, 10, 11, 14), 2: (3, 6)}[accumulate]
    per_epoch = -(-limit // accumulate) if limit else 10**9
    for step in steps:
        epoch, rest = divmod(step, per_epoch)
        resumed = fit(tmp_path / f"step{step}.ckpt", **common).seen
        assert resumed == whole[epoch * (limit or 0) + rest * accumulate :], f"resumed after step {step}"
    if limit:
        assert fit(tmp_path / "epoch1.ckpt", **common).seen == whole[10:]


def test_reloaded_loaders_and_new_runs():
    write_c4((400, 400))
    common = {"limit_train_batches": 3, "max_epochs": 3, "limit_val_batches": 0}
    whole = fit(**common).seen
    assert fit(reload_dataloaders_every_n_epochs=1, **common).seen == whole
    module = TextDataModule(C4, sequence_length=LENGTH, batch_size=100, val_batches=1)
    for _ in range(2):
        model = Recorder()
        quiet_trainer(devices=1, **common).fit(model, datamodule=module)
        assert model.seen == whole, "a new run begins with the first batch"


def test_overfitting_repeats_the_first_batches():
    texts = write_c4((100,))
    seen = fit(max_epochs=2, overfit_batches=2, data={"batch_size": 4}).seen
    assert seen == seen[:2] * 2
    assert [tuple(sequence) for batch in seen[:2] for sequence in batch] == slow_sequences(texts, 8)
    with pytest.raises(ValueError, match="give `overfit_batches` 0.5 as a number"):
        fit(max_epochs=2, overfit_batches=0.5, data={"batch_size": 4, "val_batches": 4})


def test_checkpoint_of_another_order_is_refused(tmp_path):
    write_c4((100, 100), validation=100)
    name = save_tokenizer(tmp_path / "tokenizer")
    fit(callbacks=[SaveAlways(tmp_path)], max_steps=2)
    for data, message in (
        ({"seed": 1}, "seed was 0, is 1; resume with the same data"),
        ({"column": "url"}, "column was 'text', is 'url'"),
        ({"batch_size": 2}, "batch_size was 100, is 2"),
    ):
        with pytest.raises(ValueError, match=f"another order of batches: {message}"):
            fit(tmp_path / "step1.ckpt", data=data, max_steps=2)
    refused = pytest.raises(ValueError, match="another order of batches: tokenizer was 'bytes', is")
    with pytest.warns(UserWarning, match="trained with the tokenizer 'bytes'"), refused:
        fit(tmp_path / "step1.ckpt", data={"tokenizer": name}, max_steps=2)
    saved = torch.load(tmp_path / "step1.ckpt", weights_only=True)["loops"]["fit_loop"]["state_dict"]
    with pytest.raises(ValueError, match="ranks was 1, is 2"):
        open_loader(ranks=2, batch_size=100).load_state_dict(saved["combined_loader"][0])


@each(
    "path, arguments, message",
    [
        ("c4", {"column": "txt"}, "c4-.* has no column 'txt', but has 'text', 'timestamp', 'url'; name the one"),
        (C4, {"column": "txt"}, r"hf:./c4:en \(validation\) has no column 'txt', but has 'text', 'timestamp', 'url'"),
        ("hf:./c4:fr", {}, r"'./c4', configuration 'fr', cannot be opened \(BuilderConfig 'fr' not found. Available"),
        ("hf:/no/where/at/all", {}, "'/no/where/at/all', configuration None, cannot be opened .* check the name"),
        ("nowhere", {}, "does not exist; check `path`, or write hf:NAME or hf:NAME:CONFIG"),
        (C4, {"batch_size": 1000}, "at least 8001 bytes for one validation batch"),
        ("hf:./short:en", {"val_batches": 2}, "at least 9 tokens for one sequence of 8, but `path` leaves 0 of them"),
        ("hf:./short:en", {"val_batches": None}, "`val_batches` None asks for .* has only train; give a number"),
        (C4, {"tokenizer": "/no/where"}, "'/no/where' cannot be loaded"),
        ("hf:a/b", {"max_bytes": 10}, "max_bytes bounds text in memory, but hf:a/b is a stream"),
    ],
)
def test_mistakes_end_the_run_before_anything_is_written(path, arguments, message):
    write_c4((3,), validation=0, folder=Path("short"))
    write_c4((30,))
    assert_refused(path, message, sequence_length=LENGTH, **{"batch_size": 4, "val_batches": 1, **arguments})
