"""``attention=`` of the precision plugins: training, checkpoints, phases, casts that change, and what is shown."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from lightning_lowbit import FP4Precision, FP8Precision, LinearCasts, LowBitPrecision, restore
from lightning_lowbit.callbacks import GradientNoiseMonitor, OutlierMonitor, PrecisionSummary, QuantizationMonitor
from tests.lightning_imports import CSVLogger, LightningModule, quiet_trainer

WIDTH = 32
PRODUCTS = {"own.qk", "own.pv", "block.self_attn.qk", "block.self_attn.pv"}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.own = Attention()
        self.block = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True)

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
    defaults = {"log_every_n_steps": 1, "num_sanity_val_steps": 0, "limit_val_batches": 1}
    return quiet_trainer(plugin, callbacks=[*callbacks], **{**defaults, **kwargs})


def plugin_of(attention=None):
    return FP4Precision("nvfp4", attention=attention, seed=1, quantize_output=True)


def fitted(attention, *callbacks, **kwargs):
    model, run = Model(), trainer(plugin_of(attention), *callbacks, max_steps=4, **kwargs)
    run.fit(model)
    return run, model


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*Starting from v1.9.0")
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
