"""Switches after so many tokens."""

import math

import pytest
import torch

from lightning_lowbit import PrecisionSwitch, QAFSwitch
from lightning_lowbit.callbacks.switches.step_triggers import AtTokens, count_tokens
from tests.callbacks.switches.runs import RESUMES, begin, fit_texts
from tests.lightning_imports import BoringModel, MisconfigurationException
from tests.tables import each

pytestmark = RESUMES


@each("accumulate", [1, 2])
@each("tokens, expected", [(0, 0), (1, 1), (10, 1), (11, 2), (40, 4), (41, 5), (80, None)])
def test_the_first_step_that_begins_after_so_many_tokens(tokens, expected, accumulate):
    found = begin(PrecisionSwitch("qaf", tokens=tokens * accumulate), accumulate_grad_batches=accumulate)
    assert found == expected


def test_micro_batches_count_but_do_not_switch_and_a_count_may_be_ones_own():
    assert begin(QAFSwitch(tokens=10), accumulate_grad_batches=4) == 1
    assert begin(QAFSwitch(tokens=41), accumulate_grad_batches=4) == 2
    assert begin(QAFSwitch(tokens=12, count=lambda batch: batch.numel() // 3)) == 4


def test_what_is_counted():
    ids = torch.zeros(2, 5, dtype=torch.int64)
    assert count_tokens(ids) == count_tokens({"input_ids": ids, "mask": torch.zeros(7)}) == 10
    for batch, kind in [(torch.zeros(2), "Tensor of torch.float32"), ([ids], "list"), ({"ids": ids}, "dict")]:
        with pytest.raises(MisconfigurationException, match=f"got a {kind}. Give count"):
            count_tokens(batch)


@each("number", [torch.tensor(3), 2.5, None])
def test_a_count_that_is_none(number):
    with pytest.raises(MisconfigurationException, match="count gives the number of tokens of a batch, an int"):
        fit_texts(QAFSwitch(tokens=3, count=lambda batch: number))


class Ranks:
    """A Trainer of two ranks, as far as a trigger sees it; the other one's tokens, and the number of collectives."""

    def __init__(self, alike=1):
        self.world_size, self.global_step, self.collectives, self.other = 2, 0, 0, 0
        self.distributed_sampler_kwargs = {"num_replicas": 2 // alike, "rank": 0}
        self.strategy, self.root_device = self, torch.device("cpu")

    def reduce(self, tensor, reduce_op):
        assert (reduce_op, tensor.dtype) == ("sum", torch.int64)
        self.collectives += 1
        total, self.other = tensor + self.other, 0
        return total


def count_on(ranks, tokens, others):
    """The step before which it is due."""
    trigger = AtTokens(tokens, lambda batch: 100)
    trigger.begin("", ranks, BoringModel())
    for step in range(10_000):
        ranks.global_step = step
        trigger.look(ranks)
        if trigger.due < math.inf:
            assert trigger.due == step
            return step
        trigger.see(ranks, None)
        ranks.other += others(step)
    raise AssertionError("it is never due")


@each("tokens", [300, 301, 299_999, 300_000, 1_234_567])
def test_few_collectives_and_the_very_step(tokens):
    ranks = Ranks()
    assert count_on(ranks, tokens, lambda step: 200) == -(-tokens // 300)
    assert ranks.collectives <= 5 + 2 * math.log2(tokens / 300 + 1)


def test_exact_though_steps_become_twice_as_large_or_ranks_share_a_batch():
    """Of 300 tokens, and after step 100 of 600: at 30 000 + 600 k."""
    assert count_on(Ranks(), 90_000, lambda step: 200 if step < 100 else 500) == 200
    assert count_on(Ranks(alike=2), 10_000, lambda step: 100) == 100


def test_a_checkpoint_without_a_count_says_so():
    fit_texts(max_steps=3, keep="trained")
    with pytest.warns(UserWarning, match=r"QAFSwitch\(tokens=20\) counts tokens from step 3 on"):
        assert begin(QAFSwitch(tokens=20), ckpt_path="3.ckpt") == 5
