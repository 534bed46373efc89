"""What holds for all converted layers holds for convolutions."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_lowbit import Cast, LinearCasts, Scale, convert
from lightning_lowbit.compilation import backend
from lightning_lowbit.nn import OPERANDS, AmaxHistories, LayerKeys
from lightning_lowbit.nn.conversion.bake import bake
from lightning_lowbit.nn.conversion.reasons import Reasons
from lightning_lowbit.nn.core.watch import Watch
from lightning_lowbit.nn.core.window import Window
from lightning_lowbit.nn.layers.classes import convertible, restore_classes
from lightning_lowbit.nn.layers.convolution import DEPTHWISE
from tests.nn.layers import identical, layer_like, pass_through

INT4 = Cast("int4", Scale("fp32", "row"))


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


LAYERS = [
    (nn.Conv1d(4, 6, 3, padding="same"), (2, 4, 9)),
    (nn.Conv2d(4, 6, 3, 2, 1, padding_mode="circular"), (4, 8, 7)),
    (nn.Conv3d(4, 4, 2, groups=2), (1, 4, 3, 4, 5)),
    (nn.ConvTranspose2d(4, 6, 3, 2, 1, 1), (2, 4, 3, 5)),
]


def test_shapes_strides_and_refusals_are_torchs():
    for original, shape in LAYERS:
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

    model = nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), Other(8, 8, 1), nn.LazyConv2d(8, 1), Same(8, 8, 1))
    assert list(convertible(model)) == ["3"]
    with pytest.warns(UserWarning, match="2: no weight yet"):
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
    with pytest.warns(FutureWarning):
        layer = convert(torch.nn.utils.weight_norm(nn.Conv2d(4, 4, 3)), LinearCasts(fprop_w=INT4))
    layer(torch.randn(1, 4, 3, 3)).sum().backward()
    assert layer.weight_g.grad is not None
    with pytest.raises(ValueError, match="computed from others"):
        bake(layer)


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
