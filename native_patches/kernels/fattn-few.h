#pragma once

// Products of a few queries with rows of K and V as they lie in the KV cache, nothing converted beforehand: that pays
// only where the same rows are multiplied with many queries, which then come here with rows in F32.

#include "ggml-impl.h"
#include "quants.h"
#include "simd-mappings.h"
#include "vec.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__F16C__) && defined(__FMA__)) ||                            \
    (defined(__aarch64__) && defined(__ARM_NEON) && !defined(__ARM_FEATURE_SVE))
#define GGML_FATTN_FEW

#if defined(_MSC_VER)
#define FATTN_INLINE __forceinline
#else
#define FATTN_INLINE inline __attribute__((always_inline)) // calls would spill the sums of all queries
#endif

namespace fattn_few {

static constexpr int EPR = GGML_F32_EPR;
static constexpr int KPV = EPR / 4;  // keys that share a vector, see load_keys
static constexpr int KEYS = 2 * KPV; // of a pass over K
#if defined(__AVX512F__) || defined(__aarch64__)
static constexpr int QUERIES = 8; // most in a pass: what 32 registers hold
#else
static constexpr int QUERIES = 5; // 16 registers
#endif

// vectors of a pass over V
static constexpr int columns(int queries) { return 2 * queries <= QUERIES ? 4 : 2; }

// Queries for which converting K and V anew for each pass is faster than once, beforehand; Q8_0 costs most.
static inline int64_t most_queries(ggml_type type) { return type == GGML_TYPE_Q8_0 && EPR < 16 ? 8 : 32; }

// EPR elements of a row, from i on: as they are stored, and as F32 (Q8_0: without the scale)
template <ggml_type T> struct stored;

#if defined(__AVX512F__)
template <> struct stored<GGML_TYPE_F32> {
    static FATTN_INLINE __m512 load(const char * row, int64_t i) { return _mm512_loadu_ps(row + 4 * i); }
    static FATTN_INLINE __m512 widen(__m512 x) { return x; }
};
template <> struct stored<GGML_TYPE_F16> {
    static FATTN_INLINE __m256i load(const char * row, int64_t i) {
        return _mm256_loadu_si256((const __m256i *) (row + 2 * i));
    }
    static FATTN_INLINE __m512 widen(__m256i x) { return _mm512_cvtph_ps(x); }
};
template <> struct stored<GGML_TYPE_BF16> {
    static FATTN_INLINE __m256i load(const char * row, int64_t i) {
        return _mm256_loadu_si256((const __m256i *) (row + 2 * i));
    }
    static FATTN_INLINE __m512 widen(__m256i x) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
    }
};
template <> struct stored<GGML_TYPE_Q8_0> {
    static FATTN_INLINE __m128i load(const char * row, int64_t i) {
        return _mm_loadu_si128((const __m128i *) (((const block_q8_0 *) row)[i / QK8_0].qs + i % QK8_0));
    }
    static FATTN_INLINE __m512 widen(__m128i x) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(x)); }
};

// Rows become columns: x[g] gets the g-th quarter of each.
static FATTN_INLINE void transpose(__m512 * x) {
    const __m512 a = _mm512_shuffle_f32x4(x[0], x[1], 0x44), b = _mm512_shuffle_f32x4(x[0], x[1], 0xEE);
    const __m512 c = _mm512_shuffle_f32x4(x[2], x[3], 0x44), d = _mm512_shuffle_f32x4(x[2], x[3], 0xEE);
    x[0] = _mm512_shuffle_f32x4(a, c, 0x88);
    x[1] = _mm512_shuffle_f32x4(a, c, 0xDD);
    x[2] = _mm512_shuffle_f32x4(b, d, 0x88);
    x[3] = _mm512_shuffle_f32x4(b, d, 0xDD);
}
static FATTN_INLINE void transpose(__m256i * x) {
    const __m256i a = _mm256_unpacklo_epi64(x[0], x[1]), b = _mm256_unpackhi_epi64(x[0], x[1]);
    const __m256i c = _mm256_unpacklo_epi64(x[2], x[3]), d = _mm256_unpackhi_epi64(x[2], x[3]);
    x[0] = _mm256_permute2x128_si256(a, c, 0x20);
    x[1] = _mm256_permute2x128_si256(b, d, 0x20);
    x[2] = _mm256_permute2x128_si256(a, c, 0x31);
    x[3] = _mm256_permute2x128_si256(b, d, 0x31);
}
static FATTN_INLINE void transpose(__m128i * x) {
    const __m128i a = _mm_unpacklo_epi32(x[0], x[1]), b = _mm_unpackhi_epi32(x[0], x[1]);
    const __m128i c = _mm_unpacklo_epi32(x[2], x[3]), d = _mm_unpackhi_epi32(x[2], x[3]);
    x[0] = _mm_unpacklo_epi64(a, c);
    x[1] = _mm_unpackhi_epi64(a, c);
    x[2] = _mm_unpacklo_epi64(b, d);
    x[3] = _mm_unpackhi_epi64(b, d);
}

