// The kernels that repack-wide.h declares.

#define GGML_COMMON_IMPL_CPP
#define GGML_COMMON_DECL_CPP
#include "ggml-common.h"

#include "repack-wide.h"

#if defined(GGML_REPACK_WIDE)
#include "ggml-impl.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <immintrin.h>

#if defined(GGML_EMULATED_TILES) // a check, on CPUs without AMX
#define GGML_REPACK_TILES
#include "emulated_tiles.h"
#elif defined(__AMX_INT8__) && defined(__linux__)
#define GGML_REPACK_TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

using ints = __m512i;
using floats = __m512;

constexpr int COLUMNS = 16;      // of a strip
constexpr int SUBS = 8;          // blocks of weights with a scale of their own that make a unit of work
constexpr int PASS = 32;         // most rows at once
constexpr int AHEAD = 12 * 1024; // bytes from the weights of few rows to those that are prefetched meanwhile

inline ints load(const void * p) { return _mm512_loadu_si512(p); }

inline ints all(int8_t x) { return _mm512_set1_epi8(x); }

inline ints low_nibbles(ints x) { return _mm512_and_si512(x, all(15)); }

inline ints high_nibbles(ints x) { return low_nibbles(_mm512_srli_epi16(x, 4)); }

inline ints repeat4(const void * p) {
    int32_t x;
    memcpy(&x, p, sizeof(x));
    return _mm512_set1_epi32(x);
}

inline floats halves(const char * p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) p)); }

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
// between the products: as a burst they would hold up all other reads until most of them are there. AMD's (Zen 5) want
// bursts besides.
bool wants_bursts() {
#if defined(__GNUC__)
    static const bool wants = __builtin_cpu_is("amd");
    return wants;
#else
    return false;
#endif
}

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

inline ints round_scaled(const float * x, floats by) {
    return _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x), by));
}

// Quants of a row are -127 to 127; a delta's block has its largest at one end.
template <typename W> void quantize(const float * x, char * row, int64_t k) {
    float * deltas = (float *) (row + row_layout<W>::deltas(k));
    auto * extra = (typename W::extra *) (row + row_layout<W>::extra(k));
    for (int64_t i = 0; i < k; i += W::delta_size) {
        floats most = _mm512_setzero_ps();
        for (int j = 0; j < W::delta_size; j += 16) {
            most = _mm512_max_ps(most, _mm512_abs_ps(_mm512_loadu_ps(x + i + j)));
        }
        const float largest = _mm512_reduce_max_ps(most);
        deltas[i / W::delta_size] = largest / 127.0f;
        const floats by = _mm512_set1_ps(largest > 0.0f ? 127.0f / largest : 0.0f);
        for (int j = 0; j < W::delta_size; j += W::block) {
            ints sum = _mm512_setzero_si512();
            for (int l = 0; l < W::block; l += 16) {
                const ints quants = round_scaled(x + i + j + l, by);
                _mm_storeu_si128((__m128i *) (row + i + j + l), _mm512_cvtsepi32_epi8(quants));
                sum = _mm512_add_epi32(sum, quants);
            }
            extra[(i + j) / W::block] = (typename W::extra)(W::extra_factor * _mm512_reduce_add_epi32(sum));
        }
    }
}

// What a unit of work needs of a strip besides quants.
struct facts {
    alignas(64) float scale[SUBS][16];
    alignas(64) int16_t mins[SUBS / 2][32]; // those of two blocks side by side
    alignas(64) float d[16];
    alignas(64) float dmin[16];
};

inline floats fact(const float * p) { return _mm512_load_ps(p); }

