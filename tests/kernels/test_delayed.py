"""Delayed scaling in one launch: the kernel records and chooses the amaxes that the plain code does."""

import torch

from lightning_lowbit.compilation import backend
from lightning_lowbit.kernels import delayed_amax
from lightning_lowbit.nn.watch import stage_and_choose
from tests.tables import each

# An operand's own amax, those in force, those of the step, and the places of the operand and of what reuses it.
IN_FORCE, STAGED = torch.tensor([0, 2.0, 0, 0.5, 0, 7]), torch.tensor([0.0, 1, 2, 3, 4, 5])
DELAYED = [
    (torch.tensor(own), IN_FORCE, staged, places)
    for own in (2.5, 0.0, 1e-42, float("inf"), float("nan"))
    for staged in (STAGED, None)
    for places in ([0], [1, 3], [2, 4], [5])
]


@each("own, in_force, staged, places", DELAYED)
def test_the_kernel_is_the_plain_code(own, in_force, staged, places):
    results = []
    for name in ("cpp", "eager"):
        record = None if staged is None else staged.clone()
        with backend(name):
            assert (delayed_amax(own, in_force, None, places) is not None) == (name == "cpp")
            results.append((stage_and_choose(in_force, record, places, own), record))
    (found, of_kernel), (expected, of_plain) = results
    assert torch.equal(found.nan_to_num(9), expected.nan_to_num(9))
    assert staged is None or torch.equal(of_kernel, of_plain)
    assert torch.equal(in_force, IN_FORCE)
