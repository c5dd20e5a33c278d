#pragma once

// Products of repacked Q4_0 and Q8_0 weights with any number of rows, up to four or eight in a pass over the weights.
//
// A vector holds eight weights of each of four or eight columns. A bias makes them unsigned, as vpdpbusd
// and vpmaddubsw need them; the bias' share, -bias * (sum of the row's quants), is where a block's sum begins. It
// is computed once for a panel of columns, as are the rows' deltas. Eight weights make two partial sums of 32 bits, which
// stay apart to the end. Q8_0 without VNNI has signs instead of a bias, see there.

#include "ggml-impl.h"
#include "repack-any-rows.h"
#include "repack.h"
#include "simd-mappings.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <immintrin.h>

namespace repack_rows {

#if defined(GGML_REPACK_VNNI) || defined(GGML_REPACK_512)
static constexpr int ROWS = 8; // most rows in a pass
#else
static constexpr int ROWS = 4; // more need more than 16 registers
#endif
static constexpr int COLUMNS = 96; // of a panel, whose weights stay in the second level cache for all rows
static constexpr int K = 4096;     // inputs of a row, likewise; facts of its blocks are kept for as many

#if defined(GGML_REPACK_512)

using ints = __m512i;
using floats = __m512;

static inline ints load(const void * p) { return _mm512_loadu_si512(p); }
static inline ints all(int8_t x) { return _mm512_set1_epi8(x); }
static inline ints exclusive_or(ints x, ints y) { return _mm512_xor_si512(x, y); }
static inline ints low_nibbles(ints x) { return _mm512_and_si512(x, all(15)); }
static inline ints high_nibbles(ints x) { return low_nibbles(_mm512_srli_epi16(x, 4)); }

static inline ints repeat8(const void * p) {
    int64_t x;
    memcpy(&x, p, sizeof(x));
    return _mm512_set1_epi64(x);
}

using signs = __mmask64;

static inline signs signs_of(ints x) { return _mm512_movepi8_mask(x); }
static inline ints absolute(ints x) { return _mm512_abs_epi8(x); }
static inline ints add(ints x, ints y) { return _mm512_add_epi32(x, y); }
static inline ints minus(ints x, signs of) { return _mm512_mask_sub_epi8(x, of, _mm512_setzero_si512(), x); }

// sums of four products of neighbours, of which two must fit 16 bits
static inline ints products(ints x, ints y) {
    return _mm512_madd_epi16(_mm512_maddubs_epi16(x, y), _mm512_set1_epi16(1));
}

static inline floats zeros() { return _mm512_setzero_ps(); }

// the columns' deltas, each twice
static inline floats column_deltas(const ggml_half * d) {
    const __m512 x = _mm512_castps256_ps512(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) d)));
    return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7), x);
}

static inline floats add_scaled(floats sum, ints x, float row_delta, floats column_deltas) {
    return _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(x), _mm512_set1_ps(row_delta)), column_deltas, sum);
}

static inline void store(float * s, floats x, bool add) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 0, 2, 4, 6, 8, 10, 12, 14);
    const __m256 y = _mm512_castps512_ps256(_mm512_permutexvar_ps(even, _mm512_add_ps(x, _mm512_permute_ps(x, 0xB1))));
    _mm256_storeu_ps(s, add ? _mm256_add_ps(y, _mm256_loadu_ps(s)) : y);
}

#else

using ints = __m256i;
using floats = __m256;

static inline ints load(const void * p) { return _mm256_loadu_si256((const __m256i *) p); }
static inline ints all(int8_t x) { return _mm256_set1_epi8(x); }
static inline ints exclusive_or(ints x, ints y) { return _mm256_xor_si256(x, y); }
static inline ints low_nibbles(ints x) { return _mm256_and_si256(x, all(15)); }
static inline ints high_nibbles(ints x) { return low_nibbles(_mm256_srli_epi16(x, 4)); }

static inline ints repeat8(const void * p) {
    int64_t x;
    memcpy(&x, p, sizeof(x));
    return _mm256_set1_epi64x(x);
}

using signs = ints;

