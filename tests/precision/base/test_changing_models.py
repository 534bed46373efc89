"""Models whose layers come and go while they are trained."""

import copy
import itertools
import re

import pytest
import torch
from torch import nn

from lightning_lowbit import FP4Precision, FP8Precision, PrecisionSummary, restore
from lightning_lowbit.nn import QuantizedLayer
from tests.lightning_imports import BoringModel, Callback, quiet_trainer
from tests.precision.regression_model import On
from tests.tables import each


class Net(BoringModel):
    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))


class At(Callback):
    """Changes the model at the beginning of the second epoch, or in its second batch."""

    def __init__(self, change, hook="on_train_epoch_start", batch=0):
        self.change, self.batch = change, batch
        setattr(self, hook, self._do)

    def _do(self, trainer, pl_module, *args):
        if trainer.current_epoch == 1 and (not args or args[-1] == self.batch):
            self.change(pl_module)


def insert(net):
    net.layer.insert(2, nn.Linear(32, 32))


def replace(net):
    net.layer[4] = nn.Linear(32, 2)


def remove(net):
    del net.layer[2]


def teach(net):
    net.teacher = copy.deepcopy(net.layer)


def attend(net):
    net.attention = nn.MultiheadAttention(8, 2)


def rename(net):
    net.layer = nn.Sequential(*net.layer)


NEW = r"\(in high precision until the next fit converts them\)"
CHANGES = [
    (insert, [f"layer.2 {NEW}"]),
    (replace, [f"layer.4 {NEW}", r"layer.4 \(gone\)"]),
    (remove, [r": layer.2 \(gone\)"]),
    (teach, [r"teacher.0, teacher.2 \(copies, which keep their casts and phase", f"teacher.4 {NEW}"]),
    (attend, [f"attention, attention.out_proj {NEW}"]),
    (rename, []),
    (lambda net: net.layer[2].requires_grad_(False), []),
    (lambda net: setattr(net.layer[0], "bias", None), []),
]


def fit(told, model, *callbacks, **kwargs):
    told.clear()
    options = {"max_epochs": 3, "limit_train_batches": 3, "limit_val_batches": 0}
    plugin = kwargs.pop("plugin", FP4Precision("nvfp4", skip=["layer.4"], compute_dtype="bf16"))
    quiet_trainer(plugin, callbacks=[*callbacks], **{**options, **kwargs}).fit(model)
    return [message for message in told.messages if "layers have changed" in message]


WHEN = [
    (At, 3),
    (lambda change: At(change, "on_train_batch_start", 1), 2),  # in the last epoch, too
    (lambda change: At(change, "on_train_batch_end", 2), 2),
]


@each("when, case", itertools.product(WHEN, CHANGES), fast=len(CHANGES))
def test_layers_that_come_and_go_are_said_once(told, when, case):
    (at, epochs), (change, parts) = when, case
    lines = fit(told, Net(), at(change), max_epochs=epochs)
    assert len(lines) == bool(parts), lines
    for part in parts:
        assert re.search(part, lines[0]), lines


def test_a_new_layer_is_told_of_recorded_by_its_name_and_converted_by_the_next_fit(told):
    model, summary = Net(), PrecisionSummary(quiet=True)
    save = On(on_train_end=lambda trainer, _: trainer.save_checkpoint("grown.ckpt"))
    assert fit(told, model, summary, At(insert), save)
    assert type(model.layer[2]) is nn.Linear
    reasons = summary.report_data(None)["uncovered_because"]
    assert reasons["layer.2"].startswith("new since the model was converted")
    assert reasons["layer.5"] == "left out by skip or only"
    recorded = torch.load("grown.ckpt", weights_only=True)["lightning_lowbit"]["trained"]["layers"]
    names = [name for name, layer in model.named_modules() if isinstance(layer, QuantizedLayer)]
    assert [*recorded] == names == ["layer.0", "layer.3"]
    assert not fit(told, model, plugin=FP4Precision("nvfp4"))
    assert isinstance(model.layer[2], QuantizedLayer)