// d[l] for the lanes of key l
static FATTN_INLINE __m512 spread(const ggml_half * d) {
    const __m128i halves = _mm_set_epi16(0, 0, 0, 0, d[3], d[2], d[1], d[0]);
    const __m512i from = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
    return _mm512_permutexvar_ps(from, _mm512_cvtph_ps(_mm256_castsi128_si256(halves)));
}

// four elements of Q for each key
static FATTN_INLINE __m512 load_query(const float * q) { return _mm512_broadcast_f32x4(_mm_loadu_ps(q)); }

// the sums of neighbours, two of a, two of b and so on
static FATTN_INLINE __m512 pairs(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xDD));
}
static FATTN_INLINE void store_sums(float * y, __m512 even, __m512 odd) {
    const __m512 ab = pairs(even, odd);
    const __m512i from = _mm512_set_epi64(6, 4, 2, 0, 6, 4, 2, 0);
    const __m512d sums = _mm512_permutexvar_pd(from, _mm512_castps_pd(pairs(ab, ab)));
    _mm256_storeu_ps(y, _mm512_castps512_ps256(_mm512_castpd_ps(sums)));
}

static FATTN_INLINE __m512 larger(__m512 a, __m512 b) { return _mm512_max_ps(a, b); }
static FATTN_INLINE float largest(__m512 x) { return _mm512_reduce_max_ps(x); }
#elif defined(__AVX2__)
template <> struct stored<GGML_TYPE_F32> {
    static FATTN_INLINE __m256 load(const char * row, int64_t i) { return _mm256_loadu_ps((const float *) row + i); }
    static FATTN_INLINE __m256 widen(__m256 x) { return x; }
};
template <> struct stored<GGML_TYPE_F16> {
    static FATTN_INLINE __m128i load(const char * row, int64_t i) {
        return _mm_loadu_si128((const __m128i *) (row + 2 * i));
    }
    static FATTN_INLINE __m256 widen(__m128i x) { return _mm256_cvtph_ps(x); }
};
template <> struct stored<GGML_TYPE_BF16> {
    static FATTN_INLINE __m128i load(const char * row, int64_t i) {
        return _mm_loadu_si128((const __m128i *) (row + 2 * i));
    }
    static FATTN_INLINE __m256 widen(__m128i x) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
    }
};
template <> struct stored<GGML_TYPE_Q8_0> {
    static FATTN_INLINE uint64_t load(const char * row, int64_t i) {
        uint64_t x;
        memcpy(&x, ((const block_q8_0 *) row)[i / QK8_0].qs + i % QK8_0, sizeof(x));
        return x;
    }
    static FATTN_INLINE __m256 widen(uint64_t x) {
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_set_epi64x(0, x)));
    }
};

// Rows become columns: x[g] gets the g-th half of both.
static FATTN_INLINE void transpose(__m256 * x) {
    const __m256 low = _mm256_permute2f128_ps(x[0], x[1], 0x20);
    x[1] = _mm256_permute2f128_ps(x[0], x[1], 0x31);
    x[0] = low;
}
static FATTN_INLINE void transpose(__m128i * x) {
    const __m128i low = _mm_unpacklo_epi64(x[0], x[1]);
    x[1] = _mm_unpackhi_epi64(x[0], x[1]);
    x[0] = low;
}
static FATTN_INLINE void transpose(uint64_t * x) {
    const uint64_t low = (uint32_t) x[0] | x[1] << 32;
    x[1] = x[0] >> 32 | (x[1] >> 32 << 32);
    x[0] = low;
}

// d[l] for the lanes of key l
static FATTN_INLINE __m256 spread(const ggml_half * d) {
    return _mm256_set_m128(_mm_set1_ps(GGML_CPU_FP16_TO_FP32(d[1])), _mm_set1_ps(GGML_CPU_FP16_TO_FP32(d[0])));
}

