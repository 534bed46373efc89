"""The attribute that conversion adds to a module."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from lightning_lowbit.nn.casts.linear_casts import LinearCasts
from lightning_lowbit.nn.core.calls import Calls
from lightning_lowbit.nn.core.frozen import Frozen
from lightning_lowbit.nn.core.operands import PrequantizedWeight
from lightning_lowbit.nn.core.saving import Readers
from lightning_lowbit.nn.core.watch import LayerAmaxes


@dataclass(slots=True, eq=False, repr=False)
class LayerState:
    """The settings of a converted layer, and the tensors that its passes read and write: its attribute ``lowbit``.

    Tensors belong to other objects, such as :class:`lightning_lowbit.nn.LayerKeys`, and are no buffers of the module.

    Attributes:
        casts: the casts in force.
        full_casts: the casts outside any phase.
        keys: int64 ``[6]``, the keys of stochastic rounding, in the order of ``OPERANDS``; None until set.
        calls: numbers the calls within a micro-batch, which have their own keys; None: all calls have ``keys``.
        plugin_is_gone: nothing renews keys and amaxes anymore, so that training warns or raises.
        amaxes: kept between steps; None until set.
        exact: computes float32 GEMMs over exact operands.
        backend: ``"auto"`` (native GEMMs where device and casts allow), ``"native"`` or ``"emulated"``.
        grouped: ``"auto"``, or ``"native"``: grouped GEMMs for the products of stacks, of experts.
        save: ``"inputs"`` or ``"codes"``: saved for the backward pass, see :mod:`lightning_lowbit.nn.core.saving`.
        readers: knows the layers that read one tensor together; None for ``save="inputs"``.
        keeps_input: with ``save="codes"``, saves the input itself, as too many layers read it to save codes for each.
        blend: float32, 0-d: λ of annealing, see ``set_blend``; None for fully quantized operands.
        operand_sums, gradient_sums: rows of a :class:`~lightning_lowbit.nn.core.watch.Watch`; None if unmeasured.
        token_amax: float32 ``[tokens, 1]``, for smoothing the tokens of the next pass; None until set.
        weight_amax: float32, 0-d, scales the weight (:mod:`lightning_lowbit.nn.conversion.shared_amax`), if not None.
        frozen: describes the bytes of a weight that is not trained (:func:`lightning_lowbit.pack_frozen`); None for a
            matrix.
        prequantized_weight: set while gathering a weight that is quantized (:mod:`lightning_lowbit.nn.sharded.gather`).
        name_in_model: the layer's name in errors: that in the converted model, or its class and shape.
    """

    casts: LinearCasts = LinearCasts()
    full_casts: LinearCasts = LinearCasts()
    keys: Tensor | None = None
    calls: Calls | None = None
    plugin_is_gone: bool = False
    amaxes: LayerAmaxes | None = None
    exact: bool = False
    backend: str = "auto"
    grouped: str = "auto"
    save: str = "inputs"
    readers: Readers | None = None
    keeps_input: bool = False
    blend: Tensor | None = None
    token_amax: Tensor | None = None
    operand_sums: Tensor | None = None
    gradient_sums: Tensor | None = None
    weight_amax: Tensor | None = None
    frozen: Frozen | None = None
    prequantized_weight: PrequantizedWeight | None = None
    name_in_model: str = "(without a name)"

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
