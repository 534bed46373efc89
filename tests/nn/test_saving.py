"""What layers keep for the backward pass: codes and scales give the gradients of the tensors, in fewer bytes."""

import copy
import pickle
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from lightning_lowbit import LinearCasts, convert
from lightning_lowbit.nn import AmaxHistories, LayerKeys, set_blend, set_phase
from lightning_lowbit.nn.casts.linear_casts import PRESETS
from lightning_lowbit.nn.core.watch import Watch
from lightning_lowbit.nn.layers.layer import quantized_layers
from tests.nn.layers import identical, pass_through


class Readers(nn.Module):
    """Several layers that read one tensor, and one that reads another."""

    def __init__(self, count=3):
        super().__init__()
        self.readers = nn.ModuleList(nn.Linear(64, 64, bias=i > 0) for i in range(count))
        self.out = nn.Linear(64, 32)

    def forward(self, x):
        x = torch.tanh(x).bfloat16()
        return self.out(torch.tanh(sum(reader(x) for reader in self.readers)))


def converted(casts, save, count=3):
    torch.manual_seed(0)
    return convert(Readers(count), casts, save=save)


@contextmanager
def kept(model):
    """The tensors that autograd keeps beside the parameters, by address."""
    own, tensors = {parameter.data_ptr() for parameter in model.parameters()}, {}

    def keep(tensor):
        if tensor.data_ptr() not in own:
            tensors[tensor.data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        yield tensors


def size(tensors):
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors.values())


def step(model, number=0, run=None):
    """Output and gradients of a training step, and the bytes that autograd keeps beside the parameters."""
    LayerKeys(model, seed=3).fill_(number)
    AmaxHistories(model)
    torch.manual_seed(number)
    with kept(model) as tensors:
        results = pass_through(model, torch.randn(48, 64), forward=run, autocast=True)
    return results, size(tensors)


def staged(model):
    amaxes = [layer.lowbit.amaxes for layer in quantized_layers(model).values()]
    return [one.staged for one in amaxes if one is not None]


@pytest.mark.fast("fqt", "0.5")
@pytest.mark.parametrize("change", ["fqt", "qaf", "hp-forward", 0.5], ids=str)
def test_gradients_of_presets_are_those_of_the_tensors(change):
    """And the amaxes of delayed scaling. During annealing the tensors are kept."""
    for name in [name for name in PRESETS if name != "bf16"]:
        models = [converted(name, save) for save in ("inputs", "codes")]
        for model in models:
            (set_blend if change == 0.5 else set_phase)(model, change)
        (expected, before), (found, after) = (step(model) for model in models)
        identical(found, expected, name)
        assert after < before or change in ("qaf", 0.5), name
        assert all(map(torch.equal, *map(staged, models))) and bool(staged(model)) == (name == "fp8-delayed")


def test_bytes_of_a_layer_are_a_third_of_bf16s_at_most():
    x, sizes = torch.randn(512, 256), {}
    for save in (None, "inputs", "codes"):
        model = nn.Sequential(nn.Linear(256, 256, bias=False))
        if save:
            LayerKeys(convert(model, "nvfp4", save=save), seed=0).fill_(0, 0, 0, torch.device("cpu"))
        with kept(model) as tensors, torch.autocast("cpu", torch.bfloat16):
            assert model(x).requires_grad
        sizes[save] = size(tensors)
    bf16 = 512 * 256 * 2
    assert sizes["codes"] <= 0.32 * bf16 and sizes["inputs"] >= bf16 and sizes[None] >= bf16


def test_many_readers_of_one_tensor_keep_the_tensor():
    """Four codes of 4.5 bits are more than 16: known after the first pass, with the same gradients in all."""
    for count, keep in ((3, False), (4, True)):
        models, sizes = [converted("nvfp4", save, count) for save in ("inputs", "codes")], []
        for number in range(2):
            (expected, before), (found, after) = (step(model, number) for model in models)
            identical(found, expected)
            assert number == 0 or after < before
            sizes.append(after)
        assert (sizes[1] < sizes[0]) is keep
        layers = quantized_layers(models[1])
        assert all(layers[f"readers.{i}"].lowbit.keeps_input is keep for i in range(count))
        assert not layers["out"].lowbit.keeps_input


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    expected, _ = step(converted("nvfp4", "inputs"))
    model = converted("nvfp4", "codes")
    found, _ = step(model, run=lambda x: checkpoint(model, x, use_reentrant=reentrant))
    identical(found, expected)


@pytest.mark.slow
def test_compiled_models():
    models = [converted("nvfp4", save) for save in ("inputs", "codes")]
    runs = [step(model, run=torch.compile(model, fullgraph=True)) for model in models]
    (expected, before), (found, after) = runs
    identical(found, expected)
    assert after < before


@pytest.mark.parametrize("what", ["operand_sums", "gradient_sums"])
def test_measurements_are_those_of_the_tensors(what):
    sums = []
    for save in ("inputs", "codes"):
        model = converted("nvfp4-nvidia", save)
        watch = Watch(quantized_layers(model), what)
        watch.start(torch.device("cpu"))
        step(model)
        watch.stop()
        sums.append(watch.sums)
    torch.testing.assert_close(*sums, rtol=0, atol=0)
    assert sums[0].abs().sum() > 0


def test_copies_and_pickles_know_their_own_layers():
    model = converted("nvfp4", "codes", 4)
    expected, _ = step(model)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        identical(step(again)[0], expected)
        assert again.out.lowbit.readers is not model.out.lowbit.readers


def test_refusals_say_what_to_do():
    for casts, save, words in (
        ("nvfp4", "all", "inputs"),
        ("bf16", "codes", "wgrad_x"),
        (LinearCasts.preset("nvfp4").replace(surrogate={"fprop_x": "trust"}), "codes", "surrogate of fprop_x"),
    ):
        with pytest.raises(ValueError, match=words):
            convert(Readers(), casts, save=save)
