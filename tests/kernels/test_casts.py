"""Casts by the C++ kernels equal the plain code to the bit."""

import itertools
import random

import pytest
import torch

from lightning_lowbit import Cast, LinearCasts, Scale
from lightning_lowbit.kernels import amax_of, backend, forms, kernel_support, operands, quantize_operand
from lightning_lowbit.kernels.cpu import casts as cpu
from lightning_lowbit.nn.casts.linear_casts import PRESETS
from lightning_lowbit.nn.casts.traits import OPERANDS
from lightning_lowbit.quant import quantize_operand as plain
from lightning_lowbit.quant.call import CastCall
from lightning_lowbit.quant.shard import Shard
from tests import golden_vectors

# Fields that no preset has: other formats, roundings and tiles, blocks that are no multiple of a vector.
RARE = [
    Cast("e4m3", Scale("e8m0", 32, "floor")),
    Cast("int4", Scale("e8m0", 24, "even")),
    Cast("e2m1", Scale("e5m2", 8, "up")),
    Cast("e2m1", Scale("fp32", (8, 24), "power_of_two")),
    Cast("e2m1", Scale("e4m3", (16, 16), two_level=True, four_over_six="mae")),
    Cast("e2m1", Scale("e4m3", 20, two_level=True, four_over_six="mse")),
    Cast("e4m3", Scale("fp32", (128, 128))),
    Cast("e3m2", Scale("e4m3", "row")),
    Cast("int8", Scale("fp32", "row", factor=0.9, epsilon=1e-5)),
    Cast("e2m1", Scale("e3m4", 16, two_level=True, top=4.0)),
    Cast("e2m1", Scale("e4m3", 16, "stochastic")),
    Cast("e4m3", Scale("e5m2", 24, "stochastic", two_level="row")),
    Cast("int8", Scale("e5m2", "row", "stochastic")),
    Cast("e2m1", Scale("e4m3", (8, 16), "stochastic", two_level=True)),
    Cast("int8", Scale("e4m3", "tensor", "stochastic")),
    Cast("e2m1", Scale("e4m3", 8, "stochastic", two_level="row", correction=32)),
    Cast("e2m1", Scale("e4m3", 20, "stochastic", correction=60)),
    Cast("e2m1", Scale("e4m3", 16, "stochastic", two_level=True, four_over_six="mse", correction=128)),
    Cast("e2m1", Scale("e4m3", 16, two_level="row", four_over_six="mae")),
    Cast("int4", Scale("bf16", 128)),
    Cast("int4", Scale("fp16", 32, two_level=True)),
    Cast("int2", Scale("fp16", (8, 16)), round_to_bfloat16=True),
]
OF_PRESETS = {cast for name in PRESETS for cast in map(LinearCasts.preset(name).cast_of, OPERANDS) if cast}
COVERED = OF_PRESETS | {*RARE}
PLAIN = {
    "elements without a mantissa": Cast("e3m0", Scale("e8m0", 32)),
    "scales with a zero point": Cast("int4", Scale("fp32", 32, statistic="minmax")),
    "means of blocks": Cast("ternary", Scale("fp32", 32, statistic="absmean")),
}
VALUES = {
    "normal": lambda x: x,
    "all magnitudes": lambda x: x * torch.exp(torch.randn_like(x) * 8),
    "subnormal, and zeros": lambda x: x * 1e-38 * (torch.rand_like(x) > 0.5) * (torch.rand(len(x), 1) > 0.3),
    "not finite": lambda x: x.where(torch.rand_like(x) > 0.1, torch.tensor([torch.inf, torch.nan])[len(x) % 2]),
}


def same_bits(a, b):
    """Whether two tensors are equal to the bit; NaNs are equal to each other."""
    as_integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    equal = a.contiguous().view(as_integers) == b.contiguous().view(as_integers)
    return a.dtype == b.dtype and a.shape == b.shape and bool((equal | (a.isnan() & b.isnan())).all())


def check(x, cast, dim, key=None, amax=None, dtype=None, shard=None):
    """Compares the operand of the C++ kernels, which must have been called, with the plain code's."""
    with backend("eager"):
        expected = plain(x, cast, dim, key, amax, dtype, shard)
    assert cpu.cpp_cast(cast.spec, dim, x.dtype, dtype) is not None, f"{cast} is not covered"
    with backend("cpp"):
        found = quantize_operand(x, cast, dim, key, amax, dtype, shard)
    where = f"{cast}, dim {dim}, {x.dtype} {tuple(x.shape)} to {dtype}"
    assert same_bits(found.values, expected.values), f"values of {where}"
    assert (found.factor is None) == (expected.factor is None), f"a factor or none of {where}"
    assert expected.factor is None or same_bits(found.factor, expected.factor), f"factor of {where}"


def keyed(cast):
    return torch.tensor(random.getrandbits(62)) if cast.draws else None


