"""The passes of an optimizer's step over all elements, in Triton: `passes.py`, one launch for all shards of a kind."""

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_lowbit.formats import ELEMENT_FORMATS
from lightning_lowbit.kernels.gpu.casts import obstacle as obstacle
from lightning_lowbit.kernels.gpu.casts import run
from lightning_lowbit.kernels.gpu.launches import Launch
from lightning_lowbit.kernels.memory import checked
from lightning_lowbit.kernels.numbers import grid_of
from lightning_lowbit.kernels.shards import FP8, KINDS, NOTHING, ParameterShard, Rules, moved
from lightning_lowbit.quant.rounding import mix_key

BLOCK, BLOCKS = 128, 8  # elements of a block, and blocks of a program
STEP = 1024  # partial sums that are added at a time

_AT = ParameterShard(*range(len(ParameterShard._fields)))
_ADDRESSES = slice(_AT.weights, _AT.master + 1)
_DTYPES: dict[int, torch.dtype] = {number: dtype for dtype, number in KINDS.items()}
_FORMATS = {"MEAN": grid_of(ELEMENT_FORMATS["e4m3"]), "SQUARE": grid_of(ELEMENT_FORMATS["e5m2"])}

# What kernels read of the rules, in this order; scales are of master weights.
_CLIPPED = ("limit", "ratio", "factor")
_SQUARED = ("limit", "ratio", "unit", "taken")
_UPDATED = (*_CLIPPED, "taken", "weight1", "weight2", "rate", "decay", "unit", "old_scale", "new_scale")


class Kind(NamedTuple):
    """What kernels are compiled for; shards of a kind are worked on by one launch."""

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


