"""Slow, obvious readers of GGUF's blocks: element i of a block's bytes, and the scale that it decodes with."""

import struct

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def half(data):
    return struct.unpack("<e", data)[0]


def e2m1(code):
    return -E2M1[code - 8] if code > 7 else E2M1[code]


def e4m3(code):
    exponent, digits = divmod(code, 8)
    return digits * 2.0**-9 if exponent == 0 else (8 + digits) * 2.0 ** (exponent - 10)


def nibble(byte, is_high):
    return byte >> 4 if is_high else byte % 16


def nvfp4(block, i):
    part, j = divmod(i, 16)
    return e2m1(nibble(block[4 + 8 * part + j % 8], j >= 8)), e4m3(block[part])


def mxfp4(block, i):
    return e2m1(nibble(block[1 + i % 16], i >= 16)), 2.0 ** (block[0] - 127)


def q4_0(block, i):
    return nibble(block[2 + i % 16], i >= 16) - 8, half(block[:2])


def q8_0(block, i):
    return (block[2 + i] + 128) % 256 - 128, half(block[:2])


def tq2_0(block, i):
    group, j = divmod(i, 128)
    return (block[32 * group + j % 32] // 4 ** (j // 32)) % 4 - 1, half(block[64:])


def tq1_0(block, i):
    first, at, apart = (0, 0, 32) if i < 160 else (160, 32, 16) if i < 240 else (240, 48, 4)
    digit, j = divmod(i - first, apart)
    return (block[at + j] * 3**digit % 256) * 3 // 256 - 1, half(block[52:])


READERS = {"NVFP4": nvfp4, "MXFP4": mxfp4, "Q4_0": q4_0, "Q8_0": q8_0, "TQ2_0": tq2_0, "TQ1_0": tq1_0}
