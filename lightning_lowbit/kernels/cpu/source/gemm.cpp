// GEMMs of codes with scales of blocks: what an FP4 tensor core computes.
//
// The products of a block are summed exactly, as integers; the sum is multiplied by the scale of the right operand and then
// added, times that of the left one, in one rounding. Blocks come in their order, whatever the CPU and its threads: all give
// the same bits. Factors of the operands and the bias come last, and the result is rounded once to its type.

#include <algorithm>
#include <vector>

#include "dots.h"
#include "rotation.h"
#include "rounding.h"

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
    int32_t factor_count;  // none, one, or one for each row of the panels
    float step;            // of which elements are multiples
    int32_t is_grouped, rotates_apart;  // in a stack: whether it is the rows of groups, and has signs for each product

    float factor(int64_t row) const { return factors[factor_count > 1 ? row : 0]; }
    F32 factors_from(int64_t row, int count) const { return factor_count > 1 ? load(factors + row, count) : all(*factors); }
};

// The result and what is added to it.
struct GemmResult {
    void *values;  // [rows of left, rows of right], 0 float, 1 bfloat16
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

// Vectors of a panel's rows; rows and panels of a tile, whose sums fit the registers.
constexpr int kVectors = kRows / kLanes;
constexpr int kTileRows = kLanes == 8 ? 8 : 4, kTilePanels = kLanes == 16 ? 2 : 1;
constexpr int64_t kPanelsAtOnce = 4;  // of the left operand, which stay in a cache

template <class T>
T *memory(size_t count, int which) {
    static thread_local std::vector<T> buffers[4];
    if (buffers[which].size() < count) buffers[which].resize(count);
    return buffers[which].data();
}

// Where no scales are, they are 1.
struct ScaleReader {
    const float *scales;
    int64_t groups;  // of a scale

    template <bool kSingle>
    const float *at(int64_t group) const {
        static const float ones[kRows] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
        if (kSingle) return scales + group * kRows;
        return scales ? scales + group / groups * kRows : ones;
    }
};

// What the products of a block add to a sum.
inline F32 scaled(I32 products, F32 right, float left, F32 sum) {
    return fused_multiply_add(__builtin_convertvector(products, F32) * right, all(left), sum);
}

// One operand in panels from a panel on.
struct Reader {
    const int8_t *codes;
    ScaleReader scales;

    Reader(const Panels &panels, int64_t panel)
        : codes(panels.codes + panel * panels.groups() * kRows * kGroup),
          scales{panels.block ? panels.scales + panel * panels.blocks() * kRows : nullptr, panels.block / kGroup} {}
};

// The sums of kTileRows rows, from `row` of a panel on, and kPanels panels. `starts` are of the rows' groups, and `step`
// the groups that share scales: one, of both operands, where kSingle.
template <int kPanels, bool kSingle>
void multiply_tile(const Reader &left, const int32_t *starts, int64_t row, const Reader *right, int64_t groups,
                   int64_t step, F32 (&result)[kTileRows][kPanels * kVectors]) {
    constexpr int kColumns = kPanels * kVectors;
    F32 sums[kTileRows][kColumns] = {};  // in registers
    I32 whole[kTileRows][kColumns] = {};
    for (int64_t first = 0; first < groups; first += kSingle ? 1 : step) {
        const int64_t end = kSingle ? first + 1 : std::min(first + step, groups);
        F32 scales[kColumns];
        for (int column = 0; column < kColumns; column++) {
            const ScaleReader &reader = right[column / kVectors].scales;
            scales[column] = load(reader.at<kSingle>(first) + column % kVectors * kLanes);
        }
        const float *left_scales = left.scales.at<kSingle>(first) + row;
#pragma GCC unroll 2
        for (int64_t group = first; group < end; group++) {
            S8 words[kColumns][kWords];
            for (int column = 0; column < kColumns; column++)
                for (int i = 0; i < kWords; i++)
                    words[column][i] = read<S8>(right[column / kVectors].codes + (group * kWords + i) * kWordStride +
                                                  column % kVectors * kLanes * kWords);
            for (int r = 0; r < kTileRows; r++) {
                S8 repeated[kWords];
                for (int i = 0; i < kWords; i++)
                    repeated[i] = repeat_word(left.codes + (group * kWords + i) * kWordStride + (row + r) * kWords);
                const I32 start = all_integers(starts[group * kRows + row + r]);
                for (int column = 0; column < kColumns; column++) {
                    const I32 sum = add_dots(kSingle ? start : whole[r][column] + start, repeated, words[column]);
                    if (kSingle)
                        sums[r][column] = scaled(sum, scales[column], left_scales[r], sums[r][column]);
                    else
                        whole[r][column] = sum;
                }
            }
        }
        for (int r = 0; !kSingle && r < kTileRows; r++)
            for (int column = 0; column < kColumns; column++) {
                sums[r][column] = scaled(whole[r][column], scales[column], left_scales[r], sums[r][column]);
                whole[r][column] = I32{};
            }
    }
    memcpy(result, sums, sizeof sums);
}

// What the offset of the right operand adds to the sums of each group and row, negated.
void offsets_of(const Panels &panels, int32_t *starts, int threads) {
    const int64_t groups = panels.groups() * panels.panels();
    const S8 ones[kWords] = {S8{} + 1, S8{} + 1, S8{} + 1, S8{} + 1};
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && groups > 512)
    for (int64_t group = 0; group < groups; group++)
        for (int row = 0; row < kRows; row += kLanes) {
            S8 words[kWords];
            for (int i = 0; i < kWords; i++)
                words[i] = read<S8>(panels.codes + (group * kWords + i) * kWordStride + row * kWords);
            I32 sums = add_dots(I32{}, words, ones) * -kOffset;
            memcpy(starts + group * kRows + row, &sums, sizeof sums);
        }
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
    bool has_factors, has_bias;
    F32 factors[kColumns], bias[kColumns];

