"""Finds channels of a SwiGLU that make outliers, or soon will.

With h = (w1ᵀx) Swish(w2ᵀx) a channel of a SwiGLU, w1 a row of its up projection and w2 one of its gate projection:

    cosine        |w1ᵀw2| / (‖w1‖ ‖w2‖)            1 where both branches see one projection of x, and h its square
    gate norm     ‖w2‖                             grows before the cosine does
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_lowbit.metrics.casts import ratio
from lightning_lowbit.quant import amax_along

_ROWS = 1024  # rows that are float32 at one time: at 4096 columns 16 MiB, and enough to fill a GPU


@dataclass(frozen=True, eq=False)
class SwiGLUAlignment:
    """The closeness of each channel of a SwiGLU to squaring one projection of its input; see :func:`swiglu_alignment`.

    Attributes:
        cosine: ``|cos(w1, w2)|``, float32 ``[hidden]``, from 0 to 1; NaN where a row holds a NaN or an infinity, else 0
            where one is all zeros. Rows of independent normal numbers have about ``0.8 / sqrt(in)``.
        gate_norm: ``‖w2‖``, float32 ``[hidden]``, in units of the weight; NaN where the row holds a NaN or an infinity.
    """

    cosine: Tensor
    gate_norm: Tensor


@torch.no_grad()
def swiglu_alignment(gate_weight: Tensor, up_weight: Tensor) -> SwiGLUAlignment:
    """Measures how close each channel of a SwiGLU is to making outliers.

    In a channel ``(w1ᵀx) Swish(w2ᵀx)``, w1 is a row of the up projection and w2 one of the gate projection. Where w1 =
    ±w2 both factors are large for the same tokens, and the channel gives about ``±(w2ᵀx)²`` where its gate is open.
    Weight decay leads there once the sigmoid in Swish is flat for all tokens (arXiv 2409.12517, theorem 1). In Llama2
    7B (section 4.3) ``‖w2‖`` of a few channels grew first; then their cosine rose steeply, between 125 and 210 billion
    tokens, and FP8 training diverged. The computation is in float32, on the device of the weights, without biases.

    Args:
        gate_weight, up_weight: of ``gate_proj`` and ``up_proj``, floating point, ``[hidden, in]``, as ``nn.Linear`` has
            them; a ``ValueError`` if they are not matrices of one shape.
    """
    if gate_weight.dim() != 2 or gate_weight.shape != up_weight.shape:
        raise ValueError(
            "The alignment of a SwiGLU needs the weights of its gate and up projection, both [hidden, in]; got "
            f"{tuple(gate_weight.shape)} and {tuple(up_weight.shape)}. Pass those of one MLP: split a fused weight, "
            "and transpose those of Conv1D."
        )
    cosines, norms = list[Tensor](), list[Tensor]()
    for gate, up in zip(torch.split(gate_weight, _ROWS), torch.split(up_weight, _ROWS), strict=True):
        (w2, gate_size), (w1, _) = _direction(gate.float()), _direction(up.float())
        size1, size2 = torch.linalg.vector_norm(w1, dim=1), torch.linalg.vector_norm(w2, dim=1)
        cosines.append(ratio((w1 * w2).sum(1).abs(), size1 * size2).clamp(max=1))
        norms.append(gate_size * size2)
    return SwiGLUAlignment(torch.cat(cosines), torch.cat(norms))


def _direction(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Divides rows by their largest magnitudes: the squares then neither overflow nor all underflow."""
    size = amax_along(rows, 1)
    return rows / torch.where(size == 0, 1.0, size), size.squeeze(1)
