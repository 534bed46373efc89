"""The passes of a step in kernels, C++ on CPUs and Triton on GPUs: each is one call for all parameters of a batch."""

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_lowbit.compilation import kernels_for
from lightning_lowbit.distributed import offsets_of
from lightning_lowbit.kernels.cpu import adam as cpu
from lightning_lowbit.kernels.cpu.library import library
from lightning_lowbit.kernels.gpu import adam as gpu
from lightning_lowbit.kernels.memory import address, layout, resolved
from lightning_lowbit.kernels.ops import agrees, is_of_kernel, warn_of_failure
from lightning_lowbit.kernels.shards import (
    DENSE,
    FP8,
    KINDS,
    NOTHING,
    SPARSE,
    Decision,
    ParameterShard,
)
from lightning_lowbit.optim.moments import DenseMoments, Entries, FP8Moments, SparseMoments, misfit, statistics_dtype
from lightning_lowbit.optim.passes import Batch, Member, Passes, scalar_dtype
from lightning_lowbit.optim.rules import AdaClip, GroupRules, Numbers

# The tensors of a member, by the names that `ParameterShard` has for them: possible dtypes, and addresses of none.
_DTYPES = dict.fromkeys(FP8Moments.names, (torch.float32, torch.uint8)) | {"master": (torch.float16,)}
_NOWHERE = dict.fromkeys(_DTYPES, 0)

_STEPS = "the steps of optimizers"  # in warnings
_left: set[torch.device] = set()  # to plain torch, after a launch that failed


@dataclass
class _Memory:
    """The shards of a batch without gradients, in the last step; and on what they depend."""

    layout: list[object]
    shards: list[ParameterShard]
    scalars: Any = None  # of the class of the kernels


class KernelPasses(Passes):
    """The passes in kernels; a subclass is for one kind of device."""

    Scalars: ClassVar[Any]  # which reads and writes those of states

    def __init__(self, batch: Batch) -> None:
        super().__init__(batch)
        self._gradients = [None if m.gradient is None else resolved(m.gradient).contiguous() for m in batch.members]
        self._shards = [*map(_with_gradient, _shards(batch), batch.members, self._gradients)]
        self._parameters = self._in_kernels(self._shards)
        dtypes = {name: scalar_dtype(name, batch.dtype) for name in batch.scalars}
        states, memory = [member.state for member in batch.members], batch.memory[batch.members[0].number]
        before = memory.scalars if isinstance(memory.scalars, self.Scalars) else None  # of another kind of device
        self._scalars = memory.scalars = self.Scalars(states, dtypes, before)

    @abstractmethod
    def _in_kernels(self, shards: Sequence[ParameterShard]) -> cpu.CppParameters | gpu.TritonParameters:
        """Hands the shards to the kernels."""

    def load_scalars(self) -> Numbers:
        return self._scalars.load()

    def store_scalars(self, scalars: Mapping[str, Tensor]) -> None:
        self._scalars.store(scalars)

    def measure(self, weights: bool = False) -> Tensor:
        return self._parameters.measure(weights)

    def squares(self, decision: Decision) -> Tensor:
        return self._parameters.squares(decision)

    def update(self, decision: Decision, sums: bool, done: Collection[int] = ()) -> Tensor | None:
        assert not done
        # As operations of torch do, so that autograd refuses a graph that has saved the weights before the step.
        torch.autograd.graph.increment_version([member.parameter for member in self.batch.members])
        return self._parameters.update(decision, sums)

    def write_clipped(self, decision: Decision, targets: Sequence[Tensor | None]) -> None:
        shards = []
        for shard, target in zip(self._shards, targets, strict=True):
            if target is None:
                shards.append(shard._replace(size=0))
            else:
                start = address("a clipped gradient", target, target.dtype, shard.size, target.device)
                shards.append(shard._replace(weights=start, weights_kind=KINDS[target.dtype]))
        self._in_kernels(shards).write_clipped(decision)
        torch.autograd.graph.increment_version([target for target in targets if target is not None])


class CppPasses(KernelPasses):
    """The passes in C++, with fp32 statistics."""

    Scalars = cpu.Scalars

    def _in_kernels(self, shards: Sequence[ParameterShard]) -> cpu.CppParameters:
        return cpu.CppParameters(shards)


