"""Amaxes of gradients follow what the loss is multiplied by: the loss scale over the accumulated micro-batches.

Each step has the same gradient: batches are equal, and the learning rate is 0.
"""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_lowbit import ConservativeGradScaler, FP8Precision, SpikeRollback, StaticGradScaler
from tests.lightning_imports import Callback, pytorch, quiet_trainer
from tests.precision.base.models import Classifier
from tests.precision.fp16.runs import moving, static
from tests.precision.regression_model import On
from tests.tables import each

Scheduler = pytorch.callbacks.GradientAccumulationScheduler
X = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X.repeat(12, 1), X[:, :8].argmax(1).repeat(12))  # 12 equal batches


class Net(Classifier):
    """Notes the norms of the gradients of its first layer; its loss is multiplied by what ``factors`` has per step."""

    def __init__(self, factors=lambda step: 1.0, manual=False):
        super().__init__(rate=0.0, momentum=0)
        self.norms = []
        self.factors, self.automatic_optimization = factors, not manual

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx) * self.factors(self.trainer.global_step)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def on_before_optimizer_step(self, optimizer):
        factor = self.factors(self.trainer.global_step)
        self.norms.append(self.net[0].weight.grad.norm().item() / factor)


def fit(plugin, *callbacks, model=None, ckpt_path=None, **kwargs):
    model = model or Net()
    trainer = quiet_trainer(plugin, callbacks=[*callbacks], **{"max_epochs": 4, **kwargs})
    trainer.fit(model, DataLoader(DATA, batch_size=16), ckpt_path=ckpt_path)
    return model.norms


def delayed(**kwargs):
    return FP8Precision("delayed", **{"compute_dtype": "fp32", **kwargs})


def assert_constant(norms):
    """The first step scales by its own amaxes."""
    assert norms == pytest.approx([norms[0]] * len(norms), rel=5e-3), "gradients saturate, or lose digits"


class Accumulating(Callback):
    """Sets ``accumulate_grad_batches`` by the batches that came before."""

    def __init__(self, numbers, hook="on_train_batch_start"):
        self.numbers, self.batches = numbers, 0
        setattr(self, hook, self.change)

    def change(self, trainer, *_):
        trainer.accumulate_grad_batches = self.numbers.get(self.batches, trainer.accumulate_grad_batches)
        self.batches += 1


@each(
    "make",
    [
        lambda: Scheduler({0: 1, 1: 12, 2: 3, 3: 4}),
        lambda: Scheduler({0: 12, 3: 1}),
        lambda: Accumulating({0: 6, 2: 2, 25: 1}),  # within a step
        lambda: Accumulating({0: 6, 24: 1, 30: 2}),
        lambda: Accumulating({0: 4, 2: 1}, "on_train_epoch_end"),
        lambda: Accumulating({0: 4, 2: 1}, "on_train_epoch_start"),
    ],
    fast=3,
)
def test_another_number_of_micro_batches(make):
    change = make()
    norms = fit(delayed(), change)
    if getattr(change, "numbers", {}).get(2) == 2:  # the step in which it changes adds losses of both sizes
        norms = norms[1:]
    assert_constant(norms)


def growing():
    return moving(growth_interval=1, growth_factor=1.5, init_scale=2.0**4)


@each(
    "scaler, places",
    [
        (growing, ["start 2"]),
        (growing, ["end 0", "end 1", "end 2", "start 1", "start 3"]),
        (None, ["end 0", "end 1", "end 2", "start 1", "start 2", "start 3"]),
    ],
    fast=1,
)
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.filterwarnings("ignore:The checkpoint was trained otherwise")
def test_a_run_resumed_where_it_changes(scaler, places):
    """Lightning's scheduler leaves its number aside in the rest of an epoch that is resumed, or adds fewer losses: the
    norms are those of scaling by the tensors themselves."""
    settings = {"compute_dtype": "fp16", "scaler": scaler} if scaler else {"compute_dtype": "fp32"}

    def resume(scaling, *callbacks, **kwargs):
        own = {name: value() if callable(value) else value for name, value in settings.items()}
        return fit(FP8Precision(scaling, **own), *callbacks, limit_train_batches=6, **kwargs)

    def changes():
        return Scheduler({0: 3, 1: 1, 2: 2, 3: 6})

    def save(place, trainer, batch):
        if batch in (None, 5):
            trainer.save_checkpoint(f"{place} {trainer.current_epoch}.ckpt")

    keep = On(
        on_train_epoch_start=lambda trainer, *_: save("start", trainer, None),
        on_train_batch_end=lambda trainer, *rest: save("end", trainer, rest[-1]),
    )
    whole = resume("delayed", changes(), keep)
    assert_constant(whole)
    assert resume("delayed", changes(), ckpt_path="end 0.ckpt") == whole[2:], "not to the bit"
    for place in places:
        found, expected = (resume(scaling, changes(), ckpt_path=f"{place}.ckpt") for scaling in ("delayed", "current"))
        assert found == pytest.approx(expected, rel=1e-2), place
    assert_constant(resume("delayed", ckpt_path="end 1.ckpt", accumulate_grad_batches=6))


