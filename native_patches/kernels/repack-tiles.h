#pragma once

// AMX: its instructions, and whether this process has them.

#include <cstdint>
#include <cstdlib>
#include <cstring>

#if defined(GGML_EMULATED_TILES) // a check, on CPUs without AMX
#define GGML_REPACK_TILES
#include "emulated_tiles.h"
#elif defined(__AMX_INT8__) && defined(__linux__)
#define GGML_REPACK_TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(GGML_REPACK_TILES)

#if defined(__AVX512BF16__) && (defined(__AMX_BF16__) || defined(GGML_EMULATED_TILES))
#define GGML_REPACK_TILES_BF16
#endif

namespace repack_wide {

#if !defined(GGML_EMULATED_TILES)
// Tiles have to be asked for, once in a process.
static inline bool ask_for_tiles() {
    constexpr int request = 0x1023; // ARCH_REQ_XCOMP_PERM
    constexpr int tile_data = 18;
    return syscall(SYS_arch_prctl, request, tile_data) == 0;
}

// The intrinsics of GCC 12 do not say that they read and write memory.
#define TILE_LOAD(tile, base, stride)                                                                                  \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile : : "r"(base), "r"((int64_t) (stride)) : "memory")
#define TILE_LOAD_ONCE(tile, base, stride) /* does not displace what is in the first level cache */                    \
    __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm" #tile : : "r"(base), "r"((int64_t) (stride)) : "memory")
#define TILE_STORE(tile, base, stride)                                                                                 \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" : : "r"(base), "r"((int64_t) (stride)) : "memory")
#define TILE_ZERO(tile) __asm__ volatile("tilezero %%tmm" #tile : :)
#define TILE_MULTIPLY(is_signed, c, a, b)                                                                              \
    if constexpr (is_signed) {                                                                                         \
        __asm__ volatile("tdpbssd %%tmm" #b ", %%tmm" #a ", %%tmm" #c : :);                                            \
    } else {                                                                                                           \
        __asm__ volatile("tdpbsud %%tmm" #b ", %%tmm" #a ", %%tmm" #c : :);                                            \
    }
#define TILE_MULTIPLY_BF16(c, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c : :)
#define TILE_CONFIG(config) __asm__ volatile("ldtilecfg %0" : : "m"(config) : "memory")
#endif

// GGML_CPU_AMX=0 turns tiles off, as it does llama.cpp's own (patch 0007).
static inline bool has_tiles() {
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
static inline tile_config config_for(int block, int rows) {
    tile_config config;
    for (int t = 0; t < 8; t++) {
        config.bytes[t] = t == 2 || t == 3 ? block : 64;
        config.rows[t] = t < 2 ? block / 4 : rows;
    }
    return config;
}

// The state in which amx/mmq.cpp, which sets it once in each thread, expects it.
static inline void restore_config() { config_for(32, 16).use(); }

} // namespace repack_wide

#endif
