#pragma once

// Repacked weights whose kernels, for x86, take any number of rows: Q4_0, Q8_0 and Q4_K, with AVX-512 VNNI Q6_K.
//
// Each has a type of its own here, which stands for the block type in the templates of repack.cpp, so that the layouts
// and kernels that repack.cpp has for the same weights stay as they are.

#include "ggml-cpu-impl.h"
#include "repack.h"
#include "traits.h"

#if (defined(__x86_64__) || defined(_M_X64)) && defined(__AVX2__)
#define GGML_REPACK_ANY_ROWS
#if defined(__AVXVNNI__) || (defined(__AVX512VNNI__) && defined(__AVX512VL__))
#define GGML_REPACK_VNNI
#endif
#if defined(__AVX512F__) && defined(__AVX512BW__) && (defined(__AVX512VNNI__) || !defined(GGML_REPACK_VNNI))
#define GGML_REPACK_512
#endif
#endif

#if defined(GGML_REPACK_ANY_ROWS)
// repack-rows.cpp; inputs of gemm are padded to a multiple of four rows
void ggml_gemv_rows_q4_0(int n, float * s, size_t bs, const void * vx, const void * vy, int nr, int nc);
void ggml_gemm_rows_q4_0(int n, float * s, size_t bs, const void * vx, const void * vy, int nr, int nc);
void ggml_gemv_rows_q8_0(int n, float * s, size_t bs, const void * vx, const void * vy, int nr, int nc);
void ggml_gemm_rows_q8_0(int n, float * s, size_t bs, const void * vx, const void * vy, int nr, int nc);
void ggml_gemv_rows_q4_K(int n, float * s, size_t bs, const void * vx, const void * vy, int nr, int nc);
void ggml_gemm_rows_q4_K(int n, float * s, size_t bs, const void * vx, const void * vy, int nr, int nc);
void ggml_gemv_rows_q6_K(int n, float * s, size_t bs, const void * vx, const void * vy, int nr, int nc);
void ggml_gemm_rows_q6_K(int n, float * s, size_t bs, const void * vx, const void * vy, int nr, int nc);

// Eight columns of Q8_0 together, eight quants of each side by side. Returns -1 for a number of columns that is no
// multiple of eight.
int ggml_repack_rows_q8_0(ggml_tensor * t, const void * data, size_t data_size);
#endif

