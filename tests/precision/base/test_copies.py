"""Copies of converted models: teachers, target networks, averages of weights."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from lightning_lowbit import FP4Precision, FP8Precision, LowBitPrecision, convert, restore
from lightning_lowbit.nn import AmaxHistories, LayerKeys
from tests.lightning_imports import Callback, pytorch, quiet_trainer
from tests.precision.base.models import Classifier
from tests.precision.regression_model import On
from tests.tables import each

X = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, X[:, :8].argmax(1))
LOADER = DataLoader(DATA, batch_size=64)


class Net(Classifier):
    def __init__(self):
        super().__init__()
        self.validated = []

    def validation_step(self, batch, batch_idx):
        weights = {name: value.clone() for name, value in self.net.state_dict().items()}
        self.validated.append(error(self.net, weights))

    test_step = validation_step


@torch.no_grad()
def error(net, weights):
    """The relative error of a net's outputs."""
    plain = Net().net
    plain.load_state_dict(weights)
    return (net(X) - plain(X)).norm() / plain(X).norm()


class Teacher(Callback):
    """Copies the net before a step, and then averages its weights into the copy."""

    def __init__(self, copied, at=6):
        self.copied, self.at = copied, at

    def on_train_batch_start(self, trainer, pl_module, *_):
        if trainer.global_step == self.at:
            self.model = self.copied(pl_module.net)

    def on_train_batch_end(self, trainer, pl_module, *_):
        if trainer.global_step <= self.at:
            return
        if isinstance(self.model, AveragedModel):
            self.model.update_parameters(pl_module.net)
        else:
            with torch.no_grad():
                torch._foreach_lerp_([*self.model.parameters()], [*pl_module.net.parameters()], 0.1)


def fit(plugin, *callbacks, **kwargs):
    model = Net()
    trainer = quiet_trainer(plugin, callbacks=[*callbacks], **{"max_epochs": 10, "limit_val_batches": 0, **kwargs})
    trainer.fit(model, DataLoader(DATA, batch_size=8), LOADER)
    return model


def delayed(**kwargs):
    return FP8Precision("delayed", compute_dtype="fp32", **kwargs)


def shared():
    # Of layers of one module: all weights have one amax.
    return LowBitPrecision("fp8-current", compute_dtype="fp32", shared_amax=["[024]"])


WAYS = [
    copy.deepcopy,
    AveragedModel,
    lambda net: AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
    lambda net: nn.Sequential(*(copy.deepcopy(layer) for layer in net)),
]


@each(
    "plugin",
    [delayed, lambda: delayed(algorithm="most_recent"), shared, lambda: FP4Precision(compute_dtype="fp32")],
    fast=2,
)
@pytest.mark.parametrize("copied", [WAYS[0], *(pytest.param(way, marks=pytest.mark.slow) for way in WAYS[1:])])
def test_a_copy_made_in_training_scales_by_its_own_amaxes(plugin, copied):
    teacher = Teacher(copied)
    model = fit(made := plugin(), teacher)
    net = getattr(teacher.model, "module", teacher.model)
    weights = net.state_dict()
    casts = {name.removeprefix("net."): casts for name, casts in made.casts_of(".*").items()}
    twin = Net().net
    twin.load_state_dict(weights)
    current = {name: "fp8-current" if old.is_delayed else old for name, old in casts.items()}
    current = convert(twin, "bf16", overrides=current)
    LayerKeys(current).fill_(0)
    assert error(net, weights) < 1.5 * error(current, weights), "outdated amaxes"
    assert not torch.equal(net[0].weight, model.net[0].weight)


@each("plugin", [delayed, lambda: FP8Precision("delayed", smooth_swiglu=None), lambda: FP4Precision("nvfp4")], fast=1)
def test_a_copy_of_what_was_trained_computes_as_it(plugin):
    """Once training is over: the same bits, whether it was copied, pickled or saved."""
    model = fit(plugin(), max_epochs=2).eval()
    torch.save(model.net, file := io.BytesIO())
    file.seek(0)
    copies = copy.deepcopy(model.net), pickle.loads(pickle.dumps(model.net)), torch.load(file, weights_only=False)
    expected = model.net(X)
    for twin in copies:
        assert torch.equal(twin(X), expected)
        assert torch.equal(copy.deepcopy(twin)(X), expected), "a copy of the copy"


def test_a_copy_within_the_model_stays_a_copy_when_casts_change():
    """Its amaxes are not in the checkpoint, where a run that has not made it yet would miss them."""

    def change(trainer, pl_module, *_):
        if trainer.global_step == 2:
            pl_module.teacher = copy.deepcopy(pl_module.net)
        if trainer.global_step == 3:
            trainer.precision_plugin.set_casts({"net.0": "fp8-current"})

    model = fit(plugin := delayed(), On(on_train_batch_start=change), max_steps=5)
    layers = {key.partition("/")[0] for key in plugin.histories.state_dict()["amax_history"]}
    assert layers == {"net.2", "net.4"}
    assert model.teacher[2].full_casts.is_delayed


class Copies(Callback):
    """Copies and pickles the net within a training step, and notes what it computes then."""

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.pickled = pickle.dumps(pl_module.net)
        self.copied = copy.deepcopy(pl_module.net)
        with torch.no_grad():
            self.expected = pl_module.net(X)


