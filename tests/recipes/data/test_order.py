"""The order of batches: shared by ranks, and the same after every restart."""

from collections import Counter
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from lightning_lowbit.recipes.data import TextDataModule
from tests.recipes.data.runs import SIZES, SaveAlways, fit
from tests.tables import each


@pytest.mark.slow
def test_order_depends_on_seed_and_epoch_only(folder):
    torch.manual_seed(1)
    one = fit(folder, max_epochs=2).seen
    torch.manual_seed(2)
    assert fit(folder, max_epochs=2, num_workers=2).seen == one
    first, second = one[: len(one) // 2], one[len(one) // 2 :]
    assert first != second
    assert fit(folder, max_epochs=1, data={"seed": 1}).seen != first


def test_reading_batches_leaves_the_global_generator_alone(folder):
    data = TextDataModule(str(folder), val_fraction=0.25, **SIZES)
    data.prepare_data()
    data.setup("fit")
    before = torch.get_rng_state()
    assert len(list(data.train_dataloader())) == len(data.train_dataloader())
    list(data.val_dataloader())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.fast("max_epochs-2-0")
@pytest.mark.parametrize(
    "limit, accumulate, num_workers",
    [*product(["max_epochs", "max_steps"], [1, 2], [0]), ("max_epochs", 2, 2), ("max_steps", 1, 2)],
)
def test_resumed_run_sees_the_batches_of_the_uninterrupted_one(folder, tmp_path, limit, accumulate, num_workers):
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
    again = fit(folder, tmp_path / "epoch0.ckpt", callbacks=[SaveAlways(tmp_path / "again")], **common)
    assert again.seen == whole[13:]
    assert fit(folder, tmp_path / "again" / f"step{2 * steps - 1}.ckpt", **common).seen[-batches:] == whole[-batches:]
    assert fit(folder, tmp_path / "again" / "epoch1.ckpt", **common).seen == whole[-batches:]


def test_checkpoint_of_another_order_is_refused(folder, tmp_path):
    fit(folder, callbacks=[SaveAlways(tmp_path)], max_epochs=1)
    with pytest.raises(ValueError, match="another order of batches: seed was 0, is 1; resume with the same data"):
        fit(folder, tmp_path / "step3.ckpt", data={"seed": 1}, max_epochs=1)
    (folder / "new.txt").write_text("changed text")
    with pytest.raises(ValueError, match="another order of batches: text was"):
        fit(folder, tmp_path / "step3.ckpt", max_epochs=1)


def test_checkpoint_of_another_tokenizer_is_told_once(folder, tmp_path):
    fit(folder, callbacks=[SaveAlways(tmp_path)], max_epochs=1)
    saved = torch.load(tmp_path / "epoch0.ckpt", weights_only=True)
    assert saved["TextDataModule"] == {"tokenizer": "bytes"}
    saved["TextDataModule"]["tokenizer"] = "gpt2"
    torch.save(saved, tmp_path / "other.ckpt")
    with pytest.warns(UserWarning, match="trained with the tokenizer 'gpt2', and the data has 'bytes'") as told:
        fit(folder, tmp_path / "other.ckpt", max_epochs=2)
    assert sum("tokenizer" in str(warning.message) for warning in told) == 1
    del saved["TextDataModule"]  # as older versions wrote it
    torch.save(saved, tmp_path / "old.ckpt")
    assert fit(folder, tmp_path / "old.ckpt", max_epochs=2).seen == fit(folder, max_epochs=2).seen[13:]


def test_overfitting_repeats_the_first_batches(folder):
    seen = fit(folder, max_epochs=3, overfit_batches=2).seen
    assert seen == seen[:2] * 3 and seen[0] != seen[1]


@each("ranks, num_workers", [(1, 0), (2, 2), (3, 0)])
def test_an_epoch_holds_each_sequence_once(folder, ranks, num_workers):
    seen = []
    for rank in range(ranks):
        data = TextDataModule(str(folder), val_fraction=0.25, num_workers=num_workers, sequence_length=8, batch_size=1)
        sharding = {"num_replicas": ranks, "rank": rank}
        data.trainer = SimpleNamespace(distributed_sampler_kwargs=sharding, overfit_batches=0.0)
        data.prepare_data()
        data.setup("fit")
        seen += [tuple(sequence) for batch in data.train_dataloader() for sequence in batch.tolist()]
    train, _ = data._sequences or pytest.fail("nothing was read")
    tokens = train.tokens.tolist()
    slow = [tuple(tokens[start : start + 9]) for start in range(0, len(tokens) - 8, 8)]
    assert len(slow) == 27 and len(seen) == 27 // ranks * ranks
    assert Counter(seen) <= Counter(slow)
