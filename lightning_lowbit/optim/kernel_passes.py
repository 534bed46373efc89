"""The passes of a step in kernels, C++ on CPUs and Triton on GPUs: each is one call for all parameters of a batch."""

import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_lowbit.compilation import takes_cpp, takes_triton
from lightning_lowbit.distributed import offsets_of
from lightning_lowbit.kernels.cpu import adam as cpu
from lightning_lowbit.kernels.cpu.library import library
from lightning_lowbit.kernels.gpu import adam as gpu
from lightning_lowbit.kernels.memory import address, resolved
from lightning_lowbit.kernels.shards import DENSE, FP8, KINDS, NOTHING, SPARSE, ParameterShard, Rules, moved
from lightning_lowbit.optim.batch import Batch, Member, Step, scalar_dtype
from lightning_lowbit.optim.moments import (
    DenseMoments,
    Entries,
    FP8Moments,
    SparseMoments,
    misfit,
    statistics_dtype,
)
from lightning_lowbit.optim.passes import ElementClip, Passes, Update

# The tensors of a member that `ParameterShard` has by the same names.
_KEPT = (*FP8Moments.names, "master")
_KEPT_DTYPES = dict.fromkeys(_KEPT, (torch.float32, torch.uint8)) | {"master": (torch.float16,)}
_NOT_KEPT = dict.fromkeys(_KEPT, 0)


class KernelPasses(Passes):
    """The passes in kernels: those of a kind of device, which a subclass names."""

    def __init__(self, batch: Batch) -> None:
        super().__init__(batch)
        self._gradients = [None if m.gradient is None else resolved(m.gradient).contiguous() for m in batch.members]
        self._fields = [_fields(*pair) for pair in zip(batch.members, self._gradients, strict=True)]
        self._shards = self._shards_of(self._fields)

    @abstractmethod
    def _shards_of(self, fields: Sequence[ParameterShard]) -> cpu.Shards | gpu.Shards:
        """The shards with these fields, for the kernels."""

    def measure(self) -> Tensor:
        return self._shards.measure()

    def measure_weights(self) -> Tensor:
        return self._shards.measure_weights()

    def squares(self, step: Step, elements: ElementClip, unit: Tensor) -> Tensor:
        given = {"limit": elements.limit, "ratio": elements.ratio, "unit": unit} | _of_step(step)
        return self._shards.squares(Rules(elements.rule, given))

    def update(self, step: Step, elements: ElementClip, numbers: Update) -> Tensor | None:
        of_update = {name: column for name, column in numbers._asdict().items() if column is not None}
        given = {"limit": elements.limit, "ratio": elements.ratio, **of_update} | _of_step(step)
        options = self.batch.options
        sums = self._shards.update(Rules(elements.rule, given, options["eps"], bool(options["weight_decay"])))
        # As operations of torch do, so that autograd refuses a graph that has saved the weights before the step.
        torch.autograd.graph.increment_version([member.parameter for member in self.batch.members])
        return sums

    def write_clipped(
        self, step: Step, elements: ElementClip, factor: Tensor, indices: Sequence[int], targets: Sequence[Tensor]
    ) -> None:
        chosen = moved(indices, self.batch.device)
        given = {"limit": elements.limit[chosen], "ratio": elements.ratio[chosen], "factor": factor[chosen]}
        fields = [
            self._fields[index]._replace(
                weights=address("a clipped gradient", target, target.dtype, self._fields[index].size, target.device),
                weights_kind=KINDS[target.dtype],
            )
            for index, target in zip(indices, targets, strict=True)
        ]
        self._shards_of(fields).write_clipped(Rules(elements.rule, given))
        torch.autograd.graph.increment_version(targets)


