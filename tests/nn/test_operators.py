"""Inside a compiled graph our functions are custom operators: what the compiler is told of their results is true."""

from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import lightning_lowbit.metrics.outliers
import lightning_lowbit.nn  # registers them
import lightning_lowbit.optim.moments  # noqa: F401
from lightning_lowbit import Cast, Scale
from lightning_lowbit.kernels import pack_operand
from lightning_lowbit.kernels.windows import Pixels, Window
from lightning_lowbit.quant.shard import Shard
from lightning_lowbit.quant.transforms import rotated_shape
from tests.nn.native.stand_in import NO_ROWS, StandIn

pytestmark = pytest.mark.usefixtures("alone")
KEY, SIGNS = torch.tensor(12345), torch.ones(16)
BLOCKS = Cast("e2m1", Scale("e4m3", 16, two_level=True), "stochastic").spec
ROWS = Cast("int8", Scale("fp32", "row")).spec
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
E4M3_ROWS = Cast("e4m3", Scale("fp32", "row")).spec
E5M2_TENSOR = Cast("e5m2", Scale("fp32", "tensor", source="delayed"), "stochastic").spec
GROUPS = Cast("int4", Scale("fp32", 16, statistic="minmax"), round_to_bfloat16=True).spec
TERNARY = Cast("ternary", Scale("fp32", "tensor", statistic="absmean", epsilon=1e-5)).spec
SCALES = torch.ones(128 * 4, dtype=torch.float8_e4m3fn)
TWO, HALF, BIAS = torch.tensor(2.0), torch.tensor(0.5), torch.ones(24)
MXFP8 = Cast("e4m3", Scale("e8m0", (32, 32)), "stochastic").spec
INT4 = Cast("int4", Scale("fp32", 32)).spec
FP8_TILES = Cast("e4m3", Scale("fp32", (128, 128))).spec
# Factors of the rows of a result and of its columns.
FACTORS = [(TWO, None), (torch.ones(40, 1), torch.ones(1, 40)), (None, None)]


def in_dtype(x, dtype):
    """A matrix in another dtype, which lies in memory as it does."""
    everything = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,))
    return everything.to(dtype).as_strided(x.shape, x.stride(), x.storage_offset())


def shard():
    """All of 24 columns, on the one process that there is."""
    return Shard(dist.group.WORLD.group_name, dim=1, start=0, step=24, size=24).spec


@pytest.fixture(autouse=True)
def block_scaled_units(monkeypatch):
    monkeypatch.setattr(F, "scaled_mm", StandIn())


def operands(x):
    return [
        *((x, cast, 0, KEY, None, torch.float32, None) for cast in (BLOCKS, ROWS)),
        *((x, cast, 1, KEY, None, x.dtype, shard()) for cast in (BLOCKS, ROWS)),
        (x, BLOCKS, 0, KEY, None, x.dtype, shard()),
        (x, ROWS, 1, KEY, None, torch.float32, None),
        *product((x,), (E4M3_ROWS,), (0, 1), (None,), (None,), (E4M3,), (None,)),
        *product((x,), (E5M2_TENSOR,), (0,), (KEY,), (None, TWO), (E5M2,), (None,)),
        (x, GROUPS, 0, None, None, x.dtype, None),
        (x, TERNARY, 1, None, None, torch.int8, shard()),
    ]


def codes(x, cast, dim, amax=None, shard=None, rotation=None):
    """An operand as the operator takes it."""
    shape = x.shape if rotation is None else rotated_shape(x.shape, rotation, dim)
    return x, cast, dim, KEY, amax, shard, rotation, None, [*shape]


def grouped(x, dim):
    """The operand of the rows of a stack of three products, as the operator takes it."""
    return x, BLOCKS, dim, torch.arange(3), None, None, None, None, [*x.shape]


def stacked(x, dim):
    """The operand of a stack of three matrices of 8 rows, as the operator takes it."""
    matrices = torch.stack([x[:8], x[8:16], x[16:24]])
    matrices = matrices if dim == 1 else matrices.mT
    return matrices, BLOCKS, dim, torch.arange(3), None, None, None, None, [*matrices.shape]


def packed_codes(x, spec, dim):
    data, factor = pack_operand(x, Cast.from_spec(spec), dim, KEY)
    shape = [*x.shape]
    if spec == BLOCKS:  # in groups of 16, as of a rotated matrix
        data, factor = pack_operand(F.pad(x, (0, 8)), Cast.from_spec(spec), dim, KEY)
        shape[1] += 8
    return data, spec, dim, None, None, None, None, factor, shape


PIXELS = Pixels(Window((3,), (1,), (1,), (0,), (0,)), torch.Size([1, 16, 40]))