static inline signs signs_of(ints x) { return x; }
static inline ints absolute(ints x) { return _mm256_abs_epi8(x); }
static inline ints add(ints x, ints y) { return _mm256_add_epi32(x, y); }
static inline ints minus(ints x, signs of) { return _mm256_sign_epi8(x, of); }

static inline ints products(ints x, ints y) {
    return _mm256_madd_epi16(_mm256_maddubs_epi16(x, y), _mm256_set1_epi16(1));
}

static inline floats zeros() { return _mm256_setzero_ps(); }

static inline floats column_deltas(const ggml_half * d) {
    const __m256 x = _mm256_castps128_ps256(_mm_cvtph_ps(_mm_loadl_epi64((const __m128i *) d)));
    return _mm256_permutevar8x32_ps(x, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3));
}

static inline floats add_scaled(floats sum, ints x, float row_delta, floats column_deltas) {
    return _mm256_fmadd_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(x), _mm256_set1_ps(row_delta)), column_deltas, sum);
}

static inline void store(float * s, floats x, bool add) {
    const __m128 y = _mm_hadd_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    _mm_storeu_ps(s, add ? _mm_add_ps(y, _mm_loadu_ps(s)) : y);
}

#endif

static constexpr int LANES = sizeof(ints) / 8; // columns of a vector

// Prefetches the block that lies `ahead` of the b-th in a stream of nb; after its end come the columns that this tile
// does not have. The hardware does not foresee them, since a tile reads several streams of eight columns each. A prefetch
// beyond the end of the weights does no harm.
template <int BLOCKS, typename T> static inline void prefetch(const T * stream, int nb, int b, int ahead) {
    const char * p = (const char *) (stream + (b + ahead < nb ? b + ahead : b + ahead + (BLOCKS - 1) * nb));
    for (size_t i = 0; i < sizeof(T); i += 64) {
        _mm_prefetch(p + i, _MM_HINT_T0);
    }
}

// sum + GROUPS times eight weights of each column times eight inputs, `stride` apart
template <int GROUPS> static inline ints dot(ints sum, const ints * w, const int8_t * a, int stride) {
#if defined(GGML_REPACK_VNNI)
    for (int g = 0; g < GROUPS; g++) {
#if defined(GGML_REPACK_512) && defined(__AVX512VNNI__)
        sum = _mm512_dpbusd_epi32(sum, w[g], repeat8(a + g * stride));
#elif defined(__AVX512VNNI__) && defined(__AVX512VL__)
        sum = _mm256_dpbusd_epi32(sum, w[g], repeat8(a + g * stride));
#else
        sum = _mm256_dpbusd_avx_epi32(sum, w[g], repeat8(a + g * stride));
#endif
    }
    return sum;
#elif defined(GGML_REPACK_512)
    // 16 bits hold 2 x 4 products of weights to 15 or 2 x 2 of weights to 63 with inputs to 127
    ints x = _mm512_maddubs_epi16(w[0], repeat8(a));
    for (int g = 1; g < GROUPS; g++) {
        x = _mm512_add_epi16(x, _mm512_maddubs_epi16(w[g], repeat8(a + g * stride)));
    }
    return _mm512_add_epi32(sum, _mm512_madd_epi16(x, _mm512_set1_epi16(1)));
#else
    ints x = _mm256_maddubs_epi16(w[0], repeat8(a));
    for (int g = 1; g < GROUPS; g++) {
        x = _mm256_add_epi16(x, _mm256_maddubs_epi16(w[g], repeat8(a + g * stride)));
    }
    return _mm256_add_epi32(sum, _mm256_madd_epi16(x, _mm256_set1_epi16(1)));
#endif
}

// A block of eight columns: qs has eight weights of each column, then the next eight of each.
struct q4_0 {
    using block = block_q4_0x8;
    static constexpr int bias_bits = 3; // a bias of 8
    static constexpr int together = 2;  // blocks of columns

    ints w[4];

    inline void unpack(const block & b, int column) {
        const ints low = exclusive_or(load(b.qs + 8 * column), all((int8_t) 0x88));
        const ints high = exclusive_or(load(b.qs + 8 * column + 64), all((int8_t) 0x88));
        w[0] = low_nibbles(low);
        w[1] = low_nibbles(high);
        w[2] = high_nibbles(low);
        w[3] = high_nibbles(high);
    }

