"""Image classification: a small ResNet and a small ViT, on handwritten digits or on a folder of images."""

import hashlib
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_lowbit._lightning import LightningDataModule, LRSchedulerCallable, OptimizerCallable
from lightning_lowbit.checks import choose, integer, number
from lightning_lowbit.packages import install
from lightning_lowbit.precision.checkpoints.files import load_weights
from lightning_lowbit.precision.run_settings import seed_or_global

from .loader import OrderedSamples, ResumableLoader, ShuffledShard, shard_of
from .models import RecipeModule

NETWORKS = ("resnet-small", "vit-small")


class _Block(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.second, self.norm2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.shortcut = nn.Conv2d(channels, out, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm2(self.second(F.relu(self.norm1(self.first(x))))) + self.shortcut(x))


class ResNet(nn.Module):
    """A ResNet for small images ``[batch, channels, height, width]``: six 3x3 convolutions of 32 and 64 channels.

    Returns logits ``[batch, classes]``. It has 151 thousand parameters.
    """

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(channels, 32, 3, 1, 1), nn.Linear(64, classes)
        self.blocks = nn.Sequential(_Block(32, 32, 1), _Block(32, 64, 2), _Block(64, 64, 1))
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(F.relu(self.stem(x))).mean((2, 3)))
        return logits


class ViT(nn.Module):
    """A vision transformer of ``transformers``: 4 blocks of 64 features, patches of 2x2. Returns logits."""

    def __init__(self, channels: int, classes: int, size: int) -> None:
        from transformers import ViTConfig, ViTForImageClassification

        super().__init__()
        sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4}
        config = ViTConfig(num_channels=channels, num_labels=classes, image_size=size, patch_size=2, **sizes)
        self.model = ViTForImageClassification(config)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x).logits
        return logits


