"""What a quantized layer refuses to take or to be part of; jagged tensors, and tensors without values."""

import re

import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from lightning.fabric.utilities.throughput import measure_flops
from torch import nn
from torch.autograd.functional import jacobian
from torch.func import functional_call, grad, jacrev, jvp, stack_module_state, vjp, vmap

from lightning_lowbit import bake, convert
from lightning_lowbit.nn import LayerKeys, set_phase
from tests.nn.passes.situations import LINEAR, SITUATIONS, WIDTH, frozen
from tests.tables import each


def weights(model):
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def per_sample(model, x):
    loss = lambda w, one: functional_call(model, w, (one[None],)).square().sum()  # noqa: E731
    return vmap(grad(loss), (None, 0))(weights(model), x)


def ensemble(model, x):
    parameters, buffers = stack_module_state([model, model])
    return vmap(lambda p, b: functional_call(model, (p, b), (x,)))(parameters, buffers)


TRANSFORMS = {
    "grad": lambda model, x: grad(lambda x: model(x).sum())(x),
    "vjp": lambda model, x: vjp(model, x)[0],
    "jvp": lambda model, x: jvp(model, (x,), (x,)),
    "jacrev": lambda model, x: jacrev(lambda x: model(x).sum())(x),
    "vmap": lambda model, x: vmap(model)(x[None]),
}
LINEAR_ONLY = {
    "vmap without gradients": torch.no_grad()(lambda model, x: vmap(model)(x[None])),
    "per sample": per_sample,
    "ensemble": ensemble,
}

OF_TORCH = pytest.mark.filterwarnings("ignore:.torch.jit")  # deprecated; forward_ad compiles by it, too


@OF_TORCH
@each("kind", SITUATIONS)
def test_transforms_of_torch_func_are_refused_and_work_without_casts(kind):
    of = SITUATIONS[kind]
    model, x = of.model(), of.input(False)
    transforms = TRANSFORMS | (LINEAR_ONLY if kind in LINEAR else {})
    for transform in transforms.values():
        with pytest.raises(ValueError, match=r"^Layer layer\S*: a quantized layer cannot be transformed by torch.func"):
            transform(model, x)
    if kind in LINEAR:
        set_phase(model, "bf16")
        original = of.model(None)
        for transform in transforms.values():
            found, expected = (torch.utils._pytree.tree_leaves(transform(one, x)) for one in (model, original))
            assert all(torch.allclose(a, b) for a, b in zip(found, expected, strict=True))


@each("kind", SITUATIONS)
def test_a_functional_call_and_a_jacobian_by_a_loop_work(kind):
    of = SITUATIONS[kind]
    model, x = of.model(), of.input(False)
    expected = model(x)
    LayerKeys(model).fill_(0)
    assert torch.equal(functional_call(model, weights(model), (x,)), expected)
    assert jacobian(lambda s: model(x * s).flatten()[:2], torch.ones(())).shape == (2,)


@OF_TORCH
@each("kind", SITUATIONS)
def test_forward_mode_is_refused(kind):
    of = SITUATIONS[kind]
    model, x = of.model(), of.input(False)
    with forward_ad.dual_level():
        model(x)  # without a tangent
        duals = [lambda: model(forward_ad.make_dual(x, x))]
        if kind != "attention":
            tangents = {name: forward_ad.make_dual(w, w) for name, w in weights(model).items()}
            duals.append(lambda: functional_call(model, tangents, (x,)))
        for dual in duals:
            with pytest.raises(ValueError, match=r"^Layer layer\S*: a quantized layer has no forward-mode derivative"):
                dual()


@each("kind", SITUATIONS)
def test_batches_of_gradients_are_refused(kind):
    of = SITUATIONS[kind]
    model, x = of.model(), of.input()
    told = r"^Layer layer\S*: the backward pass of a quantized layer takes one gradient at a time"
    with pytest.raises(ValueError, match=told):
        torch.autograd.grad(y := model(x), x, torch.ones(3, *y.shape), is_grads_batched=True)
    with pytest.raises(ValueError, match=told):
        jacobian(lambda s: model(x.detach() * s).flatten()[:2], torch.ones(()), vectorize=True)
    y = model(x)
    with pytest.raises(ValueError, match=told):
        vmap(lambda g: torch.autograd.grad(y, x, g))(torch.ones(3, *y.shape))


@pytest.mark.usefixtures("compiler")
def test_a_compiled_transform_is_refused():
    """It gave zeros."""
    model, x = SITUATIONS["linear"].model("int4"), SITUATIONS["linear"].input(False)
    transformed = torch.compile(lambda x: grad(lambda x: model(x).sum())(x), backend="eager")
    with pytest.raises(Exception, match="a quantized layer cannot be transformed by torch.func"):
        transformed(x)


TRACERS = {
    "traced by torch.jit": lambda model, x: torch.jit.trace(model, x),
    "compiled by torch.jit.script": lambda model, x: torch.jit.script(model),
    "traced by torch.fx": lambda model, x: torch.fx.symbolic_trace(model),
}