class CppPasses(KernelPasses):
    """The passes in C++, with fp32 statistics."""

    def __init__(self, batch: Batch) -> None:
        super().__init__(batch)
        scalars = {name: [member.state[name] for member in batch.members] for name in batch.names}
        self._scalars = cpu.Scalars(scalars, {name: scalar_dtype(name, batch.dtype) for name in batch.names})

    def _shards_of(self, fields: Sequence[ParameterShard]) -> cpu.Shards:
        return cpu.Shards(fields)

    def load_scalars(self) -> dict[str, Tensor]:
        return self._scalars.load()

    def store_scalars(self, scalars: Mapping[str, Tensor]) -> None:
        self._scalars.store(scalars)


class TritonPasses(KernelPasses):
    """The passes in Triton, with fp32 statistics and moments of all elements."""

    def _shards_of(self, fields: Sequence[ParameterShard]) -> gpu.Shards:
        return gpu.Shards(fields, self.batch.device)


def passes_for(batch: Batch) -> Passes:
    """The passes that a batch is worked on by; a ``ValueError`` where a state has not the sizes of its parameter."""
    if kernels := kernels_for(batch):
        return kernels(batch)
    for member in batch.members:
        # What `Adaptive` wraps has moments in dtypes of its own.
        if "mean" in member.kept and (fault := misfit(member.kept, _entries(member))):
            raise ValueError(_changed(member, fault))
    return Passes(batch)


def kernels_for(batch: Batch) -> type[KernelPasses] | None:
    """The passes in kernels; None where plain torch is asked for, or they cannot serve a batch or be built."""
    if batch.dtype != torch.float32 or torch.compiler.is_compiling() or not all(map(_fits, batch.members)):
        return None
    if takes_cpp(batch.device):
        return CppPasses if library() else None
    if takes_triton(batch.device):
        # A graph would be replayed with the addresses of gradients that are gone.
        is_captured = batch.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        is_sparse = any(member.moments.is_sparse for member in batch.members)
        is_served = not is_captured and not is_sparse and gpu.obstacle(batch.device) is None
        return TritonPasses if is_served and agree(batch.device) else None
    return None


@cache
def agree(device: torch.device) -> bool:
    """Whether the passes in Triton make of a sample what plain torch makes: asked once per device; warns if not."""
    if all(map(_are_near, _results(TritonPasses, device), _results(Passes, device))):
        return True
    warnings.warn(
        f"The Triton kernels of the optimizers differ from plain torch on {device}, and are not used there: steps are "
        "loops over the parameters. Please report the GPU and the versions of torch and Triton.",
        stacklevel=2,
    )
    return False


def _results(passes: type[Passes], device: torch.device) -> list[Tensor]:
    """What passes make of two parameters: in 16 bits with FP8 moments and master weights, and in fp32."""
    draw = torch.Generator("cpu").manual_seed(0)
    options = {"element_clip": "ada_clip", "norm_clip": None, "weight_decay": 0.1, "eps": 1e-8, "sums_in_update": True}
    batch = Batch(options, device, torch.float32, (), ())
    for shape, dtype, moments in (((33, 130), torch.bfloat16, FP8Moments()), ((300,), torch.float32, DenseMoments())):
        p, g = (torch.randn(shape, generator=draw, device="cpu").to(device, dtype) for _ in range(2))
        kept = moments.new_state(p, torch.float32)
        if dtype == torch.bfloat16:
            kept["master"] = torch.zeros_like(p, dtype=torch.float16)
        batch.add(Member(p, len(batch.members), p, g, {}, moments, kept))
    half = torch.full((2,), 0.5, dtype=torch.float32, device=device)
    steps = torch.zeros(2, dtype=torch.int64, device=device)
    step = Step(half > 0, 2 * half, {"steps": steps, "steps_since_reset": steps})
    elements, made = ElementClip("ada_clip", 2 * half, half), passes(batch)
    results = [made.measure(), made.measure_weights(), made.squares(step, elements, half)]
    for old_scale in (0 * half, half / 2**13):
        numbers = Update(half, half, half, half / 50, half / 50, old_scale, half / 2**13, half)
        sums = made.update(step, elements, numbers)
        assert sums is not None
        results.append(sums)
    return [*results, *(tensor for member in batch.members for tensor in (member.shard, *member.kept.values()))]


