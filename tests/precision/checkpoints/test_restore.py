"""What was trained is what is evaluated: by the plugin of a checkpoint, and by a model restored without a Trainer."""

import copy
import pickle
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_lowbit import (
    FP4Precision,
    FP8Precision,
    IntegerPrecision,
    LinearCasts,
    LowBitPrecision,
    TernaryPrecision,
    pack_frozen,
    restore,
)
from lightning_lowbit.nn import QuantizedLayer
from tests.lightning_imports import LightningModule, quiet_trainer
from tests.precision.regression_model import SwiGLU, flat, state

# The casts that lose most without their plugin, and one each of what a checkpoint has to remember beside casts.
PLUGINS = {
    "ternary": lambda: TernaryPrecision(skip=["head"]),
    "int2": lambda: IntegerPrecision(2, 8, group=32),
    "int4, fp16 scales": lambda: IntegerPrecision(4, 8, group=32, scale_format="fp16"),
    "nvfp4": lambda: FP4Precision("nvfp4", overrides={"down_proj": "mxfp8"}, quantize_output=True),
    "fp8-delayed": lambda: FP8Precision("delayed", history=3, smooth_swiglu="channel"),
    "shared": lambda: FP8Precision("current", shared_amax=["gate_proj|up_proj"], compute_dtype="fp32"),
    "bf16": lambda: LowBitPrecision("bf16", compute_dtype="bf16"),
    "stochastic": lambda: LowBitPrecision({"preset": "nvfp4", "fprop_w": {"rounding": "stochastic"}}, seed=3),
}


def net():
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(mlp=SwiGLU(32, 64), head=nn.Linear(32, 32)))


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return (self(batch).float() - batch.flip(1)).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 3e-3)


BATCH = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))


def loader():
    return DataLoader([BATCH], batch_size=None)


def trainer(*plugins, **kwargs):
    return quiet_trainer(*plugins, **{"max_epochs": 4, "limit_val_batches": 1} | kwargs)


def validate(*plugins, model=None, ckpt_path=None):
    run = trainer(*plugins)
    return run.validate(model or Module(), loader(), ckpt_path=ckpt_path, verbose=False)[0]["val_loss"]


def loss_of(model):
    with torch.no_grad():
        return float((model(BATCH).float() - BATCH.flip(1)).square().mean())


def train(plugin, path, change=None):
    """Trains a little, leaves a checkpoint, and returns the validation loss."""
    run, model = trainer(plugin), Module()
    run.fit(model, loader(), loader())
    if change is not None:
        change(plugin)
        run.fit_loop.epoch_progress.reset()
    run.save_checkpoint(path, weights_only=False)
    return run.validate(model, loader(), verbose=False)[0]["val_loss"]


def in_the_midst(plugin):
    plugin.set_casts({"up_proj": "mxfp4"})
    plugin.set_phase("qaf")
    plugin.set_blend(0.5)


@pytest.mark.fast("nvfp4", "fp8-delayed")
@pytest.mark.parametrize("name", PLUGINS)
def test_loss_of_training_is_that_of_the_checkpoint(name, tmp_path):
    path = tmp_path / "last.ckpt"
    expected = train(PLUGINS[name](), path)
    loaded = Module.load_from_checkpoint(path, weights_only=True)
    without = validate(model=loaded)
    again = {
        "from_checkpoint, with ckpt_path": validate(LowBitPrecision.from_checkpoint(path), ckpt_path=path),
        "from_checkpoint, with weights": validate(LowBitPrecision.from_checkpoint(path), model=loaded),
        "restore": loss_of(restore(Module(), path)),
        "restore a part": loss_of(restore(net(), path, prefix="net")),
        "restored, in a Trainer": validate(model=restore(Module(), path)),
        "copied": loss_of(copy.deepcopy(restore(Module(), path))),
        "pickled": loss_of(pickle.loads(pickle.dumps(restore(Module(), path)))),
        "loaded first": loss_of(restore(Module(), torch.load(path, weights_only=True))),
        "weights=False": loss_of(restore(Module.load_from_checkpoint(path), path, weights=False)),
    }
    assert again == pytest.approx(dict.fromkeys(again, expected), abs=1e-6)
    assert abs(without - expected) > 1e-5, "or else nothing is shown"


