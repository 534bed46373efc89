"""fp16 with other ways to train: manual optimization, several optimizers, closures."""

import pytest
import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, AdamW

from lightning_lowbit import FP8Precision, LowBitPrecision, StableSPAM
from tests.lightning_imports import MisconfigurationException, MixedPrecision
from tests.precision.fp16.runs import MOVING, Overflowing, assert_same, fp16, moving, static, train
from tests.precision.regression_model import Regression, flat, state, trainer
from tests.tables import each


class Absent(Regression):
    """Has no loss in some training steps."""

    def __init__(self, *absent):
        super().__init__()
        self.absent = absent

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx in self.absent else loss


@pytest.mark.pairwise(1)
@pytest.mark.filterwarnings("ignore:.*training_step.* returned .None")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("make", [lambda: moving(), lambda: GradScaler("cpu", **MOVING)], ids=["conservative", "torch"])
@pytest.mark.parametrize("absent", [(0,), (0, 1), (3,), (2, 3)], ids=str)
def test_steps_without_a_loss(absent, make, accumulate):
    """As without a scale: the optimizer gets what the other micro-batches left, or nothing."""
    plugin = fp16(make())
    found = train(plugin, Absent(*absent), steps=4, accumulate_grad_batches=accumulate)
    assert plugin.skipped_steps == 0
    expected = train(LowBitPrecision("bf16"), Absent(*absent), steps=4, accumulate_grad_batches=accumulate)
    moves = [
        [not torch.equal(a, b) for a, b in zip(weights, weights[1:], strict=False)]
        for weights in ([flat(Regression()), *seen.weights] for seen in (found, expected))
    ]
    assert moves[0] == moves[1], "other steps than in bf16 move the weights"
    assert any(moves[0])


class Manual(Overflowing):
    """Manual optimization, by two optimizers with the gradients of one backward pass."""

    def __init__(self, at=()):
        super().__init__(at)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(self.loss(8 * batch_idx, 1.0))
        first.step()
        second.step()

    def configure_optimizers(self):
        return [SGD(p, 0.05) for p in (self.first.parameters(), [*self.mlp.parameters(), *self.head.parameters()])]


def test_two_optimizers_share_a_backward_pass():
    """Also where the scale changes between their steps: gradients have that of the backward pass."""

    def weights(scaler):
        model = Manual()
        trainer(fp16(scaler), max_steps=8, limit_train_batches=4).fit(model)
        return flat(model)

    assert torch.equal(weights(moving(growth_interval=1, cap=2.0**14)), weights(static())), "a scale is left in"


class ClippedByHand(Manual):
    """Clips one of two optimizers by hand, between its backward pass and that of the other, or after both.

    Attributes:
        norms: of both optimizers' gradients, as they step.
    """

    def __init__(self, between):
        super().__init__()
        self.between = between
        self.norms = []

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        x = torch.ones(2, 16)
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(self.first(x).float().square().mean())
        if self.between:
            self.clip_gradients(first, gradient_clip_val=1e-3)
        self.manual_backward(self.head(x).float().square().mean())
        if not self.between:
            self.clip_gradients(first, gradient_clip_val=1e-3)
        first.step()
        second.step()

    def on_before_optimizer_step(self, optimizer):
        found = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self.norms.append(torch.nn.utils.get_total_norm(found).item())


@pytest.mark.parametrize("between", [False, True])
def test_clipping_by_hand_clips_true_gradients(between):
    """Without a step in between, so that the scale moves only after both."""

    def norms(scaler):
        model = ClippedByHand(between)
        trainer(fp16(scaler), max_steps=8, limit_train_batches=4).fit(model)
        return model.norms

    found = norms(moving(growth_interval=1, cap=2.0**12))
    assert found == norms(static(1.0)), "a scale is left in"
    assert found[::2] == pytest.approx([1e-3] * 4, rel=1e-3), "those that are clipped"
    assert min(found[1::2]) > 0.1, "those that are not"


class LeftOut(Manual):
    """Clips the first optimizer by hand, and leaves out its step in the second of four batches.

    Attributes:
        norms: of its gradients after clipping.
    """

    def __init__(self, set_to_none, with_other):
        super().__init__()
        self.set_to_none, self.with_other = set_to_none, with_other
        self.norms = []

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        first.zero_grad(set_to_none=self.set_to_none)
        second.zero_grad()
        self.manual_backward(self.loss(8 * batch_idx, 1.0))
        self.clip_gradients(first, gradient_clip_val=1e9)
        self.norms.append(torch.nn.utils.get_total_norm([p.grad for p in self.first.parameters()]).item())
        if batch_idx != 1:
            first.step()
        if self.with_other:  # after its step the scale moves
            second.step()


@each("set_to_none, with_other", [(True, False), (False, True), (True, True)])
def test_gradients_are_unscaled_after_a_step_that_was_left_out(set_to_none, with_other):
    def norms(scaler):
        model = LeftOut(set_to_none, with_other)
        trainer(fp16(scaler), max_steps=8, limit_train_batches=4, max_epochs=1).fit(model)
        return model.norms

    found = norms(moving(growth_interval=1, cap=2.0**12))
    assert len(found) == 4
    assert found == pytest.approx(norms(static()), rel=0.02), "a scale is left in"


class Late(ClippedByHand):
    """Clips the first optimizer, steps the second, and steps the first after another backward pass, maybe its own."""

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        x = torch.ones(2, 16)
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(self.head(self.first(x)).float().square().mean())
        self.clip_gradients(first, gradient_clip_val=1e-3)
        second.step()
        self.manual_backward(self.head(x if self.between else self.first(x)).float().square().mean())
        first.step()


