"""Norms of gradients that are logged, under fp16, clipping and accumulation."""

import math

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import get_total_norm

from lightning_lowbit import GradientNormMonitor, LowBitPrecision, StaticGradScaler
from tests.callbacks.monitors.gradient_norm.runs import RULES, Planned, assert_same, fit, sgd
from tests.curves import assert_curves
from tests.lightning_imports import MixedPrecision
from tests.tables import each


def expected(seen, every=1, clips=False):
    return {
        step: {"spikes": 0.0, **{name: value for name, value in norms.items() if clips or not name.startswith("clip")}}
        for step, norms in seen.items()
        if step % every == 0
    }


@each("every, every_n_steps, accumulate", [(1, None, 1), (1, 2, 1), (3, None, 1), (3, 1, 1), (3, 2, 1), (2, None, 3)])
def test_curves_are_what_torch_says(every, every_n_steps, accumulate):
    """Of all micro-batches together, in logged steps alone."""
    model = Planned({1: 0.3, 3: 2.0})
    monitor = GradientNormMonitor([r"layer\.\d"], every_n_steps)
    found = fit(model, monitor, log_every_n_steps=every, accumulate_grad_batches=accumulate)
    assert sorted(found) == list(range(every, 7, every))
    assert_same(found, expected(model.seen, every))


@each("algorithm, clip", [("norm", 0.1), ("value", 0.03)])
def test_clipped(algorithm, clip):
    model = Planned({2: 2.0})
    found = fit(model, gradient_clip_algorithm=algorithm, gradient_clip_val=clip)
    assert_same(found, expected(model.seen, clips=True))
    assert found[3]["clipped"] < found[3]["unclipped"] / 5, "the run does not clip"


def test_clipped_by_a_hook():
    class Halves(Planned):
        def configure_gradient_clipping(self, optimizer, *_, **__):
            for parameter in self.parameters():
                parameter.grad /= 2

    model = Halves()
    found = fit(model)
    assert_same(found, expected(model.seen, clips=True))
    assert all(row["clipped"] == pytest.approx(row["unclipped"] / 2) for row in found.values())


@each("make, clip", [*((make, None) for make in RULES.values()), (RULES["Stable-SPAM"], 0.05)], fast=2)
def test_used_is_what_the_rules_leave(make, clip):
    class Rules(Planned):
        def on_train_batch_end(self, *_):
            super().on_train_batch_end()
            rows = self.optimizers().optimizer.gradient_statistics()
            after = [p.grad.norm() if rows[p].norm_after.isnan() else rows[p].norm_after for p in self.parameters()]
            for name, norms in (("used", after), ("used/layer.0", after[:2]), ("used/layer.1", after[2:])):
                self.seen[self.trainer.global_step][name] = float(torch.stack(norms).norm())

    model = Rules({3: 30.0}, make)
    found = fit(model, GradientNormMonitor([r"layer\.\d"], limit=None), gradient_clip_val=clip)
    assert_same(found, expected(model.seen, clips=clip is not None))
    ratio = found[4]["used"] / found[4]["unclipped" if clip is None else "clipped"]
    if make is RULES["without rules"]:
        assert ratio == pytest.approx(1, rel=1e-6)
    elif clip is None:
        assert ratio < 0.9, "the rules did nothing"


@each("optimizer", [RULES["Stable-SPAM"], sgd], fast=1)
def test_the_norm_does_not_depend_on_the_scale_of_the_loss(optimizer):
    """The backward pass computes in fp16, where powers of two change no digit."""
    curves = []
    for scale in (2.0**4, 2.0**11):
        torch.manual_seed(1)
        plugin = LowBitPrecision("bf16", compute_dtype="fp16", scaler=StaticGradScaler(scale, device="cpu"))
        model = Planned(make_optimizer=optimizer)
        curves.append(fit(model, GradientNormMonitor([r"layer\.\d"]), plugins=[plugin], gradient_clip_val=0.1))
    # Below 6e-8 fp16 has no numbers: the smaller scale loses some of the smallest gradients.
    assert_curves(curves[1], curves[0], rtol=1e-3)
    found = {step: {n: v for n, v in row.items() if "used" not in n} for step, row in curves[1].items()}
    assert_same(found, expected(model.seen, clips=True))


