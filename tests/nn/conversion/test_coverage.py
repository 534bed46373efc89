"""FLOPs that are counted in attention, experts and models of others; coverage by phases and casts; operations without
a formula; casts with GEMMs of their own."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_lowbit import Cast, LinearCasts, Scale
from lightning_lowbit.nn import GemmCounter, set_phase
from tests.nn.conversion.flops import BACKWARD, TOKENS, WIDTH, Applied, assert_counted, count, gemm, layer, low_bit
from tests.nn.named_casts import ALL_MEANS, ALL_ROTATED, NVFP4
from tests.tables import each

BITS = 4.5  # of NVFP4
BATCH, HEADS = 2, 2
ROWS = BATCH * TOKENS


def attention(batch, queries, keys, width):
    """Q · Kᵀ and P · V of all heads, whose widths add up."""
    return batch * (gemm(queries, keys, width) + gemm(queries, width, keys))


def fused_backward(forward):
    """Fused attention computes Q · Kᵀ again, and two products for each of the two: five for two."""
    return forward * 5 // 2


@each("need_weights", [False, True])
@each("keys", [TOKENS, 7])
def test_multihead_attention(need_weights, keys):
    members = {"mha": nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), "head": nn.Linear(WIDTH, 8)}
    model = Applied(lambda self, x, m: self.head(self.mha(x, m, m, need_weights=need_weights)[0]), **members)
    x = torch.randn(BATCH, TOKENS, WIDTH)
    counter = count(low_bit(model), x, x if keys == TOKENS else torch.randn(BATCH, keys, WIDTH))
    projections = {name: gemm(BATCH * (TOKENS + 2 * keys), WIDTH, WIDTH) for name in ("fprop", "wgrad")}
    forward = attention(BATCH, TOKENS, keys, WIDTH)
    products = forward + (2 * forward if need_weights else fused_backward(forward))
    layers = {"mha.out_proj": layer(ROWS, WIDTH, WIDTH), "head": layer(ROWS, WIDTH, 8)}
    layers["mha.in_proj"] = projections  # of the input no gradient is needed
    assert_counted(counter, layers, {"mha": products})


def encoder_layer():
    return nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout=0.0, batch_first=True)


PRODUCTS = attention(BATCH, TOKENS, TOKENS, WIDTH)
ENCODER_ATTENTION = 4 * gemm(ROWS, WIDTH, WIDTH) + PRODUCTS
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
        counter = count(model, torch.randn(BATCH, TOKENS, WIDTH), runs=runs)
    layers = {name: gemms for name, gemms in ENCODER_GEMMS.items() if not name.startswith(skip)}
    feed_forward = {name: 2 * ROWS * WIDTH * 32 for name in skip if name != "self_attn"}
    products = ENCODER_ATTENTION if "self_attn" in skip else PRODUCTS
    assert_counted(counter, layers, {"self_attn": products, **feed_forward})


def test_a_skipped_encoder_layer_in_evaluation():
    model = low_bit(nn.Sequential(encoder_layer(), nn.Linear(WIDTH, 8)), skip=["0"]).eval()
    with torch.no_grad():
        counter = count(model, torch.randn(BATCH, TOKENS, WIDTH), runs="_transformer_encoder_layer_fwd")
    others = {"0": ENCODER_ATTENTION + 2 * gemm(ROWS, WIDTH, 32)}
    assert_counted(counter, {"1": layer(ROWS, WIDTH, 8, BACKWARD)}, others)


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
        counter = count(model, torch.randn(BATCH, TOKENS, WIDTH), padding)
    if is_skipped:
        assert dict(counter.gemms) == {("head", "fprop"): gemm(ROWS, 8, WIDTH)}
        assert dict(counter.others) or counter.coverage().uncounted == ("aten._transformer_encoder_layer_fwd",)
        return
    layers = {f"encoder.layers.{i}.{name}": gemms for i in range(2) for name, gemms in ENCODER_GEMMS.items()}
    layers["head"] = layer(ROWS, WIDTH, 8, BACKWARD)
    assert_counted(counter, layers, {f"encoder.layers.{i}.self_attn": PRODUCTS for i in range(2)})


def test_einsum_and_functional_calls():
    inner = Applied(lambda self, x: torch.einsum("bti,io->bto", x, self.w), w=nn.Parameter(torch.randn(WIDTH, 8)))
    members = {"inner": inner, "down": nn.Linear(8, 4), "up": nn.Linear(4, 24)}
    model = Applied(lambda self, x: F.linear(self.up(self.down(self.inner(x))), self.up.weight.t()), **members)
    counter = count(low_bit(model), torch.randn(BATCH, TOKENS, WIDTH))
    others = {"inner": 2 * gemm(ROWS, 8, WIDTH), "": 3 * gemm(ROWS, 4, 24)}
    assert_counted(counter, {"down": layer(ROWS, 8, 4), "up": layer(ROWS, 4, 24)}, others)


def expert_stack(function, dtype=torch.float32):
    experts = Applied(lambda self, x: function(x, self.stack), stack=nn.Parameter(torch.randn(3, WIDTH, 8)))
    return low_bit(nn.Sequential(nn.Linear(4, WIDTH), experts, nn.Linear(8, 4)).to(dtype))


def test_stacks_of_experts():
    """In one product for all of them, or a grouped one, in which each row meets one expert however they are divided."""
    offsets = torch.tensor([1, 1, 8], dtype=torch.int32)
    grouped = expert_stack(lambda x, w: torch._grouped_mm(x, w, offs=offsets), torch.bfloat16)
    for model, x, rows in (
        (expert_stack(torch.bmm), torch.randn(3, TOKENS, 4), 3 * TOKENS),
        (grouped, torch.randn(8, 4).bfloat16(), 8),
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
        counter = count(model, torch.randn(BATCH, TOKENS, WIDTH))
    others = {"plain": gemm(ROWS, 4, 8), "": attention(BATCH, TOKENS, TOKENS, 4), "convolution": gemm(ROWS, 6, 4)}
    assert_counted(counter, {"layer": layer(ROWS, WIDTH, 8, BACKWARD)}, others)


def test_a_counted_pass_in_inference_mode_is_one_that_is_not_counted():
    """Under autocast, too: the parts of einsum are cast, and einsum itself is not."""
    model = Applied(lambda self, x: torch.einsum("bqc,bkc->bqk", x, self.layer(x)), layer=nn.Linear(8, 8))
    x = torch.randn(BATCH, TOKENS, 8)
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        expected = low_bit(model)(x)
        with GemmCounter(model):
            assert torch.equal(model(x), expected)


@each("groups", [1, 2, 8])
@each("transposed", [False, True])
@each("stride", [1, 2])
@each("needs_x", [False, True])
def test_convolutions(groups, transposed, stride, needs_x):
    """As in U-Nets, ConvNeXt and MobileNet: channels meet those of their group only, in the backward pass too, and each
    pixel of a transposed one's input the whole filter. Depthwise ones are not converted."""
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    height = 3 * stride + 3 if transposed else 2 // stride
    model = nn.Sequential(kind(8, 8, 3, stride, groups=groups), nn.Flatten(1, 2), nn.Linear(height, 4))
    counter = count(low_bit(model), torch.randn(BATCH, 8, 4, 4, requires_grad=needs_x))
    points = 16 if transposed else height**2
    forward = groups * gemm(BATCH * points, 8 // groups, 8 // groups * 9)
    head = layer(BATCH * 8 * height, height, 4)
    if groups == 8:
        assert_counted(counter, {"2": head}, {"0": (2 + needs_x) * forward})
    else:
        gemms = dict.fromkeys(("fprop", "wgrad", *["dgrad"] * needs_x), forward)
        assert_counted(counter, {"0": gemms, "2": head}, {})


@each("directions", [1, 2])
def test_lstm(directions):
    lstm = nn.LSTM(8, 12, num_layers=2, batch_first=True, bidirectional=directions == 2)
    head = nn.Linear(12 * directions, 6)
    model = low_bit(Applied(lambda self, x: self.head(self.lstm(x)[0]), lstm=lstm, head=head))
    counter = count(model, torch.randn(BATCH, TOKENS, 8), runs="mkldnn_rnn_layer")
    forward = directions * (gemm(ROWS, 4 * 12, 8 + 12) + gemm(ROWS, 4 * 12, 12 * directions + 12))
    assert_counted(counter, {"head": layer(ROWS, 12 * directions, 6)}, {"lstm": 3 * forward})


# --- phases and casts -------------------------------------------------------------------------------------------------

FLOPS = gemm(TOKENS, WIDTH, WIDTH)


def three_layers(casts=NVFP4, **kwargs):
    """A count of three layers with the same FLOPs in each of nine GEMMs, "c" skipped."""
    layers = {name: nn.Linear(WIDTH, WIDTH) for name in "abc"}
    model = low_bit(Applied(lambda self, x: self.c(self.b(self.a(x))), **layers), casts, skip=["c"], **kwargs)
    with GemmCounter(model) as counter:
        model(torch.randn(TOKENS, WIDTH, requires_grad=True)).square().sum().backward()
    return counter


C = {"c": 3 * FLOPS}
AB = ("a", "b")


def assert_covers(coverage, low, uncovered, bits):
    """Of nine GEMMs, ``low`` are low-bit, and ``bits`` is the sum of the mean bits of their operands."""
    assert coverage.flops == 9 * FLOPS
    assert coverage.low_bit == low * FLOPS
    assert coverage.share == pytest.approx(low / 9)
    assert coverage.average_bits == pytest.approx(bits / 9)
    assert coverage.uncovered == C | uncovered


@each(
    ("phase", "low", "uncovered"),
    [
        (None, 6, {}),
        ("fqt", 6, {}),
        ("qaf", 2, {f"{name} ({g})": FLOPS for name in AB for g in BACKWARD}),
        ("hp-forward", 4, {f"{name} (fprop)": FLOPS for name in AB}),
        ("bf16", 0, dict.fromkeys(AB, 3 * FLOPS)),
    ],
)
@each("hp_bits", [16, 32])
def test_phases(phase, low, uncovered, hp_bits):
    assert_covers(three_layers().coverage(phase, hp_bits), low, uncovered, low * BITS + (9 - low) * hp_bits)


def test_the_phase_in_force():
    counter = three_layers()
    for name, module in counter._layers.items():
        set_phase(module, "bf16" if name == "a" else "qaf")
    uncovered = {"a": 3 * FLOPS, "b (dgrad)": FLOPS, "b (wgrad)": FLOPS}
    assert_covers(counter.coverage(), 1, uncovered, BITS + 8 * 16)
    assert counter.coverage("fqt") == three_layers().coverage(), "the phase asked for, not the one in force"
    with pytest.raises(ValueError, match="Unknown phase 'qat'"):
        counter.coverage("qat")


def test_casts_of_the_forward_pass():
    int8, int4 = Cast("int8", Scale(block=32)), Cast("int4", Scale(block=16))
    counter = three_layers(LinearCasts(int8, int4, dgrad_g=int8, dgrad_w="fprop", wgrad_x="fprop"))
    x_bits, w_bits = 8.25, 4.5
    per_layer = (x_bits + w_bits) / 2 + (x_bits + w_bits) / 2 + (16 + x_bits) / 2
    assert_covers(counter.coverage(), 4, {f"{name} (wgrad)": FLOPS for name in AB}, 2 * per_layer + 3 * 16)
    hp_forward = counter.coverage("hp-forward")
    assert hp_forward.low_bit == 0, "what the forward pass used is in high precision there"
    assert hp_forward.average_bits == pytest.approx((2 * (16 + (x_bits + 16) / 2 + 16) + 3 * 16) / 9)


@each(
    ("casts", "low", "uncovered", "bits"),
    [
        ("bf16", 3, {"b": 3 * FLOPS}, 3 * 16),
        (NVFP4.replace(dgrad_g=None), 5, {"b (dgrad)": FLOPS}, 2 * BITS + (BITS + 16) / 2),
    ],
)
def test_gemms_of_an_override_in_high_precision(casts, low, uncovered, bits):
    """One operand suffices: the GEMM is then not low-bit, and its bits are those of both."""
    assert_covers(three_layers(overrides={"b": casts}).coverage(), low, uncovered, 3 * BITS + bits + 3 * 16)


@torch.library.custom_op("coverage_test::fused_mlp_mm", mutates_args=())
def fused(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


def no_products():
    x = torch.randn(4, 4)
    x.to(torch.bfloat16).float().sum().add(1)
    F.layer_norm(F.gelu(x), (4,)).softmax(-1).cumsum(0).argmax(-1)
    F.interpolate(x[None, None], scale_factor=2, mode="nearest")
    F.interpolate(x[None, None], scale_factor=2, mode="bilinear")  # aten.upsample_bilinear2d
    F.embedding(torch.tensor([1]), x).logsumexp(-1).lerp(x[0, 0], 0.5).norm()
    torch.where(x > 0, x, -x).triu().sort()


@each(
    ("operation", "flops", "without_formula"),
    [
        (no_products, 0, ()),
        (lambda: torch.addbmm(torch.zeros(2, 4), torch.randn(3, 2, 5), torch.randn(3, 5, 4)), 0, ("aten.addbmm",)),
        (lambda: torch.sparse.mm(torch.eye(3).to_sparse(), torch.randn(3, 4)), 0, ("aten._sparse_addmm",)),
        (lambda: F.bilinear(torch.randn(2, 3), torch.randn(2, 4), torch.randn(5, 3, 4)), 0, ("aten._trilinear",)),
        (lambda: fused(torch.randn(2, 3), torch.randn(3, 4)), 0, ("coverage_test.fused_mlp_mm",)),
        (lambda: torch.mv(torch.randn(3, 5), torch.randn(5)), 2 * 3 * 5, ()),
        (lambda: torch.addmv(torch.randn(3), torch.randn(3, 5), torch.randn(5)), 2 * 3 * 5, ()),
        (lambda: torch.baddbmm(*map(torch.randn, ((2, 3, 4), (2, 3, 5), (2, 5, 4)))), 2 * gemm(3, 4, 5), ()),
        (lambda: torch._int_mm(*(torch.ones(8, 8, dtype=torch.int8),) * 2), gemm(8, 8, 8), ()),
        (lambda: torch.tensordot(torch.randn(2, 3, 4), torch.randn(3, 4, 5), 2), gemm(2, 5, 12), ()),
    ],
)
def test_operations_outside_any_module(operation, flops, without_formula):
    with GemmCounter(nn.Identity()) as counter:
        operation(), operation()
    coverage = counter.coverage()
    assert coverage.uncounted == without_formula
    assert coverage.uncovered == ({"": 2 * flops} if flops else {})
    assert (coverage.flops, coverage.share, coverage.average_bits) == (2 * flops, 0, 16)


def test_a_module_that_is_not_part_of_the_model():
    stranger = nn.Linear(4, 8)
    head = Applied(lambda self, x: self.function_of[0](x), function_of=(stranger,))
    model = low_bit(Applied(lambda self, x: self.head(self.layer(x)), layer=nn.Linear(WIDTH, 4), head=head))
    counter = count(model, torch.randn(TOKENS, WIDTH))
    assert_counted(counter, {"layer": layer(TOKENS, WIDTH, 4, ["dgrad"])}, {"head": 3 * gemm(TOKENS, 8, 4)})


@each(
    "changes",
    [
        {"hadamard": ALL_ROTATED},
        {"subtract_mean": ALL_MEANS},
        {"hadamard": ALL_ROTATED, "subtract_mean": ALL_MEANS},
        {"surrogate": {"fprop_x": "dge", "fprop_w": "trust"}, "hadamard": ALL_ROTATED},
        {"subtract_mean": ALL_MEANS, "dgrad_w": "fprop"},
    ],
)
def test_rotations_and_means(changes):
    model = low_bit(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32)), NVFP4.replace(**changes))
    counter = count(model, torch.randn(32, 64, requires_grad=True))
    assert_counted(counter, {"0": layer(32, 64, 64), "2": layer(32, 64, 32)}, {})