// four elements of Q for each key
static FATTN_INLINE __m256 load_query(const float * q) { return _mm256_broadcast_ps((const __m128 *) q); }

static FATTN_INLINE void store_sums(float * y, __m256 even, __m256 odd) {
    const __m256 ab = _mm256_hadd_ps(even, odd);
    const __m256d sums = _mm256_permute4x64_pd(_mm256_castps_pd(_mm256_hadd_ps(ab, ab)), 0x08);
    _mm_storeu_ps(y, _mm256_castps256_ps128(_mm256_castpd_ps(sums)));
}

static FATTN_INLINE __m256 larger(__m256 a, __m256 b) { return _mm256_max_ps(a, b); }
static FATTN_INLINE float largest(__m256 x) {
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
#else
template <> struct stored<GGML_TYPE_F32> {
    static FATTN_INLINE float32x4_t load(const char * row, int64_t i) { return vld1q_f32((const float *) row + i); }
    static FATTN_INLINE float32x4_t widen(float32x4_t x) { return x; }
};
template <> struct stored<GGML_TYPE_F16> {
    static FATTN_INLINE uint16x4_t load(const char * row, int64_t i) { return vld1_u16((const uint16_t *) row + i); }
    static FATTN_INLINE float32x4_t widen(uint16x4_t x) { return vcvt_f32_f16(vreinterpret_f16_u16(x)); }
};
template <> struct stored<GGML_TYPE_BF16> {
    static FATTN_INLINE uint16x4_t load(const char * row, int64_t i) { return vld1_u16((const uint16_t *) row + i); }
    static FATTN_INLINE float32x4_t widen(uint16x4_t x) { return vreinterpretq_f32_u32(vshll_n_u16(x, 16)); }
};
template <> struct stored<GGML_TYPE_Q8_0> {
    static FATTN_INLINE int32_t load(const char * row, int64_t i) {
        int32_t x;
        memcpy(&x, ((const block_q8_0 *) row)[i / QK8_0].qs + i % QK8_0, sizeof(x));
        return x;
    }
    static FATTN_INLINE float32x4_t widen(int32_t x) {
        return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(x))))));
    }
};

// a vector holds a single key
template <typename X> static FATTN_INLINE void transpose(X *) {}

static FATTN_INLINE float32x4_t spread(const ggml_half * d) { return vdupq_n_f32(GGML_CPU_FP16_TO_FP32(d[0])); }

static FATTN_INLINE float32x4_t load_query(const float * q) { return vld1q_f32(q); }

static FATTN_INLINE void store_sums(float * y, float32x4_t even, float32x4_t odd) {
    const float32x4_t ab = vpaddq_f32(even, odd);
    vst1_f32(y, vget_low_f32(vpaddq_f32(ab, ab)));
}

static FATTN_INLINE float32x4_t larger(float32x4_t a, float32x4_t b) { return vmaxq_f32(a, b); }
static FATTN_INLINE float largest(float32x4_t x) { return vmaxvq_f32(x); }
#endif

// exp(x), the bits that a lane of many has
static inline float exp_of(float x) {
    float y[EPR];
    GGML_F32_VEC_STORE(y, ggml_v_expf(GGML_F32_VEC_SET1(x)));
    return y[0];
}

static constexpr int64_t LINE = 64; // bytes of a cache line

static FATTN_INLINE void prefetch(const char * x) {
#if defined(__AVX2__) || defined(__AVX512F__)
    _mm_prefetch(x, _MM_HINT_T1); // a block would push the one at hand out of the first level cache
#else
    __builtin_prefetch(x);
#endif
}

// The rows that are needed next: they are prefetched a few at a time while the rows of all KV heads of the block at hand
// are computed with.
struct ahead {
    struct part {
        const char * const * rows;
        int64_t n;
        int64_t size; // bytes of a row
    };
    part parts[2] = {};
    int64_t done = 0;  // rows of this block, those of earlier heads
    int64_t total = 1; // rows of this block, those of all heads

