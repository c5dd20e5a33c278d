// The kernels that repack-wide.h declares.

#define GGML_COMMON_IMPL_CPP
#define GGML_COMMON_DECL_CPP
#include "ggml-common.h"

#include "repack-wide.h"

#if defined(GGML_REPACK_WIDE)
#include "ggml-impl.h"
#include "repack-floats.h"
#include "repack-prompts.h"
#include "repack-tiles.h"
#include "repack-vector.h"

#include <algorithm>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <immintrin.h>
#include <type_traits>
#if defined(__GNUC__)
#include <cpuid.h>
#endif

namespace {

using namespace repack_wide;

constexpr int SUBS = 8;          // blocks of weights with a scale of their own that make a unit of work
constexpr int PASS = 32;         // most rows at once through tiles
constexpr int AHEAD = 12 * 1024; // bytes from the weights of few rows to those that are prefetched meanwhile

// Most rows for which each pass unpacks the weights again: a copy costs more as long as few rows read it.
constexpr int CHEAP = PASS;            // weights are one or two instructions away
constexpr int DEAR = has_dot ? 12 : 7; // more
constexpr int FREE = INT_MAX;          // none

// Into the second level cache
inline void prefetch(const char * p, int bytes) {
    for (int i = 0; i < bytes; i += 64) {
        _mm_prefetch(p + i, _MM_HINT_T1);
    }
}

// Into the first one: beside tiles the other had no effect (Sapphire Rapids)
inline void prefetch_near(const char * p, int bytes) {
    for (int i = 0; i < bytes; i += 64) {
        _mm_prefetch(p + i, _MM_HINT_T0);
    }
}

// Weights of few rows come from memory. Intel's CPUs (Sapphire Rapids) read them fastest if lines are prefetched one by one
// between the products: as a burst they would hold up all other reads until most of them are there. AMD's Zen 5 wants
// bursts besides. Zen 3 and 4 (measured: 4) read what comes in order faster without either.
struct reading {
    bool lines = true;
    bool bursts = false;

    explicit reading(bool in_order) {
#if defined(__GNUC__)
        unsigned a = 0, b = 0, c = 0, d = 0;
        if (__builtin_cpu_is("amd") && __get_cpuid(1, &a, &b, &c, &d)) {
            const unsigned family = (a >> 8 & 15) + (a >> 20 & 255);
            lines = !in_order || family != 0x19;
            bursts = lines;
        }
#endif
    }
};

// A row of inputs: k quants, their deltas (of `size` quants each), and of each block of `block` weights one number
// more, which TYPES::Extra is: the sum of the quants, or the share of the weights' bias.
template <typename W> struct row_layout {
    static int64_t deltas(int64_t k) { return k; }
    static int64_t extra(int64_t k) { return k + k / W::delta_size * sizeof(float); }
    static size_t size(int64_t k) {
        const size_t bytes = extra(k) + k / W::block * sizeof(typename W::extra);
        return ((bytes + 63) / 64 | 1) * 64; // an odd number of lines, so that rows do not meet in the same set
    }
};

// Quants of a row are -127 to 127; a delta's block has its largest at one end.
template <typename W> void quantize(const float * x, char * row, int64_t k) {
    float * deltas = (float *) (row + row_layout<W>::deltas(k));
    auto * extra = (typename W::extra *) (row + row_layout<W>::extra(k));
    for (int64_t i = 0; i < k; i += W::delta_size) {
        floats most = zeros();
        for (int j = 0; j < W::delta_size; j += COLUMNS) {
            most = larger_size(most, load_floats(x + i + j));
        }
        const float largest = largest_of(most);
        deltas[i / W::delta_size] = largest / 127.0f;
        const floats by = repeat(largest > 0.0f ? 127.0f / largest : 0.0f);
        for (int j = 0; j < W::delta_size; j += W::block) {
            ints sum = none();
            for (int l = 0; l < W::block; l += COLUMNS) {
                const ints quants = round(times(load_floats(x + i + j + l), by));
                store_quants(row + i + j + l, quants);
                sum = add32(sum, quants);
            }
            extra[(i + j) / W::block] = W::extra_of(sum_of(sum), largest / 127.0f);
        }
    }
}

// What a unit of work needs of a row besides quants: deltas and extra numbers
template <typename W> struct inputs_of {
    const float * d = nullptr;
    const typename W::extra * extras = nullptr;

    inputs_of() = default;

    inputs_of(const char * row, int64_t k, int64_t at)
        : d((const float *) (row + row_layout<W>::deltas(k)) + at / W::delta_size),
          extras((const typename W::extra *) (row + row_layout<W>::extra(k)) + at / W::block) {}

    // those of the row that lies `bytes` behind this one
    inputs_of behind(size_t bytes) const {
        inputs_of other;
        other.d = (const float *) ((const char *) d + bytes);
        other.extras = (const typename W::extra *) ((const char *) extras + bytes);
        return other;
    }

    // those of the unit's block `sub` alone
    inputs_of block(int sub) const {
        inputs_of one = *this;
        one.d += W::delta_a_block ? sub : 0;
        one.extras += sub;
        return one;
    }

    // where a block's sum begins
    ints start() const {
        if constexpr (W::has_offset) {
            return none();
        } else {
            return repeat(extras[0]);
        }
    }
};

// What a unit of work needs of a strip besides quants.
struct facts {
    alignas(64) float scale[SUBS][COLUMNS];
    alignas(64) int16_t mins[SUBS / 2][2 * COLUMNS]; // those of two blocks side by side
    alignas(64) float minimum[SUBS][COLUMNS];        // of blocks with a delta each
    alignas(64) float d[COLUMNS];
    alignas(64) float dmin[COLUMNS];
    int subs; // blocks of the unit
};

// What the weights of a block are: quants times a scale, which has a factor in common with its unit,
struct scaled {
    static constexpr bool has_offset = false;
    static constexpr bool has_minima = false; // of each block, as floats

    static floats scale_of(const facts & f, int sub) { return times(fact(f.d), fact(f.scale[sub])); }
};

// less an offset.
struct scaled_less : scaled {
    static constexpr bool has_offset = true;

