import os
import signal
import threading
from importlib import import_module

import pytest
import torch

from tests.pairs import mark_slow

# The package uses the Lightning that is imported already: see tests/lightnings.py.
if "LOWBIT_TEST_LIGHTNING" in os.environ:
    import_module(os.environ["LOWBIT_TEST_LIGHTNING"])

# Tiny tensors gain nothing from threads, and on a busy machine threads that wait for each other take most of the time.
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for subprocesses
torch.set_num_threads(1)

# Processes that compile in parallel take longer to start than the few small graphs of a test take to compile.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

# Shells have what runs in the background ignore Ctrl-C, which some tests send to themselves.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A seed left by one test must not decide what another one computes.
os.environ.pop("PL_GLOBAL_SEED", None)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    mark_slow(items)


@pytest.fixture(scope="session")
def _empty_folders(tmp_path_factory):
    """The same one again and again, until a test writes into it."""

    def folders():
        while True:
            folder = tmp_path_factory.mktemp("empty")
            while not any(folder.iterdir()):
                yield folder

    return folders()


@pytest.fixture(autouse=True)
def _clean(request, monkeypatch, _empty_folders):
    """Each test runs in an empty folder, with its own seed and no seed of another's in the environment."""
    wants_its_own = "tmp_path" in request.fixturenames
    monkeypatch.chdir(request.getfixturevalue("tmp_path") if wants_its_own else next(_empty_folders))
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    torch.manual_seed(0)
    yield
    os.environ.pop("PL_GLOBAL_SEED", None)
