"""The passes of a step in C++, for CPUs: each is one call for all parameters of a batch."""

import ctypes
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_lowbit.compilation import current_backend
from lightning_lowbit.distributed import offsets_of
from lightning_lowbit.kernels.cpu.adam import DENSE, FP8, KINDS, NOTHING, SPARSE, Scalars, Shard, Shards, rules
from lightning_lowbit.kernels.cpu.library import library
from lightning_lowbit.optim.batch import Batch, Member, Step
from lightning_lowbit.optim.moments import NAMES, FP8Moments, SparseMoments
from lightning_lowbit.optim.passes import ElementClip, Passes, Update

# The tensors of a member that `Shard` has by the same names.
_KEPT = (*FP8Moments.names, "master")


def passes_for(batch: Batch) -> Passes:
    """The passes that a batch is worked on by."""
    return Passes(batch) if kernels_for(batch) is None else CppPasses(batch)


def kernels_for(batch: Batch) -> ctypes.CDLL | None:
    """The C++ kernels; None where plain torch is asked for, or they cannot serve a batch or be built."""
    fits = current_backend() in ("auto", "cpp") and batch.device.type == "cpu" and batch.dtype == torch.float32
    if not fits or torch.compiler.is_compiling() or not all(map(_fits, batch.members)):
        return None
    return library()


def _fits(member: Member) -> bool:
    shard, gradient, kept = member.shard, member.gradient, member.kept
    if gradient is not None and not (type(gradient) is Tensor and gradient.dtype in KINDS):
        return False
    # Random bits are of places in the whole parameter, which C++ counts by rows.
    is_in_rows = not member.moments.draws or shard.shape[1:-1] == member.parameter.shape[1:-1]
    return (
        type(shard) in (Tensor, Parameter)
        and shard.dtype in KINDS
        and shard.is_contiguous()
        and is_in_rows
        and all(tensor.is_contiguous() for tensor in kept.values())
        and all(kept[name].dtype in (torch.float32, torch.uint8) for name in NAMES if name in kept)
        and all(value.dtype in (torch.float32, torch.int64) for name, value in member.state.items() if name not in kept)
    )


class CppPasses(Passes):
    """The passes in C++."""

    def __init__(self, batch: Batch) -> None:
        super().__init__(batch)
        self._gradients = [None if m.gradient is None else m.gradient.contiguous() for m in batch.members]
        self._fields = [_fields(*pair) for pair in zip(batch.members, self._gradients, strict=True)]
        self._shards = Shards(self._fields)
        self._scalars = Scalars({name: [member.state[name] for member in batch.members] for name in batch.names})

    def load_scalars(self) -> dict[str, Tensor]:
        return self._scalars.load()

    def store_scalars(self, scalars: Mapping[str, Tensor]) -> None:
        self._scalars.store(scalars)

    def measure(self) -> Tensor:
        return self._shards.measure()

    def measure_weights(self) -> Tensor:
        return self._shards.measure_weights()

    def squares(self, step: Step, elements: ElementClip, unit: Tensor) -> Tensor:
        given = _rows(limit=elements.limit, ratio=elements.ratio, unit=unit) | _of_step(step)
        return self._shards.squares(rules(elements.rule, given))

    def update(self, step: Step, elements: ElementClip, numbers: Update) -> None:
        given = _rows(limit=elements.limit, ratio=elements.ratio, **numbers._asdict()) | _of_step(step)
        options = self.batch.options
        self._shards.update(rules(elements.rule, given, options["eps"], bool(options["weight_decay"])))
        # As operations of torch do, so that autograd refuses a graph that has saved the weights before the step.
        torch.autograd.graph.increment_version([member.parameter for member in self.batch.members])

    def write_clipped(
        self, step: Step, elements: ElementClip, factor: Tensor, indices: Sequence[int], targets: Sequence[Tensor]
    ) -> None:
        chosen = torch.tensor(indices, dtype=torch.int64, device="cpu")
        given = _rows(limit=elements.limit[chosen], ratio=elements.ratio[chosen], factor=factor[chosen])
        fields = [
            self._fields[index]._replace(weights=target.data_ptr(), weights_kind=KINDS[target.dtype])
            for index, target in zip(indices, targets, strict=True)
        ]
        Shards(fields).write_clipped(rules(elements.rule, given))


def _rows(**columns: Tensor | None) -> dict[str, Tensor]:
    """What is given, in contiguous float32."""
    given = {name: column for name, column in columns.items() if column is not None}
    return dict(zip(given, torch.stack(list(given.values())).float().unbind(), strict=True))


def _of_step(step: Step) -> dict[str, Tensor]:
    steps = step.scalars["steps"]
    return {"taken": step.taken, "steps": steps, "since_reset": step.scalars.get("steps_since_reset", steps)}


def _fields(member: Member, gradient: Tensor | None) -> Shard:
    shard, moments, kept = member.shard, member.moments, member.kept
    kind, every, first, stride = DENSE, 1, 0, 0
    row = columns = size = shard.numel()
    if moments.draws:
        kind, every = (SPARSE, moments.every) if isinstance(moments, SparseMoments) else (FP8, 1)
        row, columns = shard.shape[-1], kept["mean"].shape[-1]
        whole, offsets = member.parameter.shape, offsets_of(member.parameter)
        stride = columns if kind == SPARSE else whole[-1]  # rows with sparse moments are whole
        above = offsets[0]  # rows of the whole parameter before those of the shard
        for offset, length in zip(offsets[1:-1], whole[1:-1], strict=True):
            above = above * length + offset
        first = above * stride + offsets[-1]
    addresses = {name: kept[name].data_ptr() if name in kept else 0 for name in _KEPT}
    return Shard(
        weights=shard.data_ptr(),
        gradient=0 if gradient is None else gradient.data_ptr(),
        **addresses,
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
