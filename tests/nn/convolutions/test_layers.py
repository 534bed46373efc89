"""What holds for all converted layers holds for convolutions, also under a Trainer."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.data import DataLoader, TensorDataset

from lightning_lowbit import Cast, FP4Precision, IntegerPrecision, LinearCasts, Scale, convert, restore
from lightning_lowbit.callbacks import GradientNoiseMonitor, OsciReset, PrecisionSummary, QuantizationMonitor
from lightning_lowbit.cli.lab.estimate.shapes import describe
from lightning_lowbit.compilation import backend
from lightning_lowbit.kernels.windows import Window
from lightning_lowbit.nn import OPERANDS, AmaxHistories, LayerKeys, QuantizedLayer
from lightning_lowbit.nn.conversion.bake import bake
from lightning_lowbit.nn.conversion.reasons import Reasons
from lightning_lowbit.nn.core.watch import Watch
from lightning_lowbit.nn.layers.classes import convertible, restore_classes
from lightning_lowbit.nn.layers.convolution import DEPTHWISE
from tests.lightning_imports import LightningModule, quiet_trainer
from tests.nn.layers import identical, layer_like, pass_through


class Block(nn.Module):
    """A residual block, with groups, a strided shortcut and a transposed convolution."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(16, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32)
        self.second = nn.Conv2d(32, 32, 3, 1, 1, groups=2)
        self.shortcut, self.up = nn.Conv2d(16, 32, 1, 2), nn.ConvTranspose2d(32, 16, 2, 2)

    def forward(self, x):
        y = self.second(self.norm(self.first(x)).relu_())
        return self.up((y + self.shortcut(x)).relu_())


def block(**kwargs):
    torch.manual_seed(0)
    return convert(Block(), "nvfp4", **kwargs)


def results(model, x, forward=None):
    LayerKeys(model).fill_(0)
    return pass_through(model, x, forward=forward, autocast=True)


def test_shapes_strides_and_refusals_are_torchs():
    for original, shape in (
        (nn.Conv1d(4, 6, 3, padding="same"), (2, 4, 9)),
        (nn.Conv2d(4, 6, 3, 2, 1, padding_mode="circular"), (4, 8, 7)),
        (nn.Conv3d(4, 4, 2, groups=2), (1, 4, 3, 4, 5)),
        (nn.ConvTranspose2d(4, 6, 3, 2, 1, 1), (2, 4, 3, 5)),
    ):
        layer, x = layer_like(original, "nvfp4"), torch.randn(shape)
        for given in (x, x[0] if x.dim() == len(original.kernel_size) + 2 else x):
            found, expected = layer(given), original(given)
            assert (found.shape, found.stride()) == (expected.shape, expected.stride())
        if x.dim() == 4 and original.padding_mode == "zeros":
            last = x.to(memory_format=torch.channels_last)
            assert layer(last).stride() == original(last).stride()
        with pytest.raises(ValueError, match="channels"):
            layer(torch.cat([x, x], -len(original.kernel_size) - 1))
    assert layer(x, output_size=[6, 10]).shape[2:] == (6, 10)
    with pytest.raises(ValueError, match="spans"):
        layer_like(nn.Conv2d(4, 4, 5), "nvfp4")(torch.randn(1, 4, 3, 3))


def test_depthwise_and_other_convolutions_are_left_out():
    class Other(nn.Conv2d):
        def _conv_forward(self, *args):
            return 2 * super()._conv_forward(*args)

    class Same(nn.Conv2d):
        pass

    lazy = nn.LazyConv2d(8, 1), nn.LazyLinear(8)
    model = nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), Other(8, 8, 1), lazy[0], Same(8, 8, 1), lazy[1])
    assert list(convertible(model)) == ["3"]
    with pytest.warns(UserWarning, match="2, 4: no weight yet: run one batch before the Trainer starts. It is left"):
        assert type(convert(model, "nvfp4")[3]).__name__ == "QuantSame"
    assert type(restore_classes(model)[3]) is Same
    odd = convert(nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 8, 1)), "nvfp4", only=["1"])
    assert str(Reasons(odd).of("0")) == DEPTHWISE


@pytest.mark.slow
def test_compiled_without_breaks_to_the_same_bits():
    model = block()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for size in (8, 12):  # the second with dynamic sizes
        x = torch.randn(2, 16, size, size)
        identical(results(model, x, compiled), results(model, x))


def test_images_are_kept_and_not_their_patches():
    for save in ("inputs", "codes"):
        layer, x = layer_like(nn.Conv2d(16, 16, 3), "int8", save=save), torch.randn(2, 16, 9, 9, requires_grad=True)
        y = layer(x)
        node = y.grad_fn
        while node.name() != "QuantizedGemmsBackward":
            node = node.next_functions[0][0]
        assert max(t.numel() for t in node.saved_tensors if t is not None) == max(x.numel(), layer.weight.numel())


def test_codes_are_kept_where_patches_do_not_overlap():
    x, packed = torch.randn(2, 16, 8, 8), block(save="codes")
    identical(results(packed, x), results(block(), x))
    assert packed.first.saved_input(torch.bfloat16) == (16, 16.0)
    assert packed.shortcut.saved_input(torch.bfloat16) == (16, 4.5)


def test_delayed_scales_are_those_of_patches():
    layer = layer_like(nn.Conv2d(8, 8, 3, 2), "fp8-delayed")
    histories, x = AmaxHistories(layer), torch.ones(1, 8, 6, 6)
    x[..., 5] = 100  # a stride of 2 leaves out the last column
    layer(x.requires_grad_()).sum().backward()
    histories.advance_()
    in_force = dict(zip(OPERANDS, layer.lowbit.amaxes.in_force.tolist(), strict=True))
    assert in_force["fprop_x"] == in_force["wgrad_x"] == in_force["dgrad_g"] == 1


