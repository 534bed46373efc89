"""Random GEMMs of codes, by number, and a checksum of their results for processes with other kernels."""

import hashlib
import random
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from lightning_lowbit import Cast, Scale
from lightning_lowbit.kernels import backend, pack_operand
from lightning_lowbit.kernels.cpu import gemms as cpp
from lightning_lowbit.kernels.gemms import CodeOperand, code_operand, packed_operand, plain_multiply
from lightning_lowbit.kernels.windows import Pixels, Window
from lightning_lowbit.quant import Hadamard
from lightning_lowbit.quant.call import CastCall
from tests.quant.tensors import NVFP4
from tests.quant.tensors import NVFP4_TILES as TILES

DRAWN = NVFP4.replace(rounding="stochastic")
EDEN = Cast("e2m1", Scale("e4m3", 16, "stochastic", True, top=255.99, factor=0.93 * 17 / 16, correction=128))
MXFP4, INT4, INT2 = Cast("e2m1", Scale("e8m0", 32)), Cast("int4", Scale("fp32", 128)), Cast("int2", Scale("bf16", 32))
INT8 = Cast("int8", Scale("fp32", "row"))
TERNARY = Cast("ternary", Scale("fp32", "tensor", statistic="absmean"))
# Left and right.
CASTS = {
    "nvfp4": (NVFP4, NVFP4),
    "stochastic": (DRAWN, DRAWN),
    "tiles": (NVFP4, TILES),
    "tiles twice": (TILES, TILES),
    "levels of rows": (NVFP4.replace(scale={"two_level": "row"}),) * 2,
    "one level": (NVFP4.replace(scale={"two_level": False}), NVFP4),
    "four over six": (NVFP4.replace(scale={"four_over_six": "mse"}),) * 2,
    "mxfp4": (MXFP4, MXFP4.replace(rounding="stochastic")),
    "ms-eden": (EDEN, EDEN),
    "e1m2": (Cast("e1m2", Scale("e4m3", 16)),) * 2,
    "int4": (INT4, INT4),
    "int2": (INT2, INT2),
    "scales of all digits": (Cast("int4", Scale("fp32", 16)),) * 2,
    "int3, drawn": (Cast("int3", Scale("fp16", 48), "stochastic"), Cast("int3", Scale("fp16", (16, 48)))),
    "int8 by ternary": (INT8, TERNARY),
    "blocks of two sizes": (NVFP4, Cast("int4", Scale("fp32", 32))),
    "blocks on the left": (MXFP4, TERNARY),
    "blocks on the right": (INT8, NVFP4),
}
SHAPES = [(1, 1, 16), (4, 8, 64), (17, 33, 100), (64, 48, 256), (5, 3, 1), (130, 70, 129), (1, 200, 31), (3, 16, 300)]
LONG = (6, 20, 4200)  # of several slices
OF_PIXELS = ("nvfp4", "tiles", "mxfp4", "int4", "blocks of two sizes", "blocks on the left")
LAYOUTS = {
    "rows": Tensor.contiguous,
    "columns": lambda x: x.t().contiguous().t(),
    "strided": lambda x: x.repeat(2, 2)[: 2 * len(x) : 2, : 2 * x.shape[1] : 2],
    "offset": lambda x: torch.cat([x[:1], x])[1:],
}
VALUES = {
    "normal": lambda x: x,
    "sizes": lambda x: x * torch.exp(4 * torch.randn_like(x)),
    "huge": lambda x: x * 2.0**40,
    "tiny": lambda x: x * 2.0**-60,
    "zeros": lambda x: x * (torch.rand_like(x) > 0.5) * (torch.rand(len(x), 1) > 0.3),
    "largest": lambda x: x[:, :1].sign().expand_as(x),  # elements, and one sign in each row
}


