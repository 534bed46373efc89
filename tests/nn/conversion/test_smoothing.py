"""Smooth-SwiGLU: unquantized the same function; s, down to its ends; steps, evaluation, recomputation and copies."""

import copy
import math
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_lowbit import convert
from lightning_lowbit.nn import AmaxHistories
from lightning_lowbit.nn.core.watch import observed
from lightning_lowbit.quant import Operand
from tests.nn.amax.histories import assert_equal_steps
from tests.nn.conversion.swiglus import CURRENT, DELAYED, KINDS, MLP, Net, product_amax, relative, step
from tests.nn.layers import pass_through
from tests.tables import each


@contextmanager
def sources(lossless=False):
    """Captures what is to be quantized, by operand, in the order of the GEMMs; ``lossless`` then leaves it as it is."""
    seen = []

    def spy(how, source, operand, *_):
        seen.append((how.name, source.values))
        return Operand(source.values, source.factor) if lossless else operand

    with observed(spy):
        yield seen


def factors(mlp, x):
    """The s per channel that a forward pass through one MLP uses: W over what it makes of W."""
    with sources() as seen, torch.no_grad():
        mlp(x)
    weight = mlp.down_proj.weight_matrix()
    [scaled] = [tensor for name, tensor in seen if name == "fprop_w" and tensor.shape == weight.shape]
    s = weight.detach() / scaled
    assert (s == s[0]).all(), "the factor of a channel differs between rows of the weight"
    return s[0]


def only_down(mlp, casts):
    """With smoothed channels; what enters the down projection is that of the plain MLP, and depends on no history."""
    return convert(mlp, "bf16", overrides={"down_proj": casts}, smooth_swiglu="channel")


def down_power(amax):
    """1 / amax rounded down to a power of two, 1 for 0: number by number, by logarithms in float64."""
    powers = [2.0 ** math.floor(-math.log2(a)) if a > 0 else 1.0 for a in amax.flatten().tolist()]
    return torch.tensor(powers, dtype=amax.dtype).view(amax.shape)


# --- the unquantized function -----------------------------------------------------------------------------------------


@each("bias", [False, True])
@each("dtype", [torch.float32, torch.bfloat16])
@each("kind", KINDS)
def test_unquantized_it_is_the_same_function(kind, dtype, bias):
    """Output and all gradients, to the bit, channels being of sizes from 1e-6 to 1e6 and one of them 0.

    A bias comes after the division per token, and with it a second rounding in bfloat16.
    """
    plain = MLP(bias=bias)
    with torch.no_grad():
        plain.up_proj.weight.mul_(torch.logspace(-6, 6, 24)[:, None])
        plain.up_proj.weight[5] = 0
        if bias:
            plain.up_proj.bias[5] = 0
    x, g = torch.randn(7, 16, dtype=dtype), torch.randn(7, 16, dtype=dtype)
    results, products = [], []
    for smoothing in (None, kind):
        model = convert(copy.deepcopy(plain), CURRENT, smooth_swiglu=smoothing).to(dtype)
        with sources(lossless=True) as seen:
            results.append(pass_through(model, x, g))
        products += [tensor for name, tensor in seen if name == "fprop_x" and tensor.shape == (7, 24)]
    assert not torch.equal(*products), "nothing was smoothed"
    for name, expected in results[0].items():
        found = results[1][name]
        assert expected.isfinite().all()
        if name == "y" and kind == "token" and bias and dtype == torch.bfloat16:
            torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-8)  # of a bias below 1/4
        else:
            assert torch.equal(found, expected), f"{name} differs by up to {(found - expected).abs().max()}"


# --- s ----------------------------------------------------------------------------------------------------------------


def test_s_per_channel_is_of_all_tokens():
    """Of every sequence of a batch; |up * silu(gate)|, not |up|. A channel that is 0 keeps 1. Without histories, it is
    that of the batch in evaluation, too."""
    mlp = MLP()
    with torch.no_grad():
        mlp.up_proj.weight.mul_(torch.logspace(-3, 3, 24)[:, None])
        mlp.gate_proj.weight[3] = 0
    model = only_down(copy.deepcopy(mlp), CURRENT)
    for in_training, scale in ((True, 1.0), (False, 1.0), (False, 100.0)):
        x = scale * torch.randn(2, 3, 5, 16)
        s = factors(model.train(in_training), x)
        assert torch.equal(s, down_power(product_amax(mlp, x)))
        assert s[3] == 1
        assert len(s.unique()) > 10