def patches(x):
    """The operand of patches of one image, whose pixels are the rows, as the operator takes it."""
    return x[:, :16], BLOCKS, 1, KEY, None, None, None, None, [*PIXELS.patches_shape]


def layouts(x, casts, keys, amaxes, shards, block):
    names = ("operands of native GEMMs",)
    return product((x,), names, casts, (0, 1), keys, amaxes, (None,), shards, (None,), (block,))


# By operator, the arguments to try for a matrix [40, 24], which may lie in memory in any way.
ARGUMENTS = {
    "_signs": lambda x: product((None, KEY), (16, 64), (x.device,)),
    "rotate": lambda x: [*product((x,), (SIGNS,), (0, 1), (False, True)), (x[:32], SIGNS, 0)],
    "split_mean": lambda x: [(x,)],
    "_cast": lambda x: [
        *((x, "operands", *arguments, None, 0) for _, *arguments in operands(x)),
        (x, "operands", BLOCKS, 1, KEY, None, None, None, SIGNS, 0),
        *product(
            (x,), ("packed operands",), (BLOCKS, ROWS), (0, 1), (KEY,), (None,), (None,), (None, shard()), (None,), (0,)
        ),
        (x, "packed operands", TERNARY, 1, *(None,) * 5, 0),
        (x, "packed operands", BLOCKS, 1, KEY, None, None, None, SIGNS, 0),
        *layouts(x, (BLOCKS,), (KEY,), (None, TWO), (None, shard()), 16),
        *layouts(x, (MXFP8,), (KEY,), (None,), (None,), 32),
        *layouts(x, (FP8_TILES,), (None,), (None,), (None,), 128),
    ],
    "plain_operand": operands,
    "_unpack_operand": lambda x: [
        (*pack_operand(x, Cast.from_spec(spec), dim, KEY), spec, dim, list(x.shape), x.dtype, torch.float32)
        for spec, dim in product((BLOCKS, ROWS, TERNARY), (0, 1))
    ],
    "_scatter": lambda x: [
        (x, [2, 12, 21], [2, 1, 1, 0, 0]),
        (x, [2, 12, 4, 5], [2, 1, 1, 1, 1, 1, 1, 0, 0, 0]),
        (x.double(), [1, 6, 5, 21], [2, 2, 1, 2, 1, 1, 0, 0, 0, 0]),  # pixels that no patch holds
    ],
    "amax_of": lambda x: [(x,), (x.new_empty(0, 24),), (x, shard())],
    "_operand_statistics": lambda x: [
        *product((x,), (x.contiguous(),), (None, TWO), (BLOCKS,), (0,), (None,), (x.numel(), 400), (None,), (False,)),
        *product((x,), (x.contiguous(),), (None, TWO), (ROWS,), (1,), (None,), (400,), (None,), (False, True)),
        (x, x.contiguous(), torch.ones(40, 1), ROWS, 1, None, 400, None, False),
        (x, x.contiguous(), None, GROUPS, 0, None, 400, shard(), True),
    ],
    "activation_sums": lambda x: [(x, 3.0), (x[None], 6.0), (x.new_empty(0, 24), 6.0)],
    "_blend": lambda x: [
        (x, x.contiguous(), None, HALF, x.dtype),
        (x, x.contiguous(), torch.ones(40, 1), HALF, torch.float32),
        (x, x.contiguous().float(), TWO, HALF, x.dtype),
    ],
    "amax_along": lambda x: [*product((x, x[None]), (0, 1, -1)), (x[0], 0), (x.new_empty(0, 24), 0)],
    "_factor": lambda x: product(("trust", "dge"), (x,), (BLOCKS, ROWS), (1,), (None,), (None, shard())),
    "_through_rounding": lambda x: product(
        (x, x.contiguous()), ("trust",), (x, x.contiguous()), (ROWS,), (1,), (None,), (None,)
    ),
    "_global_amax": lambda x: [(x, shard())],
    "_max_over_shards": lambda x: [(x.float(), shard())],
    "mean_times": lambda x: product((torch.ones(1, 40),), (x,), (None, TWO), (None, BIAS.to(x.dtype))),
    "_emulated_matmul": lambda x: [
        (x, left, x.t(), right, bias, x.dtype)
        for left, right in FACTORS
        for bias in (None, torch.ones(40, dtype=x.dtype))
    ],
    "_fp8_matmul": lambda x: [
        *(
            (in_dtype(x, E4M3), left, in_dtype(x, E4M3).t(), right, bias, x.dtype, True)
            for left, right in (*FACTORS, (TWO, torch.ones(1, 40)))
            for bias in (None, torch.ones(40, dtype=x.dtype), torch.ones(1, 40))
        ),
        (in_dtype(x, E5M2), TWO, in_dtype(x, E4M3).t(), None, None, x.dtype, False),
    ],
    "_int8_matmul": lambda x: [
        (in_dtype(x, INT8), torch.ones(40, 1), in_dtype(x, INT8).t(), TWO, torch.ones(40), x.dtype),
        (in_dtype(x, INT8), None, in_dtype(x, INT8).t(), None, None, x.dtype),
    ],
    "_lay_out_packed": lambda x: [
        (pack_operand(x, Cast.from_spec(spec), dim, KEY).data, spec, block, dim, *x.shape)
        for spec, block in ((BLOCKS, 16), (MXFP8, 32), (FP8_TILES, 128))
        for dim in (0, 1)
    ],
    "_block_matmul": lambda x: [
        (codes, SCALES, factor, codes, SCALES, factor, bias, x.dtype, "nvfp4", 40, 40, 24)
        for codes in (torch.ones(48, 16, dtype=torch.uint8),)
        for factor in (None, TWO)
        for bias in (None, torch.ones(40, dtype=x.dtype))
    ],
    "multiply_codes": lambda x: (
        [
            (*left, *right, bias, torch.float32, None, None, None)
            for left, right, bias in (
                (codes(x, BLOCKS, 1), codes(x, BLOCKS, 1), None),
                (codes(x, BLOCKS, 0), codes(x, INT4, 0, shard=shard()), torch.ones(24)),
                (
                    codes(x, BLOCKS, 1, amax=TWO, rotation=SIGNS),
                    packed_codes(x, BLOCKS, 1),
                    torch.ones(40, dtype=x.dtype),
                ),
                (packed_codes(x, ROWS, 1), codes(x, TERNARY, 1), None),
            )
        ]
        + [
            (*grouped(x, dim), *right, None, torch.float32, [3, 3, len(x)], None, None)
            for dim, right in ((0, grouped(x, 0)), (1, stacked(x, 1)), (1, stacked(x, 0)))
        ]
        + [
            (
                *patches(x[:, :16]),
                *codes(x[:, :16].repeat(1, 3), BLOCKS, 1),
                None,
                torch.float32,
                None,
                PIXELS.numbers,
                torch.bfloat16,
            )
        ]
    ),
    "_keys_in_graph": lambda x: [(torch.arange(6), 0)],
    "_decode_moment": lambda x: [
        (in_dtype(x, E4M3), torch.ones(40, 1), "mean"),
        (in_dtype(x, E5M2), torch.ones(40, 1), "mean_square"),
        (in_dtype(x, E5M2).reshape(4, 240), torch.ones(4, 2), "mean_square"),
    ],
    "_encode_moment": lambda x: [
        (values, torch.arange(960, dtype=torch.int32).view(values.shape), name)
        for name in ("mean", "mean_square")
        for values in (x.float(), x.float().reshape(4, 240))
    ],
}
LAYOUTS = {
    "rows": Tensor.contiguous,
    "columns": lambda x: x.t().contiguous().t(),
    "one row": lambda x: x[:1].expand(40, 24),
    "strided": lambda x: x.repeat(2, 2)[::2, ::2],
}


