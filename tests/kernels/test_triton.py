"""The Triton kernels in Triton's interpreter, which runs them on CPUs, against the plain code: equal to the bit."""

import itertools
import random
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_lowbit import Cast, LinearCasts, Scale
from lightning_lowbit.formats import ELEMENT_FORMATS
from lightning_lowbit.kernels.gpu import casts as gpu
from lightning_lowbit.nn import OPERANDS, PRESETS
from lightning_lowbit.quant import quantize_operand
from lightning_lowbit.quant.call import CastCall
from lightning_lowbit.quant.shard import Shard
from tests.kernels import interpreted, passes
from tests.kernels.interpreted import Case
from tests.kernels.test_layers import DELAYED
from tests.quant.tensors import NVFP4, NVFP4_TILES, scales

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NANOS = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-45, -1e-39, 3.4e38, 6e4, 6.0, -2.5, 0.5)
DRAWN_ROWS = "scales of rows or tensors that round stochastically"
UNEVEN = "corrected groups or blocks that are not of 2, 4, ... or 1024 elements"
STOCHASTIC = NVFP4.replace(rounding="stochastic")


def sample(rows, columns, dtype=torch.float32, seed=0):
    """Rows of very different sizes, and a block of zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator) * torch.randn(rows, 1, generator=generator).mul(3).exp()
    x[: rows // 3, : columns // 2] = 0
    return x.to(dtype)


def in_parts(number):
    """A test of ``cases[part]``, of which the first part is fast: one of so many cases."""
    parts = [slice(first, None, number) for first in range(number)]
    return lambda test: pytest.mark.fast("part0")(pytest.mark.parametrize("part", parts)(test))


def casts_of(preset):
    casts = LinearCasts.preset(preset)
    found = dict.fromkeys(cast for name in OPERANDS if isinstance(cast := getattr(casts, name), Cast))
    return [cast for cast in found if gpu.lacks(cast) is None]


@pytest.mark.fast("nvfp4-nvidia", "mxfp4-rht", "int4")
@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "bf16"])
def test_all_casts_of_presets(run, preset):
    cases = [
        Case(cast, dim, sample(rows, columns, dtype))
        for cast in casts_of(preset)
        for dim in (0, 1)
        for dtype in DTYPES
        for rows, columns in ((19, 70), (1, 33))
    ]
    assert run(interpreted.differences, cases) == []


@pytest.mark.fast("nvfp4", "mxfp8")
@pytest.mark.parametrize("preset", ["nvfp4", "mxfp4", "mxfp8", "mxfp6", "nvfp4-nvidia", "ufp4", "int4", "e1m2"])
def test_packed_operands_of_presets(run, preset):
    """Bytes are those of the plain code, and so are the values that they stand for; a NaN is in its block's scale."""
    cases = []
    for cast in [cast for cast in casts_of(preset) if cast.scale.per_block]:
        for dtype, (rows, columns) in ((torch.bfloat16, (19, 72)), (torch.float32, (3, 34))):
            x = sample(rows, columns, dtype)
            x[1, 4], x[2, 5] = torch.nan, torch.inf
            cases += [Case(cast, dim, matrix) for dim in (0, 1) for matrix in (x, x.nan_to_num(0, 0))]
    assert run(interpreted.differences_of_packing, cases) == []


