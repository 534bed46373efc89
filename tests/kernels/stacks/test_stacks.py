"""The Triton kernels make the operands of all products of a stack at once, with the bits of one after the other."""

import pytest

from tests.kernels.stacks import operands


@pytest.mark.slow
def test_operands_of_other_presets_have_the_bits_of_products_one_by_one(run):
    texts, count = run(
        operands.differences,
        ("nvfp4-4over6", "mxfp4-rht", "fp8-current", "int8", "ufp4"),
    )
    assert texts == [] and count > 20


@pytest.mark.slow
def test_launches_of_a_grouped_layer_do_not_grow_with_its_experts(run):
    for preset, experts, expected in (("mxfp8", 2, 9), ("mxfp8", 7, 9), ("nvfp4", 3, 32), ("fp8-row", 3, 15)):
        assert run(operands.launches, preset, experts) == expected, preset
