"""``nn.MultiheadAttention``, whose projections of queries, keys and values are no layers but functional calls.

    q, k, v = x · in_projᵀ + b         part ``in_proj``, or ``q_proj``, ``k_proj``, ``v_proj`` with separate weights
    o       = softmax(q · kᵀ / √d) · v
    y       = o · out_projᵀ + b        a layer of its own

The original class reads the weight of its ``out_proj`` without calling it; the converted class calls it.
"""

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from lightning_lowbit._torch import canonical_mask, check_multihead_shapes, dtype_of_mask
from lightning_lowbit.nn.core.inputs import check_inputs
from lightning_lowbit.nn.layers.composite import CompositeLayer, PartLayer, has_plain_parts
from lightning_lowbit.nn.layers.layer import QuantizedLayer
from lightning_lowbit.nn.layers.registry import derived, kind

SEPARATE = ("q_proj", "k_proj", "v_proj")


class Projection(PartLayer):
    """The weight of one or three projections. A call multiplies its input by one, two or all of them, in one GEMM,
    within which scales are shared: in self-attention, those of the whole weight."""

    def __init__(self, owner: nn.Module, weight: str, bias: str | None, part: int = 0, parts: int = 1) -> None:
        super().__init__(owner, weight, bias)
        self._part, self.parts = part, parts

    @property
    def bias(self) -> Tensor | None:
        name = self._names[1]
        if name is None:
            return None
        bias: Tensor = getattr(self.owner, name)  # of separate weights, one for all of them
        return bias if self.parts > 1 else bias.chunk(len(SEPARATE))[self._part]

    def forward(self, input: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """Computes ``x · Wᵀ + b`` for ``x`` ``[..., in_features]``, by default with the whole weight and bias."""
        if weight is None:
            weight, bias = self.weight, self.bias
        if isinstance(weight, DTensor):
            raise ValueError(
                f"The weight of nn.MultiheadAttention is spread over {weight.device_mesh}. If fully_shard has spread "
                "it, call the module that was given to fully_shard. It cannot be tensor-parallel: use projections that "
                "are layers, or leave it out with skip."
            )
        return self.quantized_forward(input, weight, bias)

    def split(self, *sizes: int) -> list[tuple[Tensor, Tensor | None]]:
        """Splits weight and bias into pieces of so many projections each."""
        rows, bias = len(self.weight) // self.parts, self.bias
        lengths = [rows * size for size in sizes]
        biases = [None] * len(sizes) if bias is None else torch.split(bias, lengths)
        return list(zip(torch.split(self.weight, lengths), biases, strict=True))


class QuantizedMultihead(CompositeLayer):
    """Base class of converted ``nn.MultiheadAttention``. Its options, shapes and errors are torch's."""

    called_children = ("out_proj",)
    quantized_attention: ClassVar[Callable[..., Tensor]]  # set by nn.attention, which imports this module

    @staticmethod
    def make_parts(module: Any) -> dict[str, PartLayer]:
        bias = None if module.in_proj_bias is None else "in_proj_bias"
        if module.in_proj_weight is not None:
            return {"in_proj": Projection(module, "in_proj_weight", bias, parts=len(SEPARATE))}
        return {name: Projection(module, f"{name}_weight", bias, part) for part, name in enumerate(SEPARATE)}

    @property
    def is_plain(self) -> bool:
        out_proj: Any = self.out_proj
        is_plain = not isinstance(out_proj, QuantizedLayer) or out_proj.lowbit.casts.traits.is_empty
        return is_plain and has_plain_parts(self)  # torch.compile takes super().is_plain for true

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        module: Any = self
        if self.is_plain or check_inputs(self, query, key, value):
            plain = super().forward
            return plain(query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
        is_batched = check_multihead_shapes(query, key, value, key_padding_mask, attn_mask, module.num_heads)
        if not is_batched:
            query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif module.batch_first:
            query, key, value = _alike(query, key, value)
        if query.shape[-1] != module.embed_dim:
            name = self.name_in_model
            raise ValueError(f"Layer {name}: query has embed_dim={module.embed_dim} features; got {query.shape[-1]}.")
        if key.shape[:2] != value.shape[:2]:
            shapes = f"{tuple(key.shape)} and {tuple(value.shape)}"
            raise ValueError(f"Layer {self.name_in_model}: key and value have as many tokens; got {shapes}.")
        if is_causal and attn_mask is None:
            raise ValueError(
                f"Layer {self.name_in_model}: is_causal says that attn_mask is causal, and there is no attn_mask: give "
                "one, too."
            )
        causal = is_causal and key_padding_mask is None
        dtype, kind_of_mask = query.dtype, dtype_of_mask(attn_mask)
        padding = canonical_mask(key_padding_mask, "key_padding_mask", kind_of_mask, "attn_mask", dtype)
        is_left_out = causal and not need_weights
        mask = None if is_left_out else canonical_mask(attn_mask, "attn_mask", None, "", dtype, False)
        q, k, v = self._projected(query, key, value)
        q, k, v, mask = _heads(module, q, k, v, mask, padding)
        p = module.dropout if module.training else 0.0
        o, weights = _explicit(q, k, v, mask, p) if need_weights else (None, None)
        if o is None or self.attends:
            o = self.attend(q, k, v, mask, p, is_left_out)
        tokens, batch, width = query.shape
        y = module.out_proj(o.permute(2, 0, 1, 3).reshape(tokens * batch, width)).view(tokens, batch, width)
        if weights is not None and average_attn_weights:
            weights = weights.mean(dim=1)
        if not is_batched:
            return y.squeeze(1), None if weights is None else weights.squeeze(0)
        return y.transpose(0, 1) if module.batch_first else y, weights

    @property
    def attends(self) -> bool:
        """True if attention's own products are quantized; its weights (``need_weights``) are in high precision."""
        return any(not part.lowbit.casts.traits.is_empty for part in self.parts.values() if part.kind == "attention")

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, causal: bool) -> Tensor:
        if not self.attends:
            return F.scaled_dot_product_attention(q, k, v, mask, p, causal)
        return self.quantized_attention(self.parts, q, k, v, mask, p, causal)

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Projects to q, k and v ``[tokens, batch, width]``, in as few GEMMs as there are different inputs."""
        module: Any = self
        if module.in_proj_weight is None:
            q, k, v = (self.part(name)(x) for name, x in zip(SEPARATE, (query, key, value), strict=True))
            return q, k, v
        projection: Projection = self.part("in_proj")
        if query is key and key is value:
            q, k, v = _unstacked(projection(query), 3)
        elif key is value:
            first, others = projection.split(1, 2)
            k, v = _unstacked(projection(key, *others), 2)
            q = projection(query, *first)
        else:
            pieces = projection.split(1, 1, 1)
            q, k, v = (projection(x, *piece) for x, piece in zip((query, key, value), pieces, strict=True))
        return q, k, v


def _alike(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Transposes inputs ``[batch, tokens, width]`` to ``[tokens, batch, width]``; one tensor stays one tensor."""
    q = query.transpose(0, 1)
    k = q if key is query else key.transpose(0, 1)
    return q, k, k if value is key else value.transpose(0, 1)


def _unstacked(x: Tensor, parts: int) -> Tensor:
    """Reshapes ``[tokens, batch, parts * width]`` to ``[parts, tokens, batch, width]``."""
    return x.view(*x.shape[:-1], parts, x.shape[-1] // parts).movedim(-2, 0).contiguous()


def _heads(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, padding: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Reshapes q, k and v to ``[batch, heads, tokens, features]``, adds the keys of ``bias_k`` and ``add_zero_attn``,
    and joins the masks to one of four dimensions, which broadcasts to the scores."""
    (queries, batch, _), heads = q.shape, module.num_heads
    if mask is not None:
        shape = (queries, len(k)) if mask.dim() == 2 else (batch * heads, queries, len(k))
        if mask.shape != shape:
            name = module.name_in_model
            raise ValueError(f"Layer {name}: attn_mask has shape {shape}; got {tuple(mask.shape)}.")
        mask = mask[None, None] if mask.dim() == 2 else mask.view(batch, heads, *mask.shape[1:])
    if module.bias_k is not None:
        k, v = torch.cat([k, module.bias_k.repeat(1, batch, 1)]), torch.cat([v, module.bias_v.repeat(1, batch, 1)])

    def by_head(x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], heads, x.shape[-1] // heads).permute(1, 2, 0, 3)

    q, k, v = by_head(q), by_head(k), by_head(v)
    if module.add_zero_attn:
        k, v = (torch.cat([x, x.new_zeros(batch, heads, 1, x.shape[-1])], 2) for x in (k, v))
    added = (module.bias_k is not None) + module.add_zero_attn
    mask = mask if mask is None or not added else F.pad(mask, (0, added))
    if padding is not None:
        padding = F.pad(padding, (0, added))[:, None, None]
        mask = padding.expand(-1, heads, -1, -1) if mask is None else mask + padding
    return q, k, v, mask


def _explicit(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float) -> tuple[Tensor, Tensor]:
    """Computes attention and its weights ``[batch, heads, queries, keys]``."""
    batch, heads, _, features = q.shape
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    q, k = q * math.sqrt(1.0 / features), k.transpose(-2, -1)
    scores = torch.bmm(q, k) if mask is None else torch.baddbmm(mask.expand(batch, heads, -1, -1).flatten(0, 1), q, k)
    weights = F.dropout(scores.softmax(-1), p) if p else scores.softmax(-1)
    o = torch.bmm(weights, v)
    return o.view(batch, heads, *o.shape[1:]), weights.view(batch, heads, *weights.shape[1:])


def uncalled_projections(model: nn.Module) -> set[nn.Module]:
    """Finds output projections that subclasses with another forward pass do not call: they read the weight alone."""
    attentions = (module for module in model.modules() if isinstance(module, nn.MultiheadAttention))
    return {attention.out_proj for attention in attentions if multihead_class(type(attention)) is None}


@kind
def multihead_class(cls: Any) -> type[QuantizedMultihead] | type[QuantizedLayer] | None:
    """Returns the class that ``nn.MultiheadAttention``, a subclass with its forward pass, or its output projection is
    converted to; None for other classes."""
    base: Any = None
    if cls is NonDynamicallyQuantizableLinear:
        base = QuantizedLayer
    elif issubclass(cls, QuantizedMultihead):
        return cls
    elif issubclass(cls, nn.MultiheadAttention) and cls.forward is nn.MultiheadAttention.forward:
        base = QuantizedMultihead
    return None if base is None else derived(base, cls)