namespace ggml::cpu::repack {

// true: gemm takes any number of rows, of inputs that are padded to a multiple of four
template <typename BLOC_TYPE> constexpr bool any_rows = false;

#if defined(GGML_REPACK_ANY_ROWS)
// the templates of repack.cpp
template <typename BLOC_TYPE, int64_t INTER_SIZE, int64_t NB_COLS> int repack(ggml_tensor *, const void *, size_t);
template <typename BLOC_TYPE, int64_t INTER_SIZE, int64_t NB_COLS, ggml_type PARAM_TYPE>
void gemv(int, float *, size_t, const void *, const void *, int, int);
template <typename BLOC_TYPE, int64_t INTER_SIZE, int64_t NB_COLS, ggml_type PARAM_TYPE>
void gemm(int, float *, size_t, const void *, const void *, int, int);

template <> int repack<block_q4_0, 8, 8>(ggml_tensor *, const void *, size_t);
template <> int repack<block_q4_K, 8, 8>(ggml_tensor *, const void *, size_t);
template <> int repack<block_q6_K, 8, 8>(ggml_tensor *, const void *, size_t);

struct rows_q4_0 {};
struct rows_q8_0 {};
struct rows_q4_K {};
struct rows_q6_K {};

template <> constexpr bool any_rows<rows_q4_0> = true;
template <> constexpr bool any_rows<rows_q8_0> = true;
template <> constexpr bool any_rows<rows_q4_K> = true;
template <> constexpr bool any_rows<rows_q6_K> = true;

template <> inline int repack<rows_q4_0, 8, 8>(ggml_tensor * t, const void * data, size_t data_size) {
    return repack<block_q4_0, 8, 8>(t, data, data_size);
}
template <> inline int repack<rows_q8_0, 8, 8>(ggml_tensor * t, const void * data, size_t data_size) {
    return ggml_repack_rows_q8_0(t, data, data_size);
}
template <> inline int repack<rows_q4_K, 8, 8>(ggml_tensor * t, const void * data, size_t data_size) {
    return repack<block_q4_K, 8, 8>(t, data, data_size);
}
template <> inline int repack<rows_q6_K, 8, 8>(ggml_tensor * t, const void * data, size_t data_size) {
    return repack<block_q6_K, 8, 8>(t, data, data_size);
}

template <>
inline void gemv<rows_q4_0, 8, 8, GGML_TYPE_Q8_0>(int n, float * s, size_t bs, const void * vx, const void * vy, int nr,
                                                  int nc) {
    ggml_gemv_rows_q4_0(n, s, bs, vx, vy, nr, nc);
}
template <>
inline void gemv<rows_q8_0, 8, 8, GGML_TYPE_Q8_0>(int n, float * s, size_t bs, const void * vx, const void * vy, int nr,
                                                  int nc) {
    ggml_gemv_rows_q8_0(n, s, bs, vx, vy, nr, nc);
}
template <>
inline void gemv<rows_q4_K, 8, 8, GGML_TYPE_Q8_K>(int n, float * s, size_t bs, const void * vx, const void * vy, int nr,
                                                  int nc) {
#if defined(GGML_REPACK_512) // one row alone is no faster with half of the lanes
    ggml_gemv_rows_q4_K(n, s, bs, vx, vy, nr, nc);
#else
    ggml_gemv_q4_K_8x8_q8_K(n, s, bs, vx, vy, nr, nc);
#endif
}
template <>
inline void gemv<rows_q6_K, 8, 8, GGML_TYPE_Q8_K>(int n, float * s, size_t bs, const void * vx, const void * vy, int nr,
                                                  int nc) {
    ggml_gemv_rows_q6_K(n, s, bs, vx, vy, nr, nc);
}

template <>
inline void gemm<rows_q4_0, 8, 8, GGML_TYPE_Q8_0>(int n, float * s, size_t bs, const void * vx, const void * vy, int nr,
                                                  int nc) {
    ggml_gemm_rows_q4_0(n, s, bs, vx, vy, nr, nc);
}
template <>
inline void gemm<rows_q8_0, 8, 8, GGML_TYPE_Q8_0>(int n, float * s, size_t bs, const void * vx, const void * vy, int nr,
                                                  int nc) {
    ggml_gemm_rows_q8_0(n, s, bs, vx, vy, nr, nc);
}
template <>
inline void gemm<rows_q4_K, 8, 8, GGML_TYPE_Q8_K>(int n, float * s, size_t bs, const void * vx, const void * vy, int nr,
                                                  int nc) {
    ggml_gemm_rows_q4_K(n, s, bs, vx, vy, nr, nc);
}
template <>
inline void gemm<rows_q6_K, 8, 8, GGML_TYPE_Q8_K>(int n, float * s, size_t bs, const void * vx, const void * vy, int nr,
                                                  int nc) {
    ggml_gemm_rows_q6_K(n, s, bs, vx, vy, nr, nc);
}

#endif

// The traits of weights that have such kernels, or nullptr. TRAITS is repack.cpp's tensor_traits, complete where this is
// called.
template <template <typename, int64_t, int64_t, ggml_type> class TRAITS>
const ggml::cpu::tensor_traits * any_rows_traits(const ggml_tensor * weights) {
#if defined(GGML_REPACK_ANY_ROWS)
    static const TRAITS<rows_q4_0, 8, 8, GGML_TYPE_Q8_0> q4_0;
    static const TRAITS<rows_q8_0, 8, 8, GGML_TYPE_Q8_0> q8_0;
    static const TRAITS<rows_q4_K, 8, 8, GGML_TYPE_Q8_K> q4_K;
    if (weights->ne[1] % 8 != 0) {
        return nullptr;
    }
    switch (weights->type) {
        case GGML_TYPE_Q4_0: return &q4_0;
        case GGML_TYPE_Q8_0: return &q8_0;
        case GGML_TYPE_Q4_K: return &q4_K;
        default: break;
    }
#if defined(GGML_REPACK_VNNI) && defined(GGML_REPACK_512)
    // not experts: many rows of one go through tiled/, which is faster than gemv for each row
    static const TRAITS<rows_q6_K, 8, 8, GGML_TYPE_Q8_K> q6_K;
    if (weights->type == GGML_TYPE_Q6_K && weights->ne[2] == 1) {
        return &q6_K;
    }
#endif
#endif
    GGML_UNUSED(weights);
    return nullptr;
}

} // namespace ggml::cpu::repack
