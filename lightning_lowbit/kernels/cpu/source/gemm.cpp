// GEMMs of codes with scales of blocks: what an FP4 tensor core computes.
//
// The products of a block are summed exactly, as integers; the sum is multiplied by the scale of the right operand and then
// added, times that of the left one, in one rounding. Blocks come in their order, whatever the CPU and its threads: all give
// the same bits. Factors of the operands and the bias come last, and the result is rounded once to its type.

#include <vector>

#include "rotation.h"
#include "rounding.h"
#include "tiles.h"
#include "windows.h"

struct Codes;
extern "C" void lowbit_cast(const void *, int64_t, int64_t, const CastNumbers *, void *, float *, const int64_t *,
                            const float *, const Rotation *, const int32_t *, const Codes *, const Panels *, int32_t);
void unpack_to_panels(const void *source, int64_t rows, int64_t columns, const Codes &codes, const CastNumbers &numbers,
                      const Panels &panels, int threads);

// An operand: the matrix [rows, columns] to cast to panels in memory of this thread, with the arguments of lowbit_cast; or
// the codes to unpack, unless `packed` is null. `factors` is null where the cast makes them.
struct GemmOperand {
    Panels panels;
    float *factors;
    const void *matrix;
    int64_t rows, columns;
    const CastNumbers *numbers;
    const int64_t *key;
    const float *amax;
    const Rotation *rotation;
    const int32_t *place;
    const Codes *packed;
    const Window *window;  // whose patches are the rows, where the matrix has the pixels; null for none
    int32_t factor_count;  // none, one, or one for each row of the panels
    float step;            // of which elements are multiples
    int32_t is_grouped, rotates_apart;  // in a stack: whether it is the rows of groups, and has signs for each product

    int32_t largest() const { return int32_t(numbers->element.max / step); }  // of its codes
    F32 factors_from(int64_t row, int count) const { return factor_count > 1 ? load(factors + row, count) : all(*factors); }
};

// The result and what is added to it.
struct GemmResult {
    void *values;  // [rows of left, rows of right], 0 float, 1 bfloat16, 2 float whose numbers are bfloat16's
    const void *bias;
    int32_t dtype, bias_dtype;
};

// Products that one call computes. Of each operand they take the matrices of a stack [products, rows, columns] or, grouped,
// the rows of one matrix from the end of the product before to their own; one amax, and a key for each.
struct GemmStack {
    const int64_t *ends;
    int64_t products;

    int64_t start(int64_t product) const { return product ? ends[product - 1] : 0; }
    int64_t size(int64_t product) const { return ends[product] - start(product); }
};

namespace {

constexpr int64_t kPanelsAtOnce = 4;  // of the left operand, which stay in a cache
constexpr int64_t kSlice = 128;       // groups of k whose codes do

template <class T>
T *memory(size_t count, int which) {
    static thread_local std::vector<T> buffers[4];
    if (buffers[which].size() < count) buffers[which].resize(count);
    return buffers[which].data();
}

// What comes after the sums of some panels' columns: factors and the bias, and the rounding to the type of the result.
template <int kPanels>
struct Finish {
    static constexpr int kColumns = kPanels * kVectors;
    const GemmOperand &left;
    void *values;
    int64_t columns, first;
    int32_t dtype;
    float unit;
    F32 factors[kColumns], bias[kColumns];

