"""The batches of a resumed run, from loaders of all kinds."""

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_lowbit import CrashSafeCheckpoint, ExactResume
from tests.callbacks.recovery.exact_resume.runs import Augmented, Draws, Loader, Unsized, run, warned
from tests.lightning_imports import BoringModel, pytorch, quiet_trainer
from tests.tables import each


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")  # the resumed run saves none
@each("data, step", [(Loader, 3), (Loader, 11), (Unsized, 3), (Unsized, 8), (Unsized, 11)], fast=3)
def test_a_resumed_run_augments_its_batches_alike(data, step, tmp_path):
    def seen(*callbacks, ckpt_path=None):
        torch.seed()
        settings = {"limit_train_batches": None, "enable_checkpointing": bool(callbacks)}
        run(model := Augmented(data), *callbacks, ckpt_path=ckpt_path, max_epochs=2, **settings)
        return model.seen

    folder = tmp_path / f"{data.__name__}, {step}"
    whole = seen(CrashSafeCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1))
    assert seen(ckpt_path=folder / f"step={step}.ckpt") == whole[2 * step :]


class Endless(IterableDataset):
    def __iter__(self):
        return iter(torch.ones(8, 32))


class TwoOptimizers(BoringModel):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx)["loss"])
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]


def loader_of(data):
    return DataLoader(data, batch_size=1)


@each(
    "model, data, step, warns",
    [
        (BoringModel, lambda: loader_of(Endless()), 3, True),
        (BoringModel, lambda: loader_of(Endless()), 8, False),
        (BoringModel, Loader, 3, False),
        (TwoOptimizers, lambda: loader_of(torch.ones(8, 32)), 8, True),  # after four batches
        (TwoOptimizers, lambda: loader_of(torch.ones(8, 32)), 16, False),
    ],
    fast=2,
)
def test_data_that_begin_anew_within_an_epoch_get_a_warning(model, data, step, warns, tmp_path):
    folder = tmp_path / f"{model.__name__}, {step}, {data is Loader}"
    save = CrashSafeCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    settings = {"limit_train_batches": None, "max_epochs": 2}
    quiet_trainer(callbacks=[ExactResume(), save], enable_checkpointing=True, **settings).fit(model(), data())
    with warned() as messages:
        quiet_trainer(callbacks=[ExactResume()], **settings).fit(
            model(), data(), ckpt_path=folder / f"step={step}.ckpt"
        )
    assert any("its data begin that epoch again" in message for message in messages) == warns, messages


class OfFirst(BoringModel):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch[0], batch_idx)


@each(
    "mode, data, step, warns",
    [
        ("max_size", Loader, 5, True),
        ("max_size_cycle", Unsized, 5, True),
        ("max_size", Loader, 3, False),
        ("max_size_cycle", Unsized, 2, False),
        ("max_size_cycle", Loader, 5, False),
    ],
    fast=3,
)
def test_a_loader_that_ended_before_others_gets_a_warning(mode, data, step, warns, tmp_path):
    def fit(*callbacks, ckpt_path=None):
        settings = {"limit_val_batches": 0, "max_epochs": 1, "enable_checkpointing": bool(callbacks)}
        loaders = pytorch.utilities.CombinedLoader([data(), data(4)], mode)
        quiet_trainer(callbacks=[ExactResume(), *callbacks], **settings).fit(OfFirst(), loaders, ckpt_path=ckpt_path)

    folder = tmp_path / f"{mode}, {data.__name__}, {step}"
    fit(CrashSafeCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1))
    with warned() as messages:
        fit(ckpt_path=folder / f"step={step}.ckpt")
    assert any("may have ended before others" in message for message in messages) == warns, messages


class Shuffled(Augmented):
    """A plain loader of eight samples, as its arguments say."""

    def train_dataloader(self):
        return DataLoader(torch.arange(8.0).reshape(8, 1).repeat(1, 32), shuffle=True, **self.data)


class InRandomOrder(IterableDataset):
    def __iter__(self):
        return iter(torch.randperm(8).float().reshape(8, 1).repeat(1, 32))


class Streamed(Augmented):
    def train_dataloader(self):
        return DataLoader(InRandomOrder(), batch_size=1)


def generator():
    return {"generator": torch.Generator().manual_seed(1)}


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`", "ignore:.*does not have many workers")
@each(
    "model, data",
    [
        (Shuffled, dict),
        (Shuffled, generator),
        (Shuffled, lambda: {"num_workers": 1, "persistent_workers": True}),
        (Streamed, dict),
        (Shuffled, lambda: {"num_workers": 1, "persistent_workers": True, **generator()}),
        (Shuffled, lambda: {"num_workers": 1}),
        (Shuffled, lambda: {"num_workers": 1, **generator()}),
    ],
    fast=4,
)
def test_a_plain_loader_has_the_order_of_the_next_epoch_after_a_resume(model, data, tmp_path):
    def seen(*callbacks, ckpt_path=None):
        torch.seed()
        settings = {"limit_train_batches": None, "enable_checkpointing": bool(callbacks)}
        run(one := model(data()), *callbacks, ckpt_path=ckpt_path, max_epochs=3, **settings)
        return one.seen

    folder = tmp_path / f"{model.__name__}, {sorted(data())}"
    whole = seen(CrashSafeCheckpoint(folder, filename="{step}", save_top_k=-1))
    assert seen(ckpt_path=folder / "step=8.ckpt") == whole[2 * 8 :]


class Begins(Draws):
    """Notes the epochs that begin, too."""

    def on_train_epoch_start(self):
        self.places.append(self.current_epoch)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`", "ignore:You're resuming from a checkpoint")
@each("data", [Loader, lambda: loader_of(Endless())])
def test_an_epoch_begins_after_a_checkpoint_of_the_last_batch_before(data, tmp_path):
    def places(*callbacks, ckpt_path=None):
        settings = {"max_epochs": 2, "limit_val_batches": 0, "enable_checkpointing": bool(callbacks)}
        callbacks = [ExactResume(), *callbacks]
        quiet_trainer(callbacks=callbacks, **settings).fit(model := Begins(), data(), ckpt_path=ckpt_path)
        return model.places

    folder = tmp_path / str(data is Loader)
    whole = places(CrashSafeCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1))
    assert places(ckpt_path=folder / "step=8.ckpt") == whole[whole.index(1) :]
