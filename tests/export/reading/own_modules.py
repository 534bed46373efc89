"""Modules of one's own, as Lightning lets them be made and loaded."""

import torch
from torch import nn

from lightning_lowbit._lightning import LightningModule


class Plain(LightningModule):
    """A network of two layers; ``forward`` multiplies its result by ``factor``."""

    def __init__(self, seed=0):
        super().__init__()
        self.save_hyperparameters()
        self.factor, self.seed = 1.0, seed
        torch.manual_seed(seed)
        self.build()

    def build(self):
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x):
        return self.net(x) * self.factor

    def training_step(self, batch, index):
        return self(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Drawn(Plain):
    """Draws a buffer, which no checkpoint holds, after the weights of a layer."""

    def build(self):
        self.first = nn.Linear(16, 16)
        self.register_buffer("frequencies", torch.randn(16, 16), persistent=False)
        super().build()

    def forward(self, x):
        return self.net((self.first(x) @ self.frequencies).sin())


class Computed(Plain):
    """Computes a constant from its first weights."""

    def build(self):
        super().build()
        self.factor = float(self.net[0].weight.detach().abs().max())


class Built(Plain):
    """Makes its layers in ``configure_model``."""

    def build(self):
        self.net = None

    def configure_model(self):
        if self.net is None:
            torch.manual_seed(self.seed)
            super().build()


class Hooked(Plain):
    """Keeps a number in its checkpoints by Lightning's hooks, under another name of a weight."""

    def on_train_end(self):
        self.factor = 3.0

    def on_save_checkpoint(self, checkpoint):
        checkpoint["factor"] = 3.0
        checkpoint["state_dict"]["before"] = checkpoint["state_dict"].pop("net.0.bias")

    def on_load_checkpoint(self, checkpoint):
        self.factor = checkpoint["factor"]
        checkpoint["state_dict"]["net.0.bias"] = checkpoint["state_dict"].pop("before")


class Partial(Plain):
    """Leaves frozen weights, which a seed makes anew, out of its checkpoints."""

    def build(self):
        super().build()
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.strict_loading = False

    def forward(self, x):
        return self.net(self.frozen(x))

    def on_save_checkpoint(self, checkpoint):
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: state[name] for name in state if not name.startswith("frozen")}
