#pragma once

// Products of many rows with weights of any type through tiles of BF16. A prompt can pay once for what a row that is
// generated would pay each time: the weights of two strips, DEPTH of each column at a time, become BF16, with scale and
// minimum, in a buffer that stays in the first level cache, and all rows are multiplied with them. Sums stay in tiles over
// the DEPTH weights, and no whole number needs a scale between.
//
// A row's sums are added up in the order of its weights, whatever rows and strips are computed beside it: its result is the
// same bits alone and in company. They are others than those of the kernels for rows that are generated, so an operation is
// told which rows are of prompts (llama-prompts.cpp).

#include "ggml-impl.h"
#include "repack-tiles.h"
#include "repack-vector.h"
#include "repack-wide.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(GGML_REPACK_TILES_BF16)

namespace repack_prompts {

using namespace repack_wide;

constexpr int STEP = 32;        // weights of a column, or inputs of a row, that are a row of a tile
constexpr int ROWS = 16;        // of a tile
constexpr int TILE = ROWS * 64; // bytes
constexpr int FEW = 2 * ROWS;   // most rows that are multiplied with all of a column before the next one

// Inputs of 16 rows lie together, the first STEP of each row, then the next ones: tiles as they are loaded. With TERMS 2 a
// second number is what the first one has left of an input, and lies behind all the first ones.
template <int TERMS> size_t row_size(int64_t k) { return TERMS * k * sizeof(ggml_bf16_t); }

template <int TERMS> void put_row(const float * x, char * to, int64_t k, int64_t apart) {
    for (int64_t i = 0; i < k; i += STEP, to += apart) {
        for (int j = 0; j < STEP; j += COLUMNS) {
            const floats all = load_floats(x + i + j);
            store_bf16(to + 2 * j, all);
            if constexpr (TERMS == 2) {
                store_bf16(to + k / STEP * apart + 2 * j, subtract(all, upper_halves(to + 2 * j)));
            }
        }
    }
}

// What a strip's weights are as tiles: STEP weights of each column, two of a column side by side.
template <typename W> struct scratch {
    alignas(64) char weights[2][W::terms][GGML_WIDE_DEPTH / STEP * TILE];
    alignas(64) char bytes[GGML_WIDE_DEPTH * COLUMNS]; // before they are floats

    // behind it: sums of two strips, of 32 rows each, four tiles side by side
    char * sums(int64_t i) { return (char *) (this + 1) + i * 4 * TILE; }
};

template <typename W> size_t scratch_size(int strips, int rows) {
    return sizeof(scratch<W>) + size_t((strips + 1) / 2) * ((rows + FEW - 1) / FEW) * 4 * TILE;
}

// What is fetched meanwhile, a part with each step: weights to come, from memory, and the lines of results
struct wanted {
    const char * weights = nullptr; // `bytes` of each of two strips
    int64_t next = 0;               // strip
    int bytes = 0;
};

// One or two tiles of rows times two strips of weights; the sums are in tiles 4 to 7.
template <int HALVES, bool LINES>
inline __attribute__((always_inline)) void dots(const char * a, int64_t next, const char * b0, const char * b1,
                                                int64_t steps, const wanted & soon, const char * const * out,
                                                const int64_t * apart) {
    constexpr int ahead = 12 * TILE;
    const int64_t lines = (soon.bytes / 64 + steps - 1) / steps;
    for (int64_t i = 0; i < steps; i++, a += TILE, b0 += TILE, b1 += TILE) {
        for (int64_t j = i * lines; j < (i + 1) * lines; j++) {
            _mm_prefetch(soon.weights + 64 * j, _MM_HINT_T0);
            _mm_prefetch(soon.weights + soon.next + 64 * j, _MM_HINT_T0);
        }
        for (int half = 0; half < HALVES && out; half++) {
            for (int64_t j = i * ROWS / steps; j < (i + 1) * ROWS / steps; j++) {
                prefetch_to_write(out[half] + j * apart[half]);
                prefetch_to_write(out[half] + j * apart[half] + 64);
            }
        }
        TILE_LOAD(0, b0, 64);
        TILE_LOAD(2, a, 64);
        TILE_MULTIPLY_BF16(4, 2, 0);
        TILE_LOAD(1, b1, 64);
        TILE_MULTIPLY_BF16(5, 2, 1);
        if constexpr (HALVES == 2) {
            TILE_LOAD(3, a + next, 64);
            TILE_MULTIPLY_BF16(6, 3, 0);
            TILE_MULTIPLY_BF16(7, 3, 1);
        }
        if constexpr (LINES) {
            for (int j = 0; j < TILE; j += 64) {
                _mm_prefetch(b0 + ahead + j, _MM_HINT_T0);
                _mm_prefetch(b1 + ahead + j, _MM_HINT_T0);
            }
        }
    }
}

// What a block of up to 32 rows needs besides: where its sums are, and the results of its rows where they lie evenly.
struct block {
    char * sums;
    char * out[2];    // of each half; nullptr: rows are copied from the sums
    int64_t apart[2]; // of its rows
};

#define LOAD_SUMS(t, at)                                                                                               \
    if (is_first) {                                                                                                    \
        TILE_ZERO(t);                                                                                                  \
    } else {                                                                                                           \
        TILE_LOAD(t, at, 64);                                                                                          \
    }

template <typename W, int HALVES, bool LINES>
void multiply_block(const char * a, int64_t k, int64_t at, int64_t n, const char * const (*b)[2], bool is_first,
                    bool is_last, const block & to, const wanted & soon) {
    const int64_t next = ROWS * row_size<W::terms>(k);
    const char * rest = a + (k + at) * 2 * ROWS;
    a += at * 2 * ROWS;
    LOAD_SUMS(4, to.sums)
    LOAD_SUMS(5, to.sums + TILE)
    if constexpr (HALVES == 2) {
        LOAD_SUMS(6, to.sums + 2 * TILE)
        LOAD_SUMS(7, to.sums + 3 * TILE)
    }
    const bool direct[2] = { is_last && to.out[0], is_last && to.out[1] };
    const char * const * out = direct[0] && (HALVES == 1 || direct[1]) ? to.out : nullptr;
    dots<HALVES, LINES>(a, next, b[0][0], b[1][0], n / STEP, soon, out, to.apart);
    if constexpr (W::terms == 2) {
        dots<HALVES, false>(a, next, b[0][1], b[1][1], n / STEP, {}, nullptr, nullptr);
        dots<HALVES, false>(rest, next, b[0][0], b[1][0], n / STEP, {}, nullptr, nullptr);
    }
    char * left = direct[0] ? to.out[0] : to.sums;
    TILE_STORE(4, left, direct[0] ? to.apart[0] : 64);
    TILE_STORE(5, left + (direct[0] ? 64 : TILE), direct[0] ? to.apart[0] : 64);
    if constexpr (HALVES == 2) {
        char * right = direct[1] ? to.out[1] : to.sums + 2 * TILE;
        TILE_STORE(6, right, direct[1] ? to.apart[1] : 64);
        TILE_STORE(7, right + (direct[1] ? 64 : TILE), direct[1] ? to.apart[1] : 64);
    }
}

#undef LOAD_SUMS

// The distance between the results of 16 rows in bytes, or 0 where they do not lie evenly
inline int64_t distance(float * const * out, int rows) {
    if (rows < ROWS) {
        return 0;
    }
    for (int r = 1; r < ROWS; r++) {
        if (out[r] - out[r - 1] != out[1] - out[0]) {
            return 0;
        }
    }
    return (out[1] - out[0]) * sizeof(float);
}

template <typename W>
void multiply(int64_t k, const char * weights, int strips, const char * inputs, int rows, float * const * out,
              char * memory) {
    auto & own = *(scratch<W> *) memory;
    const int blocks = (rows + FEW - 1) / FEW;
    const bool few = blocks == 1;
    const int64_t depth = W::is_bf16 && few ? k : GGML_WIDE_DEPTH;
    int64_t apart[GGML_WIDE_PROMPT_ROWS / ROWS];
    for (int r = 0; r < rows; r += ROWS) {
        apart[r / ROWS] = distance(out + r, rows - r);
    }
    config_for(64, ROWS).use();

    const auto pair = [&](int c, int64_t at) {
        const int64_t n = std::min(depth, k - at);
        const bool two = c + 1 < strips;
        const char * b[2][2] = {};
        for (int s = 0; s < 2; s++) {
            if (s == 0 || two) {
                W::tiles(weights + (c + s) * W::strip_size(k), k, at, int(n), own, s, b[s]);
            } else {
                memcpy(b[1], b[0], sizeof(b[0]));
            }
        }
        for (int i = 0; i < blocks; i++) {
            const int r = FEW * i;
            const int halves = rows - r > ROWS ? 2 : 1;
            block to = { own.sums(int64_t(c / 2) * blocks + i), {}, {} };
            for (int half = 0; half < halves; half++) {
                to.apart[half] = apart[r / ROWS + half];
                to.out[half] = two && to.apart[half] ? (char *) (out[r + ROWS * half] + COLUMNS * c) : nullptr;
            }
            const bool is_last = at + n == k;
            const auto run = halves == 1            ? multiply_block<W, 1, W::is_bf16>
                             : W::is_bf16 && i == 0 ? multiply_block<W, 2, W::is_bf16>
                                                    : multiply_block<W, 2, false>;
            wanted soon;
            if (!W::is_bf16 || !few) { // the weights of the pair after this one, or of the next stretch
                const bool more = c + 2 < strips;
                const int64_t then = more ? at : at + n;
                const int64_t size = W::strip_size(k);
                const int64_t bytes = size * n / k;
                const int64_t begin = bytes * i / blocks / 64 * 64;
                soon.weights = weights + (more ? c + 2 : 0) * size + size * then / k + begin;
                soon.next = size;
                soon.bytes = int(bytes * (i + 1) / blocks / 64 * 64 - begin);
            }
            run(inputs + r * row_size<W::terms>(k), k, at, n, b, at == 0, is_last, to, soon);
            for (int j = 0; is_last && j < std::min(rows - r, FEW); j++) {
                if (!to.out[j / ROWS]) {
                    const char * from = to.sums + j / ROWS * 2 * TILE + j % ROWS * 64;
                    float * row = out[r + j] + COLUMNS * c;
                    memcpy(row, from, 64);
                    if (two) {
                        memcpy(row + COLUMNS, from + TILE, 64);
                    }
                }
            }
        }
    };
    if (few) { // each strip is read from its start to its end
        for (int c = 0; c < strips; c += 2) {
            for (int64_t at = 0; at < k; at += depth) {
                pair(c, at);
            }
        }
    } else { // the inputs of a stretch stay in the second level cache for all strips
        for (int64_t at = 0; at < k; at += depth) {
            for (int c = 0; c < strips; c += 2) {
                pair(c, at);
            }
        }
    }
    restore_config();
}

inline bool takes(int64_t k) { return has_tiles() && k % STEP == 0; }

template <typename W>
constexpr ggml_wide_prompts kernel = { takes, row_size<W::terms>, put_row<W::terms>, scratch_size<W>, multiply<W> };

// 64 bytes, four weights of each column, times a column's scale plus its minimum: two rows of a tile. `scales` and `minima`
// have that of a column four times.
inline void to_tile(const char * p, const floats (&scales)[4], const floats * minima, char * to) {
    floats x[4];
    for (int i = 0; i < 4; i++) {
        const floats quants = to_floats(widen((const int8_t *) p + COLUMNS * i));
        x[i] = minima ? multiply_add(quants, scales[i], minima[i]) : times(quants, scales[i]);
    }
    const ints even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const ints odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    const ints left = (ints) _mm512_cvtne2ps_pbh(x[1], x[0]);
    const ints right = (ints) _mm512_cvtne2ps_pbh(x[3], x[2]);
    store(to, _mm512_permutex2var_epi32(left, even, right));
    store(to + 64, _mm512_permutex2var_epi32(left, odd, right));
}

// A column's number four times, of four columns a vector
inline void four_times(floats x, floats (&to)[4]) {
    for (int i = 0; i < 4; i++) {
        const ints from =
            add32(_mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3), repeat(int32_t(4 * i)));
        to[i] = _mm512_permutexvar_ps(from, x);
    }
}

