"""The quantised layer: bitwise nn.Linear without casts, and each of six operands by its own cast with them."""

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

from lightning_lowbit import Cast, LinearCasts, Scale, convert, quantize
from lightning_lowbit.nn import OPERANDS, LayerKeys, QuantizedLayer, linear, set_phase
from lightning_lowbit.quant import Operand
from tests.references.quantize import fake_quantize

NVFP4 = LinearCasts.preset("nvfp4")
TWO_LEVEL = Cast("e2m1", Scale("e4m3", 16, two_level=True))
ONE_LEVEL = Cast("e2m1", Scale("e4m3", 16))
STOCHASTIC = replace(TWO_LEVEL, rounding="stochastic")
TOKENS, IN, OUT = 48, 64, 32
# Which tensor an operand is, and the axis of its GEMM's contraction in it.
TENSOR = {name: name[-1] for name in OPERANDS}
CONTRACTION = {"fprop_x": 1, "fprop_w": 1, "dgrad_g": 1, "dgrad_w": 0, "wgrad_g": 0, "wgrad_x": 0}


def layer_like(original: nn.Module, casts: Any, seed: int = 1, **kwargs: Any) -> nn.Module:
    """A converted copy with keys."""
    layer = convert(copy.deepcopy(original), casts, **kwargs)
    LayerKeys(layer, seed).fill_(3)
    return layer


def run(
    layer: nn.Module, x: Tensor, g: Tensor, autocast: bool = False, needs_x: bool = True
) -> dict[str, Tensor | None]:
    """Output and gradients for the output gradient g."""
    x = x.detach().clone().requires_grad_(needs_x)
    layer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        y = layer(x)
    if y.requires_grad:
        y.backward(g.to(y.dtype))
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in layer.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **gradients}


def identical(found: dict[str, Tensor | None], expected: dict[str, Tensor | None], message: str = "") -> None:
    assert found.keys() == expected.keys()
    for name, a in found.items():
        b = expected[name]
        if a is None or b is None:
            assert a is b, f"{message} {name}: one of them has no gradient"
            continue
        assert (a.dtype, a.shape) == (b.dtype, b.shape), (
            f"{message} {name}: {a.dtype} {a.shape}, not {b.dtype} {b.shape}"
        )
        assert torch.equal(a, b), f"{message} {name}: differs by up to {(a - b).abs().max()}"


