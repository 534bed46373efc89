import os

import pytest
import torch

# A seed left by one test must not decide what another one computes.
os.environ.pop("PL_GLOBAL_SEED", None)


@pytest.fixture(autouse=True)
def _clean(monkeypatch, tmp_path):
    """Each test runs in an empty folder, with its own seed and no seed of another's in the environment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    torch.manual_seed(0)
    yield
    os.environ.pop("PL_GLOBAL_SEED", None)