    static floats offset_of(const facts & f, int sub) {
        return times(repeat(-1.0f), times(fact(f.dmin), to_floats(halves_of(load(f.mins[sub / 2]), sub % 2))));
    }
};

// Blocks of 32 weights with a delta each, or a delta and a minimum. A unit has its quants first, deltas after them, and
// minima last.
template <typename QUANTS> struct of_32 {
    static constexpr bool has_offset = QUANTS::has_minima;
    static constexpr bool has_minima = QUANTS::has_minima;
    using extra = std::conditional_t<has_minima, float, int32_t>;
    static constexpr int block = 32;
    static constexpr int delta_size = 32;
    static constexpr int most = QUANTS::most;
    static constexpr bool delta_a_block = true; // of the inputs

    static constexpr int delta_bytes = COLUMNS * QUANTS::delta_bytes; // of a block
    static constexpr int minimum_bytes = has_minima ? 2 * COLUMNS : 0;
    static constexpr int bytes = QUANTS::bytes + delta_bytes + minimum_bytes;
    static constexpr int unit_bytes = SUBS * bytes;

    // where a sum of unsigned weights begins; what a minimum is multiplied by
    static extra extra_of(int sum, float delta) { return has_minima ? extra(sum * delta) : extra(-QUANTS::bias * sum); }

    static constexpr int64_t strip_size(int64_t k) { return k / 32 * bytes; }

    static constexpr int64_t units_size(int64_t k) { return strip_size(k); }

    static void read(const char * strip, int64_t, int64_t at, int subs, facts & f) {
        const char * d = quants(strip, at) + subs * QUANTS::bytes;
        const char * m = d + subs * delta_bytes;
        f.subs = subs;
        for (int s = 0; s < subs; s++) {
            store(f.scale[s], QUANTS::deltas(d + s * delta_bytes));
            if (has_minima) {
                store(f.minimum[s], halves(m + s * minimum_bytes));
            }
        }
    }

    static const char * quants(const char * strip, int64_t at) { return strip + at / 32 * bytes; }

    using inputs = inputs_of<of_32>;

    // a row's sum, and a block's share
    struct sum {
        floats value = zeros();

        sum() = default;

        explicit sum(floats before) : value(before) {}

        void add(ints x, floats scale, const inputs & in) {
            value = multiply_add(times(to_floats(x), scale), repeat(in.d[0]), value);
        }

        // the share of block `sub`, which `in` is of
        void add_minimum(const facts & f, int sub, const inputs & in) {
            value = multiply_add(fact(f.minimum[sub]), repeat(in.extras[0]), value);
        }

        floats end(const facts & f, const inputs & in) const {
            sum all = *this;
            if constexpr (has_minima) {
                for (int s = 0; s < f.subs; s++) {
                    all.add_minimum(f, s, in.block(s));
                }
            }
            return all.value;
        }
    };

    static floats scale_of(const facts & f, int sub) { return fact(f.scale[sub]); }

    static floats offset_of(const facts & f, int sub) { return fact(f.minimum[sub]); }

    static constexpr int direct = QUANTS::direct;

    static ints weights(const char * p, int sub, int group) { return QUANTS::weights(p, sub, group); }

    static const char * tile_weights(const char * p, int subs, char * to) { return QUANTS::tile_weights(p, subs, to); }

    static constexpr bool tile_signed = true;

    static void repack(char * strip, const char * from, size_t column, int64_t k) {
        for (int64_t b = 0; b < k / 32; b++) {
            const int64_t sub = b % SUBS;
            const int64_t subs = std::min<int64_t>(k / 32 - (b - sub), SUBS); // of this unit
            char * unit = strip + (b - sub) * bytes;
            char * deltas = unit + subs * QUANTS::bytes;
            char * minima = deltas + subs * delta_bytes;
            for (int c = 0; c < COLUMNS; c++) { // a block begins with its delta, and with its minimum behind it
                const auto & in = ((const typename QUANTS::from *) (from + c * column))[b];
                QUANTS::put(unit + sub * QUANTS::bytes, c, in);
                memcpy(deltas + sub * delta_bytes + c * QUANTS::delta_bytes, &in, QUANTS::delta_bytes);
                if (has_minima) {
                    memcpy(minima + sub * minimum_bytes + c * 2, (const char *) &in + 2, 2);
                }
            }
        }
    }
};

// Weights as unsigned ones
template <int BY> inline ints biased(ints x) { return BY ? add8(x, all((int8_t) BY)) : x; }

struct half_deltas {
    static constexpr int delta_bytes = 2;
    static constexpr bool has_minima = false;
    static constexpr int direct = CHEAP;

    static floats deltas(const char * p) { return halves(p); }
};

// What is added to the weights of Q8_0 in memory: nothing where there are tiles, which multiply signed weights, and
// elsewhere the bias with which the other products multiply them.
#if defined(GGML_REPACK_TILES)
constexpr int STORED_BIAS = 0;
#else
constexpr int STORED_BIAS = SIGN_BIAS;
#endif

struct quants_q8_0 : half_deltas {
    using from = block_q8_0;
    static constexpr int bytes = 8 * VECTOR;
    static constexpr int bias = SIGN_BIAS;
    static constexpr int most = 128 + SIGN_BIAS;
    static constexpr int direct = STORED_BIAS == SIGN_BIAS ? FREE : CHEAP;

    static ints weights(const char * p, int sub, int group) {
        return biased<SIGN_BIAS - STORED_BIAS>(load(p + bytes * sub + VECTOR * group));
    }

    static const char * tile_weights(const char * p, int, char *) { return p; }

    static void put(char * block, int c, const from & in) {
        for (int g = 0; g < 8; g++) {
            for (int i = 0; i < 4; i++) {
                block[g * VECTOR + c * 4 + i] = char(in.qs[4 * g + i] + STORED_BIAS);
            }
        }
    }
};

// Four bits of a strip's columns: a vector has those of weights 4 * group ... 4 * group + 3, and of the 16th after each.
inline ints nibbles(const char * p, int group) {
    const ints x = load(p + VECTOR * (group % 4));
    return group / 4 ? high_nibbles(x) : low_nibbles(x);
}

inline void put_nibbles(char * to, int c, const uint8_t * qs) {
    for (int g = 0; g < 4; g++) {
        memcpy(to + VECTOR * g + 4 * c, qs + 4 * g, 4);
    }
}

// Weights of QUANTS as bytes for tiles, where they are signed
template <typename QUANTS> const char * signed_weights(const char * p, int subs, char * to) {
    for (int i = 0; i < subs; i++) {
        for (int g = 0; g < 8; g++) {
            store(to + VECTOR * (8 * i + g), QUANTS::signed_weights(p, i, g));
        }
    }
    return to;
}

// four bits, less BIAS
template <typename FROM, int BIAS> struct quants_of_4 : half_deltas {
    using from = FROM;
    static constexpr int bytes = 4 * VECTOR;
    static constexpr int bias = BIAS;
    static constexpr int most = 15;

    static ints weights(const char * p, int sub, int group) { return nibbles(p + bytes * sub, group); }

    static ints signed_weights(const char * p, int sub, int group) {
        return subtract8(weights(p, sub, group), all(BIAS));
    }

    static const char * tile_weights(const char * p, int subs, char * to) {
        return ::signed_weights<quants_of_4>(p, subs, to);
    }

    static void put(char * block, int c, const from & in) { put_nibbles(block, c, in.qs); }
};

// five bits, less BIAS; the fifth ones come last
template <typename FROM, int BIAS> struct quants_of_5 : half_deltas {
    static constexpr int direct = DEAR;
    using from = FROM;
    static constexpr int bytes = 4 * VECTOR + VECTOR;
    static constexpr int bias = BIAS;
    static constexpr int most = 31;

    static ints weights(const char * p, int sub, int group) {
        const char * block = p + bytes * sub;
        return fifth_bits(block + 4 * VECTOR, group, nibbles(block, group));
    }

    static ints signed_weights(const char * p, int sub, int group) {
        return subtract8(weights(p, sub, group), all(BIAS));
    }

    static const char * tile_weights(const char * p, int subs, char * to) {
        return ::signed_weights<quants_of_5>(p, subs, to);
    }

    static void put(char * block, int c, const from & in) {
        put_nibbles(block, c, in.qs);
        put_fifth_bits(block + 4 * VECTOR, c, in.qh);
    }
};

// four bits, of which the weights, LARGEST at most, are found in a table; with OFFSET none is below 0
template <typename FROM, const int8_t * TABLE, int LARGEST, int OFFSET> struct quants_of_table : half_deltas {
    using from = FROM;
    static constexpr int bytes = 4 * VECTOR;
    static constexpr int bias = OFFSET;
    static constexpr int most = LARGEST + OFFSET;

    static ints weights(const char * p, int sub, int group) { return biased<OFFSET>(signed_weights(p, sub, group)); }

    static ints signed_weights(const char * p, int sub, int group) {
        return look_up(TABLE, nibbles(p + bytes * sub, group));
    }

    static const char * tile_weights(const char * p, int subs, char * to) {
        return ::signed_weights<quants_of_table>(p, subs, to);
    }

    static void put(char * block, int c, const from & in) { put_nibbles(block, c, in.qs); }
};

template <typename QUANTS> struct with_minima : QUANTS {
    static constexpr bool has_minima = true;
};

// a delta is a power of two
struct quants_mxfp4 : quants_of_table<block_mxfp4, kvalues_mxfp4, 12, 12> {
    static constexpr int delta_bytes = 1;

    static floats deltas(const char * p) { return powers(p); }
};

// Whole numbers of six bits, eight for each column: four bits each, then two bits more.
struct six_bits {
    static constexpr int count = 8 * COLUMNS;
    static constexpr int bytes = count / 4 * 3;