class ImageClassifier(RecipeModule):
    """Classifies images; batches are float32 ``[batch, channels, size, size]`` and int64 classes ``[batch]``.

    Logs ``loss``, ``grad_norm``, ``val_loss`` and ``val_accuracy``.

    Args:
        network: ``"resnet-small"`` (151 thousand parameters) or ``"vit-small"`` (170 thousand).
        channels, classes, size: of the images.
        initial: a checkpoint of the same network whose weights to begin with, for quantization-aware training from
            pretrained ones; None draws them.
        seed: of the initial weights; None takes that of ``seed_everything``, or 0.
        optimizer: creates the optimizer from the parameters.
        scheduler: creates the learning-rate schedule, stepped once per optimizer step; None for a constant rate.

    Raises:
        ValueError: there is no such network, a size is not positive, or the checkpoint is of another network.
    """

    makes_layers_at_once = True

    def __init__(
        self,
        network: str = "resnet-small",
        channels: int = 1,
        classes: int = 10,
        size: int = 8,
        initial: str | None = None,
        seed: int | None = None,
        optimizer: OptimizerCallable = torch.optim.AdamW,
        scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["optimizer", "scheduler"])
        self.make_optimizer, self.make_scheduler = optimizer, scheduler
        choose("network", network, NETWORKS)
        sizes = (integer("channels", channels, 1), integer("classes", classes, 2))
        with self.initialized(seed):
            self.model = ResNet(*sizes) if network == "resnet-small" else ViT(*sizes, integer("size", size, 2))
        self.example_input_array = torch.zeros(2, channels, size, size)
        self.val_loss, self.val_accuracy = (
            MeanMetric(nan_strategy=float("nan")),
            MulticlassAccuracy(classes, average="micro"),
        )
        if initial is not None:
            load_weights(self, initial)

    def prepare_data(self) -> None:
        """Checks the data against the network, before any logger writes a file."""
        data = getattr(self.trainer, "datamodule", None)
        if not isinstance(data, ImageDataModule):
            return
        free = {"size"} if self.hparams["network"] == "resnet-small" else set()
        for name, count in data.shape.items():
            if count != self.hparams[name] and name not in free:
                raise ValueError(
                    f"The images have {name} {count}, and the network {self.hparams[name]}. Set "
                    f"model.init_args.{name} to {count}, or choose other data."
                )

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``[batch, classes]``."""
        logits: Tensor = self.model(images)
        return logits

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]).float(), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        logits = self(batch[0]).float()
        self.val_loss.update(F.cross_entropy(logits, batch[1]), len(logits))
        self.val_accuracy.update(logits, batch[1])
        self.log("val_loss", self.val_loss, prog_bar=True)
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)


def count_images(batch: list[Tensor]) -> int:
    """Images of a batch, for :class:`lightning_lowbit.Throughput`."""
    return len(batch[1])


class Images(OrderedSamples):
    """Images ``[count, channels, size, size]`` and their classes ``[count]``."""

    def __init__(self, images: Tensor, classes: Tensor) -> None:
        self.images, self.classes = images, classes

    @cached_property
    def order(self) -> dict[str, Any]:  # type: ignore[override]
        parts = {"images": self.images, "classes": self.classes}
        return {name: hashlib.sha256(part.contiguous().numpy().data).hexdigest() for name, part in parts.items()}

    def __len__(self) -> int:
        return len(self.classes)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return self.images[index], self.classes[index]


class ImageDataModule(LightningDataModule):
    """Images of classes: scikit-learn's handwritten digits, or a folder.

    Args:
        path: a folder with a folder of images for each class, or what ``datasets`` reads as images and labels; None for
            the 1797 digits of 8x8 pixels that scikit-learn brings along.
        size: images of a folder are resized to this many pixels each way.
        channels: 1 for gray images, 3 for colors; of a folder.
        batch_size: images in a batch.
        val_fraction: share of the images, the last ones, for validation; of digits, which come from several writers.
        seed: of the order of training images, and of the split of a folder; None takes that of ``seed_everything``.

    Raises:
        ValueError: a number is out of range; or (in ``prepare_data``, before any logger writes) scikit-learn is not
            installed, the folder has no images of classes, an image cannot be read or has more than 8 bits per channel,
            or the images do not fill a batch for training and one image for validation.
    """

    def __init__(
        self,
        path: str | None = None,
        size: int = 8,
        channels: int = 1,
        batch_size: int = 100,
        val_fraction: float = 1 / 3,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        integer("batch_size", batch_size, 1)
        if channels not in (1, 3):
            raise ValueError(f"channels is 1 for gray images, or 3 for colors; got {channels!r}.")
        number("val_fraction", val_fraction, "a share of the images", above=0, below=1)
        self.path, self.size, self.channels, self.batch_size = path, integer("size", size, 1), channels, batch_size
        self.val_fraction, self.seed = val_fraction, seed_or_global(seed)
        self._images: tuple[Tensor, Tensor] | None = None

    def prepare_data(self) -> None:
        """Reads the images, before any logger writes a file."""
        self.setup("fit")

    def setup(self, stage: str) -> None:
        if self._images is None:
            path = None if self.path is None else Path(self.path).expanduser()
            self._images = _digits() if path is None else _folder(path, self.size, self.channels, self.seed)
            self._check_count()

    @property
    def shape(self) -> dict[str, int]:
        """Channels, pixels each way and classes of the images, which are read."""
        assert self._images is not None
        images, classes = self._images
        return {"channels": images.shape[1], "size": images.shape[2], "classes": int(classes.max()) + 1}

    def _check_count(self) -> None:
        training, validation = len(self._part(True)), len(self._part(False))
        needed = shard_of(self)["num_replicas"] * self.batch_size
        if training < needed or not validation:
            raise ValueError(
                f"ImageDataModule needs at least {needed} images for one training batch, and 1 for validation, but "
                f"`path` {self.path} and `val_fraction` {self.val_fraction} leave {training} and {validation}; give "
                "more images, lower `batch_size`, or change `val_fraction`."
            )

    def _part(self, is_training: bool) -> Images:
        assert self._images is not None
        count = len(self._images[1])
        cut = count - round(count * self.val_fraction)
        return Images(*(part[:cut] if is_training else part[cut:] for part in self._images))

    def train_dataloader(self) -> DataLoader[Any]:
        """Batches of this rank, in an order that depends only on ``seed`` and the epoch."""
        part, ranks = self._part(True), shard_of(self)
        if getattr(self.trainer, "overfit_batches", 0):  # the same few batches, repeated
            return DataLoader(part, self.batch_size, drop_last=True)
        sampler = ShuffledShard(part, ranks["num_replicas"], ranks["rank"], seed=self.seed, drop_last=True)
        return ResumableLoader(part, sampler, self.batch_size)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self._part(False), self.batch_size)


def _digits() -> tuple[Tensor, Tensor]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ValueError(f"The digits come with scikit-learn: {install('scikit-learn')}, or give data.path.") from error
    digits = load_digits()
    return torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1, torch.tensor(digits.target)


def _folder(path: Path, size: int, channels: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images in [-1, 1] and classes of a folder, shuffled."""
    import datasets
    import numpy as np

    if not path.is_dir():
        raise ValueError(f"There is no folder {path}. Give one with a folder of images for each class.")
    try:
        rows = datasets.load_dataset("imagefolder", data_dir=str(path), split="train").shuffle(seed)
        classes = torch.tensor(rows["label"])
    except (KeyError, ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"{path} has no folders of images, one for each class ({reason}).") from error
    files = rows.cast_column("image", datasets.Image(decode=False))["image"]
    images = [_pixels(file, size, "L" if channels == 1 else "RGB") for file in files]
    pixels = torch.tensor(np.stack(images))
    pixels = pixels[:, None] if channels == 1 else pixels.permute(0, 3, 1, 2)
    return pixels / 127.5 - 1, classes


def _pixels(file: dict[str, Any], size: int, mode: str) -> Any:
    """Reads a file of ``datasets`` as float32 ``[size, size]``, with ``[..., 3]`` for RGB, from 0 to 255."""
    import datasets
    import numpy as np
    from PIL.Image import DecompressionBombError

    try:
        image = datasets.Image().decode_example(file)
    except (OSError, DecompressionBombError) as error:
        raise ValueError(f"The image {file['path']} cannot be read ({error}); mend it, or take it away.") from error
    if image.mode[0] in "IF":  # of which Pillow cuts off what 8 bits do not hold
        raise ValueError(
            f"The image {file['path']} has more than 8 bits per channel (mode {image.mode}); write the images with 8."
        )
    return np.asarray(image.convert(mode).resize((size, size)), dtype=np.float32)
