#pragma once

// Products of many rows with weights of any type through tiles of BF16. A prompt can pay once for what a row that is
// generated would pay each time: the weights of two strips, `depth` of each column at a time, become BF16, with scale and
// minimum, in a buffer that stays in the first level cache, and all rows are multiplied with them. Sums stay in tiles over
// these weights, and no whole number needs a scale between.
//
// A row's sums are added up in the order of its weights, whatever rows and strips are computed beside it: its result is the
// same bits alone and in company. They are others than those of the kernels for rows that are generated, so an operation is
// told which rows are of prompts (llama-prompts.cpp).

#include "ggml-impl.h"
#include "repack-tiles.h"
#include "repack-vector.h"
#include "repack-wide.h"
#include "vec.h"

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
constexpr int MANY_BLOCKS = 4;  // blocks of FEW rows; fewer blocks spend more time on unpacking than on sums
constexpr int UNIT = 256;       // weights of a column that are unpacked at a time

// Weights of a column that are multiplied with all rows before the next ones. Each time, the sums of 32 rows go to the
// second level cache and come back, which takes as long as some 15 products of tiles, so `depth` is as large as the first
// level cache allows: the weights of two strips fill two thirds of it.
template <typename W> constexpr int64_t depth = 512 / W::terms;

// Inputs of all weights stay in the second level cache where they have at most KEPT bytes: each pair of strips is multiplied
// with all of them, and its sums stay there, too. More inputs come from memory, those of FAR_DEPTH weights at a time, for
// PANEL pairs of strips, and meanwhile those of the next weights.
constexpr size_t KEPT = 1 << 20;
constexpr int64_t FAR_DEPTH = 256;
constexpr int PANEL = 8;

// The weights from `at` on: a short rest does not stand alone.
inline int64_t stretch(int64_t at, int64_t k, int64_t depth) { return k - at < depth + depth / 2 ? k - at : depth; }

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

// Pairs of strips that are multiplied with one stretch of inputs before the next one
template <typename W> int panel(int64_t k, int rows) {
    return rows <= FEW || rows * row_size<W::terms>(k) <= KEPT ? 1 : PANEL;
}

// What a strip's weights are as tiles: STEP weights of each column, two of a column side by side.
template <typename W> struct scratch {
    alignas(64) char weights[2][W::terms][(depth<W> + UNIT) / STEP * TILE];
    alignas(64) char bytes[UNIT * COLUMNS]; // before they are floats
    alignas(64) char ready[4 * TILE];       // sums of a block over all of k

    // behind it: sums of two strips, of 32 rows each, four tiles side by side
    char * sums(int64_t i) { return (char *) (this + 1) + i * 4 * TILE; }
};

template <typename W> size_t scratch_size(int64_t k, int rows) {
    return sizeof(scratch<W>) + size_t(panel<W>(k, rows)) * ((rows + FEW - 1) / FEW) * 4 * TILE;
}

// Results of up to 32 rows, which go to their rows while the next block is multiplied: meanwhile the cache lines arrive.
struct results {
    const char * sums = nullptr; // four tiles side by side
    float * const * rows = nullptr;
    int n = 0; // rows
    int column = 0;
    bool two = false;    // strips
    bool swiglu = false; // of the two, which are one then
    bool pieces = false; // of rows of inputs, see put_row

    char * at(int i) const {
        return pieces ? (char *) rows[i] + column / STEP * TILE + column % STEP * sizeof(ggml_bf16_t)
                      : (char *) (rows[i] + column);
    }

    void fetch(int i) const {
        prefetch_to_write(at(i));
        if (!swiglu) {
            prefetch_to_write(rows[i] + column + COLUMNS);
        }
    }

    void put(int i) const {
        const char * from = sums + i / ROWS * 2 * TILE + i % ROWS * 64;
        const floats first = load_floats((const float *) from);
        const floats second = load_floats((const float *) (from + TILE));
        if (!swiglu) {
            store(rows[i] + column, first);
            if (two) {
                store(rows[i] + column + COLUMNS, second);
            }
        } else if (const floats x = times(ggml_v_silu(first), second); pieces) { // as ggml_vec_swiglu_f32
            store_bf16(at(i), x);
        } else {
            store(rows[i] + column, x);
        }
    }
};

// What is done while a block is multiplied, a part with each step
struct meanwhile {
    const char * weights = nullptr; // to come from memory: `bytes` of each of two strips
    int64_t next = 0;               // strip
    int bytes = 0;
    const char * inputs = nullptr; // to come from memory: `lines` of each of two tiles' rows
    int lines = 0;
    const results * before = nullptr; // of the last block
    const results * own = nullptr;    // to come
};