// Weights of quantised type W, which says what a unit's scales and minima are (repack-wide.cpp)
template <typename W, typename FACTS> struct of_quants {
    static constexpr int terms = 1;
    static constexpr bool is_bf16 = false;

    static int64_t strip_size(int64_t k) { return W::strip_size(k); }

    static void tiles(const char * strip, int64_t k, int64_t at, int n, scratch<of_quants> & own, int s,
                      const char ** to) {
        constexpr int subs_of_unit = 8;
        char * tile = own.weights[s][0];
        to[0] = tile;
        for (const int64_t end = at + n; at < end; at += subs_of_unit * W::block) {
            const int subs = int(std::min<int64_t>(end - at, subs_of_unit * W::block) / W::block);
            FACTS f;
            W::read(strip, k, at, subs, f);
            const char * p = W::tile_weights(W::quants(strip, at), subs, own.bytes);
            for (int sub = 0; sub < subs; sub++) {
                floats scales[4];
                floats minima[4];
                four_times(W::scale_of(f, sub), scales);
                if constexpr (W::has_offset) {
                    four_times(W::offset_of(f, sub), minima);
                }
                for (int g = 0; g < W::block / 4; g++, p += VECTOR, tile += 2 * VECTOR) {
                    to_tile(p, scales, W::has_offset ? minima : nullptr, tile);
                }
            }
        }
    }
};

