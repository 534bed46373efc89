"""Coverage by phases and casts; operations without a formula; casts with GEMMs of their own."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_lowbit import Cast, LinearCasts, Scale
from lightning_lowbit.nn import GemmCounter, set_phase
from tests.nn.conversion.coverage.flops import (
    BACKWARD,
    BITS,
    HADAMARD,
    MEANS,
    NVFP4,
    TOKENS,
    WIDTH,
    Applied,
    assert_counted,
    backward,
    count,
    gemm,
    layer,
    low_bit,
    x_of,
)
from tests.tables import each

FLOPS = gemm(TOKENS, WIDTH, WIDTH)


def three_layers(casts=NVFP4, **kwargs):
    """Three layers with the same FLOPs in each of nine GEMMs, "c" skipped; ``kwargs`` override "b"."""
    layers = {name: nn.Linear(WIDTH, WIDTH) for name in "abc"}
    model = low_bit(Applied(lambda self, x: self.c(self.b(self.a(x))), **layers), casts, skip=["c"], **kwargs)
    with GemmCounter(model) as counter:
        backward(model(x_of(TOKENS, WIDTH, grad=True)))
    return counter


C = {"c": 3 * FLOPS}
AB = ("a", "b")


@each(
    ("phase", "low", "uncovered"),
    [
        (None, 6, C),
        ("fqt", 6, C),
        ("qaf", 2, C | {f"{name} ({g})": FLOPS for name in AB for g in BACKWARD}),
        ("hp-forward", 4, C | {f"{name} (fprop)": FLOPS for name in AB}),
        ("bf16", 0, C | dict.fromkeys(AB, 3 * FLOPS)),
    ],
)
@each("hp_bits", [16, 32])
def test_phases(phase, low, uncovered, hp_bits):
    coverage = three_layers().coverage(phase, hp_bits)
    assert coverage.flops == 9 * FLOPS
    assert coverage.low_bit == low * FLOPS
    assert coverage.share == pytest.approx(low / 9)
    assert coverage.average_bits == pytest.approx((low * BITS + (9 - low) * hp_bits) / 9)
    assert coverage.uncovered == uncovered


def test_the_phase_in_force():
    counter = three_layers()
    for name, module in counter._layers.items():
        set_phase(module, "bf16" if name == "a" else "qaf")
    coverage = counter.coverage()
    assert coverage.low_bit == FLOPS
    assert coverage.uncovered == C | {"a": 3 * FLOPS, "b (dgrad)": FLOPS, "b (wgrad)": FLOPS}
    assert counter.coverage("fqt") == three_layers().coverage(), "the phase asked for, not the one in force"
    with pytest.raises(ValueError, match="Unknown phase 'qat'"):
        counter.coverage("qat")


def test_casts_of_the_forward_pass():
    casts = LinearCasts(
        fprop_x=Cast("int8", Scale(block=32)),
        fprop_w=Cast("int4", Scale(block=16)),
        dgrad_g=Cast("int8", Scale(block=32)),
        dgrad_w="fprop",
        wgrad_x="fprop",
    )
    counter = three_layers(casts)
    x_bits, w_bits = 8.25, 4.5
    coverage = counter.coverage()
    assert coverage.low_bit == 4 * FLOPS, "fprop and dgrad of two layers"
    assert coverage.uncovered == C | {f"{name} (wgrad)": FLOPS for name in AB}
    per_layer = (x_bits + w_bits) / 2 + (x_bits + w_bits) / 2 + (16 + x_bits) / 2
    assert coverage.average_bits == pytest.approx((2 * per_layer + 3 * 16) / 9)
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
    coverage = three_layers(overrides={"b": casts}).coverage()
    assert coverage.low_bit == low * FLOPS
    assert coverage.uncovered == C | uncovered
    assert coverage.average_bits == pytest.approx((3 * BITS + bits + 3 * 16) / 9)


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
    counter = count(model, x_of(TOKENS, WIDTH))
    assert_counted(counter, {"layer": layer(TOKENS, WIDTH, 4, ["dgrad"])}, {"head": 3 * gemm(TOKENS, 8, 4)})


@each(
    "changes",
    [
        {"hadamard": HADAMARD},
        {"subtract_mean": MEANS},
        {"hadamard": HADAMARD, "subtract_mean": MEANS},
        {"surrogate": {"fprop_x": "dge", "fprop_w": "trust"}, "hadamard": HADAMARD},
        {"subtract_mean": MEANS, "dgrad_w": "fprop"},
    ],
)
def test_rotations_and_means(changes):
    model = low_bit(nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32)), NVFP4.replace(**changes))
    counter = count(model, x_of(32, 64, grad=True))
    assert_counted(counter, {"0": layer(32, 64, 48), "2": layer(32, 48, 32)}, {})