# --- six times None ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["float32", "bfloat16", "float64", "autocast"])
@pytest.mark.parametrize("shape", [(IN,), (1, IN), (13, IN), (3, 5, IN), (2, 3, 5, IN), (0, IN), (3, 0, IN)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_without_casts_is_linear(shape: tuple[int, ...], bias: bool, mode: str) -> None:
    dtype = torch.float32 if mode == "autocast" else getattr(torch, mode)
    original = nn.Linear(IN, OUT, bias=bias, dtype=dtype)
    x, g = torch.randn(shape, dtype=dtype), torch.randn(*shape[:-1], OUT, dtype=dtype)
    expected = run(original, x, g, mode == "autocast")
    layer = layer_like(original, "bf16")
    identical(run(layer, x, g, mode == "autocast"), expected, f"{mode} {shape}")
    layer.forward = layer.quantized_forward  # type: ignore[method-assign]
    identical(run(layer, x, g, mode == "autocast"), expected, f"through the six casts, {mode} {shape}")


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("frozen", ["weight", "bias", "input", "weight and bias", "all"])
def test_without_casts_frozen(frozen: str, autocast: bool) -> None:
    original = nn.Linear(IN, OUT)
    for name, p in original.named_parameters():
        p.requires_grad_(name not in frozen and frozen != "all")
    x, g = torch.randn(TOKENS, IN), torch.randn(TOKENS, OUT)
    needs_x = frozen not in ("input", "all")
    expected = run(original, x, g, autocast, needs_x)
    identical(run(layer_like(original, "bf16"), x, g, autocast, needs_x), expected, frozen)
    quantised = run(layer_like(original, "nvfp4"), x, g, autocast, needs_x)
    assert {n for n, t in quantised.items() if t is None} == {n for n, t in expected.items() if t is None}


def test_without_casts_float64_under_autocast() -> None:
    """Autocast leaves float64 alone."""
    original = nn.Linear(IN, OUT, dtype=torch.float64)
    x, g = torch.randn(TOKENS, IN, dtype=torch.float64), torch.randn(TOKENS, OUT, dtype=torch.float64)
    identical(run(layer_like(original, "bf16"), x, g, True), run(original, x, g, True))


@pytest.mark.parametrize("autocast", [False, True])
def test_without_casts_used_twice(autocast: bool) -> None:
    """The gradients of both uses add up in the dtype in which they add up in nn.Linear."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(IN, IN)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.layer(x))

    original = Twice()
    x, g = torch.randn(TOKENS, IN), torch.randn(TOKENS, IN)
    identical(run(layer_like(original, "bf16"), x, g, autocast), run(original, x, g, autocast))


def test_without_casts_non_contiguous() -> None:
    original = nn.Linear(IN, OUT)
    x, g = torch.randn(IN, 6, 5).permute(1, 2, 0), torch.randn(OUT, 6, 5).permute(1, 2, 0)
    identical(run(layer_like(original, "bf16"), x, g), run(original, x, g))


@pytest.mark.parametrize("shape", [(IN,), (13, IN), (3, 5, IN)], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_without_casts_is_conv1d(shape: tuple[int, ...], autocast: bool) -> None:
    original = Conv1D(OUT, IN)
    x, g = torch.randn(shape), torch.randn(*shape[:-1], OUT)
    found, expected = (run(layer, x, g, autocast) for layer in (layer_like(original, "bf16"), original))
    identical({"y": found["y"]}, {"y": expected["y"]})
    for name in ("x", "weight", "bias"):
        torch.testing.assert_close(found[name], expected[name], msg=lambda text, name=name: f"{name}: {text}")


def test_conv1d_is_linear_of_the_transposed_weight() -> None:
    conv, plain = Conv1D(OUT, IN), nn.Linear(IN, OUT)
    plain.weight.data, plain.bias.data = conv.weight.data.t().contiguous(), torch.randn(OUT)
    conv.bias.data = plain.bias.data.clone()
    x, g = torch.randn(TOKENS, IN), torch.randn(TOKENS, OUT)
    found, expected = run(layer_like(conv, "nvfp4"), x, g), run(layer_like(plain, "nvfp4"), x, g)
    assert found["weight"] is not None
    found["weight"] = found["weight"].t()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_mixed_dtypes_are_refused() -> None:
    layer = layer_like(nn.Linear(IN, OUT), LinearCasts(fprop_w=ONE_LEVEL))
    with pytest.raises(ValueError, match=r"got torch\.bfloat16 and torch\.float32"):
        layer(torch.randn(2, IN).bfloat16())


# --- "fprop": quantisation-aware training -----------------------------------------------------------------------------


@pytest.mark.parametrize("cast", [ONE_LEVEL, TWO_LEVEL, Cast("int4", Scale("e5m2", 32))], ids=str)
def test_fprop_is_autograd_through_fake_quantize(cast: Cast) -> None:
    original = nn.Linear(IN, OUT)
    layer = layer_like(original, LinearCasts(fprop_x=cast, fprop_w=cast, dgrad_w="fprop", wgrad_x="fprop"))
    x, g = torch.randn(TOKENS, IN), torch.randn(TOKENS, OUT)
    found = run(layer, x, g)

    class Reference(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(fake_quantize(x, cast), fake_quantize(self.weight, cast), self.bias)

    reference = copy.deepcopy(original)
    reference.__class__ = Reference
    expected = run(reference, x, g)
    if cast.scale.two_level:  # the tensor scales multiply sums here, elements there
        for name, tensor in expected.items():
            torch.testing.assert_close(
                found[name], tensor, rtol=2e-6, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}"
            )
    else:
        identical(found, expected, str(cast))


# --- six operands -----------------------------------------------------------------------------------------------------


@contextmanager
def spied(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Operand]]:
    """Captures the operands that enter the three GEMMs, by name."""
    seen: dict[str, Operand] = {}
    original: Callable[..., Operand] = linear._operand

    def spy(name: str, *args: Any, **kwargs: Any) -> Operand:
        assert name not in seen, f"{name} was made twice"
        seen[name] = original(name, *args, **kwargs)
        return seen[name]

    with monkeypatch.context() as patch:
        patch.setattr(linear, "_operand", spy)
        yield seen


def operands_of(
    monkeypatch: pytest.MonkeyPatch, casts: LinearCasts, dtype: torch.dtype = torch.float32, key_seed: int = 1
) -> tuple[dict[str, Tensor], dict[str, Tensor | None], tuple[Tensor, ...]]:
    """What each operand was (float64), the results, and x, w, bias, g; always the same tensors."""
    generator = torch.Generator().manual_seed(0)
    x, w, g = (torch.randn(shape, generator=generator) for shape in ((TOKENS, IN), (OUT, IN), (TOKENS, OUT)))
    x[:, 5], w[3], g[7] = 60.0, 0.0, g[7] * 1e-3  # an outlier channel, a zero row, a row of small gradients
    original = nn.Linear(IN, OUT, dtype=dtype)
    original.weight.data.copy_(w)
    x, g = x.to(dtype), g.to(dtype)
    with spied(monkeypatch) as seen:
        results = run(layer_like(original, casts, key_seed), x, g)
    assert tuple(seen) == OPERANDS, "operands in another order, or missing"
    values = {
        name: operand.values.double() * (1.0 if operand.factor is None else operand.factor.double())
        for name, operand in seen.items()
    }
    assert original.bias is not None
    return values, results, (x, original.weight.detach(), original.bias.detach(), g)


BASE = {
    "mostly hp": LinearCasts(fprop_x=ONE_LEVEL, wgrad_g=ONE_LEVEL),
    "nvfp4": NVFP4,
    "one level, stochastic": LinearCasts(**dict.fromkeys(OPERANDS, replace(ONE_LEVEL, rounding="stochastic"))),
}


@pytest.mark.parametrize("base", BASE)
@pytest.mark.parametrize("changed", OPERANDS)
def test_every_knob_turns_its_own_operand(monkeypatch: pytest.MonkeyPatch, changed: str, base: str) -> None:
    before, _, _ = operands_of(monkeypatch, BASE[base])
    for cast in (None, Cast("e3m0", Scale("e5m2", 32)), Cast("int4", Scale("e4m3", 16, "up", True), "stochastic")):
        if getattr(BASE[base], changed) == cast:
            continue
        after, _, _ = operands_of(monkeypatch, BASE[base].replace(**{changed: cast}))
        moved = {name for name in OPERANDS if not torch.equal(before[name], after[name])}
        assert moved == {changed}, f"{base}: {changed} = {cast} changed {moved}"


# Every field of Cast and of Scale: what to start from and other values of this field.
SCALE_KNOBS: dict[str, tuple[Scale, list[Any]]] = {
    "format": (Scale("e4m3", 16), ["e5m2", "e1m6", "e2m5", "e3m4", "e6m1"]),
    "block": (Scale("e4m3", 16), [32, 8, (16, 16)]),
    "rounding": (Scale("e4m3", 16), ["up"]),
    "two_level": (Scale("e4m3", 16), [True]),
}
CAST_KNOBS: dict[str, tuple[Cast, list[Any]]] = {
    "element": (ONE_LEVEL, ["e1m2", "e3m0", "e2m3", "e3m2", "e4m3", "e5m2", "int2", "int8", "ternary"]),
    "scale": (ONE_LEVEL, [Scale("e5m2", 32)]),
    "rounding": (ONE_LEVEL, ["stochastic"]),
}


def knobs() -> list[tuple[str, Cast, Cast]]:
    found = []
    for field in fields(Scale):
        scale, values = SCALE_KNOBS[field.name]
        for value in values:
            found.append(
                (
                    f"scale.{field.name}={value}",
                    Cast("e2m1", scale),
                    Cast("e2m1", replace(scale, **{field.name: value})),
                )
            )
    for field in (field for field in fields(Cast) if field.init):
        cast, values = CAST_KNOBS[field.name]
        for value in values:
            found.append((f"{field.name}={value}", cast, replace(cast, **{field.name: value})))
    return found


@pytest.mark.parametrize(
    ("knob", "before", "after"), knobs(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_field_matters(monkeypatch: pytest.MonkeyPatch, knob: str, before: Cast, after: Cast) -> None:
    base = LinearCasts(**dict.fromkeys(OPERANDS, before))
    expected, _, _ = operands_of(monkeypatch, base)
    for changed in OPERANDS:
        found, _, _ = operands_of(monkeypatch, base.replace(**{changed: after}))
        moved = {name for name in OPERANDS if not torch.equal(found[name], expected[name])}
        assert moved == {changed}, f"{changed}.{knob} changed {moved}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "casts",
    [
        NVFP4,
        LinearCasts(**dict.fromkeys(OPERANDS, STOCHASTIC)),
        LinearCasts(**dict.fromkeys(OPERANDS, Cast("int8", Scale("e5m2", 32), "stochastic"))),
        LinearCasts(**dict.fromkeys(OPERANDS, Cast("e2m1", Scale("e4m3", (16, 16), two_level=True)))),
        NVFP4.replace(dgrad_w="fprop", wgrad_x="fprop"),
        NVFP4.replace(fprop_x=None, dgrad_w=None, wgrad_g=None),
        NVFP4.phase("qaf"),
        NVFP4.phase("hp-forward"),
        LinearCasts(dgrad_w="fprop", wgrad_x="fprop"),
    ],
    ids=str,
)
@pytest.mark.parametrize("exact", [False, True])
def test_operands_and_gemms(
    monkeypatch: pytest.MonkeyPatch, casts: LinearCasts, dtype: torch.dtype, exact: bool
) -> None:
    """Each operand is ``quantize`` along its contraction; each GEMM is the product of what its operands decode to."""
    generator = torch.Generator().manual_seed(5)
    original = nn.Linear(IN, OUT, dtype=dtype)
    x, g = (torch.randn(shape, generator=generator).to(dtype) for shape in ((TOKENS, IN), (TOKENS, OUT)))
    layer = layer_like(original, casts, exact=exact)
    keys = dict(zip(OPERANDS, layer.keys, strict=True))
    with spied(monkeypatch) as seen:
        found = run(layer, x, g)
    tensors = {"x": x, "w": original.weight.detach(), "g": g}

    def decoded(name: str) -> Tensor:
        cast = getattr(casts, name)
        if cast == "fprop":
            return decoded(f"fprop_{name[-1]}")
        tensor = tensors[TENSOR[name]]
        if cast is None:
            return tensor.double()
        stored = quantize(tensor, cast, CONTRACTION[name], keys[name])
        return stored.dequantize().double()

    reference = {name: decoded(name) for name in OPERANDS}
    for name, operand in seen.items():
        value = operand.values.double() * (1.0 if operand.factor is None else operand.factor.double())
        torch.testing.assert_close(value, reference[name], rtol=2e-7, atol=0, msg=lambda text, n=name: f"{n}: {text}")

    bias = original.bias.detach()
    gemms = {
        "y": (reference["fprop_x"], reference["fprop_w"].t(), bias),
        "x": (reference["dgrad_g"], reference["dgrad_w"], torch.zeros(())),
        "weight": (reference["wgrad_g"].t(), reference["wgrad_x"], torch.zeros(())),
    }
    for name, (left, right, offset) in gemms.items():
        expected, size = left @ right + offset.double(), left.abs() @ right.abs() + offset.double().abs()
        tensor = found[name]
        assert tensor is not None
        assert tensor.dtype == dtype
        eps = torch.finfo(dtype).eps * (0.51 if exact else 1)
        error = (tensor.double() - expected).abs()
        assert (error <= eps * expected.abs() + size * 2.0**-21).all(), f"{name}: off by {error.max():.2e}"
    assert torch.equal(found["bias"], g.sum(0)), "db is not the sum of the unquantised g"


@pytest.mark.parametrize("name", OPERANDS)
def test_blocks_lie_along_the_contraction(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A huge element flushes its block, one row or column of 16: the blocks that flush show where blocks lie."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (TOKENS, IN), "w": (OUT, IN), "g": (TOKENS, OUT)}
    tensors = {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}
    tensor, axis = tensors[TENSOR[name]], CONTRACTION[name]
    tensor[20, 20] = 1000.0
    original = nn.Linear(IN, OUT)
    original.weight.data.copy_(tensors["w"])
    layer = layer_like(original, LinearCasts(**{name: ONE_LEVEL}))
    with spied(monkeypatch) as seen:
        run(layer, tensors["x"], tensors["g"])
    flushed = (seen[name].values == 0) & (tensor.abs() > 0.8)
    along = [slice(20, 21), slice(20, 21)]
    along[axis] = slice(16, 32)
    block = torch.zeros_like(flushed)
    block[tuple(along)] = True
    assert flushed.any()
    assert not (flushed & ~block).any(), f"{name}: blocks do not lie along axis {axis}"


# --- overflow ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("where", ["x", "w", "g"])
@pytest.mark.parametrize(
    "cast", [STOCHASTIC, TWO_LEVEL, Cast("int4", Scale("e4m3", 16)), Cast("ternary", Scale())], ids=str
)
def test_grad_scaler_sees_overflows(where: str, bad: float, cast: Cast) -> None:
    layer = layer_like(nn.Linear(IN, OUT), LinearCasts(**dict.fromkeys(OPERANDS, cast)))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x = torch.randn(TOKENS, IN)
    for tainted in (False, True):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=10)
        taint = torch.zeros(TOKENS, OUT)
        if tainted:
            {"x": x, "w": layer.weight.data, "g": taint}[where][20, 20] = bad
        before = layer.weight.detach().clone()
        y = layer(x)
        y.register_hook(lambda g, taint=taint: g + taint)
        scaler.scale(y.square().mean()).backward()
        if where == "g":
            layer.bias.grad = None  # it is the sum of g, and would show the overflow without any cast
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        skipped = torch.equal(layer.weight.nan_to_num(), before.nan_to_num())
        assert skipped == tainted, f"{bad} in {where}: step {'skipped' if skipped else 'taken'}"
        assert scaler.get_scale() == (4.0 if tainted else 8.0)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize(
    "cast", [STOCHASTIC, TWO_LEVEL, Cast("int4", Scale("e4m3", 16)), Cast("ternary", Scale())], ids=str
)
def test_overflows_reach_every_gradient(bad: float, cast: Cast) -> None:
    """A bad element of g is seen in dX and dW by its row or column, one of w in dX, one of x in dW."""
    casts = LinearCasts(**dict.fromkeys(OPERANDS, cast))
    hits = {"x": {"weight": (slice(None), 20), "y": (20,)}, "w": {"x": (slice(None), 20), "y": (slice(None), 20)}}
    hits["g"] = {"weight": (20,), "x": (20,)}
    for where, expected in hits.items():
        layer = layer_like(nn.Linear(IN, OUT), casts)
        x, g = torch.randn(TOKENS, IN), torch.randn(TOKENS, OUT)
        {"x": x, "w": layer.weight.data, "g": g}[where][20, 20] = bad
        found = run(layer, x, g)
        for name, place in expected.items():
            tensor = found[name]
            assert tensor is not None
            assert not tensor[place].isfinite().any(), f"{bad} in {where} does not reach {name}"


# --- determinism ------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0, recompute: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(32, 48), nn.Linear(48, 32), nn.Linear(32, 8, bias=False)
        self.dropout, self.recompute = nn.Dropout(dropout), recompute

    def block(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.first(self.dropout(x))))

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.block, x, use_reentrant=False) if self.recompute else self.block(x)
        return self.head(x + y)


def net(casts: Any = "nvfp4", **kwargs: Any) -> tuple[Net, LayerKeys]:
    torch.manual_seed(4)
    model = convert(Net(**kwargs), casts)
    keys = LayerKeys(model)
    keys.fill_(1)
    return model, keys


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    torch.manual_seed(8)  # of dropout
    model.zero_grad()
    x = x.detach().clone().requires_grad_()
    y = model(x)
    y.square().mean().backward()
    return {
        "y": y.detach(),
        "x": x.grad,
        **{n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()},
    }


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_activation_checkpointing_changes_nothing(dropout: float) -> None:
    x = torch.randn(16, 32)
    found, expected = (gradients(net(dropout=dropout, recompute=recompute)[0], x) for recompute in (True, False))
    identical(found, expected, "with checkpointing")


def test_repeated_runs_are_equal_and_steps_are_not() -> None:
    x = torch.randn(16, 32)
    model, keys = net()
    first = gradients(model, x)
    torch.rand(100)
    identical(gradients(model, x), first, "again")
    keys.fill_(2)
    second = gradients(model, x)
    assert torch.equal(first["y"], second["y"]), "the forward pass of nvfp4 rounds to nearest"
    for name in ("x", "first.weight", "head.weight"):
        assert not torch.equal(first[name], second[name]), f"{name}: the next step rounds as this one did"
    keys.fill_(1)
    identical(gradients(model, x), first, "the first step again")


def test_dropout_leaves_random_bits_alone() -> None:
    """The bits of a layer do not depend on who else draws random numbers."""
    model, _ = net()
    cast = STOCHASTIC
    x = torch.randn(16, 32)
    key = model.first.keys[2]
    before = quantize(x, cast, key=key).codes
    F.dropout(x, 0.5)
    assert torch.equal(quantize(x, cast, key=key).codes, before)


def test_copies_and_state_dicts() -> None:
    model, _ = net()
    x = torch.randn(16, 32)
    expected = gradients(model, x)
    twin = copy.deepcopy(model)
    identical(gradients(twin, x), expected, "deepcopy")
    assert twin.first.weight is not model.first.weight
    plain = Net()
    assert list(model.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(model.state_dict())
    loaded = net()[0]
    loaded.load_state_dict(plain.state_dict())
    identical(gradients(loaded, x), expected, "after load_state_dict")


def test_print_shows_the_casts() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4, bias=False), Conv1D(4, 4))
    convert(model, "nvfp4", overrides={"1": LinearCasts(fprop_w=ONE_LEVEL)})
    lines = str(model).splitlines()
    assert lines[1].strip() == "(0): QuantLinear(in_features=4, out_features=8, bias=True, casts=nvfp4)"
    assert lines[2].strip() == (
        "(1): QuantLinear(in_features=8, out_features=4, bias=False, "
        "casts=fprop(x=hp, w=e2m1/e4m3:1x16) dgrad(g=hp, w=hp) wgrad(g=hp, x=hp))"
    )
    assert lines[3].strip() == "(2): QuantConv1D(casts=nvfp4)"
    set_phase(model, "bf16")
    assert "casts=bf16" in str(model[0])


def test_second_derivatives() -> None:
    """Without casts they are those of nn.Linear; with casts they are refused, not wrong."""
    original = nn.Linear(IN, OUT)
    x = torch.randn(TOKENS, IN, requires_grad=True)

    def penalty(layer: nn.Module) -> Tensor:
        (gradient,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        gradient.square().sum().backward()
        return layer.weight.grad

    assert torch.equal(penalty(layer_like(original, "bf16")), penalty(original))
    with pytest.raises(RuntimeError, match="once_differentiable"):
        penalty(layer_like(original, "nvfp4"))


def test_stochastic_rounding_without_keys_is_refused() -> None:
    layer = convert(nn.Linear(IN, OUT), LinearCasts(fprop_x=STOCHASTIC))
    with pytest.raises(ValueError, match="needs a key.*LayerKeys"):
        layer(torch.randn(2, IN))


def test_gradient_of_what_is_not_needed_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_like(nn.Linear(IN, OUT), "nvfp4")
    layer.weight.requires_grad_(False)
    with spied(monkeypatch) as seen:
        run(layer, torch.randn(TOKENS, IN), torch.randn(TOKENS, OUT))
    assert list(seen) == ["fprop_x", "fprop_w", "dgrad_g", "dgrad_w"]
    with spied(monkeypatch) as seen, torch.no_grad():
        layer(torch.randn(TOKENS, IN))
    assert list(seen) == ["fprop_x", "fprop_w"]


# --- real models ------------------------------------------------------------------------------------------------------


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2))


def llama() -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=32, **sizes))


@pytest.mark.parametrize(("make", "layers"), [(gpt2, 4 * 2 + 1), (llama, 7 * 2 + 1)])
@pytest.mark.parametrize("autocast", [False, True])
def test_language_models(make: Callable[[], nn.Module], layers: int, autocast: bool) -> None:
    model = convert(make(), "nvfp4")
    keys = LayerKeys(model)
    assert len(keys.layers) == layers
    keys.fill_(0)
    tokens = torch.randint(64, (2, 16))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    assert loss.isfinite()
    for name, p in model.named_parameters():
        assert p.grad is not None, f"{name} has no gradient"
        assert p.grad.isfinite().all(), f"the gradient of {name} is not finite"
        assert p.grad.any() or "bias" in name, f"the gradient of {name} is zero"


# --- torch.compile ----------------------------------------------------------------------------------------------------


def test_torch_compile_gives_the_same_bits() -> None:
    x = torch.randn(16, 32)
    model, keys = net()
    compiled = torch.compile(model, fullgraph=True)
    for autocast, step in itertools.product((False, True), (1, 2)):
        keys.fill_(step)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            expected = gradients(model, x)
            found = gradients(compiled, x)
        assert set(found) == {name if name in "yx" else f"_orig_mod.{name}" for name in expected}
        found = {name.removeprefix("_orig_mod."): tensor for name, tensor in found.items()}
        # db sums over the tokens in generated code, here as in a compiled nn.Linear, and adds in another order.
        for name in ("first.bias", "second.bias"):
            torch.testing.assert_close(found.pop(name), expected.pop(name), rtol=1e-5, atol=1e-8)
        identical(found, expected, f"compiled, autocast {autocast}, step {step}")


def test_a_phase_costs_one_compilation() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    x = torch.randn(16, 32)
    model, keys = net()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for phase, expected in (("fqt", 1), ("qaf", 2), ("fqt", 2), ("qaf", 2)):
        set_phase(model, phase)
        for step in range(3):
            keys.fill_(step)
            gradients(compiled, x)
        assert counter.frame_count == expected, f"{counter.frame_count} compilations after the phase {phase}"
    torch._dynamo.reset()


def test_converted_layers_of_one_shape_share_a_class() -> None:
    model = convert(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "nvfp4")
    assert type(model[0]) is type(model[1])
    assert isinstance(model[0], QuantizedLayer)