def test_what_is_saved_in_training_computes_as_at_that_moment():
    copies = Copies()
    fit(delayed(), copies, max_epochs=1)
    saved = pickle.loads(copies.pickled)
    assert torch.equal(saved(X), copies.expected)
    assert not torch.equal(copies.copied(X), copies.expected), "a copy has its own amaxes: the case does not tell"


def test_training_a_copy_is_said():
    copies = Copies()
    for plugin, is_delayed in ((delayed(), True), (FP4Precision(compute_dtype="fp32"), False)):
        fit(plugin, copies, max_epochs=1)
        for twin in (copies.copied, copy.deepcopy(copies.copied)):
            with torch.no_grad():
                twin(X)
            twin.eval()(X).sum().backward()  # as through a frozen teacher
            with pytest.warns(UserWarning, match="in a copy of the model that the plugin does not know"):
                twin.train()(X).sum().backward()
        saved = pickle.loads(copies.pickled)
        if is_delayed:
            with pytest.raises(ValueError, match="amaxes would stay those of the last step, too"):
                saved(X).sum().backward()
        else:
            with pytest.warns(UserWarning, match="in a copy of the model that the plugin does not know"):
                saved(X).sum().backward()
        for renewed in (copies.copied, saved):
            LayerKeys(renewed).fill_(0)
            AmaxHistories(renewed)
            renewed(X).sum().backward()  # says nothing
            convert(renewed, "bf16")(X).sum().backward()


@each("duplicate", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_keys_and_histories_that_are_copied_with_their_model_stay_connected(duplicate):
    model = convert(Net().net, "fp8-delayed")
    whole = model, LayerKeys(model, 1), AmaxHistories(model)
    outcomes = []
    for net, keys, histories in (whole, duplicate(whole)):
        for step in range(3):
            keys.fill_(step)
            net(X * (1 + step)).square().mean().backward()
            histories.advance_()
        outcomes.append((net[0].weight.grad, histories.state_dict()["amax_history"]["0/wgrad_g"]))
    assert all(torch.equal(*pair) for pair in zip(*outcomes, strict=True))
    assert outcomes[1][1].count_nonzero() == 3


@torch.no_grad()
def move(trainer, pl_module, *_):
    """Moves the weights by much, so that their averages have other amaxes than their last steps."""
    if trainer.global_step == 40:
        for layer in pl_module.net[::2]:
            layer.weight.mul_(0.25)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to create the checkpoint")
@pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback, but saving a checkpoint outside")
@pytest.mark.filterwarnings("ignore:Swapping scheduler")
@each(
    "callback",
    [
        lambda: pytorch.callbacks.EMAWeightAveraging(decay=0.98),
        lambda: pytorch.callbacks.StochasticWeightAveraging(1e-3, 2),
    ],
    fast=1,
)
def test_averages_of_weights_are_evaluated_by_their_own_amaxes(callback, tmp_path):
    """While they are in the model, afterwards, and from a checkpoint: the histories are of other weights."""
    callbacks = [callback(), On(on_train_batch_start=move)]
    model = fit(delayed(history=4), *callbacks, max_epochs=6, num_sanity_val_steps=0, limit_val_batches=None)
    model.trainer.test(model, LOADER, verbose=False)
    model.trainer.save_checkpoint(checkpoint := tmp_path / "x.ckpt")
    after = error(model.net, model.net.state_dict())
    evaluated = Net()
    quiet_trainer(delayed(history=4)).test(evaluated, LOADER, ckpt_path=checkpoint, verbose=False)
    alone = restore(Net(), checkpoint)
    errors = [*model.validated, after, *evaluated.validated, error(alone.net, alone.net.state_dict())]
    assert max(errors) < 0.06, f"{[round(float(each), 3) for each in errors]}"


@each("make", [lambda: FP4Precision("nvfp4"), lambda: FP8Precision("delayed")])
def test_a_frozen_copy_passes_gradients_on_without_a_word(make):
    critic = copy.deepcopy(fit(make(), max_steps=3).net).requires_grad_(False).train()
    x = X[:4].clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        critic(x).sum().backward()
    assert x.grad is not None and x.grad.any()


def test_plugins_that_earlier_versions_pickled_keep_their_arguments():
    options = {"skip": ["head"], "only": None, "seed": 5, "exact": True, "shared_amax": ["q|k"]}
    plugin = FP8Precision(compute_dtype="fp16", overrides={"a": "int4"}, quantize_output=False, **options)
    former = {name: getattr(plugin, name) for name in ("casts", "overrides", "precision", "_origin", "_arguments")}
    former |= {**options, "step": 3, "_scaling": plugin._state.scaling}
    for more, quantize_output in (({}, True), ({"_compute": plugin._state.compute, "quantize_output": False}, False)):
        loaded = FP8Precision.__new__(FP8Precision)
        loaded.__setstate__(former | more)
        assert repr(loaded) == repr(plugin) and loaded.compute_dtype == torch.float16
        assert loaded.casts == plugin.casts and loaded.overrides == plugin.overrides
        assert {name: getattr(loaded, name) for name in options} == options
        assert loaded.scaler is plugin.scaler and loaded.quantize_output is quantize_output
