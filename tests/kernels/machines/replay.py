"""The C++ kernels in a process of another machine, which gets copies of all memory that they touch."""

import ctypes
import struct
import subprocess
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from lightning_lowbit.kernels import memory
from lightning_lowbit.kernels.cpu import casts, codes, gemms

MODULES = casts, codes, gemms


class Machine:
    """A library of the kernels in a process of ``replay.cpp``, which a command starts."""

    def __init__(self, command):
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._structures, self._tensors = {}, {}  # by address, all that the kernels have been told of

    @contextmanager
    def serving(self):
        """Within this context the package calls the kernels of this machine."""
        start, addressof, cpp_cast = memory.start, ctypes.addressof, casts.cpp_cast

        def start_of(tensor):
            self._tensors[start(tensor)] = tensor
            return start(tensor)

        def address_of(structure):
            self._structures[addressof(structure)] = structure
            return addressof(structure)

        def cast_of(*arguments):
            if (form := cpp_cast(*arguments)) is not None:
                address_of(form.numbers)
            return form

        with ExitStack() as stack:
            for module in MODULES:
                stack.enter_context(patch.object(module, "library", lambda: self))
            for module in (memory, casts, gemms):
                stack.enter_context(patch.object(module, "start", start_of))
            stack.enter_context(patch.object(ctypes, "addressof", address_of))
            stack.enter_context(patch.object(casts, "cpp_cast", cast_of))
            yield
        assert self._tensors, "no kernel of the machine was called"
        self._structures.clear()
        self._tensors.clear()

    def instructions(self):
        result = torch.zeros(1, dtype=torch.int32)
        self._tensors[result.data_ptr()] = result
        self._call("lowbit_instructions", [result.data_ptr()])
        return gemms.INSTRUCTIONS[result.item()]

    def __getattr__(self, name):
        return lambda *arguments: self._call(name, arguments)

    def _call(self, name, arguments):
        """Calls a kernel, and brings back what it writes to tensors."""
        numbers = []
        for argument in arguments:
            one = getattr(argument, "_obj", argument)  # of ctypes.byref
            is_structure = isinstance(one, ctypes.Structure | ctypes.Array)
            numbers.append(ctypes.addressof(one) if is_structure else one or 0)
        message = [struct.pack("<32sQ", name.encode(), len(self._structures) + len(self._tensors))]
        for address, one in (self._structures | self._tensors).items():
            size = one.nbytes if isinstance(one, Tensor) else ctypes.sizeof(one)
            message.append(struct.pack("<QQQ", address, size, not isinstance(one, Tensor)))
            message.append(ctypes.string_at(address, size))
        message.append(struct.pack(f"<Q{len(numbers)}q", len(numbers), *numbers))
        self._process.stdin.write(b"".join(message))
        self._process.stdin.flush()
        for address, tensor in self._tensors.items():
            content = self._process.stdout.read(tensor.nbytes)
            assert len(content) == tensor.nbytes, f"the process has ended with {self._process.wait()}"
            ctypes.memmove(address, content, len(content))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with self._process:  # closes the pipes and waits
            pass