@dataclass
class Product:
    """A GEMM of codes: the arguments of ``multiply``, and what they were made of."""

    name: str
    left: CodeOperand
    right: CodeOperand
    bias: Tensor | None
    dtype: torch.dtype
    through: torch.dtype | None = None

    def __str__(self):
        sides = [f"{tuple(x.x.shape)} {x.x.dtype} along {x.call.dim}" for x in (self.left, self.right)]
        ends = f", ends {self.left.ends}" if self.left.ends else ""
        return f"{self.name}: {' by '.join(sides)}{ends}, bias {self.bias is not None}, to {self.dtype}"

    def by_cpp(self):
        result = cpp.multiply(self.left.x, self.left, self.right, self.bias, self.dtype, self.through)
        assert result is not None, f"{self} is not covered"
        return result

    def by_plain_code(self):
        with backend("eager"):
            return plain_multiply(self.left.x, self.left, self.right, self.bias, self.dtype, self.through)


def product(name, shape, seed=0, values="normal"):
    """A GEMM of two casts with everything else at random, by its seed."""
    torch.manual_seed(seed)
    choose = random.Random(seed).choice
    (rows, columns, inner), narrow = shape, choose([torch.float32, torch.bfloat16])
    rotation, is_packed = None, choose([None, None, 0, 1])
    rotates = not any(cast.scale.two_level == "row" or cast.scale.statistic == "absmean" for cast in CASTS[name])
    if rotates and choose([True, False, False]):
        rotation = Hadamard(choose([16, 32]), "keyed").diagonal(torch.tensor(seed), torch.device("cpu"))
    operands = []
    for side, (cast, size) in enumerate(zip(CASTS[name], (rows, columns), strict=True)):
        dim, key = choose([0, 1]), torch.tensor(random.Random(seed + side).getrandbits(62))
        x = VALUES[values](torch.randn(size, inner)).to(narrow)
        x = LAYOUTS[choose([*LAYOUTS])](x if dim == 1 else x.t())
        operand = code_operand(x, CastCall(cast, dim, key, rotation=rotation))
        if is_packed == side and operand.shape[1] % 8 == 0:
            packed = pack_operand(x, cast, dim, key, rotation=rotation)
            operand = packed_operand(packed, cast, dim, operand.shape)
        operands.append(operand)
    bias = choose([None, torch.randn(columns), torch.randn(columns).bfloat16()])
    dtype = choose([torch.float32, torch.bfloat16])
    return Product(name, *operands, bias, dtype, choose([None, torch.bfloat16]))


def of_patches(seed):
    """A GEMM of patches of images that finds their pixels itself, all at random, by its seed."""
    torch.manual_seed(seed)
    choose = random.Random(seed).choice
    left, right = CASTS[name := choose(OF_PIXELS)]
    space = range(choose([1, 2, 3]))
    window = Window(
        *(tuple(choose(numbers) for _ in space) for numbers in ([1, 2, 3], [1, 2, 3], [1, 2], [0, 2], [-1, 0, 1]))
    )
    edges = zip(window.spans, window.before, window.after, strict=True)
    sizes = [span - min(0, before + after) + choose(range(6)) for span, before, after in edges]
    images, channels = choose([1, 2, 3]), choose([128, 256])
    pixels = Pixels(window, torch.Size([images, channels, *sizes]))
    x = torch.randn(pixels.matrix_shape).to(choose([torch.float32, torch.bfloat16]))
    a = code_operand(x, CastCall(left, 1, None, x.abs().amax().float() if left.scale.needs_amax else None), pixels)
    b = code_operand(torch.randn(choose([1, 16, 40]), a.inner), CastCall(right, 1, torch.tensor(seed)))
    return Product(name, a, b, choose([None, torch.randn(b.rows)]), choose([torch.float32, torch.bfloat16]))


def products(count, first=0):
    """GEMMs by number: all casts in turn, with shapes and values at random."""
    for seed in range(first, first + count):
        choose = random.Random(seed).choice
        yield product([*CASTS][seed % len(CASTS)], choose(SHAPES), seed, choose([*VALUES]))


def checksum(count):
    """Of the results of so many GEMMs with 1 to 3 threads; NaNs are all alike."""
    digest = hashlib.sha256()
    for number, one in enumerate(chain(products(count), map(of_patches, range(count // 4)))):
        torch.set_num_threads(1 + number % 3)
        result = one.by_cpp().float()
        digest.update(result.where(result == result, torch.tensor(torch.nan)).numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    print(cpp.instructions(), checksum(400), sep="\n")
