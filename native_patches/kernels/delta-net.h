// GATED_DELTA_NET by rows of the state. A row needs no other one, so it stays in registers for a block of tokens: the
// state is read once and written once, where llama.cpp's own loop goes over it five times for each token.
//
// The order of sums is the same for any number of tokens and sequences, so a row of a text has the same bits in any
// company, and in prompts of any chunks.

#pragma once

#include "ggml-cpu-impl.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#if defined(__GNUC__)

namespace delta_net {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
constexpr int R = 2;      // rows side by side: one alone waits for its sums
constexpr int BLOCK = 16; // tokens
constexpr int MOST = 128; // elements of a row

typedef float lanes __attribute__((vector_size(LANES * sizeof(float))));

static inline lanes load(const float * p) {
    lanes x;
    memcpy(&x, p, sizeof(x));
    return x;
}

static inline void store(float * p, lanes x) { memcpy(p, &x, sizeof(x)); }

// Halves are added until four are left.
template <int N> static inline float sum_of(const float * x) {
    typedef float half __attribute__((vector_size(N / 2 * sizeof(float))));
    half part[2];
    memcpy(part, x, sizeof(part));
    part[0] += part[1];
    return sum_of<N / 2>((const float *) part);
}

template <> inline float sum_of<4>(const float * x) { return (x[0] + x[2]) + (x[1] + x[3]); }

static inline float sum(lanes x) { return sum_of<LANES>((const float *) &x); }

// The inputs of a head for a block of tokens.
struct tokens {
    int count;
    const float * q[BLOCK];
    const float * k[BLOCK];
    const float * v[BLOCK];
    float * out[BLOCK];
    float * snapshot[BLOCK]; // of the head's state after the token, or nullptr
    float beta[BLOCK];
    float decay[BLOCK];        // of the whole state, or
    float decays[BLOCK][MOST]; // of each column
};

// R rows of N * LANES elements, for a block of tokens.
template <int N, bool COLUMNS>
static void some_rows(const tokens & block, const float * from, float * to, int64_t row, float scale) {
    constexpr int64_t S = N * LANES;
    lanes state[R][N];
    for (int r = 0; r < R; r++) {
        for (int n = 0; n < N; n++) {
            state[r][n] = load(from + (row + r) * S + n * LANES);
        }
    }
    for (int t = 0; t < block.count; t++) {
        lanes known[R][2] = {}; // in two sums, so that each waits less for the one before
        for (int n = 0; n < N; n++) {
            const lanes k = load(block.k[t] + n * LANES);
            const lanes decay = COLUMNS ? load(block.decays[t] + n * LANES) : lanes{} + block.decay[t];
            for (int r = 0; r < R; r++) {
                state[r][n] *= decay;
                known[r][n % 2] += state[r][n] * k;
            }
        }
        float delta[R];
        for (int r = 0; r < R; r++) {
            delta[r] = (block.v[t][row + r] - sum(known[r][0] + known[r][1])) * block.beta[t];
        }
        lanes answer[R] = {};
        for (int n = 0; n < N; n++) {
            const lanes k = load(block.k[t] + n * LANES);
            const lanes q = load(block.q[t] + n * LANES);
            for (int r = 0; r < R; r++) {
                state[r][n] += delta[r] * k;
                answer[r] += state[r][n] * q;
            }
        }
        for (int r = 0; r < R; r++) {
            block.out[t][row + r] = sum(answer[r]) * scale;
            if (block.snapshot[t]) {
                for (int n = 0; n < N; n++) {
                    store(block.snapshot[t] + (row + r) * S + n * LANES, state[r][n]);
                }
            }
        }
    }
    for (int r = 0; r < R; r++) {
        for (int n = 0; n < N; n++) {
            store(to + (row + r) * S + n * LANES, state[r][n]);
        }
    }
}

template <int N> static void all_rows(const tokens & block, const float * from, float * to, bool columns, float scale) {
    for (int64_t row = 0; row < N * LANES; row += R) {
        if (columns) {
            some_rows<N, true>(block, from, to, row, scale);
        } else {
            some_rows<N, false>(block, from, to, row, scale);
        }
    }
}

using rows_fn = void (*)(const tokens &, const float *, float *, bool, float);

static rows_fn rows_of(int64_t size) {
    switch (size) {
        case 16: return all_rows<16 / LANES>;
        case 32: return all_rows<32 / LANES>;
        case 64: return all_rows<64 / LANES>;
        case 128: return all_rows<128 / LANES>;
        default: return nullptr;
    }
}

static const float * at(const ggml_tensor * x, int64_t i1, int64_t i2, int64_t i3) {
    return (const float *) ((const char *) x->data + i1 * x->nb[1] + i2 * x->nb[2] + i3 * x->nb[3]);
}

} // namespace delta_net