    Finish(const GemmOperand &left, const GemmOperand &right, const GemmResult &result, int64_t panel)
        : left(left), values(result.values), columns(right.panels.rows), first(panel * kRows), dtype(result.dtype),
          unit(left.step * right.step), has_factors(right.factor_count), has_bias(result.bias) {
        for (int i = 0; i < kColumns && count(i) > 0; i++) {
            int64_t column = first + i * kLanes;
            if (has_factors) factors[i] = right.factors_from(column, count(i));
            if (has_bias && result.bias_dtype == 0) bias[i] = load((const float *)result.bias + column, count(i));
            if (has_bias && result.bias_dtype == 1) bias[i] = load((const BF16 *)result.bias + column, count(i));
        }
    }
    int count(int i) const {  // of lanes
        return int(std::min<int64_t>(columns - first - i * kLanes, kLanes));
    }
    void put(int64_t row, const F32 (&sums)[kColumns]) const {
        for (int i = 0; i < kColumns && count(i) > 0; i++) {
            F32 value = sums[i] * unit;
            if (left.factor_count) value = value * left.factor(row);
            if (has_factors) value = value * factors[i];
            if (has_bias) value = value + bias[i];
            int64_t place = row * columns + first + i * kLanes;
            if (dtype == 0)
                store((float *)values + place, value, count(i));
            else
                store((BF16 *)values + place, value, count(i));
        }
    }
};

// The product of some panels of the left operand with kPanels of the right one.
template <int kPanels>
void multiply_panels(const GemmOperand &left, const GemmOperand &right, const GemmResult &result, const int32_t *starts,
                     int64_t first, int64_t last, int64_t panel) {
    const Panels &above = left.panels, &beside = right.panels;
    const int64_t groups = above.groups();
    const int64_t step = above.block && beside.block   ? std::min(above.block, beside.block) / kGroup
                         : above.block || beside.block ? std::max(above.block, beside.block) / kGroup
                                                       : groups;
    const bool is_single = above.block == kGroup && beside.block == kGroup;
    const Reader columns[2] = {{beside, panel}, {beside, panel + kPanels - 1}};
    const Finish<kPanels> finish(left, right, result, panel);
    for (int64_t at = first; at < last; at++) {
        const Reader rows(above, at);
        for (int64_t row = 0; row < kRows && at * kRows + row < above.rows; row += kTileRows) {
            F32 sums[kTileRows][kPanels * kVectors];
            (is_single ? multiply_tile<kPanels, true> : multiply_tile<kPanels, false>)(
                rows, starts + at * groups * kRows, row, columns, groups, step, sums);
            for (int r = 0; r < kTileRows && at * kRows + row + r < above.rows; r++)
                finish.put(at * kRows + row + r, sums[r]);
        }
    }
}

// Writes the panels of an operand.
void prepare(GemmOperand &operand, int which, int threads) {
    operand.panels.codes = memory<int8_t>(operand.panels.code_bytes(), which);
    operand.panels.scales = memory<float>(operand.panels.scale_count(), which);
    if (operand.packed)
        return unpack_to_panels(operand.matrix, operand.rows, operand.columns, *operand.packed, *operand.numbers,
                                operand.panels, threads);
    if (operand.factor_count) operand.factors = memory<float>(operand.factor_count, 2 + which);
    lowbit_cast(operand.matrix, operand.rows, operand.columns, operand.numbers, nullptr, operand.factors,
                operand.key, operand.amax, operand.rotation, operand.place, nullptr, &operand.panels, threads);
}

int64_t bytes_of(int32_t dtype) { return dtype == 1 ? sizeof(BF16) : sizeof(float); }

void multiply(GemmOperand &left, GemmOperand &right, const GemmResult &result, int threads) {
    prepare(left, 0, threads);
    right.panels.offset = kOffset;
    prepare(right, 1, threads);
    const Panels &rows = left.panels, &columns = right.panels;
    int32_t *starts = memory<int32_t>(rows.panels() * rows.groups() * kRows, 2);
    offsets_of(rows, starts, threads);
    const int64_t down = (rows.panels() + kPanelsAtOnce - 1) / kPanelsAtOnce;
    const int64_t across = (columns.panels() + kTilePanels - 1) / kTilePanels;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows.rows * columns.rows * rows.inner > 1 << 16)
    for (int64_t part = 0; part < down * across; part++) {
        int64_t first = part / across * kPanelsAtOnce, last = std::min(first + kPanelsAtOnce, rows.panels());
        int64_t panel = part % across * kTilePanels;
        (panel + kTilePanels <= columns.panels() ? multiply_panels<kTilePanels> : multiply_panels<1>)(
            left, right, result, starts, first, last, panel);
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
