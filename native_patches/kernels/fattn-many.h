#pragma once

// Products of many queries with a block of K and V in F32. A vector holds an element of EPR queries, so that sums and the
// softmax need no sums over lanes, and every head size is whole; the bits are those of fattn-few.h, query by query: a
// score is the sum of four chains of products, weights are added up in the order of ggml_vec_soft_max_f32.

#include "fattn-few.h"

#if defined(GGML_FATTN_FEW)

namespace fattn_many {

using fattn_few::EPR;

// The sums of a tile are what the registers hold. A tile of scores has the sums of CHAINS chains of KEYS keys and
// KEY_VECTORS vectors of queries; a tile of weighted values those of VALUES columns of V and VALUE_VECTORS vectors.
#if defined(__AVX512F__) || defined(__aarch64__)
static constexpr int CHAINS = 4, KEYS = 3, KEY_VECTORS = 2;
static constexpr int VALUES = 6, VALUE_VECTORS = 4;
#else
static constexpr int CHAINS = 2, KEYS = 3, KEY_VECTORS = 2;
static constexpr int VALUES = 4, VALUE_VECTORS = 3;
#endif

// Most queries that are handled together: their scores with a block of keys stay in the first level cache.
static constexpr int64_t LANES = 64;

// parts: calls f, which takes a number as a constant and the first of them, for all of n in parts of about equal size
template <int M, typename F> static FATTN_INLINE void part(int64_t n, int64_t first, F f) {
    if (n == M) {
        f(std::integral_constant<int, M>(), first);
    } else if constexpr (M > 1) {
        part<M - 1>(n, first, f);
    }
}
template <int M, typename F> static FATTN_INLINE void parts(int64_t n, F f) {
    const int64_t n_parts = (n + M - 1) / M;
    for (int64_t i = 0, first = 0; i < n_parts; ++i) {
        const int64_t size = n / n_parts + (i < n % n_parts);
        part<M>(size, first, f);
        first += size;
    }
}

// y[i][j] = x[j][i], for 4 x 4 elements
static FATTN_INLINE void turn_four(const float * x, int64_t x_stride, float * y, int64_t y_stride) {
#if defined(__AVX2__) || defined(__AVX512F__)
    __m128 a = _mm_loadu_ps(x), b = _mm_loadu_ps(x + x_stride);
    __m128 c = _mm_loadu_ps(x + 2 * x_stride), d = _mm_loadu_ps(x + 3 * x_stride);
    _MM_TRANSPOSE4_PS(a, b, c, d);
    _mm_storeu_ps(y, a);
    _mm_storeu_ps(y + y_stride, b);
    _mm_storeu_ps(y + 2 * y_stride, c);
    _mm_storeu_ps(y + 3 * y_stride, d);
#else
    for (int64_t i = 0; i < 4; ++i) {
        for (int64_t j = 0; j < 4; ++j) {
            y[i * y_stride + j] = x[j * x_stride + i];
        }
    }
#endif
}

// Queries as they are multiplied, from [lanes][dk]: those of each tile side by side, so that no other tile's lie in the
// cache lines and sets between. A score is the sum of four chains of products, those of the elements c, c + 4, c + 8 ..
// for c = 0 .. 3, so that is the order of the elements.
static inline void turn_queries(const float * x, int64_t dk, int64_t lanes, float * y) {
    parts<KEY_VECTORS>(lanes / EPR, [&](auto v, int64_t first) {
        constexpr int64_t WIDTH = decltype(v)::value * EPR;
        for (int64_t lane = 0; lane < WIDTH; lane += 4) {
            for (int64_t i = 0; i < dk; i += 4) {
                const int64_t at = first * EPR * dk;
                turn_four(x + at + lane * dk + i, dk, y + at + i / 4 * WIDTH + lane, dk / 4 * WIDTH);
            }
        }
    });
}

// [dv][lanes] to [lanes][dv]
static inline void turn_sums(const float * x, int64_t dv, int64_t lanes, float * y) {
    for (int64_t i = 0; i < dv; i += 4) {
        for (int64_t lane = 0; lane < lanes; lane += 4) {
            turn_four(x + i * lanes + lane, lanes, y + lane * dv + i, dv);
        }
    }
}

// As GGML_F32_VEC_LOAD, into a register: GCC would repeat the load for each product with it, and loads are the limit.
static FATTN_INLINE GGML_F32_VEC load_once(const float * x) {
    GGML_F32_VEC y = GGML_F32_VEC_LOAD(x);
#if defined(__GNUC__) && defined(__AVX2__)
    __asm__("" : "+v"(y));
#endif
    return y;
}

// The first C chains of the scores of K keys and V vectors of queries, added up by pairs: y = the sum, or y = y + the sum
template <int C, int K, int V, bool TO_Y>
static FATTN_INLINE void scores_chains(const float * k, int64_t dk, const float * q, float * y, int64_t lanes) {
    const int64_t chain = dk / 4 * V * EPR;
    GGML_F32_VEC sums[C][K][V];
    for (int c = 0; c < C; ++c) {
        for (int j = 0; j < K; ++j) {
            for (int v = 0; v < V; ++v) {
                sums[c][j][v] = GGML_F32_VEC_ZERO;
            }
        }
    }
    for (int64_t i = 0; i < dk; i += 4) {
        for (int c = 0; c < C; ++c) {
            GGML_F32_VEC queries[V];
            for (int v = 0; v < V; ++v) {
                queries[v] = load_once(q + c * chain + v * EPR);
            }
            for (int j = 0; j < K; ++j) {
                const GGML_F32_VEC key = GGML_F32_VEC_SET1(k[j * dk + i + c]);
                for (int v = 0; v < V; ++v) {
                    sums[c][j][v] = GGML_F32_VEC_FMA(sums[c][j][v], queries[v], key);
                }
            }
        }
        q += V * EPR;
    }
#pragma GCC unroll 8 // or all sums go to memory and back, before the loop too
    for (int j = 0; j < K; ++j) {
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) {
            float * to = y + j * lanes + v * EPR;
            GGML_F32_VEC sum = GGML_F32_VEC_ADD(sums[0][j][v], sums[1][j][v]);
            if constexpr (C == 4) {
                sum = GGML_F32_VEC_ADD(sum, GGML_F32_VEC_ADD(sums[2][j][v], sums[3][j][v]));
            }
            if constexpr (TO_Y) {
                sum = GGML_F32_VEC_ADD(GGML_F32_VEC_LOAD(to), sum);
            }
            GGML_F32_VEC_STORE(to, sum);
        }
    }
}

