import importlib.metadata
import logging
import os
import re
import signal
import threading
from contextlib import ExitStack
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
import torch

from tests.pairwise import mark_slow
from tests.tables import SEED

TESTS = Path(__file__).parent

# Each Trainer asks all installed packages for callbacks, which takes a third of the time of a short run.
importlib.metadata.entry_points = cache(importlib.metadata.entry_points)

# The package uses the Lightning that is imported already: see tests/lightning_imports.py.
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


# The files that take longest: they are begun first, so that none of them is what one worker waits for at the end.
LONGEST = (
    "cli/run/test_run.py",
    "docs/test_docs.py",
    "recipes/test_recipes.py",
    "optim/conformance/test_gradients.py",
    "nn/linear/test_operands.py",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    left_out = {*mark_slow(items, leaves_out=config.option.markexpr != "not slow")}
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
    order = {TESTS / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: -1 if _launches(item.path) else order.get(item.path, len(order)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """One worker runs all files that start processes: they are forks of one server, and one launch at a time."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduler(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return "processes" if _launches(config.rootpath / file) else file

    return Scheduler(config, log) if config.getoption("dist") == "loadfile" else None


@cache
def _launches(file):
    return re.search(r"^from tests\.(launch import|precision\.ranks_ddp)", file.read_text(), re.MULTILINE) is not None


@pytest.fixture(autouse=True, scope="session")
def _untimed():
    """No test times GEMMs: how fast this CPU multiplies is the same on all machines."""
    from lightning_lowbit.nn.layers.speed import Times, times_from  # here, after Lightning, if it was asked for

    with times_from(lambda _: Times(native=2.0, emulated=3.5, unquantized=3.0)):
        yield


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
    SEED(0)
    yield
    os.environ.pop("PL_GLOBAL_SEED", None)


@pytest.fixture
def within():
    """Enters contexts that end with the test: ``within(backend("eager"))``."""
    with ExitStack() as stack:
        yield stack.enter_context


@pytest.fixture
def compiler():
    """A backend that counts graphs, none of which is there before the test, nor after it."""
    from torch._dynamo.testing import CompileCounterWithBackend  # here, since few tests compile

    torch._dynamo.reset()
    yield CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()


@pytest.fixture
def told(monkeypatch, caplog):
    """The log of Lightning, also of lines that it says once in a process."""
    from lightning_lowbit._lightning import say_once  # here, since few tests need Lightning

    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"):
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
    caplog.set_level(logging.INFO)
    say_once.cache_clear()
    return caplog
