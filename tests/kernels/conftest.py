"""A process in which Triton's kernels are interpreted, and numbers of threads."""

import importlib.util
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch

from tests.kernels.interpreted import interpret


@pytest.fixture(scope="package")
def run():
    """Calls a function of ``interpreted`` in a process in which kernels are interpreted."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed: pip install -e '.[integrations]'")
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")  # read where Triton is imported, in the process
            pool.submit(interpret).result()
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


@pytest.fixture
def threads():
    number = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(number)