    static void pack(char * to, const uint8_t * values) {
        constexpr int part = count / 4;
        for (int i = 0; i < 2 * part; i++) {
            to[i] = char((values[i] & 15) | values[i + 2 * part] << 4);
        }
        for (int i = 0; i < part; i++) {
            to[2 * part + i] = char(values[i] >> 4 | (values[i + part] >> 4) << 2 | (values[i + 2 * part] >> 4) << 4 |
                                    (values[i + 3 * part] >> 4) << 6);
        }
    }

    // less 32, of a block of all columns
    static void read(const char * p, float (*to)[COLUMNS]) {
        const ints low = load(p);
        const half_ints two = load_half(p + VECTOR);
        const auto upper = [two](int shift) {
            const ints both = join(shift_right(two, shift), shift_right(two, shift + 2));
            return shift_left(bits_and(both, all(3)), 4);
        };
        alignas(64) int8_t values[count];
        store(values, subtract8(bits_or(low_nibbles(low), upper(0)), all(32)));
        store(values + VECTOR, subtract8(bits_or(high_nibbles(low), upper(4)), all(32)));
        for (int s = 0; s < SUBS; s++) {
            store(to[s], to_floats(widen(values + COLUMNS * s)));
        }
    }
};

// A row's sum, and the share of a unit of a super-block: blocks with whole numbers for scales, and one delta.
template <typename INPUTS> struct sum_of_scaled {
    floats before = zeros();
    floats value = zeros();

    sum_of_scaled() = default;

    explicit sum_of_scaled(floats before) : before(before) {}

    void add(ints x, floats scale, const INPUTS &) { value = multiply_add(to_floats(x), scale, value); }

    floats end(const facts & f, const INPUTS & in) const {
        return multiply_add(times(value, fact(f.d)), repeat(in.d[0]), before);
    }
};

// The same where each block has an offset, which the inputs' sums are multiplied by
template <typename INPUTS> struct sum_with_offsets : sum_of_scaled<INPUTS> {
    using sum_of_scaled<INPUTS>::sum_of_scaled;

    floats end(const facts & f, const INPUTS & in) const {
        ints offsets = none();
        for (int s = 0; s < SUBS / 2; s++) {
            offsets = add_pairs(offsets, load(f.mins[s]), repeat4(in.extras + 2 * s));
        }
        const floats y = times(this->value, fact(f.d));
        const floats z = multiply_subtract(to_floats(offsets), fact(f.dmin), y);
        return multiply_add(z, repeat(in.d[0]), this->before);
    }
};

// Super-blocks of 256 weights, with a scale and an offset of six bits for every 32: Q4_K, and Q5_K with a bit more. A
// super-block of a strip: quants, the fifth bits, scales and offsets as below, deltas of both.
template <typename FROM, bool FIFTH> struct of_256 : scaled_less {
    using extra = int16_t;
    static constexpr int block = 32;
    static constexpr int delta_size = QK_K;
    static constexpr bool delta_a_block = false;
    static constexpr int direct = FIFTH ? DEAR : CHEAP;
    static constexpr int most = FIFTH ? 31 : 15;
    static constexpr int quants_size = 32 * VECTOR;
    static constexpr int scales_at = quants_size + (FIFTH ? 8 * VECTOR : 0);
    static constexpr int deltas_at = scales_at + 3 * VECTOR;
    static constexpr int unit_bytes = deltas_at + VECTOR;

    static extra extra_of(int sum, float) { return extra(sum); }

    static constexpr int64_t strip_size(int64_t k) { return k / QK_K * unit_bytes; }

    static constexpr int64_t units_size(int64_t k) { return strip_size(k); }

    static const char * quants(const char * strip, int64_t at) { return strip + at / QK_K * unit_bytes; }

    // Of scales (eight of each column, column by column within a block), then as many offsets: four bits of a scale and
    // its offset are a byte, two more bits of four of them another. Offsets of two neighbouring blocks alternate.
    static void pack(char * to, const uint8_t * scales, const uint8_t * mins) {
        uint8_t * low = (uint8_t *) to;
        uint8_t * high = low + 2 * VECTOR;
        for (int i = 0; i < 2 * VECTOR; i++) {
            low[i] = (scales[i] & 15) | (mins[i] & 15) << 4;
        }
        for (int i = 0; i < VECTOR; i++) {
            high[i] =
                scales[i] >> 4 | (scales[i + VECTOR] >> 4) << 2 | (mins[i] >> 4) << 4 | (mins[i + VECTOR] >> 4) << 6;
        }
    }

    static void read(const char * strip, int64_t, int64_t at, int, facts & f) {
        const char * p = quants(strip, at) + scales_at;
        alignas(64) uint8_t bytes[4 * VECTOR];
        const ints low[2] = { load(p), load(p + VECTOR) };
        const ints high = load(p + 2 * VECTOR);
        const ints two = all(0x30);
        store(bytes, bits_or(low_nibbles(low[0]), bits_and(shift_left(high, 4), two)));
        store(bytes + VECTOR, bits_or(low_nibbles(low[1]), bits_and(shift_left(high, 2), two)));
        store(bytes + 2 * VECTOR, bits_or(high_nibbles(low[0]), bits_and(high, two)));
        store(bytes + 3 * VECTOR, bits_or(high_nibbles(low[1]), bits_and(shift_right(high, 2), two)));
        for (int s = 0; s < SUBS; s++) {
            store(f.scale[s], to_floats(widen(bytes + COLUMNS * s)));
        }
        for (int s = 0; s < SUBS / 2; s++) {
            store(f.mins[s], widen_pairs(bytes + 2 * VECTOR + 2 * COLUMNS * s));
        }
        store(f.d, halves(p + 3 * VECTOR));
        store(f.dmin, halves(p + 3 * VECTOR + 2 * COLUMNS));
    }

    using inputs = inputs_of<of_256>;
    using sum = sum_with_offsets<inputs>;

    static ints fifth(const char * p, int sub, int group) {
        const ints bits = shift_right(load(p + quants_size + VECTOR * group), sub);
        return shift_left(bits_and(bits, all(1)), 4);
    }

    static ints weights(const char * p, int sub, int group) {
        const ints x = load(p + VECTOR * (8 * (sub / 2) + group));
        const ints y = sub % 2 ? high_nibbles(x) : low_nibbles(x);
        return FIFTH ? bits_or(y, fifth(p, sub, group)) : y;
    }

    static const char * tile_weights(const char * p, int, char * to) {
        for (int i = 0; i < SUBS / 2; i++) {
            for (int g = 0; g < 8; g++) {
                const ints x = load(p + VECTOR * (8 * i + g));
                ints low = low_nibbles(x);
                ints high = high_nibbles(x);
                if (FIFTH) {
                    low = bits_or(low, fifth(p, 2 * i, g));
                    high = bits_or(high, fifth(p, 2 * i + 1, g));
                }
                store(to + VECTOR * (16 * i + g), low);
                store(to + VECTOR * (16 * i + 8 + g), high);
            }
        }
        return to;
    }

    static constexpr bool tile_signed = false;

    static void repack(char * strip, const char * from, size_t column, int64_t k) {
        for (int64_t b = 0; b < k / QK_K; b++) {
            char * to = strip + b * unit_bytes;
            uint8_t scales[SUBS * COLUMNS];
            uint8_t mins[SUBS * COLUMNS];
            for (int c = 0; c < COLUMNS; c++) {
                const FROM & in = ((const FROM *) (from + c * column))[b];
                for (int g = 0; g < 32; g++) {
                    memcpy(to + VECTOR * g + 4 * c, in.qs + 4 * g, 4);
                }
                if constexpr (FIFTH) {
                    for (int g = 0; g < 8; g++) {
                        memcpy(to + quants_size + VECTOR * g + 4 * c, in.qh + 4 * g, 4);
                    }
                }
                for (int s = 0; s < SUBS; s++) { // as get_scale_min_k4 of ggml-quants.c
                    const uint8_t * q = in.scales;
                    scales[COLUMNS * s + c] = s < 4 ? q[s] & 63 : (q[s + 4] & 15) | (q[s - 4] >> 6) << 4;
                    mins[2 * COLUMNS * (s / 2) + 2 * c + s % 2] =
                        s < 4 ? q[s + 4] & 63 : q[s + 4] >> 4 | (q[s] >> 6) << 4;
                }
                memcpy(to + deltas_at + 2 * c, &in, 2);                                // d
                memcpy(to + deltas_at + 2 * (COLUMNS + c), (const char *) &in + 2, 2); // dmin
            }
            pack(to + scales_at, scales, mins);
        }
    }
};

// Q6_K: weights are 0 to 63 less 32, four bits and two more of them, with a scale for every 16. A unit is half a
// super-block; deltas come last in a strip.
struct of_q6_K : scaled {
    using extra = int32_t;
    static constexpr int block = 16;
    static constexpr int delta_size = QK_K;
    static constexpr bool delta_a_block = false;
    static constexpr int direct = DEAR;
    static constexpr int most = 63;
    static constexpr int scales_at = (16 + 8) * VECTOR;
    static constexpr int unit_bytes = scales_at + 2 * VECTOR;

