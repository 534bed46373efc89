"""FLOPs that are counted in attention, experts and models of others."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.nn.conversion.coverage.flops import (
    BACKWARD,
    BATCH,
    HEADS,
    TOKENS,
    WIDTH,
    Applied,
    UNet,
    assert_counted,
    count,
    gemm,
    layer,
    low_bit,
    x_of,
)
from tests.tables import each


def attention(batch, queries, keys, width):
    """Q · Kᵀ and P · V of all heads, whose widths add up."""
    return batch * (gemm(queries, keys, width) + gemm(queries, width, keys))


def fused_backward(forward):
    """Fused attention computes Q · Kᵀ again, and two products for each of the two: five for two."""
    return forward * 5 // 2


@each("need_weights", [False, True])
@each("keys", [TOKENS, 7])
def test_multihead_attention(need_weights, keys):
    model = low_bit(
        Applied(
            lambda self, x, m: self.head(self.mha(x, m, m, need_weights=need_weights)[0]),
            mha=nn.MultiheadAttention(WIDTH, HEADS, batch_first=True),
            head=nn.Linear(WIDTH, 8),
        )
    )
    x = x_of(BATCH, TOKENS, WIDTH)
    memory = x if keys == TOKENS else x_of(BATCH, keys, WIDTH)
    counter = count(model, x, memory)
    projections = {name: gemm(BATCH * (TOKENS + 2 * keys), WIDTH, WIDTH) for name in ("fprop", "wgrad")}
    forward = attention(BATCH, TOKENS, keys, WIDTH)
    products = forward + (2 * forward if need_weights else fused_backward(forward))
    layers = {
        "mha.in_proj": projections,  # of the input no gradient is needed
        "mha.out_proj": layer(BATCH * TOKENS, WIDTH, WIDTH),
        "head": layer(BATCH * TOKENS, WIDTH, 8),
    }
    assert_counted(counter, layers, {"mha": products})


def encoder_layer():
    return nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout=0.0, batch_first=True)


PRODUCTS = attention(BATCH, TOKENS, TOKENS, WIDTH)
ENCODER_ATTENTION = 4 * gemm(BATCH * TOKENS, WIDTH, WIDTH) + PRODUCTS
ROWS = BATCH * TOKENS
SIZES = {"self_attn.in_proj": (WIDTH, 3 * WIDTH), "self_attn.out_proj": (WIDTH, WIDTH)}
SIZES |= {"linear1": (WIDTH, 32), "linear2": (32, WIDTH)}
ENCODER_GEMMS = {name: layer(ROWS, *sizes, BACKWARD) for name, sizes in SIZES.items()}


@each("norm_first", [False, True])
@each("skip", [(), ("self_attn",), ("linear1", "linear2")])
def test_encoder_layer_in_evaluation(norm_first, skip):
    """Where any of its layers is converted they run; attention without such is one fused operation."""
    model = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=True, norm_first=norm_first)
    low_bit(model, skip=skip).eval()
    runs = "_native_multi_head_attention" if "self_attn" in skip else "_scaled_dot_product_flash_attention_for_cpu"
    with torch.no_grad():
        counter = count(model, x_of(BATCH, TOKENS, WIDTH), runs=runs)
    layers = {name: gemms for name, gemms in ENCODER_GEMMS.items() if not name.startswith(skip)}
    feed_forward = {name: 2 * BATCH * TOKENS * WIDTH * 32 for name in skip if name != "self_attn"}
    products = ENCODER_ATTENTION if "self_attn" in skip else PRODUCTS
    assert_counted(counter, layers, {"self_attn": products, **feed_forward})


def test_a_skipped_encoder_layer_in_evaluation():
    model = low_bit(nn.Sequential(encoder_layer(), nn.Linear(WIDTH, 8)), skip=["0"]).eval()
    with torch.no_grad():
        counter = count(model, x_of(BATCH, TOKENS, WIDTH), runs="_transformer_encoder_layer_fwd")
    feed_forward = 2 * gemm(BATCH * TOKENS, WIDTH, 32)
    layers = {"1": layer(BATCH * TOKENS, WIDTH, 8, BACKWARD)}
    assert_counted(counter, layers, {"0": ENCODER_ATTENTION + feed_forward})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@each("is_skipped", [False, True])
def test_an_encoder_with_padding_in_evaluation(is_skipped):
    """torch's fast path makes the input a nested tensor, which has no shape to count by: it is said that there is more,
    and the run goes on."""
    members = {"encoder": nn.TransformerEncoder(encoder_layer(), 2), "head": nn.Linear(WIDTH, 8)}
    model = Applied(lambda self, x, padding: self.head(self.encoder(x, src_key_padding_mask=padding)), **members)
    low_bit(model, skip=["encoder"] * is_skipped).eval()
    padding = torch.zeros(BATCH, TOKENS, dtype=torch.bool)
    padding[1, 3:] = True
    with torch.no_grad():
        counter = count(model, x_of(BATCH, TOKENS, WIDTH), padding)
    if is_skipped:
        assert dict(counter.gemms) == {("head", "fprop"): gemm(ROWS, 8, WIDTH)}
        assert dict(counter.others) or counter.coverage().uncounted == ("aten._transformer_encoder_layer_fwd",)
        return
    layers = {f"encoder.layers.{i}.{name}": gemms for i in range(2) for name, gemms in ENCODER_GEMMS.items()}
    layers["head"] = layer(ROWS, WIDTH, 8, BACKWARD)
    assert_counted(counter, layers, {f"encoder.layers.{i}.self_attn": PRODUCTS for i in range(2)})


def test_einsum_and_functional_calls():
    inner = Applied(lambda self, x: torch.einsum("bti,io->bto", x, self.w), w=nn.Parameter(torch.randn(WIDTH, 8)))
    model = low_bit(
        Applied(
            lambda self, x: F.linear(self.up(self.down(self.inner(x))), self.up.weight.t()),
            inner=inner,
            down=nn.Linear(8, 4),
            up=nn.Linear(4, 24),
        )
    )
    counter, rows = count(model, x_of(BATCH, TOKENS, WIDTH)), BATCH * TOKENS
    assert_counted(
        counter,
        {"down": layer(rows, 8, 4), "up": layer(rows, 4, 24)},
        {"inner": 2 * gemm(rows, 8, WIDTH), "": 3 * gemm(rows, 4, 24)},
    )


def expert_stack(function, dtype=torch.float32):
    experts = Applied(lambda self, x: function(x, self.stack), stack=nn.Parameter(torch.randn(3, WIDTH, 8)))
    return low_bit(nn.Sequential(nn.Linear(4, WIDTH), experts, nn.Linear(8, 4)).to(dtype))


def test_stacks_of_experts():
    """In one product for all of them, or a grouped one, in which each row meets one expert however they are divided."""
    offsets = torch.tensor([1, 1, 8], dtype=torch.int32)
    grouped = expert_stack(lambda x, w: torch._grouped_mm(x, w, offs=offsets), torch.bfloat16)
    for model, x, rows in (
        (expert_stack(torch.bmm), x_of(3, TOKENS, 4), 3 * TOKENS),
        (grouped, x_of(8, 4).bfloat16(), 8),
    ):
        layers = {"0": layer(rows, 4, WIDTH, ["dgrad"]), "2": layer(rows, 8, 4)}
        assert_counted(count(model, x), layers, {"1": 3 * gemm(rows, 8, WIDTH)})


@each("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients(context):
    """In inference mode linear, matmul, einsum and conv1d arrive whole, not as the operations they are made of."""

    def forward(self, x):
        y = self.plain(self.layer(x))
        scores = torch.einsum("bqc,bkc->bqk", y, y)
        return self.convolution((scores @ y).transpose(1, 2))

    members = {"layer": nn.Linear(WIDTH, 8), "plain": nn.Linear(8, 4), "convolution": nn.Conv1d(4, 6, 1)}
    model = low_bit(Applied(forward, **members), skip=["plain", "convolution"]).eval()
    with context():
        counter, rows = count(model, x_of(BATCH, TOKENS, WIDTH)), BATCH * TOKENS
    others = {"plain": gemm(rows, 4, 8), "": attention(BATCH, TOKENS, TOKENS, 4), "convolution": gemm(rows, 6, 4)}
    assert_counted(counter, {"layer": layer(rows, WIDTH, 8, BACKWARD)}, others)


def test_a_unet():
    counter = count(low_bit(UNet()), x_of(BATCH, 3, 6, 6), x_of(BATCH, 4))
    small, large, width = BATCH * 9, BATCH * 36, 8
    layers = {
        "time.0": layer(BATCH, 4, 16, ["dgrad"]),
        "time.2": layer(BATCH, 16, 16),
        "middle.qkv": layer(small, 16, 48),
        "middle.out": layer(small, 16, 16),
        "stem": layer(large, 3 * 9, width, ["dgrad"]),  # no gradient of the image
        "down": layer(small, width * 9, 2 * width),
        "up": layer(small, 2 * width, width * 4),  # each input pixel meets the whole filter
        "last": layer(large, 2 * width, 3),
    }
    assert_counted(counter, layers, {"": 3 * attention(BATCH, 9, 9, 2 * width)})


@each("groups", [1, 2, 8])
@each("transposed", [False, True])
def test_grouped_convolutions(groups, transposed):
    """As in ConvNeXt and MobileNet: channels meet those of their group only, in the backward pass too. Depthwise ones
    are not converted."""
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    model = low_bit(nn.Sequential(kind(8, 8, 3, groups=groups), nn.Flatten(1, 2), nn.Linear(6 if transposed else 2, 4)))
    counter = count(model, x_of(BATCH, 8, 4, 4, grad=True))
    points, height = (16, 6) if transposed else (4, 2)
    forward = groups * gemm(BATCH * points, 8 // groups, 8 // groups * 9)
    head = layer(BATCH * 8 * height, height, 4)
    if groups == 8:
        assert_counted(counter, {"2": head}, {"0": 3 * forward})
    else:
        assert_counted(counter, {"0": dict.fromkeys(head, forward), "2": head}, {})


@each("directions", [1, 2])
def test_lstm(directions):
    lstm = nn.LSTM(8, 12, num_layers=2, batch_first=True, bidirectional=directions == 2)
    head = nn.Linear(12 * directions, 6)
    model = low_bit(Applied(lambda self, x: self.head(self.lstm(x)[0]), lstm=lstm, head=head))
    counter, rows = count(model, x_of(BATCH, TOKENS, 8), runs="mkldnn_rnn_layer"), BATCH * TOKENS
    forward = directions * (gemm(rows, 4 * 12, 8 + 12) + gemm(rows, 4 * 12, 12 * directions + 12))
    assert_counted(counter, {"head": layer(rows, 12 * directions, 6)}, {"lstm": 3 * forward})