@OF_TORCH
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@each("kind", SITUATIONS)
def test_tracers_are_refused_in_one_line_whose_remedy_works(kind: str) -> None:
    of = SITUATIONS[kind]
    for how, trace in TRACERS.items():
        model = of.model()
        told = (
            rf"^Layer layer\S*: quantized layers cannot be {re.escape(how)}[^\n]*torch.export or `lowbit export`[^\n]*$"
        )
        if kind == "experts" and how == "traced by torch.fx":
            continue  # a loop over experts in torch's own way, whatever the layer
        with pytest.raises(ValueError, match=told):
            trace(model, of.input(False))
    if kind in ("linear", "convolution", "transposed"):
        layer = nn.Sequential(bake(convert(of.model().layer, "bf16")))
        for trace in TRACERS.values():
            assert torch.equal(trace(layer, of.input(False))(of.input(False)), layer(of.input(False)))


@each("kind", [kind for kind in SITUATIONS if kind != "attention"])
def test_an_error_of_shapes_names_the_layer(kind):
    of = SITUATIONS[kind]
    model, x = of.model(), of.input(False)
    few_features = x[:, :-4] if x.dim() == 4 else x[..., :-4]
    for wrong in [few_features, x[..., :2, :2]] if kind == "groups" else [few_features]:
        with pytest.raises(ValueError, match=rf"ayer {re.escape(of.name)}( takes|: query has| spans)"):
            model(wrong)


@each("kind", [*LINEAR, "stack"])
def test_what_is_no_dense_tensor_of_reals_is_refused(kind):
    model, x = SITUATIONS[kind].model(), SITUATIONS[kind].input(False)
    for odd in (np.ones((2, WIDTH)), [[0.0] * WIDTH], None):
        with pytest.raises(TypeError, match=rf"^Layer layer takes a Tensor; got {type(odd).__name__}"):
            model(odd)
    with pytest.raises(ValueError, match=r"^Layer layer takes dense tensors; got torch.sparse_coo. Call its to_dense"):
        model(x.to_sparse())
    for autocast in (False, True):
        for odd in (x + 0j, x.long(), x > 0, x.to(torch.float8_e4m3fn)):
            told = f"^Layer layer is quantized, and takes float16, .*; got {odd.dtype}"
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast), pytest.raises(ValueError, match=told):
                model(odd)
    if kind != "stack":
        with pytest.raises(ValueError, match=rf"takes {WIDTH} features; got \(\)"):
            model(torch.tensor(1.0))


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
@each("kind", [kind for kind in SITUATIONS if kind != "attention"])
def test_a_weight_that_becomes_complex_is_refused(kind):
    of = SITUATIONS[kind]
    model = of.model().to(torch.complex64)
    for x in (of.input(False), of.input(False) + 0j):
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match=r"is quantized, and takes float16"):
            model(x)


NESTED = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")


def nested(layout=torch.jagged, **kwargs):
    parts = [torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(n)) for n in (3, 5)]
    return torch.nested.nested_tensor(parts, layout=layout, **kwargs)


@NESTED
@each("kind", LINEAR)
def test_jagged_tensors_are_rows(kind):
    """Bits, shapes and gradients of the rows together, and the result can be added to the input's kind."""
    model, x = SITUATIONS[kind].model(), nested(requires_grad=True)
    rows = x.values().detach().clone().requires_grad_()
    y = model(x)
    LayerKeys(model).fill_(0)
    expected = model(rows)
    assert torch.equal(y.values(), expected) and y.shape[:2] == x.shape[:2]
    (y + y).values().square().sum().backward()
    (2 * expected).square().sum().backward()
    assert torch.equal(x.grad.values(), rows.grad)


@NESTED
@each("kind", SITUATIONS)
def test_other_nested_tensors_are_refused_with_what_to_do(kind):
    model = SITUATIONS[kind].model()
    odd = [nested(torch.strided)]
    odd += [torch.nested.narrow(torch.randn(2, 6, WIDTH), 1, torch.tensor([0, 1]), torch.tensor([3, 4]), torch.jagged)]
    odd += [] if kind in LINEAR else [nested()]
    if kind in ("attention", "experts"):
        return  # which call other functions with it before
    for x in odd:
        with pytest.raises(ValueError, match=r"^Layer layer\S* takes n(o|ested) .*(to_padded_tensor)"):
            model(x)


@each("kind", [kind for kind in SITUATIONS if kind != "experts"])
def test_on_meta_shapes_and_flops_are_those_of_the_original(kind):
    of = SITUATIONS[kind]
    x = of.input(False).to("meta")
    found, expected = (of.model(casts).to("meta") for casts in ("nvfp4", None))
    assert found(x).shape == expected(x).shape
    measured = [measure_flops(one, lambda one=one: one(x), lambda y: y.sum()) for one in (found, expected)]
    assert measured[0] == measured[1] > 0


def test_a_frozen_weight_on_meta_and_a_model_that_is_made_there():
    assert frozen().to("meta")(torch.empty(2, WIDTH, device="meta")).shape == (2, 48)
    with torch.device("meta"):
        model = convert(nn.Sequential(nn.Linear(WIDTH, 48)), "nvfp4")
    with torch.autocast("cpu", torch.bfloat16):
        assert model(torch.empty(2, WIDTH, device="meta")).shape == (2, 48)