def test_casts_of_all_presets_and_rare_ones():
    torch.manual_seed(0)
    for number, cast in enumerate(sorted(COVERED, key=str)):
        for dim, rounding in ((0, "nearest"), (1, "nearest"), (0, "stochastic"), (1, "stochastic")):
            if cast.scale.correction and rounding == "stochastic":
                continue
            for shape in ((33, 47), (16, 320)):
                dtype = (torch.float32, torch.bfloat16)[(number + dim + len(rounding) + shape[0]) % 2]
                rounded = cast.replace(rounding=rounding)
                check(torch.randn(shape).to(dtype), rounded, dim, keyed(rounded))


def test_values_of_all_magnitudes_and_those_that_are_not_finite():
    torch.manual_seed(1)
    for cast in sorted(COVERED, key=str):
        for change in VALUES.values():
            for rows, dim in ((17, 0), (18, 1)):
                check(change(torch.randn(rows, 70)).bfloat16(), cast, dim, keyed(cast))


def test_strides_and_dtypes_of_native_gemms():
    x, ternary = torch.randn(64, 96), LinearCasts.preset("ternary")
    for cast in (LinearCasts.preset("nvfp4").fprop_x, LinearCasts.preset("fp8-row").fprop_x):
        for view in (x.t(), x[::2, 1::3], x[:1].expand(40, 96)):
            check(view, cast, 0)
            check(view, cast, 1)
    check(x.bfloat16(), ternary.fprop_x, 1, dtype=torch.int8)
    check(x, ternary.fprop_w, 1, dtype=torch.int8)


def test_an_amax_from_outside_scales_the_tensor():
    x = torch.randn(40, 64)
    for name in ("nvfp4", "fp8-current"):
        for amax in (0.5, 100.0, 0.0, torch.inf, torch.nan):
            check(x, LinearCasts.preset(name).fprop_x, 1, amax=torch.tensor(amax))


def test_shards_together_equal_the_whole_matrix():
    """Also where they begin within four elements that share a hash."""
    key, cast = torch.tensor(2**50 + 7), LinearCasts.preset("mxfp4").dgrad_g
    for size, dim, sharded in ((32, 0, 0), (32, 1, 0), (32, 0, 1), (32, 1, 1), (13, 0, 1)):
        x, parts = torch.randn(64, 6 * size).bfloat16(), []
        whole = quantize_operand(x, cast, dim, key).values
        for start in range(0, x.shape[sharded], size):
            shard, part = Shard("group", sharded, start, size, x.shape[sharded]), x.narrow(sharded, start, size)
            check(part, cast, dim, key, shard=shard)
            parts.append(quantize_operand(part, cast, dim, key, shard=shard).values)
        assert same_bits(torch.cat(parts, sharded), whole), f"blocks along {dim}, cut along {sharded} by {size}"


