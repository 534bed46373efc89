"""The facts about weights, and who takes which of them."""

import torch
from torch import nn

from lightning_lowbit import LinearCasts, convert
from lightning_lowbit.export import weights as exported
from lightning_lowbit.nn.casts.facts import CAST_FACTS, LAYER_FACTS, obstacle
from lightning_lowbit.nn.conversion import bake, frozen, shared_amax
from lightning_lowbit.nn.sharded import gather

USERS = (bake, frozen, shared_amax, gather, exported)


def test_every_name_that_a_user_takes_is_a_fact():
    for user in USERS:
        assert {*CAST_FACTS, *LAYER_FACTS} >= user.TAKES, user


def test_every_fact_is_refused_by_somebody():
    assert not set.intersection(*(user.TAKES for user in USERS))


def test_a_new_fact_is_refused_by_all(monkeypatch):
    casts = LinearCasts.preset("nvfp4").replace(fprop_x=None)
    layer = convert(nn.Sequential(nn.Linear(32, 32)), casts)[0]
    monkeypatch.setitem(CAST_FACTS, "new", (lambda casts: casts.fprop_w, "it is new: {casts.fprop_w}"))
    monkeypatch.setitem(
        LAYER_FACTS, "blue", (lambda layer: layer.lowbit.blend is not None, "it is blue: {layer.lowbit.blend:g}")
    )
    takes = {*CAST_FACTS, *LAYER_FACTS}
    for user in USERS:
        assert obstacle(casts, takes - {"new"} | user.TAKES, layer) == f"it is new: {casts.fprop_w}"
    layer.lowbit.blend = torch.tensor(0.5)
    assert obstacle(casts, takes - {"blue"}, layer) == "it is blue: 0.5"
    assert obstacle(casts, takes, layer) is None
