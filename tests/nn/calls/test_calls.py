"""Several calls of one layer in a step: bits of their own, the same ones when recomputed, compiled or sharded."""

import copy
import hashlib
import pickle

import pytest
import torch
from torch import nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import set_checkpoint_early_stop

from lightning_lowbit import convert
from lightning_lowbit.nn import OPERANDS, LayerKeys
from lightning_lowbit.nn.core import calls
from lightning_lowbit.quant import Hadamard
from lightning_lowbit.quant.rounding import mix_key, uniform
from tests.nn.calls.repeated_calls import (
    EVERYTHING,
    SHAPES,
    SIZE,
    assert_equal,
    batch,
    gradients,
    non_reentrant,
    plain,
    recurrent,
    reentrant,
)
from tests.nn.layers import spied
from tests.operations import Operations


def test_operands_made_of_data_differ_between_calls_and_weights_do_not():
    model, keys = recurrent({**EVERYTHING, "hadamard": {"wgrad": Hadamard(16, "keyed")}})
    keys.fill_(5)
    made = []
    for _ in range(3):
        with spied() as seen:
            model.a(batch()).square().sum().backward()
        made.append(dict(seen))
    for operand in OPERANDS:
        values = [each[operand].values for each in made]
        same = [torch.equal(values[0], values[1]), torch.equal(values[1], values[2]), torch.equal(values[0], values[2])]
        assert same == [operand.endswith("_w")] * 3, f"{operand} of three calls: equal is {same}"


def test_a_backward_pass_has_the_keys_of_its_call():
    """In whatever order. The formula in plain integers: keys decide how a checkpoint continues, and must not change."""
    model, keys = recurrent()
    keys.fill_(5)
    given = model.a.lowbit.keys.clone()
    xs = [batch() for _ in range(3)]
    ys = [model.a(x) for x in xs]
    for number in (1, 2, 0):
        ys[number].sum().backward()
    assert torch.equal(model.a.lowbit.keys, given)
    for number, x in enumerate(xs):
        digest = hashlib.blake2b(f"call {number}".encode(), digest_size=8).digest() if number else bytes(8)
        of_call = torch.tensor(int.from_bytes(digest, "little", signed=True))
        model.a.lowbit.calls, model.a.lowbit.keys = None, torch.where(keys._is_weight, given, given ^ of_call)
        again = batch()
        model.a(again).sum().backward()
        assert torch.equal(again.grad, x.grad), f"call {number}"


def test_a_layer_that_is_called_once_costs_no_further_operation():
    counts = []
    for numbered in (True, False):
        model, keys = recurrent("nvfp4")
        keys.fill_(5)
        model.a.lowbit.calls = model.a.lowbit.calls if numbered else None
        with Operations() as operations:
            model.a(batch()).sum().backward()
        counts.append(operations.counts)
    assert counts[0] == counts[1]


def test_casts_that_round_to_nearest_have_no_calls_to_count():
    model, keys = recurrent("int4")
    gradients(model, keys)
    assert not keys._calls._counts


def test_keys_of_calls_are_as_independent_as_random_ones():
    index = torch.arange(2**16, dtype=torch.int32)
    for key in mix_key(torch.arange(4)):
        bits = torch.stack([uniform(index, key ^ calls._hash(number) if number else key) for number in range(8)])
        correlation = torch.corrcoef(torch.cat([bits, bits.roll(1, 1), bits.roll(16, 1)]))
        others = correlation - torch.eye(len(correlation))
        assert others.abs().max() < 5 / 256, f"of 2^16 pairs of numbers the correlation is {others.abs().max()}"


def test_counts_begin_anew_with_the_keys_of_a_micro_batch():
    model, keys = recurrent()
    first = gradients(model, keys)
    assert_equal(gradients(model, keys), first, "the same micro-batch again")
    with torch.no_grad():
        keys.fill_(5, micro_batch=1)
        model(batch())
    assert_equal(gradients(model, keys), first, "after an evaluation")


def test_copies_and_pickles_count_for_themselves():
    model, keys = recurrent()
    keys.fill_(5)
    model.a(batch())
    for copied in (copy.deepcopy(model.a), pickle.loads(pickle.dumps(model.a))):
        assert copied.lowbit.calls is not model.a.lowbit.calls
        assert copied(batch()).shape == (8, SIZE)
    assert keys._calls.number(model.a) == 1, "a call of a copy was counted"


@pytest.mark.pairwise
@pytest.mark.filterwarnings(
    "ignore:None of the inputs have requires_grad=True"
)  # of a region in a region, computed once
@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("inner", [plain, non_reentrant, reentrant])
@pytest.mark.parametrize("outer", [non_reentrant, reentrant])
def test_recomputed_calls_have_the_bits_that_they_had(outer, inner, early_stop):
    model, keys = recurrent()
    expected = {backwards: gradients(model, keys, backwards=backwards) for backwards in (1, 2)}
    model.outer, model.inner = outer, inner
    reordered = reentrant in (outer, inner)  # each region adds to the gradients by itself
    for model.shape in SHAPES:
        for backwards in expected:
            with set_checkpoint_early_stop(early_stop):
                found = gradients(model, keys, backwards=backwards)
            assert_equal(found, expected[backwards], f"{model.shape}, {backwards} backward passes", reordered)