def _are_near(found: Tensor, wanted: Tensor) -> bool:
    """All but a hundredth, whose last place a draw or a rounding decided, are within 1e-5 of the largest."""
    difference, largest = (found.double() - wanted.double()).abs(), wanted.double().abs().amax()
    return bool((difference <= 1e-5 * largest).double().mean() >= 0.99)


def _fits(member: Member) -> bool:
    """Whether kernels know the dtypes and layouts of a member's tensors; their addresses compare the sizes."""
    shard, gradient, kept = member.shard, member.gradient, member.kept
    if gradient is not None and not (type(gradient) is Tensor and gradient.dtype in KINDS):
        return False
    for name, tensor in kept.items():
        is_dense = isinstance(tensor, Tensor) and tensor.is_contiguous() and not tensor.is_neg()
        if not is_dense or tensor.dtype not in _KEPT_DTYPES[name]:
            return False
    # Random bits are of places in the whole parameter, which kernels count by rows.
    is_in_rows = not member.moments.draws or shard.shape[1:-1] == member.parameter.shape[1:-1]
    is_known = type(shard) in (Tensor, Parameter) and shard.dtype in KINDS
    return is_known and shard.is_contiguous() and not shard.is_neg() and is_in_rows


def _of_step(step: Step) -> dict[str, Tensor]:
    steps = step.scalars["steps"]
    return {"taken": step.taken, "steps": steps, "since_reset": step.scalars.get("steps_since_reset", steps)}


def _entries(member: Member) -> Entries:
    """The shapes and dtypes that the tensors of a member have."""
    shape, dtype = member.shard.shape, statistics_dtype(member.shard)
    masters: Entries = {"master": (shape, torch.float16)} if "master" in member.kept else {}
    return member.moments.entries(shape, dtype) | masters


def _changed(member: Member, fault: str) -> str:
    return (
        f"The state of a parameter of {tuple(member.shard.shape)} was changed since it was made or loaded: {fault}. "
        "Put back what belongs to the parameter, or build a new optimizer."
    )


def _fields(member: Member, gradient: Tensor | None) -> ParameterShard:
    shard, moments, kept, device = member.shard, member.moments, member.kept, member.shard.device
    kind, every, first, stride = DENSE, 1, 0, 0
    row = columns = size = shard.numel()
    if moments.draws:
        kind, every = (SPARSE, moments.every) if isinstance(moments, SparseMoments) else (FP8, 1)
        row = shard.shape[-1]
        columns = -(-row // every)
        whole, offsets = member.parameter.shape, offsets_of(member.parameter)
        stride = columns if kind == SPARSE else whole[-1]  # rows with sparse moments are whole
        above = offsets[0]  # rows of the whole parameter before those of the shard
        for offset, length in zip(offsets[1:-1], whole[1:-1], strict=True):
            above = above * length + offset
        first = above * stride + offsets[-1]
    starts, entries = _NOT_KEPT.copy(), moments.entries(shard.shape, torch.float32)
    for name, tensor in kept.items():
        shape, dtype = entries.get(name) or (shard.shape, torch.float16)
        if tensor.shape != shape:
            raise ValueError(_changed(member, misfit(kept, {name: (shape, dtype)})))
        starts[name] = address(name, tensor, dtype, tensor.numel(), device)
    return ParameterShard(
        weights=address("a parameter", shard, shard.dtype, size, device),
        gradient=0 if gradient is None else address("a gradient", gradient, gradient.dtype, size, device),
        **starts,
        weights_kind=KINDS[shard.dtype],
        gradient_kind=NOTHING if gradient is None else KINDS[gradient.dtype],
        moments=kind,
        size=size,
        row=row,
        columns=columns,
        every=every,
        first=first,
        stride=stride,
        number=member.number,
    )
