"""``nn.MultiheadAttention``: torch's results without casts, those of layers with them, and names that stay."""

import copy
from itertools import product

import pytest
import torch
from torch import nn

from lightning_lowbit import LinearCasts, convert
from lightning_lowbit.nn import AmaxHistories, LayerKeys, QuantizedLayer, set_phase
from lightning_lowbit.nn.layers.layer import quantized_layers
from lightning_lowbit.nn.layers.multihead import QuantizedMultihead
from lightning_lowbit.patterns import clean_name
from tests.nn.layers import identical, pass_through
from tests.pairwise import cover
from tests.tables import each

WIDTH, HEADS, BATCH, QUERIES, KEYS = 48, 3, 2, 5, 7

OPTIONS = {
    "inputs": ("one", "key is value", "three", "of other widths"),
    "batch_first": (False, True),
    "unbatched": (False, True),
    "bias": (False, True),
    "add_bias_kv": (False, True),
    "add_zero_attn": (False, True),
    "attn_mask": (None, "bool 2", "float 2", "bool 3", "float 3", "causal"),
    "key_padding_mask": (None, "bool", "float"),
    "need_weights": (False, True),
    "average_attn_weights": (False, True),
    "training": (False, True),
}


def cases():
    return [dict(zip(OPTIONS, values, strict=True)) for values in product(*OPTIONS.values())]


def some_cases(count, seed):
    every = cases()
    return [every[int(i)] for i in torch.randperm(len(every), generator=torch.Generator().manual_seed(seed))[:count]]


def in_pairs():
    """A sample of all cases in which any two options meet."""
    sample = some_cases(600, 0)
    numbers = [{name: OPTIONS[name].index(value) for name, value in case.items()} for case in sample]
    chosen = [sample[i] for i in cover(numbers)]
    pairs = {(a, case[a], b, case[b]) for case in chosen for a in case for b in case if a < b}
    wanted = {(a, x, b, y) for a in OPTIONS for b in OPTIONS if a < b for x in OPTIONS[a] for y in OPTIONS[b]}
    assert pairs == wanted
    return chosen


def attention(case):
    torch.manual_seed(1)
    widths = {"kdim": 32, "vdim": 16} if case["inputs"] == "of other widths" else {}
    options = {name: case[name] for name in ("bias", "add_bias_kv", "add_zero_attn", "batch_first")}
    module = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.25, **options, **widths)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.2)
    return module.train(case["training"])


def arguments(case):
    """The tensors that differ from each other, and keyword arguments."""
    generator = torch.Generator().manual_seed(2)
    keys = QUERIES if case["inputs"] == "one" else KEYS

    def tokens(count, width):
        batched = (BATCH, count, width) if case["batch_first"] else (count, BATCH, width)
        return torch.randn((count, width) if case["unbatched"] else batched, generator=generator)

    others = {"one": (), "key is value": (WIDTH,), "three": (WIDTH, WIDTH), "of other widths": (32, 16)}
    inputs = [tokens(QUERIES, WIDTH), *(tokens(keys, width) for width in others[case["inputs"]])]
    given = {name: case[name] for name in ("need_weights", "average_attn_weights")}
    kind, _, dims = (case["attn_mask"] or "").partition(" ")
    rows = 1 if case["unbatched"] else BATCH
    if kind == "causal":
        given |= {"is_causal": True, "attn_mask": torch.ones(QUERIES, keys, dtype=torch.bool).triu(1)}
    elif kind:
        shape = (QUERIES, keys) if dims == "2" else (rows * HEADS, QUERIES, keys)
        drawn = torch.randn(shape, generator=generator)
        given["attn_mask"] = drawn if kind == "float" else (drawn > 1) & (torch.arange(keys) > 0)
    if case["key_padding_mask"]:
        shape = (keys,) if case["unbatched"] else (BATCH, keys)
        drawn = torch.randn(shape, generator=generator)
        is_float = case["key_padding_mask"] == "float"
        given["key_padding_mask"] = drawn if is_float else (drawn > 1) & (torch.arange(keys) > 0)
    return inputs, given


