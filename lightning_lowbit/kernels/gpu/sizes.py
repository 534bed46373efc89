"""Sizes of programs: the tiles of a matrix, and the blocks or whole rows in them, that one program of a kernel has.

A program has some 32 elements per thread, in a tile that is wide along the axis on which memory is contiguous. Sizes
and warps are the fastest of those that were tried on an H200 (docs/results/gpu.md). Along columns one warp is: several
exchange elements through shared memory.
"""

from torch import Tensor

from lightning_lowbit.quant.blocks import Tile
from lightning_lowbit.quant.call import CastCall

LARGEST_BLOCK = 1024  # elements: a block lies in the registers of one program
LARGEST_LINE = 16384  # elements: a whole row lies in the registers of one program


def power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def padded_sides(tile: Tile) -> Tile:
    return power_of_two(tile[0]), power_of_two(tile[1])


def tile_sides(transposed: bool) -> tuple[int, int]:
    """Rows and columns of a program."""
    return (64, 64) if transposed else (8, 512)


def line_tile(axis: int, size: int) -> tuple[tuple[int, int], int]:
    """Rows, columns and warps of a program with whole lines of a size, or (-1) parts of lines across memory."""
    if size < 0:
        return (64, 64), 4
    lines = max(2048 // size, 1)
    return (lines, size) if axis == 1 else (size, lines), max(lines * size // 1024, 1)


def block_tile(transposed: bool, block: Tile, is_light: bool) -> tuple[int, int, int]:
    """Rows, columns and warps of a program that holds whole blocks, such that nothing spills."""
    if block[1] == 1 and 8 <= block[0] <= 64 and not transposed:
        return block[0], (2048 if is_light else 1024) // block[0], 1  # one warp: columns need no shared memory
    rows, columns = tile_sides(transposed)
    if block[0] > rows:
        return block[0], max(4096 // block[0], block[1], 8), 2 if block[1] == 1 else 4
    if block[1] > columns:
        return max(4096 // block[1], block[0], 8 if transposed else 1), block[1], 4
    return rows, columns, 4


def rotated_tile(transposed: bool, size: int, dim: int) -> tuple[int, int, int]:
    """Returns rows, columns and warps of a program that rotates groups of a size and does nothing else."""
    if dim == int(not transposed):  # along memory
        rows, columns = whole_groups(*((256, 8) if dim == 0 else (8, 256)), size, dim)
        return rows, columns, 2
    return (size, 2048 // size, 1) if dim == 0 else (2048 // size, size, 1)


def whole_groups(rows: int, columns: int, size: int, dim: int) -> tuple[int, int]:
    """Returns sides of a program that holds whole groups, with as many elements unless a side would be less than 1."""
    sides = [rows, columns]
    more = max(size // sides[dim], 1)
    sides[dim] *= more
    sides[1 - dim] = max(sides[1 - dim] // more, 1)
    return sides[0], sides[1]


def lines_of(x: Tensor, call: CastCall) -> int:
    """Returns how a cast finds the scales of rows or columns: 0 in two loops along them; -1 from amaxes of all of them;
    a size in tiles that hold whole ones or, above ``LARGEST_LINE``, in two loops, too."""
    scale, dim = call.cast.scale, call.dim % 2
    if scale.block != "row" or scale.statistic != "absmax" or scale.two_level or x.numel() == 0:
        return 0
    if x.shape[dim] > 1 and x.stride(dim) != 1:  # across memory
        return -1
    return min(max(power_of_two(x.shape[dim]), 512), 2 * LARGEST_LINE)


def amaxes_of_lines(x: Tensor, call: CastCall) -> int:
    """Returns how many amaxes of rows or columns a cast takes: 0 for one that takes none, or that of the matrix."""
    return x.shape[1 - call.dim % 2] if call.cast.scale.two_level == "row" or lines_of(x, call) < 0 else 0