def test_random_bits_repeat_after_2_to_the_32_elements():
    """The first row of this shard has the last indices and then the first ones."""
    shard, cast = Shard("group", 0, 2**32 // 96, 32, 2**27), LinearCasts.preset("mxfp4").dgrad_g
    x, key = torch.randn(1, 32).repeat(32, 3), torch.tensor(2**50 + 7)
    check(x, cast, 1, key, shard=shard)
    values = quantize_operand(x, cast, 1, key, shard=shard).values
    whole = quantize_operand(x[:1, :32], cast, 1, key).values
    assert same_bits(values[:1, 64:], whole)


def test_a_shard_that_lacks_what_its_scales_need_is_left_to_plain_code():
    x, key = torch.randn(64, 128), torch.tensor(1)
    rows, eden = LinearCasts.preset("nvfp4-row").fprop_x, LinearCasts.preset("quartet2").wgrad_g
    for cast, dim, cut, step, amax, is_taken in (
        (LinearCasts.preset("nvfp4").fprop_x, 1, 0, 32, None, False),  # the amax of the global matrix
        (LinearCasts.preset("nvfp4").fprop_x, 1, 0, 32, torch.ones(()), True),
        (rows, 1, 0, 32, None, True),
        (rows, 1, 1, 64, None, False),  # a row's scale needs the whole row
        (eden, 1, 1, 64, torch.ones(()), False),  # in the middle of a group of 128
        (eden, 0, 1, 64, torch.ones(()), True),
    ):
        call = CastCall(cast, dim, key, amax, shard=Shard("group", cut, 0, step, x.shape[cut] * 2))
        assert cpu.takes(x, cpu.cpp_cast(cast.spec, dim, x.dtype, None), call) == is_taken, f"{cast} cut along {cut}"


def test_the_number_of_threads_changes_no_bit(threads):
    x, values, key, signs = torch.randn(100, 330).bfloat16(), {}, torch.tensor(5), torch.ones(32)
    for number in (4, 2, 1):
        threads(number)
        calls = itertools.product(sorted(COVERED, key=str), (0, 1), (None, signs))
        values[number] = [quantize_operand(x, cast, dim, key, rotation=r).values for cast, dim, r in calls]
    for number in (4, 2):  # compared by one thread
        assert all(map(same_bits, values[number], values[1])), f"{number} threads"


def test_golden_inputs():
    nvfp4 = LinearCasts.preset("nvfp4").fprop_x
    casts = {name: LinearCasts.preset(name).fprop_x for name in ("mxfp4", "mxfp6", "mxfp8")}
    casts |= {"nvfp4_1x16": nvfp4, "nvfp4_16x16": nvfp4.replace(scale={"block": (16, 16)})}
    casts["nvfp4_4over6"] = LinearCasts.preset("nvfp4-4over6").fprop_x
    for file, cast in casts.items():
        inputs = [case["x"] for name in golden_vectors.cases(file) if "x" in (case := golden_vectors.case(file, name))]
        assert inputs, f"{file} has inputs"
        for x in inputs:
            check(x, cast, 1)


def test_amax():
    for x in (torch.randn(7, 333), torch.randn(40).bfloat16(), torch.tensor([-3.0]), torch.tensor([1.0, torch.inf])):
        assert amax_of(x) == x.abs().amax().float()
    assert amax_of(torch.tensor([1.0, torch.nan, 2.0])).isnan()
    assert amax_of(torch.zeros(0, 3)) == 0


def test_what_plain_code_refuses_is_refused():
    x, casts = torch.randn(8, 32), LinearCasts.preset("nvfp4")
    with pytest.raises(ValueError, match="needs a key"):
        quantize_operand(x, casts.dgrad_g, 1)
    with pytest.raises(ValueError, match="amax was given"):
        quantize_operand(x, LinearCasts.preset("mxfp8").fprop_x, 1, amax=torch.tensor(1.0))
    with pytest.raises(ValueError, match="in the middle of blocks of 16"):
        quantize_operand(x, casts.fprop_x, 1, shard=Shard("group", 1, 0, 8, 16))


def test_support_lists_what_runs_plain_code():
    assert set(kernel_support(COVERED).values()) == {"cpp"}
    for why, cast in PLAIN.items():
        assert kernel_support([cast]) == {cast: f"plain code: {why}"}
        x = torch.randn(8, 64)
        key = torch.tensor(7) if cast.draws else None
        assert same_bits(quantize_operand(x, cast, 1, key).values, plain(x, cast, 1, key).values)


def test_backend_eager_calls_no_kernel(monkeypatch):
    monkeypatch.setattr(cpu, "cpp_cast", None)  # calling it raises
    with backend("eager"):
        quantize_operand(torch.randn(8, 32), LinearCasts.preset("nvfp4").fprop_x, 1)


@pytest.mark.slow
def test_a_thousand_random_samples():
    random.seed(0)
    torch.manual_seed(0)
    casts = sorted(COVERED, key=str)
    for _ in range(1000):
        cast = random.choice(casts)
        if not cast.scale.correction:
            cast = cast.replace(rounding=random.choice(["nearest", "stochastic"]))
        rows, columns = random.randint(1, 200), random.randint(1, 200)
        x = random.choice([*VALUES.values()])(torch.randn(rows, columns))
        x = x.to(random.choice([torch.float32, torch.bfloat16]))
        x = random.choice([x, x.t(), x[:, ::2], x[1:] if rows > 1 else x])
        amax = random.choice([None, torch.rand(())]) if cast.scale.needs_amax else None
        check(x, cast, random.choice([0, 1]), keyed(cast), amax)


def implement(monkeypatch, operation, **implementations):
    """Gives an operation other implementations, none of which has been compared."""
    for name, value in {"_verdicts": {}, **implementations}.items():
        monkeypatch.setattr(operation, name, value)


def test_samples_in_float16_have_finite_results():
    """NaN equals nothing: a kernel would seem to differ."""
    for cast in COVERED:
        for dim in (0, 1):
            for group in (0, 128):
                form = forms.CastForm(cast.spec, dim, torch.float16, torch.float32, group)
                with backend("eager"):
                    values, factor = operands.CAST.plain(*forms._sample(form, torch.device("cpu")))
                assert values.isfinite().all() and (factor is None or factor.isfinite().all()), f"{form}"


def test_samples_of_rows_have_the_form_that_they_are_for():
    """So that a kernel is compared for each size of its tiles, and each order of memory."""
    cast = Cast("e4m3", Scale("fp32", "row"), "stochastic")
    for lines, dim, fours in itertools.product((-1, 512, 1024, 16384, 32768), (0, 1), (False, True)):
        form = forms.CastForm(cast.spec, dim, torch.bfloat16, torch.float8_e4m3fn, fours=fours, lines=lines)
        assert forms.cast_form(*forms._sample(form, torch.device("cpu"))) == form


def test_results_lie_beside_the_input_whatever_the_default_device():
    x, cast = torch.randn(8, 32), LinearCasts.preset("nvfp4").fprop_x
    with torch.device("meta"):
        found, amax = quantize_operand(x, cast, 1), amax_of(x)
    assert same_bits(found.values, plain(x, cast, 1).values)
    assert amax == x.abs().max()
