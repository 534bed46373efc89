"""Which modules attend, and how their calls reach attention's products; ``attention=`` of the precision plugins."""

import copy
import inspect
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as renamed
from torch.utils.data import DataLoader

from lightning_lowbit import FP4Precision, FP8Precision, LinearCasts, LowBitPrecision, convert, restore
from lightning_lowbit.callbacks import GradientNoiseMonitor, OutlierMonitor, PrecisionSummary, QuantizationMonitor
from lightning_lowbit.nn import GemmCounter, LayerKeys, set_phase
from lightning_lowbit.nn.attention.modules import attending
from lightning_lowbit.nn.layers.classes import restore_classes
from lightning_lowbit.nn.layers.layer import quantized_layers
from lightning_lowbit.patterns import clean_name
from tests.lightning_imports import CSVLogger, LightningModule, quiet_trainer
from tests.nn.layers import identical, pass_through
from tests.tables import each

WIDTH, HEADS = 32, 4


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def heads(self, x):
        return self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind()

    def merged(self, o):
        return self.out(o.transpose(1, 2).flatten(2))


class InForward(Base):
    def forward(self, x):
        return self.merged(F.scaled_dot_product_attention(*self.heads(x), is_causal=True))


class InMethod(Base):
    def attend(self, x):
        return torch.nn.functional.scaled_dot_product_attention(*self.heads(x))

    def forward(self, x):
        return self.merged(self.attend(x))


def helper(q, k, v):
    return renamed(q, k, v)


class InFunction(Base):
    def forward(self, x):
        return self.merged(helper(*self.heads(x)))


class ByHand(Base):
    """Attention that is not found: it calls no function of torch for it."""

    def forward(self, x):
        q, k, v = self.heads(x)
        return self.merged((q @ k.mT).softmax(-1) @ v)


class Holds(Base):
    """Calls attention outside of its forward pass, which only runs a module that attends."""

    def __init__(self):
        super().__init__()
        self.attention = InForward()

    def other(self, x):
        return F.scaled_dot_product_attention(*self.heads(x))

    def forward(self, x):
        return self.attention(x)


def x_of(tokens=20):
    return torch.randn(2, tokens, WIDTH, generator=torch.Generator().manual_seed(0))


def model_of(*classes, casts="nvfp4", **kwargs):
    torch.manual_seed(0)
    model = convert(nn.Sequential(*(cls() for cls in classes)), "bf16", attention=casts, **kwargs)
    LayerKeys(model).fill_(0)
    return model


def products(model):
    layers = quantized_layers(model).items()
    return {clean_name(name): str(layer.casts) for name, layer in layers if name.endswith(("qk", "pv"))}


def test_modules_attend_where_their_forward_pass_calls_it():
    for cls in (InForward, InMethod, InFunction, type("Inherited", (InMethod,), {})):
        assert list(attending(cls())) == ["_products.qk", "_products.pv"], cls
    assert not attending(ByHand())
    assert list(attending(Holds())) == ["attention._products.qk", "attention._products.pv"]
    assert list(attending(nn.MultiheadAttention(WIDTH, HEADS))) == ["_products.qk", "_products.pv"]


@each("cls", [InForward, InMethod, InFunction])
def test_calls_reach_the_products_and_nothing_stays_behind(cls):
    model = model_of(cls)
    assert inspect.signature(model[0].forward) == inspect.signature(cls().forward)
    assert type((plain := restore_classes(copy.deepcopy(model)))[0]) is cls
    with GemmCounter(model) as counter:
        y = model(x_of())
    assert {"0.qk", "0.pv"} <= {name for name, _ in counter.gemms}
    assert not counter.others
    y.sum().backward()
    assert not torch.equal(y, plain(x_of()))
    for phase in ("bf16", "fqt"):
        set_phase(model, phase)
        assert torch.equal(model(x_of()), plain(x_of())) is (phase == "bf16")
    q = torch.randn(1, 2, 8, 16)
    assert F.scaled_dot_product_attention is renamed
    assert torch._C._len_torch_function_stack() == 0
    with pytest.raises(RuntimeError):
        model(x_of()[..., :8])
    assert torch._C._len_torch_function_stack() == 0, "after an error, too"
    assert torch.equal(renamed(q, q, q), F.scaled_dot_product_attention(q, q, q))


