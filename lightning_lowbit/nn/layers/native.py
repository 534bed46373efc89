"""The choice of the GEMMs of a layer that run natively, and the reasons why others are emulated."""

from collections.abc import Sequence

import torch
from torch import nn

from lightning_lowbit.nn.casts.linear_casts import LinearCasts
from lightning_lowbit.nn.layers.state import LayerState
from lightning_lowbit.nn.native.devices import native_obstacle, slower_because
from lightning_lowbit.nn.native.gemms import results
from lightning_lowbit.nn.native.table import BLOCK_SCALED

# Where GEMMs run: natively where device and casts allow, always natively, never natively.
BACKENDS = ("auto", "native", "emulated")


def obstacle_of(device: torch.device, kind: str, backend: str) -> str | None:
    """Returns why GEMMs of a kind do not run natively on a device; None if they do. With ``backend="auto"`` also where
    other GEMMs are faster."""
    obstacle = native_obstacle(device, kind)
    return slower_because(kind) if obstacle is None and backend == "auto" else obstacle


Choice = tuple[str | None, str, str]


def first_kind(device: torch.device, kinds: Sequence[str], backend: str) -> Choice:
    """Returns the first kind (a key of ``NATIVE``) of GEMMs that a device computes natively; else None, why not, of the
    kind that it comes closest to, and what to do."""
    for kind in kinds:  # a loop: graphs that are compiled take no closures here
        if obstacle_of(device, kind, backend) is None:
            return kind, "", ""
    obstacle = obstacle_of(device, kinds[-1 if device.type == "cpu" else 0], backend)
    return None, obstacle or "", "Use backend='auto' or 'emulated'."


class NativeGemms(nn.Module):
    """The part of a converted layer that decides where its GEMMs run."""

    lowbit: LayerState

    def is_grouped(self, device: torch.device, dtype: torch.dtype | None = None) -> bool:
        """Returns whether the products of a stack, in passes in a dtype (None for any), are those of grouped GEMMs."""
        return False

    def native_gemms(
        self, device: torch.device, casts: LinearCasts | None = None, dtype: torch.dtype | None = None
    ) -> tuple[str, ...]:
        """Returns the names of :meth:`native_kinds`."""
        return tuple(self.native_kinds(device, casts, dtype))

    def native_kinds(
        self, device: torch.device, casts: LinearCasts | None = None, dtype: torch.dtype | None = None
    ) -> dict[str, str]:
        """Returns the GEMMs that a device computes natively, with their kinds (keys of ``NATIVE``), by default for the
        casts in force (none during annealing), to results of a dtype (None for any); raises a ``ValueError`` if one is
        not, with ``backend="native"``."""
        state = self.lowbit
        if state.backend == "emulated" or state.exact or (casts is None and state.blend is not None):
            return {}
        casts_in_force = casts or state.casts
        native: dict[str, str] = {}
        for gemm in casts_in_force.traits.native_kinds:
            kind, reason, remedy = _choice(device, dtype, state.backend, casts_in_force, gemm)
            if kind is not None:
                native[gemm] = kind
            elif state.backend == "native":
                raise ValueError(f"backend='native': {reason}. {remedy}")
        if native and casts is None and state.prequantized_weight is not None:
            return _without_codes(native, state)
        return native

    def emulated_because(self, device: torch.device, dtype: torch.dtype | None = None) -> dict[str, str]:
        """Returns why a device emulates GEMMs of two quantized operands, outside any phase: reasons by GEMMs, for
        passes in a dtype (None for any)."""
        emulated: dict[str, list[str]] = {}
        for gemm in self.lowbit.full_casts.quantized_gemms:
            if (reason := self._emulated_because(gemm, device, dtype)) is not None:
                emulated.setdefault(reason, []).append(gemm)
        return {", ".join(gemms): reason for reason, gemms in emulated.items()}

    def _emulated_because(self, gemm: str, device: torch.device, dtype: torch.dtype | None) -> str | None:
        state, casts = self.lowbit, self.lowbit.full_casts
        if state.exact or state.backend == "emulated":
            return "exact=True" if state.exact else "backend='emulated'"
        if gemm not in casts.traits.native_kinds:
            return "no native GEMM takes these casts"
        return _choice(device, dtype, state.backend, casts, gemm)[1] or None


def _choice(device: torch.device, dtype: torch.dtype | None, backend: str, casts: LinearCasts, gemm: str) -> Choice:
    """Does :func:`first_kind` for a GEMM of passes in a dtype (None for any)."""
    kind, reason, remedy = first_kind(device, casts.traits.native_kinds[gemm], backend)
    if kind == "cpu" and dtype == torch.bfloat16 and gemm in casts.traits.rounding:
        reason = f"{gemm} rounds operands to bfloat16 (round_to_bfloat16), and GEMMs of codes do not"
        remedy = "Give its casts round_to_bfloat16=False (every: {round_to_bfloat16: false} beside a preset)"
    elif kind in BLOCK_SCALED and dtype is not None and dtype not in results(kind):
        names = " or ".join(str(result).removeprefix("torch.") for result in results(kind))
        reason, remedy = f"{kind} GEMMs give {names} here, and this pass computes in {dtype}", "Train in bf16"
    else:
        return kind, reason, remedy
    return None, reason, f"{remedy}, or use backend='auto'."


def _without_codes(native: dict[str, str], state: LayerState) -> dict[str, str]:
    """Leaves out native GEMMs that take codes of the weight, which FSDP2 gathered as decoded values."""
    need_codes = tuple(gemm for gemm, kind in native.items() if gemm != "wgrad" and kind in BLOCK_SCALED)
    if need_codes and state.backend == "native":
        raise ValueError(
            f"backend='native': the weight was quantized and decoded before {' and '.join(need_codes)}, which take "
            "codes. Leave out quantize_before_gather, or use backend='auto'."
        )
    return {gemm: kind for gemm, kind in native.items() if gemm not in need_codes}
