"""The passes of an optimizer's step over all elements, in Triton: `passes.py`, one launch for all shards of a kind."""

from array import array
from collections import namedtuple
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_lowbit.formats import ELEMENT_FORMATS
from lightning_lowbit.kernels.gpu.casts import obstacle as obstacle
from lightning_lowbit.kernels.gpu.casts import run
from lightning_lowbit.kernels.gpu.launches import launch
from lightning_lowbit.kernels.memory import are_where_they_were, checked, start
from lightning_lowbit.kernels.numbers import grid_of
from lightning_lowbit.kernels.shards import FLOATING, FP8, KINDS, NOTHING, Decision, ParameterShard, indices_on
from lightning_lowbit.quant.rounding import mix_key

BLOCK, BLOCKS = 128, 8  # elements of a block, and blocks of a program
STEP = 1024  # partial sums that are added at a time

_AT = ParameterShard(*range(len(ParameterShard._fields)))
_ADDRESSES = slice(_AT.weights, _AT.master + 1)
_NUMBERS = ("taken", *FLOATING)
_ROW: Any = namedtuple("_Row", _NUMBERS)(*range(len(_NUMBERS)))
_DTYPES: dict[int, torch.dtype] = {number: dtype for dtype, number in KINDS.items()}
_FORMATS = {"MEAN": grid_of(ELEMENT_FORMATS["e4m3"]), "SQUARE": grid_of(ELEMENT_FORMATS["e5m2"])}


class Kind(NamedTuple):
    """Properties of a shard for which kernels are compiled; one launch works on all shards of a kind."""

    weights: int
    gradient: int
    moments: int
    has_square: bool
    has_master: bool
    is_aligned: bool  # loads of 16 bytes

    @classmethod
    def of(cls, shard: ParameterShard) -> "Kind":
        is_aligned = all(number % 16 == 0 for number in (*tuple(shard)[_ADDRESSES], shard.row))
        has_square, has_master = shard.mean_square != 0, shard.master != 0
        return cls(shard.weights_kind, shard.gradient_kind, shard.moments, has_square, has_master, is_aligned)


class Interrupted(Exception):
    """A launch of an update failed after others had run.

    Attributes:
        error: of the launch.
        updated: numbers of the shards that have been updated.
        sums: their sums, float32 [2, P], 0 for the others; None if none were asked for.
    """

    def __init__(self, error: Exception, updated: frozenset[int], sums: Tensor | None) -> None:
        super().__init__(f"{len(updated)} shards were updated")
        self.error, self.updated, self.sums = error, updated, sums


