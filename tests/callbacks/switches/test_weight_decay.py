"""Weight decay that changes in mid-training: of which groups, when, after a resume, and what it does to weights."""

import pytest
import torch

from lightning_lowbit import FP4Precision, PrecisionSwitch, StableSPAM, WeightDecaySwitch
from tests.callbacks.switches.runs import RESUMES, Saving
from tests.lightning_imports import MisconfigurationException
from tests.precision.regression_model import On, Regression, flat, trainer
from tests.tables import each

pytestmark = RESUMES


class Decayed(Regression):
    """Its first layer has one weight decay, its MLP another, and its head none."""

    def __init__(self, optimizer=torch.optim.AdamW):
        super().__init__()
        self.optimizer = optimizer

    def configure_optimizers(self):
        decays = {self.first: 0.5, self.mlp: 0.25, self.head: 0.0}
        return self.optimizer([{"params": list(p.parameters()), "weight_decay": decay} for p, decay in decays.items()])


class Manual(Decayed):
    """Two optimizers, of which the second has one group; each step of the run is one of both."""

    automatic_optimization = False

    def configure_optimizers(self):
        groups = [{"params": self.first.parameters(), "weight_decay": 0.5}, {"params": self.mlp.parameters()}]
        return [torch.optim.AdamW(groups, weight_decay=0), torch.optim.SGD(self.head.parameters(), weight_decay=0.25)]

    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx))
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()


class Witness(Saving):
    """The weight decays of all groups in each micro-batch, by optimizer step."""

    def __init__(self, keep=None):
        super().__init__(keep)
        self.decays = {}

    def on_train_batch_start(self, trainer, *_):
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        decays = [group["weight_decay"] for group in groups]
        assert self.decays.setdefault(trainer.global_step, decays) == decays, "it changes within a step"


def fit(*callbacks, model=None, ckpt_path=None, keep=None, **kwargs):
    """Six steps; the weight decays of each."""
    witness = Witness(keep)
    defaults = {"max_steps": 6, "limit_train_batches": 64}
    made = trainer(None, callbacks=[*callbacks, witness], **{**defaults, **kwargs})
    made.fit(model or Decayed(), ckpt_path=ckpt_path)
    return list(witness.decays.values())


BEFORE, AFTER = [0.5, 0.25, 0], [0, 0, 0]


@each("when, accumulate", [({"at": 0.5}, 1), ({"step": 3}, 2)])
def test_from_a_step_on(when, accumulate):
    assert fit(WeightDecaySwitch(**when), accumulate_grad_batches=accumulate) == [BEFORE] * 3 + [AFTER] * 3


def test_to_another_value_where_there_is_any_and_back_from_zero():
    assert fit(WeightDecaySwitch(0.125, step=2)) == [BEFORE] * 2 + [[0.125, 0.125, 0]] * 4
    switches = [WeightDecaySwitch(step=1), WeightDecaySwitch(0.125, step=3)]
    assert fit(*switches, keep="trained") == [BEFORE] + [AFTER] * 2 + [[0.125, 0.125, 0]] * 3
    assert fit(*switches, ckpt_path="2.ckpt") == [AFTER] + [[0.125, 0.125, 0]] * 3


def test_no_weight_decay_to_change():
    class Without(Manual):
        def configure_optimizers(self):
            return [super().configure_optimizers()[0], torch.optim.LBFGS(self.head.parameters())]

    none = Decayed(lambda groups: torch.optim.SGD([{**group, "weight_decay": 0} for group in groups], lr=0.1))
    for model, message in [
        (none, "here it is 0 for all parameters. Give the optimizer a weight decay"),
        (Without(), "WeightDecaySwitch needs optimizers with weight decay, and LBFGS has none.* such as AdamW"),
    ]:
        with pytest.raises(MisconfigurationException, match=message):
            fit(WeightDecaySwitch(step=1), model=model)


def test_says_so(caplog):
    fit(WeightDecaySwitch(step=2))
    assert "Step 2: weight decay 0.25, 0.5 -> 0.0." in caplog.text