@in_parts(6)
def test_operands_of_native_gemms(run, part):
    cases, draw = [], torch.Generator().manual_seed(3)
    others = [NVFP4_TILES, Cast("e4m3", Scale("e8m0", (32, 32)), "stochastic")]
    others += [Cast("e2m1", Scale("e4m3", 64)), Cast("e2m1", Scale("e8m0", 32, "even"), "stochastic")]
    found = {cast for name in PRESETS for cast in map(LinearCasts.preset(name).cast_of, OPERANDS) if cast}
    kinds = {("e2m1", "e4m3"): 16, ("e2m1", "e8m0"): 32, ("e4m3", "e8m0"): 32}
    for number, cast in enumerate(sorted([*found, *others], key=str)):
        block = kinds.get((cast.element, cast.scale.format))
        if block is None or gpu.is_rare(cast) or not cast.scale.per_block or cast.round_to_bfloat16:
            continue
        shapes = ((33, 47), (1, 1) if cast.element == "e2m1" else (2, 3), (130, 70), (20, 256))
        for dim in (0, 1) if cast.scale.four_over_six is None or isinstance(cast.scale.block, int) else (1,):
            x = torch.randn(shapes[(number + dim) % 4], generator=draw) * 4 ** (number % 5 - 2)
            amax = 2.0 if cast.scale.needs_amax and number % 3 == 0 else None
            x = x.to(DTYPES[number % 2])
            cases.append((Case(cast, dim, x.t().contiguous().t() if number % 2 else x, amax, key=number + 7), block))
    x = torch.randn(40, 48, generator=draw)
    x.view(-1)[: 5 * len(NANOS) : 5] = torch.tensor(NANOS)
    cases += [(Case(cast, dim, x), block) for cast, block in ((NVFP4, 16), (others[1], 32)) for dim in (0, 1)]
    fp8, x = Cast("e4m3", Scale("fp32", 128)), torch.randn(130, 270, generator=draw)
    tiles = fp8.replace(scale={"block": (128, 128)})
    cases += [(Case(cast, dim, x.to(DTYPES[dim])), 128) for cast in (fp8, tiles) for dim in (0, 1)]
    assert len(cases) > 24
    assert run(interpreted.differences_of_layout, cases[part]) == []


@in_parts(5)
def test_memory_in_any_order(run, part):
    x, wide = sample(70, 40), sample(20, 150)
    matrices = (x.t(), wide[::2, 1::3], wide[:, 7:90], wide[:1].expand(20, 150), x[:, :1], x[:, :1].t())
    casts = STOCHASTIC, NVFP4_TILES, Cast("int8", Scale("fp32", "row")), Cast("e4m3", Scale("fp32", "tensor"))
    pairs = [(dim, cast) for dim in (0, 1) for cast in casts[: 2 if dim else 4]]
    cases = [Case(cast, dim, x.bfloat16() if dim else x) for x in matrices for dim, cast in pairs]
    assert run(interpreted.differences, cases[part]) == []


def test_what_is_not_a_number_zero_or_subnormal_and_amaxes_of_earlier_steps(run):
    x = torch.tensor([[*NANOS, *[1.0] * 4]]).repeat(len(NANOS), 3)
    for row, value in enumerate(NANOS):
        x[row, 16:] = value
    cases = [
        Case(Cast(element, scale, rounding), dim, x)
        for element, scale in (
            ("e2m1", Scale("e4m3", 16)),
            ("e2m1", Scale("e4m3", 16, four_over_six="mse")),
            ("e3m0", Scale("e8m0", 16, "even")),
            ("e4m3", Scale("fp32", "row", "power_of_two")),
            ("e5m2", Scale("fp32", "tensor")),
            ("int4", Scale("fp32", 16, statistic="minmax")),
            ("ternary", Scale("fp32", 16, statistic="absmean", epsilon=1e-5)),
        )
        for rounding in ("nearest", "stochastic")
        for dim in (0, 1)
    ]
    cases += [
        Case(cast, 1, sample(5, 40), amax)
        for cast in (NVFP4, STOCHASTIC, Cast("e4m3", Scale("fp32", "tensor", source="delayed")))
        for amax in (0.0, 1e-44, 1e-30, 1.0, 1e30, float("inf"), float("nan"))
    ]
    assert run(interpreted.differences, cases) == []


def test_no_elements(run):
    casts = (NVFP4, STOCHASTIC, Cast("int8", Scale("fp32", "row")), Cast("e4m3", Scale("fp32", "tensor")))
    cases = [Case(cast, dim, torch.randn(shape)) for cast in casts for dim in (0, 1) for shape in ((0, 5), (5, 0))]
    cases.append(Case(Cast("ternary", Scale("fp32", "tensor", statistic="absmean")), 1, torch.randn(0, 5)))
    assert run(interpreted.differences, cases) == []


