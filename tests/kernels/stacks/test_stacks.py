"""The Triton kernels make the operands of all products of a stack at once, with the bits of one after the other."""

import pytest

from tests.kernels.stacks import operands


@pytest.mark.slow
def test_operands_of_other_presets_have_the_bits_of_products_one_by_one(run):
    texts, count = run(
        operands.differences,
        ("nvfp4", "nvfp4-nvidia", "nvfp4-4over6", "mxfp4", "mxfp4-rht", "fp8-row", "fp8-current", "int8", "ufp4"),
    )
    assert texts == [] and count > 40


@pytest.mark.slow
def test_launches_of_a_grouped_layer_do_not_grow_with_its_experts(run):
    for preset, expected in (("nvfp4", 32), ("mxfp8", 9), ("fp8-row", 15), ("int8", 5)):
        assert [run(operands.launches, preset, experts) for experts in (2, 7)] == [expected] * 2, preset
