import pytest
import torch.distributed as dist


@pytest.fixture(scope="module", autouse=True)
def process_group(tmp_path_factory):
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
