"""Delayed scaling's scales: every operand's are by its own casts and histories."""

import pytest
import torch
from torch import nn

from lightning_lowbit import Cast, LinearCasts, Scale, quantize
from lightning_lowbit.nn import OPERANDS, AmaxHistories
from lightning_lowbit.quant import rotate, split_mean
from lightning_lowbit.quant.shard import amax_of
from tests.nn.amax.histories import E4M3, IN, NVFP4, OUT, TOKENS, delayed, filled, one_pass, remembered, single
from tests.nn.layers import CONTRACTION, GEMMS, every, layer_like, rotation, run, signs_of, spied, value
from tests.tables import each


def test_every_operand_has_its_own_settings():
    casts = LinearCasts(
        fprop_x=delayed(history=2),
        fprop_w=delayed(history=5),
        dgrad_g=delayed("e5m2", history=1),
        dgrad_w="fprop",
        wgrad_g=delayed("e5m2", history=3, algorithm="most_recent", margin=1),
        wgrad_x=Cast("e4m3", Scale("fp32", "tensor")),
    )
    layer, histories = single(casts)
    for amax in (8.0, 4.0, 1.0, 2.0):
        one_pass(layer, amax)
        histories.advance_()
    assert remembered(histories) == {
        "/fprop_x": [1, 2],
        "/fprop_w": [8, 4, 1, 2],
        "/dgrad_g": [2],
        "/wgrad_g": [4, 1, 2],
    }
    with spied() as seen:
        one_pass(layer, 16.0)
    scaled_by = {"fprop_x": 2 / 448, "fprop_w": 8 / 448, "dgrad_g": 2 / 57344, "dgrad_w": 8 / 448}
    scaled_by |= {"wgrad_g": 4 / 57344, "wgrad_x": 16 / 448}
    found = {name: operand.factor.item() for name, operand in seen.items() if operand.factor is not None}
    assert found == pytest.approx(scaled_by, rel=2e-7)


CASTS = {
    "fp8-delayed": LinearCasts.preset("fp8-delayed"),
    "nvfp4": NVFP4,
    "tiles": every(Cast("e2m1", Scale("e4m3", (16, 16), two_level=True, source="delayed", history=3))),
    "rows": every(Cast("int4", Scale("e4m3", "row", two_level=True, source="delayed"))),
    "4/6": every(Cast("e2m1", Scale("e4m3", 16, two_level=True, four_over_six="mse", source="delayed"))),
    "mx": every(Cast("e4m3", Scale("e8m0", 32, two_level=True, source="delayed", algorithm="most_recent"))),
    "powers of two": every(Cast("e4m3", Scale("e8m0", "tensor", source="delayed"))),
    "powers of two in fp32": every(delayed(rounding="power_of_two", algorithm="most_recent", margin=2)),
    "integers": every(Cast("int8", Scale("fp32", "tensor", source="delayed", margin=1), "stochastic")),
    "ternary": every(Cast("ternary", Scale("fp32", "tensor", source="delayed"))),
}


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASTS)
def test_operands_are_quantized_with_the_amax_in_force(name, dtype):
    casts = CASTS[name]
    layer = layer_like(nn.Linear(IN, OUT, dtype=dtype), casts)
    histories = AmaxHistories(layer)
    sizes = {"x": (5.0, 17.0, 0.13), "w": (0.25, 0.11, 0.6), "g": (1e-3, 1.3e-4, 3e-3)}
    shapes = {"x": (TOKENS, IN), "w": (OUT, IN), "g": (TOKENS, OUT)}
    largest = {name: [] for name in sizes}
    for step in range(3):
        tensors = {key: filled(shape, sizes[key][step], step).to(dtype) for key, shape in shapes.items()}
        layer.weight.data.copy_(tensors["w"])
        layer.lowbit.calls.begin()
        with spied() as seen:
            run(layer, tensors["x"], tensors["g"])
        histories.advance_()
        for i, operand in enumerate(OPERANDS):
            cast, past = getattr(casts, operand), largest[operand[-1]]
            pick = max if cast.scale.algorithm == "max" else (lambda amaxes: amaxes[-1])
            tensor, axis = tensors[operand[-1]], CONTRACTION[operand]
            amax = pick(past) if past else None
            expected = quantize(tensor, cast, axis, layer.lowbit.keys[i], amax).dequantize().double()
            message = f"step {step}, {operand}, amax {amax}"
            torch.testing.assert_close(value(seen[operand]), expected, rtol=2e-7, atol=0, msg=message)
            if past:
                own = quantize(tensor, cast, axis, layer.lowbit.keys[i]).dequantize().double()
                # Powers of two, and the blocks below them, do not see every change of the amax above.
                assert name == "mx" or name.startswith("powers of two") or not torch.equal(own, expected), (
                    f"{message}: nothing to see"
                )
        for key, tensor in tensors.items():
            largest[key].append(amax_of(tensor))


