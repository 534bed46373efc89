"""Experts of ``transformers``: modules that hold the experts' matrices as stacks, and multiply them by tokens.

    h = up(x)        [tokens of all experts, 2 · intermediate], or without a gate [.., intermediate]
    y = down(act(gate) ⊙ up)                                    summed over the experts of a token, by their weights

Classes are known by what makes them experts, without an import of ``transformers``: the decorator
``use_experts_implementation``, or their names. Their parameters keep their layout.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_lowbit.nn.core.inputs import check_inputs
from lightning_lowbit.nn.layers.composite import CompositeLayer, PartLayer
from lightning_lowbit.nn.layers.grouped import GroupedLayer, GroupedLinear, GroupedProduct, QuantGroupedLinear
from lightning_lowbit.nn.layers.registry import derived, kind


class RoutedExperts(CompositeLayer):
    """Experts of a class that ``transformers.integrations.moe.use_experts_implementation`` has decorated, whatever
    implementation the configuration names: it holds where nothing is quantized."""

    # Attributes of the modules; the decorator sets those with a value.
    num_experts: int
    has_gate: bool = True
    has_bias: bool = False
    has_post_expert_norm: bool = False
    is_transposed: bool = False
    act_fn: Any
    post_expert_norm: Any
    _apply_gate: Any

    @staticmethod
    def make_parts(module: Any) -> dict[str, PartLayer]:
        names = ("gate_up_proj" if getattr(module, "has_gate", True) else "up_proj", "down_proj")
        if not all(isinstance(getattr(module, name, None), nn.Parameter) for name in names):
            return {}  # replaced, as by quantizers of transformers
        has_bias, is_transposed = getattr(module, "has_bias", False), getattr(module, "is_transposed", False)
        biases = [f"{name}_bias" if has_bias else None for name in names]
        return {n: GroupedProduct(module, n, b, is_transposed) for n, b in zip(names, biases, strict=True)}

    @staticmethod
    def before_forward(module: Any, args: Any) -> None:
        """Notes which experts this process holds. Expert parallelism gives the forward pass plain tensors."""
        if module.is_plain:
            return
        for part in module.parts.values():
            weight = part.weight_matrix()
            if isinstance(weight, DTensor):
                part.first_expert = part.first_of(weight)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Returns ``hidden_states`` [tokens, features] through the experts ``top_k_index`` [tokens, k] of each token,
        summed by ``top_k_weights`` [tokens, k]. A number from ``num_experts`` on is an expert of another process."""
        if self.is_plain or check_inputs(self, hidden_states, top_k_index, top_k_weights):
            return super().forward(hidden_states, top_k_index, top_k_weights)
        return self._quantized(hidden_states, top_k_index, top_k_weights)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _quantized(self, hidden_states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        (tokens, k), x = chosen.shape, hidden_states.flatten(0, -2)
        experts, order = chosen.flatten().sort(stable=True)  # the rows of an expert in the order of tokens
        # The one wait for the device: all products take these numbers, in the backward pass too.
        ends = torch.searchsorted(experts, torch.arange(self.num_experts, device=x.device), right=True).tolist()
        # Each index occurs once, so that sums of gradients do not depend on the order in which a GPU adds.
        y: Tensor = self._experts(x[:, None].expand(-1, k, -1).flatten(0, 1).index_select(0, order), ends)
        if self.has_post_expert_norm:
            y = self.post_expert_norm(y)
        y = y * weights.flatten().index_select(0, order).masked_fill(experts >= self.num_experts, 0.0)[:, None]
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
        return y.index_select(0, back).view(tokens, k, y.shape[1]).sum(1).to(x.dtype).view_as(hidden_states)

    def _experts(self, x: Tensor, ends: Sequence[int]) -> Any:
        """Runs each expert on its rows of ``x``, which end at ``ends``."""
        h = self.part("gate_up_proj" if self.has_gate else "up_proj")(x, ends)
        h = self._apply_gate(h) if self.has_gate else self.act_fn(h)
        return self.part("down_proj")(h, ends)


class ExpertsAndIdentities(RoutedExperts):
    """The experts of LongCat. Some return their input: matrices of theirs in ``gate_up_proj`` have no use."""

    num_routed_experts: int
    zero_expert_num: int

    @property
    def num_experts(self) -> int:  # type: ignore[override]
        return self.num_routed_experts

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _quantized(self, hidden_states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        unchanged = weights.masked_fill(chosen < self.num_experts, 0.0).sum(-1, keepdim=True)
        y = super()._quantized(hidden_states, chosen, weights)
        return (y + hidden_states * unchanged).to(hidden_states.dtype)

    def _experts(self, x: Tensor, ends: Sequence[int]) -> Any:
        gate, up = self.part("gate_up_proj")(x, [*ends, *[ends[-1]] * self.zero_expert_num]).chunk(2, dim=-1)
        return self.part("down_proj")(self.act_fn(gate) * up, ends)


class MergedExperts(RoutedExperts):
    """The experts of DBRX, whose matrices are in a child ``mlp``, below each other."""

    mlp: Any

    @staticmethod
    def make_parts(module: Any) -> dict[str, PartLayer]:
        return {name: MergedProduct(module.mlp, name, module.num_experts, name == "w2") for name in ("w1", "v1", "w2")}

    def _experts(self, x: Tensor, ends: Sequence[int]) -> Any:
        gate, up = (self.part(name)(x, ends) for name in ("w1", "v1"))
        return self.part("w2")(self.mlp.activation_fn(gate) * up, ends)


class MergedProduct(GroupedProduct):
    """A stack in one parameter ``[experts * out_features, in_features]``, or with the two sizes transposed."""

    def __init__(self, owner: Any, weight: str, experts: int, is_transposed: bool) -> None:
        super().__init__(owner, weight, None, is_transposed)
        self.experts = experts

    def matrix_of(self, weight: Tensor) -> Tensor:
        return super().matrix_of(torch.unflatten(weight, 0, (self.experts, -1)))


class UniformExperts(CompositeLayer):
    """The experts of Llama 4, each of which gets all tokens."""

    gate_up_proj: nn.Parameter
    act_fn: Any

    @staticmethod
    def make_parts(module: Any) -> dict[str, PartLayer]:
        return {name: GroupedProduct(module, name, is_transposed=True) for name in ("gate_up_proj", "down_proj")}

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Returns ``hidden_states`` [experts · tokens, features], sorted by expert."""
        if self.is_plain or check_inputs(self, hidden_states):
            return super().forward(hidden_states)
        experts = len(self.gate_up_proj)
        rows = len(hidden_states) // experts
        ends = [rows * (i + 1) for i in range(experts)]
        gate, up = self.part("gate_up_proj")(hidden_states, ends).chunk(2, dim=-1)
        y: Tensor = self.part("down_proj")(up * self.act_fn(gate), ends)
        return y


class ParallelExperts(GroupedLayer):
    """A stack of JetMoe, which is called with the numbers of rows."""

    bias = None

    def forward(self, inputs: Tensor, expert_size: Any) -> Tensor:  # type: ignore[override]
        """Returns ``inputs`` [tokens, features], sorted by expert, ``expert_size`` of them for each."""
        sizes = torch.as_tensor(expert_size, device="cpu")
        return super().forward(inputs, sizes.cumsum(0))


# Classes of transformers without the decorator.
_BY_NAME: dict[str, type[CompositeLayer] | type[GroupedLayer]] = {
    "Step3p7Experts": RoutedExperts,
    "LongcatFlashExperts": ExpertsAndIdentities,
    "DbrxExperts": MergedExperts,
    "Llama4TextExperts": UniformExperts,
    "JetMoeParallelExperts": ParallelExperts,
}


@kind
def experts_class(cls: Any) -> Any:
    """Returns the class that a class of experts is converted to; None for another class."""
    if cls is GroupedLinear:
        return QuantGroupedLinear
    base = _BY_NAME.get(cls.__name__) if cls.__module__.startswith("transformers.") else None
    if getattr(getattr(cls, "forward", None), "__globals__", {}).get("__name__") == "transformers.integrations.moe":
        base = RoutedExperts  # the decorator's function, under the name of the class's own
    return None if base is None else derived(base, cls)
