// The passes of an optimizer's step over the elements of all shards of a batch; optim/passes.py has them in plain torch.
//
//   measure    max|g| and sum of g^2                                  of chunks
//   squares    sum of (clip(g) / unit)^2, and how many elements changed
//   update     the same where nothing needed it before; then g <- factor * clip(g)
//              mean <- mean + w1 * (g - mean);   square <- square + w2 * (g^2 - square)
//              p <- p * (1 - decay) - rate * mean / (sqrt(square) + eps)
//   clipped    factor * clip(g)                                       into another tensor
//
// Each is one call. Its work is cut into chunks of one size, whatever the number of threads, and sums of chunks are added
// in their order: results do not depend on the threads.

#include "shards.h"

// What a step does with the shards: arrays with one entry for each, null where a pass does not read them.
struct Decision {
    const uint8_t *taken;
    const float *limit, *ratio;  // AdaClip: above `limit`, g * ratio. SpikeClip: g^2 is at most limit * square
    const float *unit, *factor, *weight1, *weight2, *rate, *decay, *old_scale, *new_scale;
    const int64_t *steps, *steps_since_reset;
    double eps;
    int64_t rule, decays;
};

namespace {

// Whether the rule for elements needs the second moments.
bool clips_by_square(const Shard &s, const Decision &decision, int64_t i) {
    return decision.rule == kSpikeClip && s.mean_square && decision.limit[i] < INFINITY;
}

float limit_of(const Decision &decision, int64_t i) { return decision.rule == kAdaClip ? decision.limit[i] : INFINITY; }
float ada_clip(float g, float limit, float ratio) { return std::fabs(g) > limit ? g * ratio : g; }

// Loads the gradient of a block; SpikeClip is applied. Returns how many elements that changed.
int load_gradient(const Shard &s, const Decision &decision, int64_t i, const Block &b, Work &work) {
    float *buffer = work.buffers[0];
    if (s.gradient_kind == kNothing) {
        std::fill_n(work.gradient = buffer, kBlock, 0.0f);
    } else {
        of_kind(s.gradient_kind, s.gradient,
                [&](auto *values) { work.gradient = gather(b, values, work.picks, buffer); });
    }
    if (!clips_by_square(s, decision, i)) return 0;
    const float *g = work.gradient, multiple = decision.limit[i], *square = load_squares(s, b, work.buffers[2]);
    int near = 0, changed = 0;  // spikes are rare: roots are taken where some square is near its limit
    for (int k = 0; k < b.count; k++) near |= (square[k] > 0) & (g[k] * g[k] >= square[k] * multiple * 0.9999f);
    if (!near) return 0;
    for (int k = 0; k < b.count; k++) {
        float limit = std::sqrt(square[k] > 0 ? square[k] * multiple : INFINITY);
        float value = g[k] > limit ? limit : g[k] < -limit ? -limit : g[k];
        changed += value != g[k];
        buffer[k] = value;
    }
    work.gradient = buffer;
    return changed;
}

// Adds the sum of (AdaClip(g) / unit)^2 of a block's gradient, and how many elements that changed.
void add_squares(const Decision &decision, int64_t i, const Block &b, const Work &work, double *result) {
    const float unit = decision.unit[i], limit = limit_of(decision, i), ratio = decision.ratio[i];
    F32 sums[16 / kLanes] = {};
    I32 changed = {};
    for_lanes(b.count, [&](int64_t k, int lanes) {
        F32 g = load(work.gradient + k, lanes);
        I32 is_above = magnitude(g) > limit;  // -1 where it is
        F32 value = (is_above ? g * ratio : g) / unit;
        changed -= is_above;
        sums[k % 16 / kLanes] += value * value;
    });
    float total = 0;
    for (F32 sum : sums)
        for (int lane = 0; lane < kLanes; lane++) total += sum[lane];
    result[0] += total;
    for (int lane = 0; lane < kLanes; lane++) result[1] += changed[lane];
}

// AdaClip, the factor and Adam.
struct Adam {
    float limit, ratio, factor, weight1, weight2, rate, eps, remainder;

    Adam(const Decision &decision, int64_t i, float decay)
        : limit(limit_of(decision, i)), ratio(decision.ratio[i]), factor(decision.factor[i]), weight1(decision.weight1[i]),
          weight2(decision.weight2[i]), rate(decision.rate[i]), eps((float)decision.eps), remainder(1 - decay) {}

