"""Recipes on images, with random digits in the place of scikit-learn's, which is no dependency."""

import sys
from itertools import islice
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from PIL import Image

from lightning_lowbit import export_checkpoint
from lightning_lowbit.recipes.vision import ImageClassifier, ImageDataModule
from tests.lightning_imports import quiet_trainer
from tests.recipes.recipe_names import run_json
from tests.tables import each

SMALL = """
trainer: {max_steps: 2, log_every_n_steps: 1, val_check_interval: 1}
model: {init_args: {scheduler: {init_args: {warmup_steps: 1}}}}
data: {init_args: {batch_size: 20}}
"""


@pytest.fixture(autouse=True)
def _digits(monkeypatch, tmp_path):
    images = torch.rand(90, 8, 8, generator=torch.Generator().manual_seed(0)) * 16
    digits = SimpleNamespace(images=images.numpy(), target=torch.arange(90).numpy() % 10)
    monkeypatch.setitem(sys.modules, "sklearn", ModuleType("sklearn"))
    monkeypatch.setitem(sys.modules, "sklearn.datasets", SimpleNamespace(load_digits=lambda: digits))
    Path("small.yaml").write_text(SMALL)


@pytest.mark.fast("digits")
@pytest.mark.parametrize(
    "overlays", [[], ["bf16"], ["digits_int4"], ["digits_vit"]], ids=lambda names: "".join(names) or "digits"
)
def test_two_steps(overlays):
    result = run_json("digits", *overlays, "small.yaml")
    assert result["steps"] == 2
    assert {"val_loss", "val_accuracy", "grad_norm", "loss"} <= set(result["metrics"])


def test_weights_of_a_checkpoint_are_where_training_begins(tmp_path):
    expected = ImageClassifier(seed=1).state_dict()
    torch.save({"state_dict": expected}, "pretrained.ckpt")
    found = ImageClassifier(seed=2, initial="pretrained.ckpt").state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_mistakes_are_errors_of_one_line(monkeypatch):
    for made, told in (
        (lambda: ImageClassifier("resnet"), "Did you mean 'resnet-small'"),
        (lambda: ImageClassifier(classes=1), "classes is a whole number, 2 or more"),
        (lambda: ImageDataModule(channels=2), "channels is 1 for gray images, or 3"),
        (lambda: ImageDataModule(val_fraction=1), "val_fraction is a share of the images, above 0 and below 1"),
        (lambda: ImageDataModule("nowhere").prepare_data(), "There is no folder nowhere"),
    ):
        with pytest.raises(ValueError, match=told) as raised:
            made()
        assert "\n" not in str(raised.value)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ValueError, match="pip install scikit-learn"):
        ImageDataModule().prepare_data()


def test_images_that_do_not_fit_the_network_are_refused():
    for name, count in (("channels", 3), ("classes", 11), ("classes", 9), ("size", 10)):
        message = f"images have {name} .*, and the network {count}. Set model.init_args.{name}"
        with pytest.raises(ValueError, match=message):
            model, data = ImageClassifier("vit-small", **{name: count}), ImageDataModule(batch_size=20)
            quiet_trainer(max_steps=1).fit(model, datamodule=data)
    quiet_trainer(max_steps=1).fit(ImageClassifier(size=16), datamodule=ImageDataModule(batch_size=20))  # takes any


@each("batches", [3, 6])
def test_a_resumed_order_of_images_is_that_of_the_run(batches):
    data = ImageDataModule(batch_size=10)
    data.prepare_data()

    def epochs(loader, count, first=0):
        for epoch in range(first, count):
            loader.sampler.set_epoch(epoch)
            yield from (images.sum().item() for images, _ in loader)

    whole = list(epochs(data.train_dataloader(), 3))
    assert len(whole) == 18 and len(set(whole)) > 12, "each epoch has its own order"
    half, resumed = data.train_dataloader(), data.train_dataloader()
    assert list(islice(epochs(half, 3), batches)) == whole[:batches]
    resumed.load_state_dict(half.state_dict())
    assert list(epochs(resumed, 3, first=batches // 6)) == whole[batches:]
    data.trainer = quiet_trainer(overfit_batches=2)
    for _ in range(2):
        images, _ = next(iter(data.train_dataloader()))
        assert torch.equal(images, data._images[0][:10]), "the same few images come in their order"


@pytest.mark.slow
def test_a_folder_of_images_is_read_with_a_class_for_each_folder():
    for name, color in (("cat", 10), ("dog", 200)):
        Path("images", name).mkdir(parents=True)
        for number in range(6):
            Image.new("RGB", (12, 12), (color, color, color)).save(f"images/{name}/{number}.png")
    data = ImageDataModule("images", size=8, channels=3, batch_size=4, val_fraction=0.5)
    data.prepare_data()
    for images, classes in (*data.train_dataloader(), *data.val_dataloader()):
        assert images.shape[1:] == (3, 8, 8)
        assert torch.equal(images.mean((1, 2, 3)) > 0, classes == 1)
    Path("empty").mkdir()
    with pytest.raises(ValueError, match="empty has no folders of images"):
        ImageDataModule("empty").prepare_data()


def test_a_folder_whose_images_would_not_be_what_is_trained_on_is_refused():
    for file, image, told in (
        ("deep.png", Image.new("I;16", (4, 4), 999), "deep.png has more than 8 bits per channel"),
        ("cut.png", Image.new("L", (4, 4)), "cut.png cannot be read"),
        ("few.png", Image.new("L", (4, 4)), "8 images for one training batch, and 1 for validation.* leave 6 and 0"),
    ):
        for name in ("cat", "dog"):
            Path(file, name).mkdir(parents=True)
        for number in range(5):
            Image.new("L", (4, 4), number).save(f"{file}/cat/{number}.png")
        image.save(f"{file}/dog/{file}")
        if file == "cut.png":
            Path(file, "dog", file).write_bytes(Path(file, "dog", file).read_bytes()[:40])
        with pytest.raises(ValueError, match=told):
            ImageDataModule(file, batch_size=8, val_fraction=0.05).prepare_data()


@pytest.mark.slow
def test_a_trained_classifier_is_exported_to_onnx_with_its_outputs():
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    run_json("digits", "digits_int4", "small.yaml")
    [path] = Path("runs").rglob("last.ckpt")
    exported = export_checkpoint(path, "onnx", "out")
    assert exported.parity is None and exported.outputs < 0.05