    static extra extra_of(int sum, float) { return -32 * sum; }

    static constexpr int64_t strip_size(int64_t k) { return k / QK_K * (2 * unit_bytes + 2 * COLUMNS); }

    static constexpr int64_t units_size(int64_t k) { return k / QK_K * 2 * unit_bytes; }

    static const char * quants(const char * strip, int64_t at) { return strip + at / 128 * unit_bytes; }

    static void read(const char * strip, int64_t k, int64_t at, int, facts & f) {
        const char * scales = quants(strip, at) + scales_at;
        for (int s = 0; s < SUBS; s++) {
            store(f.scale[s], to_floats(widen((const int8_t *) scales + COLUMNS * s)));
        }
        store(f.d, halves(strip + units_size(k) + at / QK_K * 2 * COLUMNS));
    }

    using inputs = inputs_of<of_q6_K>;
    using sum = sum_of_scaled<inputs>;

    // 32 weights have the same four bits' place and two bits' shift
    static ints bits(const char * p, int part, int group) {
        const ints x = load(p + VECTOR * (8 * (part % 2) + group));
        const ints y = load(p + VECTOR * (16 + group));
        const ints upper = bits_and(shift_right(y, 2 * part), all(3));
        return bits_or(part / 2 ? high_nibbles(x) : low_nibbles(x), shift_left(upper, 4));
    }

    static ints weights(const char * p, int sub, int group) { return bits(p, sub / 2, 4 * (sub % 2) + group); }

    static const char * tile_weights(const char * p, int, char * to) {
        for (int part = 0; part < 4; part++) {
            for (int g = 0; g < 8; g++) {
                store(to + VECTOR * (8 * part + g), subtract8(bits(p, part, g), all(32)));
            }
        }
        return to;
    }

    static constexpr bool tile_signed = true;

    static void repack(char * strip, const char * from, size_t column, int64_t k) {
        for (int64_t b = 0; b < k / QK_K; b++) {
            for (int c = 0; c < COLUMNS; c++) {
                const block_q6_K & in = ((const block_q6_K *) (from + c * column))[b];
                for (int half = 0; half < 2; half++) {
                    char * to = strip + (2 * b + half) * unit_bytes;
                    for (int g = 0; g < 16; g++) {
                        memcpy(to + VECTOR * g + 4 * c, in.ql + 64 * half + 4 * g, 4);
                    }
                    for (int g = 0; g < 8; g++) {
                        memcpy(to + VECTOR * (16 + g) + 4 * c, in.qh + 32 * half + 4 * g, 4);
                    }
                    for (int s = 0; s < SUBS; s++) {
                        to[scales_at + COLUMNS * s + c] = in.scales[8 * half + s];
                    }
                }
                memcpy(strip + units_size(k) + (b * COLUMNS + c) * 2, &in.d, 2);
            }
        }
    }
};

// IQ4_XS: four bits, of which the weights are found in a table, with a scale for every 32.
struct of_iq4_xs : scaled {
    using extra = int32_t;
    static constexpr int block = 32;
    static constexpr int delta_size = QK_K;
    static constexpr bool delta_a_block = false;
    static constexpr int direct = CHEAP;
    static constexpr int most = 128 + SIGN_BIAS;
    static constexpr int scales_at = 32 * VECTOR;
    static constexpr int unit_bytes = scales_at + six_bits::bytes + 2 * COLUMNS;

    static extra extra_of(int sum, float) { return -SIGN_BIAS * sum; }

    static constexpr int64_t strip_size(int64_t k) { return k / QK_K * unit_bytes; }

    static constexpr int64_t units_size(int64_t k) { return strip_size(k); }

    static const char * quants(const char * strip, int64_t at) { return strip + at / QK_K * unit_bytes; }

    static void read(const char * strip, int64_t, int64_t at, int, facts & f) {
        const char * p = quants(strip, at) + scales_at;
        six_bits::read(p, f.scale);
        store(f.d, halves(p + six_bits::bytes));
    }

    using inputs = inputs_of<of_iq4_xs>;
    using sum = sum_of_scaled<inputs>;

    static ints weights(const char * p, int sub, int group) { return biased<SIGN_BIAS>(signed_weights(p, sub, group)); }

    static ints signed_weights(const char * p, int sub, int group) {
        return look_up(kvalues_iq4nl, nibbles(p + 4 * VECTOR * sub, group));
    }

    static const char * tile_weights(const char * p, int subs, char * to) {
        return ::signed_weights<of_iq4_xs>(p, subs, to);
    }

    static constexpr bool tile_signed = true;

    static void repack(char * strip, const char * from, size_t column, int64_t k) {
        for (int64_t b = 0; b < k / QK_K; b++) {
            char * to = strip + b * unit_bytes;
            uint8_t scales[SUBS * COLUMNS];
            for (int c = 0; c < COLUMNS; c++) {
                const block_iq4_xs & in = ((const block_iq4_xs *) (from + c * column))[b];
                for (int s = 0; s < SUBS; s++) {
                    put_nibbles(to + 4 * VECTOR * s, c, in.qs + 16 * s);
                    scales[COLUMNS * s + c] = (in.scales_l[s / 2] >> 4 * (s % 2) & 15) | (in.scales_h >> 2 * s & 3)
                                                                                             << 4;
                }
                memcpy(to + scales_at + six_bits::bytes + 2 * c, &in.d, 2);
            }
            six_bits::pack(to + scales_at, scales);
        }
    }
};

// Two bits of a strip's columns: 32 weights have the same shift, `part`; a vector has those of four of them.
inline ints two_bits(const char * p, int part, int group) {
    return bits_and(shift_right(load(p + VECTOR * group), 2 * part), all(3));
}

// Q2_K and Q3_K: two bits, or three, with a scale for every 16. A unit is half a super-block; deltas come last in a strip.
// Q2_K: a scale and an offset of four bits are a byte.
struct of_q2_K : scaled_less {
    using extra = int16_t;
    static constexpr int block = 16;
    static constexpr int delta_size = QK_K;
    static constexpr bool delta_a_block = false;
    static constexpr int direct = DEAR;
    static constexpr int most = 3;
    static constexpr int scales_at = 8 * VECTOR;
    static constexpr int unit_bytes = scales_at + 2 * VECTOR;

    static extra extra_of(int sum, float) { return extra(sum); }

    static constexpr int64_t strip_size(int64_t k) { return k / QK_K * (2 * unit_bytes + 4 * COLUMNS); }

    static constexpr int64_t units_size(int64_t k) { return k / QK_K * 2 * unit_bytes; }

    static const char * quants(const char * strip, int64_t at) { return strip + at / 128 * unit_bytes; }

    static void read(const char * strip, int64_t k, int64_t at, int, facts & f) {
        const char * scales = quants(strip, at) + scales_at;
        alignas(64) uint8_t bytes[4 * VECTOR]; // scales, then offsets
        for (int i = 0; i < 2; i++) {
            const ints x = load(scales + VECTOR * i);
            store(bytes + VECTOR * i, low_nibbles(x));
            store(bytes + VECTOR * (2 + i), high_nibbles(x));
        }
        for (int s = 0; s < SUBS; s++) {
            store(f.scale[s], to_floats(widen(bytes + COLUMNS * s)));
        }
        for (int s = 0; s < SUBS / 2; s++) { // those of neighbouring blocks alternate
            store(f.mins[s], widen_alternating(bytes + 2 * VECTOR + 2 * COLUMNS * s));
        }
        const char * d = strip + units_size(k) + at / QK_K * 4 * COLUMNS;
        store(f.d, halves(d));
        store(f.dmin, halves(d + 2 * COLUMNS));
    }

