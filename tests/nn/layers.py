"""A converted copy of a layer, a pass through it, its operands, and what it computes by definition."""

import copy
import math
from collections.abc import Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_lowbit import Cast, LinearCasts, convert, quantize
from lightning_lowbit.kernels.gemms import CodeOperand
from lightning_lowbit.nn import OPERANDS, AmaxHistories, LayerKeys, QuantizedLayer
from lightning_lowbit.nn.core.watch import observed
from lightning_lowbit.patterns import clean_name
from lightning_lowbit.quant import rotate, split_mean, surrogate_factor
from tests.references.quantize import splitmix64, uniform

# The operands of each GEMM and what it computes; of each operand, the axis of the contraction.
GEMMS = {"fprop": ("fprop_x", "fprop_w"), "dgrad": ("dgrad_g", "dgrad_w"), "wgrad": ("wgrad_g", "wgrad_x")}
RESULTS = {"fprop": "y", "dgrad": "x", "wgrad": "weight"}
CONTRACTION = {"fprop_x": 1, "fprop_w": 1, "dgrad_g": 1, "dgrad_w": 0, "wgrad_g": 0, "wgrad_x": 0}


def every(cast, **others):
    """All six operands in one cast."""
    return LinearCasts(**{**dict.fromkeys(OPERANDS, cast), **others})


def layer_like(original, casts, seed=1, **kwargs):
    """A converted copy with keys and empty amax histories."""
    layer = convert(copy.deepcopy(original), casts, **kwargs)
    LayerKeys(layer, seed).fill_(3)
    AmaxHistories(layer)
    return layer


def remember(model, *steps):
    """Histories of a model after steps in which operands had these amaxes: by name, or all of them the same."""
    histories = AmaxHistories(model)
    for step in steps:
        amaxes = step if isinstance(step, Mapping) else dict.fromkeys(OPERANDS, step)
        for layer in model.modules():
            if isinstance(layer, QuantizedLayer) and layer.lowbit.amaxes is not None:
                for name, amax in amaxes.items():
                    layer.lowbit.amaxes.staged[OPERANDS.index(name)] = amax
        histories.advance_()
    return histories


def run(layer, x, g, autocast=False, needs_x=True):
    """:func:`pass_through` for the output gradient g. Tokens are smoothed by :func:`token_amax`."""
    if isinstance(layer, QuantizedLayer) and layer.casts.smooth == "token":
        layer.lowbit.token_amax = token_amax(x)
    return pass_through(layer, x, g, autocast=autocast, needs_x=needs_x)


def pass_through(model, x, g=None, forward=None, autocast=False, needs_x=True):
    """Output and gradients of one pass, as ``y``, ``x`` and by the names of parameters, without those of wrappers.

    Args:
        g: gradient of the output, or a function that makes it of the output; None for the loss ``mean(y²)``.
        forward: what computes the output, with the parameters of the model; None for the model itself.
        autocast: to bfloat16.
        needs_x: whether the input has a gradient.
    """
    x = x.detach().clone().requires_grad_(needs_x)
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():  # an autocast around it stays in force
        y = (model if forward is None else forward)(x)
    if g is None:
        y.float().square().mean().backward()
    elif y.requires_grad:
        y.backward((g(y) if callable(g) and not isinstance(g, Tensor) else g).to(y.dtype))
    gradients = {clean_name(name): None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **gradients}


def token_amax(x):
    """float32 ``[tokens, 1]``, of many sizes: amaxes that an up projection might have told of, not those of x."""
    return x.detach().reshape(-1, x.shape[-1])[:, :1].abs().float() + 2.0**-7


def identical(found, expected, message=""):
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


def value(operand):
    """float64, also of an operand that a GEMM of the CPU casts."""
    operand = operand.decoded(torch.float32) if isinstance(operand, CodeOperand) else operand
    return operand.values.double() * (1.0 if operand.factor is None else operand.factor.double())


class Net(nn.Module):
    def __init__(self, dropout=0.0, recompute=False):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(32, 48), nn.Linear(48, 32), nn.Linear(32, 8, bias=False)
        self.dropout, self.recompute = nn.Dropout(dropout), recompute

    def block(self, x):
        return self.second(F.relu(self.first(self.dropout(x))))

    def forward(self, x):
        y = checkpoint(self.block, x, use_reentrant=False) if self.recompute else self.block(x)
        return self.head(x + y)