def test_s_per_token_is_of_the_up_projection():
    """Of its output as it is, quantized; each token its own, those of every sequence. A token of 0 keeps 1."""
    mlp = convert(MLP(), CURRENT, smooth_swiglu="token")
    x = torch.randn(2, 3, 16) * torch.logspace(-3, 3, 6).view(2, 3, 1)
    x[1, 1] = 0
    up, product = [], []
    mlp.up_proj.register_forward_hook(lambda _, __, output: up.append(output.detach()))
    mlp.down_proj.register_forward_pre_hook(lambda _, inputs: product.append(inputs[0].detach()))
    with sources() as seen:
        mlp(x)
    [scaled] = [tensor for name, tensor in seen if name == "fprop_x" and tensor.shape[1] == 24]
    [weight] = [tensor for name, tensor in seen if name == "fprop_w" and tensor.shape == (16, 24)]
    s = down_power(up[0].abs().amax(-1).view(-1, 1))
    assert torch.equal(scaled, product[0].view(-1, 24) * s)
    assert torch.equal(weight, mlp.down_proj.weight)
    assert s[4] == 1
    assert len(s.unique()) >= 5


@each("kind", KINDS)
def test_float16_stays_finite(kind):
    """A channel of 1e-5 and one of 3e4 lie within its range, which is small: s and 1/s must, too."""
    mlp = MLP()
    with torch.no_grad():
        mlp.up_proj.weight[3].mul_(1e-5)
        mlp.up_proj.weight[4].mul_(3e4 / product_amax(mlp, x := torch.randn(9, 16))[4])
        mlp.down_proj.weight[:, 4].mul_(1e-4)
    model = convert(copy.deepcopy(mlp), CURRENT, smooth_swiglu=kind)
    with torch.autocast("cpu", torch.float16):
        y, expected = model(x), mlp(x)
    assert expected.isfinite().all()
    assert y.isfinite().all(), "smoothing has left the range of float16"
    assert relative(y, expected) < 0.15


def channel_amax(histories):
    return histories.state_dict()["channel_amax"]["down_proj"]


def test_an_infinite_channel_stays_visible():
    """An overflow never becomes a finite number, and is no amax to remember."""
    mlp = convert(MLP(), DELAYED, smooth_swiglu="channel")
    histories, x = AmaxHistories(mlp), torch.randn(9, 16)
    step(mlp, histories, x)
    before = channel_amax(histories)
    mlp.between.register_forward_hook(lambda _, __, h: h.index_fill(-1, torch.tensor([7]), math.inf))
    histories.recording = True
    assert not mlp(2 * x).isfinite().any()
    histories.advance_()
    forgotten = channel_amax(histories) == before
    assert forgotten.nonzero().tolist() == [[7]], "an infinity was remembered, or finite channels were forgotten"


def test_tokens_need_the_up_projection():
    """A down projection that is called by itself, or after an up projection of other tokens, cannot know its s."""
    mlp = convert(MLP(), CURRENT, smooth_swiglu="token")
    for call in (lambda: None, lambda: mlp.up_proj(torch.randn(4, 16)), lambda: mlp(torch.randn(3, 16))):  # used once
        call()
        with pytest.raises(ValueError, match="none has come before this pass"):
            mlp.down_proj(torch.randn(3, 24))


# --- over steps -------------------------------------------------------------------------------------------------------


def test_histories_hold_what_is_quantized():
    """Of s * h, whose largest magnitude is between 1/2 and 1, and of no weight, which has its own scale."""
    mlp = only_down(MLP(), DELAYED)
    histories = AmaxHistories(mlp)
    for scale in (1.0, 1000.0, 1e-3):
        step(mlp, histories, scale * torch.randn(20, 16))
    of_down = {k.split("/")[1]: v for k, v in histories.state_dict()["amax_history"].items() if k.startswith("down")}
    assert of_down.keys() == {"fprop_x", "dgrad_g", "wgrad_g", "wgrad_x"}
    for name in ("fprop_x", "wgrad_x"):
        assert ((of_down[name][-3:] > 0.5) & (of_down[name][-3:] <= 1)).all(), of_down[name]
        assert not of_down[name][:-3].any()
    assert len(AmaxHistories(convert(MLP(), CURRENT, smooth_swiglu="channel"))) == 1
    assert len(AmaxHistories(convert(MLP(), CURRENT, smooth_swiglu="token"))) == 0, "tokens have nothing to remember"


