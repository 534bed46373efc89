"""The plugin in a real Trainer, with modules that know nothing of it."""

import pytest
import torch
import yaml
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_lowbit import (
    Cast,
    FP4Precision,
    GradientNoiseMonitor,
    LinearCasts,
    LowBitPrecision,
    QAFSwitch,
    Scale,
    convert,
)
from lightning_lowbit.nn import PRESETS, QuantLinear, set_phase
from lightning_lowbit.precision.run_settings import global_seed
from lightning_lowbit.quant import Hadamard
from tests.lightnings import (
    BoringModel,
    Fabric,
    LightningCLI,
    LightningModule,
    MisconfigurationException,
    ModelCheckpoint,
    Trainer,
)
from tests.precision.regression import Regression, flat
from tests.precision.regression import trainer as regression_trainer


def quiet(**kwargs):
    defaults = {
        "max_steps": 2,
        "limit_train_batches": 4,
        "limit_val_batches": 0,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(accelerator="cpu", **{**defaults, **kwargs})


class Recorder(BoringModel):
    """Notes what each training step sees."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append((self.layer.keys.tolist(), str(self.layer.casts), torch.is_autocast_enabled("cpu")))
        return super().training_step(batch, batch_idx)


def test_trains_any_module_and_leaves_its_checkpoint_alone(tmp_path):
    model = BoringModel()
    before = model.layer.weight.detach().clone()
    weight = model.layer.weight
    trainer = quiet(plugins=[FP4Precision()])
    trainer.fit(model)
    assert type(model.layer) is QuantLinear
    assert model.layer.weight is weight, "conversion must keep the parameter object"
    assert not torch.equal(model.layer.weight, before), "nothing was trained"
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    checkpoint = torch.load(tmp_path / "x.ckpt", weights_only=True)
    assert list(checkpoint["state_dict"]) == ["layer.weight", "layer.bias"]
    assert {*checkpoint["lightning_lowbit"].pop("trained")["layers"].values()} == {"nvfp4"}
    assert checkpoint["lightning_lowbit"] == {"step": 2, "micro_batch": 0, "phase": "fqt", "seed": 0, "blend": 1.0}
    plain = BoringModel()
    plain.load_state_dict(checkpoint["state_dict"])
    assert torch.equal(plain.layer.weight, model.layer.weight)


def test_each_micro_batch_has_its_own_random_bits():
    model = Recorder()
    trainer = quiet(plugins=[FP4Precision(seed=3)], accumulate_grad_batches=2)
    trainer.fit(model)
    keys = [str(keys) for keys, _, _ in model.seen]
    assert len(keys) == 4
    assert len(set(keys)) == 4, "two micro-batches share their keys"
    again = Recorder()
    quiet(plugins=[FP4Precision(seed=3)], accumulate_grad_batches=2).fit(again)
    assert again.seen == model.seen, "the keys of a run are not reproducible"
    other = Recorder()
    quiet(plugins=[FP4Precision(seed=4)], accumulate_grad_batches=2).fit(other)
    assert not set(keys) & {str(keys) for keys, _, _ in other.seen}, "the seed changes nothing"


class Recurrent(Regression):
    """Three times through one MLP, each a checkpoint that computes activations again if it is to."""

    def forward(self, x):
        x = self.first(x)
        for _ in range(3):
            x = x + (checkpoint(self.mlp, x, use_reentrant=False) if self.recompute else self.mlp(x))
        return self.head(x)


@pytest.mark.parametrize(
    ("recompute", "settings"),
    [
        (True, dict),
        (False, lambda: {"limit_val_batches": 2, "val_check_interval": 1}),
        (True, lambda: {"callbacks": [GradientNoiseMonitor(1, average=2)]}),
    ],
    ids=["recomputed", "evaluated in between", "drawn a second time"],
)
def test_what_else_computes_leaves_the_calls_of_a_layer_alone(recompute, settings):
    outcomes = []
    for model, how in ((Recurrent(), {}), (Recurrent(recompute), settings())):
        regression_trainer(FP4Precision(compute_dtype="fp32"), accumulate_grad_batches=2, max_steps=3, **how).fit(model)
        outcomes.append(flat(model))
    assert torch.equal(*outcomes)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch")
def test_a_run_whose_layers_are_called_several_times_is_resumed(tmp_path):
    how = {"accumulate_grad_batches": 2, "limit_train_batches": 8}
    whole, interrupted, resumed = Recurrent(), Recurrent(), Recurrent()
    regression_trainer(FP4Precision(), max_steps=4, **how).fit(whole)
    trainer = regression_trainer(FP4Precision(), max_steps=2, **how)
    trainer.fit(interrupted)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    regression_trainer(FP4Precision(), max_steps=4, **how).fit(resumed, ckpt_path=tmp_path / "x.ckpt")
    assert torch.equal(flat(resumed), flat(whole))


@pytest.mark.parametrize(("compute_dtype", "autocast"), [("bf16", True), ("fp32", False)])
def test_compute_dtype(compute_dtype, autocast):
    model = Recorder()
    quiet(plugins=[LowBitPrecision("nvfp4", compute_dtype=compute_dtype)]).fit(model)
    assert {on for _, _, on in model.seen} == {autocast}


def test_bf16_casts_train_as_lightnings_bf16_mixed_does_to_the_bit():
    def weights(**kwargs):
        torch.manual_seed(1)
        model = BoringModel()
        quiet(max_steps=4, **kwargs).fit(model)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(weights(plugins=[LowBitPrecision("bf16")]), weights(precision="bf16-mixed"))


def test_rounding_and_overrides_reach_the_layers():
    class Two(BoringModel):
        def __init__(self):
            super().__init__()
            self.layer = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 2))

    model = Two()
    plugin = FP4Precision(rounding={"wgrad_x": "nearest"}, overrides={"layer.1": "bf16"})
    quiet(plugins=[plugin]).fit(model)
    assert model.layer[0].casts == LinearCasts.preset("nvfp4").with_rounding({"wgrad_x": "nearest"})
    assert model.layer[0].casts.wgrad_x.rounding == "nearest"
    assert model.layer[1].casts == LinearCasts()
    plugin.set_phase("qaf")
    assert model.layer[0].casts.wgrad_x is None
    assert model.layer[0].casts.fprop_x is not None
    assert model.layer[1].casts == LinearCasts()
    plugin.set_phase("fqt")
    assert model.layer[0].casts.wgrad_x.rounding == "nearest"


class GAN(LightningModule):
    """Manual optimization with two optimizers."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = nn.Linear(32, 32), nn.Linear(32, 1)
        self.train_dataloader = BoringModel().train_dataloader

    def training_step(self, batch, batch_idx):
        generator, critic = self.optimizers()
        for optimizer, loss in (
            (critic, lambda: self.critic(self.generator(batch).detach()).mean() - self.critic(batch).mean()),
            (generator, lambda: -self.critic(self.generator(batch)).mean()),
        ):
            optimizer.zero_grad()
            self.manual_backward(loss())
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), 0.1) for part in (self.generator, self.critic)]


