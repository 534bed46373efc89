"""Adam with moments in FP8: its steps, its results and its state."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from lightning_lowbit.compilation import backend
from lightning_lowbit.optim import LowBitAdamW, StableSPAM, moments
from lightning_lowbit.optim.moments import NAMES, FP8Moments, Piece
from tests.optim.moments.helpers import draw, elements, final_loss, heavy_tailed, kept
from tests.optim.parameters import assert_same, set_gradients, snapshot
from tests.references import moments as reference


def test_adam_is_the_reference(code):
    parameters = [Parameter(heavy_tailed(shape)) for shape in ((5, 130), (3, 2, 129))]
    optimizer = LowBitAdamW(parameters, lr=1e-2, weight_decay=0.1)
    references = [reference.FP8AdamW(p, number, 1e-2, 0.1) for number, p in enumerate(parameters)]
    for step in range(6):
        set_gradients(parameters, seed=step)
        optimizer.step()
        for p, slow in zip(parameters, references, strict=True):
            assert p.grad is not None
            slow.step(p.grad)
            codes = np.stack([elements(optimizer.state[p], name) for name in NAMES])
            same = codes == np.stack([slow.kept[name].numbers for name in NAMES])
            # fp32 against float64: one of 10^5 draws may fall between them, and lives on for some steps.
            assert same.mean() > 0.998, f"step {step}: {1 - same.mean():.2%} of the codes are not the reference's"
            near = np.isclose(p.detach().double().numpy(), slow.parameter, rtol=1e-5, atol=1e-7)
            assert near[same.all(0)].mean() > 0.998, f"step {step}: parameters are not the reference's"


def second_moments(steps, deviation):
    """Mean squares of normal gradients at the end, in FP8 and in fp32, that began four times too large.

    Those of the first column, the largest of their blocks, do not vary: what is rounded in units of the largest would
    fall with it.
    """
    generator, format = torch.Generator().manual_seed(0), FP8Moments()
    exact = deviation.square()
    exact[:, 1:] *= 4
    state = kept(exact, exact, draw(exact.shape, step=steps)).state
    for step in range(steps):
        gradient = torch.randn(deviation.shape, generator=generator) * deviation
        gradient[:, 0] = deviation[:, 0]
        piece = Piece(state, draw(deviation.shape, step=step))
        mean, mean_square = format.load(piece)
        format.store(piece, mean, mean_square.lerp_(gradient.square(), 0.001))
        exact.lerp_(gradient.square(), 0.001)
    return format.load(piece)[1][:, 1:], exact[:, 1:]


@pytest.mark.slow
def test_second_moment_converges_and_rounded_to_nearest_it_stands_still(monkeypatch):
    """At β2 = .999 it moves by a thousandth, where numbers are a quarter apart."""
    deviation = torch.cat([torch.tensor([3.0]), torch.logspace(0, -3, 127)]).expand(12, 128).contiguous()
    stored, exact = second_moments(3000, deviation)
    ratio = stored / exact
    # An element is a third off, by chance; 1524 of them 1 %, and the 108 or so of each band of magnitudes 3.5 %.
    assert abs(ratio.mean() - 1) < 0.03, f"on average the stored mean square is {ratio.mean():.3f} of the exact one"
    bands = torch.stack([band.mean() for band in ratio.chunk(14, dim=1)])
    assert (bands - 1).abs().max() < 0.14, f"by magnitude, the stored mean squares are {bands} of the exact ones"
    assert 0.25 < ratio.std() < 0.45, f"the stored mean square scatters by {ratio.std():.2f} of itself"

    halves = 0x7FFF7FFF  # both draws are a half
    monkeypatch.setattr(moments, "random_bits", lambda index, key: torch.full_like(index, halves))
    nearest, exact = second_moments(3000, deviation)
    # The exact one is near 1 + 3·exp(-3) = 1.15 variances; what stands where it began, at 4, is 3.5 times that.
    ratio = (nearest / exact).mean()
    assert ratio > 3, f"rounded to nearest, the mean square is {ratio:.2f} of the exact one: what are draws good for?"


def test_updates_of_small_elements_stay_bounded():
    """Quiet for long, then growing by 11 % a step, which is what makes a mean most roots of its mean square: 7.3.

    Sizes in a block span 2^27, and the roots of E5M2 2^16. Of several constructions (constant, growing, sparse, spiky,
    calming) this one has the longest updates: with 1000 quiet steps and 16 384 elements 8.5 learning rates, fp32's 5.9.
    """
    sizes = 10 ** (torch.rand(8, 256, generator=torch.Generator().manual_seed(0)) * -8)
    updates = []
    for kind in ("fp32", "fp8"):
        generator = torch.Generator().manual_seed(1)
        p = Parameter(torch.zeros_like(sizes))
        optimizer = LowBitAdamW([p], lr=1.0, weight_decay=0.0, moments=kind, eps=1e-30)
        seen = []
        for step in range(360):
            quiet = torch.randn(sizes.shape, generator=generator)
            p.grad = sizes * (quiet if step < 300 else torch.full_like(sizes, 1.11 ** (step - 300)))
            p.detach().zero_()
            optimizer.step()
            seen.append(p.detach().abs())
        updates.append(torch.stack(seen))
    full, low = updates
    longest = low.max() / full.max()
    assert longest < 1.6, f"the longest update is {low.max():.1f} learning rates, {longest:.1f} times that in fp32"
    small = low[full < 1e-3].max()
    assert small < 1, f"where fp32 moves by less than a thousandth, FP8 moves by {small:.2f} learning rates"


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [LowBitAdamW, StableSPAM])
def test_training_in_fp8_is_nearly_as_good(optimizer):
    ratios = []
    for seed in range(3):
        full, low = (final_loss(partial(optimizer, moments=kind), seed) for kind in ("fp32", "fp8"))
        ratios.append(low / full)
    assert max(ratios) < 1.02, f"final losses with FP8 moments, over those with fp32: {ratios}"


def test_two_moments_take_two_bytes():
    width, inner, words = 256, 688, 1000  # LLaMA, smaller: attention, feed-forward, embedding, norm
    shapes = [*[(width, width)] * 4, *[(inner, width)] * 2, (width, inner), (words, width)]
    parameters = [Parameter(torch.ones(shape)) for shape in shapes]
    optimizer = LowBitAdamW(parameters)
    set_gradients(parameters, seed=0)
    with backend("eager"):
        optimizer.step()
    elements = sum(p.numel() for p in parameters)
    names = FP8Moments().names
    taken = sum(optimizer.state[p][name].nbytes for p in parameters for name in names) / elements
    assert 2 < taken <= 2.1, f"both moments take {taken:.3f} bytes for a parameter"
    everything = sum(t.nbytes for p in parameters for t in optimizer.state[p].values()) / elements
    assert everything <= taken + 0.01, f"state other than moments takes {everything - taken:.3f} bytes for a parameter"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_skipped_step_changes_nothing(bad, code):
    parameters = [Parameter(heavy_tailed(shape).bfloat16()) for shape in ((3, 130), (9,), (30, 40))]
    optimizer = LowBitAdamW(parameters, master_weights="fp16")
    # So uneven that some mean squares are kept as 0: storing what was loaded would change them.
    for step in range(3):
        for p in parameters:
            p.grad = heavy_tailed(p.shape, seed=step).bfloat16()
        optimizer.step()
    before = snapshot(optimizer, parameters)
    parameters[-1].grad[1, 1] = bad
    optimizer.step()
    assert_same(snapshot(optimizer, parameters), before, "a skipped step left traces")
