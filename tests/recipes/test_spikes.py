"""``GradientSpikes``: in which steps, on which elements, and what an optimizer, a clip and a logger see of them; and
``CorruptBatches``: what of which batch."""

import math
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader

from lightning_lowbit import StableSPAM
from lightning_lowbit.cli.compare.study import read_study
from lightning_lowbit.recipes.spikes import CorruptBatches, GradientSpikes

SIZES = (3, 4), (5,), (3, 4)
SLOPE = 0.125  # of the loss in each direction, a power of two, so that products with 1000 are exact


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.0)


class Slope(LightningModule):
    """A loss whose gradient is the same everywhere; notes all gradients at each step, before and after clipping."""

    def __init__(self, optimizers=(lambda module: sgd(module.parameters()),), sizes=SIZES):
        super().__init__()
        self.weights = torch.nn.ParameterList([torch.zeros(size) for size in sizes])
        self.make_optimizers, self.automatic_optimization = optimizers, len(optimizers) == 1
        self.seen, self.clipped = {}, {}

    def training_step(self, batch, batch_idx):
        loss = SLOPE * sum(weight.sum() for weight in self.weights)
        if self.automatic_optimization:
            return loss
        for optimizer in self.optimizers():
            self.zero_grad()
            self.manual_backward(loss, retain_graph=True)
            optimizer.step()
        return None

    def on_before_optimizer_step(self, optimizer):
        self.seen[self.trainer.global_step] = [weight.grad.clone() for weight in self.weights]

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.clipped[self.trainer.global_step - 1] = [weight.grad.clone() for weight in self.weights]

    def configure_optimizers(self):
        return [make(self) for make in self.make_optimizers]


def fit(spikes, module=None, steps=40, ckpt_path=None, **options):
    module = Slope() if module is None else module
    defaults = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(
        accelerator="cpu", max_steps=steps, callbacks=[spikes], **{"logger": False, **defaults, **options}
    )
    trainer.fit(module, DataLoader(range(1000)), ckpt_path=ckpt_path)
    return module


def gradients_after(spikes, step=0, sizes=SIZES, order=1):
    """What one step makes of gradients of 1, for an optimizer that has the parameters in some order."""
    module = Slope(sizes=sizes)
    module.log = lambda name, value: None
    for weight in module.weights:
        weight.grad = torch.ones_like(weight)
    optimizer = sgd(list(module.weights)[::order])
    spikes.on_before_optimizer_step(SimpleNamespace(global_step=step), module, optimizer)
    return [weight.grad for weight in module.weights]


def spiked(spikes, steps):
    """Whether each step has a spike."""
    return tuple(gradients_after(spikes, step, sizes=[(1,)])[0].item() != 1 for step in range(steps))


def equal(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(first, second, strict=True))


# --- which steps and elements -----------------------------------------------------------------------------------------


def test_a_spike_is_the_whole_gradient_of_some_steps():
    module = fit(GradientSpikes(0.2, seed=0), steps=60)
    kinds = {frozenset(torch.cat([gradient.flatten() for gradient in g]).tolist()) for g in module.seen.values()}
    assert kinds == {frozenset([SLOPE]), frozenset([1000 * SLOPE])}, "a gradient of which only some elements are spiked"


@pytest.mark.fast("0.3-2000")
@pytest.mark.parametrize(("probability", "steps"), [(0.01, 10000), (0.3, 2000)])
def test_the_stated_share_of_steps(probability, steps):
    found = sum(spiked(GradientSpikes(probability, seed=0), steps)) / steps
    deviation = (probability * (1 - probability) / steps) ** 0.5
    assert abs(found - probability) < 4 * deviation, f"{found:.4f} of the steps, {probability} were asked for"