// s[j][lane] = q[lane] * k[j] for K keys and V vectors of queries
template <int K, int V>
static void scores_tile(const float * k, int64_t dk, const float * q, float * s, int64_t lanes) {
    if constexpr (CHAINS == 4) {
        scores_chains<4, K, V, false>(k, dk, q, s, lanes);
    } else {
        scores_chains<2, K, V, false>(k, dk, q, s, lanes);
        scores_chains<2, K, V, true>(k + 2, dk, q + dk / 2 * V * EPR, s, lanes);
    }
}

// y[i][lane] = y[i][lane] * old[lane] + the sum of p[j][lane] * v[j][i], for D columns and V vectors of queries
template <int D, int V>
static void weighted_tile(const float * v, int64_t n, int64_t stride, const float * p, int64_t lanes, const float * old,
                          float * y) {
    GGML_F32_VEC sums[D][V];
    for (int i = 0; i < D; ++i) {
        for (int c = 0; c < V; ++c) {
            sums[i][c] = GGML_F32_VEC_LOAD(y + i * lanes + c * EPR);
            if (old) {
                sums[i][c] = GGML_F32_VEC_MUL(sums[i][c], GGML_F32_VEC_LOAD(old + c * EPR));
            }
        }
    }
    for (int64_t j = 0; j < n; ++j) {
        GGML_F32_VEC weights[V];
        for (int c = 0; c < V; ++c) {
            weights[c] = load_once(p + j * lanes + c * EPR);
        }
        for (int i = 0; i < D; ++i) {
            const GGML_F32_VEC value = GGML_F32_VEC_SET1(v[j * stride + i]);
            for (int c = 0; c < V; ++c) {
                sums[i][c] = GGML_F32_VEC_FMA(sums[i][c], value, weights[c]);
            }
        }
    }
    for (int i = 0; i < D; ++i) {
        for (int c = 0; c < V; ++c) {
            GGML_F32_VEC_STORE(y + i * lanes + c * EPR, sums[i][c]);
        }
    }
}

// A tile reads a few columns of all rows of V: with rows of 2^n bytes they would share too few sets of the first cache.
static inline int64_t stride(int64_t dv) { return dv + 16; }