    Finish(const GemmOperand &left, const GemmOperand &right, const GemmResult &result, int64_t panel)
        : left(left), values(result.values), columns(right.panels.rows), first(panel * kRows), dtype(result.dtype),
          unit(left.step * right.step) {
        for (int i = 0; i < kColumns; i++) {
            const int64_t column = first + i * kLanes;
            factors[i] = all(1.0f), bias[i] = all(-0.0f);  // which change no number, not even 0
            if (count(i) <= 0) continue;
            if (right.factor_count) factors[i] = right.factors_from(column, count(i));
            if (result.bias && result.bias_dtype == 0) bias[i] = load((const float *)result.bias + column, count(i));
            if (result.bias && result.bias_dtype == 1) bias[i] = load((const BF16 *)result.bias + column, count(i));
        }
    }
    int count(int i) const {  // of lanes
        return int(std::min<int64_t>(columns - first - i * kLanes, kLanes));
    }
    void put(int64_t row, int64_t rows, const F32 (&sums)[kTileRows][kColumns]) const {
        auto as_is = [](F32 value) INLINE { return value; };
        if (dtype == 0) write<float>(row, rows, sums, as_is);
        if (dtype == 1) write<BF16>(row, rows, sums, as_is);
        if (dtype == 2) write<float>(row, rows, sums, [](F32 value) INLINE { return widen(narrow(value)); });
    }
    template <class Out, class Round>
    void write(int64_t row, int64_t rows, const F32 (&sums)[kTileRows][kColumns], Round round) const {
        const bool is_whole = count(kColumns - 1) == kLanes;
        const float one = 1.0f, *factor = left.factor_count ? left.factors : &one;
        const int64_t step = left.factor_count > 1, stride = columns;
        Out *target = (Out *)values + row * stride + first;
        factor += row * step;
        for (int64_t r = 0; r < rows; r++, factor += step, target += stride)
            for (int i = 0; i < kColumns; i++) {
                const F32 value = round(sums[r][i] * unit * all(*factor) * factors[i] + bias[i]);
                if (is_whole)
                    store(target + i * kLanes, value);
                else if (count(i) > 0)
                    store(target + i * kLanes, value, count(i));
            }
    }
};

// How both operands pass along k: `step` groups share scales of both, and a slice is what tiles take of all their rows before
// the next one; with pixels, a place of the kernel.
struct Path {
    int64_t groups, step, slice;
    bool are_alike;  // whether all blocks of both operands have `step` groups, whose products Dots hold

    Path(const GemmOperand &left, const GemmOperand &right, int64_t most) : groups(right.panels.groups()) {
        const int64_t above = left.panels.block / kGroup, beside = right.panels.block / kGroup;
        step = above && beside ? std::min(above, beside) : above || beside ? above + beside : groups;
        slice = left.window ? left.panels.groups() : kSlice % std::max({above, beside, step}) ? groups : kSlice;
        are_alike = above && above == beside && slice % above == 0 && groups % above == 0 && above <= most;
        are_alike &= above != 1 || right.numbers->exact;  // so that kShift * scale is, too
    }
};

// The left operand as tiles read it.
struct LeftRows {
    const Panels &panels;
    int64_t count;
    const int32_t *pixels;  // that are its rows, for each place of a window's kernel; null where the panels have them

    int64_t panel_count() const { return (count + kRows - 1) / kRows; }
};

// The right operand as tiles read it.
struct RightRows {
    const Panels &panels;
    const int32_t *starts;  // of its blocks, each in the place of its first group
    int64_t most;  // groups whose products Dots hold
};

// A slice of the left operand.
struct Slice {
    Reader reader;
    const int32_t *pixels;
    int64_t groups;
    bool continues;  // the sums of another one

    Slice(const LeftRows &left, int64_t begin, int64_t groups)
        : reader(left.panels, left.pixels ? 0 : begin), groups(groups), continues(begin > 0) {
        pixels = left.pixels ? left.pixels + begin / groups * left.panel_count() * kRows : nullptr;
    }