    // Exact at weights of 0 and 1.
    static F32 lerp(F32 old, F32 value, float weight) {
        const bool is_near = weight < 0.5f;
        return multiply_add(all(is_near ? weight : weight - 1), value - old, is_near ? old : value);
    }

    // Returns the next weights, and changes the moments.
    F32 step(F32 gradient, F32 weights, F32 &mean, F32 &square) const {
        F32 g = (magnitude(gradient) > limit ? gradient * ratio : gradient) * factor;
        mean = lerp(mean, g, weight1);
        square = lerp(square, g * g, weight2);
        return weights * remainder - mean / (square_root(square) + eps) * rate;
    }
};

void update_in_fp32(const Shard &s, Adam adam, const Block &b, Work &work) {
    const float *const gradient = work.gradient;
    float *const weights = work.weights;
    float *const means = (float *)s.mean + b.moment, *const squares = (float *)s.mean_square + b.moment;
    for_lanes(b.count, [&](int64_t k, int lanes) {
        F32 mean = load(means + k, lanes), square = load(squares + k, lanes);
        store(weights + k, adam.step(load(gradient + k, lanes), load(weights + k, lanes), mean, square), lanes);
        store(means + k, mean, lanes);
        store(squares + k, square, lanes);
    });
}

float as_float(int32_t bits) { return (from_bits(all_words((uint32_t)bits)))[0]; }

// Adam on a block, and then, with its scales known, the codes of its moments. Lanes beyond its end have gradients of 0, and
// moments that are not the largest.
void update_in_fp8(const Shard &s, Adam adam, const Block &b, uint64_t key, Work &work) {
    uint8_t *const mean_codes = (uint8_t *)s.mean + b.moment, *const square_codes = (uint8_t *)s.mean_square + b.moment;
    const float *const gradient = work.gradient;
    float *const weights = work.weights, *const means = work.buffers[2], *const squares = work.buffers[3];
    for_scales(b, [&](int first, int count, int64_t scale) {
        const float mean_scale = s.mean_scale[scale], square_scale = s.mean_square_scale[scale];
        I32 mean_amax = {}, square_amax = {};  // bits, which for positive numbers are ordered as these are
        for_lanes(count, [&](int64_t k, int lanes) {
            k += first;
            F32 mean = decode<E4M3>(load_codes(mean_codes + k, lanes), mean_scale);
            F32 square = decode<E5M2OfSquares>(load_codes(square_codes + k, lanes), square_scale);
            store(weights + k, adam.step(load(gradient + k, lanes), load(weights + k, lanes), mean, square), lanes);
            store(means + k, mean);
            store(squares + k, square);
            mean_amax = larger(mean_amax, (I32)bits(magnitude(mean)));
            square_amax = larger(square_amax, (I32)bits(square));
        });
        s.mean_scale[scale] = as_float(largest(mean_amax)) / E4M3::kMax;
        s.mean_square_scale[scale] = as_float(largest(square_amax)) / E5M2OfSquares::kMax;
    });
    for_scales(b, [&](int first, int count, int64_t scale) {
        encode_moments(means + first, squares + first, count, s.mean_scale[scale], s.mean_square_scale[scale],
                       b.index + (uint32_t)first, key, mean_codes + first, square_codes + first);
    });
}

void load_masters(const Shard &s, const Block &b, float scale, float *weights) {
    if (!(scale > 0)) return;  // the first step: the parameter itself
    const FP16 *masters = s.master + b.moment;
    for_lanes(b.count, [=](int64_t k, int lanes) { store(weights + k, load(masters + k, lanes) * scale); });
}

void round_to_masters(const Shard &s, const Block &b, float scale, float *weights) {
    FP16 *masters = s.master + b.moment;
    for_lanes(b.count, [=](int64_t k, int lanes) {
        store(masters + k, at_most(at_least(load(weights + k) / scale, -65504.0f), 65504.0f), lanes);
        store(weights + k, load(masters + k, lanes) * scale);
    });
}

// Of sparse moments: all elements decay.
template <class T>
void decay_all(const Block &b, T *weights, float decay) {
    weights += b.element;
    for_lanes(std::min(b.count * b.every, b.left), [=](int64_t k, int lanes) {
        store(weights + k, load(weights + k, lanes) * (1 - decay), lanes);
    });
}

// Keys of random bits: of what is drawn at a reset, and in this step.
uint64_t epoch_of(const Shard &s, const Decision &decision, int64_t i) {
    return decision.steps ? mix((uint64_t)(decision.steps[i] - decision.steps_since_reset[i]) + ((uint64_t)s.number << 40)) : 0;
}
uint64_t key_of(const Shard &s, const Decision &decision, int64_t i) {
    return mix((uint64_t)decision.steps[i] + ((uint64_t)s.number << 40));
}

void update_block(const Shard &s, const Decision &decision, int64_t i, const Block &b, uint64_t key, Work &work, bool adds,
                  double *sums) {
    float decay = decision.decays ? decision.decay[i] : 0;
    sums[1] += load_gradient(s, decision, i, b, work);
    if (adds) add_squares(decision, i, b, work, sums);
    of_kind(s.weights_kind, s.weights, [&](auto *values) {
        if (b.every > 1 && decision.decays) decay_all(b, values, decay);
        work.weights = gather(b, values, work.picks, work.buffers[1]);
        if (s.master) load_masters(s, b, decision.old_scale[i], work.weights);
        const Adam adam(decision, i, b.every > 1 ? 0 : decay);
        if (s.moments == kFP8)
            update_in_fp8(s, adam, b, key, work);
        else
            update_in_fp32(s, adam, b, work);
        if (s.master) round_to_masters(s, b, decision.new_scale[i], work.weights);
        scatter(b, values, work.picks, work.weights);
    });
}

template <class T>
void measure_chunk(const T *values, int64_t count, float *amax, double *squares) {
    constexpr int kSums = 64 / kLanes;  // the order of sums does not depend on the number of lanes
    I32 largest = {};
    F32 sums[kSums] = {};
    int64_t k = 0;
    auto add = [&](F32 value, F32 &sum) {
        I32 size = (I32)bits(magnitude(value));  // as integers, NaN and infinity are the largest
        largest = larger(largest, size);
        sum += value * value;
    };
    for (; k + 64 <= count; k += 64)
        for (int part = 0; part < kSums; part++) add(load(values + k + part * kLanes), sums[part]);
    for (; k < count; k += kLanes) add(load(values + k, (int)std::min<int64_t>(kLanes, count - k)), sums[k % 16 / kLanes]);
    int32_t most = 0;
    *squares = 0;
    for (int part = 0; part < kSums / 4; part++) {
        F32 sum = (sums[part] + sums[part + kSums / 4]) + (sums[part + kSums / 2] + sums[part + kSums / 4 * 3]);
        for (int lane = 0; lane < kLanes; lane++) most = std::max(most, largest[lane]), *squares += sum[lane];
    }
    memcpy(amax, &most, sizeof most);
}

}  // namespace

