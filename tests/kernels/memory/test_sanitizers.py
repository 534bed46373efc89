"""The C++ kernels under AddressSanitizer and UndefinedBehaviorSanitizer: no memory of others is touched."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.library.loads import compiler_with

pytestmark = pytest.mark.slow
TESTS = Path(__file__).parents[2]

# What calls the kernels; tests that start processes are left out, and those that build for themselves.
FILES = [
    *(f"tests/kernels/test_{name}.py" for name in ("adam", "casts", "layers", "packing")),
    "tests/kernels/gemms/test_gemms.py",
    "tests/kernels/gemms/test_stacks.py",
    "tests/kernels/memory/test_memory.py",
    "tests/optim/test_passes.py",
    "tests/optim/test_loading.py",
    "tests/optim/moments",
]
LONG = "tests/optim/test_passes.py::test_fp8_codes_are_equal_where_a_draw_hardly_decides"  # most of it in plain torch
RANDOM = "from tests.optim.damaged_states import main; main(5000, 100)"
FLAGS = "-g -fsanitize=address,undefined -fno-sanitize-recover=all"


def runtimes():
    """The libraries that must be in a process before all others."""
    names = ["libasan.so", "libubsan.so"]
    paths = [subprocess.run(["g++", f"-print-file-name={n}"], capture_output=True, text=True).stdout for n in names]
    if not all(map(os.path.isabs, paths)):
        pytest.skip("g++ has no sanitizers here")
    return ":".join(path.strip() for path in paths)


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    options = "detect_leaks=0:abort_on_error=0:exitcode=99:allocator_may_return_null=1"
    return {
        **compiler_with(FLAGS, tmp_path_factory.mktemp("sanitized")),
        "LD_PRELOAD": runtimes(),
        "ASAN_OPTIONS": options,
        "UBSAN_OPTIONS": "print_stacktrace=1:exitcode=99",
        "OMP_NUM_THREADS": "1",
    }


def run(environment, *arguments, status=0):
    command = [sys.executable, *arguments]
    result = subprocess.run(command, env=environment, cwd=TESTS.parent, capture_output=True, text=True)
    output = result.stdout + result.stderr
    assert result.returncode == status, output[-6000:]
    return output


def find_nothing(environment, *arguments):
    output = run(environment, *arguments)
    assert "Sanitizer" not in output and "runtime error" not in output, output[-6000:]
    assert list(Path(environment["LOWBIT_CACHE_DIR"]).glob("*.so")), "kernels were built"


def test_sanitizers_find_nothing(environment):
    find_nothing(environment, "-m", "pytest", "-q", "-n", "0", *FILES, f"--deselect={LONG}")


def test_sanitizers_find_nothing_in_loads_of_damaged_states(environment):
    find_nothing(environment, "-c", RANDOM)


def test_sanitizers_find_what_is_beyond(environment):
    """Bytes of which the last one is missing, past the check."""
    code = (
        "import torch; from lightning_lowbit.kernels.cpu import codes; from lightning_lowbit.quant.packed import pack; "
        "from lightning_lowbit.quant.call import CastCall; "
        "from tests.quant.tensors import NVFP4; codes.address = lambda name, tensor, *_: tensor.data_ptr(); "
        "data = pack(torch.ones(32, 64), NVFP4, None, None)[0][:-1].clone(); "
        "codes.unpack(data, torch.ones(()), CastCall(NVFP4, 1), torch.Size((32, 64)), torch.float32)"
    )
    assert "heap-buffer-overflow" in run(environment, "-c", code, status=99)
