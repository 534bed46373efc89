"""A process that trains a small LLaMA under strategies.

Each rank makes the named `RUNS`. Four of them have meshes of two dimensions.
"""

import sys
from functools import partial

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from lightning_lowbit import FP4Precision, FP8Precision, IntegerPrecision, PrecisionSwitch, TernaryPrecision
from tests.lightning_imports import DDPStrategy, MisconfigurationException, ModelParallelStrategy, quiet_trainer
from tests.precision.regression_model import On, state
from tests.precision.strategies.models import LONGEST, STEPS, UNEVEN, Odd, Small
from tests.ranks import RANKS, FSDPOnCPU

NEAREST = dict.fromkeys(("dgrad_g", "wgrad_g", "wgrad_x"), "nearest")

PRECISIONS = {
    "NVFP4": lambda **kwargs: FP4Precision("nvfp4", **{"rounding": NEAREST, **kwargs}),
    "NVFP4, tiles, rotated, codes": lambda **kwargs: FP4Precision(
        "nvfp4-nvidia", rounding={"dgrad_g": "nearest", "wgrad_g": "nearest"}, save="codes", **kwargs
    ),
    "FP8, delayed scaling": lambda **kwargs: FP8Precision("delayed", smooth_swiglu="channel", **kwargs),
    "ternary, codes": lambda **kwargs: TernaryPrecision(save="codes", **kwargs),
    "INT4 weights, INT8 activations": lambda **kwargs: IntegerPrecision(4, 8, group=16, **kwargs),
}


def fsdp(sharding=ShardingStrategy.FULL_SHARD, **kwargs):
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    return FSDPOnCPU(sharding_strategy=sharding, auto_wrap_policy={LlamaDecoderLayer}, **kwargs)


def checkpointed():
    from transformers.models.llama.modeling_llama import LlamaMLP

    return fsdp(activation_checkpointing_policy={LlamaMLP})


class Hybrid(FSDPOnCPU):
    """Sharded over two, replicated over two: Lightning makes a mesh of CUDA devices for that."""

    def __init__(self, sharding):
        super().__init__(sharding_strategy=sharding, process_group=(None, None))
        self.sharding = sharding

    def _setup_model(self, model):
        self.kwargs = {"sharding_strategy": self.sharding, "use_orig_params": True}
        return FullyShardedDataParallel(
            model, device_id=torch.device("cpu"), device_mesh=init_device_mesh("cpu", (2, 2)), **self.kwargs
        )


# By name: the strategy, and what its model takes.
STRATEGIES = {
    "DDP": (DDPStrategy, {}),
    "DDP, find_unused_parameters": (lambda: DDPStrategy(find_unused_parameters=True), {}),
    "DDP, static_graph": (lambda: DDPStrategy(static_graph=True), {}),
    "DDP, gradient_as_bucket_view": (lambda: DDPStrategy(gradient_as_bucket_view=True), {}),
    "FSDP1, FULL_SHARD": (fsdp, {}),
    "FSDP1, SHARD_GRAD_OP": (lambda: fsdp(ShardingStrategy.SHARD_GRAD_OP), {}),
    "FSDP1, NO_SHARD": (lambda: fsdp(ShardingStrategy.NO_SHARD), {}),
    "FSDP1, activation checkpointing": (checkpointed, {}),
    "FSDP1, CPU offload": (lambda: fsdp(cpu_offload=True), {}),
    "FSDP2": (lambda: ModelParallelStrategy(2, 1), {}),
    "FSDP2, each layer": (lambda: ModelParallelStrategy(2, 1), {"each": True}),
    "FSDP2, converted first": (lambda: ModelParallelStrategy(2, 1), {"converted": True, "each": True}),
    "FSDP2, CPU offload": (lambda: ModelParallelStrategy(2, 1), {"offloaded": True}),
    "FSDP2, gradient checkpointing": (lambda: ModelParallelStrategy(2, 1), {"gradient_checkpointing": True}),
    "FSDP2, torch.compile": (lambda: ModelParallelStrategy(2, 1), {"compiled": True}),
    "tensor parallel": (lambda: ModelParallelStrategy(1, 2), {}),
    "tensor parallel, converted first": (lambda: ModelParallelStrategy(1, 2), {"converted": True}),
}
KINDS = ("DDP", "FSDP1, FULL_SHARD", "FSDP2", "tensor parallel")
ON_FOUR = {
    "FSDP1, HYBRID_SHARD": (lambda: Hybrid(ShardingStrategy.HYBRID_SHARD), {}),
    "FSDP1, _HYBRID_SHARD_ZERO2": (lambda: Hybrid(ShardingStrategy._HYBRID_SHARD_ZERO2), {}),
    "FSDP2 and tensor parallel": (lambda: ModelParallelStrategy(2, 2), {}),
}


def trainer(plugin, **kwargs):
    defaults = {"max_steps": STEPS, "gradient_clip_val": 1.0, "use_distributed_sampler": False, "limit_val_batches": 0}
    return quiet_trainer(*([] if plugin is None else [plugin]), **{**defaults, **kwargs})


def plugin(precision, **kwargs):
    return PRECISIONS[precision](compute_dtype="fp32", skip=["lm_head"], **kwargs)