def test_watched_operands_are_patches():
    layer, x = layer_like(nn.Conv2d(16, 8, 3), "nvfp4"), torch.randn(2, 16, 5, 5)
    plain = layer(x)
    watch = Watch({"layer": layer}, "operand_sums")
    watch.start(torch.device("cpu"))
    assert torch.equal(layer(x), plain), "quantized pixels and quantized patches are the same"
    square = F.unfold(x, 3).double().square().sum()
    assert any(torch.isclose(total, square, rtol=1e-6) for total in watch.sums[0, 0].double()), watch.sums
    watch.stop()
    gradients = Watch({"layer": layer}, "gradient_sums")
    gradients.start(torch.device("cpu"))
    layer(x).square().sum().backward()
    assert 0 < gradients.sums[0, 0] < 0.1 * gradients.sums[0, 1]


def test_a_weight_that_others_give_is_not_baked():
    casts = LinearCasts(fprop_w=Cast("int4", Scale("fp32", "row")))
    with pytest.warns(FutureWarning):
        layer = convert(torch.nn.utils.weight_norm(nn.Conv2d(4, 4, 3)), casts)
    layer(torch.randn(1, 4, 3, 3)).sum().backward()
    assert layer.weight_g.grad is not None
    later = convert(nn.Conv2d(4, 4, 3), casts)
    register_parametrization(later, "bias", nn.Tanh())
    for computed in (layer, later):
        with pytest.raises(ValueError, match="computed from others"):
            bake(computed)


def test_sizes_in_tables():
    model = block()
    texts = [layer.size_text for layer in (model.first, model.second, model.shortcut, model.up)]
    assert texts == ["16×3×3 → 32", "16×3×3 → 16, 2 groups", "16×1×1 → 32", "32 → 16×2×2"]


def test_sums_of_patches_are_those_of_plain_code():
    for window, channels in (
        (Window((3, 2), (1, 2), (2, 1), (1, 0), (0, 1)), 20),
        (Window((2, 3), (2, 3), (1, 2), (0, 1), (0, -1)), 3),  # pixels that no patch holds
        (Window((3,), (2,), (1,), (2,), (0,)), 16),
        (Window((1, 3, 2), (1, 1, 2), (1, 1, 1), (0, 1, 0), (0, 1, 0)), 17),
    ):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            x = torch.randn(2, channels, *(9, 8, 7)[: len(window.kernel)]).to(dtype)
            patches = torch.randn_like(window.gather(x))
            found = window.scatter(patches, x.shape)
            with backend("eager"):
                assert torch.equal(found, window.scatter(patches, x.shape)), (window, dtype)


# --- under a Trainer --------------------------------------------------------------------------------------------------


class Images(LightningModule):
    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16)
        self.body, self.groups = nn.Conv2d(16, 32, 3, padding=1), nn.Conv2d(32, 32, 3, groups=2)
        self.depthwise, self.head = nn.Conv2d(32, 32, 1, groups=32), nn.Linear(32, 4)

    def forward(self, x):
        x = self.body(self.norm(self.stem(x)).relu()).relu()
        return self.head(self.depthwise(self.groups(x)).mean((2, 3)))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]).float(), batch[1])

    def train_dataloader(self):
        draw = torch.Generator().manual_seed(0)
        images = torch.randn(24, 3, 8, 8, generator=draw)
        return DataLoader(TensorDataset(images, images.mean((1, 2, 3)).gt(0).long()), 4)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(plugin, *callbacks, steps=4):
    torch.manual_seed(0)
    trainer = quiet_trainer(plugin, max_steps=steps, callbacks=[*callbacks], log_every_n_steps=1, logger=True)
    trainer.fit(Images())
    return trainer


def test_callbacks_see_convolutions(capsys):
    monitor, noise = QuantizationMonitor(), GradientNoiseMonitor(every_n_steps=2)
    resets = OsciReset(window=2, every=2, threshold=1.01)
    trainer = fit(FP4Precision("nvfp4", quantize_output=True), monitor, resets, noise)
    fit(FP4Precision("nvfp4", quantize_output=True), PrecisionSummary(), steps=1)
    assert "reset/fprop_w/body" in trainer.callback_metrics
    data = monitor.report_data(trainer)
    assert {"body", "groups"} <= data["quantized_operands"]["layers"].keys()
    assert "body" in data["quantized_weights"]["layers"]
    assert [seen["step"] for seen in noise.report_data(trainer)["gradient_noise"]["ratios"]] == [2, 4]
    table, _, uncovered = capsys.readouterr().out.partition("not covered")
    assert "16×3×3 → 32" in table
    assert "depthwise" in uncovered and "body" not in uncovered


def test_a_checkpoint_is_restored_and_baked(tmp_path):
    trainer = fit(IntegerPrecision(4, activation_bits=None, group="row"))
    trainer.save_checkpoint(path := tmp_path / "last.ckpt")
    images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    model = restore(Images(), path).eval()
    assert sum(isinstance(module, QuantizedLayer) for module in model.modules()) == 4
    y = model(images)
    baked = bake(model).eval()
    assert all(len(row.unique()) <= 15 for row in baked.groups.weight.detach())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.allclose(baked(images).float(), y.float(), atol=0.05)


def test_an_estimate_counts_weights_and_says_what_it_cannot_know():
    with torch.device("meta"):
        model, notes = describe(Images())
    assert model.parameters == sum(p.numel() for p in Images().parameters())
    assert sum("Of 4 convolutions, weights" in note for note in notes) == 1
