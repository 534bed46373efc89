// Images from patches: each pixel is the sum over the patches that hold it, in the order of the kernel.

#include <vector>

#include "lanes.h"

namespace {

// One dimension of space: how many pixels and positions, and the kernel's size, stride, dilation and first zeros.
struct Dimension {
    int64_t size, positions, kernel, stride, dilation, before;
};

// A place of the kernel that covers a pixel, and the position at which it does.
struct Place {
    int64_t in_kernel, position;
};

std::vector<std::vector<Place>> places_of(const Dimension &d) {
    std::vector<std::vector<Place>> places(d.size);
    for (int64_t pixel = 0; pixel < d.size; pixel++)
        for (int64_t k = 0; k < d.kernel; k++) {
            int64_t first = pixel + d.before - k * d.dilation;
            if (first >= 0 && first % d.stride == 0 && first / d.stride < d.positions)
                places[pixel].push_back({k, first / d.stride});
        }
    return places;
}

template <class T>
void add_patches(const T *patches, T *images, int64_t count, int64_t channels, const Dimension *d, int threads) {
    const std::vector<std::vector<Place>> places[3] = {places_of(d[0]), places_of(d[1]), places_of(d[2])};
    int64_t rows = count * d[0].size * d[1].size, kernel = d[0].kernel * d[1].kernel * d[2].kernel;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows * d[2].size * channels > 8192)
    for (int64_t row = 0; row < rows; row++) {
        int64_t image = row / (d[0].size * d[1].size);
        const std::vector<Place> &deep = places[0][row / d[1].size % d[0].size], &high = places[1][row % d[1].size];
        for (int64_t x = 0; x < d[2].size; x++)
            for (int64_t c = 0; c < channels; c += kLanes) {
                int width = int(channels - c < kLanes ? channels - c : kLanes);
                F32 sum = all(0.0f);
                for (const Place &a : deep)
                    for (const Place &b : high) {
                        int64_t before = (image * d[0].positions + a.position) * d[1].positions + b.position;
                        int64_t first = (a.in_kernel * d[1].kernel + b.in_kernel) * d[2].kernel;
                        for (const Place &e : places[2][x]) {
                            int64_t patch = before * d[2].positions + e.position;
                            sum = sum + load(patches + (patch * kernel + first + e.in_kernel) * channels + c, width);
                        }
                    }
                store(images + (row * d[2].size + x) * channels + c, sum, width);
            }
    }
}

}  // namespace

// Channels are innermost in both. Dtypes: 0 float, 1 bfloat16. ``dimensions`` are three.
EXPORT void lowbit_add_patches(const void *patches, int32_t dtype, void *images, int64_t count, int64_t channels,
                               const void *dimensions, int32_t threads) {
    const Dimension *d = (const Dimension *)dimensions;
    if (dtype == 0)
        add_patches((const float *)patches, (float *)images, count, channels, d, threads);
    else
        add_patches((const BF16 *)patches, (BF16 *)images, count, channels, d, threads);
}
