"""Single instructions for the emulator of PTX, by its manual: conversions to codes, products, and bytes."""

import re

import numpy as np
import torch

_E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def e2m1_of(values):
    """Codes that ``cvt.rn.satfinite.e2m1x2.f32`` makes, by PTX's manual: to nearest, ties to the even code, finite; NaN
    becomes 6, and a sign is kept, also that of 0."""
    size = np.abs(values.astype(np.float64))
    above = np.searchsorted(_E2M1, size).clip(1, 7)
    middle = (_E2M1[above - 1] + _E2M1[above]) / 2
    code = np.where((size > middle) | (size == middle) & (above % 2 == 0), above, above - 1)
    return np.where(np.isnan(values), 7, code | np.signbit(values) << 3).astype(np.uint8)


def fp8_of(values, dtype):
    """Codes that ``cvt.rn.satfinite.e4m3x2.f32`` and ``e5m2x2`` make: NaN becomes 0x7F, and a sign is kept."""
    finite = torch.from_numpy(np.array(values)).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    return np.where(np.isnan(values), 0x7F, finite.to(dtype).view(torch.uint8).numpy()).astype(np.uint8)


FP8 = {"e4m3x2": torch.float8_e4m3fn, "e5m2x2": torch.float8_e5m2}


def inlined(match):
    """Instructions of an inline assembly, whose registers get names of their own."""
    text, which = match[1].strip(), match.start()
    if not text.startswith("{"):
        return text
    text = text[1:-1]
    for kind, names in re.findall(r"\.reg \.b(\d+) ([^;]*);", text):
        place = {"16": "rs", "64": "rd"}.get(kind, "r")
        names = re.sub(r"(\w+)<(\d+)>", lambda m: ", ".join(f"{m[1]}{i}" for i in range(int(m[2]))), names)
        for name in map(str.strip, names.split(",")):
            text = re.sub(rf"(?<![\w.%]){name}\b", f"%{place}_{which}_{name}", text)
    return re.sub(r"\.reg[^;]*;", "", text)


def integer_product(modifiers, a, b, kind):
    if "wide" in modifiers:
        wide = np.dtype(f"{'u' if kind[0] == 'u' else ''}int{int(kind[1:]) * 2}")
        return a.astype(wide) * b.astype(wide)
    if "hi" in modifiers:
        return ((a.astype(np.int64) * b.astype(np.int64)) >> 32).astype(a.dtype)
    return a * b


def permute(a, b, selector):
    both, result = np.concatenate([a[:, None], b[:, None]], 1).view(np.uint8), np.zeros((len(a), 4), np.uint8)
    for number in range(4):
        chosen = selector >> np.uint32(4 * number) & np.uint32(15)
        taken = both[np.arange(len(a)), chosen & np.uint32(7)]
        result[:, number] = np.where(chosen < 8, taken, np.where(taken & 0x80, 0xFF, 0))
    return result.view(np.uint32).reshape(-1)


def bfloat16(values):
    word = np.ascontiguousarray(values).view(np.uint32)
    rounded = (word + np.uint32(0x7FFF) + (word >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FFF), rounded).astype(np.uint16)