def test_none_by_default():
    model = convert(nn.Sequential(InForward(), nn.MultiheadAttention(WIDTH, HEADS)), "nvfp4")
    assert type(model[0]) is InForward
    assert not products(model)


def test_names_hold_for_patterns():
    classes = (InForward, InMethod, InFunction)
    model = model_of(*classes, skip=["0"], overrides={"2\\.pv": "mxfp8"})
    assert products(model) == {"1.qk": "nvfp4", "1.pv": "nvfp4", "2.qk": "nvfp4", "2.pv": "mxfp8"}
    convert(model, "nvfp4")
    assert {*products(model).values()} == {str(LinearCasts())}


def results(model, call=None):
    LayerKeys(model).fill_(3)
    return pass_through(model, x_of(), forward=call)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch 2.13's Dynamo
def test_compiled_models_run_modules_eagerly_and_nn_multihead_attention_as_one_graph():
    multihead = convert(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), "bf16", attention="nvfp4")
    model = model_of(InForward, InMethod)

    def call(x):
        return multihead(x, x, x, need_weights=False)[0]

    for module, called in ((model, model), (multihead, call)):
        compiled = torch.compile(called, backend="aot_eager", fullgraph=module is multihead)
        expected = results(module, called)
        identical(results(module, compiled), expected)
    plain = restore_classes(copy.deepcopy(multihead))
    assert not torch.equal(expected["y"], plain(x_of(), x_of(), x_of())[0])


def test_weights_that_are_asked_for_are_in_high_precision():
    model = convert(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), "bf16", attention="nvfp4")
    LayerKeys(model).fill_(0)
    x = x_of()
    with_weights, without = model(x, x, x), model(x, x, x, need_weights=False)
    plain = restore_classes(copy.deepcopy(model))(x, x, x)
    assert torch.equal(with_weights[0], without[0])
    assert torch.equal(with_weights[1], plain[1])
    assert not torch.equal(with_weights[0], plain[0])


def test_flops_of_both_products():
    """The backward pass computes scores once more; a second pass over tiles for one scale would count likewise."""
    model = model_of(InMethod)
    with GemmCounter(model) as counter:
        model(x_of()).sum().backward()
    product = 2 * (2 * 20 * 20 * WIDTH)
    assert counter.gemms["0.qk", "fprop"] == 2 * product
    for gemm in (("0.pv", "fprop"), ("0.qk", "dgrad"), ("0.qk", "wgrad"), ("0.pv", "dgrad"), ("0.pv", "wgrad")):
        assert counter.gemms[gemm] == product, gemm
    assert counter.recomputed == product
    assert not counter.others


class Eager(InForward):
    config = SimpleNamespace(_attn_implementation="eager")


TILES = {"format": "fp32", "block": [128, 128]}


def test_refusals():
    cases = {
        "has none": (nn.Linear(4, 4), {"attention": "nvfp4"}),
        "skip and only leave none": (InForward(), {"attention": "nvfp4", "only": ["qkv"]}),
        "'fp8-current'": (InForward(), {"attention": "fp8-delayed"}),
        "requantize": (InForward(), {"attention": "quartet2"}),
        "tiles for fprop_x": (InForward(), {"attention": {"fprop_x": {"element": "e4m3", "scale": TILES}}}),
        "by 'eager'": (Eager(), {"attention": "nvfp4"}),
        "no native GEMM": (InForward(), {"attention": "fp8-current", "backend": "native"}),
    }
    for message, (model, given) in cases.items():
        with pytest.raises(ValueError, match=message):
            convert(model, "fp8-current", **given)
        assert type(model) in (nn.Linear, InForward, Eager), "the model has changed"


