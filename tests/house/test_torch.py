"""Each function of the doorway to torch's private names does what it says, with the torch that is installed."""

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from lightning_lowbit import _torch
from lightning_lowbit._torch import sharding


def test_operations_are_those_of_torch():
    tensors = [torch.ones(2), torch.full((3,), 2.0)]
    _torch.foreach_mul_(tensors, 3.0)
    assert [tensor.tolist() for tensor in tensors] == [[3, 3], [6, 6, 6]]
    torch.testing.assert_close(torch.stack(_torch.foreach_norm(tensors)), torch.tensor([18.0**0.5, 108.0**0.5]))
    _torch.foreach_copy_(tensors, [torch.zeros(2), torch.ones(3)])
    assert tensors[1].sum() == 3
    _torch.foreach_zero_(tensors)
    assert tensors[1].sum() == 0
    x = torch.arange(6, dtype=torch.int8).view(2, 3)
    assert _torch.int_mm(x, x.t().contiguous()).tolist() == [[5, 14], [14, 50]]
    assert _torch.unsafe_view(torch.ones(4), (2, 2)).shape == (2, 2)
    assert callable(_torch.scaled_mm) and isinstance(_torch.has_vnni(), bool)
    assert all(isinstance(_torch.cpu_has_units(dtype), bool) for dtype in (torch.bfloat16, torch.float16))


def test_classes_and_masks_of_modules():
    assert issubclass(nn.Conv2d, _torch.ConvNd) and not issubclass(nn.Linear, _torch.ConvNd)
    assert issubclass(nn.BatchNorm1d, _torch.NormBase) and not issubclass(nn.LayerNorm, _torch.NormBase)
    mask = _torch.canonical_mask(torch.tensor([True, False]), "mask", None, "", torch.float32)
    assert mask.tolist() == [-torch.inf, 0]
    assert _torch.dtype_of_mask(mask) == torch.float32 and _torch.dtype_of_mask(None) is None
    q = torch.zeros(3, 2, 4)
    assert [_torch.check_multihead_shapes(x, x, x, None, None, 2) for x in (q, q[0])] == [True, False]


def test_hooks_are_listed_and_removed():
    layer, calls = nn.Linear(2, 2), []
    before = layer.register_forward_pre_hook(lambda *_: calls.append("before"))
    after = layer.register_forward_hook(lambda *_: calls.append("after"), always_call=True)
    assert [list(hooks) for hooks in _torch.hooks_of(layer)] == [[before.id], [after.id]]
    layer(torch.zeros(1, 2))
    _torch.remove_hook(layer, before.id)
    _torch.remove_hook(layer, after.id)
    layer(torch.zeros(1, 2))
    assert calls == ["before", "after"]


def test_children_have_all_their_names_and_compiled_modules_are_unwrapped():
    model, layer = nn.Module(), nn.Linear(2, 2)
    model.first = model.second = layer
    assert _torch.children_of(model) == {"first": layer, "second": layer}
    assert _torch.uncompiled(torch.compile(layer)) is layer and _torch.uncompiled(layer) is layer


def test_a_backward_pass_is_recognized():
    nodes = []

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            assert isinstance(ctx, _torch.FunctionContext)
            assert _torch.node_of_backward() is None and _torch.number_of_backward() == -1
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            nodes.append((_torch.node_of_backward(), _torch.number_of_backward()))
            return g

    y = Function.apply(torch.ones((), requires_grad=True))
    assert _torch.number_of_node() == _torch.number_of_node(y.grad_fn)
    y.backward()
    ((node, number),) = nodes
    assert _torch.number_of_node(node) == _torch.number_of_node(y.grad_fn) and number >= 0


def test_saved_tensors_are_seen_and_writes_hidden():
    assert _torch.saved_tensor_hooks(False) is None
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert _torch.saved_tensor_hooks(False) is not None
    tensor = torch.ones(2)
    with _torch.unseen_writes([tensor]):
        tensor.zero_()
    assert _torch.version_of(tensor) == 0
    tensor.zero_()
    assert _torch.version_of(tensor) == 1


@pytest.mark.filterwarnings("ignore:.torch.jit.trace. is deprecated")
def test_transformations_are_recognized():
    seen = []

    def function(x):
        seen.append((_torch.is_transformed(), _torch.is_batched(x), _torch.has_tangents(), _torch.is_tracing()))
        return x * 1

    function(torch.ones(2))
    torch.func.vmap(function)(torch.ones(2))
    with forward_ad.dual_level():
        function(torch.ones(2))
    torch.jit.trace(function, torch.ones(2), check_trace=False)
    assert seen[:3] == [(False,) * 4, (True, True, False, False), (False, False, True, False)]
    assert seen[3][3] and not _torch.is_tracing()


def test_modes_are_disabled_and_kernels_listed():
    class Mode(_torch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            raise AssertionError(function)

    with Mode(), _torch.disable_current_modes():
        torch.ones(2).neg()
    composite = [_torch.is_composite(operation.default) for operation in (torch.ops.aten.matmul, torch.ops.aten.mm)]
    assert composite == [True, False]


def test_a_composite_operation_shows_a_mode_its_parts_under_autocast():
    parts = []

    class Mode(_torch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if _torch.is_composite(func):
                return _torch.run_composite(func, self, args, kwargs or {})
            parts.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    x = torch.randn(4, 4)
    for cast, dtype in (True, torch.bfloat16), (False, torch.float32):
        with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast), Mode():
            assert torch.einsum("ij,kj->ik", x, x).dtype == dtype and "bmm" in parts
            assert torch.cdist(x, x, compute_mode="use_mm_for_euclid_dist").dtype == torch.float32


def test_compilation_is_recognized():
    assert _torch.graph_in_compilation() is None
    with _torch.repeatable_backward():
        from torch._functorch import config

        assert not config.donated_buffer and torch.compiler.config.cache_key_tag
    assert config.donated_buffer and not torch.compiler.config.cache_key_tag


def test_scalers_tell_their_state():
    parameter = nn.Parameter(torch.ones(()))
    optimizer, scaler = torch.optim.SGD([parameter], 0.1), torch.amp.GradScaler("cpu", init_scale=4.0)
    assert _torch.current_scale(scaler) is None and _torch.growth_tracker(scaler) is None
    scaler.scale(parameter * torch.inf).backward()
    scaler.unscale_(optimizer)
    assert _torch.current_scale(scaler) == 4 and _torch.growth_tracker(scaler) == 0
    for flags in (_torch.overflow_flags(scaler), _torch.overflow_flags(scaler, optimizer)):
        assert [flag.item() for by_device in flags for flag in by_device.values()] == [1]
    _torch.forget_optimizers(scaler)
    assert _torch.overflow_flags(scaler) == []


def test_parts_of_optimizers_and_schedules_are_told():
    parameter = nn.Parameter(torch.ones(()))
    optimizers = [torch.optim.AdamW([parameter], fused=fused) for fused in (True, False)]
    assert [_torch.unscales_in_step(optimizer) for optimizer in optimizers] == [True, False]
    parts = [torch.optim.lr_scheduler.ConstantLR(optimizers[0]) for _ in range(2)]
    assert _torch.schedules_of(torch.optim.lr_scheduler.ChainedScheduler(parts)) == parts
    assert _torch.schedules_of(parts[0]) == []
    _torch.mark_stepped(optimizers[0])
    parts[0].step()  # warns otherwise, and warnings are errors


def test_parameters_outside_of_fsdp_are_not_flattened():
    assert not sharding.is_flattened(torch.ones(2)) and not sharding.is_flat_buffer(torch.ones(2))
    assert sharding.flat_parameters(None) == []