def test_several_optimizers():
    """``global_step`` counts the steps of both, and manual optimization has a number of them only where it is given."""
    assert fit(WeightDecaySwitch(at=0.5), model=Manual(), max_steps=8) == [[0.5, 0, 0.25]] * 2 + [AFTER] * 2
    message = r"WeightDecaySwitch\(at=0.5\) is a fraction .* set max_steps, or give step instead"
    with pytest.raises(MisconfigurationException, match=message):
        fit(WeightDecaySwitch(at=0.5), model=Manual(), max_steps=-1, max_epochs=1)


def test_goes_with_a_switch_of_something_else():
    plugin, witness = FP4Precision(quantize_output=True), Witness()
    switches = [WeightDecaySwitch(step=3), PrecisionSwitch("qaf", step=4), PrecisionSwitch("hp-forward", step=3)]
    trainer(plugin, callbacks=[*switches, witness], max_steps=6, limit_train_batches=6).fit(Decayed())
    assert list(witness.decays.values()) == [BEFORE] * 3 + [AFTER] * 3
    assert plugin.phase == "qaf"
    switches = [PrecisionSwitch("fqt", step=1, steps=4), WeightDecaySwitch(step=2)]
    trainer(plugin, callbacks=switches, max_steps=4, limit_train_batches=4).fit(Decayed())
    assert plugin.blend == 0.5, "a switch of the weight decay ends that of the precision"


@each("make", [torch.optim.AdamW, StableSPAM])
def test_weights_decay_no_more(make):
    class Still(Decayed):
        def __init__(self):
            super().__init__(lambda groups: make(groups, lr=0.5))
            self.sizes = []

        def training_step(self, batch, batch_idx):
            weights = self.first.weight, self.mlp.up_proj.weight, self.head.weight
            self.sizes.append(torch.stack([weight.norm() for weight in weights]))
            return 0 * sum(p.sum() for p in self.parameters())

    model = Still()
    fit(WeightDecaySwitch(step=2), model=model, max_steps=5)
    factors = torch.stack(model.sizes) / model.sizes[0]
    expected = [[1, 1, 1], [0.75, 0.875, 1], *[[0.5625, 0.765625, 1]] * 3]
    torch.testing.assert_close(factors.detach(), torch.tensor(expected), rtol=1e-6, atol=0)


def test_a_resumed_run_repeats_the_uninterrupted_one():
    def run(**kwargs):
        model = Decayed()
        return fit(WeightDecaySwitch(0.125, step=2), WeightDecaySwitch(step=4), model=model, **kwargs), flat(model)

    decays, weights = run(keep="trained")
    for step in range(1, 6):
        resumed, resumed_weights = run(ckpt_path=f"{step}.ckpt")
        assert resumed == decays[step:], f"resumed after step {step}"
        assert torch.equal(resumed_weights, weights), f"resumed after step {step}: other weights"


def test_a_run_that_resumes_after_the_step_switches():
    fit(keep="trained", max_steps=4)
    switches = [WeightDecaySwitch(2.0, step=3), WeightDecaySwitch(1.0, step=2)]
    assert fit(*switches, ckpt_path="4.ckpt") == [[2, 2, 0]] * 2


@each("joins, expected", [(1, BEFORE + [0.75]), (4, AFTER + [0])])
def test_a_group_that_joins_switches_too(joins, expected):
    """Before the switch of step 3 or after it; the weight decays of its first step, and of the last."""

    def join(run, *_):
        if run.global_step == joins:
            new = torch.nn.Parameter(torch.ones(1))
            run.optimizers[0].add_param_group({"params": [new], "weight_decay": 0.75})

    decays = fit(On(on_train_batch_start=join), WeightDecaySwitch(step=3))
    assert decays[joins] == expected
    assert decays[-1] == AFTER + [0]


def test_groups_without_weight_decay_are_left_alone():
    class Groups(torch.optim.SGD):
        def __init__(self, groups):
            super().__init__(groups, lr=0.1)
            del self.param_groups[1]["weight_decay"]

        def step(self, closure=None):
            return closure()

    model = Decayed(Groups)
    made = trainer(None, callbacks=[WeightDecaySwitch(step=1)], max_steps=2)
    made.fit(model)
    assert [group.get("weight_decay") for group in made.optimizers[0].param_groups] == [0, None, 0]
