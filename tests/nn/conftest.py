import pytest
import torch.distributed as dist

from lightning_lowbit._torch import has_vnni
from lightning_lowbit.nn.native.devices import declared


@pytest.fixture(autouse=True)
def _emulated_blocks():
    """As on a CPU without units for codes: these tests hold the emulation to the bit. Native GEMMs are in native/."""
    with declared("cpu", {"int8"} if has_vnni() else ()):
        yield


@pytest.fixture
def alone():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