// Blocks of 32 weights with a delta each. A unit has its quants first and its deltas after them.
template <typename QUANTS> struct of_32 {
    using extra = int32_t;
    static constexpr int block = 32;
    static constexpr int delta_size = 32;
    static constexpr bool delta_a_block = true;        // of the inputs
    static constexpr int extra_factor = -QUANTS::bias; // where a sum of unsigned weights begins

    static constexpr int bytes = QUANTS::bytes + 2 * COLUMNS; // of a block
    static constexpr int unit_bytes = SUBS * bytes;

    static constexpr int64_t strip_size(int64_t k) { return k / 32 * bytes; }

    static constexpr int64_t units_size(int64_t k) { return strip_size(k); }

    static void read(const char * strip, int64_t, int64_t at, int subs, facts & f) {
        const char * d = quants(strip, at) + subs * QUANTS::bytes;
        for (int s = 0; s < subs; s++) {
            _mm512_store_ps(f.scale[s], halves(d + s * 2 * COLUMNS));
        }
    }

    static const char * quants(const char * strip, int64_t at) { return strip + at / 32 * bytes; }

    // the inputs' part of a unit
    struct inputs {
        const float * d = nullptr;
        const extra * starts = nullptr;

        inputs() = default;

        inputs(const char * row, int64_t k, int64_t at)
            : d((const float *) (row + row_layout<of_32>::deltas(k)) + at / 32),
              starts((const extra *) (row + row_layout<of_32>::extra(k)) + at / 32) {}

        ints start(int sub) const { return _mm512_set1_epi32(starts[sub]); }
    };

    // a row's sum, and a block's share
    struct sum {
        floats value = _mm512_setzero_ps();

        sum() = default;

        explicit sum(floats before) : value(before) {}

        void add(ints x, int sub, const facts & f, const inputs & in) {
            const floats y = _mm512_mul_ps(_mm512_cvtepi32_ps(x), fact(f.scale[sub]));
            value = _mm512_fmadd_ps(y, _mm512_set1_ps(in.d[sub]), value);
        }

        floats end(const facts &, const inputs &) const { return value; }
    };

    static ints weights(const char * p, int sub, int group) { return QUANTS::weights(p, sub, group); }

    static const char * tile_weights(const char * p, int subs, char * to) { return QUANTS::tile_weights(p, subs, to); }

    static constexpr bool tile_signed = true;

    static void repack(char * strip, const char * from, size_t column, int64_t k) {
        for (int64_t b = 0; b < k / 32; b++) {
            const int64_t sub = b % SUBS;
            const int64_t subs = std::min<int64_t>(k / 32 - (b - sub), SUBS); // of this unit
            char * unit = strip + (b - sub) * bytes;
            for (int c = 0; c < COLUMNS; c++) {
                const auto & in = ((const typename QUANTS::from *) (from + c * column))[b];
                memcpy(unit + subs * QUANTS::bytes + (sub * COLUMNS + c) * 2, &in.d, 2);
                for (int g = 0; g < QUANTS::bytes / 64; g++) {
                    memcpy(unit + sub * QUANTS::bytes + g * 64 + c * 4, (const char *) in.qs + 4 * g, 4);
                }
            }
        }
    }
};

struct quants_q8_0 {
    using from = block_q8_0;
    static constexpr int bytes = 512;
    static constexpr int bias = 128;

    static ints weights(const char * p, int sub, int group) {
        return _mm512_xor_si512(load(p + bytes * sub + 64 * group), all((int8_t) 0x80));
    }

    static const char * tile_weights(const char * p, int, char *) { return p; }
};

// four bits, of which the weights are found in a table
template <typename FROM, int BIAS> struct quants_of_table {
    using from = FROM;
    static constexpr int bytes = 256;
    static constexpr int bias = BIAS;

    static ints nibbles(const char * p, int sub, int group) {
        const ints x = load(p + bytes * sub + 64 * (group % 4));
        return group / 4 ? high_nibbles(x) : low_nibbles(x);
    }

    static ints look_up(ints x, bool biased) {
        if constexpr (BIAS == 8) {
            return biased ? x : _mm512_sub_epi8(x, all(8));
        } else {
            const ints table = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *) kvalues_iq4nl));
            const ints y = _mm512_shuffle_epi8(table, x);
            return biased ? _mm512_xor_si512(y, all((int8_t) 0x80)) : y;
        }
    }

    static ints weights(const char * p, int sub, int group) { return look_up(nibbles(p, sub, group), true); }

    static const char * tile_weights(const char * p, int subs, char * to) {
        for (int i = 0; i < subs; i++) {
            for (int g = 0; g < 4; g++) {
                const ints x = load(p + bytes * i + 64 * g);
                _mm512_store_si512(to + 512 * i + 64 * g, look_up(low_nibbles(x), false));
                _mm512_store_si512(to + 512 * i + 64 * (g + 4), look_up(high_nibbles(x), false));
            }
        }
        return to;
    }
};