# --- under a precision plugin -----------------------------------------------------------------------------------------

PRODUCTS = {"own.qk", "own.pv", "block.self_attn.qk", "block.self_attn.pv"}


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.own = InForward()
        self.block = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.block(self.own(x))

    def training_step(self, batch):
        loss = self(batch).float().square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch):
        self.log("found", self(batch).float().square().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return DataLoader(torch.randn(8, 20, WIDTH, generator=torch.Generator().manual_seed(1)), batch_size=2)

    val_dataloader = train_dataloader


def trainer(plugin, *callbacks, **kwargs):
    lengths = {"log_every_n_steps": 1, "num_sanity_val_steps": 0, "limit_val_batches": 1, **kwargs}
    return quiet_trainer(plugin, callbacks=[*callbacks], **lengths)


def plugin_of(attention=None):
    return FP4Precision("nvfp4", attention=attention, seed=1, quantize_output=True)


def fitted(attention, *callbacks, **kwargs):
    run = trainer(plugin_of(attention), *callbacks, max_steps=4, **kwargs)
    run.fit(model := Model())
    return run, model


@pytest.mark.filterwarnings("ignore:.*Starting from v1.9.0")
def test_training_with_all_monitors(tmp_path, capsys):
    monitors = PrecisionSummary(), QuantizationMonitor(), OutlierMonitor(), GradientNoiseMonitor(kind="layers")
    _, model = fitted("nvfp4", *monitors, logger=CSVLogger(tmp_path))
    shown = capsys.readouterr().out
    assert "100.0%" in shown
    assert "attention's products have no native GEMM" in shown
    columns = next(tmp_path.rglob("metrics.csv")).read_text().partition("\n")[0].split(",")
    measured = {name.rpartition("/")[2] for name in columns if name.startswith("sqnr/wgrad_x")}
    assert measured >= PRODUCTS
    assert monitors[0].coverage().share == 1
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_a_checkpoint_tells_attention(tmp_path):
    run, model = fitted("mxfp8")
    path = tmp_path / "last.ckpt"
    run.save_checkpoint(path)

    def validate(plugin):
        return trainer(plugin).validate(Model(), ckpt_path=path, verbose=False, weights_only=False)

    validated = [validate(plugin) for plugin in (LowBitPrecision.from_checkpoint(path), plugin_of("mxfp8"))]
    assert validated[0] == validated[1]
    restored = restore(Model(), path)
    casts = {name: str(layer.casts) for name, layer in restored.named_modules() if hasattr(layer, "full_casts")}
    assert casts["own._products.qk"] == casts["block.self_attn._products.pv"] == "mxfp8"
    x = next(iter(model.val_dataloader()))
    assert restored(x).float().square().mean().item() == pytest.approx(validated[0][0]["found"], abs=1e-6)
    with pytest.raises(ValueError, match=r"own\.qk, own\.pv"):
        validate(plugin_of())


def test_phases_and_changed_casts():
    run, model = fitted("nvfp4")
    plugin, qk = run.precision_plugin, model.own.part("qk")
    plugin.set_phase("qaf")
    assert qk.casts.quantized_gemms == ("fprop",)
    plugin.set_phase("fqt")
    plugin.set_casts({"qk": "mxfp8", "pv": "bf16"})
    assert str(qk.casts) == "mxfp8"
    assert set(plugin.casts_of("pv").values()) == {type(qk.casts)()}
    with pytest.raises(ValueError, match="delayed scaling"):
        plugin.set_casts({"qk": "fp8-delayed"})
    assert str(qk.casts) == "mxfp8"


def test_arguments():
    for message, attention in {"delayed": "fp8-delayed", "Unknown preset|preset": "fp5"}.items():
        with pytest.raises(ValueError, match=message):
            FP8Precision("current", attention=attention)
    assert "attention='mxfp8'" in repr(FP8Precision("current", attention="mxfp8"))
    assert FP8Precision(attention="fp8").attention == LinearCasts.preset("fp8-current"), "scaled by its own amax"
