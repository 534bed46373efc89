"""The passes of an optimizer's step over all elements, in C++: `source/adam.cpp`, called through ctypes.

The shards of a batch are one array of 64-bit numbers, with a row for each `ParameterShard`.
"""

import ctypes
from array import array
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_lowbit.kernels.cpu.library import library
from lightning_lowbit.kernels.memory import address, addresses, are_where_they_were, start
from lightning_lowbit.kernels.shards import FLOATING, Decision, ParameterShard

_RULES = {None: 0, "ada_clip": 1, "spike_clip": 2}

#: Elements of which `measure` gives one maximum and one sum.
CHUNK = 2**14

_DTYPES = {"taken": torch.bool, "steps": torch.int64, "steps_since_reset": torch.int64}  # of the other numbers


class _Decision(ctypes.Structure):
    """``struct Decision`` in C++."""

    _fields_ = [
        ("taken", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in FLOATING),
        ("steps", ctypes.c_void_p),
        ("steps_since_reset", ctypes.c_void_p),
        ("eps", ctypes.c_double),
        ("rule", ctypes.c_int64),
        ("decays", ctypes.c_int64),
    ]


class CppParameters:
    """The shards of a batch, for the passes of ``optim/passes.py`` in C++; `measure` comes first."""

    def __init__(self, shards: Sequence[ParameterShard]) -> None:
        self._fields = array("q", [field for shard in shards for field in shard])
        self._count, self._chunks = len(shards), sum(-(-shard.size // CHUNK) for shard in shards)
        self._measured = self._new_chunks()

    def measure(self, weights: bool = False) -> Tensor:
        result = torch.empty(self._count, dtype=torch.float32, device="cpu")
        chunks = self._new_chunks() if weights else self._measured
        self._call("measure", ctypes.c_int(weights), *map(_pointer, (result, *chunks)))
        return result

    def squares(self, decision: Decision) -> Tensor:
        result = torch.empty(2, self._count, dtype=torch.float32, device="cpu")
        self._call_with(decision, "squares", *map(_pointer, (*self._measured, result)))
        return result

    def update(self, decision: Decision, sums: bool) -> Tensor | None:
        result = torch.empty(2, self._count, dtype=torch.float32, device="cpu") if sums else None
        self._call_with(decision, "update", None if result is None else _pointer(result))
        return result

    def write_clipped(self, decision: Decision) -> None:
        self._call_with(decision, "clipped")

    def _new_chunks(self) -> tuple[Tensor, Tensor]:
        """Room for max|g| and Σg² of each chunk."""
        return (
            torch.empty(self._chunks, dtype=torch.float32, device="cpu"),
            torch.empty(self._chunks, dtype=torch.float64, device="cpu"),
        )

    def _call(self, name: str, *arguments: object) -> None:
        cpp = library()
        assert cpp is not None
        shards = ctypes.c_void_p(self._fields.buffer_info()[0])
        threads = ctypes.c_int(torch.get_num_threads())
        getattr(cpp, name)(shards, ctypes.c_int64(self._count), threads, *arguments)

    def _call_with(self, decision: Decision, name: str, *arguments: object) -> None:
        numbers, starts = decision.numbers, {}
        for key, dtype in _DTYPES.items():
            if key in numbers:
                starts[key] = address(key, numbers[key], dtype, self._count)
        floating = [key for key in FLOATING if key in numbers]
        rows = torch.stack([numbers[key] for key in floating]).float()
        first = address("numbers", rows, torch.float32, len(floating) * self._count)
        starts |= {key: first + index * 4 * self._count for index, key in enumerate(floating)}
        structure = _Decision(eps=decision.eps, rule=_RULES[decision.rule], decays=decision.decays, **starts)
        self._call(name, ctypes.byref(structure), *arguments)


def _pointer(new: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(start(new))


class Scalars:
    """Reads and writes 0-d tensors on a CPU, one for each shard and name, as one tensor [P] for each name.

    Those of the step before are not checked again.
    """

    def __init__(
        self,
        states: Sequence[Mapping[str, Tensor]],
        dtypes: Mapping[str, torch.dtype],
        before: "Scalars | None" = None,
    ) -> None:
        tensors = {name: [state[name] for state in states] for name in dtypes}
        self._tensors, self._dtypes = tensors, dtypes  # tensors, so that their memory stays
        self._addresses: dict[str, array[int]] = {}
        for name, scalars in tensors.items():
            if before is not None and name in before._tensors:
                starts = before._addresses[name]
                if are_where_they_were(scalars, before._tensors[name], starts):
                    self._addresses[name] = starts
                    continue
            self._addresses[name] = array("q", addresses(name, scalars, dtypes[name]))

    def load(self) -> dict[str, Tensor]:
        loaded = {}
        for name, starts in self._addresses.items():
            loaded[name] = torch.empty(len(starts), dtype=self._dtypes[name], device="cpu")
            self._move(name, loaded[name], 1)
        return loaded

    def store(self, values: Mapping[str, Tensor]) -> None:
        """Writes tensors [P] by name into the 0-d tensors."""
        for name, value in values.items():
            self._move(name, value.to(self._dtypes[name]).contiguous(), 0)

    def _move(self, name: str, value: Tensor, gathers: int) -> None:
        cpp = library()
        assert cpp is not None
        starts = self._addresses[name]
        cpp.move_scalars(
            ctypes.c_void_p(starts.buffer_info()[0]),
            ctypes.c_int64(len(starts)),
            ctypes.c_int64(value.element_size()),
            ctypes.c_void_p(address(name, value, self._dtypes[name], len(starts))),
            ctypes.c_int(gathers),
        )
