"""Which channels of a SwiGLU make outliers, or soon will.

With h = (w1ᵀx) Swish(w2ᵀx) a channel of a SwiGLU, w1 a row of its up projection and w2 one of its gate projection:

    cosine        |w1ᵀw2| / (‖w1‖ ‖w2‖)            1 where both branches see one projection of x, and h its square
    gate norm     ‖w2‖                             grows before the cosine does
    active        of the tokens x, the share with |w2ᵀx| > 1
"""

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_lowbit.metrics.casts import ratio
from lightning_lowbit.quant import amax_along

# Rows of weights, and tokens, that are float32 at one time: at 4096 columns 16 MiB each, and enough to fill a GPU.
_ROWS = 1024


@dataclass(frozen=True, eq=False)
class SwiGLUAlignment:
    """How close each channel of a SwiGLU is to squaring one projection of its input; from :func:`swiglu_alignment`.

    Attributes:
        cosine: ``|cos(w1, w2)|``, float32 ``[hidden]``, from 0 to 1; NaN where a row holds a NaN or an infinity, else 0
            where one is all zeros. Rows of independent normal numbers have about ``0.8 / sqrt(in)``.
        gate_norm: ``‖w2‖``, float32 ``[hidden]``, in units of the weight; NaN where the row holds a NaN or an infinity.
        active: share of tokens with ``|w2ᵀx| > 1``, float32 ``[hidden]``; NaN where a product is NaN, or without any
            token. None if ``x`` was not given.
    """

    cosine: Tensor
    gate_norm: Tensor
    active: Tensor | None


@torch.no_grad()
def swiglu_alignment(gate_weight: Tensor, up_weight: Tensor, x: Tensor | None = None) -> SwiGLUAlignment:
    """Measures which channels of a SwiGLU make outliers, or soon will.

    In a channel ``(w1ᵀx) Swish(w2ᵀx)``, w1 is a row of the up projection and w2 one of the gate projection. Where w1 =
    ±w2 both factors are large for the same tokens, and the channel gives about ``±(w2ᵀx)²`` where its gate is open.
    Weight decay leads there once the sigmoid in Swish is flat for all tokens (arXiv 2409.12517, theorem 1). In Llama2
    7B (section 4.3) ``‖w2‖`` of a few channels grew first; then their cosine rose steeply, between 125 and 210 billion
    tokens, and FP8 training diverged. An outlier channel was active for about 99 % of the tokens (section 4.2).

    The computation is in float32, also under autocast, with the matrix products of
    ``torch.set_float32_matmul_precision``, 1024 rows at a time, on the device of the weights. Biases are left out.

    Args:
        gate_weight: of ``gate_proj``, floating point, ``[hidden, in]``, as ``nn.Linear`` has it.
        up_weight: of ``up_proj``, same shape.
        x: input of both projections, floating point, ``[..., in]``; None leaves ``active`` out.

    Raises:
        ValueError: the weights are not matrices of one shape, or ``x`` does not fit them.
    """
    if gate_weight.dim() != 2 or gate_weight.shape != up_weight.shape:
        raise ValueError(
            "The alignment of a SwiGLU needs the weights of its gate and up projection, both [hidden, in]; got "
            f"{tuple(gate_weight.shape)} and {tuple(up_weight.shape)}. Pass those of one MLP: split a fused weight, "
            "and transpose those of Conv1D."
        )
    if x is not None and x.shape[-1:] != gate_weight.shape[1:]:
        raise ValueError(
            f"x needs {gate_weight.shape[1]} columns, [..., in], for weights {tuple(gate_weight.shape)}; got "
            f"{tuple(x.shape)}. Pass what enters the gate projection, and transpose the weights of Conv1D."
        )
    device = gate_weight.device.type
    tokens = None if x is None else x.reshape(x.shape[:-1].numel(), x.shape[-1])
    cosines, norms, shares = list[Tensor](), list[Tensor](), list[Tensor]()
    # The meta device has no autocast, and torch refuses to turn it off there.
    with torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext():
        for gate, up in zip(torch.split(gate_weight, _ROWS), torch.split(up_weight, _ROWS), strict=True):
            gate = gate.float()
            w2, gate_size = _direction(gate)
            w1, _ = _direction(up.float())
            size1, size2 = torch.linalg.vector_norm(w1, dim=1), torch.linalg.vector_norm(w2, dim=1)
            cosines.append(ratio((w1 * w2).sum(1).abs(), size1 * size2).clamp(max=1))
            norms.append(gate_size * size2)
            if tokens is not None:
                shares.append(_active(gate, tokens))
    return SwiGLUAlignment(torch.cat(cosines), torch.cat(norms), None if tokens is None else torch.cat(shares))


def _direction(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows over their largest magnitudes, and these: the squares then neither overflow nor all underflow."""
    size = amax_along(rows, 1)
    return rows / torch.where(size == 0, 1.0, size), size.squeeze(1)


def _active(gate: Tensor, tokens: Tensor) -> Tensor:
    """Share of tokens ``[n, in]`` with ``|w2ᵀx| > 1`` for each row of ``gate``, float32 ``[hidden, in]``."""
    count = gate.new_zeros(len(gate))
    for part in torch.split(tokens, _ROWS):
        z = part.float() @ gate.t()
        count += torch.where(z.isnan(), z, (z.abs() > 1).to(z)).sum(0)
    return count / len(tokens)