    using inputs = inputs_of<of_q2_K>;
    using sum = sum_with_offsets<inputs>;

    static ints weights(const char * p, int sub, int group) { return two_bits(p, sub / 2, 4 * (sub % 2) + group); }

    static const char * tile_weights(const char * p, int, char * to) {
        for (int part = 0; part < 4; part++) {
            for (int g = 0; g < 8; g++) {
                store(to + VECTOR * (8 * part + g), two_bits(p, part, g));
            }
        }
        return to;
    }

    static constexpr bool tile_signed = false;

    static void repack(char * strip, const char * from, size_t column, int64_t k) {
        for (int64_t b = 0; b < k / QK_K; b++) {
            for (int c = 0; c < COLUMNS; c++) {
                const block_q2_K & in = ((const block_q2_K *) (from + c * column))[b];
                for (int half = 0; half < 2; half++) {
                    char * to = strip + (2 * b + half) * unit_bytes;
                    for (int g = 0; g < 8; g++) {
                        memcpy(to + VECTOR * g + 4 * c, in.qs + 32 * half + 4 * g, 4);
                    }
                    for (int s = 0; s < SUBS; s++) {
                        to[scales_at + COLUMNS * s + c] = char(in.scales[8 * half + s]);
                    }
                }
                const char * d = (const char *) &in + offsetof(block_q2_K, qs) + sizeof(in.qs); // d, dmin
                char * to = strip + units_size(k) + b * 4 * COLUMNS;
                memcpy(to + 2 * c, d, 2);
                memcpy(to + 2 * COLUMNS + 2 * c, d + 2, 2);
            }
        }
    }
};

// Q3_K: weights are 0 to 7 less 4. The third bits of a unit: a byte has the four parts' of a weight and of the 16th after.
struct of_q3_K : scaled {
    using extra = int32_t;
    static constexpr int block = 16;
    static constexpr int delta_size = QK_K;
    static constexpr bool delta_a_block = false;
    static constexpr int direct = DEAR;
    static constexpr int most = 7;
    static constexpr int scales_at = (8 + 4) * VECTOR;
    static constexpr int unit_bytes = scales_at + six_bits::bytes;

    static extra extra_of(int sum, float) { return -4 * sum; }

    static constexpr int64_t strip_size(int64_t k) { return k / QK_K * (2 * unit_bytes + 2 * COLUMNS); }

    static constexpr int64_t units_size(int64_t k) { return k / QK_K * 2 * unit_bytes; }

    static const char * quants(const char * strip, int64_t at) { return strip + at / 128 * unit_bytes; }

    static void read(const char * strip, int64_t k, int64_t at, int, facts & f) {
        six_bits::read(quants(strip, at) + scales_at, f.scale);
        store(f.d, halves(strip + units_size(k) + at / QK_K * 2 * COLUMNS));
    }

    using inputs = inputs_of<of_q3_K>;
    using sum = sum_of_scaled<inputs>;

    static ints bits(const char * p, int part, int group) {
        const ints x = shift_right(load(p + VECTOR * (8 + group % 4)), part + 4 * (group / 4));
        return bits_or(two_bits(p, part, group), shift_left(bits_and(x, all(1)), 2));
    }

    static ints weights(const char * p, int sub, int group) { return bits(p, sub / 2, 4 * (sub % 2) + group); }

    static const char * tile_weights(const char * p, int, char * to) {
        for (int part = 0; part < 4; part++) {
            for (int g = 0; g < 8; g++) {
                store(to + VECTOR * (8 * part + g), subtract8(bits(p, part, g), all(4)));
            }
        }
        return to;
    }

    static constexpr bool tile_signed = true;

    static void repack(char * strip, const char * from, size_t column, int64_t k) {
        for (int64_t b = 0; b < k / QK_K; b++) {
            for (int half = 0; half < 2; half++) {
                char * to = strip + (2 * b + half) * unit_bytes;
                uint8_t scales[SUBS * COLUMNS];
                for (int c = 0; c < COLUMNS; c++) {
                    const block_q3_K & in = ((const block_q3_K *) (from + c * column))[b];
                    for (int g = 0; g < 8; g++) {
                        memcpy(to + VECTOR * g + 4 * c, in.qs + 32 * half + 4 * g, 4);
                    }
                    for (int i = 0; i < 16; i++) {
                        const int low = in.hmask[i] >> 4 * half & 15;
                        const int high = in.hmask[i + 16] >> 4 * half & 15;
                        to[VECTOR * (8 + i / 4) + 4 * c + i % 4] = char(low | high << 4);
                    }
                    for (int s = 0; s < SUBS; s++) { // four bits, then two more of the 16 scales, as in ggml-quants.c
                        const int four = half ? in.scales[s] >> 4 : in.scales[s] & 15;
                        scales[COLUMNS * s + c] = four | (in.scales[8 + s % 4] >> 2 * (2 * half + s / 4) & 3) << 4;
                    }
                    memcpy(strip + units_size(k) + (b * COLUMNS + c) * 2, &in.d, 2);
                }
                six_bits::pack(to + scales_at, scales);
            }
        }
    }
};

// The sums of a block's groups of four weights: several of them, so that they need not wait for each other.
template <typename W, int N, int PARTS, bool LINES>
inline void add_block(const char * p, int sub, const char * const * quants, int64_t at, const typename W::inputs * in,
                      const facts & f, typename W::sum * sums) {
    constexpr int groups = W::block / 4;
    constexpr int bytes = W::unit_bytes / SUBS;
    static_assert(bytes <= 64 * (groups + 1), "a line a group and one more are too few");
    total<W::most, groups> x[N][PARTS];
    for (int r = 0; r < N; r++) {
        x[r][0].sum = in[r].block(sub).start();
    }
#pragma GCC unroll 8
    for (int g = 0; g < groups; g++) {
        if (LINES && 64 * g < bytes) {
            prefetch(p + AHEAD + sub * bytes + 64 * g, 64);
        }
        const ints w = W::weights(p, sub, g);
        for (int r = 0; r < N; r++) {
            x[r][g % PARTS].add(w, repeat4(quants[r] + at + W::block * sub + 4 * g), g);
        }
    }
    if (LINES && bytes > 64 * groups) {
        prefetch(p + AHEAD + sub * bytes + 64 * groups, 64);
    }
    for (int r = 0; r < N; r++) {
        for (int i = 1; i < PARTS; i++) {
            x[r][0].sum = add32(x[r][0].sum, x[r][i].sum);
        }
        sums[r].add(x[r][0].sum, fact(f.scale[sub]), in[r].block(sub));
    }
}

// N rows times a strip
template <typename W, int N, bool LINES>
void few_rows(int64_t k, const char * strip, const char * inputs, size_t stride, float * const * out, int column,
              bool bursts) {
    constexpr int unit = SUBS * W::block;
    constexpr int parts = !has_dot ? 1 : N == 1 ? 4 : N < 4 ? 2 : 1;
    const char * quants[N];
    floats sums[N];
    for (int r = 0; r < N; r++) {
        quants[r] = inputs + r * stride;
        sums[r] = zeros();
    }
    // what lies behind the units is needed from the first one on
    prefetch_near(strip + W::strip_size(k) + W::units_size(k), int(W::strip_size(k) - W::units_size(k)));
    for (int64_t at = 0; at < k; at += unit) {
        const char * p = W::quants(strip, at);
        const int subs = int(std::min<int64_t>(k - at, unit) / W::block);
        if (bursts) {
            prefetch_near(p + 2 * W::unit_bytes, W::unit_bytes);
        }
        facts f;
        W::read(strip, k, at, subs, f);
        typename W::inputs in[N] = {};
        typename W::sum each[N] = {};
        for (int r = 0; r < N; r++) {
            in[r] = typename W::inputs(quants[r], k, at);
            each[r] = typename W::sum(sums[r]);
        }
        if (subs == SUBS) {
#pragma GCC unroll 8
            for (int sub = 0; sub < SUBS; sub++) {
                add_block<W, N, parts, LINES>(p, sub, quants, at, in, f, each);
            }
        } else {
            for (int sub = 0; sub < subs; sub++) {
                add_block<W, N, parts, LINES>(p, sub, quants, at, in, f, each);
            }
        }
        for (int r = 0; r < N; r++) {
            sums[r] = each[r].end(f, in[r]);
        }
    }
    for (int r = 0; r < N; r++) {
        store(out[r] + column, sums[r]);
    }
}

#if defined(GGML_REPACK_TILES)

constexpr int FEWEST = 9; // rows for which tiles are faster

template <typename W, int N>
void few_of_rows(int n, int64_t k, const char * strip, const char * inputs, size_t stride, float * const * out,
                 int column) {
    if (n == N) {
        return few_rows<W, N, true>(k, strip, inputs, stride, out, column, false);
    }
    if constexpr (N > 1) {
        few_of_rows<W, N - 1>(n, k, strip, inputs, stride, out, column);
    }
}

// What tiles of up to 32 rows and two strips need. Rows are two halves of up to 16; those of the second begin at 16.
struct tile_scratch {
    // of each block: added up just before those of the next unit take their place
    alignas(64) int32_t sums[SUBS][16][16];
    alignas(64) float out[2][PASS][16]; // of two strips
    alignas(64) char weights[SUBS * 32 * COLUMNS];
    facts strips[2];