// max|x| of each shard and each chunk, and the sums of squares of chunks; -1 for a shard without gradient.
EXPORT void measure(const Shard *shards, int64_t count, int threads, int of_weights, float *amaxes, float *chunk_amaxes,
                    double *chunk_squares) {
    auto kind = [&](int64_t i) { return of_weights ? shards[i].weights_kind : shards[i].gradient_kind; };
    auto size = [&](int64_t i) { return kind(i) == kNothing ? 0 : shards[i].size; };
    for_chunks(count, threads, size, [](int64_t) { return kChunk; }, [&](int64_t i, int64_t chunk, int64_t first, int64_t last) {
        of_kind(kind(i), of_weights ? shards[i].weights : shards[i].gradient, [&](auto *values) {
            measure_chunk(values + first, last - first, chunk_amaxes + chunk, chunk_squares + chunk);
        });
    });
    for (int64_t i = 0; i < count; i++) {
        float amax = kind(i) == kNothing ? -1 : 0;
        for (int64_t first = 0; first < size(i); first += kChunk, chunk_amaxes++)
            if (!(*chunk_amaxes <= amax) && !std::isnan(amax)) amax = *chunk_amaxes;
        amaxes[i] = amax;
    }
}

// For each shard the sum of (clip(g) / unit)^2, then for each how many elements changed; 0 for one that takes no step.
// Chunks that `measure` has seen, in which the rule changes nothing, are not read again.
EXPORT void squares(const Shard *shards, int64_t count, int threads, const Decision *decision, const float *chunk_amaxes,
                    const double *chunk_squares, float *result) {
    std::vector<int64_t> chunks_before(count);
    std::vector<Walk> walks;
    int64_t measured = 0;
    for (int64_t i = 0; i < count; i++) {
        const Shard &s = shards[i];
        bool by_rows = decision->rule == kSpikeClip && (s.every > 1 || clips_by_square(s, *decision, i));
        walks.emplace_back(s, by_rows, by_rows && s.moments == kFP8 ? kBlockOfFP8 : kBlock);
        chunks_before[i] = measured;
        measured += s.gradient_kind == kNothing ? 0 : (s.size + kChunk - 1) / kChunk;
    }
    auto blocks = [&](int64_t i) { return shards[i].gradient_kind != kNothing && decision->taken[i] ? walks[i].blocks() : 0; };
    auto in_chunk = [&](int64_t i) { return walks[i].blocks_in_chunk(); };
    sum_chunks(count, threads, blocks, in_chunk, result, [&](int64_t i, int64_t first, int64_t last, double *sums) {
        const Shard &s = shards[i];
        int64_t known = chunks_before[i] + first / in_chunk(i);
        bool is_flat = walks[i].every == 1 && !clips_by_square(s, *decision, i);
        bool is_changed = decision->rule == kAdaClip && chunk_amaxes[known] > decision->limit[i];
        if (is_flat && !is_changed && decision->unit[i] == 1) {
            sums[0] = chunk_squares[known];
            return;
        }
        Work work;
        uint64_t epoch = walks[i].every > 1 ? epoch_of(s, *decision, i) : 0;
        for (int64_t number = first; number < last; number++) {
            Block b(s, walks[i], number);
            if (b.every > 1) pick(b, epoch, work.picks);
            sums[1] += load_gradient(s, *decision, i, b, work);
            add_squares(*decision, i, b, work, sums);
        }
    });
}