def test_every_operator_is_checked():
    prefix = "lightning_lowbit::"
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith(prefix)]
    assert {name.removeprefix(prefix) for name in names} == set(ARGUMENTS)


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_the_compiler_is_told_the_truth(name, layout, dtype):
    """Shapes, dtypes and strides; and that nothing is changed or aliased. Of dynamic shapes it takes longer."""
    if NO_ROWS is not None and (name, dtype) == ("_fp8_matmul", torch.bfloat16):
        pytest.skip(NO_ROWS)
    x = LAYOUTS[layout](torch.randn(40, 24, generator=torch.Generator().manual_seed(0)).to(dtype))
    operator = getattr(torch.ops.lightning_lowbit, name).default
    for arguments in ARGUMENTS[name](x):
        checks = ["test_faketensor"]
        if (layout, dtype) in (("strided", torch.bfloat16), ("columns", torch.float32)):
            checks.append("test_aot_dispatch_dynamic")
        if any(isinstance(one, Tensor) and one.dtype in (E4M3, E5M2) for one in arguments):
            assert_pure(operator, arguments)  # the check below cannot compare FP8
        else:
            checks.append("test_schema")
        torch.library.opcheck(operator, arguments, test_utils=checks)


def assert_pure(operator, arguments):
    """Nothing is changed, and the result shares no memory with an argument."""
    tensors = [one for one in arguments if isinstance(one, Tensor)]
    before = [tensor.clone() for tensor in tensors]
    result = operator(*arguments)
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor.float(), old.float()), f"{operator} changed an argument"
        assert tensor.untyped_storage().data_ptr() != result.untyped_storage().data_ptr(), f"{operator} returned a view"