def test_evaluation_uses_the_last_training_step():
    """The largest of its micro-batches; training uses the batch's own, and evaluation leaves no trace."""
    mlp = MLP()
    model = only_down(copy.deepcopy(mlp), DELAYED)
    histories = AmaxHistories(model)
    batches = [torch.randn(6, 16) * scale for scale in (100.0, 1.0, 1.2, 0.01)]
    amaxes = [product_amax(mlp, x) for x in batches]
    assert torch.equal(factors(model, batches[0]), down_power(amaxes[0])), "recording"
    histories.recording = False
    assert torch.equal(factors(model, batches[1]), down_power(amaxes[1])), "no step yet: its own"
    step(model, histories, batches[0])  # an earlier step must be forgotten
    step(model, histories, batches[1], batches[2])
    of_step = torch.maximum(amaxes[1], amaxes[2])
    assert not torch.equal(down_power(of_step), down_power(amaxes[2])), "the micro-batches must differ"
    state = histories.state_dict()
    torch.testing.assert_close(channel_amax(histories), of_step)
    for x in (batches[3], batches[0]):
        assert torch.equal(factors(model, x), down_power(of_step)), "evaluation"
    assert all(torch.equal(histories.state_dict()[k][n], t) for k, d in state.items() for n, t in d.items())
    histories.recording = True
    assert torch.equal(factors(model, batches[3]), down_power(amaxes[3])), "training again"
    histories.advance_()
    torch.testing.assert_close(channel_amax(histories), amaxes[3])


def test_a_channel_that_was_silent_keeps_its_amax():
    """Silent in the last step: that of the step before; silent so far: evaluation takes the batch's own."""
    mlp = MLP()
    model = only_down(copy.deepcopy(mlp), DELAYED)
    histories, x = AmaxHistories(model), torch.randn(6, 16)

    def silent_step(x):
        silence = model.between.register_forward_hook(lambda _, __, h: h.index_fill(-1, torch.tensor([7]), 0))
        step(model, histories, x)
        silence.remove()

    silent_step(x)
    amax = product_amax(mlp, 64 * x)
    seen = factors(model, 64 * x)
    assert seen[7] == down_power(amax)[7]
    assert (seen[:7] > down_power(amax)[:7]).all()
    step(model, histories, x)
    silent_step(2 * x)
    expected = torch.where(torch.arange(24) == 7, product_amax(mlp, x), product_amax(mlp, 2 * x))
    torch.testing.assert_close(channel_amax(histories), expected)


@each("use_reentrant", [False, True])
@each("kind", KINDS)
def test_activation_checkpointing_changes_nothing(kind, use_reentrant):
    plain = nn.Sequential(nn.Linear(32, 16), MLP(), MLP(), nn.Linear(16, 4))  # no residual: two terms have one sum
    convert(plain, DELAYED, smooth_swiglu=kind)
    recomputing = copy.deepcopy(plain)
    for mlp in recomputing[1:3]:
        mlp.forward = partial(checkpoint, mlp.forward, use_reentrant=use_reentrant)
    assert_equal_steps(*((model, AmaxHistories(model)) for model in (recomputing, plain)))


@each("kind", KINDS)
def test_deepcopy(kind):
    """A copy computes by its own up projection, and once training is over by the same amaxes; it shares nothing."""
    model = convert(Net(), DELAYED, smooth_swiglu=kind)
    histories = AmaxHistories(model)
    step(model, histories, torch.randn(9, 8))
    x = torch.randn(9, 8)
    expected = model(x)
    histories.release()
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x), expected)
    step(model, AmaxHistories(model), 100 * torch.randn(9, 8))
    assert not torch.equal(model(x), expected)
    assert torch.equal(twin(x), expected), "training the original changed the copy"