def test_regions_of_checkpoints_that_others_wrote():
    class Foreign(torch.autograd.Function):
        @staticmethod
        def forward(ctx, function, x, *parameters):
            ctx.function = function
            ctx.save_for_backward(x)
            with torch.no_grad():
                return function(x)

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                torch.autograd.backward(ctx.function(x), g)
            return None, x.grad

    model, keys = recurrent()
    expected = gradients(model, keys)
    model.outer = lambda function, x: Foreign.apply(function, x)
    for model.shape in SHAPES:
        assert_equal(gradients(model, keys), expected, model.shape, is_reordered=True)


def test_a_step_or_an_evaluation_between_forward_and_backward_pass():
    model, keys = recurrent()
    model.outer = non_reentrant
    expected = gradients(model, keys)

    def forward(x):
        y = model(x)
        keys.fill_(5)  # as a context of the plugin does
        with torch.no_grad():
            model.four(x)
        return y

    assert_equal(gradients(model, keys, forward), expected, "an evaluation came between")


def test_a_recomputation_that_cannot_be_told_is_refused():
    """Of a layer that is called several times; one that is called once has its bits anyway."""
    model, keys = recurrent()
    expected = gradients(model, keys, lambda x: model.head(x))
    composable_checkpoint(model.head)  # nothing of it is on the stack in the forward pass
    assert_equal(gradients(model, keys, lambda x: model.head(x)), expected, "a layer that is called once")
    with pytest.raises(ValueError, match=r"called 2 times in a step.*Recompute activations with torch.utils.checkp"):
        gradients(model, keys, lambda x: model.head(x) + model.head(2 * x))


def test_without_a_region_nobody_looks_at_the_stack(monkeypatch):
    model, keys = recurrent()
    monkeypatch.setattr(calls.sys, "_getframe", None)
    gradients(model, keys)


@pytest.mark.fast("non_reentrant")
@pytest.mark.parametrize("inner", [plain, non_reentrant])
def test_a_compiled_model(compiler, inner):
    """The loop is in one graph, and what is recomputed, parts of which it computes in another order."""
    model, keys = recurrent()
    expected = gradients(model, keys, model.two)
    model.inner = inner
    compiled = torch.compile(model.two, backend=compiler, fullgraph=True)
    for _ in range(2):
        assert_equal(gradients(model, keys, compiled), expected, "compiled", is_reordered=True)
    assert compiler.frame_count == 1


@pytest.mark.slow
@pytest.mark.parametrize("within", [plain, non_reentrant])
@pytest.mark.parametrize("around", [plain, non_reentrant, reentrant])
def test_a_compiled_part_that_is_called_several_times(compiler, around, within):
    model, keys = recurrent()
    expected = gradients(model, keys, model.two)
    step = torch.compile(lambda x: within(model.step, x), backend=compiler, fullgraph=True)
    for _ in range(3):
        found = gradients(model, keys, lambda x: around(step, around(step, x)))
        assert_equal(found, expected, "compiled", is_reordered=True)
    assert compiler.frame_count == (2 if around is reentrant else 1), "with and without gradients"


def test_compiled_blocks_share_a_graph(compiler):
    """No number of a layer is a constant of it."""
    blocks = nn.ModuleList(convert(nn.Linear(SIZE, SIZE), EVERYTHING) for _ in range(3))
    keys = LayerKeys(blocks)
    for block in blocks:
        block.compile(backend=compiler, fullgraph=True)

    def forward(x):
        for block in blocks:
            x = block(block(x))
        return x

    found = gradients(blocks, keys, forward)
    assert compiler.frame_count == 1
    for block in blocks:
        block._compiled_call_impl = None
    assert_equal(gradients(blocks, keys, forward), found, "not compiled", is_reordered=True)


def _fsdp1(model):
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


def _fsdp2(model):
    mesh = init_device_mesh("cpu", (1,))
    for layer in (model.a, model.b, model):
        fully_shard(layer, mesh=mesh)
    return model


def _tensor_parallel(model):
    styles = {"a": ColwiseParallel(), "b": RowwiseParallel()}
    return parallelize_module(model, init_device_mesh("cpu", (1,)), styles)


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
@pytest.mark.parametrize("shard", [_fsdp1, _fsdp2, _tensor_parallel])
def test_sharded_layers(shard):
    model, keys = recurrent()
    expected = gradients(model, keys)
    wrapped = shard(model)
    keys = LayerKeys(wrapped, seed=1)
    for model.outer in (plain, non_reentrant):
        found = gradients(model, keys, wrapped)
        for name in "yx":
            assert torch.equal(found[name], expected[name]), f"{shard.__name__}, {model.outer.__name__}: {name}"