class TritonPasses(KernelPasses):
    """The passes in Triton, with fp32 statistics and moments of all elements.

    After a launch that fails, plain torch ends the step and takes all others on the device. A launch that raises an
    error has not run: the passes that write into new tensors begin again, and the update goes on with the shards that
    no launch has updated.
    """

    Scalars = gpu.Scalars

    def _in_kernels(self, shards: Sequence[ParameterShard]) -> gpu.TritonParameters:
        return gpu.TritonParameters(shards, self.batch.device)

    def measure(self, weights: bool = False) -> Tensor:
        return self._launched(super().measure, Passes.measure, weights)

    def squares(self, decision: Decision) -> Tensor:
        return self._launched(super().squares, Passes.squares, decision)

    def write_clipped(self, decision: Decision, targets: Sequence[Tensor | None]) -> None:
        self._launched(super().write_clipped, Passes.write_clipped, decision, targets)

    def update(self, decision: Decision, sums: bool, done: Collection[int] = ()) -> Tensor | None:
        return self._launched(super().update, Passes.update, decision, sums)

    def _launched(self, launch: Callable[..., Any], plain: Callable[..., Any], *arguments: Any) -> Any:
        """Returns the result of launches, or of plain torch for what they have left to do."""
        device = self.batch.device
        if device in _left:
            return plain(self, *arguments)
        done: tuple[Collection[int], ...] = ()
        sums: Tensor | None = None
        try:
            return launch(*arguments)
        except gpu.Interrupted as interrupted:
            error, done, sums = interrupted.error, (interrupted.updated,), interrupted.sums
        except Exception as failure:
            error = failure
        if not is_of_kernel(error):
            raise error
        result = plain(self, *arguments, *done)  # if this raises, too, the kernel is not at fault
        _left.add(device)
        warn_of_failure("Triton", _STEPS, error, device)
        return result if sums is None else result + sums


def passes_for(batch: Batch) -> Passes:
    """Returns the passes that serve a batch; a ``ValueError`` where a state does not fit its parameter."""
    if kernel_passes := _kernel_passes(batch):
        return kernel_passes(batch)
    for member in batch.members:
        # An optimizer in `Adaptive` has moments in dtypes of its choice.
        if "mean" in member.tensors and (fault := misfit(member.tensors, _entries(member))):
            raise ValueError(_changed(member, fault))
    return Passes(batch)


def _kernel_passes(batch: Batch) -> type[KernelPasses] | None:
    """Returns the passes in kernels; None if plain torch is asked for, or they do not cover the batch or build."""
    if batch.dtype != torch.float32 or torch.compiler.is_compiling() or not all(map(_fits, batch.members)):
        return None
    language = kernels_for(batch.zero)
    if language == "cpp":
        return CppPasses if library() else None
    if language is None or batch.device in _left or any(member.moments.is_sparse for member in batch.members):
        return None
    # A graph would be replayed with the addresses of gradients that are gone.
    is_captured = batch.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    is_served = not is_captured and gpu.obstacle(batch.device) is None
    return TritonPasses if is_served and triton_agrees(batch.device) else None


@cache
def triton_agrees(device: torch.device) -> bool:
    """Compares the Triton passes with plain torch on a small sample, once per device; warns if they differ or fail."""

    def is_near() -> bool:
        return all(map(_are_near, _sample_results(TritonPasses, device), _sample_results(Passes, device)))

    return agrees(_STEPS, device, is_near)


def _sample_results(passes: type[Passes], device: torch.device) -> list[Tensor]:
    """Results of all passes over two parameters: in 16 bits with FP8 moments and master weights, and in fp32."""
    draw = torch.Generator("cpu").manual_seed(0)
    batch = Batch({}, GroupRules(AdaClip(0.9)), device, torch.float32, (), ())
    for shape, dtype, moments in (((33, 130), torch.bfloat16, FP8Moments()), ((300,), torch.float32, DenseMoments())):
        p, g = (torch.randn(shape, generator=draw, device="cpu").to(device, dtype) for _ in range(2))
        tensors = moments.new_state(p, torch.float32)
        if dtype == torch.bfloat16:
            tensors["master"] = torch.zeros_like(p, dtype=torch.float16)
        batch.add(Member(p, len(batch.members), p, g, {}, moments, tensors))
    half = torch.full((2,), 0.5, dtype=torch.float32, device=device)
    steps = torch.zeros(2, dtype=torch.int64, device=device)
    batch.numbers = {"taken": half > 0, "steps": steps, "steps_since_reset": steps, "limit": 2 * half}
    batch.numbers |= dict.fromkeys(("ratio", "unit", "factor", "weight1", "weight2"), half)
    batch.numbers |= {"rate": half / 50, "decay": half / 50, "new_scale": half / 2**13}
    work, decision = passes(batch), batch.decision(eps=1e-8, decays=True)
    results = [work.measure(), work.measure(weights=True), work.squares(decision)]
    for old_scale in (0 * half, half / 2**13):
        batch.numbers["old_scale"] = old_scale
        sums = work.update(decision, sums=True)
        assert sums is not None
        results.append(sums)
    return [*results, *(tensor for member in batch.members for tensor in (member.shard, *member.tensors.values()))]


