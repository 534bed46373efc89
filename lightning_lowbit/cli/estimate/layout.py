"""The setting of an estimate: the data of a step, the layout over devices, and what is assumed of their speed."""

from dataclasses import dataclass

from lightning_lowbit.checks import choose, fraction, integer

STRATEGIES = ("ddp", "fsdp")
GATHERS = ("stored", "bf16", "casts", "casts+bf16")


@dataclass(frozen=True)
class Batch:
    """The data of a step on a device: micro-batches of ``sequences`` sequences of ``length`` tokens."""

    sequences: int
    length: int
    micro_batches: int = 1

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.sequences * self.length


@dataclass(frozen=True)
class Layout:
    """How a model is spread over devices.

    Attributes:
        devices: number of all devices.
        strategy: ``"ddp"``, a whole model on each; or ``"fsdp"``: FSDP2, one unit for each decoder block and one more.
        tensor_parallel: number of devices that share a block's matrices.
        gather: what FSDP gathers: parameters as they are ``"stored"``, or in ``"bf16"``; or matrices as their casts
            quantize them, where possible, and the rest as stored, ``"casts"``, or in bf16, ``"casts+bf16"``. Gradients
            are reduced in the dtype of the parameters.
        per_node: devices of a node.

    Raises:
        ValueError: these contradict each other.
    """

    devices: int = 1
    strategy: str = "ddp"
    tensor_parallel: int = 1
    gather: str = "stored"
    per_node: int = 8

    def __post_init__(self) -> None:
        choose("strategy", self.strategy, STRATEGIES)
        choose("--gather", self.gather, GATHERS)
        for name in ("devices", "tensor_parallel", "per_node"):
            integer(f"--{name}", getattr(self, name), 1)
        if self.devices % self.tensor_parallel:
            raise ValueError(
                f"{self.devices} devices do not divide into groups of {self.tensor_parallel}: give a --tensor_parallel "
                "that divides --devices."
            )
        if self.strategy == "ddp" and self.tensor_parallel > 1:
            raise ValueError("Tensor parallelism comes with ModelParallelStrategy: give --strategy fsdp.")
        if self.strategy == "ddp" and self.gather != "stored":
            raise ValueError(f"--gather {self.gather} is what FSDP gathers, and DDP gathers nothing: leave it out.")

    @property
    def data_parallel(self) -> int:
        """Number of groups that see different batches."""
        return self.devices // self.tensor_parallel

    @property
    def shards(self) -> int:
        """Number of FSDP shards of each parameter."""
        return self.data_parallel if self.strategy == "fsdp" else 1


@dataclass(frozen=True)
class Assumptions:
    """Assumed, not measured, shares of the peak of GEMMs and links."""

    utilization: float = 0.4
    link_utilization: float = 0.7

    def __post_init__(self) -> None:
        for name in ("utilization", "link_utilization"):
            fraction(f"--{name}", getattr(self, name), "a share of the peak")