def test_manual_optimization_with_two_optimizers():
    model, plugin = GAN(), FP4Precision()
    before = [p.detach().clone() for p in model.parameters()]
    quiet(max_steps=6, plugins=[plugin]).fit(model)
    assert plugin.step == 6, "each step of each optimizer counts"
    for old, (name, new) in zip(before, model.named_parameters(), strict=True):
        assert torch.isfinite(new).all()
        constant = name == "critic.bias"  # cancels in the critic's loss
        assert torch.equal(old, new) == constant, f"{name}: trained means changed"


def test_clips_by_norm_and_by_value():
    class Watch(BoringModel):
        def on_before_zero_grad(self, optimizer):
            gradients = [p.grad for p in self.parameters() if p.grad is not None]
            if gradients:
                self.norm = torch.nn.utils.get_total_norm(gradients).item()
                self.largest = max(g.abs().max().item() for g in gradients)

    model = Watch()
    quiet(plugins=[FP4Precision()], max_steps=3, gradient_clip_val=1e-3).fit(model)
    assert model.norm == pytest.approx(1e-3, rel=1e-3)
    model = Watch()
    quiet(plugins=[FP4Precision()], max_steps=3, gradient_clip_val=1e-4, gradient_clip_algorithm="value").fit(model)
    assert model.largest == pytest.approx(1e-4, rel=1e-3)


def test_fit_validate_fit_on_one_model_and_trainer():
    model, trainer = BoringModel(), quiet(plugins=[FP4Precision()], limit_val_batches=1)
    trainer.fit(model)
    trainer.validate(model, verbose=False)
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit(model)
    assert trainer.precision_plugin.step == 4
    assert trainer.precision_plugin.micro_batch == 0


def test_phase_of_a_checkpoint_holds_in_validation_without_any_callback(tmp_path):
    model, plugin = BoringModel(), FP4Precision()
    trainer = quiet(plugins=[plugin])
    trainer.fit(model)
    plugin.set_phase("hp-forward")
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    fresh = BoringModel()
    other = quiet(plugins=[LowBitPrecision("nvfp4")], limit_val_batches=1)
    other.validate(fresh, ckpt_path=tmp_path / "x.ckpt", verbose=False)
    assert other.precision_plugin.phase == "hp-forward", "the state is kept under the name of a class"
    assert fresh.layer.casts.fprop_x is None