    inline ints times(const int32_t * start, const int8_t * a, int stride) const {
        return dot<4>(repeat8(start), w, a, stride);
    }
};

#if defined(GGML_REPACK_VNNI)
struct q8_0 {
    using block = block_q8_0x8;
    static constexpr int bias_bits = 7; // a bias of 128
    static constexpr int together = 2;

    ints w[4];

    inline void unpack(const block & b, int column) {
        for (int g = 0; g < 4; g++) {
            w[g] = exclusive_or(load(b.qs + 8 * column + 64 * g), all((int8_t) 0x80));
        }
    }

    inline ints times(const int32_t * start, const int8_t * a, int stride) const {
        return dot<4>(repeat8(start), w, a, stride);
    }
};
#else
// 16 bits hold 2 products of weights to 128 with inputs to 127, but none of weights to 255: there is no bias, and the
// weights' signs go to the inputs.
struct q8_0 {
    using block = block_q8_0x8;
    static constexpr int bias_bits = 0;
    static constexpr int together = 1; // two need more registers, or masks

    ints sizes[4];
    signs of[4];

    inline void unpack(const block & b, int column) {
        for (int g = 0; g < 4; g++) {
            const ints w = load(b.qs + 8 * column + 64 * g);
            sizes[g] = absolute(w);
            of[g] = signs_of(w);
        }
    }

    inline ints times(const int32_t * /* start */, const int8_t * a, int stride) const {
        ints sum = products(sizes[0], minus(repeat8(a), of[0]));
        for (int g = 1; g < 4; g++) {
            sum = add(sum, products(sizes[g], minus(repeat8(a + g * stride), of[g])));
        }
        return sum;
    }
};
#endif

// Facts of a block of up to ROWS rows besides its quants.
struct rows_of_block {
    int32_t sums[8][2];
    float d[8];
};

// Rows by fours, as ggml_quantize_mat_q8_0_4x8 leaves them, or one row as it comes.
struct four_rows {
    using block = block_q8_0x4;
    static constexpr int most = ROWS; // rows in a pass
    static constexpr int stride = 32; // from eight quants of a row to its next

    static void prepare(const block & b, int bias_bits, int32_t * sums, float * d) {
        __m256i x = _mm256_setzero_si256();
        for (int g = 0; g < 4; g++) {
            const __m256i quants = _mm256_loadu_si256((const __m256i *) (b.qs + 32 * g));
            x = _mm256_add_epi16(x, _mm256_maddubs_epi16(_mm256_set1_epi8(1), quants));
        }
        x = _mm256_slli_epi32(_mm256_madd_epi16(x, _mm256_set1_epi16(-1)), bias_bits);
        _mm256_storeu_si256((__m256i *) sums, x);
        _mm_storeu_ps(d, _mm_cvtph_ps(_mm_loadl_epi64((const __m128i *) b.d)));
    }
};

struct one_row {
    using block = block_q8_0;
    static constexpr int most = 1;
    static constexpr int stride = 8;

    static void prepare(const block & b, int bias_bits, int32_t * sums, float * d) {
        const __m256i quants = _mm256_loadu_si256((const __m256i *) b.qs);
        const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), quants);
        const __m256i x = _mm256_slli_epi32(_mm256_madd_epi16(pairs, _mm256_set1_epi16(-1)), bias_bits);
        const __m128i y = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
        _mm_storel_epi64((__m128i *) sums, _mm_add_epi32(y, _mm_unpackhi_epi64(y, y)));
        d[0] = GGML_CPU_FP16_TO_FP32(b.d);
    }
};