#if defined(__AVX512F__)
static FATTN_INLINE GGML_F32_VEC minus(GGML_F32_VEC a, GGML_F32_VEC b) { return _mm512_sub_ps(a, b); }
static FATTN_INLINE bool any_larger(GGML_F32_VEC a, GGML_F32_VEC b) {
    return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0;
}
// the lanes of a that are -INFINITY become 0
static FATTN_INLINE GGML_F32_VEC finite(GGML_F32_VEC a) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, _mm512_set1_ps(-INFINITY), _CMP_NEQ_UQ), a);
}
static FATTN_INLINE void add_doubles(double * y, GGML_F32_VEC x) {
    const __m256 low = _mm512_castps512_ps256(x), high = _mm512_extractf32x8_ps(x, 1);
    _mm512_storeu_pd(y, _mm512_add_pd(_mm512_loadu_pd(y), _mm512_cvtps_pd(low)));
    _mm512_storeu_pd(y + 8, _mm512_add_pd(_mm512_loadu_pd(y + 8), _mm512_cvtps_pd(high)));
}
#elif defined(__AVX2__)
static FATTN_INLINE GGML_F32_VEC minus(GGML_F32_VEC a, GGML_F32_VEC b) { return _mm256_sub_ps(a, b); }
static FATTN_INLINE bool any_larger(GGML_F32_VEC a, GGML_F32_VEC b) {
    return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)) != 0;
}
static FATTN_INLINE GGML_F32_VEC finite(GGML_F32_VEC a) {
    return _mm256_and_ps(a, _mm256_cmp_ps(a, _mm256_set1_ps(-INFINITY), _CMP_NEQ_UQ));
}
static FATTN_INLINE void add_doubles(double * y, GGML_F32_VEC x) {
    const __m128 low = _mm256_castps256_ps128(x), high = _mm256_extractf128_ps(x, 1);
    _mm256_storeu_pd(y, _mm256_add_pd(_mm256_loadu_pd(y), _mm256_cvtps_pd(low)));
    _mm256_storeu_pd(y + 4, _mm256_add_pd(_mm256_loadu_pd(y + 4), _mm256_cvtps_pd(high)));
}
#else
static FATTN_INLINE GGML_F32_VEC minus(GGML_F32_VEC a, GGML_F32_VEC b) { return vsubq_f32(a, b); }
static FATTN_INLINE bool any_larger(GGML_F32_VEC a, GGML_F32_VEC b) { return vmaxvq_u32(vcgtq_f32(a, b)) != 0; }
static FATTN_INLINE GGML_F32_VEC finite(GGML_F32_VEC a) {
    return vbslq_f32(vceqq_f32(a, vdupq_n_f32(-INFINITY)), vdupq_n_f32(0.0f), a);
}
static FATTN_INLINE void add_doubles(double * y, GGML_F32_VEC x) {
    vst1q_f64(y, vaddq_f64(vld1q_f64(y), vcvt_f64_f32(vget_low_f32(x))));
    vst1q_f64(y + 2, vaddq_f64(vld1q_f64(y + 2), vcvt_high_f64_f32(x)));
}
#endif

// x[j] = exp(x[j] - top) for EPR / STEP keys of a group of EPR, from j on, and their sum, in the order in which
// ggml_vec_soft_max_f32 adds up the lanes of a vector: its halves on x86, neighbours on ARM
template <int STEP> static FATTN_INLINE GGML_F32_VEC weights(float * x, int64_t lanes, int j, GGML_F32_VEC top) {
    if constexpr (STEP == EPR) {
        const GGML_F32_VEC y = ggml_v_expf(minus(GGML_F32_VEC_LOAD(x + j * lanes), top));
        GGML_F32_VEC_STORE(x + j * lanes, y);
        return y;
    } else {
#if defined(__aarch64__)
        constexpr int OTHER = EPR / (2 * STEP);
#else
        constexpr int OTHER = STEP;
#endif
        const GGML_F32_VEC first = weights<2 * STEP>(x, lanes, j, top);
        return GGML_F32_VEC_ADD(first, weights<2 * STEP>(x, lanes, j + OTHER, top));
    }
}

