"""Switches after so many tokens, at a plateau, or when a measurement falls below a value; triggers in resumed runs."""

import math
from copy import deepcopy
from itertools import product

import pytest
import torch

from lightning_lowbit import Below, PrecisionSwitch, QAFSwitch
from lightning_lowbit.callbacks.switches.metric_triggers import AtBelow
from lightning_lowbit.callbacks.switches.step_triggers import AtTokens, count_tokens
from tests.callbacks.switches.runs import RESUMES, Validated, Witness, first_step, fit, fit_texts
from tests.lightning_imports import BoringModel, Callback, MisconfigurationException, Trainer
from tests.precision.regression_model import flat, trainer, two_casts
from tests.tables import each

pytestmark = RESUMES
EACH = {"val_check_interval": 1, "limit_val_batches": 1}  # a validation after each batch


FIRST_STEPS = [(0, 0), (1, 1), (10, 1), (11, 2), (40, 4), (41, 5), (80, None)]


@each("accumulate, case", product([1, 2], FIRST_STEPS), fast=4)
def test_the_first_step_that_begins_after_so_many_tokens(accumulate, case):
    tokens, expected = case
    found = first_step(PrecisionSwitch("qaf", tokens=tokens * accumulate), accumulate_grad_batches=accumulate)
    assert found == expected