def alone(precision, optimizer, micro_batches, how=None, **kwargs):
    """Losses in one process, ``[steps, micro-batches]``; ``how`` is for the Trainer, ``kwargs`` are for the plugin."""
    model, made = Small(optimizer), plugin(precision, **kwargs)
    trainer(made, devices=1, accumulate_grad_batches=micro_batches, **(how or {})).fit(model)
    return torch.stack(model.losses).view(-1, micro_batches)


def train(name, precision, optimizer, how=None, **kwargs):
    """What one rank sees: its losses ``[steps]``, and the plugin's state."""
    make, of_model = {**STRATEGIES, **ON_FOUR}[name]
    model, made = Small(optimizer, **of_model), plugin(precision, **kwargs)
    ranks = torch.distributed.get_world_size()
    trainer(made, devices=ranks, strategy=make(), **(how or {})).fit(model)
    return {"losses": torch.stack(model.losses), "state": state(made)}


def changed(what):
    """How a run goes that begins another phase, or clips each element of its gradients, which shows in the losses two
    steps later, or whose layers share an amax: what the Trainer and the plugin are given."""
    if what == "shared":
        return {}, SHARED
    if what == "clipped":
        return {"gradient_clip_val": 1e-4, "gradient_clip_algorithm": "value", "max_steps": LONGEST}, {}
    return {"callbacks": [PrecisionSwitch("qaf", step=1)], "max_steps": LONGEST}, {}


def gradient_norms():
    def norms(strategy):
        seen = []
        note = On(on_train_batch_end=lambda trainer, *_: seen.append(trainer.callback_metrics["grad_norm"]))
        how = {"devices": RANKS, "strategy": STRATEGIES[strategy][0](), "gradient_clip_val": None}
        trainer(None, callbacks=[note], **how).fit(Small("AdamW"))
        return torch.stack(seen)

    return [norms(strategy) for strategy in ("DDP", "FSDP1, FULL_SHARD")]


def refusals():
    runs = {
        "an amax of flat buffers": (SHARED, fsdp(use_orig_params=False), {}),
        "gather_dtype, DDP": ({}, DDPStrategy(), {"gather_dtype": "bf16"}),
        "gather_dtype, tensor parallel": ({}, ModelParallelStrategy(1, 2), {"gather_dtype": "bf16"}),
    }
    told = {}
    for name, (of_plugin, strategy, of_model) in runs.items():
        told[name] = "nothing"
        try:
            trainer(plugin("NVFP4", **of_plugin), devices=RANKS, strategy=strategy).fit(Small("AdamW", **of_model))
        except (MisconfigurationException, ValueError) as error:
            told[name] = str(error)
    return told


def odd(strategy):
    made = FP8Precision("delayed", compute_dtype="fp32")
    trainer(made, devices=RANKS, strategy=STRATEGIES[strategy][0](), max_steps=len(UNEVEN)).fit(
        Odd(shard=strategy == "FSDP2")
    )
    return state(made)


SHARED = {"shared_amax": ["(q|k|v)_proj", "gate_proj|up_proj"]}
CHANGES = ("switched", "shared", "clipped")
ODD = ("DDP", "FSDP1, FULL_SHARD", "FSDP2")


def cases(strategies):
    """All precisions under each kind and where passes are recomputed; NVFP4 and another in turn with other options."""
    first, *others = PRECISIONS
    pairs = []
    for number, name in enumerate(strategies):
        precisions = [first, others[number % len(others)]]
        if "compile" in name:  # which takes ten times as long
            precisions = [first]
        elif name in (*KINDS, "FSDP2 and tensor parallel") or "checkpointing" in name:
            precisions = PRECISIONS
        pairs += [(name, precision, "StableSPAM") for precision in precisions]
    return pairs + [(name, first, "AdamW") for name in strategies if name in KINDS]


def train_changed(name, what):
    how, of_plugin = changed(what)
    return train(name, "NVFP4", "StableSPAM", how, **of_plugin)


def repeated(name):
    """Losses of a run that rounds stochastically, and of the same run again."""
    stochastic = dict.fromkeys(NEAREST, "stochastic")
    return [train(name, "NVFP4", "StableSPAM", rounding=stochastic)["losses"] for _ in range(2)]


RUNS = {
    **{", ".join(case): partial(train, *case) for case in (*cases(STRATEGIES), *cases(ON_FOUR))},
    **{f"{name}, stochastic": partial(repeated, name) for name in KINDS},
    **{f"{name}, {what}": partial(train_changed, name, what) for name in KINDS for what in CHANGES},
    **{f"{name}, odd": partial(odd, name) for name in ODD},
    "gradient norms": gradient_norms,
    "refused": refusals,
}


def table():
    """What docs/guides/distributed.md says is supported: what is tested."""
    tested = {(name, precision) for name, precision, _ in (*cases(STRATEGIES), *cases(ON_FOUR))}
    options = {}
    for name in (*STRATEGIES, *ON_FOUR):
        precisions = [precision for precision in PRECISIONS if (name, precision) in tested]
        alone = f" ({precisions[0]} alone)" if len(precisions) == 1 else ""
        strategy, _, option = name.partition(", ")
        options.setdefault(strategy, []).append(f"{option or 'none'}{alone}")
    lines = [f"| {strategy} | {', '.join(names)} |" for strategy, names in options.items()]
    return "\n".join(["| strategy | options |", "|---|---|", *lines, ""])


def work():
    return {name: RUNS[name]() for name in sys.argv[3:]}


if __name__ == "__main__":
    print(table(), end="")