// Super-blocks of 256 weights, with a scale and an offset of six bits for every 32: Q4_K, and Q5_K with a bit more. A
// super-block of a strip: quants, the fifth bits, scales and offsets as below, deltas of both.
template <typename FROM, bool FIFTH> struct of_256 {
    using extra = int16_t;
    static constexpr int block = 32;
    static constexpr int delta_size = QK_K;
    static constexpr bool delta_a_block = false;
    static constexpr int extra_factor = 1;
    static constexpr int quants_size = 2048;
    static constexpr int fifth_size = FIFTH ? 512 : 0;
    static constexpr int unit_bytes = quants_size + fifth_size + 192 + 64;

    static constexpr int64_t strip_size(int64_t k) { return k / QK_K * unit_bytes; }

    static constexpr int64_t units_size(int64_t k) { return strip_size(k); }

    static const char * quants(const char * strip, int64_t at) { return strip + at / QK_K * unit_bytes; }

    // Of 128 scales (eight of each column, column by column within a block), then 128 offsets: four bits of a scale and
    // its offset are a byte, two more bits of four of them another. Offsets of two neighbouring blocks alternate.
    static void pack(char * to, const uint8_t * scales, const uint8_t * mins) {
        uint8_t * low = (uint8_t *) to;
        uint8_t * high = low + 128;
        for (int i = 0; i < 128; i++) {
            low[i] = (scales[i] & 15) | (mins[i] & 15) << 4;
        }
        for (int i = 0; i < 64; i++) {
            high[i] = scales[i] >> 4 | (scales[i + 64] >> 4) << 2 | (mins[i] >> 4) << 4 | (mins[i + 64] >> 4) << 6;
        }
    }

    static void read(const char * strip, int64_t, int64_t at, int, facts & f) {
        const char * p = quants(strip, at) + quants_size + fifth_size;
        alignas(64) uint8_t bytes[256];
        const ints low[2] = { load(p), load(p + 64) };
        const ints high = load(p + 128);
        const ints two = all(0x30);
        _mm512_store_si512(bytes,
                           _mm512_or_si512(low_nibbles(low[0]), _mm512_and_si512(_mm512_slli_epi16(high, 4), two)));
        _mm512_store_si512(bytes + 64,
                           _mm512_or_si512(low_nibbles(low[1]), _mm512_and_si512(_mm512_slli_epi16(high, 2), two)));
        _mm512_store_si512(bytes + 128, _mm512_or_si512(high_nibbles(low[0]), _mm512_and_si512(high, two)));
        _mm512_store_si512(bytes + 192,
                           _mm512_or_si512(high_nibbles(low[1]), _mm512_and_si512(_mm512_srli_epi16(high, 2), two)));
        for (int s = 0; s < SUBS; s++) {
            const ints x = _mm512_cvtepu8_epi32(_mm_load_si128((const __m128i *) (bytes + 16 * s)));
            _mm512_store_ps(f.scale[s], _mm512_cvtepi32_ps(x));
        }
        for (int s = 0; s < SUBS / 2; s++) {
            const ints x = _mm512_cvtepu8_epi16(_mm256_load_si256((const __m256i *) (bytes + 128 + 32 * s)));
            _mm512_store_si512(f.mins[s], x);
        }
        _mm512_store_ps(f.d, halves(p + 192));
        _mm512_store_ps(f.dmin, halves(p + 224));
    }

    struct inputs {
        const float * d = nullptr;
        const extra * sums = nullptr;

        inputs() = default;

        inputs(const char * row, int64_t k, int64_t at)
            : d((const float *) (row + row_layout<of_256>::deltas(k)) + at / QK_K),
              sums((const extra *) (row + row_layout<of_256>::extra(k)) + at / block) {}

        ints start(int) const { return _mm512_setzero_si512(); }
    };

    struct sum {
        floats before = _mm512_setzero_ps();
        floats value = _mm512_setzero_ps();

        sum() = default;

        explicit sum(floats before) : before(before) {}

        void add(ints x, int sub, const facts & f, const inputs &) {
            value = _mm512_fmadd_ps(_mm512_cvtepi32_ps(x), fact(f.scale[sub]), value);
        }

        floats end(const facts & f, const inputs & in) const {
            ints offsets = _mm512_setzero_si512();
            for (int s = 0; s < SUBS / 2; s++) {
                offsets = _mm512_dpwssd_epi32(offsets, _mm512_load_si512(f.mins[s]), repeat4(in.sums + 2 * s));
            }
            const floats y = _mm512_mul_ps(value, fact(f.d));
            const floats z = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(offsets), fact(f.dmin), y);
            return _mm512_fmadd_ps(z, _mm512_set1_ps(in.d[0]), before);
        }
    };

    static ints fifth(const char * p, int sub, int group) {
        const ints bits = _mm512_srl_epi16(load(p + quants_size + 64 * group), _mm_cvtsi32_si128(sub));
        return _mm512_slli_epi16(_mm512_and_si512(bits, all(1)), 4);
    }

    static ints weights(const char * p, int sub, int group) {
        const ints x = load(p + 64 * (8 * (sub / 2) + group));
        const ints y = sub % 2 ? high_nibbles(x) : low_nibbles(x);
        return FIFTH ? _mm512_or_si512(y, fifth(p, sub, group)) : y;
    }

    static const char * tile_weights(const char * p, int, char * to) {
        for (int i = 0; i < SUBS / 2; i++) {
            for (int g = 0; g < 8; g++) {
                const ints x = load(p + 64 * (8 * i + g));
                ints low = low_nibbles(x);
                ints high = high_nibbles(x);
                if (FIFTH) {
                    low = _mm512_or_si512(low, fifth(p, 2 * i, g));
                    high = _mm512_or_si512(high, fifth(p, 2 * i + 1, g));
                }
                _mm512_store_si512(to + 512 * (2 * i) + 64 * g, low);
                _mm512_store_si512(to + 512 * (2 * i + 1) + 64 * g, high);
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
                    memcpy(to + 64 * g + 4 * c, in.qs + 4 * g, 4);
                }
                if constexpr (FIFTH) {
                    for (int g = 0; g < 8; g++) {
                        memcpy(to + quants_size + 64 * g + 4 * c, in.qh + 4 * g, 4);
                    }
                }
                for (int s = 0; s < SUBS; s++) { // as get_scale_min_k4 of ggml-quants.c
                    const uint8_t * q = in.scales;
                    scales[16 * s + c] = s < 4 ? q[s] & 63 : (q[s + 4] & 15) | (q[s - 4] >> 6) << 4;
                    mins[32 * (s / 2) + 2 * c + s % 2] = s < 4 ? q[s + 4] & 63 : q[s + 4] >> 4 | (q[s] >> 6) << 4;
                }
                memcpy(to + quants_size + fifth_size + 192 + 2 * c, &in, 2);                    // d
                memcpy(to + quants_size + fifth_size + 224 + 2 * c, (const char *) &in + 2, 2); // dmin
            }
            pack(to + quants_size + fifth_size, scales, mins);
        }
    }
};