// As they are in memory
struct of_bf16 {
    static constexpr int terms = 1;
    static constexpr bool is_bf16 = true;

    static int64_t strip_size(int64_t k) { return 2 * k * COLUMNS; }

    static void tiles(const char * strip, int64_t, int64_t at, int, scratch<of_bf16> &, int, const char ** to) {
        to[0] = strip + 2 * at * COLUMNS;
    }
};

// F16 has three bits more than BF16, so a weight is the sum of two numbers, and so is an input, which is nearer to itself
// than rounded to F16. Of the four products that of both second numbers is left out.
struct of_f16 {
    static constexpr int terms = 2;
    static constexpr bool is_bf16 = false;

    static int64_t strip_size(int64_t k) { return 2 * k * COLUMNS; }

    static void tiles(const char * strip, int64_t, int64_t at, int n, scratch<of_f16> & own, int s, const char ** to) {
        for (int t = 0; t < terms; t++) {
            to[t] = own.weights[s][t];
        }
        const char * p = strip + 2 * at * COLUMNS;
        for (int i = 0; i < n; i += 2, p += 4 * COLUMNS) {
            const floats x[2] = { halves(p), halves(p + 2 * COLUMNS) };
            const ints first = pairs_of_bf16(x[0], x[1]);
            const floats rest[2] = { subtract(x[0], as_floats(_mm512_slli_epi32(first, 16))),
                                     subtract(x[1], as_floats(_mm512_and_si512(first, repeat(int32_t(0xffff0000))))) };
            store(own.weights[s][0] + 32 * i, first);
            store(own.weights[s][1] + 32 * i, pairs_of_bf16(rest[0], rest[1]));
        }
    }

    // of each lane, side by side
    static ints pairs_of_bf16(floats even, floats odd) {
        const ints low = _mm512_cvtepu16_epi32((__m256i) _mm512_cvtneps_pbh(even));
        const ints high = _mm512_cvtepu16_epi32((__m256i) _mm512_cvtneps_pbh(odd));
        return bits_or(low, _mm512_slli_epi32(high, 16));
    }
};

} // namespace repack_prompts

#endif
