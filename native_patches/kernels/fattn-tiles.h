#pragma once

// Products of rows of prompts with a block of K and V through tiles of BF16. A number has up to 24 bits in F32 and 8 in
// BF16, so a query and a key are the sum of two numbers of BF16 each, and a product is three: that of both second numbers is
// left out. So are weights and values where the model's other products have more bits than BF16 (TERMS 2); elsewhere they
// are rounded, as inputs of these are. Scores and sums lie as in fattn-many.h, a query in each lane, and the softmax writes its
// weights as the next product reads them.
//
// A query's sums are added up in the order of the elements, and of the keys, whatever queries are beside it.

#include "fattn-many.h"
#include "repack-tiles.h"

#if defined(GGML_REPACK_TILES_BF16) && defined(GGML_FATTN_FEW)
#define GGML_FATTN_TILES

namespace fattn_tiles {

using repack_wide::has_tiles;

static constexpr int64_t SIDE = 16;        // rows, and columns, of a tile of sums
static constexpr int64_t STEP = 32;        // numbers that are multiplied and added up at once
static constexpr int64_t TILE = SIDE * 64; // bytes
static constexpr int64_t KEYS = 64;        // most of a block
static constexpr float GROWTH = 8.0f;      // weights are at most e^GROWTH
static constexpr float POLYNOMIAL[] = { 1.00000012f,   0.693146944f,   0.240221202f,
                                        0.0555071309f, 0.00967554096f, 0.00132764725f };

// The first 8 bits of each number, which are a number of BF16, and what they leave of it
static FATTN_INLINE __m512 first_bits(__m512 x) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0xFFFF0000)));
}
static FATTN_INLINE __m512 rest(__m512 x) { return _mm512_sub_ps(x, first_bits(x)); }

// Two numbers in each lane, of BF16: cut, or rounded to the nearest (a NaN's last bits may be lost, not all)
static FATTN_INLINE __m512i cut_pairs(__m512 even, __m512 odd) {
    const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(even), 16);
    return _mm512_mask_blend_epi16(0xAAAAAAAA, low, _mm512_castps_si512(odd));
}
static FATTN_INLINE __m512i rounded_pairs(__m512 even, __m512 odd) {
    const __m512i half = _mm512_set1_epi32(0x8000);
    return cut_pairs(_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(even), half)),
                     _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(odd), half)));
}

// Numbers of two vectors one after another, as BF16
static FATTN_INLINE __m512i cut_row(__m512 a, __m512 b) {
    static const uint16_t uppers[32] = { 1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                         33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63 };
    return _mm512_permutex2var_epi16(_mm512_castps_si512(a), _mm512_loadu_si512(uppers), _mm512_castps_si512(b));
}
static FATTN_INLINE __m512i rounded_row(__m512 a, __m512 b) { return (__m512i) _mm512_cvtne2ps_pbh(b, a); }

// Lane j of x[i] and lane i of x[j] change places.
static inline void transpose(__m512i (&x)[16]) {
    __m512i y[16];
    for (int i = 0; i < 16; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        for (int j = 0; j < 2; ++j) {
            x[i + 2 * j] = _mm512_unpacklo_epi64(y[i + j], y[i + j + 2]);
            x[i + 2 * j + 1] = _mm512_unpackhi_epi64(y[i + j], y[i + j + 2]);
        }
    }
    for (int i = 0; i < 16; i += 8) {
        for (int j = 0; j < 4; ++j) {
            y[i + j] = _mm512_shuffle_i32x4(x[i + j], x[i + j + 4], 0x88);
            y[i + j + 4] = _mm512_shuffle_i32x4(x[i + j], x[i + j + 4], 0xDD);
        }
    }
    for (int j = 0; j < 8; ++j) {
        x[j] = _mm512_shuffle_i32x4(y[j], y[j + 8], 0x88);
        x[j + 8] = _mm512_shuffle_i32x4(y[j], y[j + 8], 0xDD);
    }
}

// Numbers that are the left side of products: rows of BF16, the second numbers behind all the first ones
struct left_side {
    const char * p;
    int64_t row;    // bytes
    int64_t second; // bytes from a first number to its second one
};

// and the right side: of 16 columns the first STEP numbers, two in each lane, then the next ones
struct right_side {
    const char * p;
    int64_t group; // bytes to the next 16 columns
    int64_t second;
};

