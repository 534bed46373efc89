"""FP8 in a real Trainer: what its arguments mean, what its histories hold and when, and what its checkpoints keep."""

from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_lowbit import Cast, FP4Precision, FP8Precision, LinearCasts, LowBitPrecision, QAFSwitch, Scale
from lightning_lowbit.nn import OPERANDS, AmaxHistories, fold
from lightning_lowbit.recipes.models import CausalLM
from tests.lightnings import BoringModel, Callback, LightningCLI
from tests.precision.regression import (
    DOWN,
    LAYERS,
    Regression,
    Witness,
    assert_histories,
    assert_in_force,
    flat,
    state,
    trainer,
)
from tests.precision.test_precision import GAN

SCALINGS = ("delayed", "current", "row", "mx")
DELAYED = {"block": "tensor", "source": "delayed"}


def fp8(gradient: str, scale: Scale) -> LinearCasts:
    x, g = Cast("e4m3", scale), Cast(gradient, scale)
    return LinearCasts(fprop_x=x, fprop_w=x, dgrad_g=g, dgrad_w=x, wgrad_g=g, wgrad_x=x)


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "casts"),
    [
        ({}, fp8("e5m2", Scale("fp32", **DELAYED, history=16, algorithm="max"))),
        ({"scaling": "delayed"}, fp8("e5m2", Scale("fp32", **DELAYED))),
        ({"history": 3}, fp8("e5m2", Scale("fp32", **DELAYED, history=3))),
        ({"algorithm": "most_recent"}, fp8("e5m2", Scale("fp32", **DELAYED, algorithm="most_recent"))),
        ({"margin": 2}, fp8("e5m2", Scale("fp32", **DELAYED, margin=2))),
        ({"power_of_two": True}, fp8("e5m2", Scale("fp32", **DELAYED, rounding="power_of_two"))),
        ({"gradient_format": "e4m3"}, fp8("e4m3", Scale("fp32", **DELAYED))),
        ({"gradient_format": "e5m2"}, fp8("e5m2", Scale("fp32", **DELAYED))),
        ({"scaling": "current"}, fp8("e5m2", Scale("fp32", "tensor"))),
        ({"scaling": "current", "margin": 1}, fp8("e5m2", Scale("fp32", "tensor", margin=1))),
        ({"scaling": "current", "power_of_two": True}, fp8("e5m2", Scale("fp32", "tensor", "power_of_two"))),
        ({"scaling": "current", "gradient_format": "e4m3"}, fp8("e4m3", Scale("fp32", "tensor"))),
        ({"scaling": "row"}, fp8("e5m2", Scale("fp32", "row"))),
        ({"scaling": "row", "margin": 1}, fp8("e5m2", Scale("fp32", "row", margin=1))),
        ({"scaling": "row", "power_of_two": True}, fp8("e5m2", Scale("fp32", "row", "power_of_two"))),
        ({"scaling": "row", "gradient_format": "e4m3"}, fp8("e4m3", Scale("fp32", "row"))),
        ({"scaling": "mx"}, fp8("e4m3", Scale("e8m0", 32))),
        ({"scaling": "mx", "power_of_two": True}, fp8("e4m3", Scale("e8m0", 32))),
        ({"scaling": "mx", "gradient_format": "e5m2"}, fp8("e5m2", Scale("e8m0", 32))),
    ],
    ids=str,
)
def test_arguments_land_in_the_casts(arguments: dict[str, Any], casts: LinearCasts) -> None:
    plugin = FP8Precision(**arguments)
    for operand in OPERANDS:
        assert getattr(plugin.casts, operand) == getattr(casts, operand), f"{arguments} gives another {operand}"
    assert plugin.casts == casts


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scaling": "delayd"}, r"Unknown scaling 'delayd'. Did you mean 'delayed'\? Choose one of: 'delayed', 'cur"),
        ({"scaling": None}, r"Unknown scaling None. Choose one of"),
        ({"history": 0}, r"history is a whole number from 1 to \d+; got 0"),
        ({"history": 2.0}, r"history is a whole number from 1 to \d+; got 2.0"),
        ({"algorithm": "mean"}, r"Unknown algorithm of Scale 'mean'.* Choose one of: 'max', 'most_recent'"),
        ({"power_of_two": "no"}, r"power_of_two is true or false; got 'no'"),
        ({"margin": -1}, r"margin is a whole number from 0 to \d+; got -1"),
        ({"gradient_format": "e3m2"}, r"Unknown gradient_format 'e3m2'.* Choose one of: 'e4m3', 'e5m2'"),
        ({"scaling": "current", "history": 4}, r"history .* take source='delayed', or leave both out"),
        ({"scaling": "row", "algorithm": "most_recent"}, r"algorithm .* take source='delayed', or leave both out"),
        ({"scaling": "mx", "history": 4}, r"history .* take source='delayed', or leave both out"),
        ({"scaling": "mx", "margin": 1}, r"margin .*leave out margin"),
        ({"smooth_swiglu": "chanel"}, r"Unknown kind of smooth_swiglu 'chanel'. Did you mean 'channel'"),
        ({"backend": "cuda"}, r"Unknown backend 'cuda'.* Choose one of: 'auto', 'native', 'emulated'"),
        ({"backend": "native", "scaling": "mx"}, r"backend='native', but fprop .* no native GEMM.* Use backend='auto'"),
        ({"backend": "native", "gradient_format": "e4m3", "overrides": {"head": "nvfp4"}}, r"head has no native GEMM"),
        ({"backend": "native", "exact": True}, r"exact emulates GEMMs, and backend='native' does not: choose one"),
    ],
    ids=str,
)
def test_bad_arguments_say_what_to_do(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FP8Precision(**arguments)


def test_native_on_a_cpu_is_refused_when_training_starts() -> None:
    model = Regression()
    with pytest.raises(ValueError, match=r"NVIDIA GPU of compute capability 8\.9 .*the device is 'cpu'.*'auto'"):
        trainer(FP8Precision(backend="native")).fit(model)
    assert type(model.head) is nn.Linear, "a refused model has been changed"


@pytest.mark.parametrize("backend", ["auto", "emulated"])
def test_backend_reaches_the_layers(backend: str) -> None:
    model = Regression()
    trainer(FP8Precision(backend=backend)).fit(model)
    assert model.head.backend == backend


def test_smoothing_without_a_swiglu_is_refused_when_training_starts() -> None:
    with pytest.raises(ValueError, match="found no SwiGLU in BoringModel"):
        trainer(FP8Precision(smooth_swiglu="channel")).fit(BoringModel())


def test_from_yaml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py"])
    config = yaml.safe_load("""
        seed_everything: 1
        trainer:
          plugins:
            class_path: lightning_lowbit.FP8Precision
            init_args:
              scaling: delayed
              history: 4
              algorithm: most_recent
              margin: 1
              power_of_two: true
              gradient_format: e4m3
              overrides: {head: bf16, first: {preset: fp8-delayed, every: {scale: {history: 2}}}}
              skip: [down_proj]
              smooth_swiglu: token
              backend: emulated
              fresh_histories: true
              compute_dtype: fp32
          logger: false
          enable_checkpointing: false
    """)
    cli = LightningCLI(Regression, args=config, run=False, save_config_callback=None, auto_configure_optimizers=False)
    plugin = cli.trainer.precision_plugin
    scale = Scale("fp32", **DELAYED, history=4, algorithm="most_recent", margin=1, rounding="power_of_two")
    assert plugin.casts == fp8("e4m3", scale)
    assert plugin.overrides == {"head": LinearCasts(), "first": fp8("e5m2", Scale("fp32", **DELAYED, history=2))}
    assert (plugin.skip, plugin.smooth_swiglu, plugin.backend) == (["down_proj"], "token", "emulated")
    assert (plugin.fresh_histories, plugin.precision) == (True, "32-true")


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.fast("delayed-token", "current-channel", "row-None", "mx-None")
@pytest.mark.parametrize("smooth", [None, "channel", "token"])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_loss_falls(scaling: str, smooth: str | None) -> None:
    def train(plugin: LowBitPrecision) -> tuple[Tensor, Tensor]:
        model = Regression()
        trainer(plugin, max_steps=40, limit_train_batches=20, limit_val_batches=4).fit(model)
        first, last = torch.stack(model.val_losses[2:6]).mean(), torch.stack(model.val_losses[-4:]).mean()
        return first, last

    first, last = train(FP8Precision(scaling, smooth_swiglu=smooth, history=4 if scaling == "delayed" else 16))
    assert last < 0.4 * first, f"the loss only falls from {first:.3f} to {last:.3f}"
    in_bf16 = train(LowBitPrecision("bf16"))[1]
    assert last < 1.5 * in_bf16, f"the loss falls to {last:.3f}, in bf16 to {in_bf16:.3f}"


# Ways to train, each of which takes its steps elsewhere.
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"accumulate_grad_batches": 3, "limit_train_batches": 12},
    "last batch alone": {"accumulate_grad_batches": 3, "limit_train_batches": 4, "max_epochs": 3},
    "validated": {"val_check_interval": 2, "limit_val_batches": 2, "num_sanity_val_steps": 2},
    "validated between micro-batches": {
        "accumulate_grad_batches": 3,
        "limit_train_batches": 12,
        "val_check_interval": 1,
        "limit_val_batches": 1,
    },
    "clipped": {"gradient_clip_val": 1e-3},
    "clipped by value": {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"},
}


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("smooth", [None, "channel"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_histories_are_what_the_steps_saw(way: str, recompute: bool, smooth: str | None) -> None:
    model, witness = Regression(recompute, val_size=100.0), Witness()
    plugin = FP8Precision(history=3, smooth_swiglu=smooth, compute_dtype="fp32")
    options = {"max_steps": 4, "limit_train_batches": 4, "num_sanity_val_steps": 0, **WAYS[way]}
    made = trainer(plugin, callbacks=[witness], **options)
    made.fit(model)
    assert len(witness.steps) == plugin.step == 4
    assert bool(model.val_losses) == bool(options.get("limit_val_batches")), "validation did not do what it should"
    found = state(plugin)
    assert {key.split("/")[0] for key in found["amax_history"]} == set(LAYERS)
    assert_histories(found["amax_history"], witness, 3)
    assert_in_force(found["amax_history"], witness, 3)
    assert list(found["channel_amax"]) == ([DOWN] if smooth else [])
    for name, amax in found["channel_amax"].items():
        assert torch.equal(amax, witness.channels[name]), "the channels are not those of the last step"


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_each_step_scales_by_the_steps_before_it(algorithm: str) -> None:
    witness, plugin = Witness(), FP8Precision(history=3, algorithm=algorithm, compute_dtype="fp32")
    trainer(plugin, callbacks=[witness], max_steps=6, limit_train_batches=6).fit(Regression())
    found = state(plugin)["amax_history"]
    assert_in_force(found, witness, 1 if algorithm == "most_recent" else 3)
    in_force = torch.stack([amaxes for _, amaxes in witness.in_force["head"]])
    assert (in_force[0] == 0).all(), "before the first step there is nothing to scale by"
    assert (in_force[1:] > 0).all(), "the second step still scales by its own amaxes"


def test_without_a_history_each_step_scales_by_itself() -> None:
    """One step of delayed scaling is one of current scaling; two are not, or the histories are not used."""

    def weights(scaling: str, steps: int) -> Tensor:
        model = Regression()
        trainer(FP8Precision(scaling), max_steps=steps).fit(model)
        return flat(model)

    assert torch.equal(weights("delayed", 1), weights("current", 1))
    assert not torch.equal(weights("delayed", 2), weights("current", 2))


class Manual(Regression):
    """Manual optimization of several micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for micro_batch in range(2):
            self.manual_backward(self.loss(batch_idx * 2 + micro_batch, 1.0 + micro_batch))
        optimizer.step()


@pytest.mark.parametrize("smooth", [None, "channel"])
def test_manual_optimization(smooth: str | None) -> None:
    witness, plugin = Witness(), FP8Precision(history=3, smooth_swiglu=smooth, compute_dtype="fp32")
    trainer(plugin, callbacks=[witness], max_steps=4, limit_train_batches=4).fit(Manual())
    assert len(witness.steps) == plugin.step == 4
    found = state(plugin)
    assert_histories(found["amax_history"], witness, 3)
    for name, amax in found["channel_amax"].items():
        assert torch.equal(amax, witness.channels[name]), "the channels are not those of the last step"


def test_manual_optimization_with_two_optimizers() -> None:
    """Each step of each optimizer is a step of the histories, also the second one of a batch."""
    witness, plugin = Witness(), FP8Precision(history=4, compute_dtype="fp32")
    trainer(plugin, callbacks=[witness], max_steps=6, limit_train_batches=3).fit(GAN())
    assert len(witness.steps) == plugin.step == 6
    found = state(plugin)["amax_history"]
    assert found["critic/dgrad_g"].any(), "what the generator's step alone computes has no history"
    assert found["generator/wgrad_g"].any(), "what the generator's step alone computes has no history"
    assert_histories(found, witness, 4)
    assert_in_force(found, witness, 4)


def test_smoothing_in_the_second_step_of_a_batch_is_that_of_its_own_channels() -> None:
    class Twice(Manual):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            optimizer = self.optimizers()
            for size in (1.0, 50.0):
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch_idx, size))
                optimizer.step()

    witness, plugin = Witness(), FP8Precision(history=2, smooth_swiglu="channel", compute_dtype="fp32")
    trainer(plugin, callbacks=[witness], max_steps=4, limit_train_batches=2).fit(Twice())
    found = state(plugin)
    assert torch.equal(found["channel_amax"][DOWN], witness.channels[DOWN]), "the second pass has not been recorded"
    assert_histories(found["amax_history"], witness, 2)


def test_after_manual_optimization_nothing_is_recorded() -> None:
    model, plugin = Manual(), FP8Precision(history=2, smooth_swiglu="channel", compute_dtype="fp32")
    trainer(plugin).fit(model)
    down = model.mlp.down_proj
    assert not down.amaxes.staged.any(), "something is left of the last step"
    model(torch.full((2, 16), 1e3))
    assert not down.amaxes.staged.any() and not down.amaxes.staged_channels.any(), "a pass outside training is recorded"


class Sample(Callback):
    """Evaluates the model in the middle of training, as monitors and generation of samples do."""

    def __init__(self, hook: str) -> None:
        def evaluate(trainer: Any, pl_module: Any, *args: Any) -> None:
            pl_module.eval()
            with torch.no_grad():
                pl_module(torch.full((2, 16), 1e20))
            pl_module.train()

        setattr(self, hook, evaluate)


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("smooth", [None, "channel", "token"])
@pytest.mark.parametrize(
    "hook", ["on_train_batch_start", "on_after_backward", "on_before_optimizer_step", "on_train_batch_end"]
)
def test_what_callbacks_compute_has_no_part_in_training(hook: str, smooth: str | None) -> None:
    def train(callbacks: list[Callback]) -> tuple[Tensor, dict[str, Any]]:
        model, plugin = Regression(), FP8Precision(history=4, smooth_swiglu=smooth)
        trainer(plugin, accumulate_grad_batches=2, limit_train_batches=4, callbacks=callbacks).fit(model)
        return flat(model), state(plugin)

    (weights, alone), (others, sampled) = train([]), train([Sample(hook)])
    for key, amaxes in alone["amax_history"].items():
        assert torch.equal(sampled["amax_history"][key], amaxes), f"a pass in {hook} has entered the history of {key}"
    for key, amaxes in alone["channel_amax"].items():
        assert torch.equal(sampled["channel_amax"][key], amaxes), f"a pass in {hook} has entered the channels of {key}"
    assert torch.equal(others, weights), f"a pass in {hook} has changed what is trained"


@pytest.mark.parametrize("smooth", [None, "channel", "token"])
def test_validation_data_has_no_part_in_training(smooth: str | None) -> None:
    def train(val_size: float, **kwargs: Any) -> tuple[Tensor, dict[str, Any]]:
        model, plugin = Regression(val_size=val_size), FP8Precision(history=4, smooth_swiglu=smooth)
        options = {"accumulate_grad_batches": 2, "max_steps": 4, "limit_train_batches": 8, **kwargs}
        trainer(plugin, **options).fit(model)
        assert bool(model.val_losses) == ("val_check_interval" in kwargs)
        return flat(model), state(plugin)

    weights, histories = train(1.0)
    for interval in (1, 2, 3):  # 1 and 3: between micro-batches
        others, other_histories = train(1e30, val_check_interval=interval, limit_val_batches=2)
        for kind in ("amax_history", "channel_amax"):
            for key, amaxes in histories[kind].items():
                assert torch.equal(other_histories[kind][key], amaxes), f"validation has entered the {kind} of {key}"
        assert torch.equal(others, weights), "validation data has changed what was trained"


def test_evaluation_scales_by_the_histories_and_leaves_them_alone() -> None:
    model, plugin = Regression(val_size=50.0), FP8Precision(history=4, smooth_swiglu="channel")
    made = trainer(plugin, limit_val_batches=2, limit_test_batches=2, limit_predict_batches=2)
    made.fit(model)
    before = state(plugin)
    evaluations = (made.validate, made.test)
    for evaluate in evaluations:
        evaluate(model, verbose=False)
    made.predict(model)
    after = state(plugin)
    assert torch.equal(after["channel_amax"][DOWN], before["channel_amax"][DOWN])
    for key, amaxes in before["amax_history"].items():
        assert torch.equal(after["amax_history"][key], amaxes), f"evaluation has entered the history of {key}"
    *_, histories, _ = model.val_losses
    trainer(FP8Precision(history=4, smooth_swiglu="channel"), limit_test_batches=2).test(model, verbose=False)
    *_, none, _ = model.val_losses
    assert histories != none, "evaluation does not use the histories"


def test_evaluation_before_training_leaves_nothing() -> None:
    model, plugin, witness = Regression(val_size=50.0), FP8Precision(history=4, compute_dtype="fp32"), Witness()
    made = trainer(plugin, callbacks=[witness], limit_val_batches=2, limit_test_batches=2, limit_predict_batches=2)
    made.validate(model, verbose=False)
    made.test(model, verbose=False)
    made.predict(model)
    assert not any(amaxes.any() for amaxes in state(plugin)["amax_history"].values())
    made.fit(model)
    assert_histories(state(plugin)["amax_history"], witness, 4)


def test_fit_validate_fit_on_one_trainer_goes_on() -> None:
    model, plugin, witness = Regression(), FP8Precision(history=4, compute_dtype="fp32"), Witness()
    made = trainer(plugin, callbacks=[witness], max_steps=2, limit_train_batches=4, limit_val_batches=1)
    made.fit(model)
    made.validate(model, verbose=False)
    made.fit_loop.epoch_loop.max_steps = 4
    made.fit(model)
    assert len(witness.steps) == plugin.step == 4
    found = state(plugin)["amax_history"]
    assert_histories(found, witness, 4)
    assert_in_force(found, witness, 4)


@pytest.mark.parametrize("same_plugin", [True, False])
@pytest.mark.parametrize("same_model", [True, False])
def test_another_trainer_starts_anew(same_plugin: bool, same_model: bool) -> None:
    model, plugin = Regression(), FP8Precision(history=4, smooth_swiglu="channel", compute_dtype="fp32")
    first = trainer(plugin)
    first.fit(model)
    model = model if same_model else Regression()
    other = plugin if same_plugin else FP8Precision(history=4, smooth_swiglu="channel", compute_dtype="fp32")
    witness = Witness()
    second = trainer(other, callbacks=[witness])
    second.fit(model)
    found = state(other)
    assert len(witness.steps) == 2
    assert_histories(found["amax_history"], witness, 4)
    assert_in_force(found["amax_history"], witness, 4)


def test_another_model_in_one_trainer_has_histories_of_its_own() -> None:
    plugin = FP8Precision(history=4, smooth_swiglu="channel")
    made = trainer(plugin, limit_val_batches=2)
    made.fit(Regression())
    expected, model = Regression(), Regression()
    trainer(FP8Precision(history=4, smooth_swiglu="channel"), limit_val_batches=2).validate(expected, verbose=False)
    made.validate(model, verbose=False)
    assert model.val_losses == expected.val_losses, "a model is evaluated with the amaxes of another one"
    assert not any(amaxes.any() for amaxes in state(plugin)["amax_history"].values())


def test_another_model_with_other_layers_in_one_trainer() -> None:
    made = trainer(FP8Precision(history=4))
    made.fit(Regression())
    made.fit_loop.epoch_loop.max_steps = 4
    model = BoringModel()
    made.fit(model)
    assert {key.split("/")[0] for key in state(made.precision_plugin)["amax_history"]} == {"layer"}


def test_training_goes_on_and_folds_where_evaluation_has_moved_the_histories(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: what is used first in evaluation is moved there, under ``torch.inference_mode``."""
    monkeypatch.setattr(AmaxHistories, "to_", AmaxHistories._place)
    model, plugin = Regression(), FP8Precision(history=4, smooth_swiglu="channel")
    made = trainer(plugin, limit_val_batches=1, max_steps=1)
    made.fit(model)
    made.validate(model, verbose=False)
    made.fit_loop.epoch_loop.max_steps = 2
    made.fit(model)
    made.validate(model, verbose=False)
    fold(model)
    assert model.mlp.down_proj.full_casts.smooth is None


def test_phases_keep_the_histories_of_what_they_leave_in_high_precision() -> None:
    witness = Witness()
    plugin = FP8Precision(history=4, compute_dtype="fp32")
    trainer(plugin, callbacks=[QAFSwitch(step=2), witness], max_steps=4, limit_train_batches=4).fit(Regression())
    assert plugin.phase == "qaf"
    found = state(plugin)["amax_history"]
    for key in found:
        expected = witness.history(key, 4, 4 if "/fprop" in key else 2)
        assert torch.equal(found[key], expected), f"{key} holds {found[key].tolist()}, not {expected.tolist()}"


# --- single layers ----------------------------------------------------------------------------------------------------


def test_layers_in_other_casts_have_no_histories_and_the_others_do() -> None:
    shorter = {"preset": "fp8-delayed", "every": {"scale": {"history": 2}}}
    overrides = {"head": "bf16", "up_proj": "fp8-current", "gate_proj": shorter}
    plugin, witness = FP8Precision(history=4, overrides=overrides, skip=["first"], compute_dtype="fp32"), Witness()
    model = Regression()
    trainer(plugin, callbacks=[witness], max_steps=3, limit_train_batches=3).fit(model)
    found = state(plugin)["amax_history"]
    assert {key.split("/")[0] for key in found} == {"mlp.gate_proj", DOWN}
    assert model.head.amaxes is None
    gate = {key: amaxes for key, amaxes in found.items() if key.startswith("mlp.gate_proj")}
    down = {key: amaxes for key, amaxes in found.items() if key.startswith(DOWN)}
    assert_histories(gate, witness, 2)
    assert_histories(down, witness, 4)
    assert_in_force(gate, witness, 2)
    assert_in_force(down, witness, 4)


def test_first_and_last_blocks_of_a_language_model_in_high_precision() -> None:
    config = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2}
    plugin = FP8Precision(skip=["layers.0", "lm_head"], overrides={"layers.-1": "bf16"})
    tokens = DataLoader(torch.randint(256, (4, 9)), batch_size=2)
    trainer(plugin).fit(CausalLM(config=config), tokens, tokens)
    kept = {tuple(key.split(".")[2:4]) for key in state(plugin)["amax_history"]}
    assert kept == {("layers", "1"), ("layers", "2")}
    for amaxes in state(plugin)["amax_history"].values():
        assert (amaxes[-2:] > 0).all() and (amaxes[:-2] == 0).all(), "two steps give two amaxes of every operand"


# --- checkpoints ------------------------------------------------------------------------------------------------------


def saved(plugin: LowBitPrecision, path: str = "x.ckpt", **kwargs: Any) -> Regression:
    """A model trained for two steps, and its checkpoint."""
    model, made = Regression(), trainer(plugin, **kwargs)
    made.fit(model)
    made.save_checkpoint(path)
    return model


def resume(plugin: LowBitPrecision | None, model: Regression | None = None, **kwargs: Any) -> Witness:
    """Two more steps from the checkpoint."""
    witness = Witness()
    options = {"max_steps": 4, "callbacks": [witness], **kwargs}
    trainer(plugin, **options).fit(model or Regression(), ckpt_path="x.ckpt")
    return witness


@pytest.mark.filterwarnings("ignore:The checkpoint was trained otherwise")
def test_a_checkpoint_holds_plain_weights_and_loads_everywhere() -> None:
    plugin = FP8Precision(history=4, smooth_swiglu="channel")
    model = saved(plugin)
    checkpoint = torch.load("x.ckpt", weights_only=True)
    assert list(checkpoint["state_dict"]) == list(Regression().state_dict())
    assert not list(model.buffers()), "there are buffers, which a strategy would broadcast"
    plain = Regression()
    plain.load_state_dict(checkpoint["state_dict"])
    assert torch.equal(flat(plain), flat(model))
    held = checkpoint["lightning_lowbit"]
    expected = {"step", "trained", "micro_batch", "phase", "seed", "blend", "accumulated"}
    expected |= {"amax_history", "channel_amax"}
    assert set(held) == expected
    for kind in ("amax_history", "channel_amax"):
        for key, amaxes in held[kind].items():
            assert (amaxes.dtype, amaxes.device.type) == (torch.float32, "cpu")
            assert amaxes.untyped_storage().nbytes() == 4 * amaxes.numel(), f"{key} drags along a larger tensor"
            assert torch.equal(amaxes, state(plugin)[kind][key])
    assert held["channel_amax"][DOWN].shape == (24,)


class Keep(Callback):
    """A checkpoint of each step."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        trainer.save_checkpoint(f"{trainer.global_step}.ckpt")


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize(
    "arguments",
    [
        {"history": 4},
        {"history": 4, "smooth_swiglu": "channel"},
        {"history": 4, "smooth_swiglu": "token"},
        {"scaling": "current", "smooth_swiglu": "channel"},
    ],
    ids=str,
)
def test_a_checkpoint_evaluates_as_the_run_did(arguments: dict[str, Any], step: int) -> None:
    """Its histories and channels are in force in evaluation, too; another run would scale by the batch itself."""
    model, options = Regression(), {"limit_val_batches": 2, "num_sanity_val_steps": 0}
    trainer(FP8Precision(**arguments), val_check_interval=1, callbacks=[Keep()], max_steps=4, **options).fit(model)
    expected = torch.stack(model.val_losses[2 * step - 2 : 2 * step])

    def evaluate(**others: Any) -> Tensor:
        fresh = Regression()
        plugin = FP8Precision(**arguments, **others)
        trainer(plugin, **options).validate(fresh, ckpt_path=f"{step}.ckpt", verbose=False)
        assert plugin.step == step
        return torch.stack(fresh.val_losses)

    assert torch.equal(evaluate(), expected), "a checkpoint evaluates to another loss than the run it is of"
    assert not torch.equal(evaluate(fresh_histories=True), expected), "the histories make no difference"


def test_fresh_histories_forget_those_of_the_checkpoint() -> None:
    arguments = {"history": 4, "smooth_swiglu": "channel", "compute_dtype": "fp32"}
    saved(FP8Precision(**arguments))
    plugin = FP8Precision(**arguments, fresh_histories=True)
    witness = resume(plugin)
    assert (plugin.step, len(witness.steps)) == (4, 2)
    assert_histories(state(plugin)["amax_history"], witness, 4)
    assert_in_force(state(plugin)["amax_history"], witness, 4)


def test_resuming_goes_on_with_the_histories() -> None:
    arguments = {"history": 4, "smooth_swiglu": "channel", "compute_dtype": "fp32"}
    before = Witness()
    saved(FP8Precision(**arguments), callbacks=[before])
    plugin = FP8Precision(**arguments)
    witness = resume(plugin)
    before.steps += witness.steps
    assert len(before.steps) == plugin.step == 4
    assert_histories(state(plugin)["amax_history"], before, 4)
    for steps, amaxes in witness.in_force["head"]:
        for operand, amax in zip(OPERANDS, amaxes, strict=True):
            expected = before.history(f"head/{operand}", 4, 2 + steps).max()
            assert amax == expected, f"head/{operand} goes on with {amax}, not {expected}"


BASE = {"history": 4, "compute_dtype": "fp32"}


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ({}, {"history": 3}, r"amax_history of first/fprop_x has 4 steps, and this run's 3\."),
        ({}, {"history": 16}, r"amax_history of first/fprop_x has 4 steps, and this run's 16\."),
        ({"skip": ["head"]}, {}, r"is that of other layers: missing there: head/dgrad_g, head/dgrad_w, head/f"),
        ({}, {"skip": ["head"]}, r"is that of other layers: not in this model: head/dgrad_g, head/dgrad_w, head/f"),
        ({"only": ["mlp"]}, {"only": ["first"]}, r"missing there: first/.*; not in this model: mlp\.down_proj/"),
        ({}, {"overrides": {"first": "bf16"}}, r"not in this model: first/"),
        ({}, {"smooth_swiglu": "channel"}, r"not in this model: mlp\.down_proj/dgrad_w, mlp\.down_proj/fprop_w"),
        ({"smooth_swiglu": "channel"}, {}, r"missing there: mlp\.down_proj/dgrad_w, mlp\.down_proj/fprop_w"),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:The checkpoint was trained otherwise")
def test_histories_of_other_settings_are_refused_and_can_be_left(
    before: dict[str, Any], after: dict[str, Any], message: str
) -> None:
    saved(FP8Precision(**{**BASE, **before}))
    with pytest.raises(
        ValueError, match=rf"The checkpoint's {message if 'amax' in message else '.*' + message}"
    ) as info:
        resume(FP8Precision(**{**BASE, **after}))
    assert "fresh_histories=True" in str(info.value), "the message does not say what to do"
    plugin = FP8Precision(**{**BASE, **after}, fresh_histories=True)
    witness = resume(plugin)
    length = after.get("history", 4)
    assert (plugin.step, len(witness.steps)) == (4, 2)
    assert_histories(state(plugin)["amax_history"], witness, length)


@pytest.mark.filterwarnings("ignore:The checkpoint was trained otherwise")
def test_a_checkpoint_of_fp4_starts_empty_histories_and_says_so() -> None:
    saved(FP4Precision())
    plugin = FP8Precision(history=4, compute_dtype="fp32")
    with pytest.warns(UserWarning, match="holds no amax histories.*they start empty"):
        witness = resume(plugin)
    assert plugin.step == 4
    assert_histories(state(plugin)["amax_history"], witness, 4)


@pytest.mark.filterwarnings("ignore:The checkpoint was trained otherwise")
def test_fresh_histories_expect_none_of_a_checkpoint() -> None:
    saved(FP4Precision())
    plugin = FP8Precision(history=4, compute_dtype="fp32", fresh_histories=True)
    witness = resume(plugin)  # a warning would be an error
    assert_histories(state(plugin)["amax_history"], witness, 4)


@pytest.mark.parametrize(
    "other",
    [FP8Precision("current"), FP8Precision("mx"), FP4Precision(), None],
    ids=["fp8-current", "mxfp8", "nvfp4", "no plugin"],
)
@pytest.mark.filterwarnings("ignore:The checkpoint was trained otherwise")
def test_a_checkpoint_with_histories_goes_on_without(other: LowBitPrecision | None) -> None:
    saved(FP8Precision(history=4, smooth_swiglu="channel"))
    model = Regression()
    resume(other, model)
    assert len(model.losses) == 2
    if other is not None:
        assert other.step == 4
        assert {*state(other)} == {"step", "trained", "micro_batch", "phase", "seed", "blend"}
