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


def has_native_gemms(device: torch.device, kind: str, backend: str = "auto") -> bool:
    """Returns whether GEMMs of a kind (a key of ``NATIVE``) run natively on a device; raises a ``ValueError`` if they
    cannot, with ``backend="native"``."""
    obstacle = obstacle_of(device, kind, backend)
    if obstacle is not None and backend == "native":
        raise ValueError(f"backend='native': {obstacle}. Use backend='auto' or 'emulated'.")
    return obstacle is None


def nearest(device: torch.device, kinds: Sequence[str]) -> str:
    """Returns the kind of native GEMM that a device comes closest to, for reasons why it has none of them."""
    return kinds[-1 if device.type == "cpu" else 0]


def _first(device: torch.device, kinds: Sequence[str], backend: str) -> str | None:
    for kind in kinds:  # a loop: graphs that are compiled take no closures here
        if obstacle_of(device, kind, backend) is None:
            return kind
    return None


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
        for gemm, kinds in casts_in_force.traits.native_kinds.items():
            kind = _first(device, kinds, state.backend)
            if kind is None:
                has_native_gemms(device, nearest(device, kinds), state.backend)  # raises, if it must
            elif dtype is None or _gives(kind, dtype, state.backend, casts_in_force, gemm):
                native[gemm] = kind
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
        kinds = casts.traits.native_kinds.get(gemm, ())
        if not kinds:
            return "no native GEMM takes these casts"
        kind = _first(device, kinds, state.backend)
        if kind is None:
            return obstacle_of(device, nearest(device, kinds), state.backend)
        obstacle = None if dtype is None else _dtype_obstacle(kind, dtype, casts, gemm)
        return None if obstacle is None else obstacle[0]


def _gives(kind: str, dtype: torch.dtype, backend: str, casts: LinearCasts, gemm: str) -> bool:
    """Returns whether native GEMMs of a kind have results of a dtype; raises otherwise for ``backend="native"``."""
    if (obstacle := _dtype_obstacle(kind, dtype, casts, gemm)) is None:
        return True
    if backend == "native":
        raise ValueError("backend='native': {}. {}, or use backend='auto'.".format(*obstacle))
    return False


def _dtype_obstacle(kind: str, dtype: torch.dtype, casts: LinearCasts, gemm: str) -> tuple[str, str] | None:
    """Returns why native GEMMs of a kind do not serve a pass in a dtype, and what to do; None if they do."""
    if kind == "cpu" and dtype == torch.bfloat16 and gemm in casts.traits.rounding:
        reason = f"{gemm} rounds operands to bfloat16 (round_to_bfloat16), and GEMMs of codes do not"
        return reason, "Give its casts round_to_bfloat16=False (every: {round_to_bfloat16: false} beside a preset)"
    if kind not in BLOCK_SCALED or dtype in results(kind):
        return None
    names = " or ".join(str(result).removeprefix("torch.") for result in results(kind))
    return f"{kind} GEMMs give {names} here, and this pass computes in {dtype}", "Train in bf16"


def _without_codes(native: dict[str, str], state: LayerState) -> dict[str, str]:
    """Leaves out native GEMMs that take codes of the weight, which FSDP2 gathered as decoded values."""
    need_codes = tuple(gemm for gemm, kind in native.items() if gemm != "wgrad" and kind in BLOCK_SCALED)
    if need_codes and state.backend == "native":
        raise ValueError(
            f"backend='native': the weight was quantized and decoded before {' and '.join(need_codes)}, which take "
            "codes. Leave out quantize_before_gather, or use backend='auto'."
        )
    return {gemm: kind for gemm, kind in native.items() if gemm not in need_codes}
