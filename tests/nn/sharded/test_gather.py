"""Weights that are quantized before FSDP2 gathers them: fewer bytes, and the same results to the bit."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_lowbit import Cast, LinearCasts, LowBitPrecision, Scale, convert
from lightning_lowbit.nn import LayerKeys
from lightning_lowbit.nn.sharded.gather import WeightGathers, casts_obstacle
from tests.launch import launch
from tests.nn.sharded.ranks_gather import CASTS, RANKS, RUNS, STEPS
from tests.pairwise import selected
from tests.precision.regression_model import Regression, trainer
from tests.tables import each


@pytest.fixture(scope="module")
def ranks(request, tmp_path_factory):
    names = [*selected(request, "name"), *selected(request, "kind")]
    return launch("tests.nn.sharded.ranks_gather", RANKS, tmp_path_factory.mktemp("ranks"), *names)


@pytest.mark.fast("fp8-delayed", "rows", "phases")
@pytest.mark.parametrize("name", RUNS)
def test_losses_and_weights_are_the_same(ranks, name):
    for results in ranks:
        found = results["runs"][name]
        assert found["finite"]
        assert found["same"]
        assert found["bytes"][1] < found["bytes"][0]


@pytest.mark.fast("fp8-delayed", "rows")
@pytest.mark.parametrize("name", CASTS)
def test_one_collective_measures_all_weights(ranks, name):
    cast = LinearCasts.of(CASTS[name]).fprop_w
    for results in ranks:
        before, after = results["runs"][name]["calls"]
        assert after - before == (STEPS if cast.scale.needs_amax or cast.scale.block == "tensor" else 0)


@pytest.mark.fast("nvfp4, bfloat16-4.5-16", "ternary, float32-2-32")
@pytest.mark.parametrize(
    "name, bits, of",
    [("nvfp4, float32", 4.5, 32), ("nvfp4, bfloat16", 4.5, 16), ("fp8, float32", 8, 32), ("ternary, float32", 2, 32)],
)
def test_codes_and_scales_are_what_travels(ranks, name, bits, of):
    for results in ranks:
        assert results["shares"][name] == pytest.approx(bits / of, rel=0.001)


@pytest.mark.fast("distributed")
@pytest.mark.parametrize("kind", ["whole", "distributed"])
def test_runs_go_on_from_checkpoints_either_way(ranks, kind):
    assert all(results["resumed"][kind] == [True, True] for results in ranks)


@pytest.mark.parametrize("what", ["again", "by replicas"])
def test_what_else_is_the_same(ranks, what):
    assert all(results[what] for results in ranks)


@pytest.mark.parametrize(
    "case, message",
    [
        ("casts", "layers.0, .*: dgrad_w is not .* that the forward pass used. Take casts whose.*overrides"),
        ("tiles", "layers.0: shards of 12 rows end within a tile of 16; layers.1: shards of 4"),
        ("dtype", "FSDP2 gives the weight in torch.bfloat16, which does not hold"),
        ("strategy", "FSDP2 shards no weight of a converted layer. It needs ModelParallelStrategy"),
    ],
)
def test_what_cannot_be_honored_is_refused(ranks, case, message):
    for results in ranks:
        assert re.search(message, results["refused"][case]), results["refused"][case]


def test_one_process_without_shards_is_refused():
    model = Regression()
    with pytest.raises(ValueError, match="FSDP2 shards no weight"):
        trainer(LowBitPrecision("fp8-current", quantize_before_gather=True)).fit(model)
    assert type(model.first) is nn.Linear  # nothing has been changed


# --- what casts allow -------------------------------------------------------------------------------------------------

NEAREST = Cast("e2m1", Scale("e4m3", 16, two_level=True))


@each(
    "casts, why",
    [
        ("bf16", "fprop_w is not quantized"),
        ("nvfp4", "dgrad_w is not"),
        ("fp8-row", "dgrad_w is not"),
        ({"fprop_w": NEAREST}, "dgrad_w is not"),
        ({"fprop_w": Cast("int4", Scale("fp32", 16, statistic="minmax")), "dgrad_w": "fprop"}, "zero points"),
        ({"preset": "fp8-current", "hadamard": {"fprop": 16}}, "dgrad_w is not"),
        ({"preset": "nvfp4-nvidia", "subtract_mean": ["fprop"]}, "takes the weight itself"),
        ({"preset": "nvfp4-nvidia", "surrogate": {"fprop_w": "trust"}}, "surrogate"),
        ({"preset": "fp8-current", "smooth": "channel"}, "smooth"),
        ({"preset": "nvfp4-row", "dgrad_w": "fprop"}, "a second level per row"),
        ({"preset": "nvfp4-row", "requantize": ["dgrad_w"]}, "a second level per row"),
        ("quartet2", None),
        *((name, None) for name in ("nvfp4-nvidia", "fp8-current", "fp8-delayed", "ternary", "int4", "e1m2")),
        ({"preset": "fp8-current", "smooth": "token"}, None),
        ({"preset": "nvfp4-nvidia", "subtract_mean": ["dgrad"]}, None),
    ],
)
def test_what_stands_in_the_way(casts, why):
    found = casts_obstacle(LinearCasts.of(casts))
    assert (found is None) if why is None else (found is not None and why in found)


@pytest.mark.parametrize("phase", ["qaf", "hp-forward", "bf16"])
def test_phases_in_which_a_gemm_takes_the_weight_itself(phase):
    assert casts_obstacle(LinearCasts.preset("nvfp4-nvidia").phase(phase)) is not None


# --- without a Trainer, on one process --------------------------------------------------------------------------------


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make(casts, **kwargs):
    torch.manual_seed(0)
    layers = (nn.Linear(24, 40), nn.Linear(40, 16, bias=False))
    model = nn.Sequential(*(nn.Sequential(layer, nn.SiLU()) for layer in layers))
    for part in (*model, model):
        fully_shard(part, mesh=init_device_mesh("cpu", (1,)))
    convert(model, casts, **kwargs)
    LayerKeys(model, 1).fill_(3)
    return model


def passes(model, autocast=True):
    x = torch.randn(8, 24, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = model(x)
    y.float().square().sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return [y.detach(), *(gradient.full_tensor() for gradient in gradients)]


@pytest.mark.pairwise(1)
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", [name for name in CASTS if name not in ("fp8-delayed", "nvfp4-nvidia")])
def test_one_process_has_nothing_to_send(name, exact):
    model = make(CASTS[name], exact=exact)
    gathers = WeightGathers(model, torch.bfloat16)
    gathers.prepare()
    assert all(map(torch.equal, passes(model), passes(make(CASTS[name], exact=exact))))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("change", ["nan", "inf"])
def test_what_is_not_finite_shows(change):
    outcomes = []
    for before in (False, True):
        model = make("fp8-current")
        model[0][0].weight.to_local().detach()[3, 5] = float(change)
        if before:
            WeightGathers(model, torch.bfloat16).prepare()
        outcomes.append(passes(model))
    assert all(torch.equal(a.isnan(), b.isnan()) for a, b in zip(*outcomes, strict=True))
    assert outcomes[1][0].isnan().all()


@pytest.mark.usefixtures("alone")
def test_calls_of_one_layer_share_the_weight_that_was_gathered():
    """Rounded stochastically: a weight has the same bits in all calls, and x and g in none."""
    outcomes = []
    for gathered in (False, True):
        torch.manual_seed(0)
        layer = fully_shard(nn.Linear(24, 24), mesh=init_device_mesh("cpu", (1,)))
        model = convert(nn.Sequential(layer, nn.SiLU(), layer, nn.SiLU(), layer), CASTS["stochastic"])
        LayerKeys(model, 1).fill_(3)
        if gathered:
            WeightGathers(model, torch.bfloat16).prepare()
        outcomes.append(passes(model))
    assert all(map(torch.equal, *outcomes))


@pytest.mark.usefixtures("alone")
def test_a_pass_in_another_dtype_is_refused():
    model = make("fp8-current")
    WeightGathers(model, torch.bfloat16).prepare()
    with pytest.raises(ValueError, match="quantized in torch.bfloat16.*in torch.float32"):
        passes(model, autocast=False)


@pytest.mark.usefixtures("alone")
# Dynamo of torch 2.13 asks for it, of any weight that FSDP2 gathers.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning")
def test_compiled_layers_take_what_was_gathered():
    model, twin = make(CASTS["stochastic"]), make(CASTS["stochastic"])
    WeightGathers(model, torch.bfloat16).prepare()
    for layer in model:
        layer.compile(backend="aot_eager")
    for _ in range(2):
        assert all(map(torch.equal, passes(model), passes(twin)))


@pytest.mark.usefixtures("alone")
def test_delayed_scaling_still_needs_histories():
    model = make("fp8-delayed")
    WeightGathers(model, torch.bfloat16).prepare()
    with pytest.raises(ValueError, match="Delayed scaling needs histories"):
        passes(model)


@pytest.mark.usefixtures("alone")
def test_a_model_is_let_go():
    model = make("fp8-current")
    expected = passes(model)
    for _ in range(2):
        gathers = WeightGathers(model, torch.bfloat16)
        gathers.prepare()
        passes(model)
        gathers.release()
        assert all(map(torch.equal, passes(model), expected))


@pytest.mark.usefixtures("alone")
@each("how", ["in place", "by data", "by the optimizer", "loaded", "assigned"])
def test_changed_weights_are_measured_anew(how):
    """Also within one step, that is without `prepare`, where a version tells."""
    model, twin = make("fp8-current"), make("fp8-current")
    gathers = WeightGathers(model, torch.bfloat16)
    gathers.prepare()
    CHANGES[how](model)
    CHANGES[how](twin)
    if how == "by data":
        gathers.prepare()
    assert all(map(torch.equal, passes(model), passes(twin)))


def _optimize(model):
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.ones(2, 24)).sum()
    loss.backward()
    torch.optim.Adam(model.parameters(), 0.1).step()
    model.zero_grad()


def _in_place(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)


def _by_data(model):
    for parameter in model.parameters():
        parameter.data.to_local().data.mul_(3)


def _load(model, assign=False):
    model.load_state_dict({name: 3 * value for name, value in model.state_dict().items()}, assign=assign)


CHANGES = {
    "in place": _in_place,
    "by data": _by_data,
    "by the optimizer": _optimize,
    "loaded": _load,
    "assigned": lambda model: _load(model, assign=True),
}
