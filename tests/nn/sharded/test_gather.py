"""Weights that are quantized before FSDP2 gathers them: fewer bytes, and the same results to the bit."""

import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_lowbit import Cast, LinearCasts, LowBitPrecision, Scale, convert
from lightning_lowbit.nn import LayerKeys
from lightning_lowbit.nn.native.devices import declared
from lightning_lowbit.nn.sharded.gather import WeightGathers, casts_obstacle
from tests.distributed.spreads import full
from tests.launch import launch
from tests.nn.layers import pass_through
from tests.nn.sharded.ranks_gather import CASTS, NVFP4, RANKS, RUNS, STEPS
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


@pytest.mark.fast("wide nvfp4, bf16 policy-4.5-16", "wide ternary-2-32")
@pytest.mark.parametrize(
    "name, bits, of",
    [("wide nvfp4", 4.5, 32), ("wide nvfp4, bf16 policy", 4.5, 16), ("wide fp8", 8, 32), ("wide ternary", 2, 32)],
)
def test_codes_and_scales_are_what_travels(ranks, name, bits, of):
    for results in ranks:
        before, after = results["runs"][name]["bytes"]
        assert after / before == pytest.approx(bits / of, rel=0.001)


@pytest.mark.fast("distributed")
@pytest.mark.parametrize("kind", ["whole", "distributed"])
def test_runs_go_on_from_checkpoints_either_way(ranks, kind):
    assert all(results["resumed"][kind] == [True, True] for results in ranks)


@each("what", ["again", "by replicas"])
def test_what_else_is_the_same(ranks, what):
    assert all(results[what] for results in ranks)


@each(
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


@each(
    "casts, why",
    [
        ("bf16", "fprop_w is not quantized"),
        ("nvfp4", "dgrad_w is not"),
        ("fp8-row", "dgrad_w is not"),
        ({"fprop_w": NVFP4}, "dgrad_w is not"),
        ({"fprop_w": Cast("int4", Scale("fp32", 16, statistic="minmax")), "dgrad_w": "fprop"}, "zero points"),
        ({"preset": "fp8-current", "hadamard": {"fprop": 16}}, "dgrad_w is not"),
        ({"preset": "nvfp4-nvidia", "subtract_mean": ["fprop"]}, "takes the weight itself"),
        ({"preset": "nvfp4-nvidia", "surrogate": {"fprop_w": "trust"}}, "surrogate"),
        ({"preset": "fp8-current", "smooth": "channel"}, "smooth"),
        ({"preset": "nvfp4-row", "dgrad_w": "fprop"}, "a second level per row"),
        ({"preset": "nvfp4-row", "requantize": ["dgrad_w"]}, "a second level per row"),
        *((LinearCasts.preset("nvfp4-nvidia").phase(phase), "") for phase in ("qaf", "hp-forward", "bf16")),
        ("quartet2", None),
        *((name, None) for name in ("nvfp4-nvidia", "fp8-current", "fp8-delayed", "ternary", "int4", "e1m2")),
        ({"preset": "fp8-current", "smooth": "token"}, None),
        ({"preset": "nvfp4-nvidia", "subtract_mean": ["dgrad"]}, None),
    ],
)
def test_what_stands_in_the_way(casts, why):
    reason = casts_obstacle(LinearCasts.of(casts))
    assert reason is None if why is None else why in reason


@pytest.fixture
def make(alone):
    def make(casts, **kwargs):
        torch.manual_seed(0)
        layers = (nn.Linear(24, 40), nn.Linear(40, 16, bias=False))
        model = nn.Sequential(*(nn.Sequential(layer, nn.SiLU()) for layer in layers))
        for part in (*model, model):
            fully_shard(part, mesh=init_device_mesh("cpu", (1,)))
        convert(model, casts, **kwargs)
        LayerKeys(model, 1).fill_(3)
        return model

    return make


def passes(model, autocast=True):
    x = torch.randn(8, 24, generator=torch.Generator().manual_seed(1))
    results = pass_through(model, x, autocast=autocast, needs_x=False).values()
    return [full(tensor) for tensor in results if tensor is not None]


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", [name for name in CASTS if name not in ("fp8-delayed", "nvfp4-nvidia")])
def test_one_process_has_nothing_to_send(make, name, exact):
    model = make(CASTS[name], exact=exact)
    WeightGathers(model, torch.bfloat16).prepare()
    assert all(map(torch.equal, passes(model), passes(make(CASTS[name], exact=exact))))


@pytest.mark.parametrize("dgrad_g, is_sent", [("int8", True), (None, False)])
def test_codes_that_only_one_of_two_gemms_could_take_are_not_sent(make, dgrad_g, is_sent):
    of_tensors = {"element": "int8", "scale": {"format": "fp32", "block": "tensor"}}
    casts = dict.fromkeys(("fprop_x", "fprop_w", "dgrad_w"), of_tensors)
    casts["dgrad_g"] = None if dgrad_g is None else of_tensors
    with declared("cpu", {"int8"}):
        model = make(casts)
        WeightGathers(model, torch.bfloat16).prepare()
        assert all(map(torch.equal, passes(model), passes(make(casts))))
    layers = [part[0] for part in model]
    assert [layer.lowbit.prequantized_weight is not None for layer in layers] == [is_sent] * 2


@each("change", ["nan", "inf"])
def test_what_is_not_finite_shows(make, change):
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


@each(
    "casts, autocast, message",
    [
        ("fp8-current", False, "quantized in torch.bfloat16.*in torch.float32"),
        ("fp8-delayed", True, "delayed scaling needs histories"),
    ],
)
def test_passes_that_cannot_be_computed_are_refused(make, casts, autocast, message):
    model = make(casts)
    WeightGathers(model, torch.bfloat16).prepare()
    with pytest.raises(ValueError, match=message):
        passes(model, autocast=autocast)


# Dynamo of torch 2.13 asks for it, of any weight that FSDP2 gathers.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning")
@pytest.mark.slow
def test_compiled_layers_take_what_was_gathered(make):
    model, twin = make(CASTS["stochastic"]), make(CASTS["stochastic"])
    WeightGathers(model, torch.bfloat16).prepare()
    for layer in model:
        layer.compile(backend="aot_eager")
    for _ in range(2):
        assert all(map(torch.equal, passes(model), passes(twin)))


def test_a_model_is_let_go(make):
    model = make("fp8-current")
    expected = passes(model)
    for _ in range(2):
        gathers = WeightGathers(model, torch.bfloat16)
        gathers.prepare()
        passes(model)
        gathers.release()
        assert all(map(torch.equal, passes(model), expected))


def optimize(model):
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.ones(2, 24)).sum()
    loss.backward()
    torch.optim.Adam(model.parameters(), 0.1).step()
    model.zero_grad()


@torch.no_grad()
def multiply(model):
    for parameter in model.parameters():
        parameter.mul_(3)


def multiply_data(model):
    for parameter in model.parameters():
        parameter.data.to_local().data.mul_(3)


def load(model, assign=False):
    model.load_state_dict({name: 3 * value for name, value in model.state_dict().items()}, assign=assign)


@each("change", [multiply, multiply_data, optimize, load, partial(load, assign=True)])
def test_changed_weights_are_measured_anew(make, change):
    """Also within one step, that is without `prepare`, where a version tells."""
    model, twin = make("fp8-current"), make("fp8-current")
    gathers = WeightGathers(model, torch.bfloat16)
    gathers.prepare()
    change(model), change(twin)
    if change is multiply_data:
        gathers.prepare()
    assert all(map(torch.equal, passes(model), passes(twin)))
