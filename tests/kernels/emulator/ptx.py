"""PTX on a CPU: an emulator of the instructions that Triton's compiler makes of the kernels, for tests without a GPU.

All threads of a program advance together, a register is an array over them, and programs run one after another.
Branches on which threads disagree, and instructions that no kernel uses, are errors.
"""

import re

import numpy as np
import torch

from tests.kernels.emulator.instructions import FP8, bfloat16, e2m1_of, fp8_of, inlined, integer_product, permute

_TYPES = {f"{kind}{bits}": np.dtype(f"uint{bits}") for kind in "bu" for bits in (8, 16, 32, 64)}
_TYPES |= {f"s{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)}
_TYPES |= {"f16": np.dtype("float16"), "f32": np.dtype("float32"), "f64": np.dtype("float64"), "pred": np.dtype(bool)}

_UNARY = {"abs": np.abs, "neg": np.negative, "not": np.invert, "sqrt": np.sqrt, "rcp": np.reciprocal}
_BINARY = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "max": np.maximum, "min": np.minimum}
_BINARY |= {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
_OF_NUMBERS = {"max": np.fmax, "min": np.fmin}  # of floats without .NaN
_COMPARED = {"eq": np.equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
_COMPARED |= {
    "ne": np.not_equal,
    "equ": lambda a, b: ~((a < b) | (a > b)),
    "neu": np.not_equal,
    "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: (a == a) & (b == b),
    "nan": lambda a, b: (a != a) | (b != b),
}


class Memory:
    def __init__(self, size):
        self.bytes = np.zeros(size, np.uint8)

    def load(self, address, dtype):
        assert (address % dtype.itemsize == 0).all(), "a load that is not aligned"
        return self.bytes.view(dtype)[address // dtype.itemsize]

    def store(self, address, values):
        assert (address % values.itemsize == 0).all(), "a store that is not aligned"
        self.bytes.view(values.dtype)[address // values.itemsize] = values


class Kernel:
    def __init__(self, ptx):
        body = re.sub(
            r"// begin inline asm(.*?)// end inline asm", inlined, ptx[ptx.index(".entry") :], flags=re.DOTALL
        )
        body = re.sub(r"//[^\n]*|^\s*\.loc[^\n]*", "", body[: body.index("\n}")], flags=re.MULTILINE)
        self.threads = int(re.search(r"\.reqntid (\d+)", body)[1])
        self.parameters = re.findall(r"\.param \.\w+[^,)]* (\w+_param_\d+)", body)
        self.code = []
        self.labels = {}
        for statement in re.findall(r"(\$\w+):|([^;{}]*(?:\{[^}]*\}[^;{}]*)*);", body[body.index("{") + 1 :]):
            label, text = statement[0], " ".join(statement[1].split())
            while match := re.match(r"(\$\w+): ?", text):
                self.labels[match[1]] = len(self.code)
                text = text[match.end() :]
            if label:
                self.labels[label] = len(self.code)
            elif text and not text.startswith("."):
                guard, operation, rest = re.match(r"(?:@(!?%p\d+) )?(\S+) ?(.*)", text).groups()
                self.code.append((guard or "", operation, re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,\s]+", rest)))

    def run(self, programs, arguments, memory, shared):
        """Runs all programs; ``arguments`` are addresses in ``memory`` and numbers, and ``shared`` counts bytes."""
        given = dict(zip(self.parameters, arguments, strict=False))  # Triton adds parameters, which no kernel uses
        for number in range(programs):
            _Program(self, (number, programs), given, memory, Memory(shared)).run()


class _Program:
    def __init__(self, kernel, place, parameters, memory, shared):
        self.kernel, self.parameters, self.memories = kernel, parameters, {"global": memory, "shared": shared}
        every = np.arange(kernel.threads, dtype=np.uint32)
        self.registers = {"%tid.x": every}
        self.registers |= {
            name: np.full_like(every, n) for name, n in zip(("%ctaid.x", "%nctaid.x"), place, strict=True)
        }
        self.all = np.ones(kernel.threads, bool)

    def run(self):
        position = 0
        while position < len(self.kernel.code):
            guard, operation, operands = self.kernel.code[position]
            active = self.all
            if guard:
                active = self.registers[guard.lstrip("!")] ^ guard.startswith("!")
            position += 1
            name, *modifiers = operation.split(".")
            if name in ("bra", "ret"):
                assert active.all() or not active.any(), "threads disagree on a branch"
                if active.any():
                    position = len(self.kernel.code) if name == "ret" else self.kernel.labels[operands[-1]]
            elif active.any():
                self.execute(name, modifiers, operands, active)

    def execute(self, name, modifiers, operands, active):
        target, *sources = operands or [""]
        kind = modifiers[-1] if modifiers else ""
        dtype = _TYPES.get(kind.removesuffix("x2"), _TYPES["b32"])
        if kind in ("f16x2", "f32x2") and name != "cvt":
            self.execute_pairs(name, modifiers, target, sources, active)
            return
        if kind not in _TYPES and name not in ("bar", "cvt", "ldmatrix", "stmatrix"):
            raise NotImplementedError(f"{name} of {kind}")

        def value(position, of=kind):
            return self.value(sources[position], of)

        if name in ("ld", "st", "atom"):
            self.move(name, modifiers, operands, active)
        elif name in ("ldmatrix", "stmatrix"):
            self.matrices(name, modifiers, operands, active)
        elif name == "bar":
            pass  # all threads are here
        elif name == "mov":
            self.mov(target, sources[0], kind, active)
        elif name in ("mul", "mad", "fma") and kind[0] != "f":
            result = integer_product(modifiers, value(0), value(1), kind)
            if name == "mad":
                wide = {"16": "s32", "32": "s64"}[kind[1:]] if "wide" in modifiers else kind
                result = result + self.value(sources[2], wide).astype(result.dtype)
            self.set(target, result, active)
        elif name in _BINARY:
            of_numbers = kind[0] == "f" and "NaN" not in modifiers and name in _OF_NUMBERS
            result = (_OF_NUMBERS if of_numbers else _BINARY)[name](value(0), value(1))
            if "sat" in modifiers:
                result = np.nan_to_num(result, nan=0.0).clip(0, 1).astype(dtype)
            self.set(target, result, active)
        elif name == "fma":
            exact = value(0).astype(np.longdouble) * value(1) + value(2)
            self.set(target, exact.astype(dtype), active)
        elif name == "div" or name == "rem":
            a, b = value(0), value(1)
            if kind[0] == "f":
                result = a / b
            else:  # towards zero
                quotient = np.abs(a) // np.maximum(np.abs(b), 1) * np.sign(a) * np.sign(b)
                result = quotient if name == "div" else a - quotient * b
            self.set(target, result.astype(dtype), active)
        elif name in _UNARY:
            self.set(target, _UNARY[name](value(0)), active)
        elif name in ("shl", "shr"):
            bits, shift = dtype.itemsize * 8, self.value(sources[1], "u32")
            moved = np.minimum(shift, bits - 1).astype(dtype)
            result = value(0) << moved if name == "shl" else value(0) >> moved
            gone = (shift >= bits) & (name == "shl" or kind[0] != "s")
            self.set(target, np.where(gone, dtype.type(0), result), active)
        elif name == "shf":  # the upper half of two registers, shifted to the left
            assert modifiers[:2] == ["l", "wrap"]
            low, high = (self.value(source, "u32").astype(np.uint64) for source in sources[:2])
            shifted = (high << 32 | low) << (self.value(sources[2], "u32") & 31).astype(np.uint64)
            self.set(target, (shifted >> 32 & 0xFFFFFFFF).astype(np.uint32).view(dtype), active)
        elif name == "bfe":  # the sign of a signed field is its top bit
            start, length = (int(self.value(source, "u32")[0]) for source in sources[1:])
            above = dtype.type(8 * dtype.itemsize - length)
            self.set(target, value(0) << (above - dtype.type(start)) >> above, active)
        elif name == "setp":
            result = _COMPARED[modifiers[0]](value(0), value(1))
            if len(sources) > 2:
                result = {"and": np.logical_and, "or": np.logical_or}[modifiers[1]](
                    result, self.value(sources[2], "pred")
                )
            self.set(target, result, active)
        elif name == "selp":
            self.set(target, np.where(self.value(sources[2], "pred"), value(0), value(1)), active)
        elif name == "popc":
            self.set(target, np.bitwise_count(self.value(sources[0], "u32")).astype(np.uint32), active)
        elif name == "prmt":
            self.set(target, permute(*(self.value(self.known(source), "u32") for source in sources)), active)
        elif name == "cvt":
            self.convert(modifiers, target, sources, active)
        elif name == "shfl":
            own, other = np.arange(len(self.all)), self.value(sources[1], "u32").astype(np.int64)
            lanes = {"bfly": own ^ other, "idx": own - own % 32 + other % 32}
            lanes["up"] = np.where(own % 32 >= other, own - other, own)  # the first ones keep their own
            self.set(target, value(0)[next(lanes[kind] for kind in modifiers if kind in lanes)], active)
        elif name == "redux":
            warps = value(0).reshape(-1, 32)
            largest = {"max": np.max, "min": np.min, "add": np.sum}[modifiers[1]](warps, 1, keepdims=True)
            self.set(target, np.broadcast_to(largest, warps.shape).reshape(-1).astype(dtype), active)
        else:
            raise NotImplementedError(".".join([name, *modifiers]))

    def execute_pairs(self, name, modifiers, target, sources, active):
        """An instruction for both halves of registers."""
        kind = modifiers[-1].removesuffix("x2")
        bits = 8 * _TYPES[kind].itemsize
        halves = _Program(self.kernel, (0, 0), {}, self.memories["global"], self.memories["shared"])
        halves.all = np.ones(2 * len(self.all), bool)
        names = [f"%{'rs' if kind == 'f16' else 'r'}_{number}" for number in range(len(sources) + 1)]
        for name_of_half, source in zip(names[1:], sources, strict=True):
            whole = np.ascontiguousarray(self.value(source, f"b{2 * bits}"))
            halves.registers[name_of_half] = whole.view(f"uint{bits}")
        halves.execute(name, [*modifiers[:-1], kind], names, halves.all)
        result = halves.registers[names[0]].view(f"uint{2 * bits}")
        self.set(target, result, active)

    # --- registers ----------------------------------------------------------------------------------------------------

    def value(self, text, kind):
        """A register, a number or an address of shared memory, as an array of a type."""
        dtype = _TYPES[kind]
        if text.startswith("%"):
            register = self.registers[text]
            if register.itemsize > dtype.itemsize:
                register = register.astype(np.dtype(f"uint{8 * dtype.itemsize}"))
            return register if kind == "pred" else register.view(dtype)
        if text.startswith(("0f", "0d")):
            bits = np.array([int(text[2:], 16)], np.uint32 if text[1] == "f" else np.uint64)
            return np.broadcast_to(bits.view(np.float32 if text[1] == "f" else np.float64), self.all.shape)
        number = int(text.rstrip("U"), 0) if re.match(r"-?\d", text) else int(text == "true")
        wide = np.array([number & (1 << 64) - 1], np.uint64)
        return np.broadcast_to(wide.astype(np.dtype(f"uint{8 * dtype.itemsize}")).view(dtype), self.all.shape)

    def known(self, text):
        """A register, or -1 for one that was never written: compilers pack its bits, but do not read them."""
        return text if text in self.registers or text[0] != "%" else "-1"

    def set(self, name, values, active):
        values = np.ascontiguousarray(np.broadcast_to(values, self.all.shape))
        if values.dtype != bool:
            width = {"%rs": 2, "%rd": 8}.get(name[:3], 4)
            if values.itemsize < width:  # bytes and halves fill a register
                values = values.astype(np.dtype(f"{'int' if values.dtype.kind == 'i' else 'uint'}{8 * width}"))
            values = values.view(np.dtype(f"uint{8 * values.itemsize}"))
        if (old := self.registers.get(name)) is not None and not active.all():
            values = np.where(active, values, old.view(values.dtype))
        self.registers[name] = values

    def mov(self, target, source, kind, active):
        if target.startswith("{"):  # unpack
            halves = self.value(source, kind).view(np.dtype(f"uint{_TYPES[kind].itemsize * 4}")).reshape(-1, 2)
            for number, part in enumerate(target.strip("{} ").split(",")):
                self.set(part.strip(), halves[:, number], active)
        elif source.startswith("{"):
            names = [part.strip() for part in source.strip("{} ").split(",")]
            half = f"u{_TYPES[kind].itemsize * 8 // len(names)}"
            parts = [self.value(self.known(name), half) for name in names]
            self.set(target, np.stack(parts, 1).view(np.dtype(f"uint{_TYPES[kind].itemsize * 8}")).reshape(-1), active)
        else:
            self.set(target, self.value(source, kind), active)

    # --- single instructions ------------------------------------------------------------------------------------------

    def move(self, name, modifiers, operands, active):
        kind = next(m for m in reversed(modifiers) if m in _TYPES)
        place = next(text for text in operands if text.startswith("["))
        base, _, offset = (part.strip() for part in place.strip("[] ").partition("+"))
        if "param" in modifiers:
            number = np.array([self.parameters[base] & (1 << 64) - 1], np.uint64).astype(_TYPES[f"u{kind[1:]}"])
            self.set(operands[0], number, active)
            return
        memory = self.memories["shared" if "shared" in modifiers else "global"]
        address = self.value(base, "u64" if base.startswith("%rd") else "u32").astype(np.int64) + int(offset or 0)
        address, dtype = address[active], _TYPES[kind]
        if name == "atom":
            assert "max" in modifiers
            for at, number in zip(address, self.value(operands[2], kind)[active], strict=True):
                memory.store(np.array([at]), np.maximum(memory.load(np.array([at]), dtype), number))
            return
        registers = operands[0] if name == "ld" else operands[1]
        for number, register in enumerate(registers.strip("{} ").split(",")):
            at = address + number * dtype.itemsize
            if name == "ld":
                loaded = np.zeros(self.all.shape, dtype)
                loaded[active] = memory.load(at, dtype)
                self.set(register.strip(), loaded, active)
            else:
                memory.store(at, self.value(register.strip(), kind)[active].astype(dtype))

    def matrices(self, name, modifiers, operands, active):
        """Matrices of 8 x 8 halves: threads point to rows in shared memory; four have a row (column) in registers."""
        assert "m8n8" in modifiers and active.all()
        place, registers = (operands[1], operands[0]) if name == "ldmatrix" else operands[:2]
        base, _, offset = (part.strip() for part in place.strip("[] ").partition("+"))
        rows = (self.value(base, "u32").astype(np.int64) + int(offset or 0)).reshape(-1, 32)
        lanes, shared = np.arange(32), self.memories["shared"]
        for number, register in enumerate(map(str.strip, registers.strip("{} ").split(","))):
            value = np.zeros(len(self.all), np.uint32) if name == "ldmatrix" else self.value(register, "u32")
            for half in range(2):
                own = lanes // 4, 2 * (lanes % 4) + half
                row, column = own[::-1] if "trans" in modifiers else own
                at, halves = (rows[:, 8 * number + row] + 2 * column).reshape(-1), value.view(np.uint16)[half::2]
                if name == "ldmatrix":
                    halves[:] = shared.load(at, _TYPES["u16"])
                else:
                    shared.store(at, halves)
            if name == "ldmatrix":
                self.set(register, value, active)

    def convert(self, modifiers, target, sources, active):
        to, of = modifiers[-2:]
        if to == "e2m1x2":
            codes = [e2m1_of(self.value(source, "f32")) for source in sources]
            result = codes[0] << np.uint8(4) | codes[1]
        elif to in FP8:
            codes = [fp8_of(self.value(source, "f32"), FP8[to]).astype(np.uint16) for source in sources]
            result = codes[0] << np.uint16(8) | codes[1]
        elif of in FP8:
            codes = torch.from_numpy(np.array(self.value(sources[0], "u16")).view(np.uint8))
            result = codes.view(FP8[of]).to(torch.float16).numpy().view(np.uint32)
        elif to in ("bf16x2", "bf16"):
            halves = [bfloat16(self.value(source, of).astype(np.float32)) for source in sources]
            result = halves[0] if to == "bf16" else halves[0].astype(np.uint32) << np.uint32(16) | halves[1]
        elif of == "bf16":
            result = self.value(sources[0], "u16").astype(np.uint32) << np.uint32(16)
        elif to == "f16x2":
            halves = [self.value(source, "f32").astype(np.float16).view(np.uint16) for source in sources]
            result = halves[0].astype(np.uint32) << np.uint32(16) | halves[1]
        else:
            values = self.value(sources[0], of)
            if of[0] == "f" and to[0] in "us":
                assert "rzi" in modifiers
                values = np.nan_to_num(np.trunc(values), nan=0.0)
            result = values.astype(_TYPES[to])
        self.set(target, result, active)
