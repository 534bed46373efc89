"""Memory that is estimated is that of a real step."""

from functools import partial

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor

from lightning_lowbit import SPAM, LowBitAdamW, LowBitPrecision, StableSPAM, convert
from lightning_lowbit.cli.lab.estimate.formulas import (
    Layout,
    backward_peak,
    block_activations,
    flops,
    memory,
    saved_activations,
    weight_copies,
)
from lightning_lowbit.cli.lab.estimate.shapes import describe
from lightning_lowbit.nn import LayerKeys
from lightning_lowbit.recipes.models import CausalLM
from tests.cli.estimate.models import BATCH, SMALL, loss_of, saved, shapes
from tests.cli.ranks_estimate import nbytes
from tests.tables import each

OPTIMIZERS = {
    "AdamW": torch.optim.AdamW,
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "StableSPAM": StableSPAM,
    "StableSPAM, FP8": partial(StableSPAM, moments="fp8"),
    "LowBitAdamW": LowBitAdamW,
    "SPAM, a quarter": partial(SPAM, density=0.25),
}


@pytest.mark.fast("AdamW", "StableSPAM, FP8")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_gradients_and_optimizer_state_are_those_of_a_real_step(name):
    module = CausalLM(config=SMALL, optimizer=OPTIMIZERS[name])
    optimizer = module.configure_optimizers()
    loss_of(module).backward()
    optimizer.step()
    state = [value for each in optimizer.state.values() for value in each.values() if isinstance(value, Tensor)]
    found = memory(shapes(optimizer=OPTIMIZERS[name]), BATCH, Layout())
    assert found["parameters"] == nbytes(module.parameters())
    assert found["gradients"] == nbytes(parameter.grad for parameter in module.parameters())
    assert found["optimizer state"] == nbytes(state)


# What is not estimated, once for all blocks: tables of sine and cosine in fp32, tokens and targets in int64 (tokens are
# a slice of sequences that are longer by one), and the number of targets.
INTEGERS = 8 * (BATCH.sequences * (BATCH.length + 1) + BATCH.tokens) + 4
ROTARY = 2 * BATCH.length * 16 * 4
TABLES = ROTARY + INTEGERS


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("casts", [None, "nvfp4", "fp8-current"])
@pytest.mark.parametrize("config", [{}, {"num_key_value_heads": 2}, {"num_hidden_layers": 3}], ids=str)
def test_activations_are_those_that_autograd_keeps(config, casts):
    """To the byte, but for the tables above; and amaxes and scales, three numbers for each layer at most."""
    module = CausalLM(config={**SMALL, **config})
    if casts:
        convert(module, casts, skip=["lm_head"])
    activations, copies = saved(module, enabled=True)
    model = shapes(config={**SMALL, **config})
    left = activations - TABLES - saved_activations(model, BATCH, Layout())
    assert 0 <= left <= (3 * 4 * len(model.layers) if casts else 0)
    assert copies == weight_copies(model, Layout())


@pytest.mark.parametrize("casts", ["nvfp4", "mxfp8", "int8"])
def test_activations_as_codes(casts):
    """To a part of a byte per token, which is rounded; amaxes and scales of tensors or rows are left out."""
    module = convert(CausalLM(config=SMALL), casts, skip=["lm_head"], save="codes")
    LayerKeys(module, seed=0).fill_(0, 0, 0, torch.device("cpu"))
    activations, copies = saved(module, enabled=True)
    model = shapes(plugin=LowBitPrecision(casts, skip=["lm_head"], save="codes"))
    left = activations - TABLES - saved_activations(model, BATCH, Layout())
    assert -BATCH.tokens <= left <= 4 * (3 + BATCH.tokens) * len(model.layers)
    assert copies == weight_copies(model, Layout()) == 2 * 256 * 64, "of the head alone"
    assert saved_activations(model, BATCH, Layout()) < 0.95 * saved_activations(shapes(), BATCH, Layout())


def test_activations_in_fp32_and_of_parameters_in_bf16():
    """The latter as where FSDP gathers them in bf16: nothing is cast, but norms compute in fp32."""
    activations, copies = saved(CausalLM(config=SMALL), enabled=False)
    model = shapes("32-true")
    assert activations - TABLES == saved_activations(model, BATCH, Layout())
    assert copies == weight_copies(model, Layout()) == 0
    activations, copies = saved(CausalLM(config=SMALL).bfloat16(), enabled=False)
    estimated = saved_activations(shapes("bf16-true"), BATCH, Layout())
    assert activations - INTEGERS - ROTARY // 2 == estimated and copies == 0
    assert saved_activations(shapes(), BATCH, Layout(4, "fsdp", gather="bf16")) == estimated
    # One data-parallel group gathers nothing: parameters stay in fp32, whatever they would be gathered in.
    (stored, bf16) = (memory(shapes(), BATCH, Layout(2, "fsdp", 2, gather)) for gather in ("stored", "bf16"))
    assert stored == bf16 and "weights to compute with" in stored and "gathered parameters" not in stored


def test_activations_with_checkpointing():
    activations, copies = saved(CausalLM(config=SMALL, gradient_checkpointing=True), enabled=True)
    plain, model = shapes(), shapes(gradient_checkpointing=True)
    assert model.checkpointing and not plain.checkpointing
    estimated = saved_activations(model, BATCH, Layout())
    assert activations - estimated == INTEGERS, "tables are kept with the inputs of blocks, elsewhere"
    kept = BATCH.tokens * 2 * (block_activations(plain, Layout()) - 4 * 64)
    assert saved_activations(plain, BATCH, Layout()) - estimated == kept
    assert weight_copies(model, Layout()) == copies + 2 * (4 * 64 * 64 + 3 * 64 * 176), "of one block and the head"
    assert backward_peak(plain, BATCH, Layout()) == BATCH.tokens * 256 * (4 + 2)


def test_what_is_no_decoder_counts_the_inputs_of_its_linear_layers():
    with torch.device("meta"):
        model, notes = describe(BoringModel())
    assert model.decoder is None and "not one decoder" in notes[0]
    assert saved_activations(model, BATCH, Layout()) == BATCH.tokens * 4 * 32
    with pytest.raises(ValueError, match="cuts the blocks of a decoder"):
        memory(model, BATCH, Layout(2, "fsdp", 2))
    with pytest.raises(ValueError, match="LightningModule has no linear layer"):
        describe(LightningModule())


@each("separate", [False, True])
def test_projections_of_multihead_attention_count(separate):
    class Attention(BoringModel):
        def __init__(self):
            super().__init__()
            sizes = {"kdim": 16, "vdim": 16} if separate else {}
            self.layer = torch.nn.MultiheadAttention(32, 4, bias=False, **sizes)

    with torch.device("meta"):
        model, notes = describe(Attention(), LowBitPrecision("nvfp4", attention="nvfp4"))
    weights = 32 * 32 + (32 * 32 + 2 * 32 * 16 if separate else 3 * 32 * 32)
    assert flops(model, BATCH, Layout()) == {"fp4": 3 * 2 * BATCH.tokens * weights}
    assert any("emulated" in note for note in notes)


class Reads(torch.optim.SGD):
    def step(self, closure=None):
        return float(self.param_groups[0]["params"][0].sum())


def test_an_optimizer_that_reads_numbers_is_refused():
    with pytest.raises(ValueError, match="Reads reads numbers in its step"):
        shapes(optimizer=partial(Reads, lr=0.1))
