"""fp16 with other ways to train: manual optimization, several optimizers, closures; and what is refused."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, AdamW

from lightning_lowbit import (
    ConservativeGradScaler,
    FP4Precision,
    FP8Precision,
    LowBitPrecision,
    ShardedConservativeGradScaler,
    StableSPAM,
)
from tests.lightning_imports import MisconfigurationException, MixedPrecision
from tests.precision.fp16.runs import MOVING, Overflowing, assert_same, fp16, moving, static, train
from tests.precision.regression_model import Regression, fitted, flat, state, trainer
from tests.tables import each


class Absent(Regression):
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


X = torch.ones(2, 16)


class Manual(Overflowing):
    """Manual optimization by two optimizers: ``step`` takes the model, both of them and the number of the batch.

    Attributes:
        norms: of an optimizer's gradients, as it steps.
    """

    def __init__(self, step, set_to_none=True):
        super().__init__()
        self.automatic_optimization = False
        self.step, self.set_to_none = step, set_to_none
        self.norms = []

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        for optimizer in (first, second):
            optimizer.zero_grad(set_to_none=self.set_to_none)
        self.step(self, first, second, batch_idx)

    def lower(self, output):
        self.manual_backward(output.float().square().mean())

    def on_before_optimizer_step(self, optimizer):
        self.norms.append(norm_of(optimizer))

    def configure_optimizers(self):
        return [SGD(p, 0.05) for p in (self.first.parameters(), [*self.mlp.parameters(), *self.head.parameters()])]


def norm_of(optimizer):
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return torch.nn.utils.get_total_norm(gradients).item()


def trained(scaler, step, set_to_none=True):
    how = {"max_steps": 8, "limit_train_batches": 4, "max_epochs": 1}
    return fitted(fp16(scaler), Manual(step, set_to_none), **how).lightning_module


def test_two_optimizers_share_a_backward_pass():
    def step(model, first, second, place):
        model.manual_backward(model.loss(8 * place, 1.0))
        first.step()
        second.step()

    found, expected = (trained(scaler, step) for scaler in (moving(growth_interval=1, cap=2.0**14), static()))
    assert torch.equal(flat(found), flat(expected)), "a scale is left in"


@each("between", [False, True], fast=1)
def test_clipping_by_hand_clips_true_gradients(between):
    """Without a step in between, so that the scale moves only after both."""

    def step(model, first, second, _):
        for is_due, layer in ((between, model.first), (not between, model.head)):
            model.lower(layer(X))
            if is_due:
                model.clip_gradients(first, gradient_clip_val=1e-3)
        first.step()
        second.step()

    found = trained(moving(growth_interval=1, cap=2.0**12), step).norms
    assert found == trained(static(1.0), step).norms, "a scale is left in"
    assert found[::2] == pytest.approx([1e-3] * 4, rel=1e-3), "those that are clipped"
    assert min(found[1::2]) > 0.1, "those that are not"


@each("set_to_none, with_other", [(True, False), (False, True), (True, True)], fast=2)
def test_gradients_are_unscaled_after_a_step_that_was_left_out(set_to_none, with_other):
    def step(model, first, second, place):
        model.manual_backward(model.loss(8 * place, 1.0))
        model.clip_gradients(first, gradient_clip_val=1e9)
        norms.append(norm_of(first))
        if place != 1:
            first.step()
        if with_other:  # after its step the scale moves
            second.step()

    norms = []
    trained(moving(growth_interval=1, cap=2.0**12), step, set_to_none)
    trained(static(), step, set_to_none)
    assert len(norms) == 8
    assert norms[:4] == pytest.approx(norms[4:], rel=0.02), "a scale is left in"


def test_clipped_gradients_keep_their_size_and_no_scaled_ones_are_added_to_them():
    """The first optimizer steps after a step of the other one and another backward pass, of it or not."""

    def step(of_first, model, first, second, _):
        model.lower(model.head(model.first(X)))
        model.clip_gradients(first, gradient_clip_val=1e-3)
        second.step()
        model.lower(model.head(model.first(X) if of_first else X))
        first.step()

    model = trained(moving(growth_interval=1, cap=2.0**12), partial(step, False))
    assert model.norms[1::2] == pytest.approx([1e-3] * 4, rel=1e-3)
    with pytest.raises(MisconfigurationException, match="Call step.. or zero_grad"):
        trained(static(), partial(step, True))


@pytest.mark.fast("make2-0", "StableSPAM-0")
@pytest.mark.parametrize(
    ("make", "own"),
    [
        (partial(SGD, lr=0.05), 0),
        (partial(AdamW, lr=1e-3), 0),
        (partial(AdamW, lr=1e-3, fused=True), 0),
        (partial(SGD, lr=0.05, momentum=0.9, fused=True), 1),  # until it has a momentum
        (StableSPAM, 0),
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


def test_what_fp16_cannot_train_is_refused():
    model = Regression()
    needs = r"ShardedConservativeGradScaler needs .*SingleDeviceStrategy has none.*asks all ranks"
    with pytest.raises(MisconfigurationException, match=needs):
        fitted(fp16(ShardedConservativeGradScaler(device="cpu")), model)
    model.mlp.half().requires_grad_(False)
    model.head.half()
    with pytest.raises(ValueError, match=r"parameters in float32.* head.weight is in float16.*Call model.float\(\)"):
        fitted(fp16(), model)
    assert type(model.head) is torch.nn.Linear, "a refused model has been changed"
    with pytest.raises(MisconfigurationException, match=r"LBFGS .* compute_dtype='bf16' or 'fp32', or use another"):
        fitted(fp16(), Overflowing(make=torch.optim.LBFGS))


def test_a_run_that_broke_off_in_a_step_leaves_nothing_behind():
    class Breaks(Overflowing):
        def on_before_optimizer_step(self, optimizer):
            if self.trainer.global_step == 3:
                raise RuntimeError("in the midst of a step")

    plugin = fp16(moving())
    with pytest.raises(RuntimeError, match="in the midst"):
        train(plugin, Breaks())
    assert_same(train(plugin).scalers, train(fp16(moving())).scalers, "scaler")


def test_a_checkpoint_without_the_plugin_says_where_the_scale_starts():
    made = fitted(MixedPrecision("16-mixed", "cpu", scaler=GradScaler("cpu", init_scale=4.0)))
    made.save_checkpoint("other.ckpt")
    with pytest.warns(UserWarning, match="holds no state of lightning_lowbit .* The loss scale starts at 1024."):
        fitted(fp16(moving()), ckpt_path="other.ckpt", max_steps=3)


@each("make", [lambda: moving(hysteresis=2), lambda: GradScaler("cpu", **MOVING)], fast=1)
def test_another_run_with_a_plugin_or_a_scaler_starts_from_the_beginning(make):
    plugin, other = (FP8Precision(history=3, compute_dtype="fp16", scaler=scaler) for scaler in [make()] * 2)
    first, *others = (train(one, Overflowing((1, 4)), 6) for one in (plugin, plugin, other))
    assert plugin.skipped_steps == 2, "those of the first run are counted"
    for seen in others:
        assert_same([seen.scalers, seen.saved, seen.weights], [first.scalers, first.saved, first.weights])


def test_fit_validate_fit_on_one_trainer():
    plugin, model = fp16(moving()), Overflowing((1,))
    made = fitted(plugin, model, limit_train_batches=4, limit_val_batches=2, num_sanity_val_steps=0)
    before = state(plugin)
    made.validate(model, verbose=False)
    made.predict(model)
    assert_same(state(plugin), before, "evaluation moves it: state")
    assert torch.stack(model.val_losses).isfinite().all()
    made.fit_loop.epoch_loop.max_steps = 4
    made.fit(model)
    assert (plugin.step, plugin.skipped_steps.item()) == (4, 1)


@each("arguments, message", [
    ({"scaler": moving()}, r"for compute_dtype='fp16'; got 'auto'.* leave out scaler=ConservativeGradScaler, or"),
    ({"compute_dtype": "fp32", "scaler": static()}, r"got 'fp32'.* leave out scaler=StaticGradScaler, or train"),
    ({"compute_dtype": "fp16", "scaler": 2.0**16}, r"scaler is a torch.amp.GradScaler, or None; got 65536.0"),
    ({"compute_dtype": "fp16", "scaler": GradScaler}, r"scaler is a torch.amp.GradScaler, or None; got <class"),
    ({"compute_dtype": "fp16", "scaler": "default"}, r"scaler is a torch.amp.GradScaler, or None; got 'default'"),
    ({"compute_dtype": "fp16", "scaler": GradScaler("cpu", enabled=False)},
     r"The scaler GradScaler is disabled, and fp16 needs one.* device='cpu'; or leave out enabled=False"),
    ({"compute_dtype": "fp16", "scaler": ConservativeGradScaler(device="cpu", enabled=False)},
     r"The scaler ConservativeGradScaler is disabled"),
])  # fmt: skip
def test_bad_arguments_say_what_to_do(arguments, message):
    with pytest.raises(ValueError, match=message):
        FP4Precision(**arguments)