def test_checkpoint_without_the_plugin_starts_quantization_and_says_so(tmp_path):
    trainer = quiet(limit_train_batches=2)  # ends with the epoch
    trainer.fit(BoringModel())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    with pytest.warns(UserWarning, match="holds no state of lightning_lowbit"):
        quiet(plugins=[FP4Precision()], max_steps=3, limit_train_batches=2).fit(
            BoringModel(), ckpt_path=tmp_path / "x.ckpt"
        )


def test_weights_only_checkpoint_says_that_it_has_no_state(tmp_path):
    trainer = quiet(plugins=[FP4Precision()], limit_train_batches=2)
    trainer.fit(BoringModel())
    trainer.save_checkpoint(tmp_path / "x.ckpt", weights_only=True)
    with pytest.warns(UserWarning, match="saved without the plugin, or weights only"):
        quiet(plugins=[FP4Precision()], limit_val_batches=1).validate(BoringModel(), ckpt_path=tmp_path / "x.ckpt")


def test_resuming_with_another_seed_is_said(tmp_path):
    trainer = quiet(plugins=[FP4Precision(seed=1)], limit_train_batches=2)
    trainer.fit(BoringModel())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    with pytest.warns(UserWarning, match="those of seed 1, this run's of seed 2"):
        other = quiet(plugins=[FP4Precision(seed=2)], max_steps=3, limit_train_batches=2)
        other.fit(BoringModel(), ckpt_path=tmp_path / "x.ckpt")


def test_one_plugin_in_two_runs_starts_each_from_the_beginning():
    plugin = FP4Precision()
    quiet(plugins=[plugin], callbacks=[QAFSwitch(step=1)]).fit(BoringModel())
    assert (plugin.step, plugin.phase) == (2, "qaf")
    second = Recorder()
    quiet(plugins=[plugin]).fit(second)
    assert (plugin.step, plugin.phase) == (2, "fqt")
    first = Recorder()
    quiet(plugins=[FP4Precision()]).fit(first)
    assert second.seen == first.seen


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
def test_batches_keep_their_dtype(dtype):
    batch = {"x": torch.ones(2, dtype=dtype)}
    assert FP4Precision().convert_input(batch)["x"].dtype == dtype


