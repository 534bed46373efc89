"""The doorway to torch's private names: no other module uses one, so that a new torch is tried here first.

Names are those of torch without the underscore, or say for what the package needs it. Operations are torch's own
objects, which compiled graphs know; the rest are functions of a few lines. ``sharding`` and ``fsdp2`` have the names of
torch.distributed, and ``devices`` knows where torch lacks dtypes and operators.
"""

import os
import platform
from collections.abc import Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.autograd import forward_ad
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.optim import Optimizer
from torch.overrides import enable_reentrant_dispatch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode, _pop_mode_temporarily

# --- operations -------------------------------------------------------------------------------------------------------

foreach_copy_, foreach_mul_, foreach_zero_ = torch._foreach_copy_, torch._foreach_mul_, torch._foreach_zero_
foreach_norm = torch._foreach_norm
int_mm, scaled_mm = torch._int_mm, torch._scaled_mm
unsafe_view = torch.ops.aten._unsafe_view.default

# --- modules ----------------------------------------------------------------------------------------------------------

ConvNd, NormBase = nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase
canonical_mask, dtype_of_mask = nn.functional._canonical_mask, nn.functional._none_or_dtype
check_multihead_shapes = nn.functional._mha_shape_check  # type: ignore[attr-defined]


def hooks_of(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """Returns the hooks before and after a module's forward pass, by their numbers."""
    return module._forward_pre_hooks, module._forward_hooks


def remove_hook(module: nn.Module, number: int) -> None:
    """Removes a hook before or after a module's forward pass."""
    for hooks in (*hooks_of(module), module._forward_hooks_always_called, module._forward_hooks_with_kwargs):
        hooks.pop(number, None)
    module._forward_pre_hooks_with_kwargs.pop(number, None)


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Returns a module's children by name; one that is registered twice appears under both names."""
    return module._modules


def is_compiled(module: nn.Module) -> bool:
    """Returns whether ``torch.compile`` or ``module.compile`` has compiled a module."""
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None


def uncompiled(module: nn.Module) -> nn.Module:
    """Returns the module within ``torch.compile``'s wrapper, or the module itself."""
    while type(module).__name__ == "OptimizedModule":
        module = module._orig_mod  # type: ignore[assignment]
    return module


# --- autograd ---------------------------------------------------------------------------------------------------------

FunctionContext = torch._C._FunctionBase
node_of_backward = torch._C._current_autograd_node  # None outside of a backward pass
number_of_backward = torch._C._current_graph_task_id  # −1 outside of a backward pass
saved_tensor_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_is_legacy_batch = torch._C._functorch.is_legacy_batchedtensor
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
is_tracing, is_transformed = torch._C._is_tracing, torch._C._are_functorch_transforms_active


def number_of_node(node: Any = None) -> int:
    """Returns the number of an autograd node; without one, of the node that was made last."""
    return int(torch._C._autograd._get_sequence_nr() - 1 if node is None else node._sequence_nr())


def unseen_writes(tensors: list[Tensor]) -> AbstractContextManager[None]:
    """Lets tensors change in place within a context without autograd noticing."""
    return _unsafe_preserve_version_counter(tuple(tensors))


def version_of(tensor: Tensor) -> int:
    """Returns the number of a tensor's changes in place."""
    return tensor._version


def has_tangents() -> bool:
    """Tells whether forward-mode derivatives are being computed."""
    return forward_ad._current_level >= 0


def is_batched(tensor: Tensor) -> bool:
    """Tells whether a tensor is a batch of vmap or another wrapper of torch.func."""
    return _is_legacy_batch(tensor) or _is_wrapped(tensor)


# --- compiler and dispatcher ------------------------------------------------------------------------------------------

disable_current_modes = _disable_current_modes
innermost_mode, leave_innermost_mode = _get_current_dispatch_mode, _pop_mode_temporarily
OpOverload = torch._ops.OpOverload
graph_in_compilation = torch._guards.TracingContext.try_get  # what stands for that graph; None without one


_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key


@cache
def is_composite(operation: OpOverload) -> bool:
    """Returns whether an operation has no kernel of its own, and consists of others. Modes see it in inference mode,
    elsewhere its parts, which :func:`run_composite` shows them."""
    name: str = operation.name()  # type: ignore[no-untyped-call]
    others = ("CPU", "CUDA", "CompositeExplicitAutograd")
    return _has_kernel(name, "CompositeImplicitAutograd") and not any(_has_kernel(name, kernel) for kernel in others)


# Whether the parts run of an operation whose inputs autocast has cast: its parts are then not under autocast.
_IS_CAST = ContextVar("is_cast", default=False)


def run_composite(operation: OpOverload, mode: AbstractContextManager[Any], args: Any, kwargs: Any) -> Any:
    """Computes a composite operation, which has come to a mode, as without that mode, which gets its parts.

    ``operation.decompose`` would run Python's forms of some (``lstm``, ``dropout``), and keep the parts from autocast.
    """
    name: str = operation.name()  # type: ignore[no-untyped-call]
    with enable_reentrant_dispatch():  # as outside of all modes
        devices = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    is_cast = _IS_CAST.get() or any(_has_kernel(name, f"Autocast{device.upper()}") for device in devices)
    before = _IS_CAST.set(is_cast)
    for device in devices:
        torch.set_autocast_enabled(device, not is_cast)
    try:
        with mode:
            return operation._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
    finally:
        for device in devices:
            torch.set_autocast_enabled(device, False)
        _IS_CAST.reset(before)


def has_dispatch_mode() -> bool:
    """Tells whether a ``TorchDispatchMode`` sees operators now, such as a counter or a tracer."""
    return torch._C._len_torch_dispatch_stack() > 0


def operator_of(function: Any) -> Any:
    """Returns the operator of one of its overloads; another function itself."""
    return getattr(function, "_overloadpacket", function)


def mark_dynamic(tensor: Tensor, dimension: int) -> None:
    """Has compiled code take any size of a dimension."""
    torch._dynamo.mark_dynamic(tensor, dimension)


@contextmanager
def repeatable_backward() -> Generator[None, None, None]:
    """Keeps compiled backward passes from reusing the memory of saved tensors, so that they can run again.

    What was compiled before is compiled anew, with another key for caches: torch's keys do not tell this setting.
    """
    from torch._functorch import config

    caches: Any = torch.compiler.config
    torch._dynamo.reset()
    with config.patch(donated_buffer=False), caches.patch(cache_key_tag=f"{caches.cache_key_tag} repeatable"):
        yield


# --- CPUs -------------------------------------------------------------------------------------------------------------


def has_amx() -> bool:
    """Tells whether this CPU multiplies tiles of bfloat16."""
    return torch.cpu._is_amx_tile_supported()


def _onednn_limit() -> str:
    """Returns the instruction set to which the environment holds oneDNN, torch's library of products; "" for none."""
    return (os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or "").upper()


def has_vnni() -> bool:
    """Tells whether this CPU multiplies int8 by instructions of its own. Without them oneDNN's sums saturate."""
    return torch.cpu._is_vnni_supported() and _onednn_limit() not in ("SSE41", "AVX", "AVX2", "AVX512_CORE")


def cpu_has_units(dtype: torch.dtype) -> bool:
    """Tells whether this CPU multiplies matrices of bfloat16 or float16 by instructions of its own."""
    if not torch._C._has_mkldnn:
        return False
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    # oneDNN supports bfloat16 from AVX-512 on, by conversions to float32 where there are no instructions for it.
    is_older = _onednn_limit() in ("AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI")
    return torch.cpu._is_avx512_bf16_supported() and not is_older


_aten = torch.ops.aten
#: Products on CPUs, and how many of their results have the dtype of the operands.
CPU_PRODUCTS: dict[Any, int] = {
    **{product.default: 1 for product in (_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm)},
    **{product.out: 1 for product in (_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm)},
    _aten._grouped_mm.default: 1,
    _aten.convolution.default: 1,
    _aten.convolution_backward.default: 3,
    _aten.mkldnn_rnn_layer.default: 3,  # the other one holds bytes
    _aten.mkldnn_rnn_layer_backward.default: 7,
    _aten._scaled_dot_product_flash_attention_for_cpu.default: 1,  # the other one is float32
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: 3,
}


# --- optimizers and their scalers -------------------------------------------------------------------------------------


current_scale = GradScaler._get_scale_async  # 0-d, on the device of the loss; None before the first one


def growth_tracker(scaler: GradScaler) -> Tensor | None:
    """Returns the number of steps since a scale last changed, 0-d; None before the first loss."""
    return scaler._growth_tracker


def overflow_flags(scaler: GradScaler, optimizer: Optimizer | None = None) -> list[dict[torch.device, Tensor]]:
    """Returns the flags, by device, that gradients were not finite: of an optimizer, or (None) of all."""
    states = scaler._per_optimizer_states
    return [state["found_inf_per_device"] for key, state in states.items() if optimizer is None or key == id(optimizer)]


def forget_optimizers(scaler: GradScaler) -> None:
    """Makes a scaler ready for other optimizers, also after a step that failed."""
    scaler._per_optimizer_states.clear()


def forget_optimizer(scaler: GradScaler, optimizer: Optimizer) -> None:
    """Makes a scaler ready for new gradients of an optimizer."""
    scaler._per_optimizer_states.pop(id(optimizer), None)


@contextmanager
def without(scaler: GradScaler, optimizers: Iterable[Optimizer]) -> Generator[None, None, None]:
    """Context in which a scaler does not know some optimizers, so that an update forgets only the others."""
    numbers = [id(optimizer) for optimizer in optimizers if id(optimizer) in scaler._per_optimizer_states]
    states = {number: scaler._per_optimizer_states.pop(number) for number in numbers}
    yield
    scaler._per_optimizer_states.update(states)


def version(tensor: Tensor) -> tuple[int, int]:
    """Returns the memory of a tensor, and how often that has been written to."""
    return tensor.data_ptr(), tensor._version


def mark_stepped(optimizer: Any) -> None:
    """Keeps a scheduler from warning that its optimizer has not stepped."""
    optimizer._opt_called = True


def unscales_in_step(optimizer: Any) -> bool:
    """Tells whether an optimizer is fused, and divides gradients by the loss scale within its step."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def schedules_of(schedule: Any) -> list[Any]:
    """Returns the parts of a schedule that consists of several, or their states; none for another schedule."""
    parts = schedule.get("_schedulers") if isinstance(schedule, Mapping) else getattr(schedule, "_schedulers", None)
    return list(parts or ())
