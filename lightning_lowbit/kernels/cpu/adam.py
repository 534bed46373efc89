"""The passes of an optimizer's step over all elements, in C++: `source/adam.cpp`, called through ctypes.

A `ParameterShard` is one parameter of a batch, as addresses and sizes. They are passed as one row of numbers after
another.
"""

import ctypes
from array import array
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_lowbit.kernels.cpu.library import library
from lightning_lowbit.kernels.memory import address, addresses, start
from lightning_lowbit.kernels.shards import ParameterShard, Rules

_RULES = {None: 0, "ada_clip": 1, "spike_clip": 2}

#: Elements of which `measure` gives one maximum and one sum.
CHUNK = 2**14

_ARRAYS = ("limit", "ratio", "unit", "factor", "weight1", "weight2", "rate", "decay", "old_scale", "new_scale")
_DTYPES = {"taken": torch.bool, "steps": torch.int64, "since_reset": torch.int64}  # of the other numbers


class _Rules(ctypes.Structure):
    """``struct Rules`` in C++."""

    _fields_ = [
        ("taken", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in _ARRAYS),
        ("steps", ctypes.c_void_p),
        ("since_reset", ctypes.c_void_p),
        ("eps", ctypes.c_double),
        ("rule", ctypes.c_int64),
        ("decays", ctypes.c_int64),
    ]


class Shards:
    """The shards of a batch, for the functions of the library."""

    def __init__(self, shards: Sequence[ParameterShard]) -> None:
        self._fields = array("q", [field for shard in shards for field in shard])
        self._count, self._chunks = len(shards), sum(-(-shard.size // CHUNK) for shard in shards)
        self._measured = self._new_measured()

    def measure(self) -> Tensor:
        """max|g|, −1 where there is no gradient: float32 [P]."""
        return self._measure(0, self._measured)

    def measure_weights(self) -> Tensor:
        """max|p|: float32 [P]."""
        return self._measure(1, self._new_measured())

    def squares(self, rules: Rules) -> Tensor:
        """Σ(clip(g)/unit)², and how many elements changed: float32 [2, P]. After `measure`."""
        result = torch.empty(2, self._count, dtype=torch.float32, device="cpu")
        self._decide("squares", rules, *map(_pointer, (*self._measured, result)))
        return result

    def update(self, rules: Rules) -> Tensor | None:
        """Adam; with ``unit`` among the numbers, what `squares` gives, of the same pass."""
        result = torch.empty(2, self._count, dtype=torch.float32, device="cpu") if "unit" in rules.numbers else None
        self._decide("update", rules, None if result is None else _pointer(result))
        return result

    def write_clipped(self, rules: Rules) -> None:
        """factor·clip(g) into ``weights``."""
        self._decide("clipped", rules)

    def _new_measured(self) -> tuple[Tensor, Tensor]:
        """Room for max|g| and Σg² of each chunk."""
        return (
            torch.empty(self._chunks, dtype=torch.float32, device="cpu"),
            torch.empty(self._chunks, dtype=torch.float64, device="cpu"),
        )

    def _measure(self, of_weights: int, of_chunks: tuple[Tensor, Tensor]) -> Tensor:
        amaxes = torch.empty(self._count, dtype=torch.float32, device="cpu")
        self._call("measure", ctypes.c_int(of_weights), *map(_pointer, (amaxes, *of_chunks)))
        return amaxes

    def _call(self, name: str, *arguments: object) -> None:
        found = library()
        assert found is not None
        shards = ctypes.c_void_p(self._fields.buffer_info()[0])
        threads = ctypes.c_int(torch.get_num_threads())
        getattr(found, name)(shards, ctypes.c_int64(self._count), threads, *arguments)

    def _decide(self, name: str, rules: Rules, *arguments: object) -> None:
        numbers = dict(rules.numbers)
        floating = [key for key in numbers if key in _ARRAYS]
        rows = torch.stack([numbers[key] for key in floating]).float()
        numbers |= dict(zip(floating, rows, strict=True))
        starts = {
            key: address(key, tensor, _DTYPES.get(key, torch.float32), self._count) for key, tensor in numbers.items()
        }
        made = _Rules(eps=rules.eps, rule=_RULES[rules.rule], decays=rules.decays, **starts)
        self._call(name, ctypes.byref(made), *arguments)


def _pointer(new: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(start(new))


class Scalars:
    """0-d tensors on a CPU, one for each shard and name, as one tensor [P] for each name, with the dtype of each."""

    def __init__(self, tensors: Mapping[str, Sequence[Tensor]], dtypes: Mapping[str, torch.dtype]) -> None:
        self._tensors, self._dtypes = tensors, dtypes  # kept alive
        self._addresses = {
            name: array("q", addresses(name, scalars, dtypes[name])) for name, scalars in tensors.items()
        }

    def load(self) -> dict[str, Tensor]:
        loaded = {}
        for name, starts in self._addresses.items():
            loaded[name] = torch.empty(len(starts), dtype=self._dtypes[name], device="cpu")
            self._move(name, loaded[name], 1)
        return loaded

    def store(self, values: Mapping[str, Tensor]) -> None:
        """Writes what `load` gave, and what has become of it, back."""
        for name, value in values.items():
            self._move(name, value.to(self._dtypes[name]).contiguous(), 0)

    def _move(self, name: str, value: Tensor, gathers: int) -> None:
        found = library()
        assert found is not None
        starts = self._addresses[name]
        found.move_scalars(
            ctypes.c_void_p(starts.buffer_info()[0]),
            ctypes.c_int64(len(starts)),
            ctypes.c_int64(value.element_size()),
            ctypes.c_void_p(address(name, value, self._dtypes[name], len(starts))),
            ctypes.c_int(gathers),
        )
