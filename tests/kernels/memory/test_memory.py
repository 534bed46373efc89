"""What reaches C++ and Triton is compared with what they touch, and has the signs that torch reads."""

import itertools
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

import lightning_lowbit
from lightning_lowbit import Cast, Scale
from lightning_lowbit.kernels import (
    Packed,
    amax_of,
    backend,
    delayed_amax,
    lay_out_packed,
    pack_operand,
    quantize_operand,
    rotate,
    unpack_operand,
)
from lightning_lowbit.kernels.cpu import adam, codes, products
from lightning_lowbit.kernels.cpu.library import library
from lightning_lowbit.kernels.gpu import launches, stacks
from lightning_lowbit.kernels.memory import Misfit, address, checked, traits
from lightning_lowbit.kernels.shards import Decision
from lightning_lowbit.nn.core.saving import Frozen
from lightning_lowbit.quant.call import CastCall
from tests.kernels.memory import signs
from tests.quant.tensors import NVFP4
from tests.tables import each

PACKAGE = Path(lightning_lowbit.__file__).parent
CPU = torch.device("cpu")
needs_cpp = pytest.mark.skipif(library() is None, reason="the C++ kernels cannot be built here")


def test_one_module_hands_out_addresses():
    files = [file for room in ("kernels", "optim") for file in (PACKAGE / room).rglob("*.py")]
    users = {
        file.name
        for file in files
        if re.search(r"data_ptr|_cdata|addressof\((?!settings|numbers|rotation|places?|codes|window)", file.read_text())
    }
    assert len(files) > 20 and users == {"memory.py"}


def test_tensors_of_another_kind_and_freed_ones_have_no_address():
    four, empty = torch.ones(4), torch.ones(0)
    for tensor in (
        torch.ones(3),
        torch.ones(5),
        four.double(),
        four.int(),
        torch.ones(4, 2).t()[0],
        torch.ones(()).expand(4),
        torch._neg_view(four),
        torch.ones(4, device="meta"),
    ):
        with pytest.raises(ValueError, match=r"need weights as 4 contiguous elements of torch.float32 on cpu, and got"):
            address("weights", tensor, torch.float32, 4)
        with pytest.raises(ValueError, match="need weights as 4"):
            checked("weights", tensor, torch.float32, 4, CPU)
    assert address("x", four, torch.float32, 4) == four.data_ptr()
    assert address("x", empty, torch.float32, 0) == empty.data_ptr()
    assert checked("x", None, torch.float32, 4, CPU) is None
    four.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="was freed"):
        address("weights", four, torch.float32, 4)


def test_a_launch_has_tensors_of_one_device():
    for tensor in (torch.ones(2, device="meta"), torch._neg_view(torch.ones(2))):
        with pytest.raises(ValueError, match="need resolved tensors on cpu"):
            traits([torch.ones(1), tensor], CPU)


def test_arguments_for_which_triton_compiles_anew_have_other_traits():
    """A kernel of a matrix with one row, where Triton has made the number a constant, must not run for 16 rows."""
    specialize = pytest.importorskip("triton._C.libtriton").native_specialize_impl
    integers = (0, 1, 2, 15, 16, 17, -1, -16, 2**31 - 16, 2**31 - 1, 2**31, 2**31 + 1, 2**35)
    tensors = [torch.ones(4, dtype=dtype)[first:] for dtype in (torch.float32, torch.uint8) for first in (0, 1)]
    backend = pytest.importorskip("triton.backends.compiler").BaseBackend
    for first, second in itertools.combinations([None, *integers, *tensors], 2):
        forms = [specialize(backend, value, False, True, True) for value in (first, second)]
        if forms[0] != forms[1]:
            assert traits([first], CPU) != traits([second], CPU), (first, second)


def test_signs_of_a_stack_lie_one_after_the_other():
    call = CastCall(NVFP4, 1, rotation=torch.ones(4, 16)[::2])
    with pytest.raises(Misfit, match="need signs as 32 contiguous elements"):
        stacks.amax_launch(torch.ones(8, 32), call, (3, 8), torch.zeros(2))


