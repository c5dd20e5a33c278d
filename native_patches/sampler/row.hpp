// One row of logits, seen through bias, penalties and masks. Included by sampler.cpp.

#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels.hpp"

// The interface. llamabatch/sampling/native.py has the same layout.

extern "C" {
struct lb_params {
    double top_p;      // 1: no cut
    double log_min_p;  // -inf: no cut
    float temperature; // 0: greedy
    float repetition_penalty, presence_penalty, frequency_penalty;
    int32_t top_k;  // 0: no cut
    int32_t n_bias; // each id at most once
    const int32_t * bias_ids;
    const float * biases;
    const uint32_t * allowed; // bit i of word i / 32 allows token i; what lies beyond the words is forbidden. Or null
    int64_t n_allowed_words;
};

struct lb_history { // the distinct tokens of prompt and output, and how often each is in the output
    const int32_t * ids;
    const int32_t * counts;
    int64_t n;
};
}

namespace {

// Memory that a thread keeps, as large as the largest vocabulary needs it.
struct Scratch {
    int64_t room = 0;
    std::unique_ptr<float[]> values; // candidates, in order of their ids
    std::unique_ptr<int32_t[]> ids;
    std::unique_ptr<double[]> weights;
    std::vector<float> maxima, ordered;
    std::vector<uint8_t> states;
    std::vector<int32_t> starts, edits, picked;
    std::vector<double> sums;
    std::vector<int16_t> buckets;

    void reserve(int64_t n) {
        if (n <= room) {
            return;
        }
        values.reset(new float[n]);
        ids.reset(new int32_t[n]);
        weights.reset(new double[n]);
        room = n;
    }
};

enum : uint8_t { PLAIN, EDITED, EMPTY };

// A row cut into chunks, seen through bias, penalties and masks. Chunks that none of these touches are read in place.
class Row {
  public:
    Row(const float * logits, int n, int chunk, const lb_params & p, const lb_history * history, const uint32_t * mask,
        int64_t n_mask_words, Scratch & s)
        : n_chunks((n + chunk - 1) / chunk), chunk(chunk), top(NEVER), x(logits), n(n), p(p), history(history),
          mask(mask), n_mask_words(n_mask_words), s(s) {
        s.maxima.resize(n_chunks);
        s.states.assign(n_chunks, PLAIN);
        const int whole = n / chunk;
        numbers = chunk_maxima(x, whole, chunk, s.maxima.data());
        for (int i = whole * chunk; i < n; i++) {
            numbers = numbers && x[i] <= FLT_MAX;
        }
        if (whole < n_chunks) {
            s.states[whole] = EDITED; // to be filled up with -inf
        }
        if (mask || p.allowed) {
            find_masked();
        }
        sort_edits();
        float buffer[WIDE];
        for (int c = 0; c < n_chunks; c++) {
            if (s.states[c] != PLAIN) {
                s.maxima[c] = s.states[c] == EMPTY ? NEVER : largest(view(c, buffer));
            }
            top = s.maxima[c] > top ? s.maxima[c] : top;
        }
        numbers = numbers && top > NEVER && top <= FLT_MAX;
    }

    // The values of a chunk: those in place, or edited ones in `buffer`.
    const float * view(int c, float * buffer) const {
        const int first = c * chunk, last = std::min(first + chunk, n);
        if (s.states[c] == PLAIN) {
            return x + first;
        }
        std::fill(std::copy(x + first, x + last, buffer), buffer + chunk, NEVER);
        for (int e = n_edits ? s.starts[c] : 0, end = n_edits ? s.starts[c + 1] : 0; e < end; e++) {
            edit(s.edits[e], buffer);
        }
        if (mask || p.allowed) {
            for (int i = 0; i < chunk; i += 32) {
                for (uint32_t closed = ~allowed_bits(first + i), j = 0; j < 32 && i + static_cast<int>(j) < chunk;
                     j++) {
                    if (closed >> j & 1) {
                        buffer[i + j] = NEVER;
                    }
                }
            }
        }
        return buffer;
    }

    int greedy() const {
        int c = 0;
        while (s.maxima[c] != top) {
            c++;
        }
        float buffer[WIDE];
        const float * values = view(c, buffer);
        return c * chunk + static_cast<int>(std::find(values, values + chunk, top) - values);
    }