// Heads [first, last) of all sequences; false where the size of a head is not known here. op_params: the number of
// states that are written, and 1 where there is one and it is written where it was read.
static bool ggml_delta_net_rows(ggml_tensor * dst, float * scratch, int64_t first, int64_t last) {
    using namespace delta_net;
    const ggml_tensor * q = dst->src[0];
    const ggml_tensor * k = dst->src[1];
    const ggml_tensor * v = dst->src[2];
    const ggml_tensor * g = dst->src[3];
    const ggml_tensor * beta = dst->src[4];
    const ggml_tensor * state = dst->src[5];
    const int64_t size = v->ne[0];
    const int64_t n_heads = v->ne[1];
    const int64_t n_tokens = v->ne[2];
    const int64_t n_seqs = v->ne[3];
    const int64_t n_states = ggml_get_op_params_i32(dst, 0);
    const bool in_place = ggml_get_op_params_i32(dst, 1) != 0;
    const bool columns = g->ne[0] == size;
    const rows_fn rows = rows_of(size);
    if (!rows) {
        GGML_ASSERT(!in_place);
        return false;
    }
    float * written = (float *) dst->data + size * n_heads * n_tokens * n_seqs;
    const float scale = 1.0f / sqrtf((float) size);
    tokens block;
    for (int64_t i = first; i < last; i++) {
        const int64_t head = i % n_heads;
        const int64_t seq = i / n_heads;
        const auto of = [&](const ggml_tensor * x, int64_t t) {
            return at(x, head % x->ne[1], t, seq / (n_seqs / x->ne[3]));
        };
        const auto snapshot = [&](int64_t number) {
            return written + (number * n_seqs + seq) * n_heads * size * size + head * size * size;
        };
        const float * from = at(state, 0, head, seq);
        float * to = in_place ? (float *) from : n_states == 1 ? snapshot(0) : scratch;
        for (int64_t start = 0; start < n_tokens; start += BLOCK) {
            block.count = (int) std::min<int64_t>(BLOCK, n_tokens - start);
            for (int t = 0; t < block.count; t++) {
                const int64_t token = start + t;
                const int64_t number = n_tokens - 1 - token; // of the state after it: 0 is the newest
                block.q[t] = of(q, token);
                block.k[t] = of(k, token);
                block.v[t] = of(v, token);
                block.beta[t] = *of(beta, token);
                block.out[t] = (float *) dst->data + ((seq * n_tokens + token) * n_heads + head) * size;
                block.snapshot[t] = n_states > 1 && number < n_states ? snapshot(number) : nullptr;
                const float * gate = of(g, token);
                block.decay[t] = columns ? 0.0f : expf(gate[0]);
                for (int64_t c = 0; columns && c < size; c++) {
                    block.decays[t][c] = expf(gate[c]);
                }
            }
            rows(block, from, to, columns, scale);
            from = to;
        }
    }
    return true;
}

#else

static bool ggml_delta_net_rows(ggml_tensor * dst, float *, int64_t, int64_t) {
    GGML_ASSERT(ggml_get_op_params_i32(dst, 1) == 0);
    return false;
}

#endif
