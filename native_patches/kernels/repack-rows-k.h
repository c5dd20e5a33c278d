#pragma once

// repack-rows.h for Q4_K and Q6_K, whose super-blocks of 256 weights have scales for every 32 or 16. A weight of Q4_K is
// scale * quant + offset, one of Q6_K scale * (quant - bias); the share of the offset or the bias needs the sums of the
// row's quants, computed once for a panel of columns.

#include "repack-rows.h"

namespace repack_rows {

#if defined(GGML_REPACK_512)
static inline floats add_products(floats sum, floats x, floats y) { return _mm512_fmadd_ps(x, y, sum); }
static inline floats multiply(floats x, floats y) { return _mm512_mul_ps(x, y); }
static inline floats repeat(float x) { return _mm512_set1_ps(x); }
static inline floats to_floats(ints x) { return _mm512_cvtepi32_ps(x); }
static inline ints no_ints() { return _mm512_setzero_si512(); }
static inline ints bitwise_or(ints x, ints y) { return _mm512_or_si512(x, y); }
// the two bits from `shift` on, as the upper ones of six
static inline ints upper_bits(ints x, int shift) {
    return _mm512_slli_epi16(_mm512_and_si512(_mm512_srli_epi16(x, shift), all((int8_t) 3)), 4);
}
// eight bytes of columns as floats, each twice
static inline floats column_floats(const uint8_t * p) {
    const __m128i x = _mm_loadl_epi64((const __m128i *) p);
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_unpacklo_epi8(x, x)));
}
static inline floats column_floats(const int8_t * p) {
    const __m128i x = _mm_loadl_epi64((const __m128i *) p);
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_unpacklo_epi8(x, x)));
}
#else
static inline floats add_products(floats sum, floats x, floats y) { return _mm256_fmadd_ps(x, y, sum); }
static inline floats multiply(floats x, floats y) { return _mm256_mul_ps(x, y); }
static inline floats repeat(float x) { return _mm256_set1_ps(x); }
static inline floats to_floats(ints x) { return _mm256_cvtepi32_ps(x); }
static inline ints no_ints() { return _mm256_setzero_si256(); }
static inline ints bitwise_or(ints x, ints y) { return _mm256_or_si256(x, y); }
static inline ints upper_bits(ints x, int shift) {
    return _mm256_slli_epi16(_mm256_and_si256(_mm256_srli_epi16(x, shift), all((int8_t) 3)), 4);
}
static inline __m128i load4(const void * p) {
    int32_t x;
    memcpy(&x, p, sizeof(x));
    return _mm_cvtsi32_si128(x);
}
static inline floats column_floats(const uint8_t * p) {
    const __m128i x = load4(p);
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_unpacklo_epi8(x, x)));
}
static inline floats column_floats(const int8_t * p) {
    const __m128i x = load4(p);
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpacklo_epi8(x, x)));
}
#endif

// Eight weights of each column are a vector of qs; the low nibbles of four vectors are 32 weights, the high ones the
// next 32, and these have a scale and an offset.
struct q4_K {
    using block = block_q4_Kx8;
    static constexpr int size = 32; // of a sub-block
    static constexpr int bias = 0;  // it has offsets

    static inline void unpack(const block & b, int column, int sub, ints * w) {
        for (int g = 0; g < 4; g++) {
            const ints x = load(b.qs + 64 * (4 * (sub / 2) + g) + 8 * column);
            w[g] = sub % 2 ? high_nibbles(x) : low_nibbles(x);
        }
    }

    // 6 bits each, as make_block_q4_Kx8 packs them
    struct scales {
        uint8_t scale[8][8];
        uint8_t min[8][8];

        void read(const block & b) {
            for (int step = 0; step < 8; step++) {
                uint32_t x[3];
                memcpy(x, b.scales + 12 * step, sizeof(x));
                const uint32_t s[2] = { x[0] & 0x3f3f3f3f, (x[2] & 0x0f0f0f0f) | (x[0] >> 2 & 0x30303030) };
                const uint32_t m[2] = { x[1] & 0x3f3f3f3f, (x[2] >> 4 & 0x0f0f0f0f) | (x[1] >> 2 & 0x30303030) };
                memcpy(scale[step], s, sizeof(s));
                memcpy(min[step], m, sizeof(m));
            }
        }

        inline floats get(const block &, int sub, int column) const { return column_floats(scale[sub] + column); }
        inline floats offset(int sub, int column) const { return column_floats(min[sub] + column); }
    };

    static inline floats offset_deltas(const block & b, int column) {
        return multiply(column_deltas(b.dmin + column), repeat(-1.0f));
    }
};

// Weights are 0 to 63 less 32: four bits in ql, two in qh.
struct q6_K {
    using block = block_q6_Kx8;
    static constexpr int size = 16;
    static constexpr int bias = 32;

    static inline void unpack(const block & b, int column, int sub, ints * w) {
        const int half = sub / 8;
        const int part = sub / 2 % 4; // 32 of the half's 128 weights
        for (int i = 0; i < 2; i++) {
            const int g = 2 * (sub % 2) + i;
            const ints l = load(b.ql + 64 * (8 * half + 4 * (part % 2) + g) + 8 * column);
            const ints h = load(b.qh + 64 * (4 * half + g) + 8 * column);
            w[i] = bitwise_or(part / 2 ? high_nibbles(l) : low_nibbles(l), upper_bits(h, 2 * part));
        }
    }

    struct scales {
        void read(const block &) {}

        inline floats get(const block & b, int sub, int column) const {
            return column_floats(b.scales + 8 * sub + column);
        }
    };
};