class Setting(Callback):
    def on_train_batch_start(self, trainer, *_):
        plugin = trainer.precision_plugin
        if trainer.global_step == 4:
            plugin.scaler = static(2.0**16)
        if trainer.global_step == 8:
            plugin.scaler = ConservativeGradScaler(init_scale=2.0**6, device="cpu")
        if trainer.global_step == 12:
            plugin.scaler.update(2.0**12)


def overflow(trainer, pl_module):
    if trainer.global_step in (5, 9):
        pl_module.net[2].bias.grad[0] = torch.inf


OVERFLOW = On(on_after_backward=overflow)


@each(
    ("scaler", "callbacks", "manual"),
    [
        (lambda: moving(growth_interval=2, growth_factor=1.5), [OVERFLOW, Scheduler({0: 1, 1: 3, 2: 1})], False),
        (lambda: static(2.0**12), [], False),
        (lambda: static(2.0**12), [], True),
        (lambda: StaticGradScaler(2.0**8, device="cpu"), [Setting()], False),
        (lambda: StaticGradScaler(2.0**8, device="cpu"), [Setting()], True),
        (lambda: moving(growth_interval=1, cap=2.0**14), [], False),
        (lambda: moving(growth_interval=1, cap=2.0**14), [], True),
        (lambda: moving(growth_interval=3, cooldown=0), [OVERFLOW], False),
        (lambda: moving(growth_interval=3, cooldown=0), [OVERFLOW], True),
    ],
    fast=2,
)
def test_another_loss_scale(scaler, callbacks, manual):
    plugin = delayed(compute_dtype="fp16", scaler=scaler())
    norms = fit(plugin, *callbacks, model=Net(manual=manual), max_epochs=3 if len(callbacks) == 2 else 2)
    assert_constant([norm for norm in norms if norm < 1e3])
    assert bool(plugin.skipped_steps) == (OVERFLOW in callbacks)


def test_a_loss_of_another_size_in_training_step_is_told():
    def tell(trainer, *_):
        if trainer.global_step in (0, 6):
            trainer.precision_plugin.scale_gradients(1.0 if trainer.global_step == 0 else 256.0)

    def factor(step):
        return 1.0 if step >= 6 else 1 / 256

    for manual in (False, True):
        assert_constant(fit(delayed(), On(on_train_batch_start=tell), model=Net(factor, manual), max_epochs=1))
        untold = fit(delayed(), model=Net(factor, manual), max_epochs=1)
        assert untold[6] < 0.5 * untold[5], "the case does not tell"
    with pytest.raises(ValueError, match="factor is what the loss has grown by, above 0; got 0"):
        delayed().scale_gradients(0)


@each("scaler", [lambda: moving(growth_interval=5), lambda: None], fast=1)
def test_a_rollback_restores_the_scale_that_its_amaxes_have(scaler):
    class Spike(Net):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * float("nan") if self.trainer.global_step == 14 else loss

    own = scaler()
    plugin = delayed(compute_dtype="fp32" if own is None else "fp16", scaler=own)
    rollback = SpikeRollback(warmup_steps=2, history=5, every_n_steps=12, good_for=4)
    with pytest.warns(UserWarning, match=r"SpikeRollback: The loss of step 14 is nan"):
        norms = fit(plugin, rollback, Scheduler({0: 12, 2: 1}), model=Spike())
    assert len(norms) == 26
    assert_constant([norm for norm in norms if norm == norm])