def _are_near(result: Tensor, expected: Tensor) -> bool:
    """Returns whether 99 % of the elements are within 1e-5 of the largest: draws and roundings differ."""
    difference, largest = (result.double() - expected.double()).abs(), expected.double().abs().amax()
    return bool((difference <= 1e-5 * largest).double().mean() >= 0.99)


def _fits(member: Member) -> bool:
    """Returns whether kernels take the dtypes and layouts of a member's tensors; `address` compares the sizes."""
    shard, gradient = member.shard, member.gradient
    if gradient is not None and not (type(gradient) is Tensor and gradient.dtype in KINDS):
        return False
    for name, tensor in member.tensors.items():
        is_dense = isinstance(tensor, Tensor) and tensor.is_contiguous() and not tensor.is_neg()
        if not is_dense or tensor.dtype not in _DTYPES[name]:
            return False
    # Random bits belong to places in the whole parameter, which kernels count by rows.
    is_in_rows = not member.moments.draws or shard.shape[1:-1] == member.parameter.shape[1:-1]
    is_known = type(shard) in (Tensor, Parameter) and shard.dtype in KINDS
    return is_known and shard.is_contiguous() and not shard.is_neg() and is_in_rows


def _entries(member: Member) -> Entries:
    shape, dtype = member.shard.shape, statistics_dtype(member.shard)
    masters: Entries = {"master": (shape, torch.float16)} if "master" in member.tensors else {}
    return member.moments.entries(shape, dtype) | masters


def _changed(member: Member, fault: str) -> str:
    return (
        f"The state of a parameter of {tuple(member.shard.shape)} was changed since it was made or loaded: {fault}. "
        "Put back what belongs to the parameter, or build a new optimizer."
    )


def _shards(batch: Batch) -> list[ParameterShard]:
    """Returns the shards without gradients: those of the last step, if nothing lies elsewhere or has changed."""
    members = batch.members
    current = layout(tensor for member in members for tensor in (member.shard, *member.tensors.values()))
    current += [part for member in members for part in (member.number, member.moments)]
    memory = batch.memory.get(members[0].number)
    is_whole = all(member.parameter is member.shard for member in members)  # a part may be another one next time
    if memory is None or not is_whole or memory.layout != current:
        scalars = None if memory is None else memory.scalars
        memory = batch.memory[members[0].number] = _Memory(current, [*map(_shard, members)], scalars)
    return memory.shards


def _with_gradient(shard: ParameterShard, member: Member, gradient: Tensor | None) -> ParameterShard:
    if gradient is None:
        return shard
    start = address("a gradient", gradient, gradient.dtype, shard.size, member.shard.device)
    return ParameterShard(shard.weights, start, *shard[2:8], KINDS[gradient.dtype], *shard[9:])


def _shard(member: Member) -> ParameterShard:
    shard, moments, tensors, device = member.shard, member.moments, member.tensors, member.shard.device
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
    starts, entries = _NOWHERE.copy(), _entries(member)
    for name, tensor in tensors.items():
        shape, dtype = entries[name]
        if tensor.shape != shape:
            raise ValueError(_changed(member, misfit(tensors, {name: (shape, dtype)})))
        starts[name] = address(name, tensor, dtype, tensor.numel(), device)
    return ParameterShard(
        weights=address("a parameter", shard, shard.dtype, size, device),
        gradient=0,
        **starts,
        weights_kind=KINDS[shard.dtype],
        gradient_kind=NOTHING,
        moments=kind,
        size=size,
        row=row,
        columns=columns,
        every=every,
        first=first,
        stride=stride,
        number=member.number,
    )