class TritonParameters:
    """The shards of a batch on a GPU, for the passes of ``optim/passes.py``; no function waits for the GPU.

    Elements are in fp32, bf16 or fp16, and moments of all of them in fp32 or FP8.
    """

    def __init__(self, shards: Sequence[ParameterShard], device: torch.device) -> None:
        self._shards = shards
        fields = array("q", [field for shard in shards for field in shard])
        self._table = _table(fields.tobytes(), device)
        self._device = self._table.device  # with an index
        self._kinds = [Kind.of(shard) for shard in shards]

    def measure(self, weights: bool = False) -> Tensor:
        field, kinds = (_AT.weights, _AT.weights_kind) if weights else (_AT.gradient, _AT.gradient_kind)
        amaxes = (self._table[:, kinds] != NOTHING).to(torch.float32) - 1
        if weights:
            amaxes = torch.zeros_like(amaxes)
        for kind in self._used_kinds():
            source = _DTYPES.get(kind.weights if weights else kind.gradient)
            if source is not None:
                counts, constants = self._counts(kind, by_rows=False), {"FIELD": field, "SOURCE": source}
                self._run("measure_shards", kind, counts, {"amaxes": amaxes.view(torch.int32)}, constants)
        return amaxes

    def squares(self, decision: Decision) -> Tensor:
        sums = self._pass("squares", decision, sums=True)
        assert sums is not None
        return sums

    def update(self, decision: Decision, sums: bool) -> Tensor | None:
        """Raises :class:`Interrupted` if some shards have been updated before a launch fails."""
        return self._pass("update", decision, sums)

    def write_clipped(self, decision: Decision) -> None:
        self._pass("write", decision, sums=False)

    def _pass(self, name: str, decision: Decision, sums: bool) -> Tensor | None:
        is_update, rule = name == "update", decision.rule
        kinds = [kind for kind in self._used_kinds() if is_update or kind.gradient != NOTHING]
        in_fp8 = {kind: kind.moments == FP8 and (is_update or rule == "spike_clip") for kind in kinds}
        counts = {kind: self._counts(kind, in_fp8[kind]) for kind in kinds}
        room = self._room_for_sums(counts.values()) if sums else {"starts": None, "partials": None}
        keys = None
        if is_update and any(in_fp8.values()):
            keys = mix_key(decision.numbers["steps"] + (self._table[:, _AT.number] << 40))
        arguments = {"numbers": self._rows(decision.numbers), "keys": keys, **room}
        done: list[Kind] = []
        try:
            for kind in kinds:
                constants = {
                    "ROW": _ROW,
                    "PASS": name,
                    "GRADIENT": _DTYPES.get(kind.gradient),
                    "DTYPE": _DTYPES[kind.weights],
                    "RULE": "" if rule is None or (rule == "spike_clip" and not kind.has_square) else rule,
                    "FP8": in_fp8[kind],
                    "MASTER": is_update and kind.has_master,
                    "SUMS": sums,
                    "EPS": decision.eps,
                    **_FORMATS,
                }
                self._run("pass_over_shards", kind, counts[kind], arguments, constants)
                done.append(kind)
            return self._total(**room) if sums else None
        except Exception as error:
            if not is_update or not done:
                raise
            updated = frozenset(index for index, kind in enumerate(self._kinds) if kind in done)
            raise Interrupted(error, updated, self._plain_total(updated, **room) if sums else None) from error

    def _room_for_sums(self, counts: Iterable[tuple[int, ...]]) -> dict[str, Any]:
        """Returns room for two sums of each tile, and the places of shards among them."""
        totals = tuple(map(sum, zip([0] * len(self._shards), *counts, strict=True)))
        return {"starts": _starts(totals, self._device), "partials": self._empty(sum(totals), 2)}

    def _total(self, starts: Tensor, partials: Tensor) -> Tensor:
        sums = self._empty(2, len(self._shards))
        arguments = {"x": partials, "starts": starts, "sums": sums, "shards": len(self._shards)}
        run(launch("sum_partials", len(self._shards), arguments, {"STEP": STEP}))
        return sums

    def _plain_total(self, updated: frozenset[int], starts: Tensor, partials: Tensor) -> Tensor:
        """Returns the sums of some shards by operations of torch, 0 for the others."""
        rows = torch.repeat_interleave(starts.diff())
        sums = partials.new_zeros(2, len(self._shards), dtype=torch.float64).index_add_(1, rows, partials.t().double())
        is_updated = torch.tensor([index in updated for index in range(len(self._shards))], device=self._device)
        return sums.where(is_updated, 0.0).to(torch.float32)

    def _run(
        self, kernel: str, kind: Kind, counts: tuple[int, ...], arguments: dict[str, Any], constants: dict[str, Any]
    ) -> None:
        tiles = _tiles(counts, self._device)
        arguments = {"x": self._table, "tiles": tiles, "shards": len(self._shards), **arguments}
        constants = {"AT": _AT, **constants, "BLOCKS": BLOCKS, "ALIGNED": kind.is_aligned}
        run(launch(kernel, len(tiles), arguments, constants))

    def _used_kinds(self) -> Iterable[Kind]:
        return dict.fromkeys(kind for kind, shard in zip(self._kinds, self._shards, strict=True) if shard.size)

    def _counts(self, kind: Kind, by_rows: bool) -> tuple[int, ...]:
        """Returns how many tiles each shard has; 0 for shards of another kind."""
        pairs = zip(self._kinds, self._shards, strict=True)
        return tuple(_tiles_of(shard, by_rows) if other == kind else 0 for other, shard in pairs)

    def _rows(self, numbers: Mapping[str, Tensor]) -> Tensor:
        """Returns the numbers at the places ``_ROW``, float32 [K, P]; the limit fills rows that are not decided."""
        rows = torch.stack([numbers.get(name, numbers["limit"]).to(torch.float32) for name in _NUMBERS])
        return checked("numbers of shards", rows, torch.float32, len(rows) * len(self._shards), self._device)

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self._device)