// Blocks of 32 weights: the facts that `multiply` needs.
template <typename WEIGHTS, typename INPUTS> struct blocks_of_32 {
    using weights = typename WEIGHTS::block;
    using inputs = typename INPUTS::block;
    using rows = rows_of_block;

    static constexpr int most = INPUTS::most;
    static constexpr int size = QK8_0;
    static constexpr int together = WEIGHTS::together;

    static void prepare(int n, int nb, const inputs * a, rows & r) {
        INPUTS::prepare(a[0], WEIGHTS::bias_bits, r.sums[0], r.d);
        if (n > 4) {
            INPUTS::prepare(a[nb], WEIGHTS::bias_bits, r.sums[4], r.d + 4);
        }
    }

    // N rows times BLOCKS blocks of eight columns, along `blocks` of the nb blocks of k
    template <int N, int BLOCKS>
    static void tile(int nb, int blocks, const weights * w, const inputs * a, const rows * known, float * s, size_t bs,
                     bool add) {
        for (int column = 0; column < 8; column += LANES) {
            floats sums[N][BLOCKS];
            for (int r = 0; r < N; r++) {
                for (int c = 0; c < BLOCKS; c++) {
                    sums[r][c] = zeros();
                }
            }
            for (int b = 0; b < blocks; b++) {
                WEIGHTS quants[BLOCKS];
                floats deltas[BLOCKS];
                for (int c = 0; c < BLOCKS; c++) {
                    if (column == 0) {
                        prefetch<BLOCKS>(w + c * nb, nb, b, 24);
                    }
                    quants[c].unpack(w[c * nb + b], column);
                    deltas[c] = column_deltas(w[c * nb + b].d + column);
                }
                for (int r = 0; r < N; r++) {
                    const int8_t * row = a[(r / 4) * nb + b].qs + 8 * (r % 4);
                    for (int c = 0; c < BLOCKS; c++) {
                        const ints x = quants[c].times(known[b].sums[r], row, INPUTS::stride);
                        sums[r][c] = add_scaled(sums[r][c], x, known[b].d[r], deltas[c]);
                    }
                }
            }
            for (int r = 0; r < N; r++) {
                for (int c = 0; c < BLOCKS; c++) {
                    store(s + r * bs + 8 * c + column, sums[r][c], add);
                }
            }
        }
    }
};

template <typename KERNEL, int N>
static void panel(int nb, int blocks, const typename KERNEL::weights * w, const typename KERNEL::inputs * a,
                  const typename KERNEL::rows * known, float * s, size_t bs, int columns, bool add) {
    int c = 0;
    if constexpr (N > 1 && KERNEL::together > 1) {
        for (; c + 16 <= columns; c += 16) {
            KERNEL::template tile<N, 2>(nb, blocks, w + (c / 8) * nb, a, known, s + c, bs, add);
        }
    }
    for (; c < columns; c += 8) { // one row: the weights come from memory, best in one stream
        KERNEL::template tile<N, 1>(nb, blocks, w + (c / 8) * nb, a, known, s + c, bs, add);
    }
}

template <typename KERNEL, int N>
static void panel_of_rows(int n, int nb, int blocks, const typename KERNEL::weights * w,
                          const typename KERNEL::inputs * a, const typename KERNEL::rows * known, float * s, size_t bs,
                          int columns, bool add) {
    if (n == N) {
        return panel<KERNEL, N>(nb, blocks, w, a, known, s, bs, columns, add);
    }
    if constexpr (N > 1) {
        panel_of_rows<KERNEL, N - 1>(n, nb, blocks, w, a, known, s, bs, columns, add);
    }
}

// s (nr rows of bs) = vy (nr rows of n) times vx (nc columns of n). Rows by fours are padded to a multiple of four;
// else it is one row.
template <typename KERNEL>
static void multiply(int n, float * s, size_t bs, const void * vx, const void * vy, int nr, int nc) {
    constexpr int most = K / KERNEL::size;
    const int nb = n / KERNEL::size;
    for (int c = 0; c < nc; c += COLUMNS) {
        for (int b = 0; b < nb; b += most) {
            const auto * w = (const typename KERNEL::weights *) vx + (c / 8) * nb + b;
            const int blocks = std::min(nb - b, most);
            for (int r = 0; r < nr; r += KERNEL::most) {
                const auto * a = (const typename KERNEL::inputs *) vy + (r / 4) * nb + b;
                const int rows = std::min(nr - r, KERNEL::most);
                typename KERNEL::rows known[most];
                for (int i = 0; i < blocks; i++) {
                    KERNEL::prepare(rows, nb, a + i, known[i]);
                }
                panel_of_rows<KERNEL, KERNEL::most>(rows, nb, blocks, w, a, known, s + r * bs + c, bs,
                                                    std::min(nc - c, COLUMNS), b > 0);
            }
        }
    }
}

} // namespace repack_rows
