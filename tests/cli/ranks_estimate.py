"""One of two processes that train a tiny model, and what they send."""

import sys
from collections import Counter
from contextlib import nullcontext

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_lowbit import convert
from lightning_lowbit.nn.sharded.gather import WeightGathers
from lightning_lowbit.recipes.models import CausalLM
from lightning_lowbit.recipes.sharding import tensor_parallel_plan

RANKS, MICRO_BATCHES, SEQUENCES, LENGTH = 2, 2, 2, 32
# Rows of the MLP do not divide by two, so that shards are padded; or do, as tensor parallelism has to cut them.
TINY = {"hidden_size": 32, "intermediate_size": 51, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 96}
EVEN = {**TINY, "intermediate_size": 52}
# Name of an operator and which argument holds the whole tensors; the last one is that of DTensors.
WHOLE = {"allreduce_": 0, "_allgather_base_": 0, "_reduce_scatter_base_": 1, "all_reduce": 0}
SENDS_NOTHING = ("wait_tensor", "_wrap_tensor_autograd")


class Sent(TorchDispatchMode):
    """Adds up the bytes of whole tensors in collectives, also of those that DDP starts from C++."""

    def __init__(self):
        super().__init__()
        self.payload = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # it calls again, with what is here
        name = function.overloadpacket.__name__
        if function.namespace in ("c10d", "_c10d_functional") and name not in SENDS_NOTHING:
            whole = args[WHOLE[name]]
            self.payload[name] += sum(t.numel() * t.itemsize for t in (whole if isinstance(whole, list) else [whole]))
        return function(*args, **(kwargs or {}))


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def nbytes(tensors):
    return sum(tensor.numel() * tensor.itemsize for tensor in map(local, tensors))


def step(module, model):
    """One optimizer step; what was sent, and what is there on this rank."""
    optimizer = module.make_optimizer(list(module.named_parameters()))
    matrices = {tuple(parameter.shape) for name, parameter in module.named_parameters() if "_proj" in name}
    matrices |= {tuple(module.model.lm_head.weight.shape)}
    copies = {}

    def keep(tensor):
        if tensor.dtype == torch.bfloat16 and matrices & {tuple(tensor.shape), tuple(tensor.shape)[::-1]}:
            copies[local(tensor).untyped_storage().data_ptr()] = local(tensor).untyped_storage().nbytes()
        return tensor

    with Sent() as sent:
        for number in range(MICRO_BATCHES):
            batch = torch.randint(0, TINY["vocab_size"], (SEQUENCES, LENGTH + 1))
            waits = isinstance(model, DistributedDataParallel) and number < MICRO_BATCHES - 1
            with model.no_sync() if waits else nullcontext():
                with torch.autocast("cpu", dtype=torch.bfloat16), saved_tensors_hooks(keep, lambda tensor: tensor):
                    logits = model(batch[:, :-1])
                    loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
                if number == 0:
                    kept = sum(copies.values())
                loss.backward()
    optimizer.step()
    state = [value for each in optimizer.state.values() for value in each.values() if isinstance(value, torch.Tensor)]
    return {
        "sent": dict(sent.payload),
        "parameters": nbytes(module.parameters()),
        "gradients": nbytes(parameter.grad for parameter in module.parameters()),
        "optimizer state": nbytes(state),
        "weights to compute with": kept,
    }


def sharded(casts=None, **policy):
    module, mesh = CausalLM(config=TINY, seed=0), init_device_mesh("cpu", (RANKS,))
    mixed = MixedPrecisionPolicy(**policy)
    for block in module.model.model.layers:
        fully_shard(block, mesh=mesh, mp_policy=mixed)
    fully_shard(module, mesh=mesh, mp_policy=mixed)
    if casts:
        WeightGathers(convert(module, casts, skip=["lm_head"]), torch.bfloat16).prepare()
    return step(module, module)


def cut(**kwargs):
    module = CausalLM(config=EVEN, seed=0, **kwargs)
    parallelize_module(module.model, init_device_mesh("cpu", (RANKS,)), tensor_parallel_plan(module.model, RANKS))
    return step(module, module)


def replicated():
    module = CausalLM(config=TINY, seed=0)
    # Buffers, a few bytes that do not change, would be sent anew before each forward pass.
    return step(module, DistributedDataParallel(module, broadcast_buffers=False))


def work():
    bf16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    runs = {
        "ddp stored": replicated,
        "fsdp stored": sharded,
        "fsdp bf16": lambda: sharded(**bf16),
        "fsdp casts": lambda: sharded("fp8-current"),
        "fsdp casts+bf16": lambda: sharded("fp8-current", **bf16),
        "tensor parallel": cut,
        "tensor parallel again": lambda: cut(gradient_checkpointing=True),
    }
    return {name: runs[name]() for name in sys.argv[3:]}
