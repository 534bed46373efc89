"""Moments in FP8 and of some elements, and master weights in fp16: against slow references, and what they promise."""

import io
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

from lightning_lowbit.compilation import backend
from lightning_lowbit.optim import SPAM, LowBitAdamW, StableSPAM, clipping, moments
from lightning_lowbit.optim.guarded_adam import GuardedAdam
from lightning_lowbit.optim.moments import NAMES, Draw, FP8Moments, Piece, SparseMoments
from lightning_lowbit.quant.rounding import round_nearest
from tests.optim.parameters import in_cpp_and_in_torch, use
from tests.references import moments as reference

SHAPES = [(3, 130), (5, 1), (2, 127), (2, 129), (3, 256), (0, 5), (2, 3, 130), (2, 2, 2, 129)]


def heavy_tailed(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Of both signs, over nine orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * 10 ** (torch.rand(shape, generator=generator) * -9)


def draw(whole: Sequence[int], step: int = 0, number: int = 0, last_reset: int = 0, taken: bool = True) -> Draw:
    own = number << 40
    key, epoch = torch.tensor(step + own), torch.tensor(last_reset + own)
    return Draw((0,) * len(whole), torch.Size(whole), key, epoch, torch.tensor(taken))


def kept(mean: Tensor, mean_square: Tensor, drawn: Draw) -> Piece:
    """Both moments in FP8."""
    piece = Piece(FP8Moments().new_state(mean, torch.float32), drawn)
    FP8Moments().store(piece, mean, mean_square)
    return piece


def set_gradients(parameters: Sequence[Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def train(optimizer: GuardedAdam, parameters: Sequence[Parameter], steps: range) -> None:
    for step in steps:
        set_gradients(parameters, seed=step)
        optimizer.step()


def elements(state: Mapping[str, Tensor], name: str) -> np.ndarray:
    """What the codes of a moment stand for, in units of the scales: float64, the parameter's shape."""
    return state[name].view(reference.DTYPES[name]).double().numpy()


def snapshot(optimizer: GuardedAdam, parameters: Sequence[Parameter]) -> list[Tensor]:
    """Copies of every parameter and all its state."""
    return [t.clone() for p in parameters for t in (p.detach(), *optimizer.state[p].values())]


def assert_same(left: list[Tensor], right: list[Tensor], message: str) -> None:
    for index, (a, b) in enumerate(zip(left, right, strict=True)):
        assert a.dtype == b.dtype and torch.equal(a, b), f"{message}: tensor {index} differs: {a} {b}"


# --- FP8: one moment --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fp8_is_the_reference(shape: tuple[int, ...]) -> None:
    values = heavy_tailed(shape)
    piece = kept(values, values.square(), draw(shape, step=7, number=2))
    loaded = FP8Moments().load(piece)
    for moment, (name, given) in enumerate(zip(NAMES, (values, values.square()), strict=True)):
        numbers, scales = elements(piece.state, name), piece.state[f"{name}_scale"].double().numpy()
        wanted = reference.encode(given, reference.draws(shape, 7, 2, moment), name)
        assert np.array_equal(scales, wanted.scales), f"{name}: scales {scales} are not {wanted.scales}"
        is_neighbor = (numbers == wanted.below) | (numbers == wanted.above)
        assert is_neighbor.all(), f"{name}: {numbers[~is_neighbor]} are no neighbors of what was rounded"
        assert np.array_equal(numbers, wanted.numbers), f"{name}: the draws went another way than the reference's"
        decoded = loaded[moment].double().numpy()
        np.testing.assert_allclose(decoded, reference.decode(wanted, name), rtol=2**-23, err_msg=name)
        for row, out in zip(given.reshape(-1, shape[-1]).double(), decoded.reshape(-1, shape[-1]), strict=True):
            for first in range(0, shape[-1], 128):
                at = first + int(row[first : first + 128].abs().argmax())
                # Two roundings of fp32: of the scale, and of its product with the format's largest number.
                error = abs(out[at] / row[at].item() - 1)
                assert error <= 2**-23, f"{name}: the largest of a block, {row[at]}, came back as {out[at]}"


def test_fp8_of_what_fp32_can_hardly_hold() -> None:
    """Scales themselves leave the normal numbers here; what is lost is below their last place times the largest."""
    rows = [
        [3e38, -1e30, 1.0, 1e-20, 1e-38, 1e-45, 0.0],
        [1e-38, -1e-38, 3e-39, 1e-40, 1e-44, 1e-45, 0.0],
        [1e-40, -7e-41, 1e-42, 1e-43, 1e-44, 1e-45, 0.0],
        [1e-45, -1e-45, 1e-45, 0.0, 0.0, 0.0, 0.0],
    ]
    values = torch.tensor(rows)
    for moment, name in enumerate(NAMES):
        given = values if name == "mean" else values.abs()
        piece = kept(given, given, draw(given.shape))
        wanted = reference.encode(given, reference.draws(tuple(given.shape), 0, 0, moment), name)
        numbers, scales = elements(piece.state, name), piece.state[f"{name}_scale"].double().numpy()
        assert np.array_equal(scales, wanted.scales) and np.array_equal(numbers, wanted.numbers), f"{name}: {numbers}"
        decoded = FP8Moments().load(piece)[moment]
        assert decoded.isfinite().all(), f"{name}: not finite: {decoded}"
        lost = (decoded.double() - given.double()).abs().amax(-1)
        largest = given.double().abs().amax(-1)
        allowed = largest / 4 + reference.grid(name)[-1] * 2.0**-150  # a step of E5M2, half a step of the scale
        assert (lost <= allowed).all(), f"{name}: lost {lost} of {largest}, allowed {allowed}"


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_fp8_zeros_stay_zero(sign: float) -> None:
    values = heavy_tailed((3, 300)).abs()
    values[1, 128:256] = 0.0
    values[2] = 0.0
    piece = kept(values * sign, values.square(), draw(values.shape))
    for name, loaded in zip(NAMES, FP8Moments().load(piece), strict=True):
        assert (loaded[1, 128:256] == 0).all() and (loaded[2] == 0).all(), f"{name}: a block of zeros was read as more"
        assert piece.state[f"{name}_scale"][2].tolist() == [0, 0, 0], f"{name}: zeros have a scale"
    assert (FP8Moments().load(piece)[1][1, :128] > 0).all(), "a mean square above 0 was read as 0: its root divides"
    decoded = FP8Moments().load(piece)[1]
    smallest = decoded[0].min() / piece.state["mean_square_scale"][0].max()
    assert smallest <= 2.0**-16, f"what is far below the largest was read as {smallest} units, more than the smallest"


@pytest.mark.parametrize("name", NAMES)
def test_fp8_is_unbiased(name: str) -> None:
    """Also where one of hundreds of draws rounds up, and all others to 0: the mean over 2^14 draws against theory."""
    row = torch.logspace(0, -8 if name == "mean" else -12, 128)
    repeats, keys, total = 256, 64, torch.zeros(128, dtype=torch.float64)
    values = row.expand(repeats, 128).contiguous()
    for key in range(keys):
        state = kept(values, values, draw(values.shape, step=key)).state
        total += torch.from_numpy(elements(state, name)).sum(0)
    wanted = reference.encode(row[None], np.full((1, 128), 0.5), name)
    scaled = row.double().numpy() / wanted.scales[0, 0]
    step = wanted.above[0] - wanted.below[0]
    share = (scaled - wanted.below[0]) / np.where(step > 0, step, 1)
    count = repeats * keys
    tested = count * share * (1 - share) > 10  # where the normal distribution is near
    assert tested.sum() > 90 and (scaled[tested] < reference.grid(name)[reference.grid(name) > 0][0] / 100).any()
    deviation = step * np.sqrt(share * (1 - share) / count)
    z = ((total.numpy() / count - scaled) / np.where(tested, deviation, 1))[tested]
    # Of 128 normal numbers one is above 4.5 in one of a thousand trials; z² summed is within 5 sigma of its mean.
    assert np.abs(z).max() < 4.5, f"{name}: z is up to {np.abs(z).max():.1f}: stochastic rounding is biased"
    excess = ((z**2).sum() - len(z)) / math.sqrt(2 * len(z))
    assert abs(excess) < 5, f"{name}: z² sums to {(z**2).sum():.0f} over {len(z)}, {excess:.1f} sigma off"


# --- FP8: random bits -------------------------------------------------------------------------------------------------


def coins(step: int = 0, number: int = 0, moment: int = 0) -> Tensor:
    """4096 draws above a half or not: elements in the middle between two numbers, in blocks with a scale of 1."""
    largest, middle = ((448.0, 1.0625), (57344.0, 1.125))[moment]
    values = torch.full((32, 128), middle)
    values[:, 0] = largest
    state = kept(values, values, draw(values.shape, step, number)).state
    assert (state[f"{NAMES[moment]}_scale"] == 1).all()
    return torch.from_numpy(elements(state, NAMES[moment]))[:, 1:] > middle


def test_draws_are_of_the_step_the_parameter_and_the_moment() -> None:
    cases = [dict(zip(("step", "number", "moment"), case, strict=True)) for case in np.ndindex(4, 4, 2)]
    thrown = [coins(**case) for case in cases]
    for case, once in zip(cases, thrown, strict=True):
        assert torch.equal(once, coins(**case)), f"{case}: drawn twice, the bits differ"
    for first, (case, left) in enumerate(zip(cases, thrown, strict=True)):
        for other, right in zip(cases[first + 1 :], thrown[first + 1 :], strict=True):
            z = ((left == right).double().mean() - 0.5).item() * 2 * math.sqrt(left.numel())
            assert abs(z) < 5, f"bits of {case} and {other} agree {z:.1f} sigma from half of the time"
    for left, right in ((thrown[0][:, :-1], thrown[0][:, 1:]), (thrown[0][:-1], thrown[0][1:])):
        z = ((left == right).double().mean() - 0.5).item() * 2 * math.sqrt(left.numel())
        assert abs(z) < 5, f"bits of neighboring elements agree {z:.1f} sigma from half of the time"


@pytest.mark.parametrize("shape", [(9, 130), (8, 3, 130)], ids=str)
def test_rows_of_a_parameter_get_the_bits_of_those_rows(shape: tuple[int, ...]) -> None:
    values = heavy_tailed(shape)
    whole = draw(shape, step=3, number=1)
    expected = kept(values, values.square(), whole).state
    rows = kept(values[3:7], values[3:7].square(), whole.at(3)).state
    for name in FP8Moments().names:
        assert torch.equal(rows[name].float(), expected[name][3:7].float()), f"{name} of rows 3 … 7 is another"
    # A part of another dimension, as tensor parallelism cuts: it begins where a block does.
    inner = whole._replace(offsets=(*(0 for _ in shape[1:]), 128))
    columns = kept(values[..., 128:], values[..., 128:].square(), inner).state
    for name in NAMES:
        assert torch.equal(columns[name].float(), expected[name][..., 128:].float()), f"{name} of columns is another"


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("shape", [(9, 130), (8, 3, 129)], ids=str)
@pytest.mark.parametrize("piece", [1, 300, 2**18])
def test_codes_do_not_depend_on_the_pieces(shape: tuple[int, ...], piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """β = 0 keeps a gradient and its square as they are: Adam's own arithmetic, in vectors, is not what is tested."""
    gradient = heavy_tailed(shape)
    monkeypatch.setattr(clipping, "PIECE_ON_CPU", piece)
    parameters = [Parameter(torch.zeros(shape)) for _ in range(2)]
    optimizer = LowBitAdamW(parameters, betas=(0.0, 0.0))
    for _ in range(3):
        for p in parameters:
            p.grad = gradient
        optimizer.step()
    for number, p in enumerate(parameters):
        expected = kept(gradient, gradient.square(), draw(shape, step=2, number=number)).state
        for name in FP8Moments().names:
            same = torch.equal(optimizer.state[p][name].float(), expected[name].float())
            assert same, f"{name} of parameter {number} in pieces of {piece} is not that of the whole"


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(3, 130), (2, 3, 256)], ids=str)
def test_compiled_rounding_is_eager_rounding(shape: tuple[int, ...]) -> None:
    values = heavy_tailed(shape)
    states = []
    for name in ("eager", "compiled"):
        with backend(name):  # type: ignore[arg-type]
            states.append(kept(values, values.square(), draw(shape)).state)
    for name in FP8Moments().names:
        assert torch.equal(states[0][name].float(), states[1][name].float()), f"{name}: compiled code gives other bits"


@pytest.mark.slow
def test_compiled_step() -> None:
    """Generated code may fuse a product into a sum: a moment that then lies across a draw becomes its neighbor."""
    runs = []
    for wrap in (lambda step: step, torch.compile):
        parameters = [Parameter(torch.zeros(12, 130)), Parameter(torch.zeros(5))]
        optimizer = LowBitAdamW(parameters)
        step = wrap(optimizer.step)
        for seed in range(4):
            set_gradients(parameters, seed)
            step()
        runs.append((parameters, optimizer.state[parameters[0]]))
    (eager, eager_state), (compiled, compiled_state) = runs
    for name in NAMES:
        codes = [state[name] for state in (eager_state, compiled_state)]
        share = (codes[0] != codes[1]).double().mean().item()
        # Last places of fp32 are 2^-21 of a step of E4M3, and one of 2^16 draws lies at each place.
        assert share < 1e-3, f"{share:.1%} of the codes of {name} differ"
    for p, q in zip(eager, compiled, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-7)


# --- FP8: Adam with them ----------------------------------------------------------------------------------------------


@in_cpp_and_in_torch
def test_adam_is_the_reference(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use(code, monkeypatch)
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


def second_moments(steps: int, deviation: Tensor) -> tuple[Tensor, Tensor]:
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
def test_second_moment_converges_and_rounded_to_nearest_it_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """At β2 = .999 it moves by a thousandth, where numbers are a quarter apart."""
    deviation = torch.cat([torch.tensor([3.0]), torch.logspace(0, -3, 127)]).expand(12, 128).contiguous()
    stored, exact = second_moments(3000, deviation)
    ratio = stored / exact
    # An element is a third off, by chance; 1524 of them 1 %, and the 108 or so of each band of magnitudes 3.5 %.
    assert abs(ratio.mean() - 1) < 0.03, f"on average the stored mean square is {ratio.mean():.3f} of the exact one"
    bands = torch.stack([band.mean() for band in ratio.chunk(14, dim=1)])
    assert (bands - 1).abs().max() < 0.14, f"by magnitude, the stored mean squares are {bands} of the exact ones"
    assert 0.25 < ratio.std() < 0.45, f"the stored mean square scatters by {ratio.std():.2f} of itself"

    monkeypatch.setattr(moments, "round_stochastic", lambda value, format, draws: round_nearest(value, format))
    nearest, exact = second_moments(3000, deviation)
    # The exact one is near 1 + 3·exp(-3) = 1.15 variances; what stands where it began, at 4, is 3.5 times that.
    ratio = (nearest / exact).mean()
    assert ratio > 3, f"rounded to nearest, the mean square is {ratio:.2f} of the exact one: what are draws good for?"


def test_updates_of_small_elements_stay_bounded() -> None:
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


def final_loss(
    make: Callable[[Any], torch.optim.Optimizer], seed: int, lr: float = 1e-2, dtype: torch.dtype = torch.float32
) -> float:
    """Of a small network that learns another one's outputs, averaged over the last batches."""
    torch.manual_seed(seed)
    teacher = nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 8))
    student = nn.Sequential(nn.Linear(24, 160), nn.GELU(), nn.Linear(160, 8)).to(dtype)
    optimizer = make(student.parameters())
    losses = []
    for step in range(150):
        x = torch.randn(64, 24)
        loss = F.mse_loss(student(x.to(dtype)).float(), teacher(x).detach())
        for group in optimizer.param_groups:
            group["lr"] = lr * (1 - step / 150)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-20:]) / 20


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [LowBitAdamW, StableSPAM])
def test_training_in_fp8_is_nearly_as_good(optimizer: Callable[..., torch.optim.Optimizer]) -> None:
    ratios = []
    for seed in range(3):
        full, low = (final_loss(partial(optimizer, moments=kind), seed) for kind in ("fp32", "fp8"))
        ratios.append(low / full)
    assert max(ratios) < 1.02, f"final losses with FP8 moments, over those with fp32: {ratios}"