// Q6_K: weights are 0 to 63 less 32, four bits and two more of them, with a scale for every 16. A unit is half a
// super-block; deltas come last in a strip.
struct of_q6_K {
    using extra = int32_t;
    static constexpr int block = 16;
    static constexpr int delta_size = QK_K;
    static constexpr bool delta_a_block = false;
    static constexpr int extra_factor = -32;
    static constexpr int unit_bytes = 1024 + 512 + 128;

    static constexpr int64_t strip_size(int64_t k) { return k / QK_K * (2 * unit_bytes + 2 * COLUMNS); }

    static constexpr int64_t units_size(int64_t k) { return k / QK_K * 2 * unit_bytes; }

    static const char * quants(const char * strip, int64_t at) { return strip + at / 128 * unit_bytes; }

    static void read(const char * strip, int64_t k, int64_t at, int, facts & f) {
        const char * scales = quants(strip, at) + 1536;
        for (int s = 0; s < SUBS; s++) {
            const ints x = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *) (scales + 16 * s)));
            _mm512_store_ps(f.scale[s], _mm512_cvtepi32_ps(x));
        }
        _mm512_store_ps(f.d, halves(strip + units_size(k) + at / QK_K * 2 * COLUMNS));
    }

    struct inputs {
        const float * d = nullptr;
        const extra * starts = nullptr;

        inputs() = default;

        inputs(const char * row, int64_t k, int64_t at)
            : d((const float *) (row + row_layout<of_q6_K>::deltas(k)) + at / QK_K),
              starts((const extra *) (row + row_layout<of_q6_K>::extra(k)) + at / block) {}

        ints start(int sub) const { return _mm512_set1_epi32(starts[sub]); }
    };

    struct sum {
        floats before = _mm512_setzero_ps();
        floats value = _mm512_setzero_ps();

        sum() = default;

        explicit sum(floats before) : before(before) {}

        void add(ints x, int sub, const facts & f, const inputs &) {
            value = _mm512_fmadd_ps(_mm512_cvtepi32_ps(x), fact(f.scale[sub]), value);
        }

        floats end(const facts & f, const inputs & in) const {
            return _mm512_fmadd_ps(_mm512_mul_ps(value, fact(f.d)), _mm512_set1_ps(in.d[0]), before);
        }
    };

    // 32 weights have the same four bits' place and two bits' shift
    static ints bits(const char * p, int part, int group) {
        const ints x = load(p + 64 * (8 * (part % 2) + group));
        const ints y = load(p + 1024 + 64 * group);
        const ints upper = _mm512_and_si512(_mm512_srl_epi16(y, _mm_cvtsi32_si128(2 * part)), all(3));
        return _mm512_or_si512(part / 2 ? high_nibbles(x) : low_nibbles(x), _mm512_slli_epi16(upper, 4));
    }

    static ints weights(const char * p, int sub, int group) { return bits(p, sub / 2, 4 * (sub % 2) + group); }

    static const char * tile_weights(const char * p, int, char * to) {
        for (int part = 0; part < 4; part++) {
            for (int g = 0; g < 8; g++) {
                _mm512_store_si512(to + 64 * (8 * part + g), _mm512_sub_epi8(bits(p, part, g), all(32)));
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
                        memcpy(to + 64 * g + 4 * c, in.ql + 64 * half + 4 * g, 4);
                    }
                    for (int g = 0; g < 8; g++) {
                        memcpy(to + 1024 + 64 * g + 4 * c, in.qh + 32 * half + 4 * g, 4);
                    }
                    for (int s = 0; s < SUBS; s++) {
                        to[1536 + 16 * s + c] = in.scales[8 * half + s];
                    }
                }
                memcpy(strip + units_size(k) + (b * COLUMNS + c) * 2, &in.d, 2);
            }
        }
    }
};