def test_transformer_encoder_is_quantized_in_evaluation_too():
    """Torch's fused evaluation path reads the raw weights; it must not be taken."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 2).eval()
    convert(model, "nvfp4")
    x = torch.randn(2, 16, 32)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        quantized = model(x)
        set_phase(model, "bf16")
        plain = model(x)
    assert not torch.equal(quantized, plain), "the casts change nothing in evaluation"


@pytest.mark.parametrize("exact", [False, True])
def test_exact_reaches_the_layers(exact):
    model = BoringModel()
    quiet(plugins=[FP4Precision(exact=exact)]).fit(model)
    assert model.layer.exact is exact


def test_seed_of_seed_everything(monkeypatch):
    assert global_seed() == 0
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    assert FP4Precision().seed == 7
    assert FP4Precision(seed=1).seed == 1


def test_from_yaml(monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py"])
    config = yaml.safe_load("""
        seed_everything: 1
        trainer:
          plugins:
            class_path: lightning_lowbit.FP4Precision
            init_args:
              casts:
                preset: nvfp4
                wgrad_x: fprop
                wgrad_g: {element: e1m2, rounding: stochastic, scale: {format: e5m2, block: 32}}
                dgrad_g: {element: e2m1, rounding: nearest, scale: {format: e4m3, block: [16, 16], two_level: true}}
              rounding: {wgrad_g: nearest}
              overrides:
                layer:
                  fprop_w: {element: e1m2, scale: {format: e5m2, block: 32}}
                  hadamard: {fprop: {size: 32, signs: keyed}}
              compute_dtype: fp32
              seed: 5
          logger: false
          enable_checkpointing: false
    """)
    cli = LightningCLI(BoringModel, args=config, run=False, save_config_callback=None, auto_configure_optimizers=False)
    plugin = cli.trainer.precision_plugin
    assert plugin.casts.wgrad_x == "fprop"
    assert plugin.casts.dgrad_g.scale.block == (16, 16)
    assert plugin.casts.dgrad_g.rounding == "nearest"
    changed = Cast("e1m2", Scale("e5m2", 32, two_level=True), "nearest")
    assert plugin.casts.wgrad_g == changed, "YAML changes other fields of the preset than it names"
    alone = LinearCasts(fprop_w=Cast("e1m2", Scale("e5m2", 32)), hadamard={"fprop": Hadamard(32, "keyed")})
    assert plugin.overrides == {"layer": alone}, "YAML's fields have other defaults"
    assert plugin.seed == 5
    assert plugin.precision == "32-true"


EXPLICIT = """
fprop_x: {element: int8, scale: {format: fp32, block: row}}
fprop_w: {element: e2m1, scale: {format: e4m3, block: [16, 16], two_level: true, top: 256, four_over_six: mse}}
dgrad_g: {element: e5m2, scale: {format: fp32, block: tensor, rounding: power_of_two}, rounding: stochastic}
dgrad_w: fprop
wgrad_g: {element: e2m1, scale: {format: e8m0, block: 32, rounding: floor, prescale: 0.75}}
wgrad_x: null
hadamard: {wgrad: 64}
subtract_mean: [dgrad, wgrad]
surrogate: {fprop_w: dge}
"""


@pytest.mark.parametrize(
    "casts",
    [
        *PRESETS,
        *(f"{{preset: {name}, fprop_x: null, dgrad_w: {{element: int4}}, hadamard: {{}}}}" for name in PRESETS),
        "{preset: nvfp4, every: {scale: {format: e8m0, rounding: null, block: 32, two_level: false}}}",
        "{preset: mxfp4-rht, hadamard: {wgrad: {size: 128, signs: fixed}}, subtract_mean: [fprop]}",
        "{fprop_w: {element: int4}}",
        EXPLICIT,
    ],
)
def test_casts_from_yaml(monkeypatch, casts):
    """Whatever :meth:`LinearCasts.of` reads reaches the plugin through the command line of Lightning as it is."""
    monkeypatch.setattr("sys.argv", ["train.py"])
    plugin = {"class_path": "lightning_lowbit.LowBitPrecision", "init_args": {"casts": yaml.safe_load(casts)}}
    config = {"seed_everything": 1, "trainer": {"plugins": plugin, "logger": False, "enable_checkpointing": False}}
    cli = LightningCLI(BoringModel, args=config, run=False, save_config_callback=None, auto_configure_optimizers=False)
    assert cli.trainer.precision_plugin.casts == LinearCasts.of(yaml.safe_load(casts))


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FP4Precision("nvfp5"), r"Unknown preset 'nvfp5'. Did you mean 'nvfp4'\?"),
        (lambda: FP4Precision({"fprop_y": None}), r"Unknown field of LinearCasts 'fprop_y'. Did you mean 'fprop_"),
        (lambda: FP4Precision(rounding={"wgradx": "nearest"}), r"Unknown operand 'wgradx'. Did you mean 'wgrad_x'"),
        (lambda: FP4Precision(rounding={"wgrad_x": "up"}), r"Unknown rounding 'up'"),
        (lambda: FP4Precision("bf16", rounding={"wgrad_x": "nearest"}), r"needs an operand with a cast of its own"),
        (
            lambda: FP4Precision(compute_dtype="fp8"),
            r"Unknown compute_dtype 'fp8'. Choose one of: 'bf16', 'fp16', 'fp32'",
        ),
        (lambda: FP4Precision(overrides={"x": "nvfp"}), r"Unknown preset 'nvfp'"),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("argument", ["skip", "only"])
def test_pattern_that_matches_nothing(argument):
    model = BoringModel()
    with pytest.raises(ValueError, match=rf"{argument}: the pattern 'head' matches no linear layer.*e\.g\. layer"):
        quiet(plugins=[FP4Precision(**{argument: ["head"]})]).fit(model)
    assert type(model.layer) is nn.Linear


def test_no_layer_to_convert():
    class Convolution(BoringModel):
        def __init__(self):
            super().__init__()
            self.layer = nn.Conv1d(1, 1, 1)

    with pytest.raises(ValueError, match="holds no layer to quantize"):
        quiet(plugins=[FP4Precision()]).fit(Convolution())
    with pytest.raises(ValueError, match="No layer is left to quantize"):
        quiet(plugins=[FP4Precision(skip=["layer"])]).fit(BoringModel())


def test_precision_beside_the_plugin():
    with pytest.raises(ValueError, match="Received both `precision=bf16-mixed` and `plugins="):
        quiet(plugins=[FP4Precision()], precision="bf16-mixed")


def test_fabric():
    fabric = Fabric(plugins=[FP4Precision()], accelerator="cpu", devices=1)
    with pytest.raises(MisconfigurationException, match=r"Else call lightning_lowbit.convert"):
        fabric.setup(nn.Linear(16, 16))


def test_xla():
    from tests.lightnings import SingleDeviceXLAStrategy

    with pytest.raises(TypeError, match="XLAPrecision"):
        SingleDeviceXLAStrategy.precision_plugin.fset(object.__new__(SingleDeviceXLAStrategy), FP4Precision())


def test_checkpoint_callback_of_lightning_keeps_the_state(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)
    quiet(plugins=[FP4Precision()], enable_checkpointing=True, callbacks=[checkpoint]).fit(BoringModel())
    saved = sorted(torch.load(p, weights_only=True)["lightning_lowbit"]["step"] for p in tmp_path.glob("*.ckpt"))
    assert saved == [1, 2]