def test_two_moments_take_two_bytes() -> None:
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fp8_state_is_resumed_bit_for_bit(dtype: torch.dtype) -> None:
    def make() -> list[Parameter]:
        return [Parameter(torch.ones(shape, dtype=dtype)) for shape in ((), (7,), (3, 130), (2, 2, 5), (0, 3))]

    parameters, resumed_parameters = make(), make()
    optimizer, resumed = LowBitAdamW(parameters), LowBitAdamW(resumed_parameters)
    train(optimizer, parameters, range(3))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    with torch.no_grad():
        for p, q in zip(parameters, resumed_parameters, strict=True):
            q.copy_(p)
    assert_same(snapshot(resumed, resumed_parameters), snapshot(optimizer, parameters), "loading changed the state")
    train(optimizer, parameters, range(3, 6))
    train(resumed, resumed_parameters, range(3, 6))
    assert_same(snapshot(resumed, resumed_parameters), snapshot(optimizer, parameters), "the resumed run differs")
    for p in parameters:
        state = optimizer.state[p]
        found = [state[name].dtype for name in NAMES]
        low = p.dim() >= 2
        wanted = [torch.uint8 if low else torch.float32] * 2
        assert found == wanted, f"moments of {tuple(p.shape)} are in {found}, wanted {wanted}"
        assert ("mean_scale" in state) == low, f"{tuple(p.shape)}: {list(state)}"