def bits(*quantized, gemms=None):
    """Per operand of square layers, each forward pass and weight gradient, and input gradients of all but the first,
    before a last one of another width that is not."""
    square, last = 2 * 32 * 32, 2 * 32 * 2
    gemms = gemms or [2, *[3] * (len(quantized) - 1)]
    sizes = [(count * square, 4.5 if low else 16) for count, low in zip(gemms, quantized, strict=True)]
    flops = [*sizes, (3 * last, 16)]
    return sum(size * width for size, width in flops) / sum(size for size, _ in flops)


@each("change, then", [
    (insert, bits(True, False, True)),
    (remove, bits(True)),
    (teach, bits(True, True)),
    (lambda net: setattr(net, "layer", nn.Sequential(net.layer[0], nn.Linear(32, 32), net.layer[4])),
     bits(True, False)),
    (lambda net: net.layer[0].requires_grad_(False), bits(True, True, gemms=[1, 2])),
], fast=2)  # fmt: skip
def test_the_average_over_the_run_counts_them(told, change, then):
    summary = PrecisionSummary(quiet=True)
    fit(told, Net(), summary, At(change))
    assert summary.average_bits() == pytest.approx((3 * bits(True, True) + 6 * then) / 9)
    other = PrecisionSummary(quiet=True)
    other.load_state_dict(summary.state_dict())
    other.counter, other._dtype = summary.counter, summary._dtype
    assert other.average_bits() == pytest.approx(summary.average_bits())


@pytest.mark.filterwarnings("ignore:You.re resuming from a checkpoint that ended before the epoch ended")
def test_a_run_that_resumes_within_an_epoch_is_counted_once(told, capsys):
    def save(trainer, *_):
        if trainer.global_step == 2:
            trainer.save_checkpoint("within.ckpt")

    fit(told, Net(), On(on_train_batch_end=save))
    options = {"max_epochs": 3, "limit_train_batches": 3, "limit_val_batches": 0}
    run = quiet_trainer(FP4Precision("nvfp4", skip=["layer.4"]), callbacks=[PrecisionSummary()], **options)
    run.fit(Net(), ckpt_path="within.ckpt")
    assert capsys.readouterr().out.count("Coverage: ") == 1


def test_casts_of_a_layer_that_is_gone_are_refused_and_not_recorded(told):
    def ask(trainer, _):
        if trainer.current_epoch == 1:
            plugin = trainer.precision_plugin
            with pytest.raises(ValueError, match=r"casts: the pattern 'layer\.2' matches"):
                plugin.set_casts({"layer.2": "bf16"})
            plugin.set_casts({"layer.0": "int4"})
            assert {*plugin.casts_of(".*")} == {"layer.0", "layer.4"}
            trainer.save_checkpoint("x.ckpt")

    for plugin in (FP4Precision("nvfp4", only=["layer"], quantize_output=True), FP8Precision("delayed")):
        model = Net()
        fit(
            told,
            model,
            At(lambda net: net.layer.__setitem__(2, nn.Linear(32, 32))),
            On(on_train_epoch_end=ask),
            plugin=plugin,
        )
        restored = restore(Net(), "x.ckpt")
        x = torch.randn(4, 32)
        assert type(restored.layer[2]) is nn.Linear
        assert [str(layer.casts) for layer in restored.layer[::4]] == [str(layer.casts) for layer in model.layer[::4]]
        assert restored(x).shape == (4, 2)


@each("change", [insert, replace, remove])
def test_histories_of_layers_that_stay_go_on_in_the_next_fit(change):
    model, plugin = Net(), FP8Precision("delayed", history=8)
    trainer = quiet_trainer(plugin, max_epochs=1, limit_train_batches=2, limit_val_batches=0)
    histories = []
    for epochs in (1, 2):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(model)
        histories.append(plugin.histories.state_dict()["amax_history"]["layer.0/fprop_x"])
        if epochs == 1:
            change(model)
    assert set(histories[0][-2:].tolist()) < set(histories[1].tolist())