TRANSFORMS = {
    "hadamard": {"hadamard": dict.fromkeys(GEMMS, 16)},
    "keyed": {"hadamard": {"fprop": 16, "wgrad": {"size": 32, "signs": "keyed"}}},
    "means": {"subtract_mean": tuple(GEMMS)},
    "both": {"hadamard": {"dgrad": 16, "wgrad": 16}, "subtract_mean": tuple(GEMMS)},
}


@each("element", ["e4m3", "nvfp4"])
@each("name", TRANSFORMS)
def test_amaxes_are_those_of_the_transformed_tensor(name, element):
    cast = E4M3 if element == "e4m3" else NVFP4.fprop_x
    layer, histories = single(every(cast, **TRANSFORMS[name]))
    casts = layer.casts

    def transformed(operand, tensor):
        gemm, kind = operand.split("_")
        if gemm in casts.subtract_mean and kind != "w":
            tensor = split_mean(tensor)[0]
        if gemm in casts.hadamard:
            matrix = rotation(casts.hadamard[gemm], int(layer.lowbit.keys[OPERANDS.index(GEMMS[gemm][1])]))
            tensor = rotate(tensor, signs_of(matrix), CONTRACTION[operand])
        return tensor

    expected = {f"/{operand}": [] for operand in OPERANDS}
    for step, amax in enumerate((3.0, 1.0)):
        tensors = {"x": filled((TOKENS, IN), amax) + amax, "g": filled((TOKENS, OUT), amax, 2) + amax}
        tensors["w"] = layer.weight.data.copy_(filled((OUT, IN), amax, 1)).clone()
        layer.lowbit.calls.begin()
        with spied() as seen:
            run(layer, tensors["x"], tensors["g"])
        histories.advance_()
        for operand in OPERANDS:
            raw = tensors[operand[-1]]
            tensor = transformed(operand, raw)
            history = expected[f"/{operand}"]
            given = torch.tensor(history[0]) if history else None
            wanted = quantize(tensor, cast, CONTRACTION[operand], amax=given).dequantize().double()
            torch.testing.assert_close(value(seen[operand]), wanted, rtol=2e-7, atol=0, msg=f"{operand}, step {step}")
            history.append(amax_of(tensor).item())
            changed = operand.split("_")[0] in casts.hadamard or (name != "keyed" and operand[-1] != "w")
            assert (history[-1] != amax_of(raw)) == changed, f"{operand}: the sample does not tell"
    assert remembered(histories) == expected


# --- surrogates -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operand", ["fprop_x", "fprop_w"])
def test_trust_ends_where_the_forward_pass_saturated(operand):
    """With 3.5 in force elements are multiplied by 128, and 448 + 16 is the last one that is trusted: 3.625."""
    casts = LinearCasts(**{operand: E4M3}, surrogate={operand: "trust"})
    layer, histories = single(casts, 6, 1)
    sample = torch.tensor([[1.0, 3.5, -3.625, 3.65, -7.0, 14.0]])
    # With an empty history the own amax is in force, which saturates nothing.
    for amax, trusted in ((3.5, [True] * 6), (14.0, [True, True, True, False, False, False])):
        tensor, other = (sample * (amax / 14)).requires_grad_(), torch.ones(1, 6)
        x, w = (tensor, other) if operand == "fprop_x" else (other, tensor)
        layer.weight.data.copy_(w.detach())
        layer.zero_grad()
        y = layer(x)
        histories.advance_()  # the backward pass does not see what is in force from now on
        y.sum().backward()
        gradient = x.grad if operand == "fprop_x" else layer.weight.grad
        assert gradient is not None
        assert (gradient != 0).tolist() == [trusted], f"{operand}: {gradient} after {remembered(histories)}"
    histories.advance_()
    assert remembered(histories) == {f"/{operand}": [3.5, 14]}, "the backward pass staged it for another step"