class Shards:
    """The shards of a batch on a GPU, for the kernels: no function waits for it.

    Elements are in fp32, bf16 or fp16, and moments of all of them in fp32 or FP8.
    """

    def __init__(self, shards: Sequence[ParameterShard], device: torch.device) -> None:
        self._shards, self._device = shards, device
        self._table = moved([field for shard in shards for field in shard], device).view(
            -1, len(ParameterShard._fields)
        )
        self._kinds = [Kind.of(shard) for shard in shards]

    def measure(self) -> Tensor:
        """max|g|, −1 where there is no gradient: float32 [P]."""
        amaxes = (self._table[:, _AT.gradient_kind] != NOTHING).to(torch.float32) - 1
        return self._measure(amaxes, _AT.gradient, lambda kind: _DTYPES.get(kind.gradient))

    def measure_weights(self) -> Tensor:
        """max|p|: float32 [P]."""
        amaxes = torch.zeros(len(self._shards), dtype=torch.float32, device=self._device)
        return self._measure(amaxes, _AT.weights, lambda kind: _DTYPES[kind.weights])

    def squares(self, rules: Rules) -> Tensor:
        """Σ(clip(g)/unit)², and how many elements changed: float32 [2, P]."""
        clipping = {kind: _clipping(kind, rules) for kind in self._every_kind() if kind.gradient in _DTYPES}
        counts = {kind: self._counts(kind, constants["FP8"]) for kind, constants in clipping.items()}
        room = self._room_for_sums(counts.values())
        given = {"numbers": self._rows(rules.numbers, _SQUARED), **room}
        for kind, constants in clipping.items():
            self._run("square_shards", kind, counts[kind], given, {**constants, "SQUARE": _FORMATS["SQUARE"]})
        return self._added(**room)

    def update(self, rules: Rules) -> Tensor | None:
        """Adam; with ``unit`` among the numbers, what `squares` gives, of the same pass."""
        counts = {kind: self._counts(kind, kind.moments == FP8) for kind in self._every_kind()}
        sums, keys = "unit" in rules.numbers, None
        room = self._room_for_sums(counts.values()) if sums else {"starts": None, "partials": None}
        if any(kind.moments == FP8 for kind in self._kinds):
            key = mix_key(rules.numbers["steps"] + (self._table[:, _AT.number] << 40))
            keys = torch.stack([mix_key(key), mix_key(key + 1)])
        given = {"numbers": self._rows(rules.numbers, _UPDATED), "keys": keys, **room}
        for kind, tiles in counts.items():
            constants = {
                **_clipping(kind, rules),
                "FP8": kind.moments == FP8,
                "DTYPE": _DTYPES[kind.weights],
                **_FORMATS,
            }
            constants |= {"MASTER": kind.has_master, "SUMS": sums, "EPS": rules.eps}
            self._run("update_shards", kind, tiles, given, constants)
        return self._added(**room) if sums else None

    def write_clipped(self, rules: Rules) -> None:
        """factor·clip(g) into ``weights``."""
        given = {"numbers": self._rows(rules.numbers, _CLIPPED)}
        for kind in self._every_kind():
            constants = {**_clipping(kind, rules), "DTYPE": _DTYPES[kind.weights], "SQUARE": _FORMATS["SQUARE"]}
            self._run("write_shards", kind, self._counts(kind, constants["FP8"]), given, constants)

    def _measure(self, amaxes: Tensor, field: int, dtype_of: Callable[[Kind], torch.dtype | None]) -> Tensor:
        for kind in self._every_kind():
            if (source := dtype_of(kind)) is not None:
                tiles = _tiles(self._counts(kind, by_rows=False), self._device)
                arguments = {"x": self._table, "tiles": tiles, "amaxes": amaxes.view(torch.int32)}
                constants = {"AT": _AT, "FIELD": field, "SOURCE": source, "BLOCKS": BLOCKS, "ALIGNED": kind.is_aligned}
                run(Launch("measure_shards", len(tiles), arguments, constants))
        return amaxes

    def _room_for_sums(self, counts: Iterable[tuple[int, ...]]) -> dict[str, Any]:
        """Two sums for each tile, and the places of shards among them."""
        of_all = tuple(map(sum, zip([0] * len(self._shards), *counts, strict=True)))
        return {"starts": _starts(of_all, self._device), "partials": self._empty(sum(of_all), 2)}

    def _added(self, starts: Tensor, partials: Tensor) -> Tensor:
        sums = self._empty(2, len(self._shards))
        arguments = {"x": partials, "starts": starts, "sums": sums, "shards": len(self._shards)}
        run(Launch("sum_partials", len(self._shards), arguments, {"STEP": STEP}))
        return sums

    def _run(
        self, kernel: str, kind: Kind, counts: tuple[int, ...], given: dict[str, Any], constants: dict[str, Any]
    ) -> None:
        tiles = _tiles(counts, self._device)
        arguments = {"x": self._table, "tiles": tiles, **given, "shards": len(self._shards)}
        constants = {"AT": _AT, **constants, "BLOCKS": BLOCKS, "ALIGNED": kind.is_aligned}
        run(Launch(kernel, len(tiles), arguments, constants))

    def _every_kind(self) -> Iterable[Kind]:
        return dict.fromkeys(kind for kind, shard in zip(self._kinds, self._shards, strict=True) if shard.size)

    def _counts(self, kind: Kind, by_rows: bool) -> tuple[int, ...]:
        """Tiles of each shard of a kind, 0 for those of others."""
        pairs = zip(self._kinds, self._shards, strict=True)
        return tuple(_tiles_of(shard, by_rows) if of_shard == kind else 0 for of_shard, shard in pairs)

    def _rows(self, numbers: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
        """What is given of these, float32 [K, P]."""
        rows = torch.stack([numbers[name].to(torch.float32) for name in names if name in numbers])
        return checked("numbers of shards", rows, torch.float32, len(rows) * len(self._shards), self._device)

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self._device)


def _clipping(kind: Kind, rules: Rules) -> dict[str, Any]:
    is_idle = rules.rule is None or (rules.rule == "spike_clip" and not kind.has_square)
    by_rows = rules.rule == "spike_clip" and kind.moments == FP8
    return {"GRADIENT": _DTYPES.get(kind.gradient), "RULE": "" if is_idle else rules.rule, "FP8": by_rows}


def _tiles_of(shard: ParameterShard, by_rows: bool) -> int:
    if not shard.size:
        return 0
    blocks = shard.size // shard.row * -(-shard.row // BLOCK) if by_rows else -(-shard.size // BLOCK)
    return -(-blocks // BLOCKS)


@lru_cache(maxsize=4096)  # more than there are groups of parameters and kinds: a miss waits for the device
def _tiles(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """For each program its row of the table and the number of its tile in that: int32 [programs, 2]."""
    of_each = torch.frombuffer(array("q", counts), dtype=torch.int64)
    rows = torch.repeat_interleave(of_each)
    tiles = torch.arange(len(rows), device="cpu") - (of_each.cumsum(0) - of_each)[rows]
    return torch.stack([rows, tiles], dim=1).to(device, torch.int32)


@lru_cache(maxsize=4096)
def _starts(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """Tiles before those of each shard, and all: int32 [P + 1]."""
    return moved(list(accumulate(counts, initial=0)), device).to(torch.int32)
