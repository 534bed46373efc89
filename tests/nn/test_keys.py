"""Keys of random bits: a pure function of what they are said to depend on, and of nothing else."""

import hashlib

import torch
from torch import nn

from lightning_lowbit import convert
from lightning_lowbit.nn import OPERANDS, LayerKeys
from lightning_lowbit.patterns import clean_name
from tests.references.quantize import splitmix64
from tests.tables import each


class Wrapper(nn.Module):
    """Puts its module under a name, as FSDP, torch.compile, activation checkpointing and Fabric do."""

    def __init__(self, module, name):
        super().__init__()
        self.add_module(name, module)


def model(layers=3):
    return convert(nn.ModuleDict({f"layer{i}": nn.Linear(2, 2) for i in range(layers)}), "nvfp4")


def keys_at(keys, *args):
    """int64 ``[layers, 6]`` copied from the layers."""
    keys.fill_(*args)
    return torch.stack([layer.lowbit.keys for layer in keys.layers.values()]).clone()


def test_keys_are_hashes_of_names_and_numbers():
    """The formula, in plain integers: keys decide how a checkpoint continues, so they must not change."""

    def blake(text):
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

    for seed, layers in ((-7, 1), (3, 2), (3, 5)):
        keys = LayerKeys(model(layers), seed)
        assert list(keys.layers) == [f"layer{i}" for i in range(layers)]
        for step, micro_batch, rank in ((2, 3, 4), (5, 2, 1), (6, 2, 1), (5, 0, 1), (5, 2, 0), (2, 3, 4)):
            for name, row in zip(keys.layers, keys_at(keys, step, micro_batch, rank).tolist(), strict=True):
                for operand, key in zip(OPERANDS, row, strict=True):
                    # w is the same on all ranks, x and g are not.
                    numbers = f"{seed},{step},{micro_batch}" + ("" if operand.endswith("_w") else f",{rank}")
                    assert key % 2**64 == splitmix64(blake(f"{name}/{operand}") ^ blake(numbers)), operand


@each("name", ["_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module", "_forward_module"])
def test_wrappers_leave_no_trace(name):
    wrapped = nn.ModuleDict({key: Wrapper(module, name) for key, module in model().items()})
    outer = Wrapper(wrapped, name)
    keys = LayerKeys(outer)
    assert list(keys.layers) == list(LayerKeys(model()).layers)
    assert torch.equal(keys_at(keys, 4), keys_at(LayerKeys(model()), 4)), f"{name} changes the keys"
    assert clean_name(f"a.{name}.b.{name}.{name}.weight_{name}") == f"a.b.weight_{name}"


def test_filled_in_place():
    keys = LayerKeys(model())
    views = [layer.lowbit.keys for layer in keys.layers.values()]
    addresses = [view.data_ptr() for view in views]
    for view in views:
        assert (view.shape, view.dtype) == ((6,), torch.int64)
        assert not view.any(), "keys before the first fill"
    keys.fill_(1, device=torch.device("cpu"))
    assert [view.data_ptr() for view in views] == addresses and all(view.all() for view in views)
    assert all(layer.lowbit.keys is view for layer, view in zip(keys.layers.values(), views, strict=True))


def test_a_model_without_converted_layers():
    keys = LayerKeys(nn.Linear(2, 2))
    keys.fill_(1)
    assert keys.layers == {}
