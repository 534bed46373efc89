"""The settings of an estimate: data of a step, layout over devices, and assumed speeds."""

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
        return self.sequences * self.length


@dataclass(frozen=True)
class Layout:
    """How a model is spread over devices; raises a ``ValueError`` if the attributes contradict each other.

    FSDP gathers parameters ``"stored"`` (in their dtype) or in ``"bf16"``. With ``"casts"`` it gathers quantized
    matrices where possible, other parameters as stored; with ``"casts+bf16"`` others in bf16.
    """

    devices: int = 1
    strategy: str = "ddp"  # or "fsdp": FSDP2 with one unit per decoder block and one for the rest
    tensor_parallel: int = 1  # devices that share a block's matrices
    gather: str = "stored"
    per_node: int = 8

    def __post_init__(self) -> None:
        choose("strategy", self.strategy, STRATEGIES)
        choose("--gather", self.gather, GATHERS)
        for name in ("devices", "tensor_parallel", "per_node"):
            integer(f"--{name}", getattr(self, name), 1)
        if self.devices % (t := self.tensor_parallel):
            raise ValueError(
                f"{self.devices} devices do not divide into groups of {t}: give another --tensor_parallel."
            )
        if self.strategy == "ddp" and self.tensor_parallel > 1:
            raise ValueError("Tensor parallelism comes with ModelParallelStrategy: give --strategy fsdp.")
        if self.strategy == "ddp" and self.gather != "stored":
            raise ValueError(f"--gather {self.gather} is what FSDP gathers, and DDP gathers nothing: leave it out.")

    @property
    def data_parallel(self) -> int:
        return self.devices // self.tensor_parallel

    @property
    def shards(self) -> int:
        return self.data_parallel if self.strategy == "fsdp" else 1


@dataclass(frozen=True)
class Assumptions:
    """Assumed shares of the peak speed of GEMMs and links."""

    utilization: float = 0.4
    link_utilization: float = 0.7

    def __post_init__(self) -> None:
        for name in ("utilization", "link_utilization"):
            fraction(f"--{name}", getattr(self, name), "a share of the peak")