// What is read once for a block of rows must not displace the weights, which are read for each block.
#define LOAD_ROWS(t, at, stride)                                                                                       \
    if constexpr (MANY) {                                                                                              \
        TILE_LOAD_ONCE(t, at, stride);                                                                                 \
    } else {                                                                                                           \
        TILE_LOAD(t, at, stride);                                                                                      \
    }

// One or two tiles of rows, of MANY blocks, times two strips of weights; the sums are in tiles 4 to 7.
template <int HALVES, bool MANY, bool LINES>
inline __attribute__((always_inline)) void dots(const char * a, int64_t next, const char * b0, const char * b1,
                                                int steps, const meanwhile & other) {
    constexpr int ahead = 12 * TILE;
    const int lines = (other.bytes / 64 + steps - 1) / steps;
    const int inputs = (other.lines + steps - 1) / steps;
    const int rows = (FEW + steps - 1) / steps;
    const int before = other.before ? other.before->n : 0;
    const int own = other.own ? other.own->n : 0;
    for (int i = 0; i < steps; i++, a += TILE, b0 += TILE, b1 += TILE) {
        for (int j = i * lines; j < (i + 1) * lines; j++) {
            _mm_prefetch(other.weights + 64 * j, _MM_HINT_T1);
            _mm_prefetch(other.weights + other.next + 64 * j, _MM_HINT_T1);
        }
        for (int j = i * inputs; j < std::min((i + 1) * inputs, other.lines); j++) {
            _mm_prefetch(other.inputs + 64 * j, _MM_HINT_T1);
            _mm_prefetch(other.inputs + next + 64 * j, _MM_HINT_T1);
        }
        for (int j = i * rows; j < std::min((i + 1) * rows, own); j++) {
            other.own->fetch(j);
        }
        TILE_LOAD(0, b0, 64);
        LOAD_ROWS(2, a, 64)
        TILE_MULTIPLY_BF16(4, 2, 0);
        TILE_LOAD(1, b1, 64);
        TILE_MULTIPLY_BF16(5, 2, 1);
        if constexpr (HALVES == 2) {
            LOAD_ROWS(3, a + next, 64)
            TILE_MULTIPLY_BF16(6, 3, 0);
            TILE_MULTIPLY_BF16(7, 3, 1);
        }
        if constexpr (LINES) {
            for (int j = 0; j < TILE; j += 64) {
                _mm_prefetch(b0 + ahead + j, _MM_HINT_T0);
                _mm_prefetch(b1 + ahead + j, _MM_HINT_T0);
            }
        }
        for (int j = i * rows; j < std::min((i + 1) * rows, before); j++) {
            other.before->put(j);
        }
    }
}

// Where the sums of a block go: of the first 16 rows and of the others, `stride` bytes apart, and `next` from strip to strip
struct place {
    char * halves[2];
    int64_t stride;
    int64_t next;

    explicit place(char * sums) : halves{ sums, sums + 2 * TILE }, stride(64), next(TILE) {}
    place(float * rows, float * others, int64_t stride)
        : halves{ (char *) rows, (char *) others }, stride(stride), next(64) {}
};

// The products of n weights, from `at` on, are added to `sums`, or to 0, and go to `to`.
template <typename W, int HALVES, bool MANY, bool LINES>
void multiply_block(const char * a, int64_t k, int64_t at, int64_t n, const char * const (*b)[2], const char * sums,
                    const place & to, const meanwhile & other) {
    const int64_t next = ROWS * row_size<W::terms>(k);
    const char * rest = a + (k + at) * 2 * ROWS;
    const int steps = int(n / STEP);
    a += at * 2 * ROWS;
    if (at == 0) {
        TILE_ZERO(4);
        TILE_ZERO(5);
        TILE_ZERO(6);
        TILE_ZERO(7);
    } else {
        LOAD_ROWS(4, sums, 64)
        LOAD_ROWS(5, sums + TILE, 64)
        if constexpr (HALVES == 2) {
            LOAD_ROWS(6, sums + 2 * TILE, 64)
            LOAD_ROWS(7, sums + 3 * TILE, 64)
        }
    }
    dots<HALVES, MANY, LINES>(a, next, b[0][0], b[1][0], steps, other);
    if constexpr (W::terms == 2) {
        dots<HALVES, MANY, false>(a, next, b[0][1], b[1][1], steps, {});
        dots<HALVES, MANY, false>(rest, next, b[0][0], b[1][0], steps, {});
    }
    TILE_STORE(4, to.halves[0], to.stride);
    TILE_STORE(5, to.halves[0] + to.next, to.stride);
    if constexpr (HALVES == 2) {
        TILE_STORE(6, to.halves[1], to.stride);
        TILE_STORE(7, to.halves[1] + to.next, to.stride);
    }
}

#undef LOAD_ROWS

