"""Moments in FP8, and moments of some elements, as they are defined: block by block, row by row, in float64.

The grids are those of torch's own FP8 numbers; random bits are those of `tests.references.quantize`.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from tests.references.quantize import hash32, splitmix64, uniform

BLOCK = 128
DTYPES = {"mean": torch.float8_e4m3fn, "mean_square": torch.float8_e5m2}


@cache
def grid(name):
    """All finite values of a moment's format, float64, ascending."""
    values = torch.arange(256, dtype=torch.uint8).view(DTYPES[name]).double().numpy()
    return np.unique(values[np.isfinite(values)])


def draws(shape, step, number, moment):
    """Numbers in (0, 1) for all elements of the parameter of this number, after so many steps, for moment 0 or 1.

    One hash has 16 bits for each: the upper ones for moment 0.
    """
    bits = hash32(np.arange(int(np.prod(shape))), splitmix64(step + (number << 40))).reshape(shape)
    return (((bits >> np.uint32(16 * (1 - moment))) & np.uint32(0xFFFF)) + 0.5) / 2.0**16


@dataclass
class Encoded:
    """What is kept of some values […, columns]: numbers on the grid, and scales […, blocks] as float64.

    ``below`` and ``above``: the neighbors between which each number was chosen, by magnitude.
    """

    numbers: np.ndarray
    scales: np.ndarray
    below: np.ndarray
    above: np.ndarray


def encode(values, drawn, name):
    """Rounds each block, in units in which its largest is the format's: off 0 where the draw is above 1 − fraction."""
    columns = values.shape[-1]
    rows, row_draws = values.double().numpy().reshape(-1, columns), drawn.reshape(-1, columns)
    lattice, largest = grid(name), np.float32(grid(name)[-1])
    numbers, below, above = (np.zeros(rows.shape) for _ in range(3))
    scales = np.zeros((len(rows), -(-columns // BLOCK)))
    for row in range(len(rows)):
        for block, first in enumerate(range(0, columns, BLOCK)):
            inside = slice(first, min(first + BLOCK, columns))
            scale = float(np.float32(np.abs(rows[row, inside]).max()) / largest)  # scales are fp32
            scales[row, block] = scale
            if scale == 0:
                continue
            scaled = np.clip(np.abs(rows[row, inside]) / scale, 0, lattice[-1])
            low = lattice[np.searchsorted(lattice, scaled, side="right") - 1]
            high = lattice[np.searchsorted(lattice, scaled, side="left")]
            fraction = (scaled - low) / np.where(high > low, high - low, 1)
            sign = np.sign(rows[row, inside])
            below[row, inside], above[row, inside] = sign * low, sign * high
            numbers[row, inside] = sign * np.where(row_draws[row, inside] > 1 - fraction, high, low)
    shape = tuple(values.shape)
    return Encoded(
        numbers.reshape(shape),
        scales.reshape(*shape[:-1], scales.shape[-1]),
        below.reshape(shape),
        above.reshape(shape),
    )


def decode(encoded, name):
    """Values; a mean square of 0 is read as the smallest number that is not."""
    numbers = encoded.numbers
    if name == "mean_square":
        smallest = grid(name)[grid(name) > 0][0]
        numbers = np.maximum(numbers, smallest)
    return numbers * np.repeat(encoded.scales, BLOCK, axis=-1)[..., : numbers.shape[-1]]


class FP8AdamW:
    """AdamW of one parameter, whose moments are encoded after each step; averages divided by 1 − βᵏ within it."""

    def __init__(self, parameter, number, lr, weight_decay):
        self.parameter = parameter.detach().double().numpy().copy()
        self.number, self.lr, self.weight_decay, self.steps = number, lr, weight_decay, 0
        self.kept = {}

    def step(self, gradient):
        """One step in float64."""
        g, t = gradient.double().numpy(), self.steps + 1
        now = {}
        encoded = {}
        for moment, (name, beta, new) in enumerate((("mean", 0.9, g), ("mean_square", 0.999, g * g))):
            before = decode(self.kept[name], name) if self.kept else np.zeros_like(g)
            # What is kept is divided by 1 − βᵗ already.
            now[name] = (beta * (1 - beta**self.steps) * before + (1 - beta) * new) / (1 - beta**t)
            encoded[name] = encode(torch.tensor(now[name]), draws(g.shape, self.steps, self.number, moment), name)
        self.parameter *= 1 - self.lr * self.weight_decay
        self.parameter -= self.lr * now["mean"] / (np.sqrt(now["mean_square"]) + 1e-8)
        self.kept, self.steps = encoded, t


def drawn_columns(shape, every, last_reset, number):
    """For each row of a parameter the columns that have moments: one in each ``every`` neighbors.

    ``last_reset``: steps that were taken before it, 0 at the start.
    """
    columns, slots = shape[-1], -(-shape[-1] // every)
    rows = int(np.prod(shape[:-1]))
    drawn = uniform(np.arange(rows * slots), splitmix64(last_reset + (number << 40))).reshape(rows, slots)
    return [
        [slot * every + int(drawn[row, slot] * min(every, columns - slot * every)) for slot in range(slots)]
        for row in range(rows)
    ]