    // All tokens from `bound` on (never -inf), with their values, in order of their ids; returns how many.
    int collect(float bound) const {
        bound = std::max(bound, -FLT_MAX);
        s.reserve(static_cast<int64_t>(n_chunks) * chunk);
        float buffer[WIDE];
        int64_t found = 0;
        for (int c = 0; c < n_chunks; c++) {
            if (s.maxima[c] >= bound) {
                found += select_from(view(c, buffer), chunk, bound, c * chunk, &s.values[found], &s.ids[found]);
            }
        }
        return static_cast<int>(found);
    }

    // The sum of all weights, with that of each chunk in s.sums.
    double sum_all(float coldness) const {
        s.sums.resize(n_chunks);
        float buffer[WIDE];
        for (int c = 0, end; c < n_chunks; c = end) { // chunks in a row that are read in place go together
            for (end = c + 1; s.states[c] == PLAIN && end < n_chunks && s.states[end] == PLAIN; end++) {
            }
            if (s.states[c] == EMPTY) {
                s.sums[c] = 0;
            } else {
                chunk_sums(view(c, buffer), end - c, chunk, top, coldness, &s.sums[c]);
            }
        }
        return sum_of(s.sums.data(), n_chunks);
    }

    int n_chunks, chunk;
    float top;    // the largest value
    bool numbers; // no NaN, no +inf, and at least one finite value

  private:
    float largest(const float * values) const { return *std::max_element(values, values + chunk); }

    uint32_t allowed_bits(int i) const { // 32 tokens from i on; i is a multiple of a chunk
        const int64_t word = i / 32;
        uint32_t bits = ~0u;
        if (mask) {
            bits &= word < n_mask_words ? mask[word] : 0;
        }
        if (p.allowed) {
            bits &= word < p.n_allowed_words ? p.allowed[word] : 0;
        }
        return bits >> (i % 32);
    }

    void find_masked() {
        const uint32_t full = chunk >= 32 ? ~0u : (1u << chunk) - 1;
        for (int c = 0; c < n_chunks; c++) {
            uint32_t any = 0, all = full;
            for (int i = 0; i < chunk; i += 32) {
                const uint32_t bits = allowed_bits(c * chunk + i) & full;
                any |= bits;
                all &= bits;
            }
            if (all != full) {
                s.states[c] = any ? EDITED : EMPTY;
            }
        }
    }

    bool penalised() const {
        return history && (p.repetition_penalty != 1 || p.presence_penalty != 0 || p.frequency_penalty != 0);
    }

    int32_t edited_id(int e) const { return e < p.n_bias ? p.bias_ids[e] : history->ids[e - p.n_bias]; }

    bool in_vocabulary(int e) const { return static_cast<uint32_t>(edited_id(e)) < static_cast<uint32_t>(n); }

    // Edits by chunk, biases before penalties: a counting sort, so that the work grows with the edits alone.
    void sort_edits() {
        n_edits = p.n_bias + (penalised() ? static_cast<int>(history->n) : 0);
        if (!n_edits) {
            return;
        }
        s.starts.assign(n_chunks + 2, 0);
        s.edits.resize(n_edits);
        for (int e = 0; e < n_edits; e++) {
            if (in_vocabulary(e)) {
                s.starts[edited_id(e) / chunk + 2]++;
            }
        }
        for (int c = 0; c < n_chunks; c++) {
            if (s.starts[c + 2] && s.states[c] == PLAIN) {
                s.states[c] = EDITED;
            }
            s.starts[c + 2] += s.starts[c + 1];
        }
        for (int e = 0; e < n_edits; e++) {
            if (in_vocabulary(e)) {
                s.edits[s.starts[edited_id(e) / chunk + 1]++] = e;
            }
        }
    }

    void edit(int e, float * buffer) const {
        float & value = buffer[edited_id(e) % chunk];
        if (e < p.n_bias) {
            value += p.biases[e];
            return;
        }
        const int count = history->counts[e - p.n_bias];
        if (p.repetition_penalty != 1) {
            value = value > 0 ? value / p.repetition_penalty : value * p.repetition_penalty;
        }
        if (count > 0) {
            value -= static_cast<float>(count) * p.frequency_penalty;
            value -= p.presence_penalty;
        }
    }

    const float * x;
    int n, n_edits = 0;
    const lb_params & p;
    const lb_history * history;
    const uint32_t * mask;
    int64_t n_mask_words;
    Scratch & s;
};

} // namespace
