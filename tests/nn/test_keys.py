"""Keys of random bits: a pure function of what they are said to depend on, and of nothing else."""

import hashlib
import random

import pytest
import torch
from torch import nn

from lightning_lowbit import convert
from lightning_lowbit.nn import OPERANDS, LayerKeys
from lightning_lowbit.nn.layers.layer import clean_name
from tests.references.quantize import splitmix64

WEIGHTS = [index for index, operand in enumerate(OPERANDS) if operand.endswith("_w")]
OTHERS = [index for index in range(len(OPERANDS)) if index not in WEIGHTS]


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


def test_pure_function():
    first = keys_at(LayerKeys(model(), seed=3), 5, 2, 1)
    random.seed(0)
    torch.manual_seed(99)
    other = LayerKeys(model(), seed=3)
    keys_at(other, 8)
    keys_at(other, 1, 7)
    assert torch.equal(keys_at(other, 5, 2, 1), first), "keys depend on something else than their arguments"


def test_keys_are_hashes_of_names_and_numbers():
    """The formula, in plain integers: keys decide how a checkpoint continues, so they must not change."""

    def blake(text):
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

    found = keys_at(LayerKeys(model(1), seed=-7), 2, 3, 4)
    for operand, key in zip(OPERANDS, found[0].tolist(), strict=True):
        numbers = "-7,2,3" if operand.endswith("_w") else "-7,2,3,4"
        assert key % 2**64 == splitmix64(blake(f"layer0/{operand}") ^ blake(numbers)), operand


@pytest.mark.parametrize(
    ("change", "moves"),
    [
        ({"seed": 4}, range(6)),
        ({"step": 6}, range(6)),
        ({"micro_batch": 3}, range(6)),
        ({"rank": 2}, OTHERS),  # w is the same on all ranks, x and g are not
    ],
    ids=["seed", "step", "micro-batch", "rank"],
)
def test_each_argument_moves_its_keys(change, moves):
    def at(seed=3, step=5, micro_batch=2, rank=1):
        return keys_at(LayerKeys(model(), seed), step, micro_batch, rank)

    equal = at() == at(**change)
    for index, operand in enumerate(OPERANDS):
        assert equal[:, index].any() != (index in moves), f"{operand} with {change}: {equal[:, index].tolist()}"
        assert equal[:, index].all() == (index not in moves)


def test_all_different():
    keys = LayerKeys(model(8))
    found = torch.stack([keys_at(keys, step, mb) for step in range(40) for mb in range(3)])
    assert found.unique().numel() == found.numel(), "two of the keys coincide"


def test_layers_are_known_by_name_not_by_place():
    few, many = LayerKeys(model(2)), LayerKeys(model(5))
    assert list(many.layers) == [f"layer{i}" for i in range(5)]
    assert torch.equal(keys_at(many, 1)[:2], keys_at(few, 1)), "further layers changed the keys of the first ones"


@pytest.mark.parametrize("name", ["_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module", "_forward_module"])
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
        assert view.shape == (6,)
        assert view.dtype == torch.int64
        assert not view.any(), "keys before the first fill"
    keys.fill_(1, device=torch.device("cpu"))
    for layer, view, address in zip(keys.layers.values(), views, addresses, strict=True):
        assert layer.lowbit.keys is view, "filling replaced the tensor of a layer"
        assert view.data_ptr() == address
        assert view.all()


def test_a_model_without_converted_layers():
    keys = LayerKeys(nn.Linear(2, 2))
    keys.fill_(1)
    assert keys.layers == {}
