// The layout of Q8_0, and the kernels of repack-rows.h and repack-rows-k.h, as repack-any-rows.h declares them.

#define GGML_COMMON_DECL_CPP
#include "ggml-common.h"

#include "repack-any-rows.h"

#if defined(GGML_REPACK_ANY_ROWS)
#include "repack-rows-k.h"

using namespace repack_rows;

int ggml_repack_rows_q8_0(ggml_tensor * t, const void * data, size_t data_size) {
    GGML_ASSERT(t->type == GGML_TYPE_Q8_0);
    constexpr int columns = 8;
    constexpr int group = 8; // quants of a column that stay together

    block_q8_0x8 * dst = (block_q8_0x8 *) t->data;
    const block_q8_0 * src = (const block_q8_0 *) data;
    const int64_t nrow = ggml_nrows(t);
    const int64_t nblocks = t->ne[0] / QK8_0;

    GGML_ASSERT(data_size == nrow * nblocks * sizeof(block_q8_0));

    if (t->ne[1] % columns != 0) {
        return -1;
    }

    for (int64_t row = 0; row < nrow; row += columns) {
        for (int64_t x = 0; x < nblocks; x++, dst++) {
            for (int i = 0; i < columns; i++) {
                const block_q8_0 & in = src[(row + i) * nblocks + x];
                dst->d[i] = in.d;
                for (int g = 0; g < QK8_0 / group; g++) {
                    memcpy(dst->qs + (g * columns + i) * group, in.qs + g * group, group);
                }
            }
        }
    }
    return 0;
}

void ggml_gemv_rows_q4_0(int n, float * s, size_t bs, const void * vx, const void * vy, int nr, int nc) {
    multiply<blocks_of_32<q4_0, one_row>>(n, s, bs, vx, vy, nr, nc);
}
void ggml_gemm_rows_q4_0(int n, float * s, size_t bs, const void * vx, const void * vy, int nr, int nc) {
    multiply<blocks_of_32<q4_0, four_rows>>(n, s, bs, vx, vy, nr, nc);
}

void ggml_gemv_rows_q8_0(int n, float * s, size_t bs, const void * vx, const void * vy, int nr, int nc) {
    multiply<blocks_of_32<q8_0, one_row>>(n, s, bs, vx, vy, nr, nc);
}
void ggml_gemm_rows_q8_0(int n, float * s, size_t bs, const void * vx, const void * vy, int nr, int nc) {
    multiply<blocks_of_32<q8_0, four_rows>>(n, s, bs, vx, vy, nr, nc);
}

void ggml_gemv_rows_q4_K(int n, float * s, size_t bs, const void * vx, const void * vy, int nr, int nc) {
    multiply<superblocks<q4_K, one_row_k>>(n, s, bs, vx, vy, nr, nc);
}
void ggml_gemm_rows_q4_K(int n, float * s, size_t bs, const void * vx, const void * vy, int nr, int nc) {
    multiply<superblocks<q4_K, four_rows_k>>(n, s, bs, vx, vy, nr, nc);
}

void ggml_gemv_rows_q6_K(int n, float * s, size_t bs, const void * vx, const void * vy, int nr, int nc) {
    multiply<superblocks<q6_K, one_row_k>>(n, s, bs, vx, vy, nr, nc);
}
void ggml_gemm_rows_q6_K(int n, float * s, size_t bs, const void * vx, const void * vy, int nr, int nc) {
    multiply<superblocks<q6_K, four_rows_k>>(n, s, bs, vx, vy, nr, nc);
}

#endif
