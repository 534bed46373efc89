"""The attribute that conversion adds to a module."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from lightning_lowbit.nn.casts.linear_casts import LinearCasts
from lightning_lowbit.nn.core.calls import Calls
from lightning_lowbit.nn.core.operands import PrequantizedWeight
from lightning_lowbit.nn.core.saving import Frozen, Readers
from lightning_lowbit.nn.core.watch import LayerAmaxes


@dataclass(slots=True, eq=False, repr=False)
class LayerState:
    """The settings of a converted layer, and the tensors that its passes read and write: its attribute ``lowbit``.

    Tensors belong to other objects, such as :class:`lightning_lowbit.nn.LayerKeys`, and are no buffers of the module.
    """

    casts: LinearCasts = LinearCasts()  # in force
    full_casts: LinearCasts = LinearCasts()  # outside any phase
    keys: Tensor | None = None  # of stochastic rounding, int64 [6], in the order of OPERANDS; None until set
    calls: Calls | None = None  # numbers those within a micro-batch, which have their own keys; None: all have these
    plugin_is_gone: bool = False  # nothing renews keys and amaxes anymore, so that training warns or raises
    amaxes: LayerAmaxes | None = None  # kept between steps; None until set
    exact: bool = False  # computes float32 GEMMs over exact operands
    backend: str = "auto"  # "auto" (native GEMMs where device and casts allow), "native" or "emulated"
    grouped: str = "auto"  # or "native": grouped GEMMs for the products of stacks, of experts
    save: str = "inputs"  # or "codes": saved for the backward pass, see nn/core/saving.py
    readers: Readers | None = None  # knows the layers that read one tensor together; None for save="inputs"
    keeps_input: bool = False  # with save="codes", saves the input itself: codes of all its readers would be larger
    blend: Tensor | None = None  # float32, 0-d: λ of annealing, see set_blend; None for fully quantized operands
    token_amax: Tensor | None = None  # float32 [tokens, 1], for smoothing the tokens of the next pass; None until set
    operand_sums: Tensor | None = None  # a row of a Watch, as is gradient_sums; None if unmeasured
    gradient_sums: Tensor | None = None
    weight_amax: Tensor | None = None  # float32, 0-d, scales the weight (nn/conversion/shared_amax.py), if not None
    frozen: Frozen | None = None  # describes the bytes of a weight that is not trained (pack_frozen); None for a matrix
    prequantized_weight: PrequantizedWeight | None = None  # set while gathering it (nn/sharded/gather.py)
    name_in_model: str = "(without a name)"  # in errors: that in the converted model, or the class and shape

    def for_copy(self) -> "LayerState":
        """Returns the state of a copied layer, whose keys and amaxes nothing renews, and which nothing measures."""
        return replace(
            self,
            plugin_is_gone=self.plugin_is_gone or self.full_casts.traits.draws,
            amaxes=None if self.amaxes is None else self.amaxes._replace(switch=None),
            token_amax=None,
            operand_sums=None,
            gradient_sums=None,
            weight_amax=None,
            prequantized_weight=None,
        )


# Attributes of layers in earlier versions, with their names in the state.
FORMER = {name: name for name in LayerState.__slots__} | {"is_left": "plugin_is_gone"}


def split_former(attributes: Mapping[str, Any]) -> tuple[dict[str, Any], LayerState]:
    """Splits a pickled layer into attributes and a state, whose fields were attributes in earlier versions."""
    state = attributes.get("lowbit")
    if state is None:
        state = LayerState(**{FORMER[name]: value for name, value in attributes.items() if name in FORMER})
        attributes = {name: value for name, value in attributes.items() if name not in FORMER}
    return dict(attributes), state
