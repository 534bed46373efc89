"""What `lowbit estimate` counts for experts: the rows that a token makes, not all of them."""

import pytest
import torch

from lightning_lowbit import FP4Precision
from lightning_lowbit.cli.lab.estimate.shapes import describe
from recipes.models import CausalLM
from tests.nn.experts.models import CHOSEN, EXPERTS, settings


@pytest.mark.parametrize(("name", "rows"), [("olmoe", CHOSEN), ("jetmoe", CHOSEN), ("llama4_text", EXPERTS)])
def test_rows_are_those_of_the_experts_that_a_token_gets(name, rows):
    with torch.device("meta"):
        model = CausalLM(name, settings(name))
    found, _ = describe(model, FP4Precision("nvfp4", skip=["lm_head"]))
    stacks = [layer for layer in found.layers if layer.rows > 1]
    sizes = {tuple(sorted(p.shape[1:])) for p in model.parameters() if p.dim() == 3}
    assert {tuple(sorted((each.out_features, each.in_features))) for each in stacks} == sizes
    assert {layer.rows for layer in stacks} == {rows}
    assert all(arithmetic == "fp4" for layer in stacks for arithmetic in layer.arithmetic.values())
