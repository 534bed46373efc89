"""The choice of the GEMMs of a layer that run natively, and the reasons why others are emulated."""

import torch
from torch import nn

from lightning_lowbit.nn.casts.linear_casts import LinearCasts
from lightning_lowbit.nn.layers.state import LayerState
from lightning_lowbit.nn.native.devices import native_obstacle
from lightning_lowbit.nn.native.gemms import results
from lightning_lowbit.nn.native.table import BLOCK_SCALED

# Where GEMMs run: natively where device and casts allow, always natively, never natively.
BACKENDS = ("auto", "native", "emulated")


def has_native_gemms(device: torch.device, kind: str, backend: str = "auto") -> bool:
    """Returns whether a device computes GEMMs of a kind (a key of ``NATIVE``) natively; raises a ``ValueError`` if it
    does not, with ``backend="native"``."""
    obstacle = native_obstacle(device, kind)
    if obstacle is not None and backend == "native":
        raise ValueError(f"backend='native': {obstacle}. Use backend='auto' or 'emulated'.")
    return obstacle is None


class NativeGemms(nn.Module):
    """The part of a converted layer that decides where its GEMMs run."""

    lowbit: LayerState

    def native_gemms(
        self, device: torch.device, casts: LinearCasts | None = None, dtype: torch.dtype | None = None
    ) -> tuple[str, ...]:
        """Returns the GEMMs that a device computes natively, by default for the casts in force (none during annealing),
        to results of a dtype (None for any); raises a ``ValueError`` if one is not, with ``backend="native"``."""
        state = self.lowbit
        if state.backend == "emulated" or state.exact or (casts is None and state.blend is not None):
            return ()
        plan = (casts or state.casts).plan
        native: tuple[str, ...] = ()
        if not plan.native_gemms:
            return ()
        for kind, gemms in plan.gemms_of_kind.items():
            if has_native_gemms(device, kind, state.backend) and (dtype is None or _gives(kind, dtype, state.backend)):
                native += gemms
        if native and casts is None and state.prequantized_weight is not None:
            return _without_codes(native, state)
        return native

    def emulated_because(self, device: torch.device) -> dict[str, str]:
        """Returns why a device emulates GEMMs of two quantized operands, outside any phase: reasons by GEMMs."""
        state, casts = self.lowbit, self.lowbit.full_casts
        emulated: dict[str, list[str]] = {}
        for gemm in casts.quantized_gemms:
            kind = casts.native_gemms.get(gemm)
            if state.exact or state.backend == "emulated":
                reason: str | None = "exact=True" if state.exact else "backend='emulated'"
            else:
                reason = "no native GEMM takes these casts" if kind is None else native_obstacle(device, kind)
            if reason is not None:
                emulated.setdefault(reason, []).append(gemm)
        return {", ".join(gemms): reason for reason, gemms in emulated.items()}


def _gives(kind: str, dtype: torch.dtype, backend: str) -> bool:
    """Returns whether native GEMMs of a kind have results of a dtype; raises otherwise for ``backend="native"``."""
    if kind not in BLOCK_SCALED or dtype in results(kind):
        return True
    if backend == "native":
        names = " or ".join(str(result).removeprefix("torch.") for result in results(kind))
        raise ValueError(
            f"backend='native': {kind} GEMMs give {names} here, and this pass computes in {dtype}. Train in bf16, "
            "or use backend='auto'."
        )
    return False


def _without_codes(gemms: tuple[str, ...], state: LayerState) -> tuple[str, ...]:
    """Leaves out native GEMMs that take codes of the weight, which FSDP2 gathered as decoded values."""
    need_codes = tuple(gemm for gemm in gemms if gemm != "wgrad" and gemm in state.casts.plan.block_scaled)
    if need_codes and state.backend == "native":
        raise ValueError(
            f"backend='native': the weight was quantized and decoded before {' and '.join(need_codes)}, which take "
            "codes. Leave out quantize_before_gather, or use backend='auto'."
        )
    return tuple(gemm for gemm in gemms if gemm not in need_codes)