    // behind it: of each block those of all rows, where inputs have a delta for each
    float * deltas() { return (float *) (this + 1); }
};

// A whole number below 2^22 that is added to MAGIC is 1.5 * 2^23 more as a float. While tiles are in use, one of the two
// units that compute with 512 bits of floats is off, and the addition of integers is done elsewhere.
constexpr int32_t MAGIC = 0x4b400000;
constexpr float MAGIC_FLOAT = 12582912.0f;

// Half of the rows, a strip, a unit
struct tile_job {
    int subs = 0;
    int rows = 0;
    int half = 0;
    int strip = 0;
    int facts = 0;
    int64_t at = 0;
};

struct tile_inputs {
    const char * rows;
    size_t stride;
    int64_t k;
    int first; // rows of the first half

    const char * of(const tile_job & job) const { return rows + job.half * first * stride; }
};

// The tiles of a block of weights: C = inputs in A times weights in B, which is 0 or 1.
#define TILE_BLOCK(A, B, C, s)                                                                                         \
    TILE_LOAD(B, weights + (s) * W::block * COLUMNS, 64);                                                              \
    TILE_LOAD(A, rows + (s) * W::block, in.stride);                                                                    \
    TILE_ZERO(C);                                                                                                      \
    TILE_MULTIPLY(W::tile_signed, C, A, B);                                                                            \
    TILE_STORE(C, scratch.sums[s], 64);

#define EACH_ROW(DO)                                                                                                   \
    DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11) DO(12) DO(13) DO(14) DO(15)