    // Before `count` rows of this block are computed with, from `first` of the head at hand on. Inline, since GCC drops
    // calls of a function that does nothing but prefetch.
    FATTN_INLINE void ask_for(int64_t first, int64_t count) const {
        const uint32_t n = parts[0].n + parts[1].n;
        const uint32_t from = done + first; // small, and short divisions are fast
        int64_t begin = from * n / uint32_t(total);
        int64_t end = std::min(n, (from + uint32_t(count)) * n / uint32_t(total));
        for (const part & p : parts) {
            for (int64_t j = std::max<int64_t>(begin, 0); j < std::min(end, p.n); ++j) {
                const char * line = p.rows[j] - (uintptr_t) p.rows[j] % LINE;
                for (; line < p.rows[j] + p.size; line += LINE) {
                    prefetch(line);
                }
            }
            begin -= p.n;
            end -= p.n;
        }
    }
};

// rows of this block for each call of ask_for
static constexpr int64_t ASK = 8;

template <ggml_type T> static FATTN_INLINE GGML_F32_VEC load(const char * row, int64_t i) {
    const GGML_F32_VEC x = stored<T>::widen(stored<T>::load(row, i));
    if constexpr (T == GGML_TYPE_Q8_0) {
        return GGML_F32_VEC_MUL(x, GGML_F32_VEC_SET1(GGML_CPU_FP16_TO_FP32(((const block_q8_0 *) row)[i / QK8_0].d)));
    }
    return x;
}

// x[g] gets the elements i + 4*g .. i + 4*g + 3 of KPV keys, so that a score is the sum of four lanes at the end, not of
// a whole vector. The keys are k[0], k[2], k[4] .., since store_sums alternates the sums of two vectors.
template <ggml_type T> static FATTN_INLINE void load_keys(const char * const * k, int64_t i, GGML_F32_VEC * x) {
    decltype(stored<T>::load(nullptr, 0)) rows[KPV];
    for (int l = 0; l < KPV; ++l) {
        rows[l] = stored<T>::load(k[2 * l], i);
    }
    transpose(rows);
    for (int g = 0; g < KPV; ++g) {
        x[g] = stored<T>::widen(rows[g]);
    }
    if constexpr (T == GGML_TYPE_Q8_0) {
        ggml_half d[KPV];
        for (int l = 0; l < KPV; ++l) {
            d[l] = ((const block_q8_0 *) k[2 * l])[i / QK8_0].d;
        }
        const GGML_F32_VEC scales = spread(d);
        for (int g = 0; g < KPV; ++g) {
            x[g] = GGML_F32_VEC_MUL(x[g], scales);
        }
    }
}

// s[m][j] = q[m] * k[j], for M queries of dk elements and n keys, a multiple of KEYS; a query's row of s is n long
template <ggml_type T, int M>
static void scores(const char * const * k, int64_t n, const float * q, int64_t dk, float * s, const ahead & next) {
    for (int64_t j = 0; j < n; j += KEYS) {
        if (j % ASK == 0) {
            next.ask_for(j, ASK);
        }
        GGML_F32_VEC even[M];
        GGML_F32_VEC odd[M];
        for (int m = 0; m < M; ++m) {
            even[m] = odd[m] = GGML_F32_VEC_ZERO;
        }
        for (int64_t i = 0; i < dk; i += EPR) {
            GGML_F32_VEC keys[2][KPV];
            load_keys<T>(k + j, i, keys[0]);
            load_keys<T>(k + j + 1, i, keys[1]);
            for (int m = 0; m < M; ++m) {
                for (int g = 0; g < KPV; ++g) {
                    const GGML_F32_VEC query = load_query(q + m * dk + i + 4 * g);
                    even[m] = GGML_F32_VEC_FMA(even[m], keys[0][g], query);
                    odd[m] = GGML_F32_VEC_FMA(odd[m], keys[1][g], query);
                }
            }
        }
        for (int m = 0; m < M; ++m) {
            store_sums(s + m * n + j, even[m], odd[m]);
        }
    }
}

// x += slope*mask, for whole vectors; returns the largest
static inline float add_mask_max(float * x, const float * mask, float slope, int64_t n) {
    const GGML_F32_VEC slopes = GGML_F32_VEC_SET1(slope);
    GGML_F32_VEC top = GGML_F32_VEC_SET1(-INFINITY);
    for (int64_t i = 0; i < n; i += EPR) {
        const GGML_F32_VEC y = GGML_F32_VEC_FMA(GGML_F32_VEC_LOAD(x + i), GGML_F32_VEC_LOAD(mask + i), slopes);
        GGML_F32_VEC_STORE(x + i, y);
        top = larger(top, y);
    }
    return largest(top);
}

