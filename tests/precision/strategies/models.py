"""Models that processes train under strategies: a small LLaMA, and one that splits unevenly over ranks."""

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.utils.data import DataLoader

from lightning_lowbit import StableSPAM, convert
from lightning_lowbit.recipes.models import CausalLM
from lightning_lowbit.recipes.sharding import spread
from tests.ranks import Regression

STEPS, BATCH, LENGTH, VOCABULARY = 2, 2, 32, 64
LONGEST = 3  # steps of a run
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": VOCABULARY,
}

OPTIMIZERS = {
    "StableSPAM": lambda parameters: StableSPAM(parameters, lr=1e-3),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
}


class Small(CausalLM):
    """A LLaMA of two blocks, on micro-batches that follow from their number.

    Args:
        optimizer: by name.
        converted: it is, before it is sharded; if not, the plugin does so afterwards.
        each: linear layer is sharded by itself, too.
        offloaded: parameters are on the CPU between passes, which here says how FSDP2 treats them, and not where.
        compiled: by ``torch.compile``, after it is sharded and before the plugin converts it.
    """

    def __init__(self, optimizer, converted=False, each=False, offloaded=False, compiled=False, **kwargs):
        super().__init__("llama-small", SMALL, seed=1, optimizer=OPTIMIZERS[optimizer], **kwargs)
        # Sums are made in another order on each number of processes, and what is rounded to few bits next may then end
        # on the other side of a threshold. In float64 the order is of no consequence.
        self.double()
        self.converted, self.each, self.offloaded, self.compiled = converted, each, offloaded, compiled
        self.losses = []

    def configure_model(self):
        if self.device_mesh is not None and not self._is_spread:
            if self.converted:
                convert(self, "nvfp4", skip=["lm_head"])  # its casts are set again
            if self.each:
                for layer in [m for m in self.modules() if isinstance(m, torch.nn.Linear)]:
                    fully_shard(layer, mesh=self.device_mesh["data_parallel"])
            if self.offloaded:
                spread(self.model, self.device_mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
                self._is_spread = True
        super().configure_model()
        if self.compiled:
            self.compiled = False  # it is called again
            # Torch 2.11 does not compile its fused attention in float64.
            self.model.set_attn_implementation("eager")
            self.model.compile()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.detach().clone())
        return loss

    def train_dataloader(self):
        sampler = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None) or {"rank": 0, "num_replicas": 1}
        generator = torch.Generator().manual_seed(2)
        tokens = torch.randint(0, VOCABULARY, (LONGEST * 4 * BATCH, LENGTH + 1), generator=generator)
        micro_batches = tokens.view(-1, BATCH, LENGTH + 1)[sampler["rank"] :: sampler["num_replicas"]]
        return DataLoader(micro_batches, batch_size=None)

    def val_dataloader(self):
        return self.train_dataloader()  # without one, the Trainer warns


UNEVEN = ((5, 3), (8, 0), (0, 8))  # rows of each step, on each rank


class Odd(Regression):
    """Layers of which one rank holds nothing, and batches of which one rank gets the larger part, or all."""

    def training_step(self, batch, batch_idx):
        return self(torch.randn(UNEVEN[batch_idx][self.global_rank], 16)).square().sum()

    def configure_optimizers(self):
        return StableSPAM(self.trainer.model.parameters(), lr=1e-3)
