#pragma once

// Repacked weights for CPUs with AVX-512 or AVX2: sixteen columns, or eight, are a strip, and a vector has four weights of
// each of them, so that a product's sums need no shuffle, and a vector of 64 bytes is a row of a tile for AMX as it is.
//
// Few rows go through vpdpbusd, or what a CPU without VNNI has, more of them, where there is AMX, through tiles. All add up
// the same whole numbers and then the same floats in the same order: a row's result is the same bits whichever computed it.

#include "ggml-cpu-impl.h"
#include "repack.h"
#include "traits.h"

#include <algorithm>
#include <cstring>
#include <memory>

#if defined(__x86_64__) && defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define GGML_REPACK_WIDE
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define GGML_REPACK_WIDE_512
#endif
#endif

// of a strip
#if defined(GGML_REPACK_WIDE) && !defined(GGML_REPACK_WIDE_512)
#define GGML_WIDE_COLUMNS 8
#else
#define GGML_WIDE_COLUMNS 16
#endif

// The kernel of a type of weights.
struct ggml_wide_kernel {
    // bytes of a row of k inputs, quantised
    size_t (*row_size)(int64_t k);
    void (*quantize)(const float * x, char * row, int64_t k);
    // n columns of k weights each
    void (*repack)(char * to, const char * from, int64_t k, int64_t n);
    // Products of `rows` rows of inputs, `stride` apart, with `strips` strips of columns, to out[row], a strip after the other.
    // `scratch` are scratch_size(k) bytes.
    void (*multiply)(int64_t k, const char * weights, int strips, const char * inputs, size_t stride, int rows,
                     float * const * out, char * scratch);
    size_t (*scratch_size)(int64_t k);
};

#if defined(GGML_REPACK_WIDE)
// nullptr for a type that has none
const ggml_wide_kernel * ggml_wide_kernel_of(ggml_type type);
// AMX is there, and GGML_CPU_AMX is not 0
bool ggml_wide_has_tiles();
#else
static inline bool ggml_wide_has_tiles() { return false; }
static inline const ggml_wide_kernel * ggml_wide_kernel_of(ggml_type) { return nullptr; }
#endif

// True if these weights have their kernel here. Outside of experts Q8_0, and Q4_0 with AVX-512, have it with VNNI of 512
// bits alone: without it the kernels by eight columns are as fast.
static inline bool ggml_wide_takes(const ggml_tensor * weights) {
#if !defined(GGML_REPACK_WIDE_512) || !defined(__AVX512VNNI__)
    const bool eight = weights->type == GGML_TYPE_Q8_0 || (weights->type == GGML_TYPE_Q4_0 && GGML_WIDE_COLUMNS == 16);
    if (eight && weights->ne[2] == 1 && !ggml_wide_has_tiles()) {
        return false;
    }
#endif
    const bool is_float = weights->type == GGML_TYPE_BF16 || weights->type == GGML_TYPE_F16;
    if (is_float && weights->ne[0] % GGML_WIDE_COLUMNS != 0) { // others have blocks
        return false;
    }
    return ggml_wide_kernel_of(weights->type) && weights->ne[1] % GGML_WIDE_COLUMNS == 0;
}