// Multiplies the blocks of a unit, `now`, and before each of them adds up that of `last`, whose N rows stay in registers:
// of an array GCC would make memory. Some of the N may be of no row. Units of a pass are WHOLE but for the end of k.
template <typename W, int N, bool WHOLE>
inline __attribute__((always_inline)) void tile_unit(const tile_job & now, const tile_job & last, const char * weights,
                                                     const tile_inputs & in, const char * ahead, int ahead_bytes,
                                                     tile_scratch & scratch) {
    const char * rows = in.of(now) + now.at;
    const facts & f = scratch.strips[last.facts];
    const float * deltas = scratch.deltas() + last.at / W::block * PASS + last.half * 16;
    float (*out)[16] = scratch.out[last.strip] + last.half * 16;
    const int n_now = WHOLE ? SUBS : now.subs;
    const int n_last = WHOLE ? SUBS : last.subs;
#define BEGIN(r) floats sum##r = W::delta_a_block && (r) < N ? fact(out[r]) : _mm512_setzero_ps();
    EACH_ROW(BEGIN)
#undef BEGIN
#pragma GCC unroll 8
    for (int s = 0; s < SUBS; s++) {
        if (N && s < n_last) {
            const floats scale = fact(f.scale[s]);
            const auto & x = scratch.sums[s];
            if constexpr (W::delta_a_block) { // the same bits as those of sum.add: MAGIC_FLOAT * scale is exact
                const ints magic = _mm512_set1_epi32(MAGIC);
                const floats shift = _mm512_mul_ps(scale, _mm512_set1_ps(-MAGIC_FLOAT));
#define ADD(r)                                                                                                         \
    if ((r) < N) {                                                                                                     \
        const floats y = _mm512_castsi512_ps(_mm512_add_epi32(_mm512_load_si512(x[r]), magic));                        \
        sum##r = _mm512_fmadd_ps(_mm512_fmadd_ps(y, scale, shift), _mm512_set1_ps(deltas[s * PASS + (r)]), sum##r);    \
    }
                EACH_ROW(ADD)
#undef ADD
            } else {
#define ADD(r)                                                                                                         \
    if ((r) < N) {                                                                                                     \
        sum##r = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_load_si512(x[r])), scale, sum##r);                          \
    }
                EACH_ROW(ADD)
#undef ADD
            }
        }
        if (s < n_now) {
            prefetch_near(ahead + s * ahead_bytes, ahead_bytes);
            if (s % 2) {
                TILE_BLOCK(3, 1, 5, s)
            } else {
                TILE_BLOCK(2, 0, 4, s)
            }
        }
    }
#define END(r)                                                                                                         \
    if constexpr (W::delta_a_block && (r) < N) {                                                                       \
        const char * row = in.of(last) + std::min(r, last.rows - 1) * in.stride;                                       \
        _mm512_store_ps(out[r], typename W::sum(sum##r).end(f, typename W::inputs(row, in.k, last.at)));               \
    } else if constexpr ((r) < N) {                                                                                    \
        typename W::sum sum(fact(out[r]));                                                                             \
        sum.value = sum##r;                                                                                            \
        const char * row = in.of(last) + std::min(r, last.rows - 1) * in.stride;                                       \
        _mm512_store_ps(out[r], sum.end(f, typename W::inputs(row, in.k, last.at)));                                   \
    }
    EACH_ROW(END)
#undef END
}

template <typename W, int N, bool WHOLE>
__attribute__((noinline)) void tile_unit_of(const tile_job & now, const tile_job & last, const char * weights,
                                            const tile_inputs & in, const char * ahead, int ahead_bytes,
                                            tile_scratch & scratch) {
    tile_unit<W, N, WHOLE>(now, last, weights, in, ahead, ahead_bytes, scratch);
}

// Up to 32 rows, in one or two halves, times one or two strips
template <typename W>
void tile_pass(const char * weights, int strips, const tile_inputs & in, int rows, float * const * out, int column,
               tile_scratch & scratch) {
    constexpr int unit = SUBS * W::block;
    const int halves = rows > 16 ? 2 : 1;
    const int64_t jobs = (in.k + unit - 1) / unit * strips * halves;
    const int64_t strip_size = W::strip_size(in.k);
    memset(scratch.out, 0, sizeof(scratch.out));

    tile_job last;
    const char * tiles = nullptr;
    for (int64_t i = 0; i <= jobs; i++) { // each half of the rows, for each strip, for each unit
        tile_job now;
        const char * ahead = weights;
        if (i < jobs) {
            now.half = i % halves;
            now.strip = i / halves % strips;
            now.facts = i / halves % 2;
            now.at = i / halves / strips * unit;
            now.rows = now.half ? rows - in.first : in.first;
            now.subs = int(std::min<int64_t>(in.k - now.at, unit) / W::block);
            const char * strip = weights + now.strip * strip_size;
            const char * p = W::quants(strip, now.at);
            if (now.half == 0) {
                W::read(strip, in.k, now.at, now.subs, scratch.strips[now.facts]);
                tiles = W::tile_weights(p, now.subs, scratch.weights);
            }
            // after a strip comes the one after the next
            ahead = p + now.half * W::unit_bytes / halves + W::unit_bytes +
                    (now.at + unit < in.k ? 0 : (strips - 1) * strip_size);
        }
        const bool whole = now.subs == SUBS && last.subs == SUBS;
        const auto multiply = !last.rows       ? tile_unit_of<W, 0, false>
                              : !whole         ? tile_unit_of<W, 16, false>
                              : last.rows > 12 ? tile_unit_of<W, 16, true>
                              : last.rows > 8  ? tile_unit_of<W, 12, true>
                                               : tile_unit_of<W, 8, true>;
        multiply(now, last, tiles, in, ahead, W::unit_bytes / SUBS / halves, scratch);
        last = now;
    }
    for (int s = 0; s < strips; s++) {
        for (int r = 0; r < rows; r++) {
            const int at = r < in.first ? r : 16 + r - in.first;
            _mm512_storeu_ps(out[r] + column + COLUMNS * s, _mm512_load_ps(scratch.out[s][at]));
        }
    }
}

template <typename W>
void with_tiles(int64_t k, const char * weights, int strips, const char * inputs, size_t stride, int rows,
                float * const * out, char * memory) {
    auto & scratch = *(tile_scratch *) memory;
    int used = 0;
    for (int r = 0, n = 0; r < rows; r += n) {
        const int passes = (rows - r + PASS - 1) / PASS; // of about as many rows
        n = (rows - r + passes - 1) / passes;
        const tile_inputs in = { inputs + r * stride, stride, k, n > 16 ? (n + 1) / 2 : n };
        if constexpr (W::delta_a_block) {
            const float * d = typename W::inputs(in.rows, k, 0).d;
            const ints row = _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                                _mm512_set1_epi32(int(stride / sizeof(float))));
            for (int64_t b = 0; b < k / W::block; b++) {
                for (int half = 0; half < (n > 16 ? 2 : 1); half++) {
                    const __mmask16 some = (1 << (half ? n - in.first : in.first)) - 1;
                    const float * from = d + b + half * in.first * stride / sizeof(float);
                    const floats x = _mm512_mask_i32gather_ps(_mm512_setzero_ps(), some, row, from, 4);
                    _mm512_store_ps(scratch.deltas() + b * PASS + half * 16, x);
                }
            }
        }
        if (n != used) {
            config_for(W::block, in.first).use();
            used = n;
        }
        for (int c = 0; c < strips; c += 2) {
            tile_pass<W>(weights + c * W::strip_size(k), std::min(strips - c, 2), in, n, out + r, COLUMNS * c, scratch);
        }
    }
    restore_config();
}

#endif

constexpr int STRETCH = 16; // most units of two strips that stay in the second level cache for many rows

// A unit of two strips for many rows without tiles: where its quants are, or, unpacked, vectors of both in turn.
struct many_unit {
    alignas(64) char weights[SUBS * 32 * COLUMNS * 2];
    facts strips[2];
    const char * quants[2];
};

// A pass prefetches a part of the weights of the next two strips: memory is too slow to deliver all of them during one pass.
struct wanted {
    int64_t ahead; // of the weights of a block, in bytes
    int bytes;     // for each block
};

// Unpacks the blocks of a unit into every second vector
template <typename W> void unpack(const char * p, int subs, char * to) {
    constexpr int groups = W::block / 4;
    const auto block = [p, to](int sub) {
#pragma GCC unroll 8
        for (int g = 0; g < groups; g++) {
            store(to + 2 * VECTOR * (groups * sub + g), W::weights(p, sub, g));
        }
    };
    if (subs == SUBS) {
#pragma GCC unroll 8
        for (int sub = 0; sub < SUBS; sub++) {
            block(sub);
        }
    } else {
        for (int sub = 0; sub < subs; sub++) {
            block(sub);
        }
    }
}

// A pointer whose origin the compiler does not know. It then addresses each row as an offset from this pointer; otherwise it
// keeps a pointer for each row and use, more than there are registers.
template <typename T> inline T * hidden(T * p) {
#if defined(__GNUC__)
    asm("" : "+r"(p));
#endif
    return p;
}

// N rows times the units from `at` to `end` of two strips. An input is loaded once for both: loads are what limits one
// strip at a time. Sums stay in registers from the first unit to the last. `soon` are
// prefetched meanwhile.
template <typename W, int N, bool UNPACKED>
void many_rows_units(int64_t k, int64_t at, int64_t end, const many_unit * unit, const char * rows, size_t stride,
                     float * const * out, const int * columns, const wanted & soon) {
    constexpr int groups = W::block / 4;
    constexpr int bytes = W::unit_bytes / SUBS;
    for (int r = 0; r < N; r++) {
        for (int s = 0; s < 2; s++) {
            prefetch_to_write(out[r] + columns[s]);
        }
    }
    floats sums[N][2];
    for (int r = 0; r < N; r++) {
        for (int s = 0; s < 2; s++) {
            sums[r][s] = at ? load_floats(out[r] + columns[s]) : zeros();
        }
    }
    for (; at < end; at += SUBS * W::block, unit++) {
        const typename W::inputs first(rows, k, at);
        typename W::sum each[N][2];
        for (int r = 0; r < N; r++) {
            for (int s = 0; s < 2; s++) {
                each[r][s] = typename W::sum(sums[r][s]);
            }
        }
        const char * quants = rows + at;
        auto in = first;
#pragma GCC unroll 1
        for (int sub = 0; sub < unit->strips[0].subs; sub++) {
            for (int s = 0; s < 2; s++) {
                prefetch(unit->quants[s] + soon.ahead + sub * bytes, soon.bytes);
            }
            quants = hidden(quants);
            in.d = hidden(in.d);
            in.extras = hidden(in.extras);
            total<W::most, groups> x[N][2];
            for (int r = 0; r < N; r++) {
                for (int s = 0; s < 2; s++) {
                    x[r][s].sum = in.behind(r * stride).start();
                }
            }
#pragma GCC unroll 8
            for (int g = 0; g < groups; g++) {
                ints w[2];
                for (int s = 0; s < 2; s++) {
                    w[s] = UNPACKED ? load(unit->weights + VECTOR * (2 * (groups * sub + g) + s))
                                    : W::weights(unit->quants[s], sub, g);
                }
                for (int r = 0; r < N; r++) {
                    const ints input = repeat4(quants + r * stride + 4 * g);
                    for (int s = 0; s < 2; s++) {
                        x[r][s].add(w[s], input, g);
                    }
                }
            }
            for (int r = 0; r < N; r++) {
                for (int s = 0; s < 2; s++) {
                    each[r][s].add(x[r][s].sum, fact(unit->strips[s].scale[sub]), in.behind(r * stride));
                }
            }
            quants += W::block;
            in = in.block(1);
        }
        if constexpr (W::has_minima) { // as sum::end, block by block: sum by sum GCC would keep all sums in memory
            in = first;
#pragma GCC unroll 1
            for (int sub = 0; sub < unit->strips[0].subs; sub++) {
                in.extras = hidden(in.extras);
                for (int r = 0; r < N; r++) {
                    for (int s = 0; s < 2; s++) {
                        each[r][s].add_minimum(unit->strips[s], sub, in.behind(r * stride));
                    }
                }
                in = in.block(1);
            }
        }
        for (int r = 0; r < N; r++) {
            for (int s = 0; s < 2; s++) {
                if constexpr (W::has_minima) {
                    sums[r][s] = each[r][s].value;
                } else {
                    sums[r][s] = each[r][s].end(unit->strips[s], first.behind(r * stride));
                }
            }
        }
    }
    for (int r = 0; r < N; r++) {
        for (int s = 0; s < 2; s++) {
            store(out[r] + columns[s], sums[r][s]);
        }
    }
}

template <typename W, int N, bool UNPACKED>
void many_of_rows(int n, int64_t k, int64_t at, int64_t end, const many_unit * units, const char * rows, size_t stride,
                  float * const * out, const int * columns, const wanted & soon) {
    if (n == N) {
        return many_rows_units<W, N, UNPACKED>(k, at, end, units, rows, stride, out, columns, soon);
    }
    if constexpr (N > 1) {
        many_of_rows<W, N - 1, UNPACKED>(n, k, at, end, units, rows, stride, out, columns, soon);
    }
}

// Many rows without tiles
template <typename W, bool UNPACKED>
void many_rows(int64_t k, const char * weights, int strips, const char * inputs, size_t stride, int rows,
               float * const * out, char * memory) {
    auto * units = (many_unit *) memory;
    constexpr int unit = SUBS * W::block;
    constexpr int most = has_dot ? 6 : 4; // rows whose sums with two strips stay in registers
    const int64_t size = W::strip_size(k);
    for (int c = 0; c < strips; c += 2) {
        const int pair[2] = { c, std::min(c + 1, strips - 1) }; // the last one may be a pair with itself
        const int columns[2] = { COLUMNS * pair[0], COLUMNS * pair[1] };
        for (int s = 2; s < 4; s++) { // what lies behind the units is needed from the first one on
            prefetch(weights + (c + s) * size + W::units_size(k), int(size - W::units_size(k)));
        }
        for (int64_t start = 0; start < k; start += STRETCH * unit) {
            const int64_t end = std::min<int64_t>(k, start + STRETCH * unit);
            for (int64_t at = start; at < end; at += unit) {
                const int subs = int(std::min<int64_t>(k - at, unit) / W::block);
                many_unit & to = units[(at - start) / unit];
                for (int s = 0; s < 2; s++) {
                    const char * strip = weights + pair[s] * size;
                    to.quants[s] = W::quants(strip, at);
                    to.strips[s].subs = subs;
                    W::read(strip, k, at, subs, to.strips[s]);
                    if constexpr (UNPACKED) {
                        unpack<W>(to.quants[s], subs, to.weights + VECTOR * s);
                    }
                }
            }
            for (int r = 0, n = 0; r < rows; r += n) {
                const int passes = (rows - r + most - 1) / most; // of about as many rows
                n = (rows - r + passes - 1) / passes;
                constexpr int bytes = W::unit_bytes / SUBS;
                const int done = bytes * r / rows;
                const wanted soon = { 2 * size + done, bytes * (r + n) / rows - done };
                many_of_rows<W, most, UNPACKED>(n, k, start, end, units, inputs + r * stride, stride, out + r, columns,
                                                soon);
            }
        }
    }
}

template <typename W>
void multiply(int64_t k, const char * weights, int strips, const char * inputs, size_t stride, int rows,
              float * const * out, char * scratch) {
#if defined(GGML_REPACK_TILES)
    if (has_tiles()) {
        if (rows >= FEWEST) {
            return with_tiles<W>(k, weights, strips, inputs, stride, rows, out, scratch);
        }
        for (int s = 0; s < strips; s++) {
            few_of_rows<W, FEWEST - 1>(rows, k, weights + s * W::strip_size(k), inputs, stride, out, COLUMNS * s);
        }
        return;
    }
#endif
    if (rows == 1) {
        static const reading how(W::direct >= CHEAP);
        const auto multiply = how.lines ? few_rows<W, 1, true> : few_rows<W, 1, false>;
        for (int s = 0; s < strips; s++) {
            multiply(k, weights + s * W::strip_size(k), inputs, stride, out, COLUMNS * s, how.bursts);
        }
    } else if (rows <= W::direct) {
        many_rows<W, false>(k, weights, strips, inputs, stride, rows, out, scratch);
    } else {
        many_rows<W, true>(k, weights, strips, inputs, stride, rows, out, scratch);
    }
}

size_t scratch_size(int64_t k) {
    const int64_t units = (k + SUBS * 16 - 1) / (SUBS * 16); // of the smallest blocks
    const size_t many = std::min<int64_t>(units, STRETCH) * sizeof(many_unit);
#if defined(GGML_REPACK_TILES)
    return std::max(many, sizeof(tile_scratch) + (k / 32 + SUBS) * PASS * sizeof(float));
#else
    return many;
#endif
}

template <typename W> void repack(char * to, const char * from, int64_t k, int64_t n) {
    const size_t column = W::strip_size(k) / COLUMNS; // as many bytes as before
    for (int64_t c = 0; c < n; c += COLUMNS) {
        W::repack(to + c * column, from + c * column, column, k);
    }
}

#if defined(GGML_REPACK_TILES_BF16)
template <typename W>
constexpr const ggml_wide_prompts * prompts = &repack_prompts::kernel<repack_prompts::of_quants<W, facts>>;
constexpr const ggml_wide_prompts * prompts_of_bf16 = &repack_prompts::kernel<repack_prompts::of_bf16>;
constexpr const ggml_wide_prompts * prompts_of_f16 = &repack_prompts::kernel<repack_prompts::of_f16>;
#else
template <typename W> constexpr const ggml_wide_prompts * prompts = nullptr;
constexpr const ggml_wide_prompts * prompts_of_bf16 = nullptr;
constexpr const ggml_wide_prompts * prompts_of_f16 = nullptr;
#endif

template <typename W>
constexpr ggml_wide_kernel kernel = { row_layout<W>::size, quantize<W>, repack<W>, multiply<W>,
                                      scratch_size,        prompts<W>,  false };

constexpr ggml_wide_kernel kernel_of_bf16 = repack_floats::kernel<repack_floats::of_bf16>(prompts_of_bf16, true);
constexpr ggml_wide_kernel kernel_of_f16 = repack_floats::kernel<repack_floats::of_f16>(prompts_of_f16, false);

using q4_0 = of_32<quants_of_4<block_q4_0, 8>>;
using q4_1 = of_32<with_minima<quants_of_4<block_q4_1, 0>>>;
using q5_0 = of_32<quants_of_5<block_q5_0, 16>>;
using q5_1 = of_32<with_minima<quants_of_5<block_q5_1, 0>>>;
using q8_0 = of_32<quants_q8_0>;
using iq4_nl = of_32<quants_of_table<block_iq4_nl, kvalues_iq4nl, 128, SIGN_BIAS>>;
using mxfp4 = of_32<quants_mxfp4>;
using q4_K = of_256<block_q4_K, false>;
using q5_K = of_256<block_q5_K, true>;

} // namespace

