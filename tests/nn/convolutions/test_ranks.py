"""Convolutions of several processes have the gradients of one."""

import pytest
import torch

from lightning_lowbit import convert
from lightning_lowbit.nn import LayerKeys
from tests.launch import launch
from tests.nn.convolutions.ranks_convolutions import CASTS, RANKS, block, gradients


@pytest.mark.slow
def test_ddp_and_fsdp2_give_the_gradients_of_one_process(tmp_path):
    model, images = block()
    LayerKeys(convert(model, CASTS)).fill_(0)
    for image in images:
        expected = gradients(model, image[None])
    for rank in launch("tests.nn.convolutions.ranks_convolutions", RANKS, tmp_path):
        for kind in ("ddp", "fsdp2"):
            for name, gradient in expected.items():
                torch.testing.assert_close(rank[kind][name], gradient / RANKS, msg=f"{kind} {name}")
        assert rank["converted"] == 3
        assert "not one nn.Linear's alone" in rank["gathers"]