    // Adds the products to the sums of a tile.
    template <int kStep, int kPanels>
    void add(int64_t row, const Columns<kPanels> &right, int64_t step, int64_t most,
             F32 (&sums)[kTileRows][kPanels * kVectors]) const {
        if (!pixels) return add_groups<kStep>(Neighbors{reader.from(row)}, right, groups, step, most, continues, sums);
        Scattered rows;
        for (int r = 0; r < kTileRows; r++) {
            const Reader pixel = reader.from(pixels[row + r]);
            rows.codes[r] = pixel.codes, rows.scales[r] = pixel.scales;
        }
        add_groups<kStep>(rows, right, groups, step, most, continues, sums);
    }
};

// The product of some panels of the left operand with kPanels of the right one, slice by slice of k.
template <int kPanels>
void multiply_panels(const LeftRows &left, const Finish<kPanels> &finish, const RightRows &right, const Path &path,
                     int64_t first, int64_t last, int64_t panel) {
    const int64_t step = path.are_alike ? path.step : 0;
    const auto add = step == 1   ? &Slice::add<1, kPanels>
                     : step == 2 ? &Slice::add<2, kPanels>
                     : step == 8 ? &Slice::add<8, kPanels>
                                 : &Slice::add<0, kPanels>;
    F32 sums[kPanelsAtOnce * kRows / kTileRows][kTileRows][kPanels * kVectors];
    for (int64_t begin = 0; begin < path.groups; begin += path.slice) {
        const Slice rows(left, begin, std::min(path.slice, path.groups - begin));
        const Columns<kPanels> columns(right.panels, right.starts, panel, begin);
        auto *tile = sums;
        for (int64_t row = first * kRows; row < std::min(last * kRows, left.count); row += kTileRows, tile++) {
            (rows.*add)(row, columns, path.step, right.most, *tile);
            if (begin + rows.groups == path.groups)
                finish.put(row, std::min<int64_t>(kTileRows, left.count - row), *tile);
        }
    }
}

// Writes the panels of an operand; of the pixels of a window with a row of zeros behind them.
void prepare(GemmOperand &operand, int which, int threads) {
    Panels space = operand.panels;
    space.rows += operand.window != nullptr;
    operand.panels.codes = memory<int8_t>(space.code_bytes(), which);
    operand.panels.scales = memory<float>(space.scale_count(), which);
    if (operand.packed)
        return unpack_to_panels(operand.matrix, operand.rows, operand.columns, *operand.packed, *operand.numbers,
                                operand.panels, threads);
    if (operand.factor_count) operand.factors = memory<float>(operand.factor_count, 2 + which);
    lowbit_cast(operand.matrix, operand.rows, operand.columns, operand.numbers, nullptr, operand.factors,
                operand.key, operand.amax, operand.rotation, operand.place, nullptr, &operand.panels, threads);
    if (!operand.window) return;
    const int64_t last = operand.panels.rows++;
    for (int64_t k = 0; k < operand.panels.inner; k += kWords)
        memset(operand.panels.word(last, k), operand.panels.offset, kWords);
    for (int64_t block = 0; block < operand.panels.blocks(); block++) *operand.panels.scale(last, block) = 0;
}

int64_t bytes_of(int32_t dtype) { return dtype == 1 ? sizeof(BF16) : sizeof(float); }

// Writes the pixels of a window, for each place of its kernel those of `stride` rows.
const int32_t *pixels_of(const Window &window, int64_t stride, int threads) {
    int32_t *pixels = memory<int32_t>(window.places() * stride, 3);
    const int64_t rows = window.positions();
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t place = 0; place < window.places(); place++) {
        write_pixels(window, place, int32_t(window.pixels()), pixels + place * stride);
        std::fill(pixels + place * stride + rows, pixels + (place + 1) * stride, 0);
    }
    return pixels;
}

