"""A ``scaled_mm`` for CPUs: it asks for all that the real one asks for, and computes exactly, in float64.

What it asks for is in torch 2.13's ``ScaledBlas.cpp`` and its meta function, which checks the call, too. It reads codes
and scales by the formulas of the formats, with none of the package's code.
"""

import torch
import torch.nn.functional as F
from torch.nn.functional import ScalingType as Scaling
from torch.nn.functional import SwizzleType as Swizzle
from torch.utils._python_dispatch import _disable_current_modes

from lightning_lowbit.nn.native.table import BLOCK_SCALED

OF_GPUS = BLOCK_SCALED - {"cpu"}
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
BLOCKS = {Scaling.BlockWise1x16: 16, Scaling.BlockWise1x32: 32}
_REAL = F.scaled_mm

# Tests of FP8 GEMMs with scales of rows that a CPU computes are skipped with this reason.
NO_ROWS = "torch 2.11 has no FP8 GEMM of rows on CPUs" if torch.__version__ < "2.13" else None


def unpacked(codes):
    """float64 elements ``[rows, k]`` of ``float4_e2m1fn_x2`` ``[rows, k / 2]``."""
    data = codes.contiguous().view(torch.uint8).long()
    return E2M1.double()[torch.stack([data & 15, data >> 4], -1)].flatten(1)


def unswizzled(scales, rows, columns):
    """float64 ``[rows, columns]`` of the flat layout, element by element by its formula."""
    across = -(-columns // 4)
    r, c = torch.arange(rows)[:, None], torch.arange(columns)[None]
    place = (r // 128 * across + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
    return scales.flatten()[place].double()


class StandIn:
    """Called like ``torch.nn.functional.scaled_mm``; ``calls`` are the recipes and the dtypes of results so far."""

    def __init__(self):
        self.calls = []

    def __call__(
        self,
        a,
        b,
        scales_a,
        recipes_a,
        scales_b,
        recipes_b,
        swizzles_a=None,
        swizzles_b=None,
        bias=None,
        output_dtype=torch.bfloat16,
        use_fast_accum=False,
    ):
        amd = torch.version.hip is not None
        # Torch says of its check for AMD that it is probably wrong. For MXFP4 it counts blocks of bytes, not elements.
        if not amd and (a.dtype != torch.float4_e2m1fn_x2 or recipes_a != [Scaling.BlockWise1x32]):
            self._meta(a, b, scales_a, recipes_a, scales_b, recipes_b, swizzles_a, swizzles_b, output_dtype)
        scales_a, recipes_a, scales_b, recipes_b, swizzles_a, swizzles_b = (
            list(x) if isinstance(x, list) else [x]
            for x in (scales_a, recipes_a, scales_b, recipes_b, swizzles_a, swizzles_b)
        )
        assert a.dtype == b.dtype, "the recipes are of equal elements"
        assert a.is_contiguous() and b.t().is_contiguous(), "not TN"
        assert bias is None and not use_fast_accum
        packed = 2 if a.dtype == torch.float4_e2m1fn_x2 else 1
        (rows, inner), columns = a.shape, b.shape[1]
        assert min(rows, inner, columns) > 0
        inner *= packed
        assert inner * 8 // packed % 128 == 0, "rows of memory are no multiple of 16 bytes"
        assert columns % 16 == 0
        if amd:
            assert rows % 32 == columns % 32 == inner % 128 == 0
            assert output_dtype != torch.float32
            assert recipes_a == [Scaling.BlockWise1x32]
        if packed == 2 and recipes_a == [Scaling.BlockWise1x32]:
            assert output_dtype == torch.bfloat16, "MXFP4 gives bfloat16 alone"
        self.calls.append((tuple(recipes_a + recipes_b), output_dtype))

        alpha = torch.ones((), dtype=torch.float64)
        if recipes_a[0] in BLOCKS:
            assert recipes_a == recipes_b
            block = BLOCKS[recipes_a[0]]
            wanted = torch.float8_e4m3fn if block == 16 else torch.float8_e8m0fnu
            if block == 16:
                assert packed == 2
                assert recipes_a == [Scaling.BlockWise1x16, Scaling.TensorWise]
                for scales in (scales_a, scales_b):
                    assert len(scales) == 2 and scales[1].dtype == torch.float32 and scales[1].numel() == 1
                    alpha = alpha * scales[1].double()
            else:
                assert a.dtype in (torch.float8_e4m3fn, torch.float4_e2m1fn_x2)
            first = Swizzle.NO_SWIZZLE if amd else Swizzle.SWIZZLE_32_4_4
            for swizzles in (swizzles_a, swizzles_b):
                assert swizzles == [first, *[Swizzle.NO_SWIZZLE] * (len(recipes_a) - 1)]
            both = []
            for scales, size in ((scales_a[0], rows), (scales_b[0], columns)):
                assert scales.dtype == wanted and scales.is_contiguous()
                if amd:
                    assert scales.numel() == size * inner // 32
                    both.append(scales.double().view(size, inner // 32))
                else:
                    assert scales.numel() == -(-size // 128) * 128 * (-(-inner // block // 4) * 4)
                    both.append(unswizzled(scales, size, -(-inner // block)))
            spread = [scales.repeat_interleave(block, 1) for scales in both]
        else:
            assert a.dtype == torch.float8_e4m3fn, "DeepSeek's recipe is of E4M3"
            assert (recipes_a, recipes_b) in (
                ([Scaling.BlockWise1x128], [Scaling.BlockWise1x128]),
                ([Scaling.BlockWise1x128], [Scaling.BlockWise128x128]),
            )
            assert inner % 128 == 0
            spread = [_of_rows(scales_a[0], rows, inner)]
            if recipes_b == [Scaling.BlockWise1x128]:
                spread.append(_of_rows(scales_b[0], columns, inner))
            else:
                blocks = -(-inner // 128)
                assert columns % 128 == 0 and scales_b[0].dtype == torch.float32
                assert scales_b[0].shape == (-(-blocks // 4) * 4, columns // 128)
                assert scales_b[0].stride(0) == 1 and scales_b[0].stride(1) in (1, len(scales_b[0]))
                of_tiles = scales_b[0][:blocks].double().t()
                spread.append(of_tiles.repeat_interleave(128, 0).repeat_interleave(128, 1))
        elements = [unpacked(x) if packed == 2 else x.double() for x in (a, b.t())]
        left, right = (x * s for x, s in zip(elements, spread, strict=True))
        return (left @ right.t() * alpha).to(output_dtype)

    @staticmethod
    def _meta(*arguments):
        """The call on the meta device, where torch checks sizes, dtypes, strides and swizzles."""

        def there(x):
            if isinstance(x, list):
                return [there(y) for y in x]
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") if torch.is_tensor(x) else x

        *given, output_dtype = (there(x) for x in arguments)
        with _disable_current_modes():  # this is no GEMM of the model
            out = _REAL(*given, output_dtype=output_dtype)
        assert out.shape == (arguments[0].shape[0], arguments[1].shape[1]) and out.dtype == output_dtype


def _of_rows(scales, rows, inner):
    assert scales.dtype == torch.float32
    assert scales.shape == (rows, inner // 128)
    assert scales.stride(0) == 1 and scales.stride(1) in (1, rows), "outer dimension first"
    return scales.double().repeat_interleave(128, 1)
