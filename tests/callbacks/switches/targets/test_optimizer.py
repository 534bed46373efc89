"""Learning rates and moments at a switch; the report, and what is refused."""

import pytest
import torch
from torch import Tensor, nn

from lightning_lowbit import SPAM, Adaptive, LowBitAdamW, PrecisionSwitch, QAFSwitch, StableSPAM
from lightning_lowbit.callbacks.learning_rates import LowerRates
from tests.callbacks.switches.runs import RESUMES, Scheduled, fit_fp4
from tests.precision.regression_model import On, Regression, trainer
from tests.tables import each

pytestmark = RESUMES


def adam(p):
    return torch.optim.Adam(p, 1.0)


def tensor_rate(p):
    return torch.optim.Adam(p, torch.tensor(1.0), capturable=False, foreach=False)


@each("make, accumulate", [(adam, 1), (tensor_rate, 2), (lambda p: Adaptive(adam(p)), 1)], fast=2)
def test_the_learning_rate_rises_again_and_the_schedule_goes_on(make, accumulate):
    model = Scheduled(make)
    fit_fp4(QAFSwitch(step=1, rewarm=4), model=model, accumulate_grad_batches=accumulate)
    assert model.rates == [1, 0.5 / 4, 0.25 / 2, 0.125 * 3 / 4, 0.0625, 0.03125]
    assert not model.trainer.optimizers[0]._optimizer_step_pre_hooks, "a hook is left"


class TwoOptimizers(Regression):
    """Two optimizers by hand, both of which step with each batch."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.manual_backward(self.loss(batch_idx, 1.0))
        for optimizer in self.optimizers():
            optimizer.step(closure=lambda made=optimizer: self.rates.append(made.param_groups[0]["lr"]))

    def configure_optimizers(self):
        self.rates = []
        return [torch.optim.SGD([layer.weight], 1.0) for layer in (self.first, self.head)]


def test_by_hand_steps_of_all_optimizers_count_and_a_batch_has_one_rate():
    model = TwoOptimizers()
    fit_fp4(QAFSwitch(step=2, rewarm=4), model=model, max_steps=8)
    assert model.rates == [1, 1, 1 / 4, 1 / 4, 3 / 4, 3 / 4, 1, 1]


def test_learning_rates_of_two_causes_multiply_and_come_back():
    weights = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weights], 1.0)
    weights.grad = torch.ones(1)
    first, second = LowerRates(), LowerRates()
    first.by(0.5, [optimizer])
    second.by(0.5, [optimizer])
    optimizer.step()
    assert (weights.item(), optimizer.param_groups[0]["lr"]) == (0.75, 1.0)
    first.release()
    second.by(0.25, [optimizer])
    optimizer.step()
    assert (weights.item(), optimizer.param_groups[0]["lr"]) == (0.5, 1.0)
    second.release()
    first.release()
    optimizer.step()
    assert weights.item() == -0.5


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2),
    "adaptive": lambda p: Adaptive(torch.optim.AdamW(p, 1e-2)),
    "stable_spam": lambda p: StableSPAM(p, lr=1e-2),
    "fp8": lambda p: LowBitAdamW(p, lr=1e-2),
    "sparse": lambda p: SPAM(p, lr=1e-2, density=0.25),
}

GUARDS = ("steps", "threshold", "norm_mean", "norm_mean_square", "norm_mean_weight")


@each("name", OPTIMIZERS, fast=2)
def test_moments_start_anew_and_guards_go_on(name):
    """After a step that follows the reset, moments are those of its gradients alone."""
    states = []

    def look(trainer, pl_module, *_):
        (optimizer,), weight = trainer.optimizers, pl_module.first.weight
        kept = {key: v.clone() for key, v in optimizer.state[weight].items() if isinstance(v, Tensor)}
        states.append({**kept, "g": weight.grad.clone()})

    fit_fp4(
        QAFSwitch(step=3, moments="reset"), On(on_train_batch_end=look), model=Scheduled(OPTIMIZERS[name]), max_steps=5
    )
    before, after = states[2], states[3]
    if name == "sgd":
        assert torch.equal(after["momentum_buffer"], after["g"])
    elif name in ("adamw", "adaptive"):
        assert (before["step"], after["step"]) == (3, 1)
    else:
        assert (before["steps_since_reset"], after["steps_since_reset"]) == (3, 1)
        assert after["mean_weight"] < before["mean_weight"]
    if name == "adamw":
        assert torch.allclose(after["exp_avg"], 0.1 * after["g"])
    for guard in [key for key in GUARDS if key in before]:
        assert states[4]["steps"] == 5, "the guards have forgotten their steps"
        assert before[guard] == 0 or after[guard] != 0, f"{guard} starts anew"
    assert ("steps" in before) == (name not in ("sgd", "adamw"))


@pytest.mark.fast("True")
@pytest.mark.parametrize("resumed", [False, True])
def test_each_switch_that_acted_is_reported_once(resumed):
    def make():
        mapping, late = PrecisionSwitch({"head": "bf16", "mlp": "qaf"}, step=3), PrecisionSwitch("bf16", step=100)
        return [mapping, QAFSwitch(at=0.25), QAFSwitch(at=0.25), late]

    switches = make()
    fit_fp4(*switches, max_steps=8, keep="trained")
    if resumed:
        switches = make()
        fit_fp4(*switches, max_steps=8, ckpt_path="5.ckpt")
    made = trainer(None, callbacks=list(switches))
    expected = [
        {"step": 2, "from": "fqt", "to": "qaf", "why": "at=0.25"},
        {"step": 3, "from": "head: nvfp4, mlp: nvfp4", "to": "head: bf16, mlp: qaf", "why": "step=3"},
    ]
    assert switches[0].report_data(made) == {"precision_switches": expected}
    ((section,), *others) = [switch.report_sections(made) for switch in switches]
    assert [list(row) for row in section.blocks[0].rows] == [list(record.values()) for record in expected]
    assert others == [[], [], []], "said more than once"


def test_nothing_to_report():
    switch = QAFSwitch(step=100)
    fit_fp4(switch)
    made = trainer(None, callbacks=[switch])
    assert (switch.report_data(made), switch.report_sections(made)) == ({}, [])