def test_factors_of_products_and_amaxes_fit_the_matrix():
    product, result = torch.ones(10, 8), torch.empty(10, 8)
    for factors in ([torch.ones(3, 1, 8)], [torch.ones(5, 1, 8), torch.ones(2, 1, 8)]):
        with pytest.raises(Misfit, match="factors of products with as many rows each"):
            launches.scale_and_round_launch(product, factors, None, result)
    with pytest.raises(Misfit, match="a factor or bias as 16 contiguous elements"):
        launches.scale_and_round_launch(product, [torch.ones(2, 1, 4)], None, result)
    for amax in (torch.zeros(10), torch.zeros(8, dtype=torch.int32)):
        with pytest.raises(Misfit, match="need an amax as 8 contiguous elements of torch.float32"):
            launches.peaks_launch(product, amax)


# --- packed bytes -----------------------------------------------------------------------------------------------------

PACKED = [
    NVFP4,
    Cast("e2m1", Scale("e8m0", 32)),
    Cast("e4m3", Scale("fp32", "row")),
    Cast("int8", Scale("fp32", "tensor")),
    Cast("int4", Scale("bf16", (16, 16))),
    Cast("ternary", Scale("fp32", "tensor")),
]


def cut(data):
    return {
        "one less": data[:-1],
        "half": data[: len(data) // 2],
        "none": data[:0],
        "one more": torch.cat([data, data[:1]]),
        "twice": data.repeat(2),
        "a matrix": data.unsqueeze(0),
        "signed": data.view(torch.int8),
        "floats": data.float(),
    }


@each("name", ["cpp", "eager", "compiled"])
@each("cast", PACKED)
@each("dim", [0, 1])
def test_bytes_of_another_size_are_refused(name, cast, dim):
    shape = torch.Size((32, 64))
    packed = pack_operand(torch.randn(shape), cast, dim)
    with backend(name):
        for what, data in cut(packed.data).items():
            message = rf"packed matrix of \(32, 64\) .* is {len(packed.data)} bytes.*and got"
            with pytest.raises(ValueError, match=message):
                unpack_operand(Packed(data, packed.factor), cast, dim, shape, torch.float32)
                raise AssertionError(what)
        with pytest.raises(ValueError, match="and got"):
            unpack_operand(Packed(packed.data, torch.ones(3)), cast, dim, shape, torch.float32)
        with pytest.raises(ValueError, match=r"packed matrix of \(64, 64\)"):
            unpack_operand(packed, cast, dim, torch.Size((64, 64)), torch.float32)


@each("cast", PACKED)
def test_frozen_weights_of_another_size_are_refused(cast):
    frozen = Frozen(cast, torch.Size((32, 64)), torch.bfloat16)
    data = frozen.pack(torch.randn(32, 64))
    assert frozen.dense(data).shape == (32, 64)
    for bad in cut(data).values():
        for read in (frozen.packed, frozen.dense, lambda bad: frozen.operand(bad, torch.bfloat16)):
            with pytest.raises(ValueError, match=rf"packed matrix of \(32, 64\) .* is {len(data)} bytes"):
                read(bad)


@needs_cpp
def test_layouts_and_kernels_read_no_other_number_of_bytes():
    data = pack_operand(torch.randn(32, 64), NVFP4, 1).data
    for bad in cut(data).values():
        with pytest.raises(ValueError, match="packed matrix"):
            lay_out_packed(bad, NVFP4, 16, 1, torch.Size((32, 64)))
    with pytest.raises(ValueError, match="need codes and scales as 1152"):
        codes.unpack(data[:-1], torch.ones(()), CastCall(NVFP4, 1), torch.Size((32, 64)), torch.float32)
    with pytest.raises(ValueError, match="need codes and scales as 1152"):
        launches.unpack_launch(data[:-1], NVFP4, 1, torch.float32, torch.empty(32, 64))


# --- other arguments --------------------------------------------------------------------------------------------------


def outcome(call):
    try:
        result = call()
    except Exception as error:  # which one is the plain code's matter
        return type(error)
    values = result if isinstance(result, Tensor) else getattr(result, "values", result)
    return values.float().tolist() if isinstance(values, Tensor) else values


ONES = torch.ones
ARGUMENTS = {
    "three dimensions": lambda: quantize_operand(torch.randn(2, 3, 32), NVFP4, 1),
    "a vector": lambda: quantize_operand(torch.randn(32), NVFP4, 0),
    "groups of 8": lambda: rotate(torch.randn(4, 40), ONES(8), 1),
    "groups of 256": lambda: rotate(torch.randn(4, 300), ONES(256), 1),
    "groups of 24": lambda: rotate(torch.randn(4, 40), ONES(24), 1),
    "signs as a matrix": lambda: rotate(torch.randn(4, 40), ONES(16, 1), 1),
    "the last dimension": lambda: rotate(torch.randn(4, 40), ONES(16), -1),
    "cast in groups of 8": lambda: quantize_operand(torch.randn(4, 40), NVFP4, 1, rotation=ONES(8)),
    "cast in groups of 256": lambda: quantize_operand(torch.randn(4, 40), NVFP4, 1, rotation=ONES(256)),
    "packed in groups of 8": lambda: pack_operand(torch.randn(4, 40), NVFP4, 1, rotation=ONES(8)).data,
    "amax in groups of 8": lambda: amax_of(torch.randn(4, 40), None, ONES(8), 1),
    "amax of three dimensions": lambda: amax_of(torch.randn(2, 3, 40), None, ONES(16), 1),
    "rotation of three dimensions": lambda: rotate(torch.randn(2, 3, 32), ONES(16), 1),
    "an amax of two": lambda: quantize_operand(torch.randn(4, 40), NVFP4, 1, amax=ONES(2)),
    "a key of two": lambda: quantize_operand(torch.randn(4, 40), signs.CASTS["drawn"], 1, ONES(2).long()),
    "a key in float32": lambda: quantize_operand(torch.randn(4, 40), signs.CASTS["drawn"], 1, ONES(())),
}


@needs_cpp
def test_what_kernels_do_not_take_is_the_plain_code_s():
    for name, call in ARGUMENTS.items():
        results = []
        for code in ("cpp", "eager"):
            torch.manual_seed(0)
            with backend(code):
                results.append(outcome(call))
        assert results[0] == results[1], name


@needs_cpp
@each("staged, places", [(6, [6]), (6, [-1]), (6, [0, 9]), (3, [0])])
def test_amaxes_of_places_that_are_not_there(staged, places):
    with backend("cpp"):
        assert delayed_amax(ONES(()), ONES(6), ONES(staged), places) is None


@needs_cpp
def test_patches_of_another_number_are_refused():
    dimensions = [(16, 16, 4, 1, 1, 1)]
    assert products.add_patches(torch.ones(32, 64), 2, 16, dimensions).shape == (2, 16, 16)
    for bad in (torch.ones(31, 64), torch.ones(32, 63), torch.ones(33, 64)):
        with pytest.raises(ValueError, match="need patches as 2048"):
            products.add_patches(bad, 2, 16, dimensions)
    for numbers in ((16, 16, 4, 0, 1, 1), (16, 0, 4, 1, 1, 1), (-1, 16, 4, 1, 1, 1)):
        assert products.add_patches(torch.ones(32, 64), 2, 16, [numbers]) is None


@needs_cpp
def test_numbers_of_rules_are_one_for_each_shard():
    with pytest.raises(ValueError, match="need numbers as 0 "):
        adam.CppParameters([]).write_clipped(Decision(None, {"factor": ONES(2), "ratio": ONES(2)}))
    with pytest.raises(ValueError, match="need taken as 0 contiguous elements of torch.bool"):
        adam.CppParameters([]).update(Decision(None, {"factor": ONES(0), "taken": ONES(0)}), sums=False)
    with pytest.raises(ValueError, match="need steps as 1 contiguous elements of torch.int64"):
        adam.Scalars([{"steps": ONES(())}], {"steps": torch.int64})
    with pytest.raises(ValueError, match="need mean as 1 "):
        adam.Scalars([{"mean": ONES(())}, {"mean": ONES(3)}], {"mean": torch.float32})


# --- signs ------------------------------------------------------------------------------------------------------------


@each("name", ["cpp", "eager"])
def test_signs_are_those_that_torch_reads(name):
    assert signs.differences(name) == []


@pytest.mark.slow
def test_signs_are_those_that_torch_reads_in_triton(run):
    """Where views lie, and how wide they are, is what interpreted kernels are tested for elsewhere."""
    assert run(signs.differences, "triton", signs.VIEWS[:1], False) == []
