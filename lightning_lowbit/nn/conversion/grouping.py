"""Whether the products of a model's stacks of experts can be those of grouped GEMMs (``grouped="native"``)."""

from collections.abc import Mapping

from torch import nn

from lightning_lowbit.checks import choose
from lightning_lowbit.nn.casts.linear_casts import LinearCasts
from lightning_lowbit.nn.layers.classes import convertible, kind_of
from lightning_lowbit.nn.layers.grouped import grouping_obstacle
from lightning_lowbit.nn.layers.layer import clean_name

# How the products of a stack are multiplied: as the backend has it, or by one GEMM for all of them.
GROUPED = ("auto", "native")


def check_grouped(grouped: str, exact: bool, backend: str) -> None:
    """Raises a ``ValueError`` for an unknown ``grouped``, or settings that contradict it."""
    if choose("grouped", grouped, GROUPED) == "auto":
        return
    for other, contradicts in (("exact=True", exact), ("backend='native'", backend == "native")):
        if contradicts:
            raise ValueError(
                f"grouped='native' multiplies the products of experts in bfloat16, and {other} does not: choose one."
            )


def check_stacks(model: nn.Module, planned: Mapping[str, LinearCasts], grouped: str) -> None:
    """Raises a ``ValueError`` where ``grouped="native"`` cannot be honored: there is no stack among the layers of
    ``planned``, or grouped GEMMs do not serve the casts of one."""
    if grouped == "auto":
        return
    modules = convertible(model)
    stacks = {name: casts for name, casts in planned.items() if name in modules and kind_of(modules, name) == "experts"}
    if not stacks:
        raise ValueError(
            "grouped='native' is for stacks of experts, and none is among the layers to convert. Leave it out."
        )
    check_grouped_casts(stacks)


def check_grouped_casts(stacks: Mapping[str, LinearCasts]) -> None:
    """Raises a ``ValueError`` for the casts of a stack, by name, that grouped GEMMs do not serve."""
    for name, casts in stacks.items():
        if (reason := grouping_obstacle(casts)) is not None:
            raise ValueError(
                f"grouped='native' does not serve the casts of {clean_name(name) or 'the stack'}: {reason}, leave the "
                "stack out by skip, or leave grouped out."
            )