// c = the products of A * 16 rows and B * 16 columns, or c + them; c has `lanes` columns
template <int A, int B, int TERMS, bool ADD>
static FATTN_INLINE void products(const left_side & a, const right_side & b, int64_t steps, float * c, int64_t lanes) {
    const int64_t c_row = lanes * sizeof(float);
    float * below = c + SIDE * lanes;
    TILE_ZERO(4);
    TILE_ZERO(5);
    TILE_ZERO(6);
    TILE_ZERO(7);
    if constexpr (ADD) {
        TILE_LOAD(4, c, c_row);
        if constexpr (B == 2) {
            TILE_LOAD(5, c + SIDE, c_row);
        }
        if constexpr (A == 2) {
            TILE_LOAD(6, below, c_row);
        }
        if constexpr (A == 2 && B == 2) {
            TILE_LOAD(7, below + SIDE, c_row);
        }
    }
    const auto columns = [&](const char * p) {
        TILE_LOAD(0, p, 64);
        if constexpr (B == 2) {
            TILE_LOAD(1, p + b.group, 64);
        }
    };
    const auto multiply = [&](const char * p) {
        TILE_LOAD(2, p, a.row);
        TILE_MULTIPLY_BF16(4, 2, 0);
        if constexpr (B == 2) {
            TILE_MULTIPLY_BF16(5, 2, 1);
        }
        if constexpr (A == 2) {
            TILE_LOAD(3, p + SIDE * a.row, a.row);
            TILE_MULTIPLY_BF16(6, 3, 0);
        }
        if constexpr (A == 2 && B == 2) {
            TILE_MULTIPLY_BF16(7, 3, 1);
        }
    };
    for (int64_t i = 0; i < steps; ++i) {
        const char * rows = a.p + 64 * i;
        columns(b.p + TILE * i);
        multiply(rows);
        if constexpr (TERMS == 2) {
            multiply(rows + a.second);
            columns(b.p + TILE * i + b.second);
            multiply(rows);
        }
    }
    TILE_STORE(4, c, c_row);
    if constexpr (B == 2) {
        TILE_STORE(5, c + SIDE, c_row);
    }
    if constexpr (A == 2) {
        TILE_STORE(6, below, c_row);
    }
    if constexpr (A == 2 && B == 2) {
        TILE_STORE(7, below + SIDE, c_row);
    }
}

// The same for any number of rows and columns, multiples of 16.
template <int TERMS, bool ADD>
static void all_products(const left_side & a, int64_t rows, const right_side & b, int64_t lanes, int64_t steps,
                         float * c) {
    fattn_many::parts<2>(lanes / SIDE, [&](auto n_b, int64_t j) {
        fattn_many::parts<2>(rows / SIDE, [&](auto n_a, int64_t i) {
            const left_side from = { a.p + i * SIDE * a.row, a.row, a.second };
            const right_side with = { b.p + j * b.group, b.group, b.second };
            products<decltype(n_a)::value, decltype(n_b)::value, TERMS, ADD>(from, with, steps,
                                                                             c + i * SIDE * lanes + j * SIDE, lanes);
        });
    });
}

// exp(x - top), at most 3 units in the last place from it; 0 below 2^-126. The polynomial is 2^x from -0.5 to 0.5.
static FATTN_INLINE __m512 exponentials(__m512 x, __m512 top) {
    const __m512 log2e = _mm512_set1_ps(1.44269504f);
    const __m512 power = _mm512_fmsub_ps(x, log2e, _mm512_mul_ps(top, log2e));
    const __mmask16 normal =
        _mm512_cmp_ps_mask(power, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ); // or a NaN, which stays one
    const __m512 whole = _mm512_roundscale_ps(power, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 f = _mm512_sub_ps(power, whole);
    __m512 y = _mm512_set1_ps(POLYNOMIAL[5]);
    for (int i = 4; i >= 0; --i) {
        y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(POLYNOMIAL[i]));
    }
    return _mm512_maskz_scalef_ps(normal, y, whole); // a result that underflows would take 100 cycles
}