// C vectors of y[m] += the sum of p[m][j] * v[j], for M queries
template <ggml_type T, int M, int C>
static void weighted_columns(const char * const * v, int64_t n, int64_t i, const float * p, int64_t width, float * y,
                             int64_t dv, const ahead & next) {
    GGML_F32_VEC sums[M][C];
    for (int m = 0; m < M; ++m) {
        for (int c = 0; c < C; ++c) {
            sums[m][c] = GGML_F32_VEC_LOAD(y + m * dv + i + c * EPR);
        }
    }
    for (int64_t j = 0; j < n; ++j) {
        if (j % ASK == 0) {
            next.ask_for(j, ASK);
        }
        GGML_F32_VEC values[C];
        for (int c = 0; c < C; ++c) {
            values[c] = load<T>(v[j], i + c * EPR);
        }
        for (int m = 0; m < M; ++m) {
            const GGML_F32_VEC weight = GGML_F32_VEC_SET1(p[m * width + j]);
            for (int c = 0; c < C; ++c) {
                sums[m][c] = GGML_F32_VEC_FMA(sums[m][c], values[c], weight);
            }
        }
    }
    for (int m = 0; m < M; ++m) {
        for (int c = 0; c < C; ++c) {
            GGML_F32_VEC_STORE(y + m * dv + i + c * EPR, sums[m][c]);
        }
    }
}

template <ggml_type T, int M>
static void weighted(const char * const * v, int64_t n, const float * p, int64_t width, float * y, int64_t dv,
                     const ahead & next) {
    constexpr int C = columns(M);
    int64_t i = 0;
    for (; i + C * EPR <= dv; i += C * EPR) {
        weighted_columns<T, M, C>(v, n, i, p, width, y, dv, i == 0 ? next : ahead());
    }
    for (; i < dv; i += EPR) {
        weighted_columns<T, M, 1>(v, n, i, p, width, y, dv, i == 0 ? next : ahead());
    }
}

// all_queries: calls f, which takes a number of queries as a constant and the first of them, for all of nq
template <int M, typename F> static inline void some_queries(int64_t n, int64_t first, F f) {
    if (n == M) {
        f(std::integral_constant<int, M>(), first);
    } else if constexpr (M > 1) {
        some_queries<M - 1>(n, first, f);
    }
}
template <typename F> static inline void all_queries(int64_t nq, F f) {
    const int64_t n_parts = (nq + QUERIES - 1) / QUERIES; // of about equal size
    for (int64_t part = 0, first = 0; part < n_parts; ++part) {
        const int64_t n = nq / n_parts + (part < nq % n_parts);
        some_queries<QUERIES>(n, first, f);
        first += n;
    }
}

// calls f, which takes a type as a constant
template <typename F> static inline void with_type(ggml_type type, F f) {
    switch (type) {
        case GGML_TYPE_F32: f(std::integral_constant<ggml_type, GGML_TYPE_F32>()); break;
        case GGML_TYPE_F16: f(std::integral_constant<ggml_type, GGML_TYPE_F16>()); break;
        case GGML_TYPE_BF16: f(std::integral_constant<ggml_type, GGML_TYPE_BF16>()); break;
        case GGML_TYPE_Q8_0: f(std::integral_constant<ggml_type, GGML_TYPE_Q8_0>()); break;
        default: GGML_ABORT("fattn: unsupported type");
    }
}

static inline void all_scores(ggml_type type, const char * const * k, int64_t n, int64_t nq, const float * q,
                              int64_t dk, float * s, const ahead & next) {
    with_type(type, [&](auto t) {
        all_queries(nq, [&](auto m, int64_t first) {
            scores<decltype(t)::value, decltype(m)::value>(k, n, q + first * dk, dk, s + first * n,
                                                           first == 0 ? next : ahead());
        });
    });
}

static inline void all_weighted(ggml_type type, const char * const * v, int64_t n, int64_t nq, const float * p,
                                int64_t width, float * y, int64_t dv, const ahead & next) {
    with_type(type, [&](auto t) {
        all_queries(nq, [&](auto m, int64_t first) {
            weighted<decltype(t)::value, decltype(m)::value>(v, n, p + first * width, width, y + first * dv, dv,
                                                             first == 0 ? next : ahead());
        });
    });
}

} // namespace fattn_few
#endif