@pytest.mark.parametrize("share", [0.01, 0.5])
def test_the_stated_share_of_elements(share):
    first, second = gradients_after(GradientSpikes(1, -3.5, share, seed=0), sizes=[(200, 500), (200, 500)])
    assert set(first.unique().tolist()) == {-3.5, 1.0}
    found, deviation = (first != 1).float().mean().item(), (share * (1 - share) / first.numel()) ** 0.5
    assert abs(found - share) < 4 * deviation, f"{found:.4f} of the elements, {share} were asked for"
    both = ((first != 1) & (second != 1)).float().mean().item()
    assert both < 1.2 * share**2 + 1e-4, "the same elements in each gradient"


def test_none_of_the_elements_and_none_of_the_steps():
    assert not any(spiked(GradientSpikes(0, seed=0), 100))
    assert equal(gradients_after(GradientSpikes(1, share=0)), [torch.ones(size) for size in SIZES])
    assert all(spiked(GradientSpikes(1, seed=0), 100))


def test_the_elements_differ_from_step_to_step():
    spikes = GradientSpikes(1, share=0.5, seed=0)
    assert not equal(gradients_after(spikes, 0), gradients_after(spikes, 1))


def test_steps_are_those_of_the_seed_alone():
    # Neighbors, both sides of 2^31, and the largest one that `seed_everything` takes.
    seeds = (0, 1, 2, 3, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 1)
    draws = {seed: spiked(GradientSpikes(0.5, seed=seed), 64) for seed in seeds}
    assert len(set(draws.values())) == len(seeds), "two seeds have the same spikes"
    for seed in seeds:
        for other in seeds:
            assert draws[seed][1:] != draws[other][:-1], f"the spikes of seed {other} are those of {seed}, a step later"
            assert seed == other or 12 < sum(a != b for a, b in zip(draws[seed], draws[other], strict=True)) < 52
    assert spiked(GradientSpikes(0.5), 64) == draws[0]
    seed_everything(3, verbose=False)
    assert spiked(GradientSpikes(0.5), 64) == draws[3], "seed_everything has no say"
    assert spiked(GradientSpikes(0.5, seed=1), 64) == draws[1]


def test_the_same_elements_in_whatever_order_an_optimizer_has_them():
    spikes = GradientSpikes(1, share=0.5, seed=0)
    assert equal(gradients_after(spikes), gradients_after(spikes, order=-1))


def test_the_same_for_every_optimizer_and_after_a_resume():
    spikes = GradientSpikes(0.3, share=0.5, seed=4)
    torch.rand(7)  # of the global generator nothing is taken
    whole = fit(spikes, steps=12).seen
    assert 0 < sum(not equal(g, whole[0]) for g in whole.values()) < 12
    other = fit(spikes, Slope((lambda module: StableSPAM(module.parameters()),)), steps=12).seen
    assert all(equal(whole[step], other[step]) for step in whole), "another optimizer, other spikes"
    short = {"limit_train_batches": 1}  # an epoch is a step: Lightning resumes with the next epoch
    fit(spikes, steps=5, **short).trainer.save_checkpoint("half.ckpt")
    resumed = fit(spikes, steps=12, ckpt_path="half.ckpt", **short).seen
    assert sorted(resumed) == list(range(5, 12))
    assert all(equal(whole[step], resumed[step]) for step in resumed), "other spikes after a resume"


@pytest.mark.slow
def test_each_seed_of_the_study_has_a_spike():
    study = read_study("spikes")
    (steps,) = {row.config["trainer"]["max_steps"] for row in study.rows}
    for seed in {seed for row in study.rows for seed in row.seeds}:
        assert any(spiked(GradientSpikes(seed=seed), steps)), f"seed {seed} draws no spike"
    assert not any(spiked(GradientSpikes(seed=2), steps)), "the study says that it leaves seed 2 out for that"


# --- in training ------------------------------------------------------------------------------------------------------


def test_it_is_logged():
    logger = TensorBoardLogger("logs", name=None)
    module = fit(GradientSpikes(0.3, seed=0), steps=30, logger=logger, log_every_n_steps=1)
    events = EventAccumulator(logger.log_dir).Reload().Scalars("gradient_spike")
    assert {event.step: event.value for event in events} == {
        step: float(gradients[0].max() > 1) for step, gradients in module.seen.items()
    }
    assert {event.value for event in events} == {0.0, 1.0}