def run(module, inputs, given):
    leaves = [x.clone().requires_grad_() for x in inputs]
    torch.manual_seed(3)
    y, weights = module(leaves[0], leaves[min(1, len(leaves) - 1)], leaves[-1], **given)
    module.zero_grad()
    loss = (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum()
    (loss if weights is None else loss + weights.square().sum()).backward()
    grads = {name: p.grad for name, p in module.named_parameters()}
    return {"y": y, "weights": weights, **{f"x{i}": leaf.grad for i, leaf in enumerate(leaves)}, **grads}


def compare_with_torch(options):
    for case in options:
        original = attention(case)
        converted = convert(copy.deepcopy(original), "bf16")
        wanted, got = (run(module, *arguments(case)) for module in (original, converted))
        assert got.keys() == wanted.keys()
        for name, value in wanted.items():
            if value is None or got[name] is None:
                assert value is got[name], (case, name)
            elif name == "in_proj_bias":  # torch adds it apart where an input is transposed, and sums in another order
                torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-6)
            else:
                assert torch.equal(got[name], value), (case, name)


@pytest.fixture
def never_plain(monkeypatch):
    """Without casts, too, the module's own forward pass runs, and not that of torch."""
    monkeypatch.setattr(QuantizedMultihead, "is_plain", False)


@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask and attn_mask")
@pytest.mark.usefixtures("never_plain")
def test_its_own_forward_pass_without_casts_equals_that_of_torch():
    compare_with_torch(in_pairs())


@each("inputs, shape", product(OPTIONS["inputs"], ((0, 5), (2, 0), (0, 0))))
def test_batches_without_sequences_or_tokens(inputs, shape):
    case = {name: values[0] for name, values in OPTIONS.items()} | {"inputs": inputs, "batch_first": True}
    widths = {"one": [WIDTH], "key is value": [WIDTH] * 2, "three": [WIDTH] * 3, "of other widths": [WIDTH, 32, 16]}
    tensors = [torch.randn(*shape, width) for width in widths[inputs]]
    for weights in (False, True):
        original = attention(case)
        modules = original, convert(copy.deepcopy(original), "mxfp8")
        expected, results = (run(module, tensors, {"need_weights": weights}) for module in modules)
        for name, value in expected.items():
            assert (value is None and results[name] is None) or results[name].shape == value.shape, name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask and attn_mask")
@pytest.mark.usefixtures("never_plain")
def test_many_options_together():
    compare_with_torch(some_cases(1500, 1))


def by_hand(module, casts, sizes):
    """Converted linear layers for the parts of ``in_proj``, and ``out_proj``."""
    parts = []
    bounds = [WIDTH * size for size in sizes]
    for weight, bias in zip(module.in_proj_weight.split(bounds), module.in_proj_bias.split(bounds), strict=True):
        layer = nn.Linear(WIDTH, len(weight))
        layer.weight, layer.bias = nn.Parameter(weight.detach().clone()), nn.Parameter(bias.detach().clone())
        parts.append(convert(layer, casts))
    out = nn.Linear(WIDTH, WIDTH)
    out.load_state_dict(module.out_proj.state_dict())
    return parts, convert(out, casts)


@each("inputs", ["one", "key is value", "three"])
def test_with_casts_its_projections_are_those_of_layers(inputs):
    """One GEMM per tensor that differs from the others, each with scales of its own."""
    casts = LinearCasts.preset("nvfp4").with_rounding(dict.fromkeys(("dgrad_g", "wgrad_g", "wgrad_x"), "nearest"))
    case = {**cases()[0], "inputs": inputs, "bias": True, "need_weights": False, "training": True}
    original = attention(case)
    original.dropout = 0.0
    given, _ = arguments(case)
    sizes = {"one": (3,), "key is value": (1, 2), "three": (1, 1, 1)}[inputs]
    parts, out = by_hand(original, casts, sizes)
    projected = [layer(x) for layer, x in zip(parts, given, strict=True)]
    q, k, v = (chunk for y, size in zip(projected, sizes, strict=True) for chunk in y.chunk(size, -1))

    def heads(x):
        return x.unflatten(-1, (HEADS, -1)).permute(1, 2, 0, 3)

    o = nn.functional.scaled_dot_product_attention(heads(q), heads(k), heads(v))
    wanted = out(o.permute(2, 0, 1, 3).flatten(2))
    converted = convert(copy.deepcopy(original), casts)
    y, _ = converted(given[0], given[min(1, len(given) - 1)], given[-1], need_weights=False)
    assert torch.equal(y, wanted)
    g = torch.randn_like(y)
    wanted.backward(g)
    y.backward(g)
    assert torch.equal(converted.in_proj_weight.grad, torch.cat([layer.weight.grad for layer in parts]))
    assert torch.equal(converted.out_proj.weight.grad, out.weight.grad)


