"""Muon against its definition, torch's and Adam's; and which parameters it takes."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_lowbit.optim import LowBitAdamW, Muon
from lightning_lowbit.optim.muon import orthogonalized
from lightning_lowbit.optim.passes import in_pieces
from tests.optim.parameters import assert_close, set_gradients, train
from tests.tables import each


class Model(nn.Module):
    """An embedding, two hidden layers, a stack of experts, a convolution and a head."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embed_tokens, self.up, self.down = nn.Embedding(11, 8), nn.Linear(8, 24), nn.Linear(24, 8)
            self.experts = nn.ParameterDict({"up_proj": torch.randn(3, 6, 8)})
            self.conv, self.lm_head = nn.Conv1d(8, 4, 3), nn.Linear(8, 11)
        self.to(dtype)


MATRICES = ["up.weight", "down.weight", "experts.up_proj"]


def svd(matrix):
    """The polynomial of Newton-Schulz, five times, on singular values."""
    u, s, vt = torch.linalg.svd(matrix, full_matrices=False)
    s = s / s.norm(dim=-1, keepdim=True)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag_embed(s) @ vt


@each("shape", [(8, 24), (24, 8), (1, 7), (3, 6, 8), (2, 9, 4)])
def test_directions_have_the_singular_vectors_and_values_near_one(shape):
    matrix = 1e-12 * torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    direction = orthogonalized(matrix, 5)
    assert_close([direction], [svd(matrix)], 1e-9, "of singular values")
    values = torch.linalg.svdvals(direction)
    assert values.min() > 0.6 and values.max() < 1.3, f"singular values {values}"


@each("nesterov", [True, False])
@each("adjust_lr_fn", ["match_rms_adamw", "original"])
def test_step_is_that_of_the_authors_and_of_torch(nesterov, adjust_lr_fn):
    """In float64, with the average as they have it; torch's own step is in bf16, and moves alike."""
    options = {"lr": 0.01, "weight_decay": 0.1, "momentum": 0.9, "nesterov": nesterov, "adjust_lr_fn": adjust_lr_fn}
    model = Model()
    optimizer, twin = Muon(model.named_parameters(), **options), copy.deepcopy(model)
    parameters, twins = dict(model.named_parameters()), dict(twin.named_parameters())
    averages = {name: torch.zeros_like(twins[name]) for name in MATRICES}
    torchs = [Parameter(twins[name].detach().clone()) for name in MATRICES[:2]]
    reference = torch.optim.Muon(torchs, **options)
    for step in range(4):
        for named in (parameters, twins):
            set_gradients([*named.values()], seed=step)
        for one, name in zip(torchs, MATRICES, strict=False):
            one.grad = twins[name].grad.clone()
        optimizer.step()
        reference.step()
        for name, average in averages.items():
            p, g = twins[name].data, twins[name].grad
            average.lerp_(g, 0.1)
            square = (
                0.04 * max(p.shape[-2:]) if adjust_lr_fn == "match_rms_adamw" else max(1, p.shape[-2] / p.shape[-1])
            )
            p.mul_(1 - 0.01 * 0.1).sub_(0.01 * square**0.5 * svd(g.lerp(average, 0.9) if nesterov else average))
    assert_close([parameters[name] for name in MATRICES], [twins[name] for name in MATRICES], 1e-9, "by definition")
    for name, one in zip(MATRICES, torchs, strict=False):
        start = dict(Model().named_parameters())[name]
        likeness = F.cosine_similarity((one - start).flatten(), (parameters[name] - start).flatten(), dim=0)
        assert likeness > 0.999, f"{name} moves another way than with torch.optim.Muon: {likeness}"


def test_matrices_of_one_shape_are_orthogonalized_together_where_that_saves_launches(within):
    """On a CPU it would save nothing."""

    def layers():
        shapes = [*[(8, 24)] * 3, *[(24, 8)] * 3, *[(2, 6, 8)] * 2]
        generator = torch.Generator().manual_seed(0)
        return [Parameter(torch.randn(shape, dtype=torch.float64, generator=generator)) for shape in shapes]

    def trained(parameters):
        names = [f"{'experts' if p.dim() == 3 else 'layer'}.{i}" for i, p in enumerate(parameters)]
        optimizer = Muon(zip(names, parameters, strict=True), lr=0.01)
        with Products() as products:
            train(optimizer, parameters, [0, 1])
        return products.count

    alone, stacked = layers(), layers()
    assert trained(alone) == 2 * 8 * 15
    within(in_pieces(2**11))
    assert trained(stacked) == 2 * 3 * 15
    assert_close(stacked, alone, 1e-12, "in stacks")
    within(in_pieces(8))
    pieces = layers()
    assert trained(pieces) == 2 * 8 * 15
    assert_close(pieces, alone, 1e-12, "in pieces")


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += any(name in str(function) for name in ("mm.", "bmm"))
        return function(*args, **(kwargs or {}))


def test_all_else_moves_as_with_adam():
    model, twin = Model(torch.float32), Model(torch.float32)
    rest = [name for name, _ in model.named_parameters() if name not in MATRICES]
    optimizer = Muon(model.named_parameters(), lr=0.01)
    adam = LowBitAdamW(twin.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.1, moments="fp32")
    parameters, twins = dict(model.named_parameters()), dict(twin.named_parameters())
    assert {id(p) for p in optimizer.matrices()} == {id(parameters[name]) for name in MATRICES}
    for step in range(3):
        train(optimizer, [*parameters.values()], [step])
        train(adam, [*twins.values()], [step])
    assert all(torch.equal(parameters[name], twins[name]) for name in rest)
    assert "mean_square" not in optimizer.state[parameters["up.weight"]], "Muon keeps one moment"


