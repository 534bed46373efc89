"""The parts of the check, in the order in which they run, and what a check is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

LOST = 75  # exit status of a process after an error of CUDA


class Skipped(Exception):
    """A check that cannot be done here, and why."""


class Wrong(Exception):
    """What a check has found."""


class Check(NamedTuple):
    """One check. ``judges`` is False for a figure, which is measured and neither right nor wrong."""

    name: str
    run: Callable[[], Any]
    judges: bool = True


class Setting(NamedTuple):
    """Where checks run; ``is_small`` in a rehearsal on a CPU."""

    device: str
    is_small: bool


@dataclass(frozen=True)
class Part:
    """A module of ``tests.gpu.parts``, whose ``checks(setting)`` gives its checks.

    Attributes:
        right: what is right, or what is measured, in words.
        seconds: its share of the time; what is not used is left to the next ones.
        patience: seconds after which a check that has not ended is ended.
        processes: that share its checks, at most; no more than there are cores.
        interpreted: whether the kernels run in Triton's interpreter on a CPU.
    """

    name: str
    right: str
    seconds: int
    patience: int
    processes: int = 1
    interpreted: bool = False


# The first six verify: a death after them leaves figures alone undone.
PARTS = {
    part.name: part
    for part in (
        Part("environment", "kernels run; copies reach 60 % of the data sheet", 25, 20),
        Part("compile", "kernels of presets and optimizers compile, and spill no register", 45, 40, 16),
        Part("kernels", "`tests/kernels`: the bits of plain code on the CPU", 95, 60, 16, interpreted=True),
        Part("agreement", "large matrices, and plain code on the GPU: the same bits", 70, 50, 16, interpreted=True),
        Part("native", "native GEMMs: exact sums to the bit, others within two roundings", 55, 50, 6),
        Part("training", "40 steps in every preset: the loss falls by 30 %, close to bf16's", 90, 60, 8),
        Part("casts", "times of kernels", 35, 15, interpreted=True),
        Part("layers", "times of a layer beside `nn.Linear`", 100, 25),
        Part("steps", "times of optimizers and training steps", 60, 50),
        Part("compiled", "times of training steps that `torch.compile` captures in CUDA graphs", 100, 95, 9),
        Part("capture", "replays of CUDA graphs give the bits of direct passes", 25, 25),
    )
}
