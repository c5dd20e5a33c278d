#pragma once

// Products of repacked weights that are floats, BF16 and F16, in the strips of repack-wide.h. A strip has the weights of
// its columns side by side, the first of each, then the second: in as many bytes as in the file. A sum is one chain over
// all weights of a column, whatever rows and strips are computed beside it, so a row's result is the same bits alone and
// in company.

#include "ggml-impl.h"
#include "repack-vector.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <immintrin.h>

namespace repack_floats {

using namespace repack_wide;

#if defined(GGML_REPACK_WIDE_512)
constexpr int ROWS = 6;   // most rows whose sums with all STRIPS stay in registers
constexpr int STRIPS = 4; // that share a load of inputs
#else
constexpr int ROWS = 4;
constexpr int STRIPS = 2;
#endif

// Weights one by one, inputs as they are.
struct halves_of_weights {
    static constexpr int together = 1; // weights of a column that are a lane
    using vector = floats;

    static size_t size(int64_t k) { return k * sizeof(float); }

    static void put(const float * x, char * row, int64_t k) { memcpy(row, x, size(k)); }

    static floats add(floats sum, vector weights, ints input) { return multiply_add(weights, as_floats(input), sum); }
};

struct of_f16 : halves_of_weights {
    static vector get(const char * step) { return halves(step); }
};

#if defined(GGML_REPACK_WIDE_BF16)
// Two products are one instruction. Inputs are rounded to BF16, as llama.cpp does.
struct of_bf16 {
    static constexpr int together = 2;
    using vector = ints;

    static size_t size(int64_t k) { return k * sizeof(ggml_bf16_t); }

    static void put(const float * x, char * row, int64_t k) {
        for (int64_t i = 0; i < k; i += COLUMNS) {
            store_bf16(row + 2 * i, load_floats(x + i));
        }
    }

    static vector get(const char * step) { return load(step); }

    static floats add(floats sum, vector weights, ints input) { return dot_bf16(sum, weights, input); }
};
#else
struct of_bf16 : halves_of_weights {
    static vector get(const char * step) { return upper_halves(step); }
};
#endif

template <typename W> size_t row_size(int64_t k) {
    return ((W::size(k) + 63) / 64 | 1) * 64; // as in repack-wide.cpp
}

inline int64_t strip_size(int64_t k) { return 2 * k * COLUMNS; }

template <typename W> void put_row(const float * x, char * row, int64_t k) { W::put(x, row, k); }

template <typename W> void repack(char * to, const char * from, int64_t k, int64_t n) {
    constexpr int lane = 2 * W::together;
    for (int64_t c = 0; c < n; c++) {
        char * strip = to + c / COLUMNS * strip_size(k) + c % COLUMNS * lane;
        for (int64_t i = 0; i < k / W::together; i++) {
            memcpy(strip + i * COLUMNS * lane, from + 2 * c * k + i * lane, lane);
        }
    }
}

// N rows times S strips
template <typename W, int N, int S>
void tile(int64_t k, const char * weights, const char * rows, size_t stride, float * const * out, int column) {
    constexpr int step = 2 * W::together * COLUMNS;
    const int64_t size = strip_size(k);
    floats sums[N][S];
    for (int r = 0; r < N; r++) {
        for (int s = 0; s < S; s++) {
            sums[r][s] = zeros();
        }
    }
    for (int64_t i = 0; i < k / W::together; i++) {
        typename W::vector w[S];
        for (int s = 0; s < S; s++) {
            w[s] = W::get(weights + s * size + step * i);
        }
        for (int r = 0; r < N; r++) {
            const ints input = repeat4(rows + r * stride + 4 * i);
            for (int s = 0; s < S; s++) {
                sums[r][s] = W::add(sums[r][s], w[s], input);
            }
        }
    }
    for (int r = 0; r < N; r++) {
        for (int s = 0; s < S; s++) {
            store(out[r] + column + COLUMNS * s, sums[r][s]);
        }
    }
}

template <typename W, int N, int S>
void tile_of(int n, int64_t k, const char * weights, const char * rows, size_t stride, float * const * out,
             int column) {
    if (n == N) {
        return tile<W, N, S>(k, weights, rows, stride, out, column);
    }
    if constexpr (N > 1) {
        tile_of<W, N - 1, S>(n, k, weights, rows, stride, out, column);
    }
}

template <typename W>
void multiply(int64_t k, const char * weights, int strips, const char * inputs, size_t stride, int rows,
              float * const * out, char *) {
    // one or two rows have four with AVX2, too: memory is read faster, and additions need not wait for each other
    const int most = rows <= 2 ? 4 : STRIPS;
    for (int c = 0, together = 0; c < strips; c += together) {
        together = strips - c >= most ? most : strips - c >= 2 ? 2 : 1;
        const auto multiply = together == 1        ? tile_of<W, ROWS, 1>
                              : together == STRIPS ? tile_of<W, ROWS, STRIPS>
                              : together == 2      ? tile_of<W, ROWS, 2>
                                                   : tile_of<W, 2, 4>;
        for (int r = 0, n = 0; r < rows; r += n) {
            const int passes = (rows - r + ROWS - 1) / ROWS; // of about as many rows
            n = (rows - r + passes - 1) / passes;
            for (int i = 0; i < n * together; i++) { // not in `tile`, which GCC 12 would give sums in memory for it
                prefetch_to_write(out[r + i / together] + COLUMNS * (c + i % together));
            }
            multiply(n, k, weights + c * strip_size(k), inputs + r * stride, stride, out + r, COLUMNS * c);
        }
    }
}

inline size_t scratch_size(int64_t) { return 0; }

template <typename W> constexpr ggml_wide_kernel kernel(const ggml_wide_prompts * prompts, bool alike) {
    return { row_size<W>, put_row<W>, repack<W>, multiply<W>, scratch_size, prompts, alike };
}

} // namespace repack_floats
