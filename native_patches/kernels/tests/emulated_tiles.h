// Stands in for AMX (repack-tiles.h), so that tiles are checked on CPUs without: the same numbers, slowly.
//
//   -DGGML_EMULATED_TILES=1, with this file beside it

#pragma once

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace emulated_tiles {

struct tile {
    int bytes; // of a row
    int rows;
    uint8_t at[16][64];
};

inline thread_local tile tiles[8];

// A program that has multiplied no tile has checked none: it fails when it ends.
struct watch {
    std::atomic<bool> has_multiplied{ false };

    ~watch() {
        if (!has_multiplied) {
            fprintf(stderr, "no tile was multiplied\n");
            _Exit(1);
        }
    }
};

inline watch use;

inline void load(int t, const void * from, int64_t stride) {
    for (int r = 0; r < tiles[t].rows; r++) {
        memcpy(tiles[t].at[r], (const char *) from + r * stride, tiles[t].bytes);
    }
}

inline void store(int t, void * to, int64_t stride) {
    for (int r = 0; r < tiles[t].rows; r++) {
        memcpy((char *) to + r * stride, tiles[t].at[r], tiles[t].bytes);
    }
}

// tdpbssd and tdpbsud: each number of `c` is the sum of products of four numbers of `a`, which have signs, and four of `b`
inline void multiply(bool is_signed, int c, int a, int b) {
    use.has_multiplied = true;
    for (int m = 0; m < tiles[c].rows; m++) {
        for (int k = 0; k < tiles[a].bytes / 4; k++) {
            for (int n = 0; n < tiles[c].bytes / 4; n++) {
                int32_t sum;
                memcpy(&sum, &tiles[c].at[m][4 * n], 4);
                for (int i = 0; i < 4; i++) {
                    const uint8_t weight = tiles[b].at[k][4 * n + i];
                    sum += (int8_t) tiles[a].at[m][4 * k + i] * (is_signed ? (int8_t) weight : (int) weight);
                }
                memcpy(&tiles[c].at[m][4 * n], &sum, 4);
            }
        }
    }
}

inline float of_bf16(const uint8_t * p) {
    uint16_t high;
    memcpy(&high, p, 2);
    const uint32_t bits = uint32_t(high) << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

// tdpbf16ps: the products of even and those of odd numbers are two chains, which are added to `c` at the end
inline void multiply_bf16(int c, int a, int b) {
    use.has_multiplied = true;
    for (int m = 0; m < tiles[c].rows; m++) {
        for (int n = 0; n < tiles[c].bytes / 4; n++) {
            float sums[2] = {};
            for (int k = 0; k < tiles[a].bytes / 4; k++) {
                for (int i = 0; i < 2; i++) {
                    sums[i] =
                        fmaf(of_bf16(&tiles[a].at[m][4 * k + 2 * i]), of_bf16(&tiles[b].at[k][4 * n + 2 * i]), sums[i]);
                }
            }
            float sum;
            memcpy(&sum, &tiles[c].at[m][4 * n], 4);
            sum += sums[0] + sums[1];
            memcpy(&tiles[c].at[m][4 * n], &sum, 4);
        }
    }
}

template <typename CONFIG> void configure(const CONFIG & config) {
    for (int t = 0; t < 8; t++) {
        tiles[t].bytes = config.bytes[t];
        tiles[t].rows = config.rows[t];
    }
}

} // namespace emulated_tiles

inline bool ask_for_tiles() { return true; }

#define TILE_LOAD(tile, base, stride) emulated_tiles::load(tile, base, stride)
#define TILE_LOAD_ONCE(tile, base, stride) emulated_tiles::load(tile, base, stride)
#define TILE_STORE(tile, base, stride) emulated_tiles::store(tile, base, stride)
#define TILE_ZERO(tile) memset(emulated_tiles::tiles[tile].at, 0, sizeof(emulated_tiles::tiles[tile].at))
#define TILE_MULTIPLY(is_signed, c, a, b) emulated_tiles::multiply(is_signed, c, a, b);
#define TILE_MULTIPLY_BF16(c, a, b) emulated_tiles::multiply_bf16(c, a, b)
#define TILE_CONFIG(config) emulated_tiles::configure(config)