// The sums of a block's groups of four weights: several of them, so that they need not wait for each other.
template <typename W, int N, int PARTS>
inline void add_block(const char * p, int sub, const char * const * quants, int64_t at, const typename W::inputs * in,
                      const facts & f, typename W::sum * sums) {
    constexpr int groups = W::block / 4;
    constexpr int bytes = W::unit_bytes / SUBS;
    static_assert(bytes <= 64 * (groups + 1), "a line a group and one more are too few");
    ints x[N][PARTS];
    for (int r = 0; r < N; r++) {
        x[r][0] = in[r].start(sub);
        for (int i = 1; i < PARTS; i++) {
            x[r][i] = _mm512_setzero_si512();
        }
    }
    for (int g = 0; g < groups; g++) {
        if (64 * g < bytes) {
            prefetch(p + AHEAD + sub * bytes + 64 * g, 64);
        }
        const ints w = W::weights(p, sub, g);
        for (int r = 0; r < N; r++) {
            x[r][g % PARTS] = _mm512_dpbusd_epi32(x[r][g % PARTS], w, repeat4(quants[r] + at + W::block * sub + 4 * g));
        }
    }
    if (bytes > 64 * groups) {
        prefetch(p + AHEAD + sub * bytes + 64 * groups, 64);
    }
    for (int r = 0; r < N; r++) {
        for (int i = 1; i < PARTS; i++) {
            x[r][0] = _mm512_add_epi32(x[r][0], x[r][i]);
        }
        sums[r].add(x[r][0], sub, f, in[r]);
    }
}

