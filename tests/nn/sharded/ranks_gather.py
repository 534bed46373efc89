"""One of two processes that train one model under FSDP2.

Each run is made twice, with weights that are quantized before they are gathered and without.
"""

import sys
from functools import partial

import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_lowbit import Cast, LowBitPrecision, Scale, convert
from lightning_lowbit.compilation import backend
from lightning_lowbit.nn.native.devices import declared
from lightning_lowbit.nn.sharded.gather import WeightGathers
from tests.distributed.spreads import full
from tests.launch import refusal
from tests.precision.regression_model import trainer
from tests.ranks import Regression

RANKS, STEPS = 2, 3

NVFP4 = Cast("e2m1", Scale("e4m3", 16, two_level=True))
ROWS, RANDOM = Cast("e4m3", Scale("fp32", "row")), NVFP4.replace(scale={"rounding": "stochastic"})

# By name, casts under which the weights are gathered in few bits.
CASTS = {
    "nvfp4-nvidia": "nvfp4-nvidia",
    "fp8-current": "fp8-current",
    "fp8-delayed": "fp8-delayed",
    "ternary": "ternary",
    "int4": "int4",
    "int8, not rounded": {"preset": "int8", "every": {"round_to_bfloat16": False, "scale": {"block": 32}}},
    "mxfp6, fprop": {"preset": "mxfp6", "dgrad_w": "fprop"},
    "rows": {"preset": "fp8-row", "fprop_w": ROWS, "dgrad_w": "fprop"},
    "stochastic": {"preset": "nvfp4", "fprop_w": NVFP4.replace(rounding="stochastic"), "dgrad_w": "fprop"},
    "quantized again": {"preset": "nvfp4", "requantize": ["dgrad_w"]},
    "random scales": {"preset": "nvfp4", "fprop_w": RANDOM, "dgrad_w": "fprop"},
    "scales in bf16": {"fprop_w": Cast("int4", Scale("bf16", 8)), "dgrad_w": "fprop"},
    "mean magnitudes of rows": {"fprop_w": Cast("int2", Scale("fp32", "row", statistic="absmean")), "dgrad_w": "fprop"},
}


class Network(Regression):
    """Learns from batches that follow from their place; each rank has its own.

    Args:
        sizes: of the layers, each of which is sharded by itself; all but the last one have a bias, which is not
            gathered in few bits.
        recompute: computes activations a second time in the backward pass.
        by_hand: two steps of the optimizer in each training step.
        **kwargs: of ``fully_shard``.
    """

    def __init__(self, sizes=(40, 64, 96, 32, 4), recompute=False, by_hand=False, **kwargs):
        self.sizes, self.recompute, self.how = sizes, recompute, kwargs
        super().__init__(shard=True)
        self.automatic_optimization = not by_hand
        self.losses = []

    def build(self):
        pairs = zip(self.sizes, self.sizes[1:], strict=False)
        self.layers = nn.ModuleList(nn.Linear(m, n, bias=n != self.sizes[-1]) for m, n in pairs)

    def configure_model(self):
        if not self.shard or self.device_mesh is None:
            return
        mesh, self.shard = self.device_mesh["data_parallel"], False
        # The first layer belongs to the root, which stays gathered after a forward pass.
        for module in (*self.layers[1:], self):
            fully_shard(module, mesh=mesh, **self.how)

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
            x = F.silu(x)
        return x

    def loss(self, seed):
        generator = torch.Generator().manual_seed(seed)
        x, y = (torch.randn(16, n, generator=generator) for n in (self.sizes[0], self.sizes[-1]))
        loss = F.mse_loss(self(x.to(self.layers[0].weight.dtype)).float(), y)
        self.losses.append(loss.detach())
        return loss

    def training_step(self, batch, batch_idx):
        if self.automatic_optimization:
            return self.loss(2 * batch_idx + self.global_rank)
        optimizer = self.optimizers()
        for number in range(2):
            optimizer.zero_grad()
            self.manual_backward(self.loss(100 * number + 2 * batch_idx + self.global_rank))
            optimizer.step()
        return None

    def validation_step(self, batch, batch_idx):
        self.loss(1000 + 2 * batch_idx + self.global_rank)

    def val_dataloader(self):
        return self.train_dataloader()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-2)


