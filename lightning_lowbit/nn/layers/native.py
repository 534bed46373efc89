"""Which GEMMs of a layer run natively, and why the others are emulated."""

import torch
from torch import Tensor, nn

from lightning_lowbit.nn.casts.linear_casts import LinearCasts
from lightning_lowbit.nn.native.devices import native_obstacle
from lightning_lowbit.nn.native.gemms import results
from lightning_lowbit.nn.native.table import BLOCK_SCALED

# Where GEMMs run: natively where device and casts allow, always natively, never natively.
BACKENDS = ("auto", "native", "emulated")


def has_native_gemms(device: torch.device, kind: str, backend: str = "auto") -> bool:
    """Whether a device computes GEMMs of a kind (a key of ``NATIVE``) natively; with ``backend="native"`` it must."""
    obstacle = native_obstacle(device, kind)
    if obstacle is not None and backend == "native":
        raise ValueError(f"backend='native': {obstacle}. Use backend='auto' or 'emulated'.")
    return obstacle is None


class NativeGemms(nn.Module):
    """The part of a converted layer that decides where its GEMMs run."""

    # Of the layer.
    casts: LinearCasts
    full_casts: LinearCasts
    backend: str
    exact: bool
    blend: Tensor | None
    prequantized_weight: object

    def native_gemms(
        self, device: torch.device, casts: LinearCasts | None = None, dtype: torch.dtype | None = None
    ) -> tuple[str, ...]:
        """The GEMMs that a device computes natively, by default for the casts in force (none during annealing), to
        results of a dtype (None for any). A ValueError for ``backend="native"`` where one of them is not."""
        if self.backend == "emulated" or self.exact or (casts is None and self.blend is not None):
            return ()
        plan = (casts or self.casts).plan
        found: tuple[str, ...] = ()
        if not plan.native_gemms:
            return ()
        for kind, gemms in plan.gemms_of_kind.items():
            if native_obstacle(device, kind) is None:
                found += gemms if dtype is None or self._gives(kind, dtype) else ()
            elif self.backend == "native":
                has_native_gemms(device, kind, self.backend)  # raises
        if found and casts is None and self.prequantized_weight is not None:
            return self._native_of_gathered(found)
        return found

    def _gives(self, kind: str, dtype: torch.dtype) -> bool:
        if kind not in BLOCK_SCALED or dtype in results(kind):
            return True
        if self.backend == "native":
            names = " or ".join(str(one).removeprefix("torch.") for one in results(kind))
            raise ValueError(
                f"backend='native': {kind} GEMMs give {names} here, and this pass computes in {dtype}. Train in bf16, "
                "or use backend='auto'."
            )
        return False

    def _native_of_gathered(self, gemms: tuple[str, ...]) -> tuple[str, ...]:
        """Those of native GEMMs that take a weight which was quantized before it was gathered, and decoded."""
        left_out = tuple(gemm for gemm in gemms if gemm != "wgrad" and gemm in self.casts.plan.block_scaled)
        if left_out and self.backend == "native":
            raise ValueError(
                f"backend='native': the weight was quantized and decoded before {' and '.join(left_out)}, which take "
                "codes. Leave out quantize_before_gather, or use backend='auto'."
            )
        return tuple(gemm for gemm in gemms if gemm not in left_out)

    def emulated_because(self, device: torch.device) -> dict[str, str]:
        """Why a device emulates GEMMs of two quantized operands, outside any phase: reasons by GEMMs."""
        gemms_of: dict[str, list[str]] = {}
        for gemm in self.full_casts.quantized_gemms:
            kind = self.full_casts.native_gemms.get(gemm)
            if self.exact or self.backend == "emulated":
                reason: str | None = "exact=True" if self.exact else "backend='emulated'"
            else:
                reason = "no native GEMM takes these casts" if kind is None else native_obstacle(device, kind)
            if reason is not None:
                gemms_of.setdefault(reason, []).append(gemm)
        return {", ".join(gemms): reason for reason, gemms in gemms_of.items()}