def test_a_fused_optimizer_unscales_within_its_step():
    """Under Lightning's own plugin, where gradients are still scaled when they are measured."""
    model = Planned(make_optimizer=lambda module: torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True))
    found = fit(model, plugins=[MixedPrecision("16-mixed", "cpu", scaler=GradScaler("cpu", init_scale=2.0**10))])
    for row in model.seen.values():
        row.update({name: value / 2**10 for name, value in row.items() if name.startswith("unclipped")})
    assert_same(found, expected(model.seen))


class Quiet(Planned):
    """Keeps norms that ``training_step`` notes, and no others."""

    def on_before_optimizer_step(self, optimizer):
        pass

    def on_train_batch_end(self, *_):
        pass


def test_gradients_of_other_kinds():
    """Sparse, of float64, of bfloat16, missing, frozen, and shared: each counts once, or not at all."""

    class Kinds(Quiet):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(7, 4, sparse=True)
            self.wide, self.narrow = nn.Linear(4, 4).double(), nn.Linear(4, 4).bfloat16()
            self.idle, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
            self.tied = nn.Linear(4, 4)
            self.tied.weight = self.idle.weight

        def training_step(self, batch, batch_idx):
            x = self.frozen(self.table(torch.tensor([1, 1, 4])))
            return (self.wide(x.double()).float() + self.narrow(x.bfloat16()).float() + self.tied(x)).square().mean()

        def on_before_optimizer_step(self, optimizer):
            gradients = {name: p.grad for name, p in self.named_parameters() if p.grad is not None}
            dense = {name: g.to_dense().float() for name, g in gradients.items()}
            layers = {name: [g for n, g in dense.items() if n.startswith(name)] for name in ("table", "wide", "narrow")}
            layers |= {"tied": [dense["idle.weight"], dense["tied.bias"]], "idle": [dense["idle.weight"]]}
            found = {f"unclipped/{name}": float(get_total_norm(of_one)) for name, of_one in layers.items()}
            self.seen[self.trainer.global_step + 1] = {"unclipped": float(get_total_norm([*dense.values()])), **found}

    model = Kinds()
    found = fit(model, GradientNormMonitor(["table", "wide", "narrow", "idle", "tied", "frozen", "layer"]))
    for row in found.values():
        for number in (0, 1):
            assert row.pop(f"unclipped/layer.{number}") == 0, "a layer without gradients has a norm"
    assert_same(found, expected(model.seen))


@each("precision", [None, "bf16-true"])
def test_optimizers_that_step_in_one_batch_count_together(precision):
    """Norms are of float32, whatever dtype is the default in `training_step`, where such optimizers step."""

    class Manual(Quiet):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            squares = []
            for number, optimizer in enumerate(self.optimizers()):
                optimizer.zero_grad()
                self.manual_backward(self.layer(batch).square().mean() * (number + 1))
                self.clip_gradients(optimizer, 0.05, "norm")
                squares.append(self.norm(self.layer[number]) ** 2)
                optimizer.step()
                optimizer.zero_grad()
            of_layers = {f"unclipped/layer.{number}": math.sqrt(square) for number, square in enumerate(squares)}
            self.seen[self.trainer.global_step] = {"unclipped": math.sqrt(sum(squares)), **of_layers}

        def configure_gradient_clipping(self, *_, **__):
            raise AssertionError("Lightning clips nothing in manual optimization")

        def configure_optimizers(self):
            return [sgd(layer) for layer in self.layer]

    model = Manual()
    found = fit(model, max_steps=8, log_every_n_steps=2, precision=precision)
    assert sorted(model.seen) == [2, 4, 6, 8]
    assert_same(found, {step: {**model.seen[2 * step], "spikes": 0.0} for step in (2, 4)})


def test_a_batch_without_a_step_shows_no_norm():
    """Not even that of the step before it, which Lightning would go on to log."""

    class Skips(Planned):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.manual_backward(super().training_step(batch, batch_idx))
            if batch_idx % 2 == 0:
                self.optimizers().step()

    found = fit(Skips(), GradientNormMonitor(), max_steps=-1, max_epochs=1, limit_train_batches=6)
    assert sorted(found) == [1, 3, 5]