bool ggml_wide_has_tiles() {
#if defined(GGML_REPACK_TILES)
    return has_tiles();
#else
    return false;
#endif
}

bool ggml_wide_has_prompts() {
#if defined(GGML_REPACK_TILES_BF16)
    return has_tiles();
#else
    return false;
#endif
}

const ggml_wide_kernel * ggml_wide_kernel_of(ggml_type type) {
    switch (type) {
        case GGML_TYPE_Q4_0: return &kernel<q4_0>;
        case GGML_TYPE_Q4_1: return &kernel<q4_1>;
        case GGML_TYPE_Q5_0: return &kernel<q5_0>;
        case GGML_TYPE_Q5_1: return &kernel<q5_1>;
        case GGML_TYPE_Q8_0: return &kernel<q8_0>;
        case GGML_TYPE_IQ4_NL: return &kernel<iq4_nl>;
        case GGML_TYPE_IQ4_XS: return &kernel<of_iq4_xs>;
        case GGML_TYPE_MXFP4: return &kernel<mxfp4>;
        case GGML_TYPE_Q2_K: return &kernel<of_q2_K>;
        case GGML_TYPE_Q3_K: return &kernel<of_q3_K>;
        case GGML_TYPE_Q4_K: return &kernel<q4_K>;
        case GGML_TYPE_Q5_K: return &kernel<q5_K>;
        case GGML_TYPE_Q6_K: return &kernel<of_q6_K>;
        case GGML_TYPE_BF16: return &kernel_of_bf16;
        case GGML_TYPE_F16: return &kernel_of_f16;
        default: return nullptr;
    }
}

#endif