// N rows times a strip
template <typename W, int N>
void few_rows(int64_t k, const char * strip, const char * inputs, size_t stride, float * const * out, int column) {
    constexpr int unit = SUBS * W::block;
    constexpr int parts = N == 1 ? 4 : N < 4 ? 2 : 1;
    const char * quants[N];
    floats sums[N];
    for (int r = 0; r < N; r++) {
        quants[r] = inputs + r * stride;
        sums[r] = _mm512_setzero_ps();
    }
    // what lies behind the units is needed from the first one on
    prefetch_near(strip + W::strip_size(k) + W::units_size(k), int(W::strip_size(k) - W::units_size(k)));
    const bool bursts = wants_bursts();
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
                add_block<W, N, parts>(p, sub, quants, at, in, f, each);
            }
        } else {
            for (int sub = 0; sub < subs; sub++) {
                add_block<W, N, parts>(p, sub, quants, at, in, f, each);
            }
        }
        for (int r = 0; r < N; r++) {
            sums[r] = each[r].end(f, in[r]);
        }
    }
    for (int r = 0; r < N; r++) {
        _mm512_storeu_ps(out[r] + column, sums[r]);
    }
}

template <typename W, int N>
void few_of_rows(int n, int64_t k, const char * strip, const char * inputs, size_t stride, float * const * out,
                 int column) {
    if (n == N) {
        return few_rows<W, N>(k, strip, inputs, stride, out, column);
    }
    if constexpr (N > 1) {
        few_of_rows<W, N - 1>(n, k, strip, inputs, stride, out, column);
    }
}

#if defined(GGML_REPACK_TILES)

constexpr int FEWEST = 9; // rows for which tiles are faster, one more than few_rows takes

#if !defined(GGML_EMULATED_TILES)
// Tiles have to be asked for, once in a process.
bool ask_for_tiles() {
    constexpr int request = 0x1023; // ARCH_REQ_XCOMP_PERM
    constexpr int tile_data = 18;
    return syscall(SYS_arch_prctl, request, tile_data) == 0;
}