def test_phase_annealing_and_changed_casts_are_restored(tmp_path):
    path = tmp_path / "last.ckpt"
    expected = train(FP4Precision("nvfp4"), path, in_the_midst)
    model = restore(Module(), path)
    assert loss_of(model) == pytest.approx(expected, abs=1e-6)
    assert model.net.mlp.up_proj.casts == LinearCasts.preset("mxfp4").phase("qaf")
    assert float(model.net.mlp.up_proj.lowbit.blend) == 0.5
    plugin = LowBitPrecision.from_checkpoint(path)
    assert validate(plugin, ckpt_path=path) == pytest.approx(expected, abs=1e-6)
    plugin.set_casts({"up_proj": "fqt"})
    assert plugin.casts_of("up_proj")["net.mlp.up_proj"] == LinearCasts.preset("nvfp4"), "what the run started with"


def test_resumed_with_the_plugin_of_the_checkpoint_a_run_is_the_uninterrupted_one(tmp_path):
    def fit(plugin, epochs, ckpt_path=None):
        run, model = trainer(plugin, max_epochs=epochs, limit_val_batches=0), Module()
        run.fit(model, loader(), loader(), ckpt_path=ckpt_path)
        return run, flat(model)

    plugin = PLUGINS["fp8-delayed"]
    _, whole = fit(plugin(), 4)
    half, _ = fit(plugin(), 2)
    half.save_checkpoint(tmp_path / "half.ckpt", weights_only=False)
    _, resumed = fit(LowBitPrecision.from_checkpoint(tmp_path / "half.ckpt"), 4, tmp_path / "half.ckpt")
    assert torch.equal(resumed, whole)


def test_evaluating_with_other_casts_is_an_error_that_names_both_and_the_remedies_unless_it_is_on_purpose(tmp_path):
    path, shared = tmp_path / "last.ckpt", tmp_path / "shared.ckpt"
    trained = train(TernaryPrecision(skip=["head"], compute_dtype="bf16"), path)
    train(PLUGINS["shared"](), shared)
    with pytest.raises(ValueError, match="trained otherwise") as error:
        validate(FP4Precision("nvfp4", quantize_output=True), ckpt_path=path)
    for told in (
        "net.mlp.gate_proj, net.mlp.up_proj, net.mlp.down_proj: ternary in the checkpoint, nvfp4 here",
        "net.head: bf16 in the checkpoint, nvfp4 here",
        "LowBitPrecision.from_checkpoint(path)",
        "casts_of_checkpoint=False",
    ):
        assert told in str(error.value)
    for plugin, checkpoint, differs in (
        (
            TernaryPrecision(skip=["head"], compute_dtype="fp32"),
            path,
            "computed in bf16 in the checkpoint, in fp32 here",
        ),
        (TernaryPrecision(skip=["head", "up_proj"]), path, "ternary in the checkpoint, bf16 here"),
        (FP8Precision("current", compute_dtype="fp32"), shared, r"up_proj: share an amax in the checkpoint only"),
    ):
        with pytest.raises(ValueError, match=differs):
            validate(plugin, ckpt_path=checkpoint)
    with pytest.raises(ValueError, match="restored from a checkpoint, was trained otherwise"):
        validate(FP4Precision("nvfp4"), model=restore(Module(), path))
    on_purpose = validate(FP4Precision("nvfp4", casts_of_checkpoint=False), ckpt_path=path)
    assert abs(on_purpose - trained) > 1e-3


def test_training_on_with_other_casts_says_once_what_differs(tmp_path):
    train(PLUGINS["int2"](), path := tmp_path / "last.ckpt")
    run = trainer(IntegerPrecision(4, 8, group=32), max_epochs=6)
    with pytest.warns(UserWarning, match="trained otherwise than this plugin computes") as warned:
        run.fit(Module(), loader(), loader(), ckpt_path=path)
    told = [str(warning.message) for warning in warned if "trained otherwise" in str(warning.message)]
    assert len(told) == 1
    assert "int2" in told[0] and "int4" in told[0] and "Training continues as this plugin has it" in told[0]
    assert run.global_step == 6


