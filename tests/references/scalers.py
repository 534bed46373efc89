"""A loss scale as its rules are told: one step at a time, and what happened so far counted in plain integers."""

import struct
from dataclasses import dataclass


def float32(number):
    """The nearest number that float32 holds."""
    return struct.unpack("f", struct.pack("f", number))[0]


@dataclass
class Reference:
    """The scale, and two counts: of steps towards growth, and of overflows since it grew.

    Factors have to be numbers of float32, so that a product is rounded once, whatever it is computed in.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 1.5
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    floor: float = 1.0
    cap: float = 2.0**24
    cooldown: int | None = None
    hysteresis: int = 1

    def __post_init__(self):
        self.scale = float32(self.init_scale)
        self.tracker = 0
        self.overflows = 0

    def step(self, overflowed):
        """An optimizer step, after which the scale may be another one."""
        if overflowed:
            self.overflows += 1
            if self.overflows >= self.hysteresis:
                self.scale = float32(self.scale * self.backoff_factor)
            self.tracker = -(self.growth_interval if self.cooldown is None else self.cooldown)
        else:
            self.tracker += 1
            if self.tracker == self.growth_interval:
                self.scale = float32(self.scale * self.growth_factor)
                self.tracker = 0
                self.overflows = 0  # counted since the scale grew
        self.scale = min(max(self.scale, float32(self.floor)), float32(self.cap))