def test_clipping_sees_the_spike():
    module = fit(GradientSpikes(0.3, seed=0), steps=20, gradient_clip_val=1.0)
    quiet = SLOPE * sum(weight.numel() for weight in module.weights) ** 0.5
    assert quiet < 1, "without a spike nothing is to be clipped"
    norms = [torch.nn.utils.get_total_norm(gradients).item() for gradients in module.clipped.values()]
    is_spiked = [gradients[0].max() > 1 for gradients in module.seen.values()]
    assert norms == pytest.approx([1.0 if spike else quiet for spike in is_spiked], rel=1e-5)
    assert 0 < sum(is_spiked) < 20


def test_an_accumulated_gradient_is_multiplied_once():
    module = fit(GradientSpikes(1, seed=0), steps=3, accumulate_grad_batches=4)
    assert [gradients[0][0, 0].item() for gradients in module.seen.values()] == [1000 * SLOPE] * 3


def test_each_of_several_optimizers_has_its_steps():
    """Manual optimization: the one has the first two parameters, the other the last."""
    optimizers = (
        lambda module: sgd([module.weights[0], module.weights[1]]),
        lambda module: sgd([module.weights[2]]),
    )
    spikes = GradientSpikes(0.5, seed=0)
    module = fit(spikes, Slope(optimizers), steps=40)
    expected = spiked(spikes, 40)
    assert sorted(module.seen) == list(range(40))
    assert {expected[step : step + 2] for step in range(0, 40, 2)} == {(a, b) for a in (0, 1) for b in (0, 1)}
    for step, gradients in module.seen.items():
        factors = [(gradient / SLOPE).unique().item() for gradient in gradients]
        own = 1000.0 if expected[step] else 1.0
        assert factors == ([own, own, 1.0] if step % 2 == 0 else [1.0, 1.0, own]), f"step {step}"


def test_bf16_gradients_stay_bf16():
    module = fit(GradientSpikes(1, seed=0), steps=1, precision="bf16-true")
    expected = torch.tensor(1000 * SLOPE).bfloat16()
    for gradient in module.seen[0]:
        assert gradient.dtype == torch.bfloat16 and (gradient == expected).all()


def test_parameters_without_a_gradient_keep_none():
    module = Slope()
    module.log = lambda name, value: None
    module.weights[1].grad = torch.ones(5)
    GradientSpikes(1).on_before_optimizer_step(SimpleNamespace(global_step=0), module, sgd(module.parameters()))
    assert [weight.grad is None for weight in module.weights] == [True, False, True]
    assert module.weights[1].grad.tolist() == [1000.0] * 5


