"""Patches of images: a convolution is a linear layer over them.

    images [N, C, *sizes]   gather →   patches [N · positions, kernel · C]     one row per position of the kernel
                            ← scatter  each pixel is the sum over the patches that hold it

In a row, all channels of a pixel are neighbors, and pixels follow in the order of the kernel. So a block of 16 lies
within the channels of one pixel (if their number is a multiple of 16), and gathering copies contiguous runs. Sizes are
those of one to three dimensions of space.
"""

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_lowbit.compilation import opaque
from lightning_lowbit.kernels.products import add_patches


class Window(NamedTuple):
    """The places where a kernel is applied; all fields have one number per dimension of space."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    before: tuple[int, ...]  # rows of zeros in front of an image
    after: tuple[int, ...]  # and behind it; negative ones cut it

    @property
    def spans(self) -> tuple[int, ...]:
        """Pixels from the first to the last one of a patch."""
        return tuple(d * (k - 1) + 1 for k, d in zip(self.kernel, self.dilation, strict=True))

    def positions(self, sizes: Sequence[int], layer: str = "") -> tuple[int, ...]:
        """Returns how often the kernel fits into an image of these sizes; a ValueError, which names the layer, if it
        does not."""
        padded = [b + size + a for b, size, a in zip(self.before, sizes, self.after, strict=True)]
        if any(n < span for n, span in zip(padded, self.spans, strict=True)):
            where = f" of layer {layer}" if layer else ""
            raise ValueError(
                f"The kernel{where} spans {self.spans} pixels, and the padded input has {tuple(padded)}: "
                "give the layer larger images, or padding."
            )
        return tuple((n - span) // s + 1 for n, span, s in zip(padded, self.spans, self.stride, strict=True))

    def sizes(self, positions: Sequence[int]) -> tuple[int, ...]:
        """Returns the sizes of images into which the kernel fits this often."""
        padding = zip(self._used(tuple(positions)), self.before, self.after, strict=True)
        return tuple(used - before - after for used, before, after in padding)

    def dimensions(self, sizes: Sequence[int]) -> list[tuple[int, ...]]:
        """Returns of each dimension of space its size, the number of positions, and the kernel's size, stride, dilation
        and zeros before the image."""
        rows = zip(sizes, self.positions(sizes), self.kernel, self.stride, self.dilation, self.before, strict=True)
        return [*rows]

    def _used(self, positions: tuple[int, ...]) -> tuple[int, ...]:
        """Pixels of a padded image that are in any patch, or between two."""
        return tuple((o - 1) * s + span for o, s, span in zip(positions, self.stride, self.spans, strict=True))

    def covers(self, sizes: Sequence[int]) -> bool:
        """Returns whether every pixel of an image of these sizes is known to be in a patch."""
        positions = self.positions(sizes)
        within = zip(self._used(positions), self.before, sizes, strict=True)
        rows = zip(self.kernel, self.stride, self.dilation, positions, strict=True)
        return all(used >= b + n for used, b, n in within) and all(
            (s <= k and d == 1) or (s == 1 and o >= d) for k, s, d, o in rows
        )

    @property
    def numbers(self) -> list[int]:
        """All fields one after the other, as operators take them."""
        return [number for field in self for number in field]

    @classmethod
    def from_numbers(cls, numbers: Sequence[int]) -> "Window":
        n = len(numbers) // len(cls._fields)
        return cls(*(tuple(numbers[i : i + n]) for i in range(0, len(numbers), n)))

    @property
    def is_tiling(self) -> bool:
        """True if patches do not overlap: they are then at most as large as the image."""
        rows = zip(self.kernel, self.stride, self.dilation, strict=True)
        return not any((*self.before, *self.after)) and all(k == 1 or (k == s and d == 1) for k, s, d in rows)

    def tiles(self, x: Tensor) -> Tensor:
        """Rearranges a tiling as :meth:`gather` does, so that autograd finds its way through."""
        positions = self.positions(x.shape[2:])
        for dim, (o, k, s) in enumerate(zip(positions, self.kernel, self.stride, strict=True), start=2):
            if k == 1 and s > 1:
                x = x[(slice(None),) * dim + (slice(None, None, s),)]
            elif o * k < x.shape[dim]:
                x = x.narrow(dim, 0, o * k)
        x = x.movedim(1, -1)
        for dim, k in enumerate(self.kernel):
            x = x.unflatten(1 + 2 * dim, (x.shape[1 + 2 * dim] // k, k))  # type: ignore[no-untyped-call]
        n = len(self.kernel)
        return x.permute(0, *range(1, 2 * n, 2), *range(2, 2 * n + 1, 2), -1).reshape(
            len(x) * prod(positions), prod(self.kernel) * x.shape[-1]
        )

    def gather(self, x: Tensor) -> Tensor:
        """Copies patches out of images ``[N, C, *sizes]``: ``[N · positions, kernel · C]`` in the dtype of ``x``."""
        positions = self.positions(x.shape[2:])
        pixels = self._padded(x.movedim(1, -1), self._used(positions))
        for dim, (span, s, d) in enumerate(zip(self.spans, self.stride, self.dilation, strict=True), start=1):
            pixels = pixels.unfold(dim, span, s)[..., ::d]
        n = len(positions)
        patches = pixels.permute(0, *range(1, n + 1), *range(n + 2, 2 * n + 2), n + 1)  # channels last
        return patches.reshape(len(x) * prod(positions), prod(self.kernel) * x.shape[1])

    def _padded(self, pixels: Tensor, used: tuple[int, ...]) -> Tensor:
        """Adds the zeros around images: ``[N, *used, C]``, contiguous."""
        sizes = pixels.shape[1:-1]
        lengths = [min(size, u - b) for size, u, b in zip(sizes, used, self.before, strict=True)]
        inner: Any = (slice(None), *(slice(0, n) for n in lengths))
        if not any(self.before) and tuple(lengths) == used:
            return pixels[inner].contiguous()
        padded = pixels.new_zeros(len(pixels), *used, pixels.shape[-1])
        outer: Any = (slice(None), *(slice(b, b + n) for b, n in zip(self.before, lengths, strict=True)))
        padded[outer].copy_(pixels[inner])
        return padded

    def scatter(self, patches: Tensor, shape: Sequence[int]) -> Tensor:
        """Sums patches ``[N · positions, kernel · C]`` to images ``[N, C, *sizes]`` of this shape: in float32 (or
        wider) in the order of the kernel, rounded once to the dtype of patches. Channels are innermost in memory."""
        return _scatter(patches, [*shape], self.numbers)

    def sums(self, patches: Tensor, shape: Sequence[int]) -> Tensor:
        """Does :meth:`scatter` to ``[N, *sizes, C]``, contiguous."""
        images, channels, *sizes = shape
        positions = self.positions(sizes)
        if (result := add_patches(patches, images, channels, self.dimensions(sizes))) is not None:
            return result
        patches = patches.reshape(images, *positions, prod(self.kernel), channels)
        used = self._used(positions)
        sums = patches.new_zeros(images, *used, channels, dtype=torch.promote_types(patches.dtype, torch.float32))
        for i, place in enumerate(product(*map(range, self.kernel))):
            steps = zip(place, self.dilation, positions, self.stride, strict=True)
            where: Any = (slice(None), *(slice(k * d, k * d + (o - 1) * s + 1, s) for k, d, o, s in steps))
            sums[where].add_(patches.select(-2, i))
        ends = [min(b + n, u) for b, n, u in zip(self.before, sizes, used, strict=True)]
        inner: Any = (slice(None), *(slice(b, e) for b, e in zip(self.before, ends, strict=True)))
        lengths = [e - b for b, e in zip(self.before, ends, strict=True)]
        pixels = sums[inner].to(patches.dtype)
        if lengths != sizes:  # pixels at the end that no patch holds
            whole = pixels.new_zeros(images, *sizes, channels)
            whole[(slice(None), *(slice(0, n) for n in lengths))] = pixels
            pixels = whole
        return pixels.contiguous()


# Not traced: the compiler may drop the rounding of sums.
@opaque(lambda patches, shape, window: patches.new_empty((shape[0], *shape[2:], shape[1])).movedim(-1, 1))
def _scatter(patches: Tensor, shape: list[int], window: list[int]) -> Tensor:
    return Window.from_numbers(window).sums(patches, shape).movedim(-1, 1)


class Pixels(NamedTuple):
    """The shape ``[N, C, *sizes]`` of images whose pixels are the rows of a matrix ``[N · sizes, C]``, and a window."""

    window: Window
    shape: torch.Size

    @property
    def numbers(self) -> list[int]:
        """The shape and the window's numbers, as operators take them."""
        return [*self.shape, *self.window.numbers]

    @classmethod
    def from_numbers(cls, numbers: Sequence[int]) -> "Pixels":
        n = 2 + (len(numbers) - 2) // (1 + len(Window._fields))  # dimensions of images
        return cls(Window.from_numbers(numbers[n:]), torch.Size(numbers[:n]))

    @property
    def matrix_shape(self) -> torch.Size:
        images, channels, *sizes = self.shape
        return torch.Size([images * prod(sizes), channels])

    @property
    def patches_shape(self) -> torch.Size:
        images, channels, *sizes = self.shape
        positions = self.window.positions(sizes)
        return torch.Size([images * prod(positions), prod(self.window.kernel) * channels])

    @property
    def dimensions(self) -> list[tuple[int, ...]]:
        return self.window.dimensions(self.shape[2:])

    def gather(self, pixels: Tensor) -> Tensor:
        """Copies the patches out of pixels, as :meth:`Window.gather` does."""
        images, channels, *sizes = self.shape
        return self.window.gather(pixels.reshape(images, *sizes, channels).movedim(-1, 1))
