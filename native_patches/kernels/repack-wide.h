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
#include <atomic>
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

// Most rows of prompts in a call
#define GGML_WIDE_PROMPT_ROWS 512

// Weights of as many columns as those that a product has: its result is the SwiGLU of the products with both, if these are
// not nullptr.
struct ggml_wide_ups {
    const char * weights = nullptr;
    bool pieces = false; // the results are rows of inputs of the next product, as ggml_wide_prompts::put writes them
};

// Products of rows of prompts (repack-prompts.h)
struct ggml_wide_prompts {
    // true if the CPU has such products, and weights of k in a column
    bool (*takes)(int64_t k);
    // bytes of a row of k inputs, in pieces of 64
    size_t (*row_size)(int64_t k);
    // writes the pieces of a row, `apart` bytes from one to the next
    void (*put)(const float * x, char * to, int64_t k, int64_t apart);
    // for at most so many rows
    size_t (*scratch_size)(int64_t k, int rows);
    // as ggml_wide_kernel::multiply, up to GGML_WIDE_PROMPT_ROWS rows: 16 of them are row_size(k) * 16 bytes, the first piece
    // of each, then the second ones.
    void (*multiply)(int64_t k, const char * weights, const ggml_wide_ups & up, int strips, const char * inputs,
                     int rows, float * const * out, char * scratch);
};

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
    // nullptr: a prompt's rows are as others
    const ggml_wide_prompts * prompts;
    // `prompts` is as fast for few rows, so all rows have it
    bool alike;
};

