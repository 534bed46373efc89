"""Several calls of one layer in compiled graphs and in sharded models: the bits of a plain model."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_lowbit import convert
from lightning_lowbit.nn import LayerKeys
from tests.nn.calls.repeated_calls import (
    EVERYTHING,
    SIZE,
    assert_equal,
    batch,
    gradients,
    non_reentrant,
    plain,
    recurrent,
    reentrant,
)


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


@pytest.mark.fast("plain-plain")
@pytest.mark.parametrize("within", [plain, non_reentrant])
@pytest.mark.parametrize("around", [plain, non_reentrant, reentrant])
def test_a_compiled_part_that_is_called_several_times(compiler, around, within):
    """With regions around it, and with regions in its graph."""
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


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


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
        x = batch()
        keys.fill_(5)
        y = wrapped(x)
        y.square().sum().backward()
        assert torch.equal(y.detach(), expected["y"]), f"{shard.__name__}, {model.outer.__name__}"
        assert torch.equal(x.grad, expected["x"]), f"{shard.__name__}, {model.outer.__name__}"