class Scalars:
    """Reads and writes 0-d tensors on a GPU, one for each shard and name, as one tensor [P] for each name.

    They become views of one tensor for each dtype, which is read and written at once. Views of the step before stay.
    """

    def __init__(
        self,
        states: Sequence[dict[str, Tensor]],
        dtypes: Mapping[str, torch.dtype],
        before: "Scalars | None" = None,
    ) -> None:
        self._scalars: list[Tensor] = []
        self._starts = array("q")
        self._packed: dict[torch.dtype, Tensor] = {}
        self._names: dict[torch.dtype, list[str]] = {}
        for name, dtype in dtypes.items():
            self._names.setdefault(dtype, []).append(name)
        scalars = [state[name] for names in self._names.values() for name in names for state in states]
        if before is not None and are_where_they_were(scalars, before._scalars, before._starts):
            self._scalars, self._starts, self._packed = before._scalars, before._starts, before._packed
            return
        for dtype, names in self._names.items():
            packed = torch.stack([state[name] for name in names for state in states]).to(dtype)
            views = packed.unbind()
            self._scalars += views
            self._starts.extend(map(start, views))
            self._packed[dtype] = packed.view(len(names), len(states))
            for number, name in enumerate(names):
                for state, view in zip(states, views[number * len(states) :], strict=False):
                    state[name] = view

    def load(self) -> dict[str, Tensor]:
        return {
            name: row
            for dtype, names in self._names.items()
            for name, row in zip(names, self._packed[dtype].clone().unbind(), strict=True)
        }

    def store(self, values: Mapping[str, Tensor]) -> None:
        """Writes tensors [P] by name into the 0-d tensors."""
        for dtype, names in self._names.items():
            self._packed[dtype].copy_(torch.stack([values[name] for name in names]))


def _tiles_of(shard: ParameterShard, by_rows: bool) -> int:
    if not shard.size:
        return 0
    blocks = shard.size // shard.row * -(-shard.row // BLOCK) if by_rows else -(-shard.size // BLOCK)
    return -(-blocks // BLOCKS)


@lru_cache(maxsize=64)  # gradients of later steps mostly lie where those of earlier ones lay: nothing is copied then
def _table(fields: bytes, device: torch.device) -> Tensor:
    """Returns the fields of all shards on a device, int64 [P, fields], which nothing writes to."""
    return indices_on(device, array("q", fields)).view(-1, len(ParameterShard._fields))


@lru_cache(maxsize=4096)  # more than there are groups of parameters and kinds: a miss waits for the device
def _tiles(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns the row of the table and the number of the tile in the shard, for each program: int32 [programs, 2]."""
    sizes = torch.frombuffer(array("q", counts), dtype=torch.int64)
    rows = torch.repeat_interleave(sizes)
    tiles = torch.arange(len(rows), device="cpu") - (sizes.cumsum(0) - sizes)[rows]
    return torch.stack([rows, tiles], dim=1).to(device, torch.int32)


@lru_cache(maxsize=4096)
def _starts(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns the index of the first tile of each shard, and the number of all tiles: int32 [P + 1]."""
    return indices_on(device, list(accumulate(counts, initial=0))).to(torch.int32)
