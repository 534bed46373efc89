"""The choice between eager and generated code."""

import errno
import importlib.util
import logging
import shutil
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor import codecache
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.exc import CppCompileError
from torch._inductor.utils import fresh_cache, get_code

from lightning_lowbit import Cast, Scale, compilation, quantize
from lightning_lowbit.quant.scales import inverse
from tests.tables import each


@pytest.fixture
def nothing_generated():
    """As in a new process, and so again afterwards."""
    caches = compilation._can_compile, compilation._generate
    for function in caches:
        function.cache_clear()
    yield
    for function in caches:
        function.cache_clear()


def test_without_a_compiler_casts_run_as_eager_code_and_say_so_once(monkeypatch, nothing_generated):
    x, cast = torch.randn(32, 64), Cast(scale=Scale(two_level=True))
    expected = quantize(x, cast).codes
    monkeypatch.setattr(torch, "compile", Mock(side_effect=RuntimeError("no C++ compiler")))
    with compilation.backend("compiled"):
        with pytest.warns(UserWarning, match=r"no C\+\+ compiler.*Installing a C\+\+ compiler"):
            assert torch.equal(quantize(x, cast).codes, expected)
        quantize(x, cast)


def test_the_first_compilation_is_announced_once_on_stderr_or_as_logging_decides(
    caplog, capfd, monkeypatch, nothing_generated
):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # it takes half a minute
    with compilation.backend("compiled"), caplog.at_level("INFO", logger="lightning_lowbit"):
        quantize(torch.randn(32, 64), Cast())
    assert [record.name for record in caplog.records] == ["lightning_lowbit"]
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # as a user's program has it, where pytest catches none
    compilation._can_compile.cache_clear()
    with compilation.backend("eager"):
        quantize(torch.randn(32, 64), Cast())
    assert capfd.readouterr() == ("", "")
    with compilation.backend("compiled"):
        for shape in ((32, 64), (32, 64), (8, 16)):
            quantize(torch.randn(shape), Cast())
    told = (
        "lightning_lowbit compiles what has no kernel, such as a monitor's statistics, for 'cpu': the first steps take "
    )
    assert capfd.readouterr() == ("", f"{told}some seconds longer.\n")


@compilation.compiled
def double(x):
    return x * 2 + 0.5


@compilation.compiled
def triple(x):
    return x * 3 + 0.5


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Inductor's, in an empty folder or a copy of one; what this process has loaded of another one is forgotten."""

    def at(name, of=None):
        if of is not None:
            shutil.copytree(tmp_path / of, tmp_path / name)
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / name))
        torch.compiler.reset()
        CppPythonBindingsCodeCache.cache_clear()
        compilation._generate.cache_clear()
        return tmp_path / name

    compilation._can_compile("cpu")
    monkeypatch.setattr(compilation, "_has_warned", False)
    with compilation.backend("compiled"):
        yield at
    at("none")


@pytest.mark.slow
def test_a_damaged_cache_is_told_once_and_costs_no_bit(cache):
    x = torch.randn(3, 5)
    cache("whole")
    double(x), triple(x)
    libraries = [*cache("damaged", of="whole").rglob("*.main.so")]
    for library in libraries:
        library.write_bytes(b"")
    assert len(libraries) == 2, "nothing was compiled"
    reason = r"failed on 'cpu' \(ImportError: .*\.so: file too short\).*same bits"
    with pytest.warns(UserWarning, match=reason) as told:
        found = double(x), triple(x)
    assert len(told) == 1
    assert torch.equal(found[0], x * 2 + 0.5)
    assert torch.equal(found[1], x * 3 + 0.5)
    assert torch.equal(double(x), found[0]), "and without a warning"