def net(casts="nvfp4", **kwargs):
    torch.manual_seed(4)
    model = convert(Net(**kwargs), casts)
    keys = LayerKeys(model)
    keys.fill_(1)
    AmaxHistories(model)
    return model, keys


def gradients(model, x):
    torch.manual_seed(8)  # of dropout
    return pass_through(model, x)


@contextmanager
def spied():
    """Captures the operands that enter the three GEMMs, by name."""
    seen = {}

    def spy(how, source, operand, *_):
        assert how.name not in seen, f"{how.name} was made twice"
        seen[how.name] = operand
        return operand

    with observed(spy):
        yield seen


# --- by definition ----------------------------------------------------------------------------------------------------

_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)  # Transformer Engine's


def rotation(transform, key):
    """diag(±1) · H / √n in float64: H has a -1 where the binary numbers of row and column share an odd number of 1s."""
    n = transform.size
    matrix = [[(-1.0) ** (row & column).bit_count() for column in range(n)] for row in range(n)]
    signs = _SIGNS * (n // 16)
    if transform.signs == "keyed":
        signs = np.where(uniform(np.arange(n), splitmix64((key ^ 0x48616461) % 2**64)) < 0.5, -1.0, 1.0)
    return torch.tensor(signs, dtype=torch.float64)[:, None] * torch.tensor(matrix, dtype=torch.float64) / math.sqrt(n)


def signs_of(transform):
    """The signs of a rotation: the first column of H is ones."""
    return transform[:, 0].sign().float()


@dataclass
class Definition:
    """What a layer computes, float64.

    Attributes:
        operands: by name, as they meet in their GEMMs.
        results: ``y``, ``x``, ``weight`` and ``bias``, the latter three being gradients.
        sizes: of y, x and weight, the sums of the magnitudes of what was added up.
        offsets: the part of these sums that is no part of the GEMM: bias, and the product with the mean.
    """

    operands: dict[str, Tensor]
    results: dict[str, Tensor]
    sizes: dict[str, Tensor]
    offsets: dict[str, Tensor]


def in_force(cast, remembered):
    """The amax that a cast scales by after steps with these amaxes, oldest first; None for the tensor's own."""
    if cast.scale.source == "current" or not remembered:
        return None
    newest = remembered[-cast.scale.history :]
    return torch.tensor(newest[-1] if cast.scale.algorithm == "most_recent" else max(newest))


def smoothing(casts, x):
    """By tensor, the powers of two, float64, that smoothing multiplies it by: s the largest with s · amax <= 1."""
    factors = dict.fromkeys("xwg", torch.ones((), dtype=torch.float64))
    if casts.smooth is None:
        return factors
    amax = x.double().abs().amax(0) if casts.smooth == "channel" else token_amax(x)
    s = torch.tensor([2.0 ** -math.ceil(math.log2(a)) if a else 1.0 for a in amax.flatten().tolist()])
    s = s.double().view(amax.shape)
    # Y = (X s) (W / s)ᵀ, so dX = (dY · W / s) s; or Y = (s X) Wᵀ / s, whose product has the gradient dY / s.
    return {**factors, "x": s, "w" if casts.smooth == "channel" else "g": 1 / s}


def smoothed(casts, tensors):
    """x, w and g as they meet in the GEMMs, in their dtype: smoothed where the casts say so."""
    factors = smoothing(casts, tensors["x"])
    return {name: (tensor.double() * factors[name]).to(tensor.dtype) for name, tensor in tensors.items()}


def by_definition(layer, x, g, remembered=()):
    """One pass, a step at a time: smooth, split means, rotate, quantize, multiply exactly; then what stands for
    rounding, and the smoothing undone.

    Args:
        layer: converted, with keys.
        x, g: input and gradient of the output, matrices.
        remembered: the amaxes of former steps, oldest first, the same for all operands.
    """
    casts = layer.casts
    keys = dict(zip(OPERANDS, layer.lowbit.keys.tolist(), strict=True))
    factors = smoothing(casts, x)
    tensors = smoothed(casts, {"x": x, "w": layer.weight_matrix().detach(), "g": g})
    bias = torch.zeros(()) if layer.bias is None else layer.bias.detach()
    operands = {}
    again = {}  # quantized, float32
    results, sizes, offsets = {"bias": g.double().sum(0)}, {}, {}
    transforms = {gemm: rotation(t, keys[GEMMS[gemm][1]]) for gemm, t in casts.hadamard.items()}

    for gemm, names in GEMMS.items():
        sides = {name: tensors[name[-1]] for name in names}
        for name in names:
            if getattr(casts, name) == "fprop":
                sides[name] = operands[forward := f"fprop_{name[-1]}"]
                cast = getattr(casts, forward)
                if isinstance(cast, Cast) and cast.scale.block == "row" and not layer.lowbit.exact:
                    sides[name] = sides[name].to(x.dtype)  # the other way round its scales are part of the elements
            if name in casts.requantize:
                sides[name] = again[f"fprop_{name[-1]}"].to(x.dtype)
        # Undoing the smoothing must leave the bias as it is.
        offset = bias.double() / factors["g"] if gemm == "fprop" else torch.zeros((), dtype=torch.float64)
        offset_size = offset.abs()
        if gemm in casts.subtract_mean:
            left, right = (sides[name].double() for name in names)
            mean = split_mean(sides[names[0]])[1].double()
            if gemm == "wgrad":
                other = split_mean(sides[names[1]])[1].double()
                product, size = len(g) * mean.t() @ other, len(g) * mean.abs().t() @ other.abs()
            else:
                right = right.t() if gemm == "fprop" else right
                product, size = mean @ right, mean.abs() @ right.abs()
            offset, offset_size = offset + product, offset_size + size
            for name in names:
                if name[-1] != "w" and isinstance(getattr(casts, name), Cast):
                    sides[name] = split_mean(sides[name])[0]
        for name, tensor in sides.items():
            if gemm in transforms:
                tensor = rotate(tensor, signs_of(transforms[gemm]), CONTRACTION[name])
            cast = getattr(casts, name)
            if isinstance(cast, Cast):
                quantized = quantize(tensor, cast, CONTRACTION[name], keys[name], in_force(cast, remembered))
                rounded = cast.round_to_bfloat16 and cast.scale.per_block  # of one level here
                tensor = quantized.dequantize(x.dtype if rounded else torch.float32)
                block_scaled = replace(quantized, tensor_scale=None).dequantize()  # associates as operands do
                again[name] = block_scaled * (1.0 if quantized.tensor_scale is None else quantized.tensor_scale)
            operands[name] = tensor.double()
        left, right = (operands[name] for name in names)
        left, right = (left, right.t()) if gemm == "fprop" else (left, right) if gemm == "dgrad" else (left.t(), right)
        results[RESULTS[gemm]] = left @ right + offset
        sizes[RESULTS[gemm]], offsets[RESULTS[gemm]] = left.abs() @ right.abs() + offset_size, offset_size

    for name, kind in casts.surrogate.items():
        result, tensor = ("weight" if name == "fprop_w" else "x"), tensors[name[-1]]
        back = torch.eye(tensor.shape[1], dtype=torch.float64)
        if "fprop" in transforms:
            n = casts.hadamard["fprop"].size
            tensor = rotate(tensor, signs_of(transforms["fprop"]), 1)
            back = torch.block_diag(*[transforms["fprop"]] * (tensor.shape[1] // n))[: back.shape[0]]
        cast = getattr(casts, name)
        factor = surrogate_factor(kind, tensor, cast, 1, in_force(cast, remembered)).double()
        # `back` has orthonormal rows: the gradient of what was rounded, its factor, and the way back.
        results[result] = ((results[result] @ back) * factor) @ back.t()
        sizes[result] = ((sizes[result] @ back.abs()) * factor) @ back.abs().t()

    for result, factor in (("y", factors["g"]), ("x", factors["x"]), ("weight", factors["w"])):
        for parts in (results, sizes, offsets):
            parts[result] = parts[result] * factor
    return Definition(operands, results, sizes, offsets)


def assert_is_defined(results, definition, dtype, roundings=1):
    """Results of a pass in a dtype differ from their definition by so many roundings and those of float32 sums."""
    for name in RESULTS.values():
        expected = definition.results[name]
        error = (results[name].double() - expected).abs()
        allowed = roundings * torch.finfo(dtype).eps * (expected.abs() + 2 * definition.offsets[name])
        allowed += definition.sizes[name] * 2.0**-21
        assert (error <= allowed).all(), f"{name}: off by {error.max():.2e}, {(error / allowed).max():.2f} x allowed"