def names(model):
    return {clean_name(name) for name in quantized_layers(model)}


def test_products_have_names():
    model = convert(nn.TransformerDecoderLayer(WIDTH, HEADS, 64), "nvfp4")
    of_each = {f"{name}.{part}" for name in ("self_attn", "multihead_attn") for part in ("in_proj", "out_proj")}
    assert names(model) == of_each | {"linear1", "linear2"}
    separate = convert(nn.MultiheadAttention(WIDTH, HEADS, kdim=32), "nvfp4")
    assert names(separate) == {"q_proj", "k_proj", "v_proj", "out_proj"}


@each(("kept", "skip"), [("in_proj", "out_proj"), ("out_proj", "in_proj")])
def test_either_of_its_layers_alone_is_quantized(kept, skip):
    x = torch.randn(QUERIES, BATCH, WIDTH)
    original = nn.MultiheadAttention(WIDTH, HEADS)
    others = [convert(copy.deepcopy(original), casts) for casts in ("bf16", "mxfp8")]
    one = convert(copy.deepcopy(original), "mxfp8", skip=[skip])
    assert {n for n, layer in quantized_layers(one).items() if layer.casts != LinearCasts()} == {
        "_products.in_proj" if kept == "in_proj" else "out_proj"
    }
    assert not any(torch.equal(one(x, x, x)[0], other(x, x, x)[0]) for other in others)
    convert(one, "mxfp8", skip=[skip], overrides={kept: "bf16"})
    assert torch.equal(one(x, x, x)[0], original(x, x, x)[0])


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("skip", [(), ("out_proj", "linear1", "linear2"), ("in_proj", "linear1", "linear2")])
def test_compiled(autocast, skip):
    x = torch.randn(BATCH, QUERIES, WIDTH)
    model = convert(nn.TransformerEncoderLayer(WIDTH, HEADS, 64, dropout=0.0, batch_first=True), "nvfp4", skip=skip)
    keys = LayerKeys(model)

    def results(call):
        keys.fill_(5)
        return pass_through(model, x, forward=call, autocast=autocast)

    identical(results(torch.compile(model, backend="eager", fullgraph=True)), results(model))


def test_phases_and_histories_of_delayed_scaling():
    x = torch.randn(QUERIES, BATCH, WIDTH)
    original = nn.MultiheadAttention(WIDTH, HEADS)
    model = convert(copy.deepcopy(original), "fp8-delayed")
    LayerKeys(model).fill_(0)
    histories = AmaxHistories(model)
    model(x, x, x)[0].sum().backward()
    histories.advance_()
    recorded = histories.state_dict()["amax_history"]
    assert recorded["in_proj/fprop_x"][-1] == x.abs().max()
    assert recorded["in_proj/fprop_w"][-1] == original.in_proj_weight.abs().max()
    set_phase(model, "bf16")
    assert torch.equal(model(x, x, x)[0], original(x, x, x)[0])


def test_refusals():
    model = convert(nn.MultiheadAttention(WIDTH, HEADS), "nvfp4")
    x, few = torch.randn(QUERIES, BATCH, WIDTH), torch.randn(QUERIES - 1, BATCH, WIDTH)
    calls = {
        "as many tokens": ((x, x, few), {}),
        "no attn_mask": ((x, x, x), {"is_causal": True}),
        "has shape": ((x, x, x), {"attn_mask": torch.zeros(2, 2)}),
        "features": ((x[..., :16], x, x), {}),
    }
    for message, (inputs, given) in calls.items():
        with pytest.raises(ValueError, match=message):
            model(*inputs, **given)


def test_a_subclass_with_a_forward_pass_of_its_own_stays():
    class Inherits(nn.MultiheadAttention):
        pass

    class Overrides(nn.MultiheadAttention):
        def forward(self, x):
            return super().forward(x, x, x)

    assert names(convert(Inherits(WIDTH, HEADS), "nvfp4")) == {"in_proj", "out_proj"}
    model = convert(nn.Sequential(Overrides(WIDTH, HEADS), nn.Linear(WIDTH, 4)), "nvfp4")
    assert not any(isinstance(module, QuantizedLayer) for module in model[0].modules())
