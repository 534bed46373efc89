"""Ternary and integer quantization-aware training in a real Trainer: arguments, λ, and what checkpoints keep of it."""

from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_lowbit import (
    Cast,
    FP8Precision,
    IntegerPrecision,
    LinearCasts,
    LowBitPrecision,
    Scale,
    TernaryPrecision,
    quantize,
)
from lightning_lowbit.nn import convert, set_blend
from lightning_lowbit.nn.gemm import native_obstacle
from tests.lightnings import Callback, LightningCLI
from tests.precision.ranks_ddp import QAT
from tests.precision.regression import LAYERS, Ramp, Regression, flat, state, trainer

on_int8_units = pytest.mark.skipif(
    native_obstacle(torch.device("cpu"), "int8") is not None, reason="this CPU has no int8 units"
)

# --- arguments --------------------------------------------------------------------------------------------------------


def qat(x: Cast | None, w: Cast | None) -> LinearCasts:
    return LinearCasts(x, w, None, "fprop" if w else None, None, "fprop" if x else None)


def integer(bits: int, block: Any = 128, statistic: Any = "absmax") -> Cast:
    return Cast(f"int{bits}", Scale("fp32", block, statistic=statistic), rounded=isinstance(block, int))


TOKENS = Cast("int8", Scale("fp32", "row", epsilon=1e-5))
GAMMA = Scale("fp32", "tensor", statistic="absmean", epsilon=1e-5)
TERNARY = Cast("ternary", GAMMA)


@pytest.mark.parametrize(
    ("kind", "arguments", "casts"),
    [
        (TernaryPrecision, {}, qat(TOKENS, TERNARY)),
        (TernaryPrecision, {"activation_bits": 4}, qat(TOKENS.replace(element="int4"), TERNARY)),
        (TernaryPrecision, {"activation_bits": None}, qat(None, TERNARY)),
        (TernaryPrecision, {"scale_factor": 1.1547}, qat(TOKENS, TERNARY.replace(scale={"factor": 1.1547}))),
        (IntegerPrecision, {}, qat(integer(8), integer(8))),
        (IntegerPrecision, {"weight_bits": 4}, qat(integer(8), integer(4))),
        (IntegerPrecision, {"activation_bits": 2}, qat(integer(2), integer(8))),
        (IntegerPrecision, {"weight_bits": 4, "activation_bits": None}, qat(None, integer(4))),
        (IntegerPrecision, {"weight_bits": None}, qat(integer(8), None)),
        (IntegerPrecision, {"group": 64}, qat(integer(8, 64), integer(8, 64))),
        (IntegerPrecision, {"group": "row"}, qat(integer(8, "row"), integer(8, "row"))),
        (IntegerPrecision, {"group": "tensor"}, qat(integer(8, "tensor"), integer(8, "tensor"))),
        (IntegerPrecision, {"activation_group": "row"}, qat(integer(8, "row"), integer(8))),
        (IntegerPrecision, {"group": 32, "activation_group": 64}, qat(integer(8, 64), integer(8, 32))),
        (IntegerPrecision, {"symmetric": False}, qat(integer(8), integer(8, statistic="minmax"))),
        (
            IntegerPrecision,
            {"weight_bits": 3, "activation_bits": None, "group": "row", "symmetric": False},
            qat(None, integer(3, "row", "minmax")),
        ),
    ],
    ids=str,
)
def test_arguments_land_in_the_casts(kind: type, arguments: dict[str, Any], casts: LinearCasts) -> None:
    assert kind(**arguments).casts == casts


def test_by_default_they_are_the_presets() -> None:
    assert TernaryPrecision().casts == LinearCasts.preset("ternary")
    for bits in range(2, 9):
        assert IntegerPrecision(bits, bits).casts == LinearCasts.preset(f"int{bits}")


