"""Which steps and elements of gradients are spoilt, also sharded."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import seed_everything
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_lowbit import StableSPAM
from lightning_lowbit.cli.lab.compare.study import read_study
from lightning_lowbit.recipes.spikes import GradientSpikes
from tests.recipes.spikes.runs import SIZES, SLOPE, Slope, fit, gradients_after, sgd, spiked
from tests.tables import each


def equal(first, second):
    return all(torch.equal(*pair) for pair in zip(first, second, strict=True))


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


@each("share", [0.01, 0.5])
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


def test_the_same_elements_in_whatever_order_an_optimizer_has_them_and_others_in_the_next_step():
    spikes = GradientSpikes(1, share=0.5, seed=0)
    assert equal(gradients_after(spikes), gradients_after(spikes, order=-1))
    assert not equal(gradients_after(spikes), gradients_after(spikes, step=1))


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


SPREADS = [(Replicate(), Shard(0)), (Replicate(), Shard(1)), (Shard(0), Shard(1)), (Shard(0), Shard(0))]


@each("placements", [*SPREADS, (Partial(), Shard(0))])
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