// Adam, on all shards that take the step. `result` is that of `squares`, or null.
EXPORT void update(const Shard *shards, int64_t count, int threads, const Decision *decision, float *result) {
    auto blocks = [&](int64_t i) { return decision->taken[i] ? Walk(shards[i], true).blocks() : 0; };
    auto in_chunk = [&](int64_t i) { return Walk(shards[i], true).blocks_in_chunk(); };
    sum_chunks(count, threads, blocks, in_chunk, result, [&](int64_t i, int64_t first, int64_t last, double *sums) {
        const Shard &s = shards[i];
        Work work;
        Walk walk(s, true);
        uint64_t key = key_of(s, *decision, i), epoch = epoch_of(s, *decision, i);
        for (int64_t number = first; number < last; number++) {
            Block b(s, walk, number);
            if (b.every > 1) pick(b, epoch, work.picks);
            update_block(s, *decision, i, b, key, work, result != nullptr, sums);
        }
    });
}

// factor * clip(g) into `weights`.
EXPORT void clipped(const Shard *shards, int64_t count, int threads, const Decision *decision) {
    auto blocks = [&](int64_t i) { return Walk(shards[i], false).blocks(); };
    auto in_chunk = [&](int64_t i) { return Walk(shards[i], false).blocks_in_chunk(); };
    for_chunks(count, threads, blocks, in_chunk, [&](int64_t i, int64_t, int64_t first, int64_t last) {
        Work work;
        const float limit = limit_of(*decision, i), ratio = decision->ratio[i], factor = decision->factor[i];
        for (int64_t number = first; number < last; number++) {
            Block b(shards[i], Walk(shards[i], false), number);
            load_gradient(shards[i], *decision, i, b, work);
            const float *g = work.gradient;
            float *clipped = work.gradient = work.buffers[0];
            for (int k = 0; k < b.count; k++) clipped[k] = ada_clip(g[k], limit, ratio) * factor;
            of_kind(shards[i].weights_kind, shards[i].weights,
                    [&](auto *target) { scatter(b, target, work.picks, work.gradient); });
        }
    });
}

// Numbers of 4 or 8 bytes from their addresses into one array, or back.
EXPORT void move_scalars(void *const *addresses, int64_t count, int64_t bytes, char *array, int gathers) {
    for (int64_t i = 0; i < count; i++, array += bytes)
        gathers ? memcpy(array, addresses[i], bytes) : memcpy(addresses[i], array, bytes);
}
