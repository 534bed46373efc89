"""A small LLaMA on a task that is learned within some steps, and a Trainer for it."""

import warnings
from contextlib import contextmanager

import torch
from torch.utils.data import DataLoader, Dataset

from lightning_lowbit._lightning import LightningModule, Trainer

VOCABULARY = 128


def llama(width, layers, tokens, device="cpu", attention="sdpa"):
    """From transformers, with random weights that are made on a device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=max(width // 64, 2),
        max_position_embeddings=tokens,
        attn_implementation=attention,
        use_cache=False,
    )
    with torch.device(device):
        return LlamaForCausalLM(config)


class Sequences(Dataset):
    """Three of four tokens follow from the one before them, ``t[i + 1] = 5 t[i] + 17`` modulo the vocabulary; the
    others are random, so that the loss cannot fall below 1.8."""

    def __init__(self, count, tokens):
        generator, rows = torch.Generator("cpu").manual_seed(0), []
        row = torch.randint(VOCABULARY, (count,), generator=generator, device="cpu")
        for _ in range(tokens):
            rows.append(row)
            random = torch.randint(VOCABULARY, (count,), generator=generator, device="cpu")
            follows = torch.rand(count, generator=generator, device="cpu") < 0.75
            row = torch.where(follows, (5 * row + 17) % VOCABULARY, random)
        self.rows = torch.stack(rows, 1)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


class Model(LightningModule):
    """Keeps the losses of its steps, ``losses``, on the device until they are read."""

    def __init__(self, model, optimizer):
        super().__init__()
        self.model, self.make, self.steps = model, optimizer, []

    def training_step(self, batch, _):
        loss = self.model(input_ids=batch, labels=batch).loss
        self.steps.append(loss.detach().clone())  # a CUDA graph gives the next one in the same memory
        return loss

    def configure_optimizers(self):
        return self.make(self.named_parameters())

    @property
    def losses(self):
        return [float(loss) for loss in self.steps]


def trainer(device, steps, *plugins, **others):
    """A Trainer that writes and shows nothing."""
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    accelerator = "gpu" if device == "cuda" else device
    arguments = {"accelerator": accelerator, "devices": 1, "max_steps": steps, "max_epochs": -1, **quiet, **others}
    return Trainer(**arguments, plugins=[*plugins])


def loader(batch, tokens, steps):
    return DataLoader(Sequences(batch * steps, tokens), batch_size=batch)


def fit(trained, model, data, **others):
    """Trains; returns warnings of kernels that differ, fail or are not used."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained.fit(model, data, **others)
    return faults_of(str(warning.message) for warning in caught)


def faults_of(texts):
    """Warnings of the package that a kernel differs or fails."""
    signs = "differs from the plain code", "is not used there", "cannot build its kernels", "torch.compile failed"
    return [text for text in texts if any(sign in text for sign in signs)]


@contextmanager
def deterministic():
    """Within this context torch takes operations that give the same bits twice, where it has them."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
