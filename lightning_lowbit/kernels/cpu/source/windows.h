// Patches of images, channels innermost: each has a pixel, or a zero outside of the image, for each place of a kernel.
#pragma once

#include <cstdint>

// One dimension of space: how many pixels and positions, and the kernel's size, stride, dilation and first zeros.
struct Dimension {
    int64_t size, positions, kernel, stride, dilation, before;

    // The pixel of a position at a place of the kernel; -1 outside of the image.
    int64_t pixel(int64_t position, int64_t place) const {
        const int64_t at = position * stride + place * dilation - before;
        return at < size ? at : -1;
    }
};

struct Window {
    Dimension space[3];
    int64_t images;

    int64_t pixels() const { return images * space[0].size * space[1].size * space[2].size; }
    int64_t positions() const { return images * space[0].positions * space[1].positions * space[2].positions; }
    int64_t places() const { return space[0].kernel * space[1].kernel * space[2].kernel; }
};

// Writes the pixel of each patch at one place of the kernel; `none` outside of the image.
inline void write_pixels(const Window &window, int64_t place, int32_t none, int32_t *target) {
    const auto &[deep, high, wide] = window.space;
    const int64_t a = place / (high.kernel * wide.kernel), b = place / wide.kernel % high.kernel, c = place % wide.kernel;
    for (int64_t image = 0; image < window.images; image++)
        for (int64_t i = 0; i < deep.positions; i++)
            for (int64_t j = 0; j < high.positions; j++) {
                const int64_t z = deep.pixel(i, a), y = high.pixel(j, b);
                const int64_t first = ((image * deep.size + z) * high.size + y) * wide.size;
                for (int64_t k = 0; k < wide.positions; k++) {
                    const int64_t x = wide.pixel(k, c);
                    *target++ = z < 0 || y < 0 || x < 0 ? none : int32_t(first + x);
                }
            }
}