#if defined(GGML_REPACK_WIDE)
// nullptr for a type that has none
const ggml_wide_kernel * ggml_wide_kernel_of(ggml_type type);
// AMX is there, and GGML_CPU_AMX is not 0
bool ggml_wide_has_tiles();
// rows of prompts have products of their own
bool ggml_wide_has_prompts();
#else
static inline bool ggml_wide_has_tiles() { return false; }
static inline bool ggml_wide_has_prompts() { return false; }
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
        const layout at(kernel, op);
        size = 64 + at.own + n_threads * at.own_size;
        return true;
    }

    bool compute_forward(ggml_compute_params * params, ggml_tensor * op) override {
        if (op->op == GGML_OP_MUL_MAT) {
            dense(params, op, op);
        } else if (op->op == GGML_OP_MUL_MAT_ID) {
            experts(params, op);
        } else {
            return false;
        }
        return true;
    }

    // The SwiGLU of two products, gate and up, at once: then the products need no memory. Returns false, and does nothing,
    // if they are not the same in all but their weights, or if a row is not one of many of prompts. With `pieces`, glu's
    // memory gets rows of inputs of the next product.
    bool swiglu(const ggml_compute_params * params, const ggml_tensor * gate, const ggml_tensor * up, ggml_tensor * glu,
                bool pieces) const {
        const bool takes = ggml_nrows(gate) > GROUP && ggml_are_same_shape(gate->src[0], up->src[0]) &&
                           gate->src[1] == up->src[1] && gate->src[2] == up->src[2] && glu->type == GGML_TYPE_F32 &&
                           layout(kernel, gate).is_of_prompts(gate);
        if (takes) {
            dense(params, gate, glu, { (const char *) up->src[0]->data, pieces });
        }
        return takes;
    }

    // True if all rows of inputs of this product are of prompts, one number of BF16 each, and their memory has place for them
    // as pieces
    bool takes_pieces(const ggml_tensor * op) const {
        const ggml_tensor * in = op->src[1];
        const layout at(kernel, op);
        return at.is_of_prompts(op) && at.prompt_row == in->ne[0] * sizeof(ggml_bf16_t) && ggml_is_contiguous(in) &&
               GGML_PAD(ggml_nrows(in), TOGETHER) * at.prompt_row <= ggml_nbytes(in);
    }

    // A product whose inputs are pieces already
    void of_pieces(const ggml_compute_params * params, ggml_tensor * op) const {
        dense(params, op, op, {}, (const char *) op->src[1]->data);
    }

  private:
    static constexpr int GROUP = 32;         // most rows of an expert at once
    static constexpr int PROMPT_GROUP = 256; // of prompts
    static constexpr int MANY = 128;         // most rows at once
    static constexpr int PASSES = 12;        // kernels take four or six of them at a time
    static constexpr int BLOCK = 128;        // fewest rows that are a thread's own
    static constexpr int STRIP = GGML_WIDE_COLUMNS;
    static constexpr int PANEL = 16;    // strips that rows of both kinds are multiplied with in turn
    static constexpr int PIECE = 64;    // bytes of a row of a prompt
    static constexpr int TOGETHER = 16; // rows of prompts whose pieces alternate

    const ggml_wide_kernel & kernel;

    // Which kernel a row has, and where the working memory of an operation has what, in bytes
    struct layout {
        const ggml_wide_prompts * prompts = nullptr; // nullptr: no row is of a prompt
        const ggml_tensor * marks = nullptr;         // of each token: 1 if it is of a prompt; nullptr: all are
        size_t row;
        size_t prompt_row = 0;
        int64_t group; // most rows of prompts of an expert at once

        size_t rows;
        size_t prompt_rows;
        size_t order[2]; // int32: the rows that are generated, those of prompts
        size_t starts;   // int64: of each expert's entries that are generated, and those of prompts
        size_t entries;  // int64: token * experts of a token + place
        size_t own;      // of the first thread
        size_t own_size;
        // in it, behind the number of its chunks that are taken
        size_t scratch;
        size_t copies; // rows of an expert side by side

        layout(const ggml_wide_kernel & kernel, const ggml_tensor * op) {
            const int64_t k = op->src[1]->ne[0];
            const int64_t n = ggml_nrows(op->src[1]);
            const bool experts = op->op == GGML_OP_MUL_MAT_ID;
            const ggml_tensor * marked = op->src[experts ? 3 : 2];
            if (kernel.prompts && kernel.prompts->takes(k) && (kernel.alike || marked)) {
                prompts = kernel.prompts;
                marks = kernel.alike ? nullptr : marked;
                prompt_row = prompts->row_size(k);
            }
            row = kernel.row_size(k);
            group = std::min<int64_t>(PROMPT_GROUP, GGML_PAD(ggml_nrows(op), TOGETHER));

            size_t end = 0;
            const auto take = [&end](size_t bytes) {
                const size_t at = end;
                end += GGML_PAD(bytes, 64);
                return at;
            };
            rows = take(n * row);
            prompt_rows = take(GGML_PAD(n, TOGETHER) * prompt_row);
            for (size_t & kind : order) {
                kind = take(n * sizeof(int32_t));
            }
            starts = take(experts ? (2 * op->src[0]->ne[2] + 1) * sizeof(int64_t) : 0);
            entries = take(experts ? ggml_nelements(op->src[2]) * sizeof(int64_t) : 0);
            own = take(sizeof(std::atomic<int64_t>));
            size_t most_scratch = kernel.scratch_size(k);
            if (prompts) {
                const int64_t most = experts ? group : std::min<int64_t>(n, GGML_WIDE_PROMPT_ROWS);
                most_scratch = std::max(most_scratch, prompts->scratch_size(k, int(most)));
            }
            scratch = take(most_scratch) - own;
            copies = take(experts ? std::max(GROUP * row, group * prompt_row) : 0) - own;
            own_size = end - own;
        }

        bool is_of_prompts(const ggml_tensor * op) const {
            bool all = prompts;
            for (int64_t i = 0; all && i < ggml_nrows(op); i++) {
                all = is_prompt(i);
            }
            return all;
        }

        bool is_prompt(int64_t token) const { return prompts && (!marks || ((const int32_t *) marks->data)[token]); }
    };

    static char * aligned(void * p) { return (char *) GGML_PAD((uintptr_t) p, 64); }

    static const float * row_of(const ggml_tensor * in, int64_t i) {
        const int64_t i1 = i % in->ne[1];
        const int64_t i2 = i / in->ne[1] % in->ne[2];
        const int64_t i3 = i / in->ne[1] / in->ne[2];
        return (const float *) ((const char *) in->data + i1 * in->nb[1] + i2 * in->nb[2] + i3 * in->nb[3]);
    }

    // Most rows of a group, which stay in the second level cache
    static int64_t group_size(size_t row) {
        constexpr int64_t kept = 5 << 16; // bytes
        return std::clamp<int64_t>(kept / row, GROUP + PASSES, MANY) / PASSES * PASSES;
    }

    // strips [first, last) of columns for rows [begin, end)
    template <typename ROW_OUT>
    void multiply(int64_t k, const char * weights, size_t strip_size, int64_t first, int64_t last, const char * rows,
                  size_t row, int64_t begin, int64_t end, char * scratch, ROW_OUT && row_out) const {
        constexpr int64_t kept = 1 << 19; // bytes of weights that stay in the second level cache for all rows
        const int64_t panel = end - begin <= GROUP ? last - first : std::max<int64_t>(4, kept / strip_size / 4 * 4);
        const int64_t group = group_size(row);
        for (int64_t s = first; s < last; s += panel) {
            for (int64_t r = begin; r < end; r += group) {
                const int64_t count = std::min(group, end - r);
                float * out[MANY];
                for (int64_t i = 0; i < count; i++) {
                    out[i] = row_out(r + i) + s * STRIP;
                }
                kernel.multiply(k, weights + s * strip_size, int(std::min(panel, last - s)), rows + r * row, row,
                                int(count), out, scratch);
            }
        }
    }

    // strips [first, last) of columns for rows of prompts. `row_out` returns where a row's results go from a column on.
    template <typename ROW_OUT>
    void multiply_prompts(int64_t k, const char * weights, const ggml_wide_ups & ups, size_t strip_size, int64_t first,
                          int64_t last, const char * rows, size_t row, int64_t n, char * scratch,
                          ROW_OUT && row_out) const {
        const ggml_wide_ups at = { ups.weights ? ups.weights + first * strip_size : nullptr, ups.pieces };
        for (int64_t r = 0; r < n; r += GGML_WIDE_PROMPT_ROWS) {
            const int64_t count = std::min<int64_t>(GGML_WIDE_PROMPT_ROWS, n - r);
            float * out[GGML_WIDE_PROMPT_ROWS];
            for (int64_t i = 0; i < count; i++) {
                out[i] = row_out(r + i, first * STRIP);
            }
            kernel.prompts->multiply(k, weights + first * strip_size, at, int(last - first), rows + r * row, int(count),
                                     out, scratch);
        }
    }

    // The products of `op` go to `to`, or, with `ups`, the SwiGLU of them and of the products with these weights. `pieces`:
    // nullptr, or all of the inputs as pieces.
    void dense(const ggml_compute_params * params, const ggml_tensor * op, ggml_tensor * to,
               const ggml_wide_ups & ups = {}, const char * pieces = nullptr) const {
        const ggml_tensor * weights = op->src[0];
        const ggml_tensor * in = op->src[1];
        const int64_t k = in->ne[0];
        const layout at(kernel, op);
        char * memory = aligned(params->wdata);
        const auto own = [&](int64_t thread) { return memory + at.own + thread * at.own_size; };
        char * scratch = own(params->ith) + at.scratch;
        int32_t * order[2] = { (int32_t *) (memory + at.order[0]), (int32_t *) (memory + at.order[1]) };
        int64_t n[2] = { 0, 0 };
        const int64_t own_begin = ggml_nrows(in) * params->ith / params->nth;
        const int64_t own_end = ggml_nrows(in) * (params->ith + 1) / params->nth;
        for (int64_t i = 0; i < ggml_nrows(in); i++) {
            const bool is_prompt = at.is_prompt(i);
            const int64_t place = n[is_prompt]++;
            if (i < own_begin || i >= own_end) {
                continue;
            }
            order[is_prompt][place] = int32_t(i);
            if (pieces) {
                continue;
            }
            if (is_prompt) {
                kernel.prompts->put(row_of(in, i), piece_of(memory + at.prompt_rows, place, at.prompt_row), k,
                                    TOGETHER * PIECE);
            } else {
                kernel.quantize(row_of(in, i), memory + at.rows + place * at.row, k);
            }
        }

        // A chunk is a part of the pairs of strips for a group of rows. Where rows are many, a thread has a block of its own,
        // which other operations give it, too: what one thread writes and another one reads takes long between cores that
        // share no cache. All groups of a block have a part's weights in turn, while these are in the third level cache. A
        // thread computes chunks that lie side by side, because it prefetches the next weights; then it takes chunks that
        // are left of other threads' shares. The last chunk of a thread may leave the others waiting, so chunks are small:
        // with four for each thread, one of two threads had 10 of the 18 pairs of a matrix of 576 columns. Rows of prompts
        // stay in the second level cache for all strips of a chunk, so their chunks have more strips.
        const int64_t strips = weights->ne[1] / STRIP;
        const int64_t pairs = (strips + 1) / 2;
        const int64_t blocks = n[1] ? 1 : std::clamp<int64_t>(n[0] / BLOCK, 1, params->nth);
        const int64_t most = (n[0] + blocks - 1) / blocks;                                      // rows of a block
        const int64_t groups = n[1] ? 1 : (most + group_size(at.row) - 1) / group_size(at.row); // of a block
        const int64_t group = n[1] ? n[0] : GGML_PAD((most + groups - 1) / groups, PASSES);
        const int64_t wanted = params->nth == 1 ? 1 : params->nth * (n[1] > 64 ? 2 : 16);
        const int64_t parts = std::min(pairs, (wanted + blocks * groups - 1) / (blocks * groups));
        const int64_t chunks = blocks * parts * groups;
        new (own(params->ith)) std::atomic<int64_t>(0);
        ggml_barrier(params->threadpool);

        const size_t strip_size = STRIP * weights->nb[1];
        const auto multiply_chunk = [&](int64_t chunk) {
            const int64_t part = chunk / groups % parts;
            const int64_t block = chunk / groups / parts;
            const int64_t end_of_block = n[0] * (block + 1) / blocks;
            const int64_t begin = std::min(n[0] * block / blocks + group * (chunk % groups), end_of_block);
            const int64_t until = std::min(begin + group, end_of_block);
            const int64_t first = 2 * (pairs * part / parts);
            const int64_t last = std::min(strips, 2 * (pairs * (part + 1) / parts));
            for (int64_t s = first; s < last;
                 s += n[0] && n[1] ? PANEL : last) { // both kinds while the weights are there
                const int64_t end = n[0] && n[1] ? std::min<int64_t>(s + PANEL, last) : last;
                if (n[0]) {
                    multiply(k, (const char *) weights->data, strip_size, s, end, memory + at.rows, at.row, begin,
                             until, scratch, [&](int64_t i) { return row_out(to, order[0][i]); });
                }
                if (n[1]) {
                    const auto out = [&](int64_t i, int64_t column) {
                        constexpr size_t number = sizeof(ggml_bf16_t);
                        char * piece = piece_of((char *) to->data, i, number * to->ne[0]) + number * column * TOGETHER;
                        return ups.pieces ? (float *) piece : row_out(to, order[1][i]) + column;
                    };
                    multiply_prompts(k, (const char *) weights->data, ups, strip_size, s, end,
                                     pieces ? pieces : memory + at.prompt_rows, at.prompt_row, n[1], scratch, out);
                }
            }
        };
        for (int i = 0; i < params->nth; i++) {
            const int64_t thread = (params->ith + i) % params->nth;
            const int64_t first = chunks * thread / params->nth;
            const int64_t last = chunks * (thread + 1) / params->nth;
            auto & taken = *(std::atomic<int64_t> *) own(thread);
            for (int64_t chunk; (chunk = first + taken.fetch_add(1)) < last;) {
                multiply_chunk(chunk);
            }
        }
    }

    // The first piece of a row of prompts, of `row` bytes
    static char * piece_of(char * rows, int64_t i, size_t row) {
        return rows + i / TOGETHER * TOGETHER * row + i % TOGETHER * PIECE;
    }

    static float * row_out(const ggml_tensor * op, int64_t i) {
        const int64_t i1 = i % op->ne[1];
        const int64_t i2 = i / op->ne[1] % op->ne[2];
        const int64_t i3 = i / op->ne[1] / op->ne[2];
        return (float *) ((char *) op->data + i1 * op->nb[1] + i2 * op->nb[2] + i3 * op->nb[3]);
    }

    void experts(ggml_compute_params * params, ggml_tensor * op) const {
        const ggml_tensor * weights = op->src[0];
        const ggml_tensor * in = op->src[1];
        const ggml_tensor * ids = op->src[2]; // (experts of a token, tokens)
        const int64_t k = in->ne[0];
        const int64_t n_experts = weights->ne[2];
        const layout at(kernel, op);
        GGML_ASSERT(in->ne[2] == ids->ne[1] && in->ne[3] == 1 && op->ne[3] == 1);
        char * memory = aligned(params->wdata);
        char * rows = memory + at.rows;
        char * prompt_rows = memory + at.prompt_rows;
        int64_t * starts = (int64_t *) (memory + at.starts);
        int64_t * entries = (int64_t *) (memory + at.entries);
        char * own = memory + at.own + params->ith * at.own_size;
        char * scratch = own + at.scratch;
        char * copies = own + at.copies;
        for (int64_t i = params->ith; i < ggml_nrows(in); i += params->nth) {
            if (at.is_prompt(i / in->ne[1])) {
                kernel.prompts->put(row_of(in, i), prompt_rows + i * at.prompt_row, k, PIECE);
            } else {
                kernel.quantize(row_of(in, i), rows + i * at.row, k);
            }
        }
        if (params->ith == 0) {
            group(at, ids, n_experts, starts, entries);
        }
        ggml_barrier(params->threadpool);

        const int64_t strips = weights->ne[1] / STRIP;
        const int64_t first = strips * params->ith / params->nth;
        const int64_t last = strips * (params->ith + 1) / params->nth;
        const size_t strip_size = STRIP * weights->nb[1];
        for (int64_t e = 0; e < 2 * n_experts; e++) {
            const bool is_prompt = e % 2;
            const int64_t most = is_prompt ? at.group : GROUP;
            for (int64_t from = starts[e]; from < starts[e + 1]; from += most) {
                const int64_t count = std::min(most, starts[e + 1] - from);
                for (int64_t i = 0; i < count; i++) {
                    const int64_t token = entries[from + i] / ids->ne[0];
                    const int64_t place = entries[from + i] % ids->ne[0];
                    const int64_t source = token * in->ne[1] + place % in->ne[1];
                    if (is_prompt) {
                        char * to = piece_of(copies, i, at.prompt_row);
                        for (size_t piece = 0; piece < at.prompt_row / PIECE; piece++) {
                            memcpy(to + piece * TOGETHER * PIECE, prompt_rows + source * at.prompt_row + piece * PIECE,
                                   PIECE);
                        }
                    } else {
                        memcpy(copies + i * at.row, rows + source * at.row, at.row);
                    }
                }
                const char * of_expert = (const char *) weights->data + e / 2 * weights->nb[2];
                const auto out = [&](int64_t i, int64_t column = 0) {
                    const int64_t token = entries[from + i] / ids->ne[0];
                    const int64_t place = entries[from + i] % ids->ne[0];
                    return (float *) ((char *) op->data + place * op->nb[1] + token * op->nb[2]) + column;
                };
                if (is_prompt) {
                    multiply_prompts(k, of_expert, {}, strip_size, first, last, copies, at.prompt_row, count, scratch,
                                     out);
                } else {
                    multiply(k, of_expert, strip_size, first, last, copies, at.row, 0, count, scratch, out);
                }
            }
        }
    }

    // entries of ids by expert, and whether they are of a prompt, in their order
    static void group(const layout & at, const ggml_tensor * ids, int64_t n_experts, int64_t * starts,
                      int64_t * entries) {
        const auto group_of = [&](int64_t entry) {
            const int64_t token = entry / ids->ne[0];
            const char * p = (const char *) ids->data + token * ids->nb[1] + entry % ids->ne[0] * ids->nb[0];
            const int64_t expert = *(const int32_t *) p;
            GGML_ASSERT(expert >= 0 && expert < n_experts);
            return 2 * expert + at.is_prompt(token);
        };
        memset(starts, 0, (2 * n_experts + 1) * sizeof(int64_t));
        for (int64_t i = 0; i < ggml_nelements(ids); i++) {
            starts[group_of(i) + 1]++;
        }
        for (int64_t g = 0; g < 2 * n_experts; g++) {
            starts[g + 1] += starts[g];
        }
        for (int64_t i = 0; i < ggml_nelements(ids); i++) {
            entries[starts[group_of(i)]++] = i;
        }
        memmove(starts + 1, starts, 2 * n_experts * sizeof(int64_t)); // each has moved to its end, the next one's start
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

// Computes operations of a graph from `i` on at once: two products, and the SwiGLU of both, whose results become pieces if a
// third product alone reads them, which follows at once. Returns how many, or 0, and does nothing then.
template <typename BASE> int wide_swiglu(const ggml_compute_params * params, const ggml_cgraph * graph, int i) {
    const ggml_op ops[] = { GGML_OP_MUL_MAT, GGML_OP_MUL_MAT, GGML_OP_GLU, GGML_OP_MUL_MAT };
    const auto is_one = [&](int n) {
        const int end = i + n - 1;
        return ggml_can_fuse_subgraph(graph, i, n, ops, &end, 1);
    };
    const auto traits_of = [](const ggml_tensor * op) -> const wide_traits<BASE> * {
        const auto * traits = wide_traits_of<BASE>(op->src[0]); // nullptr: other weights, or in another buffer
        return traits == op->src[0]->extra ? static_cast<const wide_traits<BASE> *>(traits) : nullptr;
    };
    const bool has_next = is_one(4);
    if (!has_next && !is_one(3)) {
        return 0;
    }
    ggml_tensor * const * nodes = graph->nodes + i;
    const bool is_gate = nodes[2]->src[0] == nodes[0];
    const ggml_tensor * gate = nodes[!is_gate];
    const ggml_tensor * up = nodes[is_gate];
    const auto * traits = traits_of(gate);
    if (ggml_get_glu_op(nodes[2]) != GGML_GLU_OP_SWIGLU || nodes[2]->src[0] != gate || nodes[2]->src[1] != up ||
        !traits || traits_of(up) != traits) {
        return 0;
    }
    const auto * next =
        has_next && nodes[3]->src[1] == nodes[2] && nodes[3]->src[2] == gate->src[2] ? traits_of(nodes[3]) : nullptr;
    const bool pieces = next && next->takes_pieces(nodes[3]);
    if (!traits->swiglu(params, gate, up, nodes[2], pieces)) {
        return 0;
    }
    if (pieces) {
        ggml_barrier(params->threadpool);
        next->of_pieces(params, nodes[3]);
    }
    return pieces ? 4 : 3;
}
