// Images from patches: each pixel is the sum over the patches that hold it, in the order of the kernel.

#include <vector>

#include "lanes.h"
#include "windows.h"

namespace {

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

// Adds the patches of one row of pixels after the other. `places` are those of a pixel, in the order of the kernel.
template <class T>
void add_patches(const T *patches, T *images, int64_t channels, const Window &window, int threads) {
    const auto &[deep, high, wide] = window.space;
    const std::vector<std::vector<Place>> places[3] = {places_of(deep), places_of(high), places_of(wide)};
    const int64_t rows = window.images * deep.size * high.size, kernel = window.places();
#pragma omp parallel num_threads(threads) if (threads > 1 && rows * wide.size * channels > 8192)
    {
        std::vector<const T *> sources;
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++) {
            const int64_t image = row / (deep.size * high.size);
            for (int64_t x = 0; x < wide.size; x++) {
                sources.clear();
                for (const Place &a : places[0][row / high.size % deep.size])
                    for (const Place &b : places[1][row % high.size])
                        for (const Place &c : places[2][x]) {
                            const int64_t line = (image * deep.positions + a.position) * high.positions + b.position;
                            const int64_t place = (a.in_kernel * high.kernel + b.in_kernel) * wide.kernel + c.in_kernel;
                            sources.push_back(patches + ((line * wide.positions + c.position) * kernel + place) * channels);
                        }
                T *target = images + (row * wide.size + x) * channels;
                for (int64_t at = 0; at < channels; at += kLanes) {
                    const int width = int(channels - at < kLanes ? channels - at : kLanes);
                    F32 sum = all(0.0f);
                    for (const T *source : sources) sum = sum + load(source + at, width);
                    store(target + at, sum, width);
                }
            }
        }
    }
}

}  // namespace

// Channels are innermost in both. Dtypes: 0 float, 1 bfloat16.
EXPORT void lowbit_add_patches(const void *patches, int32_t dtype, void *images, int64_t channels, const Window *window,
                               int32_t threads) {
    if (dtype == 0)
        add_patches((const float *)patches, (float *)images, channels, *window, threads);
    else
        add_patches((const BF16 *)patches, (BF16 *)images, channels, *window, threads);
}