def test_momentum_in_fp8_moves_alike_and_takes_a_byte():
    model, twin = Model(torch.float32), Model(torch.float32)
    parameters, twins = ([*one.parameters()] for one in (model, twin))
    train(Muon(twin.named_parameters(), lr=0.01), twins, range(6))
    optimizer = Muon(model.named_parameters(), lr=0.01, moments="fp8")
    train(optimizer, parameters, range(6))
    for name, p, q, start in zip(
        dict(model.named_parameters()), parameters, twins, Model(torch.float32).parameters(), strict=True
    ):
        likeness = F.cosine_similarity((p - start).flatten(), (q - start).flatten(), dim=0)
        assert likeness > 0.98, f"{name} moves another way: {likeness}"
    state = optimizer.state[model.up.weight]
    assert {name for name, value in state.items() if value.dim()} == {"mean", "mean_scale"}, "of Muon"
    assert state["mean"].dtype == torch.uint8


def named(*shapes):
    return [(f"{'abcdef'[i]}.weight", Parameter(torch.ones(shape))) for i, shape in enumerate(shapes)]


@each(
    ("params", "options", "matrices"),
    [
        (named((2, 3), (3, 2)), {"adam_names": ["b"]}, [0]),
        (named((2, 3), (3, 2)), {"adam_names": []}, [0, 1]),
        (named((2, 3), (3, 2, 4)), {"stack_names": ["b"]}, [0, 1]),
        ([("_orig_mod.model.lm_head.weight", Parameter(torch.ones(2, 3))), *named((2, 2))], {}, [1]),
        ([p for _, p in named((2, 3), (3,))], {"adam_names": []}, [0]),
    ],
)
def test_names_choose_the_matrices(params, options, matrices):
    parameters = [one[1] if isinstance(one, tuple) else one for one in params]
    optimizer = Muon(params, **options)
    assert [id(p) for p in optimizer.matrices()] == [id(parameters[i]) for i in matrices]


def test_parameters_that_fsdp1_has_flattened_are_refused_by_the_step_which_says_why():
    """Names are those of matrices, and a rank holds stretches of them: `tests/distributed` takes the step."""
    name, parameter = named((6,))[0]
    parameter._fsdp_flattened = True
    assert Muon([(name, parameter)]).matrices() == []


@each(
    ("shape", "moved", "left"),
    [
        (
            (4, 6),
            *("mlp.experts.0.up.weight mlp.shared_experts.up.weight mlp.gate.weight shared.0.weight heads.0.q.weight",),
            *("tok_emb.weight pos_emb position_enc out_head.weight fc.weight shared.weight mixer.A_log",),
        ),
        ((4, 6), "experts.w1", "experts.up_bias rel.relative_position_bias_table"),
        ((4, 6, 8), "mlp.experts.up_proj", "conv.weight experts.up_bias"),
        ((1, 6), "", "value.weight mask_token"),
        ((4, 1), "", "lora.gain parametrizations.weight.original0"),
        ((4, 6, 1), "", "experts.gain"),
    ],
)
def test_default_names_tell_matrices_of_real_models(shape, moved, left):
    """Lists of experts are matrices, too; biases in stacks, tables and vectors are none."""
    params = [(name, Parameter(torch.ones(shape))) for name in [*moved.split(), *left.split()]]
    optimizer = Muon([*params, *named((2, 2))])
    ids = {id(p) for p in optimizer.matrices()}
    assert [name for name, p in params if id(p) in ids] == moved.split()


def test_a_state_that_the_other_method_left_is_refused_with_the_reason():
    for before, after in (([], ["a"]), (["a"], [])):
        optimizers = []
        for names in (before, after):
            params = named((2, 3), (3, 2))
            optimizers.append(Muon(params, adam_names=names))
            train(optimizers[-1], [p for _, p in params], [0])
        with pytest.raises(ValueError, match=r"'a\.weight'.* moved it, and .* would now, by its name, adam_names"):
            optimizers[1].load_state_dict(optimizers[0].state_dict())


@each(
    ("params", "options", "words"),
    [
        (named((2, 3)), {"adam_names": ["lm_head"]}, r"adam_names: the pattern 'lm_head' matches no parameter\. There"),
        (named((2, 3)), {"stack_names": ["experts"]}, "stack_names: the pattern 'experts' matches no parameter"),
        (named((2, 3)), {"adam_names": ["a"]}, "Muon got no matrix.*LowBitAdamW"),
        ([Parameter(torch.ones(2, 3))], {}, r"by their names: give it model\.named_parameters\(\).*adam_names=\[\]"),
        (named((2, 3)), {"element_clip": "spike_clip"}, "one moment of all elements.*spike_clip"),
        ([{"params": named((2, 3)), "density": 0.5}], {}, "one moment of all elements.*0.5"),
        ([{"params": named((2, 3)), "adam_names": ["b"]}], {}, "the pattern 'b' matches no parameter of its group"),
        ([Parameter(torch.ones(2, 3))], {"adam_names": [], "stack_names": ["b"]}, "by their names.*and no stack_names"),
        ([Parameter(torch.ones(3))], {"adam_names": []}, "Muon got no matrix"),
    ],
)
def test_refusals(params, options, words):
    with pytest.raises(ValueError, match=words):
        Muon(params, **options)