// Products with such weights. BASE is repack.cpp's tensor_traits_base.
template <typename BASE> class wide_traits : public BASE {
  public:
    explicit wide_traits(const ggml_wide_kernel & kernel) : kernel(kernel) {}

    int repack(ggml_tensor * t, const void * data, size_t data_size) override {
        GGML_ASSERT(data_size == ggml_nbytes(t));
        kernel.repack((char *) t->data, (const char *) data, t->ne[0], ggml_nrows(t));
        return 0;
    }

    bool work_size(int n_threads, const ggml_tensor * op, size_t & size) override {
        const ggml_tensor * in = op->src[1];
        const size_t row = kernel.row_size(in->ne[0]);
        const bool experts = op->op == GGML_OP_MUL_MAT_ID;
        size = 64 + ggml_nrows(in) * row + n_threads * scratch_size(in->ne[0]);
        if (experts) { // which rows an expert has, and copies of some of them side by side
            size += (op->src[0]->ne[2] + 1 + ggml_nelements(op->src[2])) * sizeof(int64_t) + 64;
            size += n_threads * GROUP * row;
        }
        return true;
    }

    bool compute_forward(ggml_compute_params * params, ggml_tensor * op) override {
        if (op->op == GGML_OP_MUL_MAT) {
            dense(params, op);
        } else if (op->op == GGML_OP_MUL_MAT_ID) {
            experts(params, op);
        } else {
            return false;
        }
        return true;
    }

  private:
    static constexpr int GROUP = 32; // most rows of an expert at once
    static constexpr int MANY = 128; // most rows at once
    static constexpr int STRIP = GGML_WIDE_COLUMNS;

    const ggml_wide_kernel & kernel;

    size_t scratch_size(int64_t k) const { return GGML_PAD(kernel.scratch_size(k), 64) + 64; }

    static char * aligned(void * p) { return (char *) GGML_PAD((uintptr_t) p, 64); }

    // rows of inputs, one after the other
    void quantize(const ggml_compute_params * params, const ggml_tensor * in, char * rows, size_t row) const {
        for (int64_t i = params->ith; i < ggml_nrows(in); i += params->nth) {
            const int64_t i1 = i % in->ne[1];
            const int64_t i2 = i / in->ne[1] % in->ne[2];
            const int64_t i3 = i / in->ne[1] / in->ne[2];
            const char * x = (const char *) in->data + i1 * in->nb[1] + i2 * in->nb[2] + i3 * in->nb[3];
            kernel.quantize((const float *) x, rows + i * row, in->ne[0]);
        }
    }

    // strips [first, last) of columns for rows by groups that stay in the second level cache beside some weights
    template <typename ROW_OUT>
    void multiply(int64_t k, const char * weights, size_t strip_size, int64_t first, int64_t last, const char * rows,
                  size_t row, int64_t n, char * scratch, ROW_OUT && row_out) const {
        constexpr int64_t kept_weights = 1 << 19; // bytes
        constexpr int64_t kept_rows = 1 << 18;
        const int64_t group = std::clamp<int64_t>(kept_rows / row, GROUP, MANY);
        const int64_t panel = n <= group ? last - first : std::max<int64_t>(4, kept_weights / strip_size / 4 * 4);
        for (int64_t s = first; s < last; s += panel) {
            for (int64_t r = 0; r < n; r += group) {
                const int64_t count = std::min<int64_t>(group, n - r);
                float * out[MANY];
                for (int64_t i = 0; i < count; i++) {
                    out[i] = row_out(r + i) + s * STRIP;
                }
                kernel.multiply(k, weights + s * strip_size, int(std::min(panel, last - s)), rows + r * row, row,
                                int(count), out, scratch);
            }
        }
    }

    void dense(ggml_compute_params * params, ggml_tensor * op) const {
        const ggml_tensor * weights = op->src[0];
        const ggml_tensor * in = op->src[1];
        const int64_t k = in->ne[0];
        const size_t row = kernel.row_size(k);
        char * rows = aligned(params->wdata);
        char * scratch = aligned(rows + ggml_nrows(in) * row) + params->ith * scratch_size(k);
        quantize(params, in, rows, row);

        // Pairs of strips in chunks. The last chunk of a thread may leave the others waiting, so chunks are small: with four
        // for each thread, one of two threads had 10 of the 18 pairs of a matrix of 576 columns.
        const int64_t strips = weights->ne[1] / STRIP;
        const int64_t pairs = (strips + 1) / 2;
        const int64_t chunks = std::min<int64_t>(pairs, params->nth == 1 ? 1 : params->nth * 16);
        if (params->ith == 0) {
            ggml_threadpool_chunk_set(params->threadpool, params->nth);
        }
        ggml_barrier(params->threadpool);

        const auto row_out = [op](int64_t r) {
            const int64_t i1 = r % op->ne[1];
            const int64_t i2 = r / op->ne[1] % op->ne[2];
            const int64_t i3 = r / op->ne[1] / op->ne[2];
            return (float *) ((char *) op->data + i1 * op->nb[1] + i2 * op->nb[2] + i3 * op->nb[3]);
        };
        const size_t strip_size = STRIP * weights->nb[1];
        for (int64_t chunk = params->ith; chunk < chunks;) {
            const int64_t first = 2 * (pairs * chunk / chunks);
            const int64_t last = std::min(strips, 2 * (pairs * (chunk + 1) / chunks));
            multiply(k, (const char *) weights->data, strip_size, first, last, rows, row, ggml_nrows(in), scratch,
                     row_out);
            chunk = ggml_threadpool_chunk_add(params->threadpool, 1);
        }
    }

    void experts(ggml_compute_params * params, ggml_tensor * op) const {
        const ggml_tensor * weights = op->src[0];
        const ggml_tensor * in = op->src[1];
        const ggml_tensor * ids = op->src[2]; // (experts of a token, tokens)
        const int64_t k = in->ne[0];
        const int64_t n_experts = weights->ne[2];
        const size_t row = kernel.row_size(k);
        GGML_ASSERT(in->ne[2] == ids->ne[1] && in->ne[3] == 1 && op->ne[3] == 1);
        char * rows = aligned(params->wdata);
        int64_t * starts = (int64_t *) (rows + ggml_nrows(in) * row); // of each expert's entries
        int64_t * entries = starts + n_experts + 1;                   // token * experts of a token + place
        char * own = aligned(entries + ggml_nelements(ids)) + params->ith * (scratch_size(k) + GROUP * row);
        char * copies = own + scratch_size(k);
        quantize(params, in, rows, row);
        if (params->ith == 0) {
            group(ids, n_experts, starts, entries);
        }
        ggml_barrier(params->threadpool);

        const int64_t strips = weights->ne[1] / STRIP;
        const int64_t first = strips * params->ith / params->nth;
        const int64_t last = strips * (params->ith + 1) / params->nth;
        const size_t strip_size = STRIP * weights->nb[1];
        for (int64_t e = 0; e < n_experts; e++) {
            for (int64_t at = starts[e]; at < starts[e + 1]; at += GROUP) {
                const int64_t count = std::min<int64_t>(GROUP, starts[e + 1] - at);
                for (int64_t i = 0; i < count; i++) {
                    const int64_t token = entries[at + i] / ids->ne[0];
                    const int64_t place = entries[at + i] % ids->ne[0];
                    memcpy(copies + i * row, rows + (token * in->ne[1] + place % in->ne[1]) * row, row);
                }
                multiply(k, (const char *) weights->data + e * weights->nb[2], strip_size, first, last, copies, row,
                         count, own, [&](int64_t i) {
                             const int64_t token = entries[at + i] / ids->ne[0];
                             const int64_t place = entries[at + i] % ids->ne[0];
                             return (float *) ((char *) op->data + place * op->nb[1] + token * op->nb[2]);
                         });
            }
        }
    }

    // entries of ids by expert, in their order
    static void group(const ggml_tensor * ids, int64_t n_experts, int64_t * starts, int64_t * entries) {
        const auto expert_of = [ids](int64_t entry) {
            const char * p =
                (const char *) ids->data + entry / ids->ne[0] * ids->nb[1] + entry % ids->ne[0] * ids->nb[0];
            return (int64_t) *(const int32_t *) p;
        };
        memset(starts, 0, (n_experts + 1) * sizeof(int64_t));
        for (int64_t i = 0; i < ggml_nelements(ids); i++) {
            GGML_ASSERT(expert_of(i) >= 0 && expert_of(i) < n_experts);
            starts[expert_of(i) + 1]++;
        }
        for (int64_t e = 0; e < n_experts; e++) {
            starts[e + 1] += starts[e];
        }
        for (int64_t i = 0; i < ggml_nelements(ids); i++) {
            entries[starts[expert_of(i)]++] = i;
        }
        memmove(starts + 1, starts, n_experts * sizeof(int64_t)); // each has moved to its end, the next one's start
        starts[0] = 0;
    }
};

// The traits of weights that have such a kernel, or nullptr.
template <typename BASE> const ggml::cpu::tensor_traits * wide_traits_of(const ggml_tensor * weights) {
    struct table {
        std::unique_ptr<const wide_traits<BASE>> of[GGML_TYPE_COUNT];

        table() {
            for (int type = 0; type < GGML_TYPE_COUNT; type++) {
                if (const ggml_wide_kernel * kernel = ggml_wide_kernel_of((ggml_type) type)) {
                    of[type] = std::make_unique<const wide_traits<BASE>>(*kernel);
                }
            }
        }
    };
    static const table known;
    return ggml_wide_takes(weights) ? known.of[weights->type].get() : nullptr;
}