// one step of the online softmax for all lanes, as fa_softmax: turns the scores of n keys into weights, and of those up to
// `width`, which are none, into zeros. mask: nullptr, or [n][lanes]. Returns true if sums so far must be multiplied with
// old[lane].
static inline bool softmax(float * s, int64_t n, int64_t width, int64_t lanes, const float * mask, const float * slope,
                           float * M, float * S, float * old) {
    bool grown = false;
    for (int64_t lane = 0; lane < lanes; lane += EPR) {
        GGML_F32_VEC top = GGML_F32_VEC_SET1(-INFINITY);
        for (int64_t j = 0; j < n; ++j) {
            GGML_F32_VEC x = GGML_F32_VEC_LOAD(s + j * lanes + lane);
            if (mask) {
                x = GGML_F32_VEC_FMA(x, GGML_F32_VEC_LOAD(mask + j * lanes + lane), GGML_F32_VEC_LOAD(slope + lane));
                GGML_F32_VEC_STORE(s + j * lanes + lane, x);
            }
            top = fattn_few::larger(top, x);
        }
        for (int64_t j = n; j < width; ++j) {
            GGML_F32_VEC_STORE(s + j * lanes + lane, GGML_F32_VEC_SET1(-INFINITY));
        }
        const GGML_F32_VEC before = GGML_F32_VEC_LOAD(M + lane);
        GGML_F32_VEC factor = GGML_F32_VEC_SET1(1.0f);
        if (any_larger(top, before)) {
            top = fattn_few::larger(top, before);
            factor = ggml_v_expf(minus(before, finite(top))); // 1 for a lane whose maximum stays
            GGML_F32_VEC_STORE(M + lane, top);
            GGML_F32_VEC_STORE(S + lane, GGML_F32_VEC_MUL(GGML_F32_VEC_LOAD(S + lane), factor));
            grown = true;
        }
        GGML_F32_VEC_STORE(old + lane, factor);
        top = finite(GGML_F32_VEC_LOAD(M + lane)); // without keys all weights are 0

        double sums[EPR] = { 0.0 };
        for (int64_t j = 0; j < width; j += EPR) {
            add_doubles(sums, weights<1>(s + j * lanes + lane, lanes, 0, top));
        }
        for (int64_t l = 0; l < EPR; ++l) {
            S[lane + l] += sums[l];
        }
    }
    return grown;
}

// How a block is multiplied with queries: K and V in F32, [n][dk] and [n][stride]
struct kernel {
    static constexpr int64_t most_queries(int64_t) { return 128; } // in a unit
    static constexpr int64_t LANES = fattn_many::LANES;

    static void begin() {}
    static void end() {}

    static void turn_queries(const float * x, int64_t dk, int64_t lanes, float * y) {
        fattn_many::turn_queries(x, dk, lanes, y);
    }

    // element(j, i): EPR elements of key j, from i on; a row's last ones may reach into the next one, which comes later
    template <typename F> static void load_keys(int64_t n, int64_t dk, float * y, F element) {
        load(n, dk, dk, y, element);
    }
    template <typename F> static void load_values(int64_t n, int64_t dv, float * y, F element) {
        load(n, dv, stride(dv), y, element);
    }
    template <typename F> static void load(int64_t n, int64_t d, int64_t row, float * y, F element) {
        for (int64_t j = 0; j < n; ++j) {
            for (int64_t i = 0; i < d; i += EPR) {
                GGML_F32_VEC_STORE(y + j * row + i, element(j, i));
            }
        }
    }

    // s[j][lane] = q[lane] * k[j] for n keys; q is what turn_queries makes
    static void scores(const float * k, int64_t n, int64_t dk, const float * q, int64_t lanes, float * s) {
        parts<KEY_VECTORS>(lanes / EPR, [&](auto v, int64_t first) {
            parts<KEYS>(n, [&](auto keys, int64_t j) {
                scores_tile<decltype(keys)::value, decltype(v)::value>(k + j * dk, dk, q + first * EPR * dk,
                                                                       s + j * lanes + first * EPR, lanes);
            });
        });
    }

    // Turns the scores s of n keys into weights, as softmax() does, and adds the weighted values to y, [dv][lanes].
    static void add(float * s, int64_t n, int64_t width, int64_t lanes, const float * mask, const float * slope,
                    float * M, float * S, const float * v, int64_t dv, float * own, float * y) {
        GGML_UNUSED(own);
        float factors[LANES];
        const bool grown = softmax(s, n, width, lanes, mask, slope, M, S, factors);
        const float * old = grown ? factors : nullptr;
        parts<VALUE_VECTORS>(lanes / EPR, [&](auto c, int64_t first) {
            parts<VALUES>(dv, [&](auto d, int64_t i) {
                weighted_tile<decltype(d)::value, decltype(c)::value>(v + i, n, stride(dv), s + first * EPR, lanes,
                                                                      old ? old + first * EPR : nullptr,
                                                                      y + i * lanes + first * EPR);
            });
        });
    }
};

} // namespace fattn_many
#endif