// The intrinsics of GCC 12 do not say that they read and write memory.
#define TILE_LOAD(tile, base, stride)                                                                                  \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile : : "r"(base), "r"((int64_t) (stride)) : "memory")
#define TILE_STORE(tile, base)                                                                                         \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" : : "r"(base), "r"((int64_t) 64) : "memory")
#define TILE_ZERO(tile) __asm__ volatile("tilezero %%tmm" #tile : :)
#define TILE_MULTIPLY(is_signed, c, a, b)                                                                              \
    if constexpr (is_signed) {                                                                                         \
        __asm__ volatile("tdpbssd %%tmm" #b ", %%tmm" #a ", %%tmm" #c : :);                                            \
    } else {                                                                                                           \
        __asm__ volatile("tdpbsud %%tmm" #b ", %%tmm" #a ", %%tmm" #c : :);                                            \
    }
#define TILE_CONFIG(config) __asm__ volatile("ldtilecfg %0" : : "m"(config) : "memory")
#endif

// GGML_CPU_AMX=0 turns tiles off, as it does llama.cpp's own (patch 0007).
bool has_tiles() {
    static const bool has = [] {
        const char * env = getenv("GGML_CPU_AMX");
        return (env == nullptr || strcmp(env, "0") != 0) && ask_for_tiles();
    }();
    return has;
}

struct alignas(64) tile_config {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t bytes[16] = {}; // of a row
    uint8_t rows[16] = {};

    void use() const { TILE_CONFIG(*this); }
};

// Weights in 0 and 1, inputs in 2 and 3, sums in the others: of `rows` rows.
tile_config config_for(int block, int rows) {
    tile_config config;
    for (int t = 0; t < 8; t++) {
        config.bytes[t] = t == 2 || t == 3 ? block : 64;
        config.rows[t] = t < 2 ? block / 4 : rows;
    }
    return config;
}

// The state in which amx/mmq.cpp, which sets it once in each thread, expects it.
void restore_config() { config_for(32, 16).use(); }

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
    TILE_STORE(C, scratch.sums[s]);

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
        _mm512_store_ps(out[r], sum##r);                                                                               \
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

// What many rows without tiles need: two strips of a unit, unpacked, and the sums of a pass of rows.
struct many_scratch {
    alignas(64) char weights[SUBS * 32 * COLUMNS * 2]; // vectors of both in turn
    facts strips[2];
    alignas(64) float sums[PASS][2][16];
};

// Unpacks the blocks of a unit into every second vector
template <typename W> void unpack(const char * p, int subs, char * to) {
    constexpr int groups = W::block / 4;
    const auto block = [p, to](int sub) {
#pragma GCC unroll 8
        for (int g = 0; g < groups; g++) {
            _mm512_store_si512(to + 128 * (groups * sub + g), W::weights(p, sub, g));
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

// N rows times a unit of S strips. An input is loaded once for both: loads are what limits one strip at a time.
template <typename W, int N, int S>
void many_rows_unit(int64_t k, int64_t at, int subs, const many_scratch & scratch, const char * rows, size_t stride,
                    float (*sums)[2][16]) {
    constexpr int groups = W::block / 4;
    typename W::inputs in[N];
    typename W::sum each[N][S];
    for (int r = 0; r < N; r++) {
        in[r] = typename W::inputs(rows + r * stride, k, at);
        for (int s = 0; s < S && W::delta_a_block; s++) {
            each[r][s] = typename W::sum(fact(sums[r][s]));
        }
    }
    const char * weights = scratch.weights;
    const char * quants = rows + at;
#pragma GCC unroll 1
    for (int sub = 0; sub < subs; sub++) {
        ints x[N][S];
        for (int r = 0; r < N; r++) {
            for (int s = 0; s < S; s++) {
                x[r][s] = in[r].start(sub);
            }
        }
#pragma GCC unroll 8
        for (int g = 0; g < groups; g++) {
            ints w[S];
            for (int s = 0; s < S; s++) {
                w[s] = load(weights + 64 * (2 * g + s));
            }
            for (int r = 0; r < N; r++) {
                const ints input = repeat4(quants + r * stride + 4 * g);
                for (int s = 0; s < S; s++) {
                    x[r][s] = _mm512_dpbusd_epi32(x[r][s], w[s], input);
                }
            }
        }
        for (int r = 0; r < N; r++) {
            for (int s = 0; s < S; s++) {
                each[r][s].add(x[r][s], sub, scratch.strips[s], in[r]);
            }
        }
        weights += 128 * groups;
        quants += W::block;
    }
    for (int r = 0; r < N; r++) {
        for (int s = 0; s < S; s++) {
            if constexpr (!W::delta_a_block) {
                each[r][s].before = fact(sums[r][s]);
            }
            _mm512_store_ps(sums[r][s], each[r][s].end(scratch.strips[s], in[r]));
        }
    }
}

template <typename W, int N, int S>
void many_of_rows(int n, int64_t k, int64_t at, int subs, const many_scratch & scratch, const char * rows,
                  size_t stride, float (*sums)[2][16]) {
    if (n == N) {
        return many_rows_unit<W, N, S>(k, at, subs, scratch, rows, stride, sums);
    }
    if constexpr (N > 1) {
        many_of_rows<W, N - 1, S>(n, k, at, subs, scratch, rows, stride, sums);
    }
}

// Up to PASS rows, without tiles
template <typename W>
void many_rows(int64_t k, const char * weights, int strips, const char * inputs, size_t stride, int rows,
               float * const * out, char * memory) {
    auto & scratch = *(many_scratch *) memory;
    constexpr int unit = SUBS * W::block;
    constexpr int most = 6; // rows whose sums with two strips stay in registers
    const int64_t size = W::strip_size(k);
    for (int c = 0; c < strips; c += 2) {
        const int n_strips = std::min(strips - c, 2);
        memset(scratch.sums, 0, rows * sizeof(scratch.sums[0]));
        for (int s = 2; s < 4; s++) { // what lies behind the units is needed from the first one on
            prefetch(weights + (c + s) * size + W::units_size(k), int(size - W::units_size(k)));
        }
        for (int64_t at = 0; at < k; at += unit) {
            const int subs = int(std::min<int64_t>(k - at, unit) / W::block);
            for (int s = 0; s < n_strips; s++) {
                const char * strip = weights + (c + s) * size;
                const char * p = W::quants(strip, at);
                unpack<W>(p, subs, scratch.weights + 64 * s);
                W::read(strip, k, at, subs, scratch.strips[s]);
                // after a strip comes the one after the next
                prefetch(p + W::unit_bytes + (at + unit < k ? 0 : (n_strips - 1) * size), W::unit_bytes);
            }
            for (int r = 0, n = 0; r < rows; r += n) {
                const int passes = (rows - r + most - 1) / most; // of about as many rows
                n = (rows - r + passes - 1) / passes;
                const auto multiply = n_strips == 2 ? many_of_rows<W, most, 2> : many_of_rows<W, most, 1>;
                multiply(n, k, at, subs, scratch, inputs + r * stride, stride, scratch.sums + r);
            }
        }
        for (int r = 0; r < rows; r++) {
            for (int s = 0; s < n_strips; s++) {
                _mm512_storeu_ps(out[r] + (c + s) * COLUMNS, fact(scratch.sums[r][s]));
            }
        }
    }
}

template <typename W>
void multiply(int64_t k, const char * weights, int strips, const char * inputs, size_t stride, int rows,
              float * const * out, char * scratch) {
    int few = 7; // most rows that a strip at a time is faster for
#if defined(GGML_REPACK_TILES)
    if (has_tiles()) {
        few = FEWEST - 1;
        if (rows > few) {
            return with_tiles<W>(k, weights, strips, inputs, stride, rows, out, scratch);
        }
    }
#endif
    if (rows > few) {
        return many_rows<W>(k, weights, strips, inputs, stride, rows, out, scratch);
    }
    for (int s = 0; s < strips; s++) {
        few_of_rows<W, 8>(rows, k, weights + s * W::strip_size(k), inputs, stride, out, COLUMNS * s);
    }
}

size_t scratch_size(int64_t k) {
#if defined(GGML_REPACK_TILES)
    return std::max(sizeof(many_scratch), sizeof(tile_scratch) + (k / 32 + SUBS) * PASS * sizeof(float));
#else
    GGML_UNUSED(k);
    return sizeof(many_scratch);
#endif
}

template <typename W> void repack(char * to, const char * from, int64_t k, int64_t n) {
    const size_t column = W::strip_size(k) / COLUMNS; // as many bytes as before
    for (int64_t c = 0; c < n; c += COLUMNS) {
        W::repack(to + c * column, from + c * column, column, k);
    }
}

template <typename W>
constexpr ggml_wide_kernel kernel = { row_layout<W>::size, quantize<W>, repack<W>, multiply<W>, scratch_size };

using q4_0 = of_32<quants_of_table<block_q4_0, 8>>;
using q8_0 = of_32<quants_q8_0>;
using iq4_nl = of_32<quants_of_table<block_iq4_nl, 128>>;
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

const ggml_wide_kernel * ggml_wide_kernel_of(ggml_type type) {
    switch (type) {
        case GGML_TYPE_Q4_0: return &kernel<q4_0>;
        case GGML_TYPE_Q8_0: return &kernel<q8_0>;
        case GGML_TYPE_IQ4_NL: return &kernel<iq4_nl>;
        case GGML_TYPE_Q4_K: return &kernel<q4_K>;
        case GGML_TYPE_Q5_K: return &kernel<q5_K>;
        case GGML_TYPE_Q6_K: return &kernel<of_q6_K>;
        default: return nullptr;
    }
}

#endif