@in_cpp_and_in_torch
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("dtype", "make"),
    [
        (torch.float32, LowBitAdamW),
        (torch.bfloat16, lambda p: LowBitAdamW(p, master_weights="fp16")),
        (torch.bfloat16, lambda p: LowBitAdamW(p, moments="fp32", master_weights="fp16")),
        (torch.float32, lambda p: SPAM(p, density=0.25, weight_decay=0.1, reset_interval=4)),
    ],
    ids=["fp8", "fp8 and masters", "masters", "sparse"],
)
def test_a_skipped_step_changes_nothing(
    bad: float, make: Callable[..., GuardedAdam], dtype: torch.dtype, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(code, monkeypatch)
    parameters = [Parameter(heavy_tailed(shape).to(dtype)) for shape in ((3, 130), (9,), (30, 40))]
    optimizer = make(parameters)
    # So uneven that some mean squares are kept as 0: storing what was loaded would change them.
    for step in range(4):
        for p in parameters:
            p.grad = heavy_tailed(p.shape, seed=step).to(dtype)
        if step < 3:  # the fourth would be a reset of SPAM
            optimizer.step()
    before = snapshot(optimizer, parameters)
    last = parameters[-1].grad
    assert last is not None
    last[1, 1] = bad
    optimizer.step()
    assert_same(snapshot(optimizer, parameters), before, "a skipped step left traces")


def test_float64_parameters_are_refused() -> None:
    """Statistics of such a parameter are float64; who wants that does not want moments of three and four bits."""
    parameter = Parameter(torch.ones(2, 3, dtype=torch.float64))
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(ValueError, match="float64.*moments='fp32'"):
        LowBitAdamW([parameter]).step()
    assert (parameter == 1).all(), "a refused step moved a parameter"
    LowBitAdamW([parameter], moments="fp32").step()


# --- master weights ---------------------------------------------------------------------------------------------------


def masters_times_scale(optimizer: GuardedAdam, parameter: Parameter) -> Tensor:
    state = optimizer.state[parameter]
    return state["master"].float() * state["master_scale"]


def test_masters_take_steps_below_a_place_of_bf16() -> None:
    """From 1.5 by .001 at a time: half a place of bf16 is .0039 there, of fp16 .0005."""
    moved = {}
    for name, dtype, masters in (("fp32", torch.float32, None), ("bf16", torch.bfloat16, None),
                                 ("masters", torch.bfloat16, "fp16")):  # fmt: skip
        p = Parameter(torch.full((4, 130), 1.5, dtype=dtype))
        optimizer = LowBitAdamW([p], lr=1e-3, weight_decay=0.0, master_weights=masters)
        for _ in range(100):
            p.grad = torch.ones_like(p)
            optimizer.step()
        moved[name] = 1.5 - p.detach().double().mean().item()
    assert moved["bf16"] == 0, f"without masters, parameters in bf16 moved by {moved['bf16']}: the test shows nothing"
    # A step of .001 is rounded to 1 or 1.024 places of fp16, and the sum once to bf16.
    assert abs(moved["masters"] - moved["fp32"]) < 0.025 * moved["fp32"] + 2**-8, f"moved: {moved}"


@pytest.mark.slow
def test_training_with_masters_is_nearly_as_good_as_in_fp32() -> None:
    """At a rate of 2e-4 and less, half a place of bf16 or less for most weights here."""
    full, masters, bare = (
        [final_loss(partial(LowBitAdamW, moments="fp32", master_weights=kind), seed, 2e-4, dtype) for seed in range(3)]
        for dtype, kind in ((torch.float32, None), (torch.bfloat16, "fp16"), (torch.bfloat16, None))
    )
    ratios = [[low / high for low, high in zip(losses, full, strict=True)] for losses in (masters, bare)]
    assert max(ratios[0]) < 1.05, f"losses in bf16 with masters, over those in fp32: {ratios[0]}"
    assert min(ratios[1]) > 1.05, f"losses in bf16 without masters, over those in fp32: {ratios[1]}: the test is blind"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@in_cpp_and_in_torch
def test_parameters_are_their_masters_rounded(dtype: torch.dtype, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use(code, monkeypatch)
    parameters = [Parameter(torch.randn(shape).to(dtype)) for shape in ((40, 130), (50,), ())]
    optimizer = LowBitAdamW(parameters, lr=1e-2, master_weights="fp16")
    for step in range(5):
        set_gradients(parameters, seed=step)
        optimizer.step()
        for p in parameters:
            other = (p != masters_times_scale(optimizer, p).to(dtype)).float().mean().item()
            assert other == 0, f"step {step}: {other:.1%} of the elements are not their masters, rounded"


def test_scale_of_the_masters_follows_the_weights() -> None:
    p = Parameter(torch.full((2, 130), 0.01, dtype=torch.bfloat16))
    optimizer = LowBitAdamW([p], lr=0.01, weight_decay=0.0, master_weights="fp16")
    scales = []
    for _ in range(60):
        p.grad = -torch.ones_like(p)
        before = p.detach().abs().max().item()
        optimizer.step()
        state = optimizer.state[p]
        scales.append(state["master_scale"].item())
        assert math.frexp(scales[-1])[0] == 0.5, f"the scale {scales[-1]} is no power of two"
        room = torch.finfo(torch.float16).max * scales[-1] / before
        assert 3.9 < room < 32, f"fp16 reaches {room} times the largest weight"
        assert state["master"].isfinite().all()
    assert 30 < scales[-1] / scales[0] < 130, f"weights grew from .01 to .6, the scale from {scales[0]} to {scales[-1]}"


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-6, 1e-2, 1.0, 1e4, 1e38])
def test_masters_of_any_size_train(size: float) -> None:
    """One step may be far larger than all weights: those that begin at almost 0, as of a last layer."""
    start = (torch.rand(3, 130, generator=torch.Generator().manual_seed(0)) + 0.5).mul(size).bfloat16()
    low, full = Parameter(start.clone()), Parameter(start.float())
    lr = max(1e-3, size / 500)  # of 1, a quarter of a place of bf16
    optimizers = (
        LowBitAdamW([low], lr=lr, weight_decay=0.0, moments="fp32", master_weights="fp16"),
        LowBitAdamW([full], lr=lr, weight_decay=0.0, moments="fp32"),
    )
    for step in range(20):
        for p, optimizer in zip((low, full), optimizers, strict=True):
            set_gradients([p], seed=step // 10)
            p.grad = p.grad.bfloat16().to(p.dtype)  # type: ignore[union-attr]
            optimizer.step()
        master = masters_times_scale(optimizers[0], low)
        assert master.isfinite().all() and low.isfinite().all()
        largest = full.detach().abs().max().item()
        # Each step rounds masters once, by at most half a place of fp16 of the largest.
        error = (master - full.detach()).abs().max().item() / largest
        assert error < (step + 1) * 2**-11, f"step {step}: masters are {error:.2e} of the largest weight off"
        error = (low.detach().float() - full.detach()).abs().max().item() / largest
        assert error < (step + 1) * 2**-11 + 2**-8, f"step {step}: weights are {error:.2e} of the largest off"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_masters_of_wide_parameters_are_refused(dtype: torch.dtype) -> None:
    p, low = Parameter(torch.ones(2, 3, dtype=dtype)), Parameter(torch.ones(2, 3, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=f"bfloat16.*float16, got .*{dtype}.*leave"):
        LowBitAdamW([p], moments="fp32", master_weights="fp16")
    optimizer = LowBitAdamW([low], moments="fp32", master_weights="fp16")
    with pytest.raises(ValueError, match=f"bfloat16.*float16, got .*{dtype}"):
        optimizer.add_param_group({"params": [p]})
    assert len(optimizer.param_groups) == 1, "a refused group was added nevertheless"


@pytest.mark.parametrize("kind", ["fp32", "fp8"])
def test_masters_are_resumed_bit_for_bit(kind: str) -> None:
    def make() -> tuple[list[Parameter], LowBitAdamW]:
        parameters = [Parameter(torch.ones(shape, dtype=torch.bfloat16)) for shape in ((3, 130), (7,), ())]
        return parameters, LowBitAdamW(parameters, moments=kind, master_weights="fp16")

    (parameters, optimizer), (resumed_parameters, resumed) = make(), make()
    train(optimizer, parameters, range(4))
    file = io.BytesIO()
    torch.save([optimizer.state_dict(), parameters], file)
    file.seek(0)
    saved, values = torch.load(file, weights_only=True)
    resumed.load_state_dict(saved)
    with torch.no_grad():
        for p, value in zip(resumed_parameters, values, strict=True):
            p.copy_(value)
    for p in resumed_parameters:
        assert resumed.state[p]["master"].dtype == torch.float16, "loading cast the masters"
        assert resumed.state[p]["master_scale"].dtype == torch.float32, "loading cast their scale"
    train(optimizer, parameters, range(4, 8))
    train(resumed, resumed_parameters, range(4, 8))
    assert_same(snapshot(resumed, resumed_parameters), snapshot(optimizer, parameters), "the resumed run differs")
    other = LowBitAdamW(resumed_parameters, moments=kind)
    with pytest.raises(ValueError, match="saved state has master_weights='fp16', this LowBitAdamW master_weights=None"):
        other.load_state_dict(saved)


# --- sparse moments ---------------------------------------------------------------------------------------------------


def is_drawn(shape: tuple[int, ...], every: int, last_reset: int, number: int) -> Tensor:
    mask = torch.zeros(math.prod(shape[:-1]), shape[-1], dtype=torch.bool)
    for row, columns in enumerate(reference.drawn_columns(shape, every, last_reset, number)):
        mask[row, columns] = True
    return mask.view(shape)


@pytest.mark.parametrize("piece", [8, 2**18])
def test_only_what_was_drawn_moves_until_the_next_reset(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clipping, "PIECE_ON_CPU", piece)
    shapes = [(6, 8), (6, 8), (5, 10), (4, 1), (2, 3, 7), (2, 3)]
    parameters = [Parameter(torch.zeros(shape)) for shape in (*shapes, (9,))]
    optimizer = SPAM(parameters, lr=1e-3, density=0.25, reset_interval=3)
    for step in range(7):
        before = [p.detach().clone() for p in parameters]
        train(optimizer, parameters, range(step, step + 1))
        for number, (p, old) in enumerate(zip(parameters, before, strict=True)):
            last_reset = max(0, (step + 1) // 3 * 3 - 1)  # steps before it
            wanted = is_drawn(tuple(p.shape), 4, last_reset, number) if p.dim() > 1 else torch.ones(9).bool()
            assert torch.equal(p != old, wanted), f"step {step}, {tuple(p.shape)}: {p != old} moved, not {wanted}"
            slots = (*p.shape[:-1], -(-p.shape[-1] // 4)) if p.dim() > 1 else p.shape
            for name in NAMES:
                found = optimizer.state[p][name].shape
                assert found == torch.Size(slots), f"{name} of {tuple(p.shape)} has the shape {found}, wanted {slots}"
    masks = [is_drawn((6, 8), 4, last_reset, number) for last_reset in (0, 2, 5) for number in range(2)]
    assert len({mask.numpy().tobytes() for mask in masks}) == 6, "parameters or resets share a choice"


@pytest.mark.parametrize(("columns", "every"), [(64, 4), (64, 2), (100, 10), (62, 4), (65, 3)])
def test_choice_is_uniform(columns: int, every: int) -> None:
    """Chi-square over positions among neighbors, with those at a ragged end by themselves."""
    rows = torch.arange(columns).expand(500, columns).contiguous()
    format, whole = SparseMoments(every=every), Parameter(torch.zeros(500, columns))
    state = format.new_state(whole, torch.float32)
    chosen = torch.cat([format.select(rows, Piece(state, draw(whole.shape, last_reset=r))) for r in range(4)])
    assert torch.equal(chosen // every, torch.arange(-(-columns // every)).expand_as(chosen)), "not one of neighbors"
    whole_groups = columns // every
    for inside, width in ((chosen[:, :whole_groups], every), (chosen[:, whole_groups:], columns % every)):
        if width < 2:
            continue
        counts = torch.bincount((inside % every).flatten(), minlength=width).double()
        mean = counts.sum() / width
        statistic = ((counts - mean) ** 2 / mean).sum().item()
        # The normal approximation of Wilson and Hilferty: 4 sigma is one of 30 000.
        z = ((statistic / (width - 1)) ** (1 / 3) - 1 + 2 / 9 / (width - 1)) / math.sqrt(2 / 9 / (width - 1))
        assert len(counts) == width and z < 4, f"among {width} neighbors, positions were drawn {counts.tolist()} times"


def test_sparse_moments_and_masters_are_refused_together() -> None:
    """The scale of masters is the whole tensor's, and the masters of what does not move would keep an old one."""
    group = {"params": [Parameter(torch.ones(2, 8, dtype=torch.bfloat16))], "density": 0.25}
    with pytest.raises(ValueError, match="density=0.25.*master_weights"):
        LowBitAdamW([group], moments="fp32", master_weights="fp16")