// Facts of a super-block of up to ROWS rows besides its quants, for each sub-block. With a bias: the start of its two
// partial sums, which is the bias' share. With offsets: the sum of the row's quants, halved, since both partial sums
// get it.
struct rows_of_superblock {
    int32_t starts[16][8][2];
    float sums[16][8];
    float d[8];
};

struct four_rows_k {
    using block = block_q8_Kx4;
    static constexpr int most = ROWS;
    static constexpr int stride = 32;

    // as ggml_quantize_mat_q8_K_4x8 leaves them
    static int sum(const block & b, int row, int i) { return b.bsums[16 * (i / 4) + 4 * row + i % 4]; }
    static float delta(const block & b, int row) { return b.d[row]; }
};

struct one_row_k {
    using block = block_q8_K;
    static constexpr int most = 1;
    static constexpr int stride = 8;

    static int sum(const block & b, int, int i) { return b.bsums[i]; }
    static float delta(const block & b, int) { return b.d; }
};

template <typename WEIGHTS, typename INPUTS> struct superblocks {
    using weights = typename WEIGHTS::block;
    using inputs = typename INPUTS::block;
    using rows = rows_of_superblock;

    static constexpr int most = INPUTS::most;
    static constexpr int size = QK_K;
    static constexpr int together = 2;
    static constexpr int subs = QK_K / WEIGHTS::size;
    static constexpr int groups = WEIGHTS::size / 8;

    static void prepare(int n, int nb, const inputs * a, rows & known) {
        for (int r = 0; r < n; r++) {
            const inputs & b = a[(r / 4) * nb];
            known.d[r] = INPUTS::delta(b, r % 4);
            for (int i = 0; i < subs; i++) {
                int sum = 0;
                for (int j = 0; j < WEIGHTS::size / 16; j++) {
                    sum += INPUTS::sum(b, r % 4, i * WEIGHTS::size / 16 + j);
                }
                if (WEIGHTS::bias) {
                    known.starts[i][r][0] = -WEIGHTS::bias * sum;
                    known.starts[i][r][1] = 0;
                } else {
                    known.sums[i][r] = 0.5f * sum;
                }
            }
        }
    }

    template <int N, int BLOCKS>
    static void tile(int nb, int blocks, const weights * w, const inputs * a, const rows * known, float * s, size_t bs,
                     bool add) {
        constexpr int parts = 8 / LANES;
        floats sums[parts][N][BLOCKS];
        for (int part = 0; part < parts; part++) {
            for (int r = 0; r < N; r++) {
                for (int c = 0; c < BLOCKS; c++) {
                    sums[part][r][c] = zeros();
                }
            }
        }
        for (int b = 0; b < blocks; b++) {
            typename WEIGHTS::scales scales[BLOCKS];
            for (int c = 0; c < BLOCKS; c++) {
                prefetch<BLOCKS>(w + c * nb, nb, b, 4);
                scales[c].read(w[c * nb + b]);
            }
            for (int part = 0; part < parts; part++) {
                floats products[N][BLOCKS];
                block<N, BLOCKS>(nb, w + b, a + b, scales, known[b], part * LANES, products);
                for (int r = 0; r < N; r++) {
                    for (int c = 0; c < BLOCKS; c++) {
                        sums[part][r][c] = add_products(sums[part][r][c], products[r][c], repeat(known[b].d[r]));
                    }
                }
            }
        }
        for (int part = 0; part < parts; part++) {
            for (int r = 0; r < N; r++) {
                for (int c = 0; c < BLOCKS; c++) {
                    store(s + r * bs + 8 * c + part * LANES, sums[part][r][c], add);
                }
            }
        }
    }

    // a super-block's share, without the rows' deltas
    template <int N, int BLOCKS>
    static inline void block(int nb, const weights * w, const inputs * a, const typename WEIGHTS::scales * scales,
                             const rows & known, int column, floats (*products)[BLOCKS]) {
        floats deltas[BLOCKS];
        floats offset_deltas[BLOCKS];
        for (int c = 0; c < BLOCKS; c++) {
            deltas[c] = column_deltas(w[c * nb].d + column);
            if constexpr (!WEIGHTS::bias) {
                offset_deltas[c] = WEIGHTS::offset_deltas(w[c * nb], column);
            }
            for (int r = 0; r < N; r++) {
                products[r][c] = zeros();
            }
        }
        for (int sub = 0; sub < subs; sub++) {
            ints quants[BLOCKS][groups];
            floats scale[BLOCKS];
            floats offset[BLOCKS];
            for (int c = 0; c < BLOCKS; c++) {
                WEIGHTS::unpack(w[c * nb], column, sub, quants[c]);
                scale[c] = multiply(deltas[c], scales[c].get(w[c * nb], sub, column));
                if constexpr (!WEIGHTS::bias) {
                    offset[c] = multiply(offset_deltas[c], scales[c].offset(sub, column));
                }
            }
            for (int r = 0; r < N; r++) {
                const int8_t * row = a[(r / 4) * nb].qs + 8 * (r % 4) + groups * sub * INPUTS::stride;
                const ints start = WEIGHTS::bias ? repeat8(known.starts[sub][r]) : no_ints();
                for (int c = 0; c < BLOCKS; c++) {
                    const ints x = dot<groups>(start, quants[c], row, INPUTS::stride);
                    products[r][c] = add_products(products[r][c], to_floats(x), scale[c]);
                    if (!WEIGHTS::bias) {
                        products[r][c] = add_products(products[r][c], repeat(known.sums[sub][r]), offset[c]);
                    }
                }
            }
        }
    }
};

} // namespace repack_rows