void multiply(GemmOperand &left, GemmOperand &right, const GemmResult &result, int threads) {
    left.panels.offset = kHasOffset ? left.largest() + 1 : 0;  // below zero some codes reach one step further
    prepare(left, 0, threads);
    prepare(right, 1, threads);
    const int64_t largest = int64_t(left.largest() + left.panels.offset) * (right.largest() + 1);
    const int64_t most = std::min(kMostOfDots / (kProducts * largest), kGroupsAtOnce);
    const Path path(left, right, most);
    int32_t *starts = memory<int32_t>(right.panels.panels() * right.panels.groups() * kRows, 2);
    if (kHasOffset) offsets_of(right.panels, left.panels.offset, path.step, path.slice, starts, threads);
    const RightRows columns = {right.panels, starts, most};
    LeftRows rows = {left.panels, left.panels.rows, nullptr};
    if (left.window) {
        rows.count = left.window->positions();
        rows.pixels = pixels_of(*left.window, rows.panel_count() * kRows, threads);
    }
    const int64_t down = (rows.panel_count() + kPanelsAtOnce - 1) / kPanelsAtOnce;
    const int64_t across = (right.panels.panels() + kTilePanels - 1) / kTilePanels;
    const int64_t work = rows.count * right.panels.rows * right.panels.inner;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && work > 1 << 16)
    for (int64_t part = 0; part < down * across; part++) {
        const int64_t first = part / across * kPanelsAtOnce, last = std::min(first + kPanelsAtOnce, rows.panel_count());
        const int64_t panel = part % across * kTilePanels;
        if (panel + kTilePanels <= right.panels.panels())
            multiply_panels<kTilePanels>(rows, {left, right, result, panel}, columns, path, first, last, panel);
        else
            multiply_panels<1>(rows, {left, right, result, panel}, columns, path, first, last, panel);
    }
}

// The operand of one product of a stack.
struct Part : GemmOperand {
    Rotation apart;

    Part(const GemmOperand &whole, const GemmStack &stack, int64_t product) : GemmOperand(whole) {
        const int64_t first = is_grouped ? stack.start(product) : product * rows;
        matrix = (const char *)matrix + first * columns * bytes_of(numbers->input);
        if (key) key += product;
        if (is_grouped) {
            rows = stack.size(product);
            if (panels.dim && factor_count > 1) factor_count = int32_t(rows);
            (panels.dim ? panels.rows : panels.inner) = rotation && !panels.dim ? rotation->whole(rows) : rows;
        }
        if (!rotates_apart) return;
        apart = *rotation;
        apart.signs += product * apart.size;
        rotation = &apart;
    }
    Part(const Part &) = delete;
};

// One product of a stack: its rows of the result, or its matrix.
void multiply_part(const GemmOperand &left, const GemmOperand &right, const GemmResult &result, const GemmStack &stack,
                   int64_t product, int threads) {
    Part above(left, stack, product), beside(right, stack, product);
    const int64_t rows = above.panels.rows, columns = beside.panels.rows, bytes = bytes_of(result.dtype);
    const int64_t first = left.panels.dim ? stack.start(product) : product * rows;
    GemmResult part = result;
    part.values = (char *)result.values + first * columns * bytes;
    if (result.bias) part.bias = (const char *)result.bias + product * columns * bytes_of(result.bias_dtype);
    if (above.panels.inner == 0)
        memset(part.values, 0, rows * columns * bytes);
    else if (rows)
        multiply(above, beside, part, threads);
}

}  // namespace

// Multiplies two operands, or with a stack those of its products: all threads share one that has more than a thread's share
// of the rows, and take the others whole.
EXPORT void lowbit_gemm(GemmOperand *left, GemmOperand *right, const GemmResult *result, const GemmStack *stack,
                        int32_t threads) {
    if (!stack) return multiply(*left, *right, *result, threads);
    const int64_t products = stack->products, all_rows = stack->ends[products - 1];
    auto is_shared = [&](int64_t product) { return stack->size(product) * threads > all_rows; };
    for (int64_t product = 0; product < products; product++)
        if (is_shared(product)) multiply_part(*left, *right, *result, *stack, product, threads);
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1)
    for (int64_t product = 0; product < products; product++)
        if (!is_shared(product)) multiply_part(*left, *right, *result, *stack, product, 1);
}

// The instructions that multiply bytes, an Instructions.
EXPORT void lowbit_instructions(int32_t *instructions) { *instructions = kInstructions; }