// The distance between the results of 16 or 32 rows in bytes, or 0 where they do not lie evenly, or are fewer
inline int64_t distance(float * const * out, int rows) {
    for (int r = 2; r < rows; r++) {
        if (out[r] - out[r - 1] != out[1] - out[0]) {
            return 0;
        }
    }
    return rows % ROWS == 0 ? (out[1] - out[0]) * sizeof(float) : 0;
}

template <typename W>
void multiply(int64_t k, const char * weights, const ggml_wide_ups & up, int strips, const char * inputs, int rows,
              float * const * out, char * memory) {
    const char * ups = up.weights;
    static_assert(W::terms == 1 || (depth<W> == UNIT && depth<W> == FAR_DEPTH),
                  "the order of a row's sums follows from the stretches then");
    auto & own = *(scratch<W> *) memory;
    const int blocks = (rows + FEW - 1) / FEW;
    const bool few = blocks == 1;
    const int at_once = panel<W>(k, rows);
    const int64_t most = few && W::is_bf16 ? k : blocks < MANY_BLOCKS ? UNIT : at_once == 1 ? depth<W> : FAR_DEPTH;
    const int pairs = ups ? strips : (strips + 1) / 2;
    const int64_t even = few ? distance(out, rows) : 0;
    const int64_t size = W::strip_size(k);
    results kept[2]; // of the last block and of this one; copies of them would wait for all that was stored before
    const results * before = nullptr;
    config_for(64, ROWS).use();

    const auto strip = [&](int p, int s) {
        return ups ? (s ? ups : weights) + p * size : weights + (2 * p + s) * size;
    };
    const auto pair = [&](int p, int first, int end, int64_t at, int64_t n) {
        const bool two = ups || 2 * p + 1 < strips;
        const int column = COLUMNS * (ups ? p : 2 * p);
        const bool is_last = at + n == k;
        const char * b[2][2] = {};
        for (int s = 0; s < 2; s++) {
            if (s == 0 || two) {
                W::tiles(strip(p, s), k, at, int(n), own, s, b[s]);
            } else {
                memcpy(b[1], b[0], sizeof(b[0]));
            }
        }
        for (int i = 0; i < blocks; i++) {
            const int r = FEW * i;
            const bool whole = rows - r > ROWS;
            constexpr bool lines = W::is_bf16;
            const auto run = few      ? whole ? multiply_block<W, 2, false, lines> : multiply_block<W, 1, false, lines>
                             : !whole ? multiply_block<W, 1, true, false>
                             : lines && i == 0 ? multiply_block<W, 2, true, lines>
                                               : multiply_block<W, 2, true, false>;
            meanwhile other;
            other.before = before;
            char * sums = own.sums(int64_t(p - first) * blocks + i);
            place to(is_last ? own.ready : sums);
            if (is_last) {
                results & to_come = kept[before == kept];
                to_come.sums = own.ready;
                to_come.rows = out + r;
                to_come.n = std::min(rows - r, FEW);
                to_come.column = column;
                to_come.two = two;
                to_come.swiglu = ups != nullptr;
                to_come.pieces = up.pieces;
                other.own = &to_come;
            }
            const bool is_direct = is_last && two && !ups && even;
            if (is_direct) { // few rows: their cache lines have arrived
                to = place(out[0] + column, out[whole ? ROWS : 0] + column, even);
            }
            if (!W::is_bf16 || !few) { // the weights of the pair after this one, or of the next stretch
                const bool more = p + 1 < end;
                const int64_t then = more ? at : is_last ? 0 : at + n;
                const int64_t bytes = size * n / k;
                const int64_t begin = bytes * i / blocks / 64 * 64;
                other.weights = strip(more || is_last ? p + 1 : first, 0) + size * then / k + begin;
                other.next = strip(0, 1) - strip(0, 0);
                other.bytes = int(bytes * (i + 1) / blocks / 64 * 64 - begin);
            }
            if (end - first > 1 && !is_last) { // the inputs of the next stretch
                const int lines = int(stretch(at + n, k, most)) * 2 * ROWS / 64;
                const int begin = lines * (p - first) / (end - first);
                other.inputs = inputs + r * row_size<W::terms>(k) + (at + n) * 2 * ROWS + 64 * begin;
                other.lines = lines * (p - first + 1) / (end - first) - begin;
            }
            run(inputs + r * row_size<W::terms>(k), k, at, n, b, sums, to, other);
            before = is_direct ? nullptr : other.own;
        }
    };
    for (int first = 0; first < pairs; first += at_once) {
        const int end = std::min(first + at_once, pairs);
        for (int64_t at = 0, n; at < k; at += n) {
            n = stretch(at, k, most);
            for (int p = first; p < end; p++) {
                pair(p, first, end, at, n);
            }
        }
    }
    for (int i = 0; before && i < before->n; i++) {
        before->put(i);
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
