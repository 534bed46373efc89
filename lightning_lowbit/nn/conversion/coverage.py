"""The low-bit share of a model's matrix arithmetic, counted while the model runs.

A forward operation belongs to the innermost running module; a backward one to the module of its forward operation,
found by the number of its autograd node. With the layers' casts this gives, for any phase,

    coverage      = FLOPs of GEMMs whose two operands are both quantized / all FLOPs
    average bits  = mean over all FLOPs of the bits of the two operands, block scales included
"""

import re
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count, shape_wrapper

from lightning_lowbit._torch import (
    OpOverload,
    TorchDispatchMode,
    is_composite,
    node_of_backward,
    number_of_node,
    operator_of,
    run_composite,
    saved_tensor_hooks,
)
from lightning_lowbit.compilation import backend, counted_product, counted_shape, is_within_cast
from lightning_lowbit.nn.casts.linear_casts import LinearCasts
from lightning_lowbit.nn.layers.layer import QuantizedLayer
from lightning_lowbit.patterns import clean_name


@dataclass(frozen=True)
class Coverage:
    """The low-bit share of counted FLOPs.

    ``uncovered`` are the other FLOPs by module, largest first: ``""`` is no module, ``"mlp.down_proj (dgrad)"`` a GEMM
    in high precision of a converted layer.
    """

    flops: int  # of all matrix products, attentions and convolutions; a multiplication and an addition are two
    low_bit: int  # of GEMMs whose two operands are both quantized
    average_bits: float  # per element of a GEMM operand, block scales included, weighted by FLOPs
    outside: int  # outside of layers with a quantized GEMM
    uncovered: dict[str, int]
    uncounted: tuple[str, ...]  # operations that look like matrix products but have no FLOP formula

    @property
    def share(self) -> float:
        return self.low_bit / self.flops if self.flops else 0.0


class GemmCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts FLOPs by module and GEMM in a ``with`` block; each process counts its own.

    It extends the formulas of ``torch.utils.flop_counter``, but not its ``FlopCounterMode``, which changes results: it
    decomposes operations such as the gradient of SiLU, which then round elsewhere.

    Examples:
        >>> with GemmCounter(model) as counter:
        ...     model(x).sum().backward()
        >>> counter.coverage().share
    """

    supports_higher_order_operators = True  # flex_attention has a formula

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {module: clean_name(name) for name, module in model.named_modules()}
        self._layers = {self._names[m]: m for m in model.modules() if isinstance(m, QuantizedLayer)}
        self._by_id = {id(layer): name for name, layer in self._layers.items()}
        self._running: list[tuple[str, bool]] = []  # and whether it was entered in a backward pass
        self._module_of_node: dict[int, str] = {}
        self._uncounted: set[str] = set()
        self.gemms: Counter[tuple[str, str]] = Counter()  # FLOPs by module name, and "fprop", "dgrad" or "wgrad"
        self.others: Counter[str] = Counter()  # FLOPs of everything else by module name
        self.recomputed = 0  # FLOPs of both that were spent on activations a second time
        self.paused = False  # nothing is counted until a module runs

    def __enter__(self) -> "GemmCounter":
        self._entered = ExitStack()
        # Global hooks: with hooks of its own, nn.TransformerEncoderLayer would take another path.
        self._entered.callback(register_module_forward_pre_hook(self._enter_module).remove)
        self._entered.callback(register_module_forward_hook(self._leave_module, always_call=True).remove)
        # Compiled code hides its modules. Without this, torch would also find an active mode, and run these functions
        # eagerly from then on.
        self._entered.enter_context(torch.compiler.set_stance("force_eager"))
        self._entered.enter_context(backend("cpp"))
        # torch warns that hooks are called once more for a compiled module, which does no harm here.
        self._entered.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "Using `torch.compile\\(module\\)` when there are global hooks")
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._entered.close()

    @contextmanager
    def _alone(self) -> Generator[None, None, None]:
        """Context of the mode alone, where the hooks are there."""
        super().__enter__()  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _enter_module(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self.paused = False
        # A module that is not part of the model (a metric, a loss) counts as the module that calls it.
        name = self._names.get(module, self._innermost())
        self._running.append((name, node_of_backward() is not None))

    def _innermost(self) -> str:
        return self._running[-1][0] if self._running else ""

    def _leave_module(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._running.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operation = operator_of(func)
        if isinstance(func, OpOverload) and is_composite(func):  # comes whole in inference mode
            return run_composite(func, self._alone(), args, kwargs)
        out = func(*args, **kwargs)
        if self.paused or is_within_cast():  # a rotation or a mean, which casts compute beside the GEMMs
            return out
        formula = _FORMULAS.get(operation)
        if formula is not None and not _is_nested(out, *args):  # which has no shape
            shape = counted_shape()
            self._count(2 * prod(shape) if shape else formula(*args, **kwargs, out_val=out))
        elif formula is not None or _LOOKS_LIKE_GEMM.search(str(operation)):
            self._uncounted.add(str(operation))
        return out

    def _count(self, flops: int) -> None:
        node = node_of_backward()
        if (product := counted_product()) is not None and product[0] in self._by_id:
            layer, gemm, again = product
            self.recomputed += flops if again or (gemm == "fprop" and node is not None) else 0
            self.gemms[self._by_id[layer], gemm] += flops
            return
        in_module = bool(self._running) and self._running[-1][1]  # where a backward pass computes activations again
        if node is None or in_module or _is_recomputing(node):
            self.recomputed += 0 if node is None else flops
            name, gemms = self._innermost() if node is None or in_module else "", ["fprop"]
            # The node of this operation was numbered just before it ran. Without gradients the number is that of an
            # earlier operation, which keeps its module.
            self._module_of_node.setdefault(number_of_node(), name)
        else:
            name = self._module_of_node.get(number_of_node(node), "")
            gemms = _needed(node)
        if name in self._layers and gemms:
            for gemm in gemms:  # dgrad and wgrad have the same shapes in another order, and as many FLOPs
                self.gemms[name, gemm] += flops // len(gemms)
        else:
            self.others[name] += flops

    @property
    def model_flops(self) -> int:
        return sum(self.gemms.values()) + sum(self.others.values()) - self.recomputed

    def native_shares(self, device: torch.device, dtype: torch.dtype | None = None) -> dict[str, float]:
        """Returns the shares of all FLOPs in the native GEMMs of a device, by kind, with the casts in force, of passes
        in a dtype (None for any)."""
        native: Counter[str] = Counter()
        for (name, gemm), flops in self.gemms.items():
            layer = self._layers[name]
            if (kind := layer.native_kinds(device, dtype=dtype).get(gemm)) is not None:
                native[kind] += flops
        return {kind: flops / max(self.model_flops + self.recomputed, 1) for kind, flops in native.items()}

    def idle(self) -> list[str]:
        """Returns the names of converted layers that have casts, and were not called: what reads their weights itself
        computes in high precision."""
        called = {name for name, _ in self.gemms}
        return [name for name, casts in self.casts().items() if name not in called and casts != LinearCasts()]

    def casts(self) -> dict[str, LinearCasts]:
        """Returns the casts of the converted layers now, in any phase."""
        return {name: layer.full_casts for name, layer in self._layers.items()}

    def coverage(
        self, phase: str | None = None, hp_bits: int = 16, full_casts: Mapping[str, LinearCasts] | None = None
    ) -> Coverage:
        """Returns the low-bit share in a phase or (None) with the casts in force; high precision has ``hp_bits``. With
        ``full_casts`` it is that of a phase of other casts than those of now, by layer."""
        full_casts = full_casts or {}
        low_bit, bits, uncovered = 0, 0.0, Counter(self.others)
        whole = Counter[str]()  # of the converted layers whose GEMMs are all in high precision
        for (name, gemm), flops in self.gemms.items():
            layer = self._layers[name]
            casts = layer.casts if phase is None else full_casts.get(name, layer.full_casts).phase(phase)
            pair = [casts.cast_of(operand) for operand in casts.operands_of(gemm)]
            bits += flops * sum(hp_bits if cast is None else cast.bits for cast in pair) / 2
            if gemm in casts.quantized_gemms:
                low_bit += flops
            elif casts == LinearCasts():
                whole[name] += flops
            else:
                uncovered[f"{name} ({gemm})"] += flops
        uncovered += whole
        bits += hp_bits * sum(self.others.values())
        total = self.model_flops + self.recomputed
        return Coverage(
            flops=total,
            low_bit=low_bit,
            average_bits=bits / total if total else float(hp_bits),
            outside=sum(self.others.values()) + whole.total(),
            uncovered=dict(uncovered.most_common()),
            uncounted=tuple(sorted(self._uncounted)),
        )


def _is_nested(*values: Any) -> bool:
    return any(isinstance(value, Tensor) and value.is_nested and value.layout == torch.strided for value in values)


def _is_recomputing(node: Any) -> bool:
    """Returns whether torch.utils.checkpoint computes activations again, outside any module."""
    hooks = saved_tensor_hooks(True)
    again = hooks is not None and hooks[0].__qualname__.startswith("_recomputation_hook")
    return again or node.name() == "CheckpointFunctionBackward"


def _needed(node: Any) -> list[str]:
    edges = [edge for edge, _ in node.next_functions]
    x, w = edges[-2:] if node.name().startswith(("Addmm", "Mm")) else (*edges, None, None)[:2]
    return [gemm for gemm, edge in (("dgrad", x), ("wgrad", w)) if edge is not None]


# "upsample_bilinear2d" contains "linear", and is no GEMM.
_LOOKS_LIKE_GEMM = re.compile(r"^(?!.*upsample).*(mm(_|$)|\bmv|bmm|matmul|attention|conv(?!ert)|rnn|lstm|gru|linear)")


def _multihead(q: Any, k: Any, v: Any, embed_dim: int, *_: Any) -> int:
    # [batch, tokens, embed_dim]: projections of q, k, v and of the output, then Q · Kᵀ and P · V
    tokens = 2 * prod(q[:-1]) + prod(k[:-1]) + prod(v[:-1])
    return 2 * tokens * embed_dim**2 + 4 * prod(q[:-1]) * k[-2] * embed_dim


def _encoder_layer(x: Any, embed_dim: int, *args: Any) -> int:
    hidden = args[12][0]  # of ffn_weight_1, [hidden, embed_dim]
    return _multihead(x, x, x, embed_dim) + 4 * prod(x[:-1]) * embed_dim * hidden


def _grouped(a: Any, b: Any, *_: Any) -> int:
    # Groups lie along one dimension of a 2-D operand, whose rows the FLOPs count.
    if len(a) == 2 and len(b) == 2:  # [m, tokens] · [tokens, n] for each group of tokens
        return 2 * a[0] * a[1] * b[1]
    return 2 * prod(a) * b[-1] if len(a) == 2 or len(b) == 3 else 2 * prod(a[:-1]) * prod(b)


def _rnn(x: Any, *args: Any) -> int:
    # Weights come as a list or as four; those with two dimensions are matrices that meet every token.
    weights = args[0] if isinstance(args[0], list) else args[:4]
    return 2 * prod(x[:-1]) * sum(prod(shape) for shape in weights if len(shape) == 2)


def _convolution_backward(g: Any, x: Any, w: Any, *args: Any) -> int:
    # torch's own formula takes the weight's gradient of a grouped convolution for that of a full one.
    transposed, output_mask = args[4], args[7]
    return 2 * g[0] * prod((x if transposed else g)[2:]) * prod(w) * sum(output_mask[:2])


def _by_shapes(formula: Callable[..., int]) -> Any:
    return shape_wrapper(lambda *shapes, out_shape=None, **_: formula(*shapes))  # type: ignore[no-untyped-call]


def _with_heads_of(q: Any, *keys_and_values: Any) -> list[Any]:
    # Query heads that share keys and values multiply them each; torch 2.11 counts as many heads of both alone.
    return [torch.Size((*shape[:-3], q[-3], *shape[-2:])) for shape in keys_and_values]


def _sdpa(q: Any, k: Any, v: Any, *_: Any) -> int:
    return sdpa_flop_count(q, *_with_heads_of(q, k, v))  # type: ignore[no-untyped-call]


def _sdpa_backward(g: Any, q: Any, k: Any, v: Any, *_: Any) -> int:
    return sdpa_backward_flop_count(g, q, *_with_heads_of(q, k, v))  # type: ignore[no-untyped-call]


_aten: Any = torch.ops.aten
_FUSED_ATTENTION = [
    f"_scaled_dot_product_{kind}"
    for kind in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
]
_LACKING: dict[Any, Callable[..., int]] = {
    **dict.fromkeys((getattr(_aten, name) for name in _FUSED_ATTENTION), _sdpa),
    **dict.fromkeys((getattr(_aten, f"{name}_backward") for name in _FUSED_ATTENTION), _sdpa_backward),
    _aten._native_multi_head_attention: _multihead,
    _aten._transformer_encoder_layer_fwd: _encoder_layer,
    _aten._grouped_mm: _grouped,
    # Of native GEMMs the shape before packing is counted.
    **dict.fromkeys((_aten._int_mm, _aten._scaled_mm_v2), lambda a, b, *_: 2 * prod(a) * b[-1]),
    _aten.convolution_backward: _convolution_backward,
    **dict.fromkeys((_aten.mkldnn_rnn_layer, _aten._cudnn_rnn), _rnn),
    **dict.fromkeys((_aten.mkldnn_rnn_layer_backward, _aten._cudnn_rnn_backward), lambda *args: 2 * _rnn(*args)),
    _aten.mv: lambda a, _: 2 * prod(a),
    _aten.addmv: lambda _, a, __: 2 * prod(a),
}
_FORMULAS: dict[Any, Any] = {**flop_registry, **{packet: _by_shapes(f) for packet, f in _LACKING.items()}}