BITS = r"is a whole number from 2 to 8, or None for high precision; got"
GROUP = r"group is a number of elements such as 128, 'row' or 'tensor'; got"


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (TernaryPrecision, {"activation_bits": 1}, rf"activation_bits {BITS} 1\."),
        (TernaryPrecision, {"activation_bits": True}, rf"activation_bits {BITS} True\."),
        (
            TernaryPrecision,
            {"scale_factor": 0},
            r"scale_factor is what mean\|W\| is multiplied by, a positive number; got 0\.",
        ),
        (TernaryPrecision, {"scale_factor": -1.0}, r"a positive number; got -1.0\."),
        (TernaryPrecision, {"scale_factor": "1"}, r"a positive number; got '1'\."),
        (TernaryPrecision, {"backend": "nativ"}, r"Unknown backend 'nativ'. Did you mean 'native'\?"),
        (IntegerPrecision, {"weight_bits": 1}, rf"weight_bits {BITS} 1\."),
        (IntegerPrecision, {"weight_bits": 9}, rf"weight_bits {BITS} 9\."),
        (IntegerPrecision, {"weight_bits": 4.5}, rf"weight_bits {BITS} 4.5\."),
        (IntegerPrecision, {"activation_bits": "4"}, rf"activation_bits {BITS} '4'\."),
        (IntegerPrecision, {"weight_bits": None, "activation_bits": None}, "Give weight_bits or activation_bits: with"),
        (IntegerPrecision, {"group": 0}, f"{GROUP} 0"),
        (IntegerPrecision, {"group": "rows"}, f"{GROUP} 'rows'"),
        (IntegerPrecision, {"activation_group": 0}, f"{GROUP} 0"),
        (IntegerPrecision, {"symmetric": 1}, r"symmetric is true or false; got 1\."),
        (IntegerPrecision, {"backend": "native"}, "fprop of the casts has no native GEMM: .* or integers, with scales"),
        (
            IntegerPrecision,
            {"group": "row", "symmetric": False, "backend": "native"},
            "fprop of the casts has no native GEMM",
        ),
    ],
    ids=str,
)
def test_bad_arguments_say_what_to_do(kind: type, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**arguments)


def test_default_groups_train_models_of_any_width() -> None:
    """Rows of 1, 16 and 24 elements, a transposed weight, and zero points."""
    for arguments in ({}, {"symmetric": False}, {"group": 24, "activation_group": 25}):
        model = Regression()
        model.narrow = nn.Linear(1, 16)
        before = flat(model).clone()
        trainer(IntegerPrecision(4, 8, **arguments)).fit(model)
        assert flat(model).isfinite().all() and not torch.equal(flat(model), before), f"{arguments}: not trained"
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    assert len(IntegerPrecision(4, 8).plan(GPT2LMHeadModel(config))) == 5


@pytest.mark.parametrize("columns", [1, 86, 128])
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_short_row_is_one_group(columns: int, symmetric: bool) -> None:
    """Zeros that pad it are no part of it: codes, scales and zero points are those of the row."""
    x = torch.randn(5, columns, generator=torch.Generator().manual_seed(0)) + 0.5
    of = {group: IntegerPrecision(4, None, group, symmetric=symmetric).casts.fprop_w for group in (128, "row")}
    groups, rows = (quantize(x, cast) for cast in of.values())
    assert groups.scales.shape == rows.scales.shape == (5, 1)
    for name in ("codes", "scales", "zero_points"):
        found, wanted = getattr(groups, name), getattr(rows, name)
        assert found is wanted is None or torch.equal(found, wanted), f"{name} differ"
    assert torch.equal(groups.dequantize(), rows.dequantize())