def test_micro_batches_count_but_do_not_switch_and_a_count_may_be_ones_own():
    assert first_step(QAFSwitch(tokens=10), accumulate_grad_batches=4) == 1
    assert first_step(QAFSwitch(tokens=41), accumulate_grad_batches=4) == 2
    assert first_step(QAFSwitch(tokens=12, count=lambda batch: batch.numel() // 3)) == 4


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
        assert first_step(QAFSwitch(tokens=20), ckpt_path="3.ckpt") == 5


@each(
    ("said", "plateau", "begin"),
    [
        ([3, 2, 1, 1, 1, 1], {"patience": 2}, 5),
        ([3, 2, 2, 1, 1, 1], {"patience": 2}, 6),
        ([1, 2, 1, 3, 0.5, 1], {"patience": 3}, 4),
        ([3, 2.5, 2, 1.5, 1, 0.5], {"patience": 2, "min_delta": 0.5}, None),  # each is compared to the best one
        ([3, 2.5, 2, 1.5, 1, 0.5], {"patience": 1, "min_delta": 0.5}, 2),
        ([3, 2.5, 2, 1.5, 1, 0.5], {"patience": 1, "min_delta": 0.25}, None),
        ([1, 2, 3, 4, 4, 4], {"patience": 1, "mode": "max"}, 5),
        ([1, 2, 3, 4, 5, 6], {"patience": 6, "mode": "max"}, None),
        ([math.nan, math.nan, 1, 2, 3, 4], {"patience": 3}, 6),
        ([1, math.nan, math.nan, 0, 0, 0], {"patience": 2}, 3),
        ([1, -math.inf, -math.inf, 0, 0, 0], {"patience": 2}, 3),
        ([math.inf, math.inf, 1, 2, 3, 4], {"patience": 2, "mode": "max"}, 2),
    ],
    fast=3,
)
def test_begins_after_a_plateau(said, plateau, begin):
    switch = PrecisionSwitch("fqt", plateau=plateau, steps=2)
    expected = [1.0] * 7 if begin is None else [1.0] * begin + [0, 0.5] + [1.0] * 4  # once
    assert fit(switch, model=Validated(*said), max_steps=len(expected), **EACH).blends == expected


def test_a_validation_in_mid_step_counts_for_the_next_one():
    """Steps of two micro-batches, a validation after each third: after steps 1½, 3, 4½ and 6."""
    kwargs = {**EACH, "accumulate_grad_batches": 2, "val_check_interval": 3}
    for patience, begin in [(1, 3), (2, 5), (3, 6)]:
        switch = PrecisionSwitch("fqt", plateau={"patience": patience}, steps=2)
        blends = fit(switch, model=Validated(1), **kwargs).blends
        assert blends.index(0) == begin, f"after {patience} validations without an improvement"


def test_validations_outside_training_do_not_count():
    def seen():
        checkpoint = {}
        switch.on_save_checkpoint(Trainer(logger=False), BoringModel(), checkpoint)
        return [*checkpoint["lightning_lowbit_switches"].values()]

    model, switch = Validated(1), PrecisionSwitch("qaf", plateau={"patience": 9})
    kwargs = {**EACH, "max_steps": 8, "limit_train_batches": 64, "val_check_interval": 2, "num_sanity_val_steps": 1}
    made = trainer(two_casts(), callbacks=[switch], **kwargs)
    made.fit(model)
    assert seen() == [{"due": math.inf, "best": 1.0, "stalled": 3}], "the sanity check counts"
    made.validate(model, verbose=False)
    made.validate(Validated(1, name="other"), verbose=False)
    assert seen()[0]["stalled"] == 3


def test_the_same_trainer_goes_on():
    model, witness = Validated(3, 2, 2), Witness()
    switch = PrecisionSwitch("fqt", plateau={"patience": 2}, steps=4)
    kwargs = {**EACH, "max_steps": -1, "max_epochs": 1, "num_sanity_val_steps": 0}
    made = trainer(two_casts(), callbacks=[switch, witness], **kwargs)
    for epochs in range(1, 5):  # the fourth validation is in the second epoch
        made.fit_loop.max_epochs = epochs
        made.fit(model)
    assert witness.blends == [1, 1, 1, 1, 0, 0.25, 0.5, 0.75]


def test_a_metric_or_a_validation_that_is_not_there():
    message = "plateau of 'val_los' finds no such metric after a validation, but 'val_loss'. Log it in validation_step"
    with pytest.raises(MisconfigurationException, match=message):
        fit(PrecisionSwitch("qaf", plateau={"monitor": "val_los"}), model=Validated(1), **EACH)
    with pytest.raises(MisconfigurationException, match="waits for validations, and this run has none"):
        fit(PrecisionSwitch("qaf", plateau={}), model=Validated(1))


class OneSided(Validated):
    """The loss falls on rank 0 and stays on rank 1; it is not the mean of both."""

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", 1.0 if self.global_rank else 1 / (1 + self.global_step), sync_dist=False)

    def on_train_end(self):
        torch.save([self.trainer.callbacks[-1].blends, flat(self)], f"{self.global_rank}.pt")


@pytest.mark.filterwarnings("ignore:It is recommended to use .self.log")
@pytest.mark.slow
def test_all_ranks_begin_where_one_sees_a_plateau():
    kwargs = {"devices": 2, "strategy": "ddp_spawn", "use_distributed_sampler": False, "max_steps": 6}
    switch = PrecisionSwitch("fqt", plateau={"patience": 2}, steps=2)
    fit(switch, model=OneSided(), **EACH, **kwargs)
    (blends, weights), (others, other_weights) = (torch.load(f"{rank}.pt") for rank in range(2))
    assert blends == others == [1, 1, 1, 0, 0.5, 1]
    assert torch.equal(weights, other_weights), "the ranks have trained different weights"


class Measured(Callback):
    """Measures what it is told to, in each step the next, and knows it one batch later; forgets it when it is saved."""

    def __init__(self, *values):
        self.values = values
        self.known = []

    def measurements(self, monitor):
        if monitor != "noise":
            raise KeyError(f"it measures 'noise' and not {monitor!r}")
        return self.known

    def on_train_batch_start(self, trainer, *_):
        step = trainer.global_step
        if step and (not self.known or self.known[-1][0] < step):
            self.known.append((step, self.values[min(step, len(self.values)) - 1]))

    on_train_end = on_train_batch_start


@each(
    "values, expected",
    [
        ([3, 1, 1, 3], 4),  # the 2nd and 3rd are below; that of the 3rd step is looked at once four are taken
        ([1, 3, 1, 1, 3], 5),
        ([1, math.nan, 1, 1], 5),
        ([2, 2, 2], None),  # the threshold itself is not below
        ([1, 3, 1, 3, 1, 3, 1, 3], None),
        ([1, 1], 3),
    ],
    fast=2,
)
def test_after_some_measurements_in_a_row(values, expected):
    for order in (1, -1):
        switch = PrecisionSwitch("qaf", below=Below("noise", threshold=2, measurements=2))
        both = [Measured(*values, 3), switch]
        assert first_step(*both[::order], accumulate_grad_batches=2) == expected, order


class Disagrees:
    """A Trainer of two ranks, as far as a trigger sees it, of which the other one decides by itself, too."""

    def __init__(self, *others):
        self.others, self.strategy, self.global_step = list(others), self, 0

    def reduce_boolean_decision(self, decision, all):
        assert not all
        return decision or self.others.pop(0)


def test_ranks_whose_values_differ_decide_alike():
    ranks = Disagrees(False, True, True)
    trigger = AtBelow(Below("noise", threshold=2, measurements=2))
    trigger._source = Measured()
    for step in range(5):
        ranks.global_step = step
        trigger.look(ranks)
        assert (trigger.due, len(ranks.others)) == (4 if step == 4 else math.inf, 3 - max(0, step - 1)), step
        trigger._source.known.append((step + 1, 2.0))


def test_a_metric_that_nobody_measures():
    for callbacks, words in [
        ([], r"'gradient_noise/ratio', which no .* Add GradientNoiseMonitor"),
        ([Measured()], r"offers: Measured does not \(it measures 'noise' and not 'gradient_noise/ratio'\)"),
    ]:
        with pytest.raises(MisconfigurationException, match=words):
            fit_texts(QAFSwitch(below={}), *callbacks)


def test_the_default_is_that_of_the_paper():
    assert QAFSwitch(below={}).below == Below("gradient_noise/ratio", math.sqrt(3), 3)


TRIGGERS = {
    "at": {"at": 0.5},
    "step": {"step": 4},
    "tokens": {"tokens": 31},
    "plateau": {"plateau": {"patience": 1}},  # the validation after step 8 is the first without an improvement
    "below": {"below": {"monitor": "noise", "threshold": 2, "measurements": 2}},
}


@pytest.mark.fast("below")
@pytest.mark.parametrize("name", [name for name in TRIGGERS if name != "plateau"])  # see gradual/test_resume.py
def test_resumes_before_at_and_after(name):
    callbacks = [Measured(3, 1, 1, 3), QAFSwitch(**TRIGGERS[name], rewarm=4, moments="reset")]
    whole = fit_texts(*deepcopy(callbacks), keep="trained")
    assert whole.phases.index("qaf") == 4
    for step in (3, 4, 5, 6):
        resumed = fit_texts(*deepcopy(callbacks), ckpt_path=f"{step}.ckpt")
        assert resumed.rows == whole.rows[step:], f"resumed after step {step}"
        assert torch.equal(resumed.weights, whole.weights), f"resumed after step {step}: other weights"


def test_what_is_measured_and_not_looked_at_is_saved():
    """The fake monitor forgets its measurements: that of the 2nd step is known after the 3rd, and looked at later."""
    fit_texts(Measured(3, 1, 1, 3), QAFSwitch(below=TRIGGERS["below"]["below"]), keep="trained")
    (state,) = torch.load("3.ckpt", weights_only=True)["lightning_lowbit_switches"].values()
    assert state == {"due": math.inf, "in_a_row": 0, "value": 3, "seen": 1, "waiting": [(2, 1)]}


def test_of_two_that_are_due_at_once_the_last_in_the_list_holds():
    for switches, last in [
        ([PrecisionSwitch("bf16", step=3), QAFSwitch(tokens=30)], "qaf"),
        ([QAFSwitch(tokens=30), PrecisionSwitch("bf16", step=3)], "bf16"),
    ]:
        assert fit_texts(*switches).phases == ["fqt"] * 3 + [last] * 5
        assert [switch._record is None for switch in switches] == [True, False], "the first one has acted"


def test_switches_of_other_arguments_have_states_of_their_own():
    changes = [{}, {"to": "qaf"}, {"plateau": {"patience": 3}}, {"plateau": {"monitor": "other"}}]
    gradual = [PrecisionSwitch(**{"to": "fqt", "plateau": {}, "steps": 4, **change}) for change in changes]
    switches = [*gradual, *(QAFSwitch(**when) for when in TRIGGERS.values())]
    assert len({switch.state_key for switch in switches}) == len(switches)