def test_a_disk_that_fills_up_in_mid_run(cache, monkeypatch):
    """What was compiled goes on; what is not yet, such as a cast of the next phase, runs as eager code."""
    x = torch.randn(3, 5)
    cache("filling")
    double(x)
    monkeypatch.setattr(codecache, "write", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    assert torch.equal(double(x), x * 2 + 0.5)
    with pytest.warns(UserWarning, match=r"failed on 'cpu' \(OSError: .*No space left on device\)"):
        found = triple(x)
    assert torch.equal(found, x * 3 + 0.5)


def test_errors_of_a_function_itself_are_its_own(cache):
    @compilation.compiled
    def picky(x):
        if x.shape[1] != 3:
            raise ValueError("three columns, please")
        return x + 1

    with pytest.raises(ValueError, match="three columns, please"):
        picky(torch.ones(2, 4))
    assert torch.equal(picky(torch.ones(2, 3)), torch.full((2, 3), 2.0))


def test_the_reason_is_the_cause():
    """Of what a wrapper of torch says, the first line has none."""
    wrapped = BackendCompilerFailed(lambda: None, RuntimeError("No working C++ compiler"), None)
    output = CppCompileError(["g++"], "a.cpp:1:2: fatal error: disk full\nstopped.")
    for error, reason in (
        (RuntimeError(), "RuntimeError"),
        (wrapped, "RuntimeError: No working C++ compiler"),
        (output, "a.cpp:1:2: fatal error: disk full"),
    ):
        assert compilation._reason(error) == reason


def test_within_a_cast_nests_and_ends():
    assert not compilation.is_within_cast()
    with compilation.within_cast():
        with compilation.within_cast():
            assert compilation.is_within_cast()
        assert compilation.is_within_cast(), "the inner context ended the outer one"
        with pytest.raises(KeyError), compilation.within_cast():
            raise KeyError
        with ThreadPoolExecutor(1) as other:
            assert not other.submit(compilation.is_within_cast).result(), "another thread is in no cast"
    assert not compilation.is_within_cast()


def test_a_backend_is_known_and_ends_with_its_context():
    with pytest.raises(KeyError), compilation.backend("compiled"):
        raise KeyError
    assert compilation._backend == "auto"
    with pytest.raises(ValueError, match="Unknown backend 'cuda': choose 'auto', 'eager', 'compiled', 'cpp', 'triton'"):
        compilation.backend("cuda").__enter__()


def test_auto_compiles_large_operands_only(monkeypatch, nothing_generated):
    """Small ones are not worth the seconds that code takes to generate."""
    compilation._can_compile("cpu")
    sizes = []

    def generate(function, **_):
        return lambda *tensors: (sizes.append(tensors[0].numel()), function(*tensors))[1]

    monkeypatch.setattr(torch, "compile", generate)
    for rows in (1, 4095, 4096, 8192):
        quantize(torch.randn(rows, 16), Cast())
    assert sizes == [2**16] * 2 + [2**17] * 2, "scales and codes of the two large operands"
    with compilation.backend("eager"):
        quantize(torch.randn(8192, 16), Cast())
    assert len(sizes) == 4, "the eager backend generated code"


@each("device", ["cpu", "cuda"])
def test_inductor_knows_the_options(device):
    torch.compile(torch.abs, options=compilation.inductor_options(device))  # an unknown one is an error


@pytest.mark.slow  # Inductor and its imports
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_code_for_gpus_computes_as_eager_code(monkeypatch):
    """No division that is approximate, no fused product, no flushed number, no dropped rounding to bfloat16."""
    from triton.runtime import driver

    from tests.kernels.test_triton_aot import Driver

    def function(x, y):
        return inverse((x / y).bfloat16().float() * 1.5 + x)

    monkeypatch.setattr(driver, "_active", Driver())
    options = {**compilation.inductor_options("cuda"), "cpu_backend": "triton"}  # the code alone, which is not run
    with fresh_cache():
        code, *_ = get_code(torch.compile(function, options=options), torch.ones(64, 64), torch.ones(64, 64))
    assert code.count("div_rn(") == 2 and " / " not in code.partition("def triton_")[2].partition("tl.store")[0]
    assert "'enable_fp_fusion': False" in code and "'disable_ftz': True" in code
    assert ".to(tl.bfloat16)" in code