def at_each_step(act):
    """A callback that calls a function with the Trainer and the model."""
    return LambdaCallback(on_train_batch_start=lambda trainer, model, *_: act(trainer, model))


@at_each_step
def phases(trainer, _):
    """Also one in which nothing can be gathered in few bits; and leaves it."""
    trainer.precision_plugin.set_phase(("fqt", "qaf", "fqt")[trainer.global_step])


@at_each_step
def blend(trainer, _):
    trainer.precision_plugin.set_blend((1.0, 0.5, 1.0)[trainer.global_step])


@at_each_step
def rewrite(_, model):
    """Other weights, in ways that no version counter tells of."""
    for parameter in model.parameters():
        parameter.data.to_local().data.mul_(1.5)


class Bytes(TorchDispatchMode):
    """Adds up what this process gives to all-gathers."""

    def __init__(self):
        super().__init__()
        self.gathered, self.calls = 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d" and "_allgather_base" in function.overloadpacket.__name__:
            self.gathered, self.calls = self.gathered + args[1].nbytes, self.calls + 1
        return function(*args, **(kwargs or {}))


def train(casts, before, model, ckpt_path=None, dtype="bf16", whole=False, shared=(), **kwargs):
    plugin = LowBitPrecision(casts, compute_dtype=dtype, quantize_before_gather=before, shared_amax=shared)
    network = Network(**model)
    strategy = ModelParallelStrategy(RANKS, 1, save_distributed_checkpoint=not whole)
    defaults = {"devices": RANKS, "strategy": strategy, "max_steps": STEPS, "limit_train_batches": 64}
    used = trainer(plugin, **{**defaults, "num_sanity_val_steps": 0, **kwargs})
    used.fit(network, ckpt_path=ckpt_path)
    return network, used


def outcome(network):
    return torch.cat([torch.stack(network.losses), *(weight.float().flatten() for weight in network.whole)])


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
WIDE = {"sizes": (1024, 256)}
EVALUATE = {"val_check_interval": 1, "limit_val_batches": 2}

# By name: casts, arguments of the model, arguments of `train`.
RUNS = {
    **{name: (name, {}, {}) for name in CASTS},
    "kept after forward": ("nvfp4-nvidia", {"reshard_after_forward": False}, EVALUATE),
    "stochastic, evaluated": ("stochastic", {}, EVALUATE),
    "bf16 policy": ("nvfp4-nvidia", {"mp_policy": BF16}, {}),
    "bf16 policy, rows": ("rows", {"mp_policy": BF16}, {}),
    "fp16": ("fp8-current", {}, {"dtype": "fp16"}),
    "float32": ("nvfp4-nvidia", {}, {"dtype": "fp32"}),
    "phases": ("nvfp4-nvidia", {}, {**EVALUATE, "callbacks": [phases]}),
    "blend": ("fp8-current", {}, {"callbacks": [blend]}),
    "accumulated": ("fp8-delayed", {}, {**EVALUATE, "accumulate_grad_batches": 2}),
    "accumulated, kept": ("stochastic", {"reshard_after_forward": False}, {"accumulate_grad_batches": 2}),
    "rewritten": ("fp8-current", {}, {"callbacks": [rewrite]}),
    "shared": ("nvfp4-nvidia", {}, {**EVALUATE, "shared": (r"layers\.[012]",)}),
    "shared, delayed": ("fp8-delayed", {}, {"accumulate_grad_batches": 2, "shared": (r"layers\.[12]",)}),
    "shared, rewritten": ("fp8-current", {}, {"callbacks": [rewrite], "shared": (r"layers\.[12]",)}),
    "recomputed": ("stochastic", {"recompute": True}, {}),
    "by hand": ("fp8-current", {"by_hand": True}, {}),
    "odd": ("fp8-current", {"sizes": (7, 5, 3, 1)}, {}),
    "odd blocks": ("stochastic", {"sizes": (23, 31, 7, 1)}, {}),
    "odd mean": ("ternary", {"sizes": (7, 5, 3, 1)}, {}),
    "wide nvfp4": ("stochastic", WIDE, {"max_steps": 1}),
    "wide nvfp4, bf16 policy": ("stochastic", {**WIDE, "mp_policy": BF16}, {"max_steps": 1}),
    "wide fp8": ("fp8-current", WIDE, {"max_steps": 1}),
    "wide ternary": ("ternary", WIDE, {"max_steps": 1}),
    "offloaded": ("ternary", {"offload_policy": CPUOffloadPolicy(pin_memory=False)}, {}),
}