def test_elements_in_the_dtypes_of_native_gemms(run):
    pairs = itertools.product(("e4m3", "e5m2", "int8", "ternary"), ("row", "tensor"))
    kinds = [(*pair, ("nearest", "stochastic")[(i + i // 2) % 2]) for i, pair in enumerate(pairs)]
    cases = [
        Case(Cast(element, Scale("fp32", block), rounding), dim, x, dtype=ELEMENT_FORMATS[element].gemm_dtype)
        for element, block, rounding in kinds
        for dim in ((0, 1) if block == "row" else (1,))
        for x in (sample(19, 70), torch.tensor([[1.0, float("nan"), -2e-5, 3e4], [0.0, -0.0, -1.0, 1e-9]]))
    ]
    assert run(interpreted.differences, cases) == []


def test_elements_along_columns_of_memory(run):
    cases = [
        Case(Cast(element, Scale("fp32", block), rounding), 0, x, dtype=ELEMENT_FORMATS[element].gemm_dtype)
        for element in ("e4m3", "int8")
        for block, rounding in (("row", "nearest"), ("row", "stochastic"), ("tensor", "nearest"))
        for x in (sample(19, 70), sample(40, 300).t())
    ]
    assert run(interpreted.differences_along_columns, cases) == []


def test_shards_have_the_random_bits_of_the_whole(run):
    """Also where they begin within four elements that share a hash."""
    tiles, four = NVFP4_TILES.replace(rounding="stochastic"), STOCHASTIC.replace(scale={"two_level": False})
    every = [*itertools.product((STOCHASTIC, tiles), (96,), (0, 1), (0, 1)), (four, 90, 0, 1), (four, 104, 0, 1)]
    for cast, columns, dim, cut in every:
        x = sample(32, columns)
        x[0, 0] = x[16, 0] = x[0, columns // 2] = x.abs().max()  # one amax for all
        whole, half = run(interpreted.shard, x, cast, dim, Shard("", 0, 0, 32, 32)), x.shape[cut] // 2
        assert torch.equal(whole, quantize_operand(x, cast, dim, torch.tensor(interpreted.KEY)).values)
        for start in (0, half):
            values = run(
                interpreted.shard, x.narrow(cut, start, half), cast, dim, Shard("", cut, start, half, 2 * half)
            )
            assert torch.equal(values, whole.narrow(cut, start, half)), f"{cast}, {dim}, cut along {cut} from {start}"


@in_parts(3)
def test_two_operands_from_one_read(run, part):
    pairs = [
        (NVFP4, STOCHASTIC),
        (NVFP4.replace(scale={"four_over_six": "mse"}), NVFP4),
        (Cast("e2m1", Scale("e8m0", 32)), Cast("e4m3", Scale("e8m0", 128), "stochastic")),
        (Cast("int4", Scale("fp32", 128), round_to_bfloat16=True), NVFP4),
    ]
    cases = [
        (row, column, sample(*shape, dtype))
        for row, column in pairs
        for dtype in (torch.float32, torch.bfloat16)
        for shape in ((19, 70), (64, 128), (1, 5), (0, 7))
    ]
    assert run(interpreted.differences_of_both, cases[part]) == []


def test_operands_of_all_products_of_a_stack(run):
    assert run(passes.differences_of_stacks, ("mxfp8",)) == ([], 4)


@in_parts(2)
def test_the_largest_magnitude(run, part):
    large = sample(2049, 2050)  # has a kernel
    matrices = [large.bfloat16().t(), large, sample(300, 70), sample(70, 30).bfloat16().t(), torch.randn(3, 0)]
    assert run(interpreted.differences_of_amax, (matrices + [torch.tensor([[v, 1.0]]) for v in NANOS])[part]) == []


def test_amaxes_of_delayed_scaling(run):
    assert run(interpreted.differences_of_delay, DELAYED) == []


def test_a_contraction_of_one_code_in_e4m3_is_left_to_plain_code():
    mxfp8 = Cast("e4m3", Scale("e8m0", 32))
    for dim in (0, 1):
        row, column = (CastCall(mxfp8, axis, block=32) for axis in (1, 0))
        x = torch.ones(1, 40) if dim == 0 else torch.ones(40, 1)
        assert gpu.lay_out(x, row if dim else column) is None
        assert gpu.lay_out_both(x, row, column) is None


def test_bytes_in_the_order_of_gemms(run):
    codes = torch.arange(70 * 150).view(70, 150).to(torch.uint8)
    cases = [(x, *more) for x in (codes.t(), codes[:, :33], codes[:1].t()) for more in ((0, 0), (10, 2))]
    cases += [(codes.view(torch.int8).t(), 0, 4), (codes.clamp(max=100).view(torch.float8_e4m3fn).t(), 3, 0)]
    assert run(interpreted.differences_of_bytes, cases) == []


def test_signs_that_keys_draw(run):
    keys = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 0x5DEECE66D])
    assert run(interpreted.differences_of_signs, keys) == []


WHOLE = torch.int32, torch.int8


@in_parts(5)
def test_factors_and_bias_behind_gemms(run, part):
    generator = torch.Generator().manual_seed(0)

    def random_of(*shape, dtype=torch.float32):
        return torch.randn(shape, generator=generator).mul(50).to(dtype)

    cases = [
        (product, [random_of(*shape) for shape in factors], bias, dtype)
        for product in (random_of(19, 70), random_of(70, 19).t(), *(random_of(19, 70, dtype=whole) for whole in WHOLE))
        for factors in ([], [()], [(19, 1)], [(1, 70)], [(19, 1), (1, 70)], [(), (1, 70)], [(19, 1), (19, 1, 70)])
        for bias in (None, random_of(70, dtype=torch.bfloat16), random_of(19, 70))
        for dtype in DTYPES[: 2 if factors else 3]
    ]
    assert run(interpreted.differences_of_finish, cases[part]) == []


@in_parts(3)
def test_rare_scales(run, part):
    casts = [
        Cast("e2m1", Scale("e4m3", 16, "stochastic")),
        Cast("e4m3", Scale("e5m2", (8, 16), "stochastic", two_level=True), "stochastic"),
        Cast("e2m1", Scale("e4m3", 8, "stochastic", two_level="row", correction=32)),
        Cast("e2m1", Scale("e4m3", 16, "stochastic", two_level=True, four_over_six="mse", correction=64)),
        Cast("e2m1", Scale("e4m3", 24, two_level="row", four_over_six="mae"), "stochastic"),
        Cast("int4", Scale("bf16", 128)),
        Cast("int8", Scale("fp16", "row")),
        Cast("int2", Scale("fp16", (8, 16), two_level=True), round_to_bfloat16=True),
    ]
    shapes = (19, 150), (150, 19)
    cases = [
        Case(cast, dim, sample(*shapes[(n + dim) % 2], DTYPES[n % 3]) * 10.0 ** (n % 3 - 1), key=n)
        for n, cast in enumerate(casts)
        for dim in (0, 1)
    ]
    (x := torch.full((40, 48), 1e-7)).view(-1)[: 5 * len(NANOS) : 5] = torch.tensor(NANOS)
    cases += [Case(cast, 1, x) for cast in casts]
    assert run(interpreted.differences, cases[part]) == []


@in_parts(6)
def test_rotated_operands(run, part):
    cases, kinds = [], [NVFP4, STOCHASTIC, NVFP4_TILES, *casts_of("mxfp4-rht")]
    for number, (cast, size) in enumerate(itertools.product(kinds, (16, 32, 64, 128))):
        dim = (number + number // 4) % 2
        x = sample(*((33, 70), (140, 19), (16, 256))[number // 3 % 3], DTYPES[number // 3 % 3], number)
        x[3, 5], amax = torch.nan, 3.0 if cast.scale.needs_amax and number % 5 == 0 else None
        cases.append((Case(cast, dim, x.t().contiguous().t() if number % 2 else x, amax), size))
    assert run(interpreted.differences_of_rotation, cases[part]) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_random_casts_shapes_strides_and_dtypes(run, seed):
    cases, rng = [], random.Random(seed)
    while len(cases) < 50:
        element = rng.choice(list(ELEMENT_FORMATS))
        block = rng.choice([1, 2, 16, 32, 128, 7, 24, (16, 16), (1, 16), (4, 8), (3, 5), (32, 2), "row", "tensor"])
        scale = rng.choice(list(scales(block, element)))
        if gpu.lacks(Cast(element, scale)) is not None:
            continue
        cast = Cast(element, scale, rng.choice(["nearest", "stochastic"]), rng.random() < 0.3)
        rows, columns = rng.choice([1, 2, 5, 16, 17, 33, 64]), rng.choice([1, 3, 16, 20, 31, 64, 70, 130])
        x = sample(2 * columns, 2 * rows, rng.choice(DTYPES), rng.getrandbits(30)).t()
        x = rng.choice([x[:rows, :columns], x[:rows, :columns].contiguous(), x[::2, ::2], x.contiguous()[:rows, 1::2]])
        for _ in range(rng.randint(0, 4)):
            x[rng.randrange(rows), rng.randrange(columns)] = rng.choice(NANOS)
        amax = rng.choice([None, 3.0, 1e-30, 1e30, float("inf")]) if scale.needs_amax else None
        narrow = None if scale.per_block or rng.random() < 0.6 else cast.grid.gemm_dtype
        cases.append(Case(cast, rng.choice([0, 1]), x, amax, narrow, rng.getrandbits(63) - 2**62))
    assert run(interpreted.differences, cases) == []


# --- without Triton ---------------------------------------------------------------------------------------------------


def test_what_is_not_covered_is_said_in_words(monkeypatch):
    monkeypatch.setattr(gpu, "obstacle", lambda device: None)
    x = torch.empty(4, 4)
    for cast, matrix, dtype, reason in (
        (NVFP4, x, torch.bfloat16, None),
        (NVFP4, x.double(), torch.float32, "operands from torch.float64 to torch.float32"),
        (NVFP4, x, torch.int8, f"{NVFP4} in torch.int8"),
        (Cast("int8", Scale("fp32", "row")), x, torch.int8, None),
        (Cast("int8", Scale("fp32", "tensor", statistic="minmax")), x, torch.float32, "the range of a whole tensor"),
        (Cast("int8", Scale("fp32", 1025)), x, torch.float32, "blocks of more than 1024 elements"),
        (Cast("int8", Scale("fp32", (64, 32))), x, torch.float32, "blocks of more than 1024 elements"),
        (Cast("int8", Scale("e5m2", "row", "stochastic")), x, torch.float32, DRAWN_ROWS),
        (Cast("e2m1", Scale("e4m3", 20, "stochastic", correction=60)), x, torch.bfloat16, UNEVEN),
        (NVFP4, torch.empty(1, 1).expand(2**16, 2**15), torch.float32, "matrices of 2^31 elements or more"),
    ):
        assert gpu.covers(cast, matrix, dtype) == reason
    assert gpu.covers_both(NVFP4, STOCHASTIC) is None
    assert "1, 2, 4, ... or 128" in gpu.covers_both(NVFP4, NVFP4_TILES)
    wide = Cast("e4m3", Scale("fp32", 128))
    assert gpu.covers_both(wide, NVFP4) is None and "registers" in gpu.covers_both(wide, wide)


def test_graphs_for_gpus_are_traced_without_one():
    """The operator hides the kernel: a compiler that saw it would compile it with options of its own."""
    with FakeTensorMode():
        x = torch.empty(64, 96, device="cuda", dtype=torch.bfloat16)
        key, amax = torch.empty((), device="cuda", dtype=torch.int64), torch.empty((), device="cuda")
        operator = torch.ops.lightning_lowbit._cast
        others = torch.bfloat16, None, None, 0
        graph = make_fx(lambda x, *given: operator(x, "operands", STOCHASTIC.spec, 0, *given, *others))(x, key, amax)
    calls = [node for node in graph.graph.nodes if node.target is operator.default]
    assert len(calls) == 1
    values, factor = calls[0].meta["val"]
    assert (values.shape, values.dtype, values.device.type) == (x.shape, torch.bfloat16, "cuda")
    assert (factor.shape, factor.dtype) == ((), torch.float32)


@pytest.mark.slow
def test_the_module_is_imported_without_triton():
    program = """if True:
        import sys
        sys.modules["triton"] = None  # an ImportError, as where it is not installed
        import torch
        from lightning_lowbit import Cast
        from lightning_lowbit.kernels.gpu import casts
        casts.importlib.util.find_spec = lambda name: None
        print(casts.covers(Cast(), torch.empty(2, 2), torch.float32))
    """
    said = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert said.stdout == "Triton is not installed\n"