def test_clipped_gradients_keep_their_size_while_another_optimizer_steps():
    model = Late(between=True)
    trainer(fp16(moving(growth_interval=1, cap=2.0**12)), max_steps=8, limit_train_batches=4).fit(model)
    assert model.norms[1::2] == pytest.approx([1e-3] * 4, rel=1e-3)


def test_scaled_gradients_are_not_added_to_clipped_ones():
    with pytest.raises(MisconfigurationException, match="Call step.. or zero_grad"):
        trainer(fp16(static()), max_steps=8, limit_train_batches=4).fit(Late(between=False))


@pytest.mark.parametrize(
    ("make", "own"),
    [
        (lambda p: SGD(p, 0.05), 0),
        (lambda p: AdamW(p, lr=1e-3), 0),
        (lambda p: AdamW(p, lr=1e-3, fused=True), 0),
        (lambda p: SGD(p, 0.05, momentum=0.9, fused=True), 1),  # until it has a momentum
        (lambda p: StableSPAM(p), 0),
    ],
)
def test_the_host_waits_no_more_often_than_with_lightnings_plugin(make, own, monkeypatch):
    """Numbers that are read between backward pass and end of the step, over eight steps of which none is skipped."""
    read = []
    for name in ("item", "__bool__", "tolist"):
        original = getattr(Tensor, name)
        monkeypatch.setattr(Tensor, name, lambda self, name=name, of=original: (read.append(name), of(self))[1])
    counts = []
    for plugin in (MixedPrecision("16-mixed", "cpu", scaler=GradScaler("cpu", **MOVING)), fp16(moving())):
        model = Overflowing(make=make)
        model.log = lambda *_, **__: None
        plugin.optimizer_step = watched(plugin.optimizer_step, read)
        trainer(plugin, max_steps=8, limit_train_batches=8).fit(model)
        counts.append(len(plugin.optimizer_step.found))
    assert counts[1] <= counts[0] + own, f"read {counts[1]} numbers, Lightning's {counts[0]}"


def watched(step, read):
    """An optimizer step that notes what was read in it, its closure left out."""
    found = []

    def run(optimizer, model, closure, **kwargs):
        def closed():
            result = closure()
            read.clear()
            return result

        result = step(optimizer, model, closed, **kwargs)
        found.extend(read)
        return result

    run.found = found
    return run


def test_parameters_in_float16_are_refused_unless_they_are_frozen():
    model = Regression()
    model.mlp.half().requires_grad_(False)
    model.head.half()
    with pytest.raises(ValueError, match=r"parameters in float32.* head.weight is in float16.*Call model.float\(\)"):
        trainer(fp16()).fit(model)
    assert type(model.head) is torch.nn.Linear, "a refused model has been changed"


def test_a_run_that_broke_off_in_a_step_leaves_nothing_behind():
    class Breaks(Overflowing):
        def on_before_optimizer_step(self, optimizer):
            if self.trainer.global_step == 3:
                raise RuntimeError("in the midst of a step")

    plugin = fp16(moving())
    with pytest.raises(RuntimeError, match="in the midst"):
        train(plugin, Breaks())
    assert_same(train(plugin).scalers, train(fp16(moving())).scalers, "scaler")


def test_two_plugins_with_one_scaler_start_each_from_the_beginning():
    scaler = moving()
    plugins = [fp16(scaler), fp16(scaler)]
    first, second = (train(plugin, Overflowing((1, 4))) for plugin in plugins)
    assert_same(second.scalers, first.scalers, "scaler")
    assert_same(second.weights, first.weights, "weights")


def test_a_checkpoint_without_the_plugin_says_where_the_scale_starts():
    model = Overflowing()
    made = trainer(MixedPrecision("16-mixed", "cpu", scaler=GradScaler("cpu", init_scale=4.0)))
    made.fit(model)
    made.save_checkpoint("other.ckpt")
    with pytest.warns(UserWarning, match="holds no state of lightning_lowbit .* The loss scale starts at 1024."):
        trainer(fp16(moving()), max_steps=3).fit(Overflowing(), ckpt_path="other.ckpt", weights_only=True)


def test_lbfgs_is_refused():
    model = Overflowing(make=torch.optim.LBFGS)
    with pytest.raises(MisconfigurationException, match=r"LBFGS .* compute_dtype='bf16' or 'fp32', or use another"):
        trainer(fp16()).fit(model)


@pytest.mark.parametrize("make", [lambda: moving(hysteresis=2), lambda: GradScaler("cpu", **MOVING)])
def test_one_plugin_in_two_runs_starts_each_from_the_beginning(make):
    plugin = FP8Precision(history=3, compute_dtype="fp16", scaler=make())
    first = train(plugin, Overflowing((1, 4)))
    second = train(plugin, Overflowing((1, 4)))
    assert plugin.skipped_steps == 2, "those of the first run are counted"
    assert_same(second.scalers, first.scalers, "scaler")
    assert_same(second.saved, first.saved, "state")
    assert_same(second.weights, first.weights, "weights")


def test_fit_validate_fit_on_one_trainer():
    plugin, model = fp16(moving()), Overflowing((1,))
    made = trainer(plugin, limit_train_batches=4, limit_val_batches=2, num_sanity_val_steps=0)
    made.fit(model)
    before = state(plugin)
    made.validate(model, verbose=False)
    made.predict(model)
    assert_same(state(plugin), before, "evaluation moves it: state")
    assert torch.stack(model.val_losses).isfinite().all()
    made.fit_loop.epoch_loop.max_steps = 4
    made.fit(model)
    assert (plugin.step, plugin.skipped_steps.item()) == (4, 1)