@on_int8_units
@pytest.mark.parametrize("make", [TernaryPrecision, lambda **how: IntegerPrecision(4, 8, "row", **how)])
def test_backend_native(monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    """Trains on int8 units, and is refused before anything is changed where there are none."""
    model = Regression()
    trainer(make(backend="native")).fit(model)
    assert model.head.native_gemms(torch.device("cpu")) == ("fprop",)
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    model = Regression()
    with pytest.raises(ValueError, match="or a CPU with VNNI; this CPU has none. Use backend='auto'"):
        trainer(make(backend="native")).fit(model)
    assert type(model.head) is nn.Linear, "a refused model has been changed"


def test_from_yaml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py"])

    def plugin(kind: str, arguments: str) -> Any:
        given = {"class_path": f"lightning_lowbit.{kind}", "init_args": yaml.safe_load(arguments)}
        config = {"seed_everything": 1, "trainer": {"plugins": given, "logger": False, "enable_checkpointing": False}}
        how = {"run": False, "save_config_callback": None, "auto_configure_optimizers": False}
        return LightningCLI(Regression, args=config, **how).trainer.precision_plugin

    found = plugin("TernaryPrecision", "{activation_bits: 4, scale_factor: 1.1547, skip: [head], backend: emulated}")
    assert found.casts == TernaryPrecision(4, 1.1547).casts
    assert (found.skip, found.backend) == (["head"], "emulated")
    found = plugin("TernaryPrecision", "{activation_bits: null, overrides: {head: int8}, compute_dtype: fp32}")
    assert found.casts == TernaryPrecision(None).casts
    assert (found.overrides, found.precision) == ({"head": LinearCasts.preset("int8")}, "32-true")
    found = plugin(
        "IntegerPrecision", "{weight_bits: 4, activation_bits: 8, group: 16, activation_group: row, symmetric: false}"
    )
    assert found.casts == IntegerPrecision(4, 8, 16, activation_group="row", symmetric=False).casts
    found = plugin("IntegerPrecision", "{weight_bits: 2, activation_bits: null, group: tensor}")
    assert found.casts == IntegerPrecision(2, None, "tensor").casts


# --- training ---------------------------------------------------------------------------------------------------------

PLUGINS = {
    "ternary": TernaryPrecision,
    "ternary, x in hp": lambda **how: TernaryPrecision(None, **how),
    "A8W8": lambda **how: IntegerPrecision(group=8, **how),
    "A8W4, zero points": lambda **how: IntegerPrecision(4, 8, 8, activation_group="row", symmetric=False, **how),
    "W2": lambda **how: IntegerPrecision(2, None, "row", **how),
}


@pytest.mark.parametrize("name", PLUGINS)
def test_loss_falls_and_weights_load_anywhere(name: str) -> None:
    model, plugin = Regression(), PLUGINS[name]()
    made = trainer(plugin, max_steps=40, limit_train_batches=20, limit_val_batches=4)
    made.fit(model)
    assert {layer.casts for layer in model.modules() if hasattr(layer, "casts")} == {plugin.casts}
    first, last = torch.stack(model.val_losses[2:6]).mean(), torch.stack(model.val_losses[-4:]).mean()
    assert last < 0.6 * first, f"the loss only falls from {first:.3f} to {last:.3f}"
    made.save_checkpoint("x.ckpt")
    checkpoint = torch.load("x.ckpt", weights_only=True)
    plain = Regression()
    assert list(checkpoint["state_dict"]) == list(plain.state_dict())
    plain.load_state_dict(checkpoint["state_dict"])
    assert torch.equal(flat(plain), flat(model))


# --- λ ----------------------------------------------------------------------------------------------------------------


def trained(plugin: LowBitPrecision, *shares: float, ckpt_path: str | None = None, **kwargs: Any) -> Regression:
    """A model after four steps, in the first of which λ was set by hand."""
    model = Regression()
    callbacks = [Ramp(*shares), *kwargs.pop("callbacks", [])]
    made = trainer(plugin, **{"max_steps": 4, "limit_train_batches": 4, "callbacks": callbacks, **kwargs})
    made.fit(model, ckpt_path=ckpt_path)
    return model


@pytest.mark.parametrize("name", PLUGINS)
def test_at_0_it_trains_as_without_casts_and_at_1_as_without_a_share(name: str) -> None:
    make = PLUGINS[name]
    assert torch.equal(flat(trained(make(), 0.0)), flat(trained(LowBitPrecision("bf16"))))
    whole = flat(trained(make()))
    assert torch.equal(flat(trained(make(), 1.0)), whole)
    assert not torch.equal(flat(trained(make(), 0.0, 0.5, 1.0)), whole), "λ makes no difference"


def test_the_share_is_one_tensor_for_all_layers() -> None:
    plugin = TernaryPrecision()
    assert (plugin.blend.shape, plugin.blend.dtype, plugin.blend.item()) == ((), torch.float32, 1.0)
    model = trained(plugin, 0.25)
    for name in LAYERS:
        assert model.get_submodule(name).blend is plugin.blend, f"λ of {name} is another tensor"
    assert plugin.is_blending
    plugin.set_blend(0)
    assert (model.head.blend.item(), plugin.is_blending) == (0.0, True)
    plugin.set_blend(1)
    assert (model.head.blend, plugin.blend.item(), plugin.is_blending) == (None, 1.0, False)


@pytest.mark.parametrize("share", [-0.1, 1.5, torch.nan, True, "0.5", None, torch.tensor(0.5)], ids=str)
def test_what_is_no_share_is_refused(share: Any) -> None:
    plugin = TernaryPrecision()
    model = trained(plugin, 0.25)
    with pytest.raises(ValueError, match="1 for full quantization, 0 or more and at most 1; got "):
        plugin.set_blend(share)
    assert plugin.blend == model.head.blend == 0.25, "what was refused has been set"


def test_a_run_begins_with_the_share_that_was_set_and_another_one_at_1() -> None:
    plugin = TernaryPrecision()
    plugin.set_blend(0.5)
    model = trained(plugin)
    assert plugin.blend == model.head.blend == 0.5
    other = trained(plugin)
    assert plugin.blend == 1
    assert other.head.blend is None
    assert torch.equal(flat(other), flat(trained(TernaryPrecision())))


def test_phases_and_shares_go_together() -> None:
    plugin = FP8Precision("current")
    model = trained(plugin, 0.5)
    plugin.set_phase("hp-forward")
    assert model.head.blend == 0.5
    assert model.head.casts.fprop_x is None
    assert (state(plugin)["phase"], state(plugin)["blend"]) == ("hp-forward", 0.5)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_evaluation_has_the_share_in_force(share: float) -> None:
    plugin = TernaryPrecision()
    model = Regression()
    made = trainer(plugin, callbacks=[Ramp(share)], limit_val_batches=1, limit_test_batches=1)
    made.fit(model)
    for evaluate in (made.validate, made.test):
        evaluate(model, verbose=False)
    during, validated, tested = model.val_losses[-3:]
    plain = Regression()
    plain.load_state_dict(model.state_dict())
    convert(plain, "ternary")
    set_blend(plain, share)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = plain.loss(1000, 1.0)
    assert during == validated == tested == expected


class ElsewhereTensor(Tensor):
    """As on a GPU: it lies elsewhere than the model, and is copied there."""

    device = torch.device("meta")  # type: ignore[assignment]

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.as_subclass(Tensor).clone()


def test_training_goes_on_where_evaluation_has_moved_the_share() -> None:
    """Evaluation runs under ``torch.inference_mode``, whose tensors cannot be refilled outside."""
    model, plugin = Regression(), TernaryPrecision()
    made = trainer(plugin, callbacks=[Ramp(0.25, 0.5)], limit_val_batches=1)
    plugin.blend = plugin.blend.as_subclass(ElsewhereTensor)
    made.validate(model, verbose=False)
    assert type(plugin.blend) is Tensor, "it was not moved"
    made.fit(model)
    assert plugin.blend == model.head.blend == 0.5


def test_it_may_be_set_in_evaluation() -> None:
    class Later(Callback):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.precision_plugin.set_blend(0.5)

    plugin = TernaryPrecision()
    model = trained(plugin, 0.25, callbacks=[Later()], val_check_interval=2, limit_val_batches=1)
    assert plugin.blend == model.head.blend == 0.5
    assert len(model.losses) == 4


# --- checkpoints ------------------------------------------------------------------------------------------------------


class Keep(Callback):
    """A checkpoint at the end."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint("x.ckpt")


@pytest.mark.parametrize("name", ["ternary", "A8W4, zero points"])
def test_a_resumed_run_goes_on_with_the_share(name: str) -> None:
    """Set by hand in the first two of four steps; what goes on after these has it from the checkpoint alone."""
    epochs = {"limit_train_batches": 2}
    whole = trained(PLUGINS[name](), 0.25, 0.5, **epochs)
    trained(PLUGINS[name](), 0.25, 0.5, callbacks=[Keep()], max_steps=2, **epochs)
    checkpoint = torch.load("x.ckpt", weights_only=True)
    share = checkpoint["lightning_lowbit"]["blend"]
    assert (share.shape, share.dtype, share.device.type, share.item()) == ((), torch.float32, "cpu", 0.5)
    plugin = PLUGINS[name]()
    resumed = trained(plugin, ckpt_path="x.ckpt", **epochs)
    assert plugin.blend == resumed.head.blend == 0.5
    assert torch.equal(flat(resumed), flat(whole))
    # One from before there was a λ: all the way.
    del checkpoint["lightning_lowbit"]["blend"]
    torch.save(checkpoint, "before.ckpt")
    plugin = PLUGINS[name]()
    other = trained(plugin, ckpt_path="before.ckpt", **epochs)
    assert (plugin.blend, plugin.is_blending, other.head.blend) == (1.0, False, None)
    assert not torch.equal(flat(other), flat(whole)), "λ makes no difference"


def test_what_is_saved_stays_as_it_was() -> None:
    plugin = TernaryPrecision()
    trained(plugin, 0.25)
    saved = state(plugin)
    plugin.set_blend(0.75)
    assert saved["blend"] == 0.25, "the checkpoint's λ is the plugin's own tensor"


def test_a_checkpoint_evaluates_with_its_share() -> None:
    model, options = Regression(), {"limit_val_batches": 1, "num_sanity_val_steps": 0}
    trainer(TernaryPrecision(), callbacks=[Ramp(0.25), Keep()], **options).fit(model)
    plugin, fresh = LowBitPrecision("ternary"), Regression()
    trainer(plugin, **options).validate(fresh, ckpt_path="x.ckpt", verbose=False)
    assert plugin.blend == 0.25, "the state is kept under the name of a class"
    assert fresh.val_losses == model.val_losses[-1:]


# --- two processes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", QAT)
def test_both_ranks_train_the_same_weights(results: list[dict[str, Any]], name: str) -> None:
    one, other = (result["qat"][name] for result in results)
    assert not torch.equal(one["losses"], other["losses"]), "the ranks see the same data"
    assert torch.equal(one["weights"], other["weights"]), "the ranks have trained different weights"
    assert one["state"]["blend"] == other["state"]["blend"] == 0.5
