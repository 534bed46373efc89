"""What processes that train one model share: strategies on the CPU, and a model whose batches follow from the step.

``tests/launch.py`` starts the processes; each module ``ranks*.py`` says what they do.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.data import DataLoader

from tests.distributed.spreads import full
from tests.lightning_imports import DDPStrategy, FSDPStrategy, LightningModule, ModelParallelStrategy, quiet_trainer

RANKS = 2


class FSDPOnCPU(FSDPStrategy):
    """FSDP1 with gloo: Lightning's own is for accelerators, and gives `FullyShardedDataParallel` an index for one."""

    def _setup_model(self, model):
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **self.kwargs)


STRATEGIES = {
    "ddp": DDPStrategy,
    "ddp, static graph": lambda: DDPStrategy(static_graph=True),
    "ddp, unused parameters": lambda: DDPStrategy(find_unused_parameters=True, gradient_as_bucket_view=True),
    "fsdp1": lambda: FSDPOnCPU(state_dict_type="sharded"),
    "fsdp1, flat": lambda: FSDPOnCPU(use_orig_params=False),
    "fsdp2": lambda: ModelParallelStrategy(data_parallel_size=RANKS, tensor_parallel_size=1),
    "fsdp2, whole checkpoints": lambda: ModelParallelStrategy(RANKS, 1, save_distributed_checkpoint=False),
    "tp": lambda: ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=RANKS),
}


class Regression(LightningModule):
    """Learns from batches that follow from the step, of which each rank has its share.

    Args:
        shard: cuts the parameters for FSDP2.

    Attributes:
        shape: of a batch: rows, inputs and outputs.
        loss_scale: what the mean squared error is multiplied by.
        whole: all weights at the end of the training, after which the strategy takes the model down.
    """

    shape = (8, 16, 1)
    loss_scale = 1.0

    def __init__(self, shard=False):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.build()
        self.shard = shard
        self.whole = []

    def build(self):
        """Makes the layers; ``body`` is what FSDP2 cuts apart from the rest."""
        self.body = nn.Sequential(nn.Linear(16, 9), nn.Tanh(), nn.Linear(9, 1))

    def configure_model(self):
        shard, self.shard = self.shard, False  # it is called again
        if shard:
            mesh = self.device_mesh["data_parallel"]
            fully_shard(self.body, mesh=mesh)
            fully_shard(self, mesh=mesh)

    def forward(self, x):
        return self.body(x)

    def inputs(self, step, batch_idx):
        """The whole batch: inputs and what is to be learned."""
        generator = torch.Generator().manual_seed(step)
        rows, inputs, outputs = self.shape
        return torch.randn(rows, inputs, generator=generator), torch.randn(rows, outputs, generator=generator)

    def share(self, tensor):
        """The rows of this rank."""
        return tensor.chunk(self.trainer.world_size)[self.global_rank]

    def training_step(self, batch, batch_idx):
        x, y = map(self.share, self.inputs(self.trainer.global_step, batch_idx))
        return self.loss_scale * F.mse_loss(self(x).float(), y)

    def train_dataloader(self):
        return DataLoader(range(64))

    def configure_optimizers(self):
        return torch.optim.SGD(self.trainer.model.parameters(), lr=0.05)

    def on_train_end(self):
        root = self.trainer.model
        if isinstance(root, FullyShardedDataParallel):
            with FullyShardedDataParallel.summon_full_params(root, writeback=False):
                self.whole = [p.detach().clone() for p in root.parameters()]
        else:
            self.whole = [full(p).clone() for p in root.parameters()]


def trainer(*plugins, **kwargs):
    """A quiet one that leaves batches as they are."""
    return quiet_trainer(*plugins, use_distributed_sampler=False, **kwargs)