def test_a_checkpoint_without_casts_loads_with_a_warning_that_says_so(tmp_path):
    expected = train(PLUGINS["ternary"](), path := tmp_path / "last.ckpt")
    old = torch.load(path, weights_only=True)
    del old["lightning_lowbit"]["trained"]
    torch.save(old, path)
    with pytest.warns(UserWarning, match="did not record the casts"):
        assert validate(PLUGINS["ternary"](), ckpt_path=path) == pytest.approx(expected, abs=1e-6)
    for make in (LowBitPrecision.from_checkpoint, lambda where: restore(Module(), where)):
        with pytest.raises(ValueError, match=r"did not record the casts.*Make the plugin as it was made"):
            make(path)
    del old["lightning_lowbit"]
    with pytest.raises(ValueError, match="no state of lightning_lowbit"):
        restore(Module(), old)


def test_other_arguments_than_those_of_the_checkpoint_and_other_models_are_errors(tmp_path):
    train(PLUGINS["nvfp4"](), path := tmp_path / "last.ckpt")
    assert LowBitPrecision.from_checkpoint(path, exact=True, seed=7).exact
    with pytest.raises(ValueError, match=r"Unknown argument of from_checkpoint.*'compute_dtype'"):
        LowBitPrecision.from_checkpoint(path, compute_dtype="fp32")
    with pytest.raises(ValueError, match=r"4 layers that Sequential does not have, e.g. net.mlp.gate_proj"):
        restore(net(), path)


def test_codes_for_a_model_with_matrices_are_an_error_that_says_how_to_build_it(tmp_path):
    packed = Module()
    pack_frozen(packed.net.head.requires_grad_(False), "nvfp4")
    run = trainer(FP4Precision("nvfp4"), max_epochs=1)
    run.fit(packed, loader(), loader())
    run.save_checkpoint(tmp_path / "last.ckpt", weights_only=False)
    with pytest.raises(ValueError, match=r"keeps 1 weights as codes, e.g. net.head.weight.*pack_frozen"):
        restore(Module(), tmp_path / "last.ckpt")


def test_a_restored_model_does_not_train(tmp_path):
    train(PLUGINS["fp8-delayed"](), path := tmp_path / "last.ckpt")
    model = restore(Module(), path)
    assert not model.training
    before = loss_of(model)
    with pytest.raises(ValueError, match=r"A restored model only evaluates.*from_checkpoint"):
        model.train()(BATCH)
    with pytest.raises(ValueError, match="takes 32 features"):
        model.eval()(BATCH[:, :3])
    assert not torch.is_autocast_enabled("cpu"), "the context has ended"
    assert loss_of(model) == before
    run = trainer(FP8Precision("delayed", history=3, smooth_swiglu="channel"))
    run.fit(model.train(), loader(), loader())
    assert run.global_step == 4, "a plugin trains it"


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_compiled_part_has_the_weights_of_one_that_is_not(is_compiled, tmp_path):
    """``torch.compile`` of a module adds a part to the names of its weights."""
    expected = train(PLUGINS["nvfp4"](), path := tmp_path / "last.ckpt")
    checkpoint, model = torch.load(path, weights_only=True), Module()
    if is_compiled:
        model.net = torch.compile(model.net, backend="eager")
    else:
        weights = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name.replace("net.", "net._orig_mod."): one for name, one in weights.items()}
    with torch.compiler.set_stance("force_eager"):
        assert loss_of(restore(model, checkpoint)) == pytest.approx(expected, abs=1e-6)


@pytest.mark.slow
def test_a_restored_model_compiles(tmp_path):
    expected = train(PLUGINS["nvfp4"](), path := tmp_path / "last.ckpt")
    model = torch.compile(restore(Module(), path), backend="aot_eager")
    assert loss_of(model) == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("whose", ["Trainer", "plugin"])
def test_what_has_trained_can_be_pickled(whose, tmp_path):
    plugin = FP8Precision("delayed", history=3)
    run, model = trainer(plugin), Module()
    run.fit(model, loader(), loader())
    torch.save(run if whose == "Trainer" else plugin, tmp_path / "pickled.pt")
    loaded = torch.load(tmp_path / "pickled.pt", weights_only=False)
    again = loaded.precision_plugin if whose == "Trainer" else loaded
    assert (again.step, again.phase, again.casts) == (4, "fqt", plugin.casts)
    assert str(state(again)) == str(state(plugin))
    fresh = trainer(again, max_epochs=1)
    fresh.fit(Module(), loader(), loader())
    assert isinstance(fresh.lightning_module.net.head, QuantizedLayer)