# --- sharded ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def mesh_of():
    """Makes the mesh of four ranks that one of them sees; nothing is sent anywhere."""

    def make(rank):
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
        return init_device_mesh("cpu", (2, 2))

    yield make
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "placements",
    [
        (Replicate(), Shard(0)),
        (Replicate(), Shard(1)),
        (Shard(0), Shard(1)),
        (Shard(0), Shard(0)),
        (Partial(), Shard(0)),
    ],
    ids=str,
)
def test_each_rank_multiplies_its_part(placements, mesh_of):
    """Rows that do not divide by the ranks included: the first has 5, the second 7."""
    sizes = (5, 6), (7, 3)
    spikes = GradientSpikes(1, share=0.5, seed=0)
    whole = gradients_after(spikes, sizes=sizes)
    for rank in range(4):
        mesh = mesh_of(rank)
        module = Slope(sizes=sizes)
        module.log = lambda name, value: None
        spread = [Replicate() if placement.is_partial() else placement for placement in placements]
        for index, weight in enumerate(list(module.weights)):
            shared = torch.nn.Parameter(distribute_tensor(weight.detach(), mesh, spread, src_data_rank=None))
            ones = torch.ones_like(shared.to_local())
            size, stride = weight.shape, weight.stride()
            shared.grad = DTensor.from_local(ones, mesh, placements, run_check=False, shape=size, stride=stride)
            module.weights[index] = shared
        spikes.on_before_optimizer_step(SimpleNamespace(global_step=0), module, sgd(module.parameters()))
        for weight, expected in zip(module.weights, whole, strict=True):
            part = distribute_tensor(expected, mesh, spread, src_data_rank=None).to_local()
            assert weight.grad.placements == placements
            assert torch.equal(weight.grad.to_local(), part), f"rank {rank} multiplied other elements"


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"probability": 1.1}, "probability is a number from 0 to 1; got 1.1"),
        ({"probability": -0.1}, "probability is a number from 0 to 1; got -0.1"),
        ({"probability": "0.1"}, "probability is a number from 0 to 1; got '0.1'"),
        ({"probability": float("nan")}, "probability is a number from 0 to 1; got nan"),
        ({"share": 2}, "share is a number from 0 to 1; got 2"),
        ({"share": True}, "share is a number from 0 to 1; got True"),
        ({"factor": "large"}, "factor is a number, such as 1000; got 'large'"),
        ({"factor": None}, "factor is a number, such as 1000; got None"),
        ({"seed": -1}, r"seed is an integer from 0 to 2\^32 - 1, or None; got -1"),
        ({"seed": 2**32}, r"seed is an integer from 0 to 2\^32 - 1, or None; got 4294967296"),
        ({"seed": 0.5}, r"seed is an integer from 0 to 2\^32 - 1, or None; got 0.5"),
    ],
    ids=str,
)
def test_wrong_arguments(options, line):
    with pytest.raises(ValueError, match=line):
        GradientSpikes(**options)


# --- batches ----------------------------------------------------------------------------------------------------------


class Tokens(LightningModule):
    """What of each batch arrives, and what becomes of it."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 2))
        self.batches, self.losses = [], []

    def training_step(self, batch, batch_idx):
        self.batches.append(batch.clone())
        loss = self.layer(batch.float()).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return sgd(self.parameters())


TOKENS = torch.arange(6 * 24).view(18, 8) % 50


def spoil(tokens=TOKENS, **arguments):
    model = Tokens()
    options = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    run = Trainer(accelerator="cpu", max_steps=6, callbacks=[CorruptBatches(**arguments)], **options)
    run.fit(model, DataLoader(tokens, batch_size=3))
    return model


@pytest.mark.parametrize("kind", ["noise", "shuffle"])
def test_tokens_of_a_corrupt_batch(kind):
    """Change places, or are drawn from all up to the largest."""
    clean, spoilt = spoil(steps=[100]), spoil(steps=[1, 4], kind=kind)
    for step, (before, after) in enumerate(zip(clean.batches, spoilt.batches, strict=True)):
        assert torch.equal(before, after) == (step not in (1, 4)), f"step {step}"
        assert after.dtype == before.dtype and after.min() >= 0 and after.max() <= before.max()
        are_same = torch.equal(before.flatten().sort().values, after.flatten().sort().values)
        assert are_same == (kind == "shuffle" or step not in (1, 4)), f"step {step}"
    again = spoil(steps=[1, 4], kind=kind)
    assert all(map(torch.equal, spoilt.batches, again.batches)), "not the same in another run"


def test_a_loss_that_is_nan_for_one_step():
    model = spoil(steps=[5], kind="nan")
    assert [math.isnan(loss) for loss in model.losses] == [False] * 5 + [True]
    assert not any(module._forward_hooks for module in model.modules()), "the model is not itself again"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": []}, "steps are optimizer steps"),
        ({"steps": [-1]}, "steps are optimizer steps"),
        ({"steps": [0.5]}, "steps are optimizer steps"),
        ({"steps": [1], "kind": "tokens"}, "Unknown kind of corruption 'tokens'"),
    ],
)
def test_bad_corruption(arguments, message):
    with pytest.raises(ValueError, match=message):
        CorruptBatches(**arguments)


def test_batches_without_tokens():
    with pytest.raises(ValueError, match="takes a batch of integers"):
        spoil(tokens=torch.zeros(18, 8), steps=[0])