def compare(name):
    """A run in both ways: what came out, and the bytes of all-gathers."""
    casts, model, how = RUNS[name]
    outcomes, counts = [], (Bytes(), Bytes())
    for before, count in zip((False, True), counts, strict=True):
        with count:
            outcomes.append(outcome(train(CASTS[casts], before, model, **how)[0]))
    seen = {"bytes": [count.gathered for count in counts], "calls": [count.calls for count in counts]}
    return seen | {"same": torch.equal(*outcomes), "finite": bool(outcomes[0].isfinite().all())}


def resumed(whole):
    """Whether runs that go on from a checkpoint, in either way, are those that were not interrupted."""
    expected, _ = train("nvfp4-nvidia", False, {})
    _, used = train("nvfp4-nvidia", True, {}, max_steps=2, whole=whole)
    path = f"{whole}.ckpt"
    used.save_checkpoint(path)
    networks = [train("nvfp4-nvidia", before, {}, path, whole=whole)[0] for before in (False, True)]
    return [all(map(torch.equal, network.whole, expected.whole)) for network in networks]


def again():
    """One model that is trained in turn: in few bits, in full, and in few bits."""
    networks = []
    for orders in ((True, False, True), (False, False, False)):
        network = Network()
        for before in orders:
            plugin = LowBitPrecision("nvfp4-nvidia", quantize_before_gather=before)
            used = trainer(plugin, devices=RANKS, strategy=ModelParallelStrategy(RANKS, 1), **EVALUATE)
            used.fit(network)
        networks.append(network)
    return torch.equal(*map(outcome, networks))


def by_replicas(shape):
    """Without a Trainer, on a mesh of replicas and shards."""
    mesh, gradients = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")), []
    for before in (False, True):
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(40, 64), nn.Linear(64, 32))
        fully_shard(model, mesh=mesh)
        convert(model, "fp8-current")
        if before:
            WeightGathers(model).prepare()
        x = torch.randn(8, 40, generator=torch.Generator().manual_seed(torch.distributed.get_rank()))
        model(x).square().sum().backward()
        gradients.append(torch.cat([full(p.grad).flatten() for p in model.parameters()]))
    return torch.equal(*gradients)


def fit(casts, strategy=None, **model):
    plugin = LowBitPrecision(casts, quantize_before_gather=True)
    trainer(plugin, devices=RANKS, strategy=strategy or ModelParallelStrategy(RANKS, 1)).fit(Network(**model))


@backend("cpp")
@declared("cpu", {"int8"})  # what is gathered in codes is emulated: all else must be, to give the same bits
def work():
    asked = sys.argv[3:]
    return {
        "runs": {name: compare(name) for name in asked if name in RUNS},
        "resumed": {kind: resumed(kind == "whole") for kind in ("whole", "distributed") if kind in asked},
        "again": again(),
        "by replicas": by_replicas((2, 1)) and by_replicas((1, 2)),
        "refused": {
            "casts": refusal(fit, "nvfp4"),
            "tiles": refusal(partial(fit, "nvfp4-nvidia", sizes=(32, 24, 8))),
            "dtype": refusal(partial(fit, CASTS["int8, not rounded"], mp_policy=BF16)),
            "strategy": refusal(fit, "nvfp4-nvidia", "ddp"),
        },
    }