// The largest of the scores of n keys, in each lane
static FATTN_INLINE __m512 maximum(const float * s, int64_t n, int64_t lanes) {
    __m512 largest[4];
    std::fill(largest, largest + 4, _mm512_set1_ps(-INFINITY));
    int64_t j = 0;
    for (; j + 4 <= n; j += 4) {
        for (int i = 0; i < 4; ++i) {
            largest[i] = _mm512_max_ps(largest[i], _mm512_loadu_ps(s + (j + i) * lanes));
        }
    }
    for (; j < n; ++j) {
        largest[0] = _mm512_max_ps(largest[0], _mm512_loadu_ps(s + j * lanes));
    }
    return _mm512_max_ps(_mm512_max_ps(largest[0], largest[1]), _mm512_max_ps(largest[2], largest[3]));
}

static inline int64_t steps_of(int64_t n) { return (n + STEP - 1) / STEP; }

// How a block is multiplied with queries; each part of the scratch is as large as numbers of F32 would be.
template <int TERMS> struct kernel {
    // in a unit, which converts each block of keys once: what belongs to them stays in the second level cache
    static constexpr int64_t most_queries(int64_t dk) { return dk <= 64 ? 512 : 256; }
    static constexpr int64_t LANES =
        32; // handled together: with the keys and values, they stay in the first level cache

    // before and after all products of a thread
    static void begin() { repack_wide::config_for(64, SIDE).use(); }
    static void end() { repack_wide::restore_config(); }

    // Queries, [lanes][dk], as the right side
    static void turn_queries(const float * x, int64_t dk, int64_t lanes, float * to) {
        const right_side side = right(to, steps_of(dk), lanes);
        char * y = (char *) to;
        for (int64_t lane = 0; lane < lanes; lane += SIDE) {
            for (int64_t i = 0; i < dk; i += STEP, y += TILE) {
                const uint32_t some = dk - i >= STEP ? ~0u : (1u << (dk - i)) - 1;
                __m512i first[16], second[16];
                for (int64_t r = 0; r < SIDE; ++r) {
                    const float * from = x + (lane + r) * dk + i;
                    const __m512 a = _mm512_maskz_loadu_ps(some & 0xFFFF, from);
                    const __m512 b = _mm512_maskz_loadu_ps(some >> 16, from + 16);
                    first[r] = cut_row(a, b);
                    second[r] = rounded_row(rest(a), rest(b));
                }
                transpose(first);
                transpose(second);
                for (int64_t r = 0; r < SIDE; ++r) {
                    _mm512_storeu_si512(y + 64 * r, first[r]);
                    _mm512_storeu_si512(y + side.second + 64 * r, second[r]);
                }
            }
        }
    }

    // Keys as the left side. element(j, i): 16 elements of key j, from i on
    template <typename F> static void load_keys(int64_t n, int64_t dk, float * to, F element) {
        const left_side side = keys(to, dk);
        for (int64_t j = 0; j < n; ++j) {
            char * y = (char *) to + j * side.row;
            for (int64_t i = 0; i < dk; i += STEP, y += 64) {
                const __m512 a = element(j, i);
                const __m512 b = i + SIDE < dk ? element(j, i + SIDE) : _mm512_setzero_ps();
                _mm512_storeu_si512(y, cut_row(a, b));
                _mm512_storeu_si512(y + side.second, rounded_row(rest(a), rest(b)));
            }
        }
    }

    // Values as the left side, a row an element of all keys; keys from n to the next STEP are 0.
    template <typename F> static void load_values(int64_t n, int64_t dv, float * to, F element) {
        const left_side side = values(to, dv);
        for (int64_t j = 0; j < n; j += STEP) {
            for (int64_t i = 0; i < dv; i += SIDE) {
                __m512i first[16], second[16];
                for (int64_t r = 0; r < SIDE; ++r) {
                    const int64_t key = j + 2 * r;
                    const __m512 even = key < n ? element(key, i) : _mm512_setzero_ps();
                    const __m512 odd = key + 1 < n ? element(key + 1, i) : _mm512_setzero_ps();
                    first[r] = TERMS == 1 ? rounded_pairs(even, odd) : cut_pairs(even, odd);
                    second[r] = rounded_pairs(rest(even), rest(odd));
                }
                transpose(first);
                if constexpr (TERMS == 2) {
                    transpose(second);
                }
                char * y = (char *) to + i * side.row + 2 * j;
                for (int64_t r = 0; r < SIDE; ++r, y += side.row) {
                    _mm512_storeu_si512(y, first[r]);
                    if constexpr (TERMS == 2) {
                        _mm512_storeu_si512(y + side.second, second[r]);
                    }
                }
            }
        }
    }

    // s[j][lane] = q[lane] * k[j] for n keys; those from n to the next 16 are anything
    static void scores(const float * k, int64_t n, int64_t dk, const float * q, int64_t lanes, float * s) {
        const int64_t steps = steps_of(dk);
        all_products<2, false>(keys(k, dk), GGML_PAD(n, SIDE), right(q, steps, lanes), lanes, steps, s);
    }

    // As fattn_many::kernel::add. A query's maximum M follows its scores only where they exceed it by GROWTH: sums so far
    // need a factor then.
    static void add(float * s, int64_t n, int64_t, int64_t lanes, const float * mask, const float * slope, float * M,
                    float * S, const float * v, int64_t dv, float * own, float * y) {
        const int64_t steps = steps_of(n);
        const right_side side = right(own, steps, lanes);
        char * to = (char *) own;
        for (int64_t lane = 0; lane < lanes; lane += SIDE, s += SIDE, mask += mask ? SIDE : 0) {
            if (mask) {
                const __m512 by = _mm512_loadu_ps(slope + lane);
                for (int64_t j = 0; j < n; ++j) {
                    float * at = s + j * lanes;
                    _mm512_storeu_ps(at, _mm512_fmadd_ps(_mm512_loadu_ps(mask + j * lanes), by, _mm512_loadu_ps(at)));
                }
            }
            const __m512 largest = maximum(s, n, lanes);
            __m512 top = _mm512_loadu_ps(M + lane);
            const __mmask16 grown = _mm512_cmp_ps_mask(largest, _mm512_add_ps(top, _mm512_set1_ps(GROWTH)), _CMP_GT_OQ);
            if (grown) {
                const __m512 now = _mm512_mask_mov_ps(top, grown, largest);
                const __m512 factor = exponentials(top, fattn_many::finite(now));
                for (int64_t i = 0; i < dv; ++i) {
                    float * at = y + i * lanes + lane;
                    _mm512_mask_storeu_ps(at, grown, _mm512_mul_ps(_mm512_loadu_ps(at), factor));
                }
                _mm512_mask_storeu_ps(S + lane, grown, _mm512_mul_ps(_mm512_loadu_ps(S + lane), factor));
                _mm512_storeu_ps(M + lane, now);
                top = now;
            }
            top = fattn_many::finite(top); // without keys all weights are 0
            __m512 sums[2] = { _mm512_setzero_ps(), _mm512_setzero_ps() };
            const auto pair = [&](__m512 even, __m512 odd) {
                sums[0] = _mm512_add_ps(sums[0], even);
                sums[1] = _mm512_add_ps(sums[1], odd);
                _mm512_storeu_si512(to, TERMS == 1 ? rounded_pairs(even, odd) : cut_pairs(even, odd));
                if constexpr (TERMS == 2) {
                    _mm512_storeu_si512(to + side.second, rounded_pairs(rest(even), rest(odd)));
                }
                to += 64;
            };
            const auto weight = [&](int64_t j) { return exponentials(_mm512_loadu_ps(s + j * lanes), top); };
            int64_t j = 0;
#pragma GCC unroll 4
            for (; j + 2 <= n; j += 2) {
                pair(weight(j), weight(j + 1));
            }
            for (; j < steps * STEP; j += 2) {
                pair(j < n ? weight(j) : _mm512_setzero_ps(), _mm512_setzero_ps());
            }
            _mm512_storeu_ps(S + lane, _mm512_add_ps(_mm512_loadu_ps(S + lane), _mm512_add_ps(sums[0], sums[1])));
        }
        all_products<TERMS, true>(values(v, dv), GGML_PAD(dv, SIDE), side, lanes, steps, y);
    }

  private:
    static right_side right(const float * p, int64_t steps, int64_t lanes) {
        return { (const char *) p, steps * TILE, steps * lanes * 64 };
    }
    static left_side keys(const float * p, int64_t dk) {
        const int64_t row = steps_of(dk) * 64;
        return { (const char *) p, row, KEYS * row };
    }
    static left_side values(const float * p, int64_t dv) {
        return { (const char *) p, 2 * KEYS, GGML_PAD(dv, SIDE) * 2 * KEYS };
    }
};

} // namespace fattn_tiles
#endif
