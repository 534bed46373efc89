"""Calls of the C++ kernels in a process of another machine, with copies of all memory that they touch."""

import ctypes
import struct
import subprocess

import torch
from torch import Tensor

from lightning_lowbit.kernels.cpu import casts, codes, gemms
from lightning_lowbit.quant.call import factor_shape
from lightning_lowbit.quant.packed import empty_packed

STRUCTURES = ctypes.Structure, ctypes.Array


class Machine:
    """A library of the kernels in a process of ``replay.cpp``, which a command starts."""

    def __init__(self, command):
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def call(self, name, arguments, results, memory=()):
        """Copies of the ``results``, which are tensors, as a kernel leaves them; None for None.

        ``arguments`` are numbers, tensors, structures and None; ``memory`` is what structures point to.
        """
        touched = [one for one in (*arguments, *results, *memory) if isinstance(one, (Tensor, *STRUCTURES))]
        blocks = {_address(one): one for one in touched}
        results = [one for one in results if one is not None]
        message = [struct.pack("<32sQ", name.encode(), len(blocks))]
        for address, one in blocks.items():
            message += [struct.pack("<QQQ", address, _size(one), not isinstance(one, Tensor)), _content(one)]
        numbers = [one if isinstance(one, int) else 0 if one is None else _address(one) for one in arguments]
        message += [struct.pack(f"<Q{len(numbers)}q", len(numbers), *numbers)]
        message += [struct.pack(f"<Q{len(results)}Q", len(results), *map(_address, results))]
        self._process.stdin.write(b"".join(message))
        self._process.stdin.flush()
        return [self._read(one) for one in results]

    def _read(self, tensor):
        content = bytearray(self._process.stdout.read(_size(tensor)))
        assert len(content) == _size(tensor), f"the process has ended with {self._process.wait()}"
        return torch.frombuffer(content, dtype=tensor.dtype).view(tensor.shape)

    def instructions(self):
        (number,) = self.call("lowbit_instructions", [result := torch.zeros(1, dtype=torch.int32)], [result])
        return gemms.INSTRUCTIONS[number]

    def product(self, one, threads):
        """The result of a ``Product``."""
        keep = []
        sides = [gemms._operand(side, keep) for side in (one.left, one.right)]
        values = torch.empty(*(side.panels.rows for side in sides), dtype=one.dtype)
        result = gemms._Result(values.data_ptr(), None, casts.INPUTS[one.dtype])
        if one.bias is not None:
            result.bias, result.bias_dtype = one.bias.data_ptr(), casts.INPUTS[one.bias.dtype]
        numbers = [casts._Numbers.from_address(side.numbers) for side in sides]
        tensors = [tensor for x in (one.left, one.right) for tensor in (x.call.key, x.call.amax, x.call.rotation)]
        memory = [*keep, *numbers, *tensors, one.bias]
        return self.call("lowbit_gemm", [*sides, result, None, threads], [values], memory)[0]

    def operand(self, x, call, threads):
        """The values and the factor of a contiguous matrix's cast."""
        form = casts.cpp_cast(call.cast.spec, call.dim, x.dtype, call.dtype)
        values, factor = torch.empty(call.shape(x), dtype=form.dtype), None
        if form.has_factor:
            factor = torch.empty(factor_shape(values.shape, call.cast, call.dim) if form.has_factors else ())
        return self._cast(x, form, call, values, factor, None, threads)

    def packed(self, x, call, threads):
        """The bytes and the factor of a contiguous matrix's packed cast."""
        form = casts.cpp_cast(call.cast.spec, call.dim, x.dtype, torch.float32)
        data, factor = empty_packed(x, call)
        layout = codes._layout(call.cast.spec).codes(data.data_ptr(), call.shape(x).numel())
        return self._cast(x, form, call, data, factor, layout, threads)

    def _cast(self, x, form, call, values, factor, layout, threads):
        rotation = casts.rotation_of(call.rotation, call.dim)
        results = [values, factor]
        arguments = [x, *x.shape, form.numbers, *results, call.key, call.amax, rotation, None, layout, None, threads]
        return self.call("lowbit_cast", arguments, results, [call.rotation])

    def unpacked(self, data, call, shape, source, threads):
        """The values of packed bytes of a matrix that had the dtype ``source``."""
        values = torch.empty(shape, dtype=call.values_dtype(source))
        target = torch.float32 if values.dtype == torch.int8 else values.dtype
        form = casts.cpp_cast(call.cast.spec, call.dim, source, target)
        layout = codes._layout(call.cast.spec).codes(data.data_ptr(), values.numel())
        arguments = [data, *shape, layout, form.numbers, values, casts.OUTPUTS[values.dtype], threads]
        return self.call("lowbit_unpack", arguments, [values])[0]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with self._process:  # closes the pipes and waits
            pass


def _address(one):
    return one.data_ptr() if isinstance(one, Tensor) else ctypes.addressof(one)


def _size(one):
    return one.numel() * one.element_size() if isinstance(one, Tensor) else ctypes.sizeof(one)


def _content(one):
    assert not isinstance(one, Tensor) or one.is_contiguous()
    return ctypes.string_at(_address(one), _size(one))
