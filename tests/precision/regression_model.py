"""A small module whose batches follow from their place, and a witness of operands."""

from collections import defaultdict

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_lowbit import Cast, LinearCasts, LowBitPrecision, Scale
from lightning_lowbit.nn import OPERANDS
from lightning_lowbit.nn.layers.layer import QuantizedLayer
from tests.lightning_imports import Callback, LightningModule, quiet_trainer

LAYERS = ("first", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "head")
DOWN = "mlp.down_proj"


def trainer(plugin, **kwargs):
    """Two steps, one epoch, nothing else; with a plugin, or None."""
    defaults = {"max_steps": 2, "limit_train_batches": 2, "limit_val_batches": 0}
    return quiet_trainer(*([] if plugin is None else [plugin]), **{**defaults, **kwargs})


def fitted(plugin, model=None, ckpt_path=None, **kwargs):
    """A Trainer that has trained a model, which is its ``lightning_module``."""
    run = trainer(plugin, **kwargs)
    run.fit(Regression() if model is None else model, ckpt_path=ckpt_path)
    return run


def two_casts():
    """A plugin that rounds one operand of each pass: the cheapest one of which all phases differ."""
    cast = Cast("int8", Scale("fp32", "tensor"))
    return LowBitPrecision(LinearCasts(fprop_w=cast, dgrad_g=cast))


def state(plugin):
    """What a plugin puts into a checkpoint."""
    saved = {}
    plugin.on_save_checkpoint(saved)
    return saved["lightning_lowbit"]


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


class SwiGLU(nn.Module):
    def __init__(self, size, inner):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(size, inner, bias=False), nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x):
        return self.down_proj(self.up_proj(x) * F.silu(self.gate_proj(x)))


class Regression(LightningModule):
    """Learns a linear map. A training batch is a function of optimizer step, micro-batch and rank, and of nothing else.

    Args:
        recompute: computes activations a second time in the backward pass.
        val_size: of the inputs in validation.
    """

    def __init__(self, recompute=False, val_size=1.0):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.first, self.mlp, self.head = nn.Linear(16, 16), SwiGLU(16, 24), nn.Linear(16, 4, bias=False)
            self.target = torch.randn(16, 4) / 4  # no buffer
        self.recompute, self.val_size = recompute, val_size
        self.losses = []
        self.val_losses = []

    def forward(self, x):
        h = self.first(x)
        return self.head(h + (checkpoint(self.mlp, h, use_reentrant=False) if self.recompute else self.mlp(h)))

    def loss(self, seed, size):
        x = size * torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))
        return F.mse_loss(self(x).float(), x @ self.target)

    def training_step(self, batch, batch_idx):
        micro_batch = batch_idx % self.trainer.accumulate_grad_batches
        place = self.trainer.global_step * 8 + micro_batch * 2 + self.global_rank
        loss = self.loss(place, 1 + place % 7 / 2)  # some are larger, so that a history of several steps matters
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch, batch_idx):
        self.val_losses.append(self.loss(1000 + batch_idx, self.val_size).detach())

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self.loss(2000 + batch_idx, self.val_size)

    def train_dataloader(self):
        return DataLoader(range(64))

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-2)


class On(Callback):
    """Does something in hooks: ``On(on_train_end=lambda trainer, *_: trainer.save_checkpoint("x.ckpt"))``."""

    def __init__(self, **actions):
        vars(self).update(actions)


class Ramp(Callback):
    """Sets λ at the beginning of the first optimizer steps, to these numbers, and then leaves it alone."""

    def __init__(self, *shares):
        self.shares = shares

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step < len(self.shares):
            trainer.precision_plugin.set_blend(self.shares[trainer.global_step])


class Witness(Callback):
    """Notes the largest magnitudes that enter each layer in each optimizer step, without any help of the plugin.

    Exact for ``compute_dtype="fp32"``, in which nothing is rounded before it is quantized, and without smoothing of
    tokens.

    Attributes:
        steps: per optimizer step, amaxes by layer and operand, such as ``"head/fprop_x"``.
        channels: by layer whose channels are smoothed, their amaxes in the step under way or the last one.
        in_force: per pass through a layer, by layer, how many steps came before it, and the amaxes it scales by.
    """

    def __init__(self):
        self.steps = []
        self.channels = {}
        self.in_force = defaultdict(list)
        self._amaxes = {}
        self._channels = {}

    def on_fit_start(self, trainer, pl_module):
        for name, layer in pl_module.named_modules():
            if isinstance(layer, QuantizedLayer):
                layer.register_forward_hook(lambda layer, inputs, y, name=name: self._see(name, layer, *inputs, y))

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.steps.append(self._amaxes)
        self.channels = self._channels
        self._amaxes, self._channels = {}, {}

    def _see(self, name, layer, x, y):
        if not (layer.training and torch.is_grad_enabled()):
            return
        if layer.lowbit.amaxes is not None:
            self.in_force[name].append((len(self.steps), layer.lowbit.amaxes.in_force.clone()))
        seen = x.detach()
        if layer.casts.smooth == "channel":
            own = seen.abs().amax(0)
            self._channels[name] = torch.maximum(self._channels.get(name, own), own)
            seen = seen * torch.floor(-torch.log2(own.double())).exp2().float()
        weight = layer.weight.detach()
        self._raise(name, {"fprop_x": seen, "fprop_w": weight, "dgrad_w": weight})  # one weight for both GEMMs

        def gradient(g):
            gradients = {"wgrad_x": seen, "wgrad_g": g}
            self._raise(name, {**gradients, "dgrad_g": g} if x.requires_grad else gradients)

        if y.requires_grad:
            y.register_hook(gradient)

    def _raise(self, name, operands):
        for operand, tensor in operands.items():
            key = f"{name}/{operand}"
            self._amaxes[key] = max(self._amaxes.get(key, 0.0), tensor.abs().max().item())

    def history(self, key, length, steps=None):
        """What a history of this length holds after some steps (None: all): the last amaxes, 0 if there are fewer."""
        amaxes = [step[key] for step in self.steps[:steps] if key in step][-length:]
        return torch.tensor([0.0] * (length - len(amaxes)) + amaxes)


def assert_histories(saved, witness, length, in_force=None):
    """The amaxes of a plugin's state are what the steps saw, to the bit; each pass scaled by the largest before it.

    Args:
        length: of the histories.
        in_force: the number of steps that a pass scales by, if they are fewer.
    """
    found = saved["amax_history"]
    assert found, "there are no histories"
    for key, history in found.items():
        expected = witness.history(key, length)
        assert torch.equal(history, expected), f"{key} holds {history.tolist()}, the steps saw {expected.tolist()}"
        name, operand = key.split("/")
        assert witness.in_force[name], f"{name} has not been trained"
        for steps, amaxes in witness.in_force[name]:
            amax, expected = amaxes[OPERANDS.index(operand)], witness.history(key, in_force or length, steps).max()
            assert amax == expected, f"{key} is scaled by {amax} after {steps} steps, not {expected}"
    for name, amax in saved["channel_amax"].items():
        assert torch.equal(amax, witness.channels[name]), "the channels are not those of the last step"
