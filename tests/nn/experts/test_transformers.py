"""Experts of transformers: found by what makes them experts, and computed as transformers does, but for the casts."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_lowbit import FP4Precision, FP8Precision, LinearCasts, PrecisionSummary, QuantizationMonitor, convert
from lightning_lowbit.callbacks.layer_table import layer_table
from lightning_lowbit.cli.lab.estimate.shapes import describe
from lightning_lowbit.nn import GemmCounter, LayerKeys
from lightning_lowbit.nn.layers.classes import restore_classes
from lightning_lowbit.nn.layers.experts import RoutedExperts
from lightning_lowbit.nn.layers.layer import quantized_layers
from lightning_lowbit.patterns import clean_name
from recipes.models import CausalLM
from tests.lightning_imports import LightningModule
from tests.nn.experts.models import CHOSEN, EXPERTS, IDENTITIES, MODELS, expert_matrices, logits, settings, tiny
from tests.nn.layers import identical
from tests.precision.regression_model import fitted
from tests.tables import each

FAST = "olmoe", "gpt_oss", "llama4_text", "jetmoe", "dbrx", "longcat_flash"


def stacks(model):
    layers = quantized_layers(model).items()
    return {clean_name(name): layer for name, layer in layers if layer.kind == "experts"}


def routed(model):
    return next(module for module in model.modules() if isinstance(module, RoutedExperts))


def inputs(host, known=EXPERTS, tokens=11):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, 64, generator=generator)
    chosen = torch.stack([torch.randperm(known, generator=generator)[:CHOSEN] for _ in range(tokens)])
    return x, chosen, torch.rand(tokens, CHOSEN, generator=generator)


@pytest.mark.fast(*FAST)
@pytest.mark.parametrize("name", MODELS)
def test_experts_are_found_and_are_plain_without_casts(name):
    model = tiny(name)
    model.eval()
    expected, keys = logits(model), [*model.state_dict()]
    parameters = {id(p) for p in expert_matrices(model)}
    convert(model, "bf16")
    assert torch.equal(logits(model), expected)
    assert {id(layer.own_parameters()[0]) for layer in stacks(model).values()} == parameters
    assert len(parameters) >= 2
    assert [*model.state_dict()] == keys
    model.load_state_dict(model.state_dict())
    restore_classes(model)
    assert not quantized_layers(model) and not any(module._forward_pre_hooks for module in model.modules())
    assert [*model.state_dict()] == keys
    assert torch.equal(logits(model), expected)


@pytest.mark.fast("olmoe", "gpt_oss", "dbrx", "longcat_flash")
@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("llama4_text", "jetmoe")])
def test_loops_over_experts_compute_what_transformers_does(name):
    host = routed(convert(tiny(name), "bf16"))
    if hasattr(host, "config"):
        host.config._experts_implementation = "eager"
    x, chosen, weights = inputs(host, EXPERTS + IDENTITIES * (name == "longcat_flash"))
    x = x[None] if name == "dbrx" else x
    expected = host(x, chosen, weights)
    torch.testing.assert_close(host._quantized(x, chosen, weights), expected, rtol=1e-4, atol=1e-5, check_stride=False)


@pytest.mark.fast(*FAST)
@pytest.mark.parametrize("name", MODELS)
def test_products_of_experts_are_quantized_and_counted(name):
    model = convert(tiny(name), "nvfp4")
    LayerKeys(model).fill_(0)
    with GemmCounter(model.train()) as counter:
        logits(model).square().mean().backward()
    for stack, layer in stacks(model).items():
        assert all(counter.gemms[stack, gemm] > 0 for gemm in ("fprop", "dgrad", "wgrad"))
        gradient = layer.own_parameters()[0].grad
        assert gradient.isfinite().all() and gradient.any()
    if name == "olmoe":  # of the experts that tokens choose alone
        tokens, hidden, intermediate = 16, 64, 32
        flops = 2 * tokens * CHOSEN * hidden * 2 * intermediate
        assert counter.gemms["model.layers.0.mlp.experts.gate_up_proj", "fprop"] == flops
    uncovered = counter.coverage().uncovered
    assert not any(name.rpartition(".")[2].startswith("expert") for name in uncovered)  # gates are another thing


def test_results_of_a_token_do_not_depend_on_other_tokens_with_scales_of_their_rows():
    host = routed(convert(tiny("olmoe"), "mxfp4"))
    x, chosen, weights = inputs(host)
    whole = host(x, chosen, weights)
    for rows in (slice(0, 1), slice(3, 9)):
        assert torch.equal(host(x[rows], chosen[rows], weights[rows]), whole[rows])


def test_rows_of_other_processes_experts_are_left_out():
    host = routed(convert(tiny("olmoe"), "mxfp4"))
    LayerKeys(host).fill_(0)
    x, chosen, weights = inputs(host)
    chosen[:, 1] = EXPERTS  # what transformers gives an expert of another process
    weights[:, 1] = float("nan")
    x.requires_grad_()
    found = host(x, chosen, weights)
    assert torch.equal(found, host(x, chosen[:, :1], weights[:, :1]))
    found.sum().backward()
    assert x.grad.isfinite().all()


def test_no_token_at_all_gives_gradients_of_zero():
    model = convert(tiny("olmoe"), "nvfp4")
    LayerKeys(model).fill_(0)
    host = routed(model)
    y = host(torch.zeros(0, 64, requires_grad=True), torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2))
    y.sum().backward()
    assert y.shape == (0, 64)
    assert not host.gate_up_proj.grad.any() and not host.down_proj.grad.any()


def test_products_may_have_casts_of_their_own():
    model = convert(tiny("olmoe"), "nvfp4", overrides={"gate_up_proj": "fp8-current"}, skip=["layers.0.*down_proj"])
    found = {name: layer.full_casts for name, layer in stacks(model).items()}
    assert found == {
        "model.layers.0.mlp.experts.gate_up_proj": LinearCasts.preset("fp8-current"),
        "model.layers.0.mlp.experts.down_proj": LinearCasts(),
        "model.layers.1.mlp.experts.gate_up_proj": LinearCasts.preset("fp8-current"),
        "model.layers.1.mlp.experts.down_proj": LinearCasts.preset("nvfp4"),
    }


def gradients(model, seed=1):
    LayerKeys(model, seed).fill_(3)
    model.train()
    model.zero_grad()
    found = logits(model)
    found.square().mean().backward()
    return {"logits": found.detach(), **{name: p.grad.clone() for name, p in model.named_parameters()}}


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.fast("olmoe")
@pytest.mark.parametrize("name", ["olmoe", "gpt_oss", "llama4_text", "jetmoe"])
def test_copies_codes_and_recomputed_activations_give_the_same_gradients(name):
    model = convert(tiny(name), "nvfp4")
    expected = gradients(model)
    identical(gradients(copy.deepcopy(model)), expected)
    identical(gradients(pickle.loads(pickle.dumps(model))), expected)
    identical(gradients(convert(model, "nvfp4", save="codes")), expected)
    if model.supports_gradient_checkpointing:
        model.gradient_checkpointing_enable()
    identical(gradients(model), expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # from Dynamo
@pytest.mark.parametrize("name", ["olmoe", "gpt_oss", "llama4_text", "jetmoe"])
def test_compiled_models_give_the_same_gradients(name):
    model = convert(tiny(name), "nvfp4")
    expected = gradients(model)
    model.compile(backend="aot_eager")
    for key, tensor in gradients(model).items():
        torch.testing.assert_close(tensor, expected[key], rtol=1e-4, atol=1e-5)


def test_a_module_waits_for_the_device_once(monkeypatch):
    model = convert(tiny("olmoe", num_hidden_layers=1), "mxfp4")
    LayerKeys(model).fill_(0)
    waits, read = [], Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda tensor: waits.append(tensor.shape) or read(tensor))
    monkeypatch.setattr(Tensor, "item", lambda tensor: pytest.fail("another wait"))
    host = routed(model)
    x, chosen, weights = inputs(host)
    host(x.requires_grad_(), chosen, weights).sum().backward()
    assert waits == [(EXPERTS,)]


# --- under a precision plugin: what is estimated, shown, measured, saved and resumed ----------------------------------

STACK = "model.model.layers.0.mlp.experts.down_proj"


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = tiny("olmoe", num_hidden_layers=1)
        self.losses = []

    def training_step(self, batch, batch_idx):
        torch.manual_seed(self.global_step)
        tokens = torch.randint(0, 64, (2, 9))
        found = self.model(input_ids=tokens[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(found.flatten(0, 1).float(), tokens[:, 1:].flatten())
        self.losses.append(loss.item())
        return loss

    def train_dataloader(self):
        return torch.utils.data.DataLoader(range(8))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-3)


def test_summaries_coverage_and_monitors_know_the_experts():
    model, monitor, summary = Model(), QuantizationMonitor(underflow_limit=1.0), PrecisionSummary(quiet=True)
    plugin = FP4Precision("nvfp4", quantize_output=True)
    run = fitted(plugin, model, callbacks=[summary, monitor], log_every_n_steps=1)
    rows = {row[0]: row for row in layer_table(model).rows}
    assert rows[STACK][1:4] == ["GroupedProduct", "4 × (32 → 64)", "8.19 k"]
    assert rows[STACK][4] == "nvfp4"
    assert summary.coverage().share > 0.9
    assert monitor.report_data(run)["quantized_operands"]["layers"][STACK]["wgrad_g"]["sqnr"] > 5


@pytest.mark.filterwarnings("ignore:You.re resuming from a checkpoint that ended before the epoch ended")
def test_runs_go_on_from_checkpoints(tmp_path):
    makers = [lambda: FP4Precision("nvfp4", quantize_output=True), lambda: FP8Precision("delayed")]
    for number, make in enumerate(makers):
        path, whole, half, rest = tmp_path / f"{number}.ckpt", Model(), Model(), Model()
        fitted(make(), whole, limit_train_batches=4, max_steps=4)
        fitted(make(), half, limit_train_batches=4, max_steps=2).save_checkpoint(path)
        fitted(make(), rest, path, limit_train_batches=4, max_steps=4)
        assert half.losses + rest.losses == whole.losses
        state = torch.load(path, weights_only=True)
        assert {*state["state_dict"]} == {*Model().state_dict()}
        if number == 1:
            assert f"{STACK}/fprop_x" in state["lightning_lowbit"]["amax_history"]


@each(("name", "rows"), [("olmoe", CHOSEN), ("jetmoe", CHOSEN), ("llama4_text", EXPERTS)])
def test_estimates_count_the_rows_that_a_token_makes(name, rows):
    with torch.device("meta"):
        model = CausalLM(name, settings(name))
    found, _ = describe(model, FP4Precision("nvfp4", skip=["lm_head"]))
    stacks = [layer for layer in found.layers if layer.rows > 1]
    sizes = {tuple(sorted(p.shape[1:])) for p in model.parameters() if p.dim() == 3}
    assert {tuple(sorted((each.out_features, each.in_features))) for each in stacks} == sizes
    assert {layer.rows for layer in stacks} == {rows}
    assert all(arithmetic == "fp4" for layer in stacks for arithmetic in layer.arithmetic.values())
