// Log probabilities of a row's own tokens: of the logits as they are, before bias, penalties, masks and temperature.
// Included by sampler.cpp; llamabatch/sampling/row_logprobs.py is the same in numpy, to 1e-6.

#pragma once

#include <cmath>
#include <functional>

#include "row.hpp"

namespace {

// The k likeliest tokens in s.picked, as places in s.ids and s.values, the likeliest first.
void pick_likeliest(const Row & row, int k, Scratch & s) {
    float bound = NEVER;
    if (k <= row.n_chunks) { // the k-th largest of the chunks' maxima: at least k tokens reach it
        s.ordered = s.maxima;
        std::nth_element(s.ordered.begin(), s.ordered.begin() + (k - 1), s.ordered.end(), std::greater<float>());
        bound = s.ordered[k - 1];
    }
    const int n = row.collect(bound);
    s.picked.resize(n);
    for (int i = 0; i < n; i++) {
        s.picked[i] = i;
    }
    std::partial_sort(s.picked.begin(), s.picked.begin() + std::min(k, n), s.picked.end(),
                      [&s](int a, int b) { return s.values[a] != s.values[b] ? s.values[a] > s.values[b] : a < b; });
    s.picked.resize(std::min(k, n));
}

// Writes token `chosen` and then the k likeliest to `ids` and `logprobs`; returns how many that are, 0 where the logits
// are no numbers. `rank` is that of the chosen one, 1 for the likeliest; with k < 0 it stays unwritten.
int row_logprobs(const float * x, int n_vocab, int chosen, int k, int32_t * ids, double * logprobs, int32_t * rank,
                 Scratch & s) {
    static const lb_params plain{};
    const int chunk = n_vocab < 4096 || k * 4LL > n_vocab / WIDE ? NARROW : WIDE;
    const Row row(x, n_vocab, chunk, plain, nullptr, nullptr, 0, s);
    if (!row.numbers) {
        return 0;
    }
    const double top = row.top, whole = std::log(sum_exp(x, n_vocab, row.top));
    ids[0] = chosen;
    logprobs[0] = (x[chosen] - top) - whole;
    if (k < 0) {
        return 1;
    }
    *rank = static_cast<int32_t>(1 + count_likelier(x, n_vocab, chosen));
    if (k == 0) {
        return 1;
    }
    pick_likeliest(row, k, s);
    int written = 1;
    for (int i : s.picked) {
        ids[written] = s.ids[i];
        logprobs[written++] = (s.values[i] - top) - whole;
    }
    return written;
}

} // namespace
